//! `flags`: the operators' switches from the command line, for whoever has the database but no token.

use super::{UsageError, database, migrate};
use crate::api::flags::{view, views};
use crate::config::Config;
use crate::domain::flag::Flag;
use crate::lifecycle::set_flag::{SetFlagError, set_flag};
use crate::store::flags;
use clap::{Args, Subcommand};
use serde_json::Value;

#[derive(Subcommand, Debug)]
pub enum FlagsCommand {
    /// Show every flag with its value, its default and who changed it
    List(ListArgs),
    /// Set a flag; every process follows within two seconds
    Set(SetArgs),
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  reconvene flags list
  reconvene flags list --json")]
pub struct ListArgs {
    /// Print {"items":[...],"next_cursor":null}, as GET /api/admin/runtime-flags does
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  reconvene flags set batch_fanout.enabled true
  reconvene flags set batch_fanout.enabled false --subject ada --json")]
pub struct SetArgs {
    /// Which flag; `reconvene flags list` shows all
    key: String,
    /// The value as JSON: true or false
    value: String,
    /// Who changes it
    #[arg(long, default_value = "command-line", value_name = "NAME")]
    subject: String,
    /// Print the flag as PUT /api/admin/runtime-flags/{key} does
    #[arg(long)]
    json: bool,
}

pub async fn run(config: &Config, command: FlagsCommand) -> anyhow::Result<()> {
    match command {
        FlagsCommand::List(args) => list(config, args).await,
        FlagsCommand::Set(args) => set(config, args).await,
    }
}

async fn list(config: &Config, args: ListArgs) -> anyhow::Result<()> {
    let database = database::open_database(config).await?;
    let found = async {
        migrate::settle(&database).await?;
        anyhow::Ok(flags::list(&database.pool).await?)
    };
    let found = found.await;
    database.close().await?;
    let flags = views(found?);
    if args.json {
        return super::print(serde_json::json!({ "items": flags, "next_cursor": null }));
    }
    for flag in flags {
        let changed = match (&flag.changed_by, flag.changed_at) {
            (Some(by), Some(at)) => {
                format!("set by {by} at {}", at.format("%Y-%m-%d %H:%M:%S UTC"))
            }
            _ => "never set".to_owned(),
        };
        super::print(format_args!(
            "{} = {} ({}, default {}; {changed})\n    {}",
            flag.key, flag.value, flag.kind, flag.default, flag.description
        ))?;
    }
    Ok(())
}

async fn set(config: &Config, args: SetArgs) -> anyhow::Result<()> {
    // Wrong usage shows before a database is opened.
    let flag = Flag::by_key(&args.key).ok_or_else(|| {
        let keys = Flag::ALL.map(|flag| flag.info().key).join(", ");
        UsageError(format!("there is no flag `{}`; there is {keys}", args.key))
    })?;
    let wrong = |reason: &str| UsageError(format!("the value of {} {reason}", args.key));
    let value: Value =
        serde_json::from_str(&args.value).unwrap_or(Value::String(args.value.clone()));
    flag.info().kind.check(&value).map_err(wrong)?;
    if args.subject.trim().is_empty() {
        return Err(UsageError("--subject must not be empty".into()).into());
    }
    let database = database::open_database(config).await?;
    let outcome = async {
        migrate::settle(&database).await?;
        set_flag(&database.pool, flag, &value, &args.subject, None)
            .await
            .map_err(|error| match error {
                SetFlagError::WrongType(reason) => wrong(reason).into(),
                SetFlagError::Store(_) => anyhow::Error::new(error),
            })
    };
    let outcome = outcome.await;
    database.close().await?;
    let flag = view(flag, Some(outcome?));
    match args.json {
        true => super::print(serde_json::json!(flag)),
        false => super::print(format_args!("{} = {}", flag.key, flag.value)),
    }
}
