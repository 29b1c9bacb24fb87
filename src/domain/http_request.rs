//! What an author binds of an `http_request`: address, headers, query and body, with `{{name}}` for the parameters that the
//! model gives (L-3).
//!
//! Each value is encoded for the place it stands in, so that none can lead out of it: not to another host, path or header,
//! and not into another key of the body. Where a text is nothing but a name, the value itself takes its place.

use super::{
    configured_tool::bound_credential,
    fields::{Problems, shown},
    ids::CredentialId,
    output::{check_schema, faults_of},
    template::{Part, is_name, names, only_name, parts},
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value};

pub const METHODS: [&str; 6] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"];
const PARAMETERS_MAX: usize = 100;
/// Set by the client itself, or by this service.
const OWN_HEADERS: [&str; 10] = [
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "upgrade",
    "te",
    "trailer",
    "expect",
    "idempotency-key",
];
const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// Why a header can not be sent, if it can not.
pub fn header_fault(name: &str, value: &str) -> Option<String> {
    let is_token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    if name.is_empty() || !name.chars().all(is_token) {
        return Some("is no name of a header".into());
    }
    if OWN_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
        return Some("is a header that is set for you".into());
    }
    let is_printable = |c: char| c == '\t' || !c.is_control();
    (!value.chars().all(is_printable)).then(|| "has a value with a control character".into())
}

/// What is wrong with what an author has bound, beyond the types of single values.
pub(in crate::domain) fn check(
    bindings: &Map<String, Value>,
    parameters: Option<&Value>,
    problems: &mut Problems,
) {
    if let Some(parameters) = parameters {
        check_parameters(parameters, problems);
        if !bindings.contains_key("url") {
            let fault = "must be bound in a tool that has parameters";
            problems.add("bindings.url", fault);
        }
    }
    if let Some(url) = bindings.get("url").and_then(Value::as_str) {
        let sample = |name: &str| Some(Value::from(name));
        if let Err(fault) = fill_url(url, &sample) {
            problems.add("bindings.url", &fault);
        }
    }
    for (name, value) in fields(bindings, "headers", problems) {
        let path = format!("bindings.headers.{}", shown(name));
        let text = value.as_str();
        if text.is_none() && bound_credential(value).is_none() {
            problems.add(&path, "expected a text, or {\"credential\": ID}");
        }
        if let Some(fault) = header_fault(name, text.unwrap_or_default()) {
            problems.add(&path, &fault);
        }
    }
    for (name, value) in fields(bindings, "query", problems) {
        let is_nested = matches!(value, Value::Array(_) | Value::Object(_));
        if is_nested && bound_credential(value).is_none() {
            let path = format!("bindings.query.{}", shown(name));
            problems.add(
                &path,
                "expected a text, a number, true or false, or {\"credential\": ID}",
            );
        }
    }
    let declared = parameters.and_then(|p| p["properties"].as_object());
    let declared: Vec<&str> = declared.map_or(vec![], |p| p.keys().map(String::as_str).collect());
    for (argument, value) in bindings {
        each_text(value, &mut |text| {
            for name in names(text).filter(|name| !declared.contains(name)) {
                let has = match declared.is_empty() {
                    true => "it declares none".to_owned(),
                    false => format!("it declares {}", declared.join(", ")),
                };
                problems.add(
                    &format!("bindings.{argument}"),
                    &format!("uses {{{{{name}}}}}, which is not in the tool's `parameters`; {has}"),
                );
            }
        });
    }
}

fn check_parameters(parameters: &Value, problems: &mut Problems) {
    let properties = parameters["properties"].as_object();
    let Some(properties) = properties.filter(|_| parameters["type"] == "object") else {
        let fault =
            "expected a JSON Schema of the form {\"type\": \"object\", \"properties\": {…}}";
        return problems.add("parameters", fault);
    };
    if properties.len() > PARAMETERS_MAX {
        let fault = format!("has more than {PARAMETERS_MAX} properties");
        problems.add("parameters.properties", &fault);
    }
    for name in properties.keys().filter(|name| !is_name(name)) {
        problems.add(
            &format!("parameters.properties.{}", shown(name)),
            "the name must be letters, digits and `_`, not beginning with a digit",
        );
    }
    problems.0.extend(check_schema("parameters", parameters));
}

/// The fields of a bound object.
fn fields<'a>(
    bindings: &'a Map<String, Value>,
    argument: &str,
    problems: &mut Problems,
) -> impl Iterator<Item = (&'a String, &'a Value)> + use<'a> {
    let bound = bindings.get(argument);
    if bound.is_some_and(|bound| !bound.is_object()) {
        problems.add(&format!("bindings.{argument}"), "expected an object");
    }
    bound.and_then(Value::as_object).into_iter().flatten()
}

/// The arguments of the base tool: what is bound, with the model's `arguments` in the place of the parameters. The error
/// is for the model.
pub(in crate::domain) fn fill<'s>(
    bindings: &Map<String, Value>,
    parameters: &Value,
    arguments: &Value,
    secret: &impl Fn(CredentialId) -> Option<&'s str>,
) -> Result<Map<String, Value>, String> {
    let faults = faults_of(parameters, "arguments", arguments);
    if let Some(fault) = faults.first() {
        return Err(format!(
            "the arguments do not fit: {fault}. Correct them and call again."
        ));
    }
    let given = |name: &str| {
        arguments
            .get(name)
            .filter(|value| !value.is_null())
            .cloned()
    };
    let mut filled = Map::new();
    for (argument, bound) in bindings {
        let value = match (argument.as_str(), bound.as_str()) {
            ("url", Some(template)) => Some(fill_url(template, &given)?.into()),
            _ => fill_value(bound, &given, secret)?,
        };
        if let Some(value) = value {
            filled.insert(argument.clone(), value);
        }
    }
    Ok(filled)
}

/// A bound value with the values of credentials in it.
pub(in crate::domain) fn with_secrets<'s>(
    bound: &Value,
    secret: &impl Fn(CredentialId) -> Option<&'s str>,
) -> Result<Value, String> {
    let filled = fill_value(bound, &|_| None, secret)?;
    Ok(filled.unwrap_or(Value::Null))
}

/// `None`: the text is nothing but the name of a parameter that was not given, and is left out with its key.
fn fill_value<'s>(
    bound: &Value,
    given: &impl Fn(&str) -> Option<Value>,
    secret: &impl Fn(CredentialId) -> Option<&'s str>,
) -> Result<Option<Value>, String> {
    if let Some((id, prefix)) = bound_credential(bound) {
        let value = secret(id).ok_or("a credential of the tool can not be had")?;
        return Ok(Some(format!("{prefix}{value}").into()));
    }
    Ok(match bound {
        Value::String(template) => match only_name(template) {
            Some(name) => given(name),
            None => Some(fill_text(template, given).into()),
        },
        Value::Array(items) => {
            let mut filled = Vec::with_capacity(items.len());
            for item in items {
                filled.extend(fill_value(item, given, secret)?);
            }
            Some(filled.into())
        }
        Value::Object(fields) => {
            let mut filled = Map::new();
            for (key, value) in fields {
                if let Some(value) = fill_value(value, given, secret)? {
                    filled.insert(key.clone(), value);
                }
            }
            Some(filled.into())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => Some(bound.clone()),
    })
}

fn fill_text(template: &str, given: &impl Fn(&str) -> Option<Value>) -> String {
    let pieces = parts(template).into_iter().map(|part| match part {
        Part::Text(text) => text.to_owned(),
        Part::Name(name) => given(name).map(|value| as_text(&value)).unwrap_or_default(),
    });
    pieces.collect()
}

/// A value as it stands in a text: texts as they are, all else as JSON.
pub fn as_text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// In the host a value is one label; in the path it is within one segment, and not empty.
fn fill_url(template: &str, given: &impl Fn(&str) -> Option<Value>) -> Result<String, String> {
    let scheme = ["https://", "http://"]
        .into_iter()
        .find(|scheme| template.starts_with(scheme))
        .ok_or("must begin with https:// or http://")?;
    let mut url = String::new();
    let mut place = Place::Host;
    for part in parts(template) {
        match part {
            Part::Text(text) => {
                let after_scheme = match url.is_empty() {
                    true => &text[scheme.len()..],
                    false => text,
                };
                place = place.after(after_scheme);
                url += text;
            }
            Part::Name(name) => {
                let value = given(name).map(|value| as_text(&value)).unwrap_or_default();
                let is_label = |c: char| c.is_ascii_alphanumeric() || c == '-';
                if value.is_empty() && place != Place::Query {
                    return Err(format!("`{name}` is needed: it stands in the address"));
                }
                if place == Place::Host && !value.chars().all(|c| is_label(c) || c == '_') {
                    return Err(format!(
                        "`{name}` can have letters, digits and hyphens only: it stands in the name of the host"
                    ));
                }
                url.extend(utf8_percent_encode(&value, UNRESERVED));
            }
        }
    }
    let path = url[scheme.len()..]
        .split(['?', '#'])
        .next()
        .unwrap_or_default();
    match path
        .split('/')
        .skip(1)
        .any(|segment| segment == "." || segment == "..")
    {
        true => Err("the path would have a segment of dots, which leads out of it".into()),
        false => Ok(url),
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Host,
    Path,
    Query,
}

impl Place {
    fn after(self, text: &str) -> Self {
        match self {
            Self::Host if text.starts_with(['?', '#']) => Self::Query,
            Self::Host => match text.split_once(['/', '?', '#']) {
                Some(_) if text.contains(['?', '#']) => Self::Query,
                Some(_) => Self::Path,
                None => Self::Host,
            },
            Self::Path if text.contains(['?', '#']) => Self::Query,
            Self::Path | Self::Query => self,
        }
    }
}

fn each_text(value: &Value, look: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => look(text),
        Value::Array(items) => items.iter().for_each(|item| each_text(item, look)),
        Value::Object(fields) => fields.values().for_each(|field| each_text(field, look)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn filled(bindings: Value, arguments: Value) -> Result<Value, String> {
        let properties: Map<String, Value> = ["a", "b"]
            .map(|n| (n.to_owned(), json!({})))
            .into_iter()
            .collect();
        let parameters =
            json!({"type": "object", "properties": properties, "additionalProperties": false});
        let secret = |_| Some("s3cr3t");
        fill(
            bindings.as_object().unwrap(),
            &parameters,
            &arguments,
            &secret,
        )
        .map(Value::Object)
    }

    const ID: &str = "0193a5b0-0000-7000-8000-000000000001";

    // L-3, H-31, H-38
    #[test]
    fn values_are_encoded_for_the_place_they_stand_in() {
        let url = |template: &str, a: Value| {
            let filled = filled(json!({"url": template}), json!({"a": a}))?;
            Ok::<_, String>(filled["url"].as_str().unwrap().to_owned())
        };
        for (template, a, expected) in [
            (
                "https://h/x/{{a}}/y",
                json!("b/../c?d#e&f=%2e"),
                "https://h/x/b%2F..%2Fc%3Fd%23e%26f%3D%252e/y",
            ),
            (
                "https://h/?q={{a}}&r=1",
                json!("1&r=2 ü+"),
                "https://h/?q=1%26r%3D2%20%C3%BC%2B&r=1",
            ),
            ("https://h?q={{a}}", json!(""), "https://h?q="),
            (
                "https://{{a}}.example.com/x",
                json!("tenant-1"),
                "https://tenant-1.example.com/x",
            ),
            (
                "https://h/{{a}}",
                json!(12345678901234567890123u128),
                "https://h/12345678901234567890123",
            ),
            ("https://h/{{a}}", json!("{{b}}"), "https://h/%7B%7Bb%7D%7D"),
        ] {
            assert_eq!(url(template, a).as_deref(), Ok(expected), "{template}");
        }
        for (template, a, expected) in [
            ("https://{{a}}/", json!("evil.example"), "letters, digits"),
            (
                "https://{{a}}.example.com/",
                json!("x@evil"),
                "letters, digits",
            ),
            ("https://h/x/{{a}}", json!(".."), "segment of dots"),
            ("https://h/x/{{a}}/y", json!("."), "segment of dots"),
            ("https://h/x/.{{a}}", json!("."), "segment of dots"),
            ("https://h/x/{{a}}", json!(""), "`a` is needed"),
            ("https://h/x/{{a}}", json!(null), "`a` is needed"),
            ("{{a}}://h/", json!("https"), "must begin with"),
            ("ftp://h/", json!("x"), "must begin with"),
        ] {
            let error = url(template, a).unwrap_err();
            assert!(error.contains(expected), "{template}: {error}");
        }
        let bindings = json!({
            "url": "https://h/",
            "headers": {"X": "n {{a}} {{b}}", "Authorization": {"credential": ID, "prefix": "Bearer "}},
            "query": {"q": "{{a}}", "left_out": "{{b}}", "kept": "<{{b}}>"},
            "body": {"a": "{{a}}", "text": "it is {{a}}", "list": ["{{b}}", 1.50, {"credential": ID}], "b": "{{b}}"},
        });
        assert_eq!(
            filled(bindings, json!({"a": {"x": "{{b}}"}})).unwrap().to_string(),
            json!({
                "url": "https://h/",
                "headers": {"X": "n {\"x\":\"{{b}}\"} ", "Authorization": "Bearer s3cr3t"},
                "query": {"q": {"x": "{{b}}"}, "kept": "<>"},
                "body": {"a": {"x": "{{b}}"}, "text": "it is {\"x\":\"{{b}}\"}", "list": [1.50, "s3cr3t"]},
            })
            .to_string()
        );
        let error = filled(json!({"url": "https://h/"}), json!({"c": 1})).unwrap_err();
        assert!(
            error.contains("the arguments do not fit: arguments: Additional"),
            "{error}"
        );
    }

    proptest! {
        // L-3: whatever the value, host and path of the address stay the author's.
        #[test]
        fn no_value_leads_out_of_its_place(a in any::<String>()) {
            let Ok(filled) = filled(json!({"url": "https://h.example/x/{{a}}/y?q={{a}}"}), json!({"a": a})) else {
                return Ok(());
            };
            let url = reqwest::Url::parse(filled["url"].as_str().unwrap()).unwrap();
            prop_assert_eq!(url.host_str(), Some("h.example"));
            let segments: Vec<&str> = url.path_segments().unwrap().collect();
            prop_assert_eq!((segments.len(), segments[0], segments[2]), (3, "x", "y"));
            let query: Vec<(String, String)> = url.query_pairs().into_owned().collect();
            prop_assert_eq!(query, [("q".to_owned(), a)]);
        }
    }

    #[test]
    fn every_fault_of_what_is_bound_is_named() {
        // L-3, L-2
        let parameters = json!({"type": "object", "properties": {"a": {"type": "string"}}});
        for (bindings, parameters, expected) in [
            (
                json!({"url": "https://h/{{b}}"}),
                Some(&parameters),
                "bindings.url: uses {{b}}, which is not in the tool's `parameters`; it declares a",
            ),
            (
                json!({"url": "https://h/", "body": [{"x": "{{b}}"}]}),
                None,
                "bindings.body: uses {{b}}, which is not in the tool's `parameters`; it declares none",
            ),
            (
                json!({"url": "h/"}),
                None,
                "bindings.url: must begin with https://",
            ),
            (json!({}), Some(&parameters), "bindings.url: must be bound"),
            (
                json!({"headers": []}),
                None,
                "bindings.headers: expected an object",
            ),
            (
                json!({"headers": {"a b": "x"}}),
                None,
                "bindings.headers.a b: is no name",
            ),
            (
                json!({"headers": {"Host": "x"}}),
                None,
                "bindings.headers.Host: is a header that is set for you",
            ),
            (
                json!({"headers": {"X": "a\nb"}}),
                None,
                "bindings.headers.X: has a value with a control character",
            ),
            (
                json!({"headers": {"X": 5}}),
                None,
                "bindings.headers.X: expected a text",
            ),
            (
                json!({"query": {"q": [1]}}),
                None,
                "bindings.query.q: expected a text, a number",
            ),
            (
                json!({"url": "https://h/"}),
                Some(&json!({"type": "string"})),
                "parameters: expected a JSON Schema of the form",
            ),
            (
                json!({"url": "https://h/"}),
                Some(&json!({"type": "object", "properties": {"a b": {}}})),
                "parameters.properties.a b: the name must be",
            ),
            (
                json!({"url": "https://h/"}),
                Some(&json!({"type": "object", "properties": {"a": {"type": 5}}})),
                "parameters.properties.a.type: ",
            ),
        ] {
            let mut problems = Problems(vec![]);
            check(bindings.as_object().unwrap(), parameters, &mut problems);
            let told: Vec<String> = problems.0.iter().map(ToString::to_string).collect();
            assert!(
                told.first().is_some_and(|told| told.starts_with(expected)),
                "{bindings}: {told:?}"
            );
        }
    }
}
