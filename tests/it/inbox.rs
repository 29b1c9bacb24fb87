//! What waits for a person, wherever in a tree it was asked (T-26).

use crate::{
    engine::{Engine, until},
    forced::{agent_with, delegate},
    http::{self, Api, Under},
    stub_llm::{Gate, Reply},
};
use reconvene::{
    api::auth::Role,
    domain::{
        ids::{AgentId, GroupId, StepId, TaskId, WorkspaceId},
        task::TaskStatus::*,
    },
};
use serde_json::{Value, json};
use sqlx::PgPool;
use std::collections::BTreeSet;

fn api(engine: &Engine) -> (Api, String) {
    let api = Api::start_with(engine.pool.clone(), http::config());
    let token = api.token(engine.workspace(), Role::Member);
    (api, token)
}

async fn inbox(api: &Api, token: &str) -> Vec<Value> {
    let page = api.get("/api/inbox", token).await.ok();
    assert_eq!(page["next_cursor"], Value::Null);
    page["items"].as_array().unwrap().clone()
}

/// What is asked, in alphabetical order: the parts of a tree ask side by side.
async fn asked(api: &Api, token: &str) -> Vec<String> {
    let mut questions: Vec<String> = inbox(api, token)
        .await
        .iter()
        .map(|item| item["question"].as_str().unwrap().to_owned())
        .collect();
    questions.sort();
    questions
}

/// A task that asks, with a child that asks, with a child that asks: top, middle, low.
async fn tree(engine: &Engine, name: &str) -> [TaskId; 3] {
    let top = engine.post(&format!("top {name}")).await;
    let child = async |task| {
        until("there is a child", async || {
            !engine.children(task).await.is_empty()
        })
        .await;
        engine.children(task).await[0]
    };
    let middle = child(top).await;
    let low = child(middle).await;
    for task in [top, middle, low] {
        engine.until(task, WaitingForInput).await;
    }
    [top, middle, low]
}

/// Every task asks "its prompt?"; all but the low ones also delegate. An answered task that has nothing else to wait for
/// is held at the gate.
fn script(engine: &Engine, middle: AgentId, gate: &Gate) {
    let (researcher, gate) = (engine.demo.researcher, gate.clone());
    engine.llm().script(move |r| {
        let own = r.first_user().to_owned();
        let (level, tree) = own.split_once(' ').unwrap();
        let question = json!({"question": format!("{own}?")}).to_string();
        let asking = Reply::text("");
        match (level, r.turn()) {
            ("low", 0) => asking.and_call("q", "ask_user", &question),
            (_, 0) => {
                let (agent, below) = match level {
                    "top" => (middle, format!("middle {tree}")),
                    _ => (researcher, format!("low {tree}")),
                };
                let children = delegate(agent, &[&below]).to_string();
                asking
                    .and_call("d", "delegate_tasks", &children)
                    .and_call("q", "ask_user", &question)
            }
            _ => Reply::text(format!("{own} is done")).held_by(&gate),
        }
    });
}

// T-26, T-5, P-5: at any depth of any tree, with its path; nobody else's; an answer wakes its own task, and no other
#[tokio::test(flavor = "multi_thread")]
async fn every_question_is_listed_and_its_answer_wakes_the_task_that_asked() {
    let engine = Engine::scripted().await;
    let middle = agent_with(&engine, "Middle", |_| {}).await;
    let gate = Gate::new();
    script(&engine, middle, &gate);
    let a = tree(&engine, "a").await;
    let b = tree(&engine, "b").await;
    let (api, token) = api(&engine);
    let items = inbox(&api, &token).await;
    assert_eq!(items.len(), 6);
    let link = |task: TaskId, title: &str, name: &str, agent: AgentId| json!({"task_id": task, "title": title, "agent_name": name, "agent_group_id": agent});
    for ([top, mid, low], name) in [(a, "a"), (b, "b")] {
        let [top_title, mid_title, low_title] =
            ["top", "middle", "low"].map(|level| format!("{level} {name}"));
        let lead: uuid::Uuid =
            crate::forced::ask(&engine, "select agent_id from tasks where id = $1", top).await;
        let first = link(top, &top_title, "Lead", AgentId(lead));
        let second = link(mid, &mid_title, "Middle", middle);
        let third = link(low, &low_title, "Researcher", engine.demo.researcher);
        for (own, path) in [
            (&first, vec![]),
            (&second, vec![&first]),
            (&third, vec![&first, &second]),
        ] {
            let found = items.iter().find(|item| item["task_id"] == own["task_id"]);
            let item = found.unwrap();
            for part in ["title", "agent_name", "agent_group_id"] {
                assert_eq!(item[part], own[part]);
            }
            assert_eq!(item["path"], json!(path));
            let question = format!("{}?", own["title"].as_str().unwrap());
            assert_eq!(item["question"], json!(question));
            assert_eq!(item["deadline_at"], Value::Null);
            let shown = format!("/api/tasks/{}", own["task_id"].as_str().unwrap());
            let waits = api.get(&shown, &token).await.ok()["waits"].clone();
            let wait = waits.as_array().unwrap().iter();
            let wait = wait.clone().find(|w| w["source_type"] == "user_input");
            assert_eq!(item["group_id"], wait.unwrap()["group_id"]);
            assert_eq!(item["since"], wait.unwrap()["created_at"]);
        }
    }
    // The oldest first.
    let groups: Vec<&str> = items
        .iter()
        .map(|item| item["group_id"].as_str().unwrap())
        .collect();
    assert!(groups.is_sorted(), "{groups:?}");

    let other = http::workspace(&engine.pool).await;
    assert_eq!(
        inbox(&api, &api.token(other, Role::Operator)).await,
        Vec::<Value>::new()
    );

    let before = engine.llm().arrived();
    let answer = json!({"task_id": a[2], "message": "this one"});
    api.post("/api/chat/message", &token, answer).await.ok();
    assert_eq!(
        asked(&api, &token).await,
        ["low b?", "middle a?", "middle b?", "top a?", "top b?"]
    );
    engine.llm().wait_for_requests(before + 1).await;
    crate::engine::until("only the answered task works", async || {
        let events = "select count(*) from orchestrator_events";
        engine.count(events).await == 0
    })
    .await;
    assert_eq!(engine.status(a[2]).await, Running);
    for task in [a[0], a[1], b[0], b[1], b[2]] {
        assert_eq!(engine.status(task).await, WaitingForInput);
    }
    assert_eq!(engine.llm().arrived(), before + 1);
    let working = "select count(*) from steps where status in ('queued', 'running')";
    assert_eq!(engine.count(working).await, 1);

    // An answer to one that waits for its child, too, is taken, and the task waits on.
    engine.append(a[0], "that one").await;
    assert_eq!(
        asked(&api, &token).await,
        ["low b?", "middle a?", "middle b?", "top b?"]
    );
    gate.open();
    engine.end(a[2]).await;
    engine.append(a[1], "go").await;
    engine.end(a[0]).await;
    assert_eq!(asked(&api, &token).await, ["low b?", "middle b?", "top b?"]);
    engine.stop(b[2], false).await;
    assert_eq!(asked(&api, &token).await, ["middle b?", "top b?"]);
    let delete = format!("/api/tasks/{}?include_subtasks=true", b[0]);
    let request = http::request(axum::http::Method::DELETE, &delete, &token, None);
    api.send(request).await.ok();
    assert_eq!(asked(&api, &token).await, Vec::<String>::new());
    engine.close().await;
}

/// A pending question of the task, which need not be in a state to ask one.
async fn question(pool: &PgPool, workspace: WorkspaceId, task: TaskId, text: &str) -> GroupId {
    let step = StepId::new();
    let group = http::group(pool, workspace, task, step, "user_input", 1).await;
    sqlx::query("update await_groups set about = $2 where id = $1")
        .bind(group)
        .bind(json!({"question": text}))
        .execute(pool)
        .await
        .unwrap();
    sqlx::query(
        "insert into awaits (workspace_id, group_id, ordinal, source_type, correlation_key)
        values ($1, $2, 0, 'user_input', $3)",
    )
    .bind(workspace)
    .bind(group)
    .bind(step.to_string())
    .execute(pool)
    .await
    .unwrap();
    group
}

async fn set(pool: &PgPool, sql: &'static str, id: impl Into<uuid::Uuid>) {
    sqlx::query(sql)
        .bind(id.into())
        .execute(pool)
        .await
        .unwrap();
}

// T-26, T-34: a question of a task that can not hear the answer is nobody's; deleted tasks are in no path
#[tokio::test]
async fn what_nobody_could_answer_is_not_listed() {
    let api = Api::start().await;
    let pool = &api.pool;
    let home = http::workspace(pool).await;
    let agent = http::agent(pool, home, "default", "Lead").await;
    let token = api.token(home, Role::Member);
    let top = http::task(pool, home, agent, "top").await;
    let below = async |parent, root, depth| {
        let under = Under {
            parent,
            root,
            step: StepId::new(),
            ordinal: 0,
            depth,
        };
        http::task_under(pool, home, agent, "below", Some(under), "waiting_for_input").await
    };
    let middle = below(top, top, 1).await;
    let low = below(middle, top, 2).await;
    let group = question(pool, home, low, "which?").await;
    for (title, status) in [("a", "completed"), ("b", "failed"), ("c", "stopped")] {
        let ended = http::task_under(pool, home, agent, title, None, status).await;
        question(pool, home, ended, title).await;
    }
    let deleted = http::task(pool, home, agent, "deleted").await;
    question(pool, home, deleted, "deleted").await;
    let delete = "update tasks set deleted_at = now() where id = $1";
    set(pool, delete, deleted.0).await;
    let answered = http::task(pool, home, agent, "answered").await;
    let over = question(pool, home, answered, "answered").await;
    let settle = "update awaits set status = 'completed', settled_at = now() where group_id = $1";
    set(pool, settle, over.0).await;
    // A child's await is no question.
    let parent = http::task(pool, home, agent, "parent").await;
    http::group(pool, home, parent, StepId::new(), "child_task", 1).await;

    let due = "update awaits set scheduled_resume_at = '2030-01-02 03:04:05Z' where group_id = $1";
    set(pool, due, group.0).await;
    let items = inbox(&api, &token).await;
    assert_eq!(items.len(), 1);
    assert_eq!(items[0]["question"], "which?");
    assert_eq!(items[0]["deadline_at"], "2030-01-02T03:04:05Z");
    let path = |items: &[Value]| -> Vec<Value> {
        let path = items[0]["path"].as_array().unwrap().iter();
        path.map(|above| above["task_id"].clone()).collect()
    };
    assert_eq!(path(&items), [json!(top), json!(middle)]);
    set(pool, delete, middle.0).await;
    assert_eq!(path(&inbox(&api, &token).await), [json!(top)]);
}

// T-26, T-23: by keyset: no question comes twice and none is left out, whatever is asked and answered meanwhile
#[tokio::test]
async fn pages_of_the_inbox_neither_repeat_nor_skip() {
    let api = Api::start().await;
    let pool = &api.pool;
    let (home, other) = (http::workspace(pool).await, http::workspace(pool).await);
    let token = api.token(home, Role::Member);
    let mut tasks = Vec::new();
    for workspace in [home, other] {
        let agent = http::agent(pool, workspace, "default", "Lead").await;
        tasks.push(http::task(pool, workspace, agent, "Asks").await);
    }
    let ask = async |text: &str| {
        question(pool, other, tasks[1], text).await;
        question(pool, home, tasks[0], text).await
    };
    let mut there = Vec::new();
    for n in 0..7 {
        there.push(ask(&n.to_string()).await);
    }
    let mut seen = Vec::new();
    let mut path = "/api/inbox?limit=2".to_owned();
    loop {
        let page = api.get(&path, &token).await.ok();
        let items = page["items"].as_array().unwrap();
        assert!(items.len() <= 2);
        seen.extend(items.iter().map(|item| item["group_id"].clone()));
        let Some(cursor) = page["next_cursor"].as_str() else {
            break;
        };
        path = format!("/api/inbox?limit=2&cursor={cursor}");
        if seen.len() < 6 {
            // One more comes, and one that has been seen goes.
            there.push(ask("more").await);
            let gone =
                "update awaits set status = 'completed', settled_at = now() where group_id = $1";
            set(pool, gone, there[seen.len() - 1].0).await;
        }
    }
    let all: Vec<Value> = there.iter().map(|group| json!(group)).collect();
    assert_eq!(seen, all);
    let distinct: BTreeSet<String> = seen.iter().map(Value::to_string).collect();
    assert_eq!(distinct.len(), 9);

    for (query, at) in [("limit=201", "limit"), ("cursor=x", "cursor"), ("q=x", "q")] {
        let refused = api.get(&format!("/api/inbox?{query}"), &token).await;
        let refused = refused.problem(422, "invalid_query");
        assert_eq!(refused["errors"][0]["path"], at, "{query}");
    }
    api.get("/api/inbox?limit=200", &token).await.ok();
}
