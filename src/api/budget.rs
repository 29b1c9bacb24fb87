//! The budget of a workspace, for its admins (T-18). Budgets of tasks come with the message or the agent.

use super::App;
use super::auth::AdminCaller;
use super::error::Error;
use super::extract::Json;
use crate::domain::budget::Limits;
use crate::lifecycle;
use crate::store::budgets::{self, BudgetUse};
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(get_budget, put_budget, delete_budget))
}

/// A budget, and what was taken of it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct BudgetView {
    limits: Limits,
    /// Input and output tokens of calls that have ended.
    tokens: i64,
    cost_micros: i64,
    children: i64,
    counts_since: DateTime<Utc>,
}

impl From<BudgetUse> for BudgetView {
    fn from(found: BudgetUse) -> Self {
        Self {
            limits: found.limits,
            tokens: found.tokens,
            cost_micros: found.cost_micros,
            children: found.children,
            counts_since: found.counts_since,
        }
    }
}

#[derive(Serialize, ToSchema)]
pub struct WorkspaceBudget {
    /// Null: the workspace has none.
    budget: Option<BudgetView>,
}

/// See the workspace's budget
#[utoipa::path(
    get,
    path = "/api/admin/budget",
    tag = "admin",
    security(("bearer" = ["admin"])),
    responses((status = 200, body = WorkspaceBudget))
)]
async fn get_budget(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
) -> Result<Json<WorkspaceBudget>, Error> {
    let id = caller.workspace.0;
    let found = budgets::uses(&app.pool, caller.workspace, &[id]).await?;
    let budget = found.into_values().next().map(BudgetView::from);
    Ok(Json(WorkspaceBudget { budget }))
}

/// Set the workspace's budget
///
/// It counts from now on, whatever was counted before. From the next model call on, a task tree that asks for one when
/// the budget is used up is stopped, with the error `budget_exhausted`.
#[utoipa::path(
    put,
    path = "/api/admin/budget",
    tag = "admin",
    security(("bearer" = ["admin"])),
    request_body = Limits,
    responses((status = 200, body = WorkspaceBudget))
)]
async fn put_budget(
    State(app): State<App>,
    admin: AdminCaller,
    Json(body): Json<Value>,
) -> Result<Json<WorkspaceBudget>, Error> {
    let limits = Limits::parse(&body)?;
    lifecycle::budget::set(&app.pool, admin.0.workspace, Some(limits)).await?;
    get_budget(State(app), admin).await
}

/// Take the workspace's budget away
#[utoipa::path(
    delete,
    path = "/api/admin/budget",
    tag = "admin",
    security(("bearer" = ["admin"])),
    responses((status = 204, description = "There is none now"))
)]
async fn delete_budget(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
) -> Result<StatusCode, Error> {
    lifecycle::budget::set(&app.pool, caller.workspace, None).await?;
    Ok(StatusCode::NO_CONTENT)
}
