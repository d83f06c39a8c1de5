//! Milliseconds since the process began: the one clock that pure structures are handed.

use std::sync::OnceLock;
use std::time::Instant;

static BEGAN: OnceLock<Instant> = OnceLock::new();

/// Milliseconds since the first call; never goes back.
pub fn now_ms() -> u64 {
    BEGAN.get_or_init(Instant::now).elapsed().as_millis() as u64
}
