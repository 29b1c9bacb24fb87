//! Carries out what the code of a `run_code` call asks for (L-5): its calls are judged and made as the agent's own are, one
//! after another, with the agent's tools.
//!
//! What would make the task wait is refused, since no code waits over a restart. A delegation answers at once, and is waited
//! for when the code has ended: its group is there by then, and its children are started with the code's result (S-3).
//! Code is not run again after a crash, since nobody knows which of its calls were made.

use super::{
    Shared,
    context::Context,
    turn::{Executed, OUTCOME_UNKNOWN, carry_out, judge_call, patiently, secrets, without},
};
use crate::{
    domain::{
        decision::{ToolCall, clean_json, parse_arguments},
        grants::RUN_CODE,
        ids::StepId,
        step::Claim,
        text::cut_chars,
    },
    store,
    tools::{
        Granted, ToolOutcome,
        run_code::{Called, Step},
    },
};
use serde_json::{Map, Value, json};
use std::{pin::Pin, sync::Arc};
use uuid::Uuid;

/// Of what was printed before a failure.
const OUTPUT_CHARS_TOLD: usize = 10_000;

type Result<T> = std::result::Result<T, Arc<store::Error>>;
/// Calls of code are made as those of turns, which may be code.
type Executing<'a> = Pin<Box<dyn Future<Output = Result<Option<Executed>>> + Send + 'a>>;

pub fn is_code(name: &str, context: &Context) -> bool {
    let tool = context.tools.iter().find(|tool| tool.name == name);
    tool.is_some_and(|tool| tool.base == RUN_CODE)
}

/// Of code that an earlier attempt had begun, what it had delegated: that is started all the same (D-26).
pub fn interrupted(delegated: Executed) -> Executed {
    Executed {
        text: format!("{OUTCOME_UNKNOWN} It had delegated: {}", delegated.text),
        is_error: true,
        ..delegated
    }
}

pub fn run<'a>(
    shared: &'a Arc<Shared>,
    context: &'a Context,
    claim: &'a Claim,
    code: String,
) -> Executing<'a> {
    Box::pin(async move {
        if claim.attempt > 1 {
            return Ok(Some(Executed::error(OUTCOME_UNKNOWN.into())));
        }
        let calls = Calls {
            shared,
            context,
            claim,
            made: Map::new(),
            count: 0,
            delegated: None,
        };
        calls.of(&code).await
    })
}

/// What the code is told: the result, or what went wrong.
type Answer = std::result::Result<String, String>;

#[derive(Clone, Copy)]
enum Kind {
    Refused,
    Made,
    Delegated,
}

/// The calls of one run.
struct Calls<'a> {
    shared: &'a Arc<Shared>,
    context: &'a Context,
    claim: &'a Claim,
    /// How many, by tool.
    made: Map<String, Value>,
    count: u32,
    delegated: Option<Executed>,
}

impl Calls<'_> {
    async fn of(mut self, code: &str) -> Result<Option<Executed>> {
        let functions = self.context.tools.iter().map(function).collect();
        let started = self.shared.sandbox.start(code, functions).await;
        let mut running = match started {
            Ok(running) => running,
            Err(error) => {
                tracing::warn!(%error, "the sandbox of run_code can not be started");
                let told =
                    "Code can not be run here at the moment. Go on without it, or tell the user.";
                return Ok(Some(Executed::error(told.into())));
            }
        };
        loop {
            match running.next().await {
                Step::Call(called) => match self.make(called).await? {
                    Some(answer) => running.answer(&answer).await,
                    None => return Ok(None),
                },
                Step::Returned { result, output } => {
                    return Ok(Some(self.returned(result, output)));
                }
                Step::Failed { error, output } => return Ok(Some(self.failed(&error, &output))),
            }
        }
    }

    /// `None`: the claim no longer holds.
    async fn make(&mut self, called: Called) -> Result<Option<Answer>> {
        let tools = &self.context.tools;
        let tool = tools.iter().find(|tool| function(tool) == called.function);
        let name = tool.map_or(called.function.as_str(), |tool| tool.name.as_str());
        let arguments = Value::Object(called.arguments).to_string();
        let arguments = match parse_arguments(Some(&arguments)) {
            Ok(arguments) => arguments,
            Err(fault) => return Ok(Some(Err(fault))),
        };
        let call = ToolCall {
            id: String::new(),
            name: name.to_owned(),
            arguments,
            invalid: None,
            provider_data: None,
        };
        let key = self.key();
        // Were the database's absence told upwards, all of the code would be run again.
        let (kind, executed) = match patiently(self.shared, || self.make_once(&call, key)).await? {
            (_, None) => return Ok(None),
            (kind, Some(executed)) => (kind, executed),
        };
        if let Kind::Made | Kind::Delegated = kind {
            let made = self.made.entry(name.to_owned()).or_insert(0.into());
            *made = (made.as_u64().unwrap_or_default() + 1).into();
        }
        let answer = match executed.is_error {
            true => Err(executed.text.clone()),
            false => Ok(executed.text.clone()),
        };
        if let (Kind::Delegated, Ok(_)) = (kind, &answer) {
            self.delegated = Some(executed);
        }
        Ok(Some(answer))
    }

    async fn make_once(&self, call: &ToolCall, key: StepId) -> Result<(Kind, Option<Executed>)> {
        let (shared, context, claim) = (self.shared, self.context, self.claim);
        let refused = |why| Ok((Kind::Refused, Some(Executed::error(why))));
        let secrets = match secrets(shared, context, claim, &call.name).await? {
            Ok(secrets) => secrets,
            Err(reason) => return refused(reason),
        };
        let outcome = judge_call(shared, context, call, &secrets);
        if let Some(refusal) = self.refusal(&call.name, &outcome) {
            return refused(refusal);
        }
        let kind = match outcome {
            ToolOutcome::TellModel(_) => Kind::Refused,
            ToolOutcome::Delegate(_) => Kind::Delegated,
            ToolOutcome::Http(_) | ToolOutcome::ReadSubtask { .. } => Kind::Made,
            // Refused above.
            ToolOutcome::Wait(_) | ToolOutcome::Code(_) => Kind::Refused,
        };
        let executed = carry_out(shared, context, claim, key, outcome).await?;
        Ok((kind, executed.map(|executed| without(&secrets, executed))))
    }

    fn refusal(&self, name: &str, outcome: &ToolOutcome) -> Option<String> {
        match outcome {
            ToolOutcome::Wait(_) => Some(format!(
                "{name} makes you wait, and can not be called from code. End the code and call it yourself."
            )),
            ToolOutcome::Code(_) => Some(format!("{name} can not be called from code.")),
            ToolOutcome::Delegate(_) if self.delegated.is_some() => Some(format!(
                "{name} can be called once from code: give it all `tasks` at once, or call it yourself when the code has ended."
            )),
            ToolOutcome::Delegate(_)
            | ToolOutcome::TellModel(_)
            | ToolOutcome::Http(_)
            | ToolOutcome::ReadSubtask { .. } => None,
        }
    }

    /// Another one for each call, and the same for the same call.
    fn key(&mut self) -> StepId {
        self.count += 1;
        let count = self.count.to_be_bytes();
        StepId(Uuid::new_v5(&self.claim.step.0, &count))
    }

    fn returned(self, result: Value, output: String) -> Executed {
        let mut told = json!({"result": result});
        if !output.is_empty() {
            told["output"] = output.into();
        }
        if !self.made.is_empty() {
            told["calls"] = self.made.into();
        }
        Executed {
            start: self.delegated.map(|made| made.start).unwrap_or_default(),
            ..Executed::ok(clean_json(&told.to_string()).into_owned())
        }
    }

    /// What the code has done until then stays done.
    fn failed(self, error: &str, output: &str) -> Executed {
        let mut told = error.trim_end().to_owned();
        if !self.made.is_empty() {
            let made = Value::Object(self.made);
            told.push_str(&format!(
                "\n\nCalls made before, which are not undone: {made}"
            ));
        }
        if let Some(made) = &self.delegated {
            told.push_str(&format!("\n\nDelegated before: {}", made.text));
        }
        if !output.is_empty() {
            let shown = cut_chars(output, OUTPUT_CHARS_TOLD);
            told.push_str(&format!("\n\nOutput until then:\n{shown}"));
        }
        Executed {
            start: self.delegated.map(|made| made.start).unwrap_or_default(),
            ..Executed::error(told)
        }
    }
}

/// The tool's name as Python can write it.
fn function(tool: &Granted) -> String {
    let letter = |c: char| match c {
        c if c.is_ascii_alphanumeric() => c,
        _ => '_',
    };
    tool.name.chars().map(letter).collect()
}
