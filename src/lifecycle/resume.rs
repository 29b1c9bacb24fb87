//! What a task is told when its waits have ended: one message for each group (D-22, D-25).
//!
//! A task must never wake with nothing (W-17). So a text that can not be read is an error, and the event is tried again;
//! when that has gone on for long enough, `texts_at_last` says what can still be said.

use super::Draft;
use crate::{
    domain::{
        delegation::{Report, SummaryLimits, summary},
        ids::{GroupId, ItemId},
        task::TaskKey,
        task_await::SourceType,
    },
    store::{
        self,
        changes::{Changes, ItemKind, TaskChange},
    },
};
use sqlx::{Acquire, PgConnection};
use std::collections::HashMap;

/// A closed group whose outcome its task has not been told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Untold {
    pub task: TaskKey,
    pub group: GroupId,
    /// `None`: the group itself is not there.
    pub source: Option<SourceType>,
}

/// Children that an unscoped summary names at most.
const UNSCOPED_CHILDREN_MAX: i64 = 1000;
const UNSCOPED: &str = "The group of tasks that you waited for could not be read. Here is every task that you have delegated and that has ended, whichever call it was.\n\n";
const UNREAD_CHILDREN: &str = "The tasks that you delegated have ended, but their results could not be gathered. Read each of them with get_subtask_result; the results of your delegate_tasks calls name them.";
const UNREAD_WAIT: &str = "What you waited for is over, but what came of it could not be read.";

/// The texts of closed groups. A group without one needs no message: a user's answer speaks for itself.
pub(super) async fn texts(
    conn: &mut PgConnection,
    untold: &[Untold],
    limits: SummaryLimits,
) -> Result<HashMap<GroupId, String>, store::Error> {
    let (mut children, mut others) = (Vec::new(), Vec::new());
    for Untold {
        task,
        group,
        source,
    } in untold
    {
        match source {
            Some(SourceType::ChildTask) => children.push((task.workspace, *group)),
            Some(SourceType::UserInput | SourceType::External | SourceType::Timer) => {
                others.push((task.workspace, *group));
            }
            None => return Err(unreadable(*group)),
        }
    }
    let mut texts: HashMap<GroupId, Option<String>> = HashMap::new();
    if !children.is_empty() {
        let mut by_group: HashMap<GroupId, Vec<Report>> = HashMap::new();
        for (group, report) in store::awaits::reports(conn, &children).await? {
            by_group.entry(group).or_default().push(report);
        }
        texts.extend(
            by_group
                .into_iter()
                .map(|(group, reports)| (group, Some(summary(&reports, limits)))),
        );
    }
    if !others.is_empty() {
        texts.extend(store::awaits::wait_outcomes(conn, &others).await?);
    }
    if let Some(lost) = untold.iter().find(|u| !texts.contains_key(&u.group)) {
        return Err(unreadable(lost.group));
    }
    Ok(texts
        .into_iter()
        .filter_map(|(group, text)| Some((group, text?)))
        .collect())
}

fn unreadable(group: GroupId) -> store::Error {
    store::Error::Corrupt {
        table: "await_groups",
        reason: format!("the group {group} has closed and can not be read"),
    }
}

/// As [`texts`], with the best that can be said of a group that can not be read: a summary of all children of the task,
/// or one line. Only a database that is away is still an error.
pub(super) async fn texts_at_last(
    conn: &mut PgConnection,
    untold: &[Untold],
    limits: SummaryLimits,
) -> Result<HashMap<GroupId, String>, store::Error> {
    let mut all = HashMap::new();
    for one in untold {
        // A failed read spoils the transaction that it is made in, so each has one of its own.
        let mut scoped = conn.begin().await?;
        let error = match texts(&mut scoped, &[*one], limits).await {
            Ok(found) => {
                scoped.commit().await?;
                all.extend(found);
                continue;
            }
            Err(error) if error.is_unavailable() => return Err(error),
            Err(error) => error,
        };
        scoped.rollback().await?;
        tracing::error!(task.id = %one.task.task, %error, "task {} resumes without the outcome of group {}: {error}",
            one.task.task, one.group);
        all.insert(one.group, unscoped(conn, *one, limits).await?);
    }
    Ok(all)
}

async fn unscoped(
    conn: &mut PgConnection,
    one: Untold,
    limits: SummaryLimits,
) -> Result<String, store::Error> {
    match one.source {
        Some(SourceType::ChildTask) | None => {}
        Some(SourceType::UserInput | SourceType::External | SourceType::Timer) => {
            return Ok(UNREAD_WAIT.to_owned());
        }
    }
    let mut reading = conn.begin().await?;
    let read =
        store::awaits::reports_of_children(&mut reading, one.task, UNSCOPED_CHILDREN_MAX).await;
    reading.rollback().await?;
    match read {
        Ok(reports) if !reports.is_empty() => {
            Ok(format!("{UNSCOPED}{}", summary(&reports, limits)))
        }
        Err(error) if error.is_unavailable() => Err(error),
        Ok(_) | Err(_) => Ok(UNREAD_CHILDREN.to_owned()),
    }
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
            add_message(changes, task, *group, text);
        }
    }
}

/// As [`tell`] for a group that is not there to be marked.
pub(super) fn tell_of_lost(
    changes: &mut Changes,
    task: &mut TaskChange,
    group: GroupId,
    texts: &mut HashMap<GroupId, String>,
) {
    if let Some(text) = texts.remove(&group) {
        add_message(changes, task, group, text);
    }
}

fn add_message(changes: &mut Changes, task: &mut TaskChange, group: GroupId, text: String) {
    let item = Draft {
        id: Some(ItemId(group.0)),
        ..Draft::new(ItemKind::ResumeMessage)
    };
    task.state.news_seq = task.add_item(changes, item.text(text));
}
