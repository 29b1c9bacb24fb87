//! Pairs pending signals with the awaits that wait for them (W-3).

use super::complete_awaits::complete_awaits;
use crate::{
    domain::task_await::AwaitStatus,
    runtime::{Hub, Progress, Work},
    store::{
        self,
        awaits::{PendingAwait, Settlement},
        signals::Signal,
    },
};
use sqlx::PgPool;
use std::collections::HashMap;

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
        let (settlements, verdicts) = pair(&signals, &awaits);
        let closed = complete_awaits(&mut tx, &settlements).await?;
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

/// Which awaits the signals complete, and for each signal whether it found one. A signal whose await is settled by
/// somebody else meanwhile counts as matched: it was waited for.
fn pair<'a>(
    signals: &'a [Signal],
    awaits: &[PendingAwait],
) -> (Vec<Settlement>, Vec<(&'a Signal, bool)>) {
    let by_thing: HashMap<_, &PendingAwait> = awaits
        .iter()
        .map(|a| ((a.workspace, a.source_type, a.correlation_key.as_str()), a))
        .collect();
    let mut settlements = Vec::new();
    let mut verdicts = Vec::new();
    for signal in signals {
        let found = by_thing.get(&(
            signal.workspace,
            signal.source_type,
            signal.correlation_key.as_str(),
        ));
        verdicts.push((signal, found.is_some()));
        settlements.extend(found.map(|a| Settlement {
            workspace: a.workspace,
            group: a.group,
            ordinal: a.ordinal,
            to: AwaitStatus::Completed,
        }));
    }
    (settlements, verdicts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        ids::{GroupId, WorkspaceId},
        task_await::SourceType,
    };

    // W-7, D-31
    #[test]
    fn a_signal_finds_the_await_of_its_own_workspace_source_and_key_only() {
        let (a, b) = (WorkspaceId::new(), WorkspaceId::new());
        let signal = |workspace, source_type, key: &str| Signal {
            workspace,
            source_type,
            dedup_key: key.into(),
            correlation_key: key.into(),
        };
        let waiting = PendingAwait {
            workspace: a,
            group: GroupId::new(),
            ordinal: 4,
            source_type: SourceType::ChildTask,
            correlation_key: "k".into(),
        };
        let signals = [
            signal(b, SourceType::ChildTask, "k"),
            signal(a, SourceType::External, "k"),
            signal(a, SourceType::ChildTask, "other"),
            signal(a, SourceType::ChildTask, "k"),
        ];
        let (settlements, verdicts) = pair(&signals, std::slice::from_ref(&waiting));
        assert_eq!(
            verdicts.iter().map(|v| v.1).collect::<Vec<_>>(),
            [false, false, false, true]
        );
        assert_eq!(
            settlements
                .iter()
                .map(|s| (s.group, s.ordinal))
                .collect::<Vec<_>>(),
            [(waiting.group, 4)]
        );
    }
}
