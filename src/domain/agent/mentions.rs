//! `@Name` in instructions: whom the author means.
//!
//! A name is looked up in the roster of the prompt, so it means whom the agent can delegate to at this moment. Of two
//! agents with one name the workspace's own is meant, or a stranger could take a name away by publishing it; if that does
//! not decide it, or nobody has the name, the text stays as it is written.

use super::{AgentDefinition, RosterEntry};
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};

/// Mentions that one save is warned of.
const WARNINGS_MAX: usize = 20;

/// Why a mention stays as it is written. The path is that of the text which holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    pub path: String,
    pub reason: String,
}

/// The text with the id of the agent behind each name that means one.
pub fn resolve_mentions<'t>(text: &'t str, roster: &[RosterEntry]) -> Cow<'t, str> {
    if !text.contains('@') {
        return Cow::Borrowed(text);
    }
    let names = Names::of(roster);
    let mut resolved = String::new();
    let mut from = 0;
    for mention in names.mentions(text) {
        if let Meaning::One(entry) = mention.meaning {
            resolved.push_str(&text[from..mention.end]);
            resolved.push_str(&format!(" (agent_group_id: {})", entry.id));
            from = mention.end;
        }
    }
    if from == 0 {
        return Cow::Borrowed(text);
    }
    resolved.push_str(&text[from..]);
    Cow::Owned(resolved)
}

impl AgentDefinition {
    /// The mentions in its instructions and those of its phases that mean nobody, each once. `None` is the roster of an
    /// agent that can not delegate.
    pub fn unresolved_mentions(&self, roster: Option<&[RosterEntry]>) -> Vec<Unresolved> {
        let names = Names::of(roster.unwrap_or_default());
        let phases = self.phases.iter().enumerate().map(|(at, phase)| {
            let path = format!("phases[{at}].instructions");
            (path, phase.instructions.as_str())
        });
        let own = ("instructions".to_owned(), self.instructions.as_str());
        let mut told = BTreeSet::new();
        let mut unresolved = Vec::new();
        for (path, text) in std::iter::once(own).chain(phases) {
            for Mention { name, meaning, .. } in names.mentions(text) {
                let why = match (meaning, roster) {
                    (Meaning::One(_), _) => continue,
                    (_, None) => "this agent can not delegate, so names mean nothing to it",
                    (Meaning::Nobody, _) => "no agent that it can delegate to has this name",
                    (Meaning::Several, _) => {
                        "several agents that it can delegate to have this name"
                    }
                };
                if unresolved.len() < WARNINGS_MAX && told.insert(name) {
                    unresolved.push(Unresolved {
                        path: path.clone(),
                        reason: format!("`@{name}` stays as it is written: {why}"),
                    });
                }
            }
        }
        unresolved
    }
}

#[derive(Clone, Copy)]
enum Meaning<'r> {
    One(&'r RosterEntry),
    Several,
    Nobody,
}

struct Mention<'t, 'r> {
    name: &'t str,
    /// Where the text goes on.
    end: usize,
    meaning: Meaning<'r>,
}

struct Names<'r> {
    by_name: HashMap<&'r str, Meaning<'r>>,
    /// In bytes.
    lengths: BTreeSet<usize>,
}

impl<'r> Names<'r> {
    fn of(roster: &'r [RosterEntry]) -> Self {
        let mut by_name: HashMap<&str, Meaning<'r>> = HashMap::new();
        // A workspace's own first: those of others only take names that are free.
        for public in [false, true] {
            let mut taken: HashMap<&str, Meaning<'r>> = HashMap::new();
            for entry in roster.iter().filter(|entry| entry.public == public) {
                let meaning = taken.entry(&entry.name);
                meaning
                    .and_modify(|meaning| *meaning = Meaning::Several)
                    .or_insert(Meaning::One(entry));
            }
            for (name, meaning) in taken {
                by_name.entry(name).or_insert(meaning);
            }
        }
        let lengths = by_name.keys().map(|name| name.len()).collect();
        Self { by_name, lengths }
    }

    /// In the order of the text. Of the names that fit, the longest counts.
    fn mentions<'t>(&self, text: &'t str) -> Vec<Mention<'t, 'r>> {
        let mut mentions: Vec<Mention<'t, 'r>> = Vec::new();
        for (at, _) in text.match_indices('@') {
            let is_inside = mentions.last().is_some_and(|last| at < last.end);
            let goes_on = text[..at].chars().next_back().is_some_and(continues);
            if is_inside || goes_on {
                continue; // ada@example.com
            }
            let rest = &text[at + 1..];
            let known = self.lengths.iter().rev().find_map(|length| {
                let (name, after) = rest.split_at_checked(*length)?;
                let meaning = self.by_name.get(name)?;
                is_end_of_name(after).then_some((name, *meaning))
            });
            let (name, meaning) = known.unwrap_or_else(|| (first_word(rest), Meaning::Nobody));
            if !name.is_empty() {
                let end = at + 1 + name.len();
                mentions.push(Mention { name, end, meaning });
            }
        }
        mentions
    }
}

fn continues(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '@'
}

/// `@Research` is not meant by `@Research-Team`; it is by `@Research's` and at the end of a sentence.
fn is_end_of_name(after: &str) -> bool {
    !after.trim_start_matches(['-', '.']).starts_with(continues)
}

fn first_word(text: &str) -> &str {
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
    let word = text.split(|c| !is_part(c)).next().unwrap_or_default();
    word.trim_end_matches(['-', '.'])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::ids::AgentId;
    use serde_json::json;
    use uuid::Uuid;

    fn entry(name: &str, id: u128) -> RosterEntry {
        let config = json!({"delegation_profile": {"description": "helps"}});
        let definition = AgentDefinition {
            name: name.to_owned(),
            config: config.as_object().unwrap().clone(),
            ..AgentDefinition::default()
        };
        RosterEntry::new(AgentId(Uuid::from_u128(id)), &definition).unwrap()
    }

    fn roster() -> Vec<RosterEntry> {
        vec![
            entry("Ada", 1),
            entry("Ada Lovelace", 2),
            entry("C# Expert", 3),
            entry("Twin", 4),
            entry("Twin", 5),
            entry("Zoë", 6),
            entry("Lent", 7).lent(),
            entry("Lent Twin", 8).lent(),
            entry("Lent Twin", 9).lent(),
            entry("Ada", 10).lent(),
        ]
    }

    #[test]
    fn a_name_that_means_one_agent_is_followed_by_its_id() {
        // `#N` stands for the id N.
        for (text, expected) in [
            ("Ask @Ada.", "Ask @Ada#1."),
            ("@Ada, then @Zoë's notes", "@Ada#1, then @Zoë#6's notes"),
            ("(@Ada Lovelace)", "(@Ada Lovelace#2)"),
            ("@Ada Lovelaces", "@Ada#1 Lovelaces"),
            ("@C# Expert: go", "@C# Expert#3: go"),
            ("@Lent", "@Lent#7"),
            ("- @Ada\n- @Ada", "- @Ada#1\n- @Ada#1"),
            // Not one name: as written.
            ("@Twin @Lent Twin", "@Twin @Lent Twin"),
            (
                "@ada @Adam @Ada-Team @Ada.Team @Ada_1",
                "@ada @Adam @Ada-Team @Ada.Team @Ada_1",
            ),
            ("me@Ada @@Ada @ Ada @", "me@Ada @@Ada @ Ada @"),
            ("", ""),
        ] {
            let mut resolved = resolve_mentions(text, &roster()).into_owned();
            for n in 1..=10 {
                let id = format!(" (agent_group_id: {})", Uuid::from_u128(n));
                resolved = resolved.replace(&id, &format!("#{n}"));
            }
            assert_eq!(resolved, expected);
        }
        assert_eq!(resolve_mentions("@Ada", &[]), "@Ada");
    }

    #[test]
    fn what_stays_as_written_is_reported_once_with_its_place() {
        //
        let agent = AgentDefinition::parse(&json!({
            "name": "A", "instructions": "@Ada @Twin @Nobody. @Nobody me@x.org",
            "phases": [{"name": "P"}, {"name": "Q", "instructions": "@Twin @Noone"}],
        }))
        .unwrap();
        let told = |roster: Option<&[RosterEntry]>| -> Vec<String> {
            let unresolved = agent.unresolved_mentions(roster).into_iter();
            unresolved
                .map(|one| format!("{}: {}", one.path, one.reason))
                .collect()
        };
        let stays = |path: &str, name: &str, why: &str| {
            format!("{path}: `@{name}` stays as it is written: {why}")
        };
        let nobody = "no agent that it can delegate to has this name";
        let several = "several agents that it can delegate to have this name";
        let expected = [
            stays("instructions", "Twin", several),
            stays("instructions", "Nobody", nobody),
            stays("phases[1].instructions", "Noone", nobody),
        ];
        assert_eq!(told(Some(&roster())), expected);
        assert_eq!(
            told(None).len(),
            4,
            "who can not delegate has nobody to name"
        );

        let many: String = (0..100).map(|n| format!("@n{n} ")).collect();
        let agent = AgentDefinition {
            instructions: many,
            ..agent
        };
        assert_eq!(agent.unresolved_mentions(Some(&[])).len(), 20);
    }
}
