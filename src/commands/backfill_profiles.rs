//! `backfill-profiles`: has the delegation profiles of a workspace's agents written.
//!
//! It begins the same job as the API, or joins the one that runs, and works on it itself unless a worker that serves was
//! quicker. Either way it follows it to its end.

use super::serve::Signals;
use super::{Refused, database, migrate};
use crate::config::Config;
use crate::domain::backfill::{BackfillStatus, ProfileStatus};
use crate::domain::ids::{BackfillId, ProcessId, WorkspaceId};
use crate::lifecycle::backfill;
use crate::llm::Models;
use crate::profiles::Profiles;
use crate::prompts::Prompts;
use crate::roster::Assembler;
use crate::runtime::{Causes, Hub, Shutdown};
use crate::store::backfills::{self, Backfill, BackfillAgent};
use crate::store::{self, workspaces};
use clap::Args;
use sqlx::PgPool;
use std::collections::HashSet;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_millis(250);

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  reconvene backfill-profiles --workspace acme
  reconvene backfill-profiles --workspace acme --force --json

A model writes the profiles: delegation_profiles in config.yaml says which. Each agent is told on standard
error when it is done. Exit code 1 if an agent could not be given a profile, or if this was stopped before the
end: a worker that serves goes on then, or the same command.")]
pub struct BackfillArgs {
    /// Whose agents
    #[arg(long, value_name = "SLUG")]
    workspace: String,
    /// Write those anew that are there
    #[arg(long)]
    force: bool,
    /// Print the job with all its agents, as GET /api/agents/delegation-profiles/backfill/{id} does
    #[arg(long)]
    json: bool,
}

pub async fn run(config: Config, args: BackfillArgs) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let models = Models::from_config(&config)?;
    let prompts = Arc::new(Prompts::load(config.prompts_dir.as_deref())?);
    let roster = Arc::new(Assembler::with_base_tools(config.spawn_tasks.max_depth));
    let database = database::open_database(&config).await?;
    let outcome = database.look_after(async {
        migrate::settle(&database).await?;
        let pool = &database.pool;
        let workspace = find(pool, &args.workspace).await?;
        let hub = Hub::new(ProcessId::new());
        let id = backfill::start(pool, &hub, workspace, args.force).await?;
        let profiles = Profiles::new(&config, pool.clone(), models, prompts, roster);
        let shutdown = Shutdown::new();
        let working = async {
            while !shutdown.soft.is_cancelled() {
                if let Err(error) = profiles.backfill_once(&hub, Some(id), &shutdown).await {
                    tracing::warn!(error = %Causes(&error), "the backfill is interrupted");
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        let stopped = async {
            signals.received().await;
            shutdown.hard.cancel();
        };
        tokio::select! {
            ended = follow(pool, workspace, id) => anyhow::Ok(ended?),
            _ = async { tokio::join!(working, stopped) } => anyhow::bail!("stopped before the end"),
        }
    });
    let outcome = outcome.await;
    database.close().await?;
    let (job, agents) = outcome?;
    match args.json {
        true => {
            let mut answer = serde_json::json!(job);
            answer["items"] = serde_json::json!(agents);
            answer["next_cursor"] = serde_json::Value::Null;
            super::print(answer)?;
        }
        false => super::print(format_args!(
            "{} generated, {} skipped, {} failed",
            job.generated, job.skipped, job.failed
        ))?,
    }
    match job.failed {
        0 => Ok(()),
        1 => anyhow::bail!("one agent could not be given a profile"),
        n => anyhow::bail!("{n} agents could not be given a profile"),
    }
}

async fn find(pool: &PgPool, slug: &str) -> anyhow::Result<WorkspaceId> {
    let mut conn = pool.acquire().await?;
    let found = workspaces::by_slug(&mut conn, slug).await?;
    Ok(found
        .ok_or_else(|| Refused(format!("there is no workspace `{slug}`")))?
        .id)
}

/// Tells of each agent when it is done; returns when all are.
async fn follow(
    pool: &PgPool,
    workspace: WorkspaceId,
    id: BackfillId,
) -> Result<(Backfill, Vec<BackfillAgent>), store::Error> {
    let mut told = HashSet::new();
    loop {
        let mut conn = pool.acquire().await?;
        let job = backfills::get(&mut conn, workspace, id).await?;
        let agents = backfills::agents(&mut conn, workspace, id, None, i64::MAX).await?;
        drop(conn);
        for agent in &agents {
            let what = match agent.status {
                ProfileStatus::Pending => continue,
                ProfileStatus::Generated => "generated",
                ProfileStatus::Skipped => "skipped",
                ProfileStatus::Failed => "failed",
            };
            if told.insert(agent.agent_group_id) {
                let reason = agent.reason.as_deref().unwrap_or_default();
                // Who does not read it does not want it.
                let _ = writeln!(std::io::stderr(), "{what:<9} {} {reason}", agent.name);
            }
        }
        if let Some(job) = job.filter(|job| job.status == BackfillStatus::Completed) {
            return Ok((job, agents));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
