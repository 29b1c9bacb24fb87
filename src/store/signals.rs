//! Rows of `signals`: facts that may complete an await. They are inserted by `changes`, with the end that they tell of.

use super::{Error, column};
use crate::domain::{ids::WorkspaceId, task_await::SourceType};
use sqlx::PgConnection;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    pub workspace: WorkspaceId,
    pub source_type: SourceType,
    pub dedup_key: String,
    pub correlation_key: String,
}

/// Locks at most `limit` pending signals of all workspaces, oldest first, skipping those that another matcher holds.
pub async fn lock_pending_all_workspaces(
    conn: &mut PgConnection,
    limit: u32,
) -> Result<Vec<Signal>, Error> {
    let rows = sqlx::query!(
        r#"
        select workspace_id as "workspace: WorkspaceId", source_type as "source_type: SourceType", dedup_key,
            correlation_key
        from signals
        where status = 'pending'
        order by created_at
        limit $1
        for no key update skip locked
        "#,
        i64::from(limit),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| Signal {
            workspace: r.workspace,
            source_type: r.source_type,
            dedup_key: r.dedup_key,
            correlation_key: r.correlation_key,
        })
        .collect())
}

/// Marks locked signals as `matched` (true) or `no_match`.
pub async fn settle(conn: &mut PgConnection, signals: &[(&Signal, bool)]) -> Result<(), Error> {
    sqlx::query!(
        r#"
        update signals s
        set status = case when c.matched then 'matched' else 'no_match' end, settled_at = now()
        from unnest($1::uuid[], $2::text[], $3::text[], $4::boolean[]) as c (workspace_id, source_type, key, matched)
        where s.workspace_id = c.workspace_id and s.source_type = c.source_type and s.dedup_key = c.key
            and s.status = 'pending'
        "#,
        &column(signals, |s| s.0.workspace.0),
        &column(signals, |s| s.0.source_type.as_str().to_owned()),
        &column(signals, |s| s.0.dedup_key.as_str()) as &[&str],
        &column(signals, |s| s.1),
    )
    .execute(conn)
    .await?;
    Ok(())
}
