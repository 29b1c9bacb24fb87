//! Waits for times, signals and users: how they are registered, how each ends, and what the task is told.

use crate::{
    engine::{Engine, until},
    forced::{ByHand, Family, Hold, agent_with, ask, delegate, resume_messages, until_waiting},
    stub_llm::{Gate, Recorded, Reply},
};
use reconvene::{
    domain::{
        ids::{AgentId, GroupId, TaskId, WorkspaceId},
        step::Claim,
        task::TaskStatus::*,
        task_await::WaitFor,
    },
    lifecycle::{
        agents::create_workspace,
        claim::claim,
        signal::{call_back, signal},
        skip::skip,
        submit::Recipient,
        wait::{Waited, token_hash, wait},
    },
    orchestrator::Orchestrator,
    runtime::Progress,
    store::signals::{NewExternal, Received},
};
use serde_json::{Value, json};

/// An agent that may wait for anything.
async fn waiter(engine: &Engine) -> AgentId {
    agent_with(engine, "Waiter", |a| {
        let tools = [
            "wait_until",
            "wait_for_signal",
            "ask_user",
            "delegate_tasks",
        ];
        a.tools = tools.map(str::to_owned).to_vec();
    })
    .await
}

async fn post_to(engine: &Engine, agent: AgentId, text: &str) -> TaskId {
    let message = engine.message(Recipient::Agent(agent), text);
    engine.submit(message).await.task
}

/// A task that calls this tool first, and then repeats what it is told.
async fn calling(engine: &Engine, tool: &'static str, arguments: Value) -> TaskId {
    engine.llm().script(move |r| match r.turn() {
        0 => Reply::call(tool, arguments.clone()),
        _ => Reply::text(format!("told: {}", r.last_user())),
    });
    let agent = waiter(engine).await;
    post_to(engine, agent, "go").await
}

async fn make_due(engine: &Engine) {
    let sql = "update awaits set scheduled_resume_at = now() where status = 'pending'";
    sqlx::query(sql).execute(&engine.pool).await.unwrap();
}

fn report(workspace: WorkspaceId, key: &str, dedup_key: &str, payload: Value) -> NewExternal {
    NewExternal {
        workspace,
        correlation_key: key.into(),
        dedup_key: dedup_key.into(),
        payload: Some(payload),
    }
}

async fn send(engine: &Engine, key: &str, dedup_key: &str, payload: Value) -> Received {
    let report = report(engine.workspace(), key, dedup_key, payload);
    signal(&engine.pool, &engine.hub, &report).await.unwrap()
}

fn received(is_new: bool, status: &str) -> Received {
    let status = status.into();
    Received { is_new, status }
}

/// The result of the first call, as JSON.
fn result(request: &Recorded) -> Value {
    serde_json::from_str(request.results()[0].1).unwrap()
}

async fn last_request(engine: &Engine) -> Recorded {
    engine.llm().requests().pop().unwrap()
}

// W-14, W-11: the due time is the database's; a timer that is over is completed, and the message says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_rests_until_a_time() {
    let engine = Engine::scripted().await;
    let task = calling(&engine, "wait_until", json!({"seconds": 3600})).await;
    engine.until(task, WaitingForInput).await;
    let exact =
        "select count(*) from awaits where scheduled_resume_at = created_at + interval '1 hour'";
    assert_eq!(engine.count(exact).await, 1);
    let active = "select count(*) from steps where status in ('queued', 'running')";
    assert_eq!(engine.count(active).await, 0);
    make_due(&engine).await;
    let told = "The time that you waited for has come.";
    assert_eq!(engine.end(task).await, (Completed, format!("told: {told}")));
    assert_eq!(resume_messages(&engine, task).await, [told]);
    assert_eq!(
        result(&last_request(&engine).await)["status"],
        "awaiting_time"
    );
    let card: Value = ask(
        &engine,
        "select data from task_items where task_id = $1 and kind = 'wait'",
        task,
    )
    .await;
    assert_eq!(card["source_type"], "timer");
    assert_eq!(card["seconds"], json!(3600.0));
    engine.close().await;
}

// W-14: a time that has passed is no reason to rest for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_time_in_the_past_has_come() {
    let engine = Engine::scripted().await;
    let task = calling(
        &engine,
        "wait_until",
        json!({"time": "1999-12-31T23:59:59Z"}),
    )
    .await;
    let (status, output) = engine.end(task).await;
    assert_eq!(status, Completed);
    assert!(output.contains("has come"), "{output}");
    engine.close().await;
}

// W-13: a signal wakes the task that waits for it, with what it brings, once.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_wakes_the_task_that_waits_for_it() {
    let engine = Engine::scripted().await;
    let task = calling(&engine, "wait_for_signal", json!({"key": "paid"})).await;
    engine.until(task, WaitingForInput).await;
    assert_eq!(
        send(&engine, "other", "1", json!(null)).await,
        received(true, "pending")
    );
    let other = create_workspace(&engine.pool, "other", "Other")
        .await
        .unwrap();
    let foreign = report(other, "paid", "1", json!("not yours"));
    let foreign = signal(&engine.pool, &engine.hub, &foreign).await.unwrap();
    assert_eq!(foreign, received(true, "pending")); // W-7
    let payload = json!({"amount": 12.50, "note": "a\n> b"});
    assert_eq!(
        send(&engine, "paid", "2", payload).await,
        received(true, "matched")
    );
    // W-2: the second report of the same fact
    assert_eq!(
        send(&engine, "paid", "2", json!("again")).await,
        received(false, "matched")
    );
    engine.end(task).await;
    let told = resume_messages(&engine, task).await;
    assert_eq!(told.len(), 1);
    assert!(
        told[0].starts_with("The signal \u{201c}paid\u{201d} has come."),
        "{told:?}"
    );
    assert!(
        told[0].contains("\n> {\"note\":\"a\\n> b\",\"amount\":12.5}")
            && !told[0].contains("yours"),
        "{told:?}"
    );
    settle_early(&engine).await;
    engine.close().await;
}

/// Early signals that a test has left.
async fn settle_early(engine: &Engine) {
    sqlx::query(
        "update signals set created_at = now() - interval '2 days' where status = 'pending'",
    )
    .execute(&engine.pool)
    .await
    .unwrap();
}

// W-13: early signals are kept, each wakes one wait, and after their time they are given up.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_that_comes_early_is_kept_for_its_time() {
    let engine = Engine::scripted_with(|c| c.signals.early_ttl_seconds = 3600).await;
    let orchestrator = ByHand::of(&engine);
    for n in ["1", "2", "3"] {
        assert_eq!(
            send(&engine, "paid", n, json!(n)).await,
            received(true, "pending")
        );
    }
    assert_eq!(
        orchestrator.orchestrator.match_early().await.unwrap(),
        Progress::Idle
    );
    orchestrator.stop().await;
    let engine = engine.running();
    let task = calling(&engine, "wait_for_signal", json!({"key": "paid"})).await;
    let (_, output) = engine.end(task).await;
    assert!(output.ends_with("> \"1\""), "{output}");
    let again = post_to(&engine, waiter(&engine).await, "again").await;
    let (_, output) = engine.end(again).await;
    assert!(output.ends_with("> \"2\""), "{output}");
    sqlx::query(
        "update signals set created_at = now() - interval '59 minutes' where dedup_key = '3'",
    )
    .execute(&engine.pool)
    .await
    .unwrap();
    let left = "select count(*) from signals where status = 'pending'";
    assert_eq!(engine.count(left).await, 1);
    settle_early(&engine).await;
    until("the old signal is given up", async || {
        engine.count(left).await == 0
    })
    .await;
    let task = post_to(&engine, waiter(&engine).await, "too late").await;
    engine.until(task, WaitingForInput).await;
    assert_eq!(
        send(&engine, "paid", "3", json!(null)).await,
        received(false, "no_match")
    );
    engine.stop(task, false).await;
    engine.close().await;
}

// W-13: signal and wait are registered at the same moment, and neither sees the other: the orchestrator does.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_beside_its_wait_is_found_by_the_orchestrator() {
    let engine = Engine::scripted().await;
    let task = calling(&engine, "wait_for_signal", json!({"key": "paid"})).await;
    engine.until(task, WaitingForInput).await;
    // As if its sender had died between the two.
    sqlx::query(
        "insert into signals (workspace_id, source_type, dedup_key, correlation_key) values ($1, 'external', 'd', 'paid')",
    )
    .bind(engine.workspace())
    .execute(&engine.pool)
    .await
    .unwrap();
    let (_, output) = engine.end(task).await;
    assert!(output.ends_with("> nothing"), "{output}");
    engine.close().await;
}

// W-11: waits for signals and users expire when they have a due time; the message says so.
#[tokio::test(flavor = "multi_thread")]
async fn waits_for_signals_and_users_time_out() {
    for (tool, arguments, told) in [
        (
            "wait_for_signal",
            json!({"key": "paid", "timeout_minutes": 5}),
            "The signal \u{201c}paid\u{201d} did not come in time.",
        ),
        (
            "ask_user",
            json!({"question": "Which one?"}),
            "No answer came in time to your question \u{201c}Which one?\u{201d}.",
        ),
    ] {
        let engine = Engine::scripted().await;
        let task = calling(&engine, tool, arguments).await;
        engine.until(task, WaitingForInput).await;
        let due: Option<f64> = ask(
            &engine,
            "select extract(epoch from a.scheduled_resume_at - a.created_at)::float8 from awaits a
             join await_groups g on g.id = a.group_id where g.task_id = $1",
            task,
        )
        .await;
        assert_eq!(due, (tool == "wait_for_signal").then_some(300.0));
        make_due(&engine).await;
        assert_eq!(engine.end(task).await, (Completed, format!("told: {told}")));
        assert_eq!(resume_messages(&engine, task).await, [told]);
        engine.close().await;
    }
}

async fn register(engine: &Engine, claim: &Claim, for_what: &WaitFor) -> Waited {
    wait(&engine.pool, &engine.hub, claim, for_what)
        .await
        .unwrap()
}

fn signal_named(key: Option<&str>) -> WaitFor {
    WaitFor::Signal {
        key: key.map(str::to_owned),
        timeout_seconds: None,
    }
}

fn registered(waited: Waited) -> (GroupId, Option<String>) {
    match waited {
        Waited::Registered { group, callback } => (group, callback),
        other => panic!("{other:?}"),
    }
}

// W-13, D-26: a step that runs again has its wait already, and puts a new token in the place of the one it can not know.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_is_registered_once_and_only_the_newest_token_counts() {
    let engine = Engine::scripted_with(|_| {}).await;
    let claim = claim_without_worker(&engine).await;
    let (first, old) = registered(register(&engine, &claim, &signal_named(None)).await);
    let (again, new) = registered(register(&engine, &claim, &signal_named(None)).await);
    assert_eq!(first, again);
    let (old, new) = (old.unwrap(), new.unwrap());
    assert!(old != new && new.len() == 43, "{new}");
    for table in ["awaits", "await_groups"] {
        let sql = format!("select count(*) from {table}");
        let n: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
            .fetch_one(&engine.pool)
            .await
            .unwrap();
        assert_eq!(n, 1, "{table}");
    }
    let cards = "select count(*) from task_items where kind = 'wait'";
    assert_eq!(engine.count(cards).await, 1);
    let call = async |token: &str, payload: Value| {
        call_back(&engine.pool, &engine.hub, token_hash(token), Some(payload))
            .await
            .unwrap()
    };
    assert_eq!(call(&old, json!(1)).await, None);
    assert_eq!(call("", json!(1)).await, None);
    assert_eq!(
        call(&new, json!({"ok": true})).await,
        Some(received(true, "matched"))
    );
    assert_eq!(call(&new, json!(2)).await, Some(received(false, "matched")));
    let payload: Value = sqlx::query_scalar("select payload from awaits")
        .fetch_one(&engine.pool)
        .await
        .unwrap();
    assert_eq!(payload, json!({"ok": true}));

    let stale = Claim {
        attempt: claim.attempt + 1,
        ..claim
    };
    let waited = register(&engine, &stale, &signal_named(None)).await;
    assert!(matches!(waited, Waited::Stale), "{waited:?}");
}

/// Posts a task, makes its first move, and holds its step.
async fn claim_without_worker(engine: &Engine) -> Claim {
    engine.post("go").await;
    let orchestrator = Orchestrator::new(&engine.config, engine.pool.clone(), engine.hub.clone());
    orchestrator.dispatch().await.unwrap();
    let steps = claim(&engine.pool, engine.hub.process, 60, 1).await;
    steps.unwrap().pop().expect("a step").claim
}

// W-13: a callback stands for one wait: when that is over, it wakes no other wait of the same name, now or later.
#[tokio::test(flavor = "multi_thread")]
async fn a_callback_after_the_end_of_its_wait_changes_nothing() {
    let engine = Engine::scripted_with(|_| {}).await;
    let first = claim_without_worker(&engine).await;
    let (group, token) = registered(register(&engine, &first, &signal_named(Some("paid"))).await);
    let task = first.key.task;
    let skipped = skip(
        &engine.pool,
        &engine.hub,
        engine.workspace(),
        task,
        Some(group),
    )
    .await;
    assert_eq!(skipped.unwrap(), Some(1));
    let second = claim_without_worker(&engine).await;
    registered(register(&engine, &second, &signal_named(Some("paid"))).await);
    let hash = token_hash(&token.unwrap());
    for is_new in [true, false] {
        let called = call_back(&engine.pool, &engine.hub, hash, None).await;
        assert_eq!(called.unwrap(), Some(received(is_new, "no_match")));
    }
    let pending = "select count(*) from awaits where status = 'pending'";
    assert_eq!(engine.count(pending).await, 1);
}

// W-5: one signal can wake one wait only, so the second who would wait for the same key is told.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_wait_for_the_same_key_is_refused() {
    let engine = Engine::scripted_with(|_| {}).await;
    let first = claim_without_worker(&engine).await;
    registered(register(&engine, &first, &signal_named(Some("paid"))).await);
    let second = claim_without_worker(&engine).await;
    let waited = register(&engine, &second, &signal_named(Some("paid"))).await;
    let Waited::Refused(reason) = waited else {
        panic!("{waited:?}");
    };
    assert!(
        reason.contains("\u{201c}paid\u{201d}") && reason.contains("another key"),
        "{reason}"
    );
    let rows = "select (select count(*) from await_groups) + (select count(*) from task_items where kind = 'wait')";
    assert_eq!(engine.count(rows).await, 2);
    registered(register(&engine, &second, &signal_named(Some("shipped"))).await);
}

async fn skip_all(engine: &Engine, task: TaskId) -> Option<usize> {
    skip(&engine.pool, &engine.hub, engine.workspace(), task, None)
        .await
        .unwrap()
}

// W-15: all waits of a task; the children run on, and nobody hears of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_skip_gives_up_what_is_pending_and_the_task_is_told() {
    let engine = Engine::scripted().await;
    let family = Family::new(&engine, &["a", "b"], None).await;
    family.finish(&engine, "a").await;
    let matched = "select count(*) from signals where status = 'matched'";
    until("the first is matched", async || {
        engine.count(matched).await == 1
    })
    .await;
    assert_eq!(skip_all(&engine, family.parent).await, Some(1));
    let (status, output) = engine.end(family.parent).await;
    assert_eq!(status, Completed);
    for part in [
        "1 completed, 1 skipped.",
        "> result of a",
        "b\nAgent: Researcher | Status: skipped",
    ] {
        assert!(output.contains(part), "{part}: {output}");
    }
    let groups = "select count(*) from await_groups where status = 'skipped'";
    assert_eq!(engine.count(groups).await, 1);
    assert_eq!(engine.status(family.children[1]).await, Running);
    family.finish_all(&engine).await;
    let unmatched = "select count(*) from signals where status = 'no_match'";
    until("the second finds nobody", async || {
        engine.count(unmatched).await == 1
    })
    .await;
    // Again, of nothing, and of a task that is not there.
    assert_eq!(skip_all(&engine, family.parent).await, Some(0));
    assert_eq!(skip_all(&engine, TaskId::new()).await, None);
    assert_eq!(resume_messages(&engine, family.parent).await.len(), 1);
    engine.close().await;
}

// W-15, D-25: one group of two; the task is told of it and goes on waiting for the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_skip_of_one_group_leaves_the_other() {
    let engine = Engine::scripted().await;
    let gate = Gate::new();
    let (held, args) = (
        gate.clone(),
        delegate(engine.demo.researcher, &["child"]).to_string(),
    );
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::text("")
                .and_call("1", "delegate_tasks", &args)
                .and_call("2", "wait_for_signal", r#"{"key": "paid"}"#),
            ("go", _) => Reply::text("done"),
            _ => Reply::text("late").held_by(&held),
        });
    let task = post_to(&engine, waiter(&engine).await, "go").await;
    engine.until(task, WaitingForInput).await;
    let group = GroupId(
        ask(
            &engine,
            "select id from await_groups where task_id = $1 and source_type = 'external'",
            task,
        )
        .await,
    );
    let own = engine.workspace();
    let skipped = skip(&engine.pool, &engine.hub, own, task, Some(group)).await;
    assert_eq!(skipped.unwrap(), Some(1));
    until("it is told", async || {
        resume_messages(&engine, task).await.len() == 1
    })
    .await;
    assert_eq!(engine.status(task).await, WaitingForInput);
    assert_eq!(
        resume_messages(&engine, task).await,
        ["Your wait for the signal \u{201c}paid\u{201d} was skipped."]
    );
    // Somebody else's group is none of this task's.
    let foreign = skip(&engine.pool, &engine.hub, own, task, Some(GroupId::new())).await;
    assert_eq!(foreign.unwrap(), Some(0));
    gate.open();
    assert_eq!(engine.end(task).await, (Completed, "done".into()));
    assert_eq!(resume_messages(&engine, task).await.len(), 2);
    engine.close().await;
}

// T-6, W-15: "skip & send now" skips timers and signals, and answers a question.
#[tokio::test(flavor = "multi_thread")]
async fn skip_and_send_now_ends_every_wait() {
    let engine = Engine::scripted().await;
    engine.llm().script(|r| match r.turn() {
        0 => Reply::text("")
            .and_call("1", "wait_until", r#"{"seconds": 3600}"#)
            .and_call("2", "wait_for_signal", "{}")
            .and_call("3", "ask_user", r#"{"question": "Which one?"}"#),
        _ => Reply::text("done"),
    });
    let task = post_to(&engine, waiter(&engine).await, "go").await;
    engine.until(task, WaitingForInput).await;
    let mut message = engine.message(Recipient::Task(task), "this one, and now");
    message.skip_wait = true;
    engine.submit(message).await;
    assert_eq!(engine.end(task).await, (Completed, "done".into()));
    let mut told = resume_messages(&engine, task).await;
    told.sort();
    assert_eq!(
        told,
        [
            "Your wait for a time was skipped.",
            "Your wait for the signal was skipped."
        ]
    );
    engine.close().await;
}

/// What races for one wait.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Racer {
    Signal,
    Timeout,
    Skip,
    Callback,
}

impl Racer {
    fn start(
        self,
        engine: &Engine,
        by_hand: &std::sync::Arc<ByHand>,
        task: TaskId,
        token: &str,
    ) -> tokio::task::JoinHandle<()> {
        let (pool, hub, own) = (engine.pool.clone(), engine.hub.clone(), engine.workspace());
        let (by_hand, hash) = (by_hand.clone(), token_hash(token));
        tokio::spawn(async move {
            match self {
                Self::Signal => {
                    let new = report(own, "paid", "d", json!("by signal"));
                    signal(&pool, &hub, &new).await.map(drop).unwrap();
                }
                Self::Timeout => by_hand.orchestrator.time_out().await.map(drop).unwrap(),
                Self::Skip => skip(&pool, &hub, own, task, None).await.map(drop).unwrap(),
                Self::Callback => {
                    let payload = Some(json!("by callback"));
                    call_back(&pool, &hub, hash, payload)
                        .await
                        .map(drop)
                        .unwrap();
                }
            }
        })
    }

    fn tells(self) -> &'static str {
        match self {
            Self::Signal => "> \"by signal\"",
            Self::Timeout => "did not come in time",
            Self::Skip => "was skipped",
            Self::Callback => "> \"by callback\"",
        }
    }
}

// W-3, W-11, W-13, W-15, H-03: whichever is first at the group ends the wait, the other changes nothing; both orders of
// each pair.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_that_end_a_wait_the_first_one_counts() {
    let all = [Racer::Signal, Racer::Timeout, Racer::Skip, Racer::Callback];
    for (first, second) in all
        .into_iter()
        .flat_map(|a| all.into_iter().map(move |b| (a, b)))
        .filter(|(a, b)| a != b)
    {
        let engine = Engine::scripted_with(|_| {}).await;
        let by_hand = std::sync::Arc::new(ByHand::of(&engine));
        let arguments = json!({"key": "paid", "timeout_minutes": 5});
        let task = calling(&engine, "wait_for_signal", arguments).await;
        by_hand
            .dispatch_until("it waits", async || {
                engine.status(task).await == WaitingForInput
            })
            .await;
        let result: String = ask(
            &engine,
            "select text from task_items where task_id = $1 and kind = 'tool_result'",
            task,
        )
        .await;
        let result: Value = serde_json::from_str(&result).unwrap();
        let url = result["callback_url"].as_str().unwrap();
        let token = url.strip_prefix("/api/callbacks/").unwrap();
        make_due(&engine).await;
        let group: uuid::Uuid = ask(
            &engine,
            "select id from await_groups where task_id = $1",
            task,
        )
        .await;
        let lock = "select 1 from await_groups where id = $1 for no key update";
        let hold = Hold::row(&engine.pool, lock, group).await;
        let one = first.start(&engine, &by_hand, task, token);
        until_waiting(&engine.pool, 1).await;
        let other = second.start(&engine, &by_hand, task, token);
        until_waiting(&engine.pool, 2).await;
        hold.release().await;
        one.await.unwrap();
        other.await.unwrap();
        by_hand
            .dispatch_until("it has ended", async || {
                engine.status(task).await == Completed
            })
            .await;
        let told = resume_messages(&engine, task).await;
        assert_eq!(told.len(), 1, "{first:?} before {second:?}: {told:?}");
        assert!(
            told[0].contains(first.tells()),
            "{first:?} before {second:?}: {told:?}"
        );
        let events = "select count(*) from orchestrator_events";
        assert_eq!(engine.count(events).await, 0);
        // A signal that came second is not lost: it waits for the next wait of that name.
        let early = "select count(*) from signals where status = 'pending'";
        let left = i64::from(second == Racer::Signal);
        assert_eq!(
            engine.count(early).await,
            left,
            "{first:?} before {second:?}"
        );
        settle_early(&engine).await;
        by_hand.orchestrator.match_early().await.unwrap();
        drop(by_hand);
        engine.close().await;
    }
}
