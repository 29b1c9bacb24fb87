//! A model provider on 127.0.0.1 that follows a script, in the form in which it is asked: OpenAI chat completions,
//! Anthropic messages or Gemini's generateContent, streamed and not.
//!
//! It records every request, and as real providers do it refuses a conversation in which a call lacks its result or a
//! result its call (`strict`, on unless switched off). Stands alone, so that a benchmark can include it by path.
//!
//! ```ignore
//! let stub = StubLlm::start().await;
//! stub.script(|request| match request.turn() {
//!     0 if request.says("plan a trip") => Reply::call("delegate_tasks", json!({ "tasks": [] })),
//!     _ => Reply::text("done"),
//! });
//! // LLM_PROVIDER=openai LLM_MODEL=stub LLM_BASE_URL=stub.base_url()
//! ```

#![allow(dead_code, reason = "each of its users needs another part of it")]

#[path = "stub_llm/anthropic.rs"]
mod anthropic;
#[path = "stub_llm/gemini.rs"]
mod gemini;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, Response};
use axum::routing::post;
use futures::StreamExt;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;

const WAIT_MAX: Duration = Duration::from_secs(30);

pub struct StubLlm {
    shared: Arc<Shared>,
    base_url: String,
    server: tokio::task::JoinHandle<()>,
}

type Script = dyn Fn(&Recorded) -> Reply + Send + Sync;

struct Shared {
    script: Mutex<Arc<Script>>,
    strict: Mutex<Option<usize>>,
    is_forgetful: AtomicBool,
    requests: Mutex<Vec<Recorded>>,
    refusals: Mutex<Vec<String>>,
    arrived: watch::Sender<usize>,
    active: watch::Sender<usize>,
    aborted: AtomicUsize,
}

impl StubLlm {
    /// Answers "ok" until it is given a script.
    pub async fn start() -> Self {
        let shared = Arc::new(Shared {
            script: Mutex::new(Arc::new(|_| Reply::text("ok"))),
            strict: Mutex::new(Some(8 * 1024 * 1024)),
            is_forgetful: AtomicBool::new(false),
            requests: Mutex::default(),
            refusals: Mutex::default(),
            arrived: watch::Sender::new(0),
            active: watch::Sender::new(0),
            aborted: AtomicUsize::new(0),
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a free port");
        let address = listener.local_addr().expect("the address of the stub");
        let router = Router::new()
            .route("/v1/chat/completions", post(complete))
            .route("/v1/messages", post(complete))
            .route("/v1beta/models/{call}", post(complete))
            .layer(axum::extract::DefaultBodyLimit::disable())
            .with_state(shared.clone());
        let server = tokio::spawn(async move {
            axum::serve(listener, router)
                .await
                .expect("the stub serves until it is dropped");
        });
        Self {
            shared,
            base_url: format!("http://{address}/v1"),
            server,
        }
    }

    pub async fn answering(script: impl Fn(&Recorded) -> Reply + Send + Sync + 'static) -> Self {
        let stub = Self::start().await;
        stub.script(script);
        stub
    }

    /// For OpenAI's form.
    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// For the other forms.
    pub fn root(&self) -> &str {
        self.base_url.trim_end_matches("/v1")
    }

    /// Answers each request from now on, whatever task it belongs to: look at the conversation to tell.
    pub fn script(&self, script: impl Fn(&Recorded) -> Reply + Send + Sync + 'static) {
        *self.shared.script.lock().unwrap() = Arc::new(script);
    }

    /// Gives these replies in turn, and the last one for ever.
    pub fn replies(&self, replies: impl IntoIterator<Item = Reply>) {
        let replies: Vec<Reply> = replies.into_iter().collect();
        let next = AtomicUsize::new(0);
        self.script(move |_| {
            let at = next.fetch_add(1, Ordering::Relaxed).min(replies.len() - 1);
            replies[at].clone()
        });
    }

    /// Takes any conversation.
    pub fn lenient(&self) {
        *self.shared.strict.lock().unwrap() = None;
    }

    /// Counts requests from now on, but does not keep them.
    pub fn forgetful(&self) {
        self.shared.is_forgetful.store(true, Ordering::Relaxed);
    }

    /// Refuses requests of more bytes, with the provider's context error.
    pub fn limit_bytes(&self, bytes_max: usize) {
        *self.shared.strict.lock().unwrap() = Some(bytes_max);
    }

    /// All requests so far, refused ones included, in order of arrival.
    pub fn requests(&self) -> Vec<Recorded> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// Why requests were refused by the strict form. A story that went well has none.
    pub fn refusals(&self) -> Vec<String> {
        self.shared.refusals.lock().unwrap().clone()
    }

    /// Waits until `n` requests have come in all, and returns all that have.
    pub async fn wait_for_requests(&self, n: usize) -> Vec<Recorded> {
        let mut arrived = self.shared.arrived.subscribe();
        let waited = tokio::time::timeout(WAIT_MAX, arrived.wait_for(|count| *count >= n)).await;
        assert!(
            waited.is_ok(),
            "{} of {n} model requests came",
            self.requests().len()
        );
        self.requests()
    }

    /// How many requests have come in all.
    pub fn arrived(&self) -> usize {
        *self.shared.arrived.borrow()
    }

    /// Waits until no reply is being held or sent.
    pub async fn wait_until_idle(&self) {
        let mut active = self.shared.active.subscribe();
        let waited = tokio::time::timeout(WAIT_MAX, active.wait_for(|count| *count == 0)).await;
        assert!(waited.is_ok(), "a model reply is still being sent");
    }

    /// Requests whose client went away before the reply was complete.
    pub fn aborted(&self) -> usize {
        self.shared.aborted.load(Ordering::Relaxed)
    }
}

impl Drop for StubLlm {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// One request as it came.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// 0 for the first.
    pub number: usize,
    pub body: Value,
    /// The exact bytes of the body.
    pub raw: Bytes,
    pub headers: HeaderMap,
    /// Path and query.
    pub uri: String,
    pub at: Instant,
    form: Form,
    /// In OpenAI's form, whatever was asked in.
    messages: Vec<Value>,
    tools: Vec<String>,
}

/// In which form a provider is asked, and answers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    OpenAi,
    Anthropic,
    Gemini,
}

impl Recorded {
    fn new(number: usize, uri: String, headers: HeaderMap, raw: Bytes) -> Self {
        let body: Value = serde_json::from_slice(&raw).unwrap_or(Value::Null);
        let form = if uri.starts_with("/v1/messages") {
            Form::Anthropic
        } else if uri.starts_with("/v1beta/") {
            Form::Gemini
        } else {
            Form::OpenAi
        };
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let names = |tools: Vec<Value>, path: &str| {
            let name = |tool: &Value| tool.pointer(path)?.as_str().map(str::to_owned);
            tools.iter().filter_map(name).collect()
        };
        let (messages, tools) = match form {
            Form::OpenAi => (
                list(&body["messages"]),
                names(list(&body["tools"]), "/function/name"),
            ),
            Form::Anthropic => (
                anthropic::messages(&body),
                names(list(&body["tools"]), "/name"),
            ),
            Form::Gemini => (
                gemini::messages(&body),
                names(list(&body["tools"][0]["functionDeclarations"]), "/name"),
            ),
        };
        Self {
            number,
            body,
            raw,
            headers,
            uri,
            at: Instant::now(),
            form,
            messages,
            tools,
        }
    }

    /// The conversation in OpenAI's form, whatever form it came in.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    pub fn system(&self) -> &str {
        self.contents("system").next().unwrap_or_default()
    }

    pub fn first_user(&self) -> &str {
        self.contents("user").next().unwrap_or_default()
    }

    pub fn last_user(&self) -> &str {
        self.contents("user").last().unwrap_or_default()
    }

    /// How often the model has spoken before.
    pub fn turn(&self) -> usize {
        self.messages()
            .iter()
            .filter(|message| message["role"] == "assistant")
            .count()
    }

    /// Whether any user message holds the text.
    pub fn says(&self, text: &str) -> bool {
        self.contents("user").any(|content| content.contains(text))
    }

    pub fn offers(&self, tool: &str) -> bool {
        self.tools.iter().any(|one| one == tool)
    }

    /// The tool results of the whole conversation, in order, as (call id, text).
    pub fn results(&self) -> Vec<(&str, &str)> {
        self.messages()
            .iter()
            .filter(|message| message["role"] == "tool")
            .map(|message| {
                (
                    message["tool_call_id"].as_str().unwrap_or_default(),
                    message["content"].as_str().unwrap_or_default(),
                )
            })
            .collect()
    }

    fn contents<'a>(&'a self, role: &'a str) -> impl Iterator<Item = &'a str> {
        self.messages()
            .iter()
            .filter(move |message| message["role"] == role)
            .filter_map(|message| message["content"].as_str())
    }
}

/// Holds replies until it is opened; then for ever open.
#[derive(Clone, Debug)]
pub struct Gate(watch::Sender<bool>);

impl Gate {
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    pub fn open(&self) {
        self.0.send_replace(true);
    }

    async fn pass(&self) {
        let mut gate = self.0.subscribe();
        // The sender lives in `self`, so waiting can not fail.
        let _ = gate.wait_for(|open| *open).await;
    }
}

/// What the stub answers.
#[derive(Clone, Debug)]
pub struct Reply {
    content: Content,
    headers: Vec<(String, String)>,
    usage: (u32, u32, u32),
    gate: Option<Gate>,
    delay: Duration,
    pause: Duration,
    ending: Ending,
    is_plain: bool,
    is_bytewise: bool,
}

#[derive(Clone, Debug)]
enum Content {
    Answer {
        text: String,
        calls: Vec<(String, String, String)>,
        finish: Option<String>,
    },
    Raw {
        status: u16,
        kind: &'static str,
        chunks: Vec<Bytes>,
    },
}

#[derive(Clone, Debug)]
enum Ending {
    Clean,
    HangUp,
    Stall,
}

impl Reply {
    fn new(content: Content) -> Self {
        Self {
            content,
            headers: Vec::new(),
            usage: (10, 5, 0),
            gate: None,
            delay: Duration::ZERO,
            pause: Duration::ZERO,
            ending: Ending::Clean,
            is_plain: false,
            is_bytewise: false,
        }
    }

    pub fn text(text: impl Into<String>) -> Self {
        Self::new(Content::Answer {
            text: text.into(),
            calls: Vec::new(),
            finish: None,
        })
    }

    /// One call, with an id made from the tool's name.
    pub fn call(name: &str, arguments: Value) -> Self {
        Self::text("").and_call(&format!("call_{name}"), name, &arguments.to_string())
    }

    /// A further call of the same turn, with the exact text of its arguments.
    pub fn and_call(mut self, id: &str, name: &str, arguments: &str) -> Self {
        if let Content::Answer { calls, .. } = &mut self.content {
            calls.push((id.to_owned(), name.to_owned(), arguments.to_owned()));
        }
        self
    }

    /// Another finish reason than the usual one.
    pub fn finish(mut self, reason: &str) -> Self {
        if let Content::Answer { finish, .. } = &mut self.content {
            *finish = Some(reason.to_owned());
        }
        self
    }

    /// Input, output and cached tokens.
    pub fn usage(mut self, input: u32, output: u32, cached: u32) -> Self {
        self.usage = (input, output, cached);
        self
    }

    /// Any bytes as an event stream, cut as given.
    pub fn chunks<B: Into<Bytes>>(chunks: impl IntoIterator<Item = B>) -> Self {
        let chunks = chunks.into_iter().map(Into::into).collect();
        Self::new(Content::Raw {
            status: 200,
            kind: "text/event-stream",
            chunks,
        })
    }

    /// A stream of these events, without an end mark.
    pub fn events<D: ToString>(events: impl IntoIterator<Item = D>) -> Self {
        Self::chunks(
            events
                .into_iter()
                .map(|data| format!("data: {}\n\n", data.to_string())),
        )
    }

    /// Any JSON as the whole answer.
    pub fn json(body: &Value) -> Self {
        Self::status(200, &body.to_string())
    }

    pub fn status(status: u16, body: &str) -> Self {
        let chunks = vec![Bytes::copy_from_slice(body.as_bytes())];
        Self::new(Content::Raw {
            status,
            kind: "application/json",
            chunks,
        })
    }

    /// Closes the connection without an answer.
    pub fn hang_up() -> Self {
        Self::chunks::<Bytes>([]).then_hang_up()
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Answers in one piece although a stream was asked for.
    pub fn plain(mut self) -> Self {
        self.is_plain = true;
        self
    }

    /// Waits before the first byte until the gate is open.
    pub fn held_by(mut self, gate: &Gate) -> Self {
        self.gate = Some(gate.clone());
        self
    }

    pub fn after(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Waits before each piece of the body.
    pub fn every(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }

    /// Sends the body one byte at a time.
    pub fn byte_by_byte(mut self) -> Self {
        self.is_bytewise = true;
        self
    }

    /// Breaks the connection after the body instead of ending it.
    pub fn then_hang_up(mut self) -> Self {
        self.ending = Ending::HangUp;
        self
    }

    /// Sends nothing more after the body, but does not end it.
    pub fn then_stall(mut self) -> Self {
        self.ending = Ending::Stall;
        self
    }

    fn body(&self, request: &Recorded) -> (u16, &'static str, Vec<Bytes>) {
        let model = &request.body["model"];
        let is_stream = request.body["stream"] == true;
        let (text, calls, finish) = match &self.content {
            Content::Raw {
                status,
                kind,
                chunks,
            } => return (*status, kind, chunks.clone()),
            Content::Answer {
                text,
                calls,
                finish,
            } => (text, calls, finish.as_deref()),
        };
        let answer = Said {
            text,
            calls,
            finish,
            usage: self.usage,
            is_plain: self.is_plain,
        };
        match request.form {
            Form::OpenAi => {}
            Form::Anthropic => return anthropic::body(request, &answer),
            Form::Gemini => return gemini::body(&answer),
        }
        let usual = if calls.is_empty() {
            "stop"
        } else {
            "tool_calls"
        };
        let finish = finish.unwrap_or(usual);
        let (input, output, cached) = self.usage;
        let usage = json!({
            "prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output,
            "prompt_tokens_details": { "cached_tokens": cached },
        });
        if !is_stream || self.is_plain {
            let calls: Vec<_> = calls.iter().map(|(id, name, arguments)| json!({
                "id": id, "type": "function", "function": { "name": name, "arguments": arguments },
            })).collect();
            let mut message = json!({ "role": "assistant", "content": text });
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            let body = json!({
                "id": "chatcmpl-stub", "object": "chat.completion", "created": 0, "model": model,
                "choices": [{ "index": 0, "message": message, "finish_reason": finish }], "usage": usage,
            });
            return (200, "application/json", vec![body.to_string().into()]);
        }
        let chunk = |choices: Value, usage: &Value| {
            let chunk = json!({
                "id": "chatcmpl-stub", "object": "chat.completion.chunk", "created": 0, "model": model,
                "choices": choices, "usage": usage,
            });
            Bytes::from(format!("data: {chunk}\n\n"))
        };
        let delta = |delta: Value| {
            chunk(
                json!([{ "index": 0, "delta": delta, "finish_reason": null }]),
                &Value::Null,
            )
        };
        let mut chunks = vec![delta(json!({ "role": "assistant", "content": "" }))];
        for piece in halves(text) {
            chunks.push(delta(json!({ "content": piece })));
        }
        for (index, (id, name, arguments)) in calls.iter().enumerate() {
            let named = json!({ "index": index, "id": id, "type": "function", "function": { "name": name, "arguments": "" } });
            chunks.push(delta(json!({ "tool_calls": [named] })));
            for piece in halves(arguments) {
                let piece = json!({ "index": index, "function": { "arguments": piece } });
                chunks.push(delta(json!({ "tool_calls": [piece] })));
            }
        }
        let end = json!([{ "index": 0, "delta": {}, "finish_reason": finish }]);
        chunks.push(chunk(end, &Value::Null));
        chunks.push(chunk(json!([]), &usage));
        chunks.push(Bytes::from_static(b"data: [DONE]\n\n"));
        (200, "text/event-stream", chunks)
    }
}

/// What a reply says, for the forms beside OpenAI's.
struct Said<'a> {
    text: &'a str,
    /// Id, name and arguments.
    calls: &'a [(String, String, String)],
    finish: Option<&'a str>,
    usage: (u32, u32, u32),
    is_plain: bool,
}

fn halves(text: &str) -> impl Iterator<Item = &str> {
    let (first, second) = text.split_at(text.floor_char_boundary(text.len() / 2));
    [first, second]
        .into_iter()
        .filter(|piece| !piece.is_empty())
}

/// Counts a reply as aborted unless it was sent to its end.
struct Active {
    shared: Arc<Shared>,
    is_sent: bool,
}

impl Active {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.active.send_modify(|count| *count += 1);
        Self {
            shared: shared.clone(),
            is_sent: false,
        }
    }

    fn sent(&mut self) {
        self.is_sent = true;
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        if !self.is_sent {
            self.shared.aborted.fetch_add(1, Ordering::Relaxed);
        }
        self.shared.active.send_modify(|count| *count -= 1);
    }
}

async fn complete(
    State(shared): State<Arc<Shared>>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    raw: Bytes,
) -> Response<Body> {
    let mut active = Active::new(&shared);
    let recorded = {
        let mut requests = shared.requests.lock().unwrap();
        let recorded = Recorded::new(requests.len(), uri.to_string(), headers, raw);
        if !shared.is_forgetful.load(Ordering::Relaxed) {
            requests.push(recorded.clone());
        }
        recorded
    };
    let script = shared.script.lock().unwrap().clone();
    let strict = *shared.strict.lock().unwrap();
    let refusal = strict.and_then(|bytes_max| check(&recorded, bytes_max).err());
    let reply = match refusal {
        Some((code, why)) => {
            let error = match recorded.form {
                Form::OpenAi => {
                    json!({"error": { "message": why, "type": "invalid_request_error", "code": code }})
                }
                Form::Anthropic => anthropic::error("invalid_request_error", &why),
                Form::Gemini => gemini::error(400, "INVALID_ARGUMENT", &why),
            };
            shared.refusals.lock().unwrap().push(why);
            Reply::status(400, &error.to_string())
        }
        None => script(&recorded),
    };
    shared.arrived.send_modify(|count| *count += 1);

    tokio::time::sleep(reply.delay).await;
    if let Some(gate) = &reply.gate {
        gate.pass().await;
    }
    let (status, kind, mut chunks) = reply.body(&recorded);
    if reply.is_bytewise {
        let whole = chunks.concat();
        chunks = whole
            .iter()
            .map(|byte| Bytes::copy_from_slice(&[*byte]))
            .collect();
    }
    let mut response = Response::builder()
        .status(status)
        .header("content-type", kind);
    for (name, value) in &reply.headers {
        response = response.header(name, value);
    }
    let pause = reply.pause;
    let pieces = futures::stream::iter(chunks).then(move |piece| async move {
        if pause.is_zero() {
            // Lets the piece before go out by itself.
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(pause).await;
        }
        Ok::<Bytes, std::io::Error>(piece)
    });
    let ending = reply.ending;
    let end = futures::stream::once(async move {
        match ending {
            Ending::Clean => active.sent(),
            Ending::HangUp => {
                active.sent();
                // Lets what is written go out first.
                tokio::task::yield_now().await;
                return Some(Err(std::io::Error::other("the script hangs up")));
            }
            Ending::Stall => std::future::pending().await,
        }
        None
    })
    .filter_map(|end| async { end });
    response
        .body(Body::from_stream(pieces.chain(end)))
        .expect("a valid reply")
}

/// What real providers refuse, as the error's code and message.
fn check(request: &Recorded, bytes_max: usize) -> Result<(), (&'static str, String)> {
    let invalid = |why: String| Err(("invalid_request", why));
    if request.raw.len() > bytes_max {
        let why = format!(
            "{} bytes are over the context limit of {bytes_max}",
            request.raw.len()
        );
        return Err(("context_length_exceeded", why));
    }
    if request.messages().is_empty() {
        return invalid("messages are required".to_owned());
    }
    let own = match request.form {
        Form::OpenAi if request.body["model"].as_str().is_none_or(str::is_empty) => {
            Err("a model is required".to_owned())
        }
        Form::OpenAi => Ok(()),
        Form::Anthropic => anthropic::check(request),
        Form::Gemini => gemini::check(request),
    };
    if let Err(why) = own {
        return invalid(why);
    }
    // Ids of calls that wait for their result, first one last.
    let mut open: Vec<&str> = Vec::new();
    for (at, message) in request.messages().iter().enumerate() {
        let role = message["role"].as_str().unwrap_or_default();
        if role == "tool" {
            let id = message["tool_call_id"].as_str().unwrap_or_default();
            match open.pop() {
                Some(expected) if expected == id => {}
                Some(expected) => {
                    return invalid(format!(
                        "messages[{at}]: result of `{id}`, but `{expected}` is next"
                    ));
                }
                None => return invalid(format!("messages[{at}]: result of `{id}` without a call")),
            }
            if !message["content"].is_string() {
                return invalid(format!("messages[{at}]: a result needs content"));
            }
            continue;
        }
        if let Some(id) = open.last() {
            return invalid(format!("messages[{at}]: the call `{id}` has no result"));
        }
        let content = message["content"].as_str();
        match role {
            "system" | "user" if content.is_some() => {}
            "assistant" => {
                open = check_calls(at, message)?;
                if open.is_empty() && content.is_none_or(str::is_empty) {
                    return invalid(format!("messages[{at}]: neither content nor calls"));
                }
            }
            _ => {
                return invalid(format!(
                    "messages[{at}]: role `{role}` with {}",
                    message["content"]
                ));
            }
        }
    }
    match open.last() {
        Some(id) => invalid(format!("the call `{id}` has no result")),
        None => Ok(()),
    }
}

fn check_calls(at: usize, message: &Value) -> Result<Vec<&str>, (&'static str, String)> {
    let invalid = |why: &str| Err(("invalid_request", format!("messages[{at}]: {why}")));
    let mut ids = Vec::new();
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let id = call["id"].as_str().unwrap_or_default();
        let name = call["function"]["name"].as_str().unwrap_or_default();
        let arguments = call["function"]["arguments"].as_str().unwrap_or_default();
        if id.is_empty() || ids.contains(&id) {
            return invalid(&format!("call id `{id}` is empty or used twice"));
        }
        if !(1..=64).contains(&name.len())
            || !name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
        {
            return invalid(&format!("`{name}` is not a function name"));
        }
        if !serde_json::from_str::<Value>(arguments).is_ok_and(|value| value.is_object()) {
            return invalid(&format!(
                "arguments of `{id}` are not a JSON object: {arguments}"
            ));
        }
        ids.push(id);
    }
    ids.reverse();
    Ok(ids)
}
