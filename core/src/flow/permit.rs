//! The right to have one request on one replica: counted and charged while it lasts, given back when dropped.

use std::sync::Arc;

use super::cost::Prices;
use super::dispatch::{Grant, Settled};
use super::queues::Queues;
use super::turns::LaneId;

/// Tokens are charged in lots of this many, so that a stream does not write to shared counters at every one of them.
const CHARGED_TOGETHER_TOKENS: u64 = 8;

/// One request on one replica.
pub struct Permit {
    queues: Arc<Queues>,
    /// Absent only in Drop.
    grant: Option<Grant>,
    /// The replica that it is for; absent where that has left the configuration.
    replica: Option<Arc<str>>,
    /// As they were when it was given.
    prices: Prices,
    uncharged_tokens: u64,
    settled: Settled,
}

impl Permit {
    pub(super) fn new(queues: Arc<Queues>, grant: Grant, replica: Option<Arc<str>>) -> Permit {
        Permit {
            prices: **queues.prices.load(),
            queues,
            grant: Some(grant),
            replica,
            uncharged_tokens: 0,
            // Until it is used: who leaves before the request was sent pays nothing.
            settled: Settled::Nothing,
        }
    }

    pub fn replica(&self) -> Option<&Arc<str>> {
        self.replica.as_ref()
    }

    pub fn lane(&self) -> Option<LaneId> {
        self.grant.as_ref().map(|grant| grant.lane)
    }

    /// Prompt tokens that were sent to the replica before this request and are unread.
    pub fn sent_before(&self) -> u64 {
        self.grant.as_ref().map_or(0, Grant::sent_before)
    }

    /// The request goes out: from now on it costs what it is charged.
    pub fn sent(&mut self) {
        self.settled = Settled::AsCharged;
    }

    /// The first byte came: the prompt is no longer ahead of anybody.
    pub fn first_byte(&mut self) {
        if let Some(grant) = &mut self.grant
            && grant.first_byte()
        {
            self.queues.read(&grant.slots);
        }
    }

    /// Tokens came, about as many.
    pub fn streamed(&mut self, tokens: u64) {
        self.uncharged_tokens += tokens;
        if self.uncharged_tokens >= CHARGED_TOGETHER_TOKENS {
            self.charge();
        }
    }

    /// What it cost, by the engine's own count.
    pub fn settle(&mut self, input: u64, cached: u64, output: u64) {
        let prompt = self.prices.prompt(input, cached);
        let cost = prompt.saturating_add(self.prices.output(output));
        self.settled = Settled::Cost(cost);
    }

    /// The replica failed it: what it was charged is given back.
    pub fn failed(&mut self) {
        self.settled = Settled::Nothing;
    }

    /// What it has cost so far, in thousandths.
    pub fn cost(&self) -> u64 {
        match self.settled {
            Settled::Cost(cost) => cost,
            Settled::Nothing => 0,
            Settled::AsCharged => {
                let charged = self.grant.as_ref().map_or(0, Grant::charged);
                charged + self.prices.output(self.uncharged_tokens)
            }
        }
    }

    fn charge(&mut self) {
        let tokens = std::mem::take(&mut self.uncharged_tokens);
        if let Some(grant) = &mut self.grant {
            grant.charge(self.prices.output(tokens));
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.charge();
        if let Some(grant) = self.grant.take() {
            self.queues.release(grant, self.settled);
        }
    }
}
