//! `serve`: the roles of one process, from start to the end of the grace.

use super::{database, migrate};
use crate::api::{self, App, Parts, auth::Auth, outage::Outage, rate::Limits};
use crate::bus::Bus;
use crate::config::Config;
use crate::domain::ids::ProcessId;
use crate::lifecycle::submit::Submitter;
use crate::llm::Models;
use crate::orchestrator::Orchestrator;
use crate::profiles::Profiles;
use crate::prompts::Prompts;
use crate::roster::Assembler;
use crate::runtime::{Hub, Shutdown};
use crate::vault::Vault;
use crate::worker::Worker;
use clap::ValueEnum;
use sqlx::PgPool;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;

/// What a process may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Takes requests and shows state
    Api,
    /// Asks models, runs tools
    Worker,
    /// Moves tasks
    Orchestrator,
}

impl Role {
    pub const ALL: [Role; 3] = [Role::Api, Role::Worker, Role::Orchestrator];
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Api => "api",
            Role::Worker => "worker",
            Role::Orchestrator => "orchestrator",
        })
    }
}

/// The roles of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles {
    pub api: bool,
    pub worker: bool,
    pub orchestrator: bool,
}

impl Roles {
    pub const ALL: Roles = Roles {
        api: true,
        worker: true,
        orchestrator: true,
    };

    pub fn of(roles: &[Role]) -> Roles {
        Roles {
            api: roles.contains(&Role::Api),
            worker: roles.contains(&Role::Worker),
            orchestrator: roles.contains(&Role::Orchestrator),
        }
    }

    fn names(self) -> Vec<String> {
        [
            (self.api, Role::Api),
            (self.worker, Role::Worker),
            (self.orchestrator, Role::Orchestrator),
        ]
        .into_iter()
        .filter(|(has, _)| *has)
        .map(|(_, role)| role.to_string())
        .collect()
    }
}

/// A process that serves: its loops, and its listeners if it has any.
pub struct Service {
    pub pool: PgPool,
    pub hub: Arc<Hub>,
    pub submitter: Submitter,
    /// Where the API is reached; `None` without the role.
    pub address: Option<SocketAddr>,
    /// Where its health is asked, if that has a port of its own.
    pub health_address: Option<SocketAddr>,
    pub shutdown: Shutdown,
    parts: JoinSet<&'static str>,
    /// What ends after them: the bus, which carries their hints, and the answers about health, since a process that stops
    /// is alive.
    last_parts: JoinSet<&'static str>,
    last_shutdown: Shutdown,
    grace: Duration,
}

impl Service {
    /// Starts all parts on an open, migrated database. Fails before any part has started.
    pub async fn start(config: Config, roles: Roles, pool: PgPool) -> anyhow::Result<Self> {
        let config = Arc::new(config);
        let shutdown = Shutdown::new();
        let hub = Arc::new(Hub::new(ProcessId::new()));
        let submitter = Submitter::start(pool.clone(), hub.clone());
        let models = Models::from_config(&config)?;
        let prompts = Arc::new(Prompts::load(config.prompts_dir.as_deref())?);
        let roster = Arc::new(Assembler::with_base_tools(config.spawn_tasks.max_depth));
        let profiles = Arc::new(Profiles::new(
            &config,
            pool.clone(),
            models.clone(),
            prompts.clone(),
            roster.clone(),
        ));
        let vault = Arc::new(Vault::from_config(&config.credentials));
        let auth = Arc::new(Auth::new(&config.auth)?);
        let listener = match roles.api {
            true => Some(listen(&config, config.server.port, "server.port").await?),
            false => None,
        };
        let health_listener = match config.server.health_port {
            // The API answers there already.
            Some(port) if roles.api && port != 0 && port == config.server.port => None,
            Some(port) => Some(listen(&config, port, "server.health_port").await?),
            None => None,
        };
        let address_of = |listener: &Option<TcpListener>| {
            listener.as_ref().map(TcpListener::local_addr).transpose()
        };
        let (address, health_address) = (address_of(&listener)?, address_of(&health_listener)?);
        let names = roles.names();

        let mut parts = JoinSet::new();
        let bus = Arc::new(Bus::new(hub.clone(), pool.clone(), names.clone()));
        let last_shutdown = Shutdown::new();
        let mut last_parts = JoinSet::new();
        last_parts.spawn({
            let (bus, shutdown) = (bus.clone(), last_shutdown.clone());
            async move {
                bus.run(shutdown).await;
                "the bus"
            }
        });
        let app = App::new(Parts {
            pool: pool.clone(),
            config: config.clone(),
            hub: hub.clone(),
            outage: Arc::new(Outage::new(bus.clone(), &pool)),
            bus,
            submitter: submitter.clone(),
            auth,
            limits: Arc::new(Limits::new(&config.limits)),
            models: models.clone(),
            roster,
            profiles: profiles.clone(),
            prompts: prompts.clone(),
            vault: vault.clone(),
            roles: names.into(),
            shutdown: shutdown.soft.clone(),
        });
        let mut worker = roles.worker.then(|| {
            Worker::new(
                &config,
                pool.clone(),
                hub.clone(),
                models,
                prompts,
                shutdown.clone(),
            )
        });
        if roles.orchestrator {
            let orchestrator = Orchestrator::new(&config, pool.clone(), hub.clone());
            let orchestrator = match &mut worker {
                Some(worker) => orchestrator.with_desk(worker.desk()),
                None => orchestrator,
            };
            let shutdown = shutdown.clone();
            parts.spawn(async move {
                orchestrator.run(shutdown).await;
                "the orchestrator"
            });
        }
        if roles.worker {
            let (hub, shutdown) = (hub.clone(), shutdown.clone());
            let poll = Duration::from_millis(config.worker.poll_interval_ms);
            parts.spawn(async move {
                profiles.run_backfills(&hub, poll, &shutdown).await;
                "the backfills"
            });
        }
        if let Some(worker) = worker {
            parts.spawn(async move {
                worker.run().await;
                "the worker"
            });
        }
        if let Some(listener) = health_listener {
            let server = axum::serve(listener, api::health_router(app.clone()));
            let stop = last_shutdown.soft.clone();
            last_parts.spawn(async move {
                // Its answers are short; nobody loses anything by the end of the last one.
                tokio::select! {
                    result = server => if let Err(error) = result {
                        tracing::error!(%error, "the answers about health ended: {error}");
                    },
                    () = stop.cancelled() => {}
                }
                "the health port"
            });
        }
        if let Some(listener) = listener {
            let (soft, hard) = (shutdown.soft.clone(), shutdown.hard.clone());
            parts.spawn(async move {
                let router = api::router(app).into_make_service_with_connect_info::<SocketAddr>();
                let server =
                    axum::serve(listener, router).with_graceful_shutdown(soft.cancelled_owned());
                tokio::select! {
                    result = server => if let Err(error) = result {
                        tracing::error!(%error, "the API ended: {error}");
                    },
                    () = hard.cancelled() => {}
                }
                "the API"
            });
        }
        let grace = Duration::from_secs(config.server.shutdown_grace_seconds);
        Ok(Self {
            pool,
            hub,
            submitter,
            address,
            health_address,
            shutdown,
            parts,
            last_parts,
            last_shutdown,
            grace,
        })
    }

    /// Serves until a signal asks for the end, then stops: nothing new is taken, what is held is finished within the
    /// grace, the rest is given back (O-4). A part that ends by itself ends the process with an error.
    pub async fn run_until_signal(mut self, signals: &mut Signals) -> anyhow::Result<()> {
        let early = tokio::select! {
            () = signals.received() => None,
            part = self.parts.join_next() => Some(part),
            part = self.last_parts.join_next() => Some(part),
        };
        self.stop(signals).await;
        match early {
            Some(Some(Ok(part))) => anyhow::bail!("{part} ended although nothing had asked for it"),
            Some(Some(Err(panic))) => {
                anyhow::bail!("a part ended although nothing had asked for it: {panic}")
            }
            Some(None) => anyhow::bail!("this process has nothing to do"),
            None => Ok(()),
        }
    }

    /// Stops all parts: softly, and after the grace or at one more signal hard.
    pub async fn stop(mut self, signals: &mut Signals) {
        tracing::info!(
            "stopping: finishing what is held, for at most {:?}",
            self.grace
        );
        self.shutdown.soft.cancel();
        let is_done = tokio::select! {
            () = all_of(&mut self.parts) => true,
            () = tokio::time::sleep(self.grace) => false,
            () = signals.received() => false,
        };
        if !is_done {
            tracing::info!("the grace is over: giving back what is left");
            self.shutdown.hard.cancel();
            let _ = tokio::time::timeout(LAST_STATEMENTS, all_of(&mut self.parts)).await;
        }
        self.last_shutdown.soft.cancel();
        let _ = tokio::time::timeout(LAST_STATEMENTS, all_of(&mut self.last_parts)).await;
    }
}

/// The signals that ask a process to end: Ctrl-C and SIGTERM. One that comes between two calls is not lost.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// From now on they no longer kill the process.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Waits for the next one.
    pub async fn received(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// For giving back and for the last hints: a few statements each. A database that is away must not keep the process.
const LAST_STATEMENTS: Duration = Duration::from_secs(5);

async fn all_of(parts: &mut JoinSet<&'static str>) {
    while parts.join_next().await.is_some() {}
}

/// Runs the roles until a signal, which may come while all is still on its way up.
pub async fn run(mut config: Config, roles: Roles) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    database::settle_signing_secret(&mut config)?;
    database::settle_operator_key(&mut config)?;
    let Some(database) = database::open_database_unless(&config, signals.received()).await? else {
        tracing::info!("asked to stop before the database was open");
        return Ok(());
    };
    let served = async {
        tokio::select! {
            settled = migrate::settle(&database) => settled?,
            () = signals.received() => {
                tracing::info!("asked to stop before anything was served");
                return Ok(());
            }
        }
        let service = Service::start(config, roles, database.pool.clone()).await?;
        announce(&service, roles)?;
        service.run_until_signal(&mut signals).await
    };
    let result = database.look_after(served).await;
    database.close().await?;
    result
}

fn announce(service: &Service, roles: Roles) -> anyhow::Result<()> {
    let names = roles.names().join(", ");
    tracing::info!(process.id = %service.hub.process, "serving {names}");
    if let Some(address) = service.address {
        super::print(format!("Reconvene listens on http://{address}"))?;
    }
    if let Some(address) = service.health_address {
        super::print(format!("Health is asked at http://{address}/healthz"))?;
    }
    Ok(())
}

/// `setting` is the one that gives the port.
async fn listen(config: &Config, port: u16, setting: &str) -> anyhow::Result<TcpListener> {
    let host = config.server.host.as_str();
    TcpListener::bind((host, port)).await.map_err(|error| {
        let variable = Config::variable(setting);
        let advice = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                format!("another program listens there; stop it, or set {setting} ({variable}), 0 for any free one")
            }
            std::io::ErrorKind::PermissionDenied => {
                format!("this user may not listen there; choose a port above 1023 ({variable})")
            }
            _ => format!("check server.host and {setting} (SERVER_HOST, {variable})"),
        };
        anyhow::anyhow!("can not listen on {host}:{port}: {error}; {advice}")
    })
}
