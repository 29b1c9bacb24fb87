//! Makes the children of a `delegate_tasks` call, and the awaits for them, in one transaction (D-20).
//!
//! Nothing is started here: the children's events are written with the call's result (`checkpoint`), after this
//! transaction has committed. So a child can not end before its await exists, and a call that runs again after a crash
//! finds either nothing or everything, and starts nothing twice (D-26).

use super::{Draft, TaskChange, budget::Overdrawn, is_live};
use crate::{
    domain::{
        delegation::{Mode, Plan, Refusal, Started, check_targets, check_tree_size},
        ids::{AgentId, GroupId, ItemId, TaskId, WorkspaceId},
        step::Claim,
        task::{NewTask, ParentRef, TaskKey},
        task_await::{SourceType, Strategy},
    },
    store::{
        self,
        awaits::NewGroup,
        changes::{Changes, ItemKind},
        tasks::{Setup, Target},
    },
};
use serde_json::json;
use sqlx::{PgConnection, PgPool};
use std::collections::{BTreeSet, HashMap};

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

/// Makes all children of the plan, or adopts those that an earlier attempt of this call has made. `setup` is that of the
/// calling task; `tree_size_max` is how many descendants of the tree's root may be alive at once (D-50).
pub async fn delegate(
    pool: &PgPool,
    claim: &Claim,
    setup: &Setup,
    plan: &Plan,
    tree_size_max: u32,
) -> Result<Delegated, store::Error> {
    store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let key = claim.key.task_key();
        // Whoever adds to a tree holds its root, so that two calls count one after the other.
        let root = TaskKey {
            task: setup.root,
            ..key
        };
        let locked = store::tasks::lock(&mut tx, &[root, key]).await?;
        let task = locked.into_iter().find(|t| t.key == key);
        let Some(task) = task.filter(|t| is_live(t, claim)) else {
            return Ok(Delegated::Stale);
        };
        let before = store::tasks::before_spawn(&mut tx, claim, setup.root).await?;
        if !before.holds {
            return Ok(Delegated::Stale);
        }
        if before.has_made
            && let Some(made) = made_before(&mut tx, claim).await?
        {
            return Ok(made);
        }
        if let Err(refusal) = check_tree_size(plan, before.live, tree_size_max) {
            return Ok(Delegated::Refused(refusal));
        }
        let targets = match targets(&mut tx, claim.key.workspace, plan).await? {
            Ok(targets) => targets,
            Err(refusal) => return Ok(Delegated::Refused(refusal)),
        };
        let budgets = match setup.budgeted {
            true => store::budgets::lock_above(&mut tx, key.workspace, key.task).await?,
            false => vec![],
        };
        let more = plan.children.len() as i64;
        for budget in &budgets {
            if let Some(told) = budget.limits.refuses_children(budget.children, more) {
                return Ok(Delegated::Overdrawn(Overdrawn::of(budget, setup, &told)));
            }
        }
        if !budgets.is_empty() {
            store::budgets::add_children(&mut tx, key.workspace, &budgets, more).await?;
        }
        let parent = TaskChange::of(task);
        let setup = Setup {
            delegation_disabled: before.delegation_disabled,
            ..*setup
        };
        let delegated = make(&mut tx, claim, parent, &setup, plan, &targets).await?;
        tx.commit().await?;
        Ok(delegated)
    })
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

/// The plan's targets, looked up on the server: nothing that the model writes can widen the set.
async fn targets(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    plan: &Plan,
) -> Result<Result<HashMap<AgentId, Target>, Refusal>, store::Error> {
    let ids: BTreeSet<AgentId> = plan.children.iter().map(|c| c.agent).collect();
    let requests: Vec<_> = ids.iter().map(|id| (workspace, Some(*id))).collect();
    let found = store::tasks::resolve_agents(conn, &requests).await?;
    let targets: HashMap<AgentId, Target> = ids
        .into_iter()
        .zip(found)
        .filter_map(|(id, target)| Some((id, target?)))
        .collect();
    let allowed = targets.keys().copied().collect();
    Ok(check_targets(plan, &allowed).map(|()| targets))
}

async fn make(
    conn: &mut PgConnection,
    claim: &Claim,
    mut parent: TaskChange,
    setup: &Setup,
    plan: &Plan,
    targets: &HashMap<AgentId, Target>,
) -> Result<Delegated, store::Error> {
    let TaskKey { workspace, task } = parent.state.key;
    // A ban on delegating holds for everything beneath the task that carries it (T-9, D-54).
    let metadata = match setup.delegation_disabled {
        true => json!({"disable_delegation": true}),
        false => json!({}),
    };
    let mut new = Vec::with_capacity(plan.children.len());
    for (ordinal, child) in (0..).zip(&plan.children) {
        // check_targets has seen to it that each is there
        let Some(target) = targets.get(&child.agent) else {
            continue;
        };
        new.push(NewTask {
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
    store::tasks::insert(conn, &new, true).await?;
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
            store::awaits::insert_group(conn, &group).await?;
            Some(group.id)
        }
    };
    let mut changes = Changes::default();
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
    parent.add_item(&mut changes, item.data(card));
    changes.tasks.push(parent);
    store::changes::apply(conn, &changes).await?;
    let children = new
        .into_iter()
        .map(|t| Started {
            task: t.key.task,
            title: t.title,
            agent: t.agent.agent,
        })
        .collect();
    Ok(Delegated::Made { group, children })
}
