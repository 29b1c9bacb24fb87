//! The parts of a turn: the decide step, and a call that it has asked for.

use super::{
    Shared,
    context::{Context, Prepared, TurnCalls},
    lease::Guard,
    run_code, scheduler,
};
use crate::{
    domain::{
        credential::blank_out,
        decision::{Decision, Spent, ToolCall, Usage},
        delegation::{Delegator, call_result},
        ids::{CredentialId, GroupId, StepId, TaskId},
        output::{Answer, judge},
        retry::next_delay,
        step::{Claim, StepKey},
        task::{Failure, TaskKey},
        task_await::WaitFor,
    },
    lifecycle::{
        self,
        budget::{Denied, Estimate, Overdrawn},
        checkpoint::{Asked, Commit, Committed, Decided, Next, Outcome},
        credentials::CredentialError,
        delegate::{self, Delegated},
        wait::Waited,
    },
    llm::{ModelError, Request, Retry},
    runtime::Causes,
    store::{
        self,
        steps::{Claimed, GiveBack},
    },
    tools::{self, ToolOutcome},
};
use futures::TryFutureExt;
use secrecy::{ExposeSecret, SecretString};
use serde_json::json;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

pub type Done = Result<(), Arc<store::Error>>;

/// Runs the claimed step, and the calls of its turn that this worker comes to hold after it. `slot` is given back when
/// nothing slow is left to do.
pub async fn run(
    shared: &Arc<Shared>,
    guard: &mut Guard,
    step: Claimed,
    mut context: Context,
    slot: OwnedSemaphorePermit,
) -> Done {
    let mut slot = Some(slot);
    let calls = match (&step.call, context.request.take()) {
        (None, Some(prepared)) => {
            decide(shared, guard, &step, &mut context, &prepared, &mut slot).await?
        }
        (Some(_), _) => Some(context.calls.take().ok_or_else(|| no_calls(&step))?),
        (None, None) => None,
    };
    match calls {
        Some(calls) => scheduler::run(shared, guard, &mut context, calls).await,
        None => Ok(()),
    }
}

fn no_calls(step: &Claimed) -> Arc<store::Error> {
    let StepKey { task, turn, .. } = step.claim.key;
    Arc::new(store::Error::Corrupt {
        table: "task_items",
        reason: format!("turn {turn} of task {task} has calls but no message that has them"),
    })
}

/// Commits a result, however long the database is away within a lease: an answer of a model is not thrown away for a
/// moment's outage.
pub async fn commit(shared: &Arc<Shared>, commit: Commit) -> Result<Committed, Arc<store::Error>> {
    patiently(shared, || commit_whole(shared, commit.clone())).await
}

async fn commit_whole(
    shared: &Arc<Shared>,
    commit: Commit,
) -> Result<Committed, Arc<store::Error>> {
    let its_shared = shared.clone();
    let committing = async move { its_shared.checkpointer.commit(commit).await };
    whole(shared, committing, |committed| match committed {
        Committed::Done(next) => next.held,
        Committed::Stale => None,
    })
    .await
}

/// One attempt at something that leaves this worker with a claim, which is not broken off with its caller. If that goes
/// away meanwhile (a hard stop), nobody holds the claim: it is given back instead of waiting out its lease (O-4).
pub async fn whole<T: Send + 'static>(
    shared: &Arc<Shared>,
    work: impl Future<Output = Result<T, Arc<store::Error>>> + Send + 'static,
    held: fn(&T) -> Option<Claim>,
) -> Result<T, Arc<store::Error>> {
    let (answer, answered) = oneshot::channel();
    let its_shared = shared.clone();
    shared.running.spawn(async move {
        let Shared { pool, hub, .. } = &*its_shared;
        let unheard = answer.send(work.await).err();
        if let Some(Ok(done)) = unheard
            && let Some(claim) = held(&done)
        {
            let _ = lifecycle::requeue::give_back(pool, hub, &claim, GiveBack::Shutdown).await;
        }
    });
    answered
        .await
        .unwrap_or_else(|_| Err(store::Error::writer_lost()))
}

/// Repeats `work` while the database can not be reached, for at most one lease; a claim that is lost meanwhile cancels
/// the caller. All work here may be repeated: it is fenced by its claim or adopts what it finds, so if it had been
/// committed after all the repeat changes nothing.
pub async fn patiently<T, F>(shared: &Shared, work: impl Fn() -> F) -> Result<T, Arc<store::Error>>
where
    F: Future<Output = Result<T, Arc<store::Error>>>,
{
    let begun = Instant::now();
    let mut pause = Duration::from_millis(50);
    loop {
        match work().await {
            Err(error) if error.is_unavailable() && begun.elapsed() < shared.lease => {
                tracing::warn!(error = %Causes(&*error), "the database is away, trying again in {pause:?}");
                tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
                pause = (pause * 2).min(Duration::from_secs(2));
            }
            result => return result,
        }
    }
}

/// Asks the model and commits its decision. Returns the calls that it asks for, of which this worker now holds the first;
/// `None`: there is nothing left to do here.
async fn decide(
    shared: &Arc<Shared>,
    guard: &mut Guard,
    step: &Claimed,
    context: &mut Context,
    prepared: &Prepared,
    slot: &mut Option<OwnedSemaphorePermit>,
) -> Result<Option<TurnCalls>, Arc<store::Error>> {
    let claim = step.claim;
    let settings = &prepared.request.model;
    let model = match &prepared.own {
        Some(Ok(own)) => own.name_for(settings),
        Some(Err(_)) | None => shared.models.name_for(settings),
    };
    let begun = Instant::now();
    let (answer, usage, repeats) = ask(shared, step, prepared, &model).await?;
    let spent = Spent {
        usage,
        cost_micros: shared.models.cost_micros(&model, usage),
    };
    let asked = Asked {
        prompt: prepared.prompt.clone(),
        seen_seq: prepared.seen_seq,
        model,
        spent,
        latency_ms: i32::try_from(begun.elapsed().as_millis()).unwrap_or(i32::MAX),
        retries: step.model_attempts + repeats,
    };
    let outcome = match answer {
        Ok(decision) => Outcome::Decided(Box::new(Decided {
            answer: match &prepared.request.output_schema {
                Some(schema) if decision.calls.is_empty() => {
                    judge(schema, &decision.text, prepared.repairs)
                }
                Some(_) | None => Answer::Final(decision.text.clone()),
            },
            concurrency: scheduler::concurrency(shared, &claim, context, &decision.calls).await,
            decision,
            task: Some(step.task.clone()),
            asked,
        })),
        Err(Unanswered::Empty) => Outcome::Failed {
            failure: Failure::new(
                "empty_answer",
                "The model answered with neither text nor tool calls, twice. Send a new message to try again.",
            ),
            asked: Some(Box::new(asked)),
        },
        Err(Unanswered::Denied(denied)) => {
            let pause = match denied {
                Denied::Wait => true,
                // What an empty answer has taken is kept with the step; the next attempt ends it.
                Denied::Exhausted(_) | Denied::Refused(_) => usage != Usage::default(),
            };
            if pause {
                let seconds = BUDGET_PAUSE_SECS * (0.5 + fastrand::f64() / 2.0);
                give_back(shared, &claim, GiveBack::Budget { seconds, spent }).await?;
                return Ok(None);
            }
            let failure = match denied {
                Denied::Exhausted(overdrawn) => {
                    if exhaust(shared, &claim, &overdrawn).await? {
                        return Ok(None);
                    }
                    overdrawn.why
                }
                Denied::Refused(failure) => failure,
                Denied::Wait => return Ok(None),
            };
            Outcome::Failed {
                failure,
                asked: None,
            }
        }
        Err(Unanswered::Error(error)) => {
            let attempt = step.model_attempts as u32 + 1;
            match again(&error, attempt, shared) {
                Ok(seconds) => {
                    let why = GiveBack::ModelBusy { seconds, spent };
                    give_back(shared, &claim, why).await?;
                    return Ok(None);
                }
                Err(failure) => Outcome::Failed {
                    failure,
                    asked: Some(Box::new(asked)),
                },
            }
        }
    };
    let calls: Arc<[ToolCall]> = match &outcome {
        Outcome::Decided(decided) => decided.decision.calls.as_slice().into(),
        Outcome::Called(_) | Outcome::Failed { .. } => Arc::default(),
    };
    if calls.is_empty() {
        // What is left is one write: another step may run meanwhile.
        *slot = None;
        shared.made_room();
    }
    match commit(shared, Commit { claim, outcome }).await? {
        Committed::Done(Next {
            held: Some(first),
            unstarted,
            ..
        }) => {
            guard.move_to(first);
            Ok(Some(TurnCalls { calls, unstarted }))
        }
        Committed::Done(Next { held: None, .. }) | Committed::Stale => Ok(None),
    }
}

enum Unanswered {
    Empty,
    /// It was not asked.
    Denied(Denied),
    Error(ModelError),
}

/// One attempt; an empty answer is asked for once more (T-15), and costs as much as any (T-17). With what it has taken, and
/// how often it was repeated.
async fn ask(
    shared: &Shared,
    step: &Claimed,
    prepared: &Prepared,
    model: &str,
) -> Result<(Result<Decision, Unanswered>, Usage, i32), Arc<store::Error>> {
    let claim = &step.claim;
    let StepKey {
        workspace,
        task,
        turn,
        ..
    } = claim.key;
    let on_text = |text: &str| shared.hub.delta(workspace, task, turn, text);
    let mut usage = Usage::default();
    for round in 0..2 {
        if round > 0 || claim.attempt > 1 {
            shared.hub.answer_begins_anew(workspace, task, turn);
        }
        if step.setup.budgeted {
            let estimate = estimate(shared, &prepared.request, model, usage);
            let reserve = || lifecycle::budget::reserve(&shared.pool, claim, &step.setup, estimate);
            if let Some(denied) = patiently(shared, || reserve().map_err(Arc::new)).await? {
                return Ok((Err(Unanswered::Denied(denied)), usage, round));
            }
        }
        let (models, request) = (&shared.models, &prepared.request);
        let answer = match &prepared.own {
            None => models.decide(request, &on_text).await,
            Some(Ok(own)) => models.decide_with(own, request, &on_text).await,
            Some(Err(reason)) => Err(reason.clone()),
        };
        match answer {
            Err(error) => return Ok((Err(Unanswered::Error(error)), usage, round)),
            Ok(decision) => {
                usage += decision.usage;
                if !decision.calls.is_empty() || !decision.text.trim().is_empty() {
                    return Ok((Ok(decision), usage, round));
                }
            }
        }
    }
    Ok((Err(Unanswered::Empty), usage, 1))
}

/// The longest pause of a step that waits for other calls under its budget.
const BUDGET_PAUSE_SECS: f64 = 0.5;
/// What an answer is taken to have where nobody limits it.
const OUTPUT_TOKENS_GUESS: u32 = 1000;

/// What a call may take, for its reservation.
fn estimate(shared: &Shared, request: &Request, model: &str, so_far: Usage) -> Estimate {
    let own = request.model.max_output_tokens.or(shared.max_output_tokens);
    let usage = Usage {
        input_tokens: u32::try_from(request.estimated_tokens()).unwrap_or(u32::MAX),
        output_tokens: own.unwrap_or(OUTPUT_TOKENS_GUESS),
        cached_tokens: 0,
    };
    Estimate {
        so_far: Spent {
            usage: so_far,
            cost_micros: shared.models.cost_micros(model, so_far),
        },
        tokens: usage.tokens(),
        cost_micros: shared.models.cost_micros(model, usage),
    }
}

async fn give_back(shared: &Shared, claim: &Claim, why: GiveBack) -> Done {
    patiently(shared, || {
        lifecycle::requeue::give_back(&shared.pool, &shared.hub, claim, why).map_err(Arc::new)
    })
    .await
}

/// Stops the tree, this step with it. Goes on when the stop that it is has reached this worker.
async fn exhaust(
    shared: &Arc<Shared>,
    claim: &Claim,
    overdrawn: &Overdrawn,
) -> Result<bool, Arc<store::Error>> {
    let (its_shared, overdrawn) = (shared.clone(), overdrawn.clone());
    let workspace = claim.key.workspace;
    let stopping = shared.running.spawn(async move {
        let Shared { pool, hub, .. } = &*its_shared;
        lifecycle::budget::exhaust(pool, hub, workspace, &overdrawn).await
    });
    match stopping.await {
        Ok(stopped) => Ok(stopped?),
        Err(_) => Err(store::Error::writer_lost()),
    }
}

/// After how many seconds the step is to run again, or why it fails (T-14).
fn again(error: &ModelError, attempt: u32, shared: &Shared) -> Result<f64, Failure> {
    // The message says who failed with which status.
    let told = &error.message;
    match error.retry {
        Retry::Never => Err(Failure::new("model_error", told.as_str())),
        Retry::After(hint) => next_delay(attempt, hint, &shared.retry, fastrand::f64())
            .map(|delay| delay.as_secs_f64())
            .map_err(|give_up| Failure::new("model_error", format!("{told} ({give_up})"))),
    }
}

/// Of a call that an earlier attempt has begun, and that must not be made twice.
pub const OUTCOME_UNKNOWN: &str = "The call was interrupted, and it is not one that may be repeated. Whether it had an \
    effect is unknown: it may have. Look whether it had before you call again.";

/// What a call has come to.
pub struct Executed {
    pub text: String,
    pub is_error: bool,
    pub start: Vec<TaskKey>,
}

impl Executed {
    pub fn ok(text: String) -> Self {
        Self {
            text,
            is_error: false,
            start: vec![],
        }
    }

    pub fn error(text: String) -> Self {
        Self {
            text,
            is_error: true,
            start: vec![],
        }
    }
}

/// Carries out one call. `None`: the claim no longer holds.
pub async fn execute(
    shared: &Arc<Shared>,
    guard: &Guard,
    context: &Context,
    call: &ToolCall,
) -> Result<Option<Executed>, Arc<store::Error>> {
    if let Some(invalid) = &call.invalid {
        return Ok(Some(Executed::error(invalid.clone())));
    }
    let claim = guard.claim();
    if claim.attempt > 1
        && let Some(made) = lifecycle::delegate::adopt(&shared.pool, claim).await?
    {
        let adopted = delegated(made, claim, false);
        return Ok(match run_code::is_code(&call.name, context) {
            true => adopted.map(run_code::interrupted),
            false => adopted,
        });
    }
    let secrets = match secrets(shared, context, claim, &call.name).await? {
        Ok(secrets) => secrets,
        Err(reason) => return Ok(Some(Executed::error(reason))),
    };
    let executed = execute_with(shared, context, claim, call, &secrets).await?;
    Ok(executed.map(|executed| without(&secrets, executed)))
}

/// Whatever a tool says of its arguments, nobody reads a secret there (L-9).
pub fn without(secrets: &[(CredentialId, SecretString)], executed: Executed) -> Executed {
    let values: Vec<&str> = secrets.iter().map(|(_, v)| v.expose_secret()).collect();
    match values.is_empty() {
        true => executed,
        false => Executed {
            text: blank_out(&executed.text, &values),
            ..executed
        },
    }
}

/// The values of the credentials that are bound to the tool, read for this one call; or why they can not be had.
pub async fn secrets(
    shared: &Shared,
    context: &Context,
    claim: &Claim,
    name: &str,
) -> Result<Result<Vec<(CredentialId, SecretString)>, String>, Arc<store::Error>> {
    let tool = context.tools.iter().find(|tool| tool.name == name);
    let instance = tool.and_then(|tool| tool.instance.as_ref());
    let ids = instance.map(|instance| instance.tool.credentials());
    let Some(ids) = ids.filter(|ids| !ids.is_empty()) else {
        return Ok(Ok(vec![]));
    };
    let mut conn = shared.pool.acquire().await.map_err(store::Error::from)?;
    let workspace = claim.key.workspace;
    match lifecycle::credentials::resolve(&mut conn, &shared.vault, workspace, &ids).await {
        Ok(values) => Ok(Ok(ids.into_iter().zip(values).collect())),
        Err(CredentialError::Store(error)) => Err(Arc::new(error)),
        Err(reason) => Ok(Err(format!(
            "{name} was not called, since a credential that it needs can not be had: {reason}. Go on without it, or tell the user."
        ))),
    }
}

async fn execute_with(
    shared: &Arc<Shared>,
    context: &Context,
    claim: &Claim,
    call: &ToolCall,
    secrets: &[(CredentialId, SecretString)],
) -> Result<Option<Executed>, Arc<store::Error>> {
    let outcome = judge_call(shared, context, call, secrets);
    carry_out(shared, context, claim, claim.step, outcome).await
}

/// What the call asks for. The grants are checked here again, whatever the prompt had offered.
pub fn judge_call(
    shared: &Shared,
    context: &Context,
    call: &ToolCall,
    secrets: &[(CredentialId, SecretString)],
) -> ToolOutcome {
    let against = tools::Context {
        by: Delegator {
            agent: context.setup.agent.agent,
            depth: context.setup.depth,
        },
        limits: shared.limits,
    };
    tools::call(
        &call.name,
        &call.arguments,
        &context.tools,
        secrets,
        &against,
    )
}

/// `key` names the call to the outside, whoever makes it however often.
pub async fn carry_out(
    shared: &Arc<Shared>,
    context: &Context,
    claim: &Claim,
    key: StepId,
    outcome: ToolOutcome,
) -> Result<Option<Executed>, Arc<store::Error>> {
    Ok(match outcome {
        ToolOutcome::TellModel(text) => Some(Executed::error(text)),
        ToolOutcome::Delegate(plan) => {
            let advise_inputs = plan.advise_inputs;
            let request = delegate::Request {
                claim: *claim,
                setup: context.setup,
                plan,
            };
            let made = shared.delegations.delegate(request).await?;
            if let Delegated::Overdrawn(overdrawn) = &made
                && exhaust(shared, claim, overdrawn).await?
            {
                return Ok(None);
            }
            delegated(made, claim, advise_inputs)
        }
        ToolOutcome::Wait(wait) => {
            match lifecycle::wait::wait(&shared.pool, &shared.hub, claim, &wait).await? {
                Waited::Registered { group, callback } => {
                    Some(Executed::ok(awaiting(&wait, group, callback)))
                }
                Waited::Refused(reason) => Some(Executed::error(reason)),
                Waited::Stale => None,
            }
        }
        ToolOutcome::Http(request) if claim.attempt > 1 && !request.is_repeatable => {
            Some(Executed::error(OUTCOME_UNKNOWN.into()))
        }
        ToolOutcome::Http(request) => {
            let sent = shared.http.send(&request, key).await;
            Some(Executed {
                is_error: sent.content.is_none(),
                ..Executed::ok(sent.text)
            })
        }
        ToolOutcome::Code(code) => run_code::run(shared, context, claim, code).await?,
        ToolOutcome::ReadSubtask { task, offset } => {
            let mut conn = shared.pool.acquire().await.map_err(store::Error::from)?;
            let child = store::tasks::child_result(&mut conn, claim.key.task_key(), task).await?;
            Some(read_part(task, child, offset, shared.result_chars))
        }
    })
}

fn delegated(delegated: Delegated, claim: &Claim, advise_inputs: bool) -> Option<Executed> {
    match delegated {
        Delegated::Made { group, children } => {
            let workspace = claim.key.workspace;
            let start = children
                .iter()
                .map(|c| TaskKey {
                    workspace,
                    task: c.task,
                })
                .collect();
            Some(Executed {
                text: call_result(group, &children, advise_inputs),
                is_error: false,
                start,
            })
        }
        Delegated::Refused(refusal) => Some(Executed::error(refusal.to_string())),
        Delegated::Overdrawn(overdrawn) => Some(Executed::error(overdrawn.why.message)),
        Delegated::Stale => None,
    }
}

/// The result of a call that waits.
fn awaiting(wait: &WaitFor, group: GroupId, callback: Option<String>) -> String {
    let result = match wait {
        WaitFor::User { .. } => json!({"status": "awaiting_user", "group_id": group}),
        WaitFor::Time(_) | WaitFor::Seconds(_) => {
            json!({"status": "awaiting_time", "group_id": group})
        }
        WaitFor::Signal { key, .. } => json!({
            "status": "awaiting_signal",
            "group_id": group,
            "key": key,
            "callback_url": callback.map(|token| format!("/api/callbacks/{token}")),
        }),
    };
    result.to_string()
}

/// A part of a child's output that fits into one tool result, with what stands around it and with every escape that
/// JSON needs: a result that had to be cut would lose the place where to read on.
fn read_part(
    task: TaskId,
    child: Option<store::tasks::ChildResult>,
    offset: usize,
    result_chars: usize,
) -> Executed {
    let Some(child) = child else {
        return Executed::error(format!("There is no task {task} that you have delegated."));
    };
    let output = child.output.unwrap_or_default();
    let total = output.chars().count();
    let result = |part: &str, next: Option<usize>| {
        json!({
            "task_id": task,
            "title": child.title,
            "status": child.status,
            "error": child.failure,
            "output": part,
            "total_chars": total,
            // null: this was the last part
            "next_offset": next,
        })
        .to_string()
    };
    let mut room = result_chars.saturating_sub(result("", Some(total)).chars().count());
    let mut part = String::new();
    let mut end = offset.min(total);
    for c in output.chars().skip(offset) {
        let length = json_chars(c);
        // However little room there is, reading comes to an end.
        if length > room && !part.is_empty() {
            break;
        }
        room = room.saturating_sub(length);
        part.push(c);
        end += 1;
    }
    Executed::ok(result(&part, (end < total).then_some(end)))
}

/// Characters of `c` within a JSON string.
fn json_chars(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        c if c < ' ' => 6,
        _ => 1,
    }
}
