//! Runtime flags, for operators, who look after all workspaces (P-7).

use super::App;
use super::auth::OperatorCaller;
use super::error::Error;
use super::extract::{Json, Path};
use crate::domain::flag::Flag;
use crate::domain::ids::WorkspaceId;
use crate::lifecycle::set_flag::{SetFlagError, set_flag};
use crate::store::flags::{self, SetFlag};
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_flags))
        .routes(routes!(put_flag))
}

#[derive(Debug, Serialize, ToSchema)]
pub struct FlagView {
    #[schema(example = "batch_fanout.enabled")]
    pub key: &'static str,
    /// What `value` must be: `boolean`.
    #[serde(rename = "type")]
    #[schema(example = "boolean")]
    pub kind: &'static str,
    #[schema(value_type = Object, example = false)]
    pub value: Value,
    #[schema(value_type = Object, example = false)]
    pub default: Value,
    pub description: &'static str,
    /// The subject of the token that set it; null while nobody has.
    #[schema(example = "ada")]
    pub changed_by: Option<String>,
    /// The workspace of that subject; null for the command line.
    pub changed_by_workspace_id: Option<WorkspaceId>,
    pub changed_at: Option<DateTime<Utc>>,
}

/// A flag and what it was set to, if it was.
pub fn view(flag: Flag, set: Option<SetFlag>) -> FlagView {
    let info = flag.info();
    let (value, changed_by, changed_by_workspace_id, changed_at) = match set {
        Some(set) => (
            set.value,
            Some(set.changed_by),
            set.changed_by_workspace,
            Some(set.changed_at),
        ),
        None => (info.default.clone(), None, None, None),
    };
    FlagView {
        key: info.key,
        kind: info.kind.as_str(),
        value,
        default: info.default,
        description: info.description,
        changed_by,
        changed_by_workspace_id,
        changed_at,
    }
}

/// All flags there are. What another release has set and this one does not know is left out.
pub fn views(mut set: Vec<SetFlag>) -> Vec<FlagView> {
    let mut take = |flag: Flag| {
        let at = set.iter().position(|set| set.key == flag.info().key);
        view(flag, at.map(|at| set.swap_remove(at)))
    };
    Flag::ALL.into_iter().map(&mut take).collect()
}

#[derive(Debug, Serialize, ToSchema)]
pub struct FlagPage {
    pub items: Vec<FlagView>,
    /// Always null: they are few.
    pub next_cursor: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"value": true}))]
pub struct NewFlagValue {
    /// Of the flag's type.
    #[schema(value_type = Object)]
    value: Value,
}

/// List the runtime flags
///
/// All of them, in one page.
#[utoipa::path(
    get,
    path = "/api/admin/runtime-flags",
    tag = "admin",
    security(("bearer" = ["operator"])),
    responses((status = 200, body = FlagPage))
)]
async fn list_flags(
    State(app): State<App>,
    _operator: OperatorCaller,
) -> Result<Json<FlagPage>, Error> {
    Ok(Json(FlagPage {
        items: views(flags::list(&app.pool).await?),
        next_cursor: None,
    }))
}

/// Set a runtime flag
///
/// It takes effect in every process within two seconds.
#[utoipa::path(
    put,
    path = "/api/admin/runtime-flags/{key}",
    tag = "admin",
    security(("bearer" = ["operator"])),
    params(("key" = String, Path, example = "batch_fanout.enabled")),
    request_body = NewFlagValue,
    responses((status = 200, body = FlagView))
)]
async fn put_flag(
    State(app): State<App>,
    OperatorCaller(caller): OperatorCaller,
    Path(key): Path<String>,
    Json(body): Json<NewFlagValue>,
) -> Result<Json<FlagView>, Error> {
    let flag = Flag::by_key(&key).ok_or(Error::NotFound)?;
    let set = set_flag(
        &app.pool,
        flag,
        &body.value,
        &caller.subject,
        Some(caller.workspace),
    )
    .await
    .map_err(|error| match error {
        SetFlagError::WrongType(reason) => Error::field("value", reason),
        SetFlagError::Store(error) => error.into(),
    })?;
    Ok(Json(view(flag, Some(set))))
}
