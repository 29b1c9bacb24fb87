//! Forces the order of a race: a lock that the test holds in a connection of its own stops the engine exactly where the
//! test wants it, and `until_waiting` tells when it has come there.

use crate::{
    engine::{Engine, Process, until},
    stub_llm::{Gate, Reply},
};
use reconvene::{
    domain::{
        agent::AgentDefinition,
        ids::{AgentId, TaskId, WorkspaceId},
        step::Claim,
        task::{AgentRef, TaskStatus::WaitingForInput},
    },
    lifecycle::{
        self,
        match_signals::match_signals,
        stop::{StopReceipt, stop},
    },
    orchestrator::Orchestrator,
    runtime::Progress,
    store::tasks::Setup,
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};
use std::collections::HashMap;
use tokio::task::JoinHandle;
use uuid::Uuid;

/// Locks that are held until `release`.
pub struct Hold {
    pub conn: PgConnection,
}

impl Hold {
    async fn new(pool: &PgPool) -> Self {
        let conn = PgConnection::connect_with(&pool.connect_options()).await;
        Self {
            conn: conn.unwrap(),
        }
    }

    /// Holds what `select` locks, of the row with this id.
    pub async fn row(pool: &PgPool, select: &'static str, id: Uuid) -> Self {
        let mut hold = Self::new(pool).await;
        hold.run("begin").await;
        sqlx::query(select)
            .bind(id)
            .fetch_all(&mut hold.conn)
            .await
            .unwrap();
        hold
    }

    pub async fn task(pool: &PgPool, task: TaskId) -> Self {
        Self::row(
            pool,
            "select 1 from tasks where id = $1 for no key update",
            task.0,
        )
        .await
    }

    /// Stops every `event` (as `before update on steps`) for whose row `when` holds, by a trigger that waits for a lock.
    pub async fn stall(pool: &PgPool, event: &str, when: &str) -> Self {
        let mut hold = Self::new(pool).await;
        let key = fastrand::u32(..);
        hold.run(&format!("select pg_advisory_lock({key})")).await;
        hold.run(&format!(
            "create function stall_{key}() returns trigger language plpgsql as
                $$ begin perform pg_advisory_xact_lock_shared({key}); return new; end $$;
             create trigger stall_{key} {event} for each row when ({when}) execute function stall_{key}()"
        ))
        .await;
        hold
    }

    pub async fn run(&mut self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
            .execute(&mut self.conn)
            .await
            .unwrap();
    }

    pub async fn release(mut self) {
        self.run("rollback; select pg_advisory_unlock_all()").await;
        self.conn.close().await.unwrap();
    }
}

/// Waits until so many sessions of the database wait for a lock.
pub async fn until_waiting(pool: &PgPool, n: i64) {
    until(&format!("{n} sessions wait for a lock"), async || {
        let waiting: i64 = sqlx::query_scalar(
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'",
        )
        .fetch_one(pool)
        .await
        .unwrap();
        waiting == n
    })
    .await;
}

/// A worker that runs, and an orchestrator that does what the test tells it.
pub struct ByHand {
    pub orchestrator: Orchestrator,
    worker: Process,
}

impl ByHand {
    pub fn of(engine: &Engine) -> Self {
        let hub = engine.hub.clone();
        Self {
            orchestrator: Orchestrator::new(&engine.config, engine.pool.clone(), hub.clone()),
            worker: Process::start_on(hub, &engine.config, &engine.pool, true, false),
        }
    }

    /// Handles events, and nothing else, until the condition holds.
    pub async fn dispatch_until(&self, what: &str, condition: impl AsyncFn() -> bool) {
        until(what, async || {
            self.orchestrator.dispatch().await.unwrap();
            condition().await
        })
        .await;
    }

    pub async fn stop(self) {
        self.worker.stop().await;
    }
}

/// A round of the SignalMatcher that leaves waking to the event loop.
pub async fn match_only(engine: &Engine) -> Progress {
    match_signals(&engine.pool, &engine.hub, 100).await.unwrap()
}

/// How the task of a claim runs.
pub async fn setup(pool: &PgPool, claim: &Claim) -> Setup {
    let (workspace, agent, version, root, depth): (Uuid, Uuid, i32, Uuid, i16) = sqlx::query_as(
        "select agent_workspace_id, agent_id, agent_version, root_task_id, spawn_depth from tasks
         where workspace_id = $1 and id = $2",
    )
    .bind(claim.key.workspace.0)
    .bind(claim.key.task.0)
    .fetch_one(pool)
    .await
    .unwrap();
    Setup {
        agent: AgentRef {
            workspace: WorkspaceId(workspace),
            agent: AgentId(agent),
            version,
        },
        root: TaskId(root),
        depth: depth.into(),
        delegation_disabled: false,
        own_models: false,
        budgeted: false,
    }
}

/// A parent that waits for its children, whose replies are held. The children's names are their prompts.
pub struct Family {
    pub parent: TaskId,
    pub children: Vec<TaskId>,
    gates: HashMap<&'static str, Gate>,
}

impl Family {
    /// Posts the parent and waits until it rests and all children ask their model.
    pub async fn new(engine: &Engine, names: &[&'static str], by_hand: Option<&ByHand>) -> Self {
        let gates: HashMap<_, _> = names.iter().map(|n| (*n, Gate::new())).collect();
        let (args, held) = (delegate(engine.demo.researcher, names), gates.clone());
        engine
            .llm()
            .script(move |r| match (held.get(r.first_user()), r.turn()) {
                (Some(gate), _) => {
                    Reply::text(format!("result of {}", r.first_user())).held_by(gate)
                }
                (None, 0) => Reply::call("delegate_tasks", args.clone()),
                (None, _) => Reply::text(format!("heard: {}", r.last_user())),
            });
        let before = engine.llm().requests().len();
        let parent = engine.post("lead the family").await;
        let ready = async || {
            engine.status(parent).await == WaitingForInput
                && engine.llm().requests().len() == before + 1 + names.len()
        };
        match by_hand {
            Some(by_hand) => by_hand.dispatch_until("the family is ready", ready).await,
            None => until("the family is ready", ready).await,
        }
        Self {
            parent,
            children: engine.children(parent).await,
            gates,
        }
    }

    /// Lets a child's model answer and waits for the child's end.
    pub async fn finish(&self, engine: &Engine, name: &str) {
        self.gates[name].open();
        let child: Uuid = sqlx::query_scalar(
            "select i.task_id from task_items i join tasks t on t.id = i.task_id
             where t.parent_task_id = $1 and i.seq = 1 and i.text = $2",
        )
        .bind(self.parent.0)
        .bind(name)
        .fetch_one(&engine.pool)
        .await
        .unwrap();
        engine.end(TaskId(child)).await;
    }

    pub fn open_all(&self) {
        self.gates.values().for_each(Gate::open);
    }

    pub async fn finish_all(&self, engine: &Engine) {
        self.open_all();
        for child in &self.children {
            engine.end(*child).await;
        }
    }
}

pub fn delegate(agent: AgentId, prompts: &[&str]) -> Value {
    let tasks: Vec<Value> = prompts
        .iter()
        .map(|p| json!({"agent_group_id": agent, "prompt": p}))
        .collect();
    json!({"tasks": tasks})
}

/// A published agent that may delegate.
pub async fn agent(engine: &Engine, name: &str) -> AgentId {
    agent_with(engine, name, |_| {}).await
}

pub async fn agent_with(
    engine: &Engine,
    name: &str,
    set: impl FnOnce(&mut AgentDefinition),
) -> AgentId {
    let mut definition = AgentDefinition {
        name: name.into(),
        instructions: "Do it.".into(),
        ..AgentDefinition::default()
    };
    set(&mut definition);
    lifecycle::agents::create(&engine.pool, engine.workspace(), &definition)
        .await
        .unwrap()
        .id
}

/// A stop on its way.
pub fn stopping(engine: &Engine, task: TaskId, subtasks: bool) -> JoinHandle<StopReceipt> {
    let (pool, hub, workspace) = (engine.pool.clone(), engine.hub.clone(), engine.workspace());
    tokio::spawn(async move {
        let receipt = stop(&pool, &hub, workspace, task, subtasks).await;
        receipt.unwrap().expect("the task is there")
    })
}

/// How often a test that may fail by chance only is repeated: `RECONVENE_REPEAT` times `n`.
pub fn repeats(n: usize) -> usize {
    let factor = std::env::var("RECONVENE_REPEAT").ok();
    n * factor.map_or(1, |f| {
        f.parse::<usize>().expect("RECONVENE_REPEAT is a number")
    })
}

/// One value that a query for this task counts or names.
pub async fn ask<T>(engine: &Engine, sql: &'static str, task: TaskId) -> T
where
    T: Send + Unpin + for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    sqlx::query_scalar(sql)
        .bind(task.0)
        .fetch_one(&engine.pool)
        .await
        .unwrap()
}

pub async fn decide_steps(engine: &Engine, task: TaskId) -> i64 {
    let sql = "select count(*) from steps where task_id = $1 and ordinal = 0";
    ask(engine, sql, task).await
}

/// The messages that the task was resumed with.
pub async fn resume_messages(engine: &Engine, task: TaskId) -> Vec<String> {
    sqlx::query_scalar(
        "select text from task_items where task_id = $1 and kind = 'resume_message' order by seq",
    )
    .bind(task.0)
    .fetch_all(&engine.pool)
    .await
    .unwrap()
}

/// Lets every running lease run out.
pub async fn expire_leases(engine: &Engine) {
    sqlx::query(
        "update steps set lease_expires_at = now() - interval '1 second' where status = 'running'",
    )
    .execute(&engine.pool)
    .await
    .unwrap();
}
