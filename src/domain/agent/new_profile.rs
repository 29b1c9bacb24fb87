//! A delegation profile as a model has written it (A-27).
//!
//! A model may put words or a code fence around its JSON, and these are passed over. JSON that is cut is never mended
//! (H-22): a sentence that ends in the middle would be shown to every other agent.

use super::PROFILE_CHARS_MAX;
use crate::domain::decision::{clean, clean_json};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = DelegationProfile)]
pub struct NewProfile {
    /// What work to hand to the agent. At most 4,000 characters.
    #[schema(example = "Collects and checks facts on one topic.")]
    pub description: String,
    /// A message as another agent would send it. At most 4,000 characters.
    #[schema(example = "What does a heat pump cost?")]
    pub example_input: String,
}

impl NewProfile {
    /// Reads a model's answer. The error completes the sentence "it can not be used: …".
    pub fn parse(answer: &str) -> Result<Self, String> {
        let answer = answer.trim();
        if answer.is_empty() {
            return Err("it says nothing".into());
        }
        let json = object(answer).ok_or("it holds no complete JSON object")?;
        let text = |key: &str| {
            let text = match json.get(key) {
                Some(Value::String(text)) => clean(text.trim()),
                Some(_) => return Err(format!("`{key}` is no string")),
                None => return Err(format!("`{key}` is missing")),
            };
            match text.chars().count() {
                _ if !text.contains(char::is_alphanumeric) => Err(format!("`{key}` says nothing")),
                chars if chars > PROFILE_CHARS_MAX => Err(format!(
                    "`{key}` has {chars} characters, which is more than {PROFILE_CHARS_MAX}"
                )),
                _ => Ok(text.into_owned()),
            }
        };
        Ok(NewProfile {
            description: text("description")?,
            example_input: text("example_input")?,
        })
    }
}

/// The first object in the answer that is whole.
fn object(answer: &str) -> Option<Value> {
    // Each brace of a long text that is no JSON would have the rest of it read.
    const STARTS_MAX: usize = 20;
    let answer = clean_json(answer);
    let starts = answer.match_indices('{').take(STARTS_MAX);
    starts
        .filter_map(|(at, _)| {
            let mut values = serde_json::Deserializer::from_str(&answer[at..]).into_iter();
            values.next()?.ok()
        })
        .find(Value::is_object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_whole_or_not_at_all() {
        // A-27, H-22, H-30
        let good = r#"{"description": "Finds {facts}", "example_input": "Find 1"}"#;
        let long = "ß".repeat(4_001);
        let read = |answer: &str| match NewProfile::parse(answer) {
            Ok(profile) => format!("{}|{}", profile.description, profile.example_input),
            Err(why) => why,
        };
        for (answer, expected) in [
            (good, "Finds {facts}|Find 1"),
            (&format!("```json\n{good}\n```"), "Finds {facts}|Find 1"),
            (
                &format!("Sure {{ok}}! Here:\n{good} Anything else? {{}}"),
                "Finds {facts}|Find 1",
            ),
            (
                r#"{"example_input": " e ", "x": 1, "description": "d\u0000\ud800"}"#,
                "d␀\u{fffd}|e",
            ),
            (" \n", "it says nothing"),
            (
                "I can not help with that.",
                "it holds no complete JSON object",
            ),
            (&good[..good.len() - 1], "it holds no complete JSON object"),
            (&good[..30], "it holds no complete JSON object"),
            (
                r#"["description", "example_input"]"#,
                "it holds no complete JSON object",
            ),
            (r#"{"description": "d"}"#, "`example_input` is missing"),
            (
                r#"{"description": null, "example_input": "e"}"#,
                "`description` is no string",
            ),
            (
                r#"{"description": "d", "example_input": ["e"]}"#,
                "`example_input` is no string",
            ),
            (
                r#"{"description": " - * ", "example_input": "e"}"#,
                "`description` says nothing",
            ),
            (
                &format!(r#"{{"description": "{long}", "example_input": "e"}}"#),
                "`description` has 4001 characters, which is more than 4000",
            ),
        ] {
            assert_eq!(read(answer), expected, "{answer}");
        }
        let most = &long[..8_000];
        assert!(
            read(&format!(
                r#"{{"description": "{most}", "example_input": "e"}}"#
            ))
            .ends_with("|e")
        );
        assert_eq!(
            read(&"{".repeat(1_000_000)),
            "it holds no complete JSON object"
        );
    }
}
