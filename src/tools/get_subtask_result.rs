//! Reads what a child has answered, in parts.

use super::{Classifier, Tool, ToolOutcome, parse};
use crate::domain::ids::TaskId;
use serde::Deserialize;
use serde_json::json;

pub(super) const NAME: &str = "get_subtask_result";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Args {
    task_id: TaskId,
    offset: Option<u32>,
}

pub(super) fn tool() -> Tool {
    Tool {
        name: NAME,
        display_name: "Get a subtask's result",
        schema: json!({
            "type": "object",
            "properties": {
                "task_id": {"type": "string", "format": "uuid", "description": "A task that you delegated."},
                "offset": {"type": "integer", "minimum": 0, "description": "First character to return; default 0."}
            },
            "required": ["task_id"],
            "additionalProperties": false
        }),
        default_enabled: true,
        delegates: false,
        concurrency: Classifier::Parallel,
        tags: &["delegation"],
        author_arguments: json!({}),
        keeps_arguments: false,
    }
}

pub(super) fn call(arguments: &str) -> Result<ToolOutcome, String> {
    let Args { task_id, offset } = parse(NAME, arguments)?;
    Ok(ToolOutcome::ReadSubtask {
        task: task_id,
        offset: offset.unwrap_or(0) as usize,
    })
}
