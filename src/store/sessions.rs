//! Log-ins. The database's clock says when one has run out.

use super::Error;
use crate::domain::ids::{MemberId, SessionId, WorkspaceId};
use crate::domain::role::Role;
use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgExecutor};

/// Who a cookie stands for.
pub struct Session {
    pub workspace: WorkspaceId,
    pub member: MemberId,
    pub id: SessionId,
    pub username: String,
    pub role: Role,
    pub expires_at: DateTime<Utc>,
}

/// `false` when the password has been changed, or the member removed, since the hash was read.
pub async fn insert_if_password_hash(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    member: MemberId,
    password_hash: &str,
    token_hash: &[u8; 32],
    hours: u32,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "insert into sessions (workspace_id, member_id, id, token_hash, expires_at)
        select workspace_id, id, $3, $4, now() + make_interval(hours => $5) from members
        where workspace_id = $1 and id = $2 and password_hash = $6 for share",
        workspace.0,
        member.0,
        SessionId::new().0,
        token_hash.as_slice(),
        hours as i32,
        password_hash
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// The live session of a token, in a live workspace: the token alone says which.
pub async fn by_token_all_workspaces(
    db: impl PgExecutor<'_>,
    token_hash: &[u8; 32],
) -> Result<Option<Session>, Error> {
    Ok(sqlx::query_as!(
        Session,
        r#"select s.workspace_id as "workspace: WorkspaceId", s.member_id as "member: MemberId", s.id as "id: SessionId",
            m.username, m.role as "role: Role", s.expires_at
        from sessions s
        join members m on m.workspace_id = s.workspace_id and m.id = s.member_id
        join workspaces w on w.id = s.workspace_id
        where s.token_hash = $1 and s.expires_at > now() and w.deleted_at is null"#,
        token_hash.as_slice()
    )
    .fetch_optional(db)
    .await?)
}

pub async fn is_live(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    member: MemberId,
    id: SessionId,
) -> Result<bool, Error> {
    Ok(sqlx::query_scalar!(
        r#"select exists (select from sessions
            where workspace_id = $1 and member_id = $2 and id = $3 and expires_at > now()) as "live!""#,
        workspace.0,
        member.0,
        id.0
    )
    .fetch_one(db)
    .await?)
}

pub async fn delete(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    member: MemberId,
    id: SessionId,
) -> Result<(), Error> {
    sqlx::query!(
        "delete from sessions where workspace_id = $1 and member_id = $2 and id = $3",
        workspace.0,
        member.0,
        id.0
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// All sessions of the member but this one.
pub async fn delete_of_member(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    member: MemberId,
    but: Option<SessionId>,
) -> Result<(), Error> {
    sqlx::query!(
        "delete from sessions where workspace_id = $1 and member_id = $2 and id is distinct from $3",
        workspace.0,
        member.0,
        but.map(|but| but.0)
    )
    .execute(conn)
    .await?;
    Ok(())
}

pub async fn forget_old_all_workspaces(conn: &mut PgConnection) -> Result<u64, Error> {
    let done = sqlx::query!("delete from sessions where expires_at <= now()")
        .execute(conn)
        .await?;
    Ok(done.rows_affected())
}
