//! What the API asks before anything else: is the database there, is its schema ours, is the caller's workspace alive.

use super::Error;
use crate::domain::ids::WorkspaceId;
use sqlx::PgExecutor;

pub async fn workspace_is_live(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
) -> Result<bool, Error> {
    let live = sqlx::query_scalar!(
        r#"select exists (select from workspaces where id = $1 and deleted_at is null) as "live!""#,
        workspace.0
    )
    .fetch_one(db)
    .await?;
    Ok(live)
}

/// The newest migration that has been applied, `None` when there is none.
///
/// Not a checked statement: the table belongs to the migrator and exists only where it has run.
pub async fn schema_version(db: impl PgExecutor<'_>) -> Result<Option<i64>, Error> {
    match sqlx::query_scalar("select max(version) from _sqlx_migrations where success")
        .fetch_one(db)
        .await
    {
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("42P01") => Ok(None),
        result => Ok(result?),
    }
}
