//! GIDs, their prefixes and addresses.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::fuzzed::sysfs_gids(data));
