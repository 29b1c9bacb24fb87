//! Which message the offline demo model delegates, and to whom: things in a list, each to the agent whose name and
//! description share most words with it.

use super::{QUOTE_CHARS, quote};
use crate::domain::decision::ToolCall;
use crate::llm::{Request, ToolSpec};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};

pub const DELEGATE: &str = "delegate_tasks";
const ROSTER: &str = "# Agents you can delegate to";
/// Marks what this model has delegated, so that it does not split a part once more.
const PART: &str = "This is one part of a larger request";

struct Target<'a> {
    name: &'a str,
    id: &'a str,
    keys: HashSet<String>,
}

/// The delegate call for a message that lists several things, if this agent may delegate to anyone.
pub fn split(request: &Request, message: &str) -> Option<(String, Vec<ToolCall>)> {
    if message.contains(PART) {
        return None;
    }
    let tool = delegate_tool(&request.tools)?;
    let (intro, items) = list(message)?;
    let targets = roster(&request.system);
    targets.first()?;
    // The index of the fallback: whom the introduction fits, or else the first of the roster.
    let fallback = best(&targets, intro).unwrap_or(0);
    let mut order: Vec<usize> = Vec::new();
    let mut shares: HashMap<usize, Vec<&str>> = HashMap::new();
    for &item in &items {
        let target = best(&targets, item).unwrap_or(fallback);
        let share = shares.entry(target).or_insert_with(|| {
            order.push(target);
            Vec::new()
        });
        share.push(item);
    }
    let about = quote(intro, QUOTE_CHARS).replace("{{", "{ {");
    let about = if about.is_empty() {
        String::new()
    } else {
        format!(": {about}")
    };
    let prompt =
        format!("{{{{item}}}}\n\n{PART}{about}. Do this part only and answer with its result.");
    let titled = items.iter().all(|item| item.chars().count() <= 120);
    let entries: Vec<Value> = order
        .iter()
        .map(|target| {
            let mut entry = json!({ "agent_group_id": targets[*target].id, "prompt": prompt });
            if titled {
                entry["title"] = json!("{{item}}");
            }
            entry["inputs"] = json!(shares[target]);
            entry
        })
        .collect();
    let names: Vec<_> = order.iter().map(|target| targets[*target].name).collect();
    let names = names.join(", ");
    let text = format!(
        "This is the offline demo model. Your message lists {} things; they go to {names}.",
        items.len()
    );
    let call = ToolCall {
        id: format!("offline_{}", request.messages.len()),
        name: tool.to_owned(),
        arguments: json!({ "tasks": entries }).to_string(),
        invalid: None,
        provider_data: None,
    };
    Some((text, vec![call]))
}

/// The tool itself, or else one that an author has made of it.
fn delegate_tool(tools: &[ToolSpec]) -> Option<&str> {
    let own = tools.iter().find(|tool| tool.name == DELEGATE);
    let of_it = |tool: &&ToolSpec| tool.parameters["properties"]["tasks"].is_object();
    Some(&own.or_else(|| tools.iter().find(of_it))?.name)
}

/// The agents of the roster section. Instructions stand before it, so the last heading is the real one.
fn roster(system: &str) -> Vec<Target<'_>> {
    let Some(start) = system.rfind(ROSTER) else {
        return Vec::new();
    };
    let mut targets: Vec<Target> = Vec::new();
    for line in system[start..]
        .lines()
        .skip(1)
        .take_while(|line| !line.starts_with("# "))
    {
        if let Some((name, id)) = line
            .strip_prefix("- ")
            .and_then(|entry| entry.rsplit_once(" — agent_group_id: "))
        {
            let id = id.split_whitespace().next().unwrap_or_default();
            targets.push(Target {
                name: name.trim(),
                id,
                keys: keys(name).collect(),
            });
        } else if let (Some(target), Some(text)) = (
            targets.last_mut(),
            line.trim_start().strip_prefix("Description:"),
        ) {
            target.keys.extend(keys(text));
        }
    }
    targets
}

/// The target that shares most words with a text; the first of equals, `None` if none shares any.
fn best(targets: &[Target], text: &str) -> Option<usize> {
    let words: HashSet<String> = keys(text).collect();
    let score = |target: &Target| {
        words
            .iter()
            .filter(|key| target.keys.contains(*key))
            .count()
    };
    let (index, target) = targets
        .iter()
        .enumerate()
        .rev()
        .max_by_key(|(_, t)| score(t))?;
    (score(target) > 0).then_some(index)
}

/// Words as they are compared: the first five letters, so that "research" meets "researcher".
fn keys(text: &str) -> impl Iterator<Item = String> + '_ {
    const COMMON: [&str; 14] = [
        "about", "agent", "also", "each", "from", "have", "into", "that", "their", "this", "what",
        "when", "with", "your",
    ];
    text.split(|c: char| !c.is_alphanumeric())
        .filter(|word| word.chars().count() >= 4)
        .map(|word| {
            word.chars()
                .take(5)
                .flat_map(char::to_lowercase)
                .collect::<String>()
        })
        .filter(|key| !COMMON.contains(&key.as_str()))
}

/// What a message says before its list, and the things it lists: lines with bullets or numbers, or a list after a colon.
fn list(message: &str) -> Option<(&str, Vec<&str>)> {
    let mut items: Vec<&str> = Vec::new();
    let mut intro = None;
    let mut at = 0;
    for line in message.split_inclusive('\n') {
        if let Some(item) = bullet(line.trim()) {
            intro.get_or_insert(at);
            items.push(item);
        }
        at += line.len();
    }
    if items.len() < 2 {
        (intro, items) = inline(message)?;
    }
    let intro = message[..intro.unwrap_or(0)].trim().trim_end_matches(':');
    (items.len() >= 2).then_some((intro, items))
}

fn bullet(line: &str) -> Option<&str> {
    let rest = line.strip_prefix(['-', '*', '•']).or_else(|| {
        let digits = line.find(|c: char| !c.is_ascii_digit())?;
        if digits == 0 {
            None
        } else {
            line[digits..].strip_prefix(['.', ')'])
        }
    })?;
    let item = rest.trim();
    (rest.starts_with(char::is_whitespace) && !item.is_empty()).then_some(item)
}

/// `…: flights, a hotel and food` or `…: one; two`. Where the list begins, and its things.
fn inline(message: &str) -> Option<(Option<usize>, Vec<&str>)> {
    let colon = message
        .match_indices(':')
        .rfind(|(at, _)| message[at + 1..].starts_with(char::is_whitespace))?
        .0;
    let rest = message[colon + 1..]
        .trim()
        .trim_end_matches(['.', '!', '?']);
    if rest.contains('\n') {
        return None;
    }
    let separator = if rest.contains(';') { ';' } else { ',' };
    let mut items: Vec<&str> = rest.split(separator).map(str::trim).collect();
    let last = items.pop()?;
    match (last.strip_prefix("and "), last.rsplit_once(" and ")) {
        (Some(last), _) => items.push(last),
        (None, Some((before, last))) if separator == ',' => items.extend([before, last]),
        (None, _) => items.push(last),
    }
    items.retain(|item| !item.trim().is_empty());
    Some((Some(colon), items))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llm::Message;
    use crate::llm::offline::decide;
    use crate::llm::offline::tests::{ask, entries, request};

    #[test]
    fn a_message_that_lists_several_things_is_delegated() {
        // L-10
        for (message, expected) in [
            (
                "Please:\n- find facts about bees\n- find facts about ants",
                &[("1", &["find facts about bees", "find facts about ants"][..])][..],
            ),
            ("1. alpha\n2) beta", &[("1", &["alpha", "beta"])]),
            (
                "Write a poem about each: love, war and peace.",
                &[("2", &["love", "war", "peace"])],
            ),
            (
                "Do: research bees; write a poem, short; and ants",
                &[
                    ("1", &["research bees", "ants"]),
                    ("2", &["write a poem, short"]),
                ],
            ),
            (
                "Do: a poem and the facts",
                &[("2", &["a poem"]), ("1", &["the facts"])],
            ),
            ("* one\n• two\n", &[("1", &["one", "two"])]),
        ] {
            let decision = ask(message);
            let expected: Vec<_> = expected
                .iter()
                .map(|(id, items)| {
                    (
                        (*id).to_owned(),
                        items.iter().map(|item| (*item).to_owned()).collect(),
                    )
                })
                .collect();
            assert_eq!(entries(&decision), expected, "{message}");
            assert!(decision.text.contains("offline demo model"));
        }
    }

    #[test]
    fn other_messages_are_answered() {
        for message in [
            "What is the time?",
            "- only one thing",
            "It is 10:30, and late",
            "See https://example.org/a, b and c",
            "Note: one thing",
            "a, b and c without a colon",
            "",
            &format!("Do: a, b\n\n{PART}: x."),
        ] {
            let decision = ask(message);
            assert_eq!(decision.calls, [], "{message}");
            assert!(decision.text.contains("offline demo model"));
        }
        let no_tool = request(vec![Message::User("- a\n- b".into())], "ask_user");
        assert_eq!(decide(&no_tool).calls, []);
        let mut nobody = request(vec![Message::User("- a\n- b".into())], DELEGATE);
        nobody.system = "no roster".into();
        assert_eq!(decide(&nobody).calls, []);
    }

    #[test]
    fn a_tool_that_an_author_has_made_of_it_does_as_well() {
        // L-2
        let mut request = request(vec![Message::User("- a\n- b".into())], "ask_desk");
        assert_eq!(decide(&request).calls, []);
        request.tools = vec![ToolSpec {
            parameters: json!({"properties": {"tasks": {"type": "array"}}}),
            ..request.tools[0].clone()
        }]
        .into();
        assert_eq!(decide(&request).calls[0].name, "ask_desk");
    }

    #[test]
    fn what_was_delegated_is_not_split_again() {
        let decision = ask("Do these:\n- research: bees, ants and wasps\n- x {{item}}");
        let arguments: Value = serde_json::from_str(&decision.calls[0].arguments).unwrap();
        let prompt = arguments["tasks"][0]["prompt"].as_str().unwrap();
        assert_eq!(prompt.matches("{{item}}").count(), 1);
        let child = prompt.replace("{{item}}", "research: bees, ants and wasps");
        assert_eq!(ask(&child).calls, []);
    }
}
