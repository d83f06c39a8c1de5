//! What has to happen so that what runs becomes what the catalog declares: (desired, observed, memory) in, actions out.
//!
//! No I/O, no clock, no chance. The rules, in the order of the code:
//! 1. While the server recovers, nothing happens: agents still hold the truth.
//! 2. What failed is cleared at its agent; who leaves is stopped once its requests are done, or its time is up. One that is said to be where
//!    nobody may be sent is stopped at once.
//! 3. A model that the catalog no longer has leaves, by an operator's order where there is one to drain its node.
//! 4. A replica that is outdated, or on a node that drains, leaves once another one is ready in its stead: one a model at a time, and
//!    never the last ready one for a replacement that has no place.
//! 5. Surplus leaves: first those that are not ready, then those of unreachable nodes, then the newest.
//! 6. What is missing is placed, but for as many as failed lately: those wait.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use llmgw_proto::session::StopHow;
use llmgw_proto::shard::ShardState;

use super::memory::Memory;
use super::observed::Observed;
use super::replicas::{Replica, ShardKey, numbers_taken};
use super::snapshot::NodeState;

/// More replicas of a model than wanted, while one takes over from another.
pub const SURGE_REPLICAS: usize = 1;
/// A replica that just left the pool may still be chosen by a request that looked before.
pub const LEAVE_MIN_MS: u64 = 1_000;

/// What the catalog declares, as far as replicas go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Desired {
    /// Models with profiles, by name.
    pub models: BTreeMap<String, Wanted>,
}

/// One model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    pub replicas: u32,
    /// What each profile makes, by its name.
    pub definitions: BTreeMap<String, String>,
}

/// What only the gateway knows.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    /// Requests on each shard that has any.
    pub requests: BTreeMap<ShardKey, u32>,
    /// How long a replica's requests may take once it leaves.
    pub drain_timeout_ms: u64,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Find a place for a replica, and start it there.
    Place(Place),
    /// Take a replica out of the pool, and let its requests finish.
    Leave { key: ShardKey, why: Why },
    Stop {
        key: ShardKey,
        how: StopHow,
        why: Why,
    },
    /// Tell the agent that its failed shard is understood.
    Clear { key: ShardKey },
    /// Take a node out of use, or put it back.
    OrderNode { node: String, draining: bool },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub model: String,
    pub number: u32,
    /// Nodes where the model failed lately.
    pub avoid: Vec<String>,
    pub why: Missing,
}

/// Why a replica is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// There are fewer than wanted.
    TooFew,
    /// To take over from one that is outdated or on a node that drains.
    Replacement,
}

/// Why a replica leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The catalog has no such model, or none with profiles.
    NotInCatalog,
    /// There are more than wanted.
    Surplus,
    /// Its model or profile is another one now, and a newer replica is ready.
    Outdated,
    /// Its node is taken out of use.
    NodeDrains,
    /// An operator said so.
    Operator,
    /// Its agent says that it drains; nobody here remembers why.
    Reported,
    /// It is at an address that its node has no say over.
    Elsewhere,
}

/// Says what to do now. Saying the same twice does no harm: the caller sends a command once a session.
pub fn reconcile(
    desired: &Desired,
    observed: &Observed,
    memory: &Memory,
    traffic: &Traffic,
) -> Vec<Action> {
    if observed.recovering {
        return Vec::new();
    }
    let mut actions = orders(observed, memory);
    actions.extend(failed(observed));
    let mut staying: BTreeMap<String, Vec<Replica>> = BTreeMap::new();
    for replica in Replica::all(observed, memory) {
        if replica.node_state == NodeState::Lost {
            continue;
        }
        match memory.leaving(&replica.key).is_some() || replica.drains() {
            true => actions.extend(progress(&replica, memory, traffic, observed.now_ms)),
            false if replica.is_elsewhere => actions.push(stops(&replica, Why::Elsewhere)),
            false => staying
                .entry(replica.model().to_owned())
                .or_default()
                .push(replica),
        }
    }
    for (model, replicas) in &staying {
        if !desired.models.contains_key(model) {
            let leave = |replica| undeclared(replica, memory);
            actions.extend(replicas.iter().map(leave));
        }
    }
    for (model, wanted) in &desired.models {
        let replicas = staying.remove(model).unwrap_or_default();
        actions.extend(of_model(model, wanted, &replicas, observed, memory));
    }
    actions
}

fn orders(observed: &Observed, memory: &Memory) -> Vec<Action> {
    let open = memory.orders().filter(|(id, order)| {
        let node = observed.nodes.get(*id);
        node.is_some_and(|node| {
            let is_new = order.told_ms.is_none() || node.draining != order.draining;
            node.session.is_some() && is_new
        })
    });
    open.map(|(node, order)| Action::OrderNode {
        node: node.clone(),
        draining: order.draining,
    })
    .collect()
}

/// Its last words are in the memory by now.
fn failed(observed: &Observed) -> Vec<Action> {
    let mut actions = Vec::new();
    for (node, seen) in &observed.nodes {
        let failed = seen
            .shards
            .iter()
            .filter(|(_, shard)| shard.status.state == ShardState::Failed);
        actions.extend(failed.map(|(shard, _)| Action::Clear {
            key: ShardKey {
                node: node.clone(),
                shard: shard.clone(),
            },
        }));
    }
    actions
}

/// The next step of one that leaves.
fn progress(replica: &Replica, memory: &Memory, traffic: &Traffic, now_ms: u64) -> Option<Action> {
    if replica.state == ShardState::Stopping {
        return None;
    }
    let Some(leaving) = memory.leaving(&replica.key) else {
        return Some(leaves(replica, Why::Reported));
    };
    let passed_ms = now_ms.saturating_sub(leaving.since_ms);
    let requests = traffic.requests.get(&replica.key).copied().unwrap_or(0);
    let is_done = requests == 0 && passed_ms >= LEAVE_MIN_MS;
    let serves = matches!(replica.state, ShardState::Ready | ShardState::Draining);
    let at_once = leaving.at_once || is_forced(replica, memory);
    if !serves || at_once || is_done || passed_ms >= traffic.drain_timeout_ms {
        return Some(stops(replica, leaving.why));
    }
    Some(Action::Leave {
        key: replica.key.clone(),
        why: leaving.why,
    })
}

/// One that never served has nothing to finish.
fn leaves(replica: &Replica, why: Why) -> Action {
    let key = replica.key.clone();
    match replica.state {
        ShardState::Ready | ShardState::Draining => Action::Leave { key, why },
        _ => stops(replica, why),
    }
}

fn stops(replica: &Replica, why: Why) -> Action {
    Action::Stop {
        key: replica.key.clone(),
        how: StopHow::Stop,
        why,
    }
}

/// One of a model that the catalog does not have. Where the catalog is held, the drain that an operator ordered is meant all the same.
fn undeclared(replica: &Replica, memory: &Memory) -> Action {
    let order = memory.node_order(&replica.key.node);
    match order.is_some_and(|order| order.draining) {
        true if is_forced(replica, memory) => stops(replica, Why::NodeDrains),
        true => leaves(replica, Why::NodeDrains),
        false => leaves(replica, Why::NotInCatalog),
    }
}

/// A model of the catalog. `replicas` are those that stay, as things stand.
fn of_model(
    model: &str,
    wanted: &Wanted,
    replicas: &[Replica],
    observed: &Observed,
    memory: &Memory,
) -> Vec<Action> {
    let mut actions = Vec::new();
    let count = wanted.replicas as usize;
    let (mut good, mut old) = (Vec::new(), Vec::new());
    for replica in replicas {
        // What was made from something else makes no difference to one that is about to fail.
        let is_current = wanted.makes(replica) || replica.state == ShardState::Stopping;
        if replica.node_drains && is_forced(replica, memory) {
            actions.push(stops(replica, Why::NodeDrains));
        } else if replica.node_drains && is_overdue(replica, memory, observed.now_ms) {
            actions.push(leaves(replica, Why::NodeDrains));
        } else if !is_current && !replica.is_ready() {
            // It never served, and would only keep the new one from its place.
            actions.push(leaves(replica, Why::Outdated));
        } else if is_current && !replica.node_drains {
            good.push(replica);
        } else {
            old.push(replica);
        }
    }
    let surplus = good.len().saturating_sub(count);
    good.sort_by_key(|replica| order_of_leaving(replica, memory));
    let leaving = good.drain(..surplus);
    actions.extend(leaving.map(|replica| leaves(replica, Why::Surplus)));
    let total = good.len() + old.len();
    let is_serving = |replica: &&&Replica| replica.is_ready() && replica.is_heard();
    let ready = good.iter().filter(is_serving).count();
    let needed = count.saturating_sub(ready);
    let replaced = old.len().saturating_sub(needed);
    old.sort_by_key(|replica| order_of_leaving(replica, memory));
    for replica in &old[..replaced] {
        let why = match wanted.makes(replica) {
            true => Why::NodeDrains,
            false => Why::Outdated,
        };
        actions.push(leaves(replica, why));
    }
    let missing = count - good.len();
    let (missing, why) = match old.is_empty() {
        true => (missing, Missing::TooFew),
        false => {
            let room = (count + SURGE_REPLICAS).saturating_sub(total);
            (missing.min(room), Missing::Replacement)
        }
    };
    actions.extend(placements(model, missing, why, observed, memory));
    actions
}

fn placements(
    model: &str,
    missing: usize,
    why: Missing,
    observed: &Observed,
    memory: &Memory,
) -> Vec<Action> {
    let failures = memory.failures(model);
    let held_back = failures.map_or(0, |failures| failures.held_back(observed.now_ms));
    let taken: BTreeSet<u32> = numbers_taken(observed, memory, model);
    let avoid = memory.avoid(model);
    (0..)
        .filter(|number| !taken.contains(number))
        .take(missing.saturating_sub(held_back as usize))
        .map(|number| {
            Action::Place(Place {
                model: model.to_owned(),
                number,
                avoid: avoid.clone(),
                why,
            })
        })
        .collect()
}

/// The operator waits neither for a replacement nor for requests.
fn is_forced(replica: &Replica, memory: &Memory) -> bool {
    let order = memory.node_order(&replica.key.node);
    order.is_some_and(|order| order.draining && order.force)
}

/// The operator no longer waits for a replacement. Requests finish as ever.
fn is_overdue(replica: &Replica, memory: &Memory, now_ms: u64) -> bool {
    memory.node_order(&replica.key.node).is_some_and(|order| {
        let passed_ms = now_ms.saturating_sub(order.since_ms);
        order.draining && order.timeout_ms.is_some_and(|limit| passed_ms >= limit)
    })
}

/// Who goes first: those that are not ready, then those that nobody confirms, then those on nodes that drain, then the newest. One that
/// serves although its node is unreachable outlives one that only loads: else the pool could be empty.
pub(super) fn order_of_leaving(replica: &Replica, memory: &Memory) -> impl Ord {
    (
        replica.is_ready(),
        replica.is_heard(),
        !replica.node_drains,
        Reverse(memory.ready_since_ms(&replica.key)),
        Reverse(replica.number()),
        replica.key.clone(),
    )
}

/// Replicas that a change of the catalog would stop, of those that run. A rolling change stops none: it replaces them.
pub fn would_stop(
    after: &Desired,
    observed: &Observed,
    memory: &Memory,
) -> (BTreeMap<String, usize>, usize) {
    let mut running: BTreeMap<String, usize> = BTreeMap::new();
    for replica in Replica::all(observed, memory) {
        let stays = memory.leaving(&replica.key).is_none() && !replica.drains();
        if stays && replica.node_state != NodeState::Lost {
            *running.entry(replica.model().to_owned()).or_default() += 1;
        }
    }
    let all = running.values().sum();
    for (model, number) in &mut running {
        let kept = after.models.get(model).map_or(0, |wanted| wanted.replicas);
        *number = number.saturating_sub(kept as usize);
    }
    running.retain(|_, number| *number > 0);
    (running, all)
}

impl Wanted {
    /// Whether this replica is what the catalog declares now.
    fn makes(&self, replica: &Replica) -> bool {
        let spec = &replica.spec;
        self.definitions.get(&spec.profile) == Some(&spec.definition)
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Why::NotInCatalog => "the configuration no longer has its model, or no profiles of it",
            Why::Surplus => "there are more replicas than wanted",
            Why::Outdated => "its model or profile changed",
            Why::NodeDrains => "its node is taken out of use",
            Why::Operator => "an operator stopped it",
            Why::Reported => "its agent says that it drains",
            Why::Elsewhere => "it is said to be at an address that is not for its node to give",
        })
    }
}

#[cfg(test)]
mod tests;
