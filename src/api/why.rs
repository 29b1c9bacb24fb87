//! Why a task does not move (T-25): what it waits for, and what that waits for, down to the causes.

use super::App;
use super::auth::Caller;
use super::error::Error;
use super::extract::{Json, Path};
use crate::domain::ids::{AgentId, GroupId, TaskId, WorkspaceId};
use crate::domain::task::TaskStatus;
use crate::domain::why::{Cause, causes};
use crate::store;
use crate::store::why::{Known, hold_still, known, pending_children};
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::PgConnection;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// So many tasks are looked at.
const TASKS_MAX: usize = 200;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(get_why))
}

#[derive(Serialize, ToSchema)]
pub struct Why {
    /// The task itself (depth 0), and the children that it waits for, and those that they wait for; each task before those
    /// that it waits for. Children that nobody waits for are not among them.
    items: Vec<WhyTask>,
    /// Children that are waited for and were not looked at, since there are more than 200 tasks. What they wait for in turn
    /// is not counted.
    left_out: i64,
    /// All of it is as it was at this moment.
    as_of: DateTime<Utc>,
}

#[derive(Serialize, ToSchema)]
pub struct WhyTask {
    task_id: TaskId,
    /// Null for the task that was asked for, even if it has a parent.
    parent_task_id: Option<TaskId>,
    depth: i32,
    title: String,
    agent_group_id: AgentId,
    #[schema(example = "Researcher")]
    agent_name: String,
    status: TaskStatus,
    /// It has been deleted, and goes on to its end for the parent that waits for it.
    deleted: bool,
    /// At least one.
    causes: Vec<Cause>,
}

/// See why a task does not move
///
/// What the task waits for, and so on down its tree: a place in the queue, a limit, a model, a tool, a person, a signal, a
/// time, the orchestrator; with how long each has lasted. A task that has ended says so.
#[utoipa::path(
    get,
    path = "/api/tasks/{id}/why",
    tag = "tasks",
    security(("bearer" = [])),
    params(("id" = TaskId, Path)),
    responses((status = 200, body = Why))
)]
async fn get_why(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<TaskId>,
) -> Result<Json<Why>, Error> {
    let mut tx = store::begin(&app.pool).await?;
    let why = look(&mut tx, caller.workspace, id).await?;
    why.map(Json).ok_or(Error::NotFound)
}

/// Goes down level by level, each in one look.
async fn look(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    task: TaskId,
) -> Result<Option<Why>, store::Error> {
    let as_of = hold_still(conn).await?;
    let mut items: Vec<WhyTask> = Vec::new();
    let mut left_out = 0;
    let mut level = vec![task];
    for depth in 0.. {
        let tasks = known(conn, workspace, &level).await?;
        if depth == 0 && tasks.iter().all(|task| task.deleted) {
            return Ok(None);
        }
        let above = items.len();
        let explained = tasks.into_iter().map(|t| WhyTask::new(t, depth, as_of));
        items.extend(explained);
        let causes = items[above..].iter().flat_map(|task| &task.causes);
        let (groups, pending): (Vec<GroupId>, Vec<i64>) =
            causes.filter_map(|cause| cause.what.children()).unzip();
        let room = TASKS_MAX.saturating_sub(items.len());
        level = pending_children(conn, workspace, &groups, room as i64).await?;
        left_out += pending.iter().sum::<i64>() - level.len() as i64;
        if level.is_empty() {
            break;
        }
    }
    Ok(Some(Why {
        items,
        left_out,
        as_of,
    }))
}

impl WhyTask {
    fn new(known: Known, depth: i32, now: DateTime<Utc>) -> Self {
        Self {
            task_id: known.task,
            parent_task_id: known.parent.filter(|_| depth > 0),
            depth,
            title: known.title,
            agent_group_id: known.agent,
            agent_name: known.agent_name,
            status: known.facts.status,
            deleted: known.deleted,
            causes: causes(&known.facts, now),
        }
    }
}
