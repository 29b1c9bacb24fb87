//! What the database itself can commit: one-row inserts by `pgbench`, on the same cluster in the same run.

use crate::cluster::Cluster;
use anyhow::{Context, ensure};
use secrecy::ExposeSecret;
use std::{path::PathBuf, time::Duration};
use tokio::process::Command;

const SCRIPT: &str = "insert into rows (id, text) values (gen_random_uuid(), 'one row of about a hundred bytes, as small \
    as a message that somebody might send');\n";

/// Inserts per second with so many clients.
pub async fn inserts(cluster: &Cluster, clients: u32, time: Duration) -> anyhow::Result<f64> {
    // A database of its own: the service's commits are counted by themselves.
    let url = cluster.embedded.url();
    let url = url.expose_secret().replacen("/reconvene?", "/postgres?", 1);
    let script = cluster.data_dir.join("insert.sql");
    std::fs::write(&script, SCRIPT)?;
    let program = program()?;
    let psql = program.with_file_name("psql");
    let table = "create table if not exists rows (id uuid primary key, text text not null)";
    let made = Command::new(psql)
        .args([
            &url,
            "-q",
            "-c",
            "set client_min_messages = error",
            "-c",
            table,
        ])
        .status()
        .await?;
    ensure!(made.success(), "psql could not make the table");
    let output = Command::new(program)
        .args(["-n", "-M", "prepared", "-f"])
        .arg(&script)
        .args([
            "-c",
            &clients.to_string(),
            "-j",
            &clients.min(2).to_string(),
        ])
        .args(["-T", &time.as_secs().max(1).to_string(), &url])
        .output()
        .await?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok())
        .with_context(|| format!("pgbench: {}{text}", String::from_utf8_lossy(&output.stderr)))
}

fn program() -> anyhow::Result<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let version = entry.file_name().to_str()?.parse().ok()?;
            Some((version, entry.path().join("bin/pgbench")))
        })
        .filter(|(_, path)| path.is_file())
        .collect();
    versions.sort();
    versions
        .pop()
        .map(|(_, path)| path)
        .context("pgbench was not found in /usr/lib/postgresql/*/bin")
}
