//! Several processes on one database: hints between them, and what happens when nobody hears them.

use crate::{
    engine::{Engine, until},
    forced::delegate,
    process::{Process, Roles},
    stub_llm::{Gate, Reply},
};
use reconvene::{
    config::Config,
    domain::{
        ids::{ProcessId, TaskId},
        task::TaskStatus::*,
    },
    runtime::{Change, Hub, Watch},
};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection, postgres::PgListener};
use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

/// Polling that does not hide a lost hint: it comes after 15 s at the earliest.
fn slow_polls(config: &mut Config) {
    config.worker.poll_interval_ms = 30_000;
    config.orchestrator.poll_interval_ms = 30_000;
}

/// A test that hears what the processes tell each other.
struct Ear(PgListener);

impl Ear {
    async fn on(engine: &Engine) -> Self {
        let mut listener = PgListener::connect_with(&engine.pool).await.unwrap();
        listener.listen("reconvene").await.unwrap();
        Self(listener)
    }

    /// The next notification that holds these words.
    async fn hears(&mut self, words: &str) -> String {
        let heard = async {
            loop {
                let payload = self.0.recv().await.unwrap().payload().to_owned();
                if payload.contains(words) {
                    return payload;
                }
            }
        };
        crate::engine::soon(words, heard).await
    }
}

const LISTENERS: &str = "select count(*) from pg_stat_activity
    where datname = current_database() and query = 'LISTEN \"reconvene\"'";

/// Starts processes one after another, each when the one before listens; they know of each other when it returns. The
/// first is the engine's own, which only submits and watches.
async fn start(engine: &Engine, roles: &[(bool, bool)]) -> Vec<Process> {
    let mut ear = Ear::on(engine).await;
    let before = engine.count(LISTENERS).await;
    let mut processes = Vec::new();
    for (n, (worker, orchestrator)) in [(false, false)].iter().chain(roles).enumerate() {
        let hub = match n {
            0 => engine.hub.clone(),
            _ => Arc::new(Hub::new(ProcessId::new())),
        };
        let roles = Roles {
            worker: *worker,
            orchestrator: *orchestrator,
            bus: true,
        };
        let id = hub.process;
        processes.push(Process::with_roles(
            hub,
            &engine.config,
            &engine.pool,
            roles,
        ));
        until("it listens", async || {
            engine.count(LISTENERS).await == before + n as i64 + 1
        })
        .await;
        if n > 0 {
            ear.hears(&format!("{id} hello")).await;
        }
    }
    processes
}

/// Follows the task here; all other processes know of it when it returns.
async fn watch(engine: &Engine, processes: &[Process], task: TaskId) -> Watch {
    let watch = engine.hub.watch(task);
    until("the others know the watcher", async || {
        processes[1..]
            .iter()
            .all(|other| other.hub.is_watched_elsewhere(task))
    })
    .await;
    watch
}

async fn stop(processes: Vec<Process>) {
    for process in processes {
        process.stop().await;
    }
}

// O-3: submitted here, dispatched there, decided elsewhere
#[tokio::test(flavor = "multi_thread")]
async fn hints_wake_other_processes_long_before_their_timers() {
    let engine = Engine::scripted_with(slow_polls).await;
    let processes = start(&engine, &[(false, true), (true, false)]).await;
    let mut took = Vec::new();
    for n in 0..6 {
        let begun = Instant::now();
        let task = engine.post(&format!("task {n}")).await;
        assert_eq!(engine.end(task).await, (Completed, "ok".into()));
        took.push(begun.elapsed());
    }
    took.sort_unstable();
    assert!(took[2] < Duration::from_secs(1), "{took:?}");
    engine.close().await;
    stop(processes).await;
}

// O-3: a hint to nobody would still take the database's notification lock
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_alone_sends_no_notification() {
    let engine = Engine::scripted_with(|_| {}).await;
    let mut ear = Ear::on(&engine).await;
    let roles = Roles {
        worker: true,
        orchestrator: true,
        bus: true,
    };
    let process = Process::with_roles(engine.hub.clone(), &engine.config, &engine.pool, roles);
    let watch = engine.hub.watch(TaskId::new());
    let task = engine.post("work").await;
    assert_eq!(engine.end(task).await, (Completed, "ok".into()));
    engine.stop(task, true).await;
    drop(watch);
    sqlx::query("notify reconvene, 'the end'")
        .execute(&engine.pool)
        .await
        .unwrap();
    let first = ear.0.recv().await.unwrap();
    assert_eq!(first.payload(), "the end");
    engine.close().await;
    process.stop().await;
}

// T-22: the worker runs in another process than the watcher
#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_sees_the_feed_and_the_text_of_another_process() {
    let engine = Engine::scripted_with(slow_polls).await;
    let processes = start(&engine, &[(true, true)]).await;
    let gate = Gate::new();
    let held = gate.clone();
    let answer = "the first half and the second half";
    engine.llm().script(move |_| {
        Reply::text(answer)
            .held_by(&held)
            .every(Duration::from_millis(60))
    });
    let task = engine.post("work").await;
    engine.llm().wait_for_requests(1).await;
    let mut watch = watch(&engine, &processes, task).await;
    gate.open();
    let (mut text, mut pieces) = (String::new(), 0);
    loop {
        match crate::engine::soon("a change", watch.changed()).await {
            Change::Delta { turn, text: piece } => {
                assert_eq!(turn, 1);
                text.push_str(&piece);
                pieces += 1;
            }
            Change::Feed if engine.status(task).await == Completed => break,
            Change::Feed | Change::Lagged => {}
        }
    }
    assert_eq!(text, answer);
    assert!(pieces >= 2, "it came while it was written");
    engine.close().await;
    stop(processes).await;
}

// H-18: a long message, a long reply, a long result of a child and a long error are all stored and told, and no
// notification comes near its limit.
#[tokio::test(flavor = "multi_thread")]
async fn big_content_breaks_no_notification() {
    let engine = Engine::scripted_with(slow_polls).await;
    let processes = start(&engine, &[(true, true)]).await;
    let (researcher, gate) = (engine.demo.researcher, Gate::new());
    let held = gate.clone();
    let answer = "€".repeat(50_000 / 3);
    let reply = answer.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("big", _) => Reply::text("r".repeat(100_000)),
            ("fails", _) => Reply::status(
                400,
                &json!({"error": {"message": "e".repeat(100_000)}}).to_string(),
            ),
            (_, 0) => Reply::call("delegate_tasks", delegate(researcher, &["big", "fails"])),
            _ => Reply::text(reply.clone()).held_by(&held),
        });
    let mut ear = Ear::on(&engine).await;
    let task = engine.post(&"m".repeat(20_000)).await;
    engine.llm().wait_for_requests(4).await;
    let mut watch = watch(&engine, &processes, task).await;
    let mut longest = ear.hears(&format!("watched {task}")).await.len();
    gate.open();
    let mut text = String::new();
    loop {
        match crate::engine::soon("a change", watch.changed()).await {
            Change::Delta { text: piece, .. } => text.push_str(&piece),
            Change::Feed if engine.status(task).await == Completed => break,
            Change::Feed | Change::Lagged => {}
        }
    }
    assert_eq!(text, answer);
    let lengths = "select sum(length(coalesce(output, error::text)))::bigint from tasks";
    assert!(engine.count(lengths).await > 100_000 + 50_000 / 3);
    sqlx::query("notify reconvene, 'the end'")
        .execute(&engine.pool)
        .await
        .unwrap();
    loop {
        let heard = ear.0.recv().await.unwrap();
        if heard.payload() == "the end" {
            break;
        }
        longest = longest.max(heard.payload().len());
    }
    assert!(longest < 1000, "{longest} bytes for a few tasks");
    engine.close().await;
    stop(processes).await;
}

// T-22, T-14: an answer that breaks off is begun anew, and its watcher knows
#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_is_told_that_the_text_so_far_is_void() {
    let engine = Engine::scripted_with(|_| {}).await;
    let processes = start(&engine, &[(true, true)]).await;
    let gate = Gate::new();
    let half = json!({"choices": [{"index": 0, "delta": {"content": "half an ans"}}]});
    engine.llm().replies([
        Reply::events([half]).held_by(&gate).then_hang_up(),
        Reply::text("the whole answer"),
    ]);
    let task = engine.post("work").await;
    engine.llm().wait_for_requests(1).await;
    let mut watch = watch(&engine, &processes, task).await;
    gate.open();
    let (mut text, mut voided) = (String::new(), Vec::new());
    loop {
        match crate::engine::soon("a change", watch.changed()).await {
            Change::Delta { text: piece, .. } if piece.is_empty() => {
                voided.push(std::mem::take(&mut text));
            }
            Change::Delta { text: piece, .. } => text.push_str(&piece),
            Change::Feed if engine.status(task).await == Completed => break,
            Change::Feed | Change::Lagged => {}
        }
    }
    assert_eq!(text, "the whole answer");
    assert_eq!(voided, ["half an ans"]);
    engine.close().await;
    stop(processes).await;
}

// T-22: pieces of two workers, of which the first to begin is the last to commit
#[tokio::test(flavor = "multi_thread")]
async fn text_that_is_stored_late_by_one_worker_is_not_lost_behind_anothers() {
    let engine = Engine::scripted_with(|c| {
        slow_polls(c);
        c.worker.concurrency = 1;
    })
    .await;
    let processes = start(&engine, &[(true, true), (true, false)]).await;
    let gates = [Gate::new(), Gate::new()];
    let [slow, quick] = gates.clone();
    engine.llm().script(move |r| match r.first_user() {
        "slow" => Reply::text("slow text").held_by(&slow),
        _ => Reply::text("quick text").held_by(&quick),
    });
    let mut ear = Ear::on(&engine).await;
    let mut watches = Vec::new();
    for text in ["slow", "quick"] {
        let task = engine.post(text).await;
        engine.llm().wait_for_requests(watches.len() + 1).await;
        watches.push((task, watch(&engine, &processes, task).await));
    }
    let held = format!("new.task_id = '{}'", watches[0].0);
    let barrier =
        crate::process::Barrier::before_insert(&engine.pool, "stream_chunks", &held).await;
    gates[0].open();
    barrier.reached().await;
    gates[1].open();
    ear.hears("deltas").await;
    engine.until(watches[1].0, Completed).await;
    barrier.open().await;
    for ((_, watch), expected) in watches.iter_mut().rev().zip(["quick text", "slow text"]) {
        let mut text = String::new();
        while text != expected {
            if let Change::Delta { text: piece, .. } =
                crate::engine::soon(expected, watch.changed()).await
            {
                text.push_str(&piece);
            }
        }
    }
    engine.close().await;
    stop(processes).await;
}

// H-17, O-3
#[tokio::test(flavor = "multi_thread")]
async fn listeners_that_are_cut_off_come_back_and_look_for_what_they_missed() {
    let engine = Engine::scripted_with(slow_polls).await;
    let processes = start(&engine, &[(true, true)]).await;
    let mut watch = engine.hub.watch(TaskId::new());
    let database = engine
        .pool
        .connect_options()
        .get_database()
        .unwrap()
        .to_owned();
    // From another database: this one can not be closed from within.
    let elsewhere = (*engine.pool.connect_options())
        .clone()
        .database("postgres");
    let mut admin = PgConnection::connect_with(&elsewhere).await.unwrap();
    let close = format!("alter database {database} allow_connections false");
    let open = format!("alter database {database} allow_connections true");
    // Nobody can come back before the message is there.
    sqlx::raw_sql(AssertSqlSafe(close))
        .execute(&mut admin)
        .await
        .unwrap();
    sqlx::query(
        "select pg_terminate_backend(pid) from pg_stat_activity
         where datname = $1 and query = 'LISTEN \"reconvene\"'",
    )
    .bind(&database)
    .execute(&mut admin)
    .await
    .unwrap();
    until("they are cut off", async || {
        engine.count(LISTENERS).await == 0
    })
    .await;
    let missed = engine.post("in the gap").await;
    assert_eq!(engine.status(missed).await, Pending);
    let begun = Instant::now();
    sqlx::raw_sql(AssertSqlSafe(open))
        .execute(&mut admin)
        .await
        .unwrap();
    assert_eq!(engine.end(missed).await, (Completed, "ok".into()));
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "{:?}",
        begun.elapsed()
    );
    // Whoever watches is told to read the table.
    assert_eq!(
        crate::engine::soon("lag", watch.changed()).await,
        Change::Lagged
    );
    until("all listen again", async || {
        engine.count(LISTENERS).await == 2
    })
    .await;
    let mut took = Vec::new();
    for n in 0..4 {
        let begun = Instant::now();
        let task = engine.post(&format!("later {n}")).await;
        engine.end(task).await;
        took.push(begun.elapsed());
    }
    took.sort_unstable();
    assert!(took[1] < Duration::from_secs(1), "{took:?}");
    engine.close().await;
    stop(processes).await;
}

// O-3: who cuts the listener again and again costs it a few connections a second, not as many as it can make
#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_is_cut_over_and_over_pauses_in_between() {
    let engine = Engine::scripted_with(slow_polls).await;
    let processes = start(&engine, &[]).await;
    let mut cut = HashSet::new();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        // Not among the conditions: they are evaluated in any order, and every session of the cluster would be ended.
        let sql = "select pid, pg_terminate_backend(pid) from pg_stat_activity
            where datname = current_database() and query = 'LISTEN \"reconvene\"'";
        let ended: Vec<(i32, bool)> = sqlx::query_as(sql).fetch_all(&engine.pool).await.unwrap();
        cut.extend(ended.into_iter().map(|(pid, _)| pid));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!((2..=20).contains(&cut.len()), "{}", cut.len());
    until("it listens again", async || {
        engine.count(LISTENERS).await == 1
    })
    .await;
    stop(processes).await;
}
