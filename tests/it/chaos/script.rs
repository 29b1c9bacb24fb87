//! What the trees look like and what the model answers: all of it follows from the seed and the names of the tasks, so
//! that the answers can be judged afterwards. A name is the task's message and title: `tree 7`, its children `tree 7.0`
//! and so on.

use crate::stub_llm::{Recorded, Reply};
use reconvene::domain::ids::AgentId;
use serde_json::json;
use std::{
    collections::{BTreeMap, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// Of a leaf, from 0 for the root.
pub const DEPTH: usize = 3;

pub struct Script {
    seed: u64,
    /// Who works at the depths from 1.
    agents: [AgentId; DEPTH],
    is_calm: AtomicBool,
    /// How often each turn of a task was asked for.
    asked: Mutex<HashMap<(String, usize), u32>>,
    mishaps: Mutex<BTreeMap<&'static str, u64>>,
}

/// One child as its parent was told of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Told {
    title: String,
    status: String,
    result: String,
    task: String,
}

pub fn depth(name: &str) -> usize {
    name.matches('.').count()
}

impl Script {
    pub fn new(seed: u64, agents: [AgentId; DEPTH]) -> Self {
        Self {
            seed,
            agents,
            is_calm: AtomicBool::new(false),
            asked: Mutex::default(),
            mishaps: Mutex::default(),
        }
    }

    /// Random numbers that depend on the seed and on what they are for.
    pub fn random(&self, purpose: impl Hash) -> fastrand::Rng {
        let mut hasher = DefaultHasher::new();
        (self.seed, purpose).hash(&mut hasher);
        fastrand::Rng::with_seed(hasher.finish())
    }

    /// The children that a task delegates to, one list for each call of its first turn. None: it is a leaf.
    pub fn calls(&self, name: &str) -> Vec<Vec<String>> {
        let mut random = self.random((name, "children"));
        // The first child of each level has children, so that every tree has its full depth.
        let is_first = name.ends_with(".0");
        let count = match depth(name) {
            0 => random.usize(2..=3),
            1 => random.usize(1..=2),
            2 if is_first => random.usize(1..=2),
            2 => random.usize(0..=1),
            _ => 0,
        };
        let children: Vec<String> = (0..count).map(|n| format!("{name}.{n}")).collect();
        match count {
            0 => vec![],
            1 => vec![children],
            _ if random.f64() < 0.3 => children.into_iter().map(|child| vec![child]).collect(),
            _ => vec![children],
        }
    }

    /// Whether the provider refuses to work on this task, for good.
    pub fn is_refused(&self, name: &str) -> bool {
        depth(name) == DEPTH && self.random((name, "refused")).f64() < 0.04
    }

    /// Whether the task reads a result of its first child once more when it is back.
    pub fn reads(&self, name: &str) -> bool {
        depth(name) < DEPTH && self.random((name, "reads")).f64() < 0.2
    }

    /// All tasks of a tree.
    pub fn names(&self, root: &str) -> Vec<String> {
        let mut names = vec![root.to_owned()];
        let mut at = 0;
        while let Some(name) = names.get(at) {
            let children = self.calls(name).concat();
            names.extend(children);
            at += 1;
        }
        names
    }

    /// How a task ends that nobody disturbs: its status, its output, and how many decide steps that takes.
    pub fn ending(&self, name: &str) -> (&'static str, Option<String>, i64) {
        let children = self.calls(name).concat();
        if self.is_refused(name) {
            return ("failed", None, 0);
        }
        if children.is_empty() {
            return ("completed", Some(answer(name, vec![])), 1);
        }
        let told = children
            .iter()
            .map(|child| {
                let (status, output, _) = self.ending(child);
                Told {
                    title: child.clone(),
                    status: status.to_owned(),
                    result: output.map(|o| headline(&o)).unwrap_or_default(),
                    task: String::new(),
                }
            })
            .collect();
        let decides = 2 + i64::from(self.reads(name));
        ("completed", Some(answer(name, told)), decides)
    }

    /// From now on the provider answers, and at once.
    pub fn calm(&self, is_calm: bool) {
        self.is_calm.store(is_calm, Ordering::Relaxed);
    }

    /// What the provider has done wrong so far, by kind.
    pub fn mishaps(&self) -> BTreeMap<&'static str, u64> {
        self.mishaps.lock().unwrap().clone()
    }

    pub fn reply(&self, request: &Recorded) -> Reply {
        let (name, turn) = (request.first_user(), request.turn());
        let nth = {
            let mut asked = self.asked.lock().unwrap();
            let count = asked.entry((name.to_owned(), turn)).or_default();
            *count += 1;
            *count
        };
        let mut random = self.random((name, turn, nth));
        if self.is_refused(name) {
            let error = json!({"error": {"message": "not this one", "type": "invalid_request_error", "code": "refused"}});
            return Reply::status(400, &error.to_string());
        }
        let reply = self.work(request, name, turn);
        if self.is_calm.load(Ordering::Relaxed) {
            return reply;
        }
        match self.mishap(&mut random) {
            Some(mishap) => mishap,
            None if random.f64() < 0.05 => reply.every(Duration::from_millis(200)),
            None if random.f64() < 0.05 => {
                reply.after(Duration::from_millis(random.u64(1000..4000)))
            }
            None => reply.after(Duration::from_millis(random.u64(5..150))),
        }
    }

    fn work(&self, request: &Recorded, name: &str, turn: usize) -> Reply {
        let calls = self.calls(name);
        if turn == 0 {
            let arguments = calls.iter().map(|children| {
                let agent = self.agents[depth(name)];
                let tasks: Vec<_> = children
                    .iter()
                    .map(|child| json!({"agent_group_id": agent, "prompt": child}))
                    .collect();
                json!({ "tasks": tasks }).to_string()
            });
            return match calls.len() {
                0 => Reply::text(answer(name, vec![])),
                _ => arguments
                    .enumerate()
                    .fold(Reply::text(""), |reply, (n, arguments)| {
                        reply.and_call(&format!("call_{n}"), "delegate_tasks", &arguments)
                    }),
            };
        }
        let told = told(request);
        if told.len() < calls.concat().len() {
            return Reply::text(format!("{name} still waits"));
        }
        match told.first() {
            Some(first) if turn == 1 && self.reads(name) => {
                Reply::call("get_subtask_result", json!({"task_id": first.task}))
            }
            _ => Reply::text(answer(name, told)),
        }
    }

    fn mishap(&self, random: &mut fastrand::Rng) -> Option<Reply> {
        let (kind, reply) = match random.u32(0..100) {
            0..3 => (
                "429 with Retry-After",
                Reply::status(429, r#"{"error":{"message":"slow down"}}"#)
                    .header("retry-after", "1"),
            ),
            3..6 => ("500", Reply::status(500, r#"{"error":{"message":"oops"}}"#)),
            6..8 => ("no answer", Reply::hang_up()),
            8..11 => ("stream cut", half_an_answer().then_hang_up()),
            11..13 => ("stream stalls", half_an_answer().then_stall()),
            _ => return None,
        };
        *self.mishaps.lock().unwrap().entry(kind).or_default() += 1;
        Some(reply)
    }
}

fn half_an_answer() -> Reply {
    let delta = json!({"index": 0, "delta": {"role": "assistant", "content": "result of"}, "finish_reason": null});
    Reply::events([
        json!({"id": "chatcmpl-stub", "object": "chat.completion.chunk", "created": 0, "model": "stub", "choices": [delta]}),
    ])
}

/// `result of NAME` and, if it has any, how each of its children has ended, in the order of their names.
fn answer(name: &str, mut told: Vec<Told>) -> String {
    told.sort();
    let entries: Vec<String> = told
        .iter()
        .map(|child| format!(" [{}: {}: {}]", child.title, child.status, child.result))
        .collect();
    format!("result of {name}{}", entries.concat())
}

/// What a parent takes over of a child's answer.
fn headline(answer: &str) -> String {
    answer.split(" [").next().unwrap_or_default().to_owned()
}

/// The children that the resume messages of the conversation tell of, each as often as they do.
fn told(request: &Recorded) -> Vec<Told> {
    let mut told: Vec<Told> = Vec::new();
    let messages = request.messages().iter().filter(|m| m["role"] == "user");
    for text in messages.filter_map(|m| m["content"].as_str()) {
        if !text.starts_with("Results of the ") {
            continue;
        }
        for line in text.lines() {
            if let Some(head) = line.strip_prefix("## ") {
                let title = head.split_once(". ").unwrap_or_default().1.to_owned();
                told.push(Told {
                    title,
                    status: String::new(),
                    result: String::new(),
                    task: String::new(),
                });
            }
            let Some(last) = told.last_mut() else {
                continue;
            };
            if let Some(quoted) = line.strip_prefix("> ") {
                last.result += &headline(quoted);
            }
            for part in line.split(" | ") {
                if let Some(status) = part.strip_prefix("Status: ") {
                    last.status += status;
                }
                if let Some(task) = part.strip_prefix("Task: ") {
                    last.task += task;
                }
            }
        }
    }
    told
}
