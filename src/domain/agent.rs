//! What an agent is: instructions, model, tools and settings, as an author writes them and as a version keeps them.
//!
//! What comes from outside goes through `parse` or `patched`, which are strict and name the path of every problem. What
//! comes back from the database is read leniently (serde, absent fields get their default), so that an old version
//! stays readable. Whether the named tools exist is not asked here: `grants` decides what is usable at run time.

mod mentions;
mod new_profile;
mod parse;
mod roster_entry;

pub use super::fields::{FieldError, InvalidDefinition};
pub use mentions::{Unresolved, resolve_mentions};
pub use new_profile::NewProfile;
pub(in crate::domain) use parse::merge_patch;
pub use roster_entry::{RosterEntry, RosterLines, harmless, harmless_name};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

pub const NAME_CHARS_MAX: usize = 100;
pub const INSTRUCTIONS_CHARS_MAX: usize = 200_000;
pub const MAX_ITERATIONS_DEFAULT: u32 = 50;
/// Of each text of a delegation profile.
pub const PROFILE_CHARS_MAX: usize = 4_000;

/// Whether the agent was born with its workspace (A-3) or made by an author. Fixed for life, hence no part of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, sqlx::Type, ToSchema)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum Template {
    Default,
    Custom,
}

impl Template {
    pub fn as_str(self) -> &'static str {
        match self {
            Template::Default => "default",
            Template::Custom => "custom",
        }
    }
}

/// How the agent works: tool calls in a loop, or code that calls tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AgentKind {
    #[default]
    Loop,
    CodeAct,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct AgentDefinition {
    /// 1 to 100 characters on one line.
    pub name: String,
    /// At most 200,000 characters.
    pub instructions: String,
    pub kind: AgentKind,
    /// Names of tools. Empty: the default-enabled ones.
    pub tools: Vec<String>,
    /// In the order in which the agent goes through them.
    pub phases: Vec<Phase>,
    pub model: ModelSettings,
    /// JSON Schema of the final answer.
    #[schema(value_type = Option<Object>)]
    pub output_schema: Option<Value>,
    /// Decide steps per user message, 1 to 1,000.
    pub max_iterations: u32,
    /// Other workspaces may delegate to the published version.
    pub is_public: bool,
    /// Settings. Known keys are checked, all others are kept as they are.
    #[schema(value_type = Object)]
    pub config: Map<String, Value>,
}

impl Default for AgentDefinition {
    fn default() -> Self {
        AgentDefinition {
            name: String::new(),
            instructions: String::new(),
            kind: AgentKind::default(),
            tools: Vec::new(),
            phases: Vec::new(),
            model: ModelSettings::default(),
            output_schema: None,
            max_iterations: MAX_ITERATIONS_DEFAULT,
            is_public: false,
            config: Map::new(),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Phase {
    pub name: String,
    pub instructions: String,
    pub tools: Vec<String>,
}

/// Which model decides. Whatever is absent comes from the workspace's default provider, else from the deployment's
/// configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ModelSettings {
    /// A model provider of the workspace, else one of the deployment: openai, anthropic, gemini, offline.
    pub provider: Option<String>,
    pub name: Option<String>,
    /// 0 to 2.
    pub temperature: Option<f64>,
    /// 1 to 1,000,000.
    pub max_output_tokens: Option<u32>,
    pub reasoning: Option<Reasoning>,
}

/// How much the model may think before it answers. Absent: the provider's own default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Reasoning {
    Disabled,
    Low,
    Medium,
    High,
}

/// What others are told about an agent (A-20).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile<'a> {
    pub description: &'a str,
    pub example_input: &'a str,
}

impl AgentDefinition {
    /// `config.auto_delegate`: this agent may hand work to others (A-13). Absent means yes.
    pub fn may_delegate(&self) -> bool {
        self.flag("auto_delegate").unwrap_or(true)
    }

    /// `config.delegation_enabled`: others may hand work to this agent, as far as the roster goes (A-20). Absent means yes.
    pub fn accepts_delegation(&self) -> bool {
        self.flag("delegation_enabled").unwrap_or(true)
    }

    /// The profile, if it says what the agent is good for: a blank description is none.
    pub fn profile(&self) -> Option<Profile<'_>> {
        let profile = self.config.get("delegation_profile")?;
        let text = |key| {
            profile
                .get(key)
                .and_then(Value::as_str)
                .unwrap_or("")
                .trim()
        };
        let description = text("description");
        (!description.is_empty()).then(|| Profile {
            description,
            example_input: text("example_input"),
        })
    }

    fn flag(&self, key: &str) -> Option<bool> {
        self.config.get(key).and_then(Value::as_bool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with_config(config: Value) -> AgentDefinition {
        AgentDefinition::parse(&json!({"name": "A", "config": config})).unwrap()
    }

    #[test]
    fn absent_settings_mean_delegation_is_allowed() {
        // A-13, A-20
        for (config, may_delegate, accepts) in [
            (json!({}), true, true),
            (
                json!({"auto_delegate": true, "delegation_enabled": true}),
                true,
                true,
            ),
            (json!({"auto_delegate": false}), false, true),
            (json!({"delegation_enabled": false}), true, false),
        ] {
            let agent = with_config(config.clone());
            assert_eq!(
                (agent.may_delegate(), agent.accepts_delegation()),
                (may_delegate, accepts),
                "{config}"
            );
        }
    }

    #[test]
    fn a_profile_needs_a_description() {
        // A-21
        for (config, expected) in [
            (json!({}), None),
            (json!({"delegation_profile": {}}), None),
            (
                json!({"delegation_profile": {"description": " \n ", "example_input": "x"}}),
                None,
            ),
            (
                json!({"delegation_profile": {"description": " Finds facts "}}),
                Some(("Finds facts", "")),
            ),
            (
                json!({"delegation_profile": {"description": "d", "example_input": " e "}}),
                Some(("d", "e")),
            ),
        ] {
            let agent = with_config(config.clone());
            let profile = agent
                .profile()
                .map(|profile| (profile.description, profile.example_input));
            assert_eq!(profile, expected, "{config}");
        }
    }

    #[test]
    fn a_stored_version_of_another_release_stays_readable() {
        let stored =
            r#"{"name": "Old", "colour": "red", "model": {"temperature": 0.70, "seed": 1}}"#;
        let read: AgentDefinition = serde_json::from_str(stored).unwrap();
        let model = ModelSettings {
            temperature: Some(0.7),
            ..ModelSettings::default()
        };
        assert_eq!(
            read,
            AgentDefinition {
                name: "Old".into(),
                model,
                ..AgentDefinition::default()
            }
        );
    }
}
