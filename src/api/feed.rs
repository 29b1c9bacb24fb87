//! Feed items as callers see them, for the feed and the stream alike.
//!
//! The rows never change; what they point to (a call's result, the children of a card, the state of a wait) is shown as
//! it is when asked. An item whose data has a form that this release does not know is shown with what is known of it.

use crate::domain::ids::{GroupId, ItemId, StepId, TaskId, WorkspaceId};
use crate::domain::task::TaskStatus;
use crate::store;
use crate::store::feeds::{self, CallRow, ChildRow, ItemRow};
use chrono::{DateTime, Utc};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sqlx::PgPool;
use std::collections::HashMap;
use utoipa::ToSchema;

/// Children shown on a delegation card.
const CARD_CHILDREN: i64 = 25;

#[derive(Debug, Serialize, ToSchema)]
pub struct FeedItem {
    /// Place in the feed: 1, 2, 3, … without gaps.
    pub seq: i64,
    pub id: ItemId,
    pub created_at: DateTime<Utc>,
    #[serde(flatten)]
    pub content: FeedContent,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FeedContent {
    UserMessage {
        text: String,
        /// Sent with "Skip & send now".
        skip_wait: bool,
    },
    AssistantMessage {
        turn: i32,
        text: String,
        calls: Vec<CallRef>,
    },
    /// The consolidated outcome of a group of waits.
    ResumeMessage { group_id: GroupId, text: String },
    /// The answer before it does not fit the agent's `output_schema`: what the model is told of that.
    RepairMessage { turn: i32, text: String },
    ToolCall {
        turn: i32,
        call_id: String,
        name: String,
        step_id: Option<StepId>,
        /// As the model wrote them; text where they are not JSON.
        #[schema(value_type = Object)]
        arguments: Box<RawValue>,
        /// `queued`, `running`, `completed`, `failed` or `cancelled`.
        status: String,
        result: Option<CallResult>,
        started_at: Option<DateTime<Utc>>,
        finished_at: Option<DateTime<Utc>>,
    },
    ToolResult {
        turn: i32,
        call_id: String,
        name: String,
        text: String,
        is_error: bool,
    },
    Delegation {
        step_id: StepId,
        /// Empty for `async`.
        group_id: String,
        /// `barrier` or `async`.
        mode: String,
        /// Of the group: `open`, `completed`, `skipped` or `cancelled`; null for `async`.
        status: Option<String>,
        total: i64,
        counts: ChildCounts,
        /// The first 25, in delegation order.
        children: Vec<CardChild>,
    },
    Wait {
        group_id: GroupId,
        /// `user_input`, `external` or `timer`.
        source_type: String,
        /// Of `user_input`.
        question: Option<String>,
        /// Of `external`, if it has one: what a signal names as its `correlation_key`.
        key: Option<String>,
        /// Of `timer`: until when, or for how many seconds.
        until: Option<DateTime<Utc>>,
        seconds: Option<f64>,
        /// `open`, `completed`, `timed_out`, `skipped` or `cancelled`.
        status: String,
    },
    Status {
        status: String,
        /// Of `failed`: what happened.
        reason: Option<String>,
    },
}

impl FeedContent {
    /// The `kind`, which is also the name of the stream's event.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::UserMessage { .. } => "user_message",
            Self::AssistantMessage { .. } => "assistant_message",
            Self::ResumeMessage { .. } => "resume_message",
            Self::RepairMessage { .. } => "repair_message",
            Self::ToolCall { .. } => "tool_call",
            Self::ToolResult { .. } => "tool_result",
            Self::Delegation { .. } => "delegation",
            Self::Wait { .. } => "wait",
            Self::Status { .. } => "status",
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub struct CallRef {
    pub call_id: String,
    pub name: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct CallResult {
    pub text: String,
    pub is_error: bool,
}

/// Children by status; deleted ones count only as deleted.
#[derive(Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct ChildCounts {
    pub pending: i64,
    pub running: i64,
    pub waiting_for_input: i64,
    pub completed: i64,
    pub failed: i64,
    pub stopped: i64,
    pub deleted: i64,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct CardChild {
    pub task_id: TaskId,
    pub title: String,
    pub agent_name: String,
    pub status: TaskStatus,
    pub deleted: bool,
}

/// Items with a `seq` above `after`, at most `limit` of them.
pub async fn load(
    pool: &PgPool,
    workspace: WorkspaceId,
    task: TaskId,
    after: i64,
    limit: i64,
) -> Result<Vec<FeedItem>, store::Error> {
    let rows = feeds::items(pool, workspace, task, after, limit).await?;
    let around = Around::load(pool, workspace, task, &rows).await?;
    rows.into_iter().map(|row| around.render(row)).collect()
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CallData {
    step_id: Option<StepId>,
    ordinal: i32,
    call_id: String,
    name: String,
    is_error: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct MessageData {
    skip_wait: bool,
    calls: Vec<CallName>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CallName {
    id: String,
    name: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct DelegationData {
    step_id: Option<StepId>,
    group_id: String,
    mode: String,
    total: i64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct WaitData {
    group_id: Option<GroupId>,
    source_type: String,
    question: Option<String>,
    key: Option<String>,
    until: Option<DateTime<Utc>>,
    seconds: Option<f64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StatusData {
    status: String,
    reason: Option<String>,
}

fn data<T: DeserializeOwned + Default>(row: &ItemRow) -> T {
    row.data
        .as_ref()
        .and_then(|data| T::deserialize(data).ok())
        .unwrap_or_default()
}

/// What the items of one page point to.
struct Around {
    calls: HashMap<(i32, i32), CallRow>,
    children: HashMap<StepId, Vec<ChildRow>>,
    counts: HashMap<StepId, Vec<(Option<TaskStatus>, i64)>>,
    groups: HashMap<GroupId, String>,
}

impl Around {
    async fn load(
        pool: &PgPool,
        workspace: WorkspaceId,
        task: TaskId,
        rows: &[ItemRow],
    ) -> Result<Self, store::Error> {
        let (mut places, mut steps, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        for row in rows {
            match row.kind.as_str() {
                "tool_call" => places.push((row.turn.unwrap_or(0), data::<CallData>(row).ordinal)),
                "delegation" => {
                    let delegation = data::<DelegationData>(row);
                    steps.extend(delegation.step_id);
                    groups.extend(delegation.group_id.parse::<GroupId>().ok());
                }
                "wait" => groups.extend(data::<WaitData>(row).group_id),
                _ => {}
            }
        }
        let mut around = Self {
            calls: HashMap::new(),
            children: HashMap::new(),
            counts: HashMap::new(),
            groups: HashMap::new(),
        };
        if !places.is_empty() {
            around.calls = feeds::calls(pool, workspace, task, &places).await?;
        }
        if !steps.is_empty() {
            around.children = feeds::children(pool, workspace, task, &steps, CARD_CHILDREN).await?;
            around.counts = feeds::child_counts(pool, workspace, task, &steps).await?;
        }
        if !groups.is_empty() {
            around.groups = feeds::group_statuses(pool, workspace, &groups).await?;
        }
        Ok(around)
    }

    fn render(&self, row: ItemRow) -> Result<FeedItem, store::Error> {
        let turn = row.turn.unwrap_or(0);
        let content = match row.kind.as_str() {
            "user_message" => FeedContent::UserMessage {
                skip_wait: data::<MessageData>(&row).skip_wait,
                text: row.text.unwrap_or_default(),
            },
            "assistant_message" => {
                let calls = data::<MessageData>(&row).calls.into_iter();
                FeedContent::AssistantMessage {
                    turn,
                    calls: calls
                        .map(|call| CallRef {
                            call_id: call.id,
                            name: call.name,
                        })
                        .collect(),
                    text: row.text.unwrap_or_default(),
                }
            }
            "resume_message" => FeedContent::ResumeMessage {
                group_id: GroupId(row.id.0),
                text: row.text.unwrap_or_default(),
            },
            "repair_message" => FeedContent::RepairMessage {
                turn,
                text: row.text.unwrap_or_default(),
            },
            "tool_call" => self.tool_call(turn, data(&row)),
            "tool_result" => {
                let call = data::<CallData>(&row);
                FeedContent::ToolResult {
                    turn,
                    call_id: call.call_id,
                    name: call.name,
                    is_error: call.is_error,
                    text: row.text.unwrap_or_default(),
                }
            }
            "delegation" => self.delegation(data(&row)),
            "wait" => {
                let wait = data::<WaitData>(&row);
                let group_id = wait.group_id.unwrap_or(GroupId(row.id.0));
                FeedContent::Wait {
                    group_id,
                    source_type: wait.source_type,
                    question: wait.question,
                    key: wait.key,
                    until: wait.until,
                    seconds: wait.seconds,
                    status: self
                        .groups
                        .get(&group_id)
                        .cloned()
                        .unwrap_or_else(|| "open".into()),
                }
            }
            "status" => {
                let status = data::<StatusData>(&row);
                FeedContent::Status {
                    status: status.status,
                    reason: status.reason,
                }
            }
            other => {
                let reason = format!("an item of the kind {other}");
                return Err(store::Error::Corrupt {
                    table: "task_items",
                    reason,
                });
            }
        };
        Ok(FeedItem {
            seq: row.seq,
            id: row.id,
            created_at: row.created_at,
            content,
        })
    }

    fn tool_call(&self, turn: i32, item: CallData) -> FeedContent {
        let call = self.calls.get(&(turn, item.ordinal));
        let result = call.and_then(|call| {
            Some(CallResult {
                text: call.result.clone()?,
                is_error: call.is_error.unwrap_or(false),
            })
        });
        FeedContent::ToolCall {
            turn,
            call_id: item.call_id,
            name: item.name,
            step_id: call.map(|call| call.step).or(item.step_id),
            arguments: raw_json(
                call.and_then(|call| call.arguments.as_deref())
                    .unwrap_or("{}"),
            ),
            status: call.map_or_else(|| "queued".into(), |call| call.status.clone()),
            result,
            started_at: call.and_then(|call| call.started_at),
            finished_at: call.and_then(|call| call.finished_at),
        }
    }

    fn delegation(&self, item: DelegationData) -> FeedContent {
        let step = item.step_id.unwrap_or(StepId(uuid::Uuid::nil()));
        let mut counts = ChildCounts::default();
        for (status, count) in self.counts.get(&step).into_iter().flatten() {
            let place = match status {
                None => &mut counts.deleted,
                Some(TaskStatus::Pending) => &mut counts.pending,
                Some(TaskStatus::Running) => &mut counts.running,
                Some(TaskStatus::WaitingForInput) => &mut counts.waiting_for_input,
                Some(TaskStatus::Completed) => &mut counts.completed,
                Some(TaskStatus::Failed) => &mut counts.failed,
                Some(TaskStatus::Stopped) => &mut counts.stopped,
            };
            *place += count;
        }
        let children = self
            .children
            .get(&step)
            .into_iter()
            .flatten()
            .cloned()
            .map(|child| CardChild {
                task_id: child.id,
                title: child.title,
                agent_name: child.agent_name,
                status: child.status,
                deleted: child.deleted,
            });
        let group = item.group_id.parse::<GroupId>().ok();
        FeedContent::Delegation {
            step_id: step,
            status: group.and_then(|group| self.groups.get(&group).cloned()),
            group_id: item.group_id,
            mode: item.mode,
            total: item.total,
            counts,
            children: children.collect(),
        }
    }
}

/// The text itself where it is JSON, so that no digit is lost (H-31); else as a JSON string.
fn raw_json(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned())
        .or_else(|_| serde_json::value::to_raw_value(text))
        .unwrap_or_else(|_| RawValue::NULL.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    // H-31
    #[test]
    fn arguments_keep_their_digits() {
        for (text, shown) in [
            (
                r#"{"n":123456789012345678901234567890.10}"#,
                r#"{"n":123456789012345678901234567890.10}"#,
            ),
            ("{broken", r#""{broken""#),
            ("", r#""""#),
        ] {
            assert_eq!(raw_json(text).get(), shown);
        }
    }
}
