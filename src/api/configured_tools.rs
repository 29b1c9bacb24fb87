//! `/api/configured-tools`: base tools with arguments bound by an author (L-2).
//!
//! Members read, admins write. As with agents, the ETag is the revision: an edit must name the one it was made from in
//! `If-Match`, deleting may.

use super::App;
use super::auth::{AdminCaller, Caller};
use super::error::{Error, Problem};
use super::extract::{Json, Path, Query};
use super::if_match::IfMatch;
use super::page::Page;
use crate::domain::configured_tool::ConfiguredTool;
use crate::domain::ids::{AgentId, ConfiguredToolId, WorkspaceId};
use crate::lifecycle::configured_tools::{self as lifecycle, EditError, TOOLS_MAX};
use crate::store::{self, configured_tools::Stored};
use crate::tools;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const LIST: &str = "configured-tools";

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_configured_tools, create_configured_tool))
        .routes(routes!(
            get_configured_tool,
            patch_configured_tool,
            delete_configured_tool
        ))
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ConfiguredTool)]
pub struct ConfiguredToolView {
    pub id: ConfiguredToolId,
    /// As agents list it in `tools`, and as models call it.
    #[schema(example = "delegate_to_legal")]
    pub name: String,
    #[schema(example = "delegate_tasks")]
    pub base_tool: String,
    /// What models are told, before the words of the base tool.
    pub description: String,
    /// The one agent that may use it; null: every agent of the workspace that lists it.
    pub agent_group_id: Option<AgentId>,
    /// Of a tool on http_request: JSON Schema of what the model gives, as `{{name}}` in the bindings.
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Value>,
    /// By argument: a value, or `{"credential": ID}`. No value of a credential is ever shown.
    #[schema(value_type = Object)]
    pub bindings: Map<String, Value>,
    /// Grows with every write; the ETag.
    pub revision: i64,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl From<Stored> for ConfiguredToolView {
    fn from(stored: Stored) -> Self {
        let tool = stored.tool;
        ConfiguredToolView {
            id: stored.id,
            name: tool.name,
            base_tool: tool.base_tool,
            description: tool.description,
            agent_group_id: tool.agent,
            parameters: tool.parameters,
            bindings: tool.bindings,
            revision: stored.revision,
            created_at: stored.created_at,
            updated_at: stored.updated_at,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ConfiguredToolPage {
    pub items: Vec<ConfiguredToolView>,
    /// Give it as `cursor` for the next page; null on the last one.
    pub next_cursor: Option<String>,
}

/// What `POST /api/configured-tools` takes. `name` and `base_tool` are required.
#[derive(ToSchema)]
#[schema(as = NewConfiguredTool, example = json!({
    "name": "wait_for_payment",
    "base_tool": "wait_for_signal",
    "description": "Waits until the customer has paid.",
    "bindings": {"timeout_minutes": 2880}
}))]
#[allow(
    dead_code,
    reason = "the shape for the document; bodies are read by the domain"
)]
pub struct NewConfiguredTool {
    /// 1 to 64 letters, digits, `_` and `-`, beginning with a letter; unique in the workspace, and no base tool's name.
    name: String,
    /// The name of a base tool.
    base_tool: String,
    /// At most 4,000 characters.
    #[schema(default = "")]
    description: Option<String>,
    /// Only this agent may use the tool.
    agent_group_id: Option<AgentId>,
    /// Only on http_request: JSON Schema of what the model gives instead of the base tool's arguments. In the bound `url`,
    /// `headers`, `query` and `body`, `{{name}}` stands for one of its properties, encoded for the place it stands in.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Value>,
    /// By argument of the base tool: a text, a number, true or false, or `{"credential": ID}` for a secret text. What is
    /// bound is not shown to the model, and overrides what it sends. A tool on delegate_tasks may also bind
    /// `allowed_agent_group_ids`: ids separated by commas, the only agents that it reaches. A tool on http_request may bind
    /// objects and lists too, with `{"credential": ID, "prefix": "Bearer "}` anywhere in them, and `response_path`,
    /// `timeout_seconds` and `repeatable`.
    #[schema(value_type = Option<Object>)]
    bindings: Option<Value>,
}

/// List the workspace's configured tools
///
/// In order of creation.
#[utoipa::path(
    get,
    path = "/api/configured-tools",
    tag = "tools",
    security(("bearer" = [])),
    params(Page),
    responses((status = 200, body = ConfiguredToolPage))
)]
async fn list_configured_tools(
    State(app): State<App>,
    caller: Caller,
    Query(page): Query<Page>,
) -> Result<Json<ConfiguredToolPage>, Error> {
    let after = page.after(LIST)?.map(ConfiguredToolId);
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let found =
        store::configured_tools::list(&mut conn, caller.workspace, after, page.wanted()).await?;
    let (items, next_cursor) = page.cut(LIST, found, |stored| stored.id.0);
    let items = items.into_iter().map(ConfiguredToolView::from).collect();
    Ok(Json(ConfiguredToolPage { items, next_cursor }))
}

/// Configure a tool
#[utoipa::path(
    post,
    path = "/api/configured-tools",
    tag = "tools",
    security(("bearer" = ["admin"])),
    request_body = NewConfiguredTool,
    responses(
        (status = 201, body = ConfiguredToolView, description = "Its address is in Location, its revision in ETag"),
        (status = 404, body = Problem, content_type = "application/problem+json",
            description = "An agent or credential that it names is not there (`not_found`)"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The name is taken (`tool_name_taken`), or the workspace has too many (`too_many_configured_tools`)"),
    )
)]
async fn create_configured_tool(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Json(body): Json<Value>,
) -> Result<Response, Error> {
    let tool = ConfiguredTool::parse(&body, &tools::bases())?;
    let made = lifecycle::create(&app.pool, caller.workspace, &tool).await?;
    let address = format!("/api/configured-tools/{}", made.id);
    let location = [(header::LOCATION, address)];
    Ok((StatusCode::CREATED, location, tagged(made)).into_response())
}

/// See a configured tool
#[utoipa::path(
    get,
    path = "/api/configured-tools/{id}",
    tag = "tools",
    security(("bearer" = [])),
    params(("id" = ConfiguredToolId, Path)),
    responses((status = 200, body = ConfiguredToolView, description = "Its revision is in ETag"))
)]
async fn get_configured_tool(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<ConfiguredToolId>,
) -> Result<Response, Error> {
    Ok(tagged(find(&app, caller.workspace, id).await?))
}

/// Change a configured tool
///
/// A JSON merge patch (RFC 7396) of the fields that `POST /api/configured-tools` takes; a null in `bindings` unbinds the
/// argument. Tasks use the new form from their next step on.
#[utoipa::path(
    patch,
    path = "/api/configured-tools/{id}",
    tag = "tools",
    security(("bearer" = ["admin"])),
    params(
        ("id" = ConfiguredToolId, Path),
        ("If-Match" = String, Header, description = "The ETag of the tool that the change was made from"),
    ),
    request_body(
        description = "Fields to change; null takes a field back to its default",
        content(
            (Value = "application/merge-patch+json", example = json!({"bindings": {"timeout_minutes": 60}})),
            (Value = "application/json", example = json!({"bindings": {"timeout_minutes": 60}})),
        )
    ),
    responses(
        (status = 200, body = ConfiguredToolView, description = "Its new revision is in ETag"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The name is taken (`tool_name_taken`)"),
        (status = 412, body = Problem, content_type = "application/problem+json",
            description = "Somebody else has changed the tool since (`stale_revision`)"),
        (status = 428, body = Problem, content_type = "application/problem+json",
            description = "If-Match is missing (`precondition_required`)"),
    )
)]
async fn patch_configured_tool(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<ConfiguredToolId>,
    if_match: IfMatch,
    Json(body): Json<Value>,
) -> Result<Response, Error> {
    // Not there is not there, whatever else the request lacks.
    find(&app, caller.workspace, id).await?;
    let revision = if_match.required()?;
    let bases = tools::bases();
    let changed =
        lifecycle::patch(&app.pool, caller.workspace, id, revision, &body, &bases).await?;
    Ok(tagged(changed))
}

/// Delete a configured tool
///
/// Agents that list it go on without it.
#[utoipa::path(
    delete,
    path = "/api/configured-tools/{id}",
    tag = "tools",
    security(("bearer" = ["admin"])),
    params(
        ("id" = ConfiguredToolId, Path),
        ("If-Match" = Option<String>, Header, description = "Delete only if the tool still has this ETag"),
    ),
    responses(
        (status = 204, description = "Deleted"),
        (status = 412, body = Problem, content_type = "application/problem+json",
            description = "Somebody else has changed the tool since (`stale_revision`)"),
    )
)]
async fn delete_configured_tool(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<ConfiguredToolId>,
    IfMatch(revision): IfMatch,
) -> Result<StatusCode, Error> {
    lifecycle::delete(&app.pool, caller.workspace, id, revision).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn find(app: &App, workspace: WorkspaceId, id: ConfiguredToolId) -> Result<Stored, Error> {
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    store::configured_tools::get(&mut conn, workspace, id)
        .await?
        .ok_or(Error::NotFound)
}

fn tagged(stored: Stored) -> Response {
    let etag = format!("\"{}\"", stored.revision);
    (
        [(header::ETAG, etag)],
        Json(ConfiguredToolView::from(stored)),
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
                    "The tool has been changed since and is at revision {current}. Read it again, apply your change to \
                     what it is now, and send that with its ETag in If-Match."
                ),
            ),
            EditError::NameTaken => Error::conflict(
                "tool_name_taken",
                "The workspace has a configured tool of this name. Choose another name.",
            ),
            EditError::TooMany => Error::conflict(
                "too_many_configured_tools",
                format!(
                    "The workspace has {TOOLS_MAX} configured tools, which is the most. Delete one first."
                ),
            ),
            EditError::Invalid(error) => error.into(),
            EditError::Store(error) => error.into(),
        }
    }
}
