//! Anthropic's Messages, streamed: Anthropic itself, and whatever speaks its form.

mod stream;
mod wire;

use super::http::{Ask, Format};
use crate::domain::model_provider::ProviderKind;
use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

pub struct Anthropic;

impl Format for Anthropic {
    const PROVIDER: ProviderKind = ProviderKind::Anthropic;
    const NAME: &'static str = "Anthropic";
    const BASE_URL: &'static str = "https://api.anthropic.com";
    const HOST: &'static str = "api.anthropic.com";
    type Answer = stream::Answer;

    fn key(key: &str) -> (HeaderName, String) {
        (HeaderName::from_static("x-api-key"), key.to_owned())
    }

    fn headers(headers: &mut HeaderMap) {
        let version = HeaderValue::from_static("2023-06-01");
        headers.insert("anthropic-version", version);
    }

    fn ask_path(path: &str, _model: &str) -> String {
        format!("{}/v1/messages", root(path))
    }

    fn models_path(path: &str) -> String {
        format!("{}/v1/models", root(path))
    }

    fn models_query(url: &mut Url) {
        url.query_pairs_mut().append_pair("limit", "1000");
    }

    fn body(ask: &Ask<'_>, _is_own_host: bool) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&wire::Body::new(ask)?)
    }
}

/// However the base URL was pasted.
fn root(path: &str) -> &str {
    let path = path.strip_suffix("/messages").unwrap_or(path);
    path.strip_suffix("/v1")
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
            (Anthropic::BASE_URL, "https://api.anthropic.com/v1/messages"),
            ("http://h/", "http://h/v1/messages"),
            ("http://h/v1/", "http://h/v1/messages"),
            ("http://h/v1/messages", "http://h/v1/messages"),
            (
                "http://h/anthropic?x=1",
                "http://h/anthropic/v1/messages?x=1",
            ),
        ] {
            assert_eq!(address::<Anthropic>(base, "m").unwrap(), expected);
        }
    }
}
