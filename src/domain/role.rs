//! What a caller may do (P-6).

use serde::{Deserialize, Serialize};

/// Each role may do all that the ones before it may.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    sqlx::Type,
    utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum Role {
    /// Runs tasks.
    Member,
    /// Manages agents, tools, credentials, members.
    Admin,
    /// Manages the service itself.
    Operator,
}

impl Role {
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Member => "member",
            Role::Admin => "admin",
            Role::Operator => "operator",
        }
    }
}

impl std::str::FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "member" => Ok(Role::Member),
            "admin" => Ok(Role::Admin),
            "operator" => Ok(Role::Operator),
            other => Err(format!(
                "{other} is not a role; use member, admin or operator"
            )),
        }
    }
}
