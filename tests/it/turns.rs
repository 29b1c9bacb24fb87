//! Turns: what models answer, how calls get their results, and that the strict provider takes every history.

use crate::{
    engine::{Engine, until},
    process::{Barrier, waiting},
    stub_llm::{Recorded, Reply},
};
use reconvene::domain::{ids::TaskId, task::TaskStatus::*};
use serde_json::json;

/// The JSON of a chunk of a streamed answer with this delta, made by hand.
fn chunk(delta: &str, finish: &str) -> String {
    let finish = match finish {
        "" => "null".to_owned(),
        reason => format!("\"{reason}\""),
    };
    format!("{{\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":{finish}}}]}}")
}

async fn text(engine: &Engine, sql: &'static str) -> String {
    sqlx::query_scalar(sql)
        .fetch_one(&engine.pool)
        .await
        .unwrap()
}

/// The results that the model was told last, without their ids.
fn told(request: &Recorded) -> Vec<&str> {
    request
        .results()
        .into_iter()
        .map(|(_, text)| text)
        .collect()
}

fn read(task: TaskId) -> String {
    json!({"task_id": task}).to_string()
}

// X-9, H-21, H-22, H-23, H-24, T-15: a whole turn of calls that can not be executed, among those that can
#[tokio::test(flavor = "multi_thread")]
async fn every_call_of_a_turn_gets_one_result_that_the_model_can_act_on() {
    let engine = Engine::scripted().await;
    let writer = engine.demo.writer;
    let long = "x".repeat(300);
    // id, name, arguments, and what the result says
    let calls: Vec<(&str, &str, &str, &str)> = vec![
        (
            "same",
            "get_subtask_result",
            "{}",
            "missing field `task_id`",
        ),
        ("same", "get_subtask_result", "", "missing field `task_id`"),
        ("", "get_subtask_result", "null", "missing field `task_id`"),
        ("", "get_subtask_result", "  ", "missing field `task_id`"),
        (
            "a",
            "get_subtask_result",
            "[1]",
            "must be one JSON object, but they are an array",
        ),
        (
            "b",
            "get_subtask_result",
            "\"text\"",
            "must be one JSON object, but they are a string",
        ),
        (
            "c",
            "get_subtask_result",
            "{\"task_id\": \"0",
            "not valid JSON",
        ),
        (
            "d",
            "delegate_task",
            "{}",
            "There is no tool \"delegate_task\". Your tools are: delegate_tasks, ask_user, get_subtask_result.",
        ),
        ("e", "Ask_User", "{\"question\":\"?\"}", "There is no tool"),
        ("f", "", "{}", "There is no tool \"\""),
        ("g", &long, "{}", "There is no tool"),
        ("h", "sql\u{0}; drop", "{}", "There is no tool"),
        ("i", "run_code", "{}", "There is no tool"),
        (
            "j",
            "delegate_tasks",
            r#"{"tasks":[{"agent_group_id":"me","prompt":"p"}]}"#,
            "there is no agent me",
        ),
    ];
    let given: Vec<[String; 3]> = calls
        .iter()
        .map(|c| [c.0, c.1, c.2].map(str::to_owned))
        .collect();
    let good = json!({"tasks": [{"agent_group_id": writer, "prompt": "child"}]}).to_string();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("plan", 0) => given
                .iter()
                .fold(
                    Reply::text("all at once"),
                    |reply, [id, name, arguments]| reply.and_call(id, name, arguments),
                )
                .and_call("k", "delegate_tasks", &good),
            ("plan", _) => Reply::text("done"),
            _ => Reply::text("the known call ran"),
        });
    let task = engine.post("plan").await;
    assert_eq!(engine.end(task).await, (Completed, "done".into()));
    let last = engine.llm().requests().pop().unwrap();
    let results = last.results();
    assert_eq!(results.len(), calls.len() + 1);
    for ((id, name, arguments, says), (given, result)) in calls.iter().zip(&results) {
        assert!(result.contains(says), "{name} {arguments}: {result}");
        assert!(result.starts_with("Error"), "{result}");
        assert!(
            !given.is_empty() && (id.is_empty() || given.starts_with(id)),
            "{given}"
        );
    }
    assert!(results[calls.len()].1.contains("awaiting_child_tasks"));
    assert!(last.last_user().contains("> the known call ran"));
    engine.close().await;
}

// H-23, A-13: an agent that may not delegate is told its own tools only, and nothing runs
#[tokio::test(flavor = "multi_thread")]
async fn a_tool_of_another_agent_is_an_unknown_tool() {
    let engine = Engine::scripted().await;
    let (writer, researcher) = (engine.demo.writer, engine.demo.researcher);
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("plan", 0) => Reply::call(
                "delegate_tasks",
                json!({"tasks": [{"agent_group_id": writer, "prompt": "child"}]}),
            ),
            ("child", 0) => {
                assert!(!r.offers("delegate_tasks"));
                Reply::call(
                    "delegate_tasks",
                    json!({"tasks": [{"agent_group_id": researcher, "prompt": "grandchild"}]}),
                )
            }
            ("child", _) => Reply::text(told(r).join("")),
            _ => Reply::text(r.last_user().to_owned()),
        });
    let task = engine.post("plan").await;
    let (_, output) = engine.end(task).await;
    assert!(
        output.contains("> Error: There is no tool \"delegate_tasks\". Your tools are: ask_user, get_subtask_result."),
        "{output}"
    );
    assert_eq!(engine.count("select count(*) from tasks").await, 2);
    engine.close().await;
}

// H-23, T-13: bounded, with a clear reason; and a new message refills it
#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_repeats_itself_ends_at_the_iteration_limit() {
    let engine = Engine::scripted().await;
    engine.llm().script(|r| match r.last_user() {
        "again" => Reply::text("better"),
        _ => Reply::text("").and_call("search:0", "search", &json!({"turn": r.turn()}).to_string()),
    });
    let task = engine.post("loop").await;
    let (status, error) = engine.end(task).await;
    assert_eq!(status, Failed);
    assert!(
        error.contains("\"iteration_limit\"") && error.contains("max_iterations"),
        "{error}"
    );
    assert_eq!(engine.llm().requests().len(), 50);
    // H-24: one id in fifty turns, each with its own result
    engine.append(task, "again").await;
    assert_eq!(engine.end(task).await, (Completed, "better".into()));
    let last = engine.llm().requests().pop().unwrap();
    assert_eq!(last.results().len(), 50);
    engine.close().await;
}

// H-24, H-31: one id in successive turns, also across a restart; each call keeps its own arguments and result
#[tokio::test(flavor = "multi_thread")]
async fn call_ids_that_repeat_in_later_turns_are_other_calls() {
    let mut engine = Engine::scripted().await;
    engine.llm().script(|r| match r.turn() {
        turn @ 0..3 => {
            let question = json!({"question": format!("question {turn}")}).to_string();
            Reply::text("").and_call("search:0", "ask_user", &question)
        }
        _ => Reply::text("done"),
    });
    let task = engine.post("start").await;
    for turn in 0..3 {
        engine.until(task, WaitingForInput).await;
        if turn == 1 {
            engine.kill().await;
            engine.resume();
        }
        engine.append(task, &format!("answer {turn}")).await;
        engine.llm().wait_for_requests(turn + 2).await;
    }
    assert_eq!(engine.end(task).await, (Completed, "done".into()));
    let last = engine.llm().requests().pop().unwrap();
    let asked: Vec<&str> = last
        .messages()
        .iter()
        .filter_map(|m| m["tool_calls"][0]["function"]["arguments"].as_str())
        .collect();
    let expected = [0, 1, 2].map(|n| format!("{{\"question\":\"question {n}\"}}"));
    assert_eq!(asked, expected);
    assert!(last.results().iter().all(|(id, _)| *id == "search:0"));
    engine.close().await;
}

// T-15, H-22: the cut call is not executed, the complete one is; the model repeats it whole
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_was_cut_is_an_error_and_the_complete_one_before_it_runs() {
    let engine = Engine::scripted().await;
    let writer = engine.demo.writer;
    let child = |prompt: &str| json!({"tasks": [{"agent_group_id": writer, "prompt": prompt}]});
    let (whole, other) = (child("whole").to_string(), child("other").to_string());
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            // Valid JSON all the same: a number may have been cut.
            ("plan", 0) => Reply::text("")
                .and_call("a", "delegate_tasks", &whole)
                .and_call("b", "delegate_tasks", &other)
                .finish("length"),
            // Cut inside a string, whatever reason is given.
            ("plan", 1) => {
                Reply::text("").and_call("c", "delegate_tasks", &other[..other.len() - 9])
            }
            ("plan", 2) => Reply::text("").and_call("d", "delegate_tasks", &other),
            ("plan", _) => Reply::text("done"),
            (child, _) => Reply::text(child.to_owned()),
        });
    let task = engine.post("plan").await;
    assert_eq!(engine.end(task).await, (Completed, "done".into()));
    let titles: Vec<String> =
        sqlx::query_scalar("select title from tasks where parent_task_id is not null order by id")
            .fetch_all(&engine.pool)
            .await
            .unwrap();
    assert_eq!(titles, ["whole", "other"]);
    let last = engine.llm().requests().pop().unwrap();
    let told = told(&last);
    assert!(
        told[1].contains("cut off") && told[1].contains("Make the call again"),
        "{}",
        told[1]
    );
    assert!(told[2].contains("not valid JSON"), "{}", told[2]);
    assert_eq!(told.len(), 4);
    engine.close().await;
}

// T-15: asked for once more, then a failure with a name
#[tokio::test(flavor = "multi_thread")]
async fn an_empty_answer_is_asked_for_once_more() {
    let engine = Engine::scripted().await;
    let empties = |n: usize| {
        engine.llm().replies(
            (0..n)
                .map(|_| Reply::text(" \n"))
                .chain([Reply::text("there")]),
        );
    };
    empties(1);
    let task = engine.post("one").await;
    assert_eq!(engine.end(task).await, (Completed, "there".into()));
    assert_eq!(engine.llm().requests().len(), 2);
    empties(2);
    let task = engine.post("two").await;
    let (status, error) = engine.end(task).await;
    assert_eq!(status, Failed);
    assert!(error.contains("\"empty_answer\""), "{error}");
    assert_eq!(engine.llm().requests().len(), 4);
    engine.close().await;
}

// H-31: digits as the model wrote them, on every way that they take
#[tokio::test(flavor = "multi_thread")]
async fn long_numbers_keep_their_digits() {
    const NUMBERS: [&str; 5] = [
        "9007199254740993",
        "18446744073709551615",
        "12345678901234567890123",
        "1.10",
        "1e400",
    ];
    let engine = Engine::scripted().await;
    let writer = engine.demo.writer;
    let arguments = format!(
        r#"{{"tasks": [{{"agent_group_id": "{writer}", "prompt": "id {{{{item}}}}", "inputs": [{}]}}]}}"#,
        NUMBERS.join(", ")
    );
    let sent = arguments.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("plan", 0) => Reply::text("").and_call("a", "delegate_tasks", &sent),
            ("plan", _) => Reply::text(r.last_user().to_owned()),
            (child, _) => Reply::text(format!("got {child}")),
        });
    let task = engine.post("plan").await;
    let (_, output) = engine.end(task).await;
    let stored = text(
        &engine,
        "select arguments from steps where tool is not null",
    )
    .await;
    assert_eq!(stored, arguments);
    let requests = engine.llm().requests();
    let last = requests.last().unwrap();
    let replayed = &last.messages()[2]["tool_calls"][0]["function"]["arguments"];
    assert_eq!(replayed.as_str(), Some(arguments.as_str()));
    for number in NUMBERS {
        // The one change that is allowed keeps the value: 1e400 may come as 1e+400.
        let forms = [number.to_owned(), number.replace('e', "e+")];
        let prompts: Vec<&str> = requests.iter().map(Recorded::first_user).collect();
        assert!(
            forms
                .iter()
                .any(|n| prompts.contains(&format!("id {n}").as_str())),
            "{number}: {prompts:?}"
        );
        assert!(
            forms
                .iter()
                .any(|n| output.contains(&format!("> got id {n}\n"))),
            "{number}: {output}"
        );
    }
    engine.close().await;
}

// H-30: what PostgreSQL can not hold is cleaned with a visible mark, everywhere
#[tokio::test(flavor = "multi_thread")]
async fn nul_and_broken_unicode_stop_nothing() {
    let engine = Engine::scripted().await;
    let writer = engine.demo.writer.to_string();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("plan", 0) => {
                // The arguments are a JSON string inside the chunk's JSON: escapes of both levels.
                let arguments = format!(
                    r#"{{\"tasks\":[{{\"agent_group_id\":\"{writer}\",\"title\":\"t\\u0000t\",\"prompt\":\"child \\u0000 \\ud83d!\"}}]}}"#
                );
                let call = format!(
                    r#"{{"content":"a\u0000b \ud83d c","tool_calls":[{{"index":0,"id":"i\u0000d","function":{{"name":"delegate_tasks","arguments":"{arguments}"}}}}]}}"#
                );
                Reply::events([chunk(&call, ""), chunk("{}", "tool_calls")])
            }
            ("plan", 1) => {
                let call = r#"{"tool_calls":[{"index":0,"id":"q","function":{"name":"ask\u0000user","arguments":"{\"question\\u0000\":1}"}},
                    {"index":1,"id":"r","function":{"name":"ask_user","arguments":"{\"question\":\"sure\\u0000?\"}"}}]}"#;
                Reply::events([chunk(&call.replace('\n', ""), "tool_calls")])
            }
            ("plan", _) => Reply::text(r.last_user().to_owned()),
            _ => {
                let head: &[u8] = br#"data: {"choices":[{"index":0,"delta":{"content":"result \u0000 "#;
                let tail: &[u8] = b"\xff\xfe end\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
                Reply::chunks([[head, tail].concat()])
            }
        });
    let task = engine.post("plan").await;
    engine.until(task, WaitingForInput).await;
    until("the parent asks", async || {
        engine.llm().requests().len() == 3
            && engine
                .count("select count(*) from task_items where kind = 'wait'")
                .await
                == 1
            && engine.status(task).await == WaitingForInput
    })
    .await;
    engine.append(task, "yes").await;
    assert_eq!(engine.end(task).await, (Completed, "yes".into()));
    let requests = engine.llm().requests();
    let child = requests
        .iter()
        .find(|r| r.first_user().starts_with("child"))
        .unwrap();
    assert_eq!(child.first_user(), "child ␀ \u{fffd}!");
    let last = requests.last().unwrap();
    assert_eq!(last.messages()[2]["content"], "a␀b \u{fffd} c");
    let resumed = last.messages().iter().find_map(|m| {
        let text = m["content"].as_str()?;
        text.starts_with("Results of").then_some(text)
    });
    let resumed = resumed.unwrap();
    assert!(resumed.contains("## 1. t␀t\n"), "{resumed}");
    assert!(resumed.contains("> result ␀ \u{fffd}"), "{resumed}");
    assert!(
        told(last)[1].contains("There is no tool \"ask␀user\""),
        "{:?}",
        told(last)
    );
    let question = text(
        &engine,
        "select data ->> 'question' from task_items where kind = 'wait'",
    )
    .await;
    assert_eq!(question, "sure␀?");
    engine.close().await;
}

// H-20, T-30: stopped between the calls of a turn, then used again
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_was_stopped_within_a_turn_stays_usable() {
    let mut engine = Engine::scripted_with(|c| c.worker.max_parallel_tool_calls = 1).await;
    let writer = engine.demo.writer;
    engine.llm().script(move |r| match r.last_user() {
        "plan" => Reply::text("")
            .and_call("a", "get_subtask_result", &read(TaskId::new()))
            .and_call("b", "get_subtask_result", &read(TaskId::new()))
            .and_call(
                "c",
                "delegate_tasks",
                &json!({"tasks": [{"agent_group_id": writer, "prompt": "child"}]}).to_string(),
            ),
        other => Reply::text(format!("answer to {other}")),
    });
    // The result of the first call is being committed; the second is started with it.
    let held = "new.kind = 'tool_result' and new.data ->> 'ordinal' = '1'";
    let barrier = Barrier::before_insert(&engine.pool, "task_items", held).await;
    engine.resume();
    let task = engine.post("plan").await;
    barrier.reached().await;
    let (pool, hub, workspace) = (engine.pool.clone(), engine.hub.clone(), engine.workspace());
    let stop = tokio::spawn(async move {
        reconvene::lifecycle::stop::stop(&pool, &hub, workspace, task, true).await
    });
    until("the stop waits", async || {
        waiting(&engine.pool, "transactionid").await == 1
    })
    .await;
    barrier.open().await;
    let receipt = stop.await.unwrap().unwrap().unwrap();
    assert_eq!(
        (receipt.status, receipt.stopped, receipt.left_alive),
        (Stopped, 1, 0)
    );
    engine.append(task, "and now?").await;
    assert_eq!(
        engine.end(task).await,
        (Completed, "answer to and now?".into())
    );
    let last = engine.llm().requests().pop().unwrap();
    let told = told(&last);
    assert!(told[0].contains("There is no task"), "{told:?}");
    assert!(
        told[1].contains("interrupted") && told[2].contains("interrupted"),
        "{told:?}"
    );
    assert_eq!(
        engine.children(task).await,
        [],
        "the call after the stop did not run"
    );
    engine.close().await;
}
