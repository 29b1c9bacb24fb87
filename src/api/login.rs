//! `/api/auth`: log-in of local users, and who one is (P-4).

use super::App;
use super::auth::{Caller, Credential, cookie};
use super::error::{Error, Problem};
use super::extract::Json;
use super::rate::Source;
use super::secret;
use crate::domain::ids::{MemberId, WorkspaceId};
use crate::domain::member::USERNAME_CHARS_MAX;
use crate::domain::role::Role;
use crate::lifecycle::log_in::{LogInError, log_in, log_out};
use crate::lifecycle::members::{PasswordError, change_password};
use crate::store;
use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use std::time::Instant;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(post_login))
        .routes(routes!(post_logout))
        .routes(routes!(get_me))
        .routes(routes!(post_password))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"workspace": "acme", "username": "ada", "password": "correct horse battery"}))]
pub struct LogIn {
    /// The slug of the workspace.
    workspace: String,
    username: String,
    #[serde(deserialize_with = "secret::text")]
    #[schema(value_type = String, format = Password)]
    password: SecretString,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"old_password": "correct horse battery", "new_password": "another horse battery"}))]
pub struct PasswordChange {
    #[serde(deserialize_with = "secret::text")]
    #[schema(value_type = String, format = Password)]
    old_password: SecretString,
    /// 12 to 200 characters.
    #[serde(deserialize_with = "secret::text")]
    #[schema(value_type = String, format = Password)]
    new_password: SecretString,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct WorkspaceOfCaller {
    pub id: WorkspaceId,
    #[schema(example = "acme")]
    pub slug: String,
    #[schema(example = "Acme Ltd")]
    pub name: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct Me {
    pub workspace: WorkspaceOfCaller,
    /// Who is calling: the `sub` of a token, the username of a member, or `api-key:` and the key's name.
    #[schema(example = "ada")]
    pub subject: String,
    pub role: Role,
    /// `token`, `api_key` or `session`.
    #[schema(example = "session")]
    pub credential: &'static str,
    /// Of a session; null for others.
    pub member_id: Option<MemberId>,
    /// What writes with the session's cookie send in the header `X-CSRF-Token`; null without a cookie.
    pub csrf_token: Option<String>,
}

/// Where the request comes from.
struct From(Source);

impl FromRequestParts<App> for From {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Error> {
        Ok(Self(Source::of(parts, app.config.server.trusted_proxies)))
    }
}

/// Log in
///
/// For local users. The session is in an HttpOnly cookie, which lasts `auth.session_hours`; writes with it send the
/// `csrf_token` of the answer in the header `X-CSRF-Token`.
#[utoipa::path(
    post,
    path = "/api/auth/login",
    tag = "auth",
    request_body = LogIn,
    responses(
        (status = 200, body = Me, description = "The cookie is in Set-Cookie"),
        (status = 401, body = Problem, content_type = "application/problem+json",
            description = "No such account, or another password (`login_failed`)"),
        (status = 429, body = Problem, content_type = "application/problem+json",
            description = "Too many attempts (`rate_limited`); see Retry-After"),
    )
)]
async fn post_login(
    State(app): State<App>,
    From(source): From,
    headers: HeaderMap,
    Json(body): Json<LogIn>,
) -> Result<Response, Error> {
    if body.workspace.len() > 63 {
        return Err(Error::field("workspace", "must have at most 63 characters"));
    }
    if body.username.chars().count() > USERNAME_CHARS_MAX {
        return Err(Error::field("username", "must have at most 254 characters"));
    }
    for (path, text) in [("workspace", &body.workspace), ("username", &body.username)] {
        if text.contains('\0') {
            return Err(Error::field(path, "must not contain the NUL character"));
        }
    }
    secret::check_given("password", &body.password)?;
    let username = body.username.to_ascii_lowercase();
    app.limits
        .admit_login(source, &body.workspace, &username, Instant::now())?;
    let hours = app.config.auth.session_hours;
    let token = log_in(
        &app.pool,
        &app.auth.passwords,
        &body.workspace,
        &username,
        body.password,
        hours,
    )
    .await
    .map_err(|error| match error {
        LogInError::Refused => Error::LoginFailed,
        LogInError::Hash(error) => Error::internal(error),
        LogInError::Store(error) => error.into(),
    })?;
    let caller = app.auth.of_session(&app.pool, &token).await?;
    let set = cookie::set(&token, hours, is_secure(&app, &headers));
    let me = me(&app, caller).await?;
    Ok(([(header::SET_COOKIE, set)], Json(me)).into_response())
}

/// Log out
///
/// Ends the session and removes its cookie. Tokens and API keys have no session; for them nothing happens.
#[utoipa::path(
    post,
    path = "/api/auth/logout",
    tag = "auth",
    security(("bearer" = [])),
    responses((status = 204, description = "Logged out"))
)]
async fn post_logout(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
) -> Result<Response, Error> {
    if let Credential::Session { member, id, .. } = caller.credential {
        log_out(&app.pool, caller.workspace, member, id).await?;
    }
    let clear = cookie::clear(is_secure(&app, &headers));
    Ok((StatusCode::NO_CONTENT, [(header::SET_COOKIE, clear)]).into_response())
}

/// Change your own password
///
/// For who has logged in. It ends all other sessions of theirs; API keys outlive it. Attempts count as attempts to log in.
#[utoipa::path(
    post,
    path = "/api/auth/password",
    tag = "auth",
    security(("bearer" = [])),
    request_body = PasswordChange,
    responses(
        (status = 204, description = "Changed"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The caller has a token or an API key and so no password (`no_password`)"),
        (status = 429, body = Problem, content_type = "application/problem+json",
            description = "Too many attempts (`rate_limited`); see Retry-After"),
    )
)]
async fn post_password(
    State(app): State<App>,
    caller: Caller,
    From(source): From,
    Json(body): Json<PasswordChange>,
) -> Result<StatusCode, Error> {
    secret::check_given("old_password", &body.old_password)?;
    secret::check_new("new_password", &body.new_password)?;
    let Credential::Session { member, id, .. } = caller.credential else {
        return Err(Error::conflict(
            "no_password",
            "Tokens and API keys have no password. Log in to change yours.",
        ));
    };
    // A cookie that was stolen must not serve to find the password by trying.
    let workspace = caller.workspace.to_string();
    app.limits
        .admit_login(source, &workspace, &caller.subject, Instant::now())?;
    let passwords = &app.auth.passwords;
    let (old, new) = (body.old_password, body.new_password);
    change_password(
        &app.pool,
        passwords,
        caller.workspace,
        (member, id),
        old,
        new,
    )
    .await
    .map_err(|error| match error {
        PasswordError::Wrong => Error::field("old_password", "is not your password"),
        PasswordError::Hash(error) => Error::internal(error),
        PasswordError::Store(error) => error.into(),
    })?;
    Ok(StatusCode::NO_CONTENT)
}

/// See who you are
#[utoipa::path(
    get,
    path = "/api/auth/me",
    tag = "auth",
    security(("bearer" = [])),
    responses((status = 200, body = Me))
)]
async fn get_me(State(app): State<App>, caller: Caller) -> Result<Json<Me>, Error> {
    me(&app, caller).await.map(Json)
}

async fn me(app: &App, caller: Caller) -> Result<Me, Error> {
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let workspace = store::workspaces::get(&mut conn, caller.workspace).await?;
    let workspace = workspace.ok_or(Error::Unauthenticated)?;
    let (credential, member_id, csrf_token) = match caller.credential {
        Credential::Token => ("token", None, None),
        Credential::ApiKey(_) => ("api_key", None, None),
        Credential::Session { member, csrf, .. } => ("session", Some(member), Some(csrf)),
    };
    Ok(Me {
        workspace: WorkspaceOfCaller {
            id: workspace.id,
            slug: workspace.slug,
            name: workspace.name,
        },
        subject: caller.subject,
        role: caller.role,
        credential,
        member_id,
        csrf_token,
    })
}

/// A proxy that speaks https to the browser says so. Whoever lies about it harms only their own cookie.
fn is_secure(app: &App, headers: &HeaderMap) -> bool {
    let forwarded = headers.get("x-forwarded-proto");
    app.config.auth.secure_cookies
        || forwarded.is_some_and(|proto| proto.as_bytes().eq_ignore_ascii_case(b"https"))
}
