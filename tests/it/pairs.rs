//! Every pair of what may happen to a family at the same time, in both orders. A lock that the test holds stands where the
//! two meet: the first one comes there, the second one behind it, then both are let go. What may come of it is said by a
//! model of the contract (`Model`), which knows no locks and does one after the other.
//!
//! Nothing runs by itself here: the test is worker and orchestrator, so that each order is exactly the one that it wants.

use crate::{
    engine::{Engine, check, rest, soon, until},
    forced::{Hold, ask, decide_steps, delegate, resume_messages, setup},
};
use reconvene::{
    domain::{
        decision::{Decision, ToolCall},
        delegation::{Delegator, Limits, Plan, plan},
        ids::{ProcessId, TaskId, WorkspaceId},
        output::Answer,
        step::Claim,
        task::{
            TaskKey,
            TaskStatus::{self, *},
        },
    },
    lifecycle::{
        self,
        checkpoint::{
            self, Asked, Called, Checkpointer, Commit, Committed, Decided, Next, Outcome,
            PromptRecord,
        },
        claim::claim,
        delegate::{Delegated, Request},
        delete::delete,
        match_signals::match_signals,
        requeue::reap,
        skip::skip,
        stop::stop,
        submit::{Recipient, SubmitError, Submitter},
        time_out::time_out,
    },
    runtime::{Hub, Progress},
};
use serde_json::json;
use sqlx::PgPool;
use std::sync::Arc;
use tokio::task::JoinHandle;

/// How the family stands when the two events come.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Situation {
    /// The parent rests. Both children's steps are held by workers.
    Waiting,
    /// The children and their group are made, and the worker that has made them still holds the call: nobody is started.
    Making,
}

/// In `Waiting`, leases and runs are those of the first child's step; in `Making`, of the parent's call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    /// The first child ends and is matched: by its worker's answer, or by a stop when it has not been started.
    ChildEnds,
    /// The second one.
    OtherEnds,
    /// The call's result is committed, and its children are started.
    CallEnds,
    /// The awaits are due.
    Timeout,
    Skip,
    Message,
    Stop,
    StopWithSubtasks,
    Delete,
    /// The reaper takes the step back.
    LeaseLost,
    /// The reaper takes the step back, another worker runs it and commits.
    Rerun,
}

use Event::*;

const WAITING: [Event; 10] = [
    ChildEnds,
    OtherEnds,
    Timeout,
    Skip,
    Message,
    Stop,
    StopWithSubtasks,
    Delete,
    LeaseLost,
    Rerun,
];

const MAKING: [Event; 11] = [
    ChildEnds,
    OtherEnds,
    CallEnds,
    Timeout,
    Skip,
    Message,
    Stop,
    StopWithSubtasks,
    Delete,
    LeaseLost,
    Rerun,
];

/// What can be locked, in the order in which it is.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
enum Row {
    Parent,
    First,
    Second,
    Group,
    Awaits,
}

impl Event {
    /// The rows that it locks.
    fn locks(self, situation: Situation) -> &'static [Row] {
        use Row::*;
        match (self, situation) {
            (ChildEnds, _) | (Rerun, Situation::Waiting) => &[First, Group, Awaits],
            (OtherEnds, _) => &[Second, Group, Awaits],
            (Timeout, _) => &[Awaits],
            (LeaseLost, Situation::Waiting) => &[First],
            (Skip, _) | (Stop | Delete, Situation::Waiting) => &[Parent, Group, Awaits],
            // Those that have not been started end with their parent.
            (StopWithSubtasks, _) | (Stop | Delete, Situation::Making) => {
                &[Parent, First, Second, Group, Awaits]
            }
            (Message | CallEnds, _) | (LeaseLost | Rerun, Situation::Making) => &[Parent],
        }
    }
}

/// Where the two meet, if they do.
fn meeting(situation: Situation, first: Event, second: Event) -> Option<Row> {
    let ends = matches!(
        (first, situation),
        (ChildEnds | OtherEnds, _) | (Rerun, Situation::Waiting)
    );
    if ends && second == Timeout {
        // It finds a child that has ended, and would settle its await.
        return Some(Row::Group);
    }
    let seconds = second.locks(situation);
    let mut common = first
        .locks(situation)
        .iter()
        .filter(|r| seconds.contains(r));
    common.next().copied()
}

// ---- what the contract says ----

#[derive(Clone, Copy, Debug, PartialEq)]
enum Child {
    Unstarted,
    /// Started, or about to be.
    Alive,
    Ended(TaskStatus, &'static str),
}

impl Child {
    fn is_over(self) -> bool {
        matches!(self, Self::Ended(..))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Held {
    ByTheFirst,
    ByNobody,
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Group {
    Open,
    Skipped,
    Cancelled,
}

/// The family as its contract sees it.
#[derive(Clone, Debug)]
struct Model {
    situation: Situation,
    /// `None` while it lives.
    parent_ended: Option<TaskStatus>,
    is_reopened: bool,
    is_deleted: bool,
    messages: i64,
    group: Group,
    /// The step that leases and runs are about.
    step: Held,
    children: [Child; 2],
}

/// How a family has ended.
#[derive(Clone, Debug, PartialEq)]
struct Ended {
    parent: TaskStatus,
    is_deleted: bool,
    messages: i64,
    decides: i64,
    /// What each resume message says of the children's ends.
    told: Vec<String>,
    children: [(TaskStatus, String); 2],
}

impl Model {
    fn new(situation: Situation) -> Self {
        let child = match situation {
            Situation::Waiting => Child::Alive,
            Situation::Making => Child::Unstarted,
        };
        Self {
            situation,
            parent_ended: None,
            is_reopened: false,
            is_deleted: false,
            messages: 1,
            group: Group::Open,
            step: Held::ByTheFirst,
            children: [child; 2],
        }
    }

    fn happens(&mut self, event: Event) {
        let is_waiting = self.situation == Situation::Waiting;
        match event {
            ChildEnds if !is_waiting => self.stop_child(0),
            OtherEnds if !is_waiting => self.stop_child(1),
            ChildEnds if self.step == Held::ByTheFirst => self.run_step("first"),
            OtherEnds if self.children[1] == Child::Alive => {
                self.children[1] = Child::Ended(Completed, "first");
            }
            CallEnds if self.step == Held::ByTheFirst => self.run_step(""),
            // Late results count for nothing (T-11), and a child that lives is waited for (W-10).
            ChildEnds | OtherEnds | CallEnds | Timeout => {}
            LeaseLost if self.step == Held::ByTheFirst => self.step = Held::ByNobody,
            Rerun if self.step != Held::Done => self.run_step("again"),
            LeaseLost | Rerun => {}
            // Who is deleted is not there.
            Skip | Message | Stop | StopWithSubtasks | Delete if self.is_deleted => {}
            Skip if self.group == Group::Open && !self.all_over() => self.group = Group::Skipped,
            Skip => {}
            Message => {
                self.messages += 1;
                if self.parent_ended.take().is_some() {
                    self.is_reopened = true;
                }
            }
            Stop => self.stop(false),
            StopWithSubtasks => self.stop(true),
            Delete => {
                self.stop(false);
                self.is_deleted = true;
            }
        }
    }

    fn all_over(&self) -> bool {
        self.children.iter().all(|c| c.is_over())
    }

    /// Somebody commits the step.
    fn run_step(&mut self, who: &'static str) {
        self.step = Held::Done;
        match self.situation {
            Situation::Waiting => self.children[0] = Child::Ended(Completed, who),
            Situation::Making => {
                for child in &mut self.children {
                    if *child == Child::Unstarted {
                        *child = Child::Alive;
                    }
                }
            }
        }
    }

    fn stop_child(&mut self, which: usize) {
        if !self.children[which].is_over() {
            self.children[which] = Child::Ended(Stopped, "");
        }
    }

    fn stop(&mut self, with_subtasks: bool) {
        if self.parent_ended.is_none() {
            self.parent_ended = Some(Stopped);
            if self.group == Group::Open && !self.all_over() {
                self.group = Group::Cancelled;
            }
            if self.situation == Situation::Making {
                self.step = Held::Done;
            }
        }
        for which in [0, 1] {
            if with_subtasks || self.children[which] == Child::Unstarted {
                self.stop_child(which);
            }
        }
        if with_subtasks {
            self.step = Held::Done;
        }
    }

    /// Everything goes on to its end.
    fn ends(mut self) -> Ended {
        let tell = |children: &[Child; 2]| {
            let n = |of: TaskStatus| {
                children
                    .iter()
                    .filter(|c| matches!(c, Child::Ended(status, _) if *status == of))
                    .count()
            };
            let counts = [
                (n(Completed), "completed"),
                (n(Stopped), "stopped"),
                (children.iter().filter(|c| !c.is_over()).count(), "skipped"),
            ];
            let counts = counts.iter().filter(|(n, _)| *n > 0);
            let counts: Vec<String> = counts.map(|(n, what)| format!("{n} {what}")).collect();
            counts.join(", ")
        };
        let skipped = tell(&self.children);
        if self.situation == Situation::Making && self.step != Held::Done {
            self.run_step("");
        }
        for child in &mut self.children {
            if *child == Child::Alive {
                *child = Child::Ended(Completed, "later");
            }
        }
        let told = match (self.parent_ended, self.group) {
            (Some(_), _) | (None, Group::Cancelled) => vec![],
            (None, Group::Skipped) => vec![skipped],
            (None, Group::Open) => vec![tell(&self.children)],
        };
        Ended {
            parent: self.parent_ended.unwrap_or(Completed),
            is_deleted: self.is_deleted,
            messages: self.messages,
            decides: if self.parent_ended.is_some() { 1 } else { 2 },
            told,
            children: self.children.map(|c| match c {
                Child::Ended(status, who) => (status, who.to_owned()),
                other => panic!("{other:?} for ever"),
            }),
        }
    }
}

/// How the family may end when the two come in this order.
fn allowed(situation: Situation, first: Event, second: Event) -> Vec<Ended> {
    let after = |events: &[Event]| {
        let mut model = Model::new(situation);
        events.iter().for_each(|e| model.happens(*e));
        model.ends()
    };
    let mut allowed = vec![after(&[first, second])];
    if first == Rerun {
        // It takes several transactions, and the second one comes between them.
        allowed.push(after(&[LeaseLost, second, Rerun]));
    }
    allowed
}

// ---- the family ----

fn tool_call(arguments: &str) -> ToolCall {
    ToolCall {
        id: "1".into(),
        name: "delegate_tasks".into(),
        arguments: arguments.into(),
        invalid: None,
        provider_data: None,
    }
}

/// What an event is done with; each has its own, as another process would.
#[derive(Clone)]
struct Hands {
    pool: PgPool,
    hub: Arc<Hub>,
    workspace: WorkspaceId,
    submitter: Submitter,
    plan: Arc<Plan>,
    situation: Situation,
    parent: TaskId,
    children: Vec<TaskId>,
    /// The claims of the workers: the parent's call, or one for each child.
    claims: Vec<Claim>,
}

impl Hands {
    async fn of(engine: &Engine, situation: Situation) -> Self {
        let (pool, hub) = (engine.pool.clone(), engine.hub.clone());
        let by = Delegator {
            agent: engine.demo.lead,
            depth: 0,
        };
        let limits = Limits {
            max_depth: 3,
            max_children_per_call: 250,
            default_timeout_minutes: 60,
            max_timeout_minutes: 1440,
        };
        let args = delegate(engine.demo.researcher, &["a", "b"]);
        let plan = plan(&serde_json::from_value(args.clone()).unwrap(), by, &limits).unwrap();
        let parent = engine.post("lead").await;
        let mut hands = Self {
            submitter: Submitter::start(pool.clone(), hub.clone()),
            workspace: engine.workspace(),
            plan: Arc::new(plan),
            situation,
            parent,
            children: vec![],
            claims: vec![],
            pool,
            hub,
        };
        dispatch(engine).await;
        let claims = hands.claim().await;
        let call = hands
            .decide(claims[0].claim, "", Some(&args.to_string()))
            .await;
        let Committed::Done(Next {
            held: Some(call), ..
        }) = call
        else {
            panic!("{call:?}")
        };
        hands.make_children(&call).await;
        hands.children = engine.children(parent).await;
        hands.claims = vec![call];
        if situation == Situation::Waiting {
            hands.commit_call(call).await;
            dispatch(engine).await;
            assert_eq!(engine.status(parent).await, WaitingForInput);
            let mut claims: Vec<Claim> = hands.claim().await.iter().map(|c| c.claim).collect();
            claims.sort_by_key(|c| c.key.task);
            hands.claims = claims;
            let held: Vec<TaskId> = hands.claims.iter().map(|c| c.key.task).collect();
            assert_eq!(held, hands.children);
        }
        hands
    }

    fn key(&self, task: TaskId) -> TaskKey {
        TaskKey {
            workspace: self.workspace,
            task,
        }
    }

    async fn claim(&self) -> Vec<reconvene::store::steps::Claimed> {
        claim(&self.pool, ProcessId::new(), 60, 10).await.unwrap()
    }

    async fn commit(&self, claim: Claim, outcome: Outcome) -> Committed {
        let limits = checkpoint::Limits {
            lease_secs: 60,
            parallel_max: 10,
        };
        let checkpointer = Checkpointer::start(self.pool.clone(), self.hub.clone(), limits, 1);
        checkpointer
            .commit(Commit { claim, outcome })
            .await
            .unwrap()
    }

    /// The model's answer to what is there now.
    async fn decide(&self, claim: Claim, text: &str, delegating: Option<&str>) -> Committed {
        let seen = sqlx::query_scalar("select last_seq from tasks where id = $1");
        let seen_seq: i64 = seen
            .bind(claim.key.task.0)
            .fetch_one(&self.pool)
            .await
            .unwrap();
        let decided = Decided {
            task: None,
            answer: Answer::Final(text.into()),
            concurrency: vec![],
            decision: Decision {
                text: text.into(),
                calls: delegating.map(tool_call).into_iter().collect(),
                ..Decision::default()
            },
            asked: Asked {
                prompt: Arc::new(PromptRecord {
                    hash: [7; 32],
                    sections: json!({}),
                }),
                seen_seq,
                model: "stub".into(),
                latency_ms: 1,
                retries: 0,
                spent: Default::default(),
            },
        };
        self.commit(claim, Outcome::Decided(Box::new(decided)))
            .await
    }

    async fn make_children(&self, call: &Claim) -> Delegated {
        let request = Request {
            claim: *call,
            setup: setup(&self.pool, call).await,
            plan: (*self.plan).clone(),
        };
        lifecycle::delegate::delegate(&self.pool, &[request], 5000)
            .await
            .unwrap()
            .remove(0)
    }

    async fn commit_call(&self, call: Claim) -> Committed {
        let called = Called {
            result: "started".into(),
            is_error: false,
            start: self.children.iter().map(|c| self.key(*c)).collect(),
            calls: [tool_call("{}")].into(),
            concurrency: vec![],
        };
        self.commit(call, Outcome::Called(Box::new(called))).await
    }

    /// What a worker does with every step that is queued.
    async fn work(&self, text: &str) -> usize {
        let claims = self.claim().await;
        for claimed in &claims {
            match claimed.call {
                Some(_) => match self.make_children(&claimed.claim).await {
                    Delegated::Made { .. } => {
                        self.commit_call(claimed.claim).await;
                    }
                    Delegated::Stale => {}
                    refused @ (Delegated::Refused(_) | Delegated::Overdrawn(_)) => {
                        panic!("{refused:?}")
                    }
                },
                None => {
                    self.decide(claimed.claim, text, None).await;
                }
            }
        }
        claims.len()
    }

    async fn is_queued(&self, claim: &Claim) -> bool {
        sqlx::query_scalar("select status = 'queued' from steps where id = $1")
            .bind(claim.step.0)
            .fetch_one(&self.pool)
            .await
            .unwrap()
    }

    async fn match_signals(&self) {
        match_signals(&self.pool, &self.hub, 100).await.unwrap();
    }

    async fn stop(&self, task: TaskId, subtasks: bool) {
        let receipt = stop(&self.pool, &self.hub, self.workspace, task, subtasks).await;
        if let Some(receipt) = receipt.unwrap() {
            assert!(receipt.status.is_terminal() && receipt.left_alive == 0);
        }
    }

    async fn child_ends(&self, which: usize) {
        match self.situation {
            Situation::Waiting => {
                self.decide(self.claims[which], "first", None).await;
            }
            Situation::Making => self.stop(self.children[which], false).await,
        }
        self.match_signals().await;
    }

    /// The event, as whoever causes it would do it.
    async fn act(self, event: Event) {
        let (pool, hub, workspace, parent) = (&self.pool, &self.hub, self.workspace, self.parent);
        match event {
            ChildEnds => self.child_ends(0).await,
            OtherEnds => self.child_ends(1).await,
            CallEnds => {
                self.commit_call(self.claims[0]).await;
            }
            Timeout => {
                time_out(pool, hub, 100).await.unwrap();
            }
            Skip => {
                skip(pool, hub, workspace, parent, None).await.unwrap();
            }
            Message => {
                let message = lifecycle::submit::NewMessage {
                    workspace,
                    to: Recipient::Task(parent),
                    text: reconvene::domain::text::MessageText::parse("news").unwrap(),
                    title: None,
                    disable_delegation: false,
                    skip_wait: false,
                    metadata: Default::default(),
                    budget: None,
                    idempotency: None,
                };
                let sent = self.submitter.submit(message).await;
                assert!(matches!(sent, Ok(_) | Err(SubmitError::TaskNotFound)));
            }
            Stop => self.stop(parent, false).await,
            StopWithSubtasks => self.stop(parent, true).await,
            Delete => {
                delete(pool, hub, workspace, parent, false).await.unwrap();
            }
            LeaseLost => {
                reap(pool, hub, 100, 10).await.unwrap();
            }
            Rerun => {
                reap(pool, hub, 100, 10).await.unwrap();
                // A worker passes over a step that somebody has locked, and comes again.
                while self.is_queued(&self.claims[0]).await {
                    self.work("again").await;
                }
                self.match_signals().await;
            }
        }
    }

    fn starts(&self, event: Event) -> JoinHandle<()> {
        tokio::spawn(self.clone().act(event))
    }

    async fn hold(&self, row: Row) -> Hold {
        match row {
            Row::Parent => Hold::task(&self.pool, self.parent).await,
            Row::First => Hold::task(&self.pool, self.children[0]).await,
            Row::Second => Hold::task(&self.pool, self.children[1]).await,
            Row::Group => {
                let sql = "select 1 from await_groups where task_id = $1 for no key update";
                Hold::row(&self.pool, sql, self.parent.0).await
            }
            Row::Awaits => {
                let sql = "select 1 from awaits a join await_groups g on g.id = a.group_id
                    where g.task_id = $1 for no key update of a";
                Hold::row(&self.pool, sql, self.parent.0).await
            }
        }
    }

    async fn run(&self, sql: &'static str, id: uuid::Uuid) {
        sqlx::query(sql).bind(id).execute(&self.pool).await.unwrap();
    }

    /// Workers and orchestrator go on until there is nothing left to do.
    async fn go_on(&self, engine: &Engine) {
        self.run(
            "update steps set lease_expires_at = now() - interval '1 second'
             where status = 'running' and workspace_id = $1",
            self.workspace.0,
        )
        .await;
        loop {
            let mut did = dispatch(engine).await != Progress::Idle;
            did |= match_signals(&self.pool, &self.hub, 100).await.unwrap() != Progress::Idle;
            did |= time_out(&self.pool, &self.hub, 100).await.unwrap() != Progress::Idle;
            did |= reap(&self.pool, &self.hub, 100, 10).await.unwrap() != Progress::Idle;
            did |= self.work("later").await > 0;
            if !did {
                return;
            }
        }
    }

    async fn ended(&self, engine: &Engine) -> Ended {
        let is_deleted = "select deleted_at is not null from tasks where id = $1";
        let messages =
            "select count(*) from task_items where task_id = $1 and kind = 'user_message'";
        let told = resume_messages(engine, self.parent).await;
        let told = told.iter().map(|text| {
            let counts = text.strip_prefix("Results of the 2 delegated tasks: ");
            let counts = counts.and_then(|text| text.split_once('.'));
            counts.unwrap_or_else(|| panic!("{text}")).0.to_owned()
        });
        let mut children = Vec::new();
        for child in &self.children {
            let (status, said) = engine.end(*child).await;
            // How the children that were asked have answered: each end was said once.
            let answers =
                "select count(*) from task_items where task_id = $1 and kind = 'assistant_message'";
            let answers: i64 = ask(engine, answers, *child).await;
            assert_eq!(answers, i64::from(status == Completed));
            children.push((status, said));
        }
        Ended {
            parent: engine.status(self.parent).await,
            is_deleted: ask(engine, is_deleted, self.parent).await,
            messages: ask(engine, messages, self.parent).await,
            decides: decide_steps(engine, self.parent).await,
            told: told.collect(),
            children: children.try_into().unwrap(),
        }
    }
}

async fn dispatch(engine: &Engine) -> Progress {
    let (config, pool, hub) = (&engine.config, engine.pool.clone(), engine.hub.clone());
    let orchestrator = reconvene::orchestrator::Orchestrator::new(config, pool, hub);
    orchestrator.dispatch().await.unwrap()
}

async fn blocked(pool: &PgPool) -> i64 {
    sqlx::query_scalar(
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'",
    )
    .fetch_one(pool)
    .await
    .unwrap()
}

/// Both happen: the first one first, and the second one while it is under way.
async fn pair(engine: &Engine, situation: Situation, first: Event, second: Event) {
    let family = Hands::of(engine, situation).await;
    let pool = &engine.pool;
    for event in [first, second] {
        match event {
            Timeout => {
                let due = "update awaits set scheduled_resume_at = now() where group_id in
                    (select id from await_groups where task_id = $1)";
                family.run(due, family.parent.0).await;
            }
            LeaseLost | Rerun => {
                let lost =
                    "update steps set lease_expires_at = now() - interval '1 second' where id = $1";
                family.run(lost, family.claims[0].step.0).await;
            }
            _ => {}
        }
    }
    let meeting = meeting(situation, first, second);
    let row = meeting.unwrap_or(first.locks(situation)[0]);
    let hold = family.hold(row).await;
    let one = family.starts(first);
    until("the first has come to the lock", async || {
        assert!(!one.is_finished(), "{first:?} does not lock {row:?}");
        blocked(pool).await == 1
    })
    .await;
    let other = family.starts(second);
    let mut order = (first, second);
    match meeting {
        Some(_) => {
            until("the second has come to the lock", async || {
                assert!(!other.is_finished(), "{second:?} does not lock {row:?}");
                blocked(pool).await == 2
            })
            .await;
        }
        // They do not meet, so the second one overtakes the first.
        None => {
            until("the second has ended", async || other.is_finished()).await;
            order = (second, first);
        }
    }
    hold.release().await;
    soon("the first", one).await.unwrap();
    soon("the second", other).await.unwrap();
    family.go_on(engine).await;
    rest(pool).await;
    check(pool).await;
    let allowed = allowed(situation, order.0, order.1);
    let ended = family.ended(engine).await;
    assert!(
        allowed.contains(&ended),
        "{situation:?}: {:?}, then {:?} ended as\n{ended:#?}\nand may end as\n{allowed:#?}",
        order.0,
        order.1
    );
    let waits = "select count(*) from awaits where status = 'pending'";
    assert_eq!(engine.count(waits).await, 0);
}

async fn all_after(situation: Situation, first: Event) {
    let engine = Engine::scripted_with(|_| {}).await;
    let all: &[Event] = match situation {
        Situation::Waiting => &WAITING,
        Situation::Making => &MAKING,
    };
    for second in all.iter().filter(|second| **second != first) {
        pair(&engine, situation, first, *second).await;
    }
    engine.close().await;
}

/// One test for each first event, so that they run side by side.
macro_rules! pairs {
    ($($name:ident: $situation:ident, $first:ident;)*) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            all_after(Situation::$situation, $first).await;
        }
    )*};
}

// H-02, H-03, W-3, W-4, W-10, W-15, W-16, T-6, T-7, T-11, T-12, T-30, T-31, T-34
pairs! {
    waiting_a_child_ends_first: Waiting, ChildEnds;
    waiting_the_other_child_ends_first: Waiting, OtherEnds;
    waiting_a_timeout_first: Waiting, Timeout;
    waiting_a_skip_first: Waiting, Skip;
    waiting_a_message_first: Waiting, Message;
    waiting_a_stop_first: Waiting, Stop;
    waiting_a_stop_with_subtasks_first: Waiting, StopWithSubtasks;
    waiting_a_deletion_first: Waiting, Delete;
    waiting_a_lost_lease_first: Waiting, LeaseLost;
    waiting_a_second_run_first: Waiting, Rerun;
}

// H-05, D-20, D-26, T-33: the same while the children are made
pairs! {
    making_a_child_ends_first: Making, ChildEnds;
    making_the_other_child_ends_first: Making, OtherEnds;
    making_the_call_ends_first: Making, CallEnds;
    making_a_timeout_first: Making, Timeout;
    making_a_skip_first: Making, Skip;
    making_a_message_first: Making, Message;
    making_a_stop_first: Making, Stop;
    making_a_stop_with_subtasks_first: Making, StopWithSubtasks;
    making_a_deletion_first: Making, Delete;
    making_a_lost_lease_first: Making, LeaseLost;
    making_a_second_run_first: Making, Rerun;
}

// T-36: a stop cancels the steps as well, so only here is it seen that the generation counts by itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_of_an_earlier_stop_generation_counts_for_nothing() {
    let engine = Engine::scripted_with(|_| {}).await;
    let family = Hands::of(&engine, Situation::Making).await;
    let call = family.claims[0];
    let parent = family.parent.0;
    let raise = "update tasks set stop_generation = stop_generation + 1 where id = $1";
    family.run(raise, parent).await;
    assert_eq!(family.commit_call(call).await, Committed::Stale);
    let made = family.make_children(&call).await;
    assert!(matches!(made, Delegated::Stale), "{made:?}");
    let lower = "update tasks set stop_generation = stop_generation - 1 where id = $1";
    family.run(lower, parent).await;
    assert_eq!(
        family.commit_call(call).await,
        Committed::Done(Next::default())
    );
    family.go_on(&engine).await;
    assert_eq!(engine.status(family.parent).await, Completed);
    engine.close().await;
}
