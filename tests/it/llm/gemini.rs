//! Gemini's form: what is asked, and what its chunks and reasons mean.

use super::providers::{ask_of, settings_of};
use super::*;

const GEMINI: ProviderKind = ProviderKind::Gemini;

async fn ask_gemini(reply: Reply) -> Result<Decision, ModelError> {
    ask_of(GEMINI, reply).await
}

fn parts(parts: Value) -> Value {
    json!({"candidates": [{"content": {"parts": parts, "role": "model"}, "index": 0}]})
}

fn finish(reason: &str) -> Value {
    json!({"candidates": [{"content": {"parts": [{"text": ""}]}, "finishReason": reason}]})
}

#[tokio::test]
async fn the_request_has_the_form_and_the_history_exactly() {
    // H-31, A-32, H-23
    let exact = r#"{"id": 9007199254740993,"d":1.10,"e":1e400}"#;
    let result = |id: &str, text: &str, is_error| Message::ToolResult {
        call_id: id.into(),
        name: if id == "a" { "send" } else { "2 send" }.into(),
        text: text.into(),
        is_error,
    };
    let stub = StubLlm::start().await;
    let mut request = request(vec![
        Message::User("hello".into()),
        Message::User("there".into()),
        Message::Assistant {
            text: "I send.".into(),
            calls: vec![call("a", "send", exact), call("b", "2 send", "{}")],
        },
        result("a", "sent", false),
        result("b", "no such tool", true),
        Message::User("meanwhile".into()),
        Message::Assistant {
            text: "Done.".into(),
            calls: vec![],
        },
        Message::User("thanks".into()),
    ]);
    request.tools = vec![ToolSpec {
        name: "send".into(),
        description: "Sends.".into(),
        parameters: json!({"type": "object", "additionalProperties": false}),
    }]
    .into();
    request.model.temperature = Some(0.5);
    request.model.max_output_tokens = Some(99);
    request.model.reasoning = Some(Reasoning::High);
    let models = models(settings_of(GEMINI, &stub));
    for _ in 0..2 {
        models.decide(&request, &|_| {}).await.unwrap();
    }
    let seen = stub.requests();
    assert_eq!(stub.refusals(), Vec::<String>::new());
    assert_eq!(
        seen[0].raw, seen[1].raw,
        "equal histories are equal byte for byte"
    );
    assert_eq!(seen[0].headers["x-goog-api-key"], KEY);
    assert_eq!(seen[0].headers.get("authorization"), None);
    assert!(!seen[0].uri.contains(KEY));
    let raw = String::from_utf8(seen[0].raw.to_vec()).unwrap();
    assert!(raw.contains(exact), "{raw}");
    let exact: Value = serde_json::from_str(exact).unwrap();
    let response = |id: &str, name: &str, response: Value| json!({"functionResponse": {"id": id, "name": name, "response": response}});
    assert_eq!(
        seen[0].body,
        json!({
            "systemInstruction": {"parts": [{"text": "You are a test."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "hello"}, {"text": "there"}]},
                {"role": "model", "parts": [
                    {"text": "I send."},
                    // Another model's call: nothing signs it.
                    {"functionCall": {"id": "a", "name": "send", "args": exact},
                     "thoughtSignature": "skip_thought_signature_validator"},
                    {"functionCall": {"id": "b", "name": "_2_send", "args": {}}},
                ]},
                {"role": "user", "parts": [
                    response("a", "send", json!({"output": "sent"})),
                    response("b", "_2_send", json!({"error": "no such tool"})),
                ]},
                {"role": "user", "parts": [{"text": "meanwhile"}]},
                {"role": "model", "parts": [{"text": "Done."}]},
                {"role": "user", "parts": [{"text": "thanks"}]},
            ],
            "tools": [{"functionDeclarations": [{
                "name": "send", "description": "Sends.",
                "parametersJsonSchema": {"type": "object", "additionalProperties": false},
            }]}],
            "generationConfig": {
                "temperature": 0.5, "maxOutputTokens": 99, "thinkingConfig": {"thinkingLevel": "high"},
            },
        })
    );
}

#[tokio::test]
async fn a_call_comes_back_with_its_signature() {
    // L-10: newer models refuse a conversation without.
    let stub = StubLlm::start().await;
    let models = models(settings_of(GEMINI, &stub));
    stub.replies([
        Reply::text("")
            .and_call("a", "send", "{}")
            .and_call("b", "send", "{}"),
        Reply::text("done"),
    ]);
    let mut request = hello();
    let decision = models.decide(&request, &|_| {}).await.unwrap();
    // What the history keeps of it.
    let stored = serde_json::to_value(&decision.calls).unwrap();
    let calls: Vec<ToolCall> = serde_json::from_value(stored).unwrap();
    let result = |id: &str| Message::ToolResult {
        call_id: id.into(),
        name: "send".into(),
        text: "sent".into(),
        is_error: false,
    };
    request.messages.extend([
        Message::Assistant {
            text: decision.text,
            calls,
        },
        result("a"),
        result("b"),
    ]);
    for (model, signature) in [
        ("gemini-3-flash", json!("signature-of-send")),
        ("gemini-4-pro", json!("skip_thought_signature_validator")),
        ("gemini-2.5-flash", Value::Null),
    ] {
        request.model.name = Some(model.into());
        models.decide(&request, &|_| {}).await.unwrap();
        let body = stub.requests().pop().unwrap().body;
        let parts = &body["contents"][1]["parts"];
        assert_eq!(parts[0]["thoughtSignature"], signature, "{model}");
        assert_eq!(parts[1].get("thoughtSignature"), None);
    }
    assert_eq!(stub.refusals(), Vec::<String>::new());
}

#[tokio::test]
async fn reasons_to_stop_are_told_apart() {
    // T-14, T-15
    let half = parts(json!([{"text": "half"}]));
    for (reason, retry) in [
        ("SAFETY", Retry::Never),
        ("RECITATION", Retry::Never),
        ("PROHIBITED_CONTENT", Retry::Never),
        ("MALFORMED_FUNCTION_CALL", Retry::After(None)),
        ("UNEXPECTED_TOOL_CALL", Retry::After(None)),
        ("OTHER", Retry::After(None)),
        ("A_NEW_ONE", Retry::After(None)),
    ] {
        let error = ask_gemini(Reply::events([half.clone(), finish(reason)]))
            .await
            .unwrap_err();
        assert_eq!((error.retry, error.status), (retry, None), "{reason}");
        assert!(error.message.contains(reason), "{error}");
    }
    let said = json!({"candidates": [{"finishReason": "MALFORMED_FUNCTION_CALL", "finishMessage": "send(x"}]});
    let error = ask_gemini(Reply::events([said])).await.unwrap_err();
    assert!(error.message.ends_with("send(x"), "{error}");
    let blocked = json!({"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 4}});
    for reply in [Reply::events([blocked.clone()]), Reply::json(&blocked)] {
        let error = ask_gemini(reply).await.unwrap_err();
        assert_eq!(error.retry, Retry::Never);
        assert!(
            error.message.contains("refused the conversation (SAFETY)"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn unknown_parts_and_thoughts_are_no_part_of_the_answer() {
    // H-28
    let events = [
        json!({"newField": {"x": 1}, "usageMetadata": {"promptTokenCount": 9, "candidatesTokenCount": 1}}),
        parts(json!([{"text": "I wonder.", "thought": true}, {"executableCode": {"code": "1"}}])),
        json!({"candidates": [{"index": 1, "content": {"parts": [{"text": "second"}]}}]}),
        parts(json!([{"text": "whole"}, {"inlineData": {}}])),
        json!({"candidates": [{"finishReason": "STOP"}], "usageMetadata": {
            "promptTokenCount": 10, "toolUsePromptTokenCount": 2, "candidatesTokenCount": 5, "thoughtsTokenCount": 7,
            "cachedContentTokenCount": 6, "totalTokenCount": 24,
        }}),
    ];
    let decision = ask_gemini(Reply::events(events)).await.unwrap();
    let usage = Usage {
        input_tokens: 12,
        output_tokens: 12,
        cached_tokens: 6,
    };
    assert_eq!((decision.text.as_str(), decision.usage), ("whole", usage));
    // Where the wish for events was lost on the way.
    let list = json!([
        parts(json!([{"text": "who"}])),
        parts(json!([{"text": "le"}])),
        finish("STOP")
    ]);
    assert_eq!(ask_gemini(Reply::json(&list)).await.unwrap().text, "whole");
    // The reason has come: what breaks afterwards can not take the answer back.
    let broken = Reply::events([parts(json!([{"text": "whole"}])), finish("STOP")]).then_hang_up();
    assert_eq!(ask_gemini(broken).await.unwrap().text, "whole");
}

#[tokio::test]
async fn an_error_after_the_first_words_is_an_error() {
    // H-27
    for (status, code, retry) in [
        ("UNAVAILABLE", 503, Retry::After(None)),
        ("INTERNAL", 500, Retry::After(None)),
        ("INVALID_ARGUMENT", 400, Retry::Never),
    ] {
        let error = json!({"error": {"code": code, "message": "as it is", "status": status}});
        let events = [parts(json!([{"text": "half"}])), error, finish("STOP")];
        let error = ask_gemini(Reply::events(events)).await.unwrap_err();
        assert_eq!((error.status, error.retry), (Some(code), retry));
        assert!(error.message.ends_with(": as it is"), "{error}");
    }
}

#[tokio::test]
async fn what_the_database_can_not_hold_is_marked_here_too() {
    // H-30
    let chunk = r#"{"candidates":[{"content":{"parts":[{"text":"nul\u0000 lone\ud800."},{"functionCall":{"id":"a","name":"t","args":{"k\u0000":"\ud800"}}}]},"finishReason":"STOP"}]}"#;
    let decision = ask_gemini(Reply::events([chunk])).await.unwrap();
    assert_eq!(decision.text, "nul␀ lone\u{fffd}.");
    assert_eq!(decision.calls, [call("a", "t", "{\"k␀\":\"\u{fffd}\"}")]);
}

// T-16, L-10: who can be held to a schema is; the others have it in their prompt.
#[tokio::test]
async fn a_schema_of_the_answer_is_sent_to_models_that_know_such() {
    let stub = StubLlm::start().await;
    let models = models(settings_of(GEMINI, &stub));
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    for (model, with_tools, is_sent) in [
        ("gemini-3-flash", false, true),
        ("gemini-3-flash", true, true),
        ("gemini-2.5-flash", false, true),
        ("gemini-2.5-flash", true, false),
        ("gemini-2.0-flash", false, false),
        ("gemma-3-27b-it", false, false),
    ] {
        let mut request = hello();
        request.model.name = Some(model.into());
        request.output_schema = Some(schema.clone().into());
        let tool = ToolSpec {
            name: "send".into(),
            description: "Sends.".into(),
            parameters: json!({"type": "object"}),
        };
        request.tools = with_tools.then_some(tool).into_iter().collect();
        models.decide(&request, &|_| {}).await.unwrap();
        let config = stub.requests().pop().unwrap().body["generationConfig"].clone();
        let expected = match is_sent {
            true => json!({"responseMimeType": "application/json", "responseJsonSchema": schema}),
            false => json!({}),
        };
        assert_eq!(config, expected, "{model} {with_tools}");
    }
}
