//! Rows of `tasks`: creating, locking and reading them for the lifecycle. What the API shows is in `task_views`.

use super::{Error, column};
use crate::domain::{
    budget::Limits,
    ids::{AgentId, StepId, TaskId, WorkspaceId},
    step::Claim,
    task::{AgentRef, Failure, NewTask, TaskKey, TaskState, TaskStatus},
};
use serde_json::Value;
use sqlx::PgConnection;
use std::collections::HashMap;
use uuid::Uuid;

pub(super) fn failure_json(state: &TaskState) -> Option<Value> {
    let failure = state.failure.as_ref()?;
    Some(serde_json::json!({"code": failure.code, "message": failure.message}))
}

/// Inserts tasks that do not exist yet with their first messages, and, unless they are to `wait`, the events that start
/// them. One statement.
pub async fn insert(conn: &mut PgConnection, new: &[NewTask], wait: bool) -> Result<(), Error> {
    let parent =
        |f: fn(&crate::domain::task::ParentRef) -> Uuid| column(new, |t| t.parent.as_ref().map(f));
    let limit = |f: fn(&Limits) -> Option<i64>| column(new, |t| t.budget.as_ref().and_then(f));
    sqlx::query!(
        r#"
        with new as (
            select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::integer[], $6::integer[], $7::text[],
                    $8::jsonb[], $9::smallint[], $10::uuid[], $11::uuid[], $12::uuid[], $13::integer[], $14::smallint[],
                    $15::uuid[], $16::text[], $18::boolean[], $19::bigint[], $20::bigint[], $21::bigint[])
                as c (workspace_id, id, agent_workspace_id, agent_id, agent_version, decides_left, title,
                    source_metadata, priority, root_task_id, parent_task_id, parent_step_id, ordinal, spawn_depth,
                    message_id, message, budgeted, tokens_max, cost_micros_max, children_max)
        ), new_budgets as (
            insert into budgets (workspace_id, id, tokens_max, cost_micros_max, children_max)
            select workspace_id, id, tokens_max, cost_micros_max, children_max from new
            where num_nonnulls(tokens_max, cost_micros_max, children_max) > 0
        ), new_tasks as (
            insert into tasks (workspace_id, id, agent_workspace_id, agent_id, agent_version, decides_left, title,
                source_metadata, priority, root_task_id, parent_task_id, parent_step_id, ordinal, spawn_depth, source,
                last_seq, news_seq, budgeted)
            select workspace_id, id, agent_workspace_id, agent_id, agent_version, decides_left, title,
                source_metadata, priority, coalesce(root_task_id, id), parent_task_id, parent_step_id, ordinal,
                spawn_depth, case when parent_task_id is null then 'chat' else 'spawned' end, 1, 1, budgeted
            from new
        ), first_messages as (
            insert into task_items (workspace_id, task_id, seq, id, kind, text)
            select workspace_id, id, 1, message_id, 'user_message', message from new
        )
        insert into orchestrator_events (workspace_id, task_id, kind)
        select workspace_id, id, 'new_message' from new where not $17
        "#,
        &column(new, |t| t.key.workspace.0),
        &column(new, |t| t.key.task.0),
        &column(new, |t| t.agent.workspace.0),
        &column(new, |t| t.agent.agent.0),
        &column(new, |t| t.agent.version),
        &column(new, |t| t.max_iterations),
        &column(new, |t| t.title.clone()),
        &column(new, |t| t.metadata.clone()),
        &column(new, |t| t.priority),
        &parent(|p| p.root.0) as &[Option<Uuid>],
        &parent(|p| p.task.0) as &[Option<Uuid>],
        &parent(|p| p.step.0) as &[Option<Uuid>],
        &column(new, |t| t.parent.map(|p| p.ordinal)) as &[Option<i32>],
        &column(new, |t| t.parent.map_or(0, |p| p.depth as i16)),
        &column(new, |t| t.message.0.0),
        &column(new, |t| t.message.1.as_str()) as &[&str],
        wait,
        &column(new, |t| t.budgeted || t.budget.is_some()),
        &limit(|b| b.tokens) as &[Option<i64>],
        &limit(|b| b.cost_micros) as &[Option<i64>],
        &limit(|b| b.children) as &[Option<i64>],
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Locks tasks in key order and returns those that exist, deleted ones too.
pub async fn lock(conn: &mut PgConnection, keys: &[TaskKey]) -> Result<Vec<TaskState>, Error> {
    let rows = sqlx::query!(
        r#"
        select t.workspace_id as "workspace_id: WorkspaceId", t.id as "id: TaskId", t.status as "status: TaskStatus",
            t.deleted_at is not null as "deleted!", t.parent_task_id is not null as "is_child!", t.stop_generation,
            t.priority, t.last_seq, t.news_seq, t.seen_seq, t.turn, t.decides_left
        from tasks t
        join (select distinct * from unnest($1::uuid[], $2::uuid[]) as k (workspace_id, id)) k
            on t.workspace_id = k.workspace_id and t.id = k.id
        order by t.workspace_id, t.id
        for no key update of t
        "#,
        &column(keys, |k| k.workspace.0),
        &column(keys, |k| k.task.0),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|r| super::task_state!(r)).collect())
}

/// How a task runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    pub agent: AgentRef,
    pub root: TaskId,
    /// 0 for a top-level task.
    pub depth: i32,
    /// The task, or one above it, was created with `disable_delegation` (T-9).
    pub delegation_disabled: bool,
    /// The workspace has model providers of its own (L-10). All else here never changes.
    pub own_models: bool,
    /// The task, one above it or the workspace has a budget. Of the workspace it is what was there at the claim.
    pub budgeted: bool,
}

/// As [`lock`], but leaves out tasks that somebody else has locked: it never waits.
pub async fn lock_free(
    conn: &mut PgConnection,
    keys: &[TaskKey],
) -> Result<Vec<(TaskState, Setup)>, Error> {
    let rows = sqlx::query!(
        r#"
        select t.workspace_id as "workspace_id: WorkspaceId", t.id as "id: TaskId", t.status as "status: TaskStatus",
            t.deleted_at is not null as "deleted!", t.parent_task_id is not null as "is_child!", t.stop_generation,
            t.priority, t.last_seq, t.news_seq, t.seen_seq, t.turn, t.decides_left,
            t.agent_workspace_id as "agent_workspace_id: WorkspaceId", t.agent_id as "agent_id: AgentId", t.agent_version,
            t.root_task_id as "root_task_id: TaskId", t.spawn_depth, t.source_metadata @> '{"disable_delegation": true}' as "delegation_disabled!",
            exists (select from model_providers p where p.workspace_id = t.workspace_id) as "own_models!",
            t.budgeted or exists (select from budgets b where b.workspace_id = t.workspace_id and b.id = t.workspace_id) as "budgeted!"
        from tasks t
        join (select distinct * from unnest($1::uuid[], $2::uuid[]) as k (workspace_id, id)) k
            on t.workspace_id = k.workspace_id and t.id = k.id
        order by t.workspace_id, t.id
        for no key update of t skip locked
        "#,
        &column(keys, |k| k.workspace.0),
        &column(keys, |k| k.task.0),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| (super::task_state!(r), super::task_setup!(r)))
        .collect())
}

/// The fixed parts of a task, which no lock is needed to read.
#[derive(Clone, Debug)]
pub struct TaskFacts {
    pub key: TaskKey,
    pub agent: AgentRef,
    pub root: TaskId,
    pub depth: i32,
    pub metadata: Value,
    pub priority: i16,
    pub max_iterations: i32,
}

/// The fixed parts of tasks, in no order.
pub async fn facts(conn: &mut PgConnection, keys: &[TaskKey]) -> Result<Vec<TaskFacts>, Error> {
    let rows = sqlx::query!(
        r#"
        select t.workspace_id as "workspace_id: WorkspaceId", t.id as "id: TaskId",
            t.agent_workspace_id as "agent_workspace_id: WorkspaceId", t.agent_id as "agent_id: AgentId", t.agent_version,
            t.root_task_id as "root_task_id: TaskId", t.spawn_depth, t.source_metadata, t.priority,
            coalesce((v.definition ->> 'max_iterations')::integer, 50) as "max_iterations!"
        from unnest($1::uuid[], $2::uuid[]) as k (workspace_id, id)
        join tasks t on t.workspace_id = k.workspace_id and t.id = k.id
        join agent_versions v on v.workspace_id = t.agent_workspace_id and v.agent_id = t.agent_id
            and v.version = t.agent_version
        "#,
        &column(keys, |k| k.workspace.0),
        &column(keys, |k| k.task.0),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| TaskFacts {
            key: TaskKey {
                workspace: r.workspace_id,
                task: r.id,
            },
            agent: AgentRef {
                workspace: r.agent_workspace_id,
                agent: r.agent_id,
                version: r.agent_version,
            },
            root: r.root_task_id,
            depth: i32::from(r.spawn_depth),
            metadata: r.source_metadata,
            priority: r.priority,
            max_iterations: r.max_iterations,
        })
        .collect())
}

/// A child that a delegate call has made, by ordinal.
#[derive(Clone, Debug)]
pub struct ChildRow {
    pub task: TaskId,
    pub title: String,
    pub agent: AgentId,
}

/// The children that this call has already made, in spawn order (D-26).
pub async fn children_of_step(
    conn: &mut PgConnection,
    parent: TaskKey,
    step: StepId,
) -> Result<Vec<ChildRow>, Error> {
    let rows = sqlx::query!(
        r#"
        select id as "id: TaskId", title, agent_id as "agent_id: AgentId"
        from tasks
        where workspace_id = $1 and parent_task_id = $2 and parent_step_id = $3
        order by ordinal
        "#,
        parent.workspace.0,
        parent.task.0,
        step.0,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| ChildRow {
            task: r.id,
            title: r.title,
            agent: r.agent_id,
        })
        .collect())
}

/// What the model may run a task with: resolved on the server, never named by arguments alone.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub agent: AgentRef,
    pub max_iterations: i32,
    /// Of each task that runs it.
    pub budget: Option<Limits>,
}

/// For each request (workspace, agent or its default one) the published agent that it may run: the workspace's own
/// first, else a public one (A-24). In request order; `None` where there is none.
pub async fn resolve_agents(
    conn: &mut PgConnection,
    requests: &[(WorkspaceId, Option<AgentId>)],
) -> Result<Vec<Option<Target>>, Error> {
    let rows = sqlx::query!(
        r#"
        select r.n as "n!", a.workspace_id as "workspace_id!: WorkspaceId", a.id as "id!: AgentId", a.published_version as "version!",
            coalesce((v.definition ->> 'max_iterations')::integer, 50) as "max_iterations!",
            v.definition -> 'config' -> 'budget' as budget
        from unnest($1::uuid[], $2::uuid[]) with ordinality as r (workspace_id, agent_id, n)
        cross join lateral (
            select workspace_id, id, published_version, 0 as rank from agents
            where agent_id is null and workspace_id = r.workspace_id and template = 'default'
                and published_version is not null
            union all
            select workspace_id, id, published_version, 1 from agents
            where workspace_id = r.workspace_id and id = r.agent_id
                and published_version is not null and deleted_at is null
            union all
            select workspace_id, id, published_version, 2 from agents
            where id = r.agent_id and is_public and deleted_at is null
            order by rank, workspace_id
            limit 1
        ) a
        join agent_versions v on v.workspace_id = a.workspace_id and v.agent_id = a.id and v.version = a.published_version
        "#,
        &column(requests, |r| r.0.0),
        &column(requests, |r| r.1.map(|a| a.0)) as &[Option<Uuid>],
    )
    .fetch_all(conn)
    .await?;
    let mut targets = vec![None; requests.len()];
    for row in rows {
        if let Some(slot) = targets.get_mut((row.n - 1) as usize) {
            let agent = AgentRef {
                workspace: row.workspace_id,
                agent: row.id,
                version: row.version,
            };
            *slot = Some(Target {
                agent,
                max_iterations: row.max_iterations,
                budget: row.budget.as_ref().and_then(Limits::of_config),
            });
        }
    }
    Ok(targets)
}

/// The tasks of a tree that are not terminal, root first if it is one of them; `None` when the root is not there.
///
/// With `subtasks` false: the task itself and the children that its unfinished calls have made but not yet started.
pub async fn stoppable(
    conn: &mut PgConnection,
    root: TaskKey,
    subtasks: bool,
) -> Result<Option<Vec<TaskKey>>, Error> {
    let rows = sqlx::query!(
        r#"
        with recursive tree as (
            select t.workspace_id, t.id, t.status, t.id as top from tasks t
            where t.workspace_id = $1 and t.id = $2 and t.deleted_at is null
            union all
            select c.workspace_id, c.id, c.status, tree.top from tree
            join tasks c on c.workspace_id = $1 and c.parent_task_id = tree.id
            where $3 or (tree.id = tree.top and c.status = 'pending' and exists (
                select 1 from steps s where s.workspace_id = $1 and s.task_id = tree.id and s.id = c.parent_step_id
                    and s.status in ('queued', 'running')))
        )
        select id as "id!: TaskId", status as "status!: TaskStatus" from tree
        "#,
        root.workspace.0,
        root.task.0,
        subtasks,
    )
    .fetch_all(conn)
    .await?;
    if rows.is_empty() {
        return Ok(None);
    }
    let active = rows.into_iter().filter(|r| !r.status.is_terminal());
    Ok(Some(
        active
            .map(|r| TaskKey {
                workspace: root.workspace,
                task: r.id,
            })
            .collect(),
    ))
}

/// Status of tasks by key; absent when the row is gone.
pub async fn statuses(
    conn: &mut PgConnection,
    keys: &[TaskKey],
) -> Result<Vec<(TaskKey, TaskStatus)>, Error> {
    let rows = sqlx::query!(
        r#"
        select t.workspace_id as "workspace_id: WorkspaceId", t.id as "id: TaskId", t.status as "status: TaskStatus"
        from unnest($1::uuid[], $2::uuid[]) as k (workspace_id, id)
        join tasks t on t.workspace_id = k.workspace_id and t.id = k.id
        "#,
        &column(keys, |k| k.workspace.0),
        &column(keys, |k| k.task.0),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| {
            (
                TaskKey {
                    workspace: r.workspace_id,
                    task: r.id,
                },
                r.status,
            )
        })
        .collect())
}

/// What a parent may read of its child with `get_subtask_result`.
#[derive(Clone, Debug)]
pub struct ChildResult {
    pub title: String,
    pub status: TaskStatus,
    pub output: Option<String>,
    pub failure: Option<Failure>,
}

/// A child of `parent`, by id. Other tasks, of whatever workspace, are as absent as those that do not exist.
pub async fn child_result(
    conn: &mut PgConnection,
    parent: TaskKey,
    child: TaskId,
) -> Result<Option<ChildResult>, Error> {
    let row = sqlx::query!(
        r#"
        select title, status as "status: TaskStatus", output, error as "error: sqlx::types::Json<Failure>"
        from tasks
        where workspace_id = $1 and parent_task_id = $2 and id = $3 and deleted_at is null
        "#,
        parent.workspace.0,
        parent.task.0,
        child.0,
    )
    .fetch_optional(conn)
    .await?;
    Ok(row.map(|r| ChildResult {
        title: r.title,
        status: r.status,
        output: r.output,
        failure: r.error.map(|e| e.0),
    }))
}

/// Which of these tasks a living parent waits for, with that parent.
pub async fn awaited_by(
    conn: &mut PgConnection,
    tasks: &[TaskKey],
) -> Result<HashMap<TaskKey, TaskKey>, Error> {
    let rows = sqlx::query!(
        r#"
        select t.workspace_id as "workspace: WorkspaceId", t.id as "id: TaskId", p.id as "parent: TaskId"
        from unnest($1::uuid[], $2::uuid[]) as k (workspace_id, id)
        join tasks t on t.workspace_id = k.workspace_id and t.id = k.id
            and t.status not in ('completed', 'failed', 'stopped')
        join tasks p on p.workspace_id = t.workspace_id and p.id = t.parent_task_id
            and p.status not in ('completed', 'failed', 'stopped')
        join awaits a on a.workspace_id = t.workspace_id and a.source_type = 'child_task'
            and a.correlation_key = t.id::text and a.status = 'pending'
        "#,
        &column(tasks, |k| k.workspace.0),
        &column(tasks, |k| k.task.0),
    )
    .fetch_all(conn)
    .await?;
    let key = |workspace, task| TaskKey { workspace, task };
    Ok(rows
        .into_iter()
        .map(|r| (key(r.workspace, r.id), key(r.workspace, r.parent)))
        .collect())
}

/// The tasks that a deletion is about: the root and, with `subtasks`, everything beneath it, without those that are
/// deleted already.
pub async fn undeleted(
    conn: &mut PgConnection,
    root: TaskKey,
    subtasks: bool,
) -> Result<Vec<TaskKey>, Error> {
    let rows = sqlx::query_scalar!(
        r#"
        with recursive tree as (
            select t.id, t.deleted_at from tasks t where t.workspace_id = $1 and t.id = $2
            union all
            select c.id, c.deleted_at from tree
            join tasks c on c.workspace_id = $1 and c.parent_task_id = tree.id
            where $3
        )
        select id as "id!: TaskId" from tree where deleted_at is null
        "#,
        root.workspace.0,
        root.task.0,
        subtasks,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|task| TaskKey {
            workspace: root.workspace,
            task,
        })
        .collect())
}

/// Marks the task, and with `subtasks` everything beneath it, as deleted. They must be locked. Returns those that were
/// not so before.
pub async fn soft_delete(
    conn: &mut PgConnection,
    root: TaskKey,
    subtasks: bool,
) -> Result<Vec<TaskId>, Error> {
    Ok(sqlx::query_scalar!(
        r#"
        with recursive tree as (
            select t.id from tasks t where t.workspace_id = $1 and t.id = $2
            union all
            select c.id from tree
            join tasks c on c.workspace_id = $1 and c.parent_task_id = tree.id
            where $3
        )
        update tasks t set deleted_at = now()
        from tree
        where t.workspace_id = $1 and t.id = tree.id and t.deleted_at is null
        returning t.id as "id: TaskId"
        "#,
        root.workspace.0,
        root.task.0,
        subtasks,
    )
    .fetch_all(conn)
    .await?)
}

/// What a call that is about to make children depends on, under the locks of its task and of the tree's root.
#[derive(Clone, Copy, Debug)]
pub struct BeforeSpawn {
    /// The claim still holds its step.
    pub holds: bool,
    /// The call has made children already (D-26).
    pub has_made: bool,
    /// Tasks below the root that have not ended (D-50).
    pub live: i64,
    /// The calling task may not delegate, nor may anything beneath it (T-9).
    pub delegation_disabled: bool,
}

/// One row for each call (claim, root of its tree), in their order.
pub async fn before_spawn(
    conn: &mut PgConnection,
    calls: &[(Claim, TaskId)],
) -> Result<Vec<BeforeSpawn>, Error> {
    Ok(sqlx::query_as!(
        BeforeSpawn,
        r#"
        with recursive calls as (
            select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::integer[], $5::integer[], $6::integer[],
                    $7::uuid[]) with ordinality
                as c (workspace_id, root_id, task_id, turn, ordinal, attempt, step_id, n)
        ), trees as (
            select t.workspace_id, r.root_id, t.id, t.status from (select distinct workspace_id, root_id from calls) r
            join tasks t on t.workspace_id = r.workspace_id and t.parent_task_id = r.root_id
            union all
            select t.workspace_id, trees.root_id, t.id, t.status from trees
            join tasks t on t.workspace_id = trees.workspace_id and t.parent_task_id = trees.id
        ), live as (
            select workspace_id, root_id, count(*) as n from trees
            where status not in ('completed', 'failed', 'stopped')
            group by workspace_id, root_id
        )
        select coalesce((select l.n from live l
                where l.workspace_id = c.workspace_id and l.root_id = c.root_id), 0) as "live!",
            exists (select from tasks t
                where t.workspace_id = c.workspace_id and t.parent_task_id = c.task_id
                    and t.parent_step_id = c.step_id) as "has_made!",
            exists (select from steps s
                where s.workspace_id = c.workspace_id and s.task_id = c.task_id and s.turn = c.turn
                    and s.ordinal = c.ordinal and s.attempt = c.attempt and s.status = 'running') as "holds!",
            exists (select from tasks t
                where t.workspace_id = c.workspace_id and t.id = c.task_id
                    and t.source_metadata @> '{"disable_delegation": true}') as "delegation_disabled!"
        from calls c
        order by c.n
        "#,
        &column(calls, |c| c.0.key.workspace.0),
        &column(calls, |c| c.1.0),
        &column(calls, |c| c.0.key.task.0),
        &column(calls, |c| c.0.key.turn),
        &column(calls, |c| c.0.key.ordinal),
        &column(calls, |c| c.0.attempt),
        &column(calls, |c| c.0.step.0),
    )
    .fetch_all(conn)
    .await?)
}
