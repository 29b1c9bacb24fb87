//! While nobody answers at the database's address, requests are refused at once: the pool would have each of them
//! wait for `database.acquire_timeout_seconds`, which is right when it is busy and of no use when there is nothing to wait
//! for.
//!
//! The bus tells the difference early, since its own connection breaks with the server. It may be down for another reason,
//! so it is only the cause for a question: can a connection be made? The first request asks, those beside it take its
//! answer, and while the bus listens nobody asks.

use super::App;
use super::error::Error;
use crate::bus::Bus;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection, PgPool};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

/// So long an answer is good for others.
const FRESH: Duration = Duration::from_millis(250);
/// A server that needs longer to take a connection is of no use to a request.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);

pub struct Outage {
    bus: Arc<Bus>,
    options: Arc<PgConnectOptions>,
    /// Whether the database answered, and when that was asked.
    last: Mutex<Option<(Instant, bool)>>,
}

impl Outage {
    pub fn new(bus: Arc<Bus>, pool: &PgPool) -> Self {
        Self {
            bus,
            options: pool.connect_options(),
            last: Mutex::default(),
        }
    }

    /// Whether it is known that no request can reach the database now.
    pub async fn is_known(&self) -> bool {
        if self.bus.is_listening() {
            return false;
        }
        let mut last = self.last.lock().await;
        if let Some((asked, answers)) = *last
            && asked.elapsed() < FRESH
        {
            return !answers;
        }
        let answers = match timeout(CONNECT_WITHIN, self.options.connect()).await {
            Ok(Ok(connection)) => {
                let _ = connection.close().await;
                true
            }
            // It is there and refuses one more: the pool may have what it needs.
            Ok(Err(sqlx::Error::Database(error))) => error.code().as_deref() == Some("53300"),
            Ok(Err(_)) | Err(_) => false,
        };
        *last = Some((Instant::now(), answers));
        !answers
    }
}

/// Answers in place of every route that needs the database.
pub async fn refuse_at_once(State(app): State<App>, request: Request, next: Next) -> Response {
    match app.outage.is_known().await {
        true => Error::DatabaseUnavailable.into_response(),
        false => next.run(request).await,
    }
}
