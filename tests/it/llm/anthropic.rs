//! Anthropic's form: what is asked, and what its events and reasons mean.

use super::providers::{ask_of, settings_of};
use super::*;

const ANTHROPIC: ProviderKind = ProviderKind::Anthropic;

async fn ask_anthropic(reply: Reply) -> Result<Decision, ModelError> {
    ask_of(ANTHROPIC, reply).await
}

fn result(id: &str, text: &str, is_error: bool) -> Message {
    Message::ToolResult {
        call_id: id.into(),
        name: "send".into(),
        text: text.into(),
        is_error,
    }
}

fn event(kind: &str, mut data: Value) -> String {
    data["type"] = kind.into();
    format!("event: {kind}\ndata: {data}\n\n")
}

fn text_events(text: &str) -> [String; 3] {
    [
        event(
            "message_start",
            json!({"message": {"usage": {"input_tokens": 3, "output_tokens": 1}}}),
        ),
        event(
            "content_block_start",
            json!({"index": 0, "content_block": {"type": "text", "text": ""}}),
        ),
        event(
            "content_block_delta",
            json!({"index": 0, "delta": {"type": "text_delta", "text": text}}),
        ),
    ]
}

fn stop(reason: &str) -> [String; 2] {
    [
        event(
            "message_delta",
            json!({"delta": {"stop_reason": reason}, "usage": {"output_tokens": 5}}),
        ),
        event("message_stop", json!({})),
    ]
}

#[tokio::test]
async fn the_request_has_the_form_and_the_history_exactly() {
    // H-31, A-32, H-23, H-24
    let exact = r#"{"id": 9007199254740993,"d":1.10,"e":1e400}"#;
    let stub = StubLlm::start().await;
    let calls = || {
        vec![
            call("search:0", "send", exact),
            call("b", "no such tool", "{}"),
        ]
    };
    let turn = || {
        [
            Message::Assistant {
                text: "I send.".into(),
                calls: calls(),
            },
            result("search:0", "sent", false),
            result("b", " ", true),
        ]
    };
    let mut messages = vec![Message::User("hello".into()), Message::User("there".into())];
    messages.extend(turn());
    messages.push(Message::User("meanwhile".into()));
    messages.extend(turn());
    messages.push(Message::Assistant {
        text: "Done.".into(),
        calls: vec![],
    });
    messages.push(Message::User("thanks".into()));
    let mut request = request(messages);
    request.tools = vec![ToolSpec {
        name: "send".into(),
        description: "Sends.".into(),
        parameters: json!({"type": "object"}),
    }]
    .into();
    request.model.max_output_tokens = Some(99);
    let models = models(ProviderSettings {
        base_url: Some(format!("{}/v1/", stub.root())),
        ..settings_of(ANTHROPIC, &stub)
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
    assert_eq!(seen[0].uri, "/v1/messages");
    assert_eq!(seen[0].headers["x-api-key"], KEY);
    assert_eq!(seen[0].headers["anthropic-version"], "2023-06-01");
    assert_eq!(seen[0].headers.get("authorization"), None);
    let raw = String::from_utf8(seen[0].raw.to_vec()).unwrap();
    assert_eq!(raw.matches(exact).count(), 2, "{raw}");
    let exact: Value = serde_json::from_str(exact).unwrap();
    let turn = |first: &str, second: &str| {
        json!({"role": "assistant", "content": [
            {"type": "text", "text": "I send."},
            {"type": "tool_use", "id": first, "name": "send", "input": exact},
            {"type": "tool_use", "id": second, "name": "no_such_tool", "input": {}},
        ]})
    };
    let sent = |id: &str| json!({"type": "tool_result", "tool_use_id": id, "content": "sent"});
    let failed = |id: &str| json!({"type": "tool_result", "tool_use_id": id, "is_error": true});
    let cached = json!({"type": "ephemeral"});
    assert_eq!(
        seen[0].body,
        json!({
            "model": "claude-sonnet-5",
            "max_tokens": 99,
            "stream": true,
            "system": [{"type": "text", "text": "You are a test.", "cache_control": cached}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]},
                turn("search_0", "b"),
                {"role": "user", "content": [sent("search_0"), failed("b"), {"type": "text", "text": "meanwhile"}]},
                turn("search_0_2", "b_2"),
                {"role": "user", "content": [sent("search_0_2"), failed("b_2")]},
                {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
                {"role": "user", "content": [{"type": "text", "text": "thanks", "cache_control": cached}]},
            ],
            "tools": [{"name": "send", "description": "Sends.", "input_schema": {"type": "object"}}],
        })
    );
}

#[tokio::test]
async fn each_model_is_told_to_think_in_its_own_way() {
    // L-10
    let stub = StubLlm::start().await;
    let models = models(settings_of(ANTHROPIC, &stub));
    let adaptive = json!({"type": "adaptive"});
    let budget = |tokens: u32| json!({"type": "enabled", "budget_tokens": tokens});
    let effort = |effort: &str| json!({"effort": effort});
    let none = Value::Null;
    for (model, reasoning, limit, thinking, output_config) in [
        ("claude-sonnet-5-5", None, None, &none, &none),
        (
            "claude-sonnet-5-5",
            Some(Reasoning::High),
            None,
            &adaptive,
            &effort("high"),
        ),
        (
            "claude-opus-4-6",
            Some(Reasoning::Low),
            None,
            &adaptive,
            &effort("low"),
        ),
        (
            "claude-opus-latest",
            Some(Reasoning::Medium),
            None,
            &adaptive,
            &effort("medium"),
        ),
        // Who thinks by itself is told to do little, others are told nothing.
        (
            "claude-opus-5",
            Some(Reasoning::Disabled),
            None,
            &none,
            &effort("low"),
        ),
        (
            "claude-opus-4-7",
            Some(Reasoning::Disabled),
            None,
            &none,
            &none,
        ),
        (
            "claude-haiku-4-5-20251001",
            Some(Reasoning::Disabled),
            None,
            &none,
            &none,
        ),
        (
            "claude-haiku-4-5-20251001",
            Some(Reasoning::Medium),
            None,
            &budget(8192),
            &none,
        ),
        (
            "claude-opus-4-20250514",
            Some(Reasoning::Low),
            None,
            &budget(2048),
            &none,
        ),
        (
            "claude-3-7-sonnet-20250219",
            Some(Reasoning::High),
            Some(4096),
            &budget(2048),
            &none,
        ),
        // No room for a budget and an answer.
        (
            "claude-3-7-sonnet-20250219",
            Some(Reasoning::High),
            Some(2000),
            &none,
            &none,
        ),
        (
            "some-model",
            Some(Reasoning::High),
            None,
            &budget(16_000),
            &none,
        ),
    ] {
        let request = Request {
            model: ModelSettings {
                name: Some(model.into()),
                reasoning,
                max_output_tokens: limit,
                ..ModelSettings::default()
            },
            ..hello()
        };
        models.decide(&request, &|_| {}).await.unwrap();
        let body = stub.requests().pop().unwrap().body;
        assert_eq!(
            (&body["thinking"], &body["output_config"]),
            (thinking, output_config),
            "{model} {reasoning:?}"
        );
        assert_eq!(body["max_tokens"], limit.unwrap_or(32_000));
    }
    // Newer models refuse a temperature; this form's range ends at 1.
    for (model, reasoning, temperature) in [
        ("claude-haiku-4-5", None, json!(1.0)),
        ("claude-haiku-4-5", Some(Reasoning::High), none.clone()),
        ("claude-opus-4-7", None, none.clone()),
        ("claude-sonnet-5", None, none.clone()),
        ("some-model", None, json!(1.0)),
    ] {
        let request = Request {
            model: ModelSettings {
                name: Some(model.into()),
                reasoning,
                temperature: Some(1.5),
                ..ModelSettings::default()
            },
            ..hello()
        };
        models.decide(&request, &|_| {}).await.unwrap();
        let body = stub.requests().pop().unwrap().body;
        assert_eq!(body["temperature"], temperature, "{model} {reasoning:?}");
    }
    assert_eq!(stub.refusals(), Vec::<String>::new());
}

// T-16, L-10: who can be held to a schema is; the others have it in their prompt.
#[tokio::test]
async fn a_schema_of_the_answer_is_sent_to_models_that_know_such() {
    let stub = StubLlm::start().await;
    let models = models(settings_of(ANTHROPIC, &stub));
    let closed = json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "schema": closed});
    for (model, reasoning, schema, expected) in [
        (
            "claude-sonnet-4-5-20250929",
            None,
            &closed,
            json!({"format": format}),
        ),
        (
            "claude-opus-4-7",
            Some(Reasoning::High),
            &closed,
            json!({"effort": "high", "format": format}),
        ),
        (
            "claude-haiku-latest",
            None,
            &closed,
            json!({"format": format}),
        ),
        (
            "claude-sonnet-4-5",
            None,
            &json!({"type": "object"}),
            Value::Null,
        ),
        ("claude-opus-4-1", None, &closed, Value::Null),
        ("claude-fable-5", None, &closed, Value::Null),
        ("some-sonnet", None, &closed, Value::Null),
    ] {
        let mut request = hello();
        request.model.name = Some(model.into());
        request.model.reasoning = reasoning;
        request.output_schema = Some(schema.clone().into());
        models.decide(&request, &|_| {}).await.unwrap();
        let body = stub.requests().pop().unwrap().body;
        assert_eq!(body["output_config"], expected, "{model}");
    }
}

#[tokio::test]
async fn thoughts_before_a_call_come_back_with_it() {
    // L-10: with thoughts, the provider wants the turn back as it was.
    let stub = StubLlm::start().await;
    let models = models(settings_of(ANTHROPIC, &stub));
    let block = |index: usize, start: Value, deltas: &[Value]| {
        let start = event(
            "content_block_start",
            json!({"index": index, "content_block": start}),
        );
        let deltas = deltas.iter().map(|delta| {
            event(
                "content_block_delta",
                json!({"index": index, "delta": delta}),
            )
        });
        start + &deltas.collect::<String>()
    };
    let thinking = json!({"type": "thinking", "thinking": "", "signature": ""});
    let signature = json!({"type": "signature_delta", "signature": "thoughts-before-send"});
    let stream = [
        block(0, json!({"type": "text", "text": "Wéll: "}), &[]),
        block(
            1,
            thinking,
            &[
                json!({"type": "thinking_delta", "thinking": "Hm."}),
                signature,
            ],
        ),
        block(
            2,
            json!({"type": "redacted_thinking", "data": "opaque"}),
            &[],
        ),
        block(
            3,
            json!({"type": "text", "text": ""}),
            &[json!({"type": "text_delta", "text": "I send."})],
        ),
        block(
            4,
            json!({"type": "tool_use", "id": "a", "name": "send", "input": {}}),
            &[],
        ),
        block(
            5,
            json!({"type": "tool_use", "id": "b", "name": "send", "input": {}}),
            &[],
        ),
        stop("tool_use").concat(),
    ];
    stub.replies([Reply::chunks(stream), Reply::text("done")]);
    let mut request = hello();
    request.model.name = Some("claude-haiku-4-5".into());
    request.model.reasoning = Some(Reasoning::High);
    let decision = models.decide(&request, &|_| {}).await.unwrap();
    assert_eq!(decision.text, "Wéll: I send.");
    // What the history keeps of it.
    let stored = serde_json::to_value(&decision.calls).unwrap();
    let calls: Vec<ToolCall> = serde_json::from_value(stored).unwrap();
    request.messages.extend([
        Message::Assistant {
            text: decision.text,
            calls,
        },
        result("a", "sent", false),
        result("b", "sent", false),
    ]);
    // The same model gets them back; another one, which could not read them, does not, nor does it begin to think in the
    // middle of a turn that has no thoughts.
    for (model, thinks) in [("claude-haiku-4-5", true), ("claude-haiku-4-4", false)] {
        request.model.name = Some(model.into());
        models.decide(&request, &|_| {}).await.unwrap();
        let body = stub.requests().pop().unwrap().body;
        let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "send", "input": {}});
        let expected = if thinks {
            json!([
                {"type": "text", "text": "Wéll: "},
                {"type": "thinking", "thinking": "Hm.", "signature": "thoughts-before-send"},
                {"type": "redacted_thinking", "data": "opaque"},
                {"type": "text", "text": "I send."},
                call("a"),
                call("b"),
            ])
        } else {
            json!([{"type": "text", "text": "Wéll: I send."}, call("a"), call("b")])
        };
        assert_eq!(body["messages"][1]["content"], expected, "{model}");
    }
    assert_eq!(stub.requests().last().unwrap().body.get("thinking"), None);
}

#[tokio::test]
async fn reasons_to_stop_are_told_apart() {
    // T-14, T-15, H-27
    for reason in ["end_turn", "stop_sequence", "tool_use", "a_new_one"] {
        let stream = text_events("whole").into_iter().chain(stop(reason));
        let decision = ask_anthropic(Reply::chunks(stream)).await.unwrap();
        assert_eq!(decision.text, "whole", "{reason}");
    }
    for (reason, retry) in [
        ("refusal", Retry::Never),
        ("pause_turn", Retry::After(None)),
    ] {
        let stream = text_events("half").into_iter().chain(stop(reason));
        let error = ask_anthropic(Reply::chunks(stream)).await.unwrap_err();
        assert_eq!((error.retry, error.status), (retry, None));
        assert!(error.message.contains(reason), "{error}");
    }
    let why = event(
        "message_delta",
        json!({"delta": {"stop_reason": "refusal", "stop_details": {"type": "refusal", "explanation": "Not this."}}}),
    );
    let error = ask_anthropic(Reply::chunks([why])).await.unwrap_err();
    assert!(error.message.ends_with("Not this."), "{error}");
}

#[tokio::test]
async fn unknown_kinds_are_passed_over_and_errors_are_not() {
    // H-27, H-28
    let [start, block, delta] = text_events("whole");
    let unknown = [
        event("ping", json!({})),
        event(
            "news_of_tomorrow",
            json!({"index": 0, "delta": {"type": "text_delta", "text": "no"}}),
        ),
        event(
            "content_block_delta",
            json!({"index": 0, "delta": {"type": "citations_delta", "citation": {}}}),
        ),
        event(
            "content_block_start",
            json!({"index": 1, "content_block": {"type": "server_tool_use", "id": "s", "name": "n", "input": {}}}),
        ),
        event(
            "content_block_delta",
            json!({"index": 1, "delta": {"type": "input_json_delta", "partial_json": "{"}}),
        ),
        event("content_block_stop", json!({"index": 1})),
    ];
    let stream = [start.clone(), block.clone()]
        .into_iter()
        .chain(unknown)
        .chain([delta.clone()])
        .chain(stop("end_turn"));
    let decision = ask_anthropic(Reply::chunks(stream)).await.unwrap();
    assert_eq!((decision.text.as_str(), decision.calls.len()), ("whole", 0));

    for (kind, status, retry) in [
        ("overloaded_error", Some(529), Retry::After(None)),
        ("rate_limit_error", Some(429), Retry::After(None)),
        ("api_error", Some(500), Retry::After(None)),
        ("timeout_error", Some(504), Retry::After(None)),
        ("invalid_request_error", Some(400), Retry::Never),
        ("authentication_error", Some(401), Retry::Never),
        ("billing_error", Some(402), Retry::Never),
        ("request_too_large", Some(413), Retry::Never),
    ] {
        let error = event(
            "error",
            json!({"error": {"type": kind, "message": "as it is"}}),
        );
        let stream = [start.clone(), block.clone(), delta.clone(), error];
        let error = ask_anthropic(Reply::chunks(stream)).await.unwrap_err();
        assert_eq!((error.status, error.retry), (status, retry), "{kind}");
        assert!(error.message.ends_with(": as it is"), "{error}");
    }
    // The reason has come: what breaks afterwards can not take the answer back.
    let [delta_event, _] = stop("end_turn");
    let stream = [start, block, delta, delta_event];
    let decision = ask_anthropic(Reply::chunks(stream).then_hang_up()).await;
    assert_eq!(decision.unwrap().text, "whole");
}

#[tokio::test]
async fn what_went_into_the_cache_is_input_too() {
    // T-17
    let start = json!({"message": {"usage": {
        "input_tokens": 10, "cache_creation_input_tokens": 200, "cache_read_input_tokens": 3000, "output_tokens": 1,
    }}});
    let stream = [
        event("message_start", start),
        event(
            "message_delta",
            json!({"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 44, "input_tokens": 0}}),
        ),
        event("message_stop", json!({})),
    ];
    let usage = ask_anthropic(Reply::chunks(stream)).await.unwrap().usage;
    let expected = Usage {
        input_tokens: 3210,
        output_tokens: 44,
        cached_tokens: 3000,
    };
    assert_eq!(usage, expected);
}

#[tokio::test]
async fn what_the_database_can_not_hold_is_marked_here_too() {
    // H-30, H-22
    let [start, block, _] = text_events("");
    let stream = [
        start,
        block,
        "data: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"text\":\"nul\\u0000 lone\\ud800.\"}}\n\n".to_owned(),
        event("content_block_start", json!({"index": 1, "content_block": {"type": "tool_use", "id": "a", "name": "t", "input": {}}})),
        event("content_block_delta", json!({"index": 1, "delta": {"partial_json": r#"{"k\u0000":"\ud800"}"#}})),
        event("content_block_start", json!({"index": 2, "content_block": {"type": "tool_use", "id": "b", "name": "t", "input": {}}})),
        event("content_block_delta", json!({"index": 2, "delta": {"partial_json": r#"{"text":"half a sen"#}})),
    ];
    let stream = stream.into_iter().chain(stop("tool_use"));
    let decision = ask_anthropic(Reply::chunks(stream)).await.unwrap();
    assert_eq!(decision.text, "nul␀ lone\u{fffd}.");
    assert_eq!(decision.calls[0], call("a", "t", "{\"k␀\":\"\u{fffd}\"}"));
    assert_eq!(decision.calls[1].arguments, "{}");
    assert!(decision.calls[1].invalid.is_some());
}
