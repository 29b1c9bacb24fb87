use super::*;
use crate::config::layers::variable;
use secrecy::ExposeSecret;
use std::collections::BTreeMap;

/// The paths of all leaves in `config.yaml` as written, with the comment above each: read by hand, not by the parser that
/// is under test.
fn leaves_in_file() -> Vec<(String, String)> {
    let mut leaves = Vec::new();
    let (mut sections, mut comment) = (Vec::<&str>::new(), String::new());
    let mut lines = DEFAULTS.lines().peekable();
    while let Some(line) = lines.next() {
        let text = line.trim();
        if let Some(words) = text.strip_prefix('#') {
            comment = format!("{comment} {}", words.trim());
        } else if text.is_empty() {
            comment.clear();
        } else {
            let (key, _) = text.split_once(':').expect("a line is a comment or a key");
            let depth = |line: &str| (line.len() - line.trim_start().len()) / 2;
            sections.truncate(depth(line));
            sections.push(key);
            // Comments of a section's first key stand as deep as the key.
            let opens_section = lines
                .peek()
                .is_some_and(|next| !next.trim().is_empty() && depth(next) == sections.len());
            if !opens_section {
                leaves.push((sections.join("."), comment.trim().to_owned()));
            }
            comment.clear();
        }
    }
    leaves
}

pub fn comment_of(path: &str) -> String {
    let found = leaves_in_file().into_iter().find(|(leaf, _)| leaf == path);
    found
        .unwrap_or_else(|| panic!("{path} is not in config.yaml"))
        .1
}

fn load(vars: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let vars: BTreeMap<_, _> = vars.iter().copied().collect();
    Config::load(None, |name| vars.get(name).map(|value| value.to_string()))
}

/// A file that is removed when the test ends.
struct File(PathBuf);

impl File {
    fn new(text: &str) -> File {
        let path = std::env::temp_dir().join(format!("reconvene-{}.yaml", uuid::Uuid::now_v7()));
        std::fs::write(&path, text).unwrap();
        File(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// What the file says, or the reason it is refused without its (random) name.
fn load_file(text: &str) -> Result<Config, String> {
    let file = File::new(text);
    Config::load(Some(&file.0), |_| None).map_err(|err| {
        let name = file.0.display().to_string();
        err.to_string()
            .strip_prefix(&name)
            .expect("the file is named")
            .to_owned()
    })
}

#[test]
fn every_leaf_has_a_comment() {
    // P-20
    let leaves = leaves_in_file();
    assert!(leaves.len() > 40, "the reader found only {}", leaves.len());
    for (path, comment) in leaves {
        assert!(comment.len() > 15, "{path} has no comment: `{comment}`");
    }
}

#[test]
fn every_leaf_is_overridden_by_its_variable() {
    // P-20. A value that differs from the default and is valid on its own or with the variables after it.
    type Vars = &'static [(&'static str, &'static str)];
    let offline: Vars = &[("LLM_PROVIDER", "offline")];
    let samples: BTreeMap<&str, (&str, Vars)> = BTreeMap::from([
        ("data_dir", ("/srv/d", &[] as Vars)),
        ("prompts_dir", ("/srv/p", &[])),
        ("database.url", ("postgres://u:p@h/d", &[])),
        ("database.bin_dir", ("/opt/pg/bin", &[])),
        ("server.host", ("0.0.0.0", &[])),
        (
            "server.cors_origins",
            ("https://a.example,https://b.example", &[]),
        ),
        ("auth.jwt_secret", ("0123456789abcdef0123456789abcdef", &[])),
        ("auth.algorithm", ("EdDSA", &[("AUTH_JWKS", "keys.json")])),
        ("auth.jwks", ("keys.json", &[("AUTH_ALGORITHM", "RS256")])),
        ("auth.issuer", ("me", &[])),
        ("auth.audience", ("you", &[])),
        ("auth.secure_cookies", ("true", &[])),
        ("llm.provider", ("openai", &[("LLM_MODEL", "m")])),
        (
            "llm.base_url",
            ("http://localhost:1/v1", &[("LLM_PROVIDER", "offline")]),
        ),
        ("llm.api_key", ("k", &[("LLM_PROVIDER", "offline")])),
        ("llm.model", ("m", &[("LLM_PROVIDER", "offline")])),
        ("llm.providers.openai.base_url", ("http://h", offline)),
        ("llm.providers.openai.api_key", ("k", offline)),
        ("llm.providers.openai.model", ("m", offline)),
        ("llm.providers.anthropic.base_url", ("http://h", offline)),
        ("llm.providers.anthropic.api_key", ("k", offline)),
        ("llm.providers.anthropic.model", ("m", offline)),
        ("llm.providers.gemini.base_url", ("http://h", offline)),
        ("llm.providers.gemini.api_key", ("k", offline)),
        ("llm.providers.gemini.model", ("m", offline)),
        (
            "llm.prices",
            (r#"{"m": {"input": 1, "output": 2}}"#, offline),
        ),
        (
            "credentials.keys",
            (
                "k1:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
                &[],
            ),
        ),
        ("delegation_profiles.provider", ("offline", &[])),
        ("delegation_profiles.model", ("m", &[])),
        ("worker.tags", ("gpu, eu", &[])),
        ("http.allow_private_addresses", ("true", &[])),
        ("run_code.program", ("/bin/boxed", &[])),
        ("log.level", ("debug", &[])),
        ("log.format", ("json", &[])),
    ]);
    let shown = |config: &Config| {
        // Secrets are hidden in Debug, so they are added by hand.
        let secrets = [
            &config.database.url,
            &config.auth.jwt_secret,
            &config.llm.api_key,
            &config.llm.providers.openai.api_key,
            &config.llm.providers.anthropic.api_key,
            &config.llm.providers.gemini.api_key,
        ];
        let secrets = secrets.map(|s| s.as_ref().map(|s| s.expose_secret().to_owned()));
        let keys = config.credentials.keys.iter().map(|k| k.expose_secret());
        format!("{config:?} {secrets:?} {:?}", keys.collect::<Vec<_>>())
    };
    let defaults = shown(&Config::from_defaults());
    let mut names = std::collections::BTreeSet::new();
    for (path, _) in leaves_in_file() {
        let name = variable(&path);
        assert!(
            names.insert(name.clone()),
            "two keys share the variable {name}"
        );
        let (sample, with) = samples.get(path.as_str()).copied().unwrap_or(("7000", &[]));
        // Numbers: the first of these that is in the key's range and not its default.
        let tries = if samples.contains_key(path.as_str()) {
            vec![sample]
        } else {
            vec!["7000", "77", "7"]
        };
        let without = load(with)
            .map(|config| shown(&config))
            .unwrap_or_else(|_| defaults.clone());
        let changed = tries.iter().any(|value| {
            let vars: Vec<_> = with
                .iter()
                .copied()
                .chain([(name.as_str(), *value)])
                .collect();
            load(&vars).is_ok_and(|config| shown(&config) != without)
        });
        assert!(changed, "{name} does not change {path}");
    }
}

#[test]
fn contract_names_and_defaults() {
    // P-20, P-21, P-22
    let config = Config::from_defaults();
    assert_eq!(config.data_dir, Path::new("./data"));
    assert_eq!(
        (config.server.host.as_str(), config.server.port),
        ("127.0.0.1", 8080)
    );
    assert_eq!(config.llm.provider, Provider::Offline);
    assert_eq!(config.worker.lease_seconds, 30);
    assert!(!config.http.allow_private_addresses);
    let s = &config.spawn_tasks;
    assert_eq!(
        (
            s.max_depth,
            s.max_children_per_call,
            s.default_timeout_minutes,
            s.max_timeout_minutes
        ),
        (3, 250, 60, 1440)
    );
    assert_eq!(
        (
            s.max_tree_size,
            s.summary_child_chars,
            s.summary_total_chars
        ),
        (5000, 4000, 60000)
    );
    for (path, name) in [
        ("spawn_tasks.max_depth", "SPAWN_TASKS_MAX_DEPTH"),
        ("database.url", "DATABASE_URL"),
        ("auth.jwt_secret", "AUTH_JWT_SECRET"),
        (
            "orchestrator.poll_interval_ms",
            "ORCHESTRATOR_POLL_INTERVAL_MS",
        ),
    ] {
        assert_eq!(variable(path), name);
    }
}

#[test]
fn the_environment_wins_over_the_file_and_the_file_over_the_defaults() {
    let file = File::new("server:\n  port: 9000\n  host: 10.0.0.1\nworker:\n  tags: [gpu, eu]\n");
    let env = |name: &str| (name == "SERVER_PORT").then(|| "9100".to_owned());
    let config = Config::load(Some(&file.0), env).unwrap();
    assert_eq!(
        (config.server.port, config.server.host.as_str()),
        (9100, "10.0.0.1")
    );
    assert_eq!(config.worker.tags, ["gpu", "eu"]);
    assert_eq!(config.worker.concurrency, 64);
}

#[test]
fn empty_means_absent_for_optional_keys() {
    let config = load(&[
        ("DATABASE_URL", ""),
        ("LLM_API_KEY", " "),
        ("WORKER_TAGS", ""),
    ])
    .unwrap();
    assert!(config.database.url.is_none() && config.llm.api_key.is_none());
    assert!(config.worker.tags.is_empty());
    let config =
        load_file("database:\n  url: \"\"\nllm:\n  max_output_tokens: ''\nserver:\n").unwrap();
    assert!(config.database.url.is_none() && config.llm.max_output_tokens.is_none());
    assert_eq!(
        load(&[("LLM_MAX_OUTPUT_TOKENS", "900")])
            .unwrap()
            .llm
            .max_output_tokens,
        Some(900)
    );
    assert!(load_file("").is_ok(), "an empty file changes nothing");
}

#[test]
fn a_bad_file_is_refused_with_path_and_reason() {
    // P-20
    for (text, refusal) in [
        (
            "spawn_tasks:\n  max_dept: 4\n",
            ": spawn_tasks.max_dept: unknown key (did you mean max_depth?)",
        ),
        (
            "spawn-tasks:\n  max_depth: 4\n",
            ": spawn-tasks: unknown key (did you mean spawn_tasks?)",
        ),
        ("zzz: 1\n", ": zzz: unknown key"),
        (
            "server:\n  port: 70000\n",
            ": server.port: 70000 is out of range; the comment in config.yaml gives it",
        ),
        (
            "server:\n  port: -1\n",
            ": server.port: -1 is out of range; the comment in config.yaml gives it",
        ),
        (
            "server:\n  port: http\n",
            ": server.port: invalid type: string \"http\", expected u16",
        ),
        (
            "server:\n  port: 80.5\n",
            ": server.port: `80.5` is not a whole number",
        ),
        ("server:\n  port:\n", ": server.port: a value is missing"),
        (
            "server:\n  port:\n    x: 1\n",
            ": server.port: a value is expected, not a section",
        ),
        (
            "log: debug\n",
            ": log: a section is expected, with format, level",
        ),
        (
            "log:\n  format: xml\n",
            ": log.format: unknown variant `xml`, expected `text` or `json`",
        ),
        (
            "server:\n  cors_origins: ['*']\n",
            ": server.cors_origins: `*` is not an origin such as https://app.example.com",
        ),
        (
            "worker:\n  concurrency: 0\n",
            ": worker.concurrency: 0 is not in the range 1 to 10000",
        ),
    ] {
        assert_eq!(load_file(text).map(drop), Err(refusal.to_owned()), "{text}");
    }
    let broken = load_file("server: [\n").unwrap_err();
    assert!(
        broken.starts_with(": this is not valid YAML: ") && broken.contains("line"),
        "{broken}"
    );
    let twice = load_file("log:\n  level: info\n  level: warn\n").unwrap_err();
    assert!(twice.contains("level"), "{twice}");
    let missing = Config::load(Some(Path::new("/nowhere/config.yaml")), |_| None).unwrap_err();
    assert!(
        missing
            .to_string()
            .starts_with("/nowhere/config.yaml: the file cannot be read")
    );
}

#[test]
fn a_bad_variable_is_refused_by_its_name() {
    // P-20
    for (name, value, refusal) in [
        (
            "SERVER_PORT",
            "http",
            "server.port: `http` is not a whole number",
        ),
        (
            "SERVER_PORT",
            "",
            "server.port: the value is empty; unset the variable to get the default",
        ),
        (
            "SERVER_PORT",
            "65536",
            "server.port: 65536 is out of range; the comment in config.yaml gives it",
        ),
        (
            "HTTP_ALLOW_PRIVATE_ADDRESSES",
            "yes",
            "http.allow_private_addresses: `yes` is neither true nor false",
        ),
        (
            "LLM_MAX_OUTPUT_TOKENS",
            "-1",
            "llm.max_output_tokens: `-1` is not a whole number that is 0 or more",
        ),
        (
            "LLM_MAX_OUTPUT_TOKENS",
            "0",
            "llm.max_output_tokens: 0 is not in the range 1 to 10000000",
        ),
        (
            "SERVER_HEALTH_PORT",
            "65536",
            "server.health_port: 65536 is out of range; the comment in config.yaml gives it",
        ),
    ] {
        let err = load(&[(name, value)]).unwrap_err();
        assert_eq!(
            err.to_string(),
            format!("environment variable {name}: {refusal}")
        );
    }
}

// D-4: 0 = unlimited is a setting that can be made.
#[test]
fn the_limit_of_children_per_call_may_be_lifted() {
    let limit = |value: &str| {
        load(&[("SPAWN_TASKS_MAX_CHILDREN_PER_CALL", value)])
            .map(|config| config.spawn_tasks.max_children_per_call)
            .map_err(|refusal| refusal.to_string())
    };
    assert_eq!(limit("0"), Ok(0));
    assert_eq!(limit("10000"), Ok(10_000));
    let refusal = limit("10001").unwrap_err();
    assert!(
        refusal.contains("10001 is not in the range 0 to 10000"),
        "{refusal}"
    );
}

// T-17, P-20: prices are read to the last place, whatever a model is called
#[test]
fn prices_are_read_exactly_and_by_model() {
    let price = |input, output, cached_input| Price {
        input,
        output,
        cached_input,
    };
    let text = "llm:\n  prices:\n    Vendor/M-2.5:3b: {input: 0.1, output: 1.25, cached_input: \"0.000001\"}\n    b: {input: 0, output: 1000000}";
    let config = load_file(text).unwrap();
    let expected = BTreeMap::from([
        (
            "Vendor/M-2.5:3b".to_owned(),
            price(100_000, 1_250_000, Some(1)),
        ),
        ("b".to_owned(), price(0, 1_000_000_000_000, None)),
    ]);
    assert_eq!(config.llm.prices, expected);
    let json = r#"{"a.b": {"input": 0.3, "output": "12345.678901"}}"#;
    let config = load(&[("LLM_PRICES", json)]).unwrap();
    let expected = BTreeMap::from([("a.b".to_owned(), price(300_000, 12_345_678_901, None))]);
    assert_eq!(config.llm.prices, expected);
    for bad in ["-1", "0.0000001", "1000000.000001", "\"\"", "x", "[1]"] {
        let error = load_file(&format!(
            "llm:\n  prices:\n    m: {{input: 1, output: {bad}}}"
        ));
        let error = error.unwrap_err();
        assert!(error.starts_with(": llm.prices.m.output: `"), "{error}");
    }
    for (text, expected) in [
        ("llm:\n  prices: 5", "llm.prices"),
        (
            "llm:\n  prices: {m: {input: 1}}",
            "llm.prices.m: missing field `output`",
        ),
        (
            "llm:\n  prices: {m: {input: 1, output: 1, extra: 1}}",
            "llm.prices.m",
        ),
    ] {
        let error = load_file(text).unwrap_err();
        assert!(error.starts_with(&format!(": {expected}")), "{error}");
    }
    let error = load(&[("LLM_PRICES", "m=1")]).unwrap_err().to_string();
    assert!(
        error.contains("LLM_PRICES") && error.ends_with("is not a JSON object"),
        "{error}"
    );
}

#[test]
fn contradictions_stop_the_start() {
    for (vars, path) in [
        (
            &[("AUTH_JWT_SECRET", "0123456789abcdef0123456789abcde")] as &[_],
            "auth.jwt_secret",
        ),
        (&[("AUTH_ALGORITHM", "RS256")], "auth.algorithm"),
        (&[("AUTH_JWKS", "keys.json")], "auth.jwks"),
        (&[("AUTH_ALGORITHM", "none")], "auth.algorithm"),
        (
            &[("AUTH_ISSUER", "x"), ("LLM_PROVIDER", "openai")],
            "llm.provider",
        ),
        (&[("LLM_API_KEY", "sk-1")], "llm.api_key"),
        (
            &[("LLM_PROVIDERS_GEMINI_API_KEY", "sk-1")],
            "llm.providers.gemini.api_key",
        ),
        (
            &[("LLM_PROVIDERS_ANTHROPIC_BASE_URL", "http://h")],
            "llm.providers.anthropic.base_url",
        ),
        (
            &[("LLM_PROVIDERS_OPENAI_MODEL", "m")],
            "llm.providers.openai.model",
        ),
        (
            &[
                ("LLM_PROVIDER", "openai"),
                ("LLM_PROVIDERS_GEMINI_MODEL", "m"),
            ],
            "llm.provider",
        ),
        (
            &[
                ("LLM_PROVIDER", "openai"),
                ("LLM_MODEL", "m"),
                ("LLM_PROVIDERS_ANTHROPIC_BASE_URL", "x"),
            ],
            "llm.providers.anthropic.base_url",
        ),
        (
            &[
                ("LLM_PROVIDER", "openai"),
                ("LLM_MODEL", "m"),
                ("LLM_BASE_URL", "x"),
            ],
            "llm.base_url",
        ),
        (
            &[
                ("LLM_RETRY_BASE_MS", "60000"),
                ("LLM_RETRY_MAX_SECONDS", "1"),
            ],
            "llm.retry_base_ms",
        ),
        (
            &[("DELEGATION_PROFILES_PROVIDER", "gemini")],
            "delegation_profiles.provider",
        ),
        (
            &[
                ("LLM_PROVIDER", "gemini"),
                ("LLM_MODEL", "m"),
                ("LLM_PROVIDERS_OPENAI_API_KEY", "sk-1"),
                ("DELEGATION_PROFILES_PROVIDER", "openai"),
            ],
            "delegation_profiles.model",
        ),
        (&[("DATABASE_URL", "mysql://u:hush@h/d")], "database.url"),
        (&[("WORKER_TAGS", "a b")], "worker.tags"),
        (&[("LOG_LEVEL", "loud")], "log.level"),
    ] {
        let err = load(vars).unwrap_err();
        assert_eq!(err.path, path, "{err}");
        assert!(
            !err.to_string().contains("hush") && !err.to_string().contains("sk-1"),
            "{err}"
        );
    }
    assert!(load(&[("LLM_PROVIDER", "offline"), ("LLM_API_KEY", "sk-1")]).is_ok());
    let own_section = [
        ("LLM_PROVIDER", "gemini"),
        ("LLM_PROVIDERS_GEMINI_MODEL", "m"),
    ];
    assert!(load(&own_section).is_ok());
    let of_profiles = [
        ("LLM_PROVIDER", "openai"),
        ("LLM_MODEL", "m"),
        ("LLM_PROVIDERS_GEMINI_API_KEY", "sk-1"),
        ("DELEGATION_PROFILES_PROVIDER", "gemini"),
    ];
    assert!(load(&of_profiles).is_ok());
}

#[test]
fn secrets_are_never_shown() {
    let config = load(&[
        ("DATABASE_URL", "postgres://u:hush@h/d"),
        ("AUTH_JWT_SECRET", "hush-hush-hush-hush-hush-hush-hush"),
        ("LLM_API_KEY", "hush"),
        ("LLM_PROVIDER", "offline"),
    ]);
    assert!(!format!("{:?}", config.unwrap()).contains("hush"));
    let refusal = load_file("llm:\n  api_key: 424242\n").unwrap_err();
    assert_eq!(
        refusal,
        ": llm.api_key: text is expected (in a file: in quotes)"
    );
    let refusal =
        load_file("llm:\n  providers:\n    gemini:\n      api_key: 424242\n").unwrap_err();
    assert_eq!(
        refusal,
        ": llm.providers.gemini.api_key: text is expected (in a file: in quotes)"
    );
}

// L-9, P-20
#[test]
fn operator_keys_are_named_and_never_repeated_in_an_error() {
    const DIGITS: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    let two = format!("new:{DIGITS},old.1:{}", DIGITS.to_uppercase());
    assert_eq!(
        load(&[("CREDENTIALS_KEYS", two.as_str())])
            .unwrap()
            .credentials
            .keys
            .len(),
        2
    );
    let twice = format!("a:{DIGITS},a:{DIGITS}");
    let words = format!("a:{}", DIGITS.replace('0', "g"));
    let unnamed = format!(":{DIGITS}");
    for (keys, reason) in [
        (DIGITS, "each key is `id:key`"),
        (&unnamed, "each key is `id:key`"),
        (&words, "each key is `id:key`"),
        ("a:0011", "each key is `id:key`"),
        (&twice, "two keys have the id `a`"),
    ] {
        let error = load(&[("CREDENTIALS_KEYS", keys)]).unwrap_err().to_string();
        assert!(
            error.contains("CREDENTIALS_KEYS") && error.contains(reason),
            "{error}"
        );
        assert!(!error.contains("0011") && !error.contains("ggg"), "{error}");
    }
    let wrong_type = load_file("credentials:\n  keys: {a: 1}\n").unwrap_err();
    assert!(wrong_type.contains("credentials.keys"), "{wrong_type}");
}
