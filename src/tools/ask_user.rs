//! Asks the user a question; the task rests until the user writes.

use super::{Classifier, Tool, ToolOutcome, parse};
use crate::domain::{decision::clean, task_await::WaitFor};
use serde::Deserialize;
use serde_json::json;

pub(super) const NAME: &str = "ask_user";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Args {
    question: String,
}

pub(super) fn tool() -> Tool {
    Tool {
        name: NAME,
        display_name: "Ask the user",
        schema: json!({
            "type": "object",
            "properties": {
                "question": {"type": "string", "description": "One question, complete in itself."}
            },
            "required": ["question"],
            "additionalProperties": false
        }),
        default_enabled: true,
        delegates: false,
        concurrency: Classifier::Exclusive,
        tags: &["waiting"],
        author_arguments: json!({}),
        keeps_arguments: true,
    }
}

pub(super) fn call(arguments: &str) -> Result<ToolOutcome, String> {
    let Args { question } = parse(NAME, arguments)?;
    match question.trim() {
        "" => Err("ask_user: `question` is empty. Ask something.".into()),
        _ => Ok(ToolOutcome::Wait(WaitFor::User {
            question: clean(&question).into_owned(),
        })),
    }
}
