//! The service under test: the release binary in processes of its own, talked to over HTTP.

use crate::cluster::Cluster;
use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};
use uuid::Uuid;

const BINARY: &str = env!("CARGO_BIN_EXE_reconvene");
const SECRET: &str = "a secret of the benchmark, which guards nothing at all";

/// How the service is configured, beside what every run has.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `None`: all roles.
    pub roles: Option<&'static str>,
    /// An OpenAI-compatible provider; `None`: the offline model, which answers at once.
    pub model: Option<String>,
}

/// One process. Dropping it kills it.
pub struct Service {
    child: Child,
    address: String,
    token: String,
}

impl Service {
    pub async fn start(cluster: &Cluster, settings: &Settings) -> anyhow::Result<Self> {
        let port = std::net::TcpListener::bind("127.0.0.1:0")?
            .local_addr()?
            .port();
        let token = command(cluster)
            .args([
                "token",
                "--workspace",
                "demo",
                "--role",
                "admin",
                "--ttl",
                "8h",
            ])
            .output()
            .context("the binary can not be run")?;
        ensure!(
            token.status.success(),
            "no token: {}",
            String::from_utf8_lossy(&token.stderr)
        );
        let mut command = command(cluster);
        command
            .arg("serve")
            .stdout(Stdio::null())
            .env("SERVER_PORT", port.to_string());
        if let Some(roles) = settings.roles {
            command.args(["--roles", roles]);
        }
        if let Some(url) = &settings.model {
            command
                .env("LLM_PROVIDER", "openai")
                .env("LLM_MODEL", "stub")
                .env("LLM_BASE_URL", url);
        }
        let service = Self {
            child: command.spawn().context("the service can not be started")?,
            address: format!("127.0.0.1:{port}"),
            token: String::from_utf8(token.stdout)?.trim().to_owned(),
        };
        if settings.roles.is_none_or(|roles| roles.contains("api")) {
            service.until_ready().await?;
        }
        Ok(service)
    }

    async fn until_ready(&self) -> anyhow::Result<()> {
        let begun = Instant::now();
        loop {
            if let Ok(mut client) = self.connect().await
                && let Ok((200, _)) = client.send("GET", "/readyz", "").await
            {
                return Ok(());
            }
            ensure!(
                begun.elapsed() < Duration::from_secs(30),
                "the service did not become ready within 30 s"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn connect(&self) -> anyhow::Result<Client> {
        Client::connect(&self.address, &self.token).await
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Holds the process still, so that the floor has the machine and the tables to itself.
    pub fn pause(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)
    }

    pub fn go_on(&self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)
    }

    /// Asks it to end, and waits until it has.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.signal(Signal::TERM)?;
        let begun = Instant::now();
        while self.child.try_wait()?.is_none() {
            ensure!(
                begun.elapsed() < Duration::from_secs(30),
                "the service did not end within 30 s"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = Pid::from_raw(self.child.id() as i32).context("the process has no id")?;
        kill_process(pid, signal).context("the process can not be signalled")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(cluster: &Cluster) -> Command {
    let mut command = Command::new(BINARY);
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("DATA_DIR", &cluster.data_dir)
        .env("AUTH_JWT_SECRET", SECRET)
        .env("LOG_LEVEL", "warn")
        // A thousand children of one call are the measure, not a guard.
        .env("SPAWN_TASKS_MAX_CHILDREN_PER_CALL", "10000")
        .env("SPAWN_TASKS_MAX_TREE_SIZE", "1000000")
        .current_dir(&cluster.data_dir)
        .stdin(Stdio::null());
    command
}

/// One kept-alive HTTP/1.1 connection. Small on purpose: the load generator shares the machine with what it measures.
pub struct Client {
    stream: BufReader<TcpStream>,
    head: String,
    line: String,
}

impl Client {
    async fn connect(address: &str, token: &str) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::new(stream),
            head: format!(
                "Host: {address}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json"
            ),
            line: String::new(),
        })
    }

    /// Sends a request and reads the whole answer: status and body.
    pub async fn send(
        &mut self,
        method: &str,
        path: &str,
        body: &str,
    ) -> anyhow::Result<(u16, Vec<u8>)> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\n{}\r\nContent-Length: {}\r\n\r\n{body}",
            self.head,
            body.len()
        );
        self.stream.write_all(request.as_bytes()).await?;
        self.read_line().await?;
        let status = self
            .line
            .split(' ')
            .nth(1)
            .and_then(|code| code.parse().ok())
            .with_context(|| format!("not an HTTP answer: {:?}", self.line))?;
        let mut length = 0;
        loop {
            self.read_line().await?;
            let line = self.line.trim_end();
            if line.is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse()?;
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).await?;
        Ok((status, body))
    }

    async fn read_line(&mut self) -> anyhow::Result<()> {
        self.line.clear();
        match self.stream.read_line(&mut self.line).await? {
            0 => bail!("the service closed the connection"),
            _ => Ok(()),
        }
    }

    /// Posts a chat message as a new task of the default agent.
    pub async fn post(&mut self, text: &str) -> anyhow::Result<Uuid> {
        let body = json!({"message": text}).to_string();
        let (status, answer) = self.send("POST", "/api/chat/message", &body).await?;
        ensure!(
            status == 201,
            "POST /api/chat/message answered {status}: {}",
            String::from_utf8_lossy(&answer)
        );
        let answer: Value = serde_json::from_slice(&answer)?;
        let task = answer["task_id"].as_str().context("no task_id")?;
        Ok(task.parse()?)
    }
}
