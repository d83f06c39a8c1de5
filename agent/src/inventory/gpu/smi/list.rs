//! `nvidia-smi -L`: every GPU that the driver counts, lost ones too, and the slices of those in MIG mode.

use super::cells;
use super::handle::BadHandle;
use crate::inventory::gpu::facts::{Cause, SliceFacts};

const GPUS_MAX: usize = 64;
/// A GPU has at most 7 compute instances.
const SLICES_PER_GPU_MAX: usize = 16;

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Listing {
    pub gpus: Vec<ListedGpu>,
    pub handles: Vec<BadHandle>,
    /// Lines that are none of these.
    pub foreign_lines: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedGpu {
    pub index: u32,
    pub name: String,
    pub uuid: String,
    pub slices: Vec<SliceFacts>,
}

pub fn parse(text: &str) -> Listing {
    let mut listing = Listing::default();
    for (line, _) in cells::lines(text) {
        if let Some(handle) = BadHandle::parse(line) {
            if listing.handles.len() < GPUS_MAX {
                listing.handles.push(handle);
            }
        } else if let Some(gpu) = gpu(line) {
            let is_new = listing.gpus.iter().all(|other| other.uuid != gpu.uuid);
            if is_new && listing.gpus.len() < GPUS_MAX {
                listing.gpus.push(gpu);
            }
        } else if let Some(slice) = slice(line) {
            // A slice belongs to the GPU above it; without one it belongs to nobody.
            match listing.gpus.last_mut() {
                Some(gpu) if gpu.slices.len() < SLICES_PER_GPU_MAX => gpu.slices.push(slice),
                _ => listing.foreign_lines += 1,
            }
        } else {
            listing.foreign_lines += 1;
        }
    }
    listing
}

/// `GPU 0: Orin (nvgpu) (UUID: GPU-…)`.
pub(super) fn gpu(line: &str) -> Option<ListedGpu> {
    let (index, rest) = line.strip_prefix("GPU ")?.split_once(": ")?;
    let (name, uuid) = rest.trim_end().strip_suffix(')')?.rsplit_once(" (UUID: ")?;
    Some(ListedGpu {
        index: cells::number(index).ok()?,
        name: cells::text(name.trim()).ok()?,
        uuid: cells::uuid(uuid).ok()?,
        slices: Vec::new(),
    })
}

/// `  MIG 3g.40gb     Device  0: (UUID: MIG-…)`.
fn slice(line: &str) -> Option<SliceFacts> {
    let rest = line.trim_start().strip_prefix("MIG ")?;
    let (profile, rest) = rest.trim_start().split_once(char::is_whitespace)?;
    let (device, uuid) = rest.trim_end().strip_suffix(')')?.rsplit_once("(UUID: ")?;
    device.trim_start().strip_prefix("Device")?;
    let untold = || {
        Err(Cause::NotRead(
            "nvidia-smi does not tell a slice's memory".to_string(),
        ))
    };
    Some(SliceFacts {
        uuid: cells::uuid(uuid),
        profile: cells::text(profile),
        total_mib: untold(),
        used_mib: untold(),
        reserved_mib: untold(),
    })
}
