//! Takes a batch of events, looks at each task they name, and makes its next move (`domain::task::next_move`).
//!
//! What an event is about does not matter: the move depends on the task as it is now. So two events for one task in a
//! batch are one look, and an event that comes twice or late does nothing.

use super::{
    Draft, announce,
    desk::{Desk, Handed},
    finish,
    resume::{self, Untold},
};
use crate::{
    domain::{
        delegation::SummaryLimits,
        ids::{GroupId, StepId},
        step::{Claim, StepKey},
        task::{Failure, Move, On, Situation, TaskKey, TaskState, TaskStatus, next_move},
    },
    runtime::{Causes, Hub, Progress},
    store::{
        self,
        changes::{Changes, NewStep, TaskChange},
        events::{Due, Event, Surroundings},
        steps::Claimed,
        tasks::Setup,
    },
};
use sqlx::{PgConnection, PgPool};
use std::{collections::HashMap, time::Duration};

/// Limits of the orchestrator's event loop.
#[derive(Clone, Copy, Debug)]
pub struct Dispatcher {
    /// Events per transaction.
    pub batch: u32,
    /// Failures after which an event is parked as dead (W-19).
    pub attempts_max: u32,
    /// How long a resume whose text can not be read is tried again (W-17).
    pub resume_window: Duration,
    pub summary: SummaryLimits,
}

/// What to do about the text of a resume that can not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Telling {
    /// Fail, so that the event is tried again.
    Scoped,
    /// Say what can be said, and wake the task all the same.
    AtLast,
}

impl Dispatcher {
    /// Handles at most `batch` due events in one transaction. If that fails, each event is tried by itself, so that one
    /// that can not be handled holds up no other: it is put off with a growing delay, and parked in the end.
    ///
    /// Decide steps go to the worker behind `desk` as long as it has room, else into the queue.
    pub async fn run_once(
        &self,
        pool: &PgPool,
        hub: &Hub,
        desk: Option<&Desk>,
    ) -> Result<Progress, store::Error> {
        let together = store::retry_conflicts!(async {
            let mut tx = store::begin(pool).await?;
            let due =
                store::events::lock_due_with_tasks_all_workspaces(&mut tx, self.batch).await?;
            if due.is_empty() {
                return Ok((0, Handled::default()));
            }
            let handled = self.handle(&mut tx, &due, Telling::Scoped, desk).await?;
            tx.commit().await?;
            Ok((due.len(), handled))
        });
        match together {
            Ok((n, handled)) => {
                handled.announce(hub, desk);
                Ok(Progress::of(n, self.batch))
            }
            Err(error) if error.is_unavailable() => Err(error),
            Err(error) => {
                tracing::warn!(error = %Causes(&error), "a batch of events failed, handling them one by one");
                self.one_by_one(pool, hub).await
            }
        }
    }

    /// Handles events that this transaction has just written, without waiting for anybody: those of tasks that somebody
    /// else has locked stay where they are. That is also why it may lock tasks after groups.
    pub(super) async fn handle_own(
        &self,
        conn: &mut PgConnection,
        events: &[Event],
        desk: Option<&Desk>,
    ) -> Result<Handled, store::Error> {
        let keys: Vec<TaskKey> = events.iter().map(|e| e.task).collect();
        let due: Vec<Due> = store::tasks::lock_free(conn, &keys)
            .await?
            .into_iter()
            .flat_map(|(task, setup)| {
                let own: Vec<Event> = events
                    .iter()
                    .filter(|e| e.task == task.key)
                    .copied()
                    .collect();
                own.into_iter().map(move |event| Due {
                    event,
                    task: task.clone(),
                    setup,
                })
            })
            .collect();
        match due.is_empty() {
            true => Ok(Handled::default()),
            false => self.handle(conn, &due, Telling::Scoped, desk).await,
        }
    }

    async fn one_by_one(&self, pool: &PgPool, hub: &Hub) -> Result<Progress, store::Error> {
        let mut done = 0;
        // Each round commits what it took, so that the same event is not taken twice.
        while done < self.batch {
            let mut tx = store::begin(pool).await?;
            let due = store::events::lock_due_with_tasks_all_workspaces(&mut tx, 1).await?;
            let Some(Due { event, .. }) = due.first() else {
                break;
            };
            done += 1;
            let mut attempt = sqlx::Acquire::begin(&mut *tx).await?;
            let telling = self.telling(event.attempts);
            match self.handle(&mut attempt, &due, telling, None).await {
                Ok(handled) => {
                    attempt.commit().await?;
                    tx.commit().await?;
                    handled.announce(hub, None);
                }
                Err(error) if error.is_unavailable() => return Err(error),
                Err(error) => {
                    attempt.rollback().await?;
                    let dead = event.attempts + 1 >= self.attempts_max as i32;
                    let delay = self.delay(event.attempts);
                    tracing::error!(task.id = %event.task.task, error = %Causes(&error), dead, "an event of task {} failed", event.task.task);
                    let text = Causes(&error).to_string();
                    store::events::fail(&mut tx, event, &text, delay.as_secs_f64(), dead).await?;
                    tx.commit().await?;
                }
            }
        }
        Ok(Progress::of(done as usize, self.batch))
    }

    /// An event that has failed so often waits so long.
    fn delay(&self, attempts: i32) -> Duration {
        let delay = backoff(attempts);
        match self.resume_window.saturating_sub(waited(attempts)) {
            Duration::ZERO => delay,
            // The last attempt of the window is made when the window ends, not after it.
            left => delay.min(left),
        }
    }

    /// The window is over when the delays so far fill it; nor may the last attempt of all leave a task asleep.
    fn telling(&self, attempts: i32) -> Telling {
        let is_last = attempts + 1 >= self.attempts_max as i32;
        match is_last || waited(attempts) >= self.resume_window {
            true => Telling::AtLast,
            false => Telling::Scoped,
        }
    }

    async fn handle(
        &self,
        conn: &mut PgConnection,
        due: &[Due],
        telling: Telling,
        desk: Option<&Desk>,
    ) -> Result<Handled, store::Error> {
        // In key order, so the events of one task are neighbours.
        let mut tasks: Vec<(TaskState, Setup)> =
            due.iter().map(|d| (d.task.clone(), d.setup)).collect();
        tasks.dedup_by_key(|(task, _)| task.key);
        let turns: Vec<_> = tasks.iter().map(|(t, _)| (t.key, t.turn)).collect();
        let mut around: HashMap<TaskKey, Surroundings> = store::events::surroundings(conn, &turns)
            .await?
            .into_iter()
            .map(|s| (s.task, s))
            .collect();
        let mut changes = Changes {
            done_events: due
                .iter()
                .map(|d| (d.event.task.workspace, d.event.id))
                .collect(),
            ..Changes::default()
        };
        let mut handed = Vec::new();
        let mut moves = Vec::new();
        for (state, setup) in tasks {
            let Some(around) = around.remove(&state.key) else {
                continue;
            };
            let next = next_move(&Situation {
                status: state.status,
                has_active_step: around.has_active_step,
                groups: around.groups.iter().map(|g| g.state).collect(),
                has_news: state.has_news(),
                decides_left: state.decides_left,
            });
            moves.push((TaskChange::of(state), setup, around, next));
        }
        let lost: HashMap<TaskKey, GroupId> = moves
            .iter()
            .filter(|(task, _, _, next)| has_lost_its_group(task.state.status, next))
            .map(|(task, ..)| {
                let named = due.iter().map(|d| d.event).find_map(|e| {
                    let own = e.task == task.state.key;
                    e.group.filter(|_| own)
                });
                (task.state.key, named.unwrap_or_else(GroupId::new))
            })
            .collect();
        let untold: Vec<Untold> = moves
            .iter()
            .flat_map(|(task, _, around, next)| {
                let task = task.state.key;
                let resumed: &[GroupId] = match next {
                    Move::Park { resumed } | Move::Decide { resumed } => resumed,
                    Move::Rest | Move::OutOfDecides => &[],
                };
                let groups = around
                    .groups
                    .iter()
                    .filter(|g| resumed.contains(&g.state.id));
                let there = groups.map(|g| (g.state.id, Some(g.source_type)));
                let lost = lost.get(&task).map(|group| (*group, None));
                let all: Vec<_> = there.chain(lost).collect();
                all.into_iter().map(move |(group, source)| Untold {
                    task,
                    group,
                    source,
                })
            })
            .collect();
        let mut texts = match telling {
            Telling::Scoped => resume::texts(conn, &untold, self.summary).await?,
            Telling::AtLast => resume::texts_at_last(conn, &untold, self.summary).await?,
        };
        for (mut task, setup, _, next) in moves {
            match next {
                Move::Rest => continue,
                Move::Park { resumed } => {
                    resume::tell(&mut changes, &mut task, &resumed, &mut texts);
                    park(&mut changes, &mut task)?;
                }
                Move::Decide { resumed } => {
                    resume::tell(&mut changes, &mut task, &resumed, &mut texts);
                    if let Some(group) = lost.get(&task.state.key) {
                        resume::tell_of_lost(&mut changes, &mut task, *group, &mut texts);
                    }
                    handed.extend(decide(&mut changes, &mut task, setup, desk)?);
                }
                Move::OutOfDecides => {
                    let failure = Failure::new(
                        "iteration_limit",
                        "The task used up the decide steps that its agent's max_iterations allows for one message.",
                    );
                    finish::end(&mut changes, &mut task, finish::End::Failed(failure))?;
                }
            }
            changes.tasks.push(task);
        }
        store::changes::apply(conn, &changes).await?;
        Ok(Handled { changes, handed })
    }
}

/// What handling events has come to; to be announced after the commit.
#[derive(Debug, Default)]
pub(super) struct Handled {
    pub changes: Changes,
    handed: Vec<Handed>,
}

impl Handled {
    pub fn announce(self, hub: &Hub, desk: Option<&Desk>) {
        if let Some(desk) = desk {
            desk.hand_over(self.handed);
        }
        announce(hub, &self.changes);
    }
}

/// The pause after so many failed attempts.
fn backoff(attempts: i32) -> Duration {
    Duration::from_millis(250 << attempts.clamp(0, 8))
}

/// What the pauses of so many failed attempts come to.
fn waited(attempts: i32) -> Duration {
    (0..attempts).map(backoff).sum()
}

/// A task that rests does so for a group. When it is to decide and there is none, the group can not be found.
fn has_lost_its_group(status: TaskStatus, next: &Move) -> bool {
    let tells_nothing = matches!(next, Move::Decide { resumed } if resumed.is_empty());
    status == TaskStatus::WaitingForInput && tells_nothing
}

fn park(changes: &mut Changes, task: &mut TaskChange) -> Result<(), store::Error> {
    let before = task.state.status;
    task.state.status = before.next(On::Park)?;
    if task.state.status != before {
        task.add_item(changes, Draft::status(task.state.status));
    }
    Ok(())
}

/// Adds a decide step: for the worker behind the desk, which is returned then, or for the queue.
fn decide(
    changes: &mut Changes,
    task: &mut TaskChange,
    setup: Setup,
    desk: Option<&Desk>,
) -> Result<Option<Handed>, store::Error> {
    let before = task.state.status;
    task.state.status = before.next(On::Decide)?;
    if before == TaskStatus::WaitingForInput {
        task.add_item(changes, Draft::status(task.state.status));
    }
    task.state.turn += 1;
    task.state.decides_left -= 1;
    let key = StepKey::of(task.state.key, task.state.turn, 0);
    let id = StepId::new();
    let seat = desk.and_then(|desk| Some((desk, desk.seat()?)));
    changes.new_steps.push(NewStep {
        key,
        id,
        stop_generation: task.state.stop_generation,
        priority: task.state.priority,
        call: None,
        held_by: seat
            .as_ref()
            .map(|(desk, _)| (desk.worker, desk.lease_secs)),
    });
    Ok(seat.map(|(desk, seat)| Handed {
        seat,
        step: Claimed {
            claim: Claim {
                key,
                step: id,
                attempt: 1,
                worker: desk.worker,
                stop_generation: task.state.stop_generation,
            },
            task: task.state.clone(),
            setup,
            model_attempts: 0,
            call: None,
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    // W-17
    #[test]
    fn a_resume_is_tried_for_the_window_and_then_made_with_what_there_is() {
        for (window_secs, attempts_max, attempts, told_after_ms) in [
            (15, 10, 6, 15_000),
            (1, 10, 3, 1_000),
            (600, 10, 9, 127_750),
            (600, 1, 0, 0),
        ] {
            let dispatcher = Dispatcher {
                batch: 1,
                attempts_max,
                resume_window: Duration::from_secs(window_secs),
                summary: SummaryLimits {
                    child_chars: 1,
                    total_chars: 1,
                },
            };
            let first = (0..)
                .find(|n| dispatcher.telling(*n) == Telling::AtLast)
                .unwrap();
            let after: Duration = (0..first).map(|n| dispatcher.delay(n)).sum();
            assert_eq!(
                (first, after.as_millis()),
                (attempts, told_after_ms),
                "{window_secs} s, {attempts_max} attempts"
            );
        }
    }
}
