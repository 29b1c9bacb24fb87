//! Gemini's form of the stub: what a request says, what the real one refuses, what an answer looks like.

use super::{Recorded, Said, halves};
use axum::body::Bytes;
use serde_json::{Value, json};

pub fn error(code: u16, status: &str, message: &str) -> Value {
    json!({"error": {"code": code, "message": message, "status": status}})
}

fn parts(content: &Value) -> &[Value] {
    content["parts"].as_array().map_or(&[], Vec::as_slice)
}

/// In OpenAI's form.
pub fn messages(body: &Value) -> Vec<Value> {
    let mut messages = Vec::new();
    for part in parts(&body["systemInstruction"]) {
        messages.push(json!({"role": "system", "content": part["text"]}));
    }
    for content in body["contents"].as_array().into_iter().flatten() {
        let (mut text, mut calls) = (String::new(), Vec::new());
        for part in parts(content) {
            let (call, result) = (&part["functionCall"], &part["functionResponse"]);
            if call.is_object() {
                calls.push(json!({
                    "id": call["id"],
                    "function": {"name": call["name"], "arguments": call["args"].to_string()},
                }));
            } else if result.is_object() {
                let response = &result["response"];
                let said = response["output"].as_str().or(response["error"].as_str());
                messages.push(
                    json!({"role": "tool", "tool_call_id": result["id"], "content": said.unwrap_or_default()}),
                );
            } else if content["role"] == "model" {
                text.push_str(part["text"].as_str().unwrap_or_default());
            } else {
                messages.push(json!({"role": "user", "content": part["text"]}));
            }
        }
        if content["role"] == "model" {
            messages.push(json!({"role": "assistant", "content": text, "tool_calls": calls}));
        }
    }
    messages
}

/// What a call that this stub has made must come back with.
pub fn signature(name: &str) -> String {
    format!("signature-of-{name}")
}

pub fn check(request: &Recorded) -> Result<(), String> {
    let model = request.uri.trim_start_matches("/v1beta/models/");
    if !model.contains(":streamGenerateContent?") || !model.contains("alt=sse") {
        return Err(format!("{} streams no events", request.uri));
    }
    let contents = request.body["contents"].as_array();
    let contents = contents.map_or(&[][..], Vec::as_slice);
    let names = |content: &Value, kind: &str| -> Vec<String> {
        let name = |part: &Value| part[kind]["name"].as_str().map(str::to_owned);
        parts(content).iter().filter_map(name).collect()
    };
    for (at, content) in contents.iter().enumerate() {
        let wrong = |why: &str| Err(format!("contents[{at}]: {why}"));
        if content["role"] != "user" && content["role"] != "model" {
            return wrong("Please use a valid role: user, model.");
        }
        if parts(content).is_empty() {
            return wrong("parts must not be empty");
        }
        let calls = names(content, "functionCall");
        let answers = contents.get(at + 1);
        let answers = answers.map_or_else(Vec::new, |next| names(next, "functionResponse"));
        if calls != answers {
            return wrong(
                "Please ensure that the number of function response parts is equal to the number of function call \
                 parts of the function call turn.",
            );
        }
        let first = parts(content)
            .iter()
            .find(|part| part["functionCall"].is_object());
        if let Some(first) = first
            && model.starts_with("gemini-3")
        {
            let name = first["functionCall"]["name"].as_str().unwrap_or_default();
            let given = first["thoughtSignature"].as_str().unwrap_or_default();
            if given != signature(name) && given != "skip_thought_signature_validator" {
                return wrong(
                    "Function call is missing a thought_signature in functionCall parts.",
                );
            }
        }
    }
    Ok(())
}

pub fn body(said: &Said<'_>) -> (u16, &'static str, Vec<Bytes>) {
    let (input, output, cached) = said.usage;
    let thoughts = output / 2;
    let usage = json!({
        "promptTokenCount": input, "candidatesTokenCount": output - thoughts, "thoughtsTokenCount": thoughts,
        "cachedContentTokenCount": cached, "totalTokenCount": input + output,
    });
    let finish = said.finish.unwrap_or("STOP");
    let chunk = |parts: &str, finish: Option<&str>| {
        let finish = finish.map_or(String::new(), |finish| {
            format!(r#","finishReason":"{finish}""#)
        });
        format!(
            r#"{{"candidates":[{{"content":{{"parts":[{parts}],"role":"model"}}{finish},"index":0}}],"usageMetadata":{usage},"modelVersion":"stub","responseId":"stub"}}"#
        )
    };
    let calls: Vec<String> = said
        .calls
        .iter()
        .enumerate()
        .map(|(at, (id, name, arguments))| {
            let id = if id.is_empty() {
                String::new()
            } else {
                format!(r#""id":{},"#, json!(id))
            };
            let args = if arguments.is_empty() {
                String::new()
            } else {
                format!(r#","args":{arguments}"#)
            };
            let signature = if at == 0 {
                format!(r#","thoughtSignature":"{}""#, signature(name))
            } else {
                String::new()
            };
            format!(
                r#"{{"functionCall":{{{id}"name":{}{args}}}{signature}}}"#,
                json!(name)
            )
        })
        .collect();
    if said.is_plain {
        let text = json!({"text": said.text}).to_string();
        let text = (!said.text.is_empty()).then_some(text);
        let parts: Vec<_> = text.into_iter().chain(calls).collect();
        let body = chunk(&parts.join(","), Some(finish));
        return (200, "application/json", vec![body.into()]);
    }
    let texts = halves(said.text).map(|piece| json!({"text": piece}).to_string());
    let mut chunks: Vec<String> = texts.chain(calls).map(|part| chunk(&part, None)).collect();
    chunks.push(chunk(r#"{"text":""}"#, Some(finish)));
    let events = chunks
        .into_iter()
        .map(|chunk| format!("data: {chunk}\r\n\r\n").into());
    (200, "text/event-stream", events.collect())
}
