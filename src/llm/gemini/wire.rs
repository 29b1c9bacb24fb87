//! A request as `generateContent` takes it. Arguments of calls go back as the text the model wrote (H-31).
//!
//! The results of a turn stand in one content of their own, directly after its calls and as many as those. A call comes
//! back with the signature it was given; without one, newer models refuse the conversation.

use crate::domain::agent::Reasoning;
use crate::domain::decision::ToolCall;
use crate::domain::model_provider::ProviderKind;
use crate::llm::http::Ask;
use crate::llm::names::wire_name;
use crate::llm::{Message, kept};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// Stands in for the signature of a call that another model made: the API's own word for "do not check".
const UNSIGNED: &str = "skip_thought_signature_validator";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Body<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    system_instruction: Option<Content<'a>>,
    contents: Vec<Content<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tools<'a>>,
    generation_config: GenerationConfig<'a>,
}

#[derive(Serialize)]
struct Content<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    parts: Vec<Part<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
enum Part<'a> {
    Text(&'a str),
    #[serde(untagged)]
    Call {
        #[serde(rename = "functionCall")]
        call: FunctionCall<'a>,
        #[serde(rename = "thoughtSignature", skip_serializing_if = "Option::is_none")]
        signature: Option<&'a str>,
    },
    #[serde(untagged)]
    Result {
        #[serde(rename = "functionResponse")]
        result: FunctionResponse<'a>,
    },
}

#[derive(Serialize)]
struct FunctionCall<'a> {
    id: &'a str,
    name: String,
    args: Box<RawValue>,
}

#[derive(Serialize)]
struct FunctionResponse<'a> {
    id: &'a str,
    name: String,
    response: Response<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Response<'a> {
    Output(&'a str),
    Error(&'a str),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Tools<'a> {
    function_declarations: Vec<FunctionDeclaration<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FunctionDeclaration<'a> {
    name: &'a str,
    description: &'a str,
    parameters_json_schema: &'a Value,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct GenerationConfig<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_output_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking_config: Option<ThinkingConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_mime_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_json_schema: Option<&'a Value>,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
enum ThinkingConfig {
    ThinkingLevel(&'static str),
    ThinkingBudget(u32),
}

impl<'a> Body<'a> {
    pub fn new(ask: &Ask<'a>) -> serde_json::Result<Self> {
        let request = ask.request;
        let generation = Generation::of(ask.model);
        let schema = request.output_schema.as_deref();
        let schema = schema.filter(|_| generation.takes_schema(!request.tools.is_empty()));
        let mut contents: Vec<Content<'a>> = Vec::new();
        for message in &request.messages {
            let (role, parts) = match message {
                Message::User(text) => ("user", text_part(text).into_iter().collect()),
                Message::Assistant { text, calls } => {
                    let mut parts: Vec<_> = text_part(text).into_iter().collect();
                    for (at, call) in calls.iter().enumerate() {
                        parts.push(call_part(call, at == 0, ask.model, generation)?);
                    }
                    ("model", parts)
                }
                Message::ToolResult {
                    call_id,
                    name,
                    text,
                    is_error,
                } => ("user", vec![result_part(call_id, name, text, *is_error)]),
            };
            add(&mut contents, role, parts);
        }
        let declarations: Vec<_> = request
            .tools
            .iter()
            .map(|tool| FunctionDeclaration {
                name: &tool.name,
                description: &tool.description,
                parameters_json_schema: &tool.parameters,
            })
            .collect();
        let tools = Tools {
            function_declarations: declarations,
        };
        Ok(Body {
            system_instruction: text_part(&request.system).map(|text| Content {
                role: None,
                parts: vec![text],
            }),
            contents,
            tools: Some(tools)
                .filter(|tools| !tools.function_declarations.is_empty())
                .into_iter()
                .collect(),
            generation_config: GenerationConfig {
                temperature: request.model.temperature,
                max_output_tokens: ask.max_output_tokens,
                thinking_config: request
                    .model
                    .reasoning
                    .and_then(|reasoning| generation.thinking(reasoning)),
                response_mime_type: schema.map(|_| "application/json"),
                response_json_schema: schema,
            },
        })
    }
}

/// Neighbours of one role are one content, but results stay apart from what a user says.
fn add<'a>(contents: &mut Vec<Content<'a>>, role: &'static str, parts: Vec<Part<'a>>) {
    let Some(first) = parts.first() else { return };
    let is_result = |part: &Part<'_>| matches!(part, Part::Result { .. });
    let joins = contents.last().is_some_and(|last| {
        last.role == Some(role)
            && last
                .parts
                .first()
                .is_some_and(|before| is_result(before) == is_result(first))
    });
    match contents.last_mut().filter(|_| joins) {
        Some(last) => last.parts.extend(parts),
        None => contents.push(Content {
            role: Some(role),
            parts,
        }),
    }
}

fn text_part(text: &str) -> Option<Part<'_>> {
    (!text.trim().is_empty()).then_some(Part::Text(text))
}

/// Of parallel calls only the first has a signature.
fn call_part<'a>(
    call: &'a ToolCall,
    is_first: bool,
    model: &str,
    generation: Generation,
) -> serde_json::Result<Part<'a>> {
    let kept = kept::of(call, ProviderKind::Gemini, model).and_then(Value::as_str);
    Ok(Part::Call {
        call: FunctionCall {
            id: &call.id,
            name: function_name(&call.name),
            args: RawValue::from_string(call.arguments.clone())?,
        },
        signature: kept.or((is_first && generation.wants_signatures()).then_some(UNSIGNED)),
    })
}

fn result_part<'a>(id: &'a str, name: &str, text: &'a str, is_error: bool) -> Part<'a> {
    Part::Result {
        result: FunctionResponse {
            id,
            name: function_name(name),
            response: if is_error {
                Response::Error(text)
            } else {
                Response::Output(text)
            },
        },
    }
}

/// Here a name also begins with a letter (H-23).
fn function_name(name: &str) -> String {
    let name = wire_name(name);
    if name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
        name.into_owned()
    } else {
        format!("_{}", &name[..name.len().min(63)])
    }
}

/// What a model understands, told by its name; the API tells nobody.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Generation {
    /// Another's model behind the same form.
    Foreign,
    /// 2.5: thoughts have a budget, which for `pro` is never nothing.
    Budget { is_pro: bool },
    /// 3 and later, and names without a number, which mean the latest.
    Level,
    /// Before 2.5: no thoughts.
    Plain,
}

impl Generation {
    fn of(model: &str) -> Self {
        let model = model.to_ascii_lowercase();
        let Some((_, name)) = model.split_once("gemini-") else {
            return Self::Foreign;
        };
        let mut numbers = name
            .split('-')
            .find(|word| word.starts_with(|c: char| c.is_ascii_digit()))
            .unwrap_or_default()
            .split('.')
            .map(|number| number.parse::<u32>().unwrap_or(0));
        match (numbers.next(), numbers.next()) {
            (Some(1..=2), minor) if minor < Some(5) || name.starts_with('1') => Self::Plain,
            (Some(2), _) => Self::Budget {
                is_pro: name.contains("pro"),
            },
            _ => Self::Level,
        }
    }

    fn wants_signatures(self) -> bool {
        self == Self::Level
    }

    /// Whether it can be held to a schema of its answer; before the third generation not where it may call tools.
    fn takes_schema(self, with_tools: bool) -> bool {
        match self {
            Self::Foreign | Self::Plain => false,
            Self::Budget { .. } => !with_tools,
            Self::Level => true,
        }
    }

    fn thinking(self, reasoning: Reasoning) -> Option<ThinkingConfig> {
        use ThinkingConfig::{ThinkingBudget, ThinkingLevel};
        match (self, reasoning) {
            (Self::Foreign | Self::Plain, _) => None,
            // They can not be told not to think.
            (Self::Level, Reasoning::Disabled | Reasoning::Low) => Some(ThinkingLevel("low")),
            (Self::Level, Reasoning::Medium) => Some(ThinkingLevel("medium")),
            (Self::Level, Reasoning::High) => Some(ThinkingLevel("high")),
            (Self::Budget { is_pro }, Reasoning::Disabled) => {
                Some(ThinkingBudget(if is_pro { 128 } else { 0 }))
            }
            (Self::Budget { .. }, Reasoning::Low) => Some(ThinkingBudget(1024)),
            (Self::Budget { .. }, Reasoning::Medium) => Some(ThinkingBudget(8192)),
            (Self::Budget { .. }, Reasoning::High) => Some(ThinkingBudget(24_576)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_how_a_model_is_told_to_think() {
        // L-10
        use ThinkingConfig::{ThinkingBudget, ThinkingLevel};
        for (model, disabled, high) in [
            (
                "gemini-2.5-flash",
                Some(ThinkingBudget(0)),
                Some(ThinkingBudget(24_576)),
            ),
            (
                "models/gemini-2.5-pro",
                Some(ThinkingBudget(128)),
                Some(ThinkingBudget(24_576)),
            ),
            (
                "gemini-3-pro-preview",
                Some(ThinkingLevel("low")),
                Some(ThinkingLevel("high")),
            ),
            (
                "gemini-3.8-flash",
                Some(ThinkingLevel("low")),
                Some(ThinkingLevel("high")),
            ),
            (
                "gemini-4-argon",
                Some(ThinkingLevel("low")),
                Some(ThinkingLevel("high")),
            ),
            (
                "gemini-flash-latest",
                Some(ThinkingLevel("low")),
                Some(ThinkingLevel("high")),
            ),
            ("gemini-2.0-flash", None, None),
            ("gemini-1.5-pro", None, None),
            ("gemma-3-27b-it", None, None),
        ] {
            let generation = Generation::of(model);
            assert_eq!(
                generation.thinking(Reasoning::Disabled),
                disabled,
                "{model}"
            );
            assert_eq!(generation.thinking(Reasoning::High), high, "{model}");
        }
    }

    #[test]
    fn names_begin_with_a_letter() {
        // H-23
        assert_eq!(function_name("get_rows-2"), "get_rows-2");
        assert_eq!(function_name("2 rows"), "_2_rows");
        assert_eq!(function_name(&"9".repeat(64)).len(), 64);
    }
}
