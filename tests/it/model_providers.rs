//! Model providers of workspaces: `/api/model-providers`, and whose key a model is asked with (L-10, A-25).

use crate::{
    engine::Engine,
    http::{Answer, Api, KEY, config, request, workspace},
    stub_llm::Reply,
    support,
};
use axum::http::{Method, Request, header};
use reconvene::{
    api::auth::Role,
    config::Config,
    domain::{
        agent::AgentDefinition,
        ids::{AgentId, WorkspaceId},
        model_provider::{ModelProvider, ProviderKind},
        task::TaskStatus::{Completed, Failed},
    },
    lifecycle::{
        agents::{create as create_agent, create_workspace},
        model_providers::create,
        reencrypt::reencrypt,
        submit::Recipient,
    },
    net::Reach,
    vault::Vault,
};
use serde_json::{Value, json};

const PATH: &str = "/api/model-providers";
const SECRET: &str = "sk-s3cr3t-0123456789-9f3a";

async fn post(api: &Api, token: &str, body: Value) -> Answer {
    let answer = api.post(PATH, token, body).await;
    assert!(!answer.text().contains("s3cr3t"), "{}", answer.text());
    answer
}

async fn patch(api: &Api, token: &str, made: &Value, etag: i64, change: Value) -> Answer {
    let path = format!("{PATH}/{}", made["id"].as_str().unwrap());
    let mut request: Request<_> = request(Method::PATCH, &path, token, Some(change));
    let etag = format!("\"{etag}\"").parse().unwrap();
    request.headers_mut().insert(header::IF_MATCH, etag);
    let answer = api.send(request).await;
    assert!(!answer.text().contains("s3cr3t"), "{}", answer.text());
    answer
}

// L-10, L-9, P-23: the key goes in and never comes out; of it only its end is shown.
#[tokio::test]
async fn a_provider_is_shown_without_its_key() {
    let api = Api::start().await;
    let token = api.token(workspace(&api.pool).await, Role::Admin);
    let body = json!({"name": "ours", "kind": "openai", "base_url": "https://llm.example.com/v1", "key": SECRET,
        "model": "m", "is_default": true});
    let answer = post(&api, &token, body.clone()).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.headers["etag"]),
        (201, &"\"1\"".parse().unwrap())
    );
    let made = answer.json();
    let id = made["id"].as_str().unwrap();
    let expected = json!({"id": id, "name": "ours", "kind": "openai", "base_url": "https://llm.example.com/v1",
        "model": "m", "is_default": true, "has_key": true, "key_hint": "9f3a", "revision": 1,
        "created_at": made["created_at"], "updated_at": made["updated_at"]});
    assert_eq!(made, expected);
    assert_eq!(answer.headers[header::LOCATION], format!("{PATH}/{id}"));
    assert_eq!(
        api.get(&format!("{PATH}/{id}"), &token).await.ok(),
        expected
    );
    let list = api.get(PATH, &token).await.ok();
    assert_eq!(list, json!({"items": [expected], "next_cursor": null}));
    let row: String =
        sqlx::query_scalar("select p::text || encode(sealed, 'escape') from model_providers p")
            .fetch_one(&api.pool)
            .await
            .unwrap();
    assert!(!row.contains("s3cr3t"), "{row}");
    post(&api, &token, body)
        .await
        .problem(409, "model_provider_name_taken");

    // Another default: there is one at a time.
    let other =
        json!({"name": "other", "kind": "gemini", "key": "short-s3cr3t", "is_default": true});
    let other = post(&api, &token, other).await.ok();
    assert_eq!(
        (&other["is_default"], &other["key_hint"]),
        (&json!(true), &Value::Null)
    );
    let first = api.get(&format!("{PATH}/{id}"), &token).await.ok();
    assert_eq!(
        (&first["is_default"], &first["revision"]),
        (&json!(false), &json!(2))
    );
    let back = patch(&api, &token, &made, 2, json!({"is_default": true})).await;
    assert_eq!(
        (&back.ok()["is_default"], &back.ok()["has_key"]),
        (&json!(true), &json!(true))
    );

    // H-47, and a stored key goes nowhere else.
    patch(&api, &token, &made, 2, json!({"model": "x"}))
        .await
        .problem(412, "stale_revision");
    let moved = json!({"base_url": "https://elsewhere.example.com"});
    let refused = patch(&api, &token, &made, 3, moved.clone())
        .await
        .problem(422, "invalid_body");
    assert_eq!(refused["errors"][0]["path"], "key");
    let mut with_key = moved;
    with_key["key"] = json!("new-s3cr3t");
    let changed = patch(&api, &token, &made, 3, with_key).await.ok();
    assert_eq!(
        (&changed["key_hint"], &changed["has_key"]),
        (&Value::Null, &json!(true))
    );
    let without = patch(&api, &token, &made, 4, json!({"key": null}))
        .await
        .ok();
    assert_eq!(without["has_key"], false);
    let path = format!("{PATH}/{id}");
    let unguarded = request(Method::PATCH, &path, &token, Some(json!({})));
    api.send(unguarded)
        .await
        .problem(428, "precondition_required");
    let deleted = api.send(request(Method::DELETE, &path, &token, None)).await;
    assert_eq!(deleted.status, 204);
    api.get(&path, &token).await.problem(404, "not_found");
}

// L-10, L-3: what can not work is refused by the name of its field, and no answer repeats a key.
#[tokio::test]
async fn a_faulty_provider_is_refused_by_path() {
    let api = Api::start().await;
    let token = api.token(workspace(&api.pool).await, Role::Admin);
    for (change, path) in [
        (json!({"name": null}), "name"),
        (json!({"kind": "azure"}), "kind"),
        (json!({"base_url": "h"}), "base_url"),
        (json!({"base_url": "ftp://h"}), "base_url"),
        (json!({"base_url": "https://u:s3cr3t@h"}), "base_url"),
        (json!({"base_url": "http://127.0.0.1:9/v1"}), "base_url"),
        (
            json!({"base_url": "http://[::ffff:169.254.169.254]/"}),
            "base_url",
        ),
        (json!({"base_url": null, "key": null}), "key"),
        (json!({"key": "s3cr3t\u{7f}\n\u{1}"}), "key"),
        (json!({"extra": 1}), "extra"),
    ] {
        let mut body =
            json!({"name": "n", "kind": "openai", "base_url": "https://h", "key": SECRET});
        body.as_object_mut()
            .unwrap()
            .extend(change.as_object().unwrap().clone());
        let answer = post(&api, &token, body).await.problem(422, "invalid_body");
        assert_eq!(answer["errors"][0]["path"], path, "{change}");
    }
    assert_eq!(api.get(PATH, &token).await.ok()["items"], json!([]));

    // L-9: without a key of the operator nothing is stored.
    let mut keyless = config();
    keyless.credentials.keys = vec![];
    let api = Api::start_with(support::database().await, keyless);
    let token = api.token(workspace(&api.pool).await, Role::Admin);
    let body = json!({"name": "n", "kind": "openai", "key": SECRET});
    post(&api, &token, body)
        .await
        .problem(409, "operator_key_missing");
    assert_eq!(api.get(PATH, &token).await.ok()["items"], json!([]));
}

// L-10, A-1: an agent names a provider that is there, its workspace's or a deployment's.
#[tokio::test]
async fn an_agent_names_a_provider_that_is_there() {
    let api = Api::start().await;
    let (ours, theirs) = (workspace(&api.pool).await, workspace(&api.pool).await);
    let token = api.token(ours, Role::Admin);
    let named = |provider: &str| json!({"name": "A", "model": {"provider": provider}});
    let theirs = api.token(theirs, Role::Admin);
    let foreign = json!({"name": "corp", "kind": "openai", "key": SECRET});
    post(&api, &theirs, foreign).await.ok();
    for (provider, status) in [
        ("gemini", 201),
        ("offline", 201),
        ("corp", 422),
        ("acme", 422),
    ] {
        let answer = api.post("/api/agents", &token, named(provider)).await;
        assert_eq!(answer.status, status, "{provider}");
        if status == 422 {
            let problem = answer.problem(422, "invalid_body");
            assert_eq!(problem["errors"][0]["path"], "model.provider");
        }
    }
    let own = post(
        &api,
        &token,
        json!({"name": "acme", "kind": "gemini", "key": SECRET}),
    )
    .await
    .ok();
    let agent = api.post("/api/agents", &token, named("acme")).await.ok();
    assert_eq!(agent["model"]["provider"], "acme");
    // What has gone since does not stand in the way of other changes.
    let path = format!("{PATH}/{}", own["id"].as_str().unwrap());
    api.send(request(Method::DELETE, &path, &token, None)).await;
    let path = format!("/api/agents/{}", agent["id"].as_str().unwrap());
    let mut etag = agent["revision"].clone();
    for (change, status) in [
        (json!({"model": {"provider": "corp"}}), 422),
        (json!({"instructions": "x"}), 200),
        (json!({"model": {"provider": "openai"}}), 200),
        (json!({"model": {"provider": "acme"}}), 422),
    ] {
        let mut edit = request(Method::PATCH, &path, &token, Some(change));
        let revision = etag.to_string().parse().unwrap();
        edit.headers_mut().insert(header::IF_MATCH, revision);
        let answer = api.send(edit).await;
        assert_eq!(answer.status, status, "{}", answer.text());
        if status == 200 {
            etag = answer.json()["revision"].clone();
        }
    }
}

fn provider(name: &str, base_url: &str) -> ModelProvider {
    ModelProvider {
        name: name.into(),
        kind: ProviderKind::OpenAi,
        base_url: Some(base_url.into()),
        model: Some("own-model".into()),
        is_default: false,
    }
}

/// A deployment with a key of its own, where workspaces may name the stub's address.
async fn engine() -> Engine {
    let engine = Engine::scripted_with(|config| {
        config.llm.api_key = Some("the-deployments".into());
        config.credentials.keys = vec![KEY.into()];
        config.http.allow_private_addresses = true;
    });
    engine.await.running()
}

async fn add(engine: &Engine, workspace: WorkspaceId, provider: ModelProvider, key: &str) {
    let vault = Vault::from_config(&engine.config.credentials);
    let new = (provider, Some(key.to_owned().into()));
    create(&engine.pool, &vault, Reach::Everywhere, workspace, &new)
        .await
        .unwrap();
}

async fn agent(engine: &Engine, workspace: WorkspaceId, name: &str, asks: Option<&str>) -> AgentId {
    let mut definition = AgentDefinition {
        name: name.into(),
        instructions: format!("You are {name}."),
        is_public: true,
        ..AgentDefinition::default()
    };
    definition.model.provider = asks.map(str::to_owned);
    create_agent(&engine.pool, workspace, &definition)
        .await
        .unwrap()
        .id
}

/// Posts to the agent; how its task ends, and what the provider was asked with: the key, and the model.
async fn asked(engine: &Engine, to: AgentId) -> (String, Vec<(String, Value)>) {
    let before = engine.llm().requests().len();
    let task = engine
        .submit(engine.message(Recipient::Agent(to), "go"))
        .await
        .task;
    let (_, output) = engine.end(task).await;
    (output, seen(engine, before))
}

fn seen(engine: &Engine, before: usize) -> Vec<(String, Value)> {
    let requests = engine.llm().requests();
    let asked = requests[before..].iter().map(|request| {
        let key = request.headers.get("authorization");
        let key = key.map(|key| key.to_str().unwrap().to_owned());
        (key.unwrap_or_default(), request.body["model"].clone())
    });
    asked.collect()
}

// L-10: by name the workspace's own before the deployment's; where none is named, its default.
#[tokio::test(flavor = "multi_thread")]
async fn the_workspaces_own_provider_answers() {
    let engine = engine().await;
    let url = engine.llm().base_url().to_owned();
    let home = engine.workspace();
    let openai = agent(&engine, home, "A", Some("openai")).await;
    let unnamed = agent(&engine, home, "B", None).await;
    let deployment = ("Bearer the-deployments".to_owned(), json!("stub"));
    assert_eq!(
        asked(&engine, openai).await.1,
        std::slice::from_ref(&deployment)
    );
    add(&engine, home, provider("corp", &url), "key-of-corp").await;
    let corp = agent(&engine, home, "C", Some("corp")).await;
    let own = |key: &str| (format!("Bearer {key}"), json!("own-model"));
    for (to, expected) in [
        (openai, deployment.clone()),
        (unnamed, deployment.clone()),
        (corp, own("key-of-corp")),
    ] {
        assert_eq!(asked(&engine, to).await.1, [expected]);
    }
    add(&engine, home, provider("openai", &url), "our-openai").await;
    let default = ModelProvider {
        is_default: true,
        ..provider("default", &url)
    };
    add(&engine, home, default, "our-default").await;
    assert_eq!(asked(&engine, openai).await.1, [own("our-openai")]);
    assert_eq!(asked(&engine, unnamed).await.1, [own("our-default")]);
    // T-17: what is billed is what was asked.
    let models = "select count(*) from steps where model = 'own-model'";
    assert_eq!(engine.count(models).await, 3);
    // A provider without a key is asked with none, not with the deployment's.
    sqlx::query("update model_providers set key_id = null, sealed = null")
        .execute(&engine.pool)
        .await
        .unwrap();
    assert_eq!(
        asked(&engine, corp).await.1,
        [(String::new(), json!("own-model"))]
    );
    // Gone, or under a key of the operator that is gone: the task says so, and nobody is asked.
    add(&engine, home, provider("lost", &url), "lost").await;
    let lost = agent(&engine, home, "D", Some("lost")).await;
    sqlx::query("update model_providers set key_id = 'gone' where name = 'lost'")
        .execute(&engine.pool)
        .await
        .unwrap();
    sqlx::query("delete from model_providers where name = 'corp'")
        .execute(&engine.pool)
        .await
        .unwrap();
    for (to, told) in [(lost, "key `gone`"), (corp, "`corp`")] {
        let (output, asked) = asked(&engine, to).await;
        assert!(
            output.contains("model_error") && output.contains(told),
            "{output}"
        );
        assert_eq!(asked, []);
    }
    engine.close().await;
}

// a decision is asked for once more where it was asked, with the workspace's key.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_asks_the_workspaces_own_provider() {
    let engine = engine().await;
    let url = engine.llm().base_url().to_owned();
    let home = engine.workspace();
    add(&engine, home, provider("corp", &url), "key-of-corp").await;
    let corp = agent(&engine, home, "C", Some("corp")).await;
    let message = engine.message(Recipient::Agent(corp), "go");
    let task = engine.submit(message).await.task;
    engine.end(task).await;
    let mut settings = config();
    settings.llm = engine.config.llm.clone();
    settings.http = engine.config.http.clone();
    let api = Api::start_with(engine.pool.clone(), settings);
    let token = api.token(home, Role::Admin);
    let before = engine.llm().requests().len();
    let path = format!("/api/admin/decision-logs/{task}.1/replay");
    let replay = async |body| api.post(&path, &token, body).await;
    assert_eq!(
        replay(json!({})).await.ok()["replayed"]["model"],
        "own-model"
    );
    let other = json!({"model": {"provider": "openai"}});
    assert_eq!(replay(other).await.ok()["replayed"]["model"], "stub");
    let unknown = replay(json!({"model": {"provider": "corpse"}})).await;
    let refused = unknown.problem(422, "invalid_body");
    assert_eq!(refused["errors"][0]["path"], "model.provider");
    assert_eq!(
        seen(&engine, before),
        [
            ("Bearer key-of-corp".to_owned(), json!("own-model")),
            ("Bearer the-deployments".to_owned(), json!("stub")),
        ]
    );
    engine.close().await;
}

// an agent that another workspace lends works with the data, the providers, the keys and the bill of the caller.
#[tokio::test(flavor = "multi_thread")]
async fn a_lent_agent_is_asked_with_the_callers_key() {
    let engine = engine().await;
    let url = engine.llm().base_url().to_owned();
    let lender = create_workspace(&engine.pool, "lender", "Lender")
        .await
        .unwrap();
    let lenders_default = ModelProvider {
        is_default: true,
        ..provider("default", &url)
    };
    add(&engine, lender, provider("corp", &url), "corp-of-lender").await;
    add(&engine, lender, lenders_default, "default-of-lender").await;
    let named = agent(&engine, lender, "Named", Some("corp")).await;
    let unnamed = agent(&engine, lender, "Unnamed", None).await;
    // The lender's log-in data, tools and the like stay where they are, too: nothing of the lender's changes below.
    let before = rows(&engine, lender).await;

    let run = async |children: [AgentId; 2]| {
        let prompts = children.map(|id| json!({"agent_group_id": id, "prompt": "do it"}));
        engine
            .llm()
            .script(move |r| match (r.first_user(), r.turn()) {
                ("go", 0) => Reply::call("delegate_tasks", json!({"tasks": prompts})),
                ("go", _) => Reply::text("end"),
                _ => Reply::text("did it"),
            });
        let before = engine.llm().requests().len();
        let task = engine.post("go").await;
        assert_eq!(engine.end(task).await.0, Completed);
        let requests = engine.llm().requests();
        let of = |name: &str| {
            let system = format!("You are {name}.");
            let found = requests[before..]
                .iter()
                .find(|r| r.system().contains(&system));
            found.map(|r| r.headers["authorization"].to_str().unwrap().to_owned())
        };
        (task, [of("Named"), of("Unnamed")])
    };
    // The caller has no provider `corp`: the lender's is not taken in its place.
    let (task, keys) = run([named, unnamed]).await;
    assert_eq!(keys, [None, Some("Bearer the-deployments".into())]);
    let failed = engine.children(task).await[0];
    assert_eq!(engine.status(failed).await, Failed);

    let home = engine.workspace();
    add(&engine, home, provider("corp", &url), "corp-of-caller").await;
    let callers_default = ModelProvider {
        is_default: true,
        ..provider("default", &url)
    };
    add(&engine, home, callers_default, "default-of-caller").await;
    let (task, keys) = run([named, unnamed]).await;
    let expected = ["corp-of-caller", "default-of-caller"].map(|key| Some(format!("Bearer {key}")));
    assert_eq!(keys, expected);
    for child in engine.children(task).await {
        let (usage, home_of_bill): (i64, uuid::Uuid) = sqlx::query_as(
            "select coalesce(sum(input_tokens + output_tokens), 0)::bigint, min(workspace_id::text)::uuid from steps
             where task_id = $1",
        )
        .bind(child.0)
        .fetch_one(&engine.pool)
        .await
        .unwrap();
        assert!(usage > 0);
        assert_eq!(home_of_bill, home.0);
    }
    let all = engine.llm().requests();
    let lenders = all
        .iter()
        .filter(|r| format!("{:?}", r.headers).contains("of-lender"));
    assert_eq!(lenders.count(), 0);
    assert_eq!(rows(&engine, lender).await, before);
    engine.close().await;
}

/// How many rows of each table are the workspace's.
async fn rows(engine: &Engine, workspace: WorkspaceId) -> Vec<(String, i64)> {
    let tables: Vec<String> = sqlx::query_scalar(
        "select table_name::text from information_schema.columns
         where table_schema = 'public' and column_name = 'workspace_id' order by 1",
    )
    .fetch_all(&engine.pool)
    .await
    .unwrap();
    let mut counts = Vec::new();
    for table in tables {
        let sql = format!("select count(*) from {table} where workspace_id = $1");
        let count: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
            .bind(workspace.0)
            .fetch_one(&engine.pool)
            .await
            .unwrap();
        counts.push((table, count));
    }
    counts
}

// L-3: a workspace's provider on a private address is not asked, whether it is named by address or by name; the
// operator's own address is.
#[tokio::test(flavor = "multi_thread")]
async fn a_private_address_is_not_asked_for_a_workspace() {
    let mut engine =
        Engine::scripted_with(|config| config.credentials.keys = vec![KEY.into()]).await;
    engine.resume();
    let home = engine.workspace();
    let url = engine.llm().base_url().to_owned();
    let by_name = url.replace("127.0.0.1", "localhost");
    assert_ne!(url, by_name);
    for (name, url) in [("address", &url), ("name", &by_name)] {
        add(&engine, home, provider(name, url), "key").await;
        let to = agent(&engine, home, name, Some(name)).await;
        let (output, asked) = asked(&engine, to).await;
        assert!(output.contains("http.allow_private_addresses"), "{output}");
        assert_eq!(asked, []);
    }
    let own = agent(&engine, home, "deployment", None).await;
    assert_eq!(asked(&engine, own).await.0, "ok");
    engine.close().await;
}

// L-9: keys of providers move with the credentials to the operator's newest key.
#[tokio::test(flavor = "multi_thread")]
async fn keys_of_providers_move_to_the_newest_key() {
    let engine = engine().await;
    let home = engine.workspace();
    let url = engine.llm().base_url().to_owned();
    add(&engine, home, provider("corp", &url), "key-of-corp").await;
    let mut keyless = provider("free", &url);
    keyless.model = None;
    let vault = Vault::from_config(&engine.config.credentials);
    create(
        &engine.pool,
        &vault,
        Reach::Everywhere,
        home,
        &(keyless, None),
    )
    .await
    .unwrap();
    let new = "k2:ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100";
    let mut config: Config = engine.config.clone();
    config.credentials.keys = vec![new.into(), KEY.into()];
    let both = Vault::from_config(&config.credentials);
    assert_eq!(reencrypt(&engine.pool, &both).await.unwrap().moved, 1);
    assert_eq!(reencrypt(&engine.pool, &both).await.unwrap().moved, 0);
    let under_new = "select count(*) from model_providers where key_id = 'k2'";
    assert_eq!(engine.count(under_new).await, 1);
    let mut engine = engine;
    engine.kill().await;
    engine.config.credentials.keys = vec![new.into()];
    engine.resume();
    let corp = agent(&engine, home, "C", Some("corp")).await;
    assert_eq!(
        asked(&engine, corp).await.1,
        [("Bearer key-of-corp".into(), json!("own-model"))]
    );
    engine.close().await;
}

// T-16: an agent's schema reaches the model, in words and in the provider's form; only the form differs by provider.
#[tokio::test(flavor = "multi_thread")]
async fn the_schema_of_the_answer_reaches_the_model() {
    let engine = engine().await;
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let definition = AgentDefinition {
        name: "Formal".into(),
        tools: vec!["no_such_tool".into()],
        output_schema: Some(schema.clone()),
        ..AgentDefinition::default()
    };
    let formal = create_agent(&engine.pool, engine.workspace(), &definition)
        .await
        .unwrap()
        .id;
    asked(&engine, formal).await;
    let request = engine.llm().requests().pop().unwrap();
    assert!(
        request.system().contains(&schema.to_string()),
        "{}",
        request.system()
    );
    assert_eq!(request.body["tools"], Value::Null);
    assert_eq!(
        request.body["response_format"]["json_schema"]["schema"],
        schema
    );
    engine.close().await;
}
