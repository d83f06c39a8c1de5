//! `/proc/meminfo`, lists of processors, limits of control groups.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::fuzzed::proc_meminfo(data));
