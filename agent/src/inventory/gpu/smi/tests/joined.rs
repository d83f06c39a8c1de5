//! What joins GPUs: the matrix, the links, the fabric.

use std::path::Path;

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::gpu::{Backend, FabricState, Gpus, HealthCode};

use super::{Recorded, codes, inventory, names, of, reason, recording};
use crate::inventory::gpu::assemble::{Machine, assemble};
use crate::inventory::gpu::facts::{Cause, DriverFacts};
use crate::inventory::gpu::scripts::Scripts;
use crate::inventory::gpu::smi::{links, query, read, topo};

#[test]
fn domains_are_connected_components_of_the_matrix() {
    let gpu = |number: u32| format!("GPU-5eed{number:04}-0a0a-4b4b-8c8c-{number:012}");
    for (rows, topology, domains) in [
        (
            "h100-sxm-8x",
            "dgx-h100",
            vec![(1..=8).collect::<Vec<u32>>()],
        ),
        ("h100-sxm-8x", "dgx-a100-40g", vec![(1..=8).collect()]),
        ("gb200-4x", "hgx-h100-4gpu-nv6", vec![(1..=4).collect()]),
        ("gb200-4x", "l40s-4gpu", vec![]),
        (
            "gb200-4x",
            "a6000-4gpu-two-bridges",
            vec![vec![1, 2], vec![3, 4]],
        ),
        ("rtx-3090-2x", "rtx3090-2gpu-nv4", vec![vec![1, 2]]),
        ("rtx-3090-2x", "l40s-rdma-named-nics", vec![]),
        ("rtx-3090-2x", "old-nic-columns", vec![vec![1, 2]]),
        ("h100-sxm-1x", "h100-1gpu", vec![]),
    ] {
        let smi = Recorded::new(rows).with_file("topo -m", &format!("topo/{topology}.txt"));
        let gpus = of(&smi);
        let found: Vec<Vec<String>> = gpus
            .nvlink_domains
            .known()
            .unwrap()
            .iter()
            .map(|domain| domain.gpus.clone())
            .collect();
        let expected: Vec<Vec<String>> = domains
            .into_iter()
            .map(|domain| domain.into_iter().map(gpu).collect())
            .collect();
        assert_eq!(found, expected, "{topology}");
        assert_eq!(gpus.problems, Vec::<String>::new(), "{topology}");
    }
}

#[test]
fn a_gpu_that_nothing_joins_to_the_others_is_alone() {
    // vllm#16336: eight B200, of which GPU2 is NODE or SYS to all others.
    let mut matrix = recording("topo/dgx-h100.txt");
    matrix = matrix
        .lines()
        .map(|line| {
            let mut cells: Vec<&str> = line.split('\t').collect();
            match cells[0] {
                "GPU2" => {
                    for cell in &mut cells[1..9] {
                        if cell.starts_with("NV") {
                            *cell = "NODE";
                        }
                    }
                }
                name if name.starts_with("GPU") => cells[3] = "NODE",
                _ => {}
            }
            cells.join("\t") + "\n"
        })
        .collect();
    let gpus = of(&Recorded::new("h100-sxm-8x").with("topo -m", matrix, 0));
    let domains = gpus.nvlink_domains.known().unwrap();
    assert_eq!(domains.len(), 1);
    assert_eq!(domains[0].gpus.len(), 7);
    let third = gpus.devices[2].uuid.value().unwrap();
    assert_eq!(gpus.domain_of(third), None);
}

#[test]
fn numa_nodes_are_the_kernel_s_and_else_the_matrix_s() {
    let smi = Recorded::new("gb200-4x").with_file("topo -m", "topo/hgx-h100-4gpu-nv6.txt");
    let facts = read(&smi).unwrap();
    let sysfs = Scripts::new("numa");
    // Of the four devices the kernel has no file, a number, none (-1), and nonsense.
    for (device, node) in [("0009", "6"), ("0018", "-1"), ("0019", "x")] {
        let device = format!("bus/pci/devices/{device}:01:00.0");
        let device = sysfs.path().join(device);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("numa_node"), format!("{node}\n")).unwrap();
    }
    let machine = Machine {
        proc: Path::new("/nonexistent"),
        sysfs: sysfs.path(),
    };
    let nodes = |facts: &DriverFacts| -> Vec<Reading<u32>> {
        let gpus = assemble(facts, Backend::NvidiaSmi, Vec::new(), &machine);
        gpus.devices.into_iter().map(|gpu| gpu.numa_node).collect()
    };
    assert_eq!(nodes(&facts), [3, 6, 7, 5].map(Reading::Known));

    let without_matrix = read(&Recorded::new("gb200-4x")).unwrap();
    assert_eq!(
        nodes(&without_matrix),
        [
            Reading::unknown("nvidia-smi topo -m was not read"),
            Reading::Known(6),
            Reading::unknown("the kernel names none"),
            Reading::unknown("the kernel's file holds no number"),
        ]
    );
}

#[test]
fn half_a_matrix_is_no_matrix() {
    let whole = recording("topo/a6000-4gpu-two-bridges.txt");
    let rows: usize = whole.lines().take(5).map(|line| line.len() + 1).sum();
    for end in 0..rows - 40 {
        assert!(topo::parse(&whole[..end]).is_err(), "{:?}", &whole[..end]);
    }
    let smi = Recorded::new("gb200-4x").with("topo -m", &whole[..rows / 2], 0);
    assert_eq!(
        of(&smi).nvlink_domains,
        Reading::unknown("nvidia-smi topo gave no topology: it is not a whole matrix")
    );
}

#[test]
fn a_matrix_that_disagrees_with_itself_joins_nothing() {
    let text = "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tSYS\t X \n";
    let topology = topo::parse(text).unwrap();
    assert_eq!(topology.joined, []);
    assert_eq!(topology.problems.len(), 1);
    assert!(topo::parse("\tGPU0\tGPU0\nGPU0\t X \t X \n").is_err());
}

#[test]
fn pairs_that_may_not_use_their_links_are_not_joined() {
    let smi = Recorded::new("rtx-3090-2x").with_file("topo -m", "topo/rtx3090-2gpu-nv4.txt");
    let refused = " \tGPU0\tGPU1\t\n GPU0\tX\tNS\t\n GPU1\tNS\tX\t\n\nLegend:\n\n  X    = Self\n";
    let gpus = of(&smi.with("topo -p2p n", refused, 0));
    assert_eq!(gpus.nvlink_domains, Reading::Known(Vec::new()));
    assert_eq!(
        gpus.problems,
        ["1 pair has NVLinks and may not use them, GPU0 and GPU1 for one"]
    );
}

#[test]
fn links_that_are_up_are_counted_and_prove_no_domain() {
    let expected: [(&str, &[Option<u32>]); 9] = [
        ("2080s-inactive-new", &[Some(0)]),
        ("a10-empty", &[]),
        ("a100-pcie-partial", &[Some(4), Some(4)]),
        ("a6000-pair-plus-lone", &[Some(4), Some(4), Some(0)]),
        ("h100-mig", &[None]),
        ("h200-1x", &[Some(18)]),
        ("hgx-a100-8x", &[Some(12); 8]),
        ("hgx-h100-8x", &[Some(18); 8]),
        ("l40s-unsupported", &[None]),
    ];
    assert_eq!(names("nvlink").len(), expected.len());
    for (name, ups) in expected {
        let found: Vec<Option<u32>> = links::parse(&recording(&format!("nvlink/{name}.txt")))
            .into_iter()
            .map(|links| links.up.ok())
            .collect();
        assert_eq!(found, ups, "{name}");
    }
    let unsupported = links::parse(&recording("nvlink/l40s-unsupported.txt"));
    assert_eq!(unsupported[0].up, Err(Cause::NotSupported));

    // Links up and no matrix: to whom they lead is unknown.
    let smi = Recorded::new("h100-sxm-8x").with_file("nvlink", "nvlink/hgx-h100-8x.txt");
    let gpus = of(&smi);
    assert_eq!(gpus.devices[7].nvlinks_up, Reading::Known(18));
    assert!(gpus.nvlink_domains.value().is_none());
}

/// The recorded columns of a query for the fabric alone.
const FABRIC_FIELDS: [&str; 6] = [
    "index",
    "uuid",
    "fabric.state",
    "fabric.status",
    "fabric.cliqueId",
    "fabric.clusterUuid",
];

pub(super) fn fabric(name: &str) -> Gpus {
    let text = recording(&format!("query-fabric/{name}.csv"));
    let answer = query::parse(&text, &FABRIC_FIELDS);
    assert_eq!(answer.problems, Vec::<String>::new());
    inventory(&DriverFacts {
        driver_version: Err(Cause::Missing),
        cuda_version: Err(Cause::Missing),
        gpus: answer.gpus,
        joined: Ok(Vec::new()),
        problems: Vec::new(),
    })
}

#[test]
fn a_cluster_of_zeros_is_no_cluster() {
    let gpus = fabric("h100-hgx-zero-uuid");
    assert_eq!(gpus.devices.len(), 8);
    let first = &gpus.devices[0].fabric;
    assert_eq!(first.state, Reading::Known(FabricState::Completed));
    assert_eq!(first.clique, Reading::Known(None));
    assert!(gpus.cliques().is_empty());
}

#[test]
fn nodes_of_one_rack_share_cluster_and_clique() {
    let (a, b) = (
        fabric("gb200-nvl72-node-a"),
        fabric("gb200-nvl72-node-b-same-domain"),
    );
    let keys: Vec<String> = a.cliques().keys().map(ToString::to_string).collect();
    assert_eq!(keys, ["9c5eed53-53bf-49b5-a436-b66766c413c3.4026"]);
    assert_eq!(
        a.cliques().keys().collect::<Vec<_>>(),
        b.cliques().keys().collect::<Vec<_>>()
    );
    assert_eq!(a.cliques().values().next().unwrap().len(), 4);
}

#[test]
fn a_fabric_that_is_not_ready_keeps_its_gpus_back() {
    let gpus = fabric("hgx-in-progress");
    for at in 0..8 {
        assert_eq!(codes(&gpus, at), [HealthCode::FabricNotReady]);
    }
    assert!(reason(&gpus, 0).contains("error 802"));
    let gpus = fabric("l40s-na");
    assert_eq!(
        gpus.devices[0].fabric.state,
        Reading::Known(FabricState::NotSupported)
    );
    assert_eq!(codes(&gpus, 0), []);
}

#[test]
fn an_old_driver_s_fabric_leaves_the_cluster_unknown() {
    let gpus = fabric("driver-535-state-only");
    let fabric = &gpus.devices[0].fabric;
    assert_eq!(fabric.state, Reading::Known(FabricState::Completed));
    assert_eq!(fabric.clique, Reading::unknown("the answer lacks it"));
    assert_eq!(codes(&gpus, 0), []);
}
