//! What the model decided: the text and the tool calls of one assistant message, whatever provider it came from.

use serde::{Deserialize, Serialize};

/// One answer of a model, complete and parsed.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Decision {
    pub text: String,
    /// In the model's order, with ids that are present and distinct within the turn.
    pub calls: Vec<ToolCall>,
    pub usage: Usage,
}

/// One tool call as it is stored in the history and sent back to the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// JSON object text, byte for byte as the model wrote it, so that no digit is lost (H-31). Where `invalid` is set,
    /// a valid stand-in (`{}`) that providers accept in the history.
    pub arguments: String,
    /// Why these arguments can not be executed; goes back to the model as the call's error result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invalid: Option<String>,
}

/// Tokens of one model call. Zero where the provider says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Usage {
    pub input_tokens: u32,
    pub output_tokens: u32,
    pub cached_tokens: u32,
}
