//! Which adapters of this node make one fabric: the operator's labels first, then what the adapters themselves say.

use std::collections::{BTreeMap, BTreeSet};

use llmgw_proto::inventory::adapter::AdapterKind;
use llmgw_proto::inventory::fabric::{DEFAULT_PREFIX, FabricDecision, Standing};
use llmgw_proto::inventory::{Adapter, Fabric};

/// `fabrics` of agent.yaml: the operator's name for some adapters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FabricLabel {
    pub name: String,
    /// `mlx5_0`, or `mlx4_0:2`.
    pub adapters: Vec<String>,
}

/// An NVLink clique of several nodes, as the GPUs report it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct MnnvlClique {
    pub cluster_uuid: String,
    pub clique: u32,
}

/// The fabrics of this node, and what is wrong with the labels.
pub fn fabrics(
    labels: &[FabricLabel],
    adapters: &[Adapter],
    cliques: &[MnnvlClique],
) -> (Vec<Fabric>, Vec<String>) {
    let mut problems = Vec::new();
    let mut fabrics: Vec<Fabric> = labels
        .iter()
        .map(|label| of_label(label, adapters, &mut problems))
        .collect();
    fabrics.extend(cliques.iter().map(of_clique));
    let rest: Vec<&Adapter> = adapters
        .iter()
        .filter(|adapter| adapter.is_usable())
        .filter(|adapter| !labels.iter().any(|label| names(label, adapter)))
        .collect();
    fabrics.extend(of_subnets(&rest));
    fabrics.extend(of_networks(&rest));
    rank(&mut fabrics, adapters);
    (fabrics, problems)
}

/// A label may name the device or the port.
fn names(label: &FabricLabel, adapter: &Adapter) -> bool {
    label.adapters.iter().any(|name| {
        *name == adapter.name()
            || *name == adapter.device
            || Some(name) == with_port(adapter).as_ref()
    })
}

/// `mlx5_0:1`, which is the same as `mlx5_0`.
fn with_port(adapter: &Adapter) -> Option<String> {
    Some(format!("{}:{}", adapter.device, adapter.port?))
}

fn of_label(label: &FabricLabel, adapters: &[Adapter], problems: &mut Vec<String>) -> Fabric {
    let fabric = &label.name;
    for name in &label.adapters {
        let one = FabricLabel {
            name: fabric.clone(),
            adapters: vec![name.clone()],
        };
        let mut found = adapters
            .iter()
            .filter(|adapter| names(&one, adapter))
            .peekable();
        if found.peek().is_none() {
            problems.push(format!(
                "fabric {fabric} names adapter {name}, which this node does not have"
            ));
        }
        for adapter in found.filter(|adapter| !adapter.is_usable()) {
            let why = adapter.reasons.first().map_or("", |reason| &reason.detail);
            problems.push(format!("adapter {name} of fabric {fabric}: {why}"));
        }
    }
    let members: Vec<&Adapter> = adapters
        .iter()
        .filter(|adapter| adapter.is_usable() && names(label, adapter))
        .collect();
    let kinds: BTreeSet<&str> = members.iter().map(|member| member.kind.as_str()).collect();
    if kinds.len() > 1 {
        let kinds: Vec<&str> = kinds.into_iter().collect();
        problems.push(format!(
            "fabric {fabric} mixes {}, with which NCCL fails",
            kinds.join(" and ")
        ));
    }
    Fabric {
        name: fabric.clone(),
        adapters: members.iter().map(|member| member.name()).collect(),
        decided_by: FabricDecision::OperatorLabel,
        ambiguous: None,
        standing: Standing::Primary,
        standing_reason: "labelled by the operator".to_owned(),
    }
}

fn of_clique(clique: &MnnvlClique) -> Fabric {
    Fabric {
        name: format!("mnnvl:{}.{}", clique.cluster_uuid, clique.clique),
        adapters: Vec::new(),
        decided_by: FabricDecision::MnnvlClique {
            cluster_uuid: clique.cluster_uuid.clone(),
            clique: clique.clique,
        },
        ambiguous: None,
        standing: Standing::Primary,
        standing_reason: "NVLink between nodes".to_owned(),
    }
}

/// InfiniBand and Omni-Path, by prefix and subnet manager.
fn of_subnets(adapters: &[&Adapter]) -> Vec<Fabric> {
    type Key = (&'static str, Option<String>, Option<u32>);
    let mut groups: BTreeMap<Key, Vec<&Adapter>> = BTreeMap::new();
    for adapter in adapters {
        let short = match adapter.kind {
            AdapterKind::Infiniband => "ib",
            AdapterKind::OmniPath => "opa",
            _ => continue,
        };
        let key = (
            short,
            adapter.subnet.value().cloned(),
            adapter.sm_lid.value().copied(),
        );
        groups.entry(key).or_default().push(adapter);
    }
    let one = |((short, prefix, sm_lid), members): (Key, Vec<&Adapter>)| {
        let manager = sm_lid.map_or("unknown".to_owned(), |lid| format!("{lid:#x}"));
        let lids: Vec<u32> = members
            .iter()
            .filter_map(|member| member.lid.value().copied())
            .collect();
        let shown = prefix.clone().unwrap_or_else(|| "unknown".to_owned());
        Fabric {
            name: format!("{short}:{shown}/sm-{manager}"),
            adapters: members.iter().map(|member| member.name()).collect(),
            ambiguous: doubt(prefix.as_deref(), sm_lid, &lids),
            decided_by: FabricDecision::SubnetAndManager {
                prefix: shown,
                sm_lid,
                lids,
            },
            standing: Standing::Unclear,
            standing_reason: String::new(),
        }
    };
    groups.into_iter().map(one).collect()
}

/// Why a subnet is not told from others of its name.
fn doubt(prefix: Option<&str>, sm_lid: Option<u32>, lids: &[u32]) -> Option<String> {
    let mut seen = BTreeSet::new();
    let twice = lids.iter().find(|lid| !seen.insert(**lid));
    if let Some(lid) = twice {
        return Some(format!(
            "two of its ports have LID {lid:#x}, so they are in two subnets"
        ));
    }
    match (prefix, sm_lid) {
        (None, _) => Some("its subnet prefix cannot be read".to_owned()),
        (_, None) => Some("its subnet manager is not known".to_owned()),
        (Some(DEFAULT_PREFIX), _) => {
            Some("every InfiniBand subnet has this prefix by default".to_owned())
        }
        _ => None,
    }
}

/// RoCE, by IP subnet. Of an address whose subnet is not known nothing else is in it.
fn of_networks(adapters: &[&Adapter]) -> Vec<Fabric> {
    let mut groups: BTreeMap<(String, Option<String>), Vec<&Adapter>> = BTreeMap::new();
    for adapter in adapters {
        let (AdapterKind::Roce, Some(address)) = (adapter.kind, adapter.address.value()) else {
            continue;
        };
        let subnet = adapter.subnet.value().cloned();
        let name = subnet.clone().unwrap_or_else(|| address.to_string());
        groups.entry((name, subnet)).or_default().push(adapter);
    }
    let one = |((name, subnet), members): ((String, Option<String>), Vec<&Adapter>)| {
        let doubt = match subnet {
            Some(_) => "nodes of separate networks may be in the same IP subnet",
            None => "the IP subnet of its address is not known",
        };
        Fabric {
            name: format!("roce:{name}"),
            adapters: members.iter().map(|member| member.name()).collect(),
            ambiguous: Some(doubt.to_owned()),
            decided_by: FabricDecision::IpSubnet {
                subnet,
                addresses: members
                    .iter()
                    .filter_map(|member| member.address.value().map(ToString::to_string))
                    .collect(),
            },
            standing: Standing::Unclear,
            standing_reason: String::new(),
        }
    };
    groups.into_iter().map(one).collect()
}

/// Which fabric is for engines, as far as the adapters tell: the one with the most bandwidth, if no other has more than half of that.
fn rank(fabrics: &mut [Fabric], adapters: &[Adapter]) {
    let is_network = |fabric: &Fabric| {
        matches!(
            fabric.decided_by,
            FabricDecision::SubnetAndManager { .. } | FabricDecision::IpSubnet { .. }
        )
    };
    let is_labelled = |fabric: &Fabric| fabric.decided_by == FabricDecision::OperatorLabel;
    let beside_labelled = fabrics.iter().any(is_labelled);
    let rates: Vec<Option<u64>> = fabrics
        .iter()
        .map(|fabric| is_network(fabric).then(|| rate_mbps(fabric, adapters))?)
        .collect();
    let networks = fabrics.iter().filter(|fabric| is_network(fabric)).count();
    let are_known = rates.iter().flatten().count() == networks;
    let best = rates.iter().flatten().max().copied().unwrap_or(0);
    let rivals = rates.iter().flatten().filter(|rate| **rate * 2 > best);
    let is_clear = rivals.count() == 1;
    for (fabric, rate) in fabrics.iter_mut().zip(&rates) {
        if !is_network(fabric) {
            continue;
        }
        let gbps = rate.unwrap_or(0) / 1_000;
        let (standing, reason) = match rate {
            _ if beside_labelled => (
                Standing::Secondary,
                "not labelled, beside one that is".to_owned(),
            ),
            _ if networks == 1 => (Standing::Primary, "the only one".to_owned()),
            _ if !are_known => (
                Standing::Unclear,
                "a rate is not known, so none stands out".to_owned(),
            ),
            Some(rate) if rate * 2 <= best => (
                Standing::Secondary,
                format!(
                    "{gbps} Gb/s beside {} Gb/s: storage or management",
                    best / 1_000
                ),
            ),
            _ if is_clear => (
                Standing::Primary,
                format!("the most bandwidth: {gbps} Gb/s"),
            ),
            _ => (
                Standing::Unclear,
                format!("{gbps} Gb/s, and none stands out"),
            ),
        };
        fabric.standing = standing;
        fabric.standing_reason = reason;
    }
}

/// What all adapters of a fabric carry together; `None` where one does not say.
fn rate_mbps(fabric: &Fabric, adapters: &[Adapter]) -> Option<u64> {
    adapters
        .iter()
        .filter(|adapter| fabric.adapters.contains(&adapter.name()))
        .map(|adapter| adapter.rate_mbps.value().copied())
        .sum()
}

#[cfg(test)]
mod tests;
