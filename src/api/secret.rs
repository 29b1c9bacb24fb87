//! Passwords in bodies: never shown, and no error repeats them.

use super::error::Error;
use crate::domain::member::{PASSWORD_CHARS_MAX, check_password};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Reads a text. Serde's own error for another type would hold the value.
pub fn text<'de, D: Deserializer<'de>>(from: D) -> Result<SecretString, D::Error> {
    match Value::deserialize(from)? {
        Value::String(text) => Ok(text.into()),
        _ => Err(serde::de::Error::custom("must be a text")),
    }
}

/// [`text`], for a field that may be absent but not null.
pub fn optional_text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SecretString>, D::Error> {
    text(from).map(Some)
}

/// A field that may be absent but not null.
pub fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

pub fn check_new(path: &str, password: &SecretString) -> Result<(), Error> {
    check_password(password.expose_secret()).map_err(|reason| Error::field(path, reason))
}

/// A password that is only compared may be anything of a length that can be one.
pub fn check_given(path: &str, password: &SecretString) -> Result<(), Error> {
    match password.expose_secret().chars().count() > PASSWORD_CHARS_MAX {
        true => Err(Error::field(path, "must have at most 200 characters")),
        false => Ok(()),
    }
}
