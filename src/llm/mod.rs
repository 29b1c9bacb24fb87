//! The model port: what the worker asks, what comes back, and which provider answers.
//!
//! A call here is ONE attempt. The worker owns repeats, because a wait must not hold its slot: it gives the step back to
//! the queue with a delay (`domain::retry`). Nothing in this module knows tasks, steps or the database.
//!
//! A provider is a `Format` in a file of its own: the body of a request, and how the events of an answer become one
//! `Answer`. Everything else is shared: `http` (one attempt and its limits), `sse`, `answer`, `failure`, `redact`, `kept`.

mod answer;
mod anthropic;
mod failure;
mod gemini;
mod http;
mod kept;
mod models;
mod names;
mod offline;
mod openai;
mod price;
mod redact;
mod schema;
mod sse;

pub use models::{Limits, Models, ProviderSettings, SettingsError};
pub use offline::OfflineModel;

use crate::domain::agent::ModelSettings;
use crate::domain::decision::{Decision, ToolCall};
use crate::domain::text::estimated_tokens;
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
    /// JSON Schema of the final answer, which the system prompt asks for in words. A provider is told of it beside that
    /// where its models can be held to it (T-16).
    pub output_schema: Option<Arc<serde_json::Value>>,
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

impl Request {
    pub fn estimated_tokens(&self) -> usize {
        estimated_tokens(&self.system)
            + self
                .messages
                .iter()
                .map(Message::estimated_tokens)
                .sum::<usize>()
            + self
                .tools
                .iter()
                .map(ToolSpec::estimated_tokens)
                .sum::<usize>()
    }
}

impl Message {
    pub fn estimated_tokens(&self) -> usize {
        match self {
            Self::User(text) | Self::ToolResult { text, .. } => estimated_tokens(text),
            Self::Assistant { text, calls } => {
                let call = |call: &ToolCall| {
                    estimated_tokens(&call.name) + estimated_tokens(&call.arguments)
                };
                estimated_tokens(text) + calls.iter().map(call).sum::<usize>()
            }
        }
    }
}

impl ToolSpec {
    pub fn estimated_tokens(&self) -> usize {
        estimated_tokens(&self.name)
            + estimated_tokens(&self.description)
            + estimated_tokens(&self.parameters.to_string())
    }
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
    pub fn never(message: impl Into<String>) -> Self {
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
