//! Registers what a call waits for, other than children, as a wait of the task (T-5, W-13, W-14). The task rests when its
//! turn is committed.

use super::{Draft, lock_claimed, signal::match_early};
use crate::{
    domain::{
        ids::GroupId,
        step::Claim,
        task_await::{SourceType, WaitFor},
    },
    runtime::Hub,
    store::{
        self,
        awaits::NewWait,
        changes::{Changes, ItemKind},
    },
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};
use sqlx::PgPool;
use uuid::Uuid;

#[derive(Debug)]
pub enum Waited {
    /// The wait exists. `callback`: the token that may signal it without an account.
    Registered {
        group: GroupId,
        callback: Option<String>,
    },
    /// Nothing was registered, for a reason that the model is told.
    Refused(String),
    /// The claim no longer holds.
    Stale,
}

/// Makes the wait, or finds the one that an earlier attempt of this call has made. Only a token's hash is stored, so an
/// attempt that finds its wait made can not know the token: it puts a new one in its place.
pub async fn wait(
    pool: &PgPool,
    hub: &Hub,
    claim: &Claim,
    wait: &WaitFor,
) -> Result<Waited, store::Error> {
    let is_external = wait.source_type() == SourceType::External;
    let token = is_external.then(new_token);
    let hash = token.as_deref().map(token_hash);
    let waited = store::retry_conflicts!(async {
        let mut tx = store::begin(pool).await?;
        let Some(mut task) = lock_claimed(&mut tx, claim).await? else {
            return Ok(Waited::Stale);
        };
        let key = task.state.key;
        if let Some(group) = store::awaits::group_of_step(&mut tx, key, claim.step).await? {
            if let Some(hash) = &hash {
                store::awaits::replace_callback(&mut tx, key.workspace, group, hash).await?;
                tx.commit().await?;
            }
            return Ok(Waited::Registered {
                group,
                callback: token.clone(),
            });
        }
        if task.state.deleted && wait.source_type() == SourceType::UserInput {
            let reason =
                "This task has been deleted, so nobody can answer. Go on without the answer.";
            return Ok(Waited::Refused(reason.into()));
        }
        let group = GroupId::new();
        let correlation_key = match wait {
            WaitFor::Signal { key: Some(key), .. } => key.clone(),
            WaitFor::Signal { key: None, .. }
            | WaitFor::User { .. }
            | WaitFor::Time(_)
            | WaitFor::Seconds(_) => claim.step.to_string(),
        };
        let new = NewWait {
            group,
            task: key,
            step: claim.step,
            wait,
            correlation_key: &correlation_key,
            callback_hash: hash,
        };
        match store::awaits::insert_wait(&mut tx, &new).await {
            Err(error) if error.constraint() == Some("awaits_pending_key") => {
                return Ok(Waited::Refused(format!(
                    "Somebody else is already waiting for the signal \u{201c}{correlation_key}\u{201d}, and it can wake one only. Wait for another key."
                )));
            }
            inserted => inserted?,
        }
        let mut changes = Changes::default();
        let item = Draft {
            turn: Some(claim.key.turn),
            ..Draft::new(ItemKind::Wait)
        };
        let mut card = wait.about();
        card["group_id"] = serde_json::json!(group);
        card["source_type"] = serde_json::json!(wait.source_type().as_str());
        task.add_item(&mut changes, item.data(card));
        changes.tasks.push(task);
        store::changes::apply(&mut tx, &changes).await?;
        tx.commit().await?;
        Ok(Waited::Registered {
            group,
            callback: token.clone(),
        })
    })?;
    if is_external && let Waited::Registered { .. } = waited {
        // The signal may have come first. The wait stands whether or not this look succeeds: the orchestrator looks too.
        if let Err(error) = match_early(pool, hub, 100).await {
            tracing::warn!(task.id = %claim.key.task, %error, "could not look for early signals of task {}: {error}", claim.key.task);
        }
    }
    Ok(waited)
}

/// 32 bytes from the operating system's source of randomness, 244 bits of which are free (two random UUIDs).
pub(super) fn new_token() -> String {
    let bytes = [Uuid::new_v4().into_bytes(), Uuid::new_v4().into_bytes()].concat();
    URL_SAFE_NO_PAD.encode(bytes)
}

/// What is stored of a token.
pub fn token_hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}
