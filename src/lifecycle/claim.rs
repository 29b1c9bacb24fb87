//! Taking steps from the queue and keeping them.

use crate::{
    domain::{
        ids::ProcessId,
        step::{Claim, StepKey},
    },
    store::{self, steps::Claimed},
};
use sqlx::PgPool;

/// Claims at most `limit` steps for `worker` with a lease of `lease_secs` seconds. One statement: there is nothing to
/// roll back, and a crash right after it is a lease that runs out.
pub async fn claim(
    pool: &PgPool,
    worker: ProcessId,
    lease_secs: u32,
    limit: u32,
) -> Result<Vec<Claimed>, store::Error> {
    let mut conn = pool.acquire().await?;
    store::steps::claim_all_workspaces(&mut conn, worker, lease_secs, limit).await
}

/// Claims the first queued call of the turn that `step` belongs to.
pub async fn claim_of_turn(
    pool: &PgPool,
    step: StepKey,
    worker: ProcessId,
    lease_secs: u32,
) -> Result<Option<Claim>, store::Error> {
    let mut conn = pool.acquire().await?;
    store::steps::claim_of_turn(&mut conn, step, worker, lease_secs).await
}

/// Extends the leases that are still held.
pub async fn renew(pool: &PgPool, claims: &[Claim], lease_secs: u32) -> Result<(), store::Error> {
    let mut conn = pool.acquire().await?;
    store::steps::renew(&mut conn, claims, lease_secs).await
}
