//! `/api/tools`: what an agent can be given (L-1).

use super::App;
use super::auth::Caller;
use super::error::Error;
use super::extract::Json;
use crate::domain::ids::{AgentId, ConfiguredToolId};
use crate::lifecycle::configured_tools::TOOLS_MAX;
use crate::store;
use crate::tools::{self, Instance, Tool};
use axum::extract::State;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list_tools))
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ToolView {
    /// As agents list it in `tools`.
    #[schema(example = "ask_user")]
    pub name: String,
    pub display_name: String,
    /// What models are told.
    pub description: String,
    /// JSON Schema of the arguments that models give.
    #[schema(value_type = Object)]
    pub schema: Value,
    /// Given to agents that list no tools.
    pub default_enabled: bool,
    /// Whether its calls may overlap with others of their turn: `parallel`, `exclusive`, or `by_arguments` where that depends
    /// on the call.
    #[schema(example = "exclusive")]
    pub concurrency: &'static str,
    pub tags: &'static [&'static str],
    /// Of a configured tool: what it is built on.
    pub base_tool: Option<&'static str>,
    /// Of a configured tool: its id under `/api/configured-tools`.
    pub configured_tool_id: Option<ConfiguredToolId>,
    /// Of a configured tool: the one agent that may use it, if it is for one.
    pub agent_group_id: Option<AgentId>,
    /// Arguments that only a configured tool can bind, with their schemas.
    #[schema(value_type = Object)]
    pub author_arguments: Value,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ToolPage {
    pub items: Vec<ToolView>,
    pub next_cursor: Option<String>,
}

/// List the tools
///
/// Base tools, then those that the workspace has configured: all of them, in one page.
#[utoipa::path(
    get,
    path = "/api/tools",
    tag = "tools",
    security(("bearer" = [])),
    responses((status = 200, body = ToolPage))
)]
async fn list_tools(State(app): State<App>, caller: Caller) -> Result<Json<ToolPage>, Error> {
    let catalogue = tools::catalogue();
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let configured =
        store::configured_tools::list(&mut conn, caller.workspace, None, TOOLS_MAX).await?;
    drop(conn);
    let words = |tool: &Tool| app.prompts.tool(tool.name).unwrap_or_default().to_owned();
    let base = catalogue.iter().map(|tool| ToolView {
        name: tool.name.to_owned(),
        display_name: tool.display_name.to_owned(),
        description: words(tool),
        schema: tool.schema.clone(),
        default_enabled: tool.default_enabled,
        concurrency: tool.concurrency.as_str(),
        tags: tool.tags,
        base_tool: None,
        configured_tool_id: None,
        agent_group_id: None,
        author_arguments: tool.author_arguments.clone(),
    });
    // One whose base a later version had is of no use here.
    let configured = configured.into_iter().filter_map(|stored| {
        let base = catalogue
            .iter()
            .find(|tool| tool.name == stored.tool.base_tool)?;
        let agent_group_id = stored.tool.agent;
        let schema = stored.tool.schema(&base.schema);
        let name = stored.tool.name.clone();
        // Whom it reaches depends on the moment: that is left to the prompt.
        let instance = Instance {
            tool: stored.tool,
            allowed: vec![],
            reachable: vec![],
        };
        Some(ToolView {
            display_name: name.clone(),
            name,
            description: instance.description(&words(base)),
            schema,
            default_enabled: false,
            concurrency: base.concurrency.as_str(),
            tags: base.tags,
            base_tool: Some(base.name),
            configured_tool_id: Some(stored.id),
            agent_group_id,
            author_arguments: Value::Object(Default::default()),
        })
    });
    Ok(Json(ToolPage {
        items: base.chain(configured).collect(),
        next_cursor: None,
    }))
}
