//! Log-in and log-out of local users (P-4).

use super::passwords::{HashError, Passwords};
use super::wait::{new_token, token_hash};
use crate::domain::ids::{MemberId, SessionId, WorkspaceId};
use crate::store;
use secrecy::SecretString;
use sqlx::PgPool;

#[derive(Debug, thiserror::Error)]
pub enum LogInError {
    /// One answer for all of these, and after the same time.
    #[error("there is no such account, or the password is another one")]
    Refused,
    #[error(transparent)]
    Hash(#[from] HashError),
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// The token of a new session. No connection is held while the password is checked.
pub async fn log_in(
    pool: &PgPool,
    passwords: &Passwords,
    slug: &str,
    username: &str,
    password: SecretString,
    session_hours: u32,
) -> Result<String, LogInError> {
    let account = {
        let mut conn = pool.acquire().await.map_err(store::Error::from)?;
        store::members::account_by_names(&mut conn, slug, username).await?
    };
    let hash = account
        .as_ref()
        .map(|account| account.password_hash.clone());
    let fits = passwords.verify(password, hash).await?;
    let account = account.filter(|_| fits).ok_or(LogInError::Refused)?;
    let token = new_token();
    let mut conn = pool.acquire().await.map_err(store::Error::from)?;
    let made = store::sessions::insert_if_password_hash(
        &mut conn,
        account.workspace,
        account.member,
        &account.password_hash,
        &token_hash(&token),
        session_hours,
    )
    .await?;
    match made {
        true => Ok(token),
        false => Err(LogInError::Refused),
    }
}

/// Again it changes nothing.
pub async fn log_out(
    pool: &PgPool,
    workspace: WorkspaceId,
    member: MemberId,
    session: SessionId,
) -> Result<(), store::Error> {
    let mut conn = pool.acquire().await?;
    store::sessions::delete(&mut conn, workspace, member, session).await
}
