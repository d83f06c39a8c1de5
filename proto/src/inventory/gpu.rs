//! The GPUs of a node: what each is, whether it may be used, and which of them NVLink joins.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Reading;

mod capability;

pub use capability::{ComputeCapability, NoComputeCapability};

/// What was learnt of all NVIDIA GPUs of a node in one probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpus {
    /// Whether the driver answers; of everything here this is what to look at first.
    pub driver: DriverState,
    /// Which source the devices come from. After a silence: the one that answered last.
    pub backend: Backend,
    /// The sources that were tried before it or in vain, in order, each with the cause.
    pub passed_over: Vec<SourceFailure>,
    pub driver_version: Reading<String>,
    pub cuda_version: Reading<String>,
    /// In the driver's order. A slice of a GPU in MIG mode stands after its parent.
    pub devices: Vec<Gpu>,
    /// Groups of two or more GPUs that NVLink joins. A GPU in none of them is alone.
    pub nvlink_domains: Reading<Vec<NvlinkDomain>>,
    /// What could not be read or looks contradictory, each as one sentence. Reasons about single GPUs stand in their health.
    pub problems: Vec<String>,
}

/// Whether the NVIDIA driver answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriverState {
    Answering,
    /// Neither NVML nor nvidia-smi is installed: a node without NVIDIA GPUs, unless PCI shows some.
    Absent,
    /// Something is installed, and it fails; `passed_over` says how.
    Failing,
    /// A probe did not end within its deadline. The values are those from before, marked stale.
    Unresponsive,
    /// A word of a newer release.
    #[serde(other)]
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    Nvml,
    NvidiaSmi,
    None,
    /// A word of a newer release.
    #[serde(other)]
    Other,
}

/// A source that gave no inventory, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFailure {
    pub source: Backend,
    pub cause: SourceCause,
    /// One sentence with what the source itself said.
    pub message: String,
    /// What the operator can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}

/// Why a source gave no inventory, as a stable code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SourceCause {
    /// Another source was asked for.
    NotAsked,
    NotInstalled,
    DriverNotLoaded,
    /// The kernel's driver and the library are of different versions.
    VersionMismatch,
    LibraryMissing,
    NoPermission,
    GpuLost,
    NeedsReset,
    Blocked,
    /// It did not answer within its deadline.
    Unresponsive,
    /// Anything else; the message has it.
    #[serde(other)]
    Other,
}

/// One GPU, or one MIG slice of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// The driver's number of the whole GPU; a slice has its parent's. Only for people: numbers move, uuids don't.
    pub index: Reading<u32>,
    /// What `CUDA_VISIBLE_DEVICES` takes.
    pub uuid: Reading<String>,
    pub name: Reading<String>,
    /// Model and GiB: `h100-sxm-80g`; of a slice model and profile: `h100-sxm-mig-1g.10gb`.
    pub class: Reading<String>,
    pub memory: GpuMemory,
    pub compute_capability: Reading<ComputeCapability>,
    /// As sysfs writes it: `0000:1b:00.0`.
    pub pci: Reading<String>,
    pub numa_node: Reading<u32>,
    /// What is wrong with it. Empty: nothing known.
    pub health: Vec<HealthFlag>,
    pub ecc: Ecc,
    pub fabric: GpuFabric,
    /// NVLinks that are up. To whom they lead is in the domains.
    pub nvlinks_up: Reading<u32>,
    pub mig: Reading<bool>,
    /// Set for a slice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slice: Option<MigSlice>,
    /// A part of a GPU that a hypervisor gave to this machine.
    #[serde(default)]
    pub vgpu: bool,
    /// Processes that compute on it; of a GPU in MIG mode on any of its slices.
    pub processes: Reading<Vec<GpuProcess>>,
}

/// Memory, exactly as the driver reports it: the class only rounds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemory {
    pub total_mib: Reading<u64>,
    /// Without what the driver reserves, where the driver tells the two apart.
    pub used_mib: Reading<u64>,
    pub reserved_mib: Reading<u64>,
    /// The GPU uses the machine's own memory: total and used come from `/proc/meminfo`.
    #[serde(default)]
    pub unified: bool,
}

/// Errors that the GPU's memory could not correct.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ecc {
    /// Since the driver was loaded.
    pub uncorrected_volatile: Reading<u64>,
    /// In the GPU's life: history, no fault.
    pub uncorrected_aggregate: Reading<u64>,
    /// A row waits for a reset to be replaced.
    pub remap_pending: Reading<bool>,
    /// A row could not be replaced.
    pub remap_failed: Reading<bool>,
}

/// What the GPU says of the NVLink fabric that the fabric manager sets up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuFabric {
    pub state: Reading<FabricState>,
    /// None (`null`) unless the fabric is complete and its cluster uuid is not zero: the domain may reach other nodes.
    pub clique: Reading<Option<Clique>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FabricState {
    NotSupported,
    NotStarted,
    InProgress,
    Completed,
    /// A word of a newer release.
    #[serde(other)]
    Other,
}

/// GPUs of any node with equal cliques reach each other over NVLink. The number alone means nothing:
/// unrelated racks have the same ones.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Clique {
    pub cluster_uuid: String,
    pub id: u32,
}

/// The slice of a GPU in MIG mode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigSlice {
    /// Uuid of the GPU that it is a part of.
    pub parent: String,
    /// `1g.10gb`.
    pub profile: Reading<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    pub pid: u32,
    pub memory_mib: Reading<u64>,
}

/// Something that is wrong with a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthFlag {
    pub code: HealthCode,
    /// One sentence with the numbers.
    pub reason: String,
}

/// What can be wrong with a GPU, as a stable code. Each of them keeps new replicas off it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HealthCode {
    /// On PCI, and the driver does not list it.
    NotListed,
    Lost,
    NeedsReset,
    /// The driver answers with an error for this GPU, or not at all any more.
    DriverError,
    UncorrectedEcc,
    RowRemapPending,
    RowRemapFailed,
    /// Another process, or one that is gone, has its memory.
    MemoryHeld,
    /// In MIG mode: its slices are offered instead of it.
    Mig,
    /// The fabric manager has not finished: CUDA would fail with error 802.
    FabricNotReady,
    FabricFailed,
    /// A word of a newer release.
    #[serde(other)]
    Other,
}

/// GPUs of this node that NVLink joins, directly or through each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvlinkDomain {
    pub number: u32,
    /// Uuids, in the driver's order.
    pub gpus: Vec<String>,
}

impl Gpus {
    /// The GPUs and slices that a replica may be placed on.
    pub fn usable(&self) -> impl Iterator<Item = &Gpu> {
        self.devices.iter().filter(|gpu| gpu.is_usable())
    }

    /// The number of the NVLink domain that a GPU is in. Of a slice: none.
    pub fn domain_of(&self, uuid: &str) -> Option<u32> {
        let domains = self.nvlink_domains.value()?;
        domains
            .iter()
            .find(|domain| domain.gpus.iter().any(|member| member == uuid))
            .map(|domain| domain.number)
    }

    /// Which of the GPUs are in which clique, by uuid.
    pub fn cliques(&self) -> BTreeMap<&Clique, Vec<&str>> {
        let mut cliques: BTreeMap<&Clique, Vec<&str>> = BTreeMap::new();
        for gpu in &self.devices {
            if let (Some(Some(clique)), Some(uuid)) = (gpu.fabric.clique.value(), gpu.uuid.value())
            {
                cliques.entry(clique).or_default().push(uuid);
            }
        }
        cliques
    }

    /// The same, now that the driver has been silent for `age_ms`.
    #[must_use]
    pub fn aged(mut self, age_ms: u64) -> Gpus {
        self.driver_version = self.driver_version.aged(age_ms);
        self.cuda_version = self.cuda_version.aged(age_ms);
        self.nvlink_domains = self.nvlink_domains.aged(age_ms);
        self.devices = self
            .devices
            .into_iter()
            .map(|gpu| gpu.aged(age_ms))
            .collect();
        self
    }
}

impl Gpu {
    /// Whether a replica may be placed on it: nothing is known to be wrong, and it can be named and classed.
    pub fn is_usable(&self) -> bool {
        self.health.is_empty() && self.uuid.value().is_some() && self.class.value().is_some()
    }

    pub fn has(&self, code: HealthCode) -> bool {
        self.health.iter().any(|flag| flag.code == code)
    }

    #[must_use]
    pub fn aged(self, age_ms: u64) -> Gpu {
        Gpu {
            index: self.index.aged(age_ms),
            uuid: self.uuid.aged(age_ms),
            name: self.name.aged(age_ms),
            class: self.class.aged(age_ms),
            memory: GpuMemory {
                total_mib: self.memory.total_mib.aged(age_ms),
                used_mib: self.memory.used_mib.aged(age_ms),
                reserved_mib: self.memory.reserved_mib.aged(age_ms),
                unified: self.memory.unified,
            },
            compute_capability: self.compute_capability.aged(age_ms),
            pci: self.pci.aged(age_ms),
            numa_node: self.numa_node.aged(age_ms),
            ecc: Ecc {
                uncorrected_volatile: self.ecc.uncorrected_volatile.aged(age_ms),
                uncorrected_aggregate: self.ecc.uncorrected_aggregate.aged(age_ms),
                remap_pending: self.ecc.remap_pending.aged(age_ms),
                remap_failed: self.ecc.remap_failed.aged(age_ms),
            },
            fabric: GpuFabric {
                state: self.fabric.state.aged(age_ms),
                clique: self.fabric.clique.aged(age_ms),
            },
            nvlinks_up: self.nvlinks_up.aged(age_ms),
            mig: self.mig.aged(age_ms),
            processes: self.processes.aged(age_ms),
            ..self
        }
    }
}

impl fmt::Display for Clique {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.cluster_uuid, self.id)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Nvml => "NVML",
            Backend::NvidiaSmi => "nvidia-smi",
            Backend::None => "none",
            Backend::Other => "another source",
        })
    }
}

impl HealthCode {
    pub fn as_str(self) -> &'static str {
        match self {
            HealthCode::NotListed => "not-listed",
            HealthCode::Lost => "lost",
            HealthCode::NeedsReset => "needs-reset",
            HealthCode::DriverError => "driver-error",
            HealthCode::UncorrectedEcc => "uncorrected-ecc",
            HealthCode::RowRemapPending => "row-remap-pending",
            HealthCode::RowRemapFailed => "row-remap-failed",
            HealthCode::MemoryHeld => "memory-held",
            HealthCode::Mig => "mig",
            HealthCode::FabricNotReady => "fabric-not-ready",
            HealthCode::FabricFailed => "fabric-failed",
            HealthCode::Other => "other",
        }
    }
}

impl fmt::Display for HealthCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str, class: Reading<String>, health: Vec<HealthFlag>) -> Gpu {
        let unread = || Reading::unknown("not read");
        Gpu {
            index: Reading::Known(0),
            uuid: Reading::Known(uuid.to_string()),
            name: Reading::Known("NVIDIA L4".to_string()),
            class,
            memory: GpuMemory {
                total_mib: Reading::Known(23_034),
                used_mib: Reading::Known(0),
                reserved_mib: Reading::unknown("not read"),
                unified: false,
            },
            compute_capability: Reading::Known(ComputeCapability { major: 8, minor: 9 }),
            pci: Reading::unknown("not read"),
            numa_node: Reading::unknown("not read"),
            health,
            ecc: Ecc {
                uncorrected_volatile: Reading::Known(0),
                uncorrected_aggregate: Reading::Known(0),
                remap_pending: unread(),
                remap_failed: unread(),
            },
            fabric: GpuFabric {
                state: Reading::Known(FabricState::Completed),
                clique: Reading::Known(None),
            },
            nvlinks_up: Reading::Known(0),
            mig: unread(),
            slice: None,
            vgpu: false,
            processes: Reading::Known(Vec::new()),
        }
    }

    fn gpus() -> Gpus {
        let class = || Reading::Known("l4-22g".to_string());
        let lost = HealthFlag {
            code: HealthCode::Lost,
            reason: "the driver says so".to_string(),
        };
        Gpus {
            driver: DriverState::Answering,
            backend: Backend::Nvml,
            passed_over: Vec::new(),
            driver_version: Reading::Known("580.95.05".to_string()),
            cuda_version: Reading::unknown("not read"),
            devices: vec![
                gpu("GPU-1", class(), Vec::new()),
                gpu("GPU-2", class(), vec![lost]),
                gpu("GPU-3", Reading::unknown("no total"), Vec::new()),
            ],
            nvlink_domains: Reading::Known(vec![NvlinkDomain {
                number: 4,
                gpus: vec!["GPU-1".to_string(), "GPU-2".to_string()],
            }]),
            problems: Vec::new(),
        }
    }

    #[test]
    fn a_gpu_that_is_flagged_or_has_no_class_is_not_usable() {
        let gpus = gpus();
        let usable: Vec<&str> = gpus
            .usable()
            .map(|gpu| gpu.uuid.value().unwrap().as_str())
            .collect();
        assert_eq!(usable, ["GPU-1"]);
        assert_eq!(gpus.domain_of("GPU-2"), Some(4));
        assert_eq!(gpus.domain_of("GPU-3"), None);
    }

    #[test]
    fn aged_values_are_written_and_read_back_as_stale() {
        let aged = gpus().aged(1_500);
        let first = &aged.devices[0];
        let stale = Reading::Stale {
            value: 23_034,
            age_ms: 1_500,
        };
        assert_eq!(first.memory.total_mib, stale);
        let clique = Reading::Stale {
            value: None,
            age_ms: 1_500,
        };
        assert_eq!(first.fabric.clique, clique);
        assert_eq!(first.memory.reserved_mib, Reading::unknown("not read"));
        let json = serde_json::to_string(&aged).unwrap();
        assert_eq!(serde_json::from_str::<Gpus>(&json).unwrap(), aged);
    }

    #[test]
    fn words_and_fields_of_a_newer_release_don_t_void_the_rest() {
        let mut json = serde_json::to_value(gpus()).unwrap();
        json["backend"] = "telepathy".into();
        json["driver"] = "dreaming".into();
        json["brand_new"] = 1.into();
        json["devices"][0]["fabric"]["state"] = "superposed".into();
        json["devices"][1]["health"][0]["code"] = "haunted".into();
        let read: Gpus = serde_json::from_value(json).unwrap();
        assert_eq!(
            (read.backend, read.driver),
            (Backend::Other, DriverState::Other)
        );
        let state = &read.devices[0].fabric.state;
        assert_eq!(*state, Reading::Known(FabricState::Other));
        assert!(read.devices[1].has(HealthCode::Other) && !read.devices[1].is_usable());
    }
}
