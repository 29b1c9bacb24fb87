//! Gives a dead event another run of attempts (W-19).

use crate::{
    runtime::{Hub, Work},
    store,
};
use sqlx::PgPool;

/// Puts the event back into the inbox. `false` when there is no dead event with this id; again it changes nothing.
pub async fn revive(pool: &PgPool, hub: &Hub, event: i64) -> Result<bool, store::Error> {
    let mut conn = pool.acquire().await?;
    let revived = store::events::revive_all_workspaces(&mut conn, event).await?;
    if revived {
        hub.wake(Work::Events);
    }
    Ok(revived)
}
