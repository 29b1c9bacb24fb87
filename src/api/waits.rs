//! What tasks wait for: skipping waits, and signals from outside (W-13, W-15).

use super::App;
use super::auth::Caller;
use super::error::{Error, FieldError};
use super::extract::{AnyJson, Json, Path, check_storable};
use crate::domain::ids::{GroupId, TaskId};
use crate::lifecycle;
use crate::lifecycle::wait::token_hash;
use crate::store::signals::{NewExternal, Received};
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const KEY_CHARS_MAX: usize = 200;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(skip_waits))
        .routes(routes!(post_signal))
        .routes(routes!(call_back))
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Skip {
    /// Only this group of waits; absent, all that are pending.
    group_id: Option<GroupId>,
}

#[derive(Serialize, ToSchema)]
pub struct Skipped {
    /// Waits that this call gave up.
    skipped: usize,
}

/// Skip what a task waits for
///
/// The task resumes and is told what was skipped. Children run on; nobody hears of their end. Calling it again changes
/// nothing.
#[utoipa::path(
    post,
    path = "/api/tasks/{id}/awaits/skip",
    tag = "tasks",
    security(("bearer" = [])),
    params(("id" = TaskId, Path)),
    request_body = Option<Skip>,
    responses((status = 200, body = Skipped))
)]
async fn skip_waits(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<TaskId>,
    body: Option<Json<Skip>>,
) -> Result<Json<Skipped>, Error> {
    let skip = body.map(|Json(skip)| skip).unwrap_or_default();
    let skipped =
        lifecycle::skip::skip(&app.pool, &app.hub, caller.workspace, id, skip.group_id).await?;
    let skipped = skipped.ok_or(Error::NotFound)?;
    Ok(Json(Skipped { skipped }))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Signal {
    /// `external`.
    #[schema(example = "external")]
    source_type: String,
    /// What has happened: the `key` that an agent waits for. 1 to 200 characters.
    #[schema(example = "order-1234-paid")]
    correlation_key: String,
    /// Names this report: another with the same one changes nothing. 1 to 200 characters.
    #[schema(example = "payment-98765")]
    dedup_key: String,
    /// What the waiting task is told, as data.
    #[serde(default)]
    payload: Option<Value>,
}

#[derive(Serialize, ToSchema)]
pub struct SignalReceipt {
    /// `matched`: a task waited for it and resumes. `pending`: nobody waits yet; it is kept for
    /// `signals.early_ttl_seconds`. `no_match`: nobody has waited, or nobody does any more.
    #[schema(example = "matched")]
    status: String,
    /// `false`: it had been reported before, and this call changed nothing.
    new: bool,
}

impl From<Received> for SignalReceipt {
    fn from(received: Received) -> Self {
        Self {
            status: received.status,
            new: received.is_new,
        }
    }
}

/// Report that something has happened
///
/// Completes the wait of the agent that called `wait_for_signal` with this key. It may come before the wait.
#[utoipa::path(
    post,
    path = "/api/signals",
    tag = "signals",
    security(("bearer" = [])),
    request_body = Signal,
    responses((status = 202, body = SignalReceipt))
)]
async fn post_signal(
    State(app): State<App>,
    caller: Caller,
    Json(signal): Json<Signal>,
) -> Result<(StatusCode, Json<SignalReceipt>), Error> {
    let mut errors = Vec::new();
    if signal.source_type != "external" {
        let reason = "must be external; the service makes all other signals itself";
        errors.push(FieldError::new("source_type", reason));
    }
    let correlation_key = checked_key("correlation_key", &signal.correlation_key, &mut errors);
    let dedup_key = checked_key("dedup_key", &signal.dedup_key, &mut errors);
    if let Some(payload) = &signal.payload {
        errors.extend(check_storable("payload", payload).err());
    }
    if !errors.is_empty() {
        return Err(Error::InvalidBody(errors));
    }
    let new = NewExternal {
        workspace: caller.workspace,
        correlation_key,
        dedup_key,
        payload: signal.payload,
    };
    let received = lifecycle::signal::signal(&app.pool, &app.hub, &new).await?;
    Ok((StatusCode::ACCEPTED, Json(received.into())))
}

/// The key without blanks around it, as the tool takes it too.
fn checked_key(path: &str, key: &str, errors: &mut Vec<FieldError>) -> String {
    let key = key.trim();
    let fits = (1..=KEY_CHARS_MAX).contains(&key.chars().count()) && !key.contains('\0');
    if !fits {
        let reason =
            format!("must have 1 to {KEY_CHARS_MAX} characters after trimming, and no NUL");
        errors.push(FieldError::new(path, reason));
    }
    key.to_owned()
}

/// Report through a callback URL
///
/// For whoever has no account: the token in the URL, which the result of `wait_for_signal` names, stands for one wait.
/// The body is the payload, any JSON, and may be left out.
#[utoipa::path(
    post,
    path = "/api/callbacks/{token}",
    tag = "signals",
    params(("token" = String, Path, description = "The secret of one wait")),
    request_body = Option<Value>,
    responses((status = 202, body = SignalReceipt))
)]
async fn call_back(
    State(app): State<App>,
    Path(token): Path<String>,
    AnyJson(payload): AnyJson,
) -> Result<(StatusCode, Json<SignalReceipt>), Error> {
    let hash = token_hash(&token);
    let received = lifecycle::signal::call_back(&app.pool, &app.hub, hash, payload).await?;
    let received = received.ok_or(Error::NotFound)?;
    Ok((StatusCode::ACCEPTED, Json(received.into())))
}
