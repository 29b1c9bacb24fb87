//! Processes that are told to end at once, in a bad moment.

use crate::{
    engine::{Engine, until},
    process::{Barrier, Process, waiting, worker},
    stub_llm::Reply,
};
use reconvene::{
    domain::{ids::TaskId, task::TaskStatus::Completed},
    runtime::Shutdown,
};
use serde_json::json;

// O-4: the commit that starts a call is on its way when the grace ends: the call does not wait for a lease of 30 s.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_a_late_commit_has_started_is_given_back() {
    let engine = Engine::scripted_with(|_| {}).await;
    engine.llm().script(|r| match r.turn() {
        0 => Reply::call("get_subtask_result", json!({"task_id": TaskId::new()})),
        _ => Reply::text("done"),
    });
    let orchestrator = Process::start(&engine.config, &engine.pool, false, true);
    let barrier =
        Barrier::before_insert(&engine.pool, "task_items", "new.kind = 'tool_call'").await;
    let task = engine.post("work").await;
    let shutdown = Shutdown::new();
    let first = worker(&engine.config, &engine.pool, &engine.hub, &shutdown).run();
    let first = tokio::spawn(first);
    barrier.reached().await;
    shutdown.hard.cancel();
    until("the worker gives back what it knows of", async || {
        waiting(&engine.pool, "transactionid").await > 0
    })
    .await;
    barrier.open().await;
    first.await.unwrap();
    let call: (String, i32, i32) =
        sqlx::query_as("select status, attempt, lost_leases from steps where ordinal = 1")
            .fetch_one(&engine.pool)
            .await
            .unwrap();
    assert_eq!(call, ("queued".to_owned(), 1, 0));

    let second = Process::start(&engine.config, &engine.pool, true, false);
    assert_eq!(engine.end(task).await, (Completed, "done".into()));
    engine.close().await;
    second.stop().await;
    orchestrator.stop().await;
}
