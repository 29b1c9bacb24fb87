//! What must hold when everything is at rest, whatever was done before. Each fault found names the ids concerned.

use super::{World, load::Tree};
use crate::engine::check;
use std::collections::{BTreeMap, HashMap};

/// The rules beyond the closing check of every case. Each query names what must not be.
const FORBIDDEN: [(&str, &str); 9] = [
    (
        "tasks that have not ended",
        "select id::text || ' is ' || status from tasks where status not in ('completed', 'failed', 'stopped')",
    ),
    (
        "work that is left",
        "select id::text || ': ' || kind from orchestrator_events
         union all select dedup_key || ': signal' from signals where status = 'pending'
         union all select id::text || ': step' from steps where status in ('queued', 'running')",
    ),
    (
        "groups or awaits that are open",
        "select id::text from await_groups where status = 'open'
         union all select group_id::text || ' #' || ordinal from awaits where status = 'pending'",
    ),
    (
        "feeds whose seq is not 1, 2, 3, …",
        "select t.id::text from tasks t left join task_items i on i.workspace_id = t.workspace_id and i.task_id = t.id group by t.workspace_id, t.id
         having coalesce(min(i.seq), 0) <> 1 or coalesce(max(i.seq), 0) <> t.last_seq or count(*) <> t.last_seq",
    ),
    (
        "completed groups without exactly one resume message",
        "select g.id::text from await_groups g where g.status = 'completed' and g.resumed_at is not null
            and (select count(*) from task_items i
                where i.workspace_id = g.workspace_id and i.task_id = g.task_id and i.id = g.id and i.kind = 'resume_message') <> 1",
    ),
    (
        "resume messages that no decision has been shown",
        "select i.id::text from task_items i join tasks t on t.workspace_id = i.workspace_id and t.id = i.task_id
         where i.kind = 'resume_message' and t.status <> 'stopped' and not exists
            (select 1 from task_items a where a.workspace_id = i.workspace_id and a.task_id = i.task_id and a.kind = 'assistant_message' and a.seen_seq >= i.seq)",
    ),
    (
        "decisions that nothing new had called for",
        "select task_id::text || ' turn ' || turn from (
            select task_id, turn, seen_seq, lag(seen_seq) over (partition by task_id order by seq) as before
            from task_items where kind = 'assistant_message') d where seen_seq <= before",
    ),
    (
        "children made twice",
        "select min(id::text) || ' ' || title from tasks where parent_task_id is not null group by parent_task_id, title
         having count(*) > 1",
    ),
    (
        "children whose first message is not there exactly once",
        "select t.id::text from tasks t where t.parent_task_id is not null and (select count(*) from task_items i
            where i.workspace_id = t.workspace_id and i.task_id = t.id and i.kind = 'user_message') <> 1",
    ),
];

/// Checks everything that was posted so far.
pub async fn hold(world: &World, trees: &[Tree]) {
    for (what, sql) in FORBIDDEN {
        let found: Vec<String> = sqlx::query_scalar(sql)
            .fetch_all(&world.pool)
            .await
            .unwrap();
        world.none(what, &found);
    }
    roots(world, trees).await;
    endings(world, trees).await;
    streams(world, trees).await;
    world.none(
        "histories that the strict provider refused",
        &world.llm.refusals(),
    );
    // It panics, which would keep the report from being printed.
    let pool = world.pool.clone();
    if let Err(error) = tokio::spawn(async move { check(&pool).await }).await {
        world.fail(format!("the closing check fails: {error}"));
    }
}

/// One task for each key that was acknowledged, and each message once.
async fn roots(world: &World, trees: &[Tree]) {
    let rows: Vec<(String, String)> = sqlx::query_as(
        "select i.text, i.task_id::text from task_items i join tasks t on t.workspace_id = i.workspace_id and t.id = i.task_id
         where t.parent_task_id is null and i.kind = 'user_message'",
    )
    .fetch_all(&world.pool)
    .await
    .unwrap();
    let mut kept: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (text, task) in &rows {
        kept.entry(text).or_default().push(task);
    }
    let mut wrong = Vec::new();
    for tree in trees {
        for text in [Some(&tree.name), tree.second.as_ref()]
            .into_iter()
            .flatten()
        {
            let tasks = kept.remove(text.as_str()).unwrap_or_default();
            if tasks != [tree.task.as_str()] {
                wrong.push(format!(
                    "{text:?} acknowledged as {} is in {tasks:?}",
                    tree.task
                ));
            }
        }
    }
    world.none("messages lost or kept twice", &wrong);
    let unknown: Vec<String> = kept.into_iter().map(|kept| format!("{kept:?}")).collect();
    world.none("messages that nobody knows of", &unknown);
}

/// Each task of a tree that nobody has disturbed is there once and has ended as the script says, with each child's result
/// once in its answer and with no decision too many.
async fn endings(world: &World, trees: &[Tree]) {
    type Row = (String, String, String, String, Option<String>, i64);
    let rows: Vec<Row> = sqlx::query_as(
        "select t.root_task_id::text, t.id::text, t.title, t.status, t.output, (select count(*) from steps s
            where s.workspace_id = t.workspace_id and s.task_id = t.id and s.kind = 'decide_next_action' and s.status = 'completed')
         from tasks t",
    )
    .fetch_all(&world.pool)
    .await
    .unwrap();
    let mut by_root: HashMap<String, Vec<Row>> = HashMap::new();
    for row in rows {
        by_root.entry(row.0.clone()).or_default().push(row);
    }
    let mut wrong = Vec::new();
    for tree in trees.iter().filter(|tree| !tree.is_stopped) {
        let rows = by_root.get(&tree.task).map_or(&[][..], Vec::as_slice);
        let mut there: Vec<&str> = rows.iter().map(|row| row.2.as_str()).collect();
        let mut names = world.script.names(&tree.name);
        there.sort_unstable();
        names.sort_unstable();
        if there != names {
            wrong.push(format!("{} has {there:?} instead of {names:?}", tree.task));
        }
        for (_, id, name, status, output, decides) in rows {
            // A second message is answered by a decision of its own, or by one that was due anyway.
            if tree.second.is_some() && *name == tree.name {
                continue;
            }
            let ending = world.script.ending(name);
            if (status.as_str(), output, *decides) != (ending.0, &ending.1, ending.2) {
                wrong.push(format!(
                    "{id} ({name}) is {status} after {decides} decisions with {output:?} instead of {ending:?}"
                ));
            }
        }
    }
    world.none("tasks that did not end as they should", &wrong);
}

/// Every item of the feed was shown once and in order.
async fn streams(world: &World, trees: &[Tree]) {
    let mut wrong = Vec::new();
    for (task, seen) in trees
        .iter()
        .filter_map(|t| Some((&t.task, t.seen.as_ref()?)))
    {
        let items: Vec<(i64, String)> = sqlx::query_as(
            "select seq, kind from task_items where task_id = $1::uuid order by seq",
        )
        .bind(task)
        .fetch_all(&world.pool)
        .await
        .unwrap();
        if items != *seen {
            wrong.push(format!("{task} showed {seen:?} of {items:?}"));
        }
    }
    world.none("streams with gaps, doubles or another order", &wrong);
}

/// What the faults leave in the database's log; how often each came is printed.
const EXPECTED_IN_LOG: [&str; 12] = [
    // `migrate` looks what there is, before the first fault.
    "relation \"_sqlx_migrations\" does not exist",
    // A guarded write met a row that had changed: `store::changes::apply` undoes itself so.
    "division by zero",
    // Who asks for a commit and goes away before it is answered has a rollback sent after it.
    "there is no transaction in progress",
    "terminating connection due to administrator command",
    "terminating connection because of unexpected SIGQUIT",
    "terminating connection because of crash of another server process",
    "terminating connection due to immediate shutdown command",
    "the database system is starting up",
    "the database system is shutting down",
    "the database system is not yet accepting connections",
    "the database system is in recovery mode",
    "connection to client lost",
];

/// Counts the errors in the database's log by their text; anything that no fault explains is a failure.
pub fn judge_log(world: &World) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    let mut unexplained = Vec::new();
    for name in ["postgres.log.1", "postgres.log"] {
        let Ok(bytes) = std::fs::read(world.home.0.join(name)) else {
            continue;
        };
        for line in String::from_utf8_lossy(&bytes).lines() {
            let found = ["WARNING:  ", "ERROR:  ", "FATAL:  ", "PANIC:  "]
                .iter()
                .find_map(|level| Some((level.trim(), line.split_once(level)?.1)));
            let Some((level, text)) = found else { continue };
            match EXPECTED_IN_LOG
                .iter()
                .find(|expected| text.starts_with(**expected))
            {
                Some(expected) => *counts.entry(format!("{level} {expected}")).or_default() += 1,
                None => unexplained.push(line.to_owned()),
            }
        }
    }
    world.none(
        "errors in the database's log that no fault explains",
        &unexplained,
    );
    counts
}
