//! Puts one answer together from the events of a Messages stream, or from one whole message.

use crate::domain::decision::{Decision, Finish, RawCall, Usage, clean_json};
use crate::llm::answer::{self, conclude, say, tokens};
use crate::llm::{ModelError, OnText, failure};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// An event; fields of kinds that are not known here are passed over.
#[derive(Deserialize)]
struct Event {
    r#type: Option<String>,
    error: Option<Value>,
    index: Option<u64>,
    message: Option<Message>,
    content_block: Option<Block>,
    delta: Option<Delta>,
    usage: Option<Value>,
}

#[derive(Deserialize)]
struct Message {
    error: Option<Value>,
    content: Option<Vec<Block>>,
    stop_reason: Option<String>,
    stop_details: Option<Value>,
    usage: Option<Value>,
}

#[derive(Deserialize)]
struct Block {
    r#type: Option<String>,
    text: Option<String>,
    id: Option<String>,
    name: Option<String>,
    /// Raw, so that no digit is lost (H-31).
    input: Option<Box<RawValue>>,
    thinking: Option<String>,
    signature: Option<String>,
    data: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    text: Option<String>,
    partial_json: Option<String>,
    thinking: Option<String>,
    signature: Option<String>,
    stop_reason: Option<String>,
    stop_details: Option<Value>,
}

enum Part {
    Text(String),
    Call {
        id: Option<String>,
        name: Option<String>,
        /// What the block began with, which counts unless pieces follow.
        input: Option<Box<RawValue>>,
        pieces: String,
    },
    Thinking {
        thinking: String,
        signature: String,
    },
    RedactedThinking(String),
    Unknown,
}

/// The answer so far.
#[derive(Default)]
pub struct Answer {
    /// By index.
    parts: BTreeMap<u64, Part>,
    bill: Bill,
    stop_reason: Option<String>,
    stop_details: Option<Value>,
    ended: bool,
}

impl answer::Answer for Answer {
    fn event(&mut self, name: &str, data: &str, on_text: OnText<'_>) -> Result<(), ModelError> {
        let data = data.trim();
        match data {
            "" => return Ok(()),
            // Not of this form, but gateways that know others send it.
            "[DONE]" => {
                self.ended = true;
                return Ok(());
            }
            _ if name == "error" => return Err(failure::in_stream(data)),
            _ => {}
        }
        let event: Event = answer::parse(&clean_json(data))?;
        if event.error.is_some_and(|error| !error.is_null()) {
            return Err(failure::in_stream(data));
        }
        match event.r#type.as_deref().unwrap_or(name) {
            "message_start" => {
                if let Some(usage) = event.message.and_then(|message| message.usage) {
                    self.bill.add(&usage);
                }
            }
            "content_block_start" => {
                if let Some(block) = event.content_block {
                    self.start(event.index.unwrap_or(0), block, on_text);
                }
            }
            "content_block_delta" => {
                if let Some(delta) = event.delta {
                    self.delta(event.index.unwrap_or(0), delta, on_text);
                }
            }
            "message_delta" => {
                if let Some(usage) = event.usage {
                    self.bill.add(&usage);
                }
                if let Some(delta) = event.delta {
                    self.stop(delta.stop_reason, delta.stop_details);
                }
            }
            "message_stop" => self.ended = true,
            // `ping`, `content_block_stop`, and what may be added: the form allows new kinds at any time.
            _ => {}
        }
        Ok(())
    }

    fn body(&mut self, body: &str, on_text: OnText<'_>) -> Result<(), ModelError> {
        let message: Message = answer::parse(&clean_json(body))?;
        if message.error.is_some_and(|error| !error.is_null()) {
            return Err(failure::in_stream(body));
        }
        let Some(content) = message.content else {
            return Err(answer::no_choice());
        };
        for (index, block) in (0..).zip(content) {
            self.start(index, block, on_text);
        }
        if let Some(usage) = message.usage {
            self.bill.add(&usage);
        }
        self.stop(message.stop_reason, message.stop_details);
        // A body that parsed is not cut, whether or not it says why it ended.
        self.stop_reason
            .get_or_insert_with(|| "end_turn".to_owned());
        Ok(())
    }

    fn is_finished(&self) -> bool {
        self.stop_reason.is_some()
    }

    fn is_ended(&self) -> bool {
        self.ended
    }

    fn decision(self, fresh_id: impl FnMut() -> String) -> Result<Decision, ModelError> {
        let finish = match self.stop_reason.as_deref() {
            None => return Err(answer::cut()),
            Some("max_tokens" | "model_context_window_exceeded") => Finish::Length,
            Some("refusal") => {
                let why = self.stop_details.as_ref();
                let why = why.and_then(|details| details.get("explanation")?.as_str());
                return Err(ModelError::never(match why {
                    Some(why) => format!(
                        "The model refused to answer (refusal): {}",
                        failure::shorten(why)
                    ),
                    None => "The model refused to answer (refusal).".to_owned(),
                }));
            }
            // Tools that run at the provider pause, and none is asked for.
            Some("pause_turn") => {
                return Err(ModelError::again(
                    "The provider paused the model's answer (pause_turn).",
                ));
            }
            Some(_) => Finish::Done,
        };
        let mut text = String::new();
        let mut calls = Vec::new();
        let mut before = Before::default();
        for part in self.parts.into_values() {
            match part {
                Part::Text(said) => {
                    before.text(said.len());
                    text.push_str(&said);
                }
                Part::Thinking {
                    thinking,
                    signature,
                } => before.thought(
                    json!({"type": "thinking", "thinking": thinking, "signature": signature}),
                ),
                Part::RedactedThinking(data) => {
                    before.thought(json!({"type": "redacted_thinking", "data": data}));
                }
                Part::Call {
                    id,
                    name,
                    input,
                    pieces,
                } => calls.push(RawCall {
                    id,
                    name,
                    arguments: if pieces.is_empty() {
                        input.map(|input| input.get().to_owned())
                    } else {
                        Some(pieces)
                    },
                    provider_data: before.take(),
                }),
                Part::Unknown => {}
            }
        }
        Ok(conclude(text, calls, self.bill.usage(), finish, fresh_id))
    }
}

impl Answer {
    fn start(&mut self, index: u64, block: Block, on_text: OnText<'_>) {
        let part = match block.r#type.as_deref() {
            Some("text") => {
                let mut text = String::new();
                say(&mut text, &block.text.unwrap_or_default(), on_text);
                Part::Text(text)
            }
            Some("tool_use") => Part::Call {
                id: block.id,
                name: block.name,
                input: block.input,
                pieces: String::new(),
            },
            Some("thinking") => Part::Thinking {
                thinking: block.thinking.unwrap_or_default(),
                signature: block.signature.unwrap_or_default(),
            },
            Some("redacted_thinking") => Part::RedactedThinking(block.data.unwrap_or_default()),
            _ => Part::Unknown,
        };
        self.parts.insert(index, part);
    }

    fn delta(&mut self, index: u64, delta: Delta, on_text: OnText<'_>) {
        match self.parts.get_mut(&index) {
            Some(Part::Text(text)) => {
                say(text, &delta.text.unwrap_or_default(), on_text);
            }
            Some(Part::Call { pieces, .. }) => {
                pieces.push_str(&delta.partial_json.unwrap_or_default());
            }
            Some(Part::Thinking {
                thinking,
                signature,
            }) => {
                thinking.push_str(&delta.thinking.unwrap_or_default());
                signature.push_str(&delta.signature.unwrap_or_default());
            }
            Some(Part::RedactedThinking(_) | Part::Unknown) => {}
            // Gateways leave out the start of a text.
            None => {
                if let Some(piece) = delta.text {
                    let mut text = String::new();
                    say(&mut text, &piece, on_text);
                    self.parts.insert(index, Part::Text(text));
                }
            }
        }
    }

    fn stop(&mut self, reason: Option<String>, details: Option<Value>) {
        if let Some(reason) = reason.filter(|reason| !reason.is_empty()) {
            self.stop_reason = Some(reason);
        }
        self.stop_details = details.or(self.stop_details.take());
    }
}

/// What the model wrote since the last call, as `wire::Before` reads it. Without a thought the order is of no use.
#[derive(Default)]
struct Before {
    blocks: Vec<Value>,
    has_thought: bool,
}

impl Before {
    fn text(&mut self, bytes: usize) {
        self.blocks.push(json!({"type": "text", "bytes": bytes}));
    }

    fn thought(&mut self, thought: Value) {
        self.blocks.push(thought);
        self.has_thought = true;
    }

    fn take(&mut self) -> Option<Value> {
        let Self {
            blocks,
            has_thought,
        } = std::mem::take(self);
        has_thought.then_some(Value::Array(blocks))
    }
}

/// Tokens as this form counts them: what came from the cache or went into it is not part of the input. Later events
/// repeat or raise what earlier ones said.
#[derive(Default)]
struct Bill {
    input: u32,
    read: u32,
    written: u32,
    output: u32,
}

impl Bill {
    fn add(&mut self, usage: &Value) {
        for (sum, name) in [
            (&mut self.input, "input_tokens"),
            (&mut self.read, "cache_read_input_tokens"),
            (&mut self.written, "cache_creation_input_tokens"),
            (&mut self.output, "output_tokens"),
        ] {
            *sum = (*sum).max(tokens(usage.get(name)));
        }
    }

    /// As everywhere else: the input is all that the model read.
    fn usage(&self) -> Usage {
        let read = self.input.saturating_add(self.read);
        Usage {
            input_tokens: read.saturating_add(self.written),
            output_tokens: self.output,
            cached_tokens: self.read,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llm::answer::Answer as _;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_event_is_survived(
            events in prop::collection::vec(
                ("message_start|content_block_start|content_block_delta|message_delta|message_stop|error",
                 "null|[{}\\[\\]\",:a-z0-9]{0,40}|\\{\"(text|partial_json|stop_reason|type)\":(\"(text|tool_use|thinking)\"|1|null)\\}",
                 0u64..3),
                0..8,
            ),
        ) {
            let mut answer = Answer::default();
            for (kind, inner, index) in events {
                for field in ["delta", "content_block", "usage", "message"] {
                    let data = format!(r#"{{"type":"{kind}","index":{index},"{field}":{inner}}}"#);
                    let _ = answer.event(&kind, &data, &|_| {});
                }
            }
            let _ = answer.decision(String::new);
        }
    }
}
