//! Starts the process that interprets code, answers what it calls, and ends it at a limit: time, memory, bytes said.
//!
//! Time is what the code itself takes. While the host answers a call the clock stands, since that call has limits of its
//! own; so the calls are counted.

use super::{Answer, Said, Start};
use crate::config;
use serde_json::{Map, Value};
use std::{
    io,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
};

/// Within it the interpreter itself ends the code, and says where.
const GRACE: Duration = Duration::from_secs(1);
/// Of what is said around the output, and of escapes in it.
const LINE_BYTES_MORE: usize = 10_000_000;
/// This very program, also after its file was replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";

#[derive(Clone, Debug)]
pub struct Limits {
    pub timeout: Duration,
    pub memory_bytes: u64,
    pub output_bytes: usize,
    pub calls_max: u32,
}

/// Runs code for all tools of a process. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Sandbox {
    program: PathBuf,
    limits: Limits,
}

/// Code that runs. Dropping it ends it.
pub struct Running {
    child: Child,
    input: ChildStdin,
    said: BufReader<ChildStdout>,
    limits: Limits,
    used: Duration,
    calls: u32,
}

/// Until where the code has come.
pub enum Step {
    /// It waits for the answer.
    Call(Called),
    Returned {
        result: Value,
        output: String,
    },
    /// Why it has ended, for its author.
    Failed {
        error: String,
        output: String,
    },
}

pub struct Called {
    pub function: String,
    pub arguments: Map<String, Value>,
}

impl Sandbox {
    pub fn from_config(config: &config::RunCode) -> Self {
        let own = || Path::new(OWN_PROGRAM).to_owned();
        Self {
            program: config.program.clone().unwrap_or_else(own),
            limits: Limits {
                timeout: Duration::from_secs(config.timeout_seconds.into()),
                memory_bytes: u64::from(config.max_memory_mb) << 20,
                output_bytes: config.max_output_bytes as usize,
                calls_max: config.max_calls,
            },
        }
    }

    pub async fn start(&self, code: &str, functions: Vec<String>) -> io::Result<Running> {
        let mut child = Command::new(&self.program)
            .arg("sandbox")
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let (Some(input), Some(said)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("it has no pipes"));
        };
        let mut running = Running {
            child,
            input,
            said: BufReader::new(said),
            limits: self.limits.clone(),
            used: Duration::ZERO,
            calls: 0,
        };
        let start = Start {
            code: code.to_owned(),
            functions,
            timeout_ms: self.limits.timeout.as_millis() as u64,
            memory_bytes: self.limits.memory_bytes,
            output_bytes: self.limits.output_bytes,
        };
        running.write(&serde_json::to_vec(&start)?).await;
        Ok(running)
    }
}

impl Running {
    /// Lets the code run until it needs something or has ended.
    pub async fn next(&mut self) -> Step {
        let begun = Instant::now();
        let left = (self.limits.timeout + GRACE).saturating_sub(self.used);
        let line = tokio::time::timeout(left, self.line()).await;
        self.used += begun.elapsed();
        let failed = |error: String| Step::Failed {
            error,
            output: String::new(),
        };
        let said = match line {
            Err(_) => return failed(self.too_long()),
            Ok(Err(error)) => return failed(format!("The code was lost: {error}.")),
            Ok(Ok(None)) => return failed(self.died().await),
            Ok(Ok(Some(line))) => serde_json::from_slice(&line),
        };
        match said {
            Ok(Said::Call { .. }) if self.calls == self.limits.calls_max => {
                let most = self.limits.calls_max;
                failed(format!(
                    "The code made more than {most} calls of tools, and was ended."
                ))
            }
            Ok(Said::Call {
                function,
                arguments,
            }) => {
                self.calls += 1;
                Step::Call(Called {
                    function,
                    arguments,
                })
            }
            Ok(Said::Returned { result, output }) => Step::Returned { result, output },
            Ok(Said::Raised { error, output }) => Step::Failed { error, output },
            Err(error) => failed(format!("The code can not be understood: {error}.")),
        }
    }

    /// Answers the call that `next` has returned.
    pub async fn answer(&mut self, answer: &Answer) {
        if let Ok(line) = serde_json::to_vec(answer) {
            self.write(&line).await;
        }
    }

    /// Whether it is heard shows in what comes next.
    async fn write(&mut self, line: &[u8]) {
        let writing = async {
            self.input.write_all(line).await?;
            self.input.write_all(b"\n").await?;
            self.input.flush().await
        };
        let _ = tokio::time::timeout(self.limits.timeout + GRACE, writing).await;
    }

    /// `None`: the process has nothing more to say.
    async fn line(&mut self) -> io::Result<Option<Vec<u8>>> {
        let most = self.limits.output_bytes + LINE_BYTES_MORE;
        let mut line = Vec::new();
        let mut limited = (&mut self.said).take(most as u64);
        limited.read_until(b'\n', &mut line).await?;
        match line.last() {
            Some(b'\n') => Ok(Some(line)),
            Some(_) if line.len() == most => Err(io::Error::other(format!(
                "its result or a call has more than {most} bytes"
            ))),
            Some(_) | None => Ok(None),
        }
    }

    fn too_long(&self) -> String {
        let seconds = self.limits.timeout.as_secs();
        format!("The code ran for more than {seconds} s, and was ended.")
    }

    /// Why it said no last word.
    async fn died(&mut self) -> String {
        let waited = tokio::time::timeout(GRACE, self.child.wait()).await;
        const KILLED: i32 = 9;
        const CPU: i32 = 24;
        const ABORTED: i32 = 6;
        let signal = match waited {
            Ok(Ok(status)) => ExitStatus::signal(&status),
            Ok(Err(_)) | Err(_) => None,
        };
        match signal {
            // An allocation that fails ends the process so.
            Some(ABORTED) => {
                let most = self.limits.memory_bytes >> 20;
                format!("The code needed more than {most} MB of memory, and was ended.")
            }
            Some(CPU | KILLED) => self.too_long(),
            Some(_) | None => "The code was ended by a fault of the sandbox.".to_owned(),
        }
    }
}
