//! Stands between the processes and their database. It passes bytes on until it is told to do something worse.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixStream},
    sync::watch,
    task::AbortHandle,
};

pub struct Proxy {
    pub port: u16,
    state: Arc<State>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Open,
    /// Nothing gets through, and nobody is told.
    Frozen,
    /// Every connection is broken, and new ones are too.
    Cut,
}

struct State {
    target: PathBuf,
    mode: watch::Sender<Mode>,
    links: Mutex<HashMap<u64, AbortHandle>>,
    /// So many of the next commits reach the server, but their answers do not come back.
    unanswered_commits: AtomicU64,
    lost_answers: AtomicU64,
}

impl Proxy {
    /// In front of the server that listens on this Unix socket.
    pub async fn start(target: PathBuf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            target,
            mode: watch::Sender::new(Mode::Open),
            links: Mutex::default(),
            unanswered_commits: AtomicU64::new(0),
            lost_answers: AtomicU64::new(0),
        });
        tokio::spawn(accept(listener, state.clone()));
        Self { port, state }
    }

    /// Breaks every connection, and refuses new ones for this long.
    pub async fn cut(&self, time: Duration) {
        self.be(Mode::Cut, time).await;
    }

    /// Holds all bytes back for this long.
    pub async fn freeze(&self, time: Duration) {
        self.be(Mode::Frozen, time).await;
    }

    async fn be(&self, mode: Mode, time: Duration) {
        self.state.mode.send_replace(mode);
        tokio::time::sleep(time).await;
        self.state.mode.send_replace(Mode::Open);
    }

    /// Breaks each connection with this probability. Returns how many there were to break.
    pub fn cut_some(&self, random: &mut fastrand::Rng, probability: f64) -> u64 {
        let mut cut = 0;
        for link in self.state.links.lock().unwrap().values() {
            if random.f64() < probability {
                link.abort();
                cut += 1;
            }
        }
        cut
    }

    /// The next commits succeed, but who has asked for them is cut off before the answer.
    pub fn lose_commit_answers(&self, count: u64) {
        self.state
            .unanswered_commits
            .fetch_add(count, Ordering::Relaxed);
    }

    /// Ends [`Proxy::lose_commit_answers`].
    pub fn answer_commits(&self) {
        self.state.unanswered_commits.store(0, Ordering::Relaxed);
    }

    pub fn lost_answers(&self) -> u64 {
        self.state.lost_answers.load(Ordering::Relaxed)
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    let mut number = 0;
    while let Ok((client, _)) = listener.accept().await {
        number += 1;
        let (id, its_state) = (number, state.clone());
        // Registered before it can end.
        let mut links = state.links.lock().unwrap();
        let link = tokio::spawn(async move {
            let _gone = Gone(id, its_state.clone());
            let mut mode = its_state.mode.subscribe();
            tokio::select! {
                _ = pass_on(client, &its_state) => {}
                _ = mode.wait_for(|mode| *mode == Mode::Cut) => {}
            }
        });
        links.insert(id, link.abort_handle());
    }
}

/// Strikes a connection off when its task ends, however that ends.
struct Gone(u64, Arc<State>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.1.links.lock().unwrap().remove(&self.0);
    }
}

async fn pass_on(mut client: TcpStream, state: &State) -> std::io::Result<()> {
    client.set_nodelay(true)?;
    let mut server = UnixStream::connect(&state.target).await?;
    let mut mode = state.mode.subscribe();
    let (mut asked, mut answered) = (vec![0; 65536], vec![0; 65536]);
    loop {
        let _ = mode.wait_for(|mode| *mode != Mode::Frozen).await;
        tokio::select! {
            n = client.read(&mut asked) => {
                let asked = &asked[..n?];
                if asked.is_empty() {
                    return Ok(());
                }
                let loses = asked.windows(6).any(|word| word == b"COMMIT") && takes_one(&state.unanswered_commits);
                server.write_all(asked).await?;
                if loses {
                    // The server has done it when it answers.
                    let _ = server.read(&mut answered).await;
                    state.lost_answers.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
            }
            n = server.read(&mut answered) => {
                let answered = &answered[..n?];
                if answered.is_empty() {
                    return Ok(());
                }
                client.write_all(answered).await?;
            }
        }
    }
}

fn takes_one(count: &AtomicU64) -> bool {
    count
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
        .is_ok()
}
