//! `/api/api-keys`: keys of programs, for a workspace's admins (P-4, P-6).

use super::App;
use super::auth::AdminCaller;
use super::error::Error;
use super::extract::{Json, Path, Query};
use super::page::Page;
use crate::domain::ids::ApiKeyId;
use crate::domain::member::check_key_name;
use crate::domain::role::Role;
use crate::lifecycle::api_keys::{self as lifecycle, ApiKeyError};
use crate::store::{self, api_keys::ApiKey};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const LIST: &str = "api-keys";

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_api_keys, create_api_key))
        .routes(routes!(revoke_api_key))
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ApiKeyView {
    pub id: ApiKeyId,
    #[schema(example = "nightly import")]
    pub name: String,
    pub role: Role,
    /// What the key begins with.
    #[schema(example = "rk_4fG7aQ")]
    pub prefix: String,
    /// The subject of who made it.
    #[schema(example = "ada")]
    pub created_by: String,
    pub created_at: DateTime<Utc>,
    pub revoked_at: Option<DateTime<Utc>>,
}

impl From<ApiKey> for ApiKeyView {
    fn from(key: ApiKey) -> Self {
        Self {
            id: key.id,
            name: key.name,
            role: key.role,
            prefix: key.prefix,
            created_by: key.created_by,
            created_at: key.created_at,
            revoked_at: key.revoked_at,
        }
    }
}

/// The one answer that has the key.
#[derive(Serialize, ToSchema)]
pub struct NewApiKeyView {
    #[serde(flatten)]
    view: ApiKeyView,
    /// Send it as `Authorization: Bearer rk_…`. It is not shown again.
    #[schema(example = "rk_…")]
    key: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ApiKeyPage {
    pub items: Vec<ApiKeyView>,
    /// Give it as `cursor` for the next page; null on the last one.
    pub next_cursor: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewApiKey, example = json!({"name": "nightly import", "role": "member"}))]
pub struct NewApiKeyBody {
    /// 1 to 100 characters on one line.
    name: String,
    /// Not above your own.
    role: Role,
}

/// List the API keys
///
/// In order of creation, revoked ones too. The keys themselves are not kept.
#[utoipa::path(
    get,
    path = "/api/api-keys",
    tag = "auth",
    security(("bearer" = ["admin"])),
    params(Page),
    responses((status = 200, body = ApiKeyPage))
)]
async fn list_api_keys(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Query(page): Query<Page>,
) -> Result<Json<ApiKeyPage>, Error> {
    let after = page.after(LIST)?.map(ApiKeyId);
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let keys = store::api_keys::list(&mut conn, caller.workspace, after, page.wanted()).await?;
    let (keys, next_cursor) = page.cut(LIST, keys, |key| key.id.0);
    let items = keys.into_iter().map(ApiKeyView::from).collect();
    Ok(Json(ApiKeyPage { items, next_cursor }))
}

/// Create an API key
///
/// The answer is the only one that shows it.
#[utoipa::path(
    post,
    path = "/api/api-keys",
    tag = "auth",
    security(("bearer" = ["admin"])),
    request_body = NewApiKeyBody,
    responses((status = 201, body = NewApiKeyView))
)]
async fn create_api_key(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Json(body): Json<NewApiKeyBody>,
) -> Result<Response, Error> {
    check_key_name(&body.name).map_err(|reason| Error::field("name", reason))?;
    let (key, secret) = lifecycle::create(
        &app.pool,
        caller.workspace,
        caller.role,
        &caller.subject,
        &body.name,
        body.role,
    )
    .await?;
    let view = NewApiKeyView {
        view: key.into(),
        key: secret.expose_secret().to_owned(),
    };
    Ok((StatusCode::CREATED, Json(view)).into_response())
}

/// Revoke an API key
///
/// It is refused from the next request on. Again it changes nothing.
#[utoipa::path(
    delete,
    path = "/api/api-keys/{id}",
    tag = "auth",
    security(("bearer" = ["admin"])),
    params(("id" = ApiKeyId, Path)),
    responses((status = 204, description = "Revoked"))
)]
async fn revoke_api_key(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<ApiKeyId>,
) -> Result<StatusCode, Error> {
    lifecycle::revoke(&app.pool, caller.workspace, caller.role, id).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl From<ApiKeyError> for Error {
    fn from(error: ApiKeyError) -> Self {
        match error {
            ApiKeyError::NotFound => Error::NotFound,
            ApiKeyError::AboveOwnRole(role) => Error::Forbidden(role.as_str()),
            ApiKeyError::Store(error) => error.into(),
        }
    }
}
