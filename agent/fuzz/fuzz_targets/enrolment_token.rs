//! Enrolment tokens: what is read is written the same way.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| llmgw_agent::fuzzed::enrolment_token(data));
