//! Logs go to standard error, as text for people or JSON for machines.

use crate::config::{Log, LogFormat};
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

pub fn start(log: &Log) {
    start_at(&log.level, log.format);
}

/// For commands whose answer is all that matters: nothing below a warning, unless another level was asked for.
pub fn start_quietly(log: &Log) {
    let level = if log.level == "info" {
        "warn"
    } else {
        &log.level
    };
    start_at(level, log.format);
}

fn start_at(level: &str, format: LogFormat) {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(level))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    // It can only fail when logging has been set up already, as tests do.
    let _ = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}
