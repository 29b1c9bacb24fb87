//! Gives up waits at a user's wish (W-15): what is pending becomes `skipped`, the task resumes and is told; children run
//! on, and their later signals find nobody.

use super::complete_awaits::complete_awaits;
use crate::{
    domain::{
        ids::{GroupId, TaskId, WorkspaceId},
        task::TaskKey,
        task_await::AwaitStatus,
    },
    runtime::{Hub, Work},
    store::{self, awaits::Settlement},
};
use sqlx::PgPool;

/// Skips all pending waits of the task, or those of one group. Returns how many waits that were; `None` when there is no
/// such task. Again it changes nothing.
pub async fn skip(
    pool: &PgPool,
    hub: &Hub,
    workspace: WorkspaceId,
    task: TaskId,
    group: Option<GroupId>,
) -> Result<Option<usize>, store::Error> {
    let key = TaskKey { workspace, task };
    let skipped = store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let locked = store::tasks::lock(&mut tx, &[key]).await?.pop();
        if locked.is_none_or(|t| t.deleted) {
            return Ok(None);
        }
        let pending = store::awaits::pending_of_tasks(&mut tx, &[key], None).await?;
        let settlements: Vec<Settlement> = pending
            .into_iter()
            .filter(|(_, a)| group.is_none_or(|g| g == a.group))
            .map(|(_, a)| a.settled(AwaitStatus::Skipped))
            .collect();
        let settled = complete_awaits(&mut tx, &settlements).await?;
        tx.commit().await?;
        Ok(Some(settled.awaits.len()))
    })?;
    if skipped.is_some_and(|n| n > 0) {
        hub.wake(Work::Events);
        hub.feeds_changed([task]);
    }
    Ok(skipped)
}
