//! The `delegate_tasks` call through the real tool: expansion, guards, both modes, depth.

use crate::{
    engine::{Engine, until},
    forced::{Family, agent, ask, decide_steps, delegate, resume_messages},
    stub_llm::{Gate, Reply},
};
use reconvene::{
    domain::{
        agent::AgentDefinition,
        ids::{AgentId, TaskId},
        task::TaskStatus::*,
    },
    lifecycle::agents::{create, create_draft, create_workspace, delete},
    lifecycle::submit::Recipient,
};
use serde_json::{Value, json};
use sqlx::types::Json;

/// A task of the lead that makes one call with these arguments, byte for byte, and ends. Children answer at once.
async fn call_raw(engine: &Engine, arguments: &str) -> (TaskId, String) {
    let (message, arguments) = (
        format!("lead {}", uuid::Uuid::new_v4()),
        arguments.to_owned(),
    );
    let lead = message.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user() == lead, r.turn()) {
            (true, 0) => Reply::text("").and_call("c", "delegate_tasks", &arguments),
            (true, _) => Reply::text("end"),
            (false, _) => Reply::text("did it"),
        });
    let task = engine.post(&message).await;
    let (status, output) = engine.end(task).await;
    assert_eq!((status, output.as_str()), (Completed, "end"));
    let sql = "select text from task_items where task_id = $1 and kind = 'tool_result'";
    (task, ask(engine, sql, task).await)
}

async fn call(engine: &Engine, arguments: Value) -> (TaskId, String) {
    call_raw(engine, &arguments.to_string()).await
}

/// A call that must create nothing, and be asked about once more. Returns what the model was told.
async fn refused(engine: &Engine, arguments: Value) -> String {
    let (task, result) = call(engine, arguments).await;
    assert_eq!(engine.children(task).await, [], "{result}");
    assert_eq!(decide_steps(engine, task).await, 2);
    let groups: i64 = ask(
        engine,
        "select count(*) from await_groups where task_id = $1",
        task,
    )
    .await;
    assert_eq!(groups, 0);
    result
}

/// Title and first message of each child by ordinal.
async fn born(engine: &Engine, task: TaskId) -> Vec<(String, String)> {
    sqlx::query_as(
        "select t.title, i.text from tasks t join task_items i on i.task_id = t.id and i.seq = 1
         where t.parent_task_id = $1 order by t.ordinal",
    )
    .bind(task.0)
    .fetch_all(&engine.pool)
    .await
    .unwrap()
}

// D-1, D-2, D-3: one child per value in order, values inserted literally and in one pass, duplicates kept.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_expands_into_children_in_order() {
    let engine = Engine::scripted().await;
    let r = engine.demo.researcher;
    let arguments = format!(
        r#"{{"tasks": [
            {{"agent_group_id": "{r}", "prompt": "alone {{{{item}}}}"}},
            {{"agent_group_id": "{r}", "prompt": "do {{{{item}}}}, {{{{item}}}}!", "title": "T {{{{item}}}}",
              "inputs": ["a{{{{item}}}}", 12345678901234567890.10, true, {{"k": [1, null]}}, "{{{{ 7*7 }}}}", "a", "a"]}},
            {{"agent_group_id": "{r}", "prompt": "look at", "title": "See", "inputs": ["x"]}}
        ]}}"#
    );
    let (task, _) = call_raw(&engine, &arguments).await;
    let both = |v: &str| (format!("T {v}"), format!("do {v}, {v}!"));
    assert_eq!(
        born(&engine, task).await,
        [
            ("alone {{item}}".to_owned(), "alone {{item}}".to_owned()),
            both("a{{item}}"),
            both("12345678901234567890.10"),
            both("true"),
            both(r#"{"k":[1,null]}"#),
            both("{{ 7*7 }}"),
            both("a"),
            both("a"),
            ("See: x".to_owned(), "look at\n\nx".to_owned()),
        ]
    );
    engine.close().await;
}

// D-3, D-4, D-5, D-40, H-06, H-09: any fault in any entry, and nothing is made; exactly one further decide request.
#[tokio::test(flavor = "multi_thread")]
async fn a_faulty_call_creates_nothing_and_says_what_to_do() {
    let engine = Engine::scripted_with(|c| c.spawn_tasks.max_children_per_call = 3)
        .await
        .running();
    let r = engine.demo.researcher;
    let one = json!({"agent_group_id": r, "prompt": "p"});
    let with = |inputs: Value| json!({"agent_group_id": r, "prompt": "p", "inputs": inputs});
    for (arguments, words) in [
        (json!({"tasks": []}), "0 children"),
        (json!({"tasks": [one, with(json!([]))]}), "tasks[1]"),
        (
            json!({"tasks": [with(json!([1, 2])), with(json!([1, 2]))]}),
            "4 tasks; the most per call is 3",
        ),
        (
            json!({"tasks": [one, {"agent_group_id": r, "prompt": " "}]}),
            "tasks[1]",
        ),
        (
            json!({"tasks": [one, {"agent_group_id": AgentId::new(), "prompt": "p"}]}),
            "tasks[1]",
        ),
        (
            json!({"tasks": [one], "timeout_minutes": 0}),
            "timeout_minutes is 0",
        ),
        (
            json!({"tasks": [one], "timeout_minutes": -3}),
            "timeout_minutes is -3",
        ),
        // Lineage and depth are no arguments.
        (json!({"tasks": [one], "depth": 0}), "depth"),
        (
            json!({"tasks": [{"agent_group_id": r, "prompt": "p", "parent_task_id": null}]}),
            "parent_task_id",
        ),
        // All guards hold for async calls too (D-30).
        (
            json!({"tasks": [one, with(json!([]))], "async": true}),
            "tasks[1]",
        ),
    ] {
        let told = refused(&engine, arguments.clone()).await;
        assert!(told.contains(words), "{arguments}: {told}");
    }
    let (task, _) = call(&engine, json!({"tasks": [one, with(json!([1, 1]))]})).await;
    assert_eq!(engine.children(task).await.len(), 3);
    engine.close().await;
}

// D-40: the default, a value, and the clamp, by the database's clock.
#[tokio::test(flavor = "multi_thread")]
async fn the_window_of_a_group_is_the_calls_own_within_bounds() {
    let engine = Engine::scripted().await;
    let one = json!([{"agent_group_id": engine.demo.researcher, "prompt": "p"}]);
    for (arguments, seconds) in [
        (json!({"tasks": one}), 3600),
        (json!({"tasks": one, "timeout_minutes": 0.5}), 30),
        (json!({"tasks": one, "timeout_minutes": 999_999}), 86_400),
    ] {
        let (task, _) = call(&engine, arguments).await;
        let sql = "select count(*) from await_groups g join awaits a on a.group_id = g.id where g.task_id = $1
            and a.scheduled_resume_at - a.created_at = make_interval(secs => g.window_seconds)
            and g.strategy = 'all_required' and a.source_type = 'child_task'";
        assert_eq!(ask::<i64>(&engine, sql, task).await, 1);
        let sql = "select window_seconds from await_groups where task_id = $1";
        assert_eq!(ask::<i32>(&engine, sql, task).await, seconds);
    }
    engine.close().await;
}

// D-10: nothing tells an agent that is not there from one that is not for this caller.
#[tokio::test(flavor = "multi_thread")]
async fn targets_out_of_reach_are_refused_with_one_message() {
    let engine = Engine::scripted().await;
    let (pool, own) = (&engine.pool, engine.workspace());
    let other = create_workspace(pool, "other", "Other").await.unwrap();
    let definition = AgentDefinition {
        name: "A".into(),
        ..Default::default()
    };
    let deleted = create(pool, own, &definition).await.unwrap().id;
    delete(pool, own, deleted, None).await.unwrap();
    let draft = create_draft(pool, own, &definition).await.unwrap().id;
    let private = create(pool, other, &definition).await.unwrap().id;
    let mut told = Vec::new();
    for id in [AgentId::new(), deleted, draft, private] {
        let args = json!({"tasks": [{"agent_group_id": id, "prompt": "p"}]});
        let text = refused(&engine, args).await;
        told.push(text.replace(&id.to_string(), "ID"));
    }
    let not_even_an_id = json!({"tasks": [{"agent_group_id": "ID", "prompt": "p"}]});
    told.push(refused(&engine, not_even_an_id).await);
    assert!(told.iter().all(|t| *t == told[0]), "{told:?}");
    let itself = json!({"tasks": [{"agent_group_id": engine.demo.lead, "prompt": "p"}]});
    let text = refused(&engine, itself).await;
    assert!(text.contains("itself"), "{text}");
    engine.close().await;
}

// D-10, A-25: a public agent lends its definition; its task, signals and steps are the caller's.
#[tokio::test(flavor = "multi_thread")]
async fn a_public_agent_of_another_workspace_runs_in_the_callers() {
    let engine = Engine::scripted().await;
    let other = create_workspace(&engine.pool, "other", "Other")
        .await
        .unwrap();
    let definition = AgentDefinition {
        name: "Lent".into(),
        instructions: "You are lent.".into(),
        is_public: true,
        ..Default::default()
    };
    let lent = create(&engine.pool, other, &definition).await.unwrap().id;
    let (task, _) = call(&engine, delegate(lent, &["p"])).await;
    let children = engine.children(task).await;
    let row: (uuid::Uuid, uuid::Uuid, String) =
        sqlx::query_as("select workspace_id, agent_workspace_id, status from tasks where id = $1")
            .bind(children[0].0)
            .fetch_one(&engine.pool)
            .await
            .unwrap();
    assert_eq!(row, (engine.workspace().0, other.0, "completed".into()));
    let asked = engine.llm().requests();
    assert!(asked.iter().any(|r| r.system().contains("You are lent.")));
    for table in [
        "tasks",
        "steps",
        "signals",
        "await_groups",
        "task_items",
        "orchestrator_events",
        "decision_logs",
    ] {
        let sql = format!("select count(*) from {table} where workspace_id = $1");
        let n: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
            .bind(other.0)
            .fetch_one(&engine.pool)
            .await
            .unwrap();
        assert_eq!(n, 0, "{table}");
    }
    engine.close().await;
}

// D-21: the call's result, and a parent that rests without a step until its children are done.
#[tokio::test(flavor = "multi_thread")]
async fn a_barrier_call_answers_with_its_group_and_rests() {
    let engine = Engine::scripted().await;
    let names: Vec<String> = (0..26).map(|n| format!("c{n}")).collect();
    let names: Vec<&'static str> = names.into_iter().map(|n| &*n.leak()).collect();
    let family = Family::new(&engine, &names, None).await;
    let sql = "select text from task_items where task_id = $1 and kind = 'tool_result'";
    let result: Value =
        serde_json::from_str(&ask::<String>(&engine, sql, family.parent).await).unwrap();
    let group: uuid::Uuid = ask(
        &engine,
        "select id from await_groups where task_id = $1",
        family.parent,
    )
    .await;
    let echo: Vec<Value> = (0..25)
        .map(|n| json!({"task_id": family.children[n], "title": names[n], "agent_group_id": engine.demo.researcher}))
        .collect();
    assert_eq!(
        result,
        json!({"status": "awaiting_child_tasks", "group_id": group, "strategy": "all_required", "children": echo, "total": 26})
    );
    assert_eq!(decide_steps(&engine, family.parent).await, 1);
    family.finish_all(&engine).await;
    engine.end(family.parent).await;
    assert_eq!(decide_steps(&engine, family.parent).await, 2);
    engine.close().await;
}

// D-30, D-31: nobody waits, the parent goes on and ends while its children run; their signals find nothing.
#[tokio::test(flavor = "multi_thread")]
async fn an_async_call_starts_children_that_nobody_waits_for() {
    let engine = Engine::scripted().await;
    let gate = Gate::new();
    let mut args = delegate(engine.demo.researcher, &["one", "two"]);
    args["async"] = json!(true);
    args["timeout_minutes"] = json!(0); // ignored
    let held = gate.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()),
            ("go", _) => Reply::text(r.results()[0].1),
            (child, _) => Reply::text(child).held_by(&held),
        });
    let parent = engine.post("go").await;
    let (status, output) = engine.end(parent).await;
    assert_eq!(status, Completed);
    let children = engine.children(parent).await;
    let echo: Vec<Value> = ["one", "two"].iter().zip(&children)
        .map(|(title, id)| json!({"task_id": id, "title": title, "agent_group_id": engine.demo.researcher}))
        .collect();
    let result: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(
        result,
        json!({"status": "spawned_async", "group_id": "", "strategy": "", "children": echo, "total": 2})
    );
    let statuses: Vec<Json<Value>> = sqlx::query_scalar(
        "select data from task_items where task_id = $1 and kind in ('status', 'delegation') order by seq",
    )
    .bind(parent.0)
    .fetch_all(&engine.pool)
    .await
    .unwrap();
    assert_eq!(statuses[0]["mode"], "async", "{statuses:?}");
    assert_eq!(
        statuses[1].0,
        json!({"status": "completed"}),
        "it never waited"
    );
    gate.open();
    for child in children {
        assert_eq!(engine.end(child).await.0, Completed);
    }
    until("the signals are settled", async || {
        engine
            .count("select count(*) from signals where status = 'no_match'")
            .await
            == 2
    })
    .await;
    assert_eq!(engine.count("select count(*) from await_groups").await, 0);
    assert_eq!(resume_messages(&engine, parent).await, [""; 0]);
    engine.close().await;
}

// T-9, A-13: the tool is not offered, and refused when the model asks for it all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_ban_on_delegation_holds_at_the_prompt_and_at_the_call() {
    let engine = Engine::scripted().await;
    let args = delegate(engine.demo.researcher, &["one"]);
    engine.llm().script(move |r| match r.turn() {
        0 => Reply::call("delegate_tasks", args.clone()),
        _ => Reply::text(r.results()[0].1),
    });
    let mut message = engine.message(Recipient::DefaultAgent, "go");
    message.disable_delegation = true;
    let task = engine.submit(message).await.task;
    let (_, output) = engine.end(task).await;
    assert!(
        output.contains("There is no tool \"delegate_tasks\""),
        "{output}"
    );
    assert_eq!(engine.children(task).await, []);
    assert!(
        engine
            .llm()
            .requests()
            .iter()
            .all(|r| !r.offers("delegate_tasks") && r.offers("ask_user"))
    );
    engine.close().await;
}

// T-9, D-54: what is forbidden to a task is forbidden beneath it.
#[tokio::test(flavor = "multi_thread")]
async fn children_inherit_the_ban() {
    let engine = Engine::scripted().await;
    let helper = agent(&engine, "Helper").await;
    let gate = Gate::new();
    let (held, args) = (gate.clone(), delegate(helper, &["child"]));
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()).held_by(&held),
            (_, _) => Reply::text("ok"),
        });
    let task = engine.post("go").await;
    engine.llm().wait_for_requests(1).await;
    // The ban is set while the model thinks: the call was granted before, its child is made after.
    sqlx::query(
        "update tasks set source_metadata = '{\"disable_delegation\": true}' where id = $1",
    )
    .bind(task.0)
    .execute(&engine.pool)
    .await
    .unwrap();
    gate.open();
    engine.end(task).await;
    let asked = engine.llm().requests();
    let child = asked.iter().find(|r| r.first_user() == "child").unwrap();
    assert!(!child.offers("delegate_tasks") && child.offers("ask_user"));
    engine.close().await;
}
