//! From tasks to what their agents are and may do: definition, granted tools, and the roster of whom they may call.
//!
//! Made for batches: however many steps are claimed at once, one `assemble_many` asks each table once, and mostly asks
//! only which versions are published at this moment. Versions never change, so what has been read of them is kept. The
//! roster is what prompts show; what a call may reach is asked again when it is executed (`store::tasks::resolve_agents`, A-24).

use crate::domain::agent::{AgentDefinition, RosterEntry, Template, harmless_name};
use crate::domain::configured_tool::ConfiguredTool;
use crate::domain::delegation::Reachable;
use crate::domain::grants::{ToolInfo, granted};
use crate::domain::ids::{AgentId, WorkspaceId};
use crate::domain::task::AgentRef;
use crate::store::{self, agents, agents::Agent, configured_tools};
use crate::tools::{self, Granted, Instance};
use sqlx::PgConnection;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

/// Public agents of other workspaces in one roster: no stranger can fill a prompt.
const PUBLIC_ENTRIES_MAX: usize = 200;
const DEFINITIONS_KEPT_MAX: usize = 256;
const ENTRIES_KEPT_MAX: usize = 4_096;
/// Versions read by one query when many are new: bounds what is in memory at once.
const VERSIONS_PER_QUERY: usize = 200;

/// What an assembly depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The task's workspace, whose roster it is.
    pub workspace: WorkspaceId,
    /// The version that the task runs.
    pub agent: AgentRef,
    /// 0 for a top-level task.
    pub depth: i32,
    /// The task, or one above it, was created with `disable_delegation` (T-9, D-54).
    pub delegation_disabled: bool,
}

#[derive(Clone, Debug)]
pub struct Assembly {
    pub definition: Arc<AgentDefinition>,
    /// The granted tools, in the order of the prompt.
    pub tools: Vec<Granted>,
    /// `None` without a delegate tool. Ordered by name, then id.
    pub roster: Option<Arc<[RosterEntry]>>,
}

struct Known {
    template: Template,
    definition: Arc<AgentDefinition>,
}

/// A published version that a roster may show. `None`: it is not to be shown, and still hides others of its id.
#[derive(Clone, Debug)]
struct Candidate {
    workspace: WorkspaceId,
    id: AgentId,
    entry: Option<Arc<RosterEntry>>,
}

/// One per process.
pub struct Assembler {
    catalogue: Vec<ToolInfo<'static>>,
    max_depth: i32,
    known: Mutex<HashMap<AgentRef, Arc<Known>>>,
    entries: Mutex<HashMap<AgentRef, Option<Arc<RosterEntry>>>>,
}

impl Assembler {
    /// `max_depth` is `spawn_tasks.max_depth`: a task that deep can have no children, so it gets no delegate tool.
    pub fn new(catalogue: Vec<ToolInfo<'static>>, max_depth: i32) -> Self {
        Assembler {
            catalogue,
            max_depth,
            known: Mutex::default(),
            entries: Mutex::default(),
        }
    }

    /// With all base tools; as above, `max_depth` is that of the configuration.
    pub fn with_base_tools(max_depth: u32) -> Self {
        let infos = tools::catalogue().into_iter().map(|tool| ToolInfo {
            name: tool.name,
            default_enabled: tool.default_enabled,
            delegates: tool.delegates,
        });
        Self::new(infos.collect(), max_depth as i32)
    }

    /// What the draft would be with at the top of a task, if it were published.
    pub async fn assemble_draft(
        &self,
        conn: &mut PgConnection,
        workspace: WorkspaceId,
        agent: &Agent,
    ) -> Result<Assembly, store::Error> {
        let draft = AgentRef {
            workspace,
            agent: agent.id,
            version: 0, // no version that is published
        };
        let known = Known {
            template: agent.template,
            definition: Arc::new(agent.draft.clone()),
        };
        let key = Key {
            workspace,
            agent: draft,
            depth: 0,
            delegation_disabled: false,
        };
        let known = HashMap::from([(draft, Arc::new(known))]);
        let mut assemblies = self.assemble(conn, &[key], &known).await?;
        Ok(assemblies.remove(&key).expect("its version is known"))
    }

    /// One assembly per distinct key. A key whose version can not be read is missing in the answer: its step fails, the
    /// others of the batch do not.
    pub async fn assemble_many(
        &self,
        conn: &mut PgConnection,
        keys: &[Key],
    ) -> Result<HashMap<Key, Assembly>, store::Error> {
        let known = self.known_versions(conn, keys).await?;
        self.assemble(conn, keys, &known).await
    }

    async fn assemble(
        &self,
        conn: &mut PgConnection,
        keys: &[Key],
        known: &HashMap<AgentRef, Arc<Known>>,
    ) -> Result<HashMap<Key, Assembly>, store::Error> {
        let configured = self.configured(conn, keys, known).await?;
        let mut assemblies = HashMap::with_capacity(keys.len());
        for key in keys {
            let Some(version) = known.get(&key.agent) else {
                continue;
            };
            assemblies.entry(*key).or_insert_with(|| Assembly {
                definition: version.definition.clone(),
                tools: self.granted(version, configured.get(key), key),
                roster: None,
            });
        }

        let delegating: Vec<Key> = assemblies
            .iter()
            .filter(|(_, assembly)| self.can_delegate(&assembly.tools))
            .map(|(key, _)| *key)
            .collect();
        if delegating.is_empty() {
            return Ok(assemblies);
        }
        let candidates = self.candidates(conn, &delegating).await?;
        let mut rosters: HashMap<(WorkspaceId, AgentId), Arc<[RosterEntry]>> = HashMap::new();
        for key in delegating {
            let caller = key.agent.agent;
            let roster = rosters
                .entry((key.workspace, caller))
                .or_insert_with(|| candidates.roster(key.workspace, caller).into());
            if let Some(assembly) = assemblies.get_mut(&key) {
                assembly.roster = Some(roster.clone());
            }
        }
        Ok(assemblies)
    }

    /// What the agent may call at this moment. `None` where its version can not be read.
    pub async fn tools(
        &self,
        conn: &mut PgConnection,
        key: Key,
    ) -> Result<Option<Vec<Granted>>, store::Error> {
        let known = self.known_versions(conn, &[key]).await?;
        let configured = self.configured(conn, &[key], &known).await?;
        let version = known.get(&key.agent);
        Ok(version.map(|version| self.granted(version, configured.get(&key), &key)))
    }

    /// What the agent may call: of the base tools and of the configured ones that are there for it.
    fn granted(
        &self,
        version: &Known,
        own: Option<&Vec<(&'static str, Arc<Instance>)>>,
        key: &Key,
    ) -> Vec<Granted> {
        let allowed = !key.delegation_disabled && key.depth < self.max_depth;
        let own = own.map(Vec::as_slice).unwrap_or_default();
        let configured = own.iter().map(|(base, instance)| ToolInfo {
            name: instance.tool.name.as_str(),
            default_enabled: false,
            delegates: self.delegates(base),
        });
        let catalogue: Vec<ToolInfo<'_>> =
            self.catalogue.iter().copied().chain(configured).collect();
        let names = granted(&version.definition, version.template, &catalogue, allowed);
        let tool = |name: &str| {
            let base = self.catalogue.iter().find(|tool| tool.name == name);
            if let Some(base) = base {
                return Some(Granted::base(base.name));
            }
            let (base, instance) = own.iter().find(|(_, own)| own.tool.name == name)?;
            Some(Granted {
                name: name.to_owned(),
                base,
                instance: Some(instance.clone()),
            })
        };
        names.into_iter().filter_map(tool).collect()
    }

    fn can_delegate(&self, tools: &[Granted]) -> bool {
        tools.iter().any(|tool| self.delegates(tool.base))
    }

    fn delegates(&self, base: &str) -> bool {
        self.catalogue
            .iter()
            .any(|tool| tool.delegates && tool.name == base)
    }

    /// For each key the configured tools that its agent lists and that are for it, with their base.
    ///
    /// An agent that another workspace lends has none: its author's tools hold that workspace's bindings and credentials,
    /// and those of the task's workspace were attached to it by nobody there.
    async fn configured(
        &self,
        conn: &mut PgConnection,
        keys: &[Key],
        known: &HashMap<AgentRef, Arc<Known>>,
    ) -> Result<HashMap<Key, Vec<(&'static str, Arc<Instance>)>>, store::Error> {
        let is_base = |name: &str| self.catalogue.iter().any(|tool| tool.name == name);
        let mut wanted: HashMap<Key, Vec<String>> = HashMap::new();
        for key in keys
            .iter()
            .filter(|key| key.agent.workspace == key.workspace)
        {
            let Some(version) = known.get(&key.agent) else {
                continue;
            };
            let phases = &version.definition.phases;
            let listed = version.definition.tools.iter();
            let mut names: Vec<String> = listed
                .chain(phases.iter().flat_map(|phase| &phase.tools))
                .filter(|name| !is_base(name))
                .cloned()
                .collect();
            names.sort();
            names.dedup();
            if !names.is_empty() {
                wanted.insert(*key, names);
            }
        }
        if wanted.is_empty() {
            return Ok(HashMap::new());
        }
        let names: HashSet<(WorkspaceId, String)> = wanted
            .iter()
            .flat_map(|(key, names)| names.iter().map(|name| (key.workspace, name.clone())))
            .collect();
        let names: Vec<_> = names.into_iter().collect();
        let tools = configured_tools::named(conn, &names).await?;
        let mut agents: HashSet<(WorkspaceId, AgentId)> = HashSet::new();
        for ((workspace, _), tool) in &tools {
            agents.extend(tool.allowed_agents().into_iter().map(|id| (*workspace, id)));
        }
        let agents: Vec<_> = agents.into_iter().collect();
        let reachable = match agents.is_empty() {
            true => HashMap::new(),
            false => agents::reachable_names(conn, &agents).await?,
        };
        let instance = |key: &Key, tool: &ConfiguredTool| {
            let base = self
                .catalogue
                .iter()
                .find(|base| base.name == tool.base_tool)?;
            let allowed = tool.allowed_agents();
            let reach = allowed
                .iter()
                .filter(|id| **id != key.agent.agent)
                .filter_map(|id| {
                    let name = reachable.get(&(key.workspace, *id))?;
                    Some(Reachable {
                        id: *id,
                        name: harmless_name(name),
                    })
                });
            let instance = Instance {
                tool: tool.clone(),
                reachable: reach.collect(),
                allowed,
            };
            Some((base.name, Arc::new(instance)))
        };
        let own = wanted.into_iter().map(|(key, names)| {
            let tools = names
                .into_iter()
                .filter_map(|name| tools.get(&(key.workspace, name)))
                .filter(|tool| tool.agent.is_none_or(|agent| agent == key.agent.agent))
                .filter_map(|tool| instance(&key, tool));
            (key, tools.collect())
        });
        Ok(own.collect())
    }

    async fn known_versions(
        &self,
        conn: &mut PgConnection,
        keys: &[Key],
    ) -> Result<HashMap<AgentRef, Arc<Known>>, store::Error> {
        let wanted: HashSet<AgentRef> = keys.iter().map(|key| key.agent).collect();
        let mut known = kept(&self.known, &wanted);
        let missing = without(wanted, &known);
        let mut read = Vec::new();
        for versions in missing.chunks(VERSIONS_PER_QUERY) {
            for (key, version) in agents::versions_all_workspaces(conn, versions).await? {
                let definition = Arc::new(version.definition);
                read.push((
                    key,
                    Arc::new(Known {
                        template: version.template,
                        definition,
                    }),
                ));
            }
        }
        keep(&self.known, DEFINITIONS_KEPT_MAX, &read);
        known.extend(read);
        Ok(known)
    }

    async fn candidates(
        &self,
        conn: &mut PgConnection,
        keys: &[Key],
    ) -> Result<Candidates, store::Error> {
        let workspaces: HashSet<WorkspaceId> = keys.iter().map(|key| key.workspace).collect();
        let workspaces: Vec<WorkspaceId> = workspaces.into_iter().collect();
        let published = agents::roster_versions(conn, &workspaces).await?;
        let wanted: HashSet<AgentRef> = published
            .own
            .iter()
            .chain(&published.public)
            .copied()
            .collect();
        let mut entries = kept(&self.entries, &wanted);
        let missing = without(wanted, &entries);
        let mut read = Vec::new();
        for versions in missing.chunks(VERSIONS_PER_QUERY) {
            for (key, version) in agents::versions_all_workspaces(conn, versions).await? {
                read.push((
                    key,
                    RosterEntry::new(key.agent, &version.definition).map(Arc::new),
                ));
            }
        }
        keep(&self.entries, ENTRIES_KEPT_MAX, &read);
        entries.extend(read);

        let candidate = |key: AgentRef| Candidate {
            workspace: key.workspace,
            id: key.agent,
            entry: entries.get(&key).cloned().flatten(),
        };
        let mut own: HashMap<WorkspaceId, Vec<Candidate>> = HashMap::new();
        for key in published.own {
            own.entry(key.workspace).or_default().push(candidate(key));
        }
        Ok(Candidates {
            own,
            public: published.public.into_iter().map(candidate).collect(),
        })
    }
}

/// The published agents at one moment, before anybody's point of view.
#[derive(Default)]
struct Candidates {
    own: HashMap<WorkspaceId, Vec<Candidate>>,
    /// Of all workspaces, oldest first.
    public: Vec<Candidate>,
}

impl Candidates {
    /// Whom an agent working in this workspace may be told about.
    fn roster(&self, workspace: WorkspaceId, caller: AgentId) -> Vec<RosterEntry> {
        let mut seen = HashSet::from([caller]);
        let own = self.own.get(&workspace).into_iter().flatten();
        let mut roster: Vec<RosterEntry> = own
            .filter(|agent| seen.insert(agent.id))
            .filter_map(|agent| agent.entry.as_deref().cloned())
            .collect();
        let foreign = self
            .public
            .iter()
            .filter(|agent| agent.workspace != workspace);
        let public = foreign
            .filter(|agent| seen.insert(agent.id))
            .filter_map(|agent| agent.entry.as_deref());
        roster.extend(public.take(PUBLIC_ENTRIES_MAX).map(RosterEntry::lent));
        roster.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
        roster
    }
}

fn kept<T: Clone>(
    cache: &Mutex<HashMap<AgentRef, T>>,
    wanted: &HashSet<AgentRef>,
) -> HashMap<AgentRef, T> {
    let cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
    wanted
        .iter()
        .filter_map(|key| cache.get(key).map(|value| (*key, value.clone())))
        .collect()
}

/// A full cache starts anew: the next batches read again what they use.
fn keep<T: Clone>(cache: &Mutex<HashMap<AgentRef, T>>, max: usize, read: &[(AgentRef, T)]) {
    let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
    if cache.len() + read.len() > max {
        cache.clear();
    }
    cache.extend(read.iter().take(max).cloned());
}

fn without<T>(wanted: HashSet<AgentRef>, known: &HashMap<AgentRef, T>) -> Vec<AgentRef> {
    wanted
        .into_iter()
        .filter(|key| !known.contains_key(key))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use uuid::Uuid;

    fn workspace(n: u128) -> WorkspaceId {
        WorkspaceId(Uuid::from_u128(n))
    }

    fn agent(n: u128) -> AgentId {
        AgentId(Uuid::from_u128(n))
    }

    fn candidate(home: u128, id: u128, name: &str, listed: bool) -> Candidate {
        let config =
            json!({"delegation_enabled": listed, "delegation_profile": {"description": "helps"}});
        let definition = AgentDefinition::parse(&json!({"name": name, "config": config})).unwrap();
        let entry = RosterEntry::new(agent(id), &definition).map(Arc::new);
        Candidate {
            workspace: workspace(home),
            id: agent(id),
            entry,
        }
    }

    #[test]
    fn a_roster_is_the_own_agents_and_foreign_public_ones_without_the_caller() {
        //
        let own = vec![
            candidate(1, 10, "Zoe", true),
            candidate(1, 11, "Caller", true),
            candidate(1, 12, "Own twin", true),
            candidate(1, 13, "Hidden own twin", false),
            candidate(1, 15, "Ann", true),
            candidate(1, 14, "Ann", true),
        ];
        let public = vec![
            candidate(1, 10, "Zoe", true),
            candidate(2, 11, "Foreign twin of the caller", true),
            candidate(2, 12, "Foreign twin", true),
            candidate(2, 13, "Foreign twin of a hidden one", true),
            candidate(2, 20, "Lent", true),
            candidate(3, 20, "Lent again", true),
            candidate(3, 21, "Unwilling", false),
        ];
        let candidates = Candidates {
            own: HashMap::from([(workspace(1), own)]),
            public,
        };
        let seen = |home, caller| -> Vec<(String, u128, bool)> {
            let roster = candidates.roster(workspace(home), agent(caller));
            roster
                .into_iter()
                .map(|entry| (entry.name, entry.id.0.as_u128(), entry.public))
                .collect()
        };
        let row = |name: &str, id, public| (name.to_owned(), id, public);
        assert_eq!(
            seen(1, 11),
            [
                row("Ann", 14, false),
                row("Ann", 15, false),
                row("Lent", 20, true),
                row("Own twin", 12, false),
                row("Zoe", 10, false),
            ]
        );
        assert_eq!(
            seen(2, 20),
            [row("Zoe", 10, true)],
            "a workspace without agents of its own, working with a lent one"
        );
    }

    #[test]
    fn strangers_can_not_fill_a_prompt() {
        let public = (0..500)
            .map(|n| candidate(2, 1_000 + n, "Lent", true))
            .collect();
        let candidates = Candidates {
            own: HashMap::new(),
            public,
        };
        let roster = candidates.roster(workspace(1), agent(1));
        assert_eq!(roster.len(), PUBLIC_ENTRIES_MAX);
        assert_eq!(
            roster.last().map(|entry| entry.id),
            Some(agent(1_199)),
            "the oldest stay"
        );
    }
}
