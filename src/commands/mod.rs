//! The command line: what can be typed, where logs go, what exit codes mean. Each command is a file.
//!
//! Standard output carries a command's answer and nothing else; logs and errors go to standard error. Flags win over the
//! environment, the environment over the file. No command reads the environment itself: `config` does.

mod backfill_profiles;
pub mod database;
pub mod dev;
pub mod doctor;
mod flags;
mod logging;
pub mod migrate;
mod reencrypt;
pub mod serve;
mod token;
mod workspace;

use crate::config::{self, Config, ConfigError};
use crate::postgres::PostgresError;
use crate::tools;
use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Runs AI-agent tasks: agents delegate, rest, and reconvene with everybody's results.
#[derive(Parser, Debug)]
#[command(name = "reconvene", version, about, after_help = AFTER_HELP, disable_help_subcommand = true)]
struct Cli {
    /// Read settings from FILE [default: config.yaml in the working directory, if there is one]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  reconvene dev                                        see a delegation, then go on by hand
  reconvene serve                                      all roles in one process
  reconvene serve --roles worker                       one more worker on the same database
  DATABASE_URL=postgres://u:p@db/reconvene reconvene migrate
  TOKEN=$(reconvene token --workspace demo --role admin --ttl 8h)

Settings: config.yaml lists all of them. Each is also an environment variable, its path in
capitals with `_`: server.port is SERVER_PORT.

Exit codes:
  0  done; `serve`: ended by SIGTERM or Ctrl-C, while it was starting too
  1  failed; `doctor`: a check failed; `migrate`, `dev`, `backfill-profiles`: stopped before the end
  2  wrong usage or configuration
  3  the database cannot be reached or started
  4  refused because of what exists: no such workspace, or the name is taken";

#[derive(Subcommand, Debug)]
enum Command {
    /// Serve the API, run the orchestrator and the workers
    Serve(ServeArgs),
    /// Bring the database schema up to date
    Migrate(MigrateArgs),
    /// Start with a demo workspace, run one delegation, print its tree and answer, and serve on
    Dev(DevArgs),
    /// Manage workspaces
    #[command(subcommand)]
    Workspace(WorkspaceCommand),
    /// Make an access token; prints the token and nothing else
    Token(token::TokenArgs),
    /// Show and set runtime flags
    #[command(subcommand)]
    Flags(flags::FlagsCommand),
    /// Move stored credentials to the operator's newest key
    Reencrypt(reencrypt::ReencryptArgs),
    /// Have the delegation profiles of a workspace's agents written
    BackfillProfiles(backfill_profiles::BackfillArgs),
    /// Check configuration, database, model and clock, and say what to do
    Doctor(doctor::DoctorArgs),
    /// Interpret the code of one `run_code` call; the worker starts it, nobody else has a use for it
    #[command(
        hide = true,
        after_help = "Examples:\n  none: it speaks with the worker that has started it"
    )]
    Sandbox,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  reconvene serve
  reconvene serve --roles api
  reconvene serve --roles worker,orchestrator
  SERVER_HOST=0.0.0.0 SERVER_PORT=80 reconvene serve

Any number of processes may serve on one database. Without DATABASE_URL the service runs its own
PostgreSQL in DATA_DIR, and processes with the same DATA_DIR share it.")]
struct ServeArgs {
    /// What this process does [default: all of it]
    #[arg(long, value_delimiter = ',', value_name = "ROLE,...", default_values_t = serve::Role::ALL)]
    roles: Vec<serve::Role>,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  reconvene migrate
  DATABASE_URL=postgres://u:p@db/reconvene reconvene migrate --json

Safe to run while the service works, and in several places at once. A table that is locked is
waited for a moment at a time, so that nobody queues up behind the migration.")]
struct MigrateArgs {
    /// Print {"applied":[...],"up_to_date":true}
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  reconvene dev
  reconvene dev --once
  LLM_PROVIDER=openai LLM_MODEL=gpt-5 LLM_API_KEY=sk-... reconvene dev
  LLM_PROVIDER=openai LLM_MODEL=qwen3 LLM_BASE_URL=http://localhost:11434/v1 reconvene dev

Without a model of your own the offline demo model answers; it says so in every answer.")]
struct DevArgs {
    /// End after the demonstration
    #[arg(long)]
    once: bool,
}

#[derive(Subcommand, Debug)]
enum WorkspaceCommand {
    /// Create a workspace with its default agent
    Create(workspace::CreateArgs),
}

/// Wrong usage that only shows after parsing. Exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct UsageError(String);

/// Refused because of what the database holds. Exit code 4.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(String);

/// The whole program.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(err) => {
            // Help and version are answers, and go to standard output with code 0.
            let _ = err.print();
            return ExitCode::from(err.exit_code().clamp(0, 255) as u8);
        }
    };
    // In this process nothing else may be there.
    if let Command::Sandbox = cli.command {
        return tools::run_code::guest::main();
    }
    // Two libraries of ours could bring a TLS backend each; this settles which one is used. It can only fail if it is
    // settled already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();

    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the runtime cannot be started")
        .and_then(|runtime| runtime.block_on(run(cli)));
    match result {
        Ok(code) => code,
        Err(err) => {
            let _ = writeln!(std::io::stderr(), "error: {}", one_line(err.as_ref()));
            ExitCode::from(exit_code(&err))
        }
    }
}

async fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let file = cli.config.or_else(config::file_in_working_directory);
    let config = Config::load(file.as_deref(), config::environment);
    if let Command::Doctor(args) = cli.command {
        return doctor::run(config, file.as_deref(), args).await;
    }
    let config = config?;
    match cli.command {
        Command::Serve(_) | Command::Dev(_) => logging::start(&config.log),
        // Their answer is one line; what the database does on the way is of interest only when asked for.
        _ => logging::start_quietly(&config.log),
    }
    match cli.command {
        Command::Serve(args) => serve::run(config, serve::Roles::of(&args.roles)).await?,
        Command::Dev(args) => dev::run(config, args.once).await?,
        Command::Migrate(args) => migrate::run(&config, args.json).await?,
        Command::Workspace(WorkspaceCommand::Create(args)) => {
            workspace::create(&config, args).await?
        }
        Command::Reencrypt(args) => reencrypt::run(config, args).await?,
        Command::Token(args) => token::run(&config, args).await?,
        Command::Flags(command) => flags::run(&config, command).await?,
        Command::BackfillProfiles(args) => backfill_profiles::run(config, args).await?,
        Command::Doctor(_) | Command::Sandbox => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn exit_code(err: &anyhow::Error) -> u8 {
    for cause in err.chain() {
        if cause.is::<ConfigError>() || cause.is::<UsageError>() {
            return 2;
        }
        if cause.is::<database::DatabaseError>() || cause.is::<PostgresError>() {
            return 3;
        }
        if cause.is::<Refused>() {
            return 4;
        }
    }
    1
}

/// An error and its causes, without those that the one before repeats.
fn one_line(err: &(dyn std::error::Error + 'static)) -> String {
    let mut text = err.to_string();
    let mut cause = err.source();
    while let Some(inner) = cause {
        let words = inner.to_string();
        if !text.ends_with(&words) {
            text = format!("{text}: {words}");
        }
        cause = inner.source();
    }
    text
}

/// Writes a command's answer. A closed pipe is an error, not a panic.
fn print(answer: impl std::fmt::Display) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{answer}").context("standard output is closed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_help_with_examples() {
        // P-30
        fn check(command: &clap::Command) {
            let has_examples = command
                .get_after_help()
                .is_some_and(|help| help.to_string().contains("Examples:"));
            assert!(
                has_examples || command.has_subcommands(),
                "{}",
                command.get_name()
            );
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn exit_codes_follow_the_cause_not_the_context() {
        let config_error = Config::load(Some("/nowhere".as_ref()), |_| None).unwrap_err();
        for (err, code) in [
            (anyhow::Error::new(config_error), 2),
            (anyhow::Error::new(UsageError("no".into())), 2),
            (anyhow::Error::new(PostgresError::NoAccount), 3),
            (anyhow::Error::new(Refused("taken".into())), 4),
            (anyhow::anyhow!("other"), 1),
        ] {
            assert_eq!(exit_code(&err.context("while starting")), code);
        }
    }
}
