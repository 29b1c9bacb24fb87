//! The waiting protocol, explored exhaustively (W-9): every interleaving of its transactions, with crashes, lost leases,
//! timeouts, skips, stops and user messages in between.
//!
//! The model keeps what the tables keep and makes one atomic action of what the service does in one transaction. Where a
//! transaction waits for a lock and decides on what it read, it is two actions, so that two of them can overlap. All
//! decisions are the service's own functions: `next_move`, `settle_group`, `pair`. Three variants leave out one
//! precaution each; the explorer must find the parent that waits for ever, or wakes twice.

use reconvene::domain::{
    ids::{GroupId, WorkspaceId},
    signal::pair,
    task::{GroupState, Move, Situation, TaskStatus, next_move},
    task_await::{AwaitStatus, GroupStatus, SourceType, Strategy, Tally, settle_group},
};
use stateright::{Checker, Model, Property};
use uuid::Uuid;

/// Which precaution is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    AsBuilt,
    /// The children's start events are committed before their awaits.
    AwaitsAfterStart,
    /// A matcher judges a group without holding its lock.
    CountWithoutLock,
    /// A resume neither locks the parent nor minds that the group was told already.
    ResumeWithoutGuard,
}

struct Protocol {
    variant: Variant,
    /// The number of children of each parent.
    families: Vec<usize>,
    strategy: Strategy,
    matchers: usize,
    orchestrators: usize,
    /// So many faults may happen on one path: crash, lost lease, timeout, skip, stop, user message.
    faults: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    parents: Vec<Parent>,
    children: Vec<Child>,
    matchers: Vec<Option<Round>>,
    orchestrators: Vec<Option<Look>>,
    faults_left: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    None,
    DecideQueued,
    DecideRunning,
    CallQueued,
    CallRunning,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Parent {
    status: TaskStatus,
    turn: u8,
    step: Step,
    has_news: bool,
    events: u8,
    made: bool,
    group: Option<Group>,
    /// Resume messages that were posted.
    posts: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Group {
    status: GroupStatus,
    told: bool,
    locked_by: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Signal {
    None,
    Pending,
    Matched,
    NoMatch,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Child {
    parent: usize,
    made: bool,
    status: TaskStatus,
    events: u8,
    starts: u8,
    signal: Signal,
    wait: Option<AwaitStatus>,
}

/// What a matcher has read and not yet written: the signal, and the group as it will be if that await is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Round {
    child: usize,
    settles: bool,
    closes: Option<GroupStatus>,
}

/// What an orchestrator has decided about a parent and not yet written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Look {
    parent: usize,
    next: Next,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Next {
    Rest,
    Park { tell: bool },
    Decide { tell: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Look(usize, usize),
    WriteLook(usize),
    CrashLook(usize),
    Claim(usize),
    Decide(usize),
    Delegate(usize),
    CommitCall(usize),
    LoseLease(usize),
    StartChild(usize),
    EndChild(usize, bool),
    Match(usize, usize),
    WriteMatch(usize),
    CrashMatch(usize),
    TimeOut(usize),
    Skip(usize),
    Stop(usize, bool),
    Message(usize),
}

impl State {
    fn family(&self, parent: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.children.len()).filter(move |c| self.children[*c].parent == parent)
    }

    fn tally(&self, parent: usize) -> Tally {
        let waits: Vec<AwaitStatus> = self
            .family(parent)
            .filter_map(|c| self.children[c].wait)
            .collect();
        let count = |s: AwaitStatus| waits.iter().filter(|w| **w == s).count() as i32;
        Tally {
            total: waits.len() as i32,
            pending: count(AwaitStatus::Pending),
            completed: count(AwaitStatus::Completed),
        }
    }

    /// No transaction of an orchestrator holds the parent's lock.
    fn is_free(&self, parent: usize) -> bool {
        self.orchestrators
            .iter()
            .flatten()
            .all(|l| l.parent != parent)
    }

    fn is_group_free(&self, parent: usize) -> bool {
        self.parents[parent]
            .group
            .is_none_or(|g| g.locked_by.is_none())
    }

    /// Settles pending awaits of a parent in one transaction that holds the group's lock.
    fn settle(
        &mut self,
        strategy: Strategy,
        parent: usize,
        news: &[(usize, AwaitStatus)],
        cancelling: bool,
    ) {
        let before = self.tally(parent);
        let mut settled = Vec::new();
        for (child, to) in news {
            if self.children[*child].wait == Some(AwaitStatus::Pending) {
                self.children[*child].wait = Some(*to);
                settled.push(*to);
            }
        }
        let open = self.parents[parent]
            .group
            .is_some_and(|g| g.status == GroupStatus::Open);
        if !open || settled.is_empty() {
            return;
        }
        let (_, status) = settle_group(strategy, before, &settled, cancelling);
        self.close(parent, status);
    }

    fn close(&mut self, parent: usize, status: GroupStatus) {
        let family: Vec<usize> = self.family(parent).collect();
        let Some(group) = &mut self.parents[parent].group else {
            return;
        };
        if status == GroupStatus::Open || group.status != GroupStatus::Open {
            return;
        }
        group.status = status;
        if status == GroupStatus::Cancelled {
            group.told = true;
        } else {
            self.parents[parent].events += 1;
        }
        for child in family {
            if self.children[child].wait == Some(AwaitStatus::Pending) {
                self.children[child].wait = Some(AwaitStatus::Cancelled);
            }
        }
    }

    /// Work that somebody will still do by itself, without any fault, timer or user.
    fn is_at_rest(&self) -> bool {
        self.parents
            .iter()
            .all(|p| p.events == 0 && p.step == Step::None)
            && self.children.iter().all(|c| {
                c.signal != Signal::Pending && c.events == 0 && (!c.made || c.status.is_terminal())
            })
            && self.matchers.iter().all(Option::is_none)
            && self.orchestrators.iter().all(Option::is_none)
    }
}

impl Protocol {
    fn group_key(parent: usize) -> GroupId {
        GroupId(Uuid::from_u128(parent as u128 + 1))
    }

    /// What the service's own rule says about a parent as it is now.
    fn judge(&self, state: &State, parent: usize) -> Next {
        let p = &state.parents[parent];
        let blind = self.variant == Variant::ResumeWithoutGuard;
        let groups = p.group.filter(|g| blind || !g.told).map(|g| GroupState {
            id: Self::group_key(parent),
            open: g.status == GroupStatus::Open,
        });
        let situation = Situation {
            status: p.status,
            has_active_step: p.step != Step::None,
            groups: groups.into_iter().collect(),
            has_news: p.has_news,
            decides_left: 9,
        };
        match next_move(&situation) {
            Move::Rest | Move::OutOfDecides => Next::Rest,
            Move::Park { resumed } => Next::Park {
                tell: !resumed.is_empty(),
            },
            Move::Decide { resumed } => Next::Decide {
                tell: !resumed.is_empty(),
            },
        }
    }

    fn write_look(&self, state: &mut State, look: Look) {
        let p = &mut state.parents[look.parent];
        p.events -= 1;
        let tell = match look.next {
            Next::Rest => return,
            Next::Park { tell } => {
                p.status = TaskStatus::WaitingForInput;
                tell
            }
            Next::Decide { tell } => {
                // The database refuses a second active decide step (T-10).
                if p.step == Step::None {
                    p.step = Step::DecideQueued;
                    p.turn += 1;
                }
                p.status = TaskStatus::Running;
                tell
            }
        };
        if tell {
            p.posts += 1;
            p.has_news = true;
            if let Some(group) = &mut p.group {
                group.told = true;
            }
        }
    }

    fn make_awaits(&self, state: &mut State, parent: usize) {
        for child in state.family(parent).collect::<Vec<_>>() {
            state.children[child].wait = Some(AwaitStatus::Pending);
        }
        state.parents[parent].group = Some(Group {
            status: GroupStatus::Open,
            told: false,
            locked_by: None,
        });
    }

    fn start_children(&self, state: &mut State, parent: usize) {
        for child in state.family(parent).collect::<Vec<_>>() {
            state.children[child].events += 1;
        }
    }

    fn end_task(state: &mut State, child: usize, status: TaskStatus) {
        let c = &mut state.children[child];
        c.status = status;
        // Unique: the first end of a child is the one that counts (W-2).
        if c.signal == Signal::None {
            c.signal = Signal::Pending;
        }
    }

    fn read_match(&self, state: &State, child: usize) -> Round {
        let workspace = WorkspaceId(Uuid::nil());
        let keys: Vec<String> = (0..state.children.len()).map(|c| c.to_string()).collect();
        let thing = |c: usize| (workspace, SourceType::ChildTask, keys[c].as_str());
        let waiting: Vec<usize> = (0..state.children.len())
            .filter(|c| state.children[*c].wait == Some(AwaitStatus::Pending))
            .collect();
        let found = pair(&[thing(child)], waiting.iter().map(|c| thing(*c)));
        if found != [waiting.iter().position(|c| *c == child)] || found == [None] {
            return Round {
                child,
                settles: false,
                closes: None,
            };
        }
        let parent = state.children[child].parent;
        let (_, status) = settle_group(
            self.strategy,
            state.tally(parent),
            &[AwaitStatus::Completed],
            false,
        );
        let closes = (status != GroupStatus::Open).then_some(status);
        Round {
            child,
            settles: true,
            closes,
        }
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let parent = Parent {
            status: TaskStatus::Pending,
            turn: 0,
            step: Step::None,
            has_news: true,
            events: 1,
            made: false,
            group: None,
            posts: 0,
        };
        let child = |parent| Child {
            parent,
            made: false,
            status: TaskStatus::Pending,
            events: 0,
            starts: 0,
            signal: Signal::None,
            wait: None,
        };
        let children = self.families.iter().enumerate();
        vec![State {
            parents: vec![parent; self.families.len()],
            children: children.flat_map(|(p, n)| vec![child(p); *n]).collect(),
            matchers: vec![None; self.matchers],
            orchestrators: vec![None; self.orchestrators],
            faults_left: self.faults,
        }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        let blind = self.variant == Variant::ResumeWithoutGuard;
        for (o, look) in s.orchestrators.iter().enumerate() {
            match look {
                Some(_) => {
                    actions.push(Action::WriteLook(o));
                    if s.faults_left > 0 {
                        actions.push(Action::CrashLook(o));
                    }
                }
                // Idle orchestrators are alike: only the first one takes the next event.
                None if s.orchestrators.iter().position(Option::is_none) == Some(o) => {
                    for (p, parent) in s.parents.iter().enumerate() {
                        let taken = s
                            .orchestrators
                            .iter()
                            .flatten()
                            .filter(|l| l.parent == p)
                            .count();
                        if usize::from(parent.events) > taken && (blind || s.is_free(p)) {
                            actions.push(Action::Look(o, p));
                        }
                    }
                }
                None => {}
            }
        }
        for (m, round) in s.matchers.iter().enumerate() {
            match round {
                Some(_) => {
                    actions.push(Action::WriteMatch(m));
                    if s.faults_left > 0 {
                        actions.push(Action::CrashMatch(m));
                    }
                }
                None if s.matchers.iter().position(Option::is_none) == Some(m) => {
                    for (c, child) in s.children.iter().enumerate() {
                        let held = s.matchers.iter().flatten().any(|r| r.child == c);
                        let free = self.variant == Variant::CountWithoutLock
                            || s.is_group_free(child.parent);
                        if child.signal == Signal::Pending && !held && free {
                            actions.push(Action::Match(m, c));
                        }
                    }
                }
                None => {}
            }
        }
        for (p, parent) in s.parents.iter().enumerate() {
            if !blind && !s.is_free(p) {
                continue;
            }
            match parent.step {
                Step::None => {}
                Step::DecideQueued | Step::CallQueued => actions.push(Action::Claim(p)),
                Step::DecideRunning => actions.push(Action::Decide(p)),
                Step::CallRunning if !parent.made => actions.push(Action::Delegate(p)),
                Step::CallRunning => actions.push(Action::CommitCall(p)),
            }
            if s.faults_left == 0 {
                continue;
            }
            if matches!(parent.step, Step::DecideRunning | Step::CallRunning) {
                actions.push(Action::LoseLease(p));
            }
            if !parent.status.is_terminal() && parent.turn > 0 {
                actions.push(Action::Message(p));
                if s.is_group_free(p) {
                    actions.push(Action::Stop(p, false));
                    actions.push(Action::Stop(p, true));
                    if parent.group.is_some_and(|g| g.status == GroupStatus::Open) {
                        actions.push(Action::Skip(p));
                    }
                }
            }
        }
        for (c, child) in s.children.iter().enumerate() {
            if child.events > 0 {
                actions.push(Action::StartChild(c));
            }
            if child.status == TaskStatus::Running {
                actions.push(Action::EndChild(c, true));
                actions.push(Action::EndChild(c, false));
            }
            if s.faults_left > 0
                && child.wait == Some(AwaitStatus::Pending)
                && s.is_group_free(child.parent)
            {
                actions.push(Action::TimeOut(c));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut s = last.clone();
        let fault = matches!(
            action,
            Action::CrashLook(_)
                | Action::CrashMatch(_)
                | Action::LoseLease(_)
                | Action::TimeOut(_)
                | Action::Skip(_)
                | Action::Stop(..)
                | Action::Message(_)
        );
        s.faults_left -= u8::from(fault);
        match action {
            Action::Look(o, p) => {
                s.orchestrators[o] = Some(Look {
                    parent: p,
                    next: self.judge(&s, p),
                });
            }
            Action::WriteLook(o) => {
                let look = s.orchestrators[o].take()?;
                self.write_look(&mut s, look);
            }
            Action::CrashLook(o) => s.orchestrators[o] = None,
            Action::Claim(p) => {
                s.parents[p].step = match s.parents[p].step {
                    Step::DecideQueued => Step::DecideRunning,
                    _ => Step::CallRunning,
                };
            }
            Action::LoseLease(p) => {
                s.parents[p].step = match s.parents[p].step {
                    Step::DecideRunning => Step::DecideQueued,
                    _ => Step::CallQueued,
                };
            }
            Action::Decide(p) => {
                let parent = &mut s.parents[p];
                parent.has_news = false;
                if !parent.made {
                    parent.step = Step::CallRunning;
                } else {
                    parent.step = Step::None;
                    parent.status = TaskStatus::Completed;
                }
            }
            Action::Delegate(p) => {
                s.parents[p].made = true;
                for child in s.family(p).collect::<Vec<_>>() {
                    s.children[child].made = true;
                }
                match self.variant {
                    Variant::AwaitsAfterStart => self.start_children(&mut s, p),
                    _ => self.make_awaits(&mut s, p),
                }
            }
            Action::CommitCall(p) => {
                match self.variant {
                    Variant::AwaitsAfterStart => self.make_awaits(&mut s, p),
                    _ => self.start_children(&mut s, p),
                }
                let parent = &mut s.parents[p];
                parent.step = Step::None;
                parent.has_news = true;
                parent.events += 1;
            }
            Action::StartChild(c) => {
                let child = &mut s.children[c];
                child.events -= 1;
                let situation = Situation {
                    status: child.status,
                    has_active_step: child.status == TaskStatus::Running,
                    groups: vec![],
                    has_news: true,
                    decides_left: 9,
                };
                if let Move::Decide { .. } = next_move(&situation) {
                    child.status = TaskStatus::Running;
                    child.starts += 1;
                }
            }
            Action::EndChild(c, well) => {
                let status = if well {
                    TaskStatus::Completed
                } else {
                    TaskStatus::Failed
                };
                Self::end_task(&mut s, c, status);
            }
            Action::Match(m, c) => {
                let round = self.read_match(&s, c);
                if round.settles
                    && let Some(group) = &mut s.parents[s.children[c].parent].group
                {
                    group.locked_by = Some(m as u8);
                }
                s.matchers[m] = Some(round);
            }
            Action::WriteMatch(m) => {
                let round = s.matchers[m].take()?;
                let parent = s.children[round.child].parent;
                s.children[round.child].signal = if round.settles {
                    Signal::Matched
                } else {
                    Signal::NoMatch
                };
                if round.settles {
                    if s.children[round.child].wait == Some(AwaitStatus::Pending) {
                        s.children[round.child].wait = Some(AwaitStatus::Completed);
                    }
                    if let Some(group) = &mut s.parents[parent].group {
                        group.locked_by = None;
                    }
                    if let Some(status) = round.closes {
                        s.close(parent, status);
                    }
                }
            }
            Action::CrashMatch(m) => {
                let round = s.matchers[m].take()?;
                if let Some(group) = &mut s.parents[s.children[round.child].parent].group
                    && group.locked_by == Some(m as u8)
                {
                    group.locked_by = None;
                }
            }
            Action::TimeOut(c) => {
                if !s.children[c].status.is_terminal() {
                    return None;
                }
                let parent = s.children[c].parent;
                s.settle(self.strategy, parent, &[(c, AwaitStatus::Completed)], false);
            }
            Action::Skip(p) => {
                let all: Vec<_> = s.family(p).map(|c| (c, AwaitStatus::Skipped)).collect();
                s.settle(self.strategy, p, &all, false);
            }
            Action::Stop(p, subtasks) => {
                let all: Vec<_> = s.family(p).map(|c| (c, AwaitStatus::Cancelled)).collect();
                s.settle(self.strategy, p, &all, true);
                let unstarted =
                    s.parents[p].step == Step::CallRunning || s.parents[p].step == Step::CallQueued;
                for (c, _) in all {
                    let child = &s.children[c];
                    let ends = child.made && !child.status.is_terminal();
                    if ends && (subtasks || (unstarted && child.events == 0 && child.starts == 0)) {
                        Self::end_task(&mut s, c, TaskStatus::Stopped);
                    }
                }
                let parent = &mut s.parents[p];
                parent.step = Step::None;
                parent.status = TaskStatus::Stopped;
            }
            Action::Message(p) => {
                s.parents[p].has_news = true;
                s.parents[p].events += 1;
            }
        }
        Some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("a parent resumes at most once per group", |_, s: &State| {
                s.parents.iter().all(|p| p.posts <= 1)
            }),
            Property::always("no child is started twice", |_, s: &State| {
                s.children.iter().all(|c| c.starts <= 1)
            }),
            Property::always(
                "a parent whose children have all ended resumes",
                |_, s: &State| {
                    !s.is_at_rest()
                        || (0..s.parents.len()).all(|p| {
                            s.parents[p].status.is_terminal()
                                || s.family(p).any(|c| !s.children[c].status.is_terminal())
                        })
                },
            ),
            Property::always(
                "no result is told before it exists",
                |m: &Protocol, s: &State| {
                    let told =
                        |p: usize| s.parents[p].posts > 0 && m.strategy == Strategy::AllRequired;
                    (0..s.parents.len()).filter(|p| told(*p)).all(|p| {
                        s.family(p).all(|c| {
                            let child = &s.children[c];
                            child.status.is_terminal() || child.wait == Some(AwaitStatus::Skipped)
                        })
                    })
                },
            ),
            Property::always("no child is left that nobody will start", |_, s: &State| {
                !s.is_at_rest() || s.children.iter().all(|c| !c.made || c.status.is_terminal())
            }),
            Property::sometimes("a parent resumes and ends", |_, s: &State| {
                s.parents
                    .iter()
                    .all(|p| p.status == TaskStatus::Completed && p.posts == 1)
            }),
        ]
    }
}

fn protocol(variant: Variant, families: &[usize], faults: u8) -> Protocol {
    Protocol {
        variant,
        families: families.to_vec(),
        strategy: Strategy::AllRequired,
        matchers: 2,
        orchestrators: 2,
        faults,
    }
}

/// The bounds of `make model-check`; otherwise those that fit into the test run.
fn is_deep() -> bool {
    std::env::var_os("RECONVENE_MODEL_DEEP").is_some()
}

fn explore(name: &str, protocol: Protocol) {
    let checker = protocol.checker().threads(2).spawn_dfs().join();
    println!(
        "{name}: {} states, {} unique",
        checker.state_count(),
        checker.unique_state_count()
    );
    checker.assert_properties();
}

// W-9, W-3, W-4
#[test]
fn two_parents_with_three_children_and_two_matchers() {
    explore(
        "2 parents, 2 + 1 children",
        protocol(Variant::AsBuilt, &[2, 1], if is_deep() { 2 } else { 1 }),
    );
}

// W-9: more faults on one path
#[test]
fn one_parent_with_two_children_under_many_faults() {
    explore(
        "1 parent, 2 children",
        protocol(Variant::AsBuilt, &[2], if is_deep() { 5 } else { 3 }),
    );
}

// W-9, W-6
#[test]
fn any_and_quorum_groups() {
    for strategy in [Strategy::Any, Strategy::Quorum(2)] {
        let children = if is_deep() { 4 } else { 3 };
        let protocol = Protocol {
            strategy,
            ..protocol(Variant::AsBuilt, &[children], 1)
        };
        explore(
            &format!("1 parent, {children} children, {strategy:?}"),
            protocol,
        );
    }
}

fn counterexample(variant: Variant, property: &'static str) {
    let checker = protocol(variant, &[2], 1)
        .checker()
        .threads(2)
        .spawn_bfs()
        .join();
    let path = checker.discovery(property);
    assert!(
        path.is_some(),
        "{variant:?}: no counterexample for: {property}"
    );
}

// W-9, H-02: the explorer sees what goes wrong without each precaution
#[test]
fn awaits_after_start_events_lose_a_wake_up() {
    counterexample(
        Variant::AwaitsAfterStart,
        "a parent whose children have all ended resumes",
    );
}

// W-9, H-01
#[test]
fn counting_without_the_lock_loses_a_wake_up() {
    counterexample(
        Variant::CountWithoutLock,
        "a parent whose children have all ended resumes",
    );
}

// W-9, H-03
#[test]
fn resuming_without_the_guard_wakes_twice() {
    counterexample(
        Variant::ResumeWithoutGuard,
        "a parent resumes at most once per group",
    );
}
