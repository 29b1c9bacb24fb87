//! Local users. Their password hashes leave this module only to be compared with what somebody has typed.

use super::Error;
use crate::domain::ids::{MemberId, WorkspaceId};
use crate::domain::member::Username;
use crate::domain::role::Role;
use chrono::{DateTime, Utc};
use sqlx::PgConnection;

#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    pub id: MemberId,
    pub username: String,
    pub role: Role,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

/// What a log-in is judged by.
pub struct Account {
    pub workspace: WorkspaceId,
    pub member: MemberId,
    pub password_hash: String,
}

/// `false` when the name is taken in this workspace.
pub async fn insert(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: MemberId,
    username: &Username,
    role: Role,
    password_hash: &str,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "insert into members (workspace_id, id, username, role, password_hash) values ($1, $2, $3, $4, $5)
        on conflict (workspace_id, username) do nothing",
        workspace.0,
        id.0,
        username.as_str(),
        role.as_str(),
        password_hash
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

pub async fn get(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: MemberId,
) -> Result<Option<Member>, Error> {
    Ok(sqlx::query_as!(
        Member,
        r#"select id as "id: MemberId", username, role as "role: Role", created_at, updated_at from members
        where workspace_id = $1 and id = $2"#,
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?)
}

/// Locks the member and tells its role.
pub async fn lock(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: MemberId,
) -> Result<Option<Role>, Error> {
    Ok(sqlx::query_scalar!(
        r#"select role as "role: Role" from members where workspace_id = $1 and id = $2 for update"#,
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?)
}

/// In order of creation, after the member `after`.
pub async fn list(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    after: Option<MemberId>,
    limit: i64,
) -> Result<Vec<Member>, Error> {
    Ok(sqlx::query_as!(
        Member,
        r#"select id as "id: MemberId", username, role as "role: Role", created_at, updated_at from members
        where workspace_id = $1 and ($2::uuid is null or id > $2) order by id limit $3"#,
        workspace.0,
        after.map(|after| after.0),
        limit
    )
    .fetch_all(conn)
    .await?)
}

/// What is `None` stays as it is. The row is locked by the caller.
pub async fn update_locked(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: MemberId,
    role: Option<Role>,
    password_hash: Option<&str>,
) -> Result<(), Error> {
    sqlx::query!(
        "update members set role = coalesce($3, role), password_hash = coalesce($4, password_hash), updated_at = now()
        where workspace_id = $1 and id = $2",
        workspace.0,
        id.0,
        role.map(Role::as_str),
        password_hash
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// With all sessions of theirs. The row is locked by the caller.
pub async fn delete_locked(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: MemberId,
) -> Result<(), Error> {
    sqlx::query!(
        "delete from members where workspace_id = $1 and id = $2",
        workspace.0,
        id.0
    )
    .execute(conn)
    .await?;
    Ok(())
}

pub async fn password_hash(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: MemberId,
) -> Result<Option<String>, Error> {
    Ok(sqlx::query_scalar!(
        "select password_hash from members where workspace_id = $1 and id = $2",
        workspace.0,
        id.0
    )
    .fetch_optional(conn)
    .await?)
}

/// The account that these names are for. Nobody is logged in yet, so the workspace is found by its slug.
pub async fn account_by_names(
    conn: &mut PgConnection,
    slug: &str,
    username: &str,
) -> Result<Option<Account>, Error> {
    Ok(sqlx::query_as!(
        Account,
        r#"select m.workspace_id as "workspace: WorkspaceId", m.id as "member: MemberId", m.password_hash
        from workspaces w join members m on m.workspace_id = w.id
        where w.slug = $1 and w.deleted_at is null and m.username = $2"#,
        slug,
        username
    )
    .fetch_optional(conn)
    .await?)
}
