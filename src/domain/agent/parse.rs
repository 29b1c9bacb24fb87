//! From JSON that an author sent to a definition, or to the list of everything that is wrong with it.
//!
//! Which fields there are, and their limits. Unknown ones are refused, except below `config`, whose unknown keys are kept
//! untouched. Limits exist so that one agent can not fill a prompt, a page or the database; they are generous, and
//! each message tells them.

use super::{
    AgentDefinition, AgentKind, INSTRUCTIONS_CHARS_MAX, MAX_ITERATIONS_DEFAULT, ModelSettings,
    NAME_CHARS_MAX, PROFILE_CHARS_MAX, Phase, Reasoning,
};
use crate::domain::budget::{Limits, NOTHING};
use crate::domain::fields::{Fields, InvalidDefinition, Problems};
use crate::domain::model_provider;
use crate::domain::output::check_schema;
use serde_json::{Map, Value};

const PHASES_MAX: usize = 50;
const PHASE_INSTRUCTIONS_CHARS_MAX: usize = 50_000;
const MODEL_NAME_CHARS_MAX: usize = 200;
const MAX_ITERATIONS: u64 = 1_000;
const OUTPUT_TOKENS_MAX: u64 = 1_000_000;

impl AgentDefinition {
    /// Reads a whole definition. Absent and null fields get their defaults; `name` is required.
    pub fn parse(body: &Value) -> Result<Self, InvalidDefinition> {
        let mut problems = Problems(Vec::new());
        let definition = match body {
            Value::Object(body) => read_definition(body.clone(), &mut problems),
            other => problems
                .expected("", "an object", other)
                .unwrap_or_default(),
        };
        if problems.0.is_empty() {
            Ok(definition)
        } else {
            Err(InvalidDefinition(problems.0))
        }
    }

    /// This definition changed by a JSON merge patch (RFC 7396): null takes a field back to its default.
    pub fn patched(&self, patch: &Value) -> Result<Self, InvalidDefinition> {
        if !patch.is_object() {
            return AgentDefinition::parse(patch); // refused, with the reason
        }
        let mut merged = serde_json::to_value(self).unwrap_or_default(); // own fields only: it has a JSON form
        merge_patch(&mut merged, patch);
        AgentDefinition::parse(&merged)
    }
}

/// JSON merge patch, RFC 7396.
pub(in crate::domain) fn merge_patch(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    if let Value::Object(fields) = target {
        for (key, change) in patch {
            if change.is_null() {
                fields.shift_remove(key); // keeps the order of the rest
            } else {
                merge_patch(fields.entry(key.clone()).or_insert(Value::Null), change);
            }
        }
    }
}

fn read_definition(body: Map<String, Value>, problems: &mut Problems) -> AgentDefinition {
    let mut fields = Fields {
        at: String::new(),
        map: body,
        problems,
    };
    let name = fields.required_line("name", NAME_CHARS_MAX);
    let instructions = fields.text("instructions", INSTRUCTIONS_CHARS_MAX);
    let kind = fields.choice(
        "kind",
        &[("loop", AgentKind::Loop), ("codeact", AgentKind::CodeAct)],
    );
    let tools = fields.tool_names();
    let phases = fields.list("phases", PHASES_MAX, read_phase);
    let model = fields.object("model").map(ModelSettings::read);
    let output_schema = fields.json_object("output_schema").map(Value::Object);
    let max_iterations = fields.integer("max_iterations", MAX_ITERATIONS);
    let is_public = fields.boolean("is_public");
    let config = fields.json_object("config").unwrap_or_default();
    fields.refuse_the_rest();
    check_config(&config, problems);
    if let Some(schema) = &output_schema {
        problems.0.extend(check_schema("output_schema", schema));
    }
    AgentDefinition {
        name,
        instructions,
        kind: kind.unwrap_or_default(),
        tools,
        phases,
        model: model.unwrap_or_default(),
        output_schema,
        max_iterations: max_iterations.unwrap_or(MAX_ITERATIONS_DEFAULT),
        is_public: is_public.unwrap_or_default(),
        config,
    }
}

fn read_phase(mut fields: Fields<'_>) -> Phase {
    let phase = Phase {
        name: fields.required_line("name", NAME_CHARS_MAX),
        instructions: fields.text("instructions", PHASE_INSTRUCTIONS_CHARS_MAX),
        tools: fields.tool_names(),
    };
    fields.refuse_the_rest();
    phase
}

impl ModelSettings {
    pub(in crate::domain) fn read(mut fields: Fields<'_>) -> Self {
        let model = ModelSettings {
            provider: fields.line("provider", model_provider::NAME_CHARS_MAX),
            name: fields.line("name", MODEL_NAME_CHARS_MAX),
            temperature: fields.number("temperature", 0.0, 2.0),
            max_output_tokens: fields.integer("max_output_tokens", OUTPUT_TOKENS_MAX),
            reasoning: fields.choice(
                "reasoning",
                &[
                    ("disabled", Reasoning::Disabled),
                    ("low", Reasoning::Low),
                    ("medium", Reasoning::Medium),
                    ("high", Reasoning::High),
                ],
            ),
        };
        fields.refuse_the_rest();
        model
    }
}

/// The keys of `config` that mean something. A null is a wrong type too: to unset a key, leave it out (a merge patch
/// has removed it before this is asked).
fn check_config(config: &Map<String, Value>, problems: &mut Problems) {
    for key in ["auto_delegate", "delegation_enabled"] {
        problems.boolean_if_present(config, "config", key);
    }
    if let Some(profile) = problems.object_if_present(config, "config", "delegation_profile") {
        for key in ["description", "example_input"] {
            problems.text_if_present(profile, "config.delegation_profile", key, PROFILE_CHARS_MAX);
        }
    }
    if let Some(budget) = problems.object_if_present(config, "config", "budget") {
        let problems_before = problems.0.len();
        let mut fields = Fields {
            at: "config.budget.".to_owned(),
            map: budget.clone(),
            problems,
        };
        let limits = Limits::read_fields(&mut fields);
        fields.refuse_the_rest();
        if limits.is_empty() && problems.0.len() == problems_before {
            problems.add("config.budget", NOTHING);
        }
    }
    if let Some(settings) = problems.object_if_present(config, "config", "settings") {
        problems.boolean_if_present(settings, "config.settings", "delegate_source_mode");
    }
}

#[cfg(test)]
mod tests;
