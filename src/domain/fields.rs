//! Reads the fields of a JSON object one by one and collects what is wrong with them.
//!
//! Every problem names its path (`config.delegation_enabled`), and reading goes on after one, so that all of them are
//! reported at once. Which fields there are is not known here: the nouns ask for theirs.

use serde_json::{Map, Number, Value};
use std::fmt;

const NUL: &str = "contains the character NUL (U+0000), which can not be stored; remove it";
const TOOLS_MAX: usize = 200;
const TOOL_NAME_CHARS_MAX: usize = 100;
const JSON_BYTES_MAX: usize = 65_536;
const JSON_DEPTH_MAX: usize = 64;
/// Characters of a number once jsonb has written it out: `1e99999` is a few bytes here and 100,000 digits there.
const NUMBER_CHARS_MAX: u64 = 400;

/// Of a key in an error.
const KEY_CHARS_SHOWN: usize = 100;

/// Why a definition was refused: never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct InvalidDefinition(pub Vec<FieldError>);

impl InvalidDefinition {
    /// With one fault.
    pub fn of(path: &str, message: &str) -> Self {
        let mut problems = Problems(Vec::new());
        problems.add(path, message);
        Self(problems.0)
    }
}

impl fmt::Display for InvalidDefinition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, error) in self.0.iter().enumerate() {
            let separator = if place == 0 { "" } else { "; " };
            write!(f, "{separator}{error}")?;
        }
        Ok(())
    }
}

/// One thing that is wrong with a field. The path is dotted, with `[n]` for places in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    pub path: String,
    pub message: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let colon = if self.path.is_empty() { "" } else { ": " };
        write!(f, "{}{colon}{}", self.path, self.message)
    }
}

/// Reads a whole body with `read`, and answers with what it has read or with all that was wrong.
pub(in crate::domain) fn read_object<T>(
    body: &Value,
    read: impl FnOnce(&mut Fields<'_>) -> T,
) -> Result<T, InvalidDefinition> {
    let mut problems = Problems(Vec::new());
    let Value::Object(map) = body else {
        problems.expected::<()>("", "an object", body);
        return Err(InvalidDefinition(problems.0));
    };
    let mut fields = Fields {
        at: String::new(),
        map: map.clone(),
        problems: &mut problems,
    };
    let value = read(&mut fields);
    fields.refuse_the_rest();
    if problems.0.is_empty() {
        Ok(value)
    } else {
        Err(InvalidDefinition(problems.0))
    }
}

/// The fields of one object that have not been read yet. Reading a null is reading nothing.
pub(in crate::domain) struct Fields<'a> {
    /// The path of the object, empty or ending in a dot.
    pub(in crate::domain) at: String,
    pub(in crate::domain) map: Map<String, Value>,
    pub(in crate::domain) problems: &'a mut Problems,
}

impl Fields<'_> {
    fn take(&mut self, key: &str) -> Option<(String, Value)> {
        let value = self
            .map
            .shift_remove(key)
            .filter(|value| !value.is_null())?;
        Some((format!("{}{key}", self.at), value))
    }

    fn require(&mut self, key: &str) {
        if matches!(self.map.get(key), None | Some(Value::Null)) {
            self.problems
                .add(&format!("{}{key}", self.at), "is required");
        }
    }

    pub(in crate::domain) fn required_line(&mut self, key: &str, chars_max: usize) -> String {
        self.require(key);
        self.line(key, chars_max).unwrap_or_default()
    }

    /// `None` only with a problem.
    pub(in crate::domain) fn required_choice<T: Copy>(
        &mut self,
        key: &str,
        choices: &[(&str, T)],
    ) -> Option<T> {
        self.require(key);
        self.choice(key, choices)
    }

    /// A text of so many characters, kept as it is.
    pub(in crate::domain) fn required_text(
        &mut self,
        key: &str,
        chars: std::ops::RangeInclusive<usize>,
    ) -> String {
        self.require(key);
        self.optional_text(key, chars).unwrap_or_default()
    }

    pub(in crate::domain) fn optional_text(
        &mut self,
        key: &str,
        chars: std::ops::RangeInclusive<usize>,
    ) -> Option<String> {
        let (path, value) = self.take(key)?;
        let text = self.problems.text(&path, &value, *chars.end())?;
        if text.chars().count() < *chars.start() {
            let least = chars.start();
            self.problems
                .add(&path, &format!("is shorter than {least} characters"));
        }
        Some(text)
    }

    /// A trimmed text of one line that says something.
    pub(in crate::domain) fn line(&mut self, key: &str, chars_max: usize) -> Option<String> {
        let (path, value) = self.take(key)?;
        self.problems.line(&path, &value, chars_max)
    }

    pub(in crate::domain) fn text(&mut self, key: &str, chars_max: usize) -> String {
        let text = self
            .take(key)
            .and_then(|(path, value)| self.problems.text(&path, &value, chars_max));
        text.unwrap_or_default()
    }

    pub(in crate::domain) fn choice<T: Copy>(
        &mut self,
        key: &str,
        choices: &[(&str, T)],
    ) -> Option<T> {
        let (path, value) = self.take(key)?;
        let chosen = choices
            .iter()
            .find(|(name, _)| value.as_str() == Some(name))
            .map(|(_, choice)| *choice);
        if chosen.is_none() {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            self.problems
                .add(&path, &format!("expected one of {}", names.join(", ")));
        }
        chosen
    }

    pub(in crate::domain) fn boolean(&mut self, key: &str) -> Option<bool> {
        let (path, value) = self.take(key)?;
        value
            .as_bool()
            .or_else(|| self.problems.expected(&path, "a boolean", &value))
    }

    /// A whole number from 1 to `max`, which fits a u32.
    pub(in crate::domain) fn integer(&mut self, key: &str, max: u64) -> Option<u32> {
        let (path, value) = self.take(key)?;
        let number = value
            .as_u64()
            .filter(|number| (1..=max).contains(number))
            .and_then(|n| u32::try_from(n).ok());
        number.or_else(|| {
            self.problems
                .expected(&path, &format!("a whole number from 1 to {max}"), &value)
        })
    }

    /// A whole number from 1 that fits an i64.
    pub(in crate::domain) fn count(&mut self, key: &str) -> Option<i64> {
        let (path, value) = self.take(key)?;
        let number = value.as_i64().filter(|number| *number >= 1);
        number.or_else(|| {
            self.problems
                .expected(&path, "a whole number from 1 on", &value)
        })
    }

    pub(in crate::domain) fn number(&mut self, key: &str, min: f64, max: f64) -> Option<f64> {
        let (path, value) = self.take(key)?;
        let number = value.as_f64().filter(|number| (min..=max).contains(number));
        number.or_else(|| {
            self.problems
                .expected(&path, &format!("a number from {min} to {max}"), &value)
        })
    }

    pub(in crate::domain) fn object(&mut self, key: &str) -> Option<Fields<'_>> {
        let (path, value) = self.take(key)?;
        match value {
            Value::Object(map) => Some(Fields {
                at: format!("{path}."),
                map,
                problems: self.problems,
            }),
            other => self.problems.expected(&path, "an object", &other),
        }
    }

    /// An object whose content is the author's own business, within what can be stored and shown.
    pub(in crate::domain) fn json_object(&mut self, key: &str) -> Option<Map<String, Value>> {
        let (path, value) = self.take(key)?;
        self.problems.storable(&path, &value, 0);
        let bytes = value.to_string().len();
        if bytes > JSON_BYTES_MAX {
            self.problems.add(
                &path,
                &format!("is {bytes} bytes of JSON; at most {JSON_BYTES_MAX} are allowed"),
            );
        }
        match value {
            Value::Object(map) => Some(map),
            other => self.problems.expected(&path, "an object", &other),
        }
    }

    pub(in crate::domain) fn list<T>(
        &mut self,
        key: &str,
        items_max: usize,
        read: fn(Fields<'_>) -> T,
    ) -> Vec<T> {
        let mut items = Vec::new();
        for (path, item) in self.items(key, items_max) {
            match item {
                Value::Object(map) => items.push(read(Fields {
                    at: format!("{path}."),
                    map,
                    problems: self.problems,
                })),
                other => self
                    .problems
                    .expected(&path, "an object", &other)
                    .unwrap_or_default(),
            }
        }
        items
    }

    pub(in crate::domain) fn tool_names(&mut self) -> Vec<String> {
        let items = self.items("tools", TOOLS_MAX);
        items
            .iter()
            .filter_map(|(path, item)| self.problems.tool_name(path, item))
            .collect()
    }

    fn items(&mut self, key: &str, items_max: usize) -> Vec<(String, Value)> {
        let Some((path, value)) = self.take(key) else {
            return Vec::new();
        };
        match value {
            Value::Array(items) if items.len() <= items_max => items
                .into_iter()
                .enumerate()
                .map(|(place, item)| (format!("{path}[{place}]"), item))
                .collect(),
            Value::Array(items) => {
                self.problems.add(
                    &path,
                    &format!(
                        "has {} entries; at most {items_max} are allowed",
                        items.len()
                    ),
                );
                Vec::new()
            }
            other => self
                .problems
                .expected(&path, "a list", &other)
                .unwrap_or_default(),
        }
    }

    pub(in crate::domain) fn refuse_the_rest(self) {
        for key in self.map.keys() {
            self.problems.add(
                &format!("{}{}", self.at, shown(key)),
                "is not a known field",
            );
        }
    }
}

pub(in crate::domain) struct Problems(pub(in crate::domain) Vec<FieldError>);

impl Problems {
    pub(in crate::domain) fn add(&mut self, path: &str, message: &str) {
        self.0.push(FieldError {
            path: path.to_owned(),
            message: message.to_owned(),
        });
    }

    /// Always `None`, so that a reader can end with it.
    pub(in crate::domain) fn expected<T>(
        &mut self,
        path: &str,
        what: &str,
        got: &Value,
    ) -> Option<T> {
        let got = match got {
            Value::Null => "null",
            Value::Bool(_) => "a boolean",
            Value::Number(_) => "another number",
            Value::String(_) => "a string",
            Value::Array(_) => "a list",
            Value::Object(_) => "an object",
        };
        let got = if got == "another number" && !what.contains("number") {
            "a number"
        } else {
            got
        };
        self.add(path, &format!("expected {what}, got {got}"));
        None
    }

    fn text(&mut self, path: &str, value: &Value, chars_max: usize) -> Option<String> {
        let text = value
            .as_str()
            .or_else(|| self.expected(path, "a string", value))?;
        self.check_text(path, text, chars_max);
        Some(text.to_owned())
    }

    fn line(&mut self, path: &str, value: &Value, chars_max: usize) -> Option<String> {
        let text = value
            .as_str()
            .or_else(|| self.expected(path, "a string", value))?
            .trim();
        if text.is_empty() {
            self.add(
                path,
                &format!("is empty; 1 to {chars_max} characters are needed"),
            );
        } else if self.check_text(path, text, chars_max) && text.chars().any(is_line_breaking) {
            self.add(path, "must be one line without control characters");
        }
        Some(text.to_owned())
    }

    /// Whether nothing was wrong.
    fn check_text(&mut self, path: &str, text: &str, chars_max: usize) -> bool {
        let problems_before = self.0.len();
        let chars = text.chars().count();
        if chars > chars_max {
            self.add(
                path,
                &format!("is {chars} characters long; at most {chars_max} are allowed"),
            );
        }
        if text.contains('\0') {
            self.add(path, NUL);
        }
        self.0.len() == problems_before
    }

    fn tool_name(&mut self, path: &str, value: &Value) -> Option<String> {
        let name = self.text(path, value, TOOL_NAME_CHARS_MAX)?;
        if name.is_empty() || name.chars().any(|c| c.is_whitespace() || c.is_control()) {
            self.add(
                path,
                "expected the name of a tool: not empty, without blanks",
            );
        }
        Some(name)
    }

    pub(in crate::domain) fn boolean_if_present(
        &mut self,
        map: &Map<String, Value>,
        at: &str,
        key: &str,
    ) {
        if let Some(value) = map.get(key).filter(|value| !value.is_boolean()) {
            self.expected::<()>(&format!("{at}.{key}"), "a boolean", value);
        }
    }

    /// NUL is not asked for: all of `config` has been checked for it.
    pub(in crate::domain) fn text_if_present(
        &mut self,
        map: &Map<String, Value>,
        at: &str,
        key: &str,
        chars_max: usize,
    ) {
        let Some(value) = map.get(key) else { return };
        let path = format!("{at}.{key}");
        match value.as_str().map(|text| text.chars().count()) {
            None => self.expected(&path, "a string", value).unwrap_or_default(),
            Some(chars) if chars > chars_max => {
                self.add(
                    &path,
                    &format!("is {chars} characters long; at most {chars_max} are allowed"),
                );
            }
            Some(_) => {}
        }
    }

    pub(in crate::domain) fn object_if_present<'m>(
        &mut self,
        map: &'m Map<String, Value>,
        at: &str,
        key: &str,
    ) -> Option<&'m Map<String, Value>> {
        let value = map.get(key)?;
        value
            .as_object()
            .or_else(|| self.expected(&format!("{at}.{key}"), "an object", value))
    }

    /// Free JSON must survive the way to the database and back: no NUL, no number that explodes when written out, no
    /// nesting that the next reader refuses.
    pub(in crate::domain) fn storable(&mut self, path: &str, value: &Value, depth: usize) {
        if depth > JSON_DEPTH_MAX {
            return self.add(
                path,
                &format!("is nested deeper than {JSON_DEPTH_MAX} levels"),
            );
        }
        match value {
            Value::Null | Value::Bool(_) => {}
            Value::Number(number) if is_writable(number) => {}
            Value::Number(_) => self.add(
                path,
                "is a number too large, too small or too long to be stored",
            ),
            Value::String(text) => {
                if text.contains('\0') {
                    self.add(path, NUL);
                }
            }
            Value::Array(items) => {
                for (place, item) in items.iter().enumerate() {
                    self.storable(&format!("{path}[{place}]"), item, depth + 1);
                }
            }
            Value::Object(fields) => {
                for (key, field) in fields {
                    if key.contains('\0') {
                        self.add(
                            path,
                            "has a key with the character NUL (U+0000), which can not be stored",
                        );
                    }
                    self.storable(&format!("{path}.{}", shown(key)), field, depth + 1);
                }
            }
        }
    }
}

/// Whether the number stays short when written without an exponent, as jsonb does.
fn is_writable(number: &Number) -> bool {
    let text = number.to_string();
    let (digits, exponent) = match text.split_once(['e', 'E']) {
        Some((digits, exponent)) => (digits, exponent.parse().ok()),
        None => (text.as_str(), Some(0_i64)),
    };
    let point = if digits.len() < text.len() { 2 } else { 0 }; // it may become `0.…`: what was stored must pass again
    exponent.is_some_and(|exponent| {
        exponent
            .unsigned_abs()
            .saturating_add(digits.len() as u64 + point)
            <= NUMBER_CHARS_MAX
    })
}

/// A key as it may stand in an error: a client's own text, so bounded and on one line.
pub(in crate::domain) fn shown(key: &str) -> String {
    key.chars()
        .take(KEY_CHARS_SHOWN)
        .map(|c| if is_line_breaking(c) { '\u{fffd}' } else { c })
        .collect()
}

fn is_line_breaking(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}')
}
