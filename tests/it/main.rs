#![allow(
    clippy::disallowed_methods,
    reason = "tests find their database in the environment"
)]

mod agents;
mod commands;
mod embedded;
mod engine;
mod llm;
mod main_job;
mod offline_demo;
mod stub_llm;
mod support;
