//! Answers of agents with an `output_schema`: accepted, repaired, or refused (T-16).

use crate::{
    engine::Engine,
    forced::{agent_with, ask, delegate, expire_leases, resume_messages},
    stub_llm::{Gate, Reply},
};
use reconvene::{
    domain::{ids::TaskId, task::TaskStatus::*},
    lifecycle::submit::Recipient,
};
use serde_json::json;

const GOOD: &str = r#"{"price": 12.50}"#;
const BAD: &str = r#"{"price": "twelve"}"#;

async fn priced(engine: &Engine) -> Recipient {
    Recipient::Agent(pricer(engine).await)
}

async fn pricer(engine: &Engine) -> reconvene::domain::ids::AgentId {
    agent_with(engine, "Pricer", |definition| {
        definition.output_schema = Some(json!({
            "type": "object", "required": ["price"], "properties": {"price": {"type": "number"}}}));
    })
    .await
}

async fn post(engine: &Engine, to: Recipient) -> TaskId {
    engine.submit(engine.message(to, "price it")).await.task
}

/// What the model was told of its answers.
async fn repairs(engine: &Engine, task: TaskId) -> Vec<String> {
    let sql =
        "select text from task_items where task_id = $1 and kind = 'repair_message' order by seq";
    let texts = sqlx::query_scalar(sql).bind(task.0);
    texts.fetch_all(&engine.pool).await.unwrap()
}

// T-16
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_does_not_fit_is_repaired_at_most_twice() {
    let engine = Engine::scripted().await;
    let to = priced(&engine).await;
    for (bad, good) in [(0, true), (1, true), (2, true), (3, false)] {
        let before = engine.llm().requests().len();
        let replies = vec![Reply::text(BAD); bad].into_iter();
        engine.llm().replies(replies.chain([Reply::text(GOOD)]));
        let task = post(&engine, to).await;
        let (status, output) = engine.end(task).await;
        let told = repairs(&engine, task).await;
        let requests = engine.llm().requests().split_off(before);
        if good {
            assert_eq!((status, output.as_str()), (Completed, GOOD), "{bad}");
            assert_eq!((told.len(), requests.len()), (bad, bad + 1));
        } else {
            assert_eq!(status, Failed);
            assert!(output.contains("\"invalid_output\""), "{output}");
            let fault = "answer.price: value is not of type \\\"number\\\"";
            assert!(output.contains(fault), "{output}");
            assert_eq!((told.len(), requests.len()), (2, 3));
            // A new message is a new question, with repairs of its own (T-7).
            engine.llm().replies([Reply::text("no"), Reply::text(GOOD)]);
            engine.append(task, "again, please").await;
            engine.until(task, Completed).await;
            assert_eq!(repairs(&engine, task).await.len(), 3);
        }
        // The model sees its answer, and after it what is wrong with that.
        for (n, request) in requests.iter().enumerate().skip(1) {
            assert_eq!(request.last_user(), told[n - 1]);
            assert!(told[n - 1].contains("- answer.price: value is not of type"));
            assert_eq!(
                request.messages()[request.messages().len() - 2]["content"],
                BAD
            );
        }
    }
    engine.close().await;
}

// T-16, R-1: how often it was asked is in the feed, so a crash forgets none of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_repairs_gives_no_more_of_them() {
    let mut engine = Engine::scripted().await;
    let to = priced(&engine).await;
    let gates: Vec<Gate> = (0..2).map(|_| Gate::new()).collect();
    let held = gates.clone();
    engine
        .llm()
        .script(move |r| match held.get(r.turn() - r.turn().min(1)) {
            Some(gate) if r.turn() > 0 => Reply::text(BAD).held_by(gate),
            Some(_) | None => Reply::text(BAD),
        });
    let task = post(&engine, to).await;
    for (n, gate) in gates.iter().enumerate() {
        engine
            .until_true("it is asked to repair", async || {
                repairs(&engine, task).await.len() == n + 1
            })
            .await;
        engine.llm().wait_for_requests(2 * n + 2).await;
        engine.kill().await;
        expire_leases(&engine).await;
        gate.open();
        engine.resume();
    }
    let (status, error) = engine.end(task).await;
    assert_eq!(status, Failed);
    assert!(error.contains("\"invalid_output\""), "{error}");
    assert_eq!(repairs(&engine, task).await.len(), 2);
    engine.close().await;
}

// T-16, T-4: a message that comes while the model writes is answered instead of a repair; one that comes between the two
// is answered with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_in_between_is_answered_and_the_answer_still_fits() {
    let engine = Engine::scripted().await;
    let to = priced(&engine).await;
    let gates: Vec<Gate> = (0..2).map(|_| Gate::new()).collect();
    let held = gates.clone();
    engine.llm().script(move |r| match r.turn() {
        0 => Reply::text("Not yet.").held_by(&held[0]),
        1 => Reply::text(BAD),
        2 => Reply::text(BAD).held_by(&held[1]),
        _ => Reply::text(GOOD),
    });
    let task = post(&engine, to).await;
    engine.llm().wait_for_requests(1).await;
    engine.append(task, "in euros").await;
    gates[0].open();
    engine.llm().wait_for_requests(3).await;
    assert_eq!(repairs(&engine, task).await.len(), 1);
    engine.append(task, "with tax").await;
    gates[1].open();
    assert_eq!(engine.end(task).await, (Completed, GOOD.into()));
    let last = engine.llm().requests().pop().unwrap();
    let said: Vec<&str> = last.messages()[1..]
        .iter()
        .map(|message| message["content"].as_str().unwrap())
        .collect();
    let told = &repairs(&engine, task).await[0];
    assert_eq!(
        said,
        [
            "price it", "Not yet.", "in euros", BAD, told, BAD, "with tax"
        ]
    );
    engine.close().await;
}

// T-16, D-22: the parent is told what was accepted, and of a child whose answer never fits that it failed.
#[tokio::test(flavor = "multi_thread")]
async fn a_parent_is_told_the_output_that_was_accepted() {
    let engine = Engine::scripted().await;
    let pricer = pricer(&engine).await;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("ask", 0) => Reply::call("delegate_tasks", delegate(pricer, &["one", "two"])),
            ("ask", _) => Reply::text("done"),
            ("one", 1) => Reply::text(format!("```json\n{GOOD}\n```")),
            _ => Reply::text(BAD),
        });
    let parent = engine.post("ask").await;
    assert_eq!(engine.end(parent).await, (Completed, "done".into()));
    let told = resume_messages(&engine, parent).await.remove(0);
    assert!(told.contains(&format!("> {GOOD}")), "{told}");
    assert!(
        !told.contains(&format!("> {BAD}")) && !told.contains("```"),
        "{told}"
    );
    assert!(
        told.contains("does not fit the agent's output_schema"),
        "{told}"
    );
    let failed = "select count(*) from tasks where parent_task_id = $1 and error ->> 'code' = 'invalid_output'";
    assert_eq!(ask::<i64>(&engine, failed, parent).await, 1);
    engine.close().await;
}
