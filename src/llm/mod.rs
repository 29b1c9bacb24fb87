//! The model port: what the worker asks, what comes back, and which provider answers.
//!
//! A call here is ONE attempt. The worker owns repeats, because a wait must not hold its slot: it gives the step back to
//! the queue with a delay (`domain::retry`). Nothing in this module knows tasks, steps or the database.
//!
//! The OpenAI-compatible client is our own on reqwest rather than rig-core: arguments must reach the tools with the
//! exact bytes the model wrote (H-31), and rig hands them out parsed.

mod calls;
mod failure;
mod offline;
mod openai;
mod redact;
mod sse;
mod stream;
mod wire;

pub use offline::OfflineModel;
pub use openai::{OPENAI_BASE_URL, OpenAiModel, OpenAiSettings};

use crate::config;
use crate::domain::agent::{ModelProvider, ModelSettings};
use crate::domain::decision::{Decision, ToolCall};
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;

/// The name under which the offline demo model is billed.
pub const OFFLINE_MODEL: &str = "offline-demo";

/// Everything a decide step asks the model.
#[derive(Clone, Debug)]
pub struct Request {
    pub model: ModelSettings,
    pub system: Arc<str>,
    pub messages: Vec<Message>,
    pub tools: Arc<[ToolSpec]>,
    /// The same for all calls that share a long prefix.
    pub cache_key: String,
}

/// The history. A `ToolResult` follows its assistant message directly, one per call, in call order: providers refuse
/// anything else, and this module does not mend it.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    User(String),
    Assistant {
        text: String,
        calls: Vec<ToolCall>,
    },
    ToolResult {
        call_id: String,
        name: String,
        text: String,
        is_error: bool,
    },
}

/// A tool as the model sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSpec {
    pub name: String,
    pub description: String,
    /// JSON Schema of the arguments.
    pub parameters: serde_json::Value,
}

/// Why an attempt gave no decision. The message may be shown to users: it holds no key.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ModelError {
    pub retry: Retry,
    /// The provider's HTTP status, also where it came inside a stream that had begun with 200.
    pub status: Option<u16>,
    pub message: String,
}

/// Whether another attempt can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    Never,
    /// With the provider's own wish for the least delay, if it gave one.
    After(Option<Duration>),
}

impl ModelError {
    fn never(message: impl Into<String>) -> Self {
        Self {
            retry: Retry::Never,
            status: None,
            message: message.into(),
        }
    }

    fn again(message: impl Into<String>) -> Self {
        Self {
            retry: Retry::After(None),
            status: None,
            message: message.into(),
        }
    }
}

/// Takes text as the model writes it. Ephemeral: an attempt that fails later has already sent what it had.
pub type OnText<'a> = &'a (dyn Fn(&str) + Send + Sync);

pub trait Model: Send + Sync {
    /// One attempt. Dropping the future aborts the call.
    fn decide<'a>(
        &'a self,
        request: &'a Request,
        on_text: OnText<'a>,
    ) -> BoxFuture<'a, Result<Decision, ModelError>>;
}

/// A setting under which no model can be asked; stops the start.
#[derive(Debug, thiserror::Error)]
#[error("{setting}: {reason}")]
pub struct SettingsError {
    pub setting: &'static str,
    pub reason: String,
}

/// The models of this deployment: the configured one, and the offline demo model, which is always there.
#[derive(Clone)]
pub struct Models {
    provider: ModelProvider,
    name: String,
    model: Arc<dyn Model>,
    offline: Arc<dyn Model>,
}

impl Models {
    /// What `llm` of the configuration asks for. Anthropic and Gemini speak other forms, which this version does not.
    pub fn from_config(llm: &config::Llm) -> Result<Self, SettingsError> {
        match llm.provider {
            config::Provider::Offline => Ok(Self::offline()),
            config::Provider::OpenAi => Self::openai(OpenAiSettings {
                base_url: llm.base_url.clone(),
                api_key: llm.api_key.clone(),
                model: llm.model.clone().unwrap_or_default(),
                timeout: Duration::from_secs(llm.timeout_seconds),
                idle_timeout: Duration::from_secs(llm.idle_timeout_seconds),
                max_output_tokens: llm.max_output_tokens,
            }),
            config::Provider::Anthropic | config::Provider::Gemini => Err(SettingsError {
                setting: "llm.provider",
                reason: format!(
                    "`{}` is not supported by this version; set `openai` (which takes any \
                     OpenAI-compatible base URL) or `offline`",
                    llm.provider
                ),
            }),
        }
    }

    /// Only the offline demo model.
    pub fn offline() -> Self {
        Self::with(
            ModelProvider::Offline,
            OFFLINE_MODEL.to_owned(),
            Arc::new(OfflineModel),
        )
    }

    /// An OpenAI-compatible provider.
    pub fn openai(settings: OpenAiSettings) -> Result<Self, SettingsError> {
        let name = settings.model.clone();
        Ok(Self::with(
            ModelProvider::OpenAi,
            name,
            Arc::new(OpenAiModel::new(settings)?),
        ))
    }

    /// Any implementation as the deployment's model.
    pub fn with(provider: ModelProvider, name: String, model: Arc<dyn Model>) -> Self {
        Self {
            provider,
            name,
            model,
            offline: Arc::new(OfflineModel),
        }
    }

    /// One attempt at the model that the request's settings ask for.
    pub async fn decide(
        &self,
        request: &Request,
        on_text: OnText<'_>,
    ) -> Result<Decision, ModelError> {
        match request.model.provider.unwrap_or(self.provider) {
            wanted if wanted == self.provider => self.model.decide(request, on_text).await,
            ModelProvider::Offline => self.offline.decide(request, on_text).await,
            wanted => Err(ModelError::never(format!(
                "The agent asks for the model provider `{}`, but this deployment has `{}` only. \
                 Remove `model.provider` from the agent or configure the provider.",
                provider_name(wanted),
                provider_name(self.provider),
            ))),
        }
    }

    /// The model name that a call under these settings is billed to.
    pub fn name_for(&self, settings: &ModelSettings) -> String {
        match settings.provider.unwrap_or(self.provider) {
            ModelProvider::Offline => OFFLINE_MODEL.to_owned(),
            _ => settings.name.clone().unwrap_or_else(|| self.name.clone()),
        }
    }
}

fn provider_name(provider: ModelProvider) -> &'static str {
    match provider {
        ModelProvider::OpenAi => "openai",
        ModelProvider::Anthropic => "anthropic",
        ModelProvider::Gemini => "gemini",
        ModelProvider::Offline => "offline",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Provider};

    #[test]
    fn the_configuration_names_a_model_or_says_what_is_supported() {
        // L-10, P-22
        let mut llm = Config::from_defaults().llm;
        let names = ModelSettings {
            name: Some("agents-own".into()),
            ..ModelSettings::default()
        };
        assert_eq!(
            Models::from_config(&llm).unwrap().name_for(&names),
            OFFLINE_MODEL
        );

        llm.provider = Provider::OpenAi;
        llm.base_url = Some("http://localhost:1/v1".to_owned());
        llm.model = Some("m".to_owned());
        let models = Models::from_config(&llm).unwrap();
        assert_eq!(models.name_for(&ModelSettings::default()), "m");
        assert_eq!(models.name_for(&names), "agents-own");
        llm.model = None;
        assert_eq!(
            Models::from_config(&llm).err().unwrap().setting,
            "llm.model"
        );

        for provider in [Provider::Anthropic, Provider::Gemini] {
            llm.provider = provider;
            let error = Models::from_config(&llm).err().unwrap().to_string();
            assert!(
                error.starts_with("llm.provider: ") && error.contains("`openai`"),
                "{error}"
            );
        }
    }
}
