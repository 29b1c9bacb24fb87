//! Turns a runtime flag (P-7). Every process sees it when its own reading is a second old ([`crate::flags`]).

use crate::domain::flag::Flag;
use crate::domain::ids::WorkspaceId;
use crate::store::{self, flags::SetFlag};
use serde_json::Value;
use sqlx::PgPool;

#[derive(Debug, thiserror::Error)]
pub enum SetFlagError {
    /// Completes the sentence "the value …".
    #[error("the value {0}")]
    WrongType(&'static str),
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// `by_workspace`: whose subject `by` is; `None` for the command line.
pub async fn set_flag(
    pool: &PgPool,
    flag: Flag,
    value: &Value,
    by: &str,
    by_workspace: Option<WorkspaceId>,
) -> Result<SetFlag, SetFlagError> {
    let info = flag.info();
    info.kind.check(value).map_err(SetFlagError::WrongType)?;
    // A token's subject may be of any length.
    let by: String = by.chars().filter(|c| *c != '\0').take(1000).collect();
    let mut conn = pool.acquire().await.map_err(store::Error::from)?;
    let set = store::flags::set(&mut conn, info.key, value, &by, by_workspace).await?;
    tracing::info!(
        flag.key = info.key,
        "the runtime flag {} is now {value}",
        info.key
    );
    Ok(set)
}
