//! Recordings of NVML, and that both sources give the same inventory of the same machine.

use std::path::Path;

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::gpu::{Backend, FabricState, Gpu, Gpus, HealthCode};
use serde_json::{Value, json};

use super::read;
use super::recorded::Recording;
use crate::inventory::gpu::assemble::{Machine, assemble};
use crate::inventory::gpu::scripts::Scripts;
use crate::inventory::gpu::smi;

fn machine() -> Machine<'static> {
    Machine {
        proc: Path::new("/nonexistent"),
        sysfs: Path::new("/nonexistent"),
    }
}

fn inventory(recording: &Recording) -> Gpus {
    assemble(
        &read(recording).unwrap(),
        Backend::Nvml,
        Vec::new(),
        &machine(),
    )
}

/// `count` healthy L4, with what a test changes.
fn machine_with(count: u32, change: impl Fn(u32, &mut Value)) -> Recording {
    let devices: Vec<Value> = (0..count)
        .map(|index| {
            let mut device = json!({
                "uuid": format!("GPU-{index}"),
                "name": "NVIDIA L4",
                "memory_v2": {"total": 24_153_000_000_u64, "reserved": 0, "used": 0},
                "compute_capability": [8, 9],
                "pci_bus_id": format!("00000000:{:02X}:00.0", 0x10 + index),
                "mig_mode": "NOT_SUPPORTED",
                "ecc_volatile_uncorrected": 0,
                "ecc_aggregate_uncorrected": 0,
                "remapped_rows": {"pending": false, "failure": false},
                "nvlinks": [],
                "fabric": "NOT_SUPPORTED",
                "processes": [],
            });
            change(index, &mut device);
            device
        })
        .collect();
    Recording::new(json!({"driver": "580.95.05", "cuda": "13.0", "devices": devices}))
}

fn codes(gpu: &Gpu) -> Vec<HealthCode> {
    gpu.health.iter().map(|flag| flag.code).collect()
}

#[test]
fn eight_gpus_behind_switches_are_one_domain() {
    for name in ["hgx-h100-8", "hgx-h100-visible-switch"] {
        let gpus = inventory(&Recording::load(name));
        assert_eq!(gpus.devices.len(), 8, "{name}");
        let domains = gpus.nvlink_domains.known().unwrap();
        assert_eq!(domains.len(), 1, "{name}");
        assert_eq!(domains[0].gpus.len(), 8, "{name}");
        let gpu = &gpus.devices[7];
        assert_eq!(gpu.class, Reading::Known("h100-sxm-80g".to_string()));
        assert_eq!(gpu.memory.total_mib, Reading::Known(81_559));
        assert_eq!(gpu.memory.used_mib, Reading::Known(0));
        assert_eq!(gpu.memory.reserved_mib, Reading::Known(479));
        assert_eq!(gpu.nvlinks_up, Reading::Known(18));
        assert_eq!(gpu.fabric.state, Reading::Known(FabricState::Completed));
        assert_eq!(
            gpu.fabric.clique,
            Reading::Known(None),
            "zeros are no cluster"
        );
        assert!(gpu.is_usable());
    }
}

#[test]
fn memory_that_nvml_does_not_support_is_the_machine_s() {
    let gpus = inventory(&Recording::load("gb10-memory-not-supported"));
    let gpu = &gpus.devices[0];
    assert!(gpu.memory.unified);
    assert!(
        gpu.memory.total_mib.value().is_none(),
        "this test has no /proc"
    );
    assert_eq!(
        gpu.nvlinks_up,
        Reading::unknown("not supported by this GPU or driver")
    );
    let processes = gpu.processes.known().unwrap();
    assert_eq!(processes[0].memory_mib, Reading::Known(96_073));
    assert_eq!(gpu.fabric.state, Reading::Known(FabricState::NotSupported));
}

/// A `/sys` with the NUMA nodes of the eight GPUs, removed when dropped.
fn sysfs() -> Scripts {
    let sysfs = Scripts::new("both-sources");
    let buses = ["1b", "43", "52", "61", "9d", "c3", "d1", "df"];
    for (at, bus) in buses.into_iter().enumerate() {
        let device = format!("bus/pci/devices/0000:{bus}:00.0");
        let device = sysfs.path().join(device);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("numa_node"), format!("{}\n", at / 4)).unwrap();
    }
    sysfs
}

#[test]
fn both_sources_give_the_same_inventory_of_the_same_machine() {
    // The recorded rows end before what newer drivers tell, and count the driver's reserve as used.
    let rows = std::fs::read_to_string(format!(
        "{}/../tests/recordings/hw/smi/query-gpu/h100-sxm-8x.csv",
        env!("CARGO_MANIFEST_DIR")
    ));
    let newer = ", 479, None, Completed, Success, 0, 00000000-0000-0000-0000-000000000000\n";
    let rows = rows
        .unwrap()
        .replace(", 472, ", ", 0, ")
        .replace('\n', newer);
    let smi = smi::tests::Recorded::new("h100-sxm-8x")
        .with("--query-gpu", rows, 0)
        .with_file("-L", "nvlink/hgx-h100-8x.txt")
        .with_file("topo -m", "topo/dgx-h100.txt")
        .with_file("nvlink", "nvlink/hgx-h100-8x.txt");
    let sysfs = sysfs();
    let machine = Machine {
        proc: Path::new("/nonexistent"),
        sysfs: sysfs.path(),
    };
    let from = |facts, backend| assemble(&facts, backend, Vec::new(), &machine);
    let by_smi = from(smi::read(&smi).unwrap(), Backend::NvidiaSmi);
    let by_nvml = from(read(&Recording::load("hgx-h100-8")).unwrap(), Backend::Nvml);
    assert_eq!(by_nvml.devices[7].numa_node, Reading::Known(1));
    // The recording of NVML lacks CUDA's version, as the one of nvidia-smi does.
    let as_smi = Gpus {
        backend: Backend::NvidiaSmi,
        ..by_nvml
    };
    assert_eq!(by_smi, as_smi);
}

#[test]
fn both_sources_give_the_same_unified_memory() {
    let smi = smi::tests::Recorded::new("dgx-spark-gb10").with(
        "--query-compute-apps",
        "6330, GPU-5eed0001-0a0a-4b4b-8c8c-000000000001, 96073\n",
        0,
    );
    let by_smi = smi::tests::inventory(&smi::read(&smi).unwrap());
    let by_nvml = inventory(&Recording::load("gb10-memory-not-supported"));
    let (smi, nvml) = (&by_smi.devices[0], &by_nvml.devices[0]);
    assert_eq!(smi.uuid, nvml.uuid);
    assert_eq!(smi.class, nvml.class);
    assert_eq!(smi.memory, nvml.memory);
    assert_eq!(smi.pci, nvml.pci);
    assert_eq!(smi.compute_capability, nvml.compute_capability);
    assert_eq!(smi.processes, nvml.processes);
    assert_eq!(smi.health, nvml.health);
    assert_eq!(smi.mig, nvml.mig);
}

#[test]
fn one_handle_that_fails_is_one_bad_gpu() {
    let gpus = inventory(&machine_with(3, |index, device| {
        if index == 1 {
            device["handle"] = json!("GPU_IS_LOST");
        }
    }));
    assert_eq!(gpus.devices.len(), 3);
    assert_eq!(codes(&gpus.devices[1]), [HealthCode::Lost]);
    assert_eq!(gpus.devices[1].index, Reading::Known(1));
    assert_eq!(gpus.usable().count(), 2);
}

#[test]
fn a_gpu_that_answers_with_errors_is_told_by_them() {
    for (key, error, code) in [
        ("memory_v2", "GPU_IS_LOST", HealthCode::Lost),
        ("processes", "RESET_REQUIRED", HealthCode::NeedsReset),
        (
            "ecc_volatile_uncorrected",
            "UNKNOWN",
            HealthCode::DriverError,
        ),
    ] {
        let gpus = inventory(&machine_with(1, |_, device| device[key] = json!(error)));
        assert_eq!(codes(&gpus.devices[0]), [code], "{key}");
    }
    // Not every error is a fault.
    for (key, error) in [
        ("ecc_volatile_uncorrected", "NOT_SUPPORTED"),
        ("processes", "NO_PERMISSION"),
        ("remapped_rows", "NOT_SUPPORTED"),
    ] {
        let gpus = inventory(&machine_with(1, |_, device| device[key] = json!(error)));
        assert_eq!(codes(&gpus.devices[0]), [], "{key}");
    }
}

#[test]
fn what_the_driver_asks_for_is_a_flag() {
    let gpus = inventory(&machine_with(1, |_, device| {
        device["recovery_action"] = json!("Drain and Reset");
    }));
    assert_eq!(codes(&gpus.devices[0]), [HealthCode::NeedsReset]);
    assert_eq!(
        gpus.devices[0].health[0].reason,
        "the driver asks for `Drain and Reset`"
    );
}

#[test]
fn the_driver_s_word_on_each_pair_outranks_its_links() {
    let linked = |_: u32, device: &mut Value| {
        device["nvlinks"] = json!([
            {"link": 0, "active": true, "remote_type": "switch", "remote_bus_id": ""}
        ]);
    };
    let by_links = inventory(&machine_with(4, linked));
    assert_eq!(by_links.nvlink_domains.known().unwrap()[0].gpus.len(), 4);

    let devices = machine_with(4, linked);
    let mut root = devices.into_root();
    root["p2p_nvlink"] = json!([
        [false, true, false, false],
        [true, false, false, false],
        [false, false, false, true],
        [false, false, true, false]
    ]);
    let gpus = inventory(&Recording::new(root));
    let domains = gpus.nvlink_domains.known().unwrap();
    assert_eq!(domains.len(), 2);
    assert_eq!(domains[1].gpus, ["GPU-2", "GPU-3"]);
}

#[test]
fn links_between_two_pairs_are_two_domains() {
    let gpus = inventory(&machine_with(4, |index, device| {
        let peer = 0x10 + (index ^ 1);
        device["nvlinks"] = json!([
            {"link": 0, "active": false, "remote_type": "unknown", "remote_bus_id": ""},
            {"link": 2, "active": true, "remote_type": "gpu", "remote_bus_id": format!("00000000:{peer:02X}:00.0")}
        ]);
    }));
    let domains = gpus.nvlink_domains.known().unwrap();
    assert_eq!(domains.len(), 2);
    assert_eq!(domains[0].gpus, ["GPU-0", "GPU-1"]);
    assert_eq!(gpus.devices[0].nvlinks_up, Reading::Known(1));
}

#[test]
fn links_to_nobody_in_particular_leave_the_domains_unknown() {
    for kind in ["unknown", "gpu"] {
        let gpus = inventory(&machine_with(2, |_, device| {
            device["nvlinks"] = json!([
                {"link": 0, "active": true, "remote_type": kind, "remote_bus_id": ""}
            ]);
        }));
        assert_eq!(
            gpus.nvlink_domains,
            Reading::unknown("links are up, and the driver does not say to whom"),
            "{kind}"
        );
    }
}

#[test]
fn slices_have_their_own_memory_and_their_gpu_is_withheld() {
    let gpus = inventory(&machine_with(1, |_, device| {
        device["name"] = json!("NVIDIA H100 80GB HBM3");
        device["mig_mode"] = json!([1, 1]);
        device["slices"] = json!([
            null,
            {"uuid": "MIG-1", "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
             "memory_v2": {"total": 10_468_982_784_u64, "reserved": 0, "used": 12_582_912}},
            {"uuid": "MIG-2", "name": "UNKNOWN", "memory_v2": "NOT_SUPPORTED"}
        ]);
    }));
    assert_eq!(gpus.devices.len(), 3);
    assert_eq!(codes(&gpus.devices[0]), [HealthCode::Mig]);
    let slice = &gpus.devices[1];
    assert_eq!(
        slice.class,
        Reading::Known("h100-sxm-mig-1g.10gb".to_string())
    );
    assert_eq!(slice.memory.total_mib, Reading::Known(9_984));
    assert_eq!(slice.memory.used_mib, Reading::Known(12));
    assert!(slice.is_usable());
    assert!(!gpus.devices[2].is_usable(), "its class is unknown");
}

#[test]
fn a_sick_gpu_s_slices_are_as_sick() {
    let gpus = inventory(&machine_with(1, |_, device| {
        device["mig_mode"] = json!([1, 1]);
        device["ecc_volatile_uncorrected"] = json!(2);
        device["slices"] = json!([
            {"uuid": "MIG-1", "name": "NVIDIA L4 MIG 1g.5gb", "memory_v2": "NOT_SUPPORTED"}
        ]);
    }));
    assert_eq!(codes(&gpus.devices[1]), [HealthCode::UncorrectedEcc]);
}
