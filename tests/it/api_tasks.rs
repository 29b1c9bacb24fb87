//! T-20, T-21, T-23, T-24, H-43: a task, its feed, its list and its tree over HTTP.

use crate::http::{
    Api, Under, agent, group, item, step, task, task_under, user_message, workspace,
};
use reconvene::api::auth::Role;
use reconvene::domain::ids::{AgentId, StepId, TaskId, WorkspaceId};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A parent that has delegated to three children, one of them deleted, and waits for them.
struct Family {
    api: Api,
    token: String,
    workspace: WorkspaceId,
    lead: AgentId,
    parent: TaskId,
    step: StepId,
    children: Vec<TaskId>,
    group: reconvene::domain::ids::GroupId,
}

const ARGUMENTS: &str = r#"{"n":123456789012345678901234567890.10,"tasks":[]}"#;

async fn family() -> Family {
    let api = Api::start().await;
    let pool = &api.pool;
    let workspace = workspace(pool).await;
    let lead = agent(pool, workspace, "default", "Lead").await;
    let helper = agent(pool, workspace, "custom", "Helper").await;
    let parent = task_under(pool, workspace, lead, "Parent", None, "waiting_for_input").await;
    step(pool, workspace, parent, 1, 0, None).await;
    let call = step(
        pool,
        workspace,
        parent,
        1,
        1,
        Some((
            "c1",
            "delegate_tasks",
            ARGUMENTS,
            "{\"status\":\"awaiting\"}",
        )),
    )
    .await;
    let mut children = Vec::new();
    for (ordinal, status) in ["completed", "running", "failed"].into_iter().enumerate() {
        let under = Under {
            parent,
            root: parent,
            step: call,
            ordinal: ordinal as i32,
            depth: 1,
        };
        children.push(
            task_under(
                pool,
                workspace,
                helper,
                &format!("Child {ordinal}"),
                Some(under),
                status,
            )
            .await,
        );
    }
    sqlx::query("update tasks set deleted_at = now() where id = $1")
        .bind(children[2])
        .execute(pool)
        .await
        .unwrap();
    let group = group(pool, workspace, parent, call, "child_task", 3).await;
    user_message(pool, workspace, parent, "Do three things").await;
    let calls = json!({"calls": [{"id": "c1", "name": "delegate_tasks", "arguments": ARGUMENTS}]});
    item(
        pool,
        workspace,
        parent,
        "assistant_message",
        Some(1),
        Some("I will."),
        calls,
    )
    .await;
    let place = json!({"step_id": call, "ordinal": 1, "call_id": "c1", "name": "delegate_tasks"});
    item(
        pool,
        workspace,
        parent,
        "tool_call",
        Some(1),
        None,
        place.clone(),
    )
    .await;
    let card = json!({"step_id": call, "group_id": group, "mode": "barrier", "total": 3});
    item(pool, workspace, parent, "delegation", Some(1), None, card).await;
    let result =
        json!({"ordinal": 1, "call_id": "c1", "name": "delegate_tasks", "is_error": false});
    item(
        pool,
        workspace,
        parent,
        "tool_result",
        Some(1),
        Some("{\"status\":\"awaiting\"}"),
        result,
    )
    .await;
    item(
        pool,
        workspace,
        parent,
        "status",
        None,
        None,
        json!({"status": "waiting_for_input"}),
    )
    .await;
    let token = api.token(workspace, Role::Member);
    Family {
        token,
        workspace,
        lead,
        parent,
        step: call,
        children,
        group,
        api,
    }
}

// T-20
#[tokio::test]
async fn a_task_shows_parent_children_waits_usage_and_error() {
    let family = family().await;
    let get = async |id: TaskId| {
        family
            .api
            .get(&format!("/api/tasks/{id}"), &family.token)
            .await
    };
    let parent = get(family.parent).await.ok();
    assert_eq!(parent["status"], "waiting_for_input");
    assert_eq!(parent["agent_name"], "Lead");
    assert_eq!(parent["agent_group_id"], json!(family.lead));
    assert_eq!(parent["parent"], Value::Null);
    assert_eq!(parent["subtask_count"], 2, "the deleted one does not count");
    assert_eq!(parent["usage"]["input_tokens"], 100);
    assert_eq!(parent["usage"]["decide_steps"], 1);
    assert_eq!(parent["usage"]["duration_ms"], 1500);
    assert_eq!(parent["usage"]["cost_micros"], Value::Null);
    let waits = parent["waits"].as_array().unwrap();
    assert_eq!(waits.len(), 1);
    assert_eq!(waits[0]["group_id"], json!(family.group));
    assert_eq!(
        (&waits[0]["total"], &waits[0]["pending"]),
        (&json!(3), &json!(3))
    );
    assert!(parent["created_at"].as_str().unwrap().ends_with('Z'));

    let child = get(family.children[0]).await.ok();
    let reference = json!({"task_id": family.parent, "title": "Parent", "agent_name": "Lead", "agent_group_id": family.lead});
    assert_eq!(child["parent"], reference);
    assert_eq!(child["source"], "spawned");
    assert_eq!(child["spawn_depth"], 1);

    get(family.children[2]).await.problem(404, "not_found");
    get(TaskId::new()).await.problem(404, "not_found");
    let missing = get(TaskId::new()).await.text();
    let malformed = family.api.get("/api/tasks/7", &family.token).await;
    assert_eq!(
        (malformed.status.as_u16(), malformed.text()),
        (404, missing)
    );

    sqlx::query("update tasks set status = 'failed', finished_at = now(), error = '{\"code\": \"internal\", \"message\": \"It broke.\"}' where id = $1")
        .bind(family.parent)
        .execute(&family.api.pool)
        .await
        .unwrap();
    assert_eq!(
        get(family.parent).await.ok()["error"],
        json!({"code": "internal", "message": "It broke."})
    );
}

// T-21, H-31
#[tokio::test]
async fn the_feed_shows_calls_cards_and_waits_as_they_stand() {
    let family = family().await;
    let path = format!("/api/tasks/{}/feed", family.parent);
    let answer = family.api.get(&path, &family.token).await;
    let feed = answer.ok();
    let items = feed["items"].as_array().unwrap();
    let kinds: Vec<&str> = items
        .iter()
        .map(|item| item["kind"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        [
            "user_message",
            "assistant_message",
            "tool_call",
            "delegation",
            "tool_result",
            "status"
        ]
    );
    assert_eq!(
        items
            .iter()
            .map(|item| item["seq"].as_i64().unwrap())
            .collect::<Vec<_>>(),
        [1, 2, 3, 4, 5, 6]
    );
    assert_eq!(
        (&feed["next_after"], &feed["parent"], &feed["status"]),
        (&Value::Null, &Value::Null, &json!("waiting_for_input"))
    );
    assert_eq!(
        items[1]["calls"],
        json!([{"call_id": "c1", "name": "delegate_tasks"}])
    );
    assert!(
        answer
            .text()
            .contains(&format!("\"arguments\":{ARGUMENTS}")),
        "every digit: {}",
        answer.text()
    );
    assert_eq!(items[2]["status"], "completed");
    assert_eq!(
        items[2]["result"],
        json!({"text": "{\"status\":\"awaiting\"}", "is_error": false})
    );
    let card = &items[3];
    assert_eq!(
        (&card["group_id"], &card["mode"], &card["total"]),
        (&json!(family.group), &json!("barrier"), &json!(3))
    );
    assert_eq!(card["status"], "open");
    assert_eq!(
        card["counts"],
        json!({"pending": 0, "running": 1, "waiting_for_input": 0, "completed": 1, "failed": 0, "stopped": 0, "deleted": 1})
    );
    let children = card["children"].as_array().unwrap();
    assert_eq!(
        children[0],
        json!({"task_id": family.children[0], "title": "Child 0", "agent_name": "Helper", "status": "completed", "deleted": false})
    );
    assert_eq!(
        (&children[2]["task_id"], &children[2]["deleted"]),
        (&json!(family.children[2]), &json!(true))
    );
    assert_eq!(items[5]["status"], "waiting_for_input");

    let child = family
        .api
        .get(
            &format!("/api/tasks/{}/feed", family.children[1]),
            &family.token,
        )
        .await
        .ok();
    assert_eq!(child["parent"]["task_id"], json!(family.parent));
    assert_eq!(child["items"], json!([]));
    family
        .api
        .get(
            &format!("/api/tasks/{}/feed", family.children[2]),
            &family.token,
        )
        .await
        .problem(404, "not_found");
}

#[tokio::test]
async fn odd_items_are_shown_with_what_is_known() {
    let family = family().await;
    let (pool, workspace) = (&family.api.pool, family.workspace);
    let task = task(pool, workspace, family.lead, "Odd").await;
    item(
        pool,
        workspace,
        task,
        "tool_call",
        Some(9),
        None,
        json!({"ordinal": 1, "call_id": "x", "name": "gone"}),
    )
    .await;
    item(
        pool,
        workspace,
        task,
        "tool_call",
        None,
        None,
        json!("text"),
    )
    .await;
    item(
        pool,
        workspace,
        task,
        "delegation",
        None,
        None,
        json!({"step_id": 7}),
    )
    .await;
    item(
        pool,
        workspace,
        task,
        "delegation",
        Some(1),
        None,
        json!({"step_id": StepId::new(), "group_id": "", "mode": "async", "total": 2}),
    )
    .await;
    item(pool, workspace, task, "wait", None, None, Value::Null).await;
    item(
        pool,
        workspace,
        task,
        "status",
        None,
        None,
        json!({"status": "stopped", "reason": "asked", "more": 1}),
    )
    .await;
    item(
        pool,
        workspace,
        task,
        "user_message",
        None,
        Some("hi"),
        json!({"skip_wait": true}),
    )
    .await;
    let feed = family
        .api
        .get(&format!("/api/tasks/{task}/feed"), &family.token)
        .await
        .ok();
    let items = feed["items"].as_array().unwrap();
    assert_eq!(items.len(), 7);
    assert_eq!(
        (
            &items[3]["group_id"],
            &items[3]["mode"],
            &items[3]["status"]
        ),
        (&json!(""), &json!("async"), &Value::Null)
    );
    assert_eq!(items[5]["reason"], "asked");
    assert_eq!(items[6]["skip_wait"], true);
}

// H-43, T-21: pages follow `seq` whatever the times say.
#[tokio::test]
async fn feed_pages_neither_repeat_nor_skip() {
    let family = family().await;
    let (pool, workspace) = (&family.api.pool, family.workspace);
    let task = task(pool, workspace, family.lead, "Long").await;
    for n in 1..=7 {
        user_message(pool, workspace, task, &n.to_string()).await;
    }
    for set in ["now()", "now() - seq * interval '1 second'"] {
        sqlx::query(sqlx::AssertSqlSafe(format!(
            "update task_items set created_at = {set} where task_id = $1"
        )))
        .bind(task)
        .execute(pool)
        .await
        .unwrap();
        let (mut after, mut texts) = (json!(0), Vec::new());
        while !after.is_null() {
            let page = family
                .api
                .get(
                    &format!("/api/tasks/{task}/feed?limit=2&after={after}"),
                    &family.token,
                )
                .await
                .ok();
            texts.extend(
                page["items"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|item| item["text"].as_str().unwrap().to_owned()),
            );
            after = page["next_after"].clone();
        }
        assert_eq!(texts, ["1", "2", "3", "4", "5", "6", "7"]);
    }
    let path = |query: &str| format!("/api/tasks/{task}/feed?{query}");
    assert_eq!(
        family.api.get(&path("after=99"), &family.token).await.ok()["items"],
        json!([])
    );
    for (query, parameter) in [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("limit=1&limit=2", "limit"),
        ("after=-1", "after"),
        ("after=99999999999999999999", "after"),
        ("before=1", "before"),
    ] {
        let problem = family
            .api
            .get(&path(query), &family.token)
            .await
            .problem(422, "invalid_query");
        assert_eq!(problem["errors"][0]["path"], parameter, "{query}");
    }
}

fn ids(page: &Value) -> Vec<String> {
    page["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["id"].as_str().unwrap().to_owned())
        .collect()
}

// T-23
#[tokio::test]
async fn every_filter_narrows() {
    let family = family().await;
    let (pool, workspace) = (&family.api.pool, family.workspace);
    let other = task_under(
        pool,
        workspace,
        family.lead,
        "100% of_it\\",
        None,
        "completed",
    )
    .await;
    let query = async |query: &str| {
        family
            .api
            .get(&format!("/api/tasks/query?{query}"), &family.token)
            .await
            .ok()
    };
    let all: BTreeSet<String> = [family.parent, family.children[0], family.children[1], other]
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        ids(&query("").await).into_iter().collect::<BTreeSet<_>>(),
        all
    );
    let (parent, children) = (family.parent.to_string(), &family.children);
    let child = |n: usize| children[n].to_string();
    let other = other.to_string();
    for (filter, expected) in [
        (
            format!("parentTaskId={parent}&sort=created_at"),
            vec![child(0), child(1)],
        ),
        (format!("parentTaskId={}", TaskId::new()), vec![]),
        (
            "includeSpawned=false".into(),
            vec![other.clone(), parent.clone()],
        ),
        (
            "includeSpawned=true&source=spawned&sort=created_at".into(),
            vec![child(0), child(1)],
        ),
        (
            "source=chat&sort=-title".into(),
            vec![parent.clone(), other.clone()],
        ),
        ("status=running".into(), vec![child(1)]),
        (
            "status=running&status=waiting_for_input&sort=created_at".into(),
            vec![parent.clone(), child(1)],
        ),
        (
            format!("agentGroupId={}&sort=title", family.lead),
            vec![other.clone(), parent.clone()],
        ),
        ("q=PARENT".into(), vec![parent.clone()]),
        ("q=%25+of_it%5C".into(), vec![other.clone()]),
        ("q=_".into(), vec![other.clone()]),
        (format!("q={parent}"), vec![parent.clone()]),
        (format!("batchRunId={}", uuid::Uuid::new_v4()), vec![]),
        (
            format!("status=completed&parentTaskId={parent}"),
            vec![child(0)],
        ),
    ] {
        assert_eq!(ids(&query(&filter).await), expected, "{filter}");
    }
    let row = &query("q=Parent").await["items"][0];
    assert_eq!(
        (&row["subtask_count"], &row["agent_name"], &row["usage"]),
        (&json!(2), &json!("Lead"), &Value::Null)
    );
    assert!(row.get("batch_run_id").is_some());
    let row = &query("q=Parent&view=enriched").await["items"][0];
    assert_eq!(
        (&row["usage"]["input_tokens"], &row["waits"][0]["pending"]),
        (&json!(100), &json!(3))
    );
    assert_eq!(
        query(&format!("q={}", child(0))).await["items"][0]["parent"]["task_id"],
        parent
    );

    for (bad, parameter) in [
        ("parentTaskId=7", "parentTaskId"),
        ("batchRunId=7", "batchRunId"),
        ("status=done", "status"),
        ("source=api", "source"),
        ("includeSpawned=maybe", "includeSpawned"),
        ("sort=colour", "sort"),
        ("limit=201", "limit"),
        ("view=full", "view"),
        ("q=%00", "q"),
        ("workspace=1", "workspace"),
        ("workspaceId=1", "workspaceId"),
        ("cursor=x", "cursor"),
        ("cursor=MSB0YXNrcw", "cursor"),
    ] {
        let problem = family
            .api
            .get(&format!("/api/tasks/query?{bad}"), &family.token)
            .await
            .problem(422, "invalid_query");
        assert_eq!(problem["errors"][0]["path"], parameter, "{bad}");
    }
}

// T-23: every row once, while others are added between the pages.
#[tokio::test]
async fn pages_stay_correct_while_tasks_are_added() {
    let api = Api::start().await;
    let workspace = workspace(&api.pool).await;
    let agent = agent(&api.pool, workspace, "default", "Lead").await;
    let token = api.token(workspace, Role::Member);
    let mut first = BTreeSet::new();
    for n in 0..7 {
        // Equal titles, so that the id must break the tie.
        first.insert(
            task(&api.pool, workspace, agent, &format!("T{}", n / 3))
                .await
                .to_string(),
        );
    }
    for sort in ["created_at", "-created_at", "title", "-title"] {
        let (mut seen, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = api
                .get(
                    &format!("/api/tasks/query?limit=2&sort={sort}&cursor={cursor}"),
                    &token,
                )
                .await
                .ok();
            seen.extend(ids(&page));
            task(&api.pool, workspace, agent, "T1").await;
            match page["next_cursor"].as_str() {
                Some(next) => cursor = next.to_owned(),
                None => break,
            }
            assert!(seen.len() < 100);
            if sort == "created_at" && seen.len() > 20 {
                break; // new ones come at the end, so this order has no last page here
            }
        }
        let once: BTreeSet<String> = seen.iter().cloned().collect();
        assert_eq!(once.len(), seen.len(), "{sort}: repeated");
        assert!(first.is_subset(&once), "{sort}: skipped");
    }
    let cursor = api
        .get("/api/tasks/query?limit=2&sort=title", &token)
        .await
        .ok()["next_cursor"]
        .clone();
    let other_order = format!(
        "/api/tasks/query?sort=-title&cursor={}",
        cursor.as_str().unwrap()
    );
    api.get(&other_order, &token)
        .await
        .problem(422, "invalid_query");
}

// T-24
#[tokio::test]
async fn a_tree_is_one_call() {
    let family = family().await;
    let (pool, workspace) = (&family.api.pool, family.workspace);
    let call = step(
        pool,
        workspace,
        family.children[1],
        1,
        1,
        Some(("c", "delegate_tasks", "{}", "ok")),
    )
    .await;
    step(pool, workspace, family.children[1], 1, 0, None).await;
    let under = Under {
        parent: family.children[1],
        root: family.parent,
        step: call,
        ordinal: 0,
        depth: 2,
    };
    let grandchild = task_under(
        pool,
        workspace,
        family.lead,
        "Grandchild",
        Some(under),
        "pending",
    )
    .await;
    let below_deleted = Under {
        parent: family.children[2],
        root: family.parent,
        step: StepId::new(),
        ordinal: 0,
        depth: 2,
    };
    task_under(
        pool,
        workspace,
        family.lead,
        "Gone",
        Some(below_deleted),
        "pending",
    )
    .await;

    let tree = family
        .api
        .get(&format!("/api/tasks/{}/tree", family.parent), &family.token)
        .await
        .ok();
    let nodes: Vec<(String, i64)> = tree["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| {
            (
                node["id"].as_str().unwrap().to_owned(),
                node["depth"].as_i64().unwrap(),
            )
        })
        .collect();
    let expected = [
        (family.parent, 0),
        (family.children[0], 1),
        (family.children[1], 1),
        (grandchild, 2),
    ];
    assert_eq!(nodes, expected.map(|(id, depth)| (id.to_string(), depth)));
    assert_eq!(
        tree["items"][3]["parent_task_id"],
        json!(family.children[1])
    );
    assert_eq!(tree["items"][1]["agent_name"], "Helper");
    assert_eq!(
        (&tree["usage"]["input_tokens"], &tree["truncated"]),
        (&json!(200), &json!(false))
    );

    let part = family
        .api
        .get(
            &format!("/api/tasks/{}/tree", family.children[1]),
            &family.token,
        )
        .await
        .ok();
    assert_eq!(part["items"].as_array().unwrap().len(), 2);
    assert_eq!(
        (
            &part["items"][0]["depth"],
            &part["items"][0]["parent_task_id"]
        ),
        (&json!(0), &Value::Null)
    );
    family
        .api
        .get(
            &format!("/api/tasks/{}/tree", family.children[2]),
            &family.token,
        )
        .await
        .problem(404, "not_found");
    let _ = family.step;
}
