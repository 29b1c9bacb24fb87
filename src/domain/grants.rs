//! Which tools an agent may use: one function, asked when the prompt is built, again when a call is executed, and by
//! source mode. What it is given as catalogue is what exists for this agent (base tools, and configured tools whose scope
//! covers it, A-14); a listed name that is not in there grants nothing.

use crate::domain::agent::{AgentDefinition, AgentKind, Template};

/// What a codeact agent always has, once the deployment offers it.
pub const RUN_CODE: &str = "run_code";

/// What granting needs to know about a tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolInfo<'a> {
    pub name: &'a str,
    pub default_enabled: bool,
    /// Creates child tasks: `delegate_tasks` and every configured instance of it.
    pub delegates: bool,
}

/// The names of the granted tools, each once, in the order of the agent's lists and then of the catalogue.
/// `task_allows_delegation` is about the task: not forbidden for it (T-9), and depth left for a child (D-54).
pub fn granted<'a>(
    definition: &AgentDefinition,
    template: Template,
    catalogue: &[ToolInfo<'a>],
    task_allows_delegation: bool,
) -> Vec<&'a str> {
    let delegation = task_allows_delegation && definition.may_delegate();
    let mut granted: Vec<&'a str> = Vec::new();
    let mut grant = |tool: &ToolInfo<'a>| {
        if (delegation || !tool.delegates) && !granted.contains(&tool.name) {
            granted.push(tool.name);
        }
    };

    let listed = definition
        .tools
        .iter()
        .chain(definition.phases.iter().flat_map(|phase| &phase.tools));
    let (listed, run_code, defaults) = match definition.kind {
        AgentKind::Loop if definition.tools.is_empty() => (None, false, true),
        AgentKind::Loop => (Some(listed), false, template == Template::Default),
        AgentKind::CodeAct => (Some(listed), true, template == Template::Default),
    };
    for name in listed.into_iter().flatten() {
        catalogue
            .iter()
            .filter(|tool| tool.name == name)
            .for_each(&mut grant);
    }
    catalogue
        .iter()
        .filter(|tool| run_code && tool.name == RUN_CODE)
        .for_each(&mut grant);
    catalogue
        .iter()
        .filter(|tool| defaults && tool.default_enabled)
        .for_each(&mut grant);
    granted
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const CATALOGUE: [ToolInfo<'static>; 6] = [
        ToolInfo {
            name: "delegate_tasks",
            default_enabled: true,
            delegates: true,
        },
        ToolInfo {
            name: "ask_user",
            default_enabled: true,
            delegates: false,
        },
        ToolInfo {
            name: "get_subtask_result",
            default_enabled: true,
            delegates: false,
        },
        ToolInfo {
            name: "run_code",
            default_enabled: false,
            delegates: false,
        },
        ToolInfo {
            name: "http_request",
            default_enabled: false,
            delegates: false,
        },
        ToolInfo {
            name: "delegate_to_legal",
            default_enabled: false,
            delegates: true,
        },
    ];
    const DEFAULTS: [&str; 3] = ["delegate_tasks", "ask_user", "get_subtask_result"];

    #[test]
    fn every_branch_of_granting() {
        // T-9
        use Template::{Custom, Default};
        let none: &[&str] = &[];
        let http_then_defaults = [
            "http_request",
            "delegate_tasks",
            "ask_user",
            "get_subtask_result",
        ];
        for (template, agent, task_allows, expected) in [
            // the list and the phases; an empty list means the default-enabled tools and nothing else.
            (
                Custom,
                json!({"tools": ["http_request"]}),
                true,
                &["http_request"] as &[&str],
            ),
            (
                Custom,
                json!({"tools": ["http_request"], "phases": [{"name": "P", "tools": ["ask_user", "http_request"]},
                    {"name": "Q", "tools": ["delegate_to_legal"]}]}),
                true,
                &["http_request", "ask_user", "delegate_to_legal"],
            ),
            (Custom, json!({}), true, &DEFAULTS),
            (
                Custom,
                json!({"phases": [{"name": "P", "tools": ["http_request"]}]}),
                true,
                &DEFAULTS,
            ),
            (
                Custom,
                json!({"tools": ["gone", "ask_user"]}),
                true,
                &["ask_user"],
            ),
            // never the fallback.
            (Custom, json!({"kind": "codeact"}), true, &["run_code"]),
            (
                Custom,
                json!({"kind": "codeact", "tools": ["ask_user"], "phases": [{"name": "P", "tools": ["http_request"]}]}),
                true,
                &["ask_user", "http_request", "run_code"],
            ),
            (
                Custom,
                json!({"kind": "codeact", "tools": ["run_code"]}),
                true,
                &["run_code"],
            ),
            // on each branch.
            (
                Default,
                json!({"tools": ["http_request"]}),
                true,
                &http_then_defaults,
            ),
            (Default, json!({}), true, &DEFAULTS),
            (
                Default,
                json!({"kind": "codeact"}),
                true,
                &[
                    "run_code",
                    "delegate_tasks",
                    "ask_user",
                    "get_subtask_result",
                ],
            ),
            // absent and true are the same; false strips base and configured, listed and fallen back to.
            (
                Custom,
                json!({"tools": ["delegate_tasks"], "config": {"auto_delegate": true}}),
                true,
                &["delegate_tasks"],
            ),
            (
                Custom,
                json!({"tools": ["delegate_tasks", "delegate_to_legal"], "config": {"auto_delegate": false}}),
                true,
                none,
            ),
            (
                Custom,
                json!({"config": {"auto_delegate": false}}),
                true,
                &["ask_user", "get_subtask_result"],
            ),
            (
                Default,
                json!({"kind": "codeact", "tools": ["delegate_to_legal"], "config": {"auto_delegate": false}}),
                true,
                &["run_code", "ask_user", "get_subtask_result"],
            ),
            // T-9: the task can only take away.
            (
                Custom,
                json!({}),
                false,
                &["ask_user", "get_subtask_result"],
            ),
            (
                Custom,
                json!({"tools": ["delegate_to_legal", "http_request"]}),
                false,
                &["http_request"],
            ),
            (
                Default,
                json!({"tools": ["delegate_tasks"]}),
                false,
                &["ask_user", "get_subtask_result"],
            ),
            (
                Custom,
                json!({"kind": "codeact", "tools": ["delegate_tasks"]}),
                false,
                &["run_code"],
            ),
            (
                Custom,
                json!({"tools": ["delegate_tasks"], "config": {"auto_delegate": false}}),
                false,
                none,
            ),
        ] {
            let mut body = agent.clone();
            body["name"] = json!("A");
            let definition = AgentDefinition::parse(&body).unwrap();
            assert_eq!(
                granted(&definition, template, &CATALOGUE, task_allows),
                expected,
                "{template:?} {agent}"
            );
        }
    }

    #[test]
    fn nothing_is_granted_that_does_not_exist() {
        let definition =
            AgentDefinition::parse(&json!({"name": "A", "kind": "codeact", "tools": ["x"]}))
                .unwrap();
        assert_eq!(
            granted(&definition, Template::Default, &[], true),
            Vec::<&str>::new()
        );
    }
}
