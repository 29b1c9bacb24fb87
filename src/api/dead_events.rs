//! Events that the orchestrator has set aside, for operators, who look after all workspaces (W-19, P-6).

use super::App;
use super::auth::OperatorCaller;
use super::error::Error;
use super::extract::{FromQuery, Json, Path, Query, QueryReader};
use crate::lifecycle;
use crate::store::events::{self, DeadEvent};
use axum::extract::State;
use serde::Serialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const PAGE: u32 = 50;
const PAGE_MAX: u32 = 200;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_dead_events))
        .routes(routes!(retry_dead_event))
}

#[derive(Serialize, ToSchema)]
pub struct DeadEventPage {
    items: Vec<DeadEvent>,
    /// `cursor` of the next page; null on the last one.
    next_cursor: Option<String>,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[allow(dead_code, reason = "the document's side of `DeadEventQuery`")]
struct DeadEventParams {
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// 1 to 200, default 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
}

struct DeadEventQuery {
    after: i64,
    limit: u32,
}

impl FromQuery for DeadEventQuery {
    fn from_query(query: &mut QueryReader) -> Self {
        let after = query.optional("cursor", "a next_cursor of this list");
        Self {
            after: after.unwrap_or(0),
            limit: query.limit(PAGE, PAGE_MAX),
        }
    }
}

/// List dead events
///
/// Of all workspaces, oldest first: events that failed `orchestrator.max_attempts` times, with the last error.
#[utoipa::path(
    get,
    path = "/api/admin/dead-events",
    tag = "admin",
    security(("bearer" = ["operator"])),
    params(DeadEventParams),
    responses((status = 200, body = DeadEventPage))
)]
async fn list_dead_events(
    State(app): State<App>,
    _operator: OperatorCaller,
    Query(query): Query<DeadEventQuery>,
) -> Result<Json<DeadEventPage>, Error> {
    let limit = query.limit as usize;
    let mut items = events::dead_all_workspaces(&app.pool, query.after, limit as i64 + 1).await?;
    let more = items.len() > limit;
    items.truncate(limit);
    let next_cursor = items
        .last()
        .filter(|_| more)
        .map(|event| event.id.to_string());
    Ok(Json(DeadEventPage { items, next_cursor }))
}

#[derive(Serialize, ToSchema)]
pub struct Retried {
    id: i64,
    /// Always true: what is not dead is not found.
    retried: bool,
}

/// Retry a dead event
///
/// It is handled again at once, with all its attempts before it.
#[utoipa::path(
    post,
    path = "/api/admin/dead-events/{id}/retry",
    tag = "admin",
    security(("bearer" = ["operator"])),
    params(("id" = i64, Path)),
    responses((status = 200, body = Retried))
)]
async fn retry_dead_event(
    State(app): State<App>,
    _operator: OperatorCaller,
    Path(id): Path<i64>,
) -> Result<Json<Retried>, Error> {
    match lifecycle::revive::revive(&app.pool, &app.hub, id).await? {
        true => Ok(Json(Retried { id, retried: true })),
        false => Err(Error::NotFound),
    }
}
