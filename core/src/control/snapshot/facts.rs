//! What follows from a node's data: the one function behind `gpus_free` and the rest of a policy's `node`.

use std::collections::BTreeMap;

use llmgw_plugins::{Domain, NodeView};

use super::{Gpu, Node};

/// A node as policies see it.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeFacts<'a> {
    pub id: &'a str,
    pub node: &'a Node,
    pub labels: Vec<(String, String)>,
    /// The class of most of its GPUs; of equals the first in the alphabet.
    pub gpu_class: Option<&'a str>,
    pub gpus_free: u32,
    /// By number; a GPU without NVLink is a domain of its own.
    pub domains: Vec<Domain>,
}

impl<'a> NodeFacts<'a> {
    pub fn of(id: &'a str, node: &'a Node) -> Self {
        NodeFacts {
            id,
            node,
            labels: pairs(&node.labels),
            gpu_class: main_class(&node.gpus),
            gpus_free: count(node.gpus.iter().filter(|gpu| gpu.free()).count()),
            domains: domains(&node.gpus),
        }
    }

    pub fn view(&self) -> NodeView<'_> {
        let node = self.node;
        NodeView {
            id: self.id,
            labels: &self.labels,
            rack: node.rack.as_deref(),
            zone: node.zone.as_deref(),
            fabric: node.fabrics.first().map(String::as_str),
            gpu_class: self.gpu_class,
            gpus: count(node.gpus.len()),
            gpus_free: self.gpus_free,
            domains: &self.domains,
            cpus: node.cpus,
            cpus_free: node.cpus_free,
            memory_gib_free: node.memory_gib_free,
            state: node.state.as_str(),
        }
    }
}

/// Labels in the shape that views take.
pub(crate) fn pairs(labels: &BTreeMap<String, String>) -> Vec<(String, String)> {
    labels
        .iter()
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

pub(crate) fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn main_class(gpus: &[Gpu]) -> Option<&str> {
    let mut classes: BTreeMap<&str, usize> = BTreeMap::new();
    for gpu in gpus {
        *classes.entry(&gpu.class).or_default() += 1;
    }
    // The last of equals wins, so the alphabet is walked backwards.
    let most = classes.iter().rev().max_by_key(|(_, number)| **number);
    most.map(|(class, _)| *class)
}

fn domains(gpus: &[Gpu]) -> Vec<Domain> {
    let mut linked: BTreeMap<u32, Domain> = BTreeMap::new();
    let mut alone = Vec::new();
    for gpu in gpus {
        let free = u32::from(gpu.free());
        match gpu.domain {
            Some(number) => {
                let domain = linked.entry(number).or_default();
                domain.gpus += 1;
                domain.free += free;
            }
            None => alone.push(Domain { gpus: 1, free }),
        }
    }
    linked.into_values().chain(alone).collect()
}
