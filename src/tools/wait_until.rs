//! Rests until a time, or for a while (W-14).

use super::{Classifier, Tool, ToolOutcome, parse};
use crate::domain::task_await::WaitFor;
use chrono::{DateTime, Datelike, Utc};
use serde::Deserialize;
use serde_json::json;

pub(super) const NAME: &str = "wait_until";

/// Longest wait: 400 days.
const SECONDS_MAX: f64 = 400.0 * 86_400.0;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Args {
    time: Option<DateTime<Utc>>,
    seconds: Option<f64>,
}

pub(super) fn tool() -> Tool {
    Tool {
        name: NAME,
        display_name: "Wait until a time",
        schema: json!({
            "type": "object",
            "properties": {
                "time": {"type": "string", "format": "date-time", "description": "RFC 3339, with time zone."},
                "seconds": {"type": "number", "exclusiveMinimum": 0, "description": "Instead of `time`: how long to wait."}
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
    let args: Args = parse(NAME, arguments)?;
    let wait = match (args.time, args.seconds) {
        (Some(time), None) if (1..=9999).contains(&time.year()) => WaitFor::Time(time),
        (Some(_), None) => {
            return Err("wait_until: the year of `time` must have four digits.".into());
        }
        (None, Some(seconds)) if seconds > 0.0 && seconds <= SECONDS_MAX => {
            WaitFor::Seconds(seconds)
        }
        (None, Some(_)) => {
            return Err(
                "wait_until: `seconds` must be above 0 and at most 34560000 (400 days).".into(),
            );
        }
        (Some(_), Some(_)) | (None, None) => {
            return Err("wait_until: give either `time` or `seconds`.".into());
        }
    };
    Ok(ToolOutcome::Wait(wait))
}
