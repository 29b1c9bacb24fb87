//! Budgets of task trees and workspaces (T-18).

use crate::{
    engine::Engine,
    forced::{agent_with, delegate, expire_leases},
    http::{self, Api, request},
    stub_llm::{Gate, Reply},
};
use axum::http::Method;
use reconvene::{
    api::auth::Role,
    config::Price,
    domain::{
        budget::Limits,
        ids::{AgentId, TaskId},
        task::TaskStatus::*,
    },
    lifecycle::{self, submit::Recipient},
};
use serde_json::{Value, json};

fn tokens(n: i64) -> Limits {
    Limits {
        tokens: Some(n),
        ..Limits::default()
    }
}

async fn post(engine: &Engine, to: Recipient, text: &str, budget: Limits) -> TaskId {
    let mut message = engine.message(to, text);
    message.budget = Some(budget);
    engine.submit(message).await.task
}

async fn shown(engine: &Engine, task: TaskId) -> Value {
    let api = Api::start_with(engine.pool.clone(), http::config());
    let token = api.token(engine.workspace(), Role::Member);
    api.get(&format!("/api/tasks/{task}"), &token).await.ok()
}

/// A turn after which the model is asked again.
fn once_more() -> Reply {
    Reply::call("get_subtask_result", json!({}))
}

async fn active(engine: &Engine) -> i64 {
    engine
        .count("select count(*) from tasks where status not in ('completed', 'failed', 'stopped')")
        .await
}

fn config_budget(budget: Value) -> impl FnOnce(&mut reconvene::domain::agent::AgentDefinition) {
    move |agent| {
        agent.config.insert("budget".into(), budget);
    }
}

// T-18: asked before each call; what was reached is told, and shown
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_reaches_its_budget_is_stopped_before_its_next_call() {
    let engine = Engine::scripted().await;
    engine.llm().script(|_| once_more().usage(30, 10, 20));
    let task = post(&engine, Recipient::DefaultAgent, "go", tokens(100)).await;
    engine.until(task, Stopped).await;
    assert_eq!(engine.llm().arrived(), 3, "40, 80, 120");
    let view = shown(&engine, task).await;
    assert_eq!(view["error"]["code"], "budget_exhausted");
    let message = "The budget of this task tree is used up: 120 of 100 tokens.";
    assert_eq!(view["error"]["message"], message);
    assert_eq!(view["budget"]["limits"]["tokens"], 100);
    assert_eq!(view["budget"]["tokens"], 120);

    // Reopened, it has no more than before.
    engine.append(task, "go on").await;
    engine
        .until_true("it has ended again", async || {
            engine.status(task).await == Stopped
        })
        .await;
    crate::engine::rest(&engine.pool).await;
    assert_eq!(engine.llm().arrived(), 3);
    engine.close().await;
}

// T-18: twenty children at once pass the limit by one call at most, and all of the tree ends
#[tokio::test(flavor = "multi_thread")]
async fn many_children_at_once_do_not_pass_the_limit_by_more_than_one_call() {
    let engine = Engine::scripted_with(|config| config.worker.poll_interval_ms = 20)
        .await
        .running();
    let researcher = engine.demo.researcher;
    // Each call takes less than its estimate, which is more than a thousand.
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("lead", 0) => {
                let pieces: Vec<String> = (0..20).map(|n| format!("piece {n}")).collect();
                let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
                Reply::call("delegate_tasks", delegate(researcher, &pieces)).usage(900, 100, 0)
            }
            _ => once_more()
                .usage(900, 100, 0)
                .after(std::time::Duration::from_millis(20)),
        });
    let task = post(&engine, Recipient::DefaultAgent, "lead", tokens(8_500)).await;
    engine.until(task, Stopped).await;
    crate::engine::rest(&engine.pool).await;
    assert_eq!(active(&engine).await, 0);
    assert_eq!(
        engine.llm().arrived(),
        9,
        "a call of 1,000 is made while less than 8,500 are taken"
    );
    let told = engine
        .count("select count(*) from tasks where error ->> 'code' = 'budget_exhausted'")
        .await;
    assert_eq!(told, 21);
    engine.close().await;
}

// T-18, W-1: a child that has used up its own agent's budget is stopped; its parent is woken and told
#[tokio::test(flavor = "multi_thread")]
async fn the_parent_of_an_exhausted_child_wakes() {
    let engine = Engine::scripted().await;
    let greedy = agent_with(&engine, "Greedy", config_budget(json!({"tokens": 20}))).await;
    let researcher = engine.demo.researcher;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("lead", 0) => Reply::call("delegate_tasks", delegate(greedy, &["much"])),
            ("much", 0) => Reply::call("delegate_tasks", delegate(researcher, &["more"])),
            ("more", _) => once_more(),
            _ => Reply::text("done"),
        });
    let task = engine.post("lead").await;
    assert_eq!(engine.end(task).await, (Completed, "done".to_owned()));
    let last = engine.llm().requests().pop().unwrap();
    assert!(
        last.last_user().contains("budget_exhausted"),
        "{}",
        last.last_user()
    );
    let child = engine.children(task).await[0];
    let grandchild = engine.children(child).await[0];
    for beneath in [child, grandchild] {
        assert_eq!(
            shown(&engine, beneath).await["error"]["code"],
            "budget_exhausted"
        );
    }
    assert_eq!(
        shown(&engine, child).await["budget"]["tokens"],
        30,
        "both calls, 15 each"
    );
    assert_eq!(shown(&engine, task).await["budget"], Value::Null);
    engine.close().await;
}

// T-18, T-17: the cost is counted exactly; a model without a price can not be asked under such a budget
#[tokio::test(flavor = "multi_thread")]
async fn a_budget_may_limit_the_cost() {
    let set = |config: &mut reconvene::config::Config| {
        let price = Price {
            input: 1_000_000,
            output: 2_000_000,
            cached_input: None,
        };
        config.llm.prices.insert("stub".into(), price);
    };
    let engine = Engine::scripted_with(set).await.running();
    engine.llm().script(|_| once_more().usage(10, 5, 0));
    let cost = |n| Limits {
        cost_micros: Some(n),
        ..Limits::default()
    };
    let task = post(&engine, Recipient::DefaultAgent, "go", cost(40)).await;
    engine.until(task, Stopped).await;
    assert_eq!(engine.llm().arrived(), 2, "20, 40");
    let view = shown(&engine, task).await;
    assert_eq!(
        (
            &view["budget"]["cost_micros"],
            &view["usage"]["cost_micros"]
        ),
        (&json!(40), &json!(40))
    );

    let unpriced = agent_with(&engine, "Other", |a| a.model.name = Some("other".into())).await;
    let task = post(&engine, Recipient::Agent(unpriced), "go", cost(40)).await;
    let (status, error) = engine.end(task).await;
    assert!(
        status == Failed && error.contains("model_unpriced"),
        "{error}"
    );
    assert_eq!(engine.llm().arrived(), 2);
    engine.close().await;
}

// T-18: children that were made count, and a call that would make too many makes none and ends the tree
#[tokio::test(flavor = "multi_thread")]
async fn a_budget_may_limit_the_children() {
    let engine = Engine::scripted().await;
    let researcher = engine.demo.researcher;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("lead", 0) => Reply::call("delegate_tasks", delegate(researcher, &["a", "b"])),
            ("lead", _) => Reply::call("delegate_tasks", delegate(researcher, &["c"])),
            _ => Reply::text("done"),
        });
    let budget = Limits {
        children: Some(2),
        ..Limits::default()
    };
    let task = post(&engine, Recipient::DefaultAgent, "lead", budget).await;
    engine.until(task, Stopped).await;
    let view = shown(&engine, task).await;
    assert_eq!(view["error"]["code"], "budget_exhausted");
    assert_eq!(view["budget"]["children"], 2);
    let children = engine.children(task).await;
    assert_eq!(children.len(), 2);
    for child in children {
        assert_eq!(engine.status(child).await, Completed, "it had ended before");
    }
    engine.close().await;
}

// T-18, P-5: a workspace's budget holds for all of its trees from the moment that it is set, and for nobody else
#[tokio::test(flavor = "multi_thread")]
async fn a_workspaces_budget_stops_each_tree_that_asks_for_more() {
    let engine = Engine::scripted().await;
    let gate = Gate::new();
    let held = gate.clone();
    engine.llm().script(move |r| match r.turn() {
        0 => once_more().held_by(&held),
        _ => Reply::text("done"),
    });
    let api = Api::start_with(engine.pool.clone(), http::config());
    let token = api.token(engine.workspace(), Role::Admin);
    let set = async |body: Value| {
        api.send(request(
            Method::PUT,
            "/api/admin/budget",
            &token,
            Some(body),
        ))
        .await
    };
    assert_eq!(
        api.get("/api/admin/budget", &token).await.ok(),
        json!({"budget": null})
    );
    let running = engine.post("running").await;
    engine.llm().wait_for_requests(1).await;
    let view = set(json!({"tokens": 15})).await.ok();
    assert_eq!(
        (
            &view["budget"]["limits"]["tokens"],
            &view["budget"]["tokens"]
        ),
        (&json!(15), &json!(0))
    );
    // The call that was under way is not counted, the next one is.
    gate.open();
    assert_eq!(engine.end(running).await.0, Completed);
    let late = engine.post("late").await;
    engine.until(late, Stopped).await;
    assert_eq!(engine.llm().arrived(), 2);
    let view = shown(&engine, late).await;
    assert_eq!(
        view["error"]["message"],
        "The budget of the workspace is used up: 15 of 15 tokens."
    );
    let view = api.get("/api/admin/budget", &token).await.ok();
    assert_eq!(view["budget"]["tokens"], 15);

    // Set again it counts from the beginning; taken away it counts nothing.
    set(json!({"tokens": 16})).await.ok();
    engine.append(late, "again").await;
    assert_eq!(engine.end(late).await.0, Completed);
    let gone = api
        .send(request(Method::DELETE, "/api/admin/budget", &token, None))
        .await;
    assert_eq!(gone.status, 204);
    for _ in 0..3 {
        let free = engine.post("free").await;
        assert_eq!(engine.end(free).await.0, Completed);
    }
    engine.close().await;
}

// T-18, R-1: a reservation ends with its step, also when the worker has died
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_workers_reservation_holds_up_nobody() {
    let mut engine = Engine::scripted().await;
    let gate = Gate::new();
    let held = gate.clone();
    engine.llm().script(move |r| match r.number {
        0 => Reply::text("lost").held_by(&held),
        _ => Reply::text("kept"),
    });
    let task = post(&engine, Recipient::DefaultAgent, "go", tokens(20)).await;
    engine.llm().wait_for_requests(1).await;
    engine.kill().await;
    expire_leases(&engine).await;
    engine.resume();
    assert_eq!(engine.end(task).await, (Completed, "kept".to_owned()));
    assert_eq!(shown(&engine, task).await["budget"]["tokens"], 15);
    engine.close().await;
}

// T-18, T-15: an answer that was empty counts before it is asked for again
#[tokio::test(flavor = "multi_thread")]
async fn an_empty_answer_counts_before_the_next_call() {
    let engine = Engine::scripted().await;
    engine.llm().script(|_| Reply::text("").usage(10, 5, 0));
    let task = post(&engine, Recipient::DefaultAgent, "go", tokens(15)).await;
    engine.until(task, Stopped).await;
    assert_eq!(engine.llm().arrived(), 1);
    let view = shown(&engine, task).await;
    assert_eq!(view["error"]["code"], "budget_exhausted");
    assert_eq!(view["usage"]["input_tokens"], 10);
    engine.close().await;
}

// T-18: who has no budget pays nothing for those of others
#[tokio::test(flavor = "multi_thread")]
async fn without_a_budget_nothing_is_asked_or_reserved() {
    let mut engine = Engine::scripted_with(|_| {}).await;
    sqlx::raw_sql("alter table budget_calls rename to not_to_be_asked")
        .execute(&engine.pool)
        .await
        .unwrap();
    engine.resume();
    let researcher = engine.demo.researcher;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("lead", 0) => Reply::call("delegate_tasks", delegate(researcher, &["a", "b"])),
            _ => Reply::text("done"),
        });
    let task = engine.post("lead").await;
    assert_eq!(engine.end(task).await.0, Completed);
    engine.close().await;
}

// T-18, T-34: a deleted task that a parent waits for ends as well, though nobody can stop it
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_child_that_is_exhausted_ends_too() {
    let engine = Engine::scripted().await;
    let greedy = agent_with(&engine, "Greedy", config_budget(json!({"tokens": 15}))).await;
    let gate = Gate::new();
    let held = gate.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("lead", 0) => Reply::call("delegate_tasks", delegate(greedy, &["much"])),
            ("much", _) => once_more().held_by(&held),
            _ => Reply::text("done"),
        });
    let task = engine.post("lead").await;
    engine.llm().wait_for_requests(2).await;
    engine.until(task, WaitingForInput).await;
    let child = engine.children(task).await[0];
    lifecycle::delete::delete(&engine.pool, &engine.hub, engine.workspace(), child, true)
        .await
        .unwrap();
    gate.open();
    assert_eq!(engine.end(task).await, (Completed, "done".to_owned()));
    assert_eq!(engine.status(child).await, Failed);
    engine.close().await;
}

// T-18: what is no budget is refused by its path, in a message, an agent and the workspace's settings
#[tokio::test]
async fn a_budget_that_is_none_is_refused_by_its_path() {
    let api = Api::start().await;
    let home = http::workspace(&api.pool).await;
    let agent = http::agent(&api.pool, home, "default", "Lead").await;
    let token = api.token(home, Role::Admin);
    for (budget, at) in [
        (json!({}), ""),
        (json!([]), ""),
        (json!("much"), ""),
        (json!({"tokens": null}), ""),
        (json!({"tokens": 0}), ".tokens"),
        (json!({"tokens": 1.5}), ".tokens"),
        (json!({"cost_micros": "5"}), ".cost_micros"),
        (json!({"children": -1}), ".children"),
        (json!({"tokens": 5, "colour": "red"}), ".colour"),
    ] {
        let message = json!({"message": "hi", "budget": budget});
        let agent = json!({"name": "A", "config": {"budget": budget}});
        for (path, body, prefix) in [
            ("/api/chat/message", message, "budget"),
            ("/api/agents", agent, "config.budget"),
        ] {
            let answer = api.post(path, &token, body).await;
            let refused = answer.problem(422, "invalid_body");
            assert_eq!(
                refused["errors"][0]["path"],
                format!("{prefix}{at}"),
                "{budget}"
            );
        }
        let put = request(
            Method::PUT,
            "/api/admin/budget",
            &token,
            Some(budget.clone()),
        );
        let refused = api.send(put).await.problem(422, "invalid_body");
        assert_eq!(
            refused["errors"][0]["path"],
            at.trim_start_matches('.'),
            "{budget}"
        );
    }
    let task = http::task(&api.pool, home, agent, "t").await;
    let body = json!({"message": "hi", "task_id": task, "budget": {"tokens": 5}});
    let refused = api
        .post("/api/chat/message", &token, body)
        .await
        .problem(422, "invalid_body");
    assert_eq!(refused["errors"][0]["path"], "budget");
    let none = api
        .post(
            "/api/chat/message",
            &token,
            json!({"message": "hi", "budget": null}),
        )
        .await;
    assert_eq!(none.status, 201);

    // The smaller number of each counts.
    let frugal = json!({"name": "F", "config": {"budget": {"tokens": 5, "children": 9}}});
    let frugal: AgentId = api.post("/api/agents", &token, frugal).await.ok()["agent_group_id"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    let body = json!({"message": "hi", "agent_group_id": frugal, "budget": {"tokens": 7, "cost_micros": 3}});
    let made = api.post("/api/chat/message", &token, body).await.ok();
    let path = format!("/api/tasks/{}", made["task_id"].as_str().unwrap());
    let limits = api.get(&path, &token).await.ok()["budget"]["limits"].clone();
    assert_eq!(
        limits,
        json!({"tokens": 5, "cost_micros": 3, "children": 9})
    );
}
