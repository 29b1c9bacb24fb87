//! `reencrypt`: moves what is under an older key of the operator to the newest one (L-9).

use super::{database, migrate};
use crate::config::Config;
use crate::lifecycle::reencrypt::reencrypt;
use crate::vault::Vault;
use clap::Args;

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  CREDENTIALS_KEYS=2026-12:$NEW,2026-01:$OLD reconvene reencrypt
  reconvene reencrypt --json

To replace a key: put the new one first in credentials.keys and keep the old one behind it, restart every
process, run this, then remove the old one. Safe to run while the service works, and to repeat. Exit code 1
if something could not be read; it is left as it was.")]
pub struct ReencryptArgs {
    /// Print {"moved":...,"unreadable":{reason:number}}
    #[arg(long)]
    json: bool,
}

pub async fn run(mut config: Config, args: ReencryptArgs) -> anyhow::Result<()> {
    database::settle_operator_key(&mut config)?;
    let database = database::open_database(&config).await?;
    let outcome = async {
        migrate::settle(&database).await?;
        let vault = Vault::from_config(&config.credentials);
        anyhow::Ok(reencrypt(&database.pool, &vault).await?)
    };
    let outcome = outcome.await;
    database.close().await?;
    let done = outcome?;
    match args.json {
        true => {
            super::print(serde_json::json!({ "moved": done.moved, "unreadable": done.unreadable }))?
        }
        false => super::print(format_args!(
            "{} values moved to the newest key",
            done.moved
        ))?,
    }
    let reasons: Vec<String> = done
        .unreadable
        .iter()
        .map(|(reason, number)| format!("{number} could not be read: {reason}"))
        .collect();
    match reasons.is_empty() {
        true => Ok(()),
        false => anyhow::bail!(reasons.join("; ")),
    }
}
