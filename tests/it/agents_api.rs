//! `/api/agents` and `/api/tools` as a client sees them.

use crate::http::{Answer, Api, request};
use axum::http::{HeaderValue, header};
use reconvene::api::auth::Role;
use reconvene::domain::ids::WorkspaceId;
use reconvene::lifecycle::agents::create_workspace;
use serde_json::{Value, json};

/// A caller with a token.
struct Client<'a> {
    api: &'a Api,
    token: String,
}

impl Client<'_> {
    async fn send(&self, line: &str, if_match: &str, body: Option<Value>) -> Answer {
        let (method, path) = line.split_once(' ').unwrap();
        let mut request = request(method.parse().unwrap(), path, &self.token, body);
        if !if_match.is_empty() {
            let value = HeaderValue::from_str(if_match).unwrap();
            request.headers_mut().insert(header::IF_MATCH, value);
        }
        self.api.send(request).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.api.get(path, &self.token).await
    }

    async fn create(&self, body: Value) -> Answer {
        self.api.post("/api/agents", &self.token, body).await
    }
}

fn client(api: &Api, workspace: WorkspaceId, role: Role) -> Client<'_> {
    Client {
        api,
        token: api.token(workspace, role),
    }
}

async fn workspace(api: &Api, slug: &str) -> WorkspaceId {
    create_workspace(&api.pool, slug, slug).await.unwrap()
}

/// The answer's body, after a look at the status and at the ETag, which is the revision.
#[track_caller]
fn agent(answer: &Answer, status: u16, revision: i64) -> Value {
    assert_eq!(answer.status.as_u16(), status, "{}", answer.text());
    assert_eq!(
        answer.headers[header::ETAG],
        format!("\"{revision}\"").as_str()
    );
    let body = answer.json();
    assert_eq!(body["revision"], json!(revision));
    body
}

/// The paths of the fields that a problem names.
fn paths(problem: Value) -> Vec<String> {
    let errors = problem["errors"].as_array().into_iter().flatten();
    errors
        .map(|error| error["path"].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn an_agent_lives_from_creation_to_deletion() {
    // A-1, A-2, P-23
    let api = Api::start().await;
    let home = workspace(&api, "home").await;
    let admin = client(&api, home, Role::Admin);
    let body = r#"{"name": "Writer", "model": {"temperature": 0.30}, "config": {"x": 1.50, "auto_delegate": false}}"#;
    let answer = admin.create(serde_json::from_str(body).unwrap()).await;
    let made = agent(&answer, 201, 1);
    let id = made["id"].as_str().unwrap();
    let address = format!("/api/agents/{id}");
    assert_eq!(answer.headers[header::LOCATION], address.as_str());
    let expected = json!({
        "id": id, "agent_group_id": id, "template": "custom", "version": 1, "revision": 1, "has_unpublished_changes": false,
        "name": "Writer", "instructions": "", "kind": "loop", "tools": [], "phases": [],
        "model": {"provider": null, "name": null, "temperature": 0.3, "max_output_tokens": null, "reasoning": null},
        "output_schema": null, "max_iterations": 50, "is_public": false, "config": made["config"],
        "created_at": made["created_at"], "updated_at": made["updated_at"],
    });
    assert_eq!(made, expected);
    assert!(answer.text().contains(r#""x":1.50"#), "{}", answer.text());
    assert_eq!(
        agent(
            &client(&api, home, Role::Member).get(&address).await,
            200,
            1
        ),
        expected
    );

    let change = Some(json!({"name": "Author"}));
    let edited = agent(
        &admin
            .send(&format!("PATCH {address}"), "\"1\"", change)
            .await,
        200,
        2,
    );
    assert_eq!(
        (&edited["name"], &edited["version"]),
        (&json!("Author"), &json!(1))
    );
    assert_eq!(edited["has_unpublished_changes"], json!(true));
    let publish = format!("POST {address}/publish");
    admin
        .send(&publish, "\"1\"", None)
        .await
        .problem(412, "stale_revision");
    let published = agent(&admin.send(&publish, "W/\"2\"", None).await, 200, 3);
    assert_eq!(
        (&published["version"], &published["has_unpublished_changes"]),
        (&json!(2), &json!(false))
    );

    let deleted = admin.send(&format!("DELETE {address}"), "", None).await;
    assert_eq!(
        (deleted.status.as_u16(), deleted.text().as_str()),
        (204, "")
    );
    admin.get(&address).await.problem(404, "not_found");
}

#[tokio::test]
async fn an_edit_names_the_revision_it_was_made_from() {
    // A-1, A-4, H-47
    let api = Api::start().await;
    let admin = client(&api, workspace(&api, "home").await, Role::Admin);
    let made = agent(
        &admin.create(json!({"name": "A", "draft": true})).await,
        201,
        1,
    );
    assert_eq!(made["version"], Value::Null);
    let patch = format!("PATCH /api/agents/{}", made["id"].as_str().unwrap());
    let edit = async |if_match: &str, body: Value| admin.send(&patch, if_match, Some(body)).await;
    let change = json!({"name": "B"});

    let unnamed = edit("", change.clone())
        .await
        .problem(428, "precondition_required");
    assert!(
        unnamed["detail"].as_str().unwrap().contains("If-Match"),
        "{unnamed}"
    );
    for odd in ["*", "\"x\"", "\"1\", \"2\""] {
        assert_eq!(
            paths(
                edit(odd, change.clone())
                    .await
                    .problem(422, "invalid_header")
            ),
            ["If-Match"]
        );
    }
    edit("\"7\"", change.clone())
        .await
        .problem(412, "stale_revision");
    for (body, path) in [
        (json!({"template": "default"}), "template"),
        (json!({"draft": false}), "draft"),
        (json!({"id": "x"}), "id"),
        (
            json!({"config": {"delegation_enabled": 0}}),
            "config.delegation_enabled",
        ),
        (json!({"instructions": "\u{0}"}), "instructions"),
        (json!([]), ""),
    ] {
        assert_eq!(
            paths(edit("\"1\"", body).await.problem(422, "invalid_body")),
            [path]
        );
    }
    let edited = agent(
        &edit("\"1\"", json!({"template": "custom", "name": "B"})).await,
        200,
        2,
    );
    assert_eq!(edited["name"], json!("B"));
}

#[tokio::test]
async fn members_read_and_admins_write_and_strangers_see_nothing() {
    // P-5, P-6, A-3
    let api = Api::start().await;
    let (home, elsewhere) = (
        workspace(&api, "home").await,
        workspace(&api, "elsewhere").await,
    );
    let (admin, member) = (
        client(&api, home, Role::Admin),
        client(&api, home, Role::Member),
    );
    let stranger = client(&api, elsewhere, Role::Admin);
    agent(
        &stranger
            .create(json!({"name": "Public", "is_public": true}))
            .await,
        201,
        1,
    );
    let listed = member.get("/api/agents").await.ok();
    assert_eq!(
        listed["items"].as_array().map(Vec::len),
        Some(1),
        "not even the stranger's public one"
    );
    assert_eq!(listed["items"][0]["template"], json!("default"));
    let address = format!("/api/agents/{}", listed["items"][0]["id"].as_str().unwrap());

    admin
        .send(&format!("DELETE {address}"), "", None)
        .await
        .problem(409, "default_agent_is_kept");
    member
        .create(json!({"name": "A"}))
        .await
        .problem(403, "forbidden");
    for (line, body) in [
        (format!("PATCH {address}"), Some(json!({"name": "A"}))),
        (format!("DELETE {address}"), None),
        (format!("POST {address}/publish"), None),
    ] {
        for if_match in ["", "\"1\""] {
            member
                .send(&line, if_match, body.clone())
                .await
                .problem(403, "forbidden");
            stranger
                .send(&line, if_match, body.clone())
                .await
                .problem(404, "not_found");
        }
    }
    stranger.get(&address).await.problem(404, "not_found");
    agent(&admin.get(&address).await, 200, 1);
}

#[tokio::test]
async fn agents_and_tools_are_listed_in_pages() {
    // P-23, L-1
    let api = Api::start().await;
    let admin = client(&api, workspace(&api, "home").await, Role::Admin);
    for name in ["B", "A"] {
        admin.create(json!({"name": name})).await.ok();
    }
    let names = |page: &Value| -> Vec<String> {
        let items = page["items"].as_array().unwrap();
        items
            .iter()
            .map(|item| item["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let first = admin.get("/api/agents?limit=2").await.ok();
    assert_eq!(names(&first), ["Assistant", "B"]);
    let cursor = first["next_cursor"].as_str().unwrap();
    let second = admin
        .get(&format!("/api/agents?limit=2&cursor={cursor}"))
        .await
        .ok();
    assert_eq!(
        (names(&second), &second["next_cursor"]),
        (vec!["A".to_owned()], &Value::Null)
    );
    for (query, name) in [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("cursor=x", "cursor"),
        ("page=2", "page"),
    ] {
        let refused = admin.get(&format!("/api/agents?{query}")).await;
        assert_eq!(paths(refused.problem(422, "invalid_query")), [name]);
    }

    let tools = admin.get("/api/tools").await.ok();
    for tool in tools["items"].as_array().unwrap() {
        assert_eq!(tool["schema"]["type"], json!("object"), "{tool}");
        assert!(
            ["parallel", "exclusive", "by_arguments"]
                .contains(&tool["concurrency"].as_str().unwrap()),
            "{tool}"
        );
    }
    assert!(names(&tools).contains(&"ask_user".to_owned()));
}

#[tokio::test]
async fn a_name_that_means_nobody_is_saved_as_written_with_a_warning() {
    // A-26
    let api = Api::start().await;
    let (home, elsewhere) = (
        workspace(&api, "home").await,
        workspace(&api, "elsewhere").await,
    );
    let (admin, stranger) = (
        client(&api, home, Role::Admin),
        client(&api, elsewhere, Role::Admin),
    );
    let listed = |name: &str, public: bool| {
        let profile = json!({"delegation_profile": {"description": "helps"}});
        json!({"name": name, "is_public": public, "config": profile})
    };
    for name in ["Ada", "Twin", "Twin"] {
        admin.create(listed(name, false)).await.ok();
    }
    for (name, public) in [("Ada", true), ("Lent", true), ("Hidden", false)] {
        stranger.create(listed(name, public)).await.ok();
    }
    let warnings = |saved: &Value| -> Vec<String> {
        let warnings = saved["warnings"].as_array().into_iter().flatten();
        let told = warnings.map(|one| {
            let reason = one["reason"].as_str().unwrap();
            format!(
                "{} {}",
                one["path"].as_str().unwrap(),
                reason.split('`').nth(1).unwrap()
            )
        });
        told.collect()
    };
    let text = "Ask @Ada, @Lent, @Lead, @Twin or @Hidden; write to me@x.org.";
    let phases = json!([{"name": "P", "instructions": "Ask @Noone."}]);
    let body = json!({"name": "Lead", "instructions": text, "phases": phases});
    let answer = admin.create(body).await;
    let made = agent(&answer, 201, 1);
    let unknown = [
        "instructions @Lead",
        "instructions @Twin",
        "instructions @Hidden",
        "phases[0].instructions @Noone",
    ];
    assert_eq!(warnings(&made), unknown);
    assert_eq!(made["instructions"], text);
    let address = format!("/api/agents/{}", made["id"].as_str().unwrap());
    let seen = admin.get(&address).await.ok();
    assert_eq!(
        (&seen["instructions"], seen.get("warnings")),
        (&json!(text), None)
    );

    let patch = async |revision: i64, change: Value| {
        let line = format!("PATCH {address}");
        admin
            .send(&line, &format!("\"{revision}\""), Some(change))
            .await
            .ok()
    };
    let fewer = json!({"instructions": "Ask @Ada, @Lent.", "phases": []});
    assert_eq!(warnings(&patch(1, fewer).await), Vec::<String>::new());
    // Without a delegate tool there is no roster to look into.
    for alone in [
        json!({"config": {"auto_delegate": false}}),
        json!({"config": {"auto_delegate": null}, "tools": ["ask_user"]}),
    ] {
        let seen = admin.get(&address).await.ok();
        let saved = patch(seen["revision"].as_i64().unwrap(), alone).await;
        assert_eq!(
            warnings(&saved),
            ["instructions @Ada", "instructions @Lent"]
        );
    }
    let published = admin
        .send(&format!("POST {address}/publish"), "", None)
        .await;
    assert_eq!(warnings(&published.ok()).len(), 2);
}
