//! A private PostgreSQL in the data directory, for when no `database.url` is set (O-1).
//!
//! It is the machine's real PostgreSQL: production settings, its own unprivileged account when we are root, a Unix socket
//! and no port. Any number of processes share it, and none of them is special:
//! - `turn.lock`, taken exclusively, serialises starting and stopping;
//! - `attached.lock`, held shared for as long as a process uses the database, tells who is there. The kernel drops it when a
//!   process dies, however it dies. Who detaches and then gets it exclusively was the last one, and stops the server.
//!
//! A process that is killed leaves the server running: the next one to come adopts it, and the last one to go stops it. A
//! server that is killed is started again by whichever process calls `ensure_running` first.
//! Not here: the schema, pools, and anything about a database that others look after.

mod home;
mod programs;
mod server;

use home::Home;
use programs::Programs;
use secrecy::{ExposeSecret, SecretString};
use server::Server;
use sqlx::postgres::PgConnectOptions;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tracing::{info, warn};

/// Also the name of the superuser.
const DATABASE: &str = "reconvene";
/// How long to wait for another process that starts or stops the server, recovery after a crash included.
const TURN_LIMIT: Duration = Duration::from_secs(600);

/// What keeps the private database from running. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum PostgresError {
    #[error(
        "PostgreSQL's programs (initdb, postgres) were not found{}; on Debian and Ubuntu: \
         apt-get install postgresql. Or name their folder (DATABASE_BIN_DIR), or use another database (DATABASE_URL)",
        looked_in.as_ref().map(|dir| format!(" in {}", dir.display())).unwrap_or_default()
    )]
    ProgramsMissing { looked_in: Option<PathBuf> },
    #[error(
        "the database in {} was made by PostgreSQL {wanted}, but only version {found} was found; install \
         postgresql-{wanted}, or move the folder away to start afresh",
        cluster.display()
    )]
    WrongVersion {
        cluster: PathBuf,
        wanted: u32,
        found: String,
    },
    #[error("PostgreSQL {found} in {} is too old; at least version {oldest} is needed", dir.display())]
    TooOld {
        dir: PathBuf,
        found: u32,
        oldest: u32,
    },
    #[error(
        "PostgreSQL refuses to run as root, and there is neither an account `postgres` nor `nobody` that it could run as; \
         create one, or start as another user"
    )]
    NoAccount,
    #[error(
        "the account `{account}`, as which PostgreSQL runs, may not enter {}; choose a folder that it can reach \
         (DATA_DIR=/var/lib/reconvene), or allow it (chmod a+x {})",
        dir.display(), dir.display()
    )]
    NotReachable { account: String, dir: PathBuf },
    #[error(
        "the socket's path {} has {length} bytes, and the system allows {limit}; choose a shorter DATA_DIR \
         (such as /var/lib/reconvene)",
        path.display()
    )]
    SocketPathTooLong {
        path: PathBuf,
        length: usize,
        limit: usize,
    },
    #[error(
        "the database in {} belongs to another account; start as that account or as root, or choose another DATA_DIR",
        cluster.display()
    )]
    NotOurs { cluster: PathBuf },
    #[error(
        "{} is missing or unreadable, so nobody can log in to the database beside it; restore the file, or move the whole \
         folder away to start afresh",
        path.display()
    )]
    PasswordMissing {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("initdb could not make a database in {}: {output}", cluster.display())]
    Initdb { cluster: PathBuf, output: String },
    #[error("PostgreSQL did not start; its log {} ends with:\n{tail}", log.display())]
    NotStarted { log: PathBuf, tail: String },
    #[error("another process has been starting or stopping the database in {} for too long", dir.display())]
    TurnTimeout { dir: PathBuf },
    #[error("{what}")]
    Io {
        what: String,
        source: std::io::Error,
    },
    #[error("the private database refused a connection")]
    Refused(#[source] sqlx::Error),
}

/// Wraps an I/O error with what was tried.
fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> PostgresError {
    let what = what.into();
    move |source| PostgresError::Io { what, source }
}

/// This process's hold on the private database. Dropping it without [`Embedded::close`] is what a crash does: the server
/// keeps running for others and for the next start.
pub struct Embedded {
    home: Home,
    programs: Programs,
    password: SecretString,
    /// Locked shared for as long as we use the server.
    attached: File,
    server: Mutex<Server>,
}

impl Embedded {
    /// Attaches to the database in `data_dir`; makes it and starts the server if need be. Takes about a second the first
    /// time, and as long as recovery needs after a crash.
    pub async fn open(data_dir: &Path, bin_dir: Option<&Path>) -> Result<Embedded, PostgresError> {
        let opened = Self::open_unless(data_dir, bin_dir, std::future::pending()).await?;
        Ok(opened.expect("nothing asks it to stop"))
    }

    /// Like `open`, but gives up when `stop` comes first: then nothing that this call has started is left running.
    pub async fn open_unless(
        data_dir: &Path,
        bin_dir: Option<&Path>,
        stop: impl Future<Output = ()>,
    ) -> Result<Option<Embedded>, PostgresError> {
        let mut stop = std::pin::pin!(stop);
        let home = Home::prepare(data_dir)?;
        let programs = Programs::find(bin_dir, &home)?;
        let attached = open_lock(&home.attached_lock())?;
        let prepared = async {
            let turn = take_turn(&home).await?;
            attached
                .lock_shared()
                .map_err(io("the lock file cannot be locked"))?;
            let password = server::make_cluster_if_missing(&home, &programs).await?;
            Ok((turn, password))
        };
        let (turn, password) = tokio::select! {
            prepared = prepared => prepared?,
            () = &mut stop => return Ok(None),
        };
        let embedded = Embedded {
            home,
            programs,
            password,
            attached,
            server: Mutex::default(),
        };
        let started = tokio::select! {
            started = embedded.start() => started.map(Some),
            () = stop => Ok(None),
        };
        let how = match started {
            Ok(Some(true)) => "started",
            Ok(Some(false)) => "found running",
            given_up => {
                let detached = embedded.detach(turn).await;
                given_up?;
                return detached.map(|()| None);
            }
        };
        info!(
            "private database {how} in {}",
            embedded.home.dir().display()
        );
        Ok(Some(embedded))
    }

    /// Brings the server up if it is down, with a database; `true` if it was. The caller has the turn.
    async fn start(&self) -> Result<bool, PostgresError> {
        let mut server = self.server.lock().await;
        let started = server
            .start_if_dead(&self.home, &self.programs, &self.password)
            .await?;
        server::create_database_if_missing(&self.home, &self.password, DATABASE).await?;
        Ok(started)
    }

    /// How to connect to the database `reconvene`, as its owner.
    pub fn options(&self) -> PgConnectOptions {
        server::options(&self.home, &self.password, DATABASE)
    }

    /// The same as a URL for other programs (psql, pg_dump). It contains the password.
    pub fn url(&self) -> SecretString {
        let socket = self.home.socket_dir().display().to_string();
        let socket: String = socket.bytes().map(percent_encoded).collect();
        let (password, port) = (self.password.expose_secret(), home::PORT);
        format!("postgres://{DATABASE}:{password}@localhost:{port}/{DATABASE}?host={socket}").into()
    }

    /// Starts the server again if it is gone; `true` if it was. Cheap while it runs, so that a loop can call it.
    pub async fn ensure_running(&self) -> Result<bool, PostgresError> {
        let mut server = self.server.lock().await;
        if server.is_listening(&self.home).await {
            return Ok(false);
        }
        let _turn = take_turn(&self.home).await?;
        let started = server
            .start_if_dead(&self.home, &self.programs, &self.password)
            .await?;
        if started {
            warn!("the private database was gone and has been started again");
        }
        Ok(started)
    }

    /// Detaches. The last process to do so stops the server; all connections must be closed before, or they are cut.
    pub async fn close(self) -> Result<(), PostgresError> {
        let turn = take_turn(&self.home).await?;
        self.detach(turn).await
    }

    async fn detach(self, _turn: File) -> Result<(), PostgresError> {
        let Embedded {
            home,
            attached,
            server,
            ..
        } = self;
        attached
            .unlock()
            .map_err(io("the lock file cannot be unlocked"))?;
        match attached.try_lock() {
            Ok(()) => server.into_inner().stop(&home).await,
            Err(TryLockError::WouldBlock) => Ok(()),
            Err(TryLockError::Error(err)) => Err(io("the lock file cannot be locked")(err)),
        }
    }

    /// A secret of 64 hexadecimal digits kept in the file `name` of the data directory; made the first time. Processes that
    /// ask at the same instant get the same one.
    pub fn secret(data_dir: &Path, name: &str) -> Result<SecretString, PostgresError> {
        home::kept_secret(data_dir, name)
    }
}

impl std::fmt::Debug for Embedded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Embedded")
            .field("dir", &self.home.dir())
            .finish_non_exhaustive()
    }
}

/// Waits until no other process starts or stops the server. The turn ends when the file is dropped.
async fn take_turn(home: &Home) -> Result<File, PostgresError> {
    let file = open_lock(&home.turn_lock())?;
    let since = Instant::now();
    loop {
        // Asked for again and again rather than waited for in a thread, which could not be interrupted.
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if since.elapsed() < TURN_LIMIT => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(TryLockError::WouldBlock) => {
                return Err(PostgresError::TurnTimeout {
                    dir: home.dir().to_owned(),
                });
            }
            Err(TryLockError::Error(err)) => {
                return Err(io("the lock file cannot be locked")(err));
            }
        }
    }
}

fn open_lock(path: &Path) -> Result<File, PostgresError> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = std::fs::OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600);
    options
        .open(path)
        .map_err(io(format!("{} cannot be opened", path.display())))
}

fn percent_encoded(byte: u8) -> String {
    if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
        char::from(byte).to_string()
    } else {
        format!("%{byte:02X}")
    }
}
