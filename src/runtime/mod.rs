//! Process lifetime: how loops run and stop, how they are woken, how many small writes become one.
//!
//! Nothing here touches the database. `bus.rs` carries the hub's hints between processes.

mod batcher;
mod hub;

pub use batcher::Batcher;
pub use hub::{Change, Hub, Outgoing, Watch, Work};

use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How a process ends: first `soft` (take nothing new, finish what is held), after the grace `hard` (give back what is
/// left). Cancelling `hard` also cancels `soft`.
#[derive(Clone, Debug)]
pub struct Shutdown {
    pub hard: CancellationToken,
    pub soft: CancellationToken,
}

impl Shutdown {
    pub fn new() -> Self {
        let hard = CancellationToken::new();
        Self {
            soft: hard.child_token(),
            hard,
        }
    }
}

impl Default for Shutdown {
    fn default() -> Self {
        Self::new()
    }
}

/// What one round of a loop did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It found nothing to do: wait for a hint or the timer.
    Idle,
    /// It handled so many, and that was all: wait too.
    Did(usize),
    /// It handled as many as it takes at once; there may be more.
    More(usize),
}

impl Progress {
    /// Of a round that has handled `n` and takes `limit` at most.
    pub fn of(n: usize, limit: u32) -> Self {
        match n {
            0 => Self::Idle,
            n if n < limit as usize => Self::Did(n),
            n => Self::More(n),
        }
    }
}

/// An error with its causes, in one line.
pub struct Causes<'a>(pub &'a (dyn std::error::Error + 'static));

impl std::fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

/// Calls `round` until `stop`: again at once while there may be more, else when hinted or after `poll` with jitter
/// (between 0.5 and 1.0 of it). After an error it waits longer, up to 6 s, and goes on: no error ends a loop.
pub async fn run_loop<H, R, E>(
    name: &'static str,
    stop: CancellationToken,
    poll: Duration,
    hint: impl Fn() -> H,
    round: impl Fn() -> R,
) where
    H: Future<Output = ()>,
    R: Future<Output = Result<Progress, E>>,
    E: std::error::Error + 'static,
{
    let mut failures = 0u32;
    while !stop.is_cancelled() {
        let pause = match round().await {
            Ok(Progress::More(_)) => {
                failures = 0;
                continue;
            }
            Ok(Progress::Idle | Progress::Did(_)) => {
                failures = 0;
                poll.mul_f64(0.5 + fastrand::f64() / 2.0)
            }
            Err(error) => {
                failures += 1;
                let pause = Duration::from_millis(100 << failures.min(6))
                    .mul_f64(0.5 + fastrand::f64() / 2.0);
                tracing::warn!(loop_name = name, error = %Causes(&error), failures, "loop {name} failed, trying again in {pause:?}");
                pause
            }
        };
        // A hint must not shorten the pause after an error, or a database that is away would be asked without end.
        let hinted = async {
            match failures {
                0 => hint().await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = hinted => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
    tracing::debug!(loop_name = name, "loop {name} has stopped");
}

/// The hint of a loop that only its timer wakes.
pub async fn no_hint() {
    std::future::pending().await
}
