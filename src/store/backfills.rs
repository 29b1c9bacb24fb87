//! Backfills of delegation profiles (A-28). Whoever holds one writes under its attempt; the row is the guard.

use super::Error;
use crate::domain::backfill::{BackfillStatus, ProfileStatus, Settled};
use crate::domain::ids::{AgentId, BackfillId, WorkspaceId};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::PgConnection;
use utoipa::ToSchema;

/// Proof that this process works on the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub workspace: WorkspaceId,
    pub id: BackfillId,
    pub attempt: i32,
    /// Write anew what is there.
    pub force: bool,
    /// Holders that have died since an agent was settled last.
    pub lost_leases: i32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Backfill {
    pub id: BackfillId,
    pub status: BackfillStatus,
    /// Profiles that are there are written anew.
    pub force: bool,
    /// Agents that are still to be worked on.
    pub pending: i64,
    pub generated: i64,
    pub skipped: i64,
    pub failed: i64,
    pub created_at: DateTime<Utc>,
    pub finished_at: Option<DateTime<Utc>>,
}

/// One agent of a backfill.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct BackfillAgent {
    pub agent_group_id: AgentId,
    pub name: String,
    pub status: ProfileStatus,
    /// Why it was skipped, or what failed.
    #[schema(example = "It has a profile.")]
    pub reason: Option<String>,
}

/// With all agents that the workspace has now. `None` when one is running already.
pub async fn insert_if_none_runs(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    force: bool,
) -> Result<Option<BackfillId>, Error> {
    let id = BackfillId::new();
    let done = sqlx::query!(
        "insert into profile_backfills (workspace_id, id, force) values ($1, $2, $3)
        on conflict (workspace_id) where status = 'running' do nothing",
        workspace.0,
        id.0,
        force
    )
    .execute(&mut *conn)
    .await?;
    if done.rows_affected() == 0 {
        return Ok(None);
    }
    sqlx::query!(
        "insert into profile_backfill_agents (workspace_id, backfill_id, agent_id)
        select workspace_id, $2, id from agents where workspace_id = $1 and deleted_at is null",
        workspace.0,
        id.0
    )
    .execute(conn)
    .await?;
    Ok(Some(id))
}

pub async fn running(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
) -> Result<Option<BackfillId>, Error> {
    Ok(sqlx::query_scalar!(
        r#"select id as "id: BackfillId" from profile_backfills where workspace_id = $1 and status = 'running'"#,
        workspace.0
    )
    .fetch_optional(conn)
    .await?)
}

/// Takes a running job that nobody holds, or whose holder's lease has run out; the oldest, or only this one.
pub async fn claim_all_workspaces(
    conn: &mut PgConnection,
    lease_secs: u32,
    only: Option<BackfillId>,
) -> Result<Option<Held>, Error> {
    Ok(sqlx::query_as!(
        Held,
        r#"
        with due as (
            select workspace_id, id from profile_backfills
            where status = 'running' and (lease_expires_at is null or lease_expires_at < now())
                and ($2::uuid is null or id = $2)
            order by id
            limit 1
            for no key update skip locked
        )
        update profile_backfills b
        set attempt = b.attempt + 1, lost_leases = b.lost_leases + (b.lease_expires_at is not null)::int,
            lease_expires_at = now() + make_interval(secs => $1)
        from due
        where b.workspace_id = due.workspace_id and b.id = due.id
        returning b.workspace_id as "workspace: WorkspaceId", b.id as "id: BackfillId", b.attempt, b.force, b.lost_leases
        "#,
        f64::from(lease_secs),
        only.map(|id| id.0)
    )
    .fetch_optional(conn)
    .await?)
}

/// `false` when somebody else has the job by now.
pub async fn renew_if_held(
    conn: &mut PgConnection,
    held: &Held,
    lease_secs: u32,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "update profile_backfills set lease_expires_at = now() + make_interval(secs => $4)
        where workspace_id = $1 and id = $2 and attempt = $3 and status = 'running'",
        held.workspace.0,
        held.id.0,
        held.attempt,
        f64::from(lease_secs)
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// The agents that are still to be worked on.
pub async fn pending(conn: &mut PgConnection, held: &Held) -> Result<Vec<AgentId>, Error> {
    Ok(sqlx::query_scalar!(
        r#"select agent_id as "id: AgentId" from profile_backfill_agents
        where workspace_id = $1 and backfill_id = $2 and status = 'pending' order by agent_id"#,
        held.workspace.0,
        held.id.0
    )
    .fetch_all(conn)
    .await?)
}

/// `false` when somebody else has the job by now: whatever the caller has done for the agent is to be dropped.
pub async fn settle_if_held(
    conn: &mut PgConnection,
    held: &Held,
    agent: AgentId,
    settled: &Settled,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "with held as (
            update profile_backfills set lost_leases = 0
            where workspace_id = $1 and id = $2 and attempt = $3 and status = 'running'
            returning workspace_id, id
        )
        update profile_backfill_agents a set status = $5, reason = $6
        from held
        where a.workspace_id = held.workspace_id and a.backfill_id = held.id and a.agent_id = $4 and a.status = 'pending'",
        held.workspace.0,
        held.id.0,
        held.attempt,
        agent.0,
        settled.status() as _,
        settled.reason()
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Lets go of the job: it is completed if no agent is pending, else anybody may go on with it. Nothing happens when
/// somebody else has it by now.
pub async fn release_if_held(conn: &mut PgConnection, held: &Held) -> Result<(), Error> {
    sqlx::query!(
        "update profile_backfills b
        set lease_expires_at = null, status = case when p.is_open then 'running' else 'completed' end,
            finished_at = case when p.is_open then null else now() end
        from (select exists (select from profile_backfill_agents
            where workspace_id = $1 and backfill_id = $2 and status = 'pending') as is_open) p
        where b.workspace_id = $1 and b.id = $2 and b.attempt = $3 and b.status = 'running'",
        held.workspace.0,
        held.id.0,
        held.attempt
    )
    .execute(conn)
    .await?;
    Ok(())
}

pub async fn get(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: BackfillId,
) -> Result<Option<Backfill>, Error> {
    Ok(sqlx::query_as!(
        Backfill,
        r#"select b.id as "id: BackfillId", b.status as "status: BackfillStatus", b.force, b.created_at, b.finished_at,
            count(*) filter (where a.status = 'pending') as "pending!",
            count(*) filter (where a.status = 'generated') as "generated!",
            count(*) filter (where a.status = 'skipped') as "skipped!",
            count(*) filter (where a.status = 'failed') as "failed!"
        from profile_backfills b
        left join profile_backfill_agents a on a.workspace_id = b.workspace_id and a.backfill_id = b.id
        where b.workspace_id = $1 and b.id = $2
        group by b.workspace_id, b.id"#,
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?)
}

/// At most `limit` agents of the job in order of id, beginning after `after`.
pub async fn agents(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: BackfillId,
    after: Option<AgentId>,
    limit: i64,
) -> Result<Vec<BackfillAgent>, Error> {
    Ok(sqlx::query_as!(
        BackfillAgent,
        r#"select b.agent_id as "agent_group_id: AgentId", a.name, b.status as "status: ProfileStatus", b.reason
        from profile_backfill_agents b
        join agents a on a.workspace_id = b.workspace_id and a.id = b.agent_id
        where b.workspace_id = $1 and b.backfill_id = $2 and b.agent_id > $3
        order by b.agent_id limit $4"#,
        workspace.0,
        id.0,
        after.map_or(uuid::Uuid::nil(), |id| id.0),
        limit
    )
    .fetch_all(conn)
    .await?)
}

/// Removes what was completed 30 days ago.
pub async fn forget_old_all_workspaces(conn: &mut PgConnection) -> Result<(), Error> {
    sqlx::query!(
        "delete from profile_backfills where status = 'completed' and finished_at < now() - interval '30 days'"
    )
    .execute(conn)
    .await?;
    Ok(())
}
