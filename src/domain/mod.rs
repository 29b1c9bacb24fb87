//! Nouns and rules: no I/O, no async, no SQL. Every decision of the service is a function here, tested as a table.

pub mod agent;
pub mod backfill;
pub mod budget;
pub mod configured_tool;
pub mod credential;
pub mod decision;
pub mod delegation;
mod fields;
pub mod flag;
pub mod grants;
pub mod http_request;
pub mod ids;
pub mod json_path;
pub mod member;
pub mod model_provider;
pub mod output;
pub mod replay;
pub mod retry;
pub mod role;
pub mod signal;
pub mod step;
pub mod task;
pub mod task_await;
pub mod template;
pub mod text;
pub mod turn;
pub mod why;
