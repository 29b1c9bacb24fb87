//! `run_code`: what code may do, where it ends, and what it leaves (L-5, S-3, X-15, H-15, H-30, H-31, H-33).

use crate::{
    configured_tools::{post_to, tool},
    engine::Engine,
    forced::{agent, agent_with},
    http_request::{Kind, Service, ok},
    stub_llm::Reply,
};
use reconvene::{
    config::Config,
    domain::{agent::AgentKind, ids::TaskId, task::TaskStatus::Completed},
};
use serde_json::{Value, json};

fn coding(config: &mut Config) {
    config.http.allow_private_addresses = true;
    config.worker.lease_seconds = 1;
    config.run_code.timeout_seconds = 2;
    config.run_code.max_calls = 5;
    config.run_code.program = Some(env!("CARGO_BIN_EXE_reconvene").into());
}

async fn engine() -> Engine {
    Engine::scripted_with(coding).await.running()
}

/// Lets an agent with these tools run the code; the task's output is the result as its model got it.
async fn start(engine: &Engine, tools: &[&str], code: &str) -> TaskId {
    let tools: Vec<String> = tools.iter().map(|name| (*name).to_owned()).collect();
    let coder = agent_with(engine, "Coder", |a| {
        a.kind = AgentKind::CodeAct;
        a.tools = tools;
    })
    .await;
    let arguments = json!({"code": code});
    engine.llm().script(move |r| match r.turn() {
        0 if r.first_user() == "go" => Reply::call("run_code", arguments.clone()),
        0 => Reply::text("child done"),
        _ => Reply::text(r.results()[0].1),
    });
    post_to(engine, coder, "go").await
}

async fn told(engine: &Engine, tools: &[&str], code: &str) -> String {
    let task = start(engine, tools, code).await;
    let (status, told) = engine.end(task).await;
    assert_eq!(status, Completed, "{told}");
    told
}

// L-5, A-11, X-15, H-31
#[tokio::test(flavor = "multi_thread")]
async fn code_computes_with_the_tools_of_its_agent() {
    let service = Service::start(|n, _| match n {
        1 => ok(r#"{"id": 18446744073709551617, "price": 1.10, "far": 1e400}"#),
        _ => ok("[]"),
    })
    .await;
    let engine = engine().await;
    tool(
        &engine,
        json!({"name": "post-it", "base_tool": "http_request",
        "bindings": {"method": "POST", "url": service.base}}),
    )
    .await;
    let code = format!(
        "item = http_request(url='{}')['body']\n\
         for n in [item['id'] + 1, 12345678901234567890123, item['price'], item['far']]:\n\
         \x20   post_it({{'body': {{'n': n}}}})\n\
         print('sum', sum(range(10)))\n\
         {{'id': item['id'], 'list': (1, None, True), 'price': item['price'] * 2}}",
        service.base
    );
    let text = told(&engine, &["http_request", "post-it"], &code).await;
    assert_eq!(
        text,
        r#"{"result":{"id":18446744073709551617,"list":[1,null,true],"price":2.2},"output":"sum 45\n","calls":{"http_request":1,"post-it":4}}"#
    );
    let got = service.got();
    let bodies: Vec<&str> = got.iter().skip(1).map(|got| got.body.as_str()).collect();
    assert_eq!(
        bodies,
        [
            r#"{"n":18446744073709551618}"#,
            r#"{"n":12345678901234567890123}"#,
            r#"{"n":1.1}"#,
            r#"{"n":"1e+400"}"#
        ]
    );
    let mut keys: Vec<_> = got
        .iter()
        .map(|g| g.headers["idempotency-key"].as_bytes())
        .collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 5, "each call has a key of its own");
    engine.close().await;
}

// L-5: code that allocates without end, loops for ever, recurses, prints 1 GB, or calls a pausing tool; and what it can
// not get at.
#[tokio::test(flavor = "multi_thread")]
async fn code_that_does_too_much_ends_with_a_clear_error() {
    let service = Service::start(|_, _| ok("1")).await;
    let engine = engine().await;
    let many = format!("while True:\n    http_request(url='{}')", service.base);
    let tools = [
        "http_request",
        "ask_user",
        "wait_until",
        "get_subtask_result",
    ];
    for (code, expected) in [
        ("while True:\n    pass", "TimeoutError: time limit exceeded"),
        ("sum(range(10**12))", "TimeoutError"),
        (
            "a = []\nwhile True:\n    a.append('x' * 1000000)",
            "needed more than 64 MB of memory",
        ),
        ("a = 'x' * 10**10", "memory"),
        ("a = 2 ** (10 ** 11)", "Error"),
        ("[0] * 10**9", "memory"),
        ("a = []\nwhile True:\n    a = [a, a]", "Error: "),
        ("def f(n):\n    return f(n + 1)\nf(0)", "RecursionError"),
        (
            "while True:\n    print('x' * 10000)",
            "the code printed more than 100000 bytes",
        ),
        (
            "for n in range(10**9):\n    print(n)",
            "printed more than 100000 bytes",
        ),
        (
            "ask_user(question='Which?')",
            "RuntimeError: ask_user makes you wait, and can not be called from code",
        ),
        ("wait_until(seconds=1)", "wait_until makes you wait"),
        ("run_code(code='1')", "run_code can not be called from code"),
        (&many, "more than 5 calls of tools, and was ended"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("import os\nos.environ['PATH']", "Error"),
        ("import socket", "ModuleNotFoundError"),
        ("import subprocess", "ModuleNotFoundError"),
        (
            "wait_for_signal()",
            "There is no tool \"wait_for_signal\". Your tools are: ",
        ),
        ("delegate_tasks(tasks=[])", "There is no tool"),
        ("wait_for_signal", "NameError"),
        ("get_subtask_result(1, 2)", "give its arguments by name"),
        (
            "get_subtask_result(task_id=float('nan'))",
            "is no number of JSON",
        ),
        (
            "get_subtask_result(task_id='x')",
            "the arguments do not fit at `task_id`",
        ),
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        (" ", "`code` is empty"),
    ] {
        let text = told(&engine, &tools, code).await;
        assert!(text.starts_with("Error: "), "{code}: {text}");
        assert!(text.contains(expected), "{code}: {text}");
    }
    // What the code had done until then is told.
    let code = format!(
        "print('begun')\nhttp_request(url='{}')\n1 / 0",
        service.base
    );
    let text = told(&engine, &tools, &code).await;
    assert!(
        text.contains("line 3") && text.contains("Output until then:\nbegun"),
        "{text}"
    );
    assert!(text.contains(r#"not undone: {"http_request":1}"#), "{text}");
    engine.close().await;
}

// H-30, H-33
#[tokio::test(flavor = "multi_thread")]
async fn what_code_says_can_be_stored_and_shown() {
    let engine = Engine::scripted_with(|c| {
        coding(c);
        c.tools.max_result_chars = 1000;
    })
    .await
    .running();
    let text = told(&engine, &[], r"print('a\x00b'); {'\x00k': 'v\x00'}").await;
    assert_eq!(text, r#"{"result":{"␀k":"v␀"},"output":"a␀b\n"}"#);
    let text = told(&engine, &[], "'x' * 2000000").await;
    assert!(
        text.ends_with("[cut: 2000013 characters in all, 1000 shown]"),
        "{}",
        text.len()
    );
    let stored = engine.count(
        "select max(length(data::text || coalesce(text, '')))::bigint from task_items where kind = 'tool_result'",
    );
    assert!(stored.await > 2_000_000);
    engine.close().await;
}

// L-5, S-3, D-20
#[tokio::test(flavor = "multi_thread")]
async fn a_delegation_from_code_is_waited_for_when_the_code_has_ended() {
    let engine = engine().await;
    let helper = agent(&engine, "Helper").await;
    let code = format!(
        "made = delegate_tasks(tasks=[{{'agent_group_id': '{helper}', 'prompt': '{{{{item}}}}', 'inputs': ['a', 'b']}}])\n\
         try:\n\
         \x20   delegate_tasks(tasks=[{{'agent_group_id': '{helper}', 'prompt': 'more'}}])\n\
         except RuntimeError as error:\n\
         \x20   print(error)\n\
         len(made['children'])"
    );
    let task = start(&engine, &["delegate_tasks"], &code).await;
    let (status, text) = engine.end(task).await;
    assert_eq!(status, Completed, "{text}");
    let told: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(told["result"], 2, "{text}");
    assert!(
        told["output"]
            .as_str()
            .unwrap()
            .contains("can be called once"),
        "{text}"
    );
    assert_eq!(engine.children(task).await.len(), 2);
    let resumed = engine.count("select count(*) from task_items where kind = 'resume_message'");
    assert_eq!(resumed.await, 1);
    engine.close().await;
}

// H-15, X-15, D-26: a worker that dies under its code. Nothing is made again, and what was delegated runs.
#[tokio::test(flavor = "multi_thread")]
async fn code_is_not_run_again_after_a_crash() {
    for delegates in [false, true] {
        let service = Service::start(|_, _| Kind::Never).await;
        let mut engine = engine().await;
        let helper = agent(&engine, "Helper").await;
        let first = match delegates {
            true => {
                format!("delegate_tasks(tasks=[{{'agent_group_id': '{helper}', 'prompt': 'a'}}])\n")
            }
            false => String::new(),
        };
        let code = format!("{first}http_request(method='POST', url='{}')", service.base);
        let task = start(&engine, &["delegate_tasks", "http_request"], &code).await;
        service.has(1).await;
        engine.kill().await;
        engine.resume();
        let (status, text) = engine.end(task).await;
        assert_eq!(status, Completed);
        assert!(
            text.starts_with("Error: The call was interrupted"),
            "{text}"
        );
        assert_eq!(text.contains("It had delegated: "), delegates, "{text}");
        assert_eq!(service.got().len(), 1);
        let children = engine.children(task).await;
        assert_eq!(children.len(), usize::from(delegates));
        for child in children {
            assert_eq!(engine.end(child).await.0, Completed);
        }
        engine.close().await;
    }
}

// T-30, L-5: a stop ends the code and its process at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_ends_code_that_waits_for_a_tool() {
    let service = Service::start(|_, _| Kind::Never).await;
    let engine = engine().await;
    let code = format!("http_request(url='{}')", service.base);
    let task = start(&engine, &["http_request"], &code).await;
    service.has(1).await;
    engine.stop(task, true).await;
    engine.close().await;
    assert_eq!(service.got().len(), 1);
}
