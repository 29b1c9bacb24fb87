//! A request as the Messages route takes it. Arguments of calls go back as the text the model wrote (H-31).
//!
//! The route is strict: roles alternate, so neighbours of one role are one message; results stand first in theirs; no text
//! is blank; ids of calls are of few characters and never repeat in a conversation, whoever made them (H-24).

use crate::domain::agent::Reasoning;
use crate::domain::decision::ToolCall;
use crate::domain::model_provider::ProviderKind;
use crate::llm::http::Ask;
use crate::llm::names::wire_name;
use crate::llm::schema::is_closed;
use crate::llm::{Message, kept};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::HashSet;

/// The route wants a limit. As much as every model allows that is still served.
const MAX_TOKENS: u32 = 32_000;
/// The least budget for thinking that the route takes.
const BUDGET_MIN: u32 = 1024;

#[derive(Serialize)]
pub struct Body<'a> {
    model: &'a str,
    max_tokens: u32,
    stream: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    system: Vec<Block<'a>>,
    messages: Vec<WireMessage<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<WireTool<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<Thinking>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_config: Option<OutputConfig<'a>>,
}

#[derive(Serialize)]
struct WireTool<'a> {
    name: &'a str,
    description: &'a str,
    input_schema: &'a Value,
}

#[derive(Serialize)]
struct WireMessage<'a> {
    role: &'static str,
    content: Vec<Block<'a>>,
}

#[derive(Serialize)]
struct Block<'a> {
    #[serde(flatten)]
    content: Content<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_control: Option<CacheControl>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Content<'a> {
    Text {
        text: &'a str,
    },
    Thinking {
        thinking: &'a str,
        signature: &'a str,
    },
    RedactedThinking {
        data: &'a str,
    },
    ToolUse {
        id: String,
        name: Cow<'a, str>,
        input: Box<RawValue>,
    },
    ToolResult {
        tool_use_id: String,
        #[serde(skip_serializing_if = "str::is_empty")]
        content: &'a str,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        is_error: bool,
    },
}

/// The prefix up to here is worth keeping until the next request.
#[derive(Serialize)]
struct CacheControl {
    r#type: &'static str,
}

const CACHED: Option<CacheControl> = Some(CacheControl {
    r#type: "ephemeral",
});

#[derive(Serialize)]
struct Thinking {
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    budget_tokens: Option<u32>,
}

#[derive(Serialize)]
struct OutputConfig<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    effort: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<OutputFormat<'a>>,
}

#[derive(Serialize)]
struct OutputFormat<'a> {
    r#type: &'static str,
    schema: &'a Value,
}

impl<'a> Body<'a> {
    pub fn new(ask: &Ask<'a>) -> serde_json::Result<Self> {
        let request = ask.request;
        let max_tokens = ask.max_output_tokens.unwrap_or(MAX_TOKENS);
        let mut history = History {
            is_thought_out: true,
            ..History::default()
        };
        for message in &request.messages {
            history.add(message, ask.model)?;
        }
        let History {
            mut messages,
            is_thought_out,
            ..
        } = history;
        if let Some(last) = messages.last_mut().and_then(|last| last.content.last_mut()) {
            last.cache_control = CACHED;
        }
        let generation = Generation::of(ask.model);
        let (thinking, effort) =
            generation.reasoning(request.model.reasoning, max_tokens, is_thought_out);
        // The route refuses a schema that is not closed.
        let schema = request.output_schema.as_deref();
        let schema =
            schema.filter(|schema| generation.takes_format(ask.model) && is_closed(schema));
        let format = schema.map(|schema| OutputFormat {
            r#type: "json_schema",
            schema,
        });
        let output_config = OutputConfig { effort, format };
        let system = (!request.system.trim().is_empty()).then(|| Block {
            content: Content::Text {
                text: &request.system,
            },
            // Tools come before it: they are part of what is kept.
            cache_control: CACHED,
        });
        Ok(Body {
            model: ask.model,
            max_tokens,
            stream: true,
            system: system.into_iter().collect(),
            messages,
            tools: request
                .tools
                .iter()
                .map(|tool| WireTool {
                    name: &tool.name,
                    description: &tool.description,
                    input_schema: &tool.parameters,
                })
                .collect(),
            // Its range ends at 1 here; beside thinking, and by newer models at all, it is refused.
            temperature: request
                .model
                .temperature
                .filter(|_| generation.takes_temperature() && thinking.is_none())
                .map(|temperature| temperature.min(1.0)),
            thinking,
            output_config: Some(output_config)
                .filter(|config| config.effort.is_some() || config.format.is_some()),
        })
    }
}

#[derive(Default)]
struct History<'a> {
    messages: Vec<WireMessage<'a>>,
    /// Ids as the model wrote them and as they are sent, of the last turn.
    calls: Vec<(&'a str, String)>,
    taken: HashSet<String>,
    /// The turn that is gone on with, if it is one with calls, has its thoughts.
    is_thought_out: bool,
}

impl<'a> History<'a> {
    fn add(&mut self, message: &'a Message, model: &str) -> serde_json::Result<()> {
        match message {
            Message::User(text) => self.push("user", text_block(text)),
            Message::ToolResult {
                call_id,
                text,
                is_error,
                ..
            } => {
                let known = self.calls.iter().find(|(id, _)| id == call_id);
                let id = known.map_or_else(|| call_id.clone(), |(_, sent)| sent.clone());
                let result = Content::ToolResult {
                    tool_use_id: id,
                    content: if text.trim().is_empty() { "" } else { text },
                    is_error: *is_error,
                };
                self.push("user", Some(result));
            }
            Message::Assistant { text, calls } => self.assistant(text, calls, model)?,
        }
        Ok(())
    }

    /// The blocks in the order in which the model wrote them, as far as it is known.
    fn assistant(
        &mut self,
        text: &'a str,
        calls: &'a [ToolCall],
        model: &str,
    ) -> serde_json::Result<()> {
        let mut rest = text;
        let mut blocks = Vec::new();
        let mut has_thoughts = false;
        for call in calls {
            for before in kept_before(call, model) {
                match before {
                    Before::Thinking {
                        thinking,
                        signature,
                    } => blocks.push(Content::Thinking {
                        thinking,
                        signature,
                    }),
                    Before::RedactedThinking { data } => {
                        blocks.push(Content::RedactedThinking { data });
                    }
                    Before::Text { bytes } => {
                        let (said, more) = rest.split_at_checked(bytes).unwrap_or((rest, ""));
                        blocks.extend(text_block(said));
                        rest = more;
                    }
                }
            }
            has_thoughts |= matches!(
                blocks.first(),
                Some(Content::Thinking { .. } | Content::RedactedThinking { .. })
            );
            // Without thoughts nothing is known of the order.
            let is_first = blocks.is_empty();
            if is_first {
                blocks.extend(text_block(std::mem::take(&mut rest)));
            }
            blocks.push(Content::ToolUse {
                id: String::new(),
                name: wire_name(&call.name),
                input: RawValue::from_string(call.arguments.clone())?,
            });
        }
        blocks.extend(text_block(rest));
        self.calls.clear();
        let mut ids = calls.iter().map(|call| call.id.as_str());
        for mut block in blocks {
            if let Content::ToolUse { id, .. } = &mut block {
                let given = ids.next().unwrap_or_default();
                *id = self.fresh(given);
                self.calls.push((given, id.clone()));
            }
            self.push("assistant", Some(block));
        }
        self.is_thought_out = has_thoughts || calls.is_empty();
        Ok(())
    }

    fn push(&mut self, role: &'static str, content: Option<Content<'a>>) {
        let Some(content) = content else { return };
        let block = Block {
            content,
            cache_control: None,
        };
        match self.messages.last_mut() {
            Some(last) if last.role == role => last.content.push(block),
            _ => self.messages.push(WireMessage {
                role,
                content: vec![block],
            }),
        }
    }

    /// An id that the route takes and that no earlier call has.
    fn fresh(&mut self, given: &str) -> String {
        let base = wire_name(given).into_owned();
        let mut id = base.clone();
        let mut copy = 2u32;
        while !self.taken.insert(id.clone()) {
            id = format!("{base}_{copy}");
            copy += 1;
        }
        id
    }
}

fn text_block(text: &str) -> Option<Content<'_>> {
    (!text.trim().is_empty()).then_some(Content::Text { text })
}

/// What the model wrote before a call, since the call before it. With thoughts, the route wants the turn back as it was.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Before<'a> {
    Thinking {
        thinking: &'a str,
        signature: &'a str,
    },
    RedactedThinking {
        data: &'a str,
    },
    /// So much of the message's text.
    Text {
        bytes: usize,
    },
}

fn kept_before<'a>(call: &'a ToolCall, model: &str) -> Vec<Before<'a>> {
    let kept = kept::of(call, ProviderKind::Anthropic, model);
    let blocks = kept.and_then(Value::as_array).into_iter().flatten();
    blocks
        .filter_map(|block| Before::deserialize(block).ok())
        .collect()
}

/// What a model understands of thinking, told by its name; the route tells nobody.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Generation {
    /// Another's model behind the same form: as the form was when it became common.
    Foreign,
    /// A Claude whose name has no number: as today's are.
    Newest,
    Version(u32, u32),
}

impl Generation {
    fn of(model: &str) -> Self {
        let model = model.to_ascii_lowercase();
        if !model.contains("claude") {
            return Self::Foreign;
        }
        let mut numbers = model
            .split(|c: char| !c.is_ascii_alphanumeric())
            // What is longer is a date.
            .filter(|word| word.len() <= 2)
            .filter_map(|word| word.parse::<u32>().ok());
        match numbers.next() {
            Some(major) => Self::Version(major, numbers.next().unwrap_or(0)),
            None => Self::Newest,
        }
    }

    /// Whether it decides itself how much to think; older ones are given a budget.
    fn is_adaptive(self) -> bool {
        match self {
            Self::Foreign => false,
            Self::Newest => true,
            Self::Version(major, minor) => (major, minor) >= (4, 6),
        }
    }

    fn takes_temperature(self) -> bool {
        match self {
            Self::Foreign => true,
            Self::Newest => false,
            Self::Version(major, minor) => (major, minor) < (4, 7),
        }
    }

    /// Whether it thinks unless told otherwise.
    fn always_thinks(self) -> bool {
        match self {
            Self::Foreign => false,
            Self::Newest => true,
            Self::Version(major, _) => major >= 5,
        }
    }

    /// Whether it can be held to a schema while it writes; of other names nothing is known.
    fn takes_format(self, model: &str) -> bool {
        let model = model.to_ascii_lowercase();
        let is_known = ["opus", "sonnet", "haiku"]
            .iter()
            .any(|name| model.contains(name));
        is_known
            && match self {
                Self::Foreign => false,
                Self::Newest => true,
                Self::Version(major, minor) => (major, minor) >= (4, 5),
            }
    }

    fn reasoning(
        self,
        wanted: Option<Reasoning>,
        max_tokens: u32,
        is_thought_out: bool,
    ) -> (Option<Thinking>, Option<&'static str>) {
        let (effort, budget) = match wanted {
            None => return (None, None),
            // Not all of those who think by themselves can be told not to; all can be told to do little.
            Some(Reasoning::Disabled) => {
                return (None, self.always_thinks().then_some("low"));
            }
            Some(Reasoning::Low) => ("low", 2048),
            Some(Reasoning::Medium) => ("medium", 8192),
            Some(Reasoning::High) => ("high", 16_000),
        };
        if self.is_adaptive() {
            let adaptive = Thinking {
                r#type: "adaptive",
                budget_tokens: None,
            };
            return (Some(adaptive), Some(effort));
        }
        // The budget is part of the limit, and half of it is for the answer. A turn that began without thoughts, such as
        // another model's, can not be gone on with by one that has some.
        let budget = budget.min(max_tokens / 2);
        let enabled = Thinking {
            r#type: "enabled",
            budget_tokens: Some(budget),
        };
        let fits = budget >= BUDGET_MIN && is_thought_out;
        (fits.then_some(enabled), None)
    }
}
