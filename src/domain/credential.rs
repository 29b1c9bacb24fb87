//! A secret of a workspace: an outside service's password or key. Its value goes in, is used on the server, and never
//! comes out again (L-9).

use super::fields::{InvalidDefinition, read_object};
use secrecy::SecretString;
use serde_json::Value;
use std::ops::RangeInclusive;

const NAME_CHARS_MAX: usize = 100;
/// A shorter one could not be blanked out of texts without blanking out ordinary words.
const VALUE_CHARS: RangeInclusive<usize> = 4..=10_000;

/// A value as it is stored: nonce and ciphertext, and the id of the operator's key they were made with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    pub key_id: String,
    pub bytes: Vec<u8>,
}

/// A credential that is to be made.
#[derive(Clone, Debug)]
pub struct NewCredential {
    /// 1 to 100 characters on one line, unique in the workspace.
    pub name: String,
    pub value: SecretString,
}

impl NewCredential {
    pub fn parse(body: &Value) -> Result<Self, InvalidDefinition> {
        read_object(body, |fields| NewCredential {
            name: fields.required_line("name", NAME_CHARS_MAX),
            value: fields.required_text("value", VALUE_CHARS).into(),
        })
    }

    /// The body of a change: the value alone.
    pub fn parse_value(body: &Value) -> Result<SecretString, InvalidDefinition> {
        read_object(body, |fields| {
            fields.required_text("value", VALUE_CHARS).into()
        })
    }
}

/// The text without the values, also where they stand as JSON writes them.
pub fn blank_out(text: &str, values: &[&str]) -> String {
    const MARK: &str = "[redacted]";
    let mut values: Vec<&str> = values.iter().copied().filter(|v| !v.is_empty()).collect();
    // One may hold another.
    values.sort_by_key(|value| std::cmp::Reverse(value.len()));
    let mut text = text.to_owned();
    for value in values {
        let written = Value::from(value).to_string();
        text = text
            .replace(value, MARK)
            .replace(&written[1..written.len() - 1], MARK);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use secrecy::ExposeSecret;
    use serde_json::json;

    #[test]
    fn every_fault_of_a_credential_is_named_and_no_value_repeated() {
        // L-9
        let good = NewCredential::parse(&json!({"name": " crm ", "value": " s3cr3t\n"})).unwrap();
        assert_eq!(
            (good.name.as_str(), good.value.expose_secret()),
            ("crm", " s3cr3t\n")
        );
        assert!(!format!("{good:?}").contains("s3cr3t"));
        for (body, expected) in [
            (json!([]), ": expected an object, got a list"),
            (json!({}), "name: is required; value: is required"),
            (
                json!({"name": null, "value": null}),
                "name: is required; value: is required",
            ),
            (
                json!({"name": 1, "value": {"s3cr3t": 1}}),
                "name: expected a string, got a number; value: expected a string, got an object",
            ),
            (
                json!({"name": "a\nb", "value": "abc"}),
                "name: must be one line without control characters; value: is shorter than 4 characters",
            ),
            (
                json!({"name": "a", "value": "s3cr3t", "valu": "s3cr3t"}),
                "valu: is not a known field",
            ),
            (
                json!({"name": "x".repeat(101), "value": "x".repeat(10_001)}),
                "name: is 101 characters long; at most 100 are allowed; value: is 10001 characters long; at most 10000 are allowed",
            ),
            (
                json!({"name": "a", "value": "s3cr3t\u{0}"}),
                "value: contains the character NUL (U+0000), which can not be stored; remove it",
            ),
        ] {
            let error = NewCredential::parse(&body).unwrap_err().to_string();
            assert_eq!(
                error.trim_start_matches(": "),
                expected.trim_start_matches(": ")
            );
            assert!(!error.contains("s3cr3t"));
        }
    }

    #[test]
    fn values_are_blanked_out_wherever_they_stand() {
        // L-9
        let values = ["pass\"word", "word", ""];
        assert_eq!(
            blank_out(r#"{"at": "pass\"word"} pass"word, word"#, &values),
            r#"{"at": "[redacted]"} [redacted], [redacted]"#
        );
    }
}
