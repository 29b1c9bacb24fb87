//! T-1 to T-9 as far as HTTP goes, T-30, T-35, H-32, H-45.

use crate::http::{Api, agent, config, request, task_under, workspace};
use axum::http::{Method, header};
use reconvene::api::auth::Role;
use reconvene::domain::ids::{AgentId, TaskId, WorkspaceId};
use serde_json::{Value, json};
use std::collections::BTreeSet;

struct Scene {
    api: Api,
    workspace: WorkspaceId,
    lead: AgentId,
    token: String,
}

async fn scene() -> Scene {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let lead = agent(&api.pool, workspace, "default", "Lead").await;
    let token = api.token(workspace, Role::Member);
    Scene {
        api,
        workspace,
        lead,
        token,
    }
}

impl Scene {
    async fn post(&self, body: Value) -> crate::http::Answer {
        self.api.post("/api/chat/message", &self.token, body).await
    }

    async fn post_with_key(
        &self,
        api: &Api,
        key: &str,
        token: &str,
        body: Value,
    ) -> crate::http::Answer {
        let mut request = request(Method::POST, "/api/chat/message", token, Some(body));
        request
            .headers_mut()
            .insert("idempotency-key", key.parse().unwrap());
        api.send(request).await
    }

    async fn task(&self, id: &Value) -> Value {
        self.api
            .get(&format!("/api/tasks/{}", id.as_str().unwrap()), &self.token)
            .await
            .ok()
    }

    async fn texts(&self, id: &Value) -> Vec<(i64, String)> {
        let feed = self
            .api
            .get(
                &format!("/api/tasks/{}/feed", id.as_str().unwrap()),
                &self.token,
            )
            .await
            .ok();
        let items = feed["items"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|item| item["kind"] == "user_message");
        items
            .map(|item| {
                (
                    item["seq"].as_i64().unwrap(),
                    item["text"].as_str().unwrap().to_owned(),
                )
            })
            .collect()
    }

    async fn count(&self, table: &str) -> i64 {
        let query = format!("select count(*) from {table} where workspace_id = $1");
        sqlx::query_scalar(sqlx::AssertSqlSafe(query))
            .bind(self.workspace)
            .fetch_one(&self.api.pool)
            .await
            .unwrap()
    }
}

// T-1
#[tokio::test]
async fn a_message_starts_a_task_or_goes_on_with_one() {
    let scene = scene().await;
    let helper = agent(&scene.api.pool, scene.workspace, "custom", "Helper").await;
    let answer = scene.post(json!({"message": "  Plan a trip\nto Rome ", "metadata": {"ticket": 12345678901234567890123u128.to_string()}})).await;
    let first = answer.ok();
    assert_eq!(answer.status, 201);
    assert_eq!(
        answer.headers[header::LOCATION],
        format!("/api/tasks/{}", first["task_id"].as_str().unwrap()).as_str()
    );
    assert_eq!(
        (&first["status"], &first["created"]),
        (&json!("pending"), &json!(true))
    );
    let task = scene.task(&first["task_id"]).await;
    assert_eq!(
        (&task["title"], &task["agent_group_id"]),
        (&json!("Plan a trip"), &json!(scene.lead))
    );
    assert_eq!(
        task["metadata"],
        json!({"ticket": "12345678901234567890123"})
    );
    assert_eq!(
        scene.texts(&first["task_id"]).await,
        [(1, "Plan a trip\nto Rome".to_owned())]
    );
    let feed = scene
        .api
        .get(
            &format!("/api/tasks/{}/feed", first["task_id"].as_str().unwrap()),
            &scene.token,
        )
        .await
        .ok();
    assert_eq!(feed["items"][0]["id"], first["message_id"]);

    let other = scene
        .post(json!({"message": "hi", "agent_group_id": helper, "title": "Named"}))
        .await
        .ok();
    let task = scene.task(&other["task_id"]).await;
    assert_eq!(
        (&task["title"], &task["agent_name"]),
        (&json!("Named"), &json!("Helper"))
    );

    let answer = scene
        .post(json!({"message": "and Naples", "task_id": first["task_id"]}))
        .await;
    let appended = answer.ok();
    assert_eq!(
        (
            answer.status.as_u16(),
            &appended["created"],
            &appended["task_id"]
        ),
        (200, &json!(false), &first["task_id"])
    );
    assert_eq!(scene.texts(&first["task_id"]).await.len(), 2);
    assert_eq!(scene.count("tasks").await, 2);

    for missing in [
        json!({"message": "a", "task_id": TaskId::new()}),
        json!({"message": "a", "agent_group_id": AgentId::new()}),
    ] {
        scene.post(missing).await.problem(404, "not_found");
    }
}

#[tokio::test]
async fn without_a_default_agent_one_must_be_named() {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let token = api.token(workspace, Role::Member);
    api.post("/api/chat/message", &token, json!({"message": "a"}))
        .await
        .problem(422, "no_default_agent");
}

// T-2
#[tokio::test]
async fn the_same_key_gets_the_first_answer() {
    let scene = scene().await;
    let (api, token) = (&scene.api, scene.token.as_str());
    let first = scene
        .post_with_key(
            api,
            "k 1",
            token,
            json!({"message": "a", "skip_wait": false}),
        )
        .await;
    assert_eq!(first.status, 201);
    let again = scene
        .post_with_key(
            api,
            "k 1",
            token,
            json!({"skip_wait": false, "message": "a"}),
        )
        .await;
    assert_eq!((again.status, again.json()), (first.status, first.json()));
    scene
        .post_with_key(api, "k 1", token, json!({"message": "b"}))
        .await
        .problem(409, "idempotency_key_reused");
    let id = &first.json()["task_id"];
    let append = json!({"message": "b", "task_id": id});
    scene
        .post_with_key(api, "k 2", token, append.clone())
        .await
        .ok();
    assert_eq!(
        scene.post_with_key(api, "k 2", token, append).await.status,
        200
    );
    assert_eq!(scene.texts(id).await.len(), 2);
    assert_eq!(scene.count("tasks").await, 1);

    let other = workspace(&api.pool).await;
    agent(&api.pool, other, "default", "Lead").await;
    let theirs = scene
        .post_with_key(
            api,
            "k 1",
            &api.token(other, Role::Member),
            json!({"message": "b"}),
        )
        .await
        .ok();
    assert_ne!(theirs["task_id"], *id);
}

// H-45
#[tokio::test]
async fn twenty_identical_posts_make_one_task() {
    let scene = scene().await;
    let other = Api::start_with(scene.api.pool.clone(), config());
    let posts = (0..20).map(|n| {
        let api = if n % 2 == 0 { &scene.api } else { &other };
        scene.post_with_key(api, "one", &scene.token, json!({"message": "hi"}))
    });
    let answers = futures::future::join_all(posts).await;
    let bodies: BTreeSet<String> = answers
        .iter()
        .map(|answer| answer.ok().to_string())
        .collect();
    assert_eq!(bodies.len(), 1, "{bodies:?}");
    assert_eq!(
        [
            scene.count("tasks").await,
            scene.count("task_items").await,
            scene.count("orchestrator_events").await
        ],
        [1, 1, 1]
    );
}

// H-32, T-3
#[tokio::test]
async fn long_messages_are_kept_whole_and_titles_cut() {
    let scene = scene().await;
    let wide = "🦀".repeat(250);
    for (message, title) in [
        ("x".repeat(300), "x".repeat(200)),
        (wide.clone(), "🦀".repeat(200)),
        ("é".repeat(100_000), "é".repeat(200)),
        (format!("\n\n {} \nrest", "y".repeat(10)), "y".repeat(10)),
    ] {
        let sent = scene.post(json!({"message": message})).await.ok();
        assert_eq!(scene.texts(&sent["task_id"]).await[0].1, message.trim());
        assert_eq!(scene.task(&sent["task_id"]).await["title"], title);
    }
    let titled = scene
        .post(json!({"message": "a", "title": wide}))
        .await
        .ok();
    assert_eq!(
        scene.task(&titled["task_id"]).await["title"],
        "🦀".repeat(200)
    );
}

// T-7
#[tokio::test]
async fn a_message_reopens_a_task_that_has_ended() {
    let scene = scene().await;
    for status in ["completed", "failed", "stopped"] {
        let task = task_under(
            &scene.api.pool,
            scene.workspace,
            scene.lead,
            "Ended",
            None,
            status,
        )
        .await;
        let sent = scene
            .post(json!({"message": "once more", "task_id": task}))
            .await
            .ok();
        assert_eq!(
            (&sent["status"], &sent["created"]),
            (&json!("running"), &json!(false))
        );
        let task = scene.task(&json!(task)).await;
        assert_eq!(
            (&task["status"], &task["finished_at"], &task["error"]),
            (&json!("running"), &Value::Null, &Value::Null)
        );
    }
}

// T-8
#[tokio::test]
async fn messages_at_the_same_time_all_land() {
    let scene = scene().await;
    let other = Api::start_with(scene.api.pool.clone(), config());
    let task = scene.post(json!({"message": "0"})).await.ok()["task_id"].clone();
    let token = &scene.token;
    let posts = (1..=20).map(|n| {
        let api = if n % 2 == 0 { &scene.api } else { &other };
        let body = json!({"message": n.to_string(), "task_id": task});
        async move { api.post("/api/chat/message", token, body).await.ok() }
    });
    futures::future::join_all(posts).await;
    let texts = scene.texts(&task).await;
    assert_eq!(
        texts.iter().map(|text| text.0).collect::<Vec<_>>(),
        (1..=21).collect::<Vec<_>>()
    );
    assert_eq!(
        texts
            .iter()
            .map(|text| text.1.as_str())
            .collect::<BTreeSet<_>>()
            .len(),
        21
    );
}

// T-9
#[tokio::test]
async fn delegation_can_only_be_disabled() {
    let scene = scene().await;
    for (body, stored) in [
        (
            json!({"message": "a", "disable_delegation": true}),
            json!({"disable_delegation": true}),
        ),
        (
            json!({"message": "a", "disable_delegation": false}),
            json!({}),
        ),
        (
            json!({"message": "a", "metadata": {"a": 1}, "disable_delegation": true}),
            json!({"a": 1, "disable_delegation": true}),
        ),
    ] {
        let sent = scene.post(body).await.ok();
        let metadata: Value =
            sqlx::query_scalar("select source_metadata from tasks where id = $1::uuid")
                .bind(sent["task_id"].as_str())
                .fetch_one(&scene.api.pool)
                .await
                .unwrap();
        assert_eq!(metadata, stored);
    }
}

// T-30, T-35
#[tokio::test]
async fn stop_says_what_it_did() {
    let scene = scene().await;
    let task = scene.post(json!({"message": "a"})).await.ok()["task_id"].clone();
    let path = format!("/api/tasks/{}/stop", task.as_str().unwrap());
    let stop = async |body: Value| scene.api.post(&path, &scene.token, body).await;
    stop(json!({"include": true}))
        .await
        .problem(422, "invalid_body");
    stop(json!([true])).await.problem(422, "invalid_body");
    let receipt = stop(json!({"include_subtasks": true})).await.ok();
    assert_eq!(
        receipt,
        json!({"task_id": task, "status": "stopped", "stopped": 1, "left_alive": 0})
    );
    let bare = scene
        .api
        .send(request(Method::POST, &path, &scene.token, None))
        .await
        .ok();
    assert_eq!(
        bare,
        json!({"task_id": task, "status": "stopped", "stopped": 0, "left_alive": 0})
    );
    let feed = scene
        .api
        .get(
            &format!("/api/tasks/{}/feed", task.as_str().unwrap()),
            &scene.token,
        )
        .await
        .ok();
    let ends = feed["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|item| item["kind"] == "status" && item["status"] == "stopped");
    assert_eq!(ends.count(), 1, "one terminal item: {feed}");
    let missing = format!("/api/tasks/{}/stop", TaskId::new());
    scene
        .api
        .post(&missing, &scene.token, json!({}))
        .await
        .problem(404, "not_found");
}
