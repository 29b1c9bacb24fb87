//! Sends a request and reads its answer, within limits of time and size, to addresses that it may reach only.
//!
//! What may be repeated is tried again after a lost connection and when the service asks for patience; all else is sent
//! once, and where its outcome can not be known the model is told so (X-15, H-15). Redirects are followed here, each one
//! checked like the first address, and to another host without the headers, which may hold secrets.

use super::HttpRequest;
use crate::{
    config::Config,
    domain::{ids::StepId, json_path, retry},
    net::{NotPublic, Reach, is_refused},
};
use futures::StreamExt;
use reqwest::{
    Client, Method, Response, StatusCode, Url,
    header::{CONTENT_TYPE, HeaderMap, LOCATION, RETRY_AFTER},
};
use serde_json::{Value, json};
use std::time::{Duration, SystemTime};

const REDIRECTS_MAX: u32 = 5;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends for all tools of a process. Cheap to clone.
#[derive(Clone)]
pub struct Http {
    client: Client,
    reach: Reach,
    timeout: Duration,
    bytes_max: usize,
    retry: retry::Limits,
}

/// What a request has come to.
#[derive(Clone, Debug, PartialEq)]
pub struct Sent {
    /// For the model.
    pub text: String,
    /// The JSON of the answer, or what `response_path` names in it. `None`: there is an error instead.
    pub content: Option<Value>,
}

/// Why there is no answer.
enum Fault {
    /// Nothing was sent.
    NotSent(String),
    /// It may have been received.
    Lost(String),
    /// There was an answer that can not be used.
    Unusable(String),
}

struct Answer {
    status: StatusCode,
    content_type: String,
    retry_after: Option<Duration>,
    body: Vec<u8>,
}

impl Http {
    pub fn from_config(config: &Config) -> Self {
        let http = &config.http;
        let reach = Reach::with_private(http.allow_private_addresses);
        let client = reach
            .client()
            .connect_timeout(CONNECT_TIMEOUT)
            .user_agent(concat!("reconvene/", env!("CARGO_PKG_VERSION")))
            .build()
            .expect("a client without files needs nothing that could be missing");
        Self {
            client,
            reach,
            timeout: Duration::from_secs(http.timeout_seconds.into()),
            bytes_max: http.max_response_bytes as usize,
            retry: retry::Limits {
                attempts_max: http.max_attempts,
                base: Duration::from_millis(500),
                max: Duration::from_secs(2),
            },
        }
    }

    /// `key` is the same however often the call is repeated.
    pub async fn send(&self, request: &HttpRequest, key: StepId) -> Sent {
        let timeout = request.timeout_seconds.map(Duration::from_secs_f64);
        let timeout = timeout.map_or(self.timeout, |own| own.min(self.timeout));
        let mut attempt = 1;
        loop {
            let answered = tokio::time::timeout(timeout, self.follow(request, key)).await;
            let answered = answered.unwrap_or_else(|_| {
                let after = timeout.as_secs_f64();
                Err(Fault::Lost(format!(
                    "there was no whole answer within {after} s"
                )))
            });
            let again = match &answered {
                Err(Fault::NotSent(_)) => Some(None),
                Err(Fault::Lost(_)) if request.is_repeatable => Some(None),
                Ok(answer) if request.is_repeatable && is_passing(answer.status) => {
                    Some(answer.retry_after)
                }
                Ok(_) | Err(Fault::Lost(_) | Fault::Unusable(_)) => None,
            };
            let pause = again.and_then(|hint| {
                retry::next_delay(attempt, hint, &self.retry, fastrand::f64()).ok()
            });
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => return told(request, answered),
            }
            attempt += 1;
        }
    }

    async fn follow(&self, request: &HttpRequest, key: StepId) -> Result<Answer, Fault> {
        let mut url = request.url.clone();
        let mut method = request.method.clone();
        let mut body = request.body.clone();
        let mut headers = request.headers.clone();
        for hop in 0..=REDIRECTS_MAX {
            let not_public = |error: NotPublic| match hop {
                0 => Fault::NotSent(error.to_string()),
                _ => Fault::Unusable(format!("the answer leads elsewhere, and {error}")),
            };
            self.reach.check(&url).map_err(not_public)?;
            let mut sending = self
                .client
                .request(method.clone(), url.clone())
                .headers(headers.clone());
            if url.origin() == request.url.origin() {
                sending = sending.header("idempotency-key", key.to_string());
            }
            if let Some(body) = &body {
                sending = sending.body(body.clone());
            }
            let response = sending.send().await.map_err(|error| match error {
                error if is_refused(&error) => not_public(NotPublic),
                error if error.is_connect() && hop == 0 => {
                    Fault::NotSent(format!("no connection could be made: {}", reason(error)))
                }
                error => Fault::Lost(format!("the connection broke off: {}", reason(error))),
            })?;
            let Some(next) = redirected(&response)? else {
                return self.read(response).await;
            };
            if !matches!(response.status().as_u16(), 307 | 308) && method != Method::HEAD {
                method = Method::GET;
                body = None;
                headers.remove(CONTENT_TYPE);
            }
            if next.origin() != url.origin() {
                if body.is_some() {
                    let told = "the answer leads to another host, where a body is not sent";
                    return Err(Fault::Unusable(told.into()));
                }
                headers = HeaderMap::new();
            }
            url = next;
        }
        let told = format!("it was redirected more than {REDIRECTS_MAX} times");
        Err(Fault::Unusable(told))
    }

    async fn read(&self, response: Response) -> Result<Answer, Fault> {
        let bytes_max = self.bytes_max;
        let too_large = || {
            Fault::Unusable(format!(
                "the answer is larger than {bytes_max} bytes, and nothing of it was kept; ask for less"
            ))
        };
        let header = |name| response.headers().get(name).and_then(|v| v.to_str().ok());
        let mut answer = Answer {
            status: response.status(),
            content_type: header(CONTENT_TYPE).unwrap_or_default().to_owned(),
            retry_after: header(RETRY_AFTER).and_then(seconds_of),
            body: Vec::new(),
        };
        if response
            .content_length()
            .is_some_and(|length| length > bytes_max as u64)
        {
            return Err(too_large());
        }
        let mut stream = response.bytes_stream();
        while let Some(chunk) = stream.next().await {
            let chunk = chunk
                .map_err(|error| Fault::Lost(format!("the answer broke off: {}", reason(error))))?;
            if answer.body.len() + chunk.len() > bytes_max {
                return Err(too_large());
            }
            answer.body.extend_from_slice(&chunk);
        }
        Ok(answer)
    }
}

/// Where a redirect leads; `None`: it is none.
fn redirected(response: &Response) -> Result<Option<Url>, Fault> {
    let location = response.headers().get(LOCATION);
    let is_redirect = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
    let Some(location) = location.filter(|_| is_redirect) else {
        return Ok(None);
    };
    let to = location
        .to_str()
        .ok()
        .and_then(|to| response.url().join(to).ok());
    match to {
        Some(to) if matches!(to.scheme(), "http" | "https") && to.has_host() => Ok(Some(to)),
        Some(_) | None => Err(Fault::Unusable("the answer leads to no web address".into())),
    }
}

/// The service may answer in a moment.
fn is_passing(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504)
}

fn seconds_of(text: &str) -> Option<Duration> {
    let seconds = text.trim().parse().map(Duration::from_secs).ok();
    seconds.or_else(|| {
        let at = httpdate::parse_http_date(text).ok()?;
        Some(at.duration_since(SystemTime::now()).unwrap_or_default())
    })
}

/// The innermost cause, without the address: secrets may stand in it.
fn reason(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut cause: &dyn std::error::Error = &error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

fn told(request: &HttpRequest, answered: Result<Answer, Fault>) -> Sent {
    let error = |text: String| Sent {
        text,
        content: None,
    };
    let unknown = match request.method.is_safe() {
        true => "",
        false => {
            " Whether the request had an effect is unknown: it may have. Look whether it had before you send it again."
        }
    };
    let answer = match answered {
        Ok(answer) => answer,
        Err(Fault::NotSent(why)) => {
            return error(format!("The request was not sent: {why}."));
        }
        Err(Fault::Lost(why)) => {
            return error(format!("The request was sent, but {why}.{unknown}"));
        }
        Err(Fault::Unusable(why)) => {
            return error(format!("The request was answered, but {why}.{unknown}"));
        }
    };
    let status = answer.status.as_u16();
    let text = String::from_utf8_lossy(&answer.body);
    let is_json = answer.content_type.contains("json");
    let body: Result<Value, _> = serde_json::from_str(&text);
    let body = match body {
        Ok(body) => body,
        Err(_) if text.is_empty() => Value::Null,
        Err(fault) if is_json && answer.status.is_success() => {
            return error(format!(
                "The answer (status {status}) says that it is JSON and is not: {fault}.{unknown}"
            ));
        }
        Err(_) => Value::from(text.as_ref()),
    };
    if !answer.status.is_success() {
        let shown = json!({"status": status, "content_type": answer.content_type, "body": body});
        let unknown = match answer.status.is_server_error() {
            true => unknown,
            false => "",
        };
        return error(format!(
            "The service refused the request with status {status}.{unknown}\n{shown}"
        ));
    }
    let content = match &request.response_path {
        None => body,
        Some(path) => match json_path::at(&body, path) {
            Ok(found) => found.clone(),
            Err(why) => {
                return error(format!(
                    "The answer (status {status}) is not as the tool expects it: {why}.{unknown}"
                ));
            }
        },
    };
    Sent {
        text: json!({"status": status, "body": content}).to_string(),
        content: Some(content),
    }
}
