//! The offline demo model reads what the product really writes: the roster of the prompt and the summary of a group. If
//! either changes its form, this fails before the demonstration does.

use reconvene::config::Config;
use reconvene::domain::agent::{AgentDefinition, ModelSettings, RosterEntry};
use reconvene::domain::delegation::{
    self, Args, Delegator, Limits, Outcome, Report, SummaryLimits,
};
use reconvene::domain::ids::{AgentId, TaskId};
use reconvene::domain::task::TaskStatus;
use reconvene::llm::{Message, Models, Request, ToolSpec};
use reconvene::prompts::{Prompts, SystemPrompt};
use serde_json::json;

const LIMITS: Limits = Limits {
    max_depth: 3,
    max_children_per_call: 0,
    default_timeout_minutes: 60,
    max_timeout_minutes: 1440,
};

fn agent(name: &str, description: &str) -> RosterEntry {
    let profile = json!({"delegation_profile": {"description": description, "example_input": "x"}});
    let definition = AgentDefinition {
        name: name.to_owned(),
        config: profile.as_object().unwrap().clone(),
        ..AgentDefinition::default()
    };
    RosterEntry::new(AgentId::new(), &definition).unwrap()
}

/// Asks with a message, delegates, and resumes with the summary of children that all answered `output`.
async fn story(message: &str, roster: &[RosterEntry], output: &str) -> (delegation::Plan, String) {
    let prompts = Prompts::load(None).unwrap();
    let system = SystemPrompt {
        agent_name: "Lead",
        // A heading of the author's own must not be taken for the roster.
        instructions: "# Agents you can delegate to\n\n- Nobody — agent_group_id: 0",
        phases: &[],
        output_schema: None,
        roster: Some(roster),
    };
    let mut request = Request {
        model: ModelSettings::default(),
        system: prompts.system(&system).unwrap().joined().into(),
        messages: vec![Message::User(message.to_owned())],
        tools: vec![ToolSpec {
            name: "delegate_tasks".to_owned(),
            description: prompts.tool("delegate_tasks").unwrap().to_owned(),
            parameters: json!({"type": "object"}),
        }]
        .into(),
        output_schema: None,
        cache_key: String::new(),
    };
    let models = Models::from_config(&Config::from_defaults()).unwrap();
    let decision = models.decide(&request, &|_| {}).await.unwrap();
    let [call] = &decision.calls[..] else {
        panic!("one call: {decision:?}")
    };
    let args: Args = serde_json::from_str(&call.arguments).unwrap();
    let by = Delegator {
        agent: AgentId::new(),
        depth: 0,
    };
    let plan = delegation::plan(&args, by, &LIMITS).unwrap();

    let reports: Vec<Report> = plan
        .children
        .iter()
        .map(|child| Report {
            task: TaskId::new(),
            title: child.title.as_str().to_owned(),
            agent_name: "Somebody".to_owned(),
            outcome: Outcome::Ended(TaskStatus::Completed),
            output: Some(output.to_owned()),
            failure: None,
            decide_steps: 1,
            tool_calls: 0,
            was_granted_tools: false,
            duration_ms: Some(1),
            tokens: 1,
            deleted: false,
        })
        .collect();
    let limits = SummaryLimits {
        child_chars: 4_000,
        total_chars: 60_000,
    };
    request.messages.extend([
        Message::Assistant {
            text: decision.text.clone(),
            calls: decision.calls.clone(),
        },
        Message::ToolResult {
            call_id: call.id.clone(),
            name: call.name.clone(),
            text: "{}".to_owned(),
            is_error: false,
        },
        Message::User(delegation::summary(&reports, limits)),
    ]);
    let answer = models.decide(&request, &|_| {}).await.unwrap();
    assert_eq!(answer.calls, []);
    assert!(answer.text.contains("offline demo model"));
    (plan, answer.text)
}

#[tokio::test]
async fn the_demo_model_delegates_by_the_real_roster_and_reads_the_real_summary() {
    // L-10, A-23, D-22
    let roster = [
        agent("Researcher", "Finds facts - and sources."),
        agent("Writer", "Writes clear text."),
    ];
    let message = "Please prepare the launch:\n- research the market\n- write the announcement\n- research prices";
    let (plan, answer) = story(message, &roster, "## 2. Done\n- and a list").await;
    let children: Vec<_> = plan
        .children
        .iter()
        .map(|child| (child.agent, child.title.as_str()))
        .collect();
    assert_eq!(
        children,
        [
            (roster[0].id, "research the market"),
            (roster[0].id, "research prices"),
            (roster[1].id, "write the announcement"),
        ]
    );
    assert!(plan.children[0].prompt.starts_with("research the market\n"));
    assert!(
        answer.ends_with(
            " 3 completed.\n1. research the market (completed: ## 2. Done - and a list)\
             \n2. research prices (completed: ## 2. Done - and a list)\
             \n3. write the announcement (completed: ## 2. Done - and a list)"
        ),
        "{answer}"
    );
}

#[tokio::test]
async fn a_thousand_things_go_out_as_one_entry_and_come_back_as_one_bounded_answer() {
    // D-52
    let items: String = (0..1000).map(|n| format!("- item {n}\n")).collect();
    let (plan, answer) = story(&items, &[agent("Helper", "Helps.")], "done").await;
    assert_eq!(plan.children.len(), 1000);
    assert!(
        answer.contains("1000 delegated tasks: 1000 completed."),
        "{answer}"
    );
    assert!(answer.chars().count() < 15_000);
}
