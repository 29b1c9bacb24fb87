//! The orchestrator: moves tasks. Its loops find their work in the tables and may run in any number of processes at
//! once; what one has locked the others skip.

use crate::{
    config::Config,
    domain::delegation::SummaryLimits,
    lifecycle::{self, desk::Desk, dispatch::Dispatcher},
    runtime::{Hub, Progress, Shutdown, Work, no_hint, run_loop},
    store,
};
use sqlx::PgPool;
use std::{sync::Arc, time::Duration};

/// How often the queues are looked at, if `orchestrator.poll_interval_ms` is not less.
const SWEEP_EVERY: Duration = Duration::from_millis(1000);
/// How often a loop looks for itself, though nobody has told it to.
const UNTOLD_EVERY: Duration = Duration::from_secs(30);
/// How often what has outlived its use is removed.
const CLEAN_EVERY: Duration = Duration::from_secs(600);
/// Decision logs that one statement removes.
const FORGOTTEN_AT_ONCE: u32 = 1000;

pub struct Orchestrator {
    pool: PgPool,
    hub: Arc<Hub>,
    dispatcher: Dispatcher,
    poll: Duration,
    batch: u32,
    step_attempts_max: u32,
    early_ttl_secs: u32,
    decision_days: u32,
    desk: Option<Desk>,
}

impl Orchestrator {
    pub fn new(config: &Config, pool: PgPool, hub: Arc<Hub>) -> Self {
        let own = &config.orchestrator;
        let dispatcher = Dispatcher {
            batch: own.batch,
            attempts_max: own.max_attempts,
            resume_window: Duration::from_secs(own.resume_retry_window_seconds),
            summary: SummaryLimits {
                child_chars: config.spawn_tasks.summary_child_chars,
                total_chars: config.spawn_tasks.summary_total_chars,
            },
        };
        Self {
            pool,
            hub,
            dispatcher,
            poll: Duration::from_millis(own.poll_interval_ms),
            batch: own.batch,
            step_attempts_max: config.worker.max_attempts,
            early_ttl_secs: config.signals.early_ttl_seconds,
            decision_days: config.decision_logs.retention_days,
            desk: None,
        }
    }

    /// Decide steps go to the worker behind this desk, which is of the same process, as long as it has room.
    pub fn with_desk(self, desk: Desk) -> Self {
        Self {
            desk: Some(desk),
            ..self
        }
    }

    /// Runs all loops until the soft stop.
    pub async fn run(self, shutdown: Shutdown) {
        let this = &self;
        let stop = &shutdown.soft;
        let of = |work| move || this.hub.woken(work);
        let (look, alone) = (SWEEP_EVERY.min(this.poll), UNTOLD_EVERY);
        tokio::join!(
            run_loop("look", stop.clone(), look, no_hint, || this.look()),
            run_loop("events", stop.clone(), alone, of(Work::Events), || this
                .dispatch()),
            run_loop(
                "signal_matcher",
                stop.clone(),
                alone,
                of(Work::Signals),
                || this.match_signals()
            ),
            run_loop(
                "await_timeouts",
                stop.clone(),
                alone,
                of(Work::Awaits),
                || this.time_out()
            ),
            run_loop(
                "early_signals",
                stop.clone(),
                alone,
                of(Work::EarlySignals),
                || this.match_early()
            ),
            run_loop("reaper", stop.clone(), alone, of(Work::Leases), || this
                .reap()),
            run_loop("cleaner", stop.clone(), CLEAN_EVERY, no_hint, || this
                .clean()),
        );
    }

    /// The net below all hints: asks once for all loops whether there is work, and wakes those that have some.
    async fn look(&self) -> Result<Progress, store::Error> {
        let mut conn = self.pool.acquire().await?;
        let due = store::queues::due_all_workspaces(&mut conn, self.early_ttl_secs).await?;
        for (is_due, work) in [
            (due.events, Work::Events),
            (due.signals, Work::Signals),
            (due.awaits, Work::Awaits),
            (due.early_signals, Work::EarlySignals),
            (due.leases, Work::Leases),
        ] {
            if is_due {
                self.hub.wake_local(work);
            }
        }
        Ok(Progress::Idle)
    }

    /// Handles one batch of events.
    pub async fn dispatch(&self) -> Result<Progress, store::Error> {
        self.dispatcher
            .run_once(&self.pool, &self.hub, self.desk.as_ref())
            .await
    }

    /// The SignalMatcher: one batch of signals, and the tasks that they wake.
    pub async fn match_signals(&self) -> Result<Progress, store::Error> {
        let Self {
            pool,
            hub,
            dispatcher,
            batch,
            desk,
            ..
        } = self;
        let desk = desk.as_ref();
        lifecycle::match_signals::match_signals_and_resume(pool, hub, *batch, dispatcher, desk)
            .await
    }

    /// The AwaitTimeoutProcessor: one batch of due awaits.
    pub async fn time_out(&self) -> Result<Progress, store::Error> {
        lifecycle::time_out::time_out(&self.pool, &self.hub, self.batch).await
    }

    /// External signals that came before their wait: matches one batch, and gives up one batch of those that are too old.
    pub async fn match_early(&self) -> Result<Progress, store::Error> {
        use lifecycle::signal::{forget_early, match_early};
        let matched = match_early(&self.pool, &self.hub, self.batch).await?;
        let given_up = forget_early(&self.pool, self.early_ttl_secs, self.batch).await?;
        Ok(match (matched, given_up) {
            (more @ Progress::More(_), _) | (_, more @ Progress::More(_)) => more,
            (Progress::Idle, other) | (other, _) => other,
        })
    }

    /// Takes back one batch of steps whose lease has run out.
    pub async fn reap(&self) -> Result<Progress, store::Error> {
        lifecycle::requeue::reap(&self.pool, &self.hub, self.batch, self.step_attempts_max).await
    }

    async fn clean(&self) -> Result<Progress, store::Error> {
        let mut conn = self.pool.acquire().await?;
        lifecycle::forget::forget_old(&mut conn).await?;
        lifecycle::forget::forget_decisions(&mut conn, self.decision_days, FORGOTTEN_AT_ONCE).await
    }
}
