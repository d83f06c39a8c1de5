//! A sum over the last seconds: what was served lately, and how fast.

/// Buckets of one window: its resolution is a twelfth of it.
const BUCKETS: usize = 12;

/// A sliding sum. Time is given, never read.
#[derive(Debug, Clone)]
pub struct Window {
    bucket_ms: u64,
    buckets: [u64; BUCKETS],
    /// The bucket of the newest entry, counted since time began.
    newest: u64,
    /// When the first entry came; before it nothing is known.
    began_ms: Option<u64>,
}

impl Window {
    /// A window of `length_ms`, which is rounded up to a multiple of 12 ms.
    pub fn new(length_ms: u64) -> Window {
        Window {
            bucket_ms: length_ms.div_ceil(BUCKETS as u64).max(1),
            buckets: [0; BUCKETS],
            newest: 0,
            began_ms: None,
        }
    }

    pub fn add(&mut self, now_ms: u64, amount: u64) {
        self.advance(now_ms);
        self.began_ms.get_or_insert(now_ms);
        let bucket = &mut self.buckets[(self.newest % BUCKETS as u64) as usize];
        *bucket = bucket.saturating_add(amount);
    }

    /// Takes back what was added too much, from the newest bucket that has it.
    pub fn take_back(&mut self, now_ms: u64, mut amount: u64) {
        self.advance(now_ms);
        for age in 0..BUCKETS as u64 {
            let Some(index) = self.newest.checked_sub(age) else {
                return;
            };
            let bucket = &mut self.buckets[(index % BUCKETS as u64) as usize];
            let taken = amount.min(*bucket);
            *bucket -= taken;
            amount -= taken;
        }
    }

    pub fn sum(&mut self, now_ms: u64) -> u64 {
        self.advance(now_ms);
        self.buckets
            .iter()
            .fold(0_u64, |sum, bucket| sum.saturating_add(*bucket))
    }

    /// The sum per second, over the part of the window that has been lived through; at least one bucket's length.
    pub fn rate_per_s(&mut self, now_ms: u64) -> Option<f64> {
        let sum = self.sum(now_ms);
        let began = self.began_ms?;
        let length = self.bucket_ms * BUCKETS as u64;
        let lived = now_ms.saturating_sub(began).clamp(self.bucket_ms, length);
        (sum > 0).then(|| sum as f64 * 1e3 / lived as f64)
    }

    fn advance(&mut self, now_ms: u64) {
        let now = now_ms / self.bucket_ms;
        // A clock that went back adds to the newest bucket.
        for passed in 0..now.saturating_sub(self.newest).min(BUCKETS as u64) {
            self.buckets[((now - passed) % BUCKETS as u64) as usize] = 0;
        }
        self.newest = self.newest.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_the_window_is_gone() {
        let mut window = Window::new(12_000);
        window.add(500, 7);
        window.add(6_000, 5);
        assert_eq!(window.sum(11_999), 12);
        assert_eq!(window.sum(12_000), 5);
        assert_eq!(window.sum(100_000), 0);
        window.add(50_000, 1);
        assert_eq!(
            window.sum(100_000),
            1,
            "a clock that goes back loses nothing"
        );
    }

    #[test]
    fn the_rate_is_over_the_time_that_was_lived_through() {
        let mut window = Window::new(12_000);
        assert_eq!(window.rate_per_s(0), None);
        window.add(100_000, 3_000);
        assert_eq!(window.rate_per_s(103_000), Some(1_000.0));
        assert_eq!(window.rate_per_s(100_000), Some(3_000.0));
    }

    #[test]
    fn taking_back_never_goes_below_nothing() {
        let mut window = Window::new(12_000);
        window.add(0, 5);
        window.add(3_000, 5);
        window.take_back(4_000, 7);
        assert_eq!(window.sum(4_000), 3);
        window.take_back(4_000, 70);
        assert_eq!(window.sum(4_000), 0);
    }
}
