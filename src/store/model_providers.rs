//! Model providers of workspaces. Their keys are stored encrypted; what they are is known to `vault` alone.

use super::{Error, column};
use crate::domain::credential::Sealed;
use crate::domain::ids::{ModelProviderId, WorkspaceId};
use crate::domain::model_provider::{ModelProvider, ProviderKind};
use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use std::collections::HashMap;
use uuid::Uuid;

/// A provider as admins see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub id: ModelProviderId,
    pub provider: ModelProvider,
    pub has_key: bool,
    pub key_hint: Option<String>,
    /// Grows with every write.
    pub revision: i64,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

/// A provider as a model is asked through it.
#[derive(Clone, Debug, PartialEq)]
pub struct Sealing {
    pub id: ModelProviderId,
    pub provider: ModelProvider,
    pub key: Option<Sealed>,
}

/// A key as it is written.
#[derive(Clone, Debug)]
pub struct NewKey {
    pub sealed: Sealed,
    pub hint: Option<String>,
}

struct Row {
    id: ModelProviderId,
    name: String,
    kind: ProviderKind,
    base_url: Option<String>,
    model: Option<String>,
    is_default: bool,
    has_key: bool,
    key_hint: Option<String>,
    revision: i64,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

impl From<Row> for Stored {
    fn from(row: Row) -> Self {
        Stored {
            id: row.id,
            provider: ModelProvider {
                name: row.name,
                kind: row.kind,
                base_url: row.base_url,
                model: row.model,
                is_default: row.is_default,
            },
            has_key: row.has_key,
            key_hint: row.key_hint,
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        }
    }
}

/// Without a key. `false` when the workspace has `max` of them already.
pub async fn insert_below(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ModelProviderId,
    provider: &ModelProvider,
    max: i64,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "insert into model_providers (workspace_id, id, name, kind, base_url, model, is_default)
        select $1, $2, $3, $4, $5, $6, $7
        where (select count(*) from model_providers where workspace_id = $1) < $8",
        workspace.0,
        id.0,
        provider.name,
        provider.kind.as_str(),
        provider.base_url,
        provider.model,
        provider.is_default,
        max
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// All but the key. `false` when somebody else has written since `revision`.
pub async fn save_if_revision(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ModelProviderId,
    revision: i64,
    provider: &ModelProvider,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "update model_providers set name = $4, kind = $5, base_url = $6, model = $7, is_default = $8,
            revision = revision + 1, updated_at = now()
        where workspace_id = $1 and id = $2 and revision = $3",
        workspace.0,
        id.0,
        revision,
        provider.name,
        provider.kind.as_str(),
        provider.base_url,
        provider.model,
        provider.is_default
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Needs the provider's lock.
pub async fn set_key_locked(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ModelProviderId,
    key: Option<&NewKey>,
) -> Result<(), Error> {
    sqlx::query!(
        "update model_providers set key_id = $3, sealed = $4, key_hint = $5 where workspace_id = $1 and id = $2",
        workspace.0,
        id.0,
        key.map(|key| &key.sealed.key_id),
        key.map(|key| &key.sealed.bytes),
        key.and_then(|key| key.hint.as_ref())
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Whichever answered by default before does so no longer.
pub async fn unset_default(conn: &mut PgConnection, workspace: WorkspaceId) -> Result<(), Error> {
    sqlx::query!(
        "update model_providers set is_default = false, revision = revision + 1, updated_at = now()
        where workspace_id = $1 and is_default",
        workspace.0
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Locks the provider against other editors until the transaction ends. Its revision, `None` when it is not there.
pub async fn lock(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ModelProviderId,
) -> Result<Option<i64>, Error> {
    let revision = sqlx::query_scalar!(
        "select revision from model_providers where workspace_id = $1 and id = $2 for no key update",
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?;
    Ok(revision)
}

pub async fn delete_locked(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ModelProviderId,
) -> Result<(), Error> {
    sqlx::query!(
        "delete from model_providers where workspace_id = $1 and id = $2",
        workspace.0,
        id.0
    )
    .execute(conn)
    .await?;
    Ok(())
}

pub async fn get(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ModelProviderId,
) -> Result<Option<Stored>, Error> {
    let row = sqlx::query_as!(
        Row,
        r#"select id as "id: ModelProviderId", name, kind as "kind: ProviderKind", base_url, model, is_default,
            sealed is not null as "has_key!", key_hint, revision, created_at, updated_at
        from model_providers where workspace_id = $1 and id = $2"#,
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?;
    Ok(row.map(Stored::from))
}

/// At most `limit` providers in order of id, which is the order of creation, beginning after `after`.
pub async fn list(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    after: Option<ModelProviderId>,
    limit: i64,
) -> Result<Vec<Stored>, Error> {
    let rows = sqlx::query_as!(
        Row,
        r#"select id as "id: ModelProviderId", name, kind as "kind: ProviderKind", base_url, model, is_default,
            sealed is not null as "has_key!", key_hint, revision, created_at, updated_at
        from model_providers where workspace_id = $1 and id > $2 order by id limit $3"#,
        workspace.0,
        after.map_or(Uuid::nil(), |id| id.0),
        limit
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(Stored::from).collect())
}

pub async fn has_name(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    name: &str,
) -> Result<bool, Error> {
    let found = sqlx::query_scalar!(
        r#"select exists (select from model_providers where workspace_id = $1 and name = $2) as "found!""#,
        workspace.0,
        name
    )
    .fetch_one(conn)
    .await?;
    Ok(found)
}

/// All providers of these workspaces, with their keys as they are stored.
pub async fn of_workspaces(
    conn: &mut PgConnection,
    workspaces: &[WorkspaceId],
) -> Result<HashMap<WorkspaceId, Vec<Sealing>>, Error> {
    let rows = sqlx::query!(
        r#"select p.workspace_id as "workspace: WorkspaceId", p.id as "id: ModelProviderId", p.name,
            p.kind as "kind: ProviderKind", p.base_url, p.model, p.is_default, p.key_id, p.sealed
        from unnest($1::uuid[]) as wanted (workspace_id)
        join model_providers p using (workspace_id)"#,
        &column(workspaces, |workspace| workspace.0)
    )
    .fetch_all(conn)
    .await?;
    let mut found: HashMap<WorkspaceId, Vec<Sealing>> = HashMap::new();
    for row in rows {
        found.entry(row.workspace).or_default().push(Sealing {
            id: row.id,
            provider: ModelProvider {
                name: row.name,
                kind: row.kind,
                base_url: row.base_url,
                model: row.model,
                is_default: row.is_default,
            },
            key: row
                .key_id
                .zip(row.sealed)
                .map(|(key_id, bytes)| Sealed { key_id, bytes }),
        });
    }
    Ok(found)
}
