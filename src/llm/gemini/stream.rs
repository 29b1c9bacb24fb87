//! Puts one answer together from the chunks of `streamGenerateContent`. Each has the form of a whole answer; calls come
//! whole.

use crate::domain::decision::{Decision, Finish, RawCall, Usage, clean_json};
use crate::llm::answer::{self, conclude, say, tokens};
use crate::llm::{ModelError, OnText, failure};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Chunk {
    error: Option<Value>,
    candidates: Option<Vec<Candidate>>,
    prompt_feedback: Option<PromptFeedback>,
    usage_metadata: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PromptFeedback {
    block_reason: Option<String>,
    block_reason_message: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Candidate {
    index: Option<i64>,
    content: Option<Content>,
    finish_reason: Option<String>,
    finish_message: Option<String>,
}

#[derive(Deserialize)]
struct Content {
    parts: Option<Vec<Part>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Part {
    text: Option<String>,
    /// The text tells of thoughts and is no part of the answer.
    thought: Option<bool>,
    function_call: Option<FunctionCall>,
    thought_signature: Option<String>,
}

#[derive(Deserialize)]
struct FunctionCall {
    id: Option<String>,
    name: Option<String>,
    /// Raw, so that no digit is lost (H-31).
    args: Option<Box<RawValue>>,
}

/// The answer so far.
#[derive(Default)]
pub struct Answer {
    text: String,
    calls: Vec<RawCall>,
    usage: Usage,
    finish_reason: Option<String>,
    finish_message: Option<String>,
    ended: bool,
}

impl answer::Answer for Answer {
    fn event(&mut self, name: &str, data: &str, on_text: OnText<'_>) -> Result<(), ModelError> {
        match data.trim() {
            "" => Ok(()),
            // Not of this form, but gateways that know others send it.
            "[DONE]" => {
                self.ended = true;
                Ok(())
            }
            data if name == "error" => Err(failure::in_stream(data)),
            data => {
                let chunk = answer::parse(&clean_json(data))?;
                self.chunk(chunk, data, on_text).map(|_| ())
            }
        }
    }

    fn body(&mut self, body: &str, on_text: OnText<'_>) -> Result<(), ModelError> {
        let json = clean_json(body);
        // Where `alt=sse` was lost on the way, the chunks come as one list.
        let chunks: Vec<Chunk> = if json.trim_start().starts_with('[') {
            answer::parse(&json)?
        } else {
            vec![answer::parse(&json)?]
        };
        let mut has_candidate = false;
        for chunk in chunks {
            has_candidate |= self.chunk(chunk, body, on_text)?;
        }
        if !has_candidate {
            return Err(answer::no_choice());
        }
        // A body that parsed is not cut, whether or not it says why it ended.
        self.finish_reason.get_or_insert_with(|| "STOP".to_owned());
        Ok(())
    }

    fn is_finished(&self) -> bool {
        self.finish_reason.is_some()
    }

    fn is_ended(&self) -> bool {
        self.ended
    }

    fn decision(self, fresh_id: impl FnMut() -> String) -> Result<Decision, ModelError> {
        let finish = match self.finish_reason.as_deref() {
            None => return Err(answer::cut()),
            Some("STOP") => Finish::Done,
            Some("MAX_TOKENS") => Finish::Length,
            Some(reason) => return Err(stopped(reason, self.finish_message.as_deref())),
        };
        Ok(conclude(
            self.text, self.calls, self.usage, finish, fresh_id,
        ))
    }
}

impl Answer {
    /// False where the chunk said nothing of the model's.
    fn chunk(&mut self, chunk: Chunk, json: &str, on_text: OnText<'_>) -> Result<bool, ModelError> {
        if chunk.error.is_some_and(|error| !error.is_null()) {
            return Err(failure::in_stream(json));
        }
        if let Some(usage) = chunk.usage_metadata.filter(|usage| !usage.is_null()) {
            self.usage = read_usage(&usage);
        }
        if let Some(feedback) = chunk.prompt_feedback
            && let Some(reason) = feedback.block_reason
        {
            let more = feedback.block_reason_message.unwrap_or_default();
            return Err(ModelError::never(said(
                format!("The provider refused the conversation ({reason})"),
                &more,
            )));
        }
        let mut has_candidate = false;
        for candidate in chunk.candidates.into_iter().flatten() {
            // We ask for one answer; a second one would be mixed into it.
            if candidate.index.unwrap_or(0) != 0 {
                continue;
            }
            has_candidate = true;
            let parts = candidate.content.and_then(|content| content.parts);
            for part in parts.into_iter().flatten() {
                self.part(part, on_text);
            }
            if let Some(reason) = candidate.finish_reason.filter(|reason| !reason.is_empty()) {
                self.finish_reason = Some(reason);
                self.finish_message = candidate.finish_message;
            }
        }
        Ok(has_candidate)
    }

    fn part(&mut self, part: Part, on_text: OnText<'_>) {
        if let Some(text) = part.text.filter(|_| part.thought != Some(true)) {
            say(&mut self.text, &text, on_text);
        }
        if let Some(call) = part.function_call {
            self.calls.push(RawCall {
                id: call.id,
                name: call.name,
                arguments: call.args.map(|args| args.get().to_owned()),
                provider_data: part.thought_signature.map(Value::String),
            });
        }
    }
}

/// An answer that ended otherwise than by the model's will or its limit.
fn stopped(reason: &str, message: Option<&str>) -> ModelError {
    let message = message.unwrap_or_default();
    match reason {
        "SAFETY" | "RECITATION" | "LANGUAGE" | "BLOCKLIST" | "PROHIBITED_CONTENT" | "SPII" => {
            ModelError::never(said(
                format!("The provider's filter stopped the model's answer ({reason})"),
                message,
            ))
        }
        // The model wrote something that is no call, or what nobody explains: the next attempt may differ.
        _ => ModelError::again(said(
            format!("The provider ended the model's answer with an error ({reason})"),
            message,
        )),
    }
}

fn said(what: String, more: &str) -> String {
    match failure::shorten(more) {
        more if more.is_empty() => format!("{what}."),
        more => format!("{what}: {more}"),
    }
}

/// As everywhere else: thoughts are output, what a cache held is part of the input.
fn read_usage(usage: &Value) -> Usage {
    let count = |name: &str| tokens(usage.get(name));
    Usage {
        input_tokens: count("promptTokenCount").saturating_add(count("toolUsePromptTokenCount")),
        output_tokens: count("candidatesTokenCount").saturating_add(count("thoughtsTokenCount")),
        cached_tokens: count("cachedContentTokenCount"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llm::answer::Answer as _;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_chunk_is_survived(
            chunks in prop::collection::vec(
                "null|[{}\\[\\]\",:a-z0-9]{0,40}|\\{\"(text|functionCall|thought)\":(\"x\"|1|\\{\\}|null)\\}",
                0..8,
            ),
        ) {
            let mut answer = Answer::default();
            for chunk in chunks {
                let _ = answer.event("", &chunk, &|_| {});
                let part = format!(r#"{{"candidates":[{{"content":{{"parts":[{chunk}]}}}}]}}"#);
                let _ = answer.event("", &part, &|_| {});
                let _ = answer.body(&part, &|_| {});
            }
            let _ = answer.decision(String::new);
        }
    }
}
