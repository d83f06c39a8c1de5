//! A dispatcher with everything around it, and a plain model of what must be true of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use llmgw_plugins::{BandSpec, Gate};

use super::{Draws, band};
use crate::flow::dispatch::{Arrival, Arrived, Dispatcher, Grant, Settled, Size, Unseen};
use crate::flow::lane::LaneFacts;
use crate::flow::rotation::Ticket;
use crate::flow::slots::{Slots, UNKNOWN_SLOTS};
use crate::flow::turns::LaneId;

pub const TENANTS: [&str; 4] = ["a", "b", "c", "d"];
pub const BANDS: [&str; 3] = ["high", "middle", "low"];

/// What a request that waits is known to be.
#[derive(Clone)]
pub struct Held {
    pub band: usize,
    pub tenant: usize,
    pub flow: Option<usize>,
    pub size: Size,
    /// Absent while another replica has to be chosen for it.
    pub lane: Option<LaneId>,
    pub goes_first: bool,
    pub stay_until_ms: u64,
}

pub struct Running {
    pub grant: Grant,
    pub band: usize,
    /// Prompt tokens that are not read.
    pub engine: usize,
}

#[derive(Clone)]
pub struct Place {
    pub engine: usize,
    pub facts: LaneFacts,
}

pub struct World {
    pub dispatcher: Dispatcher,
    pub now_ms: u64,
    pub bands: Vec<BandSpec>,
    pub gate: Gate,
    pub engines: Vec<Arc<Slots>>,
    pub lanes: BTreeMap<LaneId, Place>,
    pub waiting: BTreeMap<Ticket, Held>,
    pub running: Vec<Running>,
    pub saturation: Option<f64>,
    names: Vec<Arc<str>>,
    flows: Vec<Arc<str>>,
    lanes_made: usize,
}

impl World {
    pub fn new(draws: &mut Draws) -> World {
        let bands: Vec<BandSpec> = BANDS
            .iter()
            .zip([(9.0, 0.0), (5.0, 0.1), (0.0, 0.02)])
            .map(|(name, (priority, floor))| BandSpec {
                max_queue: draws.whole(3, 30),
                shed: draws.chance(30).then_some(0.5),
                ..band(name, priority, floor)
            })
            .collect();
        let mut world = World {
            dispatcher: Dispatcher::new(&bands),
            now_ms: draws.whole(0, 100_000),
            bands,
            gate: Gate {
                hold_ms: 500.0,
                kv_max: 0.9,
                inflight_max: None,
            },
            engines: Vec::new(),
            lanes: BTreeMap::new(),
            waiting: BTreeMap::new(),
            running: Vec::new(),
            saturation: None,
            names: TENANTS.map(Arc::from).to_vec(),
            flows: ["x", "y", "z"].map(Arc::from).to_vec(),
            lanes_made: 0,
        };
        for _ in 0..draws.whole(1, 4) {
            let slots = draws.chance(90).then(|| draws.whole(1, 4) as u32);
            world.engines.push(Slots::new(slots));
            world.add_lane(world.engines.len() - 1, true);
        }
        world
    }

    pub fn add_lane(&mut self, engine: usize, open: bool) {
        let facts = LaneFacts {
            open,
            ms_per_prefill_token: 0.5,
            kv: None,
        };
        self.lanes_made += 1;
        let name = Arc::from(format!("r{}", self.lanes_made));
        let slots = self.engines[engine].clone();
        let lane = self.dispatcher.add_lane(name, slots, facts);
        self.lanes.insert(lane, Place { engine, facts });
        self.fill_all();
    }

    pub fn tell(&mut self, lane: LaneId, facts: LaneFacts) {
        let was_open = self.lanes[&lane].facts.open;
        self.lanes.get_mut(&lane).unwrap().facts = facts;
        let orphans = self.dispatcher.tell(lane, facts, self.now_ms);
        match !was_open && facts.open {
            true => self.opened(&orphans),
            false => self.moved_from(lane, &orphans, !facts.open),
        }
        self.fill_all();
    }

    /// A replica opened: nobody goes on waiting for a closed one, and nobody else is disturbed.
    fn opened(&mut self, orphans: &[Ticket]) {
        for (ticket, held) in &mut self.waiting {
            let own = held.lane.map(|lane| self.lanes[&lane].facts.open);
            assert_eq!(orphans.contains(ticket), own == Some(false), "{ticket}");
            if own == Some(false) {
                assert!(held.goes_first, "{ticket} waits at a closed replica");
                (held.lane, held.goes_first) = (None, false);
            }
        }
    }

    pub fn remove_lane(&mut self, lane: LaneId) {
        let orphans = self.dispatcher.remove_lane(lane, self.now_ms);
        self.lanes.remove(&lane);
        self.moved_from(lane, &orphans, true);
        self.fill_all();
    }

    /// Those who waited there and are no orphans wait for others now; which ones, only the dispatcher knows.
    fn moved_from(&mut self, lane: LaneId, orphans: &[Ticket], is_closed: bool) {
        for (ticket, held) in &mut self.waiting {
            if is_closed && held.lane == Some(lane) {
                held.lane = (!orphans.contains(ticket))
                    .then(|| place_of(&self.dispatcher, *ticket))
                    .flatten();
                if held.lane.is_none() {
                    assert!(orphans.contains(ticket), "{ticket} is lost");
                    held.goes_first = false;
                }
            }
        }
        for orphan in orphans {
            assert_eq!(
                self.waiting[orphan].lane, None,
                "{orphan} was somewhere else"
            );
        }
    }

    /// Time passes: prompts of answers that come at once count as read, which leaves room, as at a tick.
    pub fn pass(&mut self, ms: u64) {
        self.now_ms += ms;
        for lane in self.dispatcher.lane_ids() {
            self.dispatcher.has_room(lane, self.now_ms);
        }
        self.fill_all();
    }

    pub fn arrive(&mut self, draws: &mut Draws) {
        let Some(lane) = self.some_lane(draws) else {
            return;
        };
        let input = draws.whole(0, 3_000);
        let output = draws.whole(0, 500) * 2_000;
        let held = Held {
            band: draws.index(self.bands.len()),
            tenant: draws.index(TENANTS.len()),
            flow: draws.chance(50).then(|| draws.index(3)),
            size: Size {
                input_tokens: input,
                todo_tokens: input,
                first_cost: input * 1_000,
                expected_cost: input * 1_000 + output,
                unseen: draws.chance(30).then_some(Unseen {
                    cost: output,
                    ms: 500.0,
                }),
            },
            lane: Some(lane),
            goes_first: draws.chance(10),
            stay_until_ms: match draws.chance(30) {
                true => self.now_ms + draws.whole(1, 2_000),
                false => 0,
            },
        };
        let before = self.figures();
        let arrived = self.dispatcher.arrive(
            &Arrival {
                band: &self.bands[held.band],
                tenant: &self.names[held.tenant],
                weight: 1.0 + held.tenant as f64,
                flow: held.flow.map(|flow| &self.flows[flow]),
                size: held.size,
                lane,
                goes_first: held.goes_first,
                stay_until_ms: held.stay_until_ms,
            },
            self.now_ms,
        );
        let place = &self.lanes[&lane];
        let queued = self
            .waiting
            .values()
            .filter(|other| other.band == held.band);
        let (queued, max) = (queued.count() as u64, self.bands[held.band].max_queue);
        match arrived {
            Arrived::Granted(grant) => self.runs(grant, &held),
            Arrived::Queued {
                ticket, displaced, ..
            } => {
                let is_full = queued >= max && !held.goes_first;
                assert_eq!(displaced.is_some(), is_full, "{queued} of {max} wait");
                if let Some(displaced) = displaced {
                    self.displaced(displaced, &held);
                }
                let stays = held.stay_until_ms > self.now_ms;
                assert!(self.waiting.insert(ticket, held).is_none());
                match stays {
                    true => self.fill(lane),
                    false => self.fill_all(),
                }
            }
            Arrived::Full(_) => {
                assert!(queued >= max && !held.goes_first, "{queued} of {max} wait");
                assert_eq!(self.figures(), before, "a refusal moved a counter");
            }
            Arrived::Shed(saturation) => {
                assert!(Some(saturation) == self.saturation && !held.goes_first);
                assert!(saturation > self.bands[held.band].shed.unwrap());
                assert_eq!(self.figures(), before, "a refusal moved a counter");
            }
            Arrived::Closed => {
                assert!(!place.facts.open && !held.goes_first);
                assert_eq!(self.figures(), before, "a refusal moved a counter");
            }
        }
    }

    /// Only the tenant with the most places for its weight loses one, to one that has fewer.
    fn displaced(&mut self, ticket: Ticket, newcomer: &Held) {
        let gone = self.waiting.remove(&ticket);
        let gone = gone.unwrap_or_else(|| panic!("{ticket} is displaced, and was gone"));
        assert!(gone.band == newcomer.band && !gone.goes_first);
        let places = |tenant: usize, more: u64| {
            let same = |other: &&Held| {
                (other.band, other.tenant) == (newcomer.band, tenant)
                    && other.lane.is_some()
                    && !other.goes_first
            };
            let count = self.waiting.values().filter(same).count() as u64 + more;
            count * 1_000 / (1 + tenant as u64)
        };
        assert!(places(gone.tenant, 1) > places(newcomer.tenant, 1));
        for tenant in 0..TENANTS.len() {
            assert!(places(gone.tenant, 1) >= places(tenant, u64::from(tenant == gone.tenant)));
        }
    }

    fn runs(&mut self, grant: Grant, held: &Held) {
        let engine = self.lanes[&grant.lane].engine;
        let slots = &self.engines[engine];
        assert!(Arc::ptr_eq(slots, &grant.slots));
        let own = slots.limit().unwrap_or(UNKNOWN_SLOTS);
        let most = self.gate.inflight_max.unwrap_or(own).max(1).min(own);
        assert!(
            slots.inflight() <= most,
            "{} of {most} run",
            slots.inflight()
        );
        self.running.push(Running {
            grant,
            band: held.band,
            engine,
        });
    }

    /// Sends what may be sent, and checks the order of it.
    pub fn fill_all(&mut self) {
        for lane in self.dispatcher.lane_ids() {
            self.fill(lane);
        }
    }

    pub fn fill(&mut self, lane: LaneId) {
        let mut granted = Vec::new();
        self.dispatcher.fill(lane, self.now_ms, &mut granted);
        for (ticket, grant) in granted {
            let held = self.waiting.remove(&ticket);
            let held = held.unwrap_or_else(|| panic!("{ticket} is granted twice, or was gone"));
            assert_eq!(grant.lane, lane);
            let ahead = |other: &&Held| {
                let same = (other.band, other.tenant, other.flow, other.lane);
                same == (held.band, held.tenant, held.flow, held.lane) && !other.goes_first
            };
            match held.goes_first {
                true => assert_eq!(held.lane, Some(lane), "{ticket} goes nowhere else"),
                false => {
                    let first = self
                        .waiting
                        .values()
                        .find(|other| other.goes_first && other.lane == Some(lane));
                    assert!(
                        first.is_none(),
                        "{ticket} is sent before one that goes first"
                    );
                    let earlier = self.waiting.range(..ticket).map(|(_, other)| other);
                    // One that stays may be passed by one that need not.
                    let is_stolen = held.lane != Some(lane);
                    let passed =
                        earlier.filter(|other| !is_stolen || other.stay_until_ms <= self.now_ms);
                    assert!(
                        !passed.clone().any(|other| ahead(&other)),
                        "{ticket} passed its flow"
                    );
                    let place = &self.lanes[&lane];
                    assert!(place.facts.open, "{ticket} is sent to a closed replica");
                }
            }
            self.runs(grant, &held);
        }
    }

    /// As `Queues` does when a slot or some prompt tokens are free.
    fn freed(&mut self, engine: usize) {
        let slots = self.engines[engine].clone();
        for lane in self.dispatcher.lanes_with(&slots) {
            self.fill(lane);
        }
    }

    pub fn first_byte(&mut self, at: usize) {
        let running = &mut self.running[at];
        let unread = running.grant.unread_tokens();
        assert_eq!(running.grant.first_byte(), unread > 0);
        assert_eq!(running.grant.unread_tokens(), 0);
        let engine = running.engine;
        self.freed(engine);
    }

    pub fn release(&mut self, at: usize, settled: Settled) {
        let running = self.running.swap_remove(at);
        self.dispatcher.release(running.grant, settled, self.now_ms);
        self.freed(running.engine);
    }

    pub fn cancel(&mut self, ticket: Ticket) {
        assert!(self.dispatcher.cancel(ticket), "{ticket} waits");
        assert!(!self.dispatcher.cancel(ticket), "{ticket} is gone");
        for lane in self.lanes.keys() {
            let is_bound = self.dispatcher.bind(ticket, *lane, true);
            assert!(!is_bound, "{ticket} is gone");
        }
        self.waiting.remove(&ticket);
    }

    /// Chooses a replica for one that lost its own.
    pub fn bind(&mut self, draws: &mut Draws, ticket: Ticket) {
        let Some(lane) = self.some_lane(draws) else {
            return;
        };
        let goes_first = draws.chance(10);
        let may = self.lanes[&lane].facts.open || goes_first;
        assert_eq!(self.dispatcher.bind(ticket, lane, goes_first), may);
        if may {
            let held = self.waiting.get_mut(&ticket).unwrap();
            (held.lane, held.goes_first) = (Some(lane), goes_first);
        }
        self.fill_all();
    }

    pub fn balance(&mut self) {
        self.dispatcher.balance(100.0, self.now_ms);
        for (ticket, held) in &mut self.waiting {
            if held.lane.is_some() && !held.goes_first {
                held.lane = place_of(&self.dispatcher, *ticket);
            }
        }
        self.fill_all();
    }

    pub fn some_lane(&self, draws: &mut Draws) -> Option<LaneId> {
        let lanes: Vec<LaneId> = self.lanes.keys().copied().collect();
        (!lanes.is_empty()).then(|| draws.pick(&lanes))
    }

    pub fn some_ticket(&self, draws: &mut Draws) -> Option<Ticket> {
        let tickets: Vec<Ticket> = self.waiting.keys().copied().collect();
        (!tickets.is_empty()).then(|| draws.pick(&tickets))
    }

    /// All counters that are not zero.
    pub fn figures(&mut self) -> Vec<(String, u64)> {
        let mut figures = Vec::new();
        for (at, slots) in self.engines.iter().enumerate() {
            let counts = [
                u64::from(slots.inflight()),
                u64::from(slots.queued()),
                slots.sent_tokens(),
                slots.prefill_tokens(),
            ];
            figures.extend(counts.map(|count| (format!("engine {at}"), count)));
        }
        for band in self.dispatcher.band_reports(self.now_ms) {
            let counts = [
                u64::from(band.queued),
                u64::from(band.inflight),
                band.queued_cost,
            ];
            figures.extend(counts.map(|count| (band.name.to_string(), count)));
        }
        for (band, tenants) in self.dispatcher.tenants() {
            for tenant in tenants {
                let counts = [
                    u64::from(tenant.queued),
                    u64::from(tenant.inflight),
                    tenant.time,
                ];
                let name = format!("{} in {band}", tenant.name);
                figures.extend(counts.map(|count| (name.clone(), count)));
            }
        }
        // A band or an account that is made by asking has nothing in it.
        figures.retain(|(_, count)| *count > 0);
        figures
    }

    /// Every counter is what it counts.
    pub fn check_counters(&mut self) {
        for (at, slots) in self.engines.iter().enumerate() {
            let running = self.running.iter().filter(|running| running.engine == at);
            let (count, unread) = running.fold((0, 0), |(count, unread), running| {
                (count + 1, unread + running.grant.unread_tokens())
            });
            let waits_here = |held: &&Held| {
                let lane = held.lane.and_then(|lane| self.lanes.get(&lane));
                lane.is_some_and(|lane| lane.engine == at)
            };
            let waiting: Vec<&Held> = self.waiting.values().filter(waits_here).collect();
            let todo: u64 = waiting.iter().map(|held| held.size.todo_tokens).sum();
            let counters = (
                slots.inflight(),
                slots.sent_tokens(),
                slots.queued(),
                slots.prefill_tokens(),
            );
            assert_eq!(
                counters,
                (count, unread, waiting.len() as u32, unread + todo),
                "engine {at}"
            );
        }
        assert_eq!(self.dispatcher.queued() as usize, self.waiting.len());
        for report in self.dispatcher.band_reports(self.now_ms) {
            let band = BANDS
                .iter()
                .position(|name| **name == *report.name)
                .unwrap();
            let waiting: Vec<&Held> = self
                .waiting
                .values()
                .filter(|held| held.band == band)
                .collect();
            let cost: u64 = waiting.iter().map(|held| held.size.expected_cost).sum();
            let running = self
                .running
                .iter()
                .filter(|running| running.band == band)
                .count();
            let counters = (
                report.queued as usize,
                report.queued_cost,
                report.inflight as usize,
            );
            assert_eq!(
                counters,
                (waiting.len(), cost, running),
                "band {}",
                report.name
            );
        }
    }

    /// No open replica has room while somebody waits who may go there.
    pub fn check_work_conserving(&self) {
        for (lane, place) in &self.lanes {
            if !self.dispatcher.lanes[lane].has_room() {
                continue;
            }
            let idle = self.waiting.iter().find(|(_, held)| match held.lane {
                Some(own) if own == *lane => place.facts.open || held.goes_first,
                Some(_) => {
                    let may_leave = !held.goes_first && held.stay_until_ms <= self.now_ms;
                    place.facts.open && may_leave
                }
                None => false,
            });
            assert!(
                idle.is_none(),
                "replica {lane} has room and {:?} waits for {:?}",
                idle.map(|(ticket, _)| ticket),
                idle.and_then(|(_, held)| held.lane)
            );
        }
    }
}

fn place_of(dispatcher: &Dispatcher, ticket: Ticket) -> Option<LaneId> {
    let bound = dispatcher.waiting.get(&ticket)?.bound?;
    Some(bound.lane)
}
