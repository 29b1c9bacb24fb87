//! Signals, callbacks, skips and dead events over HTTP.

use crate::{
    engine::{Engine, until},
    forced::{Family, agent_with},
    http::{self, Api, request},
    stub_llm::Reply,
};
use axum::http::{Method, header};
use reconvene::{
    api::auth::Role,
    domain::{
        ids::{GroupId, TaskId},
        task::TaskStatus::*,
    },
    lifecycle::submit::Recipient,
};
use serde_json::{Value, json};

struct Served {
    engine: Engine,
    api: Api,
    token: String,
}

/// A running engine with the API on the same database.
async fn served() -> Served {
    let engine = Engine::scripted().await;
    let api = Api::start_with(engine.pool.clone(), http::config());
    let token = api.token(engine.workspace(), Role::Member);
    Served { engine, api, token }
}

/// A task that waits for the signal "paid", and repeats what it is told.
async fn waiting(engine: &Engine) -> TaskId {
    engine.llm().script(|r| match r.turn() {
        0 => Reply::call("wait_for_signal", json!({"key": "paid"})),
        _ => Reply::text(r.last_user()),
    });
    let agent = agent_with(engine, "Waiter", |a| {
        a.tools = vec!["wait_for_signal".into()]
    })
    .await;
    let message = engine.message(Recipient::Agent(agent), "go");
    let task = engine.submit(message).await.task;
    engine.until(task, WaitingForInput).await;
    task
}

fn signal(dedup_key: &str, payload: Value) -> Value {
    json!({"source_type": "external", "correlation_key": "paid", "dedup_key": dedup_key, "payload": payload})
}

// W-13
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_is_taken_with_the_workspaces_token() {
    let Served { engine, api, token } = served().await;
    let task = waiting(&engine).await;
    let shown = api.get(&format!("/api/tasks/{task}"), &token).await.ok();
    let wait = &shown["waits"][0];
    assert_eq!(
        (&wait["source_type"], &wait["status"], &wait["about"]),
        (&json!("external"), &json!("open"), &json!({"key": "paid"}))
    );
    let post = async |body: Value| api.post("/api/signals", &token, body).await;
    let answer = post(signal("d", json!({"digits": 1234567890}))).await;
    assert_eq!(answer.status.as_u16(), 202);
    assert_eq!(answer.json(), json!({"status": "matched", "new": true}));
    let again = post(signal("d", json!("again"))).await.ok();
    assert_eq!(again, json!({"status": "matched", "new": false}));
    let early = post(signal("e", Value::Null)).await.ok();
    assert_eq!(early, json!({"status": "pending", "new": true}));
    let (_, output) = engine.end(task).await;
    assert!(output.ends_with("> {\"digits\":1234567890}"), "{output}");
    let feed = api
        .get(&format!("/api/tasks/{task}/feed"), &token)
        .await
        .ok();
    let cards: Vec<&Value> = feed["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|item| item["kind"] == "wait")
        .collect();
    assert_eq!(cards.len(), 1);
    assert_eq!(
        (&cards[0]["key"], &cards[0]["status"]),
        (&json!("paid"), &json!("completed"))
    );
}

// W-13, R-4, P-2
#[tokio::test]
async fn a_signal_that_can_not_be_taken_is_refused_by_field() {
    let api = Api::start().await;
    let workspace = http::workspace(&api.pool).await;
    let token = api.token(workspace, Role::Member);
    let with = |field: &str, value: Value| {
        let mut body = signal("d", json!({}));
        body[field] = value;
        body
    };
    for (body, path) in [
        (with("source_type", json!("child_task")), "source_type"),
        (with("correlation_key", json!(" ")), "correlation_key"),
        (
            with("correlation_key", json!("ü".repeat(201))),
            "correlation_key",
        ),
        (with("dedup_key", json!("a\u{0}")), "dedup_key"),
        (with("payload", json!({"a": ["\u{0}"]})), "payload.a[0]"),
        (with("workspace", json!("x")), "workspace"),
        (
            json!({"source_type": "external", "dedup_key": "d"}),
            "correlation_key",
        ),
    ] {
        let problem = api
            .post("/api/signals", &token, body)
            .await
            .problem(422, "invalid_body");
        assert_eq!(problem["errors"][0]["path"], path, "{problem}");
    }
    let rows: i64 = sqlx::query_scalar("select count(*) from signals")
        .fetch_one(&api.pool)
        .await
        .unwrap();
    assert_eq!(rows, 0);
    let longest = with("correlation_key", json!("ü".repeat(200)));
    api.post("/api/signals", &token, longest).await.ok();
}

// W-13: no account, only the token; any JSON, or nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_callback_url_wakes_its_task_without_an_account() {
    for (body, told) in [
        (Some(json!(["a", 1])), "> [\"a\",1]"),
        (Some(json!("text")), "> \"text\""),
        (None, "> nothing"),
    ] {
        let Served { engine, api, .. } = served().await;
        let task = waiting(&engine).await;
        let text: String = sqlx::query_scalar(
            "select text from task_items where task_id = $1 and kind = 'tool_result'",
        )
        .bind(task.0)
        .fetch_one(&engine.pool)
        .await
        .unwrap();
        let result: Value = serde_json::from_str(&text).unwrap();
        let url = result["callback_url"].as_str().unwrap();
        let post = async |url: &str, body: Option<Value>| {
            api.send(request(Method::POST, url, "", body)).await
        };
        post("/api/callbacks/guess", None)
            .await
            .problem(404, "not_found");
        post(&url[..url.len() - 1], None)
            .await
            .problem(404, "not_found");
        post(url, Some(json!({"a": "\u{0}"})))
            .await
            .problem(422, "invalid_body");
        let mut undeclared = request(Method::POST, url, "", Some(json!(1)));
        undeclared.headers_mut().remove(header::CONTENT_TYPE);
        api.send(undeclared)
            .await
            .problem(415, "unsupported_media_type");
        let answer = post(url, body).await;
        assert_eq!(answer.status.as_u16(), 202, "{}", answer.text());
        assert_eq!(answer.json(), json!({"status": "matched", "new": true}));
        let (_, output) = engine.end(task).await;
        assert!(output.ends_with(told), "{output}");
        let again = post(url, None).await.ok();
        assert_eq!(again, json!({"status": "matched", "new": false}));
        // Only its hash is stored with the wait.
        let stored: Vec<u8> = sqlx::query_scalar("select callback_hash from awaits")
            .fetch_one(&engine.pool)
            .await
            .unwrap();
        assert_eq!(stored.len(), 32);
        engine.close().await;
    }
}

// W-15, T-35
#[tokio::test(flavor = "multi_thread")]
async fn waits_are_skipped_over_http_and_the_card_says_so() {
    let Served { engine, api, token } = served().await;
    let family = Family::new(&engine, &["a", "b"], None).await;
    let path = format!("/api/tasks/{}/awaits/skip", family.parent);
    let skip = async |body: Value| api.post(&path, &token, body).await.ok();
    assert_eq!(
        skip(json!({"group_id": GroupId::new()})).await,
        json!({"skipped": 0})
    );
    let all = api.send(request(Method::POST, &path, &token, None)).await;
    assert_eq!(all.ok(), json!({"skipped": 2}));
    assert_eq!(skip(json!({})).await, json!({"skipped": 0}));
    engine.end(family.parent).await;
    let feed = api
        .get(&format!("/api/tasks/{}/feed", family.parent), &token)
        .await
        .ok();
    let items = feed["items"].as_array().unwrap();
    let card = items
        .iter()
        .find(|item| item["kind"] == "delegation")
        .unwrap();
    assert_eq!(card["status"], "skipped");
    assert_eq!(card["counts"]["running"], 2);
    api.post(&path, &token, json!({"group": 1}))
        .await
        .problem(422, "invalid_body");
    family.open_all();
    engine.close().await;
}

// W-19, P-6, P-23: dead events of all workspaces are shown to operators, and tried again at their wish.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_event_is_shown_to_operators_and_retried() {
    let engine = Engine::scripted_with(|c| c.orchestrator.max_attempts = 2).await;
    engine.llm().script(|r| Reply::text(r.last_user()));
    let (bad, good) = (engine.post("bad").await, engine.post("good").await);
    let trap = format!(
        "create function trap() returns trigger language plpgsql as $$ begin raise exception 'trapped'; end $$;
         create trigger trap before insert on steps for each row when (new.task_id = '{bad}') execute function trap()"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(trap))
        .execute(&engine.pool)
        .await
        .unwrap();
    let engine = engine.running();
    // It holds up no other task.
    assert_eq!(engine.end(good).await.1, "good");
    let dead = "select count(*) from orchestrator_events where dead_at is not null";
    until("the event is dead", async || engine.count(dead).await == 1).await;
    let api = Api::start_with(engine.pool.clone(), http::config());
    let elsewhere = http::workspace(&engine.pool).await;
    let operator = api.token(elsewhere, Role::Operator);
    let list = api.get("/api/admin/dead-events", &operator).await.ok();
    let event = &list["items"][0];
    assert_eq!(list["next_cursor"], Value::Null);
    assert_eq!(event["task_id"], json!(bad));
    assert_eq!(event["workspace_id"], json!(engine.workspace()));
    assert_eq!(
        (&event["kind"], &event["attempts"]),
        (&json!("new_message"), &json!(2))
    );
    assert!(
        event["error"].as_str().unwrap().contains("trapped"),
        "{event}"
    );
    let admin = api.token(engine.workspace(), Role::Admin);
    api.get("/api/admin/dead-events", &admin)
        .await
        .problem(403, "forbidden");

    sqlx::raw_sql("drop trigger trap on steps")
        .execute(&engine.pool)
        .await
        .unwrap();
    let retry = format!("/api/admin/dead-events/{}/retry", event["id"]);
    let retried = api
        .send(request(Method::POST, &retry, &operator, None))
        .await
        .ok();
    assert_eq!(retried, json!({"id": event["id"], "retried": true}));
    assert_eq!(engine.end(bad).await.1, "bad");
    let again = api
        .send(request(Method::POST, &retry, &operator, None))
        .await;
    again.problem(404, "not_found");
    engine.close().await;
}

// W-19: pages of dead events.
#[tokio::test]
async fn dead_events_are_paged() {
    let api = Api::start().await;
    let workspace = http::workspace(&api.pool).await;
    let agent = http::agent(&api.pool, workspace, "default", "Lead").await;
    let task = http::task(&api.pool, workspace, agent, "A task").await;
    sqlx::query(
        "insert into orchestrator_events (workspace_id, task_id, kind, attempts, dead_at)
         select $1, $2, 'new_message', 10, now() from generate_series(1, 5)",
    )
    .bind(workspace)
    .bind(task)
    .execute(&api.pool)
    .await
    .unwrap();
    let token = api.token(workspace, Role::Operator);
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let path = format!("/api/admin/dead-events?limit=2&cursor={cursor}");
        let page = api.get(&path, &token).await.ok();
        seen.extend(
            page["items"]
                .as_array()
                .unwrap()
                .iter()
                .map(|e| e["id"].as_i64().unwrap()),
        );
        match page["next_cursor"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => break,
        }
    }
    assert_eq!(seen.len(), 5);
    assert!(seen.is_sorted(), "{seen:?}");
    let bad = api.get("/api/admin/dead-events?cursor=x", &token).await;
    bad.problem(422, "invalid_query");
}
