//! `If-Match`: the revision that a change was made from (A-1, H-47).

use super::error::{Error, FieldError};
use axum::extract::FromRequestParts;
use axum::http::{header, request::Parts};

/// The revision in `If-Match`: an ETag as this API gives it, with or without its quotes.
pub struct IfMatch(pub Option<i64>);

impl IfMatch {
    pub fn required(self) -> Result<i64, Error> {
        self.0.ok_or_else(|| Error::PreconditionRequired {
            detail: "Send the ETag of what your change was made from as `If-Match: \"<revision>\"`, so that nobody else's \
                     change is overwritten. GET it to learn its ETag."
                .into(),
        })
    }
}

impl<S: Send + Sync> FromRequestParts<S> for IfMatch {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Error> {
        let mut values = parts.headers.get_all(header::IF_MATCH).iter();
        match (values.next(), values.next()) {
            (None, _) => Ok(IfMatch(None)),
            (Some(value), None) => match value.to_str().ok().and_then(revision) {
                Some(revision) => Ok(IfMatch(Some(revision))),
                None => Err(refused("must be an ETag of this address, such as \"3\"")),
            },
            (Some(_), Some(_)) => Err(refused("must be given once")),
        }
    }
}

fn refused(reason: &str) -> Error {
    Error::InvalidHeader(FieldError::new("If-Match", reason))
}

/// Proxies that compress answers make ETags weak (`W/"3"`).
fn revision(etag: &str) -> Option<i64> {
    let etag = etag.trim();
    let etag = etag.strip_prefix("W/").unwrap_or(etag);
    let digits = etag
        .strip_prefix('"')
        .and_then(|etag| etag.strip_suffix('"'))
        .unwrap_or(etag);
    digits.parse().ok().filter(|revision| *revision >= 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_etag_is_read_back() {
        for (etag, expected) in [
            ("\"3\"", Some(3)),
            (" W/\"3\" ", Some(3)),
            ("3", Some(3)),
            ("*", None),
            ("\"3\", \"4\"", None),
            ("\"x\"", None),
            ("\"-1\"", None),
            ("", None),
            ("\"3", None),
        ] {
            assert_eq!(revision(etag), expected, "{etag}");
        }
    }
}
