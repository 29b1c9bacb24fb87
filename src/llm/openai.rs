//! OpenAI-compatible chat completions, streamed: OpenAI itself, and whatever speaks its form (vLLM, Ollama, gateways).
//!
//! One attempt per call, under two limits: the whole call, and the silence between bytes once the answer has begun.
//! Keep-alive comments end a silence but do not stretch the whole (H-28). Redirects are not followed: the key would
//! travel with them. URLs are never logged or quoted, since some carry a key.

use super::redact::redact;
use super::sse::Frames;
use super::stream::Answer;
use super::wire::Body;
use super::{Model, ModelError, OnText, Request, Retry, SettingsError, failure};
use crate::domain::decision::Decision;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Client, Response, Url};
use secrecy::{ExposeSecret, SecretString};
use std::error::Error as _;
use std::time::{Duration, SystemTime};

/// Where OpenAI itself answers.
pub const OPENAI_BASE_URL: &str = "https://api.openai.com/v1";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the usage may lag behind the finish reason. The answer is complete by then.
const USAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// An answer of more bytes than this on the wire is broken off.
const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;
const ERROR_BYTES_MAX: usize = 64 * 1024;

/// The settings under `llm` that concern this provider.
#[derive(Clone, Debug)]
pub struct OpenAiSettings {
    /// Without or with a trailing slash; a query is kept. Absent: OpenAI's own.
    pub base_url: Option<String>,
    /// Optional for servers that ask for none.
    pub api_key: Option<SecretString>,
    /// The model of agents that name none.
    pub model: String,
    pub timeout: Duration,
    pub idle_timeout: Duration,
    pub max_output_tokens: Option<u32>,
}

pub struct OpenAiModel {
    http: Client,
    url: Url,
    /// OpenAI's own parameters are only sent to OpenAI: others refuse what they do not know.
    is_openai: bool,
    /// What must never appear in a message.
    secrets: Vec<String>,
    headers: HeaderMap,
    settings: OpenAiSettings,
}

impl OpenAiModel {
    pub fn new(settings: OpenAiSettings) -> Result<Self, SettingsError> {
        let wrong = |setting, reason: &str| SettingsError {
            setting,
            reason: reason.to_owned(),
        };
        let url = endpoint(settings.base_url.as_deref().unwrap_or(OPENAI_BASE_URL))?;
        let is_openai = url
            .host_str()
            .is_some_and(|host| host == "api.openai.com" || host.ends_with(".api.openai.com"));
        let key = settings
            .api_key
            .as_ref()
            .map(|key| key.expose_secret().trim());
        let key = key.filter(|key| !key.is_empty());
        if is_openai && key.is_none() {
            return Err(wrong("llm.api_key", "OpenAI needs a key; set LLM_API_KEY"));
        }
        if settings.model.trim().is_empty() {
            return Err(wrong(
                "llm.model",
                "name the model that answers; set LLM_MODEL",
            ));
        }
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(
            ACCEPT,
            HeaderValue::from_static("text/event-stream, application/json"),
        );
        if let Some(key) = key {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| {
                wrong(
                    "llm.api_key",
                    "holds characters that can not be sent in a header",
                )
            })?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let secrets = key
            .map(str::to_owned)
            .into_iter()
            .chain(url.query_pairs().map(|(_, value)| value.into_owned()))
            .collect();
        let http = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("reconvene/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| wrong("llm", &format!("no HTTP client: {}", explain(&error))))?;
        Ok(Self {
            http,
            url,
            is_openai,
            secrets,
            headers,
            settings,
        })
    }

    async fn attempt(
        &self,
        request: &Request,
        on_text: OnText<'_>,
    ) -> Result<Decision, ModelError> {
        let body = serde_json::to_vec(&Body::new(request, &self.settings, self.is_openai))
            .map_err(|error| {
                ModelError::never(format!("The request can not be written as JSON ({error})."))
            })?;
        let response = self
            .http
            .post(self.url.clone())
            .headers(self.headers.clone())
            .body(body)
            .send()
            .await
            .map_err(|error| self.transport(error))?;
        let status = response.status();
        if !status.is_success() {
            let headers = response.headers().clone();
            let body = self.error_body(response).await;
            let now = SystemTime::now();
            return Err(failure::from_response(
                status.as_u16(),
                &headers,
                &body,
                now,
            ));
        }
        let mut answer = Answer::default();
        if is_json(&response) {
            self.read_whole(response, &mut answer, on_text).await?;
        } else {
            self.read_stream(response, &mut answer, on_text).await?;
        }
        answer.decision(|| {
            let id = uuid::Uuid::new_v4().simple().to_string();
            format!("call_{}", &id[..24])
        })
    }

    async fn read_stream(
        &self,
        response: Response,
        answer: &mut Answer,
        on_text: OnText<'_>,
    ) -> Result<(), ModelError> {
        let mut frames = Frames::default();
        let mut events = Vec::new();
        let mut pieces = Pieces::new(response);
        loop {
            let idle = self.settings.idle_timeout;
            let limit = if answer.is_finished() {
                idle.min(USAGE_TIMEOUT)
            } else {
                idle
            };
            let piece = match self.next_piece(&mut pieces, limit).await {
                Ok(Some(piece)) => piece,
                Ok(None) => break,
                // A complete answer is not thrown away because its bill did not come.
                Err(error) if answer.is_finished() && error.retry != Retry::Never => return Ok(()),
                Err(error) => return Err(error),
            };
            let pushed = frames.push(&piece, &mut events);
            for event in events.drain(..) {
                answer.event(&event.name, &event.data, on_text)?;
            }
            pushed
                .map_err(|error| ModelError::never(format!("The model provider sent {error}.")))?;
            if answer.is_ended() {
                return Ok(());
            }
        }
        frames.finish(&mut events);
        for event in events {
            answer.event(&event.name, &event.data, on_text)?;
        }
        Ok(())
    }

    async fn read_whole(
        &self,
        response: Response,
        answer: &mut Answer,
        on_text: OnText<'_>,
    ) -> Result<(), ModelError> {
        let mut body = Vec::new();
        let mut pieces = Pieces::new(response);
        while let Some(piece) = self
            .next_piece(&mut pieces, self.settings.idle_timeout)
            .await?
        {
            body.extend_from_slice(&piece);
        }
        answer.body(&String::from_utf8_lossy(&body), on_text)
    }

    async fn next_piece(
        &self,
        pieces: &mut Pieces,
        limit: Duration,
    ) -> Result<Option<bytes::Bytes>, ModelError> {
        let next = tokio::time::timeout(limit, pieces.stream.next())
            .await
            .map_err(|_| {
                ModelError::again(format!(
                    "The model provider sent nothing for {} s (llm.idle_timeout_seconds).",
                    limit.as_secs_f64()
                ))
            })?;
        let Some(piece) = next.transpose().map_err(|error| self.transport(error))? else {
            return Ok(None);
        };
        pieces.read += piece.len();
        if pieces.read > ANSWER_BYTES_MAX {
            return Err(ModelError::never(format!(
                "The model's answer passed {} MB and was broken off.",
                ANSWER_BYTES_MAX / 1024 / 1024
            )));
        }
        Ok(Some(piece))
    }

    /// As much of it as comes; the status alone says enough.
    async fn error_body(&self, response: Response) -> String {
        let mut body = Vec::new();
        let mut pieces = Pieces::new(response);
        while body.len() < ERROR_BYTES_MAX {
            match self
                .next_piece(&mut pieces, self.settings.idle_timeout.min(CONNECT_TIMEOUT))
                .await
            {
                Ok(Some(piece)) => body.extend_from_slice(&piece),
                Ok(None) | Err(_) => break,
            }
        }
        body.truncate(ERROR_BYTES_MAX);
        String::from_utf8_lossy(&body).into_owned()
    }

    fn transport(&self, error: reqwest::Error) -> ModelError {
        let host = self.url.host_str().unwrap_or_default();
        let error = error.without_url();
        let said = explain(&error);
        if error.is_builder() {
            return ModelError::never(format!("The model request can not be sent: {said}."));
        }
        ModelError::again(if error.is_connect() {
            format!("The model provider at {host} can not be reached: {said}.")
        } else {
            format!("The connection to the model provider at {host} broke: {said}.")
        })
    }
}

impl Model for OpenAiModel {
    fn decide<'a>(
        &'a self,
        request: &'a Request,
        on_text: OnText<'a>,
    ) -> BoxFuture<'a, Result<Decision, ModelError>> {
        async move {
            let limit = self.settings.timeout;
            let answered = tokio::time::timeout(limit, self.attempt(request, on_text)).await;
            let answered = answered.unwrap_or_else(|_| {
                Err(ModelError::again(format!(
                    "The model's answer was not complete after {} s (llm.timeout_seconds).",
                    limit.as_secs_f64()
                )))
            });
            answered.map_err(|error| {
                let secrets: Vec<_> = self.secrets.iter().map(String::as_str).collect();
                ModelError {
                    message: redact(&error.message, &secrets),
                    ..error
                }
            })
        }
        .boxed()
    }
}

/// The body of an answer as it arrives.
struct Pieces {
    stream: futures::stream::BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    read: usize,
}

impl Pieces {
    fn new(response: Response) -> Self {
        Self {
            stream: response.bytes_stream().boxed(),
            read: 0,
        }
    }
}

fn is_json(response: &Response) -> bool {
    response
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| {
            let kind = value
                .split(';')
                .next()
                .unwrap_or_default()
                .trim()
                .to_ascii_lowercase();
            kind == "application/json" || kind.ends_with("+json")
        })
}

/// The address of chat completions under a base URL, however it was pasted.
fn endpoint(base_url: &str) -> Result<Url, SettingsError> {
    let wrong = |reason: String| SettingsError {
        setting: "llm.base_url",
        reason,
    };
    let mut url = Url::parse(base_url.trim()).map_err(|error| {
        wrong(format!(
            "is not a URL ({error}); give one like {OPENAI_BASE_URL}"
        ))
    })?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(wrong(
            "must begin with http:// or https:// and name a host".to_owned(),
        ));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(wrong(
            "must not hold a user or password; set llm.api_key".to_owned(),
        ));
    }
    let path = url.path().trim_end_matches('/');
    let path = path.strip_suffix("/chat/completions").unwrap_or(path);
    let path = format!("{path}/chat/completions");
    url.set_path(&path);
    url.set_fragment(None);
    Ok(url)
}

/// An error with its causes, without what they repeat.
fn explain(error: &reqwest::Error) -> String {
    let mut said = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !said.contains(&text) {
            said = format!("{said}: {text}");
        }
        cause = error.source();
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_base_url_leads_to_the_same_route() {
        // L-10
        for (base, expected) in [
            (
                "https://api.openai.com/v1",
                "https://api.openai.com/v1/chat/completions",
            ),
            (
                "https://api.openai.com/v1/",
                "https://api.openai.com/v1/chat/completions",
            ),
            (
                "http://localhost:11434/v1//",
                "http://localhost:11434/v1/chat/completions",
            ),
            ("http://h", "http://h/chat/completions"),
            (
                "http://h/v1/chat/completions",
                "http://h/v1/chat/completions",
            ),
            (
                "http://h/a/b?api-version=1#x",
                "http://h/a/b/chat/completions?api-version=1",
            ),
        ] {
            assert_eq!(endpoint(base).unwrap().as_str(), expected);
        }
        for wrong in [
            "",
            "localhost:8080/v1",
            "ftp://h/v1",
            "http://user:pass@h/v1",
            "/v1",
        ] {
            assert_eq!(
                endpoint(wrong).unwrap_err().setting,
                "llm.base_url",
                "{wrong}"
            );
        }
    }
}
