//! `/api/tools`: what an agent can be given (L-1).

use super::App;
use super::auth::Caller;
use super::extract::Json;
use crate::tools;
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
    pub name: &'static str,
    pub display_name: &'static str,
    /// What models are told.
    pub description: String,
    /// JSON Schema of the arguments.
    #[schema(value_type = Object)]
    pub schema: Value,
    /// Given to agents that list no tools.
    pub default_enabled: bool,
    /// `parallel` or `exclusive`.
    #[schema(example = "exclusive")]
    pub concurrency: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ToolPage {
    pub items: Vec<ToolView>,
    pub next_cursor: Option<String>,
}

/// List the tools
///
/// All of them, in one page.
#[utoipa::path(
    get,
    path = "/api/tools",
    tag = "agents",
    security(("bearer" = [])),
    responses((status = 200, body = ToolPage))
)]
async fn list_tools(State(app): State<App>, _caller: Caller) -> Json<ToolPage> {
    let items = tools::catalogue().into_iter().map(|tool| ToolView {
        name: tool.name,
        display_name: tool.display_name,
        description: app.prompts.tool(tool.name).unwrap_or_default().to_owned(),
        schema: tool.schema,
        default_enabled: tool.default_enabled,
        concurrency: tool.concurrency,
    });
    Json(ToolPage {
        items: items.collect(),
        next_cursor: None,
    })
}
