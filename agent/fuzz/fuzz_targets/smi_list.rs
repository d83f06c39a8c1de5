//! Holds what `fuzzed::smi_list` asserts for any input.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::inventory::gpu::fuzzed::smi_list(data));
