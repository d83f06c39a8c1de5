//! Quantiles of the last minute, of a bounded number of samples.

/// Samples that quantiles are taken of.
const QUANTILE_SAMPLES_MAX: usize = 256;
/// Older samples don't count, in milliseconds.
pub const QUANTILE_WINDOW_MS: u64 = 60_000;

/// Quantiles of the newest 256 samples of the last minute, as of times to first byte.
#[derive(Debug, Clone)]
pub struct Quantiles {
    /// `(when, value)`; the next one is written to `next`.
    samples: Box<[(u64, f32); QUANTILE_SAMPLES_MAX]>,
    len: usize,
    next: usize,
}

impl Default for Quantiles {
    fn default() -> Self {
        Self {
            samples: Box::new([(0, 0.0); QUANTILE_SAMPLES_MAX]),
            len: 0,
            next: 0,
        }
    }
}

impl Quantiles {
    /// Adds a sample, in milliseconds; NaN and infinity are left out.
    pub fn record(&mut self, value_ms: f64, now_ms: u64) {
        if value_ms.is_finite() {
            self.samples[self.next] = (now_ms, value_ms as f32);
            self.next = (self.next + 1) % QUANTILE_SAMPLES_MAX;
            self.len = (self.len + 1).min(QUANTILE_SAMPLES_MAX);
        }
    }

    /// The 50th and the 90th percentile; `None` where there is no recent sample.
    pub fn p50_p90(&self, now_ms: u64) -> Option<(f64, f64)> {
        let mut recent = [0.0f32; QUANTILE_SAMPLES_MAX];
        let mut count = 0;
        for (at_ms, value) in &self.samples[..self.len] {
            if now_ms.saturating_sub(*at_ms) <= QUANTILE_WINDOW_MS {
                recent[count] = *value;
                count += 1;
            }
        }
        let recent = &mut recent[..count];
        recent.sort_unstable_by(f32::total_cmp);
        let at = |percent: usize| {
            recent
                .get((count * percent).div_ceil(100).saturating_sub(1))
                .map(|v| f64::from(*v))
        };
        Some((at(50)?, at(90)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::score::SplitMix;

    #[test]
    fn quantiles_are_those_of_the_newest_samples_of_the_last_minute() {
        let mut quantiles = Quantiles::default();
        assert_eq!(quantiles.p50_p90(0), None);
        quantiles.record(7.0, 0);
        quantiles.record(f64::NAN, 0);
        assert_eq!(quantiles.p50_p90(0), Some((7.0, 7.0)));
        for value in 1..=100 {
            quantiles.record(f64::from(value), 70_000);
        }
        assert_eq!(
            quantiles.p50_p90(70_000),
            Some((50.0, 90.0)),
            "the first sample is too old"
        );
        let mut random = SplitMix(3);
        for _ in 0..10_000 {
            quantiles.record(1_000.0 + random.below(1_000) as f64, 80_000);
        }
        let (p50, p90) = quantiles.p50_p90(80_000).unwrap();
        assert!(
            (1_400.0..1_600.0).contains(&p50) && (1_850.0..1_950.0).contains(&p90),
            "{p50} {p90}"
        );
        assert_eq!(quantiles.p50_p90(140_001), None);
    }
}
