//! From JSON that an author sent to a definition, or to the list of everything that is wrong with it.
//!
//! Every problem names its path (`config.delegation_enabled`), and all problems are reported at once. Unknown fields are
//! refused, except below `config`, whose unknown keys are kept untouched. Limits exist so that one agent can not
//! fill a prompt, a page or the database; they are generous and written in each message.

use super::{
    AgentDefinition, AgentKind, INSTRUCTIONS_CHARS_MAX, MAX_ITERATIONS_DEFAULT, ModelProvider,
    ModelSettings, NAME_CHARS_MAX, Phase, Reasoning,
};
use serde_json::{Map, Number, Value};
use std::fmt;

const NUL: &str = "contains the character NUL (U+0000), which can not be stored; remove it";
const PHASES_MAX: usize = 50;
const PHASE_INSTRUCTIONS_CHARS_MAX: usize = 50_000;
const TOOLS_MAX: usize = 200;
const TOOL_NAME_CHARS_MAX: usize = 100;
const MODEL_NAME_CHARS_MAX: usize = 200;
const MAX_ITERATIONS: u64 = 1_000;
const OUTPUT_TOKENS_MAX: u64 = 1_000_000;
const PROFILE_CHARS_MAX: usize = 4_000;
const JSON_BYTES_MAX: usize = 65_536;
const JSON_DEPTH_MAX: usize = 64;
/// Characters of a number once jsonb has written it out: `1e99999` is a few bytes here and 100,000 digits there.
const NUMBER_CHARS_MAX: u64 = 400;

/// One thing that is wrong with a field. The path is dotted, with `[n]` for places in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    pub path: String,
    pub message: String,
}

/// Why a definition was refused: never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct InvalidDefinition(pub Vec<FieldError>);

impl fmt::Display for InvalidDefinition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, error) in self.0.iter().enumerate() {
            let separator = if place == 0 { "" } else { "; " };
            let colon = if error.path.is_empty() { "" } else { ": " };
            write!(f, "{separator}{}{colon}{}", error.path, error.message)?;
        }
        Ok(())
    }
}

impl AgentDefinition {
    /// Reads a whole definition. Absent and null fields get their defaults; `name` is required.
    pub fn parse(body: &Value) -> Result<Self, InvalidDefinition> {
        let mut problems = Problems(Vec::new());
        let definition = match body {
            Value::Object(body) => read_definition(body.clone(), &mut problems),
            other => problems
                .expected("", "an object", other)
                .unwrap_or_default(),
        };
        if problems.0.is_empty() {
            Ok(definition)
        } else {
            Err(InvalidDefinition(problems.0))
        }
    }

    /// This definition changed by a JSON merge patch (RFC 7396): null takes a field back to its default.
    pub fn patched(&self, patch: &Value) -> Result<Self, InvalidDefinition> {
        if !patch.is_object() {
            return AgentDefinition::parse(patch); // refused, with the reason
        }
        let mut merged = serde_json::to_value(self).unwrap_or_default(); // own fields only: it has a JSON form
        merge_patch(&mut merged, patch);
        AgentDefinition::parse(&merged)
    }
}

/// JSON merge patch, RFC 7396.
pub fn merge_patch(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    if let Value::Object(fields) = target {
        for (key, change) in patch {
            if change.is_null() {
                fields.shift_remove(key); // keeps the order of the rest
            } else {
                merge_patch(fields.entry(key.clone()).or_insert(Value::Null), change);
            }
        }
    }
}

fn read_definition(body: Map<String, Value>, problems: &mut Problems) -> AgentDefinition {
    let mut fields = Fields {
        at: String::new(),
        map: body,
        problems,
    };
    let name = fields.required_line("name", NAME_CHARS_MAX);
    let instructions = fields.text("instructions", INSTRUCTIONS_CHARS_MAX);
    let kind = fields.choice(
        "kind",
        &[("loop", AgentKind::Loop), ("codeact", AgentKind::CodeAct)],
    );
    let tools = fields.tool_names();
    let phases = fields.list("phases", PHASES_MAX, read_phase);
    let model = fields.object("model").map(read_model);
    let output_schema = fields.json_object("output_schema").map(Value::Object);
    let max_iterations = fields.integer("max_iterations", MAX_ITERATIONS);
    let is_public = fields.boolean("is_public");
    let config = fields.json_object("config").unwrap_or_default();
    fields.refuse_the_rest();
    check_config(&config, problems);
    AgentDefinition {
        name,
        instructions,
        kind: kind.unwrap_or_default(),
        tools,
        phases,
        model: model.unwrap_or_default(),
        output_schema,
        max_iterations: max_iterations.unwrap_or(MAX_ITERATIONS_DEFAULT),
        is_public: is_public.unwrap_or_default(),
        config,
    }
}

fn read_phase(mut fields: Fields<'_>) -> Phase {
    let phase = Phase {
        name: fields.required_line("name", NAME_CHARS_MAX),
        instructions: fields.text("instructions", PHASE_INSTRUCTIONS_CHARS_MAX),
        tools: fields.tool_names(),
    };
    fields.refuse_the_rest();
    phase
}

fn read_model(mut fields: Fields<'_>) -> ModelSettings {
    let model = ModelSettings {
        provider: fields.choice(
            "provider",
            &[
                ("openai", ModelProvider::OpenAi),
                ("anthropic", ModelProvider::Anthropic),
                ("gemini", ModelProvider::Gemini),
                ("offline", ModelProvider::Offline),
            ],
        ),
        name: fields.line("name", MODEL_NAME_CHARS_MAX),
        temperature: fields.number("temperature", 0.0, 2.0),
        max_output_tokens: fields.integer("max_output_tokens", OUTPUT_TOKENS_MAX),
        reasoning: fields.choice(
            "reasoning",
            &[
                ("disabled", Reasoning::Disabled),
                ("low", Reasoning::Low),
                ("medium", Reasoning::Medium),
                ("high", Reasoning::High),
            ],
        ),
    };
    fields.refuse_the_rest();
    model
}

/// The keys of `config` that mean something. A null is a wrong type too: to unset a key, leave it out (a merge patch
/// has removed it before this is asked).
fn check_config(config: &Map<String, Value>, problems: &mut Problems) {
    for key in ["auto_delegate", "delegation_enabled"] {
        problems.boolean_if_present(config, "config", key);
    }
    if let Some(profile) = problems.object_if_present(config, "config", "delegation_profile") {
        for key in ["description", "example_input"] {
            problems.text_if_present(profile, "config.delegation_profile", key, PROFILE_CHARS_MAX);
        }
    }
    if let Some(settings) = problems.object_if_present(config, "config", "settings") {
        problems.boolean_if_present(settings, "config.settings", "delegate_source_mode");
    }
}

/// The fields of one object that have not been read yet. Reading a null is reading nothing.
struct Fields<'a> {
    /// The path of the object, empty or ending in a dot.
    at: String,
    map: Map<String, Value>,
    problems: &'a mut Problems,
}

impl Fields<'_> {
    fn take(&mut self, key: &str) -> Option<(String, Value)> {
        let value = self
            .map
            .shift_remove(key)
            .filter(|value| !value.is_null())?;
        Some((format!("{}{key}", self.at), value))
    }

    fn required_line(&mut self, key: &str, chars_max: usize) -> String {
        let missing = matches!(self.map.get(key), None | Some(Value::Null));
        if missing {
            self.problems
                .add(&format!("{}{key}", self.at), "is required");
        }
        self.line(key, chars_max).unwrap_or_default()
    }

    /// A trimmed text of one line that says something.
    fn line(&mut self, key: &str, chars_max: usize) -> Option<String> {
        let (path, value) = self.take(key)?;
        self.problems.line(&path, &value, chars_max)
    }

    fn text(&mut self, key: &str, chars_max: usize) -> String {
        let text = self
            .take(key)
            .and_then(|(path, value)| self.problems.text(&path, &value, chars_max));
        text.unwrap_or_default()
    }

    fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> Option<T> {
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

    fn boolean(&mut self, key: &str) -> Option<bool> {
        let (path, value) = self.take(key)?;
        value
            .as_bool()
            .or_else(|| self.problems.expected(&path, "a boolean", &value))
    }

    /// A whole number from 1 to `max`, which fits a u32.
    fn integer(&mut self, key: &str, max: u64) -> Option<u32> {
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

    fn number(&mut self, key: &str, min: f64, max: f64) -> Option<f64> {
        let (path, value) = self.take(key)?;
        let number = value.as_f64().filter(|number| (min..=max).contains(number));
        number.or_else(|| {
            self.problems
                .expected(&path, &format!("a number from {min} to {max}"), &value)
        })
    }

    fn object(&mut self, key: &str) -> Option<Fields<'_>> {
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
    fn json_object(&mut self, key: &str) -> Option<Map<String, Value>> {
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

    fn list<T>(&mut self, key: &str, items_max: usize, read: fn(Fields<'_>) -> T) -> Vec<T> {
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

    fn tool_names(&mut self) -> Vec<String> {
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

    fn refuse_the_rest(self) {
        for key in self.map.keys() {
            self.problems.add(
                &format!("{}{}", self.at, shown(key)),
                "is not a known field",
            );
        }
    }
}

struct Problems(Vec<FieldError>);

impl Problems {
    fn add(&mut self, path: &str, message: &str) {
        self.0.push(FieldError {
            path: path.to_owned(),
            message: message.to_owned(),
        });
    }

    /// Always `None`, so that a reader can end with it.
    fn expected<T>(&mut self, path: &str, what: &str, got: &Value) -> Option<T> {
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

    fn boolean_if_present(&mut self, map: &Map<String, Value>, at: &str, key: &str) {
        if let Some(value) = map.get(key).filter(|value| !value.is_boolean()) {
            self.expected::<()>(&format!("{at}.{key}"), "a boolean", value);
        }
    }

    /// NUL is not asked for: all of `config` has been checked for it.
    fn text_if_present(&mut self, map: &Map<String, Value>, at: &str, key: &str, chars_max: usize) {
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

    fn object_if_present<'m>(
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
    fn storable(&mut self, path: &str, value: &Value, depth: usize) {
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
fn shown(key: &str) -> String {
    key.chars()
        .take(NAME_CHARS_MAX)
        .map(|c| if is_line_breaking(c) { '\u{fffd}' } else { c })
        .collect()
}

fn is_line_breaking(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}')
}

#[cfg(test)]
mod tests;
