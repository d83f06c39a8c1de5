//! A request's way through a simulation: chosen for, queued, sent, read, answered, ended.

use std::sync::Arc;

use llmgw_plugins::BandSpec;

use super::super::dispatch::{Arrival, Settled, Size, Unseen};
use super::super::rotation::Ticket;
use super::super::slots::Slots;
use super::engine::{Engine, RequestId};
use super::plan::Load;
use super::queueing::{Came, Right, Sent};
use super::run::{Event, Run};
use crate::routing::score::{self, Candidate};

/// Tokens are relayed and charged in lots of this many, as permits charge them.
const LOT_TOKENS: u64 = 8;
/// A client whose request was not served waits this long before it asks again.
const ASKS_AGAIN_US: u64 = 1_000_000;

/// A request, from its arrival to its end.
pub(super) struct Request {
    pub tenant: usize,
    pub band: BandSpec,
    pub flow: Option<Arc<str>>,
    /// Its client asks again when it is over.
    pub again: bool,
    pub came_us: u64,
    pub expires_us: u64,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub est_output_tokens: u64,
    pub stream: bool,
    pub generated: u64,
    pub was_sent: bool,
    /// Replicas that it was lost with.
    pub tried: Vec<usize>,
    pub state: State,
    /// Counts the states: an event of an earlier one is void.
    pub stage: u32,
}

/// Where a request is.
pub(super) enum State {
    Comes,
    Waits(Ticket),
    /// Its prompt waits or is read.
    Sent(usize, Right),
    /// Its answer comes.
    Answered(usize, Right),
    Over,
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Served,
    Refused,
    TimedOut,
    Failed,
    Left,
}

impl Run<'_> {
    pub(super) fn enter(&mut self, request: RequestId) {
        let Some(replica) = self.choose(request) else {
            return self.end(request, End::Failed);
        };
        let came = self.arrive(request, replica);
        match came {
            Came::Granted(right) => self.sent(request, replica, right),
            Came::Waits(ticket) => {
                self.waiting.insert(ticket, request);
                self.accounts[self.requests[request].tenant].queued += 1;
                let stage = self.goes_on(request, State::Waits(ticket));
                let left = self.requests[request]
                    .expires_us
                    .saturating_sub(self.now_us);
                self.after(left, Event::Expires { request, stage });
                // Another replica may have room for it.
                self.fill(None);
            }
            Came::Refused => self.end(request, End::Refused),
            Came::Closed => self.end(request, End::Failed),
        }
    }

    fn arrive(&mut self, request: RequestId, replica: usize) -> Came {
        let now_ms = self.now_ms();
        let asked = &self.requests[request];
        let prices = self.policy.prices;
        let output_cost = prices.output(asked.est_output_tokens);
        let first_cost = prices.prompt(asked.input_tokens, 0);
        let step_ms = self.engines[replica].plan.ms_per_decode_step;
        let arrival = Arrival {
            band: &asked.band,
            tenant: &self.plan.tenants[asked.tenant].name,
            weight: self.accounts[asked.tenant].weight,
            flow: asked.flow.as_ref(),
            size: Size {
                input_tokens: asked.input_tokens,
                todo_tokens: asked.input_tokens,
                first_cost,
                expected_cost: first_cost.saturating_add(output_cost),
                unseen: (!asked.stream).then_some(Unseen {
                    cost: output_cost,
                    ms: asked.est_output_tokens as f64 * step_ms,
                }),
            },
            lane: replica as u32,
            goes_first: !asked.tried.is_empty(),
            stay_until_ms: 0,
        };
        self.queueing.arrive(asked.tenant, &arrival, now_ms)
    }

    /// As a pool chooses: the replicas that take requests, scored.
    pub(super) fn choose(&mut self, request: RequestId) -> Option<usize> {
        let asked = &self.requests[request];
        let open: Vec<usize> = (0..self.engines.len())
            .filter(|at| self.engines[*at].is_up && !asked.tried.contains(at))
            .collect();
        let scored: Vec<Candidate> = open
            .iter()
            .map(|at| candidate(&self.engines[*at], &self.slots[*at]))
            .collect();
        let ask = score::Ask {
            input_tokens: asked.input_tokens,
            est_output_tokens: asked.est_output_tokens,
        };
        let random = self.random.next();
        let choice = score::choose(&ask, &scored, &self.policy.weights, random)?;
        Some(open[choice.index])
    }

    pub(super) fn fill(&mut self, only: Option<usize>) {
        if self.queueing.queued() == 0 {
            return;
        }
        let granted = self.queueing.fill(only, self.now_ms());
        for Sent {
            ticket,
            replica,
            right,
        } in granted
        {
            // Whoever is told of its turn is still there: clients leave between events.
            if let Some(request) = self.waiting.remove(&ticket) {
                self.accounts[self.requests[request].tenant].queued -= 1;
                self.sent(request, replica, right);
            }
        }
    }

    fn sent(&mut self, request: RequestId, replica: usize, right: Right) {
        let (now_us, now_ms) = (self.now_us, self.now_ms());
        let asked = &mut self.requests[request];
        let tenant = asked.tenant;
        let is_first = !std::mem::replace(&mut asked.was_sent, true);
        let wait_ms = (now_us - asked.came_us) as f64 / 1e3;
        if is_first {
            self.accounts[tenant].waits.record(wait_ms, now_ms);
            self.note(request, |tally| tally.waited(wait_ms));
        }
        self.accounts[tenant].inflight += 1;
        self.goes_on(request, State::Sent(replica, right));
        if self.engines[replica].send(request) {
            self.begin_to_read(replica, Some(request));
        }
    }

    fn begin_to_read(&mut self, replica: usize, request: Option<RequestId>) {
        let Some(request) = request else {
            return;
        };
        let asked = &self.requests[request];
        let (stage, us) = (
            asked.stage,
            self.engines[replica].prompt_us(asked.input_tokens),
        );
        self.after(us, Event::Read { request, stage });
    }

    pub(super) fn read(&mut self, request: RequestId) {
        let state = std::mem::replace(&mut self.requests[request].state, State::Over);
        let State::Sent(replica, mut right) = state else {
            return;
        };
        let next = self.engines[replica].read();
        self.begin_to_read(replica, next);
        let asked = &self.requests[request];
        let (is_stream, cost) = (
            asked.stream,
            self.policy.prices.prompt(asked.input_tokens, 0),
        );
        self.uses(request, cost);
        if is_stream {
            right.first_byte();
            self.first_byte(request);
        }
        self.goes_on(request, State::Answered(replica, right));
        self.generate(request, replica);
        if is_stream {
            // Its prompt is no longer ahead of anybody.
            self.fill(Some(replica));
        }
    }

    fn generate(&mut self, request: RequestId, replica: usize) {
        let asked = &self.requests[request];
        let lot = LOT_TOKENS.min(asked.output_tokens - asked.generated);
        let stage = asked.stage;
        let us = self.engines[replica].tokens_us(lot);
        self.after(us, Event::Tokens { request, stage });
    }

    pub(super) fn tokens(&mut self, request: RequestId) {
        let asked = &mut self.requests[request];
        let lot = LOT_TOKENS.min(asked.output_tokens - asked.generated);
        asked.generated += lot;
        let cost = self.policy.prices.output(lot);
        let State::Answered(replica, right) = &mut asked.state else {
            return;
        };
        let replica = *replica;
        if asked.stream {
            right.charge(cost);
        }
        let is_done = asked.generated == asked.output_tokens;
        self.uses(request, cost);
        match is_done {
            true => self.end(request, End::Served),
            false => self.generate(request, replica),
        }
    }

    fn first_byte(&mut self, request: RequestId) {
        let ms = (self.now_us - self.requests[request].came_us) as f64 / 1e3;
        let now_ms = self.now_ms();
        self.policy.first_bytes.record(ms, now_ms);
        self.note(request, |tally| tally.first_byte(ms));
    }

    fn uses(&mut self, request: RequestId, cost: u64) {
        let now_ms = self.now_ms();
        self.accounts[self.requests[request].tenant].used(cost, now_ms);
        self.note(request, |tally| tally.cost += cost);
    }

    /// A request is over, wherever it was.
    pub(super) fn end(&mut self, request: RequestId, end: End) {
        let freed = self.take_back(request, end);
        self.active -= 1;
        let asked = &self.requests[request];
        let (tenant, again) = (asked.tenant, asked.again);
        if end == End::Served {
            if !asked.stream {
                self.first_byte(request);
            }
            let tokens = self.requests[request].output_tokens;
            self.accounts[tenant].lengths.usage(tokens);
        }
        self.note(request, |tally| match end {
            End::Served => tally.served += 1,
            End::Refused => tally.refused += 1,
            End::TimedOut => tally.timed_out += 1,
            End::Failed => tally.failed += 1,
            End::Left => tally.left += 1,
        });
        if let Load::Clients { think_ms, .. } = self.plan.tenants[tenant].load
            && again
        {
            let us = match end {
                End::Served | End::Left => think_ms * 1_000,
                End::Refused | End::TimedOut | End::Failed => ASKS_AGAIN_US,
            };
            self.after(us, Event::Comes { tenant });
        }
        if let Some(replica) = freed {
            self.fill(Some(replica));
        }
    }

    /// Gives back all that a request holds. Returns the replica that has room for another one.
    pub(super) fn take_back(&mut self, request: RequestId, end: End) -> Option<usize> {
        let now_ms = self.now_ms();
        let asked = &mut self.requests[request];
        let tenant = asked.tenant;
        let wait_ms = (self.now_us - asked.came_us) as f64 / 1e3;
        let settled = match end {
            End::Served => {
                let prices = self.policy.prices;
                Settled::Cost(
                    prices.prompt(asked.input_tokens, 0) + prices.output(asked.output_tokens),
                )
            }
            End::Left => Settled::AsCharged,
            End::Refused | End::TimedOut | End::Failed => Settled::Nothing,
        };
        let was_sent = asked.was_sent;
        let state = std::mem::replace(&mut asked.state, State::Over);
        let (replica, right) = match state {
            State::Comes | State::Over => return None,
            State::Waits(ticket) => {
                self.waiting.remove(&ticket);
                self.queueing.cancel(ticket);
                self.accounts[tenant].queued -= 1;
                if !was_sent {
                    self.note(request, |tally| tally.waited(wait_ms));
                }
                return None;
            }
            State::Sent(replica, right) => {
                let next = self.engines[replica].forget(request);
                self.begin_to_read(replica, next);
                (replica, right)
            }
            State::Answered(replica, right) => {
                self.engines[replica].ended();
                (replica, right)
            }
        };
        self.accounts[tenant].inflight -= 1;
        self.queueing.release(right, settled, now_ms);
        Some(replica)
    }
}

/// An engine as the scorer sees it: own counters, and speeds that were learned long ago.
pub(super) fn candidate(engine: &Engine, slots: &Slots) -> Candidate {
    Candidate {
        inflight: slots.inflight(),
        queued: slots.queued(),
        slots: slots.limit(),
        prefill_tokens: slots.prefill_tokens(),
        sent_tokens: slots.sent_tokens(),
        ms_per_prefill_token: engine.plan.ms_per_prefill_token,
        ms_per_decode_step: engine.plan.ms_per_decode_step,
        ..Candidate::default()
    }
}
