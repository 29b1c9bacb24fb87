//! `doctor`: is this installation fit to run? Every check says what it found and, if that is not good, what to do.
//!
//! It changes nothing but what opening the private database changes. A check whose ground is missing is left out rather
//! than reported as a failure of its own.

use super::database::{self, Database};
use super::{migrate, one_line};
use crate::config::{Algorithm, Config, ConfigError, Provider};
use crate::llm::ProviderSettings;
use crate::profiles;
use crate::store;
use crate::vault::Vault;
use chrono::{DateTime, TimeDelta, Utc};
use clap::Args;
use futures::future::join_all;
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Tokens tolerate a clock that is off by `auth.leeway_seconds`; beyond this it is worth a word.
const SKEW_MAX: TimeDelta = TimeDelta::seconds(2);
const MODEL_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  reconvene doctor
  reconvene doctor --json
  reconvene --config /etc/reconvene.yaml doctor

Exit code 1 if any check failed. Warnings do not count.")]
pub struct DoctorArgs {
    /// Print {"ok":...,"checks":[{"name","status","found","advice"}]}
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    Ok,
    Warning,
    Failed,
}

#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check {
            name,
            status: Status::Ok,
            found: found.into(),
            advice: None,
        }
    }

    fn warning(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
        Check {
            name,
            status: Status::Warning,
            found: found.into(),
            advice: Some(advice.into()),
        }
    }

    fn failed(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
        Check {
            name,
            status: Status::Failed,
            found: found.into(),
            advice: Some(advice.into()),
        }
    }
}

pub async fn run(
    config: Result<Config, ConfigError>,
    file: Option<&Path>,
    args: DoctorArgs,
) -> anyhow::Result<ExitCode> {
    let checks = match config {
        Ok(config) => all_checks(&config, file).await,
        Err(err) => {
            let advice = "correct it; config.yaml lists every key with its range";
            vec![Check::failed("configuration", err.to_string(), advice)]
        }
    };
    let ok = checks.iter().all(|check| check.status != Status::Failed);
    if args.json {
        super::print(serde_json::json!({ "ok": ok, "checks": checks }))?;
    } else {
        for check in &checks {
            let mark = match check.status {
                Status::Ok => "ok     ",
                Status::Warning => "warning",
                Status::Failed => "FAILED ",
            };
            super::print(format_args!("{mark}  {:<14} {}", check.name, check.found))?;
            if let Some(advice) = &check.advice {
                super::print(format_args!("         {:<14} -> {advice}", ""))?;
            }
        }
    }
    Ok(if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn all_checks(config: &Config, file: Option<&Path>) -> Vec<Check> {
    let mut checks = vec![configuration(config, file), tokens(config)];
    match database::open_database(config).await {
        Ok(database) => {
            checks.push(schema(&database).await);
            checks.push(clock(&database).await);
            checks.extend(secrets(config, &database).await);
            if let Err(err) = database.close().await {
                let advice = "look at postgres.log in data_dir";
                checks.push(Check::failed("database", one_line(&err), advice));
            }
        }
        Err(err) => {
            let advice = "correct the cause, then run doctor again";
            checks.push(Check::failed("database", one_line(&err), advice));
        }
    }
    checks.extend(models(config).await);
    checks
}

fn configuration(config: &Config, file: Option<&Path>) -> Check {
    let found = match file {
        Some(file) => format!("defaults, {}, environment", file.display()),
        None => "defaults, environment; no file".to_owned(),
    };
    match &config.prompts_dir {
        Some(dir) if !dir.is_dir() => Check::failed(
            "configuration",
            format!("prompts_dir: {} is not a folder", dir.display()),
            "correct prompts_dir (PROMPTS_DIR), or unset it to use the built-in prompts",
        ),
        _ => Check::ok("configuration", found),
    }
}

fn tokens(config: &Config) -> Check {
    let auth = &config.auth;
    if auth.algorithm != Algorithm::HS256 {
        return Check::ok(
            "tokens",
            format!("{:?}, with the keys at auth.jwks", auth.algorithm),
        );
    }
    match (&auth.jwt_secret, &config.database.url) {
        (Some(_), _) => Check::ok("tokens", "HS256, with auth.jwt_secret"),
        (None, None) => Check::ok("tokens", "HS256, with a secret kept in data_dir"),
        (None, Some(_)) => Check::failed(
            "tokens",
            "HS256, but auth.jwt_secret is not set",
            "set AUTH_JWT_SECRET to at least 32 bytes (openssl rand -hex 32), the same in every process",
        ),
    }
}

async fn schema(database: &Database) -> Check {
    let place = match &database.embedded {
        Some(_) => "the private database",
        None => "the database at database.url",
    };
    match migrate::pending(&database.pool).await {
        Ok(pending) if pending.is_empty() => Check::ok("database", format!("{place}, up to date")),
        Ok(pending) if database.embedded.is_some() => Check::ok(
            "database",
            format!(
                "{place}; the next start applies {} migrations",
                pending.len()
            ),
        ),
        Ok(pending) => Check::failed(
            "database",
            format!("{place} lacks {} migrations", pending.len()),
            "run: reconvene migrate",
        ),
        Err(err) => Check::failed(
            "database",
            format!("{place}: {}", one_line(err.as_ref())),
            "check that its user may read and write the schema",
        ),
    }
}

/// Only the database's clock decides about work; this machine's decides about tokens.
async fn clock(database: &Database) -> Check {
    let before = Utc::now();
    let theirs = sqlx::query_scalar::<_, DateTime<Utc>>("select clock_timestamp()");
    let theirs = match theirs.fetch_one(&database.pool).await {
        Ok(theirs) => theirs,
        Err(err) => {
            return Check::failed(
                "clock",
                one_line(&err),
                "check the connection to the database",
            );
        }
    };
    let after = Utc::now();
    judge_clock(before, theirs, after)
}

fn judge_clock(before: DateTime<Utc>, theirs: DateTime<Utc>, after: DateTime<Utc>) -> Check {
    // Somewhere between the two the database looked at its clock.
    let skew = if theirs < before {
        before - theirs
    } else {
        theirs - after
    };
    let skew = skew.max(TimeDelta::zero());
    let seconds = skew.as_seconds_f64();
    if skew > SKEW_MAX {
        let side = if theirs < before {
            "ahead of"
        } else {
            "behind"
        };
        return Check::failed(
            "clock",
            format!("this machine is {seconds:.1} s {side} the database"),
            "let both follow a time server (chrony or systemd-timesyncd); tokens expire by this machine's clock",
        );
    }
    Check::ok(
        "clock",
        format!("within {:.1} s of the database", seconds.max(0.1)),
    )
}

/// Whether whatever is encrypted can be read. Left out where the tables are not there yet.
async fn secrets(config: &Config, database: &Database) -> Option<Check> {
    let mut config = config.clone();
    if let Err(err) = database::settle_operator_key(&mut config) {
        let advice = "check that credentials.key in data_dir can be read";
        return Some(Check::failed("secrets", one_line(err.as_ref()), advice));
    }
    let vault = Vault::from_config(&config.credentials);
    let mut conn = database.pool.acquire().await.ok()?;
    let in_use = store::sealed::keys_in_use_all_workspaces(&mut conn).await;
    let in_use = in_use.ok()?;
    let missing: Vec<String> = in_use
        .iter()
        .filter(|(key, _)| !vault.has_key(key))
        .map(|(key, values)| format!("{values} under the key `{key}`"))
        .collect();
    let values: i64 = in_use.iter().map(|(_, values)| values).sum();
    Some(match (vault.newest(), missing.is_empty()) {
        (_, false) => Check::failed(
            "secrets",
            format!("stored values that can not be read: {}", missing.join(", ")),
            "add each such key to credentials.keys (CREDENTIALS_KEYS) again, behind the newest; if it is lost, give those \
             credentials and model providers other values",
        ),
        (Ok(newest), true) => Check::ok(
            "secrets",
            format!("{values} stored values; new ones are under the key `{newest}`"),
        ),
        (Err(_), true) => Check::warning(
            "secrets",
            "no key to encrypt with, so no credential and no key of a model provider can be stored",
            "set credentials.keys (CREDENTIALS_KEYS), the same in every process; config.yaml says how",
        ),
    })
}

/// One check per provider, the deployment's default first.
async fn models(config: &Config) -> Vec<Check> {
    let mut checks = Vec::new();
    if config.llm.provider == Provider::Offline {
        checks.push(Check::warning(
            "model",
            "the offline demo model",
            "for real answers set LLM_PROVIDER, LLM_MODEL and LLM_API_KEY (or LLM_BASE_URL for a local server)",
        ));
    }
    let providers = ProviderSettings::from_config(&config.llm);
    let default = config.llm.provider.as_str();
    let asked = providers.iter().map(|settings| Asked {
        check: "model",
        model_setting: format!("{}.model", section(settings, default)),
        settings: settings.clone(),
    });
    let asked = asked.chain(profile_writer(config, &providers));
    checks.extend(join_all(asked.map(|asked| ask_provider(asked, default))).await);
    checks
}

/// A model that is to be there.
struct Asked {
    check: &'static str,
    settings: ProviderSettings,
    model_setting: String,
}

/// The model that writes delegation profiles, if it is none of those that are asked for anyway.
fn profile_writer(config: &Config, providers: &[ProviderSettings]) -> Option<Asked> {
    let writer = profiles::model(&config.delegation_profiles, config.llm.provider);
    let of_provider =
        |settings: &&ProviderSettings| writer.provider.as_deref() == Some(settings.provider_name());
    let settings = providers.iter().find(of_provider)?;
    let is_another = writer.name.is_some() && writer.name != settings.model;
    is_another.then(|| Asked {
        check: "profiles",
        model_setting: "delegation_profiles.model".to_owned(),
        settings: ProviderSettings {
            model: writer.name,
            ..settings.clone()
        },
    })
}

/// Where a provider's settings stand.
fn section(settings: &ProviderSettings, default: &str) -> String {
    match settings.provider_name() {
        provider if provider == default => "llm".to_owned(),
        provider => format!("llm.providers.{provider}"),
    }
}

/// Lists the models: it costs nothing and needs address and key to be right.
async fn ask_provider(asked: Asked, default: &str) -> Check {
    let Asked {
        check,
        settings,
        model_setting,
    } = &asked;
    let (base, provider) = (settings.address(), settings.provider_name());
    let named = |path: &str| format!("{path} ({})", Config::variable(path));
    let setting = |leaf: &str| named(&format!("{}.{leaf}", section(settings, default)));
    let (url, headers) = match settings.list_of_models() {
        Ok(request) => request,
        Err(err) => {
            return Check::failed(
                check,
                format!("{provider}: {}", err.reason),
                format!("set {}", setting(&err.setting)),
            );
        }
    };
    let answer = async {
        let client = reqwest::Client::builder()
            .timeout(MODEL_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .build()?;
        let response = client.get(url).headers(headers).send().await?;
        let status = response.status();
        let listed = response
            .json::<serde_json::Value>()
            .await
            .ok()
            .and_then(|body| listed_models(&body));
        Ok::<_, reqwest::Error>((status, listed))
    };
    let (status, listed) = match answer.await {
        Ok(answer) => answer,
        Err(err) => {
            return Check::failed(
                check,
                format!("{base} does not answer: {}", one_line(&err.without_url())),
                format!(
                    "check {}, the network, and that the model server runs",
                    setting("base_url")
                ),
            );
        }
    };
    let model = settings.model.as_deref();
    let is_listed = model.zip(listed).map(|(model, listed)| {
        let model = model.trim_start_matches("models/");
        listed.iter().any(|name| name == model)
    });
    let found = match model {
        Some(model) => format!("{provider}: {model} at {base}"),
        None => format!("{provider}: {base}; no model for agents that name none"),
    };
    match (status.as_u16(), is_listed) {
        (401 | 403, _) => Check::failed(
            check,
            format!("{base} refuses the key ({status})"),
            format!("set {} to a valid key", setting("api_key")),
        ),
        // Google says so of a key that it does not know.
        (400, _) if provider == "gemini" => Check::failed(
            check,
            format!("{base} refuses the request ({status})"),
            format!("set {} to a valid key", setting("api_key")),
        ),
        (200..=299, Some(false)) => Check::warning(
            check,
            format!("{base} does not list {}", model.unwrap_or_default()),
            format!(
                "check {}, unless the provider lists only some of its models",
                named(model_setting)
            ),
        ),
        (200..=299, _) => Check::ok(check, found),
        // Some gateways have no list of models.
        (404 | 405, _) => Check::warning(
            check,
            format!("{base} answers, but lists no models ({status})"),
            format!(
                "check that {} ends where the provider's documentation says",
                setting("base_url")
            ),
        ),
        _ => Check::failed(
            check,
            format!("{base} answers {status}"),
            "try again later, or look at the provider's status page",
        ),
    }
}

/// The names in a list of models, in the form of any provider.
fn listed_models(body: &serde_json::Value) -> Option<Vec<String>> {
    let models = body
        .get("data")
        .or_else(|| body.get("models"))?
        .as_array()?;
    let names = models.iter().filter_map(|model| {
        let name = model.get("id").or_else(|| model.get("name"))?.as_str()?;
        Some(name.trim_start_matches("models/").to_owned())
    });
    Some(names.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_judged_with_the_round_trip_in_mind() {
        let at = |millis: i64| DateTime::UNIX_EPOCH + TimeDelta::milliseconds(millis);
        for (before, theirs, after, status) in [
            (0, 5, 10, Status::Ok),
            (0, 5_000, 6_000, Status::Ok),
            (0, 1_500, 10, Status::Ok),
            (0, 3_000, 10, Status::Failed),
            (10_000, 7_000, 10_010, Status::Failed),
        ] {
            let check = judge_clock(at(before), at(theirs), at(after));
            assert_eq!(
                check.status, status,
                "{before} {theirs} {after}: {}",
                check.found
            );
        }
    }
}
