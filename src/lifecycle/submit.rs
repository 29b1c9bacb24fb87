//! Takes messages from users: creates tasks, appends to tasks, completes what waits for a user (T-1 to T-8).
//!
//! Callers that arrive while a batch is being written form the next one: one transaction, one write per table.

use super::{
    Draft, TaskChange, announce, complete_awaits::complete_awaits, event, together_or_each,
};
use crate::{
    domain::{
        budget::Limits,
        ids::{AgentId, ItemId, TaskId, WorkspaceId},
        task::{NewTask, On, TaskKey, TaskStatus},
        task_await::{AwaitStatus, SourceType},
        text::{MessageText, Title},
    },
    runtime::{Batcher, Hub, Work},
    store::{
        self,
        awaits::Settlement,
        changes::{Changes, EventKind, ItemKind},
        idempotency::Reservation,
        tasks::Target,
    },
};
use serde_json::{Map, Value, json};
use sqlx::{PgConnection, PgPool};
use std::{collections::HashMap, sync::Arc};

#[derive(Clone, Debug)]
pub struct NewMessage {
    pub workspace: WorkspaceId,
    pub to: Recipient,
    pub text: MessageText,
    pub title: Option<Title>,
    pub disable_delegation: bool,
    pub skip_wait: bool,
    pub metadata: Map<String, Value>,
    /// Of a new task, beside the one that its agent may have.
    pub budget: Option<Limits>,
    pub idempotency: Option<Idempotency>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Idempotency {
    pub key: String,
    pub body_hash: [u8; 32],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipient {
    DefaultAgent,
    Agent(AgentId),
    Task(TaskId),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submitted {
    pub task: TaskId,
    pub message: ItemId,
    pub status: TaskStatus,
    pub created: bool,
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum SubmitError {
    #[error("no such agent")]
    AgentNotFound,
    #[error("no such task")]
    TaskNotFound,
    #[error("this Idempotency-Key was used with another body")]
    IdempotencyKeyReused,
    #[error(transparent)]
    Store(#[from] Arc<store::Error>),
}

/// Messages per transaction.
const BATCH: usize = 64;

/// Writes messages in batches. Cheap to clone.
#[derive(Clone)]
pub struct Submitter {
    batcher: Batcher<NewMessage, Result<Submitted, SubmitError>>,
}

impl Submitter {
    pub fn start(pool: PgPool, hub: Arc<Hub>) -> Self {
        let batcher = Batcher::start(BATCH, 1, move |messages: Vec<NewMessage>| {
            let (pool, hub) = (pool.clone(), hub.clone());
            async move {
                let done =
                    together_or_each(&messages, |some| Box::pin(submit_batch(&pool, &hub, some)));
                let answer = |one: Result<_, Arc<store::Error>>| one.map_err(SubmitError::from)?;
                done.await.into_iter().map(answer).collect()
            }
        });
        Self { batcher }
    }

    /// Stores one message. When it returns, the message is committed.
    pub async fn submit(&self, message: NewMessage) -> Result<Submitted, SubmitError> {
        let lost = || Err(store::Error::writer_lost().into());
        self.batcher.submit(message).await.unwrap_or_else(lost)
    }
}

async fn submit_batch(
    pool: &PgPool,
    hub: &Hub,
    messages: &[NewMessage],
) -> Result<Vec<Result<Submitted, SubmitError>>, store::Error> {
    let (results, changes, woke) = store::retry_conflicts!(async {
        if messages.iter().all(is_plain) {
            let mut conn = pool.acquire().await?;
            let mut batch = Batch::load(&mut conn, messages).await?;
            let (new, changes) = batch.write();
            if !new.is_empty() {
                store::tasks::insert(&mut conn, &new, false).await?;
            }
            return Ok((batch.results(), changes, true));
        }
        let mut tx = store::begin(pool).await?;
        let mut batch = Batch::load(&mut tx, messages).await?;
        batch.reserve(&mut tx).await?;
        let woke = batch.settle_waits(&mut tx).await?;
        let (new, changes) = batch.write();
        if !new.is_empty() {
            store::tasks::insert(&mut tx, &new, false).await?;
        }
        if !changes.tasks.is_empty() {
            store::changes::apply(&mut tx, &changes).await?;
        }
        tx.commit().await?;
        Ok((batch.results(), changes, woke || !new.is_empty()))
    })?;
    announce(hub, &changes);
    if woke {
        hub.wake(Work::Events);
    }
    Ok(results)
}

/// A message that makes a task and has no key is one statement; it needs no transaction around it.
fn is_plain(message: &NewMessage) -> bool {
    message.idempotency.is_none() && !matches!(message.to, Recipient::Task(_))
}

/// One message on its way: where it goes and what its caller will be told.
struct Entry<'a> {
    message: &'a NewMessage,
    task: TaskKey,
    id: ItemId,
    place: Place,
}

enum Place {
    New(Target),
    /// The status is the one that the caller is told.
    Existing(TaskStatus),
    /// Not stored: this is the answer.
    Answered(Result<Submitted, SubmitError>),
}

struct Batch<'a> {
    entries: Vec<Entry<'a>>,
    tasks: HashMap<TaskKey, TaskChange>,
    max_iterations: HashMap<TaskKey, i32>,
}

impl<'a> Batch<'a> {
    /// Locks the tasks that are appended to and resolves the agents of new ones.
    async fn load(
        conn: &mut PgConnection,
        messages: &'a [NewMessage],
    ) -> Result<Self, store::Error> {
        let appended: Vec<TaskKey> = messages
            .iter()
            .filter_map(|m| match m.to {
                Recipient::Task(task) => Some(TaskKey {
                    workspace: m.workspace,
                    task,
                }),
                Recipient::DefaultAgent | Recipient::Agent(_) => None,
            })
            .collect();
        let mut tasks = HashMap::new();
        let mut max_iterations = HashMap::new();
        if !appended.is_empty() {
            let locked = store::tasks::lock(conn, &appended).await?;
            tasks.extend(
                locked
                    .into_iter()
                    .filter(|t| !t.deleted)
                    .map(|t| (t.key, TaskChange::of(t))),
            );
            let facts = store::tasks::facts(conn, &appended).await?;
            max_iterations.extend(facts.into_iter().map(|f| (f.key, f.max_iterations)));
        }
        let mut wanted: Vec<(WorkspaceId, Option<AgentId>)> = messages
            .iter()
            .filter_map(|m| Some((m.workspace, agent_of(m)?)))
            .collect();
        wanted.sort_unstable();
        wanted.dedup();
        let mut targets = HashMap::new();
        if !wanted.is_empty() {
            let found = store::tasks::resolve_agents(conn, &wanted).await?;
            targets.extend(wanted.into_iter().zip(found));
        }
        let entries = messages.iter().map(|message| {
            let workspace = message.workspace;
            let (task, place) = match message.to {
                Recipient::Task(task) => {
                    let place = match tasks.get(&TaskKey { workspace, task }) {
                        Some(t) => Place::Existing(t.state.status),
                        None => Place::Answered(Err(SubmitError::TaskNotFound)),
                    };
                    (task, place)
                }
                Recipient::DefaultAgent | Recipient::Agent(_) => {
                    let target = agent_of(message).and_then(|a| *targets.get(&(workspace, a))?);
                    let none = || Place::Answered(Err(SubmitError::AgentNotFound));
                    (TaskId::new(), target.map_or_else(none, Place::New))
                }
            };
            Entry {
                message,
                task: TaskKey { workspace, task },
                id: ItemId::new(),
                place,
            }
        });
        Ok(Self {
            entries: entries.collect(),
            tasks,
            max_iterations,
        })
    }

    /// Reserves the idempotency keys. A message whose key is taken gets the earlier answer and is not stored.
    async fn reserve(&mut self, conn: &mut PgConnection) -> Result<(), store::Error> {
        let mut firsts: HashMap<(WorkspaceId, &str), usize> = HashMap::new();
        let mut repeats = Vec::new();
        for (at, entry) in self.entries.iter().enumerate() {
            let Some(idempotency) = &entry.message.idempotency else {
                continue;
            };
            // What is refused is not remembered: the caller may repeat it once the cause is gone.
            if matches!(entry.place, Place::Answered(_)) {
                continue;
            }
            match firsts.entry((entry.message.workspace, &idempotency.key)) {
                std::collections::hash_map::Entry::Vacant(free) => {
                    free.insert(at);
                }
                std::collections::hash_map::Entry::Occupied(first) => {
                    repeats.push((at, *first.get()));
                }
            }
        }
        if firsts.is_empty() {
            return Ok(());
        }
        let reserving: Vec<usize> = firsts.into_values().collect();
        let reservations: Vec<Reservation> = reserving
            .iter()
            .filter_map(|at| self.entries[*at].reservation())
            .collect();
        let taken = store::idempotency::reserve(conn, &reservations).await?;
        for (at, taken) in reserving.iter().zip(taken) {
            if let Some(earlier) = taken {
                let entry = &mut self.entries[*at];
                entry.place = Place::Answered(entry.repeat_of(&earlier.body_hash, earlier.answer));
            }
        }
        for (at, first) in repeats {
            let Some(earlier) = self.entries[first].reservation() else {
                continue;
            };
            let answer = match &self.entries[first].place {
                Place::Answered(Ok(submitted)) => answer_json(submitted),
                Place::Answered(Err(_)) | Place::New(_) | Place::Existing(_) => earlier.answer,
            };
            let entry = &mut self.entries[at];
            entry.place = Place::Answered(entry.repeat_of(&earlier.body_hash, answer));
        }
        Ok(())
    }

    /// Completes what waits for the user (T-5), and gives up what the user does not want to wait for (T-6). Returns
    /// whether a wait has closed.
    async fn settle_waits(&mut self, conn: &mut PgConnection) -> Result<bool, store::Error> {
        let mut skipping: HashMap<TaskKey, bool> = HashMap::new();
        for entry in self
            .entries
            .iter()
            .filter(|e| matches!(e.place, Place::Existing(_)))
        {
            *skipping.entry(entry.task).or_default() |= entry.message.skip_wait;
        }
        if skipping.is_empty() {
            return Ok(false);
        }
        let keys: Vec<TaskKey> = skipping.keys().copied().collect();
        let pending = store::awaits::pending_of_tasks(conn, &keys, None).await?;
        let settlements: Vec<Settlement> = pending
            .into_iter()
            .filter_map(|(task, a)| {
                let to = match (a.source_type, skipping.get(&task)) {
                    (SourceType::UserInput, _) => AwaitStatus::Completed,
                    (_, Some(true)) => AwaitStatus::Skipped,
                    (_, _) => return None,
                };
                Some(a.settled(to))
            })
            .collect();
        let settled = complete_awaits(conn, &settlements).await?;
        Ok(!settled.closed.is_empty())
    }

    /// The rows to write. Messages to one task get consecutive places in arrival order (T-8).
    fn write(&mut self) -> (Vec<NewTask>, Changes) {
        let (mut new, mut changes) = (Vec::new(), Changes::default());
        for entry in &mut self.entries {
            match &mut entry.place {
                Place::Answered(_) => continue,
                Place::New(target) => {
                    new.push(new_task(entry.message, entry.task, entry.id, target));
                }
                Place::Existing(status) => {
                    let Some(task) = self.tasks.get_mut(&entry.task) else {
                        continue;
                    };
                    let refill = self.max_iterations.get(&entry.task).copied();
                    append(&mut changes, task, entry.message, entry.id, refill);
                    *status = task.state.status;
                    let event = event(entry.task, EventKind::NewMessage);
                    changes.events.push(event);
                }
            }
        }
        let touched = self
            .tasks
            .drain()
            .map(|(_, t)| t)
            .filter(|t| t.state.last_seq > t.was_seq);
        changes.tasks.extend(touched);
        (new, changes)
    }

    fn results(self) -> Vec<Result<Submitted, SubmitError>> {
        let result = |entry: Entry| match entry.place {
            Place::Answered(answer) => answer,
            Place::New(_) => Ok(entry.submitted(TaskStatus::Pending, true)),
            Place::Existing(status) => Ok(entry.submitted(status, false)),
        };
        self.entries.into_iter().map(result).collect()
    }
}

impl Entry<'_> {
    fn submitted(&self, status: TaskStatus, created: bool) -> Submitted {
        Submitted {
            task: self.task.task,
            message: self.id,
            status,
            created,
        }
    }

    fn reservation(&self) -> Option<Reservation> {
        let idempotency = self.message.idempotency.as_ref()?;
        let first = match self.place {
            Place::New(_) => self.submitted(TaskStatus::Pending, true),
            Place::Existing(status) => {
                self.submitted(status.next(On::Message).unwrap_or(status), false)
            }
            Place::Answered(_) => self.submitted(TaskStatus::Pending, true),
        };
        Some(Reservation {
            workspace: self.message.workspace,
            key: idempotency.key.clone(),
            body_hash: idempotency.body_hash.to_vec(),
            answer: answer_json(&first),
        })
    }

    /// The answer to a message whose key an earlier one has used.
    fn repeat_of(&self, body_hash: &[u8], answer: Value) -> Result<Submitted, SubmitError> {
        let same = self
            .message
            .idempotency
            .as_ref()
            .is_some_and(|i| i.body_hash == body_hash);
        match same.then(|| answer_from_json(&answer)).flatten() {
            Some(submitted) => Ok(submitted),
            None => Err(SubmitError::IdempotencyKeyReused),
        }
    }
}

fn new_task(message: &NewMessage, key: TaskKey, id: ItemId, target: &Target) -> NewTask {
    let mut metadata = message.metadata.clone();
    // The ban is stored where execution looks for it, and only the request field can set it (T-9).
    metadata.remove("disable_delegation");
    if message.disable_delegation {
        metadata.insert("disable_delegation".into(), Value::Bool(true));
    }
    let title = message
        .title
        .clone()
        .unwrap_or_else(|| Title::from_message(&message.text));
    NewTask {
        key,
        agent: target.agent,
        max_iterations: target.max_iterations,
        title: title.as_str().to_owned(),
        metadata: Value::Object(metadata),
        priority: 0,
        budget: match (message.budget, target.budget) {
            (Some(own), Some(agents)) => Some(own.and(agents)),
            (own, agents) => own.or(agents),
        },
        budgeted: false,
        parent: None,
        message: (id, message.text.as_str().to_owned()),
    }
}

fn append(
    changes: &mut Changes,
    task: &mut TaskChange,
    message: &NewMessage,
    id: ItemId,
    refill: Option<i32>,
) {
    let item = Draft {
        id: Some(id),
        ..Draft::new(ItemKind::UserMessage)
    };
    let item = match message.skip_wait {
        true => item.data(json!({"skip_wait": true})),
        false => item,
    };
    let before = task.state.status;
    // Every status accepts a message.
    task.state.status = before.next(On::Message).unwrap_or(before);
    if task.state.status != before {
        // Before the message, so that nothing comes between messages sent at the same time (T-8).
        task.add_item(changes, Draft::status(task.state.status));
    }
    task.state.news_seq = task.add_item(changes, item.text(message.text.as_str()));
    task.state.decides_left = refill.unwrap_or(task.state.decides_left);
}

fn answer_json(s: &Submitted) -> Value {
    json!({"task_id": s.task, "message_id": s.message, "status": s.status, "created": s.created})
}

fn answer_from_json(answer: &Value) -> Option<Submitted> {
    Some(Submitted {
        task: answer.get("task_id")?.as_str()?.parse().ok()?,
        message: answer.get("message_id")?.as_str()?.parse().ok()?,
        status: answer.get("status")?.as_str()?.parse().ok()?,
        created: answer.get("created")?.as_bool()?,
    })
}

fn agent_of(message: &NewMessage) -> Option<Option<AgentId>> {
    match message.to {
        Recipient::DefaultAgent => Some(None),
        Recipient::Agent(agent) => Some(Some(agent)),
        Recipient::Task(_) => None,
    }
}
