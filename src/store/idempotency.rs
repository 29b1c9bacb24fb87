//! First answers of calls with an Idempotency-Key (T-2).

use super::{Error, column};
use crate::domain::ids::WorkspaceId;
use serde_json::Value;
use sqlx::PgConnection;

#[derive(Clone, Debug)]
pub struct Reservation {
    pub workspace: WorkspaceId,
    pub key: String,
    pub body_hash: Vec<u8>,
    pub answer: Value,
}

/// Reserves keys with their answers; returns, by place, what an earlier call had reserved. Waits for an earlier call
/// that has not committed yet.
pub async fn reserve(
    conn: &mut PgConnection,
    reservations: &[Reservation],
) -> Result<Vec<Option<Reservation>>, Error> {
    let mut taken = vec![None; reservations.len()];
    let new = sqlx::query!(
        r#"
        insert into idempotency_keys (workspace_id, key, body_hash, answer)
        select * from unnest($1::uuid[], $2::text[], $3::bytea[], $4::jsonb[])
        order by 1, 2
        on conflict do nothing
        returning workspace_id, key
        "#,
        &column(reservations, |r| r.workspace.0),
        &column(reservations, |r| r.key.clone()),
        &column(reservations, |r| r.body_hash.clone()),
        &column(reservations, |r| r.answer.clone()),
    )
    .fetch_all(&mut *conn)
    .await?;
    if new.len() == reservations.len() {
        return Ok(taken);
    }
    // A statement of its own sees what the insert had to wait for.
    let rows = sqlx::query!(
        r#"
        select c.n as "n!", i.body_hash, i.answer
        from unnest($1::uuid[], $2::text[]) with ordinality as c (workspace_id, key, n)
        join idempotency_keys i on i.workspace_id = c.workspace_id and i.key = c.key
        "#,
        &column(reservations, |r| r.workspace.0),
        &column(reservations, |r| r.key.clone()),
    )
    .fetch_all(conn)
    .await?;
    for row in rows {
        let at = (row.n - 1) as usize;
        let Some(own) = reservations.get(at) else {
            continue;
        };
        let is_new = new
            .iter()
            .any(|n| n.workspace_id == own.workspace.0 && n.key == own.key);
        if !is_new {
            taken[at] = Some(Reservation {
                workspace: own.workspace,
                key: own.key.clone(),
                body_hash: row.body_hash,
                answer: row.answer,
            });
        }
    }
    Ok(taken)
}

/// Forgets keys of all workspaces that are older than 24 hours.
pub async fn forget_old_all_workspaces(conn: &mut PgConnection) -> Result<u64, Error> {
    let done =
        sqlx::query!("delete from idempotency_keys where created_at < now() - interval '24 hours'")
            .execute(conn)
            .await?;
    Ok(done.rows_affected())
}
