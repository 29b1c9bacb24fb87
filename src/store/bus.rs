//! What processes tell each other: notifications, who is alive, and model text on its way to watchers elsewhere.

use super::{Error, column};
use crate::domain::ids::{ProcessId, TaskId, WorkspaceId};
use sqlx::PgConnection;

/// The channel of all notifications.
pub const CHANNEL: &str = "reconvene";

/// Sends one notification each, outside of any transaction that matters. Payloads carry ids only: far below the limit of
/// 8,000 bytes (H-18).
pub async fn notify(conn: &mut PgConnection, payloads: &[String]) -> Result<(), Error> {
    sqlx::query!(
        "select pg_notify($1, p) from unnest($2::text[]) as p",
        CHANNEL,
        payloads,
    )
    .fetch_all(conn)
    .await?;
    Ok(())
}

/// A process that has been silent for so long is not counted.
pub const SILENT_SECS: f64 = 20.0;

/// Says that this process is alive; returns how many others are.
pub async fn beat(
    conn: &mut PgConnection,
    process: ProcessId,
    roles: &[String],
    host: &str,
) -> Result<i64, Error> {
    Ok(sqlx::query_scalar!(
        r#"
        with me as (
            insert into processes (id, roles, host, pid) values ($1, $2, $3, $4)
            on conflict (id) do update set heartbeat_at = now()
        )
        select count(*) as "others!" from processes
        where id <> $1 and heartbeat_at > now() - make_interval(secs => $5)
        "#,
        process.0,
        roles,
        host,
        std::process::id() as i32,
        SILENT_SECS,
    )
    .fetch_one(conn)
    .await?)
}

/// This process leaves.
pub async fn leave(conn: &mut PgConnection, process: ProcessId) -> Result<(), Error> {
    sqlx::query!("delete from processes where id = $1", process.0)
        .execute(conn)
        .await?;
    Ok(())
}

/// Keeps pieces of model text for watchers in other processes; returns the id of each with its task.
pub async fn put_chunks(
    conn: &mut PgConnection,
    chunks: &[(WorkspaceId, TaskId, i32, String)],
) -> Result<Vec<(TaskId, i64)>, Error> {
    let rows = sqlx::query!(
        r#"
        insert into stream_chunks (workspace_id, task_id, turn, text)
        select * from unnest($1::uuid[], $2::uuid[], $3::integer[], $4::text[])
        returning task_id as "task: TaskId", id
        "#,
        &column(chunks, |c| c.0.0),
        &column(chunks, |c| c.1.0),
        &column(chunks, |c| c.2),
        &column(chunks, |c| c.3.as_str()) as &[&str],
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|r| (r.task, r.id)).collect())
}

/// A piece of model text.
#[derive(Clone, Debug)]
pub struct Chunk {
    pub workspace: WorkspaceId,
    pub task: TaskId,
    pub id: i64,
    pub turn: i32,
    pub text: String,
}

/// These pieces, in order. All workspaces: the reader hands each to watchers of its task.
pub async fn chunks_all_workspaces(
    conn: &mut PgConnection,
    chunks: &[(TaskId, i64)],
) -> Result<Vec<Chunk>, Error> {
    Ok(sqlx::query_as!(
        Chunk,
        r#"
        select s.workspace_id as "workspace: WorkspaceId", s.task_id as "task: TaskId", s.id, s.turn, s.text
        from unnest($1::uuid[], $2::bigint[]) as c (task_id, id)
        join stream_chunks s on s.task_id = c.task_id and s.id = c.id
        order by s.id
        "#,
        &column(chunks, |c| c.0.0),
        &column(chunks, |c| c.1),
    )
    .fetch_all(conn)
    .await?)
}

/// Removes streamed text after a minute and processes after an hour of silence.
pub async fn forget_old_all_workspaces(conn: &mut PgConnection) -> Result<(), Error> {
    sqlx::query!("delete from stream_chunks where created_at < now() - interval '1 minute'")
        .execute(&mut *conn)
        .await?;
    sqlx::query!("delete from processes where heartbeat_at < now() - interval '1 hour'")
        .execute(conn)
        .await?;
    Ok(())
}
