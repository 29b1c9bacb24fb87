//! P-1, P-2, P-8, H-32, R-4: every refusal has the same form and says what to do; the document says what is there.

use crate::http::{Api, agent, config, request, task, workspace};
use crate::support;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use reconvene::api::auth::Role;
use serde_json::{Value, json};

// P-2
#[tokio::test]
async fn unknown_routes_and_methods_are_problems() {
    let api = Api::start().await;
    for path in [
        "/nothing",
        "/api/nothing",
        "/api/tasks",
        "/api/tasks/x/y/z",
        "/",
    ] {
        api.get(path, "").await.problem(404, "route_not_found");
    }
    let answer = api
        .send(request(Method::DELETE, "/api/chat/message", "", None))
        .await;
    answer.problem(405, "method_not_allowed");
    assert_eq!(answer.headers[header::ALLOW], "POST");
    assert!(answer.headers.contains_key("x-request-id"));
    assert_eq!(answer.headers["x-content-type-options"], "nosniff");
}

fn raw(token: &str, content_type: Option<&str>, body: impl Into<Body>) -> Request<Body> {
    let mut request =
        Request::post("/api/chat/message").header(header::AUTHORIZATION, format!("Bearer {token}"));
    if let Some(content_type) = content_type {
        request = request.header(header::CONTENT_TYPE, content_type);
    }
    request.body(body.into()).unwrap()
}

// P-2, T-3, P-8
#[tokio::test]
async fn bad_bodies_are_problems() {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let token = api.token(workspace, Role::Member);
    let json_body = |body: &'static [u8]| raw(&token, Some("application/json"), body);

    api.send(raw(&token, None, "{}"))
        .await
        .problem(415, "unsupported_media_type");
    api.send(raw(&token, Some("text/plain"), "{}"))
        .await
        .problem(415, "unsupported_media_type");
    api.send(raw(&token, Some("application/json; charset=utf-8"), "{}"))
        .await
        .problem(422, "invalid_body");
    let problem = api
        .send(json_body(b"{\"message\": \"a\",\n  oops}"))
        .await
        .problem(400, "malformed_json");
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .contains("line 2, column 3"),
        "{problem}"
    );
    api.send(json_body(b""))
        .await
        .problem(400, "malformed_json");
    api.send(json_body(b"{\"message\": \"\xff\xfe\"}"))
        .await
        .problem(422, "invalid_utf8");
    api.send(json_body(b"{\"message\": \"\\ud800\"}"))
        .await
        .problem(422, "invalid_utf8");
    let path = |problem: Value| problem["errors"][0]["path"].as_str().unwrap().to_owned();
    assert_eq!(
        path(
            api.send(json_body(b"{}"))
                .await
                .problem(422, "invalid_body")
        ),
        "message"
    );
    for (body, expected) in [
        (json!({"message": 5}), "message"),
        (json!({"message": "a", "colour": "red"}), "colour"),
        (json!({"message": "a", "task_id": "7"}), "task_id"),
        (json!({"message": "a", "metadata": []}), "metadata"),
        (
            json!({"message": "a", "metadata": {"a": [0, "\0"]}}),
            "metadata.a[1]",
        ),
        (json!({"message": "a", "title": "\0"}), "title"),
        (json!({"message": "a", "title": "  "}), "title"),
        (json!({"message": "a", "skip_wait": "yes"}), "skip_wait"),
        (json!({"message": ""}), "message"),
        (json!({"message": " \n\t "}), "message"),
        (json!({"message": "a\0b"}), "message"),
        (json!({"message": "é".repeat(100_001)}), "message"),
    ] {
        let answer = api.post("/api/chat/message", &token, body.clone()).await;
        assert_eq!(
            path(answer.problem(422, "invalid_body")),
            expected,
            "{}",
            answer.text()
        );
    }
    let huge = json!({"message": "a".repeat(1_100_000)});
    let problem = api
        .post("/api/chat/message", &token, huge.clone())
        .await
        .problem(413, "body_too_large");
    assert!(
        problem["detail"].as_str().unwrap().contains("1048576"),
        "{problem}"
    );
    let chunks = huge
        .to_string()
        .into_bytes()
        .chunks(65_536)
        .map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec()))
        .collect::<Vec<_>>();
    let streamed = Body::from_stream(futures::stream::iter(chunks));
    api.send(raw(&token, Some("application/json"), streamed))
        .await
        .problem(413, "body_too_large");

    for key in ["", "é", "a\tb", &"k".repeat(256)] {
        let mut request = request(
            Method::POST,
            "/api/chat/message",
            &token,
            Some(json!({"message": "a"})),
        );
        request
            .headers_mut()
            .insert("idempotency-key", key.as_bytes().try_into().unwrap());
        assert_eq!(
            path(api.send(request).await.problem(422, "invalid_header")),
            "Idempotency-Key"
        );
    }
    let tasks: i64 = sqlx::query_scalar("select count(*) from tasks")
        .fetch_one(&api.pool)
        .await
        .unwrap();
    assert_eq!(tasks, 0, "nothing is stored");
}

// T-9 and its like: what only a new task can be given is refused, not ignored.
#[tokio::test]
async fn an_append_takes_only_what_it_can_do() {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let agent = agent(&api.pool, workspace, "default", "Lead").await;
    let task = task(&api.pool, workspace, agent, "A task").await;
    let token = api.token(workspace, Role::Member);
    for (field, value) in [
        ("disable_delegation", json!(true)),
        ("title", json!("b")),
        ("metadata", json!({"a": 1})),
        ("agent_group_id", json!(agent)),
    ] {
        let mut body = json!({"message": "a", "task_id": task});
        body[field] = value;
        let problem = api
            .post("/api/chat/message", &token, body)
            .await
            .problem(422, "invalid_body");
        assert_eq!(problem["errors"][0]["path"], field);
    }
}

//
#[tokio::test]
async fn without_a_database_the_api_says_try_again() {
    let pool = support::database_with(|options| {
        options
            .max_connections(1)
            .acquire_timeout(std::time::Duration::from_millis(100))
    })
    .await;
    let workspace = workspace(&pool).await;
    let api = Api::start_with(pool.clone(), config());
    let token = api.token(workspace, Role::Member);
    let held = pool.acquire().await.unwrap();
    let answer = api.get("/api/tasks/query", &token).await;
    answer.problem(503, "database_unavailable");
    assert_eq!(answer.headers[header::RETRY_AFTER], "2");
    let ready = api.get("/readyz", "").await;
    assert_eq!(
        (ready.status, ready.json()["database"].clone()),
        (StatusCode::SERVICE_UNAVAILABLE, json!("unavailable"))
    );
    api.get("/healthz", "").await.ok();
    drop(held);
    api.get("/api/tasks/query", &token).await.ok();
}

// P-2
#[tokio::test]
async fn an_internal_error_tells_nothing() {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let token = api.token(workspace, Role::Member);
    sqlx::raw_sql("alter table tasks rename column title to name")
        .execute(&api.pool)
        .await
        .unwrap();
    let answer = api.get("/api/tasks/query", &token).await;
    answer.problem(500, "internal_error");
    for word in ["column", "title", "sqlx", "select", "src/"] {
        assert!(
            !answer.text().contains(&format!("{word} ")),
            "{}",
            answer.text()
        );
    }
}

#[tokio::test]
async fn ready_once_the_migrations_are_applied() {
    let api = Api::start().await;
    sqlx::raw_sql("drop table if exists _sqlx_migrations")
        .execute(&api.pool)
        .await
        .unwrap();
    let ready = api.get("/readyz", "").await;
    assert_eq!(ready.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        ready.json(),
        json!({"ready": false, "database": "ok", "migrations": "pending", "listening": false, "roles": ["api"]})
    );
    sqlx::raw_sql("create table _sqlx_migrations (version bigint, success boolean); insert into _sqlx_migrations values (999999, true)")
        .execute(&api.pool)
        .await
        .unwrap();
    let ready = api.get("/readyz", "").await;
    assert_eq!(
        ready.ok(),
        json!({"ready": true, "database": "ok", "migrations": "ahead", "listening": false, "roles": ["api"]})
    );
    api.app.shutdown.cancel();
    assert_eq!(
        api.get("/readyz", "").await.status,
        StatusCode::SERVICE_UNAVAILABLE
    );
}

// P-8
#[tokio::test]
async fn a_request_that_takes_too_long_is_given_up() {
    let mut config = config();
    config.server.request_timeout_seconds = 1;
    let api = Api::start_with(support::database().await, config);
    let workspace = workspace(&api.pool).await;
    let token = api.token(workspace, Role::Member);
    let never = Body::from_stream(futures::stream::pending::<Result<Vec<u8>, std::io::Error>>());
    let answer = api.send(raw(&token, Some("application/json"), never)).await;
    answer.problem(503, "request_timeout");
    assert!(answer.headers.contains_key(header::RETRY_AFTER));
}

// P-8
#[tokio::test]
async fn only_listed_origins_may_call_from_a_browser() {
    let mut config = config();
    config.server.cors_origins = vec!["https://console.example".into()];
    let api = Api::start_with(support::database().await, config);
    let preflight = |origin: &str| {
        Request::builder()
            .method(Method::OPTIONS)
            .uri("/api/chat/message")
            .header(header::ORIGIN, origin)
            .header(header::ACCESS_CONTROL_REQUEST_METHOD, "POST")
            .header(
                header::ACCESS_CONTROL_REQUEST_HEADERS,
                "authorization,idempotency-key",
            )
            .body(Body::empty())
            .unwrap()
    };
    let allowed = api.send(preflight("https://console.example")).await;
    assert_eq!(
        allowed.headers[header::ACCESS_CONTROL_ALLOW_ORIGIN],
        "https://console.example"
    );
    let refused = api.send(preflight("https://evil.example")).await;
    assert!(
        !refused
            .headers
            .contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN)
    );
}

// P-1
#[tokio::test]
async fn the_document_is_served_with_its_page() {
    let api = Api::start().await;
    let document = api.get("/api/openapi.json", "").await.ok();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    assert_eq!(
        document,
        serde_json::to_value(reconvene::api::document()).unwrap()
    );
    let post = &document["paths"]["/api/chat/message"]["post"];
    for status in [
        "200", "201", "400", "401", "404", "409", "413", "415", "422", "503",
    ] {
        assert!(post["responses"][status].is_object(), "{status}");
    }
    assert!(
        document["components"]["schemas"]["ChatMessage"]["properties"]["message"]["example"]
            .is_string()
    );
    assert_eq!(
        document["components"]["securitySchemes"]["bearer"]["bearerFormat"],
        "JWT"
    );
    assert_every_reference_resolves(&document, &document);
    let redirect = api.get("/api/docs", "").await;
    assert!(redirect.status.is_redirection(), "{}", redirect.status);
    let page = api.get("/api/docs/", "").await;
    assert_eq!(page.status, StatusCode::OK);
    assert!(page.text().contains("swagger-ui"));
    assert!(
        !page.text().contains("https://"),
        "nothing is loaded from elsewhere"
    );
}

fn assert_every_reference_resolves(document: &Value, part: &Value) {
    match part {
        Value::Object(fields) => {
            if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
                let found = document.pointer(reference.trim_start_matches('#'));
                assert!(found.is_some(), "{reference} leads nowhere");
            }
            fields
                .values()
                .for_each(|value| assert_every_reference_resolves(document, value));
        }
        Value::Array(values) => values
            .iter()
            .for_each(|value| assert_every_reference_resolves(document, value)),
        _ => {}
    }
}
