//! Pairs pending signals with the awaits that wait for them (W-3).

use super::complete_awaits::complete_awaits;
use crate::{
    domain::{signal::pair, task_await::AwaitStatus},
    runtime::{Hub, Progress, Work},
    store::{self, awaits::Settlement},
};
use sqlx::PgPool;

/// Matches at most `batch` pending signals in one transaction. Safe in any number of processes, twice, after a crash.
pub async fn match_signals(pool: &PgPool, hub: &Hub, batch: u32) -> Result<Progress, store::Error> {
    let (signals, closed) = store::retry_conflicts!(async {
        let mut tx = pool.begin().await?;
        let signals = store::signals::lock_pending_all_workspaces(&mut tx, batch).await?;
        if signals.is_empty() {
            return Ok((0, 0));
        }
        let things: Vec<_> = signals
            .iter()
            .map(|s| (s.workspace, s.source_type, s.correlation_key.as_str()))
            .collect();
        let awaits = store::awaits::pending_for(&mut tx, &things).await?;
        let found = pair(
            &things,
            awaits
                .iter()
                .map(|a| (a.workspace, a.source_type, a.correlation_key.as_str())),
        );
        // A signal whose await somebody else settles meanwhile counts as matched: it was waited for.
        let verdicts: Vec<_> = signals
            .iter()
            .zip(found.iter().map(Option::is_some))
            .collect();
        let settlements: Vec<Settlement> = found
            .into_iter()
            .filter_map(|at| awaits.get(at?))
            .map(|a| a.settled(AwaitStatus::Completed))
            .collect();
        let closed = complete_awaits(&mut tx, &settlements).await?.closed;
        store::signals::settle(&mut tx, &verdicts).await?;
        tx.commit().await?;
        Ok((signals.len(), closed.len()))
    })?;
    if closed > 0 {
        hub.wake(Work::Events);
    }
    Ok(match signals {
        0 => Progress::Idle,
        n => Progress::Did(n),
    })
}
