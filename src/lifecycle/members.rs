//! Local users: made, changed, removed. Nobody gives, changes or takes away a role above their own (P-6).

use super::passwords::{HashError, Passwords};
use crate::domain::ids::{MemberId, SessionId, WorkspaceId};
use crate::domain::member::Username;
use crate::domain::role::Role;
use crate::store::{
    self,
    members::{self, Member},
};
use secrecy::SecretString;
use sqlx::{PgConnection, PgPool};

#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    #[error("there is no such member in this workspace")]
    NotFound,
    #[error("the name is taken in this workspace")]
    NameTaken,
    /// Holds the role that it needs.
    #[error("needs the role {}", .0.as_str())]
    AboveOwnRole(Role),
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl From<sqlx::Error> for MemberError {
    fn from(error: sqlx::Error) -> Self {
        MemberError::Store(error.into())
    }
}

pub struct NewMember<'a> {
    pub username: &'a Username,
    pub role: Role,
    pub password_hash: &'a str,
}

/// `by`: the role of who makes it.
pub async fn create(
    pool: &PgPool,
    workspace: WorkspaceId,
    by: Role,
    new: &NewMember<'_>,
) -> Result<Member, MemberError> {
    within(by, new.role)?;
    let mut tx = store::begin(pool).await?;
    let member = insert(&mut tx, workspace, new).await?;
    let member = member.ok_or(MemberError::NameTaken)?;
    tx.commit().await?;
    Ok(member)
}

/// `None` when the name is taken.
pub(super) async fn insert(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    new: &NewMember<'_>,
) -> Result<Option<Member>, store::Error> {
    let id = MemberId::new();
    match members::insert(
        conn,
        workspace,
        id,
        new.username,
        new.role,
        new.password_hash,
    )
    .await?
    {
        true => members::get(conn, workspace, id).await,
        false => Ok(None),
    }
}

/// A new role counts from the next request on. A new password ends all sessions of the member.
pub async fn change(
    pool: &PgPool,
    workspace: WorkspaceId,
    by: Role,
    id: MemberId,
    role: Option<Role>,
    password_hash: Option<&str>,
) -> Result<Member, MemberError> {
    let mut tx = store::begin(pool).await?;
    let before = members::lock(&mut tx, workspace, id).await?;
    within(by, before.ok_or(MemberError::NotFound)?)?;
    within(by, role.unwrap_or(by))?;
    members::update_locked(&mut tx, workspace, id, role, password_hash).await?;
    if password_hash.is_some() {
        store::sessions::delete_of_member(&mut tx, workspace, id, None).await?;
    }
    let member = members::get(&mut tx, workspace, id).await?;
    tx.commit().await?;
    member.ok_or(MemberError::NotFound)
}

#[derive(Debug, thiserror::Error)]
pub enum PasswordError {
    /// Or somebody else has just changed it, or removed the member.
    #[error("the old password is another one")]
    Wrong,
    #[error(transparent)]
    Hash(#[from] HashError),
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// A member's own change: ends all their sessions but the one in which it is made. No connection is held while a password
/// is checked or hashed.
pub async fn change_password(
    pool: &PgPool,
    passwords: &Passwords,
    workspace: WorkspaceId,
    (id, session): (MemberId, SessionId),
    old: SecretString,
    new: SecretString,
) -> Result<(), PasswordError> {
    let mut conn = pool.acquire().await.map_err(store::Error::from)?;
    let before = members::password_hash(&mut conn, workspace, id).await?;
    drop(conn);
    if !passwords.verify(old, before.clone()).await? {
        return Err(PasswordError::Wrong);
    }
    let hash = passwords.hash(new).await?;
    let mut tx = store::begin(pool).await?;
    members::lock(&mut tx, workspace, id).await?;
    if members::password_hash(&mut tx, workspace, id).await? != before {
        return Err(PasswordError::Wrong);
    }
    members::update_locked(&mut tx, workspace, id, None, Some(&hash)).await?;
    store::sessions::delete_of_member(&mut tx, workspace, id, Some(session)).await?;
    tx.commit().await.map_err(store::Error::from)?;
    Ok(())
}

/// With all their sessions. What they have made stays, API keys included.
pub async fn remove(
    pool: &PgPool,
    workspace: WorkspaceId,
    by: Role,
    id: MemberId,
) -> Result<(), MemberError> {
    let mut tx = store::begin(pool).await?;
    let before = members::lock(&mut tx, workspace, id).await?;
    within(by, before.ok_or(MemberError::NotFound)?)?;
    members::delete_locked(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(())
}

fn within(by: Role, role: Role) -> Result<(), MemberError> {
    match role <= by {
        true => Ok(()),
        false => Err(MemberError::AboveOwnRole(role)),
    }
}
