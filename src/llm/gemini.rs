//! Google's Gemini, streamed: `generateContent` of the Gemini API, and whatever speaks its form.

mod stream;
mod wire;

use super::http::{Ask, Format};
use crate::domain::model_provider::ProviderKind;
use reqwest::Url;
use reqwest::header::HeaderName;

pub struct Gemini;

impl Format for Gemini {
    const PROVIDER: ProviderKind = ProviderKind::Gemini;
    const NAME: &'static str = "Gemini";
    const BASE_URL: &'static str = "https://generativelanguage.googleapis.com";
    const HOST: &'static str = "generativelanguage.googleapis.com";
    type Answer = stream::Answer;

    fn key(key: &str) -> (HeaderName, String) {
        (HeaderName::from_static("x-goog-api-key"), key.to_owned())
    }

    fn ask_path(path: &str, model: &str) -> String {
        format!(
            "{}/models/{}:streamGenerateContent",
            root(path),
            plain(model)
        )
    }

    fn ask_query(url: &mut Url) {
        url.query_pairs_mut().append_pair("alt", "sse");
    }

    fn models_path(path: &str) -> String {
        format!("{}/models", root(path))
    }

    fn models_query(url: &mut Url) {
        url.query_pairs_mut().append_pair("pageSize", "1000");
    }

    fn body(ask: &Ask<'_>, _is_own_host: bool) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&wire::Body::new(ask)?)
    }
}

/// With a version of the API, whether or not the base URL names one.
fn root(path: &str) -> String {
    let path = path.strip_suffix("/models").unwrap_or(path);
    let path = path.trim_end_matches('/');
    if path.ends_with("/v1beta") || path.ends_with("/v1") || path.ends_with("/v1alpha") {
        path.to_owned()
    } else {
        format!("{path}/v1beta")
    }
}

/// One segment of a path, whatever an agent's author has written. The API lists its models as `models/NAME`.
fn plain(model: &str) -> String {
    let model = model.trim().trim_start_matches("models/");
    let mut out = String::new();
    for byte in model.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._@".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llm::http::address;

    #[test]
    fn any_base_url_leads_to_the_same_route() {
        // L-10
        let own = "https://generativelanguage.googleapis.com/v1beta/models/gemini-3-pro:streamGenerateContent?alt=sse";
        for (base, model, expected) in [
            (Gemini::BASE_URL, "gemini-3-pro", own),
            (Gemini::BASE_URL, "models/gemini-3-pro", own),
            (
                "http://h/v1beta/",
                "m",
                "http://h/v1beta/models/m:streamGenerateContent?alt=sse",
            ),
            (
                "http://h/v1",
                "m",
                "http://h/v1/models/m:streamGenerateContent?alt=sse",
            ),
            (
                "http://h/a?key=k",
                "../x?y#z",
                "http://h/a/v1beta/models/..%2Fx%3Fy%23z:streamGenerateContent?key=k&alt=sse",
            ),
        ] {
            assert_eq!(address::<Gemini>(base, model).unwrap(), expected);
        }
    }
}
