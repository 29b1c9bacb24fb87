//! The model providers against a stub over real HTTP: what comes back from good, broken and slow answers.

mod anthropic;
mod delegation;
mod failures;
mod gemini;
mod providers;

use crate::stub_llm::{Gate, Reply, StubLlm};
use reconvene::domain::agent::{ModelSettings, Reasoning};
use reconvene::domain::decision::{Decision, ToolCall, Usage};
use reconvene::domain::model_provider::ProviderKind;
use reconvene::llm::{
    Limits, Message, ModelError, Models, ProviderSettings, Request, Retry, ToolSpec,
};
use reconvene::net::Reach;
use serde_json::{Value, json};
use std::sync::Mutex;
use std::time::{Duration, Instant};

const KEY: &str = "stub-key-of-the-workspace";

fn settings(stub: &StubLlm) -> ProviderSettings {
    ProviderSettings {
        provider: ProviderKind::OpenAi,
        base_url: Some(stub.base_url().to_owned()),
        api_key: Some(KEY.into()),
        model: Some("stub-1".to_owned()),
    }
}

const LIMITS: Limits = Limits {
    timeout: Duration::from_secs(20),
    idle_timeout: Duration::from_secs(10),
    max_output_tokens: None,
    reach: Reach::Everywhere,
};

fn models(settings: ProviderSettings) -> Models {
    Models::new(settings.provider, &[settings], LIMITS).unwrap()
}

fn models_within(stub: &StubLlm, limits: Limits) -> Models {
    Models::new(ProviderKind::OpenAi, &[settings(stub)], limits).unwrap()
}

fn request(messages: Vec<Message>) -> Request {
    Request {
        model: ModelSettings::default(),
        system: "You are a test.".into(),
        messages,
        tools: Vec::new().into(),
        output_schema: None,
        cache_key: "agent-1".to_owned(),
    }
}

fn hello() -> Request {
    request(vec![Message::User("hello".to_owned())])
}

async fn ask(stub: &StubLlm) -> Result<Decision, ModelError> {
    models(settings(stub)).decide(&hello(), &|_| {}).await
}

async fn ask_once(reply: Reply) -> Result<Decision, ModelError> {
    let stub = StubLlm::start().await;
    stub.replies([reply]);
    let answer = ask(&stub).await;
    assert_eq!(stub.requests().len(), 1, "one attempt is one request");
    answer
}

fn call(id: &str, name: &str, arguments: &str) -> ToolCall {
    ToolCall {
        id: id.into(),
        name: name.into(),
        arguments: arguments.into(),
        invalid: None,
        provider_data: None,
    }
}

fn delta(delta: Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

fn text(text: &str) -> Value {
    delta(json!({ "content": text }))
}

fn end(reason: &str) -> Value {
    json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
}

fn fragment(fragment: Value) -> Value {
    delta(json!({ "tool_calls": [fragment] }))
}

fn is_retryable(answer: &Result<Decision, ModelError>) -> bool {
    matches!(
        answer,
        Err(ModelError {
            retry: Retry::After(_),
            ..
        })
    )
}

#[tokio::test]
async fn an_answer_streams_its_text_and_counts_its_tokens() {
    // L-10
    let stub = StubLlm::start().await;
    stub.replies([Reply::text("Hello wörld").usage(100, 20, 64)]);
    let pieces = Mutex::new(Vec::new());
    let models = models(settings(&stub));
    let on_text = |piece: &str| pieces.lock().unwrap().push(piece.to_owned());
    let decision = models.decide(&hello(), &on_text).await.unwrap();
    let usage = Usage {
        input_tokens: 100,
        output_tokens: 20,
        cached_tokens: 64,
    };
    assert_eq!(
        decision,
        Decision {
            text: "Hello wörld".into(),
            usage,
            ..Decision::default()
        }
    );
    let pieces = pieces.into_inner().unwrap();
    assert_eq!((pieces.len(), pieces.concat()), (2, decision.text));
}

#[tokio::test]
async fn the_request_carries_the_settings_and_the_history_exactly() {
    // H-31, A-32, H-21
    let exact = r#"{"id": 9007199254740993, "u":18446744073709551615,"big":12345678901234567890123,"d":1.10,"e":1e400}"#;
    let stub = StubLlm::start().await;
    let mut request = request(vec![
        Message::User("hello".into()),
        Message::Assistant {
            text: String::new(),
            calls: vec![call("a", "send", exact), call("b", "no such tool", "{}")],
        },
        Message::ToolResult {
            call_id: "a".into(),
            name: "send".into(),
            text: "sent".into(),
            is_error: false,
        },
        Message::ToolResult {
            call_id: "b".into(),
            name: "no such tool".into(),
            text: "unknown".into(),
            is_error: true,
        },
        Message::Assistant {
            text: "Done.".into(),
            calls: vec![],
        },
        Message::User("thanks".into()),
    ]);
    request.tools = vec![ToolSpec {
        name: "send".into(),
        description: "Sends.".into(),
        parameters: json!({"type": "object"}),
    }]
    .into();
    request.model = ModelSettings {
        name: Some("other-2".into()),
        temperature: Some(0.2),
        max_output_tokens: Some(99),
        reasoning: Some(Reasoning::Disabled),
        ..ModelSettings::default()
    };
    let models = models(ProviderSettings {
        base_url: Some(format!("{}/", stub.base_url())),
        ..settings(&stub)
    });
    for _ in 0..2 {
        models.decide(&request, &|_| {}).await.unwrap();
    }
    let seen = stub.requests();
    assert_eq!(stub.refusals(), Vec::<String>::new());
    assert_eq!(
        seen[0].raw, seen[1].raw,
        "equal histories are equal byte for byte"
    );
    assert_eq!(seen[0].headers["authorization"], format!("Bearer {KEY}"));
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    assert_eq!(
        seen[0].body,
        json!({
            "model": "other-2",
            "messages": [
                {"role": "system", "content": "You are a test."},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": null, "tool_calls": [call("a", "send", exact), call("b", "no_such_tool", "{}")]},
                {"role": "tool", "tool_call_id": "a", "content": "sent"},
                {"role": "tool", "tool_call_id": "b", "content": "Error: unknown"},
                {"role": "assistant", "content": "Done."},
                {"role": "user", "content": "thanks"},
            ],
            "tools": [{"type": "function", "function": {"name": "send", "description": "Sends.", "parameters": {"type": "object"}}}],
            "stream": true,
            "stream_options": {"include_usage": true},
            "temperature": 0.2,
            "max_tokens": 99,
            "reasoning_effort": "none",
        })
    );
}

#[tokio::test]
async fn without_a_key_no_key_is_sent_and_only_openai_gets_its_own_parameters() {
    // L-10
    let stub = StubLlm::start().await;
    let models = models(ProviderSettings {
        api_key: None,
        ..settings(&stub)
    });
    models.decide(&hello(), &|_| {}).await.unwrap();
    let seen = &stub.requests()[0];
    assert_eq!(seen.headers.get("authorization"), None);
    for absent in [
        "tools",
        "temperature",
        "max_tokens",
        "max_completion_tokens",
        "reasoning_effort",
        "prompt_cache_key",
    ] {
        assert_eq!(seen.body.get(absent), None, "{absent}");
    }
}

#[tokio::test]
async fn interleaved_fragments_give_the_same_calls_as_the_whole_reply() {
    // H-19
    let named = |index: usize| {
        fragment(
            json!({"index": index, "id": format!("id{index}"), "type": "function", "function": {"name": format!("tool{index}"), "arguments": ""}}),
        )
    };
    let arguments = |index: usize| format!("{{\"number\": {index}, \"text\": \"é{index}\"}}");
    let mut events: Vec<Value> = (0..10).rev().map(named).collect();
    for at in 0..arguments(0).chars().count() {
        for index in (0..10).rev() {
            let piece: String = arguments(index).chars().skip(at).take(1).collect();
            events.push(fragment(
                json!({"index": index, "function": {"arguments": piece}}),
            ));
        }
    }
    events.push(end("tool_calls"));
    let streamed = ask_once(Reply::events(events)).await.unwrap();

    let mut whole = Reply::text("");
    for index in 0..10 {
        whole = whole.and_call(
            &format!("id{index}"),
            &format!("tool{index}"),
            &arguments(index),
        );
    }
    let plain = ask_once(whole.clone().plain()).await.unwrap();
    let usual = ask_once(whole).await.unwrap();
    assert_eq!(streamed.calls.len(), 10);
    assert_eq!(streamed.calls, plain.calls);
    assert_eq!(usual, plain);
}

#[tokio::test]
async fn fragments_of_one_index_with_different_ids_are_different_calls() {
    // H-19
    let whole = |id: &str, arguments: &str| {
        fragment(json!({"index": 0, "id": id, "function": {"name": "f", "arguments": arguments}}))
    };
    let events = [
        whole("a", "{\"x\":"),
        fragment(json!({"index": 0, "function": {"arguments": "1}"}})),
        whole("b", "{\"x\":2}"),
        end("tool_calls"),
    ];
    let decision = ask_once(Reply::events(events)).await.unwrap();
    assert_eq!(
        decision.calls,
        [call("a", "f", "{\"x\":1}"), call("b", "f", "{\"x\":2}")]
    );
}

#[tokio::test]
async fn empty_arguments_are_an_empty_object_and_others_an_error() {
    // H-21
    for plain in [false, true] {
        let mut reply = Reply::text("");
        for (id, arguments) in [
            ("a", ""),
            ("b", "  "),
            ("c", "null"),
            ("d", "{}"),
            ("e", "[1]"),
            ("f", "\"x\""),
            ("g", "{\"n\":2"),
        ] {
            reply = reply.and_call(id, "t", arguments);
        }
        let reply = if plain { reply.plain() } else { reply };
        let calls = ask_once(reply).await.unwrap().calls;
        for call in &calls {
            assert_eq!(call.arguments, "{}");
            assert_eq!(call.invalid.is_some(), "efg".contains(&call.id), "{call:?}");
        }
        assert_eq!(calls.len(), 7);
    }
    let absent = json!({"choices": [{"message": {"tool_calls": [
        {"id": "a", "function": {"name": "t"}},
        {"id": "b", "function": {"name": "t", "arguments": null}},
    ]}, "finish_reason": "tool_calls"}]});
    assert_eq!(
        ask_once(Reply::json(&absent)).await.unwrap().calls,
        [call("a", "t", "{}"), call("b", "t", "{}")]
    );
}

#[tokio::test]
async fn a_cut_call_is_never_executable() {
    // H-22, T-15
    let two = Reply::text("")
        .and_call("a", "write", "{\"n\":25}")
        .and_call("b", "write", "{\"text\":\"half a sen");
    for reply in [two.clone().finish("length"), two.clone(), two.plain()] {
        let calls = ask_once(reply).await.unwrap().calls;
        assert_eq!(calls[0], call("a", "write", "{\"n\":25}"));
        assert_eq!(
            (calls[1].arguments.as_str(), calls[1].invalid.is_some()),
            ("{}", true)
        );
    }
    // A number cut short is still valid JSON, so the reason must decide.
    let short = Reply::text("")
        .and_call("a", "write", "{\"n\":2}")
        .finish("length");
    assert!(
        ask_once(short).await.unwrap().calls[0]
            .invalid
            .as_deref()
            .unwrap()
            .contains("output limit")
    );
    let events = [fragment(
        json!({"index": 0, "id": "a", "function": {"name": "write", "arguments": "{\"n\":2}"}}),
    )];
    assert!(is_retryable(&ask_once(Reply::events(events)).await));
}

#[tokio::test]
async fn missing_and_repeated_ids_are_made_distinct() {
    // H-24, X-9
    let reply = Reply::text("")
        .and_call("search:0", "t", "{}")
        .and_call("search:0", "t", "{}")
        .and_call("", "t", "{}")
        .and_call("", "t", "{}");
    let calls = ask_once(reply).await.unwrap().calls;
    assert_eq!(
        (calls[0].id.as_str(), calls[1].id.as_str()),
        ("search:0", "search:0_2")
    );
    assert!(
        calls[2].id.starts_with("call_")
            && calls[3].id.starts_with("call_")
            && calls[2].id != calls[3].id
    );
}

#[tokio::test]
async fn an_empty_answer_is_told_from_a_failure() {
    // T-15
    assert_eq!(ask_once(Reply::text("")).await.unwrap().text, "");
    assert_eq!(ask_once(Reply::text("").plain()).await.unwrap().calls, []);
}

#[tokio::test]
async fn comments_and_pings_change_nothing() {
    // H-28
    let body = format!(
        ": hello\n\n: keep-alive\ndata:{}\n\n:\n\nevent: ping\ndata: {{}}\n\ndata:\n\ndata: \r\n\r\n: x\ndata: {}\n: y\n\nid: 3\ndata: {}\n\ndata: [DONE]\n\n",
        text("one "),
        text("two"),
        end("stop")
    );
    assert_eq!(
        ask_once(Reply::chunks([body])).await.unwrap().text,
        "one two"
    );
}

#[tokio::test]
async fn comments_keep_an_answer_alive_but_not_for_ever() {
    // H-28, T-14
    let stub = StubLlm::start().await;
    let pause = Duration::from_millis(100);
    let patient = Limits {
        idle_timeout: Duration::from_millis(400),
        ..LIMITS
    };
    let slow = |comments: usize| {
        let events = [text("late"), end("stop")].map(|event| format!("data: {event}\n\n"));
        let comments = std::iter::repeat_n(": wait\n\n".to_owned(), comments);
        Reply::chunks(comments.chain(events)).every(pause)
    };
    stub.replies([slow(8)]);
    let models = models_within(&stub, patient);
    assert_eq!(models.decide(&hello(), &|_| {}).await.unwrap().text, "late");

    stub.replies([slow(100)]);
    let hasty = Limits {
        timeout: Duration::from_millis(700),
        ..patient
    };
    let started = Instant::now();
    let error = models_within(&stub, hasty)
        .decide(&hello(), &|_| {})
        .await
        .unwrap_err();
    assert!(
        error.message.contains("not complete after 0.7 s"),
        "{error}"
    );
    assert_eq!(error.retry, Retry::After(None));
    assert!(started.elapsed() < Duration::from_secs(5));

    stub.replies([Reply::events([text("half")]).then_stall()]);
    let error = models.decide(&hello(), &|_| {}).await.unwrap_err();
    assert!(error.message.contains("sent nothing for 0.4 s"), "{error}");
    assert_eq!(error.retry, Retry::After(None));
}

#[tokio::test]
async fn characters_cut_by_the_network_arrive_whole() {
    // H-29
    let arguments = "{\"t\": \"€ 😀 é\"}";
    let reply = Reply::text("grün € 😀").and_call("a", "t", arguments);
    let decision = ask_once(reply.byte_by_byte()).await.unwrap();
    assert_eq!(decision.text, "grün € 😀");
    assert_eq!(decision.calls, [call("a", "t", arguments)]);

    let mut body = format!("data: {}\n\ndata: {}\n\n", text("a€b"), end("stop")).into_bytes();
    let at = body.iter().position(|byte| *byte == 0xe2).unwrap();
    body[at + 1] = b'?';
    let broken = ask_once(Reply::chunks([body])).await.unwrap();
    assert!(
        broken.text.starts_with("a\u{fffd}?") && broken.text.ends_with('b'),
        "{}",
        broken.text
    );
}

#[tokio::test]
async fn what_the_database_can_not_hold_is_marked() {
    // H-30
    let events = [
        r#"{"choices":[{"delta":{"content":"nul\u0000 lone\ud800."}}]}"#.to_owned(),
        fragment(json!({"index": 0, "id": "a\0", "function": {"name": "t", "arguments": r#"{"k\u0000":"\ud800","n":"x"}"#}})).to_string(),
        end("tool_calls").to_string(),
    ];
    let decision = ask_once(Reply::events(events)).await.unwrap();
    assert_eq!(decision.text, "nul␀ lone\u{fffd}.");
    assert_eq!(
        decision.calls,
        [call("a␀", "t", "{\"k␀\":\"\u{fffd}\",\"n\":\"x\"}")]
    );
}

#[tokio::test]
async fn exact_digits_arrive() {
    // H-31
    let exact = r#"{"id": 9007199254740993, "u":18446744073709551615,"big":12345678901234567890123,"d":1.10,"e":1e400}"#;
    for reply in [
        Reply::text("").and_call("a", "t", exact),
        Reply::text("").and_call("a", "t", exact).plain(),
    ] {
        assert_eq!(
            ask_once(reply).await.unwrap().calls,
            [call("a", "t", exact)]
        );
    }
    let raw = format!(
        r#"{{"choices":[{{"message":{{"tool_calls":[{{"id":"a","function":{{"name":"t","arguments":{exact}}}}}]}},"finish_reason":"tool_calls"}}]}}"#
    );
    assert_eq!(
        ask_once(Reply::status(200, &raw)).await.unwrap().calls,
        [call("a", "t", exact)]
    );
}

#[tokio::test]
async fn a_dropped_call_is_aborted_at_the_provider() {
    // T-30
    let stub = StubLlm::start().await;
    let gate = Gate::new();
    stub.replies([Reply::text("late").held_by(&gate)]);
    let models = models(settings(&stub));
    let asked = tokio::spawn(async move { models.decide(&hello(), &|_| {}).await });
    stub.wait_for_requests(1).await;
    asked.abort();
    stub.wait_until_idle().await;
    assert_eq!(stub.aborted(), 1);
}

#[tokio::test]
async fn the_strict_stub_refuses_what_providers_refuse() {
    // H-20
    let assistant = || Message::Assistant {
        text: String::new(),
        calls: vec![call("a", "t", "{}"), call("b", "t", "{}")],
    };
    let result = |id: &str| Message::ToolResult {
        call_id: id.into(),
        name: "t".into(),
        text: "r".into(),
        is_error: false,
    };
    let user = || Message::User("u".into());
    for (messages, accepted) in [
        (vec![user(), assistant(), result("a"), result("b")], true),
        (
            vec![
                user(),
                assistant(),
                result("a"),
                result("b"),
                user(),
                user(),
            ],
            true,
        ),
        (vec![user(), assistant(), result("b"), result("a")], false),
        (vec![user(), assistant(), result("a")], false),
        (
            vec![user(), assistant(), result("a"), user(), result("b")],
            false,
        ),
        (vec![user(), result("a")], false),
        (
            vec![user(), assistant(), result("a"), result("b"), result("b")],
            false,
        ),
        (
            vec![
                user(),
                Message::Assistant {
                    text: String::new(),
                    calls: vec![call("a", "t", "[]")],
                },
                result("a"),
            ],
            false,
        ),
    ] {
        let stub = StubLlm::start().await;
        let models = models(settings(&stub));
        let answer = models.decide(&request(messages.clone()), &|_| {}).await;
        assert_eq!(answer.is_ok(), accepted, "{messages:?}");
        assert_eq!(stub.refusals().is_empty(), accepted);
    }
    let stub = StubLlm::start().await;
    stub.limit_bytes(100);
    let error = ask(&stub).await.unwrap_err();
    assert_eq!((error.status, error.retry), (Some(400), Retry::Never));
}

#[tokio::test]
async fn an_agent_is_told_when_its_provider_is_not_there() {
    // L-10
    let stub = StubLlm::start().await;
    let models = models(settings(&stub));
    let asking = |provider: ProviderKind| Request {
        model: ModelSettings {
            provider: Some(provider.as_str().to_owned()),
            ..ModelSettings::default()
        },
        ..hello()
    };
    let error = models
        .decide(&asking(ProviderKind::Gemini), &|_| {})
        .await
        .unwrap_err();
    assert_eq!(error.retry, Retry::Never);
    assert!(
        error.message.contains("`gemini`") && error.message.contains("`openai`"),
        "{error}"
    );
    let offline = models
        .decide(&asking(ProviderKind::Offline), &|_| {})
        .await
        .unwrap();
    assert!(offline.text.contains("offline demo model"));
    assert_eq!(models.name_for(&ModelSettings::default()), "stub-1");
    assert_eq!(
        models.name_for(&asking(ProviderKind::Offline).model),
        "offline-demo"
    );
    assert_eq!(stub.requests().len(), 0);
}

#[test]
fn settings_that_can_not_work_name_themselves() {
    // P-20
    let whole = ProviderSettings {
        provider: ProviderKind::OpenAi,
        base_url: None,
        api_key: Some(KEY.into()),
        model: Some("m".into()),
    };
    let new = |settings: &ProviderSettings| {
        Models::new(ProviderKind::OpenAi, std::slice::from_ref(settings), LIMITS)
    };
    for (settings, setting) in [
        (
            ProviderSettings {
                api_key: None,
                ..whole.clone()
            },
            "llm.api_key",
        ),
        (
            ProviderSettings {
                api_key: Some(" ".into()),
                ..whole.clone()
            },
            "llm.api_key",
        ),
        (
            ProviderSettings {
                api_key: Some("a\nb".into()),
                ..whole.clone()
            },
            "llm.api_key",
        ),
        (
            ProviderSettings {
                model: Some(String::new()),
                ..whole.clone()
            },
            "llm.model",
        ),
        (
            ProviderSettings {
                base_url: Some("h/v1".into()),
                ..whole.clone()
            },
            "llm.base_url",
        ),
    ] {
        assert_eq!(new(&settings).err().unwrap().setting, setting);
    }
    assert!(new(&whole).is_ok());
}
