//! What the model decided: the text and the tool calls of one assistant message, whatever provider it came from.
//!
//! Models send calls without ids, with one id twice, with arguments that are empty, cut or not JSON. The functions
//! here turn that into calls which the history can hold and every provider accepts. They deliberately repair
//! nothing: half-written JSON that was closed by force would run as if the model had meant it (H-22).
//!
//! They also keep out what PostgreSQL can not store. A NUL becomes `␀` and a lone surrogate `U+FFFD`: visible, so that
//! nobody wonders where a character went, and the same everywhere (H-30).

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::HashSet;

/// One answer of a model, complete and parsed.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Decision {
    pub text: String,
    /// In the model's order, with ids that are present and distinct within the turn (X-9).
    pub calls: Vec<ToolCall>,
    /// The calls as the model wrote them, where anything about them had to be changed.
    pub raw_calls: Vec<RawCall>,
    pub usage: Usage,
}

/// One tool call as it is stored in the history and sent back to the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// JSON object text, byte for byte as the model wrote it, so that no digit is lost (H-31). Where `invalid` is set,
    /// a valid stand-in (`{}`) that providers accept in the history.
    pub arguments: String,
    /// Why these arguments can not be executed; goes back to the model as the call's error result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invalid: Option<String>,
    /// What the provider gave with the call and wants back with it, as `llm` keeps it. Shown to nobody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider_data: Option<serde_json::Value>,
}

/// Tokens of one model call. Zero where the provider says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub struct Usage {
    pub input_tokens: u32,
    pub output_tokens: u32,
    pub cached_tokens: u32,
}

impl Usage {
    /// Input and output.
    pub fn tokens(self) -> i64 {
        i64::from(self.input_tokens) + i64::from(self.output_tokens)
    }
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        let Self {
            input_tokens,
            output_tokens,
            cached_tokens,
        } = other;
        self.input_tokens = self.input_tokens.saturating_add(input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(output_tokens);
        self.cached_tokens = self.cached_tokens.saturating_add(cached_tokens);
    }
}

/// What model calls have taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    pub usage: Usage,
    /// Millionths of the currency of the prices; `None` without a price.
    pub cost_micros: Option<i64>,
}

/// A call as a provider sent it, before anything about it is believed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct RawCall {
    pub id: Option<String>,
    pub name: Option<String>,
    pub arguments: Option<String>,
    #[serde(skip)]
    #[schema(ignore)]
    pub provider_data: Option<serde_json::Value>,
}

impl RawCall {
    /// Whether nothing had to be changed to make this call of it.
    fn is(&self, call: &ToolCall) -> bool {
        let same = |raw: &Option<String>, read: &str| raw.as_deref() == Some(read);
        same(&self.id, &call.id)
            && same(&self.name, &call.name)
            && same(&self.arguments, &call.arguments)
    }

    /// The text of it as it can be stored.
    fn clean(mut self) -> Self {
        for text in [&mut self.id, &mut self.name, &mut self.arguments] {
            *text = text.take().map(|text| clean(&text).into_owned());
        }
        self
    }
}

impl Decision {
    /// A complete answer. `fresh_id` makes ids that are missing.
    pub fn new(
        text: String,
        raw: Vec<RawCall>,
        usage: Usage,
        finish: Finish,
        fresh_id: impl FnMut() -> String,
    ) -> Self {
        let calls = normalise_calls(raw.clone(), finish, fresh_id);
        let is_as_sent = raw.iter().zip(&calls).all(|(raw, call)| raw.is(call));
        let raw_calls = match is_as_sent {
            true => vec![],
            false => raw.into_iter().map(RawCall::clean).collect(),
        };
        Self {
            text,
            calls,
            raw_calls,
            usage,
        }
    }
}

/// Why the model stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It had nothing more to say, or handed over to its tools.
    Done,
    /// It reached its output limit: whatever came last is cut.
    Length,
}

/// Ids longer than this are replaced: providers refuse them when the history is sent back.
const ID_CHARS_MAX: usize = 64;

/// The calls of one turn, in the model's order: every id present and distinct within the turn (X-9, H-24), all
/// arguments a JSON object or marked `invalid` (H-21, H-22). `fresh_id` makes the ids that are missing.
pub fn normalise_calls(
    raw: Vec<RawCall>,
    finish: Finish,
    mut fresh_id: impl FnMut() -> String,
) -> Vec<ToolCall> {
    let last = raw.len().saturating_sub(1);
    let mut taken = HashSet::new();
    raw.into_iter()
        .enumerate()
        .map(|(index, call)| {
            let id = distinct_id(call.id.as_deref(), &mut taken, &mut fresh_id);
            let name = clean(call.name.as_deref().unwrap_or_default().trim()).into_owned();
            let arguments = match finish {
                Finish::Length if index == last => Err(CUT.to_owned()),
                Finish::Length | Finish::Done => parse_arguments(call.arguments.as_deref()),
            };
            let (arguments, invalid) = match arguments {
                Ok(arguments) => (arguments, None),
                Err(why) => ("{}".to_owned(), Some(why)),
            };
            ToolCall {
                id,
                name,
                arguments,
                invalid,
                provider_data: call.provider_data,
            }
        })
        .collect()
}

const CUT: &str = "This call was cut off because your answer reached its output limit, so it was not executed. \
                   Make the call again, complete; if its arguments are long, split the work into smaller calls.";

fn distinct_id(
    given: Option<&str>,
    taken: &mut HashSet<String>,
    fresh_id: &mut impl FnMut() -> String,
) -> String {
    let given = clean(given.unwrap_or_default().trim()).into_owned();
    let usable = !given.is_empty() && given.chars().count() <= ID_CHARS_MAX;
    let base = if usable { given } else { fresh_id() };
    let mut id = base.clone();
    let mut copy = 2u32;
    while !taken.insert(id.clone()) {
        id = format!("{base}_{copy}");
        copy += 1;
    }
    id
}

/// The arguments as JSON object text. Absent, blank and `null` mean "none", which is `{}` (H-21); anything else keeps its
/// exact bytes (H-31) but for characters that can not be stored. The error is a sentence for the model.
pub fn parse_arguments(raw: Option<&str>) -> Result<String, String> {
    let raw = raw.unwrap_or_default();
    if matches!(raw.trim(), "" | "null") {
        return Ok("{}".to_owned());
    }
    let text = clean_json(raw);
    match serde_json::from_str::<serde_json::Value>(&text) {
        Ok(serde_json::Value::Object(_)) => Ok(text.into_owned()),
        Ok(other) => Err(format!(
            "The arguments must be one JSON object, but they are {}. Nothing was executed. \
             Make the call again with an object such as {{\"name\": \"value\"}}.",
            kind(&other)
        )),
        Err(error) => Err(format!(
            "The arguments are not valid JSON ({error}). Nothing was executed. \
             Make the call again with one complete JSON object."
        )),
    }
}

fn kind(value: &serde_json::Value) -> &'static str {
    match value {
        serde_json::Value::Null => "null",
        serde_json::Value::Bool(_) => "a boolean",
        serde_json::Value::Number(_) => "a number",
        serde_json::Value::String(_) => "a string",
        serde_json::Value::Array(_) => "an array",
        serde_json::Value::Object(_) => "an object",
    }
}

/// Text that PostgreSQL can hold: a NUL is shown as `␀`. For texts of models, tools and children; what users send is
/// refused instead (T-3).
pub fn clean(text: &str) -> Cow<'_, str> {
    if text.contains('\0') {
        Cow::Owned(text.replace('\0', "␀"))
    } else {
        Cow::Borrowed(text)
    }
}

/// JSON text whose strings can be decoded and stored: `clean`, and in the same way the escapes that would turn into a NUL
/// or a lone surrogate once decoded. Text that is not JSON passes through as harmlessly. All other bytes stay.
pub fn clean_json(text: &str) -> Cow<'_, str> {
    let text = clean(text);
    if !text.contains("\\u") {
        return text;
    }
    let mut out = String::new();
    let mut copied = 0;
    let mut at = 0;
    while let Some(found) = text[at..].find('\\') {
        let start = at + found;
        let Some(unit) = unicode_escape(&text, start) else {
            // Any other escape: step over the escaped character, so that `\\u0000` is not taken for one.
            at = start + 1;
            at += text[at..].chars().next().map_or(0, char::len_utf8);
            continue;
        };
        at = start + 6;
        let mark = match unit {
            0 => "␀",
            0xd800..=0xdbff => match unicode_escape(&text, at) {
                Some(0xdc00..=0xdfff) => {
                    at += 6;
                    continue;
                }
                _ => "\u{fffd}",
            },
            0xdc00..=0xdfff => "\u{fffd}",
            _ => continue,
        };
        out.push_str(&text[copied..start]);
        out.push_str(mark);
        copied = at;
    }
    if copied == 0 {
        return text;
    }
    out.push_str(&text[copied..]);
    Cow::Owned(out)
}

/// The UTF-16 unit of an escape `\uXXXX` that begins at byte `at`.
fn unicode_escape(text: &str, at: usize) -> Option<u16> {
    let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u16::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn raw(id: &str, name: &str, arguments: &str) -> RawCall {
        RawCall {
            id: Some(id.to_owned()),
            name: Some(name.to_owned()),
            arguments: Some(arguments.to_owned()),
            provider_data: None,
        }
    }

    fn normalise(raw: Vec<RawCall>, finish: Finish) -> Vec<ToolCall> {
        let mut made = 0;
        normalise_calls(raw, finish, || {
            made += 1;
            format!("made{made}")
        })
    }

    #[test]
    fn ids_are_present_and_distinct_within_the_turn() {
        // X-9, H-24
        let cases: [(&[&str], &[&str]); 6] = [
            (&["a", "b"], &["a", "b"]),
            (&["", "  "], &["made1", "made2"]),
            (&["search:0", "search:0"], &["search:0", "search:0_2"]),
            (&["a", "a", "a_2", "a"], &["a", "a_2", "a_2_2", "a_3"]),
            (&["made1", ""], &["made1", "made1_2"]),
            (&[&"x".repeat(65), "n\0l"], &["made1", "n␀l"]),
        ];
        for (given, expected) in cases {
            let calls = given.iter().map(|id| raw(id, "t", "{}")).collect();
            let ids: Vec<_> = normalise(calls, Finish::Done)
                .into_iter()
                .map(|call| call.id)
                .collect();
            assert_eq!(ids, expected, "{given:?}");
        }
        assert_eq!(
            normalise(vec![RawCall::default()], Finish::Done),
            [ToolCall {
                id: "made1".into(),
                name: String::new(),
                arguments: "{}".into(),
                invalid: None,
                provider_data: None,
            }]
        );
    }

    // A-31
    #[test]
    fn calls_that_were_changed_are_kept_as_they_came() {
        let decision = |raw| {
            Decision::new(String::new(), raw, Usage::default(), Finish::Done, || {
                "made".into()
            })
        };
        let good = raw("a", "t", r#"{"n": 1}"#);
        assert_eq!(decision(vec![good.clone()]).raw_calls, []);
        let (broken, kept) = (raw("b", "t", "{\"n\0"), raw("b", "t", "{\"n␀"));
        assert_eq!(decision(vec![good.clone(), broken]).raw_calls, [good, kept]);
        let nameless = RawCall::default();
        assert_eq!(decision(vec![nameless.clone()]).raw_calls, [nameless]);
    }

    #[test]
    fn arguments_are_an_object_or_an_error_for_the_model() {
        // H-21, H-22
        for empty in [
            None,
            Some(""),
            Some(" \n\t"),
            Some("null"),
            Some(" null "),
            Some("{}"),
        ] {
            assert_eq!(parse_arguments(empty).as_deref(), Ok("{}"), "{empty:?}");
        }
        for (bad, says) in [
            ("[1]", "an array"),
            ("\"text\"", "a string"),
            ("true", "a boolean"),
            ("12", "a number"),
            ("{\"n\":2", "not valid JSON"),
            ("{\"text\":\"half a sen", "not valid JSON"),
            ("{} {}", "not valid JSON"),
            ("{'a':1}", "not valid JSON"),
            ("nonsense", "not valid JSON"),
        ] {
            let error = parse_arguments(Some(bad)).unwrap_err();
            assert!(error.contains(says), "{bad}: {error}");
            assert!(error.contains("Make the call again"), "{bad}: {error}");
        }
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(5000), "]".repeat(5000));
        assert!(parse_arguments(Some(&deep)).is_err());
    }

    #[test]
    fn arguments_keep_their_bytes() {
        // H-31
        for exact in [
            r#"{"id":9007199254740993,"u":18446744073709551615,"big":12345678901234567890123}"#,
            r#" {"b": 1.10, "a":1e400,  "z":-0.0} "#,
            r#"{"e":"\u00e9\ud83d\ude00\\u0000\/","dup":1,"dup":2}"#,
        ] {
            assert_eq!(parse_arguments(Some(exact)).as_deref(), Ok(exact));
        }
    }

    #[test]
    fn a_turn_cut_by_length_loses_its_last_call_only() {
        // H-22, T-15
        let calls = normalise(
            vec![
                raw("a", "write", r#"{"n":25}"#),
                raw("b", "write", r#"{"n":2}"#),
            ],
            Finish::Length,
        );
        assert_eq!(
            (calls[0].arguments.as_str(), &calls[0].invalid),
            (r#"{"n":25}"#, &None)
        );
        assert_eq!(
            (calls[1].arguments.as_str(), calls[1].invalid.as_deref()),
            ("{}", Some(CUT))
        );
        assert_eq!(normalise(vec![], Finish::Length), []);
    }

    #[test]
    fn what_can_not_be_stored_becomes_visible() {
        // H-30
        assert_eq!(clean("a\0b"), "a␀b");
        assert!(matches!(clean("plain"), Cow::Borrowed("plain")));
        for (given, expected) in [
            (r#"{"a":"x\u0000y"}"#, "{\"a\":\"x␀y\"}"),
            (r#"{"a\u0000":1}"#, "{\"a␀\":1}"),
            (r#"{"a":"\\u0000"}"#, r#"{"a":"\\u0000"}"#),
            (r#"{"a":"\\\u0000"}"#, "{\"a\":\"\\\\␀\"}"),
            (r#"{"a":"\ud83d\ude00"}"#, r#"{"a":"\ud83d\ude00"}"#),
            (r#"{"a":"\ud83d"}"#, "{\"a\":\"\u{fffd}\"}"),
            (r#"{"a":"\ude00\ud83dx"}"#, "{\"a\":\"\u{fffd}\u{fffd}x\"}"),
            (
                r#"{"a":"\ud83d\ud83d\ude00"}"#,
                "{\"a\":\"\u{fffd}\\ud83d\\ude00\"}",
            ),
            ("{\"a\":\"\0\"}", "{\"a\":\"␀\"}"),
            (r#"{"a":"\u00"#, r#"{"a":"\u00"#),
            (r"\u+123 \é \", r"\u+123 \é \"),
        ] {
            assert_eq!(clean_json(given), expected, "{given}");
        }
    }

    proptest! {
        #[test]
        fn any_arguments_end_as_a_storable_object(text in ".{0,60}|[{}\\[\\]\":,\\\\ud80def0-9 ]{0,40}") {
            let call = &normalise(vec![raw("a", "t", &text)], Finish::Done)[0];
            let value: serde_json::Value = serde_json::from_str(&call.arguments).unwrap();
            prop_assert!(value.is_object());
            prop_assert!(!value.to_string().contains("\\u0000"));
        }

        #[test]
        fn a_valid_object_is_never_refused(text: String, number: i64) {
            let json = serde_json::json!({ "text": text, "n": [number], &text: null }).to_string();
            prop_assert_eq!(parse_arguments(Some(&json)), Ok(clean_json(&json).into_owned()));
        }

        #[test]
        fn cleaning_is_idempotent_and_ids_are_distinct(ids in prop::collection::vec("[ab_2]{0,3}", 0..12)) {
            let calls = normalise(ids.iter().map(|id| raw(id, "t", "")).collect(), Finish::Done);
            let distinct: HashSet<_> = calls.iter().map(|call| &call.id).collect();
            prop_assert_eq!(distinct.len(), ids.len());
        }

        #[test]
        fn cleaned_json_stays_clean(text in "(\\\\|u0000|ud83d|ude00|\"|a|\u{0}){0,20}") {
            let once = clean_json(&text).into_owned();
            prop_assert_eq!(clean_json(&once), once.clone());
        }
    }
}
