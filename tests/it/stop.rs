//! Stop: alone and with subtasks, and against work in flight.

use crate::{
    engine::{Engine, Process, until},
    forced::{Family, agent, ask, delegate, resume_messages},
    stub_llm::{Gate, Reply},
};
use reconvene::{
    domain::{
        ids::TaskId,
        task::TaskStatus::{self, *},
    },
    lifecycle::stop::{StopReceipt, stop},
};
use serde_json::json;
use std::time::{Duration, Instant};

pub fn receipt(status: TaskStatus, stopped: u32) -> StopReceipt {
    StopReceipt {
        status,
        stopped,
        left_alive: 0,
    }
}

/// Nothing of these tasks runs or waits any more.
pub async fn at_rest(engine: &Engine) {
    assert_eq!(
        engine
            .count("select count(*) from steps where status in ('queued', 'running')")
            .await,
        0
    );
    assert_eq!(
        engine
            .count("select count(*) from awaits where status = 'pending'")
            .await,
        0
    );
}

// T-30: a parent alone; its children run on, and nobody hears of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_alone_ends_the_task_and_its_waits_only() {
    let engine = Engine::scripted().await;
    let family = Family::new(&engine, &["a", "b"], None).await;
    assert_eq!(engine.stop(family.parent, false).await, receipt(Stopped, 1));
    at_rest_but_children(&engine, &family).await;
    family.finish_all(&engine).await;
    for child in &family.children {
        assert_eq!(engine.status(*child).await, Completed);
    }
    until("signals are settled", async || {
        engine
            .count("select count(*) from signals where status = 'no_match'")
            .await
            == 2
    })
    .await;
    assert_eq!(engine.status(family.parent).await, Stopped);
    assert_eq!(resume_messages(&engine, family.parent).await.len(), 0);
    // T-35
    assert_eq!(engine.stop(family.parent, false).await, receipt(Stopped, 0));
    assert_eq!(engine.llm().requests().len(), 3);
    engine.close().await;
}

async fn at_rest_but_children(engine: &Engine, family: &Family) {
    assert_eq!(
        engine
            .count("select count(*) from awaits where status = 'cancelled'")
            .await,
        2
    );
    assert_eq!(
        engine
            .count("select count(*) from await_groups where status = 'cancelled'")
            .await,
        1
    );
    let active =
        "select count(*) from steps where task_id = $1 and status in ('queued', 'running')";
    assert_eq!(ask::<i64>(engine, active, family.parent).await, 0);
}

// T-30: the model call is given up within 2 s, also by a worker that no hint reaches.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_aborts_a_running_model_call() {
    for hinted in [true, false] {
        let mut engine = Engine::scripted_with(|_| {}).await;
        let gate = Gate::new();
        let held = gate.clone();
        engine
            .llm()
            .script(move |_| Reply::text("late").held_by(&held));
        let process = (!hinted).then(|| Process::start(&engine.config, &engine.pool, true, true));
        if hinted {
            engine.resume();
        }
        let task = engine.post("go").await;
        engine.llm().wait_for_requests(1).await;
        let begun = Instant::now();
        assert_eq!(engine.stop(task, false).await, receipt(Stopped, 1));
        until("the call is aborted", async || engine.llm().aborted() == 1).await;
        assert!(
            begun.elapsed() < Duration::from_secs(2),
            "{:?}",
            begun.elapsed()
        );
        gate.open();
        at_rest(&engine).await;
        drop(process);
        engine.close().await;
    }
}

// T-30: a hint that comes late, when the task has been taken up again, takes no work away.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_hint_of_a_stop_harms_nothing() {
    let engine = Engine::scripted().await;
    let gate = Gate::new();
    let held = gate.clone();
    engine
        .llm()
        .script(move |r| Reply::text(r.last_user()).held_by(&held));
    let (task, other) = (engine.post("first").await, engine.post("other").await);
    engine.llm().wait_for_requests(2).await;
    engine.stop(task, false).await;
    engine.append(task, "again").await;
    engine.llm().wait_for_requests(3).await;
    engine.hub.tasks_stopped([task]);
    // Hints are taken in order: when this one has been, so has that one.
    engine.stop(other, false).await;
    until("both stopped calls are aborted", async || {
        engine.llm().aborted() == 2
    })
    .await;
    gate.open();
    assert_eq!(engine.end(task).await, (Completed, "again".to_owned()));
    assert_eq!(engine.llm().requests().len(), 3, "it was not asked anew");
    engine.close().await;
}

/// Under the root: "mid", which waits for "leaf", which asks its model; "later", which is queued; "free", which is async.
async fn tree(engine: &Engine) -> (TaskId, Gate) {
    let mid = agent(engine, "Mid").await;
    let gate = Gate::new();
    let (held, demo) = (gate.clone(), engine.demo);
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("root", 0) => {
                let mut free = delegate(demo.writer, &["free"]);
                free["async"] = json!(true);
                let mut waited = delegate(mid, &["mid"]);
                let later = delegate(demo.researcher, &["later"])["tasks"][0].clone();
                waited["tasks"].as_array_mut().unwrap().push(later);
                Reply::text("")
                    .and_call("1", "delegate_tasks", &free.to_string())
                    .and_call("2", "delegate_tasks", &waited.to_string())
            }
            ("mid", 0) => Reply::call("delegate_tasks", delegate(demo.researcher, &["leaf"])),
            ("root" | "mid", _) => Reply::text(r.last_user()),
            ("later", _) => Reply::status(429, "{}").header("retry-after", "300"),
            (_, _) => Reply::text("late").held_by(&held),
        });
    let root = engine.post("root").await;
    engine.llm().wait_for_requests(5).await;
    until("the tree stands", async || {
        engine
            .count("select count(*) from steps where status = 'queued'")
            .await
            == 1
            && engine
                .count("select count(*) from tasks where status = 'waiting_for_input'")
                .await
                == 2
    })
    .await;
    (root, gate)
}

async fn named(engine: &Engine, title: &str) -> TaskId {
    let id = sqlx::query_scalar("select id from tasks where title = $1").bind(title);
    TaskId(id.fetch_one(&engine.pool).await.unwrap())
}

// T-31, H-10: running, queued, waiting and async descendants are all stopped; nobody inside is woken.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_with_subtasks_ends_the_whole_tree() {
    let engine = Engine::scripted().await;
    let (root, gate) = tree(&engine).await;
    assert_eq!(engine.stop(root, true).await, receipt(Stopped, 5));
    at_rest(&engine).await;
    assert_eq!(
        engine
            .count("select count(*) from tasks where status = 'stopped'")
            .await,
        5
    );
    assert_eq!(
        engine
            .count("select count(*) from await_groups where status = 'cancelled'")
            .await,
        2
    );
    until("both model calls are aborted", async || {
        engine.llm().aborted() == 2
    })
    .await;
    assert_eq!(engine.stop(root, true).await, receipt(Stopped, 0)); // T-35
    gate.open();
    until("signals are settled", async || {
        engine
            .count("select count(*) from signals where status = 'no_match'")
            .await
            == 4
    })
    .await;
    assert_eq!(
        engine
            .count("select count(*) from task_items where kind = 'resume_message'")
            .await,
        0
    );
    assert_eq!(engine.llm().requests().len(), 5);
    engine.close().await;
}

// T-31: the parent outside the stopped tree is woken, when the rest of its group has ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_parent_outside_the_stopped_tree_is_woken() {
    let engine = Engine::scripted().await;
    let (root, gate) = tree(&engine).await;
    let mid = named(&engine, "mid").await;
    assert_eq!(engine.stop(mid, true).await, receipt(Stopped, 2));
    assert_eq!(engine.status(named(&engine, "leaf").await).await, Stopped);
    assert_eq!(
        engine.stop(named(&engine, "later").await, false).await,
        receipt(Stopped, 1)
    );
    let (status, output) = engine.end(root).await;
    assert_eq!(status, Completed);
    assert!(output.contains("2 delegated tasks: 2 stopped."), "{output}");
    assert_eq!(resume_messages(&engine, root).await.len(), 1);
    assert_eq!(resume_messages(&engine, mid).await.len(), 0);
    assert_eq!(engine.status(named(&engine, "free").await).await, Running);
    gate.open();
    engine.close().await;
}

// T-32: a root that has ended still leads to its active descendants.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_of_an_ended_root_stops_its_descendants() {
    let engine = Engine::scripted().await;
    let gate = Gate::new();
    let (held, mut args) = (gate.clone(), delegate(engine.demo.researcher, &["a", "b"]));
    args["async"] = json!(true);
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()),
            ("go", _) => Reply::text("done"),
            _ => Reply::text("late").held_by(&held),
        });
    let root = engine.post("go").await;
    engine.end(root).await;
    engine.llm().wait_for_requests(4).await;
    assert_eq!(engine.stop(root, false).await, receipt(Completed, 0));
    assert_eq!(engine.stop(root, true).await, receipt(Completed, 2));
    at_rest(&engine).await;
    assert_eq!(engine.status(root).await, Completed);
    gate.open();
    engine.close().await;
}

// P-5: what is not the workspace's own is not there.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_reaches_tasks_of_its_own_workspace_only() {
    let engine = Engine::scripted_with(|_| {}).await;
    let task = engine.post("go").await;
    let other = reconvene::lifecycle::agents::create_workspace(&engine.pool, "other", "Other")
        .await
        .unwrap();
    for (workspace, id) in [(other, task), (engine.workspace(), TaskId::new())] {
        assert_eq!(
            stop(&engine.pool, &engine.hub, workspace, id, true)
                .await
                .unwrap(),
            None
        );
    }
    assert_eq!(engine.status(task).await, Pending);
}
