//! Agents and their versions. `agents.draft` is what authors edit, `agent_versions` is what tasks run and never changes.
//!
//! Only `roster_versions` looks beyond the workspace, at published public agents. Which agent a call may name is asked
//! elsewhere, where tasks are made (`store::tasks::resolve_agents`).

use super::Error;
use crate::domain::agent::{AgentDefinition, Template};
use crate::domain::ids::{AgentId, WorkspaceId};
use crate::domain::task::AgentRef;
use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use sqlx::types::Json;
use std::collections::HashMap;
use uuid::Uuid;

/// Foreign public agents that a roster is chosen from, oldest first: newcomers can not displace those that are in use.
const PUBLIC_AGENTS_MAX: i64 = 2_000;

/// An agent as its authors see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Agent {
    pub id: AgentId,
    pub template: Template,
    pub draft: AgentDefinition,
    /// Grows with every write.
    pub revision: i64,
    pub published_version: Option<i32>,
    /// The draft differs from the published version, or nothing is published yet.
    pub has_unpublished_changes: bool,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

struct Row {
    id: AgentId,
    template: Template,
    draft: Json<AgentDefinition>,
    revision: i64,
    published_version: Option<i32>,
    has_unpublished_changes: bool,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

impl From<Row> for Agent {
    fn from(row: Row) -> Self {
        let Row {
            id,
            template,
            draft,
            revision,
            published_version,
            has_unpublished_changes,
            created_at,
            updated_at,
        } = row;
        Agent {
            id,
            template,
            draft: draft.0,
            revision,
            published_version,
            has_unpublished_changes,
            created_at,
            updated_at,
        }
    }
}

/// At revision 0, to be followed by `publish_locked` or `save_draft_if_revision`, which make it revision 1 in the same
/// transaction. `false` when the id is taken: the agent is already there, perhaps deleted.
pub async fn insert(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: AgentId,
    template: Template,
    draft: &AgentDefinition,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "insert into agents (workspace_id, id, template, name, draft, revision) values ($1, $2, $3, $4, $5, 0)
        on conflict (workspace_id, id) do nothing",
        workspace.0,
        id.0,
        template.as_str(),
        draft.name,
        Json(draft) as _
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

pub async fn get(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: AgentId,
) -> Result<Option<Agent>, Error> {
    let row = sqlx::query_as!(
        Row,
        r#"select a.id as "id: AgentId", a.template as "template: Template", a.draft as "draft: Json<AgentDefinition>",
            a.revision, a.published_version, a.created_at, a.updated_at,
            (v.definition is distinct from a.draft) as "has_unpublished_changes!"
        from agents a
        left join agent_versions v on v.workspace_id = a.workspace_id and v.agent_id = a.id and v.version = a.published_version
        where a.workspace_id = $1 and a.id = $2 and a.deleted_at is null"#,
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?;
    Ok(row.map(Agent::from))
}

/// At most `limit` agents in order of id, which is the order of creation, beginning after `after`.
pub async fn list(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    after: Option<AgentId>,
    limit: i64,
) -> Result<Vec<Agent>, Error> {
    let rows = sqlx::query_as!(
        Row,
        r#"select a.id as "id: AgentId", a.template as "template: Template", a.draft as "draft: Json<AgentDefinition>",
            a.revision, a.published_version, a.created_at, a.updated_at,
            (v.definition is distinct from a.draft) as "has_unpublished_changes!"
        from agents a
        left join agent_versions v on v.workspace_id = a.workspace_id and v.agent_id = a.id and v.version = a.published_version
        where a.workspace_id = $1 and a.id > $2 and a.deleted_at is null
        order by a.id limit $3"#,
        workspace.0,
        after.map_or(Uuid::nil(), |id| id.0),
        limit
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(Agent::from).collect())
}

/// Locks the agent against other editors until the transaction ends; tasks that start on it do not wait.
/// Its revision and template, `None` when it is not there.
pub async fn lock(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: AgentId,
) -> Result<Option<(i64, Template)>, Error> {
    let row = sqlx::query!(
        r#"select revision, template as "template: Template" from agents
        where workspace_id = $1 and id = $2 and deleted_at is null
        for no key update"#,
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?;
    Ok(row.map(|row| (row.revision, row.template)))
}

/// `false` when somebody else has written since `revision`.
pub async fn save_draft_if_revision(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: AgentId,
    revision: i64,
    draft: &AgentDefinition,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "update agents set draft = $4, name = $5, revision = revision + 1, updated_at = now()
        where workspace_id = $1 and id = $2 and revision = $3 and deleted_at is null",
        workspace.0,
        id.0,
        revision,
        Json(draft) as _,
        draft.name
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Makes the draft the next version and the published one. Needs the agent's lock, which also numbers the versions.
pub async fn publish_locked(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: AgentId,
) -> Result<i32, Error> {
    let version = sqlx::query_scalar!(
        r#"insert into agent_versions (workspace_id, agent_id, version, definition)
        select a.workspace_id, a.id, 1 + coalesce((
            select max(v.version) from agent_versions v where v.workspace_id = a.workspace_id and v.agent_id = a.id), 0),
            a.draft
        from agents a where a.workspace_id = $1 and a.id = $2 and a.deleted_at is null
        returning version"#,
        workspace.0,
        id.0
    )
    .fetch_one(&mut *conn)
    .await?;
    sqlx::query!(
        "update agents set published_version = $3, is_public = coalesce((draft ->> 'is_public')::boolean, false),
            revision = revision + 1, updated_at = now()
        where workspace_id = $1 and id = $2 and deleted_at is null",
        workspace.0,
        id.0,
        version
    )
    .execute(conn)
    .await?;
    Ok(version)
}

/// `false` when it is not there (any more), or is the workspace's default agent, which stays (A-3).
pub async fn soft_delete_if_custom(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: AgentId,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "update agents set deleted_at = now(), updated_at = now(), revision = revision + 1
        where workspace_id = $1 and id = $2 and deleted_at is null and template <> 'default'",
        workspace.0,
        id.0
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// A version as it was published, with what the agent is for life.
#[derive(Clone, Debug, PartialEq)]
pub struct Version {
    pub template: Template,
    pub definition: AgentDefinition,
}

/// The named versions, whoever owns them: the keys come from tasks and rosters, never from a caller. One that is not
/// there, or that this release can not read, is missing in the answer, so that it can not fail a batch.
pub async fn versions_all_workspaces(
    conn: &mut PgConnection,
    keys: &[AgentRef],
) -> Result<HashMap<AgentRef, Version>, Error> {
    let workspaces: Vec<Uuid> = keys.iter().map(|key| key.workspace.0).collect();
    let agents: Vec<Uuid> = keys.iter().map(|key| key.agent.0).collect();
    let numbers: Vec<i32> = keys.iter().map(|key| key.version).collect();
    let rows = sqlx::query!(
        r#"select v.workspace_id as "workspace: WorkspaceId", v.agent_id as "agent: AgentId", v.version,
            a.template as "template: Template", v.definition as "definition: Json<Box<serde_json::value::RawValue>>"
        from unnest($1::uuid[], $2::uuid[], $3::integer[]) as wanted (workspace_id, agent_id, version)
        join agent_versions v using (workspace_id, agent_id, version)
        join agents a on a.workspace_id = v.workspace_id and a.id = v.agent_id"#,
        &workspaces,
        &agents,
        &numbers
    )
    .fetch_all(conn)
    .await?;
    let mut versions = HashMap::with_capacity(rows.len());
    for row in rows {
        let key = AgentRef {
            workspace: row.workspace,
            agent: row.agent,
            version: row.version,
        };
        match serde_json::from_str(row.definition.get()) {
            Ok(definition) => drop(versions.insert(
                key,
                Version {
                    template: row.template,
                    definition,
                },
            )),
            Err(error) => tracing::error!(
                workspace.id = %key.workspace, agent.id = %key.agent, agent.version = key.version,
                "a stored agent version can not be read: {error}"
            ),
        }
    }
    Ok(versions)
}

/// The published versions that rosters are chosen from, as they are now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RosterVersions {
    /// Of the workspaces asked for.
    pub own: Vec<AgentRef>,
    /// Public agents of all workspaces, those asked for among them.
    pub public: Vec<AgentRef>,
}

pub async fn roster_versions(
    conn: &mut PgConnection,
    workspaces: &[WorkspaceId],
) -> Result<RosterVersions, Error> {
    let wanted: Vec<Uuid> = workspaces.iter().map(|workspace| workspace.0).collect();
    let rows = sqlx::query!(
        r#"
        (
            select workspace_id as "workspace!: WorkspaceId", id as "id!: AgentId", published_version as "version!",
                false as "public!"
            from agents
            where workspace_id = any($1) and published_version is not null and deleted_at is null
            order by workspace_id, id
        ) union all (
            select workspace_id, id, published_version, true
            from agents
            where is_public and deleted_at is null
            order by id, workspace_id limit $2
        )
        "#,
        &wanted,
        PUBLIC_AGENTS_MAX
    )
    .fetch_all(conn)
    .await?;
    let mut versions = RosterVersions::default();
    for row in rows {
        let list = match row.public {
            true => &mut versions.public,
            false => &mut versions.own,
        };
        list.push(AgentRef {
            workspace: row.workspace,
            agent: row.id,
            version: row.version,
        });
    }
    Ok(versions)
}

/// The published names of those agents that a task of the workspace can delegate to: its own first, else public ones
/// (A-24). One that is not there is missing in the answer.
pub async fn reachable_names(
    conn: &mut PgConnection,
    agents: &[(WorkspaceId, AgentId)],
) -> Result<HashMap<(WorkspaceId, AgentId), String>, Error> {
    let workspaces: Vec<Uuid> = agents.iter().map(|(workspace, _)| workspace.0).collect();
    let ids: Vec<Uuid> = agents.iter().map(|(_, id)| id.0).collect();
    let rows = sqlx::query!(
        r#"select r.workspace_id as "workspace!: WorkspaceId", r.agent_id as "id!: AgentId",
            coalesce(v.definition ->> 'name', '') as "name!"
        from unnest($1::uuid[], $2::uuid[]) as r (workspace_id, agent_id)
        cross join lateral (
            select workspace_id, id, published_version, 0 as rank from agents
            where workspace_id = r.workspace_id and id = r.agent_id
                and published_version is not null and deleted_at is null
            union all
            select workspace_id, id, published_version, 1 from agents
            where id = r.agent_id and is_public and deleted_at is null
            order by rank, workspace_id
            limit 1
        ) a
        join agent_versions v on v.workspace_id = a.workspace_id and v.agent_id = a.id and v.version = a.published_version"#,
        &workspaces,
        &ids
    )
    .fetch_all(conn)
    .await?;
    let names = rows
        .into_iter()
        .map(|row| ((row.workspace, row.id), row.name));
    Ok(names.collect())
}
