//! What a parent is told when its children have ended: one message, bounded, whatever became of them.

use crate::{
    engine::{Engine, until},
    forced::{
        ByHand, Family, Hold, agent_with, ask, decide_steps, delegate, resume_messages,
        until_waiting,
    },
    stub_llm::{Gate, Reply},
};
use reconvene::{
    domain::{agent::AgentDefinition, task::TaskStatus::*},
    lifecycle::agents::delete,
};
use serde_json::{Value, json};

// D-22: the event is only a reason to look; once told, a group is told.
#[tokio::test(flavor = "multi_thread")]
async fn an_await_completed_event_that_comes_again_posts_nothing() {
    let mut engine = Engine::scripted_with(|_| {}).await;
    let by_hand = ByHand::of(&engine);
    let family = Family::new(&engine, &["a", "b"], Some(&by_hand)).await;
    family.finish_all(&engine).await;
    by_hand.orchestrator.match_signals().await.unwrap();
    let again = async || {
        sqlx::query(
            "insert into orchestrator_events (workspace_id, task_id, kind, group_id)
             select workspace_id, task_id, 'await_completed', id from await_groups, generate_series(1, 2)",
        )
        .execute(&engine.pool)
        .await
        .unwrap();
    };
    again().await; // three in one batch
    by_hand.orchestrator.dispatch().await.unwrap();
    again().await; // while the parent decides
    by_hand.orchestrator.dispatch().await.unwrap();
    engine.end(family.parent).await;
    again().await; // after its end
    by_hand.orchestrator.dispatch().await.unwrap();
    assert_eq!(resume_messages(&engine, family.parent).await.len(), 1);
    assert_eq!(decide_steps(&engine, family.parent).await, 2);
    let same_id =
        "select count(*) from task_items i join await_groups g on g.id = i.id where i.task_id = $1";
    assert_eq!(ask::<i64>(&engine, same_id, family.parent).await, 1);
    by_hand.stop().await;
    engine.resume();
    engine.close().await;
}

// D-22, D-53: in spawn order, whatever the order of the ends; built from rows.
#[tokio::test(flavor = "multi_thread")]
async fn the_message_lists_children_in_spawn_order_with_what_they_did() {
    let engine = Engine::scripted().await;
    let family = Family::new(&engine, &["first", "second", "third"], None).await;
    for name in ["third", "first", "second"] {
        family.finish(&engine, name).await;
    }
    engine.end(family.parent).await;
    let told = resume_messages(&engine, family.parent).await.remove(0);
    let mut from = 0;
    for (n, (name, id)) in ["first", "second", "third"]
        .iter()
        .zip(&family.children)
        .enumerate()
    {
        for part in [
            format!(
                "## {}. {name}\nAgent: Researcher | Status: completed | Task: {id}\n",
                n + 1
            ),
            "Steps: 1 | Tool calls: 0".to_owned(),
            " | Tokens: 15\n".to_owned(),
            format!("> result of {name}\n"),
        ] {
            let at = told[from..].find(&part);
            from += at.unwrap_or_else(|| panic!("{part:?} is not in its place:\n{told}"));
        }
    }
    engine.close().await;
}

// D-53: what a child that had tools of its own did without them is marked.
#[tokio::test(flavor = "multi_thread")]
async fn a_child_with_tools_that_called_none_is_marked() {
    let engine = Engine::scripted().await;
    let tooled = |a: &mut AgentDefinition| a.tools = vec!["get_subtask_result".into()];
    let tooled = agent_with(&engine, "Tooled", tooled).await;
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", delegate(tooled, &["idle", "busy"])),
            ("busy", 0) => Reply::call("get_subtask_result", json!({"task_id": uuid::Uuid::nil()})),
            _ => Reply::text("done"),
        });
    let parent = engine.post("go").await;
    engine.end(parent).await;
    let told = resume_messages(&engine, parent).await.remove(0);
    assert_eq!(
        told.matches("Steps: 1 | Tool calls: 0 (no tool call)")
            .count(),
        1,
        "{told}"
    );
    assert_eq!(
        told.matches("Steps: 2 | Tool calls: 1 |").count(),
        1,
        "{told}"
    );
    engine.close().await;
}

// D-24, H-04: completed, refused by the provider, out of steps, its agent deleted before its first claim, stopped: each
// is an entry. The second time none of them completes.
#[tokio::test(flavor = "multi_thread")]
async fn children_that_fail_or_are_stopped_count_as_ended() {
    for all_fail in [false, true] {
        let engine = Engine::scripted_with(|_| {}).await;
        let short = agent_with(&engine, "Short", |a| a.max_iterations = 1).await;
        let gone = agent_with(&engine, "Gone", |_| {}).await;
        let researcher = engine.demo.researcher;
        let one = |agent, prompt| delegate(agent, &[prompt])["tasks"][0].clone();
        let args = json!({"tasks": [one(researcher, "good"), one(researcher, "refused"), one(short, "long"),
            one(gone, "gone"), one(researcher, "held")]});
        let gate = Gate::new();
        let held = gate.clone();
        engine
            .llm()
            .script(move |r| match (r.first_user(), r.turn()) {
                ("go", 0) => Reply::call("delegate_tasks", args.clone()),
                ("go", _) => Reply::text(r.last_user()),
                ("good", _) if !all_fail => Reply::text("fine"),
                ("gone", _) if !all_fail => Reply::text("still here"),
                ("long", _) => {
                    Reply::call("get_subtask_result", json!({"task_id": uuid::Uuid::nil()}))
                }
                ("held", _) => Reply::text("never heard").held_by(&held),
                _ => Reply::status(
                    400,
                    r#"{"error": {"message": "bad\nrequest", "type": "invalid"}}"#,
                ),
            });
        let window = Hold::stall(
            &engine.pool,
            "before update on steps",
            "new.kind = 'tool_call' and new.status = 'completed' and new.tool = 'delegate_tasks'",
        )
        .await;
        let engine = engine.running();
        let parent = engine.post("go").await;
        until_waiting(&engine.pool, 1).await;
        delete(&engine.pool, engine.workspace(), gone, None)
            .await
            .unwrap();
        window.release().await;
        until("the last child runs", async || {
            engine
                .llm()
                .requests()
                .iter()
                .any(|r| r.first_user() == "held")
        })
        .await;
        let children = engine.children(parent).await;
        for child in &children[..4] {
            engine.end(*child).await;
        }
        assert_eq!(engine.status(parent).await, WaitingForInput);
        assert_eq!(engine.stop(children[4], false).await.stopped, 1);
        let (status, output) = engine.end(parent).await;
        assert_eq!(status, Completed);
        let ok = if all_fail { "failed" } else { "completed" };
        let mut from = 0;
        for (n, (title, status)) in [
            ("good", ok),
            ("refused", "failed"),
            ("long", "failed"),
            ("gone", ok),
            ("held", "stopped"),
        ]
        .iter()
        .enumerate()
        {
            let head = format!("## {}. {title}\n", n + 1);
            let at = output[from..]
                .find(&head)
                .unwrap_or_else(|| panic!("{head} {output}"));
            from += at;
            let entry = output[from..].lines().nth(1).unwrap();
            assert!(entry.contains(&format!("Status: {status} ")), "{entry}");
        }
        assert!(
            output.contains(
                "Reason: model_error: The model provider answered 400 Bad Request: bad request"
            ),
            "{output}"
        );
        assert!(output.contains("Reason: iteration_limit: "), "{output}");
        assert_eq!(resume_messages(&engine, parent).await.len(), 1);
        gate.open();
        engine.close().await;
    }
}

// D-25: two groups of one turn; the first one completes before the turn is committed.
#[tokio::test(flavor = "multi_thread")]
async fn each_call_of_a_turn_has_its_group_and_the_parent_decides_after_the_last() {
    let engine = Engine::scripted_with(|c| c.worker.max_parallel_tool_calls = 1).await;
    let gate = Gate::new();
    let held = gate.clone();
    let (quick, slow) = (
        delegate(engine.demo.researcher, &["quick"]).to_string(),
        delegate(engine.demo.writer, &["slow 1", "slow 2"]).to_string(),
    );
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::text("both")
                .and_call("one", "delegate_tasks", &quick)
                .and_call("two", "delegate_tasks", &slow),
            ("go", _) => Reply::text("done"),
            ("quick", _) => Reply::text("quick result"),
            _ => Reply::text("slow result").held_by(&held),
        });
    let second = Hold::stall(
        &engine.pool,
        "before insert on await_groups",
        "new.total = 2",
    )
    .await;
    let engine = engine.running();
    let parent = engine.post("go").await;
    let groups = "select count(*) from await_groups where status = 'completed'";
    until("the first group has completed", async || {
        engine.count(groups).await == 1
    })
    .await;
    until("its event is handled, or waits for the turn", async || {
        engine
            .count("select count(*) from signals where status = 'pending'")
            .await
            == 0
    })
    .await;
    assert_eq!(engine.status(parent).await, Running);
    assert_eq!(resume_messages(&engine, parent).await.len(), 0);
    second.release().await;
    // The first group is told at once, the parent rests on.
    until("the first group is told", async || {
        resume_messages(&engine, parent).await.len() == 1
    })
    .await;
    engine.until(parent, WaitingForInput).await;
    assert_eq!(decide_steps(&engine, parent).await, 1);
    gate.open();
    engine.end(parent).await;
    let told = resume_messages(&engine, parent).await;
    assert_eq!(told.len(), 2);
    assert!(
        told[0].contains("> quick result") && told[1].contains("> slow result"),
        "{told:?}"
    );
    assert_eq!(decide_steps(&engine, parent).await, 2);
    let last = engine.llm().requests().pop().unwrap();
    assert_eq!(
        last.results().iter().map(|r| r.0).collect::<Vec<_>>(),
        ["one", "two"]
    );
    engine.close().await;
}

// D-23: bounded, cut on character boundaries and marked; what failed is never left out; the rest is read in parts.
#[tokio::test(flavor = "multi_thread")]
async fn a_summary_is_bounded_and_the_rest_can_be_read_in_parts() {
    let engine = Engine::scripted_with(|c| {
        c.spawn_tasks.summary_child_chars = 60;
        c.spawn_tasks.summary_total_chars = 3000;
        c.tools.max_result_chars = 1500;
    })
    .await
    .running();
    // Every character but one is escaped in JSON.
    let whole = format!("€{}", "\"".repeat(2500));
    let args = delegate(
        engine.demo.researcher,
        &["long", "a", "b", "c", "d", "broken"],
    );
    let answer = whole.clone();
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()),
            ("go", turn) => {
                let parts: Vec<Value> = r.results()[1..]
                    .iter()
                    .map(|(_, text)| serde_json::from_str(text).expect("a part is JSON"))
                    .collect();
                let next = match turn {
                    1 => json!(0),
                    _ => parts[turn - 2]["next_offset"].clone(),
                };
                let echo: Value = serde_json::from_str(r.results()[0].1).unwrap();
                let task = &echo["children"][0]["task_id"];
                match next.is_null() {
                    true => Reply::text(
                        parts
                            .iter()
                            .map(|p| p["output"].as_str().unwrap())
                            .collect::<String>(),
                    ),
                    false => Reply::call(
                        "get_subtask_result",
                        json!({"task_id": task, "offset": next}),
                    ),
                }
            }
            ("broken", _) => Reply::status(
                400,
                &json!({"error": {"message": "x".repeat(100_000)}}).to_string(),
            ),
            _ => Reply::text(&answer),
        });
    let parent = engine.post("go").await;
    let (status, output) = engine.end(parent).await;
    assert_eq!(status, Completed, "{output}");
    assert!(
        output == whole,
        "{} of {} characters",
        output.chars().count(),
        whole.chars().count()
    );
    let told = resume_messages(&engine, parent).await.remove(0);
    let shown = |n: usize| told.contains(&format!("> €{}", "\"".repeat(n - 1)));
    assert!(shown(60) && !shown(61), "{told}");
    assert!(told.chars().count() <= 3000, "{}", told.chars().count());
    assert_eq!(
        told.matches("[cut: 2501 characters in all; get_subtask_result returns the rest]")
            .count(),
        5,
        "{told}"
    );
    assert!(
        told.contains("## 6. broken")
            && told.contains("Status: failed")
            && told.contains("Reason: model_error"),
        "{told}"
    );
    engine.close().await;
}

// D-23, H-34: 200 results of 20 kB in one message under the total, and the conversation goes on within the model's limit.
#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_long_results_fit_into_one_message() {
    let engine = Engine::scripted().await;
    engine.llm().limit_bytes(400_000);
    let prompts: Vec<String> = (1..=200).map(|n| format!("part {n}")).collect();
    let prompts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    let args = delegate(engine.demo.researcher, &prompts);
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("go", 0) => Reply::call("delegate_tasks", args.clone()).plain(),
            ("go", n) => Reply::text(format!("answer {n}")),
            ("part 77", _) => Reply::status(400, "{}"),
            _ => Reply::text("ä".repeat(10_000)).plain(),
        });
    let parent = engine.post("go").await;
    engine.end(parent).await;
    let told = resume_messages(&engine, parent).await;
    assert_eq!(told.len(), 1);
    assert!(told[0].chars().count() <= 60_000);
    for (n, child) in (1..).zip(engine.children(parent).await) {
        let status = if n == 77 { "failed" } else { "completed" };
        assert!(
            told[0].contains(&format!("Status: {status} | Task: {child}")),
            "{n}"
        );
    }
    engine.append(parent, "and now?").await;
    assert_eq!(engine.end(parent).await.1, "answer 2");
    let sizes: Vec<usize> = engine
        .llm()
        .requests()
        .iter()
        .filter(|r| r.first_user() == "go")
        .map(|r| r.raw.len())
        .collect();
    assert!(
        sizes[2] < sizes[1] + 1000,
        "the summary is there once: {sizes:?}"
    );
    engine.close().await;
}

// D-22, T-7: a child that works again when its parent is told has ended before, and that is what is told.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_child_came_to_before_it_was_reopened_is_told() {
    let engine = Engine::scripted().await;
    let (slow, never) = (Gate::new(), Gate::new());
    let (g1, g2, writer) = (slow.clone(), never.clone(), engine.demo.writer);
    engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("plan", 0) => {
                Reply::call("delegate_tasks", delegate(writer, &["good", "bad", "slow"]))
            }
            ("plan", _) => Reply::text(r.last_user().to_owned()),
            (_, _) if r.last_user() == "again" => Reply::text("second").held_by(&g2),
            ("bad", _) => Reply::status(400, r#"{"error":{"message":"no such thing"}}"#),
            ("slow", _) => Reply::text("third").held_by(&g1),
            _ => Reply::text("first"),
        });
    let parent = engine.post("plan").await;
    engine.llm().wait_for_requests(4).await;
    let children = engine.children(parent).await;
    engine.until(children[0], Completed).await;
    engine.until(children[1], Failed).await;
    for child in &children[..2] {
        assert_eq!(engine.append(*child, "again").await.status, Running);
    }
    engine.llm().wait_for_requests(6).await;
    slow.open();
    let (_, told) = engine.end(parent).await;
    assert!(told.contains("2 completed, 1 failed."), "{told}");
    assert!(told.contains("\n> first\n"), "{told}");
    assert!(
        told.contains("Reason: model_error: ") && told.contains("no such thing"),
        "{told}"
    );
    never.open();
    for child in &children[..2] {
        assert_eq!(engine.end(*child).await, (Completed, "second".into()));
    }
    engine.close().await;
}

// D-22, T-7: a child that is reopened after its end is told as it ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_was_reopened_does_not_wake_its_parent_again() {
    let engine = Engine::scripted().await;
    let family = Family::new(&engine, &["a", "b"], None).await;
    family.finish(&engine, "a").await;
    until("its end is booked", async || {
        engine
            .count("select count(*) from awaits where status = 'completed'")
            .await
            == 1
    })
    .await;
    engine.append(family.children[0], "once more").await;
    engine.end(family.children[0]).await;
    assert_eq!(engine.status(family.parent).await, WaitingForInput);
    family.finish(&engine, "b").await;
    engine.end(family.parent).await;
    assert_eq!(resume_messages(&engine, family.parent).await.len(), 1);
    engine.append(family.children[1], "and you").await;
    engine.end(family.children[1]).await;
    assert_eq!(engine.status(family.parent).await, Completed);
    assert_eq!(resume_messages(&engine, family.parent).await.len(), 1);
    engine.close().await;
}
