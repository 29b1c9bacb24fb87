//! `/api/agents`: the agents of a workspace.
//!
//! Members read, admins write. An agent's ETag is its revision: an edit must name the one it was made from in `If-Match`,
//! publishing and deleting may. Public agents of other workspaces are in rosters only; here they do not exist.

use super::App;
use super::auth::{AdminCaller, Caller};
use super::error::{Error, FieldError, Problem, field_errors};
use super::extract::{Json, Path, Query};
use super::if_match::IfMatch;
use super::page::Page;
use crate::domain::agent::{AgentDefinition, AgentKind, ModelSettings, Phase, Template};
use crate::domain::ids::{AgentId, WorkspaceId};
use crate::lifecycle::agents::{self as lifecycle, EditError};
use crate::runtime::Causes;
use crate::store::{self, agents::Agent};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const LIST: &str = "agents";

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_agents, create_agent))
        .routes(routes!(get_agent, patch_agent, delete_agent))
        .routes(routes!(publish_agent))
}

/// An agent as its authors see it: the draft, and which version is published.
#[derive(Debug, Serialize, ToSchema)]
pub struct AgentView {
    pub id: AgentId,
    /// The same as `id`: all versions of an agent share it, and callers name the agent by it.
    pub agent_group_id: AgentId,
    pub template: Template,
    /// The published version, which new tasks run; null while there is none.
    pub version: Option<i32>,
    /// Grows with every write; the ETag.
    pub revision: i64,
    /// The fields below are not (all) published yet.
    pub has_unpublished_changes: bool,
    pub name: String,
    pub instructions: String,
    pub kind: AgentKind,
    pub tools: Vec<String>,
    pub phases: Vec<Phase>,
    pub model: ModelSettings,
    #[schema(value_type = Option<Object>)]
    pub output_schema: Option<Value>,
    pub max_iterations: u32,
    pub is_public: bool,
    #[schema(value_type = Object)]
    pub config: Map<String, Value>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    /// In the answer to a save: each `@Name` in instructions that does not mean exactly one agent of the roster. It is
    /// saved as it is written.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<FieldError>,
}

impl From<Agent> for AgentView {
    fn from(agent: Agent) -> Self {
        let draft = agent.draft;
        AgentView {
            id: agent.id,
            agent_group_id: agent.id,
            template: agent.template,
            version: agent.published_version,
            revision: agent.revision,
            has_unpublished_changes: agent.has_unpublished_changes,
            name: draft.name,
            instructions: draft.instructions,
            kind: draft.kind,
            tools: draft.tools,
            phases: draft.phases,
            model: draft.model,
            output_schema: draft.output_schema,
            max_iterations: draft.max_iterations,
            is_public: draft.is_public,
            config: draft.config,
            created_at: agent.created_at,
            updated_at: agent.updated_at,
            warnings: Vec::new(),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub struct AgentPage {
    pub items: Vec<AgentView>,
    /// Give it as `cursor` for the next page; null on the last one.
    pub next_cursor: Option<String>,
}

/// What `POST /api/agents` takes. Only `name` is required.
#[derive(ToSchema)]
#[schema(as = NewAgent, example = json!({
    "name": "Researcher",
    "instructions": "Collect the facts, mark what is uncertain.",
    "config": {"delegation_profile": {
        "description": "Collects and checks facts on one topic.",
        "example_input": "What does a heat pump cost?"
    }}
}))]
pub struct NewAgent {
    #[serde(flatten)]
    pub definition: AgentDefinition,
    /// Do not publish yet: the agent can neither be run nor delegated to.
    #[schema(default = false)]
    pub draft: bool,
}

/// List the workspace's agents
///
/// In order of creation.
#[utoipa::path(
    get,
    path = "/api/agents",
    tag = "agents",
    security(("bearer" = [])),
    params(Page),
    responses((status = 200, body = AgentPage))
)]
async fn list_agents(
    State(app): State<App>,
    caller: Caller,
    Query(page): Query<Page>,
) -> Result<Json<AgentPage>, Error> {
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let after = page.after(LIST)?.map(AgentId);
    let agents = store::agents::list(&mut conn, caller.workspace, after, page.wanted()).await?;
    let (agents, next_cursor) = page.cut(LIST, agents, |agent| agent.id.0);
    let items = agents.into_iter().map(AgentView::from).collect();
    Ok(Json(AgentPage { items, next_cursor }))
}

/// Create an agent
///
/// It is published at once, as version 1, unless `draft` is true.
#[utoipa::path(
    post,
    path = "/api/agents",
    tag = "agents",
    security(("bearer" = ["admin"])),
    request_body = NewAgent,
    responses((status = 201, body = AgentView, description = "Its address is in Location, its revision in ETag"))
)]
async fn create_agent(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Json(body): Json<Value>,
) -> Result<Response, Error> {
    let (definition, draft) = read_new(body)?;
    let agent = match draft {
        true => lifecycle::create_draft(&app.pool, caller.workspace, &definition).await?,
        false => lifecycle::create(&app.pool, caller.workspace, &definition).await?,
    };
    let address = format!("/api/agents/{}", agent.id);
    Ok((
        StatusCode::CREATED,
        [(header::LOCATION, address)],
        saved(&app, caller.workspace, agent).await,
    )
        .into_response())
}

/// See an agent
#[utoipa::path(
    get,
    path = "/api/agents/{id}",
    tag = "agents",
    security(("bearer" = [])),
    params(("id" = AgentId, Path, description = "Its `agent_group_id`")),
    responses((status = 200, body = AgentView, description = "Its revision is in ETag"))
)]
async fn get_agent(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<AgentId>,
) -> Result<Response, Error> {
    Ok(tagged(find(&app, caller.workspace, id).await?.into()))
}

/// Change an agent's draft
///
/// A JSON merge patch (RFC 7396) of the fields that `POST /api/agents` takes, except `draft`. What tasks run and others
/// delegate to changes when the agent is published.
#[utoipa::path(
    patch,
    path = "/api/agents/{id}",
    tag = "agents",
    security(("bearer" = ["admin"])),
    params(
        ("id" = AgentId, Path, description = "Its `agent_group_id`"),
        ("If-Match" = String, Header, description = "The ETag of the agent that the change was made from"),
    ),
    request_body(
        description = "Fields to change; null takes a field back to its default",
        content(
            (Value = "application/merge-patch+json", example = json!({"instructions": "Be brief.", "output_schema": null})),
            (Value = "application/json", example = json!({"instructions": "Be brief.", "output_schema": null})),
        )
    ),
    responses(
        (status = 200, body = AgentView, description = "Its new revision is in ETag"),
        (status = 412, body = Problem, content_type = "application/problem+json",
            description = "Somebody else has changed the agent since (`stale_revision`)"),
        (status = 428, body = Problem, content_type = "application/problem+json",
            description = "If-Match is missing (`precondition_required`)"),
    )
)]
async fn patch_agent(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<AgentId>,
    if_match: IfMatch,
    Json(mut body): Json<Value>,
) -> Result<Response, Error> {
    // Not there is not there, whatever else the request lacks.
    let agent = find(&app, caller.workspace, id).await?;
    let revision = if_match.required()?;
    let template = body
        .as_object_mut()
        .and_then(|body| body.shift_remove("template"));
    if template.is_some_and(|template| template != agent.template.as_str()) {
        return Err(Error::field("template", "can not be changed"));
    }
    let agent = lifecycle::patch(&app.pool, caller.workspace, id, revision, &body).await?;
    Ok(saved(&app, caller.workspace, agent).await)
}

/// Publish an agent's draft
///
/// Makes the draft the next version, which new tasks run. Running tasks keep theirs.
#[utoipa::path(
    post,
    path = "/api/agents/{id}/publish",
    tag = "agents",
    security(("bearer" = ["admin"])),
    params(
        ("id" = AgentId, Path, description = "Its `agent_group_id`"),
        ("If-Match" = Option<String>, Header, description = "Publish only if the agent still has this ETag"),
    ),
    responses(
        (status = 200, body = AgentView, description = "Its new revision is in ETag"),
        (status = 412, body = Problem, content_type = "application/problem+json",
            description = "Somebody else has changed the agent since (`stale_revision`)"),
    )
)]
async fn publish_agent(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<AgentId>,
    IfMatch(revision): IfMatch,
) -> Result<Response, Error> {
    let agent = lifecycle::publish(&app.pool, caller.workspace, id, revision).await?;
    Ok(saved(&app, caller.workspace, agent).await)
}

/// Delete an agent
///
/// Its running tasks go on. The workspace's default agent stays.
#[utoipa::path(
    delete,
    path = "/api/agents/{id}",
    tag = "agents",
    security(("bearer" = ["admin"])),
    params(
        ("id" = AgentId, Path, description = "Its `agent_group_id`"),
        ("If-Match" = Option<String>, Header, description = "Delete only if the agent still has this ETag"),
    ),
    responses(
        (status = 204, description = "Deleted"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "It is the default agent (`default_agent_is_kept`)"),
        (status = 412, body = Problem, content_type = "application/problem+json",
            description = "Somebody else has changed the agent since (`stale_revision`)"),
    )
)]
async fn delete_agent(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<AgentId>,
    IfMatch(revision): IfMatch,
) -> Result<StatusCode, Error> {
    lifecycle::delete(&app.pool, caller.workspace, id, revision).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn find(app: &App, workspace: WorkspaceId, id: AgentId) -> Result<Agent, Error> {
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    store::agents::get(&mut conn, workspace, id)
        .await?
        .ok_or(Error::NotFound)
}

fn tagged(agent: AgentView) -> Response {
    let etag = format!("\"{}\"", agent.revision);
    ([(header::ETAG, etag)], Json(agent)).into_response()
}

/// The agent that has just been saved, with what its author is to be warned of.
async fn saved(app: &App, workspace: WorkspaceId, agent: Agent) -> Response {
    let warnings = match warnings(app, workspace, &agent).await {
        Ok(warnings) => warnings,
        // The agent is saved all the same, and the answer must say so.
        Err(error) => {
            tracing::warn!(agent.id = %agent.id, error = %Causes(&error), "mentions could not be looked up");
            Vec::new()
        }
    };
    tagged(AgentView {
        warnings,
        ..agent.into()
    })
}

async fn warnings(
    app: &App,
    workspace: WorkspaceId,
    agent: &Agent,
) -> Result<Vec<FieldError>, store::Error> {
    // A roster takes some queries; most instructions name nobody.
    if agent.draft.unresolved_mentions(None).is_empty() {
        return Ok(Vec::new());
    }
    let mut conn = app.pool.acquire().await?;
    let assembled = app.roster.assemble_draft(&mut conn, workspace, agent);
    let roster = assembled.await?.roster;
    let unresolved = agent.draft.unresolved_mentions(roster.as_deref());
    let warnings = unresolved.into_iter();
    Ok(warnings
        .map(|one| FieldError::new(one.path, one.reason))
        .collect())
}

/// The definition in a body of `POST /api/agents`, and whether it is to stay a draft. All faults are reported at once.
fn read_new(mut body: Value) -> Result<(AgentDefinition, bool), Error> {
    let mut take = |key| body.as_object_mut().and_then(|body| body.shift_remove(key));
    let mut faults = Vec::new();
    let draft = match take("draft") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(draft)) => draft,
        Some(_) => {
            faults.push(FieldError::new("draft", "expected a boolean"));
            false
        }
    };
    match take("template") {
        None | Some(Value::Null) => {}
        Some(template) if template == Template::Custom.as_str() => {}
        Some(template) if template == Template::Default.as_str() => faults.push(FieldError::new(
            "template",
            "must be custom: a workspace is made with its one default agent",
        )),
        Some(_) => faults.push(FieldError::new("template", "expected custom")),
    }
    match AgentDefinition::parse(&body) {
        Ok(definition) if faults.is_empty() => Ok((definition, draft)),
        Ok(_) => Err(Error::InvalidBody(faults)),
        Err(error) => Err(Error::InvalidBody(
            faults.into_iter().chain(field_errors(error)).collect(),
        )),
    }
}

impl From<EditError> for Error {
    fn from(error: EditError) -> Self {
        match error {
            EditError::NotFound => Error::NotFound,
            EditError::Stale { current } => Error::precondition_failed(
                "stale_revision",
                format!(
                    "The agent has been changed since and is at revision {current}. Read it again, apply your change to \
                     what it is now, and send that with its ETag in If-Match."
                ),
            ),
            EditError::Invalid(error) => error.into(),
            EditError::DefaultIsKept => Error::conflict(
                "default_agent_is_kept",
                "This is the workspace's default agent, which can not be deleted. Change it instead.",
            ),
            EditError::Store(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn all_faults_of_a_new_agent_are_reported_at_once() {
        let faults = |body| match read_new(body) {
            Ok((definition, draft)) => vec![format!("{} {draft}", definition.name)],
            Err(Error::InvalidBody(faults)) => faults.into_iter().map(|fault| fault.path).collect(),
            Err(other) => vec![other.to_string()],
        };
        assert_eq!(faults(json!({"name": "A"})), ["A false"]);
        assert_eq!(
            faults(json!({"name": "A", "draft": true, "template": "custom"})),
            ["A true"]
        );
        assert_eq!(
            faults(json!({"name": "A", "draft": null, "template": null})),
            ["A false"]
        );
        assert_eq!(
            faults(json!({"draft": "yes", "template": "default", "x": 1})),
            ["draft", "template", "name", "x"]
        );
        assert_eq!(faults(json!([])), [""]);
    }
}
