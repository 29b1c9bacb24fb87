//! Reads bodies, paths and queries, and refuses what it can not take with a problem body that names the place.
//!
//! Syntax and types are judged here; what a value means is judged by the domain. Nothing is silently ignored: an unknown
//! field or parameter is an error. A malformed id in a path is answered like an id that does not exist.

use super::App;
use super::error::{Error, FieldError};
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, OptionalFromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header, request::Parts};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fmt::Display;
use std::str::FromStr;

/// A JSON body, read strictly; also the JSON body of an answer.
#[derive(Debug)]
pub struct Json<T>(pub T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        axum::Json(self.0).into_response()
    }
}

impl<T: DeserializeOwned> FromRequest<App> for Json<T> {
    type Rejection = Error;

    async fn from_request(request: Request, app: &App) -> Result<Self, Error> {
        if !is_json(request.headers()) {
            return Err(Error::UnsupportedMediaType);
        }
        let limit = app.config.server.body_limit_bytes;
        let body = Bytes::from_request(request, app)
            .await
            .map_err(|rejection| body_error(rejection, limit))?;
        parse(&body).map(Json)
    }
}

/// `None` for a request without a body, where every field has a default.
impl<T: DeserializeOwned> OptionalFromRequest<App> for Json<T> {
    type Rejection = Error;

    async fn from_request(request: Request, app: &App) -> Result<Option<Self>, Error> {
        let headers = request.headers();
        let has_body = headers.contains_key(header::TRANSFER_ENCODING)
            || headers
                .get(header::CONTENT_LENGTH)
                .is_some_and(|length| length != "0");
        if !has_body && !headers.contains_key(header::CONTENT_TYPE) {
            return Ok(None);
        }
        <Self as FromRequest<App>>::from_request(request, app)
            .await
            .map(Some)
    }
}

/// A body that may be any JSON at all, or nothing.
pub struct AnyJson(pub Option<Value>);

impl FromRequest<App> for AnyJson {
    type Rejection = Error;

    async fn from_request(request: Request, app: &App) -> Result<Self, Error> {
        let declared = is_json(request.headers());
        let limit = app.config.server.body_limit_bytes;
        let body = Bytes::from_request(request, app)
            .await
            .map_err(|rejection| body_error(rejection, limit))?;
        if body.is_empty() {
            return Ok(Self(None));
        }
        if !declared {
            return Err(Error::UnsupportedMediaType);
        }
        let value = parse_any(&body)?;
        check_storable("", &value).map_err(|error| Error::InvalidBody(vec![error]))?;
        Ok(Self(Some(value)))
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(content_type) = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
    else {
        return false;
    };
    let essence = content_type
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    essence == "application/json"
        || (essence.starts_with("application/") && essence.ends_with("+json"))
}

fn body_error(rejection: BytesRejection, limit: usize) -> Error {
    if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
        Error::BodyTooLarge { limit }
    } else {
        Error::BodyIncomplete
    }
}

fn text(body: &[u8]) -> Result<&str, Error> {
    std::str::from_utf8(body).map_err(|error| {
        Error::InvalidUtf8(format!("byte {} begins no character", error.valid_up_to()))
    })
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Error> {
    let text = text(body)?;
    // Every body is an object, but a derived type would take an array of its fields as well.
    if text.trim_start().starts_with('[') {
        serde_json::from_str::<serde::de::IgnoredAny>(text)
            .map_err(|error| json_error(text, String::new(), error))?;
        return Err(Error::field("", "must be a JSON object, not an array"));
    }
    parse_text(text)
}

fn parse_any(body: &[u8]) -> Result<Value, Error> {
    parse_text(text(body)?)
}

fn parse_text<T: DeserializeOwned>(text: &str) -> Result<T, Error> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        json_error(text, path, error.into_inner())
    })?;
    deserializer
        .end()
        .map_err(|error| json_error(text, String::new(), error))?;
    Ok(value)
}

fn json_error(text: &str, path: String, error: serde_json::Error) -> Error {
    let (line, column) = (error.line(), error.column());
    let message = error.to_string();
    let reason = message
        .strip_suffix(&format!(" at line {line} column {column}"))
        .unwrap_or(&message)
        .to_owned();
    match error.classify() {
        serde_json::error::Category::Data => Error::field(field_path(&path, &reason), reason),
        // An escaped half of a surrogate pair is well-formed JSON and still no text.
        _ if reason.contains("hex escape") => Error::InvalidUtf8(format!(
            "line {line}, column {column} has half of a surrogate pair"
        )),
        // A value that can not be an enum's, such as null, is no fault of the syntax, whatever serde_json says of it.
        _ if serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok() => {
            Error::field(field_path(&path, ""), "has a value of the wrong type")
        }
        _ => Error::MalformedJson {
            line,
            column,
            reason,
        },
    }
}

/// The path of a missing field leads to the field, not to the object that lacks it.
fn field_path(path: &str, reason: &str) -> String {
    let path = if path == "." { "" } else { path };
    let missing = reason
        .strip_prefix("missing field `")
        .and_then(|rest| rest.strip_suffix('`'));
    match missing {
        Some(field) if path.is_empty() => field.to_owned(),
        Some(field) => format!("{path}.{field}"),
        None => path.to_owned(),
    }
}

/// The parameters of the path. Every path parameter of the API names a thing, so one that can not be read names none.
pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let axum::extract::Path(value) = axum::extract::Path::<T>::from_request_parts(parts, state)
            .await
            .map_err(|_| Error::NotFound)?;
        Ok(Self(value))
    }
}

/// The query, read by the type itself so that each fault is reported under its parameter's name, all of them at once.
pub struct Query<T>(pub T);

pub trait FromQuery: Sized {
    fn from_query(query: &mut QueryReader) -> Self;
}

impl<T: FromQuery, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let axum::extract::Query(pairs) =
            axum::extract::Query::<Vec<(String, String)>>::from_request_parts(parts, state)
                .await
                .map_err(|_| {
                    Error::InvalidQuery(vec![FieldError::new("", "is not a valid query string")])
                })?;
        let mut reader = QueryReader {
            pairs,
            errors: Vec::new(),
        };
        let value = T::from_query(&mut reader);
        for (name, _) in std::mem::take(&mut reader.pairs) {
            reader
                .errors
                .push(FieldError::new(name, "is not a parameter of this route"));
        }
        if reader.errors.is_empty() {
            Ok(Self(value))
        } else {
            Err(Error::InvalidQuery(reader.errors))
        }
    }
}

/// The pairs of a query that nobody has taken yet, and what was wrong with those taken.
pub struct QueryReader {
    pairs: Vec<(String, String)>,
    errors: Vec<FieldError>,
}

impl QueryReader {
    /// All values of a parameter that may be repeated. `expected` completes the sentence "must be …".
    pub fn many<T: FromStr>(&mut self, name: &str, expected: impl Display) -> Vec<T> {
        let texts = self.take(name);
        let mut values = Vec::with_capacity(texts.len());
        for text in texts {
            match text.parse() {
                Ok(value) => values.push(value),
                Err(_) => self.refuse(name, format!("must be {expected}")),
            }
        }
        values
    }

    /// A parameter that is given at most once. An empty value is as good as none.
    pub fn optional<T: FromStr>(&mut self, name: &str, expected: impl Display) -> Option<T> {
        let mut texts = self.take(name);
        if texts.len() > 1 {
            self.refuse(name, "must be given once");
            return None;
        }
        let text = texts.pop().filter(|text| !text.is_empty())?;
        let value = text.parse().ok();
        if value.is_none() {
            self.refuse(name, format!("must be {expected}"));
        }
        value
    }

    /// Page sizes: 1 to `max`.
    pub fn limit(&mut self, default: u32, max: u32) -> u32 {
        let limit = self
            .optional("limit", format!("a number from 1 to {max}"))
            .unwrap_or(default);
        if !(1..=max).contains(&limit) {
            self.refuse("limit", format!("must be a number from 1 to {max}"));
        }
        limit
    }

    pub fn refuse(&mut self, name: &str, reason: impl Into<String>) {
        self.errors.push(FieldError::new(name, reason));
    }

    fn take(&mut self, name: &str) -> Vec<String> {
        self.pairs
            .extract_if(.., |(key, _)| key == name)
            .map(|(_, value)| value)
            .collect()
    }
}

/// Refuses what a `jsonb` column can not hold, although it is valid JSON: NUL characters, and numbers of more than
/// [`DIGITS_MAX`] digits (written out, so `1e999` counts as a thousand).
pub fn check_storable(path: &str, value: &Value) -> Result<(), FieldError> {
    match value {
        Value::String(text) => check_text(path, text),
        Value::Number(number) => check_number(path, &number.to_string()),
        Value::Array(values) => values
            .iter()
            .enumerate()
            .try_for_each(|(i, value)| check_storable(&format!("{path}[{i}]"), value)),
        Value::Object(fields) => check_storable_object(path, fields),
        Value::Null | Value::Bool(_) => Ok(()),
    }
}

/// [`check_storable`] for the fields of an object.
pub fn check_storable_object(
    path: &str,
    fields: &serde_json::Map<String, Value>,
) -> Result<(), FieldError> {
    fields.iter().try_for_each(|(key, value)| {
        check_text(path, key)?;
        check_storable(&format!("{path}.{key}"), value)
    })
}

fn check_text(path: &str, text: &str) -> Result<(), FieldError> {
    if text.contains('\0') {
        Err(FieldError::new(path, "must not contain the NUL character"))
    } else {
        Ok(())
    }
}

const DIGITS_MAX: i64 = 1000;

fn check_number(path: &str, text: &str) -> Result<(), FieldError> {
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let exponent = exponent.parse::<i64>().unwrap_or(i64::MAX);
    if digits.len() as i64 > DIGITS_MAX || exponent.saturating_abs() > DIGITS_MAX {
        return Err(FieldError::new(
            path,
            format!("must not be a number of more than {DIGITS_MAX} digits"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use serde_json::json;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Body {
        message: String,
        #[serde(default)]
        tools: Vec<Tool>,
    }

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)]
    struct Tool {
        limit: u8,
    }

    // P-2: syntax is 400 with the place, everything else 422 with the path.
    #[test]
    fn each_fault_of_a_body_has_its_own_answer() {
        let cases: [(&[u8], &str); 14] = [
            (b"", "malformed 1:0"),
            (b"{\"message\": ", "malformed 1:12"),
            (b"{\"message\":\n nope}", "malformed 2:3"),
            (b"{\"message\": \"a\"} {}", "malformed 1:18"),
            (b"{\"message\": \"a\x01\"}", "malformed 1:15"),
            (b"[1,2", "malformed 1:4"),
            (b"[]", "field "),
            (b"{}", "field message"),
            (b"{\"message\": 5}", "field message"),
            (b"{\"message\": \"a\", \"x\": 1}", "field x"),
            (
                b"{\"message\": \"a\", \"tools\": [{\"limit\": 1}, {\"limit\": 256}]}",
                "field tools[1].limit",
            ),
            (
                b"{\"message\": \"a\", \"tools\": [{}]}",
                "field tools[0].limit",
            ),
            (b"{\"message\": \"\xff\"}", "utf8"),
            (b"{\"message\": \"\\ud800\"}", "utf8"),
        ];
        for (body, expected) in cases {
            let found = match parse::<Body>(body) {
                Ok(_) => "ok".to_owned(),
                Err(Error::MalformedJson { line, column, .. }) => {
                    format!("malformed {line}:{column}")
                }
                Err(Error::InvalidBody(errors)) => format!("field {}", errors[0].path),
                Err(Error::InvalidUtf8(_)) => "utf8".to_owned(),
                Err(other) => other.to_string(),
            };
            assert_eq!(found, expected, "{}", String::from_utf8_lossy(body));
        }
    }

    // R-4, T-3: what the database can not hold is refused before it gets there.
    #[test]
    fn jsonb_can_hold_what_passes() {
        let number = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        for good in [
            json!({"a": [1, "b", null, true]}),
            number("1e308"),
            number("-0.0000001"),
            number("123456789012345678901234567890"),
        ] {
            assert_eq!(check_storable("metadata", &good), Ok(()), "{good}");
        }
        let path = |value: &Value| check_storable("metadata", value).unwrap_err().path;
        assert_eq!(path(&json!({"a": ["b", "c\u{0}"]})), "metadata.a[1]");
        assert_eq!(path(&json!({"a\u{0}": 1})), "metadata");
        assert_eq!(path(&number("1e200000")), "metadata");
        assert_eq!(path(&number("1e-99999999999999999999")), "metadata");
        assert_eq!(path(&number(&"9".repeat(2000))), "metadata");
    }

    // any bytes at all get an answer.
    proptest::proptest! {
        #[test]
        fn no_body_panics(body in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = parse::<Body>(&body);
            let _ = parse_any(&body);
        }
    }
}
