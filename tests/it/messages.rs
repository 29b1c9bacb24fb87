//! Messages from users at every moment of a task's life.

use crate::{
    engine::{Engine, until},
    forced::delegate,
    process::{Barrier, lock_task, waiting},
    stub_llm::{Gate, Recorded, Reply},
};
use reconvene::{
    domain::{
        ids::{ProcessId, TaskId},
        task::TaskStatus::*,
    },
    lifecycle::submit::{Recipient, Submitter},
    runtime::Hub,
};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

/// The conversation without its system prompt: `user x`, `assistant x`, `result x`.
fn conversation(request: &Recorded) -> Vec<String> {
    let said = request.messages().iter().filter(|m| m["role"] != "system");
    said.map(|m| {
        let role = m["role"].as_str().unwrap().replace("tool", "result");
        let text = m["content"].as_str().unwrap_or("(calls)");
        format!("{role} {}", text.lines().next().unwrap_or_default())
    })
    .collect()
}

pub async fn seqs(engine: &Engine, task: TaskId, kind: &str) -> Vec<i64> {
    sqlx::query_scalar("select seq from task_items where task_id = $1 and kind = $2 order by seq")
        .bind(task.0)
        .bind(kind)
        .fetch_all(&engine.pool)
        .await
        .unwrap()
}

/// A submitter of another process.
pub fn other_submitter(engine: &Engine) -> Submitter {
    let hub = Arc::new(Hub::new(ProcessId::new()));
    Submitter::start(engine.pool.clone(), hub)
}

// T-4, T-7, T-14: as if it had come a moment later and reopened the task; but nobody is told of an end that is none.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_comes_while_the_step_fails_for_good_is_answered() {
    let engine = Engine::scripted().await;
    let gate = Gate::new();
    let (held, writer) = (gate.clone(), engine.demo.writer);
    engine.llm().script(move |r| {
        let no = Reply::status(400, r#"{"error":{"message":"no"}}"#).held_by(&held);
        match (r.first_user(), r.last_user()) {
            ("plan", _) if r.turn() == 0 => {
                Reply::call("delegate_tasks", delegate(writer, &["child"]))
            }
            ("plan", told) => Reply::text(format!("told: {told}")),
            ("child", "child") | ("hopeless", _) => no,
            (_, last) => Reply::text(format!("answer to {last}")),
        }
    });
    let parent = engine.post("plan").await;
    engine.llm().wait_for_requests(2).await;
    let child = engine.children(parent).await[0];
    let hopeless = engine.post("hopeless").await;
    engine.llm().wait_for_requests(3).await;
    for task in [child, hopeless] {
        assert_eq!(engine.append(task, "late").await.status, Running);
    }
    gate.open();
    assert_eq!(
        engine.end(child).await,
        (Completed, "answer to late".into())
    );
    let (_, told) = engine.end(parent).await;
    assert!(
        told.contains("1 completed.") && told.contains("> answer to late"),
        "{told}"
    );
    // What fails again has failed: one more try for a message, and no second.
    assert_eq!(engine.end(hopeless).await.0, Failed);
    let tries = |text: &str| {
        let requests = engine.llm().requests();
        let of_task = requests.iter().filter(|r| r.first_user() == text);
        of_task.map(conversation).collect::<Vec<_>>()
    };
    for text in ["child", "hopeless"] {
        let first = vec![format!("user {text}")];
        let second = vec![format!("user {text}"), "user late".to_owned()];
        assert_eq!(tries(text), [first, second]);
    }
    assert_eq!(
        engine
            .count("select count(*) from steps where status = 'failed' and error is not null")
            .await,
        3
    );
    assert_eq!(
        engine
            .count("select count(*) from task_items where kind = 'status' and data ->> 'status' = 'failed'")
            .await,
        1
    );
    engine.close().await;
}

// T-4, T-16, H-44 a
#[tokio::test(flavor = "multi_thread")]
async fn messages_to_a_task_that_is_deciding_are_answered_by_its_next_decide_step() {
    let engine = Engine::scripted().await;
    let gate = Gate::new();
    let held = gate.clone();
    engine.llm().script(move |r| match r.turn() {
        0 => Reply::text("first answer").held_by(&held),
        _ => Reply::text(format!("answered {}", r.last_user())),
    });
    let task = engine.post("one").await;
    engine.llm().wait_for_requests(1).await;
    for text in ["two", "three"] {
        let submitted = engine.append(task, text).await;
        assert_eq!((submitted.status, submitted.created), (Running, false));
    }
    // Looked at and left alone, not put off by an error (T-10).
    until("the events are handled", async || {
        engine
            .count("select count(*) from orchestrator_events")
            .await
            == 0
    })
    .await;
    gate.open();
    assert_eq!(engine.end(task).await, (Completed, "answered three".into()));
    let requests = engine.llm().requests();
    assert_eq!(requests.len(), 2);
    assert_eq!(
        conversation(&requests[1]),
        [
            "user one",
            "assistant first answer",
            "user two",
            "user three"
        ]
    );
    engine.close().await;
}

// H-44 b, T-6: both wait for the lock that the running call holds, in two processes
#[tokio::test(flavor = "multi_thread")]
async fn messages_while_tools_run_come_after_the_results_of_the_turn() {
    let mut engine = Engine::scripted_with(|_| {}).await;
    let writer = engine.demo.writer;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("plan", 0) => Reply::call("delegate_tasks", delegate(writer, &["child"])).and_call(
                "b",
                "get_subtask_result",
                "{}",
            ),
            ("plan", _) => Reply::text("done"),
            _ => Reply::text("result"),
        });
    let barrier =
        Barrier::before_insert(&engine.pool, "tasks", "new.parent_task_id is not null").await;
    engine.resume();
    let task = engine.post("plan").await;
    barrier.reached().await;
    let submits: Vec<_> = [engine.submitter.clone(), other_submitter(&engine)]
        .into_iter()
        .map(|submitter| {
            let message = engine.message(Recipient::Task(task), "meanwhile");
            tokio::spawn(async move { submitter.submit(message).await.unwrap() })
        })
        .collect();
    // The orchestrator may wait for the task as well.
    until("both wait", async || {
        waiting(&engine.pool, "transactionid").await + waiting(&engine.pool, "tuple").await >= 2
    })
    .await;
    barrier.open().await;
    for submit in submits {
        submit.await.unwrap();
    }
    assert_eq!(engine.end(task).await, (Completed, "done".into()));
    let last = engine.llm().requests().pop().unwrap();
    let said = conversation(&last);
    assert_eq!(said.len(), 7, "{said:?}");
    assert_eq!(said[..2], ["user plan", "assistant (calls)"]);
    assert!(said[2].starts_with("result {\"status\":\"awaiting_child_tasks\""));
    assert!(said[3].starts_with("result Error: get_subtask_result"));
    assert_eq!(said[4..6], ["user meanwhile", "user meanwhile"]);
    assert!(said[6].starts_with("user Results of the 1 delegated task"));
    engine.close().await;
}

// T-5, W-14
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_asks_waits_for_its_user_and_the_next_message_resumes_it() {
    let engine = Engine::scripted().await;
    engine.llm().script(|r| match r.turn() {
        0 => Reply::call("ask_user", json!({"question": "Which one?"})),
        _ => Reply::text(format!("took {}", r.last_user())),
    });
    let task = engine.post("pick").await;
    engine.until(task, WaitingForInput).await;
    assert_eq!(
        engine
            .count("select count(*) from steps where status in ('queued', 'running')")
            .await,
        0
    );
    let question: String =
        sqlx::query_scalar("select data ->> 'question' from task_items where kind = 'wait'")
            .fetch_one(&engine.pool)
            .await
            .unwrap();
    assert_eq!(question, "Which one?");
    engine.append(task, "the red one").await;
    assert_eq!(
        engine.end(task).await,
        (Completed, "took the red one".into())
    );
    // The answer speaks for itself: no resume message stands beside it.
    assert_eq!(seqs(&engine, task, "resume_message").await, [0i64; 0]);
    assert_eq!(engine.llm().requests().len(), 2);
    engine.close().await;
}

// T-5, T-8, H-03: two answers at once are one resume
#[tokio::test(flavor = "multi_thread")]
async fn two_answers_to_one_question_resume_once() {
    let engine = Engine::scripted().await;
    engine.llm().script(|r| match r.turn() {
        0 => Reply::call("ask_user", json!({"question": "Which one?"})),
        _ => Reply::text("done"),
    });
    let task = engine.post("pick").await;
    engine.until(task, WaitingForInput).await;
    send_two(&engine, task).await;
    assert_eq!(engine.end(task).await, (Completed, "done".into()));
    assert_eq!(seqs(&engine, task, "user_message").await.len(), 3);
    assert_eq!(engine.llm().requests().len(), 2);
    engine.close().await;
}

/// Two messages from two processes that both wait for the task's row, then go on together.
async fn send_two(engine: &Engine, task: TaskId) {
    let lock = lock_task(&engine.pool, task).await;
    let submits: Vec<_> = [engine.submitter.clone(), other_submitter(engine)]
        .into_iter()
        .zip(["red", "blue"])
        .map(|(submitter, text)| {
            let message = engine.message(Recipient::Task(task), text);
            tokio::spawn(async move { submitter.submit(message).await.unwrap() })
        })
        .collect();
    until("both wait", async || {
        waiting(&engine.pool, "transactionid").await + waiting(&engine.pool, "tuple").await == 2
    })
    .await;
    drop(lock);
    for submit in submits {
        submit.await.unwrap();
    }
}

// T-8, T-10, T-7: to a running and to a finished task
#[tokio::test(flavor = "multi_thread")]
async fn two_messages_at_once_have_consecutive_places_and_one_decide_step() {
    let engine = Engine::scripted().await;
    let gate = Gate::new();
    let held = gate.clone();
    engine.llm().script(move |r| match r.turn() {
        1 => Reply::text("second").held_by(&held),
        turn => Reply::text(format!("answer {turn}")),
    });
    let task = engine.post("one").await;
    engine.until(task, Completed).await;
    send_two(&engine, task).await;
    let places = seqs(&engine, task, "user_message").await;
    assert_eq!(places[2], places[1] + 1, "{places:?}");
    engine.llm().wait_for_requests(2).await;
    let active = "select count(*) from steps where status in ('queued', 'running')";
    assert_eq!(engine.count(active).await, 1);
    send_two(&engine, task).await;
    assert_eq!(engine.count(active).await, 1);
    gate.open();
    engine.until(task, Completed).await;
    let places = seqs(&engine, task, "user_message").await;
    assert_eq!(places[4], places[3] + 1, "{places:?}");
    let last = engine.llm().requests().pop().unwrap();
    let said = conversation(&last).join(" ");
    assert_eq!(said.matches("user red").count(), 2, "{said}");
    assert_eq!(said.matches("user blue").count(), 2, "{said}");
    assert!(engine.llm().requests().len() <= 4);
    engine.close().await;
}

// T-10: whatever the code does, the database holds one
#[tokio::test(flavor = "multi_thread")]
async fn the_database_refuses_a_second_decide_step_in_flight() {
    let engine = Engine::scripted().await;
    let gate = Gate::new();
    let held = gate.clone();
    engine
        .llm()
        .script(move |_| Reply::text("done").held_by(&held));
    let task = engine.post("one").await;
    engine.llm().wait_for_requests(1).await;
    let second =
        "insert into steps (workspace_id, task_id, turn, ordinal, id, kind, stop_generation)
        select workspace_id, task_id, turn + 1, 0, gen_random_uuid(), kind, 0 from steps";
    let refused = sqlx::query(second).execute(&engine.pool).await.unwrap_err();
    let refused = refused.into_database_error().unwrap();
    assert_eq!(refused.constraint(), Some("steps_one_decide_key"));
    gate.open();
    engine.until(task, Completed).await;
    engine.close().await;
}

// T-6, H-44 c, W-15
#[tokio::test(flavor = "multi_thread")]
async fn a_message_to_a_task_that_waits_for_children_is_kept_or_skips_the_wait() {
    for skip in [false, true] {
        let engine = Engine::scripted().await;
        let gate = Gate::new();
        let held = gate.clone();
        let writer = engine.demo.writer;
        engine
            .llm()
            .script(move |r| match (r.first_user(), r.turn()) {
                ("plan", 0) => Reply::call("delegate_tasks", delegate(writer, &["quick", "slow"])),
                ("plan", _) => Reply::text(format!("done: {}", r.last_user())),
                ("slow", _) => Reply::text("slow result").held_by(&held),
                _ => Reply::text("quick result"),
            });
        let parent = engine.post("plan").await;
        engine.until(parent, WaitingForInput).await;
        let quick = engine.children(parent).await[0];
        engine.until(quick, Completed).await;
        until("the signal is matched", async || {
            engine
                .count("select count(*) from awaits where status = 'completed'")
                .await
                == 1
        })
        .await;
        let mut message = engine.message(Recipient::Task(parent), "any news?");
        message.skip_wait = skip;
        let submitted = engine.submit(message).await;
        assert_eq!(submitted.status, WaitingForInput);
        if !skip {
            until("the event is handled", async || {
                engine
                    .count("select count(*) from orchestrator_events")
                    .await
                    == 0
            })
            .await;
            assert_eq!(engine.status(parent).await, WaitingForInput);
            assert_eq!(engine.llm().requests().len(), 3, "it is not woken");
            gate.open();
        }
        let (status, output) = engine.end(parent).await;
        assert_eq!(status, Completed);
        let asked: Vec<_> = engine.llm().requests().into_iter().collect();
        let last = asked.iter().rfind(|r| r.first_user() == "plan").unwrap();
        let said = conversation(last);
        assert_eq!(said[3], "user any news?");
        if skip {
            assert!(said[4].contains("1 completed, 1 skipped."), "{said:?}");
            assert!(
                output.contains("## 2. slow\nAgent: Writer | Status: skipped"),
                "{output}"
            );
            assert!(output.contains("> quick result"), "{output}");
            // The child runs on, and wakes nobody.
            gate.open();
            engine
                .until(engine.children(parent).await[1], Completed)
                .await;
        } else {
            assert!(said[4].contains("2 completed."), "{said:?}");
        }
        engine
            .until_true("signals are settled", async || {
                engine
                    .count("select count(*) from signals where status = 'pending'")
                    .await
                    == 0
            })
            .await;
        assert_eq!(engine.llm().requests().len(), 4);
        assert_eq!(engine.status(parent).await, Completed);
        engine.close().await;
    }
}

// T-7: after each end
#[tokio::test(flavor = "multi_thread")]
async fn a_message_reopens_a_task_that_has_completed_failed_or_was_stopped() {
    let engine = Engine::scripted().await;
    let never = Gate::new();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.last_user()) {
            (_, "again") => Reply::text("reopened"),
            ("fail", _) => Reply::status(400, r#"{"error":{"message":"no"}}"#),
            ("stop", _) => Reply::text("never").held_by(&never),
            _ => Reply::text("first"),
        });
    for (text, end) in [("complete", Completed), ("fail", Failed), ("stop", Stopped)] {
        let before = engine.llm().requests().len();
        let task = engine.post(text).await;
        engine.llm().wait_for_requests(before + 1).await;
        if end == Stopped {
            assert_eq!(engine.stop(task, false).await.stopped, 1);
        }
        engine.until(task, end).await;
        let submitted = engine.append(task, "again").await;
        assert_eq!((submitted.status, submitted.created), (Running, false));
        assert_eq!(engine.end(task).await, (Completed, "reopened".into()));
        let left: Option<Value> = sqlx::query_scalar("select error from tasks where id = $1")
            .bind(task.0)
            .fetch_one(&engine.pool)
            .await
            .unwrap();
        assert_eq!(left, None, "the error of before is gone");
    }
    engine.close().await;
}

// T-7, W-2: the parent is done, or still waits for another child
#[tokio::test(flavor = "multi_thread")]
async fn a_reopened_child_wakes_its_parent_no_second_time_and_its_first_result_stands() {
    let engine = Engine::scripted().await;
    let (slow, again) = (Gate::new(), Gate::new());
    let (g1, g2) = (slow.clone(), again.clone());
    let writer = engine.demo.writer;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("plan", 0) => Reply::call("delegate_tasks", delegate(writer, &["quick", "slow"])),
            ("plan", _) => Reply::text(format!("done: {}", r.last_user())),
            ("slow", _) => Reply::text("slow result").held_by(&g1),
            (_, 0) => Reply::text("quick result"),
            _ => Reply::text("second thoughts").held_by(&g2),
        });
    let parent = engine.post("plan").await;
    engine.until(parent, WaitingForInput).await;
    let quick = engine.children(parent).await[0];
    engine.until(quick, Completed).await;
    engine.append(quick, "think again").await;
    engine.llm().wait_for_requests(4).await;
    slow.open();
    let (_, output) = engine.end(parent).await;
    assert!(output.contains("2 completed."), "{output}");
    assert!(output.contains("> quick result"), "{output}");
    again.open();
    assert_eq!(
        engine.end(quick).await,
        (Completed, "second thoughts".into())
    );
    engine.append(quick, "and again").await;
    engine.llm().wait_for_requests(6).await;
    engine.until(quick, Completed).await;
    assert_eq!(engine.llm().requests().len(), 6);
    assert_eq!(seqs(&engine, parent, "resume_message").await.len(), 1);
    engine.close().await;
}

// H-44 d: in the same instant as its completion
#[tokio::test(flavor = "multi_thread")]
async fn a_message_in_the_instant_of_completion_is_answered_once() {
    let engine = Engine::scripted().await;
    let gates: Arc<Mutex<HashMap<String, Gate>>> = Arc::default();
    let held = gates.clone();
    engine.llm().script(move |r| match r.turn() {
        0 => Reply::text("first").held_by(&held.lock().unwrap()[r.first_user()]),
        _ => Reply::text(format!("answer to {}", r.last_user())),
    });
    for n in 0..40 {
        let (text, gate) = (format!("task {n}"), Gate::new());
        gates.lock().unwrap().insert(text.clone(), gate.clone());
        let task = engine.post(&text).await;
        engine.llm().wait_for_requests(2 * n + 1).await;
        let message = engine.message(Recipient::Task(task), "late");
        gate.open();
        // From before the reply has arrived until after its commit.
        tokio::time::sleep(std::time::Duration::from_micros(n as u64 * 400)).await;
        let submitted = engine.submit(message).await;
        assert_eq!(submitted.status, Running);
        engine.llm().wait_for_requests(2 * n + 2).await;
        until("the answer is the second one", async || {
            engine.end(task).await == (Completed, "answer to late".into())
        })
        .await;
        let last = engine.llm().requests().pop().unwrap();
        assert_eq!(
            conversation(&last),
            [
                format!("user {text}"),
                "assistant first".into(),
                "user late".into()
            ]
        );
    }
    assert_eq!(engine.llm().requests().len(), 80);
    engine.close().await;
}
