//! Credentials of workspaces: made, given another value, deleted (L-9).

use crate::domain::credential::{NewCredential, Sealed};
use crate::domain::ids::{CredentialId, WorkspaceId};
use crate::store::{
    self,
    credentials::{self, Credential},
};
use crate::vault::{Place, Vault, VaultError};
use secrecy::SecretString;
use sqlx::{PgConnection, PgPool};

#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    #[error("there is no such credential in this workspace")]
    NotFound,
    #[error("the name is taken")]
    NameTaken,
    #[error("something in the workspace uses it")]
    InUse,
    #[error(transparent)]
    Vault(#[from] VaultError),
    #[error(transparent)]
    Store(store::Error),
}

impl From<store::Error> for CredentialError {
    fn from(error: store::Error) -> Self {
        match error.constraint() {
            Some("credentials_name_key") => CredentialError::NameTaken,
            Some(name) if name.ends_with("_credential_fkey") => CredentialError::InUse,
            _ => CredentialError::Store(error),
        }
    }
}

impl From<sqlx::Error> for CredentialError {
    fn from(error: sqlx::Error) -> Self {
        store::Error::from(error).into()
    }
}

fn place(workspace: WorkspaceId, id: CredentialId) -> Place {
    Place {
        workspace,
        id: id.0,
    }
}

pub async fn create(
    pool: &PgPool,
    vault: &Vault,
    workspace: WorkspaceId,
    new: &NewCredential,
) -> Result<Credential, CredentialError> {
    let id = CredentialId::new();
    let sealed = vault.seal(place(workspace, id), &new.value)?;
    let mut tx = store::begin(pool).await?;
    credentials::insert(&mut tx, workspace, id, &new.name, &sealed).await?;
    let made = existing(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(made)
}

/// Gives the credential another value; whatever uses it uses the new one from now on.
pub async fn replace(
    pool: &PgPool,
    vault: &Vault,
    workspace: WorkspaceId,
    id: CredentialId,
    value: &SecretString,
) -> Result<Credential, CredentialError> {
    let sealed = vault.seal(place(workspace, id), value)?;
    let mut tx = store::begin(pool).await?;
    if !credentials::replace(&mut tx, workspace, id, &sealed).await? {
        return Err(CredentialError::NotFound);
    }
    let changed = existing(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(changed)
}

/// Refused while something uses it.
pub async fn delete(
    pool: &PgPool,
    workspace: WorkspaceId,
    id: CredentialId,
) -> Result<(), CredentialError> {
    let mut conn = pool.acquire().await?;
    match credentials::delete(&mut conn, workspace, id).await? {
        true => Ok(()),
        false => Err(CredentialError::NotFound),
    }
}

async fn existing(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: CredentialId,
) -> Result<Credential, CredentialError> {
    let found = credentials::get(conn, workspace, id).await?;
    found.ok_or(CredentialError::NotFound)
}

/// The values of these credentials, in this order, read for one use on the server.
pub async fn resolve(
    conn: &mut PgConnection,
    vault: &Vault,
    workspace: WorkspaceId,
    ids: &[CredentialId],
) -> Result<Vec<SecretString>, CredentialError> {
    let sealed = credentials::sealed(conn, workspace, ids).await?;
    let value = |id: &CredentialId| {
        let found = sealed.iter().find(|(known, _)| known == id);
        let (_, sealed) = found.ok_or(CredentialError::NotFound)?;
        Ok(vault.open(place(workspace, *id), sealed)?)
    };
    ids.iter().map(value).collect()
}

/// The values of all credentials of the workspace, for blanking them out of what somebody is to see. One that can not be read
/// is an error: nobody could tell where its value stands.
pub async fn resolve_all(
    conn: &mut PgConnection,
    vault: &Vault,
    workspace: WorkspaceId,
) -> Result<Vec<SecretString>, CredentialError> {
    let sealed = credentials::all_sealed(conn, workspace).await?;
    let value =
        |(id, sealed): &(CredentialId, Sealed)| Ok(vault.open(place(workspace, *id), sealed)?);
    sealed.iter().map(value).collect()
}
