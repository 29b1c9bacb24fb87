//! What bounds a tree: how many of it live at once, and rights that only shrink on the way down.

use crate::{
    engine::Engine,
    forced::{agent, agent_with, delegate},
    stub_llm::{Gate, Recorded, Reply},
};
use reconvene::domain::task::TaskStatus::*;
use serde_json::json;

/// The result of the task's last call.
fn last_result(request: &Recorded) -> String {
    request.results().last().unwrap().1.to_owned()
}

// D-50: living descendants of the root count, at whatever depth; what has ended makes room.
#[tokio::test(flavor = "multi_thread")]
async fn a_tree_has_only_so_many_tasks_alive_at_once() {
    let engine = Engine::scripted_with(|c| c.spawn_tasks.max_tree_size = 3)
        .await
        .running();
    let mid = agent(&engine, "Mid").await;
    let (researcher, gate) = (engine.demo.researcher, Gate::new());
    let held = gate.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("root", 0) => Reply::call(
                "delegate_tasks",
                delegate(researcher, &["1", "2", "3", "4"]),
            ),
            ("root", 1) => Reply::call("delegate_tasks", delegate(mid, &["held", "mid"])),
            ("mid", 0) => Reply::call("delegate_tasks", delegate(researcher, &["a", "b"])),
            ("mid", 1) => Reply::call("delegate_tasks", delegate(researcher, &["a"])),
            ("mid", _) => Reply::text("mid is done"),
            ("root", 2) => Reply::call("delegate_tasks", delegate(researcher, &["x", "y", "z"])),
            ("root", _) => Reply::text(r.last_user()),
            ("held", _) => Reply::text("held").held_by(&held),
            (name, _) => Reply::text(name),
        });
    let root = engine.post("root").await;
    let mid_is_done = async || {
        let sql = "select count(*) from tasks where title = 'mid' and status = 'completed'";
        engine.count(sql).await == 1
    };
    engine.until_true("mid is done", mid_is_done).await;
    gate.open();
    let (status, output) = engine.end(root).await;
    assert_eq!(status, Completed);
    assert!(
        output.contains("3 delegated tasks: 3 completed."),
        "{output}"
    );
    let requests = engine.llm().requests();
    let said = |user: &str, turn| {
        let at = requests
            .iter()
            .find(|r| r.first_user() == user && r.turn() == turn);
        last_result(at.unwrap())
    };
    let refused = said("root", 1);
    assert!(
        refused.contains("make 4 more tasks where 0 are at work")
            && refused.contains("Nothing was created"),
        "{refused}"
    );
    assert!(
        said("mid", 1).contains("make 2 more tasks where 2 are at work"),
        "{}",
        said("mid", 1)
    );
    assert_eq!(
        engine.count("select count(*) from tasks").await,
        1 + 2 + 1 + 3
    );
    engine.close().await;
}

// D-54: a child that was made before the ban passes it on; at the last depth nobody may delegate.
#[tokio::test(flavor = "multi_thread")]
async fn rights_only_shrink_down_a_tree() {
    for (max_depth, ban) in [(3, true), (2, false)] {
        let engine = Engine::scripted_with(|c| c.spawn_tasks.max_depth = max_depth)
            .await
            .running();
        let (mid, low) = (agent(&engine, "Mid").await, agent(&engine, "Low").await);
        // It lists delegate_tasks itself; a list can not give what the tree forbids.
        let leaf = agent_with(&engine, "Leaf", |a| {
            a.tools = vec!["delegate_tasks".into(), "ask_user".into()];
        })
        .await;
        let gate = Gate::new();
        let held = gate.clone();
        engine
            .llm()
            .script(move |r| match (r.first_user(), r.turn()) {
                ("root", 0) => Reply::call("delegate_tasks", delegate(mid, &["child"])),
                ("child", 0) => {
                    Reply::call("delegate_tasks", delegate(leaf, &["grandchild"])).held_by(&held)
                }
                // It has no such tool, and calls it all the same.
                ("grandchild", 0) => Reply::call("delegate_tasks", delegate(low, &["never"])),
                ("grandchild", _) => Reply::text(last_result(r)),
                _ => Reply::text(r.last_user()),
            });
        let root = engine.post("root").await;
        engine.until(root, WaitingForInput).await;
        engine.llm().wait_for_requests(2).await;
        if ban {
            // For the whole of the tree that is there.
            sqlx::query("update tasks set source_metadata = $1")
                .bind(json!({"disable_delegation": true}))
                .execute(&engine.pool)
                .await
                .unwrap();
        }
        gate.open();
        let (_, output) = engine.end(root).await;
        assert!(
            output.contains("There is no tool \"delegate_tasks\""),
            "{output}"
        );
        let requests = engine.llm().requests();
        let offered = |user: &str| {
            let request = requests.iter().find(|r| r.first_user() == user).unwrap();
            (request.offers("delegate_tasks"), request.offers("ask_user"))
        };
        assert_eq!(offered("child"), (true, true));
        assert_eq!(offered("grandchild"), (false, true));
        assert_eq!(
            engine
                .count("select count(*) from tasks where title = 'never'")
                .await,
            0
        );
        engine.close().await;
    }
}
