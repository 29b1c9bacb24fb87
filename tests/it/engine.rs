//! The engine of one or several processes in a test: loops on a real database, a model behind HTTP or offline.

pub use crate::process::Process;
use crate::{stub_llm::StubLlm, support};
use reconvene::{
    config::{Config, Provider},
    domain::{
        ids::{ProcessId, TaskId, WorkspaceId},
        task::{TaskKey, TaskStatus},
        text::MessageText,
    },
    lifecycle::{
        self,
        demo::{Demo, seed_demo},
        submit::{NewMessage, Recipient, Submitted, Submitter},
    },
    runtime::Hub,
};
use sqlx::PgPool;
use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

/// Longer than any wait of a healthy test.
const PATIENCE: Duration = Duration::from_secs(30);

/// A database with the demo workspace, and what a test does with it.
pub struct Engine {
    pub pool: PgPool,
    pub config: Config,
    pub demo: Demo,
    pub submitter: Submitter,
    pub hub: Arc<Hub>,
    pub llm: Option<StubLlm>,
    process: Option<Process>,
}

/// Settings under which tests are quick and their faults are seen soon.
pub fn test_config() -> Config {
    let mut config = Config::from_defaults();
    config.worker.poll_interval_ms = 100;
    config.orchestrator.poll_interval_ms = 100;
    config.llm.retry_base_ms = 20;
    config
}

impl Engine {
    /// One process with worker and orchestrator, the offline model.
    pub async fn offline() -> Self {
        Self::build(None, |_| {}).await.running()
    }

    /// One process with worker and orchestrator, a scripted provider over HTTP.
    pub async fn scripted() -> Self {
        Self::scripted_with(|_| {}).await.running()
    }

    /// As [`Engine::scripted`] with other settings, and no loop running yet.
    pub async fn scripted_with(set: impl FnOnce(&mut Config)) -> Self {
        Self::build(Some(StubLlm::start().await), set).await
    }

    async fn build(llm: Option<StubLlm>, set: impl FnOnce(&mut Config)) -> Self {
        let mut config = test_config();
        if let Some(llm) = &llm {
            config.llm.provider = Provider::OpenAi;
            config.llm.base_url = Some(llm.base_url().to_owned());
            config.llm.model = Some("stub".into());
        }
        set(&mut config);
        let max = config.database.max_connections.min(12);
        let pool = support::database_with(|p| p.max_connections(max)).await;
        let demo = seed_demo(&pool).await.unwrap();
        let hub = Arc::new(Hub::new(ProcessId::new()));
        let submitter = Submitter::start(pool.clone(), hub.clone());
        Self {
            pool,
            config,
            demo,
            submitter,
            hub,
            llm,
            process: None,
        }
    }

    /// Starts the loops of this process.
    pub fn running(mut self) -> Self {
        self.resume();
        self
    }

    pub fn resume(&mut self) {
        let process = Process::start_on(self.hub.clone(), &self.config, &self.pool, true, true);
        self.process = Some(process);
    }

    /// Kills the loops of this process where they stand.
    pub async fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill().await;
        }
    }

    pub fn llm(&self) -> &StubLlm {
        self.llm.as_ref().expect("a scripted engine")
    }

    pub fn workspace(&self) -> WorkspaceId {
        self.demo.workspace
    }

    pub fn key(&self, task: TaskId) -> TaskKey {
        TaskKey {
            workspace: self.workspace(),
            task,
        }
    }

    pub fn message(&self, to: Recipient, text: &str) -> NewMessage {
        NewMessage {
            workspace: self.workspace(),
            to,
            text: MessageText::parse(text).unwrap(),
            title: None,
            disable_delegation: false,
            skip_wait: false,
            metadata: Default::default(),
            budget: None,
            idempotency: None,
        }
    }

    /// A new task on the default agent, which may delegate.
    pub async fn post(&self, text: &str) -> TaskId {
        self.submit(self.message(Recipient::DefaultAgent, text))
            .await
            .task
    }

    pub async fn append(&self, task: TaskId, text: &str) -> Submitted {
        self.submit(self.message(Recipient::Task(task), text)).await
    }

    pub async fn submit(&self, message: NewMessage) -> Submitted {
        self.submitter.submit(message).await.unwrap()
    }

    pub async fn stop(&self, task: TaskId, subtasks: bool) -> lifecycle::stop::StopReceipt {
        lifecycle::stop::stop(&self.pool, &self.hub, self.workspace(), task, subtasks)
            .await
            .unwrap()
            .expect("the task is there")
    }

    pub async fn status(&self, task: TaskId) -> TaskStatus {
        let text: String = sqlx::query_scalar("select status from tasks where id = $1")
            .bind(task.0)
            .fetch_one(&self.pool)
            .await
            .unwrap();
        text.parse().unwrap()
    }

    /// Waits until the task has this status.
    pub async fn until(&self, task: TaskId, status: TaskStatus) {
        self.until_true(&format!("task is {status}"), async || {
            self.status(task).await == status
        })
        .await;
    }

    /// Waits for the end of the task and returns its status and output.
    pub async fn end(&self, task: TaskId) -> (TaskStatus, String) {
        self.until_true("task has ended", async || {
            self.status(task).await.is_terminal()
        })
        .await;
        let (status, output, error): (String, Option<String>, Option<serde_json::Value>) =
            sqlx::query_as("select status, output, error from tasks where id = $1")
                .bind(task.0)
                .fetch_one(&self.pool)
                .await
                .unwrap();
        (
            status.parse().unwrap(),
            output.or(error.map(|e| e.to_string())).unwrap_or_default(),
        )
    }

    /// The children of a task in spawn order.
    pub async fn children(&self, task: TaskId) -> Vec<TaskId> {
        sqlx::query_scalar("select id from tasks where parent_task_id = $1 order by id")
            .bind(task.0)
            .fetch_all(&self.pool)
            .await
            .unwrap()
            .into_iter()
            .map(TaskId)
            .collect()
    }

    pub async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// Waits for a condition with a limit.
    pub async fn until_true(&self, what: &str, condition: impl AsyncFn() -> bool) {
        until(what, condition).await;
    }

    /// Waits until nothing is left to do, then makes the closing check of every case.
    pub async fn close(mut self) {
        rest(&self.pool).await;
        check(&self.pool).await;
        if let Some(llm) = &self.llm {
            assert_eq!(
                llm.refusals(),
                Vec::<String>::new(),
                "the strict provider refused"
            );
        }
        if let Some(process) = self.process.take() {
            process.stop().await;
        }
    }
}

pub async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < PATIENCE, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Fails instead of waiting for ever.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited in vain for {what}"),
    }
}

/// Waits until nothing is left to do.
pub async fn rest(pool: &PgPool) {
    let sql = "select (select count(*) from orchestrator_events where dead_at is null)
            + (select count(*) from signals where status = 'pending')
            + (select count(*) from steps where status in ('queued', 'running'))";
    until("everything is at rest", async || {
        let left: i64 = sqlx::query_scalar(sql).fetch_one(pool).await.unwrap();
        left == 0
    })
    .await;
}

/// The closing check of `cases.md`: each query counts what must not be.
pub async fn check(pool: &PgPool) {
    let faults: Vec<(&str, &str)> = vec![
        (
            "running steps without a live lease",
            "select count(*) from steps where status = 'running' and lease_expires_at < now()",
        ),
        (
            "open groups whose children are all terminal",
            "select count(*) from await_groups g where g.status = 'open' and g.source_type = 'child_task'
             and not exists (select 1 from awaits a join tasks t on t.workspace_id = a.workspace_id and t.id = a.correlation_key::uuid
                where a.workspace_id = g.workspace_id and a.group_id = g.id and t.status not in ('completed', 'failed', 'stopped'))",
        ),
        (
            "groups whose counters differ from their awaits",
            "select count(*) from await_groups g
             where g.pending <> (select count(*) from awaits a where a.workspace_id = g.workspace_id and a.group_id = g.id and a.status = 'pending')
                or g.total <> (select count(*) from awaits a where a.workspace_id = g.workspace_id and a.group_id = g.id)
                or g.completed > (select count(*) from awaits a where a.workspace_id = g.workspace_id and a.group_id = g.id and a.status = 'completed')",
        ),
        (
            "closed groups of living tasks that were not told, or told twice",
            "select count(*) from await_groups g join tasks t on t.workspace_id = g.workspace_id and t.id = g.task_id
             where g.status in ('completed', 'skipped') and g.source_type = 'child_task'
                and t.status in ('completed', 'waiting_for_input') and t.deleted_at is null
                and (select count(*) from task_items i where i.workspace_id = g.workspace_id
                    and i.task_id = g.task_id and i.kind = 'resume_message' and i.id = g.id) <> 1",
        ),
        (
            "resume messages without a closed group",
            "select count(*) from task_items i where i.kind = 'resume_message' and not exists
                (select 1 from await_groups g where g.workspace_id = i.workspace_id and g.id = i.id and g.resumed_at is not null)",
        ),
        (
            "gaps in seq",
            "select count(*) from tasks t where t.last_seq <>
                (select count(*) from task_items i where i.workspace_id = t.workspace_id and i.task_id = t.id)",
        ),
        (
            "tool results that are not one per started call, in call order",
            "select count(*) from (
                select i.task_id, i.turn, array_agg(i.data ->> 'ordinal' order by i.seq) as got,
                    array_agg(i.data ->> 'ordinal' order by (i.data ->> 'ordinal')::int) as want,
                    count(*) <> count(distinct i.data ->> 'ordinal') as doubled
                from task_items i where i.kind = 'tool_result' group by 1, 2) r
             where r.got <> r.want or r.doubled",
        ),
        (
            "terminal tasks whose newest status item differs",
            "select count(*) from tasks t where t.status in ('completed', 'failed', 'stopped') and t.status <> coalesce(
                (select i.data ->> 'status' from task_items i where i.workspace_id = t.workspace_id and i.task_id = t.id and i.kind = 'status'
                 order by i.seq desc limit 1), '')",
        ),
        (
            "terminal children without exactly one signal",
            "select count(*) from tasks t where t.parent_task_id is not null
                and t.status in ('completed', 'failed', 'stopped')
                and (select count(*) from signals s where s.workspace_id = t.workspace_id
                    and s.source_type = 'child_task' and s.dedup_key = t.id::text) <> 1",
        ),
        (
            "children that were never started although nothing holds them",
            "select count(*) from tasks t where t.status = 'pending' and not exists
                (select 1 from orchestrator_events e where e.workspace_id = t.workspace_id and e.task_id = t.id) and not exists
                (select 1 from steps s where s.workspace_id = t.workspace_id and s.task_id = t.parent_task_id
                    and s.id = t.parent_step_id and s.status in ('queued', 'running'))",
        ),
        (
            "awaits of stopped or completed tasks that are pending",
            "select count(*) from awaits a join await_groups g on g.workspace_id = a.workspace_id and g.id = a.group_id
             join tasks t on t.workspace_id = g.workspace_id and t.id = g.task_id
             where a.status = 'pending' and t.status in ('stopped', 'completed')",
        ),
        (
            "tasks that ended twice without a beginning between",
            "select count(*) from (
                select i.data ->> 'status' as status,
                    lag(i.data ->> 'status') over (partition by i.task_id order by i.seq) as before
                from task_items i where i.kind = 'status') s
             where s.status in ('completed', 'failed', 'stopped') and s.before in ('completed', 'failed', 'stopped')",
        ),
        (
            "decisions that were shown nothing new",
            "select count(*) from (
                select seen_seq, lag(seen_seq) over (partition by task_id order by turn) as before from decision_logs) d
             where d.seen_seq <= d.before",
        ),
        (
            "calls without exactly one result, in tasks that nothing has cut short",
            "select count(*) from task_items m join tasks t on t.workspace_id = m.workspace_id and t.id = m.task_id
             where t.status = 'completed' and jsonb_array_length(m.data -> 'calls') <>
                (select count(*) from task_items r where r.workspace_id = m.workspace_id and r.task_id = m.task_id and r.turn = m.turn
                    and r.kind = 'tool_result')
                and not exists (select 1 from task_items s where s.workspace_id = m.workspace_id and s.task_id = m.task_id and s.kind = 'status'
                    and s.data ->> 'status' in ('stopped', 'failed'))",
        ),
        ("dead events", "select count(*) from orchestrator_events where dead_at is not null"),
        (
            "more assistant messages than one per decide step",
            "select count(*) from (select task_id, turn from task_items where kind = 'assistant_message'
                group by 1, 2 having count(*) > 1) d",
        ),
    ];
    for (what, sql) in faults {
        let n: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
            .fetch_one(pool)
            .await
            .unwrap();
        assert_eq!(n, 0, "{what}");
    }
}
