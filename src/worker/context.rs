//! Loads what claimed steps need, for all of them with one query per table: their agents with tools and roster, and, at
//! the same time, the histories and the model providers of the workspaces that have some.

use crate::{
    domain::{decision::ToolCall, ids::WorkspaceId, task::TaskKey},
    lifecycle::{checkpoint::PromptRecord, model_providers},
    llm::{Message, ModelError, ProviderSettings, Request, ToolSpec},
    prompts::{PromptError, Prompts, SystemPrompt},
    roster::{Assembler, Assembly, Key},
    sent::{
        SentPrompt,
        history::{calls_of, history, repairs},
    },
    store::{self, items::HistoryItem, model_providers::Sealing, steps::Claimed, tasks::Setup},
    tools::{self, Granted},
    vault::Vault,
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use sqlx::PgPool;
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// What a step is run with.
pub struct Context {
    pub setup: Setup,
    pub tools: Vec<Granted>,
    /// For a decide step.
    pub request: Option<Prepared>,
    /// For a call, all calls of its turn. `None`: they can not be read.
    pub calls: Option<TurnCalls>,
}

/// The calls of a turn.
#[derive(Clone)]
pub struct TurnCalls {
    /// In the model's order.
    pub calls: Arc<[ToolCall]>,
    /// Some have not started, as far as is known here.
    pub unstarted: bool,
}

/// A request with what is recorded of it.
pub struct Prepared {
    pub request: Request,
    pub prompt: Arc<PromptRecord>,
    pub seen_seq: i64,
    /// How often the model has been asked to repair its answer.
    pub repairs: usize,
    /// The workspace's own provider that answers (L-10), or why it can not. `None`: one of the deployment.
    pub own: Option<Result<ProviderSettings, ModelError>>,
}

/// Builds contexts. One per process.
pub struct Loader {
    assembler: Assembler,
    prompts: Arc<Prompts>,
    specs: HashMap<&'static str, ToolSpec>,
    vault: Arc<Vault>,
    result_chars: usize,
}

impl Loader {
    /// `max_depth` is `spawn_tasks.max_depth`; `result_chars` caps a tool result in the history.
    pub fn new(
        prompts: Arc<Prompts>,
        vault: Arc<Vault>,
        max_depth: u32,
        result_chars: usize,
    ) -> Self {
        let specs = tools::catalogue()
            .into_iter()
            .map(|t| {
                (
                    t.name,
                    ToolSpec {
                        name: t.name.to_owned(),
                        description: prompts.tool(t.name).unwrap_or_default().to_owned(),
                        parameters: t.schema,
                    },
                )
            })
            .collect();
        Self {
            assembler: Assembler::with_base_tools(max_depth),
            prompts,
            specs,
            vault,
            result_chars,
        }
    }

    /// The context of each step, in order. `None` where the task or its agent's version can not be read.
    pub async fn load(
        &self,
        pool: &PgPool,
        steps: &[&Claimed],
    ) -> Result<Vec<Option<Result<Context, PromptError>>>, store::Error> {
        let (assemblies, mut items, providers, turns) = tokio::try_join!(
            self.assemblies(pool, steps),
            histories(pool, steps),
            own_providers(pool, steps),
            turns(pool, steps),
        )?;
        // Children of one call share everything but their message.
        let mut prompts: HashMap<Key, Shared> = HashMap::new();
        let contexts = steps.iter().map(|step| {
            let task = step.claim.key.task_key();
            let key = assembly_key(step);
            let assembly = assemblies.get(&key)?;
            let request = match step.call {
                Some(_) => None,
                None => {
                    let shared = match prompts.entry(key) {
                        std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
                        std::collections::hash_map::Entry::Vacant(new) => {
                            match self.shared(assembly) {
                                Ok(shared) => new.insert(shared),
                                Err(error) => return Some(Err(error)),
                            }
                        }
                    };
                    let items = items.remove(&task).unwrap_or_default();
                    let (messages, seen_seq) = history(&items, self.result_chars);
                    let own = providers.get(&task.workspace);
                    let own = own.and_then(|own| self.own(task.workspace, own, assembly));
                    Some(Prepared {
                        request: shared.request(assembly, key, messages),
                        prompt: shared.record.clone(),
                        seen_seq,
                        repairs: repairs(&items),
                        own,
                    })
                }
            };
            Some(Ok(Context {
                setup: step.setup,
                tools: assembly.tools.clone(),
                request,
                calls: turns.get(&(task, step.claim.key.turn)).cloned(),
            }))
        });
        Ok(contexts.collect())
    }

    /// What the step's agent may call at this moment, for calls that have not started. `None` where its version can not
    /// be read.
    pub async fn tools(
        &self,
        pool: &PgPool,
        workspace: WorkspaceId,
        setup: &Setup,
    ) -> Result<Option<Vec<Granted>>, store::Error> {
        let mut conn = pool.acquire().await?;
        self.assembler.tools(&mut conn, key(workspace, setup)).await
    }

    async fn assemblies(
        &self,
        pool: &PgPool,
        steps: &[&Claimed],
    ) -> Result<HashMap<Key, Assembly>, store::Error> {
        let wanted: HashSet<Key> = steps.iter().map(|step| assembly_key(step)).collect();
        let wanted: Vec<Key> = wanted.into_iter().collect();
        let mut conn = pool.acquire().await?;
        self.assembler.assemble_many(&mut conn, &wanted).await
    }

    /// Of the providers of the task's workspace, whoever has lent the agent, the one that answers for it.
    fn own(
        &self,
        workspace: WorkspaceId,
        providers: &[Sealing],
        assembly: &Assembly,
    ) -> Option<Result<ProviderSettings, ModelError>> {
        let wanted = assembly.definition.model.provider.as_deref();
        let chosen = model_providers::chosen(providers, wanted)?;
        let opened = model_providers::open(&self.vault, workspace, chosen);
        Some(opened.map_err(|reason| {
            let name = &chosen.provider.name;
            ModelError::never(format!(
                "The key of the model provider `{name}` can not be had: {reason}."
            ))
        }))
    }

    /// The tool as the model sees it: what an author has bound is not there (D-14).
    fn spec(&self, tool: &Granted) -> Option<ToolSpec> {
        let base = self.specs.get(tool.base)?;
        Some(match &tool.instance {
            None => base.clone(),
            Some(instance) => ToolSpec {
                name: tool.name.clone(),
                description: instance.description(&base.description),
                parameters: instance.tool.schema(&base.parameters),
            },
        })
    }

    fn shared(&self, assembly: &Assembly) -> Result<Shared, PromptError> {
        let sections = self.prompts.system(&SystemPrompt {
            agent_name: &assembly.definition.name,
            instructions: &assembly.definition.instructions,
            phases: &assembly.definition.phases,
            roster: assembly.roster.as_deref(),
            output_schema: assembly.definition.output_schema.as_ref(),
        })?;
        let tools: Arc<[ToolSpec]> = assembly
            .tools
            .iter()
            .filter_map(|tool| self.spec(tool))
            .collect();
        let system: Arc<str> = sections.joined().into();
        let sections = SentPrompt::record(&sections, &tools);
        let hash = Sha256::digest(sections.to_string().as_bytes()).into();
        Ok(Shared {
            system,
            tools,
            output_schema: assembly.definition.output_schema.clone().map(Arc::new),
            record: Arc::new(PromptRecord { hash, sections }),
        })
    }
}

struct Shared {
    system: Arc<str>,
    tools: Arc<[ToolSpec]>,
    output_schema: Option<Arc<Value>>,
    record: Arc<PromptRecord>,
}

impl Shared {
    fn request(&self, assembly: &Assembly, key: Key, messages: Vec<Message>) -> Request {
        Request {
            model: assembly.definition.model.clone(),
            system: self.system.clone(),
            messages,
            tools: self.tools.clone(),
            output_schema: self.output_schema.clone(),
            cache_key: format!(
                "{}/{}/{}",
                key.workspace, key.agent.agent, key.agent.version
            ),
        }
    }
}

/// The providers of the workspaces that have some, for those that decide. Asks nothing where there are none.
async fn own_providers(
    pool: &PgPool,
    steps: &[&Claimed],
) -> Result<HashMap<WorkspaceId, Vec<Sealing>>, store::Error> {
    let asking = steps
        .iter()
        .filter(|step| step.call.is_none() && step.setup.own_models);
    let workspaces: HashSet<WorkspaceId> = asking.map(|step| step.claim.key.workspace).collect();
    if workspaces.is_empty() {
        return Ok(HashMap::new());
    }
    let workspaces: Vec<WorkspaceId> = workspaces.into_iter().collect();
    let mut conn = pool.acquire().await?;
    store::model_providers::of_workspaces(&mut conn, &workspaces).await
}

/// The items of those that decide.
async fn histories(
    pool: &PgPool,
    steps: &[&Claimed],
) -> Result<HashMap<TaskKey, Vec<HistoryItem>>, store::Error> {
    let deciding = steps.iter().filter(|s| s.call.is_none());
    let deciding: Vec<TaskKey> = deciding.map(|s| s.claim.key.task_key()).collect();
    let mut items: HashMap<TaskKey, Vec<HistoryItem>> = HashMap::new();
    if !deciding.is_empty() {
        let mut conn = pool.acquire().await?;
        for item in store::items::histories(&mut conn, &deciding).await? {
            items.entry(item.task).or_default().push(item);
        }
    }
    Ok(items)
}

/// The turns of those that are calls.
async fn turns(
    pool: &PgPool,
    steps: &[&Claimed],
) -> Result<HashMap<(TaskKey, i32), TurnCalls>, store::Error> {
    let calls = steps.iter().filter(|step| step.call.is_some());
    let tasks: HashSet<TaskKey> = calls.map(|step| step.claim.key.task_key()).collect();
    if tasks.is_empty() {
        return Ok(HashMap::new());
    }
    let tasks: Vec<TaskKey> = tasks.into_iter().collect();
    let mut conn = pool.acquire().await?;
    let turns = store::items::newest_turns(&mut conn, &tasks).await?;
    let read = turns.into_iter().filter_map(|(task, newest)| {
        let calls: Arc<[ToolCall]> = newest.data.as_ref().and_then(calls_of)?.into();
        let unstarted = (newest.started as usize) < calls.len();
        Some(((task, newest.turn), TurnCalls { calls, unstarted }))
    });
    Ok(read.collect())
}

fn assembly_key(step: &Claimed) -> Key {
    key(step.claim.key.workspace, &step.setup)
}

fn key(workspace: WorkspaceId, setup: &Setup) -> Key {
    Key {
        workspace,
        agent: setup.agent,
        depth: setup.depth,
        delegation_disabled: setup.delegation_disabled,
    }
}
