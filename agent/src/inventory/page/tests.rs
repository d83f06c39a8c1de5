//! Pages of nodes that are well, of nodes that are not, and of the recorded ones.

use llmgw_proto::inventory::gpu::{
    ComputeCapability, Ecc, GpuFabric, GpuMemory, HealthFlag, NvlinkDomain,
};

use super::*;
use crate::config::AgentConfig;
use crate::inventory::gpu::GpuSources;
use crate::inventory::{Sources, assemble};
use crate::recorded::{self, TempTree};

fn known<T>(value: T) -> Reading<T> {
    Reading::Known(value)
}

fn text(value: &str) -> Reading<String> {
    known(value.to_owned())
}

fn no_gpus() -> Gpus {
    Gpus {
        driver: DriverState::Absent,
        backend: Backend::None,
        passed_over: Vec::new(),
        driver_version: Reading::unknown("no driver"),
        cuda_version: Reading::unknown("no driver"),
        devices: Vec::new(),
        nvlink_domains: known(Vec::new()),
        problems: Vec::new(),
    }
}

fn gpu(index: u32) -> Gpu {
    Gpu {
        index: known(index),
        uuid: text(&format!("GPU-{index}")),
        name: text("NVIDIA H100 80GB HBM3"),
        class: text("h100-sxm-80g"),
        memory: GpuMemory {
            total_mib: known(81_559),
            used_mib: known(0),
            reserved_mib: known(479),
            unified: false,
        },
        compute_capability: known(ComputeCapability { major: 9, minor: 0 }),
        pci: text(&format!("0000:1{index}:00.0")),
        numa_node: known(0),
        health: Vec::new(),
        ecc: Ecc {
            uncorrected_volatile: known(0),
            uncorrected_aggregate: known(0),
            remap_pending: known(false),
            remap_failed: known(false),
        },
        fabric: GpuFabric {
            state: Reading::unknown("test"),
            clique: known(None),
        },
        nvlinks_up: known(18),
        mig: known(false),
        slice: None,
        vgpu: false,
        processes: known(Vec::new()),
    }
}

fn gpus(devices: Vec<Gpu>) -> Gpus {
    let all = devices.iter().filter_map(|gpu| gpu.uuid.value().cloned());
    Gpus {
        driver: DriverState::Answering,
        backend: Backend::Nvml,
        driver_version: text("570.195.03"),
        cuda_version: text("12.8"),
        nvlink_domains: known(vec![NvlinkDomain {
            number: 0,
            gpus: all.collect(),
        }]),
        devices,
        ..no_gpus()
    }
}

fn failure(source: Backend, message: &str, help: Option<&str>) -> SourceFailure {
    SourceFailure {
        source,
        cause: SourceCause::Other,
        message: message.to_owned(),
        help: help.map(str::to_owned),
    }
}

/// A node of one processor with what is in the tree.
fn node(tree: &TempTree, gpus: Gpus) -> Inventory {
    tree.add(
        "@ proc\n\
         meminfo = MemTotal: 33554432 kB\\nMemAvailable: 25165824 kB\n\
         cpuinfo = processor : 0\n\
         sys/kernel/osrelease = 6.18.5\n\
         sys/kernel/hostname = gpu-01\n\
         net/route = Iface\n",
    );
    let sources = Sources {
        gpus: GpuSources::default(),
        sys: tree.path().join("sys"),
        proc: tree.path().join("proc"),
        dev: None,
        config: AgentConfig::default(),
    };
    assemble(&sources, gpus, &Ok(Vec::new()))
}

fn page_of(gpus: Gpus) -> String {
    page(&node(&TempTree::empty(), gpus))
}

#[test]
fn a_machine_without_gpu_and_infiniband_has_a_calm_page() {
    assert_eq!(
        page_of(no_gpus()),
        "\
node gpu-01: nothing is wrong

GPUs: none (no NVIDIA driver is installed, and PCI shows none)

adapters: none (no RDMA device)

fabrics: none

host
  CPU      ? sockets, ? cores, 1 thread, ? NUMA nodes
  memory   32 GiB, 24 GiB available
  kernel   6.18.5
  route    there is no default route
  agent    0.1.0

?: not known; `--format json` says why
"
    );
}

#[test]
fn gpus_are_a_table_with_their_domain_and_their_state() {
    let page = page_of(gpus(vec![gpu(0), gpu(1)]));
    assert!(
        page.starts_with("node gpu-01: nothing is wrong\n"),
        "{page}"
    );
    let expected = "\
GPUs: 2 of 2 usable; driver 570.195.03, CUDA 12.8, read through NVML
  GPU  class         used  MiB    cc   PCI           NUMA  NVL  state
  0    h100-sxm-80g  0     81559  9.0  0000:10:00.0  0     0    ok
  1    h100-sxm-80g  0     81559  9.0  0000:11:00.0  0     0    ok
";
    assert!(page.contains(expected), "{page}");
}

#[test]
fn what_is_wrong_with_a_gpu_comes_first_and_mig_is_not_wrong() {
    let flagged = |index, code, reason: &str| Gpu {
        health: vec![HealthFlag {
            code,
            reason: reason.to_owned(),
        }],
        ..gpu(index)
    };
    let page = page_of(gpus(vec![
        flagged(0, HealthCode::UncorrectedEcc, "2 uncorrected memory errors"),
        flagged(1, HealthCode::Mig, "in MIG mode"),
    ]));
    assert!(
        page.starts_with(
            "node gpu-01: 1 thing to look at\n  - GPU 0: 2 uncorrected memory errors\n"
        ),
        "{page}"
    );
    assert!(page.contains("GPUs: 0 of 2 usable"), "{page}");
    assert!(page.contains("0     0    uncorrected-ecc\n"), "{page}");
    assert!(page.contains("0     0    mig\n"), "{page}");
}

#[test]
fn a_driver_that_fails_says_what_it_said_and_what_can_be_done() {
    let page = page_of(Gpus {
        driver: DriverState::Failing,
        passed_over: vec![
            failure(Backend::Nvml, "the library is not installed", None),
            failure(
                Backend::NvidiaSmi,
                "the driver is not loaded.",
                Some("load the kernel module `nvidia`"),
            ),
        ],
        ..no_gpus()
    });
    assert!(
        page.starts_with(
            "node gpu-01: 2 things to look at\n  \
             - the library is not installed\n  \
             - the driver is not loaded; load the kernel module `nvidia`\n"
        ),
        "{page}"
    );
    assert!(
        page.contains("GPUs: none (the driver does not answer, and PCI shows none)\n"),
        "{page}"
    );
}

#[test]
fn two_sources_with_one_cause_are_one_thing_to_look_at() {
    let of_cause = |source, message, cause| SourceFailure {
        cause,
        ..failure(source, message, None)
    };
    let failing = |first, second| Gpus {
        driver: DriverState::Failing,
        passed_over: vec![
            of_cause(Backend::Nvml, "one", first),
            of_cause(Backend::NvidiaSmi, "two", second),
        ],
        ..no_gpus()
    };
    let loaded = SourceCause::DriverNotLoaded;
    for (first, second, expected) in [
        (loaded, loaded, &["two"][..]),
        (SourceCause::NotInstalled, loaded, &["one", "two"]),
        (SourceCause::NotAsked, loaded, &["two"]),
        (SourceCause::Other, SourceCause::Other, &["one", "two"]),
    ] {
        assert_eq!(of_driver(&failing(first, second)), expected, "{first:?}");
    }
}

#[test]
fn gpus_on_pci_without_any_driver_are_wrong_and_said_in_one_sentence() {
    let page = page(&node(&recorded::sysfs("dgx-h100"), no_gpus()));
    assert!(
        page.starts_with(
            "node gpu-01: 3 things to look at\n  \
             - no NVIDIA driver is installed\n  \
             - PCI has 8 GPUs of which nothing else is known: 0000:1b:00.0, 0000:43:00.0,\n"
        ),
        "{page}"
    );
    assert!(page.contains("GPUs: 0 of 8 usable"), "{page}");
    assert!(page.contains("0000:1b:00.0  ?"), "{page}");
}

#[test]
fn a_fallback_is_said_beside_the_gpus_that_it_found() {
    let page = page_of(Gpus {
        backend: Backend::NvidiaSmi,
        passed_over: vec![failure(Backend::Nvml, "no library was found", None)],
        ..gpus(vec![gpu(0)])
    });
    assert!(
        page.contains("read through nvidia-smi\n  not through NVML: no library was found\n"),
        "{page}"
    );
    assert!(
        page.starts_with("node gpu-01: nothing is wrong\n"),
        "{page}"
    );
}

#[test]
fn values_from_before_a_silence_are_called_old() {
    let stale = Gpus {
        driver: DriverState::Unresponsive,
        passed_over: vec![failure(Backend::Nvml, "no answer within 10s", None)],
        ..gpus(vec![gpu(0)]).aged(42_000)
    };
    let page = page_of(stale);
    assert!(page.contains("  - no answer within 10s\n"), "{page}");
    assert!(page.contains("  these values are 42 s old\n"), "{page}");
    assert!(page.contains("h100-sxm-80g"), "{page}");
}

#[test]
fn every_recorded_node_has_a_page_of_eighty_columns() {
    let mut odd = gpu(7);
    odd.class = text("rtxpro6000-mig-1g.24gb+gfx");
    odd.pci = text("00000008:01:00.0");
    odd.health = [
        HealthCode::RowRemapPending,
        HealthCode::UncorrectedEcc,
        HealthCode::MemoryHeld,
    ]
    .map(|code| HealthFlag {
        code,
        reason: "a reason that is long enough to be put on a second line ".repeat(3),
    })
    .to_vec();
    for tree in [
        "cx6-two-port",
        "dgx-h100",
        "dgx-spark",
        "efa",
        "l40s-roce",
        "no-infiniband",
        "quirks",
        "roce-container-gids",
    ] {
        let inventory = node(&recorded::sysfs(tree), gpus(vec![gpu(0), odd.clone()]));
        for line in page(&inventory).lines() {
            assert!(line.chars().count() <= 80, "{tree}: {line}");
            assert_eq!(line, line.trim_end(), "{tree}");
        }
    }
}

#[test]
fn ports_that_should_work_are_looked_at_and_those_without_a_cable_are_not() {
    let inventory = node(&recorded::sysfs("quirks"), no_gpus());
    assert_eq!(
        complaints(&inventory),
        [
            "adapter mlx5_2: recovers from link errors (ACTIVE_DEFER)",
            "adapter mlx5_5: `state`: is a directory",
            "adapter mlx5_9: listed, but its directory is gone",
            "which nodes share fabrics ib:fe80:0000:0000:0000/sm-0x1, \
             opa:fe80:0000:0000:0000/sm-0x1, roce:172.30.0.5 is not known: \
             label them under `fabrics` in agent.yaml",
        ]
    );
    let inventory = node(&recorded::sysfs("cx6-two-port"), no_gpus());
    assert_eq!(
        complaints(&inventory),
        [
            "which nodes share fabric ib:fe80:0000:0000:0000/sm-0x1 is not known: \
             label it under `fabrics` in agent.yaml"
        ]
    );
}

#[test]
fn what_is_registered_is_read_back_without_loss() {
    for tree in ["dgx-h100", "l40s-roce", "quirks", "efa", "no-infiniband"] {
        let inventory = node(&recorded::sysfs(tree), gpus(vec![gpu(0)]).aged(5));
        let json = serde_json::to_string(&inventory).unwrap();
        let back: Inventory = serde_json::from_str(&json).unwrap();
        assert_eq!(back, inventory, "{tree}");
    }
}

#[test]
fn words_of_a_newer_release_do_not_make_a_registration_unreadable() {
    let inventory = node(&recorded::sysfs("dgx-h100"), gpus(vec![gpu(0)]));
    let json = serde_json::to_string(&inventory)
        .unwrap()
        .replace("\"active\"", "\"hyperactive\"")
        .replace("\"infiniband\"", "\"infinitum\"")
        .replace("\"subnet-and-manager\"", "\"oracle\"")
        .replace("\"link-up\"", "\"link-over\"")
        .replace("\"usable\"", "\"splendid\"");
    let back: Inventory = serde_json::from_str(&json).unwrap();
    assert!(!back.adapters[0].is_usable(), "an unknown word is no yes");
    assert_eq!(back.adapters[0].device, "mlx5_0");
}

#[test]
fn labels_and_the_node_of_the_configuration_are_registered() {
    let tree = recorded::sysfs("dgx-h100");
    let config = crate::config::parse(
        std::path::Path::new("agent.yaml"),
        "node: n7\nlabels: {rack: r1}\nsocket_interface: eth9\nfabrics: [{name: ib-east, adapters: [mlx5_0, mlx5_99]}]\n",
        &|_| None,
    );
    let sources = Sources {
        gpus: GpuSources::default(),
        sys: tree.path().join("sys"),
        proc: tree.path().join("proc"),
        dev: None,
        config: config.unwrap(),
    };
    let inventory = assemble(&sources, no_gpus(), &Ok(Vec::new()));
    assert_eq!(inventory.node, "n7");
    assert_eq!(inventory.labels["rack"], "r1");
    assert_eq!(inventory.fabrics[0].adapters, ["mlx5_0"]);
    assert_eq!(inventory.route.interface, text("eth9"));
    let page = page(&inventory);
    assert!(
        page.contains("  - fabric ib-east names adapter mlx5_99, which this node does not have\n"),
        "{page}"
    );
    assert!(page.contains("  label    rack: r1\n"), "{page}");
}
