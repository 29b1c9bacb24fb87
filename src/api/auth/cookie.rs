//! The cookie of a log-in, and what guards it against pages of others (P-4).
//!
//! A browser sends a cookie with whatever request any page makes, so a cookie alone only reads. A write also names the
//! CSRF token, which is made from the cookie's secret: a page of another origin can read neither.

use crate::lifecycle::wait::token_hash;
use axum::http::{HeaderMap, HeaderValue, Method, header};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};

const NAME: &str = "reconvene_session";
pub const CSRF_HEADER: &str = "x-csrf-token";

/// The token in the cookie, if there is exactly one.
pub fn read(headers: &HeaderMap) -> Option<&str> {
    let mut found = headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
        .filter(|(name, _)| *name == NAME)
        .map(|(_, token)| token);
    match (found.next(), found.next()) {
        (Some(token), None) => Some(token),
        (_, _) => None,
    }
}

/// `Set-Cookie` for a new session. Pages can not read it, and no other site's page has it sent.
pub fn set(token: &str, hours: u32, secure: bool) -> HeaderValue {
    make(token, u64::from(hours) * 3600, secure)
}

/// `Set-Cookie` that removes it.
pub fn clear(secure: bool) -> HeaderValue {
    make("", 0, secure)
}

fn make(token: &str, max_age: u64, secure: bool) -> HeaderValue {
    let secure = if secure { "; Secure" } else { "" };
    let text =
        format!("{NAME}={token}; Path=/; Max-Age={max_age}; HttpOnly; SameSite=Strict{secure}");
    let mut value = HeaderValue::from_str(&text).expect("a token is base64url");
    value.set_sensitive(true);
    value
}

pub fn csrf_token(token: &str) -> String {
    URL_SAFE_NO_PAD.encode(token_hash(&format!("csrf:{token}")))
}

/// Whether the request may do what its method says.
pub fn admits(method: &Method, headers: &HeaderMap, token: &str) -> bool {
    if method.is_safe() {
        return true;
    }
    let named = headers
        .get(CSRF_HEADER)
        .and_then(|value| value.to_str().ok());
    // Hashes are compared, so that the time tells nothing of the token.
    named.is_some_and(|named| token_hash(named) == token_hash(&csrf_token(token)))
}

#[cfg(test)]
mod tests {
    use super::*;

    // P-4
    #[test]
    fn one_cookie_is_read_and_two_are_none() {
        let read_from = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::COOKIE, value.parse().unwrap());
            }
            read(&headers).map(str::to_owned)
        };
        assert_eq!(
            read_from(&["a=b; reconvene_session=t; c=d"]),
            Some("t".into())
        );
        assert_eq!(read_from(&["a=b", "reconvene_session=t"]), Some("t".into()));
        assert_eq!(read_from(&["xreconvene_session=t"]), None);
        assert_eq!(
            read_from(&["reconvene_session=t; reconvene_session=u"]),
            None
        );
        assert_eq!(read_from(&[]), None);
    }

    // P-4
    #[test]
    fn the_cookie_is_out_of_reach_of_pages() {
        let value = set("hush", 2, true);
        assert_eq!(
            value.to_str().unwrap(),
            "reconvene_session=hush; Path=/; Max-Age=7200; HttpOnly; SameSite=Strict; Secure"
        );
        assert!(value.is_sensitive() && !format!("{value:?}").contains("hush"));
        assert!(!set("hush", 2, false).to_str().unwrap().contains("Secure"));
    }
}
