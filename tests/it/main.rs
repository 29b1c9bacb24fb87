mod agents;
mod embedded;
mod llm;
mod stub_llm;
mod support;
