//! CPU and memory of processes, from /proc.

use anyhow::Context;
use std::{fs, time::Duration};

/// Clock ticks per second of /proc times; the kernel's fixed unit for user space.
const TICKS: f64 = 100.0;

/// The server process that a connection of ours belongs to: the parent of its backend.
pub async fn postmaster(pool: &sqlx::PgPool) -> anyhow::Result<u32> {
    let backend: i32 = sqlx::query_scalar("select pg_backend_pid()")
        .fetch_one(pool)
        .await?;
    fields(backend as u32)?
        .get(1)
        .and_then(|ppid| ppid.parse().ok())
        .context("the server process was not found")
}

/// The process and its direct children: a PostgreSQL server has no others.
pub fn family(parent: u32) -> Vec<u32> {
    let children = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            fields(*pid).is_ok_and(|f| f.get(1).is_some_and(|p| *p == parent.to_string()))
        });
    std::iter::once(parent).chain(children).collect()
}

/// CPU time that these processes have used so far.
pub fn cpu(pids: &[u32]) -> Duration {
    let ticks: f64 = pids
        .iter()
        .filter_map(|pid| {
            let fields = fields(*pid).ok()?;
            // utime, stime, and the same of children that have ended: fields 14 to 17 of the line
            let at = |n: usize| fields.get(n - 3)?.parse::<f64>().ok();
            Some(at(14)? + at(15)? + at(16)? + at(17)?)
        })
        .sum();
    Duration::from_secs_f64(ticks / TICKS)
}

/// Memory in MB that these processes do not share with others.
pub fn private_mb(pids: &[u32]) -> f64 {
    let kb: f64 = pids
        .iter()
        .filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok())
        .flat_map(|text| {
            let private = text.lines().filter(|line| line.starts_with("Private_"));
            let kb = private.filter_map(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
            kb.collect::<Vec<_>>()
        })
        .sum();
    kb / 1024.0
}

/// The fields of /proc/PID/stat after the name, which may itself hold spaces: the first is the state, field 3.
fn fields(pid: u32) -> anyhow::Result<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, rest) = stat.rsplit_once(')').context("not a stat line")?;
    Ok(rest.split_whitespace().map(str::to_owned).collect())
}
