//! Plans out of recorded arrivals, whose tenants are made up since no public trace has any, and out of drawn ones.
//!
//! Tenants ask by Zipf's law: the first for most. A conversation stays with one tenant, where a trace shows conversations.

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use serde::Deserialize;

use super::plan::{Load, Plan, Recorded, ReplicaPlan, TenantPlan};
use crate::routing::score::SplitMix;

/// Tenants of a trace.
const TENANTS: usize = 50;
/// The exponent of Zipf's law.
const ZIPF: f64 = 1.1;
/// Recorded times may be in buckets this wide: requests are spread over them.
const BUCKET_US: u64 = 3_000_000;
/// The mean sizes of drawn requests, in tokens.
const DRAWN_INPUT_TOKENS: f64 = 1_200.0;
const DRAWN_OUTPUT_TOKENS: f64 = 200.0;
/// Drawn requests a second, before their times are scaled.
const DRAWN_PER_S: f64 = 5.0;
/// Nothing is longer, in tokens.
const TOKENS_MAX: u64 = 200_000;

/// Arrivals without tenants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    /// In the order of their time.
    pub requests: Vec<Traced>,
}

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traced {
    pub at_us: u64,
    pub input_tokens: u64,
    pub output_tokens: u64,
    /// What tells its conversation from others.
    pub conversation: Option<u64>,
}

/// A line of a trace that can't be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadLine {
    pub line: usize,
    pub reason: &'static str,
}

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for BadLine {}

/// A line of the Mooncake traces.
#[derive(Deserialize)]
struct Mooncake {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Reads Azure's CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`) or Mooncake's lines of JSON, whichever it is.
    pub fn parse(text: &str, seed: u64) -> Result<Trace, BadLine> {
        let is_json = text.trim_start().starts_with('{');
        let mut random = SplitMix(seed);
        let mut requests = Vec::new();
        let mut began_us = None;
        for (at, line) in text.lines().enumerate() {
            let bad = |reason| BadLine {
                line: at + 1,
                reason,
            };
            if line.trim().is_empty() || (at == 0 && line.starts_with("TIMESTAMP")) {
                continue;
            }
            let mut traced = match is_json {
                true => mooncake(line, &mut random).map_err(bad)?,
                false => azure(line).map_err(bad)?,
            };
            let began = *began_us.get_or_insert(traced.at_us);
            traced.at_us = traced.at_us.saturating_sub(began);
            requests.push(traced);
        }
        requests.sort_by_key(|request: &Traced| request.at_us);
        Ok(Trace { requests })
    }

    /// Draws as many: they come at random, most are short, a few are very long.
    pub fn drawn(count: usize, seed: u64) -> Trace {
        let mut random = SplitMix(seed);
        let mut at_s = 0.0;
        let requests = (0..count).map(|_| {
            at_s += exponential(&mut random) / DRAWN_PER_S;
            // The square of an exponential, halved: the same mean, and a long tail.
            let length = |random: &mut SplitMix, mean: f64| {
                let drawn = exponential(random);
                ((mean * drawn * drawn / 2.0) as u64).clamp(1, TOKENS_MAX)
            };
            Traced {
                at_us: (at_s * 1e6) as u64,
                input_tokens: length(&mut random, DRAWN_INPUT_TOKENS),
                output_tokens: length(&mut random, DRAWN_OUTPUT_TOKENS),
                conversation: None,
            }
        });
        Trace {
            requests: requests.collect(),
        }
    }

    /// The same requests with tenants, on these replicas, so fast after each other that they would keep the replicas busy for
    /// this part of the time, if they came evenly. `bands` are given to tenants in turn.
    pub fn plan(
        &self,
        replicas: Vec<ReplicaPlan>,
        load: f64,
        bands: &[Arc<str>],
        seed: u64,
    ) -> Plan {
        let scale = self.busy_us(&replicas) / (load * self.length_us().max(1) as f64);
        let shares = zipf(TENANTS, ZIPF);
        let mut random = SplitMix(seed);
        let recorded = self.requests.iter().map(|request| {
            let drawn = match request.conversation {
                Some(conversation) => SplitMix(seed ^ conversation).next(),
                None => random.next(),
            };
            let unit = (drawn >> 11) as f64 / (1u64 << 53) as f64;
            Recorded {
                at_us: (request.at_us as f64 * scale) as u64,
                tenant: shares
                    .partition_point(|share| *share < unit)
                    .min(TENANTS - 1),
                input_tokens: request.input_tokens,
                output_tokens: request.output_tokens,
            }
        });
        let tenants = (0..TENANTS).map(|at| TenantPlan {
            load: Load::Recorded,
            ..TenantPlan::new(&format!("t{:02}", at + 1), &bands[at % bands.len()])
        });
        Plan {
            seed,
            end_ms: None,
            events_max: u64::MAX,
            recorded: recorded.collect(),
            tenants: tenants.collect(),
            replicas,
        }
    }

    fn length_us(&self) -> u64 {
        self.requests.last().map_or(0, |last| last.at_us)
    }

    /// How long all replicas together need for all of it: whichever is scarcer, reading or slots.
    fn busy_us(&self, replicas: &[ReplicaPlan]) -> f64 {
        let (mut reads_per_ms, mut slots_per_ms) = (0.0, 0.0);
        let count = self.requests.len().max(1) as f64;
        let sum = |of: fn(&Traced) -> u64| self.requests.iter().map(of).sum::<u64>() as f64;
        let (input, output) = (
            sum(|request| request.input_tokens),
            sum(|request| request.output_tokens),
        );
        for replica in replicas {
            let others = f64::from(replica.slots - 1) * replica.ms_per_other_stream;
            let read_ms = input / count * replica.ms_per_prefill_token;
            let held_ms = read_ms + output / count * (replica.ms_per_decode_step + others);
            reads_per_ms += 1.0 / read_ms.max(1e-9);
            slots_per_ms += f64::from(replica.slots) / held_ms.max(1e-9);
        }
        count / reads_per_ms.min(slots_per_ms) * 1e3
    }
}

fn azure(line: &str) -> Result<Traced, &'static str> {
    let mut fields = line.trim().split(',');
    let (Some(time), Some(input), Some(output)) = (fields.next(), fields.next(), fields.next())
    else {
        return Err("there are three fields: time, prompt tokens, generated tokens");
    };
    let tokens = |text: &str| {
        let tokens = text.trim().parse::<u64>().ok();
        tokens.map(|tokens| tokens.clamp(1, TOKENS_MAX))
    };
    Ok(Traced {
        at_us: time_us(time).ok_or("the time is not like `2023-11-16 18:17:03.9799600`")?,
        input_tokens: tokens(input).ok_or("prompt tokens are a whole number")?,
        output_tokens: tokens(output).ok_or("generated tokens are a whole number")?,
        conversation: None,
    })
}

fn mooncake(line: &str, random: &mut SplitMix) -> Result<Traced, &'static str> {
    let read: Mooncake = serde_json::from_str(line)
        .map_err(|_| "it is not JSON with `timestamp`, `input_length` and `output_length`")?;
    // The first block is common to all; the second begins a conversation.
    let block = read.hash_ids.get(1).or(read.hash_ids.first());
    Ok(Traced {
        at_us: read.timestamp * 1_000 + random.below(BUCKET_US as usize) as u64,
        input_tokens: read.input_length.clamp(1, TOKENS_MAX),
        output_tokens: read.output_length.clamp(1, TOKENS_MAX),
        conversation: block.map(|block| {
            let mut hasher = DefaultHasher::new();
            block.hash(&mut hasher);
            hasher.finish()
        }),
    })
}

/// Microseconds since some midnight; the day counts, the month does not.
fn time_us(text: &str) -> Option<u64> {
    let (date, time) = text.trim().split_once(' ')?;
    let day: u64 = date.rsplit('-').next()?.parse().ok()?;
    let mut parts = time.split(':');
    let hour: u64 = parts.next()?.parse().ok()?;
    let minute: u64 = parts.next()?.parse().ok()?;
    let second: f64 = parts.next()?.parse().ok()?;
    let whole = (day * 24 + hour) * 3_600 + minute * 60;
    Some(whole * 1_000_000 + (second * 1e6) as u64)
}

/// The shares of so many, summed up to 1.
fn zipf(count: usize, exponent: f64) -> Vec<f64> {
    let parts: Vec<f64> = (1..=count)
        .map(|rank| (rank as f64).powf(-exponent))
        .collect();
    let all: f64 = parts.iter().sum();
    let mut sum = 0.0;
    parts
        .into_iter()
        .map(|part| {
            sum += part / all;
            sum
        })
        .collect()
}

/// Of mean 1.
fn exponential(random: &mut SplitMix) -> f64 {
    let unit = (random.next() >> 11) as f64 / (1u64 << 53) as f64;
    -(1.0 - unit).ln()
}
