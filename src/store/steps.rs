//! Rows of `steps`: claiming, leasing and giving back. Ends of steps are written with the task, by `changes`.

use super::{Error, column, tasks::Setup};
use crate::domain::{
    decision::{Spent, Usage},
    ids::{AgentId, ProcessId, StepId, TaskId, WorkspaceId},
    step::{Claim, StepKey, StepStatus},
    task::{Failure, TaskKey, TaskState, TaskStatus},
};
use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use std::collections::HashMap;

/// A step that this process has just claimed.
#[derive(Clone, Debug)]
pub struct Claimed {
    pub claim: Claim,
    /// As it was at the claim, without a lock.
    pub task: TaskState,
    pub setup: Setup,
    pub model_attempts: i32,
    /// Set for a tool call.
    pub call: Option<super::changes::Call>,
}

/// Claims at most `limit` queued steps of all workspaces whose time has come, oldest first. The attempt number grows,
/// the lease starts now by the database's clock.
pub async fn claim_all_workspaces(
    conn: &mut PgConnection,
    worker: ProcessId,
    lease_secs: u32,
    limit: u32,
) -> Result<Vec<Claimed>, Error> {
    let rows = sqlx::query!(
        r#"
        with due as (
            select workspace_id, task_id, turn, ordinal, status from steps
            where status = 'queued' and run_at <= now()
            order by run_at
            limit $3
            for no key update skip locked
        )
        update steps s
        set status = 'running', attempt = s.attempt + 1, worker_id = $1, started_at = coalesce(s.started_at, now()),
            lease_expires_at = now() + make_interval(secs => $2)
        from due
        join tasks t on t.workspace_id = due.workspace_id and t.id = due.task_id
        where s.workspace_id = due.workspace_id and s.task_id = due.task_id and s.turn = due.turn
            and s.ordinal = due.ordinal and s.status = due.status
        returning s.turn as step_turn, s.ordinal, s.id as "step_id: StepId", s.attempt, s.model_attempts,
            s.stop_generation as step_generation, s.call_id, s.tool, s.arguments,
            t.workspace_id as "workspace_id: WorkspaceId", t.id as "id: TaskId", t.status as "status: TaskStatus",
            t.deleted_at is not null as "deleted!", t.parent_task_id is not null as "is_child!", t.stop_generation,
            t.priority, t.last_seq, t.news_seq, t.seen_seq, t.turn, t.decides_left,
            t.agent_workspace_id as "agent_workspace_id: WorkspaceId", t.agent_id as "agent_id: AgentId", t.agent_version,
            t.root_task_id as "root_task_id: TaskId", t.spawn_depth, t.source_metadata @> '{"disable_delegation": true}' as "delegation_disabled!",
            exists (select from model_providers p where p.workspace_id = t.workspace_id) as "own_models!",
            t.budgeted or exists (select from budgets b where b.workspace_id = t.workspace_id and b.id = t.workspace_id) as "budgeted!"
        "#,
        worker.0,
        f64::from(lease_secs),
        i64::from(limit),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| Claimed {
            claim: Claim {
                key: StepKey {
                    workspace: r.workspace_id,
                    task: r.id,
                    turn: r.step_turn,
                    ordinal: r.ordinal,
                },
                step: r.step_id,
                attempt: r.attempt,
                worker,
                stop_generation: r.step_generation,
            },
            task: super::task_state!(r),
            setup: super::task_setup!(r),
            model_attempts: r.model_attempts,
            call: match (r.call_id, r.tool, r.arguments) {
                (Some(call_id), Some(tool), Some(arguments)) => Some(super::changes::Call {
                    call_id,
                    tool,
                    arguments,
                }),
                _ => None,
            },
        })
        .collect())
}

/// Claims a queued call of this turn, the first of them, for whoever has just ended another one of it. A turn is drained by
/// its workers even where the queue is long, and without asking who else there is.
pub async fn claim_of_turn(
    conn: &mut PgConnection,
    turn: StepKey,
    worker: ProcessId,
    lease_secs: u32,
) -> Result<Option<Claim>, Error> {
    let row = sqlx::query!(
        r#"
        with next as (
            select ordinal from steps
            where workspace_id = $1 and task_id = $2 and turn = $3 and ordinal > 0
                and finished_at is null and lease_expires_at is null and run_at <= now()
            order by ordinal
            limit 1
            for no key update skip locked
        )
        update steps s
        set status = 'running', attempt = s.attempt + 1, worker_id = $4, started_at = coalesce(s.started_at, now()),
            lease_expires_at = now() + make_interval(secs => $5)
        from next
        where s.workspace_id = $1 and s.task_id = $2 and s.turn = $3 and s.ordinal = next.ordinal
            and s.finished_at is null and s.lease_expires_at is null
        returning s.ordinal, s.id as "id: StepId", s.attempt, s.stop_generation
        "#,
        turn.workspace.0,
        turn.task.0,
        turn.turn,
        worker.0,
        f64::from(lease_secs),
    )
    .fetch_optional(conn)
    .await?;
    Ok(row.map(|r| Claim {
        key: StepKey {
            ordinal: r.ordinal,
            ..turn
        },
        step: r.id,
        attempt: r.attempt,
        worker,
        stop_generation: r.stop_generation,
    }))
}

/// A call that has started, as it is under its task's lock: only under that does it end.
#[derive(Clone, Debug)]
pub struct CallState {
    pub call_id: String,
    pub tool: String,
    pub status: StepStatus,
    /// Only of one that is held back, since an elder call has not ended.
    pub result: Option<String>,
    pub is_error: bool,
    pub failure: Option<Failure>,
    pub finished_at: Option<DateTime<Utc>>,
}

/// The calls of each of these turns (task, turn) that have started, in model order. The tasks must be locked.
pub async fn calls_of_turns(
    conn: &mut PgConnection,
    turns: &[(TaskKey, i32)],
) -> Result<HashMap<(TaskKey, i32), Vec<CallState>>, Error> {
    let rows = sqlx::query!(
        r#"
        select s.workspace_id as "workspace_id: WorkspaceId", s.task_id as "task_id: TaskId", s.turn, s.status as "status: StepStatus",
            coalesce(s.call_id, '') as "call_id!", coalesce(s.tool, '') as "tool!",
            coalesce(s.is_error, false) as "is_error!", s.error, s.failure_code, s.finished_at,
            case when exists (
                select from steps elder
                where elder.workspace_id = s.workspace_id and elder.task_id = s.task_id and elder.turn = s.turn
                    and elder.ordinal between 1 and s.ordinal - 1 and elder.finished_at is null
            ) then s.result end as result
        from unnest($1::uuid[], $2::uuid[], $3::integer[]) as c (workspace_id, task_id, turn)
        join steps s on s.workspace_id = c.workspace_id and s.task_id = c.task_id and s.turn = c.turn and s.ordinal > 0
        order by s.workspace_id, s.task_id, s.turn, s.ordinal
        "#,
        &column(turns, |t| t.0.workspace.0),
        &column(turns, |t| t.0.task.0),
        &column(turns, |t| t.1),
    )
    .fetch_all(conn)
    .await?;
    let mut calls = HashMap::<_, Vec<CallState>>::new();
    for r in rows {
        let task = TaskKey {
            workspace: r.workspace_id,
            task: r.task_id,
        };
        let failure = r.error.map(|message| {
            let code = r.failure_code.as_deref().unwrap_or("internal");
            Failure::new(code, message)
        });
        calls.entry((task, r.turn)).or_default().push(CallState {
            call_id: r.call_id,
            tool: r.tool,
            status: r.status,
            result: r.result,
            is_error: r.is_error,
            failure,
            finished_at: r.finished_at,
        });
    }
    Ok(calls)
}

/// Extends the leases of these claims. Rows that another transaction is writing are left alone: their lease is about to
/// end or to be extended by it.
pub async fn renew(
    conn: &mut PgConnection,
    claims: &[Claim],
    lease_secs: u32,
) -> Result<(), Error> {
    sqlx::query!(
        r#"
        with held as (
            select s.workspace_id, s.task_id, s.turn, s.ordinal
            from unnest($1::uuid[], $2::uuid[], $3::integer[], $4::integer[], $5::integer[])
                as c (workspace_id, task_id, turn, ordinal, attempt)
            join steps s on s.workspace_id = c.workspace_id and s.task_id = c.task_id and s.turn = c.turn
                and s.ordinal = c.ordinal and s.attempt = c.attempt
            where s.lease_expires_at is not null
            for no key update of s skip locked
        )
        update steps s set lease_expires_at = now() + make_interval(secs => $6)
        from held
        where s.workspace_id = held.workspace_id and s.task_id = held.task_id and s.turn = held.turn
            and s.ordinal = held.ordinal
        "#,
        &column(claims, |c| c.key.workspace.0),
        &column(claims, |c| c.key.task.0),
        &column(claims, |c| c.key.turn),
        &column(claims, |c| c.key.ordinal),
        &column(claims, |c| c.attempt),
        f64::from(lease_secs),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Which of these claims still hold their step, or have just completed it: the holder is about to learn of its own
/// commit, and then holds the next step of the turn. It must not take that for a loss.
pub async fn still_held(conn: &mut PgConnection, claims: &[Claim]) -> Result<Vec<Claim>, Error> {
    let rows = sqlx::query_scalar!(
        r#"
        select c.n as "n!"
        from unnest($1::uuid[], $2::uuid[], $3::integer[], $4::integer[], $5::integer[]) with ordinality
            as c (workspace_id, task_id, turn, ordinal, attempt, n)
        join steps s on s.workspace_id = c.workspace_id and s.task_id = c.task_id and s.turn = c.turn
            and s.ordinal = c.ordinal and s.attempt = c.attempt
        where s.status in ('running', 'completed')
        "#,
        &column(claims, |c| c.key.workspace.0),
        &column(claims, |c| c.key.task.0),
        &column(claims, |c| c.key.turn),
        &column(claims, |c| c.key.ordinal),
        &column(claims, |c| c.attempt),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .filter_map(|n| claims.get((n - 1) as usize).copied())
        .collect())
}

/// A step as it is under its task's lock.
#[derive(Clone, Copy, Debug)]
pub struct StepState {
    pub key: StepKey,
    pub step: StepId,
    pub status: StepStatus,
    pub attempt: i32,
    pub lost_leases: i32,
    pub lease_expired: bool,
}

/// Locks steps, in key order; their tasks must be locked already.
pub async fn lock(conn: &mut PgConnection, keys: &[StepKey]) -> Result<Vec<StepState>, Error> {
    let rows = sqlx::query!(
        r#"
        select s.workspace_id as "workspace_id: WorkspaceId", s.task_id as "task_id: TaskId", s.turn, s.ordinal,
            s.id as "id: StepId", s.status as "status: StepStatus", s.attempt, s.lost_leases,
            coalesce(s.lease_expires_at < now(), false) as "lease_expired!"
        from unnest($1::uuid[], $2::uuid[], $3::integer[], $4::integer[]) as c (workspace_id, task_id, turn, ordinal)
        join steps s on s.workspace_id = c.workspace_id and s.task_id = c.task_id and s.turn = c.turn
            and s.ordinal = c.ordinal
        order by s.workspace_id, s.task_id, s.turn, s.ordinal
        for no key update of s
        "#,
        &column(keys, |k| k.workspace.0),
        &column(keys, |k| k.task.0),
        &column(keys, |k| k.turn),
        &column(keys, |k| k.ordinal),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| StepState {
            key: StepKey {
                workspace: r.workspace_id,
                task: r.task_id,
                turn: r.turn,
                ordinal: r.ordinal,
            },
            step: r.id,
            status: r.status,
            attempt: r.attempt,
            lost_leases: r.lost_leases,
            lease_expired: r.lease_expired,
        })
        .collect())
}

/// Running steps of all workspaces whose lease has run out, longest first. Read without a lock: whoever acts on one
/// locks it and looks again.
pub async fn expired_all_workspaces(
    conn: &mut PgConnection,
    limit: u32,
) -> Result<Vec<StepKey>, Error> {
    let rows = sqlx::query!(
        r#"
        select workspace_id as "workspace_id: WorkspaceId", task_id as "task_id: TaskId", turn, ordinal
        from steps
        where status = 'running' and lease_expires_at < now()
        order by lease_expires_at
        limit $1
        "#,
        i64::from(limit),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| StepKey {
            workspace: r.workspace_id,
            task: r.task_id,
            turn: r.turn,
            ordinal: r.ordinal,
        })
        .collect())
}

/// Why a running step goes back to the queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GiveBack {
    /// Its worker was lost: counts towards `worker.max_attempts`.
    LeaseLost,
    /// The model asked for patience: run again after so many seconds. Counts towards `llm.max_attempts`. What was spent
    /// before it did so is added to the step.
    ModelBusy { seconds: f64, spent: Spent },
    /// A budget is held by calls under way, or used up: run again after so many seconds. Counts as nothing.
    Budget { seconds: f64, spent: Spent },
    /// The process is shutting down: counts as nothing.
    Shutdown,
}

/// Puts running steps back into the queue. Returns how many were still running with that attempt.
pub async fn give_back(
    conn: &mut PgConnection,
    steps: &[(StepKey, i32, GiveBack)],
) -> Result<u64, Error> {
    let spent = |f: fn(&Spent) -> Option<i64>| {
        column(steps, |s| match &s.2 {
            GiveBack::ModelBusy { spent, .. } | GiveBack::Budget { spent, .. }
                if spent.usage != Usage::default() =>
            {
                f(spent)
            }
            GiveBack::ModelBusy { .. }
            | GiveBack::Budget { .. }
            | GiveBack::LeaseLost
            | GiveBack::Shutdown => None,
        })
    };
    let done = sqlx::query!(
        r#"
        update steps s
        set status = 'queued', lease_expires_at = null, worker_id = null,
            run_at = now() + make_interval(secs => c.delay_secs),
            lost_leases = s.lost_leases + c.lost, model_attempts = s.model_attempts + c.busy,
            input_tokens = coalesce(s.input_tokens + c.input_tokens, c.input_tokens, s.input_tokens),
            output_tokens = coalesce(s.output_tokens + c.output_tokens, c.output_tokens, s.output_tokens),
            cached_tokens = coalesce(s.cached_tokens + c.cached_tokens, c.cached_tokens, s.cached_tokens),
            cost_micros = coalesce(s.cost_micros + c.cost_micros, c.cost_micros, s.cost_micros)
        from unnest($1::uuid[], $2::uuid[], $3::integer[], $4::integer[], $5::integer[], $6::float8[], $7::integer[],
                $8::integer[], $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[])
            as c (workspace_id, task_id, turn, ordinal, attempt, delay_secs, lost, busy,
                input_tokens, output_tokens, cached_tokens, cost_micros)
        where s.workspace_id = c.workspace_id and s.task_id = c.task_id and s.turn = c.turn and s.ordinal = c.ordinal
            and s.attempt = c.attempt and s.lease_expires_at is not null
        "#,
        &column(steps, |s| s.0.workspace.0),
        &column(steps, |s| s.0.task.0),
        &column(steps, |s| s.0.turn),
        &column(steps, |s| s.0.ordinal),
        &column(steps, |s| s.1),
        &column(steps, |s| match s.2 {
            GiveBack::ModelBusy { seconds, .. } | GiveBack::Budget { seconds, .. } => seconds,
            GiveBack::LeaseLost | GiveBack::Shutdown => 0.0,
        }),
        &column(steps, |s| i32::from(s.2 == GiveBack::LeaseLost)),
        &column(steps, |s| i32::from(matches!(s.2, GiveBack::ModelBusy { .. }))),
        &spent(|s| Some(s.usage.input_tokens.into())) as &[Option<i64>],
        &spent(|s| Some(s.usage.output_tokens.into())) as &[Option<i64>],
        &spent(|s| Some(s.usage.cached_tokens.into())) as &[Option<i64>],
        &spent(|s| s.cost_micros) as &[Option<i64>],
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected())
}

/// Cancels every queued or running step of these tasks, which must be locked.
pub async fn cancel_of_tasks(conn: &mut PgConnection, tasks: &[TaskKey]) -> Result<u64, Error> {
    let done = sqlx::query!(
        r#"
        update steps s
        set status = 'cancelled', lease_expires_at = null, finished_at = now()
        from unnest($1::uuid[], $2::uuid[]) as c (workspace_id, task_id)
        where s.workspace_id = c.workspace_id and s.task_id = c.task_id and s.status in ('queued', 'running')
        "#,
        &column(tasks, |k| k.workspace.0),
        &column(tasks, |k| k.task.0),
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected())
}

/// The children that these calls have made and never started.
pub async fn unstarted_children(
    conn: &mut PgConnection,
    steps: &[(TaskKey, StepId)],
) -> Result<Vec<TaskKey>, Error> {
    let rows = sqlx::query!(
        r#"
        select t.workspace_id as "workspace_id: WorkspaceId", t.id as "id: TaskId", t.status as "status: TaskStatus"
        from unnest($1::uuid[], $2::uuid[], $3::uuid[]) as c (workspace_id, task_id, step_id)
        join tasks t on t.workspace_id = c.workspace_id and t.parent_task_id = c.task_id
            and t.parent_step_id = c.step_id
        "#,
        &column(steps, |s| s.0.workspace.0),
        &column(steps, |s| s.0.task.0),
        &column(steps, |s| s.1.0),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .filter(|r| r.status == TaskStatus::Pending)
        .map(|r| TaskKey {
            workspace: r.workspace_id,
            task: r.id,
        })
        .collect())
}
