//! Every refusal of the API: one enum, one match to a status and a stable code, one body (RFC 9457).
//!
//! The sentence in `detail` tells the caller what to do. Causes of internal errors are logged here, once, and never sent:
//! no SQL, no stack trace, no path. What belongs to another workspace is `NotFound`, exactly as if it did not exist.

use crate::domain::agent::InvalidDefinition;
use crate::runtime::Causes;
use crate::store;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use tracing::{error, warn};
use utoipa::ToSchema;

/// One field of the request that can not be taken as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct FieldError {
    /// Where it stands in the body (`tools[2].name`), or the name of the query parameter or header.
    #[schema(example = "message")]
    pub path: String,
    #[schema(example = "must not be empty")]
    pub reason: String,
}

impl FieldError {
    pub fn new(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            reason: reason.into(),
        }
    }
}

/// The body of every answer that is not a success, sent as `application/problem+json`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Problem {
    /// Stable; programs decide by it.
    #[schema(example = "not_found")]
    pub code: &'static str,
    #[schema(example = "Not Found")]
    pub title: &'static str,
    #[schema(example = 404)]
    pub status: u16,
    /// A sentence for people that says what to do. Its wording may change.
    #[schema(
        example = "There is nothing with this id in your workspace. Check the id and the workspace of the token."
    )]
    pub detail: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One answer for every reason, so that it tells an attacker nothing.
    #[error("no valid token")]
    Unauthenticated,
    /// One answer for unknown names and wrong passwords.
    #[error("log-in failed")]
    LoginFailed,
    /// A write with a cookie that does not name the session's CSRF token.
    #[error("no CSRF token")]
    CsrfFailed,
    /// `of` completes the sentence "There were too many requests …".
    #[error("too many requests {of}")]
    RateLimited {
        retry_after: Duration,
        of: &'static str,
    },
    /// The caller's role is too low; holds the role that is needed.
    #[error("needs the role {0}")]
    Forbidden(&'static str),
    #[error("not found")]
    NotFound,
    #[error("no such route")]
    RouteNotFound,
    #[error("method not allowed")]
    MethodNotAllowed,
    #[error("malformed JSON at line {line}, column {column}: {reason}")]
    MalformedJson {
        line: usize,
        column: usize,
        reason: String,
    },
    #[error("invalid body")]
    InvalidBody(Vec<FieldError>),
    /// Bytes that are not UTF-8, or an escape that stands for no character.
    #[error("invalid UTF-8")]
    InvalidUtf8(String),
    #[error("invalid query")]
    InvalidQuery(Vec<FieldError>),
    #[error("invalid header")]
    InvalidHeader(FieldError),
    #[error("the body is not declared as JSON")]
    UnsupportedMediaType,
    #[error("the body is larger than {limit} bytes")]
    BodyTooLarge { limit: usize },
    #[error("the body did not arrive whole")]
    BodyIncomplete,
    /// 409: the request is fine, the present state is against it.
    #[error("{code}")]
    Conflict { code: &'static str, detail: String },
    /// 412: `If-Match` names a version that is no longer the newest.
    #[error("{code}")]
    PreconditionFailed { code: &'static str, detail: String },
    /// 428: a change must name the version that it was made from.
    #[error("precondition required")]
    PreconditionRequired { detail: String },
    /// 422 with a code of its own, for a rule that is not about one field.
    #[error("{code}")]
    Unprocessable { code: &'static str, detail: String },
    /// 502: somebody else's service, which was asked for this request, did not do its part.
    #[error("{code}")]
    BadGateway {
        code: &'static str,
        detail: String,
        retry_after: Option<Duration>,
    },
    #[error("the request took longer than {limit_seconds} s")]
    Timeout { limit_seconds: u64 },
    #[error("the database is unavailable")]
    DatabaseUnavailable,
    /// The identity provider's keys have never been fetched, so no token can be judged.
    #[error("no verification keys")]
    KeysUnavailable,
    #[error("the service is shutting down")]
    ShuttingDown,
    #[error("internal error")]
    Internal(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    pub fn conflict(code: &'static str, detail: impl Into<String>) -> Self {
        Self::Conflict {
            code,
            detail: detail.into(),
        }
    }

    pub fn precondition_failed(code: &'static str, detail: impl Into<String>) -> Self {
        Self::PreconditionFailed {
            code,
            detail: detail.into(),
        }
    }

    pub fn unprocessable(code: &'static str, detail: impl Into<String>) -> Self {
        Self::Unprocessable {
            code,
            detail: detail.into(),
        }
    }

    /// 422 about one field of the body.
    pub fn field(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::InvalidBody(vec![FieldError::new(path, reason)])
    }

    pub fn internal(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Internal(cause.into())
    }

    fn status_and_code(&self) -> (StatusCode, &'static str) {
        use Error::*;
        match self {
            Unauthenticated => (StatusCode::UNAUTHORIZED, "unauthenticated"),
            LoginFailed => (StatusCode::UNAUTHORIZED, "login_failed"),
            CsrfFailed => (StatusCode::FORBIDDEN, "csrf_failed"),
            RateLimited { .. } => (StatusCode::TOO_MANY_REQUESTS, "rate_limited"),
            Forbidden(_) => (StatusCode::FORBIDDEN, "forbidden"),
            NotFound => (StatusCode::NOT_FOUND, "not_found"),
            RouteNotFound => (StatusCode::NOT_FOUND, "route_not_found"),
            MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            MalformedJson { .. } => (StatusCode::BAD_REQUEST, "malformed_json"),
            InvalidBody(_) => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"),
            InvalidUtf8(_) => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_utf8"),
            InvalidQuery(_) => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_query"),
            InvalidHeader(_) => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_header"),
            UnsupportedMediaType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type"),
            BodyTooLarge { .. } => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"),
            BodyIncomplete => (StatusCode::BAD_REQUEST, "body_incomplete"),
            Conflict { code, .. } => (StatusCode::CONFLICT, code),
            PreconditionFailed { code, .. } => (StatusCode::PRECONDITION_FAILED, code),
            PreconditionRequired { .. } => {
                (StatusCode::PRECONDITION_REQUIRED, "precondition_required")
            }
            Unprocessable { code, .. } => (StatusCode::UNPROCESSABLE_ENTITY, code),
            BadGateway { code, .. } => (StatusCode::BAD_GATEWAY, code),
            Timeout { .. } => (StatusCode::SERVICE_UNAVAILABLE, "request_timeout"),
            DatabaseUnavailable => (StatusCode::SERVICE_UNAVAILABLE, "database_unavailable"),
            KeysUnavailable => (StatusCode::SERVICE_UNAVAILABLE, "keys_unavailable"),
            ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
            Internal(_) => (StatusCode::INTERNAL_SERVER_ERROR, "internal_error"),
        }
    }

    fn detail(&self) -> String {
        use Error::*;
        match self {
            Unauthenticated => "Send a valid token or API key as `Authorization: Bearer <token>`, or log in. `reconvene token` makes a token.".into(),
            LoginFailed => "There is no such account, or the password is another one. Check the workspace, the name and the password.".into(),
            CsrfFailed => "A write with a session's cookie needs its csrf_token, which GET /api/auth/me shows, in the header X-CSRF-Token.".into(),
            RateLimited { of, .. } => format!("There were too many requests {of}. Repeat this one after the seconds in Retry-After."),
            Forbidden(role) => format!("This call needs a token with the role {role}."),
            NotFound => "There is nothing with this id in your workspace. Check the id and the workspace of the token.".into(),
            RouteNotFound => "There is no such route. /api/docs lists them all.".into(),
            MethodNotAllowed => "This route does not take this method. The Allow header names those it takes.".into(),
            MalformedJson { line, column, reason } => {
                format!("The body is not valid JSON at line {line}, column {column}: {reason}.")
            }
            InvalidBody(errors) => sentence("The body can not be taken", errors),
            InvalidUtf8(reason) => format!("The body is not valid UTF-8 text: {reason}. Send it encoded as UTF-8."),
            InvalidQuery(errors) => sentence("The query can not be taken", errors),
            InvalidHeader(error) => sentence("A header can not be taken", std::slice::from_ref(error)),
            UnsupportedMediaType => "Send the body as JSON, with `Content-Type: application/json`.".into(),
            BodyTooLarge { limit } => {
                format!("The body is larger than the limit of {limit} bytes. Send less, or raise server.body_limit_bytes.")
            }
            BodyIncomplete => "The body did not arrive whole. Send the request again.".into(),
            Conflict { detail, .. }
            | PreconditionFailed { detail, .. }
            | PreconditionRequired { detail }
            | Unprocessable { detail, .. }
            | BadGateway { detail, .. } => detail.clone(),
            Timeout { limit_seconds } => format!(
                "The request took longer than {limit_seconds} seconds and was given up. Repeat it, with the same Idempotency-Key if it creates something."
            ),
            DatabaseUnavailable => "The database can not be reached at the moment. Repeat the request in a few seconds.".into(),
            KeysUnavailable => "The keys that verify tokens can not be fetched at the moment. Repeat the request in a few seconds.".into(),
            ShuttingDown => "This server is shutting down. Repeat the request; another one will take it.".into(),
            Internal(_) => "Something went wrong on our side. Repeat the request; if it fails again, tell the operator the x-request-id of this answer.".into(),
        }
    }

    fn errors(self) -> Vec<FieldError> {
        match self {
            Error::InvalidBody(errors) | Error::InvalidQuery(errors) => errors,
            Error::InvalidHeader(error) => vec![error],
            _ => Vec::new(),
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Error::DatabaseUnavailable | Error::KeysUnavailable | Error::ShuttingDown => {
                Some(Duration::from_secs(2))
            }
            Error::Timeout { .. } => Some(Duration::from_secs(5)),
            Error::BadGateway { retry_after, .. } => *retry_after,
            // Rounded up: who comes back then is served.
            Error::RateLimited { retry_after, .. } => {
                Some(Duration::from_secs(retry_after.as_secs() + 1))
            }
            _ => None,
        }
    }
}

fn sentence(start: &str, errors: &[FieldError]) -> String {
    match errors {
        [FieldError { path, reason }] if path.is_empty() => format!("{start}: {reason}."),
        [FieldError { path, reason }] => format!("{start}: `{path}` {reason}."),
        _ => format!(
            "{start}: see `errors` for the {} places to correct.",
            errors.len()
        ),
    }
}

impl From<InvalidDefinition> for Error {
    fn from(error: InvalidDefinition) -> Self {
        Error::InvalidBody(field_errors(error).collect())
    }
}

pub fn field_errors(error: InvalidDefinition) -> impl Iterator<Item = FieldError> {
    error
        .0
        .into_iter()
        .map(|fault| FieldError::new(fault.path, fault.message))
}

impl From<store::Error> for Error {
    fn from(error: store::Error) -> Self {
        Arc::new(error).into()
    }
}

/// Where one failed transaction is the answer to several requests.
impl From<Arc<store::Error>> for Error {
    fn from(error: Arc<store::Error>) -> Self {
        if error.is_unavailable() {
            warn!(error = %Causes(&*error), "the database is unavailable");
            Self::DatabaseUnavailable
        } else {
            Self::internal(error)
        }
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        if let Error::Internal(cause) = &self {
            error!(error = %Causes(cause.as_ref()), "a request failed");
        }
        let (status, code) = self.status_and_code();
        let retry_after = self.retry_after();
        let detail = self.detail();
        let unauthenticated = matches!(self, Error::Unauthenticated);
        let problem = Problem {
            code,
            title: status.canonical_reason().unwrap_or("Error"),
            status: status.as_u16(),
            detail,
            errors: self.errors(),
        };
        let mut response = (status, axum::Json(problem)).into_response();
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if let Some(wait) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(wait.as_secs()));
        }
        if unauthenticated {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
