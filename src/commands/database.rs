//! Opens the database that the configuration means: the one at `database.url`, or the private one in `data_dir`.

use super::UsageError;
use crate::config::{Algorithm, Config};
use crate::postgres::{Embedded, PostgresError};
use secrecy::ExposeSecret;
use sha2::{Digest, Sha256};
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use sqlx::{ConnectOptions, Connection};
use std::time::Duration;

/// An open database. `embedded` if it is the private one, which must then be closed after the pool.
#[derive(Debug)]
pub struct Database {
    pub pool: PgPool,
    pub embedded: Option<Embedded>,
}

impl Database {
    /// Runs `work`, and meanwhile sees to it that the private server runs: if it dies, it is started again.
    pub async fn look_after<T>(&self, work: impl Future<Output = T>) -> T {
        let Some(embedded) = &self.embedded else {
            return work.await;
        };
        let watch = async {
            loop {
                tokio::time::sleep(Duration::from_secs(1)).await;
                if let Err(error) = embedded.ensure_running().await {
                    tracing::warn!(%error, "the private database can not be started again: {error}");
                }
            }
        };
        tokio::select! {
            result = work => result,
            () = watch => unreachable!("the watch has no end"),
        }
    }

    /// Closes the connections, then leaves the private server, which the last process to leave stops.
    pub async fn close(self) -> Result<(), PostgresError> {
        self.pool.close().await;
        match self.embedded {
            Some(embedded) => embedded.close().await,
            None => Ok(()),
        }
    }
}

/// Why there is no database. Each message says what to do. Passwords are never part of it.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    #[error("the private database cannot be started")]
    Private(#[from] PostgresError),
    #[error(
        "database.url (DATABASE_URL) is not a valid PostgreSQL URL: postgres://user:password@host:port/name"
    )]
    BadUrl,
    #[error(
        "no database server answers at {0}: is it running, and are host and port right (DATABASE_URL)?"
    )]
    Unreachable(String, #[source] sqlx::Error),
    #[error("the server at {0} refuses user and password; check DATABASE_URL")]
    LoginRefused(String, #[source] sqlx::Error),
    #[error("the server at {place} has no database `{name}`: create it (createdb {name})")]
    NoSuchDatabase { place: String, name: String },
    #[error("the server at {0} refused the connection")]
    Other(String, #[source] sqlx::Error),
}

/// A connection that has been idle for longer is tested before it is used: the server may have restarted meanwhile.
const IDLE_UNTESTED: Duration = Duration::from_millis(500);

/// Every statement finds its rows by key, whatever its arguments and however large the tables are. So one plan is made
/// for all executions, since making it costs several times the execution. And it must not depend on how large the
/// tables were when it was made: a plan from the first minutes of a database would go on reading whole tables or whole
/// queues until somebody analyzes them. The same holds for the plans of foreign keys.
const PLANS: [(&str, &str); 4] = [
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
];

/// Connects once, so that a wrong address or password shows now and with its reason, then hands out a pool.
pub async fn open_database(config: &Config) -> Result<Database, DatabaseError> {
    let opened = open_database_unless(config, std::future::pending()).await?;
    Ok(opened.expect("nothing asks it to stop"))
}

/// Like `open_database`, but gives up when `stop` comes first: then no private server that was on its way is left.
pub async fn open_database_unless(
    config: &Config,
    stop: impl Future<Output = ()>,
) -> Result<Option<Database>, DatabaseError> {
    let settings = &config.database;
    let wait = Duration::from_secs(settings.acquire_timeout_seconds);
    let (options, embedded) = match &settings.url {
        Some(url) => {
            let options: PgConnectOptions = url
                .expose_secret()
                .parse()
                .map_err(|_| DatabaseError::BadUrl)?;
            let options = options.application_name("reconvene");
            tokio::select! {
                connected = try_connection(&options, wait) => connected?,
                () = stop => return Ok(None),
            }
            (options, None)
        }
        None => {
            let bin_dir = settings.bin_dir.as_deref();
            match Embedded::open_unless(&config.data_dir, bin_dir, stop).await? {
                Some(embedded) => (embedded.options(), Some(embedded)),
                None => return Ok(None),
            }
        }
    };
    let pool = PgPoolOptions::new()
        .max_connections(settings.max_connections)
        .acquire_timeout(wait)
        // A connection in steady use needs no question before each use.
        .test_before_acquire(false)
        .before_acquire(|connection, meta| {
            Box::pin(async move {
                if meta.idle_for >= IDLE_UNTESTED {
                    connection.ping().await?;
                }
                Ok(true)
            })
        })
        .connect_lazy_with(options.options(PLANS));
    Ok(Some(Database { pool, embedded }))
}

async fn try_connection(options: &PgConnectOptions, wait: Duration) -> Result<(), DatabaseError> {
    let place = place(options);
    let connected = tokio::time::timeout(wait, options.connect()).await;
    let err = match connected {
        Ok(Ok(connection)) => {
            let _ = PgConnection::close(connection).await;
            return Ok(());
        }
        Ok(Err(err)) => err,
        Err(_) => sqlx::Error::PoolTimedOut,
    };
    let code = match &err {
        sqlx::Error::Database(err) => err.code().map(|code| code.into_owned()),
        _ => None,
    };
    Err(match (code.as_deref(), &err) {
        (Some("28P01" | "28000"), _) => DatabaseError::LoginRefused(place, err),
        (Some("3D000"), _) => {
            let name = options.get_database().unwrap_or_default().to_owned();
            DatabaseError::NoSuchDatabase { place, name }
        }
        (None, sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut) => {
            DatabaseError::Unreachable(place, err)
        }
        _ => DatabaseError::Other(place, err),
    })
}

/// Host and port, or the socket.
fn place(options: &PgConnectOptions) -> String {
    match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    }
}

/// Why HS256 has no key to work with.
const NO_SIGNING_SECRET: &str = "auth.jwt_secret (AUTH_JWT_SECRET) is not set, and the database at database.url is shared \
    by machines that must agree on it: set it to at least 32 bytes (openssl rand -hex 32)";

/// Fills in `auth.jwt_secret` where it may be left out: with the private database it is made once and kept beside it.
/// Every command that makes or checks tokens calls this first.
pub fn settle_signing_secret(config: &mut Config) -> anyhow::Result<()> {
    if config.auth.algorithm != Algorithm::HS256 || config.auth.jwt_secret.is_some() {
        return Ok(());
    }
    if config.database.url.is_some() {
        return Err(UsageError(NO_SIGNING_SECRET.to_owned()).into());
    }
    config.auth.jwt_secret = Some(Embedded::secret(&config.data_dir, "jwt.secret")?);
    Ok(())
}

/// Fills in `credentials.keys` where it may be left out: with the private database one is made once and kept beside it.
/// Elsewhere there is none, and whoever wants to store a credential is told so.
pub fn settle_operator_key(config: &mut Config) -> anyhow::Result<()> {
    if !config.credentials.keys.is_empty() || config.database.url.is_some() {
        return Ok(());
    }
    let secret = Embedded::secret(&config.data_dir, "credentials.key")?;
    let digest = Sha256::digest(secret.expose_secret().as_bytes());
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    config.credentials.keys = vec![format!("local:{digits}").into()];
    Ok(())
}
