//! Races of the waiting protocol, each in both orders, and deaths in the middle of it.

use crate::{
    engine::{Engine, Process, until},
    forced::{
        ByHand, Family, Hold, agent_with, decide_steps, delegate, expire_leases, match_only,
        resume_messages, stopping, until_waiting,
    },
    stub_llm::Reply,
};
use reconvene::{
    domain::{
        delegation::SummaryLimits,
        ids::{ProcessId, StepId},
        step::{Claim, StepKey},
        task::TaskStatus::*,
    },
    lifecycle::{dispatch::Dispatcher, match_signals::match_signals, time_out::time_out},
    store::steps::still_held,
};
use serde_json::json;
use tokio::task::JoinHandle;

const GROUP: &str = "select 1 from await_groups where task_id = $1 for no key update";
const RESULT_OF_CALL: &str =
    "new.kind = 'tool_call' and new.status = 'completed' and new.tool = 'delegate_tasks'";

/// A matcher that takes one signal.
fn matcher(engine: &Engine) -> JoinHandle<()> {
    let (pool, hub) = (engine.pool.clone(), engine.hub.clone());
    tokio::spawn(async move { match_signals(&pool, &hub, 1).await.map(drop).unwrap() })
}

fn sweeper(engine: &Engine) -> JoinHandle<()> {
    let (pool, hub) = (engine.pool.clone(), engine.hub.clone());
    tokio::spawn(async move { time_out(&pool, &hub, 100).await.map(drop).unwrap() })
}

/// A parent whose two children have ended, with nobody told yet.
async fn ended_pair(engine: &Engine, by_hand: &ByHand) -> Family {
    let family = Family::new(engine, &["a", "b"], Some(by_hand)).await;
    family.finish(engine, "a").await;
    family.finish(engine, "b").await;
    assert_eq!(
        engine
            .count("select count(*) from signals where status = 'pending'")
            .await,
        2
    );
    family
}

async fn one_event_and_one_wake_up(mut engine: Engine, by_hand: ByHand, family: Family) {
    let events = "select count(*) from orchestrator_events where kind = 'await_completed'";
    assert_eq!(engine.count(events).await, 1);
    by_hand.stop().await;
    engine.resume();
    engine.end(family.parent).await;
    assert_eq!(resume_messages(&engine, family.parent).await.len(), 1);
    assert_eq!(decide_steps(&engine, family.parent).await, 2);
    engine.close().await;
}

// W-4: two matchers meet at the group, the one with the earlier signal first, then the other one first.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_two_awaits_of_a_group_write_one_event() {
    for later_signal_first in [false, true] {
        let engine = Engine::scripted_with(|_| {}).await;
        let by_hand = ByHand::of(&engine);
        let family = ended_pair(&engine, &by_hand).await;
        let group = Hold::row(&engine.pool, GROUP, family.parent.0).await;
        let first = if later_signal_first {
            let signal = "select 1 from signals where dedup_key = ($1::uuid)::text for update";
            let signal = Hold::row(&engine.pool, signal, family.children[0].0).await;
            let first = matcher(&engine);
            until_waiting(&engine.pool, 1).await;
            signal.release().await;
            first
        } else {
            let first = matcher(&engine);
            until_waiting(&engine.pool, 1).await;
            first
        };
        let second = matcher(&engine);
        until_waiting(&engine.pool, 2).await;
        group.release().await;
        first.await.unwrap();
        second.await.unwrap();
        assert_eq!(
            engine
                .count("select count(*) from signals where status = 'matched'")
                .await,
            2
        );
        one_event_and_one_wake_up(engine, by_hand, family).await;
    }
}

// W-4, W-10: the same with the timeout processor on one side.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_and_a_sweep_that_settle_the_last_two_awaits_write_one_event() {
    for sweep_first in [false, true] {
        let engine = Engine::scripted_with(|_| {}).await;
        let by_hand = ByHand::of(&engine);
        let family = ended_pair(&engine, &by_hand).await;
        // The sweep sees both awaits, the matcher's signal is for one of them.
        sqlx::query("update awaits set scheduled_resume_at = now()")
            .execute(&engine.pool)
            .await
            .unwrap();
        let group = Hold::row(&engine.pool, GROUP, family.parent.0).await;
        let first = if sweep_first {
            sweeper(&engine)
        } else {
            matcher(&engine)
        };
        until_waiting(&engine.pool, 1).await;
        let second = if sweep_first {
            matcher(&engine)
        } else {
            sweeper(&engine)
        };
        until_waiting(&engine.pool, 2).await;
        group.release().await;
        first.await.unwrap();
        second.await.unwrap();
        one_event_and_one_wake_up(engine, by_hand, family).await;
    }
}

// D-22, W-3: two orchestrators that hold two events of one task.
#[tokio::test(flavor = "multi_thread")]
async fn two_dispatchers_resume_a_parent_once() {
    let engine = Engine::scripted_with(|_| {}).await;
    let by_hand = ByHand::of(&engine);
    let family = ended_pair(&engine, &by_hand).await;
    match_only(&engine).await;
    sqlx::query(
        "insert into orchestrator_events (workspace_id, task_id, kind, group_id)
        select workspace_id, task_id, 'await_completed', id from await_groups",
    )
    .execute(&engine.pool)
    .await
    .unwrap();
    let dispatch = || {
        let (pool, hub) = (engine.pool.clone(), engine.hub.clone());
        let dispatcher = Dispatcher {
            batch: 1,
            attempts_max: 10,
            resume_window: std::time::Duration::from_secs(15),
            summary: SummaryLimits {
                child_chars: 4000,
                total_chars: 60_000,
            },
        };
        tokio::spawn(async move {
            dispatcher
                .run_once(&pool, &hub, None)
                .await
                .map(drop)
                .unwrap()
        })
    };
    let parent = Hold::task(&engine.pool, family.parent).await;
    let first = dispatch();
    until_waiting(&engine.pool, 1).await;
    let second = dispatch();
    until_waiting(&engine.pool, 2).await;
    parent.release().await;
    first.await.unwrap();
    second.await.unwrap();
    engine.end(family.parent).await;
    assert_eq!(resume_messages(&engine, family.parent).await.len(), 1);
    assert_eq!(decide_steps(&engine, family.parent).await, 2);
    by_hand.stop().await;
}

// W-8: a transaction that is chosen as the victim of a deadlock is tried again, and nobody hears of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_is_tried_again() {
    let engine = Engine::scripted_with(|_| {}).await;
    let by_hand = ByHand::of(&engine);
    let family = ended_pair(&engine, &by_hand).await;
    // Awaits before their group: the wrong order, so that the matcher (group first) is caught.
    let awaits = "select 1 from awaits a join await_groups g on g.id = a.group_id where g.task_id = $1 for update of a";
    let mut wrong = Hold::row(&engine.pool, awaits, family.parent.0).await;
    wrong.run("set deadlock_timeout = '1min'").await; // the other one is to be the victim
    let (pool, hub) = (engine.pool.clone(), engine.hub.clone());
    let matching =
        tokio::spawn(async move { match_signals(&pool, &hub, 10).await.map(drop).unwrap() });
    until_waiting(&engine.pool, 1).await;
    wrong
        .run("select 1 from await_groups for update; commit")
        .await;
    matching.await.unwrap();
    let sql = "select deadlocks from pg_stat_database where datname = current_database()";
    until("the deadlock is counted", async || {
        engine.count(sql).await == 1
    })
    .await;

    // A child before its parent, against a stop of both.
    let mut wrong = Hold::task(&engine.pool, family.children[0]).await;
    wrong.run("set deadlock_timeout = '1min'").await;
    sqlx::query(
        "update tasks set status = 'running', finished_at = null, output = null where id = $1",
    )
    .bind(family.children[0].0)
    .execute(&mut wrong.conn)
    .await
    .unwrap();
    wrong.run("commit; begin").await;
    let child = format!(
        "select 1 from tasks where id = '{}' for no key update",
        family.children[0]
    );
    wrong.run(&child).await;
    let stop = stopping(&engine, family.parent, true);
    until_waiting(&engine.pool, 1).await;
    let parent = format!(
        "select 1 from tasks where id = '{}' for no key update; commit",
        family.parent
    );
    wrong.run(&parent).await;
    let receipt = stop.await.unwrap();
    assert_eq!(
        (receipt.status, receipt.stopped, receipt.left_alive),
        (Stopped, 2, 0)
    );
    until("the second deadlock is counted", async || {
        engine.count(sql).await == 2
    })
    .await;
    by_hand.stop().await;
}

// D-20: between the group's commit and the commit of the call's result there is nothing that could start a child.
#[tokio::test(flavor = "multi_thread")]
async fn no_child_can_start_before_its_await_is_committed() {
    let mut engine = Engine::scripted_with(|_| {}).await;
    let making = Hold::stall(&engine.pool, "before insert on await_groups", "true").await;
    let ending = Hold::stall(&engine.pool, "before update on steps", RESULT_OF_CALL).await;
    let args = delegate(engine.demo.researcher, &["a", "b", "c"]);
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()),
            _ => Reply::text("ok"),
        });
    let by_hand = ByHand::of(&engine);
    let parent = engine.post("go").await;
    by_hand.orchestrator.dispatch().await.unwrap();
    until_waiting(&engine.pool, 1).await;
    assert_eq!(
        engine.children(parent).await.len(),
        0,
        "children become visible with their group only"
    );
    making.release().await;
    until("children and awaits are there", async || {
        engine
            .count("select count(*) from awaits where status = 'pending'")
            .await
            == 3
    })
    .await;
    until_waiting(&engine.pool, 1).await;
    by_hand.orchestrator.dispatch().await.unwrap();
    assert_eq!(
        engine
            .count("select count(*) from orchestrator_events")
            .await,
        0
    );
    assert_eq!(
        engine
            .count("select count(*) from tasks where status = 'pending'")
            .await,
        3
    );
    assert_eq!(
        engine
            .count("select count(*) from steps where kind = 'decide_next_action'")
            .await,
        1
    );
    ending.release().await;
    by_hand.stop().await;
    engine.resume();
    engine.end(parent).await;
    engine.close().await;
}

/// A worker dies at the stall; another one goes on when the lease has run out, with settings changed by then.
async fn dies_at(
    event: &str,
    when: &str,
    made: usize,
    then: impl FnOnce(&mut reconvene::config::Config),
) {
    let mut engine = Engine::scripted_with(|_| {}).await;
    let stall = Hold::stall(&engine.pool, event, when).await;
    let args = delegate(engine.demo.researcher, &["a", "b", "c"]);
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()),
            ("go", _) => Reply::text(r.last_user()),
            (child, _) => Reply::text(child),
        });
    let process = Process::start(&engine.config, &engine.pool, true, true);
    let parent = engine.post("go").await;
    until_waiting(&engine.pool, 1).await;
    process.kill().await;
    stall.release().await;
    let before = engine.children(parent).await;
    assert_eq!(before.len(), made);
    expire_leases(&engine).await;
    then(&mut engine.config);
    engine.resume();
    let (status, output) = engine.end(parent).await;
    assert_eq!(status, Completed);
    assert!(
        output.contains("3 delegated tasks: 3 completed."),
        "{output}"
    );
    let after = engine.children(parent).await;
    assert!(after.len() == 3 && (made == 0 || after == before));
    for child in after {
        assert_eq!(decide_steps(&engine, child).await, 1);
    }
    assert_eq!(engine.count("select count(*) from await_groups").await, 1);
    assert_eq!(engine.llm().requests().len(), 5);
    let attempts = "select attempt::bigint from steps where kind = 'tool_call'";
    assert_eq!(engine.count(attempts).await, 2);
    engine.close().await;
}

// D-26, H-02: death between the children's transaction and the one that starts them.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_runs_again_adopts_its_children() {
    dies_at("before update on steps", RESULT_OF_CALL, 3, |_| {}).await;
}

// D-26: death within the children's transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_died_before_its_commit_makes_its_children_once() {
    dies_at("before insert on awaits", "true", 0, |_| {}).await;
}

// D-26: what has been made is adopted even when the call would be refused by now.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_runs_again_under_other_limits_adopts_its_children() {
    dies_at("before update on steps", RESULT_OF_CALL, 3, |c| {
        c.spawn_tasks.max_children_per_call = 1
    })
    .await;
    dies_at("before update on steps", RESULT_OF_CALL, 3, |c| {
        c.spawn_tasks.max_depth = 0
    })
    .await;
}

// H-02, D-20, D-22: one child answers at once, one fails at once, one is stopped before it could start.
#[tokio::test(flavor = "multi_thread")]
async fn children_that_end_before_the_parent_rests_are_counted() {
    let engine = Engine::scripted_with(|c| c.worker.max_parallel_tool_calls = 1).await;
    let broken = agent_with(&engine, "Broken", |a| a.instructions = "No model.".into()).await;
    let one = |agent, prompt| delegate(agent, &[prompt])["tasks"][0].clone();
    let args = json!({"tasks": [one(engine.demo.researcher, "quick"), one(broken, "fails"), one(engine.demo.writer, "stopped")]});
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()).and_call(
                "2",
                "get_subtask_result",
                r#"{"task_id": "00000000-0000-0000-0000-000000000000"}"#,
            ),
            ("go", _) => Reply::text(r.last_user()),
            ("fails", _) => Reply::status(400, "{}"),
            _ => Reply::text("ok"),
        });
    let window = Hold::stall(&engine.pool, "before update on steps", RESULT_OF_CALL).await;
    let engine = engine.running();
    let parent = engine.post("go").await;
    until_waiting(&engine.pool, 1).await;
    let children = engine.children(parent).await;
    assert_eq!(engine.stop(children[2], false).await.stopped, 1);
    until("its signal is matched inside the window", async || {
        engine
            .count("select count(*) from signals where status = 'matched'")
            .await
            == 1
    })
    .await;
    window.release().await;
    let (_, output) = engine.end(parent).await;
    let at = |part: &str| {
        output
            .find(part)
            .unwrap_or_else(|| panic!("{part}: {output}"))
    };
    assert!(
        at("Status: completed") < at("Status: failed")
            && at("Status: failed") < at("Status: stopped")
    );
    assert_eq!(engine.children(parent).await, children);
    assert_eq!(decide_steps(&engine, children[2]).await, 0);
    assert_eq!(resume_messages(&engine, parent).await.len(), 1);
    engine.close().await;
}

// T-11: a worker that looks at its leases between its own commit and the answer to it has lost nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_its_holder_has_completed_is_not_lost() {
    let engine = Engine::scripted().await;
    let task = engine.post("go").await;
    engine.end(task).await;
    let (step, attempt, worker): (uuid::Uuid, i32, uuid::Uuid) =
        sqlx::query_as("select id, attempt, worker_id from steps where task_id = $1")
            .bind(task.0)
            .fetch_one(&engine.pool)
            .await
            .unwrap();
    let claim = Claim {
        key: StepKey::of(engine.key(task), 1, 0),
        step: StepId(step),
        attempt,
        worker: ProcessId(worker),
        stop_generation: 0,
    };
    let older = Claim {
        attempt: attempt - 1,
        ..claim
    };
    let mut conn = engine.pool.acquire().await.unwrap();
    for (status, held) in [("completed", true), ("failed", false), ("cancelled", false)] {
        let sql = "update steps set status = $2 where task_id = $1";
        let change = sqlx::query(sql).bind(task.0).bind(status);
        change.execute(&mut *conn).await.unwrap();
        let still = still_held(&mut conn, &[claim, older]).await.unwrap();
        assert_eq!(still, if held { vec![claim] } else { vec![] }, "{status}");
    }
}
