//! Holds what `fuzzed::enrolment_question` asserts for any input.

#![no_main]

use llmgw_agent::fuzzed::identity as fuzzed;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzzed::enrolment_question(data));
