//! Runs code that a model has written, and that may call the agent's other tools (L-5). Here the arguments are read; the
//! worker carries out what the code calls.
//!
//! The code is Python, interpreted by `guest` in a process of its own, which `sandbox` starts and ends. The interpreter has
//! no files, network, processes, environment or clock to give; the process has limits of the kernel around it, dies alone
//! when the interpreter does, and serves one call only. The two talk in lines of JSON.

pub mod guest;
mod sandbox;
mod values;

pub use sandbox::{Called, Limits, Running, Sandbox, Step};

use super::{Classifier, Tool, ToolOutcome, parse};
use crate::domain::grants::RUN_CODE;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

pub(super) const NAME: &str = RUN_CODE;
const CODE_CHARS_MAX: usize = 100_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Args {
    code: String,
}

pub(super) fn tool() -> Tool {
    Tool {
        name: NAME,
        display_name: "Run code",
        schema: json!({
            "type": "object",
            "properties": {
                "code": {"type": "string", "maxLength": CODE_CHARS_MAX, "description": "Python. The value of the last expression is the result."}
            },
            "required": ["code"],
            "additionalProperties": false
        }),
        default_enabled: false,
        delegates: false,
        concurrency: Classifier::Exclusive,
        tags: &["code"],
        author_arguments: json!({}),
        keeps_arguments: false,
    }
}

pub(super) fn call(arguments: &str) -> Result<ToolOutcome, String> {
    let Args { code } = parse(NAME, arguments)?;
    let misfit = |fault: String| {
        format!("{NAME}: the arguments do not fit at `code`: {fault}. Correct them and call again.")
    };
    if code.trim().is_empty() {
        return Err(misfit("`code` is empty".into()));
    }
    match code.chars().count() {
        chars if chars > CODE_CHARS_MAX => Err(misfit(format!(
            "is {chars} characters long; at most {CODE_CHARS_MAX} are allowed"
        ))),
        _ => Ok(ToolOutcome::Code(code)),
    }
}

/// The first line to the guest.
#[derive(Debug, Serialize, Deserialize)]
struct Start {
    code: String,
    /// What the code may call.
    functions: Vec<String>,
    timeout_ms: u64,
    memory_bytes: u64,
    output_bytes: usize,
}

/// What the guest says, a line each.
#[derive(Debug, Serialize, Deserialize)]
enum Said {
    Call {
        function: String,
        arguments: Map<String, Value>,
    },
    Returned {
        result: Value,
        output: String,
    },
    Raised {
        error: String,
        output: String,
    },
}

/// The answer to a `Said::Call`: the result's text, or what the tool says went wrong.
type Answer = Result<String, String>;
