//! The workloads, each run once by a call. Times come from the database's rows wherever they can.

use crate::{
    cluster::{Cluster, Meter, Used},
    service::{Client, Service},
    stub::Stub,
    text,
};
use anyhow::{Context, ensure};
use sqlx::{Connection, PgConnection, PgPool};
use std::time::{Duration, Instant};
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(120);
const CONNECTIONS: usize = 32;

/// One delegation, from the start of the call to the claim of the resumed decide step, with what lies between.
#[derive(Clone, Debug)]
pub struct Delegation {
    pub ms: f64,
    pub used: Used,
    /// Ends of phases, in ms after the start: children stored, last child dispatched, claimed, finished, matched.
    pub phases: [f64; 5],
}

/// One parent with so many children.
pub async fn delegation(
    cluster: &Cluster,
    client: &mut Client,
    children: usize,
) -> anyhow::Result<Delegation> {
    let meter = Meter::start(&cluster.pool).await?;
    let parent = client.post(&text::list(children)).await?;
    until_ended(cluster, parent).await?;
    let used = meter.stop(&cluster.pool).await?;
    let row: (i64, f64, f64, f64, f64, f64, f64) = sqlx::query_as(
        "with call as (select workspace_id, started_at as at from steps
                where workspace_id = $2 and task_id = $1 and turn = 1 and ordinal = 1),
            resumed as (select started_at as at from steps
                where workspace_id = $2 and task_id = $1 and turn = 2 and ordinal = 0),
            child as (
                select max(t.created_at) as created, max(s.queued_at) as queued, max(s.started_at) as claimed,
                    max(t.finished_at) as finished,
                    -- a join may be planned by two columns of the key only
                    max((select g.settled_at from signals g where g.workspace_id = t.workspace_id
                        and g.source_type = 'child_task' and g.dedup_key = t.id::text)) as matched,
                    count(*) filter (where t.status = 'completed') as n
                from call
                join tasks t on t.workspace_id = call.workspace_id and t.parent_task_id = $1
                join steps s on s.workspace_id = t.workspace_id and s.task_id = t.id)
        select n, ms(resumed.at - call.at), ms(created - call.at), ms(queued - call.at), ms(claimed - call.at),
            ms(finished - call.at), ms(matched - call.at)
        from call, resumed, child",
    )
    .bind(parent)
    .bind(cluster.demo.workspace.0)
    .fetch_one(&cluster.pool)
    .await
    .context("the delegation can not be read back")?;
    ensure!(
        row.0 == children as i64,
        "{} of {children} children completed",
        row.0
    );
    Ok(Delegation {
        ms: row.1,
        used,
        phases: [row.2, row.3, row.4, row.5, row.6],
    })
}

/// Many parents at once; children per second from the first call to the last resume.
pub async fn delegations(
    cluster: &Cluster,
    service: &Service,
    parents: usize,
    children: usize,
) -> anyhow::Result<f64> {
    let list = text::list(children);
    let tasks = post_all(service, parents, &list).await?;
    for task in &tasks {
        until_ended(cluster, *task).await?;
    }
    let (n, ms): (i64, f64) = sqlx::query_as(
        "select count(*), ms(max(r.started_at) - min(c.started_at))
         from unnest($1::uuid[]) as p (id)
         join steps c on c.workspace_id = $2 and c.task_id = p.id and c.turn = 1 and c.ordinal = 1
         join steps r on r.workspace_id = $2 and r.task_id = p.id and r.turn = 2 and r.ordinal = 0",
    )
    .bind(&tasks)
    .bind(cluster.demo.workspace.0)
    .fetch_one(&cluster.pool)
    .await?;
    ensure!(n == parents as i64, "{n} of {parents} parents were resumed");
    Ok((parents * children) as f64 / ms * 1000.0)
}

/// One parent with one child at a time: milliseconds from the child's end to the parent's request to the model.
pub async fn resumes(
    cluster: &Cluster,
    client: &mut Client,
    stub: &Stub,
    n: usize,
) -> anyhow::Result<Vec<f64>> {
    stub.take_resumed();
    let mut latencies = Vec::with_capacity(n);
    for _ in 0..n {
        let parent = client.post(&text::list(1)).await?;
        until_ended(cluster, parent).await?;
        let asked = stub.take_resumed();
        ensure!(
            asked.len() == 1,
            "one resume asked the model {} times",
            asked.len()
        );
        let ended: f64 = sqlx::query_scalar(
            "select extract(epoch from max(finished_at))::float8 from tasks where workspace_id = $2 and parent_task_id = $1",
        )
        .bind(parent)
        .bind(cluster.demo.workspace.0)
        .fetch_one(&cluster.pool)
        .await?;
        latencies.push((asked[0].as_secs_f64() - ended) * 1000.0);
    }
    Ok(latencies)
}

/// Posts `n` messages over all connections and returns their tasks.
pub async fn post_all(service: &Service, n: usize, text: &str) -> anyhow::Result<Vec<Uuid>> {
    let share = |at: usize| n / CONNECTIONS + usize::from(at < n % CONNECTIONS);
    let posting = (0..CONNECTIONS).map(|at| async move {
        let mut client = service.connect().await?;
        let mut tasks = Vec::new();
        for _ in 0..share(at) {
            tasks.push(client.post(text).await?);
        }
        anyhow::Ok(tasks)
    });
    let tasks = futures::future::try_join_all(posting).await?;
    Ok(tasks.into_iter().flatten().collect())
}

/// Tasks per second from the first dispatch to the last end, of tasks that were stored before.
pub async fn drained(cluster: &Cluster, tasks: &[Uuid]) -> anyhow::Result<f64> {
    let last = tasks.last().context("no tasks")?;
    until_ended(cluster, *last).await?;
    let begun = Instant::now();
    loop {
        let (n, ms): (i64, Option<f64>) = sqlx::query_as(
            "select count(*), ms(max(t.finished_at) - min(s.queued_at)) from unnest($1::uuid[]) as p (id)
             join tasks t on t.workspace_id = $2 and t.id = p.id and t.status = 'completed'
             join steps s on s.workspace_id = t.workspace_id and s.task_id = t.id",
        )
        .bind(tasks)
        .bind(cluster.demo.workspace.0)
        .fetch_one(&cluster.pool)
        .await?;
        if n == tasks.len() as i64 {
            return Ok(tasks.len() as f64 / ms.unwrap_or(f64::NAN) * 1000.0);
        }
        ensure!(
            begun.elapsed() < PATIENCE,
            "{n} of {} tasks ended",
            tasks.len()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Requests per second, and the latency of each in milliseconds.
pub async fn chat(service: &Service, length: Duration) -> anyhow::Result<(f64, Vec<f64>)> {
    let end = Instant::now() + length;
    let posting = (0..CONNECTIONS).map(|_| async move {
        let mut client = service.connect().await?;
        let mut latencies = Vec::new();
        while Instant::now() < end {
            let begun = Instant::now();
            client.post("What time is it?").await?;
            latencies.push(begun.elapsed().as_secs_f64() * 1000.0);
        }
        anyhow::Ok(latencies)
    });
    let begun = Instant::now();
    let latencies = futures::future::try_join_all(posting).await?;
    let latencies: Vec<f64> = latencies.into_iter().flatten().collect();
    Ok((
        latencies.len() as f64 / begun.elapsed().as_secs_f64(),
        latencies,
    ))
}

/// Waits until nothing is queued or running.
pub async fn until_idle(pool: &PgPool) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        let left: bool = sqlx::query_scalar(
            "select exists (select from orchestrator_events) or exists (select from signals where status = 'pending')
                or exists (select from steps where status = 'queued')
                or exists (select from steps where status = 'running')",
        )
        .fetch_one(pool)
        .await?;
        if !left {
            return Ok(());
        }
        ensure!(
            begun.elapsed() < PATIENCE,
            "the service does not come to rest"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn until_ended(cluster: &Cluster, task: Uuid) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        let (status, error): (String, Option<String>) = sqlx::query_as(
            "select status, error::text from tasks where workspace_id = $1 and id = $2",
        )
        .bind(cluster.demo.workspace.0)
        .bind(task)
        .fetch_one(&cluster.pool)
        .await?;
        match status.as_str() {
            "completed" => return Ok(()),
            "failed" | "stopped" => anyhow::bail!("task {task} is {status}: {error:?}"),
            _ => {}
        }
        ensure!(begun.elapsed() < PATIENCE, "task {task} is still {status}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Stores parents that wait for one child each, which waits for its user: nothing of it will ever move by itself.
pub async fn store_waiting(cluster: &Cluster, parents: usize) -> anyhow::Result<()> {
    // A connection that goes away with what it has used: the temporary table, and memory.
    let mut conn = PgConnection::connect_with(&cluster.embedded.options()).await?;
    for sql in [
        "create temporary table w as select n, gen_random_uuid() as parent, gen_random_uuid() as child,
            gen_random_uuid() as step, gen_random_uuid() as asked, gen_random_uuid() as barrier,
            gen_random_uuid() as question from generate_series(1, $2) n where $1::uuid is not null",
        "insert into tasks (workspace_id, id, agent_workspace_id, agent_id, agent_version, decides_left, title,
            root_task_id, source, status, started_at)
         select $1, parent, $1, a.id, 1, 49, 'Waits', parent, 'chat', 'waiting_for_input', now()
         from w, agents a where a.workspace_id = $1 and a.template = 'default' and $2 > 0",
        "insert into tasks (workspace_id, id, agent_workspace_id, agent_id, agent_version, decides_left, title,
            root_task_id, parent_task_id, parent_step_id, ordinal, spawn_depth, source, status, started_at)
         select $1, child, $1, a.id, 1, 49, 'Asks', parent, parent, step, 0, 1, 'spawned', 'waiting_for_input', now()
         from w, agents a where a.workspace_id = $1 and a.template = 'default' and $2 > 0",
        "insert into await_groups (workspace_id, id, task_id, step_id, source_type, strategy, total, pending, window_seconds)
         select $1, barrier, parent, step, 'child_task', 'all_required', 1, 1, 3600 from w where $2 > 0
         union all
         select $1, question, child, asked, 'user_input', 'all_required', 1, 1, null from w",
        "insert into awaits (workspace_id, group_id, ordinal, source_type, correlation_key, scheduled_resume_at)
         select $1, barrier, 0, 'child_task', child::text, now() + interval '1 hour' from w where $2 > 0
         union all
         select $1, question, 0, 'user_input', question::text, null from w",
    ] {
        sqlx::query(sql)
            .bind(cluster.demo.workspace.0)
            .bind(parents as i32)
            .execute(&mut conn)
            .await
            .context("waiting parents can not be stored")?;
    }
    Ok(conn.close().await?)
}

/// Stores tasks that wait for two timers each, none of which is due within the hour.
pub async fn store_timers(cluster: &Cluster, timers: usize) -> anyhow::Result<()> {
    let mut conn = PgConnection::connect_with(&cluster.embedded.options()).await?;
    for sql in [
        "create temporary table w as select gen_random_uuid() as task, gen_random_uuid() as one, gen_random_uuid() as two
         from generate_series(1, $2 / 2) n where $1::uuid is not null",
        "insert into tasks (workspace_id, id, agent_workspace_id, agent_id, agent_version, decides_left, title,
            root_task_id, source, status, started_at)
         select $1, task, $1, a.id, 1, 49, 'Waits', task, 'chat', 'waiting_for_input', now()
         from w, agents a where a.workspace_id = $1 and a.template = 'default' and $2 > 0",
        "insert into await_groups (workspace_id, id, task_id, step_id, source_type, strategy, total, pending)
         select $1, g, task, g, 'timer', 'all_required', 1, 1 from w, unnest(array[one, two]) g where $2 > 0",
        "insert into awaits (workspace_id, group_id, ordinal, source_type, correlation_key, scheduled_resume_at)
         select $1, g, 0, 'timer', g::text, now() + interval '1 hour' from w, unnest(array[one, two]) g where $2 > 0",
    ] {
        sqlx::query(sql)
            .bind(cluster.demo.workspace.0)
            .bind(timers as i32)
            .execute(&mut conn)
            .await
            .context("timers can not be stored")?;
    }
    Ok(conn.close().await?)
}

/// Lets one of the timers run out. Returns the milliseconds until it was settled.
pub async fn one_timer(cluster: &Cluster) -> anyhow::Result<f64> {
    let group: Uuid = sqlx::query_scalar(
        "update awaits set scheduled_resume_at = now() where group_id =
            (select group_id from awaits where source_type = 'timer' and status = 'pending' limit 1)
         returning group_id",
    )
    .fetch_one(&cluster.pool)
    .await?;
    let begun = Instant::now();
    loop {
        let ms: Option<f64> = sqlx::query_scalar(
            "select (extract(epoch from settled_at - scheduled_resume_at) * 1000)::float8 from awaits
             where workspace_id = $1 and group_id = $2",
        )
        .bind(cluster.demo.workspace.0)
        .bind(group)
        .fetch_one(&cluster.pool)
        .await?;
        if let Some(ms) = ms {
            return Ok(ms);
        }
        ensure!(begun.elapsed() < PATIENCE, "a timer is not found");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
