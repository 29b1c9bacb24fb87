use crate::{
    domain::{
        ids::{AgentId, ItemId, TaskId, WorkspaceId},
        task::TaskStatus,
        text::{MessageText, Title},
    },
    store,
};

#[derive(Clone, Debug)]
pub struct NewMessage {
    pub workspace: WorkspaceId,
    pub to: Recipient,
    pub text: MessageText,
    pub title: Option<Title>,
    pub disable_delegation: bool,
    pub skip_wait: bool,
    pub metadata: serde_json::Map<String, serde_json::Value>,
    pub idempotency: Option<Idempotency>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Idempotency {
    pub key: String,
    pub body_hash: [u8; 32],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipient {
    DefaultAgent,
    Agent(AgentId),
    Task(TaskId),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submitted {
    pub task: TaskId,
    pub message: ItemId,
    pub status: TaskStatus,
    pub created: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    #[error("no such agent")]
    AgentNotFound,
    #[error("no such task")]
    TaskNotFound,
    #[error("this Idempotency-Key was used with another body")]
    IdempotencyKeyReused,
    #[error(transparent)]
    Store(#[from] std::sync::Arc<store::Error>),
}

#[derive(Clone)]
pub struct Submitter;

impl Submitter {
    pub async fn submit(&self, _message: NewMessage) -> Result<Submitted, SubmitError> {
        Err(SubmitError::TaskNotFound)
    }
}
