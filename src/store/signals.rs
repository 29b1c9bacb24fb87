//! Rows of `signals`: facts that may complete an await. That a child has ended is inserted by `changes`, with that end;
//! what comes from outside is inserted here.

use super::{Error, awaits::PendingAwait, column};
use crate::domain::{
    ids::{GroupId, WorkspaceId},
    task_await::SourceType,
};
use serde_json::Value;
use sqlx::PgConnection;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    pub workspace: WorkspaceId,
    pub source_type: SourceType,
    pub dedup_key: String,
    pub correlation_key: String,
}

/// Locks at most `limit` pending signals of all workspaces, oldest first, skipping those that another matcher holds, and
/// reads the pending awaits for the same things, each of one workspace (W-7). External signals are not among them: they
/// may have come before anybody waits. Nothing is waited for, and an await is older than what it waits for, so one
/// statement sees both.
pub async fn lock_pending_with_awaits_all_workspaces(
    conn: &mut PgConnection,
    limit: u32,
) -> Result<(Vec<Signal>, Vec<PendingAwait>), Error> {
    let rows = sqlx::query!(
        r#"
        with taken as (
            select workspace_id, source_type, dedup_key, correlation_key
            from signals
            where status = 'pending' and source_type <> 'external'
            order by created_at
            limit $1
            for no key update skip locked
        )
        select s.workspace_id as "workspace: WorkspaceId", s.source_type as "source_type: SourceType", s.dedup_key,
            s.correlation_key, a.group_id as "group?: GroupId", a.ordinal as "ordinal?"
        from taken s
        -- There is at most one (W-5). The limit makes the planner look for each, however few it thinks are pending.
        left join lateral (
            select a.group_id, a.ordinal from awaits a
            where a.workspace_id = s.workspace_id and a.source_type = s.source_type
                and a.correlation_key = s.correlation_key and a.status = 'pending'
            limit 1
        ) a on true
        "#,
        i64::from(limit),
    )
    .fetch_all(conn)
    .await?;
    let awaits = rows.iter().filter_map(|r| {
        Some(PendingAwait {
            workspace: r.workspace,
            group: r.group?,
            ordinal: r.ordinal?,
            source_type: r.source_type,
            correlation_key: r.correlation_key.clone(),
        })
    });
    let awaits = awaits.collect();
    let signals = rows.into_iter().map(|r| Signal {
        workspace: r.workspace,
        source_type: r.source_type,
        dedup_key: r.dedup_key,
        correlation_key: r.correlation_key,
    });
    Ok((signals.collect(), awaits))
}

/// Marks locked signals as `matched` (true) or `no_match`.
pub async fn settle(conn: &mut PgConnection, signals: &[(&Signal, bool)]) -> Result<(), Error> {
    sqlx::query!(
        r#"
        update signals s
        set status = case when c.matched then 'matched' else 'no_match' end, settled_at = now()
        from unnest($1::uuid[], $2::text[], $3::text[], $4::boolean[]) as c (workspace_id, source_type, key, matched)
        where s.workspace_id = c.workspace_id and s.source_type = c.source_type and s.dedup_key = c.key
            and s.settled_at is null
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

/// A fact that somebody outside reports.
#[derive(Clone, Debug)]
pub struct NewExternal {
    pub workspace: WorkspaceId,
    pub correlation_key: String,
    pub dedup_key: String,
    pub payload: Option<Value>,
}

/// What became of a reported fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The first with its `dedup_key`.
    pub is_new: bool,
    /// `pending` (nobody waits yet), `matched` or `no_match`.
    pub status: String,
}

/// Stores an external signal. The first one with its `dedup_key` wins; returns whether this is it.
pub async fn insert_external(conn: &mut PgConnection, new: &NewExternal) -> Result<bool, Error> {
    let done = sqlx::query!(
        r#"
        insert into signals (workspace_id, source_type, dedup_key, correlation_key, payload)
        values ($1, 'external', $2, $3, $4)
        on conflict do nothing
        "#,
        new.workspace.0,
        new.dedup_key,
        new.correlation_key,
        new.payload,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// As [`insert_external`] for one whose await is known, and has been completed by it (`matched`) or is over.
pub async fn insert_settled(
    conn: &mut PgConnection,
    new: &NewExternal,
    matched: bool,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        r#"
        insert into signals (workspace_id, source_type, dedup_key, correlation_key, payload, status, settled_at)
        values ($1, 'external', $2, $3, $4, case when $5 then 'matched' else 'no_match' end, now())
        on conflict do nothing
        "#,
        new.workspace.0,
        new.dedup_key,
        new.correlation_key,
        new.payload,
        matched,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// The state of an external signal that has been stored. Waits for a matcher that has it in hand.
pub async fn external_status(
    conn: &mut PgConnection,
    signal: &NewExternal,
) -> Result<String, Error> {
    Ok(sqlx::query_scalar!(
        r#"
        select status from signals
        where workspace_id = $1 and source_type = 'external' and dedup_key = $2
        for share
        "#,
        signal.workspace.0,
        signal.dedup_key,
    )
    .fetch_one(conn)
    .await?)
}

/// Locks at most `limit` external signals of all workspaces that a pending await waits for, with that await and
/// what it brings.
pub async fn lock_external_with_await_all_workspaces(
    conn: &mut PgConnection,
    limit: u32,
) -> Result<Vec<(Signal, PendingAwait, Option<Value>)>, Error> {
    let rows = sqlx::query!(
        r#"
        select s.workspace_id as "workspace: WorkspaceId", s.dedup_key, s.correlation_key,
            a.group_id as "group: GroupId", a.ordinal, s.payload
        from signals s
        join awaits a on a.workspace_id = s.workspace_id and a.source_type = 'external'
            and a.correlation_key = s.correlation_key and a.status = 'pending'
        where s.status = 'pending' and s.source_type = 'external'
        order by s.created_at
        limit $1
        for no key update of s skip locked
        "#,
        i64::from(limit),
    )
    .fetch_all(&mut *conn)
    .await?;
    let mut found: Vec<(Signal, PendingAwait, Option<Value>)> = Vec::with_capacity(rows.len());
    for r in rows {
        // Of several signals for one await the first completes it; the rest wait for the next await of that name.
        if found
            .iter()
            .any(|(_, a, _)| a.group == r.group && a.ordinal == r.ordinal)
        {
            continue;
        }
        let awaited = PendingAwait {
            workspace: r.workspace,
            group: r.group,
            ordinal: r.ordinal,
            source_type: SourceType::External,
            correlation_key: r.correlation_key.clone(),
        };
        let signal = Signal {
            workspace: r.workspace,
            source_type: SourceType::External,
            dedup_key: r.dedup_key,
            correlation_key: r.correlation_key,
        };
        found.push((signal, awaited, r.payload));
    }
    Ok(found)
}

/// At most `limit` early signals of all workspaces that are older than `ttl_secs` find nobody any more. Returns how many.
pub async fn give_up_early_all_workspaces(
    conn: &mut PgConnection,
    ttl_secs: u32,
    limit: u32,
) -> Result<u64, Error> {
    let done = sqlx::query!(
        r#"
        with old as (
            select workspace_id, source_type, dedup_key from signals
            where status = 'pending' and source_type = 'external'
                and created_at < now() - make_interval(secs => $1)
            order by created_at
            limit $2
            for no key update skip locked
        )
        update signals s set status = 'no_match', settled_at = now()
        from old
        where s.workspace_id = old.workspace_id and s.source_type = old.source_type and s.dedup_key = old.dedup_key
            and s.status = 'pending'
        "#,
        f64::from(ttl_secs),
        i64::from(limit),
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected())
}
