//! The API in this process, on a database of its own, with rows put there by hand where a test needs a certain state.

use crate::support;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Method, Request, StatusCode, header};
use reconvene::api::auth::{Auth, Role, issue};
use reconvene::api::outage::Outage;
use reconvene::api::rate::Limits;
use reconvene::api::{App, Parts, router};
use reconvene::bus::Bus;
use reconvene::config::Config;
use reconvene::domain::ids::{AgentId, GroupId, ItemId, ProcessId, StepId, TaskId, WorkspaceId};
use reconvene::lifecycle::submit::Submitter;
use reconvene::llm::Models;
use reconvene::profiles::Profiles;
use reconvene::prompts::Prompts;
use reconvene::roster::Assembler;
use reconvene::runtime::Hub;
use reconvene::vault::Vault;
use serde_json::{Value, json};
use sqlx::PgPool;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

pub const SECRET: &str = "a secret for tests, of more than 32 bytes";

pub const KEY: &str = "k1:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

pub struct Api {
    pub app: App,
    pub router: axum::Router,
    pub pool: PgPool,
}

pub fn config() -> Config {
    let mut config = Config::from_defaults();
    config.auth.jwt_secret = Some(SECRET.to_owned().into());
    config.credentials.keys = vec![KEY.to_owned().into()];
    config
}

impl Api {
    pub async fn start() -> Self {
        Self::start_with(support::database().await, config())
    }

    pub fn start_with(pool: PgPool, config: Config) -> Self {
        let hub = Arc::new(Hub::new(ProcessId::new()));
        let roles = vec!["api".to_owned()];
        let bus = Arc::new(Bus::new(hub.clone(), pool.clone(), roles.clone()));
        let prompts = Arc::new(Prompts::load(None).expect("the compiled-in prompts"));
        let roster = Arc::new(Assembler::with_base_tools(config.spawn_tasks.max_depth));
        let models = Models::from_config(&config).expect("a usable llm section");
        let app = App::new(Parts {
            outage: Arc::new(Outage::new(bus.clone(), &pool)),
            bus,
            submitter: Submitter::start(pool.clone(), hub.clone()),
            auth: Arc::new(Auth::new(&config.auth).expect("a usable auth section")),
            limits: Arc::new(Limits::new(&config.limits)),
            models: models.clone(),
            profiles: Arc::new(Profiles::new(
                &config,
                pool.clone(),
                models,
                prompts.clone(),
                roster.clone(),
            )),
            roster,
            prompts,
            vault: Arc::new(Vault::from_config(&config.credentials)),
            pool: pool.clone(),
            config: Arc::new(config),
            hub,
            roles: roles.into(),
            shutdown: CancellationToken::new(),
        });
        Self {
            router: router(app.clone()),
            app,
            pool,
        }
    }

    pub fn token(&self, workspace: WorkspaceId, role: Role) -> String {
        issue(
            &self.app.config.auth,
            workspace,
            "ada",
            role,
            Duration::from_secs(600),
        )
        .unwrap()
    }

    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        Answer {
            status: parts.status,
            headers: parts.headers,
            body,
        }
    }

    pub async fn get(&self, path: &str, token: &str) -> Answer {
        self.send(request(Method::GET, path, token, None)).await
    }

    pub async fn post(&self, path: &str, token: &str, body: Value) -> Answer {
        self.send(request(Method::POST, path, token, Some(body)))
            .await
    }
}

pub fn request(method: Method, path: &str, token: &str, body: Option<Value>) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    if !token.is_empty() {
        request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    match body {
        None => request.body(Body::empty()),
        Some(body) => {
            let text = body.to_string();
            request
                .header(header::CONTENT_TYPE, "application/json")
                .header(header::CONTENT_LENGTH, text.len())
                .body(Body::from(text))
        }
    }
    .unwrap()
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("not JSON ({error}): {:?}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    #[track_caller]
    pub fn ok(&self) -> Value {
        assert!(self.status.is_success(), "{} {}", self.status, self.text());
        self.json()
    }

    /// Asserts that this is a well-formed problem body with this status and code, and returns it.
    #[track_caller]
    pub fn problem(&self, status: u16, code: &str) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text());
        assert_eq!(
            self.headers[header::CONTENT_TYPE],
            "application/problem+json"
        );
        let problem = self.json();
        assert_eq!(problem["code"], code, "{problem}");
        assert_eq!(problem["status"], json!(status), "{problem}");
        let detail = problem["detail"].as_str().expect("a detail");
        assert!(
            detail.ends_with('.') && !detail.contains("select "),
            "{problem}"
        );
        problem
    }
}

// Rows put there by hand.

pub async fn workspace(pool: &PgPool) -> WorkspaceId {
    let id = WorkspaceId::new();
    sqlx::query("insert into workspaces (id, slug, name) values ($1, $2, 'A workspace')")
        .bind(id)
        .bind(format!("w{}", id.0.simple()))
        .execute(pool)
        .await
        .unwrap();
    id
}

/// A published agent in version 1.
pub async fn agent(pool: &PgPool, workspace: WorkspaceId, template: &str, name: &str) -> AgentId {
    let id = AgentId::new();
    let definition = json!({"name": name, "instructions": "Help."});
    let mut tx = pool.begin().await.unwrap();
    sqlx::query(
        "insert into agents (workspace_id, id, template, name, draft) values ($1, $2, $3, $4, $5)",
    )
    .bind(workspace)
    .bind(id)
    .bind(template)
    .bind(name)
    .bind(&definition)
    .execute(&mut *tx)
    .await
    .unwrap();
    sqlx::query("insert into agent_versions (workspace_id, agent_id, version, definition) values ($1, $2, 1, $3)")
        .bind(workspace)
        .bind(id)
        .bind(&definition)
        .execute(&mut *tx)
        .await
        .unwrap();
    sqlx::query("update agents set published_version = 1 where workspace_id = $1 and id = $2")
        .bind(workspace)
        .bind(id)
        .execute(&mut *tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    id
}

/// A child's place under its parent.
#[derive(Clone, Copy)]
pub struct Under {
    pub parent: TaskId,
    pub root: TaskId,
    pub step: StepId,
    pub ordinal: i32,
    pub depth: i16,
}

pub async fn task(pool: &PgPool, workspace: WorkspaceId, agent: AgentId, title: &str) -> TaskId {
    task_under(pool, workspace, agent, title, None, "running").await
}

pub async fn task_under(
    pool: &PgPool,
    workspace: WorkspaceId,
    agent: AgentId,
    title: &str,
    under: Option<Under>,
    status: &str,
) -> TaskId {
    let id = TaskId::new();
    sqlx::query(
        "insert into tasks (workspace_id, id, agent_workspace_id, agent_id, agent_version, root_task_id, parent_task_id,
            parent_step_id, ordinal, spawn_depth, source, title, status, decides_left, finished_at, error)
        values ($1, $2, $1, $3, 1, $4, $5, $6, $7, $8, $9, $10, $11, 50,
            case when $11 in ('completed', 'failed', 'stopped') then now() end,
            case when $11 = 'failed' then '{\"code\": \"internal\", \"message\": \"It broke.\"}'::jsonb end)",
    )
    .bind(workspace)
    .bind(id)
    .bind(agent)
    .bind(under.map_or(id, |under| under.root))
    .bind(under.map(|under| under.parent))
    .bind(under.map(|under| under.step))
    .bind(under.map(|under| under.ordinal))
    .bind(under.map_or(0, |under| under.depth))
    .bind(if under.is_some() { "spawned" } else { "chat" })
    .bind(title)
    .bind(status)
    .execute(pool)
    .await
    .unwrap();
    id
}

/// Appends an item to a task's feed and returns its seq.
pub async fn item(
    pool: &PgPool,
    workspace: WorkspaceId,
    task: TaskId,
    kind: &str,
    turn: Option<i32>,
    text: Option<&str>,
    data: Value,
) -> i64 {
    let mut tx = pool.begin().await.unwrap();
    let seq: i64 = sqlx::query_scalar(
        "update tasks set last_seq = last_seq + 1 where workspace_id = $1 and id = $2 returning last_seq",
    )
    .bind(workspace)
    .bind(task)
    .fetch_one(&mut *tx)
    .await
    .unwrap();
    sqlx::query(
        "insert into task_items (workspace_id, task_id, seq, id, kind, turn, seen_seq, text, data)
        values ($1, $2, $3, $4, $5, $6, case when $5 = 'assistant_message' then $3 - 1 end, $7, $8)",
    )
    .bind(workspace)
    .bind(task)
    .bind(seq)
    .bind(ItemId::new())
    .bind(kind)
    .bind(turn)
    .bind(text)
    .bind(data)
    .execute(&mut *tx)
    .await
    .unwrap();
    tx.commit().await.unwrap();
    seq
}

pub async fn user_message(pool: &PgPool, workspace: WorkspaceId, task: TaskId, text: &str) -> i64 {
    item(
        pool,
        workspace,
        task,
        "user_message",
        None,
        Some(text),
        Value::Null,
    )
    .await
}

/// A finished call of a tool, or a decide step when `ordinal` is 0.
pub async fn step(
    pool: &PgPool,
    workspace: WorkspaceId,
    task: TaskId,
    turn: i32,
    ordinal: i32,
    call: Option<(&str, &str, &str, &str)>,
) -> StepId {
    let id = StepId::new();
    sqlx::query(
        "insert into steps (workspace_id, task_id, turn, ordinal, id, kind, status, stop_generation, started_at, finished_at,
            call_id, tool, arguments, result, is_error, model, input_tokens, output_tokens, cached_tokens)
        values ($1, $2, $3, $4, $5, case when $4 = 0 then 'decide_next_action' else 'tool_call' end, 'completed', 0,
            now() - interval '1500 milliseconds', now(), $6, $7, $8, $9, case when $4 = 0 then null else false end,
            case when $4 = 0 then 'offline' end, case when $4 = 0 then 100 end, case when $4 = 0 then 20 end,
            case when $4 = 0 then 5 end)",
    )
    .bind(workspace)
    .bind(task)
    .bind(turn)
    .bind(ordinal)
    .bind(id)
    .bind(call.map(|call| call.0))
    .bind(call.map(|call| call.1))
    .bind(call.map(|call| call.2))
    .bind(call.map(|call| call.3))
    .execute(pool)
    .await
    .unwrap();
    id
}

/// An open group of waits for children.
pub async fn group(
    pool: &PgPool,
    workspace: WorkspaceId,
    task: TaskId,
    step: StepId,
    source: &str,
    total: i32,
) -> GroupId {
    let id = GroupId::new();
    sqlx::query(
        "insert into await_groups (workspace_id, id, task_id, step_id, source_type, strategy, total, pending)
        values ($1, $2, $3, $4, $5, 'all_required', $6, $6)",
    )
    .bind(workspace)
    .bind(id)
    .bind(task)
    .bind(step)
    .bind(source)
    .bind(total)
    .execute(pool)
    .await
    .unwrap();
    id
}
