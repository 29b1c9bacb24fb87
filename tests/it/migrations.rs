//! Migrations on tables that are full and in use (O-6, H-49): up, down and up again, ahead of a deploy, against locks of
//! other sessions, several at once, and an older program on the schema of a newer one.

use crate::{
    engine::Engine,
    forced::{Hold, delegate, until_waiting},
    program::{Program, Scene},
    stub_llm::{Gate, Reply},
    support,
};
use reconvene::{
    commands::migrate,
    domain::{ids::TaskId, task::TaskStatus::*},
    lifecycle::{
        demo::seed_demo,
        submit::{Idempotency, Recipient},
    },
};
use sha2::{Digest, Sha384};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, Executor, PgPool, SqlStr,
    migrate::{Migration, MigrationType, Migrator},
    postgres::{PgConnectOptions, PgPoolOptions},
};
use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};
use tokio::{runtime::Handle, task::JoinHandle};

/// The last one of the first tables; those after it build an index each, or make a table that nothing else stands on.
const TABLES: i64 = 14;

/// A pool on a database without any table.
async fn empty_database() -> PgPool {
    let options = support::fresh_database().await;
    let name = format!("test_{}", uuid::Uuid::new_v4().simple());
    let mut admin = options.connect().await.unwrap();
    admin
        .execute(AssertSqlSafe(format!("create database {name}")))
        .await
        .unwrap();
    admin.close().await.unwrap();
    pool_on(options.database(&name)).await
}

async fn pool_on(options: PgConnectOptions) -> PgPool {
    let pool = PgPoolOptions::new().max_connections(4);
    pool.connect_with(options).await.unwrap()
}

/// Everything in the schema but the migrator's books, one line each.
async fn schema(pool: &PgPool) -> Vec<String> {
    let sql = r"
        select concat_ws(' ', 'relation', relname, relkind, relpersistence, reloptions) as line from pg_class
            where relnamespace = 'public'::regnamespace
        union all
        select concat_ws(' ', 'column', attrelid::regclass, attname, format_type(atttypid, atttypmod), attnotnull,
                attidentity, pg_get_expr(adbin, adrelid))
            from pg_attribute join pg_class c on c.oid = attrelid left join pg_attrdef on adrelid = attrelid and adnum = attnum
            where relnamespace = 'public'::regnamespace and attnum > 0 and not attisdropped
        union all
        select concat_ws(' ', 'constraint', conrelid::regclass, conname, pg_get_constraintdef(oid), convalidated)
            from pg_constraint where connamespace = 'public'::regnamespace
        union all
        select concat_ws(' ', 'index', pg_get_indexdef(indexrelid), indisvalid)
            from pg_index join pg_class on pg_class.oid = indexrelid where relnamespace = 'public'::regnamespace
        union all
        select concat_ws(' ', 'function', oid::regprocedure) from pg_proc where pronamespace = 'public'::regnamespace
        union all
        select concat_ws(' ', 'type', typname) from pg_type where typnamespace = 'public'::regnamespace
        union all
        select concat_ws(' ', 'trigger', tgrelid::regclass, tgname) from pg_trigger where not tgisinternal
        order by 1";
    let lines: Vec<String> = sqlx::query_scalar(sql).fetch_all(pool).await.unwrap();
    let ours = lines
        .into_iter()
        .filter(|line| !line.contains("_sqlx_migrations"));
    ours.collect()
}

/// Rows per table.
async fn rows(pool: &PgPool) -> BTreeMap<String, i64> {
    let tables: Vec<String> = sqlx::query_scalar(
        "select tablename::text from pg_tables where schemaname = 'public' and tablename <> '_sqlx_migrations'",
    )
    .fetch_all(pool)
    .await
    .unwrap();
    let mut rows = BTreeMap::new();
    for table in tables {
        let sql = AssertSqlSafe(format!("select count(*) from {table}"));
        let count = sqlx::query_scalar(sql).fetch_one(pool).await.unwrap();
        rows.insert(table, count);
    }
    rows
}

/// The compiled-in migrations up, in order.
fn ups() -> Vec<Migration> {
    let migrator = migrate::migrator();
    let ups = migrator
        .iter()
        .filter(|m| m.migration_type.is_up_migration());
    ups.cloned().collect()
}

/// Those of this program, and what a later release may add.
fn with_later(later: &[&str]) -> Migrator {
    let mut migrations = migrate::migrator().migrations.into_owned();
    for (version, sql) in (1 + ups().last().unwrap().version..).zip(later) {
        let sql: SqlStr = sqlx::SqlSafeStr::into_sql_str(AssertSqlSafe((*sql).to_owned()));
        let kind = MigrationType::ReversibleUp;
        migrations.push(Migration::new(version, "later".into(), kind, sql, false));
    }
    Migrator::with_migrations(migrations)
}

/// What a statement of a migration begins with, comments left out.
fn statements(sql: &str) -> Vec<String> {
    let code: Vec<&str> = sql
        .lines()
        .map(|line| line.split("--").next().unwrap_or_default())
        .collect();
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let all = code.join("\n");
    let all = all.split(';').map(words).filter(|s| !s.is_empty());
    all.collect()
}

// O-6: what every file keeps to, those to come included.
#[test]
fn every_migration_keeps_the_rules() {
    let mut found = 0;
    for entry in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let sql = fs::read_to_string(&path).unwrap();
        let _: i64 = name.split('_').next().unwrap().parse().unwrap();
        let all = statements(&sql);
        let (first, rest) = all.split_first().unwrap();

        let (up, down) = (name.ends_with(".up.sql"), name.ends_with(".down.sql"));
        assert!(up || down, "{name}");
        let other = match up {
            true => name.replace(".up.", ".down."),
            false => name.replace(".down.", ".up."),
        };
        assert!(
            path.with_file_name(&other).exists(),
            "{name} without {other}"
        );

        let limit = first
            .strip_prefix("set local lock_timeout = '")
            .and_then(|rest| rest.strip_suffix('\''))
            .unwrap_or_else(|| panic!("{name} does not begin with its lock_timeout"));
        let is_short =
            matches!(limit.strip_suffix("ms"), Some(ms) if ms.parse::<u32>().unwrap() <= 500);
        assert!(
            is_short,
            "{name}: everybody who needs the table waits as long as this migration: 500ms at most, not {limit}"
        );
        assert!(!sql.contains("no-transaction"), "{name} is one transaction");
        assert!(
            !rest
                .iter()
                .any(|s| s.contains("concurrently") || s.starts_with("commit")),
            "{name} is one transaction"
        );

        let creates_index =
            |s: &&String| s.starts_with("create index") || s.starts_with("create unique index");
        let indexes: Vec<&String> = rest.iter().filter(creates_index).collect();
        if up && !indexes.is_empty() {
            found += 1;
            assert_eq!(rest.len(), 1, "{name}: an index has a migration of its own");
            assert!(
                indexes[0].contains("index if not exists"),
                "{name}: it can be built ahead"
            );
        }
        for statement in rest.iter().filter(|s| !creates_index(s)) {
            assert!(!statement.contains("if not exists"), "{name}: {statement}");
            assert!(!statement.contains("if exists"), "{name}: {statement}");
        }
    }
    assert!(found > 10);
}

/// A database whose tables all have rows, and an engine that stands still in the middle of its work.
async fn filled() -> (Engine, Gate, TaskId) {
    let mut engine = Engine::scripted().await;
    let gate = Gate::new();
    let (researcher, held) = (engine.demo.researcher, gate.clone());
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("barrier" | "open", 0) => {
                Reply::call("delegate_tasks", delegate(researcher, &["one", "two"]))
            }
            ("async", 0) => {
                let mut arguments = delegate(researcher, &["three"]);
                arguments["async"] = true.into();
                Reply::call("delegate_tasks", arguments)
            }
            ("ask", 0) => Reply::call("ask_user", serde_json::json!({"question": "which?"})),
            ("two", _) => Reply::text("two").held_by(&held),
            _ => Reply::text("done"),
        });
    // Work of every kind that has ended, ...
    gate_round(&engine, &gate).await;
    // ... and under way: a wait for children, one for a user, a step with a lease, an event that nobody has seen.
    let held = Gate::new();
    let again = held.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("open", 0) => Reply::call("delegate_tasks", delegate(researcher, &["four"])),
            ("ask", 0) => Reply::call("ask_user", serde_json::json!({"question": "which?"})),
            ("four", _) => Reply::text("four").held_by(&again),
            _ => Reply::text("done"),
        });
    let before = engine.llm().requests().len();
    let parent = engine.post("open").await;
    engine.llm().wait_for_requests(before + 2).await;
    engine.until(parent, WaitingForInput).await;
    engine.kill().await;
    engine.append(parent, "and another thing").await;
    // What the engine does not write yet, or only for a minute.
    let sql = "insert into batch_runs (workspace_id, id, task_id, step_id, source_key, target_agent_id)
            select workspace_id, id, id, id, 'k', agent_id from tasks;
        update await_groups set batch_run_id = task_id;
        insert into stream_chunks (workspace_id, task_id, turn, text) select workspace_id, id, 1, 'x' from tasks;
        insert into processes (id, roles, host, pid) values (gen_random_uuid(), '{api}', 'h', 1);
        insert into runtime_flags (key, value, changed_by) values ('k', 'true', 'ada');
        insert into members (workspace_id, id, username, role, password_hash)
            select id, id, 'ada', 'admin', 'x' from workspaces;
        insert into sessions (workspace_id, member_id, id, token_hash, expires_at)
            select id, id, id, sha256(id::text::bytea), now() from workspaces;
        insert into api_keys (workspace_id, id, name, role, prefix, key_hash, created_by)
            select id, id, 'k', 'member', 'rk_', sha256(id::text::bytea), 'ada' from workspaces;
        insert into credentials (workspace_id, id, name, key_id, sealed) select id, id, 'c', 'k', '' from workspaces;
        insert into configured_tools (workspace_id, id, name, base_tool, description, bindings)
            select id, id, 't', 'ask_user', '', '{}' from workspaces;
        insert into configured_tool_credentials select id, id, id from workspaces;
        insert into model_providers (workspace_id, id, name, kind, is_default, key_id, sealed)
            select id, id, 'm', 'openai', true, 'k', '' from workspaces;
        insert into budgets (workspace_id, id, tokens_max) select id, id, 1000000000 from workspaces;
        insert into budget_calls select workspace_id, workspace_id, id, 1, 1, 1 from tasks;
        insert into profile_backfills (workspace_id, id, force) select id, id, false from workspaces;
        insert into profile_backfill_agents (workspace_id, backfill_id, agent_id)
            select workspace_id, workspace_id, id from agents";
    sqlx::raw_sql(sql).execute(&engine.pool).await.unwrap();
    for (table, count) in rows(&engine.pool).await {
        assert!(count > 0, "{table} is empty");
    }
    (engine, held, parent)
}

async fn gate_round(engine: &Engine, gate: &Gate) {
    let mut keyed = engine.message(Recipient::DefaultAgent, "barrier");
    keyed.idempotency = Some(Idempotency {
        key: "k".into(),
        body_hash: [1; 32],
    });
    let barrier = engine.submit(keyed).await.task;
    let spawned = engine.post("async").await;
    let asked = engine.post("ask").await;
    engine.until(barrier, WaitingForInput).await;
    engine.until(asked, WaitingForInput).await;
    gate.open();
    for task in [barrier, spawned] {
        assert_eq!(engine.end(task).await.0, Completed);
    }
}

// O-6
#[tokio::test(flavor = "multi_thread")]
async fn full_tables_go_down_and_up_again() {
    // What the schema is at each version.
    let empty = empty_database().await;
    let versions: Vec<i64> = ups().iter().map(|m| m.version).collect();
    let mut shapes = BTreeMap::from([(0, schema(&empty).await)]);
    for version in &versions {
        migrate::migrator().run_to(*version, &empty).await.unwrap();
        shapes.insert(*version, schema(&empty).await);
    }
    assert_eq!(shapes[&0], Vec::<String>::new());
    let full = shapes.values().last().unwrap().clone();

    let (mut engine, gate, parent) = filled().await;
    let pool = engine.pool.clone();
    let mut held = rows(&pool).await;
    let before = |version: &i64| {
        versions
            .iter()
            .rev()
            .find(|v| *v < version)
            .copied()
            .unwrap_or(0)
    };

    // Indexes and later tables come and go; the work goes on with what there was.
    for version in versions.iter().rev().filter(|v| **v > TABLES) {
        migrate::migrator()
            .undo(&pool, before(version))
            .await
            .unwrap();
        assert_eq!(
            schema(&pool).await,
            shapes[&before(version)],
            "down from {version}"
        );
    }
    let first_tables: Vec<String> = rows(&pool).await.into_keys().collect();
    held.retain(|table, _| first_tables.contains(table));
    assert!(held.len() > 10);
    assert_eq!(
        migrate::apply(&pool).await.unwrap().len(),
        versions.len() - TABLES as usize
    );
    assert_eq!(schema(&pool).await, full);
    let mut left = rows(&pool).await;
    left.retain(|table, _| first_tables.contains(table));
    assert_eq!(left, held);
    // The lease of the killed process has to run out first.
    crate::forced::expire_leases(&engine).await;
    engine.resume();
    gate.open();
    assert_eq!(engine.end(parent).await.0, Completed);
    crate::engine::rest(&pool).await;
    crate::engine::check(&pool).await;
    engine.kill().await;

    // Nothing of a migration is left when it has gone down, with all that is in its tables.
    engine.post("one more").await;
    for version in versions.iter().rev() {
        migrate::migrator()
            .undo(&pool, before(version))
            .await
            .unwrap();
        assert_eq!(
            schema(&pool).await,
            shapes[&before(version)],
            "down from {version}"
        );
    }
    let (one, two) = tokio::join!(migrate::apply(&pool), migrate::apply(&pool));
    assert!(one.is_ok() && two.is_ok(), "several may run them at once");
    assert_eq!(schema(&pool).await, full);
    assert_eq!(migrate::pending(&pool).await.unwrap(), Vec::<i64>::new());

    engine.demo = seed_demo(&pool).await.unwrap();
    engine.resume();
    let task = engine.post("again").await;
    assert_eq!(engine.end(task).await.0, Completed);
    engine.close().await;
}

/// Identity and validity of an index.
async fn index(pool: &PgPool, name: &str) -> (i64, bool) {
    sqlx::query_as(
        "select indexrelid::bigint, indisvalid from pg_index where indexrelid = $1::regclass",
    )
    .bind(name)
    .fetch_one(pool)
    .await
    .unwrap()
}

// O-6: the runbook of docs/operations.md, for each index there is.
#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_was_built_ahead_makes_its_migration_a_no_op() {
    let (engine, ..) = filled().await;
    let pool = &engine.pool;
    let full = schema(pool).await;
    migrate::migrator().undo(pool, TABLES).await.unwrap();
    for migration in ups().iter().filter(|m| m.version > TABLES) {
        let version = migration.version;
        let statement = statements(migration.sql.as_str()).pop().unwrap();
        let ahead =
            statement.replacen("index if not exists", "index concurrently if not exists", 1);
        if ahead == statement {
            assert!(version > 30, "{version} builds an index");
            migrate::migrator().run_to(version, pool).await.unwrap();
            continue;
        }
        pool.execute(AssertSqlSafe(ahead.clone())).await.unwrap();
        let name = ahead.split("not exists ").nth(1).unwrap();
        let name = name.split(' ').next().unwrap();
        let built = index(pool, name).await;
        assert!(built.1, "{name} is valid");

        if version % 2 == 0 {
            migrate::migrator().run_to(version, pool).await.unwrap();
        } else {
            // Entered as applied by hand, with the checksum of the file to the byte.
            let file = format!(
                "{version:04}_{}.up.sql",
                migration.description.replace(' ', "_")
            );
            let file = format!("{}/migrations/{file}", env!("CARGO_MANIFEST_DIR"));
            let checksum = Sha384::digest(fs::read(file).unwrap());
            sqlx::query(
                "insert into _sqlx_migrations (version, description, success, checksum, execution_time)
                 values ($1, $2, true, $3, 0)",
            )
            .bind(version)
            .bind(migration.description.as_ref())
            .bind(checksum.as_slice())
            .execute(pool)
            .await
            .unwrap();
        }
        assert_eq!(index(pool, name).await, built, "{name} was left as it was");
    }
    assert_eq!(migrate::apply(pool).await.unwrap(), Vec::<i64>::new());
    assert_eq!(
        schema(pool).await,
        full,
        "the indexes are those that the migrations want"
    );
}

const COLUMN: &str = "set local lock_timeout = '500ms'; alter table tasks add column later text;";
const INDEX: &str = "set local lock_timeout = '500ms';
    create index if not exists later_idx on steps (worker_id) where status = 'running';";

/// A session in a long transaction that has read tasks and steps, and written one row of each that nobody else needs.
async fn long_transaction(engine: &Engine) -> Hold {
    let done = engine.post("old").await;
    engine.end(done).await;
    let pool = &engine.pool;
    let mut hold = Hold::row(
        pool,
        "select 1 from tasks where id = $1 for no key update",
        done.0,
    )
    .await;
    hold.run(
        "select count(*) from steps; update steps set error = null where finished_at is not null",
    )
    .await;
    hold
}

fn migrating(
    migrator: Migrator,
    pool: PgPool,
    patience: Duration,
) -> JoinHandle<anyhow::Result<Vec<i64>>> {
    // In a thread of its own, since sqlx's migrator is a future that can not be spawned.
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        runtime.block_on(migrate::apply_all(&migrator, &pool, patience))
    })
}

// H-49
#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_meets_a_lock_holds_up_nobody() {
    let engine = Engine::scripted().await;
    let hold = long_transaction(&engine).await;
    let patience = Duration::from_secs(60);
    let one = migrating(with_later(&[COLUMN, INDEX]), engine.pool.clone(), patience);
    let two = migrating(with_later(&[COLUMN, INDEX]), engine.pool.clone(), patience);
    let reader = pool_on(PgConnectOptions::clone(&engine.pool.connect_options())).await;

    let begun = Instant::now();
    let goes_on = || begun.elapsed() < Duration::from_secs(6);
    let reading = async {
        let mut took = Vec::new();
        while goes_on() {
            let asked = Instant::now();
            let read = "select count(*), max(last_seq) from tasks";
            reader.execute(read).await.unwrap();
            took.push(asked.elapsed());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        took.sort_unstable();
        took
    };
    let working = async {
        let mut tasks = 0;
        while goes_on() {
            let task = engine.post("meanwhile").await;
            assert_eq!(engine.end(task).await, (Completed, "ok".into()));
            tasks += 1;
        }
        tasks
    };
    let watching = async {
        let mut waiting = Vec::new();
        while goes_on() {
            let sql = "select count(*) from pg_locks join pg_database d on d.oid = database
                where not granted and relation = 'tasks'::regclass and mode = 'AccessExclusiveLock'
                    and datname = current_database()";
            waiting.push(engine.count(sql).await);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        waiting.into_iter().max()
    };
    let (mut took, tasks, waiting) = tokio::join!(reading, working, watching);
    eprintln!(
        "{} reads, the slowest {:?}; {tasks} tasks",
        took.len(),
        took.last()
    );
    assert_eq!(waiting, Some(1), "one migrator waits at a time");
    assert!(tasks > 2, "work is claimed and done");
    // The machine itself may stand still once; the migrators would do it again and again.
    took.pop();
    assert!(took.last() < Some(&Duration::from_secs(1)), "{took:?}");
    assert!(!one.is_finished() && !two.is_finished(), "both try on");

    hold.release().await;
    for migrator in [one, two] {
        migrator.await.unwrap().unwrap();
    }
    let applied = "select count(*) from _sqlx_migrations where description = 'later' and success";
    assert_eq!(engine.count(applied).await, 2);
    assert!(index(&engine.pool, "later_idx").await.1);
    engine.end(engine.post("afterwards").await).await;
    engine.close().await;
}

// H-49
#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_gives_up_changes_nothing_and_says_why() {
    let engine = Engine::scripted().await;
    let hold = long_transaction(&engine).await;
    let before = schema(&engine.pool).await;
    // The first part of it would succeed.
    let both = "set local lock_timeout = '300ms'; alter table agents add column later text;
        create table later (id uuid); alter table tasks add column later text;";
    let began = Instant::now();
    let gave_up = migrating(
        with_later(&[both, INDEX]),
        engine.pool.clone(),
        Duration::from_secs(1),
    );
    let error = gave_up.await.unwrap().unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(10));
    let text = format!("{error:#}");
    for words in [
        "the schema cannot be brought up to date: another session holds a lock that migration",
        "pg_stat_activity",
        "migrate again",
        "lock timeout",
    ] {
        assert!(text.contains(words), "{text}");
    }
    assert_eq!(schema(&engine.pool).await, before);
    let books = "select max(version) from _sqlx_migrations";
    let newest = ups().last().unwrap().version;
    assert_eq!(engine.count(books).await, newest);

    hold.release().await;
    let patience = Duration::from_secs(30);
    let applied = migrating(with_later(&[both, INDEX]), engine.pool.clone(), patience);
    assert_eq!(applied.await.unwrap().unwrap(), [newest + 1, newest + 2]);
    engine.close().await;
}

// O-6, H-49: the older program on the schema of a newer one.
#[tokio::test(flavor = "multi_thread")]
async fn an_older_program_works_on_a_newer_schema() {
    let scene = Scene::new().await;
    let table = "set local lock_timeout = '500ms'; create table later (id uuid not null);";
    let newer = with_later(&[COLUMN, INDEX, table]);
    let patience = Duration::from_secs(30);
    let applied = migrate::apply_all(&newer, &scene.pool, patience).await;
    assert_eq!(applied.unwrap().len(), 3);

    let (code, said) = Program::run(&["migrate"], &scene.env).ended().await;
    assert_eq!((code, said.trim()), (0, "the schema is up to date"));
    let program = scene.serve("api,worker,orchestrator").await;
    let client = scene.client(&program).await;
    let ready = client.get("/readyz").await;
    assert_eq!(
        (&ready["ready"], &ready["migrations"]),
        (&true.into(), &"ahead".into())
    );
    let (one, two) = (scene.demo.researcher, scene.demo.writer);
    scene.llm.script(move |r| match (r.first_user(), r.turn()) {
        ("go", 0) => Reply::call("delegate_tasks", {
            let mut arguments = delegate(one, &["a"]);
            let more = delegate(two, &["b"])["tasks"][0].clone();
            arguments["tasks"].as_array_mut().unwrap().push(more);
            arguments
        }),
        _ => Reply::text("done"),
    });
    let task = client.say("go").await;
    assert_eq!(client.end(&task).await["status"], "completed");
    scene.close().await;
    program.terminate().await;
}

// H-49: the real program, twice at once, while others write.
#[tokio::test(flavor = "multi_thread")]
async fn two_instances_that_start_at_once_both_succeed() {
    let scene = Scene::new().await;
    let pool = &scene.pool;
    let full = schema(pool).await;
    let sql =
        "drop index orchestrator_events_due_idx; delete from _sqlx_migrations where version = 28";
    sqlx::raw_sql(sql).execute(pool).await.unwrap();
    let (code, said) = Program::run(&["serve"], &scene.env).ended().await;
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("lacks 1 migrations"), "{said}");

    let mut hold = Hold::row(pool, "select $1::uuid", uuid::Uuid::nil()).await;
    hold.run("delete from orchestrator_events").await;
    let mut instances = [0, 1].map(|_| Program::run(&["migrate"], &scene.env));
    // One waits for the table, the other for the one.
    until_waiting(pool, 2).await;
    let asked = Instant::now();
    for sql in [
        "select count(*) from orchestrator_events",
        "select id from orchestrator_events where not_before <= now() for update skip locked",
    ] {
        pool.execute(sql).await.unwrap();
    }
    assert!(asked.elapsed() < Duration::from_secs(1));
    hold.release().await;
    for instance in &mut instances {
        let (code, said) = instance.ended().await;
        assert_eq!(code, 0, "{said}");
        assert!(said.contains("the schema is up to date"), "{said}");
    }
    assert_eq!(schema(pool).await, full);
}
