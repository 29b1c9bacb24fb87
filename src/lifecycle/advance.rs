//! Moves a turn on when a call of it has ended: results enter the transcript in model order, what may run now is started,
//! and when nothing is left the turn is committed.
//!
//! `domain::turn` decides. The rows of `steps` are the turn: whoever ends a call holds its task's lock, so two ends never
//! see the same turn, and wherever a process dies the rows say how far it has come. A result whose elder has not ended
//! stays on its row. Between two transactions a turn has an active call, or it is over.

use super::{Draft, TaskChange, event, finish};
use crate::{
    domain::{
        decision::ToolCall,
        ids::StepId,
        step::{Claim, StepKey, StepStatus},
        task::{Failure, TaskKey},
        turn::{Concurrency, Started, Turn},
    },
    store::{
        self,
        changes::{Call, Changes, EventKind, ItemKind, NewStep},
        steps::CallState,
    },
};
use serde_json::json;
use sqlx::PgConnection;
use std::collections::{BTreeSet, HashMap};

/// How calls are started.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of a call that is started on the worker that has ended another one.
    pub lease_secs: u32,
    /// Calls of one turn at once.
    pub parallel_max: usize,
}

/// The calls of a turn as the model made them, and how they may overlap as things are now. What is said of calls that have
/// started counts no more.
#[derive(Clone, Copy, Debug)]
pub struct Calls<'a> {
    pub calls: &'a [ToolCall],
    pub concurrency: &'a [Concurrency],
}

/// What is left of a turn for the worker that has ended a call, or has decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Next {
    /// The call that this worker now holds.
    pub held: Option<Claim>,
    /// A call of the turn is in the queue.
    pub queued: bool,
    /// Calls of the turn have not started.
    pub unstarted: bool,
}

/// Starts the first calls of a turn, the first of them on this worker.
pub(super) fn begin(
    changes: &mut Changes,
    task: &mut TaskChange,
    claim: &Claim,
    calls: Calls<'_>,
    limits: Limits,
) -> Next {
    let mut state = State {
        turn: Turn::new(vec![], calls.calls.len()),
        rows: vec![],
    };
    state.start(changes, task, claim, calls, limits)
}

/// The turns that a transaction moves on, as they are under their tasks' locks.
#[derive(Debug, Default)]
pub(super) struct Turns(HashMap<(TaskKey, i32), State>);

#[derive(Debug)]
struct State {
    turn: Turn,
    /// Of the calls that have started.
    rows: Vec<CallState>,
}

impl State {
    fn new(rows: Vec<CallState>, len: usize) -> Self {
        let started = rows.iter().map(|row| match row.status {
            StepStatus::Queued | StepStatus::Running => Started::Active,
            StepStatus::Completed => Started::Settled,
            StepStatus::Failed | StepStatus::Cancelled => Started::Failed,
        });
        Self {
            turn: Turn::new(started.collect(), len),
            rows,
        }
    }
}

impl Turns {
    /// Those that these steps belong to; the tasks must be locked.
    pub async fn load(
        conn: &mut PgConnection,
        steps: impl IntoIterator<Item = StepKey>,
    ) -> Result<Self, store::Error> {
        let turns: BTreeSet<(TaskKey, i32)> = steps.into_iter().map(turn_of).collect();
        if turns.is_empty() {
            return Ok(Self::default());
        }
        let turns: Vec<_> = turns.into_iter().collect();
        let rows = store::steps::calls_of_turns(conn, &turns).await?;
        let states = rows.into_iter();
        Ok(Self(
            states
                .map(|(turn, rows)| (turn, State::new(rows, 0)))
                .collect(),
        ))
    }

    /// A held call has this result. A turn of one call need not have been loaded.
    pub fn settle(
        &mut self,
        changes: &mut Changes,
        task: &mut TaskChange,
        claim: &Claim,
        (result, is_error): (&str, bool),
        calls: Calls<'_>,
        limits: Limits,
    ) -> Result<Next, store::Error> {
        if let [only] = calls.calls {
            let row = started(only, StepStatus::Running);
            let state = State::new(vec![row], 1);
            self.0.insert(turn_of(claim.key), state);
        }
        let (state, place) = self.at(claim.key)?;
        state.turn.has(calls.calls.len());
        state.rows[place].status = StepStatus::Completed;
        state.rows[place].result = Some(result.to_owned());
        state.rows[place].is_error = is_error;
        state.end(changes, task, claim.key, place, Started::Settled)?;
        let next = state.start(changes, task, claim, calls, limits);
        state.close(changes, task)?;
        Ok(next)
    }

    /// A call has come to no result, for a reason within the service. Its siblings end first, and no more are started;
    /// then the task fails.
    pub fn fail(
        &mut self,
        changes: &mut Changes,
        task: &mut TaskChange,
        key: StepKey,
        failure: &Failure,
    ) -> Result<(), store::Error> {
        let (state, place) = self.at(key)?;
        state.rows[place].status = StepStatus::Failed;
        state.rows[place].failure = Some(failure.clone());
        state.end(changes, task, key, place, Started::Failed)?;
        state.close(changes, task)
    }

    /// Commits the results of the task's turn that were held back: it is broken off.
    pub fn break_off(
        &self,
        changes: &mut Changes,
        task: &mut TaskChange,
    ) -> Result<(), store::Error> {
        let turn = task.state.turn;
        let Some(state) = self.0.get(&(task.state.key, turn)) else {
            return Ok(());
        };
        for place in state.turn.held() {
            state.commit(changes, task, turn, place)?;
        }
        Ok(())
    }

    fn at(&mut self, key: StepKey) -> Result<(&mut State, usize), store::Error> {
        let place = (key.ordinal - 1).max(0) as usize;
        let state = self.0.get_mut(&turn_of(key));
        let state = state.filter(|state| place < state.rows.len());
        state
            .map(|state| (state, place))
            .ok_or_else(|| store::Error::Corrupt {
                table: "steps",
                reason: format!(
                    "turn {} of task {} lacks call {}",
                    key.turn, key.task, key.ordinal
                ),
            })
    }
}

impl State {
    fn end(
        &mut self,
        changes: &mut Changes,
        task: &mut TaskChange,
        key: StepKey,
        place: usize,
        how: Started,
    ) -> Result<(), store::Error> {
        let passed = self.turn.end(place, how);
        for place in passed.filter(|place| self.turn.is_settled(*place)) {
            self.commit(changes, task, key.turn, place)?;
        }
        Ok(())
    }

    /// Adds the result of a call to the transcript.
    fn commit(
        &self,
        changes: &mut Changes,
        task: &mut TaskChange,
        turn: i32,
        place: usize,
    ) -> Result<(), store::Error> {
        let row = &self.rows[place];
        let Some(result) = &row.result else {
            return Err(store::Error::Corrupt {
                table: "steps",
                reason: format!("call {} has ended without a result", row.call_id),
            });
        };
        let item = Draft {
            turn: Some(turn),
            ..Draft::new(ItemKind::ToolResult)
        };
        let data = json!({"ordinal": place + 1, "call_id": row.call_id, "name": row.tool, "is_error": row.is_error});
        task.state.news_seq = task.add_item(changes, item.text(result).data(data));
        Ok(())
    }

    /// Starts what may run now: the first on the worker of `claim`, the others for whoever is idle. Each is recorded
    /// before anything of it runs.
    fn start(
        &mut self,
        changes: &mut Changes,
        task: &mut TaskChange,
        claim: &Claim,
        calls: Calls<'_>,
        limits: Limits,
    ) -> Next {
        let concurrency = |place| {
            let known = calls.concurrency.get(place);
            known.copied().unwrap_or(Concurrency::Exclusive)
        };
        let starts = self.turn.start(limits.parallel_max, concurrency);
        let mut held = None;
        for call in calls.calls.iter().take(starts.end).skip(starts.start) {
            let key = StepKey {
                ordinal: self.rows.len() as i32 + 1,
                ..claim.key
            };
            let id = StepId::new();
            let item = Draft {
                turn: Some(key.turn),
                ..Draft::new(ItemKind::ToolCall)
            };
            let data = json!({"step_id": id, "ordinal": key.ordinal, "call_id": call.id, "name": call.name});
            task.add_item(changes, item.data(data));
            let is_first = held.is_none();
            changes.new_steps.push(NewStep {
                key,
                id,
                stop_generation: claim.stop_generation,
                priority: task.state.priority,
                call: Some(as_call(call)),
                held_by: is_first.then_some((claim.worker, limits.lease_secs)),
            });
            held = held.or(Some(Claim {
                key,
                step: id,
                attempt: 1,
                ..*claim
            }));
            self.rows.push(started(
                call,
                match is_first {
                    true => StepStatus::Running,
                    false => StepStatus::Queued,
                },
            ));
        }
        Next {
            held,
            queued: self.rows.iter().any(|r| r.status == StepStatus::Queued),
            unstarted: !self.turn.is_at_end(),
        }
    }

    /// If nothing of the turn is left.
    fn close(&self, changes: &mut Changes, task: &mut TaskChange) -> Result<(), store::Error> {
        if !self.turn.is_over() {
            return Ok(());
        }
        let failed = self.rows.iter().filter(|row| row.failure.is_some());
        // One that has just failed has no time yet.
        let first = failed.min_by_key(|row| (row.finished_at.is_none(), row.finished_at));
        match first.and_then(|row| row.failure.clone()) {
            Some(failure) => finish::end(changes, task, finish::End::Failed(failure))?,
            None => changes
                .events
                .push(event(task.state.key, EventKind::TurnCommitted)),
        }
        Ok(())
    }
}

fn turn_of(key: StepKey) -> (TaskKey, i32) {
    (key.task_key(), key.turn)
}

fn started(call: &ToolCall, status: StepStatus) -> CallState {
    CallState {
        call_id: call.id.clone(),
        tool: call.name.clone(),
        status,
        result: None,
        is_error: false,
        failure: None,
        finished_at: None,
    }
}

/// The call as its step keeps it.
fn as_call(call: &ToolCall) -> Call {
    Call {
        call_id: call.id.clone(),
        tool: call.name.clone(),
        arguments: call.arguments.clone(),
    }
}
