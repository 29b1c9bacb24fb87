//! `token`: an access token for one workspace. Standard output is the token and nothing else, so that scripts can take it.

use super::{Refused, UsageError, database, migrate};
use crate::api::auth::{IssueError, Role, issue};
use crate::config::Config;
use crate::store::workspaces;
use clap::Args;
use std::time::Duration;

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  reconvene token --workspace demo --role admin --ttl 8h
  curl -H \"Authorization: Bearer $(reconvene token --workspace demo)\" http://127.0.0.1:8080/api/agents

Only with auth.algorithm HS256; with another one the identity provider makes the tokens.")]
pub struct TokenArgs {
    /// The slug of the workspace that the token is for
    #[arg(long, value_name = "SLUG")]
    workspace: String,
    /// What it allows: member, admin or operator
    #[arg(long, default_value = "member")]
    role: Role,
    /// How long it is valid: a number with s, m, h or d
    #[arg(long, default_value = "1h", value_parser = parse_ttl)]
    ttl: Duration,
    /// Whose token it is
    #[arg(long, default_value = "command-line", value_name = "NAME")]
    subject: String,
}

pub async fn run(config: &Config, args: TokenArgs) -> anyhow::Result<()> {
    let mut config = config.clone();
    database::settle_signing_secret(&mut config)?;
    let database = database::open_database(&config).await?;
    let found = async {
        migrate::settle(&database).await?;
        let mut connection = database.pool.acquire().await?;
        anyhow::Ok(workspaces::by_slug(&mut connection, &args.workspace).await?)
    };
    let found = found.await;
    database.close().await?;

    let slug = &args.workspace;
    let workspace = found?.ok_or_else(|| {
        Refused(format!(
            "there is no workspace `{slug}`; create it: reconvene workspace create --slug {slug} --name NAME"
        ))
    })?;
    let token = issue(
        &config.auth,
        workspace.id,
        &args.subject,
        args.role,
        args.ttl,
    );
    super::print(token.map_err(|err| match err {
        IssueError::NotOurs(_) => UsageError(err.to_string()).into(),
        IssueError::Config(_) | IssueError::Sign(_) => anyhow::Error::new(err),
    })?)
}

/// `90s`, `30m`, `8h`, `7d`: from one second to ten years.
fn parse_ttl(text: &str) -> Result<Duration, String> {
    const TEN_YEARS: u64 = 3660 * 86_400;
    let unit = text.chars().last().unwrap_or_default();
    let number = text.strip_suffix(unit).unwrap_or_default();
    let factor = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return Err("a number with s, m, h or d is expected, such as 30m or 8h".into()),
    };
    match number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(factor))
    {
        Some(seconds @ 1..=TEN_YEARS) => Ok(Duration::from_secs(seconds)),
        Some(_) => Err("from one second to ten years (3660d)".into()),
        None => Err(format!("`{number}` is not a whole number")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ttls() {
        for (text, seconds) in [
            ("90s", Some(90)),
            ("30m", Some(1800)),
            ("8h", Some(28_800)),
            ("7d", Some(604_800)),
            ("0s", None),
            ("4000d", None),
            ("10", None),
            ("h", None),
            ("", None),
            ("-1h", None),
            ("1ü", None),
            ("99999999999999999999d", None),
        ] {
            assert_eq!(
                parse_ttl(text).ok().map(|ttl| ttl.as_secs()),
                seconds,
                "{text}"
            );
        }
    }
}
