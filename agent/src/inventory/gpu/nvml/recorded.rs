//! NVML as recorded in `tests/recordings/hw/nvml`: what each call answered, or the name of its error.

use llmgw_proto::inventory::gpu::{ComputeCapability, SourceFailure};
use serde_json::Value;

use super::{Fabric, Link, Memory, Nvml, NvmlGpu, Process, RemappedRows, Remote, Slice};
use crate::inventory::gpu::facts::{Cause, Fact};

/// A whole recording. Keys that a device lacks are calls that its library lacks.
pub struct Recording {
    root: Value,
}

struct Gpu<'a> {
    device: &'a Value,
}

impl Recording {
    pub fn new(root: Value) -> Recording {
        Recording { root }
    }

    pub fn into_root(self) -> Value {
        self.root
    }

    pub fn load(name: &str) -> Recording {
        let path = format!(
            "{}/../tests/recordings/hw/nvml/{name}.json",
            env!("CARGO_MANIFEST_DIR")
        );
        let text = std::fs::read_to_string(path).unwrap();
        Recording::new(serde_json::from_str(&text).unwrap())
    }

    fn devices(&self) -> &[Value] {
        self.root["devices"].as_array().unwrap()
    }
}

/// The value of a call, or its recorded error.
fn call<'a>(device: &'a Value, key: &str) -> Fact<&'a Value> {
    let value = device.get(key).ok_or(Cause::TooOld)?;
    match value.as_str() {
        Some("NOT_SUPPORTED") => Err(Cause::NotSupported),
        Some("GPU_IS_LOST") => Err(Cause::Lost),
        Some("RESET_REQUIRED") => Err(Cause::NeedsReset),
        Some("NO_PERMISSION") => Err(Cause::NoPermission),
        Some("UNKNOWN") => Err(Cause::UnknownError),
        Some("NOT_FOUND") => Err(Cause::NotFound),
        _ => Ok(value),
    }
}

fn text(device: &Value, key: &str) -> Fact<String> {
    Ok(call(device, key)?.as_str().unwrap().to_string())
}

fn number(device: &Value, key: &str) -> Fact<u64> {
    Ok(call(device, key)?.as_u64().unwrap())
}

fn memory(device: &Value) -> Fact<Memory> {
    let memory = call(device, "memory_v2")?;
    Ok(Memory {
        total_bytes: memory["total"].as_u64().unwrap(),
        used_bytes: memory["used"].as_u64().unwrap(),
        reserved_bytes: memory["reserved"].as_u64(),
    })
}

fn small(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

impl Nvml for Recording {
    fn driver_version(&self) -> Fact<String> {
        text(&self.root, "driver")
    }

    fn cuda_version(&self) -> Fact<String> {
        text(&self.root, "cuda")
    }

    fn gpu_count(&self) -> Result<u32, SourceFailure> {
        Ok(u32::try_from(self.devices().len()).unwrap())
    }

    fn gpu(&self, index: u32) -> Fact<Box<dyn NvmlGpu + '_>> {
        let device = &self.devices()[index as usize];
        if device.get("handle").is_some() {
            call(device, "handle")?;
        }
        Ok(Box::new(Gpu { device }))
    }

    fn may_use_nvlink(&self, first: u32, second: u32) -> Fact<bool> {
        let pairs = call(&self.root, "p2p_nvlink")?;
        Ok(pairs[first as usize][second as usize].as_bool().unwrap())
    }
}

impl NvmlGpu for Gpu<'_> {
    fn uuid(&self) -> Fact<String> {
        text(self.device, "uuid")
    }

    fn name(&self) -> Fact<String> {
        text(self.device, "name")
    }

    fn memory(&self) -> Fact<Memory> {
        memory(self.device)
    }

    fn compute_capability(&self) -> Fact<ComputeCapability> {
        let capability = call(self.device, "compute_capability")?;
        Ok(ComputeCapability {
            major: small(&capability[0]),
            minor: small(&capability[1]),
        })
    }

    fn pci_bus_id(&self) -> Fact<String> {
        text(self.device, "pci_bus_id")
    }

    fn ecc_volatile(&self) -> Fact<u64> {
        number(self.device, "ecc_volatile_uncorrected")
    }

    fn ecc_aggregate(&self) -> Fact<u64> {
        number(self.device, "ecc_aggregate_uncorrected")
    }

    fn remapped_rows(&self) -> Fact<RemappedRows> {
        let rows = call(self.device, "remapped_rows")?;
        Ok(RemappedRows {
            pending: rows["pending"].as_bool().unwrap(),
            failed: rows["failure"].as_bool().unwrap(),
        })
    }

    fn mig(&self) -> Fact<bool> {
        Ok(call(self.device, "mig_mode")?[0] == 1)
    }

    fn recovery(&self) -> Fact<Option<String>> {
        let action = text(self.device, "recovery_action")?;
        Ok(Some(action).filter(|action| action != "None"))
    }

    fn fabric(&self) -> Fact<Fabric> {
        let fabric = call(self.device, "fabric")?;
        Ok(Fabric {
            state: small(&fabric["state"]),
            status: match small(&fabric["status"]) {
                0 => Ok("Success".to_string()),
                3 => Err(Cause::NotSupported),
                other => Ok(format!("error {other}")),
            },
            clique_id: small(&fabric["clique_id"]),
            cluster_uuid: fabric["cluster_uuid"].as_str().unwrap().to_string(),
        })
    }

    fn link(&self, link: u32) -> Fact<Link> {
        let links = call(self.device, "nvlinks")?.as_array().unwrap();
        if links.is_empty() {
            return Err(Cause::NotSupported);
        }
        let recorded = links
            .iter()
            .find(|recorded| recorded["link"] == link)
            .ok_or(Cause::NoSuchPlace)?;
        let address = recorded["remote_bus_id"].as_str().map(str::to_string);
        Ok(Link {
            active: recorded["active"].as_bool().unwrap(),
            remote: match recorded["remote_type"].as_str().unwrap() {
                "switch" => Remote::Switch(address),
                "gpu" => Remote::Gpu(address),
                _ => Remote::Unknown(address),
            },
        })
    }

    fn processes(&self) -> Fact<Vec<Process>> {
        let processes = call(self.device, "processes")?.as_array().unwrap();
        Ok(processes
            .iter()
            .map(|process| Process {
                pid: small(&process["pid"]),
                used_bytes: process["used"].as_u64(),
            })
            .collect())
    }

    fn slice(&self, place: u32) -> Fact<Slice> {
        let slices = call(self.device, "slices")?.as_array().unwrap();
        let slice = slices.get(place as usize).ok_or(Cause::NoSuchPlace)?;
        if slice.is_null() {
            return Err(Cause::NotFound);
        }
        Ok(Slice {
            uuid: text(slice, "uuid"),
            name: text(slice, "name"),
            memory: memory(slice),
        })
    }
}
