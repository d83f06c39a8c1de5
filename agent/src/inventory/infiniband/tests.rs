//! The recorded trees, each port with the values that it has to have.

use std::net::Ipv4Addr;

use llmgw_proto::inventory::adapter::PhysicalState;

use super::*;
use crate::recorded::{TempTree, sysfs as recorded};

fn read(tree: &TempTree) -> Vec<Adapter> {
    adapters(&tree.path().join("sys"), None).unwrap()
}

fn of(name: &str) -> Vec<Adapter> {
    read(&recorded(name))
}

fn find<'a>(adapters: &'a [Adapter], name: &str) -> &'a Adapter {
    let found = adapters.iter().find(|adapter| adapter.name() == name);
    found.unwrap_or_else(|| panic!("no adapter {name}"))
}

fn codes(adapter: &Adapter) -> Vec<ReasonCode> {
    adapter.reasons.iter().map(|reason| reason.code).collect()
}

/// `known`, or the cause of its absence.
fn said<T: std::fmt::Debug>(reading: &Reading<T>) -> String {
    match reading {
        Reading::Unknown(why) => why.clone(),
        other => format!("{:?}", other.value().unwrap()),
    }
}

#[test]
fn every_port_of_every_tree_has_the_values_that_were_recorded() {
    let table = std::fs::read_to_string(crate::recorded::recordings().join("ports.tsv")).unwrap();
    let trees: BTreeMap<&str, Vec<Adapter>> = TREES.map(|tree| (tree, of(tree))).into();
    let mut checked = 0;
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let columns: Vec<&str> = line.split('\t').collect();
        let &[
            tree,
            device,
            port,
            pci,
            driver,
            kind,
            usability,
            reasons,
            rate,
            lid,
            sm_lid,
            subnet,
            gid_index,
        ] = columns.as_slice()
        else {
            panic!("not a row: {line}");
        };
        let adapter = trees[tree]
            .iter()
            .find(|adapter| {
                let number = adapter.port.map_or("-".to_owned(), |port| port.to_string());
                adapter.device == device && number == port
            })
            .unwrap_or_else(|| panic!("no {device} {port} in {tree}"));
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let hex = |reading: &Reading<u32>| or_dash(reading.value().map(|lid| format!("{lid:#x}")));
        let found = [
            or_dash(adapter.pci_address.value().cloned()),
            or_dash(adapter.driver.value().cloned()),
            adapter.kind.as_str().to_owned(),
            format!("{:?}", adapter.usability),
            or_dash(Some(format!("{:?}", codes(adapter))).filter(|text| text != "[]")),
            or_dash(adapter.rate_mbps.value().map(u64::to_string)),
            hex(&adapter.lid),
            hex(&adapter.sm_lid),
            or_dash(adapter.subnet.value().cloned()),
            or_dash(adapter.gid_index.value().map(u32::to_string)),
        ];
        let expected = [
            pci, driver, kind, usability, reasons, rate, lid, sm_lid, subnet, gid_index,
        ];
        assert_eq!(found, expected, "{tree} {device} {port}");
        checked += 1;
    }
    let all: usize = trees.values().map(Vec::len).sum();
    assert_eq!(checked, all, "a port is missing from the table");
}

const TREES: [&str; 10] = [
    "cx6-two-port",
    "dgx-h100",
    "dgx-h100-custom-prefix",
    "dgx-h100-peer",
    "dgx-spark",
    "efa",
    "l40s-roce",
    "no-infiniband",
    "quirks",
    "roce-container-gids",
];

#[test]
fn a_machine_without_infiniband_has_no_adapters_and_that_is_no_error() {
    assert_eq!(of("no-infiniband"), []);
    assert_eq!(
        adapters(std::path::Path::new("/nowhere"), None),
        Ok(Vec::new())
    );
}

#[test]
fn a_class_that_cannot_be_listed_is_said_not_taken_for_empty() {
    let tree = TempTree::empty();
    tree.add("@ sys/class\ninfiniband = a file\n");
    let why = adapters(&tree.path().join("sys"), None).unwrap_err();
    assert!(why.ends_with("class/infiniband: not a directory"), "{why}");
}

#[test]
fn a_dgx_lists_its_adapters_in_the_order_of_their_numbers() {
    let adapters = of("dgx-h100");
    let names: Vec<&str> = adapters.iter().map(|adapter| &*adapter.device).collect();
    let expected: Vec<String> = (0..12).map(|number| format!("mlx5_{number}")).collect();
    assert_eq!(names, expected);
    let first = find(&adapters, "mlx5_0");
    assert_eq!(first.numa_node, Reading::Known(0));
    assert_eq!(first.netdev, Reading::Known("ibp24s0".to_owned()));
    assert_eq!(first.model, Reading::Known("MT4129".to_owned()));
    assert_eq!(first.firmware, Reading::Known("28.41.1000".to_owned()));
    assert_eq!(first.link_layer, Reading::Known(LinkLayer::Infiniband));
    let storage = find(&adapters, "mlx5_2");
    assert_eq!(storage.netdev, Reading::Known("enp41s0f1np1".to_owned()));
    assert_eq!(
        storage.address,
        Reading::Known(Ipv4Addr::new(10, 20, 0, 11).into())
    );
}

#[test]
fn an_uncabled_ethernet_port_has_no_rate_though_the_kernel_prints_forty_gigabits() {
    let adapters = of("l40s-roce");
    let uncabled = find(&adapters, "mlx5_3");
    assert_eq!(
        said(&uncabled.rate_mbps),
        "the port is down: `40 Gb/sec (4X QDR)` is a placeholder"
    );
    assert_eq!(
        uncabled.physical_state,
        Reading::Known(PhysicalState::Disabled)
    );
    assert_eq!(
        uncabled.reasons[0].detail,
        "down: switched off or no carrier"
    );
    // The same on InfiniBand, where another rate is printed.
    let adapters = of("cx6-two-port");
    let down = find(&adapters, "mlx5_1");
    assert_eq!(
        said(&down.rate_mbps),
        "the port is down: `10 Gb/sec (4X SDR)` is a placeholder"
    );
    assert_eq!(down.reasons[0].detail, "down: no cable or no peer");
}

#[test]
fn a_bond_is_one_adapter_on_the_bond_with_its_interfaces_named() {
    let adapters = of("l40s-roce");
    let bond = find(&adapters, "mlx5_bond_0");
    assert_eq!(bond.netdev, Reading::Known("bond0".to_owned()));
    assert_eq!(bond.netdev_members, ["enp6s0f0np0", "enp6s0f1np1"]);
    assert_eq!(bond.function, Function::Physical);
}

#[test]
fn a_virtual_function_says_so_beside_being_down() {
    let adapters = of("l40s-roce");
    let function = find(&adapters, "mlx5_2");
    assert_eq!(function.function, Function::Virtual);
    assert_eq!(
        codes(function),
        [ReasonCode::VirtualFunction, ReasonCode::NotActive]
    );
}

#[test]
fn in_a_container_the_usable_gid_is_found_behind_those_of_others() {
    let adapters = of("roce-container-gids");
    let adapter = find(&adapters, "mlx5_0");
    assert_eq!(adapter.gid_index, Reading::Known(7));
    assert_eq!(
        adapter.address,
        Reading::Known(Ipv4Addr::new(10, 152, 0, 12).into())
    );
    assert_eq!(adapter.netdev, Reading::Known("net1".to_owned()));
    assert!(adapter.is_usable());
}

#[test]
fn efa_is_no_adapter_for_nccl_though_it_says_active() {
    for adapter in of("efa") {
        assert_eq!(adapter.state, Reading::Known(PortState::Active));
        assert_eq!(adapter.link_layer, Reading::Known(LinkLayer::Unspecified));
        assert_eq!(codes(&adapter)[0], ReasonCode::Efa);
        assert!(adapter.node_guid.value().is_none(), "its GUIDs are zeros");
    }
    let adapters = of("efa");
    // The truth about its link is with the interface.
    let first = find(&adapters, "rdmap22s27");
    assert_eq!(codes(first), [ReasonCode::Efa, ReasonCode::InterfaceDown]);
    assert_eq!(
        said(&find(&adapters, "rdmap23s27").lid),
        "`lid`: no such file"
    );
}

#[test]
fn both_styles_of_two_ports_are_two_adapters() {
    // mlx5: two devices of one card.
    let adapters = of("cx6-two-port");
    let (up, down) = (find(&adapters, "mlx5_0"), find(&adapters, "mlx5_1"));
    assert_eq!(up.card_guid, down.card_guid);
    assert_eq!((up.is_usable(), down.is_usable()), (true, false));
    // mlx4: one device with two ports, of which NCCL names the second with its number.
    let tree = TempTree::empty();
    tree.add(
        "@ sys/class/infiniband/mlx4_0\n\
         node_type = 1: CA\n\
         device/dummy = x\n\
         device/net/ib0/dev_port = 0\n\
         device/net/ib1/dev_port = 1\n",
    );
    for (port, state, prefix) in [(1, "1: DOWN", "0000"), (2, "4: ACTIVE", "0001")] {
        tree.add(&format!(
            "@ sys/class/infiniband/mlx4_0/ports/{port}\n\
             state = {state}\n\
             phys_state = 5: LinkUp\n\
             link_layer = InfiniBand\n\
             rate = 40 Gb/sec (4X QDR)\n\
             gids/0 = fe80:0000:0000:{prefix}:0002:c903:0000:0001\n"
        ));
    }
    let adapters = read(&tree);
    let names: Vec<String> = adapters.iter().map(Adapter::name).collect();
    assert_eq!(names, ["mlx4_0", "mlx4_0:2"]);
    let second = &adapters[1];
    assert_eq!(second.netdev, Reading::Known("ib1".to_owned()));
    assert_eq!(
        second.subnet,
        Reading::Known("fe80:0000:0000:0001".to_owned())
    );
    assert_eq!(second.rate_mbps, Reading::Known(40_000));
    assert!(second.is_usable());
}

#[test]
fn a_spark_shows_each_of_its_two_sockets_twice() {
    let adapters = of("dgx-spark");
    let usable: Vec<&str> = adapters
        .iter()
        .filter(|adapter| adapter.is_usable())
        .map(|adapter| &*adapter.device)
        .collect();
    assert_eq!(usable, ["roceP2p1s0f0", "rocep1s0f0"]);
    assert_eq!(
        find(&adapters, "roceP2p1s0f0").pci_address,
        Reading::Known("0002:01:00.0".to_owned())
    );
}

#[test]
fn what_cannot_be_read_is_unknown_with_its_cause_and_costs_nothing_else() {
    let adapters = of("quirks");
    let unreadable = find(&adapters, "mlx5_5");
    assert_eq!(codes(unreadable), [ReasonCode::Unreadable]);
    assert_eq!(unreadable.reasons[0].detail, "`state`: is a directory");
    assert_eq!(unreadable.rate_mbps, Reading::Known(400_000));
    let garbage = find(&adapters, "mlx5_4");
    assert_eq!(said(&garbage.rate_mbps), "`rate` reads `fast`");
    assert_eq!(
        said(&garbage.physical_state),
        "`phys_state` reads `8: <unknown>`"
    );
    assert!(garbage.is_usable(), "its state says ACTIVE");
    assert_eq!(
        find(&adapters, "mlx5_9").reasons[0].detail,
        "listed, but its directory is gone"
    );
    for name in ["mlx5_6", "mlx5_7"] {
        assert_eq!(
            codes(find(&adapters, name)),
            [ReasonCode::NoPorts],
            "{name}"
        );
    }
    assert_eq!(
        said(&find(&adapters, "hfi1_0").model),
        "`hca_type`: no such file"
    );
}

#[test]
fn transports_that_only_look_like_infiniband_or_roce_are_told_apart() {
    let adapters = of("quirks");
    for (name, kind, function) in [
        ("hfi1_0", AdapterKind::OmniPath, Function::Physical),
        ("bnxt_re0", AdapterKind::Roce, Function::Physical),
        ("irdma0", AdapterKind::Roce, Function::Physical),
        ("rxe0", AdapterKind::Roce, Function::Software),
        ("mlx5_0", AdapterKind::Infiniband, Function::Physical),
    ] {
        let adapter = find(&adapters, name);
        assert_eq!((adapter.kind, adapter.function), (kind, function), "{name}");
    }
    for (node_type, kind) in [
        ("4: RNIC", AdapterKind::Iwarp),
        ("6: usNIC UDP", AdapterKind::Usnic),
        ("1: CA", AdapterKind::Roce),
    ] {
        let tree = TempTree::empty();
        tree.add(&format!(
            "@ sys/class/infiniband/x0\nnode_type = {node_type}\ndevice/x = 1\nports/1/link_layer = Ethernet\n"
        ));
        assert_eq!(read(&tree)[0].kind, kind, "{node_type}");
    }
}

#[test]
fn only_ipv6_addresses_are_no_address_for_nccl() {
    let adapters = of("quirks");
    let adapter = find(&adapters, "bnxt_re0");
    assert_eq!(codes(adapter), [ReasonCode::NoAddress]);
    assert_eq!(
        adapter.reasons[0].detail,
        "no RoCE v2 GID with an IPv4 address"
    );
}

#[test]
fn ports_on_their_way_up_and_in_recovery_are_told_from_dead_ones() {
    let adapters = of("quirks");
    for (name, usability, code) in [
        ("mlx5_1", Usability::Unusable, ReasonCode::NotActive),
        ("mlx5_2", Usability::Degraded, ReasonCode::Recovering),
        ("mlx5_3", Usability::Unusable, ReasonCode::NotActive),
    ] {
        let adapter = find(&adapters, name);
        assert_eq!(adapter.usability, usability, "{name}");
        assert_eq!(codes(adapter), [code], "{name}");
    }
    assert_eq!(
        find(&adapters, "mlx5_1").reasons[0].detail,
        "a subnet manager is setting it up (ARMED)"
    );
    assert_eq!(
        find(&adapters, "mlx5_3").reasons[0].detail,
        "down: the link is being negotiated"
    );
}

/// One active InfiniBand port with more below it.
fn one_port(more: &str) -> Adapter {
    let tree = TempTree::empty();
    tree.add(&format!(
        "@ sys/class/infiniband/mlx5_8\n\
         node_type = 1: CA\n\
         device/class = 0x020700\n\
         device/driver -> ../../../bus/pci/drivers/mlx5_core\n\
         ports/1/state = 4: ACTIVE\n\
         ports/1/link_layer = InfiniBand\n\
         ports/1/rate = 400 Gb/sec (4X NDR)\n{more}"
    ));
    read(&tree).remove(0)
}

#[test]
fn a_bridge_to_the_nvswitches_is_refused_by_its_vital_product_data() {
    let bridge = one_port("device/vpd = \\x82,ConnectX-7 V3 SMDL=SW_MNG end\n");
    assert_eq!(codes(&bridge), [ReasonCode::NvswitchBridge]);
    assert!(one_port("device/vpd = ConnectX-7\n").is_usable());
}

#[test]
fn a_speed_that_the_kernel_does_not_know_is_not_ten_gigabits() {
    let newer = one_port("ports/1/rate = 10 Gb/sec (4X SDR)\n");
    assert_eq!(
        said(&newer.rate_mbps),
        "`10 Gb/sec (4X SDR)` is what this kernel prints for a speed that it does not know"
    );
    assert!(newer.is_usable());
}

#[test]
fn an_interface_that_is_down_takes_its_roce_port_down_and_not_an_infiniband_one() {
    let tree = recorded("l40s-roce");
    tree.add("@ sys/devices/pci0000:36/0000:36:01.0/0000:38:00.0/net/ens1np0\noperstate = down\n");
    let adapters = read(&tree);
    let down = find(&adapters, "mlx5_0");
    assert_eq!(codes(down), [ReasonCode::InterfaceDown]);
    assert_eq!(down.reasons[0].detail, "interface ens1np0 is down");
    let tree = recorded("cx6-two-port");
    tree.add("@ sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/net/ibs1f0\noperstate = down\n");
    assert!(find(&read(&tree), "mlx5_0").is_usable());
}

#[test]
fn an_address_that_the_host_gave_itself_comes_after_a_real_one() {
    let tree = TempTree::empty();
    tree.add("@ sys/class/infiniband/mlx5_0\nnode_type = 1: CA\ndevice/x = 1\n");
    let port = "@ sys/class/infiniband/mlx5_0/ports/1\n";
    tree.add(&format!("{port}link_layer = Ethernet\nstate = 4: ACTIVE\n"));
    for (index, address) in [(1, "a9fe:0101"), (3, "0a00:0005")] {
        tree.add(&format!(
            "{port}gids/{index} = 0000:0000:0000:0000:0000:ffff:{address}\n\
             gid_attrs/types/{index} = RoCE v2\n\
             gid_attrs/ndevs/{index} = eth0\n"
        ));
    }
    let adapters = read(&tree);
    assert_eq!(adapters[0].gid_index, Reading::Known(3));
}

#[test]
fn the_port_of_the_nodes_own_traffic_is_set_aside_where_there_are_others() {
    let mut adapters = of("l40s-roce");
    set_management_aside(&mut adapters, &["enp6s0f0np0".to_owned()]);
    let bond = find(&adapters, "mlx5_bond_0");
    assert_eq!(codes(bond), [ReasonCode::Management]);
    assert!(find(&adapters, "mlx5_0").is_usable());
    // The only one does both.
    let mut adapters = of("roce-container-gids");
    set_management_aside(&mut adapters, &["net1".to_owned()]);
    assert!(find(&adapters, "mlx5_0").is_usable());
}

#[test]
fn each_driver_is_listed_once_with_its_version_or_as_the_kernels_own() {
    let tree = recorded("quirks");
    tree.add("@ sys/module\nmlx5_core/version = 24.10-1.1.4\n");
    let sys = tree.path().join("sys");
    let versions = driver_versions(&sys, &adapters(&sys, None).unwrap());
    let names: Vec<&str> = versions.keys().map(String::as_str).collect();
    assert_eq!(names, ["bnxt_en", "hfi1", "ice", "mlx5_core"]);
    assert_eq!(
        versions["mlx5_core"],
        Reading::Known("24.10-1.1.4".to_owned())
    );
    assert_eq!(said(&versions["ice"]), "the kernel's own");
}

#[test]
fn a_device_that_this_process_may_not_open_is_refused_though_its_port_is_up() {
    let tree = recorded("dgx-h100");
    tree.add(
        "@ sys/class/infiniband_verbs\n\
         uverbs0/ibdev = mlx5_0\n\
         uverbs1/ibdev = mlx5_3\n\
         uverbs2/ibdev = mlx5_4\n\
         @ dev/infiniband\n\
         uverbs0 =\n\
         uverbs2 !\n",
    );
    let dev = tree.path().join("dev");
    let adapters = adapters(&tree.path().join("sys"), Some(&dev)).unwrap();
    assert!(find(&adapters, "mlx5_0").is_usable());
    for (name, expected) in [
        ("mlx5_3", "infiniband/uverbs1: no such file"),
        ("mlx5_4", "infiniband/uverbs2: is a directory"),
        (
            "mlx5_5",
            "it has no device node: is the module ib_uverbs loaded?",
        ),
    ] {
        let adapter = find(&adapters, name);
        assert_eq!(codes(adapter), [ReasonCode::NoDeviceNode], "{name}");
        let detail = &adapter.reasons[0].detail;
        assert!(detail.ends_with(expected), "{detail}");
    }
}
