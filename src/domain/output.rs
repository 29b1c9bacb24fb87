//! Whether a final answer has the form that its agent's `output_schema` asks for (T-16).
//!
//! A schema is an author's text and an answer is a model's, and both are looked at in the middle of a worker. So a schema
//! has to be one whose check ends soon: no `$ref` leads out of it or back to itself, and written out it is of a bounded
//! size and depth. Patterns are matched in linear time.

use super::{
    decision::clean_json,
    fields::{FieldError, InvalidDefinition, Problems, shown},
    task::Failure,
    text::cut_chars,
};
use jsonschema::{PatternOptions, ValidationError, Validator};
use serde_json::Value;

/// How often a model is asked to repair its answer to one message.
pub const REPAIRS_MAX: usize = 2;

/// What of an answer's faults is told at once.
const FAULTS_TOLD: usize = 10;
const FAULT_CHARS_MAX: usize = 300;
/// Values in a schema with every `$ref` written out, and how deep they stand in each other.
const VALUES_MAX: usize = 50_000;
const DEPTH_MAX: usize = 128;
const PATTERN_BYTES_MAX: usize = 256 * 1024;

/// What becomes of an assistant message without calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is the task's output.
    Final(String),
    /// It is not what was asked for; the model is to be told this.
    Repair(String),
    /// Nor will it be.
    Unfit(Failure),
}

/// Judges an answer, after so many repairs.
pub fn judge(schema: &Value, answer: &str, repairs: usize) -> Answer {
    let text = clean_json(without_fence(answer.trim()));
    let faults = match validator("output_schema", schema) {
        Ok(validator) => faults(&validator, &text),
        Err(faults) => return Answer::Unfit(unfit("the schema can not be used", faults)),
    };
    if faults.is_empty() {
        Answer::Final(text.into_owned())
    } else if repairs < REPAIRS_MAX {
        let list: Vec<String> = faults.iter().map(|fault| format!("- {fault}")).collect();
        Answer::Repair(format!(
            "Your answer was not accepted, because it is not what the JSON Schema of your final answer asks for:\n{}\n\
             Give the whole answer again, with this put right: JSON that is valid against the schema, and nothing else.",
            list.join("\n")
        ))
    } else {
        let why = format!("the model was asked {REPAIRS_MAX} times to repair it");
        Answer::Unfit(unfit(&why, faults))
    }
}

fn unfit(why: &str, faults: Vec<FieldError>) -> Failure {
    let faults = InvalidDefinition(faults);
    let message = format!("The answer does not fit the agent's output_schema ({why}): {faults}");
    Failure::new("invalid_output", message)
}

/// What is wrong with a schema; nothing if answers can be held to it.
/// `at` is its place in what an author has sent.
pub(in crate::domain) fn check_schema(at: &str, schema: &Value) -> Vec<FieldError> {
    validator(at, schema).err().unwrap_or_default()
}

/// What is wrong with a value by a schema that was checked; `at` is what to call the value.
pub(in crate::domain) fn faults_of(schema: &Value, at: &str, value: &Value) -> Vec<FieldError> {
    match validator(at, schema) {
        Ok(validator) => validator
            .iter_errors(value)
            .map(|error| fault(at, &error))
            .collect(),
        Err(faults) => faults,
    }
}

fn validator(at: &str, schema: &Value) -> Result<Validator, Vec<FieldError>> {
    let mut written_out = WrittenOut {
        schema,
        refs: Vec::new(),
        left: VALUES_MAX,
    };
    written_out
        .walk(at, schema, 0)
        .map_err(|fault| vec![fault])?;
    jsonschema::options()
        .offline()
        .should_validate_formats(false)
        .with_pattern_options(PatternOptions::regex().size_limit(PATTERN_BYTES_MAX))
        .build(schema)
        .map_err(|error| vec![fault(at, &error)])
}

fn faults(validator: &Validator, text: &str) -> Vec<FieldError> {
    let value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        Err(error) => {
            let message = format!("is not JSON: {error}");
            return InvalidDefinition::of("answer", &message).0;
        }
    };
    let mut problems = Problems(Vec::new());
    problems.storable("answer", &value, 0);
    if problems.0.is_empty() {
        let errors = validator.iter_errors(&value);
        problems
            .0
            .extend(errors.map(|error| fault("answer", &error)));
    }
    problems.0.truncate(FAULTS_TOLD);
    problems.0
}

/// The values themselves are left out: a whole answer may stand there.
fn fault(root: &str, error: &ValidationError<'_>) -> FieldError {
    let mut path = root.to_owned();
    for part in error.instance_path().as_str().split('/').skip(1) {
        let key = part.replace("~1", "/").replace("~0", "~");
        match key.parse::<usize>() {
            Ok(place) => path += &format!("[{place}]"),
            Err(_) => path += &format!(".{}", shown(&key)),
        }
    }
    let message = error.masked().to_string();
    FieldError {
        path,
        message: cut_chars(&message, FAULT_CHARS_MAX).to_owned(),
    }
}

/// The text within a code fence, if that is all there is: models like to write one.
fn without_fence(answer: &str) -> &str {
    let inside = answer
        .strip_prefix("```")
        .and_then(|rest| rest.strip_suffix("```"));
    match inside.and_then(|rest| rest.split_once('\n')) {
        Some((language, text)) if language.chars().all(char::is_alphanumeric) => text.trim(),
        _ => answer,
    }
}

/// A schema as it would be with the target of each `$ref` in its place.
struct WrittenOut<'a> {
    schema: &'a Value,
    refs: Vec<&'a str>,
    left: usize,
}

impl<'a> WrittenOut<'a> {
    fn walk(&mut self, at: &str, value: &'a Value, depth: usize) -> Result<(), FieldError> {
        self.left = self
            .left
            .checked_sub(1)
            .filter(|_| depth <= DEPTH_MAX)
            .ok_or_else(|| refused(at, "is too large or too deep, its `$ref`s written out"))?;
        match value {
            Value::Array(items) => {
                for (place, item) in items.iter().enumerate() {
                    self.walk(&format!("{at}[{place}]"), item, depth + 1)?;
                }
            }
            Value::Object(fields) => {
                for (key, value) in fields {
                    let at = format!("{at}.{}", shown(key));
                    match (key.as_str(), value) {
                        ("$ref", Value::String(to)) => self.follow(&at, to, depth + 1)?,
                        ("$dynamicRef" | "$recursiveRef", Value::String(_)) => {
                            return Err(refused(&at, "is not supported; write `$ref`"));
                        }
                        ("$id", Value::String(_)) if depth > 0 => {
                            return Err(refused(&at, "is supported at the top only"));
                        }
                        _ => self.walk(&at, value, depth + 1)?,
                    }
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
        Ok(())
    }

    fn follow(&mut self, at: &str, to: &'a str, depth: usize) -> Result<(), FieldError> {
        let pointer = to.strip_prefix('#');
        let Some(target) = pointer.and_then(|pointer| self.schema.pointer(pointer)) else {
            let form = "leads to nothing in this schema; it is to be of the form `#/$defs/name`";
            return Err(refused(at, form));
        };
        if self.refs.contains(&to) {
            let form = "leads back to itself; write out as many levels as are needed";
            return Err(refused(at, form));
        }
        self.refs.push(to);
        self.walk(at, target, depth)?;
        self.refs.pop();
        Ok(())
    }
}

fn refused(at: &str, message: &str) -> FieldError {
    FieldError {
        path: at.to_owned(),
        message: message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report() -> Value {
        json!({
            "type": "object", "required": ["title", "items"], "additionalProperties": false,
            "properties": {
                "title": {"type": "string", "pattern": "^[A-Z]"},
                "items": {"type": "array", "items": {"$ref": "#/$defs/item"}}},
            "$defs": {"item": {"type": "object", "properties": {"price": {"type": "number", "minimum": 0}}}}})
    }

    // T-16
    #[test]
    fn an_answer_is_the_output_or_is_told_what_is_wrong_with_it() {
        let good = r#"{"title": "A", "items": [{"price": 1.10}, {}]}"#;
        for (answer, output) in [
            (good, good),
            (&format!(" {good}\n"), good),
            (&format!("```json\n{good}\n```"), good),
            (&format!("```\n{good}```"), good),
            // H-30, H-31: nothing that can not be stored, and all digits
            (
                r#"{"title": "A\u0000", "items": [{"price": 12345678901234567890.10}]}"#,
                r#"{"title": "A␀", "items": [{"price": 12345678901234567890.10}]}"#,
            ),
        ] {
            let expected = Answer::Final(output.into());
            assert_eq!(judge(&report(), answer, REPAIRS_MAX), expected, "{answer}");
        }
        for (answer, faults) in [
            ("All is well.", "- answer: is not JSON: expected value"),
            (&good[..30], "- answer: is not JSON: EOF"),
            (&format!("Here it is: {good}"), "- answer: is not JSON"),
            (&format!("```json\n{good}"), "- answer: is not JSON"),
            ("[1]", "- answer: value is not of type \"object\""),
            (
                "{}",
                "- answer: \"title\" is a required property\n- answer: \"items\" is a required property\n",
            ),
            (
                r#"{"title": "a", "items": [{}, {"price": "1"}, {"price": -1}], "x": 1}"#,
                "- answer: Additional properties are not allowed ('x' was unexpected)\n\
                 - answer.title: value does not match \"^[A-Z]\"\n\
                 - answer.items[1].price: value is not of type \"number\"\n\
                 - answer.items[2].price: value is less than the minimum of 0\n",
            ),
            (
                r#"{"title": "A", "items": [{"price": 1e1000000000}]}"#,
                "- answer.items[0].price: is a number too large",
            ),
        ] {
            for repairs in 0..REPAIRS_MAX {
                let Answer::Repair(told) = judge(&report(), answer, repairs) else {
                    panic!("{answer} is to be repaired");
                };
                let sorted = |text: &str| {
                    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
                    lines.sort();
                    lines
                };
                let (_, list) = told.split_once(":\n").unwrap();
                for fault in sorted(faults) {
                    assert!(list.contains(&fault), "{answer}: no {fault} in {told}");
                }
                assert_eq!(list.lines().count(), faults.lines().count() + 1, "{told}");
            }
            let Answer::Unfit(failure) = judge(&report(), answer, REPAIRS_MAX) else {
                panic!("{answer} has been repaired often enough");
            };
            assert_eq!(failure.code, "invalid_output");
            let first = faults.lines().next().unwrap().trim_start_matches("- ");
            assert!(failure.message.contains(first), "{}", failure.message);
        }
    }

    // T-16: what is told is bounded, whatever the answer is.
    #[test]
    fn of_many_faults_some_are_told() {
        let schema = json!({"additionalProperties": {"type": "null"}});
        let answer: serde_json::Map<String, Value> = (0..100)
            .map(|n| (format!("{n}{}", "k".repeat(1_000)), json!(1)))
            .collect();
        let Answer::Repair(told) = judge(&schema, &json!(answer).to_string(), 0) else {
            panic!("it is to be repaired");
        };
        assert_eq!(told.lines().count(), 2 + FAULTS_TOLD);
        assert!(told.len() < 10_000, "{}", told.len());
    }

    fn faults_of(schema: &Value) -> String {
        let faults = check_schema("output_schema", schema);
        match faults.is_empty() {
            true => String::new(),
            false => InvalidDefinition(faults).to_string(),
        }
    }

    // T-16
    #[test]
    fn a_schema_that_no_answer_can_be_held_to_is_refused_where_it_is_wrong() {
        let none = "leads to nothing in this schema";
        let back = "leads back to itself";
        for (schema, fault) in [
            (json!({}), ""),
            (report(), ""),
            (
                json!({"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {}}, "$ref": "#/definitions/a"}),
                "",
            ),
            (
                json!({"properties": {"$ref": {"type": "string"}, "$id": {}}}),
                "",
            ),
            (json!({"pattern": "^(?:[a-z]{1,40} ?){1,20}$"}), ""),
            (json!({"type": "objekt"}), "output_schema.type: "),
            (
                json!({"properties": {"a": {"items": {"type": 1}}}}),
                "output_schema.properties.a.items.type: ",
            ),
            (
                json!({"anyOf": [{}, {"required": "a"}]}),
                "output_schema.anyOf[1].required: ",
            ),
            (json!({"format": "email"}), ""),
            (json!({"pattern": "("}), "output_schema"),
            (json!({"pattern": "(?=a)b"}), "output_schema"),
            (json!({"pattern": "((a{999}){999}){999}"}), "output_schema"),
            (
                json!({"$schema": "https://example.com/mine"}),
                "output_schema",
            ),
            (
                json!({"items": {"$ref": "https://example.com/a.json"}}),
                none,
            ),
            (json!({"items": {"$ref": "file:///etc/passwd"}}), none),
            (
                json!({"items": {"$ref": "#/$defs/a"}}),
                &format!("output_schema.items.$ref: {none}"),
            ),
            (
                json!({"items": {"$ref": "#a"}, "$defs": {"a": {"$anchor": "a"}}}),
                none,
            ),
            (json!({"$ref": "#"}), back),
            (
                json!({"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}),
                back,
            ),
            (
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"not": {"$ref": "#/$defs/a"}}}}),
                back,
            ),
            (
                json!({"items": {"$dynamicRef": "#a"}}),
                "output_schema.items.$dynamicRef: ",
            ),
            (
                json!({"items": {"$id": "https://example.com/a"}}),
                "output_schema.items.$id: ",
            ),
        ] {
            let found = faults_of(&schema);
            assert_eq!(found.is_empty(), fault.is_empty(), "{schema}: {found}");
            assert!(found.contains(fault), "{schema}: {found}");
        }
    }

    /// `depth` definitions, each of which refers to the next one twice, or once.
    fn chain(depth: usize, times: usize) -> Value {
        let part = |n| json!({"allOf": vec![json!({"$ref": format!("#/$defs/{n}")}); times]});
        let mut defs: serde_json::Map<String, Value> =
            (1..depth).map(|n| ((n - 1).to_string(), part(n))).collect();
        defs.insert((depth - 1).to_string(), json!({"type": "object"}));
        json!({"$ref": "#/$defs/0", "$defs": defs})
    }

    // T-16: a schema can not keep a worker busy, nor take its stack.
    #[test]
    fn a_schema_that_grows_beyond_measure_is_refused() {
        let large = "is too large or too deep";
        assert!(faults_of(&chain(40, 2)).contains(large));
        assert!(faults_of(&chain(1_500, 1)).contains(large));
        let deepest = (1..1_500)
            .rev()
            .find(|depth| faults_of(&chain(*depth, 1)).is_empty());
        let deepest = chain(deepest.unwrap(), 1);
        assert_eq!(judge(&deepest, "{}", 0), Answer::Final("{}".into()));
        let Answer::Repair(_) = judge(&deepest, "1", 0) else {
            panic!("it is no object");
        };
        let Answer::Unfit(failure) = judge(&json!({"$ref": "#"}), "{}", 0) else {
            panic!("a schema that was stored by another release");
        };
        assert!(
            failure.message.contains("leads back"),
            "{}",
            failure.message
        );
        // Nothing here is exponential in a text that an author or a model has written.
        let slow = json!({"pattern": "^(a+)+$"});
        let answer = format!("\"{}!\"", "a".repeat(50_000));
        assert_ne!(judge(&slow, &answer, 0), Answer::Final(answer));
    }
}
