//! The processes of the program, each with a supervisor that starts it again when it has ended, as an init system would.

use super::World;
use crate::program::Program;
use rustix::process::Signal;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

/// For a process to come up while the database is there, or to end after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(60);

/// What runs, in two API processes, two orchestrators and three workers.
const ROLES: [&str; 7] = [
    "api",
    "api",
    "orchestrator",
    "orchestrator",
    "worker",
    "worker",
    "worker",
];

pub struct Fleet {
    slots: Vec<Slot>,
    supervisors: JoinSet<()>,
}

pub struct Slot {
    pub roles: &'static str,
    commands: mpsc::Sender<(Command, oneshot::Sender<()>)>,
    /// Where its API is, while it serves.
    address: watch::Receiver<Option<String>>,
    is_busy: Arc<AtomicBool>,
}

#[derive(Clone, Copy)]
pub enum Command {
    /// `kill -9`, and so long until the next start.
    Kill(Duration),
    /// SIGTERM, and so long until the next start.
    Terminate(Duration),
    /// SIGSTOP, and SIGCONT after this time.
    Suspend(Duration),
    /// The end of the run.
    End,
}

impl Fleet {
    pub async fn start(world: &Arc<World>) -> Self {
        let mut fleet = Self {
            slots: Vec::new(),
            supervisors: JoinSet::new(),
        };
        for roles in ROLES {
            let (commands, receiver) = mpsc::channel(1);
            let (sender, address) = watch::channel(None);
            fleet
                .supervisors
                .spawn(supervise(world.clone(), roles, receiver, sender));
            fleet.slots.push(Slot {
                roles,
                commands,
                address,
                is_busy: Arc::default(),
            });
        }
        fleet
    }

    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The API processes that serve now.
    pub fn addresses(&self) -> Vec<String> {
        let addresses = self
            .slots
            .iter()
            .filter_map(|slot| slot.address.borrow().clone());
        addresses.filter(|address| !address.is_empty()).collect()
    }

    /// Waits until every process serves.
    pub async fn serves(&self) {
        for slot in &self.slots {
            let mut address = slot.address.clone();
            let served =
                tokio::time::timeout(2 * PATIENCE, address.wait_for(|address| address.is_some()));
            assert!(served.await.is_ok(), "a {} does not serve", slot.roles);
        }
    }

    /// Ends all processes gracefully.
    pub async fn end(self) {
        for slot in &self.slots {
            let _ = slot
                .commands
                .send((Command::End, oneshot::channel().0))
                .await;
        }
        self.supervisors.join_all().await;
    }
}

impl Slot {
    /// Does something to the process unless something is being done to it, and waits until it serves again. `false`: it was
    /// left alone.
    pub async fn suffer(&self, command: Command) -> bool {
        if self.address.borrow().is_none() || self.is_busy.swap(true, Ordering::Relaxed) {
            return false;
        }
        let (done, is_done) = oneshot::channel();
        let sent = self.commands.send((command, done)).await;
        let _ = is_done.await;
        self.is_busy.store(false, Ordering::Relaxed);
        sent.is_ok()
    }
}

/// Keeps one process alive until the end.
async fn supervise(
    world: Arc<World>,
    roles: &'static str,
    mut commands: mpsc::Receiver<(Command, oneshot::Sender<()>)>,
    address: watch::Sender<Option<String>>,
) {
    loop {
        let Some((mut program, at)) = start(&world, roles).await else {
            tokio::time::sleep(Duration::from_millis(300)).await;
            continue;
        };
        address.send_replace(Some(at));
        let pause = loop {
            let (command, done) = tokio::select! {
                status = program.exit() => {
                    world.fail(format!("a {roles} ended by itself, with {status}:\n{}", program.text()));
                    break Duration::ZERO;
                }
                command = commands.recv() => match command {
                    Some(command) => command,
                    None => return,
                }
            };
            let pause = match command {
                Command::Suspend(time) => {
                    program.signal(Signal::STOP);
                    tokio::time::sleep(time).await;
                    program.signal(Signal::CONT);
                    let _ = done.send(());
                    continue;
                }
                Command::Kill(pause) => {
                    address.send_replace(None);
                    program.signal(Signal::KILL);
                    program.exit().await;
                    Some(pause)
                }
                Command::Terminate(pause) => {
                    address.send_replace(None);
                    terminate(&world, roles, &mut program).await;
                    Some(pause)
                }
                Command::End => {
                    terminate(&world, roles, &mut program).await;
                    None
                }
            };
            judge(&world, roles, &program);
            let _ = done.send(());
            match pause {
                Some(pause) => break pause,
                None => return,
            }
        };
        address.send_replace(None);
        tokio::time::sleep(pause).await;
    }
}

/// Starts the process; `None` when it could not find the database, which may be away.
async fn start(world: &World, roles: &str) -> Option<(Program, String)> {
    let is_calm = world.is_calm();
    let mut program = Program::run(&["serve", "--roles", roles], &world.env);
    let begun = Instant::now();
    loop {
        let lines = program.lines();
        if lines.iter().any(|line| line.contains("serving ")) {
            let listens = "Reconvene listens on ";
            let at = lines
                .iter()
                .find_map(|line| Some(line.split_once(listens)?.1));
            if roles != "api" || at.is_some() {
                return Some((program, at.unwrap_or_default().trim().to_owned()));
            }
        }
        let ended = tokio::time::timeout(Duration::from_millis(20), program.exit()).await;
        if ended.is_ok() {
            judge(world, roles, &program);
            world.count("starts without a database");
            if is_calm {
                world.fail(format!("a {roles} could not start:\n{}", program.text()));
            }
            return None;
        }
        if begun.elapsed() > PATIENCE {
            world.fail(format!("a {roles} does not come up:\n{}", program.text()));
            return None;
        }
    }
}

async fn terminate(world: &World, roles: &str, program: &mut Program) {
    program.signal(Signal::TERM);
    match tokio::time::timeout(PATIENCE, program.exit()).await {
        Ok(status) if status.success() => {}
        Ok(status) => world.fail(format!(
            "a {roles} ended with {status} after SIGTERM:\n{}",
            program.text()
        )),
        Err(_) => {
            world.fail(format!(
                "a {roles} did not end after SIGTERM:\n{}",
                program.text()
            ));
            program.signal(Signal::KILL);
        }
    }
}

/// What no fault excuses.
fn judge(world: &World, roles: &str, program: &Program) {
    for line in program.lines() {
        if line.contains("panicked") || line.contains("ERROR") {
            world.fail(format!("a {roles} wrote: {line}"));
        }
    }
}
