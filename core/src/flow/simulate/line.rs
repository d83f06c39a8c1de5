//! Two simple disciplines to compare the dispatcher with: one line for all, and a line for each tenant in turn. Neither is
//! used by the gateway.
//!
//! They know nothing of bands but how long a queue may be and a wait may last, and nothing of cost. A request goes to the replica with the most
//! room as soon as one has any, and engines hold no more than the same gate lets them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use llmgw_plugins::Gate;

use super::super::rotation::Ticket;
use super::super::slots::{Room, Slots, UNKNOWN_SLOTS};

/// The waiting requests of a pool.
pub struct Line {
    /// One line for all; else each tenant has its own, and they take turns.
    is_one: bool,
    /// By tenant; all under the first where there is one line.
    lines: BTreeMap<usize, VecDeque<Ticket>>,
    /// The tenant whose turn it was last.
    last: usize,
    waiting: HashMap<Ticket, Held>,
    by_band: HashMap<Arc<str>, u64>,
    replicas: Vec<Place>,
    next_ticket: Ticket,
}

/// A request that waits.
struct Held {
    tenant: usize,
    band: Arc<str>,
    tokens: u64,
}

struct Place {
    slots: Arc<Slots>,
    ms_per_prefill_token: f64,
    is_open: bool,
    room: Room,
}

impl Line {
    pub fn new(is_one: bool, replicas: &[(Arc<Slots>, f64)], gate: &Gate) -> Line {
        let place = |(slots, ms): &(Arc<Slots>, f64)| Place {
            slots: slots.clone(),
            ms_per_prefill_token: *ms,
            is_open: true,
            room: room(slots, *ms, gate),
        };
        Line {
            is_one,
            lines: BTreeMap::new(),
            last: 0,
            waiting: HashMap::new(),
            by_band: HashMap::new(),
            replicas: replicas.iter().map(place).collect(),
            next_ticket: 0,
        }
    }

    pub fn set_gate(&mut self, gate: &Gate) {
        for place in &mut self.replicas {
            place.room = room(&place.slots, place.ms_per_prefill_token, gate);
        }
    }

    pub fn tell(&mut self, replica: usize, is_open: bool) {
        self.replicas[replica].is_open = is_open;
    }

    pub fn queued_in(&self, band: &str) -> u64 {
        self.by_band.get(band).copied().unwrap_or(0)
    }

    pub fn queued(&self) -> usize {
        self.waiting.len()
    }

    pub fn push(&mut self, tenant: usize, band: &Arc<str>, tokens: u64) -> Ticket {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let line = if self.is_one { 0 } else { tenant };
        self.lines.entry(line).or_default().push_back(ticket);
        *self.by_band.entry(band.clone()).or_default() += 1;
        let held = Held {
            tenant: line,
            band: band.clone(),
            tokens,
        };
        self.waiting.insert(ticket, held);
        ticket
    }

    /// A request leaves, sent or not.
    pub fn remove(&mut self, ticket: Ticket) -> bool {
        let Some(held) = self.waiting.remove(&ticket) else {
            return false;
        };
        if let Some(count) = self.by_band.get_mut(&held.band) {
            *count -= 1;
        }
        if let Some(line) = self.lines.get_mut(&held.tenant) {
            // Tickets are in order, and most leave from the front.
            if let Ok(at) = line.binary_search(&ticket) {
                line.remove(at);
            }
            if line.is_empty() {
                self.lines.remove(&held.tenant);
            }
        }
        true
    }

    /// Sends the next request, of so many tokens, to the replica with the most room, if one has any.
    pub fn next(&mut self) -> Option<(Ticket, usize, u64)> {
        let after = self.lines.range(self.last + 1..).next();
        let (&tenant, line) = after.or_else(|| self.lines.iter().next())?;
        let ticket = *line.front()?;
        let tokens = self.waiting.get(&ticket)?.tokens;
        let free = self.replicas.iter().enumerate();
        let (at, place) = free
            .filter(|(_, place)| place.is_open && place.slots.has_room(&place.room))
            .min_by_key(|(_, place)| (place.slots.sent_tokens(), place.slots.inflight()))?;
        if !place.slots.try_take(tokens, &place.room) {
            return None;
        }
        self.last = tenant;
        self.remove(ticket);
        Some((ticket, at, tokens))
    }
}

/// As the dispatcher has it where KV use is unknown.
fn room(slots: &Slots, ms_per_prefill_token: f64, gate: &Gate) -> Room {
    let own = slots.limit().unwrap_or(UNKNOWN_SLOTS);
    Room {
        inflight_max: gate.inflight_max.unwrap_or(own).max(1),
        prefill_max_tokens: (gate.hold_ms / ms_per_prefill_token.max(1e-6)) as u64,
    }
}
