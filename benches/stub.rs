//! An OpenAI-compatible provider in this process that answers at once, streamed, and notes when it was asked.
//!
//! A first turn whose message is a list is answered with one `delegate_tasks` call for all of its lines, everything else
//! with a line of text. It looks at as little of a request as it can: what it costs is measured with the service.

use crate::text;
use axum::{
    Router, body::Bytes, extract::State, http::header, response::IntoResponse, routing::post,
};
use serde_json::json;
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::task::JoinHandle;

pub struct Stub {
    pub base_url: String,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

struct Shared {
    /// To whom it delegates.
    target: String,
    /// When it was asked to go on after a delegation.
    resumed: Mutex<Vec<Duration>>,
}

impl Stub {
    pub async fn start(target: String) -> anyhow::Result<Self> {
        let shared = Arc::new(Shared {
            target,
            resumed: Mutex::default(),
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let base_url = format!("http://{}/v1", listener.local_addr()?);
        let router = Router::new()
            .route("/v1/chat/completions", post(answer))
            .layer(axum::extract::DefaultBodyLimit::disable())
            .with_state(shared.clone());
        let server = tokio::spawn(async move {
            // It serves until it is aborted.
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self {
            base_url,
            shared,
            server,
        })
    }

    /// When requests to go on after a delegation came in since the last time, as time since the epoch.
    pub fn take_resumed(&self) -> Vec<Duration> {
        std::mem::take(
            &mut *self
                .shared
                .resumed
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn answer(State(shared): State<Arc<Shared>>, body: Bytes) -> impl IntoResponse {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let has = |needle: &str| memchr(&body, needle.as_bytes());
    let delta = if has("\"role\":\"tool\"") {
        let mut resumed = shared
            .resumed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        resumed.push(now.unwrap_or_default());
        json!({"content": "All of them are done."})
    } else {
        match text::items_of(&body) {
            0 => json!({"content": "This part is done, and this is its result."}),
            n => {
                let inputs: Vec<String> = (0..n).map(text::item).collect();
                let arguments = json!({"tasks": [{
                    "agent_group_id": shared.target, "prompt": "{{item}}: do this part only and answer with its result.",
                    "title": "{{item}}", "inputs": inputs,
                }]});
                json!({"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
                    "function": {"name": "delegate_tasks", "arguments": arguments.to_string()}}]})
            }
        }
    };
    let reason = match delta.get("tool_calls") {
        Some(_) => "tool_calls",
        None => "stop",
    };
    let chunks = [
        json!({"choices": [{"index": 0, "delta": delta}]}),
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}),
        json!({"choices": [], "usage": {"prompt_tokens": 300, "completion_tokens": 50}}),
    ];
    let mut stream: String = chunks.iter().map(|c| format!("data: {c}\n\n")).collect();
    stream.push_str("data: [DONE]\n\n");
    ([(header::CONTENT_TYPE, "text/event-stream")], stream)
}

fn memchr(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|w| w == needle)
}
