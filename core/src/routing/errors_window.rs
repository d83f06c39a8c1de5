//! How many faults a replica had within the last minute, in bounded memory.

/// Length of the window, in buckets.
const WINDOW_BUCKETS: u64 = 6;
/// Length of a bucket, in milliseconds. A fault counts for 50 to 60 seconds.
const BUCKET_MS: u64 = 10_000;

/// A count over a sliding minute. Times are milliseconds of any clock that doesn't go back.
#[derive(Debug, Clone, Default)]
pub struct ErrorsWindow {
    /// A bucket's number (time ÷ length) and its faults; bucket `n` lies at `n mod 6`.
    buckets: [(u64, u32); WINDOW_BUCKETS as usize],
}

impl ErrorsWindow {
    /// Counts one fault.
    pub fn record(&mut self, now_ms: u64) {
        let number = now_ms / BUCKET_MS;
        let bucket = &mut self.buckets[(number % WINDOW_BUCKETS) as usize];
        if bucket.0 < number {
            *bucket = (number, 0);
        }
        bucket.1 = bucket.1.saturating_add(1);
    }

    /// Faults within the last minute: `errors_1m`.
    pub fn count(&self, now_ms: u64) -> u32 {
        let number = now_ms / BUCKET_MS;
        let recent = self
            .buckets
            .iter()
            .filter(|bucket| bucket.0 + WINDOW_BUCKETS > number);
        recent.fold(0, |sum, bucket| sum.saturating_add(bucket.1))
    }
}

#[cfg(test)]
mod tests {
    use super::ErrorsWindow;

    #[test]
    fn a_fault_counts_for_about_a_minute() {
        let mut errors = ErrorsWindow::default();
        assert_eq!(errors.count(0), 0);
        for second in 0..60 {
            errors.record(second * 1_000);
        }
        let cases = [
            (59_999, 60),
            (60_000, 50),
            (75_000, 40),
            (109_999, 10),
            (110_000, 0),
            (10_000_000, 0),
        ];
        for (now_ms, count) in cases {
            assert_eq!(errors.count(now_ms), count, "at {now_ms} ms");
        }
    }

    #[test]
    fn an_old_bucket_is_emptied_before_it_is_used_again() {
        let mut errors = ErrorsWindow::default();
        errors.record(1_000);
        errors.record(61_000);
        assert_eq!(errors.count(61_000), 1);
        errors.record(3_600_000);
        assert_eq!(errors.count(3_600_000), 1);
    }
}
