//! `llmgw agent`: runs the agent, or prints what a node is. Data goes to stdout, messages to stderr.
//!
//! Exit status: 0 done, also on a node with much to complain about; 1 the page could not be written; 2 usage or configuration.

use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use llmgw_proto::document::ConfigErrors;
use llmgw_proto::units::HumanDuration;

use crate::config::{self, AgentConfig};
use crate::daemon::{self, DaemonArgs};
use crate::inventory::gpu::{GpuSources, PROBE_DEADLINE, ProbeArguments, probe_main};
use crate::inventory::{self, Sources, page};

/// The arguments of `llmgw agent`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct AgentArgs {
    #[command(subcommand)]
    command: Option<AgentCommand>,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, Subcommand)]
enum AgentCommand {
    /// Print what a scheduler would see of this node: GPUs, adapters, fabrics, processors, memory.
    Inventory(InventoryArgs),
    /// Asks the GPUs' driver, in a process that may hang and be killed.
    #[command(hide = true)]
    ProbeGpus(ProbeArguments),
}

#[derive(Debug, Args)]
struct InventoryArgs {
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    format: OutputFormat,
    /// Read adapters and PCI devices below this directory.
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    sysfs: PathBuf,
    /// Ask this nvidia-smi instead of NVML.
    #[arg(long, value_name = "PATH")]
    nvidia_smi: Option<PathBuf>,
    /// The agent's configuration: the node's id, labels, fabrics, the server.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How long the GPUs' driver may take before it counts as unresponsive, e.g. `10s`.
    #[arg(long, value_name = "DURATION", default_value_t = HumanDuration(PROBE_DEADLINE))]
    deadline: HumanDuration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum OutputFormat {
    /// A page for people.
    #[default]
    Text,
    /// What the node registers.
    Json,
}

impl AgentArgs {
    /// It runs until it is stopped, so its messages are a log.
    pub fn is_daemon(&self) -> bool {
        self.command.is_none()
    }
}

/// What ended the command.
#[derive(Debug)]
enum CommandError {
    Config(ConfigErrors),
    Deadline(Duration),
    Write(io::Error),
}

/// The probe keeps half a second of its deadline to tell what hangs.
const DEADLINE_MIN: Duration = Duration::from_millis(1_000);

/// Runs the command and says how it ended.
pub fn main(arguments: AgentArgs) -> ExitCode {
    match arguments.command {
        Some(AgentCommand::Inventory(arguments)) => match inventory(&arguments) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => error.answer(),
        },
        Some(AgentCommand::ProbeGpus(arguments)) => probe_main(&arguments),
        None => daemon::main(arguments.daemon),
    }
}

fn inventory(arguments: &InventoryArgs) -> Result<(), CommandError> {
    let config = match &arguments.config {
        Some(path) => config::load(path).map_err(CommandError::Config)?,
        None => AgentConfig::default(),
    };
    let deadline = arguments.deadline.0;
    if deadline < DEADLINE_MIN {
        return Err(CommandError::Deadline(deadline));
    }
    let sources = Sources {
        gpus: GpuSources {
            nvidia_smi: arguments.nvidia_smi.clone(),
            sysfs: arguments.sysfs.clone(),
            deadline,
            ..GpuSources::default()
        },
        sys: arguments.sysfs.clone(),
        proc: PathBuf::from("/proc"),
        dev: (arguments.sysfs == Path::new("/sys")).then(|| PathBuf::from("/dev")),
        config,
    };
    let found = inventory::collect(&sources);
    let text = match arguments.format {
        OutputFormat::Text => page::page(&found),
        OutputFormat::Json => {
            let json = serde_json::to_string_pretty(&found);
            json.map_err(|error| CommandError::Write(error.into()))? + "\n"
        }
    };
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // Who reads only the beginning has what they want.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(CommandError::Write),
    }
}

impl CommandError {
    /// The one place that turns a failure into a message and a status.
    fn answer(self) -> ExitCode {
        let (message, status) = match self {
            CommandError::Config(errors) => (format!("error: {errors}"), 2),
            CommandError::Deadline(deadline) => {
                let (given, least) = (HumanDuration(deadline), HumanDuration(DEADLINE_MIN));
                let wrong = format!("error: `--deadline {given}` is shorter than `{least}`");
                (wrong, 2)
            }
            CommandError::Write(error) => (format!("error: cannot write: {error}"), 1),
        };
        eprintln!("{message}");
        ExitCode::from(status)
    }
}
