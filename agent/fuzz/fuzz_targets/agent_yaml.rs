//! agent.yaml: what is accepted keeps the rules, what is not says why.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::fuzzed::agent_yaml(data));
