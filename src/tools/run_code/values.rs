//! Between JSON and the values of the interpreter, with no number rounded on the way (H-31): whole numbers have any number
//! of digits on both sides; a fraction that no float holds arrives as text; what is no number of JSON does not leave.

use monty_types::MontyObject;
use serde_json::{Map, Number, Value};

/// Nesting that both sides can read.
const DEPTH_MAX: usize = 100;

pub fn from_json(value: Value) -> MontyObject {
    match value {
        Value::Null => MontyObject::None,
        Value::Bool(value) => MontyObject::Bool(value),
        Value::Number(number) => from_number(&number.to_string()),
        Value::String(text) => MontyObject::String(text),
        Value::Array(items) => MontyObject::List(items.into_iter().map(from_json).collect()),
        Value::Object(fields) => {
            let pairs = fields
                .into_iter()
                .map(|(name, value)| (MontyObject::String(name), from_json(value)));
            MontyObject::dict(pairs.collect::<Vec<_>>())
        }
    }
}

fn from_number(text: &str) -> MontyObject {
    if let Ok(number) = text.parse() {
        return MontyObject::Int(number);
    }
    if let Ok(number) = text.parse() {
        return MontyObject::BigInt(number);
    }
    match text.parse::<f64>() {
        Ok(float) if decimal(&format!("{float:e}")) == decimal(text) => MontyObject::Float(float),
        Ok(_) | Err(_) => MontyObject::String(text.to_owned()),
    }
}

/// Sign, digits and exponent of a decimal number, the same for each way to write it. `None`: it is none.
fn decimal(text: &str) -> Option<(bool, String, i64)> {
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let exponent: i64 = exponent.parse().ok()?;
    let (whole, places) = digits.split_once('.').unwrap_or((digits, ""));
    let all = format!("{whole}{places}");
    if all.is_empty() || !all.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let significant = all.trim_start_matches('0').trim_end_matches('0');
    if significant.is_empty() {
        return Some((negative, String::new(), 0));
    }
    let zeros = all.len() - all.trim_end_matches('0').len();
    let exponent = exponent.checked_add(zeros as i64 - places.len() as i64)?;
    Some((negative, significant.to_owned(), exponent))
}

/// The error says what can not be written as JSON.
pub fn to_json(value: &MontyObject) -> Result<Value, String> {
    to_json_at(value, 0)
}

fn to_json_at(value: &MontyObject, depth: usize) -> Result<Value, String> {
    if depth > DEPTH_MAX {
        return Err(format!("it is nested more than {DEPTH_MAX} deep"));
    }
    let list = |items: &[MontyObject]| {
        let items = items.iter().map(|item| to_json_at(item, depth + 1));
        items.collect::<Result<Vec<_>, _>>().map(Value::Array)
    };
    let whole = |digits: String| {
        let number: Result<Number, _> = digits.parse();
        number.map(Value::Number).map_err(|fault| fault.to_string())
    };
    match value {
        MontyObject::None => Ok(Value::Null),
        MontyObject::Bool(value) => Ok(Value::Bool(*value)),
        MontyObject::Int(number) => Ok(Value::from(*number)),
        MontyObject::BigInt(number) => whole(number.to_string()),
        MontyObject::Float(number) => Number::from_f64(*number)
            .map(Value::Number)
            .ok_or_else(|| format!("{number} is no number of JSON")),
        MontyObject::String(text) | MontyObject::Path(text) => Ok(Value::from(text.as_str())),
        MontyObject::List(items)
        | MontyObject::Tuple(items)
        | MontyObject::Set(items)
        | MontyObject::FrozenSet(items)
        | MontyObject::NamedTuple { values: items, .. } => list(items),
        MontyObject::Dict(pairs) => {
            let mut fields = Map::new();
            for (key, value) in pairs {
                fields.insert(key_of(key)?, to_json_at(value, depth + 1)?);
            }
            Ok(Value::Object(fields))
        }
        MontyObject::Date(_)
        | MontyObject::DateTime(_)
        | MontyObject::Time(_)
        | MontyObject::TimeDelta(_) => Ok(Value::from(value.to_string())),
        other => Err(format!("a {} is no value of JSON", other.type_name())),
    }
}

/// As Python's own `json` names the keys that are no text.
fn key_of(key: &MontyObject) -> Result<String, String> {
    match key {
        MontyObject::String(text) => Ok(text.clone()),
        MontyObject::Int(number) => Ok(number.to_string()),
        MontyObject::BigInt(number) => Ok(number.to_string()),
        MontyObject::Bool(value) => Ok(value.to_string()),
        MontyObject::None => Ok("null".to_owned()),
        other => Err(format!("a {} is no key of JSON", other.type_name())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // H-31, L-5
    #[test]
    fn numbers_pass_with_all_their_digits_or_as_text() {
        for (text, back) in [
            ("0", "0"),
            ("-1", "-1"),
            ("9007199254740993", "9007199254740993"),
            ("18446744073709551615", "18446744073709551615"),
            ("12345678901234567890123", "12345678901234567890123"),
            ("1.10", "1.1"),
            ("0.1", "0.1"),
            ("-2.50e3", "-2500.0"),
            ("5e-324", "5e-324"),
            ("1e400", "\"1e+400\""),
            ("0.12345678901234567890123", "\"0.12345678901234567890123\""),
            ("9007199254740993.0", "\"9007199254740993.0\""),
        ] {
            let value: Value = serde_json::from_str(text).unwrap();
            assert_eq!(
                to_json(&from_json(value)).unwrap().to_string(),
                back,
                "{text}"
            );
        }
    }

    #[test]
    fn what_json_has_no_words_for_is_refused() {
        for (value, expected) in [
            (MontyObject::Float(f64::NAN), "NaN is no number"),
            (MontyObject::Float(f64::INFINITY), "inf is no number"),
            (MontyObject::Ellipsis, "is no value of JSON"),
            (
                MontyObject::dict(vec![(MontyObject::Tuple(vec![]), MontyObject::None)]),
                "a tuple is no key",
            ),
        ] {
            let refused = to_json(&value).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
        let mut deep = MontyObject::None;
        for _ in 0..200 {
            deep = MontyObject::List(vec![deep]);
        }
        assert!(to_json(&deep).unwrap_err().contains("nested"));
        let keys = MontyObject::dict(vec![
            (MontyObject::Int(1), MontyObject::Bool(true)),
            (
                MontyObject::None,
                MontyObject::Tuple(vec![MontyObject::None]),
            ),
        ]);
        let keys = to_json(&keys).unwrap().to_string();
        assert_eq!(keys, r#"{"1":true,"null":[null]}"#);
    }
}
