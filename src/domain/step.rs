//! A step's states, and what identifies one.

use super::{
    ids::{ProcessId, StepId, TaskId, WorkspaceId},
    task::TaskKey,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, sqlx::Type)]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum StepStatus {
    Queued,
    Running,
    Completed,
    Failed,
    Cancelled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    Claim,
    /// The lease ran out, or the worker gave the step back.
    GiveBack,
    Complete,
    Fail,
    Cancel,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a step that is {from:?} can not {on:?}")]
pub struct IllegalTransition {
    pub from: StepStatus,
    pub on: On,
}

impl StepStatus {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    pub fn next(self, on: On) -> Result<Self, IllegalTransition> {
        use StepStatus::*;
        match (self, on) {
            (Queued, On::Claim) => Ok(Running),
            (Running, On::GiveBack) => Ok(Queued),
            (Running, On::Complete) => Ok(Completed),
            (Running, On::Fail) => Ok(Failed),
            (Queued | Running, On::Cancel) => Ok(Cancelled),
            (from, on) => Err(IllegalTransition { from, on }),
        }
    }
}

/// Where a step stands in its task: the decide step of a turn is number 0, its calls are 1, 2, …
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepKey {
    pub workspace: WorkspaceId,
    pub task: TaskId,
    pub turn: i32,
    pub ordinal: i32,
}

impl StepKey {
    pub fn of(task: TaskKey, turn: i32, ordinal: i32) -> Self {
        Self {
            workspace: task.workspace,
            task: task.task,
            turn,
            ordinal,
        }
    }

    pub fn task_key(self) -> TaskKey {
        TaskKey {
            workspace: self.workspace,
            task: self.task,
        }
    }
}

/// Proof that this process holds the lease of a step. Every write by a worker names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    pub key: StepKey,
    pub step: StepId,
    pub attempt: i32,
    pub worker: ProcessId,
    /// The task's stop generation when the step was written; a stop since then makes every write stale.
    pub stop_generation: i32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use StepStatus::*;

    #[test]
    fn all_pairs_of_status_and_trigger() {
        let all = [On::Claim, On::GiveBack, On::Complete, On::Fail, On::Cancel];
        let table = [
            (Queued, [Some(Running), None, None, None, Some(Cancelled)]),
            (
                Running,
                [
                    None,
                    Some(Queued),
                    Some(Completed),
                    Some(Failed),
                    Some(Cancelled),
                ],
            ),
            (Completed, [None; 5]),
            (Failed, [None; 5]),
            (Cancelled, [None; 5]),
        ];
        for (from, row) in table {
            for (on, to) in all.into_iter().zip(row) {
                assert_eq!(from.next(on).ok(), to, "{from:?} on {on:?}");
            }
        }
    }
}
