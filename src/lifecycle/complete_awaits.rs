//! The one way in which a wait ends: a signal, a timeout, a skip, a user's answer and a stop all settle awaits here.
//!
//! The groups are locked in a statement of their own, then the awaits are settled by compare-and-set, then each group
//! is judged by `domain::task_await`. Two callers that settle the last two awaits of a group take turns at its lock, and
//! the second one sees what the first one did: exactly one of them closes the group and writes the event (W-3, W-4).

use crate::{
    domain::{
        ids::{GroupId, WorkspaceId},
        task_await::{AwaitStatus, GroupStatus, is_complete},
    },
    store::{
        self,
        awaits::{GroupState, Settlement},
    },
};
use sqlx::PgConnection;
use std::collections::HashMap;

/// Settles those awaits that are still pending. Returns the groups that closed; their tasks have an event each.
pub(super) async fn complete_awaits(
    conn: &mut PgConnection,
    settlements: &[Settlement],
) -> Result<Vec<GroupState>, store::Error> {
    settle(conn, settlements, false).await
}

/// As [`complete_awaits`] for waits of tasks that are being ended: nobody is told.
pub(super) async fn cancel_awaits(
    conn: &mut PgConnection,
    settlements: &[Settlement],
) -> Result<Vec<GroupState>, store::Error> {
    settle(conn, settlements, true).await
}

async fn settle(
    conn: &mut PgConnection,
    settlements: &[Settlement],
    cancelling: bool,
) -> Result<Vec<GroupState>, store::Error> {
    if settlements.is_empty() {
        return Ok(vec![]);
    }
    let ids: Vec<_> = settlements.iter().map(|s| (s.workspace, s.group)).collect();
    let groups = store::awaits::lock_groups(conn, &ids).await?;
    let settled = store::awaits::settle_if_pending(conn, settlements).await?;
    let changed = judge(groups, &settled, cancelling);
    if changed.is_empty() {
        return Ok(vec![]);
    }
    store::awaits::update_groups(conn, &changed, cancelling).await?;
    Ok(changed
        .into_iter()
        .filter(|g| g.status != GroupStatus::Open)
        .collect())
}

/// The new state of each group that something has happened to.
fn judge(groups: Vec<GroupState>, settled: &[Settlement], cancelling: bool) -> Vec<GroupState> {
    let mut by_group: HashMap<(WorkspaceId, GroupId), Vec<AwaitStatus>> = HashMap::new();
    for s in settled {
        by_group
            .entry((s.workspace, s.group))
            .or_default()
            .push(s.to);
    }
    let mut changed = Vec::new();
    for mut group in groups {
        let Some(news) = by_group.get(&(group.workspace, group.id)) else {
            continue;
        };
        if group.status != GroupStatus::Open {
            continue;
        }
        group.tally.pending -= news.len() as i32;
        group.tally.completed += news
            .iter()
            .filter(|s| **s == AwaitStatus::Completed)
            .count() as i32;
        if is_complete(group.strategy, group.tally) {
            group.tally.pending = 0;
            group.status = match news.contains(&AwaitStatus::Skipped) {
                _ if cancelling => GroupStatus::Cancelled,
                true => GroupStatus::Skipped,
                false => GroupStatus::Completed,
            };
        }
        changed.push(group);
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        ids::TaskId,
        task_await::{Strategy, Tally},
    };

    // W-3, W-4, W-6
    #[test]
    fn judging_table() {
        let group = |strategy, pending| GroupState {
            workspace: WorkspaceId::new(),
            id: GroupId::new(),
            task: TaskId::new(),
            status: GroupStatus::Open,
            strategy,
            tally: Tally {
                total: 3,
                pending,
                completed: 3 - pending,
            },
        };
        use {AwaitStatus::*, GroupStatus as G, Strategy::*};
        for (strategy, pending, news, cancelling, expected) in [
            (AllRequired, 3, vec![Completed], false, Some((G::Open, 2))),
            (
                AllRequired,
                1,
                vec![Completed],
                false,
                Some((G::Completed, 0)),
            ),
            (
                AllRequired,
                2,
                vec![Completed, StartFailed],
                false,
                Some((G::Completed, 0)),
            ),
            (
                AllRequired,
                2,
                vec![Skipped, Skipped],
                false,
                Some((G::Skipped, 0)),
            ),
            (AllRequired, 2, vec![], false, None),
            (Any, 3, vec![Completed], false, Some((G::Completed, 0))),
            (Quorum(2), 3, vec![Completed], false, Some((G::Open, 2))),
            (
                Quorum(2),
                2,
                vec![Completed],
                false,
                Some((G::Completed, 0)),
            ),
            (
                AllRequired,
                2,
                vec![Cancelled, Cancelled],
                true,
                Some((G::Cancelled, 0)),
            ),
        ] {
            let group = group(strategy, pending);
            let settled: Vec<Settlement> = (0..)
                .zip(news)
                .map(|(ordinal, to)| Settlement {
                    workspace: group.workspace,
                    group: group.id,
                    ordinal,
                    to,
                })
                .collect();
            let judged = judge(vec![group], &settled, cancelling);
            assert_eq!(
                judged.first().map(|g| (g.status, g.tally.pending)),
                expected,
                "{strategy:?}"
            );
        }
    }
}
