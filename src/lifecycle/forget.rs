//! Removes what has outlived its use.

use crate::{runtime::Progress, store};
use sqlx::PgConnection;

/// Backfills after 30 days, sessions that have run out, idempotency keys after 24 hours, streamed text after a minute, processes that have been silent for an hour.
pub async fn forget_old(conn: &mut PgConnection) -> Result<(), store::Error> {
    store::backfills::forget_old_all_workspaces(conn).await?;
    store::sessions::forget_old_all_workspaces(conn).await?;
    store::idempotency::forget_old_all_workspaces(conn).await?;
    store::bus::forget_old_all_workspaces(conn).await
}

/// Prompts are known as stored for up to a day before they are said to be in use again (`checkpoint`).
const PROMPT_DAYS_MORE: u32 = 2;

/// At most `batch` decision logs that are older than `days`, and as many prompts that none of the kept ones names.
pub async fn forget_decisions(
    conn: &mut PgConnection,
    days: u32,
    batch: u32,
) -> Result<Progress, store::Error> {
    let limit = i64::from(batch);
    let logs = store::decision_logs::forget_old_all_workspaces(conn, days as i32, limit).await?;
    let unused_days = (days + PROMPT_DAYS_MORE) as i32;
    let prompts = store::prompts::forget_unused_all_workspaces(conn, unused_days, limit).await?;
    Ok(Progress::of(logs.max(prompts) as usize, batch))
}
