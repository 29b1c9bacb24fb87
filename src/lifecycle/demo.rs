//! The workspace "demo": a lead who delegates, and three agents to delegate to. `reconvene dev` shows the product with it.
//!
//! Made once: what is there already, edited or deleted by somebody, is left alone. The agents have fixed ids within their
//! workspace, so that two processes that start together make one set.

use super::agents::{CreateWorkspaceError, definition, insert_published, insert_workspace};
use crate::domain::agent::{AgentDefinition, Template};
use crate::domain::ids::{AgentId, WorkspaceId};
use crate::store::{self, workspaces};
use serde_json::json;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

const SLUG: &str = "demo";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demo {
    pub workspace: WorkspaceId,
    /// The default agent of the workspace.
    pub lead: AgentId,
    pub researcher: AgentId,
    pub writer: AgentId,
    pub reviewer: AgentId,
}

/// The demo workspace, made if it is not there.
pub async fn seed_demo(pool: &PgPool) -> Result<Demo, store::Error> {
    let mut tx = store::begin(pool).await?;
    let workspace = match insert_workspace(&mut tx, SLUG, "Demo", &lead()).await {
        Ok(workspace) => workspace,
        Err(CreateWorkspaceError::SlugTaken(_)) => existing(&mut tx).await?,
        Err(CreateWorkspaceError::Store(error)) => return Err(error),
        Err(CreateWorkspaceError::BadSlug(_) | CreateWorkspaceError::BadName) => {
            unreachable!("slug and name of the demo are constants, and tested")
        }
    };
    let default = store::tasks::resolve_agents(&mut tx, &[(workspace, None)]).await?;
    let lead = default.into_iter().flatten().next();
    let lead = lead
        .ok_or_else(|| corrupt("the demo workspace has no default agent"))?
        .agent
        .agent;
    let researcher = seed(&mut tx, workspace, "researcher", &researcher()).await?;
    let writer = seed(&mut tx, workspace, "writer", &writer()).await?;
    let reviewer = seed(&mut tx, workspace, "reviewer", &reviewer()).await?;
    tx.commit().await?;
    Ok(Demo {
        workspace,
        lead,
        researcher,
        writer,
        reviewer,
    })
}

async fn existing(conn: &mut PgConnection) -> Result<WorkspaceId, store::Error> {
    let workspace = workspaces::by_slug(conn, SLUG).await?;
    Ok(workspace
        .ok_or_else(|| corrupt("the slug \"demo\" belongs to a deleted workspace"))?
        .id)
}

fn corrupt(reason: &str) -> store::Error {
    store::Error::Corrupt {
        table: "workspaces",
        reason: reason.to_owned(),
    }
}

async fn seed(
    conn: &mut PgConnection,
    workspace: WorkspaceId,
    role: &str,
    agent: &AgentDefinition,
) -> Result<AgentId, store::Error> {
    let id = AgentId(Uuid::new_v5(
        &workspace.0,
        format!("reconvene/demo/{role}").as_bytes(),
    ));
    insert_published(conn, workspace, id, Template::Custom, agent).await?;
    Ok(id)
}

fn lead() -> AgentDefinition {
    definition(
        "Lead",
        "You lead a small team and are the one who answers the user.\n\
         For a small question, answer yourself. For anything with several parts, split it and delegate: choose for each \
         part the agent whose description fits best, and delegate parts that do not need each other's results in one call, \
         so that they are worked on at the same time. An agent sees only the prompt you give it: say what you want, give all \
         facts it needs, and say what form the result should have. When parts build on one another, delegate the next one \
         when you have the results of the first.\n\
         When everybody is done, write one consolidated answer: what was found or made, in the user's language, without \
         repeating yourself and without telling how the work was split. Resolve contradictions, or name them. If a part \
         failed, say which and what is missing because of it.",
        json!({"delegation_profile": {
            "description": "Plans work with several parts, has the parts done by specialists, and returns one consolidated answer.",
            "example_input": "Prepare a one-page briefing on heat pumps for old houses: research costs and subsidies, write it, have it reviewed.",
        }}),
    )
}

fn researcher() -> AgentDefinition {
    definition(
        "Researcher",
        "You collect and check facts for a colleague who sees only your final answer.\n\
         Work from what the task gives you, from your tools if you have any, and from what you know. Answer with the facts \
         first, most important first, as short bullets with figures, dates and names. Mark each fact you are not sure of, \
         and say what it would take to be sure. Never invent a source or a number; an honest gap is a good result. Do not \
         ask back: state the assumption you made and go on.",
        json!({"auto_delegate": false, "delegation_profile": {
            "description": "Collects and checks facts on one topic: figures, dates, names, open questions, each marked with how certain it is.",
            "example_input": "What does replacing a gas boiler by a heat pump cost in an unrenovated house of 1960, and which subsidies exist?",
        }}),
    )
}

fn writer() -> AgentDefinition {
    definition(
        "Writer",
        "You write texts for a colleague: briefings, summaries, e-mails, announcements.\n\
         Use only the facts in the task; where one is missing, leave a clearly marked gap instead of inventing it. Put the \
         point first, use plain words and short sentences, and keep to the form, length, tone and language asked for (if \
         none is named: the language of the task, at most 300 words). Answer with the finished text only. Do not ask back.",
        json!({"auto_delegate": false, "delegation_profile": {
            "description": "Writes a finished text (briefing, summary, e-mail, announcement) from facts that it is given.",
            "example_input": "Write a briefing of 200 words for house owners from these facts: …",
        }}),
    )
}

fn reviewer() -> AgentDefinition {
    definition(
        "Reviewer",
        "You review a text or a plan for a colleague before it goes out.\n\
         Look for what is wrong, missing, contradictory, unclear or unsupported, in this order. Answer with a verdict in one \
         line (`ready`, `ready with changes`, `not ready`), then the findings, worst first, each with the place, the \
         problem and a concrete correction. Do not list matters of taste, and do not rewrite the whole. If there is nothing \
         to correct, say so in one line. Do not ask back.",
        json!({"auto_delegate": false, "delegation_profile": {
            "description": "Reviews a text or plan: a verdict, then errors, gaps and contradictions with concrete corrections.",
            "example_input": "Review this briefing for factual errors and gaps; its readers are house owners: …",
        }}),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_agents_would_pass_as_an_authors_own_and_are_listed() {
        for agent in [lead(), researcher(), writer(), reviewer()] {
            let read = AgentDefinition::parse(&serde_json::to_value(&agent).unwrap());
            assert_eq!(read.as_ref(), Ok(&agent));
            assert!(agent.profile().is_some() && agent.accepts_delegation());
        }
        assert!(lead().may_delegate() && !writer().may_delegate());
    }
}
