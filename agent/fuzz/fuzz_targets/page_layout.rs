//! The page for people: no line is too wide, no word is lost.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::fuzzed::page_layout(data));
