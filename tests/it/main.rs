mod llm;
mod stub_llm;
mod support;
