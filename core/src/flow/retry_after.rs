//! `Retry-After`: how long a refused client is told to wait, spread so that those refused together do not come back together.

use std::ops::RangeInclusive;
use std::time::Duration;

/// What a client is told at least and at most.
pub const RETRY_AFTER: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(60);
/// How far a wait is moved at most, in either direction.
const SPREAD: f64 = 0.2;

/// The wait, moved by up to 20 % and kept within 1 to 60 s. `random` is any number that differs between requests.
pub fn jittered(wait: Duration, random: u64) -> Duration {
    let (least, most) = (*RETRY_AFTER.start(), *RETRY_AFTER.end());
    let unit = (random >> 11) as f64 / (1u64 << 53) as f64;
    let factor = 1.0 - SPREAD + 2.0 * SPREAD * unit;
    // Cut before it is stretched: an hour and a day are both a minute, and a minute is to be spread too.
    wait.min(most).mul_f64(factor).clamp(least, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_moved_by_a_fifth_at_most_and_stays_between_a_second_and_a_minute() {
        let (low, middle, high) = (0, 1 << 63, u64::MAX);
        for (wait_ms, random, expected_ms) in [
            (10_000, low, 8_000),
            (10_000, middle, 10_000),
            (10_000, high, 12_000),
            (0, high, 1_000),
            (1_000, low, 1_000),
            (60_000, low, 48_000),
            (60_000, high, 60_000),
            (u64::MAX, low, 48_000),
        ] {
            let wait = jittered(Duration::from_millis(wait_ms), random);
            let off = wait.abs_diff(Duration::from_millis(expected_ms));
            assert!(
                off < Duration::from_millis(1),
                "{wait_ms} {random}: {wait:?}"
            );
        }
    }
}
