//! The floor: the rows that a delegation's children need, written by hand-made set-based SQL on one connection.
//!
//! It goes through every state that the service's rows go through (events in and out, steps queued, running and
//! completed, tasks pending, running and completed, signals pending and matched, awaits pending and completed), in
//! batches of 100, and 20 for the ends. It decides nothing, checks nothing, reads nothing back and asks no model: no
//! service that keeps these rows can be much faster on this machine at this moment.

use crate::{cluster::Meter, text};
use anyhow::{Context, ensure};
use sqlx::{Connection, PgConnection, PgPool, postgres::PgConnectOptions};
use std::time::{Duration, Instant};
use uuid::Uuid;

const BATCH: usize = 100;
const ENDS: usize = 20;

/// One run of the floor.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub time: Duration,
    /// Transactions that wrote something.
    pub commits: f64,
    pub wal_bytes: f64,
}

/// What the floor's rows belong to; made once.
pub struct Floor {
    conn: PgConnection,
    workspace: Uuid,
    agent: Uuid,
}

impl Floor {
    pub async fn new(options: &PgConnectOptions) -> anyhow::Result<Self> {
        let mut conn = PgConnection::connect_with(options).await?;
        let (workspace, agent) = (Uuid::now_v7(), Uuid::now_v7());
        sqlx::query("insert into workspaces (id, slug, name) values ($1, 'floor', 'Floor')")
            .bind(workspace)
            .execute(&mut conn)
            .await?;
        sqlx::query(
            "insert into agents (workspace_id, id, template, name, draft) values ($1, $2, 'custom', 'Floor', '{}')",
        )
        .bind(workspace)
        .bind(agent)
        .execute(&mut conn)
        .await?;
        sqlx::query(
            "insert into agent_versions (workspace_id, agent_id, version, definition) values ($1, $2, 1, '{}')",
        )
        .bind(workspace)
        .bind(agent)
        .execute(&mut conn)
        .await?;
        Ok(Self {
            conn,
            workspace,
            agent,
        })
    }

    /// Writes the rows of `children` children. Nothing else may run on the database meanwhile.
    pub async fn run(&mut self, pool: &PgPool, children: usize) -> anyhow::Result<Run> {
        let (parent, group) = self.parent(children).await?;
        let ids: Vec<Uuid> = (0..children).map(|_| Uuid::now_v7()).collect();
        let keys: Vec<String> = ids.iter().map(Uuid::to_string).collect();
        let prompts: Vec<String> = (0..children).map(text::child_prompt).collect();
        let titles: Vec<String> = (0..children).map(text::item).collect();
        let answers: Vec<String> = (0..children).map(text::child_answer).collect();
        // With plans from a time when the tables were empty, it would read them whole for each batch.
        sqlx::raw_sql("analyze").execute(&mut self.conn).await?;
        let meter = Meter::start(pool).await?;
        let begun = Instant::now();
        for at in (0..children).step_by(BATCH) {
            let end = (at + BATCH).min(children);
            self.create(
                parent,
                group,
                at,
                &ids[at..end],
                &keys[at..end],
                &prompts[at..end],
                &titles[at..end],
            )
            .await?;
        }
        for _ in (0..children).step_by(BATCH) {
            self.dispatch().await?;
        }
        for _ in (0..children).step_by(BATCH) {
            self.claim().await?;
        }
        for at in (0..children).step_by(ENDS) {
            let end = (at + ENDS).min(children);
            self.finish(&ids[at..end], &keys[at..end], &answers[at..end])
                .await?;
        }
        for at in (0..children).step_by(BATCH) {
            let end = (at + BATCH).min(children);
            self.settle(group, at, &keys[at..end]).await?;
        }
        let time = begun.elapsed();
        let used = meter.stop(pool).await?;
        self.check(group, children).await?;
        Ok(Run {
            time,
            commits: used.commits,
            wal_bytes: used.wal_bytes,
        })
    }

    async fn parent(&mut self, children: usize) -> anyhow::Result<(Uuid, Uuid)> {
        let (parent, group) = (Uuid::now_v7(), Uuid::now_v7());
        sqlx::query(
            "insert into tasks (workspace_id, id, agent_workspace_id, agent_id, agent_version, decides_left, title,
                root_task_id, source, status, last_seq, turn)
             values ($1, $2, $1, $3, 1, 49, 'Floor', $2, 'chat', 'running', 1, 1)",
        )
        .bind(self.workspace)
        .bind(parent)
        .bind(self.agent)
        .execute(&mut self.conn)
        .await?;
        sqlx::query(
            "insert into await_groups (workspace_id, id, task_id, step_id, source_type, strategy, total, pending,
                window_seconds) values ($1, $2, $3, $3, 'child_task', 'all_required', $4, $4, 3600)",
        )
        .bind(self.workspace)
        .bind(group)
        .bind(parent)
        .bind(children as i32)
        .execute(&mut self.conn)
        .await?;
        Ok((parent, group))
    }

    #[allow(clippy::too_many_arguments, reason = "one argument per column")]
    async fn create(
        &mut self,
        parent: Uuid,
        group: Uuid,
        from: usize,
        ids: &[Uuid],
        keys: &[String],
        prompts: &[String],
        titles: &[String],
    ) -> anyhow::Result<()> {
        let items: Vec<Uuid> = ids.iter().map(|_| Uuid::now_v7()).collect();
        sqlx::query(
            "with c as (
                select id, item, key, prompt, title, $5 + n::integer - 1 as ordinal
                from unnest($6::uuid[], $7::uuid[], $8::text[], $9::text[], $10::text[]) with ordinality
                    as c (id, item, key, prompt, title, n)
            ), t as (
                insert into tasks (workspace_id, id, agent_workspace_id, agent_id, agent_version, decides_left, title,
                    root_task_id, parent_task_id, parent_step_id, ordinal, spawn_depth, source, last_seq, news_seq)
                select $1, id, $1, $2, 1, 50, title, $3, $3, $3, ordinal, 1, 'spawned', 1, 1 from c
            ), i as (
                insert into task_items (workspace_id, task_id, seq, id, kind, text)
                select $1, id, 1, item, 'user_message', prompt from c
            ), a as (
                insert into awaits (workspace_id, group_id, ordinal, source_type, correlation_key, scheduled_resume_at)
                select $1, $4, ordinal, 'child_task', key, now() + interval '1 hour' from c
            )
            insert into orchestrator_events (workspace_id, task_id, kind) select $1, id, 'new_message' from c",
        )
        .bind(self.workspace)
        .bind(self.agent)
        .bind(parent)
        .bind(group)
        .bind(from as i32)
        .bind(ids)
        .bind(items)
        .bind(keys)
        .bind(prompts)
        .bind(titles)
        .execute(&mut self.conn)
        .await?;
        Ok(())
    }

    async fn dispatch(&mut self) -> anyhow::Result<()> {
        let steps: Vec<Uuid> = (0..BATCH).map(|_| Uuid::now_v7()).collect();
        sqlx::query(
            "with due as (
                select workspace_id, id from orchestrator_events where dead_at is null and not_before <= now()
                order by not_before, id limit $1 for update skip locked
            ), taken as (
                delete from orchestrator_events e using due cross join lateral (
                    select e.ctid from orchestrator_events e
                    where e.workspace_id = due.workspace_id and e.id = due.id limit 1) row
                where e.ctid = row.ctid returning e.workspace_id, e.task_id
            ), t as (
                update tasks t set status = 'running', turn = 1, decides_left = decides_left - 1, started_at = now()
                from taken where t.workspace_id = taken.workspace_id and t.id = taken.task_id and t.status = 'pending'
            )
            insert into steps (workspace_id, task_id, turn, ordinal, id, kind, stop_generation)
            select workspace_id, task_id, 1, 0, ($2::uuid[])[row_number() over ()], 'decide_next_action', 0 from taken",
        )
        .bind(BATCH as i64)
        .bind(steps)
        .execute(&mut self.conn)
        .await?;
        Ok(())
    }

    async fn claim(&mut self) -> anyhow::Result<()> {
        sqlx::query(
            "with due as (
                select workspace_id, task_id, turn, ordinal from steps where status = 'queued' and run_at <= now()
                order by run_at limit $2 for no key update skip locked
            )
            update steps s set status = 'running', attempt = s.attempt + 1, worker_id = $1, started_at = now(),
                lease_expires_at = now() + interval '30 seconds'
            from due where s.workspace_id = due.workspace_id and s.task_id = due.task_id and s.turn = due.turn
                and s.ordinal = due.ordinal",
        )
        .bind(self.agent)
        .bind(BATCH as i64)
        .execute(&mut self.conn)
        .await?;
        Ok(())
    }

    async fn finish(
        &mut self,
        ids: &[Uuid],
        keys: &[String],
        answers: &[String],
    ) -> anyhow::Result<()> {
        let items: Vec<Uuid> = ids.iter().map(|_| Uuid::now_v7()).collect();
        let more: Vec<Uuid> = ids.iter().map(|_| Uuid::now_v7()).collect();
        sqlx::query(
            r#"with c as (
                select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::text[], $6::text[])
                    as c (workspace_id, id, item, more, key, answer)
            ), t as (
                update tasks t set status = 'completed', last_seq = 3, seen_seq = 1, output = c.answer, finished_at = now()
                from c where t.workspace_id = c.workspace_id and t.id = c.id and t.status = 'running'
            ), s as (
                update steps s set status = 'completed', lease_expires_at = null, finished_at = now(),
                    model = 'offline-demo', input_tokens = 300, output_tokens = 50, cached_tokens = 0
                from c where s.workspace_id = c.workspace_id and s.task_id = c.id and s.turn = 1 and s.ordinal = 0
                    and s.lease_expires_at is not null and s.attempt = 1
            ), i as (
                insert into task_items (workspace_id, task_id, seq, id, kind, turn, seen_seq, text, data)
                select workspace_id, id, 2, item, 'assistant_message', 1, 1, answer, null::jsonb from c
                union all
                select workspace_id, id, 3, more, 'status', null, null, null, '{"status": "completed"}' from c
            ), l as (
                insert into decision_logs (workspace_id, task_id, turn, prompt_hash, seen_seq, model, answer, latency_ms)
                select workspace_id, id, 1, '\x0102030405060708091011121314151601020304050607080910111213141516', 1, 'offline-demo',
                    '{"calls": [], "usage": {"input_tokens": 300, "output_tokens": 50, "cached_tokens": 0}}', 0 from c
            )
            insert into signals (workspace_id, source_type, dedup_key, correlation_key)
            select workspace_id, 'child_task', key, key from c"#,
        )
        .bind(vec![self.workspace; ids.len()])
        .bind(ids)
        .bind(items)
        .bind(more)
        .bind(keys)
        .bind(answers)
        .execute(&mut self.conn)
        .await?;
        Ok(())
    }

    async fn settle(&mut self, group: Uuid, from: usize, keys: &[String]) -> anyhow::Result<()> {
        let ordinals: Vec<i32> = (from..from + keys.len()).map(|n| n as i32).collect();
        sqlx::query(
            "with c as (
                select * from unnest($1::uuid[], $2::text[], $5::integer[]) as c (workspace_id, key, ordinal)
            ), s as (
                update signals s set status = 'matched', settled_at = now() from c
                where s.workspace_id = c.workspace_id and s.source_type = 'child_task' and s.dedup_key = c.key
                    and s.settled_at is null
            ), a as (
                update awaits a set status = 'completed', settled_at = now() from c
                where a.workspace_id = c.workspace_id and a.group_id = $4 and a.ordinal = c.ordinal
                    and a.settled_at is null
                returning 1
            )
            update await_groups set pending = pending - n, completed = completed + n,
                status = case when pending = n then 'completed' else 'open' end,
                closed_at = case when pending = n then now() end
            from (select count(*)::integer as n from a) a where workspace_id = $3 and id = $4",
        )
        .bind(vec![self.workspace; keys.len()])
        .bind(keys)
        .bind(self.workspace)
        .bind(group)
        .bind(ordinals)
        .execute(&mut self.conn)
        .await?;
        Ok(())
    }

    /// A floor that had left something out would flatter nobody.
    async fn check(&mut self, group: Uuid, children: usize) -> anyhow::Result<()> {
        let (tasks, steps, signals, events): (i64, i64, i64, i64) = sqlx::query_as(
            "with child as (
                select correlation_key as key, correlation_key::uuid as id from awaits
                where workspace_id = $2 and group_id = $1 and status = 'completed')
             select (select count(*) from child join tasks t on t.workspace_id = $2 and t.id = child.id
                    where t.status = 'completed'),
                (select count(*) from child join steps s on s.workspace_id = $2 and s.task_id = child.id
                    where s.status = 'completed'),
                (select count(*) from signals s where s.workspace_id = $2 and s.source_type = 'child_task'
                    and s.dedup_key = any(array(select key from child)) and s.status = 'matched'),
                (select count(*) from orchestrator_events)",
        )
        .bind(group)
        .bind(self.workspace)
        .fetch_one(&mut self.conn)
        .await
        .context("the floor's rows can not be counted")?;
        let n = children as i64;
        ensure!(
            (tasks, steps, signals, events) == (n, n, n, 0),
            "the floor wrote {tasks} tasks, {steps} steps, {signals} signals and left {events} events"
        );
        Ok(())
    }
}
