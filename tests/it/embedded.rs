//! The private PostgreSQL (O-1), with real servers: starts, crashes of every party, several processes, refusals.

use reconvene::postgres::{Embedded, PostgresError};
use rustix::process::{Pid, Signal, geteuid, kill_process, test_kill_process};
use sqlx::{Connection, PgConnection, Row};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A data directory that is removed, with a server that may still run in it, when the test ends however it ends.
struct Home(PathBuf);

impl Home {
    fn new() -> Home {
        Home(std::env::temp_dir().join(format!("rc-{}", uuid::Uuid::now_v7().simple())))
    }

    async fn open(&self) -> Result<Embedded, PostgresError> {
        Embedded::open(&self.0, None).await
    }

    fn pid_file(&self) -> PathBuf {
        self.0.join("cluster/postmaster.pid")
    }

    fn server(&self) -> Option<Pid> {
        let text = std::fs::read_to_string(self.pid_file()).ok()?;
        Pid::from_raw(text.lines().next()?.trim().parse().ok()?)
    }

    fn running_server(&self) -> Pid {
        self.server().expect("a server runs")
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Some(pid) = self.server() {
            let command = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_pid()));
            let ours = self.0.to_string_lossy().into_owned();
            if command.is_ok_and(|command| String::from_utf8_lossy(&command).contains(&ours)) {
                let _ = kill_process(pid, Signal::QUIT);
            }
        }
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn connect(embedded: &Embedded) -> PgConnection {
    PgConnection::connect_with(&embedded.options())
        .await
        .expect("the server answers")
}

async fn count_rows(embedded: &Embedded) -> i64 {
    let mut connection = connect(embedded).await;
    let row = sqlx::query("select count(*) from kept")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    row.get(0)
}

async fn keep_a_row(embedded: &Embedded) {
    let mut connection = connect(embedded).await;
    for statement in [
        "create table if not exists kept (n integer not null)",
        "insert into kept values (1)",
    ] {
        sqlx::query(statement)
            .execute(&mut connection)
            .await
            .unwrap();
    }
}

/// Waits until `done`, for at most 20 s.
async fn wait_until(what: &str, done: impl Fn() -> bool) {
    let since = Instant::now();
    while !done() {
        assert!(
            since.elapsed() < Duration::from_secs(20),
            "waited in vain until {what}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn is_gone(pid: Pid) -> bool {
    // A child that was not waited for yet is gone all the same.
    test_kill_process(pid).is_err()
        || std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_pid())).is_ok_and(|c| c.is_empty())
}

/// Another process that attaches to the home and says so; it detaches when its standard input closes.
struct OtherProcess(Child);

impl OtherProcess {
    fn start(home: &Home) -> OtherProcess {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "embedded::other_process",
                "--exact",
                "--ignored",
                "--nocapture",
            ])
            .env("OTHER_PROCESS_DATA_DIR", &home.0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        OtherProcess(child)
    }

    fn wait_until_attached(&mut self) {
        let lines = BufReader::new(self.0.stdout.as_mut().unwrap()).lines();
        let attached = lines
            .map_while(Result::ok)
            .any(|line| line.ends_with("attached"));
        assert!(attached, "the other process could not attach");
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn detach(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

#[tokio::test]
#[ignore = "not a test: the body of OtherProcess"]
async fn other_process() {
    let Some(dir) = std::env::var_os("OTHER_PROCESS_DATA_DIR") else {
        return;
    };
    let embedded = Embedded::open(Path::new(&dir), None).await.unwrap();
    println!("attached");
    tokio::task::spawn_blocking(|| std::io::stdin().lines().count())
        .await
        .unwrap();
    embedded.close().await.unwrap();
}

#[tokio::test]
async fn starts_is_adopted_after_a_crash_and_stops_with_the_last_one() {
    // O-1
    let home = Home::new();
    let first = home.open().await.unwrap();
    let server = home.running_server();
    keep_a_row(&first).await;

    let mut connection = connect(&first).await;
    for (setting, value) in [
        ("fsync", "on"),
        ("synchronous_commit", "on"),
        ("full_page_writes", "on"),
        ("listen_addresses", ""),
        ("max_connections", "200"),
        ("server_encoding", "UTF8"),
    ] {
        let row = sqlx::query("select current_setting($1)").bind(setting);
        let shown: String = row.fetch_one(&mut connection).await.unwrap().get(0);
        assert_eq!(shown, value, "{setting}");
    }
    let by_url = PgConnection::connect(secrecy::ExposeSecret::expose_secret(&first.url())).await;
    by_url.unwrap().close().await.unwrap();
    drop(connection);

    let mode = |name: &str| home.0.join(name).metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(
        [mode("superuser.pw"), mode("cluster"), mode("run")],
        [0o600, 0o700, 0o700]
    );
    if geteuid().is_root() {
        assert_ne!(home.0.join("cluster").metadata().unwrap().uid(), 0);
    }

    // What a crash does: the lock goes, the server stays.
    drop(first);
    let second = home.open().await.unwrap();
    assert_eq!(home.running_server(), server, "adopted, not started again");
    assert!(!second.ensure_running().await.unwrap());

    let third = home.open().await.unwrap();
    second.close().await.unwrap();
    assert_eq!(
        count_rows(&third).await,
        1,
        "the server runs on for the one who stays"
    );
    third.close().await.unwrap();
    assert!(
        is_gone(server) && !home.pid_file().exists(),
        "the last one out stops it"
    );

    // A full restart keeps the data; without the password there is no way in, and a message that says so.
    let again = home.open().await.unwrap();
    assert_eq!(count_rows(&again).await, 1);
    again.close().await.unwrap();
    std::fs::remove_file(home.0.join("superuser.pw")).unwrap();
    let err = home.open().await.unwrap_err();
    assert!(
        matches!(err, PostgresError::PasswordMissing { .. }),
        "{err}"
    );
}

#[tokio::test]
async fn a_killed_process_takes_nothing_with_it() {
    // O-1
    let home = Home::new();
    let mut starter = OtherProcess::start(&home);
    starter.wait_until_attached();
    let ours = home.open().await.unwrap();
    let server = home.running_server();

    starter.kill();
    keep_a_row(&ours).await;
    assert!(!ours.ensure_running().await.unwrap());

    // One that leaves properly takes nothing with it either.
    let mut guest = OtherProcess::start(&home);
    guest.wait_until_attached();
    guest.detach();
    assert_eq!(count_rows(&ours).await, 1);

    // And when we leave first, the guest who stays stops the server that it never started.
    let mut guest = OtherProcess::start(&home);
    guest.wait_until_attached();
    ours.close().await.unwrap();
    assert_eq!(home.running_server(), server);
    guest.detach();
    wait_until("the server is gone", || is_gone(server)).await;

    // All killed at once: the next one finds the server and looks after it.
    let mut killed = OtherProcess::start(&home);
    killed.wait_until_attached();
    let server = home.running_server();
    killed.kill();
    let next = home.open().await.unwrap();
    assert_eq!(
        (home.running_server(), count_rows(&next).await),
        (server, 1)
    );
    next.close().await.unwrap();
    assert!(is_gone(server));
}

#[tokio::test]
async fn a_killed_server_is_started_again_by_those_who_use_it() {
    // O-1
    let home = Home::new();
    let (first, second) = (home.open().await.unwrap(), home.open().await.unwrap());
    keep_a_row(&first).await;
    // A connection in use: its backend outlives the server for a moment.
    let _busy = connect(&first).await;
    let server = home.running_server();
    kill_process(server, Signal::KILL).unwrap();
    let socket = home.0.join("run/.s.PGSQL.5432");
    wait_until("nobody listens", || UnixStream::connect(&socket).is_err()).await;

    let (one, other) = tokio::join!(first.ensure_running(), second.ensure_running());
    assert!(
        one.unwrap() != other.unwrap(),
        "exactly one of them starts it"
    );
    assert_ne!(home.running_server(), server);
    assert_eq!(count_rows(&second).await, 1, "what was committed is there");
    first.close().await.unwrap();
    second.close().await.unwrap();

    // A pid file that names a living process of the same account, as after a restart of a container.
    let owner = home.0.join("cluster").metadata().unwrap();
    let mut bystander = Command::new("sleep");
    bystander.arg("60");
    if geteuid().is_root() {
        bystander.gid(owner.gid()).uid(owner.uid());
    }
    let mut bystander = bystander.spawn().unwrap();
    let stale = format!(
        "{}\n{}\n1700000000\n5432\n{}\n\n",
        bystander.id(),
        home.0.join("cluster").display(),
        socket.display()
    );
    for mark in [home.pid_file(), home.0.join("run/.s.PGSQL.5432.lock")] {
        std::fs::write(mark, &stale).unwrap();
    }
    let after = home.open().await.unwrap();
    assert_eq!(count_rows(&after).await, 1);
    after.close().await.unwrap();
    assert!(
        bystander.try_wait().unwrap().is_none(),
        "the bystander was not touched"
    );
    bystander.kill().unwrap();
    bystander.wait().unwrap();
}

#[tokio::test]
async fn those_who_start_at_the_same_instant_share_one_server() {
    // O-1
    let home = Home::new();
    // What a killed initdb leaves.
    let unfinished = home.0.join("unfinished-cluster-1/base");
    std::fs::create_dir_all(&unfinished).unwrap();
    std::fs::set_permissions(&home.0, std::fs::Permissions::from_mode(0o755)).unwrap();

    let mut others = [OtherProcess::start(&home), OtherProcess::start(&home)];
    let (one, two) = tokio::join!(home.open(), home.open());
    let (one, two) = (one.unwrap(), two.unwrap());
    others
        .iter_mut()
        .for_each(OtherProcess::wait_until_attached);
    let server = home.running_server();
    keep_a_row(&one).await;
    assert_eq!(count_rows(&two).await, 1);
    assert!(!unfinished.exists());

    // All leave at the same instant.
    let detached = tokio::task::spawn_blocking(|| others.map(OtherProcess::detach));
    let (one, two, detached) = tokio::join!(one.close(), two.close(), detached);
    one.and(two).unwrap();
    detached.unwrap();
    assert!(is_gone(server), "somebody was the last one");
}

#[tokio::test]
async fn refusals_say_what_to_do() {
    // O-1
    let home = Home::new();
    let empty = home.0.join("nothing here");
    std::fs::create_dir_all(&empty).unwrap();
    std::fs::set_permissions(&home.0, std::fs::Permissions::from_mode(0o755)).unwrap();
    let err = Embedded::open(&home.0, Some(&empty)).await.unwrap_err();
    assert!(
        matches!(err, PostgresError::ProgramsMissing { .. }),
        "{err}"
    );
    assert!(
        err.to_string().contains("apt-get install postgresql"),
        "{err}"
    );

    let long = home.0.join("x".repeat(100));
    let err = Embedded::open(&long, None).await.unwrap_err();
    assert!(
        matches!(err, PostgresError::SocketPathTooLong { limit: 107, .. }),
        "{err}"
    );
    assert!(!long.exists(), "nothing is made that can not be used");

    std::fs::create_dir(home.0.join("cluster")).unwrap();
    std::fs::write(home.0.join("cluster/PG_VERSION"), "9\n").unwrap();
    let err = home.open().await.unwrap_err();
    assert!(
        matches!(err, PostgresError::WrongVersion { wanted: 9, .. }),
        "{err}"
    );
    std::fs::remove_dir_all(home.0.join("cluster")).unwrap();

    if geteuid().is_root() {
        let closed = home.0.join("root");
        std::fs::create_dir(&closed).unwrap();
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
        let err = Embedded::open(&closed.join("data"), None)
            .await
            .unwrap_err();
        assert!(
            matches!(&err, PostgresError::NotReachable { dir, .. } if *dir == closed),
            "{err}"
        );
        assert!(
            err.to_string().contains("DATA_DIR=/var/lib/reconvene"),
            "{err}"
        );
        assert!(
            !closed.join("data").exists(),
            "nothing is made that can not be used"
        );
    }
}

#[test]
fn a_kept_secret_stays_the_same() {
    let home = Home::new();
    let secrets: Vec<String> = std::thread::scope(|scope| {
        let ask = || {
            let secret = Embedded::secret(&home.0, "jwt.secret").unwrap();
            secrecy::ExposeSecret::expose_secret(&secret).to_owned()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(secrets[0].len() == 64 && secrets[0].bytes().all(|b| b.is_ascii_hexdigit()));
    assert!(secrets.iter().all(|secret| *secret == secrets[0]));
    let mode = home
        .0
        .join("jwt.secret")
        .metadata()
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);

    std::fs::write(home.0.join("jwt.secret"), "short").unwrap();
    let err = Embedded::secret(&home.0, "jwt.secret").unwrap_err();
    assert!(err.to_string().contains("delete it"), "{err}");
}
