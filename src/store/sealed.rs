//! Every value that is encrypted under a key of the operator, whatever it is a value of: for moving them to another key,
//! and for telling which keys are still needed. The tables are named here once.

use super::Error;
use crate::domain::credential::Sealed;
use crate::domain::ids::WorkspaceId;
use sqlx::PgConnection;
use uuid::Uuid;

/// A table with such values.
#[derive(Clone, Copy, Debug)]
pub enum Table {
    Credentials,
    ModelProviders,
}

impl Table {
    pub const ALL: [Self; 2] = [Self::Credentials, Self::ModelProviders];
}

/// A value that is under another key than the newest.
#[derive(Debug)]
pub struct Outdated {
    pub workspace: WorkspaceId,
    pub id: Uuid,
    pub sealed: Sealed,
}

/// At most `limit` values of the table that are not under this key, in key order, beginning after `after`. Locked until
/// the transaction ends.
pub async fn lock_outdated_all_workspaces(
    conn: &mut PgConnection,
    table: Table,
    key_id: &str,
    after: (WorkspaceId, Uuid),
    limit: i64,
) -> Result<Vec<Outdated>, Error> {
    macro_rules! outdated {
        ($sql:literal) => {
            sqlx::query!($sql, key_id, after.0.0, after.1, limit)
                .fetch_all(conn)
                .await?
                .into_iter()
                .map(|row| Outdated {
                    workspace: row.workspace,
                    id: row.id,
                    sealed: Sealed {
                        key_id: row.key_id,
                        bytes: row.sealed,
                    },
                })
                .collect()
        };
    }
    Ok(match table {
        Table::Credentials => outdated!(
            r#"select workspace_id as "workspace: WorkspaceId", id, key_id, sealed from credentials
            where key_id <> $1 and (workspace_id, id) > ($2, $3)
            order by workspace_id, id limit $4
            for no key update"#
        ),
        Table::ModelProviders => outdated!(
            r#"select workspace_id as "workspace: WorkspaceId", id, key_id as "key_id!", sealed as "sealed!"
            from model_providers
            where key_id <> $1 and (workspace_id, id) > ($2, $3)
            order by workspace_id, id limit $4
            for no key update"#
        ),
    })
}

/// The same value under another key. Needs the lock.
pub async fn reseal_locked(
    conn: &mut PgConnection,
    table: Table,
    workspace: WorkspaceId,
    id: Uuid,
    sealed: &Sealed,
) -> Result<(), Error> {
    macro_rules! reseal {
        ($sql:literal) => {
            sqlx::query!($sql, workspace.0, id, sealed.key_id, sealed.bytes)
                .execute(conn)
                .await?
        };
    }
    match table {
        Table::Credentials => reseal!(
            "update credentials set key_id = $3, sealed = $4, updated_at = now() where workspace_id = $1 and id = $2"
        ),
        Table::ModelProviders => {
            reseal!(
                "update model_providers set key_id = $3, sealed = $4 where workspace_id = $1 and id = $2"
            )
        }
    };
    Ok(())
}

/// The operator's keys that something is encrypted under, with the number of values.
pub async fn keys_in_use_all_workspaces(
    conn: &mut PgConnection,
) -> Result<Vec<(String, i64)>, Error> {
    let rows = sqlx::query!(
        r#"select key_id as "key_id!", count(*) as "values!" from (
            select key_id from credentials
            union all
            select key_id from model_providers where key_id is not null
        ) sealed group by key_id order by key_id"#
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| (row.key_id, row.values))
        .collect())
}
