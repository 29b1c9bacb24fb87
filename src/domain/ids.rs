//! A type per id, so that one can not be passed for another. New ids are UUID v7: they sort by creation time.

use serde::{Deserialize, Serialize};
use std::fmt;
use uuid::Uuid;

macro_rules! id {
    ($(#[$doc:meta] $name:ident),+ $(,)?) => {$(
        #[$doc]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, sqlx::Type, utoipa::ToSchema)]
        #[serde(transparent)]
        #[sqlx(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A fresh id, greater than those made earlier on this machine.
            #[allow(clippy::new_without_default)]
            pub fn new() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = uuid::Error;
            fn from_str(text: &str) -> Result<Self, uuid::Error> {
                text.parse().map(Self)
            }
        }
    )+};
}

id! {
    /// A tenant. Never optional.
    WorkspaceId,
    /// An agent in all its versions: the contract's `agent_group_id`.
    AgentId,
    /// One run of one agent.
    TaskId,
    /// A unit of queued work of a task.
    StepId,
    /// The awaits of one call.
    GroupId,
    /// An item of a task's feed.
    ItemId,
    /// A secret of a workspace.
    CredentialId,
    /// A base tool with bindings.
    ConfiguredToolId,
    /// Where a workspace's own models answer.
    ModelProviderId,
    /// One source-mode enumeration.
    BatchRunId,
    /// A local user.
    MemberId,
    /// A log-in.
    SessionId,
    /// A key of a program.
    ApiKeyId,
    /// A job that has missing delegation profiles written.
    BackfillId,
    /// A running process of this service.
    ProcessId,
}
