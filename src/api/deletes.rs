//! Deleting tasks, one or many (T-34, T-35).

use super::App;
use super::auth::Caller;
use super::error::Error;
use super::extract::{FromQuery, Json, Path, Query, QueryReader};
use crate::domain::ids::TaskId;
use crate::lifecycle::delete::{delete, delete_many};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const IDS_MAX: usize = 200;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(delete_task))
        .routes(routes!(delete_tasks))
}

#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[allow(dead_code, reason = "the document's side of `DeleteQuery`")]
struct DeleteParams {
    /// Also everything beneath it. Default `false`.
    include_subtasks: Option<bool>,
}

struct DeleteQuery {
    include_subtasks: bool,
}

impl FromQuery for DeleteQuery {
    fn from_query(query: &mut QueryReader) -> Self {
        let include_subtasks = query.optional("include_subtasks", "true or false");
        Self {
            include_subtasks: include_subtasks.unwrap_or(false),
        }
    }
}

#[derive(Serialize, ToSchema)]
pub struct Deleted {
    /// Tasks that this call deleted.
    deleted: u64,
}

/// Delete a task
///
/// It vanishes everywhere, and is stopped if it was active. A child that a living parent waits for goes on to its end
/// unseen, and its result still reaches the parent.
#[utoipa::path(
    delete,
    path = "/api/tasks/{id}",
    tag = "tasks",
    security(("bearer" = [])),
    params(("id" = TaskId, Path), DeleteParams),
    responses((status = 200, body = Deleted))
)]
async fn delete_task(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<TaskId>,
    Query(query): Query<DeleteQuery>,
) -> Result<Json<Deleted>, Error> {
    let subtasks = query.include_subtasks;
    let deleted = delete(&app.pool, &app.hub, caller.workspace, id, subtasks).await?;
    let deleted = deleted.ok_or(Error::NotFound)?;
    Ok(Json(Deleted { deleted }))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BulkDelete {
    /// At most 200. Those that are not there are passed over.
    ids: Vec<TaskId>,
    /// Also everything beneath them.
    #[serde(default)]
    include_subtasks: bool,
}

/// Delete many tasks
#[utoipa::path(
    post,
    path = "/api/tasks/bulk-delete",
    tag = "tasks",
    security(("bearer" = [])),
    request_body = BulkDelete,
    responses((status = 200, body = Deleted))
)]
async fn delete_tasks(
    State(app): State<App>,
    caller: Caller,
    Json(body): Json<BulkDelete>,
) -> Result<Json<Deleted>, Error> {
    if body.ids.len() > IDS_MAX {
        let reason = format!("must have at most {IDS_MAX} entries");
        return Err(Error::field("ids", reason));
    }
    let (workspace, subtasks) = (caller.workspace, body.include_subtasks);
    let deleted = delete_many(&app.pool, &app.hub, workspace, &body.ids, subtasks).await?;
    Ok(Json(Deleted { deleted }))
}
