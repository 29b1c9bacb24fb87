//! How processes of the real program begin, how they end before they have begun, and where they tell of their health.

use crate::{
    forced::until_waiting,
    program::{Home, Program, Scene, until},
    stub_llm::{Gate, Reply},
};
use reconvene::postgres::Embedded;
use reqwest::StatusCode;
use rustix::process::Signal;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, PgPool};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

fn settings(home: &Home) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("DATA_DIR".to_owned(), home.0.to_str().unwrap().to_owned()),
        ("SERVER_PORT".to_owned(), "0".to_owned()),
    ])
}

/// Asks it to end, and asserts that it does so soon and as it should.
async fn end(mut program: Program, expected: i32) -> String {
    let asked = Instant::now();
    program.signal(Signal::TERM);
    let (code, text) = program.ended().await;
    assert_eq!(code, expected, "{text}");
    assert!(asked.elapsed() < Duration::from_secs(10), "{text}");
    assert!(!text.contains("Reconvene listens on"), "{text}");
    text
}

// O-1, O-4
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_while_the_private_database_comes_up_leaves_nothing_running() {
    for command in ["serve", "migrate"] {
        let expected = if command == "serve" { 0 } else { 1 };
        let home = Home::new();
        let env = settings(&home);
        // While initdb works.
        let program = Program::run(&[command], &env);
        until("a cluster is being made", async || {
            home.holds("unfinished-cluster-")
        })
        .await;
        end(program, expected).await;
        until("nothing is left", async || home.processes() == 0).await;
        assert!(!home.0.join("cluster").exists(), "it was cut short");
        // As soon as there is a server, which may not answer yet.
        let program = Program::run(&[command], &env);
        until("the server's process is there", async || {
            home.server().is_some()
        })
        .await;
        end(program, expected).await;
        assert_eq!(home.processes(), 0);
    }
}

// O-4, O-6
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_while_migrations_wait_ends_the_start_and_leaves_the_database_to_others() {
    let home = Home::new();
    let database = Embedded::open(&home.0, None).await.unwrap();
    let pool = PgPool::connect_with(database.options()).await.unwrap();
    let mut holder = PgConnection::connect_with(&database.options())
        .await
        .unwrap();
    // Another migrator that has not got far: who wants the same table waits for it.
    sqlx::raw_sql("begin; create table _sqlx_migrations (version bigint)")
        .execute(&mut holder)
        .await
        .unwrap();
    for (command, expected) in [("serve", 0), ("dev", 1), ("migrate", 1)] {
        let program = Program::run(&[command], &settings(&home));
        until_waiting(&pool, 1).await;
        end(program, expected).await;
        // The server has not noticed yet that nobody waits for this session's answer.
        sqlx::query(
            "select pg_terminate_backend(pid) from pg_stat_activity where wait_event_type = 'Lock'",
        )
        .execute(&pool)
        .await
        .unwrap();
        until_waiting(&pool, 0).await;
    }
    assert!(home.server().is_some(), "this process uses it");
    holder.close().await.unwrap();
    pool.close().await;
    database.close().await.unwrap();
    assert_eq!(home.processes(), 0);
}

// O-6: what is as it should be is not worth a line.
#[tokio::test(flavor = "multi_thread")]
async fn migrating_again_says_nothing_of_tables_that_exist() {
    let home = Home::new();
    let mut env = settings(&home);
    env.insert("LOG_LEVEL".to_owned(), "debug".to_owned());
    let database = Embedded::open(&home.0, None).await.unwrap();
    for _ in 0..2 {
        let (code, text) = Program::run(&["migrate"], &env).ended().await;
        assert_eq!(code, 0, "{text}");
        assert!(text.contains("the schema is up to date"), "{text}");
        assert!(!text.contains("already exists"), "{text}");
    }
    database.close().await.unwrap();
}

/// Where a process says that its health is asked.
async fn health_of(program: &Program) -> String {
    let line = program.says("Health is asked at ").await;
    let (_, address) = line.split_once("asked at ").unwrap();
    address.strip_suffix("/healthz").unwrap().to_owned()
}

async fn ask(base: &str, path: &str) -> (StatusCode, Value) {
    let answer = reqwest::get(format!("{base}{path}")).await.unwrap();
    (answer.status(), answer.json().await.unwrap())
}

// O-5, O-4
#[tokio::test(flavor = "multi_thread")]
async fn a_process_of_any_role_tells_of_its_health_on_a_port_of_its_own() {
    let mut scene = Scene::new().await;
    let gate = Gate::new();
    let held = gate.clone();
    scene
        .llm
        .script(move |_| Reply::text("done").held_by(&held));
    let api = scene.serve("api").await;
    scene.set("SERVER_HEALTH_PORT", "0");
    let orchestrator = scene.serve("orchestrator").await;
    let mut worker = scene.serve("worker").await;
    for (program, role) in [(&orchestrator, "orchestrator"), (&worker, "worker")] {
        let base = health_of(program).await;
        let (status, health) = ask(&base, "/healthz").await;
        assert_eq!(
            (status, &health["status"]),
            (StatusCode::OK, &json!("alive"))
        );
        let (status, ready) = ask(&base, "/readyz").await;
        assert_eq!(status, StatusCode::OK, "{ready}");
        assert_eq!(
            ready,
            json!({"ready": true, "database": "ok", "migrations": "applied", "listening": true, "roles": [role]})
        );
        // Nothing else is served there.
        for path in ["/api/tasks/query", "/api/openapi.json"] {
            let (status, problem) = ask(&base, path).await;
            assert_eq!(
                (status, &problem["code"]),
                (StatusCode::NOT_FOUND, &json!("route_not_found"))
            );
        }
    }

    // A worker that finishes what it holds is alive, and not ready.
    let client = scene.client(&api).await;
    let task = client.say("take your time").await;
    scene.llm.wait_for_requests(1).await;
    let base = health_of(&worker).await;
    worker.signal(Signal::TERM);
    worker.says("stopping").await;
    until("the worker is not ready", async || {
        ask(&base, "/readyz").await.0 == StatusCode::SERVICE_UNAVAILABLE
    })
    .await;
    assert_eq!(ask(&base, "/healthz").await.0, StatusCode::OK);
    gate.open();
    assert_eq!(client.end(&task).await["output"], "done");
    let (code, text) = worker.ended().await;
    assert_eq!(code, 0, "{text}");

    // Only what was asked for is opened; and where the API listens, it answers.
    assert!(!api.text().contains("Health is asked at"), "{}", api.text());
    api.terminate().await;
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    scene.set("SERVER_PORT", &port);
    scene.set("SERVER_HEALTH_PORT", &port);
    let api = Program::run(&["serve", "--roles", "api"], &scene.env);
    assert_eq!(scene.client(&api).await.get("/readyz").await["ready"], true);
    assert!(!api.text().contains("Health is asked at"), "{}", api.text());
    scene.close().await;
    api.terminate().await;
    orchestrator.terminate().await;
}
