//! Carries the hub's hints between processes, through PostgreSQL notifications (O-3).
//!
//! A hint is sent in a transaction of its own, after the one that made the work, and at most once per `GATHER`:
//! notifying takes a lock that is global to the database, so the hot transactions must not do it. A process that is
//! alone sends none. The listening connection is the bus's own, not one of the pool's; when it breaks it is made anew,
//! and every loop and watcher is told to look, since whatever was sent meanwhile is lost (H-17). The tables are the
//! truth: without any notification, polling finds everything.

use crate::{
    domain::ids::{ProcessId, TaskId},
    runtime::{Causes, Change, Hub, Outgoing, Progress, Shutdown, Work, no_hint, run_loop},
    store::{self, bus as sql},
};
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgListener, PgPoolOptions},
};
use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Hints that come within this time leave together.
const GATHER: Duration = Duration::from_millis(4);
/// The pause before a connection that could not be made, or soon broke, is made anew; less up to half of it.
const RECONNECT_AFTER: Duration = Duration::from_millis(250);
/// One that has lasted for less than this is not made anew at once: who cuts it may do so again and again.
const STEADY: Duration = Duration::from_secs(5);
/// For one try to make it anew: a pool would sleep through most of its usual 30 s.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// How often a process says that it is alive, and renews its interest in the tasks it watches.
const BEAT_EVERY: Duration = Duration::from_secs(5);
/// Task ids in one notification: 36 characters each, at most 57 with the id of a piece of text, and the limit is 8,000.
const IDS_PER_NOTIFICATION: usize = 120;

pub struct Bus {
    hub: Arc<Hub>,
    pool: PgPool,
    options: PgConnectOptions,
    roles: Vec<String>,
    is_listening: AtomicBool,
}

impl Bus {
    pub fn new(hub: Arc<Hub>, pool: PgPool, roles: Vec<String>) -> Self {
        let options = (*pool.connect_options()).clone();
        Self {
            hub,
            pool,
            options,
            roles,
            is_listening: AtomicBool::new(false),
        }
    }

    /// Whether hints of other processes arrive; shown by `/readyz`.
    pub fn is_listening(&self) -> bool {
        self.is_listening.load(Ordering::Relaxed)
    }

    /// Runs until the soft stop, then sends the hints that are left: what stopping has given back is for others to take.
    pub async fn run(&self, shutdown: Shutdown) {
        let stop = &shutdown.soft;
        tokio::join!(
            run_loop(
                "listener",
                stop.clone(),
                RECONNECT_AFTER,
                no_hint,
                || async {
                    tokio::select! {
                        () = stop.cancelled() => Ok(Progress::Idle),
                        result = self.listen() => result,
                    }
                }
            ),
            run_loop(
                "notifier",
                stop.clone(),
                BEAT_EVERY,
                || self.hub.outgoing_ready(),
                || async {
                    tokio::time::sleep(GATHER).await;
                    self.send().await
                }
            ),
            run_loop(
                "process_heartbeat",
                stop.clone(),
                BEAT_EVERY,
                no_hint,
                || self.beat()
            ),
        );
        if let Err(error) = self.send().await {
            tracing::debug!(error = %Causes(&error), "the last hints were not sent");
        }
        if let Ok(mut conn) = self.pool.acquire().await {
            let _ = sql::leave(&mut conn, self.hub.process).await;
        }
    }

    /// Listens until the connection breaks.
    async fn listen(&self) -> Result<Progress, store::Error> {
        // A pool of one that nobody else uses: the service's own pool may be as small as one connection.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(CONNECT_WITHIN)
            .connect_with(self.options.clone())
            .await?;
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.ignore_pool_close_event(true);
        // A lost connection shows at once instead of when a new one is there.
        listener.eager_reconnect(false);
        listener.listen(sql::CHANNEL).await?;
        let begun = Instant::now();
        self.is_listening.store(true, Ordering::Relaxed);
        let result = self.hear(&mut listener).await;
        self.is_listening.store(false, Ordering::Relaxed);
        result.map(|()| match begun.elapsed() < STEADY {
            true => Progress::Idle,
            false => Progress::More(1),
        })
    }

    /// Takes what comes, until the connection is lost and with it whatever is sent meanwhile.
    async fn hear(&self, listener: &mut PgListener) -> Result<(), store::Error> {
        self.beat().await?;
        self.hub.announce_hello();
        self.look_everywhere();
        while let Some(notification) = listener.try_recv().await? {
            self.receive(notification.payload()).await;
        }
        Ok(())
    }

    fn look_everywhere(&self) {
        for work in Work::ALL {
            self.hub.wake_local(work);
        }
        for task in self.hub.watched() {
            self.hub.tell_local(task, Change::Lagged);
        }
    }

    async fn beat(&self) -> Result<Progress, store::Error> {
        let mut conn = self.pool.acquire().await?;
        let host = std::fs::read_to_string("/etc/hostname").unwrap_or_default();
        let others = sql::beat(&mut conn, self.hub.process, &self.roles, host.trim()).await?;
        self.hub.set_has_peers(others > 0);
        self.hub.renew_interest();
        Ok(Progress::Idle)
    }

    async fn send(&self) -> Result<Progress, store::Error> {
        let outgoing = self.hub.take_outgoing();
        if outgoing == Outgoing::default() {
            return Ok(Progress::Idle);
        }
        let mut conn = self.pool.acquire().await?;
        let chunks = match outgoing.deltas.is_empty() {
            true => vec![],
            false => sql::put_chunks(&mut conn, &outgoing.deltas).await?,
        };
        sql::notify(&mut conn, &payloads(self.hub.process, &outgoing, &chunks)).await?;
        Ok(Progress::Idle)
    }

    async fn receive(&self, payload: &str) {
        let Some((from, hint)) = parse(payload) else {
            return;
        };
        if from == self.hub.process {
            return;
        }
        self.hub.set_has_peers(true);
        match hint {
            Hint::Hello => self.hub.renew_interest(),
            Hint::Work(work) => self.hub.wake_local(work),
            Hint::Watched(tasks) => self.hub.watched_elsewhere(tasks),
            Hint::Stopped(tasks) => self.hub.stopped_elsewhere(tasks),
            Hint::Feeds(tasks) => {
                tasks
                    .into_iter()
                    .for_each(|task| self.hub.tell_local(task, Change::Feed));
            }
            Hint::Deltas(chunks) => {
                if let Err(error) = self.pass_chunks(&chunks).await {
                    tracing::debug!(error = %Causes(&error), "streamed text was not read");
                }
            }
        }
    }

    /// Hands the text that other processes have written to the watchers here. Pieces are read by their ids: "newer than
    /// the newest" would lose one that was stored late.
    async fn pass_chunks(&self, chunks: &[(TaskId, i64)]) -> Result<(), store::Error> {
        let watched = self.hub.watched();
        let chunks: Vec<(TaskId, i64)> = chunks
            .iter()
            .copied()
            .filter(|(task, _)| watched.contains(task))
            .collect();
        if chunks.is_empty() {
            return Ok(());
        }
        let mut conn = self.pool.acquire().await?;
        for chunk in sql::chunks_all_workspaces(&mut conn, &chunks).await? {
            self.hub.tell_local(
                chunk.task,
                Change::Delta {
                    turn: chunk.turn,
                    text: chunk.text,
                },
            );
        }
        Ok(())
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Hint {
    Hello,
    Work(Work),
    Feeds(Vec<TaskId>),
    /// Pieces of text, by task and id.
    Deltas(Vec<(TaskId, i64)>),
    Watched(Vec<TaskId>),
    Stopped(Vec<TaskId>),
}

/// `PROCESS KIND [ID,ID,…]`, one notification each. `chunks` are the ids under which `out.deltas` were stored.
fn payloads(process: ProcessId, out: &Outgoing, chunks: &[(TaskId, i64)]) -> Vec<String> {
    let mut payloads: Vec<String> = out
        .work
        .iter()
        .map(|work| format!("{process} {}", work.name()))
        .collect();
    if out.hello {
        payloads.push(format!("{process} hello"));
    }
    let deltas = chunks.iter().map(|(task, id)| format!("{task}/{id}"));
    let ids = |tasks: &HashSet<TaskId>| tasks.iter().map(TaskId::to_string).collect::<Vec<_>>();
    let lists = [
        ("watched", ids(&out.watched)),
        ("stopped", ids(&out.stopped)),
        ("deltas", deltas.collect()),
        ("feeds", ids(&out.feeds)),
    ];
    for (kind, ids) in lists {
        for ids in ids.chunks(IDS_PER_NOTIFICATION) {
            payloads.push(format!("{process} {kind} {}", ids.join(",")));
        }
    }
    payloads
}

fn parse(payload: &str) -> Option<(ProcessId, Hint)> {
    let mut parts = payload.split(' ');
    let process = parts.next()?.parse().ok()?;
    let kind = parts.next()?;
    let list = parts.next();
    let ids = || {
        list?
            .split(',')
            .map(|id| id.parse().ok())
            .collect::<Option<Vec<TaskId>>>()
    };
    let chunk = |text: &str| {
        let (task, id) = text.split_once('/')?;
        Some((task.parse().ok()?, id.parse().ok()?))
    };
    let hint = match kind {
        "hello" => Hint::Hello,
        "watched" => Hint::Watched(ids()?),
        "stopped" => Hint::Stopped(ids()?),
        "deltas" => Hint::Deltas(list?.split(',').map(chunk).collect::<Option<_>>()?),
        "feeds" => Hint::Feeds(ids()?),
        work => Hint::Work(Work::named(work)?),
    };
    Some((process, hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::ids::WorkspaceId;

    // H-18
    #[test]
    fn payloads_are_read_back_and_stay_below_the_limit() {
        let me = ProcessId::new();
        let tasks: Vec<TaskId> = (0..400).map(|_| TaskId::new()).collect();
        let out = Outgoing {
            work: [Work::Events, Work::Steps].into(),
            feeds: tasks.iter().copied().collect(),
            stopped: [tasks[1]].into(),
            watched: [tasks[2]].into(),
            deltas: vec![(WorkspaceId::new(), tasks[3], 1, "é".repeat(50_000))],
            hello: true,
        };
        let chunks: Vec<_> = tasks.iter().map(|task| (*task, i64::MAX)).collect();
        let payloads = payloads(me, &out, &chunks);
        assert!(payloads.iter().all(|p| p.len() < 8000));
        let hints: Vec<Hint> = payloads
            .iter()
            .map(|p| {
                let (process, hint) = parse(p).unwrap();
                assert_eq!(process, me);
                hint
            })
            .collect();
        assert_eq!(
            hints[..6],
            [
                Hint::Work(Work::Events),
                Hint::Work(Work::Steps),
                Hint::Hello,
                Hint::Watched(vec![tasks[2]]),
                Hint::Stopped(vec![tasks[1]]),
                Hint::Deltas(chunks[..IDS_PER_NOTIFICATION].to_vec()),
            ]
        );
        let feeds = hints.into_iter().filter_map(|h| match h {
            Hint::Feeds(tasks) => Some(tasks.len()),
            _ => None,
        });
        assert_eq!(feeds.sum::<usize>(), 400);
        for rubbish in [
            "",
            "x",
            "x events",
            &format!("{me}"),
            &format!("{me} feeds"),
            &format!("{me} feeds x"),
            &format!("{me} deltas {me}"),
            &format!("{me} what"),
        ] {
            assert_eq!(parse(rubbish), None, "{rubbish}");
        }
    }
}
