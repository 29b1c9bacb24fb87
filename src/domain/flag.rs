//! Runtime flags: the switches that operators turn while the service works (P-7). The table below is all of them; a key
//! that is not in it does not exist.
//!
//! A value that can not be read is an error and never a default: whoever asks must fail closed (S-1).

use serde_json::Value;
use std::collections::HashMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flag {
    BatchFanoutEnabled,
}

/// What values a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagType {
    Boolean,
}

impl FlagType {
    pub fn as_str(self) -> &'static str {
        match self {
            FlagType::Boolean => "boolean",
        }
    }

    /// Why the value is none of this type.
    pub fn check(self, value: &Value) -> Result<(), &'static str> {
        match (self, value) {
            (FlagType::Boolean, Value::Bool(_)) => Ok(()),
            (FlagType::Boolean, _) => Err("must be true or false"),
        }
    }
}

/// A row of the table.
pub struct FlagInfo {
    pub key: &'static str,
    pub kind: FlagType,
    pub default: Value,
    pub description: &'static str,
}

impl Flag {
    pub const ALL: [Flag; 1] = [Flag::BatchFanoutEnabled];

    pub fn info(self) -> FlagInfo {
        match self {
            Flag::BatchFanoutEnabled => FlagInfo {
                key: "batch_fanout.enabled",
                kind: FlagType::Boolean,
                default: Value::Bool(false),
                description: "Agents whose settings allow it may delegate whole lists in source mode. Off: such a call is \
                              refused and creates nothing.",
            },
        }
    }

    pub fn by_key(key: &str) -> Option<Flag> {
        Self::ALL.into_iter().find(|flag| flag.info().key == key)
    }
}

/// The flags as they were at one moment: read once per round or request, so that it is of one mind.
#[derive(Debug, Default, PartialEq)]
pub struct FlagValues(pub HashMap<String, Value>);

/// Holds something that no release of this service has written.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the runtime flag {0} can not be read")]
pub struct UnreadableFlag(pub &'static str);

impl FlagValues {
    pub fn is_on(&self, flag: Flag) -> Result<bool, UnreadableFlag> {
        let info = flag.info();
        match self.0.get(info.key).unwrap_or(&info.default) {
            Value::Bool(on) => Ok(*on),
            _ => Err(UnreadableFlag(info.key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    // P-7
    #[test]
    fn the_table_is_consistent() {
        for flag in Flag::ALL {
            let info = flag.info();
            assert_eq!(Flag::by_key(info.key), Some(flag));
            assert_eq!(info.kind.check(&info.default), Ok(()), "{}", info.key);
            assert!(info.description.ends_with('.'));
        }
        assert_eq!(Flag::by_key("batch_fanout"), None);
    }

    // S-1: off until somebody turns it on, and unreadable is not off but an error.
    #[test]
    fn source_mode_is_off_until_turned_on() {
        let with = |value: Value| FlagValues([("batch_fanout.enabled".to_owned(), value)].into());
        let flag = Flag::BatchFanoutEnabled;
        assert_eq!(FlagValues::default().is_on(flag), Ok(false));
        assert_eq!(with(json!(true)).is_on(flag), Ok(true));
        assert_eq!(with(json!(false)).is_on(flag), Ok(false));
        for odd in [json!(null), json!("true"), json!(1), json!([true])] {
            assert!(FlagType::Boolean.check(&odd).is_err(), "{odd}");
            assert!(with(odd.clone()).is_on(flag).is_err(), "{odd}");
        }
    }
}
