//! What a decide step sends to its model, and how the decision log has it afterwards: the system prompt in its sections
//! and the tools, kept once under their hash, and the messages, which are made anew from the feed.

pub mod history;

use crate::{
    domain::{agent::RosterLines, replay::NewProfile},
    llm::ToolSpec,
    prompts::{Section, Sections},
};
use serde_json::{Value, json};

pub const INSTRUCTIONS: &str = "instructions";
pub const ROSTER: &str = "roster";

/// A system prompt with its tools.
#[derive(Clone, Debug, PartialEq)]
pub struct SentPrompt {
    pub sections: Sections,
    pub tools: Vec<ToolSpec>,
}

impl SentPrompt {
    /// As it is stored. Schemas are text: `jsonb` would put their keys in another order, and a replay sends what was sent.
    pub fn record(sections: &Sections, tools: &[ToolSpec]) -> Value {
        let sections: Vec<Value> = sections
            .0
            .iter()
            .map(|s| json!({"name": s.name, "text": s.text}))
            .collect();
        let tools: Vec<Value> = tools
            .iter()
            .map(|t| {
                let parameters = t.parameters.to_string();
                json!({"name": t.name, "description": t.description, "parameters": parameters})
            })
            .collect();
        json!({"sections": sections, "tools": tools})
    }

    /// `None`: the record is of another form.
    pub fn read(record: &Value) -> Option<Self> {
        let list = |key: &str| record.get(key)?.as_array();
        let text = |value: &Value, key: &str| Some(value.get(key)?.as_str()?.to_owned());
        let sections = list("sections")?.iter().map(|s| {
            Some(Section {
                name: text(s, "name")?,
                text: text(s, "text")?,
            })
        });
        let tools = list("tools")?.iter().map(|t| {
            Some(ToolSpec {
                name: text(t, "name")?,
                description: text(t, "description")?,
                parameters: serde_json::from_str(t.get("parameters")?.as_str()?).ok()?,
            })
        });
        Some(Self {
            sections: Sections(sections.collect::<Option<_>>()?),
            tools: tools.collect::<Option<_>>()?,
        })
    }

    pub fn section_mut(&mut self, name: &str) -> Option<&mut Section> {
        self.sections.0.iter_mut().find(|s| s.name == name)
    }

    /// Shows this agent of the roster with another profile. `false`: the roster does not show it.
    pub fn change_profile(&mut self, profile: &NewProfile) -> bool {
        let Some(roster) = self.section_mut(ROSTER) else {
            return false;
        };
        let Some(lines) = RosterLines::all(&roster.text)
            .into_iter()
            .find(|lines| lines.id == profile.agent)
        else {
            return false;
        };
        let (start, text) = (lines.start, lines.text);
        let head = text.lines().next().unwrap_or_default();
        let end = start + text.len();
        let texts = profile.entry.to_string();
        let (_, texts) = texts.split_once('\n').unwrap_or_default();
        let changed = format!("{head}\n{texts}");
        roster.text.replace_range(start..end, &changed);
        true
    }
}
