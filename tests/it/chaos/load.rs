//! The users: they post trees through whichever API process answers, repeat what failed under the same key, write again,
//! stop, and follow.

use super::{World, fleet::Fleet};
use crate::program::Events;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

/// Trees that are under way at once.
const USERS: usize = 48;
/// For one request; a process that is suspended answers nothing.
const REQUEST_LIMIT: Duration = Duration::from_secs(4);
/// After which a stream that says nothing is opened anew.
const SILENCE_LIMIT: Duration = Duration::from_secs(5);

/// A tree that was acknowledged.
#[derive(Clone, Debug)]
pub struct Tree {
    pub name: String,
    pub task: String,
    /// The text of a second message to the root.
    pub second: Option<String>,
    pub is_stopped: bool,
    /// What a stream has shown: `seq` and kind of each item.
    pub seen: Option<Vec<(i64, String)>>,
    pub took: Duration,
}

/// Posts trees until the time is over, and returns all of them when each has ended. `None` in place of those that have
/// not at `deadline`.
pub async fn post_trees(
    world: &Arc<World>,
    fleet: &Arc<Fleet>,
    until: Instant,
) -> JoinSet<Vec<Tree>> {
    let mut users = JoinSet::new();
    for _ in 0..USERS {
        let (world, fleet) = (world.clone(), fleet.clone());
        users.spawn(async move {
            let mut trees = Vec::new();
            while Instant::now() < until {
                let number = world.trees.fetch_add(1, Ordering::Relaxed);
                let user = User {
                    world: &world,
                    fleet: &fleet,
                    http: &world.http,
                };
                trees.push(user.tree(&format!("tree {number}")).await);
            }
            trees
        });
    }
    users
}

struct User<'a> {
    world: &'a World,
    fleet: &'a Fleet,
    http: &'a reqwest::Client,
}

impl User<'_> {
    async fn tree(&self, name: &str) -> Tree {
        let mut random = self.world.script.random((name, "user"));
        let begun = Instant::now();
        let body = json!({ "message": name });
        let task = self.post(&mut random, name, &body).await;
        let mut tree = Tree {
            name: name.to_owned(),
            task,
            second: None,
            is_stopped: false,
            seen: None,
            took: Duration::ZERO,
        };
        let pause = Duration::from_millis(random.u64(0..4000));
        match random.u32(0..100) {
            0..12 => {
                tokio::time::sleep(pause).await;
                let text = format!("and more about {name}");
                let body = json!({ "message": text, "task_id": tree.task });
                let task = self.post(&mut random, &text, &body).await;
                assert_eq!(task, tree.task);
                tree.second = Some(text);
            }
            12..20 => {
                tokio::time::sleep(pause).await;
                let path = format!("/api/tasks/{}/stop", tree.task);
                let body = json!({"include_subtasks": true});
                self.insist(&mut random, Method::POST, &path, Some(&body), None)
                    .await;
                tree.is_stopped = true;
            }
            20..45 => {
                tree.seen = Some(self.follow(&mut random, &tree.task).await);
            }
            _ => {}
        }
        let path = format!("/api/tasks/{}", tree.task);
        loop {
            let shown = self.insist(&mut random, Method::GET, &path, None, None);
            let status = shown.await["status"].clone();
            if ["completed", "failed", "stopped"].contains(&status.as_str().unwrap_or_default()) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(random.u64(400..800))).await;
        }
        tree.took = begun.elapsed();
        tree
    }

    /// Sends a message until it is acknowledged, sometimes twice at once, sometimes once more. Returns the task's id.
    async fn post(&self, random: &mut fastrand::Rng, key: &str, body: &Value) -> String {
        let path = "/api/chat/message";
        let copies = 1 + usize::from(random.f64() < 0.2);
        let mut answers = Vec::new();
        let mut others: Vec<fastrand::Rng> = (0..copies).map(|_| random.fork()).collect();
        let posts = others
            .iter_mut()
            .map(|random| self.insist(random, Method::POST, path, Some(body), Some(key)));
        answers.extend(futures::future::join_all(posts).await);
        if random.f64() < 0.3 {
            answers.push(
                self.insist(random, Method::POST, path, Some(body), Some(key))
                    .await,
            );
        }
        let receipts: Vec<(&Value, &Value)> = answers
            .iter()
            .map(|answer| (&answer["task_id"], &answer["message_id"]))
            .collect();
        if receipts.iter().any(|receipt| *receipt != receipts[0]) {
            self.world.fail(format!(
                "the key {key:?} got different answers: {answers:?}"
            ));
        }
        receipts[0]
            .0
            .as_str()
            .expect("a receipt has a task_id")
            .to_owned()
    }

    /// Asks until it is answered.
    async fn insist(
        &self,
        random: &mut fastrand::Rng,
        method: Method,
        path: &str,
        body: Option<&Value>,
        key: Option<&str>,
    ) -> Value {
        loop {
            let asked = self.ask(random, method.clone(), path, body, key, &[]);
            let answer = async {
                let answer = asked.await?;
                let status = answer.status();
                Some((status, answer.json::<Value>().await.ok()?))
            };
            match tokio::time::timeout(REQUEST_LIMIT, answer).await {
                Ok(Some((status, answer))) if status.is_success() => return answer,
                Ok(Some((status, answer))) => self.refused(status, path, &answer),
                Ok(None) => self.world.count("requests without an answer"),
                Err(_) => self.world.count("requests given up by the client"),
            }
            tokio::time::sleep(Duration::from_millis(random.u64(50..500))).await;
        }
    }

    fn refused(&self, status: StatusCode, path: &str, answer: &Value) {
        match status {
            StatusCode::SERVICE_UNAVAILABLE => self.world.count("requests answered 503"),
            _ => self.world.fail(format!("{path}: {status} {answer}")),
        }
    }

    async fn ask(
        &self,
        random: &mut fastrand::Rng,
        method: Method,
        path: &str,
        body: Option<&Value>,
        key: Option<&str>,
        headers: &[(&'static str, String)],
    ) -> Option<reqwest::Response> {
        let addresses = self.fleet.addresses();
        let address = random.choice(&addresses)?;
        let mut request = self
            .http
            .request(method, format!("{address}{path}"))
            .bearer_auth(&self.world.token);
        if let Some(body) = body {
            request = request.json(body);
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        request.send().await.ok()
    }

    /// Follows a task to its end, over as many streams as that takes. Returns every item that it was shown.
    async fn follow(&self, random: &mut fastrand::Rng, task: &str) -> Vec<(i64, String)> {
        let path = format!("/api/tasks/{task}/stream");
        let mut seen: Vec<(i64, String)> = Vec::new();
        loop {
            let last = seen.last().map_or(0, |(seq, _)| *seq).to_string();
            let headers = [("last-event-id", last)];
            let asked = self.ask(random, Method::GET, &path, None, None, &headers);
            let answer = tokio::time::timeout(REQUEST_LIMIT, asked).await;
            let Ok(Some(answer)) = answer else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            if answer.status() != StatusCode::OK {
                let status = answer.status();
                self.refused(status, &path, &answer.json().await.unwrap_or_default());
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
            self.world.count("streams opened");
            let mut events = Events::of(answer);
            // Some leave by themselves.
            let mut patience = match random.f64() < 0.3 {
                true => random.usize(1..10),
                false => usize::MAX,
            };
            while let Ok(Some(event)) = tokio::time::timeout(SILENCE_LIMIT, events.next()).await {
                if event.name == "reset" {
                    self.world.fail(format!(
                        "the stream of task {task} was reset after {seen:?}"
                    ));
                    return seen;
                }
                let Some(id) = event.id else { continue };
                seen.push((id, event.name));
                let status = match seen.last() {
                    Some((_, kind)) if kind == "status" => {
                        event.data["status"].as_str().unwrap_or_default()
                    }
                    _ => "",
                };
                if ["completed", "failed", "stopped"].contains(&status) {
                    return seen;
                }
                patience -= 1;
                if patience == 0 {
                    break;
                }
            }
        }
    }
}
