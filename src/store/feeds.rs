//! The rows of a task's feed, and what its items point to: calls, children, groups.
//!
//! Read-only, in one statement per table. Items never change; what they point to is read as it is now.

use super::Error;
use crate::domain::ids::{GroupId, ItemId, StepId, TaskId, WorkspaceId};
use crate::domain::task::TaskStatus;
use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::PgExecutor;
use std::collections::HashMap;
use uuid::Uuid;

#[derive(Clone, Debug)]
pub struct ItemRow {
    pub seq: i64,
    pub id: ItemId,
    pub kind: String,
    pub turn: Option<i32>,
    pub text: Option<String>,
    pub data: Option<Value>,
    pub created_at: DateTime<Utc>,
}

/// At most `limit` items with a `seq` above `after`, in order.
pub async fn items(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    task: TaskId,
    after: i64,
    limit: i64,
) -> Result<Vec<ItemRow>, Error> {
    let rows = sqlx::query_as!(
        ItemRow,
        r#"select seq, id as "id: ItemId", kind, turn, text, data, created_at
        from task_items
        where workspace_id = $1 and task_id = $2 and seq > $3
        order by seq
        limit $4"#,
        workspace.0,
        task.0,
        after,
        limit
    )
    .fetch_all(db)
    .await?;
    Ok(rows)
}

/// The newest `seq` of a task's feed. `None` when there is no such task, or no longer.
pub async fn last_seq(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    task: TaskId,
) -> Result<Option<i64>, Error> {
    let seq = sqlx::query_scalar!(
        "select last_seq from tasks where workspace_id = $1 and id = $2 and deleted_at is null",
        workspace.0,
        task.0
    )
    .fetch_optional(db)
    .await?;
    Ok(seq)
}

/// A tool call as it stands now.
#[derive(Clone, Debug)]
pub struct CallRow {
    pub step: StepId,
    pub status: String,
    /// As the model wrote them.
    pub arguments: Option<String>,
    pub result: Option<String>,
    pub is_error: Option<bool>,
    pub started_at: Option<DateTime<Utc>>,
    pub finished_at: Option<DateTime<Utc>>,
}

/// The calls at these places, as (turn, ordinal).
pub async fn calls(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    task: TaskId,
    places: &[(i32, i32)],
) -> Result<HashMap<(i32, i32), CallRow>, Error> {
    let (turns, ordinals): (Vec<i32>, Vec<i32>) = places.iter().copied().unzip();
    let rows = sqlx::query!(
        r#"select s.turn, s.ordinal, s.id as "id: StepId", s.status, s.arguments, s.result, s.is_error,
            s.started_at, s.finished_at
        from unnest($3::int[], $4::int[]) as place (turn, ordinal)
        join steps s on s.workspace_id = $1 and s.task_id = $2 and s.turn = place.turn and s.ordinal = place.ordinal"#,
        workspace.0,
        task.0,
        &turns,
        &ordinals
    )
    .fetch_all(db)
    .await?;
    let calls = rows.into_iter().map(|row| {
        let call = CallRow {
            step: row.id,
            status: row.status,
            arguments: row.arguments,
            result: row.result,
            is_error: row.is_error,
            started_at: row.started_at,
            finished_at: row.finished_at,
        };
        ((row.turn, row.ordinal), call)
    });
    Ok(calls.collect())
}

/// One child on a delegation card. Deleted children stay on it, marked.
#[derive(Clone, Debug)]
pub struct ChildRow {
    pub id: TaskId,
    pub title: String,
    pub agent_name: String,
    pub status: TaskStatus,
    pub deleted: bool,
}

/// The first `per_step` children of each of these delegate calls, in delegation order.
pub async fn children(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    task: TaskId,
    steps: &[StepId],
    per_step: i64,
) -> Result<HashMap<StepId, Vec<ChildRow>>, Error> {
    let steps: Vec<Uuid> = steps.iter().map(|step| step.0).collect();
    let rows = sqlx::query!(
        r#"select call.id as "step!: StepId", c.id as "id: TaskId", c.title, c.status as "status: TaskStatus",
            c.deleted_at is not null as "deleted!", coalesce(v.definition ->> 'name', '') as "agent_name!"
        from unnest($3::uuid[]) as call (id)
        cross join lateral (
            select * from tasks t
            where t.workspace_id = $1 and t.parent_task_id = $2 and t.parent_step_id = call.id
            order by t.ordinal limit $4
        ) c
        join agent_versions v
            on v.workspace_id = c.agent_workspace_id and v.agent_id = c.agent_id and v.version = c.agent_version
        order by call.id, c.ordinal"#,
        workspace.0,
        task.0,
        &steps,
        per_step
    )
    .fetch_all(db)
    .await?;
    let mut children = HashMap::<StepId, Vec<ChildRow>>::new();
    for row in rows {
        children.entry(row.step).or_default().push(ChildRow {
            id: row.id,
            title: row.title,
            agent_name: row.agent_name,
            status: row.status,
            deleted: row.deleted,
        });
    }
    Ok(children)
}

/// How many children of each of these delegate calls are in which status; `None` stands for deleted.
pub async fn child_counts(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    task: TaskId,
    steps: &[StepId],
) -> Result<HashMap<StepId, Vec<(Option<TaskStatus>, i64)>>, Error> {
    let steps: Vec<Uuid> = steps.iter().map(|step| step.0).collect();
    let rows = sqlx::query!(
        r#"select parent_step_id as "step!: StepId", status as "status: TaskStatus",
            deleted_at is not null as "deleted!", count(*) as "count!"
        from tasks
        where workspace_id = $1 and parent_task_id = $2 and parent_step_id = any($3)
        group by 1, 2, 3"#,
        workspace.0,
        task.0,
        &steps
    )
    .fetch_all(db)
    .await?;
    let mut counts = HashMap::<StepId, Vec<(Option<TaskStatus>, i64)>>::new();
    for row in rows {
        let status = (!row.deleted).then_some(row.status);
        counts
            .entry(row.step)
            .or_default()
            .push((status, row.count));
    }
    Ok(counts)
}

/// The statuses of these await groups. A wait that is not for children is one await, and its end says how it ended.
pub async fn group_statuses(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    groups: &[GroupId],
) -> Result<HashMap<GroupId, String>, Error> {
    let groups: Vec<Uuid> = groups.iter().map(|group| group.0).collect();
    let rows = sqlx::query!(
        r#"select g.id as "id: GroupId", coalesce(own.status, g.status) as "status!"
        from await_groups g
        left join awaits own on own.workspace_id = g.workspace_id and own.group_id = g.id and g.total = 1
            and g.source_type <> 'child_task' and g.status <> 'open'
        where g.workspace_id = $1 and g.id = any($2)"#,
        workspace.0,
        &groups
    )
    .fetch_all(db)
    .await?;
    Ok(rows.into_iter().map(|row| (row.id, row.status)).collect())
}
