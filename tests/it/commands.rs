//! The commands as an operator's script sees them: exit codes, standard output, messages (P-30).

use crate::support;
use sqlx::{ConnectOptions, Connection, PgConnection};
use std::path::PathBuf;
use std::process::{Command, Output};

/// A folder for one test's data and files.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let path = std::env::temp_dir().join(format!("rc-{}", uuid::Uuid::now_v7().simple()));
        std::fs::create_dir(&path).unwrap();
        // The private server's account must get through, whatever the umask.
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        Folder(path)
    }

    /// Runs `reconvene` in this folder with its data below it, and no setting from outside.
    fn run(&self, env: &[(&str, &str)], args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_reconvene"))
            .args(args)
            .env_clear()
            .env("DATA_DIR", self.0.join("data"))
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .envs(env.iter().copied())
            .current_dir(&self.0)
            .output()
            .unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// Asserts the exit code, and returns standard output; shows standard error when it differs.
fn expect(output: &Output, code: i32) -> &str {
    assert_eq!(
        output.status.code(),
        Some(code),
        "{}{}",
        stdout(output),
        stderr(output)
    );
    stdout(output)
}

#[test]
fn from_an_empty_folder_to_a_token() {
    // P-30, O-1
    let folder = Folder::new();
    let run = |args: &[&str]| folder.run(&[], args);

    let migrated = run(&["migrate", "--json"]);
    let migrated: serde_json::Value = serde_json::from_str(expect(&migrated, 0)).unwrap();
    assert!(migrated["applied"].as_array().unwrap().len() > 20);

    let create = [
        "workspace",
        "create",
        "--slug",
        "acme",
        "--name",
        "Acme Ltd",
    ];
    let created = run(&[&create[..], &["--json"]].concat());
    let created: serde_json::Value = serde_json::from_str(expect(&created, 0)).unwrap();
    assert_eq!(
        (&created["slug"], &created["name"]),
        (&"acme".into(), &"Acme Ltd".into())
    );

    let again = run(&create);
    expect(&again, 4);
    assert!(stderr(&again).contains("taken"), "{}", stderr(&again));
    expect(
        &run(&["workspace", "create", "--slug", "A b", "--name", "x"]),
        2,
    );

    let token = run(&[
        "token",
        "--workspace",
        "acme",
        "--role",
        "admin",
        "--ttl",
        "5m",
    ]);
    let text = expect(&token, 0);
    assert!(
        text.ends_with('\n') && text.trim().split('.').count() == 3,
        "only the token: {text}"
    );
    assert!(!text.trim().contains(char::is_whitespace) && stderr(&token).is_empty());
    let unknown = run(&["token", "--workspace", "nobody"]);
    expect(&unknown, 4);
    assert!(
        stderr(&unknown).contains("reconvene workspace create"),
        "{}",
        stderr(&unknown)
    );

    let checked = run(&["doctor", "--json"]);
    let checked: serde_json::Value = serde_json::from_str(expect(&checked, 0)).unwrap();
    assert_eq!(checked["ok"], true, "{checked}");

    // P-7
    let json =
        |output: &Output| -> serde_json::Value { serde_json::from_str(expect(output, 0)).unwrap() };
    let key = "batch_fanout.enabled";
    let flags = run(&["flags", "list"]);
    assert!(
        expect(&flags, 0)
            .contains("batch_fanout.enabled = false (boolean, default false; never set)")
    );
    let set = run(&["flags", "set", key, "true", "--subject", "ada"]);
    assert_eq!(expect(&set, 0), "batch_fanout.enabled = true\n");
    let flags = json(&run(&["flags", "list", "--json"]));
    let flag = &flags["items"][0];
    assert_eq!(
        (&flag["value"], &flag["changed_by"]),
        (&true.into(), &"ada".into())
    );
    let set = json(&run(&["flags", "set", key, "false", "--json"]));
    assert_eq!(
        (&set["value"], &set["changed_by"]),
        (&false.into(), &"command-line".into())
    );
    for wrong in [
        ["flags", "set", "batch_fanout", "true"],
        ["flags", "set", key, "yes"],
    ] {
        let output = run(&wrong);
        expect(&output, 2);
        assert!(stderr(&output).contains(key), "{}", stderr(&output));
    }
}

#[test]
fn wrong_usage_and_configuration_end_with_2() {
    // P-20, P-30
    let folder = Folder::new();
    expect(&folder.run(&[], &[]), 2);
    expect(&folder.run(&[], &["serve", "--roles", "cook"]), 2);
    expect(
        &folder.run(&[], &["token", "--workspace", "x", "--ttl", "soon"]),
        2,
    );
    let bad = folder.run(&[("SERVER_PORT", "http")], &["migrate"]);
    expect(&bad, 2);
    assert!(stderr(&bad).contains("environment variable SERVER_PORT: server.port: "));

    // The file in the working directory counts, a named one more, the environment most.
    std::fs::write(
        folder.0.join("config.yaml"),
        "spawn_tasks:\n  max_dept: 4\n",
    )
    .unwrap();
    let bad = folder.run(&[], &["migrate"]);
    expect(&bad, 2);
    let reason = "config.yaml: spawn_tasks.max_dept: unknown key (did you mean max_depth?)";
    assert!(stderr(&bad).contains(reason), "{}", stderr(&bad));
    std::fs::write(folder.0.join("other.yaml"), "worker: {concurrency: 0}\n").unwrap();
    let bad = folder.run(&[], &["--config", "other.yaml", "migrate"]);
    expect(&bad, 2);
    assert!(stderr(&bad).contains("other.yaml: worker.concurrency: 0 is not in the range"));
    let doctor = folder.run(&[], &["doctor"]);
    assert!(
        expect(&doctor, 1).contains("unknown key"),
        "doctor reports it as a finding"
    );

    // HS256 without a secret, on a database that is not ours.
    let url = [("DATABASE_URL", "postgres://u:hush@127.0.0.1:1/x")];
    let folder = Folder::new();
    let bad = folder.run(&url, &["token", "--workspace", "x"]);
    expect(&bad, 2);
    assert!(stderr(&bad).contains("AUTH_JWT_SECRET") && !stderr(&bad).contains("hush"));
    assert!(
        !folder.0.join("data").exists(),
        "nothing was made on the way"
    );
}

#[test]
fn an_unreachable_database_ends_with_3_and_says_where() {
    let folder = Folder::new();
    for (url, words) in [
        ("postgres://u:hush@127.0.0.1:1/x", "127.0.0.1:1"),
        ("postgres://u:hush@127.0.0.1:port/x", "DATABASE_URL"),
    ] {
        let output = folder.run(&[("DATABASE_URL", url)], &["migrate"]);
        expect(&output, 3);
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
        assert!(
            !stderr(&output).contains("hush"),
            "a password is never shown"
        );
    }
    let no_programs = folder.run(&[("DATABASE_BIN_DIR", "/nowhere")], &["migrate"]);
    expect(&no_programs, 3);
    assert!(stderr(&no_programs).contains("apt-get install postgresql"));
    let doctor = folder.run(
        &[("DATABASE_URL", "postgres://u:hush@127.0.0.1:1/x")],
        &["doctor"],
    );
    assert!(expect(&doctor, 1).contains("no database server answers at 127.0.0.1:1"));
}

#[test]
fn doctor_tries_the_model() {
    // P-30: nothing listens on port 1.
    let folder = Folder::new();
    let env = [
        ("DATABASE_URL", "postgres://u:p@127.0.0.1:1/x"),
        ("LLM_PROVIDER", "openai"),
        ("LLM_MODEL", "m"),
        ("LLM_API_KEY", "hush"),
        ("LLM_BASE_URL", "http://127.0.0.1:1/v1"),
    ];
    let output = folder.run(&env, &["doctor"]);
    let text = expect(&output, 1);
    assert!(
        text.contains("http://127.0.0.1:1/v1 does not answer"),
        "{text}"
    );
    assert!(!text.contains("hush"));
}

/// Answers every request with this status and JSON until the test ends; returns the address.
fn listening(status: u16, body: &'static str) -> String {
    use std::io::{BufRead, BufReader, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            for line in lines.map_while(Result::ok) {
                if line.is_empty() {
                    break;
                }
            }
            let length = body.len();
            let _ = write!(
                stream,
                "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
            );
        }
    });
    address
}

// L-9: what is stored under a key that is gone shows before a task needs it.
#[tokio::test]
async fn doctor_tells_which_keys_of_the_operator_are_missing() {
    let options = support::fresh_database().await;
    let url = options.to_url_lossy().to_string();
    let folder = Folder::new();
    let key = format!("k1:{}", "0f".repeat(32));
    let env = [
        ("DATABASE_URL", url.as_str()),
        (
            "AUTH_JWT_SECRET",
            "a secret for tests, of more than 32 bytes",
        ),
    ];
    let with_key = [env.as_slice(), &[("CREDENTIALS_KEYS", key.as_str())]].concat();
    let warned = folder.run(&env, &["doctor"]);
    assert!(expect(&warned, 0).contains("no key to encrypt with"));
    let fine = folder.run(&with_key, &["doctor"]);
    assert!(expect(&fine, 0).contains("0 stored values; new ones are under the key `k1`"));
    let mut conn = PgConnection::connect_with(&options).await.unwrap();
    let sql = "insert into workspaces (id, slug, name) values (gen_random_uuid(), 'w', 'W');
        insert into credentials (workspace_id, id, name, key_id, sealed) select id, id, 'a', 'k1', '' from workspaces;
        insert into credentials (workspace_id, id, name, key_id, sealed)
            select id, gen_random_uuid(), 'b', 'old', '' from workspaces;
        insert into model_providers (workspace_id, id, name, kind, is_default, key_id, sealed)
            select id, id, 'm', 'openai', true, 'old', '' from workspaces;
        insert into model_providers (workspace_id, id, name, kind, is_default)
            select id, gen_random_uuid(), 'n', 'openai', false from workspaces";
    sqlx::raw_sql(sql).execute(&mut conn).await.unwrap();
    let failed = folder.run(&with_key, &["doctor"]);
    let text = expect(&failed, 1);
    assert!(
        text.contains("can not be read: 2 under the key `old`\n"),
        "{text}"
    );
}

#[test]
fn doctor_tries_every_provider() {
    // P-30, L-10
    let folder = Folder::new();
    let openai = listening(401, "{}");
    let anthropic = listening(200, r#"{"data":[{"id":"claude-x","type":"model"}]}"#);
    let gemini = listening(200, r#"{"models":[{"name":"models/gemini-x"}]}"#);
    let openai_url = format!("{openai}/v1?key=hush");
    let env = [
        ("DATABASE_URL", "postgres://u:p@127.0.0.1:1/x"),
        ("LLM_PROVIDER", "anthropic"),
        ("LLM_MODEL", "claude-x"),
        ("LLM_BASE_URL", &anthropic),
        ("LLM_PROVIDERS_GEMINI_BASE_URL", &gemini),
        ("LLM_PROVIDERS_GEMINI_MODEL", "gemini-y"),
        ("LLM_PROVIDERS_OPENAI_BASE_URL", &openai_url),
        ("LLM_PROVIDERS_OPENAI_API_KEY", "hush"),
        ("DELEGATION_PROFILES_PROVIDER", "gemini"),
    ];
    let output = folder.run(&env, &["doctor"]);
    let text = expect(&output, 1);
    for told in [
        // A-27: who writes profiles, without a setting of its own.
        format!("{gemini} does not list gemini-2.5-flash\n"),
        "check delegation_profiles.model (DELEGATION_PROFILES_MODEL)".to_owned(),
        format!("anthropic: claude-x at {anthropic}\n"),
        format!("{gemini} does not list gemini-y\n"),
        "check llm.providers.gemini.model (LLM_PROVIDERS_GEMINI_MODEL)".to_owned(),
        format!("{openai}/v1 refuses the key (401"),
        "set llm.providers.openai.api_key (LLM_PROVIDERS_OPENAI_API_KEY) to a valid key".to_owned(),
    ] {
        assert!(text.contains(&told), "{told}: {text}");
    }
    assert!(!text.contains("hush"), "{text}");

    // A-27: one that is there, and one that is asked for anyway.
    let writer = [("DELEGATION_PROFILES_MODEL", "gemini-x")];
    let text = folder.run(&[&env[..], &writer].concat(), &["doctor"]);
    let text = expect(&text, 1);
    let line = format!("ok       profiles       gemini: gemini-x at {gemini}\n");
    assert!(text.contains(&line), "{text}");
    let writer = [("DELEGATION_PROFILES_MODEL", "gemini-y")];
    let text = folder.run(&[&env[..], &writer].concat(), &["doctor"]);
    assert!(!expect(&text, 1).contains("profiles  "));
}

#[test]
fn profiles_are_backfilled_from_the_command_line() {
    // P-30, A-28
    let folder = Folder::new();
    let create = ["workspace", "create", "--slug", "acme", "--name", "Acme"];
    expect(&folder.run(&[], &create), 0);
    let backfill = ["backfill-profiles", "--workspace", "acme"];
    let with = |more: &[&'static str]| folder.run(&[], &[&backfill[..], more].concat());

    // A model that is not there.
    let nowhere = [
        ("LLM_PROVIDER", "openai"),
        ("LLM_MODEL", "m"),
        ("LLM_BASE_URL", "http://127.0.0.1:1"),
        ("LLM_MAX_ATTEMPTS", "1"),
    ];
    let failed = folder.run(&nowhere, &backfill);
    assert_eq!(expect(&failed, 1), "0 generated, 0 skipped, 1 failed\n");
    let told = stderr(&failed);
    assert!(
        told.contains("failed    Assistant The model provider"),
        "{told}"
    );
    assert!(
        told.contains("error: one agent could not be given a profile"),
        "{told}"
    );

    let done = with(&[]);
    assert_eq!(expect(&done, 0), "1 generated, 0 skipped, 0 failed\n");
    assert!(
        stderr(&done).contains("generated Assistant"),
        "{}",
        stderr(&done)
    );
    let again = with(&[]);
    assert_eq!(expect(&again, 0), "0 generated, 1 skipped, 0 failed\n");
    let forced: serde_json::Value =
        serde_json::from_str(expect(&with(&["--force", "--json"]), 0)).unwrap();
    assert_eq!(
        (&forced["status"], &forced["generated"]),
        (&"completed".into(), &1.into())
    );
    assert_eq!(forced["items"][0]["status"], "generated");

    let unknown = folder.run(&[], &["backfill-profiles", "--workspace", "nobody"]);
    expect(&unknown, 4);
    assert!(stderr(&unknown).contains("nobody"), "{}", stderr(&unknown));
    expect(&folder.run(&[], &["backfill-profiles"]), 2);
}
