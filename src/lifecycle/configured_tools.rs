//! Configured tools: made, edited, deleted. One transaction each; an edit names the revision it was made from (H-47).
//!
//! Whatever a tool names must be there and within reach of its workspace when it is saved: its agent, its credentials,
//! and the agents of its allowlist. What is on the allowlist already may have gone since, and stays.

use crate::domain::agent::InvalidDefinition;
use crate::domain::configured_tool::{Base, ConfiguredTool};
use crate::domain::ids::{AgentId, ConfiguredToolId, WorkspaceId};
use crate::store::configured_tools::{self, Stored};
use crate::store::{self, agents};
use serde_json::Value;
use sqlx::{PgConnection, PgPool};

/// In one workspace; a list of all of them fits one answer.
pub const TOOLS_MAX: i64 = 500;

#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// The tool, or something that it names.
    #[error("there is no such thing in this workspace")]
    NotFound,
    /// Somebody else has written since; `current` is the newest revision.
    #[error("the tool is at revision {current} by now")]
    Stale { current: i64 },
    #[error("the name is taken")]
    NameTaken,
    #[error("the workspace has {TOOLS_MAX} configured tools already")]
    TooMany,
    #[error(transparent)]
    Invalid(#[from] InvalidDefinition),
    #[error(transparent)]
    Store(store::Error),
}

impl From<store::Error> for EditError {
    fn from(error: store::Error) -> Self {
        match error.constraint() {
            Some("configured_tools_name_key") => EditError::NameTaken,
            Some("configured_tools_agent_fkey" | "configured_tool_credentials_credential_fkey") => {
                EditError::NotFound
            }
            _ => EditError::Store(error),
        }
    }
}

impl From<sqlx::Error> for EditError {
    fn from(error: sqlx::Error) -> Self {
        store::Error::from(error).into()
    }
}

pub async fn create(
    pool: &PgPool,
    workspace: WorkspaceId,
    tool: &ConfiguredTool,
) -> Result<Stored, EditError> {
    let mut tx = store::begin(pool).await?;
    let id = ConfiguredToolId::new();
    check_agents(&mut tx, workspace, tool, None).await?;
    if !configured_tools::insert_below(&mut tx, workspace, id, tool, TOOLS_MAX).await? {
        return Err(EditError::TooMany);
    }
    configured_tools::set_credentials_locked(&mut tx, workspace, id, tool).await?;
    let made = existing(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(made)
}

/// Changes the tool by a JSON merge patch made from `revision`.
pub async fn patch(
    pool: &PgPool,
    workspace: WorkspaceId,
    id: ConfiguredToolId,
    revision: i64,
    patch: &Value,
    bases: &[Base],
) -> Result<Stored, EditError> {
    let mut tx = store::begin(pool).await?;
    lock_at(&mut tx, workspace, id, Some(revision)).await?;
    let before = existing(&mut tx, workspace, id).await?;
    let tool = before.tool.patched(patch, bases)?;
    check_agents(&mut tx, workspace, &tool, Some(&before.tool)).await?;
    if !configured_tools::save_if_revision(&mut tx, workspace, id, revision, &tool).await? {
        return Err(EditError::Stale {
            current: before.revision,
        });
    }
    configured_tools::set_credentials_locked(&mut tx, workspace, id, &tool).await?;
    let changed = existing(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(changed)
}

/// Agents that list it go on without it.
pub async fn delete(
    pool: &PgPool,
    workspace: WorkspaceId,
    id: ConfiguredToolId,
    revision: Option<i64>,
) -> Result<(), EditError> {
    let mut tx = store::begin(pool).await?;
    lock_at(&mut tx, workspace, id, revision).await?;
    configured_tools::delete_locked(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(())
}

/// The agents that the tool names and did not name `before`: its own one must live in the workspace, those of the
/// allowlist must be ones that a task of the workspace can delegate to.
async fn check_agents(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    tool: &ConfiguredTool,
    before: Option<&ConfiguredTool>,
) -> Result<(), EditError> {
    let scope_before = before.and_then(|tool| tool.agent);
    if let Some(agent) = tool.agent.filter(|agent| Some(*agent) != scope_before) {
        let found = agents::get(conn, workspace, agent).await?;
        found.ok_or(EditError::NotFound)?;
    }
    let known = before
        .map(ConfiguredTool::allowed_agents)
        .unwrap_or_default();
    let new: Vec<(WorkspaceId, AgentId)> = tool
        .allowed_agents()
        .into_iter()
        .filter(|agent| !known.contains(agent))
        .map(|agent| (workspace, agent))
        .collect();
    let found = agents::reachable_names(conn, &new).await?;
    match new.iter().all(|agent| found.contains_key(agent)) {
        true => Ok(()),
        false => Err(EditError::NotFound),
    }
}

async fn lock_at(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ConfiguredToolId,
    revision: Option<i64>,
) -> Result<(), EditError> {
    let current = configured_tools::lock(conn, workspace, id)
        .await?
        .ok_or(EditError::NotFound)?;
    match revision {
        Some(revision) if revision != current => Err(EditError::Stale { current }),
        Some(_) | None => Ok(()),
    }
}

async fn existing(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ConfiguredToolId,
) -> Result<Stored, EditError> {
    let found = configured_tools::get(conn, workspace, id).await?;
    found.ok_or(EditError::NotFound)
}
