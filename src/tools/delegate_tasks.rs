//! Hands work to other agents. Here the arguments are read and judged; the children are made by
//! `lifecycle::delegate`.

use super::{Classifier, Instance, Tool, ToolOutcome, parse};
use crate::domain::delegation::{self, Delegator, Limits};
use serde_json::json;

pub(super) const NAME: &str = "delegate_tasks";

/// What a call is judged against, beside its arguments.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    pub by: Delegator,
    pub limits: Limits,
}

pub(super) fn tool() -> Tool {
    Tool {
        name: NAME,
        display_name: "Delegate to Agents",
        schema: json!({
            "type": "object",
            "properties": {
                "tasks": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "agent_group_id": {"type": "string", "description": "The agent, from the list of agents you can delegate to."},
                            "prompt": {"type": "string", "description": "All that the agent needs to know. {{item}} stands for the value of `inputs`."},
                            "title": {"type": "string", "description": "Short name of the task."},
                            "inputs": {"type": "array", "minItems": 1, "description": "One task for each value."}
                        },
                        "required": ["agent_group_id", "prompt"],
                        "additionalProperties": false
                    }
                },
                "timeout_minutes": {"type": "number", "exclusiveMinimum": 0},
                "async": {"type": "boolean", "description": "true: do not wait for results."}
            },
            "required": ["tasks"],
            "additionalProperties": false
        }),
        default_enabled: true,
        delegates: true,
        concurrency: Classifier::Parallel,
        tags: &["delegation"],
        author_arguments: json!({"allowed_agent_group_ids": {"type": "string", "description": "Ids of the agents that can be reached, separated by commas; empty: any."}}),
        keeps_arguments: true,
    }
}

pub(super) fn call(
    arguments: &str,
    instance: Option<&Instance>,
    context: &Context,
) -> Result<ToolOutcome, String> {
    let args: delegation::Args = parse(NAME, arguments)?;
    let judged = match instance {
        Some(instance) if !instance.allowed.is_empty() => delegation::check_allowlist(
            &instance.tool.name,
            &args,
            &instance.allowed,
            &instance.reachable,
        ),
        Some(_) | None => Ok(()),
    };
    judged
        .and_then(|()| delegation::plan(&args, context.by, &context.limits))
        .map(ToolOutcome::Delegate)
        .map_err(|refusal| refusal.to_string())
}
