//! A configured tool: a base tool with some of its arguments bound by an author (L-2). What is bound is neither shown to
//! the model nor taken from it (D-14).
//!
//! A binding is a value, or the name of a credential whose value is put in when the tool is called. Which base tools there
//! are is given as data. What an `http_request` is bound to is read in `http_request`.

use super::agent::merge_patch;
use super::fields::{Fields, InvalidDefinition, read_object};
use super::http_request;
use super::ids::{AgentId, CredentialId};
use serde_json::{Map, Value, json};

/// The argument of `delegate_tasks` that only an author can give: ids of agents, separated by commas (D-12).
pub const ALLOWED_AGENTS: &str = "allowed_agent_group_ids";
const ALLOWED_AGENTS_MAX: usize = 100;
const DESCRIPTION_CHARS_MAX: usize = 4_000;
const TEXT_CHARS_MAX: usize = 10_000;
/// What providers take as the name of a tool.
const NAME_CHARS_MAX: usize = 64;
/// Names of base tools to come.
const RESERVED: [&str; 2] = ["dataset_rows", "list_tasks"];

/// What authors can build on.
#[derive(Clone, Debug)]
pub struct Base {
    pub name: &'static str,
    /// Each argument with its schema, those among them that only an author can give.
    pub arguments: Map<String, Value>,
    /// What it is given is stored and shown, as a question to the user is: no place for a secret.
    pub keeps_arguments: bool,
    /// Those of `arguments` that only an author can give: rules about the call, no part of it.
    pub author_only: Vec<String>,
    /// A tool on it may declare parameters of its own, and bind templates, objects and lists.
    pub takes_parameters: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ConfiguredTool {
    /// As agents list it in `tools`, and as models call it.
    pub name: String,
    pub base_tool: String,
    pub description: String,
    /// The one agent that may use it; `None`: every agent of the workspace that lists it (A-14).
    pub agent: Option<AgentId>,
    /// JSON Schema of what the model gives instead of the base tool's arguments (L-3).
    pub parameters: Option<Value>,
    pub bindings: Map<String, Value>,
}

impl ConfiguredTool {
    pub fn parse(body: &Value, bases: &[Base]) -> Result<Self, InvalidDefinition> {
        read_object(body, |fields| read(fields, bases))
    }

    /// This tool changed by a JSON merge patch (RFC 7396): null takes a field back to its default, and unbinds an argument.
    pub fn patched(&self, patch: &Value, bases: &[Base]) -> Result<Self, InvalidDefinition> {
        if !patch.is_object() {
            return Self::parse(patch, bases); // refused, with the reason
        }
        let mut merged = json!({
            "name": self.name,
            "base_tool": self.base_tool,
            "description": self.description,
            "agent_group_id": self.agent,
            "parameters": self.parameters,
            "bindings": self.bindings,
        });
        // A binding is one value: a credential that is bound in the place of another does not merge with it.
        if let (Some(Value::Object(new)), Some(Value::Object(old))) =
            (patch.get("bindings"), merged.get_mut("bindings"))
        {
            old.retain(|argument, _| !new.contains_key(argument));
        }
        // Nor does a schema with another one.
        if patch.get("parameters").is_some() {
            merged["parameters"] = Value::Null;
        }
        merge_patch(&mut merged, patch);
        Self::parse(&merged, bases)
    }

    /// The schema that the model sees: its own parameters, or that of the base without what is bound (D-14).
    pub fn schema(&self, base: &Value) -> Value {
        if let Some(parameters) = &self.parameters {
            return parameters.clone();
        }
        let mut schema = base.clone();
        if let Some(Value::Object(properties)) = schema.get_mut("properties") {
            properties.retain(|argument, _| !self.bindings.contains_key(argument));
        }
        if let Some(Value::Array(required)) = schema.get_mut("required") {
            let is_bound = |name: &Value| {
                name.as_str()
                    .is_some_and(|name| self.bindings.contains_key(name))
            };
            required.retain(|name| !is_bound(name));
        }
        schema
    }

    /// The arguments of the base tool: the model's with what is bound in the place of whatever the model sent there (D-14).
    /// `secret` gives the value of a credential. Arguments that are no object are left to the base tool to refuse. The
    /// error is for the model.
    pub fn fill<'s>(
        &self,
        arguments: &str,
        base: &Base,
        secret: impl Fn(CredentialId) -> Option<&'s str>,
    ) -> Result<String, String> {
        let Ok(Value::Object(mut arguments)) = serde_json::from_str(arguments) else {
            return Ok(arguments.to_owned());
        };
        let is_rule = |argument: &String| base.author_only.contains(argument);
        if let Some(parameters) = &self.parameters {
            let mut bindings = self.bindings.clone();
            bindings.retain(|argument, _| !is_rule(argument));
            let arguments = Value::Object(arguments);
            let filled = http_request::fill(&bindings, parameters, &arguments, &secret)
                .map_err(|fault| format!("{}: {fault}", self.name))?;
            return Ok(Value::Object(filled).to_string());
        }
        for (argument, bound) in &self.bindings {
            arguments.shift_remove(argument);
            if !is_rule(argument) {
                let value = http_request::with_secrets(bound, &secret)
                    .map_err(|fault| format!("{}: {fault}", self.name))?;
                arguments.insert(argument.clone(), value);
            }
        }
        Ok(Value::Object(arguments).to_string())
    }

    /// The credentials that a call needs, each once.
    pub fn credentials(&self) -> Vec<CredentialId> {
        let mut ids = Vec::new();
        for bound in self.bindings.values() {
            collect_credentials(bound, &mut ids);
        }
        ids.sort();
        ids.dedup();
        ids
    }

    /// The agents that a delegation through this tool may reach; empty means any (D-12).
    pub fn allowed_agents(&self) -> Vec<AgentId> {
        let listed = self.bindings.get(ALLOWED_AGENTS).and_then(Value::as_str);
        let ids = listed.unwrap_or_default().split(',');
        ids.filter_map(|id| id.trim().parse().ok()).collect()
    }
}

/// The credential that a binding names, if it names one, and what stands before its value.
pub(in crate::domain) fn bound_credential(binding: &Value) -> Option<(CredentialId, &str)> {
    let fields = binding.as_object()?;
    let id = fields.get("credential")?.as_str()?.parse().ok()?;
    match (fields.len(), fields.get("prefix")) {
        (1, None) => Some((id, "")),
        (2, Some(prefix)) => Some((id, prefix.as_str()?)),
        _ => None,
    }
}

fn collect_credentials(bound: &Value, ids: &mut Vec<CredentialId>) {
    match bound {
        _ if bound_credential(bound).is_some() => ids.extend(bound_credential(bound).map(|c| c.0)),
        Value::Array(items) => items.iter().for_each(|item| collect_credentials(item, ids)),
        Value::Object(fields) => fields
            .values()
            .for_each(|field| collect_credentials(field, ids)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn read(fields: &mut Fields<'_>, bases: &[Base]) -> ConfiguredTool {
    let name = fields.required_line("name", NAME_CHARS_MAX);
    let base_tool = fields.required_line("base_tool", NAME_CHARS_MAX);
    let description = fields.text("description", DESCRIPTION_CHARS_MAX);
    let agent = fields.line("agent_group_id", 100).and_then(|id| {
        let parsed = id.parse().ok();
        if parsed.is_none() {
            fields
                .problems
                .add("agent_group_id", "expected the id of an agent");
        }
        parsed
    });
    let parameters = fields.json_object("parameters").map(Value::Object);
    let mut bindings = fields.json_object("bindings").unwrap_or_default();
    let is_good = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    // An empty one is faulty already.
    let is_callable = name.is_empty()
        || (name.chars().all(is_good) && name.starts_with(|c: char| c.is_ascii_alphabetic()));
    let taken = bases.iter().any(|base| base.name == name) || RESERVED.contains(&name.as_str());
    if taken {
        fields
            .problems
            .add("name", "is the name of a base tool; choose another one");
    } else if !is_callable {
        fields.problems.add(
            "name",
            "must be letters, digits, `_` and `-` only, beginning with a letter: models call the tool by it",
        );
    }
    match bases.iter().find(|base| base.name == base_tool) {
        Some(base) => {
            check_bindings(&mut bindings, base, fields);
            if base.takes_parameters {
                http_request::check(&bindings, parameters.as_ref(), fields.problems);
            } else if parameters.is_some() {
                fields.problems.add(
                    "parameters",
                    "only a tool whose base_tool is http_request takes parameters",
                );
            }
        }
        None if base_tool.is_empty() => {}
        None => {
            let names: Vec<_> = bases.iter().map(|base| base.name).collect();
            fields.problems.add(
                "base_tool",
                &format!("expected one of {}", names.join(", ")),
            );
        }
    }
    ConfiguredTool {
        name,
        base_tool,
        description,
        agent,
        parameters,
        bindings,
    }
}

fn check_bindings(bindings: &mut Map<String, Value>, base: &Base, fields: &mut Fields<'_>) {
    // A null binds nothing.
    bindings.retain(|_, value| !value.is_null());
    for (argument, value) in bindings.iter_mut() {
        let shown: String = argument.chars().take(100).collect();
        let path = format!("bindings.{shown}");
        let fault = match base.arguments.get(argument) {
            Some(_) if argument == ALLOWED_AGENTS => allowed_list(value),
            Some(schema) => fault_of(value, schema, base),
            None => {
                let names: Vec<_> = base.arguments.keys().map(String::as_str).collect();
                Some(format!(
                    "is no argument of {}; it has {}",
                    base.name,
                    names.join(", ")
                ))
            }
        };
        if let Some(fault) = fault {
            fields.problems.add(&path, &fault);
        }
    }
}

/// Brings the list into one form.
fn allowed_list(value: &mut Value) -> Option<String> {
    const EXPECTED: &str = "expected ids of agents, separated by commas";
    let Some(text) = value.as_str() else {
        return Some(EXPECTED.into());
    };
    let mut ids: Vec<AgentId> = Vec::new();
    for id in text.split(',').map(str::trim).filter(|id| !id.is_empty()) {
        match id.parse() {
            Ok(id) if ids.contains(&id) => {}
            Ok(id) => ids.push(id),
            Err(_) => return Some(EXPECTED.into()),
        }
    }
    if ids.len() > ALLOWED_AGENTS_MAX {
        return Some(format!(
            "has {} ids; at most {ALLOWED_AGENTS_MAX} are allowed",
            ids.len()
        ));
    }
    let ids: Vec<String> = ids.iter().map(AgentId::to_string).collect();
    *value = ids.join(",").into();
    None
}

fn fault_of(value: &Value, schema: &Value, base: &Base) -> Option<String> {
    let kind = schema["type"].as_str().unwrap_or_default();
    // Objects and anything else, which only a base with templates has bound.
    if base.takes_parameters && matches!(kind, "object" | "") {
        return None;
    }
    if let Value::Object(_) = value {
        return match kind {
            _ if bound_credential(value).is_none() => Some(
                "expected a value, or {\"credential\": ID} with the id of a credential".to_owned(),
            ),
            "string" if base.keeps_arguments => Some(format!(
                "{} stores and shows what it is given, so no credential can be bound to it",
                base.name
            )),
            "string" => None,
            _ => Some("a credential can be bound to a text only".to_owned()),
        };
    }
    let above = schema["exclusiveMinimum"].as_f64();
    let least = schema["minimum"].as_f64();
    let in_range = |number: f64| {
        above.is_none_or(|above| number > above) && least.is_none_or(|least| number >= least)
    };
    let range = match (above, least) {
        (Some(above), _) => format!(" above {above}"),
        (None, Some(least)) => format!(" of at least {least}"),
        (None, None) => String::new(),
    };
    let chars_max = schema["maxLength"]
        .as_u64()
        .map_or(TEXT_CHARS_MAX, |max| max as usize);
    match kind {
        "string" => match value.as_str().map(|text| text.chars().count()) {
            None => Some("expected a string".to_owned()),
            Some(chars) if chars > chars_max => Some(format!(
                "is {chars} characters long; at most {chars_max} are allowed"
            )),
            Some(_) => match schema["enum"].as_array() {
                Some(choices) if !choices.contains(value) => {
                    let choices: Vec<&str> = choices.iter().filter_map(Value::as_str).collect();
                    Some(format!("expected one of {}", choices.join(", ")))
                }
                Some(_) | None => None,
            },
        },
        "number" => {
            (!value.as_f64().is_some_and(in_range)).then(|| format!("expected a number{range}"))
        }
        "integer" => {
            let whole = value.as_i64().map(|number| number as f64);
            (!whole.is_some_and(in_range)).then(|| format!("expected a whole number{range}"))
        }
        "boolean" => (!value.is_boolean()).then(|| "expected true or false".to_owned()),
        _ => Some("can not be bound: only texts, numbers and booleans can".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bases() -> Vec<Base> {
        let base = |name, keeps_arguments, arguments: Value| Base {
            name,
            arguments: arguments.as_object().unwrap().clone(),
            keeps_arguments,
            author_only: vec![ALLOWED_AGENTS.into()],
            takes_parameters: false,
        };
        vec![
            base(
                "delegate_tasks",
                true,
                json!({"tasks": {"type": "array"}, "timeout_minutes": {"type": "number", "exclusiveMinimum": 0},
                    "async": {"type": "boolean"}, "allowed_agent_group_ids": {"type": "string"}}),
            ),
            base(
                "read",
                false,
                json!({"key": {"type": "string", "maxLength": 20}, "offset": {"type": "integer", "minimum": 0}}),
            ),
        ]
    }

    fn parse(body: Value) -> Result<ConfiguredTool, String> {
        ConfiguredTool::parse(&body, &bases()).map_err(|error| error.to_string())
    }

    const ID: &str = "0193a5b0-0000-7000-8000-000000000001";

    #[test]
    fn every_fault_of_a_configured_tool_is_named() {
        // L-2
        let with = |base: &str, bindings: Value| json!({"name": "t", "base_tool": base, "bindings": bindings});
        let long = "x".repeat(21);
        for (body, expected) in [
            (json!({}), "name: is required; base_tool: is required"),
            (
                json!({"name": null, "base_tool": null}),
                "name: is required; base_tool: is required",
            ),
            (
                json!({"name": "x".repeat(65), "base_tool": "read"}),
                "name: is 65 characters long; at most 64",
            ),
            (
                json!({"name": "a b", "base_tool": "read"}),
                "name: must be letters, digits",
            ),
            (
                json!({"name": "1a", "base_tool": "read"}),
                "name: must be letters, digits",
            ),
            (
                json!({"name": "read", "base_tool": "read"}),
                "name: is the name of a base tool",
            ),
            (
                json!({"name": "list_tasks", "base_tool": "read"}),
                "name: is the name of a base tool",
            ),
            (
                json!({"name": "t", "base_tool": "rm"}),
                "base_tool: expected one of delegate_tasks, read",
            ),
            (
                json!({"name": "t", "base_tool": 1}),
                "base_tool: expected a string, got a number",
            ),
            (
                json!({"name": "t", "base_tool": "read", "description": 5}),
                "description: expected a string",
            ),
            (
                json!({"name": "t", "base_tool": "read", "description": "x".repeat(4001)}),
                "description: is 4001 characters",
            ),
            (
                json!({"name": "t", "base_tool": "read", "agent_group_id": "Ada"}),
                "agent_group_id: expected the id",
            ),
            (
                json!({"name": "t", "base_tool": "read", "agent_group_id": 5}),
                "agent_group_id: expected a string",
            ),
            (
                json!({"name": "t", "base_tool": "read", "parameters": {}}),
                "parameters: only a tool whose base_tool",
            ),
            (
                json!({"name": "t", "base_tool": "read", "bindings": []}),
                "bindings: expected an object",
            ),
            (
                json!({"name": "t", "base_tool": "read", "x": 1}),
                "x: is not a known field",
            ),
            (
                with("read", json!({"kee": "x"})),
                "bindings.kee: is no argument of read; it has key, offset",
            ),
            (
                with("read", json!({"key": 5})),
                "bindings.key: expected a string",
            ),
            (
                with("read", json!({"key": long})),
                "bindings.key: is 21 characters long; at most 20",
            ),
            (
                with("read", json!({"offset": 1.5})),
                "bindings.offset: expected a whole number of at least 0",
            ),
            (
                with("read", json!({"offset": -1})),
                "bindings.offset: expected a whole number of at least 0",
            ),
            (
                with("read", json!({"key": {"credential": "x"}})),
                "bindings.key: expected a value, or {\"credential\": ID}",
            ),
            (
                with("read", json!({"key": {"credential": ID, "x": 1}})),
                "bindings.key: expected a value, or",
            ),
            (
                with("read", json!({"offset": {"credential": ID}})),
                "bindings.offset: a credential can be bound to a text only",
            ),
            (
                with("delegate_tasks", json!({"timeout_minutes": 0})),
                "bindings.timeout_minutes: expected a number above 0",
            ),
            (
                with("delegate_tasks", json!({"async": "yes"})),
                "bindings.async: expected true or false",
            ),
            (
                with("delegate_tasks", json!({"tasks": []})),
                "bindings.tasks: can not be bound",
            ),
            (
                with("delegate_tasks", json!({"allowed_agent_group_ids": [ID]})),
                "bindings.allowed_agent_group_ids: expected ids",
            ),
            (
                with("delegate_tasks", json!({"allowed_agent_group_ids": "Ada"})),
                "bindings.allowed_agent_group_ids: expected ids",
            ),
        ] {
            let error = parse(body.clone()).unwrap_err();
            assert!(error.starts_with(expected), "{body}: {error}");
        }
        let mut kept = bases();
        kept[1].keeps_arguments = true;
        let body = with("read", json!({"key": {"credential": ID}}));
        let error = ConfiguredTool::parse(&body, &kept).unwrap_err().to_string();
        assert!(error.contains("stores and shows"), "{error}");
    }

    #[test]
    fn what_is_bound_is_not_in_the_schema_and_overrides_the_model() {
        // D-14
        let tool = parse(json!({"name": "t", "base_tool": "read", "bindings": {"key": {"credential": ID}, "offset": 7}})).unwrap();
        let base = json!({"type": "object", "properties": {"key": {}, "offset": {}, "more": {}}, "required": ["key", "more"],
            "additionalProperties": false});
        assert_eq!(
            tool.schema(&base),
            json!({"type": "object", "properties": {"more": {}}, "required": ["more"], "additionalProperties": false})
        );
        let id: CredentialId = ID.parse().unwrap();
        assert_eq!(tool.credentials(), [id]);
        let secret = |asked| (asked == id).then_some("s3cr3t");
        let filled = tool
            .fill(
                r#"{"offset": 1, "more": 1.50, "key": "mine"}"#,
                &bases()[1],
                secret,
            )
            .unwrap();
        assert_eq!(filled, r#"{"more":1.50,"key":"s3cr3t","offset":7}"#);
        assert_eq!(tool.fill("[]", &bases()[1], secret).unwrap(), "[]");
        let without = tool.fill("{}", &bases()[1], |_| None);
        without.expect_err("never without the secret");
    }

    #[test]
    fn an_allowlist_is_a_list_of_ids_and_no_argument_of_the_call() {
        // D-12
        let other = ID.replace("001", "002");
        let list = |text: &str| {
            parse(json!({"name": "t", "base_tool": "delegate_tasks", "bindings": {"allowed_agent_group_ids": text, "async": null}}))
                .unwrap()
        };
        let tool = list(&format!(" {ID}, {other},{ID},"));
        assert_eq!(
            tool.bindings,
            *json!({"allowed_agent_group_ids": format!("{ID},{other}")})
                .as_object()
                .unwrap()
        );
        assert_eq!(
            tool.allowed_agents(),
            [ID.parse().unwrap(), other.parse().unwrap()]
        );
        let filled = tool
            .fill(
                r#"{"allowed_agent_group_ids": "", "tasks": []}"#,
                &bases()[0],
                |_| None,
            )
            .unwrap();
        assert_eq!(filled, r#"{"tasks":[]}"#);
        assert_eq!(list(" , ").allowed_agents(), []);
    }

    #[test]
    fn a_patch_changes_what_it_names() {
        let tool = parse(
            json!({"name": "t", "base_tool": "read", "description": "d", "agent_group_id": ID,
            "bindings": {"key": {"credential": ID}, "offset": 7}}),
        )
        .unwrap();
        let patched = |patch: Value| {
            tool.patched(&patch, &bases())
                .map_err(|error| error.to_string())
        };
        assert_eq!(patched(json!({})).unwrap(), tool);
        let changed =
            patched(json!({"agent_group_id": null, "bindings": {"key": "plain", "offset": null}}))
                .unwrap();
        assert_eq!((changed.agent, changed.description.as_str()), (None, "d"));
        assert_eq!(
            changed.bindings,
            *json!({"key": "plain"}).as_object().unwrap()
        );
        assert!(
            patched(json!({"name": null}))
                .unwrap_err()
                .contains("name: is required")
        );
        assert!(
            patched(json!([]))
                .unwrap_err()
                .contains("expected an object")
        );
    }
}
