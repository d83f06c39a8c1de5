//! The priority classes of one pool: which goes next, what waits in each, what each was served.

use std::collections::{BTreeSet, VecDeque};
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use llmgw_plugins::BandSpec;
use slab::Slab;

use super::rotation::{Next, Rotation, Ticket};
use super::turns::{LaneId, Standing};
use super::window::Window;

/// A band's share of service is measured over this time.
pub(super) const SHARE_WINDOW_MS: u64 = 10_000;
/// Where fewer than so many requests were sent in that time, it is measured over the last so many: of requests that take a minute,
/// ten seconds see none or one.
const SHARE_REQUESTS: usize = 64;
/// Arrivals and refusals are counted over this time.
const COUNT_WINDOW_MS: u64 = 10_000;

/// One band of one pool.
pub struct Band {
    pub spec: BandSpec,
    pub(super) rotation: Rotation,
    /// All who wait, in the order of arrival.
    pub(super) waiting: BTreeSet<Ticket>,
    /// What they are expected to cost.
    pub(super) queued_cost: u64,
    pub(super) inflight: u32,
    /// What its requests are expected to cost, counted when they are sent and set right when they end: counted while it
    /// streams, a band below its floor would fill every slot before its first token is there.
    pub(super) served: Window,
    pub(super) arrivals: Window,
    pub(super) rejections: Window,
    /// A reload removed it; it lasts until its last request ended.
    retired: bool,
}

/// The bands of one pool.
pub struct Bands {
    all: Slab<Band>,
    /// By priority, the highest first.
    order: Vec<usize>,
    /// What was sent last, the newest at the back.
    recent: VecDeque<Sent>,
    /// The number of the first of them.
    first_recent: u64,
    /// Requests that were sent, over the time of the shares.
    sent: Window,
}

/// A request that was sent: whose it is, and what it costs, as far as is known.
struct Sent {
    band: usize,
    cost: u64,
}

/// One of the requests that were sent, for setting its cost right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SentAt(u64);

/// One band, for those who watch.
#[derive(Debug, Clone, PartialEq)]
pub struct BandReport {
    pub name: Arc<str>,
    pub queued: u32,
    /// How long the one that waits longest has waited.
    pub oldest_ms: Option<u64>,
    pub inflight: u32,
    pub queued_cost: u64,
    /// Of the service of the last 10 s, 0..1.
    pub share: Option<f64>,
    pub arrivals_s: f64,
    pub rejections_s: f64,
}

impl Bands {
    pub(super) fn new(specs: &[BandSpec]) -> Bands {
        let mut bands = Bands {
            all: Slab::new(),
            order: Vec::new(),
            recent: VecDeque::with_capacity(SHARE_REQUESTS),
            first_recent: 0,
            sent: Window::new(SHARE_WINDOW_MS),
        };
        bands.set(specs);
        bands
    }

    /// What a policy says of the bands from now on.
    pub(super) fn set(&mut self, specs: &[BandSpec]) {
        for spec in specs {
            match self.find(&spec.name) {
                Some(band) => self.all[band].spec = spec.clone(),
                None => {
                    self.add(spec);
                }
            }
        }
        for (_, band) in &mut self.all {
            band.retired = !specs.iter().any(|spec| spec.name == band.spec.name);
        }
        self.forget_retired();
    }

    pub(super) fn find(&self, name: &str) -> Option<usize> {
        self.order
            .iter()
            .copied()
            .find(|band| *self.all[*band].spec.name == *name)
    }

    /// A request of an older generation may have a band that is gone: it waits as it was promised.
    pub(super) fn find_or_add(&mut self, spec: &BandSpec) -> usize {
        match self.find(&spec.name) {
            Some(band) => band,
            None => {
                let band = self.add(spec);
                self.all[band].retired = true;
                band
            }
        }
    }

    /// The band that goes next on a replica, and who of it: one that got less than its floor, else the highest.
    pub(super) fn next(&mut self, lane: LaneId, now_ms: u64) -> Option<(usize, Next)> {
        let mut highest = None;
        let mut poorest: Option<(f64, usize)> = None;
        let mut shares: Option<Shares> = None;
        for at in 0..self.order.len() {
            let band = self.order[at];
            if !self.all[band].rotation.waits_on(lane) {
                continue;
            }
            highest = highest.or(Some(band));
            let floor = self.all[band].spec.floor;
            if floor <= 0.0 {
                continue;
            }
            let shares = shares.get_or_insert_with(|| self.shares(now_ms));
            let Some(share) = shares.of(band) else {
                continue;
            };
            let part = share / floor;
            if part < 1.0 && poorest.is_none_or(|(least, _)| part < least) {
                poorest = Some((part, band));
            }
        }
        let band = poorest.map(|(_, band)| band).or(highest)?;
        let next = self.all[band].rotation.next(lane)?;
        Some((band, next))
    }

    /// The request of the same band that goes instead, where its tenant is too far behind the one whose turn it is here.
    pub(super) fn lagging(&mut self, band: usize, next: Next, lag_max: u64) -> Ticket {
        match self.all[band].rotation.next_anywhere() {
            Some(other) if next.time.saturating_sub(other.time) > lag_max => other.ticket,
            _ => next.ticket,
        }
    }

    /// How many wait in a band and in higher ones, and what they are expected to cost.
    pub(super) fn ahead(&self, band: usize) -> (u32, u64) {
        let priority = self.all[band].spec.priority;
        self.all
            .iter()
            .filter(|(_, other)| other.spec.priority >= priority)
            .fold((0, 0), |(requests, cost), (_, other)| {
                (
                    requests + other.waiting.len() as u32,
                    cost + other.queued_cost,
                )
            })
    }

    /// A request of a band is sent, and is expected to cost so much.
    pub(super) fn sent(&mut self, band: usize, cost: u64, now_ms: u64) -> SentAt {
        // Also what is free takes its turn.
        let cost = cost.max(1);
        self.all[band].served.add(now_ms, cost);
        self.sent.add(now_ms, 1);
        if self.recent.len() == SHARE_REQUESTS {
            self.recent.pop_front();
            self.first_recent += 1;
        }
        self.recent.push_back(Sent { band, cost });
        SentAt(self.first_recent + self.recent.len() as u64 - 1)
    }

    /// It cost so much in the end.
    pub(super) fn cost(&mut self, band: usize, at: SentAt, sent_ms: u64, cost: u64, now_ms: u64) {
        let known = at.0.checked_sub(self.first_recent);
        let recent = known.and_then(|at| self.recent.get_mut(usize::try_from(at).ok()?));
        let Some(recent) = recent else { return };
        let cost = cost.max(1);
        let expected = std::mem::replace(&mut recent.cost, cost);
        let served = &mut self.all[band].served;
        match cost.checked_sub(expected) {
            Some(more) => served.add(now_ms, more),
            // What was sent long ago counts no more, so it is not taken from what was sent since.
            None if now_ms.saturating_sub(sent_ms) < SHARE_WINDOW_MS => {
                served.take_back(now_ms, expected - cost);
            }
            None => {}
        }
    }

    /// What each band was served lately.
    fn shares(&mut self, now_ms: u64) -> Shares {
        let is_few = self.sent.sum(now_ms) < SHARE_REQUESTS as u64;
        let mut costs = vec![0_u64; self.all.capacity()];
        if is_few {
            for sent in &self.recent {
                costs[sent.band] = costs[sent.band].saturating_add(sent.cost);
            }
        } else {
            for (band, state) in &mut self.all {
                costs[band] = state.served.sum(now_ms);
            }
        }
        let total = costs
            .iter()
            .fold(0_u64, |sum, cost| sum.saturating_add(*cost));
        Shares { costs, total }
    }

    pub(super) fn tidy(&mut self) {
        self.all
            .iter_mut()
            .for_each(|(_, band)| band.rotation.tidy());
        self.forget_retired();
    }

    /// Bands that a reload removed go once nothing of them is left.
    fn forget_retired(&mut self) {
        let all = &mut self.all;
        all.retain(|_, band| !band.retired || band.inflight > 0 || !band.waiting.is_empty());
        // The number of a band that went may be given to another.
        let is_there = |sent: &Sent| all.contains(sent.band);
        if !self.recent.iter().all(is_there) {
            self.recent.clear();
            self.first_recent += SHARE_REQUESTS as u64;
        }
        self.put_in_order();
    }

    fn put_in_order(&mut self) {
        let all = &self.all;
        self.order = all.iter().map(|(id, _)| id).collect();
        self.order.sort_by(|left, right| {
            let (left, right) = (&all[*left].spec, &all[*right].spec);
            let by_priority = right.priority.total_cmp(&left.priority);
            by_priority.then_with(|| left.name.cmp(&right.name))
        });
    }

    /// Every band, the highest first. `age` knows how long a request has waited.
    pub(super) fn reports(
        &mut self,
        now_ms: u64,
        age: impl Fn(Ticket) -> Option<u64>,
    ) -> Vec<BandReport> {
        let total = self.served(now_ms);
        self.order
            .iter()
            .map(|id| {
                let band = &mut self.all[*id];
                let served = band.served.sum(now_ms);
                BandReport {
                    name: band.spec.name.clone(),
                    queued: band.waiting.len() as u32,
                    oldest_ms: band.waiting.first().and_then(|oldest| age(*oldest)),
                    inflight: band.inflight,
                    queued_cost: band.queued_cost,
                    share: (total > 0).then(|| served as f64 / total as f64),
                    arrivals_s: band.arrivals.rate_per_s(now_ms).unwrap_or(0.0),
                    rejections_s: band.rejections.rate_per_s(now_ms).unwrap_or(0.0),
                }
            })
            .collect()
    }

    /// The tenants of every band, the highest band first.
    pub(super) fn tenants(&self) -> Vec<(Arc<str>, Vec<Standing>)> {
        let of = |id: &usize| {
            let band = &self.all[*id];
            (band.spec.name.clone(), band.rotation.tenants())
        };
        self.order.iter().map(of).collect()
    }

    fn served(&mut self, now_ms: u64) -> u64 {
        self.all
            .iter_mut()
            .fold(0, |sum, (_, band)| sum + band.served.sum(now_ms))
    }

    fn add(&mut self, spec: &BandSpec) -> usize {
        let id = self.all.insert(Band {
            spec: spec.clone(),
            rotation: Rotation::default(),
            waiting: BTreeSet::new(),
            queued_cost: 0,
            inflight: 0,
            served: Window::new(SHARE_WINDOW_MS),
            arrivals: Window::new(COUNT_WINDOW_MS),
            rejections: Window::new(COUNT_WINDOW_MS),
            retired: false,
        });
        self.put_in_order();
        id
    }
}

/// What the bands were served lately, by their numbers.
struct Shares {
    costs: Vec<u64>,
    total: u64,
}

impl Shares {
    /// 0..1; unknown where nothing was served.
    fn of(&self, band: usize) -> Option<f64> {
        (self.total > 0).then(|| self.costs[band] as f64 / self.total as f64)
    }
}

impl Index<usize> for Bands {
    type Output = Band;

    fn index(&self, band: usize) -> &Band {
        &self.all[band]
    }
}

impl IndexMut<usize> for Bands {
    fn index_mut(&mut self, band: usize) -> &mut Band {
        &mut self.all[band]
    }
}
