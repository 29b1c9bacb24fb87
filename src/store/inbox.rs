//! What waits for a person: the pending questions of a workspace, wherever in a tree they were asked (T-26).

use super::{Error, task_views::ParentRef};
use crate::domain::ids::{AgentId, GroupId, TaskId, WorkspaceId};
use chrono::{DateTime, Utc};
use sqlx::PgExecutor;

/// A question that nobody has answered.
#[derive(Clone, Debug)]
pub struct Question {
    pub group: GroupId,
    pub task: TaskId,
    pub title: String,
    pub agent: AgentId,
    pub agent_name: String,
    pub question: String,
    pub since: DateTime<Utc>,
    pub deadline_at: Option<DateTime<Utc>>,
    /// The tasks above, from the root down, without deleted ones.
    pub path: Vec<ParentRef>,
}

/// At most `limit` questions of tasks that live, oldest first, after the one of the group `after`.
pub async fn questions(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    after: Option<GroupId>,
    limit: i64,
) -> Result<Vec<Question>, Error> {
    let rows = sqlx::query!(
        r#"
        with recursive pending as materialized (
            -- apart, so that `awaits_pending_key` finds the few that are open, however long the history in page order
            select a.group_id, a.created_at, a.scheduled_resume_at from awaits a
            where a.workspace_id = $1 and a.source_type = 'user_input' and a.status = 'pending'
                and ($2::uuid is null or a.group_id > $2)
        ), page as materialized (
            select p.group_id, p.created_at, p.scheduled_resume_at, g.about ->> 'question' as question, t.id as task_id
            from pending p
            join await_groups g on g.workspace_id = $1 and g.id = p.group_id
            join tasks t on t.workspace_id = $1 and t.id = g.task_id and t.deleted_at is null and t.finished_at is null
            order by p.group_id
            limit $3
        ), line as (
            -- the asking task (height 0) and those above it
            select p.group_id, p.task_id as id, 0 as height from page p
            union all
            select l.group_id, t.parent_task_id, l.height + 1
            from line l
            join tasks t on t.workspace_id = $1 and t.id = l.id
            where t.parent_task_id is not null
        )
        select l.group_id as "group!: GroupId", l.height as "height!", t.id as "task: TaskId", t.title,
            t.agent_id as "agent: AgentId", coalesce(v.definition ->> 'name', '') as "agent_name!",
            p.question, p.created_at as "since!", p.scheduled_resume_at as deadline_at
        from line l
        join page p on p.group_id = l.group_id
        join tasks t on t.workspace_id = $1 and t.id = l.id and t.deleted_at is null
        join agent_versions v
            on v.workspace_id = t.agent_workspace_id and v.agent_id = t.agent_id and v.version = t.agent_version
        order by l.group_id, l.height desc
        "#,
        workspace.0,
        after.map(|group| group.0),
        limit,
    )
    .fetch_all(db)
    .await?;
    let mut questions = Vec::new();
    let mut path = Vec::new();
    for row in rows {
        // The task that asks closes the line that has led to it.
        match row.height {
            0 => questions.push(Question {
                group: row.group,
                task: row.task,
                title: row.title,
                agent: row.agent,
                agent_name: row.agent_name,
                question: row.question.unwrap_or_default(),
                since: row.since,
                deadline_at: row.deadline_at,
                path: std::mem::take(&mut path),
            }),
            _ => path.push(ParentRef {
                task_id: row.task,
                title: row.title,
                agent_name: row.agent_name,
                agent_group_id: row.agent,
            }),
        }
    }
    Ok(questions)
}
