//! What decide steps have asked their models and got, for admins of the workspace.
//!
//! The prompt is kept with the log; the messages are made anew from the feed, as they were when the model was asked. All
//! texts are shown without the workspace's credentials and without the deployment's keys, wherever somebody has written
//! one. Token counts by section are estimates: providers only count a request as a whole.

use super::App;
use super::auth::{AdminCaller, Caller};
use super::error::Error;
use super::extract::{FromQuery, Json, Path, Query, QueryReader};
use super::page::Page;
use crate::domain::agent::RosterLines;
use crate::domain::credential::blank_out;
use crate::domain::decision::{RawCall, ToolCall, Usage};
use crate::domain::ids::{AgentId, TaskId};
use crate::domain::task::{Failure, TaskKey};
use crate::domain::text::estimated_tokens;
use crate::lifecycle::credentials::resolve_all;
use crate::llm::{Message, Models};
use crate::prompts::Section;
use crate::sent::{ROSTER, SentPrompt, history::history};
use crate::store;
use crate::store::decision_logs::{self, DecisionKey, DecisionRow, LoggedDecision};
use axum::extract::State;
use chrono::{DateTime, Utc};
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const LIST: &str = "decision-logs";

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_decision_logs))
        .routes(routes!(get_decision_log))
}

#[derive(Serialize, ToSchema)]
pub struct DecisionLog {
    /// Names this log in the routes here.
    #[schema(example = "0199e0c5-7a4b-7000-8000-000000000001.1")]
    id: String,
    task_id: TaskId,
    /// Of the task; 1 for its first decide step.
    turn: i32,
    agent_group_id: AgentId,
    #[schema(example = "Lead")]
    agent_name: String,
    #[schema(example = "gpt-5-mini")]
    model: String,
    /// The tools that the answer calls, in order, as the model named them.
    #[schema(example = json!(["delegate_tasks"]))]
    tools_called: Vec<String>,
    /// As the provider counted, with answers that were empty and asked for again.
    usage: Usage,
    /// In millionths of the currency of the prices; null without a price.
    cost_micros: Option<i64>,
    /// Why there was no answer; null when there was one.
    error: Option<Failure>,
    latency_ms: i32,
    /// How often the model was asked again, because it was busy or its answer empty.
    retries: i32,
    created_at: DateTime<Utc>,
}

#[derive(Serialize, ToSchema)]
pub struct DecisionLogPage {
    items: Vec<DecisionLog>,
    /// `cursor` of the next page; null on the last one.
    next_cursor: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub struct DecisionLogDetails {
    #[serde(flatten)]
    log: DecisionLog,
    /// The system prompt in its parts, in order, and at the end the tools, which are sent beside it. Null: it has been
    /// forgotten.
    sections: Option<Vec<SectionView>>,
    messages: Vec<MessageView>,
    /// An estimate, of all messages.
    messages_estimated_tokens: usize,
    answer: AnswerView,
}

/// A named part of what was sent.
#[derive(Clone, Serialize, ToSchema)]
pub struct SectionView {
    /// `instructions`, `phases`, `rules`, `delegation`, `roster`, `tools`, or what the operator's own template names.
    #[schema(example = "instructions")]
    pub name: String,
    pub text: String,
    /// An estimate.
    pub estimated_tokens: usize,
    /// One for each agent of the roster, one for each tool; none in other parts.
    pub entries: Vec<EntryView>,
}

#[derive(Clone, Serialize, ToSchema)]
pub struct EntryView {
    #[schema(example = "Researcher")]
    pub name: String,
    /// Of an agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_group_id: Option<AgentId>,
    /// An agent's lines; a tool's description.
    pub text: String,
    /// A tool's JSON Schema.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Value>,
    /// An estimate.
    pub estimated_tokens: usize,
}

/// A message as it was sent.
#[derive(Serialize, ToSchema)]
pub struct MessageView {
    /// `user`, `assistant` or `tool`.
    #[schema(example = "user")]
    role: &'static str,
    text: String,
    /// Of the assistant.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    calls: Vec<CallView>,
    /// Of the call that a tool's result belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    is_error: Option<bool>,
}

#[derive(Serialize, ToSchema)]
pub struct CallView {
    id: String,
    #[schema(example = "delegate_tasks")]
    name: String,
    /// Byte for byte as the model wrote them.
    #[schema(example = "{}")]
    arguments: String,
    /// Why they can not be executed.
    #[serde(skip_serializing_if = "Option::is_none")]
    invalid: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub struct AnswerView {
    /// Null when there was no answer.
    pub text: Option<String>,
    /// As they were understood.
    pub calls: Vec<CallView>,
    /// As the model wrote them, where something had to be changed to understand them: an id, or arguments that are no JSON.
    pub raw_calls: Vec<RawCall>,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
struct Filter {
    /// Only those of this task. The next page wants it again.
    task_id: Option<TaskId>,
}

impl FromQuery for (Filter, Page) {
    fn from_query(query: &mut QueryReader) -> Self {
        let task_id = query.optional("task_id", "an id");
        (Filter { task_id }, Page::from_query(query))
    }
}

/// List decision logs
///
/// What each decide step has asked its model and got: the newest tasks first, and in each the newest step. Kept for
/// `decision_logs.retention_days`; those of deleted tasks are not shown.
#[utoipa::path(
    get,
    path = "/api/admin/decision-logs",
    tag = "admin",
    security(("bearer" = ["admin"])),
    params(Filter, Page),
    responses((status = 200, body = DecisionLogPage))
)]
async fn list_decision_logs(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Query((filter, page)): Query<(Filter, Page)>,
) -> Result<Json<DecisionLogPage>, Error> {
    let after = page.after_key(LIST, |task, turn| {
        let (task, turn) = (TaskId(task), turn.parse().ok()?);
        Some(DecisionKey { task, turn })
    })?;
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let (workspace, wanted) = (caller.workspace, page.wanted());
    let rows = decision_logs::list(&mut conn, workspace, filter.task_id, after, wanted).await?;
    let (rows, next_cursor) =
        page.cut_by_key(LIST, rows, |row| (row.key.task.0, row.key.turn.to_string()));
    Ok(Json(DecisionLogPage {
        items: rows.into_iter().map(DecisionLog::from).collect(),
        next_cursor,
    }))
}

/// See a decision log
///
/// The system prompt in its sections, the messages as they were sent, and the answer. Credentials of the workspace and
/// keys of the deployment are blanked out.
#[utoipa::path(
    get,
    path = "/api/admin/decision-logs/{id}",
    tag = "admin",
    security(("bearer" = ["admin"])),
    params(("id" = String, Path, example = "0199e0c5-7a4b-7000-8000-000000000001.1")),
    responses(
        (status = 200, body = DecisionLogDetails),
        (status = 409, body = super::error::Problem, content_type = "application/problem+json",
            description = "A credential of the workspace can not be read, so that its value could not be blanked out (`operator_key_missing`)"),
    )
)]
async fn get_decision_log(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<String>,
) -> Result<Json<DecisionLogDetails>, Error> {
    let Logged {
        decision,
        prompt,
        messages,
        secrets,
    } = load(&app, &caller, &id).await?;
    let raw_calls = decision.row.answer.raw_calls.clone().unwrap_or_default();
    let messages_estimated_tokens = messages.iter().map(Message::estimated_tokens).sum();
    let mut log = DecisionLog::from(decision.row);
    log.error = log.error.map(|error| Failure {
        message: secrets.blank(&error.message),
        ..error
    });
    Ok(Json(DecisionLogDetails {
        log,
        sections: prompt.map(|prompt| secrets.sections(prompt)),
        messages: messages.into_iter().map(|m| secrets.message(m)).collect(),
        messages_estimated_tokens,
        answer: secrets.answer(decision.text, decision.calls, raw_calls),
    }))
}

/// A log with what it stands for, and what must not be shown of it.
pub(super) struct Logged {
    pub decision: LoggedDecision,
    pub prompt: Option<SentPrompt>,
    pub messages: Vec<Message>,
    pub secrets: Secrets,
}

pub(super) async fn load(app: &App, caller: &Caller, id: &str) -> Result<Logged, Error> {
    let key = read_id(id).ok_or(Error::NotFound)?;
    let workspace = caller.workspace;
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let decision = decision_logs::get(&mut conn, workspace, key)
        .await?
        .ok_or(Error::NotFound)?;
    let task = TaskKey {
        workspace,
        task: key.task,
    };
    let mut items = store::items::histories(&mut conn, &[task]).await?;
    items.retain(|item| item.seq <= decision.seen_seq);
    let (messages, _) = history(&items, app.config.tools.max_result_chars);
    let secrets = Secrets {
        values: resolve_all(&mut conn, &app.vault, workspace).await?,
        models: app.models.clone(),
    };
    Ok(Logged {
        prompt: decision.prompt.as_ref().and_then(SentPrompt::read),
        decision,
        messages,
        secrets,
    })
}

fn id_of(key: DecisionKey) -> String {
    format!("{}.{}", key.task, key.turn)
}

fn read_id(text: &str) -> Option<DecisionKey> {
    let (task, turn) = text.split_once('.')?;
    let key = DecisionKey {
        task: task.parse().ok()?,
        turn: turn.parse().ok()?,
    };
    (id_of(key) == text).then_some(key)
}

impl From<DecisionRow> for DecisionLog {
    fn from(row: DecisionRow) -> Self {
        Self {
            id: id_of(row.key),
            task_id: row.key.task,
            turn: row.key.turn,
            agent_group_id: row.agent,
            agent_name: row.agent_name,
            model: row.model,
            tools_called: row.answer.calls,
            usage: row.answer.usage,
            cost_micros: row.answer.cost_micros,
            error: row.answer.error,
            latency_ms: row.latency_ms,
            retries: row.retries,
            created_at: row.created_at,
        }
    }
}

/// What nobody is to see in a text. Everything that is shown of a log goes through here.
pub(super) struct Secrets {
    values: Vec<SecretString>,
    models: Models,
}

impl Secrets {
    pub fn blank(&self, text: &str) -> String {
        let values: Vec<&str> = self.values.iter().map(|v| v.expose_secret()).collect();
        self.models.redact(&blank_out(text, &values))
    }

    fn blank_json(&self, value: Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.blank(&text)),
            Value::Array(items) => items.into_iter().map(|v| self.blank_json(v)).collect(),
            Value::Object(fields) => fields
                .into_iter()
                .map(|(key, v)| (self.blank(&key), self.blank_json(v)))
                .collect(),
            Value::Null | Value::Bool(_) | Value::Number(_) => value,
        }
    }

    pub fn section(&self, section: &Section) -> SectionView {
        let agents = match section.name == ROSTER {
            true => RosterLines::all(&section.text),
            false => vec![],
        };
        let entries = agents.into_iter().map(|agent| EntryView {
            name: self.blank(agent.name),
            agent_group_id: Some(agent.id),
            text: self.blank(agent.text),
            parameters: None,
            estimated_tokens: estimated_tokens(agent.text),
        });
        SectionView {
            name: section.name.clone(),
            text: self.blank(&section.text),
            estimated_tokens: estimated_tokens(&section.text),
            entries: entries.collect(),
        }
    }

    fn sections(&self, prompt: SentPrompt) -> Vec<SectionView> {
        let mut sections: Vec<_> = prompt.sections.0.iter().map(|s| self.section(s)).collect();
        let tools = prompt.tools.into_iter().map(|tool| EntryView {
            estimated_tokens: tool.estimated_tokens(),
            name: tool.name,
            agent_group_id: None,
            text: self.blank(&tool.description),
            parameters: Some(self.blank_json(tool.parameters)),
        });
        let entries: Vec<EntryView> = tools.collect();
        sections.push(SectionView {
            name: "tools".to_owned(),
            text: String::new(),
            estimated_tokens: entries.iter().map(|e| e.estimated_tokens).sum(),
            entries,
        });
        sections
    }

    fn message(&self, message: Message) -> MessageView {
        let view = |role, text: &str| MessageView {
            role,
            text: self.blank(text),
            calls: vec![],
            call_id: None,
            is_error: None,
        };
        match message {
            Message::User(text) => view("user", &text),
            Message::Assistant { text, calls } => MessageView {
                calls: self.calls(calls),
                ..view("assistant", &text)
            },
            Message::ToolResult {
                call_id,
                text,
                is_error,
                ..
            } => MessageView {
                call_id: Some(call_id),
                is_error: Some(is_error),
                ..view("tool", &text)
            },
        }
    }

    pub fn answer(
        &self,
        text: Option<String>,
        calls: Vec<ToolCall>,
        raw_calls: Vec<RawCall>,
    ) -> AnswerView {
        let blank = |text: Option<String>| text.map(|text| self.blank(&text));
        let raw_calls = raw_calls.into_iter().map(|raw| RawCall {
            id: blank(raw.id),
            name: blank(raw.name),
            arguments: blank(raw.arguments),
            provider_data: None,
        });
        AnswerView {
            text: blank(text),
            calls: self.calls(calls),
            raw_calls: raw_calls.collect(),
        }
    }

    fn calls(&self, calls: Vec<ToolCall>) -> Vec<CallView> {
        let view = |call: ToolCall| CallView {
            id: call.id,
            name: self.blank(&call.name),
            arguments: self.blank(&call.arguments),
            invalid: call.invalid,
        };
        calls.into_iter().map(view).collect()
    }
}
