//! What a task tree or a workspace may take, and whether one more model call fits (T-18).
//!
//! Nobody knows what a call takes before it has ended. So each call under way holds a reservation, which is an estimate;
//! one that would go beyond the limit with the others waits for them. A call that is alone is made as long as anything is
//! left. So a limit is passed by one call at most, and by what calls take beyond their estimates.

use super::fields::{Fields, InvalidDefinition, read_object};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;

/// At least one is there; each is 1 or more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"tokens": 200_000, "children": 20}))]
pub struct Limits {
    /// Input and output tokens.
    pub tokens: Option<i64>,
    /// Millionths of the currency of the prices. Models without a price can not be asked under it.
    pub cost_micros: Option<i64>,
    /// Tasks made by delegation, however long they live.
    pub children: Option<i64>,
}

/// Tokens and cost of calls: made, or under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    pub number: i64,
    pub tokens: i64,
    pub cost_micros: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Fits,
    /// Calls under way may leave enough: ask again when they have ended.
    Wait,
    /// Completes the sentence "The budget of … is used up: …".
    Exhausted(String),
    /// There is a limit to the cost, and nobody knows what this model costs.
    Unpriced,
}

impl Limits {
    pub fn parse(body: &Value) -> Result<Self, InvalidDefinition> {
        let limits = read_object(body, Self::read_fields)?;
        match limits.is_empty() {
            false => Ok(limits),
            true => Err(InvalidDefinition(vec![super::fields::FieldError {
                path: String::new(),
                message: NOTHING.to_owned(),
            }])),
        }
    }

    pub(in crate::domain) fn read_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            tokens: fields.count("tokens"),
            cost_micros: fields.count("cost_micros"),
            children: fields.count("children"),
        }
    }

    /// Of an agent's settings. Another release may have kept something else under this name.
    pub fn of_config(value: &Value) -> Option<Self> {
        Self::parse(value).ok()
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Both at once.
    pub fn and(self, other: Self) -> Self {
        let least = |a: Option<i64>, b: Option<i64>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Self {
            tokens: least(self.tokens, other.tokens),
            cost_micros: least(self.cost_micros, other.cost_micros),
            children: least(self.children, other.children),
        }
    }

    /// Whether a call may be made. `cost` is its estimate; `None` without a price.
    pub fn judge(&self, made: Calls, under_way: Calls, tokens: i64, cost: Option<i64>) -> Verdict {
        for (limit, taken, what) in [
            (self.tokens, made.tokens, "tokens"),
            (self.cost_micros, made.cost_micros, "millionths of cost"),
        ] {
            if let Some(limit) = limit.filter(|limit| taken >= *limit) {
                return Verdict::Exhausted(format!("{taken} of {limit} {what}"));
            }
        }
        let cost = match (self.cost_micros, cost) {
            (Some(_), None) => return Verdict::Unpriced,
            (_, cost) => cost.unwrap_or(0),
        };
        let beyond = |limit: Option<i64>, made: i64, under_way: i64, own: i64| {
            limit.is_some_and(|limit| made.saturating_add(under_way).saturating_add(own) > limit)
        };
        let is_beyond = beyond(self.tokens, made.tokens, under_way.tokens, tokens)
            || beyond(
                self.cost_micros,
                made.cost_micros,
                under_way.cost_micros,
                cost,
            );
        match under_way.number > 0 && is_beyond {
            true => Verdict::Wait,
            false => Verdict::Fits,
        }
    }

    /// Why so many more children can not be made; completes the sentence like [`Verdict::Exhausted`].
    pub fn refuses_children(&self, made: i64, more: i64) -> Option<String> {
        let limit = self
            .children
            .filter(|limit| made.saturating_add(more) > *limit)?;
        Some(format!(
            "{made} of {limit} children, and {more} more were asked for"
        ))
    }
}

pub(in crate::domain) const NOTHING: &str =
    "names no limit: give at least one of tokens, cost_micros, children";

/// Whose budget it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    Task,
    Workspace,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Task => "this task tree",
            Self::Workspace => "the workspace",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn calls(number: i64, tokens: i64, cost_micros: i64) -> Calls {
        Calls {
            number,
            tokens,
            cost_micros,
        }
    }

    // T-18
    #[test]
    fn one_more_call_fits_waits_or_is_too_much() {
        use Verdict::*;
        let none = Calls::default();
        let tokens = Limits {
            tokens: Some(100),
            ..Limits::default()
        };
        let cost = Limits {
            cost_micros: Some(50),
            ..Limits::default()
        };
        let both = tokens.and(cost);
        for (limits, made, under_way, estimate, expected) in [
            (tokens, none, none, (90, None), Fits),
            // alone, it is made whatever it may take
            (tokens, calls(1, 99, 0), none, (1000, None), Fits),
            (tokens, calls(1, 50, 0), calls(1, 20, 0), (30, None), Fits),
            (tokens, calls(1, 50, 0), calls(1, 20, 0), (31, None), Wait),
            (tokens, none, calls(1, 100, 0), (1, None), Wait),
            (
                tokens,
                calls(1, 100, 0),
                none,
                (1, None),
                Exhausted("100 of 100 tokens".into()),
            ),
            (
                tokens,
                calls(1, 130, 0),
                calls(1, 1, 1),
                (1, None),
                Exhausted("130 of 100 tokens".into()),
            ),
            (cost, none, none, (1, None), Unpriced),
            (cost, none, none, (1_000, Some(60)), Fits),
            (
                cost,
                calls(1, 9_999, 40),
                calls(1, 9, 5),
                (9, Some(6)),
                Wait,
            ),
            (
                cost,
                calls(1, 0, 50),
                none,
                (1, None),
                Exhausted("50 of 50 millionths of cost".into()),
            ),
            (both, calls(1, 10, 10), calls(1, 10, 39), (1, Some(2)), Wait),
            (both, calls(1, 10, 10), calls(1, 10, 10), (1, Some(2)), Fits),
            (tokens, none, calls(1, i64::MAX, 0), (i64::MAX, None), Wait),
        ] {
            let verdict = limits.judge(made, under_way, estimate.0, estimate.1);
            assert_eq!(
                verdict, expected,
                "{limits:?} {made:?} {under_way:?} {estimate:?}"
            );
        }
        let children = Limits {
            children: Some(3),
            ..Limits::default()
        };
        assert_eq!(children.refuses_children(1, 2), None);
        assert!(children.refuses_children(1, 3).is_some());
        assert_eq!(tokens.refuses_children(1, 1000), None);
    }

    // T-18
    #[test]
    fn limits_are_whole_numbers_from_1() {
        let read = Limits::parse(&json!({"tokens": 5, "cost_micros": null, "children": 1}));
        let expected = Limits {
            tokens: Some(5),
            cost_micros: None,
            children: Some(1),
        };
        assert_eq!(read, Ok(expected));
        for (body, path) in [
            (json!({}), ""),
            (json!({"tokens": null}), ""),
            (json!(5), ""),
            (json!({"tokens": 0}), "tokens"),
            (json!({"tokens": -1}), "tokens"),
            (json!({"tokens": 1.5}), "tokens"),
            (json!({"cost_micros": "5"}), "cost_micros"),
            (
                json!({"children": 9_223_372_036_854_775_808_u64}),
                "children",
            ),
            (json!({"tokens": 1, "token": 1}), "token"),
        ] {
            let error = Limits::parse(&body).unwrap_err();
            assert_eq!(error.0[0].path, path, "{body}");
        }
    }
}
