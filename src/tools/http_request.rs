//! Calls a REST service (L-3). Here the arguments are read; `Http::send` does the rest, and writes nothing.

mod send;

pub use send::{Http, Sent};

use super::{Classifier, Instance, Tool, ToolOutcome, parse};
use crate::domain::http_request::{METHODS, as_text, header_fault};
use crate::domain::turn::Concurrency;
use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::fmt;

pub(super) const NAME: &str = "http_request";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Args {
    method: Option<String>,
    url: String,
    headers: Option<Map<String, Value>>,
    query: Option<Map<String, Value>>,
    body: Option<Value>,
}

/// A request that may be sent.
pub struct HttpRequest {
    method: reqwest::Method,
    url: Url,
    headers: HeaderMap,
    body: Option<Vec<u8>>,
    /// Where in the answer's body the result is, as a path for `json_path`.
    response_path: Option<String>,
    timeout_seconds: Option<f64>,
    /// Sending it twice does no more than sending it once.
    pub is_repeatable: bool,
}

/// Says nothing of address, headers and body: secrets may stand there.
impl fmt::Debug for HttpRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpRequest")
            .field("method", &self.method)
            .finish_non_exhaustive()
    }
}

pub(super) fn tool() -> Tool {
    Tool {
        name: NAME,
        display_name: "HTTP request",
        schema: json!({
            "type": "object",
            "properties": {
                "method": {"type": "string", "enum": METHODS, "description": "Default GET."},
                "url": {"type": "string", "format": "uri", "description": "Where to, with https:// or http://."},
                "headers": {"type": "object", "description": "By name, each a text."},
                "query": {"type": "object", "description": "Parameters that are appended to the url, encoded."},
                "body": {"description": "Sent as JSON."}
            },
            "required": ["url"],
            "additionalProperties": false
        }),
        default_enabled: false,
        delegates: false,
        concurrency: Classifier::ByArguments(concurrency),
        tags: &["http"],
        author_arguments: json!({
            "response_path": {"type": "string", "maxLength": 500, "description": "Dotted path into the JSON of the answer, as data.items: only what is there is the result."},
            "timeout_seconds": {"type": "number", "exclusiveMinimum": 0, "description": "At most http.timeout_seconds."},
            "repeatable": {"type": "boolean", "description": "true: sending it twice does no more than sending it once, so it is sent again when its answer was lost. GET and HEAD always are."}
        }),
        keeps_arguments: false,
    }
}

/// What only reads overlaps.
fn concurrency(arguments: &Value) -> Concurrency {
    match arguments["method"].as_str() {
        None | Some("GET" | "HEAD") => Concurrency::Parallel,
        Some(_) => Concurrency::Exclusive,
    }
}

pub(super) fn call(arguments: &str, instance: Option<&Instance>) -> Result<ToolOutcome, String> {
    let args: Args = parse(NAME, arguments)?;
    let rule = |name: &str| instance.and_then(|instance| instance.tool.bindings.get(name));
    let response_path = rule("response_path").and_then(Value::as_str);
    let repeatable = rule("repeatable").and_then(Value::as_bool).unwrap_or(false);
    let request = request(args).map_err(|(at, fault)| {
        format!("{NAME}: the arguments do not fit at `{at}`: {fault}. Correct them and call again.")
    })?;
    Ok(ToolOutcome::Http(Box::new(HttpRequest {
        is_repeatable: repeatable || request.method.is_safe(),
        response_path: response_path.map(str::to_owned),
        timeout_seconds: rule("timeout_seconds").and_then(Value::as_f64),
        ..request
    })))
}

fn request(args: Args) -> Result<HttpRequest, (String, String)> {
    let method = args.method.as_deref().unwrap_or("GET");
    if !METHODS.contains(&method) {
        let choices = METHODS.join(", ");
        return Err(("method".into(), format!("expected one of {choices}")));
    }
    let mut url = Url::parse(&args.url)
        .map_err(|fault| ("url".into(), format!("is no absolute address: {fault}")))?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(("url".into(), "must begin with https:// or http://".into()));
    }
    if !url.username().is_empty() || url.password().is_some() {
        let fault = "must not contain a user name or password; send the header Authorization";
        return Err(("url".into(), fault.into()));
    }
    let query = args.query.unwrap_or_default();
    let given: Vec<_> = query.iter().filter(|(_, value)| !value.is_null()).collect();
    if !given.is_empty() {
        let mut pairs = url.query_pairs_mut();
        for (name, value) in given {
            pairs.append_pair(name, &as_text(value));
        }
    }
    let mut headers = HeaderMap::new();
    for (name, value) in args.headers.unwrap_or_default() {
        let at = || format!("headers.{name}");
        let value = match &value {
            Value::Null => continue,
            Value::Array(_) | Value::Object(_) => return Err((at(), "expected a text".into())),
            Value::String(_) | Value::Number(_) | Value::Bool(_) => as_text(&value),
        };
        if let Some(fault) = header_fault(&name, &value) {
            return Err((at(), fault));
        }
        let parsed = (name.parse::<HeaderName>(), HeaderValue::from_str(&value));
        let (Ok(name), Ok(value)) = parsed else {
            return Err((at(), "is no header that can be sent".into()));
        };
        headers.insert(name, value);
    }
    let body = args.body.map(|body| {
        let is_json = headers
            .get("content-type")
            .is_none_or(|kind| kind.to_str().is_ok_and(|kind| kind.contains("json")));
        headers
            .entry("content-type")
            .or_insert(HeaderValue::from_static("application/json"));
        match body {
            Value::String(text) if !is_json => text.into_bytes(),
            body => body.to_string().into_bytes(),
        }
    });
    Ok(HttpRequest {
        method: method
            .parse()
            .map_err(|_| ("method".into(), "is unknown".into()))?,
        url,
        headers,
        body,
        response_path: None,
        timeout_seconds: None,
        is_repeatable: false,
    })
}
