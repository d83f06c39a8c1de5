//! Holds what `fuzzed::class_name` asserts for any input.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::inventory::gpu::fuzzed::class_name(data));
