use crate::{
    domain::{
        ids::{TaskId, WorkspaceId},
        task::TaskStatus,
    },
    runtime::Hub,
    store,
};
use sqlx::PgPool;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopReceipt {
    /// Of the named task, after the stop.
    pub status: TaskStatus,
    /// Tasks that this call stopped.
    pub stopped: u32,
    /// Active tasks left in the stopped tree: always 0.
    pub left_alive: u32,
}

pub async fn stop(
    _pool: &PgPool,
    _hub: &Hub,
    _workspace: WorkspaceId,
    _task: TaskId,
    _subtasks: bool,
) -> Result<Option<StopReceipt>, store::Error> {
    Ok(None)
}
