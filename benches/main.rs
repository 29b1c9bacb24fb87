//! `cargo bench`: the release binary on a fresh embedded cluster with fsync on, measured from outside.
//!
//! Times come from the database's rows, commits and WAL from its counters. Since the speed of machines drifts, every run
//! also measures what the database can commit (`pgbench`) and the floor (`floor.rs`), and judges by the ratio to them.
//! `docs/performance.md` says what each number means.

mod cluster;
mod floor;
mod load;
mod pgbench;
mod process;
mod report;
mod service;
mod stub;
mod text;

use anyhow::{Context, bail};
use clap::Parser;
use cluster::Cluster;
use floor::Floor;
use report::{Report, Samples, Target::*};
use service::{Client, Service, Settings};
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};
use stub::Stub;

const WORKLOADS: [&str; 8] = ["pgbench", "W1", "W1h", "W2", "W3", "W4", "W5", "W6"];

/// Measures the service on this machine and says whether it reaches its targets.
#[derive(Parser, Debug)]
#[command(
    name = "cargo bench --",
    after_help = "\
Workloads:
  pgbench  one-row inserts at 1, 8 and 32 clients: what the database can commit
  W1       one parent with 250 and with 1,000 children, and the floor beside it
  W1h      W1 with the model behind HTTP
  W2       100 parents with 10 children each
  W3       from the last child's end to the parent's request to the model
  W4       5,000 stored one-step tasks, drained by one process
  W5       10,000 waiting parents, and 100,000 timers: CPU and memory at rest
  W6       POST /api/chat/message from 32 connections
W6 needs pgbench, which runs too."
)]
struct Args {
    /// Only these workloads
    #[arg(value_name = "WORKLOAD")]
    workloads: Vec<String>,
    /// Fewer repetitions and smaller loads, in less than 90 s
    #[arg(long)]
    quick: bool,
    /// Fail when a target is missed
    #[arg(long)]
    strict: bool,
    /// Where the numbers go as JSON
    #[arg(long, value_name = "FILE", default_value = "target/bench.json")]
    json: PathBuf,
    /// The folder of the cluster; made anew and removed
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Leave the cluster where it is
    #[arg(long)]
    keep: bool,
    /// Run this SQL on the new cluster first, to look closer: "alter database reconvene set ..."
    #[arg(long, value_name = "SQL")]
    prepare: Vec<String>,
    /// Repetitions of W1 and its floor
    #[arg(long, value_name = "N")]
    repeat: Option<usize>,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

impl Args {
    fn runs(&self, workload: &str) -> bool {
        let asked = |name: &str| {
            self.workloads.is_empty() || self.workloads.iter().any(|w| w.eq_ignore_ascii_case(name))
        };
        match workload {
            "pgbench" => asked("pgbench") || asked("W6"),
            _ => asked(workload),
        }
    }

    fn size(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }

    fn seconds(&self, full: u64, quick: u64) -> Duration {
        Duration::from_secs(if self.quick { quick } else { full })
    }
}

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if let Some(unknown) = args
        .workloads
        .iter()
        .find(|w| !WORKLOADS.iter().any(|known| known.eq_ignore_ascii_case(w)))
    {
        bail!(
            "there is no workload {unknown}; there are {}",
            WORKLOADS.join(", ")
        );
    }
    let data_dir = args.data_dir.clone().unwrap_or_else(|| {
        std::env::temp_dir().join(format!("reconvene-bench-{}", std::process::id()))
    });
    let cluster = Cluster::make(data_dir, &args.prepare).await?;
    let mut report = Report::default();
    let measured = measure(&args, &cluster, &mut report).await;
    if args.keep {
        eprintln!("the cluster is left in {}", cluster.data_dir.display());
    }
    cluster.close(args.keep).await?;
    print!("{}", report.table());
    measured?;
    std::fs::write(&args.json, format!("{:#}\n", report.json()))
        .with_context(|| format!("{} can not be written", args.json.display()))?;
    match report.misses() {
        0 => println!("\nEvery target is reached."),
        n => println!("\n{n} targets are missed."),
    }
    if args.strict && report.misses() > 0 {
        bail!("targets are missed");
    }
    Ok(())
}

async fn measure(args: &Args, cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    let inserts_32 = match args.runs("pgbench") {
        true => run_pgbench(args, cluster, report).await?,
        false => f64::NAN,
    };
    if ["W1", "W2", "W6"].iter().any(|w| args.runs(w)) {
        let service = Service::start(cluster, &Settings::default()).await?;
        if args.runs("W1") {
            run_w1(args, cluster, &service, report, inserts_32).await?;
        }
        if args.runs("W2") {
            run_w2(args, cluster, &service, report).await?;
        }
        if args.runs("W6") {
            run_w6(args, cluster, &service, report, inserts_32).await?;
        }
        service.stop().await?;
    }
    if args.runs("W1h") || args.runs("W3") {
        run_over_http(args, cluster, report).await?;
    }
    if args.runs("W4") {
        run_w4(args, cluster, report).await?;
    }
    if args.runs("W5") {
        run_w5(args, cluster, report).await?;
    }
    Ok(())
}

/// Returns the rate with 32 clients.
async fn run_pgbench(args: &Args, cluster: &Cluster, report: &mut Report) -> anyhow::Result<f64> {
    let mut last = f64::NAN;
    for clients in [1, 8, 32] {
        last = pgbench::inserts(cluster, clients, args.seconds(5, 2)).await?;
        let what = format!("one-row inserts, {clients} clients");
        report.figure("pgb", what, last, "/s");
    }
    Ok(last)
}

async fn run_w1(
    args: &Args,
    cluster: &Cluster,
    service: &Service,
    report: &mut Report,
    inserts_32: f64,
) -> anyhow::Result<()> {
    let mut floor = Floor::new(&cluster.embedded.options()).await?;
    let mut client = service.connect().await?;
    load::delegation(cluster, &mut client, 250).await?;
    quiet_floor(cluster, service, &mut floor, 250).await?;
    let postmaster = process::postmaster(&cluster.pool).await?;
    let own = [service.pid()];
    let cpu = || {
        (
            process::cpu(&own).as_secs_f64(),
            process::cpu(&process::family(postmaster)).as_secs_f64(),
        )
    };
    let (mut floors, mut large, mut small) = (vec![], vec![], vec![]);
    let mut spent = [0.0; 3];
    // Side by side, so that both meet the same machine.
    for _ in 0..args.repeat.unwrap_or(args.size(7, 2)) {
        let before = cpu();
        floors.push(quiet_floor(cluster, service, &mut floor, 1000).await?);
        let between = cpu();
        large.push(load::delegation(cluster, &mut client, 1000).await?);
        let after = cpu();
        spent[0] += between.1 - before.1;
        spent[1] += after.1 - between.1;
        spent[2] += after.0 - between.0;
        small.push(load::delegation(cluster, &mut client, 250).await?);
    }
    let floor_ms = Samples::of(floors.iter().map(|f| f.time.as_secs_f64() * 1000.0));
    report.measured("floor", "1,000 children's rows", &floor_ms, "ms");
    report.figure(
        "floor",
        "commits per child",
        Samples::of(floors.iter().map(|f| f.commits / 1000.0)).median(),
        "",
    );
    report.figure(
        "floor",
        "WAL per child",
        Samples::of(floors.iter().map(|f| f.wal_bytes / 1000.0)).median(),
        "B",
    );
    let ms = Samples::of(large.iter().map(|d| d.ms));
    let rate = 1000.0 / ms.median() * 1000.0;
    let per_run = |seconds: f64| seconds * 1000.0 / floors.len() as f64;
    report.figure("floor", "CPU of the database", per_run(spent[0]), "ms");
    report.measured("W1", "1,000 children, call to resume", &ms, "ms");
    report.figure("W1", "  CPU of the database", per_run(spent[1]), "ms");
    report.figure("W1", "  CPU of the service", per_run(spent[2]), "ms");
    report.figure("W1", "children per second", rate, "/s");
    report.figure(
        "W1",
        "children per one-row insert, 32 clients",
        rate / inserts_32,
        "",
    );
    report.judged(
        "W1",
        "time against the floor",
        ms.median() / floor_ms.median(),
        "x",
        AtMost(2.0),
    );
    let commits = Samples::of(large.iter().map(|d| d.used.commits / 1000.0));
    report.judged("W1", "commits per child", commits.median(), "", AtMost(0.3));
    let wal = Samples::of(large.iter().map(|d| d.used.wal_bytes / 1000.0));
    report.judged("W1", "WAL per child", wal.median(), "B", AtMost(8000.0));
    for (at, name) in [
        "stored",
        "last dispatched",
        "last claimed",
        "last finished",
        "last matched",
    ]
    .into_iter()
    .enumerate()
    {
        let phase = Samples::of(large.iter().map(|d| d.phases[at]));
        report.measured("W1", format!("  children {name} after"), &phase, "ms");
    }
    let ms = Samples::of(small.iter().map(|d| d.ms));
    report.measured("W1", "250 children, call to resume", &ms, "ms");
    let quarter = floor_ms.median() / 4.0;
    report.judged(
        "W1",
        "time against a quarter of the floor",
        ms.median() / quarter,
        "x",
        AtMost(2.5),
    );
    Ok(())
}

/// A floor run with the service held still.
async fn quiet_floor(
    cluster: &Cluster,
    service: &Service,
    floor: &mut Floor,
    children: usize,
) -> anyhow::Result<floor::Run> {
    load::until_idle(&cluster.pool).await?;
    loop {
        service.pause()?;
        // Stopped within a transaction it would hold what the floor needs.
        if cluster.is_quiet().await? {
            break;
        }
        service.go_on()?;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let run = floor.run(&cluster.pool, children).await;
    service.go_on()?;
    run
}

async fn run_w2(
    args: &Args,
    cluster: &Cluster,
    service: &Service,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut client = service.connect().await?;
    load::delegation(cluster, &mut client, 250).await?;
    let (mut rates, mut ratios) = (vec![], vec![]);
    for _ in 0..args.size(5, 2) {
        let w1 = w1_rate(cluster, &mut client).await?;
        load::until_idle(&cluster.pool).await?;
        let rate = load::delegations(cluster, service, 100, 10).await?;
        rates.push(rate);
        ratios.push(rate / w1);
    }
    report.measured("W2", "100 parents x 10 children", &Samples::of(rates), "/s");
    report.judged(
        "W2",
        "rate against W1's",
        Samples::of(ratios).median(),
        "x",
        AtLeast(0.7),
    );
    Ok(())
}

/// Children per second of one W1 with 1,000 children, to compare something with at this moment.
async fn w1_rate(cluster: &Cluster, client: &mut Client) -> anyhow::Result<f64> {
    Ok(1_000_000.0 / load::delegation(cluster, client, 1000).await?.ms)
}

async fn run_w6(
    args: &Args,
    cluster: &Cluster,
    service: &Service,
    report: &mut Report,
    inserts_32: f64,
) -> anyhow::Result<()> {
    load::until_idle(&cluster.pool).await?;
    load::chat(service, Duration::from_millis(500)).await?;
    let (mut rates, mut p99s) = (vec![], vec![]);
    for _ in 0..args.size(3, 1) {
        let (rate, latencies) = load::chat(service, args.seconds(5, 3)).await?;
        rates.push(rate);
        p99s.push(Samples::of(latencies).quantile(0.99));
        load::until_idle(&cluster.pool).await?;
    }
    let rates = Samples::of(rates);
    report.measured("W6", "chat messages, 32 connections", &rates, "/s");
    report.judged(
        "W6",
        "rate against 32-client inserts",
        rates.median() / inserts_32,
        "x",
        AtLeast(0.15),
    );
    report.judged("W6", "p99", Samples::of(p99s).median(), "ms", AtMost(60.0));
    Ok(())
}

async fn run_over_http(args: &Args, cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    let stub = Stub::start(cluster.demo.researcher.to_string()).await?;
    let settings = Settings {
        model: Some(stub.base_url.clone()),
        ..Settings::default()
    };
    let service = Service::start(cluster, &settings).await?;
    let mut client = service.connect().await?;
    load::delegation(cluster, &mut client, 250).await?;
    if args.runs("W1h") {
        let mut times = vec![];
        for _ in 0..args.size(5, 2) {
            times.push(load::delegation(cluster, &mut client, 1000).await?.ms);
        }
        let ms = Samples::of(times);
        report.measured("W1h", "1,000 children, model behind HTTP", &ms, "ms");
        report.figure(
            "W1h",
            "children per second",
            1000.0 / ms.median() * 1000.0,
            "/s",
        );
    }
    if args.runs("W3") {
        load::until_idle(&cluster.pool).await?;
        load::resumes(cluster, &mut client, &stub, 10).await?;
        let latencies = load::resumes(cluster, &mut client, &stub, args.size(200, 50)).await?;
        let latencies = Samples::of(latencies);
        report.judged(
            "W3",
            "child's end to parent's request, p50",
            latencies.quantile(0.5),
            "ms",
            AtMost(4.0),
        );
        report.judged("W3", "p99", latencies.quantile(0.99), "ms", AtMost(12.0));
    }
    service.stop().await
}

async fn run_w4(args: &Args, cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    let (mut rates, mut posted, mut ratios) = (vec![], vec![], vec![]);
    for _ in 0..args.size(3, 1) {
        let service = Service::start(cluster, &Settings::default()).await?;
        let mut client = service.connect().await?;
        load::delegation(cluster, &mut client, 250).await?;
        let w1 = w1_rate(cluster, &mut client).await?;
        load::until_idle(&cluster.pool).await?;
        service.stop().await?;
        let api = Settings {
            roles: Some("api"),
            ..Settings::default()
        };
        let service = Service::start(cluster, &api).await?;
        let begun = Instant::now();
        let tasks = load::post_all(&service, args.size(5000, 2000), "What time is it?").await?;
        posted.push(tasks.len() as f64 / begun.elapsed().as_secs_f64());
        service.stop().await?;
        let rest = Settings {
            roles: Some("orchestrator,worker"),
            ..Settings::default()
        };
        let service = Service::start(cluster, &rest).await?;
        let rate = load::drained(cluster, &tasks).await?;
        rates.push(rate);
        ratios.push(rate / w1);
        service.stop().await?;
    }
    report.measured(
        "W4",
        "posted to a process that is only api",
        &Samples::of(posted),
        "/s",
    );
    report.measured(
        "W4",
        "stored one-step tasks, one process",
        &Samples::of(rates),
        "/s",
    );
    report.judged(
        "W4",
        "rate against W1's",
        Samples::of(ratios).median(),
        "x",
        AtLeast(1.3),
    );
    Ok(())
}

async fn run_w5(args: &Args, cluster: &Cluster, report: &mut Report) -> anyhow::Result<()> {
    let service = Service::start(cluster, &Settings::default()).await?;
    let postmaster = process::postmaster(&cluster.pool).await?;
    let window = args.seconds(20, 5);
    cluster.tidy().await?;
    let before = at_rest(cluster, &service, postmaster, window).await?;
    load::store_waiting(cluster, 10_000).await?;
    cluster.tidy().await?;
    let after = at_rest(cluster, &service, postmaster, window).await?;
    load::store_timers(cluster, 100_000).await?;
    cluster.tidy().await?;
    let timers = at_rest(cluster, &service, postmaster, window).await?;
    let mut found = vec![];
    for _ in 0..args.size(10, 3) {
        found.push(load::one_timer(cluster).await?);
    }
    report.figure(
        "W5",
        "CPU at rest with no waiting parent",
        before.core_percent,
        "% core",
    );
    report.judged(
        "W5",
        "CPU at rest with 10,000",
        after.core_percent,
        "% core",
        AtMost(1.0),
    );
    report.figure(
        "W5",
        "  of which the service",
        after.service_percent,
        "% core",
    );
    let more = after.service_mb - before.service_mb;
    report.figure(
        "W5",
        "memory of the service with 10,000",
        after.service_mb,
        "MB",
    );
    report.judged(
        "W5",
        "memory more than with none",
        more + after.server_mb - before.server_mb,
        "MB",
        AtMost(30.0),
    );
    report.judged(
        "W5",
        "CPU at rest with 100,000 timers more",
        timers.core_percent,
        "% core",
        AtMost(1.0),
    );
    report.measured(
        "W5",
        "one of them that is due, found after",
        &Samples::of(found),
        "ms",
    );
    service.stop().await
}

struct Rest {
    core_percent: f64,
    service_percent: f64,
    service_mb: f64,
    server_mb: f64,
}

async fn at_rest(
    cluster: &Cluster,
    service: &Service,
    postmaster: u32,
    window: Duration,
) -> anyhow::Result<Rest> {
    let mut server = process::family(postmaster);
    let ours = cluster.own_backends().await?;
    server.retain(|pid| !ours.contains(pid));
    let own = [service.pid()];
    let before = (process::cpu(&own), process::cpu(&server));
    tokio::time::sleep(window).await;
    let percent = |now: Duration, before: Duration| {
        now.saturating_sub(before).as_secs_f64() / window.as_secs_f64() * 100.0
    };
    let service_percent = percent(process::cpu(&own), before.0);
    Ok(Rest {
        service_percent,
        core_percent: service_percent + percent(process::cpu(&server), before.1),
        service_mb: process::private_mb(&own),
        server_mb: process::private_mb(&server),
    })
}
