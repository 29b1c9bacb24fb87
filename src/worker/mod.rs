//! The worker: claims steps, asks models, runs tools. No transaction and no connection is held while anything slow
//! runs.

mod context;
mod history;
mod lease;
mod turn;

use crate::{
    config::Config,
    domain::{delegation, retry},
    lifecycle::{
        self,
        checkpoint::{Checkpointer, Commit, Outcome},
    },
    llm::Models,
    prompts::Prompts,
    runtime::{Causes, Hub, Progress, Shutdown, Work, run_loop},
    store::{
        self,
        steps::{Claimed, GiveBack},
    },
    vault::Vault,
};
use context::{Context, Loader};
use lease::Held;
use sqlx::PgPool;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// What every running step shares.
struct Shared {
    pool: PgPool,
    hub: Arc<Hub>,
    models: Models,
    loader: Loader,
    vault: Vault,
    checkpointer: Checkpointer,
    held: Arc<Held>,
    running: TaskTracker,
    limits: delegation::Limits,
    tree_size_max: u32,
    retry: retry::Limits,
    lease: Duration,
    result_chars: usize,
    /// The last claim took all that it had room for: whoever makes room wakes the loop.
    starved: AtomicBool,
}

impl Shared {
    fn made_room(&self) {
        if self.starved.load(Ordering::Acquire) {
            self.hub.wake_local(Work::Steps);
        }
    }
}

pub struct Worker {
    shared: Arc<Shared>,
    /// Steps that ask a model or run a tool: `worker.concurrency`.
    slots: Arc<Semaphore>,
    /// Steps that are held, the ones whose result is being written among them: twice as many, so that the next ones are
    /// claimed meanwhile.
    held: Arc<Semaphore>,
    shutdown: Shutdown,
    lease_secs: u32,
    batch: u32,
    poll: Duration,
}

impl Worker {
    pub fn new(
        config: &Config,
        pool: PgPool,
        hub: Arc<Hub>,
        models: Models,
        prompts: Arc<Prompts>,
        shutdown: Shutdown,
    ) -> Self {
        let (worker, spawn) = (&config.worker, &config.spawn_tasks);
        let checkpointer = Checkpointer::start(
            pool.clone(),
            hub.clone(),
            worker.lease_seconds,
            worker.batch as usize,
        );
        let shared = Shared {
            loader: Loader::new(prompts, spawn.max_depth, config.tools.max_result_chars),
            vault: Vault::from_config(&config.credentials),
            held: Arc::default(),
            running: TaskTracker::new(),
            limits: delegation::Limits {
                max_depth: spawn.max_depth as i32,
                max_children_per_call: spawn.max_children_per_call as usize,
                default_timeout_minutes: spawn.default_timeout_minutes,
                max_timeout_minutes: spawn.max_timeout_minutes,
            },
            tree_size_max: spawn.max_tree_size,
            retry: retry::Limits {
                attempts_max: config.llm.max_attempts,
                base: Duration::from_millis(config.llm.retry_base_ms),
                max: Duration::from_secs(config.llm.retry_max_seconds),
            },
            lease: Duration::from_secs(worker.lease_seconds.into()),
            result_chars: config.tools.max_result_chars,
            pool,
            hub,
            models,
            checkpointer,
            starved: AtomicBool::new(false),
        };
        Self {
            shared: Arc::new(shared),
            slots: Arc::new(Semaphore::new(worker.concurrency as usize)),
            held: Arc::new(Semaphore::new(worker.concurrency as usize * 2)),
            shutdown,
            lease_secs: worker.lease_seconds,
            batch: worker.batch,
            poll: Duration::from_millis(worker.poll_interval_ms),
        }
    }

    /// Works until the soft stop, then waits for the steps that are held; the hard stop makes them give back.
    pub async fn run(self) {
        let shared = &self.shared;
        // Leases are kept beyond the soft stop, as long as steps are held.
        let keeping = CancellationToken::new();
        let keeper = tokio::spawn(lease::keep(
            shared.held.clone(),
            shared.pool.clone(),
            shared.hub.clone(),
            self.lease_secs,
            keeping.clone(),
        ));
        run_loop(
            "worker",
            self.shutdown.soft.clone(),
            self.poll,
            || shared.hub.woken(Work::Steps),
            || self.claim_and_start(),
        )
        .await;
        shared.running.close();
        shared.running.wait().await;
        keeping.cancel();
        let _ = keeper.await;
    }

    async fn claim_and_start(&self) -> Result<Progress, store::Error> {
        let shared = &self.shared;
        // Before looking, so that room made from here on is told.
        shared.starved.store(true, Ordering::Release);
        // Slots are freed in bursts, when a batch of results has been written: all of them are to be seen at once.
        tokio::task::yield_now().await;
        let free = self
            .slots
            .available_permits()
            .min(self.held.available_permits())
            .min(self.batch as usize) as u32;
        if free == 0 {
            return Ok(Progress::Idle);
        }
        let claimed =
            lifecycle::claim::claim(&shared.pool, shared.hub.process, self.lease_secs, free)
                .await?;
        let progress = Progress::of(claimed.len(), free);
        if matches!(progress, Progress::Idle | Progress::Did(_)) {
            shared.starved.store(false, Ordering::Release);
        }
        if claimed.is_empty() {
            return Ok(progress);
        }
        let contexts = match shared.loader.load(&shared.pool, &claimed).await {
            Ok(contexts) => contexts,
            Err(error) => {
                // The steps are ours for the length of a lease; give them back rather than let them wait it out.
                for step in &claimed {
                    let _ = lifecycle::requeue::give_back(
                        &shared.pool,
                        &shared.hub,
                        &step.claim,
                        GiveBack::Shutdown,
                    )
                    .await;
                }
                return Err(error);
            }
        };
        for (step, context) in claimed.into_iter().zip(contexts) {
            // Only this loop takes permits, so there are as many as it has counted.
            let (Ok(slot), Ok(held)) = (
                self.slots.clone().try_acquire_owned(),
                self.held.clone().try_acquire_owned(),
            ) else {
                break;
            };
            let shared = shared.clone();
            let hard = self.shutdown.hard.clone();
            self.shared.running.spawn(async move {
                run_step(&shared, step, context, slot, &hard).await;
                drop(held);
                shared.made_room();
            });
        }
        Ok(progress)
    }
}

async fn run_step(
    shared: &Arc<Shared>,
    step: Claimed,
    context: Option<Result<Context, crate::prompts::PromptError>>,
    slot: OwnedSemaphorePermit,
    hard: &CancellationToken,
) {
    let mut guard = shared.held.hold(step.claim, hard);
    let lost = guard.lost.clone();
    let work = async {
        match context {
            Some(Ok(context)) => turn::run(shared, &mut guard, step, context, slot).await,
            Some(Err(error)) => {
                fail(
                    shared,
                    &step,
                    "internal",
                    &format!("The prompt can not be built: {error}"),
                )
                .await
            }
            None => {
                let text = "The task's agent can not be read. Publish the agent again and send a new message.";
                fail(shared, &step, "agent_unavailable", text).await
            }
        }
    };
    let result = tokio::select! {
        // Takes an answer that is there already: it may hold a claim that must be given back.
        biased;
        result = work => result,
        () = lost.cancelled() => Ok(()),
    };
    if let Err(error) = result {
        // The lease runs out and another attempt is made; what was committed is found by it.
        tracing::warn!(task.id = %guard.claim().key.task, step.id = %guard.claim().step, error = %Causes(&*error),
            "step {} could not be committed", guard.claim().step);
    }
    if hard.is_cancelled() {
        let _ = lifecycle::requeue::give_back(
            &shared.pool,
            &shared.hub,
            guard.claim(),
            GiveBack::Shutdown,
        )
        .await;
    }
}

async fn fail(
    shared: &Arc<Shared>,
    step: &Claimed,
    code: &str,
    message: &str,
) -> Result<(), Arc<store::Error>> {
    let failure = crate::domain::task::Failure::new(code, message);
    let outcome = Outcome::Failed {
        failure,
        model: None,
        seen_seq: None,
    };
    let claim = step.claim;
    turn::commit(shared, Commit { claim, outcome })
        .await
        .map(|_| ())
}
