//! Chance that can be had again: what a seed and the environment decide of a run.

use std::time::{Duration, SystemTime};

/// Numbers that only depend on a seed (splitmix64).
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.roll() % end
    }

    pub fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// `LLMGW_CHAOS_SEED`, else another one each time, which is printed; and `LLMGW_CHAOS_SECONDS`, else the given one.
pub fn seed_and_time(seconds: u64) -> (u64, Duration) {
    let now = || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = number_of("LLMGW_CHAOS_SEED", now);
    println!("LLMGW_CHAOS_SEED={seed}");
    let time = number_of("LLMGW_CHAOS_SECONDS", || seconds);
    (seed, Duration::from_secs(time))
}

fn number_of(name: &str, default: impl FnOnce() -> u64) -> u64 {
    let text = std::env::var(name);
    text.map_or_else(|_| default(), |text| text.parse().unwrap())
}
