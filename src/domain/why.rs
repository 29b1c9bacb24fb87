//! Why a task does not move (T-25): the causes, from what is known of the task at one moment.
//!
//! `causes` looks in the order of `task::next_move`: whatever keeps that from asking the model, or hands the move to
//! somebody else, is the cause. What a child that is waited for waits for itself is the same question, asked of the child.

use super::{
    budget::Owner,
    ids::{GroupId, ProcessId, TaskId},
    task::TaskStatus,
    task_await::SourceType,
};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// A task with all that may keep it from moving, read at one moment.
#[derive(Clone, Debug)]
pub struct Facts {
    pub status: TaskStatus,
    pub is_child: bool,
    pub created_at: DateTime<Utc>,
    pub finished_at: Option<DateTime<Utc>>,
    /// Queued or running.
    pub steps: Vec<StepFacts>,
    /// Those whose outcome the task has not been told, oldest first.
    pub groups: Vec<GroupFacts>,
    /// Its entries in the orchestrator's inbox. Only looked at where [`Facts::rests_on_events`].
    pub events: Vec<EventFacts>,
}

#[derive(Clone, Debug)]
pub struct StepFacts {
    /// Of a call; `None` for a decide step.
    pub tool: Option<String>,
    pub attempt: i32,
    /// How often a busy model has sent it back.
    pub model_attempts: i32,
    pub lost_leases: i32,
    pub queued_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub run_at: DateTime<Utc>,
    /// Who holds it until when; `None` for a queued step.
    pub held: Option<(ProcessId, DateTime<Utc>)>,
    pub place: Place,
    /// Budgets above a queued step under which other calls are being made.
    pub budgets: Vec<HeldBudget>,
}

/// Where a queued step stands in the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Place {
    /// Queued steps of the workspace that are taken before it.
    pub before: i64,
    /// It stands so far back that not all of them were counted.
    pub more_before: bool,
    /// Steps of other workspaces are taken before it as well.
    pub others_before: bool,
    /// Workers that have lately said that they live. With none, nothing is taken.
    pub workers: i64,
}

/// A budget that calls of other steps are being made under.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct HeldBudget {
    /// `task` (with everything beneath it) or `workspace`.
    pub of: Owner,
    /// The task whose budget it is.
    pub task_id: Option<TaskId>,
    pub title: Option<String>,
    /// Calls under way.
    pub calls: i64,
}

#[derive(Clone, Debug)]
pub struct GroupFacts {
    pub id: GroupId,
    pub source_type: SourceType,
    pub total: i32,
    pub pending: i32,
    pub about: Value,
    pub created_at: DateTime<Utc>,
    /// `None`: it is open.
    pub closed_at: Option<DateTime<Utc>>,
    /// The earliest time of its pending awaits.
    pub due_at: Option<DateTime<Utc>>,
}

#[derive(Clone, Copy, Debug)]
pub struct EventFacts {
    /// How often it has failed.
    pub attempts: i32,
    pub created_at: DateTime<Utc>,
    pub not_before: DateTime<Utc>,
    pub dead_at: Option<DateTime<Utc>>,
}

/// One thing that keeps a task where it is.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Cause {
    #[serde(flatten)]
    pub what: What,
    pub since: DateTime<Utc>,
    /// From then until the answer was made.
    pub lasted_ms: i64,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum What {
    /// It has ended, and does not move unless it is written to.
    Ended,
    /// A step waits for a worker.
    Queued {
        /// Of a call; null: a model is to be asked.
        tool: Option<String>,
        #[serde(flatten)]
        place: Place,
    },
    /// A model is to be asked when calls under way have shown what they leave of these budgets.
    Limit { budgets: Vec<HeldBudget> },
    /// A step is tried again later, because a model was busy for example. `since` is its first try.
    Retry {
        tool: Option<String>,
        at: DateTime<Utc>,
        /// How often a model has sent it back.
        failed: i32,
    },
    /// A model is being asked. `since` is the first try.
    Model { worker: ProcessId, attempt: i32 },
    /// A tool runs.
    Tool {
        tool: String,
        worker: ProcessId,
        attempt: i32,
    },
    /// The worker of a step has been silent for too long, `since` its lease has run out. Another one takes the step over.
    LeaseLost {
        tool: Option<String>,
        worker: ProcessId,
        /// How often that has happened to this step before.
        lost_before: i32,
    },
    /// Child tasks have not ended; what each of them waits for stands with it.
    Children {
        group_id: GroupId,
        total: i32,
        pending: i32,
        /// When it is asked whether they still live, in case their end went unheard.
        next_check_at: Option<DateTime<Utc>>,
    },
    /// A person is to answer.
    User {
        group_id: GroupId,
        question: Option<String>,
        deadline_at: Option<DateTime<Utc>>,
    },
    /// Something outside is to be reported.
    Signal {
        group_id: GroupId,
        /// Null: through the callback URL only.
        key: Option<String>,
        deadline_at: Option<DateTime<Utc>>,
    },
    /// A time is to come.
    Time {
        group_id: GroupId,
        at: Option<DateTime<Utc>>,
    },
    /// What it waited for is over; the orchestrator is to wake it.
    Resume {
        group_ids: Vec<GroupId>,
        at: DateTime<Utc>,
        /// How often that has failed.
        failed: i32,
    },
    /// A message or a finished turn is there; the orchestrator is to look at it.
    Event {
        at: DateTime<Utc>,
        /// How often that has failed.
        failed: i32,
    },
    /// The orchestrator has failed to move it too often and has set that aside. An operator can retry it; a new message
    /// moves the task as well.
    EventDead {
        /// What it was to be woken with.
        group_ids: Vec<GroupId>,
        failed: i32,
    },
    /// The call that has made it is not committed yet. It starts with that.
    NotStarted,
    /// Nothing was found that would move it: tell an operator. `since` is the earliest that it can be.
    Unexplained,
}

impl Facts {
    /// Whether only the orchestrator can move it now.
    pub fn rests_on_events(&self) -> bool {
        !self.status.is_terminal()
            && self.steps.is_empty()
            && self.groups.iter().all(|group| group.closed_at.is_some())
    }
}

impl What {
    /// The group of children that is waited for, and how many of them have not ended.
    pub fn children(&self) -> Option<(GroupId, i64)> {
        if let Self::Children {
            group_id, pending, ..
        } = self
        {
            return Some((*group_id, (*pending).into()));
        }
        None
    }
}

/// Why the task does not move; never empty.
pub fn causes(facts: &Facts, now: DateTime<Utc>) -> Vec<Cause> {
    let cause = |(what, since): (What, DateTime<Utc>)| Cause {
        what,
        since,
        lasted_ms: (now - since).num_milliseconds().max(0),
    };
    if facts.status.is_terminal() {
        let since = facts.finished_at.unwrap_or(facts.created_at);
        return vec![cause((What::Ended, since))];
    }
    if !facts.steps.is_empty() {
        let steps = facts.steps.iter();
        return steps.map(|step| cause(of_step(step, now))).collect();
    }
    let open = facts.groups.iter().filter(|g| g.closed_at.is_none());
    let waits: Vec<Cause> = open.map(|group| cause(of_group(group))).collect();
    if !waits.is_empty() {
        return waits;
    }
    vec![cause(of_events(facts))]
}

fn of_step(step: &StepFacts, now: DateTime<Utc>) -> (What, DateTime<Utc>) {
    let tool = step.tool.clone();
    let begun = step.started_at.unwrap_or(step.queued_at);
    let Some((worker, lease_expires_at)) = step.held else {
        return match step.run_at > now {
            // Nothing says that the pause is a budget's, but that there are calls under it and no model was busy.
            true if step.model_attempts == 0 && !step.budgets.is_empty() => {
                let budgets = step.budgets.clone();
                (What::Limit { budgets }, begun)
            }
            true => {
                let (at, failed) = (step.run_at, step.model_attempts);
                (What::Retry { tool, at, failed }, begun)
            }
            false => {
                let place = step.place;
                (What::Queued { tool, place }, step.run_at)
            }
        };
    };
    if lease_expires_at < now {
        let lost_before = step.lost_leases;
        let what = What::LeaseLost {
            tool,
            worker,
            lost_before,
        };
        return (what, lease_expires_at);
    }
    let attempt = step.attempt;
    let what = match tool {
        None => What::Model { worker, attempt },
        Some(tool) => What::Tool {
            tool,
            worker,
            attempt,
        },
    };
    (what, begun)
}

fn of_group(group: &GroupFacts) -> (What, DateTime<Utc>) {
    let GroupFacts { id, due_at, .. } = *group;
    let group_id = id;
    let about = |field: &str| group.about[field].as_str().map(str::to_owned);
    let what = match group.source_type {
        SourceType::ChildTask => What::Children {
            group_id,
            total: group.total,
            pending: group.pending,
            next_check_at: due_at,
        },
        SourceType::UserInput => What::User {
            group_id,
            question: about("question"),
            deadline_at: due_at,
        },
        SourceType::External => What::Signal {
            group_id,
            key: about("key"),
            deadline_at: due_at,
        },
        SourceType::Timer => What::Time {
            group_id,
            at: due_at,
        },
    };
    (what, group.created_at)
}

/// Why a task stands that only the orchestrator can move.
fn of_events(facts: &Facts) -> (What, DateTime<Utc>) {
    let group_ids: Vec<GroupId> = facts.groups.iter().map(|group| group.id).collect();
    let closed_at = facts.groups.iter().filter_map(|g| g.closed_at).max();
    let alive = facts.events.iter().filter(|event| event.dead_at.is_none());
    if let Some(next) = alive.min_by_key(|event| event.not_before) {
        let (at, failed) = (next.not_before, next.attempts);
        return match closed_at {
            Some(closed_at) => {
                let what = What::Resume {
                    group_ids,
                    at,
                    failed,
                };
                (what, closed_at)
            }
            None => (What::Event { at, failed }, next.created_at),
        };
    }
    let dead = facts
        .events
        .iter()
        .filter_map(|event| Some((event.dead_at?, event.attempts)));
    if let Some((dead_at, failed)) = dead.max() {
        return (What::EventDead { group_ids, failed }, dead_at);
    }
    let what = match facts.status {
        TaskStatus::Pending if facts.is_child => What::NotStarted,
        _ => What::Unexplained,
    };
    (what, closed_at.unwrap_or(facts.created_at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use uuid::Uuid;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_000_000 + seconds, 0).unwrap()
    }

    /// When all of it is asked.
    fn now() -> DateTime<Utc> {
        at(100)
    }

    fn group_id(n: u128) -> GroupId {
        GroupId(Uuid::from_u128(n))
    }

    const WORKER: ProcessId = ProcessId(Uuid::from_u128(7));

    fn task(status: TaskStatus) -> Facts {
        Facts {
            status,
            is_child: false,
            created_at: at(1),
            finished_at: status.is_terminal().then_some(at(90)),
            steps: vec![],
            groups: vec![],
            events: vec![],
        }
    }

    /// A step that is due and was not tried yet.
    fn step(tool: Option<&str>) -> StepFacts {
        StepFacts {
            tool: tool.map(str::to_owned),
            attempt: 0,
            model_attempts: 0,
            lost_leases: 0,
            queued_at: at(10),
            started_at: None,
            run_at: at(10),
            held: None,
            place: Place {
                before: 3,
                ..Place::default()
            },
            budgets: vec![],
        }
    }

    fn running(tool: Option<&str>, lease_expires_at: DateTime<Utc>) -> StepFacts {
        StepFacts {
            attempt: 2,
            lost_leases: 1,
            started_at: Some(at(20)),
            held: Some((WORKER, lease_expires_at)),
            ..step(tool)
        }
    }

    fn group(n: u128, source_type: SourceType, about: Value) -> GroupFacts {
        GroupFacts {
            id: group_id(n),
            source_type,
            total: 3,
            pending: 2,
            about,
            created_at: at(30),
            closed_at: None,
            due_at: Some(at(200)),
        }
    }

    fn closed(n: u128, closed_at: DateTime<Utc>) -> GroupFacts {
        GroupFacts {
            pending: 0,
            closed_at: Some(closed_at),
            due_at: None,
            ..group(n, SourceType::ChildTask, Value::Null)
        }
    }

    fn event(not_before: i64, dead_at: Option<i64>) -> EventFacts {
        EventFacts {
            attempts: 4,
            created_at: at(50),
            not_before: at(not_before),
            dead_at: dead_at.map(at),
        }
    }

    fn held(of: Owner) -> HeldBudget {
        HeldBudget {
            of,
            task_id: None,
            title: None,
            calls: 1,
        }
    }

    /// A name, what is known, and each cause with its `since`.
    type Case = (&'static str, Facts, Vec<(What, i64)>);

    // T-25
    #[test]
    fn causes_table() {
        use SourceType::*;
        use TaskStatus::*;
        let place = step(None).place;
        let with_steps = |steps| Facts {
            steps,
            ..task(Running)
        };
        let with_groups = |groups| Facts {
            groups,
            ..task(WaitingForInput)
        };
        let with_events = |groups, events| Facts {
            groups,
            events,
            ..task(WaitingForInput)
        };
        let queued = |tool: Option<&str>| What::Queued {
            tool: tool.map(str::to_owned),
            place,
        };
        let retry = |failed| What::Retry {
            tool: None,
            at: at(130),
            failed,
        };
        let later = |model_attempts, budgets: &[HeldBudget]| StepFacts {
            attempt: 1,
            model_attempts,
            started_at: Some(at(15)),
            run_at: at(130),
            budgets: budgets.to_vec(),
            ..step(None)
        };
        let resume = |group_ids| What::Resume {
            group_ids,
            at: at(120),
            failed: 4,
        };
        let budgets = vec![held(Owner::Task), held(Owner::Workspace)];
        let cases: Vec<Case> = vec![
            ("it is over", task(Completed), vec![(What::Ended, 90)]),
            (
                "whatever is left",
                Facts {
                    events: vec![event(60, Some(70))],
                    ..task(Stopped)
                },
                vec![(What::Ended, 90)],
            ),
            (
                "a decide step is queued",
                with_steps(vec![step(None)]),
                vec![(queued(None), 10)],
            ),
            (
                "a call is queued again",
                with_steps(vec![StepFacts {
                    run_at: at(40),
                    attempt: 1,
                    ..step(Some("ask_user"))
                }]),
                vec![(queued(Some("ask_user")), 40)],
            ),
            (
                "a model was busy",
                with_steps(vec![later(2, &[])]),
                vec![(retry(2), 15)],
            ),
            (
                "calls under a budget are under way",
                with_steps(vec![later(0, &budgets)]),
                vec![(
                    What::Limit {
                        budgets: budgets.clone(),
                    },
                    15,
                )],
            ),
            (
                "a budget's calls have just ended",
                with_steps(vec![later(0, &[])]),
                vec![(retry(0), 15)],
            ),
            (
                "a model was busy, and there is a budget",
                with_steps(vec![later(1, &budgets)]),
                vec![(retry(1), 15)],
            ),
            (
                "the pause for a budget is over",
                with_steps(vec![StepFacts {
                    run_at: at(99),
                    ..later(0, &budgets)
                }]),
                vec![(queued(None), 99)],
            ),
            (
                "a model is asked",
                with_steps(vec![running(None, at(110))]),
                vec![(
                    What::Model {
                        worker: WORKER,
                        attempt: 2,
                    },
                    20,
                )],
            ),
            (
                "tools run, and what they have made waits does not count yet",
                Facts {
                    steps: vec![running(Some("a"), at(110)), running(Some("b"), at(100))],
                    groups: vec![group(1, ChildTask, Value::Null)],
                    ..task(Running)
                },
                ["a", "b"]
                    .map(|tool| {
                        let what = What::Tool {
                            tool: tool.into(),
                            worker: WORKER,
                            attempt: 2,
                        };
                        (what, 20)
                    })
                    .to_vec(),
            ),
            (
                "its worker is gone",
                with_steps(vec![running(None, at(99))]),
                vec![(
                    What::LeaseLost {
                        tool: None,
                        worker: WORKER,
                        lost_before: 1,
                    },
                    99,
                )],
            ),
            (
                "it waits for each kind of thing, and is not told yet that another is over",
                with_groups(vec![
                    group(1, ChildTask, Value::Null),
                    group(2, UserInput, json!({"question": "Which?"})),
                    group(3, External, json!({"key": "paid"})),
                    group(4, External, json!({"key": null})),
                    group(5, Timer, json!({"seconds": 9})),
                    closed(6, at(80)),
                ]),
                vec![
                    (
                        What::Children {
                            group_id: group_id(1),
                            total: 3,
                            pending: 2,
                            next_check_at: Some(at(200)),
                        },
                        30,
                    ),
                    (
                        What::User {
                            group_id: group_id(2),
                            question: Some("Which?".into()),
                            deadline_at: Some(at(200)),
                        },
                        30,
                    ),
                    (
                        What::Signal {
                            group_id: group_id(3),
                            key: Some("paid".into()),
                            deadline_at: Some(at(200)),
                        },
                        30,
                    ),
                    (
                        What::Signal {
                            group_id: group_id(4),
                            key: None,
                            deadline_at: Some(at(200)),
                        },
                        30,
                    ),
                    (
                        What::Time {
                            group_id: group_id(5),
                            at: Some(at(200)),
                        },
                        30,
                    ),
                ],
            ),
            (
                "all that it waited for is over",
                with_events(
                    vec![closed(1, at(80)), closed(2, at(85))],
                    vec![event(125, None), event(120, None), event(60, Some(70))],
                ),
                vec![(resume(vec![group_id(1), group_id(2)]), 85)],
            ),
            (
                "a message was not looked at",
                Facts {
                    events: vec![event(120, None)],
                    ..task(Pending)
                },
                vec![(
                    What::Event {
                        at: at(120),
                        failed: 4,
                    },
                    50,
                )],
            ),
            // W-19
            (
                "its resume is dead",
                with_events(
                    vec![closed(1, at(80))],
                    vec![event(60, Some(70)), event(60, Some(95))],
                ),
                vec![(
                    What::EventDead {
                        group_ids: vec![group_id(1)],
                        failed: 4,
                    },
                    95,
                )],
            ),
            (
                "a child whose call is not committed",
                Facts {
                    is_child: true,
                    ..task(Pending)
                },
                vec![(What::NotStarted, 1)],
            ),
            (
                "nothing is there that would start it",
                task(Pending),
                vec![(What::Unexplained, 1)],
            ),
            (
                "nothing is there that would wake it",
                with_groups(vec![closed(1, at(80))]),
                vec![(What::Unexplained, 80)],
            ),
        ];
        for (name, facts, expected) in cases {
            let expected: Vec<Cause> = expected
                .into_iter()
                .map(|(what, since)| Cause {
                    what,
                    since: at(since),
                    lasted_ms: (100 - since) * 1000,
                })
                .collect();
            assert_eq!(causes(&facts, now()), expected, "{name}");
        }
    }

    #[test]
    fn a_cause_is_one_flat_object() {
        let facts = Facts {
            steps: vec![step(Some("ask_user"))],
            ..task(TaskStatus::Running)
        };
        let shown = serde_json::to_value(causes(&facts, now())).unwrap();
        let expected = json!([{"kind": "queued", "tool": "ask_user", "before": 3, "more_before": false,
            "others_before": false, "workers": 0, "since": at(10), "lasted_ms": 90_000}]);
        assert_eq!(shown, expected);
    }
}
