//! What an nvidia-smi that failed means. It says so on its standard output; several causes share exit status 255.

use llmgw_proto::inventory::gpu::{Backend, SourceCause, SourceFailure};

use super::run::{Ran, RunError};
use crate::inventory::gpu::facts::{quote, source_failure};

/// What the text says, whatever the exit status.
const BY_TEXT: [(&str, SourceCause); 9] = [
    (
        "couldn't communicate with the NVIDIA driver",
        SourceCause::DriverNotLoaded,
    ),
    ("couldn't find libnvidia-ml.so", SourceCause::LibraryMissing),
    (
        "Driver/library version mismatch",
        SourceCause::VersionMismatch,
    ),
    (
        "Mismatch in versions between nvidia-smi and NVML",
        SourceCause::VersionMismatch,
    ),
    ("NVML: Insufficient Permissions", SourceCause::NoPermission),
    ("NVML: GPU is lost", SourceCause::GpuLost),
    ("NVML: GPU requires reset", SourceCause::NeedsReset),
    (
        "NVML: GPU access blocked by the operating system",
        SourceCause::Blocked,
    ),
    ("NVML: Driver Not Loaded", SourceCause::DriverNotLoaded),
];

/// The answer of a driver that has nothing to list: no failure.
pub const NO_DEVICES: &str = "No devices were found";

/// What the exit status says where the text says nothing known.
fn by_status(status: i32) -> SourceCause {
    match status {
        4 => SourceCause::NoPermission,
        9 => SourceCause::DriverNotLoaded,
        12 => SourceCause::LibraryMissing,
        15 => SourceCause::GpuLost,
        17 => SourceCause::Blocked,
        18 => SourceCause::VersionMismatch,
        _ => SourceCause::Other,
    }
}

/// Why an answer without a single GPU is none.
pub fn failure(ran: &Ran) -> SourceFailure {
    let said = if ran.stdout.trim().is_empty() {
        ran.stderr.trim()
    } else {
        ran.stdout.trim()
    };
    let cause = BY_TEXT
        .iter()
        .find(|(text, _)| said.contains(text))
        .map_or_else(
            || ran.status.map_or(SourceCause::Other, by_status),
            |(_, cause)| *cause,
        );
    let ended = match ran.status {
        Some(0) => "nvidia-smi listed no GPU".to_string(),
        Some(status) => format!("nvidia-smi exited with {status}"),
        None => "nvidia-smi was killed".to_string(),
    };
    let message = if said.is_empty() {
        ended
    } else {
        let lines: Vec<String> = said.lines().map(quote).collect();
        format!("{ended}: {}", quote_all(&lines))
    };
    source_failure(Backend::NvidiaSmi, cause, &message)
}

/// Why nvidia-smi gave no answer at all.
pub fn not_run(error: &RunError) -> SourceFailure {
    let cause = match error {
        RunError::NotFound { .. } => SourceCause::NotInstalled,
        RunError::Deadline { .. } => SourceCause::Unresponsive,
        RunError::NotStarted { .. } | RunError::TooMuch { .. } => SourceCause::Other,
    };
    source_failure(Backend::NvidiaSmi, cause, &error.to_string())
}

/// The first lines; what follows is advice.
fn quote_all(lines: &[String]) -> String {
    const LINES_MAX: usize = 2;
    let first: Vec<&str> = lines
        .iter()
        .map(String::as_str)
        .filter(|line| !line.is_empty())
        .take(LINES_MAX)
        .collect();
    first.join("; ")
}
