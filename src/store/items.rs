//! Reading the feed for the model's history, and the first messages of new tasks. All other items are written by
//! `changes`.

use super::{Error, changes::ItemKind, column};
use crate::domain::{
    ids::{TaskId, WorkspaceId},
    task::TaskKey,
};
use serde_json::Value;
use sqlx::PgConnection;

/// One item as the history builder wants it.
#[derive(Clone, Debug)]
pub struct HistoryItem {
    pub task: TaskKey,
    pub seq: i64,
    pub kind: ItemKind,
    pub turn: Option<i32>,
    pub seen_seq: Option<i64>,
    pub text: String,
    pub data: Option<Value>,
}

/// The items that make the model's history, by task and in `seq` order.
pub async fn histories(
    conn: &mut PgConnection,
    tasks: &[TaskKey],
) -> Result<Vec<HistoryItem>, Error> {
    let rows = sqlx::query!(
        r#"
        select i.workspace_id as "workspace_id: WorkspaceId", i.task_id as "task_id: TaskId", i.seq,
            i.kind as "kind: ItemKind", i.turn, i.seen_seq, coalesce(i.text, '') as "text!", i.data
        from unnest($1::uuid[], $2::uuid[]) as c (workspace_id, task_id)
        join task_items i on i.workspace_id = c.workspace_id and i.task_id = c.task_id
        where i.kind in ('user_message', 'assistant_message', 'resume_message', 'repair_message', 'tool_result')
        order by i.workspace_id, i.task_id, i.seq
        "#,
        &column(tasks, |k| k.workspace.0),
        &column(tasks, |k| k.task.0),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| HistoryItem {
            task: TaskKey {
                workspace: r.workspace_id,
                task: r.task_id,
            },
            seq: r.seq,
            kind: r.kind,
            turn: r.turn,
            seen_seq: r.seen_seq,
            text: r.text,
            data: r.data,
        })
        .collect())
}

/// The calls of one turn, from its assistant message.
pub async fn calls_of_turn(
    conn: &mut PgConnection,
    task: TaskKey,
    turn: i32,
) -> Result<Option<Value>, Error> {
    Ok(sqlx::query_scalar!(
        r#"
        select data from task_items
        where workspace_id = $1 and task_id = $2 and turn = $3 and kind = 'assistant_message'
        "#,
        task.workspace.0,
        task.task.0,
        turn,
    )
    .fetch_optional(conn)
    .await?
    .flatten())
}
