//! What a source says of the GPUs, before anything is concluded: each value, or the cause why there is none.
//!
//! NVML and nvidia-smi both end here, with the same causes for the same trouble; `assemble.rs` goes on from here.

use std::fmt;

use llmgw_proto::inventory::Reading;
use llmgw_proto::inventory::gpu::{
    Backend, ComputeCapability, FabricState, GpuProcess, SourceCause, SourceFailure,
};

/// Text of a driver that is quoted to people is cut here.
const QUOTE_MAX_CHARS: usize = 200;

/// A value, or why there is none.
pub type Fact<T> = Result<T, Cause>;

/// Why a value is missing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    NotSupported,
    NoPermission,
    Lost,
    NeedsReset,
    Blocked,
    NotReady,
    Timeout,
    NotFound,
    /// The driver or library is too old for the question.
    TooOld,
    /// The answer has no such cell, or an empty one.
    Missing,
    /// A number beyond what this driver counts: a link or a slice that it does not have.
    NoSuchPlace,
    /// The driver's own "unknown error".
    UnknownError,
    /// The source was not asked, or its answer had no form.
    NotRead(String),
    /// Text that is no such value.
    Unreadable(String),
    /// Any other word of the driver.
    Said(String),
}

/// One probe of one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverFacts {
    pub driver_version: Fact<String>,
    pub cuda_version: Fact<String>,
    pub gpus: Vec<GpuFacts>,
    /// Pairs of positions in `gpus` that NVLink joins, directly or through a switch.
    pub joined: Fact<Vec<(usize, usize)>>,
    pub problems: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFacts {
    pub index: Fact<u32>,
    pub uuid: Fact<String>,
    pub name: Fact<String>,
    pub total_mib: Fact<u64>,
    pub used_mib: Fact<u64>,
    pub reserved_mib: Fact<u64>,
    pub compute_capability: Fact<ComputeCapability>,
    /// In sysfs's spelling.
    pub pci: Fact<String>,
    pub numa_node: Fact<u32>,
    pub ecc_volatile: Fact<u64>,
    pub ecc_aggregate: Fact<u64>,
    pub remap_pending: Fact<bool>,
    pub remap_failed: Fact<bool>,
    pub mig: Fact<bool>,
    /// What the driver wants done to it; `None`: nothing.
    pub recovery: Fact<Option<String>>,
    pub fabric: FabricFacts,
    pub nvlinks_up: Fact<u32>,
    pub processes: Fact<Vec<GpuProcess>>,
    pub slices: Fact<Vec<SliceFacts>>,
    /// Causes that came with any cell or call about it.
    pub faults: Vec<Cause>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FabricFacts {
    pub state: Fact<FabricState>,
    /// `Success`, or what went wrong.
    pub status: Fact<String>,
    pub clique_id: Fact<u32>,
    pub cluster_uuid: Fact<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceFacts {
    pub uuid: Fact<String>,
    /// `1g.10gb`.
    pub profile: Fact<String>,
    pub total_mib: Fact<u64>,
    pub used_mib: Fact<u64>,
    pub reserved_mib: Fact<u64>,
}

impl Cause {
    /// From what the driver writes between brackets or after a colon; NVML has the same words in `nvmlErrorString`.
    pub fn from_driver(text: &str) -> Cause {
        let said = text.trim().trim_matches(['[', ']']).trim();
        let lower = said.to_ascii_lowercase();
        // The lost one comes with advice: `GPU is lost.  Reboot the system to recover this GPU`.
        match lower.as_str() {
            "" => Cause::Missing,
            "n/a" | "not supported" => Cause::NotSupported,
            "insufficient permissions" => Cause::NoPermission,
            "unknown error" | "err!" => Cause::UnknownError,
            "timeout" => Cause::Timeout,
            "not found" | "no data" => Cause::NotFound,
            "requested functionality has been deprecated" | "function not found" => Cause::TooOld,
            "system is not in ready state" => Cause::NotReady,
            other if other.starts_with("gpu is lost") => Cause::Lost,
            other if other.starts_with("gpu requires reset") => Cause::NeedsReset,
            other if other.starts_with("gpu access blocked") => Cause::Blocked,
            _ => Cause::Said(quote(said)),
        }
    }

    pub fn unreadable(text: &str) -> Cause {
        Cause::Unreadable(quote(text))
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::NotSupported => f.write_str("not supported by this GPU or driver"),
            Cause::NoPermission => f.write_str("insufficient permissions"),
            Cause::Lost => f.write_str("the driver says `GPU is lost`"),
            Cause::NeedsReset => f.write_str("the driver says `GPU requires reset`"),
            Cause::Blocked => f.write_str("access is blocked by the operating system"),
            Cause::NotReady => f.write_str("the system is not ready"),
            Cause::Timeout => f.write_str("the driver timed out"),
            Cause::NotFound => f.write_str("the driver found none"),
            Cause::TooOld => f.write_str("the driver does not know this value"),
            Cause::Missing => f.write_str("the answer lacks it"),
            Cause::NoSuchPlace => f.write_str("the driver has no such number"),
            Cause::UnknownError => f.write_str("the driver says `Unknown Error`"),
            Cause::NotRead(why) => f.write_str(why),
            Cause::Unreadable(text) => write!(f, "`{text}` is no such value"),
            Cause::Said(text) => write!(f, "the driver says `{text}`"),
        }
    }
}

impl GpuFacts {
    /// A GPU of which nothing is known but why.
    pub fn unread(cause: &Cause) -> GpuFacts {
        GpuFacts {
            index: Err(cause.clone()),
            uuid: Err(cause.clone()),
            name: Err(cause.clone()),
            total_mib: Err(cause.clone()),
            used_mib: Err(cause.clone()),
            reserved_mib: Err(cause.clone()),
            compute_capability: Err(cause.clone()),
            pci: Err(cause.clone()),
            numa_node: Err(cause.clone()),
            ecc_volatile: Err(cause.clone()),
            ecc_aggregate: Err(cause.clone()),
            remap_pending: Err(cause.clone()),
            remap_failed: Err(cause.clone()),
            mig: Err(cause.clone()),
            recovery: Err(cause.clone()),
            fabric: FabricFacts::unread(cause),
            nvlinks_up: Err(cause.clone()),
            processes: Err(cause.clone()),
            slices: Ok(Vec::new()),
            faults: Vec::new(),
        }
    }
}

impl FabricFacts {
    pub fn unread(cause: &Cause) -> FabricFacts {
        FabricFacts {
            state: Err(cause.clone()),
            status: Err(cause.clone()),
            clique_id: Err(cause.clone()),
            cluster_uuid: Err(cause.clone()),
        }
    }
}

/// A source that failed, with what it said and what to do about it.
pub fn source_failure(source: Backend, cause: SourceCause, said: &str) -> SourceFailure {
    let help = match cause {
        SourceCause::DriverNotLoaded => Some("load the NVIDIA kernel driver, or install it"),
        SourceCause::VersionMismatch => {
            Some("reboot, or reload the kernel driver: the installed one is another version")
        }
        SourceCause::LibraryMissing => Some(
            "install the driver's libraries (libnvidia-ml.so.1) or mount them into the container",
        ),
        SourceCause::NoPermission => {
            Some("give the agent's user access to /dev/nvidia* (group video or render)")
        }
        SourceCause::GpuLost => Some("reboot; a GPU that is lost again is broken or badly seated"),
        SourceCause::NeedsReset => {
            Some("stop what uses the GPU and run `nvidia-smi --gpu-reset`, or reboot")
        }
        SourceCause::Blocked => Some("the device cgroup refuses the GPU: recreate the container"),
        SourceCause::Unresponsive => {
            Some("look for NVRM and Xid lines in the kernel's log; a reboot is likely needed")
        }
        SourceCause::Other if said.contains("Failed to initialize NVML: Unknown Error") => Some(
            "in a container the devices are gone after `systemctl daemon-reload`: recreate the container",
        ),
        SourceCause::NotAsked | SourceCause::NotInstalled | SourceCause::Other => None,
    };
    SourceFailure {
        source,
        cause,
        message: said.to_string(),
        help: help.map(str::to_string),
    }
}

/// What a fact is in the inventory.
pub fn reading<T: Clone>(fact: &Fact<T>) -> Reading<T> {
    match fact {
        Ok(value) => Reading::Known(value.clone()),
        Err(cause) => Reading::unknown(cause.to_string()),
    }
}

/// A PCI address as sysfs spells it: `00000000:1B:00.0` is `0000:1b:00.0`.
pub fn pci_address(text: &str) -> Fact<String> {
    let parts: Vec<&str> = text.trim().split([':', '.']).collect();
    let hex = |part: &str, digits_max: usize| {
        let is_hex = !part.is_empty()
            && part.len() <= digits_max
            && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_hex.then(|| u32::from_str_radix(part, 16).ok()).flatten()
    };
    let parsed = match parts.as_slice() {
        [domain, bus, device, function] => hex(domain, 8)
            .zip(hex(bus, 2))
            .zip(hex(device, 2).zip(hex(function, 1))),
        _ => None,
    };
    match parsed {
        Some(((domain, bus), (device, function))) if device < 32 && function < 8 => {
            Ok(format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
        }
        _ => Err(Cause::unreadable(text)),
    }
}

/// `1 slice`, `4 slices`.
pub fn counted(count: usize, one: &str, many: &str) -> String {
    let noun = if count == 1 { one } else { many };
    format!("{count} {noun}")
}

/// Foreign text as it may be shown: one line, no control characters, cut.
pub fn quote(text: &str) -> String {
    let mut quoted: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(QUOTE_MAX_CHARS)
        .collect();
    if text.chars().nth(QUOTE_MAX_CHARS).is_some() {
        quoted.push('…');
    }
    quoted.trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_s_words_have_one_cause_each() {
        for (text, cause) in [
            ("[N/A]", Cause::NotSupported),
            ("N/A", Cause::NotSupported),
            ("[Not Supported]", Cause::NotSupported),
            ("[Unknown Error]", Cause::UnknownError),
            ("ERR!", Cause::UnknownError),
            ("", Cause::Missing),
            ("[GPU is lost]", Cause::Lost),
            (
                "GPU is lost.  Reboot the system to recover this GPU",
                Cause::Lost,
            ),
            ("[GPU requires reset]", Cause::NeedsReset),
            ("GPU access blocked by the operating system", Cause::Blocked),
            ("[Insufficient Permissions]", Cause::NoPermission),
            ("[Not Found]", Cause::NotFound),
            (
                "[Requested functionality has been deprecated]",
                Cause::TooOld,
            ),
            ("[Brand new]", Cause::Said("Brand new".to_string())),
        ] {
            assert_eq!(Cause::from_driver(text), cause, "{text}");
        }
    }

    #[test]
    fn pci_addresses_are_spelt_as_in_sysfs() {
        for (text, address) in [
            ("00000000:1B:00.0", Some("0000:1b:00.0")),
            ("0000000F:01:00.0", Some("000f:01:00.0")),
            ("0000:02:00.0", Some("0000:02:00.0")),
            ("00010000:01:00.0", Some("10000:01:00.0")),
            ("00000000:010:00.0", None),
            ("00000000:00:20.0", None),
            ("1B:00.0", None),
            ("[N/A]", None),
            ("", None),
        ] {
            assert_eq!(pci_address(text).ok().as_deref(), address, "{text}");
        }
    }

    #[test]
    fn foreign_text_is_cut_and_stays_on_one_line() {
        assert_eq!(quote("a\nb\u{1b}[4m"), "a b [4m");
        let long = quote(&"é".repeat(500));
        assert_eq!(long.chars().count(), QUOTE_MAX_CHARS + 1);
    }
}
