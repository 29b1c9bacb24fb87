//! What is done to the processes, the database and the connections between them, at random.

use super::{
    World,
    fleet::{Command, Fleet},
};
use rustix::process::{Signal, kill_process};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

fn seconds(random: &mut fastrand::Rng, range: std::ops::Range<f64>) -> Duration {
    Duration::from_secs_f64(range.start + random.f64() * (range.end - range.start))
}

/// Injects faults until the time is over, then waits until each has been repaired.
pub async fn inject(
    world: Arc<World>,
    fleet: Arc<Fleet>,
    mut random: fastrand::Rng,
    until: Instant,
) {
    let mut running = JoinSet::new();
    loop {
        tokio::time::sleep(seconds(&mut random, 0.2..1.8)).await;
        if Instant::now() >= until {
            break;
        }
        running.spawn(one(world.clone(), fleet.clone(), random.fork()));
        while let Some(ended) = running.try_join_next() {
            ended.unwrap();
        }
    }
    while let Some(ended) = running.join_next().await {
        ended.unwrap();
    }
    world.proxy.answer_commits();
}

async fn one(world: Arc<World>, fleet: Arc<Fleet>, mut random: fastrand::Rng) {
    let random = &mut random;
    let slot = &fleet.slots()[random.usize(..fleet.slots().len())];
    match random.u32(0..100) {
        0..26 => {
            if slot.suffer(Command::Kill(seconds(random, 0.0..2.0))).await {
                world.count(match slot.roles {
                    "api" => "kill -9 of an API process",
                    "worker" => "kill -9 of a worker",
                    _ => "kill -9 of an orchestrator",
                });
            }
        }
        26..32 => {
            if slot
                .suffer(Command::Terminate(seconds(random, 0.0..1.0)))
                .await
            {
                world.count("SIGTERM and a new start");
            }
        }
        32..46 => {
            let time = seconds(random, 0.5..9.0);
            if slot.suffer(Command::Suspend(time)).await {
                world.count(match time.as_secs_f64() > f64::from(super::LEASE_SECONDS) {
                    true => "SIGSTOP for longer than a lease, SIGCONT",
                    false => "SIGSTOP for less than a lease, SIGCONT",
                });
            }
        }
        46..62 | 74..80 => whole_database(&world, random).await,
        62..74 => {
            let share = random.f64();
            let cut = world.proxy.cut_some(random, share);
            world.count_many("single connections cut", cut);
        }
        80..90 => world.proxy.lose_commit_answers(random.u64(1..4)),
        _ => {
            let listeners = random.bool();
            let ended = terminate_backends(&world, listeners, random.f64()).await;
            world.count_many(
                match listeners {
                    true => "pg_terminate_backend of a listener",
                    false => "pg_terminate_backend of any",
                },
                ended,
            );
        }
    }
}

/// One of the faults that nobody can work through. After it everybody gets a few seconds to go on: a database that is
/// never there tests nothing.
async fn whole_database(world: &World, random: &mut fastrand::Rng) {
    let Ok(_alone) = world.outage.try_lock() else {
        return;
    };
    let begun = Instant::now();
    match random.u32(0..22) {
        0..8 => {
            restart_database(world, seconds(random, 0.0..3.0)).await;
            world.count("PostgreSQL stopped with -m immediate, started again");
        }
        8..16 => {
            world.proxy.cut(seconds(random, 0.0..2.0)).await;
            world.count("all connections cut");
        }
        _ => {
            world.proxy.freeze(seconds(random, 0.2..5.0)).await;
            world.count("all connections frozen");
        }
    }
    *world.away.lock().unwrap() += begun.elapsed();
    tokio::time::sleep(seconds(random, 1.0..5.0)).await;
}

/// What `pg_ctl -m immediate stop` does, and a start after the pause.
async fn restart_database(world: &World, pause: Duration) {
    let server = world.home.server();
    if let Some(server) = server {
        let _ = kill_process(server, Signal::QUIT);
    }
    while server.is_some() && world.home.server() == server {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    tokio::time::sleep(pause).await;
    if let Err(error) = world.database.ensure_running().await {
        world.fail(format!("the database does not start again: {error}"));
    }
}

/// Ends sessions of the processes, each with this probability.
async fn terminate_backends(world: &World, listeners: bool, probability: f64) -> u64 {
    let sql = "select count(pg_terminate_backend(pid)) from pg_stat_activity
         where datname = current_database() and application_name = 'reconvene' and pid <> pg_backend_pid()
            and (query ilike 'listen %') = $1 and random() < $2";
    let ended = sqlx::query_scalar::<_, i64>(sql)
        .bind(listeners)
        .bind(probability)
        .fetch_one(&world.pool)
        .await;
    // The database may be away for another reason.
    ended.unwrap_or_default() as u64
}
