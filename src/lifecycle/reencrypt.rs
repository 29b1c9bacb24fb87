//! Moves whatever is encrypted under an older key of the operator to the newest one (L-9).

use crate::domain::ids::WorkspaceId;
use crate::store::{
    self,
    sealed::{self, Table},
};
use crate::vault::{Place, Vault, VaultError};
use sqlx::PgPool;
use std::collections::BTreeMap;
use uuid::Uuid;

/// Values moved in one transaction.
const BATCH: i64 = 100;

#[derive(Debug, thiserror::Error)]
pub enum ReencryptError {
    #[error(transparent)]
    Vault(#[from] VaultError),
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl From<sqlx::Error> for ReencryptError {
    fn from(error: sqlx::Error) -> Self {
        store::Error::from(error).into()
    }
}

/// What moving has come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reencrypted {
    pub moved: u64,
    /// Values that could not be read, by reason; they are left as they were.
    pub unreadable: BTreeMap<String, u64>,
}

/// May be broken off and repeated, and run beside the service.
pub async fn reencrypt(pool: &PgPool, vault: &Vault) -> Result<Reencrypted, ReencryptError> {
    let mut done = Reencrypted::default();
    for table in Table::ALL {
        reencrypt_table(pool, vault, table, &mut done).await?;
    }
    Ok(done)
}

async fn reencrypt_table(
    pool: &PgPool,
    vault: &Vault,
    table: Table,
    done: &mut Reencrypted,
) -> Result<(), ReencryptError> {
    let newest = vault.newest()?;
    let mut after = (WorkspaceId(Uuid::nil()), Uuid::nil());
    loop {
        let mut tx = store::begin(pool).await?;
        let outdated =
            sealed::lock_outdated_all_workspaces(&mut tx, table, newest, after, BATCH).await?;
        let Some(last) = outdated.last() else {
            return Ok(());
        };
        after = (last.workspace, last.id);
        for old in &outdated {
            let place = Place {
                workspace: old.workspace,
                id: old.id,
            };
            match vault.open(place, &old.sealed) {
                Ok(value) => {
                    let resealed = vault.seal(place, &value)?;
                    sealed::reseal_locked(&mut tx, table, old.workspace, old.id, &resealed).await?;
                    done.moved += 1;
                }
                Err(reason) => *done.unreadable.entry(reason.to_string()).or_default() += 1,
            }
        }
        tx.commit().await?;
    }
}
