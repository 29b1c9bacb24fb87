//! Steps that go back to the queue: a model that asks for patience, a shutdown, a lost lease (T-12, T-14).

use super::{announce, finish};
use crate::{
    domain::{
        step::{Claim, StepKey, StepStatus},
        task::{Failure, TaskKey},
    },
    runtime::{Hub, Progress, Work},
    store::{
        self,
        changes::{Changes, EndedStep, TaskChange},
        steps::GiveBack,
    },
};
use sqlx::PgPool;

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
/// and its task with it.
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
        let tasks = store::tasks::lock(&mut tx, &keys).await?;
        let steps = store::steps::lock(&mut tx, &expired).await?;
        let mut changes = Changes::default();
        let mut back: Vec<(StepKey, i32, GiveBack)> = Vec::new();
        let mut orphans = Vec::new();
        for step in &steps {
            if step.status != StepStatus::Running || !step.lease_expired {
                continue;
            }
            if step.lost_leases + 1 < attempts_max as i32 {
                back.push((step.key, step.attempt, GiveBack::LeaseLost));
                continue;
            }
            let Some(task) = tasks.iter().find(|t| t.key == step.key.task_key()) else {
                continue;
            };
            let message = format!(
                "The step lost its worker {attempts_max} times: each time the lease ran out before a result was committed."
            );
            let mut task = TaskChange::of(task.clone());
            finish::end(
                &mut changes,
                &mut task,
                finish::End::Failed(Failure::new("lease_lost", &message)),
            )?;
            changes.tasks.push(task);
            changes.ended_steps.push(EndedStep {
                key: step.key,
                attempt: step.attempt,
                status: StepStatus::Failed,
                result: None,
                is_error: None,
                model: None,
                spent: None,
                error: Some(message),
            });
            orphans.push((step.key.task_key(), step.step));
        }
        // Children that a failing call has made but not started would never end.
        let unstarted = store::steps::unstarted_children(&mut tx, &orphans).await?;
        for state in store::tasks::lock(&mut tx, &unstarted).await? {
            let mut child = TaskChange::of(state);
            if finish::end(&mut changes, &mut child, finish::End::Stopped(None)).is_ok() {
                changes.tasks.push(child);
            }
        }
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
