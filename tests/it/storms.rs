//! Many children that end in the same instant.

use crate::{
    engine::{Engine, Process},
    forced::{ask, decide_steps, delegate, repeats, resume_messages},
    stub_llm::{Gate, Reply},
};
use reconvene::domain::{ids::TaskId, task::TaskStatus::Completed};

/// Three parents at once, whose children's last replies are let go together.
async fn storm(engine: &Engine, children: usize) {
    let gate = Gate::new();
    let (held, researcher) = (gate.clone(), engine.demo.researcher);
    engine
        .llm()
        .script(move |r| match (r.first_user().len(), r.turn()) {
            (2, 0) => {
                let names: Vec<String> = (0..children)
                    .map(|n| format!("{} child {n}", r.first_user()))
                    .collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                Reply::call("delegate_tasks", delegate(researcher, &names))
            }
            (2, _) => Reply::text(r.last_user()),
            _ => Reply::text(r.first_user()).held_by(&held),
        });
    let before = engine.llm().requests().len();
    let mut parents: Vec<TaskId> = Vec::new();
    for name in ["p1", "p2", "p3"] {
        parents.push(engine.post(name).await);
    }
    engine
        .llm()
        .wait_for_requests(before + 3 * (1 + children))
        .await;
    gate.open();
    for (parent, name) in parents.iter().zip(["p1", "p2", "p3"]) {
        let (status, output) = engine.end(*parent).await;
        assert_eq!(status, Completed);
        for n in 0..children {
            assert!(
                output.contains(&format!("> {name} child {n}\n")),
                "{output}"
            );
        }
        assert_eq!(resume_messages(engine, *parent).await.len(), 1);
        assert_eq!(decide_steps(engine, *parent).await, 2);
        let late = "select count(*) from tasks c join task_items i on i.task_id = c.parent_task_id
            and i.kind = 'resume_message' where c.parent_task_id = $1 and c.finished_at > i.created_at";
        assert_eq!(
            ask::<i64>(engine, late, *parent).await,
            0,
            "not before its last child"
        );
    }
    assert_eq!(engine.llm().requests().len(), before + 3 * (2 + children));
}

async fn slow_commits(engine: &Engine) {
    sqlx::raw_sql(
        "create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.05); return new; end $$;
         create trigger slow before update on tasks for each row
            when (new.finished_at is not null and new.parent_task_id is not null) execute function slow()",
    )
    .execute(&engine.pool)
    .await
    .unwrap();
}

// H-01: eight workers, two orchestrators, no hints between them.
#[tokio::test(flavor = "multi_thread")]
async fn siblings_that_finish_in_the_same_instant_wake_their_parent_once() {
    let mut engine = Engine::scripted_with(|c| c.worker.concurrency = 2).await;
    slow_commits(&engine).await;
    let processes: Vec<Process> = (0..10)
        .map(|n| Process::start(&engine.config, &engine.pool, n < 8, n >= 8))
        .collect();
    for round in 0..repeats(4) {
        storm(&engine, if round % 2 == 0 { 4 } else { 2 }).await;
    }
    drop(processes);
    engine.resume();
    engine.close().await;
}

// H-01, with nothing that looks by itself: every wake-up comes from a hint.
#[tokio::test(flavor = "multi_thread")]
async fn hints_alone_wake_every_parent() {
    let engine = Engine::scripted_with(|c| {
        c.orchestrator.poll_interval_ms = 60_000;
        c.worker.poll_interval_ms = 60_000;
    })
    .await
    .running();
    slow_commits(&engine).await;
    for _ in 0..repeats(3) {
        storm(&engine, 4).await;
    }
    engine.close().await;
}
