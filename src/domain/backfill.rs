//! A backfill of delegation profiles: a job over the agents that a workspace had when it began.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, sqlx::Type, ToSchema)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum BackfillStatus {
    Running,
    Completed,
}

/// Where one agent stands. Only what is pending changes, and only once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, sqlx::Type, ToSchema)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum ProfileStatus {
    Pending,
    Generated,
    Skipped,
    Failed,
}

/// How the work on one agent has ended, with the reason where no profile was stored: a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    Generated,
    Skipped(String),
    Failed(String),
}

impl Settled {
    pub fn status(&self) -> ProfileStatus {
        match self {
            Settled::Generated => ProfileStatus::Generated,
            Settled::Skipped(_) => ProfileStatus::Skipped,
            Settled::Failed(_) => ProfileStatus::Failed,
        }
    }

    pub fn reason(&self) -> Option<&str> {
        match self {
            Settled::Generated => None,
            Settled::Skipped(reason) | Settled::Failed(reason) => Some(reason),
        }
    }
}
