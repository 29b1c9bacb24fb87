//! Configured tools: what authors make of base tools.

use super::{Error, column};
use crate::domain::configured_tool::ConfiguredTool;
use crate::domain::ids::{AgentId, ConfiguredToolId, WorkspaceId};
use chrono::{DateTime, Utc};
use serde_json::{Map, Value};
use sqlx::PgConnection;
use sqlx::types::Json;
use std::collections::HashMap;
use uuid::Uuid;

/// A configured tool as its authors see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub id: ConfiguredToolId,
    pub tool: ConfiguredTool,
    /// Grows with every write.
    pub revision: i64,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

struct Row {
    id: ConfiguredToolId,
    name: String,
    base_tool: String,
    description: String,
    agent: Option<AgentId>,
    parameters: Option<Json<Value>>,
    bindings: Json<Map<String, Value>>,
    revision: i64,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

impl From<Row> for Stored {
    fn from(row: Row) -> Self {
        Stored {
            id: row.id,
            tool: ConfiguredTool {
                name: row.name,
                base_tool: row.base_tool,
                description: row.description,
                agent: row.agent,
                parameters: row.parameters.map(|parameters| parameters.0),
                bindings: row.bindings.0,
            },
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        }
    }
}

/// `false` when the workspace has `max` of them already.
pub async fn insert_below(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ConfiguredToolId,
    tool: &ConfiguredTool,
    max: i64,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "insert into configured_tools (workspace_id, id, name, base_tool, description, agent_id, bindings, parameters)
        select $1, $2, $3, $4, $5, $6, $7, $8
        where (select count(*) from configured_tools where workspace_id = $1) < $9",
        workspace.0,
        id.0,
        tool.name,
        tool.base_tool,
        tool.description,
        tool.agent.map(|agent| agent.0),
        Json(&tool.bindings) as _,
        tool.parameters.as_ref().map(Json) as _,
        max
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// `false` when somebody else has written since `revision`.
pub async fn save_if_revision(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ConfiguredToolId,
    revision: i64,
    tool: &ConfiguredTool,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "update configured_tools set name = $4, base_tool = $5, description = $6, agent_id = $7, bindings = $8, parameters = $9,
            revision = revision + 1, updated_at = now()
        where workspace_id = $1 and id = $2 and revision = $3",
        workspace.0,
        id.0,
        revision,
        tool.name,
        tool.base_tool,
        tool.description,
        tool.agent.map(|agent| agent.0),
        Json(&tool.bindings) as _,
        tool.parameters.as_ref().map(Json) as _
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Notes which credentials the tool's bindings name. Needs the tool's lock.
pub async fn set_credentials_locked(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ConfiguredToolId,
    tool: &ConfiguredTool,
) -> Result<(), Error> {
    sqlx::query!(
        "delete from configured_tool_credentials where workspace_id = $1 and configured_tool_id = $2",
        workspace.0,
        id.0
    )
    .execute(&mut *conn)
    .await?;
    sqlx::query!(
        "insert into configured_tool_credentials (workspace_id, configured_tool_id, credential_id)
        select $1, $2, unnest($3::uuid[])",
        workspace.0,
        id.0,
        &column(tool.credentials(), |credential| credential.0)
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Locks the tool against other editors until the transaction ends. Its revision, `None` when it is not there.
pub async fn lock(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ConfiguredToolId,
) -> Result<Option<i64>, Error> {
    let revision = sqlx::query_scalar!(
        "select revision from configured_tools where workspace_id = $1 and id = $2 for no key update",
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?;
    Ok(revision)
}

pub async fn delete_locked(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ConfiguredToolId,
) -> Result<(), Error> {
    sqlx::query!(
        "delete from configured_tools where workspace_id = $1 and id = $2",
        workspace.0,
        id.0
    )
    .execute(conn)
    .await?;
    Ok(())
}

pub async fn get(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ConfiguredToolId,
) -> Result<Option<Stored>, Error> {
    let row = sqlx::query_as!(
        Row,
        r#"select id as "id: ConfiguredToolId", name, base_tool, description, agent_id as "agent: AgentId",
            parameters as "parameters: Json<Value>", bindings as "bindings: Json<Map<String, Value>>", revision, created_at, updated_at
        from configured_tools where workspace_id = $1 and id = $2"#,
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?;
    Ok(row.map(Stored::from))
}

/// At most `limit` tools in order of id, which is the order of creation, beginning after `after`.
pub async fn list(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    after: Option<ConfiguredToolId>,
    limit: i64,
) -> Result<Vec<Stored>, Error> {
    let rows = sqlx::query_as!(
        Row,
        r#"select id as "id: ConfiguredToolId", name, base_tool, description, agent_id as "agent: AgentId",
            parameters as "parameters: Json<Value>", bindings as "bindings: Json<Map<String, Value>>", revision, created_at, updated_at
        from configured_tools where workspace_id = $1 and id > $2 order by id limit $3"#,
        workspace.0,
        after.map_or(Uuid::nil(), |id| id.0),
        limit
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(Stored::from).collect())
}

/// Those of the named tools that are there, whatever agent they are for.
pub async fn named(
    conn: &mut PgConnection,
    names: &[(WorkspaceId, String)],
) -> Result<HashMap<(WorkspaceId, String), ConfiguredTool>, Error> {
    let rows = sqlx::query!(
        r#"select t.workspace_id as "workspace: WorkspaceId", t.name, t.base_tool, t.description,
            t.agent_id as "agent: AgentId", t.parameters as "parameters: Json<Value>",
            t.bindings as "bindings: Json<Map<String, Value>>"
        from unnest($1::uuid[], $2::text[]) as wanted (workspace_id, name)
        join configured_tools t using (workspace_id, name)"#,
        &column(names, |wanted| wanted.0.0),
        &column(names, |wanted| wanted.1.clone())
    )
    .fetch_all(conn)
    .await?;
    let tools = rows.into_iter().map(|row| {
        let key = (row.workspace, row.name.clone());
        let tool = ConfiguredTool {
            name: row.name,
            base_tool: row.base_tool,
            description: row.description,
            agent: row.agent,
            parameters: row.parameters.map(|parameters| parameters.0),
            bindings: row.bindings.0,
        };
        (key, tool)
    });
    Ok(tools.collect())
}
