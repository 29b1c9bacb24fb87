//! Hints inside a process, and the outbox of hints for other processes.
//!
//! A hint says "look now" and nothing else: whoever misses one finds the same work at its next poll. Model text on its
//! way to watchers goes through here too; it is ephemeral, the feed table holds what counts.

use crate::domain::ids::{ProcessId, TaskId, WorkspaceId};
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::{Notify, broadcast};

/// The loops that can be hinted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    Events,
    Signals,
    Steps,
    /// Awaits whose time has come.
    Awaits,
    /// External signals that came before their wait.
    EarlySignals,
    /// Leases that have run out.
    Leases,
    /// Backfills of delegation profiles.
    Backfills,
}

impl Work {
    pub const ALL: [Self; 7] = [
        Self::Events,
        Self::Signals,
        Self::Steps,
        Self::Awaits,
        Self::EarlySignals,
        Self::Leases,
        Self::Backfills,
    ];

    /// What processes call it among each other.
    pub fn name(self) -> &'static str {
        match self {
            Self::Events => "events",
            Self::Signals => "signals",
            Self::Steps => "steps",
            Self::Awaits => "awaits",
            Self::EarlySignals => "early_signals",
            Self::Leases => "leases",
            Self::Backfills => "backfills",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|work| work.name() == name)
    }
}

/// What a watcher of a task is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The feed has grown: read the table.
    Feed,
    /// A piece of the answer that the model is writing in this turn. An empty one: it begins anew, and the pieces before
    /// are void.
    Delta { turn: i32, text: String },
    /// The watcher was too slow and missed something: read the table.
    Lagged,
}

/// Hints for other processes, gathered since the last time.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outgoing {
    pub work: BTreeSet<Work>,
    pub feeds: HashSet<TaskId>,
    pub stopped: HashSet<TaskId>,
    pub watched: HashSet<TaskId>,
    /// This process has just begun to listen.
    pub hello: bool,
    /// Model text for watchers elsewhere: workspace, task, turn, text.
    pub deltas: Vec<(WorkspaceId, TaskId, i32, String)>,
}

/// How long another process's interest in a task lasts without being renewed.
const REMOTE_INTEREST: Duration = Duration::from_secs(15);
/// Changes that a slow watcher may lag behind.
const WATCH_BUFFER: usize = 256;

pub struct Hub {
    pub process: ProcessId,
    /// By the number of the work.
    work: [Notify; Work::ALL.len()],
    has_peers: AtomicBool,
    outgoing: Mutex<Outgoing>,
    outgoing_ready: Notify,
    local: Mutex<HashMap<TaskId, broadcast::Sender<Change>>>,
    remote: Mutex<HashMap<TaskId, Instant>>,
    stopped: broadcast::Sender<TaskId>,
}

impl Hub {
    pub fn new(process: ProcessId) -> Self {
        Self {
            process,
            work: Default::default(),
            has_peers: AtomicBool::new(false),
            outgoing: Mutex::default(),
            outgoing_ready: Notify::new(),
            local: Mutex::default(),
            remote: Mutex::default(),
            stopped: broadcast::channel(1024).0,
        }
    }

    /// Hints the loop here and, when other processes are alive, theirs.
    pub fn wake(&self, work: Work) {
        self.wake_local(work);
        self.send(|out| {
            out.work.insert(work);
        });
    }

    /// Hints the loop in this process only.
    pub fn wake_local(&self, work: Work) {
        self.notify_of(work).notify_one();
    }

    /// Returns at the next hint, at once if one has come since the last call.
    pub async fn woken(&self, work: Work) {
        self.notify_of(work).notified().await;
    }

    /// The feeds of these tasks have grown.
    pub fn feeds_changed(&self, tasks: impl IntoIterator<Item = TaskId>) {
        for task in tasks {
            self.tell_local(task, Change::Feed);
            if self.is_watched_elsewhere(task) {
                self.send(|out| {
                    out.feeds.insert(task);
                });
            }
        }
    }

    /// The model has written `text` in `turn` of `task`.
    pub fn delta(&self, workspace: WorkspaceId, task: TaskId, turn: i32, text: &str) {
        self.tell_local(
            task,
            Change::Delta {
                turn,
                text: text.to_owned(),
            },
        );
        if self.is_watched_elsewhere(task) {
            self.send(|out| match out.deltas.last_mut() {
                // An empty piece means something of its own.
                Some((_, t, n, sofar))
                    if *t == task && *n == turn && !sofar.is_empty() && !text.is_empty() =>
                {
                    sofar.push_str(text);
                }
                _ => out.deltas.push((workspace, task, turn, text.to_owned())),
            });
        }
    }

    /// The model is asked again in this turn: what it had written before is void.
    pub fn answer_begins_anew(&self, workspace: WorkspaceId, task: TaskId, turn: i32) {
        self.delta(workspace, task, turn, "");
    }

    /// These tasks have been stopped: whoever works for one of them lets go.
    pub fn tasks_stopped(&self, tasks: impl IntoIterator<Item = TaskId>) {
        for task in tasks {
            let _ = self.stopped.send(task);
            self.send(|out| {
                out.stopped.insert(task);
            });
        }
    }

    /// The stops that happen from now on. Lagging is possible; the lease check is the net below.
    pub fn stops(&self) -> broadcast::Receiver<TaskId> {
        self.stopped.subscribe()
    }

    /// Follows the changes of a task until dropped.
    pub fn watch(self: &Arc<Self>, task: TaskId) -> Watch {
        let changes = lock(&self.local)
            .entry(task)
            .or_insert_with(|| broadcast::channel(WATCH_BUFFER).0)
            .subscribe();
        self.send(|out| {
            out.watched.insert(task);
        });
        Watch {
            hub: self.clone(),
            task,
            changes,
        }
    }

    /// The tasks that somebody in this process follows.
    pub fn watched(&self) -> Vec<TaskId> {
        lock(&self.local).keys().copied().collect()
    }

    /// Whether hints go out at all. A process that is alone sends none; when it meets the first other one it hints
    /// everything, for what it has kept to itself may have come after the other one had looked.
    pub fn set_has_peers(&self, has: bool) {
        if !self.has_peers.swap(has, Ordering::Relaxed) && has {
            self.send(|out| out.work.extend(Work::ALL));
        }
    }

    /// Tells the others that this process is there, so that they send hints from now on.
    pub fn announce_hello(&self) {
        self.send(|out| out.hello = true);
    }

    /// Tells the others again which tasks are followed here.
    pub fn renew_interest(&self) {
        let watched = self.watched();
        if !watched.is_empty() {
            self.send(|out| out.watched.extend(watched));
        }
    }

    /// Returns when there is something to send to other processes.
    pub async fn outgoing_ready(&self) {
        self.outgoing_ready.notified().await;
    }

    pub fn take_outgoing(&self) -> Outgoing {
        std::mem::take(&mut lock(&self.outgoing))
    }

    /// Another process follows these tasks.
    pub fn watched_elsewhere(&self, tasks: impl IntoIterator<Item = TaskId>) {
        let now = Instant::now();
        let mut remote = lock(&self.remote);
        remote.retain(|_, until| *until > now);
        remote.extend(tasks.into_iter().map(|task| (task, now + REMOTE_INTEREST)));
    }

    /// A change that another process reported.
    pub fn tell_local(&self, task: TaskId, change: Change) {
        if let Some(watchers) = lock(&self.local).get(&task) {
            let _ = watchers.send(change);
        }
    }

    /// A stop that another process reported.
    pub fn stopped_elsewhere(&self, tasks: impl IntoIterator<Item = TaskId>) {
        for task in tasks {
            let _ = self.stopped.send(task);
        }
    }

    /// Whether another process has said that it follows the task.
    pub fn is_watched_elsewhere(&self, task: TaskId) -> bool {
        self.has_peers.load(Ordering::Relaxed)
            && lock(&self.remote)
                .get(&task)
                .is_some_and(|until| *until > Instant::now())
    }

    fn send(&self, add: impl FnOnce(&mut Outgoing)) {
        if self.has_peers.load(Ordering::Relaxed) {
            add(&mut lock(&self.outgoing));
            self.outgoing_ready.notify_one();
        }
    }

    fn notify_of(&self, work: Work) -> &Notify {
        &self.work[work as usize]
    }
}

/// One follower of one task.
pub struct Watch {
    hub: Arc<Hub>,
    task: TaskId,
    changes: broadcast::Receiver<Change>,
}

impl Watch {
    /// Waits for the next change.
    pub async fn changed(&mut self) -> Change {
        match self.changes.recv().await {
            Ok(change) => change,
            Err(broadcast::error::RecvError::Lagged(_)) => Change::Lagged,
            // The sender lives in the hub as long as this watch does.
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut local = lock(&self.hub.local);
        // The receiver of this watch still counts.
        if local
            .get(&self.task)
            .is_some_and(|w| w.receiver_count() <= 1)
        {
            local.remove(&self.task);
        }
    }
}

/// A panic elsewhere can not leave these maps half written, so a poisoned lock is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
