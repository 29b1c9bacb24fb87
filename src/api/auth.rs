//! Who is calling, for which workspace, in which role (P-3, P-4, P-6): by a token that somebody signed, by an API key, or by
//! the cookie of a log-in. A request that has an `Authorization` header is judged by that alone.
//!
//! Authentication is an argument of each handler: a route without `Caller` is public, and the test that walks all routes
//! knows those by name. The configuration pins the algorithm; nothing in a token chooses how it is checked. Only the
//! signature is left to the library: it does not check `nbf` unless told, and can not read numeric claims under
//! serde_json's `arbitrary_precision`, so [`judge`] checks every claim itself.
//! Deliberately absent: any reason in the 401, and any way to name a workspace other than the claim.

pub mod cookie;
mod keys;

use super::App;
use super::error::Error;
use crate::config;
use crate::domain::ids::{ApiKeyId, MemberId, SessionId, WorkspaceId};
pub use crate::domain::role::Role;
use crate::lifecycle::{api_keys, passwords::Passwords, wait::token_hash};
use crate::store;
use axum::extract::FromRequestParts;
use axum::http::header;
use axum::http::request::Parts;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use keys::Keys;
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use uuid::Uuid;

/// Proof of a valid token, key or session of a live workspace.
#[derive(Clone, Debug)]
pub struct Caller {
    pub workspace: WorkspaceId,
    pub subject: String,
    pub role: Role,
    /// Unix time in seconds, leeway included. Whoever serves one request for long stops then.
    pub expires_at: i64,
    pub credential: Credential,
}

/// What a caller was known by.
#[derive(Clone)]
pub enum Credential {
    Token,
    ApiKey(ApiKeyId),
    Session {
        member: MemberId,
        id: SessionId,
        /// What writes must name.
        csrf: String,
    },
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Credential::Token => f.write_str("Token"),
            Credential::ApiKey(id) => write!(f, "ApiKey({id})"),
            Credential::Session { id, .. } => write!(f, "Session({id})"),
        }
    }
}

/// A caller whose role is admin or operator.
#[derive(Clone, Debug)]
pub struct AdminCaller(pub Caller);

/// A caller whose role is operator.
#[derive(Clone, Debug)]
pub struct OperatorCaller(pub Caller);

impl FromRequestParts<App> for Caller {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Error> {
        let caller = if parts.headers.contains_key(header::AUTHORIZATION) {
            let token = bearer(parts).ok_or(Error::Unauthenticated)?;
            match token.starts_with(api_keys::PREFIX) {
                true => app.auth.of_api_key(&app.pool, token).await?,
                false => app.auth.of_token(&app.pool, token).await?,
            }
        } else {
            let token = cookie::read(&parts.headers).ok_or(Error::Unauthenticated)?;
            let caller = app.auth.of_session(&app.pool, token).await?;
            if !cookie::admits(&parts.method, &parts.headers, token) {
                return Err(Error::CsrfFailed);
            }
            caller
        };
        app.limits.admit_request(caller.workspace, Instant::now())?;
        Ok(caller)
    }
}

impl FromRequestParts<App> for AdminCaller {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Error> {
        with_role(parts, app, Role::Admin).await.map(Self)
    }
}

impl FromRequestParts<App> for OperatorCaller {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Error> {
        with_role(parts, app, Role::Operator).await.map(Self)
    }
}

async fn with_role(parts: &mut Parts, app: &App, needed: Role) -> Result<Caller, Error> {
    let caller = Caller::from_request_parts(parts, app).await?;
    if caller.role >= needed {
        Ok(caller)
    } else {
        Err(Error::Forbidden(needed.as_str()))
    }
}

fn bearer(parts: &Parts) -> Option<&str> {
    let mut values = parts.headers.get_all(header::AUTHORIZATION).iter();
    let (value, None) = (values.next()?, values.next()) else {
        return None;
    };
    let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Judges tokens. One per process.
pub struct Auth {
    algorithm: Algorithm,
    keys: Keys,
    expected: Expected,
    live: LiveWorkspaces,
    pub passwords: Passwords,
}

/// Why the service can not start with this `auth` section.
#[derive(Debug, thiserror::Error)]
pub enum AuthConfigError {
    #[error(
        "auth.jwt_secret (AUTH_JWT_SECRET) is not set; HS256 needs a secret of at least 32 bytes"
    )]
    SecretMissing,
    #[error("auth.jwt_secret (AUTH_JWT_SECRET) has {0} bytes; HS256 needs at least 32")]
    SecretTooShort(usize),
    #[error("auth.jwks (AUTH_JWKS) is not set; {0:?} needs a JWKS file or URL")]
    JwksMissing(config::Algorithm),
    #[error("the JWKS file {path} can not be used: {reason}")]
    JwksFile { path: String, reason: String },
    #[error("auth.jwks: the HTTP client can not be built: {0}")]
    HttpClient(String),
}

impl Auth {
    pub fn new(config: &config::Auth) -> Result<Self, AuthConfigError> {
        let algorithm = algorithm(config.algorithm);
        let keys = Keys::new(config, algorithm)?;
        let expected = Expected {
            issuer: config.issuer.clone(),
            audience: config.audience.clone(),
            leeway: config.leeway_seconds as i64,
        };
        Ok(Self {
            algorithm,
            keys,
            expected,
            live: LiveWorkspaces::default(),
            passwords: Passwords::default(),
        })
    }

    async fn of_token(&self, pool: &PgPool, token: &str) -> Result<Caller, Error> {
        let kid = jsonwebtoken::decode_header(token)
            .map_err(|_| Error::Unauthenticated)?
            .kid;
        let key = self
            .keys
            .find(kid.as_deref())
            .await?
            .ok_or(Error::Unauthenticated)?;
        let claims = verify(token, &key, self.algorithm).ok_or(Error::Unauthenticated)?;
        let caller = judge(claims, &self.expected, unix_now()).ok_or(Error::Unauthenticated)?;
        if self.live.contains(pool, caller.workspace).await? {
            Ok(caller)
        } else {
            Err(Error::Unauthenticated)
        }
    }

    async fn of_api_key(&self, pool: &PgPool, key: &str) -> Result<Caller, Error> {
        let holder = store::api_keys::by_hash_all_workspaces(pool, &token_hash(key)).await?;
        let holder = holder.ok_or(Error::Unauthenticated)?;
        Ok(Caller {
            workspace: holder.workspace,
            subject: format!("api-key:{}", holder.name),
            role: holder.role,
            expires_at: i64::MAX,
            credential: Credential::ApiKey(holder.id),
        })
    }

    /// The caller that a session's cookie stands for, before any guard against forged requests.
    pub(super) async fn of_session(&self, pool: &PgPool, token: &str) -> Result<Caller, Error> {
        let session = store::sessions::by_token_all_workspaces(pool, &token_hash(token)).await?;
        let session = session.ok_or(Error::Unauthenticated)?;
        Ok(Caller {
            workspace: session.workspace,
            subject: session.username,
            role: session.role,
            expires_at: session.expires_at.timestamp(),
            credential: Credential::Session {
                member: session.member,
                id: session.id,
                csrf: cookie::csrf_token(token),
            },
        })
    }

    /// Whether the caller would still be let in: the workspace (up to 5 s old), and the key or session.
    pub async fn is_live(&self, pool: &PgPool, caller: &Caller) -> Result<bool, store::Error> {
        let workspace = caller.workspace;
        let credential = match caller.credential {
            Credential::Token => true,
            Credential::ApiKey(id) => store::api_keys::is_live(pool, workspace, id).await?,
            Credential::Session { member, id, .. } => {
                store::sessions::is_live(pool, workspace, member, id).await?
            }
        };
        Ok(credential && self.live.contains(pool, workspace).await?)
    }
}

/// Checks the signature with the pinned algorithm, and no claim.
fn verify(token: &str, key: &DecodingKey, algorithm: Algorithm) -> Option<Claims> {
    let mut validation = Validation::new(algorithm);
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_aud = false;
    Some(
        jsonwebtoken::decode::<Claims>(token, key, &validation)
            .ok()?
            .claims,
    )
}

#[derive(Debug, Deserialize)]
struct Claims {
    sub: String,
    ws: String,
    role: Role,
    iss: String,
    aud: Audience,
    exp: f64,
    nbf: Option<f64>,
    /// Not judged, but must be a time.
    #[serde(rename = "iat")]
    _iat: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Many(Vec<String>),
}

struct Expected {
    issuer: String,
    audience: String,
    leeway: i64,
}

/// Every rule about claims. `now` is Unix time in seconds.
fn judge(claims: Claims, expected: &Expected, now: i64) -> Option<Caller> {
    let leeway = expected.leeway as f64;
    let audience_fits = match &claims.aud {
        Audience::One(one) => *one == expected.audience,
        Audience::Many(many) => many.contains(&expected.audience),
    };
    let in_time =
        claims.exp + leeway > now as f64 && claims.nbf.is_none_or(|nbf| nbf - leeway <= now as f64);
    let named = !claims.sub.trim().is_empty();
    // Hyphenated only: one workspace, one spelling.
    let workspace = Uuid::try_parse(&claims.ws)
        .ok()
        .filter(|_| claims.ws.len() == 36)?;
    let valid = claims.iss == expected.issuer && audience_fits && in_time && named;
    valid.then_some(Caller {
        workspace: WorkspaceId(workspace),
        subject: claims.sub,
        role: claims.role,
        expires_at: (claims.exp + leeway) as i64,
        credential: Credential::Token,
    })
}

/// Workspaces seen alive in the last seconds, so that the hot path does not ask each time. A workspace that is missing is
/// always asked for again: a new one works at once.
#[derive(Default)]
struct LiveWorkspaces(Mutex<HashMap<WorkspaceId, Instant>>);

impl LiveWorkspaces {
    const TTL: Duration = Duration::from_secs(5);
    const ENTRIES_MAX: usize = 10_000;

    async fn contains(&self, pool: &PgPool, workspace: WorkspaceId) -> Result<bool, store::Error> {
        let fresh = |seen: &Instant| seen.elapsed() < Self::TTL;
        if self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&workspace)
            .is_some_and(fresh)
        {
            return Ok(true);
        }
        let live = store::health::workspace_is_live(pool, workspace).await?;
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if live {
            if seen.len() >= Self::ENTRIES_MAX {
                seen.retain(|_, at| fresh(at));
            }
            seen.insert(workspace, Instant::now());
        } else {
            seen.remove(&workspace);
        }
        Ok(live)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    #[error("tokens can be made here only with HS256; with {0:?} the identity provider makes them")]
    NotOurs(config::Algorithm),
    #[error(transparent)]
    Config(#[from] AuthConfigError),
    #[error("the token can not be signed: {0}")]
    Sign(#[from] jsonwebtoken::errors::Error),
}

#[derive(Serialize)]
struct NewClaims<'a> {
    sub: &'a str,
    ws: WorkspaceId,
    role: Role,
    iss: &'a str,
    aud: &'a str,
    iat: i64,
    nbf: i64,
    exp: i64,
}

/// Makes a token that this service accepts. The workspace is not looked up.
pub fn issue(
    config: &config::Auth,
    workspace: WorkspaceId,
    subject: &str,
    role: Role,
    ttl: Duration,
) -> Result<String, IssueError> {
    let algorithm = algorithm(config.algorithm);
    if algorithm != Algorithm::HS256 {
        return Err(IssueError::NotOurs(config.algorithm));
    }
    let key = EncodingKey::from_secret(secret_of(config)?.expose_secret().as_bytes())?;
    let now = unix_now();
    let claims = NewClaims {
        sub: subject,
        ws: workspace,
        role,
        iss: &config.issuer,
        aud: &config.audience,
        iat: now,
        nbf: now,
        exp: now.saturating_add(ttl.as_secs().try_into().unwrap_or(i64::MAX)),
    };
    Ok(jsonwebtoken::encode(
        &Header::new(algorithm),
        &claims,
        &key,
    )?)
}

fn algorithm(configured: config::Algorithm) -> Algorithm {
    match configured {
        config::Algorithm::HS256 => Algorithm::HS256,
        config::Algorithm::RS256 => Algorithm::RS256,
        config::Algorithm::ES256 => Algorithm::ES256,
        config::Algorithm::EdDSA => Algorithm::EdDSA,
    }
}

fn secret_of(config: &config::Auth) -> Result<&SecretString, AuthConfigError> {
    let secret = config
        .jwt_secret
        .as_ref()
        .ok_or(AuthConfigError::SecretMissing)?;
    match secret.expose_secret().len() {
        32.. => Ok(secret),
        length => Err(AuthConfigError::SecretTooShort(length)),
    }
}

/// Tokens come from outside, so they are judged by this machine's clock. Nothing else is.
fn unix_now() -> i64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const NOW: i64 = 1_800_000_000;
    const WS: &str = "0199e0c5-7a4b-7000-8000-000000000001";

    fn accepts(change: impl FnOnce(&mut Value)) -> bool {
        let mut claims = json!({
            "sub": "ada", "ws": WS, "role": "member", "iss": "reconvene", "aud": "reconvene", "exp": NOW + 60,
        });
        change(&mut claims);
        let expected = Expected {
            issuer: "reconvene".into(),
            audience: "reconvene".into(),
            leeway: 30,
        };
        serde_json::from_str(&claims.to_string())
            .ok()
            .and_then(|claims| judge(claims, &expected, NOW))
            .is_some()
    }

    fn set(name: &str, value: Value) -> bool {
        accepts(|claims| claims[name] = value)
    }

    fn without(name: &str) -> bool {
        accepts(|claims| drop(claims.as_object_mut().unwrap().remove(name)))
    }

    // H-41, P-3
    #[test]
    fn claims_are_judged_one_by_one() {
        assert!(accepts(|_| {}));
        for name in ["sub", "ws", "role", "iss", "aud", "exp"] {
            assert!(!without(name), "{name} absent");
            for odd in [
                json!(null),
                json!(""),
                json!([]),
                json!({}),
                json!(true),
                json!([WS]),
                json!(" "),
            ] {
                assert!(!set(name, odd.clone()), "{name}: {odd}");
            }
        }
        assert!(set("aud", json!(["other", "reconvene"])));
        assert!(!set("aud", json!(["other"])));
        assert!(!set("aud", json!(["reconvene", 1])));
        assert!(!set("iss", json!("somebody")));
        assert!(!set("role", json!("root")));
        assert!(!set("role", json!("Admin")));
        assert!(!set("ws", json!(WS.replace('-', ""))));
        assert!(!set("ws", json!(format!("{{{WS}}}"))));
        assert!(!set("ws", json!("demo")));

        assert!(set("exp", json!(NOW - 1)), "within the leeway");
        assert!(set("exp", json!(NOW as f64 + 0.5)));
        assert!(
            set("exp", json!(1e300)),
            "a token without end is the signer's choice"
        );
        for past in [
            json!(NOW - 30),
            json!(NOW - 120),
            json!(0),
            json!(-1),
            json!(-1e300),
        ] {
            assert!(!set("exp", past.clone()), "exp {past}");
        }
        assert!(!set("exp", json!((NOW + 60).to_string())), "exp as text");

        assert!(set("nbf", json!(NOW)));
        assert!(set("nbf", json!(NOW + 30)), "within the leeway");
        assert!(!set("nbf", json!(NOW + 31)));
        assert!(!set("nbf", json!(NOW + 3600)));
        assert!(!set("nbf", json!("soon")));
        assert!(!set("iat", json!("yesterday")));
    }

    #[test]
    fn a_number_beyond_all_numbers_is_refused() {
        let text =
            json!({"sub": "ada", "ws": WS, "role": "member", "iss": "i", "aud": "a", "exp": 0})
                .to_string();
        assert!(
            serde_json::from_str::<Claims>(&text.replace("\"exp\":0", "\"exp\":1e999")).is_err()
        );
    }
}
