//! Credentials as they are stored: encrypted. What they hold is known to `vault` alone.

use super::Error;
use crate::domain::credential::Sealed;
use crate::domain::ids::{CredentialId, WorkspaceId};
use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

/// All that is ever shown of a credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    pub id: CredentialId,
    pub name: String,
    pub key_id: String,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

pub async fn insert(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: CredentialId,
    name: &str,
    sealed: &Sealed,
) -> Result<(), Error> {
    sqlx::query!(
        "insert into credentials (workspace_id, id, name, key_id, sealed) values ($1, $2, $3, $4, $5)",
        workspace.0,
        id.0,
        name,
        sealed.key_id,
        sealed.bytes
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// `false` when it is not there.
pub async fn replace(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: CredentialId,
    sealed: &Sealed,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "update credentials set key_id = $3, sealed = $4, updated_at = now() where workspace_id = $1 and id = $2",
        workspace.0,
        id.0,
        sealed.key_id,
        sealed.bytes
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// `false` when it is not there.
pub async fn delete(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: CredentialId,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "delete from credentials where workspace_id = $1 and id = $2",
        workspace.0,
        id.0
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

pub async fn get(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: CredentialId,
) -> Result<Option<Credential>, Error> {
    let row = sqlx::query_as!(
        Credential,
        r#"select id as "id: CredentialId", name, key_id, created_at, updated_at from credentials
        where workspace_id = $1 and id = $2"#,
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?;
    Ok(row)
}

/// At most `limit` credentials in order of id, which is the order of creation, beginning after `after`.
pub async fn list(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    after: Option<CredentialId>,
    limit: i64,
) -> Result<Vec<Credential>, Error> {
    let rows = sqlx::query_as!(
        Credential,
        r#"select id as "id: CredentialId", name, key_id, created_at, updated_at from credentials
        where workspace_id = $1 and id > $2 order by id limit $3"#,
        workspace.0,
        after.map_or(Uuid::nil(), |id| id.0),
        limit
    )
    .fetch_all(conn)
    .await?;
    Ok(rows)
}

struct SealedRow {
    id: CredentialId,
    key_id: String,
    sealed: Vec<u8>,
}

impl SealedRow {
    fn pair(self) -> (CredentialId, Sealed) {
        let sealed = Sealed {
            key_id: self.key_id,
            bytes: self.sealed,
        };
        (self.id, sealed)
    }
}

/// The encrypted values of those that are there.
pub async fn sealed(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    ids: &[CredentialId],
) -> Result<Vec<(CredentialId, Sealed)>, Error> {
    let wanted: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    let rows = sqlx::query_as!(
        SealedRow,
        r#"select id as "id: CredentialId", key_id, sealed from credentials where workspace_id = $1 and id = any($2)"#,
        workspace.0,
        &wanted
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(SealedRow::pair).collect())
}

/// The encrypted values of all.
pub async fn all_sealed(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
) -> Result<Vec<(CredentialId, Sealed)>, Error> {
    let rows = sqlx::query_as!(
        SealedRow,
        r#"select id as "id: CredentialId", key_id, sealed from credentials where workspace_id = $1 order by id"#,
        workspace.0
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(SealedRow::pair).collect())
}
