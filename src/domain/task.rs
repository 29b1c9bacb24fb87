//! A task's states, and the one question the orchestrator asks of a task: what is the next move?
//!
//! The answer depends on what is there (steps, waits, unanswered items), never on which event asked. An event is
//! only a reason to look, so a repeated or reordered event can not move a task twice.

use super::budget::Limits;
use super::ids::{AgentId, GroupId, ItemId, StepId, TaskId, WorkspaceId};
use serde::{Deserialize, Serialize};
use std::fmt;

#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, sqlx::Type, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum TaskStatus {
    Pending,
    Running,
    WaitingForInput,
    Completed,
    Failed,
    Stopped,
}

/// What may happen to a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// A decide step is written.
    Decide,
    /// A turn is committed and a pausing wait is pending.
    Park,
    /// A user writes to it.
    Message,
    Complete,
    Fail,
    Stop,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a task that is {from} can not {on:?}")]
pub struct IllegalTransition {
    pub from: TaskStatus,
    pub on: On,
}

impl TaskStatus {
    pub const ALL: [Self; 6] = [
        Self::Pending,
        Self::Running,
        Self::WaitingForInput,
        Self::Completed,
        Self::Failed,
        Self::Stopped,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::WaitingForInput => "waiting_for_input",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
        }
    }

    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Stopped)
    }

    /// The state after `on`, or the reason why it can not happen.
    pub fn next(self, on: On) -> Result<Self, IllegalTransition> {
        use TaskStatus::*;
        match (self, on) {
            (Pending | Running | WaitingForInput, On::Decide) => Ok(Running),
            (Running, On::Park) => Ok(WaitingForInput),
            (WaitingForInput, On::Park) => Ok(WaitingForInput),
            (Pending, On::Message) => Ok(Pending),
            (Running, On::Message) => Ok(Running),
            (WaitingForInput, On::Message) => Ok(WaitingForInput),
            (Completed | Failed | Stopped, On::Message) => Ok(Running),
            (Running, On::Complete) => Ok(Completed),
            (Pending | Running | WaitingForInput, On::Fail) => Ok(Failed),
            (Pending | Running | WaitingForInput, On::Stop) => Ok(Stopped),
            (from, on) => Err(IllegalTransition { from, on }),
        }
    }
}

impl fmt::Display for TaskStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for TaskStatus {
    type Err = UnknownStatus;
    fn from_str(text: &str) -> Result<Self, UnknownStatus> {
        Self::ALL
            .into_iter()
            .find(|s| s.as_str() == text)
            .ok_or(UnknownStatus)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("not one of pending, running, waiting_for_input, completed, failed, stopped")]
pub struct UnknownStatus;

/// Why a task failed, as its `error` column and the API show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Failure {
    /// Stable: `iteration_limit`, `empty_answer`, `invalid_output`, `model_error`, `lease_lost`, `agent_unavailable`,
    /// `model_unpriced`, `internal`; of a stopped task `budget_exhausted`.
    pub code: String,
    pub message: String,
}

impl Failure {
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self {
            code: code.into(),
            message: message.into(),
        }
    }
}

/// Names a task everywhere: the workspace is part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskKey {
    pub workspace: WorkspaceId,
    pub task: TaskId,
}

/// The agent definition that a task runs. Its workspace is another one when the agent is a public one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AgentRef {
    pub workspace: WorkspaceId,
    pub agent: AgentId,
    pub version: i32,
}

/// The moving parts of a task, read under its lock and written back as a whole.
#[derive(Clone, Debug)]
pub struct TaskState {
    pub key: TaskKey,
    pub status: TaskStatus,
    pub deleted: bool,
    pub is_child: bool,
    pub stop_generation: i32,
    pub priority: i16,
    /// The newest `seq` of the feed.
    pub last_seq: i64,
    /// The newest item that the model ought to answer.
    pub news_seq: i64,
    /// The newest item that the last committed decision had been shown.
    pub seen_seq: i64,
    /// Decide steps written so far; the turn that is under way.
    pub turn: i32,
    pub decides_left: i32,
    /// Set with a terminal status.
    pub output: Option<String>,
    /// Set with a terminal status.
    pub failure: Option<Failure>,
}

impl TaskState {
    /// The next `seq` of the feed.
    pub fn take_seq(&mut self) -> i64 {
        self.last_seq += 1;
        self.last_seq
    }

    pub fn has_news(&self) -> bool {
        self.news_seq > self.seen_seq
    }
}

/// A task at its creation.
#[derive(Clone, Debug)]
pub struct NewTask {
    pub key: TaskKey,
    pub agent: AgentRef,
    pub max_iterations: i32,
    pub title: String,
    pub metadata: serde_json::Value,
    pub priority: i16,
    /// Of its own; the task and everything beneath it keep to it.
    pub budget: Option<Limits>,
    /// One above it has a budget.
    pub budgeted: bool,
    /// `None` at the top level.
    pub parent: Option<ParentRef>,
    /// The first item of its feed.
    pub message: (ItemId, String),
}

/// Where a child hangs: taken from the parent's row, never from arguments.
#[derive(Clone, Copy, Debug)]
pub struct ParentRef {
    pub root: TaskId,
    pub task: TaskId,
    pub step: StepId,
    /// Place among the children of the call, from 0.
    pub ordinal: i32,
    pub depth: i32,
}

/// What is known of a task when the orchestrator looks at it, under the task's lock. Whether it is deleted is no part of
/// it: a deleted task has been stopped, or is one that a parent waits for, which goes on to its end (T-34).
#[derive(Clone, Debug)]
pub struct Situation {
    pub status: TaskStatus,
    /// A decide step or a tool call is queued or running.
    pub has_active_step: bool,
    /// The groups whose outcome the task has not been told, oldest first.
    pub groups: Vec<GroupState>,
    /// There is an item that the model has not answered.
    pub has_news: bool,
    pub decides_left: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupState {
    pub id: GroupId,
    pub open: bool,
}

/// The next move of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Move {
    /// Nothing to do now; whatever changes that brings an event of its own.
    Rest,
    /// Tell the task the outcome of `resumed`, and keep waiting for the open ones.
    Park { resumed: Vec<GroupId> },
    /// Tell it the outcome of `resumed`, and ask the model.
    Decide { resumed: Vec<GroupId> },
    /// It has used up its decide steps (T-13).
    OutOfDecides,
}

/// Decides the next move. The only place where a parent is woken.
pub fn next_move(situation: &Situation) -> Move {
    if situation.status.is_terminal() || situation.has_active_step {
        return Move::Rest;
    }
    let resumed: Vec<GroupId> = situation
        .groups
        .iter()
        .filter(|g| !g.open)
        .map(|g| g.id)
        .collect();
    if situation.groups.iter().any(|g| g.open) {
        if resumed.is_empty() && situation.status == TaskStatus::WaitingForInput {
            return Move::Rest;
        }
        return Move::Park { resumed };
    }
    if resumed.is_empty() && !situation.has_news {
        return Move::Rest;
    }
    if situation.decides_left <= 0 {
        return Move::OutOfDecides;
    }
    Move::Decide { resumed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TaskStatus::*;

    #[test]
    fn all_pairs_of_status_and_trigger() {
        let all = [
            On::Decide,
            On::Park,
            On::Message,
            On::Complete,
            On::Fail,
            On::Stop,
        ];
        let table = [
            (
                Pending,
                [
                    Some(Running),
                    None,
                    Some(Pending),
                    None,
                    Some(Failed),
                    Some(Stopped),
                ],
            ),
            (
                Running,
                [
                    Some(Running),
                    Some(WaitingForInput),
                    Some(Running),
                    Some(Completed),
                    Some(Failed),
                    Some(Stopped),
                ],
            ),
            (
                WaitingForInput,
                [
                    Some(Running),
                    Some(WaitingForInput),
                    Some(WaitingForInput),
                    None,
                    Some(Failed),
                    Some(Stopped),
                ],
            ),
            (Completed, [None, None, Some(Running), None, None, None]),
            (Failed, [None, None, Some(Running), None, None, None]),
            (Stopped, [None, None, Some(Running), None, None, None]),
        ];
        for (from, row) in table {
            for (on, to) in all.into_iter().zip(row) {
                assert_eq!(from.next(on).ok(), to, "{from} on {on:?}");
            }
        }
    }

    fn group(n: u128, open: bool) -> GroupState {
        GroupState {
            id: GroupId(uuid::Uuid::from_u128(n)),
            open,
        }
    }

    fn at(status: TaskStatus) -> Situation {
        Situation {
            status,
            has_active_step: false,
            groups: vec![],
            has_news: true,
            decides_left: 5,
        }
    }

    #[test]
    fn next_move_table() {
        let id = |n| GroupId(uuid::Uuid::from_u128(n));
        let decide = |r: &[u128]| Move::Decide {
            resumed: r.iter().map(|n| id(*n)).collect(),
        };
        let park = |r: &[u128]| Move::Park {
            resumed: r.iter().map(|n| id(*n)).collect(),
        };
        let cases: Vec<(&str, Situation, Move)> = vec![
            ("a new task", at(Pending), decide(&[])),
            ("a turn was committed", at(Running), decide(&[])),
            (
                "nothing new",
                Situation {
                    has_news: false,
                    ..at(Running)
                },
                Move::Rest,
            ),
            // T-10
            (
                "a step is active",
                Situation {
                    has_active_step: true,
                    ..at(Running)
                },
                Move::Rest,
            ),
            // D-21: no decide step while a pausing wait is pending
            (
                "a wait is open",
                Situation {
                    groups: vec![group(1, true)],
                    ..at(Running)
                },
                park(&[]),
            ),
            (
                "it already waits", // T-6: a message alone does not wake it
                Situation {
                    groups: vec![group(1, true)],
                    ..at(WaitingForInput)
                },
                Move::Rest,
            ),
            (
                "its wait has ended",
                Situation {
                    groups: vec![group(1, false)],
                    has_news: false,
                    ..at(WaitingForInput)
                },
                decide(&[1]),
            ),
            // D-21: a group that completes before the turn is committed resumes the parent after it
            (
                "its wait ended while its turn runs on",
                Situation {
                    groups: vec![group(1, false)],
                    has_active_step: true,
                    ..at(Running)
                },
                Move::Rest,
            ),
            // D-25
            (
                "one of two groups has ended",
                Situation {
                    groups: vec![group(1, false), group(2, true)],
                    ..at(WaitingForInput)
                },
                park(&[1]),
            ),
            (
                "both have ended",
                Situation {
                    groups: vec![group(1, false), group(2, false)],
                    ..at(WaitingForInput)
                },
                decide(&[1, 2]),
            ),
            // T-13
            (
                "no decide step left",
                Situation {
                    decides_left: 0,
                    ..at(Running)
                },
                Move::OutOfDecides,
            ),
            // W-16
            (
                "stopped",
                Situation {
                    groups: vec![group(1, false)],
                    ..at(Stopped)
                },
                Move::Rest,
            ),
        ];
        for (name, situation, expected) in cases {
            assert_eq!(next_move(&situation), expected, "{name}");
        }
    }
}
