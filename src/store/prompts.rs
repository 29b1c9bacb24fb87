//! System prompts as they were sent, each kept once (decision logs name them by hash).

use super::{Error, column};
use crate::domain::ids::WorkspaceId;
use serde_json::Value;
use sqlx::PgConnection;

/// Keeps prompt sections under their hash.
pub async fn keep(
    conn: &mut PgConnection,
    texts: &[(WorkspaceId, [u8; 32], Value)],
) -> Result<(), Error> {
    sqlx::query!(
        r#"
        insert into prompt_texts (workspace_id, hash, sections)
        select * from unnest($1::uuid[], $2::bytea[], $3::jsonb[])
        on conflict do nothing
        "#,
        &column(texts, |t| t.0.0),
        &column(texts, |t| t.1.to_vec()),
        &column(texts, |t| t.2.clone()),
    )
    .execute(conn)
    .await?;
    Ok(())
}
