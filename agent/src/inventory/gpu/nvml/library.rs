//! NVML itself: `libnvidia-ml.so.1`, loaded when it is asked for, through nvml-wrapper and three of its raw symbols.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use llmgw_proto::hex::hex;
use llmgw_proto::inventory::gpu::{Backend, ComputeCapability, SourceCause, SourceFailure};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{
    EccCounter, MemoryError, P2pCapabilitiesIndex, P2pStatus,
};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings as sys;

use super::{Fabric, Link, Memory, Nvml, NvmlGpu, Process, RemappedRows, Remote, Slice};
use crate::inventory::gpu::facts::{Cause, Fact, quote, source_failure};

/// What the loader's own search knows by.
const SONAME: &str = "libnvidia-ml.so.1";

/// Where the library is when the loader does not find it: WSL, containers, Debian, Jetson, NixOS.
const DIRECTORIES: [&str; 12] = [
    "/usr/lib/wsl/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
    "/run/opengl-driver/lib",
    "/opt/nvidia/lib64",
];

/// `nvmlGpuFabricInfo_v2_t` as its version field wants it: size and number.
const FABRIC_VERSION: u32 = {
    let size = size_of::<sys::nvmlGpuFabricInfo_v2_t>();
    size as u32 | 2 << 24
};

/// The library, initialised.
pub struct Library {
    nvml: nvml_wrapper::Nvml,
}

struct Gpu<'a> {
    device: Device<'a>,
    library: &'a nvml_wrapper::Nvml,
}

impl Library {
    /// Loads and initialises the library: this one, or the first that the loader or one of the usual places has.
    pub fn load(path: Option<&Path>) -> Result<Library, SourceFailure> {
        if let Some(path) = path {
            return init(path.as_os_str()).map_err(|error| not_loaded(&error, &[path.into()]));
        }
        match init(OsStr::new(SONAME)) {
            Ok(library) => Ok(library),
            Err(error @ NvmlError::LibloadingError(_)) => {
                let usual = DIRECTORIES.iter().map(PathBuf::from);
                Library::find_in(usual, not_loaded(&error, &[]))
            }
            Err(error) => Err(not_loaded(&error, &[])),
        }
    }

    /// The first library in these directories that starts, or what became of the last one that is there.
    fn find_in(
        directories: impl Iterator<Item = PathBuf>,
        mut failure: SourceFailure,
    ) -> Result<Library, SourceFailure> {
        for path in directories.map(|directory| directory.join(SONAME)) {
            if !path.exists() {
                continue;
            }
            match init(path.as_os_str()) {
                Ok(library) => return Ok(library),
                Err(error) => failure = not_loaded(&error, &[path]),
            }
        }
        Err(failure)
    }
}

fn init(path: &OsStr) -> Result<Library, NvmlError> {
    let nvml = nvml_wrapper::Nvml::builder().lib_path(path).init()?;
    Ok(Library { nvml })
}

/// Why NVML does not answer. No library at all is not a failure but an absence.
fn not_loaded(error: &NvmlError, tried: &[PathBuf]) -> SourceFailure {
    let is_there = tried.iter().any(|path| path.exists());
    let cause = match error {
        NvmlError::LibloadingError(_) if !is_there => SourceCause::NotInstalled,
        NvmlError::DriverNotLoaded => SourceCause::DriverNotLoaded,
        NvmlError::LibRmVersionMismatch => SourceCause::VersionMismatch,
        NvmlError::LibraryNotFound => SourceCause::LibraryMissing,
        NvmlError::NoPermission => SourceCause::NoPermission,
        NvmlError::GpuLost => SourceCause::GpuLost,
        NvmlError::ResetRequired => SourceCause::NeedsReset,
        NvmlError::OperatingSystem => SourceCause::Blocked,
        _ => SourceCause::Other,
    };
    let message = match cause {
        SourceCause::NotInstalled => {
            format!("there is no {SONAME} in the loader's path or the usual places")
        }
        _ => format!("NVML does not start: {}", quote(&said(error))),
    };
    source_failure(Backend::Nvml, cause, &message)
}

/// An error with what the loader said below it.
fn said(error: &NvmlError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The same cause that nvidia-smi's words for it have.
fn cause(error: &NvmlError) -> Cause {
    match error {
        NvmlError::NotSupported => Cause::NotSupported,
        NvmlError::NoPermission => Cause::NoPermission,
        NvmlError::GpuLost => Cause::Lost,
        NvmlError::ResetRequired => Cause::NeedsReset,
        NvmlError::OperatingSystem => Cause::Blocked,
        NvmlError::Timeout => Cause::Timeout,
        NvmlError::NotFound | NvmlError::NoData => Cause::NotFound,
        NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => Cause::TooOld,
        NvmlError::InvalidArg => Cause::NoSuchPlace,
        NvmlError::Unknown => Cause::UnknownError,
        other => Cause::Said(quote(&other.to_string())),
    }
}

fn fact<T>(result: Result<T, NvmlError>) -> Fact<T> {
    result.map_err(|error| cause(&error))
}

fn memory(device: &Device<'_>, library: &nvml_wrapper::Nvml) -> Fact<Memory> {
    match device.memory_info() {
        Ok(info) => Ok(Memory {
            total_bytes: info.total,
            used_bytes: info.used,
            reserved_bytes: Some(info.reserved),
        }),
        Err(NvmlError::FailedToLoadSymbol(_)) => old_memory(device, library),
        Err(error) => Err(cause(&error)),
    }
}

/// Drivers before 510 have the first version of the call only, which the wrapper lacks.
fn old_memory(device: &Device<'_>, library: &nvml_wrapper::Nvml) -> Fact<Memory> {
    let call = library.lib().nvmlDeviceGetMemoryInfo.as_ref();
    let call = call.map_err(|_| Cause::TooOld)?;
    let mut info = sys::nvmlMemory_t {
        total: 0,
        free: 0,
        used: 0,
    };
    // SAFETY: the handle is alive as long as `device`, and the call fills the struct that it declares.
    fact(nvml_try(unsafe { call(device.handle(), &mut info) }))?;
    Ok(Memory {
        total_bytes: info.total,
        used_bytes: info.used,
        reserved_bytes: None,
    })
}

impl Nvml for Library {
    fn driver_version(&self) -> Fact<String> {
        fact(self.nvml.sys_driver_version())
    }

    fn cuda_version(&self) -> Fact<String> {
        let version = fact(self.nvml.sys_cuda_driver_version())?;
        // 12080 is 12.8.
        Ok(format!("{}.{}", version / 1_000, version % 1_000 / 10))
    }

    fn gpu_count(&self) -> Result<u32, SourceFailure> {
        self.nvml
            .device_count()
            .map_err(|error| not_loaded(&error, &[]))
    }

    fn gpu(&self, index: u32) -> Fact<Box<dyn NvmlGpu + '_>> {
        let device = fact(self.nvml.device_by_index(index))?;
        Ok(Box::new(Gpu {
            device,
            library: &self.nvml,
        }))
    }

    fn may_use_nvlink(&self, first: u32, second: u32) -> Fact<bool> {
        let first = fact(self.nvml.device_by_index(first))?;
        let second = fact(self.nvml.device_by_index(second))?;
        let status = fact(first.p2p_status(&second, P2pCapabilitiesIndex::NvLink))?;
        Ok(status == P2pStatus::Ok)
    }
}

impl NvmlGpu for Gpu<'_> {
    fn uuid(&self) -> Fact<String> {
        fact(self.device.uuid())
    }

    fn name(&self) -> Fact<String> {
        fact(self.device.name())
    }

    fn memory(&self) -> Fact<Memory> {
        memory(&self.device, self.library)
    }

    fn compute_capability(&self) -> Fact<ComputeCapability> {
        let capability = fact(self.device.cuda_compute_capability())?;
        let part =
            |number: i32| u32::try_from(number).map_err(|_| Cause::unreadable(&number.to_string()));
        Ok(ComputeCapability {
            major: part(capability.major)?,
            minor: part(capability.minor)?,
        })
    }

    fn pci_bus_id(&self) -> Fact<String> {
        fact(self.device.pci_info()).map(|info| info.bus_id)
    }

    fn ecc_volatile(&self) -> Fact<u64> {
        fact(
            self.device
                .total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile),
        )
    }

    fn ecc_aggregate(&self) -> Fact<u64> {
        fact(
            self.device
                .total_ecc_errors(MemoryError::Uncorrected, EccCounter::Aggregate),
        )
    }

    fn remapped_rows(&self) -> Fact<RemappedRows> {
        let call = self.library.lib().nvmlDeviceGetRemappedRows.as_ref();
        let call = call.map_err(|_| Cause::TooOld)?;
        let [mut corrected, mut uncorrected, mut pending, mut failed] = [0; 4];
        // SAFETY: the handle is alive as long as `device`, and the call fills the four numbers that it declares.
        fact(nvml_try(unsafe {
            call(
                self.device.handle(),
                &mut corrected,
                &mut uncorrected,
                &mut pending,
                &mut failed,
            )
        }))?;
        Ok(RemappedRows {
            pending: pending != 0,
            failed: failed != 0,
        })
    }

    fn mig(&self) -> Fact<bool> {
        Ok(fact(self.device.mig_mode())?.current == sys::NVML_DEVICE_MIG_ENABLE)
    }

    fn recovery(&self) -> Fact<Option<String>> {
        let call = self.library.lib().nvmlDeviceGetFieldValues.as_ref();
        let call = call.map_err(|_| Cause::TooOld)?;
        // SAFETY: a field value is plain numbers, for which zeros are a value.
        let mut field: sys::nvmlFieldValue_t = unsafe { std::mem::zeroed() };
        field.fieldId = sys::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
        // SAFETY: the handle is alive as long as `device`, and there is one field, as the call is told.
        fact(nvml_try(unsafe {
            call(self.device.handle(), 1, &mut field)
        }))?;
        match fact(nvml_try(field.nvmlReturn)) {
            // Drivers that lack the field refuse its number.
            Err(Cause::NotSupported | Cause::NoSuchPlace) => return Err(Cause::TooOld),
            Err(cause) => return Err(cause),
            Ok(()) => {}
        }
        // SAFETY: the field succeeded, and this one is an unsigned number.
        match unsafe { field.value.uiVal } {
            0 => Ok(None),
            1 => Ok(Some("Reset".to_string())),
            2 => Ok(Some("Reboot".to_string())),
            3 => Ok(Some("Drain P2P".to_string())),
            4 => Ok(Some("Drain and Reset".to_string())),
            other => Ok(Some(format!("action {other}"))),
        }
    }

    fn fabric(&self) -> Fact<Fabric> {
        if let Ok(call) = self.library.lib().nvmlDeviceGetGpuFabricInfoV.as_ref() {
            // SAFETY: the struct is plain numbers, for which zeros are a value.
            let mut info: sys::nvmlGpuFabricInfoV_t = unsafe { std::mem::zeroed() };
            info.version = FABRIC_VERSION;
            // SAFETY: the handle is alive as long as `device`; the version says that version 2 is wanted, which is a
            // beginning of the struct that is passed.
            let code = unsafe { call(self.device.handle(), &mut info) };
            return fact(nvml_try(code)).map(|()| {
                fabric(
                    info.state.into(),
                    info.status,
                    info.cliqueId,
                    info.clusterUuid,
                )
            });
        }
        let call = self.library.lib().nvmlDeviceGetGpuFabricInfo.as_ref();
        let call = call.map_err(|_| Cause::TooOld)?;
        // SAFETY: the struct is plain numbers, for which zeros are a value.
        let mut info: sys::nvmlGpuFabricInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the handle is alive as long as `device`, and the call fills the struct that it declares.
        fact(nvml_try(unsafe { call(self.device.handle(), &mut info) }))?;
        Ok(fabric(
            info.state.into(),
            info.status,
            info.cliqueId,
            info.clusterUuid,
        ))
    }

    fn link(&self, link: u32) -> Fact<Link> {
        let wrapper = self.device.link_wrapper_for(link);
        let active = fact(wrapper.is_active())?;
        if !active {
            return Ok(Link {
                active,
                remote: Remote::Unknown(None),
            });
        }
        // Unprintable addresses, as some virtual machines give, are as good as none.
        let address = wrapper.remote_pci_info().ok().map(|info| info.bus_id);
        Ok(Link {
            active,
            remote: self.remote(link, address),
        })
    }

    fn processes(&self) -> Fact<Vec<Process>> {
        let processes = match self.device.running_compute_processes() {
            Err(NvmlError::FailedToLoadSymbol(_)) => self.device.running_compute_processes_v2(),
            answered => answered,
        };
        let processes = fact(processes)?;
        Ok(processes
            .into_iter()
            .map(|process| Process {
                pid: process.pid,
                used_bytes: match process.used_gpu_memory {
                    UsedGpuMemory::Used(bytes) => Some(bytes),
                    UsedGpuMemory::Unavailable => None,
                },
            })
            .collect())
    }

    fn slice(&self, place: u32) -> Fact<Slice> {
        let device = fact(self.device.mig_device_by_index(place))?;
        Ok(Slice {
            uuid: fact(device.uuid()),
            name: fact(device.name()),
            memory: memory(&device, self.library),
        })
    }
}

impl Gpu<'_> {
    /// The wrapper's own function for the kind ignores the answer and always says unknown.
    fn remote(&self, link: u32, address: Option<String>) -> Remote {
        const GPU: u32 = 0;
        const SWITCH: u32 = 2;
        let call = self
            .library
            .lib()
            .nvmlDeviceGetNvLinkRemoteDeviceType
            .as_ref();
        let Ok(call) = call else {
            return Remote::Unknown(address);
        };
        let mut kind = u32::MAX;
        // SAFETY: the handle is alive as long as `device`, and the call fills the number that it declares.
        let code = unsafe { call(self.device.handle(), link, &mut kind) };
        match (nvml_try(code), kind) {
            (Ok(()), GPU) => Remote::Gpu(address),
            (Ok(()), SWITCH) => Remote::Switch(address),
            _ => Remote::Unknown(address),
        }
    }
}

fn fabric(state: u32, status: u32, clique_id: u32, cluster: [u8; 16]) -> Fabric {
    Fabric {
        state,
        status: match nvml_try(status) {
            Ok(()) => Ok("Success".to_string()),
            Err(NvmlError::NotSupported) => Err(Cause::NotSupported),
            Err(error) => Ok(error.to_string()),
        },
        clique_id,
        cluster_uuid: hex(&cluster),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::gpu::scripts::{Scripts, mock_nvml};

    #[test]
    fn a_library_that_does_not_load_does_not_hide_the_next_one() {
        let (broken, whole) = (
            Scripts::new("broken-library"),
            Scripts::new("whole-library"),
        );
        std::fs::write(broken.path().join(SONAME), "no library").unwrap();
        mock_nvml(&whole, &[]);
        let absent = || not_loaded(&NvmlError::LibraryNotFound, &[]);
        let places = [broken.path(), Path::new("/nonexistent"), whole.path()];
        let library = Library::find_in(places.iter().map(PathBuf::from), absent()).unwrap();
        assert_eq!(library.gpu_count(), Ok(4));

        let places = [broken.path().to_path_buf()];
        let failure = Library::find_in(places.into_iter(), absent())
            .err()
            .unwrap();
        assert_eq!(failure.cause, SourceCause::Other);
        assert!(
            failure.message.contains("libnvidia-ml.so.1"),
            "{}",
            failure.message
        );
    }
}
