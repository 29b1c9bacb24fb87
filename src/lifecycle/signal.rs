//! Facts from outside (W-13). A signal that somebody waits for completes that wait at once; one that comes early is kept
//! for `signals.early_ttl_seconds` and matched when its wait is registered.
//!
//! Both sides look for the other after they have committed, so whichever comes second sees the first. What a crash
//! leaves between the two is found by the orchestrator, which looks again (`match_early`).

use super::complete_awaits::complete_awaits;
use crate::{
    domain::task_await::AwaitStatus,
    runtime::{Hub, Progress, Work},
    store::{
        self,
        awaits::Settlement,
        signals::{NewExternal, Received},
    },
};
use serde_json::Value;
use sqlx::PgPool;

/// Signals that one call looks at beside its own.
const BATCH: u32 = 100;

/// Stores the signal and completes the wait for it, if there is one. A second one with the same `dedup_key` changes
/// nothing and gets the first one's state.
pub async fn signal(
    pool: &PgPool,
    hub: &Hub,
    signal: &NewExternal,
) -> Result<Received, store::Error> {
    let is_new = {
        let mut conn = pool.acquire().await?;
        store::signals::insert_external(&mut conn, signal).await?
    };
    if is_new {
        match_early(pool, hub, BATCH).await?;
    }
    let mut conn = pool.acquire().await?;
    let status = store::signals::external_status(&mut conn, signal).await?;
    Ok(Received { is_new, status })
}

/// Completes the one wait that a callback token is for; `None` when no wait has this token. Which workspace it is comes
/// from the token alone. A callback is never kept for later: its wait exists, or is over.
pub async fn call_back(
    pool: &PgPool,
    hub: &Hub,
    token_hash: [u8; 32],
    payload: Option<Value>,
) -> Result<Option<Received>, store::Error> {
    let received = store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let Some(awaited) = store::awaits::by_callback_all_workspaces(&mut tx, &token_hash).await?
        else {
            return Ok(None);
        };
        let settlement = Settlement {
            payload: payload.clone(),
            ..awaited.settled(AwaitStatus::Completed)
        };
        let settled = complete_awaits(&mut tx, &[settlement]).await?;
        let signal = NewExternal {
            workspace: awaited.workspace,
            dedup_key: format!("callback:{}", awaited.group),
            correlation_key: awaited.correlation_key,
            payload: payload.clone(),
        };
        let matched = !settled.awaits.is_empty();
        let is_new = store::signals::insert_settled(&mut tx, &signal, matched).await?;
        let status = store::signals::external_status(&mut tx, &signal).await?;
        tx.commit().await?;
        Ok(Some(Received { is_new, status }))
    })?;
    if received.is_some() {
        hub.wake(Work::Events);
    }
    Ok(received)
}

/// Matches at most `batch` external signals with waits that have been registered for them, in one transaction.
pub async fn match_early(pool: &PgPool, hub: &Hub, batch: u32) -> Result<Progress, store::Error> {
    let matched = store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let found = store::signals::lock_external_with_await_all_workspaces(&mut tx, batch).await?;
        if found.is_empty() {
            return Ok(0);
        }
        let settlements: Vec<Settlement> = found
            .iter()
            .map(|(_, a, payload)| Settlement {
                payload: payload.clone(),
                ..a.settled(AwaitStatus::Completed)
            })
            .collect();
        let settled = complete_awaits(&mut tx, &settlements).await?;
        // A signal whose await somebody else has settled meanwhile stays for the next wait of that name.
        let verdicts: Vec<_> = found
            .iter()
            .filter(|(_, a, _)| settled.awaits.iter().any(|s| s.group == a.group))
            .map(|(signal, ..)| (signal, true))
            .collect();
        store::signals::settle(&mut tx, &verdicts).await?;
        tx.commit().await?;
        Ok(verdicts.len())
    })?;
    if matched == 0 {
        return Ok(Progress::Idle);
    }
    hub.wake(Work::Events);
    Ok(Progress::of(matched, batch))
}

/// Gives up at most `batch` early signals that nobody has waited for in `ttl_secs` seconds.
pub async fn forget_early(
    pool: &PgPool,
    ttl_secs: u32,
    batch: u32,
) -> Result<Progress, store::Error> {
    let mut conn = pool.acquire().await?;
    let given_up = store::signals::give_up_early_all_workspaces(&mut conn, ttl_secs, batch).await?;
    Ok(Progress::of(given_up as usize, batch))
}
