//! A histogram of seconds made of atomics: observing one costs two additions and no lock.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Upper bounds: from a queue that is empty to a long generation.
const BOUNDS_MS: [u64; 18] = [
    1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 120_000, 300_000,
    600_000,
];

/// Observed durations. prometheus-client 0.26's own histogram takes a mutex for each observation.
#[derive(Debug, Default)]
pub struct Seconds {
    /// Not cumulative; the last one is what is above every bound.
    counts: [AtomicU64; BOUNDS_MS.len() + 1],
    sum_micros: AtomicU64,
}

impl Seconds {
    pub fn observe(&self, duration: Duration) {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_MS.partition_point(|bound| bound * 1000 < micros);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_micros.fetch_add(micros, Ordering::Relaxed);
    }

    pub fn count(&self) -> u64 {
        self.counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .sum()
    }
}

impl TypedMetric for Seconds {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Seconds {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let counts: Vec<u64> = self
            .counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .collect();
        let bounds = BOUNDS_MS
            .iter()
            .map(|bound| *bound as f64 / 1000.0)
            .chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts.iter().copied()).collect();
        let sum = self.sum_micros.load(Ordering::Relaxed) as f64 / 1e6;
        // The count is that of these very buckets, so that a scrape is consistent in itself.
        encoder.encode_histogram::<NoLabelSet>(sum, counts.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_own_bucket_and_the_rest_to_the_last() {
        let cases = [
            (0, 0),
            (1000, 0),
            (1001, 1),
            (600_000_000, 17),
            (600_000_001, 18),
        ];
        for (micros, bucket) in cases {
            let seconds = Seconds::default();
            seconds.observe(Duration::from_micros(micros));
            assert_eq!(
                seconds.counts[bucket].load(Ordering::Relaxed),
                1,
                "{micros}"
            );
            assert_eq!(seconds.count(), 1);
        }
    }
}
