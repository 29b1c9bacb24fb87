//! `/api/members`: the local users of a workspace, for its admins (P-4, P-6).

use super::App;
use super::auth::AdminCaller;
use super::error::{Error, Problem};
use super::extract::{Json, Path, Query};
use super::page::Page;
use super::secret;
use crate::domain::ids::MemberId;
use crate::domain::member::Username;
use crate::domain::role::Role;
use crate::lifecycle::members::{self as lifecycle, MemberError, NewMember};
use crate::store::{self, members::Member};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const LIST: &str = "members";

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_members, create_member))
        .routes(routes!(patch_member, delete_member))
}

#[derive(Debug, Serialize, ToSchema)]
pub struct MemberView {
    pub id: MemberId,
    #[schema(example = "ada")]
    pub username: String,
    pub role: Role,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl From<Member> for MemberView {
    fn from(member: Member) -> Self {
        Self {
            id: member.id,
            username: member.username,
            role: member.role,
            created_at: member.created_at,
            updated_at: member.updated_at,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub struct MemberPage {
    pub items: Vec<MemberView>,
    /// Give it as `cursor` for the next page; null on the last one.
    pub next_cursor: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewMember, example = json!({"username": "ada", "password": "correct horse battery", "role": "member"}))]
pub struct NewMemberBody {
    /// 1 to 254 characters of a-z, 0-9, `.`, `_`, `@`, `+` and `-`; capitals are made small.
    username: String,
    /// 12 to 200 characters.
    #[serde(deserialize_with = "secret::text")]
    #[schema(value_type = String, format = Password)]
    password: SecretString,
    /// Not above your own.
    role: Role,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = MemberPatch, example = json!({"role": "admin"}))]
pub struct MemberPatch {
    /// Not above your own.
    #[serde(default, deserialize_with = "secret::present")]
    role: Option<Role>,
    /// 12 to 200 characters. It ends all sessions of the member.
    #[serde(default, deserialize_with = "secret::optional_text")]
    #[schema(value_type = Option<String>, format = Password)]
    password: Option<SecretString>,
}

/// List the members
///
/// In order of creation.
#[utoipa::path(
    get,
    path = "/api/members",
    tag = "auth",
    security(("bearer" = ["admin"])),
    params(Page),
    responses((status = 200, body = MemberPage))
)]
async fn list_members(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Query(page): Query<Page>,
) -> Result<Json<MemberPage>, Error> {
    let after = page.after(LIST)?.map(MemberId);
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let members = store::members::list(&mut conn, caller.workspace, after, page.wanted()).await?;
    let (members, next_cursor) = page.cut(LIST, members, |member| member.id.0);
    let items = members.into_iter().map(MemberView::from).collect();
    Ok(Json(MemberPage { items, next_cursor }))
}

/// Create a member
#[utoipa::path(
    post,
    path = "/api/members",
    tag = "auth",
    security(("bearer" = ["admin"])),
    request_body = NewMemberBody,
    responses(
        (status = 201, body = MemberView),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "There is one of this name (`username_taken`)"),
    )
)]
async fn create_member(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Json(body): Json<NewMemberBody>,
) -> Result<Response, Error> {
    let username =
        Username::parse(&body.username).map_err(|reason| Error::field("username", reason))?;
    secret::check_new("password", &body.password)?;
    let password_hash = app.auth.passwords.hash(body.password).await;
    let new = NewMember {
        username: &username,
        role: body.role,
        password_hash: &password_hash.map_err(Error::internal)?,
    };
    let member = lifecycle::create(&app.pool, caller.workspace, caller.role, &new).await?;
    let address = format!("/api/members/{}", member.id);
    let view = Json(MemberView::from(member));
    Ok((StatusCode::CREATED, [(header::LOCATION, address)], view).into_response())
}

/// Change a member's role or password
#[utoipa::path(
    patch,
    path = "/api/members/{id}",
    tag = "auth",
    security(("bearer" = ["admin"])),
    params(("id" = MemberId, Path)),
    request_body = MemberPatch,
    responses((status = 200, body = MemberView))
)]
async fn patch_member(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<MemberId>,
    Json(body): Json<MemberPatch>,
) -> Result<Json<MemberView>, Error> {
    let password_hash = match body.password {
        Some(password) => {
            secret::check_new("password", &password)?;
            let hash = app.auth.passwords.hash(password).await;
            Some(hash.map_err(Error::internal)?)
        }
        None => None,
    };
    let changed = lifecycle::change(
        &app.pool,
        caller.workspace,
        caller.role,
        id,
        body.role,
        password_hash.as_deref(),
    );
    Ok(Json(changed.await?.into()))
}

/// Remove a member
///
/// Their sessions end. What they have made stays, API keys included.
#[utoipa::path(
    delete,
    path = "/api/members/{id}",
    tag = "auth",
    security(("bearer" = ["admin"])),
    params(("id" = MemberId, Path)),
    responses((status = 204, description = "Removed"))
)]
async fn delete_member(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<MemberId>,
) -> Result<StatusCode, Error> {
    lifecycle::remove(&app.pool, caller.workspace, caller.role, id).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl From<MemberError> for Error {
    fn from(error: MemberError) -> Self {
        match error {
            MemberError::NotFound => Error::NotFound,
            MemberError::NameTaken => Error::conflict(
                "username_taken",
                "There is a member of this name in the workspace. Choose another name.",
            ),
            MemberError::AboveOwnRole(role) => Error::Forbidden(role.as_str()),
            MemberError::Store(error) => error.into(),
        }
    }
}
