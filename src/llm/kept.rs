//! What a provider gives with a call and wants back with it in later requests, such as the signature of a thought.
//!
//! Only the model that gave it understands it; others would refuse it. So it is kept with the names of both, and whoever
//! asks another model gets nothing.

use crate::domain::decision::ToolCall;
use crate::domain::model_provider::ProviderKind;
use serde::Deserialize;
use serde_json::{Value, json};

/// Names the giver of what the calls carry.
pub fn sign(calls: &mut [ToolCall], provider: ProviderKind, model: &str) {
    for call in calls {
        let Some(data) = call.provider_data.take() else {
            continue;
        };
        call.provider_data = Some(json!({"provider": provider, "model": model, "data": data}));
    }
}

/// What this model gave with the call, if it was this model.
pub fn of<'a>(call: &'a ToolCall, provider: ProviderKind, model: &str) -> Option<&'a Value> {
    let kept = call.provider_data.as_ref()?;
    let giver = ProviderKind::deserialize(kept.get("provider")?).ok()?;
    let is_same = giver == provider && kept.get("model")?.as_str() == Some(model);
    is_same.then(|| kept.get("data")).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_giver_gets_it_back() {
        let mut calls = vec![ToolCall {
            id: "a".into(),
            name: "t".into(),
            arguments: "{}".into(),
            invalid: None,
            provider_data: Some(json!("signature")),
        }];
        sign(&mut calls, ProviderKind::Gemini, "gemini-3-pro");
        // As the history keeps it.
        let stored = serde_json::to_string(&calls[0]).unwrap();
        let call: ToolCall = serde_json::from_str(&stored).unwrap();
        for (provider, model, expected) in [
            (
                ProviderKind::Gemini,
                "gemini-3-pro",
                Some(json!("signature")),
            ),
            (ProviderKind::Gemini, "gemini-3-flash", None),
            (ProviderKind::Anthropic, "gemini-3-pro", None),
        ] {
            assert_eq!(of(&call, provider, model), expected.as_ref());
        }
        let plain = r#"{"id":"a","name":"t","arguments":"{}"}"#;
        let plain: ToolCall = serde_json::from_str(plain).unwrap();
        assert_eq!(of(&plain, ProviderKind::Gemini, "m"), None);
        assert!(!serde_json::to_string(&plain).unwrap().contains("provider"));
    }
}
