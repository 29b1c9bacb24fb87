//! Workspaces and agents: made, edited, published, deleted. One transaction each.
//!
//! Editing changes the draft only; publishing makes it the version that new tasks run. An edit names the revision
//! it was made from, and is refused when that is no longer the newest: editors never overwrite each other unseen (H-47).

use crate::domain::agent::{AgentDefinition, InvalidDefinition, NewProfile, Template};
use crate::domain::ids::{AgentId, WorkspaceId};
use crate::domain::model_provider::ProviderKind;
use crate::lifecycle::members::{self, NewMember};
use crate::store::agents::{self, Agent};
use crate::store::members::Member;
use crate::store::{self, model_providers, workspaces};
use serde_json::{Value, json};
use sqlx::{PgConnection, PgPool};

#[derive(Debug, thiserror::Error)]
pub enum EditError {
    #[error("there is no such agent in this workspace")]
    NotFound,
    /// Somebody else has written since; `current` is the newest revision.
    #[error("the agent is at revision {current} by now")]
    Stale { current: i64 },
    #[error(transparent)]
    Invalid(#[from] InvalidDefinition),
    ///
    #[error("the default agent of a workspace can not be deleted")]
    DefaultIsKept,
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl From<sqlx::Error> for EditError {
    fn from(error: sqlx::Error) -> Self {
        EditError::Store(error.into())
    }
}

/// Makes an agent of template `custom`, published at once.
pub async fn create(
    pool: &PgPool,
    workspace: WorkspaceId,
    definition: &AgentDefinition,
) -> Result<Agent, EditError> {
    let mut tx = store::begin(pool).await?;
    check_provider(&mut tx, workspace, definition, None).await?;
    let id = AgentId::new();
    insert_published(&mut tx, workspace, id, Template::Custom, definition).await?;
    let agent = existing(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(agent)
}

/// Makes an agent that nobody can run or delegate to before it is published.
pub async fn create_draft(
    pool: &PgPool,
    workspace: WorkspaceId,
    definition: &AgentDefinition,
) -> Result<Agent, EditError> {
    let mut tx = store::begin(pool).await?;
    check_provider(&mut tx, workspace, definition, None).await?;
    let id = AgentId::new();
    agents::insert(&mut tx, workspace, id, Template::Custom, definition).await?;
    agents::save_draft_if_revision(&mut tx, workspace, id, 0, definition).await?;
    let agent = existing(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(agent)
}

/// Changes the draft by a JSON merge patch made from `revision`.
pub async fn patch(
    pool: &PgPool,
    workspace: WorkspaceId,
    id: AgentId,
    revision: i64,
    patch: &Value,
) -> Result<Agent, EditError> {
    let mut tx = store::begin(pool).await?;
    save_patched(&mut tx, workspace, id, revision, patch).await?;
    let agent = existing(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(agent)
}

/// Puts a profile into the draft that is at `revision`, and publishes it, so that rosters show it. A draft with
/// changes that its authors have not published is left to them: only they know whether it is ready.
pub async fn save_profile(
    pool: &PgPool,
    workspace: WorkspaceId,
    id: AgentId,
    revision: i64,
    profile: &NewProfile,
) -> Result<Agent, EditError> {
    let mut tx = store::begin(pool).await?;
    let agent = save_profile_in(&mut tx, workspace, id, revision, profile).await?;
    tx.commit().await?;
    Ok(agent)
}

pub(super) async fn save_profile_in(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: AgentId,
    revision: i64,
    profile: &NewProfile,
) -> Result<Agent, EditError> {
    let patch = json!({"config": {"delegation_profile": profile}});
    let before = save_patched(conn, workspace, id, revision, &patch).await?;
    if !before.has_unpublished_changes {
        agents::publish_locked(conn, workspace, id).await?;
    }
    existing(conn, workspace, id).await
}

/// Returns the agent as it was.
async fn save_patched(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: AgentId,
    revision: i64,
    patch: &Value,
) -> Result<Agent, EditError> {
    lock_at(conn, workspace, id, Some(revision)).await?;
    let before = existing(conn, workspace, id).await?;
    let draft = before.draft.patched(patch)?;
    check_provider(conn, workspace, &draft, Some(&before.draft)).await?;
    match agents::save_draft_if_revision(conn, workspace, id, revision, &draft).await? {
        true => Ok(before),
        false => Err(EditError::Stale {
            current: before.revision,
        }),
    }
}

/// Makes the draft the next version. With a revision, only if the draft is still the one the caller has seen.
pub async fn publish(
    pool: &PgPool,
    workspace: WorkspaceId,
    id: AgentId,
    revision: Option<i64>,
) -> Result<Agent, EditError> {
    let mut tx = store::begin(pool).await?;
    lock_at(&mut tx, workspace, id, revision).await?;
    agents::publish_locked(&mut tx, workspace, id).await?;
    let agent = existing(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(agent)
}

/// Tasks that run on the agent go on with their version; nothing new can be started on it or delegated to it.
pub async fn delete(
    pool: &PgPool,
    workspace: WorkspaceId,
    id: AgentId,
    revision: Option<i64>,
) -> Result<(), EditError> {
    let mut tx = store::begin(pool).await?;
    match lock_at(&mut tx, workspace, id, revision).await? {
        Template::Default => return Err(EditError::DefaultIsKept),
        Template::Custom => {}
    }
    if !agents::soft_delete_if_custom(&mut tx, workspace, id).await? {
        return Err(EditError::NotFound);
    }
    tx.commit().await?;
    Ok(())
}

/// A model provider that the agent names, and did not name `before`, is one of the workspace, or of a kind that
/// deployments have.
async fn check_provider(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    definition: &AgentDefinition,
    before: Option<&AgentDefinition>,
) -> Result<(), EditError> {
    let Some(name) = &definition.model.provider else {
        return Ok(());
    };
    let is_known = ProviderKind::named(name).is_some()
        || before.is_some_and(|before| before.model.provider.as_ref() == Some(name))
        || model_providers::has_name(conn, workspace, name).await?;
    match is_known {
        true => Ok(()),
        false => {
            let kinds = ProviderKind::ALL.map(ProviderKind::as_str).join(", ");
            let reason = format!(
                "expected the name of a model provider of the workspace, or one of {kinds}"
            );
            Err(InvalidDefinition::of("model.provider", &reason).into())
        }
    }
}

async fn lock_at(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: AgentId,
    revision: Option<i64>,
) -> Result<Template, EditError> {
    let (current, template) = agents::lock(conn, workspace, id)
        .await?
        .ok_or(EditError::NotFound)?;
    match revision {
        Some(revision) if revision != current => Err(EditError::Stale { current }),
        Some(_) | None => Ok(template),
    }
}

async fn existing(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: AgentId,
) -> Result<Agent, EditError> {
    let agent = agents::get(conn, workspace, id).await?;
    agent.ok_or(EditError::NotFound)
}

#[derive(Debug, thiserror::Error)]
pub enum CreateWorkspaceError {
    #[error("the slug {0:?} is taken; choose another one")]
    SlugTaken(String),
    #[error(
        "{0:?} is no slug: 1 to 63 characters of a-z, 0-9 and `-`, beginning with a letter or a digit"
    )]
    BadSlug(String),
    #[error("the name of a workspace is 1 to 100 characters on one line")]
    BadName,
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl From<sqlx::Error> for CreateWorkspaceError {
    fn from(error: sqlx::Error) -> Self {
        CreateWorkspaceError::Store(error.into())
    }
}

/// Makes a workspace and, with it, its default agent.
pub async fn create_workspace(
    pool: &PgPool,
    slug: &str,
    name: &str,
) -> Result<WorkspaceId, CreateWorkspaceError> {
    let (id, _) = create_workspace_with(pool, slug, name, None).await?;
    Ok(id)
}

/// [`create_workspace`], with a first member.
pub async fn create_workspace_with(
    pool: &PgPool,
    slug: &str,
    name: &str,
    member: Option<&NewMember<'_>>,
) -> Result<(WorkspaceId, Option<Member>), CreateWorkspaceError> {
    let mut tx = store::begin(pool).await?;
    let id = insert_workspace(&mut tx, slug, name, &assistant()).await?;
    let member = match member {
        Some(new) => members::insert(&mut tx, id, new).await?,
        None => None,
    };
    tx.commit().await?;
    Ok((id, member))
}

pub(super) async fn insert_workspace(
    conn: &mut PgConnection,
    slug: &str,
    name: &str,
    default_agent: &AgentDefinition,
) -> Result<WorkspaceId, CreateWorkspaceError> {
    if !is_slug(slug) {
        return Err(CreateWorkspaceError::BadSlug(slug.to_owned()));
    }
    let name = name.trim();
    if !(1..=100).contains(&name.chars().count()) || name.chars().any(char::is_control) {
        return Err(CreateWorkspaceError::BadName);
    }
    let id = WorkspaceId::new();
    if !workspaces::insert(conn, id, slug, name).await? {
        return Err(CreateWorkspaceError::SlugTaken(slug.to_owned()));
    }
    insert_published(conn, id, AgentId::new(), Template::Default, default_agent).await?;
    Ok(id)
}

/// `false` when there is, or was, an agent of this id: nothing is changed then.
pub(super) async fn insert_published(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: AgentId,
    template: Template,
    definition: &AgentDefinition,
) -> Result<bool, store::Error> {
    let inserted = agents::insert(conn, workspace, id, template, definition).await?;
    if inserted {
        agents::publish_locked(conn, workspace, id).await?; // a row of our own making needs no lock
    }
    Ok(inserted)
}

fn is_slug(text: &str) -> bool {
    let ok = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    text.len() <= 63
        && text.bytes().next().is_some_and(ok)
        && text.bytes().all(|c| ok(c) || c == b'-')
}

/// The agent every workspace begins with.
fn assistant() -> AgentDefinition {
    definition(
        "Assistant",
        "You are the assistant of this workspace. Answer the user's request completely and to the point, in the user's \
         language.\n\
         Do simple things yourself. When a request has several parts that other agents are better at, or one part that has \
         to be done for many things, delegate: one task for each part, each with everything the other agent needs to know, \
         since it sees nothing of this conversation. When the results are back, check them and give one consolidated \
         answer. Say so plainly if a part failed or is uncertain.\n\
         Ask the user only when you can not go on without an answer.",
        json!({}),
    )
}

pub(super) fn definition(name: &str, instructions: &str, config: Value) -> AgentDefinition {
    let config = match config {
        Value::Object(config) => config,
        _ => Default::default(),
    };
    AgentDefinition {
        name: name.to_owned(),
        instructions: instructions.to_owned(),
        config,
        ..AgentDefinition::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slugs_are_what_the_database_accepts() {
        let long = "a".repeat(63);
        for good in ["demo", "a", "0", "team-7", "a--b-", &long] {
            assert!(is_slug(good), "{good}");
        }
        let too_long = "a".repeat(64);
        for bad in ["", "-a", "Demo", "a b", "a_b", "ä", "a\n", "a.b", &too_long] {
            assert!(!is_slug(bad), "{bad}");
        }
    }

    #[test]
    fn the_shipped_agent_would_pass_as_an_authors_own() {
        let shipped = assistant();
        let read = AgentDefinition::parse(&serde_json::to_value(&shipped).unwrap());
        assert_eq!(read, Ok(shipped));
    }
}
