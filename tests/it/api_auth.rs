//! P-3, P-6, H-40, H-41: one 401 for every token that is not good, and nothing in a token chooses how it is checked.

use crate::http::{Answer, Api, SECRET, agent, config, task, workspace};
use crate::support;
use axum::body::Body;
use axum::http::{Request, header};
use axum::response::IntoResponse;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::jwk::{Jwk, JwkSet};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use reconvene::api::auth::{Caller, Credential, Role};
use reconvene::config::{self, Config};
use reconvene::domain::ids::WorkspaceId;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const RSA1: &[u8] = include_bytes!("keys/rsa1.pem");
const RSA1_PUBLIC: &[u8] = include_bytes!("keys/rsa1.pub.pem");
const RSA2: &[u8] = include_bytes!("keys/rsa2.pem");
const EC: &[u8] = include_bytes!("keys/ec.pem");
const ED: &[u8] = include_bytes!("keys/ed.pem");

fn now() -> i64 {
    chrono::Utc::now().timestamp()
}

fn claims(workspace: WorkspaceId) -> Value {
    json!({
        "sub": "ada", "ws": workspace, "role": "member", "iss": "reconvene", "aud": "reconvene",
        "iat": now(), "exp": now() + 600,
    })
}

fn hs256(claims: &Value, secret: &[u8]) -> String {
    encode(
        &Header::new(Algorithm::HS256),
        claims,
        &EncodingKey::from_secret(secret).unwrap(),
    )
    .unwrap()
}

/// Header and payload as given, with a signature that is right for HS256 with our secret.
fn signed_with_header(header: &Value, claims: &Value) -> String {
    let good = hs256(claims, SECRET.as_bytes());
    let payload = good.split('.').nth(1).unwrap();
    let message = format!("{}.{payload}", URL_SAFE_NO_PAD.encode(header.to_string()));
    let key = EncodingKey::from_secret(SECRET.as_bytes()).unwrap();
    let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &key, Algorithm::HS256).unwrap();
    format!("{message}.{signature}")
}

#[track_caller]
fn refused(answer: &Answer) -> String {
    answer.problem(401, "unauthenticated");
    assert_eq!(answer.headers[header::WWW_AUTHENTICATE], "Bearer");
    answer.text()
}

// H-40, H-41
#[tokio::test]
async fn every_bad_token_gets_the_same_answer() {
    let api = Api::start().await;
    let (ours, deleted) = (workspace(&api.pool).await, workspace(&api.pool).await);
    sqlx::query("update workspaces set deleted_at = now() where id = $1")
        .bind(deleted)
        .execute(&api.pool)
        .await
        .unwrap();
    let agent = agent(&api.pool, ours, "default", "Lead").await;
    let task = task(&api.pool, ours, agent, "A task").await;
    let good = claims(ours);
    let signed = hs256(&good, SECRET.as_bytes());
    assert_eq!(api.get("/api/tasks/query", &signed).await.status, 200);

    let with = |name: &str, value: Value| {
        let mut claims = good.clone();
        claims[name] = value;
        hs256(&claims, SECRET.as_bytes())
    };
    let without = |name: &str| {
        let mut claims = good.clone();
        claims.as_object_mut().unwrap().shift_remove(name);
        hs256(&claims, SECRET.as_bytes())
    };
    let header = |header: Value| signed_with_header(&header, &good);
    let parts: Vec<&str> = signed.split('.').collect();
    let mut bad = vec![
        ("garbage", "garbage".to_owned()),
        ("empty parts", "..".to_owned()),
        ("four parts", format!("{signed}.x")),
        ("stripped signature", format!("{}.{}.", parts[0], parts[1])),
        ("no signature part", format!("{}.{}", parts[0], parts[1])),
        (
            "changed payload",
            format!(
                "{}.{}.{}",
                parts[0],
                URL_SAFE_NO_PAD.encode(with("role", json!("operator"))),
                parts[2]
            ),
        ),
        (
            "another secret",
            hs256(&good, b"another secret that is long enough too"),
        ),
        ("an empty key", hs256(&good, b"\0")),
        ("the public key as secret", hs256(&good, RSA1_PUBLIC)),
        ("missing alg", header(json!({"typ": "JWT"}))),
        (
            "a critical extension",
            header(json!({"alg": "HS256", "crit": ["exp"]})),
        ),
        (
            "RS256",
            encode(
                &Header::new(Algorithm::RS256),
                &good,
                &EncodingKey::from_rsa_pem(RSA1).unwrap(),
            )
            .unwrap(),
        ),
        (
            "HS512",
            encode(
                &Header::new(Algorithm::HS512),
                &good,
                &EncodingKey::from_secret(SECRET.as_bytes()).unwrap(),
            )
            .unwrap(),
        ),
        ("nbf ahead", with("nbf", json!(now() + 3600))),
        ("nbf as text", with("nbf", json!("soon"))),
        ("expired", with("exp", json!(now() - 120))),
        ("exp text", with("exp", json!("never"))),
        ("exp negative", with("exp", json!(-1))),
        ("issuer", with("iss", json!("somebody"))),
        ("audience", with("aud", json!("somebody"))),
        ("audiences", with("aud", json!(["somebody", "else"]))),
        ("role", with("role", json!("root"))),
        ("ws empty", with("ws", json!(""))),
        ("ws list", with("ws", json!([ours]))),
        ("ws number", with("ws", json!(7))),
        ("ws slug", with("ws", json!("demo"))),
        ("ws unknown", with("ws", json!(WorkspaceId::new()))),
        ("ws deleted", with("ws", json!(deleted))),
        ("sub empty", with("sub", json!(""))),
        ("sub number", with("sub", json!(1))),
    ];
    for alg in [
        "none", "None", "NONE", "nOnE", "", "hs256", "RS256", "ES256", "EdDSA",
    ] {
        bad.push(("alg", header(json!({"alg": alg, "typ": "JWT"}))));
        let unsigned = URL_SAFE_NO_PAD.encode(json!({"alg": alg}).to_string());
        bad.push(("unsigned", format!("{unsigned}.{}.", parts[1])));
    }
    for name in ["exp", "iss", "aud", "sub", "ws", "role"] {
        bad.push((name, without(name)));
    }

    let body = refused(&api.get("/api/tasks/query", "").await);
    for (name, token) in &bad {
        for path in [
            "/api/tasks/query".to_owned(),
            format!("/api/tasks/{task}"),
            format!("/api/tasks/{task}/stream"),
        ] {
            assert_eq!(
                refused(&api.get(&path, token).await),
                body,
                "{name}: {path}"
            );
        }
    }
    for value in [
        format!("Basic {signed}"),
        signed.clone(),
        "Bearer".to_owned(),
        format!("Bearer  {signed} x"),
    ] {
        let request = Request::get("/api/tasks/query")
            .header(header::AUTHORIZATION, &value)
            .body(Body::empty())
            .unwrap();
        assert_eq!(refused(&api.send(request).await), body, "{value}");
    }
    let twice = Request::get("/api/tasks/query")
        .header(header::AUTHORIZATION, format!("Bearer {signed}"))
        .header(header::AUTHORIZATION, format!("Bearer {signed}"))
        .body(Body::empty())
        .unwrap();
    assert_eq!(refused(&api.send(twice).await), body);
}

// H-41: within the leeway, and a very far end, are fine; a header can not override the claim.
#[tokio::test]
async fn good_tokens_pass() {
    let api = Api::start().await;
    let (ours, other) = (workspace(&api.pool).await, workspace(&api.pool).await);
    let agent = agent(&api.pool, other, "default", "Lead").await;
    let foreign = task(&api.pool, other, agent, "A task").await;
    for (name, value) in [
        ("exp", json!(now() - 1)),
        ("exp", json!(99_999_999_999i64)),
        ("nbf", json!(now() + 10)),
        ("aud", json!(["other", "reconvene"])),
    ] {
        let mut claims = claims(ours);
        claims[name] = value;
        api.get("/api/tasks/query", &hs256(&claims, SECRET.as_bytes()))
            .await
            .ok();
    }
    let request = Request::get(format!("/api/tasks/{foreign}"))
        .header(
            header::AUTHORIZATION,
            format!("bearer {}", hs256(&claims(ours), SECRET.as_bytes())),
        )
        .header("x-workspace", other.to_string())
        .header("x-workspace-id", other.to_string())
        .body(Body::empty())
        .unwrap();
    api.send(request).await.problem(404, "not_found");
}

// A workspace that is deleted loses its access within the few seconds that its existence is remembered.
#[tokio::test]
async fn a_new_workspace_works_at_once() {
    let api = Api::start().await;
    let id = WorkspaceId::new();
    let token = api.token(id, Role::Member);
    refused(&api.get("/api/tasks/query", &token).await);
    sqlx::query("insert into workspaces (id, slug, name) values ($1, 'late', 'Late')")
        .bind(id)
        .execute(&api.pool)
        .await
        .unwrap();
    api.get("/api/tasks/query", &token).await.ok();
}

fn jwk(key: &EncodingKey, algorithm: Algorithm, kid: Option<&str>) -> Jwk {
    let mut jwk = Jwk::from_encoding_key(key, algorithm).unwrap();
    jwk.common.key_id = kid.map(str::to_owned);
    jwk
}

fn signed(key: &EncodingKey, algorithm: Algorithm, kid: Option<&str>, claims: &Value) -> String {
    let mut header = Header::new(algorithm);
    header.kid = kid.map(str::to_owned);
    encode(&header, claims, key).unwrap()
}

fn with_keys(algorithm: config::Algorithm, jwks: String) -> Config {
    let mut config = config();
    config.auth.algorithm = algorithm;
    config.auth.jwks = Some(jwks);
    config
}

// P-3, H-40
#[tokio::test]
async fn public_keys_from_a_file() {
    let secret = EncodingKey::from_secret(SECRET.as_bytes()).unwrap();
    let (rsa1, rsa2) = (
        EncodingKey::from_rsa_pem(RSA1).unwrap(),
        EncodingKey::from_rsa_pem(RSA2).unwrap(),
    );
    let (ec, ed) = (
        EncodingKey::from_ec_pem(EC).unwrap(),
        EncodingKey::from_ed_pem(ED).unwrap(),
    );
    let set = JwkSet {
        keys: vec![
            jwk(&rsa1, Algorithm::RS256, Some("r")),
            jwk(&ec, Algorithm::ES256, Some("e")),
            jwk(&ed, Algorithm::EdDSA, Some("d")),
            // A shared secret in a public set must not become one.
            jwk(&secret, Algorithm::HS256, Some("s")),
        ],
    };
    let folder = std::env::temp_dir().join(format!("reconvene-jwks-{}", uuid::Uuid::new_v4()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("jwks.json");
    std::fs::write(&file, serde_json::to_string(&set).unwrap()).unwrap();
    let pool = support::database().await;
    let workspace = workspace(&pool).await;
    let good = claims(workspace);

    for (configured, algorithm, key, kid) in [
        (config::Algorithm::RS256, Algorithm::RS256, &rsa1, "r"),
        (config::Algorithm::ES256, Algorithm::ES256, &ec, "e"),
        (config::Algorithm::EdDSA, Algorithm::EdDSA, &ed, "d"),
    ] {
        let api = Api::start_with(
            pool.clone(),
            with_keys(configured, file.display().to_string()),
        );
        let query = async |token: String| api.get("/api/tasks/query", &token).await;
        query(signed(key, algorithm, Some(kid), &good)).await.ok();
        query(signed(key, algorithm, None, &good)).await.ok();
        for bad in [
            signed(key, algorithm, Some("unknown"), &good),
            signed(&rsa2, Algorithm::RS256, Some(kid), &good),
            signed(&secret, Algorithm::HS256, Some("s"), &good),
            signed(&secret, Algorithm::HS256, Some(kid), &good),
            hs256(&good, RSA1_PUBLIC),
            hs256(&good, SECRET.as_bytes()),
        ] {
            refused(&query(bad).await);
        }
        for (_, other, key, kid) in [
            (0, Algorithm::RS256, &rsa1, "r"),
            (1, Algorithm::ES256, &ec, "e"),
            (2, Algorithm::EdDSA, &ed, "d"),
        ] {
            if other != algorithm {
                refused(&query(signed(key, other, Some(kid), &good)).await);
            }
        }
        let caller = Caller {
            workspace,
            subject: "ada".into(),
            role: Role::Member,
            expires_at: i64::MAX,
            credential: Credential::Token,
        };
        assert!(api.app.auth.is_live(&pool, &caller).await.unwrap());
        let issued = reconvene::api::auth::issue(
            &api.app.config.auth,
            workspace,
            "ada",
            Role::Member,
            std::time::Duration::MAX,
        );
        assert!(issued.is_err(), "only the identity provider can sign");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

// P-3: fetched when first needed, again for a new key id, and not again and again for unknown ones.
#[tokio::test]
async fn public_keys_from_a_url() {
    let (rsa1, rsa2) = (
        EncodingKey::from_rsa_pem(RSA1).unwrap(),
        EncodingKey::from_rsa_pem(RSA2).unwrap(),
    );
    let set = JwkSet {
        keys: vec![jwk(&rsa1, Algorithm::RS256, Some("one"))],
    };
    let (fetches, down) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(1)));
    let provider = axum::Router::new().route(
        "/keys",
        axum::routing::get({
            let (fetches, down) = (fetches.clone(), down.clone());
            async move || {
                fetches.fetch_add(1, Ordering::SeqCst);
                match down.load(Ordering::SeqCst) {
                    0 => axum::Json(set).into_response(),
                    _ => axum::http::StatusCode::BAD_GATEWAY.into_response(),
                }
            }
        }),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/keys", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, provider).await });
    let api = Api::start_with(
        support::database().await,
        with_keys(config::Algorithm::RS256, url),
    );
    let workspace = workspace(&api.pool).await;
    let good = signed(&rsa1, Algorithm::RS256, Some("one"), &claims(workspace));
    let unknown = signed(&rsa2, Algorithm::RS256, Some("two"), &claims(workspace));

    let answer = api.get("/api/tasks/query", &good).await;
    answer.problem(503, "keys_unavailable");
    assert!(answer.headers.contains_key(header::RETRY_AFTER));
    assert_eq!(fetches.load(Ordering::SeqCst), 1);
    down.store(0, Ordering::SeqCst);
    // The provider is asked at most once a second while it has never answered.
    let limit = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while api.get("/api/tasks/query", &good).await.status != 200 {
        assert!(std::time::Instant::now() < limit, "the keys never came");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(fetches.load(Ordering::SeqCst), 2);
    for _ in 0..5 {
        api.get("/api/tasks/query", &good).await.ok();
        refused(&api.get("/api/tasks/query", &unknown).await);
    }
    assert_eq!(
        fetches.load(Ordering::SeqCst),
        2,
        "no fetch within 30 s of the last"
    );
}
