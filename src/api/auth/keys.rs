//! Where the keys come from that verify tokens: the configured secret, a JWKS file, a JWKS URL.
//!
//! Only keys that fit the pinned algorithm are ever kept, so a token can pick among them but never the way it is checked.

use super::{AuthConfigError, secret_of};
use crate::api::error::Error;
use crate::config;
use jsonwebtoken::jwk::{Jwk, JwkSet, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use secrecy::ExposeSecret;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::warn;

/// The keys that may have signed a token, by key id.
pub enum Keys {
    Fixed(KeyList),
    Remote(RemoteKeys),
}

type KeyList = Vec<(Option<String>, DecodingKey)>;

impl Keys {
    pub fn new(config: &config::Auth, algorithm: Algorithm) -> Result<Self, AuthConfigError> {
        let is_url = |text: &str| text.starts_with("http://") || text.starts_with("https://");
        match (&config.jwks, algorithm) {
            (_, Algorithm::HS256) => {
                let secret = secret_of(config)?;
                let key = DecodingKey::from_secret(secret.expose_secret().as_bytes())
                    .map_err(|_| AuthConfigError::SecretMissing)?;
                Ok(Keys::Fixed(vec![(None, key)]))
            }
            (None, _) => Err(AuthConfigError::JwksMissing(config.algorithm)),
            (Some(url), _) if is_url(url) => {
                Ok(Keys::Remote(RemoteKeys::new(url.clone(), algorithm)?))
            }
            (Some(path), _) => Ok(Keys::Fixed(keys_from_file(path, algorithm)?)),
        }
    }

    /// The key that a token with this key id must be signed with.
    pub async fn find(&self, kid: Option<&str>) -> Result<Option<DecodingKey>, Error> {
        match self {
            Keys::Fixed(keys) => Ok(pick(keys, kid)),
            Keys::Remote(remote) => remote.find(kid).await,
        }
    }
}

/// The key with this id. Without an id on either side there must be only one key, so that no choice is left to the token.
fn pick(keys: &[(Option<String>, DecodingKey)], kid: Option<&str>) -> Option<DecodingKey> {
    match (keys, kid) {
        ([(own, key)], kid) if own.is_none() || kid.is_none() => Some(key.clone()),
        (_, None) => None,
        (keys, Some(kid)) => keys
            .iter()
            .find(|(own, _)| own.as_deref() == Some(kid))
            .map(|(_, key)| key.clone()),
    }
}

fn keys_from_file(path: &str, algorithm: Algorithm) -> Result<KeyList, AuthConfigError> {
    let refuse = |reason: String| AuthConfigError::JwksFile {
        path: path.to_owned(),
        reason,
    };
    let text = std::fs::read(path).map_err(|error| refuse(error.to_string()))?;
    let set = serde_json::from_slice::<JwkSet>(&text).map_err(|error| refuse(error.to_string()))?;
    let keys = usable_keys(&set, algorithm);
    if keys.is_empty() {
        Err(refuse(format!("it has no {algorithm:?} key")))
    } else {
        Ok(keys)
    }
}

/// The keys of the set that can verify the pinned algorithm. Shared secrets in it are never among them (H-40).
fn usable_keys(set: &JwkSet, algorithm: Algorithm) -> KeyList {
    let fits = |jwk: &Jwk, key: &DecodingKey| {
        let names_other = jwk
            .common
            .key_algorithm
            .is_some_and(|named| named.to_string() != format!("{algorithm:?}"));
        let for_encryption = matches!(jwk.common.public_key_use, Some(PublicKeyUse::Encryption));
        key.family() == algorithm.family() && !names_other && !for_encryption
    };
    let key_of = |jwk: &Jwk| {
        let key = DecodingKey::from_jwk(jwk).ok()?;
        fits(jwk, &key).then(|| (jwk.common.key_id.clone(), key))
    };
    set.keys.iter().filter_map(key_of).collect()
}

/// Keys behind a URL: fetched when first needed, again every ten minutes, and for an unknown key id at most every 30 s.
/// While the provider can not be reached the keys of the last fetch stay in use.
pub struct RemoteKeys {
    url: String,
    algorithm: Algorithm,
    client: reqwest::Client,
    state: tokio::sync::Mutex<Fetched>,
}

#[derive(Default)]
struct Fetched {
    keys: Option<Arc<KeyList>>,
    /// The last attempt, successful or not.
    tried_at: Option<Instant>,
}

impl RemoteKeys {
    const REFETCH_PAUSE: Duration = Duration::from_secs(30);
    const FIRST_FETCH_PAUSE: Duration = Duration::from_secs(1);
    const MAX_AGE: Duration = Duration::from_secs(600);
    const BYTES_MAX: usize = 1 << 20;

    fn new(url: String, algorithm: Algorithm) -> Result<Self, AuthConfigError> {
        let client = reqwest::Client::builder()
            .timeout(Duration::from_secs(5))
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| AuthConfigError::HttpClient(error.to_string()))?;
        Ok(Self {
            url,
            algorithm,
            client,
            state: Default::default(),
        })
    }

    async fn find(&self, kid: Option<&str>) -> Result<Option<DecodingKey>, Error> {
        // Held across the fetch: one request to the provider, and those who came meanwhile share its answer.
        let mut state = self.state.lock().await;
        let age = state.tried_at.map(|at| at.elapsed());
        let known = state.keys.as_deref().and_then(|keys| pick(keys, kid));
        let pause = match (&state.keys, &known) {
            (None, _) => Self::FIRST_FETCH_PAUSE,
            (Some(_), None) => Self::REFETCH_PAUSE,
            (Some(_), Some(_)) => Self::MAX_AGE,
        };
        if age.is_some_and(|age| age < pause) {
            return if state.keys.is_some() {
                Ok(known)
            } else {
                Err(Error::KeysUnavailable)
            };
        }
        state.tried_at = Some(Instant::now());
        match self.fetch().await {
            Ok(keys) => state.keys = Some(Arc::new(keys)),
            Err(reason) => warn!("the keys of auth.jwks can not be fetched: {reason}"),
        }
        match &state.keys {
            Some(keys) => Ok(pick(keys, kid)),
            None => Err(Error::KeysUnavailable),
        }
    }

    async fn fetch(&self) -> Result<KeyList, String> {
        let mut response = self
            .client
            .get(&self.url)
            .send()
            .await
            .and_then(|response| response.error_for_status())
            .map_err(|error| error.without_url().to_string())?;
        let mut body = Vec::new();
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| error.without_url().to_string())?
        {
            body.extend_from_slice(&chunk);
            if body.len() > Self::BYTES_MAX {
                return Err("the answer is larger than 1 MB".into());
            }
        }
        let set = serde_json::from_slice::<JwkSet>(&body).map_err(|error| error.to_string())?;
        let keys = usable_keys(&set, self.algorithm);
        if keys.is_empty() {
            Err(format!("the set has no {:?} key", self.algorithm))
        } else {
            Ok(keys)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_never_the_tokens_choice() {
        let key = |text: &str| DecodingKey::from_secret(text.as_bytes()).unwrap();
        let one = vec![(None, key("a"))];
        assert!(pick(&one, None).is_some());
        assert!(pick(&one, Some("x")).is_some());
        let named = vec![(Some("a".to_owned()), key("a"))];
        assert!(pick(&named, None).is_some());
        assert!(pick(&named, Some("a")).is_some());
        assert!(pick(&named, Some("b")).is_none());
        let two = vec![
            (Some("a".to_owned()), key("a")),
            (Some("b".to_owned()), key("b")),
        ];
        assert!(pick(&two, None).is_none());
        assert!(pick(&two, Some("b")).is_some());
    }
}
