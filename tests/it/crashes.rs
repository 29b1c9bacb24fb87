//! A crash after every single write of the main job. The database stops the process at its n-th written row; there it
//! is killed, with whatever transaction is open, and another process takes over. For every n until the job ends without
//! ever having come so far.

use crate::{
    engine::{Engine, until},
    process::Process,
    stub_llm::Reply,
};
use reconvene::{
    domain::{
        ids::{ProcessId, TaskId},
        task::TaskStatus,
    },
    runtime::Hub,
};
use serde_json::json;
use sqlx::{Connection, PgConnection};
use std::sync::Arc;

const TABLES: [&str; 9] = [
    "tasks",
    "steps",
    "task_items",
    "await_groups",
    "awaits",
    "signals",
    "orchestrator_events",
    "decision_logs",
    "prompt_texts",
];

/// Makes the n-th row that anybody writes from now on wait for the lock that the returned connection holds. A sequence
/// counts, so that rows of transactions that are rolled back count too.
async fn stop_at_write(engine: &Engine, n: u32) -> PgConnection {
    let mut holder = PgConnection::connect_with(&engine.pool.connect_options())
        .await
        .unwrap();
    let triggers: String = TABLES
        .iter()
        .map(|table| {
            format!(
                "create trigger crash_point before insert or update or delete on {table}
                 for each row execute function crash_point();"
            )
        })
        .collect();
    let sql = format!(
        "select pg_advisory_lock(7);
         create sequence writes;
         create function crash_point() returns trigger language plpgsql as $$ begin
             if nextval('writes') = {n} then perform pg_advisory_xact_lock_shared(7); end if;
             return case when tg_op = 'DELETE' then old else new end;
         end $$;
         {triggers}"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql))
        .execute(&mut holder)
        .await
        .unwrap();
    holder
}

async fn is_waiting(engine: &Engine) -> bool {
    let n = engine
        .count(
            "select count(*) from pg_stat_activity where datname = current_database()
                and wait_event_type = 'Lock' and wait_event = 'advisory'",
        )
        .await;
    n > 0
}

/// Kills the process at its n-th write and lets another one finish. `false`: the job ended before.
async fn crash_at(n: u32) -> bool {
    let engine = Engine::scripted_with(|_| {}).await;
    let researcher = engine.demo.researcher;
    engine.llm().script(move |r| match (r.first_user(), r.turn()) {
        ("plan", 0) => Reply::call(
            "delegate_tasks",
            json!({"tasks": [{"agent_group_id": researcher.to_string(), "prompt": "{{item}}", "inputs": ["one", "two"]}]}),
        ),
        ("plan", _) => Reply::text(format!("done: {}", r.last_user())),
        (child, _) => Reply::text(format!("result of {child}")),
    });
    let parent = engine.post("plan").await;
    let holder = stop_at_write(&engine, n).await;
    let hub = Arc::new(Hub::new(ProcessId::new()));
    let dead = hub.process;
    let first = Process::start_on(hub, &engine.config, &engine.pool, true, true);
    until("the process has come to its end", async || {
        is_waiting(&engine).await || engine.status(parent).await.is_terminal()
    })
    .await;
    let reached = is_waiting(&engine).await;
    first.kill().await;
    holder.close().await.unwrap();
    let second = Process::start(&engine.config, &engine.pool, true, true);
    until("the job has ended", async || {
        // The dead one's leases, without the wait for them.
        sqlx::query(
            "update steps set lease_expires_at = now() - interval '1 second'
             where status = 'running' and worker_id = $1 and lease_expires_at > now()",
        )
        .bind(dead.0)
        .execute(&engine.pool)
        .await
        .unwrap();
        engine.status(parent).await.is_terminal()
    })
    .await;
    ended_well(&engine, parent, n).await;
    engine.close().await;
    second.stop().await;
    reached
}

async fn ended_well(engine: &Engine, parent: TaskId, n: u32) {
    let (status, output) = engine.end(parent).await;
    assert_eq!(status, TaskStatus::Completed, "write {n}: {output}");
    assert_eq!(engine.children(parent).await.len(), 2, "write {n}");
    for child in ["one", "two"] {
        assert!(
            output.contains(&format!("> result of {child}\n")),
            "write {n}: {output}"
        );
    }
    let doubled = engine
        .count(
            "select count(*) from (select task_id from steps where ordinal = 0 group by task_id
                having count(*) > case when (select parent_task_id from tasks t where t.id = task_id) is null
                    then 2 else 1 end) d",
        )
        .await;
    assert_eq!(
        doubled, 0,
        "write {n}: a task decided more often than it had reason to"
    );
}

/// Every fourth write, beginning with `first`.
async fn crash_at_each(first: u32) {
    let mut n = first;
    while crash_at(n).await {
        n += 4;
    }
    assert!(n > 40, "the job has more writes than {n}");
}

// R-1, D-20, D-26, H-02, H-14, W-1, W-3: split in four, so that they run side by side
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_after_every_write_1() {
    crash_at_each(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_after_every_write_2() {
    crash_at_each(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_after_every_write_3() {
    crash_at_each(3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_after_every_write_4() {
    crash_at_each(4).await;
}
