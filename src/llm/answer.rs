//! What the answers of all providers have in common: they arrive in pieces, count only when they are complete, and end as
//! one decision.

use super::{ModelError, OnText};
use crate::domain::decision::{Decision, Finish, RawCall, Usage, clean};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// One answer, put together from what a provider sends.
///
/// An answer counts only with a reason for its end: a stream that merely ends was cut somewhere, and nobody can say where
/// (H-22, H-27). What comes after the reason is the bill.
pub trait Answer: Default + Send {
    /// One event of a stream. An error ends the attempt.
    fn event(&mut self, name: &str, data: &str, on_text: OnText<'_>) -> Result<(), ModelError>;

    /// A complete answer that was not streamed.
    fn body(&mut self, body: &str, on_text: OnText<'_>) -> Result<(), ModelError>;

    /// The reason has come: what may still follow is the usage.
    fn is_finished(&self) -> bool;

    /// The end mark has come: nothing follows.
    fn is_ended(&self) -> bool;

    /// The decision, once the provider has nothing more to send.
    fn decision(self, fresh_id: impl FnMut() -> String) -> Result<Decision, ModelError>;
}

/// Adds a piece of the model's text, as it can be stored.
pub fn say(text: &mut String, piece: &str, on_text: OnText<'_>) {
    if !piece.is_empty() {
        let piece = clean(piece);
        on_text(&piece);
        text.push_str(&piece);
    }
}

/// A complete answer as a decision; one that was cut says so, to its reader or in its last call.
pub fn conclude(
    mut text: String,
    calls: Vec<RawCall>,
    usage: Usage,
    finish: Finish,
    fresh_id: impl FnMut() -> String,
) -> Decision {
    if finish == Finish::Length && calls.is_empty() && !text.trim().is_empty() {
        text.push_str("\n\n[Cut here: the model reached its output limit.]");
    }
    Decision::new(text, calls, usage, finish, fresh_id)
}

/// JSON of the provider, after `clean_json`.
pub fn parse<T: DeserializeOwned>(json: &str) -> Result<T, ModelError> {
    serde_json::from_str(json).map_err(|error| {
        ModelError::again(format!(
            "The provider sent a chunk that can not be read ({error})."
        ))
    })
}

/// The stream is over, and no reason has come.
pub fn cut() -> ModelError {
    ModelError::again("The model's answer broke off: the stream ended without a finish reason.")
}

/// A whole answer in which the model has no part.
pub fn no_choice() -> ModelError {
    ModelError::again("The provider's answer holds no choice of the model, only something else.")
}

/// Never an error: an answer is not lost because its bill can not be read.
pub fn tokens(value: Option<&Value>) -> u32 {
    let count = value.and_then(Value::as_u64).unwrap_or(0);
    u32::try_from(count).unwrap_or(u32::MAX)
}
