//! Anthropic's form of the stub: what a request says, what the real one refuses, what an answer looks like.

use super::{Recorded, Said, halves};
use axum::body::Bytes;
use serde_json::{Value, json};
use std::collections::HashSet;

pub fn error(kind: &str, message: &str) -> Value {
    json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_stub"})
}

fn blocks(message: &Value) -> &[Value] {
    message["content"].as_array().map_or(&[], Vec::as_slice)
}

/// In OpenAI's form. Neighbouring texts of a user are messages of their own again.
pub fn messages(body: &Value) -> Vec<Value> {
    let mut messages = Vec::new();
    for block in body["system"].as_array().into_iter().flatten() {
        messages.push(json!({"role": "system", "content": block["text"]}));
    }
    for message in body["messages"].as_array().into_iter().flatten() {
        let (mut text, mut calls) = (String::new(), Vec::new());
        for block in blocks(message) {
            match block["type"].as_str().unwrap_or_default() {
                "text" if message["role"] == "assistant" => {
                    text.push_str(block["text"].as_str().unwrap_or_default());
                }
                "text" => messages.push(json!({"role": "user", "content": block["text"]})),
                "tool_result" => messages.push(json!({
                    "role": "tool",
                    "tool_call_id": block["tool_use_id"],
                    "content": block["content"].as_str().unwrap_or_default(),
                })),
                "tool_use" => calls.push(json!({
                    "id": block["id"],
                    "function": {"name": block["name"], "arguments": block["input"].to_string()},
                })),
                _ => {}
            }
        }
        if message["role"] == "assistant" {
            messages.push(json!({"role": "assistant", "content": text, "tool_calls": calls}));
        }
    }
    messages
}

/// The signature of the thoughts before a call.
pub fn signature(name: &str) -> String {
    format!("thoughts-before-{name}")
}

pub fn check(request: &Recorded) -> Result<(), String> {
    let body = &request.body;
    if request.headers.get("anthropic-version").is_none() {
        return Err("anthropic-version: header is required".to_owned());
    }
    if body["model"].as_str().is_none_or(str::is_empty) {
        return Err("model: Field required".to_owned());
    }
    let max_tokens = body["max_tokens"].as_u64().unwrap_or(0);
    if max_tokens == 0 {
        return Err("max_tokens: Field required".to_owned());
    }
    let is_budgeted = body["thinking"]["type"] == "enabled";
    if is_budgeted {
        let budget = body["thinking"]["budget_tokens"].as_u64().unwrap_or(0);
        if !(1024..max_tokens).contains(&budget) || body.get("temperature").is_some() {
            return Err("thinking: a budget of 1024 to max_tokens, without temperature".to_owned());
        }
    }
    for tool in body["tools"].as_array().into_iter().flatten() {
        if tool["input_schema"]["type"] != "object" {
            return Err(format!(
                "tools: input_schema of {} is no object",
                tool["name"]
            ));
        }
    }
    let messages = body["messages"].as_array().map_or(&[][..], Vec::as_slice);
    let mut ids = HashSet::new();
    for (at, message) in messages.iter().enumerate() {
        let wrong = |why: &str| Err(format!("messages.{at}: {why}"));
        let expected = if at % 2 == 0 { "user" } else { "assistant" };
        if message["role"] != expected {
            return wrong("roles must alternate between \"user\" and \"assistant\"");
        }
        if blocks(message).is_empty() {
            return wrong("content must not be empty");
        }
        let mut has_other = false;
        for block in blocks(message) {
            match block["type"].as_str().unwrap_or_default() {
                "text"
                    if block["text"]
                        .as_str()
                        .is_none_or(|text| text.trim().is_empty()) =>
                {
                    return wrong("text content blocks must contain non-whitespace text");
                }
                "tool_result" if has_other => {
                    return wrong("tool_result blocks must come first");
                }
                "tool_result" => continue,
                "tool_use" => {
                    let id = block["id"].as_str().unwrap_or_default();
                    let fits = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
                    if id.is_empty() || !id.chars().all(fits) {
                        return wrong("tool_use.id: should match pattern '^[a-zA-Z0-9_-]+$'");
                    }
                    if !ids.insert(id) {
                        return wrong("`tool_use` ids must be unique");
                    }
                }
                "thinking"
                    if !block["signature"]
                        .as_str()
                        .is_some_and(|text| text.starts_with("thoughts-before-")) =>
                {
                    return wrong("Invalid `signature` in `thinking` block");
                }
                _ => {}
            }
            has_other = true;
        }
        let is_last_turn = at + 2 == messages.len() && expected == "assistant";
        let has_calls = blocks(message)
            .iter()
            .any(|block| block["type"] == "tool_use");
        if is_budgeted && is_last_turn && has_calls && blocks(message)[0]["type"] != "thinking" {
            return wrong("Expected `thinking` or `redacted_thinking`, but found something else");
        }
    }
    Ok(())
}

pub fn body(request: &Recorded, said: &Said<'_>) -> (u16, &'static str, Vec<Bytes>) {
    let (input, output, cached) = said.usage;
    let usual = if said.calls.is_empty() {
        "end_turn"
    } else {
        "tool_use"
    };
    let stop = said.finish.unwrap_or(usual);
    let begun = json!({
        "input_tokens": input - cached, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
        "output_tokens": 1,
    });
    // Some think unasked.
    let model = request.body["model"].as_str().unwrap_or_default();
    let thinks = request.body["thinking"].is_object() || model.starts_with("claude-sonnet-5");
    let thoughts = thinks.then(|| {
        let before = said.calls.first().map_or("end", |(_, name, _)| name);
        ("I think.", signature(before))
    });
    let mut message = json!({
        "id": "msg_stub", "type": "message", "role": "assistant", "model": request.body["model"],
        "content": [], "stop_reason": null, "stop_sequence": null, "usage": begun,
    });
    if said.is_plain {
        let mut content = Vec::new();
        if let Some((thinking, signature)) = &thoughts {
            content.push(
                json!({"type": "thinking", "thinking": thinking, "signature": signature})
                    .to_string(),
            );
        }
        if !said.text.is_empty() {
            content.push(json!({"type": "text", "text": said.text}).to_string());
        }
        for (id, name, arguments) in said.calls {
            let arguments = if arguments.is_empty() {
                "{}"
            } else {
                arguments
            };
            content.push(format!(
                r#"{{"type":"tool_use","id":{},"name":{},"input":{arguments}}}"#,
                json!(id),
                json!(name)
            ));
        }
        message["stop_reason"] = stop.into();
        message["usage"]["output_tokens"] = output.into();
        let body = message.to_string().replace(
            r#""content":[]"#,
            &format!(r#""content":[{}]"#, content.join(",")),
        );
        return (200, "application/json", vec![body.into()]);
    }
    let mut events = Events::default();
    events.add("message_start", json!({"message": message}));
    events.add("ping", json!({}));
    if let Some((thinking, signature)) = thoughts {
        events.block(
            json!({"type": "thinking", "thinking": "", "signature": ""}),
            [
                json!({"type": "thinking_delta", "thinking": thinking}),
                json!({"type": "signature_delta", "signature": signature}),
            ],
        );
    }
    if !said.text.is_empty() {
        let pieces = halves(said.text).map(|piece| json!({"type": "text_delta", "text": piece}));
        events.block(json!({"type": "text", "text": ""}), pieces);
    }
    for (id, name, arguments) in said.calls {
        let pieces = std::iter::once("").chain(halves(arguments));
        events.block(
            json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
            pieces.map(|piece| json!({"type": "input_json_delta", "partial_json": piece})),
        );
    }
    events.add(
        "message_delta",
        json!({
            "delta": {"stop_reason": stop, "stop_sequence": null}, "usage": {"output_tokens": output},
        }),
    );
    events.add("message_stop", json!({}));
    (200, "text/event-stream", events.chunks)
}

#[derive(Default)]
struct Events {
    chunks: Vec<Bytes>,
    index: usize,
}

impl Events {
    fn add(&mut self, kind: &str, mut data: Value) {
        data["type"] = kind.into();
        self.chunks
            .push(format!("event: {kind}\ndata: {data}\n\n").into());
    }

    fn block(&mut self, start: Value, deltas: impl IntoIterator<Item = Value>) {
        let index = self.index;
        self.index += 1;
        self.add(
            "content_block_start",
            json!({"index": index, "content_block": start}),
        );
        for delta in deltas {
            self.add(
                "content_block_delta",
                json!({"index": index, "delta": delta}),
            );
        }
        self.add("content_block_stop", json!({"index": index}));
    }
}
