//! P-5, P-6, H-39: every route of the document, with no token, with another workspace's ids, and with too low a role.
//!
//! A new route is met here without anybody adding it; one that takes a body other than those below must be given an
//! example in the document.

use crate::http::{Answer, Api, agent, group, request, step, task, user_message, workspace};
use axum::http::{HeaderValue, Method, header};
use reconvene::api::auth::Role;
use reconvene::domain::ids::{
    AgentId, ApiKeyId, BackfillId, BatchRunId, ConfiguredToolId, CredentialId, MemberId,
    ModelProviderId, TaskId, WorkspaceId,
};
use serde_json::{Value, json};
use sqlx::PgPool;

/// Routes that need no token.
const PUBLIC: [&str; 4] = [
    "/healthz",
    "/readyz",
    "/api/callbacks/{token}",
    "/api/auth/login",
];
/// Routes for operators, who look after all workspaces: there is no foreign thing to them (P-6).
const OF_ALL_WORKSPACES: [&str; 5] = [
    "/api/admin/dead-events",
    "/api/admin/dead-events/{id}/retry",
    "/api/admin/runtime-flags",
    "/api/admin/runtime-flags/{key}",
    "/api/admin/workspaces",
];

pub struct Route {
    pub method: Method,
    pub path: String,
    pub operation: Value,
}

pub fn routes() -> Vec<Route> {
    let document = serde_json::to_value(reconvene::api::document()).unwrap();
    let mut routes = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if let Ok(method) = method.to_uppercase().parse::<Method>()
                && ["get", "post", "put", "patch", "delete"]
                    .contains(&method.as_str().to_lowercase().as_str())
            {
                routes.push(Route {
                    method,
                    path: path.clone(),
                    operation: operation.clone(),
                });
            }
        }
    }
    routes
}

impl Route {
    /// The least role; `None` for a public route.
    fn role(&self) -> Option<Role> {
        let securities = self.operation["security"].as_array()?;
        let named = securities
            .iter()
            .find_map(|security| security["bearer"][0].as_str());
        Some(named.map_or(Role::Member, |role| role.parse().expect("a role")))
    }

    pub fn parameters(&self, place: &str) -> Vec<String> {
        let parameters = self.operation["parameters"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        parameters
            .iter()
            .filter(|p| p["in"] == place)
            .map(|p| p["name"].as_str().unwrap().to_owned())
            .collect()
    }

    pub fn body(&self) -> Option<Value> {
        let schema = &self.operation["requestBody"]["content"]["application/json"]["schema"];
        if schema.is_null() {
            return None;
        }
        let document = serde_json::to_value(reconvene::api::document()).unwrap();
        Some(example(&document, schema))
    }
}

/// A body that passes for the schema: examples where it has them, required fields only.
fn example(document: &Value, schema: &Value) -> Value {
    if let Some(example) = schema
        .get("example")
        .or_else(|| schema.get("examples").and_then(|all| all.get(0)))
    {
        return example.clone();
    }
    if let Some(reference) = schema["$ref"].as_str() {
        return example(
            document,
            document.pointer(reference.trim_start_matches('#')).unwrap(),
        );
    }
    for choice in ["oneOf", "anyOf"] {
        if let Some(schema) = schema[choice]
            .as_array()
            .and_then(|all| all.iter().find(|schema| schema["type"] != "null"))
        {
            return example(document, schema);
        }
    }
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let fields = required.iter().map(|name| {
        let name = name.as_str().unwrap();
        (
            name.to_owned(),
            example(document, &schema["properties"][name]),
        )
    });
    match schema["type"].as_str() {
        Some("string") => json!("text"),
        Some("integer" | "number") => json!(1),
        Some("boolean") => json!(false),
        Some("array") => json!([]),
        _ => Value::Object(fields.collect()),
    }
}

/// Things of one workspace, one of each kind that a route can name.
pub struct Things {
    task: TaskId,
    agent: AgentId,
    batch_run: BatchRunId,
    credential: CredentialId,
    configured_tool: ConfiguredToolId,
    dead_event: i64,
    model_provider: ModelProviderId,
    member: MemberId,
    api_key: ApiKeyId,
    backfill: BackfillId,
}

pub async fn things(pool: &PgPool, workspace: WorkspaceId) -> Things {
    let agent = agent(pool, workspace, "default", "Lead").await;
    let task = task(pool, workspace, agent, "A task").await;
    user_message(pool, workspace, task, "hello").await;
    let call = step(
        pool,
        workspace,
        task,
        1,
        1,
        Some(("c", "delegate_tasks", "{}", "ok")),
    )
    .await;
    group(pool, workspace, task, call, "child_task", 1).await;
    sqlx::query(
        "insert into decision_logs (workspace_id, task_id, turn, prompt_hash, seen_seq, model, answer, latency_ms)
        values ($1, $2, 1, '', 1, 'm', '{}', 1)",
    )
    .bind(workspace)
    .bind(task)
    .execute(pool)
    .await
    .unwrap();
    let batch_run = BatchRunId::new();
    sqlx::query("insert into batch_runs (workspace_id, id, task_id, step_id, source_key, target_agent_id) values ($1, $2, $3, $4, 'k', $5)")
        .bind(workspace)
        .bind(batch_run)
        .bind(task)
        .bind(call)
        .bind(agent)
        .execute(pool)
        .await
        .unwrap();
    let credential = CredentialId::new();
    sqlx::query("insert into credentials (workspace_id, id, name, key_id, sealed) values ($1, $2, 'c', 'k1', '')")
        .bind(workspace)
        .bind(credential)
        .execute(pool)
        .await
        .unwrap();
    let configured_tool = ConfiguredToolId::new();
    sqlx::query(
        "insert into configured_tools (workspace_id, id, name, base_tool, description, bindings)
        values ($1, $2, 't', 'ask_user', '', '{}')",
    )
    .bind(workspace)
    .bind(configured_tool)
    .execute(pool)
    .await
    .unwrap();
    let model_provider = ModelProviderId::new();
    sqlx::query("insert into model_providers (workspace_id, id, name, kind, is_default) values ($1, $2, 'm', 'openai', false)")
        .bind(workspace)
        .bind(model_provider)
        .execute(pool)
        .await
        .unwrap();
    let dead_event = sqlx::query_scalar(
        "insert into orchestrator_events (workspace_id, task_id, kind, dead_at) values ($1, $2, 'new_message', now())
        returning id",
    )
    .bind(workspace)
    .bind(task)
    .fetch_one(pool)
    .await
    .unwrap();
    let (member, api_key) = (MemberId::new(), ApiKeyId::new());
    sqlx::query("insert into members (workspace_id, id, username, role, password_hash) values ($1, $2, 'eve', 'member', 'x')")
        .bind(workspace)
        .bind(member)
        .execute(pool)
        .await
        .unwrap();
    sqlx::query(
        "insert into api_keys (workspace_id, id, name, role, prefix, key_hash, created_by)
        values ($1, $2, 'k', 'member', 'rk_', sha256($2::text::bytea), 'ada')",
    )
    .bind(workspace)
    .bind(api_key)
    .execute(pool)
    .await
    .unwrap();
    let backfill = BackfillId::new();
    sqlx::query("insert into profile_backfills (workspace_id, id, force) values ($1, $2, false)")
        .bind(workspace)
        .bind(backfill)
        .execute(pool)
        .await
        .unwrap();
    Things {
        task,
        agent,
        batch_run,
        credential,
        configured_tool,
        model_provider,
        dead_event,
        member,
        api_key,
        backfill,
    }
}

impl Things {
    fn missing() -> Self {
        Self {
            task: TaskId::new(),
            agent: AgentId::new(),
            batch_run: BatchRunId::new(),
            credential: CredentialId::new(),
            configured_tool: ConfiguredToolId::new(),
            model_provider: ModelProviderId::new(),
            dead_event: i64::MAX,
            member: MemberId::new(),
            api_key: ApiKeyId::new(),
            backfill: BackfillId::new(),
        }
    }

    /// The id that a parameter or field of this name in this route stands for.
    fn id_for(&self, path: &str, name: &str) -> Option<String> {
        match name {
            "id" if path.starts_with("/api/tasks/") => Some(self.task.to_string()),
            "id" if path.starts_with("/api/admin/decision-logs/") => {
                Some(format!("{}.1", self.task))
            }
            "id" if path.starts_with("/api/admin/dead-events/") => {
                Some(self.dead_event.to_string())
            }
            "token" | "key" => Some("guess".to_owned()),
            "id" if path.starts_with("/api/agents/delegation-profiles/") => {
                Some(self.backfill.to_string())
            }
            "id" if path.starts_with("/api/agents/") => Some(self.agent.to_string()),
            "id" if path.starts_with("/api/members/") => Some(self.member.to_string()),
            "id" if path.starts_with("/api/api-keys/") => Some(self.api_key.to_string()),
            "id" if path.starts_with("/api/credentials/") => Some(self.credential.to_string()),
            "id" if path.starts_with("/api/configured-tools/") => {
                Some(self.configured_tool.to_string())
            }
            "id" if path.starts_with("/api/model-providers/") => {
                Some(self.model_provider.to_string())
            }
            "parentTaskId" | "task_id" | "taskId" => Some(self.task.to_string()),
            "agentGroupId" | "agent_group_id" => Some(self.agent.to_string()),
            "batchRunId" | "batch_run_id" => Some(self.batch_run.to_string()),
            _ => None,
        }
    }

    /// The path of the route with these things in it.
    pub fn path(&self, route: &Route) -> String {
        let mut path = route.path.clone();
        for name in route.parameters("path") {
            let id = self
                .id_for(&route.path, &name)
                .unwrap_or_else(|| panic!("{}: what does {name} stand for?", route.path));
            path = path.replace(&format!("{{{name}}}"), &id);
        }
        path
    }
}

/// All rows of the workspace as text.
pub async fn state(pool: &PgPool, workspace: WorkspaceId) -> Vec<String> {
    let tables: Vec<String> = sqlx::query_scalar(
        "select table_name::text from information_schema.columns where table_schema = 'public' and column_name = 'workspace_id' order by 1",
    )
    .fetch_all(pool)
    .await
    .unwrap();
    assert!(tables.len() > 5);
    let mut rows = Vec::new();
    for table in tables {
        let query = format!(
            "select '{table} ' || t::text from {table} t where workspace_id = $1 order by 1"
        );
        rows.extend(
            sqlx::query_scalar::<_, String>(sqlx::AssertSqlSafe(query))
                .bind(workspace)
                .fetch_all(pool)
                .await
                .unwrap(),
        );
    }
    rows
}

async fn call(api: &Api, route: &Route, path: &str, token: &str, body: Option<Value>) -> Answer {
    api.send(request(route.method.clone(), path, token, body))
        .await
}

// P-3, P-6: deny by default.
#[tokio::test]
async fn every_route_wants_a_token() {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let things = things(&api.pool, workspace).await;
    let routes = routes();
    assert!(routes.len() >= 8, "the document lists the routes");
    let mut body = None;
    for route in &routes {
        let answer = call(&api, route, &things.path(route), "", route.body()).await;
        match route.role() {
            None => assert!(
                PUBLIC.contains(&route.path.as_str()),
                "{} {} is public",
                route.method,
                route.path
            ),
            Some(_) => {
                answer.problem(401, "unauthenticated");
                let first = body.get_or_insert_with(|| answer.text());
                assert_eq!(*first, answer.text(), "{} {}", route.method, route.path);
                let garbage = call(&api, route, &things.path(route), "garbage", route.body()).await;
                assert_eq!(
                    (garbage.status.as_u16(), garbage.text()),
                    (401, first.clone())
                );
            }
        }
    }
}

// P-5, H-39: what belongs to another workspace answers exactly like what does not exist, and stays as it was.
#[tokio::test]
async fn another_workspaces_things_do_not_exist() {
    let api = Api::start().await;
    let (ours, theirs) = (workspace(&api.pool).await, workspace(&api.pool).await);
    let foreign = things(&api.pool, ours).await;
    let mine = things(&api.pool, theirs).await;
    let missing = Things::missing();
    let token = api.token(theirs, Role::Operator);
    let before = state(&api.pool, ours).await;
    for route in routes().iter().filter(|route| route.role().is_some()) {
        let name = format!("{} {}", route.method, route.path);
        if OF_ALL_WORKSPACES.contains(&route.path.as_str()) {
            assert_eq!(route.role(), Some(Role::Operator), "{name}");
            continue;
        }
        if !route.parameters("path").is_empty() {
            let there = call(&api, route, &foreign.path(route), &token, route.body()).await;
            let nowhere = call(&api, route, &missing.path(route), &token, route.body()).await;
            nowhere.problem(404, "not_found");
            assert_eq!(
                (there.status, there.text()),
                (nowhere.status, nowhere.text()),
                "{name}"
            );
        }
        for parameter in route.parameters("query") {
            let Some(id) = foreign.id_for(&route.path, &parameter) else {
                continue;
            };
            if route.parameters("path").is_empty() {
                let there = call(
                    &api,
                    route,
                    &format!("{}?{parameter}={id}", route.path),
                    &token,
                    route.body(),
                )
                .await;
                assert_eq!(there.ok()["items"], json!([]), "{name} {parameter}");
            }
        }
        if route.parameters("path").is_empty() && route.method == Method::GET {
            let list = call(&api, route, &route.path, &token, None).await.text();
            for id in [
                foreign.task.to_string(),
                foreign.agent.to_string(),
                foreign.member.to_string(),
                foreign.api_key.to_string(),
                foreign.credential.to_string(),
                foreign.configured_tool.to_string(),
                foreign.model_provider.to_string(),
                ours.to_string(),
            ] {
                assert!(!list.contains(&id), "{name} shows {id}");
            }
        }
    }
    // Ids in a body: each field that names a thing, of each route.
    let mut named = Vec::new();
    for (route, fields) in crate::bodies::routes_with_fields() {
        for field in fields.iter().filter(|field| field.is_id()) {
            let field = field.path.as_str();
            let (Some(id), Some(nothing)) = (
                foreign.id_for(&route.path, field),
                missing.id_for(&route.path, field),
            ) else {
                continue;
            };
            let post = async |id: String| {
                let mut body = route.body().unwrap();
                body[field] = json!(id);
                let path = mine.path(&route);
                let mut request = request(route.method.clone(), &path, &token, Some(body));
                let headers = request.headers_mut();
                headers.insert(header::IF_MATCH, HeaderValue::from_static("1"));
                api.send(request).await
            };
            let there = post(id).await;
            there.problem(404, "not_found");
            assert_eq!(there.text(), post(nothing).await.text());
            named.push(format!("{} {field}", route.path));
        }
    }
    assert!(named.len() >= 3, "{named:?}");
    let ids = json!({"ids": [foreign.task], "include_subtasks": true});
    let deleted = api.post("/api/tasks/bulk-delete", &token, ids).await;
    assert_eq!(deleted.ok(), json!({"deleted": 0}));
    assert_eq!(state(&api.pool, ours).await, before, "nothing has changed");
}

// P-6
#[tokio::test]
async fn a_role_that_is_too_low_is_refused() {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let things = things(&api.pool, workspace).await;
    let before = state(&api.pool, workspace).await;
    for route in routes() {
        let lower: &[Role] = match route.role() {
            None | Some(Role::Member) => &[],
            Some(Role::Admin) => &[Role::Member],
            Some(Role::Operator) => &[Role::Member, Role::Admin],
        };
        for role in lower {
            let answer = call(
                &api,
                &route,
                &things.path(&route),
                &api.token(workspace, *role),
                route.body(),
            )
            .await;
            answer.problem(403, "forbidden");
        }
    }
    assert_eq!(state(&api.pool, workspace).await, before);
}

// P-6: the document and the handler agree: who has the declared role gets past the door.
#[tokio::test]
async fn the_declared_role_is_enough() {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let missing = Things::missing();
    for route in routes() {
        let Some(role) = route.role() else { continue };
        let path = missing.path(&route);
        let answer = call(
            &api,
            &route,
            &path,
            &api.token(workspace, role),
            route.body(),
        )
        .await;
        assert!(
            ![401, 403].contains(&answer.status.as_u16()),
            "{} {path}: {}",
            route.method,
            answer.text()
        );
        assert!(
            answer.status.as_u16() < 500,
            "{} {path}: {}",
            route.method,
            answer.text()
        );
    }
}
