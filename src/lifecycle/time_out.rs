//! Looks at awaits whose time has come. For a child the time is no deadline: the only question is whether the child is
//! still alive (W-10, D-41). Other waits expire (W-11).

use super::complete_awaits::complete_awaits;
use crate::{
    domain::{
        task::TaskStatus,
        task_await::{AwaitStatus, SourceType},
    },
    runtime::{Hub, Progress, Work},
    store,
};
use sqlx::PgPool;

/// What to do with an await that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Ask again in one window.
    Postpone,
    Settle(AwaitStatus),
}

fn judge(source: SourceType, child: Option<TaskStatus>) -> Verdict {
    match (source, child) {
        // It runs, or waits for its own user: it is alive.
        (SourceType::ChildTask, Some(status)) if !status.is_terminal() => Verdict::Postpone,
        // Its signal was lost.
        (SourceType::ChildTask, Some(_)) => Verdict::Settle(AwaitStatus::Completed),
        (SourceType::ChildTask, None) => Verdict::Settle(AwaitStatus::StartFailed),
        (SourceType::Timer, _) => Verdict::Settle(AwaitStatus::Completed),
        (SourceType::UserInput | SourceType::External, _) => Verdict::Settle(AwaitStatus::TimedOut),
    }
}

/// Handles at most `batch` due awaits. A read error changes nothing.
pub async fn time_out(pool: &PgPool, hub: &Hub, batch: u32) -> Result<Progress, store::Error> {
    let (due, closed) = store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let due = store::awaits::due_all_workspaces(&mut tx, batch).await?;
        let mut alive = Vec::new();
        let mut settlements = Vec::new();
        for d in &due {
            match judge(d.pending.source_type, d.child) {
                Verdict::Postpone => alive.push(d.pending.clone()),
                Verdict::Settle(to) => settlements.push(d.pending.settled(to)),
            }
        }
        let closed = complete_awaits(&mut tx, &settlements).await?.closed;
        if !alive.is_empty() {
            store::awaits::postpone(&mut tx, &alive).await?;
        }
        tx.commit().await?;
        Ok((due.len(), closed.len()))
    })?;
    if closed > 0 {
        hub.wake(Work::Events);
    }
    Ok(Progress::of(due, batch))
}

#[cfg(test)]
mod tests {
    use super::*;

    // W-10, W-11, D-41
    #[test]
    fn a_due_await_is_judged_by_what_it_waits_for() {
        use {AwaitStatus as A, SourceType::*, TaskStatus::*};
        for (source, child, verdict) in [
            (ChildTask, Some(Pending), Verdict::Postpone),
            (ChildTask, Some(Running), Verdict::Postpone),
            (ChildTask, Some(WaitingForInput), Verdict::Postpone),
            (ChildTask, Some(Completed), Verdict::Settle(A::Completed)),
            (ChildTask, Some(Failed), Verdict::Settle(A::Completed)),
            (ChildTask, Some(Stopped), Verdict::Settle(A::Completed)),
            (ChildTask, None, Verdict::Settle(A::StartFailed)),
            (UserInput, None, Verdict::Settle(A::TimedOut)),
            (External, None, Verdict::Settle(A::TimedOut)),
            (Timer, None, Verdict::Settle(A::Completed)),
        ] {
            assert_eq!(judge(source, child), verdict, "{source:?} {child:?}");
        }
    }
}
