//! A complete place for a job, with what policies may know about it.

use std::collections::{BTreeMap, BTreeSet};

use llmgw_plugins::CandidateView;
use serde::Serialize;

use super::fit::Taken;
use super::need::Need;
use crate::control::snapshot::{Gpu, NodeFacts, Snapshot, count};

/// A node that can carry its part of the job.
#[derive(Debug)]
pub(super) struct Place<'a> {
    pub facts: &'a NodeFacts<'a>,
    /// Position in [`Need::classes`].
    pub class: Option<usize>,
    /// What it would give, by index.
    pub gpus: Vec<&'a Gpu>,
}

/// One node, or a gang of them; the fields are those of a policy's `candidate`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// By name; the first one is the leader.
    pub nodes: Vec<String>,
    /// The GPUs on each node, in the order of `nodes`; empty lists for CPU.
    pub taken: Vec<Vec<Taken>>,
    /// Class of the GPUs.
    pub gpu_class: Option<String>,
    pub gpus: u32,
    pub domains: u32,
    pub domains_filled: u32,
    pub gpu_after: f64,
    pub cpu_after: f64,
    pub frag_delta: f64,
    pub fabrics: u32,
    pub same_node: u32,
    pub same_rack: u32,
    pub same_zone: u32,
    pub cached: Option<f64>,
}

/// Where the model's other replicas are.
#[derive(Debug)]
pub(super) struct Surroundings<'a> {
    model: &'a str,
    others: Vec<Neighbour<'a>>,
}

#[derive(Debug)]
struct Neighbour<'a> {
    nodes: BTreeSet<&'a str>,
    racks: BTreeSet<&'a str>,
    zones: BTreeSet<&'a str>,
}

/// What taking GPUs of one node does to its NVLink domains.
#[derive(Debug, Default)]
struct Linked {
    touched: u32,
    filled: u32,
    /// Domains that were whole and no longer are.
    broken: u32,
}

impl<'a> Surroundings<'a> {
    pub fn of(snapshot: &'a Snapshot, model: &'a str) -> Self {
        let others = snapshot
            .replicas
            .values()
            .filter(|replica| replica.model == model && replica.state.stays());
        let others = others
            .map(|replica| {
                let nodes: BTreeSet<&str> = replica
                    .shards
                    .iter()
                    .map(|shard| shard.node.as_str())
                    .collect();
                let known = || nodes.iter().filter_map(|id| snapshot.nodes.get(*id));
                Neighbour {
                    racks: known().filter_map(|node| node.rack.as_deref()).collect(),
                    zones: known().filter_map(|node| node.zone.as_deref()).collect(),
                    nodes,
                }
            })
            .collect();
        Surroundings { model, others }
    }

    fn near(&self, is_near: impl Fn(&Neighbour<'_>) -> bool) -> u32 {
        count(self.others.iter().filter(|other| is_near(other)).count())
    }
}

impl Candidate {
    pub(super) fn of(need: &Need, gang: &[&Place<'_>], around: &Surroundings<'_>) -> Candidate {
        let (mut gpus, mut free_after, mut cpus, mut cpus_free_after) = (0, 0, 0, 0u32);
        let mut linked = Linked::default();
        for place in gang {
            let facts = place.facts;
            gpus += facts.node.gpus.len();
            free_after += facts.gpus_free as usize - place.gpus.len();
            cpus += facts.node.cpus;
            cpus_free_after += facts.node.cpus_free - need.cpus.unwrap_or(0);
            linked.add(&facts.node.gpus, &place.gpus);
        }
        let nodes = || gang.iter().map(|place| place.facts.node);
        let near = |others: &BTreeSet<&str>, own: &[Option<&str>]| {
            own.iter().flatten().any(|own| others.contains(own))
        };
        let ids: Vec<_> = gang.iter().map(|place| Some(place.facts.id)).collect();
        let racks: Vec<_> = nodes().map(|node| node.rack.as_deref()).collect();
        let zones: Vec<_> = nodes().map(|node| node.zone.as_deref()).collect();
        Candidate {
            nodes: gang.iter().map(|place| place.facts.id.to_owned()).collect(),
            taken: gang.iter().map(|place| taken(&place.gpus)).collect(),
            gpu_class: gang[0].class.and_then(|at| need.classes.get(at)).cloned(),
            gpus: need.gpus * need.nodes,
            domains: linked.touched,
            domains_filled: linked.filled,
            gpu_after: share(gpus - free_after, gpus),
            cpu_after: share((cpus - cpus_free_after) as usize, cpus as usize),
            frag_delta: f64::from(linked.broken) - f64::from(linked.filled),
            fabrics: fabrics(gang),
            same_node: around.near(|other| near(&other.nodes, &ids)),
            same_rack: around.near(|other| near(&other.racks, &racks)),
            same_zone: around.near(|other| near(&other.zones, &zones)),
            cached: cached(gang, around.model),
        }
    }

    pub fn view(&self) -> CandidateView<'_> {
        CandidateView {
            nodes: &self.nodes,
            gpus: self.gpus,
            domains: self.domains,
            domains_filled: self.domains_filled,
            gpu_after: self.gpu_after,
            cpu_after: self.cpu_after,
            frag_delta: self.frag_delta,
            fabrics: self.fabrics,
            same_node: self.same_node,
            same_rack: self.same_rack,
            same_zone: self.same_zone,
            cached: self.cached,
        }
    }
}

impl Linked {
    /// A card without NVLink is touched as a domain of its own, but can neither be broken up nor filled: else cards on PCIe
    /// would look better than whole domains.
    fn add(&mut self, all: &[Gpu], taken: &[&Gpu]) {
        let alone = taken.iter().filter(|gpu| gpu.domain.is_none()).count();
        self.touched += count(alone);
        let mut domains: BTreeMap<u32, usize> = BTreeMap::new();
        for number in taken.iter().filter_map(|gpu| gpu.domain) {
            *domains.entry(number).or_default() += 1;
        }
        for (number, takes) in domains {
            let members = all.iter().filter(|gpu| gpu.domain == Some(number));
            let (size, free) = members.fold((0, 0), |(size, free), gpu| {
                (size + 1, free + usize::from(gpu.free()))
            });
            self.touched += 1;
            if size == 1 {
                continue;
            }
            self.filled += u32::from(takes == free);
            self.broken += u32::from(free == size && takes < free);
        }
    }
}

fn taken(gpus: &[&Gpu]) -> Vec<Taken> {
    let one = |gpu: &&Gpu| Taken {
        index: gpu.index,
        uuid: gpu.uuid.clone(),
    };
    gpus.iter().map(one).collect()
}

/// GPUs that are broken or held count as in use: nobody else can have them.
fn share(used: usize, all: usize) -> f64 {
    match all {
        0 => 0.0,
        all => used as f64 / all as f64,
    }
}

/// 1 where all nodes have a fabric in common, which a gang always does; 0 where none is known.
fn fabrics(gang: &[&Place<'_>]) -> u32 {
    let lists: Vec<&Vec<String>> = gang.iter().map(|place| &place.facts.node.fabrics).collect();
    let common = |fabric: &&String| lists.iter().all(|list| list.contains(fabric));
    if lists[0].iter().any(|fabric| common(&fabric)) {
        return 1;
    }
    let preferred: BTreeSet<&String> = lists.iter().filter_map(|list| list.first()).collect();
    count(preferred.len())
}

/// Share of the nodes that hold the weights; not known where one of them does not say.
fn cached(gang: &[&Place<'_>], model: &str) -> Option<f64> {
    let mut holding = 0;
    for place in gang {
        let models = place.facts.node.cached.as_ref()?;
        holding += usize::from(models.iter().any(|name| name == model));
    }
    Some(share(holding, gang.len()))
}
