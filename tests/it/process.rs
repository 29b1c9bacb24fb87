//! Processes of a test: each with a thread, a runtime and a pool of its own, so that one can be killed or suspended as
//! the operating system does it, with everything that it has spawned. And a barrier inside the database.

use crate::engine::until;
use reconvene::{
    bus::Bus, config::Config, domain::ids::ProcessId, llm::Models, orchestrator::Orchestrator,
    prompts::Prompts, runtime::Hub, runtime::Shutdown, worker::Worker,
};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc as blocking,
    },
    thread::JoinHandle,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixStream},
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

/// The loops of one process.
pub struct Process {
    /// Of its connections.
    options: PgConnectOptions,
    commands: Option<mpsc::UnboundedSender<Command>>,
    thread: Option<JoinHandle<()>>,
    pub hub: Arc<Hub>,
}

enum Command {
    /// Says that it stands still, and does so until the other end speaks or is dropped.
    Suspend(oneshot::Sender<()>, blocking::Receiver<()>),
    Stop,
}

/// Dropping it lets the process go on.
#[must_use]
pub struct Suspended(#[allow(dead_code, reason = "dropping it is its use")] blocking::Sender<()>);

/// Which loops a process runs.
#[derive(Clone, Copy)]
pub struct Roles {
    pub worker: bool,
    pub orchestrator: bool,
    /// Tells other processes, and listens to them.
    pub bus: bool,
}

impl Process {
    pub fn start(config: &Config, pool: &PgPool, worker: bool, orchestrator: bool) -> Self {
        let hub = Arc::new(Hub::new(ProcessId::new()));
        Self::start_on(hub, config, pool, worker, orchestrator)
    }

    pub fn start_on(
        hub: Arc<Hub>,
        config: &Config,
        pool: &PgPool,
        worker: bool,
        orchestrator: bool,
    ) -> Self {
        let roles = Roles {
            worker,
            orchestrator,
            bus: false,
        };
        Self::with_roles(hub, config, pool, roles)
    }

    /// On the database of `pool`, through connections of its own.
    pub fn with_roles(hub: Arc<Hub>, config: &Config, pool: &PgPool, roles: Roles) -> Self {
        let (sender, commands) = mpsc::unbounded_channel();
        let config = config.clone();
        let name = format!("process-{}", fastrand::u32(..));
        let options = (*pool.connect_options()).clone().application_name(&name);
        let its_options = options.clone();
        let its_hub = hub.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(live(config, its_hub, its_options, roles, commands));
        });
        Self {
            options,
            commands: Some(sender),
            thread: Some(thread),
            hub,
        }
    }

    /// Ends gracefully: what is held is finished.
    pub async fn stop(mut self) {
        self.command(Command::Stop);
        self.join().await;
    }

    /// Ends everything where it stands. Transactions that are open are rolled back, leases stay.
    pub async fn kill(mut self) {
        self.commands = None;
        self.join().await;
        // What a lost peer would come to at last: a session that waits for a lock does not notice that its client is gone.
        let sessions =
            "from pg_stat_activity where datname = current_database() and application_name = $1";
        let name = self.options.get_application_name().unwrap().to_owned();
        let end = format!("select pg_terminate_backend(pid) {sessions}");
        let count = format!("select count(*) {sessions}");
        let options = self.options.clone().application_name("killer");
        let pool = PgPoolOptions::new().connect_with(options).await.unwrap();
        sqlx::query(AssertSqlSafe(end))
            .bind(&name)
            .execute(&pool)
            .await
            .unwrap();
        until("the sessions of the dead process are gone", async || {
            let left: i64 = sqlx::query_scalar(AssertSqlSafe(count.clone()))
                .bind(&name)
                .fetch_one(&pool)
                .await
                .unwrap();
            left == 0
        })
        .await;
        pool.close().await;
    }

    /// Returns when nothing of the process moves any more.
    pub async fn suspend(&self) -> Suspended {
        let (resume, wait) = blocking::channel();
        let (stands, still) = oneshot::channel();
        self.command(Command::Suspend(stands, wait));
        still.await.unwrap();
        Suspended(resume)
    }

    fn command(&self, command: Command) {
        let sent = self.commands.as_ref().unwrap().send(command);
        assert!(sent.is_ok(), "the process has ended by itself");
    }

    async fn join(&mut self) {
        let thread = self.thread.take().unwrap();
        let ended = tokio::task::spawn_blocking(move || thread.join()).await;
        ended.unwrap().expect("no loop of the process panics");
    }
}

async fn live(
    config: Config,
    hub: Arc<Hub>,
    options: PgConnectOptions,
    roles: Roles,
    mut commands: mpsc::UnboundedReceiver<Command>,
) {
    let pool = PgPoolOptions::new()
        .max_connections(config.database.max_connections.min(8))
        .connect_lazy_with(options);
    let shutdown = Shutdown::new();
    let mut loops = JoinSet::new();
    let mut worker = roles
        .worker
        .then(|| worker(&config, &pool, &hub, &shutdown));
    if roles.orchestrator {
        let orchestrator = Orchestrator::new(&config, pool.clone(), hub.clone());
        let orchestrator = match &mut worker {
            Some(worker) => orchestrator.with_desk(worker.desk()),
            None => orchestrator,
        };
        loops.spawn(orchestrator.run(shutdown.clone()));
    }
    if let Some(worker) = worker {
        loops.spawn(worker.run());
    }
    if roles.bus {
        let bus = Bus::new(hub, pool.clone(), vec!["test".into()]);
        let shutdown = shutdown.clone();
        loops.spawn(async move { bus.run(shutdown).await });
    }
    while let Some(command) = commands.recv().await {
        match command {
            Command::Suspend(stands, wait) => {
                let _ = stands.send(());
                // Blocks the only thread of this runtime, heartbeat and all.
                let _ = wait.recv();
            }
            Command::Stop => {
                shutdown.soft.cancel();
                while let Some(ended) = loops.join_next().await {
                    ended.unwrap();
                }
                return;
            }
        }
    }
}

pub fn worker(config: &Config, pool: &PgPool, hub: &Arc<Hub>, shutdown: &Shutdown) -> Worker {
    Worker::new(
        config,
        pool.clone(),
        hub.clone(),
        Models::from_config(config).unwrap(),
        Arc::new(Prompts::load(None).unwrap()),
        shutdown.clone(),
    )
}

/// Holds inserts of certain rows, inside their transactions, until it is opened.
pub struct Barrier {
    holder: PgConnection,
    pool: PgPool,
}

impl Barrier {
    /// `when` is a condition on `new`, the row. One barrier per database.
    pub async fn before_insert(pool: &PgPool, table: &str, when: &str) -> Self {
        let mut holder = PgConnection::connect_with(&pool.connect_options())
            .await
            .unwrap();
        let sql = format!(
            "select pg_advisory_lock(7);
             create function test_barrier() returns trigger language plpgsql as
                 $$ begin perform pg_advisory_xact_lock_shared(7); return new; end $$;
             create trigger test_barrier before insert on {table}
                 for each row when ({when}) execute function test_barrier();"
        );
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&mut holder)
            .await
            .unwrap();
        let pool = pool.clone();
        Self { holder, pool }
    }

    /// Waits until a transaction stands before it.
    pub async fn reached(&self) {
        until("a transaction stands before the barrier", async || {
            waiting(&self.pool, "advisory").await > 0
        })
        .await;
    }

    pub async fn open(mut self) {
        sqlx::query("select pg_advisory_unlock(7)")
            .execute(&mut self.holder)
            .await
            .unwrap();
    }
}

/// How many sessions of this database wait for a lock of this kind: `advisory`, `transactionid`, `tuple`.
pub async fn waiting(pool: &PgPool, kind: &str) -> i64 {
    sqlx::query_scalar(
        "select count(*) from pg_stat_activity
         where datname = current_database() and wait_event_type = 'Lock' and wait_event = $1",
    )
    .bind(kind)
    .fetch_one(pool)
    .await
    .unwrap()
}

/// A connection that holds the row lock of a task until dropped.
pub async fn lock_task(pool: &PgPool, task: reconvene::domain::ids::TaskId) -> PgConnection {
    let mut conn = PgConnection::connect_with(&pool.connect_options())
        .await
        .unwrap();
    sqlx::raw_sql("begin").execute(&mut conn).await.unwrap();
    sqlx::query("select 1 from tasks where id = $1 for no key update")
        .bind(task.0)
        .execute(&mut conn)
        .await
        .unwrap();
    conn
}

/// Stands between processes and their database, and can be cut.
pub struct Proxy {
    /// A pool that goes through it, to start processes on.
    pub pool: PgPool,
    state: Arc<watch::Sender<bool>>,
    hold: Arc<watch::Sender<bool>>,
    refused: Arc<AtomicUsize>,
}

/// Passes bytes on, but keeps the answers to commits back while `hold` says so.
async fn pass_on(
    client: &mut TcpStream,
    server: &mut (impl AsyncRead + AsyncWrite + Unpin),
    mut hold: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let (mut asked, mut answered) = (vec![0; 65536], vec![0; 65536]);
    loop {
        tokio::select! {
            n = client.read(&mut asked) => {
                let asked = &asked[..n?];
                if asked.is_empty() {
                    return Ok(());
                }
                server.write_all(asked).await?;
                if *hold.borrow() && asked.windows(6).any(|word| word == b"COMMIT") {
                    let _ = hold.wait_for(|hold| !hold).await;
                }
            }
            n = server.read(&mut answered) => {
                let answered = &answered[..n?];
                if answered.is_empty() {
                    return Ok(());
                }
                client.write_all(answered).await?;
            }
        }
    }
}

impl Proxy {
    pub async fn start(pool: &PgPool) -> Self {
        let options = pool.connect_options();
        let mut url = options.to_url_lossy();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(watch::Sender::new(false));
        let refused = Arc::new(AtomicUsize::new(0));
        let hold = Arc::new(watch::Sender::new(false));
        let (its_state, its_hold, its_refused) = (state.clone(), hold.clone(), refused.clone());
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut cut = its_state.subscribe();
                if *cut.borrow() {
                    its_refused.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                let options = options.clone();
                let hold = its_hold.subscribe();
                tokio::spawn(async move {
                    let port = options.get_port();
                    // The cluster of the tests has no port, one of a developer may have no socket.
                    let passing = async {
                        match options.get_socket() {
                            Some(dir) => {
                                let socket = dir.join(format!(".s.PGSQL.{port}"));
                                let mut server = UnixStream::connect(socket).await.unwrap();
                                pass_on(&mut client, &mut server, hold).await
                            }
                            None => {
                                let target = (options.get_host(), port);
                                let mut server = TcpStream::connect(target).await.unwrap();
                                pass_on(&mut client, &mut server, hold).await
                            }
                        }
                    };
                    tokio::select! {
                        _ = passing => {}
                        _ = cut.wait_for(|cut| *cut) => {}
                    }
                });
            }
        });
        // A socket that is set would go before the host.
        url.set_query(None);
        url.set_host(Some("127.0.0.1")).unwrap();
        url.set_port(Some(port)).unwrap();
        Self {
            pool: PgPoolOptions::new().connect_lazy(url.as_str()).unwrap(),
            state,
            hold,
            refused,
        }
    }

    /// From now on nobody hears that a commit has succeeded, until the answers are let through.
    pub fn hold_commits(&self, hold: bool) {
        self.hold.send_replace(hold);
    }

    /// Breaks every connection and refuses new ones.
    pub fn cut(&self) {
        self.state.send_replace(true);
    }

    pub fn mend(&self) {
        self.state.send_replace(false);
    }

    pub fn refused(&self) -> usize {
        self.refused.load(Ordering::Relaxed)
    }
}
