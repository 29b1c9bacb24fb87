//! The tools. A tool turns arguments into a `ToolOutcome`, a value that says what is to happen; it writes no task state
//! and holds no connection. The worker carries the outcome out through the lifecycle.

mod ask_user;
mod concurrency;
mod delegate_tasks;
mod get_subtask_result;
mod http_request;
pub mod run_code;
mod wait_for_signal;
mod wait_until;

use crate::domain::{
    configured_tool::{Base, ConfiguredTool},
    delegation::{Plan, Reachable, allowlist_hint},
    ids::{AgentId, CredentialId, TaskId},
    task_await::WaitFor,
};
use secrecy::{ExposeSecret, SecretString};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::sync::{Arc, LazyLock};

pub use concurrency::{Classifier, concurrency};
pub use delegate_tasks::Context;
pub use http_request::{Http, HttpRequest, Sent};

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
    pub concurrency: Classifier,
    pub tags: &'static [&'static str],
    /// Arguments that only the author of a configured tool can give, each with its schema; models never see them.
    pub author_arguments: Value,
    /// What it is given is stored and shown: no place for a secret.
    pub keeps_arguments: bool,
}

/// A tool that an agent may call.
#[derive(Clone, Debug)]
pub struct Granted {
    /// As the model calls it.
    pub name: String,
    /// The base tool that does the work.
    pub base: &'static str,
    pub instance: Option<Arc<Instance>>,
}

/// A configured tool, with what its call is judged against.
#[derive(Clone, Debug, PartialEq)]
pub struct Instance {
    pub tool: ConfiguredTool,
    /// D-12; empty: any.
    pub allowed: Vec<AgentId>,
    /// Those of `allowed` that can be delegated to now.
    pub reachable: Vec<Reachable>,
}

impl Granted {
    pub fn base(name: &'static str) -> Self {
        Granted {
            name: name.to_owned(),
            base: name,
            instance: None,
        }
    }
}

impl Instance {
    /// What the model is told of it: the author's words, those of the base tool, and whom it reaches (D-13).
    pub fn description(&self, of_base: &str) -> String {
        let hint = match self.allowed.is_empty() {
            true => String::new(),
            false => allowlist_hint(&self.tool.name, &self.reachable),
        };
        let parts = [self.tool.description.trim(), of_base.trim(), &hint];
        let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        parts.join("\n\n")
    }
}

/// What a call asks for.
#[derive(Debug)]
pub enum ToolOutcome {
    /// An error that the model is told, and can act on.
    TellModel(String),
    Delegate(Plan),
    /// The task rests until this has happened.
    Wait(WaitFor),
    /// `Http::send` is to send it.
    Http(Box<HttpRequest>),
    /// The `Sandbox` is to run it.
    Code(String),
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
        http_request::tool(),
        run_code::tool(),
    ]
}

/// What configured tools can be built on.
pub fn bases() -> Vec<Base> {
    let arguments = |schema: &Value| schema.as_object().cloned().unwrap_or_default();
    let bases = catalogue().into_iter().map(|tool| Base {
        name: tool.name,
        arguments: arguments(&tool.schema["properties"])
            .into_iter()
            .chain(arguments(&tool.author_arguments))
            .collect(),
        author_only: arguments(&tool.author_arguments)
            .into_iter()
            .map(|(name, _)| name)
            .collect(),
        keeps_arguments: tool.keeps_arguments,
        takes_parameters: tool.name == http_request::NAME,
    });
    bases.collect()
}

/// What configured tools of this process are filled by.
static BASES: LazyLock<Vec<Base>> = LazyLock::new(bases);

/// Runs a call of a granted tool. `arguments` is JSON object text; `granted` is what this agent may call, and `secrets`
/// are the values of the credentials that are bound to the tool.
pub fn call(
    name: &str,
    arguments: &str,
    granted: &[Granted],
    secrets: &[(CredentialId, SecretString)],
    context: &Context,
) -> ToolOutcome {
    let Some(tool) = granted.iter().find(|tool| tool.name == name) else {
        return ToolOutcome::TellModel(unknown(name, granted));
    };
    let instance = tool.instance.as_deref();
    let base = BASES.iter().find(|base| base.name == tool.base);
    let filled = match (instance, base) {
        (Some(instance), Some(base)) => {
            let secret = |id| {
                let found = secrets.iter().find(|(known, _)| *known == id);
                found.map(|(_, value)| value.expose_secret())
            };
            match instance.tool.fill(arguments, base, secret) {
                Ok(filled) => Some(filled),
                Err(fault) => return ToolOutcome::TellModel(fault),
            }
        }
        (Some(_) | None, _) => None,
    };
    let arguments = filled.as_deref().unwrap_or(arguments);
    let outcome = match tool.base {
        delegate_tasks::NAME => delegate_tasks::call(arguments, instance, context),
        ask_user::NAME => ask_user::call(arguments),
        get_subtask_result::NAME => get_subtask_result::call(arguments),
        wait_until::NAME => wait_until::call(arguments),
        wait_for_signal::NAME => wait_for_signal::call(arguments),
        http_request::NAME => http_request::call(arguments, instance),
        run_code::NAME => run_code::call(arguments),
        _ => Err(unknown(name, granted)),
    };
    outcome.unwrap_or_else(|text| {
        // The model knows the tool by its own name only.
        let own = text
            .strip_prefix(tool.base)
            .filter(|rest| rest.starts_with(':'))
            .map(|rest| format!("{name}{rest}"));
        ToolOutcome::TellModel(own.unwrap_or(text))
    })
}

/// The same answer for a name that exists nowhere and for a tool that is not this agent's (H-23).
fn unknown(name: &str, granted: &[Granted]) -> String {
    let shown = crate::domain::text::cut_chars(name, 100);
    match granted.is_empty() {
        true => format!("There is no tool \"{shown}\", and you have no other. Answer in text."),
        false => {
            let names: Vec<&str> = granted.iter().map(|tool| tool.name.as_str()).collect();
            format!(
                "There is no tool \"{shown}\". Your tools are: {}.",
                names.join(", ")
            )
        }
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

    fn granted(names: &[&str]) -> Vec<Granted> {
        let all = catalogue().into_iter().map(|tool| tool.name);
        all.filter(|name| names.contains(name))
            .map(Granted::base)
            .collect()
    }

    fn told(name: &str, arguments: &str, names: &[&str]) -> String {
        match call(name, arguments, &granted(names), &[], &context()) {
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
            match call(name, arguments, &granted(&[name]), &[], &context()) {
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

    /// Arguments that fit the schema.
    fn fitting(schema: &Value) -> Value {
        if let Some(choices) = schema["enum"].as_array() {
            return choices[0].clone();
        }
        match schema["type"].as_str() {
            Some("object") => {
                let fields = schema["properties"].as_object().into_iter().flatten();
                Value::Object(fields.map(|(name, s)| (name.clone(), fitting(s))).collect())
            }
            Some("array") => Value::Array(vec![schema.get("items").map_or(1.into(), fitting)]),
            Some("string") => match schema["format"].as_str() {
                Some("date-time") => "2030-01-01T00:00:00Z".into(),
                Some("uri") => "https://example.com/".into(),
                _ => "0193a5b0-0000-7000-8000-000000000000".into(),
            },
            Some("boolean") => true.into(),
            _ => 1.into(),
        }
    }

    /// Every way to break one place of fitting arguments, with the path that an error must name.
    fn broken(schema: &Value, good: &Value, path: &str) -> Vec<(String, Value)> {
        let mut all = Vec::new();
        let wrong = match schema["type"].as_str() {
            Some("boolean" | "string") => serde_json::json!(5),
            _ => "text".into(),
        };
        if schema.get("type").is_some() {
            all.push((path.to_owned(), wrong));
        }
        if let Value::Object(fields) = good {
            let at = |name: &str| match path {
                "" => name.to_owned(),
                path => format!("{path}.{name}"),
            };
            for (name, value) in fields {
                for (path, value) in broken(&schema["properties"][name], value, &at(name)) {
                    let mut whole = fields.clone();
                    whole.insert(name.clone(), value);
                    all.push((path, Value::Object(whole)));
                }
            }
            for name in schema["required"].as_array().into_iter().flatten() {
                let name = name.as_str().unwrap();
                let mut whole = fields.clone();
                whole.shift_remove(name);
                all.push((name.to_owned(), Value::Object(whole)));
            }
            if schema["additionalProperties"] == false {
                let mut whole = fields.clone();
                whole.insert("extra".into(), 1.into());
                all.push((at("extra"), Value::Object(whole)));
            }
        }
        if let (Value::Array(items), Some(schema)) = (good, schema.get("items")) {
            for (path, value) in broken(schema, &items[0], &format!("{path}[0]")) {
                all.push((path, Value::Array(vec![value])));
            }
        }
        all
    }

    // L-1: what a schema refuses is refused before anything is done, with path and reason.
    #[test]
    fn no_call_gets_past_its_schema() {
        let mut tried = 0;
        for tool in catalogue() {
            let good = fitting(&tool.schema);
            for (path, arguments) in broken(&tool.schema, &good, "") {
                let text = told(tool.name, &arguments.to_string(), &[tool.name]);
                assert!(
                    text.contains("the arguments do not fit"),
                    "{arguments}: {text}"
                );
                assert!(
                    text.contains(&path),
                    "{arguments}: {path} is not named: {text}"
                );
                tried += 1;
            }
        }
        assert!(tried > 30, "{tried}");
    }
}
