//! Calls of several parents in one transaction: each is judged by itself. Made by hand, with claims that no worker has.

use crate::{
    engine::Engine,
    forced::{Hold, delegate as arguments, until_waiting},
};
use reconvene::{
    domain::{
        delegation::{Delegator, Limits, plan},
        ids::{AgentId, TaskId},
        step::Claim,
        task::TaskKey,
    },
    lifecycle::{
        claim::claim,
        delegate::{Delegated, Delegations, Request, delegate},
    },
    orchestrator::Orchestrator,
};

const LIMITS: Limits = Limits {
    max_depth: 3,
    max_children_per_call: 250,
    default_timeout_minutes: 60,
    max_timeout_minutes: 1440,
};

/// One call for each step that is due: two children for `agent`.
async fn requests(engine: &Engine, agent: AgentId) -> Vec<Request> {
    let orchestrator = Orchestrator::new(&engine.config, engine.pool.clone(), engine.hub.clone());
    orchestrator.dispatch().await.unwrap();
    let worker = engine.hub.process;
    let claimed = claim(&engine.pool, worker, 60, 10).await.unwrap();
    let request = |step: reconvene::store::steps::Claimed| {
        let by = Delegator {
            agent: step.setup.agent.agent,
            depth: step.setup.depth,
        };
        let arguments = serde_json::from_value(arguments(agent, &["a", "b"])).unwrap();
        Request {
            claim: step.claim,
            setup: step.setup,
            plan: plan(&arguments, by, &LIMITS).unwrap(),
        }
    };
    claimed.into_iter().map(request).collect()
}

/// Nobody will work for the claims of these tests: what they have made is stopped.
async fn end(mut engine: Engine) {
    let roots: Vec<uuid::Uuid> =
        sqlx::query_scalar("select id from tasks where parent_task_id is null")
            .fetch_all(&engine.pool)
            .await
            .unwrap();
    for root in roots {
        assert_eq!(engine.stop(TaskId(root), true).await.left_alive, 0);
    }
    engine.resume();
    engine.close().await;
}

fn made(answer: &Delegated) -> bool {
    matches!(answer, Delegated::Made { children, .. } if children.len() == 2)
}

async fn children(engine: &Engine, parent: TaskKey) -> usize {
    engine.children(parent.task).await.len()
}

// D-20, D-5, D-24, T-11: one good call, one for an agent that is not there, one whose claim has been lost.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_are_written_together_are_judged_one_by_one() {
    let engine = Engine::scripted_with(|_| {}).await;
    for text in ["1", "2", "3", "4"] {
        engine.post(text).await;
    }
    let researcher = engine.demo.researcher;
    let mut calls = requests(&engine, researcher).await;
    calls[1].plan.children[1].agent = AgentId(uuid::Uuid::new_v4());
    calls[2].claim.attempt += 1;
    let answers = delegate(&engine.pool, &calls, 5000).await.unwrap();
    assert!(made(&answers[0]) && made(&answers[3]), "{answers:?}");
    assert!(matches!(answers[1], Delegated::Refused(_)), "{answers:?}");
    assert!(matches!(answers[2], Delegated::Stale), "{answers:?}");
    for (call, expected) in calls.iter().zip([2, 0, 0, 2]) {
        assert_eq!(children(&engine, call.claim.key.task_key()).await, expected);
    }
    let pairs = "select count(*) from await_groups g join awaits a on a.workspace_id = g.workspace_id and a.group_id = g.id
        join tasks t on t.workspace_id = a.workspace_id and t.id::text = a.correlation_key
            and t.parent_task_id = g.task_id and t.parent_step_id = g.step_id and t.ordinal = a.ordinal
        where g.total = 2 and g.pending = 2";
    assert_eq!(engine.count(pairs).await, 4);

    // D-26: the same again, with what was not made before
    calls[1].plan.children[1].agent = researcher;
    let again = delegate(&engine.pool, &calls, 5000).await.unwrap();
    for (first, second) in answers.iter().zip(&again) {
        if made(first) {
            assert_eq!(format!("{first:?}"), format!("{second:?}"));
        }
    }
    assert!(made(&again[1]), "{again:?}");
    assert_eq!(
        engine.count("select count(*) from awaits").await,
        engine
            .count("select count(*) from tasks where parent_task_id is not null")
            .await
    );
    end(engine).await;
}

// what the database refuses for one call harms no other.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_the_database_refuses_harms_no_other() {
    let engine = Engine::scripted_with(|_| {}).await;
    for text in ["1", "2", "3"] {
        engine.post(text).await;
    }
    let mut calls = requests(&engine, engine.demo.researcher).await;
    calls[1].plan.children[0].prompt = "\0".into();
    let delegations = Delegations::start(engine.pool.clone(), 5000, 10);
    let [first, second, third] = <[Request; 3]>::try_from(calls).unwrap();
    let (first, second, third) = tokio::join!(
        delegations.delegate(first),
        delegations.delegate(second),
        delegations.delegate(third)
    );
    assert!(made(&first.unwrap()) && made(&third.unwrap()));
    assert!(second.is_err(), "{second:?}");
    assert_eq!(
        engine
            .count("select count(*) from tasks where parent_task_id is not null")
            .await,
        4
    );
    end(engine).await;
}

// D-50, R-1: two calls of one tree at the same moment, with room for one of them, in one transaction and in two.
#[tokio::test(flavor = "multi_thread")]
async fn two_calls_at_once_do_not_outgrow_the_tree() {
    for together in [true, false] {
        let engine = Engine::scripted_with(|_| {}).await;
        let root = engine.post("root").await;
        let call = requests(&engine, engine.demo.researcher).await;
        assert!(made(&delegate(&engine.pool, &call, 2).await.unwrap()[0]));
        // Both children begin, and may delegate themselves.
        sqlx::query(
            "insert into orchestrator_events (workspace_id, task_id, kind)
             select workspace_id, id, 'new_message' from tasks where parent_task_id = $1",
        )
        .bind(root.0)
        .execute(&engine.pool)
        .await
        .unwrap();
        let calls = requests(&engine, engine.demo.writer).await;
        assert_eq!(calls.len(), 2);
        let answers = if together {
            delegate(&engine.pool, &calls, 5).await.unwrap()
        } else {
            let row = Hold::task(&engine.pool, root).await;
            let each: Vec<_> = calls
                .into_iter()
                .map(|call| {
                    let pool = engine.pool.clone();
                    tokio::spawn(async move { delegate(&pool, &[call], 5).await })
                })
                .collect();
            until_waiting(&engine.pool, 2).await;
            row.release().await;
            let mut answers = vec![];
            for one in each {
                answers.extend(one.await.unwrap().unwrap());
            }
            answers
        };
        assert_eq!(answers.iter().filter(|a| made(a)).count(), 1, "{answers:?}");
        let refused = |a: &&Delegated| matches!(a, Delegated::Refused(why) if why.0.contains("2 more tasks where 4"));
        assert_eq!(answers.iter().filter(refused).count(), 1, "{answers:?}");
        assert_eq!(
            engine
                .count("select count(*) from tasks where spawn_depth = 2")
                .await,
            2
        );
        end(engine).await;
    }
}

// W-8: a call of many parents waits for whoever holds one of them, and then sees what that one has done.
#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_is_lost_while_the_batch_waits_is_left_out() {
    let engine = Engine::scripted_with(|_| {}).await;
    for text in ["1", "2"] {
        engine.post(text).await;
    }
    let calls = requests(&engine, engine.demo.researcher).await;
    let Claim { key, .. } = calls[0].claim;
    let mut row = Hold::task(&engine.pool, key.task).await;
    let pool = engine.pool.clone();
    let both = tokio::spawn(async move { delegate(&pool, &calls, 5000).await });
    until_waiting(&engine.pool, 1).await;
    row.run(&format!(
        "update steps set attempt = attempt + 1 where task_id = '{}'; commit",
        key.task
    ))
    .await;
    row.release().await;
    let answers = both.await.unwrap().unwrap();
    assert!(matches!(answers[0], Delegated::Stale), "{answers:?}");
    assert!(made(&answers[1]), "{answers:?}");
    end(engine).await;
}
