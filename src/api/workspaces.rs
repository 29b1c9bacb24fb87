//! `/api/admin/workspaces`: all workspaces, for operators (P-6).

use super::App;
use super::auth::OperatorCaller;
use super::error::{Error, Problem};
use super::extract::{Json, Query};
use super::page::Page;
use super::secret;
use crate::domain::ids::{MemberId, WorkspaceId};
use crate::domain::member::Username;
use crate::domain::role::Role;
use crate::lifecycle::agents::{CreateWorkspaceError, create_workspace_with};
use crate::lifecycle::members::NewMember;
use crate::store::{self, workspaces::Workspace};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const LIST: &str = "workspaces";

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list_workspaces, create_workspace))
}

#[derive(Debug, Serialize, ToSchema)]
pub struct WorkspaceView {
    pub id: WorkspaceId,
    #[schema(example = "acme")]
    pub slug: String,
    #[schema(example = "Acme Ltd")]
    pub name: String,
    pub created_at: DateTime<Utc>,
}

impl From<Workspace> for WorkspaceView {
    fn from(workspace: Workspace) -> Self {
        Self {
            id: workspace.id,
            slug: workspace.slug,
            name: workspace.name,
            created_at: workspace.created_at,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub struct NewWorkspaceView {
    #[serde(flatten)]
    workspace: WorkspaceView,
    /// The admin that was made with it; null when none was asked for.
    admin_id: Option<MemberId>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct WorkspacePage {
    pub items: Vec<WorkspaceView>,
    /// Give it as `cursor` for the next page; null on the last one.
    pub next_cursor: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewWorkspace, example = json!({
    "slug": "acme", "name": "Acme Ltd", "admin": {"username": "ada", "password": "correct horse battery"}
}))]
pub struct NewWorkspaceBody {
    /// 1 to 63 characters of a-z, 0-9 and `-`, beginning with a letter or a digit.
    slug: String,
    /// 1 to 100 characters on one line.
    name: String,
    /// A first member, with the role admin.
    #[serde(default, deserialize_with = "secret::present")]
    admin: Option<NewAdmin>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewAdmin {
    username: String,
    #[serde(deserialize_with = "secret::text")]
    #[schema(value_type = String, format = Password)]
    password: SecretString,
}

/// List all workspaces
///
/// In order of creation.
#[utoipa::path(
    get,
    path = "/api/admin/workspaces",
    tag = "admin",
    security(("bearer" = ["operator"])),
    params(Page),
    responses((status = 200, body = WorkspacePage))
)]
async fn list_workspaces(
    State(app): State<App>,
    _operator: OperatorCaller,
    Query(page): Query<Page>,
) -> Result<Json<WorkspacePage>, Error> {
    let after = page.after(LIST)?.map(WorkspaceId);
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let found = store::workspaces::list_all(&mut conn, after, page.wanted()).await?;
    let (found, next_cursor) = page.cut(LIST, found, |workspace| workspace.id.0);
    let items = found.into_iter().map(WorkspaceView::from).collect();
    Ok(Json(WorkspacePage { items, next_cursor }))
}

/// Create a workspace
///
/// With its default agent and, if `admin` is given, with somebody who can log in and manage it.
#[utoipa::path(
    post,
    path = "/api/admin/workspaces",
    tag = "admin",
    security(("bearer" = ["operator"])),
    request_body = NewWorkspaceBody,
    responses(
        (status = 201, body = NewWorkspaceView),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "There is, or was, one of this slug (`slug_taken`)"),
    )
)]
async fn create_workspace(
    State(app): State<App>,
    _operator: OperatorCaller,
    Json(body): Json<NewWorkspaceBody>,
) -> Result<Response, Error> {
    let admin = match body.admin {
        Some(NewAdmin { username, password }) => {
            let username = Username::parse(&username)
                .map_err(|reason| Error::field("admin.username", reason))?;
            secret::check_new("admin.password", &password)?;
            let hash = app.auth.passwords.hash(password).await;
            Some((username, hash.map_err(Error::internal)?))
        }
        None => None,
    };
    let admin = admin.as_ref().map(|(username, password_hash)| NewMember {
        username,
        role: Role::Admin,
        password_hash,
    });
    let (id, admin) =
        create_workspace_with(&app.pool, &body.slug, &body.name, admin.as_ref()).await?;
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let workspace = store::workspaces::get(&mut conn, id).await?;
    let view = NewWorkspaceView {
        workspace: workspace.ok_or(Error::NotFound)?.into(),
        admin_id: admin.map(|admin| admin.id),
    };
    Ok((StatusCode::CREATED, Json(view)).into_response())
}

impl From<CreateWorkspaceError> for Error {
    fn from(error: CreateWorkspaceError) -> Self {
        match error {
            CreateWorkspaceError::SlugTaken(_) => Error::conflict(
                "slug_taken",
                "There is, or was, a workspace of this slug. Choose another one.",
            ),
            CreateWorkspaceError::BadSlug(_) => Error::field(
                "slug",
                "must have 1 to 63 characters of a-z, 0-9 and `-`, beginning with a letter or a digit",
            ),
            CreateWorkspaceError::BadName => {
                Error::field("name", "must have 1 to 100 characters on one line")
            }
            CreateWorkspaceError::Store(error) => error.into(),
        }
    }
}
