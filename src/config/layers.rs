//! Merges the layers of the configuration, leaf by leaf, and remembers the origin of each leaf.
//!
//! The `config` crate parses YAML. Its own environment source is not used: it guesses paths from separators, and our keys
//! contain the separator. Instead the leaves of the defaults are walked and each one's variable is looked up.

use config::{FileFormat, Source, Value, ValueKind};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// What is wrong with the configuration, and where. The value of a secret is never part of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ConfigError {
    /// The file's name, or `environment variable NAME`.
    pub origin: String,
    /// The key's path; empty when the file as a whole cannot be read.
    pub path: String,
    pub reason: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.reason)
    }
}

/// The origin of values that nobody has overridden.
const COMPILED_IN: &str = "built-in config.yaml";

/// The environment variable of a key: its path in capitals, joined with `_`.
pub fn variable(path: &str) -> String {
    path.replace('.', "_").to_uppercase()
}

struct Leaf {
    value: Json,
    /// The default: its type decides how a variable's text is read.
    default: Json,
    origin: String,
}

/// The leaves by path, as merged so far.
pub struct Layers {
    leaves: BTreeMap<String, Leaf>,
}

impl Layers {
    pub fn new(defaults: &str) -> Result<Layers, ConfigError> {
        let mut leaves = BTreeMap::new();
        collect_leaves("", &parse(COMPILED_IN, defaults)?, &mut leaves);
        Ok(Layers { leaves })
    }

    /// Lays a file over the layers so far. Every key must exist in the defaults.
    pub fn add_file(&mut self, file: &Path) -> Result<(), ConfigError> {
        let origin = file.display().to_string();
        let text = std::fs::read_to_string(file).map_err(|err| ConfigError {
            origin: origin.clone(),
            path: String::new(),
            reason: format!("the file cannot be read: {err}"),
        })?;
        let root = parse(&origin, &text)?;
        self.overlay(&origin, "", root)
    }

    /// Looks up the variable of each leaf.
    pub fn add_environment(
        &mut self,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<(), ConfigError> {
        for (path, leaf) in &mut self.leaves {
            let name = variable(path);
            let Some(text) = env(&name) else { continue };
            leaf.origin = format!("environment variable {name}");
            leaf.value = from_text(&text, &leaf.default).map_err(|reason| ConfigError {
                origin: leaf.origin.clone(),
                path: path.clone(),
                reason,
            })?;
        }
        Ok(())
    }

    /// The merged tree as a type.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        let mut root = Map::new();
        for (path, leaf) in &self.leaves {
            let mut table = &mut root;
            let mut keys = path.split('.').peekable();
            while let Some(key) = keys.next() {
                if keys.peek().is_none() {
                    table.insert(key.to_owned(), leaf.value.clone());
                    break;
                }
                let inner = table.entry(key).or_insert_with(|| Json::Object(Map::new()));
                let Json::Object(inner) = inner else { break };
                table = inner;
            }
        }
        serde_path_to_error::deserialize(Json::Object(root)).map_err(|err| {
            let path = err.path().to_string();
            let leaf = self.leaf_of(&path);
            let reason = match self
                .leaves
                .get(leaf)
                .map(|leaf| (&leaf.value, &leaf.default))
            {
                _ if is_secret(leaf) => "text is expected (in a file: in quotes)".to_owned(),
                // With numbers of any precision, serde_json itself only says "invalid number".
                Some((Json::Number(number), Json::Number(_))) if number.is_f64() => {
                    format!("`{number}` is not a whole number")
                }
                Some((Json::Number(number), Json::Number(_))) => {
                    format!("{number} is out of range; the comment in config.yaml gives it")
                }
                _ => err.inner().to_string(),
            };
            let is_open = |leaf: &Leaf| leaf.default.is_object();
            let at = match self.leaves.get(leaf).is_some_and(is_open) {
                true => path.clone(),
                false => leaf.to_owned(),
            };
            ConfigError {
                path: at,
                ..self.error(leaf, reason)
            }
        })
    }

    /// The leaf that a path leads to, or into: keys below a leaf may have any name.
    fn leaf_of<'a>(&'a self, path: &'a str) -> &'a str {
        let leads = |leaf: &&String| {
            let rest = path.strip_prefix(leaf.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        self.leaves.keys().find(leads).map_or(path, String::as_str)
    }

    /// An error about the value of `path`, wherever that value came from.
    pub fn error(&self, path: &str, reason: impl Into<String>) -> ConfigError {
        let origin = match self.leaves.get(path) {
            Some(leaf) => leaf.origin.clone(),
            None => COMPILED_IN.to_owned(),
        };
        ConfigError {
            origin,
            path: path.to_owned(),
            reason: reason.into(),
        }
    }

    /// Whether nobody has set this key.
    pub fn is_default(&self, path: &str) -> bool {
        self.leaves
            .get(path)
            .is_none_or(|leaf| leaf.origin == COMPILED_IN)
    }

    fn overlay(&mut self, origin: &str, at: &str, value: Value) -> Result<(), ConfigError> {
        let error = |path: &str, reason: String| ConfigError {
            origin: origin.to_owned(),
            path: path.to_owned(),
            reason,
        };
        if let Some(leaf) = self.leaves.get_mut(at) {
            leaf.value = match to_json(value.kind) {
                Json::Object(_) if !leaf.default.is_object() => {
                    return Err(error(at, "a value is expected, not a section".into()));
                }
                Json::Null if !leaf.default.is_null() => {
                    return Err(error(at, "a value is missing".into()));
                }
                Json::String(text) if text.trim().is_empty() && leaf.default.is_null() => {
                    Json::Null
                }
                value => value,
            };
            leaf.origin = origin.to_owned();
            return Ok(());
        }
        let known = self.children(at);
        if known.is_empty() {
            let (parent, key) = at.rsplit_once('.').unwrap_or(("", at));
            let advice = match nearest(key, &self.children(parent)) {
                Some(near) => format!(" (did you mean {near}?)"),
                None => String::new(),
            };
            return Err(error(at, format!("unknown key{advice}")));
        }
        match value.kind {
            ValueKind::Nil => Ok(()),
            ValueKind::Table(table) => {
                let sorted: BTreeMap<_, _> = table.into_iter().collect();
                for (key, value) in sorted {
                    let path = if at.is_empty() {
                        key
                    } else {
                        format!("{at}.{key}")
                    };
                    self.overlay(origin, &path, value)?;
                }
                Ok(())
            }
            _ => Err(error(
                at,
                format!("a section is expected, with {}", known.join(", ")),
            )),
        }
    }

    /// The keys directly below a section, without duplicates.
    fn children(&self, section: &str) -> Vec<String> {
        let prefix = if section.is_empty() {
            String::new()
        } else {
            format!("{section}.")
        };
        let mut keys: Vec<String> = self
            .leaves
            .keys()
            .filter_map(|path| path.strip_prefix(&prefix))
            .filter_map(|rest| rest.split('.').next())
            .map(str::to_owned)
            .collect();
        keys.dedup();
        keys
    }
}

/// Keys whose values must not appear in messages.
fn is_secret(path: &str) -> bool {
    matches!(
        path,
        "database.url" | "auth.jwt_secret" | "credentials.keys"
    ) || path.starts_with("llm.") && path.ends_with(".api_key")
}

fn parse(origin: &str, text: &str) -> Result<Value, ConfigError> {
    // The crate's message leads with lines of its own about the source; the parser's own message is the last of the chain.
    let table = config::File::from_str(text, FileFormat::Yaml)
        .collect()
        .map_err(|err| {
            let mut cause: &dyn std::error::Error = &err;
            while let Some(inner) = cause.source() {
                cause = inner;
            }
            ConfigError {
                origin: origin.to_owned(),
                path: String::new(),
                reason: format!("this is not valid YAML: {cause}"),
            }
        })?;
    Ok(Value::new(None, ValueKind::Table(table)))
}

fn collect_leaves(path: &str, value: &Value, leaves: &mut BTreeMap<String, Leaf>) {
    match &value.kind {
        // A section without keys is one whose keys are the operator's own: a leaf as a whole.
        ValueKind::Table(table) if !table.is_empty() => {
            for (key, value) in table {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                collect_leaves(&path, value, leaves);
            }
        }
        kind => {
            let value = to_json(kind.clone());
            let leaf = Leaf {
                default: value.clone(),
                value,
                origin: COMPILED_IN.to_owned(),
            };
            leaves.insert(path.to_owned(), leaf);
        }
    }
}

fn to_json(kind: ValueKind) -> Json {
    match kind {
        ValueKind::Nil => Json::Null,
        ValueKind::Boolean(value) => value.into(),
        ValueKind::I64(value) => value.into(),
        ValueKind::U64(value) => value.into(),
        ValueKind::I128(value) => value.to_string().into(),
        ValueKind::U128(value) => value.to_string().into(),
        ValueKind::Float(value) => value.into(),
        ValueKind::String(value) => value.into(),
        ValueKind::Array(values) => values
            .into_iter()
            .map(|value| to_json(value.kind))
            .collect(),
        ValueKind::Table(table) => table
            .into_iter()
            .map(|(key, value)| (key, to_json(value.kind)))
            .collect(),
    }
}

/// A variable's text as a value of the default's type.
fn from_text(text: &str, default: &Json) -> Result<Json, String> {
    let text = text.trim();
    match default {
        Json::Null if text.is_empty() => Ok(Json::Null),
        Json::Array(_) => Ok(text
            .split(',')
            .map(str::trim)
            .filter(|item| !item.is_empty())
            .collect()),
        _ if text.is_empty() => {
            Err("the value is empty; unset the variable to get the default".into())
        }
        Json::Bool(_) => text
            .parse::<bool>()
            .map(Json::from)
            .map_err(|_| format!("`{text}` is neither true nor false")),
        Json::Number(_) => text
            .parse::<i64>()
            .map(Json::from)
            .map_err(|_| format!("`{text}` is not a whole number")),
        Json::Object(_) => match serde_json::from_str(text) {
            Ok(object @ Json::Object(_)) => Ok(object),
            Ok(_) | Err(_) => Err(format!("`{text}` is not a JSON object")),
        },
        Json::Null | Json::String(_) => Ok(text.into()),
    }
}

/// The known key that `key` is most likely a misspelling of.
fn nearest(key: &str, known: &[String]) -> Option<String> {
    let close = |other: &&String| distance(key, other) <= 1 + key.chars().count() / 4;
    known
        .iter()
        .filter(close)
        .min_by_key(|other| distance(key, other))
        .cloned()
}

/// Levenshtein's distance, without regard to case or the choice between `-` and `_`.
fn distance(a: &str, b: &str) -> usize {
    let fold = |text: &str| {
        text.to_lowercase()
            .replace('-', "_")
            .chars()
            .collect::<Vec<_>>()
    };
    let (a, b) = (fold(a), fold(b));
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(left != right);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
