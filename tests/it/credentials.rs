//! `/api/credentials`, and the operator's keys beneath (L-9).

use crate::{
    http::{Api, KEY, config, request, workspace},
    support,
};
use axum::http::Method;
use reconvene::{
    api::auth::Role,
    config::Config,
    domain::ids::{CredentialId, WorkspaceId},
    lifecycle::{
        credentials::resolve,
        reencrypt::{Reencrypted, reencrypt},
    },
    vault::{Vault, VaultError},
};
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use sqlx::PgPool;
use std::collections::BTreeMap;

const VALUE: &str = "s3cr3t-value-é";

async fn make(api: &Api, token: &str, name: &str) -> Value {
    let body = json!({"name": name, "value": VALUE});
    let made = api.post("/api/credentials", token, body).await;
    assert_eq!(made.status, 201, "{}", made.text());
    assert!(!made.text().contains("s3cr3t"), "{}", made.text());
    made.json()
}

fn id(view: &Value) -> CredentialId {
    view["id"].as_str().unwrap().parse().unwrap()
}

async fn value(pool: &PgPool, vault: &Vault, home: WorkspaceId, id: CredentialId) -> String {
    let mut conn = pool.acquire().await.unwrap();
    let values = resolve(&mut conn, vault, home, &[id]).await.unwrap();
    values[0].expose_secret().to_owned()
}

fn keys(list: &[&str]) -> Config {
    let mut config = config();
    config.credentials.keys = list.iter().map(|key| (*key).to_owned().into()).collect();
    config
}

// L-9: in, used, and never out; not in the database as text either.
#[tokio::test]
async fn a_credential_is_shown_without_its_value() {
    let api = Api::start().await;
    let home = workspace(&api.pool).await;
    let token = api.token(home, Role::Admin);
    let made = make(&api, &token, " CRM ").await;
    let expected = json!({"id": made["id"], "name": "CRM", "key_id": "k1", "created_at": made["created_at"],
        "updated_at": made["updated_at"]});
    assert_eq!(made, expected);
    let list = api.get("/api/credentials", &token).await.ok();
    assert_eq!(list, json!({"items": [expected], "next_cursor": null}));
    let rows: Vec<String> =
        sqlx::query_scalar("select c::text || encode(sealed, 'escape') from credentials c")
            .fetch_all(&api.pool)
            .await
            .unwrap();
    assert!(rows.len() == 1 && !rows[0].contains("s3cr3t"), "{rows:?}");
    assert_eq!(
        value(&api.pool, &api.app.vault, home, id(&made)).await,
        VALUE
    );

    let taken = json!({"name": "CRM", "value": "other"});
    api.post("/api/credentials", &token, taken)
        .await
        .problem(409, "credential_name_taken");
    let path = format!("/api/credentials/{}", id(&made));
    let change = json!({"value": "another"});
    let changed = api
        .send(request(Method::PATCH, &path, &token, Some(change)))
        .await;
    assert_eq!(changed.ok()["name"], "CRM");
    assert_eq!(
        value(&api.pool, &api.app.vault, home, id(&made)).await,
        "another"
    );

    let deleted = api.send(request(Method::DELETE, &path, &token, None)).await;
    assert_eq!(deleted.status, 204);
    for method in [Method::DELETE, Method::PATCH] {
        let again = api
            .send(request(
                method,
                &path,
                &token,
                Some(json!({"value": "more"})),
            ))
            .await;
        again.problem(404, "not_found");
    }
}

// L-9: pages neither repeat nor skip.
#[tokio::test]
async fn credentials_are_listed_page_by_page() {
    let api = Api::start().await;
    let token = api.token(workspace(&api.pool).await, Role::Admin);
    for name in ["a", "b", "c"] {
        make(&api, &token, name).await;
    }
    let first = api.get("/api/credentials?limit=2", &token).await.ok();
    let cursor = first["next_cursor"].as_str().unwrap();
    let second = api
        .get(&format!("/api/credentials?limit=2&cursor={cursor}"), &token)
        .await
        .ok();
    let names = |page: &Value| -> Vec<Value> {
        page["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| item["name"].clone())
            .collect()
    };
    assert_eq!(
        (names(&first), names(&second)),
        (vec![json!("a"), json!("b")], vec![json!("c")])
    );
    assert_eq!(second["next_cursor"], Value::Null);
    let bad = api
        .get("/api/credentials?cursor=zzz&limit=2", &token)
        .await
        .problem(422, "invalid_query");
    assert_eq!(bad["errors"][0]["path"], "cursor");
}

// L-9: a fault is named by its path, and no answer repeats a value.
#[tokio::test]
async fn a_faulty_credential_is_refused_by_path() {
    let api = Api::start().await;
    let token = api.token(workspace(&api.pool).await, Role::Admin);
    for (body, path) in [
        (json!({"value": "s3cr3t"}), "name"),
        (json!({"name": "n"}), "value"),
        (json!({"name": "n", "value": null}), "value"),
        (json!({"name": "n", "value": ["s3cr3t"]}), "value"),
        (json!({"name": "n", "value": "s3cr3t\u{0}"}), "value"),
        (json!({"name": "n", "value": "abc"}), "value"),
        (
            json!({"name": "n", "value": "s3cr3t".repeat(2000)}),
            "value",
        ),
        (
            json!({"name": "n", "value": "s3cr3t", "extra": "s3cr3t"}),
            "extra",
        ),
    ] {
        let answer = api.post("/api/credentials", &token, body).await;
        assert_eq!(
            answer.problem(422, "invalid_body")["errors"][0]["path"],
            path
        );
        assert!(!answer.text().contains("s3cr3t"), "{}", answer.text());
    }
    assert_eq!(
        api.get("/api/credentials", &token).await.ok()["items"],
        json!([])
    );
}

// L-9: without a key nothing is stored, and the answer says who is to do what.
#[tokio::test]
async fn without_an_operator_key_nothing_is_stored() {
    let api = Api::start_with(support::database().await, keys(&[]));
    let token = api.token(workspace(&api.pool).await, Role::Admin);
    let body = json!({"name": "n", "value": VALUE});
    let refused = api
        .post("/api/credentials", &token, body)
        .await
        .problem(409, "operator_key_missing");
    let detail = refused["detail"].as_str().unwrap();
    assert!(
        detail.contains("credentials.keys") && detail.contains("CREDENTIALS_KEYS"),
        "{detail}"
    );
    assert_eq!(
        api.get("/api/credentials", &token).await.ok()["items"],
        json!([])
    );
}

// L-9: rotation moves what it can read, leaves and counts the rest, and may be repeated.
#[tokio::test]
async fn values_move_to_the_newest_key() {
    let api = Api::start().await;
    let (home, other) = (workspace(&api.pool).await, workspace(&api.pool).await);
    let first = make(&api, &api.token(home, Role::Admin), "one").await;
    for n in 0..120 {
        make(&api, &api.token(other, Role::Admin), &n.to_string()).await;
    }
    let foreign = make(&api, &api.token(other, Role::Admin), "foreign").await;
    sqlx::query("update credentials set key_id = 'gone' where id = $1")
        .bind(id(&foreign))
        .execute(&api.pool)
        .await
        .unwrap();

    let new = "k2:ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100";
    let both = Vault::from_config(&keys(&[new, KEY]).credentials);
    let unreadable = BTreeMap::from([(VaultError::MissingKey("gone".into()).to_string(), 1)]);
    let expected = |moved| Reencrypted {
        moved,
        unreadable: unreadable.clone(),
    };
    assert_eq!(reencrypt(&api.pool, &both).await.unwrap(), expected(121));
    assert_eq!(reencrypt(&api.pool, &both).await.unwrap(), expected(0));
    let newest = Vault::from_config(&keys(&[new]).credentials);
    assert_eq!(value(&api.pool, &newest, home, id(&first)).await, VALUE);
    let mut conn = api.pool.acquire().await.unwrap();
    let old = resolve(&mut conn, &api.app.vault, home, &[id(&first)])
        .await
        .unwrap_err();
    assert!(old.to_string().contains("key `k2`"), "{old}");
    // Another workspace's id finds nothing, whoever asks.
    let stolen = resolve(&mut conn, &both, other, &[id(&first)])
        .await
        .unwrap_err();
    assert_eq!(
        stolen.to_string(),
        "there is no such credential in this workspace"
    );
}

// L-9: a row that is copied into another workspace can not be read there.
#[tokio::test]
async fn a_copied_row_is_worth_nothing() {
    let api = Api::start().await;
    let (home, thief) = (workspace(&api.pool).await, workspace(&api.pool).await);
    let made = make(&api, &api.token(home, Role::Admin), "one").await;
    sqlx::query("insert into credentials (workspace_id, id, name, key_id, sealed) select $1, id, name, key_id, sealed from credentials")
        .bind(thief)
        .execute(&api.pool)
        .await
        .unwrap();
    let mut conn = api.pool.acquire().await.unwrap();
    let error = resolve(&mut conn, &api.app.vault, thief, &[id(&made)])
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("can not be decrypted"),
        "{error}"
    );
}
