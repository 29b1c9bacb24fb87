//! System prompts as they were sent, each kept once (decision logs name them by hash).

use super::{Error, column};
use crate::domain::ids::WorkspaceId;
use serde_json::Value;
use sqlx::PgConnection;

/// Keeps prompt sections under their hash; those that are there already are marked as used now.
pub async fn keep(
    conn: &mut PgConnection,
    texts: &[(WorkspaceId, [u8; 32], Value)],
) -> Result<(), Error> {
    sqlx::query!(
        r#"
        insert into prompt_texts as p (workspace_id, hash, sections)
        select * from unnest($1::uuid[], $2::bytea[], $3::jsonb[])
        on conflict (workspace_id, hash) do update set used_at = now()
            where p.used_at < now() - interval '1 hour'
        "#,
        &column(texts, |t| t.0.0),
        &column(texts, |t| t.1.to_vec()),
        &column(texts, |t| t.2.clone()),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Removes at most `limit` texts that were last used more than `days` ago. Returns how many.
pub async fn forget_unused_all_workspaces(
    conn: &mut PgConnection,
    days: i32,
    limit: i64,
) -> Result<u64, Error> {
    let done = sqlx::query!(
        r#"
        delete from prompt_texts p
        using (
            select workspace_id, hash from prompt_texts
            where used_at < now() - make_interval(days => $1)
            limit $2
            for update skip locked
        ) old
        where p.workspace_id = old.workspace_id and p.hash = old.hash
        "#,
        days,
        limit,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected())
}
