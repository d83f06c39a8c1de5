//! Holds what `fuzzed::smi_query` asserts for any input.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::inventory::gpu::fuzzed::smi_query(data));
