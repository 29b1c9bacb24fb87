//! `http_request`: what is sent, what may be repeated, and what the model is told (L-3, X-15, H-15, H-31).

use crate::{
    configured_tools::{post_to, secret, tool},
    engine::Engine,
    forced::agent_with,
    http::KEY,
    stub_llm::Reply,
};
use axum::{
    Router,
    body::{Body, Bytes},
    extract::{OriginalUri, State},
    http::{HeaderMap, Method, Response, StatusCode},
};
use reconvene::{
    config::Config,
    domain::{ids::TaskId, task::TaskStatus::Completed},
};
use serde_json::{Value, json};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::sync::watch;

/// What a service got.
#[derive(Clone, Debug)]
pub struct Got {
    pub line: String,
    pub headers: HeaderMap,
    pub body: String,
}

/// How it answers.
pub type Behaviour = fn(usize, &Got) -> Kind;

pub enum Kind {
    Answer(StatusCode, &'static str, String),
    Redirect(String),
    /// Headers, and then the end of the connection.
    Cut,
    Never,
}

pub struct Service {
    pub base: String,
    got: Arc<Mutex<Vec<Got>>>,
    arrived: watch::Receiver<usize>,
}

impl Service {
    pub async fn start(behaviour: Behaviour) -> Self {
        let got: Arc<Mutex<Vec<Got>>> = Arc::default();
        let (count, arrived) = watch::channel(0);
        let state = (got.clone(), Arc::new(count), behaviour);
        type Shared = (Arc<Mutex<Vec<Got>>>, Arc<watch::Sender<usize>>, Behaviour);
        async fn answer(
            State((got, count, behaviour)): State<Shared>,
            method: Method,
            OriginalUri(uri): OriginalUri,
            headers: HeaderMap,
            body: Bytes,
        ) -> Response<Body> {
            let this = Got {
                line: format!("{method} {uri}"),
                headers,
                body: String::from_utf8(body.to_vec()).unwrap(),
            };
            let n = {
                let mut all = got.lock().unwrap();
                all.push(this.clone());
                all.len()
            };
            count.send_replace(n);
            let response = Response::builder();
            let made = match behaviour(n, &this) {
                Kind::Answer(status, kind, text) => response
                    .status(status)
                    .header("content-type", kind)
                    .body(Body::from(text)),
                Kind::Redirect(to) => response
                    .status(302)
                    .header("location", to)
                    .body(Body::empty()),
                Kind::Cut => {
                    let broken = [Ok("{"), Err(std::io::Error::other("cut"))];
                    response.body(Body::from_stream(futures::stream::iter(broken)))
                }
                Kind::Never => std::future::pending().await,
            };
            made.unwrap()
        }
        let app = Router::new().fallback(answer).with_state(state);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Service { base, got, arrived }
    }

    pub fn got(&self) -> Vec<Got> {
        self.got.lock().unwrap().clone()
    }

    pub async fn has(&self, n: usize) {
        let mut arrived = self.arrived.clone();
        let enough = arrived.wait_for(|count| *count >= n);
        tokio::time::timeout(Duration::from_secs(30), enough)
            .await
            .expect("the service is asked")
            .unwrap();
    }
}

pub fn ok(body: &str) -> Kind {
    Kind::Answer(StatusCode::OK, "application/json", body.to_owned())
}

fn inside(config: &mut Config) {
    config.http.allow_private_addresses = true;
    config.http.timeout_seconds = 1;
    config.http.max_response_bytes = 1000;
    config.worker.lease_seconds = 1;
    config.credentials.keys = vec![KEY.to_owned().into()];
}

/// Lets an agent make this one call; the task's output is the result as its model got it.
async fn call(engine: &Engine, name: &'static str, arguments: Value) -> TaskId {
    let caller = agent_with(engine, "Caller", |a| a.tools = vec![name.into()]).await;
    engine.llm().script(move |r| match r.turn() {
        0 => Reply::call(name, arguments.clone()),
        _ => Reply::text(r.results()[0].1),
    });
    post_to(engine, caller, "go").await
}

async fn told(engine: &Engine, name: &'static str, arguments: Value) -> String {
    let task = call(engine, name, arguments).await;
    let (status, told) = engine.end(task).await;
    assert_eq!(status, Completed, "{told}");
    told
}

// L-3, L-2, L-9, X-15, H-31
#[tokio::test(flavor = "multi_thread")]
async fn a_configured_request_is_sent_as_its_author_wrote_it() {
    let service =
        Service::start(|_, _| ok(r#"{"data": {"id": 18446744073709551617, "price": 1.10}}"#)).await;
    let engine = Engine::scripted_with(inside).await.running();
    let key = secret(&engine, engine.workspace(), "a-secret-of-the-shop").await;
    tool(&engine, json!({
        "name": "order", "base_tool": "http_request",
        "parameters": {"type": "object", "required": ["id"], "additionalProperties": false,
            "properties": {"id": {"type": "string"}, "count": {"type": "integer"}, "note": {"type": "string"}}},
        "bindings": {
            "method": "POST", "url": format!("{}/shops/7/orders/{{{{id}}}}", service.base),
            "headers": {"Authorization": {"credential": key, "prefix": "Bearer "}},
            "query": {"n": "{{count}}", "left_out": "{{note}}"},
            "body": {"count": "{{count}}", "note": "<{{id}}>"},
            "response_path": "data",
        }
    })).await;
    let arguments = json!({"id": "a/../{{count}}", "count": 9007199254740993_i64});
    let text = told(&engine, "order", arguments).await;
    assert_eq!(
        text,
        r#"{"status":200,"body":{"id":18446744073709551617,"price":1.10}}"#
    );
    let [got] = &service.got()[..] else {
        panic!("{:?}", service.got())
    };
    assert_eq!(
        (got.line.as_str(), got.body.as_str()),
        (
            "POST /shops/7/orders/a%2F..%2F%7B%7Bcount%7D%7D?n=9007199254740993",
            r#"{"note":"<a/../{{count}}>","count":9007199254740993}"#
        )
    );
    let header = |name: &str| got.headers[name].to_str().unwrap().to_owned();
    assert_eq!(header("authorization"), "Bearer a-secret-of-the-shop");
    let step: String = sqlx::query_scalar("select id::text from steps where tool = 'order'")
        .fetch_one(&engine.pool)
        .await
        .unwrap();
    assert_eq!(header("idempotency-key"), step);
    // What does not fit is told, and nothing is sent.
    let text = told(&engine, "order", json!({"count": "x"})).await;
    assert!(
        text.starts_with("Error: order: the arguments do not fit: "),
        "{text}"
    );
    assert_eq!(service.got().len(), 1);
    engine.close().await;
}

// L-3: without the operator's word no address within is asked, however it is written.
#[tokio::test(flavor = "multi_thread")]
async fn private_addresses_are_refused() {
    let service = Service::start(|_, _| ok("{}")).await;
    let engine = Engine::scripted_with(|c| {
        inside(c);
        c.http.allow_private_addresses = false;
        c.http.max_attempts = 1;
    })
    .await
    .running();
    let by_name = service.base.replace("127.0.0.1", "localhost");
    for url in [
        service.base.as_str(),
        &by_name,
        "http://169.254.169.254/latest/meta-data",
    ] {
        let text = told(&engine, "http_request", json!({"url": url})).await;
        assert!(
            text.contains("was not sent: the address is not a public one"),
            "{text}"
        );
    }
    assert!(service.got().is_empty());
    engine.close().await;
}

// H-15, X-15
#[tokio::test(flavor = "multi_thread")]
async fn only_what_may_be_repeated_is_sent_again() {
    let engine = Engine::scripted_with(inside).await.running();
    let failing: [(Behaviour, &str); 3] = [
        (|_, _| Kind::Cut, " broke off"),
        (|_, _| Kind::Never, "no whole answer within 1 s"),
        (
            |_, _| Kind::Answer(StatusCode::SERVICE_UNAVAILABLE, "text/plain", "busy".into()),
            "status 503",
        ),
    ];
    for (behaviour, why) in failing {
        let service = Service::start(behaviour).await;
        let text = told(
            &engine,
            "http_request",
            json!({"method": "POST", "url": service.base, "body": 1}),
        )
        .await;
        assert!(
            text.contains(why) && text.contains("had an effect is unknown"),
            "{text}"
        );
        assert_eq!(service.got().len(), 1, "{why}");

        let service = Service::start(behaviour).await;
        let text = told(&engine, "http_request", json!({"url": service.base})).await;
        assert!(text.contains(why) && !text.contains("unknown"), "{text}");
        let got = service.got();
        assert_eq!(got.len(), 3, "{why}");
        let keys: Vec<_> = got.iter().map(|g| &g.headers["idempotency-key"]).collect();
        assert!(keys.iter().all(|key| *key == keys[0]));
    }
    let service = Service::start(|n, _| if n < 3 { Kind::Cut } else { ok("7") }).await;
    let text = told(&engine, "http_request", json!({"url": service.base})).await;
    assert_eq!(text, r#"{"status":200,"body":7}"#);
    engine.close().await;
}

// H-15, X-15: a worker that dies after the service has the request, and before the result is committed.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_worker_dies_is_made_again_only_if_it_may_be() {
    for (repeatable, dispatched) in [(false, 1), (true, 2)] {
        let service = Service::start(|n, _| if n == 1 { Kind::Never } else { ok("1") }).await;
        let mut engine = Engine::scripted_with(|c| {
            inside(c);
            c.http.timeout_seconds = 30;
        })
        .await
        .running();
        tool(&engine, json!({"name": "send", "base_tool": "http_request",
            "bindings": {"method": "POST", "url": service.base, "body": {}, "repeatable": repeatable}})).await;
        let task = call(&engine, "send", json!({})).await;
        service.has(1).await;
        engine.kill().await;
        engine.resume();
        let (status, text) = engine.end(task).await;
        assert_eq!(status, Completed);
        let got = service.got();
        assert_eq!(got.len(), dispatched, "{text}");
        match repeatable {
            true => {
                assert_eq!(text, r#"{"status":200,"body":1}"#);
                assert_eq!(
                    got[0].headers["idempotency-key"],
                    got[1].headers["idempotency-key"]
                );
            }
            false => assert!(
                text.starts_with("Error: The call was interrupted"),
                "{text}"
            ),
        }
        engine.close().await;
    }
}

// L-3: redirects are followed, to another host without headers and bodies; answers are read up to a limit.
#[tokio::test(flavor = "multi_thread")]
async fn answers_that_lead_elsewhere_or_are_too_large() {
    let engine = Engine::scripted_with(inside).await.running();
    let service = Service::start(|_, got| match got.line.as_str() {
        "POST /here" => Kind::Redirect("/there?x=1".into()),
        "GET /there?x=1" | "GET /other" => ok("\"there\""),
        "GET /away" => Kind::Redirect(format!(
            "http://localhost:{}/other",
            got.headers["x-port"].to_str().unwrap()
        )),
        "GET /round" => Kind::Redirect("/round".into()),
        "GET /file" => Kind::Redirect("file:///etc/passwd".into()),
        "GET /large" => ok(&"1".repeat(1001)),
        _ => Kind::Answer(
            StatusCode::NOT_FOUND,
            "text/plain",
            "no \0 such thing".into(),
        ),
    })
    .await;
    let url = |path: &str| format!("{}{path}", service.base);
    let port = service.base.rsplit(':').next().unwrap().to_owned();
    let there = r#"{"status":200,"body":"there"}"#;
    for (arguments, expected) in [
        (
            json!({"method": "POST", "url": url("/here"), "body": {"a": 1}}),
            there,
        ),
        (
            json!({"url": url("/away"), "headers": {"Authorization": "mine", "X-Port": port}}),
            there,
        ),
        (
            json!({"url": url("/round")}),
            "redirected more than 5 times",
        ),
        (json!({"url": url("/file")}), "leads to no web address"),
        (json!({"url": url("/large")}), "larger than 1000 bytes"),
        (json!({"url": url("/missing")}), "status 404"),
        (
            json!({"url": "http://u:p@h/"}),
            "`url`: must not contain a user name",
        ),
        (
            json!({"url": url("/"), "headers": {"Host": "x"}}),
            "`headers.Host`: is a header that is set for you",
        ),
        (
            json!({"url": url("/"), "method": "get"}),
            "`method`: expected one of GET",
        ),
    ] {
        let text = told(&engine, "http_request", arguments).await;
        assert!(text.contains(expected), "{text}");
    }
    let got = service.got();
    let to = |line: &str| got.iter().find(|got| got.line == line).unwrap();
    assert_eq!(to("GET /there?x=1").body, "");
    let away = to("GET /other");
    assert!(
        !away.headers.contains_key("authorization")
            && !away.headers.contains_key("idempotency-key")
    );
    engine.close().await;
}
