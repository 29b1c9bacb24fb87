//! Values that have the right type and still cannot work: out of range, or in contradiction with each other.
//!
//! Not checked here: what only the outside can tell (whether a folder exists, a model answers); that is `doctor`'s job.

use super::layers::{ConfigError, Layers};
use super::{Algorithm, Config, Credentials, DelegationProfiles, Llm, Provider, Providers};
use secrecy::ExposeSecret;

/// The shortest HS256 secret in bytes (P-3).
const JWT_SECRET_BYTES_MIN: usize = 32;

/// Every number with its range. `config.yaml` says the same ranges in words; a test compares the two.
fn ranges(config: &Config) -> Vec<(&'static str, u64, std::ops::RangeInclusive<u64>)> {
    let Config {
        database,
        server,
        limits,
        auth,
        llm,
        decision_logs,
        delegation_profiles,
        worker,
        orchestrator,
        signals,
        spawn_tasks,
        tools,
        http,
        run_code,
        ..
    } = config;
    vec![
        (
            "database.max_connections",
            database.max_connections.into(),
            1..=1000,
        ),
        (
            "database.acquire_timeout_seconds",
            database.acquire_timeout_seconds,
            1..=60,
        ),
        ("server.port", server.port.into(), 0..=65535),
        (
            "server.health_port",
            server.health_port.unwrap_or(0).into(),
            0..=65535,
        ),
        (
            "server.shutdown_grace_seconds",
            server.shutdown_grace_seconds,
            1..=600,
        ),
        (
            "server.body_limit_bytes",
            server.body_limit_bytes as u64,
            1024..=104_857_600,
        ),
        (
            "server.request_timeout_seconds",
            server.request_timeout_seconds,
            1..=600,
        ),
        (
            "server.trusted_proxies",
            server.trusted_proxies.into(),
            0..=10,
        ),
        (
            "limits.workspace_requests_per_minute",
            limits.workspace_requests_per_minute.into(),
            0..=100_000_000,
        ),
        (
            "limits.login_attempts_per_source_per_minute",
            limits.login_attempts_per_source_per_minute.into(),
            1..=1_000_000,
        ),
        (
            "limits.login_attempts_per_account_per_minute",
            limits.login_attempts_per_account_per_minute.into(),
            1..=1_000_000,
        ),
        ("auth.leeway_seconds", auth.leeway_seconds, 0..=300),
        ("auth.session_hours", auth.session_hours.into(), 1..=8760),
        ("llm.max_attempts", llm.max_attempts.into(), 1..=100),
        ("llm.timeout_seconds", llm.timeout_seconds, 1..=3600),
        (
            "llm.idle_timeout_seconds",
            llm.idle_timeout_seconds,
            1..=3600,
        ),
        ("llm.retry_base_ms", llm.retry_base_ms, 1..=60_000),
        ("llm.retry_max_seconds", llm.retry_max_seconds, 1..=3600),
        (
            "llm.max_output_tokens",
            llm.max_output_tokens.unwrap_or(1).into(),
            1..=10_000_000,
        ),
        (
            "decision_logs.retention_days",
            decision_logs.retention_days.into(),
            1..=3650,
        ),
        (
            "delegation_profiles.concurrency",
            delegation_profiles.concurrency.into(),
            1..=100,
        ),
        ("worker.concurrency", worker.concurrency.into(), 1..=10_000),
        (
            "worker.lease_seconds",
            worker.lease_seconds.into(),
            1..=3600,
        ),
        ("worker.max_attempts", worker.max_attempts.into(), 1..=100),
        (
            "worker.max_parallel_tool_calls",
            worker.max_parallel_tool_calls.into(),
            1..=1000,
        ),
        (
            "worker.poll_interval_ms",
            worker.poll_interval_ms,
            10..=60_000,
        ),
        ("worker.batch", worker.batch.into(), 1..=1000),
        (
            "orchestrator.poll_interval_ms",
            orchestrator.poll_interval_ms,
            10..=60_000,
        ),
        ("orchestrator.batch", orchestrator.batch.into(), 1..=1000),
        (
            "orchestrator.max_attempts",
            orchestrator.max_attempts.into(),
            1..=100,
        ),
        (
            "orchestrator.resume_retry_window_seconds",
            orchestrator.resume_retry_window_seconds,
            1..=600,
        ),
        (
            "signals.early_ttl_seconds",
            signals.early_ttl_seconds.into(),
            1..=31_536_000,
        ),
        (
            "spawn_tasks.max_depth",
            spawn_tasks.max_depth.into(),
            0..=100,
        ),
        (
            "spawn_tasks.max_children_per_call",
            spawn_tasks.max_children_per_call.into(),
            0..=10_000,
        ),
        (
            "spawn_tasks.default_timeout_minutes",
            spawn_tasks.default_timeout_minutes.into(),
            1..=10_080,
        ),
        (
            "spawn_tasks.max_timeout_minutes",
            spawn_tasks.max_timeout_minutes.into(),
            1..=10_080,
        ),
        (
            "spawn_tasks.max_tree_size",
            spawn_tasks.max_tree_size.into(),
            1..=1_000_000,
        ),
        (
            "spawn_tasks.summary_child_chars",
            spawn_tasks.summary_child_chars as u64,
            1..=1_000_000,
        ),
        (
            "spawn_tasks.summary_total_chars",
            spawn_tasks.summary_total_chars as u64,
            1..=10_000_000,
        ),
        (
            "tools.max_result_chars",
            tools.max_result_chars as u64,
            1..=10_000_000,
        ),
        (
            "http.timeout_seconds",
            http.timeout_seconds.into(),
            1..=3600,
        ),
        (
            "http.max_response_bytes",
            http.max_response_bytes.into(),
            1..=100_000_000,
        ),
        ("http.max_attempts", http.max_attempts.into(), 1..=20),
        (
            "run_code.timeout_seconds",
            run_code.timeout_seconds.into(),
            1..=600,
        ),
        (
            "run_code.max_memory_mb",
            run_code.max_memory_mb.into(),
            8..=4096,
        ),
        (
            "run_code.max_output_bytes",
            run_code.max_output_bytes.into(),
            1..=10_000_000,
        ),
        ("run_code.max_calls", run_code.max_calls.into(), 0..=10_000),
    ]
}

pub fn check(config: &Config, layers: &Layers) -> Result<(), ConfigError> {
    for (path, value, range) in ranges(config) {
        if !range.contains(&value) {
            let (low, high) = (range.start(), range.end());
            return Err(layers.error(path, format!("{value} is not in the range {low} to {high}")));
        }
    }
    match problem(config, layers) {
        Some((path, reason)) => Err(layers.error(path, reason)),
        None => Ok(()),
    }
}

/// The first contradiction: the key to change and why.
fn problem(config: &Config, layers: &Layers) -> Option<(&'static str, String)> {
    let Config {
        database,
        server,
        auth,
        llm,
        worker,
        ..
    } = config;

    for (path, text) in [
        ("data_dir", config.data_dir.to_str().unwrap_or("?")),
        ("server.host", &server.host),
        ("auth.issuer", &auth.issuer),
        ("auth.audience", &auth.audience),
    ] {
        if text.trim().is_empty() || text.contains('\0') {
            return Some((path, "the value must not be empty or contain NUL".into()));
        }
    }

    if let Some(url) = &database.url {
        let url = url.expose_secret();
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Some((
                "database.url",
                "the URL must start with postgres:// (PostgreSQL is the only database)".into(),
            ));
        }
    }
    for origin in &server.cors_origins {
        if !is_origin(origin) {
            return Some((
                "server.cors_origins",
                format!("`{origin}` is not an origin such as https://app.example.com"),
            ));
        }
    }

    if let Some(secret) = &auth.jwt_secret {
        let bytes = secret.expose_secret().len();
        if bytes < JWT_SECRET_BYTES_MIN {
            return Some((
                "auth.jwt_secret",
                format!(
                    "the secret has {bytes} bytes; HS256 needs at least {JWT_SECRET_BYTES_MIN} \
                     (openssl rand -hex 32 makes a good one)"
                ),
            ));
        }
    }
    match (auth.algorithm, &auth.jwks) {
        (Algorithm::HS256, Some(_)) => {
            return Some((
                "auth.jwks",
                "public keys are of no use to HS256; set auth.algorithm to RS256, ES256 or EdDSA, \
                 or remove auth.jwks"
                    .into(),
            ));
        }
        (Algorithm::RS256 | Algorithm::ES256 | Algorithm::EdDSA, None) => {
            return Some((
                "auth.algorithm",
                format!(
                    "{:?} needs auth.jwks, a file or URL with the public keys",
                    auth.algorithm
                ),
            ));
        }
        (Algorithm::HS256, None) | (_, Some(_)) => {}
    }

    let mut ids = Vec::new();
    for key in &config.credentials.keys {
        let Some((id, _)) = Credentials::read_key(key.expose_secret()) else {
            return Some((
                "credentials.keys",
                "each key is `id:key`: an id of 1 to 32 letters, digits, `.`, `_`, `-`, and 64 hexadecimal digits \
                 (openssl rand -hex 32 makes them)"
                    .into(),
            ));
        };
        if ids.contains(&id) {
            return Some((
                "credentials.keys",
                format!("two keys have the id `{id}`; a new key needs a new id"),
            ));
        }
        ids.push(id);
    }

    if let Some(problem) = llm_problem(llm, layers) {
        return Some(problem);
    }
    if let Some(problem) = profiles_problem(&config.delegation_profiles, llm) {
        return Some(problem);
    }
    if llm.retry_base_ms > llm.retry_max_seconds * 1000 {
        return Some((
            "llm.retry_base_ms",
            "the first pause is longer than llm.retry_max_seconds allows".into(),
        ));
    }

    if let Some(tag) = worker.tags.iter().find(|tag| !is_tag(tag)) {
        return Some((
            "worker.tags",
            format!("`{tag}` is not a tag (letters, digits, `.`, `_`, `-`, at most 64)"),
        ));
    }
    if !is_log_filter(&config.log.level) {
        return Some((
            "log.level",
            format!(
                "`{}` is not off, error, warn, info, debug, trace, or a list such as \
                 info,reconvene::worker=debug",
                config.log.level
            ),
        ));
    }
    None
}

fn llm_problem(llm: &Llm, layers: &Layers) -> Option<(&'static str, String)> {
    let Providers {
        openai,
        anthropic,
        gemini,
    } = &llm.providers;
    let urls = [
        ("llm.base_url", &llm.base_url),
        ("llm.providers.openai.base_url", &openai.base_url),
        ("llm.providers.anthropic.base_url", &anthropic.base_url),
        ("llm.providers.gemini.base_url", &gemini.base_url),
    ];
    for (path, url) in urls {
        if let Some(url) = url.as_ref().filter(|url| !is_http_url(url)) {
            return Some((
                path,
                format!("`{url}` is not an http:// or https:// address"),
            ));
        }
    }
    let own = match llm.provider {
        Provider::OpenAi => openai,
        Provider::Anthropic => anthropic,
        Provider::Gemini => gemini,
        Provider::Offline => {
            // Whoever sets a key and forgets the provider would be answered by the demo model. An explicit `offline` may
            // stand beside a key that is left from before.
            let set = [
                ("llm.api_key", llm.api_key.is_some()),
                ("llm.base_url", llm.base_url.is_some()),
                ("llm.model", llm.model.is_some()),
                ("llm.providers.openai.api_key", openai.api_key.is_some()),
                ("llm.providers.openai.base_url", openai.base_url.is_some()),
                ("llm.providers.openai.model", openai.model.is_some()),
                (
                    "llm.providers.anthropic.api_key",
                    anthropic.api_key.is_some(),
                ),
                (
                    "llm.providers.anthropic.base_url",
                    anthropic.base_url.is_some(),
                ),
                ("llm.providers.anthropic.model", anthropic.model.is_some()),
                ("llm.providers.gemini.api_key", gemini.api_key.is_some()),
                ("llm.providers.gemini.base_url", gemini.base_url.is_some()),
                ("llm.providers.gemini.model", gemini.model.is_some()),
            ];
            let first = set.iter().find(|(_, is_set)| *is_set);
            return match first {
                Some((path, _)) if layers.is_default("llm.provider") => Some((
                    path,
                    "a model is set, but llm.provider is not: set it (LLM_PROVIDER) to openai, \
                     anthropic, gemini, or to offline for the demo model"
                        .into(),
                )),
                _ => None,
            };
        }
    };
    (llm.model.is_none() && own.model.is_none()).then(|| {
        (
            "llm.provider",
            format!(
                "{} needs llm.model (LLM_MODEL), the default model",
                llm.provider
            ),
        )
    })
}

/// Who writes profiles must be there, and have a model.
fn profiles_problem(own: &DelegationProfiles, llm: &Llm) -> Option<(&'static str, String)> {
    let provider = own.provider.filter(|provider| *provider != llm.provider)?;
    let section = match provider {
        Provider::OpenAi => &llm.providers.openai,
        Provider::Anthropic => &llm.providers.anthropic,
        Provider::Gemini => &llm.providers.gemini,
        Provider::Offline => return None,
    };
    if section.api_key.is_none() && section.base_url.is_none() && section.model.is_none() {
        let reason =
            format!("{provider} has no settings: give it some in llm.providers.{provider}");
        return Some(("delegation_profiles.provider", reason));
    }
    let has_model = provider == Provider::Gemini || own.model.is_some() || section.model.is_some();
    (!has_model).then(|| {
        let reason =
            format!("{provider} needs a model: set this or llm.providers.{provider}.model");
        ("delegation_profiles.model", reason)
    })
}

fn is_http_url(text: &str) -> bool {
    let rest = text
        .strip_prefix("http://")
        .or_else(|| text.strip_prefix("https://"));
    rest.is_some_and(|rest| {
        !rest.is_empty()
            && !rest.starts_with('/')
            && !text.contains(|c: char| c.is_whitespace() || c.is_control())
    })
}

/// Scheme, host and port, as a browser sends them in `Origin`: no path, no trailing slash.
fn is_origin(text: &str) -> bool {
    let rest = text.split_once("://").map(|(_, rest)| rest);
    is_http_url(text) && rest.is_some_and(|rest| !rest.contains(['/', '?', '#', '@', '*']))
}

fn is_tag(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

fn is_log_filter(text: &str) -> bool {
    let is_level = |level: &str| {
        ["off", "error", "warn", "info", "debug", "trace"]
            .contains(&level.to_ascii_lowercase().as_str())
    };
    text.split(',')
        .map(str::trim)
        .all(|part| match part.split_once('=') {
            Some((module, level)) => !module.is_empty() && is_level(level),
            None => is_level(part),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_in_config_yaml_are_the_checked_ones() {
        let config = Config::from_defaults();
        for (path, _, range) in ranges(&config) {
            let words = format!("{} to {}", range.start(), range.end());
            let comment = crate::config::tests::comment_of(path);
            assert!(
                comment.contains(&words),
                "{path}: the comment lacks `{words}`: {comment}"
            );
        }
    }

    #[test]
    fn origins() {
        for (text, good) in [
            ("https://app.example.com", true),
            ("http://localhost:3000", true),
            ("https://app.example.com/", false),
            ("https://app.example.com/x", false),
            ("app.example.com", false),
            ("*", false),
            ("https://", false),
        ] {
            assert_eq!(is_origin(text), good, "{text}");
        }
    }

    #[test]
    fn log_filters() {
        for (text, good) in [
            ("info", true),
            ("INFO", true),
            ("info,sqlx=warn", true),
            ("loud", false),
            ("", false),
            ("sqlx=loud", false),
        ] {
            assert_eq!(is_log_filter(text), good, "{text}");
        }
    }
}
