//! Stops a task, alone or with everything beneath it (T-30 to T-33).
//!
//! The tree is locked, parents first, and looked at again until nobody new has appeared: a child can only be made under
//! its parent's lock, so a spawn either came before and is stopped, or finds its parent stopped and is refused. Waits
//! are cancelled before tasks end, so no stop wakes a parent inside the tree; a parent outside gets its signal.

use super::{advance::Turns, announce, complete_awaits::cancel_awaits, finish};
use crate::{
    domain::{
        ids::{TaskId, WorkspaceId},
        step::StepKey,
        task::{Failure, TaskKey, TaskState, TaskStatus},
        task_await::AwaitStatus,
    },
    runtime::Hub,
    store::{
        self,
        awaits::Settlement,
        changes::{Changes, TaskChange},
    },
};
use sqlx::{PgConnection, PgPool};
use std::collections::{BTreeMap, HashSet};

/// What a stop did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopReceipt {
    /// Of the named task, after the stop.
    pub status: TaskStatus,
    /// Tasks that this call stopped.
    pub stopped: u32,
    /// Tasks of the stopped set that are still active: 0, counted after the fact.
    pub left_alive: u32,
}

/// Stops the task and, with `subtasks`, every active descendant. Again on a stopped tree it changes nothing. `None`
/// when there is no such task.
pub async fn stop(
    pool: &PgPool,
    hub: &Hub,
    workspace: WorkspaceId,
    task: TaskId,
    subtasks: bool,
) -> Result<Option<StopReceipt>, store::Error> {
    stop_for(pool, hub, workspace, task, subtasks, None).await
}

/// As [`stop`], for a reason that the tasks' callers are told.
pub(super) async fn stop_for(
    pool: &PgPool,
    hub: &Hub,
    workspace: WorkspaceId,
    task: TaskId,
    subtasks: bool,
    why: Option<&Failure>,
) -> Result<Option<StopReceipt>, store::Error> {
    let root = TaskKey { workspace, task };
    let result = store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let Some(locked) = lock_tree(&mut tx, root, subtasks).await? else {
            return Ok(None);
        };
        let changes = halt(&mut tx, locked.into_values(), why).await?;
        let left_alive = store::tasks::stoppable(&mut tx, root, subtasks)
            .await?
            .map_or(0, |t| t.len());
        let status = store::tasks::statuses(&mut tx, &[root]).await?;
        tx.commit().await?;
        let receipt = StopReceipt {
            status: status.first().map_or(TaskStatus::Stopped, |s| s.1),
            stopped: changes.tasks.len() as u32,
            left_alive: left_alive as u32,
        };
        Ok(Some((receipt, changes)))
    })?;
    Ok(result.map(|(receipt, changes)| {
        announce_stop(hub, &changes);
        receipt
    }))
}

/// Ends those of these locked tasks that are active, after their waits. Of a turn that is under way, what has a result keeps
/// it. Written, and returned for the announcement.
pub(super) async fn halt(
    conn: &mut PgConnection,
    locked: impl IntoIterator<Item = TaskState>,
    why: Option<&Failure>,
) -> Result<Changes, store::Error> {
    let active: Vec<TaskState> = locked
        .into_iter()
        .filter(|t| !t.status.is_terminal())
        .collect();
    let keys: Vec<TaskKey> = active.iter().map(|t| t.key).collect();
    let waits = store::awaits::pending_of_tasks(conn, &keys, None).await?;
    let waits: Vec<Settlement> = waits
        .into_iter()
        .map(|(_, a)| a.settled(AwaitStatus::Cancelled))
        .collect();
    cancel_awaits(conn, &waits).await?;
    let under_way = active.iter().map(|t| StepKey::of(t.key, t.turn, 0));
    let turns = Turns::load(conn, under_way).await?;
    store::steps::cancel_of_tasks(conn, &keys).await?;
    let mut changes = Changes::default();
    for state in active {
        let mut task = TaskChange::of(state);
        task.state.stop_generation += 1;
        turns.break_off(&mut changes, &mut task)?;
        finish::end(&mut changes, &mut task, finish::End::Stopped(why.cloned()))?;
        changes.tasks.push(task);
    }
    store::changes::apply(conn, &changes).await?;
    Ok(changes)
}

/// Tells everybody, and the workers that hold steps of the stopped tasks; called after the commit.
pub(super) fn announce_stop(hub: &Hub, changes: &Changes) {
    hub.tasks_stopped(changes.tasks.iter().map(|t| t.state.key.task));
    announce(hub, changes);
}

async fn lock_tree(
    conn: &mut PgConnection,
    root: TaskKey,
    subtasks: bool,
) -> Result<Option<BTreeMap<TaskKey, TaskState>>, store::Error> {
    let mut locked: BTreeMap<TaskKey, TaskState> = BTreeMap::new();
    loop {
        let Some(found) = store::tasks::stoppable(conn, root, subtasks).await? else {
            return Ok(None);
        };
        let found: HashSet<TaskKey> = found.into_iter().collect();
        let new: Vec<TaskKey> = found
            .iter()
            .filter(|k| !locked.contains_key(k))
            .copied()
            .collect();
        if new.is_empty() {
            // A child that was started while this waited for its parent is no longer meant (T-30).
            locked.retain(|k, _| found.contains(k));
            return Ok(Some(locked));
        }
        for state in store::tasks::lock(conn, &new).await? {
            locked.insert(state.key, state);
        }
    }
}
