//! `/api/agents/…`: delegation profiles that a model writes, for admins. One that an author writes is part of the
//! agent, and saved with it.

use super::App;
use super::auth::AdminCaller;
use super::error::{Error, Problem};
use super::extract::{Json, Path};
use super::if_match::IfMatch;
use crate::domain::agent::NewProfile;
use crate::domain::ids::AgentId;
use crate::profiles::ProfileError;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use std::time::Duration;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(generate_profile))
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
