//! Soft deletes (T-34, T-35): rows vanish from every listing and count, and stay for those who still need them.
//!
//! What nobody waits for is stopped with it: its queued steps must not run for a task that is gone. A child whose living
//! parent waits for it goes on to its end, unseen, and its signal still reaches the parent. Since nobody can write to it
//! any more, it does not wait for its user: a question of it is skipped. All of it is one transaction under the locks of
//! the tree, so that no message reopens a task between its stop and its deletion.

use super::{
    complete_awaits::complete_awaits,
    stop::{announce_stop, halt},
};
use crate::{
    domain::{
        ids::{TaskId, WorkspaceId},
        task::{TaskKey, TaskState},
        task_await::{AwaitStatus, SourceType},
    },
    runtime::{Hub, Work},
    store::{self, awaits::Settlement},
};
use sqlx::{PgConnection, PgPool};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Deletes the task and, with `subtasks`, everything beneath it. Returns how many tasks this call has deleted; `None`
/// when there is no such task, deleted ones included.
pub async fn delete(
    pool: &PgPool,
    hub: &Hub,
    workspace: WorkspaceId,
    task: TaskId,
    subtasks: bool,
) -> Result<Option<u64>, store::Error> {
    let root = TaskKey { workspace, task };
    let result = store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let Some(locked) = lock_tree(&mut tx, root, subtasks).await? else {
            return Ok(None);
        };
        let keys: Vec<TaskKey> = locked.keys().copied().collect();
        let awaited = store::tasks::awaited_by(&mut tx, &keys).await?;
        let spared = spared(root, &locked, &awaited);
        let (going_on, ending): (Vec<_>, Vec<_>) =
            locked.into_values().partition(|t| spared.contains(&t.key));
        let going_on: Vec<TaskKey> = going_on.iter().map(|t| t.key).collect();
        let asking =
            store::awaits::pending_of_tasks(&mut tx, &going_on, Some(SourceType::UserInput))
                .await?;
        let skipped: Vec<Settlement> = asking
            .iter()
            .map(|(_, a)| a.settled(AwaitStatus::Skipped))
            .collect();
        complete_awaits(&mut tx, &skipped).await?;
        let changes = halt(&mut tx, ending, None).await?;
        let deleted = store::tasks::soft_delete(&mut tx, root, subtasks).await?;
        tx.commit().await?;
        Ok(Some((deleted, changes)))
    })?;
    Ok(result.map(|(deleted, changes)| {
        announce_stop(hub, &changes);
        hub.wake(Work::Events);
        hub.feeds_changed(deleted.iter().copied());
        deleted.len() as u64
    }))
}

/// Deletes many; those that are not there are passed over. Returns how many tasks were deleted in all.
pub async fn delete_many(
    pool: &PgPool,
    hub: &Hub,
    workspace: WorkspaceId,
    tasks: &[TaskId],
    subtasks: bool,
) -> Result<u64, store::Error> {
    let mut deleted = 0;
    for task in tasks {
        deleted += delete(pool, hub, workspace, *task, subtasks)
            .await?
            .unwrap_or(0);
    }
    Ok(deleted)
}

/// Locks what is to be deleted or stopped, parents first, until nobody new has appeared; see `stop`.
async fn lock_tree(
    conn: &mut PgConnection,
    root: TaskKey,
    subtasks: bool,
) -> Result<Option<BTreeMap<TaskKey, TaskState>>, store::Error> {
    let mut locked: BTreeMap<TaskKey, TaskState> = BTreeMap::new();
    loop {
        let Some(active) = store::tasks::stoppable(conn, root, subtasks).await? else {
            return Ok(None);
        };
        let doomed = store::tasks::undeleted(conn, root, subtasks).await?;
        let found: HashSet<TaskKey> = active.into_iter().chain(doomed).collect();
        let new: Vec<TaskKey> = found
            .iter()
            .filter(|k| !locked.contains_key(k))
            .copied()
            .collect();
        if new.is_empty() {
            // A child that was started while this waited for its parent is no longer meant.
            locked.retain(|k, _| found.contains(k));
            return Ok(Some(locked));
        }
        for state in store::tasks::lock(conn, &new).await? {
            locked.insert(state.key, state);
        }
    }
}

/// Those that go on to their end: each is waited for by a parent that lives, and that goes on too.
fn spared(
    root: TaskKey,
    locked: &BTreeMap<TaskKey, TaskState>,
    awaited: &HashMap<TaskKey, TaskKey>,
) -> HashSet<TaskKey> {
    let mut spared = HashSet::new();
    loop {
        let more: Vec<TaskKey> = awaited
            .iter()
            .filter(|(child, parent)| {
                !spared.contains(*child)
                    && (**child == root || !locked.contains_key(parent) || spared.contains(*parent))
            })
            .map(|(child, _)| *child)
            .collect();
        if more.is_empty() {
            return spared;
        }
        spared.extend(more);
    }
}
