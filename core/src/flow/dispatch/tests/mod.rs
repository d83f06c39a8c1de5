//! What the dispatcher keeps, whatever happens: properties over random arrivals, each with many seeds.
//!
//! A failing case prints its seed; `LLMGW_FLOW_SEED=N cargo test -p llmgw-core dispatch::tests` runs that one alone.

mod anything;
mod cases;
mod costs;
mod shares;
mod world;

use std::sync::Arc;

use llmgw_plugins::{BandSpec, Gate};

use crate::routing::score::SplitMix;

/// Runs a property on so many seeds, or on the one that is asked for.
fn property(seeds: u64, holds: impl Fn(&mut Draws)) {
    let only: Option<u64> = std::env::var("LLMGW_FLOW_SEED")
        .ok()
        .map(|seed| seed.parse().expect("LLMGW_FLOW_SEED is a number"));
    for seed in only.map_or(0..seeds, |seed| seed..seed + 1) {
        let shown = Shown(seed);
        holds(&mut Draws(SplitMix(seed)));
        std::mem::forget(shown);
    }
}

/// Says which seed failed.
struct Shown(u64);

impl Drop for Shown {
    fn drop(&mut self) {
        eprintln!("failed with LLMGW_FLOW_SEED={}", self.0);
    }
}

/// Draws from one seed.
struct Draws(SplitMix);

impl Draws {
    /// From `least` to `greatest`, both included.
    fn whole(&mut self, least: u64, greatest: u64) -> u64 {
        least + self.0.below((greatest - least + 1) as usize) as u64
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.whole(1, 100) <= percent
    }

    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.0.below(list.len())]
    }

    fn index(&mut self, length: usize) -> usize {
        self.0.below(length)
    }
}

fn band(name: &str, priority: f64, floor: f64) -> BandSpec {
    BandSpec {
        name: Arc::from(name),
        priority,
        floor,
        max_queue: 100_000,
        ttl_ms: 60_000,
        shed: None,
    }
}

/// Lets through whatever slots there are.
fn wide_gate() -> Gate {
    Gate {
        hold_ms: 1e12,
        kv_max: 0.9,
        inflight_max: None,
    }
}
