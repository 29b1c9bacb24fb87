//! Removes what has outlived its use.

use crate::store;
use sqlx::PgConnection;

/// Backfills after 30 days, sessions that have run out, idempotency keys after 24 hours, streamed text after a minute, processes that have been silent for an hour.
pub async fn forget_old(conn: &mut PgConnection) -> Result<(), store::Error> {
    store::backfills::forget_old_all_workspaces(conn).await?;
    store::sessions::forget_old_all_workspaces(conn).await?;
    store::idempotency::forget_old_all_workspaces(conn).await?;
    store::bus::forget_old_all_workspaces(conn).await
}
