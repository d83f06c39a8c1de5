//! The fleet as policies see it, made from what agents said: [`Observed`] in, [`Snapshot`] out.
//!
//! What is only sent counts as taken: two replicas placed one after the other must not get the same GPU.

use std::collections::{BTreeMap, BTreeSet};

use llmgw_proto::inventory::adapter::{Adapter as Port, AdapterKind};
use llmgw_proto::inventory::fabric::Standing;
use llmgw_proto::inventory::gpu::{Gpu as Card, Gpus, HealthCode, HealthFlag};
use llmgw_proto::inventory::{Inventory, Reading};
use llmgw_proto::shard::{NOT_GONE, ShardState as Told};

use super::memory::Memory;
use super::observed::{Observed, ObservedNode};
use super::ports::Ports;
use super::replicas::Replica;
use super::snapshot::{
    Adapter, FOREIGN, Gpu, Link, ModelEntry, NODE_GPUS_MAX, Node, NodeState, ProfileEntry, Shard,
    ShardState, Snapshot,
};
use crate::config::{Catalog, UtcTime};

const GIB: f64 = (1u64 << 30) as f64;
const MIB_PER_GIB: f64 = 1024.0;

/// GPUs of the whole fleet, by uuid.
struct Cards {
    /// Those that a node lists already.
    listed: BTreeSet<String>,
    /// Those that replicas have, on whatever node.
    held: BTreeSet<String>,
}

impl Cards {
    fn of(replicas: &[Replica]) -> Cards {
        let held = replicas.iter().flat_map(|replica| &replica.spec.gpus);
        Cards {
            listed: BTreeSet::new(),
            held: held.cloned().collect(),
        }
    }
}

/// The fleet at this moment.
pub fn snapshot(
    catalog: &Catalog,
    observed: &Observed,
    memory: &Memory,
    taken_at: UtcTime,
) -> Snapshot {
    let mut replicas = Replica::all(observed, memory);
    replicas.extend(Replica::not_gone(observed, memory));
    // A lost node's replicas are mourned: they hold nothing that anybody could have.
    replicas.retain(|replica| replica.node_state != NodeState::Lost);
    let mut snapshot = Snapshot {
        taken_at: taken_at.to_string(),
        ..Snapshot::default()
    };
    let mut by_node: BTreeMap<&str, Vec<&Replica>> = BTreeMap::new();
    for replica in &replicas {
        by_node.entry(&replica.key.node).or_default().push(replica);
    }
    let mut cards = Cards::of(&replicas);
    let ports = Ports::of(observed, memory);
    let mut nodes: Vec<(&String, &ObservedNode)> =
        observed.nodes.iter().map(|(id, n)| (id, &**n)).collect();
    // Who speaks has the card: one that came back under another id, or whose cards moved, is not kept from them by what it was before.
    nodes.sort_by_key(|(_, seen)| seen.session.is_none());
    for (id, seen) in nodes {
        let mine = by_node.remove(id.as_str()).unwrap_or_default();
        let mut node = node(seen, &mine, &mut cards);
        node.ports_free = u32::try_from(ports.free(id, seen)).ok();
        // What an operator ordered holds before the node says so itself.
        if seen.session.is_some() {
            node.state = match memory.drains(id, seen.draining) {
                true => NodeState::Draining,
                false => NodeState::Ready,
            };
        }
        snapshot.nodes.insert(id.clone(), node);
    }
    for replica in &replicas {
        add(&mut snapshot, replica, memory);
    }
    let models = catalog.models.iter();
    for model in models.filter(|model| !model.profiles.is_empty()) {
        let entry = ModelEntry {
            source: model.source.clone(),
            labels: model.labels.iter().cloned().collect(),
            replicas: model.replicas,
            profiles: model.profiles.iter().map(ProfileEntry::from).collect(),
        };
        snapshot.models.insert(model.name.to_string(), entry);
    }
    snapshot
}

fn node(seen: &ObservedNode, replicas: &[&Replica], cards: &mut Cards) -> Node {
    let mut node = Node {
        state: seen.state,
        engines: Some(seen.engines.clone()),
        rack: seen.labels.get("rack").cloned(),
        zone: seen.labels.get("zone").cloned(),
        labels: seen.labels.clone(),
        ..Node::default()
    };
    match &seen.inventory {
        Ok(inventory) => describe(&mut node, inventory, replicas, cards),
        Err(why) => node.problem = Some(format!("its inventory can't be read: {why}")),
    }
    let (mut cpus, mut memory_gib) = (0u32, 0.0);
    for replica in replicas {
        cpus = cpus.saturating_add(replica.spec.cpus.unwrap_or(0));
        memory_gib += claimed_gib(replica);
    }
    node.cpus_free = node.cpus.saturating_sub(cpus);
    node.memory_gib_free = (node.memory_gib - memory_gib).max(0.0);
    node
}

fn describe(node: &mut Node, inventory: &Inventory, replicas: &[&Replica], cards: &mut Cards) {
    let cpu = &inventory.host.cpu;
    let threads = cpu.threads.value().map(|threads| u64::from(*threads));
    let available = cpu.available_millis.value().map(|millis| millis / 1_000);
    let cpus = available.or(threads).unwrap_or(0);
    node.cpus = u32::try_from(cpus).unwrap_or(u32::MAX);
    let memory = &inventory.host.memory;
    let total = memory.total_bytes.value().copied().unwrap_or(0);
    let bytes = memory
        .limit_bytes
        .filter(|limit| total == 0 || *limit < total)
        .unwrap_or(total);
    // Two digits are plenty, and a file stays readable.
    node.memory_gib = (bytes as f64 / GIB * 100.0).floor() / 100.0;
    node.fabrics = fabrics(inventory);
    node.adapters = inventory.adapters.iter().filter_map(adapter).collect();
    for adapter in &mut node.adapters {
        let with = inventory.fabrics.iter().find(|fabric| {
            node.fabrics.contains(&fabric.name) && fabric.adapters.contains(&adapter.name)
        });
        adapter.fabric = with.map(|fabric| fabric.name.clone());
    }
    node.gpus = gpus(&inventory.gpus, replicas, cards);
}

/// Those of which it is certain who else is in them, the preferred one first.
fn fabrics(inventory: &Inventory) -> Vec<String> {
    let certain = inventory
        .fabrics
        .iter()
        .filter(|fabric| fabric.ambiguous.is_none());
    let (primary, others): (Vec<_>, Vec<_>) =
        certain.partition(|fabric| fabric.standing == Standing::Primary);
    let mut names: Vec<String> = Vec::new();
    for fabric in primary.into_iter().chain(others) {
        if !names.contains(&fabric.name) {
            names.push(fabric.name.clone());
        }
    }
    names
}

fn adapter(port: &Port) -> Option<Adapter> {
    let link = match port.kind {
        AdapterKind::Infiniband => Link::Infiniband,
        AdapterKind::Roce => Link::Roce,
        _ => return None,
    };
    let rate = port.rate_mbps.value();
    Some(Adapter {
        name: port.name(),
        link,
        rate_gbit: rate.map(|mbps| *mbps as f64 / 1_000.0),
        fabric: None,
    })
}

/// Cards without a uuid or a class can be neither given to anybody nor asked for. One that two agents list (two on one machine) is the
/// first one's: else it would be given away twice. What a replica of the other one has is not to be had from the first either.
fn gpus(gpus: &Gpus, replicas: &[&Replica], cards: &mut Cards) -> Vec<Gpu> {
    let mut listed = Vec::new();
    let mut taken: BTreeSet<u32> = BTreeSet::new();
    for card in &gpus.devices {
        let (Some(uuid), Some(class)) = (card.uuid.value(), card.class.value()) else {
            continue;
        };
        if class.is_empty() || listed.len() == NODE_GPUS_MAX || !cards.listed.insert(uuid.clone()) {
            continue;
        }
        let user = replicas
            .iter()
            .find(|replica| replica.spec.gpus.contains(uuid));
        let fault = match user {
            Some(replica) if replica.state == Told::Failed => Some(format!(
                "held by what is left of {} ({NOT_GONE})",
                replica.spec.replica
            )),
            _ => fault(card).map(|flag| flag.reason.clone()),
        };
        // A slice has its parent's number; here each has one of its own.
        let number = card.index.value().copied();
        let index = number
            .filter(|index| !taken.contains(index))
            .or_else(|| (0..).find(|index| !taken.contains(index)))
            .unwrap_or(u32::MAX);
        taken.insert(index);
        listed.push(Gpu {
            uuid: uuid.clone(),
            index,
            class: class.clone(),
            domain: gpus.domain_of(uuid),
            compute_capability: card.compute_capability.value().map(ToString::to_string),
            healthy: fault.is_none(),
            reason: fault,
            used_by: match user {
                Some(replica) => Some(replica.spec.replica.clone()),
                None => {
                    let is_held = card.has(HealthCode::MemoryHeld) || cards.held.contains(uuid);
                    is_held.then(|| FOREIGN.to_owned())
                }
            },
            memory_free_gib: free_gib(card),
        });
    }
    listed
}

/// What is wrong with the card itself. That somebody has its memory is told by `used_by`.
fn fault(card: &Card) -> Option<&HealthFlag> {
    card.health
        .iter()
        .find(|flag| flag.code != HealthCode::MemoryHeld)
}

fn free_gib(card: &Card) -> Option<f64> {
    let (Reading::Known(total), Reading::Known(used)) =
        (&card.memory.total_mib, &card.memory.used_mib)
    else {
        return None;
    };
    let gib = total.saturating_sub(*used) as f64 / MIB_PER_GIB;
    Some((gib * 10.0).floor() / 10.0)
}

fn claimed_gib(replica: &Replica) -> f64 {
    let bytes = replica.spec.memory_bytes.unwrap_or(0);
    bytes as f64 / GIB
}

/// The same id on two nodes is one replica with two shards here, which is all that the format can say.
fn add(snapshot: &mut Snapshot, replica: &Replica, memory: &Memory) {
    let spec = &replica.spec;
    // One whose id is no `<model>/<number>` came from elsewhere; its GPUs are taken by nobody that we know.
    if replica.number().is_none() || spec.replica != format!("{}/{}", spec.model, number(replica)) {
        let node = snapshot.nodes.get_mut(&replica.key.node);
        for gpu in node.into_iter().flat_map(|node| &mut node.gpus) {
            if gpu.used_by.as_ref() == Some(&spec.replica) {
                gpu.used_by = Some(FOREIGN.to_owned());
            }
        }
        return;
    }
    let state = match memory.leaving(&replica.key) {
        Some(_) if state(replica.state).stays() => ShardState::Draining,
        _ => state(replica.state),
    };
    let shard = Shard {
        node: replica.key.node.clone(),
        cpus: spec.cpus.unwrap_or(0),
        memory_gib: claimed_gib(replica),
        state: Some(state),
    };
    let entry = snapshot.replicas.entry(spec.replica.clone());
    let known = entry.or_insert_with(|| super::snapshot::Replica {
        model: spec.model.clone(),
        profile: spec.profile.clone(),
        state,
        shards: Vec::new(),
    });
    if state.stays() && !known.state.stays() {
        known.state = state;
    }
    known.shards.push(shard);
}

fn number(replica: &Replica) -> u32 {
    replica.number().unwrap_or_default()
}

fn state(state: Told) -> ShardState {
    match state {
        Told::Pending => ShardState::Pending,
        Told::Starting => ShardState::Starting,
        Told::Loading => ShardState::Loading,
        Told::Ready => ShardState::Ready,
        Told::Draining => ShardState::Draining,
        Told::Stopping => ShardState::Stopping,
        Told::Stopped => ShardState::Stopped,
        Told::Failed => ShardState::Failed,
    }
}

#[cfg(test)]
mod tests;
