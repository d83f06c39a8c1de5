//! One replica's queue in the gateway: who waits there, and how much may be sent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use llmgw_plugins::Gate;

use super::rotation::Ticket;
use super::slots::{Room, Slots, UNKNOWN_SLOTS};
use super::window::Window;

/// How far back a replica's and a pool's speed is measured.
pub const RATE_WINDOW_MS: u64 = 60_000;
/// Faster than any engine reads a prompt, in milliseconds a token.
const MS_PER_TOKEN_MIN: f64 = 1e-6;

/// What is known of a replica right now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaneFacts {
    /// It may get requests: it is ready, and not suspect.
    pub open: bool,
    pub ms_per_prefill_token: f64,
    /// KV-cache use, 0..1, where it is known and fresh.
    pub kv: Option<f64>,
}

impl LaneFacts {
    /// A replica of which nothing is known takes nothing.
    pub fn unknown() -> LaneFacts {
        LaneFacts {
            open: false,
            ms_per_prefill_token: 1.0,
            kv: None,
        }
    }
}

/// One replica of a pool.
pub(super) struct Lane {
    pub name: Arc<str>,
    pub slots: Arc<Slots>,
    pub facts: LaneFacts,
    pub room: Room,
    /// All who wait here, in the order of arrival.
    pub waiting: BTreeSet<Ticket>,
    /// Of these, those who go before all others: a trial of a suspect replica, and requests that an engine failed already.
    pub first: BTreeSet<Ticket>,
    /// What those who wait are expected to cost.
    pub queued_cost: u64,
    /// What was served here.
    pub served: Window,
    /// Prompts of answers that come at once, by when they should be read: nobody sees their first byte.
    pub unseen: BTreeMap<(u64, u64), Unread>,
}

/// A prompt that was sent and is not read: its tokens are ahead of those that come after. Shared by its grant and, where nobody sees
/// its first byte, by its lane.
#[derive(Debug, Clone)]
pub(super) struct Unread(Arc<AtomicU64>);

impl Unread {
    pub fn new(tokens: u64) -> Unread {
        Unread(Arc::new(AtomicU64::new(tokens)))
    }

    pub fn tokens(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// It is read. Returns the tokens, the first time.
    pub fn read(&self, slots: &Slots) -> u64 {
        let tokens = self.0.swap(0, Ordering::Relaxed);
        slots.read(tokens);
        tokens
    }
}

impl Lane {
    pub fn new(name: Arc<str>, slots: Arc<Slots>, facts: LaneFacts, gate: &Gate) -> Lane {
        Lane {
            room: room(&slots, &facts, gate),
            name,
            slots,
            facts,
            waiting: BTreeSet::new(),
            first: BTreeSet::new(),
            queued_cost: 0,
            served: Window::new(RATE_WINDOW_MS),
            unseen: BTreeMap::new(),
        }
    }

    /// Counts prompts as read that should be by now.
    pub fn settle(&mut self, now_ms: u64) {
        while let Some(entry) = self.unseen.first_entry()
            && entry.key().0 <= now_ms
        {
            entry.remove().read(&self.slots);
        }
    }

    /// How long the replica takes to read so many prompt tokens.
    pub fn reading_ms(&self, tokens: u64) -> u64 {
        (tokens as f64 * self.facts.ms_per_prefill_token) as u64
    }

    pub fn tell(&mut self, facts: LaneFacts, gate: &Gate) {
        self.facts = facts;
        self.room = room(&self.slots, &facts, gate);
    }

    pub fn has_room(&self) -> bool {
        self.slots.has_room(&self.room)
    }

    /// How long the requests that wait here take, at the speed of the last minute; or of the pool, where nothing is known.
    pub fn wait_ms(&mut self, now_ms: u64, pool_rate_per_s: Option<f64>) -> Option<f64> {
        if self.queued_cost == 0 {
            return Some(0.0);
        }
        let rate = self.served.rate_per_s(now_ms).or(pool_rate_per_s)?;
        Some(self.queued_cost as f64 * 1e3 / rate)
    }
}

fn room(slots: &Slots, facts: &LaneFacts, gate: &Gate) -> Room {
    let own = match slots.limit() {
        Some(slots) => slots,
        None => UNKNOWN_SLOTS,
    };
    let is_full = facts.kv.is_some_and(|kv| kv >= gate.kv_max);
    Room {
        inflight_max: gate.inflight_max.unwrap_or(own).max(1),
        prefill_max_tokens: match is_full {
            // Then only an engine that has nothing to do gets a request.
            true => 0,
            false => (gate.hold_ms / facts.ms_per_prefill_token.max(MS_PER_TOKEN_MIN)) as u64,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATE: Gate = Gate {
        hold_ms: 500.0,
        kv_max: 0.9,
        inflight_max: None,
    };
    const FACTS: LaneFacts = LaneFacts {
        open: true,
        ms_per_prefill_token: 0.5,
        kv: None,
    };

    #[test]
    fn the_gate_lets_as_many_prompt_tokens_as_the_replica_reads_in_its_time() {
        let slots = Slots::new(Some(4));
        let expected = Room {
            inflight_max: 4,
            prefill_max_tokens: 1_000,
        };
        assert_eq!(room(&slots, &FACTS, &GATE), expected);
    }

    #[test]
    fn a_full_kv_cache_holds_back_what_an_unknown_one_does_not() {
        let slots = Slots::new(None);
        let kv = |kv| LaneFacts { kv, ..FACTS };
        assert_eq!(room(&slots, &kv(Some(0.9)), &GATE).prefill_max_tokens, 0);
        assert_eq!(
            room(&slots, &kv(Some(0.89)), &GATE).prefill_max_tokens,
            1_000
        );
        assert_eq!(room(&slots, &kv(None), &GATE).inflight_max, UNKNOWN_SLOTS);
    }
}
