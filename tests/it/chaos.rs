//! Chaos: real processes of the program, killed, suspended and cut off from a real PostgreSQL that is killed too,
//! with a provider that stalls and fails, while users post trees of tasks and repeat whatever was not answered.
//!
//! It goes in rounds: a minute of faults, then rest, then everything that was ever posted is checked. All that is random
//! follows from one seed, which is printed: `RECONVENE_CHAOS_SEED`. What the scheduler makes of it is another matter, so a
//! seed repeats the faults and the scripts, not the interleaving. `RECONVENE_CHAOS_SECONDS` is the time with faults.

mod faults;
mod fleet;
mod invariants;
mod load;
mod proxy;
mod script;

use crate::{
    http::SECRET,
    program::{Home, Program},
    stub_llm::StubLlm,
};
use fleet::Fleet;
use load::Tree;
use proxy::Proxy;
use reconvene::{
    domain::{
        agent::AgentDefinition,
        ids::{AgentId, WorkspaceId},
    },
    lifecycle::{self, demo::seed_demo},
    postgres::Embedded,
};
use script::Script;
use secrecy::ExposeSecret;
use sqlx::{PgPool, postgres::PgPoolOptions};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

const LEASE_SECONDS: u32 = 3;
/// Faults go on for so long before everything must come to rest.
const ROUND: Duration = Duration::from_secs(60);
/// For everything to come to rest after the last fault.
const REST_LIMIT: Duration = Duration::from_secs(120);

/// What every part of the test shares.
struct World {
    script: Arc<Script>,
    llm: StubLlm,
    database: Embedded,
    home: Home,
    /// Held while nobody can reach the database.
    outage: tokio::sync::Mutex<()>,
    /// Not through the proxy.
    pool: PgPool,
    proxy: Proxy,
    env: BTreeMap<String, String>,
    http: reqwest::Client,
    token: String,
    trees: AtomicUsize,
    /// No faults now.
    is_calm: AtomicBool,
    /// How long in all.
    away: Mutex<Duration>,
    counts: Mutex<BTreeMap<&'static str, u64>>,
    failures: Mutex<Vec<String>>,
}

impl World {
    async fn new(seed: u64) -> Self {
        let home = Home::new();
        let database = Embedded::open(&home.0, None).await.unwrap();
        let proxy = Proxy::start(home.0.join("run/.s.PGSQL.5432")).await;
        let direct = database.url().expose_secret().to_owned();
        let url = direct.replacen("localhost:5432", &format!("127.0.0.1:{}", proxy.port), 1);
        let url = url.split('?').next().unwrap_or_default().to_owned();
        let llm = StubLlm::start().await;
        llm.forgetful();
        let settings = [
            ("AUTH_JWT_SECRET", SECRET),
            ("DATABASE_ACQUIRE_TIMEOUT_SECONDS", "2"),
            ("DATABASE_MAX_CONNECTIONS", "8"),
            ("DATABASE_URL", &url),
            ("LLM_BASE_URL", llm.base_url()),
            ("LLM_IDLE_TIMEOUT_SECONDS", "4"),
            // Every failure that may pass does pass in the end: a task that fails all the same is a loss.
            ("LLM_MAX_ATTEMPTS", "100"),
            ("LLM_MODEL", "stub"),
            ("LLM_PROVIDER", "openai"),
            ("LLM_RETRY_BASE_MS", "50"),
            ("LLM_RETRY_MAX_SECONDS", "2"),
            ("LOG_LEVEL", "warn,reconvene::commands=info"),
            ("ORCHESTRATOR_POLL_INTERVAL_MS", "500"),
            ("SERVER_PORT", "0"),
            ("SERVER_SHUTDOWN_GRACE_SECONDS", "3"),
            ("WORKER_LEASE_SECONDS", &LEASE_SECONDS.to_string()),
            ("WORKER_MAX_ATTEMPTS", "100"),
            ("WORKER_POLL_INTERVAL_MS", "500"),
        ];
        let env: BTreeMap<String, String> = settings
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect();
        let run = async |args: &[&str]| {
            let (code, text) = Program::run(args, &env).ended().await;
            assert_eq!(code, 0, "{args:?}: {text}");
            text.trim().to_owned()
        };
        run(&["migrate"]).await;
        let pool = PgPoolOptions::new()
            .max_connections(2)
            .connect_with(database.options().application_name("chaos"))
            .await
            .unwrap();
        // Checking passwords without optimisation takes longer than all else, and connections are made all the time.
        std::fs::write(home.0.join("cluster/pg_hba.conf"), "local all all trust\n").unwrap();
        sqlx::query("select pg_reload_conf()")
            .execute(&pool)
            .await
            .unwrap();
        let demo = seed_demo(&pool).await.unwrap();
        let token = run(&["token", "--workspace", "demo", "--ttl", "24h"]).await;
        let mut agents = [AgentId::new(); script::DEPTH];
        for (depth, agent) in agents.iter_mut().enumerate() {
            *agent = new_agent(&pool, demo.workspace, depth).await;
        }
        let script = Arc::new(Script::new(seed, agents));
        let replies = script.clone();
        llm.script(move |request| replies.reply(request));
        Self {
            script,
            llm,
            database,
            home,
            outage: tokio::sync::Mutex::default(),
            pool,
            proxy,
            env,
            http: reqwest::Client::new(),
            token,
            trees: AtomicUsize::new(0),
            is_calm: AtomicBool::new(false),
            away: Mutex::default(),
            counts: Mutex::default(),
            failures: Mutex::default(),
        }
    }

    fn count(&self, what: &'static str) {
        self.count_many(what, 1);
    }

    fn count_many(&self, what: &'static str, count: u64) {
        *self.counts.lock().unwrap().entry(what).or_default() += count;
    }

    /// Notes what must not be; the run goes on to the end of its round.
    fn fail(&self, what: String) {
        eprintln!("chaos: {what}");
        self.failures.lock().unwrap().push(what);
    }

    fn has_failed(&self) -> bool {
        !self.failures.lock().unwrap().is_empty()
    }

    fn none(&self, what: &str, found: &[String]) {
        if !found.is_empty() {
            let some = found[..found.len().min(5)].join("\n  ");
            self.fail(format!("{} {what}:\n  {some}", found.len()));
        }
    }

    fn calm(&self, is_calm: bool) {
        self.is_calm.store(is_calm, Ordering::Relaxed);
        self.script.calm(is_calm);
    }

    fn is_calm(&self) -> bool {
        self.is_calm.load(Ordering::Relaxed)
    }

    async fn number(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }
}

async fn new_agent(pool: &PgPool, workspace: WorkspaceId, depth: usize) -> AgentId {
    let definition = AgentDefinition {
        name: format!("Level {}", depth + 1),
        instructions: "Do it.".into(),
        ..AgentDefinition::default()
    };
    let made = lifecycle::agents::create(pool, workspace, &definition).await;
    made.unwrap().id
}

fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is a number")),
    )
}

// W-3, W-4, T-2, T-11, T-22, D-20, D-22, O-2, O-3, H-01 to H-03, H-12 to H-17, H-42, H-45
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_and_nothing_is_twice() {
    let seed = setting("RECONVENE_CHAOS_SEED").unwrap_or_else(|| fastrand::u64(..1_000_000));
    let time = Duration::from_secs(setting("RECONVENE_CHAOS_SECONDS").unwrap_or(60));
    println!(
        "chaos: RECONVENE_CHAOS_SEED={seed}, {} s of faults",
        time.as_secs()
    );
    let world = Arc::new(World::new(seed).await);
    let fleet = Arc::new(Fleet::start(&world).await);
    fleet.serves().await;

    let mut trees: Vec<Tree> = Vec::new();
    let mut rests = Vec::new();
    let begun = Instant::now();
    let rounds = time.as_secs().div_ceil(ROUND.as_secs()).max(1) as u32;
    for round in 0..rounds {
        let until = Instant::now() + time / rounds;
        world.calm(false);
        let users = load::post_trees(&world, &fleet, until).await;
        let random = world.script.random(("faults", round));
        faults::inject(world.clone(), fleet.clone(), random, until).await;
        world.calm(true);
        let repaired = Instant::now();
        trees.extend(all_of(&world, users).await);
        if !world.has_failed() {
            fleet.serves().await;
            rest(&world).await;
        }
        rests.push(repaired.elapsed());
        invariants::hold(&world, &trees).await;
        if world.has_failed() {
            break;
        }
    }
    let took = begun.elapsed();
    let log = invariants::judge_log(&world);
    report(&world, seed, took, &trees, &rests, &log).await;

    match Arc::try_unwrap(fleet) {
        Ok(fleet) => fleet.end().await,
        Err(_) => world.fail("users are left".into()),
    }
    surrender(&world, seed);
    println!("chaos: nothing lost, nothing twice");
}

/// Waits for the users, whose trees must all have ended within the limit.
async fn all_of(world: &World, mut users: JoinSet<Vec<Tree>>) -> Vec<Tree> {
    let mut trees = Vec::new();
    let deadline = tokio::time::Instant::now() + REST_LIMIT;
    loop {
        match tokio::time::timeout_at(deadline, users.join_next()).await {
            Ok(Some(ended)) => trees.extend(ended.unwrap()),
            Ok(None) => return trees,
            Err(_) => {
                world.fail(format!("{} users wait in vain", users.len()));
                tell_what_is_left(world).await;
                return trees;
            }
        }
    }
}

/// Waits until nothing is left to do.
async fn rest(world: &World) {
    let sql = "select (select count(*) from orchestrator_events where dead_at is null)
            + (select count(*) from signals where status = 'pending')
            + (select count(*) from steps where status in ('queued', 'running'))
            + (select count(*) from tasks where status not in ('completed', 'failed', 'stopped'))";
    let begun = Instant::now();
    while world.number(sql).await > 0 {
        if begun.elapsed() > REST_LIMIT {
            world.fail(format!("no rest after {REST_LIMIT:?}"));
            tell_what_is_left(world).await;
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Notes tasks that do not end, with all that could move them.
async fn tell_what_is_left(world: &World) {
    let sql = "select jsonb_build_object('task', t.id, 'title', t.title, 'status', t.status, 'seen', t.seen_seq, 'news', t.news_seq,
            'steps', (select jsonb_agg(jsonb_build_array(s.turn, s.ordinal, s.status, s.attempt, s.run_at, s.lease_expires_at))
                from steps s where s.task_id = t.id and s.status in ('queued', 'running')),
            'events', (select jsonb_agg(to_jsonb(e)) from orchestrator_events e where e.task_id = t.id),
            'groups', (select jsonb_agg(jsonb_build_array(g.id, g.status, g.pending, g.resumed_at)) from await_groups g where g.task_id = t.id))::text
        from tasks t where status not in ('completed', 'failed', 'stopped') order by spawn_depth desc limit 20";
    let left: Vec<String> = sqlx::query_scalar(sql)
        .fetch_all(&world.pool)
        .await
        .unwrap();
    world.none("tasks are left, the deepest", &left);
}

/// Ends the test if anything was found.
fn surrender(world: &World, seed: u64) {
    let failures = world.failures.lock().unwrap();
    assert!(
        failures.is_empty(),
        "RECONVENE_CHAOS_SEED={seed} found {} faults:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

async fn report(
    world: &World,
    seed: u64,
    took: Duration,
    trees: &[Tree],
    rests: &[Duration],
    log: &BTreeMap<String, u64>,
) {
    let row = |what: &str, value: String| println!("  {what:<64} {value:>10}");
    let seconds =
        |time: Option<Duration>| format!("{:.1} s", time.unwrap_or_default().as_secs_f64());
    let of =
        |wanted: fn(&Tree) -> bool| trees.iter().filter(|tree| wanted(tree)).count().to_string();
    println!(
        "chaos: seed {seed}, {} rounds, 3 workers, 2 orchestrators, 2 API processes",
        rests.len()
    );
    row("trees", trees.len().to_string());
    row(
        "  followed over streams that broke",
        of(|t| t.seen.is_some()),
    );
    row("  with a second message", of(|t| t.second.is_some()));
    row("  stopped with all subtasks", of(|t| t.is_stopped));
    row(
        "tasks finished",
        world
            .number("select count(*) from tasks where finished_at is not null")
            .await
            .to_string(),
    );
    row("model calls", world.llm.arrived().to_string());
    row(
        "leases lost",
        world
            .number("select coalesce(sum(lost_leases), 0)::bigint from steps")
            .await
            .to_string(),
    );
    row(
        "trees per second",
        format!("{:.2}", trees.len() as f64 / took.as_secs_f64()),
    );
    row(
        "longest life of a tree",
        seconds(trees.iter().map(|t| t.took).max()),
    );
    row(
        "longest time to rest after the faults of a round",
        seconds(rests.iter().max().copied()),
    );
    println!("done by the test, and seen by its users");
    for (what, count) in world.counts.lock().unwrap().iter() {
        row(what, count.to_string());
    }
    let away = *world.away.lock().unwrap();
    row("time without a database", seconds(Some(away)));
    row(
        "commits whose answer was lost",
        world.proxy.lost_answers().to_string(),
    );
    println!("done by the provider");
    for (what, count) in world.script.mishaps() {
        row(what, count.to_string());
    }
    println!("in the database's log, all of it explained by the faults");
    for (text, count) in log {
        row(text, count.to_string());
    }
}
