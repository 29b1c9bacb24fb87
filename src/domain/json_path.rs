//! Dotted paths into JSON, as authors and models write them: `data.results`, `items.0.id`; `.` is the value itself.

use super::{fields::shown, text::cut_chars};
use serde_json::Value;

/// What of the keys that are there is told.
const KEYS_TOLD: usize = 20;
const PATH_CHARS_SHOWN: usize = 200;

/// The value at `path`, or why it is not there, naming what is (S-15).
pub fn at<'a>(value: &'a Value, path: &str) -> Result<&'a Value, String> {
    let path = path.trim();
    if path.is_empty() || path == "." {
        return Ok(value);
    }
    let mut here = value;
    for (depth, key) in path.split('.').enumerate() {
        let next = match here {
            Value::Object(fields) => fields.get(key),
            Value::Array(items) => key.parse::<usize>().ok().and_then(|n| items.get(n)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
        };
        here = next.ok_or_else(|| {
            let parent: Vec<&str> = path.split('.').take(depth).collect();
            let place = match parent.is_empty() {
                true => "at the top".to_owned(),
                false => format!("at `{}`", cut_chars(&parent.join("."), PATH_CHARS_SHOWN)),
            };
            let path = cut_chars(path, PATH_CHARS_SHOWN);
            format!(
                "`{path}` is not there; {place} there is {}",
                what_is_there(here)
            )
        })?;
    }
    Ok(here)
}

/// What a value is, for whoever has looked for something else in it.
pub fn what_is_there(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "a boolean".into(),
        Value::Number(_) => "a number".into(),
        Value::String(_) => "a text".into(),
        Value::Array(items) => format!("an array of {} values", items.len()),
        Value::Object(fields) if fields.is_empty() => "an object without keys".into(),
        Value::Object(fields) => {
            let keys: Vec<String> = fields
                .keys()
                .take(KEYS_TOLD)
                .map(|key| shown(key))
                .collect();
            let more = match fields.len().saturating_sub(KEYS_TOLD) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            format!("an object with the keys {}{more}", keys.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    // S-15
    #[test]
    fn a_path_leads_to_a_value_or_says_what_is_there() {
        let value = json!({"data": {"rows": [{"id": 7}], "n": 1}, "": 0});
        for (path, expected) in [
            (".", Ok(value.clone())),
            ("", Ok(value.clone())),
            ("data.rows", Ok(json!([{"id": 7}]))),
            ("data.rows.0.id", Ok(json!(7))),
            (
                "rows",
                Err("`rows` is not there; at the top there is an object with the keys data, "),
            ),
            (
                "data.items",
                Err(
                    "`data.items` is not there; at `data` there is an object with the keys rows, n",
                ),
            ),
            (
                "data.rows.1",
                Err("`data.rows.1` is not there; at `data.rows` there is an array of 1 values"),
            ),
            (
                "data.n.x",
                Err("`data.n.x` is not there; at `data.n` there is a number"),
            ),
        ] {
            let found = at(&value, path).cloned();
            assert_eq!(found, expected.map_err(str::to_owned), "{path}");
        }
    }
}
