//! Whether the queues hold anything: one look for all loops of a process.

use super::Error;
use sqlx::PgConnection;

/// Which of the orchestrator's queues have something that is due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Due {
    pub events: bool,
    pub signals: bool,
    pub awaits: bool,
    /// External signals that came before their wait and now have one, or are too old.
    pub early_signals: bool,
    pub leases: bool,
}

/// Looks at all queues of all workspaces. `early_ttl_secs` is `signals.early_ttl_seconds`. Rows that somebody has in hand
/// are seen too: this is a reason to look closer, nothing else.
pub async fn due_all_workspaces(
    conn: &mut PgConnection,
    early_ttl_secs: u32,
) -> Result<Due, Error> {
    Ok(sqlx::query_as!(
        Due,
        r#"
        select
            exists (select from orchestrator_events where dead_at is null and not_before <= now()) as "events!",
            exists (select from signals where status = 'pending' and source_type <> 'external') as "signals!",
            exists (select from awaits where status = 'pending' and scheduled_resume_at <= now()) as "awaits!",
            exists (
                select from signals s
                where s.status = 'pending' and s.source_type = 'external' and (
                    s.created_at < now() - make_interval(secs => $1)
                    or exists (
                        select from awaits a
                        where a.workspace_id = s.workspace_id and a.source_type = 'external'
                            and a.correlation_key = s.correlation_key and a.status = 'pending'))
            ) as "early_signals!",
            exists (select from steps where status = 'running' and lease_expires_at < now()) as "leases!"
        "#,
        f64::from(early_ttl_secs),
    )
    .fetch_one(conn)
    .await?)
}
