//! Who goes next among those that wait: the account that was given the least for its weight.
//!
//! Every account has a virtual time: the cost it was charged, divided by its weight. The one with the least goes next. One that
//! wakes starts at the virtual time of the others, so that idling is not saved up. Costs are charged from other threads while
//! tokens stream (`Meter`) and counted when somebody asks for the next turn: they only ever raise a virtual time, so the
//! order by the old ones is corrected from its front.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::HashMap;
use slab::Slab;

/// A place where requests wait: one replica of the pool.
pub type LaneId = u32;

/// Accounts that are kept although nothing of theirs is left: their debts are remembered until the others caught up.
const INDEBTED_ACCOUNTS_MAX: usize = 16_384;
/// One charge at most, in thousandths: ten million tokens at a price of 100. An engine that counts nonsense does not put its tenant
/// last for good.
const CHARGE_MAX: u64 = 1_000_000_000_000;
/// Weights are at least this, so that a cost divided by one stays a number.
const WEIGHT_MIN: f64 = 0.01;

/// Where the cost of an account's running requests is written, by whoever relays their tokens.
#[derive(Debug, Clone, Default)]
pub struct Meter(Arc<AtomicU64>);

impl Meter {
    pub fn charge(&self, cost: u64) {
        self.0.fetch_add(cost.min(CHARGE_MAX), Ordering::Relaxed);
    }
}

/// Accounts that take turns, in several places at once.
#[derive(Default)]
pub struct Turns {
    accounts: Slab<Account>,
    by_name: HashMap<Arc<str>, usize>,
    /// Those that wait in each place, by virtual time.
    waiting: HashMap<LaneId, BTreeSet<(u64, usize)>>,
    /// Those that wait anywhere.
    anywhere: BTreeSet<(u64, usize)>,
    /// The same, by how many wait for their weight.
    places: BTreeSet<(u64, usize)>,
    /// How far the one that waits longest has come; never goes back.
    virtual_time: u64,
}

struct Account {
    name: Arc<str>,
    weight: f64,
    time: u64,
    /// The time under which it stands in the sets; never after `time`.
    key: u64,
    meter: Meter,
    /// Requests that wait, by place, and all of them.
    waiting: Vec<(LaneId, u32)>,
    queued: u32,
    inflight: u32,
}

/// What an account has, for those who watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub name: Arc<str>,
    pub queued: u32,
    pub inflight: u32,
    pub time: u64,
}

impl Turns {
    /// The account of this name, made where there is none. A weight holds for what is charged from now on.
    pub fn account(&mut self, name: &Arc<str>, weight: f64) -> usize {
        let id = self.known_account(name, weight);
        let weight = weight.max(WEIGHT_MIN);
        if self.accounts[id].weight != weight {
            self.fold(id);
            self.places.remove(&self.place(id));
            self.accounts[id].weight = weight;
            self.enter_places(id);
        }
        id
    }

    /// The same, but one that is there keeps its weight: a request that waited for an hour does not know the present one.
    pub fn known_account(&mut self, name: &Arc<str>, weight: f64) -> usize {
        let weight = weight.max(WEIGHT_MIN);
        if let Some(&id) = self.by_name.get(name) {
            return id;
        }
        let id = self.accounts.insert(Account {
            name: name.clone(),
            weight,
            time: self.virtual_time,
            key: self.virtual_time,
            meter: Meter::default(),
            waiting: Vec::new(),
            queued: 0,
            inflight: 0,
        });
        self.by_name.insert(name.clone(), id);
        id
    }

    pub fn find(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// One more request of the account waits in this place.
    pub fn enter(&mut self, id: usize, lane: LaneId) {
        self.wake(id);
        self.places.remove(&self.place(id));
        let account = &mut self.accounts[id];
        account.queued += 1;
        if account.waiting.is_empty() {
            self.anywhere.insert((account.key, id));
        }
        match account.waiting.iter_mut().find(|(place, _)| *place == lane) {
            Some((_, count)) => *count += 1,
            None => {
                account.waiting.push((lane, 1));
                self.waiting
                    .entry(lane)
                    .or_default()
                    .insert((account.key, id));
            }
        }
        self.enter_places(id);
    }

    /// One of its requests no longer waits in this place.
    pub fn leave(&mut self, id: usize, lane: LaneId) {
        let account = &mut self.accounts[id];
        let Some(at) = account.waiting.iter().position(|(place, _)| *place == lane) else {
            return;
        };
        let place = (places_for(account.queued, account.weight), id);
        account.queued -= 1;
        account.waiting[at].1 -= 1;
        self.places.remove(&place);
        if account.queued > 0 {
            let now = places_for(account.queued, account.weight);
            self.places.insert((now, id));
        }
        if account.waiting[at].1 > 0 {
            return;
        }
        account.waiting.swap_remove(at);
        if let Some(set) = self.waiting.get_mut(&lane) {
            set.remove(&(account.key, id));
            if set.is_empty() {
                self.waiting.remove(&lane);
            }
        }
        if account.waiting.is_empty() {
            self.anywhere.remove(&(account.key, id));
        }
    }

    /// A request of the account is given to a replica: asked before it leaves, where it waited.
    pub fn served(&mut self, id: usize) {
        self.wake(id);
        self.fold(id);
        let time = self.accounts[id].time;
        let least = self.anywhere.first().map_or(time, |(key, _)| *key);
        self.virtual_time = self.virtual_time.max(time.min(least));
        self.accounts[id].inflight += 1;
    }

    /// One of its requests ended.
    pub fn ended(&mut self, id: usize) {
        self.accounts[id].inflight -= 1;
    }

    pub fn meter(&self, id: usize) -> Meter {
        self.accounts[id].meter.clone()
    }

    /// Gives back what was charged too much.
    pub fn credit(&mut self, id: usize, cost: u64) {
        self.fold(id);
        let account = &mut self.accounts[id];
        account.time = account.time.saturating_sub(weighted(cost, account.weight));
        self.rekey(id);
    }

    pub fn waits_on(&self, lane: LaneId) -> bool {
        self.waiting.contains_key(&lane)
    }

    /// Whose turn it is in this place, and its virtual time.
    pub fn least(&mut self, lane: LaneId) -> Option<(usize, u64)> {
        loop {
            let &(key, id) = self.waiting.get(&lane)?.first()?;
            if self.is_current(key, id) {
                return Some((id, key));
            }
        }
    }

    /// Whose turn it would be anywhere, its virtual time, and a place where it waits.
    pub fn least_anywhere(&mut self) -> Option<(usize, u64, LaneId)> {
        loop {
            let &(key, id) = self.anywhere.first()?;
            if self.is_current(key, id) {
                let (lane, _) = *self.accounts[id].waiting.first()?;
                return Some((id, key, lane));
            }
        }
    }

    /// Whoever has the most places for its weight, where this account with one more than now would have fewer. It need not be there.
    pub fn greediest(&self, newcomer: &str, weight: f64) -> Option<usize> {
        let known = self.by_name.get(newcomer);
        let queued = known.map_or(0, |id| self.accounts[*id].queued);
        let (most, id) = self.places.last().copied()?;
        let with_one_more = places_for(queued + 1, weight.max(WEIGHT_MIN));
        (known != Some(&id) && with_one_more < most).then_some(id)
    }

    /// Forgets all accounts that have nothing, whatever they owe.
    pub fn forget_idle(&mut self) {
        let idle: Vec<usize> = self
            .accounts
            .iter()
            .filter(|(_, account)| account.waiting.is_empty() && account.inflight == 0)
            .map(|(id, _)| id)
            .collect();
        idle.into_iter().for_each(|id| self.forget(id));
    }

    /// Forgets accounts that have nothing and owe nothing, and those that owe least where there are too many.
    pub fn tidy(&mut self) {
        let idle: Vec<usize> = self
            .accounts
            .iter()
            .filter(|(_, account)| account.waiting.is_empty() && account.inflight == 0)
            .map(|(id, _)| id)
            .collect();
        let mut indebted = Vec::new();
        for id in idle {
            self.fold(id);
            match self.accounts[id].time > self.virtual_time {
                true => indebted.push((self.accounts[id].time, id)),
                false => self.forget(id),
            }
        }
        if let Some(excess) = indebted.len().checked_sub(INDEBTED_ACCOUNTS_MAX) {
            indebted.sort_unstable();
            indebted[..excess]
                .iter()
                .for_each(|(_, id)| self.forget(*id));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.accounts.is_empty()
    }

    pub fn contains(&self, id: usize) -> bool {
        self.accounts.contains(id)
    }

    /// Every account, by name.
    pub fn standings(&self) -> Vec<Standing> {
        let mut standings: Vec<Standing> = self
            .accounts
            .iter()
            .map(|(_, account)| Standing {
                name: account.name.clone(),
                queued: account.queued,
                inflight: account.inflight,
                time: account.time,
            })
            .collect();
        standings.sort_by(|left, right| left.name.cmp(&right.name));
        standings
    }

    /// Where nothing of it waits, it begins where the others are.
    fn wake(&mut self, id: usize) {
        if !self.accounts[id].waiting.is_empty() {
            return;
        }
        self.fold(id);
        let account = &mut self.accounts[id];
        account.time = account.time.max(self.virtual_time);
        account.key = account.time;
    }

    /// Counts what was charged meanwhile.
    fn fold(&mut self, id: usize) {
        let account = &mut self.accounts[id];
        let cost = account.meter.0.swap(0, Ordering::Relaxed);
        if cost > 0 {
            let passed = weighted(cost, account.weight);
            account.time = account.time.saturating_add(passed);
        }
    }

    /// Whether an account stands where it belongs; if not, it is put there.
    fn is_current(&mut self, key: u64, id: usize) -> bool {
        self.fold(id);
        if self.accounts[id].time == key {
            return true;
        }
        self.rekey(id);
        false
    }

    fn rekey(&mut self, id: usize) {
        let account = &mut self.accounts[id];
        let (old, new) = ((account.key, id), (account.time, id));
        account.key = account.time;
        if account.waiting.is_empty() || old == new {
            return;
        }
        for (lane, _) in &account.waiting {
            if let Some(set) = self.waiting.get_mut(lane) {
                set.remove(&old);
                set.insert(new);
            }
        }
        self.anywhere.remove(&old);
        self.anywhere.insert(new);
    }

    fn place(&self, id: usize) -> (u64, usize) {
        let account = &self.accounts[id];
        (places_for(account.queued, account.weight), id)
    }

    fn enter_places(&mut self, id: usize) {
        if self.accounts[id].queued > 0 {
            self.places.insert(self.place(id));
        }
    }

    fn forget(&mut self, id: usize) {
        let account = self.accounts.remove(id);
        self.by_name.remove(&account.name);
    }
}

/// How many wait, for a weight of 1; in thousandths.
fn places_for(queued: u32, weight: f64) -> u64 {
    (f64::from(queued) * 1e3 / weight) as u64
}

/// A cost as virtual time. Something always costs something: else many small costs were free for a heavy weight.
fn weighted(cost: u64, weight: f64) -> u64 {
    ((cost as f64 / weight) as u64).max(u64::from(cost > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(names: &[(&str, f64)]) -> (Turns, Vec<usize>) {
        let mut turns = Turns::default();
        let ids = names
            .iter()
            .map(|(name, weight)| turns.account(&Arc::from(*name), *weight))
            .collect();
        (turns, ids)
    }

    /// Gives the next turn on lane 0, charges it, and says whose it was.
    fn turn(turns: &mut Turns, cost: u64) -> usize {
        let (id, _) = turns.least(0).unwrap();
        turns.served(id);
        turns.leave(id, 0);
        turns.meter(id).charge(cost);
        turns.ended(id);
        id
    }

    #[test]
    fn those_of_equal_weight_alternate_and_a_heavier_one_gets_its_share() {
        let (mut turns, ids) = turns(&[("a", 1.0), ("b", 1.0), ("c", 2.0)]);
        for id in &ids {
            (0..40).for_each(|_| turns.enter(*id, 0));
        }
        let mut given = [0; 3];
        for _ in 0..40 {
            given[turn(&mut turns, 1_000)] += 1;
        }
        assert_eq!(given, [10, 10, 20]);
    }

    #[test]
    fn an_account_that_runs_out_in_mid_rotation_leaves_its_turns_to_the_others() {
        let (mut turns, ids) = turns(&[("a", 1.0), ("b", 1.0)]);
        turns.enter(ids[0], 0);
        (0..3).for_each(|_| turns.enter(ids[1], 0));
        let order: Vec<usize> = (0..4).map(|_| turn(&mut turns, 10)).collect();
        assert_eq!(order, [ids[0], ids[1], ids[1], ids[1]]);
        assert_eq!(turns.least(0), None);
        assert!(!turns.waits_on(0));
    }

    #[test]
    fn a_waiter_that_leaves_takes_nothing_with_it() {
        let (mut turns, ids) = turns(&[("a", 1.0), ("b", 1.0)]);
        turns.enter(ids[0], 0);
        turns.enter(ids[0], 1);
        turns.enter(ids[1], 0);
        turns.leave(ids[0], 0);
        assert_eq!(turns.least(0).unwrap().0, ids[1]);
        assert_eq!(turns.least(1).unwrap().0, ids[0]);
        turns.leave(ids[0], 1);
        assert_eq!(turns.least(1), None);
        turns.leave(ids[1], 0);
        assert_eq!(turns.least_anywhere(), None);
    }

    #[test]
    fn idling_is_not_saved_up_and_debts_are_not_forgotten() {
        let (mut turns, ids) = turns(&[("busy", 1.0), ("idle", 1.0)]);
        let (busy, idle) = (ids[0], ids[1]);
        (0..100).for_each(|_| turns.enter(busy, 0));
        (0..50).for_each(|_| {
            turn(&mut turns, 1_000);
        });
        (0..10).for_each(|_| turns.enter(idle, 0));
        let order: Vec<usize> = (0..10).map(|_| turn(&mut turns, 1_000)).collect();
        assert_eq!(order.iter().filter(|id| **id == idle).count(), 5);
        // The idle one's requests are withdrawn; what it has been given is remembered.
        turns.meter(idle).charge(5_000_000);
        (0..5).for_each(|_| turns.leave(idle, 0));
        turns.tidy();
        turns.enter(idle, 0);
        assert_eq!(turn(&mut turns, 1_000), busy);
    }

    #[test]
    fn what_is_charged_while_others_wait_counts_at_the_next_turn() {
        let (mut turns, ids) = turns(&[("a", 1.0), ("b", 1.0)]);
        ids.iter().for_each(|id| turns.enter(*id, 0));
        assert_eq!(turns.least(0).unwrap().0, ids[0]);
        turns.meter(ids[0]).charge(1);
        assert_eq!(turns.least(0).unwrap().0, ids[1]);
        turns.meter(ids[1]).charge(5);
        assert_eq!(turns.least(0).unwrap().0, ids[0]);
        turns.credit(ids[1], 5);
        assert_eq!(turns.least(0).unwrap().0, ids[1]);
    }

    #[test]
    fn the_greediest_is_whoever_has_the_most_places_for_its_weight() {
        let (mut turns, ids) = turns(&[("heavy", 2.0), ("light", 1.0), ("new", 1.0)]);
        (0..6).for_each(|_| turns.enter(ids[0], 0));
        (0..2).for_each(|_| turns.enter(ids[1], 1));
        assert_eq!(turns.greediest("new", 1.0), Some(ids[0]));
        assert_eq!(
            turns.greediest("heavy", 2.0),
            None,
            "it is the greediest itself"
        );
        assert_eq!(
            turns.greediest("light", 1.0),
            None,
            "three for 1 are as many as six for 2"
        );
        (0..3).for_each(|_| turns.leave(ids[0], 0));
        assert_eq!(turns.greediest("new", 1.0), Some(ids[1]));
        turns.account(&Arc::from("light"), 10.0);
        assert_eq!(turns.greediest("new", 1.0), Some(ids[0]));
        (0..3).for_each(|_| turns.leave(ids[0], 0));
        (0..2).for_each(|_| turns.leave(ids[1], 1));
        assert_eq!(turns.greediest("new", 1.0), None);
    }

    #[test]
    fn accounts_that_have_and_owe_nothing_are_forgotten() {
        let mut turns = Turns::default();
        for number in 0..1_000 {
            let id = turns.account(&Arc::from(format!("t{number}")), 1.0);
            turns.enter(id, 0);
            turn(&mut turns, 10);
        }
        let last = turns.account(&Arc::from("last"), 1.0);
        (0..3).for_each(|_| turns.enter(last, 0));
        (0..3).for_each(|_| {
            turn(&mut turns, 100);
        });
        turns.tidy();
        assert_eq!(turns.accounts.len(), 1, "only the last one owes something");
    }
}
