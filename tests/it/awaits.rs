//! Awaits, groups and signals: who writes them, what they match, and what their time means.

use crate::{
    engine::{Engine, until},
    forced::{
        ByHand, Family, Hold, agent_with, decide_steps, delegate, expire_leases, match_only,
        resume_messages,
    },
    stub_llm::{Gate, Reply},
};
use reconvene::{
    domain::{
        ids::{AgentId, GroupId, StepId, TaskId, WorkspaceId},
        task::{TaskKey, TaskStatus::*},
        task_await::{SourceType, Strategy},
    },
    lifecycle::agents::create_workspace,
    runtime::Progress,
    store::{
        self,
        awaits::{NewGroup, insert_groups},
    },
};
use serde_json::json;

/// A group of the task for these keys, made as the lifecycle makes it.
async fn group(
    engine: &Engine,
    task: TaskKey,
    source_type: SourceType,
    window_seconds: Option<i32>,
    keys: &[&str],
) -> Result<GroupId, store::Error> {
    let group = NewGroup {
        id: GroupId::new(),
        task,
        step: StepId::new(),
        source_type,
        strategy: Strategy::AllRequired,
        window_seconds,
        correlation_keys: keys.iter().map(|k| k.to_string()).collect(),
    };
    let mut conn = engine.pool.acquire().await.unwrap();
    let id = group.id;
    insert_groups(&mut conn, &[group]).await.map(|()| id)
}

async fn signal(
    engine: &Engine,
    workspace: WorkspaceId,
    source: &str,
    key: &str,
) -> Result<(), store::Error> {
    sqlx::query("insert into signals (workspace_id, source_type, dedup_key, correlation_key) values ($1, $2, $3, $3)")
        .bind(workspace.0)
        .bind(source)
        .bind(key)
        .execute(&engine.pool)
        .await?;
    Ok(())
}

/// The statuses of the task's awaits by group and ordinal.
async fn awaits(engine: &Engine, task: TaskId) -> Vec<String> {
    sqlx::query_scalar(
        "select a.status from awaits a join await_groups g on g.id = a.group_id where g.task_id = $1
         order by g.created_at, g.id, a.ordinal",
    )
    .bind(task.0)
    .fetch_all(&engine.pool)
    .await
    .unwrap()
}

async fn make_due(engine: &Engine) {
    sqlx::query("update awaits set scheduled_resume_at = now() - interval '1 minute' where status = 'pending'")
        .execute(&engine.pool)
        .await
        .unwrap();
}

// W-1: worker, worker's failure, API stop, reaper, orchestrator: terminal row and signal are of one transaction.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_ends_a_task_signals_it_in_the_same_transaction() {
    let mut engine = Engine::scripted_with(|_| {}).await;
    let short = agent_with(&engine, "Short", |a| a.max_iterations = 1).await;
    let researcher = engine.demo.researcher;
    let one = |agent: AgentId, prompt| delegate(agent, &[prompt])["tasks"][0].clone();
    let args = json!({"tasks": [one(researcher, "worker"), one(researcher, "failure"), one(researcher, "stop"),
        one(researcher, "reaper"), one(short, "limit")]});
    let gate = Gate::new();
    let held = gate.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()),
            ("go", _) => Reply::text(r.last_user()),
            ("worker", _) => Reply::text("done"),
            ("failure", _) => Reply::status(400, "{}"),
            ("limit", _) => {
                Reply::call("get_subtask_result", json!({"task_id": uuid::Uuid::nil()}))
            }
            _ => Reply::text("late").held_by(&held),
        });
    let by_hand = ByHand::of(&engine);
    let parent = engine.post("go").await;
    let ended = "select count(*) from tasks where finished_at is not null";
    by_hand
        .dispatch_until("three have ended and two run", async || {
            let running = "select count(*) from tasks where status = 'running'";
            engine.count(ended).await == 3 && engine.count(running).await == 2
        })
        .await;
    engine.llm().wait_for_requests(6).await;
    let children = engine.children(parent).await;
    engine.stop(children[2], false).await;
    sqlx::query("update steps set lost_leases = 2 where task_id = $1")
        .bind(children[3].0)
        .execute(&engine.pool)
        .await
        .unwrap();
    expire_leases(&engine).await;
    assert_eq!(by_hand.orchestrator.reap().await.unwrap(), Progress::Did(1));
    assert_eq!(engine.count(ended).await, 5);
    // xmin is the transaction that wrote a row; nothing has touched these rows since.
    let together = "select count(*) from tasks t join signals s on s.dedup_key = t.id::text
        and s.correlation_key = t.id::text and s.source_type = 'child_task' and s.workspace_id = t.workspace_id
        and s.status = 'pending' where t.xmin = s.xmin";
    assert_eq!(engine.count(together).await, 5);
    assert_eq!(engine.count("select count(*) from signals").await, 5);
    // The worker that was reaped notices, and its reply is dropped.
    until("both model calls are given up", async || {
        engine.llm().aborted() == 2
    })
    .await;
    gate.open();
    by_hand.stop().await;
    engine.resume();
    let (_, output) = engine.end(parent).await;
    assert!(
        output.contains("5 delegated tasks: 1 completed, 3 failed, 1 stopped."),
        "{output}"
    );
    assert!(output.contains("Reason: lease_lost: "), "{output}");
    engine.close().await;
}

// W-2, W-5: the database itself refuses a second signal and a second pending await for one thing.
#[tokio::test(flavor = "multi_thread")]
async fn the_database_refuses_doubles() {
    let engine = Engine::scripted_with(|_| {}).await;
    let task = engine.key(engine.post("go").await);
    let other = create_workspace(&engine.pool, "other", "Other")
        .await
        .unwrap();
    let own = engine.workspace();
    signal(&engine, own, "child_task", "k").await.unwrap();
    let twice = signal(&engine, own, "child_task", "k").await.unwrap_err();
    assert_eq!(twice.constraint(), Some("signals_pkey"));
    signal(&engine, own, "external", "k").await.unwrap();
    signal(&engine, other, "child_task", "k").await.unwrap();

    let first = group(&engine, task, SourceType::ChildTask, None, &["k", "l"])
        .await
        .unwrap();
    let twice = group(&engine, task, SourceType::ChildTask, None, &["l"])
        .await
        .unwrap_err();
    assert_eq!(twice.constraint(), Some("awaits_pending_key"));
    assert!(!twice.is_conflict(), "no retry can help");
    group(&engine, task, SourceType::External, None, &["l"])
        .await
        .unwrap();
    sqlx::query("update awaits set status = 'skipped', settled_at = now() where group_id = $1")
        .bind(first.0)
        .execute(&engine.pool)
        .await
        .unwrap();
    group(&engine, task, SourceType::ChildTask, None, &["l"])
        .await
        .unwrap();
}

// W-3: one round completes what matches, says of each signal whether it was waited for, and writes one event a group.
#[tokio::test(flavor = "multi_thread")]
async fn a_round_of_the_matcher_completes_groups_once_each() {
    let mut engine = Engine::scripted_with(|_| {}).await;
    let by_hand = ByHand::of(&engine);
    let first = Family::new(&engine, &["a", "b"], Some(&by_hand)).await;
    let second = Family::new(&engine, &["c", "d"], Some(&by_hand)).await;
    first.finish_all(&engine).await;
    second.finish(&engine, "c").await;
    signal(&engine, engine.workspace(), "child_task", "nobody")
        .await
        .unwrap();
    assert_eq!(match_only(&engine).await, Progress::Did(4));
    assert_eq!(match_only(&engine).await, Progress::Idle);
    let settled: Vec<(String, i64)> =
        sqlx::query_as("select status, count(*) from signals group by 1 order by 1")
            .fetch_all(&engine.pool)
            .await
            .unwrap();
    assert_eq!(settled, [("matched".into(), 3), ("no_match".into(), 1)]);
    assert_eq!(
        awaits(&engine, first.parent).await,
        ["completed", "completed"]
    );
    assert_eq!(
        awaits(&engine, second.parent).await,
        ["completed", "pending"]
    );
    let events: Vec<uuid::Uuid> = sqlx::query_scalar(
        "select task_id from orchestrator_events where kind = 'await_completed'",
    )
    .fetch_all(&engine.pool)
    .await
    .unwrap();
    assert_eq!(events, [first.parent.0]);
    second.open_all();
    by_hand.stop().await;
    engine.resume();
    engine.end(second.parent).await;
    engine.close().await;
}

// W-6: `any` and `quorum` close as soon as they have enough; the rest is cancelled, and comes as `no_match`.
#[tokio::test(flavor = "multi_thread")]
async fn groups_that_need_only_some_close_early() {
    for (set, needed) in [
        ("update await_groups set strategy = 'any'", 1),
        ("update await_groups set strategy = 'quorum', quorum = 2", 2),
    ] {
        let engine = Engine::scripted().await;
        let family = Family::new(&engine, &["a", "b", "c"], None).await;
        sqlx::query(set).execute(&engine.pool).await.unwrap();
        let names = ["b", "c", "a"];
        for name in &names[..needed] {
            assert_eq!(engine.status(family.parent).await, WaitingForInput);
            family.finish(&engine, name).await;
        }
        engine.end(family.parent).await;
        let mut left = awaits(&engine, family.parent).await;
        left.sort();
        let expected = [vec!["cancelled"; 3 - needed], vec!["completed"; needed]].concat();
        assert_eq!(left, expected);
        let told = resume_messages(&engine, family.parent).await;
        assert_eq!(told.len(), 1);
        assert!(
            told[0].contains(&format!(": {needed} completed, {} skipped.", 3 - needed)),
            "{}",
            told[0]
        );
        family.finish_all(&engine).await;
        until("late signals are settled", async || {
            engine
                .count("select count(*) from signals where status = 'no_match'")
                .await
                == 3 - needed as i64
        })
        .await;
        assert_eq!(resume_messages(&engine, family.parent).await.len(), 1);
        engine.close().await;
    }
}

// W-7: the same key in another workspace is another thing, in both directions.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_matches_across_workspaces() {
    let mut engine = Engine::scripted_with(|_| {}).await;
    let by_hand = ByHand::of(&engine);
    let family = Family::new(&engine, &["a"], Some(&by_hand)).await;
    let child = family.children[0].to_string();
    let other = create_workspace(&engine.pool, "other", "Other")
        .await
        .unwrap();
    let mut message = engine.message(reconvene::lifecycle::submit::Recipient::DefaultAgent, "b");
    message.workspace = other;
    let waiting = TaskKey {
        workspace: other,
        task: engine.submit(message).await.task,
    };
    // B forges a signal for A's child; A's await stays.
    signal(&engine, other, "child_task", &child).await.unwrap();
    by_hand.orchestrator.match_signals().await.unwrap();
    assert_eq!(awaits(&engine, family.parent).await, ["pending"]);
    // B waits for A's child; A's signal leaves that alone.
    let foreign = group(&engine, waiting, SourceType::ChildTask, Some(60), &[&child])
        .await
        .unwrap();
    family.finish_all(&engine).await;
    by_hand.orchestrator.match_signals().await.unwrap();
    assert_eq!(awaits(&engine, family.parent).await, ["completed"]);
    assert_eq!(awaits(&engine, waiting.task).await, ["pending"]);
    // Nor does B's liveness check see A's row: for B there is no such child.
    make_due(&engine).await;
    by_hand.orchestrator.time_out().await.unwrap();
    assert_eq!(awaits(&engine, waiting.task).await, ["start_failed"]);
    sqlx::query("delete from signals where workspace_id = $1")
        .bind(other.0)
        .execute(&engine.pool)
        .await
        .unwrap();
    for sql in [
        "delete from awaits where group_id = $1",
        "delete from orchestrator_events where group_id = $1",
        "delete from await_groups where id = $1",
    ] {
        sqlx::query(sql)
            .bind(foreign.0)
            .execute(&engine.pool)
            .await
            .unwrap();
    }
    by_hand.stop().await;
    engine.resume();
    engine.end(family.parent).await;
    engine.close().await;
}

// W-10, D-41: the time of a child's await is no deadline; a child that runs, or waits for its own user, is alive.
#[tokio::test(flavor = "multi_thread")]
async fn a_due_await_of_a_living_child_moves_one_window_on() {
    let mut engine = Engine::scripted_with(|_| {}).await;
    let by_hand = ByHand::of(&engine);
    let gate = Gate::new();
    let (held, args) = (
        gate.clone(),
        delegate(engine.demo.researcher, &["run", "ask"]),
    );
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()),
            ("ask", 0) => Reply::call("ask_user", json!({"question": "which?"})),
            ("run", _) => Reply::text("ran").held_by(&held),
            _ => Reply::text(r.last_user()),
        });
    let parent = engine.post("go").await;
    let waiting = "select count(*) from tasks where status = 'waiting_for_input'";
    by_hand
        .dispatch_until("parent and child wait", async || {
            engine.count(waiting).await == 2
        })
        .await;
    make_due(&engine).await;
    // The question has no deadline, and gets none here.
    sqlx::query("update awaits set scheduled_resume_at = null where source_type = 'user_input'")
        .execute(&engine.pool)
        .await
        .unwrap();
    assert_eq!(
        by_hand.orchestrator.time_out().await.unwrap(),
        Progress::Did(2)
    );
    assert_eq!(
        by_hand.orchestrator.time_out().await.unwrap(),
        Progress::Idle
    );
    let moved = "select count(*) from awaits where status = 'pending' and source_type = 'child_task'
        and scheduled_resume_at between now() + interval '59 minutes' and now() + interval '60 minutes'";
    assert_eq!(engine.count(moved).await, 2);
    by_hand.orchestrator.dispatch().await.unwrap();
    assert_eq!(engine.status(parent).await, WaitingForInput);
    assert_eq!(decide_steps(&engine, parent).await, 1);
    let asking = engine.children(parent).await[1];
    gate.open();
    by_hand.stop().await;
    engine.resume();
    engine.append(asking, "that one").await; // T-5
    let (_, output) = engine.end(parent).await;
    assert!(
        output.contains("> ran") && output.contains("> that one"),
        "{output}"
    );
    engine.close().await;
}

// W-10: what a lost signal would have said is read from the row; a row that is gone settles as start_failed.
#[tokio::test(flavor = "multi_thread")]
async fn a_due_await_of_an_ended_or_lost_child_is_settled_from_its_row() {
    let mut engine = Engine::scripted_with(|_| {}).await;
    let by_hand = ByHand::of(&engine);
    let family = Family::new(&engine, &["a", "b"], Some(&by_hand)).await;
    family.finish(&engine, "a").await;
    engine.stop(family.children[1], false).await;
    for sql in [
        "delete from signals",
        "delete from decision_logs where task_id = $1",
        "delete from steps where task_id = $1",
        "delete from task_items where task_id = $1",
        "delete from tasks where id = $1",
    ] {
        let query = sqlx::query(sql);
        match sql.contains('$') {
            true => query.bind(family.children[1].0),
            false => query,
        }
        .execute(&engine.pool)
        .await
        .unwrap();
    }
    make_due(&engine).await;
    assert_eq!(
        by_hand.orchestrator.time_out().await.unwrap(),
        Progress::Did(2)
    );
    assert_eq!(
        awaits(&engine, family.parent).await,
        ["completed", "start_failed"]
    );
    let events = "select count(*) from orchestrator_events where kind = 'await_completed'";
    assert_eq!(engine.count(events).await, 1);
    by_hand.stop().await;
    engine.resume();
    let (_, output) = engine.end(family.parent).await;
    for part in [
        "2 delegated tasks: 1 completed, 1 start_failed.",
        "> result of a",
        &family.children[1].to_string(),
    ] {
        assert!(output.contains(part), "{part}: {output}");
    }
    // For the closing check: the signal that the test had lost.
    signal(
        &engine,
        engine.workspace(),
        "child_task",
        &family.children[0].to_string(),
    )
    .await
    .unwrap();
    engine.close().await;
}

// W-11: what is no child expires; its key may be any text.
#[tokio::test(flavor = "multi_thread")]
async fn waits_that_are_no_children_expire() {
    let engine = Engine::scripted_with(|_| {}).await;
    let by_hand = ByHand::of(&engine);
    let task = engine.key(engine.post("go").await);
    for source in [SourceType::External, SourceType::Timer] {
        group(&engine, task, source, Some(60), &["order 66/a"])
            .await
            .unwrap();
    }
    make_due(&engine).await;
    // Plans differ in when they read a key as an id.
    for plan in ["set enable_nestloop = on", "set enable_nestloop = off"] {
        let mut tx = engine.pool.begin().await.unwrap();
        sqlx::query(plan).execute(&mut *tx).await.unwrap();
        let due = store::awaits::due_all_workspaces(&mut tx, 10).await;
        assert_eq!(due.unwrap().len(), 2, "{plan}");
    }
    assert_eq!(
        by_hand.orchestrator.time_out().await.unwrap(),
        Progress::Did(2)
    );
    assert_eq!(awaits(&engine, task.task).await, ["timed_out", "completed"]);
    by_hand.stop().await;
}

// W-3, W-17: the round that completes a parent's last await wakes it too, unless somebody holds it or what it is to be
// told can not be read. Then its event stays, and the event loop wakes it. Never twice, never with nothing.
#[tokio::test(flavor = "multi_thread")]
async fn the_matcher_wakes_a_parent_at_once_or_leaves_it_to_the_event_loop() {
    for hindrance in ["none", "locked", "unreadable"] {
        let mut engine = Engine::scripted_with(|_| {}).await;
        let by_hand = ByHand::of(&engine);
        let family = Family::new(&engine, &["a", "b"], Some(&by_hand)).await;
        family.finish_all(&engine).await;
        let hold = match hindrance {
            "locked" => Some(Hold::task(&engine.pool, family.parent).await),
            "unreadable" => {
                run(
                    &engine,
                    "alter table agent_versions rename column definition to hidden",
                )
                .await;
                None
            }
            _ => None,
        };
        assert_eq!(
            by_hand.orchestrator.match_signals().await.unwrap(),
            Progress::Did(2),
            "{hindrance}"
        );
        assert_eq!(
            awaits(&engine, family.parent).await,
            ["completed", "completed"]
        );
        let at_once = hindrance == "none";
        let told = resume_messages(&engine, family.parent).await;
        assert_eq!(told.len(), usize::from(at_once), "{hindrance}");
        let events = "select count(*) from orchestrator_events where kind = 'await_completed'";
        assert_eq!(
            engine.count(events).await,
            i64::from(!at_once),
            "{hindrance}"
        );
        if hindrance == "unreadable" {
            run(
                &engine,
                "alter table agent_versions rename column hidden to definition",
            )
            .await;
        }
        drop(hold);
        by_hand.stop().await;
        engine.resume();
        engine.end(family.parent).await;
        assert_eq!(resume_messages(&engine, family.parent).await.len(), 1);
        assert_eq!(decide_steps(&engine, family.parent).await, 2);
        engine.close().await;
    }
}

async fn run(engine: &Engine, sql: &'static str) {
    sqlx::raw_sql(sql).execute(&engine.pool).await.unwrap();
}
