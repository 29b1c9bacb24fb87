//! The worker: claims steps, asks models, runs tools. No transaction and no connection is held while anything slow
//! runs.

mod context;
mod lease;
mod run_code;
mod scheduler;
mod turn;

use crate::{
    config::Config,
    domain::{delegation, retry},
    lifecycle::{
        self,
        checkpoint::{self, Checkpointer, Commit, Outcome},
        delegate::Delegations,
        desk::{Desk, Handed, Room, Seat},
    },
    llm::Models,
    prompts::Prompts,
    runtime::{Causes, Hub, Progress, Shutdown, Work, run_loop},
    store::{
        self,
        steps::{Claimed, GiveBack},
    },
    tools::{Http, run_code::Sandbox},
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
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// What every running step shares.
struct Shared {
    pool: PgPool,
    hub: Arc<Hub>,
    models: Models,
    http: Http,
    sandbox: Sandbox,
    loader: Loader,
    vault: Arc<Vault>,
    checkpointer: Checkpointer,
    delegations: Delegations,
    held: Arc<Held>,
    running: TaskTracker,
    /// The soft stop: nothing new is taken.
    stopping: CancellationToken,
    limits: delegation::Limits,
    max_output_tokens: Option<u32>,
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
    room: Room,
    desk: Option<mpsc::UnboundedReceiver<Handed>>,
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
            checkpoint::Limits {
                lease_secs: worker.lease_seconds,
                parallel_max: worker.max_parallel_tool_calls as usize,
            },
            worker.batch as usize,
        );
        let vault = Arc::new(Vault::from_config(&config.credentials));
        let delegations =
            Delegations::start(pool.clone(), spawn.max_tree_size, worker.batch as usize);
        let shared = Shared {
            loader: Loader::new(
                prompts,
                vault.clone(),
                spawn.max_depth,
                config.tools.max_result_chars,
            ),
            vault,
            http: Http::from_config(config),
            sandbox: Sandbox::from_config(&config.run_code),
            held: Arc::default(),
            running: TaskTracker::new(),
            stopping: shutdown.soft.clone(),
            limits: delegation::Limits {
                max_depth: spawn.max_depth as i32,
                max_children_per_call: spawn.max_children_per_call as usize,
                default_timeout_minutes: spawn.default_timeout_minutes,
                max_timeout_minutes: spawn.max_timeout_minutes,
            },
            max_output_tokens: config.llm.max_output_tokens,
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
            delegations,
            starved: AtomicBool::new(false),
        };
        Self {
            shared: Arc::new(shared),
            room: Room::new(worker.concurrency as usize),
            desk: None,
            shutdown,
            lease_secs: worker.lease_seconds,
            batch: worker.batch,
            poll: Duration::from_millis(worker.poll_interval_ms),
        }
    }

    /// Where the event loop of this process hands steps in. The worker runs until that one is gone.
    pub fn desk(&mut self) -> Desk {
        let (desk, inbox) = Desk::new(self.room.clone(), self.shared.hub.process, self.lease_secs);
        self.desk = Some(inbox);
        desk
    }

    /// Works until the soft stop, then waits for the steps that are held; the hard stop makes them give back.
    pub async fn run(mut self) {
        let desk = self.desk.take();
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
        let claiming = run_loop(
            "worker",
            self.shutdown.soft.clone(),
            self.poll,
            || shared.hub.woken(Work::Steps),
            || self.claim_and_start(),
        );
        tokio::join!(claiming, self.take_from(desk));
        shared.running.close();
        shared.running.wait().await;
        keeping.cancel();
        let _ = keeper.await;
    }

    /// Starts what is handed in. After the soft stop there is no room to be had; what had got some is given back.
    async fn take_from(&self, desk: Option<mpsc::UnboundedReceiver<Handed>>) {
        let stop = &self.shutdown.soft;
        let Some(mut desk) = desk else {
            return stop.cancelled().await;
        };
        let mut handed = Vec::new();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                n = desk.recv_many(&mut handed, self.batch as usize) => if n == 0 {
                    break;
                },
            }
            let steps = handed.drain(..).map(|h| (h.step, h.seat)).collect();
            if let Err(error) = self.start(steps).await {
                tracing::warn!(error = %Causes(&error), "steps could not be started, and were given back");
            }
        }
        self.room.close();
        while let Some(Handed { step, .. }) = desk.recv().await {
            self.give_back(&step).await;
        }
    }

    async fn claim_and_start(&self) -> Result<Progress, store::Error> {
        let shared = &self.shared;
        // Before looking, so that room made from here on is told.
        shared.starved.store(true, Ordering::Release);
        // Slots are freed in bursts, when a batch of results has been written: all of them are to be seen at once.
        tokio::task::yield_now().await;
        let seats: Vec<Seat> = std::iter::from_fn(|| self.room.seat())
            .take(self.batch as usize)
            .collect();
        if seats.is_empty() {
            return Ok(Progress::Idle);
        }
        let limit = seats.len() as u32;
        let claimed =
            lifecycle::claim::claim(&shared.pool, shared.hub.process, self.lease_secs, limit)
                .await?;
        let progress = Progress::of(claimed.len(), limit);
        if matches!(progress, Progress::Idle | Progress::Did(_)) {
            shared.starved.store(false, Ordering::Release);
        }
        self.start(claimed.into_iter().zip(seats).collect()).await?;
        Ok(progress)
    }

    /// Loads what the steps need and lets them run.
    async fn start(&self, steps: Vec<(Claimed, Seat)>) -> Result<(), store::Error> {
        if steps.is_empty() {
            return Ok(());
        }
        let shared = &self.shared;
        let claimed: Vec<&Claimed> = steps.iter().map(|(step, _)| step).collect();
        let contexts = match shared.loader.load(&shared.pool, &claimed).await {
            Ok(contexts) => contexts,
            Err(error) => {
                // The steps are ours for the length of a lease; give them back rather than let them wait it out.
                for step in claimed {
                    self.give_back(step).await;
                }
                return Err(error);
            }
        };
        for ((step, seat), context) in steps.into_iter().zip(contexts) {
            let shared = shared.clone();
            let hard = self.shutdown.hard.clone();
            self.shared.running.spawn(async move {
                let Seat { slot, held } = seat;
                run_step(&shared, step, context, slot, &hard).await;
                drop(held);
                shared.made_room();
            });
        }
        Ok(())
    }

    async fn give_back(&self, step: &Claimed) {
        let Shared { pool, hub, .. } = &*self.shared;
        let _ = lifecycle::requeue::give_back(pool, hub, &step.claim, GiveBack::Shutdown).await;
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
        asked: None,
    };
    let claim = step.claim;
    turn::commit(shared, Commit { claim, outcome })
        .await
        .map(|_| ())
}
