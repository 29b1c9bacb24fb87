//! `POST /api/chat/message`: start a task, or go on with one (T-1 to T-9).
//!
//! Judges the body and hands it to `lifecycle::submit`. What only a new task can be given is refused on append rather
//! than ignored, so that nobody believes that it took effect.

use super::App;
use super::auth::Caller;
use super::error::{Error, FieldError, field_errors};
use super::extract::{Json, check_storable_object};
use crate::domain::budget::Limits;
use crate::domain::ids::{AgentId, ItemId, TaskId};
use crate::domain::task::TaskStatus;
use crate::domain::text::{MessageText, Title};
use crate::lifecycle::submit::{Idempotency, NewMessage, Recipient, SubmitError};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(post_message))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    /// 1 to 100,000 characters after trimming, without NUL.
    #[schema(example = "Compare the three offers and write a recommendation.")]
    message: String,
    /// The agent of a new task; absent, the workspace's default agent.
    agent_group_id: Option<AgentId>,
    /// Append to this task instead of making one. A terminal task is reopened.
    task_id: Option<TaskId>,
    /// Of a new task. Cut to 200 characters; absent, made from the first line of the message.
    #[schema(example = "Offers")]
    title: Option<String>,
    /// For a new task: it may not delegate, whatever its agent may. It can only disable.
    #[serde(default)]
    disable_delegation: bool,
    /// On append: every pending wait of the task is skipped and it goes on at once.
    #[serde(default)]
    skip_wait: bool,
    /// Kept with a new task as `metadata`.
    #[schema(example = json!({"ticket": "A-17"}))]
    metadata: Option<Map<String, Value>>,
    /// Of a new task: what it may take with everything beneath it. A tree that reaches it is stopped, with the error
    /// `budget_exhausted`. If its agent has a budget too (`config.budget`), the smaller number of each counts.
    #[schema(value_type = Option<Limits>)]
    budget: Option<Value>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ChatReceipt {
    task_id: TaskId,
    message_id: ItemId,
    /// Of the task, when the message had been stored.
    status: TaskStatus,
    /// Whether this call made the task.
    created: bool,
}

/// Send a message
///
/// Starts a task, or appends to one when `task_id` is given. With an `Idempotency-Key` the call may be repeated for
/// 24 hours: the same body gets the first answer again and nothing is created twice.
#[utoipa::path(
    post,
    path = "/api/chat/message",
    tag = "chat",
    security(("bearer" = [])),
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 255 printable ASCII characters")),
    request_body = ChatMessage,
    responses(
        (status = 201, body = ChatReceipt, description = "A new task; its address is in Location"),
        (status = 200, body = ChatReceipt, description = "Appended"),
        (status = 404, body = super::error::Problem, content_type = "application/problem+json",
            description = "No such task or agent in this workspace (`not_found`)"),
        (status = 409, body = super::error::Problem, content_type = "application/problem+json",
            description = "The key was used with another body (`idempotency_key_reused`)"),
    )
)]
async fn post_message(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    Json(body): Json<ChatMessage>,
) -> Result<Response, Error> {
    let key = idempotency_key(&headers)?;
    let idempotency = key.map(|key| Idempotency {
        key,
        body_hash: body.hash(),
    });
    let message = body.check(&caller, idempotency)?;
    let to = message.to;
    let submitted = app
        .submitter
        .submit(message)
        .await
        .map_err(|error| match (to, error) {
            (Recipient::DefaultAgent, SubmitError::AgentNotFound) => Error::unprocessable(
                "no_default_agent",
                "This workspace has no default agent. Name an agent in agent_group_id.",
            ),
            (_, error) => error.into(),
        })?;
    let receipt = Json(ChatReceipt {
        task_id: submitted.task,
        message_id: submitted.message,
        status: submitted.status,
        created: submitted.created,
    });
    Ok(match submitted.created {
        true => {
            let address = format!("/api/tasks/{}", submitted.task);
            (StatusCode::CREATED, [(header::LOCATION, address)], receipt).into_response()
        }
        false => receipt.into_response(),
    })
}

impl From<SubmitError> for Error {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::AgentNotFound | SubmitError::TaskNotFound => Error::NotFound,
            SubmitError::IdempotencyKeyReused => Error::conflict(
                "idempotency_key_reused",
                "This Idempotency-Key was already used with another body. Use a new key for a new message.",
            ),
            SubmitError::Store(error) => error.into(),
        }
    }
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Error> {
    let name = HeaderName::from_static("idempotency-key");
    let refuse = |reason| {
        Err(Error::InvalidHeader(FieldError::new(
            "Idempotency-Key",
            reason,
        )))
    };
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return refuse("must be given once");
    }
    match value.to_str() {
        Ok(key)
            if (1..=255).contains(&key.len())
                && key.bytes().all(|b| b == b' ' || b.is_ascii_graphic()) =>
        {
            Ok(Some(key.to_owned()))
        }
        _ => refuse("must be 1 to 255 printable ASCII characters"),
    }
}

impl ChatMessage {
    fn check(self, caller: &Caller, idempotency: Option<Idempotency>) -> Result<NewMessage, Error> {
        let mut errors = Vec::new();
        let to = match (self.task_id, self.agent_group_id) {
            (None, None) => Recipient::DefaultAgent,
            (None, Some(agent)) => Recipient::Agent(agent),
            (Some(task), agent) => {
                let only_new = [
                    (
                        agent.is_some(),
                        "agent_group_id",
                        "can not be given with task_id: the task keeps its agent",
                    ),
                    (
                        self.title.is_some(),
                        "title",
                        "can only be given to a new task, not with task_id",
                    ),
                    (
                        self.disable_delegation,
                        "disable_delegation",
                        "can only be set when the task is made, not with task_id",
                    ),
                    (
                        self.metadata
                            .as_ref()
                            .is_some_and(|fields| !fields.is_empty()),
                        "metadata",
                        "can only be given to a new task, not with task_id",
                    ),
                ];
                errors.extend(
                    only_new
                        .into_iter()
                        .filter(|refused| refused.0)
                        .map(|(_, path, why)| FieldError::new(path, why)),
                );
                if self.budget.is_some() {
                    errors.push(FieldError::new(
                        "budget",
                        "can only be given to a new task, not with task_id",
                    ));
                }
                Recipient::Task(task)
            }
        };
        let budget = self.budget.as_ref().map(Limits::parse).transpose();
        let budget = budget.unwrap_or_else(|error| {
            errors.extend(field_errors(error).map(|fault| {
                let dot = if fault.path.is_empty() { "" } else { "." };
                FieldError::new(format!("budget{dot}{}", fault.path), fault.reason)
            }));
            None
        });
        let mut keep = |path: &str, error: String| errors.push(FieldError::new(path, error));
        let text = MessageText::parse(&self.message)
            .map_err(|error| keep("message", error.to_string()))
            .ok();
        let title = self.title.and_then(|title| {
            Title::parse(&title)
                .map_err(|error| keep("title", error.to_string()))
                .ok()
        });
        let metadata = self.metadata.unwrap_or_default();
        errors.extend(check_storable_object("metadata", &metadata).err());
        match text {
            Some(text) if errors.is_empty() => Ok(NewMessage {
                workspace: caller.workspace,
                to,
                text,
                title,
                disable_delegation: self.disable_delegation,
                skip_wait: self.skip_wait,
                metadata,
                budget,
                idempotency,
            }),
            _ => Err(Error::InvalidBody(errors)),
        }
    }

    /// Equal for bodies that mean the same: order of fields, blanks between them and defaults written out do not count.
    fn hash(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        let ids = [
            self.agent_group_id.map(|id| id.0),
            self.task_id.map(|id| id.0),
        ];
        let flags = [self.disable_delegation, self.skip_wait];
        let metadata = self
            .metadata
            .clone()
            .map(|fields| sorted(Value::Object(fields)));
        // As one JSON array, so that no two different bodies run together to the same text.
        hash.update(
            serde_json::json!([
                self.message,
                self.title,
                ids,
                flags,
                metadata.unwrap_or_else(|| Value::Object(Map::new())),
                self.budget.clone().map(sorted),
            ])
            .to_string(),
        );
        hash.finalize().into()
    }
}

/// With the fields of every object in alphabetical order.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields
                .into_iter()
                .map(|(key, value)| (key, sorted(value)))
                .collect();
            fields.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(fields.into_iter().collect())
        }
        Value::Array(values) => Value::Array(values.into_iter().map(sorted).collect()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(body: &str) -> [u8; 32] {
        serde_json::from_str::<ChatMessage>(body).unwrap().hash()
    }

    // T-2: the same body is the same meaning, not the same bytes.
    #[test]
    fn the_hash_of_a_body_is_of_its_meaning() {
        let first = hash(
            r#"{"message": "hi", "metadata": {"a": {"x": 1, "y": 2}, "b": 12345678901234567890123}}"#,
        );
        let same = r#"{"metadata":{"b":12345678901234567890123,"a":{"y":2,"x":1}},"skip_wait":false,"message":"hi","title":null}"#;
        assert_eq!(hash(same), first);
        let id = "0199e0c5-7a4b-7000-8000-000000000001";
        let others = [
            r#"{"message": "hi"}"#.to_owned(),
            r#"{"message": "hi "}"#.to_owned(),
            r#"{"message": "hi", "title": "hi"}"#.to_owned(),
            r#"{"message": "hi", "title": ""}"#.to_owned(),
            r#"{"message": "hi", "skip_wait": true}"#.to_owned(),
            r#"{"message": "hi", "budget": {"tokens": 5}}"#.to_owned(),
            r#"{"message": "hi", "disable_delegation": true}"#.to_owned(),
            r#"{"message": "hi", "metadata": {"a": {"x": 1, "y": 2}, "b": 12345678901234567890124}}"#.to_owned(),
            format!(r#"{{"message": "hi", "task_id": "{id}"}}"#),
            format!(r#"{{"message": "hi", "agent_group_id": "{id}"}}"#),
        ];
        let mut seen = vec![first];
        for body in others {
            let hash = hash(&body);
            assert!(!seen.contains(&hash), "{body}");
            seen.push(hash);
        }
    }
}
