//! Every recording of nvidia-smi, through the reading and the assembly that a node goes through.

mod failing;
mod joined;

use std::collections::BTreeMap;
use std::path::Path;

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::gpu::{Backend, DriverState, Gpu, Gpus, HealthCode};

use super::run::{Ran, RunError, Smi};
use super::{list, read};
use crate::inventory::gpu::assemble::{Machine, assemble};
use crate::inventory::gpu::facts::DriverFacts;

/// nvidia-smi as it was recorded: an answer for each kind of question; others are refused as an old driver does.
#[derive(Default)]
pub struct Recorded {
    answers: BTreeMap<&'static str, (String, i32)>,
}

fn recording(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/recordings/hw/smi");
    std::fs::read_to_string(root.join(path)).unwrap()
}

fn names(directory: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/recordings/hw/smi");
    let mut names: Vec<String> = std::fs::read_dir(root.join(directory))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

impl Recorded {
    pub fn new(gpus: &str) -> Recorded {
        Recorded::default()
            .with(
                "--query-gpu",
                recording(&format!("query-gpu/{gpus}.csv")),
                0,
            )
            .with("--query-compute-apps", String::new(), 0)
    }

    pub fn with(mut self, question: &'static str, answer: impl Into<String>, status: i32) -> Self {
        self.answers.insert(question, (answer.into(), status));
        self
    }

    pub fn with_file(self, question: &'static str, path: &str) -> Self {
        self.with(question, recording(path), 0)
    }
}

impl Smi for Recorded {
    fn run(&self, arguments: &[&str]) -> Result<Ran, RunError> {
        let question = arguments.join(" ");
        let answer = self
            .answers
            .iter()
            .find(|(known, _)| question.starts_with(*known));
        let (stdout, status) = answer.map_or_else(
            || ("Invalid combination of input arguments.\n".to_string(), 2),
            |(_, answer)| answer.clone(),
        );
        Ok(Ran {
            status: Some(status),
            stdout,
            stderr: String::new(),
        })
    }
}

/// A machine of which nothing can be read.
fn nowhere() -> Machine<'static> {
    Machine {
        proc: Path::new("/nonexistent"),
        sysfs: Path::new("/nonexistent"),
    }
}

pub fn inventory(facts: &DriverFacts) -> Gpus {
    assemble(facts, Backend::NvidiaSmi, Vec::new(), &nowhere())
}

fn of(smi: &Recorded) -> Gpus {
    inventory(&read(smi).unwrap())
}

fn codes(gpus: &Gpus, at: usize) -> Vec<HealthCode> {
    gpus.devices[at]
        .health
        .iter()
        .map(|flag| flag.code)
        .collect()
}

fn reason(gpus: &Gpus, at: usize) -> &str {
    &gpus.devices[at].health[0].reason
}

#[test]
fn every_recorded_row_is_read_with_its_class_and_its_memory() {
    let expected: BTreeMap<&str, (usize, &str, u64)> = [
        ("a10", (1, "a10-22g", 23_028)),
        ("a100-mig-mixed", (2, "a100-sxm4-40g", 40_960)),
        ("a100-pcie-40", (1, "a100-pcie-40g", 40_960)),
        ("a100-pcie-80", (1, "a100-pcie-80g", 81_920)),
        ("a100-sxm-40", (1, "a100-sxm4-40g", 40_960)),
        ("a100-sxm-80", (1, "a100-sxm4-80g", 81_920)),
        ("a10g", (1, "a10g-22g", 23_028)),
        ("a40", (1, "a40-45g", 46_068)),
        ("a6000-ecc-off", (1, "a6000-48g", 49_140)),
        ("a6000-ecc-on", (1, "a6000-45g", 46_068)),
        ("b200", (1, "b200-179g", 183_359)),
        ("b300", (1, "b300-269g", 275_040)),
        ("gb200-4x", (4, "gb200-185g", 189_471)),
        ("gb300-4x", (4, "gb300-278g", 284_208)),
        ("gh200-144g", (1, "gh200-143g", 146_831)),
        ("gh200-480", (1, "gh200-96g", 97_871)),
        ("h100-mig-1x", (1, "h100-sxm-80g", 81_559)),
        ("h100-nvl", (1, "h100-nvl-94g", 95_830)),
        ("h100-pcie", (1, "h100-pcie-80g", 81_559)),
        ("h100-sxm-1x", (1, "h100-sxm-80g", 81_559)),
        ("h100-sxm-1x-load", (1, "h100-sxm-80g", 81_559)),
        ("h100-sxm-8x", (8, "h100-sxm-80g", 81_559)),
        ("h200-1x", (1, "h200-140g", 143_771)),
        ("h200-mig-1x", (1, "h200-140g", 143_771)),
        ("h200-nvl", (1, "h200-nvl-140g", 143_771)),
        ("health-aggregate-only", (1, "a100-sxm4-80g", 81_920)),
        ("health-gpu-is-lost-cells", (2, "rtx3090-24g", 24_576)),
        ("health-handle-error-line-mixed", (3, "rtx3090-24g", 24_576)),
        (
            "health-insufficient-permissions",
            (1, "h100-sxm-80g", 81_559),
        ),
        (
            "health-requires-reset",
            (1, "rtxpro6000-blackwell-workstation-96g", 97_887),
        ),
        ("health-row-remap-failure", (1, "h100-sxm-80g", 81_559)),
        ("health-row-remap-pending", (1, "h100-sxm-80g", 81_559)),
        ("health-uncorrected-ecc", (8, "h100-sxm-80g", 81_559)),
        ("l4", (1, "l4-22g", 23_034)),
        ("l40", (1, "l40-45g", 46_068)),
        ("l40s-1x", (1, "l40s-45g", 46_068)),
        ("l40s-8x", (8, "l40s-45g", 46_068)),
        ("l40s-ecc-off", (1, "l40s-48g", 49_140)),
        ("old-driver-a100-80", (1, "a100-sxm4-79g", 81_251)),
        ("old-driver-v100", (1, "v100-sxm2-32g", 32_510)),
        ("rtx-2080-super", (1, "rtx2080-super-8g", 8_192)),
        ("rtx-3090-2x", (2, "rtx3090-24g", 24_576)),
        ("rtx-4080-super", (1, "rtx4080-super-16g", 16_376)),
        ("rtx-4090", (1, "rtx4090-24g", 24_564)),
        ("rtx-5090", (1, "rtx5090-32g", 32_607)),
        ("rtx-6000-ada", (1, "6000ada-48g", 49_140)),
        ("rtx-pro-6000-bse", (1, "rtxpro6000-96g", 97_887)),
        ("t4", (1, "t4-15g", 15_360)),
        ("v100-16", (1, "v100-sxm2-16g", 16_384)),
        ("v100-32", (1, "v100-sxm2-32g", 32_768)),
        ("vgpu-guest-grid", (1, "a100d-20c-20g", 20_480)),
        ("wsl2-a6000", (1, "a6000-45g", 46_068)),
    ]
    .into();
    for file in names("query-gpu") {
        let name = file.trim_end_matches(".csv");
        if ["dgx-spark-gb10", "jetson-orin"].contains(&name) {
            continue; // Unified memory has its own test.
        }
        let gpus = of(&Recorded::new(name));
        let (count, class, total) = expected[name];
        assert_eq!(gpus.devices.len(), count, "{name}");
        let first = &gpus.devices[0];
        assert_eq!(first.class, Reading::Known(class.to_string()), "{name}");
        assert_eq!(first.memory.total_mib, Reading::Known(total), "{name}");
        assert_eq!(first.index, Reading::Known(0), "{name}");
        assert_eq!(gpus.driver, DriverState::Answering, "{name}");
        assert_eq!(first.vgpu, name == "vgpu-guest-grid", "{name}");
    }
}

#[test]
fn a_row_has_every_value_it_shows_and_none_that_it_does_not() {
    let gpus = of(&Recorded::new("gb200-4x"));
    let last = &gpus.devices[3];
    assert_eq!(last.pci, Reading::Known("0019:01:00.0".to_string()));
    assert_eq!(last.compute_capability.value().unwrap().to_string(), "10.0");
    assert_eq!(last.memory.used_mib, Reading::Known(0));
    assert_eq!(last.ecc.uncorrected_volatile, Reading::Known(0));
    assert_eq!(last.ecc.remap_pending, Reading::Known(false));
    assert_eq!(last.mig, Reading::Known(false));
    assert_eq!(
        last.memory.reserved_mib,
        Reading::unknown("the answer lacks it")
    );
    assert_eq!(
        gpus.driver_version,
        Reading::Known("580.159.03".to_string())
    );

    let gpus = of(&Recorded::new("rtx-2080-super"));
    let ecc = &gpus.devices[0].ecc;
    let not_supported = "not supported by this GPU or driver";
    assert_eq!(ecc.uncorrected_volatile, Reading::unknown(not_supported));
    assert_eq!(ecc.remap_failed, Reading::unknown(not_supported));
    assert_eq!(
        gpus.devices[0].mig,
        Reading::Known(false),
        "what can't do MIG is not in that mode"
    );
}

#[test]
fn unified_memory_comes_from_the_machine_and_is_never_zero() {
    let proc = std::env::temp_dir().join(format!("llmgw-unified-{}", std::process::id()));
    std::fs::create_dir_all(&proc).unwrap();
    let meminfo = "MemTotal:       125489508 kB\nMemFree: 1 kB\nMemAvailable:  120000000 kB\n";
    std::fs::write(proc.join("meminfo"), meminfo).unwrap();
    let machine = Machine {
        proc: &proc,
        sysfs: Path::new("/nonexistent"),
    };
    let smi = Recorded::new("dgx-spark-gb10").with_file(
        "--query-compute-apps",
        "query-compute-apps/gb10-unified.csv",
    );
    let facts = read(&smi).unwrap();
    let gb10 = &assemble(&facts, Backend::NvidiaSmi, Vec::new(), &machine).devices[0];
    assert!(gb10.memory.unified);
    assert_eq!(gb10.memory.total_mib, Reading::Known(122_548));
    assert_eq!(gb10.memory.used_mib, Reading::Known(122_548 - 117_187));
    assert_eq!(gb10.class, Reading::Known("gb10-120g".to_string()));
    assert_eq!(gb10.pci, Reading::Known("000f:01:00.0".to_string()));
    assert!(
        gb10.has(HealthCode::MemoryHeld),
        "96073 MiB belong to a process"
    );
    assert!(
        gb10.health[0]
            .reason
            .contains("process 6330 holds 96073 MiB")
    );

    let idle = read(&Recorded::new("dgx-spark-gb10")).unwrap();
    let idle = assemble(&idle, Backend::NvidiaSmi, Vec::new(), &machine);
    assert_eq!(
        idle.devices[0].health,
        [],
        "others use the machine's memory"
    );

    let facts = read(&Recorded::new("jetson-orin")).unwrap();
    let orin = &assemble(&facts, Backend::NvidiaSmi, Vec::new(), &machine).devices[0];
    assert_eq!(orin.class, Reading::Known("orin-120g".to_string()));
    assert!(orin.pci.value().is_none() && orin.is_usable());
    std::fs::remove_dir_all(&proc).unwrap();

    let without = &inventory(&read(&Recorded::new("dgx-spark-gb10")).unwrap()).devices[0];
    assert!(without.memory.total_mib.value().is_none());
    assert!(without.class.value().is_none() && !without.is_usable());
}

#[test]
fn each_fault_has_its_flag_and_its_reason() {
    let gpus = of(&Recorded::new("health-uncorrected-ecc"));
    for at in 0..8 {
        let expected: &[HealthCode] = if at == 2 {
            &[HealthCode::UncorrectedEcc]
        } else {
            &[]
        };
        assert_eq!(codes(&gpus, at), expected, "GPU {at}");
    }
    assert_eq!(
        reason(&gpus, 2),
        "4 uncorrected memory errors since the driver was loaded"
    );
    assert_eq!(gpus.usable().count(), 7);

    let gpus = of(&Recorded::new("health-aggregate-only"));
    assert_eq!(codes(&gpus, 0), [], "history is no fault");
    let aggregate = &gpus.devices[0].ecc.uncorrected_aggregate;
    assert_eq!(*aggregate, Reading::Known(37));

    let gpus = of(&Recorded::new("health-row-remap-pending"));
    assert_eq!(
        codes(&gpus, 0),
        [HealthCode::UncorrectedEcc, HealthCode::RowRemapPending]
    );
    let gpus = of(&Recorded::new("health-row-remap-failure"));
    assert_eq!(codes(&gpus, 0), [HealthCode::RowRemapFailed]);

    let gpus = of(&Recorded::new("health-requires-reset"));
    assert_eq!(
        codes(&gpus, 0),
        [HealthCode::NeedsReset, HealthCode::MemoryHeld]
    );
    assert_eq!(
        gpus.devices[0].health[1].reason,
        "58222 MiB are in use and no process is listed for them"
    );
}

#[test]
fn a_lost_gpu_is_flagged_and_the_healthy_ones_stay() {
    let gpus = of(&Recorded::new("health-gpu-is-lost-cells"));
    assert_eq!(codes(&gpus, 0), []);
    assert_eq!(codes(&gpus, 1), [HealthCode::Lost]);
    assert!(gpus.devices[1].memory.total_mib.value().is_none());
    assert_eq!(
        gpus.devices[1].pci,
        Reading::Known("0000:65:00.0".to_string())
    );
}

#[test]
fn one_bad_gpu_among_healthy_ones_survives_an_exit_status() {
    let mixed = recording("query-gpu/health-handle-error-line-mixed.csv");
    let smi = Recorded::new("l4").with("--query-gpu", mixed, 255);
    let gpus = of(&smi);
    assert_eq!(gpus.devices.len(), 3);
    assert_eq!(codes(&gpus, 1), [HealthCode::DriverError]);
    assert_eq!(
        gpus.devices[1].pci,
        Reading::Known("0000:02:00.0".to_string())
    );
    assert!(gpus.devices[1].uuid.value().is_none());
    assert!(gpus.devices[1].index.value().is_none());
    assert_eq!(gpus.usable().count(), 2);

    // The list goes on naming it, and then it has its number back.
    let listed = "GPU 0: A (UUID: GPU-5eed0001-0a0a-4b4b-8c8c-000000000001)\n\
                  GPU 1: NVIDIA GeForce RTX 3090 (UUID: GPU-bad)\n\
                  GPU 2: A (UUID: GPU-5eed0003-0a0a-4b4b-8c8c-000000000003)\n";
    let gpus = of(&smi.with("-L", listed, 0));
    assert_eq!(gpus.devices.len(), 3);
    assert_eq!(gpus.devices[1].uuid, Reading::Known("GPU-bad".to_string()));
    assert_eq!(gpus.devices[1].index, Reading::Known(1));
    assert_eq!(codes(&gpus, 1), [HealthCode::DriverError]);
}

#[test]
fn memory_of_others_is_told_from_what_an_idle_gpu_uses() {
    for (name, apps, held) in [
        ("h100-sxm-1x", "", None),
        ("h100-sxm-8x", "", None),
        ("rtx-4080-super", "", None),
        ("h100-mig-1x", "", None),
        (
            "h100-sxm-1x-load",
            "",
            Some("19818 MiB are in use and no process is listed for them"),
        ),
        (
            "h100-sxm-1x-load",
            "h100-three-procs",
            Some("process 11345 holds 15690 MiB, and 2 more processes use it"),
        ),
        (
            "b200",
            "leaked-vllm",
            Some("process 396079 holds 108863 MiB"),
        ),
        (
            "rtx-2080-super",
            "container-or-wddm-na",
            Some("process 13264 holds memory that is not told, and 1 more process uses it"),
        ),
        ("h100-sxm-1x", "insufficient-permissions", None),
    ] {
        let mut smi = Recorded::new(name);
        if !apps.is_empty() {
            let path = format!("query-compute-apps/{apps}.csv");
            smi = smi.with_file("--query-compute-apps", &path);
        }
        let gpus = of(&smi);
        let flag = gpus.devices[0]
            .health
            .iter()
            .find(|flag| flag.code == HealthCode::MemoryHeld);
        assert_eq!(
            flag.map(|flag| flag.reason.as_str()),
            held,
            "{name} with {apps}"
        );
    }
    let denied = of(&Recorded::new("health-insufficient-permissions"));
    assert_eq!(
        denied.devices[0].memory.used_mib,
        Reading::unknown("insufficient permissions")
    );
}

#[test]
fn the_agent_s_own_engines_hold_nothing_of_others() {
    let smi = Recorded::new("h100-sxm-1x-load").with_file(
        "--query-compute-apps",
        "query-compute-apps/h100-three-procs.csv",
    );
    let mut gpus = of(&smi);
    let own = |pid: u32| [11_327, 11_328, 11_345].contains(&pid);
    crate::inventory::gpu::health::settle_memory_held(&mut gpus.devices[0], &own);
    assert_eq!(codes(&gpus, 0), []);
    let all_but_one = |pid: u32| pid != 11_328;
    crate::inventory::gpu::health::settle_memory_held(&mut gpus.devices[0], &all_but_one);
    assert_eq!(reason(&gpus, 0), "process 11328 holds 1542 MiB");
}

#[test]
fn slices_are_offered_and_their_gpu_is_withheld() {
    let smi = Recorded::new("h100-mig-1x")
        .with_file("-L", "list/h100-mig.txt")
        .with_file("nvlink", "nvlink/h100-mig.txt");
    let gpus = of(&smi);
    assert_eq!(gpus.devices.len(), 5);
    assert_eq!(codes(&gpus, 0), [HealthCode::Mig]);
    assert_eq!(
        reason(&gpus, 0),
        "MIG is on: its 4 slices are offered instead"
    );
    assert_eq!(
        gpus.devices[0].nvlinks_up,
        Reading::unknown("not told in MIG mode")
    );
    let classes: Vec<&str> = gpus
        .usable()
        .map(|gpu| gpu.class.value().unwrap().as_str())
        .collect();
    assert_eq!(
        classes,
        [
            "h100-sxm-mig-3g.40gb",
            "h100-sxm-mig-2g.20gb",
            "h100-sxm-mig-1g.10gb",
            "h100-sxm-mig-1g.10gb"
        ]
    );
    let first = &gpus.devices[1];
    assert_eq!(
        first.uuid,
        Reading::Known("MIG-5eed0000-0000-5000-8000-000000000000".to_string())
    );
    assert_eq!(
        first.slice.as_ref().unwrap().parent,
        *gpus.devices[0].uuid.value().unwrap()
    );
    assert!(
        first.memory.total_mib.value().is_none(),
        "not the whole GPU's memory"
    );

    // One GPU in MIG mode beside one that is not, and a list that can't be had.
    let gpus = of(&Recorded::new("a100-mig-mixed"));
    assert_eq!(codes(&gpus, 0), [HealthCode::Mig]);
    assert_eq!(
        reason(&gpus, 0),
        "MIG is on, and its slices are unknown: nvidia-smi -L does not list it"
    );
    assert_eq!(codes(&gpus, 1), []);
}

#[test]
fn the_recorded_lists_name_gpus_and_what_can_t_be_opened() {
    let listing = list::parse(&recording("list/one-bad-gpu.txt"));
    assert_eq!(listing.gpus.len(), 3);
    assert_eq!(listing.gpus[0].index, 1);
    assert_eq!(listing.gpus[0].name, "NVIDIA GeForce RTX 2080 Ti");
    assert_eq!(listing.handles[0].pci.as_deref(), Ok("0000:18:00.0"));
    assert_eq!(listing.foreign_lines, 0);
    // Such a line is a GPU, also when the rows pass over it.
    let gpus = of(&Recorded::new("l4").with_file("-L", "list/one-bad-gpu.txt"));
    let bad = |gpu: &&Gpu| gpu.pci == Reading::Known("0000:18:00.0".to_string());
    assert!(
        gpus.devices
            .iter()
            .find(bad)
            .unwrap()
            .has(HealthCode::DriverError)
    );
    let orin = list::parse("GPU 0: Orin (nvgpu) (UUID: GPU-1)\n");
    assert_eq!(orin.gpus[0].name, "Orin (nvgpu)");
}
