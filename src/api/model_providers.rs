//! `/api/model-providers`: where a workspace's own models answer, and with which keys (L-10). A key goes in and never comes
//! out.
//!
//! For admins. As with agents, the ETag is the revision: an edit must name the one it was made from in `If-Match`, deleting
//! may.

use super::App;
use super::auth::AdminCaller;
use super::error::{Error, Problem};
use super::extract::{Json, Path, Query};
use super::if_match::IfMatch;
use super::page::Page;
use crate::domain::ids::{ModelProviderId, WorkspaceId};
use crate::domain::model_provider::{ModelProvider, ProviderKind};
use crate::lifecycle::model_providers::{self as lifecycle, EditError, PROVIDERS_MAX};
use crate::net::Reach;
use crate::store::{self, model_providers::Stored};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const LIST: &str = "model-providers";

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_model_providers, create_model_provider))
        .routes(routes!(
            get_model_provider,
            patch_model_provider,
            delete_model_provider
        ))
}

/// A model provider without its key.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ModelProvider)]
pub struct ModelProviderView {
    pub id: ModelProviderId,
    /// As agents name it in `model.provider`.
    #[schema(example = "our-gateway")]
    pub name: String,
    pub kind: ProviderKind,
    /// Null: the provider's own.
    #[schema(example = "https://llm.example.com/v1")]
    pub base_url: Option<String>,
    /// The model of agents that name none.
    #[schema(example = "gpt-5")]
    pub model: Option<String>,
    /// Answers for the workspace's agents that name no provider.
    pub is_default: bool,
    pub has_key: bool,
    /// The last four characters of a long key; null for a short one.
    #[schema(example = "9f3a")]
    pub key_hint: Option<String>,
    /// Grows with every write; the ETag.
    pub revision: i64,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl From<Stored> for ModelProviderView {
    fn from(stored: Stored) -> Self {
        let provider = stored.provider;
        ModelProviderView {
            id: stored.id,
            name: provider.name,
            kind: provider.kind,
            base_url: provider.base_url,
            model: provider.model,
            is_default: provider.is_default,
            has_key: stored.has_key,
            key_hint: stored.key_hint,
            revision: stored.revision,
            created_at: stored.created_at,
            updated_at: stored.updated_at,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ModelProviderPage {
    pub items: Vec<ModelProviderView>,
    /// Give it as `cursor` for the next page; null on the last one.
    pub next_cursor: Option<String>,
}

/// What `POST /api/model-providers` takes. `name` and `kind` are required.
#[derive(ToSchema)]
#[schema(as = NewModelProvider, example = json!({
    "name": "our-gateway",
    "kind": "openai",
    "base_url": "https://llm.example.com/v1",
    "key": "the key itself",
    "model": "gpt-5",
    "is_default": true
}))]
#[allow(
    dead_code,
    reason = "the shape for the document; bodies are read by the domain"
)]
pub struct NewModelProvider {
    /// 1 to 100 characters on one line, unique in the workspace. An agent that names it in `model.provider` gets it, also
    /// where a provider of the deployment has the same name.
    name: String,
    /// The form in which it is asked: `openai` for whatever speaks chat completions, `anthropic` or `gemini`.
    kind: ProviderKind,
    /// http or https, at most 2,000 characters. Absent: the provider's own. It is shown; a key belongs in `key`.
    base_url: Option<String>,
    /// 4 to 10,000 characters. Sent to `base_url` only, and to be given again when that changes.
    key: Option<String>,
    /// The model of agents that name none. At most 200 characters.
    model: Option<String>,
    /// Answers for the workspace's agents that name no provider; another one does so no longer.
    #[schema(default = false)]
    is_default: Option<bool>,
}

/// List the workspace's model providers
///
/// Without their keys, in order of creation. Where there are none, those of the deployment answer.
#[utoipa::path(
    get,
    path = "/api/model-providers",
    tag = "agents",
    security(("bearer" = ["admin"])),
    params(Page),
    responses((status = 200, body = ModelProviderPage))
)]
async fn list_model_providers(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Query(page): Query<Page>,
) -> Result<Json<ModelProviderPage>, Error> {
    let after = page.after(LIST)?.map(ModelProviderId);
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let found =
        store::model_providers::list(&mut conn, caller.workspace, after, page.wanted()).await?;
    let (items, next_cursor) = page.cut(LIST, found, |stored| stored.id.0);
    let items = items.into_iter().map(ModelProviderView::from).collect();
    Ok(Json(ModelProviderPage { items, next_cursor }))
}

/// Add a model provider
///
/// Its key is encrypted under the operator's newest key, and returned by no route. What the workspace's agents ask, and
/// public agents of others that work for it, is then asked with this key.
#[utoipa::path(
    post,
    path = "/api/model-providers",
    tag = "agents",
    security(("bearer" = ["admin"])),
    request_body = NewModelProvider,
    responses(
        (status = 201, body = ModelProviderView, description = "Its address is in Location, its revision in ETag"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The name is taken (`model_provider_name_taken`), the workspace has too many \
                (`too_many_model_providers`), another one has become the default at this moment \
                (`default_model_provider_taken`), or this deployment has no key to encrypt with (`operator_key_missing`)"),
    )
)]
async fn create_model_provider(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Json(body): Json<Value>,
) -> Result<Response, Error> {
    let new = ModelProvider::parse(&body)?;
    let made =
        lifecycle::create(&app.pool, &app.vault, reach(&app), caller.workspace, &new).await?;
    let address = format!("/api/model-providers/{}", made.id);
    let location = [(header::LOCATION, address)];
    Ok((StatusCode::CREATED, location, tagged(made)).into_response())
}

/// See a model provider
#[utoipa::path(
    get,
    path = "/api/model-providers/{id}",
    tag = "agents",
    security(("bearer" = ["admin"])),
    params(("id" = ModelProviderId, Path)),
    responses((status = 200, body = ModelProviderView, description = "Its revision is in ETag"))
)]
async fn get_model_provider(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<ModelProviderId>,
) -> Result<Response, Error> {
    Ok(tagged(find(&app, caller.workspace, id).await?))
}

/// Change a model provider
///
/// A JSON merge patch (RFC 7396) of the fields that `POST /api/model-providers` takes; a null takes a field back to its
/// default, and the key away. Another `kind` or `base_url` wants the key again. Steps use the new form from their next
/// request on.
#[utoipa::path(
    patch,
    path = "/api/model-providers/{id}",
    tag = "agents",
    security(("bearer" = ["admin"])),
    params(
        ("id" = ModelProviderId, Path),
        ("If-Match" = String, Header, description = "The ETag of the provider that the change was made from"),
    ),
    request_body(
        description = "Fields to change; null takes a field back to its default",
        content(
            (Value = "application/merge-patch+json", example = json!({"key": "the new key"})),
            (Value = "application/json", example = json!({"key": "the new key"})),
        )
    ),
    responses(
        (status = 200, body = ModelProviderView, description = "Its new revision is in ETag"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The name is taken (`model_provider_name_taken`), another one has become the default at this \
                moment (`default_model_provider_taken`), or this deployment has no key to encrypt with (`operator_key_missing`)"),
        (status = 412, body = Problem, content_type = "application/problem+json",
            description = "Somebody else has changed the provider since (`stale_revision`)"),
        (status = 428, body = Problem, content_type = "application/problem+json",
            description = "If-Match is missing (`precondition_required`)"),
    )
)]
async fn patch_model_provider(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<ModelProviderId>,
    if_match: IfMatch,
    Json(body): Json<Value>,
) -> Result<Response, Error> {
    // Not there is not there, whatever else the request lacks.
    find(&app, caller.workspace, id).await?;
    let revision = if_match.required()?;
    let reach = reach(&app);
    let (pool, vault) = (&app.pool, &app.vault);
    let changed =
        lifecycle::patch(pool, vault, reach, caller.workspace, id, revision, &body).await?;
    Ok(tagged(changed))
}

/// Delete a model provider
///
/// Tasks of agents that name it fail, unless the deployment has a provider of this name.
#[utoipa::path(
    delete,
    path = "/api/model-providers/{id}",
    tag = "agents",
    security(("bearer" = ["admin"])),
    params(
        ("id" = ModelProviderId, Path),
        ("If-Match" = Option<String>, Header, description = "Delete only if the provider still has this ETag"),
    ),
    responses(
        (status = 204, description = "Deleted"),
        (status = 412, body = Problem, content_type = "application/problem+json",
            description = "Somebody else has changed the provider since (`stale_revision`)"),
    )
)]
async fn delete_model_provider(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<ModelProviderId>,
    IfMatch(revision): IfMatch,
) -> Result<StatusCode, Error> {
    lifecycle::delete(&app.pool, caller.workspace, id, revision).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn reach(app: &App) -> Reach {
    Reach::with_private(app.config.http.allow_private_addresses)
}

async fn find(app: &App, workspace: WorkspaceId, id: ModelProviderId) -> Result<Stored, Error> {
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    store::model_providers::get(&mut conn, workspace, id)
        .await?
        .ok_or(Error::NotFound)
}

fn tagged(stored: Stored) -> Response {
    let etag = format!("\"{}\"", stored.revision);
    (
        [(header::ETAG, etag)],
        Json(ModelProviderView::from(stored)),
    )
        .into_response()
}

impl From<EditError> for Error {
    fn from(error: EditError) -> Self {
        match error {
            EditError::NotFound => Error::NotFound,
            EditError::Stale { current } => Error::precondition_failed(
                "stale_revision",
                format!(
                    "The provider has been changed since and is at revision {current}. Read it again, apply your change \
                     to what it is now, and send that with its ETag in If-Match."
                ),
            ),
            EditError::NameTaken => Error::conflict(
                "model_provider_name_taken",
                "The workspace has a model provider of this name. Choose another name.",
            ),
            EditError::DefaultTaken => Error::conflict(
                "default_model_provider_taken",
                "Another model provider has become the default at this moment. Repeat the request if this one is to be it.",
            ),
            EditError::TooMany => Error::conflict(
                "too_many_model_providers",
                format!(
                    "The workspace has {PROVIDERS_MAX} model providers, which is the most. Delete one first."
                ),
            ),
            EditError::Vault(reason) => Error::conflict(
                "operator_key_missing",
                format!("The key can not be encrypted: {reason}."),
            ),
            EditError::Invalid(error) => error.into(),
            EditError::Store(error) => error.into(),
        }
    }
}
