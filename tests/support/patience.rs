//! Time that a stalled machine does not use up.

use std::time::{Duration, Instant};

/// Of the time between two looks, however long it was, no more counts.
const COUNTED_MAX: Duration = Duration::from_millis(200);

/// A limit for one who looks again and again. Where everything stood still between two looks, the other side has had no time either:
/// the limit is in looks then, of which there are many left, and in time as long as the machine runs.
pub struct Patience {
    left: Duration,
    looked: Instant,
}

impl Patience {
    pub fn new(limit: Duration) -> Patience {
        Patience {
            left: limit,
            looked: Instant::now(),
        }
    }

    /// Whether it is at an end; to be asked after every look.
    pub fn is_over(&mut self) -> bool {
        let now = Instant::now();
        let passed = now.duration_since(self.looked).min(COUNTED_MAX);
        self.looked = now;
        self.left = self.left.saturating_sub(passed);
        self.left.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_stands_still_uses_up_little_of_it_and_one_that_runs_all_of_it() {
        let mut patience = Patience::new(2 * COUNTED_MAX);
        // As if nothing had run for ten minutes.
        patience.looked -= Duration::from_secs(600);
        assert!(!patience.is_over());
        patience.looked -= Duration::from_secs(600);
        assert!(patience.is_over());
        let began = Instant::now();
        let mut patience = Patience::new(Duration::from_millis(20));
        while !patience.is_over() {}
        assert!(began.elapsed() >= Duration::from_millis(20));
    }
}
