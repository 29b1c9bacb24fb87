//! Makes the model's history from a task's feed: for a decide step, and again for whoever reads what one was sent.
//!
//! Order: an assistant message stands directly after the newest item that its model had been shown, and its results
//! directly after it, in call order. So a message that a user wrote meanwhile comes after them: never between a call
//! and its result (H-44), and the beginning of the history never changes (A-32, H-25). A call without a result gets
//! one that says so: no history is ever refused for a missing one (H-20).

use crate::{
    domain::decision::ToolCall,
    llm::Message,
    store::{changes::ItemKind, items::HistoryItem},
};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;

const INTERRUPTED: &str =
    "This call was interrupted: it has no result, and whether it had an effect is unknown.";

/// The calls of an assistant message, from its item's data. `None` where the data is not of this form; a message
/// without calls has no data.
pub fn calls_of(data: &Value) -> Option<Vec<ToolCall>> {
    #[derive(Deserialize)]
    struct Calls {
        calls: Vec<ToolCall>,
    }
    Calls::deserialize(data).ok().map(|c| c.calls)
}

#[derive(Deserialize)]
struct ResultData {
    ordinal: usize,
    is_error: bool,
}

/// The messages, and the `seq` of the newest item in them. `result_chars` caps one tool result.
pub fn history(items: &[HistoryItem], result_chars: usize) -> (Vec<Message>, i64) {
    let mut results: HashMap<(i32, usize), (&HistoryItem, bool)> = HashMap::new();
    for item in items.iter().filter(|i| i.kind == ItemKind::ToolResult) {
        let data = item
            .data
            .as_ref()
            .and_then(|d| ResultData::deserialize(d).ok());
        if let (Some(turn), Some(data)) = (item.turn, data) {
            results.insert((turn, data.ordinal), (item, data.is_error));
        }
    }
    let mut placed: Vec<((i64, i64), &HistoryItem)> = items
        .iter()
        .filter_map(|item| match item.kind {
            ItemKind::UserMessage | ItemKind::ResumeMessage | ItemKind::RepairMessage => {
                Some(((item.seq, 0), item))
            }
            ItemKind::AssistantMessage => Some(((item.seen_seq?, item.seq), item)),
            ItemKind::ToolResult
            | ItemKind::ToolCall
            | ItemKind::Delegation
            | ItemKind::Wait
            | ItemKind::Status => None,
        })
        .collect();
    placed.sort_by_key(|(place, _)| *place);
    let mut messages = Vec::with_capacity(items.len());
    for (_, item) in placed {
        if item.kind != ItemKind::AssistantMessage {
            messages.push(Message::User(item.text.clone()));
            continue;
        }
        let calls = item.data.as_ref().and_then(calls_of).unwrap_or_default();
        messages.push(Message::Assistant {
            text: item.text.clone(),
            calls: calls.clone(),
        });
        for (ordinal, call) in (1..).zip(calls) {
            let found = item.turn.and_then(|turn| results.get(&(turn, ordinal)));
            let (text, is_error) = match found {
                Some((result, is_error)) => (capped(&result.text, result_chars), *is_error),
                None => (INTERRUPTED.to_owned(), true),
            };
            messages.push(Message::ToolResult {
                call_id: call.id,
                name: call.name,
                text,
                is_error,
            });
        }
    }
    (messages, items.last().map_or(0, |i| i.seq))
}

/// How often the model has been asked to repair its answer since a user has written last (T-16).
pub fn repairs(items: &[HistoryItem]) -> usize {
    let since = items.iter().rev();
    since
        .take_while(|item| item.kind != ItemKind::UserMessage)
        .filter(|item| item.kind == ItemKind::RepairMessage)
        .count()
}

fn capped(text: &str, max: usize) -> String {
    match crate::domain::text::cut_chars(text, max) {
        cut if cut.len() < text.len() => {
            format!(
                "{cut}\n[cut: {} characters in all, {max} shown]",
                text.chars().count()
            )
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        ids::{TaskId, WorkspaceId},
        task::TaskKey,
    };
    use serde_json::json;

    fn item(seq: i64, kind: ItemKind, text: &str) -> HistoryItem {
        HistoryItem {
            task: TaskKey {
                workspace: WorkspaceId::new(),
                task: TaskId::new(),
            },
            seq,
            kind,
            turn: None,
            seen_seq: None,
            text: text.into(),
            data: None,
        }
    }

    fn assistant(seq: i64, turn: i32, seen: i64, text: &str, ids: &[&str]) -> HistoryItem {
        let calls: Vec<Value> = ids
            .iter()
            .map(|id| json!({"id": id, "name": "t", "arguments": "{}"}))
            .collect();
        HistoryItem {
            turn: Some(turn),
            seen_seq: Some(seen),
            data: Some(json!({"calls": calls})),
            ..item(seq, ItemKind::AssistantMessage, text)
        }
    }

    fn result(seq: i64, turn: i32, ordinal: i64, text: &str) -> HistoryItem {
        HistoryItem {
            turn: Some(turn),
            data: Some(json!({"ordinal": ordinal, "call_id": "c", "name": "t", "is_error": false})),
            ..item(seq, ItemKind::ToolResult, text)
        }
    }

    fn shape(items: &[HistoryItem]) -> Vec<String> {
        history(items, 10)
            .0
            .into_iter()
            .map(|m| match m {
                Message::User(text) => format!("user {text}"),
                Message::Assistant { text, calls } => format!("assistant {text}/{}", calls.len()),
                Message::ToolResult {
                    call_id,
                    text,
                    is_error,
                    ..
                } => {
                    format!("{call_id} {}{text}", if is_error { "error " } else { "" })
                }
            })
            .collect()
    }

    // T-4, H-20, H-24, H-25, H-44
    #[test]
    fn results_follow_their_call_and_later_messages_follow_the_turn() {
        use ItemKind::*;
        let items = [
            item(1, UserMessage, "a"),
            assistant(2, 1, 1, "calls", &["x:0", "x:1"]),
            item(4, UserMessage, "meanwhile"),
            result(5, 1, 1, "one"),
            result(7, 1, 2, "two"),
            item(8, ResumeMessage, "children"),
            // Written while the second decide step was under way: its model had seen up to 8.
            item(9, UserMessage, "late"),
            assistant(10, 2, 8, "calls again", &["x:0"]),
        ];
        let interrupted = format!("x:0 error {INTERRUPTED}");
        assert_eq!(
            shape(&items),
            [
                "user a",
                "assistant calls/2",
                "x:0 one",
                "x:1 two",
                "user meanwhile",
                "user children",
                "assistant calls again/1",
                &interrupted,
                "user late",
            ]
        );
        // The beginning stays as it was when the turn was asked for.
        assert_eq!(shape(&items[..6]), shape(&items)[..6]);
    }

    #[test]
    fn long_results_are_cut_on_a_character_boundary_with_a_notice() {
        let items = [
            item(1, ItemKind::UserMessage, "a"),
            assistant(2, 1, 1, "", &["c"]),
            result(3, 1, 1, &"é".repeat(11)),
        ];
        assert_eq!(
            shape(&items)[2],
            format!(
                "c {}\n[cut: 11 characters in all, 10 shown]",
                "é".repeat(10)
            )
        );
    }
}
