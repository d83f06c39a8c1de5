//! What the control plane remembers between two looks at the fleet: starts that no report confirmed, who leaves, what failed.
//!
//! Nothing here survives a restart of the server, and nothing needs to: agents report what runs and what failed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use llmgw_proto::session::SessionId;
use llmgw_proto::shard::{LogLine, ShardSpec, ShardState};

use super::observed::{Observed, ObservedNode};
use super::reconcile::Why;
use super::replicas::ShardKey;

mod news;

pub use news::FailureNews;

/// A start that no report confirms within this time is forgotten, and placed again.
pub const START_CONFIRM_MS: u64 = 10_000;
/// After a model's first failure; doubled with each one of an attempt that followed.
pub const BACKOFF_FIRST_MS: u64 = 5_000;
pub const BACKOFF_MAX_MS: u64 = 300_000;
/// A replica that began after the last failure and is ready for so long ends the row of failures.
pub const BACKOFF_RESET_AFTER_MS: u64 = 60_000;
/// Nodes of a row that are taken last: those of the latest failures.
pub const AVOIDED_NODES_MAX: usize = 8;
/// Failures of a model that are kept for explanations.
pub const FAILURES_KEPT_MAX: usize = 8;
/// Last lines that are kept of a failure.
pub const FAILURE_LINES_MAX: usize = 100;
/// A port that was taken by somebody else is not tried again for so long.
pub const PORT_REFUSED_MS: u64 = 600_000;
/// Ports of a model that may be refused in a row before that counts as a failure like any other.
pub const PORT_REFUSALS_MAX: u32 = 3;
/// What a refusal for a taken port begins with.
const PORT_TAKEN: &str = "port_taken:";
/// What the failure of an engine begins with that ended with its machine.
const REBOOTED: &str = "rebooted:";

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    starts: BTreeMap<ShardKey, Start>,
    leaving: BTreeMap<ShardKey, Leaving>,
    ready_since_ms: BTreeMap<ShardKey, u64>,
    models: BTreeMap<String, Failures>,
    /// Failed shards that are in `models` already, with the agent's time of the failure.
    noted: BTreeMap<ShardKey, u64>,
    /// Shards that were told to start, or were seen before they failed.
    alive: BTreeSet<ShardKey>,
    /// Failures that nobody was told of yet.
    untold: Vec<Untold>,
    orders: BTreeMap<String, NodeOrder>,
    refused_ports: BTreeMap<(String, u16), u64>,
}

/// A shard that an agent was told to start.
#[derive(Clone, Debug)]
pub struct Start {
    pub spec: Arc<ShardSpec>,
    pub sent_ms: u64,
    /// The session that it was sent to; at another one it is sent again.
    pub session: SessionId,
}

/// A replica that is out of the pool for good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaving {
    pub since_ms: u64,
    pub why: Why,
    /// Its requests may not finish.
    pub at_once: bool,
}

/// What an operator wants of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeOrder {
    pub draining: bool,
    pub since_ms: u64,
    /// Then its replicas leave even without replacements.
    pub timeout_ms: Option<u64>,
    /// They stop at once.
    pub force: bool,
    /// When the node was told. What it says before may be about an earlier order.
    pub told_ms: Option<u64>,
    /// The run of the agent that has said so itself. A later run that says otherwise could not write it down, or has another directory.
    pub confirmed_by: Option<String>,
}

impl NodeOrder {
    /// The node says so itself, and has heard of this order: what it was told before is answered within a heartbeat.
    fn is_kept(&self, node: &ObservedNode, now_ms: u64) -> bool {
        let has_answered = |told_ms| {
            let passed = Duration::from_millis(now_ms.saturating_sub(told_ms));
            passed >= node.heartbeat
        };
        node.draining == self.draining && self.told_ms.is_some_and(has_answered)
    }
}

/// A model's failures.
#[derive(Clone, Debug, Default)]
pub struct Failures {
    /// The latest one last.
    pub kept: VecDeque<Failure>,
    /// Attempts in a row that failed. Replicas that fail during one wait are one: nothing was attempted between them.
    pub row: u32,
    /// Taken ports in a row.
    pub port_refusals: u32,
    /// When the row grew, or a port was taken, last.
    pub last_ms: u64,
    /// Until then as many replicas as failed are not placed again.
    pub not_before_ms: u64,
    /// So many failed since the last wait was over.
    pub waiting: u32,
    /// Where the row's failures were, the latest node last.
    avoided: VecDeque<String>,
}

/// What failed, where, and what it said last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub replica: String,
    pub profile: String,
    /// None: it did not get as far as a node.
    pub node: Option<String>,
    /// On the table's clock.
    pub at_ms: u64,
    pub reason: String,
    pub lines: Vec<LogLine>,
}

/// A failure that is to be told, and of which model it is.
#[derive(Clone, Debug)]
struct Untold {
    model: String,
    failure: Failure,
    is_old: bool,
}

impl Failures {
    /// Replicas that are not placed again yet. Those that are missing for another reason are.
    pub fn held_back(&self, now_ms: u64) -> u32 {
        match self.not_before_ms > now_ms {
            true => self.waiting,
            false => 0,
        }
    }

    fn keep(&mut self, failure: Failure) {
        if self.kept.len() == FAILURES_KEPT_MAX {
            self.kept.pop_front();
        }
        self.kept.push_back(failure);
    }

    /// One more replica waits; the wait itself is longer only where it comes after an attempt.
    fn wait(&mut self, node: Option<&String>, now_ms: u64) {
        match self.held_back(now_ms) {
            0 => {
                let doublings = self.row.min(16);
                self.not_before_ms = now_ms + (BACKOFF_FIRST_MS << doublings).min(BACKOFF_MAX_MS);
                self.row += 1;
                self.waiting = 1;
            }
            waiting => self.waiting = waiting + 1,
        }
        let Some(node) = node else { return };
        self.avoided.retain(|known| known != node);
        if self.avoided.len() == AVOIDED_NODES_MAX {
            self.avoided.pop_front();
        }
        self.avoided.push_back(node.clone());
    }

    /// The next failure is a first one. What was kept for explanations stays.
    fn end_row(&mut self) {
        (self.row, self.port_refusals) = (0, 0);
        self.avoided.clear();
    }
}

impl Memory {
    /// Takes in what is reported now. The caller decides nothing from an [`Observed`] that was not taken in.
    pub fn observe(&mut self, observed: &Observed) {
        let now_ms = observed.now_ms;
        self.starts.retain(|key, start| {
            let node = observed.nodes.get(&key.node);
            let is_told = node.is_some_and(|node| node.shards.contains_key(&key.shard));
            !is_told && now_ms.saturating_sub(start.sent_ms) < START_CONFIRM_MS
        });
        self.refused_ports.retain(|_, until_ms| *until_ms > now_ms);
        self.observe_shards(observed);
        self.observe_orders(observed);
        self.end_rows(observed);
    }

    /// A replica that became ready after the last failure, and has been for long enough, shows that the model works.
    fn end_rows(&mut self, observed: &Observed) {
        for (model, failures) in &mut self.models {
            let last_ms = failures.last_ms;
            let shows_it = |(key, since_ms): (&ShardKey, &u64)| {
                *since_ms >= last_ms
                    && observed.now_ms - since_ms >= BACKOFF_RESET_AFTER_MS
                    && model_of(observed, key) == Some(model)
            };
            if failures.row + failures.port_refusals > 0 && self.ready_since_ms.iter().any(shows_it)
            {
                failures.end_row();
            }
        }
    }

    fn observe_shards(&mut self, observed: &Observed) {
        let now_ms = observed.now_ms;
        let mut there = BTreeSet::new();
        for (id, node) in &observed.nodes {
            for (shard, seen) in &node.shards {
                let key = ShardKey {
                    node: id.clone(),
                    shard: shard.clone(),
                };
                match seen.status.state {
                    ShardState::Ready => {
                        self.ready_since_ms.entry(key.clone()).or_insert(now_ms);
                        self.alive.insert(key.clone());
                    }
                    ShardState::Failed => {
                        self.ready_since_ms.remove(&key);
                        self.note_failure(&key, seen, now_ms);
                    }
                    _ => {
                        self.ready_since_ms.remove(&key);
                        self.alive.insert(key.clone());
                    }
                }
                there.insert(key);
            }
        }
        let starts = &self.starts;
        self.leaving
            .retain(|key, _| there.contains(key) || starts.contains_key(key));
        self.ready_since_ms.retain(|key, _| there.contains(key));
        self.noted.retain(|key, _| there.contains(key));
        self.alive
            .retain(|key| there.contains(key) || starts.contains_key(key));
    }

    fn note_failure(&mut self, key: &ShardKey, seen: &super::observed::ObservedShard, now_ms: u64) {
        let status = &seen.status;
        if self.noted.insert(key.clone(), status.since_ms) == Some(status.since_ms) {
            return;
        }
        let is_old = !self.alive.remove(key);
        let reason = match (&status.exit, status.reason.is_empty()) {
            (_, false) => status.reason.clone(),
            (Some(exit), true) => format!("it {exit}"),
            (None, true) => "the agent gave no reason".to_owned(),
        };
        let from = status.log_tail.len().saturating_sub(FAILURE_LINES_MAX);
        let failure = Failure {
            replica: seen.spec.replica.clone(),
            profile: seen.spec.profile.clone(),
            node: Some(key.node.clone()),
            at_ms: now_ms,
            reason,
            lines: status.log_tail[from..].to_vec(),
        };
        if failure.reason.starts_with(PORT_TAKEN) {
            for port in &seen.spec.ports {
                let until_ms = now_ms + PORT_REFUSED_MS;
                self.refused_ports
                    .insert((key.node.clone(), *port), until_ms);
            }
        }
        // One that was to end anyway says nothing about the next one.
        if !self.leaving.contains_key(key) {
            self.take_failure(&seen.spec.model, failure, is_old, now_ms);
        }
    }

    /// Notes a failure of a model: the next attempt waits, and goes elsewhere first. Neither after one that its machine took along, which
    /// says nothing about the model, nor after the first few taken ports.
    pub fn failed(&mut self, model: &str, failure: Failure, now_ms: u64) {
        self.take_failure(model, failure, false, now_ms);
    }

    fn take_failure(&mut self, model: &str, failure: Failure, is_old: bool, now_ms: u64) {
        self.untold.push(Untold {
            model: model.to_owned(),
            failure: failure.clone(),
            is_old,
        });
        let failures = self.models.entry(model.to_owned()).or_default();
        if !failure.reason.starts_with(REBOOTED) {
            let is_port = failure.reason.starts_with(PORT_TAKEN);
            failures.port_refusals += u32::from(is_port);
            failures.last_ms = now_ms;
            if !is_port || failures.port_refusals > PORT_REFUSALS_MAX {
                failures.wait(failure.node.as_ref(), now_ms);
            }
        }
        failures.keep(failure);
    }

    fn observe_orders(&mut self, observed: &Observed) {
        self.orders.retain(|id, order| {
            let Some(node) = observed.nodes.get(id) else {
                return false;
            };
            if node.session.is_none() {
                return true;
            }
            if order.is_kept(node, observed.now_ms) {
                order.confirmed_by = Some(node.run.clone());
                // An undrain is done once the node says so.
                return order.draining;
            }
            // A node that was put back into use by somebody else is in use. Another run only does not know: it is told again.
            let is_confirmed = order.confirmed_by.as_ref() == Some(&node.run);
            !is_confirmed || node.draining == order.draining
        });
    }

    // Starts.

    pub fn starts(&self) -> impl Iterator<Item = &Start> {
        self.starts.values()
    }

    pub fn starts_on<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a Start> {
        let first = ShardKey {
            node: node.to_owned(),
            shard: String::new(),
        };
        let on_node = move |(key, _): &(&ShardKey, &Start)| key.node == node;
        let starts = self.starts.range(first..).take_while(on_node);
        starts.map(|(_, start)| start)
    }

    pub fn start(&mut self, node: &str, start: Start) {
        let key = ShardKey {
            node: node.to_owned(),
            shard: start.spec.shard.clone(),
        };
        self.alive.insert(key.clone());
        self.starts.insert(key, start);
    }

    /// Starts that went to a session that is no more, with the node and the session that it has now.
    pub fn starts_to_repeat(
        &mut self,
        observed: &Observed,
    ) -> Vec<(String, SessionId, Arc<ShardSpec>)> {
        let mut again = Vec::new();
        for (key, start) in &mut self.starts {
            let session = observed.nodes.get(&key.node).and_then(|node| node.session);
            if let Some(session) = session.filter(|session| *session != start.session) {
                start.session = session;
                start.sent_ms = observed.now_ms;
                again.push((key.node.clone(), session, start.spec.clone()));
            }
        }
        again
    }

    // Who leaves.

    pub fn leaving(&self, key: &ShardKey) -> Option<&Leaving> {
        self.leaving.get(key)
    }

    /// From now on this replica is out of the pool. What was said first stays, but for the hurry.
    pub fn leave(&mut self, key: &ShardKey, why: Why, at_once: bool, now_ms: u64) {
        let leaving = self.leaving.entry(key.clone()).or_insert(Leaving {
            since_ms: now_ms,
            why,
            at_once,
        });
        leaving.at_once |= at_once;
    }

    /// Since when it is known to be ready.
    pub fn ready_since_ms(&self, key: &ShardKey) -> Option<u64> {
        self.ready_since_ms.get(key).copied()
    }

    // Nodes.

    pub fn order(&mut self, node: &str, order: NodeOrder) {
        self.orders.insert(node.to_owned(), order);
    }

    /// The node was told what is wanted of it.
    pub fn told(&mut self, node: &str, now_ms: u64) {
        if let Some(order) = self.orders.get_mut(node) {
            order.told_ms.get_or_insert(now_ms);
        }
    }

    pub fn node_order(&self, node: &str) -> Option<&NodeOrder> {
        self.orders.get(node)
    }

    pub fn orders(&self) -> impl Iterator<Item = (&String, &NodeOrder)> {
        self.orders.iter()
    }

    /// Whether a node is to be out of use, given what it says itself.
    pub fn drains(&self, node: &str, says_so: bool) -> bool {
        self.orders
            .get(node)
            .map_or(says_so, |order| order.draining)
    }

    // Failures.

    pub fn failures(&self, model: &str) -> Option<&Failures> {
        self.models.get(model)
    }

    /// The failures since this was asked last, each of them once.
    pub fn take_news(&mut self, now_ms: u64) -> Vec<FailureNews> {
        let untold = std::mem::take(&mut self.untold);
        let news = untold.into_iter().map(|untold| {
            let failures = self.models.get(&untold.model);
            let not_before_ms = failures.map_or(0, |failures| failures.not_before_ms);
            FailureNews {
                model: untold.model,
                failure: untold.failure,
                is_old: untold.is_old,
                wait_ms: not_before_ms.saturating_sub(now_ms),
            }
        });
        news.collect()
    }

    /// Nodes where this model failed in the current row, by name.
    pub fn avoid(&self, model: &str) -> Vec<String> {
        let failures = self.models.get(model);
        let avoided = failures.into_iter().flat_map(|failures| &failures.avoided);
        let mut nodes: Vec<String> = avoided.cloned().collect();
        nodes.sort_unstable();
        nodes
    }

    /// A model, or what renders it, is not what it was: what failed before is kept for explanations, and nothing waits for it.
    pub fn forgive(&mut self, model: &str) {
        if let Some(failures) = self.models.get_mut(model) {
            failures.end_row();
            (failures.not_before_ms, failures.waiting) = (0, 0);
        }
    }

    /// Forgets the failures of models that are no more.
    pub fn retain_models(&mut self, is_there: impl Fn(&str) -> bool) {
        self.models.retain(|model, _| is_there(model));
    }

    /// Ports of a node that somebody else had lately.
    pub fn refused_ports(&self, node: &str) -> impl Iterator<Item = u16> {
        let of_node = (node.to_owned(), 0)..=(node.to_owned(), u16::MAX);
        let refused = self.refused_ports.range(of_node);
        refused.map(|((_, port), _)| *port)
    }
}

fn model_of<'a>(observed: &'a Observed, key: &ShardKey) -> Option<&'a str> {
    let node = observed.nodes.get(&key.node)?;
    Some(&node.shards.get(&key.shard)?.spec.model)
}

#[cfg(test)]
mod tests;
