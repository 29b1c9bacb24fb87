//! `GET /api/tasks/{id}/stream`: a task's feed as Server-Sent Events, from where the client left off (T-22).
//!
//! The table is the truth, the hub only says when to look: the stream subscribes first and reads afterwards, always from
//! the last `seq` it has sent, so nothing falls between replay and live and nothing comes twice (H-42). A poll finds what
//! no hint announced. Model text is passed on as `delta` events without an id; whoever misses some gets the whole message.
//! Between reads a stream holds no database connection.

use super::App;
use super::auth::Caller;
use super::error::Error;
use super::extract::{FromQuery, Path, Query, QueryReader};
use super::feed::{self, FeedContent, FeedItem};
use crate::domain::ids::TaskId;
use crate::runtime::{Causes, Change, Watch};
use crate::store::feeds;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use chrono::Utc;
use serde::Serialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::Instant;
use tracing::{error, warn};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const COMMENT_EVERY: Duration = Duration::from_secs(15);
const POLL_EVERY: Duration = Duration::from_secs(2);
const PAGE: i64 = 200;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(stream_task))
}

#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[allow(dead_code, reason = "the document's side of `StreamQuery`")]
struct StreamParams {
    /// As Last-Event-ID, which has precedence: only items with a greater `seq`.
    after: Option<i64>,
}

struct StreamQuery {
    after: Option<String>,
}

impl FromQuery for StreamQuery {
    fn from_query(query: &mut QueryReader) -> Self {
        Self {
            after: query.optional("after", "a seq"),
        }
    }
}

/// A piece of the answer that the model is writing.
#[derive(Serialize, ToSchema)]
struct Delta<'a> {
    turn: i32,
    text: &'a str,
    /// The model was asked again: what came before in this turn is void.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    reset: bool,
}

/// The client's Last-Event-ID is not a place in this feed: it gets the whole feed, and forgets what it has.
#[derive(Serialize, ToSchema)]
struct Reset {
    reason: &'static str,
}

/// Follow a task
///
/// Server-Sent Events. A feed item has its `seq` as event id, its `kind` as event name and itself as JSON data; a client
/// that reconnects with `Last-Event-ID` gets every later item once, in order. `delta` events (`{"turn", "text"}`) carry
/// model text as it is written and are not repeated; the `assistant_message` that follows has the whole text. A `delta`
/// with `"reset": true` says that the model was asked again: drop the text of this turn so far. The event `reset`
/// says that the Last-Event-ID was not a place in this feed and that the whole feed follows. The stream ends when the
/// token expires or the session ends, the task is deleted or the server stops: reconnect.
#[utoipa::path(
    get,
    path = "/api/tasks/{id}/stream",
    tag = "tasks",
    security(("bearer" = [])),
    params(
        ("id" = TaskId, Path),
        ("Last-Event-ID" = Option<String>, Header, description = "The id of the last event received"),
        StreamParams,
    ),
    responses((status = 200, content_type = "text/event-stream", body = String))
)]
async fn stream_task(
    State(app): State<App>,
    caller: Caller,
    Path(task): Path<TaskId>,
    Query(query): Query<StreamQuery>,
    headers: HeaderMap,
) -> Result<Response, Error> {
    if app.shutdown.is_cancelled() {
        return Err(Error::ShuttingDown);
    }
    let watch = app.hub.watch(task);
    let last_seq = feeds::last_seq(&app.pool, caller.workspace, task)
        .await?
        .ok_or(Error::NotFound)?;
    let resume = match headers.get(HeaderName::from_static("last-event-id")) {
        Some(id) => Resume::from(id.to_str().unwrap_or("?"), last_seq),
        None => Resume::from(query.after.as_deref().unwrap_or(""), last_seq),
    };
    let follower = Follower::new(app, caller, task, watch, resume);
    let events = futures::stream::unfold(follower, async |mut follower| {
        let event = follower.next().await?;
        Some((Ok::<_, Infallible>(event), follower))
    });
    let stream = Sse::new(events).keep_alive(KeepAlive::new().interval(COMMENT_EVERY));
    // Some proxies hold back what they pass on until told not to.
    Ok(([("x-accel-buffering", "no")], stream).into_response())
}

/// Where a client wants to go on.
#[derive(Debug, PartialEq, Eq)]
enum Resume {
    After(i64),
    /// It named a place that this feed does not have.
    Reset,
}

impl Resume {
    fn from(id: &str, last_seq: i64) -> Self {
        let plain = !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit());
        match id.parse::<i64>() {
            Ok(seq) if plain && seq <= last_seq => Self::After(seq),
            _ if id.is_empty() => Self::After(0),
            _ => Self::Reset,
        }
    }
}

/// One client that follows one task.
struct Follower {
    app: App,
    caller: Caller,
    task: TaskId,
    watch: Watch,
    /// The last `seq` that has been queued for sending.
    after: i64,
    /// The newest turn whose message is in the feed: its deltas are stale.
    settled_turn: i32,
    queue: VecDeque<Event>,
    /// Whether the table is to be read before waiting.
    look: bool,
    next_poll: Instant,
}

impl Follower {
    fn new(app: App, caller: Caller, task: TaskId, watch: Watch, resume: Resume) -> Self {
        let mut queue = VecDeque::new();
        let after = match resume {
            Resume::After(seq) => seq,
            Resume::Reset => {
                let reset = Reset {
                    reason: "the Last-Event-ID is not in this feed; the whole feed follows",
                };
                queue.extend(Event::default().event("reset").json_data(reset).ok());
                0
            }
        };
        Self {
            app,
            caller,
            task,
            watch,
            after,
            settled_turn: -1,
            queue,
            look: true,
            next_poll: next_poll(),
        }
    }

    /// The next event; `None` ends the stream.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(event);
            }
            if self.is_over() {
                return None;
            }
            // However much there is to read.
            if Instant::now() >= self.next_poll {
                self.poll().await?;
            }
            if self.look {
                self.read().await?;
                continue;
            }
            tokio::select! {
                biased;
                () = self.app.shutdown.cancelled() => return None,
                change = self.watch.changed() => match change {
                    Change::Feed | Change::Lagged => self.look = true,
                    Change::Delta { turn, text } if turn > self.settled_turn => {
                        let delta = Delta { turn, text: &text, reset: text.is_empty() };
                        self.queue.extend(Event::default().event("delta").json_data(delta).ok());
                    }
                    Change::Delta { .. } => {}
                },
                () = tokio::time::sleep_until(self.next_poll) => {}
            }
        }
    }

    fn is_over(&self) -> bool {
        self.app.shutdown.is_cancelled() || Utc::now().timestamp() >= self.caller.expires_at
    }

    /// Queues what has come to the feed. A database that is away for a while does not end the stream.
    async fn read(&mut self) -> Option<()> {
        match feed::load(
            &self.app.pool,
            self.caller.workspace,
            self.task,
            self.after,
            PAGE,
        )
        .await
        {
            Ok(items) => {
                self.look = items.len() as i64 == PAGE;
                for item in items {
                    self.enqueue(item);
                }
            }
            Err(error) if error.is_unavailable() => {
                warn!(task.id = %self.task, error = %Causes(&error), "the stream of task {} can not read, trying again", self.task);
                self.look = false;
            }
            Err(error) => {
                error!(task.id = %self.task, error = %Causes(&error), "the stream of task {} broke off", self.task);
                return None;
            }
        }
        Some(())
    }

    fn enqueue(&mut self, item: FeedItem) {
        if let FeedContent::AssistantMessage { turn, .. } = &item.content {
            self.settled_turn = *turn;
        }
        self.after = item.seq;
        let event = Event::default()
            .id(item.seq.to_string())
            .event(item.content.kind())
            .json_data(&item);
        match event {
            Ok(event) => self.queue.push_back(event),
            Err(error) => {
                warn!(task.id = %self.task, "item {} can not be written as JSON: {error}", item.seq)
            }
        }
    }

    /// Finds what no hint has announced. `None` once the task has been deleted, or the caller would not be let in again.
    async fn poll(&mut self) -> Option<()> {
        self.next_poll = next_poll();
        let workspace = self.caller.workspace;
        let live = self
            .app
            .auth
            .is_live(&self.app.pool, &self.caller)
            .await
            .unwrap_or(true);
        let last_seq = feeds::last_seq(&self.app.pool, workspace, self.task).await;
        self.look |= matches!(last_seq, Ok(Some(seq)) if seq > self.after);
        (live && !matches!(last_seq, Ok(None))).then_some(())
    }
}

/// With jitter, so that many streams do not ask at the same moment.
fn next_poll() -> Instant {
    Instant::now() + POLL_EVERY.mul_f64(0.75 + fastrand::f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    // H-42: what is not a place in the feed is answered with a reset, never with silence.
    #[test]
    fn a_client_resumes_where_it_left_off_or_starts_again() {
        for (id, resume) in [
            ("", Resume::After(0)),
            ("0", Resume::After(0)),
            ("7", Resume::After(7)),
            ("10", Resume::After(10)),
            ("11", Resume::Reset),
            ("-1", Resume::Reset),
            ("+7", Resume::Reset),
            ("7.0", Resume::Reset),
            (" 7", Resume::Reset),
            ("abc", Resume::Reset),
            ("99999999999999999999999", Resume::Reset),
        ] {
            assert_eq!(Resume::from(id, 10), resume, "{id:?}");
        }
    }
}
