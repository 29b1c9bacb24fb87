//! The one way in which a wait ends: a signal, a timeout, a skip, a user's answer and a stop all settle awaits here.
//!
//! The groups are locked in a statement of their own, then the awaits are settled by compare-and-set, then each group
//! is judged by `domain::task_await::settle_group`. Two callers that settle the last two awaits of a group take turns at its lock, and
//! the second one sees what the first one did: exactly one of them closes the group and writes the event (W-3, W-4).

use crate::{
    domain::{
        ids::{GroupId, WorkspaceId},
        task_await::{AwaitStatus, GroupStatus, settle_group},
    },
    store::{
        self,
        awaits::{GroupState, Settlement},
    },
};
use sqlx::PgConnection;
use std::collections::HashMap;

/// What a settling has done.
#[derive(Debug, Default)]
pub(super) struct Settled {
    /// The awaits that it settled, as opposed to those that somebody else had.
    pub awaits: Vec<Settlement>,
    /// The groups that closed.
    pub closed: Vec<GroupState>,
}

/// Settles those awaits that are still pending. The tasks of groups that close get an event each.
pub(super) async fn complete_awaits(
    conn: &mut PgConnection,
    settlements: &[Settlement],
) -> Result<Settled, store::Error> {
    settle(conn, settlements, false).await
}

/// As [`complete_awaits`] for waits of tasks that are being ended: nobody is told.
pub(super) async fn cancel_awaits(
    conn: &mut PgConnection,
    settlements: &[Settlement],
) -> Result<Settled, store::Error> {
    settle(conn, settlements, true).await
}

async fn settle(
    conn: &mut PgConnection,
    settlements: &[Settlement],
    cancelling: bool,
) -> Result<Settled, store::Error> {
    if settlements.is_empty() {
        return Ok(Settled::default());
    }
    let ids: Vec<_> = settlements.iter().map(|s| (s.workspace, s.group)).collect();
    let groups = store::awaits::lock_groups(conn, &ids).await?;
    let settled = store::awaits::settle_if_pending(conn, settlements).await?;
    let changed = judge(groups, &settled, cancelling);
    if !changed.is_empty() {
        store::awaits::update_groups(conn, &changed, cancelling).await?;
    }
    Ok(Settled {
        awaits: settled,
        closed: changed
            .into_iter()
            .filter(|g| g.status != GroupStatus::Open)
            .collect(),
    })
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
    let changed = groups.into_iter().filter_map(|group| {
        let news = by_group.get(&(group.workspace, group.id))?;
        let open = group.status == GroupStatus::Open;
        let (tally, status) =
            open.then(|| settle_group(group.strategy, group.tally, news, cancelling))?;
        Some(GroupState {
            tally,
            status,
            ..group
        })
    });
    changed.collect()
}
