//! The probe: a process of its own that asks the driver and prints what it learnt, since a driver may hang for ever.
//!
//! NVML has no deadline at all and nvidia-smi ignores signals while it hangs in the kernel, so nothing of this runs in the agent itself.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use llmgw_proto::inventory::gpu::{Backend, Gpus, SourceCause, SourceFailure};

use super::assemble::{Machine, assemble, without_source};
use super::facts::{DriverFacts, source_failure};
use super::nvml::{self, library::Library};
use super::smi::{self, failure, run::Program};

/// nvidia-smi gets this much less than the probe, so that the probe can still say that it hangs.
const TELLING: Duration = Duration::from_millis(500);
/// A probe whose agent died ends itself this long after its deadline.
const ALARM_AFTER: Duration = Duration::from_secs(5);

/// How `llmgw agent probe-gpus` is called; nobody but the agent does.
#[derive(Debug, Clone, clap::Args)]
pub struct ProbeArguments {
    /// Ask this nvidia-smi, and not NVML.
    #[arg(long, value_name = "PATH")]
    pub nvidia_smi: Option<PathBuf>,
    /// Load this NVML library.
    #[arg(long, value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,
    /// Why NVML is not asked again.
    #[arg(long, value_name = "WHY")]
    pub without_nvml: Option<String>,
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    pub proc: PathBuf,
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    pub sysfs: PathBuf,
    /// When the agent will kill this process.
    #[arg(long, value_name = "MS")]
    pub deadline_ms: u64,
}

/// Asks, prints one line of JSON, and is done.
pub fn probe_main(arguments: &ProbeArguments) -> ExitCode {
    let alarm = Duration::from_millis(arguments.deadline_ms) + ALARM_AFTER;
    nix::unistd::alarm::set(u32::try_from(alarm.as_secs()).unwrap_or(u32::MAX).max(1));
    let gpus = answer(arguments);
    let printed = serde_json::to_string(&gpus)
        .map_err(std::io::Error::other)
        .and_then(|json| writeln!(std::io::stdout().lock(), "{json}"));
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What the first source says that answers.
pub fn answer(arguments: &ProbeArguments) -> Gpus {
    let deadline =
        Instant::now() + Duration::from_millis(arguments.deadline_ms).saturating_sub(TELLING);
    let machine = Machine {
        proc: &arguments.proc,
        sysfs: &arguments.sysfs,
    };
    let passed_over = match ask_nvml(arguments) {
        Ok(facts) => return assemble(&facts, Backend::Nvml, Vec::new(), &machine),
        Err(failure) => vec![failure],
    };
    match ask_smi(arguments.nvidia_smi.as_deref(), deadline) {
        Ok(facts) => assemble(&facts, Backend::NvidiaSmi, passed_over, &machine),
        Err(failure) => {
            let mut failures = passed_over;
            failures.push(failure);
            without_source(failures)
        }
    }
}

fn ask_nvml(arguments: &ProbeArguments) -> Result<DriverFacts, SourceFailure> {
    if let Some(why) = &arguments.without_nvml {
        return Err(source_failure(Backend::Nvml, SourceCause::Other, why));
    }
    if let Some(path) = &arguments.nvidia_smi {
        let message = format!("`{}` was asked for", path.display());
        return Err(source_failure(
            Backend::Nvml,
            SourceCause::NotAsked,
            &message,
        ));
    }
    let library = Library::load(arguments.nvml_library.as_deref())?;
    nvml::read(&library)
}

fn ask_smi(path: Option<&Path>, deadline: Instant) -> Result<DriverFacts, SourceFailure> {
    let program = match path {
        Some(path) => Program::new(path.to_path_buf(), deadline),
        None => Program::find(deadline).map_err(|error| failure::not_run(&error))?,
    };
    smi::read(&program)
}

#[cfg(test)]
mod tests;
