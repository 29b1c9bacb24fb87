//! `/api/credentials`: secrets of a workspace, by name. A value goes in and never comes out (L-9).

use super::App;
use super::auth::AdminCaller;
use super::error::{Error, Problem};
use super::extract::{Json, Path, Query};
use super::page::Page;
use crate::domain::credential::NewCredential;
use crate::domain::ids::CredentialId;
use crate::lifecycle::credentials::{self as lifecycle, CredentialError};
use crate::store::{self, credentials::Credential};
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const LIST: &str = "credentials";

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_credentials, create_credential))
        .routes(routes!(replace_credential, delete_credential))
}

/// A credential without its value.
#[derive(Debug, Serialize, ToSchema)]
pub struct CredentialView {
    pub id: CredentialId,
    #[schema(example = "CRM token")]
    pub name: String,
    /// Which of the operator's keys it is encrypted under.
    #[schema(example = "2026-11")]
    pub key_id: String,
    pub created_at: DateTime<Utc>,
    /// When its value was last written, by `reencrypt` too.
    pub updated_at: DateTime<Utc>,
}

impl From<Credential> for CredentialView {
    fn from(credential: Credential) -> Self {
        let Credential {
            id,
            name,
            key_id,
            created_at,
            updated_at,
        } = credential;
        CredentialView {
            id,
            name,
            key_id,
            created_at,
            updated_at,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub struct CredentialPage {
    pub items: Vec<CredentialView>,
    /// Give it as `cursor` for the next page; null on the last one.
    pub next_cursor: Option<String>,
}

/// What `POST /api/credentials` takes.
#[derive(ToSchema)]
#[schema(as = NewCredential, example = json!({"name": "CRM token", "value": "the token itself"}))]
#[allow(
    dead_code,
    reason = "the shape for the document; bodies are read by the domain"
)]
pub struct NewCredentialBody {
    /// 1 to 100 characters on one line, unique in the workspace.
    name: String,
    /// 4 to 10,000 characters, kept as they are.
    value: String,
}

/// What `PATCH /api/credentials/{id}` takes.
#[derive(ToSchema)]
#[schema(as = CredentialValue, example = json!({"value": "the new token"}))]
#[allow(
    dead_code,
    reason = "the shape for the document; bodies are read by the domain"
)]
pub struct CredentialValueBody {
    /// 4 to 10,000 characters, kept as they are.
    value: String,
}

/// List the workspace's credentials
///
/// Without their values, in order of creation.
#[utoipa::path(
    get,
    path = "/api/credentials",
    tag = "tools",
    security(("bearer" = ["admin"])),
    params(Page),
    responses((status = 200, body = CredentialPage))
)]
async fn list_credentials(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Query(page): Query<Page>,
) -> Result<Json<CredentialPage>, Error> {
    let after = page.after(LIST)?.map(CredentialId);
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let found = store::credentials::list(&mut conn, caller.workspace, after, page.wanted()).await?;
    let (items, next_cursor) = page.cut(LIST, found, |credential| credential.id.0);
    let items = items.into_iter().map(CredentialView::from).collect();
    Ok(Json(CredentialPage { items, next_cursor }))
}

/// Store a credential
///
/// It is encrypted under the operator's newest key. No route returns the value; configured tools name the credential by
/// its id, and the value is put in on the server when the tool is called.
#[utoipa::path(
    post,
    path = "/api/credentials",
    tag = "tools",
    security(("bearer" = ["admin"])),
    request_body = NewCredentialBody,
    responses(
        (status = 201, body = CredentialView),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The name is taken (`credential_name_taken`), or this deployment has no key to encrypt with (`operator_key_missing`)"),
    )
)]
async fn create_credential(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Json(body): Json<Value>,
) -> Result<(StatusCode, Json<CredentialView>), Error> {
    let new = NewCredential::parse(&body)?;
    let made = lifecycle::create(&app.pool, &app.vault, caller.workspace, &new).await?;
    Ok((StatusCode::CREATED, Json(made.into())))
}

/// Give a credential another value
///
/// Whatever uses it uses the new value from its next call on.
#[utoipa::path(
    patch,
    path = "/api/credentials/{id}",
    tag = "tools",
    security(("bearer" = ["admin"])),
    params(("id" = CredentialId, Path)),
    request_body = CredentialValueBody,
    responses(
        (status = 200, body = CredentialView),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "This deployment has no key to encrypt with (`operator_key_missing`)"),
    )
)]
async fn replace_credential(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<CredentialId>,
    Json(body): Json<Value>,
) -> Result<Json<CredentialView>, Error> {
    // Not there is not there, whatever else is wrong.
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let found = store::credentials::get(&mut conn, caller.workspace, id).await?;
    drop(conn);
    found.ok_or(Error::NotFound)?;
    let value = NewCredential::parse_value(&body)?;
    let changed = lifecycle::replace(&app.pool, &app.vault, caller.workspace, id, &value).await?;
    Ok(Json(changed.into()))
}

/// Delete a credential
#[utoipa::path(
    delete,
    path = "/api/credentials/{id}",
    tag = "tools",
    security(("bearer" = ["admin"])),
    params(("id" = CredentialId, Path)),
    responses(
        (status = 204, description = "Deleted"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "Something in the workspace uses it (`credential_in_use`)"),
    )
)]
async fn delete_credential(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<CredentialId>,
) -> Result<StatusCode, Error> {
    lifecycle::delete(&app.pool, caller.workspace, id).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl From<CredentialError> for Error {
    fn from(error: CredentialError) -> Self {
        match error {
            CredentialError::NotFound => Error::NotFound,
            CredentialError::NameTaken => Error::conflict(
                "credential_name_taken",
                "The workspace has a credential of this name. Choose another name, or give that one another value.",
            ),
            CredentialError::InUse => Error::conflict(
                "credential_in_use",
                "Something in the workspace uses this credential. Unbind it there first, or give the credential another value.",
            ),
            CredentialError::Vault(reason) => Error::conflict(
                "operator_key_missing",
                format!("The credential can not be encrypted or read: {reason}."),
            ),
            CredentialError::Store(error) => error.into(),
        }
    }
}
