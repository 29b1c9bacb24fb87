//! The orchestrator's inbox: taking events, and what becomes of one that fails.

use super::{Error, changes::NewEvent, column, tasks::Setup};
use crate::domain::{
    ids::{AgentId, GroupId, StepId, TaskId, WorkspaceId},
    task::{self, TaskKey, TaskState, TaskStatus},
    task_await::{GroupStatus, SourceType},
};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::{PgConnection, PgExecutor};
use utoipa::ToSchema;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub id: i64,
    pub task: TaskKey,
    pub attempts: i32,
    /// The group that has closed, if the event tells of one.
    pub group: Option<GroupId>,
}

/// An event with its locked task.
#[derive(Clone, Debug)]
pub struct Due {
    pub event: Event,
    pub task: TaskState,
    pub setup: Setup,
}

/// Locks at most `limit` events of all workspaces whose time has come, oldest first, skipping those that another
/// orchestrator holds; then their tasks, in key order, and returns the tasks' states. Only the locked rows are read.
pub async fn lock_due_with_tasks_all_workspaces(
    conn: &mut PgConnection,
    limit: u32,
) -> Result<Vec<Due>, Error> {
    let rows = sqlx::query!(
        r#"
        with due as (
            select workspace_id, id, task_id, attempts, group_id
            from orchestrator_events
            where dead_at is null and not_before <= now()
            order by not_before, id
            limit $1
            for update skip locked
        )
        select e.id as event_id, e.attempts, e.group_id as "group?: GroupId", t.workspace_id as "workspace_id: WorkspaceId",
            t.id as "id: TaskId", t.status as "status: TaskStatus", t.deleted_at is not null as "deleted!",
            t.parent_task_id is not null as "is_child!", t.stop_generation, t.priority, t.last_seq, t.news_seq,
            t.seen_seq, t.turn, t.decides_left, t.agent_workspace_id as "agent_workspace_id: WorkspaceId",
            t.agent_id as "agent_id: AgentId", t.agent_version, t.spawn_depth,
            t.root_task_id as "root_task_id: TaskId",
            t.source_metadata @> '{"disable_delegation": true}' as "delegation_disabled!",
            exists (select from model_providers p where p.workspace_id = t.workspace_id) as "own_models!",
            t.budgeted or exists (select from budgets b where b.workspace_id = t.workspace_id and b.id = t.workspace_id) as "budgeted!"
        from due e
        join tasks t on t.workspace_id = e.workspace_id and t.id = e.task_id
        order by t.workspace_id, t.id
        for no key update of t
        "#,
        i64::from(limit),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| {
            let state = super::task_state!(r);
            let event = Event {
                id: r.event_id,
                task: state.key,
                attempts: r.attempts,
                group: r.group,
            };
            Due {
                event,
                task: state,
                setup: super::task_setup!(r),
            }
        })
        .collect())
}

/// Puts a failed event off by `delay_secs`, or parks it as dead. `error` is shown to operators.
pub async fn fail(
    conn: &mut PgConnection,
    event: &Event,
    error: &str,
    delay_secs: f64,
    dead: bool,
) -> Result<(), Error> {
    sqlx::query!(
        r#"
        update orchestrator_events
        set attempts = attempts + 1, error = $3, not_before = now() + make_interval(secs => $4),
            dead_at = case when $5 then now() end
        where workspace_id = $1 and id = $2
        "#,
        event.task.workspace.0,
        event.id,
        error,
        delay_secs,
        dead,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// An event that has been set aside.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DeadEvent {
    pub id: i64,
    pub workspace_id: WorkspaceId,
    pub task_id: TaskId,
    /// `new_message`, `turn_committed` or `await_completed`.
    #[schema(example = "await_completed")]
    pub kind: String,
    pub group_id: Option<GroupId>,
    /// How often it was tried.
    pub attempts: i32,
    /// Why the last attempt failed.
    pub error: Option<String>,
    pub created_at: DateTime<Utc>,
    pub dead_at: Option<DateTime<Utc>>,
}

/// Dead events of all workspaces, oldest first, after the one with the id `after`.
pub async fn dead_all_workspaces(
    db: impl PgExecutor<'_>,
    after: i64,
    limit: i64,
) -> Result<Vec<DeadEvent>, Error> {
    Ok(sqlx::query_as!(
        DeadEvent,
        r#"
        select id, workspace_id as "workspace_id: WorkspaceId", task_id as "task_id: TaskId", kind,
            group_id as "group_id: GroupId", attempts, error, created_at, dead_at
        from orchestrator_events
        where dead_at is not null and id > $1
        order by id
        limit $2
        "#,
        after,
        limit,
    )
    .fetch_all(db)
    .await?)
}

/// Puts a dead event back, due now and with no attempt counted. Returns whether there was one.
pub async fn revive_all_workspaces(conn: &mut PgConnection, id: i64) -> Result<bool, Error> {
    let done = sqlx::query!(
        r#"
        update orchestrator_events set dead_at = null, attempts = 0, not_before = now()
        where id = $1 and dead_at is not null
        "#,
        id,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Inserts events for tasks.
pub async fn insert(conn: &mut PgConnection, events: &[NewEvent]) -> Result<(), Error> {
    sqlx::query!(
        r#"
        insert into orchestrator_events (workspace_id, task_id, kind)
        select * from unnest($1::uuid[], $2::uuid[], $3::text[])
        "#,
        &column(events, |e| e.task.workspace.0),
        &column(events, |e| e.task.task.0),
        &column(events, |e| e.kind.as_str().to_owned()),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// What the next move of a locked task depends on, beside its own row.
#[derive(Clone, Debug)]
pub struct Surroundings {
    pub task: TaskKey,
    pub has_active_step: bool,
    /// Groups whose outcome the task has not been told, oldest first.
    pub groups: Vec<UntoldGroup>,
}

#[derive(Clone, Copy, Debug)]
pub struct UntoldGroup {
    pub state: task::GroupState,
    pub source_type: SourceType,
    pub step: StepId,
}

/// Reads the surroundings of locked tasks: active steps of the turn that is under way, and untold groups.
pub async fn surroundings(
    conn: &mut PgConnection,
    tasks: &[(TaskKey, i32)],
) -> Result<Vec<Surroundings>, Error> {
    let rows = sqlx::query!(
        r#"
        select c.workspace_id as "workspace_id!: WorkspaceId", c.task_id as "task_id!: TaskId",
            coalesce(s.active, false) as "has_active_step!",
            g.ids as "ids: Vec<GroupId>", g.statuses as "statuses: Vec<GroupStatus>",
            g.sources as "sources: Vec<SourceType>", g.steps as "steps: Vec<StepId>"
        from unnest($1::uuid[], $2::uuid[], $3::integer[]) as c (workspace_id, task_id, turn)
        left join lateral (
            select true as active from steps s
            where s.workspace_id = c.workspace_id and s.task_id = c.task_id and s.turn = c.turn
                and s.finished_at is null
            limit 1
        ) s on true
        left join lateral (
            select array_agg(g.id order by g.created_at, g.id) as ids,
                array_agg(g.status order by g.created_at, g.id) as statuses,
                array_agg(g.source_type order by g.created_at, g.id) as sources,
                array_agg(g.step_id order by g.created_at, g.id) as steps
            from await_groups g
            where g.workspace_id = c.workspace_id and g.task_id = c.task_id and g.resumed_at is null
        ) g on true
        "#,
        &column(tasks, |t| t.0.workspace.0),
        &column(tasks, |t| t.0.task.0),
        &column(tasks, |t| t.1),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| {
            let ids = r.ids.unwrap_or_default().into_iter();
            let rest = r
                .statuses
                .unwrap_or_default()
                .into_iter()
                .zip(r.sources.unwrap_or_default())
                .zip(r.steps.unwrap_or_default());
            let groups = ids
                .zip(rest)
                .map(|(id, ((status, source_type), step))| UntoldGroup {
                    state: task::GroupState {
                        id,
                        open: status == GroupStatus::Open,
                    },
                    source_type,
                    step,
                });
            Surroundings {
                task: TaskKey {
                    workspace: r.workspace_id,
                    task: r.task_id,
                },
                has_active_step: r.has_active_step,
                groups: groups.collect(),
            }
        })
        .collect())
}
