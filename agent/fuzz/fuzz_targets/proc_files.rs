//! Control groups, arguments and environment of a process.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::fuzzed::proc_files(data));
