//! Stop against late results, spawns and calls that died, each order forced.

use crate::{
    engine::{Engine, Process, soon, until},
    forced::{
        Hold, ask, decide_steps, delegate, expire_leases, repeats, resume_messages, setup,
        stopping, until_waiting,
    },
    stop::{at_rest, receipt},
    stub_llm::{Gate, Reply},
};
use reconvene::{
    domain::{
        delegation::{Delegator, Limits, plan},
        ids::{ProcessId, StepId, TaskId},
        step::{Claim, StepKey},
        task::TaskStatus::*,
    },
    lifecycle::{
        self,
        delegate::{Delegated, Request},
    },
};
use std::time::Duration;

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
        assert_eq!(
            soon("the stop", stopped).await.unwrap(),
            receipt(status, stopped_n)
        );
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

// T-33, T-11: a spawn and a stop meet at the parent's row. The spawn is made by hand, with the claim of a worker that has
// died, so that both orders can be forced: behind the stop it makes nothing, before it what it has made is stopped.
#[tokio::test(flavor = "multi_thread")]
async fn a_spawn_and_a_stop_leave_no_orphan() {
    for (stop_first, subtasks) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut engine = Engine::scripted_with(|_| {}).await;
        let args = delegate(engine.demo.researcher, &["a", "b"]);
        let called = args.clone();
        engine
            .llm()
            .script(move |_| Reply::call("delegate_tasks", called.clone()));
        let stall = Hold::stall(&engine.pool, "before insert on tasks", "new.ordinal = 0").await;
        let process = Process::start(&engine.config, &engine.pool, true, true);
        let parent = engine.post("go").await;
        until_waiting(&engine.pool, 1).await;
        process.kill().await;
        stall.release().await;
        assert_eq!(engine.children(parent).await, []);

        let (step, worker): (uuid::Uuid, uuid::Uuid) =
            sqlx::query_as("select id, worker_id from steps where task_id = $1 and ordinal = 1")
                .bind(parent.0)
                .fetch_one(&engine.pool)
                .await
                .unwrap();
        let claim = Claim {
            key: StepKey::of(engine.key(parent), 1, 1),
            step: StepId(step),
            attempt: 1,
            worker: ProcessId(worker),
            stop_generation: 0,
        };
        let by = Delegator {
            agent: engine.demo.lead,
            depth: 0,
        };
        let limits = Limits {
            max_depth: 3,
            max_children_per_call: 250,
            default_timeout_minutes: 60,
            max_timeout_minutes: 1440,
        };
        let plan = plan(&serde_json::from_value(args).unwrap(), by, &limits).unwrap();
        let pool = engine.pool.clone();
        let setup = setup(&pool, &claim).await;
        let request = Request { claim, setup, plan };
        let spawn = async move { lifecycle::delegate::delegate(&pool, &[request], 5000).await };

        let row = Hold::task(&engine.pool, parent).await;
        let (spawned, stopped) = if stop_first {
            let stopped = stopping(&engine, parent, subtasks);
            until_waiting(&engine.pool, 1).await;
            (tokio::spawn(spawn), stopped)
        } else {
            let spawned = tokio::spawn(spawn);
            until_waiting(&engine.pool, 1).await;
            (spawned, stopping(&engine, parent, subtasks))
        };
        until_waiting(&engine.pool, 2).await;
        row.release().await;
        let told = soon("the stop", stopped).await.unwrap();
        let made = &soon("the spawn", spawned).await.unwrap().unwrap()[0];
        assert_eq!(matches!(made, Delegated::Stale), stop_first, "{made:?}");
        let born = if stop_first { 0 } else { 2 };
        assert_eq!(told, receipt(Stopped, 1 + born));
        at_rest(&engine).await;
        let children = engine.children(parent).await;
        assert_eq!(children.len(), born as usize);
        for child in children {
            assert_eq!(engine.status(child).await, Stopped);
        }
        engine.resume();
        engine.close().await;
    }
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
        let told = soon("the stop", stopped).await.unwrap();
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
        let process = Process::start(&engine.config, &engine.pool, true, true);
        let parent = engine.post("go").await;
        until_waiting(&engine.pool, 1).await;
        process.kill().await;
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
