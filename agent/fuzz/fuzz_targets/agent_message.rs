//! Holds what `fuzzed::agent_message` asserts for any input.

#![no_main]

use llmgw_agent::fuzzed::identity as fuzzed;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzzed::agent_message(data));
