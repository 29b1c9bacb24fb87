//! Leases: who may write a step's result when workers hang, die, or come back late.

use crate::{
    engine::{Engine, until},
    process::{Barrier, Process, Proxy},
    stub_llm::{Gate, Reply},
};
use reconvene::{
    domain::{
        decision::Decision,
        ids::{ProcessId, TaskId},
        output::Answer,
        task::{Failure, TaskStatus::*},
    },
    lifecycle::{
        checkpoint::{
            Asked, Checkpointer, Commit, Committed, Decided, Limits, Next, Outcome, PromptRecord,
        },
        claim, requeue,
    },
    orchestrator::Orchestrator,
    store::steps::GiveBack,
};
use serde_json::json;
use std::sync::Arc;

/// Lets the leases of running steps of this attempt run out, by the database's clock.
async fn expire(engine: &Engine, attempt: i32) -> u64 {
    let sql = "update steps set lease_expires_at = now() - interval '1 second'
               where status = 'running' and attempt = $1";
    let done = sqlx::query(sql).bind(attempt).execute(&engine.pool).await;
    done.unwrap().rows_affected()
}

/// Attempt and lost leases of the newest decide step.
async fn attempts(engine: &Engine, task: TaskId) -> (i32, i32) {
    sqlx::query_as(
        "select attempt, lost_leases from steps where task_id = $1 and ordinal = 0
         order by turn desc limit 1",
    )
    .bind(task.0)
    .fetch_one(&engine.pool)
    .await
    .unwrap()
}

// T-11, R-2, H-12
#[tokio::test(flavor = "multi_thread")]
async fn only_the_attempt_that_holds_the_lease_can_renew_give_back_or_commit() {
    let engine = Engine::scripted_with(|_| {}).await;
    let (pool, hub) = (&engine.pool, &engine.hub);
    let orchestrator = Orchestrator::new(&engine.config, pool.clone(), hub.clone());
    let task = engine.post("work").await;
    orchestrator.dispatch().await.unwrap();
    let mut claims = Vec::new();
    for attempt in [1, 2] {
        let mut claimed = claim::claim(pool, ProcessId::new(), 30, 10).await.unwrap();
        claims.push(claimed.pop().expect("a queued step").claim);
        assert_eq!(claims[attempt - 1].attempt, attempt as i32);
        if attempt == 1 {
            expire(&engine, 1).await;
            orchestrator.reap().await.unwrap();
            // Queued again: the first attempt holds nothing.
            let checkpointer = Checkpointer::start(pool.clone(), hub.clone(), LIMITS, 10);
            let late = decided(&claims[0], "first");
            assert_eq!(checkpointer.commit(late).await.unwrap(), Committed::Stale);
        }
    }
    let [old, new] = claims[..] else { panic!() };

    let lease = async || -> f64 {
        let sql = "select extract(epoch from lease_expires_at - now())::float8 from steps";
        sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
    };
    claim::renew(pool, &[old], 5000).await.unwrap();
    assert!(lease().await <= 30.0, "the old attempt extended the lease");
    claim::renew(pool, &[new], 5000).await.unwrap();
    assert!(lease().await > 4000.0);

    let busy = GiveBack::ModelBusy {
        seconds: 0.0,
        spent: Default::default(),
    };
    requeue::give_back(pool, hub, &old, busy).await.unwrap();
    let checkpointer = Checkpointer::start(pool.clone(), hub.clone(), LIMITS, 10);
    let failed = Commit {
        claim: old,
        outcome: Outcome::Failed {
            failure: Failure::new("internal", "late"),
            asked: None,
        },
    };
    for late in [decided(&old, "first"), failed] {
        assert_eq!(checkpointer.commit(late).await.unwrap(), Committed::Stale);
    }
    assert_eq!(engine.status(task).await, Running);
    assert_eq!(attempts(&engine, task).await, (2, 1));

    let stands = checkpointer.commit(decided(&new, "second")).await.unwrap();
    assert_eq!(stands, Committed::Done(Next::default()));
    // Delivered twice, it writes once (H-14).
    let again = checkpointer.commit(decided(&new, "second")).await.unwrap();
    assert_eq!(again, Committed::Stale);
    assert_eq!(engine.end(task).await, (Completed, "second".into()));
    engine.close().await;
}

const LIMITS: Limits = Limits {
    lease_secs: 30,
    parallel_max: 10,
};

fn decided(claim: &reconvene::domain::step::Claim, text: &str) -> Commit {
    let decided = Decided {
        task: None,
        answer: Answer::Final(text.into()),
        concurrency: vec![],
        decision: Decision {
            text: text.into(),
            ..Decision::default()
        },
        asked: Asked {
            prompt: Arc::new(PromptRecord {
                hash: [7; 32],
                sections: json!({}),
            }),
            seen_seq: 1,
            model: "stub".into(),
            latency_ms: 1,
            retries: 0,
            spent: Default::default(),
        },
    };
    Commit {
        claim: *claim,
        outcome: Outcome::Decided(Box::new(decided)),
    }
}

// H-12, R-2: the first worker stands still with a reply under way, wakes when the second has committed its own, or while
// the second still waits
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_wakes_after_its_lease_changes_nothing() {
    for second_is_done in [true, false] {
        let engine = Engine::scripted_with(|_| {}).await;
        let (first, second) = (Gate::new(), Gate::new());
        let (g1, g2) = (first.clone(), second.clone());
        engine.llm().script(move |r| match (r.number, r.turn()) {
            (0, _) => Reply::call("ask_user", json!({"question": "from the first?"})).held_by(&g1),
            (1, _) => {
                Reply::call("get_subtask_result", json!({"task_id": TaskId::new()})).held_by(&g2)
            }
            _ => Reply::text("done"),
        });
        let one = Process::start(&engine.config, &engine.pool, true, true);
        let task = engine.post("work").await;
        engine.llm().wait_for_requests(1).await;
        let asleep = one.suspend().await;
        expire(&engine, 1).await;
        let two = Process::start(&engine.config, &engine.pool, true, true);
        engine.llm().wait_for_requests(2).await;
        if second_is_done {
            second.open();
            assert_eq!(engine.end(task).await, (Completed, "done".into()));
        }
        first.open();
        drop(asleep);
        // Returns when the worker has let go of what it held.
        one.stop().await;
        second.open();
        assert_eq!(engine.end(task).await, (Completed, "done".into()));

        let tools: Vec<String> = sqlx::query_scalar("select tool from steps where ordinal > 0")
            .fetch_all(&engine.pool)
            .await
            .unwrap();
        assert_eq!(tools, ["get_subtask_result"]);
        assert_eq!(engine.count("select count(*) from await_groups").await, 0);
        let (attempt, lost): (i32, i32) =
            sqlx::query_as("select attempt, lost_leases from steps where turn = 1 and ordinal = 0")
                .fetch_one(&engine.pool)
                .await
                .unwrap();
        assert_eq!((attempt, lost), (2, 1), "letting go uses up no attempt");
        engine.close().await;
        two.stop().await;
    }
}

// T-12, D-24: the worker stays alive, so it also meets its own earlier attempts and must let go of them
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_loses_three_leases_fails_with_its_task_and_wakes_the_parent() {
    let engine = Engine::scripted().await;
    let (writer, never) = (engine.demo.writer, Gate::new());
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("plan", 0) => Reply::call(
                "delegate_tasks",
                json!({"tasks": [{"agent_group_id": writer, "prompt": "child"}]}),
            ),
            ("plan", _) => Reply::text(r.last_user().to_owned()),
            _ => Reply::text("never").held_by(&never),
        });
    let parent = engine.post("plan").await;
    for attempt in 1..=3 {
        engine.llm().wait_for_requests(1 + attempt).await;
        assert_eq!(expire(&engine, attempt as i32).await, 1);
        let child = engine.children(parent).await[0];
        until("the lease is taken back", async || {
            let (now, lost) = attempts(&engine, child).await;
            now > attempt as i32 || lost == 2 && engine.status(child).await == Failed
        })
        .await;
    }
    let (status, output) = engine.end(parent).await;
    assert_eq!(status, Completed);
    assert!(output.contains("1 failed"), "{output}");
    assert!(
        output.contains("Reason: lease_lost: The step lost its worker 3 times"),
        "{output}"
    );
    let child = engine.children(parent).await[0];
    assert_eq!(attempts(&engine, child).await.0, 3);
    until("the lost attempts are broken off", async || {
        engine.llm().aborted() == 3
    })
    .await;
    assert_eq!(engine.llm().requests().len(), 5);
    engine.close().await;
}

// T-11: the keeper of leases looks when the decision is committed, but the worker does not know it yet
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_has_just_been_committed_is_not_taken_for_lost() {
    let engine = Engine::scripted_with(|_| {}).await;
    let proxy = Proxy::start(&engine.pool).await;
    let gate = Gate::new();
    let held = gate.clone();
    engine.llm().script(move |r| match r.turn() {
        0 => Reply::call("get_subtask_result", json!({"task_id": TaskId::new()})).held_by(&held),
        _ => Reply::text("done"),
    });
    let orchestrator = Process::start(&engine.config, &engine.pool, false, true);
    let worker = Process::start(&engine.config, &proxy.pool, true, false);
    let task = engine.post("work").await;
    engine.llm().wait_for_requests(1).await;
    proxy.hold_commits(true);
    gate.open();
    until("the call is started", async || {
        engine
            .count("select count(*) from steps where ordinal = 1")
            .await
            == 1
    })
    .await;
    let looked = async || -> Option<f64> {
        let sql = "select max(extract(epoch from query_start))::float8 from pg_stat_activity
                   where datname = current_database() and query not like '%pg_stat_activity%'
                       and query like '%with ordinality%join steps s%'";
        sqlx::query_scalar(sql)
            .fetch_one(&engine.pool)
            .await
            .unwrap()
    };
    // The second look begins when the first has been acted upon.
    let mut before = looked().await;
    for _ in 0..2 {
        until("the leases are looked at", async || looked().await > before).await;
        before = looked().await;
    }
    proxy.hold_commits(false);
    assert_eq!(engine.end(task).await, (Completed, "done".into()));
    assert_eq!(
        engine
            .count("select count(*) from steps where attempt > 1")
            .await,
        0
    );
    engine.close().await;
    worker.stop().await;
    orchestrator.stop().await;
}

// T-11, H-16: silence is not death
#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_keeps_a_step_for_longer_than_its_lease() {
    let engine = Engine::scripted_with(|c| c.worker.lease_seconds = 1).await;
    let slow = std::time::Duration::from_millis(3200);
    engine
        .llm()
        .script(move |_| Reply::text("slow but sure").after(slow));
    let workers = [0; 2].map(|_| Process::start(&engine.config, &engine.pool, true, true));
    let task = engine.post("work").await;
    assert_eq!(engine.end(task).await, (Completed, "slow but sure".into()));
    assert_eq!(attempts(&engine, task).await, (1, 0));
    assert_eq!(engine.llm().requests().len(), 1);
    engine.close().await;
    for worker in workers {
        worker.stop().await;
    }
}

// H-13, R-3: every time that decides something is the database's, which here is ten minutes away from everybody else's
#[tokio::test(flavor = "multi_thread")]
async fn workers_whose_clocks_differ_from_the_databases_do_not_matter() {
    for minutes in [10, -10] {
        let engine = Engine::scripted_with(|c| c.worker.lease_seconds = 1).await;
        shift_clock(&engine, minutes).await;
        let slow = std::time::Duration::from_millis(2500);
        let writer = engine.demo.writer;
        engine
            .llm()
            .script(move |r| match (r.first_user(), r.number) {
                ("plan", 0) => Reply::status(429, "{}").header("retry-after", "1"),
                ("plan", 1) => Reply::call(
                    "delegate_tasks",
                    json!({"tasks": [{"agent_group_id": writer, "prompt": "child"}]}),
                ),
                ("plan", _) => Reply::text("done"),
                _ => Reply::text("slow").after(slow),
            });
        let workers = [0; 2].map(|_| Process::start(&engine.config, &engine.pool, true, true));
        let task = engine.post("plan").await;
        assert_eq!(engine.end(task).await, (Completed, "done".into()));
        let asked = engine.llm().requests();
        assert_eq!(asked.len(), 4, "nothing was claimed twice");
        let waited = (asked[1].at - asked[0].at).as_secs_f64();
        assert!((1.0..4.0).contains(&waited), "retried after {waited} s");
        for broken in [
            "select count(*) from steps where lost_leases > 0",
            "select count(*) from tasks where not (created_at <= started_at and started_at <= finished_at)",
            "select count(*) from steps where not (queued_at <= started_at and started_at <= finished_at)",
        ] {
            assert_eq!(engine.count(broken).await, 0, "{broken}");
        }
        engine.close().await;
        for worker in workers {
            worker.stop().await;
        }
    }
}

/// Puts a shifted `now()` before PostgreSQL's own, for every session and default of this database.
async fn shift_clock(engine: &Engine, minutes: i32) {
    let sql = format!(
        "create schema shifted;
         create function shifted.now() returns timestamptz stable language sql as
             $$ select pg_catalog.now() + interval '{minutes} minutes' $$;
         do $$
         declare d record;
         begin
             for d in select c.table_name, c.column_name from information_schema.columns c
                 where c.table_schema = 'public' and c.column_default = 'now()' loop
                 execute format('alter table %I alter %I set default shifted.now()', d.table_name, d.column_name);
             end loop;
             execute format('alter database %I set search_path = shifted, pg_catalog, public', current_database());
         end $$;"
    );
    let mut conn = engine.pool.acquire().await.unwrap();
    let done = sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut *conn);
    done.await.unwrap();
    // The sessions of before do not know it.
    sqlx::query(
        "select pg_terminate_backend(pid) from pg_stat_activity
         where datname = current_database() and pid <> pg_backend_pid()",
    )
    .execute(&mut *conn)
    .await
    .unwrap();
    conn.close().await.unwrap();
    let shifted = "select abs(extract(epoch from now() - pg_catalog.now()))::bigint";
    let shift: i64 = sqlx::query_scalar(shifted)
        .fetch_one(&engine.pool)
        .await
        .unwrap();
    assert_eq!(shift, 600);
}

// what the stories can not show, that no other time is even asked for
#[test]
fn no_code_that_leases_or_schedules_asks_the_process_for_the_time() {
    let src = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut left = [
        "store",
        "lifecycle",
        "worker",
        "orchestrator",
        "domain",
        "bus.rs",
    ]
    .map(|part| src.join(part))
    .to_vec();
    let mut read = 0;
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(path.read_dir().unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        read += 1;
        let text = std::fs::read_to_string(&path).unwrap();
        // `Instant` measures and can not be stored; a time from outside would have to come in as one of these.
        for clock in [
            "SystemTime",
            "Utc::now",
            "Local::now",
            "clock_timestamp",
            "::timestamptz",
        ] {
            assert!(!text.contains(clock), "{} uses {clock}", path.display());
        }
    }
    assert!(read > 30, "{read} files");
}

// H-14, H-20, D-26, T-11: the worker dies at each point of a turn; a second reply, if it comes to one, is another one
#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_is_cut_anywhere_leaves_one_reply_and_its_own_calls() {
    let points = [
        // (table, rows that are held, whether the first reply is lost)
        (
            "task_items",
            "new.kind = 'assistant_message' and new.turn = 1",
            true,
        ),
        (
            "task_items",
            "new.kind = 'tool_result' and new.data ->> 'ordinal' = '1'",
            false,
        ),
        ("tasks", "new.parent_task_id is not null", false),
        (
            "task_items",
            "new.kind = 'tool_result' and new.data ->> 'ordinal' = '2'",
            false,
        ),
        (
            "task_items",
            "new.kind = 'tool_result' and new.data ->> 'ordinal' = '3'",
            false,
        ),
        ("steps", "new.turn = 2", false),
    ];
    for (table, held, first_is_lost) in points {
        let mut engine = Engine::scripted_with(|_| {}).await;
        let writer = engine.demo.writer;
        engine
            .llm()
            .script(move |r| match (r.first_user(), r.turn()) {
                ("plan", 0) => {
                    let which = if r.number == 0 { "first" } else { "second" };
                    let child = json!({"tasks": [{"agent_group_id": writer, "prompt": which}]});
                    let read = json!({"task_id": TaskId::new()}).to_string();
                    Reply::text(which)
                        .and_call("a", "get_subtask_result", &read)
                        .and_call("b", "delegate_tasks", &child.to_string())
                        .and_call("c", "get_subtask_result", &read)
                }
                ("plan", _) => Reply::text("done"),
                _ => Reply::text("child is done"),
            });
        let barrier = Barrier::before_insert(&engine.pool, table, held).await;
        engine.resume();
        let parent = engine.post("plan").await;
        barrier.reached().await;
        engine.kill().await;
        barrier.open().await;
        expire(&engine, 1).await;
        engine.resume();
        assert_eq!(
            engine.end(parent).await,
            (Completed, "done".into()),
            "{held}"
        );

        let which = if first_is_lost { "second" } else { "first" };
        let requests = engine.llm().requests();
        // The child's own step may have been cut too.
        let parents: Vec<_> = requests
            .iter()
            .filter(|r| r.first_user() == "plan")
            .collect();
        assert_eq!(parents.len(), if first_is_lost { 3 } else { 2 }, "{held}");
        let last = parents.last().unwrap();
        let spoken: Vec<&str> = last
            .messages()
            .iter()
            .filter(|m| m["role"] == "assistant")
            .map(|m| m["content"].as_str().unwrap())
            .collect();
        assert_eq!(spoken, [which], "{held}");
        let results: Vec<&str> = last.results().iter().map(|(id, _)| *id).collect();
        assert_eq!(results, ["a", "b", "c"], "{held}");
        let children: Vec<String> =
            sqlx::query_scalar("select title from tasks where parent_task_id is not null")
                .fetch_all(&engine.pool)
                .await
                .unwrap();
        assert_eq!(children, [which], "{held}");
        engine.close().await;
    }
}
