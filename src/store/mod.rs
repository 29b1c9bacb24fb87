//! All SQL. Rows go in and out as domain types; no rule is decided here, every write carries its guard.

use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the database refused or failed")]
    Db(#[from] sqlx::Error),
    /// A row that no version of this service writes.
    #[error("unexpected data in {table}: {reason}")]
    Corrupt { table: &'static str, reason: String },
}

impl Error {
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
            Self::Db(_) | Self::Corrupt { .. } => false,
        }
    }

    /// Deadlock or serialization failure: nothing was written, the same transaction may be tried again (W-8).
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Db(sqlx::Error::Database(e)) if e.code().is_some_and(|c| c == "40P01" || c == "40001"))
    }

    /// The constraint that refused the write, if one did.
    pub fn constraint(&self) -> Option<&str> {
        match self {
            Self::Db(sqlx::Error::Database(e)) => e.constraint(),
            Self::Db(_) | Self::Corrupt { .. } => None,
        }
    }
}

/// How often a transaction that met a deadlock is tried.
const CONFLICT_TRIES: u32 = 5;

/// Runs `transaction` again while it meets deadlocks or serialization failures, so that no user sees one (W-8).
pub async fn retry_conflicts<T>(
    transaction: impl AsyncFn() -> Result<T, Error>,
) -> Result<T, Error> {
    let mut tries = 1;
    loop {
        match transaction().await {
            Err(error) if error.is_conflict() && tries < CONFLICT_TRIES => {
                tries += 1;
                tokio::time::sleep(Duration::from_millis(fastrand::u64(1..20))).await;
            }
            result => return result,
        }
    }
}
