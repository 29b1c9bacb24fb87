//! Rows of `await_groups` and `awaits`. Settling is driven by `lifecycle::complete_awaits` alone.

use super::{Error, changes::EventKind, column, events::Event, signals::Signal};
use crate::domain::{
    delegation::{Outcome, Report},
    ids::{GroupId, StepId, TaskId, WorkspaceId},
    task::{Failure, TaskKey, TaskStatus},
    task_await::{AwaitStatus, GroupStatus, SourceType, Strategy, Tally, WaitFor, wait_text},
};
use serde_json::Value;
use sqlx::{PgConnection, types::Json};

#[derive(Clone, Debug)]
pub struct NewGroup {
    pub id: GroupId,
    pub task: TaskKey,
    pub step: StepId,
    pub source_type: SourceType,
    pub strategy: Strategy,
    /// Length of one liveness window; `None`: no due time.
    pub window_seconds: Option<i32>,
    /// What each await waits for, in order.
    pub correlation_keys: Vec<String>,
}

/// A group of one await for something else than a child.
#[derive(Clone, Debug)]
pub struct NewWait<'a> {
    pub group: GroupId,
    pub task: TaskKey,
    pub step: StepId,
    pub wait: &'a WaitFor,
    pub correlation_key: &'a str,
    /// SHA-256 of the token that may signal it without an account.
    pub callback_hash: Option<[u8; 32]>,
}

/// Inserts a wait. Its due time is reckoned by the database's clock.
pub async fn insert_wait(conn: &mut PgConnection, new: &NewWait<'_>) -> Result<(), Error> {
    let (at, seconds) = match new.wait {
        WaitFor::User { .. } => (None, None),
        WaitFor::Time(time) => (Some(*time), None),
        WaitFor::Seconds(seconds) => (None, Some(*seconds)),
        WaitFor::Signal {
            timeout_seconds, ..
        } => (None, *timeout_seconds),
    };
    sqlx::query!(
        r#"
        with new_group as (
            insert into await_groups (workspace_id, id, task_id, step_id, source_type, strategy, total, pending, about)
            values ($1, $2, $3, $4, $5, 'all_required', 1, 1, $6)
        )
        insert into awaits (workspace_id, group_id, ordinal, source_type, correlation_key, callback_hash,
            scheduled_resume_at)
        values ($1, $2, 0, $5, $7, $8, coalesce($9, now() + make_interval(secs => $10)))
        "#,
        new.task.workspace.0,
        new.group.0,
        new.task.task.0,
        new.step.0,
        new.wait.source_type().as_str(),
        new.wait.about(),
        new.correlation_key,
        new.callback_hash.as_ref().map(|h| h.as_slice()),
        at,
        seconds,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The external wait that a callback token is for, whether it is pending or over. The token's hash is all that there is to
/// go by: it names the workspace.
pub async fn by_callback_all_workspaces(
    conn: &mut PgConnection,
    hash: &[u8; 32],
) -> Result<Option<PendingAwait>, Error> {
    let row = sqlx::query!(
        r#"
        select a.workspace_id as "workspace: WorkspaceId", a.group_id as "group: GroupId", a.ordinal,
            a.source_type as "source_type: SourceType", a.correlation_key
        from awaits a
        join workspaces w on w.id = a.workspace_id and w.deleted_at is null
        where a.callback_hash = $1
        "#,
        hash.as_slice(),
    )
    .fetch_optional(conn)
    .await?;
    Ok(row.map(|r| PendingAwait {
        workspace: r.workspace,
        group: r.group,
        ordinal: r.ordinal,
        source_type: r.source_type,
        correlation_key: r.correlation_key,
    }))
}

/// Puts another token in the place of that of an external wait.
pub async fn replace_callback(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    group: GroupId,
    hash: &[u8; 32],
) -> Result<(), Error> {
    sqlx::query!(
        r#"
        update awaits set callback_hash = $3
        where workspace_id = $1 and group_id = $2 and source_type = 'external' and callback_hash is not null
        "#,
        workspace.0,
        group.0,
        hash.as_slice(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// What the closed groups that are not for children have to tell, in group order.
pub async fn wait_outcomes(
    conn: &mut PgConnection,
    groups: &[(WorkspaceId, GroupId)],
) -> Result<Vec<(GroupId, Option<String>)>, Error> {
    let rows = sqlx::query!(
        r#"
        select a.group_id as "group: GroupId", a.source_type as "source_type: SourceType",
            a.status as "status: AwaitStatus", g.about, a.payload
        from unnest($1::uuid[], $2::uuid[]) as c (workspace_id, id)
        join await_groups g on g.workspace_id = c.workspace_id and g.id = c.id
        join awaits a on a.workspace_id = g.workspace_id and a.group_id = g.id and a.source_type <> 'child_task'
        "#,
        &column(groups, |g| g.0.0),
        &column(groups, |g| g.1.0),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| {
            let about = r.about.unwrap_or_default();
            (
                r.group,
                wait_text(r.source_type, r.status, &about, r.payload.as_ref()),
            )
        })
        .collect())
}

/// Inserts groups and their awaits.
pub async fn insert_groups(conn: &mut PgConnection, groups: &[NewGroup]) -> Result<(), Error> {
    let total = |group: &NewGroup| group.correlation_keys.len() as i32;
    // The number of the group, counted from 1, and the place within it, of each await.
    let awaits: Vec<(i32, i32, &str)> = (1..)
        .zip(groups)
        .flat_map(|(n, group)| {
            let keys = (0..).zip(&group.correlation_keys);
            keys.map(move |(ordinal, key)| (n, ordinal, key.as_str()))
        })
        .collect();
    sqlx::query!(
        r#"
        with new as (
            select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::text[], $6::text[], $7::integer[],
                    $8::integer[], $9::integer[]) with ordinality
                as c (workspace_id, id, task_id, step_id, source_type, strategy, quorum, total, window_seconds, n)
        ), new_groups as (
            insert into await_groups (workspace_id, id, task_id, step_id, source_type, strategy, quorum, total, pending,
                window_seconds)
            select workspace_id, id, task_id, step_id, source_type, strategy, quorum, total, total, window_seconds from new
        )
        insert into awaits (workspace_id, group_id, ordinal, source_type, correlation_key, scheduled_resume_at)
        select g.workspace_id, g.id, c.ordinal, g.source_type, c.key, now() + make_interval(secs => g.window_seconds)
        from unnest($10::integer[], $11::integer[], $12::text[]) as c (n, ordinal, key)
        join new g on g.n = c.n
        "#,
        &column(groups, |g| g.task.workspace.0),
        &column(groups, |g| g.id.0),
        &column(groups, |g| g.task.task.0),
        &column(groups, |g| g.step.0),
        &column(groups, |g| g.source_type.as_str()) as &[&str],
        &column(groups, |g| g.strategy.as_str()) as &[&str],
        &column(groups, |g| g.strategy.quorum()) as &[Option<i32>],
        &column(groups, total),
        &column(groups, |g| g.window_seconds) as &[Option<i32>],
        &column(&awaits, |a| a.0),
        &column(&awaits, |a| a.1),
        &column(&awaits, |a| a.2) as &[&str],
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The group that this call has already made, if any (D-26).
pub async fn group_of_step(
    conn: &mut PgConnection,
    task: TaskKey,
    step: StepId,
) -> Result<Option<GroupId>, Error> {
    Ok(sqlx::query_scalar!(
        r#"
        select id as "id: GroupId" from await_groups
        where workspace_id = $1 and task_id = $2 and step_id = $3
        "#,
        task.workspace.0,
        task.task.0,
        step.0,
    )
    .fetch_optional(conn)
    .await?)
}

/// One await that something may have happened to. Read without a lock, so it may have been settled since; settling it is a
/// compare-and-set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingAwait {
    pub workspace: WorkspaceId,
    pub group: GroupId,
    pub ordinal: i32,
    pub source_type: SourceType,
    pub correlation_key: String,
}

impl PendingAwait {
    pub fn settled(&self, to: AwaitStatus) -> Settlement {
        Settlement {
            workspace: self.workspace,
            group: self.group,
            ordinal: self.ordinal,
            to,
            payload: None,
        }
    }
}

/// The pending awaits of tasks, only those for `source` if given.
pub async fn pending_of_tasks(
    conn: &mut PgConnection,
    tasks: &[TaskKey],
    source: Option<SourceType>,
) -> Result<Vec<(TaskKey, PendingAwait)>, Error> {
    let rows = sqlx::query!(
        r#"
        select g.task_id as "task: TaskId", a.workspace_id as "workspace: WorkspaceId", a.group_id as "group: GroupId",
            a.ordinal, a.source_type as "source_type: SourceType", a.correlation_key
        from unnest($1::uuid[], $2::uuid[]) as c (workspace_id, task_id)
        join await_groups g on g.workspace_id = c.workspace_id and g.task_id = c.task_id
            and g.resumed_at is null and g.status = 'open'
        join awaits a on a.workspace_id = g.workspace_id and a.group_id = g.id
        where a.settled_at is null and ($3::text is null or a.source_type = $3)
        "#,
        &column(tasks, |k| k.workspace.0),
        &column(tasks, |k| k.task.0),
        source.map(SourceType::as_str),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| {
            (
                TaskKey {
                    workspace: r.workspace,
                    task: r.task,
                },
                PendingAwait {
                    workspace: r.workspace,
                    group: r.group,
                    ordinal: r.ordinal,
                    source_type: r.source_type,
                    correlation_key: r.correlation_key,
                },
            )
        })
        .collect())
}

/// A group under its lock.
#[derive(Clone, Copy, Debug)]
pub struct GroupState {
    pub workspace: WorkspaceId,
    pub id: GroupId,
    pub task: TaskId,
    pub status: GroupStatus,
    pub strategy: Strategy,
    pub tally: Tally,
}

/// How one await is to be settled.
#[derive(Clone, Debug)]
pub struct Settlement {
    pub workspace: WorkspaceId,
    pub group: GroupId,
    pub ordinal: i32,
    pub to: AwaitStatus,
    /// What the signal brought.
    pub payload: Option<Value>,
}

/// Locks the groups of these awaits, in key order, and settles the awaits that are still pending (compare-and-set).
/// Returns those that were, each with its group as it is under the lock.
///
/// One statement, though it may wait for the locks: of what it reads after waiting, the locked rows are the newest, and an
/// await that was settled meanwhile fails its guard. It must not read anything else.
pub async fn lock_groups_and_settle(
    conn: &mut PgConnection,
    settlements: &[Settlement],
) -> Result<Vec<(Settlement, GroupState)>, Error> {
    let rows = sqlx::query!(
        r#"
        with locked as (
            select g.workspace_id, g.id, g.task_id, g.status, g.strategy, g.quorum, g.total, g.pending, g.completed
            from (select distinct * from unnest($1::uuid[], $2::uuid[]) as c (workspace_id, id)) c
            join await_groups g on g.workspace_id = c.workspace_id and g.id = c.id
            order by g.workspace_id, g.id
            for no key update of g
        ), wanted as materialized (
            -- apart, so that each await is found by its whole key and not by its group's, which may have thousands (D-52)
            select c.workspace_id, c.group_id, c.ordinal, c.status as to_status, c.payload, c.n, g.task_id, g.status,
                g.strategy, g.quorum, g.total, g.pending, g.completed
            from unnest($1::uuid[], $2::uuid[], $3::integer[], $4::text[], $5::jsonb[]) with ordinality
                as c (workspace_id, group_id, ordinal, status, payload, n)
            join locked g on g.workspace_id = c.workspace_id and g.id = c.group_id
        )
        update awaits a
        set status = c.to_status, settled_at = now(), payload = c.payload
        from wanted c
        where a.workspace_id = c.workspace_id and a.group_id = c.group_id and a.ordinal = c.ordinal
            and a.settled_at is null
        returning c.n as "n!", c.task_id as "task!: TaskId", c.status as "status!: GroupStatus", c.strategy as "strategy!",
            c.quorum, c.total as "total!", c.pending as "pending!", c.completed as "completed!"
        "#,
        &column(settlements, |s| s.workspace.0),
        &column(settlements, |s| s.group.0),
        &column(settlements, |s| s.ordinal),
        &column(settlements, |s| s.to.as_str().to_owned()),
        &column(settlements, |s| s.payload.as_ref()) as &[Option<&Value>],
    )
    .fetch_all(conn)
    .await?;
    let settled = rows.into_iter().filter_map(|r| {
        let settlement = settlements.get((r.n - 1) as usize)?;
        let Some(strategy) = Strategy::from_columns(&r.strategy, r.quorum) else {
            return Some(Err(Error::Corrupt {
                table: "await_groups",
                reason: format!("strategy {} with quorum {:?}", r.strategy, r.quorum),
            }));
        };
        let group = GroupState {
            workspace: settlement.workspace,
            id: settlement.group,
            task: r.task,
            status: r.status,
            strategy,
            tally: Tally {
                total: r.total,
                pending: r.pending,
                completed: r.completed,
            },
        };
        Some(Ok((settlement.clone(), group)))
    });
    settled.collect()
}

/// Writes the new state of locked groups, and what has become of locked signals. A group that closes has its remaining
/// pending awaits cancelled, and its task gets one `await_completed` event, unless `silent`. Returns the events.
pub async fn update_groups(
    conn: &mut PgConnection,
    groups: &[GroupState],
    signals: &[(&Signal, bool)],
    silent: bool,
) -> Result<Vec<Event>, Error> {
    let closed: Vec<&GroupState> = groups
        .iter()
        .filter(|g| g.status != GroupStatus::Open)
        .collect();
    let rows = sqlx::query!(
        r#"
        with changed as (
            update await_groups g
            set status = c.status, pending = c.pending, completed = c.completed,
                closed_at = case when c.status <> 'open' then now() end,
                -- a cancelled group has nothing to tell
                resumed_at = case when c.status = 'cancelled' then now() end
            from unnest($1::uuid[], $2::uuid[], $3::text[], $4::integer[], $5::integer[])
                as c (workspace_id, id, status, pending, completed)
            where g.workspace_id = c.workspace_id and g.id = c.id and g.status = 'open'
        ), left_over as (
            update awaits a set status = 'cancelled', settled_at = now()
            from unnest($6::uuid[], $7::uuid[]) as c (workspace_id, id)
            where a.workspace_id = c.workspace_id and a.group_id = c.id and a.settled_at is null
        ), settled_signals as (
            update signals s
            set status = case when c.matched then 'matched' else 'no_match' end, settled_at = now()
            from unnest($11::uuid[], $12::text[], $13::text[], $14::boolean[])
                as c (workspace_id, source_type, key, matched)
            where s.workspace_id = c.workspace_id and s.source_type = c.source_type and s.dedup_key = c.key
                and s.settled_at is null
        )
        insert into orchestrator_events (workspace_id, task_id, kind, group_id)
        select c.workspace_id, c.task_id, $9, c.id
        from unnest($6::uuid[], $8::uuid[], $7::uuid[]) as c (workspace_id, task_id, id)
        where not $10
        returning workspace_id as "workspace: WorkspaceId", id, task_id as "task: TaskId", group_id as "group: GroupId"
        "#,
        &column(groups, |g| g.workspace.0),
        &column(groups, |g| g.id.0),
        &column(groups, |g| g.status.as_str().to_owned()),
        &column(groups, |g| g.tally.pending),
        &column(groups, |g| g.tally.completed),
        &column(&closed, |g| g.workspace.0),
        &column(&closed, |g| g.id.0),
        &column(&closed, |g| g.task.0),
        EventKind::AwaitCompleted.as_str(),
        silent,
        &column(signals, |s| s.0.workspace.0),
        &column(signals, |s| s.0.source_type.as_str().to_owned()),
        &column(signals, |s| s.0.dedup_key.as_str()) as &[&str],
        &column(signals, |s| s.1),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| Event {
            id: r.id,
            task: TaskKey {
                workspace: r.workspace,
                task: r.task,
            },
            attempts: 0,
            group: r.group,
        })
        .collect())
}

/// An await whose time has come.
#[derive(Clone, Debug)]
pub struct DueAwait {
    pub pending: PendingAwait,
    pub child: Option<TaskStatus>,
}

/// Pending awaits of all workspaces that are due, oldest first, with the status of the child they wait for.
pub async fn due_all_workspaces(
    conn: &mut PgConnection,
    limit: u32,
) -> Result<Vec<DueAwait>, Error> {
    let rows = sqlx::query!(
        r#"
        select a.workspace_id as "workspace: WorkspaceId", a.group_id as "group: GroupId", a.ordinal,
            a.source_type as "source_type: SourceType", a.correlation_key, t.status as "child?: TaskStatus"
        from awaits a
        -- only a child's key is an id; a plain `and` would leave it to the plan which part is read first
        left join tasks t on t.workspace_id = a.workspace_id
            and t.id = case when a.source_type = 'child_task' then a.correlation_key::uuid end
        where a.status = 'pending' and a.scheduled_resume_at <= now()
        order by a.scheduled_resume_at
        limit $1
        "#,
        i64::from(limit),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| DueAwait {
            pending: PendingAwait {
                workspace: r.workspace,
                group: r.group,
                ordinal: r.ordinal,
                source_type: r.source_type,
                correlation_key: r.correlation_key,
            },
            child: r.child,
        })
        .collect())
}

/// Moves pending awaits one window of their group forward, by the database's clock.
pub async fn postpone(conn: &mut PgConnection, awaits: &[PendingAwait]) -> Result<(), Error> {
    sqlx::query!(
        r#"
        with windows as materialized (
            -- apart, as in `lock_groups_and_settle`
            select c.workspace_id, c.group_id, c.ordinal, coalesce(g.window_seconds, 3600) as seconds
            from unnest($1::uuid[], $2::uuid[], $3::integer[]) as c (workspace_id, group_id, ordinal)
            join await_groups g on g.workspace_id = c.workspace_id and g.id = c.group_id
        )
        update awaits a set scheduled_resume_at = now() + make_interval(secs => c.seconds)
        from windows c
        where a.workspace_id = c.workspace_id and a.group_id = c.group_id and a.ordinal = c.ordinal
            and a.settled_at is null
        "#,
        &column(awaits, |a| a.workspace.0),
        &column(awaits, |a| a.group.0),
        &column(awaits, |a| a.ordinal),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// What a closed group has to tell, by ordinal: the awaits with the children that they were for. A child that ended and
/// was reopened since (T-7) is told as it ended: its feed remembers.
pub async fn reports(
    conn: &mut PgConnection,
    groups: &[(WorkspaceId, GroupId)],
) -> Result<Vec<(GroupId, Report)>, Error> {
    let rows = sqlx::query!(
        r#"
        select a.group_id as "group: GroupId", a.status as "await_status: AwaitStatus",
            coalesce(t.id, a.correlation_key::uuid) as "task!: TaskId", coalesce(t.title, '') as "title!",
            coalesce(v.definition ->> 'name', '') as "agent_name!", coalesce(ended.status, t.status) as "status?: TaskStatus",
            coalesce(t.output, ended.output) as output, coalesce(t.error, ended.error) as "error: Json<Failure>",
            t.deleted_at is not null as "deleted!",
            (extract(epoch from t.finished_at - t.created_at) * 1000)::bigint as "duration_ms",
            coalesce(jsonb_array_length(v.definition -> 'tools'), 0) > 0 as "was_granted_tools!",
            coalesce(s.decides, 0) as "decides!", coalesce(s.calls, 0) as "calls!", coalesce(s.tokens, 0) as "tokens!"
        from unnest($1::uuid[], $2::uuid[]) as c (workspace_id, id)
        join awaits a on a.workspace_id = c.workspace_id and a.group_id = c.id and a.source_type = 'child_task'
        left join tasks t on t.workspace_id = a.workspace_id and t.id = a.correlation_key::uuid
        left join agent_versions v on v.workspace_id = t.agent_workspace_id and v.agent_id = t.agent_id
            and v.version = t.agent_version
        left join lateral (
            select count(*) filter (where ordinal = 0) as decides, count(*) filter (where ordinal > 0) as calls,
                sum(input_tokens + output_tokens)::bigint as tokens
            from steps s where s.workspace_id = t.workspace_id and s.task_id = t.id
        ) s on true
        left join lateral (
            select e.data ->> 'status' as status, (
                select m.text from task_items m
                where m.workspace_id = e.workspace_id and m.task_id = e.task_id and m.seq < e.seq
                    and m.kind = 'assistant_message' and e.data ->> 'status' = 'completed'
                order by m.seq desc limit 1) as output,
                case when e.data ? 'code' then
                    jsonb_build_object('code', e.data ->> 'code', 'message', e.data ->> 'reason') end as error
            from task_items e
            where e.workspace_id = t.workspace_id and e.task_id = t.id and e.kind = 'status'
                and e.data ->> 'status' in ('completed', 'failed', 'stopped')
            order by e.seq desc limit 1
        ) ended on a.status = 'completed' and t.status not in ('completed', 'failed', 'stopped')
        order by a.group_id, a.ordinal
        "#,
        &column(groups, |g| g.0.0),
        &column(groups, |g| g.1.0),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| {
            let outcome = match (r.await_status, r.status) {
                (_, None) | (AwaitStatus::StartFailed, _) => Outcome::StartFailed,
                (_, Some(status)) if status.is_terminal() => Outcome::Ended(status),
                (_, Some(_)) => Outcome::Skipped,
            };
            (
                r.group,
                Report {
                    task: r.task,
                    title: r.title,
                    agent_name: r.agent_name,
                    outcome,
                    output: r.output,
                    failure: r.error.map(|e| e.0),
                    decide_steps: r.decides,
                    tool_calls: r.calls,
                    was_granted_tools: r.was_granted_tools,
                    duration_ms: r.duration_ms,
                    tokens: r.tokens,
                    deleted: r.deleted,
                },
            )
        })
        .collect())
}

/// What can be told of a task's children without knowing which group they belong to: those that have ended, newest
/// `limit` of them, in spawn order. Reads nothing of the waits.
pub async fn reports_of_children(
    conn: &mut PgConnection,
    parent: TaskKey,
    limit: i64,
) -> Result<Vec<Report>, Error> {
    let rows = sqlx::query!(
        r#"
        select t.id as "task: TaskId", t.title, coalesce(v.definition ->> 'name', '') as "agent_name!",
            t.status as "status: TaskStatus", t.output, t.error as "error: Json<Failure>",
            t.deleted_at is not null as "deleted!",
            (extract(epoch from t.finished_at - t.created_at) * 1000)::bigint as "duration_ms",
            coalesce(jsonb_array_length(v.definition -> 'tools'), 0) > 0 as "was_granted_tools!",
            coalesce(s.decides, 0) as "decides!", coalesce(s.calls, 0) as "calls!", coalesce(s.tokens, 0) as "tokens!"
        from tasks t
        left join agent_versions v on v.workspace_id = t.agent_workspace_id and v.agent_id = t.agent_id
            and v.version = t.agent_version
        left join lateral (
            select count(*) filter (where ordinal = 0) as decides, count(*) filter (where ordinal > 0) as calls,
                sum(input_tokens + output_tokens)::bigint as tokens
            from steps s where s.workspace_id = t.workspace_id and s.task_id = t.id
        ) s on true
        where t.workspace_id = $1 and t.parent_task_id = $2 and t.status in ('completed', 'failed', 'stopped')
        order by t.id desc
        limit $3
        "#,
        parent.workspace.0,
        parent.task.0,
        limit,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .rev()
        .map(|r| Report {
            task: r.task,
            title: r.title,
            agent_name: r.agent_name,
            outcome: Outcome::Ended(r.status),
            output: r.output,
            failure: r.error.map(|e| e.0),
            decide_steps: r.decides,
            tool_calls: r.calls,
            was_granted_tools: r.was_granted_tools,
            duration_ms: r.duration_ms,
            tokens: r.tokens,
            deleted: r.deleted,
        })
        .collect())
}
