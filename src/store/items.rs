//! Reading the feed for the model's history, and the first messages of new tasks. All other items are written by
//! `changes`.

use super::{Error, changes::ItemKind, column};
use crate::domain::{
    ids::{TaskId, WorkspaceId},
    task::TaskKey,
};
use serde_json::Value;
use sqlx::PgConnection;
use std::collections::HashMap;

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

/// What the assistant message of a task's newest turn says.
#[derive(Clone, Debug)]
pub struct NewestTurn {
    pub turn: i32,
    /// Its calls.
    pub data: Option<Value>,
    /// How many of them have started.
    pub started: i32,
}

/// The newest turn of each task that has one.
pub async fn newest_turns(
    conn: &mut PgConnection,
    tasks: &[TaskKey],
) -> Result<HashMap<TaskKey, NewestTurn>, Error> {
    let rows = sqlx::query!(
        r#"
        select c.workspace_id as "workspace_id!: WorkspaceId", c.task_id as "task_id!: TaskId", m.turn as "turn!", m.data,
            (select coalesce(max(s.ordinal), 0) from steps s
             where s.workspace_id = c.workspace_id and s.task_id = c.task_id and s.turn = m.turn) as "started!"
        from unnest($1::uuid[], $2::uuid[]) as c (workspace_id, task_id)
        cross join lateral (
            select i.turn, i.data from task_items i
            where i.workspace_id = c.workspace_id and i.task_id = c.task_id and i.kind = 'assistant_message'
            order by i.seq desc
            limit 1
        ) m
        "#,
        &column(tasks, |k| k.workspace.0),
        &column(tasks, |k| k.task.0),
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| {
            let key = TaskKey {
                workspace: r.workspace_id,
                task: r.task_id,
            };
            let newest = NewestTurn {
                turn: r.turn,
                data: r.data,
                started: r.started,
            };
            (key, newest)
        })
        .collect())
}
