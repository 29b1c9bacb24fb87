//! OpenAI-compatible chat completions, streamed: OpenAI itself, and whatever speaks its form (vLLM, Ollama, gateways).
//!
//! Our own on reqwest rather than rig-core: arguments must reach the tools with the exact bytes the model wrote (H-31), and
//! rig hands them out parsed.

mod calls;
mod stream;
mod wire;

use super::http::{Ask, Format};
use crate::domain::model_provider::ProviderKind;
use reqwest::header::{AUTHORIZATION, HeaderName};

pub struct OpenAi;

impl Format for OpenAi {
    const PROVIDER: ProviderKind = ProviderKind::OpenAi;
    const NAME: &'static str = "OpenAI";
    const BASE_URL: &'static str = "https://api.openai.com/v1";
    const HOST: &'static str = "api.openai.com";
    type Answer = stream::Answer;

    fn key(key: &str) -> (HeaderName, String) {
        (AUTHORIZATION, format!("Bearer {key}"))
    }

    fn ask_path(path: &str, _model: &str) -> String {
        format!("{}/chat/completions", root(path))
    }

    fn models_path(path: &str) -> String {
        format!("{}/models", root(path))
    }

    fn body(ask: &Ask<'_>, is_own_host: bool) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&wire::Body::new(ask, is_own_host))
    }
}

/// However the base URL was pasted.
fn root(path: &str) -> &str {
    path.strip_suffix("/chat/completions")
        .unwrap_or(path)
        .trim_end_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llm::http::address;

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
            assert_eq!(address::<OpenAi>(base, "m").unwrap(), expected);
        }
        for wrong in [
            "",
            "localhost:8080/v1",
            "ftp://h/v1",
            "http://user:pass@h/v1",
            "/v1",
        ] {
            let error = address::<OpenAi>(wrong, "m").unwrap_err();
            assert_eq!(error.setting, "base_url", "{wrong}");
        }
    }
}
