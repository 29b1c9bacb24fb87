//! The steps that this process holds: extends their leases, and cancels the work of those it has lost.
//!
//! A lease that is lost, to a reaper or to a stop, is not an error to log but work to drop: the token of the step is
//! cancelled, and with it the model call or tool that runs.

use crate::{
    domain::{
        ids::TaskId,
        step::{Claim, StepKey},
    },
    lifecycle,
    runtime::{Causes, Hub},
    store,
};
use sqlx::PgPool;
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

/// How often the held steps are looked at; a stop that no hint told of is seen within this time (T-30 allows 2 s).
const CHECK_EVERY: Duration = Duration::from_millis(1000);

#[derive(Default)]
pub struct Held {
    claims: Mutex<HashMap<StepKey, Entry>>,
}

struct Entry {
    claim: Claim,
    lost: CancellationToken,
}

/// Keeps a step among the held ones until dropped.
pub struct Guard {
    held: Arc<Held>,
    claim: Claim,
    /// Cancelled when the claim is lost.
    pub lost: CancellationToken,
}

impl Held {
    /// Registers a claimed step. Whatever this process still does for an earlier claim of it was lost, and is cancelled
    /// here: `lose` could not find it any more.
    pub fn hold(self: &Arc<Self>, claim: Claim, parent: &CancellationToken) -> Guard {
        let lost = parent.child_token();
        insert(&mut self.lock(), claim, lost.clone());
        Guard {
            held: self.clone(),
            claim,
            lost,
        }
    }

    fn claims(&self) -> Vec<Claim> {
        self.lock().values().map(|e| e.claim).collect()
    }

    fn claims_of(&self, tasks: &[TaskId]) -> Vec<Claim> {
        let tasks: HashSet<&TaskId> = tasks.iter().collect();
        let mut claims = self.claims();
        claims.retain(|claim| tasks.contains(&claim.key.task));
        claims
    }

    fn lose(&self, claim: &Claim) {
        if let Some(entry) = self.lock().get(&claim.key)
            && entry.claim == *claim
        {
            entry.lost.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<StepKey, Entry>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Guard {
    /// Goes on with another call of the same turn.
    pub fn move_to(&mut self, claim: Claim) {
        let mut claims = self.held.lock();
        remove(&mut claims, &self.claim);
        insert(&mut claims, claim, self.lost.clone());
        self.claim = claim;
    }

    pub fn claim(&self) -> &Claim {
        &self.claim
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        remove(&mut self.held.lock(), &self.claim);
    }
}

fn insert(claims: &mut HashMap<StepKey, Entry>, claim: Claim, lost: CancellationToken) {
    if let Some(earlier) = claims.insert(claim.key, Entry { claim, lost }) {
        earlier.lost.cancel();
    }
}

fn remove(claims: &mut HashMap<StepKey, Entry>, claim: &Claim) {
    if claims.get(&claim.key).is_some_and(|e| e.claim == *claim) {
        claims.remove(&claim.key);
    }
}

/// Runs until `stop`: extends leases every third of their length, looks for lost ones every second, and listens for
/// stops. While nothing is held it asks the database nothing.
pub async fn keep(
    held: Arc<Held>,
    pool: PgPool,
    hub: Arc<Hub>,
    lease_secs: u32,
    stop: CancellationToken,
) {
    let renew_every = Duration::from_secs(u64::from(lease_secs)) / 3;
    let lease = Duration::from_secs(u64::from(lease_secs));
    let mut stops = hub.stops();
    let mut timer = tokio::time::interval(CHECK_EVERY.min(renew_every));
    timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut renewed = Instant::now();
    let mut confirmed = Instant::now();
    loop {
        let mut stopped = Vec::new();
        tokio::select! {
            () = stop.cancelled() => return,
            task = stops.recv() => match task {
                Ok(task) => stopped.push(task),
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            },
            _ = timer.tick() => {}
        }
        if !stopped.is_empty() {
            stopped.extend(std::iter::from_fn(|| stops.try_recv().ok()));
            // A hint that comes late may find its task taken up again, by a message after the stop: the rows decide.
            let claims = held.claims_of(&stopped);
            if !claims.is_empty()
                && let Err(error) = look(&held, &pool, &claims, lease_secs, false).await
            {
                tracing::warn!(%error, "could not look at {} stopped steps: {error}", claims.len());
            }
            continue;
        }
        let claims = held.claims();
        if claims.is_empty() {
            renewed = Instant::now();
            confirmed = Instant::now();
            continue;
        }
        match look(
            &held,
            &pool,
            &claims,
            lease_secs,
            renewed.elapsed() >= renew_every,
        )
        .await
        {
            Ok(did_renew) => {
                confirmed = Instant::now();
                if did_renew {
                    renewed = Instant::now();
                }
            }
            // Nobody else could be told either. Once a lease may have run out, the work may be somebody else's.
            Err(error) => {
                tracing::warn!(error = %Causes(&error), "could not extend {} leases", claims.len());
                if confirmed.elapsed() >= lease {
                    claims.iter().for_each(|c| held.lose(c));
                }
            }
        }
    }
}

async fn look(
    held: &Held,
    pool: &PgPool,
    claims: &[Claim],
    lease_secs: u32,
    renew: bool,
) -> Result<bool, store::Error> {
    if renew {
        lifecycle::claim::renew(pool, claims, lease_secs).await?;
    }
    let still: HashSet<Claim> = {
        let mut conn = pool.acquire().await?;
        store::steps::still_held(&mut conn, claims)
            .await?
            .into_iter()
            .collect()
    };
    for lost in claims.iter().filter(|c| !still.contains(c)) {
        // A claim that was committed meanwhile is gone from `held`, or has moved on: `lose` leaves it alone.
        held.lose(lost);
    }
    Ok(renew)
}
