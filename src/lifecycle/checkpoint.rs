//! Commits what workers have done: a model's decision, the result of a tool call, a failure.
//!
//! Many workers' results are written in one transaction. Each is fenced by its claim: a result of an attempt that no
//! longer holds its step is dropped, and nothing of it remains (T-11). Nearly every decision finds its task as it was
//! claimed, so decisions are first written as if all did: one statement, which undoes itself if one does not.

pub use super::advance::{Limits, Next};

use super::{
    Draft,
    advance::{self, Calls, Turns},
    announce, event, finish, is_live, together_or_each,
};
use crate::{
    domain::{
        decision::{Decision, Spent, ToolCall},
        ids::{StepId, WorkspaceId},
        output::Answer,
        step::{Claim, StepKey, StepStatus},
        task::{Failure, TaskKey, TaskState},
        turn::Concurrency,
    },
    runtime::{Batcher, Hub},
    store::{
        self,
        changes::{Changes, DecisionLog, EndedStep, EventKind, ItemKind, TaskChange},
        steps::StepState,
    },
};
use serde_json::{Value, json};
use sqlx::PgPool;
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// One result of a held step.
#[derive(Clone, Debug)]
pub struct Commit {
    pub claim: Claim,
    pub outcome: Outcome,
}

#[derive(Clone, Debug)]
pub enum Outcome {
    /// The model has answered a decide step.
    Decided(Box<Decided>),
    /// A tool call has a result.
    Called(Box<Called>),
    /// The step can not be done. With a decide step the task fails, unless somebody has written to it meanwhile; with a call
    /// when the others of its turn have ended.
    Failed {
        failure: Failure,
        /// `None`: no model was asked.
        asked: Option<Box<Asked>>,
    },
}

impl Outcome {
    fn asked(&self) -> Option<&Asked> {
        match self {
            Self::Decided(decided) => Some(&decided.asked),
            Self::Failed { asked, .. } => asked.as_deref(),
            Self::Called(_) => None,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Decided {
    pub decision: Decision,
    /// How its calls may overlap.
    pub concurrency: Vec<Concurrency>,
    /// What becomes of its text if it has no calls.
    pub answer: Answer,
    /// The task as it was claimed. If it still is, its decision is committed without a lock.
    pub task: Option<TaskState>,
    pub asked: Asked,
}

/// What a model was asked in a decide step, and what that took.
#[derive(Clone, Debug)]
pub struct Asked {
    pub prompt: Arc<PromptRecord>,
    /// The newest item that the model was shown.
    pub seen_seq: i64,
    pub model: String,
    pub spent: Spent,
    pub latency_ms: i32,
    pub retries: i32,
}

/// The system prompt and tools as sent, under their SHA-256.
#[derive(Debug)]
pub struct PromptRecord {
    pub hash: [u8; 32],
    pub sections: Value,
}

#[derive(Clone, Debug)]
pub struct Called {
    pub result: String,
    pub is_error: bool,
    /// Children that this call has made; they start with its result (D-20).
    pub start: Vec<TaskKey>,
    /// All calls of the turn, and how they may overlap as things are now.
    pub calls: Arc<[ToolCall]>,
    pub concurrency: Vec<Concurrency>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Committed {
    Done(Next),
    /// The claim no longer holds: drop the work.
    Stale,
}

/// Writes results in batches. Cheap to clone.
#[derive(Clone)]
pub struct Checkpointer {
    batcher: Batcher<Commit, Result<Committed, Arc<store::Error>>>,
}

impl Checkpointer {
    /// At most `batch` results per transaction.
    pub fn start(pool: PgPool, hub: Arc<Hub>, limits: Limits, batch: usize) -> Self {
        let known = Arc::new(KnownPrompts::default());
        let batcher = Batcher::start(batch, 1, move |commits: Vec<Commit>| {
            let (pool, hub, known) = (pool.clone(), hub.clone(), known.clone());
            async move {
                together_or_each(&commits, |some| {
                    Box::pin(commit_batch(&pool, &hub, &known, limits, some))
                })
                .await
            }
        });
        Self { batcher }
    }

    /// Commits one result. `Stale` is a normal answer.
    pub async fn commit(&self, commit: Commit) -> Result<Committed, Arc<store::Error>> {
        let lost = || Err(store::Error::writer_lost());
        self.batcher.submit(commit).await.unwrap_or_else(lost)
    }
}

/// When each was stored last.
type KnownPrompts = Mutex<HashMap<(WorkspaceId, [u8; 32]), Instant>>;

async fn commit_batch(
    pool: &PgPool,
    hub: &Hub,
    known: &KnownPrompts,
    limits: Limits,
    commits: &[Commit],
) -> Result<Vec<Committed>, store::Error> {
    let new_prompts = unknown_prompts(known, commits);
    let at_once = match new_prompts.is_empty() {
        true => commit_as_claimed(pool, limits, commits).await?,
        false => None,
    };
    let (done, changes) = match at_once {
        Some(written) => written,
        None => {
            let written = commit_locked(pool, limits, commits, &new_prompts).await?;
            remember(known, &new_prompts);
            written
        }
    };
    announce(hub, &changes);
    for (commit, _) in commits
        .iter()
        .zip(&done)
        .filter(|(_, d)| **d == Committed::Stale)
    {
        let claim = &commit.claim;
        tracing::info!(task.id = %claim.key.task, step.id = %claim.step, attempt = claim.attempt,
            "dropped a late result of step {}: attempt {} no longer holds it", claim.step, claim.attempt);
    }
    Ok(done)
}

type Written = (Vec<Committed>, Changes);

/// Commits decisions on tasks as they were claimed, in one statement and without a lock before it. `None`: one of them is
/// not as it was, or not known; nothing is written then.
async fn commit_as_claimed(
    pool: &PgPool,
    limits: Limits,
    commits: &[Commit],
) -> Result<Option<Written>, store::Error> {
    let mut tasks = HashMap::with_capacity(commits.len());
    for commit in commits {
        let Outcome::Decided(decided) = &commit.outcome else {
            return Ok(None);
        };
        let Some(task) = &decided.task else {
            return Ok(None);
        };
        tasks.insert(task.key, task.clone());
    }
    let (done, changes) = write_all(tasks, Turns::default(), commits, |_| true, limits)?;
    if done.contains(&Committed::Stale) {
        return Ok(None);
    }
    let mut conn = pool.acquire().await?;
    match store::changes::apply(&mut conn, &changes).await {
        Ok(()) => Ok(Some((done, changes))),
        Err(error) if error.is_conflict() => Ok(None),
        Err(error) => Err(error),
    }
}

async fn commit_locked(
    pool: &PgPool,
    limits: Limits,
    commits: &[Commit],
    new_prompts: &[(WorkspaceId, [u8; 32], Value)],
) -> Result<Written, store::Error> {
    store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let keys: Vec<TaskKey> = commits.iter().map(|c| c.claim.key.task_key()).collect();
        let tasks = store::tasks::lock(&mut tx, &keys).await?;
        let steps: Vec<StepKey> = commits.iter().map(|c| c.claim.key).collect();
        let steps: HashMap<StepKey, StepState> = store::steps::lock(&mut tx, &steps)
            .await?
            .into_iter()
            .map(|s| (s.key, s))
            .collect();
        let holds = |claim: &Claim| {
            steps
                .get(&claim.key)
                .is_some_and(|s| s.status == StepStatus::Running && s.attempt == claim.attempt)
        };
        let in_turns = commits.iter().filter(|commit| needs_its_turn(commit));
        let turns = Turns::load(&mut tx, in_turns.map(|commit| commit.claim.key)).await?;
        let tasks = tasks.into_iter().map(|t| (t.key, t)).collect();
        let (done, mut changes) = write_all(tasks, turns, commits, holds, limits)?;
        let failed: Vec<_> = failed_calls(commits, &done).collect();
        finish::end_unstarted(&mut tx, &mut changes, &failed).await?;
        if !new_prompts.is_empty() {
            store::prompts::keep(&mut tx, new_prompts).await?;
        }
        store::changes::apply(&mut tx, &changes).await?;
        tx.commit().await?;
        Ok((done, changes))
    })
}

/// Whose turn is to be looked at: a call that is alone in it says all that there is to know.
fn needs_its_turn(commit: &Commit) -> bool {
    match &commit.outcome {
        Outcome::Decided(_) => false,
        Outcome::Called(called) => called.calls.len() > 1,
        Outcome::Failed { .. } => commit.claim.key.ordinal > 0,
    }
}

/// The calls that have failed.
fn failed_calls<'a>(
    commits: &'a [Commit],
    done: &'a [Committed],
) -> impl Iterator<Item = (TaskKey, StepId)> + 'a {
    commits.iter().zip(done).filter_map(|(commit, done)| {
        let failed = matches!(commit.outcome, Outcome::Failed { .. }) && *done != Committed::Stale;
        let Claim { key, step, .. } = commit.claim;
        (failed && key.ordinal > 0).then_some((key.task_key(), step))
    })
}

/// The answer to each result, and what is to be written.
fn write_all(
    tasks: HashMap<TaskKey, TaskState>,
    turns: Turns,
    commits: &[Commit],
    holds: impl Fn(&Claim) -> bool,
    limits: Limits,
) -> Result<Written, store::Error> {
    let tasks = tasks.into_iter().map(|(key, t)| (key, TaskChange::of(t)));
    let mut tasks: HashMap<TaskKey, TaskChange> = tasks.collect();
    let mut writing = Writing {
        changes: Changes::default(),
        turns,
        limits,
    };
    let mut ended = HashSet::new();
    let mut changed = HashSet::new();
    let mut done = Vec::with_capacity(commits.len());
    for Commit { claim, outcome } in commits {
        let task = tasks.get_mut(&claim.key.task_key());
        // Two calls of a turn may end together; but a second result for one step finds it gone.
        let task = task.filter(|t| is_live(&t.state, claim) && holds(claim));
        let Some(task) = task.filter(|_| ended.insert(claim.key)) else {
            done.push(Committed::Stale);
            continue;
        };
        done.push(Committed::Done(writing.write(task, claim, outcome)?));
        changed.insert(task.state.key);
    }
    let mut changes = writing.changes;
    changes.tasks = changed
        .into_iter()
        .filter_map(|key| tasks.remove(&key))
        .collect();
    // The order in which tasks are locked.
    changes.tasks.sort_unstable_by_key(|t| t.state.key);
    Ok((done, changes))
}

/// A transaction in the making.
struct Writing {
    changes: Changes,
    turns: Turns,
    limits: Limits,
}

impl Writing {
    fn write(
        &mut self,
        task: &mut TaskChange,
        claim: &Claim,
        outcome: &Outcome,
    ) -> Result<Next, store::Error> {
        match outcome {
            Outcome::Decided(decided) => {
                write_decision(&mut self.changes, task, claim, decided, self.limits)
            }
            Outcome::Called(called) => self.write_result(task, claim, called),
            Outcome::Failed { failure, asked } => {
                self.write_failure(task, claim, failure, asked.as_deref())?;
                Ok(Next::default())
            }
        }
    }

    fn write_result(
        &mut self,
        task: &mut TaskChange,
        claim: &Claim,
        called: &Called,
    ) -> Result<Next, store::Error> {
        let Called {
            result, is_error, ..
        } = called;
        let changes = &mut self.changes;
        changes.ended_steps.push(EndedStep {
            result: Some(result.clone()),
            is_error: Some(*is_error),
            ..ended(claim, StepStatus::Completed)
        });
        let children = called.start.iter();
        let start = children.map(|child| event(*child, EventKind::NewMessage));
        changes.events.extend(start);
        let calls = Calls {
            calls: &called.calls,
            concurrency: &called.concurrency,
        };
        let result = (result.as_str(), *is_error);
        self.turns
            .settle(changes, task, claim, result, calls, self.limits)
    }

    fn write_failure(
        &mut self,
        task: &mut TaskChange,
        claim: &Claim,
        failure: &Failure,
        asked: Option<&Asked>,
    ) -> Result<(), store::Error> {
        let changes = &mut self.changes;
        changes.ended_steps.push(EndedStep {
            model: asked.map(|asked| asked.model.clone()),
            spent: asked.map(|asked| asked.spent),
            failure: Some(failure.clone()),
            ..ended(claim, StepStatus::Failed)
        });
        if claim.key.ordinal > 0 {
            return self.turns.fail(changes, task, claim.key, failure);
        }
        if let Some(asked) = asked {
            let answer = json!({"error": failure});
            changes.logs.push(log(claim, asked, answer));
        }
        if asked.is_some_and(|asked| task.state.news_seq > asked.seen_seq) {
            // A message that has come meanwhile is answered, as it would be had it come a moment later (T-4, T-7).
            let key = task.state.key;
            changes.events.push(event(key, EventKind::TurnCommitted));
        } else {
            finish::end(changes, task, finish::End::Failed(failure.clone()))?;
        }
        Ok(())
    }
}

fn write_decision(
    changes: &mut Changes,
    task: &mut TaskChange,
    claim: &Claim,
    decided: &Decided,
    limits: Limits,
) -> Result<Next, store::Error> {
    let Decided {
        decision,
        concurrency,
        answer,
        asked,
        ..
    } = decided;
    let Decision { text, calls, .. } = decision;
    let key = task.state.key;
    let turn = claim.key.turn;
    changes.ended_steps.push(EndedStep {
        model: Some(asked.model.clone()),
        spent: Some(asked.spent),
        ..ended(claim, StepStatus::Completed)
    });
    changes.logs.push(log(claim, asked, log_answer(decision)));
    let message = Draft {
        turn: Some(turn),
        seen_seq: Some(asked.seen_seq),
        data: (!calls.is_empty()).then(|| json!({"calls": calls})),
        ..Draft::new(ItemKind::AssistantMessage)
    };
    task.add_item(changes, message.text(text));
    task.state.seen_seq = asked.seen_seq;
    if !calls.is_empty() {
        let calls = Calls { calls, concurrency };
        return Ok(advance::begin(changes, task, claim, calls, limits));
    }
    if task.state.has_news() {
        // Somebody wrote while the model was answering: it is asked again (T-4, H-44).
        changes.events.push(event(key, EventKind::TurnCommitted));
        return Ok(Next::default());
    }
    match answer {
        Answer::Final(output) => {
            finish::end(changes, task, finish::End::Completed(output.clone()))?
        }
        Answer::Repair(told) => {
            let message = Draft {
                turn: Some(turn),
                ..Draft::new(ItemKind::RepairMessage)
            };
            task.state.news_seq = task.add_item(changes, message.text(told));
            changes.events.push(event(key, EventKind::TurnCommitted));
        }
        Answer::Unfit(failure) => finish::end(changes, task, finish::End::Failed(failure.clone()))?,
    }
    Ok(Next::default())
}

fn ended(claim: &Claim, status: StepStatus) -> EndedStep {
    EndedStep {
        key: claim.key,
        attempt: claim.attempt,
        status,
        result: None,
        is_error: None,
        model: None,
        spent: None,
        failure: None,
    }
}

fn log(claim: &Claim, asked: &Asked, mut answer: Value) -> DecisionLog {
    answer["usage"] = json!(asked.spent.usage);
    if let Some(cost) = asked.spent.cost_micros {
        answer["cost_micros"] = json!(cost);
    }
    DecisionLog {
        task: claim.key.task_key(),
        turn: claim.key.turn,
        prompt_hash: asked.prompt.hash,
        seen_seq: asked.seen_seq,
        model: asked.model.clone(),
        answer,
        latency_ms: asked.latency_ms,
        retries: asked.retries,
    }
}

/// What the log adds to the feed, which has the text and the calls.
fn log_answer(decision: &Decision) -> Value {
    let names: Vec<&str> = decision.calls.iter().map(|c| c.name.as_str()).collect();
    match decision.raw_calls.is_empty() {
        true => json!({"calls": names}),
        false => json!({"calls": names, "raw_calls": decision.raw_calls}),
    }
}

/// So many prompts are remembered as stored; past that the memory starts anew.
const KNOWN_PROMPTS_MAX: usize = 10_000;

/// After so long a prompt is kept once more, which says that it is still in use: what nobody has kept for longer than
/// decisions are kept is forgotten (`forget`).
const KNOWN_FOR: Duration = Duration::from_secs(12 * 3600);

fn unknown_prompts(
    known: &KnownPrompts,
    commits: &[Commit],
) -> Vec<(WorkspaceId, [u8; 32], Value)> {
    let known = known.lock().unwrap_or_else(PoisonError::into_inner);
    let mut new = HashMap::new();
    for commit in commits {
        let Some(Asked { prompt, .. }) = commit.outcome.asked() else {
            continue;
        };
        let id = (commit.claim.key.workspace, prompt.hash);
        if known.get(&id).is_none_or(|at| at.elapsed() > KNOWN_FOR) {
            new.entry(id).or_insert_with(|| prompt.sections.clone());
        }
    }
    let mut new: Vec<_> = new
        .into_iter()
        .map(|((w, hash), sections)| (w, hash, sections))
        .collect();
    new.sort_by_key(|n| (n.0, n.1));
    new
}

fn remember(known: &KnownPrompts, new: &[(WorkspaceId, [u8; 32], Value)]) {
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    if known.len() > KNOWN_PROMPTS_MAX {
        known.clear();
    }
    let now = Instant::now();
    known.extend(
        new.iter()
            .map(|(workspace, hash, _)| ((*workspace, *hash), now)),
    );
}
