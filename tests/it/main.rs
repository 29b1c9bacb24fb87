#![allow(
    clippy::disallowed_methods,
    reason = "tests find their database in the environment"
)]

mod accounts;
mod agents;
mod agents_api;
mod api_auth;
mod api_chat;
mod api_errors;
mod api_stream;
mod api_tasks;
mod awaits;
mod bus;
mod chaos;
mod commands;
mod crash_world;
mod crashes;
mod delegation;
mod deletes;
mod depth;
mod embedded;
mod engine;
mod flags;
mod forced;
mod http;
mod layers;
mod leases;
mod liveness;
mod llm;
mod main_job;
mod messages;
mod migrations;
mod model;
mod offline_demo;
mod overload;
mod pairs;
mod process;
mod processes;
mod program;
mod races;
mod resumes;
mod shutdown;
mod signals_api;
mod starts;
mod stop;
mod stop_races;
mod storms;
mod stub_llm;
mod submitting;
mod summaries;
mod support;
mod tenancy;
mod tree_limits;
mod turns;
mod waits;
