//! A process that is killed at its n-th write, for every n, while a story is told: the sweep behind `crashes.rs`.
//!
//! The database stops the process at the write; there it is killed, with whatever transactions are open, and another one
//! takes over. The story does not know: it is a client that repeats a request that has died with the process.

use crate::{
    engine::{Engine, check, rest, until},
    process::worker,
};
use reconvene::{
    config::Config,
    domain::{
        ids::{ProcessId, TaskId, WorkspaceId},
        task::TaskStatus,
    },
    lifecycle::submit::{Idempotency, Recipient, Submitted, Submitter},
    orchestrator::Orchestrator,
    runtime::{Hub, Shutdown},
};
use sqlx::{
    Connection, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use std::{
    future::Future,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::runtime::{Handle, Runtime};

/// How the database learns of the process's death.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Death {
    /// With its host: the sessions end where they stand, and all that they have open is rolled back.
    OfHost,
    /// Of the process alone: a statement that is under way is finished, and if it is a transaction by itself it counts.
    OfProcess,
}

/// What is counted until the crash.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Each {
    /// Every row. Those of one transaction are the same to the database, but not to those who wait for its locks.
    Row,
    /// Every transaction that writes.
    Transaction,
}

#[derive(Clone, Copy)]
pub struct Sweep {
    pub each: Each,
    pub death: Death,
    /// So many crash points are passed side by side, each in a database of its own.
    pub lanes: i64,
    /// A sweep with fewer points than this has not seen the story.
    pub least: i64,
    pub config: fn(&mut Config),
}

pub const SWEEP: Sweep = Sweep {
    each: Each::Transaction,
    death: Death::OfHost,
    lanes: 2,
    least: 2,
    config: |_| {},
};

impl Sweep {
    /// Tells the story again and again, with a crash at the first write after it has armed the world, the second, and so
    /// on until it ends before the crash. After each: everything at rest, the closing check of every case, and nothing that waits.
    pub async fn run(self, story: impl AsyncFn(&World)) {
        let lanes = (0..self.lanes).map(|lane| self.lane(lane, &story));
        let points = futures::future::join_all(lanes).await;
        let all: i64 = points.iter().sum();
        assert!(all >= self.least, "only {all} crash points were reached");
    }

    /// Every so manieth crash point; returns how many were reached.
    async fn lane(self, lane: i64, story: &impl AsyncFn(&World)) -> i64 {
        let mut world = World::new(self).await;
        let mut reached = 0;
        for n in (lane + 1..).step_by(self.lanes as usize) {
            world.point = n;
            let _said = SaysWhere(n);
            // A client that has lost the answer repeats its request as well.
            world.is_deaf = reached % 2 == 1;
            let told = AtomicBool::new(false);
            let telling = async {
                story(&world).await;
                rest(&world.engine.pool).await;
                told.store(true, Ordering::Release);
            };
            let ((), crashed) = tokio::join!(telling, world.crash_when_reached(&told));
            check(&world.engine.pool).await;
            world.nothing_waits().await;
            assert_eq!(world.engine.llm().refusals(), Vec::<String>::new());
            if !crashed {
                break;
            }
            reached += 1;
        }
        let live = world.live.lock().unwrap().take().unwrap();
        live.kill(&world.engine.pool, Death::OfHost).await;
        world.holder.into_inner().close().await.unwrap();
        world.engine.close().await;
        reached
    }
}

/// Says at which write it was when a story fails.
struct SaysWhere(i64);

impl Drop for SaysWhere {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("with a crash at write {}", self.0);
        }
    }
}

/// What a story is told in.
pub struct World {
    pub engine: Engine,
    sweep: Sweep,
    live: Mutex<Option<Live>>,
    /// Holds the lock that stops the process at its n-th write.
    holder: tokio::sync::Mutex<PgConnection>,
    /// The write at which this telling crashes.
    point: i64,
    is_deaf: bool,
}

/// A process: loops, and what serves requests.
struct Live {
    /// Taken when it is killed.
    runtime: Option<Runtime>,
    client: Client,
    name: String,
}

/// What serves a request, in the process that will die.
#[derive(Clone)]
pub struct Client {
    pub pool: PgPool,
    pub hub: Arc<Hub>,
    pub workspace: WorkspaceId,
    submitter: Submitter,
    handle: Handle,
}

/// The value of the sequence at which a write stops.
const CRASH_POINT: i64 = 1_000_000_000;

const BY_ROW: &str = "false";
/// The transaction itself remembers that it has been counted.
const BY_TRANSACTION: &str =
    "set_config('crash.counted', pg_current_xact_id()::text, true) = previous";

impl World {
    async fn new(sweep: Sweep) -> Self {
        let engine = Engine::scripted_with(|c| {
            c.worker.poll_interval_ms = 30;
            c.orchestrator.poll_interval_ms = 30;
            (sweep.config)(c);
        })
        .await;
        let mut holder = PgConnection::connect_with(&engine.pool.connect_options())
            .await
            .unwrap();
        let is_counted = match sweep.each {
            Each::Row => BY_ROW,
            Each::Transaction => BY_TRANSACTION,
        };
        // Every table, so that none is forgotten. A sequence counts, so that transactions that are rolled back count too.
        let sql = format!(
            "select pg_advisory_lock(7);
             create sequence writes;
             create function crash_point() returns trigger language plpgsql as $$
             declare
                 previous text = current_setting('crash.counted', true);
                 row record = case when tg_op = 'DELETE' then old else new end;
             begin
                 if current_setting('application_name') not like 'doomed%' then return row; end if;
                 if {is_counted} then return row; end if;
                 if nextval('writes') = {CRASH_POINT} then perform pg_advisory_xact_lock_shared(7); end if;
                 return row;
             end $$;
             create function lose() returns trigger language plpgsql as $$ begin return null; end $$;
             do $$ declare name text; begin
                 for name in select relname from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace loop
                     execute format('create trigger crash_point before insert or update or delete on %I
                         for each row execute function crash_point()', name);
                 end loop;
             end $$;"
        );
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql))
            .execute(&mut holder)
            .await
            .unwrap();
        let live = Live::start(&engine);
        Self {
            engine,
            sweep,
            live: Mutex::new(Some(live)),
            holder: tokio::sync::Mutex::new(holder),
            point: 0,
            is_deaf: false,
        }
    }

    /// Writes count from here on. What a story does before is another one's matter.
    pub async fn arm(&self) {
        sqlx::query("select setval('writes', $1)")
            .bind(CRASH_POINT - self.point)
            .execute(&self.engine.pool)
            .await
            .unwrap();
    }

    /// Kills the process when it has come to its last write, and starts another one. `false`: the story ended before.
    async fn crash_when_reached(&self, told: &AtomicBool) -> bool {
        let stands = "select count(*) from pg_stat_activity where datname = current_database()
            and application_name like 'doomed%' and wait_event_type = 'Lock' and wait_event = 'advisory'";
        loop {
            // In this order: what waits at the end of a story was waiting before it.
            let is_told = told.load(Ordering::Acquire);
            if self.engine.count(stands).await > 0 {
                break;
            }
            if is_told {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        let live = self.live.lock().unwrap().take().unwrap();
        let dead = live.client.hub.process;
        let mut holder = self.holder.lock().await;
        let run = async |holder: &mut PgConnection, sql: &'static str| {
            sqlx::raw_sql(sql).execute(holder).await.unwrap();
        };
        if self.sweep.death == Death::OfProcess {
            live.kill_after(
                &self.engine.pool,
                run(&mut holder, "select pg_advisory_unlock(7)"),
            )
            .await;
            run(&mut holder, "select pg_advisory_lock(7)").await;
        } else {
            live.kill(&self.engine.pool, Death::OfHost).await;
        }
        expire_leases_of(&self.engine.pool, dead).await;
        *self.live.lock().unwrap() = Some(Live::start(&self.engine));
        true
    }

    /// Sends a request until it has been answered. One that dies with its process is sent to the next one.
    pub async fn request<T, F>(&self, what: impl Fn(Client) -> F) -> T
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let mut unheard = u32::from(self.is_deaf);
        loop {
            let client = self.live.lock().unwrap().as_ref().map(|l| l.client.clone());
            let Some(client) = client else {
                tokio::time::sleep(Duration::from_millis(3)).await;
                continue;
            };
            let handle = client.handle.clone();
            match handle.spawn(what(client)).await {
                Ok(_) if unheard > 0 => unheard -= 1,
                Ok(answer) => return answer,
                Err(died) if died.is_cancelled() => {}
                Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
            }
        }
    }

    async fn submit(&self, to: Recipient, text: &str, skip_wait: bool) -> Submitted {
        let mut message = self.engine.message(to, text);
        message.skip_wait = skip_wait;
        message.idempotency = Some(Idempotency {
            key: uuid::Uuid::new_v4().to_string(),
            body_hash: [1; 32],
        });
        self.request(move |client| {
            let message = message.clone();
            async move { client.submitter.submit(message).await.unwrap() }
        })
        .await
    }

    /// A new task on the default agent, which may delegate.
    pub async fn post(&self, text: &str) -> TaskId {
        self.post_to(Recipient::DefaultAgent, text).await
    }

    pub async fn post_to(&self, to: Recipient, text: &str) -> TaskId {
        self.submit(to, text, false).await.task
    }

    pub async fn append(&self, task: TaskId, text: &str) -> Submitted {
        self.submit(Recipient::Task(task), text, false).await
    }

    pub async fn append_and_skip(&self, task: TaskId, text: &str) -> Submitted {
        self.submit(Recipient::Task(task), text, true).await
    }

    /// The task is there; waits until it has this status.
    pub async fn until(&self, task: TaskId, status: TaskStatus) {
        self.engine.until(task, status).await;
    }

    pub async fn end(&self, task: TaskId) -> (TaskStatus, String) {
        self.engine.end(task).await
    }

    /// Every story ends: no task is active, no wait is pending, no model call is under way.
    async fn nothing_waits(&self) {
        let faults = [
            (
                "active tasks",
                "select count(*) from tasks where status not in ('completed', 'failed', 'stopped')",
            ),
            (
                "pending awaits",
                "select count(*) from awaits where status = 'pending'",
            ),
            (
                "open groups",
                "select count(*) from await_groups where status = 'open'",
            ),
        ];
        for (what, sql) in faults {
            assert_eq!(self.engine.count(sql).await, 0, "{what}");
        }
    }
}

/// What its leases would come to in half a minute.
async fn expire_leases_of(pool: &PgPool, dead: ProcessId) {
    sqlx::query(
        "update steps set lease_expires_at = now() - interval '1 second' where status = 'running' and worker_id = $1",
    )
    .bind(dead.0)
    .execute(pool)
    .await
    .unwrap();
}

impl Live {
    fn start(engine: &Engine) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let name = format!("doomed-{}", fastrand::u32(..));
        let options = PgConnectOptions::clone(&engine.pool.connect_options());
        let hub = Arc::new(Hub::new(ProcessId::new()));
        let entered = runtime.enter();
        let pool = PgPoolOptions::new()
            .max_connections(6)
            .connect_lazy_with(options.application_name(&name));
        let shutdown = Shutdown::new();
        let mut worker = worker(&engine.config, &pool, &hub, &shutdown);
        let orchestrator = Orchestrator::new(&engine.config, pool.clone(), hub.clone());
        runtime.spawn(orchestrator.with_desk(worker.desk()).run(shutdown));
        runtime.spawn(worker.run());
        let client = Client {
            submitter: Submitter::start(pool.clone(), hub.clone()),
            workspace: engine.workspace(),
            handle: runtime.handle().clone(),
            pool,
            hub,
        };
        drop(entered);
        Self {
            runtime: Some(runtime),
            client,
            name,
        }
    }

    /// Nothing of it runs any more, and nothing of it is left in the database but what it has committed.
    async fn kill(self, pool: &PgPool, death: Death) {
        let name = self.name.clone();
        let after = async {
            if death == Death::OfHost {
                sqlx::query(
                    "select pg_terminate_backend(pid) from pg_stat_activity
                     where datname = current_database() and application_name = $1",
                )
                .bind(&name)
                .execute(pool)
                .await
                .unwrap();
            }
        };
        self.kill_after(pool, after).await;
    }

    /// Ends all code of it, does `then`, and waits until its sessions are gone.
    async fn kill_after(mut self, pool: &PgPool, then: impl Future<Output = ()>) {
        let runtime = self.runtime.take().unwrap();
        let name = self.name.clone();
        drop(self);
        tokio::task::spawn_blocking(move || runtime.shutdown_timeout(Duration::from_secs(10)))
            .await
            .unwrap();
        then.await;
        until("the sessions of the dead process are gone", async || {
            let sql = "select count(*) from pg_stat_activity where datname = current_database() and application_name = $1";
            let left: i64 = sqlx::query_scalar(sql)
                .bind(&name)
                .fetch_one(pool)
                .await
                .unwrap();
            left == 0
        })
        .await;
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
