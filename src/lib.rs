//! Reconvene runs AI-agent tasks. Its one hard job: an agent hands work to others, holds nothing while they
//! work, and wakes exactly once with everybody's results. `ARCHITECTURE.md` walks one message through the modules.
//!
//! A module imports lower ranks only (`tests/it/layers.rs` enforces it):
//! 0 `domain`, `config`, `net`; 1 `runtime`, `postgres`, `store`, `llm`, `prompts`, `tools`, `vault`;
//! 2 `bus`, `flags`, `roster`, `sent`, `lifecycle`; 3 `profiles`; 4 `worker`, `orchestrator`, `api`; 5 `commands`.

pub mod config;
pub mod domain;
pub mod net;

pub mod llm;
pub mod postgres;
pub mod prompts;
pub mod runtime;
pub mod store;
pub mod tools;
pub mod vault;

pub mod bus;
pub mod flags;
pub mod lifecycle;
pub mod roster;
pub mod sent;

pub mod profiles;

pub mod api;
pub mod orchestrator;
pub mod worker;

pub mod commands;
