//! Steps that go back to the queue: a model that asks for patience, a shutdown, a lost lease (T-12, T-14).

use super::{advance::Turns, announce, finish};
use crate::{
    domain::{
        step::{Claim, StepKey, StepStatus},
        task::{Failure, TaskKey},
    },
    runtime::{Hub, Progress, Work},
    store::{
        self,
        changes::{Changes, EndedStep, TaskChange},
        steps::{GiveBack, StepState},
    },
};
use sqlx::PgPool;
use std::collections::{HashMap, HashSet};

/// Gives a held step back. Nothing happens when the claim no longer holds.
pub async fn give_back(
    pool: &PgPool,
    hub: &Hub,
    claim: &Claim,
    why: GiveBack,
) -> Result<(), store::Error> {
    let mut conn = pool.acquire().await?;
    store::steps::give_back(&mut conn, &[(claim.key, claim.attempt, why)]).await?;
    if why == GiveBack::Shutdown {
        hub.wake(Work::Steps);
    }
    Ok(())
}

/// Takes back at most `batch` steps whose lease has run out. One that has lost its worker `attempts_max` times fails,
/// and its task with it: at once, or when the other calls of the turn have ended.
pub async fn reap(
    pool: &PgPool,
    hub: &Hub,
    batch: u32,
    attempts_max: u32,
) -> Result<Progress, store::Error> {
    let (n, changes) = store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let expired = store::steps::expired_all_workspaces(&mut tx, batch).await?;
        if expired.is_empty() {
            return Ok((0, Changes::default()));
        }
        let keys: Vec<TaskKey> = expired.iter().map(|k| k.task_key()).collect();
        let tasks = store::tasks::lock(&mut tx, &keys).await?.into_iter();
        let mut tasks: HashMap<TaskKey, TaskChange> =
            tasks.map(|t| (t.key, TaskChange::of(t))).collect();
        let steps = store::steps::lock(&mut tx, &expired).await?;
        let lost = steps
            .iter()
            .filter(|step| step.status == StepStatus::Running && step.lease_expired);
        let (back, failed): (Vec<&StepState>, Vec<&StepState>) =
            lost.partition(|step| step.lost_leases + 1 < attempts_max as i32);
        let calls = || failed.iter().filter(|step| step.key.ordinal > 0);
        let mut turns = Turns::load(&mut tx, calls().map(|step| step.key)).await?;
        let mut changes = Changes::default();
        let message = format!(
            "The step lost its worker {attempts_max} times: each time the lease ran out before a result was committed."
        );
        let failure = Failure::new("lease_lost", message);
        let mut failing = HashSet::new();
        for step in &failed {
            let Some(task) = tasks.get_mut(&step.key.task_key()) else {
                continue;
            };
            match step.key.ordinal {
                0 => finish::end(&mut changes, task, finish::End::Failed(failure.clone()))?,
                _ => turns.fail(&mut changes, task, step.key, &failure)?,
            }
            changes.ended_steps.push(EndedStep {
                key: step.key,
                attempt: step.attempt,
                status: StepStatus::Failed,
                result: None,
                is_error: None,
                model: None,
                spent: None,
                failure: Some(failure.clone()),
            });
            failing.insert(task.state.key);
        }
        let failing = failing.into_iter().filter_map(|key| tasks.remove(&key));
        changes.tasks.extend(failing);
        let orphans: Vec<_> = calls()
            .map(|step| (step.key.task_key(), step.step))
            .collect();
        finish::end_unstarted(&mut tx, &mut changes, &orphans).await?;
        let back: Vec<(StepKey, i32, GiveBack)> = back
            .iter()
            .map(|step| (step.key, step.attempt, GiveBack::LeaseLost))
            .collect();
        store::steps::give_back(&mut tx, &back).await?;
        store::changes::apply(&mut tx, &changes).await?;
        tx.commit().await?;
        if !back.is_empty() {
            tracing::warn!(
                steps = back.len(),
                "{} steps lost their lease and were queued again",
                back.len()
            );
        }
        Ok((expired.len(), changes))
    })?;
    if n == 0 {
        return Ok(Progress::Idle);
    }
    announce(hub, &changes);
    hub.wake(Work::Steps);
    Ok(Progress::of(n, batch))
}
