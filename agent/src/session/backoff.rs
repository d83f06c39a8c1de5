//! How long to wait before the next attempt: full jitter, growing, capped.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

const BASE_MS: u64 = 250;
/// The server places nothing for `recovery` (15 s) after its start: by then every agent must have come back.
const BROKEN_MAX_MS: u64 = 10_000;
/// After a refusal somebody has to change something first.
const REFUSED_MAX_MS: u64 = 5 * 60 * 1_000;

/// What became of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A session that was held for a while, and ended.
    Lasted,
    /// None, or a short one.
    Broke,
    /// The server does not want this node as it is.
    Refused,
}

/// What the waits grow by.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    /// Since the last session that lasted.
    attempts: u32,
}

impl Backoff {
    /// `draw` in 0..1 decides between nothing and the most.
    pub fn next(&mut self, outcome: Outcome, draw: f64) -> Duration {
        let max_ms = match outcome {
            Outcome::Lasted => {
                self.attempts = 0;
                BROKEN_MAX_MS
            }
            Outcome::Broke => BROKEN_MAX_MS,
            Outcome::Refused => REFUSED_MAX_MS,
        };
        let grown_ms = BASE_MS.saturating_mul(1 << self.attempts.min(32));
        self.attempts = self.attempts.saturating_add(1);
        Duration::from_millis(grown_ms.min(max_ms)).mul_f64(draw)
    }
}

/// A random number. No secret.
pub fn random() -> u64 {
    // Its keys are drawn from the operating system once in each thread, and differ by a count after that.
    RandomState::new().hash_one(std::process::id())
}

/// A random number in 0..1.
pub fn unit() -> f64 {
    (random() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(outcomes: &[Outcome]) -> Vec<u64> {
        let mut backoff = Backoff::default();
        let wait = |outcome: &Outcome| backoff.next(*outcome, 1.0).as_millis() as u64;
        outcomes.iter().map(wait).collect()
    }

    #[test]
    fn waits_double_to_ten_seconds_and_after_refusals_to_five_minutes() {
        use Outcome::{Broke, Lasted, Refused};
        let broken = [250, 500, 1_000, 2_000, 4_000, 8_000, 10_000, 10_000];
        assert_eq!(waits(&[Broke; 8]), broken);
        let refused = waits(&[Refused; 13]);
        assert_eq!(refused[..7], [250, 500, 1_000, 2_000, 4_000, 8_000, 16_000]);
        assert_eq!(refused[10..], [256_000, 300_000, 300_000]);
        assert_eq!(
            waits(&[Broke, Broke, Broke, Lasted, Broke]),
            [250, 500, 1_000, 250, 500]
        );
        assert_eq!(
            waits(&[Refused, Refused, Refused, Broke, Refused]),
            [250, 500, 1_000, 2_000, 4_000],
            "a stream that breaks between two refusals resets nothing"
        );
    }

    #[test]
    fn any_wait_between_nothing_and_the_most_is_drawn_and_none_overflows() {
        let mut backoff = Backoff::default();
        for _ in 0..200 {
            assert!(backoff.next(Outcome::Refused, 0.5) <= Duration::from_secs(150));
        }
        assert_eq!(backoff.next(Outcome::Refused, 0.0), Duration::ZERO);
        let draws: Vec<f64> = (0..1_000).map(|_| unit()).collect();
        assert!(draws.iter().all(|draw| (0.0..1.0).contains(draw)));
        assert!(draws.iter().any(|draw| *draw < 0.1) && draws.iter().any(|draw| *draw > 0.9));
    }
}
