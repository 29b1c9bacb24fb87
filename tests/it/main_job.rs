//! The main job: an agent delegates, rests, and wakes once with everybody's results.

use crate::{engine::Engine, forced::delegate, stub_llm::Reply};
use reconvene::domain::task::TaskStatus::*;

// D-20, D-21, D-22, W-1, W-3
#[tokio::test(flavor = "multi_thread")]
async fn a_parent_delegates_rests_and_wakes_once_with_all_results() {
    let engine = Engine::scripted().await;
    let researcher = engine.demo.researcher;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("plan", 0) => Reply::call(
                "delegate_tasks",
                delegate(researcher, &["one", "two", "three"]),
            ),
            ("plan", _) => Reply::text(format!("done: {}", r.last_user())),
            (child, _) => Reply::text(format!("result of {child}")),
        });
    let parent = engine.post("plan").await;
    let (status, output) = engine.end(parent).await;
    assert_eq!(status, Completed, "{output}");
    for child in ["one", "two", "three"] {
        assert!(
            output.contains(&format!("> result of {child}\n")),
            "{output}"
        );
    }
    assert_eq!(engine.children(parent).await.len(), 3);
    assert_eq!(engine.llm().requests().len(), 5);
    engine.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_offline_model_runs_a_delegation() {
    let engine = Engine::offline().await;
    let parent = engine
        .post("Please find out:\n- the weather in Rome\n- the price of tea\n- a good opening line")
        .await;
    let (status, output) = engine.end(parent).await;
    assert_eq!(status, Completed);
    assert_eq!(engine.children(parent).await.len(), 3, "{output}");
    assert!(output.contains("offline demo"), "{output}");
    engine.close().await;
}
