//! The main job through every provider: a parent delegates, rests, wakes once with both results, and answers.

use crate::engine::Engine;
use crate::stub_llm::Reply;
use reconvene::config::Provider;
use reconvene::domain::task::TaskStatus::Completed;
use serde_json::{Value, json};

async fn delegates_through(provider: Provider, model: &str) -> Engine {
    let model = model.to_owned();
    let mut engine = Engine::scripted_with(|config| {
        config.llm.provider = provider;
        config.llm.model = Some(model);
    })
    .await;
    if provider != Provider::OpenAi {
        engine.config.llm.base_url = Some(engine.llm().root().to_owned());
    }
    engine.resume();
    let researcher = engine.demo.researcher.to_string();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("plan", 0) => {
                assert!(r.offers("delegate_tasks"));
                let task = |prompt: &str| json!({"agent_group_id": researcher, "prompt": prompt});
                let tasks = json!({"tasks": [task("one"), task("two")]});
                Reply::text("I delegate.").and_call("d:0", "delegate_tasks", &tasks.to_string())
            }
            // The results are in: one more call, in a turn of its own with an id used before.
            ("plan", 1) => Reply::text("").and_call("d:0", "no_such_tool", "{}"),
            ("plan", _) => Reply::text(format!("done: {}", r.last_user())),
            (child, _) => Reply::text(format!("result of {child}")),
        });
    let parent = engine.post("plan").await;
    let (status, output) = engine.end(parent).await;
    assert_eq!(status, Completed, "{output}");
    for child in ["one", "two"] {
        let told = format!("> result of {child}\n");
        assert!(output.contains(&told), "{output}");
    }
    assert_eq!(engine.children(parent).await.len(), 2);
    assert_eq!(engine.llm().requests().len(), 5);
    // The provider took every request, the histories after the resume included.
    assert_eq!(engine.llm().refusals(), Vec::<String>::new());
    engine
}

// L-10, D-20, W-1
#[tokio::test(flavor = "multi_thread")]
async fn a_delegation_through_openai() {
    let engine = delegates_through(Provider::OpenAi, "stub").await;
    engine.close().await;
}

/// What the history keeps for the provider, of each message with calls.
async fn kept(engine: &Engine) -> Vec<Value> {
    sqlx::query_scalar(
        "select data #> '{calls,0,provider_data,data}' from task_items
         where kind = 'assistant_message' and data is not null order by seq",
    )
    .fetch_all(&engine.pool)
    .await
    .unwrap()
}

/// All values of this key in the last request, in order.
fn sent(engine: &Engine, key: &str) -> Vec<Value> {
    fn collect(value: &Value, key: &str, found: &mut Vec<Value>) {
        if let Value::Object(fields) = value {
            found.extend(fields.get(key).cloned());
            fields.values().for_each(|value| collect(value, key, found));
        }
        for value in value.as_array().into_iter().flatten() {
            collect(value, key, found);
        }
    }
    let mut found = Vec::new();
    let last = engine.llm().requests().pop().unwrap();
    collect(&last.body, key, &mut found);
    found
}

// L-10, D-20, W-1: with a model that thinks, whose thoughts come back from the database.
#[tokio::test(flavor = "multi_thread")]
async fn a_delegation_through_anthropic() {
    let engine = delegates_through(Provider::Anthropic, "claude-sonnet-5").await;
    let thought = |name: &str| json!({"type": "thinking", "thinking": "I think.", "signature": format!("thoughts-before-{name}")});
    let delegating = json!([thought("delegate_tasks"), {"type": "text", "bytes": 11}]);
    let wrong = json!([thought("no_such_tool")]);
    assert_eq!(kept(&engine).await, [delegating, wrong]);
    assert_eq!(
        sent(&engine, "signature"),
        [
            "thoughts-before-delegate_tasks",
            "thoughts-before-no_such_tool"
        ]
    );
    engine.close().await;
}

// L-10, D-20, W-1: with a model that refuses calls without the signature that it gave.
#[tokio::test(flavor = "multi_thread")]
async fn a_delegation_through_gemini() {
    let engine = delegates_through(Provider::Gemini, "gemini-3-flash").await;
    let signatures = ["signature-of-delegate_tasks", "signature-of-no_such_tool"];
    assert_eq!(kept(&engine).await, signatures);
    assert_eq!(sent(&engine, "thoughtSignature"), signatures);
    engine.close().await;
}
