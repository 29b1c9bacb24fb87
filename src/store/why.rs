//! What is known of tasks that do not move (T-25). Read-only, for many tasks at once, in one statement per table.
//!
//! The events of a task are in no index, so they are read for those tasks alone that nothing else explains; places in the
//! queue and budgets for those alone that have a step in it.

use super::{Error, bus::SILENT_SECS, column};
use crate::domain::{
    budget::Owner,
    ids::{AgentId, GroupId, ProcessId, TaskId, WorkspaceId},
    task::TaskStatus,
    task_await::SourceType,
    why::{EventFacts, Facts, GroupFacts, HeldBudget, Place, StepFacts},
};
use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use std::collections::HashMap;
use uuid::Uuid;

/// So far the queue is looked at.
const QUEUE_MAX: i64 = 1000;

/// A task with what is known of it.
#[derive(Clone, Debug)]
pub struct Known {
    pub task: TaskId,
    pub parent: Option<TaskId>,
    pub title: String,
    pub agent: AgentId,
    pub agent_name: String,
    pub deleted: bool,
    pub facts: Facts,
}

/// From here on this transaction, which must have just begun, reads everything as it is at one moment, and that moment is
/// returned: what moves between two statements must not seem to stand still.
pub async fn hold_still(conn: &mut PgConnection) -> Result<DateTime<Utc>, Error> {
    sqlx::query!("set transaction isolation level repeatable read, read only")
        .execute(&mut *conn)
        .await?;
    Ok(sqlx::query_scalar!(r#"select now() as "now!""#)
        .fetch_one(conn)
        .await?)
}

/// The children that these groups wait for, at most `limit`, in the order in which they were delegated.
pub async fn pending_children(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    groups: &[GroupId],
    limit: i64,
) -> Result<Vec<TaskId>, Error> {
    Ok(sqlx::query_scalar!(
        r#"
        select a.correlation_key::uuid as "task!: TaskId"
        from awaits a
        where a.workspace_id = $1 and a.group_id = any($2) and a.source_type = 'child_task' and a.settled_at is null
        order by a.group_id, a.ordinal
        limit $3
        "#,
        workspace.0,
        &column(groups, |g| g.0),
        limit,
    )
    .fetch_all(conn)
    .await?)
}

/// These tasks, in order of creation, deleted ones among them. Ids that are not in the workspace are left out.
pub async fn known(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    tasks: &[TaskId],
) -> Result<Vec<Known>, Error> {
    let ids = column(tasks, |task| task.0);
    let rows = sqlx::query!(
        r#"
        select t.id as "id: TaskId", t.parent_task_id as "parent: TaskId", t.title, t.status as "status: TaskStatus",
            t.agent_id as "agent: AgentId", coalesce(v.definition ->> 'name', '') as "agent_name!",
            t.deleted_at is not null as "deleted!", t.created_at, t.finished_at
        from tasks t
        join agent_versions v
            on v.workspace_id = t.agent_workspace_id and v.agent_id = t.agent_id and v.version = t.agent_version
        where t.workspace_id = $1 and t.id = any($2)
        order by t.id
        "#,
        workspace.0,
        &ids,
    )
    .fetch_all(&mut *conn)
    .await?;
    let mut steps = steps(conn, workspace, &ids).await?;
    let mut groups = groups(conn, workspace, &ids).await?;
    let mut known: Vec<Known> = rows
        .into_iter()
        .map(|r| Known {
            task: r.id,
            parent: r.parent,
            title: r.title,
            agent: r.agent,
            agent_name: r.agent_name,
            deleted: r.deleted,
            facts: Facts {
                status: r.status,
                is_child: r.parent.is_some(),
                created_at: r.created_at,
                finished_at: r.finished_at,
                steps: steps.remove(&r.id).unwrap_or_default(),
                groups: groups.remove(&r.id).unwrap_or_default(),
                events: vec![],
            },
        })
        .collect();
    let resting = known.iter_mut().filter(|k| k.facts.rests_on_events());
    let mut resting: HashMap<TaskId, &mut Facts> =
        resting.map(|k| (k.task, &mut k.facts)).collect();
    if !resting.is_empty() {
        let ids = column(resting.keys(), |task| task.0);
        for (task, event) in events(conn, workspace, &ids).await? {
            if let Some(facts) = resting.get_mut(&task) {
                facts.events.push(event);
            }
        }
    }
    Ok(known)
}

/// The steps that have not ended, in order, with their places in the queue and the budgets that may hold them.
async fn steps(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    tasks: &[Uuid],
) -> Result<HashMap<TaskId, Vec<StepFacts>>, Error> {
    let rows = sqlx::query!(
        r#"
        select s.task_id as "task: TaskId", s.tool, s.attempt, s.model_attempts, s.lost_leases, s.queued_at, s.started_at,
            s.run_at, s.worker_id as "worker: ProcessId", s.lease_expires_at
        from unnest($2::uuid[]) as c (id)
        join tasks t on t.workspace_id = $1 and t.id = c.id
        join steps s on s.workspace_id = $1 and s.task_id = t.id and s.turn = t.turn and s.finished_at is null
        order by s.task_id, s.ordinal
        "#,
        workspace.0,
        tasks,
    )
    .fetch_all(&mut *conn)
    .await?;
    let mut queued: Vec<(TaskId, StepFacts)> = Vec::new();
    let mut steps = HashMap::<TaskId, Vec<StepFacts>>::new();
    for row in rows {
        let step = StepFacts {
            tool: row.tool,
            attempt: row.attempt,
            model_attempts: row.model_attempts,
            lost_leases: row.lost_leases,
            queued_at: row.queued_at,
            started_at: row.started_at,
            run_at: row.run_at,
            held: row.worker.zip(row.lease_expires_at),
            place: Place::default(),
            budgets: vec![],
        };
        match step.held {
            Some(_) => steps.entry(row.task).or_default().push(step),
            None => queued.push((row.task, step)),
        }
    }
    if !queued.is_empty() {
        let queue = Queue::look_all_workspaces(conn, workspace).await?;
        let ids = column(&queued, |(task, _)| task.0);
        let mut budgets = held_budgets(conn, workspace, &ids).await?;
        for (task, mut step) in queued {
            step.place = queue.place(step.run_at);
            step.budgets = budgets.remove(&task).unwrap_or_default();
            steps.entry(task).or_default().push(step);
        }
    }
    Ok(steps)
}

/// The steps of all workspaces that are taken next, and by how many workers.
struct Queue {
    /// When each became due, and whether it is of the own workspace.
    head: Vec<(DateTime<Utc>, bool)>,
    workers: i64,
}

impl Queue {
    async fn look_all_workspaces(conn: &mut PgConnection, own: WorkspaceId) -> Result<Self, Error> {
        // In the order of `steps::claim_all_workspaces`.
        let rows = sqlx::query!(
            r#"
            select run_at, workspace_id = $1 as "own!" from steps
            where status = 'queued' and run_at <= now()
            order by run_at
            limit $2
            "#,
            own.0,
            QUEUE_MAX,
        )
        .fetch_all(&mut *conn)
        .await?;
        let workers = sqlx::query_scalar!(
            r#"
            select count(*) as "workers!" from processes
            where 'worker' = any(roles) and heartbeat_at > now() - make_interval(secs => $1)
            "#,
            SILENT_SECS,
        )
        .fetch_one(conn)
        .await?;
        Ok(Self {
            head: column(rows, |row| (row.run_at, row.own)),
            workers,
        })
    }

    fn place(&self, run_at: DateTime<Utc>) -> Place {
        let at = self.head.partition_point(|(other, _)| *other < run_at);
        let before = &self.head[..at];
        let own = before.iter().filter(|(_, own)| *own).count();
        Place {
            before: own as i64,
            more_before: at as i64 == QUEUE_MAX,
            others_before: own < at,
            workers: self.workers,
        }
    }
}

/// The budgets above these tasks, whose own steps are queued, under which calls are being made.
async fn held_budgets(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    tasks: &[Uuid],
) -> Result<HashMap<TaskId, Vec<HeldBudget>>, Error> {
    let rows = sqlx::query!(
        r#"
        with recursive up as (
            select c.id as task_id, c.id from unnest($2::uuid[]) as c (id)
            union all
            select up.task_id, t.parent_task_id
            from up
            join tasks t on t.workspace_id = $1 and t.id = up.id
            where t.parent_task_id is not null
        ), above as (
            select up.task_id, up.id from up
            union all
            select c.id, $1 from unnest($2::uuid[]) as c (id)
        )
        select a.task_id as "task!: TaskId", b.id = $1 as "is_workspace!", o.id as "owner?: TaskId", o.title as "title?",
            held.calls as "calls!"
        from above a
        join budgets b on b.workspace_id = $1 and b.id = a.id
        cross join lateral (
            select count(*) as calls
            from budget_calls c
            join steps s on s.workspace_id = $1 and s.task_id = c.task_id and s.turn = c.turn and s.ordinal = 0
            where c.workspace_id = $1 and c.budget_id = b.id and s.status = 'running'
        ) held
        left join tasks o on o.workspace_id = $1 and o.id = b.id and o.deleted_at is null
        where held.calls > 0
        order by a.task_id, b.id
        "#,
        workspace.0,
        tasks,
    )
    .fetch_all(conn)
    .await?;
    let mut budgets = HashMap::<TaskId, Vec<HeldBudget>>::new();
    for row in rows {
        budgets.entry(row.task).or_default().push(HeldBudget {
            of: match row.is_workspace {
                true => Owner::Workspace,
                false => Owner::Task,
            },
            task_id: row.owner,
            title: row.title,
            calls: row.calls,
        });
    }
    Ok(budgets)
}

/// The groups that the tasks have not been told of, oldest first.
async fn groups(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    tasks: &[Uuid],
) -> Result<HashMap<TaskId, Vec<GroupFacts>>, Error> {
    let rows = sqlx::query!(
        r#"
        select g.task_id as "task: TaskId", g.id as "id: GroupId", g.source_type as "source_type: SourceType", g.total,
            g.pending, g.about, g.created_at, g.closed_at,
            (select min(a.scheduled_resume_at) from awaits a
             where a.workspace_id = $1 and a.group_id = g.id and a.settled_at is null) as due_at
        from await_groups g
        where g.workspace_id = $1 and g.task_id = any($2) and g.resumed_at is null
        order by g.created_at, g.id
        "#,
        workspace.0,
        tasks,
    )
    .fetch_all(conn)
    .await?;
    let mut groups = HashMap::<TaskId, Vec<GroupFacts>>::new();
    for row in rows {
        groups.entry(row.task).or_default().push(GroupFacts {
            id: row.id,
            source_type: row.source_type,
            total: row.total,
            pending: row.pending,
            about: row.about.unwrap_or_default(),
            created_at: row.created_at,
            closed_at: row.closed_at,
            due_at: row.due_at,
        });
    }
    Ok(groups)
}

async fn events(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    tasks: &[Uuid],
) -> Result<Vec<(TaskId, EventFacts)>, Error> {
    let rows = sqlx::query!(
        r#"
        select e.task_id as "task: TaskId", e.attempts, e.created_at, e.not_before, e.dead_at
        from orchestrator_events e
        where e.workspace_id = $1 and e.task_id = any($2)
        order by e.id
        "#,
        workspace.0,
        tasks,
    )
    .fetch_all(conn)
    .await?;
    Ok(column(rows, |row| {
        let event = EventFacts {
            attempts: row.attempts,
            created_at: row.created_at,
            not_before: row.not_before,
            dead_at: row.dead_at,
        };
        (row.task, event)
    }))
}
