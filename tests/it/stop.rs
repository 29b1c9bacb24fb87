//! Stop: alone and with subtasks, against work in flight, late results and spawns.

use crate::{
    engine::{Engine, until},
    forced::{
        Family, Hold, Machine, agent, ask, decide_steps, delegate, expire_leases, repeats,
        resume_messages, stopping, until_waiting,
    },
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

fn receipt(status: TaskStatus, stopped: u32) -> StopReceipt {
    StopReceipt {
        status,
        stopped,
        left_alive: 0,
    }
}

/// Nothing of these tasks runs or waits any more.
async fn at_rest(engine: &Engine) {
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
        let machine = (!hinted).then(|| Machine::start(&engine, true, true));
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
        drop(machine);
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

/// The terminal status items of a task, and whether it has an assistant message.
async fn ends(engine: &Engine, task: TaskId) -> (i64, i64) {
    let terminal = "select count(*) from task_items where task_id = $1 and kind = 'status'
        and data ->> 'status' in ('completed', 'failed', 'stopped')";
    let said = "select count(*) from task_items where task_id = $1 and kind = 'assistant_message'";
    (
        ask(engine, terminal, task).await,
        ask(engine, said, task).await,
    )
}

// H-11, T-11: the stop is first at the task's row, the worker's result right behind it; then the other way round.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_result_and_a_stop_end_a_task_once() {
    for stop_first in [true, false] {
        let engine = Engine::scripted().await;
        let gate = Gate::new();
        let held = gate.clone();
        engine
            .llm()
            .script(move |_| Reply::text("answer").held_by(&held));
        let task = engine.post("go").await;
        engine.llm().wait_for_requests(1).await;
        let row = Hold::task(&engine.pool, task).await;
        let stopped = match stop_first {
            true => {
                let stopped = stopping(&engine, task, false);
                until_waiting(&engine.pool, 1).await;
                gate.open();
                until_waiting(&engine.pool, 2).await;
                stopped
            }
            false => {
                gate.open();
                until_waiting(&engine.pool, 1).await;
                let stopped = stopping(&engine, task, false);
                until_waiting(&engine.pool, 2).await;
                stopped
            }
        };
        row.release().await;
        let (status, stopped_n, said) = if stop_first {
            (Stopped, 1, 0)
        } else {
            (Completed, 0, 1)
        };
        assert_eq!(stopped.await.unwrap(), receipt(status, stopped_n));
        assert_eq!(engine.llm().aborted(), 0, "the reply had come");
        until("the worker is done", async || {
            engine
                .count("select count(*) from steps where status = 'running'")
                .await
                == 0
        })
        .await;
        assert_eq!(engine.status(task).await, status);
        assert_eq!(ends(&engine, task).await, (1, said));
        engine.close().await;
    }
}

// H-11: in whatever order; the receipt tells the truth, and nothing is rewritten.
#[tokio::test(flavor = "multi_thread")]
async fn stops_that_race_with_answers_tell_the_truth() {
    let engine = Engine::scripted().await;
    let n = repeats(30);
    let gate = Gate::new();
    let held = gate.clone();
    engine.llm().script(move |r| {
        Reply::text(r.first_user())
            .held_by(&held)
            .after(Duration::from_millis(fastrand::u64(0..50)))
    });
    let mut tasks = Vec::new();
    for _ in 0..n {
        tasks.push(engine.post("go").await);
    }
    engine.llm().wait_for_requests(n).await;
    gate.open();
    let mut stopped = 0;
    for task in &tasks {
        let receipt = engine.stop(*task, false).await;
        assert_eq!(receipt.left_alive, 0);
        assert_eq!(receipt.stopped == 1, receipt.status == Stopped);
        assert_eq!(engine.status(*task).await, receipt.status);
        stopped += receipt.stopped as i64;
    }
    engine.llm().wait_until_idle().await;
    assert_eq!(
        engine
            .count("select count(*) from tasks where status = 'stopped'")
            .await,
        stopped
    );
    for task in tasks {
        let said = i64::from(engine.status(task).await == Completed);
        assert_eq!(ends(&engine, task).await, (1, said));
    }
    engine.close().await;
}

// T-33: the stop is first at the parent's row: the spawn finds it stopped, and makes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_spawn_behind_a_stop_is_refused() {
    let engine = Engine::scripted_with(|_| {}).await;
    let args = delegate(engine.demo.researcher, &["a", "b"]).to_string();
    engine.llm().script(move |_| {
        Reply::text("")
            .and_call(
                "1",
                "get_subtask_result",
                r#"{"task_id": "00000000-0000-0000-0000-000000000000"}"#,
            )
            .and_call("2", "delegate_tasks", &args)
    });
    // Holds the parent's row with the first call's result, so that the stop can line up before the second call.
    let first_call = Hold::stall(
        &engine.pool,
        "before update on steps",
        "new.ordinal = 1 and new.status = 'completed'",
    )
    .await;
    let second_call = Hold::stall(
        &engine.pool,
        "before insert on tasks",
        "new.parent_task_id is not null",
    )
    .await;
    let engine = engine.running();
    let parent = engine.post("go").await;
    until_waiting(&engine.pool, 1).await;
    let stopped = stopping(&engine, parent, true);
    until_waiting(&engine.pool, 2).await;
    first_call.release().await;
    assert_eq!(stopped.await.unwrap(), receipt(Stopped, 1));
    second_call.release().await;
    at_rest(&engine).await;
    assert_eq!(engine.children(parent).await, []);
    engine.close().await;
}

// T-33: the spawn is first: its children are there when the stop gets the row, and are stopped.
#[tokio::test(flavor = "multi_thread")]
async fn children_spawned_before_a_stop_are_stopped() {
    for subtasks in [true, false] {
        let engine = Engine::scripted_with(|_| {}).await;
        let args = delegate(engine.demo.researcher, &["a", "b"]);
        engine.llm().script(move |r| match r.first_user() {
            "go" => Reply::call("delegate_tasks", args.clone()),
            _ => Reply::text("never"),
        });
        let spawn = Hold::stall(&engine.pool, "before insert on await_groups", "true").await;
        // Whatever comes first after the spawn, the children's start waits for the stop.
        let start = Hold::stall(
            &engine.pool,
            "before insert on orchestrator_events",
            "new.kind = 'turn_committed'",
        )
        .await;
        let engine = engine.running();
        let parent = engine.post("go").await;
        until_waiting(&engine.pool, 1).await;
        let stopped = stopping(&engine, parent, subtasks);
        until_waiting(&engine.pool, 2).await;
        spawn.release().await;
        until("the stop or the start has the row", async || {
            stopped.is_finished() || engine.count("select count(*) from awaits").await == 2
        })
        .await;
        start.release().await;
        // Alone, a stop takes the children that a call has made and not started; had they been started, they run on.
        let told = stopped.await.unwrap();
        assert_eq!((told.status, told.left_alive), (Stopped, 0));
        let children = engine.children(parent).await;
        assert_eq!(children.len(), 2);
        for child in children {
            let (status, _) = engine.end(child).await;
            assert!(
                status == Stopped || (!subtasks && told.stopped == 1),
                "{status}"
            );
        }
        assert_eq!(resume_messages(&engine, parent).await.len(), 0);
        engine.close().await;
    }
}

// D-26, T-33: children of a call that died before it could start them do not stay behind: neither when the parent is
// stopped alone, nor when the step is given up.
#[tokio::test(flavor = "multi_thread")]
async fn unstarted_children_of_a_dead_call_end_with_it() {
    for by_stop in [true, false] {
        let mut engine = Engine::scripted_with(|_| {}).await;
        let args = delegate(engine.demo.researcher, &["a", "b"]);
        engine
            .llm()
            .script(move |_| Reply::call("delegate_tasks", args.clone()));
        let stall = Hold::stall(
            &engine.pool,
            "before update on steps",
            "new.ordinal = 1 and new.status = 'completed'",
        )
        .await;
        let machine = Machine::start(&engine, true, true);
        let parent = engine.post("go").await;
        until_waiting(&engine.pool, 1).await;
        machine.kill(&engine).await;
        stall.release().await;
        let children = engine.children(parent).await;
        assert_eq!(children.len(), 2);
        if by_stop {
            assert_eq!(engine.stop(parent, false).await, receipt(Stopped, 3));
        } else {
            sqlx::query("update steps set lost_leases = 2 where status = 'running'")
                .execute(&engine.pool)
                .await
                .unwrap();
            expire_leases(&engine).await;
        }
        engine.resume();
        let (status, _) = engine.end(parent).await;
        assert_eq!(status, if by_stop { Stopped } else { Failed });
        for child in children {
            assert_eq!(engine.end(child).await.0, Stopped);
            assert_eq!(decide_steps(&engine, child).await, 0);
        }
        assert_eq!(engine.llm().requests().len(), 1);
        engine.close().await;
    }
}
