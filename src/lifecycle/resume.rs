//! What a task is told when its waits have ended: one message for each group (D-22, D-25).

use super::Draft;
use crate::{
    domain::{
        delegation::{Report, SummaryLimits, summary},
        ids::{GroupId, ItemId, WorkspaceId},
    },
    store::{
        self,
        changes::{Changes, ItemKind, TaskChange},
    },
};
use sqlx::PgConnection;
use std::collections::HashMap;

/// The texts for closed groups of children, built from the children's rows.
pub(super) async fn texts(
    conn: &mut PgConnection,
    groups: &[(WorkspaceId, GroupId)],
    limits: SummaryLimits,
) -> Result<HashMap<GroupId, String>, store::Error> {
    if groups.is_empty() {
        return Ok(HashMap::new());
    }
    let mut by_group: HashMap<GroupId, Vec<Report>> = HashMap::new();
    for (group, report) in store::awaits::reports(conn, groups).await? {
        by_group.entry(group).or_default().push(report);
    }
    Ok(by_group
        .into_iter()
        .map(|(group, reports)| (group, summary(&reports, limits)))
        .collect())
}

/// Adds the message of each group, and marks the group as told. The message's id is the group's: a second one can not
/// be stored.
pub(super) fn tell(
    changes: &mut Changes,
    task: &mut TaskChange,
    groups: &[GroupId],
    texts: &mut HashMap<GroupId, String>,
) {
    for group in groups {
        changes
            .resumed_groups
            .push((task.state.key.workspace, *group));
        if let Some(text) = texts.remove(group) {
            let item = Draft {
                id: Some(ItemId(group.0)),
                ..Draft::new(ItemKind::ResumeMessage)
            };
            task.state.news_seq = task.add_item(changes, item.text(text));
        }
    }
}
