//! The one way in which a wait ends: a signal, a timeout, a skip, a user's answer and a stop all settle awaits here.
//!
//! The groups are locked and the awaits settled by compare-and-set, then each group is judged, by its counters, by `domain::task_await::settle_group`. Two callers that settle the last two awaits of a group take turns at its lock, and
//! the second one sees what the first one did: exactly one of them closes the group and writes the event (W-3, W-4).

use crate::{
    domain::{
        ids::{GroupId, WorkspaceId},
        task_await::{AwaitStatus, GroupStatus, settle_group},
    },
    store::{
        self,
        awaits::{GroupState, Settlement},
        events::Event,
        signals::Signal,
    },
};
use sqlx::PgConnection;
use std::collections::BTreeMap;

/// What a settling has done.
#[derive(Debug, Default)]
pub(super) struct Settled {
    /// The awaits that it settled, as opposed to those that somebody else had.
    pub awaits: Vec<Settlement>,
    /// The groups that closed.
    pub closed: Vec<GroupState>,
    /// Written for the tasks of those groups, unless they are being ended.
    pub events: Vec<Event>,
}

/// Settles those awaits that are still pending. The tasks of groups that close get an event each.
pub(super) async fn complete_awaits(
    conn: &mut PgConnection,
    settlements: &[Settlement],
) -> Result<Settled, store::Error> {
    settle(conn, settlements, &[], false).await
}

/// As [`complete_awaits`] for locked signals, of which it also writes down whether somebody waited for them.
pub(super) async fn complete_awaits_of_signals(
    conn: &mut PgConnection,
    settlements: &[Settlement],
    signals: &[(&Signal, bool)],
) -> Result<Settled, store::Error> {
    settle(conn, settlements, signals, false).await
}

/// As [`complete_awaits`] for waits of tasks that are being ended: nobody is told.
pub(super) async fn cancel_awaits(
    conn: &mut PgConnection,
    settlements: &[Settlement],
) -> Result<Settled, store::Error> {
    settle(conn, settlements, &[], true).await
}

async fn settle(
    conn: &mut PgConnection,
    settlements: &[Settlement],
    signals: &[(&Signal, bool)],
    cancelling: bool,
) -> Result<Settled, store::Error> {
    let mut groups: BTreeMap<(WorkspaceId, GroupId), (GroupState, Vec<AwaitStatus>)> =
        BTreeMap::new();
    let mut awaits = Vec::new();
    if !settlements.is_empty() {
        for (settled, group) in store::awaits::lock_groups_and_settle(conn, settlements).await? {
            let news = groups.entry((group.workspace, group.id));
            news.or_insert_with(|| (group, vec![])).1.push(settled.to);
            awaits.push(settled);
        }
    }
    let changed: Vec<GroupState> = groups
        .into_values()
        .filter(|(group, _)| group.status == GroupStatus::Open)
        .map(|(group, news)| {
            let (tally, status) = settle_group(group.strategy, group.tally, &news, cancelling);
            GroupState {
                tally,
                status,
                ..group
            }
        })
        .collect();
    let events = match changed.is_empty() && signals.is_empty() {
        true => vec![],
        false => store::awaits::update_groups(conn, &changed, signals, cancelling).await?,
    };
    let closed = changed
        .into_iter()
        .filter(|g| g.status != GroupStatus::Open);
    Ok(Settled {
        awaits,
        closed: closed.collect(),
        events,
    })
}
