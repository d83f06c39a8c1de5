//! Values of `/sys/class/infiniband` and below: states, rates, LIDs, GUIDs.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::fuzzed::sysfs_values(data));
