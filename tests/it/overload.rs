//! Models that fail, providers that ask for patience, and pools that are small.

use crate::{
    engine::{Engine, until},
    process::{self, Process, Proxy},
    stub_llm::{Gate, Recorded, Reply},
};
use reconvene::{
    domain::task::TaskStatus::*,
    lifecycle::submit::{Recipient, Submitter},
    orchestrator::Orchestrator,
    runtime::Shutdown,
};
use secrecy::SecretString;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Attempt, model attempts and lost leases of the only step.
async fn counts(engine: &Engine) -> (i32, i32, i32) {
    sqlx::query_as("select attempt, model_attempts, lost_leases from steps")
        .fetch_one(&engine.pool)
        .await
        .unwrap()
}

fn piece(text: &str) -> String {
    json!({"choices": [{"index": 0, "delta": {"content": text}}]}).to_string()
}

// T-14, H-27
#[tokio::test(flavor = "multi_thread")]
async fn failures_that_may_pass_are_tried_again_and_leave_nothing_behind() {
    let partial = "thirty characters of an answer";
    let failures: Vec<(&str, Reply)> = vec![
        ("408", Reply::status(408, "{}")),
        ("429", Reply::status(429, "{}")),
        ("500", Reply::status(500, "oops")),
        ("503", Reply::status(503, "{}")),
        (
            "529",
            Reply::status(
                529,
                r#"{"type":"error","error":{"type":"overloaded_error","message":"m"}}"#,
            ),
        ),
        ("closed", Reply::hang_up()),
        ("cut", Reply::events([piece(partial)]).then_hang_up()),
        ("no reason", Reply::events([piece(partial)])),
        (
            "end mark only",
            Reply::events([piece(partial), "[DONE]".into()]),
        ),
        (
            "error event",
            Reply::events([
                piece(partial),
                r#"{"error":{"message":"overloaded","code":503}}"#.into(),
            ]),
        ),
        (
            "error alone",
            Reply::events([r#"{"error":{"message":"busy"}}"#, "[DONE]"]),
        ),
        (
            "broken chunk",
            Reply::events([piece(partial), "{\"choices\": [".into()]),
        ),
        ("nothing", Reply::events(Vec::<String>::new())),
    ];
    for (what, failure) in failures {
        let engine = Engine::scripted().await;
        engine.llm().replies([failure, Reply::text("ok")]);
        let task = engine.post("work").await;
        assert_eq!(engine.end(task).await, (Completed, "ok".into()), "{what}");
        assert_eq!(engine.llm().requests().len(), 2, "{what}");
        assert_eq!(counts(&engine).await, (2, 1, 0), "{what}");
        let kept = "select count(*) from task_items where kind = 'assistant_message'";
        assert_eq!(engine.count(kept).await, 1, "{what}");
        engine.close().await;
    }
}

// T-14, H-27: with the provider's message and status, once each, and never the key
#[tokio::test(flavor = "multi_thread")]
async fn refusals_fail_at_once_and_say_why() {
    const KEY: &str = "sk-proj-Abcdef0123456789Abcdef0123456789";
    let said = format!(r#"{{"error":{{"message":"Bad key {KEY}, model gone","code":null}}}}"#);
    let in_stream = r#"{"error":{"message":"Bad key, model gone","code":400}}"#;
    let mut refusals: Vec<(u16, Reply)> = [400, 401, 403, 404, 422]
        .map(|status| (status, Reply::status(status, &said)))
        .to_vec();
    refusals.push((400, Reply::events([piece("some text"), in_stream.into()])));
    for (status, refusal) in refusals {
        let engine = Engine::scripted_with(|c| c.llm.api_key = Some(SecretString::from(KEY)))
            .await
            .running();
        engine
            .llm()
            .replies([refusal, Reply::text("not asked for")]);
        let task = engine.post("work").await;
        let (end, error) = engine.end(task).await;
        assert_eq!(end, Failed);
        let error: serde_json::Value = serde_json::from_str(&error).unwrap();
        assert_eq!(error["code"], "model_error");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("model gone"), "{message}");
        for once in [status.to_string().as_str(), "The model provider"] {
            assert_eq!(message.matches(once).count(), 1, "{once} in: {message}");
        }
        assert_eq!(engine.llm().requests().len(), 1);
        let leaked = format!(
            "select count(*) from (select t::text as row from tasks t union all select s::text from steps s
                union all select i::text from task_items i) r where row like '%{}%'",
            &KEY[8..20]
        );
        let leaked: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(leaked))
            .fetch_one(&engine.pool)
            .await
            .unwrap();
        assert_eq!(leaked, 0);
        engine.close().await;
    }
}

// T-14, H-26
#[tokio::test(flavor = "multi_thread")]
async fn attempts_end_and_an_absurd_wish_for_patience_is_a_failure() {
    for (reply, requests, says) in [
        (Reply::status(503, "{}"), 3, "given up after 3 attempts"),
        (
            Reply::status(429, "{}").header("retry-after", "86400"),
            1,
            "asked for 86400 s",
        ),
    ] {
        let engine = Engine::scripted_with(|c| c.llm.max_attempts = 3)
            .await
            .running();
        engine.llm().replies([reply]);
        let task = engine.post("work").await;
        let (status, error) = engine.end(task).await;
        assert_eq!(status, Failed);
        assert!(error.contains(says), "{error}");
        assert_eq!(engine.llm().requests().len(), requests);
        engine.close().await;
    }
}

// T-14, H-26, X-12: the only slot is free while the step waits, and there is no request before the hint
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_waits_for_its_provider_holds_no_slot() {
    let engine = Engine::scripted_with(|c| c.worker.concurrency = 1)
        .await
        .running();
    engine.llm().script(|r| match (r.first_user(), r.number) {
        ("patient", 0) => Reply::status(429, "{}").header("retry-after", "2"),
        _ => Reply::text("ok"),
    });
    let patient = engine.post("patient").await;
    engine.llm().wait_for_requests(1).await;
    until("it is given back", async || counts(&engine).await.1 == 1).await;
    let other = engine.post("other").await;
    engine.end(other).await;
    assert_eq!(engine.status(patient).await, Running);
    engine.end(patient).await;
    let requests = engine.llm().requests();
    let users: Vec<&str> = requests.iter().map(|r| r.first_user()).collect();
    assert_eq!(users, ["patient", "other", "patient"]);
    assert!(requests[2].at - requests[0].at >= Duration::from_secs(2));
    engine.close().await;
}

// H-26, T-12: two of each are within both limits of three
#[tokio::test(flavor = "multi_thread")]
async fn failures_of_the_model_and_lost_leases_are_counted_apart() {
    let engine = Engine::scripted_with(|c| c.llm.max_attempts = 3)
        .await
        .running();
    let never = Gate::new();
    engine.llm().script(move |r| match r.number {
        0 | 2 => Reply::status(503, "{}"),
        1 | 3 => Reply::text("lost").held_by(&never),
        _ => Reply::text("ok"),
    });
    let task = engine.post("work").await;
    for request in [2, 4] {
        engine.llm().wait_for_requests(request).await;
        sqlx::query(
            "update steps set lease_expires_at = now() - interval '1 s' where status = 'running'",
        )
        .execute(&engine.pool)
        .await
        .unwrap();
    }
    assert_eq!(engine.end(task).await, (Completed, "ok".into()));
    assert_eq!(counts(&engine).await, (5, 2, 2));
    engine.close().await;
}

// H-28, H-29: nothing of how the bytes arrive reaches the task
#[tokio::test(flavor = "multi_thread")]
async fn bytes_one_by_one_and_comments_give_the_same_answer() {
    let engine = Engine::scripted().await;
    let answer = "größer als 🦀 und 日本";
    let commented = format!(
        ": ping\n\ndata:{}\n: ping\ndata:\n\nevent: ping\ndata: {{}}\n\ndata: {}\n\n",
        piece(answer),
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    );
    for reply in [
        Reply::text(answer).byte_by_byte(),
        Reply::chunks([commented.clone()]),
        Reply::chunks([commented]).byte_by_byte(),
    ] {
        engine.llm().replies([reply]);
        let task = engine.post("work").await;
        assert_eq!(engine.end(task).await, (Completed, answer.into()));
    }
    engine.close().await;
}

// H-48, R-4: everything of a process on one pool
#[tokio::test(flavor = "multi_thread")]
async fn a_small_pool_serves_many_slow_models() {
    for connections in [5, 1] {
        let engine = Engine::scripted_with(|c| c.worker.concurrency = 100).await;
        let gate = Gate::new();
        let held = gate.clone();
        let call = |r: &Recorded| match r.turn() {
            0 => Reply::call("ask_users", json!({})),
            _ => Reply::text("done"),
        };
        engine.llm().script(move |r| call(r).held_by(&held));
        let pool = sqlx::postgres::PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(Duration::from_secs(
                engine.config.database.acquire_timeout_seconds,
            ))
            .connect_with((*engine.pool.connect_options()).clone())
            .await
            .unwrap();
        let shutdown = Shutdown::new();
        let worker = process::worker(&engine.config, &pool, &engine.hub, &shutdown);
        let orchestrator = Orchestrator::new(&engine.config, pool.clone(), engine.hub.clone());
        let submitter = Submitter::start(pool.clone(), engine.hub.clone());
        let loops = [
            tokio::spawn(worker.run()),
            tokio::spawn(orchestrator.run(shutdown.clone())),
        ];

        let post = || {
            let (submitter, message) = (
                submitter.clone(),
                engine.message(Recipient::DefaultAgent, "work"),
            );
            tokio::spawn(async move {
                let begun = Instant::now();
                submitter.submit(message).await.map(|_| begun.elapsed())
            })
        };
        let mut took = Vec::new();
        for burst in [100, 200] {
            for posted in (0..burst).map(|_| post()).collect::<Vec<_>>() {
                took.push(posted.await.unwrap().unwrap());
            }
            engine.llm().wait_for_requests(100).await;
        }
        took.sort_unstable();
        let p95 = took[took.len() * 95 / 100];
        assert!(
            p95 < Duration::from_secs(1),
            "{connections} connections: {p95:?}"
        );
        // A hundred models are being asked: nobody holds a transaction open, or a connection busy.
        until("the events are handled", async || {
            engine
                .count("select count(*) from orchestrator_events")
                .await
                == 0
        })
        .await;
        let open = "select count(*) from pg_stat_activity where datname = current_database()
                    and state like 'idle in transaction%' and state_change < now() - interval '0.2 s'";
        for _ in 0..20 {
            assert_eq!(engine.count(open).await, 0);
        }
        gate.open();
        until("all are done", async || {
            engine
                .count("select count(*) from tasks where status = 'completed'")
                .await
                == 300
        })
        .await;
        assert_eq!(engine.llm().requests().len(), 600);
        let again = "select count(*) from steps where attempt > 1 or lost_leases > 0 or status <> 'completed'";
        assert_eq!(engine.count(again).await, 0);
        shutdown.soft.cancel();
        for one in loops {
            one.await.unwrap();
        }
        engine.close().await;
    }
}

// R-4, H-17: an answer that arrives while the database is away is not lost, and counts as no attempt
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_away_for_a_moment_costs_no_answer() {
    let engine = Engine::scripted_with(|_| {}).await;
    let proxy = Proxy::start(&engine.pool).await;
    let gate = Gate::new();
    let held = gate.clone();
    let writer = engine.demo.writer;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("plan", 0) => Reply::call(
                "delegate_tasks",
                json!({"tasks": [{"agent_group_id": writer, "prompt": "child"}]}),
            )
            .held_by(&held),
            ("plan", _) => Reply::text("done"),
            _ => Reply::text("result"),
        });
    let process = Process::start(&engine.config, &proxy.pool, true, true);
    let task = engine.post("plan").await;
    engine.llm().wait_for_requests(1).await;
    proxy.cut();
    gate.open();
    engine.llm().wait_until_idle().await;
    until("somebody looks for the database", async || {
        proxy.refused() >= 10
    })
    .await;
    proxy.mend();
    assert_eq!(engine.end(task).await, (Completed, "done".into()));
    assert_eq!(
        engine.llm().requests().len(),
        3,
        "nothing was asked for twice"
    );
    assert_eq!(
        engine
            .count("select count(*) from steps where attempt > 1")
            .await,
        0
    );
    engine.close().await;
    process.stop().await;
}

// X-12, H-08: a waiting turn holds no slot
#[tokio::test(flavor = "multi_thread")]
async fn nesting_deeper_than_the_number_of_slots_completes() {
    let engine = Engine::scripted_with(|c| {
        c.worker.concurrency = 1;
        c.database.max_connections = 2;
    })
    .await
    .running();
    let (researcher, lead) = (engine.demo.researcher, engine.demo.lead);
    // Only the lead delegates; let the researcher, too.
    let sql = "update agent_versions set definition = jsonb_set(definition, '{config,auto_delegate}', 'true')
               where agent_id = $1";
    sqlx::query(sql)
        .bind(researcher.0)
        .execute(&engine.pool)
        .await
        .unwrap();
    let two = move |r: &Recorded| -> Value {
        let agent = if r.system().contains("You lead") {
            researcher
        } else {
            lead
        };
        let one = json!({"agent_group_id": agent, "prompt": format!("{} deeper", r.first_user())});
        json!({"tasks": [one.clone(), one]})
    };
    engine.llm().script(move |r| match r.turn() {
        0 if r.offers("delegate_tasks") => Reply::call("delegate_tasks", two(r)),
        _ => Reply::text("done"),
    });
    let task = engine.post("go").await;
    assert_eq!(engine.end(task).await, (Completed, "done".into()));
    let deepest = "select max(spawn_depth)::bigint from tasks";
    assert_eq!(engine.count(deepest).await, 3);
    assert_eq!(engine.count("select count(*) from tasks").await, 15);
    engine.close().await;
}
