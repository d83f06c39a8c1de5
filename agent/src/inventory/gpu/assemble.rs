//! From what a source said to the inventory: classes, unified memory, slices, health, domains. Pure but for two small files.

use std::fs;
use std::path::Path;

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::gpu::{
    Backend, Clique, DriverState, Ecc, FabricState, Gpu, GpuFabric, GpuMemory, Gpus, HealthCode,
    HealthFlag, MigSlice, SourceCause, SourceFailure,
};

use super::class::{Model, class_of, slice_class};
use super::domains::domains;
use super::facts::{Cause, DriverFacts, FabricFacts, Fact, GpuFacts, SliceFacts, reading};
use super::health::{flags, settle_memory_held};

/// `/proc/meminfo` has some 60 lines.
const MEMINFO_MAX_BYTES: usize = 64 * 1_024;
const KIB_PER_MIB: u64 = 1_024;

/// Where the machine itself is read.
pub struct Machine<'a> {
    pub proc: &'a Path,
    pub sysfs: &'a Path,
}

/// The inventory that a source's facts amount to.
pub fn assemble(
    facts: &DriverFacts,
    backend: Backend,
    passed_over: Vec<SourceFailure>,
    machine: &Machine<'_>,
) -> Gpus {
    let mut devices = Vec::new();
    for gpu in &facts.gpus {
        let whole = whole(gpu, machine);
        let slices: Vec<Gpu> = match (&gpu.mig, &gpu.slices) {
            (Ok(true), Ok(slices)) => slices.iter().map(|part| slice(&whole, part)).collect(),
            _ => Vec::new(),
        };
        devices.push(whole);
        devices.extend(slices);
    }
    for gpu in &mut devices {
        settle_memory_held(gpu, &|_| false);
    }
    Gpus {
        driver: DriverState::Answering,
        backend,
        passed_over,
        driver_version: reading(&facts.driver_version),
        cuda_version: reading(&facts.cuda_version),
        devices,
        nvlink_domains: domains(facts),
        problems: facts.problems.clone(),
    }
}

/// What is known when no source answered.
pub fn without_source(passed_over: Vec<SourceFailure>) -> Gpus {
    let is_absent = passed_over.iter().all(|failure| {
        matches!(
            failure.cause,
            SourceCause::NotInstalled | SourceCause::NotAsked
        )
    });
    let driver = if is_absent {
        DriverState::Absent
    } else if passed_over
        .iter()
        .any(|failure| failure.cause == SourceCause::Unresponsive)
    {
        DriverState::Unresponsive
    } else {
        DriverState::Failing
    };
    let why = match driver {
        DriverState::Absent => "no NVIDIA driver is installed",
        DriverState::Unresponsive => "the driver does not respond",
        _ => "the driver does not answer",
    };
    Gpus {
        driver,
        backend: Backend::None,
        passed_over,
        driver_version: Reading::unknown(why),
        cuda_version: Reading::unknown(why),
        devices: Vec::new(),
        nvlink_domains: Reading::unknown(why),
        problems: Vec::new(),
    }
}

/// The GPUs that PCI has and the driver does not list, as devices that can't be used. `pci` holds addresses as sysfs spells them.
pub fn missing_from_driver(pci: &[String], gpus: &Gpus) -> Vec<Gpu> {
    let listed = |address: &String| {
        gpus.devices
            .iter()
            .any(|gpu| gpu.pci.value() == Some(address))
    };
    pci.iter()
        .filter(|address| !listed(address))
        .map(|address| {
            let mut facts = GpuFacts::unread(&Cause::NotRead("the driver does not list it".into()));
            facts.pci = Ok(address.clone());
            let mut gpu = described(&facts);
            gpu.health = vec![HealthFlag {
                code: HealthCode::NotListed,
                reason: format!("PCI has a GPU at {address}, and the driver does not list it"),
            }];
            gpu
        })
        .collect()
}

fn whole(facts: &GpuFacts, machine: &Machine<'_>) -> Gpu {
    let mut gpu = described(facts);
    let model = gpu.name.value().map(|name| Model::of(name));
    gpu.vgpu = model.as_ref().is_some_and(|model| model.vgpu);
    if model.is_some_and(|model| model.unified) {
        unify(&mut gpu.memory, machine.proc);
    }
    gpu.class = class_of(&gpu.name, &gpu.memory.total_mib);
    let node = gpu.pci.value().and_then(|pci| numa(machine.sysfs, pci));
    // The kernel's number counts; where it has none, the driver's word.
    if let Some(node) = node
        && (node.known().is_some() || gpu.numa_node.known().is_none())
    {
        gpu.numa_node = node;
    }
    gpu.health = flags(facts);
    gpu
}

/// The values alone.
fn described(facts: &GpuFacts) -> Gpu {
    Gpu {
        index: reading(&facts.index),
        uuid: reading(&facts.uuid),
        name: reading(&facts.name),
        class: Reading::unknown("name and memory are unknown"),
        memory: GpuMemory {
            total_mib: reading(&not_zero(&facts.total_mib)),
            used_mib: reading(&facts.used_mib),
            reserved_mib: reading(&facts.reserved_mib),
            unified: false,
        },
        compute_capability: reading(&facts.compute_capability),
        pci: reading(&facts.pci),
        numa_node: reading(&facts.numa_node),
        health: Vec::new(),
        ecc: Ecc {
            uncorrected_volatile: reading(&facts.ecc_volatile),
            uncorrected_aggregate: reading(&facts.ecc_aggregate),
            remap_pending: reading(&facts.remap_pending),
            remap_failed: reading(&facts.remap_failed),
        },
        fabric: fabric(&facts.fabric),
        nvlinks_up: reading(&facts.nvlinks_up),
        // A GPU that can't do MIG is not in that mode.
        mig: match &facts.mig {
            Err(Cause::NotSupported) => Reading::Known(false),
            mig => reading(mig),
        },
        slice: None,
        vgpu: false,
        processes: reading(&facts.processes),
    }
}

/// A slice: its parent but for its own name, memory and class. What is wrong with the parent is wrong with it, save that MIG is on.
fn slice(parent: &Gpu, facts: &SliceFacts) -> Gpu {
    let health = parent.health.iter();
    let profile = reading(&facts.profile);
    Gpu {
        uuid: reading(&facts.uuid),
        class: slice_class(&parent.name, &profile),
        memory: GpuMemory {
            total_mib: reading(&not_zero(&facts.total_mib)),
            used_mib: reading(&facts.used_mib),
            reserved_mib: reading(&facts.reserved_mib),
            unified: false,
        },
        health: health
            .filter(|flag| flag.code != HealthCode::Mig)
            .cloned()
            .collect(),
        nvlinks_up: Reading::unknown("a slice has no NVLink"),
        fabric: GpuFabric {
            state: Reading::Known(FabricState::NotSupported),
            clique: Reading::Known(None),
        },
        slice: Some(MigSlice {
            parent: parent.uuid.value().cloned().unwrap_or_default(),
            profile,
        }),
        processes: Reading::unknown("told for the whole GPU only"),
        ..parent.clone()
    }
}

/// A driver that says 0 does not know.
fn not_zero(total_mib: &Fact<u64>) -> Fact<u64> {
    match total_mib {
        Ok(0) => Err(Cause::NotRead(
            "the driver reports a total of 0".to_string(),
        )),
        other => other.clone(),
    }
}

/// The clique counts only in a fabric that is complete and has a cluster: zero uuids are those of every HGX node.
fn fabric(facts: &FabricFacts) -> GpuFabric {
    let clique = match (&facts.state, &facts.status) {
        (Err(cause), _) => Reading::unknown(cause.to_string()),
        (Ok(FabricState::Completed), Ok(status)) if status == "Success" => {
            match (&facts.cluster_uuid, &facts.clique_id) {
                (Ok(uuid), _) if uuid.chars().all(|c| c == '0' || c == '-') => Reading::Known(None),
                // Without a number but with a fabric there is no cluster either.
                (Err(Cause::NotSupported), _) => Reading::Known(None),
                (Ok(uuid), Ok(id)) => Reading::Known(Some(Clique {
                    cluster_uuid: uuid.clone(),
                    id: *id,
                })),
                (Err(cause), _) | (_, Err(cause)) => Reading::unknown(cause.to_string()),
            }
        }
        (Ok(FabricState::Completed), Err(cause)) => Reading::unknown(cause.to_string()),
        (Ok(_), _) => Reading::Known(None),
    };
    GpuFabric {
        state: reading(&facts.state),
        clique,
    }
}

/// Total and used of the machine's memory, for a GPU without its own. Drivers report nothing, or the same total.
fn unify(memory: &mut GpuMemory, proc: &Path) {
    memory.unified = true;
    let text = fs::read_to_string(proc.join("meminfo"));
    let field = |name: &str| {
        let text = text
            .as_ref()
            .map_err(|error| format!("/proc/meminfo: {error}"))?;
        meminfo_mib(text, name).ok_or_else(|| format!("/proc/meminfo has no {name}"))
    };
    let total = field("MemTotal");
    let used = total.clone().and_then(|total| {
        let available = field("MemAvailable")?;
        Ok(total.saturating_sub(available))
    });
    // Some drivers do report the total; it counts where the kernel's own can't be read.
    match total {
        Ok(total) => memory.total_mib = Reading::Known(total),
        Err(why) if memory.total_mib.value().is_none() => {
            memory.total_mib = Reading::Unknown(why);
        }
        Err(_) => {}
    }
    memory.used_mib = used.map_or_else(Reading::Unknown, Reading::Known);
    memory.reserved_mib = Reading::unknown("the memory is the machine's");
}

/// `MemTotal:       125490484 kB`. A zero is no value.
pub fn meminfo_mib(text: &str, name: &str) -> Option<u64> {
    let line = text
        .get(..text.len().min(MEMINFO_MAX_BYTES))
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    (kib > 0).then_some(kib / KIB_PER_MIB)
}

/// The NUMA node that the kernel names. `None`: there is no such file, so that the driver's own word counts.
fn numa(sysfs: &Path, pci: &str) -> Option<Reading<u32>> {
    let path = sysfs.join("bus/pci/devices").join(pci).join("numa_node");
    let text = fs::read_to_string(path).ok()?;
    Some(match text.trim().parse::<i64>() {
        Ok(-1) => Reading::unknown("the kernel names none"),
        Ok(node) => u32::try_from(node).map_or_else(
            |_| Reading::unknown(format!("the kernel says {node}")),
            Reading::Known,
        ),
        Err(_) => Reading::unknown("the kernel's file holds no number"),
    })
}
