//! `dev`: everything in one process, with a demo workspace and one delegation to look at.

use super::serve::{Roles, Service, Signals};
use super::{database, migrate, print};
use crate::api::auth::{self, Role};
use crate::config::Config;
use crate::domain::ids::{TaskId, WorkspaceId};
use crate::domain::text::{MessageText, cut_chars};
use crate::lifecycle::demo::{Demo, seed_demo};
use crate::lifecycle::submit::{NewMessage, Recipient};
use crate::store::{self, task_trees, task_views};
use anyhow::{Context, anyhow};
use sqlx::PgPool;
use std::fmt::Write;
use std::time::Duration;

const MESSAGE: &str = "We want to offer guided walks in our town. Please work on these:
- research what visitors of a small town look for in a guided walk
- write a welcoming announcement of the first walk
- review the plan for anything that could go wrong";

/// Longest wait for the demonstration; a real model may need minutes.
const PATIENCE: Duration = Duration::from_secs(600);

pub async fn run(mut config: Config, once: bool) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    database::settle_signing_secret(&mut config)?;
    database::settle_operator_key(&mut config)?;
    let Some(database) = database::open_database_unless(&config, signals.received()).await? else {
        return Err(stopped());
    };
    let shown = async {
        tokio::select! {
            settled = migrate::settle(&database) => settled?,
            () = signals.received() => return Err(stopped()),
        }
        let demo = seed_demo(&database.pool).await?;
        let signing = config.auth.clone();
        let service = Service::start(config, Roles::ALL, database.pool.clone()).await?;
        let shown = tokio::select! {
            shown = demonstrate(&service, &demo) => shown,
            () = signals.received() => Err(stopped()),
        };
        if once || shown.is_err() {
            service.stop(&mut signals).await;
            return shown;
        }
        let token = auth::issue(&signing, demo.workspace, "dev", Role::Operator, TOKEN_TTL)?;
        print(going_on(&service, &token))?;
        service.run_until_signal(&mut signals).await
    };
    let result = database.look_after(shown).await;
    database.close().await?;
    result
}

fn stopped() -> anyhow::Error {
    anyhow!("stopped before the demonstration had ended")
}

const TOKEN_TTL: Duration = Duration::from_secs(12 * 3600);

async fn demonstrate(service: &Service, demo: &Demo) -> anyhow::Result<()> {
    let submitted = service
        .submitter
        .submit(NewMessage {
            workspace: demo.workspace,
            to: Recipient::DefaultAgent,
            text: MessageText::parse(MESSAGE)?,
            title: None,
            disable_delegation: false,
            skip_wait: false,
            metadata: Default::default(),
            budget: None,
            idempotency: None,
        })
        .await?;
    print(format!("A user asks:\n\n{}\n", indented(MESSAGE)))?;
    let ended = wait_for_end(service, demo.workspace, submitted.task);
    tokio::time::timeout(PATIENCE, ended).await.context(
        "the demonstration has not ended; is the model reachable? Try `reconvene doctor`",
    )??;
    print(tree(&service.pool, demo.workspace, submitted.task).await?)
}

async fn wait_for_end(
    service: &Service,
    workspace: WorkspaceId,
    task: TaskId,
) -> Result<(), store::Error> {
    // Registered before looking, so that no end falls between.
    let mut watch = service.hub.watch(task);
    loop {
        let mut conn = service.pool.acquire().await?;
        let view = task_views::summary(&mut *conn, workspace, task).await?;
        drop(conn);
        if view.is_none_or(|t| t.status.is_terminal()) {
            return Ok(());
        }
        let _ = tokio::time::timeout(Duration::from_secs(1), watch.changed()).await;
    }
}

/// The tree as lines, and the answer that the parent gave at its end.
async fn tree(pool: &PgPool, workspace: WorkspaceId, task: TaskId) -> anyhow::Result<String> {
    let mut conn = pool.acquire().await?;
    let nodes = task_trees::tree(&mut *conn, workspace, task, 1_000).await?;
    let summary = task_views::summary(&mut *conn, workspace, task).await?;
    drop(conn);
    let details = task_views::details(pool, workspace, &[task])
        .await?
        .remove(&task);
    let (summary, details) = summary
        .zip(details)
        .context("the demonstration's task is gone")?;
    let mut text = String::from("Its task tree at the end:\n\n");
    for node in &nodes {
        let time = match node.finished_at {
            Some(end) => format!("{} ms", (end - node.created_at).num_milliseconds()),
            None => "running".into(),
        };
        let branch = match node.depth {
            0 => String::new(),
            depth => format!("{}└─ ", "   ".repeat(depth as usize - 1)),
        };
        let head = shortened(&format!("{branch}{}", node.title), 60);
        let steps = match node.usage.decide_steps {
            1 => "1 decide step".to_owned(),
            n => format!("{n} decide steps"),
        };
        writeln!(
            text,
            "  {head:<61} {:<11} {:<10} {steps}, {time}",
            node.agent_name,
            node.status.as_str(),
        )?;
    }
    match (&details.output, &details.error) {
        (Some(output), _) => write!(text, "\nIts consolidated answer:\n\n{}\n", indented(output))?,
        (None, Some(error)) => anyhow::bail!(
            "the demonstration {}: {}: {}",
            summary.status,
            error.code,
            error.message
        ),
        (None, None) => anyhow::bail!("the demonstration {} without an answer", summary.status),
    }
    Ok(text)
}

fn going_on(service: &Service, token: &str) -> String {
    let address = service.address.map(|a| a.to_string()).unwrap_or_default();
    format!(
        "\
Serving on. API and reference: http://{address}/api/docs

A token for the workspace \"demo\" (operator, 12 hours):

{token}

Try it from a second terminal:

  export TOKEN={token}
  curl -s http://{address}/api/chat/message -H \"Authorization: Bearer $TOKEN\" \\
    -H 'Content-Type: application/json' -d '{{\"message\": \"Please handle: - one thing - another thing\"}}'
  curl -s http://{address}/api/tasks/query -H \"Authorization: Bearer $TOKEN\"

Ctrl-C stops everything."
    )
}

fn shortened(text: &str, chars: usize) -> String {
    match cut_chars(text, chars) {
        cut if cut.len() < text.len() => format!("{cut}…"),
        _ => text.to_owned(),
    }
}

fn indented(text: &str) -> String {
    let lines: Vec<String> = text
        .lines()
        .map(|l| format!("  {l}").trim_end().to_owned())
        .collect();
    lines.join("\n")
}
