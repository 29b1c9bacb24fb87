//! What decide steps have taken, summed (T-17). Each step is billed to its own task, so nothing counts twice.
//!
//! Steps count at the time at which they ended, and `steps_ended_idx` finds those of the time asked for, however long the
//! history before it. Deleted tasks count as well: what was spent stays spent.

use super::{Error, task_views::UsageTotals};
use crate::domain::ids::WorkspaceId;
use chrono::{DateTime, Utc};
use sqlx::PgConnection;

/// What is summed into one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    Workspace,
    /// By id: all versions of one agent.
    Agent,
    /// By the task at the top.
    TaskTree,
    /// In UTC.
    Day,
}

impl Group {
    pub const ALL: [Self; 4] = [Self::Workspace, Self::Agent, Self::TaskTree, Self::Day];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Workspace => "workspace",
            Self::Agent => "agent",
            Self::TaskTree => "task_tree",
            Self::Day => "day",
        }
    }
}

#[derive(Clone, Debug)]
pub struct UsageRow {
    /// An id, or a day; empty for all deleted task trees together.
    pub key: String,
    /// The name of the agent, or the title of the task.
    pub label: Option<String>,
    pub usage: UsageTotals,
}

/// From one time up to, not including, another; in order of key, at most `limit` that come after `after`.
#[derive(Clone, Debug)]
pub struct UsageFilter {
    pub group: Group,
    pub from: Option<DateTime<Utc>>,
    pub to: Option<DateTime<Utc>>,
    pub after: Option<String>,
    pub limit: i64,
}

pub async fn sums(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    filter: &UsageFilter,
) -> Result<Vec<UsageRow>, Error> {
    let rows = sqlx::query!(
        r#"
        select g.key as "key!", max(g.label) as label, count(*) as "decide_steps!",
            coalesce(sum(s.input_tokens), 0)::bigint as "input_tokens!",
            coalesce(sum(s.output_tokens), 0)::bigint as "output_tokens!",
            coalesce(sum(s.cached_tokens), 0)::bigint as "cached_tokens!",
            sum(s.cost_micros)::bigint as cost_micros,
            coalesce(sum(extract(epoch from s.finished_at - s.started_at) * 1000), 0)::bigint as "duration_ms!"
        from steps s
        join tasks t on t.workspace_id = s.workspace_id and t.id = s.task_id
        join tasks root on root.workspace_id = t.workspace_id and root.id = t.root_task_id
        left join agents a on $2 = 'agent' and a.workspace_id = t.agent_workspace_id and a.id = t.agent_id
        cross join lateral (
            select case $2
                    when 'workspace' then t.workspace_id::text
                    when 'agent' then t.agent_id::text
                    when 'task_tree' then case when root.deleted_at is null then root.id::text else '' end
                    else (s.finished_at at time zone 'utc')::date::text
                end collate "C" as key,
                case $2 when 'agent' then a.name when 'task_tree' then
                    case when root.deleted_at is null then root.title end end as label
        ) g
        where s.workspace_id = $1 and s.ordinal = 0
            and s.finished_at >= coalesce($3, timestamptz '-infinity')
            and s.finished_at < coalesce($4, timestamptz 'infinity')
            and ($5::text is null or g.key > $5)
        group by g.key
        order by g.key
        limit $6
        "#,
        workspace.0,
        filter.group.as_str(),
        filter.from,
        filter.to,
        filter.after,
        filter.limit,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| UsageRow {
            key: r.key,
            label: r.label,
            usage: UsageTotals {
                decide_steps: r.decide_steps,
                input_tokens: r.input_tokens,
                output_tokens: r.output_tokens,
                cached_tokens: r.cached_tokens,
                cost_micros: r.cost_micros,
                duration_ms: r.duration_ms,
            },
        })
        .collect())
}
