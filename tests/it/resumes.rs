//! What a parent is told when what it waited for can not be read (W-17).

use crate::{
    engine::Engine,
    forced::{ByHand, Family, agent_with, match_only, resume_messages},
    stub_llm::Reply,
};
use reconvene::{domain::task::TaskStatus::*, lifecycle::submit::Recipient};
use serde_json::json;

async fn run(engine: &Engine, sql: &'static str) {
    sqlx::raw_sql(sql).execute(&engine.pool).await.unwrap();
}

/// A family whose children have ended and whose group has closed, before the parent is told.
async fn untold(engine: &Engine, by_hand: &ByHand) -> Family {
    let family = Family::new(engine, &["a", "b"], Some(by_hand)).await;
    family.finish_all(engine).await;
    match_only(engine).await;
    family
}

// W-17, W-19: a read error is tried again with growing pauses, and holds up no other task.
#[tokio::test(flavor = "multi_thread")]
async fn a_resume_that_can_not_be_read_is_tried_again() {
    let engine = Engine::scripted_with(|_| {}).await;
    let by_hand = ByHand::of(&engine);
    let family = untold(&engine, &by_hand).await;
    run(
        &engine,
        "alter table awaits rename column correlation_key to hidden",
    )
    .await;
    // Its model answers at once, and no wait is made or read for it.
    let other = engine.post("a").await;
    let attempts = "select coalesce(max(attempts), 0)::bigint from orchestrator_events";
    by_hand
        .dispatch_until(
            "it has been tried twice, and the other is done",
            async || engine.count(attempts).await >= 2 && engine.status(other).await == Completed,
        )
        .await;
    assert_eq!(engine.status(family.parent).await, WaitingForInput);
    assert_eq!(resume_messages(&engine, family.parent).await.len(), 0);
    let named = "select count(*) from orchestrator_events where error like '%correlation_key%' and not_before > created_at";
    assert_eq!(engine.count(named).await, 1);
    run(
        &engine,
        "alter table awaits rename column hidden to correlation_key",
    )
    .await;
    by_hand
        .dispatch_until("the parent has ended", async || {
            engine.status(family.parent).await == Completed
        })
        .await;
    let told = resume_messages(&engine, family.parent).await;
    assert_eq!(told.len(), 1);
    assert!(
        told[0].starts_with("Results of the 2 delegated tasks: 2 completed."),
        "{told:?}"
    );
    by_hand.stop().await;
    engine.close().await;
}

// W-17: past the window the parent resumes with all its children, or with one line; never with nothing.
#[tokio::test(flavor = "multi_thread")]
async fn past_the_window_a_parent_resumes_with_what_can_be_read() {
    for (broken, expected) in [
        (
            "alter table awaits rename column correlation_key to hidden",
            vec![
                "could not be read. Here is every task",
                "2 delegated tasks: 2 completed.",
                "> result of b",
            ],
        ),
        // Both queries ask when a child was created.
        (
            "alter table tasks rename column created_at to hidden",
            vec!["could not be gathered. Read each of them with get_subtask_result"],
        ),
        // The group has closed, and its awaits are gone.
        (
            "delete from awaits",
            vec!["could not be read. Here is every task", "> result of a"],
        ),
        // The group itself is gone.
        (
            "delete from awaits; delete from await_groups",
            vec!["could not be read. Here is every task", "> result of a"],
        ),
    ] {
        let engine =
            Engine::scripted_with(|c| c.orchestrator.resume_retry_window_seconds = 1).await;
        let by_hand = ByHand::of(&engine);
        let family = untold(&engine, &by_hand).await;
        run(&engine, broken).await;
        let begun = std::time::Instant::now();
        by_hand
            .dispatch_until("the parent has ended", async || {
                engine.status(family.parent).await == Completed
            })
            .await;
        assert!(
            begun.elapsed().as_millis() >= 900,
            "{broken}: {:?}",
            begun.elapsed()
        );
        let told = resume_messages(&engine, family.parent).await;
        assert_eq!(told.len(), 1, "{broken}");
        for part in expected {
            assert!(told[0].contains(part), "{broken}: {told:?}");
        }
        let events = "select count(*) from orchestrator_events";
        assert_eq!(engine.count(events).await, 0, "{broken}");
        by_hand.stop().await;
    }
}

// W-17: a wait that is not for children.
#[tokio::test(flavor = "multi_thread")]
async fn past_the_window_a_wait_that_can_not_be_read_is_over_all_the_same() {
    let engine = Engine::scripted_with(|c| c.orchestrator.max_attempts = 1).await;
    let by_hand = ByHand::of(&engine);
    engine.llm().script(|r| match r.turn() {
        0 => Reply::call("wait_until", json!({"seconds": 0.001})),
        _ => Reply::text(r.last_user()),
    });
    let agent = agent_with(&engine, "Waiter", |a| a.tools = vec!["wait_until".into()]).await;
    let message = engine.message(Recipient::Agent(agent), "go");
    let task = engine.submit(message).await.task;
    by_hand
        .dispatch_until("it waits", async || {
            engine.status(task).await == WaitingForInput
        })
        .await;
    by_hand.orchestrator.time_out().await.unwrap();
    run(
        &engine,
        "alter table awaits rename column payload to hidden",
    )
    .await;
    by_hand
        .dispatch_until("it has ended", async || {
            engine.status(task).await == Completed
        })
        .await;
    let told = resume_messages(&engine, task).await;
    assert_eq!(
        told,
        ["What you waited for is over, but what came of it could not be read."]
    );
    by_hand.stop().await;
    engine.close().await;
}
