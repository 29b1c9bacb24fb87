//! P-2: every field of every body in the document, missing, null, of another type, too long, or no value of its list.
//!
//! A new route is met here without anybody adding it. Where a patch is declared as any JSON, its fields are those of the
//! POST beside it.

use crate::http::{Api, config, request, workspace};
use crate::support;
use crate::tenancy::{Route, routes, things};
use axum::http::{Method, header};
use reconvene::api::auth::Role;
use serde_json::{Value, json};

/// No field takes so many characters, and the body is still within its limit.
const TOO_LONG: usize = 500_000;

/// T-3: cut instead of refused.
const CUT: [&str; 1] = ["/api/chat/message title"];

pub struct Field {
    /// `model.provider`, `phases[0].name`
    pub path: String,
    /// JSON pointer of the same place.
    pointer: String,
    is_required: bool,
    schema: Value,
}

/// The routes that take a JSON body of known fields.
pub fn routes_with_fields() -> Vec<(Route, Vec<Field>)> {
    let document = serde_json::to_value(reconvene::api::document()).unwrap();
    let schema_of = |route: &Route| {
        let content = &route.operation["requestBody"]["content"];
        resolved(&document, &content["application/json"]["schema"])
    };
    let all = routes();
    let mut found = Vec::new();
    for route in routes() {
        let mut schema = schema_of(&route);
        if route.method == Method::PATCH && !schema["properties"].is_object() {
            let beside = route.path.trim_end_matches("/{id}");
            let post = all
                .iter()
                .find(|other| other.method == Method::POST && other.path == beside);
            schema = schema_of(post.unwrap_or_else(|| panic!("{beside} has no POST")));
            schema["required"] = json!([]);
        }
        let mut fields = Vec::new();
        collect(&document, &schema, "", "", true, &mut fields);
        if !fields.is_empty() {
            found.push((route, fields));
        }
    }
    found
}

/// The schema behind references and choices that are null.
fn resolved(document: &Value, schema: &Value) -> Value {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = document.pointer(reference.trim_start_matches('#'));
        return resolved(document, target.unwrap());
    }
    for choice in ["oneOf", "anyOf"] {
        let some = schema[choice].as_array();
        if let Some(schema) = some.and_then(|all| all.iter().find(|one| one["type"] != "null")) {
            return resolved(document, schema);
        }
    }
    schema.clone()
}

fn collect(
    document: &Value,
    schema: &Value,
    path: &str,
    pointer: &str,
    is_top: bool,
    fields: &mut Vec<Field>,
) {
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let dot = if is_top { "" } else { "." };
        let field = Field {
            path: format!("{path}{dot}{name}"),
            pointer: format!("{pointer}/{name}"),
            is_required: false,
            schema: resolved(document, schema),
        };
        let items = resolved(document, &field.schema["items"]);
        let (path, pointer) = (field.path.clone(), field.pointer.clone());
        let inner = field.schema.clone();
        fields.push(field);
        collect(document, &inner, &path, &pointer, false, fields);
        let (path, pointer) = (format!("{path}[0]"), format!("{pointer}/0"));
        collect(document, &items, &path, &pointer, false, fields);
    }
    let required = schema["required"].as_array();
    for name in required.into_iter().flatten().filter_map(Value::as_str) {
        let pointer = format!("{pointer}/{name}");
        if let Some(field) = fields.iter_mut().find(|field| field.pointer == pointer) {
            field.is_required = true;
        }
    }
}

impl Field {
    pub fn is_id(&self) -> bool {
        self.schema["format"] == "uuid"
    }

    fn kind(&self) -> &str {
        let kind = &self.schema["type"];
        let first = kind
            .as_array()
            .and_then(|all| all.iter().find(|kind| *kind != "null"));
        first.unwrap_or(kind).as_str().unwrap_or_default()
    }

    /// What can not be taken in this place.
    fn bad_values(&self) -> Vec<Value> {
        let mut bad = match self.kind() {
            "string" => vec![
                json!(1),
                json!(true),
                json!(["a"]),
                json!({"a": 1}),
                json!("x".repeat(TOO_LONG)),
            ],
            "integer" | "number" => vec![json!("x"), json!(true), json!([]), json!({})],
            "boolean" => vec![json!("yes"), json!(1), json!([]), json!({})],
            "array" => vec![json!("x"), json!(1), json!({})],
            "object" => vec![json!("x"), json!(1), json!([])],
            // Any value at all.
            _ => vec![],
        };
        if self.schema["enum"].is_array() {
            bad.push(json!("no such value"));
        }
        if self.is_required && !bad.is_empty() {
            bad.push(Value::Null);
        }
        bad
    }

    /// The body with this value here, and least content around it.
    fn set(&self, body: &mut Value, value: Value) {
        let mut at = body;
        for part in self.pointer.trim_start_matches('/').split('/') {
            if part == "0" {
                if !at.is_array() {
                    *at = json!([{}]);
                }
                at = &mut at[0];
            } else {
                if !at.is_object() {
                    *at = json!({});
                }
                at = &mut at[part];
            }
        }
        *at = value;
    }
}

// P-2, A-4: 422 with the path, whatever is wrong; null and numbers in the place of a choice too.
#[tokio::test]
async fn every_field_of_every_body_is_judged_by_its_path() {
    let mut config = config();
    for limit in [
        &mut config.limits.login_attempts_per_account_per_minute,
        &mut config.limits.login_attempts_per_source_per_minute,
        &mut config.limits.workspace_requests_per_minute,
    ] {
        *limit = 0;
    }
    let api = Api::start_with(support::database().await, config);
    let home = workspace(&api.pool).await;
    let things = things(&api.pool, home).await;
    let token = api.token(home, Role::Operator);
    let mut wrong = Vec::new();
    let (mut routes, mut cases) = (0, 0);
    for (route, fields) in routes_with_fields() {
        routes += 1;
        for field in fields {
            let good = route.body().unwrap_or_else(|| json!({}));
            let mut bodies = Vec::new();
            for value in field.bad_values() {
                let mut body = good.clone();
                field.set(&mut body, value.clone());
                bodies.push((value.to_string().chars().take(20).collect(), body));
            }
            if field.is_required && !field.path.contains(['.', '[']) {
                let mut body = good.clone();
                body.as_object_mut().unwrap().remove(&field.path);
                bodies.push(("missing".to_owned(), body));
            }
            for (what, body) in bodies {
                let name = format!("{} {}", route.path, field.path);
                if what.starts_with("\"xx") && CUT.contains(&name.as_str()) {
                    continue;
                }
                cases += 1;
                let path = things
                    .path(&route)
                    .replace("/guess", "/batch_fanout.enabled");
                let mut request = request(route.method.clone(), &path, &token, Some(body));
                if route
                    .parameters("header")
                    .iter()
                    .any(|name| name == "If-Match")
                {
                    let etag = "1".parse().unwrap();
                    request.headers_mut().insert(header::IF_MATCH, etag);
                }
                let answer = api.send(request).await;
                let errors = match answer.status.as_u16() {
                    422 => answer.json()["errors"].clone(),
                    _ => Value::Null,
                };
                let told = errors.as_array().is_some_and(|errors| {
                    let at = |error: &Value| error["path"].as_str().unwrap_or_default().to_owned();
                    errors.iter().any(|error| at(error) == field.path)
                });
                if !told {
                    let text: String = answer.text().chars().take(300).collect();
                    wrong.push(format!(
                        "{} {name} {what}: {} {text}",
                        route.method, answer.status
                    ));
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {cases}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(routes > 12 && cases > 250, "{routes} routes, {cases} cases");
}
