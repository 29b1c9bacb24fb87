//! The tool calls of a streamed answer, put together from fragments.
//!
//! Fragments belong together by `index`, and only the first of a call carries id and name (H-19). Gateways bend that: all
//! fragments on index 0 with different ids, no index at all, ids that are empty or repeated each time; `Calls::slot` has
//! the rules.

use crate::domain::decision::RawCall;
use serde::Deserialize;
use serde_json::value::RawValue;

#[derive(Deserialize)]
pub struct Fragment {
    index: Option<i64>,
    id: Option<String>,
    function: Option<FunctionFragment>,
}

#[derive(Deserialize)]
struct FunctionFragment {
    name: Option<String>,
    /// A string by the standard; some servers send the object itself. Raw, so that no digit is lost (H-31).
    arguments: Option<Box<RawValue>>,
}

/// In order of arrival.
#[derive(Default)]
pub struct Calls(Vec<Building>);

#[derive(Default)]
struct Building {
    index: i64,
    id: String,
    name: String,
    arguments: Option<String>,
}

impl Building {
    /// Nothing can follow: the arguments are a whole object. False while they are empty.
    fn is_whole(&self) -> bool {
        let arguments = self.arguments.as_deref().unwrap_or_default().trim_end();
        arguments.ends_with('}') && serde_json::from_str::<serde::de::IgnoredAny>(arguments).is_ok()
    }
}

impl Calls {
    /// In order of index; calls that share one stay in order of arrival.
    pub fn into_raw(mut self) -> Vec<RawCall> {
        self.0.sort_by_key(|call| call.index);
        self.0
            .into_iter()
            .map(|call| RawCall {
                id: Some(call.id),
                name: Some(call.name),
                arguments: call.arguments,
                provider_data: None,
            })
            .collect()
    }

    /// A call of an answer that was not streamed.
    pub fn add_whole(&mut self, fragment: Fragment) {
        let index = self.next_index();
        self.0.push(Building {
            index,
            ..Building::default()
        });
        let slot = self.0.len() - 1;
        self.0[slot].append(fragment);
    }

    pub fn add(&mut self, fragment: Fragment) {
        let slot = match self.slot(&fragment) {
            Some(slot) => slot,
            None => {
                let index = fragment.index.unwrap_or_else(|| self.next_index());
                self.0.push(Building {
                    index,
                    ..Building::default()
                });
                self.0.len() - 1
            }
        };
        self.0[slot].append(fragment);
    }

    fn next_index(&self) -> i64 {
        self.0
            .iter()
            .map(|call| call.index)
            .max()
            .map_or(0, |index| index.saturating_add(1))
    }

    /// The call that a fragment continues; `None` where it begins a new one.
    fn slot(&self, fragment: &Fragment) -> Option<usize> {
        let same_index = |call: &Building| fragment.index.is_none_or(|index| index == call.index);
        let id = fragment.id.as_deref().unwrap_or_default();
        if !id.is_empty() {
            // The id says it, unless it comes late, to a call of this index that has none yet.
            return self
                .0
                .iter()
                .rposition(|call| same_index(call) && call.id == id)
                .or_else(|| {
                    let latest = self.0.iter().rposition(same_index)?;
                    let call = &self.0[latest];
                    let late = fragment.index.is_some() && call.id.is_empty() && !call.is_whole();
                    late.then_some(latest)
                });
        }
        let latest = self.0.iter().rposition(same_index)?;
        let call = &self.0[latest];
        // Without ids, a name after a whole call can only belong to the next one. Without an index too, any second name.
        let names = fragment.function.as_ref().is_some_and(|function| {
            function
                .name
                .as_deref()
                .is_some_and(|name| !name.is_empty())
        });
        let begins_next =
            names && !call.name.is_empty() && (call.is_whole() || fragment.index.is_none());
        (!begins_next).then_some(latest)
    }
}

impl Building {
    fn append(&mut self, fragment: Fragment) {
        let repeats_id = match fragment.id {
            Some(id) if !id.is_empty() => {
                let repeats = self.id == id;
                self.id = id;
                repeats
            }
            _ => false,
        };
        let Some(function) = fragment.function else {
            return;
        };
        if let Some(name) = function.name {
            // Names may come in pieces. Servers that repeat the id on each fragment repeat the name with it.
            if repeats_id && name.starts_with(&self.name) {
                self.name = name;
            } else {
                self.name.push_str(&name);
            }
        }
        if let Some(raw) = function.arguments {
            let piece = match serde_json::from_str::<String>(raw.get()) {
                Ok(text) => text,
                Err(_) => raw.get().to_owned(),
            };
            self.arguments.get_or_insert_default().push_str(&piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::decision::{Finish, normalise_calls};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    /// The calls as `id name arguments`, valid ones only.
    fn calls(fragments: &[Value]) -> Vec<String> {
        let mut calls = Calls::default();
        for fragment in fragments {
            calls.add(serde_json::from_str(&fragment.to_string()).unwrap());
        }
        let mut made = 0;
        let fresh_id = || {
            made += 1;
            format!("made{made}")
        };
        normalise_calls(calls.into_raw(), Finish::Done, fresh_id)
            .into_iter()
            .map(|call| {
                assert_eq!(call.invalid, None);
                format!("{} {} {}", call.id, call.name, call.arguments)
            })
            .collect()
    }

    #[test]
    fn fragments_find_their_call() {
        // H-19
        let named = |index: i64, id: &str, name: &str| json!({"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}});
        let piece =
            |index: i64, piece: &str| json!({"index": index, "function": {"arguments": piece}});
        let two = ["a f {\"x\":1}", "b g {\"y\":2}"];
        let cases: Vec<(&str, Vec<Value>, Vec<&str>)> = vec![
            (
                "interleaved",
                vec![
                    named(0, "a", "f"),
                    named(1, "b", "g"),
                    piece(0, "{\"x\""),
                    piece(1, "{\"y\":"),
                    piece(0, ":1}"),
                    piece(1, "2}"),
                ],
                two.to_vec(),
            ),
            (
                "a gap",
                vec![
                    named(0, "a", "f"),
                    named(2, "b", "g"),
                    piece(2, "{\"y\":2}"),
                    piece(0, "{\"x\":1}"),
                ],
                two.to_vec(),
            ),
            (
                "1 before 0",
                vec![
                    named(1, "b", "g"),
                    named(0, "a", "f"),
                    piece(0, "{\"x\":1}"),
                    piece(1, "{\"y\":2}"),
                ],
                two.to_vec(),
            ),
            (
                "the name after the arguments",
                vec![
                    piece(0, "{\"x\""),
                    json!({"index": 0, "function": {"name": "f"}}),
                    json!({"index": 0, "id": "a"}),
                    piece(0, ":1}"),
                ],
                vec!["a f {\"x\":1}"],
            ),
            (
                "one index, different ids",
                vec![
                    named(0, "a", "f"),
                    piece(0, "{\"x\":1}"),
                    named(0, "b", "g"),
                    piece(0, "{\"y\":2}"),
                ],
                two.to_vec(),
            ),
            (
                "one index, different ids, interleaved with repeated ids",
                vec![
                    named(0, "a", "f"),
                    named(0, "b", "g"),
                    json!({"index": 0, "id": "a", "function": {"name": "f", "arguments": "{\"x\":1}"}}),
                    json!({"index": 0, "id": "b", "function": {"arguments": "{\"y\":2}"}}),
                ],
                two.to_vec(),
            ),
            (
                "one index, whole calls without ids",
                vec![
                    json!({"index": 0, "id": "", "function": {"name": "f", "arguments": "{\"x\":1}"}}),
                    json!({"index": 0, "id": "", "function": {"name": "g", "arguments": "{\"y\":2}"}}),
                ],
                vec!["made1 f {\"x\":1}", "made2 g {\"y\":2}"],
            ),
            (
                "no index",
                vec![
                    json!({"id": "a", "function": {"name": "f", "arguments": "{\"x\""}}),
                    json!({"function": {"arguments": ":1}"}}),
                    json!({"id": "b", "function": {"name": "g", "arguments": {"y": 2}}}),
                ],
                two.to_vec(),
            ),
            (
                "no index, no ids, no arguments",
                vec![
                    json!({"function": {"name": "f"}}),
                    json!({"function": {"name": "g", "arguments": null}}),
                ],
                vec!["made1 f {}", "made2 g {}"],
            ),
            (
                "one id for two calls",
                vec![
                    named(0, "a", "f"),
                    named(1, "a", "g"),
                    piece(0, "{\"x\":1}"),
                    piece(1, "{\"y\":2}"),
                ],
                vec!["a f {\"x\":1}", "a_2 g {\"y\":2}"],
            ),
        ];
        for (case, fragments, expected) in cases {
            assert_eq!(calls(&fragments), expected, "{case}");
        }
    }

    #[test]
    fn a_gap_makes_no_phantom_call() {
        // H-19
        let far =
            json!({"index": i64::MAX, "id": "a", "function": {"name": "f", "arguments": "{}"}});
        let near = json!({"index": -1, "id": "b", "function": {"name": "g", "arguments": "{}"}});
        let bare = json!({"id": "c", "function": {"name": "h"}});
        assert_eq!(calls(&[far, near, bare]), ["b g {}", "a f {}", "c h {}"]);
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_in_any_interleaving(
            whole in prop::collection::vec("\\{\"[a-z]{1,4}\":\"[a-zé€]{0,12}\"\\}", 1..11),
            picks in prop::collection::vec((0usize..11, 1usize..5), 0..200),
        ) {
            // H-19
            let mut rest: Vec<Vec<char>> = whole.iter().map(|text| text.chars().collect()).collect();
            let mut fragments: Vec<_> = (0..whole.len()).rev()
                .map(|index| json!({"index": index, "id": format!("id{index}"), "function": {"name": "t"}}))
                .collect();
            let all = (0..whole.len()).map(|index| (index, usize::MAX));
            for (index, size) in picks.into_iter().chain(all) {
                let index = index % whole.len();
                let piece: String = { let n = size.min(rest[index].len()); rest[index].drain(..n).collect() };
                fragments.push(json!({"index": index, "function": {"arguments": piece}}));
            }
            let expected: Vec<_> = whole.iter().enumerate().map(|(index, text)| format!("id{index} t {text}")).collect();
            prop_assert_eq!(calls(&fragments), expected);
        }
    }
}
