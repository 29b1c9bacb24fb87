//! Where a workspace's own models answer (L-10): address, kind and key. The key goes in, is sent to that address, and never
//! comes out again; hence whoever changes the address gives the key again.

use super::agent::merge_patch;
use super::fields::{Fields, InvalidDefinition, read_object};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::ops::RangeInclusive;
use utoipa::ToSchema;

pub const NAME_CHARS_MAX: usize = 100;
const MODEL_CHARS_MAX: usize = 200;
const URL_CHARS_MAX: usize = 2_000;
const KEY_CHARS: RangeInclusive<usize> = 4..=10_000;
/// Of a shorter key its end would tell too much.
const HINTED_KEY_CHARS: usize = 20;
const HINT_CHARS: usize = 4;

/// In which form a provider is asked. The name of each is that of the deployment's provider of this kind, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, sqlx::Type, ToSchema)]
#[serde(rename_all = "lowercase")]
#[sqlx(type_name = "text", rename_all = "lowercase")]
pub enum ProviderKind {
    #[serde(rename = "openai")]
    OpenAi,
    Anthropic,
    Gemini,
    Offline,
}

impl ProviderKind {
    pub const ALL: [Self; 4] = [Self::OpenAi, Self::Anthropic, Self::Gemini, Self::Offline];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Anthropic => "anthropic",
            Self::Gemini => "gemini",
            Self::Offline => "offline",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }
}

/// All of a provider but its key.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelProvider {
    /// As agents name it in `model.provider`; before a provider of the deployment of the same name.
    pub name: String,
    pub kind: ProviderKind,
    /// `None`: the provider's own.
    pub base_url: Option<String>,
    /// The model of agents that name none.
    pub model: Option<String>,
    /// Answers for the workspace's agents that name no provider.
    pub is_default: bool,
}

/// What a change says of the key.
#[derive(Clone, Debug)]
pub enum KeyChange {
    Keep,
    Remove,
    Set(SecretString),
}

impl ModelProvider {
    pub fn parse(body: &Value) -> Result<(Self, Option<SecretString>), InvalidDefinition> {
        read_object(body, read)
    }

    /// This provider changed by a JSON merge patch (RFC 7396): null takes a field back to its default, and the key away.
    /// A key that is kept stays where it was given for.
    pub fn patched(
        &self,
        has_key: bool,
        patch: &Value,
    ) -> Result<(Self, KeyChange), InvalidDefinition> {
        if !patch.is_object() {
            let refused = Self::parse(patch); // with the reason
            return refused.map(|(provider, _)| (provider, KeyChange::Keep));
        }
        let mut merged = json!({
            "name": self.name,
            "kind": self.kind,
            "base_url": self.base_url,
            "model": self.model,
            "is_default": self.is_default,
        });
        merge_patch(&mut merged, patch);
        let (changed, key) = Self::parse(&merged)?;
        let key = match (key, patch.get("key")) {
            (Some(key), _) => KeyChange::Set(key),
            (None, Some(_)) => KeyChange::Remove,
            (None, None) => KeyChange::Keep,
        };
        let moves = (changed.kind, &changed.base_url) != (self.kind, &self.base_url);
        match key {
            KeyChange::Keep if has_key && moves => {
                let reason = "is to be given again with another kind or base_url: a stored key is sent nowhere else than \
                              where it was given for";
                Err(InvalidDefinition::of("key", reason))
            }
            KeyChange::Keep | KeyChange::Remove | KeyChange::Set(_) => Ok((changed, key)),
        }
    }
}

/// The last characters of a long key, by which people know it again.
pub fn key_hint(key: &SecretString) -> Option<String> {
    let key: Vec<char> = key.expose_secret().chars().collect();
    (key.len() >= HINTED_KEY_CHARS).then(|| key[key.len() - HINT_CHARS..].iter().collect())
}

fn read(fields: &mut Fields<'_>) -> (ModelProvider, Option<SecretString>) {
    const KINDS: [ProviderKind; 3] = [
        ProviderKind::OpenAi,
        ProviderKind::Anthropic,
        ProviderKind::Gemini,
    ];
    let name = fields.required_line("name", NAME_CHARS_MAX);
    let kind = fields.required_choice("kind", &KINDS.map(|kind| (kind.as_str(), kind)));
    let provider = ModelProvider {
        name,
        kind: kind.unwrap_or(ProviderKind::OpenAi),
        base_url: fields.line("base_url", URL_CHARS_MAX),
        model: fields.line("model", MODEL_CHARS_MAX),
        is_default: fields.boolean("is_default").unwrap_or_default(),
    };
    let key = fields.optional_text("key", KEY_CHARS);
    (provider, key.map(|key| key.trim().to_owned().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    // L-10
    #[test]
    fn every_fault_of_a_provider_is_named_and_no_key_repeated() {
        let (made, key) = ModelProvider::parse(
            &json!({"name": " ours ", "kind": "openai", "base_url": " https://h/v1 ",
            "model": "m", "is_default": true, "key": " s3cr3t\n"}),
        )
        .unwrap();
        let expected = ModelProvider {
            name: "ours".into(),
            kind: ProviderKind::OpenAi,
            base_url: Some("https://h/v1".into()),
            model: Some("m".into()),
            is_default: true,
        };
        assert_eq!(made, expected);
        assert_eq!(key.unwrap().expose_secret(), "s3cr3t");
        let (least, key) =
            ModelProvider::parse(&json!({"name": "a", "kind": "gemini", "key": null})).unwrap();
        assert!(least.base_url.is_none() && !least.is_default && key.is_none());
        for (change, path) in [
            (json!({"name": null}), "name"),
            (json!({"name": "x".repeat(101)}), "name"),
            (json!({"kind": null}), "kind"),
            (json!({"kind": 1}), "kind"),
            (json!({"kind": "offline"}), "kind"),
            (json!({"base_url": []}), "base_url"),
            (json!({"model": 1}), "model"),
            (json!({"is_default": "yes"}), "is_default"),
            (json!({"key": ["s3cr3t"]}), "key"),
            (json!({"key": "s3c"}), "key"),
            (json!({"key": "s3cr3t".repeat(2000)}), "key"),
            (json!({"keys": "s3cr3t"}), "keys"),
        ] {
            let mut body = json!({"name": "a", "kind": "openai"});
            merge_patch(&mut body, &change);
            let error = ModelProvider::parse(&body).unwrap_err();
            assert_eq!(error.0[0].path, path, "{change}");
            assert!(!error.to_string().contains("s3c"), "{error}");
        }
    }

    // L-10: otherwise whoever may edit could have a key sent to a server of their own.
    #[test]
    fn a_key_does_not_follow_to_another_address() {
        let (before, _) = ModelProvider::parse(&json!({"name": "a", "kind": "openai"})).unwrap();
        for (patch, needs_key) in [
            (
                json!({"name": "b", "model": "m", "is_default": true}),
                false,
            ),
            (json!({"kind": "openai", "base_url": null}), false),
            (json!({"base_url": "https://evil"}), true),
            (json!({"kind": "gemini"}), true),
        ] {
            let refused = before.patched(true, &patch).err();
            let path = refused.map(|error| error.0[0].path.clone());
            assert_eq!(path, needs_key.then(|| "key".to_owned()), "{patch}");
            let kept = before.patched(false, &patch).unwrap();
            assert!(matches!(kept.1, KeyChange::Keep), "{patch}");
            let mut with_key = patch.clone();
            with_key["key"] = json!("another");
            let set = before.patched(true, &with_key).unwrap();
            assert!(matches!(set.1, KeyChange::Set(_)), "{patch}");
            with_key["key"] = Value::Null;
            let removed = before.patched(true, &with_key).unwrap();
            assert!(matches!(removed.1, KeyChange::Remove), "{patch}");
        }
        assert!(before.patched(true, &json!([])).is_err());
    }

    #[test]
    fn only_long_keys_have_a_hint() {
        let hint = |key: &str| key_hint(&key.to_owned().into());
        assert_eq!(hint("sk-s3cr3t-0123456ü9"), None);
        assert_eq!(hint("sk-s3cr3t-0123456ü89"), Some("6ü89".into()));
    }
}
