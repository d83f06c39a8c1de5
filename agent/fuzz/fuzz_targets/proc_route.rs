//! Routing tables of both versions, and the server's address.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::fuzzed::proc_route(data));
