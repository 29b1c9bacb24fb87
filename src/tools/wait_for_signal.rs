//! Rests until something outside says that a named thing has happened (W-13).

use super::{Classifier, Tool, ToolOutcome, parse};
use crate::domain::task_await::WaitFor;
use serde::Deserialize;
use serde_json::json;

pub(super) const NAME: &str = "wait_for_signal";

const KEY_CHARS_MAX: usize = 200;
const MINUTES_MAX: f64 = 400.0 * 1440.0;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Args {
    key: Option<String>,
    timeout_minutes: Option<f64>,
}

pub(super) fn tool() -> Tool {
    Tool {
        name: NAME,
        display_name: "Wait for a signal",
        schema: json!({
            "type": "object",
            "properties": {
                "key": {"type": "string", "maxLength": KEY_CHARS_MAX, "description": "Name of what is waited for, such as order-1234-paid. Left out: only the callback URL of the result can end the wait."},
                "timeout_minutes": {"type": "number", "exclusiveMinimum": 0, "description": "Give up after so long. Left out: wait for as long as it takes."}
            },
            "additionalProperties": false
        }),
        default_enabled: false,
        delegates: false,
        concurrency: Classifier::Exclusive,
        tags: &["waiting"],
        author_arguments: json!({}),
        keeps_arguments: true,
    }
}

pub(super) fn call(arguments: &str) -> Result<ToolOutcome, String> {
    let Args {
        key,
        timeout_minutes,
    } = parse(NAME, arguments)?;
    let key = match key.as_deref().map(str::trim) {
        Some("") => return Err("wait_for_signal: `key` is empty. Name what you wait for.".into()),
        Some(key) if key.chars().count() > KEY_CHARS_MAX || key.contains('\0') => {
            return Err(format!(
                "wait_for_signal: `key` has more than {KEY_CHARS_MAX} characters, or a NUL."
            ));
        }
        key => key.map(str::to_owned),
    };
    match timeout_minutes {
        Some(minutes) if !(minutes > 0.0 && minutes <= MINUTES_MAX) => Err(
            "wait_for_signal: `timeout_minutes` must be above 0 and at most 576000 (400 days)."
                .into(),
        ),
        minutes => {
            let timeout_seconds = minutes.map(|m| m * 60.0);
            Ok(ToolOutcome::Wait(WaitFor::Signal {
                key,
                timeout_seconds,
            }))
        }
    }
}
