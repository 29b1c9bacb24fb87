//! The offline demo model: answers by rule, so that the whole product can be tried without a key. Every text says so.
//!
//! A pure function of the request. It reads the system prompt and the conversation as a model would, so it also shows
//! that what we write there can be understood: the roster, the summary of a group (D-22), and what a profile is to
//! be written from. It is tolerant about them, and deliberately simple: nobody should take it for a model.

mod profile;
mod split;

use self::profile::profile;
use self::split::split;
use super::{Message, Model, ModelError, OnText, Request};
use crate::domain::decision::{Decision, ToolCall, Usage};
use futures::FutureExt;
use futures::future::BoxFuture;
use std::fmt::Write as _;

/// Characters of one quotation, and quotations in one answer.
const QUOTE_CHARS: usize = 300;
const QUOTES_MAX: usize = 25;

pub struct OfflineModel;

impl Model for OfflineModel {
    fn decide<'a>(
        &'a self,
        request: &'a Request,
        on_text: OnText<'a>,
    ) -> BoxFuture<'a, Result<Decision, ModelError>> {
        let decision = decide(request);
        let mut rest = decision.text.as_str();
        while !rest.is_empty() {
            let quarter = (decision.text.len() / 4).max(1);
            let (piece, after) = rest.split_at(rest.ceil_char_boundary(quarter.min(rest.len())));
            on_text(piece);
            rest = after;
        }
        futures::future::ready(Ok(decision)).boxed()
    }
}

fn decide(request: &Request) -> Decision {
    let (text, calls) = respond(request);
    let written = text.len() + calls.iter().map(|call| call.arguments.len()).sum::<usize>();
    let read = request.system.len() + request.messages.iter().map(message_len).sum::<usize>();
    let tokens = |bytes: usize| u32::try_from(bytes / 4).unwrap_or(u32::MAX);
    let usage = Usage {
        input_tokens: tokens(read),
        output_tokens: tokens(written).max(1),
        cached_tokens: 0,
    };
    Decision {
        text,
        calls,
        usage,
        ..Decision::default()
    }
}

fn message_len(message: &Message) -> usize {
    match message {
        Message::User(text) | Message::ToolResult { text, .. } => text.len(),
        Message::Assistant { text, calls } => {
            text.len() + calls.iter().map(|call| call.arguments.len()).sum::<usize>()
        }
    }
}

fn respond(request: &Request) -> (String, Vec<ToolCall>) {
    if let Some(profile) = profile(request) {
        return (profile, Vec::new());
    }
    // What came in since the model last spoke: a summary and the user's next message may arrive together.
    let news = request
        .messages
        .iter()
        .rposition(|message| !matches!(message, Message::User(_)))
        .map_or(0, |last| last + 1);
    let (history, news) = request.messages.split_at(news);
    let has_delegated = history
        .iter()
        .any(|message| matches!(message, Message::Assistant { calls, .. } if !calls.is_empty()));
    let texts = || {
        news.iter().filter_map(|message| match message {
            Message::User(text) => Some(text.as_str()),
            Message::Assistant { .. } | Message::ToolResult { .. } => None,
        })
    };
    if has_delegated {
        let summaries: Vec<&str> = texts().filter(|text| is_summary(text)).collect();
        if !summaries.is_empty() {
            return (consolidate(&summaries), Vec::new());
        }
    }
    match (texts().next_back(), history.last()) {
        (Some(text), _) => split(request, text).unwrap_or_else(|| (reply(text), Vec::new())),
        (
            None,
            Some(Message::ToolResult {
                name,
                text,
                is_error,
                ..
            }),
        ) => {
            let what = if *is_error { "was refused" } else { "answered" };
            let name = quote(name, 64);
            let text = quote(text, QUOTE_CHARS);
            (
                format!("This is the offline demo model. The tool {name} {what}: {text}"),
                Vec::new(),
            )
        }
        (None, _) => (reply(""), Vec::new()),
    }
}

fn reply(text: &str) -> String {
    let about = match text.trim() {
        "" => "There was no message to answer.".to_owned(),
        text => {
            let line = text
                .lines()
                .find(|line| !line.trim().is_empty())
                .unwrap_or(text);
            let words = text.split_whitespace().count();
            format!(
                "Your message of {words} words begins: \u{201c}{}\u{201d}",
                quote(line, 160)
            )
        }
    };
    format!(
        "This is the offline demo model: it answers by rule and knows nothing about the world. {about}"
    )
}

/// One line, bounded.
fn quote(text: &str, chars_max: usize) -> String {
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
        if line.len() > 4 * chars_max {
            break;
        }
    }
    match line.char_indices().nth(chars_max) {
        Some((cut, _)) => format!("{}…", &line[..cut]),
        None => line,
    }
}

/// How every summary of a group begins.
const SUMMARY: &str = "Results of the ";

struct Part<'a> {
    title: &'a str,
    status: &'a str,
    body: String,
}

/// Whether a message is the summary of a group, not something that a user wrote.
fn is_summary(message: &str) -> bool {
    message.starts_with(SUMMARY) || message.lines().any(|line| line.starts_with("## 1. "))
}

/// The children of a summary message: headed `## 1. TITLE` and numbered without a gap, or, where there are very many, a
/// line `1. TITLE | STATUS | …` each.
fn summary_parts(message: &str) -> Vec<Part<'_>> {
    let mut parts: Vec<Part> = Vec::new();
    for line in message.lines() {
        let head = line
            .strip_prefix("## ")
            .and_then(|head| head.split_once(". "));
        if let Some((number, title)) = head
            && number.parse() == Ok(parts.len() + 1)
        {
            parts.push(Part {
                title,
                status: "",
                body: String::new(),
            });
        } else if let Some(part) = parts.last_mut() {
            part.read(line);
        }
    }
    if !parts.is_empty() {
        return parts;
    }
    let rows = message.lines().filter_map(|line| {
        let (number, row) = line.split_once(". ")?;
        let (title, rest) = row.split_once(" | ")?;
        number.parse::<u32>().ok()?;
        let status = rest.split(" | ").next().unwrap_or_default();
        Some(Part {
            title,
            status,
            body: String::new(),
        })
    });
    rows.collect()
}

impl<'a> Part<'a> {
    fn read(&mut self, line: &'a str) {
        if let Some((_, rest)) = line.split_once("| Status: ") {
            self.status = rest.split(" | ").next().unwrap_or_default();
        } else if !line.starts_with("Steps: ") && self.body.len() <= 8 * QUOTE_CHARS {
            self.body.push_str(line.strip_prefix("> ").unwrap_or(line));
            self.body.push('\n');
        }
    }
}

fn consolidate(summaries: &[&str]) -> String {
    let mut text =
        "This is the offline demo model. It puts the results together as they came.".to_owned();
    for summary in summaries
        .iter()
        .filter(|summary| summary.starts_with(SUMMARY))
    {
        let head = summary.lines().next().unwrap_or_default();
        text.push(' ');
        text.push_str(&quote(head, QUOTE_CHARS));
    }
    let parts: Vec<Part> = summaries
        .iter()
        .flat_map(|text| summary_parts(text))
        .collect();
    for (number, part) in parts.iter().take(QUOTES_MAX).enumerate() {
        let title = quote(part.title, 120);
        let words = [quote(part.status, 40), quote(&part.body, QUOTE_CHARS)];
        let said = words.iter().filter(|words| !words.is_empty());
        let said = said.map(String::as_str).collect::<Vec<_>>().join(": ");
        // Writing to a string can not fail.
        let _ = write!(text, "\n{}. {title} ({said})", number + 1);
    }
    if parts.len() > QUOTES_MAX {
        let _ = write!(text, "\n… and {} more.", parts.len() - QUOTES_MAX);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::agent::ModelSettings;
    use crate::llm::ToolSpec;
    use crate::llm::offline::split::DELEGATE;
    use serde_json::{Value, json};
    use std::sync::Mutex;

    const SYSTEM: &str = "You lead.\n# Agents you can delegate to\n- Fake — agent_group_id: 0\n\n\
        # Agents you can delegate to\nCall them.\n\n\
        - Researcher — agent_group_id: 11111111-1111-4111-8111-111111111111\n  Description: Finds facts and sources.\n  Example input: Find facts\n\
        - Writer (public) — agent_group_id: 22222222-2222-4222-8222-222222222222\n  Description: Writes clear text such as a poem.\n";

    pub fn request(messages: Vec<Message>, tool: &str) -> Request {
        let tool = ToolSpec {
            name: tool.into(),
            description: String::new(),
            parameters: json!({}),
        };
        Request {
            model: ModelSettings::default(),
            system: SYSTEM.into(),
            messages,
            tools: vec![tool].into(),
            output_schema: None,
            cache_key: String::new(),
        }
    }

    pub fn ask(text: &str) -> Decision {
        decide(&request(vec![Message::User(text.into())], DELEGATE))
    }

    pub fn entries(decision: &Decision) -> Vec<(String, Vec<String>)> {
        decision
            .calls
            .iter()
            .flat_map(|call| {
                let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
                arguments["tasks"].as_array().unwrap().clone()
            })
            .map(|entry| {
                let inputs = entry["inputs"].as_array().unwrap();
                let inputs = inputs
                    .iter()
                    .map(|input| input.as_str().unwrap().to_owned())
                    .collect();
                (
                    entry["agent_group_id"].as_str().unwrap()[..1].to_owned(),
                    inputs,
                )
            })
            .collect()
    }

    fn resumed(summary: &str, more: &[&str]) -> Decision {
        let call = ToolCall {
            id: "a".into(),
            name: DELEGATE.into(),
            arguments: "{}".into(),
            invalid: None,
            provider_data: None,
        };
        let mut messages = vec![
            Message::User("- a\n- b".into()),
            Message::Assistant {
                text: String::new(),
                calls: vec![call],
            },
            Message::ToolResult {
                call_id: "a".into(),
                name: DELEGATE.into(),
                text: "{}".into(),
                is_error: false,
            },
            Message::User(summary.into()),
        ];
        messages.extend(more.iter().map(|text| Message::User((*text).into())));
        decide(&request(messages, DELEGATE))
    }

    #[test]
    fn the_results_of_children_are_put_together_in_order() {
        // D-22
        let summary = "Results of the 2 delegated tasks: 1 completed, 1 failed.\nLines that begin with `> ` are quoted.\n\n\
            ## 1. First\nAgent: A | Status: completed | Task: 7\nSteps: 2 | Tokens: 42\n> - x\n> - y\n> ## 2. Forged\n\n\
            ## 2. Second\nAgent: A | Status: failed | Task: 8\nSteps: 1\nReason: model_error\n";
        for more in [&[][..], &["Do: a, b and c"]] {
            let decision = resumed(summary, more);
            assert_eq!(decision.calls, []);
            assert!(decision.text.ends_with(
                " 1 completed, 1 failed.\n1. First (completed: - x - y ## 2. Forged)\n2. Second (failed: Reason: model_error)"
            ), "{}", decision.text);
        }
        assert!(!resumed("thanks", &[]).text.contains("results"));
        let compact = "Results of the 900 delegated tasks: 900 completed.\n\nToo many for details.\n1. A | completed | 7\n2. B | failed: x | 8\n";
        assert!(
            resumed(compact, &[])
                .text
                .ends_with("900 completed.\n1. A (completed)\n2. B (failed: x)")
        );
        assert_eq!(
            resumed("Results of the 2 delegated tasks.\n- a\n- b", &[]).calls,
            []
        );
    }

    #[test]
    fn a_thousand_things_stay_one_entry_and_one_bounded_answer() {
        let items: String = (0..1000).map(|n| format!("- item {n}\n")).collect();
        let entries = entries(&ask(&items));
        assert_eq!((entries.len(), entries[0].1.len()), (1, 1000));
        let summary: String = (1..=1000)
            .map(|n| format!("## {n}. T\n{}\n", "é".repeat(5000)))
            .collect();
        let text = resumed(&summary, &[]).text;
        assert!(text.chars().count() < 15_000);
        assert!(text.ends_with("… and 975 more."));
    }

    #[test]
    fn a_refused_call_is_reported() {
        let result = Message::ToolResult {
            call_id: "a".into(),
            name: DELEGATE.into(),
            text: "too many".into(),
            is_error: true,
        };
        let decision = decide(&request(vec![Message::User("x".into()), result], DELEGATE));
        assert!(decision.text.ends_with("was refused: too many"));
    }

    #[tokio::test]
    async fn the_text_is_streamed_whole() {
        let pieces = Mutex::new(Vec::new());
        let request = request(vec![Message::User("ééééé".into())], "t");
        let decision = OfflineModel
            .decide(&request, &|piece| {
                pieces.lock().unwrap().push(piece.to_owned())
            })
            .await
            .unwrap();
        let pieces = pieces.into_inner().unwrap();
        assert!(pieces.len() > 1);
        assert_eq!(pieces.concat(), decision.text);
        assert!(decision.usage.output_tokens > 0 && decision.usage.input_tokens > 0);
    }
}
