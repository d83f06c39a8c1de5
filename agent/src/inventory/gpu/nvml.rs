//! GPUs as NVML tells them: the source of choice, since it says which pairs NVLink joins and what each slice has.
//!
//! The library's calls are a trait, so that recordings go through the same reading. Every call may fail by itself: an
//! old library lacks some, a lost GPU answers none, and neither hides the others.

pub mod library;

#[cfg(test)]
pub mod recorded;
#[cfg(test)]
mod tests;

use llmgw_proto::inventory::gpu::{ComputeCapability, FabricState, GpuProcess, SourceFailure};

use super::facts::{
    Cause, DriverFacts, FabricFacts, Fact, GpuFacts, SliceFacts, pci_address, reading,
};
use super::smi::cells::cluster_uuid;

/// `NVML_NVLINK_MAX_LINKS` of current drivers; older ones refuse numbers beyond their own.
const LINKS_MAX: u32 = 36;
const GPUS_MAX: u32 = 64;
/// A GPU has at most 7 slices.
const SLICES_MAX: u32 = 16;
const BYTES_PER_MIB: u64 = 1 << 20;

/// NVML, initialised.
pub trait Nvml {
    fn driver_version(&self) -> Fact<String>;
    fn cuda_version(&self) -> Fact<String>;
    fn gpu_count(&self) -> Result<u32, SourceFailure>;
    fn gpu(&self, index: u32) -> Fact<Box<dyn NvmlGpu + '_>>;
    /// Whether a pair may use NVLink: `nvmlDeviceGetP2PStatus`.
    fn may_use_nvlink(&self, first: u32, second: u32) -> Fact<bool>;
}

/// A handle of one GPU.
pub trait NvmlGpu {
    fn uuid(&self) -> Fact<String>;
    fn name(&self) -> Fact<String>;
    fn memory(&self) -> Fact<Memory>;
    fn compute_capability(&self) -> Fact<ComputeCapability>;
    fn pci_bus_id(&self) -> Fact<String>;
    fn ecc_volatile(&self) -> Fact<u64>;
    fn ecc_aggregate(&self) -> Fact<u64>;
    fn remapped_rows(&self) -> Fact<RemappedRows>;
    fn mig(&self) -> Fact<bool>;
    fn recovery(&self) -> Fact<Option<String>>;
    fn fabric(&self) -> Fact<Fabric>;
    fn link(&self, link: u32) -> Fact<Link>;
    fn processes(&self) -> Fact<Vec<Process>>;
    /// The slice at a place of a GPU in MIG mode; places may be empty.
    fn slice(&self, place: u32) -> Fact<Slice>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub total_bytes: u64,
    pub used_bytes: u64,
    /// `None`: counted as used, as old drivers do.
    pub reserved_bytes: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemappedRows {
    pub pending: bool,
    pub failed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fabric {
    /// NVML's number.
    pub state: u32,
    /// `Success`, or what went wrong.
    pub status: Fact<String>,
    pub clique_id: u32,
    pub cluster_uuid: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    pub active: bool,
    pub remote: Remote,
}

/// What is at the other end of an active link. Addresses are NVML's and may be absent in virtual machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Remote {
    Gpu(Option<String>),
    Switch(Option<String>),
    Unknown(Option<String>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    pub pid: u32,
    pub used_bytes: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    pub uuid: Fact<String>,
    /// `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
    pub name: Fact<String>,
    pub memory: Fact<Memory>,
}

/// Reads everything.
pub fn read(nvml: &dyn Nvml) -> Result<DriverFacts, SourceFailure> {
    let counted = nvml.gpu_count()?;
    let mut problems = Vec::new();
    if counted > GPUS_MAX {
        problems.push(format!(
            "NVML counts {counted} GPUs; {GPUS_MAX} of them are read"
        ));
    }
    let mut gpus = Vec::new();
    let mut links = Vec::new();
    for index in 0..counted.min(GPUS_MAX) {
        let (facts, active) = match nvml.gpu(index) {
            Ok(gpu) => read_gpu(index, &*gpu),
            Err(cause) => (unopened(index, cause), Ok(Vec::new())),
        };
        gpus.push(facts);
        links.push(active);
    }
    let joined = joined(nvml, &gpus, &links);
    Ok(DriverFacts {
        driver_version: nvml.driver_version(),
        cuda_version: nvml.cuda_version(),
        gpus,
        joined,
        problems,
    })
}

fn unopened(index: u32, cause: Cause) -> GpuFacts {
    let mut facts = GpuFacts::unread(&cause);
    facts.index = Ok(index);
    facts.faults.push(cause);
    facts
}

/// One GPU, and the other ends of its active links.
fn read_gpu(index: u32, gpu: &dyn NvmlGpu) -> (GpuFacts, Fact<Vec<Remote>>) {
    let memory = gpu.memory();
    let rows = gpu.remapped_rows();
    let mig = gpu.mig();
    let active = active_links(gpu);
    let facts = GpuFacts {
        index: Ok(index),
        uuid: gpu.uuid(),
        name: gpu.name(),
        total_mib: memory
            .clone()
            .map(|memory| memory.total_bytes / BYTES_PER_MIB),
        used_mib: memory
            .clone()
            .map(|memory| memory.used_bytes / BYTES_PER_MIB),
        reserved_mib: reserved(&memory),
        compute_capability: gpu.compute_capability(),
        pci: gpu.pci_bus_id().and_then(|address| pci_address(&address)),
        numa_node: Err(Cause::NotRead(
            "the kernel's file was not found".to_string(),
        )),
        ecc_volatile: gpu.ecc_volatile(),
        ecc_aggregate: gpu.ecc_aggregate(),
        remap_pending: rows.clone().map(|rows| rows.pending),
        remap_failed: rows.map(|rows| rows.failed),
        recovery: gpu.recovery(),
        fabric: gpu
            .fabric()
            .map_or_else(|cause| no_fabric(&cause), |fabric| fabric_facts(&fabric)),
        nvlinks_up: active
            .clone()
            .map(|links| u32::try_from(links.len()).unwrap_or(u32::MAX)),
        processes: gpu
            .processes()
            .map(|processes| processes.into_iter().map(process).collect()),
        slices: if mig == Ok(true) {
            slices(gpu)
        } else {
            Ok(Vec::new())
        },
        mig,
        faults: Vec::new(),
    };
    let faults = faults(&facts);
    (GpuFacts { faults, ..facts }, active)
}

/// What the calls say of the whole GPU: the same causes from the same values as nvidia-smi's cells.
fn faults(facts: &GpuFacts) -> Vec<Cause> {
    fn cause<T>(fact: &Fact<T>) -> Option<&Cause> {
        fact.as_ref().err()
    }
    let vital = [
        cause(&facts.uuid),
        cause(&facts.name),
        cause(&facts.total_mib),
        cause(&facts.ecc_volatile),
        cause(&facts.ecc_aggregate),
    ];
    let others = [
        cause(&facts.pci),
        cause(&facts.remap_pending),
        cause(&facts.mig),
        cause(&facts.nvlinks_up),
        cause(&facts.processes),
        cause(&facts.compute_capability),
    ];
    let is_of_whole_gpu =
        |cause: &&Cause| matches!(cause, Cause::Lost | Cause::NeedsReset | Cause::Blocked);
    let mut faults: Vec<Cause> = vital
        .into_iter()
        .flatten()
        .filter(|cause| {
            is_of_whole_gpu(cause) || matches!(cause, Cause::UnknownError | Cause::Timeout)
        })
        .chain(others.into_iter().flatten().filter(is_of_whole_gpu))
        .cloned()
        .collect();
    faults.sort();
    faults.dedup();
    faults
}

fn reserved(memory: &Fact<Memory>) -> Fact<u64> {
    let bytes = memory.clone()?.reserved_bytes.ok_or(Cause::TooOld)?;
    Ok(bytes / BYTES_PER_MIB)
}

fn process(process: Process) -> GpuProcess {
    let memory = process.used_bytes.ok_or(Cause::NotSupported);
    GpuProcess {
        pid: process.pid,
        memory_mib: reading(&memory.map(|bytes| bytes / BYTES_PER_MIB)),
    }
}

fn no_fabric(cause: &Cause) -> FabricFacts {
    let mut facts = FabricFacts::unread(cause);
    if *cause == Cause::NotSupported {
        facts.state = Ok(FabricState::NotSupported);
    }
    facts
}

fn fabric_facts(fabric: &Fabric) -> FabricFacts {
    let state = match fabric.state {
        0 => Ok(FabricState::NotSupported),
        1 => Ok(FabricState::NotStarted),
        2 => Ok(FabricState::InProgress),
        3 => Ok(FabricState::Completed),
        other => Err(Cause::Said(format!("fabric state {other}"))),
    };
    FabricFacts {
        state,
        status: fabric.status.clone(),
        clique_id: Ok(fabric.clique_id),
        cluster_uuid: cluster_uuid(&fabric.cluster_uuid),
    }
}

/// The other end of each active link. A number that the driver does not have is passed over; a GPU without NVLink ends the search.
fn active_links(gpu: &dyn NvmlGpu) -> Fact<Vec<Remote>> {
    let mut active = Vec::new();
    let mut any = false;
    for link in 0..LINKS_MAX {
        match gpu.link(link) {
            Ok(link) => {
                any = true;
                if link.active {
                    active.push(link.remote);
                }
            }
            Err(Cause::NoSuchPlace) => {}
            Err(Cause::NotSupported) => break,
            Err(cause) => return Err(cause),
        }
    }
    if any {
        Ok(active)
    } else {
        Err(Cause::NotSupported)
    }
}

/// The slices; places without one answer that they found none.
fn slices(gpu: &dyn NvmlGpu) -> Fact<Vec<SliceFacts>> {
    let mut slices = Vec::new();
    for place in 0..SLICES_MAX {
        match gpu.slice(place) {
            Ok(slice) => slices.push(slice_facts(&slice)),
            Err(Cause::NotFound) => {}
            // Beyond the last place.
            Err(Cause::NoSuchPlace) => break,
            Err(cause) => return Err(cause),
        }
    }
    Ok(slices)
}

fn slice_facts(slice: &Slice) -> SliceFacts {
    let profile = slice
        .name
        .as_ref()
        .ok()
        .and_then(|name| name.rsplit_once("MIG "))
        .map(|(_, profile)| profile.trim().to_string())
        .ok_or_else(|| match &slice.name {
            Ok(name) => Cause::unreadable(name),
            Err(cause) => cause.clone(),
        });
    SliceFacts {
        uuid: slice.uuid.clone(),
        profile,
        total_mib: slice
            .memory
            .clone()
            .map(|memory| memory.total_bytes / BYTES_PER_MIB),
        used_mib: slice
            .memory
            .clone()
            .map(|memory| memory.used_bytes / BYTES_PER_MIB),
        reserved_mib: reserved(&slice.memory),
    }
}

/// Which pairs NVLink joins: the driver's word on each pair, and where it has none, where the active links lead.
fn joined(
    nvml: &dyn Nvml,
    gpus: &[GpuFacts],
    links: &[Fact<Vec<Remote>>],
) -> Fact<Vec<(usize, usize)>> {
    let mut pairs = Vec::new();
    for first in 0..gpus.len() {
        for second in first + 1..gpus.len() {
            // A GPU that can't be opened is joined with nothing, and does not hide the others.
            if gpus[first].uuid.is_err() || gpus[second].uuid.is_err() {
                continue;
            }
            match (u32::try_from(first), u32::try_from(second)) {
                (Ok(a), Ok(b)) => match nvml.may_use_nvlink(a, b) {
                    Ok(true) => pairs.push((first, second)),
                    Ok(false) => {}
                    Err(_) => return by_links(gpus, links),
                },
                _ => return by_links(gpus, links),
            }
        }
    }
    Ok(pairs)
}

/// GPUs whose links lead to each other or to the same switch. Switches of which no address is told are taken for one:
/// a node has one such fabric.
fn by_links(gpus: &[GpuFacts], links: &[Fact<Vec<Remote>>]) -> Fact<Vec<(usize, usize)>> {
    let mut pairs = Vec::new();
    let mut first_at: Vec<(Option<String>, usize)> = Vec::new();
    for (at, remotes) in links.iter().enumerate() {
        let remotes = match remotes {
            Ok(remotes) => remotes,
            Err(Cause::NotSupported) => continue,
            Err(cause) => return Err(cause.clone()),
        };
        for remote in remotes {
            let (Remote::Gpu(address) | Remote::Switch(address) | Remote::Unknown(address)) =
                remote;
            let address = address.clone().filter(|address| !address.trim().is_empty());
            let peer = address.as_deref().and_then(|address| {
                let address = pci_address(address).ok()?;
                gpus.iter().position(|gpu| gpu.pci.as_ref() == Ok(&address))
            });
            if let Some(peer) = peer {
                pairs.push((at.min(peer), at.max(peer)));
                continue;
            }
            if !matches!(remote, Remote::Switch(_)) && address.is_none() {
                return Err(Cause::NotRead(
                    "links are up, and the driver does not say to whom".to_string(),
                ));
            }
            // A GPU that this machine does not have joins nothing here; any other address is a switch's.
            if matches!(remote, Remote::Gpu(_)) {
                continue;
            }
            match first_at.iter().find(|(switch, _)| *switch == address) {
                Some((_, first)) if *first != at => pairs.push((*first, at)),
                Some(_) => {}
                None => first_at.push((address, at)),
            }
        }
    }
    pairs.sort_unstable();
    pairs.dedup();
    Ok(pairs)
}
