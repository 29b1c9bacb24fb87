//! Backfills of delegation profiles: begun, held, settled agent by agent, let go.
//!
//! A workspace has at most one that runs; whoever asks for another is given that one. The process that holds it renews
//! a lease; when it dies, another one goes on with the agents that are left. A profile is stored in the transaction that
//! settles its agent, and only under the holder's attempt, so no agent is written twice or reported wrongly. The agent is
//! locked before the job.

use super::agents::{EditError, save_profile_in};
use crate::domain::agent::NewProfile;
use crate::domain::backfill::Settled;
use crate::domain::ids::{AgentId, BackfillId, WorkspaceId};
use crate::runtime::{Hub, Work};
use crate::store::{
    self,
    backfills::{self, Held},
};
use sqlx::PgPool;

/// Begins a backfill, or finds the one that runs.
pub async fn start(
    pool: &PgPool,
    hub: &Hub,
    workspace: WorkspaceId,
    force: bool,
) -> Result<BackfillId, store::Error> {
    let id = store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let id = match backfills::insert_if_none_runs(&mut tx, workspace, force).await? {
            Some(id) => Some(id),
            None => backfills::running(&mut tx, workspace).await?,
        };
        tx.commit().await?;
        // The one that ran has just ended.
        id.ok_or(store::Error::Raced)
    })?;
    hub.wake(Work::Backfills);
    Ok(id)
}

/// Takes a job that nobody works on; the oldest, or only this one.
pub async fn claim(
    pool: &PgPool,
    lease_secs: u32,
    only: Option<BackfillId>,
) -> Result<Option<Held>, store::Error> {
    let mut conn = pool.acquire().await?;
    backfills::claim_all_workspaces(&mut conn, lease_secs, only).await
}

/// `false` when somebody else has the job by now.
pub async fn renew(pool: &PgPool, held: &Held, lease_secs: u32) -> Result<bool, store::Error> {
    let mut conn = pool.acquire().await?;
    backfills::renew_if_held(&mut conn, held, lease_secs).await
}

/// Stores the profile that was written for the agent at `revision`.
pub async fn store_profile(
    pool: &PgPool,
    held: &Held,
    agent: AgentId,
    revision: i64,
    profile: &NewProfile,
) -> Result<(), EditError> {
    let mut tx = store::begin(pool).await?;
    save_profile_in(&mut tx, held.workspace, agent, revision, profile).await?;
    if backfills::settle_if_held(&mut tx, held, agent, &Settled::Generated).await? {
        tx.commit().await?;
    }
    Ok(())
}

/// Settles an agent for which nothing is stored.
pub async fn settle(
    pool: &PgPool,
    held: &Held,
    agent: AgentId,
    settled: &Settled,
) -> Result<(), store::Error> {
    let mut conn = pool.acquire().await?;
    backfills::settle_if_held(&mut conn, held, agent, settled).await?;
    Ok(())
}

/// Ends the job, or leaves it to others if there is something left to do.
pub async fn release(pool: &PgPool, hub: &Hub, held: &Held) -> Result<(), store::Error> {
    let mut conn = pool.acquire().await?;
    backfills::release_if_held(&mut conn, held).await?;
    hub.wake(Work::Backfills);
    Ok(())
}
