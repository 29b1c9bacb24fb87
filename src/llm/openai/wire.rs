//! A request as the chat completions route takes it. Arguments of calls go back as the text the model wrote (H-31).

use crate::domain::agent::Reasoning;
use crate::domain::decision::ToolCall;
use crate::llm::Message;
use crate::llm::http::Ask;
use crate::llm::names::wire_name;
use crate::llm::schema::is_closed;
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
    response_format: Option<ResponseFormat<'a>>,
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
            reasoning_effort: request
                .model
                .reasoning
                .and_then(|reasoning| Generation::of(ask.model, is_openai).effort(reasoning)),
            // Other servers hold all that the model writes to the schema, its calls too.
            response_format: request
                .output_schema
                .as_deref()
                .filter(|_| is_openai || request.tools.is_empty())
                .map(ResponseFormat::new),
            prompt_cache_key: Some(request.cache_key.as_str())
                .filter(|key| is_openai && !key.is_empty()),
        }
    }
}

#[derive(Serialize)]
struct ResponseFormat<'a> {
    r#type: &'static str,
    json_schema: AnswerSchema<'a>,
}

#[derive(Serialize)]
struct AnswerSchema<'a> {
    name: &'static str,
    schema: &'a serde_json::Value,
    /// The route refuses a schema with this that is not closed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    strict: bool,
}

impl<'a> ResponseFormat<'a> {
    fn new(schema: &'a serde_json::Value) -> Self {
        ResponseFormat {
            r#type: "json_schema",
            json_schema: AnswerSchema {
                name: "answer",
                schema,
                strict: is_closed(schema),
            },
        }
    }
}

/// What a model understands of thinking, told by its name; the route tells nobody, and refuses what a model does not know.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Generation {
    /// Another's model behind the same form, or a name that says nothing.
    Foreign,
    /// Models that only answer.
    Plain,
    /// The o series: they always think.
    Always,
    /// GPT-5: least is `minimal`.
    Minimal,
    /// 5.1 and later can be told not to.
    Newest,
}

impl Generation {
    fn of(model: &str, is_openai: bool) -> Self {
        let model = model.to_ascii_lowercase();
        let version = model
            .strip_prefix("gpt-")
            .map(|rest| rest.split('-').next().unwrap_or_default());
        let is_series = |letter| {
            model
                .strip_prefix(letter)
                .is_some_and(|rest: &str| rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        match version {
            _ if !is_openai => Self::Foreign,
            _ if is_series('o') => Self::Always,
            _ if model.contains("chat") => Self::Plain,
            Some("5") => Self::Minimal,
            Some(version) if version.starts_with(['3', '4']) => Self::Plain,
            Some(_) => Self::Newest,
            None => Self::Foreign,
        }
    }

    fn effort(self, reasoning: Reasoning) -> Option<&'static str> {
        match (self, reasoning) {
            (Self::Plain, _) => None,
            (Self::Foreign | Self::Newest, Reasoning::Disabled) => Some("none"),
            (Self::Minimal, Reasoning::Disabled) => Some("minimal"),
            (Self::Always, Reasoning::Disabled) => Some("low"),
            (_, Reasoning::Low) => Some("low"),
            (_, Reasoning::Medium) => Some("medium"),
            (_, Reasoning::High) => Some("high"),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::agent::ModelSettings;
    use crate::llm::{Request, ToolSpec};
    use serde_json::{Value, json};

    fn body(is_openai: bool, tools: bool, schema: Option<Value>) -> Value {
        let tool = ToolSpec {
            name: "t".into(),
            description: "T.".into(),
            parameters: json!({}),
        };
        let request = Request {
            model: ModelSettings::default(),
            system: "s".into(),
            messages: vec![],
            tools: tools.then_some(tool).into_iter().collect(),
            output_schema: schema.map(Into::into),
            cache_key: String::new(),
        };
        let ask = Ask {
            request: &request,
            model: "m",
            max_output_tokens: None,
        };
        serde_json::to_value(Body::new(&ask, is_openai)).unwrap()
    }

    // T-16, L-10
    #[test]
    fn a_schema_is_sent_where_it_leaves_the_calls_alone() {
        let closed = json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"],
            "additionalProperties": false});
        let open = json!({"type": "object"});
        let strict = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": closed, "strict": true}});
        let loose =
            json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": open}});
        for (is_openai, tools, schema, expected) in [
            (true, true, Some(&closed), &strict),
            (true, true, Some(&open), &loose),
            (false, false, Some(&closed), &strict),
            (false, true, Some(&closed), &Value::Null),
            (true, true, None, &Value::Null),
        ] {
            let body = body(is_openai, tools, schema.cloned());
            assert_eq!(&body["response_format"], expected, "{is_openai} {tools}");
        }
    }

    // L-10
    #[test]
    fn a_name_tells_how_a_model_is_told_to_think() {
        for (model, is_openai, disabled, high) in [
            ("gpt-5", true, Some("minimal"), Some("high")),
            ("gpt-5-mini-2025-08-07", true, Some("minimal"), Some("high")),
            ("gpt-5.1", true, Some("none"), Some("high")),
            ("gpt-6-x", true, Some("none"), Some("high")),
            ("o3-mini", true, Some("low"), Some("high")),
            ("o4", true, Some("low"), Some("high")),
            ("gpt-4o", true, None, None),
            ("gpt-4.1-nano", true, None, None),
            ("gpt-3.5-turbo", true, None, None),
            ("gpt-5-chat-latest", true, None, None),
            ("ft:other", true, Some("none"), Some("high")),
            ("gpt-4o", false, Some("none"), Some("high")),
        ] {
            let generation = Generation::of(model, is_openai);
            let told = [Reasoning::Disabled, Reasoning::High].map(|r| generation.effort(r));
            assert_eq!(told, [disabled, high], "{model}");
        }
    }
}
