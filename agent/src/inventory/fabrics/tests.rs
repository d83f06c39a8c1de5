//! Fabrics of the recorded nodes, and which of them two nodes share.

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::fabric::{FabricReason, SameFabric, Verdict, same_fabric};

use super::*;
use crate::inventory::infiniband;
use crate::inventory::network::{InterfaceAddress, set_subnets};
use crate::recorded;

fn adapters(tree: &str) -> Vec<Adapter> {
    let tree = recorded::sysfs(tree);
    infiniband::adapters(&tree.path().join("sys"), None).unwrap()
}

fn of(tree: &str) -> Vec<Fabric> {
    let (fabrics, problems) = fabrics(&[], &adapters(tree), &[]);
    assert_eq!(problems, Vec::<String>::new());
    fabrics
}

fn find<'f>(fabrics: &'f [Fabric], name: &str) -> &'f Fabric {
    let found = fabrics.iter().find(|fabric| fabric.name == name);
    found.unwrap_or_else(|| panic!("no {name} in {fabrics:#?}"))
}

fn label(name: &str, adapters: &[&str]) -> FabricLabel {
    FabricLabel {
        name: name.to_owned(),
        adapters: adapters.iter().map(|name| (*name).to_owned()).collect(),
    }
}

fn between(a: &Fabric, b: &Fabric) -> (Verdict, FabricReason) {
    let SameFabric {
        verdict, reason, ..
    } = same_fabric(a, b);
    let back = same_fabric(b, a);
    assert_eq!((back.verdict, back.reason), (verdict, reason), "both ways");
    (verdict, reason)
}

const COMPUTE: &str = "ib:fe80:0000:0000:0000/sm-0x1";
const STORAGE: &str = "ib:fe80:0000:0000:0000/sm-0x7";

#[test]
fn a_dgx_has_one_fabric_for_engines_told_from_storage_by_the_subnet_manager() {
    let fabrics = of("dgx-h100");
    let compute = find(&fabrics, COMPUTE);
    assert_eq!(
        compute.adapters,
        [
            "mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"
        ]
    );
    assert_eq!(compute.standing, Standing::Primary);
    assert_eq!(compute.standing_reason, "the most bandwidth: 3200 Gb/s");
    let storage = find(&fabrics, STORAGE);
    assert_eq!(storage.adapters, ["mlx5_1", "mlx5_7"]);
    assert_eq!(storage.standing, Standing::Secondary);
    assert_eq!(
        storage.standing_reason,
        "800 Gb/s beside 3200 Gb/s: storage or management"
    );
    let roce = find(&fabrics, "roce:10.20.0.11");
    assert_eq!(roce.adapters, ["mlx5_2"]);
    assert_eq!(roce.standing, Standing::Secondary);
    assert_eq!(
        roce.ambiguous.as_deref(),
        Some("the IP subnet of its address is not known")
    );
    assert_eq!(fabrics.len(), 4);
}

#[test]
fn two_dgx_of_one_fabric_cannot_be_told_from_two_of_separate_ones() {
    let (here, there) = (of("dgx-h100"), of("dgx-h100-peer"));
    assert_eq!(
        between(find(&here, COMPUTE), find(&there, COMPUTE)),
        (Verdict::Ambiguous, FabricReason::DefaultPrefix)
    );
    assert!(find(&here, COMPUTE).ambiguous.is_some());
    assert_eq!(
        between(find(&here, COMPUTE), find(&there, STORAGE)),
        (Verdict::Different, FabricReason::ManagersDiffer)
    );
    assert_eq!(
        between(find(&here, COMPUTE), find(&of("cx6-two-port"), COMPUTE)),
        (Verdict::Ambiguous, FabricReason::DefaultPrefix)
    );
}

#[test]
fn a_prefix_of_its_own_makes_a_fabric_certain() {
    let own = of("dgx-h100-custom-prefix");
    let compute = find(&own, "ib:fe80:0000:0000:a1b2/sm-0x3");
    assert_eq!(compute.ambiguous, None);
    assert_eq!(
        between(compute, find(&of("dgx-h100"), COMPUTE)),
        (Verdict::Different, FabricReason::PrefixesDiffer)
    );
    // Another node of it has other LIDs.
    let mut peer = compute.clone();
    if let FabricDecision::SubnetAndManager { lids, .. } = &mut peer.decided_by {
        lids.iter_mut().for_each(|lid| *lid += 0x100);
    }
    assert_eq!(
        between(compute, &peer),
        (Verdict::Same, FabricReason::OwnPrefix)
    );
}

#[test]
fn equal_lids_on_two_nodes_prove_two_subnets() {
    let fabrics = of("dgx-h100");
    let compute = find(&fabrics, COMPUTE);
    assert_eq!(
        between(compute, compute),
        (Verdict::Different, FabricReason::EqualLids)
    );
}

#[test]
fn equal_lids_on_one_node_are_said() {
    let fabrics = of("quirks");
    let doubt = find(&fabrics, COMPUTE).ambiguous.clone().unwrap();
    assert!(
        doubt.starts_with("two of its ports have LID 0x12, so they are in two subnets"),
        "{doubt}"
    );
    // Omni-Path is no InfiniBand, though its prefix and manager are the same.
    assert_eq!(
        find(&fabrics, "opa:fe80:0000:0000:0000/sm-0x1").adapters,
        ["hfi1_0"]
    );
}

#[test]
fn the_operators_label_wins_over_everything() {
    let names = ["mlx5_0", "mlx5_3"];
    let (here, problems) = fabrics(&[label("ib-east", &names)], &adapters("dgx-h100"), &[]);
    assert_eq!(problems, Vec::<String>::new());
    let east = find(&here, "ib-east");
    assert_eq!(east.adapters, names);
    assert_eq!((east.standing, &east.ambiguous), (Standing::Primary, &None));
    let rest = find(&here, COMPUTE);
    assert_eq!(rest.adapters.len(), 6);
    assert_eq!(rest.standing, Standing::Secondary);
    let there = adapters("dgx-h100-peer");
    for (name, expected) in [
        ("ib-east", (Verdict::Same, FabricReason::OperatorLabel)),
        ("ib-west", (Verdict::Different, FabricReason::OperatorLabel)),
    ] {
        let (there, _) = fabrics(&[label(name, &names)], &there, &[]);
        assert_eq!(between(east, find(&there, name)), expected);
    }
    let (unlabelled, _) = fabrics(&[], &there, &[]);
    assert_eq!(
        between(east, find(&unlabelled, COMPUTE)),
        (Verdict::Ambiguous, FabricReason::OneSideLabelled)
    );
}

#[test]
fn a_label_that_does_not_fit_the_node_is_said() {
    let (found, problems) = fabrics(
        &[
            label("east", &["mlx5_0", "mlx5_3", "mlx5_9"]),
            label("mixed", &["mlx5_1:1", "mlx5_bond_0"]),
        ],
        &adapters("l40s-roce"),
        &[],
    );
    assert_eq!(
        problems,
        [
            "adapter mlx5_3 of fabric east: down: switched off or no carrier",
            "fabric east names adapter mlx5_9, which this node does not have",
        ]
    );
    assert_eq!(find(&found, "east").adapters, ["mlx5_0"]);
    assert_eq!(find(&found, "mixed").adapters, ["mlx5_1", "mlx5_bond_0"]);
    let (_, problems) = fabrics(
        &[label("all", &["mlx5_0", "mlx5_2"])],
        &adapters("dgx-h100"),
        &[],
    );
    assert_eq!(
        problems,
        ["fabric all mixes InfiniBand and RoCE, with which NCCL fails"]
    );
}

#[test]
fn a_clique_is_keyed_by_its_cluster_and_nothing_else() {
    let clique = |uuid: &str, clique| {
        let cliques = [MnnvlClique {
            cluster_uuid: uuid.to_owned(),
            clique,
        }];
        fabrics(&[], &[], &cliques).0.remove(0)
    };
    let one = clique("a", 32766);
    assert_eq!(one.name, "mnnvl:a.32766");
    for (other, verdict) in [
        (clique("a", 32766), Verdict::Same),
        (clique("b", 32766), Verdict::Different),
        (clique("a", 1), Verdict::Different),
    ] {
        assert_eq!(
            between(&one, &other),
            (verdict, FabricReason::MnnvlClique),
            "{}",
            other.name
        );
    }
    assert_eq!(
        between(&one, find(&of("dgx-h100"), COMPUTE)),
        (Verdict::Different, FabricReason::KindsDiffer)
    );
}

/// The L40S node with the masks that its interfaces would have.
fn roce(bits: u8) -> Vec<Fabric> {
    let mut adapters = adapters("l40s-roce");
    let addresses = ["192.168.10.11", "192.168.11.11", "10.0.0.21"]
        .map(|address| InterfaceAddress {
            interface: "any".to_owned(),
            address: address.parse().unwrap(),
            prefix_bits: bits,
        })
        .to_vec();
    set_subnets(&mut adapters, &Ok(addresses));
    fabrics(&[], &adapters, &[]).0
}

#[test]
fn roce_is_grouped_by_ip_subnet_and_stays_ambiguous() {
    let rails = roce(24);
    let names: Vec<&str> = rails.iter().map(|fabric| &*fabric.name).collect();
    assert_eq!(
        names,
        [
            "roce:10.0.0.0/24",
            "roce:192.168.10.0/24",
            "roce:192.168.11.0/24"
        ]
    );
    for rail in &rails {
        assert!(rail.ambiguous.is_some());
        assert_eq!(rail.standing, Standing::Unclear);
        assert_eq!(rail.standing_reason, "200 Gb/s, and none stands out");
    }
    let wide = roce(16);
    assert_eq!(
        find(&wide, "roce:192.168.0.0/16").adapters,
        ["mlx5_0", "mlx5_1"]
    );
    assert_eq!(find(&wide, "roce:10.0.0.0/16").adapters, ["mlx5_bond_0"]);
}

#[test]
fn roce_of_two_nodes_is_never_one_without_a_label() {
    let rails = roce(24);
    let rail = find(&rails, "roce:192.168.10.0/24");
    let mut other = rail.clone();
    if let FabricDecision::IpSubnet { addresses, .. } = &mut other.decided_by {
        *addresses = vec!["192.168.10.12".to_owned()];
    }
    assert_eq!(
        between(rail, &other),
        (Verdict::Ambiguous, FabricReason::EqualSubnets)
    );
    assert_eq!(
        between(rail, find(&rails, "roce:192.168.11.0/24")),
        (Verdict::Ambiguous, FabricReason::SubnetsDiffer)
    );
    assert_eq!(
        between(rail, rail),
        (Verdict::Different, FabricReason::EqualAddresses)
    );
    let container = of("roce-container-gids");
    assert_eq!(
        between(rail, find(&container, "roce:10.152.0.12")),
        (Verdict::Ambiguous, FabricReason::SubnetUnknown)
    );
    assert_eq!(
        between(rail, find(&of("dgx-h100"), COMPUTE)),
        (Verdict::Different, FabricReason::KindsDiffer)
    );
}

#[test]
fn a_node_with_one_fabric_has_it_for_engines_and_a_node_without_has_none() {
    let spark = of("roce-container-gids");
    assert_eq!(spark[0].standing, Standing::Primary);
    assert_eq!(spark[0].standing_reason, "the only one");
    assert_eq!(of("no-infiniband"), []);
    assert_eq!(of("efa"), []);
}

#[test]
fn an_unknown_rate_makes_no_fabric_stand_out() {
    let mut adapters = adapters("dgx-h100");
    adapters[0].rate_mbps = Reading::unknown("test");
    let (fabrics, _) = fabrics(&[], &adapters, &[]);
    let storage = find(&fabrics, STORAGE);
    assert_eq!(storage.standing, Standing::Unclear);
    assert_eq!(
        storage.standing_reason,
        "a rate is not known, so none stands out"
    );
}
