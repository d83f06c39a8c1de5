//! The queue of a simulated pool: the gateway's dispatcher, or a line to compare it with, behind the same few calls.

use std::sync::Arc;

use llmgw_plugins::{BandSpec, Gate};

use super::super::bands::BandReport;
use super::super::dispatch::{Arrival, Arrived, Dispatcher, Grant, Settled};
use super::super::lane::LaneFacts;
use super::super::rotation::Ticket;
use super::super::slots::Slots;
use super::line::Line;

/// Who goes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discipline {
    /// As the gateway does it.
    Policy,
    /// First come, first served, over all tenants and bands.
    FirstCome,
    /// Tenants take turns, a request each.
    RoundRobin,
}

impl Discipline {
    pub const ALL: [Discipline; 3] = [
        Discipline::Policy,
        Discipline::FirstCome,
        Discipline::RoundRobin,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Discipline::Policy => "policy",
            Discipline::FirstCome => "first come",
            Discipline::RoundRobin => "round robin",
        }
    }
}

/// The queue of the pool. A replica's place in the plan is its lane.
pub enum Queueing {
    Policy(Box<Dispatcher>),
    Line(Line, Vec<Arc<Slots>>),
}

/// The right to have one request on one replica.
pub enum Right {
    Grant(Box<Grant>),
    /// Of a line: a slot, and the prompt that is unread.
    Slot(Arc<Slots>, u64),
}

/// What became of a request that came.
pub enum Came {
    Granted(Right),
    Waits(Ticket),
    Refused,
    Closed,
}

/// A request that was sent.
pub struct Sent {
    pub ticket: Ticket,
    pub replica: usize,
    pub right: Right,
}

impl Queueing {
    pub fn new(
        discipline: Discipline,
        bands: &[BandSpec],
        gate: &Gate,
        replicas: &[(Arc<Slots>, f64)],
    ) -> Queueing {
        if discipline != Discipline::Policy {
            let is_one = discipline == Discipline::FirstCome;
            let slots = replicas.iter().map(|(slots, _)| slots.clone());
            let line = Line::new(is_one, replicas, gate);
            return Queueing::Line(line, slots.collect());
        }
        let mut dispatcher = Dispatcher::new(bands);
        dispatcher.set_gate(gate.clone());
        for (at, (slots, ms)) in replicas.iter().enumerate() {
            let name = Arc::from(at.to_string());
            dispatcher.add_lane(name, slots.clone(), facts(true, *ms));
        }
        Queueing::Policy(Box::new(dispatcher))
    }

    /// A request comes. `tenant` is its place in the plan.
    pub fn arrive(&mut self, tenant: usize, arrival: &Arrival<'_>, now_ms: u64) -> Came {
        match self {
            Queueing::Policy(dispatcher) => match dispatcher.arrive(arrival, now_ms) {
                Arrived::Granted(grant) => Came::Granted(Right::Grant(Box::new(grant))),
                Arrived::Queued { ticket, .. } => Came::Waits(ticket),
                Arrived::Full(_) | Arrived::Shed(_) => Came::Refused,
                Arrived::Closed => Came::Closed,
            },
            Queueing::Line(line, _) => {
                if line.queued_in(&arrival.band.name) >= arrival.band.max_queue {
                    return Came::Refused;
                }
                let tokens = arrival.size.todo_tokens;
                Came::Waits(line.push(tenant, &arrival.band.name, tokens))
            }
        }
    }

    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        match self {
            Queueing::Policy(dispatcher) => dispatcher.cancel(ticket),
            Queueing::Line(line, _) => line.remove(ticket),
        }
    }

    /// Sends what may be sent: to one replica, or to all.
    pub fn fill(&mut self, only: Option<usize>, now_ms: u64) -> Vec<Sent> {
        match self {
            Queueing::Policy(dispatcher) => {
                let mut granted = Vec::new();
                match only {
                    Some(replica) => dispatcher.fill(replica as u32, now_ms, &mut granted),
                    None => dispatcher.fill_all(now_ms, &mut granted),
                }
                let sent = granted.into_iter().map(|(ticket, grant)| Sent {
                    ticket,
                    replica: grant.lane as usize,
                    right: Right::Grant(Box::new(grant)),
                });
                sent.collect()
            }
            Queueing::Line(line, slots) => {
                let mut sent = Vec::new();
                while let Some((ticket, replica, tokens)) = line.next() {
                    let right = Right::Slot(slots[replica].clone(), tokens);
                    sent.push(Sent {
                        ticket,
                        replica,
                        right,
                    });
                }
                sent
            }
        }
    }

    /// A request ended, whose slot is free from now on.
    pub fn release(&mut self, right: Right, settled: Settled, now_ms: u64) {
        match (self, right) {
            (Queueing::Policy(dispatcher), Right::Grant(grant)) => {
                dispatcher.release(*grant, settled, now_ms);
            }
            (_, mut right) => {
                right.first_byte();
                if let Right::Slot(slots, _) = right {
                    slots.give_back();
                }
            }
        }
    }

    /// A replica died or returned. Returns those for whom another one has to be chosen.
    pub fn tell(&mut self, replica: usize, is_open: bool, ms: f64, now_ms: u64) -> Vec<Ticket> {
        match self {
            Queueing::Policy(dispatcher) => {
                dispatcher.tell(replica as u32, facts(is_open, ms), now_ms)
            }
            Queueing::Line(line, _) => {
                line.tell(replica, is_open);
                Vec::new()
            }
        }
    }

    /// Binds a waiting request anew. False: that replica is closed too.
    pub fn bind(&mut self, ticket: Ticket, replica: usize) -> bool {
        match self {
            Queueing::Policy(dispatcher) => dispatcher.bind(ticket, replica as u32, false),
            Queueing::Line(..) => true,
        }
    }

    pub fn set_admission(&mut self, bands: &[BandSpec], gate: &Gate, saturation: Option<f64>) {
        match self {
            Queueing::Policy(dispatcher) => {
                dispatcher.set_bands(bands);
                dispatcher.set_gate(gate.clone());
                dispatcher.set_saturation(saturation);
            }
            Queueing::Line(line, _) => line.set_gate(gate),
        }
    }

    pub fn balance(&mut self, penalty_ms: f64, now_ms: u64) {
        if let Queueing::Policy(dispatcher) = self {
            dispatcher.balance(penalty_ms, now_ms);
        }
    }

    pub fn tidy(&mut self) {
        if let Queueing::Policy(dispatcher) = self {
            dispatcher.tidy();
        }
    }

    pub fn queued(&self) -> u32 {
        match self {
            Queueing::Policy(dispatcher) => dispatcher.queued(),
            Queueing::Line(line, _) => line.queued() as u32,
        }
    }

    /// Lines know no bands.
    pub fn band_reports(&mut self, now_ms: u64) -> Vec<BandReport> {
        match self {
            Queueing::Policy(dispatcher) => dispatcher.band_reports(now_ms),
            Queueing::Line(..) => Vec::new(),
        }
    }
}

impl Right {
    /// The prompt was read. True the first time.
    pub fn first_byte(&mut self) -> bool {
        match self {
            Right::Grant(grant) => grant.first_byte(),
            Right::Slot(slots, unread) => {
                let tokens = std::mem::take(unread);
                slots.read(tokens);
                tokens > 0
            }
        }
    }

    pub fn charge(&mut self, cost: u64) {
        if let Right::Grant(grant) = self {
            grant.charge(cost);
        }
    }
}

fn facts(open: bool, ms_per_prefill_token: f64) -> LaneFacts {
    LaneFacts {
        open,
        ms_per_prefill_token,
        kv: None,
    }
}
