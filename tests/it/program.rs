//! The real program as child processes of a test, and a client of its API. Settings go in through the environment only.

use crate::{
    engine::{check, rest},
    http::SECRET,
    stub_llm::StubLlm,
    support,
};
use futures::{Stream, StreamExt};
use reconvene::lifecycle::demo::{Demo, seed_demo};
use reqwest::{Method, StatusCode, header::HeaderMap};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sqlx::{ConnectOptions, PgPool, postgres::PgPoolOptions};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    pin::Pin,
    process::{ExitStatus, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    process::{Child, Command},
    sync::watch,
};

/// Longer than any wait of a healthy test, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(40);

/// A process of the real program. It dies with the test; its output is shown when the test fails.
pub struct Program {
    name: String,
    child: Child,
    output: Arc<Output>,
}

struct Output {
    lines: Mutex<Vec<String>>,
    grown: watch::Sender<()>,
}

impl Program {
    /// Runs `reconvene` with these settings and none from outside.
    pub fn run(args: &[&str], env: &BTreeMap<String, String>) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_reconvene"))
            .args(args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .envs(env)
            // No config.yaml of ours is to be found.
            .current_dir(std::env::temp_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let output = Arc::new(Output {
            lines: Mutex::default(),
            grown: watch::Sender::new(()),
        });
        tokio::spawn(output.clone().keep(child.stdout.take().unwrap()));
        tokio::spawn(output.clone().keep(child.stderr.take().unwrap()));
        Self {
            name: args.join(" "),
            child,
            output,
        }
    }

    /// Waits for a line with these words, and returns it.
    pub async fn says(&self, words: &str) -> String {
        let mut grown = self.output.grown.subscribe();
        let found = async {
            loop {
                let line = self.lines().into_iter().find(|line| line.contains(words));
                match line {
                    Some(line) => return line,
                    None => grown.changed().await.unwrap(),
                }
            }
        };
        match tokio::time::timeout(PATIENCE, found).await {
            Ok(line) => line,
            Err(_) => panic!("`{}` did not say {words:?}", self.name),
        }
    }

    /// Everything it has written so far, on either output.
    pub fn lines(&self) -> Vec<String> {
        self.output.lines.lock().unwrap().clone()
    }

    pub fn text(&self) -> String {
        self.lines().join("\n")
    }

    pub fn signal(&self, signal: Signal) {
        let pid = self.child.id().expect("the process has not ended");
        kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    }

    /// Waits for its end, whenever that comes.
    pub async fn exit(&mut self) -> ExitStatus {
        self.child.wait().await.unwrap()
    }

    /// `kill -9`, and waits until it is gone.
    pub async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }

    /// Waits for its end, and returns the exit code and all that it has written.
    pub async fn ended(&mut self) -> (i32, String) {
        let Ok(status) = tokio::time::timeout(PATIENCE, self.child.wait()).await else {
            panic!("`{}` does not end", self.name)
        };
        // What is left in the pipes.
        let mut grown = self.output.grown.subscribe();
        let closed =
            async { while Arc::strong_count(&self.output) > 1 && grown.changed().await.is_ok() {} };
        let _ = tokio::time::timeout(PATIENCE, closed).await;
        let code = status.unwrap().code().expect("no signal has killed it");
        (code, self.text())
    }

    /// Asks it to end and waits until it has, with exit code 0. Returns how long that took.
    pub async fn terminate(mut self) -> Duration {
        let since = Instant::now();
        self.signal(Signal::TERM);
        let (code, _) = self.ended().await;
        assert_eq!(code, 0, "`{}`", self.name);
        since.elapsed()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- `{}` wrote:\n{}\n---", self.name, self.text());
        }
    }
}

impl Output {
    async fn keep(self: Arc<Self>, from: impl AsyncRead + Unpin) {
        let mut lines = BufReader::new(from).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            self.lines.lock().unwrap().push(line);
            self.grown.send_replace(());
        }
        let grown = self.grown.clone();
        drop(self);
        grown.send_replace(());
    }
}

/// A data directory that is removed, with a server that may still run in it, when the test ends however it ends.
pub struct Home(pub PathBuf);

impl Home {
    pub fn new() -> Self {
        Self(std::env::temp_dir().join(format!("rc-{}", uuid::Uuid::now_v7().simple())))
    }

    /// The process id of the server, if it is there.
    pub fn server(&self) -> Option<Pid> {
        let text = std::fs::read_to_string(self.0.join("cluster/postmaster.pid")).ok()?;
        let pid = Pid::from_raw(text.lines().next()?.trim().parse().ok()?)?;
        let command = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_pid())).ok()?;
        let ours = self.0.to_string_lossy().into_owned();
        String::from_utf8_lossy(&command)
            .contains(&ours)
            .then_some(pid)
    }

    /// Whether there is a file or folder whose name begins so.
    pub fn holds(&self, beginning: &str) -> bool {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        entries
            .map(|entry| entry.file_name())
            .any(|name| name.to_string_lossy().starts_with(beginning))
    }

    /// How many processes work in it: a server with its children, or what makes one.
    pub fn processes(&self) -> usize {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        processes
            .filter_map(|process| std::fs::read_link(process.path().join("cwd")).ok())
            .filter(|folder| folder.starts_with(&self.0))
            .count()
    }

    /// `kill -9` of the server's first process; the others follow by themselves.
    pub fn kill_server(&self) {
        kill_process(self.server().expect("a server runs"), Signal::KILL).unwrap();
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Some(pid) = self.server() {
            let _ = kill_process(pid, Signal::QUIT);
        }
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A database with the demo workspace, a scripted model, and the settings that let processes use both.
pub struct Scene {
    pub pool: PgPool,
    pub demo: Demo,
    pub llm: StubLlm,
    pub env: BTreeMap<String, String>,
}

impl Scene {
    /// Polls come after 15 s at the earliest, so that only hints make a test quick.
    pub async fn new() -> Self {
        let options = support::fresh_database().await;
        let url = options.to_url_lossy().to_string();
        let pool = PgPoolOptions::new()
            .max_connections(4)
            .connect_with(options)
            .await
            .unwrap();
        Self::on(pool, &[("DATABASE_URL", &url)]).await
    }

    /// On a database that has the schema already.
    pub async fn on(pool: PgPool, env: &[(&str, &str)]) -> Self {
        let llm = StubLlm::start().await;
        let mut scene = Self {
            demo: seed_demo(&pool).await.unwrap(),
            pool,
            env: BTreeMap::new(),
            llm,
        };
        let base_url = scene.llm.base_url().to_owned();
        for (name, value) in [
            ("AUTH_JWT_SECRET", SECRET),
            ("LLM_BASE_URL", &base_url),
            ("LLM_MODEL", "stub"),
            ("LLM_PROVIDER", "openai"),
            ("LLM_RETRY_BASE_MS", "20"),
            ("ORCHESTRATOR_POLL_INTERVAL_MS", "30000"),
            ("SERVER_PORT", "0"),
            ("WORKER_POLL_INTERVAL_MS", "30000"),
        ]
        .iter()
        .chain(env)
        {
            scene.set(name, value);
        }
        scene
    }

    pub fn set(&mut self, name: &str, value: &str) {
        self.env.insert(name.to_owned(), value.to_owned());
    }

    /// Starts a process and waits until it serves and hears the others.
    pub async fn serve(&self, roles: &str) -> Program {
        let mut before = self.listeners().await;
        let program = Program::run(&["serve", "--roles", roles], &self.env);
        program.says("serving").await;
        let begun = Instant::now();
        while self.listeners().await <= before {
            // One that was killed may still have been among them.
            before = before.min(self.listeners().await);
            assert!(begun.elapsed() < PATIENCE, "`{}` is deaf", program.name);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        program
    }

    /// Processes that listen for hints on this database.
    async fn listeners(&self) -> i64 {
        self.number(
            "select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen %'",
        )
        .await
    }

    /// A client of the API that this process serves.
    pub async fn client(&self, api: &Program) -> Client {
        let mut token = Program::run(&["token", "--workspace", "demo"], &self.env);
        let (code, token) = token.ended().await;
        assert_eq!(code, 0, "{token}");
        Client::new(api, token.trim()).await
    }

    pub async fn number(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// Waits for a condition with a limit.
    pub async fn until(&self, what: &str, condition: impl AsyncFn() -> bool) {
        until(what, condition).await;
    }

    /// Waits until nothing is left to do, then makes the closing check of every case.
    pub async fn close(&self) {
        rest(&self.pool).await;
        check(&self.pool).await;
        assert_eq!(
            self.llm.refusals(),
            Vec::<String>::new(),
            "the strict provider refused"
        );
    }
}

/// Waits for a condition with a limit.
pub async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < PATIENCE, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Somebody with a token at the API of one process.
pub struct Client {
    http: reqwest::Client,
    base: String,
    token: String,
}

impl Client {
    pub async fn new(api: &Program, token: &str) -> Self {
        let line = api.says("Reconvene listens on ").await;
        let (_, base) = line.split_once("listens on ").unwrap();
        Self {
            http: reqwest::Client::new(),
            base: base.trim().to_owned(),
            token: token.to_owned(),
        }
    }

    pub async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
        headers: &[(&'static str, &str)],
    ) -> reqwest::Result<reqwest::Response> {
        let mut request = self
            .http
            .request(method, format!("{}{path}", self.base))
            .bearer_auth(&self.token);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        request.send().await
    }

    pub async fn try_get(&self, path: &str) -> (StatusCode, HeaderMap, Value) {
        let answer = self.send(Method::GET, path, None, &[]).await.unwrap();
        let (status, headers) = (answer.status(), answer.headers().clone());
        (status, headers, answer.json().await.unwrap())
    }

    pub async fn get(&self, path: &str) -> Value {
        let (status, _, body) = self.try_get(path).await;
        assert!(status.is_success(), "GET {path}: {status} {body}");
        body
    }

    pub async fn post(&self, path: &str, body: Value) -> Value {
        let answer = self.send(Method::POST, path, Some(body), &[]).await;
        let answer = answer.unwrap();
        let status = answer.status();
        let body: Value = answer.json().await.unwrap();
        assert!(status.is_success(), "POST {path}: {status} {body}");
        body
    }

    /// Sends a message to the default agent, and returns the id of the new task.
    pub async fn say(&self, text: &str) -> String {
        let receipt = self
            .post("/api/chat/message", serde_json::json!({ "message": text }))
            .await;
        receipt["task_id"].as_str().unwrap().to_owned()
    }

    pub async fn task(&self, task: &str) -> Value {
        self.get(&format!("/api/tasks/{task}")).await
    }

    /// Waits for the end of the task, and returns it.
    pub async fn end(&self, task: &str) -> Value {
        until("the task has ended", async || {
            let status = self.task(task).await["status"].clone();
            ["completed", "failed", "stopped"].contains(&status.as_str().unwrap())
        })
        .await;
        self.task(task).await
    }

    /// Follows a task, after the event with this id.
    pub async fn follow(&self, task: &str, last_event_id: Option<i64>) -> Events {
        let id = last_event_id.unwrap_or(0).to_string();
        let path = format!("/api/tasks/{task}/stream");
        let answer = self
            .send(Method::GET, &path, None, &[("last-event-id", &id)])
            .await
            .unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        Events::of(answer)
    }
}

/// The stream of a task, as a browser reads it.
pub struct Events {
    bytes: Pin<Box<dyn Stream<Item = reqwest::Result<bytes::Bytes>> + Send>>,
    text: String,
}

#[derive(Debug)]
pub struct Event {
    /// Of what is kept; model text has none.
    pub id: Option<i64>,
    pub name: String,
    pub data: Value,
}

impl Events {
    pub fn of(answer: reqwest::Response) -> Self {
        Self {
            bytes: Box::pin(answer.bytes_stream()),
            text: String::new(),
        }
    }

    /// The next event; `None` at the end of the stream, however it ends.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            while let Some((block, rest)) = self.text.split_once("\n\n") {
                let event = parse(block);
                self.text = rest.to_owned();
                if event.is_some() {
                    return event;
                }
            }
            let chunk = tokio::time::timeout(PATIENCE, self.bytes.next()).await;
            let chunk = chunk.expect("nothing came")?.ok()?;
            self.text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
    }
}

fn parse(block: &str) -> Option<Event> {
    let field = |name: &str| {
        block
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    };
    Some(Event {
        id: field("id").map(|id| id.parse().unwrap()),
        name: field("event")?.to_owned(),
        data: serde_json::from_str(field("data")?).unwrap(),
    })
}
