//! HTTP under `/api`: routes, callers, shapes, errors. Handlers parse, call a use case or a view, and shape the answer;
//! they decide nothing about tasks.
//!
//! A route and its entry in the OpenAPI document are one declaration. What every route has in common (problem answers,
//! layers) is added here, once. A handler that takes no `Caller` is public, and declares no `security`; one for admins
//! takes `AdminCaller` and declares `security(("bearer" = ["admin"]))`. `tests/it/tenancy.rs` holds both to it.

pub mod agents;
pub mod api_keys;
pub mod auth;
pub mod budget;
pub mod chat;
pub mod configured_tools;
pub mod credentials;
pub mod cursor;
pub mod dead_events;
pub mod decision_logs;
pub mod deletes;
pub mod error;
pub mod extract;
pub mod feed;
pub mod flags;
mod health;
mod if_match;
mod inbox;
pub mod login;
pub mod members;
pub mod model_providers;
mod openapi;
pub mod outage;
mod page;
mod profiles;
pub mod rate;
mod replay;
mod secret;
pub mod stream;
pub mod tasks;
pub mod tools;
pub mod usage;
pub mod waits;
mod why;
pub mod workspaces;

use crate::bus::Bus;
use crate::config::Config;
use crate::lifecycle::submit::Submitter;
use crate::llm::Models;
use crate::profiles::Profiles;
use crate::prompts::Prompts;
use crate::roster::Assembler;
use crate::runtime::Hub;
use crate::vault::Vault;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use error::Error;
use sqlx::PgPool;
use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::CorsLayer;
use tower_http::request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer};
use tower_http::sensitive_headers::SetSensitiveRequestHeadersLayer;
use tower_http::set_header::SetResponseHeaderLayer;
use tower_http::trace::TraceLayer;
use tracing::{Span, debug, info_span};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use utoipa_swagger_ui::SwaggerUi;

/// What handlers work with. Cloned several times for each request, and cheap to clone.
#[derive(Clone)]
pub struct App(Arc<Parts>);

impl App {
    pub fn new(parts: Parts) -> Self {
        Self(Arc::new(parts))
    }
}

impl Deref for App {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

pub struct Parts {
    pub pool: PgPool,
    pub config: Arc<Config>,
    pub hub: Arc<Hub>,
    /// Asked whether hints of other processes arrive, for `/readyz`.
    pub bus: Arc<Bus>,
    pub outage: Arc<outage::Outage>,
    pub submitter: Submitter,
    pub auth: Arc<auth::Auth>,
    pub limits: Arc<rate::Limits>,
    /// Asked again when a decision is replayed.
    pub models: Models,
    /// Whom agents may name.
    pub roster: Arc<Assembler>,
    /// What writes delegation profiles.
    pub profiles: Arc<Profiles>,
    /// What tools are described with.
    pub prompts: Arc<Prompts>,
    /// What credentials and keys of model providers are encrypted with.
    pub vault: Arc<Vault>,
    /// The roles of this process, for `/readyz`.
    pub roles: Arc<[String]>,
    /// Cancelled when the process begins to stop: streams end, so that the server can.
    pub shutdown: CancellationToken,
}

/// All routes, ready to serve.
pub fn router(app: App) -> axum::Router {
    let (api, document) = documented_routes(&app).split_for_parts();
    let document = openapi::complete(document);
    api.merge(SwaggerUi::new("/api/docs").url("/api/openapi.json", document))
        .fallback(async || Error::RouteNotFound)
        .method_not_allowed_fallback(async || Error::MethodNotAllowed)
        // One layer of many, outermost first: each layer of a router is boxed by itself, and cloned for each request with
        // all beneath it.
        .layer((
            SetRequestIdLayer::x_request_id(MakeRequestUuid),
            SetSensitiveRequestHeadersLayer::new([header::AUTHORIZATION, header::COOKIE]),
            TraceLayer::new_for_http()
                .make_span_with(request_span)
                .on_request(())
                .on_response(log_response::<_>)
                .on_failure(()),
            PropagateRequestIdLayer::x_request_id(),
            SetResponseHeaderLayer::overriding(
                header::X_CONTENT_TYPE_OPTIONS,
                HeaderValue::from_static("nosniff"),
            ),
            SetResponseHeaderLayer::if_not_present(
                header::CACHE_CONTROL,
                HeaderValue::from_static("no-store"),
            ),
            cors(&app.config.server.cors_origins),
            CatchPanicLayer::custom(answer_panic),
            DefaultBodyLimit::max(app.config.server.body_limit_bytes),
        ))
        .with_state(app)
}

/// Health and readiness alone, for a port of their own: a process without the role api answers nothing else.
pub fn health_router(app: App) -> axum::Router {
    axum::Router::new()
        .route("/healthz", get(health::healthz))
        .route("/readyz", get(health::readyz))
        .fallback(async || Error::RouteNotFound)
        .method_not_allowed_fallback(async || Error::MethodNotAllowed)
        .with_state(app)
}

/// The OpenAPI document, as `/api/openapi.json` shows it.
pub fn document() -> utoipa::openapi::OpenApi {
    let routes = health_routes().merge(timed_routes()).merge(stream_routes());
    openapi::complete(routes.into_openapi())
}

fn documented_routes(app: &App) -> OpenApiRouter<App> {
    let timed = middleware::from_fn_with_state(app.clone(), time_out);
    let of_database = timed_routes().layer(timed.clone()).merge(stream_routes());
    let refusing = middleware::from_fn_with_state(app.clone(), outage::refuse_at_once);
    health_routes()
        .layer(timed)
        .merge(of_database.layer(refusing))
}

/// Routes that tell of an outage in words of their own.
fn health_routes() -> OpenApiRouter<App> {
    OpenApiRouter::with_openapi(openapi::skeleton())
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
}

fn timed_routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(chat::router())
        .merge(tasks::router())
        .merge(deletes::router())
        .merge(inbox::router())
        .merge(waits::router())
        .merge(why::router())
        .merge(agents::router())
        .merge(model_providers::router())
        .merge(profiles::router())
        .merge(tools::router())
        .merge(configured_tools::router())
        .merge(credentials::router())
        .merge(budget::router())
        .merge(dead_events::router())
        .merge(decision_logs::router())
        .merge(flags::router())
        .merge(login::router())
        .merge(members::router())
        .merge(api_keys::router())
        .merge(usage::router())
        .merge(workspaces::router())
}

/// Routes that answer for as long as the client listens, or a model takes.
fn stream_routes() -> OpenApiRouter<App> {
    stream::router().merge(replay::router())
}

async fn time_out(State(app): State<App>, request: Request, next: Next) -> Response {
    let limit_seconds = app.config.server.request_timeout_seconds;
    match tokio::time::timeout(Duration::from_secs(limit_seconds), next.run(request)).await {
        Ok(response) => response,
        Err(_) => Error::Timeout { limit_seconds }.into_response(),
    }
}

fn answer_panic(panic: Box<dyn Any + Send + 'static>) -> Response {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("a panic without a message");
    Error::internal(format!("a handler panicked: {message}")).into_response()
}

/// Only the listed origins; with none, no other origin at all.
fn cors(origins: &[String]) -> CorsLayer {
    let origins = origins
        .iter()
        .filter_map(|origin| match HeaderValue::from_str(origin) {
            Ok(value) => Some(value),
            Err(_) => {
                tracing::warn!("server.cors_origins: {origin:?} is not an origin and is left out");
                None
            }
        });
    CorsLayer::new()
        .allow_origin(origins.collect::<Vec<_>>())
        .allow_methods([
            Method::GET,
            Method::POST,
            Method::PUT,
            Method::PATCH,
            Method::DELETE,
        ])
        .allow_headers([
            header::AUTHORIZATION,
            header::CONTENT_TYPE,
            header::IF_MATCH,
            HeaderName::from_static("idempotency-key"),
            HeaderName::from_static("last-event-id"),
            HeaderName::from_static(auth::cookie::CSRF_HEADER),
        ])
        // A console on another origin of the same site logs in with a cookie.
        .allow_credentials(true)
        .expose_headers([
            header::ETAG,
            header::LOCATION,
            header::RETRY_AFTER,
            HeaderName::from_static("x-request-id"),
        ])
        .max_age(Duration::from_secs(600))
}

/// Names the route, never the query or the body: both are users' data.
fn request_span(request: &Request) -> Span {
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or("", MatchedPath::as_str);
    let id = request
        .headers()
        .get("x-request-id")
        .and_then(|id| id.to_str().ok())
        .unwrap_or("");
    info_span!("request", http.method = %request.method(), http.route = route, request.id = id)
}

fn log_response<B>(response: &axum::http::Response<B>, latency: Duration, _: &Span) {
    debug!(
        http.status = response.status().as_u16(),
        latency_ms = latency.as_millis() as u64,
        "answered"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    // P-2
    #[tokio::test]
    async fn a_panic_is_answered_without_its_message() {
        let panicking = axum::Router::new()
            .route(
                "/",
                axum::routing::get(async || -> () { panic!("secret details") }),
            )
            .layer(CatchPanicLayer::custom(answer_panic));
        let request = Request::get("/").body(axum::body::Body::empty()).unwrap();
        let response = tower::ServiceExt::oneshot(panicking, request)
            .await
            .unwrap();
        assert_eq!(response.status(), 500);
        let body = axum::body::to_bytes(response.into_body(), 10_000)
            .await
            .unwrap();
        let body = String::from_utf8_lossy(&body);
        assert!(
            body.contains("internal_error") && !body.contains("secret"),
            "{body}"
        );
    }
}
