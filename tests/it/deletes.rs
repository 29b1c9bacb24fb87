//! Deleting tasks: what vanishes, what is stopped, what goes on, and who may still hear of it.

use crate::{
    engine::{Engine, until},
    forced::{
        ByHand, Family, Hold, agent, ask, decide_steps, delegate, match_only, resume_messages,
        until_waiting,
    },
    http::{self, Api, request},
    stub_llm::{Gate, Reply},
};
use axum::http::Method;
use reconvene::{
    api::auth::Role,
    domain::{ids::TaskId, task::TaskStatus::*},
    lifecycle::{
        delete::{delete, delete_many},
        skip::skip,
        stop::stop,
        submit::{Recipient, SubmitError},
    },
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

async fn remove(engine: &Engine, task: TaskId, subtasks: bool) -> Option<u64> {
    delete(
        &engine.pool,
        &engine.hub,
        engine.workspace(),
        task,
        subtasks,
    )
    .await
    .unwrap()
}

/// A deletion on its way.
fn removing(engine: &Engine, task: TaskId, subtasks: bool) -> JoinHandle<Option<u64>> {
    let (pool, hub, workspace) = (engine.pool.clone(), engine.hub.clone(), engine.workspace());
    tokio::spawn(async move {
        delete(&pool, &hub, workspace, task, subtasks)
            .await
            .unwrap()
    })
}

async fn is_deleted(engine: &Engine, task: TaskId) -> bool {
    ask(
        engine,
        "select deleted_at is not null from tasks where id = $1",
        task,
    )
    .await
}

// T-34, T-35, H-46: what nobody waits for is stopped with it; its children run on unless they are meant too.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_task_is_stopped_first() {
    for subtasks in [false, true] {
        let engine = Engine::scripted().await;
        let family = Family::new(&engine, &["a", "b"], None).await;
        family.finish(&engine, "a").await;
        let deleted = remove(&engine, family.parent, subtasks).await;
        assert_eq!(deleted, Some(if subtasks { 3 } else { 1 }));
        assert_eq!(engine.status(family.parent).await, Stopped);
        let waits = "select count(*) from awaits where status = 'pending'";
        assert_eq!(engine.count(waits).await, 0);
        let (ended, running) = (family.children[0], family.children[1]);
        assert_eq!(
            engine.status(ended).await,
            Completed,
            "what had ended keeps its end"
        );
        assert_eq!(is_deleted(&engine, running).await, subtasks);
        if subtasks {
            assert_eq!(engine.status(running).await, Stopped);
            until("its model call is aborted", async || {
                engine.llm().aborted() == 1
            })
            .await;
        } else {
            assert_eq!(engine.status(running).await, Running);
        }
        assert_eq!(remove(&engine, family.parent, subtasks).await, None);
        family.open_all();
        engine.end(running).await;
        assert_eq!(resume_messages(&engine, family.parent).await.len(), 0);
        engine.close().await;
    }
}

// T-34: a child that a living parent waits for goes on to its end, and the parent hears of it; the card shows it as deleted.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_child_goes_on_to_its_end_for_its_parent() {
    let engine = Engine::scripted().await;
    let family = Family::new(&engine, &["a", "b"], None).await;
    let child = family.children[0];
    assert_eq!(remove(&engine, child, true).await, Some(1));
    assert_eq!(engine.status(child).await, Running);
    assert_eq!(engine.llm().aborted(), 0);
    family.finish_all(&engine).await;
    assert_eq!(engine.status(child).await, Completed);
    let (status, output) = engine.end(family.parent).await;
    assert_eq!(status, Completed);
    for part in [
        "2 delegated tasks: 2 completed.",
        "Status: completed (deleted)",
        "> result of a",
    ] {
        assert!(output.contains(part), "{part}: {output}");
    }
    let api = Api::start_with(engine.pool.clone(), http::config());
    let token = api.token(engine.workspace(), Role::Member);
    let feed = api
        .get(&format!("/api/tasks/{}/feed", family.parent), &token)
        .await
        .ok();
    let items = feed["items"].as_array().unwrap();
    let card = items
        .iter()
        .find(|item| item["kind"] == "delegation")
        .unwrap();
    assert_eq!(card["counts"]["deleted"], 1);
    assert_eq!(card["children"][0]["deleted"], true);
    engine.close().await;
}

// T-34: a deleted child takes several turns, and is decided for although it is deleted.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_child_takes_as_many_turns_as_it_needs() {
    let engine = Engine::scripted().await;
    let gate = Gate::new();
    let (held, args) = (gate.clone(), delegate(engine.demo.researcher, &["child"]));
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()),
            ("child", 0) => {
                Reply::call("get_subtask_result", json!({"task_id": TaskId::new()})).held_by(&held)
            }
            ("child", _) => Reply::text("second turn"),
            _ => Reply::text(r.last_user()),
        });
    let parent = engine.post("go").await;
    engine.until(parent, WaitingForInput).await;
    engine.llm().wait_for_requests(2).await;
    remove(&engine, engine.children(parent).await[0], false).await;
    gate.open();
    let (_, output) = engine.end(parent).await;
    assert!(output.contains("> second turn"), "{output}");
    engine.close().await;
}

// T-34, W-15: nobody can answer a deleted child: the question that it has asked is skipped, a later one is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_child_does_not_wait_for_its_user() {
    let engine = Engine::scripted().await;
    let args = delegate(engine.demo.researcher, &["child"]);
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()),
            ("child", 0) => Reply::call("ask_user", json!({"question": "Which one?"})),
            ("child", 1) => Reply::call("ask_user", json!({"question": "Really?"})),
            ("child", _) => Reply::text(r.results().last().unwrap().1),
            _ => Reply::text(r.last_user()),
        });
    let parent = engine.post("go").await;
    let waiting = "select count(*) from tasks where status = 'waiting_for_input'";
    until("both wait", async || engine.count(waiting).await == 2).await;
    let child = engine.children(parent).await[0];
    assert_eq!(remove(&engine, child, false).await, Some(1));
    let (_, output) = engine.end(parent).await;
    assert!(output.contains("deleted, so nobody can answer"), "{output}");
    let told = resume_messages(&engine, child).await;
    assert_eq!(told.len(), 1);
    assert!(
        told[0].contains("Which one?") && told[0].contains("skipped"),
        "{told:?}"
    );
    engine.close().await;
}

// T-34: beneath a child that goes on, what it waits for goes on with it, and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn of_a_deleted_subtree_what_is_waited_for_goes_on() {
    let engine = Engine::scripted().await;
    let mid = agent(&engine, "Mid").await;
    let gate = Gate::new();
    let (held, demo) = (gate.clone(), engine.demo);
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("root", 0) => Reply::call("delegate_tasks", delegate(mid, &["mid"])),
            ("mid", 0) => {
                let mut free = delegate(demo.writer, &["free"]);
                free["async"] = json!(true);
                Reply::text("")
                    .and_call("1", "delegate_tasks", &free.to_string())
                    .and_call(
                        "2",
                        "delegate_tasks",
                        &delegate(demo.researcher, &["leaf"]).to_string(),
                    )
            }
            ("root" | "mid", _) => Reply::text(r.last_user()),
            (name, _) => Reply::text(format!("result of {name}")).held_by(&held),
        });
    let root = engine.post("root").await;
    let waiting = "select count(*) from tasks where status = 'waiting_for_input'";
    until("root and mid wait", async || {
        engine.count(waiting).await == 2
    })
    .await;
    engine.llm().wait_for_requests(4).await;
    let mid = engine.children(root).await[0];
    assert_eq!(remove(&engine, mid, true).await, Some(3));
    let stopped: Vec<String> =
        sqlx::query_scalar("select title from tasks where status = 'stopped'")
            .fetch_all(&engine.pool)
            .await
            .unwrap();
    assert_eq!(stopped, ["free"]);
    gate.open();
    let (_, output) = engine.end(root).await;
    assert!(output.contains("result of leaf"), "{output}");
    // T-34: the whole tree, in which a deleted child is still at work, is stopped with its root.
    engine.close().await;
}

// T-34: a deleted child whose parent is deleted too is waited for by nobody any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_child_ends_with_its_parent() {
    let engine = Engine::scripted().await;
    let family = Family::new(&engine, &["a", "b"], None).await;
    assert_eq!(remove(&engine, family.children[0], false).await, Some(1));
    assert_eq!(remove(&engine, family.parent, true).await, Some(2));
    for task in family.children.iter().chain([&family.parent]) {
        assert_eq!(engine.status(*task).await, Stopped);
    }
    family.open_all();
    engine.close().await;
}

// T-35
#[tokio::test(flavor = "multi_thread")]
async fn many_are_deleted_at_once_and_again_nothing_changes() {
    let engine = Engine::scripted().await;
    engine.llm().script(|_| Reply::text("done"));
    let mut tasks = vec![TaskId::new()];
    for text in ["a", "b", "c"] {
        let task = engine.post(text).await;
        engine.end(task).await;
        tasks.push(task);
    }
    tasks.push(tasks[1]);
    let api = Api::start_with(engine.pool.clone(), http::config());
    let token = api.token(engine.workspace(), Role::Member);
    let other = http::workspace(&engine.pool).await;
    let foreign = api.token(other, Role::Member);
    let body = json!({"ids": tasks});
    let post =
        async |token: &str, body: Value| api.post("/api/tasks/bulk-delete", token, body).await;
    assert_eq!(
        post(&foreign, body.clone()).await.ok(),
        json!({"deleted": 0})
    ); // P-5
    assert_eq!(post(&token, body.clone()).await.ok(), json!({"deleted": 3}));
    assert_eq!(post(&token, body).await.ok(), json!({"deleted": 0}));
    let many: Vec<TaskId> = (0..201).map(|_| TaskId::new()).collect();
    let problem = post(&token, json!({"ids": many}))
        .await
        .problem(422, "invalid_body");
    assert_eq!(problem["errors"][0]["path"], "ids");
    let (pool, hub) = (&engine.pool, &engine.hub);
    assert_eq!(
        delete_many(pool, hub, engine.workspace(), &tasks, true)
            .await
            .unwrap(),
        0
    );
    engine.close().await;
}

// H-46, T-34: not found everywhere; counts and pages leave it out.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_deleted_is_not_found_anywhere() {
    let engine = Engine::scripted().await;
    let family = Family::new(&engine, &["a", "b"], None).await;
    let api = Api::start_with(engine.pool.clone(), http::config());
    let token = api.token(engine.workspace(), Role::Member);
    let (parent, child) = (family.parent, family.children[0]);
    let send = async |method: Method, path: String, body: Option<Value>| {
        api.send(request(method, &path, &token, body)).await
    };
    let gone = send(
        Method::DELETE,
        format!("/api/tasks/{child}?include_subtasks=true"),
        None,
    )
    .await;
    assert_eq!(gone.ok(), json!({"deleted": 1}));
    for (method, path, body) in [
        (Method::GET, format!("/api/tasks/{child}"), None),
        (Method::GET, format!("/api/tasks/{child}/feed"), None),
        (Method::GET, format!("/api/tasks/{child}/tree"), None),
        (Method::GET, format!("/api/tasks/{child}/stream"), None),
        (Method::DELETE, format!("/api/tasks/{child}"), None),
        (Method::POST, format!("/api/tasks/{child}/stop"), None),
        (
            Method::POST,
            format!("/api/tasks/{child}/awaits/skip"),
            None,
        ),
        (
            Method::POST,
            "/api/chat/message".to_owned(),
            Some(json!({"task_id": child, "message": "hi"})),
        ),
    ] {
        send(method, path, body).await.problem(404, "not_found");
    }
    let get = async |path: String| send(Method::GET, path, None).await.ok();
    let shown = get(format!("/api/tasks/{parent}")).await;
    assert_eq!(shown["subtask_count"], 1);
    for path in [
        format!("/api/tasks/query?parentTaskId={parent}"),
        "/api/tasks/query".to_owned(),
        format!("/api/tasks/query?q={child}"),
        "/api/tasks/query?q=a".to_owned(),
        format!("/api/tasks/{parent}/tree"),
    ] {
        let list = get(path.clone()).await;
        let items = list["items"].as_array().unwrap();
        assert!(
            items.iter().all(|item| item["id"] != json!(child)),
            "{path}: {list}"
        );
    }
    let (own, task) = (engine.workspace(), child);
    assert_eq!(
        stop(&engine.pool, &engine.hub, own, task, true)
            .await
            .unwrap(),
        None
    );
    assert_eq!(
        skip(&engine.pool, &engine.hub, own, task, None)
            .await
            .unwrap(),
        None
    );
    family.open_all();
    engine.end(parent).await;
    engine.close().await;
}

// H-46: a step that was queued when its task was deleted does not run, whoever starts afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn queued_steps_of_a_deleted_task_do_not_run() {
    let mut engine = Engine::scripted_with(|_| {}).await;
    engine.llm().script(|_| Reply::text("done"));
    let task = engine.post("go").await;
    let orchestrator = reconvene::orchestrator::Orchestrator::new(
        &engine.config,
        engine.pool.clone(),
        engine.hub.clone(),
    );
    orchestrator.dispatch().await.unwrap();
    let queued = "select count(*) from steps where status = 'queued'";
    assert_eq!(engine.count(queued).await, 1);
    let unhandled = engine.post("never looked at").await;
    for task in [task, unhandled] {
        assert_eq!(remove(&engine, task, false).await, Some(1));
    }
    engine.resume();
    let other = engine.post("other").await;
    engine.end(other).await;
    assert_eq!(engine.llm().requests().len(), 1);
    engine.close().await;
}

// W-16: the group has closed and its event is written; then the task is stopped, or deleted.
#[tokio::test(flavor = "multi_thread")]
async fn await_completed_for_a_stopped_or_deleted_task_does_nothing() {
    for delete_it in [false, true] {
        let engine = Engine::scripted_with(|_| {}).await;
        let by_hand = ByHand::of(&engine);
        let family = Family::new(&engine, &["a", "b"], Some(&by_hand)).await;
        family.finish_all(&engine).await;
        match_only(&engine).await;
        let events = "select count(*) from orchestrator_events where kind = 'await_completed'";
        assert_eq!(engine.count(events).await, 1);
        match delete_it {
            true => assert_eq!(remove(&engine, family.parent, false).await, Some(1)),
            false => assert_eq!(engine.stop(family.parent, false).await.stopped, 1),
        }
        by_hand
            .dispatch_until("the event is handled", async || {
                engine.count(events).await == 0
            })
            .await;
        assert_eq!(engine.status(family.parent).await, Stopped);
        assert_eq!(decide_steps(&engine, family.parent).await, 1);
        assert_eq!(resume_messages(&engine, family.parent).await.len(), 0);
        by_hand.stop().await;
        engine.close().await;
    }
}

// H-46, T-7: a message and a deletion meet at the task's row. A message that comes second finds no task; one that comes
// first has reopened it, and it is stopped again.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_never_revives_a_deleted_task() {
    for delete_first in [true, false] {
        let engine = Engine::scripted().await;
        engine.llm().script(|r| match r.turn() {
            0 => Reply::text("done"),
            _ => Reply::status(429, "{}").header("retry-after", "300"),
        });
        let task = engine.post("go").await;
        engine.end(task).await;
        let row = Hold::task(&engine.pool, task).await;
        let appending = || {
            let submitter = engine.submitter.clone();
            let message = engine.message(Recipient::Task(task), "again");
            tokio::spawn(async move { submitter.submit(message).await })
        };
        let (removed, submitted) = match delete_first {
            true => {
                let removed = removing(&engine, task, false);
                until_waiting(&engine.pool, 1).await;
                (removed, appending())
            }
            false => {
                let submitted = appending();
                until_waiting(&engine.pool, 1).await;
                (removing(&engine, task, false), submitted)
            }
        };
        until_waiting(&engine.pool, 2).await;
        row.release().await;
        assert_eq!(removed.await.unwrap(), Some(1));
        match (delete_first, submitted.await.unwrap()) {
            (true, Err(SubmitError::TaskNotFound)) => {
                assert_eq!(engine.status(task).await, Completed);
            }
            (false, Ok(_)) => assert_eq!(engine.status(task).await, Stopped),
            (_, other) => panic!("{other:?}"),
        }
        engine.close().await;
    }
}

// T-33, T-34: a spawn and a deletion of the tree meet at the parent's row.
#[tokio::test(flavor = "multi_thread")]
async fn a_spawn_beside_a_deletion_leaves_no_orphan() {
    for delete_first in [true, false] {
        let engine = Engine::scripted_with(|_| {}).await;
        let args = delegate(engine.demo.researcher, &["a", "b"]);
        let gate = Gate::new();
        let held = gate.clone();
        engine.llm().script(move |r| match r.first_user() {
            "go" => Reply::call("delegate_tasks", args.clone()),
            _ => Reply::text("late").held_by(&held),
        });
        // Stops the parent's first call, with or without its row.
        let (event, when) = match delete_first {
            true => ("before insert on steps", "new.ordinal = 1"),
            false => ("before insert on tasks", "new.parent_task_id is not null"),
        };
        let stalled = Hold::stall(&engine.pool, event, when).await;
        let engine = engine.running();
        let parent = engine.post("go").await;
        until_waiting(&engine.pool, 1).await;
        let removed = removing(&engine, parent, true);
        until_waiting(&engine.pool, 2).await;
        stalled.release().await;
        let removed = removed.await.unwrap();
        let active =
            "select count(*) from tasks where status not in ('completed', 'failed', 'stopped')";
        until("nothing lives", async || engine.count(active).await == 0).await;
        let children = engine.children(parent).await.len() as u64;
        assert_eq!(removed, Some(1 + children));
        assert_eq!(children, if delete_first { 0 } else { 2 });
        gate.open();
        engine.close().await;
    }
}
