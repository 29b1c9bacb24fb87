//! Tasks as callers see them: one, or many. Soft-deleted tasks are in none of them.
//!
//! Read-only. An agent's name is that of the version the task runs, which may belong to another workspace; nothing else
//! crosses the border.

use super::Error;
use crate::domain::ids::{AgentId, BatchRunId, GroupId, TaskId, WorkspaceId};
use crate::domain::task::{Failure, TaskStatus};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use sqlx::types::Json;
use sqlx::{FromRow, PgExecutor, Postgres, QueryBuilder};
use std::collections::HashMap;
use utoipa::ToSchema;
use uuid::Uuid;

/// The task that delegated this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ParentRef {
    pub task_id: TaskId,
    pub title: String,
    pub agent_name: String,
    pub agent_group_id: AgentId,
}

/// A task as a row of a list.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TaskSummary {
    pub id: TaskId,
    pub title: String,
    pub status: TaskStatus,
    /// `chat`, or `spawned` for a child.
    #[schema(example = "chat")]
    pub source: String,
    pub agent_group_id: AgentId,
    pub agent_version: i32,
    #[schema(example = "Researcher")]
    pub agent_name: String,
    /// Null at the top, and when the parent has been deleted.
    pub parent: Option<ParentRef>,
    pub root_task_id: TaskId,
    pub spawn_depth: i16,
    /// Its children, without deleted ones.
    pub subtask_count: i64,
    pub batch_run_id: Option<BatchRunId>,
    pub item_key: Option<String>,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub finished_at: Option<DateTime<Utc>>,
}

/// What a task costs besides.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TaskDetails {
    pub metadata: Value,
    /// The final answer of a completed task.
    pub output: Option<String>,
    pub error: Option<Failure>,
    /// The newest `seq` of its feed.
    pub last_seq: i64,
    pub usage: UsageTotals,
    /// It, or a task above it, has a budget.
    #[serde(skip)]
    pub budgeted: bool,
    /// What it waits for, oldest first, and what has ended without the task having been told yet.
    pub waits: Vec<OpenWait>,
}

/// The model calls of one task, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct UsageTotals {
    pub decide_steps: i64,
    pub input_tokens: i64,
    pub output_tokens: i64,
    pub cached_tokens: i64,
    /// Millionths of the currency that prices are configured in; null without prices.
    pub cost_micros: Option<i64>,
    /// From the start of each decide step to its end, with the pauses that a busy model asked for.
    pub duration_ms: i64,
}

impl UsageTotals {
    pub fn add(&mut self, other: &UsageTotals) {
        self.decide_steps += other.decide_steps;
        self.input_tokens += other.input_tokens;
        self.output_tokens += other.output_tokens;
        self.cached_tokens += other.cached_tokens;
        self.duration_ms += other.duration_ms;
        self.cost_micros = match (self.cost_micros, other.cost_micros) {
            (None, None) => None,
            (a, b) => Some(a.unwrap_or(0) + b.unwrap_or(0)),
        };
    }
}

/// An await group whose outcome its task has not been told.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct OpenWait {
    pub group_id: GroupId,
    /// `child_task`, `user_input`, `external` or `timer`.
    #[schema(example = "child_task")]
    pub source_type: String,
    /// `open`, `completed` or `skipped`; for a wait that is not for children also `timed_out`.
    #[schema(example = "open")]
    pub status: String,
    /// What it is for, if not for children: `{"question"}`, `{"key"}`, `{"until"}` or `{"seconds"}`.
    #[schema(value_type = Option<Object>)]
    pub about: Option<Value>,
    /// `all_required`, `any` or `quorum`.
    #[schema(example = "all_required")]
    pub strategy: String,
    pub total: i32,
    pub pending: i32,
    pub completed: i32,
    pub created_at: DateTime<Utc>,
    /// When it is looked at again, or expires.
    pub next_check_at: Option<DateTime<Utc>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// By id: ids are UUID v7, so this is the order of creation, and it needs no index of its own.
    Created,
    Title,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sort {
    pub by: Order,
    pub descending: bool,
}

/// The last row of a page: its sort key (empty for [`Order::Created`]) and its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct After {
    pub key: String,
    pub id: TaskId,
}

/// Filters only narrow; the workspace is not one of them.
#[derive(Clone, Debug)]
pub struct TaskFilter {
    pub parent: Option<TaskId>,
    pub batch_run: Option<BatchRunId>,
    /// Any of these; all when empty.
    pub statuses: Vec<TaskStatus>,
    /// `chat` or `spawned`.
    pub source: Option<&'static str>,
    pub agent: Option<AgentId>,
    /// Part of the title, or a whole id.
    pub text: Option<String>,
    pub include_spawned: bool,
    pub sort: Sort,
    pub after: Option<After>,
    pub limit: i64,
}

const SUMMARY: &str = "
    select t.id, t.title, t.status, t.source, t.agent_id, t.agent_version,
        coalesce(v.definition ->> 'name', '') as agent_name,
        p.id as parent_id, p.title as parent_title, p.agent_id as parent_agent_id,
        coalesce(pv.definition ->> 'name', '') as parent_agent_name,
        t.root_task_id, t.spawn_depth, t.batch_run_id, t.item_key, t.created_at, t.started_at, t.finished_at,
        (select count(*) from tasks c
         where c.workspace_id = t.workspace_id and c.parent_task_id = t.id and c.deleted_at is null) as subtask_count
    from tasks t
    join agent_versions v
        on v.workspace_id = t.agent_workspace_id and v.agent_id = t.agent_id and v.version = t.agent_version
    left join tasks p on p.workspace_id = t.workspace_id and p.id = t.parent_task_id and p.deleted_at is null
    left join agent_versions pv
        on pv.workspace_id = p.agent_workspace_id and pv.agent_id = p.agent_id and pv.version = p.agent_version
    where t.deleted_at is null and t.workspace_id = ";

/// One task. `None` when there is none, or not here, or no longer.
pub async fn summary(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    task: TaskId,
) -> Result<Option<TaskSummary>, Error> {
    let mut query = QueryBuilder::<Postgres>::new(SUMMARY);
    query
        .push_bind(workspace.0)
        .push(" and t.id = ")
        .push_bind(task.0);
    let row = query
        .build_query_as::<SummaryRow>()
        .fetch_optional(db)
        .await?;
    Ok(row.map(SummaryRow::into_summary))
}

/// At most `filter.limit` tasks after `filter.after`.
pub async fn list(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    filter: &TaskFilter,
) -> Result<Vec<TaskSummary>, Error> {
    let mut query = QueryBuilder::<Postgres>::new(SUMMARY);
    query.push_bind(workspace.0);
    if let Some(parent) = filter.parent {
        query.push(" and t.parent_task_id = ").push_bind(parent.0);
    }
    if !filter.include_spawned {
        query.push(" and t.parent_task_id is null");
    }
    if let Some(batch_run) = filter.batch_run {
        query.push(" and t.batch_run_id = ").push_bind(batch_run.0);
    }
    if !filter.statuses.is_empty() {
        let statuses: Vec<&str> = filter
            .statuses
            .iter()
            .map(|status| status.as_str())
            .collect();
        query
            .push(" and t.status = any(")
            .push_bind(statuses)
            .push(")");
    }
    if let Some(source) = filter.source {
        query.push(" and t.source = ").push_bind(source);
    }
    if let Some(agent) = filter.agent {
        query.push(" and t.agent_id = ").push_bind(agent.0);
    }
    if let Some(text) = &filter.text {
        query
            .push(" and (t.title ilike ")
            .push_bind(containing(text));
        if let Ok(id) = text.trim().parse::<Uuid>() {
            query.push(" or t.id = ").push_bind(id);
        }
        query.push(")");
    }
    let (beyond, direction) = if filter.sort.descending {
        ("<", "desc")
    } else {
        (">", "asc")
    };
    match filter.sort.by {
        Order::Created => {
            if let Some(after) = &filter.after {
                query
                    .push(" and t.id ")
                    .push(beyond)
                    .push(" ")
                    .push_bind(after.id.0);
            }
            query.push(" order by t.id ").push(direction);
        }
        Order::Title => {
            if let Some(after) = &filter.after {
                query.push(" and (t.title, t.id) ").push(beyond).push(" (");
                query
                    .push_bind(after.key.clone())
                    .push(", ")
                    .push_bind(after.id.0)
                    .push(")");
            }
            query
                .push(" order by t.title ")
                .push(direction)
                .push(", t.id ")
                .push(direction);
        }
    }
    query.push(" limit ").push_bind(filter.limit);
    let rows = query.build_query_as::<SummaryRow>().fetch_all(db).await?;
    Ok(rows.into_iter().map(SummaryRow::into_summary).collect())
}

/// A pattern for titles that contain the text as it stands.
fn containing(text: &str) -> String {
    let mut pattern = String::from("%");
    for c in text.chars() {
        if matches!(c, '%' | '_' | '\\') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('%');
    pattern
}

#[derive(FromRow)]
struct SummaryRow {
    id: TaskId,
    title: String,
    status: TaskStatus,
    source: String,
    agent_id: AgentId,
    agent_version: i32,
    agent_name: String,
    parent_id: Option<TaskId>,
    parent_title: Option<String>,
    parent_agent_id: Option<AgentId>,
    parent_agent_name: String,
    root_task_id: TaskId,
    spawn_depth: i16,
    batch_run_id: Option<BatchRunId>,
    item_key: Option<String>,
    created_at: DateTime<Utc>,
    started_at: Option<DateTime<Utc>>,
    finished_at: Option<DateTime<Utc>>,
    subtask_count: i64,
}

impl SummaryRow {
    fn into_summary(self) -> TaskSummary {
        let parent = match (self.parent_id, self.parent_title, self.parent_agent_id) {
            (Some(task_id), Some(title), Some(agent_group_id)) => Some(ParentRef {
                task_id,
                title,
                agent_name: self.parent_agent_name,
                agent_group_id,
            }),
            _ => None,
        };
        TaskSummary {
            id: self.id,
            title: self.title,
            status: self.status,
            source: self.source,
            agent_group_id: self.agent_id,
            agent_version: self.agent_version,
            agent_name: self.agent_name,
            parent,
            root_task_id: self.root_task_id,
            spawn_depth: self.spawn_depth,
            subtask_count: self.subtask_count,
            batch_run_id: self.batch_run_id,
            item_key: self.item_key,
            created_at: self.created_at,
            started_at: self.started_at,
            finished_at: self.finished_at,
        }
    }
}

/// The details of these tasks. Ids that are not in the workspace are left out.
pub async fn details(
    db: &sqlx::PgPool,
    workspace: WorkspaceId,
    tasks: &[TaskId],
) -> Result<HashMap<TaskId, TaskDetails>, Error> {
    let ids: Vec<Uuid> = tasks.iter().map(|task| task.0).collect();
    let rows = sqlx::query!(
        r#"select t.id as "id: TaskId", t.source_metadata, t.output, t.last_seq, t.budgeted,
            t.error as "error: Json<Failure>",
            u.decide_steps as "decide_steps!", u.input_tokens as "input_tokens!", u.output_tokens as "output_tokens!",
            u.cached_tokens as "cached_tokens!", u.cost_micros, u.duration_ms as "duration_ms!"
        from tasks t
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
        where t.workspace_id = $1 and t.id = any($2) and t.deleted_at is null"#,
        workspace.0,
        &ids
    )
    .fetch_all(db)
    .await?;
    let mut waits = open_waits(db, workspace, &ids).await?;
    let details = rows.into_iter().map(|row| {
        let details = TaskDetails {
            metadata: row.source_metadata,
            output: row.output,
            error: row.error.map(|Json(error)| error),
            last_seq: row.last_seq,
            usage: UsageTotals {
                decide_steps: row.decide_steps,
                input_tokens: row.input_tokens,
                output_tokens: row.output_tokens,
                cached_tokens: row.cached_tokens,
                cost_micros: row.cost_micros,
                duration_ms: row.duration_ms,
            },
            budgeted: row.budgeted,
            waits: waits.remove(&row.id).unwrap_or_default(),
        };
        (row.id, details)
    });
    Ok(details.collect())
}

async fn open_waits(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    tasks: &[Uuid],
) -> Result<HashMap<TaskId, Vec<OpenWait>>, Error> {
    let rows = sqlx::query!(
        r#"select g.task_id as "task_id: TaskId", g.id as "id: GroupId", g.source_type, g.strategy, g.about,
            coalesce(own.status, g.status) as "status!", g.total, g.pending, g.completed, g.created_at,
            (select min(a.scheduled_resume_at) from awaits a
             where a.workspace_id = g.workspace_id and a.group_id = g.id and a.status = 'pending') as next_check_at
        from await_groups g
        left join awaits own on own.workspace_id = g.workspace_id and own.group_id = g.id and g.total = 1
            and g.source_type <> 'child_task' and g.status <> 'open'
        where g.workspace_id = $1 and g.task_id = any($2) and g.resumed_at is null
        order by g.created_at, g.id"#,
        workspace.0,
        tasks
    )
    .fetch_all(db)
    .await?;
    let mut waits = HashMap::<TaskId, Vec<OpenWait>>::new();
    for row in rows {
        waits.entry(row.task_id).or_default().push(OpenWait {
            group_id: row.id,
            source_type: row.source_type,
            status: row.status,
            about: row.about,
            strategy: row.strategy,
            total: row.total,
            pending: row.pending,
            completed: row.completed,
            created_at: row.created_at,
            next_check_at: row.next_check_at,
        });
    }
    Ok(waits)
}
