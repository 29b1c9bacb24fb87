//! Work in flight: what a stop reaches (H-10), and what silence and activity mean (H-16).

use crate::{
    engine::{Engine, until},
    forced::{ByHand, Hold, agent, agent_with, delegate, stopping, until_waiting},
    stub_llm::{Gate, Reply},
};
use reconvene::domain::{
    ids::{AgentId, TaskId},
    task::TaskStatus::*,
};
use serde_json::json;

// H-10, T-30, T-31: the leaf is in the first of two calls when the root is stopped: the second is never made, nothing is
// written, and the async child, the queued one and the one that waits for its own child end as well.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_reaches_a_leaf_between_two_calls() {
    let engine = Engine::scripted_with(|_| {}).await;
    let mid = agent(&engine, "Mid").await;
    let leaf = agent_with(&engine, "Leaf", |a| {
        a.tools = vec!["wait_for_signal".into()]
    })
    .await;
    let demo = engine.demo;
    let gate = Gate::new();
    let held = gate.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("root", 0) => {
                let mut free = delegate(demo.writer, &["free"]);
                free["async"] = json!(true);
                let mut waited = delegate(mid, &["mid"]);
                let queued = delegate(demo.researcher, &["queued"])["tasks"][0].clone();
                waited["tasks"].as_array_mut().unwrap().push(queued);
                Reply::text("")
                    .and_call("1", "delegate_tasks", &free.to_string())
                    .and_call("2", "delegate_tasks", &waited.to_string())
            }
            ("mid", 0) => Reply::call("delegate_tasks", delegate(leaf, &["leaf"])),
            ("leaf", 0) => Reply::text("")
                .and_call("1", "wait_for_signal", r#"{"key": "first"}"#)
                .and_call("2", "wait_for_signal", r#"{"key": "second"}"#),
            ("queued", _) => Reply::status(429, "{}").header("retry-after", "300"),
            ("free", _) => Reply::text("late").held_by(&held),
            _ => Reply::text(r.last_user()),
        });
    // Holds the leaf's row within its first call.
    let call = Hold::stall(
        &engine.pool,
        "before insert on await_groups",
        "new.source_type = 'external'",
    )
    .await;
    let engine = engine.running();
    let root = engine.post("root").await;
    engine.llm().wait_for_requests(5).await;
    until_waiting(&engine.pool, 1).await;
    let resting = "select count(*) from tasks where status = 'waiting_for_input'";
    until("root and mid rest", async || {
        engine.count(resting).await == 2
    })
    .await;
    let queued = "select count(*) from steps where status = 'queued'";
    until("one is queued", async || engine.count(queued).await == 1).await;
    let stopped = stopping(&engine, root, true);
    until_waiting(&engine.pool, 2).await;
    call.release().await;
    let receipt = stopped.await.unwrap();
    assert_eq!((receipt.stopped, receipt.left_alive), (5, 0));
    let active = "select (select count(*) from steps where status in ('queued', 'running'))
        + (select count(*) from awaits where status = 'pending')";
    assert_eq!(engine.count(active).await, 0);
    until("the model call is aborted", async || {
        engine.llm().aborted() == 1
    })
    .await;
    let seconds = "select count(*) from await_groups where about ->> 'key' = 'second'";
    assert_eq!(engine.count(seconds).await, 0);
    let results = "select count(*) from task_items i join tasks t on t.id = i.task_id where t.title = 'leaf' and i.kind = 'tool_result'";
    assert_eq!(engine.count(results).await, 0);
    let resumed = "select count(*) from task_items where kind = 'resume_message'";
    assert_eq!(engine.count(resumed).await, 0);
    gate.open();
    engine.close().await;
}

// H-16: at the time-out a silent child is alive and waited for, one without its worker fails, one that loops ends at its
// own limit, and one that ends in the same moment is counted once.
#[tokio::test(flavor = "multi_thread")]
async fn silence_is_not_death_and_activity_is_not_progress() {
    let mut engine = Engine::scripted_with(|c| c.worker.max_attempts = 1).await;
    let looping = agent_with(&engine, "Looping", |a| a.max_iterations = 4).await;
    let one = |agent: AgentId, prompt| delegate(agent, &[prompt])["tasks"][0].clone();
    let researcher = engine.demo.researcher;
    let args = json!({
        "timeout_minutes": 10.0 / 60.0,
        "tasks": [one(researcher, "silent"), one(researcher, "orphaned"), one(looping, "looping"), one(researcher, "punctual")],
    });
    let (gate, punctual) = (Gate::new(), Gate::new());
    let (held, in_time) = (gate.clone(), punctual.clone());
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()),
            ("go", _) => Reply::text(r.last_user()),
            ("looping", _) => Reply::call("get_subtask_result", json!({"task_id": TaskId::new()})),
            ("punctual", _) => Reply::text("in time").held_by(&in_time),
            (name, _) => Reply::text(format!("{name} after all")).held_by(&held),
        });
    let by_hand = ByHand::of(&engine);
    let parent = engine.post("go").await;
    let looped = "select count(*) from tasks where title = 'looping' and status = 'failed'";
    by_hand
        .dispatch_until("the looping one has ended by itself", async || {
            engine.count(looped).await == 1
        })
        .await;
    assert_eq!(engine.status(parent).await, WaitingForInput);
    let children = engine.children(parent).await;
    // The worker of the second one is lost, as far as anybody can see.
    sqlx::query(
        "update steps set lease_expires_at = now() - interval '1 second' where task_id = $1",
    )
    .bind(children[1].0)
    .execute(&engine.pool)
    .await
    .unwrap();
    by_hand.orchestrator.reap().await.unwrap();
    assert_eq!(engine.status(children[1]).await, Failed);
    punctual.open();
    engine.end(children[3]).await;
    sqlx::query("update awaits set scheduled_resume_at = now() where status = 'pending'")
        .execute(&engine.pool)
        .await
        .unwrap();
    // The signals of three are there and not matched yet: the time-out is first.
    by_hand.orchestrator.time_out().await.unwrap();
    by_hand.orchestrator.match_signals().await.unwrap();
    by_hand.orchestrator.dispatch().await.unwrap();
    assert_eq!(engine.status(parent).await, WaitingForInput);
    let moved = "select count(*) from awaits where status = 'pending'
        and scheduled_resume_at between now() + interval '5 seconds' and now() + interval '10 seconds'";
    assert_eq!(engine.count(moved).await, 1);
    gate.open();
    by_hand.stop().await;
    engine.resume();
    let (_, output) = engine.end(parent).await;
    for part in [
        "4 delegated tasks: 2 completed, 2 failed.",
        "> silent after all",
        "Reason: lease_lost",
        "Reason: iteration_limit",
        "> in time",
    ] {
        assert!(output.contains(part), "{part}: {output}");
    }
    engine.close().await;
}
