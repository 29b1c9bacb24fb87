//! Takes a batch of events, looks at each task they name, and makes its next move (`domain::task::next_move`).
//!
//! What an event is about does not matter: the move depends on the task as it is now. So two events for one task in a
//! batch are one look, and an event that comes twice or late does nothing.

use super::{Draft, announce, finish, resume};
use crate::{
    domain::{
        delegation::SummaryLimits,
        ids::StepId,
        step::StepKey,
        task::{Failure, Move, On, Situation, TaskKey, next_move},
        task_await::SourceType,
    },
    runtime::{Causes, Hub, Progress},
    store::{
        self,
        changes::{Changes, NewStep, TaskChange},
        events::{Event, Surroundings},
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
    pub summary: SummaryLimits,
}

impl Dispatcher {
    /// Handles at most `batch` due events in one transaction. If that fails, each event is tried by itself, so that one
    /// that can not be handled holds up no other: it is put off with a growing delay, and parked in the end.
    pub async fn run_once(&self, pool: &PgPool, hub: &Hub) -> Result<Progress, store::Error> {
        let together = store::retry_conflicts!(async {
            let mut tx = pool.begin().await?;
            let events = store::events::lock_due_all_workspaces(&mut tx, self.batch).await?;
            if events.is_empty() {
                return Ok((0, Changes::default()));
            }
            let changes = self.handle(&mut tx, &events).await?;
            tx.commit().await?;
            Ok((events.len(), changes))
        });
        match together {
            Ok((0, _)) => Ok(Progress::Idle),
            Ok((n, changes)) => {
                announce(hub, &changes);
                Ok(Progress::Did(n))
            }
            Err(error) if error.is_unavailable() => Err(error),
            Err(error) => {
                tracing::warn!(error = %Causes(&error), "a batch of events failed, handling them one by one");
                self.one_by_one(pool, hub).await
            }
        }
    }

    async fn one_by_one(&self, pool: &PgPool, hub: &Hub) -> Result<Progress, store::Error> {
        let mut done = 0;
        // Each round commits what it took, so that the same event is not taken twice.
        while done < self.batch {
            let mut tx = pool.begin().await?;
            let Some(event) = store::events::lock_due_all_workspaces(&mut tx, 1)
                .await?
                .pop()
            else {
                break;
            };
            done += 1;
            let mut attempt = sqlx::Acquire::begin(&mut *tx).await?;
            match self.handle(&mut attempt, &[event]).await {
                Ok(changes) => {
                    attempt.commit().await?;
                    tx.commit().await?;
                    announce(hub, &changes);
                }
                Err(error) if error.is_unavailable() => return Err(error),
                Err(error) => {
                    attempt.rollback().await?;
                    let dead = event.attempts + 1 >= self.attempts_max as i32;
                    let delay = Duration::from_millis(250 << event.attempts.clamp(0, 8));
                    tracing::error!(task.id = %event.task.task, error = %Causes(&error), dead, "an event of task {} failed", event.task.task);
                    let text = Causes(&error).to_string();
                    store::events::fail(&mut tx, &event, &text, delay.as_secs_f64(), dead).await?;
                    tx.commit().await?;
                }
            }
        }
        Ok(if done == 0 {
            Progress::Idle
        } else {
            Progress::Did(done as usize)
        })
    }

    async fn handle(
        &self,
        conn: &mut PgConnection,
        events: &[Event],
    ) -> Result<Changes, store::Error> {
        let mut keys: Vec<TaskKey> = events.iter().map(|e| e.task).collect();
        keys.sort_unstable();
        keys.dedup();
        let states = store::tasks::lock(conn, &keys).await?;
        let turns: Vec<_> = states.iter().map(|s| (s.key, s.turn)).collect();
        let mut around: HashMap<TaskKey, Surroundings> = store::events::surroundings(conn, &turns)
            .await?
            .into_iter()
            .map(|s| (s.task, s))
            .collect();
        let mut changes = Changes {
            done_events: events.iter().map(|e| (e.task.workspace, e.id)).collect(),
            ..Changes::default()
        };
        let mut moves = Vec::new();
        for state in states {
            let Some(around) = around.remove(&state.key) else {
                continue;
            };
            let next = next_move(&Situation {
                status: state.status,
                deleted: state.deleted,
                has_active_step: around.has_active_step,
                groups: around.groups.iter().map(|g| g.state).collect(),
                has_news: state.has_news(),
                decides_left: state.decides_left,
            });
            moves.push((TaskChange::of(state), around, next));
        }
        let told = moves.iter().flat_map(|(task, around, next)| match next {
            Move::Park { resumed } | Move::Decide { resumed } => around
                .groups
                .iter()
                // A user's answer speaks for itself.
                .filter(|g| resumed.contains(&g.state.id) && g.source_type != SourceType::UserInput)
                .map(|g| (task.state.key.workspace, g.state.id))
                .collect(),
            Move::Rest | Move::OutOfDecides => vec![],
        });
        let told: Vec<_> = told.collect();
        let mut texts = resume::texts(conn, &told, self.summary).await?;
        for (mut task, _, next) in moves {
            match next {
                Move::Rest => continue,
                Move::Park { resumed } => {
                    resume::tell(&mut changes, &mut task, &resumed, &mut texts);
                    park(&mut changes, &mut task)?;
                }
                Move::Decide { resumed } => {
                    resume::tell(&mut changes, &mut task, &resumed, &mut texts);
                    decide(&mut changes, &mut task)?;
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
        Ok(changes)
    }
}

fn park(changes: &mut Changes, task: &mut TaskChange) -> Result<(), store::Error> {
    let before = task.state.status;
    task.state.status = before.next(On::Park)?;
    if task.state.status != before {
        task.add_item(changes, Draft::status(task.state.status));
    }
    Ok(())
}

fn decide(changes: &mut Changes, task: &mut TaskChange) -> Result<(), store::Error> {
    let before = task.state.status;
    task.state.status = before.next(On::Decide)?;
    if before == crate::domain::task::TaskStatus::WaitingForInput {
        task.add_item(changes, Draft::status(task.state.status));
    }
    task.state.turn += 1;
    task.state.decides_left -= 1;
    changes.new_steps.push(NewStep {
        key: StepKey::of(task.state.key, task.state.turn, 0),
        id: StepId::new(),
        stop_generation: task.state.stop_generation,
        priority: task.state.priority,
        call: None,
        held_by: None,
    });
    Ok(())
}
