//! Workspaces, agents, versions, targets and rosters on a real database.

use crate::support::database;
use reconvene::domain::agent::{AgentDefinition, Template};
use reconvene::domain::grants::ToolInfo;
use reconvene::domain::ids::{AgentId, WorkspaceId};
use reconvene::domain::task::AgentRef;
use reconvene::lifecycle::agents::{self as lifecycle, CreateWorkspaceError, EditError};
use reconvene::lifecycle::demo::seed_demo;
use reconvene::roster::{Assembler, Assembly, Key};
use reconvene::store::agents::{self, Agent};
use reconvene::store::tasks::resolve_agents;
use serde_json::{Value, json};
use sqlx::PgPool;
use std::collections::HashMap;

async fn workspace(pool: &PgPool, slug: &str) -> WorkspaceId {
    lifecycle::create_workspace(pool, slug, slug).await.unwrap()
}

fn definition(name: &str, mut fields: Value) -> AgentDefinition {
    fields["name"] = json!(name);
    AgentDefinition::parse(&fields).unwrap()
}

fn helper(name: &str) -> AgentDefinition {
    definition(
        name,
        json!({"config": {"delegation_profile": {"description": format!("{name} helps")}}}),
    )
}

fn public(name: &str) -> AgentDefinition {
    AgentDefinition {
        is_public: true,
        ..helper(name)
    }
}

async fn create(pool: &PgPool, workspace: WorkspaceId, definition: &AgentDefinition) -> Agent {
    lifecycle::create(pool, workspace, definition)
        .await
        .unwrap()
}

async fn get(pool: &PgPool, workspace: WorkspaceId, id: AgentId) -> Option<Agent> {
    agents::get(&mut pool.acquire().await.unwrap(), workspace, id)
        .await
        .unwrap()
}

/// An agent of a chosen id, which only imports and tests have.
async fn insert_twin(
    pool: &PgPool,
    workspace: WorkspaceId,
    id: AgentId,
    definition: &AgentDefinition,
) {
    let mut conn = pool.acquire().await.unwrap();
    assert!(
        agents::insert(&mut conn, workspace, id, Template::Custom, definition)
            .await
            .unwrap()
    );
    agents::publish_locked(&mut conn, workspace, id)
        .await
        .unwrap();
}

async fn default_agent(pool: &PgPool, workspace: WorkspaceId) -> AgentRef {
    let mut conn = pool.acquire().await.unwrap();
    let found = resolve_agents(&mut conn, &[(workspace, None)])
        .await
        .unwrap();
    found[0].unwrap().agent
}

/// Home and published name of those that this workspace may give work to.
async fn target_names(
    pool: &PgPool,
    workspace: WorkspaceId,
    ids: &[AgentId],
) -> Vec<(WorkspaceId, String)> {
    let mut conn = pool.acquire().await.unwrap();
    let requests: Vec<_> = ids.iter().map(|id| (workspace, Some(*id))).collect();
    let found = resolve_agents(&mut conn, &requests).await.unwrap();
    let agents: Vec<AgentRef> = found
        .into_iter()
        .flatten()
        .map(|target| target.agent)
        .collect();
    let versions = agents::versions_all_workspaces(&mut conn, &agents)
        .await
        .unwrap();
    let mut names: Vec<_> = versions
        .into_iter()
        .map(|(agent, version)| (agent.workspace, version.definition.name))
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn a_workspace_is_born_with_a_default_agent_that_stays() {
    // A-3
    let pool = database().await;
    let home = workspace(&pool, "home").await;
    let born = default_agent(&pool, home).await;
    let agent = get(&pool, home, born.agent).await.unwrap();
    assert_eq!(
        (agent.template, agent.draft.name.as_str()),
        (Template::Default, "Assistant")
    );
    assert_eq!(
        (
            agent.published_version,
            agent.revision,
            agent.has_unpublished_changes
        ),
        (Some(1), 1, false)
    );

    let refused = lifecycle::delete(&pool, home, born.agent, None).await;
    assert!(
        matches!(refused, Err(EditError::DefaultIsKept)),
        "{refused:?}"
    );
    let forced = sqlx::query("update agents set deleted_at = now()")
        .execute(&pool)
        .await;
    assert!(
        forced
            .unwrap_err()
            .to_string()
            .contains("agents_default_is_kept"),
        "the database says so too"
    );
    assert_eq!(default_agent(&pool, home).await, born);
}

#[tokio::test]
async fn a_workspace_needs_a_free_well_formed_slug_and_a_name() {
    let pool = database().await;
    workspace(&pool, "home").await;
    let refusal = async |slug: &str, name: &str| {
        lifecycle::create_workspace(&pool, slug, name)
            .await
            .unwrap_err()
    };
    assert!(matches!(
        refusal("home", "Again").await,
        CreateWorkspaceError::SlugTaken(_)
    ));
    assert!(matches!(
        refusal("Not A Slug", "x").await,
        CreateWorkspaceError::BadSlug(_)
    ));
    for name in ["  ", &"x".repeat(101), "a\0b"] {
        assert!(
            matches!(refusal("other", name).await, CreateWorkspaceError::BadName),
            "{name:?}"
        );
    }
    let agents: i64 = sqlx::query_scalar("select count(*) from agents")
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!(agents, 1, "a refused workspace leaves nothing behind");
}

#[tokio::test]
async fn what_was_saved_is_read_back_digit_by_digit() {
    // A-1, A-4
    let pool = database().await;
    let home = workspace(&pool, "home").await;
    let config: Value = serde_json::from_str(
        r#"{"n": 123456789012345678901234567890.10, "list": [1, null, {"é": "\u2028"}], "auto_delegate": true}"#,
    )
    .unwrap();
    let written = definition(
        "All fields",
        json!({"instructions": "a\nb", "kind": "codeact", "tools": ["x"], "phases": [{"name": "P", "instructions": "i"}],
            "model": {"provider": "gemini", "temperature": 0.1, "reasoning": "high"}, "output_schema": {"type": "object"},
            "max_iterations": 9, "is_public": true, "config": config}),
    );
    let agent = create(&pool, home, &written).await;
    assert_eq!(agent.draft, written);
    assert_eq!(
        agent.draft.config["n"].to_string(),
        "123456789012345678901234567890.10"
    );
    assert_eq!(get(&pool, home, agent.id).await, Some(agent));
}

#[tokio::test]
async fn editing_changes_the_draft_and_publishing_makes_a_version() {
    // A-2
    let pool = database().await;
    let home = workspace(&pool, "home").await;
    let draft = lifecycle::create_draft(&pool, home, &public("Draft"))
        .await
        .unwrap();
    assert_eq!(
        (
            draft.published_version,
            draft.revision,
            draft.has_unpublished_changes
        ),
        (None, 1, true)
    );
    assert_eq!(
        target_names(&pool, home, &[draft.id]).await,
        [],
        "a draft can not be run"
    );

    let first = lifecycle::publish(&pool, home, draft.id, Some(1))
        .await
        .unwrap();
    assert_eq!(
        (
            first.published_version,
            first.revision,
            first.has_unpublished_changes
        ),
        (Some(1), 2, false)
    );
    let edited = lifecycle::patch(
        &pool,
        home,
        draft.id,
        2,
        &json!({"name": "New", "is_public": false}),
    )
    .await
    .unwrap();
    assert_eq!(
        (
            edited.published_version,
            edited.revision,
            edited.has_unpublished_changes
        ),
        (Some(1), 3, true)
    );
    let elsewhere = workspace(&pool, "elsewhere").await;
    for viewer in [home, elsewhere] {
        assert_eq!(
            target_names(&pool, viewer, &[draft.id]).await,
            [(home, "Draft".to_owned())],
            "the published one"
        );
    }

    let second = lifecycle::publish(&pool, home, draft.id, None)
        .await
        .unwrap();
    assert_eq!((second.published_version, second.revision), (Some(2), 4));
    assert_eq!(
        target_names(&pool, home, &[draft.id]).await,
        [(home, "New".to_owned())]
    );
    assert_eq!(
        target_names(&pool, elsewhere, &[draft.id]).await,
        [],
        "no longer public"
    );

    let key = |version| AgentRef {
        workspace: home,
        agent: draft.id,
        version,
    };
    let mut conn = pool.acquire().await.unwrap();
    let versions = agents::versions_all_workspaces(&mut conn, &[key(1), key(2), key(3)])
        .await
        .unwrap();
    assert_eq!(versions.len(), 2);
    assert_eq!(
        versions[&key(1)].definition,
        public("Draft"),
        "running tasks keep the version they started with"
    );
    assert_eq!(versions[&key(2)].definition.name, "New");
}

#[tokio::test]
async fn of_two_edits_of_one_revision_one_is_refused() {
    // A-1, H-47
    let pool = database().await;
    let home = workspace(&pool, "home").await;
    let agent = create(&pool, home, &helper("A")).await;
    for round in 0..100 {
        let revision = get(&pool, home, agent.id).await.unwrap().revision;
        let (name, tool) = (format!("Name {round}"), format!("tool_{round}"));
        let (renamed, equipped) = (json!({"name": name}), json!({"tools": [tool]}));
        let results = tokio::join!(
            lifecycle::patch(&pool, home, agent.id, revision, &renamed),
            lifecycle::patch(&pool, home, agent.id, revision, &equipped),
        );
        let now = get(&pool, home, agent.id).await.unwrap();
        assert_eq!(now.revision, revision + 1);
        match results {
            (Ok(_), Err(EditError::Stale { current }))
            | (Err(EditError::Stale { current }), Ok(_)) => {
                assert_eq!(current, revision + 1);
            }
            other => panic!("{other:?}"),
        }
        assert!(
            (now.draft.name == name) != (now.draft.tools == [tool]),
            "one of them, not a mixture"
        );
    }
    let invalid = lifecycle::patch(
        &pool,
        home,
        agent.id,
        101,
        &json!({"config": {"auto_delegate": 1}}),
    )
    .await;
    match invalid {
        Err(EditError::Invalid(error)) => assert_eq!(error.0[0].path, "config.auto_delegate"),
        other => panic!("{other:?}"),
    }
    let stale_publish = lifecycle::publish(&pool, home, agent.id, Some(7)).await;
    assert!(
        matches!(stale_publish, Err(EditError::Stale { current: 101 })),
        "{stale_publish:?}"
    );
}

#[tokio::test]
async fn another_workspaces_agent_is_as_good_as_none() {
    // P-5, H-39
    let pool = database().await;
    let (home, elsewhere) = (
        workspace(&pool, "home").await,
        workspace(&pool, "elsewhere").await,
    );
    for agent in [
        create(&pool, home, &helper("Private")).await,
        create(&pool, home, &public("Public")).await,
    ] {
        assert_eq!(get(&pool, elsewhere, agent.id).await, None);
        let patched = lifecycle::patch(&pool, elsewhere, agent.id, 1, &json!({"name": "Mine"}))
            .await
            .map(drop);
        let published = lifecycle::publish(&pool, elsewhere, agent.id, None)
            .await
            .map(drop);
        let deleted = lifecycle::delete(&pool, elsewhere, agent.id, None).await;
        for result in [patched, published, deleted] {
            assert!(matches!(result, Err(EditError::NotFound)), "{result:?}");
        }
        assert_eq!(get(&pool, home, agent.id).await, Some(agent));
    }
}

#[tokio::test]
async fn a_deleted_agent_is_gone_everywhere() {
    // H-46, D-10
    let pool = database().await;
    let (home, elsewhere) = (
        workspace(&pool, "home").await,
        workspace(&pool, "elsewhere").await,
    );
    let agent = create(&pool, home, &public("A")).await;
    lifecycle::delete(&pool, home, agent.id, Some(1))
        .await
        .unwrap();
    assert_eq!(get(&pool, home, agent.id).await, None);
    for viewer in [home, elsewhere] {
        assert_eq!(target_names(&pool, viewer, &[agent.id]).await, []);
    }
    let mut conn = pool.acquire().await.unwrap();
    assert!(
        agents::list(&mut conn, home, None, 10)
            .await
            .unwrap()
            .iter()
            .all(|other| other.id != agent.id)
    );
    assert_eq!(
        agents::roster_versions(&mut conn, &[elsewhere])
            .await
            .unwrap()
            .public,
        []
    );
    let again = lifecycle::delete(&pool, home, agent.id, None).await;
    assert!(matches!(again, Err(EditError::NotFound)), "{again:?}");
    let saved = lifecycle::patch(&pool, home, agent.id, 2, &json!({"name": "B"})).await;
    assert!(matches!(saved, Err(EditError::NotFound)), "{saved:?}");
    let key = AgentRef {
        workspace: home,
        agent: agent.id,
        version: 1,
    };
    assert_eq!(
        agents::versions_all_workspaces(&mut conn, &[key])
            .await
            .unwrap()
            .len(),
        1,
        "running tasks go on"
    );
}

#[tokio::test]
async fn pages_show_each_agent_once_while_more_are_added() {
    let pool = database().await;
    let home = workspace(&pool, "home").await;
    workspace(&pool, "elsewhere").await;
    let mut expected = vec![default_agent(&pool, home).await.agent];
    for n in 0..5 {
        expected.push(
            create(&pool, home, &helper(&format!("Z{}", 9 - n)))
                .await
                .id,
        );
    }
    let mut conn = pool.acquire().await.unwrap();
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let page = agents::list(&mut conn, home, after, 2).await.unwrap();
        let Some(last) = page.last() else { break };
        after = Some(last.id);
        seen.extend(page.iter().map(|agent| agent.id));
        if seen.len() == 2 {
            expected.push(create(&pool, home, &helper("Late")).await.id);
        }
    }
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn targets_are_the_own_agents_and_foreign_public_ones() {
    // A-22, A-24, D-10
    let pool = database().await;
    let (home, elsewhere) = (
        workspace(&pool, "home").await,
        workspace(&pool, "elsewhere").await,
    );
    let own = create(
        &pool,
        home,
        &definition("No profile, not listed", json!({})),
    )
    .await;
    let lent = create(&pool, elsewhere, &public("Lent")).await;
    let private = create(&pool, elsewhere, &helper("Private")).await;
    let draft = lifecycle::create_draft(&pool, elsewhere, &public("Draft"))
        .await
        .unwrap();
    let twin = create(&pool, home, &helper("Own twin")).await;
    insert_twin(&pool, elsewhere, twin.id, &public("Foreign twin")).await;
    let ids = [
        own.id,
        own.id,
        lent.id,
        private.id,
        draft.id,
        twin.id,
        AgentId::new(),
    ];
    let mut expected = [
        (home, "No profile, not listed"),
        (home, "Own twin"),
        (elsewhere, "Lent"),
    ]
    .map(|(at, name)| (at, name.to_owned()));
    expected.sort();
    assert_eq!(target_names(&pool, home, &ids).await, expected);
    assert_eq!(target_names(&pool, home, &[]).await, []);
}

const CATALOGUE: [ToolInfo<'static>; 2] = [
    ToolInfo {
        name: "delegate_tasks",
        default_enabled: true,
        delegates: true,
    },
    ToolInfo {
        name: "ask_user",
        default_enabled: true,
        delegates: false,
    },
];

async fn assemble(assembler: &Assembler, pool: &PgPool, keys: &[Key]) -> HashMap<Key, Assembly> {
    assembler
        .assemble_many(&mut pool.acquire().await.unwrap(), keys)
        .await
        .unwrap()
}

fn tools(assembly: &Assembly) -> Vec<&str> {
    let names = assembly.tools.iter().map(|tool| tool.name.as_str());
    names.collect()
}

/// Of an agent that may delegate.
fn listed(assembly: &Assembly) -> Vec<(&str, bool)> {
    let roster = assembly.roster.as_deref().unwrap();
    roster
        .iter()
        .map(|entry| (entry.name.as_str(), entry.public))
        .collect()
}

#[tokio::test]
async fn a_batch_is_assembled_with_what_is_published_at_the_moment() {
    // A-13, A-20 to A-25, D-54, T-9
    let pool = database().await;
    let (home, elsewhere) = (
        workspace(&pool, "home").await,
        workspace(&pool, "elsewhere").await,
    );
    let lead = default_agent(&pool, home).await;
    let quiet = create(
        &pool,
        home,
        &definition("Quiet", json!({"config": {"auto_delegate": false}})),
    )
    .await;
    let writer = create(&pool, home, &helper("Writer")).await;
    let lent = create(&pool, elsewhere, &public("Lent")).await;
    create(&pool, elsewhere, &helper("Private")).await;

    let version = |workspace, agent| AgentRef {
        workspace,
        agent,
        version: 1,
    };
    let key = |agent| Key {
        workspace: home,
        agent,
        depth: 0,
        delegation_disabled: false,
    };
    let top = key(lead);
    let deepest = Key { depth: 2, ..top };
    let forbidden = Key {
        delegation_disabled: true,
        ..top
    };
    let quiet = key(version(home, quiet.id));
    let lent_here = key(version(elsewhere, lent.id));
    let abroad = Key {
        workspace: elsewhere,
        ..lent_here
    };
    let unknown = key(AgentRef {
        version: 99,
        ..lead
    });
    let keys = [
        top, deepest, forbidden, quiet, lent_here, abroad, unknown, top,
    ];

    let assembler = Assembler::new(CATALOGUE.to_vec(), 2);
    let batch = assemble(&assembler, &pool, &keys).await;
    assert_eq!(batch.len(), 6, "one per distinct key that can be read");
    assert_eq!(tools(&batch[&top]), ["delegate_tasks", "ask_user"]);
    assert_eq!(listed(&batch[&top]), [("Lent", true), ("Writer", false)]);
    for key in [deepest, forbidden, quiet] {
        assert_eq!(
            (tools(&batch[&key]), &batch[&key].roster),
            (vec!["ask_user"], &None)
        );
    }
    assert_eq!(
        listed(&batch[&lent_here]),
        [("Writer", false)],
        "the roster is that of the task's workspace"
    );
    assert_eq!(listed(&batch[&abroad]), [("Private", false)]);
    assert_eq!(batch[&lent_here].definition.name, "Lent");

    // Everything has been read once; what changes afterwards is seen by the next batch all the same.
    let edit =
        json!({"name": "Author", "config": {"delegation_profile": {"description": "a\n- b"}}});
    lifecycle::patch(&pool, home, writer.id, 1, &edit)
        .await
        .unwrap();
    let same = assemble(&assembler, &pool, &[top]).await;
    assert_eq!(
        listed(&same[&top]),
        [("Lent", true), ("Writer", false)],
        "a draft is nobody's business"
    );
    lifecycle::publish(&pool, home, writer.id, None)
        .await
        .unwrap();
    lifecycle::delete(&pool, elsewhere, lent.id, None)
        .await
        .unwrap();
    let changed = assemble(&assembler, &pool, &[top]).await;
    assert_eq!(listed(&changed[&top]), [("Author", false)]);
    assert_eq!(
        changed[&top].roster.as_deref().unwrap()[0].description,
        "a b"
    );
    assert!(assemble(&assembler, &pool, &[]).await.is_empty());
}

#[tokio::test]
async fn one_unreadable_version_does_not_spoil_the_batch() {
    let pool = database().await;
    let home = workspace(&pool, "home").await;
    let lead = default_agent(&pool, home).await;
    let broken = create(&pool, home, &helper("Broken")).await;
    sqlx::query("update agent_versions set definition = '{\"name\": 5}' where agent_id = $1")
        .bind(broken.id.0)
        .execute(&pool)
        .await
        .unwrap();
    let key = |agent| Key {
        workspace: home,
        agent: AgentRef {
            workspace: home,
            agent,
            version: 1,
        },
        depth: 0,
        delegation_disabled: false,
    };
    let keys = [key(lead.agent), key(broken.id)];
    let batch = assemble(&Assembler::new(CATALOGUE.to_vec(), 3), &pool, &keys).await;
    assert_eq!(batch.keys().collect::<Vec<_>>(), [&keys[0]]);
    assert_eq!(listed(&batch[&keys[0]]), []);
}

#[tokio::test]
async fn the_demo_is_seeded_once_and_leaves_edits_alone() {
    let pool = database().await;
    let seeds = tokio::join!(seed_demo(&pool), seed_demo(&pool), seed_demo(&pool));
    let demo = seeds.0.unwrap();
    assert_eq!((seeds.1.unwrap(), seeds.2.unwrap()), (demo, demo));
    let mut conn = pool.acquire().await.unwrap();
    let team = agents::list(&mut conn, demo.workspace, None, 10)
        .await
        .unwrap();
    let mut names: Vec<&str> = team.iter().map(|agent| agent.draft.name.as_str()).collect();
    names.sort();
    assert_eq!(names, ["Lead", "Researcher", "Reviewer", "Writer"]);
    assert_eq!(default_agent(&pool, demo.workspace).await.agent, demo.lead);

    lifecycle::patch(
        &pool,
        demo.workspace,
        demo.writer,
        1,
        &json!({"name": "Poet"}),
    )
    .await
    .unwrap();
    lifecycle::delete(&pool, demo.workspace, demo.reviewer, None)
        .await
        .unwrap();
    assert_eq!(seed_demo(&pool).await.unwrap(), demo);
    assert_eq!(
        get(&pool, demo.workspace, demo.writer)
            .await
            .unwrap()
            .draft
            .name,
        "Poet"
    );
    assert_eq!(get(&pool, demo.workspace, demo.reviewer).await, None);
}
