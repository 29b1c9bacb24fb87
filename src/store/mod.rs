//! All SQL. Rows go in and out as domain types; no rule is decided here, every write carries its guard.
//!
//! Statements that find rows by their keys guard them by their times (`settled_at is null`, `lease_expires_at is not
//! null`), which the tables' constraints tie to the status. A condition on the status itself would admit the partial index
//! of a queue, and a planner whose statistics are from a time when the queue was short reads all of it for each batch.

pub mod agents;
pub mod api_keys;
pub mod awaits;
pub mod backfills;
pub mod budgets;
pub mod bus;
pub mod changes;
pub mod configured_tools;
pub mod credentials;
pub mod decision_logs;
pub mod events;
pub mod feeds;
pub mod flags;
pub mod health;
pub mod idempotency;
pub mod inbox;
pub mod items;
pub mod members;
pub mod model_providers;
pub mod prompts;
pub mod queues;
pub mod sealed;
pub mod sessions;
pub mod signals;
pub mod steps;
pub mod task_trees;
pub mod task_views;
pub mod tasks;
pub mod usage;
pub mod why;
pub mod workspaces;

use sqlx::{PgPool, Postgres, Transaction};
use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};
use tokio::runtime::Handle;

/// One column of a batch, as `unnest` wants it.
fn column<T, R>(rows: impl IntoIterator<Item = T>, value: impl FnMut(T) -> R) -> Vec<R> {
    rows.into_iter().map(value).collect()
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the database refused or failed")]
    Db(#[from] sqlx::Error),
    /// A guarded write met a row that is not as the decision saw it. Roll back and decide anew.
    #[error("a row has changed since it was read")]
    Raced,
    /// The decision asked for a move that the task can not make: a bug, and nothing was written.
    #[error(transparent)]
    Illegal(#[from] crate::domain::task::IllegalTransition),
    /// A row that no version of this service writes.
    #[error("unexpected data in {table}: {reason}")]
    Corrupt { table: &'static str, reason: String },
}

impl Error {
    /// The task that writes for many callers has died: nothing is known of what was handed to it.
    pub fn writer_lost() -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self::Db(sqlx::Error::WorkerCrashed))
    }

    /// The database can not be reached now: the caller may try again later.
    pub fn is_unavailable(&self) -> bool {
        match self {
            Self::Db(sqlx::Error::Database(e)) => {
                // connection exceptions, too many connections, shutting down, starting up
                e.code()
                    .is_some_and(|c| c.starts_with("08") || c.starts_with("57P") || c == "53300")
            }
            Self::Db(
                sqlx::Error::Io(_)
                | sqlx::Error::PoolTimedOut
                | sqlx::Error::PoolClosed
                | sqlx::Error::WorkerCrashed
                | sqlx::Error::Protocol(_),
            ) => true,
            Self::Db(_) | Self::Raced | Self::Illegal(_) | Self::Corrupt { .. } => false,
        }
    }

    /// Deadlock, serialization failure or lost race: nothing was written, the same transaction may be tried again (W-8).
    pub fn is_conflict(&self) -> bool {
        match self {
            Self::Db(sqlx::Error::Database(e)) => {
                e.code().is_some_and(|c| c == "40P01" || c == "40001")
            }
            Self::Raced => true,
            Self::Db(_) | Self::Illegal(_) | Self::Corrupt { .. } => false,
        }
    }

    /// The constraint that refused the write, if one did.
    pub fn constraint(&self) -> Option<&str> {
        match self {
            Self::Db(sqlx::Error::Database(e)) => e.constraint(),
            Self::Db(_) | Self::Raced | Self::Illegal(_) | Self::Corrupt { .. } => None,
        }
    }
}

/// Begins a transaction, which is rolled back if it is dropped.
///
/// Not [`PgPool::begin`]: when that one is dropped while its BEGIN is under way, the pool gets back a connection with a
/// transaction open that nobody knows of, and what is written on it next without one of its own is not committed. Here the
/// beginning goes on by itself, and is undone.
pub async fn begin(pool: &PgPool) -> Result<Transaction<'static, Postgres>, Error> {
    let pool = pool.clone();
    #[expect(clippy::disallowed_methods, reason = "this is the one place")]
    let begun = async move { pool.begin().await };
    Ok(Unbroken(Some(Box::pin(begun))).await?)
}

/// A future that goes on without its caller when it is dropped before its end.
struct Unbroken<F: Future<Output: Send> + Send + 'static>(Option<Pin<Box<F>>>);

impl<F: Future<Output: Send> + Send + 'static> Future for Unbroken<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Some(future) = &mut self.0 else {
            return Poll::Pending;
        };
        let polled = future.as_mut().poll(context);
        if polled.is_ready() {
            self.0 = None;
        }
        polled
    }
}

impl<F: Future<Output: Send> + Send + 'static> Drop for Unbroken<F> {
    fn drop(&mut self) {
        if let (Some(future), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(future);
        }
    }
}

/// The state of a task from a row that has its columns.
macro_rules! task_state {
    ($row:ident) => {
        $crate::domain::task::TaskState {
            key: $crate::domain::task::TaskKey {
                workspace: $row.workspace_id,
                task: $row.id,
            },
            status: $row.status,
            deleted: $row.deleted,
            is_child: $row.is_child,
            stop_generation: $row.stop_generation,
            priority: $row.priority,
            last_seq: $row.last_seq,
            news_seq: $row.news_seq,
            seen_seq: $row.seen_seq,
            turn: $row.turn,
            decides_left: $row.decides_left,
            output: None,
            failure: None,
        }
    };
}
use task_state;

/// How a task runs, from a row that has its columns.
macro_rules! task_setup {
    ($row:ident) => {
        $crate::store::tasks::Setup {
            agent: $crate::domain::task::AgentRef {
                workspace: $row.agent_workspace_id,
                agent: $row.agent_id,
                version: $row.agent_version,
            },
            root: $row.root_task_id,
            depth: i32::from($row.spawn_depth),
            delegation_disabled: $row.delegation_disabled,
            own_models: $row.own_models,
            budgeted: $row.budgeted,
        }
    };
}
use task_setup;

/// How often a transaction that met a conflict is tried.
pub const CONFLICT_TRIES: u32 = 5;

/// A short random pause, so that two transactions that met do not meet again.
pub async fn pause_after_conflict() {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(1..20))).await;
}

/// Evaluates a transaction, given as an `async` block, again while it meets deadlocks, serialization failures or lost
/// races, so that no user sees one (W-8).
macro_rules! retry_conflicts {
    ($transaction:expr) => {{
        let mut tries = 1;
        loop {
            let result: Result<_, $crate::store::Error> = $transaction.await;
            match result {
                Err(error) if error.is_conflict() && tries < $crate::store::CONFLICT_TRIES => {
                    tries += 1;
                    $crate::store::pause_after_conflict().await;
                }
                result => break result,
            }
        }
    }};
}
pub(crate) use retry_conflicts;
