//! Which provider answers a request: the deployment's own, or one whose settings come with the request.

use super::anthropic::Anthropic;
use super::gemini::Gemini;
use super::http::{self, Access, Format, HttpModel};
use super::openai::OpenAi;
use super::price::cost_micros;
use super::redact::redact;
use super::{Model, ModelError, OFFLINE_MODEL, OfflineModel, OnText, Request};
use crate::config::{self, Config};
use crate::domain::agent::ModelSettings;
use crate::domain::decision::{Decision, Usage};
use crate::domain::model_provider::ProviderKind;
use crate::net::{NotPublic, Reach};
use reqwest::Url;
use reqwest::header::HeaderMap;
use secrecy::{ExposeSecret, SecretString};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Where one provider is, and who asks it.
#[derive(Clone, Debug)]
pub struct ProviderSettings {
    pub provider: ProviderKind,
    /// Without or with a trailing slash; a query is kept. Absent: the provider's own.
    pub base_url: Option<String>,
    /// Optional for servers that ask for none.
    pub api_key: Option<SecretString>,
    /// The model of agents that name none.
    pub model: Option<String>,
}

/// What holds for the calls of all providers.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For a whole attempt.
    pub timeout: Duration,
    /// Between two bytes.
    pub idle_timeout: Duration,
    /// Of agents that name none.
    pub max_output_tokens: Option<u32>,
    /// How far requests to providers of workspaces may go. The deployment's own are the operator's business.
    pub reach: Reach,
}

/// A setting under which no model can be asked; stops the start.
#[derive(Debug, thiserror::Error)]
#[error("{setting} ({}): {reason}", Config::variable(.setting))]
pub struct SettingsError {
    /// The path of the setting, or only its last part where the settings are not those of the deployment.
    pub setting: String,
    pub reason: String,
}

impl SettingsError {
    pub(super) fn new(setting: &str, reason: impl Into<String>) -> Self {
        Self {
            setting: setting.to_owned(),
            reason: reason.into(),
        }
    }

    fn under(self, section: &str) -> Self {
        let setting = match self.setting.as_str() {
            "" => section.to_owned(),
            leaf => format!("{section}.{leaf}"),
        };
        Self { setting, ..self }
    }
}

impl ProviderSettings {
    /// Those of `llm` by provider, the deployment's default first. A key at the top of `llm` is the default provider's,
    /// and wins over the same key in its own section. A provider of whom nothing is said is not there.
    pub fn from_config(llm: &config::Llm) -> Vec<Self> {
        let default = ProviderKind::from(llm.provider);
        let sections = [
            (ProviderKind::OpenAi, &llm.providers.openai),
            (ProviderKind::Anthropic, &llm.providers.anthropic),
            (ProviderKind::Gemini, &llm.providers.gemini),
        ];
        let mut all: Vec<_> = sections
            .into_iter()
            .filter_map(|(provider, section)| {
                let own = (provider == default).then_some(llm);
                let is_set = section.base_url.is_some()
                    || section.api_key.is_some()
                    || section.model.is_some();
                (own.is_some() || is_set).then(|| Self {
                    provider,
                    base_url: own
                        .and_then(|llm| llm.base_url.clone())
                        .or_else(|| section.base_url.clone()),
                    api_key: own
                        .and_then(|llm| llm.api_key.clone())
                        .or_else(|| section.api_key.clone()),
                    model: own
                        .and_then(|llm| llm.model.clone())
                        .or_else(|| section.model.clone()),
                })
            })
            .collect();
        all.sort_by_key(|settings| settings.provider != default);
        all
    }

    /// As in the configuration.
    pub fn provider_name(&self) -> &'static str {
        self.provider.as_str()
    }

    /// Whether a model can be asked under these settings, as far as that shows without asking.
    pub fn check(&self, reach: Reach) -> Result<(), SettingsError> {
        let (url, _) = self.list_of_models()?;
        let private = |error: NotPublic| SettingsError::new("base_url", error.to_string());
        reach.check(&url).map_err(private)
    }

    /// The model name that a call of such an agent is billed to.
    pub fn name_for(&self, agent: &ModelSettings) -> String {
        let named = agent.name.clone().or_else(|| self.model.clone());
        named.unwrap_or_default()
    }

    /// The base URL without its query, which may hold a key.
    pub fn address(&self) -> &str {
        let own = match self.provider {
            ProviderKind::OpenAi => OpenAi::BASE_URL,
            ProviderKind::Anthropic => Anthropic::BASE_URL,
            ProviderKind::Gemini => Gemini::BASE_URL,
            ProviderKind::Offline => "",
        };
        let url = self.base_url.as_deref().unwrap_or(own);
        url.split('?').next().unwrap_or(url).trim_end_matches('/')
    }

    /// Where the provider lists its models, and with which headers it wants to be asked.
    pub fn list_of_models(&self) -> Result<(Url, HeaderMap), SettingsError> {
        match self.provider {
            ProviderKind::OpenAi => list::<OpenAi>(self),
            ProviderKind::Anthropic => list::<Anthropic>(self),
            ProviderKind::Gemini => list::<Gemini>(self),
            ProviderKind::Offline => Err(SettingsError::new("provider", "has no list")),
        }
    }

    fn client(
        &self,
        http: &reqwest::Client,
        limits: Limits,
    ) -> Result<Arc<dyn Model>, SettingsError> {
        let http = http.clone();
        Ok(match self.provider {
            ProviderKind::OpenAi => Arc::new(HttpModel::<OpenAi>::new(http, self, limits)?),
            ProviderKind::Anthropic => Arc::new(HttpModel::<Anthropic>::new(http, self, limits)?),
            ProviderKind::Gemini => Arc::new(HttpModel::<Gemini>::new(http, self, limits)?),
            ProviderKind::Offline => Arc::new(OfflineModel),
        })
    }
}

fn list<F: Format>(settings: &ProviderSettings) -> Result<(Url, HeaderMap), SettingsError> {
    Ok(Access::new::<F>(settings)?.models::<F>())
}

/// The models of this deployment: those it has settings for, and the offline demo model, which is always there.
#[derive(Clone)]
pub struct Models {
    default: ProviderKind,
    configured: Arc<[Configured]>,
    offline: Arc<dyn Model>,
    /// For providers of workspaces.
    guarded: reqwest::Client,
    limits: Limits,
    prices: Arc<BTreeMap<String, config::Price>>,
}

struct Configured {
    provider: ProviderKind,
    model_name: Option<String>,
    model: Arc<dyn Model>,
    api_key: Option<SecretString>,
}

impl Models {
    /// What the configuration asks for.
    pub fn from_config(config: &Config) -> Result<Self, SettingsError> {
        let llm = &config.llm;
        let limits = Limits {
            timeout: Duration::from_secs(llm.timeout_seconds),
            idle_timeout: Duration::from_secs(llm.idle_timeout_seconds),
            max_output_tokens: llm.max_output_tokens,
            reach: Reach::with_private(config.http.allow_private_addresses),
        };
        let models = Self::new(
            llm.provider.into(),
            &ProviderSettings::from_config(llm),
            limits,
        )?;
        Ok(Self {
            prices: Arc::new(llm.prices.clone()),
            ..models
        })
    }

    /// `default` answers for agents that name no provider; it must have a model for those that name no model either.
    pub fn new(
        default: ProviderKind,
        providers: &[ProviderSettings],
        limits: Limits,
    ) -> Result<Self, SettingsError> {
        let client = |builder| http::client(builder).map_err(|error| error.under("llm"));
        let http = client(reqwest::Client::builder())?;
        let mut configured = Vec::new();
        for settings in providers {
            let section = section(settings.provider, default);
            let model_name = settings
                .model
                .clone()
                .filter(|model| !model.trim().is_empty());
            if settings.provider == default && model_name.is_none() {
                let reason = "name the model that answers for agents that name none";
                return Err(SettingsError::new("model", reason).under(&section));
            }
            configured.push(Configured {
                provider: settings.provider,
                model_name,
                api_key: settings.api_key.clone(),
                model: settings
                    .client(&http, limits)
                    .map_err(|error| error.under(&section))?,
            });
        }
        Ok(Self {
            default,
            configured: configured.into(),
            offline: Arc::new(OfflineModel),
            guarded: client(limits.reach.client())?,
            limits,
            prices: Arc::default(),
        })
    }

    /// One attempt at the model that the request's settings ask for.
    pub async fn decide(
        &self,
        request: &Request,
        on_text: OnText<'_>,
    ) -> Result<Decision, ModelError> {
        let wanted = self.wanted(&request.model);
        match wanted.and_then(|wanted| self.configured(wanted)) {
            Some(configured) => configured.model.decide(request, on_text).await,
            None if wanted == Some(ProviderKind::Offline) => {
                self.offline.decide(request, on_text).await
            }
            None => Err(ModelError::never(format!(
                "The agent asks for the model provider `{}`. Its workspace has none of this name, and this deployment has \
                 {} only. Remove `model.provider` from the agent or configure the provider.",
                request.model.provider.as_deref().unwrap_or_default(),
                self.names(),
            ))),
        }
    }

    /// One attempt at a provider whose settings are not the deployment's, as a workspace has them.
    pub async fn decide_with(
        &self,
        settings: &ProviderSettings,
        request: &Request,
        on_text: OnText<'_>,
    ) -> Result<Decision, ModelError> {
        let checked = settings.check(self.limits.reach);
        let model = checked.and_then(|()| settings.client(&self.guarded, self.limits));
        let model = model.map_err(|error| {
            ModelError::never(format!(
                "The settings of the model provider `{}` can not work: {} {}.",
                settings.provider_name(),
                error.setting,
                error.reason
            ))
        })?;
        model.decide(request, on_text).await
    }

    /// Whether the deployment has the provider that these settings name.
    pub fn has(&self, settings: &ModelSettings) -> bool {
        self.wanted(settings).is_some_and(|wanted| {
            wanted == ProviderKind::Offline || self.configured(wanted).is_some()
        })
    }

    /// The model name that a call under these settings is billed to.
    pub fn name_for(&self, settings: &ModelSettings) -> String {
        let wanted = self.wanted(settings);
        if wanted == Some(ProviderKind::Offline) {
            return OFFLINE_MODEL.to_owned();
        }
        settings
            .name
            .clone()
            .or_else(|| self.configured(wanted?)?.model_name.clone())
            .unwrap_or_default()
    }

    /// What calls of this model have cost; `None` without a price (T-17).
    pub fn cost_micros(&self, model: &str, usage: Usage) -> Option<i64> {
        Some(cost_micros(self.prices.get(model)?, usage))
    }

    /// The text without the deployment's keys, and without whatever looks like one.
    pub fn redact(&self, text: &str) -> String {
        let keys = self.configured.iter().filter_map(|c| c.api_key.as_ref());
        let keys: Vec<&str> = keys.map(ExposeSecret::expose_secret).collect();
        redact(text, &keys)
    }

    /// `None`: no deployment has a provider of this name.
    fn wanted(&self, settings: &ModelSettings) -> Option<ProviderKind> {
        match &settings.provider {
            Some(name) => ProviderKind::named(name),
            None => Some(self.default),
        }
    }

    fn configured(&self, provider: ProviderKind) -> Option<&Configured> {
        self.configured.iter().find(|one| one.provider == provider)
    }

    fn names(&self) -> String {
        let mut names: Vec<_> = self
            .configured
            .iter()
            .map(|one| format!("`{}`", one.provider.as_str()))
            .collect();
        names.push(format!("`{}`", ProviderKind::Offline.as_str()));
        names.join(", ")
    }
}

impl From<config::Provider> for ProviderKind {
    fn from(provider: config::Provider) -> Self {
        match provider {
            config::Provider::OpenAi => ProviderKind::OpenAi,
            config::Provider::Anthropic => ProviderKind::Anthropic,
            config::Provider::Gemini => ProviderKind::Gemini,
            config::Provider::Offline => ProviderKind::Offline,
        }
    }
}

/// The section of the configuration in which a provider's settings stand.
fn section(provider: ProviderKind, default: ProviderKind) -> String {
    if provider == default {
        "llm".to_owned()
    } else {
        format!("llm.providers.{}", provider.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(vars: &[(&str, &str)]) -> Config {
        let value = |name: &str| {
            let found = vars.iter().find(|(var, _)| *var == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Config::load(None, value).unwrap()
    }

    fn asking(provider: Option<ProviderKind>, name: Option<&str>) -> ModelSettings {
        ModelSettings {
            provider: provider.map(|kind| kind.as_str().to_owned()),
            name: name.map(str::to_owned),
            ..ModelSettings::default()
        }
    }

    #[test]
    fn the_configuration_names_the_models() {
        // L-10, P-22
        let own = asking(None, Some("agents-own"));
        let demo = Models::from_config(&config(&[])).unwrap();
        assert_eq!(demo.name_for(&own), OFFLINE_MODEL);

        let one = [
            ("LLM_PROVIDER", "openai"),
            ("LLM_MODEL", "m"),
            ("LLM_BASE_URL", "http://localhost:1/v1"),
        ];
        let models = Models::from_config(&config(&one)).unwrap();
        assert_eq!(models.name_for(&ModelSettings::default()), "m");
        assert_eq!(models.name_for(&own), "agents-own");
    }

    #[test]
    fn several_providers_have_sections_of_their_own() {
        // L-10, P-20
        let config = config(&[
            ("LLM_PROVIDER", "anthropic"),
            ("LLM_API_KEY", "top"),
            ("LLM_PROVIDERS_ANTHROPIC_API_KEY", "own"),
            ("LLM_PROVIDERS_ANTHROPIC_MODEL", "claude"),
            ("LLM_PROVIDERS_GEMINI_API_KEY", "g"),
            ("LLM_PROVIDERS_GEMINI_BASE_URL", "http://h/?key=k"),
        ]);
        let shown: Vec<_> = ProviderSettings::from_config(&config.llm)
            .iter()
            .map(|settings| {
                let key = settings.api_key.as_ref().map(|key| key.expose_secret());
                format!(
                    "{} {} {key:?} {:?}",
                    settings.provider_name(),
                    settings.address(),
                    settings.model
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                r#"anthropic https://api.anthropic.com Some("top") Some("claude")"#,
                r#"gemini http://h Some("g") None"#,
            ]
        );
        let models = Models::from_config(&config).unwrap();
        let gemini = Some(ProviderKind::Gemini);
        assert_eq!(models.name_for(&asking(None, None)), "claude");
        assert_eq!(models.name_for(&asking(gemini, Some("g-3"))), "g-3");
    }
}
