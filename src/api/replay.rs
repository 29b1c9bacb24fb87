//! `POST /api/admin/decision-logs/{id}/replay`: asks for a decision once more, as it was or with a change, and shows both
//!
//!
//! Nothing comes of the answer: no tool is called, no row is written, and its tokens are on nobody's account here, though
//! the provider bills them. A handler that takes as long as a model; it holds no connection while it asks.

use super::App;
use super::auth::AdminCaller;
use super::decision_logs::{AnswerView, Logged, SectionView, load};
use super::error::{Error, Problem};
use super::extract::{Json, Path};
use crate::domain::agent::ModelSettings;
use crate::domain::decision::Usage;
use crate::domain::ids::AgentId;
use crate::domain::model_provider::ProviderKind;
use crate::domain::replay::Replay;
use crate::lifecycle::model_providers;
use crate::llm::{ModelError, OFFLINE_MODEL, Request, Retry};
use crate::prompts::SystemPrompt;
use crate::sent::{INSTRUCTIONS, ROSTER, SentPrompt};
use crate::store::{self, decision_logs::LoggedDecision};
use axum::extract::State;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(replay_decision))
}

/// What is to be different. Without any of it the same model is asked the same.
#[derive(ToSchema)]
#[schema(example = json!({"instructions": "Answer in one sentence."}))]
#[allow(dead_code, reason = "the document's side of `Replay`")]
pub struct ReplayBody {
    /// What is absent here stays as it was. A provider without a name: its configured model.
    model: Option<ModelSettings>,
    /// In the place of the agent's instructions. At most 200,000 characters.
    instructions: Option<String>,
    /// Other profiles of agents that this decision's roster shows.
    delegation_profiles: Option<Vec<ReplayProfile>>,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "the document's side of `NewProfile`")]
pub struct ReplayProfile {
    agent_group_id: AgentId,
    /// 1 to 4,000 characters.
    #[schema(example = "Checks facts against their sources.")]
    description: String,
    /// At most 4,000 characters.
    example_input: Option<String>,
}

/// The same decision twice.
#[derive(Serialize, ToSchema)]
pub struct Replayed {
    #[schema(example = "0199e0c5-7a4b-7000-8000-000000000001.1")]
    decision_log_id: String,
    /// The parts of the prompt that were sent otherwise than before, as they were sent now.
    changed_sections: Vec<SectionView>,
    original: ReplaySide,
    replayed: ReplaySide,
}

#[derive(Serialize, ToSchema)]
pub struct ReplaySide {
    #[schema(example = "gpt-5-mini")]
    model: String,
    answer: AnswerView,
    usage: Usage,
    /// In millionths of the currency of the prices; null without a price.
    cost_micros: Option<i64>,
    latency_ms: i32,
}

/// Replay a decision
///
/// Asks the same model, or another one, with the same prompt and messages, or with other instructions or another
/// delegation profile of an agent in the roster, and shows both decisions. Nothing is executed and nothing of the task
/// changes. One attempt: a provider that refuses or is busy is an answer too.
#[utoipa::path(
    post,
    path = "/api/admin/decision-logs/{id}/replay",
    tag = "admin",
    security(("bearer" = ["admin"])),
    params(("id" = String, Path, example = "0199e0c5-7a4b-7000-8000-000000000001.1")),
    request_body = Option<ReplayBody>,
    responses(
        (status = 200, body = Replayed),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The prompt is no longer kept (`prompt_forgotten`), or a credential of the workspace can not be read, so that its value could not be blanked out (`operator_key_missing`)"),
        (status = 502, body = Problem, content_type = "application/problem+json",
            description = "The model gave no answer (`model_error`); the sentence is the provider's"),
    )
)]
async fn replay_decision(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<String>,
    body: Option<Json<Value>>,
) -> Result<Json<Replayed>, Error> {
    let replay = match body {
        Some(Json(body)) => Replay::parse(&body)?,
        None => Replay::default(),
    };
    let Logged {
        decision,
        prompt,
        messages,
        secrets,
    } = load(&app, &caller, &id).await?;
    let mut prompt = prompt.ok_or_else(|| {
        Error::conflict(
            "prompt_forgotten",
            "The prompt of this decision is no longer kept, so it can not be asked for again.",
        )
    })?;
    let changed = change(&app, &decision, &mut prompt, &replay)?;
    let names_provider = replay
        .model
        .as_ref()
        .is_some_and(|new| new.provider.is_some());
    let model = settings(&decision, replay.model);
    // The workspace's own providers and keys, as in the task.
    let own = {
        let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
        let vault = &app.vault;
        model_providers::answering(&mut conn, vault, caller.workspace, &model).await?
    };
    if names_provider && own.is_none() && !app.models.has(&model) {
        let reason = "names no model provider of this workspace or of the deployment";
        return Err(Error::field("model.provider", reason));
    }
    let model_name = match &own {
        Some(own) => own.name_for(&model),
        None => app.models.name_for(&model),
    };
    let request = Request {
        model,
        system: prompt.sections.joined().into(),
        messages,
        tools: prompt.tools.into(),
        output_schema: decision.agent.output_schema.clone().map(Arc::new),
        cache_key: format!("{}/replay/{id}", caller.workspace),
    };
    let begun = Instant::now();
    let answer = tokio::select! {
        answer = async {
            match &own {
                Some(own) => app.models.decide_with(own, &request, &|_| {}).await,
                None => app.models.decide(&request, &|_| {}).await,
            }
        } => answer?,
        () = app.shutdown.cancelled() => return Err(Error::ShuttingDown),
    };
    let original = decision.row.answer;
    let raw_calls = original.raw_calls.unwrap_or_default();
    Ok(Json(Replayed {
        decision_log_id: id,
        changed_sections: prompt
            .sections
            .0
            .iter()
            .filter(|section| changed.contains(&section.name.as_str()))
            .map(|section| secrets.section(section))
            .collect(),
        original: ReplaySide {
            model: decision.row.model,
            answer: secrets.answer(decision.text, decision.calls, raw_calls),
            usage: original.usage,
            cost_micros: original.cost_micros,
            latency_ms: decision.row.latency_ms,
        },
        replayed: ReplaySide {
            cost_micros: app.models.cost_micros(&model_name, answer.usage),
            model: model_name,
            answer: secrets.answer(Some(answer.text), answer.calls, answer.raw_calls),
            usage: answer.usage,
            latency_ms: i32::try_from(begun.elapsed().as_millis()).unwrap_or(i32::MAX),
        },
    }))
}

/// Puts what is to be different into the prompt. Returns the names of the parts that are.
fn change(
    app: &App,
    decision: &LoggedDecision,
    prompt: &mut SentPrompt,
    replay: &Replay,
) -> Result<Vec<&'static str>, Error> {
    let mut changed = Vec::new();
    if let Some(instructions) = &replay.instructions {
        let rendered = app.prompts.system(&SystemPrompt {
            agent_name: &decision.agent.name,
            instructions,
            phases: &[],
            roster: None,
            output_schema: decision.agent.output_schema.as_ref(),
        });
        let sections = rendered.map_err(Error::internal)?.0;
        let new = sections.into_iter().find(|s| s.name == INSTRUCTIONS);
        match (prompt.section_mut(INSTRUCTIONS), new) {
            (Some(section), Some(new)) => *section = new,
            _ => {
                let reason = "can not be changed: the prompt has no section of this name";
                return Err(Error::field("instructions", reason));
            }
        }
        changed.push(INSTRUCTIONS);
    }
    for (place, profile) in replay.profiles.iter().enumerate() {
        if !prompt.change_profile(profile) {
            let path = format!("delegation_profiles[{place}].agent_group_id");
            let reason = "is not an agent that the roster of this decision shows";
            return Err(Error::field(path, reason));
        }
        changed.push(ROSTER);
    }
    Ok(changed)
}

/// Those that the decision was made under, with what is to be different.
fn settings(decision: &LoggedDecision, changed: Option<ModelSettings>) -> ModelSettings {
    let model = &decision.row.model;
    let was = ModelSettings {
        provider: match model.as_str() {
            OFFLINE_MODEL => Some(ProviderKind::Offline.as_str().to_owned()),
            _ => decision.agent.model.provider.clone(),
        },
        name: Some(model.clone()).filter(|name| !name.is_empty()),
        ..decision.agent.model.clone()
    };
    let Some(new) = changed else {
        return was;
    };
    ModelSettings {
        // The name of one provider's model means nothing to another.
        name: new.name.or(was.name.filter(|_| new.provider.is_none())),
        provider: new.provider.or(was.provider),
        temperature: new.temperature.or(was.temperature),
        max_output_tokens: new.max_output_tokens.or(was.max_output_tokens),
        reasoning: new.reasoning.or(was.reasoning),
    }
}

impl From<ModelError> for Error {
    fn from(error: ModelError) -> Self {
        // Whole seconds, rounded up: who comes back then is not too early.
        let retry_after = match error.retry {
            Retry::After(hint) => hint.map(|h| Duration::from_secs(h.as_secs_f64().ceil() as u64)),
            Retry::Never => None,
        };
        Self::BadGateway {
            code: "model_error",
            detail: format!("{}.", error.message.trim_end_matches('.')),
            retry_after,
        }
    }
}
