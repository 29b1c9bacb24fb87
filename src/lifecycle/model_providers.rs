//! A workspace's own model providers: made, edited, deleted, and chosen from (L-10). An edit names the revision it was made
//! from (H-47). Agents name a provider by its name; one that is gone is told to whoever runs such an agent.

use crate::domain::agent::{InvalidDefinition, ModelSettings};
use crate::domain::ids::{ModelProviderId, WorkspaceId};
use crate::domain::model_provider::{KeyChange, ModelProvider, key_hint};
use crate::llm::{ProviderSettings, SettingsError};
use crate::net::Reach;
use crate::store;
use crate::store::model_providers::{self, NewKey, Sealing, Stored};
use crate::vault::{Place, Vault, VaultError};
use secrecy::SecretString;
use serde_json::Value;
use sqlx::{PgConnection, PgPool};

/// In one workspace: a claim reads all of them.
pub const PROVIDERS_MAX: i64 = 50;

#[derive(Debug, thiserror::Error)]
pub enum EditError {
    #[error("there is no such model provider in this workspace")]
    NotFound,
    /// Somebody else has written since; `current` is the newest revision.
    #[error("the provider is at revision {current} by now")]
    Stale { current: i64 },
    #[error("the name is taken")]
    NameTaken,
    /// Two at once have been made the default.
    #[error("another provider has become the default just now")]
    DefaultTaken,
    #[error("the workspace has {PROVIDERS_MAX} model providers already")]
    TooMany,
    #[error(transparent)]
    Invalid(#[from] InvalidDefinition),
    #[error(transparent)]
    Vault(#[from] VaultError),
    #[error(transparent)]
    Store(store::Error),
}

impl From<store::Error> for EditError {
    fn from(error: store::Error) -> Self {
        match error.constraint() {
            Some("model_providers_name_key") => EditError::NameTaken,
            Some("model_providers_one_default_idx") => EditError::DefaultTaken,
            _ => EditError::Store(error),
        }
    }
}

impl From<sqlx::Error> for EditError {
    fn from(error: sqlx::Error) -> Self {
        store::Error::from(error).into()
    }
}

/// What is told of a setting that can not work, by the name of its field.
impl From<SettingsError> for InvalidDefinition {
    fn from(error: SettingsError) -> Self {
        let field = match error.setting.as_str() {
            "api_key" => "key",
            other => other,
        };
        InvalidDefinition::of(field, &error.reason)
    }
}

/// Where requests of the workspace may go is judged here for the author's sake, and again when a model is asked.
pub async fn create(
    pool: &PgPool,
    vault: &Vault,
    reach: Reach,
    workspace: WorkspaceId,
    (provider, key): &(ModelProvider, Option<SecretString>),
) -> Result<Stored, EditError> {
    let settings = settings(provider, key.clone());
    settings.check(reach).map_err(InvalidDefinition::from)?;
    let id = ModelProviderId::new();
    let key = key.as_ref().map(|key| seal(vault, workspace, id, key));
    let key = key.transpose()?;
    let mut tx = store::begin(pool).await?;
    if provider.is_default {
        model_providers::unset_default(&mut tx, workspace).await?;
    }
    if !model_providers::insert_below(&mut tx, workspace, id, provider, PROVIDERS_MAX).await? {
        return Err(EditError::TooMany);
    }
    if key.is_some() {
        model_providers::set_key_locked(&mut tx, workspace, id, key.as_ref()).await?;
    }
    let made = existing(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(made)
}

/// Changes the provider by a JSON merge patch made from `revision`.
pub async fn patch(
    pool: &PgPool,
    vault: &Vault,
    reach: Reach,
    workspace: WorkspaceId,
    id: ModelProviderId,
    revision: i64,
    patch: &Value,
) -> Result<Stored, EditError> {
    let mut tx = store::begin(pool).await?;
    lock_at(&mut tx, workspace, id, Some(revision)).await?;
    let before = existing(&mut tx, workspace, id).await?;
    let (provider, key) = before.provider.patched(before.has_key, patch)?;
    let known = match &key {
        KeyChange::Set(key) => Some(key.clone()),
        // Which it is does not matter here.
        KeyChange::Keep if before.has_key => Some("a key".into()),
        KeyChange::Keep | KeyChange::Remove => None,
    };
    let settings = settings(&provider, known);
    settings.check(reach).map_err(InvalidDefinition::from)?;
    if provider.is_default && !before.provider.is_default {
        model_providers::unset_default(&mut tx, workspace).await?;
    }
    if !model_providers::save_if_revision(&mut tx, workspace, id, revision, &provider).await? {
        return Err(EditError::Stale {
            current: before.revision,
        });
    }
    match key {
        KeyChange::Keep => {}
        KeyChange::Remove => {
            model_providers::set_key_locked(&mut tx, workspace, id, None).await?;
        }
        KeyChange::Set(key) => {
            let key = seal(vault, workspace, id, &key)?;
            model_providers::set_key_locked(&mut tx, workspace, id, Some(&key)).await?;
        }
    }
    let changed = existing(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(changed)
}

/// Steps that are asking it go on; the next ones of agents that name it fail.
pub async fn delete(
    pool: &PgPool,
    workspace: WorkspaceId,
    id: ModelProviderId,
    revision: Option<i64>,
) -> Result<(), EditError> {
    let mut tx = store::begin(pool).await?;
    lock_at(&mut tx, workspace, id, revision).await?;
    model_providers::delete_locked(&mut tx, workspace, id).await?;
    tx.commit().await?;
    Ok(())
}

/// The provider of the workspace that answers when an agent names `wanted`, or names none. `None`: the deployment's.
pub fn chosen<'p>(own: &'p [Sealing], wanted: Option<&str>) -> Option<&'p Sealing> {
    own.iter().find(|own| match wanted {
        Some(name) => own.provider.name == name,
        None => own.provider.is_default,
    })
}

/// The provider of the workspace that answers under these settings, with its key read. `None`: one of the deployment.
pub async fn answering(
    conn: &mut PgConnection,
    vault: &Vault,
    workspace: WorkspaceId,
    settings: &ModelSettings,
) -> Result<Option<ProviderSettings>, EditError> {
    let mut all = model_providers::of_workspaces(conn, &[workspace]).await?;
    let own = all.remove(&workspace).unwrap_or_default();
    let chosen = chosen(&own, settings.provider.as_deref());
    Ok(chosen.map(|own| open(vault, workspace, own)).transpose()?)
}

/// The provider with its key read, for use on the server.
pub fn open(
    vault: &Vault,
    workspace: WorkspaceId,
    own: &Sealing,
) -> Result<ProviderSettings, VaultError> {
    let key = own.key.as_ref();
    let key = key.map(|sealed| vault.open(place(workspace, own.id), sealed));
    Ok(settings(&own.provider, key.transpose()?))
}

fn settings(provider: &ModelProvider, key: Option<SecretString>) -> ProviderSettings {
    ProviderSettings {
        provider: provider.kind,
        base_url: provider.base_url.clone(),
        api_key: key,
        model: provider.model.clone(),
    }
}

fn seal(
    vault: &Vault,
    workspace: WorkspaceId,
    id: ModelProviderId,
    key: &SecretString,
) -> Result<NewKey, VaultError> {
    Ok(NewKey {
        sealed: vault.seal(place(workspace, id), key)?,
        hint: key_hint(key),
    })
}

fn place(workspace: WorkspaceId, id: ModelProviderId) -> Place {
    Place {
        workspace,
        id: id.0,
    }
}

async fn lock_at(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ModelProviderId,
    revision: Option<i64>,
) -> Result<(), EditError> {
    let current = model_providers::lock(conn, workspace, id)
        .await?
        .ok_or(EditError::NotFound)?;
    match revision {
        Some(revision) if revision != current => Err(EditError::Stale { current }),
        Some(_) | None => Ok(()),
    }
}

async fn existing(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    id: ModelProviderId,
) -> Result<Stored, EditError> {
    let found = model_providers::get(conn, workspace, id).await?;
    found.ok_or(EditError::NotFound)
}
