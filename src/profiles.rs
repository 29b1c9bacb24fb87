//! Delegation profiles written by a model, for one agent or for all that lack one (A-28, `backfill`). Asked for
//! here, stored by `lifecycle::agents`.
//!
//! No connection is held while the model is asked. What authors have written goes to it as data: quoted, or on one
//! harmless line; it is offered no tools, so there is nothing that such a text could set off.

mod backfill;

use crate::config::{Config, DelegationProfiles, Provider};
use crate::domain::agent::{
    AgentDefinition, ModelSettings, NewProfile, Reasoning, harmless, harmless_name,
};
use crate::domain::delegation::quote;
use crate::domain::ids::{AgentId, WorkspaceId};
use crate::domain::model_provider::ProviderKind;
use crate::domain::retry::{self, next_delay};
use crate::domain::text::cut_chars;
use crate::lifecycle::agents::{self as lifecycle, EditError};
use crate::llm::{Message, Models, Request, Retry};
use crate::prompts::{ProfilePrompt, Prompts};
use crate::roster::Assembler;
use crate::store::{self, agents::Agent};
use sqlx::PgPool;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The model of Gemini that writes profiles where none is named.
const GEMINI_MODEL: &str = "gemini-2.5-flash";
/// Tokens of one answer, which is two short texts.
const OUTPUT_TOKENS_MAX: u32 = 1_024;
/// The same with room for thoughts.
const THINKING_TOKENS_MAX: u32 = 8 * OUTPUT_TOKENS_MAX;
/// Characters of the instructions, those of phases included, that the model is shown.
const INSTRUCTIONS_CHARS_MAX: usize = 20_000;
const TOOL_CHARS_MAX: usize = 300;

#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error(transparent)]
    Edit(#[from] EditError),
    /// The model gave none; the reason is one or more whole sentences. Nothing has been stored.
    #[error("{0}")]
    NotWritten(String),
}

impl From<store::Error> for ProfileError {
    fn from(error: store::Error) -> Self {
        ProfileError::Edit(error.into())
    }
}

/// One per process.
pub struct Profiles {
    pool: PgPool,
    models: Models,
    prompts: Arc<Prompts>,
    roster: Arc<Assembler>,
    model: ModelSettings,
    retry: retry::Limits,
    /// Agents of one backfill that are worked on at once.
    concurrency: usize,
    lease_secs: u32,
    leases_lost_max: u32,
}

/// What the model is shown of an agent, and the revision it is taken from.
struct Subject {
    agent: Agent,
    tools: Vec<(String, String)>,
}

impl Profiles {
    pub fn new(
        config: &Config,
        pool: PgPool,
        models: Models,
        prompts: Arc<Prompts>,
        roster: Arc<Assembler>,
    ) -> Self {
        Self {
            pool,
            models,
            prompts,
            roster,
            model: model(&config.delegation_profiles, config.llm.provider),
            retry: retry::Limits {
                attempts_max: config.llm.max_attempts,
                base: Duration::from_millis(config.llm.retry_base_ms),
                max: Duration::from_secs(config.llm.retry_max_seconds),
            },
            concurrency: config.delegation_profiles.concurrency as usize,
            lease_secs: config.worker.lease_seconds,
            leases_lost_max: config.worker.max_attempts,
        }
    }

    /// Has the agent's profile written and stores it, unless the agent was not at `revision`, or is saved by somebody
    /// meanwhile. Gives up after `patience`.
    pub async fn generate(
        &self,
        workspace: WorkspaceId,
        id: AgentId,
        revision: Option<i64>,
        patience: Duration,
    ) -> Result<(NewProfile, Agent), ProfileError> {
        let until = Instant::now() + patience;
        let subject = self.subject(workspace, id).await?;
        let current = subject.agent.revision;
        if revision.is_some_and(|revision| revision != current) {
            return Err(EditError::Stale { current }.into());
        }
        let written = tokio::time::timeout_at(until.into(), self.write(&subject, Some(until)));
        let profile = written.await.unwrap_or_else(|_| {
            Err(ProfileError::NotWritten(format!(
                "The model had not answered after {} s.",
                patience.as_secs()
            )))
        })?;
        let agent = lifecycle::save_profile(&self.pool, workspace, id, current, &profile).await?;
        Ok((profile, agent))
    }

    async fn subject(&self, workspace: WorkspaceId, id: AgentId) -> Result<Subject, ProfileError> {
        let mut conn = self.pool.acquire().await.map_err(store::Error::from)?;
        let agent = store::agents::get(&mut conn, workspace, id).await?;
        let agent = agent.ok_or(EditError::NotFound)?;
        let assembly = self.roster.assemble_draft(&mut conn, workspace, &agent);
        let tools = assembly.await?.tools.into_iter().map(|tool| {
            let of_base = self.prompts.tool(tool.base).unwrap_or_default();
            let description = match &tool.instance {
                None => of_base.to_owned(),
                Some(instance) => instance.description(of_base),
            };
            (tool.name, harmless(&description, TOOL_CHARS_MAX))
        });
        let tools = tools.collect();
        Ok(Subject { agent, tools })
    }

    /// Asks until there is an answer that can be used; one that can not be is asked for once more.
    async fn write(
        &self,
        subject: &Subject,
        until: Option<Instant>,
    ) -> Result<NewProfile, ProfileError> {
        let mut problem = String::new();
        for _ in 0..2 {
            let answer = self.answer(self.request(subject, &problem)?, until).await?;
            match NewProfile::parse(&answer) {
                Ok(profile) => return Ok(profile),
                Err(why) => problem = why,
            }
        }
        Err(ProfileError::NotWritten(format!(
            "The model's answer could not be used, twice: {problem}."
        )))
    }

    fn request(&self, subject: &Subject, problem: &str) -> Result<Request, ProfileError> {
        let draft = &subject.agent.draft;
        let prompt = ProfilePrompt {
            name: &quote(&harmless_name(&draft.name)),
            tools: &subject.tools,
            instructions: &quote(&all_instructions(draft)),
            problem,
        };
        let user = self.prompts.profile(&prompt).map_err(|error| {
            ProfileError::NotWritten(format!("The prompt could not be made: {error}."))
        })?;
        Ok(Request {
            model: self.model.clone(),
            system: self.prompts.profile_system().into(),
            messages: vec![Message::User(user)],
            tools: Arc::new([]),
            output_schema: None,
            cache_key: String::new(),
        })
    }

    /// The text of one answer, however often the provider has to be asked: never sooner than it wants (H-26), and not at
    /// all when that is later than `until`.
    async fn answer(
        &self,
        mut request: Request,
        until: Option<Instant>,
    ) -> Result<String, ProfileError> {
        let mut attempt = 1;
        loop {
            let error = match self.models.decide(&request, &|_| {}).await {
                Ok(decision) => return Ok(decision.text),
                Err(error) => error,
            };
            let told = &error.message;
            match error.retry {
                // Models that can not think, and those that can not do otherwise, refuse to be told not to.
                Retry::Never if error.status == Some(400) && request.model.reasoning.is_some() => {
                    request.model.reasoning = None;
                    // One that can not stop thinking does so at the cost of its answer.
                    request.model.max_output_tokens = Some(THINKING_TOKENS_MAX);
                }
                Retry::Never => return Err(ProfileError::NotWritten(told.clone())),
                Retry::After(hint) => {
                    let delay = next_delay(attempt, hint, &self.retry, fastrand::f64())
                        .map_err(|gave_up| format!("{told} ({gave_up})"))
                        .map_err(ProfileError::NotWritten)?;
                    if until.is_some_and(|until| Instant::now() + delay > until) {
                        let seconds = delay.as_secs_f64().ceil();
                        return Err(ProfileError::NotWritten(format!(
                            "{told} Try again in {seconds} s."
                        )));
                    }
                    tokio::time::sleep(delay).await;
                    attempt += 1;
                }
            }
        }
    }
}

/// Who writes profiles. Without settings of their own the deployment's model does, or Gemini's small one at Gemini.
pub fn model(own: &DelegationProfiles, deployment: Provider) -> ModelSettings {
    let provider = own.provider.unwrap_or(deployment);
    let gemini = (provider == Provider::Gemini).then(|| GEMINI_MODEL.to_owned());
    ModelSettings {
        provider: Some(ProviderKind::from(provider).as_str().to_owned()),
        name: own.model.clone().or(gemini),
        temperature: None,
        max_output_tokens: Some(OUTPUT_TOKENS_MAX),
        // Thoughts would eat the small budget.
        reasoning: Some(Reasoning::Disabled),
    }
}

/// Those of the phases behind the agent's own, cut if they are very long.
fn all_instructions(draft: &AgentDefinition) -> String {
    let mut text = draft.instructions.clone();
    for phase in &draft.phases {
        text.push_str(&format!(
            "\n\nPhase {}:\n{}",
            phase.name, phase.instructions
        ));
    }
    let text = text.trim();
    match cut_chars(text, INSTRUCTIONS_CHARS_MAX) {
        cut if cut.len() < text.len() => format!("{cut}… [cut]"),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deployments_model_writes_unless_another_is_named() {
        //
        use Provider::{Anthropic, Gemini, Offline, OpenAi};
        for (deployment, own_provider, own_model, provider, name) in [
            (
                Gemini,
                None,
                None,
                ProviderKind::Gemini,
                Some("gemini-2.5-flash"),
            ),
            (Gemini, None, Some("g-9"), ProviderKind::Gemini, Some("g-9")),
            (OpenAi, None, None, ProviderKind::OpenAi, None),
            (
                OpenAi,
                None,
                Some("small"),
                ProviderKind::OpenAi,
                Some("small"),
            ),
            (Offline, None, None, ProviderKind::Offline, None),
            (
                Anthropic,
                Some(Gemini),
                None,
                ProviderKind::Gemini,
                Some("gemini-2.5-flash"),
            ),
            (Gemini, Some(OpenAi), None, ProviderKind::OpenAi, None),
            (Gemini, Some(Offline), None, ProviderKind::Offline, None),
        ] {
            let own = DelegationProfiles {
                provider: own_provider,
                model: own_model.map(str::to_owned),
                concurrency: 1,
            };
            let chosen = model(&own, deployment);
            assert_eq!(
                (chosen.provider.as_deref(), chosen.name.as_deref()),
                (Some(provider.as_str()), name)
            );
            assert_eq!(chosen.reasoning, Some(Reasoning::Disabled));
            assert!(chosen.max_output_tokens.is_some_and(|max| max <= 2_048));
        }
    }
}
