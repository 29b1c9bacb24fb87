//! Runs the calls of a turn that this worker comes to hold, one after another: the first of a group, which passes through no
//! queue, then whichever its commits start, then those that are still queued. Its siblings run on whatever worker takes
//! them from the queue, this one among them: each is a step by itself, and whoever ends one moves the turn on.
//!
//! So a turn needs nobody in particular. What this file knows of it is advice; `lifecycle::advance` decides, on the rows.

use super::{
    Shared,
    context::{Context, TurnCalls},
    lease::Guard,
    turn::{Done, commit, execute, patiently, whole},
};
use crate::{
    domain::{
        decision::{ToolCall, clean},
        step::Claim,
        text::cut_chars,
        turn::Concurrency,
    },
    lifecycle::{
        self,
        checkpoint::{Called, Commit, Committed, Outcome},
    },
    runtime::Causes,
    store, tools,
};
use futures::TryFutureExt;
use std::sync::Arc;

/// The most of one result that is stored.
const STORED_RESULT_CHARS: usize = 4_000_000;

/// Runs the held call, and what this worker comes to hold after it.
pub async fn run(
    shared: &Arc<Shared>,
    guard: &mut Guard,
    context: &mut Context,
    turn: TurnCalls,
) -> Done {
    let TurnCalls {
        calls,
        mut unstarted,
    } = turn;
    loop {
        let claim = *guard.claim();
        let Some(call) = calls.get((claim.key.ordinal - 1).max(0) as usize) else {
            return Err(Arc::new(store::Error::Corrupt {
                table: "steps",
                reason: format!("step {} is no call of its turn", claim.step),
            }));
        };
        let done = patiently(shared, || execute(shared, &*guard, context, call)).await?;
        let Some(done) = done else {
            return Ok(());
        };
        let concurrency = match unstarted {
            true => concurrency(shared, &claim, context, &calls).await,
            false => vec![],
        };
        let outcome = Outcome::Called(Box::new(Called {
            result: cut_chars(&clean(&done.text), STORED_RESULT_CHARS).to_owned(),
            is_error: done.is_error,
            start: done.start,
            calls: calls.clone(),
            concurrency,
        }));
        let Committed::Done(next) = commit(shared, Commit { claim, outcome }).await? else {
            return Ok(());
        };
        unstarted = next.unstarted;
        let held = match next.held {
            None if next.queued => take_sibling(shared, &claim, context).await,
            held => held,
        };
        match held {
            Some(held) => guard.move_to(held),
            None => return Ok(()),
        }
    }
}

/// How the calls may overlap as things are now. A turn of one call has nothing to overlap.
pub async fn concurrency(
    shared: &Shared,
    claim: &Claim,
    context: &mut Context,
    calls: &[ToolCall],
) -> Vec<Concurrency> {
    if calls.len() < 2 || !refresh(shared, claim, context).await {
        return vec![Concurrency::Exclusive; calls.len()];
    }
    let judged = calls.iter();
    judged
        .map(|call| tools::concurrency(call, &context.tools))
        .collect()
}

/// Reads anew what the agent may call: that is what the calls after this are judged by and run with.
async fn refresh(shared: &Shared, claim: &Claim, context: &mut Context) -> bool {
    let Shared { pool, loader, .. } = shared;
    let (workspace, setup) = (claim.key.workspace, context.setup);
    let read = patiently(shared, || {
        loader.tools(pool, workspace, &setup).map_err(Arc::new)
    });
    match read.await {
        Ok(Some(tools)) => context.tools = tools,
        Ok(None) => return false,
        Err(error) => {
            tracing::warn!(task.id = %claim.key.task, error = %Causes(&*error),
                "the tools of task {} can not be read: its calls run alone", claim.key.task);
            return false;
        }
    }
    true
}

/// Takes a queued call of the turn. It may be waiting for somebody who is not there: so one worker drains a whole turn, and
/// in the place of the one that it has just ended, not behind all that is queued.
async fn take_sibling(shared: &Arc<Shared>, claim: &Claim, context: &mut Context) -> Option<Claim> {
    if shared.stopping.is_cancelled() {
        return None;
    }
    let (its_shared, claim) = (shared.clone(), *claim);
    let taking = async move {
        let Shared { pool, lease, .. } = &*its_shared;
        let lease_secs = lease.as_secs() as u32;
        let taken = lifecycle::claim::claim_of_turn(pool, claim.key, claim.worker, lease_secs);
        taken.await.map_err(Arc::new)
    };
    match whole(shared, taking, |taken| *taken).await {
        Ok(Some(taken)) => {
            refresh(shared, &taken, context).await;
            Some(taken)
        }
        Ok(None) => None,
        Err(error) => {
            // Whoever claims from the queue finds it.
            tracing::warn!(task.id = %claim.key.task, error = %Causes(&*error),
                "the next call of task {} could not be taken", claim.key.task);
            None
        }
    }
}
