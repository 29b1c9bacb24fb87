//! P-4, P-6: local users, their sessions, API keys, and who may hand out what.

use crate::http::{Answer, Api, config, request, workspace};
use crate::support;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, header};
use reconvene::api::auth::Role;
use reconvene::domain::ids::WorkspaceId;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const PASSWORD: &str = "correct horse battery";

async fn slug(api: &Api, workspace: WorkspaceId) -> String {
    sqlx::query_scalar("select slug from workspaces where id = $1")
        .bind(workspace)
        .fetch_one(&api.pool)
        .await
        .unwrap()
}

/// An admin's token, and the slug of a workspace with the member `ada` of this role.
async fn with_ada(api: &Api, role: &str) -> (String, String, Value) {
    let workspace = workspace(&api.pool).await;
    let token = api.token(workspace, Role::Operator);
    let body = json!({"username": "Ada", "password": PASSWORD, "role": role});
    let ada = api.post("/api/members", &token, body).await.ok();
    (token, slug(api, workspace).await, ada)
}

async fn log_in(api: &Api, slug: &str, username: &str, password: &str) -> Answer {
    let body = json!({"workspace": slug, "username": username, "password": password});
    api.post("/api/auth/login", "", body).await
}

/// A request with a cookie and maybe a CSRF token.
async fn with_cookie(
    api: &Api,
    method: Method,
    path: &str,
    cookie: &str,
    csrf: Option<&str>,
    body: Option<Value>,
) -> Answer {
    let mut request = request(method, path, "", body);
    let headers = request.headers_mut();
    headers.insert(header::COOKIE, cookie.parse().unwrap());
    if let Some(csrf) = csrf {
        headers.insert("x-csrf-token", csrf.parse().unwrap());
    }
    api.send(request).await
}

/// What a browser keeps of `Set-Cookie`.
fn kept(headers: &HeaderMap) -> String {
    let set = headers[header::SET_COOKIE].to_str().unwrap();
    set.split(';').next().unwrap().to_owned()
}

async fn dump(api: &Api) -> String {
    let mut text = String::new();
    for table in ["members", "sessions", "api_keys"] {
        let sql = sqlx::AssertSqlSafe(format!("select t::text from {table} t"));
        let rows: Vec<String> = sqlx::query_scalar(sql).fetch_all(&api.pool).await.unwrap();
        text.push_str(&rows.join("\n"));
    }
    text
}

// P-4
#[tokio::test]
async fn a_log_in_lives_in_a_cookie_and_ends_with_log_out() {
    let api = Api::start().await;
    let (_, slug, ada) = with_ada(&api, "admin").await;
    let answer = log_in(&api, &slug, "ADA", PASSWORD).await;
    let me = answer.ok();
    assert_eq!(
        (
            &me["subject"],
            &me["role"],
            &me["credential"],
            &me["member_id"]
        ),
        (
            &json!("ada"),
            &json!("admin"),
            &json!("session"),
            &ada["id"]
        )
    );
    assert_eq!(me["workspace"]["slug"], slug.as_str());
    let set = answer.headers[header::SET_COOKIE].to_str().unwrap();
    for part in ["HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=43200"] {
        assert!(set.contains(part), "{set}");
    }
    assert!(!set.contains("Secure"), "{set}");
    let cookie = kept(&answer.headers);
    let secret = cookie.split('=').nth(1).unwrap();
    assert!(!answer.text().contains(secret), "pages never see it");
    let rows = dump(&api).await;
    assert!(!rows.contains(secret) && !rows.contains(PASSWORD), "{rows}");
    assert!(rows.contains("$argon2id$"));

    let csrf = me["csrf_token"].as_str().unwrap().to_owned();
    let seen = with_cookie(&api, Method::GET, "/api/auth/me", &cookie, None, None).await;
    assert_eq!(seen.ok(), me);
    // Writes want the token, reads do not.
    let key = json!({"name": "k", "role": "member"});
    let post = async |csrf: Option<&str>| {
        with_cookie(
            &api,
            Method::POST,
            "/api/api-keys",
            &cookie,
            csrf,
            Some(key.clone()),
        )
        .await
    };
    post(None).await.problem(403, "csrf_failed");
    post(Some("guess")).await.problem(403, "csrf_failed");
    assert_eq!(post(Some(&csrf)).await.ok()["created_by"], "ada");
    let out = async |csrf: Option<&str>| {
        with_cookie(&api, Method::POST, "/api/auth/logout", &cookie, csrf, None).await
    };
    out(None).await.problem(403, "csrf_failed");
    let left = out(Some(&csrf)).await;
    assert_eq!(left.status, 204);
    assert!(
        left.headers[header::SET_COOKIE]
            .to_str()
            .unwrap()
            .contains("Max-Age=0")
    );
    with_cookie(&api, Method::GET, "/api/auth/me", &cookie, None, None)
        .await
        .problem(401, "unauthenticated");
}

// P-4: whoever is not let in learns nothing, neither from the words nor from the time.
#[tokio::test]
async fn an_unknown_name_answers_like_a_wrong_password() {
    let mut config = config();
    config.limits.login_attempts_per_account_per_minute = 1000;
    let api = Api::start_with(support::database().await, config);
    let (_, slug, _) = with_ada(&api, "member").await;
    let mut shortest = Vec::new();
    let mut text = None;
    for (slug, name) in [
        (slug.as_str(), "ada"),
        (&slug, "bob"),
        ("nowhere", "ada"),
        ("", ""),
    ] {
        let mut times = Vec::new();
        for _ in 0..4 {
            let asked = Instant::now();
            let answer = log_in(&api, slug, name, "wrong horse battery").await;
            times.push(asked.elapsed());
            answer.problem(401, "login_failed");
            assert!(!answer.headers.contains_key(header::SET_COOKIE));
            assert_eq!(*text.get_or_insert_with(|| answer.text()), answer.text());
        }
        shortest.push(times.into_iter().min().unwrap());
    }
    // Without a hash to check, the answer would take a hundredth of the time.
    assert!(shortest[0] > Duration::from_millis(5), "{shortest:?}");
    for unknown in &shortest[1..] {
        assert!(*unknown > shortest[0] / 3, "{shortest:?}");
    }
}

// P-4, P-8
#[tokio::test]
async fn log_ins_are_counted_by_account_and_by_source() {
    let mut config = config();
    config.limits.login_attempts_per_account_per_minute = 2;
    config.limits.login_attempts_per_source_per_minute = 5;
    let api = Api::start_with(support::database().await, config);
    let (_, slug, _) = with_ada(&api, "member").await;
    for _ in 0..2 {
        log_in(&api, &slug, "ada", "wrong")
            .await
            .problem(401, "login_failed");
    }
    // The right password too, in other letters too: it can not be found by trying.
    let refused = log_in(&api, &slug, "Ada", PASSWORD).await;
    refused.problem(429, "rate_limited");
    let wait: u64 = refused.headers[header::RETRY_AFTER]
        .to_str()
        .unwrap()
        .parse()
        .unwrap();
    assert!((1..=31).contains(&wait), "{wait}");
    // Nobody's account is counted like somebody's.
    for _ in 0..2 {
        log_in(&api, &slug, "bob", "wrong")
            .await
            .problem(401, "login_failed");
    }
    log_in(&api, &slug, "carl", "wrong")
        .await
        .problem(429, "rate_limited");
}

// P-8
#[tokio::test]
async fn a_workspace_has_a_budget_of_its_own() {
    let mut config = config();
    config.limits.workspace_requests_per_minute = 3;
    let api = Api::start_with(support::database().await, config);
    let (one, two) = (workspace(&api.pool).await, workspace(&api.pool).await);
    let (member, admin) = (api.token(one, Role::Member), api.token(one, Role::Admin));
    for token in [&member, &admin, &member] {
        api.get("/api/auth/me", token).await.ok();
    }
    let refused = api.get("/api/auth/me", &admin).await;
    let problem = refused.problem(429, "rate_limited");
    assert!(problem["detail"].as_str().unwrap().contains("workspace"));
    let wait: u64 = refused.headers[header::RETRY_AFTER]
        .to_str()
        .unwrap()
        .parse()
        .unwrap();
    assert!((1..=21).contains(&wait), "{wait}");
    api.get("/api/auth/me", &api.token(two, Role::Member))
        .await
        .ok();
    assert_eq!(api.get("/healthz", "").await.status, 200);
}

// P-4
#[tokio::test]
async fn an_api_key_is_shown_once_and_works_until_revoked() {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let token = api.token(workspace, Role::Admin);
    let body = json!({"name": "nightly", "role": "member"});
    let made = api.post("/api/api-keys", &token, body).await;
    assert_eq!(made.status, 201);
    let made = made.ok();
    let key = made["key"].as_str().unwrap();
    assert!(key.starts_with("rk_") && key.len() == 46, "{key}");
    assert!(key.starts_with(made["prefix"].as_str().unwrap()));
    assert_eq!(made["created_by"], "ada");
    assert!(!dump(&api).await.contains(key));
    let list = api.get("/api/api-keys", &token).await;
    assert!(!list.text().contains(key));
    assert_eq!(list.ok()["items"][0]["name"], "nightly");

    let me = api.get("/api/auth/me", key).await.ok();
    assert_eq!(
        (
            &me["subject"],
            &me["role"],
            &me["credential"],
            &me["csrf_token"]
        ),
        (
            &json!("api-key:nightly"),
            &json!("member"),
            &json!("api_key"),
            &Value::Null
        )
    );
    assert_eq!(me["workspace"]["id"], json!(workspace));
    api.get("/api/api-keys", key)
        .await
        .problem(403, "forbidden");
    for wrong in [&key[..45], &format!("{key}x"), "rk_", &key.to_lowercase()] {
        api.get("/api/auth/me", wrong)
            .await
            .problem(401, "unauthenticated");
    }

    let path = format!("/api/api-keys/{}", made["id"].as_str().unwrap());
    let revoke = async || api.send(request(Method::DELETE, &path, &token, None)).await;
    assert_eq!(revoke().await.status, 204);
    api.get("/api/auth/me", key)
        .await
        .problem(401, "unauthenticated");
    let revoked = api.get("/api/api-keys", &token).await.ok()["items"][0]["revoked_at"].clone();
    assert!(revoked.is_string());
    assert_eq!(revoke().await.status, 204, "again it changes nothing");
    assert_eq!(
        api.get("/api/api-keys", &token).await.ok()["items"][0]["revoked_at"],
        revoked
    );
}

// P-4: the workspace of a key or session is gone, so they are.
#[tokio::test]
async fn a_deleted_workspace_lets_nobody_in() {
    let api = Api::start().await;
    let (token, slug, _) = with_ada(&api, "admin").await;
    let cookie = kept(&log_in(&api, &slug, "ada", PASSWORD).await.headers);
    let key = api
        .post(
            "/api/api-keys",
            &token,
            json!({"name": "k", "role": "admin"}),
        )
        .await
        .ok();
    sqlx::query("update workspaces set deleted_at = now()")
        .execute(&api.pool)
        .await
        .unwrap();
    let with_key = api.get("/api/auth/me", key["key"].as_str().unwrap()).await;
    with_key.problem(401, "unauthenticated");
    let seen = with_cookie(&api, Method::GET, "/api/auth/me", &cookie, None, None).await;
    seen.problem(401, "unauthenticated");
    log_in(&api, &slug, "ada", PASSWORD)
        .await
        .problem(401, "login_failed");
}

// P-6: nobody hands out, changes or takes away more than they have.
#[tokio::test]
async fn a_role_above_ones_own_is_out_of_reach() {
    let api = Api::start().await;
    let (operator, slug, chief) = with_ada(&api, "operator").await;
    let workspace: WorkspaceId = sqlx::query_scalar("select id from workspaces where slug = $1")
        .bind(&slug)
        .fetch_one(&api.pool)
        .await
        .unwrap();
    let admin = api.token(workspace, Role::Admin);
    let chief = format!("/api/members/{}", chief["id"].as_str().unwrap());
    let send = async |method: Method, path: &str, token: &str, body: Option<Value>| {
        api.send(request(method, path, token, body)).await
    };
    let bob = json!({"username": "bob", "password": PASSWORD, "role": "operator"});
    api.post("/api/members", &admin, bob.clone())
        .await
        .problem(403, "forbidden");
    let key = json!({"name": "k", "role": "operator"});
    api.post("/api/api-keys", &admin, key.clone())
        .await
        .problem(403, "forbidden");
    for body in [
        json!({"role": "member"}),
        json!({"password": "another password"}),
        json!({}),
    ] {
        send(Method::PATCH, &chief, &admin, Some(body))
            .await
            .problem(403, "forbidden");
    }
    send(Method::DELETE, &chief, &admin, None)
        .await
        .problem(403, "forbidden");
    let key = api.post("/api/api-keys", &operator, key).await.ok();
    let key = format!("/api/api-keys/{}", key["id"].as_str().unwrap());
    send(Method::DELETE, &key, &admin, None)
        .await
        .problem(403, "forbidden");

    let mut carl = bob;
    carl["role"] = "member".into();
    let carl = api.post("/api/members", &admin, carl).await.ok();
    let carl = format!("/api/members/{}", carl["id"].as_str().unwrap());
    let up = |role: &str| Some(json!({"role": role}));
    send(Method::PATCH, &carl, &admin, up("operator"))
        .await
        .problem(403, "forbidden");
    assert_eq!(
        send(Method::PATCH, &carl, &admin, up("admin")).await.ok()["role"],
        "admin"
    );
    log_in(&api, &slug, "ada", PASSWORD).await.ok();
    assert_eq!(send(Method::DELETE, &carl, &admin, None).await.status, 204);
    send(Method::DELETE, &carl, &admin, None)
        .await
        .problem(404, "not_found");
}

// P-4, P-6: what admins change counts from the next request on.
#[tokio::test]
async fn a_new_role_or_password_counts_at_once() {
    let api = Api::start().await;
    let (token, slug, ada) = with_ada(&api, "admin").await;
    let path = format!("/api/members/{}", ada["id"].as_str().unwrap());
    let cookie = kept(&log_in(&api, &slug, "ada", PASSWORD).await.headers);
    let get = async |path: &str| with_cookie(&api, Method::GET, path, &cookie, None, None).await;
    get("/api/members").await.ok();
    let patch = async |body: Value| {
        api.send(request(Method::PATCH, &path, &token, Some(body)))
            .await
    };
    patch(json!({"role": "member"})).await.ok();
    get("/api/members").await.problem(403, "forbidden");
    get("/api/auth/me").await.ok();
    patch(json!({"password": "another horse battery"}))
        .await
        .ok();
    get("/api/auth/me").await.problem(401, "unauthenticated");
    log_in(&api, &slug, "ada", PASSWORD)
        .await
        .problem(401, "login_failed");
    let again = log_in(&api, &slug, "ada", "another horse battery").await;
    again.ok();
    api.send(request(Method::DELETE, &path, &token, None)).await;
    let cookie = kept(&again.headers);
    let gone = with_cookie(&api, Method::GET, "/api/auth/me", &cookie, None, None).await;
    gone.problem(401, "unauthenticated");
    log_in(&api, &slug, "ada", "another horse battery")
        .await
        .problem(401, "login_failed");
}

// P-4: a member changes the password, and with it ends every other session; the old one counts no longer.
#[tokio::test]
async fn a_member_changes_the_own_password() {
    let mut config = config();
    config.limits.login_attempts_per_account_per_minute = 10;
    let api = Api::start_with(support::database().await, config);
    let (token, slug, _) = with_ada(&api, "member").await;
    let (here, elsewhere) = (
        log_in(&api, &slug, "ada", PASSWORD).await,
        log_in(&api, &slug, "ada", PASSWORD).await,
    );
    let csrf = here.ok()["csrf_token"].as_str().unwrap().to_owned();
    let (here, elsewhere) = (kept(&here.headers), kept(&elsewhere.headers));
    let me = async |cookie: &str| {
        with_cookie(&api, Method::GET, "/api/auth/me", cookie, None, None).await
    };
    let path = "/api/auth/password";
    let change = async |csrf: Option<&str>, old: &str, new: &str| {
        let body = json!({"old_password": old, "new_password": new});
        with_cookie(&api, Method::POST, path, &here, csrf, Some(body)).await
    };
    let new = "another horse battery";
    change(None, PASSWORD, new)
        .await
        .problem(403, "csrf_failed");
    for (old, new, path) in [
        ("wrong horse battery", new, "old_password"),
        (PASSWORD, "short", "new_password"),
    ] {
        let refused = change(Some(&csrf), old, new).await;
        let problem = refused.problem(422, "invalid_body");
        assert_eq!(problem["errors"][0]["path"], path);
        assert!(!refused.text().contains("horse"), "{}", refused.text());
    }
    me(&elsewhere).await.ok();
    assert_eq!(change(Some(&csrf), PASSWORD, new).await.status, 204);
    me(&here).await.ok();
    me(&elsewhere).await.problem(401, "unauthenticated");
    log_in(&api, &slug, "ada", PASSWORD)
        .await
        .problem(401, "login_failed");
    log_in(&api, &slug, "ada", new).await.ok();
    assert!(!dump(&api).await.contains("horse"));
    // Who has not logged in has none.
    let body = json!({"old_password": PASSWORD, "new_password": new});
    api.post(path, &token, body)
        .await
        .problem(409, "no_password");
    // P-8: nobody finds it by trying.
    let mut last = None;
    for _ in 0..12 {
        last = Some(change(Some(&csrf), "wrong horse battery", new).await);
    }
    last.unwrap().problem(429, "rate_limited");
}

// P-4: the database's clock ends a session, and the cleaning takes it away.
#[tokio::test]
async fn a_session_runs_out() {
    let api = Api::start().await;
    let (_, slug, _) = with_ada(&api, "member").await;
    let cookie = kept(&log_in(&api, &slug, "ada", PASSWORD).await.headers);
    let hours: f64 = sqlx::query_scalar(
        "select extract(epoch from expires_at - created_at)::float8 / 3600 from sessions",
    )
    .fetch_one(&api.pool)
    .await
    .unwrap();
    assert_eq!(hours, 12.0);
    sqlx::query("update sessions set expires_at = now()")
        .execute(&api.pool)
        .await
        .unwrap();
    let late = with_cookie(&api, Method::GET, "/api/auth/me", &cookie, None, None).await;
    late.problem(401, "unauthenticated");
    let mut conn = api.pool.acquire().await.unwrap();
    reconvene::lifecycle::forget::forget_old(&mut conn)
        .await
        .unwrap();
    let left: i64 = sqlx::query_scalar("select count(*) from sessions")
        .fetch_one(&mut *conn)
        .await
        .unwrap();
    assert_eq!(left, 0);
}

// P-3, P-4: a header is judged alone, so a cookie never stands in for a bad token.
#[tokio::test]
async fn a_bad_token_is_not_saved_by_a_good_cookie() {
    let api = Api::start().await;
    let (_, slug, _) = with_ada(&api, "member").await;
    let cookie = kept(&log_in(&api, &slug, "ada", PASSWORD).await.headers);
    for bad in ["Bearer garbage", "Bearer rk_guess", "Basic YTpi", "Bearer "] {
        let request = Request::get("/api/auth/me")
            .header(header::COOKIE, &cookie)
            .header(header::AUTHORIZATION, bad);
        let answer = api.send(request.body(Body::empty()).unwrap()).await;
        answer.problem(401, "unauthenticated");
    }
    let twice = format!("{cookie}; {cookie}");
    with_cookie(&api, Method::GET, "/api/auth/me", &twice, None, None)
        .await
        .problem(401, "unauthenticated");
}

// P-4: https is believed where the proxy says so or the operator does.
#[tokio::test]
async fn a_cookie_is_for_https_where_there_is_https() {
    let api = Api::start().await;
    let (_, slug, _) = with_ada(&api, "member").await;
    let body = json!({"workspace": slug, "username": "ada", "password": PASSWORD});
    let mut by_proxy = request(Method::POST, "/api/auth/login", "", Some(body.clone()));
    by_proxy
        .headers_mut()
        .insert("x-forwarded-proto", "https".parse().unwrap());
    let answer = api.send(by_proxy).await;
    assert!(
        answer.headers[header::SET_COOKIE]
            .to_str()
            .unwrap()
            .ends_with("; Secure")
    );

    let mut config = config();
    config.auth.secure_cookies = true;
    let strict = Api::start_with(api.pool.clone(), config);
    let answer = strict.post("/api/auth/login", "", body).await;
    assert!(
        answer.headers[header::SET_COOKIE]
            .to_str()
            .unwrap()
            .ends_with("; Secure")
    );
}

// P-6
#[tokio::test]
async fn an_operator_makes_workspaces_with_somebody_to_run_them() {
    let api = Api::start().await;
    let operator = api.token(workspace(&api.pool).await, Role::Operator);
    let path = "/api/admin/workspaces";
    let admin = json!({"username": "bob", "password": PASSWORD});
    let body = json!({"slug": "acme", "name": "Acme Ltd", "admin": admin});
    let made = api.post(path, &operator, body.clone()).await;
    assert_eq!(made.status, 201);
    let made = made.ok();
    assert_eq!(
        (&made["slug"], &made["name"]),
        (&json!("acme"), &json!("Acme Ltd"))
    );
    let me = log_in(&api, "acme", "bob", PASSWORD).await.ok();
    assert_eq!(
        (&me["role"], &me["workspace"]["id"], &me["member_id"]),
        (&json!("admin"), &made["id"], &made["admin_id"])
    );
    let again = api.post(path, &operator, body).await;
    again.problem(409, "slug_taken");
    let plain = json!({"slug": "plain", "name": "Plain"});
    assert_eq!(
        api.post(path, &operator, plain).await.ok()["admin_id"],
        Value::Null
    );

    let mut slugs = Vec::new();
    let mut cursor = String::new();
    for _ in 0..3 {
        let page = api
            .get(&format!("{path}?limit=1&cursor={cursor}"), &operator)
            .await
            .ok();
        slugs.push(page["items"][0]["slug"].as_str().unwrap().to_owned());
        cursor = page["next_cursor"].as_str().unwrap_or_default().to_owned();
    }
    assert_eq!(
        (&slugs[1..], cursor.as_str()),
        (&["acme".to_owned(), "plain".to_owned()][..], "")
    );
    api.get(&format!("{path}?cursor=x"), &operator)
        .await
        .problem(422, "invalid_query");
}

// P-2: every field, in every way it can be wrong; and no error repeats a password.
#[tokio::test]
async fn a_bad_field_is_named_and_a_password_is_not_repeated() {
    let api = Api::start().await;
    let (token, _, ada) = with_ada(&api, "member").await;
    let long = |n: usize| json!("x".repeat(n));
    let odd = [
        json!(null),
        json!(4815162342_u64),
        json!(true),
        json!(["4815162342"]),
        json!({}),
    ];
    let text = |bad: &[Value]| [&odd[..], bad].concat();
    let role = || text(&[json!("root"), json!("Admin"), json!("")]);
    let password = || text(&[json!("4815162342"), json!(""), long(201)]);
    let member = format!("/api/members/{}", ada["id"].as_str().unwrap());
    let new_member = json!({"username": "bob", "password": PASSWORD, "role": "member"});
    let log_in = json!({"workspace": "acme", "username": "bob", "password": PASSWORD});
    let new_key = json!({"name": "k", "role": "member"});
    let new_workspace =
        json!({"slug": "acme", "name": "Acme", "admin": {"username": "a", "password": PASSWORD}});
    let name = || text(&[json!(""), json!("a b"), json!("a\0"), long(255)]);
    let line = || {
        text(&[
            json!(""),
            json!(" "),
            json!("a\nb"),
            json!("a\0"),
            long(101),
        ])
    };
    // Method, route, a good body, the field, what is wrong for it, whether it must be there.
    type Case<'a> = (Method, &'a str, &'a Value, &'a str, Vec<Value>, bool);
    let cases: Vec<Case> = vec![
        (
            Method::POST,
            "/api/members",
            &new_member,
            "username",
            name(),
            true,
        ),
        (
            Method::POST,
            "/api/members",
            &new_member,
            "password",
            password(),
            true,
        ),
        (
            Method::POST,
            "/api/members",
            &new_member,
            "role",
            role(),
            true,
        ),
        (
            Method::PATCH,
            &member,
            &new_member,
            "password",
            password(),
            false,
        ),
        (Method::PATCH, &member, &new_member, "role", role(), false),
        (
            Method::POST,
            "/api/auth/login",
            &log_in,
            "workspace",
            text(&[json!("a\0"), long(64)]),
            true,
        ),
        (
            Method::POST,
            "/api/auth/login",
            &log_in,
            "username",
            text(&[json!("a\0"), long(255)]),
            true,
        ),
        (
            Method::POST,
            "/api/auth/login",
            &log_in,
            "password",
            text(&[long(201)]),
            true,
        ),
        (
            Method::POST,
            "/api/api-keys",
            &new_key,
            "name",
            line(),
            true,
        ),
        (
            Method::POST,
            "/api/api-keys",
            &new_key,
            "role",
            role(),
            true,
        ),
        (
            Method::POST,
            "/api/admin/workspaces",
            &new_workspace,
            "slug",
            text(&[json!("A"), json!(""), long(64)]),
            true,
        ),
        (
            Method::POST,
            "/api/admin/workspaces",
            &new_workspace,
            "name",
            line(),
            true,
        ),
        (
            Method::POST,
            "/api/admin/workspaces",
            &new_workspace,
            "admin.username",
            name(),
            true,
        ),
        (
            Method::POST,
            "/api/admin/workspaces",
            &new_workspace,
            "admin.password",
            password(),
            true,
        ),
    ];
    let before = dump(&api).await;
    for (method, path, body, field, bad, required) in cases {
        let mut bodies = Vec::new();
        let mut body = body.clone();
        if method == Method::PATCH {
            body.as_object_mut().unwrap().shift_remove("username");
        }
        let at = format!("/{}", field.replace('.', "/"));
        for value in bad {
            let mut body = body.clone();
            *body.pointer_mut(&at).unwrap() = value;
            bodies.push((body, field));
        }
        if required {
            let mut body = body.clone();
            let (object, last) = match field.split_once('.') {
                Some((outer, last)) => (&mut body[outer], last),
                None => (&mut body, field),
            };
            object.as_object_mut().unwrap().shift_remove(last);
            bodies.push((body, field));
        }
        let mut unknown = body.clone();
        unknown["colour"] = "blue".into();
        bodies.push((unknown, "colour"));
        for (body, field) in bodies {
            let answer = api
                .send(request(method.clone(), path, &token, Some(body.clone())))
                .await;
            let problem = answer.problem(422, "invalid_body");
            assert_eq!(problem["errors"][0]["path"], field, "{path} {body}");
            if field.ends_with("password") {
                assert!(!answer.text().contains("4815162342"), "{}", answer.text());
            }
        }
    }
    for admin in [json!(null), json!("bob"), json!([])] {
        let body = json!({"slug": "acme", "name": "Acme", "admin": admin});
        let answer = api.post("/api/admin/workspaces", &token, body).await;
        let problem = answer.problem(422, "invalid_body");
        assert!(
            problem["errors"][0]["path"]
                .as_str()
                .unwrap()
                .starts_with("admin"),
            "{problem}"
        );
    }
    assert_eq!(dump(&api).await, before, "nothing was made");
    let taken = json!({"username": "ADA", "password": PASSWORD, "role": "member"});
    api.post("/api/members", &token, taken)
        .await
        .problem(409, "username_taken");
}
