//! What decide steps have asked and got (A-31). Written with the step, by `changes`; read here, and removed when too old.
//!
//! Logs of deleted tasks are in no answer. There is no index by time: task ids are in order of creation, so the table's
//! key leads to the oldest logs, and writing one costs the hot path nothing more.

use super::Error;
use crate::domain::{
    agent::AgentDefinition,
    decision::{RawCall, ToolCall, Usage},
    ids::{AgentId, TaskId, WorkspaceId},
    task::Failure,
};
use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde_json::Value;
use sqlx::{PgConnection, types::Json};

/// Names a log within its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecisionKey {
    pub task: TaskId,
    pub turn: i32,
}

/// A log as a row of a list.
#[derive(Clone, Debug)]
pub struct DecisionRow {
    pub key: DecisionKey,
    pub agent: AgentId,
    pub agent_name: String,
    pub model: String,
    pub answer: LoggedAnswer,
    pub latency_ms: i32,
    pub retries: i32,
    pub created_at: DateTime<Utc>,
}

/// What the log adds to the feed.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct LoggedAnswer {
    /// Names of the tools called.
    pub calls: Vec<String>,
    pub raw_calls: Option<Vec<RawCall>>,
    pub usage: Usage,
    pub cost_micros: Option<i64>,
    pub error: Option<Failure>,
}

/// At most `limit` logs, newest tasks first and in each the newest turn first, that come after `after`.
pub async fn list(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    task: Option<TaskId>,
    after: Option<DecisionKey>,
    limit: i64,
) -> Result<Vec<DecisionRow>, Error> {
    let rows = sqlx::query!(
        r#"
        select d.task_id as "task_id: TaskId", d.turn, t.agent_id as "agent_id: AgentId",
            coalesce(v.definition ->> 'name', '') as "agent_name!", d.model,
            d.answer as "answer: Json<LoggedAnswer>", d.latency_ms, d.retries, d.created_at
        from decision_logs d
        join tasks t on t.workspace_id = d.workspace_id and t.id = d.task_id and t.deleted_at is null
        join agent_versions v
            on v.workspace_id = t.agent_workspace_id and v.agent_id = t.agent_id and v.version = t.agent_version
        where d.workspace_id = $1 and ($2::uuid is null or d.task_id = $2)
            and ($3::uuid is null or (d.task_id, d.turn) < ($3, $4::integer))
        order by d.task_id desc, d.turn desc
        limit $5
        "#,
        workspace.0,
        task.map(|task| task.0),
        after.map(|after| after.task.0),
        after.map(|after| after.turn),
        limit,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| DecisionRow {
            key: DecisionKey {
                task: r.task_id,
                turn: r.turn,
            },
            agent: r.agent_id,
            agent_name: r.agent_name,
            model: r.model,
            answer: r.answer.0,
            latency_ms: r.latency_ms,
            retries: r.retries,
            created_at: r.created_at,
        })
        .collect())
}

/// One log with all that it names.
#[derive(Clone, Debug)]
pub struct LoggedDecision {
    pub row: DecisionRow,
    /// The version that the task runs.
    pub agent: AgentDefinition,
    /// `None`: it has been forgotten.
    pub prompt: Option<Value>,
    /// The messages sent are the feed up to here.
    pub seen_seq: i64,
    /// Null where the model gave no answer.
    pub text: Option<String>,
    pub calls: Vec<ToolCall>,
}

pub async fn get(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    key: DecisionKey,
) -> Result<Option<LoggedDecision>, Error> {
    #[derive(Debug, Deserialize)]
    struct Calls {
        calls: Vec<ToolCall>,
    }
    let row = sqlx::query!(
        r#"
        select t.agent_id as "agent_id: AgentId", v.definition as "definition: Json<AgentDefinition>", d.model,
            d.answer as "answer: Json<LoggedAnswer>", d.latency_ms, d.retries, d.created_at, d.seen_seq,
            p.sections as "sections?", i.text as "text?", i.data as "calls?: Json<Calls>"
        from decision_logs d
        join tasks t on t.workspace_id = d.workspace_id and t.id = d.task_id and t.deleted_at is null
        join agent_versions v
            on v.workspace_id = t.agent_workspace_id and v.agent_id = t.agent_id and v.version = t.agent_version
        left join prompt_texts p on p.workspace_id = d.workspace_id and p.hash = d.prompt_hash
        left join task_items i on i.workspace_id = d.workspace_id and i.task_id = d.task_id and i.turn = d.turn
            and i.kind = 'assistant_message'
        where d.workspace_id = $1 and d.task_id = $2 and d.turn = $3
        "#,
        workspace.0,
        key.task.0,
        key.turn,
    )
    .fetch_optional(conn)
    .await?;
    Ok(row.map(|r| LoggedDecision {
        row: DecisionRow {
            key,
            agent: r.agent_id,
            agent_name: r.definition.name.clone(),
            model: r.model,
            answer: r.answer.0,
            latency_ms: r.latency_ms,
            retries: r.retries,
            created_at: r.created_at,
        },
        agent: r.definition.0,
        prompt: r.sections,
        seen_seq: r.seen_seq,
        text: r.text,
        calls: r
            .calls
            .map(|Json(Calls { calls })| calls)
            .unwrap_or_default(),
    }))
}

/// Removes at most `limit` logs that are more than `days` old. Returns how many.
pub async fn forget_old_all_workspaces(
    conn: &mut PgConnection,
    days: i32,
    limit: i64,
) -> Result<u64, Error> {
    let done = sqlx::query!(
        r#"
        with bound as (
            -- A task is older than its logs: the greatest id of a task that may have a log this old. A day is for clocks
            -- that differ, since ids are made by those of the machines.
            select now() - make_interval(days => $1) as cutoff,
                (lpad(to_hex((extract(epoch from now() - make_interval(days => $1 - 1)) * 1000)::bigint), 12, '0')
                    || repeat('f', 20))::uuid as last_task
        ), old as (
            select d.workspace_id, d.task_id, d.turn
            from bound
            cross join workspaces w
            cross join lateral (
                select d.workspace_id, d.task_id, d.turn from decision_logs d
                where d.workspace_id = w.id and d.task_id <= bound.last_task and d.created_at < bound.cutoff
                order by d.task_id
                limit $2
                for update skip locked
            ) d
            limit $2
        )
        delete from decision_logs d
        using old
        where d.workspace_id = old.workspace_id and d.task_id = old.task_id and d.turn = old.turn
        "#,
        days,
        limit,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected())
}
