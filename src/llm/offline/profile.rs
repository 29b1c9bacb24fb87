//! The delegation profile of an agent, by rule: its name and how its instructions begin.

use super::quote;
use crate::llm::{Message, Request};
use serde_json::json;

const SENTENCE_CHARS: usize = 160;

/// The JSON that is asked for; `None` if something else is.
pub fn profile(request: &Request) -> Option<String> {
    if !request.system.contains("\"example_input\"") || !request.tools.is_empty() {
        return None;
    }
    let Some(Message::User(asked)) = request.messages.last() else {
        return None;
    };
    let name = quote(&quoted_below(asked, "Name:"), SENTENCE_CHARS);
    let instructions = quoted_below(asked, "Instructions:");
    let begins = match first_sentence(&instructions) {
        "" => String::new(),
        sentence => format!(
            " Its instructions begin: {}",
            quote(sentence, SENTENCE_CHARS)
        ),
    };
    let profile = json!({
        "description": format!("Takes work for {name}.{begins} (Written by rule, by the offline demo model.)"),
        "example_input": format!("A piece of work for {name}, with all the facts that it needs."),
    });
    Some(profile.to_string())
}

/// What somebody wrote, from behind the marks of the lines below this head.
fn quoted_below(text: &str, head: &str) -> String {
    let lines = text.lines().skip_while(|line| *line != head).skip(1);
    let quoted = lines.map_while(|line| line.strip_prefix('>'));
    quoted.map(str::trim).collect::<Vec<_>>().join("\n")
}

fn first_sentence(text: &str) -> &str {
    let text = text.trim_start();
    let line = text.lines().next().unwrap_or_default();
    match line.find(". ") {
        Some(end) => &line[..=end],
        None => line,
    }
}
