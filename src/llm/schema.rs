//! Whether a model can be held to a schema of an answer while it writes, and not only asked to keep to it.

use serde_json::Value;

/// The keywords that every provider that does so knows.
const KNOWN: [&str; 10] = [
    "type",
    "title",
    "description",
    "enum",
    "const",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "anyOf",
];

/// One object of known keywords only, in which every property is required and no other allowed, all the way down.
pub fn is_closed(schema: &Value) -> bool {
    schema["type"] == "object" && is_closed_part(schema)
}

fn is_closed_part(schema: &Value) -> bool {
    let Some(fields) = schema.as_object() else {
        return false;
    };
    let may_be_object = match &schema["type"] {
        Value::Array(types) => types.iter().any(|name| name == "object"),
        name => name == "object",
    };
    let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
    let properties = schema["properties"].as_object();
    let mut properties = properties.into_iter().flatten();
    let choices = schema["anyOf"].as_array();
    fields.keys().all(|key| KNOWN.contains(&key.as_str()))
        && (!may_be_object || schema["additionalProperties"] == false)
        && properties.all(|(name, part)| {
            required.iter().any(|required| required == name) && is_closed_part(part)
        })
        && schema.get("items").is_none_or(is_closed_part)
        && choices.is_none_or(|choices| choices.iter().all(is_closed_part))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    // T-16
    #[test]
    fn a_closed_schema_is_known_through_and_through() {
        let object = |part: Value| json!({"type": "object", "properties": {"a": part}, "required": ["a"], "additionalProperties": false});
        let text = json!({"type": "string"});
        let with = |key: &str, value: Value| {
            let mut schema = object(text.clone());
            schema[key] = value;
            schema
        };
        for (schema, closed) in [
            (object(text.clone()), true),
            (
                object(json!({"type": ["string", "null"], "enum": ["x", null]})),
                true,
            ),
            (
                object(json!({"type": "array", "items": object(text.clone())})),
                true,
            ),
            (
                object(json!({"anyOf": [text.clone(), object(text.clone())]})),
                true,
            ),
            (json!({"type": "object"}), false),
            (text.clone(), false),
            (json!(true), false),
            (with("required", json!([])), false),
            (with("additionalProperties", json!(true)), false),
            (with("$ref", json!("#")), false),
            (object(json!({"type": "string", "maxLength": 3})), false),
            (object(json!({"type": ["object", "null"]})), false),
            (
                object(json!({"type": "array", "items": {"type": "object"}})),
                false,
            ),
            (object(json!({"anyOf": [{"type": "object"}]})), false),
            (object(json!(true)), false),
        ] {
            assert_eq!(is_closed(&schema), closed, "{schema}");
        }
    }
}
