//! Whether a call may overlap with others of its turn (X-1). Only the host knows: nothing of it is in what models see.

use super::{BASES, Granted, Tool, catalogue};
use crate::domain::{decision::ToolCall, turn::Concurrency};
use jsonschema::Validator;
use serde_json::Value;
use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::LazyLock,
};

/// How the calls of a tool overlap with others.
#[derive(Clone, Copy, Debug)]
pub enum Classifier {
    /// None does.
    Exclusive,
    /// Every one does.
    Parallel,
    /// As its arguments say. Pure: it looks at nothing else.
    ByArguments(fn(&Value) -> Concurrency),
}

impl Classifier {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::Parallel => "parallel",
            Self::ByArguments(_) => "by_arguments",
        }
    }
}

/// A base tool's classifier, and the arguments that it has.
struct Known {
    classifier: Classifier,
    arguments: Option<Validator>,
}

static KNOWN: LazyLock<HashMap<&'static str, Known>> = LazyLock::new(|| {
    let known = |tool: Tool| {
        let known = Known {
            classifier: tool.concurrency,
            arguments: jsonschema::validator_for(&tool.schema).ok(),
        };
        (tool.name, known)
    };
    catalogue().into_iter().map(known).collect()
});

/// How this call of an agent with these tools may overlap. Whatever is wrong with it makes it exclusive.
pub fn concurrency(call: &ToolCall, granted: &[Granted]) -> Concurrency {
    let found = granted.iter().find(|tool| tool.name == call.name);
    let known = found.and_then(|tool| Some((tool, KNOWN.get(tool.base)?)));
    let (Some((tool, known)), None) = (known, &call.invalid) else {
        return Concurrency::Exclusive;
    };
    let judged = match (
        &tool.instance,
        BASES.iter().find(|base| base.name == tool.base),
    ) {
        (None, _) => known.judge(&call.arguments),
        (Some(instance), Some(base)) => {
            // What a secret is makes no difference here.
            let filled = instance.tool.fill(&call.arguments, base, |_| Some(""));
            filled.ok().and_then(|filled| known.judge(&filled))
        }
        (Some(_), None) => None,
    };
    judged.unwrap_or(Concurrency::Exclusive)
}

impl Known {
    /// `None`: the arguments do not fit.
    fn judge(&self, arguments: &str) -> Option<Concurrency> {
        let arguments: Value = serde_json::from_str(arguments).ok()?;
        if !self.arguments.as_ref()?.is_valid(&arguments) {
            return None;
        }
        match self.classifier {
            Classifier::Exclusive => Some(Concurrency::Exclusive),
            Classifier::Parallel => Some(Concurrency::Parallel),
            Classifier::ByArguments(judge) => {
                catch_unwind(AssertUnwindSafe(|| judge(&arguments))).ok()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{configured_tool::ConfiguredTool, ids::TaskId};
    use crate::tools::Instance;
    use Concurrency::{Exclusive, Parallel};
    use serde_json::json;
    use std::sync::Arc;

    fn call(name: &str, arguments: impl ToString) -> ToolCall {
        ToolCall {
            id: "1".into(),
            name: name.into(),
            arguments: arguments.to_string(),
            invalid: None,
            provider_data: None,
        }
    }

    fn all() -> Vec<Granted> {
        let names = catalogue().into_iter().map(|tool| tool.name);
        names.map(Granted::base).collect()
    }

    // X-1, X-17
    #[test]
    fn what_may_overlap() {
        let read = json!({"task_id": TaskId::new()});
        let http = |method: &str| json!({"url": "https://a.example", "method": method});
        let delegate = json!({"tasks": [{"agent_group_id": "a", "prompt": "p"}]});
        for (name, arguments, expected) in [
            ("get_subtask_result", read.clone(), Parallel),
            ("delegate_tasks", delegate, Parallel),
            (
                "http_request",
                json!({"url": "https://a.example"}),
                Parallel,
            ),
            ("http_request", http("HEAD"), Parallel),
            ("http_request", http("POST"), Exclusive),
            ("http_request", http("get"), Exclusive),
            ("ask_user", json!({"question": "?"}), Exclusive),
            ("wait_until", json!({"seconds": 1}), Exclusive),
            ("wait_for_signal", json!({}), Exclusive),
            // arguments that do not fit
            ("get_subtask_result", json!({}), Exclusive),
            ("delegate_tasks", json!({"tasks": []}), Exclusive),
            // unknown
            ("delegate_task", json!({}), Exclusive),
        ] {
            let judged = concurrency(&call(name, &arguments), &all());
            assert_eq!(judged, expected, "{name} {arguments}");
        }
        let read = call("get_subtask_result", read);
        // not JSON, marked as invalid, not granted
        assert_eq!(
            concurrency(&call("get_subtask_result", "{"), &all()),
            Exclusive
        );
        let cut = ToolCall {
            invalid: Some("cut".into()),
            ..read.clone()
        };
        assert_eq!(concurrency(&cut, &all()), Exclusive);
        assert_eq!(concurrency(&read, &[]), Exclusive);
    }

    // X-1: what an author has bound counts, whatever the model sent.
    #[test]
    fn a_configured_tool_is_judged_by_the_arguments_of_its_base() {
        let tool = |bindings: Value| Granted {
            name: "mine".into(),
            base: "get_subtask_result",
            instance: Some(Arc::new(Instance {
                tool: ConfiguredTool {
                    name: "mine".into(),
                    base_tool: "get_subtask_result".into(),
                    description: String::new(),
                    agent: None,
                    parameters: None,
                    bindings: bindings.as_object().unwrap().clone(),
                },
                allowed: vec![],
                reachable: vec![],
            })),
        };
        let bound = tool(json!({"task_id": TaskId::new()}));
        for (arguments, expected) in [
            (json!({}), Parallel),
            (json!({"task_id": 5}), Parallel),
            (json!({"offset": "x"}), Exclusive),
        ] {
            let judged = concurrency(&call("mine", &arguments), std::slice::from_ref(&bound));
            assert_eq!(judged, expected, "{arguments}");
        }
    }

    // X-1
    #[test]
    fn a_classifier_looks_at_the_arguments_and_may_panic() {
        let known = Known {
            classifier: Classifier::ByArguments(|arguments| match arguments["method"].as_str() {
                Some("GET") => Parallel,
                Some("POST") => Exclusive,
                other => panic!("{other:?}"),
            }),
            arguments: jsonschema::validator_for(&json!({"type": "object"})).ok(),
        };
        assert_eq!(known.judge(r#"{"method": "GET"}"#), Some(Parallel));
        assert_eq!(known.judge(r#"{"method": "POST"}"#), Some(Exclusive));
        assert_eq!(known.judge(r#"{"method": 5}"#), None);
        assert_eq!(known.judge("[]"), None);
    }
}
