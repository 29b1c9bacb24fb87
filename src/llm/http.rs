//! One attempt at a provider over HTTP, whatever its form: a `Format` says where a request goes and what it says, its
//! `Answer` puts together what comes back.
//!
//! Two limits: the whole attempt, and the silence between bytes once the answer has begun. Keep-alive comments end a
//! silence but do not stretch the whole (H-28). Redirects are not followed: the key would travel with them. URLs are never
//! logged or quoted, since some carry a key.

use super::answer::Answer;
use super::redact::redact;
use super::sse::Frames;
use super::{Limits, Model, ModelError, OnText, ProviderSettings, Request, Retry, SettingsError};
use super::{failure, kept};
use crate::domain::decision::Decision;
use crate::domain::model_provider::ProviderKind;
use crate::net::{self, NotPublic};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, ClientBuilder, Response, Url};
use secrecy::ExposeSecret;
use std::error::Error as _;
use std::time::{Duration, SystemTime};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the usage may lag behind the finish reason. The answer is complete by then.
const USAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// An answer of more bytes than this on the wire is broken off.
const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;
const ERROR_BYTES_MAX: usize = 64 * 1024;

/// What a request says, beside its own settings.
pub struct Ask<'a> {
    pub request: &'a Request,
    pub model: &'a str,
    pub max_output_tokens: Option<u32>,
}

/// What is particular to one provider.
pub trait Format: Send + Sync + 'static {
    const PROVIDER: ProviderKind;
    /// As in a sentence.
    const NAME: &'static str;
    const BASE_URL: &'static str;
    /// The provider's own host, where no call works without a key and every parameter is known.
    const HOST: &'static str;
    type Answer: Answer;

    /// The headers that carry the key.
    fn key(key: &str) -> (HeaderName, String);

    /// Headers of every request.
    fn headers(_headers: &mut HeaderMap) {}

    /// The path of a request for `model`, below `path` of the base URL, which ends without a slash.
    fn ask_path(path: &str, model: &str) -> String;

    /// What a request has in its query.
    fn ask_query(_url: &mut Url) {}

    /// The path of the list of models.
    fn models_path(path: &str) -> String;

    /// What it takes to get the whole list at once.
    fn models_query(_url: &mut Url) {}

    fn body(ask: &Ask<'_>, is_own_host: bool) -> serde_json::Result<Vec<u8>>;
}

/// The address and the headers of a provider, checked.
pub struct Access {
    base: Url,
    is_own_host: bool,
    headers: HeaderMap,
    /// What must never appear in a message.
    secrets: Vec<String>,
}

impl Access {
    pub fn new<F: Format>(settings: &ProviderSettings) -> Result<Self, SettingsError> {
        let base = base_url::<F>(settings.base_url.as_deref().unwrap_or(F::BASE_URL))?;
        let is_own_host = base.host_str().is_some_and(|host| {
            host.strip_suffix(F::HOST)
                .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        });
        let key = settings
            .api_key
            .as_ref()
            .map(|key| key.expose_secret().trim());
        let key = key.filter(|key| !key.is_empty());
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(
            ACCEPT,
            HeaderValue::from_static("text/event-stream, application/json"),
        );
        F::headers(&mut headers);
        match key {
            Some(key) => {
                let (name, value) = F::key(key);
                let mut value = HeaderValue::from_str(&value).map_err(|_| {
                    SettingsError::new(
                        "api_key",
                        "holds characters that can not be sent in a header",
                    )
                })?;
                value.set_sensitive(true);
                headers.insert(name, value);
            }
            None if is_own_host => {
                return Err(SettingsError::new(
                    "api_key",
                    format!("{} needs a key", F::NAME),
                ));
            }
            None => {}
        }
        let secrets = key
            .map(str::to_owned)
            .into_iter()
            .chain(base.query_pairs().map(|(_, value)| value.into_owned()))
            .collect();
        Ok(Self {
            base,
            is_own_host,
            headers,
            secrets,
        })
    }

    /// The list of the provider's models: it costs nothing and needs address and key to be right.
    pub fn models<F: Format>(self) -> (Url, HeaderMap) {
        let path = F::models_path(self.base.path().trim_end_matches('/'));
        let mut url = self.base;
        url.set_path(&path);
        F::models_query(&mut url);
        (url, self.headers)
    }
}

/// Where a key's characters or an address are written down wrongly, the deployment does not start.
fn base_url<F: Format>(text: &str) -> Result<Url, SettingsError> {
    let wrong = |reason: String| SettingsError::new("base_url", reason);
    let mut url = Url::parse(text.trim()).map_err(|error| {
        wrong(format!(
            "is not a URL ({error}); give one like {}",
            F::BASE_URL
        ))
    })?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(wrong(
            "must begin with http:// or https:// and name a host".to_owned(),
        ));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(wrong(
            "must not hold a user or password; set the key apart".to_owned(),
        ));
    }
    url.set_fragment(None);
    Ok(url)
}

/// A client for any number of providers: they share its connections.
pub fn client(builder: ClientBuilder) -> Result<Client, SettingsError> {
    builder
        .connect_timeout(CONNECT_TIMEOUT)
        .redirect(reqwest::redirect::Policy::none())
        .user_agent(concat!("reconvene/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| SettingsError::new("", format!("no HTTP client: {}", explain(&error))))
}

pub struct HttpModel<F> {
    http: Client,
    access: Access,
    /// The model of agents that name none.
    model: Option<String>,
    limits: Limits,
    format: std::marker::PhantomData<F>,
}

impl<F: Format> HttpModel<F> {
    pub fn new(
        http: Client,
        settings: &ProviderSettings,
        limits: Limits,
    ) -> Result<Self, SettingsError> {
        let model = settings.model.clone();
        Ok(Self {
            http,
            access: Access::new::<F>(settings)?,
            model: model.filter(|model| !model.trim().is_empty()),
            limits,
            format: std::marker::PhantomData,
        })
    }

    fn url(&self, model: &str) -> Url {
        let mut url = self.access.base.clone();
        let path = F::ask_path(url.path().trim_end_matches('/'), model);
        url.set_path(&path);
        F::ask_query(&mut url);
        url
    }

    async fn attempt(
        &self,
        request: &Request,
        on_text: OnText<'_>,
    ) -> Result<Decision, ModelError> {
        let Some(model) = request.model.name.as_deref().or(self.model.as_deref()) else {
            return Err(ModelError::never(format!(
                "Neither the agent nor the settings of {} name a model. Set `model.name` of the agent.",
                F::NAME
            )));
        };
        let ask = Ask {
            request,
            model,
            max_output_tokens: request
                .model
                .max_output_tokens
                .or(self.limits.max_output_tokens),
        };
        let body = F::body(&ask, self.access.is_own_host).map_err(|error| {
            ModelError::never(format!("The request can not be written as JSON ({error})."))
        })?;
        let response = self
            .http
            .post(self.url(model))
            .headers(self.access.headers.clone())
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
        let mut answer = F::Answer::default();
        if is_json(&response) {
            self.read_whole(response, &mut answer, on_text).await?;
        } else {
            self.read_stream(response, &mut answer, on_text).await?;
        }
        let mut decision = answer.decision(|| {
            let id = uuid::Uuid::new_v4().simple().to_string();
            format!("call_{}", &id[..24])
        })?;
        kept::sign(&mut decision.calls, F::PROVIDER, model);
        Ok(decision)
    }

    async fn read_stream(
        &self,
        response: Response,
        answer: &mut F::Answer,
        on_text: OnText<'_>,
    ) -> Result<(), ModelError> {
        let mut frames = Frames::default();
        let mut events = Vec::new();
        let mut pieces = Pieces::new(response);
        loop {
            let idle = self.limits.idle_timeout;
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

    /// Some gateways answer in one piece although a stream was asked for.
    async fn read_whole(
        &self,
        response: Response,
        answer: &mut F::Answer,
        on_text: OnText<'_>,
    ) -> Result<(), ModelError> {
        let mut body = Vec::new();
        let mut pieces = Pieces::new(response);
        while let Some(piece) = self
            .next_piece(&mut pieces, self.limits.idle_timeout)
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
                .next_piece(&mut pieces, self.limits.idle_timeout.min(CONNECT_TIMEOUT))
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
        let host = self.access.base.host_str().unwrap_or_default();
        let error = error.without_url();
        if net::is_refused(&error) {
            return ModelError::never(format!(
                "The model provider at {host} can not be asked: {NotPublic}."
            ));
        }
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

impl<F: Format> Model for HttpModel<F> {
    fn decide<'a>(
        &'a self,
        request: &'a Request,
        on_text: OnText<'a>,
    ) -> BoxFuture<'a, Result<Decision, ModelError>> {
        async move {
            let limit = self.limits.timeout;
            let answered = tokio::time::timeout(limit, self.attempt(request, on_text)).await;
            let answered = answered.unwrap_or_else(|_| {
                Err(ModelError::again(format!(
                    "The model's answer was not complete after {} s (llm.timeout_seconds).",
                    limit.as_secs_f64()
                )))
            });
            answered.map_err(|error| {
                let secrets: Vec<_> = self.access.secrets.iter().map(String::as_str).collect();
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

/// The whole address of a request for `model` under a base URL.
#[cfg(test)]
pub fn address<F: Format>(base_url: &str, model: &str) -> Result<String, SettingsError> {
    let settings = ProviderSettings {
        provider: F::PROVIDER,
        base_url: Some(base_url.to_owned()),
        api_key: Some("key".into()),
        model: None,
    };
    let limits = Limits {
        timeout: Duration::from_secs(1),
        idle_timeout: Duration::from_secs(1),
        max_output_tokens: None,
        reach: crate::net::Reach::Public,
    };
    let model_of = HttpModel::<F>::new(Client::new(), &settings, limits)?;
    Ok(model_of.url(model).into())
}
