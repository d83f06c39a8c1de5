//! The queue of one band: tenants take turns by weight, the flows of a tenant take turns among themselves, and within a
//! flow the one that arrived first goes first.
//!
//! Two levels, so that a tenant gains nothing by splitting itself into many flows.

use std::collections::BTreeSet;
use std::sync::Arc;

use foldhash::HashMap;

use super::turns::{LaneId, Meter, Standing, Turns};

/// A waiting request, numbered in the order of arrival.
pub type Ticket = u64;

/// The flow of a tenant whose policy splits it into none.
const WHOLE_TENANT: &str = "";

/// Whose a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    tenant: usize,
    flow: usize,
}

/// What a member's running request is charged to.
#[derive(Debug, Clone)]
pub struct Meters {
    tenant: Meter,
    flow: Meter,
}

impl Meters {
    pub fn charge(&self, cost: u64) {
        self.tenant.charge(cost);
        self.flow.charge(cost);
    }
}

/// Who would go next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Next {
    pub ticket: Ticket,
    /// The tenant's virtual time.
    pub time: u64,
}

/// The waiting requests of one band, over all replicas of a pool.
#[derive(Default)]
pub struct Rotation {
    tenants: Turns,
    /// By the tenant's number.
    flows: HashMap<usize, Flows>,
    /// The name of a tenant in one piece; kept so that it is not made for every request.
    whole: Option<Arc<str>>,
}

#[derive(Default)]
struct Flows {
    turns: Turns,
    /// By flow and place.
    queues: HashMap<(usize, LaneId), BTreeSet<Ticket>>,
}

impl Rotation {
    /// The member that a tenant and a key within it name.
    pub fn member(&mut self, tenant: &Arc<str>, weight: f64, key: Option<&Arc<str>>) -> Member {
        self.tenants.account(tenant, weight);
        self.known_member(tenant, weight, key)
    }

    /// The same for a request that has waited: a tenant that is there keeps its present weight.
    pub fn known_member(
        &mut self,
        tenant: &Arc<str>,
        weight: f64,
        key: Option<&Arc<str>>,
    ) -> Member {
        let known = self.tenants.known_account(tenant, weight);
        let whole = self.whole.get_or_insert_with(|| Arc::from(WHOLE_TENANT));
        let flows = self.flows.entry(known).or_default();
        let flow = flows.turns.account(key.unwrap_or(whole), 1.0);
        Member {
            tenant: known,
            flow,
        }
    }

    /// The newest request of the tenant that has the most places for its weight, if the newcomer's would have fewer with
    /// one more.
    pub fn displaced_by(&self, newcomer: &str, weight: f64) -> Option<Ticket> {
        let greediest = self.tenants.greediest(newcomer, weight)?;
        let queues = self.flows.get(&greediest)?.queues.values();
        queues.filter_map(|queue| queue.last().copied()).max()
    }

    pub fn push(&mut self, member: Member, lane: LaneId, ticket: Ticket) {
        let flows = self.flows.entry(member.tenant).or_default();
        let queue = flows.queues.entry((member.flow, lane)).or_default();
        if queue.insert(ticket) {
            flows.turns.enter(member.flow, lane);
            self.tenants.enter(member.tenant, lane);
        }
    }

    pub fn remove(&mut self, member: Member, lane: LaneId, ticket: Ticket) {
        let Some(flows) = self.flows.get_mut(&member.tenant) else {
            return;
        };
        let Some(queue) = flows.queues.get_mut(&(member.flow, lane)) else {
            return;
        };
        if queue.remove(&ticket) {
            if queue.is_empty() {
                flows.queues.remove(&(member.flow, lane));
            }
            flows.turns.leave(member.flow, lane);
            self.tenants.leave(member.tenant, lane);
        }
    }

    pub fn waits_on(&self, lane: LaneId) -> bool {
        self.tenants.waits_on(lane)
    }

    /// Who goes next on this replica.
    pub fn next(&mut self, lane: LaneId) -> Option<Next> {
        let (tenant, time) = self.tenants.least(lane)?;
        self.first_of(tenant, lane)
            .map(|ticket| Next { ticket, time })
    }

    /// Who would go next, wherever it waits.
    pub fn next_anywhere(&mut self) -> Option<Next> {
        let (tenant, time, lane) = self.tenants.least_anywhere()?;
        self.first_of(tenant, lane)
            .map(|ticket| Next { ticket, time })
    }

    /// A request begins to be served: asked before it leaves, where it waited.
    pub fn served(&mut self, member: Member) -> Meters {
        self.tenants.served(member.tenant);
        let flows = self.flows.entry(member.tenant).or_default();
        flows.turns.served(member.flow);
        Meters {
            tenant: self.tenants.meter(member.tenant),
            flow: flows.turns.meter(member.flow),
        }
    }

    pub fn ended(&mut self, member: Member) {
        self.tenants.ended(member.tenant);
        if let Some(flows) = self.flows.get_mut(&member.tenant) {
            flows.turns.ended(member.flow);
        }
    }

    /// Gives back what was charged too much.
    pub fn credit(&mut self, member: Member, cost: u64) {
        self.tenants.credit(member.tenant, cost);
        if let Some(flows) = self.flows.get_mut(&member.tenant) {
            flows.turns.credit(member.flow, cost);
        }
    }

    /// Forgets tenants and flows that have nothing and owe nothing.
    pub fn tidy(&mut self) {
        self.tenants.tidy();
        let tenants = &self.tenants;
        self.flows.retain(|tenant, flows| {
            // What a flow owes its tenant's other flows is forgotten once it has nothing: there may be one for each session.
            flows.turns.forget_idle();
            tenants.contains(*tenant)
        });
    }

    pub fn is_empty(&self) -> bool {
        self.tenants.is_empty()
    }

    /// Every tenant, by name.
    pub fn tenants(&self) -> Vec<Standing> {
        self.tenants.standings()
    }

    fn first_of(&mut self, tenant: usize, lane: LaneId) -> Option<Ticket> {
        let flows = self.flows.get_mut(&tenant)?;
        let (flow, _) = flows.turns.least(lane)?;
        flows.queues.get(&(flow, lane))?.first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Waiting {
        rotation: Rotation,
        members: HashMap<Ticket, Member>,
        last: Ticket,
    }

    impl Waiting {
        fn new() -> Waiting {
            Waiting {
                rotation: Rotation::default(),
                members: HashMap::default(),
                last: 0,
            }
        }

        fn push(&mut self, tenant: &str, key: Option<&str>, lane: LaneId) -> Ticket {
            let key = key.map(Arc::from);
            let member = self.rotation.member(&Arc::from(tenant), 1.0, key.as_ref());
            self.last += 1;
            self.members.insert(self.last, member);
            self.rotation.push(member, lane, self.last);
            self.last
        }

        fn take(&mut self, lane: LaneId, cost: u64) -> Option<Ticket> {
            let ticket = self.rotation.next(lane)?.ticket;
            let member = self.members[&ticket];
            let meters = self.rotation.served(member);
            self.rotation.remove(member, lane, ticket);
            meters.charge(cost);
            self.rotation.ended(member);
            Some(ticket)
        }
    }

    #[test]
    fn within_a_flow_the_first_to_arrive_goes_first() {
        let mut waiting = Waiting::new();
        let tickets: Vec<Ticket> = (0..5).map(|_| waiting.push("a", None, 0)).collect();
        // It waited elsewhere meanwhile, and keeps its place.
        let member = waiting.members[&tickets[1]];
        waiting.rotation.remove(member, 0, tickets[1]);
        waiting.rotation.push(member, 0, tickets[1]);
        let served: Vec<Ticket> = (0..5).map(|_| waiting.take(0, 10).unwrap()).collect();
        assert_eq!(served, tickets);
        assert_eq!(waiting.take(0, 10), None);
    }

    #[test]
    fn a_tenant_of_many_flows_gets_no_more_than_a_tenant_of_one() {
        let mut waiting = Waiting::new();
        let mut split = Vec::new();
        for number in 0..20 {
            let key = format!("session-{}", number % 10);
            split.push(waiting.push("split", Some(&key), 0));
            waiting.push("whole", None, 0);
        }
        let served: Vec<Ticket> = (0..20).map(|_| waiting.take(0, 10).unwrap()).collect();
        assert_eq!(
            served
                .iter()
                .filter(|ticket| split.contains(ticket))
                .count(),
            10
        );
    }

    #[test]
    fn the_flows_of_a_tenant_take_turns() {
        let mut waiting = Waiting::new();
        let long: Vec<Ticket> = (0..5).map(|_| waiting.push("a", Some("long"), 0)).collect();
        let short = waiting.push("a", Some("short"), 0);
        assert_eq!(waiting.take(0, 1_000), Some(long[0]));
        assert_eq!(waiting.take(0, 10), Some(short));
        assert_eq!(waiting.take(0, 10), Some(long[1]));
    }

    #[test]
    fn nothing_is_left_when_all_have_gone() {
        let mut waiting = Waiting::new();
        for number in 0..100 {
            waiting.push(&format!("t{number}"), Some("flow"), number % 3);
        }
        for lane in 0..3 {
            while waiting.take(lane, 0).is_some() {}
        }
        waiting.rotation.tidy();
        assert!(waiting.rotation.is_empty() && waiting.rotation.flows.is_empty());
    }
}
