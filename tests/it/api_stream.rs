//! T-22, H-42: a stream picks up where the client left off, without a hole and without a repetition.

use crate::http::{Api, agent, item, request, task, user_message, workspace};
use axum::body::{Body, BodyDataStream};
use axum::http::{HeaderName, Method, Request, StatusCode, header};
use futures::StreamExt;
use reconvene::api::auth::{Role, issue};
use reconvene::domain::ids::{TaskId, WorkspaceId};
use serde_json::{Value, json};
use std::time::Duration;
use tower::ServiceExt;

/// No wait of these tests is longer.
const LIMIT: Duration = Duration::from_secs(20);

#[derive(Debug, Default, Clone, PartialEq)]
struct Event {
    id: Option<i64>,
    name: String,
    data: Value,
}

struct Client {
    body: BodyDataStream,
    text: String,
}

impl Client {
    async fn open(api: &Api, task: TaskId, token: &str, last_event_id: Option<&str>) -> Self {
        Self::open_as(
            api,
            task,
            (header::AUTHORIZATION, &format!("Bearer {token}")),
            last_event_id,
        )
        .await
    }

    async fn open_as(
        api: &Api,
        task: TaskId,
        (name, value): (HeaderName, &str),
        last_event_id: Option<&str>,
    ) -> Self {
        let mut request = Request::get(format!("/api/tasks/{task}/stream")).header(name, value);
        if let Some(id) = last_event_id {
            request = request.header("last-event-id", id);
        }
        let response = api
            .router
            .clone()
            .oneshot(request.body(Body::empty()).unwrap())
            .await
            .unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(
            response.headers()[header::CONTENT_TYPE],
            "text/event-stream"
        );
        Self {
            body: response.into_body().into_data_stream(),
            text: String::new(),
        }
    }

    /// The next block between blank lines; `None` at the end of the stream.
    async fn block(&mut self) -> Option<String> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let block = block.to_owned();
                self.text = rest.to_owned();
                return Some(block);
            }
            let chunk = tokio::time::timeout(LIMIT, self.body.next())
                .await
                .expect("nothing came");
            self.text
                .push_str(std::str::from_utf8(&chunk?.unwrap()).unwrap());
        }
    }

    async fn event(&mut self) -> Option<Event> {
        loop {
            let block = self.block().await?;
            let mut event = Event::default();
            for line in block.lines() {
                match line.split_once(": ") {
                    Some(("id", id)) => event.id = id.parse().ok(),
                    Some(("event", name)) => event.name = name.to_owned(),
                    Some(("data", data)) => event.data = serde_json::from_str(data).unwrap(),
                    _ => {}
                }
            }
            if !event.name.is_empty() {
                return Some(event);
            }
        }
    }

    async fn ids(&mut self, count: usize) -> Vec<i64> {
        let mut ids = Vec::new();
        while ids.len() < count {
            ids.push(
                self.event()
                    .await
                    .expect("the stream goes on")
                    .id
                    .expect("a durable event"),
            );
        }
        ids
    }
}

struct Scene {
    api: Api,
    workspace: WorkspaceId,
    task: TaskId,
    token: String,
}

async fn scene() -> Scene {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let agent = agent(&api.pool, workspace, "default", "Lead").await;
    let task = task(&api.pool, workspace, agent, "A task").await;
    let token = api.token(workspace, Role::Member);
    Scene {
        api,
        workspace,
        task,
        token,
    }
}

impl Scene {
    async fn write(&self, count: i64) {
        for n in 0..count {
            user_message(&self.api.pool, self.workspace, self.task, &n.to_string()).await;
        }
    }

    async fn follow(&self, last_event_id: Option<&str>) -> Client {
        Client::open(&self.api, self.task, &self.token, last_event_id).await
    }
}

// H-42
#[tokio::test]
async fn a_client_that_reconnects_gets_each_later_item_once() {
    let scene = scene().await;
    scene.write(5).await;
    let mut client = scene.follow(None).await;
    let first = client.event().await.unwrap();
    assert_eq!((first.id, first.name.as_str()), (Some(1), "user_message"));
    assert_eq!(
        (&first.data["seq"], &first.data["kind"], &first.data["text"]),
        (&json!(1), &json!("user_message"), &json!("0"))
    );
    assert_eq!(client.ids(2).await, [2, 3]);
    drop(client);
    scene.write(20).await;
    // Another API instance on the same database.
    let other = Scene {
        api: Api::start_with(scene.api.pool.clone(), crate::http::config()),
        workspace: scene.workspace,
        task: scene.task,
        token: scene.token.clone(),
    };
    let mut client = other.follow(Some("3")).await;
    assert_eq!(client.ids(22).await, (4..=25).collect::<Vec<_>>());
    scene.write(1).await;
    other.api.app.hub.feeds_changed([scene.task]);
    assert_eq!(client.ids(1).await, [26]);
    let after = format!("/api/tasks/{}/stream?after=24", scene.task);
    let request = Request::get(after)
        .header(header::AUTHORIZATION, format!("Bearer {}", scene.token))
        .body(Body::empty())
        .unwrap();
    let body = scene
        .api
        .router
        .clone()
        .oneshot(request)
        .await
        .unwrap()
        .into_body()
        .into_data_stream();
    assert_eq!(
        Client {
            body,
            text: String::new()
        }
        .ids(2)
        .await,
        [25, 26]
    );
}

// H-42: more than one page of replay, with writes all the while.
#[tokio::test]
async fn nothing_falls_between_replay_and_live() {
    let scene = scene().await;
    scene.write(250).await;
    for _ in 0..5 {
        let mut client = scene.follow(Some("0")).await;
        let before = client.ids(1).await[0];
        assert_eq!(before, 1);
        let total: i64 = sqlx::query_scalar("select last_seq from tasks where id = $1")
            .bind(scene.task)
            .fetch_one(&scene.api.pool)
            .await
            .unwrap();
        let writes = async {
            for _ in 0..20 {
                scene.write(1).await;
                scene.api.app.hub.feeds_changed([scene.task]);
            }
        };
        let expected: Vec<i64> = (2..=total + 20).collect();
        let ((), ids) = tokio::join!(writes, client.ids(expected.len()));
        assert_eq!(ids, expected);
    }
}

// H-42: what is not a place in this feed is answered with a reset and the whole feed.
#[tokio::test]
async fn an_unknown_place_resets() {
    let scene = scene().await;
    scene.write(2).await;
    for id in ["3", "99", "rubbish", "-1", "1.5", "18446744073709551616"] {
        let mut client = scene.follow(Some(id)).await;
        let reset = client.event().await.unwrap();
        assert_eq!((reset.name.as_str(), reset.id), ("reset", None), "{id}");
        assert!(reset.data["reason"].is_string());
        assert_eq!(client.ids(2).await, [1, 2], "{id}");
    }
}

// T-22: deltas have no id, are live only, and stop with the message they belong to.
#[tokio::test]
async fn model_text_streams_as_deltas() {
    let scene = scene().await;
    scene.write(1).await;
    let mut client = scene.follow(None).await;
    assert_eq!(client.ids(1).await, [1]);
    let hub = &scene.api.app.hub;
    hub.delta(scene.workspace, scene.task, 1, "Hel");
    hub.delta(scene.workspace, scene.task, 1, "lo\nyou");
    for text in ["Hel", "lo\nyou"] {
        let event = client.event().await.unwrap();
        assert_eq!(
            event,
            Event {
                id: None,
                name: "delta".into(),
                data: json!({"turn": 1, "text": text})
            }
        );
    }
    hub.answer_begins_anew(scene.workspace, scene.task, 1);
    assert_eq!(
        client.event().await.unwrap().data,
        json!({"turn": 1, "text": "", "reset": true})
    );
    item(
        &scene.api.pool,
        scene.workspace,
        scene.task,
        "assistant_message",
        Some(1),
        Some("Hello\nyou"),
        json!({"calls": []}),
    )
    .await;
    hub.feeds_changed([scene.task]);
    let message = client.event().await.unwrap();
    assert_eq!(
        (message.id, message.data["text"].as_str()),
        (Some(2), Some("Hello\nyou"))
    );
    hub.delta(scene.workspace, scene.task, 1, "late");
    hub.delta(scene.workspace, scene.task, 2, "next");
    assert_eq!(
        client.event().await.unwrap().data,
        json!({"turn": 2, "text": "next"})
    );
}

// T-22: the table is looked at even when no hint comes, as from a worker in another process.
#[tokio::test]
async fn a_lost_hint_costs_a_poll_at_most() {
    let scene = scene().await;
    let mut client = scene.follow(None).await;
    let ids = tokio::spawn(async move { client.ids(1).await });
    scene.write(1).await;
    assert_eq!(
        tokio::time::timeout(Duration::from_secs(5), ids)
            .await
            .unwrap()
            .unwrap(),
        [1]
    );
}

#[tokio::test]
async fn a_stream_ends_with_the_server_the_task_and_the_token() {
    let scene = scene().await;
    scene.write(1).await;
    let mut client = scene.follow(None).await;
    assert_eq!(client.ids(1).await, [1]);
    sqlx::query("update tasks set deleted_at = now() where id = $1")
        .bind(scene.task)
        .execute(&scene.api.pool)
        .await
        .unwrap();
    assert_eq!(client.event().await, None, "the task is gone");
    scene
        .api
        .get(&format!("/api/tasks/{}/stream", scene.task), &scene.token)
        .await
        .problem(404, "not_found");

    sqlx::query("update tasks set deleted_at = null where id = $1")
        .bind(scene.task)
        .execute(&scene.api.pool)
        .await
        .unwrap();
    let mut config = crate::http::config();
    config.auth.leeway_seconds = 0;
    let api = Api::start_with(scene.api.pool.clone(), config);
    let token = issue(
        &api.app.config.auth,
        scene.workspace,
        "ada",
        Role::Member,
        Duration::from_secs(2),
    )
    .unwrap();
    let mut client = Client::open(&api, scene.task, &token, None).await;
    assert_eq!(client.ids(1).await, [1]);
    assert_eq!(client.event().await, None, "the token has expired");

    let mut client = scene.follow(None).await;
    assert_eq!(client.ids(1).await, [1]);
    scene.api.app.shutdown.cancel();
    assert_eq!(client.event().await, None, "the server stops");
    scene
        .api
        .get(&format!("/api/tasks/{}/stream", scene.task), &scene.token)
        .await
        .problem(503, "shutting_down");
}

// a stream at rest holds no connection.
#[tokio::test]
async fn many_streams_share_few_connections() {
    let scene = scene().await;
    let pool = crate::support::database_with(|options| options.max_connections(1)).await;
    let workspace = workspace(&pool).await;
    let agent = agent(&pool, workspace, "default", "Lead").await;
    let task = task(&pool, workspace, agent, "A task").await;
    let api = Api::start_with(pool, crate::http::config());
    let token = api.token(workspace, Role::Member);
    let mut clients = Vec::new();
    for _ in 0..20 {
        clients.push(Client::open(&api, task, &token, None).await);
    }
    user_message(&api.pool, workspace, task, "hi").await;
    api.app.hub.feeds_changed([task]);
    for client in &mut clients {
        assert_eq!(client.ids(1).await, [1]);
    }
    drop(scene);
}

// P-4, T-22: a stream ends with the session that has opened it, however much there is to tell.
#[tokio::test]
async fn a_stream_ends_when_its_session_is_logged_out() {
    let scene = scene().await;
    let admin = scene.api.token(scene.workspace, Role::Admin);
    let member = json!({"username": "ada", "password": "correct horse battery", "role": "member"});
    scene.api.post("/api/members", &admin, member).await.ok();
    let slug: String = sqlx::query_scalar("select slug from workspaces where id = $1")
        .bind(scene.workspace)
        .fetch_one(&scene.api.pool)
        .await
        .unwrap();
    let body = json!({"workspace": slug, "username": "ada", "password": "correct horse battery"});
    let entered = scene.api.post("/api/auth/login", "", body).await;
    let csrf = entered.ok()["csrf_token"].as_str().unwrap().to_owned();
    let cookie = entered.headers[header::SET_COOKIE].to_str().unwrap();
    let cookie = cookie.split(';').next().unwrap().to_owned();
    scene.write(1).await;
    let mut client = Client::open_as(&scene.api, scene.task, (header::COOKIE, &cookie), None).await;
    assert_eq!(client.ids(1).await, [1]);
    let mut leave = request(Method::POST, "/api/auth/logout", "", None);
    let headers = leave.headers_mut();
    headers.insert(header::COOKIE, cookie.parse().unwrap());
    headers.insert("x-csrf-token", csrf.parse().unwrap());
    assert_eq!(scene.api.send(leave).await.status, 204);
    let busy = async {
        loop {
            scene.write(1).await;
            scene.api.app.hub.feeds_changed([scene.task]);
        }
    };
    let ended = async { while client.event().await.is_some() {} };
    let limited = tokio::time::timeout(LIMIT, async {
        tokio::select! {
            () = busy => unreachable!("it goes on"),
            () = ended => {}
        }
    });
    limited.await.expect("the stream ends");
}
