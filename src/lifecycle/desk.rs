//! The room that a worker has, and how a decide step gets there without passing the queue.
//!
//! When the worker of its own process has room, the event loop writes a decide step as running and held by that worker,
//! and hands it over after the commit. A crash between the two loses nothing: the lease runs out, like that of any step.

use crate::{domain::ids::ProcessId, store::steps::Claimed};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// How many steps a worker takes at once. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Room {
    /// Steps that ask a model or run a tool.
    slots: Arc<Semaphore>,
    /// Steps that are held, the ones whose result is being written among them: twice as many, so that the next ones are
    /// taken meanwhile.
    held: Arc<Semaphore>,
}

/// A place for one step. Dropping it makes room.
#[derive(Debug)]
pub struct Seat {
    pub slot: OwnedSemaphorePermit,
    pub held: OwnedSemaphorePermit,
}

impl Room {
    pub fn new(concurrency: usize) -> Self {
        Self {
            slots: Arc::new(Semaphore::new(concurrency)),
            held: Arc::new(Semaphore::new(concurrency * 2)),
        }
    }

    /// `None`: there is no room, or the worker takes nothing any more.
    pub fn seat(&self) -> Option<Seat> {
        Some(Seat {
            held: self.held.clone().try_acquire_owned().ok()?,
            slot: self.slots.clone().try_acquire_owned().ok()?,
        })
    }

    pub fn close(&self) {
        self.slots.close();
    }
}

/// A step that this process holds, on its way to the worker.
#[derive(Debug)]
pub struct Handed {
    pub step: Claimed,
    pub seat: Seat,
}

/// Where the event loop hands steps in. Cheap to clone; when all are gone the worker knows that nothing more comes.
#[derive(Clone, Debug)]
pub struct Desk {
    room: Room,
    handed: mpsc::UnboundedSender<Handed>,
    pub worker: ProcessId,
    pub lease_secs: u32,
}

impl Desk {
    pub fn new(
        room: Room,
        worker: ProcessId,
        lease_secs: u32,
    ) -> (Self, mpsc::UnboundedReceiver<Handed>) {
        // Bounded by the room: there is a seat with each.
        let (handed, inbox) = mpsc::unbounded_channel();
        let desk = Self {
            room,
            handed,
            worker,
            lease_secs,
        };
        (desk, inbox)
    }

    pub(super) fn seat(&self) -> Option<Seat> {
        self.room.seat()
    }

    /// After the commit.
    pub(super) fn hand_over(&self, steps: Vec<Handed>) {
        for step in steps {
            // The worker reads until the last desk is gone. If it has died, the lease runs out.
            let _ = self.handed.send(step);
        }
    }
}
