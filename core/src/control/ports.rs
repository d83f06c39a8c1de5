//! The ports of nodes: which of them an engine may have.

use std::collections::{BTreeMap, BTreeSet};

use super::memory::Memory;
use super::observed::{Observed, ObservedNode};

/// What is taken in the whole fleet.
#[derive(Debug)]
pub struct Ports<'a> {
    memory: &'a Memory,
    /// By address: agents that share one share its ports.
    used: BTreeMap<&'a str, BTreeSet<u16>>,
}

impl<'a> Ports<'a> {
    pub fn of(observed: &'a Observed, memory: &'a Memory) -> Ports<'a> {
        let mut used: BTreeMap<&str, BTreeSet<u16>> = BTreeMap::new();
        for (id, node) in &observed.nodes {
            let reported = node.shards.values().map(|shard| &shard.spec);
            let sent = memory.starts_on(id).map(|start| &start.spec);
            let ports = reported.chain(sent).flat_map(|spec| &spec.ports);
            used.entry(&node.advertise).or_default().extend(ports);
        }
        Ports { memory, used }
    }

    /// How many of a node's ports nothing has.
    pub fn free(&self, id: &str, node: &ObservedNode) -> usize {
        let all = (node.ports.first..=node.ports.last).len();
        all - self.taken(id, node).len()
    }

    /// The least of them.
    pub fn least_free(&self, id: &str, node: &ObservedNode) -> Option<u16> {
        let taken = self.taken(id, node);
        (node.ports.first..=node.ports.last).find(|port| !taken.contains(port))
    }

    /// Those of the node's range that something has, or had when an engine was to have them.
    fn taken(&self, id: &str, node: &ObservedNode) -> BTreeSet<u16> {
        let used = self.used.get(&*node.advertise).into_iter().flatten();
        let refused = self.memory.refused_ports(id);
        let taken = used.copied().chain(refused);
        taken.filter(|port| node.ports.contains(*port)).collect()
    }
}
