//! What a provider's refusal means: its message, whether another attempt can help, how long it wants us to wait (T-14,
//! H-26, H-27). The texts still hold what the provider put into them: `redact` takes keys out.

use super::{ModelError, Retry};
use crate::domain::decision::{clean, clean_json};
use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};
use serde_json::Value;
use std::time::{Duration, SystemTime};

/// Longest message of a provider that is kept, in characters.
const MESSAGE_CHARS_MAX: usize = 1000;

/// An answer with an HTTP status other than success. `now` is only used where the answer carries no date of its own.
pub fn from_response(status: u16, headers: &HeaderMap, body: &str, now: SystemTime) -> ModelError {
    let json = serde_json::from_str::<Value>(&clean_json(body)).ok();
    let said = json
        .as_ref()
        .and_then(message)
        .unwrap_or_else(|| shorten(body));
    let hint = header_hint(headers, now).or_else(|| body_hint(json.as_ref(), &said));
    let reason = reqwest::StatusCode::from_u16(status)
        .ok()
        .and_then(|status| status.canonical_reason())
        .map(|reason| format!(" {reason}"))
        .unwrap_or_default();
    let said = if said.is_empty() {
        "no further details".to_owned()
    } else {
        said
    };
    ModelError {
        retry: retry(Some(status), hint),
        status: Some(status),
        message: format!("The model provider answered {status}{reason}: {said}"),
    }
}

/// An error that came as an event of a stream which had begun with 200.
pub fn in_stream(data: &str) -> ModelError {
    let json = serde_json::from_str::<Value>(&clean_json(data)).ok();
    let said = json
        .as_ref()
        .and_then(message)
        .unwrap_or_else(|| shorten(data));
    let status = json.as_ref().and_then(status);
    let hint = body_hint(json.as_ref(), &said);
    let with_status = status
        .map(|status| format!(" {status}"))
        .unwrap_or_default();
    ModelError {
        retry: retry(status, hint),
        status,
        message: format!("The model provider broke off with an error{with_status}: {said}"),
    }
}

fn retry(status: Option<u16>, hint: Option<Duration>) -> Retry {
    match status {
        None | Some(408 | 429 | 500..=599) => Retry::After(hint),
        Some(_) => Retry::Never,
    }
}

/// The object that describes the error, wherever the provider puts it.
fn error_object(json: &Value) -> &Value {
    let json = json.get(0).unwrap_or(json);
    [json.get("error"), json.pointer("/choices/0/error")]
        .into_iter()
        .flatten()
        .find(|error| !error.is_null())
        .unwrap_or(json)
}

fn message(json: &Value) -> Option<String> {
    let error = error_object(json);
    let text = ["/message", "/error/message", "/detail", "/error"]
        .into_iter()
        .filter_map(|path| error.pointer(path))
        .chain([error])
        .find_map(|value| value.as_str().filter(|text| !text.trim().is_empty()))?;
    Some(shorten(text))
}

/// One line, bounded.
pub fn shorten(text: &str) -> String {
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
        if line.len() > 4 * MESSAGE_CHARS_MAX {
            break;
        }
    }
    match line.char_indices().nth(MESSAGE_CHARS_MAX) {
        Some((cut, _)) => format!("{}…", clean(&line[..cut])),
        None => clean(&line).into_owned(),
    }
}

/// The status that an error object names as a number or means by a word.
fn status(json: &Value) -> Option<u16> {
    let error = error_object(json);
    let fields = ["code", "status", "status_code", "type"].map(|key| error.get(key));
    let number = |value: &Value| match value {
        Value::String(text) => text.trim().parse().ok(),
        other => other.as_u64().and_then(|number| u16::try_from(number).ok()),
    };
    let named = fields.iter().flatten().find_map(|value| number(value));
    if let Some(status) = named.filter(|status| (400..600).contains(status)) {
        return Some(status);
    }
    let words = fields.iter().flatten().filter_map(|value| value.as_str());
    words.map(str::to_ascii_lowercase).find_map(|word| {
        [
            ("rate_limit", 429),
            ("resource_exhausted", 429),
            ("quota", 429),
            ("overloaded", 529),
            ("unavailable", 503),
            ("timeout", 504),
            ("deadline", 504),
            ("server_error", 500),
            ("internal", 500),
            ("api_error", 500),
            ("authentic", 401),
            ("api_key", 401),
            ("permission", 403),
            ("billing", 402),
            ("too_large", 413),
            ("not_found", 404),
            ("invalid", 400),
            ("bad_request", 400),
            ("badrequest", 400),
            ("context_length", 400),
            ("unsupported", 400),
        ]
        .into_iter()
        .find_map(|(part, status)| word.contains(part).then_some(status))
    })
}

fn header_hint(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    if let Some(hint) = text("retry-after-ms").and_then(|ms| positive(ms, 0.001)) {
        return Some(hint);
    }
    let retry_after = text(RETRY_AFTER.as_str())?;
    positive(retry_after, 1.0).or_else(|| {
        let until = httpdate::parse_http_date(retry_after).ok()?;
        // Against the provider's own clock where it tells: ours may be wrong (R-3).
        let sent = text(DATE.as_str()).and_then(|date| httpdate::parse_http_date(date).ok());
        Some(
            until
                .duration_since(sent.unwrap_or(now))
                .unwrap_or_default(),
        )
    })
}

fn positive(number: &str, unit_secs: f64) -> Option<Duration> {
    let secs = number.parse::<f64>().ok()? * unit_secs;
    if secs.is_nan() || secs < 0.0 {
        return None;
    }
    Some(Duration::try_from_secs_f64(secs).unwrap_or(Duration::MAX))
}

/// A delay inside the body: a field (Gemini's `retryDelay`, `retry_after`), or words ("try again in 7.66s").
fn body_hint(json: Option<&Value>, said: &str) -> Option<Duration> {
    json.map(error_object).and_then(field_hint).or_else(|| {
        let said = said.to_ascii_lowercase();
        ["try again in ", "retry in ", "retry after "]
            .into_iter()
            .find_map(|words| {
                let at = said.find(words)? + words.len();
                span(&said[at..])
            })
    })
}

fn field_hint(error: &Value) -> Option<Duration> {
    let details = error.get("details").and_then(Value::as_array);
    let delay =
        details.and_then(|details| details.iter().find_map(|detail| detail.get("retryDelay")));
    [
        delay,
        error.get("retry_after"),
        error.pointer("/metadata/retry_after"),
    ]
    .into_iter()
    .flatten()
    .find_map(|value| match value {
        Value::String(text) => span(text),
        Value::Number(number) => positive(&number.to_string(), 1.0),
        _ => None,
    })
}

/// A span of time at the beginning of a text: `7s`, `1m30.5s`, `350ms`, `20 seconds`, and plain seconds.
fn span(text: &str) -> Option<Duration> {
    let mut rest = text.trim_start();
    let mut total = None;
    while rest.starts_with(|c: char| c.is_ascii_digit()) {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(rest.len());
        let number = rest[..digits].trim_end_matches('.');
        let unit = rest[digits..].trim_start();
        let letters = unit
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(unit.len());
        let secs = match &unit[..letters] {
            "ms" | "millisecond" | "milliseconds" => 0.001,
            "s" | "sec" | "secs" | "second" | "seconds" => 1.0,
            "m" | "min" | "mins" | "minute" | "minutes" => 60.0,
            "h" | "hour" | "hours" => 3600.0,
            // A number that ends the text, or that another word follows: seconds, as in the header.
            _ if total.is_none() => return positive(number, 1.0),
            _ => break,
        };
        let part = positive(number, secs)?;
        total = Some(total.unwrap_or(Duration::ZERO).saturating_add(part));
        rest = unit[letters..].trim_start();
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use reqwest::header::{HeaderName, HeaderValue};

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_str(value).unwrap(),
                )
            })
            .collect()
    }

    fn now() -> SystemTime {
        httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap()
    }

    #[test]
    fn the_delay_is_read_in_every_form() {
        // H-26
        let date = "Sun, 06 Nov 1994 08:49:44 GMT";
        let gemini = r#"[{"error":{"code":429,"message":"Quota","details":[{"@type":"x"},{"retryDelay":"7s"}]}}]"#;
        for (list, body, expected) in [
            (&[("retry-after", "7")][..], "", Some(7000)),
            (&[("retry-after", " 1.5 ")], "", Some(1500)),
            (&[("retry-after", "0")], "", Some(0)),
            (&[("retry-after", "86400")], "", Some(86_400_000)),
            (&[("retry-after", date)], "", Some(7000)),
            (
                &[
                    ("retry-after", date),
                    ("date", "Sun, 06 Nov 1994 08:49:41 GMT"),
                ],
                "",
                Some(3000),
            ),
            (
                &[
                    ("retry-after", date),
                    ("date", "Mon, 07 Nov 1994 00:00:00 GMT"),
                ],
                "",
                Some(0),
            ),
            (
                &[("retry-after-ms", "250"), ("retry-after", "7")],
                "",
                Some(250),
            ),
            (
                &[("retry-after-ms", "soon"), ("retry-after", "7")],
                "",
                Some(7000),
            ),
            (&[("retry-after", "-3")], "", None),
            (&[("retry-after", "NaN")], "", None),
            (&[("retry-after", "soon")], "", None),
            (&[("retry-after", "soon")], gemini, Some(7000)),
            (&[], gemini, Some(7000)),
            (
                &[],
                r#"{"error":{"message":"Please try again in 7.66s. Visit x."}}"#,
                Some(7660),
            ),
            (
                &[],
                r#"{"error":{"message":"Try again in 1m30.5s"}}"#,
                Some(90_500),
            ),
            (
                &[],
                r#"{"error":{"message":"Please retry in 350ms."}}"#,
                Some(350),
            ),
            (
                &[],
                r#"{"error":{"message":"Try again in 20 seconds."}}"#,
                Some(20_000),
            ),
            (
                &[],
                r#"{"error":{"message":"retry after 12"}}"#,
                Some(12_000),
            ),
            (
                &[],
                r#"{"error":{"message":"slow down","retry_after":3}}"#,
                Some(3000),
            ),
            (&[], r#"{"error":{"message":"try again in a while"}}"#, None),
            (&[], "<html>busy</html>", None),
        ] {
            for status in [429, 503, 529] {
                let error = from_response(status, &headers(list), body, now());
                let expected = expected.map(Duration::from_millis);
                assert_eq!(error.retry, Retry::After(expected), "{list:?} {body}");
            }
        }
        let huge = from_response(429, &headers(&[("retry-after", "1e300")]), "", now());
        assert_eq!(huge.retry, Retry::After(Some(Duration::MAX)));
    }

    #[test]
    fn the_status_decides_whether_to_repeat() {
        // T-14
        for status in [408, 429, 500, 502, 503, 504, 529, 599] {
            let error = from_response(status, &HeaderMap::new(), "", now());
            assert_eq!(
                (error.retry, error.status),
                (Retry::After(None), Some(status))
            );
        }
        for status in [300, 302, 400, 401, 403, 404, 409, 413, 422] {
            let error = from_response(status, &HeaderMap::new(), "", now());
            assert_eq!((error.retry, error.status), (Retry::Never, Some(status)));
        }
    }

    #[test]
    fn the_providers_message_is_kept_bounded() {
        // T-14
        for (body, expected) in [
            (r#"{"error":{"message":"No such\nmodel"}}"#, "No such model"),
            (r#"{"error":"plain"}"#, "plain"),
            (r#"{"detail":"Not Found"}"#, "Not Found"),
            (r#"{"message":"direct\u0000"}"#, "direct␀"),
            (r#"[{"error":{"message":"listed"}}]"#, "listed"),
            ("  upstream \n gone ", "upstream gone"),
            ("", "no further details"),
        ] {
            let error = from_response(404, &HeaderMap::new(), body, now());
            assert_eq!(
                error.message,
                format!("The model provider answered 404 Not Found: {expected}")
            );
        }
        let long = from_response(400, &HeaderMap::new(), &"é ".repeat(90_000), now());
        assert!(long.message.chars().count() < MESSAGE_CHARS_MAX + 100);
        assert!(long.message.ends_with('…'));
    }

    #[test]
    fn an_error_in_the_stream_has_the_status_that_it_names_or_means() {
        // H-27
        let again = Retry::After(None);
        for (data, status, retry) in [
            (
                r#"{"error":{"message":"m","code":400}}"#,
                Some(400),
                Retry::Never,
            ),
            (
                r#"{"error":{"message":"m","code":"503"}}"#,
                Some(503),
                again,
            ),
            (
                r#"{"error":{"message":"m","type":"invalid_request_error","code":null}}"#,
                Some(400),
                Retry::Never,
            ),
            (
                r#"{"error":{"message":"m","type":"rate_limit_error"}}"#,
                Some(429),
                again,
            ),
            (
                r#"{"type":"error","error":{"type":"overloaded_error","message":"m"}}"#,
                Some(529),
                again,
            ),
            (
                r#"{"error":{"message":"m","type":"server_error"}}"#,
                Some(500),
                again,
            ),
            (
                r#"{"error":{"message":"m","code":"context_length_exceeded"}}"#,
                Some(400),
                Retry::Never,
            ),
            (
                r#"{"error":{"message":"m","code":429,"status":"RESOURCE_EXHAUSTED"}}"#,
                Some(429),
                again,
            ),
            (
                r#"{"object":"error","message":"m","code":400}"#,
                Some(400),
                Retry::Never,
            ),
            (
                r#"{"choices":[{"error":{"message":"m","code":502}}]}"#,
                Some(502),
                again,
            ),
            (r#"{"error":"m"}"#, None, again),
            ("m", None, again),
        ] {
            let error = in_stream(data);
            assert_eq!((error.status, error.retry), (status, retry), "{data}");
            assert!(error.message.ends_with(": m"), "{data}: {}", error.message);
        }
    }
}
