//! `migrate`: brings the schema up to date, on a live database too (O-6).
//!
//! Every wait for a lock is bounded: a migration that queues for a table would make everyone queue behind it. What was not
//! had in time is given up and tried again from where it stopped; each migration is a transaction of its own.

use super::database::{self, Database};
use super::serve::Signals;
use crate::config::Config;
use anyhow::{Context, anyhow};
use sqlx::migrate::{Migrate, MigrateError, Migrator};
use sqlx::postgres::{PgConnection, PgPool};
use sqlx::{ConnectOptions, Connection};
use std::time::{Duration, Instant};
use tracing::warn;

/// For the lock that keeps other migrators out, which holds up nobody else. Each migration sets a shorter time for itself,
/// since whoever needs the same table waits behind it.
const LOCK_TIMEOUT: &str = "5s";
/// How long a run that meets locks goes on trying, and the longest pause between.
const PATIENCE: Duration = Duration::from_secs(180);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Where sqlx keeps its books.
const BOOKS: &str = "_sqlx_migrations";

/// All migrations, compiled in.
pub fn migrator() -> Migrator {
    let mut migrator = sqlx::migrate!("./migrations");
    // A newer version may have been here, and this one been deployed again: that is no reason not to start.
    migrator.set_ignore_missing(true);
    migrator
}

pub async fn run(config: &Config, json: bool) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let stopped = || anyhow!("stopped; what was applied before stays, the rest is unchanged");
    let Some(database) = database::open_database_unless(config, signals.received()).await? else {
        return Err(stopped());
    };
    let outcome = tokio::select! {
        outcome = apply(&database.pool) => outcome,
        // A migration that was under way is rolled back when its connection goes.
        () = signals.received() => Err(stopped()),
    };
    database.close().await?;
    let applied = outcome?;
    match (json, applied.as_slice()) {
        (true, _) => super::print(serde_json::json!({ "applied": applied, "up_to_date": true })),
        (false, []) => super::print("the schema is up to date"),
        (false, applied) => super::print(format_args!(
            "{} migrations applied; the schema is up to date",
            applied.len()
        )),
    }
}

/// Applies what is missing and returns its versions. Several processes may call it at once.
pub async fn apply(pool: &PgPool) -> anyhow::Result<Vec<i64>> {
    apply_all(&migrator(), pool, PATIENCE).await
}

/// Applies what is missing of these migrations, and gives up when locks were in the way for so long.
pub async fn apply_all(
    migrator: &Migrator,
    pool: &PgPool,
    patience: Duration,
) -> anyhow::Result<Vec<i64>> {
    let missing = missing(migrator, pool).await?;
    let begun = Instant::now();
    let mut tries = 1;
    while let Err(err) = apply_once(migrator, pool).await {
        let Some(obstacle) = obstacle(&err) else {
            return Err(err).context("the schema cannot be brought up to date");
        };
        if begun.elapsed() >= patience {
            return Err(err).with_context(|| {
                format!(
                    "the schema cannot be brought up to date: {obstacle} (pg_stat_activity shows it), and did so for {} \
                     seconds; migrate again when it has ended. What was applied before stays, the rest is unchanged",
                    begun.elapsed().as_secs()
                )
            });
        }
        warn!("{obstacle}; trying again ({tries})");
        let pause = PAUSE_MAX.min(Duration::from_millis(500) * tries);
        tokio::time::sleep(pause).await;
        tries += 1;
    }
    Ok(missing)
}

async fn apply_once(migrator: &Migrator, pool: &PgPool) -> Result<(), MigrateError> {
    // A connection of its own: sqlx's lock belongs to the session, and a failed run leaves it taken. A migration
    // that takes long is not a slow query to report with its whole text.
    let options = pool
        .connect_options()
        .as_ref()
        .clone()
        .options([
            ("lock_timeout", LOCK_TIMEOUT),
            // Every run asks for sqlx's books `if not exists`, and would be told each time that they do.
            ("client_min_messages", "warning"),
        ])
        .disable_statement_logging();
    let mut connection = options.connect().await?;
    let outcome = migrator.run(&mut connection).await;
    let _ = connection.close().await;
    outcome
}

/// The versions that this program has and the database has not, in order.
pub async fn pending(pool: &PgPool) -> anyhow::Result<Vec<i64>> {
    missing(&migrator(), pool).await
}

async fn missing(migrator: &Migrator, pool: &PgPool) -> anyhow::Result<Vec<i64>> {
    let mut connection = pool
        .acquire()
        .await
        .context("no connection to the database")?;
    let applied = applied(&mut connection)
        .await
        .context("the migrations cannot be listed")?;
    let up = migrator
        .iter()
        .filter(|migration| migration.migration_type.is_up_migration());
    Ok(up
        .map(|migration| migration.version)
        .filter(|version| !applied.contains(version))
        .collect())
}

async fn applied(connection: &mut PgConnection) -> Result<Vec<i64>, MigrateError> {
    match connection.list_applied_migrations(BOOKS).await {
        Ok(applied) => Ok(applied
            .into_iter()
            .map(|migration| migration.version)
            .collect()),
        // undefined_table: nothing was ever applied.
        Err(MigrateError::Execute(sqlx::Error::Database(err)))
            if err.code().is_some_and(|code| code == "42P01") =>
        {
            Ok(Vec::new())
        }
        Err(err) => Err(err),
    }
}

/// Who is in the way, if the error says so: lock_not_available or deadlock_detected.
fn obstacle(err: &MigrateError) -> Option<String> {
    let (cause, obstacle) = match err {
        MigrateError::Execute(err) => (err, "another migrator is at work".to_owned()),
        MigrateError::ExecuteMigration(err, version) => (
            err,
            format!("another session holds a lock that migration {version} needs"),
        ),
        _ => return None,
    };
    let code = cause.as_database_error()?.code()?;
    (code == "55P03" || code == "40P01").then_some(obstacle)
}

/// Makes the private database ready, which nobody else looks after. Elsewhere a missing migration stops the start: the
/// operator decides when to migrate.
pub async fn settle(database: &Database) -> anyhow::Result<()> {
    if database.embedded.is_some() {
        apply(&database.pool).await?;
        return Ok(());
    }
    let pending = pending(&database.pool).await?;
    if !pending.is_empty() {
        anyhow::bail!(
            "the database lacks {} migrations of this version: run `reconvene migrate` first",
            pending.len()
        );
    }
    Ok(())
}
