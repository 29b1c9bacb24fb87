//! Runtime flags that have been set. They are the service's own: no workspace stands in their key.

use super::Error;
use crate::domain::flag::FlagValues;
use crate::domain::ids::WorkspaceId;
use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::{PgConnection, PgExecutor};

/// A flag that has been set, maybe one that only another release knows.
#[derive(Clone, Debug, PartialEq)]
pub struct SetFlag {
    pub key: String,
    pub value: Value,
    pub changed_by: String,
    pub changed_by_workspace: Option<WorkspaceId>,
    pub changed_at: DateTime<Utc>,
}

pub async fn list(db: impl PgExecutor<'_>) -> Result<Vec<SetFlag>, Error> {
    Ok(sqlx::query_as!(
        SetFlag,
        r#"select key, value, changed_by, changed_by_workspace_id as "changed_by_workspace: WorkspaceId", changed_at
        from runtime_flags order by key"#
    )
    .fetch_all(db)
    .await?)
}

pub async fn values(db: impl PgExecutor<'_>) -> Result<FlagValues, Error> {
    let rows = sqlx::query!("select key, value from runtime_flags")
        .fetch_all(db)
        .await?;
    Ok(FlagValues(
        rows.into_iter().map(|row| (row.key, row.value)).collect(),
    ))
}

/// The last one who writes wins.
pub async fn set(
    conn: &mut PgConnection,
    key: &str,
    value: &Value,
    by: &str,
    by_workspace: Option<WorkspaceId>,
) -> Result<SetFlag, Error> {
    Ok(sqlx::query_as!(
        SetFlag,
        r#"insert into runtime_flags (key, value, changed_by, changed_by_workspace_id) values ($1, $2, $3, $4)
        on conflict (key) do update set value = excluded.value, changed_by = excluded.changed_by,
            changed_by_workspace_id = excluded.changed_by_workspace_id, changed_at = now()
        returning key, value, changed_by, changed_by_workspace_id as "changed_by_workspace: WorkspaceId", changed_at"#,
        key,
        value,
        by,
        by_workspace.map(|workspace| workspace.0)
    )
    .fetch_one(conn)
    .await?)
}
