mod agents;
mod embedded;
mod engine;
mod llm;
mod main_job;
mod offline_demo;
mod stub_llm;
mod support;
