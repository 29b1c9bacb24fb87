//! What a transaction on tasks writes, gathered in memory and applied in one statement.
//!
//! The lifecycle decides under the tasks' locks and adds to a `Changes`; `apply` writes each table once, however many
//! tasks there are. Guards are repeated in the statement: a row that is not as the decision saw it makes the whole
//! statement fail with `Error::Raced`, and it is decided anew.

use super::{Error, column, tasks};
use crate::domain::{
    decision::{Spent, Usage},
    ids::{GroupId, ItemId, ProcessId, StepId, WorkspaceId},
    step::{StepKey, StepStatus},
    task::{Failure, TaskKey, TaskState},
    task_await::SourceType,
};
use serde_json::Value;
use sqlx::PgConnection;
use uuid::Uuid;

#[derive(Debug, Default)]
pub struct Changes {
    pub tasks: Vec<TaskChange>,
    pub items: Vec<NewItem>,
    pub ended_steps: Vec<EndedStep>,
    pub new_steps: Vec<NewStep>,
    pub signals: Vec<NewSignal>,
    pub events: Vec<NewEvent>,
    pub done_events: Vec<(WorkspaceId, i64)>,
    pub resumed_groups: Vec<(WorkspaceId, GroupId)>,
    pub logs: Vec<DecisionLog>,
}

/// A task's new state; `was_seq` is the `last_seq` that the decision saw.
#[derive(Debug)]
pub struct TaskChange {
    pub state: TaskState,
    pub was_seq: i64,
}

#[derive(Debug)]
pub struct NewItem {
    pub task: TaskKey,
    pub seq: i64,
    pub id: ItemId,
    pub kind: ItemKind,
    pub turn: Option<i32>,
    pub seen_seq: Option<i64>,
    pub text: Option<String>,
    pub data: Option<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, sqlx::Type)]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum ItemKind {
    UserMessage,
    AssistantMessage,
    ResumeMessage,
    RepairMessage,
    ToolCall,
    ToolResult,
    Delegation,
    Wait,
    Status,
}

impl ItemKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::UserMessage => "user_message",
            Self::AssistantMessage => "assistant_message",
            Self::ResumeMessage => "resume_message",
            Self::RepairMessage => "repair_message",
            Self::ToolCall => "tool_call",
            Self::ToolResult => "tool_result",
            Self::Delegation => "delegation",
            Self::Wait => "wait",
            Self::Status => "status",
        }
    }
}

/// The end of a running step by the attempt that holds it.
#[derive(Debug)]
pub struct EndedStep {
    pub key: StepKey,
    pub attempt: i32,
    pub status: StepStatus,
    pub result: Option<String>,
    pub is_error: Option<bool>,
    pub model: Option<String>,
    /// Besides what earlier attempts have spent.
    pub spent: Option<Spent>,
    pub failure: Option<Failure>,
}

#[derive(Debug)]
pub struct NewStep {
    pub key: StepKey,
    pub id: StepId,
    pub stop_generation: i32,
    pub priority: i16,
    /// `None` for a decide step.
    pub call: Option<Call>,
    /// The worker that runs it at once, and its lease in seconds. `None`: queued for anybody.
    pub held_by: Option<(ProcessId, u32)>,
}

#[derive(Clone, Debug)]
pub struct Call {
    pub call_id: String,
    pub tool: String,
    pub arguments: String,
}

#[derive(Debug)]
pub struct NewSignal {
    pub workspace: WorkspaceId,
    pub source_type: SourceType,
    pub key: String,
}

#[derive(Debug)]
pub struct NewEvent {
    pub task: TaskKey,
    pub kind: EventKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, sqlx::Type)]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum EventKind {
    NewMessage,
    TurnCommitted,
    AwaitCompleted,
}

impl EventKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NewMessage => "new_message",
            Self::TurnCommitted => "turn_committed",
            Self::AwaitCompleted => "await_completed",
        }
    }
}

#[derive(Debug)]
pub struct DecisionLog {
    pub task: TaskKey,
    pub turn: i32,
    pub prompt_hash: [u8; 32],
    pub seen_seq: i64,
    pub model: String,
    pub answer: Value,
    pub latency_ms: i32,
    pub retries: i32,
}

/// Writes everything or nothing. [`Error::Raced`]: a row is not as the decision saw it; the statement itself has failed, so
/// it may stand alone, without a transaction around it.
pub async fn apply(conn: &mut PgConnection, changes: &Changes) -> Result<(), Error> {
    let c = changes;
    let states = || c.tasks.iter().map(|t| &t.state);
    let failures: Vec<Option<Value>> = states().map(tasks::failure_json).collect();
    let steps = &c.new_steps;
    let ends = &c.ended_steps;
    let usage =
        |f: fn(&Usage) -> u32| column(ends, |e| e.spent.as_ref().map(|s| i64::from(f(&s.usage))));
    let failure =
        |f: fn(&Failure) -> &str| column(ends, |e| e.failure.as_ref().map(|e| f(e).to_owned()));
    let call = |f: fn(&Call) -> &str| column(steps, |s| s.call.as_ref().map(|c| f(c).to_owned()));
    let written = sqlx::query_scalar!(
        r#"
        with changed_tasks as (
            update tasks t
            set status = c.status, stop_generation = c.stop_generation,
                last_seq = c.last_seq, news_seq = c.news_seq, seen_seq = c.seen_seq,
                turn = c.turn, decides_left = c.decides_left, output = c.output, error = c.error,
                started_at = case when c.status = 'running' then coalesce(t.started_at, now()) else t.started_at end,
                finished_at = case when c.status in ('completed', 'failed', 'stopped')
                    then coalesce(t.finished_at, now()) end
            from unnest($1::uuid[], $2::uuid[], $3::text[], $4::integer[], $5::bigint[], $6::bigint[], $7::bigint[],
                    $8::integer[], $9::integer[], $10::text[], $11::jsonb[], $12::bigint[])
                as c (workspace_id, id, status, stop_generation, last_seq, news_seq, seen_seq,
                    turn, decides_left, output, error, was_seq)
            where t.workspace_id = c.workspace_id and t.id = c.id and t.last_seq = c.was_seq
            returning 1
        ), new_items as (
            insert into task_items (workspace_id, task_id, seq, id, kind, turn, seen_seq, text, data)
            select * from unnest($13::uuid[], $14::uuid[], $15::bigint[], $16::uuid[], $17::text[], $18::integer[],
                $19::bigint[], $20::text[], $21::jsonb[])
        ), ended_steps as (
            update steps s
            set status = c.status, lease_expires_at = null, finished_at = now(), result = c.result, is_error = c.is_error,
                model = c.model,
                input_tokens = coalesce(s.input_tokens + c.input_tokens, c.input_tokens, s.input_tokens),
                output_tokens = coalesce(s.output_tokens + c.output_tokens, c.output_tokens, s.output_tokens),
                cached_tokens = coalesce(s.cached_tokens + c.cached_tokens, c.cached_tokens, s.cached_tokens),
                cost_micros = coalesce(s.cost_micros + c.cost_micros, c.cost_micros, s.cost_micros), error = c.error,
                failure_code = c.failure_code
            from unnest($22::uuid[], $23::uuid[], $24::integer[], $25::integer[], $26::integer[], $27::text[], $28::text[],
                    $29::boolean[], $30::text[], $31::bigint[], $32::bigint[], $33::bigint[], $34::text[], $69::bigint[],
                    $70::text[])
                as c (workspace_id, task_id, turn, ordinal, attempt, status, result, is_error, model,
                    input_tokens, output_tokens, cached_tokens, error, cost_micros, failure_code)
            where s.workspace_id = c.workspace_id and s.task_id = c.task_id and s.turn = c.turn and s.ordinal = c.ordinal
                and s.attempt = c.attempt and s.lease_expires_at is not null
            returning 1
        ), new_steps as (
            insert into steps (workspace_id, task_id, turn, ordinal, id, kind, status, attempt, stop_generation, priority,
                worker_id, lease_expires_at, started_at, call_id, tool, arguments)
            select c.workspace_id, c.task_id, c.turn, c.ordinal, c.id,
                case when c.ordinal = 0 then 'decide_next_action' else 'tool_call' end,
                case when c.worker_id is null then 'queued' else 'running' end,
                case when c.worker_id is null then 0 else 1 end, c.stop_generation, c.priority, c.worker_id,
                now() + make_interval(secs => c.lease_secs), case when c.worker_id is not null then now() end,
                c.call_id, c.tool, c.arguments
            from unnest($35::uuid[], $36::uuid[], $37::integer[], $38::integer[], $39::uuid[], $40::integer[],
                    $41::smallint[], $42::uuid[], $43::float8[], $44::text[], $45::text[], $46::text[])
                as c (workspace_id, task_id, turn, ordinal, id, stop_generation, priority, worker_id, lease_secs,
                    call_id, tool, arguments)
        ), new_signals as (
            -- the first fact about a thing wins
            insert into signals (workspace_id, source_type, dedup_key, correlation_key)
            select c.workspace_id, c.source_type, c.key, c.key
            from unnest($47::uuid[], $48::text[], $49::text[]) as c (workspace_id, source_type, key)
            on conflict do nothing
        ), new_events as (
            insert into orchestrator_events (workspace_id, task_id, kind)
            select * from unnest($50::uuid[], $51::uuid[], $52::text[])
        ), done_events as (
            -- A queue that was analyzed when it was empty passes for empty: a join by the key would read all of it.
            delete from orchestrator_events e
            using unnest($53::uuid[], $54::bigint[]) as c (workspace_id, id)
                cross join lateral (
                    select e.tableoid, e.ctid from orchestrator_events e
                    where e.workspace_id = c.workspace_id and e.id = c.id
                    limit 1
                ) row
            where e.tableoid = row.tableoid and e.ctid = row.ctid
        ), resumed_groups as (
            update await_groups g set resumed_at = now()
            from unnest($55::uuid[], $56::uuid[]) as c (workspace_id, id)
            where g.workspace_id = c.workspace_id and g.id = c.id and g.status <> 'open'
                -- not told yet, said so that the index of the untold ones is not read for it
                and coalesce(g.resumed_at, '-infinity') = '-infinity'
            returning 1
        ), new_logs as (
            insert into decision_logs (workspace_id, task_id, turn, prompt_hash, seen_seq, model, answer, latency_ms, retries)
            select * from unnest($57::uuid[], $58::uuid[], $59::integer[], $60::bytea[], $61::bigint[], $62::text[],
                $63::jsonb[], $64::integer[], $65::integer[])
        )
        -- A number that is not as expected is a division by zero, which undoes the statement.
        select 1 / ((select count(*) from changed_tasks) = $66 and (select count(*) from ended_steps) = $67
            and (select count(*) from resumed_groups) = $68)::integer as "ok!"
        "#,
        &column(states(), |t| t.key.workspace.0),
        &column(states(), |t| t.key.task.0),
        &column(states(), |t| t.status.as_str().to_owned()),
        &column(states(), |t| t.stop_generation),
        &column(states(), |t| t.last_seq),
        &column(states(), |t| t.news_seq),
        &column(states(), |t| t.seen_seq),
        &column(states(), |t| t.turn),
        &column(states(), |t| t.decides_left),
        &column(states(), |t| t.output.clone()) as &[Option<String>],
        &failures as &[Option<Value>],
        &column(&c.tasks, |t| t.was_seq),
        &column(&c.items, |i| i.task.workspace.0),
        &column(&c.items, |i| i.task.task.0),
        &column(&c.items, |i| i.seq),
        &column(&c.items, |i| i.id.0),
        &column(&c.items, |i| i.kind.as_str().to_owned()),
        &column(&c.items, |i| i.turn) as &[Option<i32>],
        &column(&c.items, |i| i.seen_seq) as &[Option<i64>],
        &column(&c.items, |i| i.text.as_deref()) as &[Option<&str>],
        &column(&c.items, |i| i.data.as_ref()) as &[Option<&Value>],
        &column(ends, |e| e.key.workspace.0),
        &column(ends, |e| e.key.task.0),
        &column(ends, |e| e.key.turn),
        &column(ends, |e| e.key.ordinal),
        &column(ends, |e| e.attempt),
        &column(ends, |e| e.status.as_str().to_owned()),
        &column(ends, |e| e.result.as_deref()) as &[Option<&str>],
        &column(ends, |e| e.is_error) as &[Option<bool>],
        &column(ends, |e| e.model.as_deref()) as &[Option<&str>],
        &usage(|u| u.input_tokens) as &[Option<i64>],
        &usage(|u| u.output_tokens) as &[Option<i64>],
        &usage(|u| u.cached_tokens) as &[Option<i64>],
        &failure(|f| &f.message) as &[Option<String>],
        &column(steps, |s| s.key.workspace.0),
        &column(steps, |s| s.key.task.0),
        &column(steps, |s| s.key.turn),
        &column(steps, |s| s.key.ordinal),
        &column(steps, |s| s.id.0),
        &column(steps, |s| s.stop_generation),
        &column(steps, |s| s.priority),
        &column(steps, |s| s.held_by.map(|(worker, _)| worker.0)) as &[Option<Uuid>],
        &column(steps, |s| s.held_by.map(|(_, lease)| f64::from(lease))) as &[Option<f64>],
        &call(|c| &c.call_id) as &[Option<String>],
        &call(|c| &c.tool) as &[Option<String>],
        &call(|c| &c.arguments) as &[Option<String>],
        &column(&c.signals, |s| s.workspace.0),
        &column(&c.signals, |s| s.source_type.as_str().to_owned()),
        &column(&c.signals, |s| s.key.clone()),
        &column(&c.events, |e| e.task.workspace.0),
        &column(&c.events, |e| e.task.task.0),
        &column(&c.events, |e| e.kind.as_str().to_owned()),
        &column(&c.done_events, |e| e.0.0),
        &column(&c.done_events, |e| e.1),
        &column(&c.resumed_groups, |g| g.0.0),
        &column(&c.resumed_groups, |g| g.1.0),
        &column(&c.logs, |l| l.task.workspace.0),
        &column(&c.logs, |l| l.task.task.0),
        &column(&c.logs, |l| l.turn),
        &column(&c.logs, |l| l.prompt_hash.to_vec()),
        &column(&c.logs, |l| l.seen_seq),
        &column(&c.logs, |l| l.model.clone()),
        &column(&c.logs, |l| l.answer.clone()),
        &column(&c.logs, |l| l.latency_ms),
        &column(&c.logs, |l| l.retries),
        c.tasks.len() as i64,
        ends.len() as i64,
        c.resumed_groups.len() as i64,
        &column(ends, |e| e.spent.and_then(|s| s.cost_micros)) as &[Option<i64>],
        &failure(|f| &f.code) as &[Option<String>],
    )
    .fetch_one(conn)
    .await;
    match written {
        Ok(_) => Ok(()),
        Err(sqlx::Error::Database(e)) if e.code().as_deref() == Some(DIVISION_BY_ZERO) => {
            Err(Error::Raced)
        }
        Err(error) => Err(error.into()),
    }
}

const DIVISION_BY_ZERO: &str = "22012";
