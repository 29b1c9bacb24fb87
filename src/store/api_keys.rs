//! API keys. A revoked one stays, so that people see that it was there.

use super::Error;
use crate::domain::ids::{ApiKeyId, WorkspaceId};
use crate::domain::role::Role;
use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgExecutor};

#[derive(Clone, Debug, PartialEq)]
pub struct ApiKey {
    pub id: ApiKeyId,
    pub name: String,
    pub role: Role,
    pub prefix: String,
    pub created_by: String,
    pub created_at: DateTime<Utc>,
    pub revoked_at: Option<DateTime<Utc>>,
}

/// Who a key stands for.
pub struct KeyHolder {
    pub workspace: WorkspaceId,
    pub id: ApiKeyId,
    pub name: String,
    pub role: Role,
}

pub struct NewApiKey<'a> {
    pub name: &'a str,
    pub role: Role,
    pub prefix: &'a str,
    pub key_hash: [u8; 32],
    pub created_by: &'a str,
}

pub async fn insert(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    new: &NewApiKey<'_>,
) -> Result<ApiKey, Error> {
    Ok(sqlx::query_as!(
        ApiKey,
        r#"insert into api_keys (workspace_id, id, name, role, prefix, key_hash, created_by)
        values ($1, $2, $3, $4, $5, $6, $7)
        returning id as "id: ApiKeyId", name, role as "role: Role", prefix, created_by, created_at, revoked_at"#,
        workspace.0,
        ApiKeyId::new().0,
        new.name,
        new.role.as_str(),
        new.prefix,
        new.key_hash.as_slice(),
        new.created_by
    )
    .fetch_one(conn)
    .await?)
}

/// In order of creation, after the key `after`; revoked ones too.
pub async fn list(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    after: Option<ApiKeyId>,
    limit: i64,
) -> Result<Vec<ApiKey>, Error> {
    Ok(sqlx::query_as!(
        ApiKey,
        r#"select id as "id: ApiKeyId", name, role as "role: Role", prefix, created_by, created_at, revoked_at
        from api_keys where workspace_id = $1 and ($2::uuid is null or id > $2) order by id limit $3"#,
        workspace.0,
        after.map(|after| after.0),
        limit
    )
    .fetch_all(conn)
    .await?)
}

/// The role of a key never changes, so it needs no lock.
pub async fn role(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ApiKeyId,
) -> Result<Option<Role>, Error> {
    Ok(sqlx::query_scalar!(
        r#"select role as "role: Role" from api_keys where workspace_id = $1 and id = $2"#,
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?)
}

/// Again it changes nothing.
pub async fn revoke(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ApiKeyId,
) -> Result<(), Error> {
    sqlx::query!(
        "update api_keys set revoked_at = now() where workspace_id = $1 and id = $2 and revoked_at is null",
        workspace.0,
        id.0
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The key that is not revoked, in a live workspace: the key alone says which.
pub async fn by_hash_all_workspaces(
    db: impl PgExecutor<'_>,
    key_hash: &[u8; 32],
) -> Result<Option<KeyHolder>, Error> {
    Ok(sqlx::query_as!(
        KeyHolder,
        r#"select k.workspace_id as "workspace: WorkspaceId", k.id as "id: ApiKeyId", k.name, k.role as "role: Role"
        from api_keys k join workspaces w on w.id = k.workspace_id
        where k.key_hash = $1 and k.revoked_at is null and w.deleted_at is null"#,
        key_hash.as_slice()
    )
    .fetch_optional(db)
    .await?)
}

pub async fn is_live(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    id: ApiKeyId,
) -> Result<bool, Error> {
    Ok(sqlx::query_scalar!(
        r#"select exists (select from api_keys where workspace_id = $1 and id = $2 and revoked_at is null) as "live!""#,
        workspace.0,
        id.0
    )
    .fetch_one(db)
    .await?)
}
