//! `llmgw policy bench`, `explain` and `diff`: what policies cost, decide, and would decide otherwise.

pub mod bench;

pub use bench::BenchArgs;
