//! The use cases that change a task: one verb per file, one transaction each.
//!
//! **Locking order**, kept by every transaction (W-8): tasks, budgets, await groups, awaits, then signals and events; within a
//! table by key, so that a parent, which is older, comes before its children. A step is locked after its task. Queue
//! rows (queued steps, events, pending signals) are taken with `skip locked` and so are never waited for. Locks are
//! `for no key update`, since an insert that references a row takes a key-share lock on it. A statement that
//! may wait for a lock reads nothing else that changes: other rows would be seen as they were before the wait. Tasks that
//! are locked after groups (`match_signals`) are taken with `skip locked` too. Every write repeats its guard even under a
//! lock. A deadlock or a lost race rolls back and is tried again.

mod advance;
pub mod agents;
pub mod api_keys;
pub mod backfill;
pub mod budget;
pub mod checkpoint;
pub mod claim;
pub mod complete_awaits;
pub mod configured_tools;
pub mod credentials;
pub mod delegate;
pub mod delete;
pub mod demo;
pub mod desk;
pub mod dispatch;
mod finish;
pub mod forget;
pub mod log_in;
pub mod match_signals;
pub mod members;
pub mod model_providers;
pub mod passwords;
pub mod reencrypt;
pub mod requeue;
mod resume;
pub mod revive;
pub mod set_flag;
pub mod signal;
pub mod skip;
pub mod stop;
pub mod submit;
pub mod time_out;
pub mod wait;

use crate::{
    domain::{
        ids::ItemId,
        step::{Claim, StepStatus},
        task::{TaskKey, TaskState, TaskStatus},
    },
    runtime::{Causes, Hub, Work},
    store::{
        self,
        changes::{Changes, EventKind, ItemKind, NewEvent, NewItem, TaskChange},
    },
};
use futures::future::BoxFuture;
use serde_json::Value;
use sqlx::PgConnection;
use std::sync::Arc;

impl TaskChange {
    fn of(state: TaskState) -> Self {
        Self {
            was_seq: state.last_seq,
            state,
        }
    }

    /// Adds an item at the end of the feed and returns its `seq`.
    fn add_item(&mut self, changes: &mut Changes, item: Draft) -> i64 {
        let seq = self.state.take_seq();
        changes.items.push(NewItem {
            task: self.state.key,
            seq,
            id: item.id.unwrap_or_else(ItemId::new),
            kind: item.kind,
            turn: item.turn,
            seen_seq: item.seen_seq,
            text: item.text,
            data: item.data,
        });
        seq
    }
}

/// An item before it has its place.
struct Draft {
    kind: ItemKind,
    id: Option<ItemId>,
    turn: Option<i32>,
    seen_seq: Option<i64>,
    text: Option<String>,
    data: Option<Value>,
}

impl Draft {
    fn new(kind: ItemKind) -> Self {
        Self {
            kind,
            id: None,
            turn: None,
            seen_seq: None,
            text: None,
            data: None,
        }
    }

    fn text(self, text: impl Into<String>) -> Self {
        Self {
            text: Some(text.into()),
            ..self
        }
    }

    fn data(self, data: Value) -> Self {
        Self {
            data: Some(data),
            ..self
        }
    }

    fn status(status: TaskStatus) -> Self {
        Self::new(ItemKind::Status).data(serde_json::json!({"status": status}))
    }
}

fn event(task: TaskKey, kind: EventKind) -> NewEvent {
    NewEvent { task, kind }
}

/// Locks the task and the step of a claim. `None` when the claim no longer holds: the lease was lost, or the task was
/// stopped. Nothing is wrong then; the work is dropped.
async fn lock_claimed(
    conn: &mut PgConnection,
    claim: &Claim,
) -> Result<Option<TaskChange>, store::Error> {
    let locked = store::tasks::lock(conn, &[claim.key.task_key()]).await?;
    let Some(state) = locked.into_iter().next() else {
        return Ok(None);
    };
    let step = store::steps::lock(conn, &[claim.key]).await?.pop();
    let held = step.is_some_and(|s| s.status == StepStatus::Running && s.attempt == claim.attempt);
    Ok((held && is_live(&state, claim)).then(|| TaskChange::of(state)))
}

/// Whether the task still is what the claim was made for. A deleted task goes on to its end (T-34).
fn is_live(state: &TaskState, claim: &Claim) -> bool {
    state.status == TaskStatus::Running && state.stop_generation == claim.stop_generation
}

/// Writes all `items` together; if the database refuses that, each by itself, so that one bad item harms no other. The
/// answers are in the order of the items.
async fn together_or_each<'a, T: Sync, R>(
    items: &'a [T],
    write: impl Fn(&'a [T]) -> BoxFuture<'a, Result<Vec<R>, store::Error>> + Send + Sync,
) -> Vec<Result<R, Arc<store::Error>>> {
    match write(items).await {
        Ok(done) => done.into_iter().map(Ok).collect(),
        Err(error) if items.len() == 1 || error.is_unavailable() => {
            let error = Arc::new(error);
            items.iter().map(|_| Err(error.clone())).collect()
        }
        Err(error) => {
            tracing::warn!(error = %Causes(&error), "a batch of {} was refused, writing one by one", items.len());
            let mut results = Vec::with_capacity(items.len());
            for one in items.chunks(1) {
                let one = write(one).await;
                results.push(one.map(|mut done| done.remove(0)).map_err(Arc::new));
            }
            results
        }
    }
}

/// Hints everybody whom `changes` concern; called after the commit.
fn announce(hub: &Hub, changes: &Changes) {
    if !changes.events.is_empty() {
        hub.wake(Work::Events);
    }
    if !changes.signals.is_empty() {
        hub.wake(Work::Signals);
    }
    if changes.new_steps.iter().any(|s| s.held_by.is_none()) {
        hub.wake(Work::Steps);
    }
    hub.feeds_changed(changes.tasks.iter().map(|t| t.state.key.task));
}
