//! Rows to Prometheus text: families that have no row are left out, header and all.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

/// The `Content-Type` of [`page`].
pub const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// The labels of one series.
pub type Labels<'a, const N: usize> = [(&'static str, &'a str); N];

/// Renders everything that `collector` knows, in the Prometheus text format 0.0.4.
pub fn page(collector: impl Collector) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(collector));
    let mut text = String::new();
    // Writing into a String doesn't fail, and our collectors return no error of their own.
    let _ = prometheus_text::encode(&mut text, &registry);
    text
}

/// Writes a counter family. `name` is without `_total`, which the format appends.
pub fn counters<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    rows: Vec<(Labels<'_, N>, u64)>,
) -> fmt::Result {
    let rows: Vec<_> = rows
        .into_iter()
        .map(|(labels, value)| (labels, ConstCounter::new(value)))
        .collect();
    family(
        encoder,
        name,
        help,
        MetricType::Counter,
        rows.iter().map(|(labels, metric)| (*labels, metric)),
    )
}

/// Writes a gauge family.
pub fn gauges<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    rows: Vec<(Labels<'_, N>, f64)>,
) -> fmt::Result {
    let rows: Vec<_> = rows
        .into_iter()
        .map(|(labels, value)| (labels, ConstGauge::new(value)))
        .collect();
    family(
        encoder,
        name,
        help,
        MetricType::Gauge,
        rows.iter().map(|(labels, metric)| (*labels, metric)),
    )
}

/// Writes a family of any type.
pub fn family<'a, const N: usize, M: EncodeMetric + 'a>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    kind: MetricType,
    rows: impl Iterator<Item = (Labels<'a, N>, &'a M)>,
) -> fmt::Result {
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        return Ok(());
    }
    let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
    for (labels, value) in rows {
        value.encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    /// The value of a series on a page.
    pub(crate) fn value(page: &str, series: &str) -> Option<f64> {
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?;
        Some(line.parse().unwrap_or_else(|_| panic!("{series} {line}")))
    }
}
