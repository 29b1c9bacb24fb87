//! Registers a question to the user as a wait of the task (T-5). The task rests when its turn is committed.

use super::{Draft, lock_claimed};
use crate::{
    domain::{
        ids::GroupId,
        step::Claim,
        task_await::{SourceType, Strategy},
    },
    store::{
        self,
        awaits::NewGroup,
        changes::{Changes, ItemKind},
    },
};
use sqlx::PgPool;

/// Makes the wait, or finds the one that an earlier attempt of this call has made. `None` when the claim is stale.
pub async fn ask(
    pool: &PgPool,
    claim: &Claim,
    question: &str,
) -> Result<Option<GroupId>, store::Error> {
    store::retry_conflicts!(async {
        let mut tx = pool.begin().await?;
        let Some(mut task) = lock_claimed(&mut tx, claim).await? else {
            return Ok(None);
        };
        let key = task.state.key;
        if let Some(made) = store::awaits::group_of_step(&mut tx, key, claim.step).await? {
            return Ok(Some(made));
        }
        let group = NewGroup {
            id: GroupId::new(),
            task: key,
            step: claim.step,
            source_type: SourceType::UserInput,
            strategy: Strategy::AllRequired,
            window_seconds: None,
            correlation_keys: vec![claim.step.to_string()],
        };
        store::awaits::insert_group(&mut tx, &group).await?;
        let mut changes = Changes::default();
        let card = serde_json::json!({"group_id": group.id, "question": question, "source_type": "user_input"});
        let item = Draft {
            turn: Some(claim.key.turn),
            ..Draft::new(ItemKind::Wait)
        };
        task.add_item(&mut changes, item.data(card));
        changes.tasks.push(task);
        store::changes::apply(&mut tx, &changes).await?;
        tx.commit().await?;
        Ok(Some(group.id))
    })
}
