//! Every key of `config.yaml` as typed sections, and the only reader of the environment.
//!
//! The defaults are the compiled-in `config.yaml`: a key exists if and only if it stands there. `layers` merges defaults,
//! file and environment and knows where each value came from; `check` refuses values and combinations that cannot work, so
//! that the rest of the program never meets them. An error names the file or variable, the path and the reason (P-20), and
//! never repeats a secret.

mod check;
mod layers;

pub use layers::ConfigError;

use crate::config::layers::Layers;
use secrecy::SecretString;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// The compiled-in defaults, with a comment for every key.
pub const DEFAULTS: &str = include_str!("../config.yaml");

/// All settings of one process. Read once at start; nothing reads the environment later.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub data_dir: PathBuf,
    pub prompts_dir: Option<PathBuf>,
    pub database: Database,
    pub server: Server,
    pub limits: Limits,
    pub auth: Auth,
    pub credentials: Credentials,
    pub llm: Llm,
    pub decision_logs: DecisionLogs,
    pub delegation_profiles: DelegationProfiles,
    pub worker: Worker,
    pub orchestrator: Orchestrator,
    pub signals: Signals,
    pub spawn_tasks: SpawnTasks,
    pub tools: Tools,
    pub http: Http,
    pub run_code: RunCode,
    pub log: Log,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Database {
    /// `None`: the private PostgreSQL in `data_dir`.
    pub url: Option<SecretString>,
    pub max_connections: u32,
    pub bin_dir: Option<PathBuf>,
    pub acquire_timeout_seconds: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    pub host: String,
    /// 0: any free port.
    pub port: u16,
    /// For a process of any role. `None`: only the API tells of its health.
    #[serde(deserialize_with = "number_or_text")]
    pub health_port: Option<u16>,
    pub shutdown_grace_seconds: u64,
    pub body_limit_bytes: usize,
    pub request_timeout_seconds: u64,
    pub cors_origins: Vec<String>,
    /// Proxies in front of the service whose `X-Forwarded-For` is believed.
    pub trusted_proxies: u32,
}

/// Budgets of one process (P-8).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// 0 = unlimited.
    pub workspace_requests_per_minute: u32,
    pub login_attempts_per_source_per_minute: u32,
    pub login_attempts_per_account_per_minute: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Auth {
    /// At least 32 bytes. `None`: see `commands::database::signing_secret`.
    pub jwt_secret: Option<SecretString>,
    pub algorithm: Algorithm,
    /// A file or an http(s) URL. Present if and only if the algorithm is not HS256.
    pub jwks: Option<String>,
    pub issuer: String,
    pub audience: String,
    pub leeway_seconds: u64,
    pub session_hours: u32,
    /// Whether cookies are for https only, whatever a proxy says.
    pub secure_cookies: bool,
}

/// The algorithm that tokens must use; what a token says about itself does not count (P-3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Algorithm {
    HS256,
    RS256,
    ES256,
    EdDSA,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credentials {
    /// Each `id:key`, newest first. Empty: see `commands::database::settle_operator_key`.
    pub keys: Vec<SecretString>,
}

impl Credentials {
    /// The id and the 32 bytes of a key. `None`: the text is not `id:` with 64 hexadecimal digits after it.
    pub fn read_key(text: &str) -> Option<(&str, [u8; 32])> {
        let (id, digits) = text.trim().split_once(':')?;
        let is_id = (1..=32).contains(&id.len())
            && id
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        if !is_id || digits.len() != 64 {
            return None;
        }
        let mut key = [0; 32];
        for (byte, pair) in key.iter_mut().zip(digits.as_bytes().chunks(2)) {
            let digit = |b: u8| char::from(b).to_digit(16);
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Some((id, key))
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Llm {
    pub provider: Provider,
    pub base_url: Option<String>,
    pub api_key: Option<SecretString>,
    /// Present, here or in the provider's own section, unless the provider is offline.
    pub model: Option<String>,
    /// The first one included.
    pub max_attempts: u32,
    /// For a whole attempt.
    pub timeout_seconds: u64,
    /// Between two bytes.
    pub idle_timeout_seconds: u64,
    pub retry_base_ms: u64,
    pub retry_max_seconds: u64,
    #[serde(deserialize_with = "number_or_text")]
    pub max_output_tokens: Option<u32>,
    pub providers: Providers,
    /// By model, under the name that its calls are billed to.
    pub prices: BTreeMap<String, Price>,
}

/// In millionths of the currency for a million tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    #[serde(deserialize_with = "price")]
    pub input: u64,
    #[serde(deserialize_with = "price")]
    pub output: u64,
    /// `None`: as `input`.
    #[serde(default, deserialize_with = "price_if_any")]
    pub cached_input: Option<u64>,
}

/// Each provider's own settings, for deployments with more than one.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Providers {
    pub openai: ProviderSection,
    pub anthropic: ProviderSection,
    pub gemini: ProviderSection,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProviderSection {
    pub base_url: Option<String>,
    pub api_key: Option<SecretString>,
    pub model: Option<String>,
}

/// Who writes delegation profiles.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DelegationProfiles {
    /// One that has settings, or offline. `None`: the deployment's.
    pub provider: Option<Provider>,
    pub model: Option<String>,
    /// Agents of one backfill that are worked on at once.
    pub concurrency: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Provider {
    OpenAi,
    Anthropic,
    Gemini,
    Offline,
}

impl Provider {
    /// As in the configuration, where its own section has the same name.
    pub fn as_str(self) -> &'static str {
        match self {
            Provider::OpenAi => "openai",
            Provider::Anthropic => "anthropic",
            Provider::Gemini => "gemini",
            Provider::Offline => "offline",
        }
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecisionLogs {
    pub retention_days: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Worker {
    pub concurrency: u32,
    pub tags: Vec<String>,
    pub lease_seconds: u32,
    pub max_attempts: u32,
    pub max_parallel_tool_calls: u32,
    pub poll_interval_ms: u64,
    pub batch: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Orchestrator {
    pub poll_interval_ms: u64,
    pub batch: u32,
    pub max_attempts: u32,
    pub resume_retry_window_seconds: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Signals {
    pub early_ttl_seconds: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpawnTasks {
    pub max_depth: u32,
    /// 0 = unlimited.
    pub max_children_per_call: u32,
    pub default_timeout_minutes: u32,
    pub max_timeout_minutes: u32,
    pub max_tree_size: u32,
    pub summary_child_chars: usize,
    pub summary_total_chars: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tools {
    pub max_result_chars: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Http {
    pub allow_private_addresses: bool,
    pub timeout_seconds: u32,
    pub max_response_bytes: u32,
    pub max_attempts: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunCode {
    pub timeout_seconds: u32,
    pub max_memory_mb: u32,
    pub max_output_bytes: u32,
    pub max_calls: u32,
    /// `None`: this one.
    pub program: Option<PathBuf>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    pub level: String,
    pub format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

impl Config {
    /// Defaults, then `file`, then the environment as `env` answers for a variable's name.
    pub fn load(
        file: Option<&Path>,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Config, ConfigError> {
        let mut layers = Layers::new(DEFAULTS)?;
        if let Some(file) = file {
            layers.add_file(file)?;
        }
        layers.add_environment(env)?;
        let config = layers.read::<Config>()?;
        check::check(&config, &layers)?;
        Ok(config)
    }

    /// The defaults alone, whatever the environment says.
    pub fn from_defaults() -> Config {
        Config::load(None, |_| None).expect("the compiled-in config.yaml is valid")
    }

    /// The name of the environment variable for the key `path`.
    pub fn variable(path: &str) -> String {
        layers::variable(path)
    }
}

/// The file that is read when none is named: `config.yaml` in the working directory, if there is one.
pub fn file_in_working_directory() -> Option<PathBuf> {
    Some(PathBuf::from("config.yaml")).filter(|file| file.is_file())
}

/// A variable of the real environment. Text that is not UTF-8 becomes unreadable rather than "not set".
#[allow(clippy::disallowed_methods, reason = "this is the one reader")]
pub fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// The folders of the search path, for finding programs.
#[allow(clippy::disallowed_methods, reason = "this is the one reader")]
pub fn program_folders() -> Vec<PathBuf> {
    std::env::var_os("PATH")
        .map(|path| std::env::split_paths(&path).collect())
        .unwrap_or_default()
}

/// An optional number has no default that would tell its type, so from the environment it arrives as text.
fn number_or_text<'de, D, N>(value: D) -> Result<Option<N>, D::Error>
where
    D: Deserializer<'de>,
    N: TryFrom<u64>,
{
    use serde::de::Error;
    use serde_json::Value;
    let text = match Option::<Value>::deserialize(value)? {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => text,
        Some(other) => other.to_string(),
    };
    let number: u64 = text.trim().parse().map_err(|_| {
        D::Error::custom(format_args!(
            "`{text}` is not a whole number that is 0 or more"
        ))
    })?;
    let number = N::try_from(number).map_err(|_| {
        D::Error::custom(format_args!(
            "{number} is out of range; the comment in config.yaml gives it"
        ))
    })?;
    Ok(Some(number))
}

/// A decimal number of at most six places, read without a float, as millionths.
fn price<'de, D: Deserializer<'de>>(value: D) -> Result<u64, D::Error> {
    use serde::de::Error;
    use serde_json::Value;
    let text = match Value::deserialize(value)? {
        Value::String(text) => text,
        other => other.to_string(),
    };
    let micros = || {
        let (whole, places) = text.trim().split_once('.').unwrap_or((text.trim(), ""));
        let is_number = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit());
        if whole.is_empty() || places.len() > 6 || !is_number(whole) || !is_number(places) {
            return None;
        }
        let places: u64 = format!("{places:0<6}").parse().ok()?;
        let micros = whole.parse::<u64>().ok()?.checked_mul(1_000_000)? + places;
        (micros <= PRICE_MICROS_MAX).then_some(micros)
    };
    micros().ok_or_else(|| {
        D::Error::custom(format_args!(
            "`{text}` is not a price: 0 to 1000000, with at most six places after the point"
        ))
    })
}

const PRICE_MICROS_MAX: u64 = 1_000_000_000_000;

fn price_if_any<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u64>, D::Error> {
    price(value).map(Some)
}

#[cfg(test)]
mod tests;
