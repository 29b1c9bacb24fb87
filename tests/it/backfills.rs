//! Backfills of delegation profiles: what is reported, who works on one, and what a death leaves (A-28, P-30).

use crate::engine::until;
use crate::http::{Answer, request};
use crate::profiles::{World, good, profile};
use crate::stub_llm::{Gate, Reply};
use axum::http::{Method, header};
use reconvene::api::auth::Role;
use reconvene::config::Provider;
use reconvene::lifecycle::agents::create_workspace;
use reconvene::profiles::Profiles;
use reconvene::runtime::{Progress, Shutdown};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use std::sync::Arc;

const ROUTE: &str = "/api/agents/delegation-profiles/backfill";

impl World {
    async fn begin(&self, query: &str) -> Answer {
        let path = format!("{ROUTE}{query}");
        self.api
            .send(request(Method::POST, &path, &self.token, None))
            .await
    }

    async fn job(&self, id: &Value) -> Value {
        let path = format!("{ROUTE}/{}", id.as_str().unwrap());
        self.api.get(&path, &self.token).await.ok()
    }

    /// Works on one job, as a worker that serves does.
    async fn work(&self, shutdown: &Shutdown) -> Progress {
        let app = &self.api.app;
        app.profiles
            .backfill_once(&app.hub, None, shutdown)
            .await
            .unwrap()
    }

    /// A worker of its own, which can be aborted where it stands.
    fn worker(&self) -> tokio::task::JoinHandle<Progress> {
        let app = self.api.app.clone();
        tokio::spawn(async move {
            let shutdown = Shutdown::new();
            app.profiles
                .backfill_once(&app.hub, None, &shutdown)
                .await
                .unwrap()
        })
    }

    async fn sql(&self, sql: &str) {
        let done = sqlx::query(AssertSqlSafe(sql.to_owned()))
            .execute(&self.api.pool)
            .await;
        done.unwrap();
    }

    async fn expire_lease(&self) {
        self.sql("update profile_backfills set lease_expires_at = now() - interval '1 second'")
            .await;
    }

    async fn lease(&self) -> Option<chrono::DateTime<chrono::Utc>> {
        let lease = sqlx::query_scalar("select lease_expires_at from profile_backfills");
        lease.fetch_one(&self.api.pool).await.unwrap()
    }
}

fn counts(job: &Value) -> [i64; 4] {
    ["pending", "generated", "skipped", "failed"].map(|key| job[key].as_i64().unwrap())
}

/// Name, status and reason of each agent.
fn report(job: &Value) -> Vec<(String, String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let agents = job["items"].as_array().unwrap().iter();
    agents
        .map(|agent| {
            (
                text(&agent["name"]),
                text(&agent["status"]),
                text(&agent["reason"]),
            )
        })
        .collect()
}

fn with_profile(name: &str) -> Value {
    json!({"name": name, "config": {"delegation_profile": {"description": "By hand."}}})
}

#[tokio::test]
async fn every_agent_without_a_profile_is_given_one_and_all_are_reported() {
    // A-28
    let world = World::new(Provider::OpenAi).await;
    let elsewhere = create_workspace(&world.api.pool, "elsewhere", "E")
        .await
        .unwrap();
    let stranger = world.api.token(elsewhere, Role::Admin);
    world.create(with_profile("Has one")).await;
    let bad = world.create(json!({"name": "Bad"})).await;
    let draft = world.create(json!({"name": "Draft", "draft": true})).await;
    let gone = world.create(json!({"name": "Gone"})).await;
    world.create(json!({"name": "Last"})).await;
    world.llm.script(|request| match request.says("> Bad") {
        true => Reply::status(401, r#"{"error": {"message": "no: sk-hush"}}"#),
        false => good(),
    });

    let begun = world.begin("").await;
    assert_eq!(begun.status.as_u16(), 202);
    let job = begun.json();
    let address = format!("{ROUTE}/{}", job["id"].as_str().unwrap());
    assert_eq!(begun.headers[header::LOCATION], address.as_str());
    assert_eq!(
        (&job["status"], &job["force"], counts(&job)),
        (&json!("running"), &json!(false), [6, 0, 0, 0])
    );
    let path = format!("/api/agents/{}", gone["id"].as_str().unwrap());
    world.send(Method::DELETE, &path, None, None).await;
    world.create(json!({"name": "Too late"})).await;

    assert_eq!(world.work(&Shutdown::new()).await, Progress::Did(1));
    assert_eq!(world.work(&Shutdown::new()).await, Progress::Idle);
    let job = world.job(&job["id"]).await;
    assert_eq!(
        (&job["status"], counts(&job)),
        (&json!("completed"), [0, 3, 2, 1])
    );
    assert!(job["finished_at"].is_string() && job["next_cursor"].is_null());
    let told = report(&job);
    let expected = [
        ("Assistant", "generated", ""),
        ("Has one", "skipped", "It has a profile."),
        ("Bad", "failed", "401"),
        ("Draft", "generated", ""),
        ("Gone", "skipped", "It has been deleted."),
        ("Last", "generated", ""),
    ];
    assert_eq!(told.len(), expected.len(), "{told:?}");
    for ((name, status, reason), expected) in told.iter().zip(expected) {
        assert_eq!((name.as_str(), status.as_str()), (expected.0, expected.1));
        assert!(
            reason.contains(expected.2) && !reason.contains("hush"),
            "{reason}"
        );
        assert_eq!(reason.is_empty(), expected.2.is_empty());
    }
    assert_eq!(
        world.agent(&draft["id"]).await["config"]["delegation_profile"],
        profile()
    );
    assert_eq!(world.agent(&bad["id"]).await, bad);
    assert_eq!(
        world.roster().await.len(),
        2,
        "Has one and Last: a draft is shown to nobody"
    );

    // In pages.
    let first = world
        .api
        .get(&format!("{address}?limit=4"), &world.token)
        .await
        .ok();
    let cursor = first["next_cursor"].as_str().unwrap();
    let second = world
        .api
        .get(&format!("{address}?limit=4&cursor={cursor}"), &world.token)
        .await
        .ok();
    assert_eq!([report(&first), report(&second)].concat(), told);

    // Only to this workspace, and no other's agents were touched.
    world
        .api
        .get(&address, &stranger)
        .await
        .problem(404, "not_found");
    let agents = world.api.get("/api/agents", &stranger).await.ok();
    assert_eq!(agents["items"][0]["config"], json!({}));

    // All of them anew.
    world.llm.replies([Reply::text(
        json!({"description": "Anew.", "example_input": "x"}).to_string(),
    )]);
    let again = world.begin("?force=true").await.json();
    assert_ne!(again["id"], job["id"]);
    world.work(&Shutdown::new()).await;
    assert_eq!(counts(&world.job(&again["id"]).await), [0, 6, 0, 0]);
    let listed = world.roster().await;
    assert!(listed.len() == 4 && listed.iter().all(|entry| entry.description == "Anew."));
}

#[tokio::test]
async fn what_is_asked_wrongly_is_refused() {
    // A-28, P-2, P-6
    let world = World::new(Provider::OpenAi).await;
    for (query, path) in [
        ("?force=maybe", "force"),
        ("?force=true&force=true", "force"),
        ("?x=1", "x"),
    ] {
        let problem = world.begin(query).await.problem(422, "invalid_query");
        assert_eq!(problem["errors"][0]["path"], path);
    }
    for id in ["x", "00000000-0000-0000-0000-000000000000"] {
        let answer = world.api.get(&format!("{ROUTE}/{id}"), &world.token).await;
        answer.problem(404, "not_found");
    }
    let member = world.api.token(world.home, Role::Member);
    let refused = world
        .api
        .send(request(Method::POST, ROUTE, &member, None))
        .await;
    refused.problem(403, "forbidden");
}

#[tokio::test]
async fn a_second_backfill_is_the_one_that_runs() {
    // A-28
    let world = World::new(Provider::OpenAi).await;
    let elsewhere = create_workspace(&world.api.pool, "elsewhere", "E")
        .await
        .unwrap();
    let begun = futures::future::join_all((0..20).map(|_| world.begin("?force=true"))).await;
    let first = begun[0].json();
    for answer in begun {
        assert_eq!(
            (answer.status.as_u16(), answer.json()),
            (202, first.clone())
        );
    }
    assert_eq!(world.begin("").await.json(), first, "as it was begun");
    // Another workspace has its own.
    let stranger = world.api.token(elsewhere, Role::Admin);
    let theirs = world
        .api
        .send(request(Method::POST, ROUTE, &stranger, None))
        .await
        .ok();
    assert_ne!(theirs["id"], first["id"]);
    world.llm.replies([good()]);
    let one = Shutdown::new();
    assert_eq!(
        (world.work(&one).await, world.work(&one).await),
        (Progress::Did(1), Progress::Did(1))
    );
    assert_eq!(world.work(&one).await, Progress::Idle);
    assert_eq!(
        world.llm.arrived(),
        2,
        "one agent in each workspace, each asked for once"
    );
}

#[tokio::test]
async fn so_many_agents_are_worked_on_at_once_and_no_more() {
    // A-28
    let world = World::with(Provider::OpenAi, |config| {
        config.delegation_profiles.concurrency = 2
    })
    .await;
    for n in 0..5 {
        world.create(json!({"name": format!("A{n}")})).await;
    }
    let gate = Gate::new();
    world.llm.replies([good().held_by(&gate)]);
    let job = world.begin("").await.json();
    let worker = world.worker();
    world.llm.wait_for_requests(2).await;
    // A third one would have come at the same time as these.
    world.job(&job["id"]).await;
    assert_eq!(world.llm.arrived(), 2);
    gate.open();
    worker.await.unwrap();
    assert_eq!(counts(&world.job(&job["id"]).await), [0, 6, 0, 0]);
    assert_eq!(world.llm.arrived(), 6);
}

#[tokio::test]
async fn another_process_goes_on_where_one_died() {
    // A-28, R-1
    let world = World::with(Provider::OpenAi, |config| {
        config.delegation_profiles.concurrency = 1
    })
    .await;
    world.create(json!({"name": "Ada"})).await;
    let held = Gate::new();
    let (gate, hang) = (held.clone(), good());
    world.llm.script(move |request| match request.number {
        1 => hang.clone().held_by(&gate),
        _ => good(),
    });
    let job = world.begin("").await.json();
    let dying = world.worker();
    world.llm.wait_for_requests(2).await;
    dying.abort();
    assert!(dying.await.is_err());
    assert_eq!(counts(&world.job(&job["id"]).await), [1, 1, 0, 0]);
    assert_eq!(
        world.work(&Shutdown::new()).await,
        Progress::Idle,
        "its lease holds"
    );
    world.expire_lease().await;
    assert_eq!(world.work(&Shutdown::new()).await, Progress::Did(1));
    let job = world.job(&job["id"]).await;
    assert_eq!(
        (&job["status"], counts(&job)),
        (&json!("completed"), [0, 2, 0, 0])
    );
    assert_eq!(world.llm.arrived(), 3, "what was done is not done again");
    held.open();
}

#[tokio::test]
async fn a_process_that_comes_back_without_its_lease_changes_nothing() {
    // A-28, R-2
    let world = World::new(Provider::OpenAi).await;
    let gate = Gate::new();
    let held = gate.clone();
    let late = json!({"description": "Late.", "example_input": "x"}).to_string();
    world.llm.script(move |request| match request.number {
        0 => Reply::text(late.clone()).held_by(&held),
        _ => good(),
    });
    let job = world.begin("?force=true").await.json();
    let hanging = world.worker();
    world.llm.wait_for_requests(1).await;
    world.expire_lease().await;
    assert_eq!(world.work(&Shutdown::new()).await, Progress::Did(1));
    let ended = world.job(&job["id"]).await;
    let agents = world.api.get("/api/agents", &world.token).await.ok();
    assert_eq!(
        agents["items"][0]["config"]["delegation_profile"],
        profile()
    );
    gate.open();
    hanging.await.unwrap();
    assert_eq!(world.job(&job["id"]).await, ended);
    assert_eq!(
        world.api.get("/api/agents", &world.token).await.ok(),
        agents
    );
}

#[tokio::test]
async fn a_profile_is_not_stored_for_a_holder_that_has_lost_the_job() {
    // A-28, R-2: even when nobody has saved the agent since.
    let world = World::new(Provider::OpenAi).await;
    let gate = Gate::new();
    world.llm.replies([good().held_by(&gate)]);
    let job = world.begin("").await.json();
    let hanging = world.worker();
    world.llm.wait_for_requests(1).await;
    let before = world.api.get("/api/agents", &world.token).await.ok();
    world
        .sql("update profile_backfills set attempt = attempt + 1")
        .await;
    gate.open();
    hanging.await.unwrap();
    assert_eq!(
        world.api.get("/api/agents", &world.token).await.ok(),
        before
    );
    assert_eq!(counts(&world.job(&job["id"]).await), [1, 0, 0, 0]);
}

#[tokio::test]
async fn a_lease_is_renewed_for_as_long_as_the_model_takes() {
    // A-28, R-2
    let world = World::with(Provider::OpenAi, |config| config.worker.lease_seconds = 1).await;
    let gate = Gate::new();
    world.llm.replies([good().held_by(&gate)]);
    let job = world.begin("").await.json();
    let worker = world.worker();
    world.llm.wait_for_requests(1).await;
    let first = world.lease().await.unwrap();
    until("the first lease would have ended", async || {
        let now: bool = sqlx::query_scalar("select now() > $1")
            .bind(first)
            .fetch_one(&world.api.pool)
            .await
            .unwrap();
        now
    })
    .await;
    assert_eq!(world.work(&Shutdown::new()).await, Progress::Idle);
    gate.open();
    worker.await.unwrap();
    assert_eq!(counts(&world.job(&job["id"]).await), [0, 1, 0, 0]);
    assert_eq!((world.lease().await, world.llm.arrived()), (None, 1));
}

#[tokio::test]
async fn a_backfill_that_kills_processes_ends() {
    // A-28, R-1
    let world = World::new(Provider::OpenAi).await;
    let job = world.begin("").await.json();
    world.llm.replies([good().held_by(&Gate::new())]);
    for round in 0..world.api.app.config.worker.max_attempts {
        let dying = world.worker();
        world.llm.wait_for_requests(round as usize + 1).await;
        dying.abort();
        let _ = dying.await;
        world.expire_lease().await;
    }
    assert_eq!(world.work(&Shutdown::new()).await, Progress::Did(1));
    let job = world.job(&job["id"]).await;
    assert_eq!(
        (&job["status"], counts(&job)),
        (&json!("completed"), [0, 0, 0, 1])
    );
    assert!(report(&job)[0].2.contains("lost 3 times"), "{job}");
}

#[tokio::test]
async fn a_process_that_stops_finishes_what_it_has_begun_and_leaves_the_rest() {
    // A-28, O-4
    let world = World::with(Provider::OpenAi, |config| {
        config.delegation_profiles.concurrency = 1
    })
    .await;
    for n in 0..2 {
        world.create(json!({"name": format!("A{n}")})).await;
    }
    let job = world.begin("").await.json();
    for (hard, expected) in [(false, [2, 1, 0, 0]), (true, [2, 1, 0, 0])] {
        let gate = Gate::new();
        world.llm.replies([good().held_by(&gate)]);
        let shutdown = Shutdown::new();
        let asked = world.llm.arrived();
        let stop = async {
            world.llm.wait_for_requests(asked + 1).await;
            match hard {
                true => shutdown.hard.cancel(),
                false => {
                    shutdown.soft.cancel();
                    gate.open();
                }
            }
        };
        tokio::join!(world.work(&shutdown), stop);
        assert_eq!(counts(&world.job(&job["id"]).await), expected);
        assert_eq!(world.lease().await, None, "anybody may go on at once");
    }
    world.llm.replies([good()]);
    world.work(&Shutdown::new()).await;
    assert_eq!(counts(&world.job(&job["id"]).await), [0, 3, 0, 0]);
}

#[tokio::test]
async fn saves_meanwhile_are_given_way_to() {
    // A-28, H-47
    let world = World::new(Provider::OpenAi).await;
    let made = world.create(json!({"name": "Ada"})).await;
    let job = world.begin("").await.json();
    let gate = Gate::new();
    let held = gate.clone();
    world.llm.script(
        move |request| match request.says("> Ada") && !request.says("> New.") {
            true => good().held_by(&held),
            false => good(),
        },
    );
    let worker = world.worker();
    world.llm.wait_for_requests(2).await;
    world
        .patch(&made, json!({"instructions": "New."}))
        .await
        .ok();
    gate.open();
    worker.await.unwrap();
    assert_eq!(counts(&world.job(&job["id"]).await), [0, 2, 0, 0]);
    let agent = world.agent(&made["id"]).await;
    assert_eq!(
        (
            &agent["instructions"],
            &agent["config"]["delegation_profile"]
        ),
        (&json!("New."), &profile())
    );
    assert_eq!(world.llm.arrived(), 3, "written from what the agent is now");

    // A profile by hand meanwhile is kept.
    let bob = world.create(json!({"name": "Bob"})).await;
    let job = world.begin("").await.json();
    let gate = Gate::new();
    world.llm.replies([good().held_by(&gate)]);
    let worker = world.worker();
    world.llm.wait_for_requests(4).await;
    let by_hand = with_profile("Bob");
    world.patch(&bob, by_hand.clone()).await.ok();
    gate.open();
    worker.await.unwrap();
    assert_eq!(world.agent(&bob["id"]).await["config"], by_hand["config"]);
    assert_eq!(counts(&world.job(&job["id"]).await), [0, 0, 3, 0]);
}

#[tokio::test]
async fn a_long_backfill_holds_up_no_other_workspace() {
    // A-28: one process, at a poll interval of an hour.
    let world = World::new(Provider::OpenAi).await;
    let elsewhere = create_workspace(&world.api.pool, "elsewhere", "E")
        .await
        .unwrap();
    let stranger = world.api.token(elsewhere, Role::Admin);
    world.create(json!({"name": "Slow"})).await;
    let held = Gate::new();
    let gate = held.clone();
    world
        .llm
        .script(move |request| match request.says("> Slow") {
            true => good().held_by(&gate),
            false => good(),
        });
    let (app, shutdown) = (world.api.app.clone(), Shutdown::new());
    let (profiles, stop) = (app.profiles.clone(), shutdown.clone());
    let hour = std::time::Duration::from_secs(3600);
    let running = tokio::spawn(async move { profiles.run_backfills(&app.hub, hour, &stop).await });
    let slow = world.begin("").await.json();
    world.llm.wait_for_requests(2).await;
    let begun = request(Method::POST, ROUTE, &stranger, None);
    let quick = world.api.send(begun).await.json();
    let path = format!("{ROUTE}/{}", quick["id"].as_str().unwrap());
    until("the other one is done", async || {
        world.api.get(&path, &stranger).await.ok()["status"] == "completed"
    })
    .await;
    assert_eq!(world.job(&slow["id"]).await["status"], "running");
    held.open();
    until("the long one is done", async || {
        world.job(&slow["id"]).await["status"] == "completed"
    })
    .await;
    shutdown.soft.cancel();
    running.await.unwrap();
}

#[tokio::test]
async fn a_new_backfill_wakes_the_worker() {
    // A-28, O-3: at a poll interval of an hour.
    let world = World::new(Provider::OpenAi).await;
    world.llm.replies([good()]);
    let (app, shutdown) = (world.api.app.clone(), Shutdown::new());
    let profiles: Arc<Profiles> = app.profiles.clone();
    let hour = std::time::Duration::from_secs(3600);
    let stop = shutdown.clone();
    let running = tokio::spawn(async move { profiles.run_backfills(&app.hub, hour, &stop).await });
    let job = world.begin("").await.json();
    until("the job is done", async || {
        world.job(&job["id"]).await["status"] == "completed"
    })
    .await;
    shutdown.soft.cancel();
    running.await.unwrap();
}
