//! Whether this process lives (`/healthz`, asks nobody) and whether it should get requests (`/readyz`, asks the database).

use super::App;
use crate::runtime::Causes;
use crate::store;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use sqlx::migrate::Migrator;
use utoipa::ToSchema;

static MIGRATIONS: Migrator = sqlx::migrate!();

#[derive(Serialize, ToSchema)]
pub struct Health {
    #[schema(example = "alive")]
    status: &'static str,
    #[schema(example = "0.1.0")]
    version: &'static str,
}

/// Is this process alive
#[utoipa::path(get, path = "/healthz", tag = "service", responses((status = 200, body = Health)))]
pub async fn healthz() -> Json<Health> {
    Json(Health {
        status: "alive",
        version: env!("CARGO_PKG_VERSION"),
    })
}

#[derive(Serialize, ToSchema)]
pub struct Readiness {
    ready: bool,
    /// `ok` or `unavailable`.
    #[schema(example = "ok")]
    database: &'static str,
    /// `applied`; `pending` asks for `reconvene migrate`; `ahead` is fine, a newer release has migrated; `unknown` without a database.
    #[schema(example = "applied")]
    migrations: &'static str,
    /// Whether hints of other processes arrive. Without them everything works, but changes made elsewhere are found by
    /// polling only, so this does not count towards `ready`.
    #[schema(example = true)]
    listening: bool,
    /// What this process does.
    #[schema(example = json!(["api", "worker", "orchestrator"]))]
    roles: Vec<String>,
}

/// Can this process serve
#[utoipa::path(
    get,
    path = "/readyz",
    tag = "service",
    responses((status = 200, body = Readiness), (status = 503, body = Readiness, description = "Not now"))
)]
pub async fn readyz(State(app): State<App>) -> (StatusCode, Json<Readiness>) {
    let newest = MIGRATIONS.iter().map(|migration| migration.version).max();
    let version = match app.outage.is_known().await {
        true => None,
        false => match store::health::schema_version(&app.pool).await {
            Ok(version) => Some(version),
            Err(error) => {
                tracing::warn!(error = %Causes(&error), "not ready, the database does not answer");
                None
            }
        },
    };
    let (database, migrations) = match version {
        None => ("unavailable", "unknown"),
        Some(applied) if applied < newest => ("ok", "pending"),
        Some(applied) if applied > newest => ("ok", "ahead"),
        Some(_) => ("ok", "applied"),
    };
    let ready = matches!(migrations, "applied" | "ahead") && !app.shutdown.is_cancelled();
    let status = if ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (
        status,
        Json(Readiness {
            ready,
            database,
            migrations,
            listening: app.bus.is_listening(),
            roles: app.roles.to_vec(),
        }),
    )
}
