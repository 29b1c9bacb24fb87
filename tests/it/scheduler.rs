//! The calls of a turn: which overlap, on whom they run, and in which order their results come.

use crate::{
    engine::{Engine, Process, until},
    forced::{Hold, agent_with, ask, delegate, expire_leases, stopping, until_waiting},
    stub_llm::{Gate, Recorded, Reply},
};
use reconvene::{
    config::Config,
    domain::{
        configured_tool::ConfiguredTool,
        decision::{Decision, ToolCall},
        ids::{ProcessId, TaskId},
        output::Answer,
        step::Claim,
        task::TaskStatus::{self, *},
        turn::Concurrency,
    },
    lifecycle::{
        checkpoint::{
            Asked, Called, Checkpointer, Commit, Committed, Decided, Limits, Next, Outcome,
            PromptRecord,
        },
        claim::claim,
        configured_tools,
        requeue::reap,
        stop::stop,
    },
    orchestrator::Orchestrator,
    runtime::Hub,
};
use serde_json::json;
use sqlx::PgPool;
use std::sync::Arc;
use uuid::Uuid;

/// A call as a scene's model makes it.
type Call = (&'static str, String);

/// Answered at once, with an error; may overlap.
fn quick() -> Call {
    (
        "get_subtask_result",
        json!({"task_id": TaskId::new()}).to_string(),
    )
}

/// Answered at once, with an error; alone.
fn alone() -> Call {
    ("no_such_tool", "{}".into())
}

/// A task in the middle of a tree, with calls of one turn. Those that delegate wait for the tree's root, which is held.
struct Scene {
    engine: Engine,
    root: TaskId,
    task: TaskId,
    calls: Gate,
    hold: Option<Hold>,
}

impl Scene {
    /// `calls` gets what makes a slow call, with the title of its child. Nothing of the turn is there yet.
    async fn new(
        set: impl FnOnce(&mut Config),
        processes: impl AsyncFnOnce(Engine) -> Engine,
        calls: impl FnOnce(&dyn Fn(&str) -> Call) -> Vec<Call>,
    ) -> Self {
        let engine = Engine::scripted_with(set).await;
        let middle = agent_with(&engine, "Middle", |a| {
            a.tools = ["delegate_tasks", "get_subtask_result", "ask_user", "mine"]
                .map(str::to_owned)
                .to_vec();
        })
        .await;
        let writer = engine.demo.writer;
        let slow = |title: &str| ("delegate_tasks", delegate(writer, &[title]).to_string());
        let calls = calls(&slow);
        let (gate, top) = (Gate::new(), delegate(middle, &["middle"]));
        let held = gate.clone();
        engine
            .llm()
            .script(move |r| match (r.first_user(), r.turn()) {
                ("go", 0) => Reply::call("delegate_tasks", top.clone()),
                ("middle", 0) => (1..).zip(&calls).fold(
                    Reply::text("calls").held_by(&held),
                    |reply, (n, (name, arguments))| {
                        reply.and_call(&format!("c{n}"), name, arguments)
                    },
                ),
                ("middle", _) => Reply::text(format!("heard: {}", r.last_user())),
                ("go", _) => Reply::text("done"),
                (child, _) => Reply::text(format!("did {child}")),
            });
        let engine = processes(engine).await;
        let root = engine.post("go").await;
        engine.llm().wait_for_requests(2).await;
        let task = engine.children(root).await[0];
        engine.until(root, WaitingForInput).await;
        let hold = Some(Hold::task(&engine.pool, root).await);
        Self {
            engine,
            root,
            task,
            calls: gate,
            hold,
        }
    }

    /// With one process, which has started the turn.
    async fn started(
        set: impl FnOnce(&mut Config),
        calls: impl FnOnce(&dyn Fn(&str) -> Call) -> Vec<Call>,
    ) -> Self {
        let scene = Self::new(set, async |engine| engine.running(), calls).await;
        scene.calls.open();
        scene
    }

    /// Lets the slow calls go on.
    async fn release(&mut self) {
        self.hold.take().unwrap().release().await;
    }

    /// The steps of the turn's calls.
    async fn steps(&self) -> Vec<String> {
        sqlx::query_scalar("select status from steps where task_id = $1 and turn = 1 and ordinal > 0 order by ordinal")
            .bind(self.task.0)
            .fetch_all(&self.engine.pool)
            .await
            .unwrap()
    }

    async fn until_steps(&self, expected: &[&str]) {
        until(&format!("the calls are {expected:?}"), async || {
            self.steps().await == expected
        })
        .await;
    }

    /// The calls and results of the turn as they stand in the feed.
    async fn feed(&self) -> Vec<String> {
        sqlx::query_scalar(
            "select case kind when 'tool_call' then 'call ' else 'result ' end || (data ->> 'ordinal')
             from task_items where task_id = $1 and turn = 1 and kind in ('tool_call', 'tool_result') order by seq",
        )
        .bind(self.task.0)
        .fetch_all(&self.engine.pool)
        .await
        .unwrap()
    }

    /// What the model was asked last about this task.
    fn last_request(&self) -> Recorded {
        let requests = self.engine.llm().requests();
        requests
            .into_iter()
            .rfind(|r| r.first_user() == "middle")
            .unwrap()
    }

    async fn ends(&self) {
        assert_eq!(self.engine.end(self.task).await.0, Completed);
        assert_eq!(self.engine.end(self.root).await.0, Completed);
    }
}

/// The ids of the calls that have results, in order.
fn answered(request: &Recorded) -> Vec<&str> {
    request.results().iter().map(|(id, _)| *id).collect()
}

// H-25: the quick ones are settled and wait for their elder; a failing one harms nobody.
#[tokio::test(flavor = "multi_thread")]
async fn results_come_in_call_order_whatever_ends_first() {
    let mut scene =
        Scene::started(|_| {}, |slow| vec![slow("a"), quick(), slow("b"), quick()]).await;
    scene
        .until_steps(&["running", "completed", "running", "completed"])
        .await;
    let started = ["call 1", "call 2", "call 3", "call 4"];
    assert_eq!(scene.feed().await, started);
    // nothing of how calls overlap is told to models
    let shown = scene.last_request().body["tools"].to_string();
    assert!(
        !shown.contains("parallel") && !shown.contains("concurrency"),
        "{shown}"
    );

    scene.release().await;
    scene.ends().await;
    let all = [
        &started[..],
        &["result 1", "result 2", "result 3", "result 4"],
    ]
    .concat();
    assert_eq!(scene.feed().await, all);
    let first = scene.last_request();
    assert_eq!(answered(&first), ["c1", "c2", "c3", "c4"]);
    let told: Vec<bool> = first
        .results()
        .iter()
        .map(|(_, text)| text.starts_with("Error"))
        .collect();
    assert_eq!(told, [false, true, false, true]);

    // The same prefix, byte for byte, by another process and with a message more.
    scene.engine.kill().await;
    scene.engine.resume();
    scene.engine.append(scene.task, "and now?").await;
    assert_eq!(scene.engine.end(scene.task).await.1, "heard: and now?");
    let (before, after) = (first.messages(), scene.last_request());
    assert_eq!(
        serde_json::to_string(&after.messages()[..before.len()]).unwrap(),
        serde_json::to_string(before).unwrap()
    );
    scene.engine.close().await;
}

// nothing passes a barrier, in either direction.
#[tokio::test(flavor = "multi_thread")]
async fn an_exclusive_call_starts_after_all_before_it_and_before_all_after_it() {
    let mut scene = Scene::started(
        |_| {},
        |slow| vec![quick(), slow("a"), alone(), quick(), slow("b"), alone()],
    )
    .await;
    scene.until_steps(&["completed", "running"]).await;
    assert_eq!(scene.feed().await, ["call 1", "call 2", "result 1"]);
    scene.release().await;
    scene.ends().await;
    let feed = scene.feed().await;
    let expected = [
        "call 1", "call 2", "result 1", "result 2", "call 3", "result 3", "call 4", "call 5",
    ];
    assert_eq!(feed[..8], expected);
    assert_eq!(feed[10..], ["call 6", "result 6"]);
    scene.engine.close().await;
}

// the pool rolls, and is never fuller than it may be; 1 is serial.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_runs_as_a_rolling_pool() {
    for (parallel_max, reached) in [
        (1, vec!["running"]),
        (2, vec!["running", "completed", "completed", "running"]),
        (
            3,
            vec!["running", "completed", "completed", "running", "completed"],
        ),
    ] {
        let mut scene = Scene::new(
            |c| c.worker.max_parallel_tool_calls = parallel_max,
            async |engine| engine.running(),
            |slow| vec![slow("a"), quick(), quick(), slow("b"), quick()],
        )
        .await;
        sqlx::raw_sql(
            "create table most (active bigint not null);
             create function count_active() returns trigger language plpgsql as $$ begin
                 insert into most select count(*) from steps where ordinal > 0 and task_id = new.task_id and finished_at is null;
                 return null;
             end $$;
             create constraint trigger count_active after insert or update on steps deferrable initially deferred
                 for each row when (new.ordinal > 0) execute function count_active();",
        )
        .execute(&scene.engine.pool)
        .await
        .unwrap();
        scene.calls.open();
        scene.until_steps(&reached).await;
        scene.release().await;
        scene.ends().await;
        let most = scene.engine.count("select max(active) from most").await;
        assert_eq!(most, i64::from(parallel_max));
        scene.engine.close().await;
    }
}

/// What an author makes of `get_subtask_result`, under the name that the middle agent lists.
async fn make_mine(engine: &Engine) -> ConfiguredTool {
    let tool = ConfiguredTool {
        name: "mine".into(),
        base_tool: "get_subtask_result".into(),
        description: "Reads.".into(),
        agent: None,
        parameters: None,
        bindings: Default::default(),
    };
    configured_tools::create(&engine.pool, engine.workspace(), &tool)
        .await
        .unwrap();
    tool
}

// calls are judged, and run, by what there is when they start.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_the_tools_counts_for_calls_that_have_not_started() {
    let mine = || ("mine", json!({"task_id": TaskId::new()}).to_string());
    for (is_there_first, barrier) in [(true, false), (false, false), (true, true)] {
        let mut scene = Scene::new(
            |c| c.worker.max_parallel_tool_calls = if barrier { 10 } else { 1 },
            async |engine| {
                if is_there_first {
                    make_mine(&engine).await;
                }
                engine.running()
            },
            |slow| match barrier {
                true => vec![slow("a"), alone(), mine(), quick()],
                false => vec![slow("a"), mine(), mine()],
            },
        )
        .await;
        scene.calls.open();
        scene.until_steps(&["running"]).await;
        match is_there_first {
            true => {
                sqlx::query("delete from configured_tools")
                    .execute(&scene.engine.pool)
                    .await
                    .unwrap();
            }
            false => {
                make_mine(&scene.engine).await;
            }
        }
        scene.release().await;
        scene.ends().await;
        let request = scene.last_request();
        let result = request.results()[if barrier { 2 } else { 1 }].1.to_owned();
        let unknown = result.contains("There is no tool \"mine\"");
        assert_eq!(unknown, is_there_first, "{result}");
        scene.engine.close().await;
    }
}

// H-20, T-30: what has a result keeps it, what runs is broken off, what has not started leaves no record; and the
// task stays usable.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_within_a_turn_keeps_what_there_is() {
    let mut scene = Scene::started(
        |c| c.worker.max_parallel_tool_calls = 2,
        |slow| vec![slow("a"), quick(), slow("b"), quick(), alone()],
    )
    .await;
    scene
        .until_steps(&["running", "completed", "running"])
        .await;
    assert_eq!(scene.engine.stop(scene.task, false).await.stopped, 1);
    assert_eq!(scene.steps().await, ["cancelled", "completed", "cancelled"]);
    assert_eq!(
        scene.feed().await,
        ["call 1", "call 2", "call 3", "result 2"]
    );
    scene.release().await;
    scene.engine.end(scene.root).await;
    assert_eq!(scene.engine.children(scene.task).await, []);

    scene.engine.append(scene.task, "and now?").await;
    assert_eq!(scene.engine.end(scene.task).await.1, "heard: and now?");
    let request = scene.last_request();
    assert_eq!(answered(&request), ["c1", "c2", "c3", "c4", "c5"]);
    let interrupted: Vec<bool> = request
        .results()
        .iter()
        .map(|(_, text)| text.contains("interrupted"))
        .collect();
    assert_eq!(interrupted, [true, false, true, true, true]);
    scene.engine.close().await;
}

// a stop before a group.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_before_a_group_records_no_call_of_it() {
    let mut scene = Scene::started(|_| {}, |slow| vec![slow("a"), alone(), quick(), quick()]).await;
    scene.until_steps(&["running"]).await;
    scene.engine.stop(scene.task, false).await;
    assert_eq!(scene.steps().await, ["cancelled"]);
    assert_eq!(scene.feed().await, ["call 1"]);
    scene.release().await;
    scene.engine.end(scene.root).await;
    scene.engine.close().await;
}

// X-8, T-12, D-26: a failure within the service is no result. Siblings that have started end, nothing else starts, and the
// task fails with the first failure.
#[tokio::test(flavor = "multi_thread")]
async fn an_internal_failure_lets_siblings_end_and_starts_nothing_more() {
    let mut scene = Scene::new(
        |c| c.worker.max_attempts = 1,
        async |engine| engine.running(),
        |slow| vec![slow("a"), quick(), alone(), quick()],
    )
    .await;
    sqlx::raw_sql(
        "create sequence refused;
         create function refuse() returns trigger language plpgsql as
             $$ begin perform nextval('refused'); raise exception 'out of luck'; end $$;
         create trigger refuse before insert on awaits for each row execute function refuse()",
    )
    .execute(&scene.engine.pool)
    .await
    .unwrap();
    scene.calls.open();
    scene.until_steps(&["running", "completed"]).await;
    scene.release().await;
    until("the call has failed", async || {
        scene
            .engine
            .count("select is_called::integer::bigint from refused")
            .await
            == 1
    })
    .await;
    assert_eq!(scene.engine.status(scene.task).await, Running);
    expire_leases(&scene.engine).await;
    let (status, error) = scene.engine.end(scene.task).await;
    assert_eq!(status, Failed);
    assert!(error.contains("lease_lost"), "{error}");
    assert_eq!(scene.steps().await, ["failed", "completed"]);
    // The quick one's result is there, none is made up for the others.
    assert_eq!(scene.feed().await, ["call 1", "call 2", "result 2"]);
    scene.engine.end(scene.root).await;
    scene.engine.close().await;
}

// the task lives until the calls that have started have ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_fails_when_the_last_of_its_started_calls_has_ended() {
    let mut scene = Scene::started(
        |c| c.worker.max_attempts = 1,
        |slow| vec![quick(), slow("a"), slow("b"), alone()],
    )
    .await;
    scene
        .until_steps(&["completed", "running", "running"])
        .await;
    let sql = "update steps set lease_expires_at = now() - interval '1 second', worker_id = gen_random_uuid(), attempt = 7
        where task_id = $1 and ordinal = $2 and status = 'running'";
    let lose = async |ordinal: i32| {
        let lost = sqlx::query(sql)
            .bind(scene.task.0)
            .bind(ordinal)
            .execute(&scene.engine.pool);
        lost.await.unwrap();
    };
    lose(2).await;
    scene.until_steps(&["completed", "failed", "running"]).await;
    assert_eq!(scene.engine.status(scene.task).await, Running);
    scene.release().await;
    let (status, error) = scene.engine.end(scene.task).await;
    assert!(
        status == Failed && error.contains("lease_lost"),
        "{status} {error}"
    );
    assert_eq!(scene.steps().await, ["completed", "failed", "completed"]);
    assert_eq!(
        scene.feed().await,
        ["call 1", "call 2", "call 3", "result 1", "result 3"]
    );
    // The call that was lost has made no child; the other one's lives to its end, unheard.
    assert_eq!(scene.engine.children(scene.task).await.len(), 1);
    scene.engine.end(scene.root).await;
    scene.engine.close().await;
}

// the first call stays with the worker that has decided, an idle one takes its sibling.
#[tokio::test(flavor = "multi_thread")]
async fn idle_workers_take_siblings() {
    let mut others = Vec::new();
    let mut scene = Scene::new(
        |c| c.worker.concurrency = 1,
        async |engine| {
            others = vec![
                Process::start(&engine.config, &engine.pool, true, true),
                Process::start(&engine.config, &engine.pool, true, false),
            ];
            engine
        },
        |slow| vec![slow("a"), slow("b")],
    )
    .await;
    scene.calls.open();
    scene.until_steps(&["running", "running"]).await;
    let workers: Vec<Uuid> =
        sqlx::query_scalar("select worker_id from steps where task_id = $1 order by ordinal")
            .bind(scene.task.0)
            .fetch_all(&scene.engine.pool)
            .await
            .unwrap();
    assert!(
        workers[0] == workers[1] && workers[1] != workers[2],
        "{workers:?}"
    );
    // T-30: wherever they run
    let stopped = stopping(&scene.engine, scene.task, true);
    assert_eq!(stopped.await.unwrap().stopped, 1);
    scene.release().await;
    scene.engine.end(scene.root).await;
    assert_eq!(scene.engine.children(scene.task).await, []);
    scene.engine.close().await;
    for process in others {
        process.stop().await;
    }
}

// one worker with one slot drains a turn, before what came to the queue in the meantime.
#[tokio::test(flavor = "multi_thread")]
async fn one_slot_drains_a_turn() {
    let mut scene = Scene::started(
        |c| c.worker.concurrency = 1,
        |slow| vec![slow("a"), quick(), quick(), quick()],
    )
    .await;
    scene
        .until_steps(&["running", "queued", "queued", "queued"])
        .await;
    // Older than the queued calls.
    let other = scene.engine.post("other").await;
    until("the other task is queued", async || {
        ask::<i64>(
            &scene.engine,
            "select count(*) from steps where task_id = $1 and status = 'queued'",
            other,
        )
        .await
            == 1
    })
    .await;
    sqlx::query("update steps set run_at = now() - interval '1 minute' where task_id = $1")
        .bind(other.0)
        .execute(&scene.engine.pool)
        .await
        .unwrap();
    scene.release().await;
    scene.ends().await;
    scene.engine.end(other).await;
    let order: Vec<i32> = sqlx::query_scalar(
        "select ordinal from steps where (task_id = $1 and turn = 1 or task_id = $2) and ordinal <> 1
            and queued_at > (select queued_at from steps where task_id = $1 and ordinal = 0 and turn = 1)
         order by started_at",
    )
    .bind(scene.task.0)
    .bind(other.0)
    .fetch_all(&scene.engine.pool)
    .await
    .unwrap();
    assert_eq!(order, [2, 3, 4, 0]);
    scene.engine.close().await;
}

// H-20, H-25: the worker dies with one call under way; another one runs that call and no other, and what had
// ended is not lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_lost_its_worker_is_run_again_alone() {
    let mut scene = Scene::started(
        |c| c.worker.max_parallel_tool_calls = 3,
        |slow| vec![slow("a"), quick(), alone(), quick()],
    )
    .await;
    scene.until_steps(&["running", "completed"]).await;
    until_waiting(&scene.engine.pool, 1).await;
    scene.engine.kill().await;
    expire_leases(&scene.engine).await;
    scene.release().await;
    scene.engine.resume();
    scene.ends().await;
    let attempts: Vec<i32> = sqlx::query_scalar(
        "select attempt from steps where task_id = $1 and turn = 1 order by ordinal",
    )
    .bind(scene.task.0)
    .fetch_all(&scene.engine.pool)
    .await
    .unwrap();
    assert_eq!(attempts, [1, 2, 1, 1, 1]);
    assert_eq!(scene.engine.children(scene.task).await.len(), 1);
    assert_eq!(answered(&scene.last_request()), ["c1", "c2", "c3", "c4"]);
    scene.engine.close().await;
}

/// What happens to a turn of two calls, in whatever order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    /// The call with this ordinal has its result.
    Ends(i32),
    Stop,
    /// The worker of the second call was lost for good.
    LeaseLost,
}

// H-11: every order in which the ends of two calls, and what breaks a turn off, get the task's lock.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_gets_the_lock_first() {
    use Event::*;
    for events in [
        vec![Ends(1), Ends(2)],
        vec![Ends(2), Ends(1)],
        vec![Ends(1), Ends(2), Stop],
        vec![Ends(2), Ends(1), Stop],
        vec![Ends(1), Stop, Ends(2)],
        vec![Ends(2), Stop, Ends(1)],
        vec![Stop, Ends(1), Ends(2)],
        vec![Stop, Ends(2), Ends(1)],
        vec![Ends(1), LeaseLost],
        vec![LeaseLost, Ends(1)],
        vec![LeaseLost, Ends(2), Ends(1)],
        vec![Ends(2), LeaseLost, Ends(1)],
    ] {
        race(&events).await;
    }
}

async fn race(events: &[Event]) {
    let mut engine = Engine::scripted_with(|c| c.worker.max_attempts = 1).await;
    engine
        .llm()
        .script(|r| Reply::text(format!("heard {}", r.results().len())));
    let task = engine.post("go").await;
    let orchestrator = Orchestrator::new(&engine.config, engine.pool.clone(), engine.hub.clone());
    orchestrator.dispatch().await.unwrap();
    let calls: Arc<[ToolCall]> = ["1", "2"]
        .map(|id| ToolCall {
            id: id.into(),
            name: "get_subtask_result".into(),
            arguments: "{}".into(),
            invalid: None,
            provider_data: None,
        })
        .into();
    let decide = take(&engine).await;
    let asked = Asked {
        prompt: Arc::new(PromptRecord {
            hash: [7; 32],
            sections: json!({}),
        }),
        seen_seq: 1,
        model: "stub".into(),
        latency_ms: 1,
        retries: 0,
        spent: Default::default(),
    };
    let decided = Decided {
        decision: Decision {
            calls: calls.to_vec(),
            ..Decision::default()
        },
        concurrency: vec![Concurrency::Parallel; 2],
        answer: Answer::Final(String::new()),
        task: None,
        asked,
    };
    let decided = Outcome::Decided(Box::new(decided));
    let committed = commit(&engine.pool, &engine.hub, decide, decided).await;
    let Committed::Done(Next {
        held: Some(first),
        queued: true,
        unstarted: false,
    }) = committed
    else {
        panic!("{committed:?}")
    };
    let second = take(&engine).await;
    assert_eq!((first.key.ordinal, second.key.ordinal), (1, 2));

    if events.contains(&Event::LeaseLost) {
        sqlx::query(
            "update steps set lease_expires_at = now() - interval '1 second' where id = $1",
        )
        .bind(second.step.0)
        .execute(&engine.pool)
        .await
        .unwrap();
    }

    let hold = Hold::task(&engine.pool, task).await;
    let mut racing = Vec::new();
    for (n, event) in (1..).zip(events) {
        let claim = if *event == Event::Ends(1) {
            first
        } else {
            second
        };
        let (pool, hub, calls) = (engine.pool.clone(), engine.hub.clone(), calls.clone());
        let (event, workspace) = (*event, engine.workspace());
        racing.push(tokio::spawn(async move {
            match event {
                Event::Ends(_) => {
                    let called = Called {
                        result: format!("result {}", claim.key.ordinal),
                        is_error: false,
                        start: vec![],
                        calls,
                        concurrency: vec![],
                    };
                    let outcome = Outcome::Called(Box::new(called));
                    commit(&pool, &hub, claim, outcome).await;
                }
                Event::Stop => {
                    stop(&pool, &hub, workspace, task, false).await.unwrap();
                }
                Event::LeaseLost => {
                    reap(&pool, &hub, 10, 1).await.unwrap();
                }
            }
        }));
        until_waiting(&engine.pool, n).await;
    }
    hold.release().await;
    for one in racing {
        one.await.unwrap();
    }
    let feed: Vec<String> = sqlx::query_scalar(
        "select text from task_items where task_id = $1 and kind = 'tool_result' order by seq",
    )
    .bind(task.0)
    .fetch_all(&engine.pool)
    .await
    .unwrap();
    let turns = "select count(*) from orchestrator_events where kind = 'turn_committed'";
    let closed = engine.count(turns).await == 1;
    engine.resume();
    let seen = (feed, closed, engine.end(task).await.0);
    // Of those that wait for a lock, the first one gets it first; behind it PostgreSQL keeps no order.
    let mut possible = vec![outcome(events)];
    if let [first, second, third] = *events {
        possible.push(outcome(&[first, third, second]));
    }
    assert!(possible.contains(&seen), "{events:?}: {seen:?}");
    engine.close().await;
}

/// What there is when they have happened in this order: the results, whether the turn was committed, how the task ends.
fn outcome(events: &[Event]) -> (Vec<String>, bool, TaskStatus) {
    let at = |event| events.iter().position(|e| *e == event);
    let (stop, lost) = (at(Event::Stop), at(Event::LeaseLost));
    let is_kept = |n: i32| {
        let ended = at(Event::Ends(n))?;
        let in_time = stop.is_none_or(|stop| ended < stop);
        (in_time && (n == 1 || lost.is_none_or(|lost| ended < lost))).then(|| format!("result {n}"))
    };
    let kept: Vec<String> = [1, 2].into_iter().filter_map(is_kept).collect();
    let (all, in_time) = (kept.len() == 2, stop.is_none_or(|stop| stop == 2));
    let status = match (stop, all) {
        (Some(_), _) => Stopped,
        (None, true) => Completed,
        (None, false) => Failed,
    };
    (kept, all && in_time, status)
}

/// The one step that is queued, for a worker of its own.
async fn take(engine: &Engine) -> Claim {
    let claimed = claim(&engine.pool, ProcessId::new(), 60, 10).await.unwrap();
    assert_eq!(claimed.len(), 1);
    claimed[0].claim
}

/// As a process of its own would.
async fn commit(pool: &PgPool, hub: &Arc<Hub>, claim: Claim, outcome: Outcome) -> Committed {
    let limits = Limits {
        lease_secs: 60,
        parallel_max: 10,
    };
    let checkpointer = Checkpointer::start(pool.clone(), hub.clone(), limits, 1);
    let committed = checkpointer.commit(Commit { claim, outcome }).await;
    committed.unwrap()
}
