//! `/api/agents/…`: delegation profiles that a model writes, for admins: of one agent, or of all that lack
//! one, in a job. One that an author writes is part of the agent, and saved with it.

use super::App;
use super::auth::AdminCaller;
use super::error::{Error, Problem};
use super::extract::{FromQuery, Json, Path, Query, QueryReader};
use super::if_match::IfMatch;
use super::page::Page;
use crate::domain::agent::NewProfile;
use crate::domain::ids::{AgentId, BackfillId};
use crate::lifecycle::backfill;
use crate::profiles::ProfileError;
use crate::store::{
    self,
    backfills::{self, Backfill, BackfillAgent},
};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::time::Duration;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const LIST: &str = "profile-backfill";

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(generate_profile))
        .routes(routes!(begin_backfill))
        .routes(routes!(get_backfill))
}

/// Have an agent's delegation profile written
///
/// A model writes it from the draft's name, instructions and tools. It is stored in `config.delegation_profile` in the place
/// of the one before, and published at once; a draft with other unpublished changes stays unpublished.
#[utoipa::path(
    post,
    path = "/api/agents/{id}/delegation-profile",
    tag = "agents",
    security(("bearer" = ["admin"])),
    params(
        ("id" = AgentId, Path, description = "Its `agent_group_id`"),
        ("If-Match" = Option<String>, Header, description = "Only if the agent still has this ETag"),
    ),
    responses(
        (status = 200, body = NewProfile, description = "The agent's new revision is in ETag"),
        (status = 412, body = Problem, content_type = "application/problem+json",
            description = "Somebody has changed the agent since, or while the model wrote (`stale_revision`)"),
        (status = 502, body = Problem, content_type = "application/problem+json",
            description = "The model gave no profile; the stored one is as it was (`profile_generation_failed`)"),
    )
)]
async fn generate_profile(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<AgentId>,
    IfMatch(revision): IfMatch,
) -> Result<Response, Error> {
    // An answer of our own comes before the general one to requests that take too long.
    let patience = Duration::from_secs(app.config.server.request_timeout_seconds).mul_f64(0.9);
    let written = app
        .profiles
        .generate(caller.workspace, id, revision, patience);
    let (profile, agent) = written.await?;
    let etag = format!("\"{}\"", agent.revision);
    Ok(([(header::ETAG, etag)], Json(profile)).into_response())
}

#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
struct Force {
    /// Write those anew that are there.
    #[param(default = false)]
    force: bool,
}

impl FromQuery for Force {
    fn from_query(query: &mut QueryReader) -> Self {
        let force = query.optional("force", "true or false");
        Force {
            force: force.unwrap_or(false),
        }
    }
}

/// Have the missing delegation profiles written
///
/// Of all agents of the workspace, drafts included, in a job that workers do. If one runs already, this answers with that.
#[utoipa::path(
    post,
    path = "/api/agents/delegation-profiles/backfill",
    tag = "agents",
    security(("bearer" = ["admin"])),
    params(Force),
    responses((status = 202, body = Backfill, description = "The job, as it is now; its address is in Location"))
)]
async fn begin_backfill(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Query(query): Query<Force>,
) -> Result<Response, Error> {
    let id = backfill::start(&app.pool, &app.hub, caller.workspace, query.force).await?;
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let job = backfills::get(&mut conn, caller.workspace, id).await?;
    let job = job.ok_or(Error::NotFound)?;
    let address = format!("/api/agents/delegation-profiles/backfill/{id}");
    Ok((
        StatusCode::ACCEPTED,
        [(header::LOCATION, address)],
        Json(job),
    )
        .into_response())
}

/// A backfill with what has become of each agent.
#[derive(Serialize, ToSchema)]
pub struct BackfillReport {
    #[serde(flatten)]
    pub job: Backfill,
    /// In order of creation.
    pub items: Vec<BackfillAgent>,
    /// Give it as `cursor` for the next page; null on the last one.
    pub next_cursor: Option<String>,
}

/// See a backfill of delegation profiles
///
/// It is kept for 30 days after its end.
#[utoipa::path(
    get,
    path = "/api/agents/delegation-profiles/backfill/{id}",
    tag = "agents",
    security(("bearer" = ["admin"])),
    params(("id" = BackfillId, Path), Page),
    responses((status = 200, body = BackfillReport))
)]
async fn get_backfill(
    State(app): State<App>,
    AdminCaller(caller): AdminCaller,
    Path(id): Path<BackfillId>,
    Query(page): Query<Page>,
) -> Result<Json<BackfillReport>, Error> {
    let after = page.after(LIST)?.map(AgentId);
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let job = backfills::get(&mut conn, caller.workspace, id).await?;
    let job = job.ok_or(Error::NotFound)?;
    let wanted = page.wanted();
    let rows = backfills::agents(&mut conn, caller.workspace, id, after, wanted).await?;
    let (items, next_cursor) = page.cut(LIST, rows, |agent| agent.agent_group_id.0);
    Ok(Json(BackfillReport {
        job,
        items,
        next_cursor,
    }))
}

impl From<ProfileError> for Error {
    fn from(error: ProfileError) -> Self {
        match error {
            ProfileError::Edit(error) => error.into(),
            ProfileError::NotWritten(reason) => Error::BadGateway {
                code: "profile_generation_failed",
                detail: format!("{reason} The stored profile is as it was."),
                retry_after: None,
            },
        }
    }
}
