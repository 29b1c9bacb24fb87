//! What the OpenAPI document says about all routes alike: title, security, and the problem answers that follow from what a
//! route takes. Handlers declare only what is theirs.

use super::error::{FieldError, Problem};
use utoipa::openapi::path::{Operation, ParameterIn};
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{ContentBuilder, OpenApi as Document, Ref, RefOr, ResponseBuilder};
use utoipa::{Modify, OpenApi};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Reconvene",
        description = "Runs AI-agent tasks. An agent hands work to others, rests while they work, and reconvenes with \
                       everybody's results. Errors are RFC 9457 problem details with a stable `code`.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    tags(
        (name = "chat", description = "Start a task, or go on with one"),
        (name = "tasks", description = "See, stop and delete tasks"),
        (name = "signals", description = "Report what tasks wait for"),
        (name = "agents", description = "Who does the work"),
        (name = "auth", description = "Log in, and say who may"),
        (name = "tools", description = "What agents work with, and the secrets that it takes"),
        (name = "admin", description = "Look after the service"),
        (name = "service", description = "Health of this process"),
    ),
    components(schemas(Problem, FieldError)),
    modifiers(&Bearer),
)]
struct Skeleton;

pub fn skeleton() -> Document {
    Skeleton::openapi()
}

struct Bearer;

impl Modify for Bearer {
    fn modify(&self, document: &mut Document) {
        let scheme = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .bearer_format("JWT")
            .description(Some(
                "An API key (`rk_…`), or a JWT with `sub`, `ws` (workspace id), `role` (`member`, `admin`, `operator`), `exp`, `iss`, `aud`. \
                 A role named by an operation is the least that it needs. `reconvene token` makes one.",
            ))
            .build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("bearer", SecurityScheme::Http(scheme));
        let cookie = ApiKeyValue::with_description(
            "reconvene_session",
            "The cookie of a log-in. Writes also send the session's `csrf_token` in the header `X-CSRF-Token`.",
        );
        components.add_security_scheme("cookie", SecurityScheme::ApiKey(ApiKey::Cookie(cookie)));
    }
}

/// Adds the problem answers, and the cookie beside each token.
pub fn complete(mut document: Document) -> Document {
    for item in document.paths.paths.values_mut() {
        let methods = [
            &mut item.get,
            &mut item.post,
            &mut item.put,
            &mut item.patch,
            &mut item.delete,
        ];
        for operation in methods.into_iter().flatten() {
            add_problems(operation);
            add_cookie(operation);
        }
    }
    document
}

fn add_problems(operation: &mut Operation) {
    let securities = operation.security.as_deref().unwrap_or_default();
    let roles = securities
        .iter()
        .filter_map(|security| serde_json::to_value(security).ok());
    let named_role = roles.into_iter().any(|roles| {
        roles["bearer"]
            .as_array()
            .is_some_and(|names| !names.is_empty())
    });
    let has = |place: ParameterIn| {
        operation
            .parameters
            .iter()
            .flatten()
            .any(|parameter| matches!(parameter, RefOr::T(p) if p.parameter_in == place))
    };
    let body = operation.request_body.is_some();

    let problems = [
        (
            !securities.is_empty(),
            "401",
            "No valid token (`unauthenticated`)",
        ),
        (named_role, "403", "The role is too low (`forbidden`)"),
        (
            !securities.is_empty(),
            "429",
            "Too many requests of this workspace (`rate_limited`); see Retry-After",
        ),
        (
            has(ParameterIn::Path),
            "404",
            "No such thing in this workspace (`not_found`)",
        ),
        (body, "400", "The body is not JSON (`malformed_json`)"),
        (body, "413", "The body is too large (`body_too_large`)"),
        (
            body,
            "415",
            "The body is not declared as JSON (`unsupported_media_type`)",
        ),
        (
            body || has(ParameterIn::Query),
            "422",
            "A field can not be taken (`invalid_body`, `invalid_query`); `errors` names each",
        ),
        (
            !securities.is_empty(),
            "503",
            "The database can not be reached (`database_unavailable`) or the time is up (`request_timeout`); see Retry-After",
        ),
    ];
    for (applies, status, description) in problems {
        if applies && !operation.responses.responses.contains_key(status) {
            operation
                .responses
                .responses
                .insert(status.to_owned(), problem(description));
        }
    }
}

/// Whoever may call with a token may call with a cookie.
fn add_cookie(operation: &mut Operation) {
    let Some(securities) = &mut operation.security else {
        return;
    };
    let cookies = securities.iter().filter_map(|security| {
        let value = serde_json::to_value(security).ok()?;
        let roles: Vec<String> = serde_json::from_value(value.get("bearer")?.clone()).ok()?;
        Some(SecurityRequirement::new("cookie", roles))
    });
    let cookies: Vec<_> = cookies.collect();
    securities.extend(cookies);
}

fn problem(description: &str) -> RefOr<utoipa::openapi::Response> {
    let content = ContentBuilder::new()
        .schema(Some(Ref::from_schema_name("Problem")))
        .build();
    ResponseBuilder::new()
        .description(description)
        .content("application/problem+json", content)
        .build()
        .into()
}
