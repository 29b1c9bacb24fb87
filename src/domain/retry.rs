//! When a failed model call is tried again: exponential backoff with full jitter, never earlier than the provider asked.
//!
//! Pure: the caller hands in the random number and keeps the attempts. A wait holds no worker slot (the step goes back
//! to the queue with the delay), so minutes are affordable; a hint of hours is not, and ends the call with its reason.

use std::time::Duration;

/// The limits of `llm.max_attempts`, `llm.retry_base_ms` and `llm.retry_max_seconds`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Attempts in all, the first one included.
    pub attempts_max: u32,
    /// Longest wait after the first failure; it doubles with each further one.
    pub base: Duration,
    /// Longest wait of our own choice. Hints of the provider may go up to ten times as far.
    pub max: Duration,
}

impl Limits {
    /// The longest hint that is waited for.
    pub fn hint_max(&self) -> Duration {
        self.max.saturating_mul(10)
    }
}

/// Why there is no further attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GiveUp {
    #[error("given up after {attempts} attempts")]
    AttemptsUsed { attempts: u32 },
    #[error(
        "the provider asked for {} s before the next attempt, more than the {} s that are waited for",
        hint.as_secs(),
        hint_max.as_secs()
    )]
    HintTooLong { hint: Duration, hint_max: Duration },
}

/// The wait after failed attempt number `attempt` (1 = the first). `random` is in 0..1. A `hint` is a minimum: the
/// jitter comes on top, so that tasks which were refused together do not return together (T-14, H-26).
pub fn next_delay(
    attempt: u32,
    hint: Option<Duration>,
    limits: &Limits,
    random: f64,
) -> Result<Duration, GiveUp> {
    if attempt >= limits.attempts_max {
        return Err(GiveUp::AttemptsUsed { attempts: attempt });
    }
    let hint_max = limits.hint_max();
    let hint = hint.unwrap_or(Duration::ZERO);
    if hint > hint_max {
        return Err(GiveUp::HintTooLong { hint, hint_max });
    }
    let doubled = 2u32.saturating_pow(attempt.saturating_sub(1));
    let spread = limits
        .base
        .saturating_mul(doubled)
        .min(limits.max)
        .max(hint / 10);
    let random = if random.is_finite() {
        random.clamp(0.0, 1.0)
    } else {
        0.5
    };
    Ok(hint + spread.mul_f64(random))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits {
        attempts_max: 5,
        base: Duration::from_millis(500),
        max: Duration::from_secs(3),
    };

    fn ms(millis: u64) -> Option<Duration> {
        Some(Duration::from_millis(millis))
    }

    #[test]
    fn the_wait_doubles_is_capped_and_ends() {
        // T-14
        for (attempt, random, expected) in [
            (1, 0.0, 0),
            (1, 1.0, 500),
            (1, 0.5, 250),
            (2, 1.0, 1000),
            (3, 1.0, 2000),
            (4, 1.0, 3000),
            (0, 1.0, 500),
        ] {
            assert_eq!(
                next_delay(attempt, None, &LIMITS, random).ok(),
                ms(expected),
                "{attempt}"
            );
        }
        assert_eq!(
            next_delay(5, None, &LIMITS, 0.0),
            Err(GiveUp::AttemptsUsed { attempts: 5 })
        );
        let many = Limits {
            attempts_max: u32::MAX,
            ..LIMITS
        };
        assert_eq!(next_delay(4_000_000, None, &many, 1.0).ok(), ms(3000));
        assert_eq!(next_delay(1, None, &LIMITS, f64::NAN).ok(), ms(250));
    }

    #[test]
    fn a_hint_is_the_least_wait_and_an_absurd_one_is_refused() {
        // H-26
        for (hint, random, expected) in [
            (7000, 0.0, 7000),
            (7000, 1.0, 7700),
            (100, 1.0, 600),
            (30_000, 0.0, 30_000),
            (0, 1.0, 500),
        ] {
            assert_eq!(
                next_delay(1, ms(hint), &LIMITS, random).ok(),
                ms(expected),
                "{hint}"
            );
        }
        let refused = next_delay(1, Some(Duration::from_secs(86_400)), &LIMITS, 0.0).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the provider asked for 86400 s before the next attempt, more than the 30 s that are waited for"
        );
        assert!(next_delay(1, Some(Duration::MAX), &LIMITS, 1.0).is_err());
    }

    proptest! {
        #[test]
        fn never_before_the_hint_and_never_without_bound(attempt: u32, hint: Option<Duration>, random in 0.0..1.0f64) {
            if let Ok(delay) = next_delay(attempt, hint, &LIMITS, random) {
                prop_assert!(delay >= hint.unwrap_or_default());
                prop_assert!(delay <= LIMITS.hint_max() + LIMITS.max);
            }
        }
    }
}
