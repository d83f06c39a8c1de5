//! A fabric: adapters, on several nodes, that can reach each other, with how that was decided. "Ambiguous" is an answer.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The adapters of one node that are in one fabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fabric {
    /// The operator's name, or `mnnvl:UUID.CLIQUE`, `ib:PREFIX/sm-LID`, `roce:SUBNET`.
    pub name: String,
    /// Names as [`super::Adapter::name`] gives them, usable ones only. Empty for NVLink between nodes.
    pub adapters: Vec<String>,
    pub decided_by: FabricDecision,
    /// Why it is not known which other nodes are in it. `None`: the name tells.
    pub ambiguous: Option<String>,
    pub standing: Standing,
    /// Why it has that standing.
    pub standing_reason: String,
}

/// What makes the adapters one fabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "kebab-case")]
pub enum FabricDecision {
    /// `fabrics` of agent.yaml, which wins over everything else.
    OperatorLabel,
    /// NVLink between nodes. A clique's number means something within its cluster only.
    MnnvlClique { cluster_uuid: String, clique: u32 },
    /// The upper half of GID 0, and the subnet manager's address. The LIDs are this node's, unique in a subnet.
    SubnetAndManager {
        prefix: String,
        sm_lid: Option<u32>,
        lids: Vec<u32>,
    },
    /// The IP subnet of the RoCE v2 addresses. `None`: not known.
    IpSubnet {
        subnet: Option<String>,
        addresses: Vec<String>,
    },
    /// A word of a newer release.
    #[serde(other)]
    Other,
}

/// What a fabric is on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// The operator named it, or it clearly is the one for engines.
    Primary,
    /// Clearly less than the primary: storage or management.
    Secondary,
    /// None stands out.
    #[serde(other)]
    Unclear,
}

/// Whether two nodes' fabrics are one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SameFabric {
    pub verdict: Verdict,
    pub reason: FabricReason,
    pub detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Same,
    Different,
    /// Nothing proves either. A scheduler must not rely on it.
    Ambiguous,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FabricReason {
    OperatorLabel,
    OneSideLabelled,
    UnknownRule,
    KindsDiffer,
    MnnvlClique,
    PrefixesDiffer,
    ManagersDiffer,
    /// LIDs are unique in a subnet, so two nodes with the same one are in two.
    EqualLids,
    /// The same prefix, and not the one that every subnet has by default.
    OwnPrefix,
    DefaultPrefix,
    ManagerUnknown,
    /// Addresses are unique in a network, so two nodes with the same one are in two.
    EqualAddresses,
    SubnetsDiffer,
    EqualSubnets,
    SubnetUnknown,
}

/// What every InfiniBand subnet is called unless its manager was told otherwise.
pub const DEFAULT_PREFIX: &str = "fe80:0000:0000:0000";

/// Whether two fabrics of two different nodes are one, and why.
pub fn same_fabric(a: &Fabric, b: &Fabric) -> SameFabric {
    use FabricDecision::{IpSubnet, MnnvlClique, OperatorLabel, SubnetAndManager};
    match (&a.decided_by, &b.decided_by) {
        (OperatorLabel, OperatorLabel) if a.name == b.name => SameFabric::same(
            FabricReason::OperatorLabel,
            format!("both are labelled `{}`", a.name),
        ),
        (OperatorLabel, OperatorLabel) => SameFabric::different(
            FabricReason::OperatorLabel,
            format!("one is labelled `{}`, the other `{}`", a.name, b.name),
        ),
        (OperatorLabel, _) | (_, OperatorLabel) => {
            let (labelled, other) = match a.decided_by {
                OperatorLabel => (a, b),
                _ => (b, a),
            };
            SameFabric::ambiguous(
                FabricReason::OneSideLabelled,
                format!(
                    "one is labelled `{}`, the other (`{}`) is not labelled",
                    labelled.name, other.name
                ),
            )
        }
        (MnnvlClique { .. }, MnnvlClique { .. }) => same_clique(a, b),
        (SubnetAndManager { .. }, SubnetAndManager { .. }) => same_subnet(a, b),
        (IpSubnet { .. }, IpSubnet { .. }) => same_network(a, b),
        (FabricDecision::Other, _) | (_, FabricDecision::Other) => SameFabric::ambiguous(
            FabricReason::UnknownRule,
            format!(
                "`{}` and `{}` were decided by a rule that is not known here",
                a.name, b.name
            ),
        ),
        _ => SameFabric::different(
            FabricReason::KindsDiffer,
            format!("`{}` and `{}` are of different kinds", a.name, b.name),
        ),
    }
}

fn same_clique(a: &Fabric, b: &Fabric) -> SameFabric {
    // The name is made of the cluster and the clique.
    match a.name == b.name {
        true => SameFabric::same(
            FabricReason::MnnvlClique,
            format!("both are in NVLink clique `{}`", a.name),
        ),
        false => SameFabric::different(
            FabricReason::MnnvlClique,
            format!("`{}` and `{}` are two NVLink cliques", a.name, b.name),
        ),
    }
}

fn same_subnet(a: &Fabric, b: &Fabric) -> SameFabric {
    let (
        FabricDecision::SubnetAndManager {
            prefix,
            sm_lid,
            lids,
        },
        FabricDecision::SubnetAndManager {
            prefix: other_prefix,
            sm_lid: other_sm_lid,
            lids: other_lids,
        },
    ) = (&a.decided_by, &b.decided_by)
    else {
        unreachable!("only called for two InfiniBand fabrics");
    };
    if prefix != other_prefix {
        return SameFabric::different(
            FabricReason::PrefixesDiffer,
            format!("subnet prefix `{prefix}` is not `{other_prefix}`"),
        );
    }
    if let Some(lid) = lids.iter().find(|lid| other_lids.contains(lid)) {
        return SameFabric::different(
            FabricReason::EqualLids,
            format!("both nodes have LID {lid:#x}, which is unique in a subnet"),
        );
    }
    match (sm_lid, other_sm_lid) {
        (Some(one), Some(other)) if one != other => SameFabric::different(
            FabricReason::ManagersDiffer,
            format!("the subnet managers differ: LID {one:#x} and {other:#x}"),
        ),
        (Some(_), Some(_)) if prefix != DEFAULT_PREFIX => SameFabric::same(
            FabricReason::OwnPrefix,
            format!("both have subnet prefix `{prefix}` and the same subnet manager"),
        ),
        (Some(one), Some(_)) => SameFabric::ambiguous(
            FabricReason::DefaultPrefix,
            format!(
                "both have the default prefix `{prefix}` and subnet manager LID {one:#x}, which two separate subnets have too"
            ),
        ),
        _ => SameFabric::ambiguous(
            FabricReason::ManagerUnknown,
            "the subnet manager of one of them is not known".to_owned(),
        ),
    }
}

fn same_network(a: &Fabric, b: &Fabric) -> SameFabric {
    let (
        FabricDecision::IpSubnet { subnet, addresses },
        FabricDecision::IpSubnet {
            subnet: other_subnet,
            addresses: other_addresses,
        },
    ) = (&a.decided_by, &b.decided_by)
    else {
        unreachable!("only called for two RoCE fabrics");
    };
    if let Some(address) = addresses
        .iter()
        .find(|address| other_addresses.contains(address))
    {
        return SameFabric::different(
            FabricReason::EqualAddresses,
            format!("both nodes have address {address}, which is unique in a network"),
        );
    }
    let (Some(one), Some(other)) = (subnet, other_subnet) else {
        return SameFabric::ambiguous(
            FabricReason::SubnetUnknown,
            "the IP subnet of one of them is not known".to_owned(),
        );
    };
    match one == other {
        true => SameFabric::ambiguous(
            FabricReason::EqualSubnets,
            format!("both are in {one}, which two separate networks may use"),
        ),
        false => SameFabric::ambiguous(
            FabricReason::SubnetsDiffer,
            format!("{one} and {other} may be routed or separate"),
        ),
    }
}

impl SameFabric {
    fn new(verdict: Verdict, reason: FabricReason, detail: String) -> SameFabric {
        SameFabric {
            verdict,
            reason,
            detail,
        }
    }

    fn same(reason: FabricReason, detail: String) -> SameFabric {
        SameFabric::new(Verdict::Same, reason, detail)
    }

    fn different(reason: FabricReason, detail: String) -> SameFabric {
        SameFabric::new(Verdict::Different, reason, detail)
    }

    fn ambiguous(reason: FabricReason, detail: String) -> SameFabric {
        SameFabric::new(Verdict::Ambiguous, reason, detail)
    }
}

impl fmt::Display for FabricDecision {
    /// After "decided by".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FabricDecision::OperatorLabel => f.write_str("operator's label"),
            FabricDecision::MnnvlClique { .. } => f.write_str("NVLink cluster and clique"),
            FabricDecision::SubnetAndManager { .. } => f.write_str("subnet prefix and manager"),
            FabricDecision::IpSubnet { .. } => f.write_str("IP subnet"),
            FabricDecision::Other => f.write_str("a rule of a newer release"),
        }
    }
}
