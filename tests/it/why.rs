//! Why a task does not move (T-25): each cause against the rows that the service itself writes.

use crate::{
    engine::{Engine, until},
    forced::{
        ByHand, Family, Hold, agent_with, ask, delegate, expire_leases, match_only, until_waiting,
    },
    http::{self, Api, Under},
    stub_llm::{Gate, Reply},
};
use chrono::{DateTime, Utc};
use reconvene::{
    api::auth::Role,
    domain::{
        budget::Limits,
        ids::{ProcessId, StepId, TaskId, WorkspaceId},
        task::TaskStatus::*,
    },
    lifecycle::{self, submit::Recipient},
    orchestrator::Orchestrator,
};
use serde_json::{Value, json};

/// The question over HTTP, as a member of the workspace.
struct Asking {
    api: Api,
    token: String,
}

impl Asking {
    fn of(engine: &Engine) -> Self {
        let api = Api::start_with(engine.pool.clone(), http::config());
        Self::in_workspace(api, engine.workspace())
    }

    fn in_workspace(api: Api, workspace: WorkspaceId) -> Self {
        let token = api.token(workspace, Role::Member);
        Self { api, token }
    }

    /// The whole answer, of which everything but the causes' own fields is checked here.
    async fn why(&self, task: TaskId) -> Value {
        let path = format!("/api/tasks/{task}/why");
        let why = self.api.get(&path, &self.token).await.ok();
        let time = |value: &Value| -> DateTime<Utc> { value.as_str().unwrap().parse().unwrap() };
        let as_of = time(&why["as_of"]);
        let items = why["items"].as_array().unwrap();
        assert_eq!(items[0]["task_id"], json!(task));
        assert_eq!(items[0]["parent_task_id"], Value::Null);
        for (at, item) in items.iter().enumerate() {
            let parent = items[..at]
                .iter()
                .find(|other| other["task_id"] == item["parent_task_id"]);
            assert_eq!(parent.is_some(), at > 0, "{item}");
            let depth = parent.map_or(0, |parent| parent["depth"].as_i64().unwrap() + 1);
            assert_eq!(item["depth"], json!(depth));
            let causes = item["causes"].as_array().unwrap();
            assert!(!causes.is_empty(), "{item}");
            for cause in causes {
                let lasted = (as_of - time(&cause["since"])).num_milliseconds();
                assert_eq!(cause["lasted_ms"], json!(lasted), "{cause}");
            }
        }
        why
    }

    /// What keeps this one task, without the times.
    async fn causes(&self, task: TaskId) -> Vec<Value> {
        causes(&self.why(task).await["items"][0])
    }

    async fn cause(&self, task: TaskId) -> Value {
        let mut causes = self.causes(task).await;
        assert_eq!(causes.len(), 1, "{causes:?}");
        causes.remove(0)
    }
}

fn causes(item: &Value) -> Vec<Value> {
    let mut causes = item["causes"].as_array().unwrap().clone();
    for cause in &mut causes {
        let fields = cause.as_object_mut().unwrap();
        for time in ["since", "lasted_ms", "at", "next_check_at"] {
            fields.remove(time);
        }
    }
    causes
}

/// Each task of the answer with its causes, in its order.
fn chain(why: &Value) -> Vec<(Value, Vec<Value>)> {
    let items = why["items"].as_array().unwrap().iter();
    items
        .map(|item| (item["title"].clone(), causes(item)))
        .collect()
}

fn orchestrator(engine: &Engine) -> Orchestrator {
    Orchestrator::new(&engine.config, engine.pool.clone(), engine.hub.clone())
}

async fn run(engine: &Engine, sql: &'static str) {
    sqlx::raw_sql(sql).execute(&engine.pool).await.unwrap();
}

// T-25: a message that nobody has looked at; then its place among the queued steps of its own workspace, and whether
// anybody works
#[tokio::test(flavor = "multi_thread")]
async fn without_a_worker_a_task_stands_in_the_queue() {
    let engine = Engine::scripted_with(|_| {}).await;
    let asking = Asking::of(&engine);
    let orchestrator = orchestrator(&engine);
    let other = http::workspace(&engine.pool).await;
    let agent = http::agent(&engine.pool, other, "default", "Lead").await;
    let mut tasks = Vec::new();
    for n in 0..3 {
        if n == 1 {
            let mut message = engine.message(Recipient::Agent(agent), "not yours");
            message.workspace = other;
            engine.submit(message).await;
            orchestrator.dispatch().await.unwrap();
        }
        let task = engine.post(&format!("task {n}")).await;
        let event = asking.cause(task).await;
        assert_eq!(event, json!({"kind": "event", "failed": 0}));
        orchestrator.dispatch().await.unwrap();
        tasks.push(task);
    }
    let queued = |before, others_before, workers| {
        json!({"kind": "queued", "tool": null, "before": before,
        "more_before": false, "others_before": others_before, "workers": workers})
    };
    for (task, (before, others)) in tasks.iter().zip([(0, false), (1, true), (2, true)]) {
        assert_eq!(asking.cause(*task).await, queued(before, others, 0));
    }
    // One lives; one is silent, one is no worker.
    for (roles, silent_secs) in [("{api,worker}", 1), ("{worker}", 60), ("{api}", 1)] {
        sqlx::query(
            "insert into processes (id, roles, host, pid, heartbeat_at)
            values ($1, $2::text::text[], '', 1, now() - make_interval(secs => $3))",
        )
        .bind(ProcessId::new())
        .bind(roles)
        .bind(f64::from(silent_secs))
        .execute(&engine.pool)
        .await
        .unwrap();
    }
    assert_eq!(asking.cause(tasks[2]).await, queued(2, true, 1));
    // So far back that nobody counts.
    run(
        &engine,
        "insert into steps (workspace_id, task_id, turn, ordinal, id, kind, stop_generation, call_id, tool, arguments, run_at)
         select t.workspace_id, t.id, 1, n, gen_random_uuid(), 'tool_call', 0, 'c', 't', '{}', now() - interval '1 hour'
         from tasks t, generate_series(1, 1000) n where t.title = 'not yours'",
    )
    .await;
    let mut far = queued(0, true, 1);
    far["more_before"] = json!(true);
    assert_eq!(asking.cause(tasks[2]).await, far);
}

// T-25: who asks the model, and what becomes of it when the worker is gone
#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_asked_until_its_worker_is_lost() {
    let mut engine = Engine::scripted().await;
    let asking = Asking::of(&engine);
    let gate = Gate::new();
    let held = gate.clone();
    engine
        .llm()
        .script(move |_| Reply::text("done").held_by(&held));
    let task = engine.post("go").await;
    engine.llm().wait_for_requests(1).await;
    let worker = engine.hub.process;
    let model = json!({"kind": "model", "worker": worker, "attempt": 1});
    assert_eq!(asking.cause(task).await, model);
    engine.kill().await;
    assert_eq!(asking.cause(task).await, model, "nobody knows yet");
    expire_leases(&engine).await;
    let lost = json!({"kind": "lease_lost", "tool": null, "worker": worker, "lost_before": 0});
    assert_eq!(asking.cause(task).await, lost);
    let why = asking.why(task).await;
    let lasted = why["items"][0]["causes"][0]["lasted_ms"].as_i64().unwrap();
    assert!((1_000..600_000).contains(&lasted), "{lasted}");
    engine.resume();
    gate.open();
    engine.end(task).await;
    let ended = json!({"kind": "ended"});
    assert_eq!(asking.cause(task).await, ended);
    assert_eq!(asking.why(task).await["items"][0]["status"], "completed");
    engine.append(task, "again").await;
    engine.end(task).await;
    assert_eq!(asking.cause(task).await, ended);
    engine.close().await;
}

// T-25, T-14: a busy model is asked again at a time
#[tokio::test(flavor = "multi_thread")]
async fn a_busy_model_is_asked_again_at_a_time() {
    let engine = Engine::scripted_with(|c| c.llm.retry_max_seconds = 600)
        .await
        .running();
    let asking = Asking::of(&engine);
    engine.llm().replies([
        Reply::status(429, "{}").header("retry-after", "300"),
        Reply::text("done"),
    ]);
    let task = engine.post("go").await;
    let queued = "select count(*) from steps where status = 'queued'";
    until("it was sent back", async || {
        engine.llm().arrived() == 1 && engine.count(queued).await == 1
    })
    .await;
    let retry = json!({"kind": "retry", "tool": null, "failed": 1});
    assert_eq!(asking.cause(task).await, retry);
    let why = asking.why(task).await;
    let at = why["items"][0]["causes"][0]["at"].as_str().unwrap();
    let run_at: DateTime<Utc> = ask(
        &engine,
        "select run_at from steps where task_id = $1 and status = 'queued'",
        task,
    )
    .await;
    assert_eq!(at.parse::<DateTime<Utc>>().unwrap(), run_at);
    run(
        &engine,
        "update steps set run_at = now() where status = 'queued'",
    )
    .await;
    engine.end(task).await;
    engine.close().await;
}

// T-25: a tool that runs; the children that it has made and not started
#[tokio::test(flavor = "multi_thread")]
async fn a_tool_runs_and_its_children_have_not_started() {
    let engine = Engine::scripted().await;
    let asking = Asking::of(&engine);
    let researcher = engine.demo.researcher;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", delegate(researcher, &["child"])),
            _ => Reply::text("done"),
        });
    let call_ends = "new.ordinal > 0 and new.status = 'completed'";
    let hold = Hold::stall(&engine.pool, "before update on steps", call_ends).await;
    let task = engine.post("go").await;
    until_waiting(&engine.pool, 1).await;
    let tool = json!({"kind": "tool", "tool": "delegate_tasks", "worker": engine.hub.process, "attempt": 1});
    let why = asking.why(task).await;
    assert_eq!(chain(&why), [(json!("go"), vec![tool])]);
    let child = engine.children(task).await[0];
    let waits = json!({"kind": "not_started"});
    assert_eq!(asking.cause(child).await, waits);
    hold.release().await;
    engine.end(task).await;
    engine.close().await;
}

// T-25: a person, a signal with a name and a time, a signal without, a time: all at once
#[tokio::test(flavor = "multi_thread")]
async fn a_task_may_wait_for_several_things() {
    let engine = Engine::scripted().await;
    let asking = Asking::of(&engine);
    engine.llm().script(|r| match r.turn() {
        0 => Reply::text("")
            .and_call("1", "ask_user", r#"{"question": "Which one?"}"#)
            .and_call(
                "2",
                "wait_for_signal",
                r#"{"key": "paid", "timeout_minutes": 5}"#,
            )
            .and_call("3", "wait_for_signal", "{}")
            .and_call("4", "wait_until", r#"{"seconds": 3600}"#),
        _ => Reply::text("done"),
    });
    let waiter = agent_with(&engine, "Waiter", |a| {
        a.tools = ["ask_user", "wait_for_signal", "wait_until"]
            .map(str::to_owned)
            .to_vec();
    })
    .await;
    let message = engine.message(Recipient::Agent(waiter), "go");
    let task = engine.submit(message).await.task;
    engine.until(task, WaitingForInput).await;
    let groups: Vec<(uuid::Uuid, Option<DateTime<Utc>>)> = sqlx::query_as(
        "select g.id, a.scheduled_resume_at from await_groups g join awaits a on a.group_id = g.id
         where g.task_id = $1 order by g.created_at, g.id",
    )
    .bind(task.0)
    .fetch_all(&engine.pool)
    .await
    .unwrap();
    let why = asking.why(task).await;
    let found = causes(&why["items"][0]);
    assert_eq!(
        found,
        [
            json!({"kind": "user", "group_id": groups[0].0, "question": "Which one?", "deadline_at": null}),
            json!({"kind": "signal", "group_id": groups[1].0, "key": "paid", "deadline_at": groups[1].1.unwrap()}),
            json!({"kind": "signal", "group_id": groups[2].0, "key": null, "deadline_at": null}),
            json!({"kind": "time", "group_id": groups[3].0}),
        ]
    );
    assert_eq!(
        why["items"][0]["causes"][3]["at"],
        json!(groups[3].1.unwrap())
    );
    // What is over is no cause any more.
    let skip = lifecycle::skip::skip(
        &engine.pool,
        &engine.hub,
        engine.workspace(),
        task,
        Some(reconvene::domain::ids::GroupId(groups[0].0)),
    );
    assert_eq!(skip.await.unwrap(), Some(1));
    assert_eq!(asking.causes(task).await, found[1..]);
    engine.stop(task, false).await;
    assert_eq!(asking.cause(task).await, json!({"kind": "ended"}));
    engine.close().await;
}

// T-25, P-5, T-34: down the tree, through what is waited for and nothing else, to the causes; and to nobody else
#[tokio::test(flavor = "multi_thread")]
async fn the_chain_leads_down_to_the_causes() {
    let engine = Engine::scripted().await;
    let asking = Asking::of(&engine);
    let middle = agent_with(&engine, "Middle", |_| {}).await;
    let researcher = engine.demo.researcher;
    let gate = Gate::new();
    let held = gate.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("top", 0) => {
                let mut aside = delegate(researcher, &["aside"]);
                aside["async"] = json!(true);
                let waited_for = delegate(middle, &["middle"])["tasks"][0].clone();
                let mut both = delegate(researcher, &["asks"]);
                both["tasks"].as_array_mut().unwrap().push(waited_for);
                Reply::text("")
                    .and_call("1", "delegate_tasks", &aside.to_string())
                    .and_call("2", "delegate_tasks", &both.to_string())
            }
            ("middle", 0) => {
                let below = delegate(researcher, &["thinks", "quick", "deleted"]);
                Reply::call("delegate_tasks", below)
            }
            ("asks", 0) => Reply::call("ask_user", json!({"question": "Which?"})),
            ("thinks" | "deleted" | "aside", _) => Reply::text("done").held_by(&held),
            _ => Reply::text("done"),
        });
    let top = engine.post("top").await;
    let named = async |title: &str| -> TaskId {
        let sql = "select id from tasks where title = $1";
        let found: Option<uuid::Uuid> = sqlx::query_scalar(sql)
            .bind(title.to_owned())
            .fetch_optional(&engine.pool)
            .await
            .unwrap();
        TaskId(found.unwrap_or_default())
    };
    until("all are where they stay", async || {
        let waiting = "select count(*) from tasks where status = 'waiting_for_input'";
        let matched = "select count(*) from awaits where status = 'completed'";
        engine.count(waiting).await == 3
            && engine.count(matched).await == 1
            && engine.llm().arrived() == 7
    })
    .await;
    let deleted = named("deleted").await;
    lifecycle::delete::delete(
        &engine.pool,
        &engine.hub,
        engine.workspace(),
        deleted,
        false,
    )
    .await
    .unwrap();
    let group = async |task: TaskId| -> uuid::Uuid {
        ask(
            &engine,
            "select id from await_groups where task_id = $1 and status = 'open'",
            task,
        )
        .await
    };
    let children = async |title: &str, total: i32, pending: i32| {
        let group = group(named(title).await).await;
        json!({"kind": "children", "group_id": group, "total": total, "pending": pending})
    };
    let model = json!({"kind": "model", "worker": engine.hub.process, "attempt": 1});
    let asks = group(named("asks").await).await;
    let user = json!({"kind": "user", "group_id": asks, "question": "Which?", "deadline_at": null});
    let why = asking.why(top).await;
    let mut expected = vec![
        (json!("top"), vec![children("top", 2, 2).await]),
        (json!("asks"), vec![user]),
        (json!("middle"), vec![children("middle", 3, 2).await]),
        (json!("thinks"), vec![model.clone()]),
        (json!("deleted"), vec![model.clone()]),
    ];
    assert_eq!(chain(&why), expected);
    assert_eq!(why["left_out"], 0);
    let items = why["items"].as_array().unwrap();
    let flag = |key: &str| -> Vec<Value> { items.iter().map(|item| item[key].clone()).collect() };
    assert_eq!(
        flag("agent_name"),
        ["Lead", "Researcher", "Middle", "Researcher", "Researcher"]
    );
    assert_eq!(flag("deleted"), [false, false, false, false, true]);
    assert_eq!(flag("depth"), [0, 1, 1, 2, 2]);
    let next = items[0]["causes"][0]["next_check_at"].as_str().unwrap();
    let due: DateTime<Utc> = ask(
        &engine,
        "select min(a.scheduled_resume_at) from awaits a join await_groups g on g.id = a.group_id
         where g.task_id = $1 and a.status = 'pending'",
        top,
    )
    .await;
    assert_eq!(next.parse::<DateTime<Utc>>().unwrap(), due);

    // From the middle it is a chain of its own.
    let from_the_middle = asking.why(named("middle").await).await;
    assert_eq!(chain(&from_the_middle), expected.split_off(2));
    assert_eq!(asking.cause(named("aside").await).await, model);
    let other = http::workspace(&engine.pool).await;
    let foreign = asking.api.token(other, Role::Operator);
    for (task, token) in [
        (top, &foreign),
        (deleted, &asking.token),
        (TaskId::new(), &asking.token),
    ] {
        let path = format!("/api/tasks/{task}/why");
        let answer = asking.api.get(&path, token).await;
        answer.problem(404, "not_found");
    }
    gate.open();
    engine.append(named("asks").await, "this one").await;
    engine.end(top).await;
    engine.close().await;
}

// T-25, W-17, W-19: what a parent waited for is over, its resume fails, is put off, and dies; an operator revives it
#[tokio::test(flavor = "multi_thread")]
async fn a_resume_is_due_until_it_is_dead() {
    let mut engine = Engine::scripted_with(|c| c.orchestrator.max_attempts = 2).await;
    let asking = Asking::of(&engine);
    let by_hand = ByHand::of(&engine);
    let family = Family::new(&engine, &["a", "b"], Some(&by_hand)).await;
    let parent = family.parent;
    family.finish(&engine, "a").await;
    match_only(&engine).await;
    let group: uuid::Uuid = ask(
        &engine,
        "select id from await_groups where task_id = $1",
        parent,
    )
    .await;
    let waits = json!({"kind": "children", "group_id": group, "total": 2, "pending": 1});
    assert_eq!(asking.cause(parent).await, waits);
    family.finish(&engine, "b").await;
    // Its signal was not looked at yet.
    let why = asking.why(parent).await;
    assert_eq!(chain(&why)[0].1, [waits]);
    assert_eq!(
        chain(&why)[1..],
        [(json!("b"), vec![json!({"kind": "ended"})])]
    );
    match_only(&engine).await;
    let resume = |failed| json!({"kind": "resume", "group_ids": [group], "failed": failed});
    assert_eq!(asking.cause(parent).await, resume(0));
    // Nothing can be written to any feed.
    run(
        &engine,
        "alter table task_items rename column text to hidden",
    )
    .await;
    let is = async |expected: &Value| asking.cause(parent).await == *expected;
    by_hand
        .dispatch_until("it has failed once", async || is(&resume(1)).await)
        .await;
    let why = asking.why(parent).await;
    let at = why["items"][0]["causes"][0]["at"].as_str().unwrap();
    let not_before: DateTime<Utc> = ask(
        &engine,
        "select not_before from orchestrator_events where task_id = $1",
        parent,
    )
    .await;
    assert_eq!(at.parse::<DateTime<Utc>>().unwrap(), not_before);
    run(&engine, "update orchestrator_events set not_before = now()").await;
    let dead = json!({"kind": "event_dead", "group_ids": [group], "failed": 2});
    by_hand
        .dispatch_until("it is dead", async || is(&dead).await)
        .await;
    run(
        &engine,
        "alter table task_items rename column hidden to text",
    )
    .await;
    let event: i64 = ask(
        &engine,
        "select id from orchestrator_events where task_id = $1",
        parent,
    )
    .await;
    let revived = lifecycle::revive::revive(&engine.pool, &engine.hub, event).await;
    assert!(revived.unwrap());
    assert_eq!(asking.cause(parent).await, resume(0));
    by_hand.stop().await;
    engine.resume();
    engine.end(parent).await;
    engine.close().await;
}

// T-25, T-18: a call that waits for others under a budget says whose budget it is
#[tokio::test(flavor = "multi_thread")]
async fn a_call_behind_a_budget_says_whose_it_is() {
    let engine = Engine::scripted().await;
    let asking = Asking::of(&engine);
    let researcher = engine.demo.researcher;
    let gate = Gate::new();
    let held = gate.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("lead", 0) => Reply::call("delegate_tasks", delegate(researcher, &["a", "b"])),
            ("lead", _) => Reply::text("done"),
            _ => Reply::text("part").held_by(&held),
        });
    let mut message = engine.message(Recipient::DefaultAgent, "lead");
    message.budget = Some(Limits {
        // Less than two calls may take, by their estimates.
        tokens: Some(1_500),
        ..Limits::default()
    });
    let task = engine.submit(message).await.task;
    engine.llm().wait_for_requests(2).await;
    engine.until(task, WaitingForInput).await;
    let limit = json!({"kind": "limit",
        "budgets": [{"of": "task", "task_id": task, "title": "lead", "calls": 1}]});
    // The step that waits looks again and again.
    until("one works, the other waits for it", async || {
        let found = chain(&asking.why(task).await);
        let kinds: Vec<&Value> = found[1..].iter().map(|(_, causes)| &causes[0]).collect();
        kinds.contains(&&limit) && kinds.iter().any(|cause| cause["kind"] == "model")
    })
    .await;
    lifecycle::budget::set(
        &engine.pool,
        engine.workspace(),
        Some(Limits {
            tokens: Some(1_000_000),
            ..Limits::default()
        }),
    )
    .await
    .unwrap();
    let before = engine.llm().arrived();
    let other = engine.post("other").await;
    engine.llm().wait_for_requests(before + 1).await;
    until("the workspace's budget is named as well", async || {
        let found = chain(&asking.why(task).await);
        found[1..].iter().any(|(_, causes)| {
            let owners = causes[0]["budgets"].as_array().cloned().unwrap_or_default();
            let mut owners: Vec<String> = owners.iter().map(|b| b["of"].to_string()).collect();
            owners.sort();
            owners == ["\"task\"", "\"workspace\""]
        })
    })
    .await;
    gate.open();
    engine.end(task).await;
    engine.end(other).await;
    engine.close().await;
}

// T-25: a large tree is cut, and says by how much; a task that nothing can move says so
#[tokio::test]
async fn what_is_too_much_is_left_out_and_counted() {
    let api = Api::start().await;
    let pool = api.pool.clone();
    let home = http::workspace(&pool).await;
    let agent = http::agent(&pool, home, "default", "Lead").await;
    let parent = http::task_under(&pool, home, agent, "parent", None, "waiting_for_input").await;
    let asking = Asking::in_workspace(api, home);
    assert_eq!(
        asking.cause(parent).await,
        json!({"kind": "unexplained"}),
        "it waits, and there is nothing that it waits for"
    );
    let total = 230;
    let step = StepId::new();
    let group = http::group(&pool, home, parent, step, "child_task", total).await;
    for ordinal in 0..total {
        let under = Under {
            parent,
            root: parent,
            step,
            ordinal,
            depth: 1,
        };
        let status = "waiting_for_input";
        let child = http::task_under(&pool, home, agent, "child", Some(under), status).await;
        sqlx::query(
            "insert into awaits (workspace_id, group_id, ordinal, source_type, correlation_key)
            values ($1, $2, $3, 'child_task', $4)",
        )
        .bind(home)
        .bind(group)
        .bind(ordinal)
        .bind(child.to_string())
        .execute(&pool)
        .await
        .unwrap();
    }
    // A child that is gone is waited for, and can not be shown.
    sqlx::query("update awaits set correlation_key = $1 where ordinal = 0")
        .bind(TaskId::new().to_string())
        .execute(&pool)
        .await
        .unwrap();
    let why = asking.why(parent).await;
    assert_eq!(why["items"].as_array().unwrap().len(), 199);
    assert_eq!(why["left_out"], 31);
    let children = json!({"kind": "children", "group_id": group, "total": 230, "pending": 230});
    assert_eq!(chain(&why)[0].1, [children]);
}
