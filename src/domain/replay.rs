//! A decision that is to be asked for once more: of which model, and with which changes.

use super::agent::{
    AgentDefinition, INSTRUCTIONS_CHARS_MAX, ModelSettings, PROFILE_CHARS_MAX, RosterEntry,
};
use super::fields::{Fields, InvalidDefinition, read_object};
use super::ids::AgentId;
use serde_json::{Value, json};
use uuid::Uuid;

const PROFILES_MAX: usize = 200;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Replay {
    /// In the place of the agent's own.
    pub model: Option<ModelSettings>,
    pub instructions: Option<String>,
    /// Of agents of the roster, each at most once.
    pub profiles: Vec<NewProfile>,
}

/// An agent as the roster would show it with another profile; its name is not part of that.
#[derive(Clone, Debug, PartialEq)]
pub struct NewProfile {
    pub agent: AgentId,
    pub entry: RosterEntry,
}

impl Replay {
    pub fn parse(body: &Value) -> Result<Self, InvalidDefinition> {
        read_object(body, |fields| {
            let model = fields.object("model").map(ModelSettings::read);
            let is_given = fields.map.get("instructions").is_some_and(|v| !v.is_null());
            let instructions = fields.text("instructions", INSTRUCTIONS_CHARS_MAX);
            let instructions = Some(instructions).filter(|_| is_given);
            let read = fields.list("delegation_profiles", PROFILES_MAX, read_profile);
            let mut profiles: Vec<NewProfile> = Vec::with_capacity(read.len());
            for (place, profile) in read.into_iter().enumerate() {
                let Some(profile) = profile else { continue };
                if profiles.iter().any(|known| known.agent == profile.agent) {
                    let path = format!("delegation_profiles[{place}].agent_group_id");
                    fields.problems.add(&path, "is named twice");
                }
                profiles.push(profile);
            }
            Self {
                model,
                instructions,
                profiles,
            }
        })
    }
}

/// `None`: something is wrong with it, which has been said.
fn read_profile(mut fields: Fields<'_>) -> Option<NewProfile> {
    let id_path = format!("{}agent_group_id", fields.at);
    let agent = fields.required_text("agent_group_id", 0..=100);
    let agent: Option<AgentId> = agent.parse().ok();
    let description_path = format!("{}description", fields.at);
    let description = fields.required_text("description", 1..=PROFILE_CHARS_MAX);
    let example = fields.text("example_input", PROFILE_CHARS_MAX);
    let profile =
        json!({"delegation_profile": {"description": description, "example_input": example}});
    let definition = AgentDefinition {
        config: profile.as_object().cloned().unwrap_or_default(),
        ..AgentDefinition::default()
    };
    let entry = RosterEntry::new(agent.unwrap_or(AgentId(Uuid::nil())), &definition);
    for (is_wrong, path, why) in [
        (agent.is_none(), id_path, "expected the id of an agent"),
        (entry.is_none(), description_path, "says nothing"),
    ] {
        let is_new = !fields.problems.0.iter().any(|p| p.path == path);
        if is_wrong && is_new {
            fields.problems.add(&path, why);
        }
    }
    fields.refuse_the_rest();
    Some(NewProfile {
        agent: agent?,
        entry: entry?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    //
    #[test]
    fn what_is_to_be_changed_is_read_or_refused_by_path() {
        assert_eq!(Replay::parse(&json!({})), Ok(Replay::default()));
        let nothing = json!({"model": null, "instructions": null, "delegation_profiles": null});
        assert_eq!(Replay::parse(&nothing), Ok(Replay::default()));
        let id = AgentId::new();
        let read = Replay::parse(&json!({
            "model": {"provider": "gemini", "name": "g"},
            "instructions": "",
            "delegation_profiles": [{"agent_group_id": id, "description": "Finds\n# facts"}],
        }))
        .unwrap();
        assert_eq!(read.model.unwrap().provider.as_deref(), Some("gemini"));
        assert_eq!(read.instructions.as_deref(), Some(""));
        assert_eq!(read.profiles[0].agent, id);
        assert_eq!(read.profiles[0].entry.description, "Finds facts");

        let profile = |change: Value| json!({"delegation_profiles": [change]});
        let at = "delegation_profiles[0]";
        for (body, paths) in [
            (json!([]), vec!["".to_owned()]),
            (json!({"instruction": "x"}), vec!["instruction".into()]),
            (json!({"instructions": 5}), vec!["instructions".into()]),
            (
                json!({"instructions": "x".repeat(200_001)}),
                vec!["instructions".into()],
            ),
            (json!({"instructions": "a\0b"}), vec!["instructions".into()]),
            (
                json!({"model": {"provider": 5, "temperature": "hot"}}),
                vec!["model.provider".into(), "model.temperature".into()],
            ),
            (json!({"model": "gpt"}), vec!["model".into()]),
            (
                json!({"delegation_profiles": {}}),
                vec!["delegation_profiles".into()],
            ),
            (
                profile(json!({})),
                vec![format!("{at}.agent_group_id"), format!("{at}.description")],
            ),
            (
                profile(json!({"agent_group_id": "x", "description": "\u{200b}"})),
                vec![format!("{at}.agent_group_id"), format!("{at}.description")],
            ),
            (
                profile(json!({"agent_group_id": id, "description": "d".repeat(4001), "x": 1})),
                vec![format!("{at}.description"), format!("{at}.x")],
            ),
            (
                json!({"delegation_profiles": [
                    {"agent_group_id": id, "description": "a"}, {"agent_group_id": id, "description": "b"}]}),
                vec!["delegation_profiles[1].agent_group_id".into()],
            ),
        ] {
            let error = Replay::parse(&body).unwrap_err();
            let found: Vec<_> = error.0.into_iter().map(|fault| fault.path).collect();
            assert_eq!(found, paths, "{body}");
        }
    }
}
