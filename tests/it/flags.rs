//! Runtime flags (P-7): typed, signed by who changed them, and seen by every process within two seconds.

use crate::http::{Api, request, workspace};
use crate::support;
use axum::http::Method;
use reconvene::api::auth::Role;
use reconvene::domain::flag::Flag;
use reconvene::flags::Flags;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const KEY: &str = "/api/admin/runtime-flags/batch_fanout.enabled";

async fn put(api: &Api, path: &str, token: &str, body: Value) -> crate::http::Answer {
    api.send(request(Method::PUT, path, token, Some(body)))
        .await
}

// P-7, S-1
#[tokio::test]
async fn a_flag_shows_its_default_and_then_who_changed_it() {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let token = api.token(workspace, Role::Operator);
    let list = api.get("/api/admin/runtime-flags", &token).await.ok();
    assert_eq!(list["next_cursor"], Value::Null);
    let flag = &list["items"][0];
    assert_eq!(
        (
            &flag["key"],
            &flag["type"],
            &flag["value"],
            &flag["default"]
        ),
        (
            &json!("batch_fanout.enabled"),
            &json!("boolean"),
            &json!(false),
            &json!(false)
        )
    );
    assert!(flag["description"].as_str().unwrap().len() > 20);
    assert_eq!(
        (&flag["changed_by"], &flag["changed_at"]),
        (&Value::Null, &Value::Null)
    );

    let set = put(&api, KEY, &token, json!({"value": true})).await.ok();
    assert_eq!(
        (&set["value"], &set["default"]),
        (&json!(true), &json!(false))
    );
    assert_eq!(
        (&set["changed_by"], &set["changed_by_workspace_id"]),
        (&json!("ada"), &json!(workspace))
    );
    assert!(set["changed_at"].is_string());
    let list = api.get("/api/admin/runtime-flags", &token).await.ok();
    assert_eq!(list["items"], json!([set]));
    let again = put(&api, KEY, &token, json!({"value": false})).await.ok();
    assert_eq!(again["value"], json!(false));
    assert!(again["changed_at"].as_str() > set["changed_at"].as_str());
}

// P-7, P-2
#[tokio::test]
async fn a_value_of_another_type_is_refused_and_names_the_path() {
    let api = Api::start().await;
    let token = api.token(workspace(&api.pool).await, Role::Operator);
    for (body, path) in [
        (json!({}), "value"),
        (json!({"value": null}), "value"),
        (json!({"value": "true"}), "value"),
        (json!({"value": 1}), "value"),
        (json!({"value": [true]}), "value"),
        (json!({"value": {"on": "\0"}}), "value"),
        (json!({"value": true, "by": "eve"}), "by"),
    ] {
        let problem = put(&api, KEY, &token, body.clone())
            .await
            .problem(422, "invalid_body");
        assert_eq!(problem["errors"][0]["path"], path, "{body}");
    }
    let unknown = "/api/admin/runtime-flags/batch_fanout";
    put(&api, unknown, &token, json!({"value": true}))
        .await
        .problem(404, "not_found");
    let rows: i64 = sqlx::query_scalar("select count(*) from runtime_flags")
        .fetch_one(&api.pool)
        .await
        .unwrap();
    assert_eq!(rows, 0);
}

// P-7: within two seconds, by a clock that is handed in; S-1: a reading that fails is an error, though an older one is known.
#[tokio::test]
async fn a_process_knows_flags_that_are_a_second_old_at_most() {
    let api = Api::start().await;
    let token = api.token(workspace(&api.pool).await, Role::Operator);
    let flags = Flags::new(api.pool.clone());
    let is_on = async |at: Instant| {
        let values = flags.read(at).await.unwrap();
        values.is_on(Flag::BatchFanoutEnabled)
    };
    let start = Instant::now();
    assert_eq!(is_on(start).await, Ok(false));
    put(&api, KEY, &token, json!({"value": true})).await.ok();
    let soon = start + Duration::from_millis(999);
    assert_eq!(is_on(soon).await, Ok(false), "one reading serves a second");
    let later = start + Duration::from_secs(1);
    assert_eq!(is_on(later).await, Ok(true));

    sqlx::query("update runtime_flags set value = '\"yes\"'")
        .execute(&api.pool)
        .await
        .unwrap();
    let unreadable = is_on(later + Duration::from_secs(1)).await;
    assert!(unreadable.is_err(), "{unreadable:?}");
    sqlx::query("drop table runtime_flags")
        .execute(&api.pool)
        .await
        .unwrap();
    assert!(flags.read(later + Duration::from_secs(2)).await.is_err());
}

// P-7: a database that can not be reached is an error, not a default.
#[tokio::test]
async fn flags_of_a_database_that_is_away_are_an_error() {
    let pool = support::database().await;
    let flags = Flags::new(pool.clone());
    let now = Instant::now();
    assert!(flags.read(now).await.is_ok());
    pool.close().await;
    let error = flags.read(now + Flags::AGE_MAX).await.unwrap_err();
    assert!(error.is_unavailable());
}
