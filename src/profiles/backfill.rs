//! Works through backfills: some agents at once, each by itself, so that one that fails stops no other.

use super::{ProfileError, Profiles};
use crate::domain::backfill::Settled;
use crate::domain::ids::{AgentId, BackfillId};
use crate::lifecycle::agents::EditError;
use crate::lifecycle::backfill;
use crate::runtime::{Causes, Hub, Progress, Shutdown, Work, run_loop};
use crate::store::{self, backfills::Held};
use futures::{StreamExt, TryStreamExt, future::join_all, stream};
use std::time::{Duration, Instant};

/// Saves of other people that are given way to, for one agent.
const TRIES: u32 = 3;
/// Backfills that one process works on at once, each of another workspace.
const AT_ONCE: usize = 4;

impl Profiles {
    /// Works on whatever backfills nobody works on, until the soft stop: a large workspace holds up no other.
    pub async fn run_backfills(&self, hub: &Hub, poll: Duration, shutdown: &Shutdown) {
        let one = || {
            run_loop(
                "backfills",
                shutdown.soft.clone(),
                poll,
                || hub.woken(Work::Backfills),
                || self.backfill_once(hub, None, shutdown),
            )
        };
        join_all((0..AT_ONCE).map(|_| one())).await;
    }

    /// Claims one backfill, or only this one, and works on it to its end. The soft stop lets it finish the agents it has
    /// begun, the hard stop drops them; what is left is for others then.
    pub async fn backfill_once(
        &self,
        hub: &Hub,
        only: Option<BackfillId>,
        shutdown: &Shutdown,
    ) -> Result<Progress, store::Error> {
        let Some(held) = backfill::claim(&self.pool, self.lease_secs, only).await? else {
            return Ok(Progress::Idle);
        };
        tracing::info!(workspace.id = %held.workspace, backfill.id = %held.id, "backfill {} is worked on", held.id);
        let worked = tokio::select! {
            worked = self.work(&held, shutdown) => worked,
            () = self.keep(&held) => Ok(()),
            () = shutdown.hard.cancelled() => Ok(()),
        };
        backfill::release(&self.pool, hub, &held).await?;
        worked.map(|()| Progress::Did(1))
    }

    async fn work(&self, held: &Held, shutdown: &Shutdown) -> Result<(), store::Error> {
        let mut conn = self.pool.acquire().await?;
        let pending = store::backfills::pending(&mut conn, held).await?;
        drop(conn);
        // Somewhere in these agents is something that kills processes.
        let is_poisoned = held.lost_leases as u32 >= self.leases_lost_max;
        stream::iter(pending)
            .take_until(shutdown.soft.cancelled())
            .map(Ok)
            .try_for_each_concurrent(self.concurrency, |agent| async move {
                match is_poisoned {
                    true => {
                        let why = format!(
                            "The process that worked on it was lost {} times.",
                            held.lost_leases
                        );
                        backfill::settle(&self.pool, held, agent, &Settled::Failed(why)).await
                    }
                    false => self.backfill_agent(held, agent).await,
                }
            })
            .await
    }

    /// Settles the agent, whatever comes of it. Fails only while the database is away.
    async fn backfill_agent(&self, held: &Held, agent: AgentId) -> Result<(), store::Error> {
        for _ in 0..TRIES {
            let settled = match self.try_agent(held, agent).await {
                Ok(None) => return Ok(()),
                Ok(Some(skipped)) => skipped,
                Err(ProfileError::NotWritten(reason)) => Settled::Failed(reason),
                Err(ProfileError::Edit(error)) => match error {
                    EditError::NotFound => Settled::Skipped("It has been deleted.".into()),
                    // What was written is of an agent that is no more: once again, from what it is now.
                    EditError::Stale { .. } => continue,
                    EditError::Store(error) if error.is_unavailable() => return Err(error),
                    error => {
                        tracing::error!(agent.id = %agent, error = %Causes(&error), "an agent could not be given a profile");
                        Settled::Failed("It could not be read or saved; the log says why.".into())
                    }
                },
            };
            return backfill::settle(&self.pool, held, agent, &settled).await;
        }
        let why = format!("It was saved by somebody {TRIES} times while its profile was written.");
        backfill::settle(&self.pool, held, agent, &Settled::Failed(why)).await
    }

    /// `None`: its profile is stored, and the agent settled with it.
    async fn try_agent(
        &self,
        held: &Held,
        agent: AgentId,
    ) -> Result<Option<Settled>, ProfileError> {
        let subject = self.subject(held.workspace, agent).await?;
        if !held.force && subject.agent.draft.profile().is_some() {
            return Ok(Some(Settled::Skipped("It has a profile.".into())));
        }
        let profile = self.write(&subject, None).await?;
        let revision = subject.agent.revision;
        backfill::store_profile(&self.pool, held, agent, revision, &profile).await?;
        Ok(None)
    }

    /// Renews the lease; returns when it is lost.
    async fn keep(&self, held: &Held) {
        let lease = Duration::from_secs(self.lease_secs.into());
        let mut confirmed = Instant::now();
        while confirmed.elapsed() < lease {
            tokio::time::sleep(lease / 3).await;
            match backfill::renew(&self.pool, held, self.lease_secs).await {
                Ok(true) => confirmed = Instant::now(),
                Ok(false) => return,
                Err(error) => {
                    tracing::warn!(error = %Causes(&error), "the lease of a backfill could not be extended");
                }
            }
        }
    }
}
