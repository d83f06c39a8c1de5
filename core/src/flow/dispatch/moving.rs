//! Requests that go elsewhere: their replica takes nothing any more, another one would have them sooner, or has room.

use super::{Arrival, Arrived, Dispatcher, LAG_MAX, Size, Waiting};
use crate::flow::rotation::Ticket;
use crate::flow::turns::LaneId;

/// Requests moved to a better replica at one tick.
const MOVED_MAX: usize = 64;
/// How many of a queue are looked at for one that need not stay there.
const STAYING_LOOKED_AT_MAX: usize = 256;

impl Dispatcher {
    /// Moves requests whose replica lets them wait for more than `penalty_ms` longer than another would; call it now and then.
    pub fn balance(&mut self, penalty_ms: f64, now_ms: u64) {
        let pool_rate = self.rate_per_lane(now_ms);
        for _ in 0..MOVED_MAX {
            let mut waits: Vec<(f64, LaneId)> = self
                .lanes
                .iter_mut()
                .filter(|(_, lane)| lane.facts.open)
                .filter_map(|(id, lane)| Some((lane.wait_ms(now_ms, pool_rate)?, *id)))
                .collect();
            waits.sort_by(|left, right| left.0.total_cmp(&right.0));
            let (Some((least, to)), Some((most, from))) = (waits.first(), waits.last()) else {
                return;
            };
            let newest = self.lanes[from]
                .waiting
                .iter()
                .next_back()
                .copied()
                .filter(|ticket| !self.lanes[from].first.contains(ticket));
            match newest {
                Some(ticket) if most - least > penalty_ms => {
                    let to = *to;
                    self.move_to(ticket, to);
                }
                _ => return,
            }
        }
    }

    /// Binds a request to a replica that has none of its prompt.
    fn move_to(&mut self, ticket: Ticket, lane: LaneId) {
        self.unbind(ticket);
        if let Some(waiting) = self.waiting.get_mut(&ticket) {
            waiting.size.todo_tokens = waiting.size.input_tokens;
            waiting.stay_until_ms = 0;
        }
        self.bind_to(ticket, lane, false);
    }

    /// Everybody leaves a replica: for the open one with the shortest queue, those who may go anywhere.
    pub(super) fn evacuate(&mut self, from: LaneId, now_ms: u64) -> Vec<Ticket> {
        let pool_rate = self.rate_per_lane(now_ms);
        let Some(lane) = self.lanes.get(&from) else {
            return Vec::new();
        };
        let tickets: Vec<Ticket> = lane.waiting.iter().copied().collect();
        let bound_to_it = lane.first.clone();
        let mut orphans = Vec::new();
        for ticket in tickets {
            self.unbind(ticket);
            let shortest = self
                .lanes
                .iter_mut()
                .filter(|(id, lane)| **id != from && lane.facts.open)
                .map(|(id, lane)| {
                    let wait = lane.wait_ms(now_ms, pool_rate).unwrap_or(0.0);
                    (wait, lane.queued_cost, *id)
                })
                .min_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
            match shortest {
                Some((_, _, to)) if !bound_to_it.contains(&ticket) => self.move_to(ticket, to),
                _ => orphans.push(ticket),
            }
        }
        orphans
    }

    /// Those who wait for a closed replica's room leave it, since there is an open one now: a trial may wait for minutes, for as long as what
    /// hangs there has the room.
    pub fn release_trials(&mut self) -> Vec<Ticket> {
        let closed = self.lanes.values().filter(|lane| !lane.facts.open);
        let released: Vec<Ticket> = closed.flat_map(|lane| &lane.first).copied().collect();
        released.iter().for_each(|ticket| self.unbind(*ticket));
        released
    }

    /// Takes from the longest queue a request that need not stay there: the one whose turn it is, else one behind those who stay.
    pub(super) fn steal(&mut self, thief: LaneId, now_ms: u64) -> Option<Ticket> {
        let mut victims: Vec<(u64, LaneId)> = self
            .lanes
            .iter()
            .filter(|(id, lane)| **id != thief && lane.waiting.len() > lane.first.len())
            .map(|(id, lane)| (lane.queued_cost, *id))
            .collect();
        victims.sort_by(|left, right| right.cmp(left));
        victims.into_iter().find_map(|(_, victim)| {
            let (band, next) = self.bands.next(victim, now_ms)?;
            // The longest queue is often that of a tenant who is ahead.
            let ticket = self.bands.lagging(band, next, LAG_MAX);
            let stays = self.waiting.get(&ticket)?.stay_until_ms > now_ms;
            match ticket == next.ticket && stays {
                false => Some(ticket),
                true => self.behind_those_who_stay(victim, now_ms),
            }
        })
    }

    /// The first to arrive, of the highest band, that need not stay where it waits.
    fn behind_those_who_stay(&self, victim: LaneId, now_ms: u64) -> Option<Ticket> {
        let lane = self.lanes.get(&victim)?;
        lane.waiting
            .iter()
            .take(STAYING_LOOKED_AT_MAX)
            .filter(|ticket| !lane.first.contains(ticket))
            .filter_map(|ticket| Some((*ticket, self.waiting.get(ticket)?)))
            .filter(|(_, waiting)| waiting.stay_until_ms <= now_ms)
            .max_by(|(left, one), (right, other)| {
                let priority = |waiting: &Waiting| self.bands[waiting.band].spec.priority;
                priority(one)
                    .total_cmp(&priority(other))
                    .then(right.cmp(left))
            })
            .map(|(ticket, _)| ticket)
    }

    /// A replica that has room and nobody waiting.
    pub(super) fn lane_with_room(&mut self, now_ms: u64) -> Option<LaneId> {
        self.lanes.iter_mut().find_map(|(id, lane)| {
            lane.settle(now_ms);
            let is_idle = lane.facts.open && lane.waiting.is_empty() && lane.has_room();
            is_idle.then_some(*id)
        })
    }

    /// Sends an arrival to a replica that was not chosen for it, since nobody may wait for the one that was.
    pub(super) fn grant_elsewhere(
        &mut self,
        band: usize,
        arrival: &Arrival<'_>,
        lane: LaneId,
        now_ms: u64,
    ) -> Arrived {
        let size = Size {
            todo_tokens: arrival.size.input_tokens,
            ..arrival.size
        };
        let place = &self.lanes[&lane];
        if !place.slots.try_take(size.todo_tokens, &place.room) {
            // Another model of the same engine was faster.
            return Arrived::Full(self.ahead(band, now_ms));
        }
        let rotation = &mut self.bands[band].rotation;
        let member = rotation.member(arrival.tenant, arrival.weight, arrival.flow);
        Arrived::Granted(self.grant(band, member, size, lane, now_ms))
    }
}
