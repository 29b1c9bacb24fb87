//! API keys: made once, shown once, revoked (P-4). Nobody makes or revokes one with a role above their own (P-6).

use super::wait::{new_token, token_hash};
use crate::domain::ids::{ApiKeyId, WorkspaceId};
use crate::domain::role::Role;
use crate::store::{
    self,
    api_keys::{self, ApiKey, NewApiKey},
};
use secrecy::SecretString;
use sqlx::PgPool;

/// What every key begins with, so that people and scanners know one when they see it.
pub const PREFIX: &str = "rk_";
/// So many characters of a key are kept and shown, the prefix included.
const SHOWN: usize = PREFIX.len() + 6;

#[derive(Debug, thiserror::Error)]
pub enum ApiKeyError {
    #[error("there is no such key in this workspace")]
    NotFound,
    /// Holds the role that it needs.
    #[error("needs the role {}", .0.as_str())]
    AboveOwnRole(Role),
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// The key itself is in the answer and nowhere else. `by`: the role of who makes it.
pub async fn create(
    pool: &PgPool,
    workspace: WorkspaceId,
    by: Role,
    created_by: &str,
    name: &str,
    role: Role,
) -> Result<(ApiKey, SecretString), ApiKeyError> {
    within(by, role)?;
    let key = format!("{PREFIX}{}", new_token());
    // A token's subject may be of any length.
    let created_by: String = created_by
        .chars()
        .filter(|c| *c != '\0')
        .take(1000)
        .collect();
    let new = NewApiKey {
        name,
        role,
        prefix: &key[..SHOWN],
        key_hash: token_hash(&key),
        created_by: &created_by,
    };
    let mut conn = pool.acquire().await.map_err(store::Error::from)?;
    let made = api_keys::insert(&mut conn, workspace, &new).await?;
    Ok((made, key.into()))
}

pub async fn revoke(
    pool: &PgPool,
    workspace: WorkspaceId,
    by: Role,
    id: ApiKeyId,
) -> Result<(), ApiKeyError> {
    let mut conn = pool.acquire().await.map_err(store::Error::from)?;
    let role = api_keys::role(&mut conn, workspace, id).await?;
    within(by, role.ok_or(ApiKeyError::NotFound)?)?;
    Ok(api_keys::revoke(&mut conn, workspace, id).await?)
}

fn within(by: Role, role: Role) -> Result<(), ApiKeyError> {
    match role <= by {
        true => Ok(()),
        false => Err(ApiKeyError::AboveOwnRole(role)),
    }
}
