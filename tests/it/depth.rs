//! Trees: deeper than there are workers, and agents that would delegate for ever.

use crate::{
    engine::{Engine, until},
    forced::{agent, agent_with, ask, delegate},
    stub_llm::{Gate, Reply},
};
use reconvene::{
    domain::{agent::AgentDefinition, task::TaskStatus::*},
    lifecycle::submit::Recipient,
};

// H-08: three levels of two with one slot and two connections; a parent that waits holds neither.
#[tokio::test(flavor = "multi_thread")]
async fn a_tree_deeper_than_the_slots_comes_to_its_end() {
    let engine = Engine::scripted_with(|c| {
        c.worker.concurrency = 1;
        c.database.max_connections = 2;
    })
    .await;
    let level = [
        agent(&engine, "A").await,
        agent(&engine, "B").await,
        agent(&engine, "C").await,
    ];
    let gate = Gate::new();
    let held = gate.clone();
    engine.llm().script(move |r| {
        let depth = r.first_user().len() - 4;
        let (left, right) = (
            format!("{}l", r.first_user()),
            format!("{}r", r.first_user()),
        );
        match (r.turn(), level.get(depth)) {
            (0, Some(next)) => Reply::call("delegate_tasks", delegate(*next, &[&left, &right])),
            (0, None) if r.first_user().starts_with("stop") => Reply::text("leaf").held_by(&held),
            _ => Reply::text("done"),
        }
    });
    let engine = engine.running();
    let root = engine.post("tree").await;
    assert_eq!(engine.end(root).await, (Completed, "done".to_owned()));
    let sql = "select count(*) from tasks where root_task_id = $1 and status = 'completed'";
    assert_eq!(ask::<i64>(&engine, sql, root).await, 15);

    let root = engine.post("stop").await;
    until("a leaf of the second tree runs", async || {
        engine
            .llm()
            .requests()
            .iter()
            .any(|r| r.first_user().len() == 7 && r.first_user().starts_with("stop"))
    })
    .await;
    let receipt = engine.stop(root, true).await;
    assert_eq!((receipt.status, receipt.left_alive), (Stopped, 0));
    let sql = "select count(*) from tasks where root_task_id = $1 and status not in ('stopped', 'completed')";
    assert_eq!(ask::<i64>(&engine, sql, root).await, 0);
    gate.open();
    engine.close().await;
}

// D-11, H-09: agents that always delegate to the next one end at the depth that the database counts.
#[tokio::test(flavor = "multi_thread")]
async fn a_ring_of_agents_is_bounded_by_depth_and_iterations() {
    for ring in [2, 3] {
        let engine = Engine::scripted().await;
        let mut agents = Vec::new();
        for n in 0..ring {
            let set = |a: &mut AgentDefinition| {
                a.instructions = format!("I am number {n}.");
                a.max_iterations = 2;
            };
            agents.push(agent_with(&engine, "Ring", set).await);
        }
        let targets = agents.clone();
        engine.llm().script(move |r| {
            let me = (0..ring)
                .find(|n| r.system().contains(&format!("I am number {n}.")))
                .unwrap();
            Reply::call(
                "delegate_tasks",
                delegate(targets[(me + 1) % ring], &["again"]),
            )
        });
        let root = engine
            .submit(engine.message(Recipient::Agent(agents[0]), "go"))
            .await
            .task;
        let (status, error) = engine.end(root).await;
        assert_eq!(status, Failed);
        assert!(error.contains("iteration_limit"), "{error}");
        // 1 + 2 + 4 + 8 tasks of two requests each.
        assert_eq!(engine.llm().requests().len(), 30, "a ring of {ring}");
        assert_eq!(
            engine
                .count("select max(spawn_depth)::bigint from tasks")
                .await,
            3
        );
        assert_eq!(
            engine
                .count("select count(*) from tasks where finished_at is null")
                .await,
            0
        );
        let deepest = engine
            .llm()
            .requests()
            .into_iter()
            .filter(|r| !r.offers("delegate_tasks"))
            .count();
        assert_eq!(
            deepest, 16,
            "at the depth limit the tool is not even offered"
        );
        engine.close().await;
    }
}
