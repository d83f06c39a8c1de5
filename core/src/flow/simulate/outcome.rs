//! What came of a simulation: by tenant and by band, how long requests waited, and who was served how much.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::super::cost::PRICE_SCALE;

/// Rows of a table; the other tenants are put together in one more.
const ROWS_MAX: usize = 6;

/// The figures of one run.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Which discipline it was.
    pub discipline: &'static str,
    /// How long it took in virtual time.
    pub ms: u64,
    pub all: Tally,
    /// In the order of the plan.
    pub tenants: Vec<(Arc<str>, Tally)>,
    /// The highest first.
    pub bands: Vec<(Arc<str>, Tally)>,
}

/// What became of some requests.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    pub requests: u64,
    pub served: u64,
    /// Not let in.
    pub refused: u64,
    /// Waited for as long as their band lets them.
    pub timed_out: u64,
    /// Lost with a replica.
    pub failed: u64,
    /// Their client left first.
    pub left: u64,
    /// Still waiting when it was cut off.
    pub waiting: u64,
    /// Of what was read and generated, in thousandths.
    pub cost: u64,
    /// From the arrival until it was sent, in milliseconds; of those who were never sent, for as long as they waited.
    waits: Vec<f64>,
    /// From the arrival to the first byte.
    first_bytes: Vec<f64>,
}

impl Tally {
    pub(super) fn waited(&mut self, ms: f64) {
        self.waits.push(ms);
    }

    pub(super) fn first_byte(&mut self, ms: f64) {
        self.first_bytes.push(ms);
    }

    pub(super) fn sort(&mut self) {
        self.waits.sort_by(f64::total_cmp);
        self.first_bytes.sort_by(f64::total_cmp);
    }

    /// The percentile of the waits; `None` where nobody came.
    pub fn wait_ms(&self, percent: usize) -> Option<f64> {
        percentile(&self.waits, percent)
    }

    pub fn first_byte_ms(&self, percent: usize) -> Option<f64> {
        percentile(&self.first_bytes, percent)
    }

    pub(super) fn add(&mut self, other: &Tally) {
        self.requests += other.requests;
        self.served += other.served;
        self.refused += other.refused;
        self.timed_out += other.timed_out;
        self.failed += other.failed;
        self.left += other.left;
        self.waiting += other.waiting;
        self.cost += other.cost;
        self.waits.extend_from_slice(&other.waits);
        self.first_bytes.extend_from_slice(&other.first_bytes);
    }

    fn json(&self, all: u64) -> Value {
        json!({
            "requests": self.requests,
            "served": self.served,
            "refused": self.refused,
            "timed_out": self.timed_out,
            "failed": self.failed,
            "left": self.left,
            "waiting": self.waiting,
            "cost": self.cost as f64 / PRICE_SCALE,
            "share": share(self.cost, all),
            "wait_p50_ms": self.wait_ms(50),
            "wait_p90_ms": self.wait_ms(90),
            "wait_p99_ms": self.wait_ms(99),
            "wait_max_ms": self.wait_ms(100),
            "ttft_p50_ms": self.first_byte_ms(50),
            "ttft_p90_ms": self.first_byte_ms(90),
            "ttft_p99_ms": self.first_byte_ms(99),
        })
    }

    /// In at most 80 columns.
    fn row(&self, name: &str, all: u64) -> String {
        let s = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| seconds(ms / 1e3));
        let lost = self.refused + self.timed_out + self.failed + self.left;
        format!(
            "{name:<12.12} {:>6} {:>6} {lost:>6} {:>5.1}% {:>7} {:>7} {:>7} {:>7} {:>7}\n",
            self.requests,
            self.served,
            share(self.cost, all) * 100.0,
            s(self.wait_ms(50)),
            s(self.wait_ms(90)),
            s(self.wait_ms(99)),
            s(self.first_byte_ms(50)),
            s(self.first_byte_ms(90)),
        )
    }
}

impl Outcome {
    pub fn tenant(&self, name: &str) -> Option<&Tally> {
        find(&self.tenants, name)
    }

    pub fn band(&self, name: &str) -> Option<&Tally> {
        find(&self.bands, name)
    }

    /// A tenant's part of all that was served, 0..1.
    pub fn share(&self, tenant: &str) -> f64 {
        let cost = self.tenant(tenant).map_or(0, |tally| tally.cost);
        share(cost, self.all.cost)
    }

    /// Everything: what `t.simulate` gives.
    pub fn json(&self) -> Value {
        let map = |rows: &[(Arc<str>, Tally)]| {
            let rows = rows.iter().map(|(name, tally)| {
                let tally = tally.json(self.all.cost);
                (name.to_string(), tally)
            });
            Value::Object(rows.collect::<Map<_, _>>())
        };
        json!({
            "ms": self.ms,
            "requests": self.all.requests,
            "served": self.all.served,
            "refused": self.all.refused,
            "tenants": map(&self.tenants),
            "bands": map(&self.bands),
        })
    }

    /// A table of seconds and requests, at most 80 columns wide: bands, then the tenants that asked for most.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{:<12} {:>6} {:>6} {:>6} {:>6} {:>7} {:>7} {:>7} {:>7} {:>7}\n",
            self.discipline,
            "REQS",
            "SERVED",
            "LOST",
            "SHARE",
            "W50 s",
            "W90 s",
            "W99 s",
            "T50 s",
            "T90 s",
        );
        for (name, tally) in &self.bands {
            text.push_str(&tally.row(name, self.all.cost));
        }
        let mut tenants: Vec<&(Arc<str>, Tally)> = self.tenants.iter().collect();
        tenants.sort_by_key(|(_, tally)| std::cmp::Reverse(tally.requests));
        for (name, tally) in tenants.iter().take(ROWS_MAX) {
            text.push_str(&tally.row(name, self.all.cost));
        }
        if tenants.len() > ROWS_MAX {
            let mut others = Tally::default();
            tenants[ROWS_MAX..]
                .iter()
                .for_each(|(_, tally)| others.add(tally));
            others.sort();
            let name = format!("{} others", tenants.len() - ROWS_MAX);
            text.push_str(&others.row(&name, self.all.cost));
        }
        text.push_str(&self.all.row("all", self.all.cost));
        text
    }

    /// One line a tenant, for a test that fails.
    pub fn story(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "{:.1} s simulated, {} of {} requests served",
            self.ms as f64 / 1e3,
            self.all.served,
            self.all.requests
        )];
        for (name, tally) in &self.tenants {
            let ms = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| format!("{ms:.0}"));
            lines.push(format!(
                "{name}: {} of {} served, share {:.2}, wait p50 {} p90 {} max {} ms",
                tally.served,
                tally.requests,
                share(tally.cost, self.all.cost),
                ms(tally.wait_ms(50)),
                ms(tally.wait_ms(90)),
                ms(tally.wait_ms(100)),
            ));
        }
        lines
    }
}

fn find<'a>(rows: &'a [(Arc<str>, Tally)], name: &str) -> Option<&'a Tally> {
    let row = rows.iter().find(|(known, _)| **known == *name);
    row.map(|(_, tally)| tally)
}

fn share(cost: u64, all: u64) -> f64 {
    cost as f64 / all.max(1) as f64
}

/// The nearest rank, of values in order.
fn percentile(values: &[f64], percent: usize) -> Option<f64> {
    let rank = (values.len() * percent).div_ceil(100);
    values.get(rank.saturating_sub(1)).copied()
}

fn seconds(s: f64) -> String {
    match s {
        ..100.0 => format!("{s:.2}"),
        _ => format!("{s:.0}"),
    }
}
