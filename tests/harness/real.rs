//! Whether there is a real engine. Included by path: it needs nothing else of the harness.

use std::io::Write;
use std::path::{Path, PathBuf};

/// The engine that `tests/real/prepare` makes ready, its model beside it; `None` (having said why) without it.
pub fn prepared(what: &str) -> Option<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(".llmgw/engine");
    let engine = directory.join("llama-server");
    if engine.exists() && directory.join("model.gguf").exists() {
        return Some(engine);
    }
    let directory = directory.display();
    let reason = format!("`{directory}` is missing; tests/real/prepare makes it");
    let required = std::env::var("LLMGW_REQUIRE_REAL");
    assert_ne!(required.as_deref(), Ok("1"), "{reason}");
    // Not `eprintln!`, which the test runner keeps to itself when a test passes.
    let mut stderr = std::io::stderr();
    let _ = writeln!(stderr, "skipped: {what}: {reason}");
    None
}
