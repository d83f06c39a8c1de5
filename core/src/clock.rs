//! Milliseconds since the process began: the one clock that pure structures are handed.

use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

static BEGAN: OnceLock<Instant> = OnceLock::new();

/// Milliseconds since the first call; never goes back.
pub fn now_ms() -> u64 {
    BEGAN.get_or_init(Instant::now).elapsed().as_millis() as u64
}

/// Milliseconds since 1970, for those who compare with the world. It may jump.
pub fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}
