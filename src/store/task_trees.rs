//! A task with all its descendants, as callers see them. Soft-deleted tasks are not among them.

use super::Error;
use super::task_views::UsageTotals;
use crate::domain::ids::{AgentId, TaskId, WorkspaceId};
use crate::domain::task::TaskStatus;
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::PgExecutor;
use utoipa::ToSchema;

/// A task of a tree.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TreeNode {
    pub id: TaskId,
    /// Null for the task that was asked for, even if it has a parent.
    pub parent_task_id: Option<TaskId>,
    /// 0 for the task that was asked for.
    pub depth: i32,
    pub title: String,
    pub status: TaskStatus,
    pub agent_group_id: AgentId,
    pub agent_name: String,
    /// Place among the children of one delegate call.
    pub ordinal: Option<i32>,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub finished_at: Option<DateTime<Utc>>,
    pub usage: UsageTotals,
}

/// The task and its descendants, parents before children, siblings in order of creation; at most `limit`. Empty when
/// there is no such task. What hangs below a deleted task is as gone as that.
pub async fn tree(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    task: TaskId,
    limit: i64,
) -> Result<Vec<TreeNode>, Error> {
    let rows = sqlx::query!(
        r#"with recursive tree as (
            select t.id, null::uuid as parent_task_id, 0 as depth
            from tasks t where t.workspace_id = $1 and t.id = $2 and t.deleted_at is null
            union all
            select c.id, c.parent_task_id, tree.depth + 1
            from tree
            join tasks c on c.workspace_id = $1 and c.parent_task_id = tree.id and c.deleted_at is null
        ), nodes as (
            select * from tree order by depth, id limit $3
        )
        select n.id as "id!: TaskId", n.parent_task_id as "parent_task_id: TaskId", n.depth as "depth!",
            t.title, t.status as "status: TaskStatus", t.agent_id as "agent_id: AgentId",
            coalesce(v.definition ->> 'name', '') as "agent_name!", t.ordinal,
            t.created_at, t.started_at, t.finished_at,
            u.decide_steps as "decide_steps!", u.input_tokens as "input_tokens!", u.output_tokens as "output_tokens!",
            u.cached_tokens as "cached_tokens!", u.cost_micros, u.duration_ms as "duration_ms!"
        from nodes n
        join tasks t on t.workspace_id = $1 and t.id = n.id
        join agent_versions v
            on v.workspace_id = t.agent_workspace_id and v.agent_id = t.agent_id and v.version = t.agent_version
        cross join lateral (
            select count(*) filter (where s.kind = 'decide_next_action') as decide_steps,
                coalesce(sum(s.input_tokens), 0)::bigint as input_tokens,
                coalesce(sum(s.output_tokens), 0)::bigint as output_tokens,
                coalesce(sum(s.cached_tokens), 0)::bigint as cached_tokens,
                sum(s.cost_micros)::bigint as cost_micros,
                coalesce(sum(extract(epoch from s.finished_at - s.started_at) * 1000)
                    filter (where s.kind = 'decide_next_action'), 0)::bigint as duration_ms
            from steps s where s.workspace_id = t.workspace_id and s.task_id = t.id
        ) u
        order by n.depth, n.id"#,
        workspace.0,
        task.0,
        limit
    )
    .fetch_all(db)
    .await?;
    let nodes = rows.into_iter().map(|row| TreeNode {
        id: row.id,
        parent_task_id: row.parent_task_id,
        depth: row.depth,
        title: row.title,
        status: row.status,
        agent_group_id: row.agent_id,
        agent_name: row.agent_name,
        ordinal: row.ordinal,
        created_at: row.created_at,
        started_at: row.started_at,
        finished_at: row.finished_at,
        usage: UsageTotals {
            decide_steps: row.decide_steps,
            input_tokens: row.input_tokens,
            output_tokens: row.output_tokens,
            cached_tokens: row.cached_tokens,
            cost_micros: row.cost_micros,
            duration_ms: row.duration_ms,
        },
    });
    Ok(nodes.collect())
}
