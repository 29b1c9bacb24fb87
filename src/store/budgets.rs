//! Budgets, and the decide steps under them (T-18). Nothing here is asked of a task that has none above it.
//!
//! A call's reservation counts while its step runs, and what the step has taken counts from then on, whoever sums it up
//! first: so a reservation ends with its step, however that ends, and nobody has to give it back.

use super::{Error, column};
use crate::domain::{
    budget::{Calls, Limits, Owner},
    ids::{TaskId, WorkspaceId},
    step::StepKey,
};
use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgExecutor};
use std::collections::HashMap;
use uuid::Uuid;

/// A budget under its lock.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    pub id: Uuid,
    pub owner: Owner,
    pub limits: Limits,
    pub children: i64,
}

/// Locks the budgets of the task, of those above it, and of the workspace, in key order. Tasks, if any are locked, are
/// locked before.
pub async fn lock_above(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    task: TaskId,
) -> Result<Vec<Budget>, Error> {
    let rows = sqlx::query!(
        r#"
        with recursive up as (
            select t.id, t.parent_task_id from tasks t where t.workspace_id = $1 and t.id = $2
            union all
            select t.id, t.parent_task_id from up join tasks t on t.workspace_id = $1 and t.id = up.parent_task_id
        )
        select b.id, b.id = b.workspace_id as "is_workspace!", b.tokens_max, b.cost_micros_max, b.children_max, b.children
        from budgets b
        where b.workspace_id = $1 and (b.id = $1 or b.id in (select id from up))
        order by b.id
        for no key update of b
        "#,
        workspace.0,
        task.0,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| Budget {
            id: r.id,
            owner: match r.is_workspace {
                true => Owner::Workspace,
                false => Owner::Task,
            },
            limits: Limits {
                tokens: r.tokens_max,
                cost_micros: r.cost_micros_max,
                children: r.children_max,
            },
            children: r.children,
        })
        .collect())
}

/// Counts the steps that have ended since somebody counted last. The budgets must be locked.
pub async fn settle(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    budgets: &[Budget],
) -> Result<(), Error> {
    sqlx::query!(
        r#"
        with ended as (
            delete from budget_calls c
            using steps s
            where c.workspace_id = $1 and c.budget_id = any($2) and s.workspace_id = $1 and s.task_id = c.task_id
                and s.turn = c.turn and s.ordinal = 0 and s.finished_at is not null
            returning c.budget_id, coalesce(s.input_tokens, 0) + coalesce(s.output_tokens, 0) as tokens,
                coalesce(s.cost_micros, 0) as cost_micros
        )
        update budgets b set tokens = b.tokens + e.tokens, cost_micros = b.cost_micros + e.cost_micros
        from (
            select budget_id, sum(tokens)::bigint as tokens, sum(cost_micros)::bigint as cost_micros from ended group by 1
        ) e
        where b.workspace_id = $1 and b.id = e.budget_id
        "#,
        workspace.0,
        &column(budgets, |b| b.id),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// What calls under a budget have taken, and what is reserved for those that others have under way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Standing {
    pub made: Calls,
    pub under_way: Calls,
}

/// After [`settle`]; `own` is the step that asks.
pub async fn standings(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    budgets: &[Budget],
    own: StepKey,
) -> Result<HashMap<Uuid, Standing>, Error> {
    let rows = sqlx::query!(
        r#"
        select b.id,
            (b.tokens + coalesce(sum(coalesce(s.input_tokens, 0) + coalesce(s.output_tokens, 0)), 0))::bigint
                as "tokens!",
            (b.cost_micros + coalesce(sum(coalesce(s.cost_micros, 0)), 0))::bigint as "cost_micros!",
            count(*) filter (where s.status = 'running' and not c.own) as "running!",
            coalesce(sum(c.tokens) filter (where s.status = 'running' and not c.own), 0)::bigint as "reserved_tokens!",
            coalesce(sum(c.cost_micros) filter (where s.status = 'running' and not c.own), 0)::bigint
                as "reserved_cost_micros!"
        from budgets b
        left join lateral (
            select c.task_id, c.turn, c.tokens, c.cost_micros, c.task_id = $3 and c.turn = $4 as own
            from budget_calls c where c.workspace_id = $1 and c.budget_id = b.id
        ) c on true
        left join steps s on s.workspace_id = $1 and s.task_id = c.task_id and s.turn = c.turn and s.ordinal = 0
        where b.workspace_id = $1 and b.id = any($2)
        group by b.id, b.tokens, b.cost_micros
        "#,
        workspace.0,
        &column(budgets, |b| b.id),
        own.task.0,
        own.turn,
    )
    .fetch_all(conn)
    .await?;
    let standing = |r: (i64, i64, i64, i64, i64)| Standing {
        made: Calls {
            number: 0,
            tokens: r.0,
            cost_micros: r.1,
        },
        under_way: Calls {
            number: r.2,
            tokens: r.3,
            cost_micros: r.4,
        },
    };
    Ok(rows
        .into_iter()
        .map(|r| {
            let numbers = (
                r.tokens,
                r.cost_micros,
                r.running,
                r.reserved_tokens,
                r.reserved_cost_micros,
            );
            (r.id, standing(numbers))
        })
        .collect())
}

/// Reserves for a call of this step in each of the budgets.
pub async fn reserve(
    conn: &mut PgConnection,
    budgets: &[Budget],
    step: StepKey,
    tokens: i64,
    cost_micros: i64,
) -> Result<(), Error> {
    sqlx::query!(
        r#"
        insert into budget_calls (workspace_id, budget_id, task_id, turn, tokens, cost_micros)
        select $1, b.id, $3, $4, $5, $6 from unnest($2::uuid[]) as b (id)
        on conflict (workspace_id, budget_id, task_id, turn)
            do update set tokens = excluded.tokens, cost_micros = excluded.cost_micros
        "#,
        step.workspace.0,
        &column(budgets, |b| b.id),
        step.task.0,
        step.turn,
        tokens,
        cost_micros,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Counts children that are made in the same transaction.
pub async fn add_children(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    budgets: &[Budget],
    more: i64,
) -> Result<(), Error> {
    sqlx::query!(
        "update budgets set children = children + $3 where workspace_id = $1 and id = any($2)",
        workspace.0,
        &column(budgets, |b| b.id),
        more,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Gives the workspace a budget, in the place of the one that it may have. It counts from now on.
pub async fn set(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    limits: Limits,
) -> Result<(), Error> {
    sqlx::query!(
        r#"
        insert into budgets as b (workspace_id, id, tokens_max, cost_micros_max, children_max) values ($1, $1, $2, $3, $4)
        on conflict (workspace_id, id) do update set tokens_max = $2, cost_micros_max = $3, children_max = $4, tokens = 0,
            cost_micros = 0, children = 0, counts_since = now()
        "#,
        workspace.0,
        limits.tokens,
        limits.cost_micros,
        limits.children,
    )
    .execute(&mut *conn)
    .await?;
    sqlx::query!(
        "delete from budget_calls where workspace_id = $1 and budget_id = $1",
        workspace.0
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Takes the workspace's budget away. `false` when there is none.
pub async fn remove(conn: &mut PgConnection, workspace: WorkspaceId) -> Result<bool, Error> {
    let done = sqlx::query!(
        "delete from budgets where workspace_id = $1 and id = $1",
        workspace.0
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// A budget as callers see it.
#[derive(Clone, Debug)]
pub struct BudgetUse {
    pub limits: Limits,
    pub tokens: i64,
    pub cost_micros: i64,
    pub children: i64,
    pub counts_since: DateTime<Utc>,
}

/// The budgets of these tasks, or of the workspace, by id.
pub async fn uses(
    db: impl PgExecutor<'_>,
    workspace: WorkspaceId,
    ids: &[Uuid],
) -> Result<HashMap<Uuid, BudgetUse>, Error> {
    let rows = sqlx::query!(
        r#"
        select b.id, b.tokens_max, b.cost_micros_max, b.children_max, b.children, b.counts_since,
            (b.tokens + c.tokens)::bigint as "tokens!", (b.cost_micros + c.cost_micros)::bigint as "cost_micros!"
        from budgets b
        cross join lateral (
            select coalesce(sum(coalesce(s.input_tokens, 0) + coalesce(s.output_tokens, 0)), 0) as tokens,
                coalesce(sum(s.cost_micros), 0) as cost_micros
            from budget_calls c
            join steps s on s.workspace_id = $1 and s.task_id = c.task_id and s.turn = c.turn and s.ordinal = 0
            where c.workspace_id = $1 and c.budget_id = b.id
        ) c
        where b.workspace_id = $1 and b.id = any($2)
        "#,
        workspace.0,
        ids,
    )
    .fetch_all(db)
    .await?;
    Ok(rows
        .into_iter()
        .map(|r| {
            let found = BudgetUse {
                limits: Limits {
                    tokens: r.tokens_max,
                    cost_micros: r.cost_micros_max,
                    children: r.children_max,
                },
                tokens: r.tokens,
                cost_micros: r.cost_micros,
                children: r.children,
                counts_since: r.counts_since,
            };
            (r.id, found)
        })
        .collect())
}
