//! A request as the chat completions route takes it. Arguments of calls go back as the text the model wrote (H-31).

use crate::domain::agent::Reasoning;
use crate::domain::decision::ToolCall;
use crate::llm::Message;
use crate::llm::http::Ask;
use crate::llm::names::wire_name;
use serde::Serialize;
use std::borrow::Cow;

#[derive(Serialize)]
pub struct Body<'a> {
    model: &'a str,
    messages: Vec<WireMessage<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<WireTool<'a>>,
    stream: bool,
    stream_options: StreamOptions,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_effort: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_cache_key: Option<&'a str>,
}

impl<'a> Body<'a> {
    /// `is_openai`: the parameters that only OpenAI knows are sent, since others refuse what they do not know.
    pub fn new(ask: &Ask<'a>, is_openai: bool) -> Self {
        let request = ask.request;
        let limit = ask.max_output_tokens;
        let system = WireMessage::System {
            content: &request.system,
        };
        let system = (!request.system.is_empty()).then_some(system);
        Body {
            model: ask.model,
            messages: system
                .into_iter()
                .chain(request.messages.iter().map(wire_message))
                .collect(),
            tools: request
                .tools
                .iter()
                .map(|tool| WireTool {
                    r#type: "function",
                    function: WireFunction {
                        name: &tool.name,
                        description: &tool.description,
                        parameters: &tool.parameters,
                    },
                })
                .collect(),
            stream: true,
            stream_options: StreamOptions {
                include_usage: true,
            },
            temperature: request.model.temperature,
            // OpenAI's newer models refuse the old name, other servers do not know the new one.
            max_completion_tokens: limit.filter(|_| is_openai),
            max_tokens: limit.filter(|_| !is_openai),
            reasoning_effort: request.model.reasoning.map(|reasoning| match reasoning {
                Reasoning::Disabled => "none",
                Reasoning::Low => "low",
                Reasoning::Medium => "medium",
                Reasoning::High => "high",
            }),
            prompt_cache_key: Some(request.cache_key.as_str())
                .filter(|key| is_openai && !key.is_empty()),
        }
    }
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
struct WireTool<'a> {
    r#type: &'static str,
    function: WireFunction<'a>,
}

#[derive(Serialize)]
struct WireFunction<'a> {
    name: &'a str,
    description: &'a str,
    parameters: &'a serde_json::Value,
}

#[derive(Serialize)]
#[serde(tag = "role", rename_all = "lowercase")]
enum WireMessage<'a> {
    System {
        content: &'a str,
    },
    User {
        content: &'a str,
    },
    Assistant {
        content: Option<&'a str>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<WireCall<'a>>,
    },
    Tool {
        tool_call_id: &'a str,
        content: Cow<'a, str>,
    },
}

#[derive(Serialize)]
struct WireCall<'a> {
    id: &'a str,
    r#type: &'static str,
    function: WireCalled<'a>,
}

#[derive(Serialize)]
struct WireCalled<'a> {
    name: Cow<'a, str>,
    arguments: &'a str,
}

fn wire_message(message: &Message) -> WireMessage<'_> {
    match message {
        Message::User(text) => WireMessage::User { content: text },
        Message::Assistant { text, calls } => WireMessage::Assistant {
            content: Some(text.as_str()).filter(|text| !text.is_empty() || calls.is_empty()),
            tool_calls: calls.iter().map(wire_call).collect(),
        },
        Message::ToolResult {
            call_id,
            text,
            is_error,
            ..
        } => WireMessage::Tool {
            tool_call_id: call_id,
            content: if *is_error && !text.starts_with("Error") {
                Cow::Owned(format!("Error: {text}"))
            } else {
                Cow::Borrowed(text)
            },
        },
    }
}

fn wire_call(call: &ToolCall) -> WireCall<'_> {
    WireCall {
        id: &call.id,
        r#type: "function",
        function: WireCalled {
            name: wire_name(&call.name),
            arguments: &call.arguments,
        },
    }
}
