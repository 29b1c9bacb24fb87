//! Pairs pending signals with the awaits that wait for them (W-3).

use super::{
    complete_awaits::complete_awaits_of_signals,
    desk::Desk,
    dispatch::{Dispatcher, Handled},
};
use crate::{
    domain::{signal::pair, task_await::AwaitStatus},
    runtime::{Causes, Hub, Progress, Work},
    store::{self, awaits::Settlement},
};
use sqlx::PgPool;

/// Tasks that a round wakes in its own transaction. In a burst the event loop does it, beside the next round.
const AT_ONCE_MAX: usize = 16;

/// Matches at most `batch` pending signals in one transaction. Safe in any number of processes, twice, after a crash.
pub async fn match_signals(pool: &PgPool, hub: &Hub, batch: u32) -> Result<Progress, store::Error> {
    run(pool, hub, batch, None).await
}

/// As [`match_signals`], and wakes the tasks whose last wait that was at once, which saves a parent the way through the
/// queue of events. Where that can not be done, the event stays and the event loop does it.
pub async fn match_signals_and_resume(
    pool: &PgPool,
    hub: &Hub,
    batch: u32,
    dispatcher: &Dispatcher,
    desk: Option<&Desk>,
) -> Result<Progress, store::Error> {
    match run(pool, hub, batch, Some((dispatcher, desk))).await {
        Err(error) if !error.is_unavailable() => {
            tracing::debug!(error = %Causes(&error), "signals are matched without waking anybody at once");
            match_signals(pool, hub, batch).await
        }
        result => result,
    }
}

async fn run(
    pool: &PgPool,
    hub: &Hub,
    batch: u32,
    dispatcher: Option<(&Dispatcher, Option<&Desk>)>,
) -> Result<Progress, store::Error> {
    let (signals, events, handled) = store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let (signals, awaits) =
            store::signals::lock_pending_with_awaits_all_workspaces(&mut tx, batch).await?;
        if signals.is_empty() {
            return Ok((0, 0, Handled::default()));
        }
        let things: Vec<_> = signals
            .iter()
            .map(|s| (s.workspace, s.source_type, s.correlation_key.as_str()))
            .collect();
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
        let events = complete_awaits_of_signals(&mut tx, &settlements, &verdicts)
            .await?
            .events;
        let handled = match dispatcher {
            Some((dispatcher, desk)) if (1..=AT_ONCE_MAX).contains(&events.len()) => {
                match dispatcher.handle_own(&mut tx, &events, desk).await {
                    Ok(handled) => handled,
                    Err(error) => {
                        // Here and now: who tries again at once would find the signals locked.
                        tx.rollback().await?;
                        return Err(error);
                    }
                }
            }
            Some(_) | None => Handled::default(),
        };
        tx.commit().await?;
        Ok((signals.len(), events.len(), handled))
    })?;
    if events > handled.changes.done_events.len() {
        hub.wake(Work::Events);
    }
    handled.announce(hub, dispatcher.and_then(|(_, desk)| desk));
    Ok(Progress::of(signals, batch))
}
