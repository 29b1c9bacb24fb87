//! What decide steps take, recorded and summed (T-17).

use crate::{
    engine::Engine,
    forced::delegate,
    http::{self, Api, Under},
    stub_llm::Reply,
};
use reconvene::{
    api::auth::Role,
    config::Price,
    domain::{ids::TaskId, task::TaskStatus::*},
};
use serde_json::{Value, json};

/// 1.25 and 10 for a million tokens, and a tenth for cached input.
const PRICE: Price = Price {
    input: 1_250_000,
    output: 10_000_000,
    cached_input: Some(125_000),
};

async fn engine() -> Engine {
    let set = |config: &mut reconvene::config::Config| {
        config.llm.prices.insert("stub".into(), PRICE);
    };
    Engine::scripted_with(set).await.running()
}

fn api(engine: &Engine) -> (Api, String) {
    let api = Api::start_with(engine.pool.clone(), http::config());
    let token = api.token(engine.workspace(), Role::Member);
    (api, token)
}

/// Tokens in, out and cached, cost, and decide steps.
fn figures(usage: &Value) -> (i64, i64, i64, Option<i64>, i64) {
    let number = |key: &str| usage[key].as_i64();
    (
        number("input_tokens").unwrap(),
        number("output_tokens").unwrap(),
        number("cached_tokens").unwrap(),
        number("cost_micros"),
        number("decide_steps").unwrap(),
    )
}

async fn of_task(api: &Api, token: &str, task: TaskId) -> (i64, i64, i64, Option<i64>, i64) {
    let task = api.get(&format!("/api/tasks/{task}"), token).await.ok();
    figures(&task["usage"])
}

async fn sums(api: &Api, token: &str, query: &str) -> Vec<Value> {
    let page = api.get(&format!("/api/usage{query}"), token).await.ok();
    assert_eq!(page["next_cursor"], Value::Null);
    page["items"].as_array().unwrap().clone()
}

// T-17, T-20: each task bills its own steps, to the millionth; the sums are the sums of the steps
#[tokio::test(flavor = "multi_thread")]
async fn every_step_is_billed_once_to_its_own_task() {
    let engine = engine().await;
    let researcher = engine.demo.researcher;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("lead", 0) => Reply::call("delegate_tasks", delegate(researcher, &["a", "b"]))
                .usage(1000, 100, 600),
            ("lead", _) => Reply::text("done").usage(2000, 10, 0),
            _ => Reply::text("part").usage(100, 7, 64),
        });
    let task = engine.post("lead").await;
    assert_eq!(engine.end(task).await.0, Completed);
    let (api, token) = api(&engine);
    // 400 at 1.25, 600 at 0.125, 100 at 10; then 2000 at 1.25 and 10 at 10
    let own = (3000, 110, 600, Some(500 + 75 + 1000 + 2500 + 100), 2);
    assert_eq!(of_task(&api, &token, task).await, own);
    for child in engine.children(task).await {
        assert_eq!(
            of_task(&api, &token, child).await,
            (100, 7, 64, Some(45 + 8 + 70), 1)
        );
    }
    let all = (3200, 124, 728, Some(4175 + 2 * 123), 4);
    let tree = api
        .get(&format!("/api/tasks/{task}/tree"), &token)
        .await
        .ok();
    assert_eq!(figures(&tree["usage"]), all);
    let calls = engine.count("select count(*) from steps where ordinal > 0 and coalesce(input_tokens, cost_micros) is not null").await;
    assert_eq!(calls, 0, "a call takes nothing");

    let by = |group: &'static str| sums(&api, &token, group);
    let whole = by("").await;
    assert_eq!(whole[0]["key"], json!(engine.workspace()));
    for group in [
        "",
        "?group_by=workspace",
        "?group_by=task_tree",
        "?group_by=day",
    ] {
        let rows = by(group).await;
        assert_eq!(
            (rows.len(), figures(&rows[0]["usage"])),
            (1, all),
            "{group}"
        );
    }
    let tree = &by("?group_by=task_tree").await[0];
    assert_eq!(
        (&tree["key"], &tree["name"]),
        (&json!(task), &json!("lead"))
    );
    let mut agents = by("?group_by=agent").await;
    agents.sort_by_key(|row| row["name"].to_string());
    assert_eq!(
        (&agents[0]["name"], figures(&agents[0]["usage"])),
        (&json!("Lead"), own)
    );
    assert_eq!(
        (&agents[1]["key"], figures(&agents[1]["usage"])),
        (&json!(researcher), (200, 14, 128, Some(246), 2))
    );
    engine.close().await;
}

// T-17, T-15: what came to nothing was paid for all the same
#[tokio::test(flavor = "multi_thread")]
async fn failed_steps_and_empty_answers_are_billed_too() {
    let engine = engine().await;
    let (api, token) = api(&engine);
    for (replies, expected) in [
        // twice nothing: the step fails
        (
            vec![Reply::text("").usage(10, 1, 0)],
            (20, 2, 0, Some(45), 1),
        ),
        // nothing, then an answer
        (
            vec![
                Reply::text(" ").usage(10, 1, 0),
                Reply::text("a").usage(11, 2, 0),
            ],
            (21, 3, 0, Some(56), 1),
        ),
        // nothing, then a provider that is busy, then an answer of another attempt
        (
            vec![
                Reply::text("").usage(10, 1, 0),
                Reply::status(500, "{}"),
                Reply::text("a").usage(11, 2, 0),
            ],
            // rounded for each attempt: 12.5 + 10 and 13.75 + 20
            (21, 3, 0, Some(23 + 34), 1),
        ),
        // nothing, then a refusal
        (
            vec![Reply::text("").usage(10, 1, 0), Reply::status(400, "{}")],
            (10, 1, 0, Some(23), 1),
        ),
        // nothing was answered at all
        (vec![Reply::status(400, "{}")], (0, 0, 0, Some(0), 1)),
    ] {
        engine.llm().replies(replies);
        let task = engine.post("go").await;
        engine.end(task).await;
        assert_eq!(of_task(&api, &token, task).await, expected);
    }
    engine.close().await;
}

// T-17: a model without a price has no cost, and no cost is not none
#[tokio::test(flavor = "multi_thread")]
async fn without_a_price_there_is_no_cost() {
    let engine = Engine::scripted().await;
    let task = engine.post("go").await;
    assert_eq!(engine.end(task).await.0, Completed);
    let (api, token) = api(&engine);
    assert_eq!(of_task(&api, &token, task).await, (10, 5, 0, None, 1));
    assert_eq!(
        sums(&api, &token, "").await[0]["usage"]["cost_micros"],
        Value::Null
    );
    engine.close().await;
}

// T-17, T-34, P-5: by day and between times, with what was deleted, without what is another workspace's
#[tokio::test]
async fn usage_is_summed_by_day_between_times_and_page_by_page() {
    let api = Api::start().await;
    let (home, other) = (
        http::workspace(&api.pool).await,
        http::workspace(&api.pool).await,
    );
    for workspace in [home, other] {
        let agent = http::agent(&api.pool, workspace, "default", "Lead").await;
        for (title, day, deleted) in [
            ("a", "2026-03-01", false),
            ("b", "2026-03-01", true),
            ("c", "2026-03-02", false),
        ] {
            let task = http::task(&api.pool, workspace, agent, title).await;
            let call = http::step(
                &api.pool,
                workspace,
                task,
                1,
                1,
                Some(("c", "delegate_tasks", "{}", "ok")),
            )
            .await;
            let under = Under {
                parent: task,
                root: task,
                step: call,
                ordinal: 0,
                depth: 1,
            };
            let child = http::task_under(
                &api.pool,
                workspace,
                agent,
                "child",
                Some(under),
                "completed",
            )
            .await;
            for task in [task, child] {
                http::step(&api.pool, workspace, task, 1, 0, None).await;
                let sql = "with s as (update steps set started_at = $2::date + time '23:59:58', finished_at = $2::date + time '23:59:59',
                        cost_micros = 3 where task_id = $1)
                    update tasks set created_at = $2::date, deleted_at = case when $3 then now() end,
                        finished_at = case when status = 'completed' then $2::date + time '23:59:59' end where id = $1";
                sqlx::query(sql)
                    .bind(task)
                    .bind(day.parse::<chrono::NaiveDate>().unwrap())
                    .bind(deleted)
                    .execute(&api.pool)
                    .await
                    .unwrap();
            }
        }
    }
    let token = api.token(home, Role::Member);
    let keys = async |query: &str| -> Vec<(Value, i64)> {
        let rows = sums(&api, &token, query).await;
        rows.iter()
            .map(|row| (row["key"].clone(), figures(&row["usage"]).4))
            .collect()
    };
    let (first, second) = (json!("2026-03-01"), json!("2026-03-02"));
    assert_eq!(
        keys("?group_by=day").await,
        [(first.clone(), 4), (second.clone(), 2)]
    );
    for (range, expected) in [
        ("from=2026-03-02", vec![(second.clone(), 2)]),
        ("to=2026-03-02", vec![(first.clone(), 4)]),
        ("from=2026-03-01&to=2026-03-02T00:59:59%2B01:00", vec![]),
        (
            "from=2026-03-01T23:59:59Z&to=2026-03-02T01:00:00%2B01:00",
            vec![(first, 4)],
        ),
        ("from=2026-03-03", vec![]),
    ] {
        assert_eq!(
            keys(&format!("?group_by=day&{range}")).await,
            expected,
            "{range}"
        );
    }
    let trees = sums(&api, &token, "?group_by=task_tree").await;
    let names: Vec<_> = trees
        .iter()
        .map(|row| {
            (
                row["key"].is_null(),
                row["name"].clone(),
                figures(&row["usage"]),
            )
        })
        .collect();
    let two = (200, 40, 10, Some(6), 2);
    assert_eq!(
        names,
        [
            (true, Value::Null, two),
            (false, json!("a"), two),
            (false, json!("c"), two)
        ]
    );
    assert_eq!(trees[1]["usage"]["duration_ms"], 2000);

    let mut paged = Vec::new();
    let mut path = "/api/usage?group_by=task_tree&limit=1".to_owned();
    loop {
        let page = api.get(&path, &token).await.ok();
        paged.extend(page["items"].as_array().unwrap().clone());
        let Some(cursor) = page["next_cursor"].as_str() else {
            break;
        };
        path = format!("/api/usage?group_by=task_tree&limit=1&cursor={cursor}");
    }
    assert_eq!(paged, trees);

    for (query, at) in [
        ("group_by=colour", "group_by"),
        ("from=yesterday", "from"),
        ("to=2026-02-30", "to"),
        ("from=%2B100000-01-01", "from"),
        ("from=2026-03-02&to=2026-03-02", "to"),
        ("cursor=x", "cursor"),
        ("limit=1001", "limit"),
        ("day=1", "day"),
    ] {
        let refused = api
            .get(&format!("/api/usage?{query}"), &token)
            .await
            .problem(422, "invalid_query");
        assert_eq!(refused["errors"][0]["path"], at, "{query}");
    }
}
