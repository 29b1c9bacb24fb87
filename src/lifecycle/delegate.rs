//! Makes the children of a `delegate_tasks` call, and the awaits for them, in one transaction (D-20). Calls of several
//! parents that come together share it.
//!
//! Nothing is started here: the children's events are written with the call's result (`checkpoint`), after this
//! transaction has committed. So a child can not end before its await exists, and a call that runs again after a crash
//! finds either nothing or everything, and starts nothing twice (D-26).

use super::{Draft, TaskChange, budget::Overdrawn, is_live, together_or_each};
use crate::{
    domain::{
        delegation::{Mode, Plan, Refusal, Started, check_targets, check_tree_size},
        ids::{AgentId, GroupId, ItemId, TaskId, WorkspaceId},
        step::Claim,
        task::{NewTask, ParentRef, TaskKey},
        task_await::{SourceType, Strategy},
    },
    runtime::Batcher,
    store::{
        self,
        awaits::NewGroup,
        changes::{Changes, ItemKind},
        tasks::{Setup, Target},
    },
};
use serde_json::json;
use sqlx::{PgConnection, PgPool};
use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

#[derive(Debug)]
pub enum Delegated {
    /// The children exist. `None`: nobody waits for them.
    Made {
        group: Option<GroupId>,
        children: Vec<Started>,
    },
    /// Nothing was created, for a reason that the model is told.
    Refused(Refusal),
    /// Nothing was created, since a budget does not allow so many children (T-18).
    Overdrawn(Overdrawn),
    /// The claim no longer holds.
    Stale,
}

/// A call that is to be carried out.
#[derive(Clone, Debug)]
pub struct Request {
    pub claim: Claim,
    /// That of the calling task.
    pub setup: Setup,
    pub plan: Plan,
}

impl Request {
    fn root(&self) -> TaskKey {
        TaskKey {
            task: self.setup.root,
            ..self.claim.key.task_key()
        }
    }
}

/// Carries out calls, those of several parents in one transaction when they come together. Cheap to clone.
#[derive(Clone)]
pub struct Delegations {
    batcher: Batcher<Request, Result<Delegated, Arc<store::Error>>>,
}

impl Delegations {
    /// At most `batch` calls per transaction. `tree_size_max` is how many descendants of a tree's root may be alive at
    /// once (D-50).
    pub fn start(pool: PgPool, tree_size_max: u32, batch: usize) -> Self {
        let batcher = Batcher::start(batch, 1, move |requests: Vec<Request>| {
            let pool = pool.clone();
            async move {
                together_or_each(&requests, |some| {
                    Box::pin(delegate(&pool, some, tree_size_max))
                })
                .await
            }
        });
        Self { batcher }
    }

    /// Makes all children of the plan, or adopts those that an earlier attempt of this call has made.
    pub async fn delegate(&self, request: Request) -> Result<Delegated, Arc<store::Error>> {
        let lost = || Err(store::Error::writer_lost());
        self.batcher.submit(request).await.unwrap_or_else(lost)
    }
}

/// Carries out the calls in one transaction: all of them or none. The answers are in the order of the calls.
pub async fn delegate(
    pool: &PgPool,
    requests: &[Request],
    tree_size_max: u32,
) -> Result<Vec<Delegated>, store::Error> {
    store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        // Whoever adds to a tree holds its root, so that two calls count one after the other.
        let keys: Vec<TaskKey> = requests
            .iter()
            .flat_map(|r| [r.root(), r.claim.key.task_key()])
            .collect();
        let locked = store::tasks::lock(&mut tx, &keys).await?;
        let mut parents: HashMap<TaskKey, TaskChange> = locked
            .into_iter()
            .map(|t| (t.key, TaskChange::of(t)))
            .collect();
        let calls: Vec<_> = requests.iter().map(|r| (r.claim, r.setup.root)).collect();
        let before = store::tasks::before_spawn(&mut tx, &calls).await?;
        let targets = targets(&mut tx, requests).await?;
        let mut live: HashMap<TaskKey, i64> = HashMap::new();
        let mut made = Made::default();
        let mut answers = Vec::with_capacity(requests.len());
        for (request, before) in requests.iter().zip(before) {
            let claim = &request.claim;
            // Several calls may be of one parent.
            let parent = parents
                .get_mut(&claim.key.task_key())
                .filter(|parent| before.holds && is_live(&parent.state, claim));
            let Some(parent) = parent else {
                answers.push(Delegated::Stale);
                continue;
            };
            if before.has_made
                && let Some(made) = made_before(&mut tx, claim).await?
            {
                answers.push(made);
                continue;
            }
            let live = live.entry(request.root()).or_insert(before.live);
            let named = |agent| targets.0.contains_key(&(claim.key.workspace, agent));
            let allowed = check_tree_size(&request.plan, *live, tree_size_max)
                .and_then(|()| check_targets(&request.plan, named));
            if let Err(refusal) = allowed {
                answers.push(Delegated::Refused(refusal));
                continue;
            }
            if request.setup.budgeted
                && let Some(overdrawn) = count_in_budgets(&mut tx, request).await?
            {
                answers.push(Delegated::Overdrawn(overdrawn));
                continue;
            }
            *live += request.plan.children.len() as i64;
            answers.push(made.add(request, parent, before.delegation_disabled, &targets));
        }
        if !made.tasks.is_empty() {
            made.changes.tasks = parents
                .into_values()
                .filter(|parent| parent.state.last_seq > parent.was_seq)
                .collect();
            made.changes.tasks.sort_unstable_by_key(|t| t.state.key);
            store::tasks::insert(&mut tx, &made.tasks, true).await?;
            store::awaits::insert_groups(&mut tx, &made.groups).await?;
            store::changes::apply(&mut tx, &made.changes).await?;
            tx.commit().await?;
        }
        Ok(answers)
    })
}

/// Counts the children of the call in every budget above it; or tells which one does not allow so many.
async fn count_in_budgets(
    conn: &mut PgConnection,
    request: &Request,
) -> Result<Option<Overdrawn>, store::Error> {
    let TaskKey { workspace, task } = request.claim.key.task_key();
    let budgets = store::budgets::lock_above(conn, workspace, task).await?;
    let more = request.plan.children.len() as i64;
    for budget in &budgets {
        if let Some(told) = budget.limits.refuses_children(budget.children, more) {
            return Ok(Some(Overdrawn::of(budget, &request.setup, &told)));
        }
    }
    store::budgets::add_children(conn, workspace, &budgets, more).await?;
    Ok(None)
}

/// What an earlier attempt of this call has made. Asked before the call is judged anew: limits and rights may have
/// changed since, and what exists must be started all the same (D-26).
pub async fn adopt(pool: &PgPool, claim: &Claim) -> Result<Option<Delegated>, store::Error> {
    let mut conn = pool.acquire().await?;
    made_before(&mut conn, claim).await
}

async fn made_before(
    conn: &mut PgConnection,
    claim: &Claim,
) -> Result<Option<Delegated>, store::Error> {
    let parent = claim.key.task_key();
    let made = store::tasks::children_of_step(conn, parent, claim.step).await?;
    if made.is_empty() {
        return Ok(None);
    }
    let group = store::awaits::group_of_step(conn, parent, claim.step).await?;
    let children = made
        .into_iter()
        .map(|c| Started {
            task: c.task,
            title: c.title,
            agent: c.agent,
        })
        .collect();
    Ok(Some(Delegated::Made { group, children }))
}

/// The agents that the calls name, as each workspace may run them.
struct Targets(HashMap<(WorkspaceId, AgentId), Target>);

/// The plans' targets, looked up on the server: nothing that the model writes can widen the set.
async fn targets(conn: &mut PgConnection, requests: &[Request]) -> Result<Targets, store::Error> {
    let named: BTreeSet<(WorkspaceId, AgentId)> = requests
        .iter()
        .flat_map(|r| {
            r.plan
                .children
                .iter()
                .map(|c| (r.claim.key.workspace, c.agent))
        })
        .collect();
    let wanted: Vec<_> = named.iter().map(|(w, agent)| (*w, Some(*agent))).collect();
    let found = store::tasks::resolve_agents(conn, &wanted).await?;
    let found = named.into_iter().zip(found);
    Ok(Targets(
        found
            .filter_map(|(key, target)| Some((key, target?)))
            .collect(),
    ))
}

/// What is to be written.
#[derive(Default)]
struct Made {
    tasks: Vec<NewTask>,
    groups: Vec<NewGroup>,
    changes: Changes,
}

impl Made {
    /// Adds the children of one call, the awaits for them and the parent's card.
    fn add(
        &mut self,
        request: &Request,
        parent: &mut TaskChange,
        delegation_disabled: bool,
        targets: &Targets,
    ) -> Delegated {
        let Request { claim, setup, plan } = request;
        let TaskKey { workspace, task } = parent.state.key;
        // A ban on delegating holds for everything beneath the task that carries it (T-9, D-54).
        let metadata = match delegation_disabled {
            true => json!({"disable_delegation": true}),
            false => json!({}),
        };
        let first = self.tasks.len();
        for (ordinal, child) in (0..).zip(&plan.children) {
            // check_targets has seen to it that each is there
            let Some(target) = targets.0.get(&(workspace, child.agent)) else {
                continue;
            };
            self.tasks.push(NewTask {
                key: TaskKey {
                    workspace,
                    task: TaskId::new(),
                },
                agent: target.agent,
                max_iterations: target.max_iterations,
                title: child.title.as_str().to_owned(),
                metadata: metadata.clone(),
                priority: parent.state.priority,
                budget: target.budget,
                budgeted: setup.budgeted,
                parent: Some(ParentRef {
                    root: setup.root,
                    task,
                    step: claim.step,
                    ordinal,
                    depth: setup.depth + 1,
                }),
                message: (ItemId::new(), child.prompt.clone()),
            });
        }
        let new = &self.tasks[first..];
        let group = match plan.mode {
            Mode::Async => None,
            Mode::Barrier { window_seconds } => {
                let group = NewGroup {
                    id: GroupId::new(),
                    task: parent.state.key,
                    step: claim.step,
                    source_type: SourceType::ChildTask,
                    strategy: Strategy::AllRequired,
                    window_seconds: Some(window_seconds),
                    correlation_keys: new.iter().map(|t| t.key.task.to_string()).collect(),
                };
                let id = group.id;
                self.groups.push(group);
                Some(id)
            }
        };
        let card = json!({
            "step_id": claim.step,
            "group_id": group.map(|g| g.to_string()).unwrap_or_default(),
            "mode": if group.is_some() { "barrier" } else { "async" },
            "total": new.len(),
        });
        let item = Draft {
            turn: Some(claim.key.turn),
            ..Draft::new(ItemKind::Delegation)
        };
        parent.add_item(&mut self.changes, item.data(card));
        let children = new
            .iter()
            .map(|t| Started {
                task: t.key.task,
                title: t.title.clone(),
                agent: t.agent.agent,
            })
            .collect();
        Delegated::Made { group, children }
    }
}
