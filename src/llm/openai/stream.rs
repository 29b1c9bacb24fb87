//! Puts one answer together from the chunks of an OpenAI-compatible provider, streamed or in one piece.

use super::calls::{Calls, Fragment};
use crate::domain::decision::{Decision, Finish, Usage, clean_json};
use crate::llm::answer::{self, conclude, say, tokens};
use crate::llm::{ModelError, OnText, failure};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Chunk {
    /// `error` where the whole chunk is one, as vLLM sends it.
    object: Option<String>,
    error: Option<Value>,
    choices: Option<Vec<Choice>>,
    usage: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    index: Option<i64>,
    delta: Option<Delta>,
    /// In place of `delta` where the answer is not streamed.
    message: Option<Delta>,
    finish_reason: Option<String>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<Value>,
    refusal: Option<String>,
    tool_calls: Option<Vec<Fragment>>,
}

/// The answer so far.
#[derive(Default)]
pub struct Answer {
    text: String,
    calls: Calls,
    usage: Usage,
    finish_reason: Option<String>,
    ended: bool,
}

impl answer::Answer for Answer {
    fn event(&mut self, name: &str, data: &str, on_text: OnText<'_>) -> Result<(), ModelError> {
        match data.trim() {
            "" => Ok(()),
            "[DONE]" => {
                self.ended = true;
                Ok(())
            }
            data if name == "error" => Err(failure::in_stream(data)),
            data => self.chunk(data, on_text).map(|_| ()),
        }
    }

    fn body(&mut self, body: &str, on_text: OnText<'_>) -> Result<(), ModelError> {
        if !self.chunk(body, on_text)? {
            return Err(answer::no_choice());
        }
        // A body that parsed is not cut, whether or not it says why it ended.
        self.finish_reason.get_or_insert_with(|| "stop".to_owned());
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
            Some("length" | "max_tokens" | "max_output_tokens") => Finish::Length,
            Some("content_filter") => {
                return Err(ModelError::never(
                    "The provider's content filter stopped the model's answer (content_filter).",
                ));
            }
            Some("error") => {
                return Err(ModelError::again(
                    "The provider ended the model's answer with an error (finish reason `error`).",
                ));
            }
            Some(_) => Finish::Done,
        };
        let calls = self.calls.into_raw();
        Ok(conclude(self.text, calls, self.usage, finish, fresh_id))
    }
}

impl Answer {
    /// False where the chunk said nothing of the model's.
    fn chunk(&mut self, json: &str, on_text: OnText<'_>) -> Result<bool, ModelError> {
        let chunk: Chunk = answer::parse(&clean_json(json))?;
        let is_error = chunk.object.as_deref() == Some("error");
        if is_error || chunk.error.is_some_and(|error| !error.is_null()) {
            return Err(failure::in_stream(json));
        }
        if let Some(usage) = chunk.usage.filter(|usage| !usage.is_null()) {
            self.usage = read_usage(&usage);
        }
        let mut has_choice = false;
        for choice in chunk.choices.into_iter().flatten() {
            // We ask for one answer; a second one would be mixed into it.
            if choice.index.unwrap_or(0) != 0 {
                continue;
            }
            has_choice = true;
            if choice.error.is_some_and(|error| !error.is_null()) {
                return Err(failure::in_stream(json));
            }
            let whole = choice.message.is_some();
            if let Some(delta) = choice.delta.or(choice.message) {
                self.delta(delta, whole, on_text);
            }
            if let Some(reason) = choice.finish_reason.filter(|reason| !reason.is_empty()) {
                self.finish_reason = Some(reason);
            }
        }
        Ok(has_choice)
    }

    fn delta(&mut self, delta: Delta, whole: bool, on_text: OnText<'_>) {
        let content = delta.content.map(content_text).unwrap_or_default();
        for piece in [content, delta.refusal.unwrap_or_default()] {
            say(&mut self.text, &piece, on_text);
        }
        for fragment in delta.tool_calls.into_iter().flatten() {
            if whole {
                self.calls.add_whole(fragment);
            } else {
                self.calls.add(fragment);
            }
        }
    }
}

/// A string, or a list of parts of which only the texts are the answer.
fn content_text(content: Value) -> String {
    match content {
        Value::String(text) => text,
        Value::Array(parts) => parts
            .iter()
            .filter_map(|part| part.get("text").and_then(Value::as_str).or(part.as_str()))
            .collect(),
        _ => String::new(),
    }
}

fn read_usage(usage: &Value) -> Usage {
    Usage {
        input_tokens: tokens(usage.get("prompt_tokens")),
        output_tokens: tokens(usage.get("completion_tokens")),
        cached_tokens: tokens(
            usage
                .pointer("/prompt_tokens_details/cached_tokens")
                .or_else(|| usage.get("prompt_cache_hit_tokens")),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llm::Retry;
    use crate::llm::answer::Answer as _;
    use proptest::prelude::*;
    use serde_json::json;

    fn read(chunks: &[Value]) -> Result<Decision, ModelError> {
        let mut answer = Answer::default();
        for chunk in chunks {
            answer.event("", &chunk.to_string(), &|_| {})?;
        }
        let mut made = 0;
        answer.decision(|| {
            made += 1;
            format!("made{made}")
        })
    }

    fn text(content: &str) -> Value {
        json!({"choices": [{"delta": {"content": content}}]})
    }

    fn end(reason: &str) -> Value {
        json!({"choices": [{"delta": {}, "finish_reason": reason}]})
    }

    #[test]
    fn the_same_reply_in_one_piece() {
        // H-19
        let mut answer = Answer::default();
        let body = r#"{"choices":[{"message":{"content":null,"tool_calls":[
            {"id":"a","function":{"name":"f","arguments":"{\"n\":9007199254740993}"}},
            {"id":"","function":{"name":"f","arguments":{"n":9007199254740993}}},
            {"function":{"name":"g"}}]}}],"usage":{"prompt_tokens":3,"completion_tokens":2}}"#;
        answer.body(body, &|_| {}).unwrap();
        let decision = answer.decision(|| "made".to_owned()).unwrap();
        let calls: Vec<_> = decision
            .calls
            .iter()
            .map(|c| (c.id.as_str(), c.arguments.as_str()))
            .collect();
        assert_eq!(
            calls,
            [
                ("a", r#"{"n":9007199254740993}"#),
                ("made", r#"{"n":9007199254740993}"#),
                ("made_2", "{}")
            ]
        );
        assert_eq!(
            decision.usage,
            Usage {
                input_tokens: 3,
                output_tokens: 2,
                cached_tokens: 0
            }
        );
    }

    #[test]
    fn only_an_answer_with_a_reason_counts() {
        // H-22, H-27, T-15
        let again = |chunks: &[Value]| {
            matches!(
                read(chunks),
                Err(ModelError {
                    retry: Retry::After(_),
                    ..
                })
            )
        };
        assert!(again(&[]));
        assert!(again(&[text("half")]));
        assert!(again(&[text("half"), end("")]));
        assert!(again(&[text("half"), end("error")]));
        assert!(again(&[
            text("half"),
            json!({"error": {"message": "overloaded"}}),
            end("stop")
        ]));
        assert!(matches!(
            read(&[text("x"), end("content_filter")]),
            Err(ModelError {
                retry: Retry::Never,
                ..
            })
        ));
        assert_eq!(read(&[text("whole"), end("stop")]).unwrap().text, "whole");
        assert_eq!(read(&[end("stop")]).unwrap(), Decision::default());
        assert_eq!(read(&[end("length")]).unwrap(), Decision::default());
        assert_eq!(
            read(&[text("a"), end("length")]).unwrap().text,
            "a\n\n[Cut here: the model reached its output limit.]"
        );
        let mut answer = Answer::default();
        let broken = answer.event("", "{\"choices\": [", &|_| {}).unwrap_err();
        assert_eq!(broken.retry, Retry::After(None));
    }

    #[test]
    fn content_in_all_its_forms() {
        for (content, expected) in [
            (json!("plain"), "plain"),
            (json!(null), ""),
            (
                json!([{"type": "thinking", "thinking": [{"text": "hm"}]}, {"type": "text", "text": "a"}, {"text": "b"}]),
                "ab",
            ),
            (json!("nul\0"), "nul␀"),
        ] {
            let chunk = json!({"choices": [{"delta": {"content": content}}, {"index": 1, "delta": {"content": "second"}}]});
            assert_eq!(read(&[chunk, end("stop")]).unwrap().text, expected);
        }
        let refusal = json!({"choices": [{"delta": {"refusal": "No."}}]});
        assert_eq!(read(&[refusal, end("stop")]).unwrap().text, "No.");
    }

    #[test]
    fn a_lone_surrogate_does_not_lose_the_answer() {
        // H-30
        let mut answer = Answer::default();
        answer
            .event(
                "",
                r#"{"choices":[{"delta":{"content":"a\ud83db\u0000"},"finish_reason":"stop"}]}"#,
                &|_| {},
            )
            .unwrap();
        assert_eq!(answer.decision(String::new).unwrap().text, "a\u{fffd}b␀");
    }

    #[test]
    fn usage_never_costs_the_answer() {
        for (usage, expected) in [
            (
                json!({"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 7}}),
                (10, 5, 7),
            ),
            (
                json!({"prompt_tokens": 10, "completion_tokens": 5, "prompt_cache_hit_tokens": 6}),
                (10, 5, 6),
            ),
            (
                json!({"prompt_tokens": 1e99, "completion_tokens": -5}),
                (0, 0, 0),
            ),
            (json!({"prompt_tokens": u64::MAX}), (u32::MAX, 0, 0)),
            (json!("free"), (0, 0, 0)),
            (json!(null), (0, 0, 0)),
        ] {
            let usage = read(&[end("stop"), json!({"choices": [], "usage": usage})])
                .unwrap()
                .usage;
            assert_eq!(
                (usage.input_tokens, usage.output_tokens, usage.cached_tokens),
                expected
            );
        }
    }

    proptest! {
        #[test]
        fn any_chunk_is_survived(data in ".{0,80}|[{}\\[\\]\",:a-z0-9]{0,60}") {
            let mut answer = Answer::default();
            let _ = answer.event("", &data, &|_| {});
            let _ = answer.decision(String::new);
        }
    }
}
