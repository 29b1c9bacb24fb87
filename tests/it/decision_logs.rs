//! Decision logs and replays (A-31, A-33).

use crate::{
    engine::Engine,
    forced::{agent_with, delegate},
    http::{self, Answer, Api},
    stub_llm::{Recorded, Reply},
    tenancy::state,
};
use axum::http::Method;
use reconvene::{
    api::auth::Role,
    domain::{
        credential::NewCredential,
        ids::{AgentId, TaskId, WorkspaceId},
        task::TaskStatus::*,
    },
    lifecycle::{self, forget::forget_decisions, submit::Recipient},
    runtime::Progress,
    vault::Vault,
};
use serde_json::{Value, json};

const LOGS: &str = "/api/admin/decision-logs";

/// The API beside an engine, and an admin's token.
fn api(engine: &Engine) -> (Api, String) {
    let mut config = http::config();
    config.llm = engine.config.llm.clone();
    let api = Api::start_with(engine.pool.clone(), config);
    let token = api.token(engine.workspace(), Role::Admin);
    (api, token)
}

async fn logs(api: &Api, token: &str, task: TaskId) -> Vec<Value> {
    let page = api.get(&format!("{LOGS}?task_id={task}"), token).await.ok();
    assert_eq!(page["next_cursor"], Value::Null);
    page["items"].as_array().unwrap().clone()
}

async fn log(api: &Api, token: &str, task: TaskId, turn: u32) -> Value {
    api.get(&format!("{LOGS}/{task}.{turn}"), token).await.ok()
}

async fn replay(api: &Api, token: &str, task: TaskId, body: Value) -> Answer {
    let path = format!("{LOGS}/{task}.1/replay");
    api.post(&path, token, body).await
}

fn section<'a>(log: &'a Value, name: &str) -> &'a Value {
    let sections = log["sections"].as_array().unwrap();
    sections.iter().find(|s| s["name"] == name).unwrap()
}

/// The system prompt that a log's sections make.
fn system(log: &Value) -> String {
    let sections = log["sections"].as_array().unwrap();
    let (tools, prompt) = sections.split_last().unwrap();
    assert_eq!(tools["name"], "tools");
    let texts: Vec<&str> = prompt.iter().map(|s| s["text"].as_str().unwrap()).collect();
    texts.join("\n\n")
}

/// The messages that a log shows, as the provider gets them.
fn sent(log: &Value) -> Vec<(String, String)> {
    let messages = log["messages"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    messages
        .map(|m| (text(&m["role"]), text(&m["text"])))
        .collect()
}

fn arrived(request: &Recorded) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = request.messages().iter();
    all.filter(|m| m["role"] != "system")
        .map(|m| (text(&m["role"]), text(&m["content"])))
        .collect()
}

/// A task whose agent has delegated one piece to the researcher and is done.
async fn delegated(engine: &Engine) -> TaskId {
    let researcher = engine.demo.researcher;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("lead", 0) => {
                Reply::call("delegate_tasks", delegate(researcher, &["piece"])).usage(100, 7, 64)
            }
            _ => Reply::text("done"),
        });
    let task = engine.post("lead").await;
    assert_eq!(engine.end(task).await.0, Completed);
    task
}

// A-31: what was sent, part by part and word by word, and what came back
#[tokio::test(flavor = "multi_thread")]
async fn a_decision_is_shown_as_it_was_asked_and_answered() {
    let engine = Engine::scripted().await;
    let task = delegated(&engine).await;
    let (api, token) = api(&engine);
    let list = logs(&api, &token, task).await;
    let turns: Vec<_> = list
        .iter()
        .map(|log| log["turn"].as_i64().unwrap())
        .collect();
    assert_eq!(turns, [2, 1], "the newest first");
    let first = &list[1];
    assert_eq!(first["id"], format!("{task}.1"));
    assert_eq!(first["agent_name"], "Lead");
    assert_eq!(first["model"], "stub");
    assert_eq!(first["tools_called"], json!(["delegate_tasks"]));
    let usage = json!({"input_tokens": 100, "output_tokens": 7, "cached_tokens": 64});
    assert_eq!(first["usage"], usage);
    assert_eq!(
        (&first["error"], &first["retries"]),
        (&Value::Null, &json!(0))
    );
    assert!(first["latency_ms"].as_i64().unwrap() >= 0);

    let asked = engine.llm().requests();
    let of_lead: Vec<_> = asked.iter().filter(|r| r.first_user() == "lead").collect();
    for (turn, request) in (1..).zip(of_lead) {
        let log = log(&api, &token, task, turn).await;
        assert_eq!(system(&log), request.system());
        assert_eq!(sent(&log), arrived(request));
        let tools = section(&log, "tools")["entries"].as_array().unwrap();
        let shown: Vec<String> = tools.iter().map(|t| t["parameters"].to_string()).collect();
        let offered = request.body["tools"].as_array().unwrap().iter();
        let offered: Vec<String> = offered
            .map(|t| t["function"]["parameters"].to_string())
            .collect();
        assert_eq!(shown, offered, "byte for byte");
        assert!(
            tools
                .iter()
                .all(|t| t["estimated_tokens"].as_u64().unwrap() > 0)
        );
        let instructions = section(&log, "instructions");
        let text = instructions["text"].as_str().unwrap();
        assert_eq!(
            instructions["estimated_tokens"],
            text.chars().count().div_ceil(4)
        );
        let roster = section(&log, "roster");
        let agents = roster["entries"].as_array().unwrap();
        let ids: Vec<_> = agents.iter().map(|a| a["agent_group_id"].clone()).collect();
        let demo = &engine.demo;
        for agent in [demo.researcher, demo.writer, demo.reviewer] {
            assert!(ids.contains(&json!(agent)), "{agent}");
        }
        let entries: Vec<&str> = agents.iter().map(|a| a["text"].as_str().unwrap()).collect();
        assert!(
            roster["text"]
                .as_str()
                .unwrap()
                .ends_with(&entries.join("\n"))
        );
    }
    let first = log(&api, &token, task, 1).await;
    assert_eq!(first["answer"]["calls"][0]["name"], "delegate_tasks");
    assert_eq!(first["answer"]["raw_calls"], json!([]));
    assert_eq!(first["messages_estimated_tokens"], 1);
    let last = log(&api, &token, task, 2).await;
    assert_eq!(last["answer"]["text"], "done");

    // What comes later is not in what was sent.
    engine.append(task, "one more thing").await;
    engine
        .until_true("it is answered", async || {
            logs(&api, &token, task).await.len() == 3
        })
        .await;
    assert_eq!(log(&api, &token, task, 2).await, last);
    engine.close().await;
}

// A-31, H-23: what could not be understood is shown as the model wrote it
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_had_to_be_changed_are_shown_raw_too() {
    let engine = Engine::scripted().await;
    engine.llm().script(|r| match r.turn() {
        0 => Reply::text("hm")
            .and_call("a", "delegate_task", "{}")
            .and_call("", "ask_user", r#"{"question": "half"#),
        _ => Reply::text("done"),
    });
    let task = engine.post("go").await;
    assert_eq!(engine.end(task).await.0, Completed);
    let (api, token) = api(&engine);
    let answer = log(&api, &token, task, 1).await["answer"].clone();
    assert_eq!(answer["text"], "hm");
    let raw = json!([
        {"id": "a", "name": "delegate_task", "arguments": "{}"},
        {"id": "", "name": "ask_user", "arguments": "{\"question\": \"half"},
    ]);
    assert_eq!(answer["raw_calls"], raw);
    assert_eq!(
        answer["calls"][0]["name"], "delegate_task",
        "an invented name is shown as it is"
    );
    assert_eq!(answer["calls"][1]["arguments"], "{}");
    assert!(
        answer["calls"][1]["invalid"]
            .as_str()
            .unwrap()
            .contains("not valid JSON")
    );
    engine.close().await;
}

// A-31, T-15, T-17, H-27: a step without an answer has a log as well, with what it cost
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_got_no_answer_is_logged_too() {
    let engine =
        Engine::scripted_with(|config| config.llm.api_key = Some("the-api-key".into())).await;
    let engine = engine.running();
    engine.llm().script(|r| match r.first_user() {
        "empty" => Reply::text(" ").usage(10, 2, 4),
        "half" if r.number % 2 == 0 => Reply::text("").usage(10, 2, 4),
        "half" => Reply::text("whole").usage(11, 3, 5),
        _ => Reply::events([json!({"error": {"message": "bad key the-api-key", "code": 400}})]),
    });
    let (api, token) = api(&engine);
    for (text, error, usage, retries) in [
        (
            "empty",
            json!("empty_answer"),
            json!({"input_tokens": 20, "output_tokens": 4, "cached_tokens": 8}),
            1,
        ),
        (
            "half",
            Value::Null,
            json!({"input_tokens": 21, "output_tokens": 5, "cached_tokens": 9}),
            1,
        ),
        (
            "refused",
            json!("model_error"),
            json!({"input_tokens": 0, "output_tokens": 0, "cached_tokens": 0}),
            0,
        ),
    ] {
        let task = engine.post(text).await;
        engine.end(task).await;
        let log = log(&api, &token, task, 1).await;
        assert_eq!(
            (&log["error"]["code"], &log["usage"]),
            (&error, &usage),
            "{text}"
        );
        assert_eq!(log["retries"], retries, "{text}");
        assert!(!log.to_string().contains("the-api-key"), "{log}");
        assert!(system(&log).contains("You are Lead."), "{text}");
        assert_eq!(sent(&log), [("user".to_owned(), text.to_owned())]);
        let is_answered = log["answer"]["text"] != Value::Null;
        assert_eq!(is_answered, error.is_null(), "{text}");
    }
    engine.close().await;
}

// A-31, L-9: no secret is shown, whoever has written it down
#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_blanked_out_of_everything_that_is_shown() {
    let engine = Engine::scripted().await;
    let config = http::config();
    let vault = Vault::from_config(&config.credentials);
    let new = NewCredential {
        name: "crm".into(),
        value: "s3cr3t\"value".to_owned().into(),
    };
    lifecycle::credentials::create(&engine.pool, &vault, engine.workspace(), &new)
        .await
        .unwrap();
    let said = r#"s3cr3t"value and sk-abcdef123456"#;
    let agent = agent_with(&engine, "Careless", |a| {
        a.instructions = format!("Use {said}.")
    })
    .await;
    engine.llm().script(move |r| match r.turn() {
        0 => Reply::text(said).and_call("c", "no_tool", &json!({ said: said }).to_string()),
        _ => Reply::text(said),
    });
    let task = engine
        .submit(engine.message(Recipient::Agent(agent), said))
        .await
        .task;
    assert_eq!(engine.end(task).await, (Completed, said.to_owned()));
    let (api, token) = api(&engine);
    let mut shown = log(&api, &token, task, 2).await.to_string();
    shown += &replay(&api, &token, task, json!({"instructions": said}))
        .await
        .ok()
        .to_string();
    for secret in ["s3cr3t", "abcdef123456"] {
        assert!(!shown.contains(secret), "{secret} in {shown}");
    }
    assert!(
        shown.matches("[redacted] and [redacted]").count() > 6,
        "{shown}"
    );

    // Nobody could blank out what nobody can read.
    sqlx::query("update credentials set key_id = 'k0'")
        .execute(&engine.pool)
        .await
        .unwrap();
    let path = format!("{LOGS}/{task}.1");
    api.get(&path, &token)
        .await
        .problem(409, "operator_key_missing");
    replay(&api, &token, task, json!({}))
        .await
        .problem(409, "operator_key_missing");
    engine.close().await;
}

// A-31, T-34, H-46: pages neither repeat nor skip; what is deleted, foreign or never was is not there
#[tokio::test(flavor = "multi_thread")]
async fn logs_are_listed_page_by_page_and_only_of_what_is_there() {
    let engine = Engine::scripted().await;
    let tasks = [delegated(&engine).await, delegated(&engine).await];
    let (api, token) = api(&engine);
    let all: Vec<Value> = {
        let page = api.get(LOGS, &token).await.ok();
        page["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|log| log["id"].clone())
            .collect()
    };
    assert_eq!(all.len(), 6, "two of each parent, one of each child");
    let mut paged = Vec::new();
    let mut path = format!("{LOGS}?limit=2");
    loop {
        let page = api.get(&path, &token).await.ok();
        paged.extend(
            page["items"]
                .as_array()
                .unwrap()
                .iter()
                .map(|log| log["id"].clone()),
        );
        let Some(cursor) = page["next_cursor"].as_str() else {
            break;
        };
        path = format!("{LOGS}?limit=2&cursor={cursor}");
    }
    assert_eq!(paged, all);
    for (query, at) in [
        ("task_id=x", "task_id"),
        ("cursor=x", "cursor"),
        ("limit=0", "limit"),
        ("task=1", "task"),
    ] {
        let refused = api
            .get(&format!("{LOGS}?{query}"), &token)
            .await
            .problem(422, "invalid_query");
        assert_eq!(refused["errors"][0]["path"], at);
    }
    for id in [
        "x",
        &format!("{}", tasks[0]),
        &format!("{}.9", tasks[0]),
        &format!("{}.01", tasks[0]),
    ] {
        api.get(&format!("{LOGS}/{id}"), &token)
            .await
            .problem(404, "not_found");
    }
    lifecycle::delete::delete(
        &engine.pool,
        &engine.hub,
        engine.workspace(),
        tasks[0],
        true,
    )
    .await
    .unwrap();
    assert_eq!(logs(&api, &token, tasks[0]).await, Vec::<Value>::new());
    api.get(&format!("{LOGS}/{}.1", tasks[0]), &token)
        .await
        .problem(404, "not_found");
    replay(&api, &token, tasks[0], json!({}))
        .await
        .problem(404, "not_found");
    assert_eq!(logs(&api, &token, tasks[1]).await.len(), 2);
    engine.close().await;
}

/// A task as old as its id says, with a log.
async fn aged(api: &Api, home: WorkspaceId, agent: AgentId, days: u64, log_days: i32) -> TaskId {
    let task = http::task(&api.pool, home, agent, "t").await;
    let now: i64 = sqlx::query_scalar("select extract(epoch from now())::bigint")
        .fetch_one(&api.pool)
        .await
        .unwrap();
    let made = uuid::Timestamp::from_unix(uuid::NoContext, now as u64 - days * 86_400, 0);
    let old = TaskId(uuid::Uuid::new_v7(made));
    sqlx::query("update tasks set id = $2, root_task_id = $2 where id = $1")
        .bind(task)
        .bind(old)
        .execute(&api.pool)
        .await
        .unwrap();
    let sql = "with p as (insert into prompt_texts (workspace_id, hash, sections, used_at)
            values ($1, sha256($2::text::bytea), '{}', now() - make_interval(days => $3)) returning hash)
        insert into decision_logs (workspace_id, task_id, turn, prompt_hash, seen_seq, model, answer, latency_ms, created_at)
        select $1, $2, 1, hash, 1, 'm', '{}', 1, now() - make_interval(days => $3) from p";
    sqlx::query(sql)
        .bind(home)
        .bind(old)
        .bind(log_days)
        .execute(&api.pool)
        .await
        .unwrap();
    old
}

// A-31, O-7: what is older than the setting goes, batch by batch, and its prompts after it; the rest stays
#[tokio::test]
async fn old_logs_and_their_prompts_are_forgotten_in_batches() {
    let api = Api::start().await;
    let mut kept = Vec::new();
    for home in [
        http::workspace(&api.pool).await,
        http::workspace(&api.pool).await,
    ] {
        let agent = http::agent(&api.pool, home, "default", "Lead").await;
        for _ in 0..3 {
            aged(&api, home, agent, 40, 35).await;
        }
        aged(&api, home, agent, 31, 31).await;
        // An old task that somebody has written to of late, and a new one.
        kept.push(aged(&api, home, agent, 400, 29).await);
        kept.push(aged(&api, home, agent, 1, 1).await);
    }
    let mut conn = api.pool.acquire().await.unwrap();
    let mut rounds = vec![forget_decisions(&mut conn, 30, 3).await.unwrap()];
    while let Some(Progress::More(_)) = rounds.last() {
        rounds.push(forget_decisions(&mut conn, 30, 3).await.unwrap());
    }
    assert_eq!(
        rounds,
        [Progress::More(3), Progress::More(3), Progress::Did(2)]
    );
    assert_eq!(
        forget_decisions(&mut conn, 30, 3).await.unwrap(),
        Progress::Idle
    );
    let mut left: Vec<TaskId> = sqlx::query_scalar("select task_id from decision_logs")
        .fetch_all(&mut *conn)
        .await
        .unwrap();
    left.sort();
    kept.sort();
    assert_eq!(left, kept);
    // The prompts of 31 days may yet be named by a log that a process writes which remembers them.
    let prompts: Vec<i32> =
        sqlx::query_scalar("select (now()::date - used_at::date) from prompt_texts order by 1")
            .fetch_all(&mut *conn)
            .await
            .unwrap();
    assert_eq!(prompts, [1, 1, 29, 29, 31, 31]);
}

// A-33: the same question is the same bytes; nothing comes of the answer
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_asks_the_same_and_does_nothing() {
    let engine = Engine::scripted().await;
    let task = delegated(&engine).await;
    engine.append(task, "later").await;
    engine
        .until_true("it is answered", async || {
            engine.status(task).await == Completed
        })
        .await;
    let (api, token) = api(&engine);
    let first = engine.llm().requests()[0].clone();
    let before = state(&engine.pool, engine.workspace()).await;
    let researcher = engine.demo.researcher;
    engine.llm().script(move |_| {
        Reply::text("again")
            .and_call(
                "b",
                "delegate_tasks",
                &delegate(researcher, &["x"]).to_string(),
            )
            .usage(9, 8, 7)
    });
    for body in [None, Some(json!({}))] {
        let path = format!("{LOGS}/{task}.1/replay");
        let request = http::request(Method::POST, &path, &token, body);
        let answer = api.send(request).await.ok();
        let asked = engine.llm().requests().pop().unwrap();
        assert_eq!(asked.raw, first.raw);
        assert_eq!(answer["changed_sections"], json!([]));
        let (original, replayed) = (&answer["original"], &answer["replayed"]);
        assert_eq!(original["answer"]["calls"][0]["id"], "call_delegate_tasks");
        assert_eq!(original["usage"]["input_tokens"], 100);
        assert_eq!(
            (&replayed["model"], &replayed["answer"]["text"]),
            (&json!("stub"), &json!("again"))
        );
        assert_eq!(replayed["answer"]["calls"][0]["name"], "delegate_tasks");
        let usage = json!({"input_tokens": 9, "output_tokens": 8, "cached_tokens": 7});
        assert_eq!(replayed["usage"], usage);
    }
    crate::engine::rest(&engine.pool).await;
    assert_eq!(
        state(&engine.pool, engine.workspace()).await,
        before,
        "no row has changed"
    );
    engine.close().await;
}

// A-33: another model, other instructions, another profile: each changes its part and no other
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_changes_what_it_is_told_to() {
    let engine = Engine::scripted().await;
    let task = delegated(&engine).await;
    let (api, token) = api(&engine);
    let first = engine.llm().requests()[0].clone();
    let was = log(&api, &token, task, 1).await;
    let reviewer = engine.demo.reviewer;
    engine.llm().script(|_| Reply::text("now"));
    let body = json!({
        "model": {"name": "other", "temperature": 0.5},
        "instructions": "Do {{ nothing }}.\n# Rules",
        "delegation_profiles": [{"agent_group_id": reviewer, "description": "Judges.\n- X — agent_group_id: y"}],
    });
    let answer = replay(&api, &token, task, body).await.ok();
    assert_eq!(answer["replayed"]["model"], "other");
    assert_eq!(answer["original"]["model"], "stub");
    let names: Vec<_> = answer["changed_sections"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["name"].clone())
        .collect();
    assert_eq!(names, ["instructions", "roster"]);
    let asked = engine.llm().requests().pop().unwrap();
    assert_eq!(asked.messages()[1..], first.messages()[1..]);
    assert_eq!(asked.body["tools"], first.body["tools"]);
    assert_eq!(
        (&asked.body["model"], &asked.body["temperature"]),
        (&json!("other"), &json!(0.5))
    );
    let text = |name: &str| section(&was, name)["text"].as_str().unwrap().to_owned();
    let entries = section(&was, "roster")["entries"]
        .as_array()
        .unwrap()
        .clone();
    let old = entries
        .iter()
        .find(|e| e["agent_group_id"] == json!(reviewer))
        .unwrap()["text"]
        .as_str()
        .unwrap();
    let head = old.lines().next().unwrap();
    let new = format!(
        "{head}\n  Description: Judges. X – agent_group_id: y\n  Example input: (none given)"
    );
    let expected = first
        .system()
        .replace(
            &text("instructions"),
            "You are Lead.\n\nDo {{ nothing }}.\n# Rules",
        )
        .replace(old, &new);
    assert_eq!(asked.system(), expected);

    // The name of one provider's model means nothing to another.
    let offline = replay(
        &api,
        &token,
        task,
        json!({"model": {"provider": "offline"}}),
    )
    .await
    .ok();
    assert_eq!(offline["replayed"]["model"], "offline-demo");
    assert_ne!(offline["replayed"]["answer"]["text"], "now");

    for (body, path) in [
        (json!([]), ""),
        (json!({"instructions": 1}), "instructions"),
        (json!({"model": {"provider": "hal"}}), "model.provider"),
        (
            json!({"delegation_profiles": [{"agent_group_id": reviewer}]}),
            "delegation_profiles[0].description",
        ),
        (
            json!({"delegation_profiles": [{"agent_group_id": AgentId::new(), "description": "d"}]}),
            "delegation_profiles[0].agent_group_id",
        ),
    ] {
        let refused = replay(&api, &token, task, body)
            .await
            .problem(422, "invalid_body");
        assert_eq!(refused["errors"][0]["path"], path);
    }
    sqlx::query("delete from prompt_texts")
        .execute(&engine.pool)
        .await
        .unwrap();
    replay(&api, &token, task, json!({}))
        .await
        .problem(409, "prompt_forgotten");
    assert_eq!(log(&api, &token, task, 1).await["sections"], Value::Null);
    engine.close().await;
}

// A-33, H-26, H-27, H-28, H-29: what a provider does is told as it is, without a key, and never as half an answer
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_tells_what_the_provider_did() {
    let engine = Engine::scripted_with(|config| config.llm.api_key = Some("the-api-key".into()))
        .await
        .running();
    let task = delegated(&engine).await;
    let (api, token) = api(&engine);
    let events = |last: Value| {
        Reply::events([
            json!({"choices": [{"index": 0, "delta": {"content": "thirty characters of a text"}}]}),
            last,
        ])
    };
    let before = engine.llm().arrived();
    for (reply, says, retry_after) in [
        (
            Reply::status(429, r#"{"error": {"message": "slow down, the-api-key"}}"#)
                .header("retry-after", "7"),
            "slow down",
            Some("7"),
        ),
        (
            Reply::status(400, r#"{"error": {"message": "no such model"}}"#),
            "no such model",
            None,
        ),
        (
            events(json!({"error": {"message": "overloaded", "code": 529}})),
            "overloaded",
            None,
        ),
        (
            events(json!({"choices": [{"index": 0, "delta": {"content": "and no"}}]}))
                .then_hang_up(),
            "broke: ",
            None,
        ),
        (Reply::hang_up(), "", None),
    ] {
        engine.llm().replies([reply]);
        let answer = replay(&api, &token, task, json!({})).await;
        let problem = answer.problem(502, "model_error");
        let detail = problem["detail"].as_str().unwrap();
        assert!(
            detail.contains(says) && !detail.contains("the-api-key"),
            "{detail}"
        );
        let asked_to_wait = answer
            .headers
            .get("retry-after")
            .map(|h| h.to_str().unwrap());
        assert_eq!(asked_to_wait, retry_after, "{detail}");
    }
    assert_eq!(engine.llm().arrived() - before, 5, "one attempt each");
    let text = "Zürich – 日本語 🦀";
    let commented = format!(
        ": ping\n\ndata:{}\n\n: ping\ndata: {}\n\ndata: [DONE]\n\n",
        json!({"choices": [{"index": 0, "delta": {"content": text}}]}),
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
    );
    for reply in [
        Reply::text(text).byte_by_byte(),
        Reply::chunks(commented.into_bytes().chunks(1).map(<[u8]>::to_vec)),
    ] {
        engine.llm().replies([reply]);
        let answer = replay(&api, &token, task, json!({})).await.ok();
        assert_eq!(answer["replayed"]["answer"]["text"], text);
    }
    engine.close().await;
}
