//! The tools. A tool turns arguments into a `ToolOutcome`, a value that says what is to happen; it writes no task state
//! and holds no connection. The worker carries the outcome out through the lifecycle.

mod ask_user;
mod delegate_tasks;
mod get_subtask_result;
mod wait_for_signal;
mod wait_until;

use crate::domain::{delegation::Plan, ids::TaskId, task_await::WaitFor};
use serde::de::DeserializeOwned;
use serde_json::Value;

pub use delegate_tasks::Context;

/// A tool as it is listed and as models are shown it. The description is a prompt file.
#[derive(Clone, Debug)]
pub struct Tool {
    pub name: &'static str,
    pub display_name: &'static str,
    /// JSON Schema of the arguments.
    pub schema: Value,
    /// Given to agents that list no tools.
    pub default_enabled: bool,
    /// Makes child tasks.
    pub delegates: bool,
    /// `parallel` or `exclusive`.
    pub concurrency: &'static str,
}

/// What a call asks for.
#[derive(Debug)]
pub enum ToolOutcome {
    /// An error that the model is told, and can act on.
    TellModel(String),
    Delegate(Plan),
    /// The task rests until this has happened.
    Wait(WaitFor),
    ReadSubtask {
        task: TaskId,
        offset: usize,
    },
}

/// All base tools, in the order in which models see them.
pub fn catalogue() -> Vec<Tool> {
    vec![
        delegate_tasks::tool(),
        ask_user::tool(),
        get_subtask_result::tool(),
        wait_until::tool(),
        wait_for_signal::tool(),
    ]
}

/// Runs a call of a granted tool. `arguments` is JSON object text; `granted` are the names that this agent may call.
pub fn call(name: &str, arguments: &str, granted: &[&str], context: &Context) -> ToolOutcome {
    if !granted.contains(&name) {
        return ToolOutcome::TellModel(unknown(name, granted));
    }
    let outcome = match name {
        delegate_tasks::NAME => delegate_tasks::call(arguments, context),
        ask_user::NAME => ask_user::call(arguments),
        get_subtask_result::NAME => get_subtask_result::call(arguments),
        wait_until::NAME => wait_until::call(arguments),
        wait_for_signal::NAME => wait_for_signal::call(arguments),
        _ => Err(unknown(name, granted)),
    };
    outcome.unwrap_or_else(ToolOutcome::TellModel)
}

/// The same answer for a name that exists nowhere and for a tool that is not this agent's (H-23).
fn unknown(name: &str, granted: &[&str]) -> String {
    let shown = crate::domain::text::cut_chars(name, 100);
    match granted.is_empty() {
        true => format!("There is no tool \"{shown}\", and you have no other. Answer in text."),
        false => format!(
            "There is no tool \"{shown}\". Your tools are: {}.",
            granted.join(", ")
        ),
    }
}

/// Reads arguments; the error names the path and the reason, for the model.
fn parse<T: DeserializeOwned>(tool: &str, arguments: &str) -> Result<T, String> {
    let mut json = serde_json::Deserializer::from_str(arguments);
    serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let at = if path == "." {
            String::new()
        } else {
            format!(" at `{path}`")
        };
        format!(
            "{tool}: the arguments do not fit{at}: {}. Correct them and call again.",
            reason(error.inner())
        )
    })
}

/// serde_json's message without its position, which means nothing to a model.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        delegation::{Delegator, Limits},
        ids::AgentId,
    };

    fn context() -> Context {
        Context {
            by: Delegator {
                agent: AgentId::new(),
                depth: 0,
            },
            limits: Limits {
                max_depth: 3,
                max_children_per_call: 250,
                default_timeout_minutes: 60,
                max_timeout_minutes: 1440,
            },
        }
    }

    fn told(name: &str, arguments: &str, granted: &[&str]) -> String {
        match call(name, arguments, granted, &context()) {
            ToolOutcome::TellModel(text) => text,
            other => panic!("{other:?}"),
        }
    }

    // X-9, H-23
    #[test]
    fn unknown_and_ungranted_names_are_told_apart_by_nothing_and_name_the_choices() {
        let all = ["delegate_tasks", "ask_user"];
        for name in ["delegate_task", "", "Delegate_Tasks", "get_subtask_result"] {
            assert_eq!(
                told(name, "{}", &all),
                format!("There is no tool \"{name}\". Your tools are: delegate_tasks, ask_user.")
            );
        }
        assert!(told(&"x".repeat(300), "{}", &all).len() < 200);
        assert!(told("delegate_tasks", "{}", &[]).contains("Answer in text"));
    }

    // H-21, D-5
    #[test]
    fn arguments_that_do_not_fit_are_named_by_path() {
        for (name, arguments, expected) in [
            (
                "ask_user",
                "{}",
                "ask_user: the arguments do not fit: missing field `question`.",
            ),
            (
                "ask_user",
                r#"{"question": 5}"#,
                "at `question`: invalid type",
            ),
            ("ask_user", r#"{"question": " "}"#, "`question` is empty"),
            ("delegate_tasks", "{}", "missing field `tasks`"),
            (
                "delegate_tasks",
                r#"{"tasks": [{"agent_group_id": "x", "prompt": "p", "depth": 0}]}"#,
                "at `tasks[0].depth`: unknown field `depth`",
            ),
            (
                "get_subtask_result",
                r#"{"task_id": "nope"}"#,
                "at `task_id`",
            ),
            (
                "get_subtask_result",
                r#"{"task_id": "0193a5b0-0000-7000-8000-000000000000", "offset": -1}"#,
                "at `offset`",
            ),
            ("wait_until", "{}", "either `time` or `seconds`"),
            (
                "wait_until",
                r#"{"time": "2030-01-01T00:00:00Z", "seconds": 1}"#,
                "either `time` or `seconds`",
            ),
            ("wait_until", r#"{"time": "tomorrow"}"#, "at `time`"),
            (
                "wait_until",
                r#"{"time": "+12030-01-01T00:00:00Z"}"#,
                "`time`",
            ),
            (
                "wait_until",
                r#"{"seconds": 0}"#,
                "`seconds` must be above 0",
            ),
            ("wait_until", r#"{"seconds": 1e9}"#, "at most 34560000"),
            ("wait_for_signal", r#"{"key": " "}"#, "`key` is empty"),
            ("wait_for_signal", r#"{"key": "a\u0000b"}"#, "NUL"),
            (
                "wait_for_signal",
                r#"{"timeout_minutes": -1}"#,
                "`timeout_minutes` must be above 0",
            ),
        ] {
            let text = told(name, arguments, &[name]);
            assert!(text.contains(expected), "{text}");
        }
    }

    // W-13, W-14
    #[test]
    fn waits_are_read_from_arguments() {
        let time = "2030-01-01T00:00:00Z".parse().unwrap();
        let signal = |key: Option<&str>, timeout_seconds| WaitFor::Signal {
            key: key.map(str::to_owned),
            timeout_seconds,
        };
        let question = "a\u{2400}b".to_owned();
        for (name, arguments, expected) in [
            (
                "ask_user",
                r#"{"question": "a\u0000b"}"#,
                WaitFor::User { question },
            ),
            (
                "wait_until",
                r#"{"time": "2030-01-01T01:00:00+01:00"}"#,
                WaitFor::Time(time),
            ),
            ("wait_until", r#"{"seconds": 1.5}"#, WaitFor::Seconds(1.5)),
            ("wait_for_signal", "{}", signal(None, None)),
            (
                "wait_for_signal",
                r#"{"key": " paid ", "timeout_minutes": 2}"#,
                signal(Some("paid"), Some(120.0)),
            ),
        ] {
            match call(name, arguments, &[name], &context()) {
                ToolOutcome::Wait(wait) => assert_eq!(wait, expected, "{arguments}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn every_schema_is_an_object_that_refuses_what_it_does_not_name() {
        for tool in catalogue() {
            assert_eq!(tool.schema["type"], "object", "{}", tool.name);
            assert_eq!(tool.schema["additionalProperties"], false, "{}", tool.name);
        }
    }
}
