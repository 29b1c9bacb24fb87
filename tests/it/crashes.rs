//! A crash after every single write of each lifecycle: the process dies there, with whatever it has open, and another one
//! finishes. A story is what a client sees of it; `crash_world.rs` kills.

use crate::{
    crash_world::{Client, Death, Each, SWEEP, Sweep, World},
    engine::until,
    forced::{agent_with, ask, decide_steps, delegate, resume_messages},
    stub_llm::{Gate, Reply},
};
use reconvene::{
    domain::{
        ids::{AgentId, TaskId},
        task::TaskStatus::{self, *},
    },
    lifecycle::{
        delete::{delete, delete_many},
        signal::{call_back, signal},
        skip::skip,
        stop::{StopReceipt, stop},
        submit::Recipient,
        wait::token_hash,
    },
    store::signals::NewExternal,
};
use serde_json::{Value, json};

/// A parent that waits for two children, whose replies are held.
struct Family {
    parent: TaskId,
    a: TaskId,
    b: TaskId,
    gates: [Gate; 2],
}

/// The children answer when their gate is open; whoever is asked again repeats what it was told last.
fn script(world: &World, gates: &[Gate; 2]) {
    let args = delegate(world.engine.demo.researcher, &["a", "b"]);
    let gates = gates.clone();
    world
        .engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("a", 0) => Reply::text("result of a").held_by(&gates[0]),
            ("b", 0) => Reply::text("result of b").held_by(&gates[1]),
            ("lead", 0) => Reply::call("delegate_tasks", args.clone()),
            _ => Reply::text(format!("heard: {}", r.last_user())),
        });
}

impl Family {
    async fn new(world: &World) -> Self {
        let gates = [Gate::new(), Gate::new()];
        script(world, &gates);
        let parent = world.post("lead").await;
        world.until(parent, WaitingForInput).await;
        let children = world.engine.children(parent).await;
        let [a, b] = children[..] else {
            panic!("{children:?}")
        };
        Self {
            parent,
            a,
            b,
            gates,
        }
    }

    fn open(&self) {
        self.gates.iter().for_each(Gate::open);
    }

    fn all(&self) -> [TaskId; 3] {
        [self.parent, self.a, self.b]
    }

    /// Lets the children answer; waits for the end of all three.
    async fn ends(&self, world: &World, expected: [TaskStatus; 3]) {
        self.open();
        let mut ended = Vec::new();
        for task in self.all() {
            ended.push(world.end(task).await.0);
        }
        assert_eq!(ended, expected);
    }

    /// How often the parent was woken with results, and how often its model was asked.
    async fn woken(&self, world: &World) -> (usize, i64) {
        (
            resume_messages(&world.engine, self.parent).await.len(),
            decide_steps(&world.engine, self.parent).await,
        )
    }
}

/// The main job: nobody is held.
async fn main_job(world: &World) {
    let gates = [Gate::new(), Gate::new()];
    gates.iter().for_each(Gate::open);
    script(world, &gates);
    world.arm().await;
    let parent = world.post("lead").await;
    let (status, output) = world.end(parent).await;
    assert_eq!(status, Completed, "{output}");
    for part in ["2 completed", "> result of a\n", "> result of b\n"] {
        assert!(output.contains(part), "{part}: {output}");
    }
    let children = world.engine.children(parent).await;
    assert_eq!(children.len(), 2);
    for (task, decides) in [(parent, 2), (children[0], 1), (children[1], 1)] {
        assert_eq!(decide_steps(&world.engine, task).await, decides);
    }
    assert_eq!(resume_messages(&world.engine, parent).await.len(), 1);
}

/// A turn of two groups of calls with a barrier between.
async fn turn_of_calls(world: &World) {
    let child = |name| delegate(world.engine.demo.researcher, &[name]).to_string();
    let (a, b) = (child("a"), child("b"));
    let read = json!({"task_id": TaskId::new()}).to_string();
    world
        .engine
        .llm()
        .script(move |r| match (r.first_user(), r.turn()) {
            ("lead", 0) => Reply::text("")
                .and_call("1", "get_subtask_result", &read)
                .and_call("2", "delegate_tasks", &a)
                .and_call("3", "no_such_tool", "{}")
                .and_call("4", "delegate_tasks", &b)
                .and_call("5", "get_subtask_result", &read),
            ("lead", _) => {
                let ids: Vec<&str> = r.results().iter().map(|(id, _)| *id).collect();
                Reply::text(format!("heard {}", ids.join(" ")))
            }
            (child, _) => Reply::text(format!("result of {child}")),
        });
    world.arm().await;
    let parent = world.post("lead").await;
    let heard = "heard 1 2 3 4 5".to_owned();
    assert_eq!(world.end(parent).await, (Completed, heard));
    assert_eq!(world.engine.children(parent).await.len(), 2);
    assert_eq!(resume_messages(&world.engine, parent).await.len(), 2);
    let twice = "select count(*) from (select 1 from task_items where task_id = $1 and kind in ('tool_call', 'tool_result')
        group by kind, data ->> 'ordinal' having count(*) > 1) twice";
    assert_eq!(ask::<i64>(&world.engine, twice, parent).await, 0);
}

// H-20, H-25
#[tokio::test(flavor = "multi_thread")]
async fn a_turn_of_calls_that_overlap() {
    SWEEP.run(turn_of_calls).await;
    let alone = Sweep {
        death: Death::OfProcess,
        ..SWEEP
    };
    alone.run(turn_of_calls).await;
}

// R-1, D-20, D-26, H-02, H-14, W-1, W-3: at each row, the process alone dies.
#[tokio::test(flavor = "multi_thread")]
async fn the_main_job_after_the_death_of_a_process() {
    let sweep = Sweep {
        each: Each::Row,
        death: Death::OfProcess,
        least: 40,
        lanes: 4,
        ..SWEEP
    };
    sweep.run(main_job).await;
}

// The same, with its host.
#[tokio::test(flavor = "multi_thread")]
async fn the_main_job_after_the_death_of_a_host() {
    SWEEP.run(main_job).await;
}

// T-5, T-2: the answer is taken once, and completes the question.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_to_a_question() {
    let story = async |world: &World| {
        world.engine.llm().script(|r| match r.turn() {
            0 => Reply::call("ask_user", json!({"question": "Which colour?"})),
            _ => Reply::text(format!("heard: {}", r.last_user())),
        });
        world.arm().await;
        let task = world.post("ask").await;
        world.until(task, WaitingForInput).await;
        let answer = world.append(task, "blue").await;
        assert_eq!(answer.task, task);
        assert_eq!(world.end(task).await, (Completed, "heard: blue".into()));
        let messages =
            "select count(*) from task_items where task_id = $1 and kind = 'user_message'";
        assert_eq!(ask::<i64>(&world.engine, messages, task).await, 2);
        assert_eq!(awaits(world, task).await, ["completed"]);
        assert_eq!(decide_steps(&world.engine, task).await, 2);
        assert_eq!(resume_messages(&world.engine, task).await.len(), 0);
    };
    SWEEP.run(story).await;
}

/// The states of the awaits of a task.
async fn awaits(world: &World, task: TaskId) -> Vec<String> {
    sqlx::query_scalar(
        "select a.status from awaits a join await_groups g on g.id = a.group_id where g.task_id = $1 order by a.ordinal",
    )
    .bind(task.0)
    .fetch_all(&world.engine.pool)
    .await
    .unwrap()
}

/// The parent has given up its children; they run on, and nobody hears of them.
async fn given_up(world: &World, family: &Family) {
    let (status, output) = world.end(family.parent).await;
    assert_eq!(status, Completed);
    assert!(output.contains("2 skipped"), "{output}");
    assert_eq!(family.woken(world).await, (1, 2));
    assert_eq!(awaits(world, family.parent).await, ["skipped", "skipped"]);
    family.ends(world, [Completed; 3]).await;
    let told = resume_messages(&world.engine, family.parent).await;
    assert!(told.len() == 1 && told[0].contains("2 skipped"), "{told:?}");
}

// T-6, W-15
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_skips_the_wait() {
    let story = async |world: &World| {
        let family = Family::new(world).await;
        world.arm().await;
        world.append_and_skip(family.parent, "go on").await;
        given_up(world, &family).await;
        let messages =
            "select count(*) from task_items where task_id = $1 and kind = 'user_message'";
        assert_eq!(ask::<i64>(&world.engine, messages, family.parent).await, 2);
    };
    SWEEP.run(story).await;
}

// W-15
#[tokio::test(flavor = "multi_thread")]
async fn a_skip_of_the_wait() {
    let story = async |world: &World| {
        let family = Family::new(world).await;
        world.arm().await;
        let task = family.parent;
        let skipping = move |c: Client| async move {
            skip(&c.pool, &c.hub, c.workspace, task, None)
                .await
                .unwrap()
        };
        let skipped = world.request(skipping).await;
        assert!(matches!(skipped, Some(0 | 2)), "{skipped:?}");
        given_up(world, &family).await;
    };
    SWEEP.run(story).await;
}

async fn stopped(world: &World, task: TaskId, subtasks: bool) -> StopReceipt {
    let stopping = move |c: Client| async move {
        let receipt = stop(&c.pool, &c.hub, c.workspace, task, subtasks).await;
        receipt.unwrap().expect("the task is there")
    };
    world.request(stopping).await
}

// T-31, T-35, T-36, H-10
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_of_a_tree() {
    let story = async |world: &World| {
        let family = Family::new(world).await;
        world.arm().await;
        let receipt = stopped(world, family.parent, true).await;
        assert_eq!((receipt.status, receipt.left_alive), (Stopped, 0));
        assert!(matches!(receipt.stopped, 0 | 3), "{receipt:?}");
        for task in family.all() {
            assert_eq!(world.engine.status(task).await, Stopped);
        }
        family.ends(world, [Stopped; 3]).await;
        assert_eq!(awaits(world, family.parent).await, ["cancelled"; 2]);
        assert_eq!(family.woken(world).await, (0, 1));
    };
    SWEEP.run(story).await;
}

// T-30: the children run on.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_of_a_parent_alone() {
    let story = async |world: &World| {
        let family = Family::new(world).await;
        world.arm().await;
        let receipt = stopped(world, family.parent, false).await;
        assert_eq!((receipt.status, receipt.left_alive), (Stopped, 0));
        family.ends(world, [Stopped, Completed, Completed]).await;
        assert_eq!(awaits(world, family.parent).await, ["cancelled"; 2]);
        assert_eq!(family.woken(world).await, (0, 1));
    };
    SWEEP.run(story).await;
}

// T-33, H-05: a stop as soon as there are children, started or not.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_while_children_are_made() {
    let story = async |world: &World| {
        let gates = [Gate::new(), Gate::new()];
        gates.iter().for_each(Gate::open);
        script(world, &gates);
        world.arm().await;
        let parent = world.post("lead").await;
        until("there are children", async || {
            world.engine.children(parent).await.len() == 2
        })
        .await;
        let receipt = stopped(world, parent, false).await;
        assert_eq!(receipt.left_alive, 0);
        let (status, _) = world.end(parent).await;
        assert_eq!(status, receipt.status);
        for child in world.engine.children(parent).await {
            let (end, _) = world.end(child).await;
            assert!(
                end == Completed || end == Stopped && decide_steps(&world.engine, child).await == 0,
                "{end}"
            );
        }
    };
    SWEEP.run(story).await;
}

async fn deleted(world: &World, tasks: &[TaskId], subtasks: bool) {
    let tasks = tasks.to_vec();
    let deleting = move |c: Client| {
        let tasks = tasks.clone();
        async move {
            match tasks[..] {
                [one] => delete(&c.pool, &c.hub, c.workspace, one, subtasks)
                    .await
                    .map(drop),
                _ => delete_many(&c.pool, &c.hub, c.workspace, &tasks, subtasks)
                    .await
                    .map(drop),
            }
            .unwrap()
        }
    };
    world.request(deleting).await
}

async fn is_deleted(world: &World, task: TaskId) -> bool {
    let sql = "select deleted_at is not null from tasks where id = $1";
    ask(&world.engine, sql, task).await
}

// T-34: a tree; nobody is woken.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_of_a_tree() {
    let story = async |world: &World| {
        let family = Family::new(world).await;
        world.arm().await;
        deleted(world, &[family.parent], true).await;
        family.ends(world, [Stopped; 3]).await;
        for task in family.all() {
            assert!(is_deleted(world, task).await);
        }
        assert_eq!(family.woken(world).await, (0, 1));
    };
    SWEEP.run(story).await;
}

// T-34: a child alone goes on to its end for its parent.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_of_a_child() {
    let story = async |world: &World| {
        let family = Family::new(world).await;
        world.arm().await;
        deleted(world, &[family.a], false).await;
        family.ends(world, [Completed; 3]).await;
        assert!(is_deleted(world, family.a).await);
        let (_, output) = world.end(family.parent).await;
        for part in ["2 completed", "completed (deleted)", "> result of a\n"] {
            assert!(output.contains(part), "{part}: {output}");
        }
        assert_eq!(family.woken(world).await, (1, 2));
    };
    SWEEP.run(story).await;
}

// T-34, T-35: a child and then its parent in one request, which is no one transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_of_many() {
    let story = async |world: &World| {
        let family = Family::new(world).await;
        world.arm().await;
        deleted(world, &[family.a, family.parent], true).await;
        family.ends(world, [Stopped; 3]).await;
        for task in family.all() {
            assert!(is_deleted(world, task).await);
        }
        assert_eq!(family.woken(world).await, (0, 1));
    };
    SWEEP.run(story).await;
}

/// An agent that may wait for signals and times.
async fn waiter(world: &World) -> AgentId {
    agent_with(&world.engine, "Waiter", |a| {
        a.tools = ["wait_until", "wait_for_signal"]
            .map(str::to_owned)
            .to_vec();
    })
    .await
}

/// Posts a task that makes this call first.
async fn calling(world: &World, tool: &'static str, arguments: Value) -> TaskId {
    world.engine.llm().script(move |r| match r.turn() {
        0 => Reply::call(tool, arguments.clone()),
        _ => Reply::text(format!("heard: {}", r.last_user())),
    });
    let agent = waiter(world).await;
    world.post_to(Recipient::Agent(agent), "wait").await
}

/// Reports a fact; repeated, it is the same fact.
async fn send(world: &World, key: &str) {
    let (key, dedup_key) = (key.to_owned(), uuid::Uuid::new_v4().to_string());
    let sending = move |c: Client| {
        let fact = NewExternal {
            workspace: c.workspace,
            correlation_key: key.clone(),
            dedup_key: dedup_key.clone(),
            payload: Some(json!("12.50")),
        };
        async move { signal(&c.pool, &c.hub, &fact).await.map(drop).unwrap() }
    };
    world.request(sending).await
}

async fn told_once(world: &World, task: TaskId, what: &str) {
    let (status, output) = world.end(task).await;
    assert_eq!(status, Completed);
    assert!(output.contains(what), "{output}");
    assert_eq!(resume_messages(&world.engine, task).await.len(), 1);
    assert_eq!(decide_steps(&world.engine, task).await, 2);
    assert_eq!(awaits(world, task).await, ["completed"]);
}

// W-13: the signal comes before its wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_that_comes_early() {
    let story = async |world: &World| {
        let key = uuid::Uuid::new_v4().to_string();
        world.arm().await;
        send(world, &key).await;
        let task = calling(world, "wait_for_signal", json!({"key": key})).await;
        told_once(world, task, "> \"12.50\"").await;
    };
    SWEEP.run(story).await;
}

// W-13, W-2
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_that_comes_late() {
    let story = async |world: &World| {
        let key = uuid::Uuid::new_v4().to_string();
        let task = calling(world, "wait_for_signal", json!({"key": key})).await;
        world.until(task, WaitingForInput).await;
        world.arm().await;
        send(world, &key).await;
        told_once(world, task, "> \"12.50\"").await;
    };
    SWEEP.run(story).await;
}

// W-13: the token that the model was given works, however often its call was made.
#[tokio::test(flavor = "multi_thread")]
async fn a_callback() {
    let story = async |world: &World| {
        world.arm().await;
        let task = calling(world, "wait_for_signal", json!({})).await;
        world.until(task, WaitingForInput).await;
        let result = "select text from task_items where task_id = $1 and kind = 'tool_result'";
        let result: String = ask(&world.engine, result, task).await;
        let result: Value = serde_json::from_str(&result).unwrap();
        let url = result["callback_url"].as_str().unwrap();
        let hash = token_hash(url.strip_prefix("/api/callbacks/").unwrap());
        let calling_back = move |c: Client| async move {
            let payload = Some(json!("by callback"));
            call_back(&c.pool, &c.hub, hash, payload).await.unwrap()
        };
        let received = world.request(calling_back).await.expect("the token counts");
        assert_eq!(received.status, "matched");
        told_once(world, task, "> \"by callback\"").await;
    };
    SWEEP.run(story).await;
}

async fn make_due(world: &World, task: TaskId) {
    sqlx::query(
        "update awaits a set scheduled_resume_at = now() from await_groups g
         where g.id = a.group_id and g.task_id = $1 and a.status = 'pending'",
    )
    .bind(task.0)
    .execute(&world.engine.pool)
    .await
    .unwrap();
}

// W-14, W-11
#[tokio::test(flavor = "multi_thread")]
async fn a_time_that_comes() {
    let story = async |world: &World| {
        let task = calling(world, "wait_until", json!({"seconds": 3600})).await;
        world.until(task, WaitingForInput).await;
        world.arm().await;
        make_due(world, task).await;
        told_once(world, task, "The time that you waited for has come.").await;
    };
    SWEEP.run(story).await;
}

// W-10: while the child lives its await is moved on; when its signal is lost, its row tells.
#[tokio::test(flavor = "multi_thread")]
async fn a_look_at_children_that_take_long() {
    let story = async |world: &World| {
        let family = Family::new(world).await;
        world.arm().await;
        make_due(world, family.parent).await;
        let due = "select count(*) from awaits where status = 'pending' and scheduled_resume_at < now() + interval '1 minute'";
        until("both awaits are moved on", async || {
            world.engine.count(due).await == 0
        })
        .await;
        assert_eq!(world.engine.status(family.parent).await, WaitingForInput);
        let a = family.a;
        run(
            world,
            format!(
                "create trigger lost before insert on signals for each row
                    when (new.dedup_key = '{a}') execute function lose()"
            ),
        )
        .await;
        family.open();
        for child in [family.a, family.b] {
            assert_eq!(world.end(child).await.0, Completed);
        }
        run(world, "drop trigger lost on signals".into()).await;
        make_due(world, family.parent).await;
        family.ends(world, [Completed; 3]).await;
        assert_eq!(family.woken(world).await, (1, 2));
        // For the closing check: the signal that was lost.
        run(
            world,
            format!(
                "insert into signals (workspace_id, source_type, dedup_key, correlation_key)
                    select workspace_id, 'child_task', '{a}', '{a}' from tasks where id = '{a}'"
            ),
        )
        .await;
    };
    SWEEP.run(story).await;
}

async fn run(world: &World, sql: String) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql))
        .execute(&world.engine.pool)
        .await
        .unwrap();
}

// T-12, D-24: one child loses its worker once, the other one for the last time.
#[tokio::test(flavor = "multi_thread")]
async fn leases_that_are_lost() {
    let story = async |world: &World| {
        let family = Family::new(world).await;
        world.arm().await;
        let lose =
            "update steps set lease_expires_at = now() - interval '1 second', lost_leases = $2
            where task_id = $1 and status = 'running'";
        for (child, lost_before) in [(family.a, 0), (family.b, 2)] {
            until("its step has been lost", async || {
                let lost = sqlx::query(lose).bind(child.0).bind(lost_before);
                let lost = lost.execute(&world.engine.pool).await.unwrap();
                lost.rows_affected() == 1
            })
            .await;
        }
        assert_eq!(world.end(family.b).await.0, Failed);
        family.ends(world, [Completed, Completed, Failed]).await;
        let (_, output) = world.end(family.parent).await;
        for part in ["1 completed, 1 failed", "Reason: lease_lost: "] {
            assert!(output.contains(part), "{part}: {output}");
        }
        assert_eq!(family.woken(world).await, (1, 2));
        let attempts = "select max(attempt)::bigint from steps where task_id = $1";
        assert!(ask::<i64>(&world.engine, attempts, family.a).await >= 2);
    };
    SWEEP.run(story).await;
}

// T-7: a child and its parent that have ended are written to; the parent is not woken by its child a second time.
#[tokio::test(flavor = "multi_thread")]
async fn messages_that_reopen() {
    let story = async |world: &World| {
        let family = Family::new(world).await;
        family.ends(world, [Completed; 3]).await;
        assert_eq!(family.woken(world).await, (1, 2));
        world.arm().await;
        world.append(family.a, "more").await;
        let again = (Completed, "heard: more".to_owned());
        assert_eq!(world.end(family.a).await, again);
        world.append(family.parent, "and now?").await;
        let again = (Completed, "heard: and now?".to_owned());
        assert_eq!(world.end(family.parent).await, again);
        assert_eq!(family.woken(world).await, (1, 3));
        assert_eq!(decide_steps(&world.engine, family.a).await, 2);
    };
    SWEEP.run(story).await;
}

// H-05, T-12: whoever loses its worker fails at once, so the call that makes the children is never finished when it dies
// between its two commits, or in the call after it. Whatever is there by then ends: children that have not been started
// are stopped, the others end by themselves.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_never_finished() {
    let story = async |world: &World| {
        let args = delegate(world.engine.demo.researcher, &["a", "b"]).to_string();
        let other = json!({"task_id": TaskId::new()}).to_string();
        world
            .engine
            .llm()
            .script(move |r| match (r.first_user(), r.turn()) {
                ("lead", 0) => Reply::text("")
                    .and_call("1", "delegate_tasks", &args)
                    .and_call("2", "get_subtask_result", &other),
                _ => Reply::text(r.last_user()),
            });
        world.arm().await;
        let parent = world.post("lead").await;
        let (status, output) = world.end(parent).await;
        let children = world.engine.children(parent).await;
        let mut ends = Vec::new();
        for child in &children {
            ends.push(world.end(*child).await.0);
        }
        if status == Failed {
            assert!(output.contains("lease_lost"), "{output}");
            // One worker was lost, with it the parent. All children that were made were made together, and either never
            // started, or ran on: one that the same worker had in hand is lost with it.
            assert!([0, 2].contains(&ends.len()), "{ends:?}");
            let stopped = ends.iter().filter(|end| **end == Stopped).count();
            assert!([0, ends.len()].contains(&stopped), "{ends:?}");
        } else {
            assert_eq!((status, ends.len()), (Completed, 2), "{output}");
            assert!(!ends.contains(&Stopped), "{ends:?}");
            assert_eq!(resume_messages(&world.engine, parent).await.len(), 1);
        }
    };
    let sweep = Sweep {
        config: |c| c.worker.max_attempts = 1,
        ..SWEEP
    };
    sweep.run(story).await;
}
