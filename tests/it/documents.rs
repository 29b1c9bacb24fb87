//! What documents show is what the program does: their scripts are run against it, and what they print is compared.

use crate::program::{Program, Scene};
use reconvene::domain::ids::AgentId;
use std::process::Stdio;
use tokio::process::Command;

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs");

/// The text with its ids, which no two runs share, made alike.
fn without_ids(text: &str) -> String {
    let words = text.split_inclusive(|c: char| !c.is_ascii_hexdigit() && c != '-');
    words
        .map(|word| {
            let (id, end) = word.split_at(word.len().min(36));
            match id.parse::<AgentId>() {
                Ok(_) => format!("ID{end}"),
                Err(_) => word.to_owned(),
            }
        })
        .collect()
}

// A-31, D-12, A-28: the whole of docs/agents.md, with nothing but curl
#[tokio::test(flavor = "multi_thread")]
async fn the_script_of_agents_prints_what_its_document_shows() {
    let mut scene = Scene::new().await;
    for name in ["LLM_PROVIDER", "LLM_BASE_URL", "LLM_MODEL"] {
        scene.env.remove(name);
    }
    let service = scene.serve("api,worker,orchestrator").await;
    let mut token = Program::run(
        &["token", "--workspace", "demo", "--role", "operator"],
        &scene.env,
    );
    let (code, token) = token.ended().await;
    assert_eq!(code, 0, "{token}");
    let line = service.says("Reconvene listens on ").await;
    let (_, address) = line.split_once("listens on ").unwrap();
    let ran = Command::new("bash")
        .args([&format!("{DOCS}/agents.sh"), address.trim()])
        .env("TOKEN", token.trim())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let ran = crate::engine::soon("the script", ran).await.unwrap();
    let printed = String::from_utf8(ran.stdout).unwrap();
    let complaint = String::from_utf8(ran.stderr).unwrap();
    assert!(ran.status.success(), "{printed}{complaint}");
    let document = std::fs::read_to_string(format!("{DOCS}/agents.md")).unwrap();
    let (_, shown) = document.split_once("```text\n").unwrap();
    let (shown, _) = shown.split_once("```\n").unwrap();
    assert_eq!(without_ids(&printed), without_ids(shown));
    scene.close().await;
    service.terminate().await;
}
