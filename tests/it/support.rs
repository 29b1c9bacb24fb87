//! A database of its own for each test.

use sqlx::{
    AssertSqlSafe, Connection, PgConnection, PgPool, postgres::PgConnectOptions,
    postgres::PgPoolOptions,
};

/// A fresh database with all migrations applied, made from the template of the cluster that `TEST_DATABASE_URL` names.
pub async fn database() -> PgPool {
    database_with(|pool| pool.max_connections(10)).await
}

pub async fn database_with(set: impl FnOnce(PgPoolOptions) -> PgPoolOptions) -> PgPool {
    let options = fresh_database().await;
    set(PgPoolOptions::new())
        .connect_with(options)
        .await
        .expect("connect to the test database")
}

/// As [`database`], for tests that start processes of their own on it.
pub async fn fresh_database() -> PgConnectOptions {
    let url = std::env::var("TEST_DATABASE_URL")
        .expect("TEST_DATABASE_URL is not set: run the tests with `make test`, which starts a database for them");
    let options: PgConnectOptions = url.parse().expect("TEST_DATABASE_URL is a PostgreSQL URL");
    let name = format!("test_{}", uuid::Uuid::new_v4().simple());
    let mut admin = PgConnection::connect_with(&options)
        .await
        .expect("reach the test cluster");
    sqlx::query(AssertSqlSafe(format!(
        "create database {name} template reconvene_template strategy wal_log"
    )))
    .execute(&mut admin)
    .await
    .expect("make a database from the template");
    options.database(&name)
}
