//! `/proc/PID/stat`: the name changes nothing of what comes after it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::fuzzed::proc_stat(data));
