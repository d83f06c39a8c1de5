//! Which waiting request is sent to which replica, and when: one pool's queues as a pure structure. Time is given, never read.
//!
//! A request is bound to a replica on arrival and waits in that replica's queue. It is sent when the replica has room, in this
//! order: a band that got less than its floor, else the highest band; within it the tenant with the least virtual
//! time; within the tenant its flows in the same way; within a flow the first that arrived. A replica with room and nobody waiting takes from
//! the longest queue.

mod moving;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use llmgw_plugins::{BandSpec, Gate};

use super::bands::{BandReport, Bands, SentAt};
use super::lane::{Lane, LaneFacts, RATE_WINDOW_MS, Unread};
use super::rotation::{Member, Meters, Ticket};
use super::slots::Slots;
use super::turns::{LaneId, Standing};
use super::window::Window;

/// How far, in cost for a weight of 1, the tenant whose turn it is on one replica may be ahead of one that waits for another: beyond
/// it the other's request is taken over. 16,384 input tokens at the shipped prices.
const LAG_MAX: u64 = 16_384_000;

/// A request that wants to be served.
#[derive(Debug, Clone)]
pub struct Arrival<'a> {
    /// As the request's own generation of policies has it.
    pub band: &'a BandSpec,
    pub tenant: &'a Arc<str>,
    pub weight: f64,
    /// Which of the tenant's flows; absent: the tenant is one.
    pub flow: Option<&'a Arc<str>>,
    pub size: Size,
    /// The replica that was chosen for it.
    pub lane: LaneId,
    /// It goes before all others there, and nowhere else: a trial, or a request that an engine failed already.
    pub goes_first: bool,
    /// Until then it rather waits for this replica, which has its prefix, than goes to another.
    pub stay_until_ms: u64,
}

/// What a request asks of a replica. Costs are in thousandths.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Size {
    /// The whole prompt.
    pub input_tokens: u64,
    /// Of these, what the chosen replica has to read.
    pub todo_tokens: u64,
    /// Charged when it is sent.
    pub first_cost: u64,
    /// Expected in all.
    pub expected_cost: u64,
    /// Of an answer that comes at once: what is charged before it is seen.
    pub unseen: Option<Unseen>,
}

/// An answer that comes at once, as expected. It is charged when the request is sent: streaming or not costs the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Unseen {
    pub cost: u64,
    /// How long it takes to generate.
    pub ms: f64,
}

impl Unseen {
    /// What of it was not generated, where the client left after a while.
    fn unused(&self, lived_ms: u64) -> u64 {
        let used = (lived_ms as f64 / self.ms.max(1.0)).clamp(0.0, 1.0);
        (self.cost as f64 * (1.0 - used)) as u64
    }
}

/// What became of an arrival.
pub enum Arrived {
    Granted(Grant),
    Queued {
        ticket: Ticket,
        /// It was put out for this one: its tenant has more places than its share, and the band is full.
        displaced: Option<Ticket>,
        ahead: Ahead,
        /// As its band has it now.
        ttl_ms: u64,
    },
    /// Its band has as many as may wait.
    Full(Ahead),
    /// Its band is not let in while the pool is as full as this.
    Shed(f64),
    /// The replica takes nothing any more: choose again.
    Closed,
}

/// What is before a request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Ahead {
    /// Waiting requests of its band and of higher ones.
    pub requests: u32,
    /// How long they will take, at the speed of the last minute; unknown where nothing was served.
    pub wait_ms: Option<f64>,
}

/// The right to have one request on one replica. Not a guard: who holds it hands it back with [`Dispatcher::release`].
#[derive(Debug)]
pub struct Grant {
    pub lane: LaneId,
    pub slots: Arc<Slots>,
    band: usize,
    member: Member,
    meters: Meters,
    /// Prompt tokens that are ahead of others until the first byte.
    unread: Unread,
    /// Where its lane keeps the same, if nobody sees its first byte.
    unseen_at: Option<(u64, u64)>,
    sent_at: SentAt,
    /// Those of others that were ahead of it.
    sent_before: u64,
    charged: u64,
    unseen: Option<Unseen>,
    granted_ms: u64,
}

impl Grant {
    /// Charges what was served just now.
    pub fn charge(&mut self, cost: u64) {
        // What was charged ahead is used up first.
        let mut cost = cost;
        if let Some(unseen) = &mut self.unseen {
            let seen = cost.min(unseen.cost);
            unseen.cost -= seen;
            cost -= seen;
        }
        self.charged = self.charged.saturating_add(cost);
        self.meters.charge(cost);
    }

    /// The prompt was read. True the first time.
    pub fn first_byte(&mut self) -> bool {
        self.unread.read(&self.slots) > 0
    }

    pub fn charged(&self) -> u64 {
        self.charged
    }

    /// Prompt tokens that are not read yet, as far as is known.
    pub fn unread_tokens(&self) -> u64 {
        self.unread.tokens()
    }

    /// Prompt tokens that the replica had to read before this request's own.
    pub fn sent_before(&self) -> u64 {
        self.sent_before
    }
}

/// What a request cost in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// What it was charged so far: nobody counted.
    AsCharged,
    Cost(u64),
    /// Nothing: the replica failed it.
    Nothing,
}

/// A request that waits.
struct Waiting {
    band: usize,
    tenant: Arc<str>,
    weight: f64,
    flow: Option<Arc<str>>,
    size: Size,
    since_ms: u64,
    stay_until_ms: u64,
    /// What its slot was taken for.
    sent_tokens: u64,
    /// Where it waits; nowhere while a new replica is chosen for it.
    bound: Option<Bound>,
}

#[derive(Clone, Copy)]
struct Bound {
    lane: LaneId,
    /// Absent for those who go first: they take no turns.
    member: Option<Member>,
}

/// The queues of one pool.
pub struct Dispatcher {
    bands: Bands,
    /// By number, so that what is decided does not depend on a hash.
    lanes: BTreeMap<LaneId, Lane>,
    waiting: HashMap<Ticket, Waiting, foldhash::fast::RandomState>,
    gate: Gate,
    /// How full the replicas are, as far as is known; 1 is as full as the gate lets them be.
    saturation: Option<f64>,
    next_ticket: Ticket,
    next_lane: LaneId,
    next_grant: u64,
    served: Window,
}

/// One queue, for those who watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneReport {
    pub name: Arc<str>,
    pub queued: u32,
}

impl Dispatcher {
    pub fn new(bands: &[BandSpec]) -> Dispatcher {
        Dispatcher {
            bands: Bands::new(bands),
            lanes: BTreeMap::new(),
            waiting: HashMap::default(),
            gate: Gate {
                hold_ms: 500.0,
                kv_max: 0.9,
                inflight_max: None,
            },
            saturation: None,
            next_ticket: 0,
            next_lane: 0,
            next_grant: 0,
            served: Window::new(RATE_WINDOW_MS),
        }
    }

    // Replicas.

    /// A replica joins. Requests are bound to it by the number that it gets.
    pub fn add_lane(&mut self, name: Arc<str>, slots: Arc<Slots>, facts: LaneFacts) -> LaneId {
        let id = self.next_lane;
        self.next_lane += 1;
        let lane = Lane::new(name, slots, facts, &self.gate);
        self.lanes.insert(id, lane);
        id
    }

    /// The number of a replica of this name on this engine.
    pub fn lane_of(&self, name: &str, slots: &Arc<Slots>) -> Option<LaneId> {
        let found = self
            .lanes
            .iter()
            .find(|(_, lane)| *lane.name == *name && Arc::ptr_eq(&lane.slots, slots));
        found.map(|(id, _)| *id)
    }

    /// The replicas that are this engine.
    pub fn lanes_with(&self, slots: &Arc<Slots>) -> Vec<LaneId> {
        self.lanes
            .iter()
            .filter(|(_, lane)| Arc::ptr_eq(&lane.slots, slots))
            .map(|(id, _)| *id)
            .collect()
    }

    pub fn lane_name(&self, lane: LaneId) -> Option<Arc<str>> {
        self.lanes.get(&lane).map(|lane| lane.name.clone())
    }

    pub fn lane_ids(&self) -> Vec<LaneId> {
        self.lanes.keys().copied().collect()
    }

    /// Takes news of a replica. Where it takes nothing any more, those who waited for it go to the others; who can't is
    /// returned, and has to be bound again. So is, where it takes requests again, who waits for a closed one.
    pub fn tell(&mut self, lane_id: LaneId, facts: LaneFacts, now_ms: u64) -> Vec<Ticket> {
        let Some(lane) = self.lanes.get_mut(&lane_id) else {
            return Vec::new();
        };
        let was_open = lane.facts.open;
        lane.tell(facts, &self.gate);
        match (was_open, facts.open) {
            (true, false) => self.evacuate(lane_id, now_ms),
            (false, true) => self.release_trials(),
            _ => Vec::new(),
        }
    }

    /// A replica leaves for good. Returns as [`Dispatcher::tell`] does.
    pub fn remove_lane(&mut self, lane_id: LaneId, now_ms: u64) -> Vec<Ticket> {
        if let Some(lane) = self.lanes.get_mut(&lane_id) {
            lane.facts.open = false;
        }
        let orphans = self.evacuate(lane_id, now_ms);
        self.lanes.remove(&lane_id);
        orphans
    }

    /// Other slots of a replica, or another gate, hold from now on.
    fn slots_changed(&mut self) {
        let gate = self.gate.clone();
        for lane in self.lanes.values_mut() {
            lane.tell(lane.facts, &gate);
        }
    }

    pub fn set_gate(&mut self, gate: Gate) {
        if self.gate != gate {
            self.gate = gate;
            self.slots_changed();
        }
    }

    pub fn set_bands(&mut self, specs: &[BandSpec]) {
        self.bands.set(specs);
    }

    pub fn set_saturation(&mut self, saturation: Option<f64>) {
        self.saturation = saturation;
    }

    // Requests.

    /// A request comes.
    pub fn arrive(&mut self, arrival: &Arrival<'_>, now_ms: u64) -> Arrived {
        let Some(lane) = self.lanes.get_mut(&arrival.lane) else {
            return Arrived::Closed;
        };
        lane.settle(now_ms);
        if !lane.facts.open && !arrival.goes_first {
            return Arrived::Closed;
        }
        let band = self.bands.find_or_add(arrival.band);
        self.bands[band].arrivals.add(now_ms, 1);
        if let (Some(shed), Some(saturation)) = (self.bands[band].spec.shed, self.saturation)
            && saturation > shed
            && !arrival.goes_first
        {
            self.bands[band].rejections.add(now_ms, 1);
            return Arrived::Shed(saturation);
        }
        let nobody_waits = lane.waiting.is_empty();
        if nobody_waits && lane.slots.try_take(arrival.size.todo_tokens, &lane.room) {
            let rotation = &mut self.bands[band].rotation;
            let member = rotation.member(arrival.tenant, arrival.weight, arrival.flow);
            return Arrived::Granted(self.grant(band, member, arrival.size, arrival.lane, now_ms));
        }
        let ahead = self.ahead(band, now_ms);
        let is_full = self.bands[band].waiting.len() as u64 >= self.bands[band].spec.max_queue;
        let mut displaced = None;
        // Who had its turn already is not turned away.
        if is_full && !arrival.goes_first {
            if let Some(lane) = self.lane_with_room(now_ms) {
                return self.grant_elsewhere(band, arrival, lane, now_ms);
            }
            self.bands[band].rejections.add(now_ms, 1);
            let rotation = &self.bands[band].rotation;
            displaced = rotation.displaced_by(arrival.tenant, arrival.weight);
            match displaced {
                Some(ticket) => self.cancel(ticket),
                None => return Arrived::Full(ahead),
            };
        }
        Arrived::Queued {
            ticket: self.queue(band, arrival, now_ms),
            displaced,
            ahead,
            ttl_ms: self.bands[band].spec.ttl_ms,
        }
    }

    /// Binds a waiting request to a replica that was chosen for it anew. False: it is closed too, or the request waits no more.
    pub fn bind(&mut self, ticket: Ticket, lane: LaneId, goes_first: bool) -> bool {
        let is_open = self
            .lanes
            .get(&lane)
            .is_some_and(|lane| lane.facts.open || goes_first);
        let is_bound = is_open && self.waiting.contains_key(&ticket);
        if is_bound {
            self.unbind(ticket);
            self.bind_to(ticket, lane, goes_first);
        }
        is_bound
    }

    /// A request that waits leaves. False: it was sent already, or left.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        self.unbind(ticket);
        let Some(waiting) = self.waiting.remove(&ticket) else {
            return false;
        };
        let band = &mut self.bands[waiting.band];
        band.waiting.remove(&ticket);
        band.queued_cost -= waiting.size.expected_cost;
        true
    }

    /// Sends what may be sent to a replica.
    pub fn fill(&mut self, lane: LaneId, now_ms: u64, granted: &mut Vec<(Ticket, Grant)>) {
        while let Some(ticket) = self.next_on(lane, now_ms) {
            let (Some(waiting), Some(place)) = (self.waiting.get(&ticket), self.lanes.get(&lane))
            else {
                return;
            };
            let todo = match waiting.bound {
                Some(bound) if bound.lane == lane => waiting.size.todo_tokens,
                // What is in its own replica's cache is not in this one's.
                _ => waiting.size.input_tokens,
            };
            if !place.slots.try_take(todo, &place.room) {
                return;
            }
            if let Some(waiting) = self.waiting.get_mut(&ticket) {
                waiting.sent_tokens = todo;
            }
            granted.push((ticket, self.send(ticket, lane, now_ms)));
        }
    }

    /// As [`Dispatcher::fill`], for all replicas.
    pub fn fill_all(&mut self, now_ms: u64, granted: &mut Vec<(Ticket, Grant)>) {
        if self.waiting.is_empty() {
            return;
        }
        for lane in self.lane_ids() {
            self.fill(lane, now_ms, granted);
        }
    }

    /// A request ended. Its slot is free for the next one: fill the replica. Returns what the request cost.
    pub fn release(&mut self, grant: Grant, settled: Settled, now_ms: u64) -> u64 {
        let mut grant = grant;
        grant.first_byte();
        grant.slots.give_back();
        let cost = match settled {
            Settled::AsCharged => {
                let unused = grant.unseen.map_or(0, |unseen| {
                    unseen.unused(now_ms.saturating_sub(grant.granted_ms))
                });
                grant.charged - unused
            }
            Settled::Cost(cost) => cost,
            Settled::Nothing => 0,
        };
        let band = &mut self.bands[grant.band];
        band.inflight -= 1;
        match cost.checked_sub(grant.charged) {
            Some(more) => grant.meters.charge(more),
            None => band.rotation.credit(grant.member, grant.charged - cost),
        }
        band.rotation.ended(grant.member);
        let sent_ms = grant.granted_ms;
        self.bands
            .cost(grant.band, grant.sent_at, sent_ms, cost, now_ms);
        if cost > 0 {
            self.served.add(now_ms, cost);
            if let Some(lane) = self.lanes.get_mut(&grant.lane) {
                lane.served.add(now_ms, cost);
            }
        }
        if let (Some(at), Some(lane)) = (grant.unseen_at, self.lanes.get_mut(&grant.lane)) {
            lane.unseen.remove(&at);
        }
        cost
    }

    /// Forgets what nobody needs; call it now and then.
    pub fn tidy(&mut self) {
        self.bands.tidy();
    }

    // Questions.

    /// What is before the next request of a band.
    pub fn ahead_of(&mut self, band: &str, now_ms: u64) -> Ahead {
        match self.bands.find(band) {
            Some(band) => self.ahead(band, now_ms),
            None => Ahead::default(),
        }
    }

    pub fn queued(&self) -> u32 {
        self.waiting.len() as u32
    }

    /// Whether a request of any size would be sent to this replica now.
    pub fn has_room(&mut self, lane: LaneId, now_ms: u64) -> bool {
        self.lanes.get_mut(&lane).is_some_and(|lane| {
            lane.settle(now_ms);
            lane.has_room()
        })
    }

    /// Every band, the highest first.
    pub fn band_reports(&mut self, now_ms: u64) -> Vec<BandReport> {
        let waiting = &self.waiting;
        let age = |ticket: Ticket| {
            let since = waiting.get(&ticket)?.since_ms;
            Some(now_ms.saturating_sub(since))
        };
        self.bands.reports(now_ms, age)
    }

    /// The tenants of every band, the highest band first.
    pub fn tenants(&self) -> Vec<(Arc<str>, Vec<Standing>)> {
        self.bands.tenants()
    }

    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Every replica's queue.
    pub fn lane_reports(&self) -> Vec<LaneReport> {
        self.lanes
            .values()
            .map(|lane| LaneReport {
                name: lane.name.clone(),
                queued: lane.waiting.len() as u32,
            })
            .collect()
    }

    // How it is done.

    fn ahead(&mut self, band: usize, now_ms: u64) -> Ahead {
        let (requests, cost) = self.bands.ahead(band);
        let rate = self.served.rate_per_s(now_ms);
        Ahead {
            requests,
            wait_ms: rate.map(|rate| cost as f64 * 1e3 / rate),
        }
    }

    fn rate_per_lane(&mut self, now_ms: u64) -> Option<f64> {
        let lanes = self.lanes.values().filter(|lane| lane.facts.open).count();
        let rate = self.served.rate_per_s(now_ms)?;
        Some(rate / lanes.max(1) as f64)
    }

    fn queue(&mut self, band: usize, arrival: &Arrival<'_>, now_ms: u64) -> Ticket {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.waiting.insert(
            ticket,
            Waiting {
                band,
                tenant: arrival.tenant.clone(),
                weight: arrival.weight,
                flow: arrival.flow.cloned(),
                size: arrival.size,
                since_ms: now_ms,
                stay_until_ms: arrival.stay_until_ms,
                sent_tokens: 0,
                bound: None,
            },
        );
        let band = &mut self.bands[band];
        band.waiting.insert(ticket);
        band.queued_cost += arrival.size.expected_cost;
        self.bind_to(ticket, arrival.lane, arrival.goes_first);
        ticket
    }

    fn bind_to(&mut self, ticket: Ticket, lane_id: LaneId, goes_first: bool) {
        let (Some(waiting), Some(lane)) =
            (self.waiting.get_mut(&ticket), self.lanes.get_mut(&lane_id))
        else {
            return;
        };
        lane.waiting.insert(ticket);
        lane.queued_cost += waiting.size.expected_cost;
        lane.slots.enter(waiting.size.todo_tokens);
        let member = if goes_first {
            lane.first.insert(ticket);
            None
        } else {
            let rotation = &mut self.bands[waiting.band].rotation;
            let (tenant, flow) = (&waiting.tenant, waiting.flow.as_ref());
            let member = rotation.known_member(tenant, waiting.weight, flow);
            rotation.push(member, lane_id, ticket);
            Some(member)
        };
        waiting.bound = Some(Bound {
            lane: lane_id,
            member,
        });
    }

    fn unbind(&mut self, ticket: Ticket) {
        let Some(waiting) = self.waiting.get_mut(&ticket) else {
            return;
        };
        let Some(bound) = waiting.bound.take() else {
            return;
        };
        if let Some(member) = bound.member {
            let rotation = &mut self.bands[waiting.band].rotation;
            rotation.remove(member, bound.lane, ticket);
        }
        if let Some(lane) = self.lanes.get_mut(&bound.lane) {
            lane.waiting.remove(&ticket);
            lane.first.remove(&ticket);
            lane.queued_cost -= waiting.size.expected_cost;
            lane.slots.leave(waiting.size.todo_tokens);
        }
    }

    /// Who is sent next to this replica, if it had room.
    fn next_on(&mut self, lane_id: LaneId, now_ms: u64) -> Option<Ticket> {
        if self.waiting.is_empty() {
            return None;
        }
        let lane = self.lanes.get_mut(&lane_id)?;
        lane.settle(now_ms);
        if !lane.has_room() {
            return None;
        }
        if let Some(first) = lane.first.first() {
            return Some(*first);
        }
        if !lane.facts.open {
            return None;
        }
        match self.bands.next(lane_id, now_ms) {
            Some((band, next)) => Some(self.bands.lagging(band, next, LAG_MAX)),
            None => self.steal(lane_id, now_ms),
        }
    }

    fn send(&mut self, ticket: Ticket, lane: LaneId, now_ms: u64) -> Grant {
        let (band, size, member) = {
            let waiting = &self.waiting[&ticket];
            let rotation = &mut self.bands[waiting.band].rotation;
            let known = waiting.bound.and_then(|bound| bound.member);
            let member = known.unwrap_or_else(|| {
                let (tenant, flow) = (&waiting.tenant, waiting.flow.as_ref());
                rotation.known_member(tenant, waiting.weight, flow)
            });
            let size = Size {
                todo_tokens: waiting.sent_tokens,
                ..waiting.size
            };
            (waiting.band, size, member)
        };
        let grant = self.grant(band, member, size, lane, now_ms);
        self.cancel(ticket);
        grant
    }

    /// A request whose slot is taken begins to be served.
    fn grant(
        &mut self,
        band: usize,
        member: Member,
        size: Size,
        lane: LaneId,
        now_ms: u64,
    ) -> Grant {
        let state = &mut self.bands[band];
        let meters = state.rotation.served(member);
        let charged = size.first_cost + size.unseen.map_or(0, |unseen| unseen.cost);
        // What is free takes turns too.
        meters.charge(charged + 1);
        state.inflight += 1;
        let sent_at = self.bands.sent(band, size.expected_cost, now_ms);
        let unread = Unread::new(size.todo_tokens);
        let number = self.next_grant;
        self.next_grant += 1;
        let place = self.lanes.get_mut(&lane).expect("a slot of it was taken");
        let sent_before = place.slots.sent_tokens().saturating_sub(size.todo_tokens);
        let unseen_at = size.unseen.map(|_| {
            let read_ms = place.reading_ms(sent_before + size.todo_tokens);
            let at = (now_ms.saturating_add(read_ms), number);
            place.unseen.insert(at, unread.clone());
            at
        });
        Grant {
            lane,
            band,
            member,
            meters,
            unread,
            unseen_at,
            sent_at,
            sent_before,
            slots: place.slots.clone(),
            charged,
            unseen: size.unseen,
            granted_ms: now_ms,
        }
    }
}

#[cfg(test)]
mod tests;
