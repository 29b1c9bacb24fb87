//! Budgets: a reservation before each model call, the end of a tree that has used its budget up, and the budget of a
//! workspace (T-18). Only for tasks that have a budget above them (`Setup::budgeted`).

use super::stop;
use crate::{
    domain::{
        budget::{Limits, Owner, Verdict},
        decision::Spent,
        ids::{TaskId, WorkspaceId},
        step::Claim,
        task::Failure,
    },
    runtime::Hub,
    store::{
        self,
        budgets::{Budget, Standing},
        tasks::Setup,
    },
};
use sqlx::PgPool;
use std::collections::HashMap;
use uuid::Uuid;

/// What one call may take.
#[derive(Clone, Copy, Debug)]
pub struct Estimate {
    /// What this attempt at the step has taken before it: nobody else knows of that yet.
    pub so_far: Spent,
    pub tokens: i64,
    /// `None`: the model has no price.
    pub cost_micros: Option<i64>,
}

/// Why a call is not made.
#[derive(Clone, Debug)]
pub enum Denied {
    /// Calls under way may leave enough: try again soon.
    Wait,
    /// Everything beneath a task is to stop.
    Exhausted(Overdrawn),
    /// This task alone can not go on.
    Refused(Failure),
}

/// A budget that is used up: whom it stops, and what they are told.
#[derive(Clone, Debug)]
pub struct Overdrawn {
    pub top: TaskId,
    pub why: Failure,
}

impl Overdrawn {
    pub(super) fn of(budget: &Budget, setup: &Setup, told: &str) -> Self {
        let message = format!("The budget of {} is used up: {told}.", budget.owner);
        Self {
            top: match budget.owner {
                Owner::Task => TaskId(budget.id),
                Owner::Workspace => setup.root,
            },
            why: Failure::new("budget_exhausted", message),
        }
    }
}

/// Reserves for one model call of this step in every budget above it, or in none.
pub async fn reserve(
    pool: &PgPool,
    claim: &Claim,
    setup: &Setup,
    estimate: Estimate,
) -> Result<Option<Denied>, store::Error> {
    let (workspace, task) = (claim.key.workspace, claim.key.task);
    store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let budgets = store::budgets::lock_above(&mut tx, workspace, task).await?;
        if budgets.is_empty() {
            return Ok(None);
        }
        store::budgets::settle(&mut tx, workspace, &budgets).await?;
        let standings = store::budgets::standings(&mut tx, workspace, &budgets, claim.key).await?;
        let denied = judge(setup, &budgets, &standings, estimate);
        if denied.is_none() {
            let cost = estimate.cost_micros.unwrap_or(0);
            store::budgets::reserve(&mut tx, &budgets, claim.key, estimate.tokens, cost).await?;
        }
        // What was settled stays settled, whatever the answer.
        tx.commit().await?;
        Ok(denied)
    })
}

fn judge(
    setup: &Setup,
    budgets: &[Budget],
    standings: &HashMap<Uuid, Standing>,
    estimate: Estimate,
) -> Option<Denied> {
    let Estimate {
        so_far,
        tokens,
        cost_micros,
    } = estimate;
    let mut denied = None;
    for budget in budgets {
        let Standing {
            mut made,
            under_way,
        } = standings.get(&budget.id).copied().unwrap_or_default();
        made.tokens += so_far.usage.tokens();
        made.cost_micros += so_far.cost_micros.unwrap_or(0);
        match budget.limits.judge(made, under_way, tokens, cost_micros) {
            Verdict::Fits => {}
            Verdict::Wait => denied = Some(Denied::Wait),
            Verdict::Exhausted(told) => {
                return Some(Denied::Exhausted(Overdrawn::of(budget, setup, &told)));
            }
            Verdict::Unpriced => {
                let message = format!(
                    "The budget of {} limits the cost, and the model that this task asks has no price (llm.prices), so nobody can keep to it.",
                    budget.owner
                );
                return Some(Denied::Refused(Failure::new("model_unpriced", message)));
            }
        }
    }
    denied
}

/// Stops the task at which the budget is set, with everything beneath it. A parent above is told as of any task that ends
/// (W-1). `false`: this has stopped nobody, since a deleted task is not there to be stopped.
pub async fn exhaust(
    pool: &PgPool,
    hub: &Hub,
    workspace: WorkspaceId,
    overdrawn: &Overdrawn,
) -> Result<bool, store::Error> {
    let Overdrawn { top, why } = overdrawn;
    let receipt = stop::stop_for(pool, hub, workspace, *top, true, Some(why)).await?;
    let stopped = receipt.map_or(0, |receipt| receipt.stopped);
    if stopped > 0 {
        tracing::info!(task.id = %top, "a budget is used up: {stopped} tasks from {top} on were stopped");
    }
    Ok(stopped > 0)
}

/// Gives the workspace a budget that counts from now on; `None` takes it away.
pub async fn set(
    pool: &PgPool,
    workspace: WorkspaceId,
    limits: Option<Limits>,
) -> Result<(), store::Error> {
    let mut tx = store::begin(pool).await?;
    match limits {
        Some(limits) => store::budgets::set(&mut tx, workspace, limits).await?,
        None => {
            store::budgets::remove(&mut tx, workspace).await?;
        }
    }
    tx.commit().await?;
    Ok(())
}
