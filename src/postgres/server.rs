//! The server process: made, started, watched, stopped. Whoever starts or stops holds the turn (see `super`).
//!
//! Whether it lives is asked of its socket, not of its process id: a process id may have passed to another program, and a
//! dead child stays visible until it is waited for. A signal is only sent to a process whose command line names our cluster.

use super::home::{self, Home};
use super::programs::Programs;
use super::{PostgresError, io};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use secrecy::{ExposeSecret, SecretString};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::process::Child;
use tracing::{info, warn};

/// Given on the command line, so that they hold however old the cluster is. Durability is PostgreSQL's default and spelled
/// out because it is a promise.
const SETTINGS: [&str; 17] = [
    "listen_addresses=",
    "unix_socket_permissions=0700",
    "cluster_name=reconvene",
    "logging_collector=off",
    "log_destination=stderr",
    "log_line_prefix=%m [%p] ",
    "max_connections=200",
    "shared_buffers=256MB",
    "fsync=on",
    "synchronous_commit=on",
    "full_page_writes=on",
    "wal_compression=on",
    "max_wal_size=4GB",
    "checkpoint_timeout=15min",
    "jit=off",
    "random_page_cost=1.1",
    "restart_after_crash=on",
];

/// For a server to come up, recovery included.
const START_LIMIT: Duration = Duration::from_secs(600);
/// For the remains of a killed server to go: its children notice within moments unless they are busy.
const REMAINS_LIMIT: Duration = Duration::from_secs(30);
/// For a fast shutdown; the last checkpoint may take its time.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// A server may listen and then give up (a recovery that fails): not to be tried forever.
const STARTS_MAX: u32 = 3;
/// Above this the log of earlier starts is put aside.
const LOG_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// The server of one home. `child` if this process started it.
#[derive(Default)]
pub struct Server {
    child: Option<Child>,
}

impl Server {
    /// Whether somebody accepts connections on the socket. A server that is busy or still recovering does.
    pub async fn is_listening(&mut self, home: &Home) -> bool {
        self.reap();
        match tokio::time::timeout(Duration::from_secs(5), UnixStream::connect(home.socket())).await
        {
            Ok(connected) => connected.is_ok(),
            // Too busy to accept is not dead.
            Err(_) => true,
        }
    }

    /// Returns when the server answers queries; `true` if it had to be started.
    pub async fn start_if_dead(
        &mut self,
        home: &Home,
        programs: &Programs,
        password: &SecretString,
    ) -> Result<bool, PostgresError> {
        let since = Instant::now();
        let mut starts = 0;
        loop {
            if !self.is_listening(home).await {
                if starts == STARTS_MAX {
                    let tail = last_lines(&read_from(&home.log(), 0));
                    return Err(PostgresError::NotStarted {
                        log: home.log(),
                        tail,
                    });
                }
                self.start(home, programs, since).await?;
                starts += 1;
            }
            match connect(home, password, "postgres").await {
                Ok(connection) => {
                    let _ = connection.close().await;
                    return Ok(starts > 0);
                }
                Err(err) if is_passing(&err) && since.elapsed() < START_LIMIT => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(err) => return Err(PostgresError::Refused(err)),
            }
        }
    }

    /// Starts the process and waits until it listens.
    async fn start(
        &mut self,
        home: &Home,
        programs: &Programs,
        since: Instant,
    ) -> Result<(), PostgresError> {
        loop {
            forget_dead_server(home);
            let (log, log_start) = open_log(home)?;
            let child = programs
                .command("postgres", home, &home.cluster())
                .arg("-D")
                .arg(home.cluster())
                .arg("-k")
                .arg(home.socket_dir())
                .args(["-p", &home::PORT.to_string()])
                .args(SETTINGS.iter().flat_map(|setting| ["-c", setting]))
                .stdout(
                    log.try_clone()
                        .map_err(io("the server's log cannot be opened"))?,
                )
                .stderr(log)
                .spawn()
                .map_err(io("postgres cannot be started"))?;
            self.child = Some(child);

            let mut announced = false;
            while self.child.is_some() && !self.is_listening(home).await {
                if since.elapsed() > Duration::from_secs(5) && !announced {
                    info!("waiting for the private database to start");
                    announced = true;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            if self.child.is_some() {
                return Ok(());
            }

            let tail = read_from(&home.log(), log_start);
            // What a killed server leaves behind for a moment: children that still use its memory.
            let remains = tail.contains("is still in use") || tail.contains("lock file");
            if !remains || since.elapsed() > REMAINS_LIMIT {
                return Err(PostgresError::NotStarted {
                    log: home.log(),
                    tail: last_lines(&tail),
                });
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Fast shutdown: connections are cut, everything committed is on disk.
    pub async fn stop(mut self, home: &Home) -> Result<(), PostgresError> {
        // A child that does not listen yet is on its way up.
        if !self.is_listening(home).await && self.child.is_none() {
            return Ok(());
        }
        let child = self
            .child
            .as_ref()
            .and_then(Child::id)
            .map(|pid| pid as i32);
        let Some(pid) = child
            .or_else(|| pid_of_cluster(home))
            .and_then(Pid::from_raw)
        else {
            warn!("the private database's process was not found; it is left running");
            return Ok(());
        };
        // SIGTERM would wait for every client to leave by itself.
        for (signal, limit) in [
            (Signal::INT, STOP_LIMIT),
            (Signal::QUIT, Duration::from_secs(10)),
        ] {
            kill_process(pid, signal)
                .map_err(|err| io("the private database cannot be stopped")(err.into()))?;
            if tokio::time::timeout(limit, self.gone(home, pid))
                .await
                .is_ok()
            {
                info!("private database stopped");
                return Ok(());
            }
            warn!("the private database does not stop; asking harder");
        }
        Ok(())
    }

    async fn gone(&mut self, home: &Home, pid: Pid) {
        if let Some(child) = &mut self.child {
            let _ = child.wait().await;
        }
        while is_server_of(home, pid) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Takes note of a child's death.
    fn reap(&mut self) {
        if let Some(child) = &mut self.child
            && !matches!(child.try_wait(), Ok(None))
        {
            self.child = None;
        }
    }
}

pub fn options(home: &Home, password: &SecretString, database: &str) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .host("localhost")
        .socket(home.socket_dir())
        .port(home::PORT)
        .username(super::DATABASE)
        .password(password.expose_secret())
        .database(database)
        .application_name("reconvene")
}

async fn connect(
    home: &Home,
    password: &SecretString,
    database: &str,
) -> Result<PgConnection, sqlx::Error> {
    let options = options(home, password, database).disable_statement_logging();
    match tokio::time::timeout(Duration::from_secs(30), options.connect()).await {
        Ok(connected) => connected,
        Err(_) => Err(sqlx::Error::PoolTimedOut),
    }
}

/// Errors that go away by themselves while a server comes up or restarts after a crash of one of its processes.
fn is_passing(err: &sqlx::Error) -> bool {
    match err {
        // cannot_connect_now, crash_shutdown, admin_shutdown, too_many_connections
        sqlx::Error::Database(err) => err
            .code()
            .is_some_and(|code| ["57P03", "57P02", "57P01", "53300"].contains(&code.as_ref())),
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut => true,
        _ => false,
    }
}

/// Makes the cluster the first time; the password either way.
pub async fn make_cluster_if_missing(
    home: &Home,
    programs: &Programs,
) -> Result<SecretString, PostgresError> {
    let (cluster, password_file) = (home.cluster(), home.password_file());
    if !cluster.exists() {
        home.remove_unfinished_clusters();
        // A name of its own: the initdb of a start that was killed may still be writing to another.
        let fresh = home.unfinished_cluster();
        home.give_dir(&fresh)?;
        let password = home::random_secret();
        home::write_secret(&password_file, &password)?;
        // initdb runs as the server's account, which can not read our file.
        let handed_over = fresh.with_extension("pw");
        home::write_secret(&handed_over, &password)?;
        home.give(&handed_over)?;
        let output = programs
            .command("initdb", home, &fresh)
            .arg("-D")
            .arg(&fresh)
            .args(["-U", super::DATABASE, "-E", "UTF8", "--locale=C.UTF-8"])
            .args([
                "--auth=scram-sha-256",
                "--data-checksums",
                "--no-instructions",
            ])
            .arg("--pwfile")
            .arg(&handed_over)
            // Whoever gives up waiting for it wants no cluster.
            .kill_on_drop(true)
            .output()
            .await;
        let _ = std::fs::remove_file(&handed_over);
        let output = output.map_err(io("initdb cannot be started"))?;
        if !output.status.success() {
            let output = last_lines(&String::from_utf8_lossy(&output.stderr));
            return Err(PostgresError::Initdb { cluster, output });
        }
        std::fs::rename(&fresh, &cluster)
            .map_err(io(format!("{} cannot be renamed", fresh.display())))?;
    }
    match std::fs::read_to_string(&password_file) {
        Ok(text) => Ok(text.trim().to_owned().into()),
        Err(source) => Err(PostgresError::PasswordMissing {
            path: password_file,
            source,
        }),
    }
}

pub async fn create_database_if_missing(
    home: &Home,
    password: &SecretString,
    name: &'static str,
) -> Result<(), PostgresError> {
    let create = async {
        let mut connection = connect(home, password, "postgres").await?;
        let exists = sqlx::query_scalar::<_, bool>(
            "select exists (select from pg_database where datname = $1)",
        )
        .bind(name)
        .fetch_one(&mut connection)
        .await?;
        if !exists {
            // A name can not be bound. This one is a constant of ours.
            let create = AssertSqlSafe(format!("create database {name}"));
            sqlx::query(create).execute(&mut connection).await?;
        }
        connection.close().await
    };
    create.await.map_err(PostgresError::Refused)
}

/// Removes the marks of a server that is certainly gone. PostgreSQL does so itself unless the process id in them has passed
/// to another program of the same account, which is common where a restart begins counting anew (containers).
fn forget_dead_server(home: &Home) {
    let alive = pid_in_file(home)
        .and_then(Pid::from_raw)
        .is_some_and(|pid| is_server_of(home, pid));
    if !alive {
        // A socket's lock has the same name with `.lock` at its end.
        let mut socket_lock = home.socket().into_os_string();
        socket_lock.push(".lock");
        for mark in [home.cluster().join("postmaster.pid"), socket_lock.into()] {
            let _ = std::fs::remove_file(mark);
        }
    }
}

fn pid_in_file(home: &Home) -> Option<i32> {
    let text = std::fs::read_to_string(home.cluster().join("postmaster.pid")).ok()?;
    text.lines()
        .next()?
        .trim()
        .parse()
        .ok()
        .filter(|pid| *pid > 0)
}

/// The process id of a server that lives and is ours.
fn pid_of_cluster(home: &Home) -> Option<i32> {
    pid_in_file(home).filter(|pid| Pid::from_raw(*pid).is_some_and(|pid| is_server_of(home, pid)))
}

/// Whether this process is the server of our cluster. Where there is no /proc, whether it exists.
fn is_server_of(home: &Home, pid: Pid) -> bool {
    use std::os::unix::ffi::OsStrExt;
    if !Path::new("/proc/self/cmdline").exists() {
        return test_kill_process(pid).is_ok();
    }
    let Ok(command) = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_pid())) else {
        return false;
    };
    let cluster = home.cluster();
    command
        .split(|byte| *byte == 0)
        .any(|argument| argument == cluster.as_os_str().as_bytes())
}

/// Opened for appending, with its length so far.
fn open_log(home: &Home) -> Result<(std::fs::File, u64), PostgresError> {
    use std::os::unix::fs::OpenOptionsExt;
    let path = home.log();
    if path.metadata().is_ok_and(|meta| meta.len() > LOG_BYTES_MAX) {
        let _ = std::fs::rename(&path, path.with_extension("log.1"));
    }
    let mut options = std::fs::OpenOptions::new();
    let opened = options.create(true).append(true).mode(0o640).open(&path);
    let opened = opened.and_then(|file| Ok((file.metadata()?.len(), file)));
    let (length, file) = opened.map_err(io(format!("{} cannot be opened", path.display())))?;
    Ok((file, length))
}

fn read_from(path: &Path, start: u64) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = std::fs::File::open(path)?;
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_default()
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}
