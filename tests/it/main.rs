mod llm;
mod stub_llm;
mod agents;
mod embedded;
mod support;
