//! Reconvene as its users run it: processes of the real program, killed, stopped and cut off from their database.
//!
//! Polls come after 15 s at the earliest unless a test says otherwise, so what is quick was woken by a hint.

use crate::{
    forced,
    program::{Client, Event, Home, Program, Scene, until},
    stub_llm::{Gate, Recorded, Reply, StubLlm},
};
use reconvene::{domain::ids::AgentId, postgres::Embedded};
use reqwest::{Method, StatusCode, header};
use rustix::process::Signal;
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// What a task that waited for a lost hint would need at least.
const UNHINTED: Duration = Duration::from_secs(10);

fn delegate(agent: AgentId, prompts: &[&str]) -> Reply {
    Reply::call("delegate_tasks", forced::delegate(agent, prompts))
}

/// A call or a card may have been completed too by the time at which it is read.
fn is_the_end(event: &Event) -> bool {
    event.name == "status" && event.data["status"] == "completed"
}

/// A lead that delegates three things to `agent` and answers with their results; children answer when `gate` is open.
fn team(agent: AgentId, gate: &Gate) -> impl Fn(&Recorded) -> Reply + use<> {
    let gate = gate.clone();
    move |request| {
        let message = request.first_user().to_owned();
        match (message.starts_with("plan"), request.turn()) {
            (true, 0) => delegate(agent, &["one", "two", "three"]),
            (true, _) => Reply::text(format!("{message}: {}", request.last_user())),
            (false, _) => Reply::text(format!("result of {message}")).held_by(&gate),
        }
    }
}

#[track_caller]
fn assert_consolidated(task: &Value) {
    assert_eq!(task["status"], "completed", "{task}");
    let output = task["output"].as_str().unwrap();
    for child in ["one", "two", "three"] {
        assert!(
            output.contains(&format!("> result of {child}\n")),
            "{output}"
        );
    }
}

// T-1, T-20 to T-24, D-20, D-22, O-2, O-3
#[tokio::test(flavor = "multi_thread")]
async fn the_whole_road_in_three_processes() {
    const ANSWER: &str = "Everybody is back: the trip is planned, from the first day to the last.";
    let scene = Scene::new().await;
    let gate = Gate::new();
    let others = team(scene.demo.researcher, &gate);
    scene.llm.script(
        move |request| match (request.first_user(), request.turn()) {
            ("plan a trip", 1) => Reply::text(ANSWER).every(Duration::from_millis(100)),
            _ => others(request),
        },
    );
    let worker = scene.serve("worker").await;
    let api = scene.serve("api").await;
    let orchestrator = scene.serve("orchestrator").await;
    let client = scene.client(&api).await;
    let ready = client.get("/readyz").await;
    assert_eq!(
        (&ready["ready"], &ready["listening"], &ready["roles"]),
        (&json!(true), &json!(true), &json!(["api"]))
    );

    let task = client.say("plan a trip").await;
    let mut stream = client.follow(&task, None).await;
    let mut events: Vec<Event> = vec![stream.next().await.unwrap()];
    scene.llm.wait_for_requests(4).await;
    let waiting = client.task(&task).await;
    assert_eq!(waiting["status"], "waiting_for_input");
    assert_eq!(scene.number("select count(*) from steps where status = 'running' and task_id in (select id from tasks where parent_task_id is null)").await, 0);
    gate.open();
    while !is_the_end(events.last().unwrap()) {
        events.push(stream.next().await.expect("the stream goes on"));
    }

    // What is kept came once and in order, and is what the feed shows.
    let kept: Vec<(i64, &str)> = events
        .iter()
        .filter_map(|event| Some((event.id?, event.name.as_str())))
        .collect();
    let feed = client.get(&format!("/api/tasks/{task}/feed")).await;
    let items: Vec<(i64, &str)> = feed["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| {
            (
                item["seq"].as_i64().unwrap(),
                item["kind"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(kept, items);
    assert_eq!(
        kept.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(),
        (1..=kept.len() as i64).collect::<Vec<_>>()
    );
    for kind in [
        "user_message",
        "assistant_message",
        "tool_call",
        "delegation",
        "resume_message",
    ] {
        assert!(
            kept.iter().any(|(_, name)| *name == kind),
            "{kind}: {kept:?}"
        );
    }
    // The model's text came as it was written in the other process, before the message that has it whole.
    let told: String = events
        .iter()
        .filter(|event| event.name == "delta")
        .map(|event| event.data["text"].as_str().unwrap())
        .collect();
    assert_eq!(told, ANSWER);
    let mut again = client.follow(&task, Some(3)).await;
    for seq in 4..=kept.len() as i64 {
        assert_eq!(again.next().await.unwrap().id, Some(seq));
    }

    let ended = client.task(&task).await;
    assert_eq!(
        (&ended["status"], &ended["output"], &ended["subtask_count"]),
        (&json!("completed"), &json!(ANSWER), &json!(3))
    );
    let tree = client.get(&format!("/api/tasks/{task}/tree")).await;
    let nodes: Vec<(i64, &str)> = tree["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| {
            (
                node["depth"].as_i64().unwrap(),
                node["status"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        nodes,
        [
            (0, "completed"),
            (1, "completed"),
            (1, "completed"),
            (1, "completed")
        ]
    );
    let children = client
        .get(&format!(
            "/api/tasks/query?parentTaskId={task}&view=enriched"
        ))
        .await;
    let mut outputs: Vec<&str> = children["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|child| child["output"].as_str().unwrap())
        .collect();
    outputs.sort_unstable();
    assert_eq!(
        outputs,
        ["result of one", "result of three", "result of two"]
    );

    // A dozen hops between processes, each woken by a hint.
    let begun = Instant::now();
    let quick = client.say("plan it again").await;
    assert_consolidated(&client.end(&quick).await);
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    eprintln!("the whole road took {took:?}");

    scene.close().await;
    for program in [worker, orchestrator, api] {
        program.terminate().await;
    }
}

// R-1, T-11, T-12
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_worker_is_replaced_when_its_lease_is_over() {
    let mut scene = Scene::new().await;
    scene.set("WORKER_LEASE_SECONDS", "3");
    let gate = Gate::new();
    let held = gate.clone();
    scene.llm.script(move |request| match request.first_user() {
        "slow" => Reply::text("done").held_by(&held),
        _ => Reply::text("other"),
    });
    let api = scene.serve("api,orchestrator").await;
    let client = scene.client(&api).await;
    let first = scene.serve("worker").await;
    let slow = client.say("slow").await;
    scene.llm.wait_for_requests(1).await;
    let second = scene.serve("worker").await;
    first.kill().await;
    let killed = Instant::now();

    // What others do goes on meanwhile.
    let other = client.say("quick").await;
    assert_eq!(client.end(&other).await["output"], "other");
    assert!(killed.elapsed() < Duration::from_secs(3));

    scene.llm.wait_for_requests(3).await;
    assert!(killed.elapsed() < UNHINTED, "{:?}", killed.elapsed());
    gate.open();
    let ended = client.end(&slow).await;
    assert_eq!(
        (&ended["status"], &ended["output"]),
        (&json!("completed"), &json!("done"))
    );
    assert_eq!(scene.llm.requests().len(), 3, "one more call, and no third");
    assert_eq!(
        scene
            .number("select count(*) from steps where attempt = 2 and lost_leases = 1")
            .await,
        1
    );
    scene.close().await;
    second.terminate().await;
    api.terminate().await;
}

// R-1, O-2, T-2
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_orchestrator_and_api_lose_nothing() {
    let scene = Scene::new().await;
    let gate = Gate::new();
    scene.llm.script(team(scene.demo.researcher, &gate));
    let worker = scene.serve("worker").await;
    let orchestrator = scene.serve("orchestrator").await;
    let api = scene.serve("api").await;
    let client = scene.client(&api).await;
    let message = json!({"message": "plan a trip"});
    let post = async |client: &Client| {
        let path = "/api/chat/message";
        let headers = [("idempotency-key", "the first one")];
        let sent = client.send(Method::POST, path, Some(message.clone()), &headers);
        sent.await.unwrap().json::<Value>().await.unwrap()
    };
    let receipt = post(&client).await;
    let task = receipt["task_id"].as_str().unwrap();
    scene.llm.wait_for_requests(4).await;
    let mut stream = client.follow(task, None).await;
    stream.next().await.unwrap();

    // While three model calls are held: nobody is left who could move the parent, or be asked about it.
    orchestrator.kill().await;
    api.kill().await;
    while stream.next().await.is_some() {}
    assert!(
        client
            .send(Method::GET, "/healthz", None, &[])
            .await
            .is_err()
    );
    gate.open();
    scene
        .until("three signals wait", async || {
            scene
                .number("select count(*) from signals where status = 'pending'")
                .await
                == 3
        })
        .await;

    let (api, orchestrator) = tokio::join!(
        async {
            let api = Program::run(&["serve", "--roles", "api"], &scene.env);
            api.says("serving").await;
            api
        },
        async {
            let program = Program::run(&["serve", "--roles", "orchestrator"], &scene.env);
            program.says("serving").await;
            program
        }
    );
    let client = scene.client(&api).await;
    // A client that does not know whether its message had arrived sends it again.
    assert_eq!(post(&client).await, receipt);
    assert_consolidated(&client.end(task).await);
    assert_eq!(scene.llm.requests().len(), 5);
    scene.close().await;
    for program in [worker, orchestrator, api] {
        program.terminate().await;
    }
}

// O-4
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_stopped_finishes_or_gives_back_within_the_grace() {
    let mut scene = Scene::new().await;
    scene.set("SERVER_SHUTDOWN_GRACE_SECONDS", "2");
    let (quick_gate, stuck_gate) = (Gate::new(), Gate::new());
    let (quick, stuck) = (quick_gate.clone(), stuck_gate.clone());
    scene.llm.script(move |request| match request.first_user() {
        "quick" => Reply::text("finished").held_by(&quick),
        "stuck" => Reply::text("taken over").held_by(&stuck),
        _ => Reply::text("began later"),
    });
    let api = scene.serve("api,orchestrator").await;
    let client = scene.client(&api).await;
    let mut first = scene.serve("worker").await;
    let quick = client.say("quick").await;
    let stuck = client.say("stuck").await;
    scene.llm.wait_for_requests(2).await;

    first.signal(Signal::TERM);
    let asked = Instant::now();
    first.says("stopping").await;
    let late = client.say("late").await;
    scene
        .until("the late step waits", async || {
            scene
                .number("select count(*) from steps where status = 'queued'")
                .await
                == 1
        })
        .await;
    let second = scene.serve("worker").await;
    assert_eq!(client.end(&late).await["output"], "began later");
    quick_gate.open();
    assert_eq!(client.end(&quick).await["output"], "finished");

    let (code, _) = first.ended().await;
    assert_eq!(code, 0);
    let took = asked.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    // The lease would have lasted 30 s, and nobody polls that soon.
    scene.llm.wait_for_requests(4).await;
    assert!(asked.elapsed() < UNHINTED, "{:?}", asked.elapsed());
    stuck_gate.open();
    assert_eq!(client.end(&stuck).await["output"], "taken over");
    assert_eq!(scene.llm.requests().len(), 4);
    assert_eq!(
        scene
            .number("select sum(lost_leases)::bigint from steps")
            .await,
        0,
        "what is given back counts as nothing"
    );
    let workers = "select count(distinct worker_id) from steps where task_id in (select id from tasks where title in ('stuck', 'late'))";
    assert_eq!(
        scene.number(workers).await,
        1,
        "the first has claimed nothing more"
    );
    scene.close().await;

    // The API ends its streams, and what it was asked before is answered.
    let mut stream = client.follow(&late, None).await;
    stream.next().await.unwrap();
    let took = api.terminate().await;
    assert!(took < Duration::from_secs(2), "{took:?}");
    while stream.next().await.is_some() {}
    second.terminate().await;
    assert_eq!(scene.number("select count(*) from processes").await, 0);
}

// T-30, T-31, T-36
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_through_the_api_aborts_model_calls_in_the_worker() {
    let scene = Scene::new().await;
    scene.llm.script(team(scene.demo.writer, &Gate::new()));
    let worker = scene.serve("worker,orchestrator").await;
    let api = scene.serve("api").await;
    let client = scene.client(&api).await;
    let task = client.say("plan a trip").await;
    scene.llm.wait_for_requests(4).await;
    let begun = Instant::now();
    let stop = json!({"include_subtasks": true});
    let receipt = client.post(&format!("/api/tasks/{task}/stop"), stop).await;
    assert_eq!(
        (
            &receipt["status"],
            &receipt["stopped"],
            &receipt["left_alive"]
        ),
        (&json!("stopped"), &json!(4), &json!(0))
    );
    scene
        .until("the calls are aborted", async || scene.llm.aborted() == 3)
        .await;
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(client.task(&task).await["status"], "stopped");
    scene.close().await;
    worker.terminate().await;
    api.terminate().await;
}

// P-20, P-22: what `commands.rs` does not try.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_can_not_succeed_says_what_to_do() {
    let scene = Scene::new().await;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    type Case<'a> = (&'a [(&'a str, &'a str)], i32, &'a [&'a str]);
    let cases: [Case; 7] = [
        (
            &[("SERVER_HEALTH_PORT", &port)],
            1,
            &[&port, "another program listens there", "SERVER_HEALTH_PORT"],
        ),
        (
            &[("SERVER_PORT", &port)],
            1,
            &[&port, "another program listens there", "SERVER_PORT"],
        ),
        (
            &[("SERVER_HOST", "192.0.2.1")],
            1,
            &["192.0.2.1", "SERVER_HOST"],
        ),
        (
            &[("AUTH_JWT_SECRET", "short, and never shown")],
            2,
            &["AUTH_JWT_SECRET", "22 bytes", "at least 32"],
        ),
        (&[("LLM_MODEL", "")], 2, &["LLM_MODEL"]),
        (
            &[("LLM_PROVIDER", "oracle")],
            2,
            &["LLM_PROVIDER", "openai"],
        ),
        (
            &[("DATABASE_URL", "postgres://u:hush@127.0.0.1:1/x")],
            3,
            &["no database server answers at 127.0.0.1:1", "DATABASE_URL"],
        ),
    ];
    for (set, code, words) in cases {
        let mut env = scene.env.clone();
        env.extend(
            set.iter()
                .map(|(name, value)| (name.to_string(), value.to_string())),
        );
        let (ended, text) = Program::run(&["serve"], &env).ended().await;
        assert_eq!(ended, code, "{set:?}: {text}");
        for word in words {
            assert!(text.contains(word), "{set:?}: no {word:?} in {text}");
        }
        assert!(
            !text.contains("hush") && !text.contains("never shown"),
            "{text}"
        );
        assert!(!text.contains("panicked"), "{text}");
    }
}

// O-1, O-5, R-1, R-4: the database is killed under three processes, and comes back later.
#[tokio::test(flavor = "multi_thread")]
async fn the_database_goes_and_comes_back() {
    let home = Home::new();
    let database = Embedded::open(&home.0, None).await.unwrap();
    let url = secrecy::ExposeSecret::expose_secret(&database.url()).to_owned();
    let mut env = BTreeMap::from([("DATABASE_URL".to_owned(), url.clone())]);
    let (code, text) = Program::run(&["serve"], &env).ended().await;
    assert_eq!(code, 2, "a secret is wanted: {text}");
    env.insert(
        "AUTH_JWT_SECRET".into(),
        "0123456789 0123456789 0123456789".into(),
    );
    let (code, text) = Program::run(&["serve"], &env).ended().await;
    assert!(
        code == 1 && text.contains("run `reconvene migrate` first"),
        "{text}"
    );
    let (code, text) = Program::run(&["migrate"], &env).ended().await;
    assert_eq!(code, 0, "{text}");

    let pool = PgPoolOptions::new()
        .max_connections(2)
        .connect_with(database.options())
        .await
        .unwrap();
    let settings = [
        ("DATABASE_URL", url.as_str()),
        ("DATABASE_ACQUIRE_TIMEOUT_SECONDS", "1"),
    ];
    let mut scene = Scene::on(pool, &settings).await;
    scene.set("WORKER_POLL_INTERVAL_MS", "1000");
    scene.set("ORCHESTRATOR_POLL_INTERVAL_MS", "1000");
    let gate = Gate::new();
    scene.llm.script(team(scene.demo.reviewer, &gate));
    let api = scene.serve("api").await;
    let orchestrator = scene.serve("orchestrator").await;
    let worker = scene.serve("worker").await;
    let client = scene.client(&api).await;
    let task = client.say("plan a trip").await;
    scene.llm.wait_for_requests(4).await;
    let mut stream = client.follow(&task, None).await;
    let first = stream.next().await.unwrap();

    home.kill_server();
    until("the API is not ready", async || {
        client.try_get("/readyz").await.0 == StatusCode::SERVICE_UNAVAILABLE
    })
    .await;
    let asked = Instant::now();
    let (status, headers, problem) = client.try_get(&format!("/api/tasks/{task}")).await;
    assert_eq!(
        (status, &problem["code"]),
        (
            StatusCode::SERVICE_UNAVAILABLE,
            &json!("database_unavailable")
        )
    );
    let after: u64 = headers[header::RETRY_AFTER]
        .to_str()
        .unwrap()
        .parse()
        .unwrap();
    assert!((1..60).contains(&after));
    let message = Some(json!({"message": "nobody can keep this"}));
    let refused = client.send(Method::POST, "/api/chat/message", message, &[]);
    assert_eq!(
        refused.await.unwrap().status(),
        StatusCode::SERVICE_UNAVAILABLE
    );
    assert_eq!(client.get("/healthz").await["status"], "alive");
    let unready = client.try_get("/readyz").await.2;
    // No request waits for a connection that can not come: three times 1 s.
    let took = asked.elapsed();
    assert!(took < Duration::from_millis(2500), "{took:?}");
    assert_eq!(
        (&unready["database"], &unready["listening"]),
        (&json!("unavailable"), &json!(false))
    );
    // Model answers arrive while nobody can keep them.
    gate.open();
    scene.llm.wait_until_idle().await;

    assert!(database.ensure_running().await.unwrap(), "it was gone");
    let back = Instant::now();
    until("the API is ready again", async || {
        let (status, _, ready) = client.try_get("/readyz").await;
        status == StatusCode::OK && ready["listening"] == true
    })
    .await;
    assert!(back.elapsed() < UNHINTED, "{:?}", back.elapsed());
    let fresh = client.say("plan another one").await;
    assert_consolidated(&client.end(&fresh).await);
    assert_consolidated(&client.end(&task).await);
    // The stream has lived through it, without a gap and without a repetition.
    let mut seq = first.id.unwrap();
    loop {
        let event = stream.next().await.expect("the stream goes on");
        let Some(id) = event.id else { continue };
        seq += 1;
        assert_eq!(id, seq);
        if is_the_end(&event) {
            break;
        }
    }
    scene.close().await;
    for program in [worker, orchestrator, api] {
        program.terminate().await;
    }
    scene.pool.close().await;
    database.close().await.unwrap();
}

// O-1, R-1
#[tokio::test(flavor = "multi_thread")]
async fn a_process_with_its_own_database_survives_the_death_of_either() {
    let home = Home::new();
    // Another process that shares the data directory: this one.
    let database = Embedded::open(&home.0, None).await.unwrap();
    let data_dir = home.0.to_str().unwrap().to_owned();
    let (code, text) = Program::run(
        &["migrate"],
        &BTreeMap::from([("DATA_DIR".into(), data_dir.clone())]),
    )
    .ended()
    .await;
    assert_eq!(code, 0, "{text}");
    let pool = PgPoolOptions::new()
        .max_connections(2)
        .connect_with(database.options())
        .await
        .unwrap();
    let mut scene = Scene::on(pool, &[("DATA_DIR", &data_dir)]).await;
    // The secret is made and kept in the data directory.
    scene.env.remove("AUTH_JWT_SECRET");
    scene.set("WORKER_LEASE_SECONDS", "3");
    let gate = Gate::new();
    scene.llm.script(team(scene.demo.researcher, &gate));
    let service = scene.serve("api,worker,orchestrator").await;
    let client = scene.client(&service).await;
    let task = client.say("plan a trip").await;
    scene.llm.wait_for_requests(4).await;

    let server = home.server();
    home.kill_server();
    gate.open();
    service.says("has been started again").await;
    assert_ne!(home.server(), server);
    assert_consolidated(&client.end(&task).await);

    // And the other way round, with a call in the air.
    let gate = Gate::new();
    scene.llm.script(team(scene.demo.researcher, &gate));
    let before = scene.llm.requests().len();
    let task = client.say("plan another trip").await;
    scene.llm.wait_for_requests(before + 4).await;
    service.kill().await;
    let server = home.server();
    assert!(server.is_some(), "the database outlives a killed process");
    gate.open();
    let service = scene.serve("api,worker,orchestrator").await;
    assert_eq!(home.server(), server);
    let client = scene.client(&service).await;
    assert_consolidated(&client.end(&task).await);
    scene.close().await;
    scene.pool.close().await;
    database.close().await.unwrap();
    assert_eq!(home.server(), server, "somebody still uses it");
    service.terminate().await;
    assert_eq!(home.server(), None, "the last one to leave stops it");
}

// O-1, P-30
#[tokio::test(flavor = "multi_thread")]
async fn the_demonstration_runs_from_nothing_and_leaves_nothing_running() {
    let home = Home::new();
    let data_dir = home.0.to_str().unwrap().to_owned();
    let mut env = BTreeMap::from([
        ("DATA_DIR".to_owned(), data_dir),
        ("SERVER_PORT".to_owned(), "0".to_owned()),
        ("LOG_LEVEL".to_owned(), "warn".to_owned()),
    ]);
    let (code, text) = Program::run(&["dev", "--once"], &env).ended().await;
    assert_eq!(code, 0, "{text}");
    for words in [
        "Its task tree at the end:",
        "Lead",
        "└─ ",
        "Researcher",
        "Writer",
        "Reviewer",
        "completed",
    ] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    let (_, answer) = text
        .split_once("Its consolidated answer:")
        .expect("an answer");
    assert!(answer.contains("offline demo"), "{answer}");
    assert!(!text.contains("ERROR"), "{text}");
    assert_eq!(home.server(), None);

    // Ctrl-C in the middle of it, with a model that does not answer.
    env.remove("LOG_LEVEL");
    let llm = StubLlm::answering(|_| Reply::text("").held_by(&Gate::new())).await;
    for (name, value) in [
        ("LLM_PROVIDER", "openai"),
        ("LLM_MODEL", "stub"),
        ("LLM_BASE_URL", llm.base_url()),
        ("SERVER_SHUTDOWN_GRACE_SECONDS", "20"),
    ] {
        env.insert(name.to_owned(), value.to_owned());
    }
    let mut dev = Program::run(&["dev"], &env);
    llm.wait_for_requests(1).await;
    let asked = Instant::now();
    dev.signal(Signal::INT);
    dev.says("stopping").await;
    // Twice is: at once.
    dev.signal(Signal::INT);
    let (code, text) = dev.ended().await;
    assert!(
        code == 1 && text.contains("stopped before the demonstration had ended"),
        "{text}"
    );
    assert!(asked.elapsed() < UNHINTED, "{:?}", asked.elapsed());
    assert_eq!(home.server(), None);
}

//
#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_of_profiles_outlives_the_worker_that_is_killed_in_it() {
    const ROUTE: &str = "/api/agents/delegation-profiles/backfill";
    let mut scene = Scene::new().await;
    scene.set("DELEGATION_PROFILES_CONCURRENCY", "1");
    scene.set("WORKER_LEASE_SECONDS", "2");
    scene.set("WORKER_POLL_INTERVAL_MS", "100");
    let gate = Gate::new();
    let held = gate.clone();
    scene.llm.script(move |request| {
        let profile = Reply::text(json!({"description": "d", "example_input": "e"}).to_string());
        match request.number {
            1 => profile.held_by(&held),
            _ => profile,
        }
    });
    let api = scene.serve("api").await;
    let worker = scene.serve("worker").await;
    let mut token = Program::run(
        &["token", "--workspace", "demo", "--role", "admin"],
        &scene.env,
    );
    let admin = Client::new(&api, token.ended().await.1.trim()).await;
    let job = admin
        .post(&format!("{ROUTE}?force=true"), Value::Null)
        .await;
    let address = format!("{ROUTE}/{}", job["id"].as_str().unwrap());
    let agents = job["pending"].as_i64().unwrap();
    assert!(agents > 2);
    scene.llm.wait_for_requests(2).await;
    worker.kill().await;
    let left = admin.get(&address).await;
    assert_eq!(
        (&left["status"], &left["generated"], &left["pending"]),
        (&json!("running"), &json!(1), &json!(agents - 1))
    );
    let other = scene.serve("worker").await;
    scene
        .until("another one finishes it", async || {
            admin.get(&address).await["status"] == "completed"
        })
        .await;
    let done = admin.get(&address).await;
    assert_eq!(done["generated"], json!(agents), "{done}");
    // Each once, and the one that was under way once more.
    assert_eq!(scene.llm.arrived() as i64, agents + 1);
    gate.open();
    other.terminate().await;
    api.terminate().await;
}
