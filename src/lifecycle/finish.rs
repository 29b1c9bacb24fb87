//! "A task has ended": its terminal state and, for a child, the signal that tells of it. Whoever ends a task does it
//! through here, so that both are always one transaction (W-1).

use super::Draft;
use crate::{
    domain::{
        ids::StepId,
        task::{Failure, IllegalTransition, On, TaskKey},
        task_await::SourceType,
    },
    store::{
        self,
        changes::{Changes, NewSignal, TaskChange},
    },
};
use serde_json::json;
use sqlx::PgConnection;

pub(super) enum End {
    Completed(String),
    Failed(Failure),
    /// With a reason if nobody has asked for it.
    Stopped(Option<Failure>),
}

/// Ends the task. An error means that it is not in a state that can end so; nothing was changed.
pub(super) fn end(
    changes: &mut Changes,
    task: &mut TaskChange,
    end: End,
) -> Result<(), IllegalTransition> {
    let on = match end {
        End::Completed(_) => On::Complete,
        End::Failed(_) => On::Fail,
        End::Stopped(_) => On::Stop,
    };
    task.state.status = task.state.status.next(on)?;
    let mut item = Draft::status(task.state.status);
    match end {
        End::Completed(output) => task.state.output = Some(output),
        End::Failed(failure) | End::Stopped(Some(failure)) => {
            // The task forgets it when it is reopened (T-7); its feed, and so its parent, does not.
            let Failure { code, message } = &failure;
            item = item.data(json!({"status": task.state.status, "code": code, "reason": message}));
            task.state.failure = Some(failure);
        }
        End::Stopped(None) => {}
    }
    task.add_item(changes, item);
    if task.state.is_child {
        changes.signals.push(NewSignal {
            workspace: task.state.key.workspace,
            source_type: SourceType::ChildTask,
            key: task.state.key.task.to_string(),
        });
    }
    Ok(())
}

/// Stops the children that these calls, which have failed, have made but not started: nobody else would ever end them.
pub(super) async fn end_unstarted(
    conn: &mut PgConnection,
    changes: &mut Changes,
    calls: &[(TaskKey, StepId)],
) -> Result<(), store::Error> {
    if calls.is_empty() {
        return Ok(());
    }
    let unstarted = store::steps::unstarted_children(conn, calls).await?;
    for state in store::tasks::lock(conn, &unstarted).await? {
        let mut child = TaskChange::of(state);
        if end(changes, &mut child, End::Stopped(None)).is_ok() {
            changes.tasks.push(child);
        }
    }
    Ok(())
}
