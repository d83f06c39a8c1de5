//! The GPUs of this node, through NVML or else `nvidia-smi`, without ever waiting for a driver that hangs.
//!
//! ```text
//! probe_once / GpuWatch     this process: starts the probe, waits until its deadline, keeps the last values
//!   probe.rs                the probe's own process: asks NVML, else nvidia-smi, and prints JSON
//!     nvml.rs | smi.rs      what the source says, as facts
//!     assemble.rs           classes, unified memory, slices, health, domains
//! ```

pub mod assemble;
pub mod bounded;
pub mod class;
pub mod domains;
pub mod facts;
#[cfg(any(test, fuzzing))]
pub mod fuzzed;
pub mod health;
pub mod nvml;
pub mod probe;
pub mod prober;
#[cfg(test)]
mod scripts;
pub mod smi;
pub mod watch;

pub use assemble::missing_from_driver;
pub use probe::{ProbeArguments, probe_main};
pub use prober::{GpuSources, PROBE_DEADLINE, probe_once};
pub use watch::{GpuWatch, PROBE_INTERVAL};
