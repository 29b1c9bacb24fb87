use super::*;
use serde_json::json;

fn problems(body: Value) -> String {
    AgentDefinition::parse(&body).unwrap_err().to_string()
}

#[test]
fn a_whole_definition_keeps_every_field() {
    // A-1
    let body = json!({
        "name": "  Researcher ", "instructions": "Look it up.\nCite.", "kind": "codeact", "tools": ["ask_user", "my-crm.find"],
        "phases": [{"name": "Plan", "instructions": "Think.", "tools": ["ask_user"]}],
        "model": {"provider": "openai", "name": "gpt-x", "temperature": 0.5, "max_output_tokens": 900, "reasoning": "low"},
        "output_schema": {"type": "object"}, "max_iterations": 1000, "is_public": true, "config": {"auto_delegate": false},
    });
    let read = AgentDefinition::parse(&body).unwrap();
    let mut expected = body.clone();
    expected["name"] = json!("Researcher");
    assert_eq!(serde_json::to_value(&read).unwrap(), expected);
    let stored: AgentDefinition = serde_json::from_value(expected).unwrap();
    assert_eq!(stored, read, "what was written is read back");
}

#[test]
fn absent_and_null_fields_get_their_defaults() {
    let named = AgentDefinition {
        name: "A".into(),
        ..AgentDefinition::default()
    };
    let nulls = json!({"name": "A", "instructions": null, "kind": null, "tools": null, "phases": null, "model": null,
        "output_schema": null, "max_iterations": null, "is_public": null, "config": null});
    for body in [json!({"name": "A"}), nulls] {
        assert_eq!(AgentDefinition::parse(&body).unwrap(), named);
    }
    assert_eq!(named.max_iterations, 50);
}

#[test]
fn every_problem_names_its_path() {
    // A-4
    let long = "x".repeat(101);
    for (body, expected) in [
        (json!([]), "expected an object, got a list"),
        (json!({}), "name: is required"),
        (json!({"name": null}), "name: is required"),
        (json!({"name": 5}), "name: expected a string, got a number"),
        (
            json!({"name": "  "}),
            "name: is empty; 1 to 100 characters are needed",
        ),
        (
            json!({"name": long}),
            "name: is 101 characters long; at most 100 are allowed",
        ),
        (
            json!({"name": "a\nb"}),
            "name: must be one line without control characters",
        ),
        (
            json!({"name": "a\u{2028}b"}),
            "name: must be one line without control characters",
        ),
        (
            json!({"name": "a\0b"}),
            "name: contains the character NUL (U+0000), which can not be stored; remove it",
        ),
        (
            json!({"name": "A", "instructions": "\0"}),
            "instructions: contains the character NUL (U+0000), which can not be stored; remove it",
        ),
        (
            json!({"name": "A", "instructions": "ä".repeat(200_001)}),
            "instructions: is 200001 characters long; at most 200000 are allowed",
        ),
        (
            json!({"name": "A", "kind": "Loop"}),
            "kind: expected one of loop, codeact",
        ),
        (
            json!({"name": "A", "tools": "ask_user"}),
            "tools: expected a list, got a string",
        ),
        (
            json!({"name": "A", "tools": vec!["t"; 201]}),
            "tools: has 201 entries; at most 200 are allowed",
        ),
        (
            json!({"name": "A", "tools": ["ok", 1]}),
            "tools[1]: expected a string, got a number",
        ),
        (
            json!({"name": "A", "tools": ["a b"]}),
            "tools[0]: expected the name of a tool: not empty, without blanks",
        ),
        (
            json!({"name": "A", "phases": [1]}),
            "phases[0]: expected an object, got a number",
        ),
        (
            json!({"name": "A", "phases": [{}]}),
            "phases[0].name: is required",
        ),
        (
            json!({"name": "A", "phases": [{"name": "P", "tool": []}]}),
            "phases[0].tool: is not a known field",
        ),
        (
            json!({"name": "A", "phases": [{"name": "P", "tools": [""]}]}),
            "phases[0].tools[0]: expected the name of a tool: not empty, without blanks",
        ),
        (
            json!({"name": "A", "model": "gpt"}),
            "model: expected an object, got a string",
        ),
        (
            json!({"name": "A", "model": {"provider": 1}}),
            "model.provider: expected a string, got a number",
        ),
        (
            json!({"name": "A", "model": {"temperature": 2.1}}),
            "model.temperature: expected a number from 0 to 2, got another number",
        ),
        (
            json!({"name": "A", "model": {"max_output_tokens": 0}}),
            "model.max_output_tokens: expected a whole number from 1 to 1000000, got another number",
        ),
        (
            json!({"name": "A", "model": {"reasoning": true}}),
            "model.reasoning: expected one of disabled, low, medium, high",
        ),
        (
            json!({"name": "A", "model": {"top_p": 1}}),
            "model.top_p: is not a known field",
        ),
        (
            json!({"name": "A", "output_schema": "text"}),
            "output_schema: expected an object, got a string",
        ),
        // T-16
        (
            json!({"name": "A", "output_schema": {"properties": {"a": [], "b": {}}}}),
            "output_schema.properties.a: value is not of types \"boolean\", \"object\"",
        ),
        (
            json!({"name": "A", "max_iterations": 1001}),
            "max_iterations: expected a whole number from 1 to 1000, got another number",
        ),
        (
            json!({"name": "A", "max_iterations": "50"}),
            "max_iterations: expected a whole number from 1 to 1000, got a string",
        ),
        (
            json!({"name": "A", "is_public": 1}),
            "is_public: expected a boolean, got a number",
        ),
        (
            json!({"name": "A", "colour": 1}),
            "colour: is not a known field",
        ),
        (
            json!({"name": "A", "a\nb": 1}),
            "a\u{fffd}b: is not a known field",
        ),
        (
            json!({"name": "A", "config": []}),
            "config: expected an object, got a list",
        ),
        (
            json!({"name": "A", "config": {"auto_delegate": "no"}}),
            "config.auto_delegate: expected a boolean, got a string",
        ),
        (
            json!({"name": "A", "config": {"delegation_enabled": null}}),
            "config.delegation_enabled: expected a boolean, got null",
        ),
        (
            json!({"name": "A", "config": {"delegation_profile": "helps"}}),
            "config.delegation_profile: expected an object, got a string",
        ),
        (
            json!({"name": "A", "config": {"delegation_profile": {"description": 1, "example_input": {}}}}),
            "config.delegation_profile.description: expected a string, got a number; \
             config.delegation_profile.example_input: expected a string, got an object",
        ),
        (
            json!({"name": "A", "config": {"delegation_profile": {"description": "d".repeat(4001)}}}),
            "config.delegation_profile.description: is 4001 characters long; at most 4000 are allowed",
        ),
        (
            json!({"name": "A", "config": {"settings": {"delegate_source_mode": "on"}}}),
            "config.settings.delegate_source_mode: expected a boolean, got a string",
        ),
        (
            json!({"name": "A", "config": {"mine": ["ok", {"deep": "\0"}]}}),
            "config.mine[1].deep: contains the character NUL (U+0000), which can not be stored; remove it",
        ),
        (
            json!({"name": "A", "config": {"a\0": 1}}),
            "config: has a key with the character NUL (U+0000), which can not be stored",
        ),
        (
            json!({"name": "A", "config": {"mine": "x".repeat(65_536)}}),
            "config: is 65547 bytes of JSON; at most 65536 are allowed",
        ),
        (
            json!({"kind": 1, "x": 1}),
            "name: is required; kind: expected one of loop, codeact; x: is not a known field",
        ),
    ] {
        assert_eq!(
            problems(body.clone()),
            expected,
            "{}",
            body.to_string().chars().take(100).collect::<String>()
        );
    }
}

#[test]
fn numbers_and_nesting_that_the_database_would_blow_up_on_are_refused() {
    for (number, fits) in [
        ("1", true),
        ("-12345678901234567890.123456789", true),
        ("1e300", true),
        ("1e-300", true),
        ("1E+397", true),
        ("1e400", false),
        ("1e-99999", false),
        ("1e99999999999999999999", false),
        (&"9".repeat(401), false),
    ] {
        let config: Value = serde_json::from_str(&format!(r#"{{"n": [{number}]}}"#)).unwrap();
        let read = AgentDefinition::parse(&json!({"name": "A", "config": config}));
        assert_eq!(read.is_ok(), fits, "{number}");
        if let Err(error) = read {
            assert_eq!(error.0[0].path, "config.n[0]");
        }
    }
    let deep = (0..70).fold(json!(1), |inner, _| json!([inner]));
    let error =
        AgentDefinition::parse(&json!({"name": "A", "output_schema": {"x": deep}})).unwrap_err();
    assert_eq!(error.0.len(), 1);
    assert_eq!(error.0[0].message, "is nested deeper than 64 levels");
}

#[test]
fn unknown_keys_of_config_are_kept_untouched() {
    // A-4
    let config = r#"{"b":null,"a":{"z":[1.50,123456789012345678901234567890]},"delegation_profile":{"tone":"x"},"settings":{"other":1}}"#;
    let config: Value = serde_json::from_str(config).unwrap();
    let agent = AgentDefinition::parse(&json!({"name": "A", "config": config})).unwrap();
    assert_eq!(
        Value::Object(agent.config.clone()).to_string(),
        config.to_string(),
        "order and digits too"
    );
    let patched = agent
        .patched(&json!({"config": {"auto_delegate": false}}))
        .unwrap();
    let mut expected = config;
    expected["auto_delegate"] = json!(false);
    assert_eq!(
        Value::Object(patched.config).to_string(),
        expected.to_string()
    );
}

#[test]
fn a_patch_changes_what_it_names_and_null_takes_back() {
    // A-1
    let agent = AgentDefinition::parse(&json!({"name": "A", "instructions": "i", "tools": ["x"], "max_iterations": 7,
        "model": {"name": "m", "temperature": 1}, "output_schema": {"type": "object"}, "config": {"keep": 1, "drop": 2}}))
    .unwrap();
    let patch = json!({"name": "B", "tools": ["y", "z"], "max_iterations": null, "model": {"temperature": null},
        "output_schema": null, "config": {"drop": null, "new": {"n": 1}}});
    let expected = AgentDefinition::parse(
        &json!({"name": "B", "instructions": "i", "tools": ["y", "z"],
        "model": {"name": "m"}, "config": {"keep": 1, "new": {"n": 1}}}),
    )
    .unwrap();
    assert_eq!(agent.patched(&patch).unwrap(), expected);
    assert_eq!(agent.patched(&json!({})).unwrap(), agent);
    for (patch, expected) in [
        (json!(null), "expected an object, got null"),
        (json!({"name": null}), "name: is required"),
        (json!({"revision": 3}), "revision: is not a known field"),
        (
            json!({"config": {"auto_delegate": 1}}),
            "config.auto_delegate: expected a boolean, got a number",
        ),
        (
            json!({"config": 1}),
            "config: expected an object, got a number",
        ),
    ] {
        assert_eq!(agent.patched(&patch).unwrap_err().to_string(), expected);
    }
}

#[test]
fn merge_patch_follows_the_examples_of_rfc_7396() {
    for (target, patch, expected) in [
        (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
        (
            json!({"a": "b"}),
            json!({"b": "c"}),
            json!({"a": "b", "b": "c"}),
        ),
        (json!({"a": "b"}), json!({"a": null}), json!({})),
        (
            json!({"a": "b", "b": "c"}),
            json!({"a": null}),
            json!({"b": "c"}),
        ),
        (json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"})),
        (json!({"a": "c"}), json!({"a": ["b"]}), json!({"a": ["b"]})),
        (
            json!({"a": {"b": "c"}}),
            json!({"a": {"b": "d", "c": null}}),
            json!({"a": {"b": "d"}}),
        ),
        (
            json!({"a": [{"b": "c"}]}),
            json!({"a": [1]}),
            json!({"a": [1]}),
        ),
        (json!(["a", "b"]), json!(["c", "d"]), json!(["c", "d"])),
        (json!({"a": "b"}), json!(["c"]), json!(["c"])),
        (json!({"a": "foo"}), json!(null), json!(null)),
        (json!({"a": "foo"}), json!("bar"), json!("bar")),
        (
            json!({"e": null}),
            json!({"a": 1}),
            json!({"e": null, "a": 1}),
        ),
        (
            json!([1, 2]),
            json!({"a": "b", "c": null}),
            json!({"a": "b"}),
        ),
        (
            json!({}),
            json!({"a": {"bb": {"ccc": null}}}),
            json!({"a": {"bb": {}}}),
        ),
    ] {
        let mut merged = target.clone();
        merge_patch(&mut merged, &patch);
        assert_eq!(merged, expected, "{target} patched by {patch}");
    }
}
