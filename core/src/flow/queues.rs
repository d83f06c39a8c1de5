//! The queues of one model, shared by all its requests: the dispatcher behind a lock, and those who wait for their turn.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use arc_swap::ArcSwap;
use llmgw_plugins::{BandSpec, Gate};
use tokio::sync::{Notify, oneshot};

use super::bands::BandReport;
use super::cost::Prices;
use super::dispatch::{Ahead, Arrival, Arrived, Dispatcher, Grant, LaneReport, Settled};
use super::lane::LaneFacts;
#[cfg(test)]
use super::meanwhile;
use super::permit::Permit;
use super::rotation::Ticket;
use super::slots::{Slots, Watcher};
use super::turns::LaneId;
use crate::clock;

/// The queues of one model. Lives as long as the model is configured, over reloads; shared by its pool, its replicas, its
/// permits and those who wait.
pub struct Queues {
    /// Held for a few microseconds at a time, never while a permit is dropped, never across an await.
    state: Mutex<State>,
    /// How many wait: looked at without the lock, where nothing has to be done if nobody does.
    queued: AtomicU32,
    /// What a token costs, published by the policy tick.
    pub prices: ArcSwap<Prices>,
    /// Wakes those who wait for any replica to become ready.
    pub changed: Notify,
    me: Weak<Queues>,
}

struct State {
    dispatcher: Dispatcher,
    waiters: HashMap<Ticket, oneshot::Sender<Turn>, foldhash::fast::RandomState>,
}

/// What a waiting request is told.
#[expect(
    clippy::large_enum_variant,
    reason = "it is made once and moved once; a box would be one more allocation for each request that waits"
)]
pub enum Turn {
    Granted(Permit),
    /// Its replica takes nothing any more, and there is no other that is known to.
    ChooseAgain,
    /// Its band is full, and its tenant has more places than its share: somebody else got this one.
    Displaced,
}

/// How a request got in.
pub enum Entered {
    Now(Permit),
    Waits(Place),
    Full(Ahead),
    Shed(f64),
    /// The replica takes nothing any more: choose again.
    Closed,
}

/// A request's place in the queue. Left when dropped.
pub struct Place {
    queues: Arc<Queues>,
    ticket: Ticket,
    turn: oneshot::Receiver<Turn>,
    /// What was before it when it came.
    pub ahead: Ahead,
    /// How long its band lets it wait, in milliseconds.
    pub ttl_ms: u64,
}

/// What to do once the lock is released.
#[derive(Default)]
struct Told(Vec<(oneshot::Sender<Turn>, Turn)>);

impl Queues {
    pub fn new(bands: &[BandSpec]) -> Arc<Queues> {
        Arc::new_cyclic(|me| Queues {
            state: Mutex::new(State {
                dispatcher: Dispatcher::new(bands),
                waiters: HashMap::default(),
            }),
            queued: AtomicU32::new(0),
            prices: ArcSwap::default(),
            changed: Notify::new(),
            me: me.clone(),
        })
    }

    // Requests.

    /// Gives a request its permit, or a place in the queue.
    pub fn enter(&self, arrival: &Arrival<'_>) -> Entered {
        let mut state = self.lock();
        match state.dispatcher.arrive(arrival, clock::now_ms()) {
            Arrived::Granted(grant) => Entered::Now(self.permit(&state, grant)),
            Arrived::Full(ahead) => Entered::Full(ahead),
            Arrived::Shed(saturation) => Entered::Shed(saturation),
            Arrived::Closed => Entered::Closed,
            Arrived::Queued {
                ticket,
                displaced,
                ahead,
                ttl_ms,
            } => {
                let (tell, turn) = oneshot::channel();
                state.waiters.insert(ticket, tell);
                let displaced = displaced.and_then(|ticket| state.waiters.remove(&ticket));
                let displaced = displaced.map(|waiter| (waiter, Turn::Displaced));
                let mut told = Told(displaced.into_iter().collect());
                #[cfg(test)]
                meanwhile::reached(meanwhile::Point::Queued);
                self.count(&state);
                // Room is made without the lock: whoever made it since the arrival's own look sees the count, or is seen here.
                fence(Ordering::SeqCst);
                let now = clock::now_ms();
                let mut granted = Vec::new();
                match arrival.stay_until_ms <= now {
                    // Another replica may have room for it.
                    true => state.dispatcher.fill_all(now, &mut granted),
                    false => state.dispatcher.fill(arrival.lane, now, &mut granted),
                }
                self.tell_granted(&mut state, granted, &mut told);
                drop(state);
                told.send();
                Entered::Waits(Place {
                    queues: self.arc(),
                    ticket,
                    turn,
                    ahead,
                    ttl_ms,
                })
            }
        }
    }

    /// What is before the next request of a band.
    pub fn ahead_of(&self, band: &str) -> Ahead {
        self.lock().dispatcher.ahead_of(band, clock::now_ms())
    }

    /// Whether a request of any size would be sent to this replica now.
    pub fn has_room(&self, lane: LaneId) -> bool {
        self.lock().dispatcher.has_room(lane, clock::now_ms())
    }

    pub fn queued(&self) -> u32 {
        self.queued.load(Ordering::Relaxed)
    }

    // Replicas.

    /// The number of a replica's queue: the one that it has, or a new one.
    pub fn lane(&self, name: &Arc<str>, slots: &Arc<Slots>) -> LaneId {
        let watcher: Weak<dyn Watcher> = self.me.clone();
        slots.watch(watcher);
        let mut state = self.lock();
        match state.dispatcher.lane_of(name, slots) {
            Some(lane) => lane,
            None => {
                let facts = LaneFacts::unknown();
                state
                    .dispatcher
                    .add_lane(name.clone(), slots.clone(), facts)
            }
        }
    }

    /// Only these replicas are left.
    pub fn retain(&self, kept: &[LaneId]) {
        let now = clock::now_ms();
        self.change(|dispatcher| {
            let gone: Vec<LaneId> = dispatcher
                .lane_ids()
                .into_iter()
                .filter(|lane| !kept.contains(lane))
                .collect();
            gone.into_iter()
                .flat_map(|lane| dispatcher.remove_lane(lane, now))
                .collect()
        });
    }

    /// News of replicas.
    pub fn tell(&self, news: impl IntoIterator<Item = (LaneId, LaneFacts)>) {
        let now = clock::now_ms();
        self.change(|dispatcher| {
            news.into_iter()
                .flat_map(|(lane, facts)| dispatcher.tell(lane, facts, now))
                .collect()
        });
    }

    /// Lets trials that wait for a suspect replica's room choose again.
    pub fn release_trials(&self) {
        self.change(Dispatcher::release_trials);
    }

    // Ticks.

    /// What a policy says from now on.
    pub fn set(&self, bands: &[BandSpec], gate: Gate, saturation: Option<f64>) {
        self.change(|dispatcher| {
            dispatcher.set_bands(bands);
            dispatcher.set_gate(gate);
            dispatcher.set_saturation(saturation);
            Vec::new()
        });
    }

    /// Moves those who wait for too long to replicas where they go sooner.
    pub fn balance(&self, penalty_ms: f64) {
        if self.queued() > 0 {
            let now = clock::now_ms();
            self.change(|dispatcher| {
                dispatcher.balance(penalty_ms, now);
                Vec::new()
            });
        }
    }

    pub fn tidy(&self) {
        self.lock().dispatcher.tidy();
    }

    // For those who watch.

    pub fn band_reports(&self) -> Vec<BandReport> {
        let now = clock::now_ms();
        self.lock().dispatcher.band_reports(now)
    }

    pub fn gate(&self) -> Gate {
        self.lock().dispatcher.gate().clone()
    }

    pub fn lane_reports(&self) -> Vec<LaneReport> {
        self.lock().dispatcher.lane_reports()
    }

    // For permits.

    /// Ends a request, and gives its slot to whoever is next.
    pub(super) fn release(&self, grant: Grant, settled: Settled) {
        let now = clock::now_ms();
        let (lane, slots) = (grant.lane, grant.slots.clone());
        #[cfg(test)]
        meanwhile::reached(meanwhile::Point::Releasing);
        let mut state = self.lock();
        state.dispatcher.release(grant, settled, now);
        // Only now: a queue that comes to watch later finds the slot free.
        let watchers = slots.watchers();
        // A replica that left and came back has another number, and the same engine.
        let is_still_here = state.dispatcher.lane_name(lane).is_some();
        if watchers.is_empty() && is_still_here {
            let told = self.fill(&mut state, lane, now);
            drop(state);
            return told.send();
        }
        drop(state);
        self.there_is_room(&slots, &watchers);
    }

    /// A prompt was read, which may leave room for the next.
    pub(super) fn read(&self, slots: &Arc<Slots>) {
        self.there_is_room(slots, &slots.watchers());
    }

    /// Fills an engine, in the order of those who watch it; where only this model has it, nobody needs to.
    fn there_is_room(&self, slots: &Arc<Slots>, watchers: &[Arc<dyn Watcher>]) {
        match watchers {
            [] => self.freed(slots),
            watchers => watchers.iter().for_each(|watcher| watcher.freed(slots)),
        }
    }

    fn fill_all(&self) {
        self.change(|_| Vec::new());
    }

    /// Changes something, sends what may be sent after it, and tells those who have to choose again.
    fn change(&self, change: impl FnOnce(&mut Dispatcher) -> Vec<Ticket>) {
        let now = clock::now_ms();
        let mut told = Told::default();
        let mut state = self.lock();
        for orphan in change(&mut state.dispatcher) {
            if let Some(waiter) = state.waiters.remove(&orphan) {
                told.0.push((waiter, Turn::ChooseAgain));
            }
        }
        let mut granted = Vec::new();
        state.dispatcher.fill_all(now, &mut granted);
        self.tell_granted(&mut state, granted, &mut told);
        drop(state);
        told.send();
    }

    fn fill(&self, state: &mut State, lane: LaneId, now_ms: u64) -> Told {
        let mut told = Told::default();
        let mut granted = Vec::new();
        state.dispatcher.fill(lane, now_ms, &mut granted);
        self.tell_granted(state, granted, &mut told);
        told
    }

    fn tell_granted(&self, state: &mut State, granted: Vec<(Ticket, Grant)>, told: &mut Told) {
        for (ticket, grant) in granted {
            let permit = self.permit(state, grant);
            match state.waiters.remove(&ticket) {
                Some(waiter) => told.0.push((waiter, Turn::Granted(permit))),
                // Nobody waits for it any more: its drop has to come after the lock.
                None => told.0.push((oneshot::channel().0, Turn::Granted(permit))),
            }
        }
        self.count(state);
    }

    fn permit(&self, state: &State, grant: Grant) -> Permit {
        let replica = state.dispatcher.lane_name(grant.lane);
        Permit::new(self.arc(), grant, replica)
    }

    fn count(&self, state: &State) {
        self.queued
            .store(state.dispatcher.queued(), Ordering::Relaxed);
    }

    fn arc(&self) -> Arc<Queues> {
        // Whoever calls holds one.
        self.me.upgrade().expect("queues in use are alive")
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watcher for Queues {
    fn freed(&self, slots: &Arc<Slots>) {
        // After the room was made, so that nobody who saw none is missed: the other half is in `enter`.
        fence(Ordering::SeqCst);
        if self.queued() == 0 {
            return;
        }
        let now = clock::now_ms();
        let mut state = self.lock();
        let lanes = state.dispatcher.lanes_with(slots);
        let told: Vec<Told> = lanes
            .into_iter()
            .map(|lane| self.fill(&mut state, lane, now))
            .collect();
        drop(state);
        told.into_iter().for_each(Told::send);
    }
}

impl Told {
    /// Never under the lock: a permit whose receiver is gone is dropped here, and takes it.
    fn send(self) {
        for (waiter, turn) in self.0 {
            let _ = waiter.send(turn);
        }
    }
}

impl Place {
    /// Waits until it is this request's turn. May be dropped and called again.
    pub async fn turn(&mut self) -> Turn {
        // The sender goes only when it has told something.
        (&mut self.turn).await.unwrap_or(Turn::ChooseAgain)
    }

    /// Waits for another replica from now on, in the place that it has. False: that one is closed too, or this place is gone.
    pub fn bind(&mut self, lane: LaneId, goes_first: bool) -> bool {
        let (tell, turn) = oneshot::channel();
        let mut state = self.queues.lock();
        if !state.dispatcher.bind(self.ticket, lane, goes_first) {
            return false;
        }
        state.waiters.insert(self.ticket, tell);
        drop(state);
        // What the old one may hold is dropped without the lock.
        self.turn = turn;
        self.queues.fill_all();
        true
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.queues.lock();
        state.waiters.remove(&self.ticket);
        state.dispatcher.cancel(self.ticket);
        self.queues.count(&state);
    }
}

#[cfg(test)]
mod tests;
