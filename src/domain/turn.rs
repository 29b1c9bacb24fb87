//! Which calls of a turn run at the same time, and in which order their results are committed.
//!
//! Calls are numbered from 0 in the order in which the model made them, and start in that order, so those that have
//! started come first. They may end in any order; the cursor stands before the first that has not, and everything before
//! it is in the transcript. What is not asked here: which worker runs a call, and where its result is kept until then.

use std::ops::Range;

/// Whether a call may overlap with others of its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Concurrency {
    Parallel,
    /// It runs alone: after all before it, before all after it.
    Exclusive,
}

/// A call that has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Started {
    /// Queued or running.
    Active,
    /// It has a result, which may be an error.
    Settled,
    /// Something within the service has failed: it has no result, and none is made up.
    Failed,
}

/// The calls of one turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    started: Vec<Started>,
    len: usize,
}

impl Turn {
    /// Of `len` calls, the first of which have started.
    pub fn new(started: Vec<Started>, len: usize) -> Self {
        let len = len.max(started.len());
        Self { started, len }
    }

    /// Tells how many calls it has, where only the started ones were known.
    pub fn has(&mut self, len: usize) {
        self.len = len.max(self.started.len());
    }

    /// An active call has ended so. Returns the places up to which the cursor moves on: those of them that have settled
    /// are committed now, in this order. Empty: an elder call has not ended, and the result is held back.
    pub fn end(&mut self, place: usize, how: Started) -> Range<usize> {
        let before = self.cursor();
        if let Some(call) = self.started.get_mut(place) {
            *call = how;
        }
        before..self.cursor()
    }

    /// Starts what may run now, with at most `parallel_max` calls active. `concurrency` is asked only of calls that
    /// have not started, each time anew, so what has changed since counts for them.
    pub fn start(
        &mut self,
        parallel_max: usize,
        concurrency: impl Fn(usize) -> Concurrency,
    ) -> Range<usize> {
        let first = self.started.len();
        // One that runs alone is here only when it has ended: until then nothing of its turn ends, so nobody asks.
        let mut alone = false;
        while !self.is_at_end() {
            let (next, active) = (self.started.len(), self.active());
            if active > 0 && (alone || active >= parallel_max) {
                break;
            }
            let exclusive = concurrency(next) == Concurrency::Exclusive;
            if active > 0 && exclusive {
                break;
            }
            alone = exclusive;
            self.started.push(Started::Active);
        }
        first..self.started.len()
    }

    /// Whether nothing of it runs, nor ever will.
    pub fn is_over(&self) -> bool {
        self.active() == 0 && self.is_at_end()
    }

    /// Whether nothing more will start: all have, or one has failed.
    pub fn is_at_end(&self) -> bool {
        self.started.len() == self.len || self.started.contains(&Started::Failed)
    }

    /// The results that are held back: what is committed when the turn is broken off.
    pub fn held(&self) -> impl Iterator<Item = usize> {
        let after = self.started.iter().enumerate().skip(self.cursor());
        after.filter_map(|(place, call)| (*call == Started::Settled).then_some(place))
    }

    pub fn is_settled(&self, place: usize) -> bool {
        self.started.get(place) == Some(&Started::Settled)
    }

    fn cursor(&self) -> usize {
        let ended = |call: &&Started| **call != Started::Active;
        self.started.iter().take_while(ended).count()
    }

    fn active(&self) -> usize {
        let active = |call: &&Started| **call == Started::Active;
        self.started.iter().filter(active).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Concurrency::{Exclusive, Parallel};
    use Started::{Active, Failed, Settled};
    use proptest::prelude::*;
    use std::cell::RefCell;

    /// `p` and `e` in model order.
    fn classes(text: &str) -> Vec<Concurrency> {
        let class = |c| if c == 'p' { Parallel } else { Exclusive };
        text.chars().map(class).collect()
    }

    /// `.` active, `s` settled, `f` failed.
    fn turn(started: &str, len: usize) -> Turn {
        let state = |c| match c {
            '.' => Active,
            's' => Settled,
            _ => Failed,
        };
        Turn::new(started.chars().map(state).collect(), len)
    }

    //
    #[test]
    fn what_starts_next() {
        // calls, what has started, at most so many at once, what starts
        for (calls, started, parallel_max, starts) in [
            ("", "", 10, 0..0),
            ("p", "", 10, 0..1),
            ("e", "", 10, 0..1),
            // a group, up to the barrier
            ("ppep", "", 10, 0..2),
            // an exclusive call is a group of its own
            ("eppp", "", 10, 0..1),
            ("eepp", "s", 10, 1..2),
            ("eepp", "ss", 10, 2..4),
            // it starts after all before it
            ("ppe", ".s", 10, 2..2),
            ("ppe", "s.", 10, 2..2),
            ("ppe", "ss", 10, 2..3),
            // a rolling pool
            ("ppppp", "", 3, 0..3),
            ("ppppp", "...", 3, 3..3),
            ("ppppp", ".s.", 3, 3..4),
            ("ppppp", "sss", 3, 3..5),
            // serial
            ("ppp", "", 1, 0..1),
            ("ppp", ".", 1, 1..1),
            ("ppp", "s", 1, 1..2),
            // something has failed within
            ("ppppp", ".f", 3, 2..2),
            ("ppppp", "ff", 3, 2..2),
        ] {
            let classes = classes(calls);
            let mut turn = turn(started, classes.len());
            let started_now = turn.start(parallel_max, |place| classes[place]);
            assert_eq!(
                started_now, starts,
                "{calls} {started:?}, {parallel_max} at once"
            );
        }
    }

    //
    #[test]
    fn results_are_committed_behind_a_cursor() {
        // what has started of four, what ends how; what the cursor passes, what is held back then, whether all is over
        for (started, ends, how, passes, held, over) in [
            ("....", 0, Settled, 0..1, vec![], false),
            ("....", 2, Settled, 0..0, vec![2], false),
            (".ss.", 0, Settled, 0..3, vec![], false),
            (".sss", 0, Settled, 0..4, vec![], true),
            ("s.s.", 3, Settled, 1..1, vec![2, 3], false),
            ("sss.", 3, Settled, 3..4, vec![], true),
            // more are to come
            ("ss.", 2, Settled, 2..3, vec![], false),
            // a failure is passed, but nothing follows it
            (".s..", 0, Failed, 0..2, vec![], false),
            (".fss", 0, Settled, 0..4, vec![], true),
            ("f.", 1, Settled, 1..2, vec![], true),
            (".", 0, Failed, 0..1, vec![], true),
        ] {
            let mut turn = turn(started, 4);
            assert_eq!(turn.end(ends, how), passes, "{started} {ends}");
            assert_eq!(
                turn.held().collect::<Vec<_>>(),
                held,
                "held, {started} {ends}"
            );
            assert_eq!(turn.is_over(), over, "over, {started} {ends}");
        }
    }

    proptest! {
        /// Any calls, any order in which they end, classes that change until a call has started, and failures.
        #[test]
        fn however_calls_end(
            answers in prop::collection::vec(prop::collection::vec(prop::bool::weighted(0.7), 1..6), 0..12),
            parallel_max in 1..5usize,
            picks in prop::collection::vec((any::<prop::sample::Index>(), prop::bool::weighted(0.03)), 12),
        ) {
            let len = answers.len();
            // How often each call has been asked about, and what it said last: that counts when it starts.
            let asked: RefCell<Vec<(usize, Concurrency)>> = RefCell::new(vec![(0, Exclusive); len]);
            let mut turn = Turn::new(vec![], len);
            let (mut active, mut committed, mut settled) = (vec![], vec![], vec![]);
            let (mut started, mut failed) = (0, false);
            let mut picks = picks.into_iter();
            loop {
                let starts = turn.start(parallel_max, |place| {
                    // nobody asks about a call that has started, nor far ahead
                    assert!(place >= started, "{place} has started");
                    let (times, answer) = &mut asked.borrow_mut()[place];
                    let class = answers[place][*times % answers[place].len()];
                    *times += 1;
                    *answer = if class { Parallel } else { Exclusive };
                    *answer
                });
                prop_assert_eq!(starts.start, started, "calls start in order");
                prop_assert!(!failed || starts.is_empty(), "nothing starts after a failure");
                for place in starts {
                    if asked.borrow()[place].1 == Exclusive {
                        // all before it have been committed
                        prop_assert!(active.is_empty(), "{} is exclusive", place);
                    }
                    active.push(place);
                    started += 1;
                }
                let exclusive = active.iter().filter(|p| asked.borrow()[**p].1 == Exclusive).count();
                prop_assert!(exclusive == 0 || active.len() == 1, "{:?} overlap", active);
                prop_assert!(active.len() <= parallel_max);
                prop_assert_eq!(turn.is_over(), active.is_empty());
                let Some((pick, fails)) = picks.next().filter(|_| !active.is_empty()) else {
                    break;
                };
                let place = active.remove(pick.index(active.len()));
                failed |= fails;
                if !fails {
                    settled.push(place);
                }
                let passed = turn.end(place, if fails { Failed } else { Settled });
                committed.extend(passed.filter(|place| turn.is_settled(*place)));
            }
            prop_assert!(active.is_empty());
            settled.sort_unstable();
            // each result once, in the order of the calls; none is invented and none is lost
            prop_assert_eq!(&committed, &settled);
            prop_assert!(failed || committed.len() == len);
            prop_assert_eq!(turn.held().count(), 0);
        }
    }
}
