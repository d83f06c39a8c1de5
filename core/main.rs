//! `llmgw`: arguments, one match, an exit status.

mod dev;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use llmgw_agent::command::AgentArgs;
use llmgw_core::ctl::CtlArgs;
use llmgw_core::policy::PolicyCommand;
use llmgw_core::serve::ServerOptions;
use llmgw_core::telemetry::log;
use llmgw_core::{ctl, policy, serve};

/// How long the end of the process waits for threads that hang in a system call.
const EXIT_WAIT_MAX: Duration = Duration::from_millis(1_000);

/// An OpenAI-compatible gateway for open-weight LLMs on your own machines.
#[derive(Parser)]
#[command(name = "llmgw", version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve clients.
    Server(ServerArguments),
    /// Server and agent in one process, for one machine: ctrl-C stops both, and the engines.
    Dev(DevArguments),
    /// Supervise the engines of this node, or look at what it is.
    Agent(AgentArgs),
    /// Write out or check policies.
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Ask a running server, or prepare what it needs.
    Ctl(CtlArgs),
}

#[derive(clap::Args)]
struct ServerArguments {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Directory of policies; wins over `policies` in the file.
    #[arg(long, value_name = "DIR")]
    policies: Option<PathBuf>,
    /// Address for clients; wins over `listen` in the file.
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<SocketAddr>,
    /// Address for operators; wins over `admin` in the file.
    #[arg(long, value_name = "HOST:PORT")]
    admin: Option<SocketAddr>,
    /// Address for agents; wins over `agents.listen` in the file.
    #[arg(long, value_name = "HOST:PORT")]
    agents: Option<SocketAddr>,
    /// Validate the configuration and the policies, and exit.
    #[arg(long)]
    check: bool,
}

#[derive(clap::Args)]
struct DevArguments {
    /// The configuration file. An agent.yaml beside it says what this node may start.
    #[arg(long, value_name = "FILE", default_value = "llmgw.yaml")]
    config: PathBuf,
    /// Directory of policies; wins over `policies` in the file.
    #[arg(long, value_name = "DIR")]
    policies: Option<PathBuf>,
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Server(arguments) => server(arguments),
        Command::Dev(arguments) => dev(arguments),
        Command::Agent(arguments) => agent(arguments),
        Command::Policy(command) => policy::run(command),
        Command::Ctl(arguments) => ctl::main(arguments),
    }
}

fn agent(arguments: AgentArgs) -> ExitCode {
    if arguments.is_daemon() {
        log::init(log::LogFormat::Text, log::INFO);
    }
    let ended = llmgw_agent::command::main(arguments);
    log::flush();
    ended
}

fn server(arguments: ServerArguments) -> ExitCode {
    let options = ServerOptions {
        config: arguments.config,
        policies: arguments.policies,
        listen: arguments.listen,
        admin: arguments.admin,
        agents: arguments.agents,
        check: arguments.check,
        dev: false,
    };
    ended(async move {
        let ran = serve::run(options, |_| ()).await;
        ran.map_err(|error| (error.to_string(), error.exit_status()))
    })
}

fn dev(arguments: DevArguments) -> ExitCode {
    ended(dev::run(arguments.config, arguments.policies))
}

/// Runs one of them to its end; an error is what is said, and the exit status.
fn ended(running: impl Future<Output = Result<(), (String, u8)>>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        // Sockets are looked at more often than every 61 polls, so that small requests get in between floods.
        .event_interval(13)
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: no threads to run on: {error}");
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(running);
    // A thread that hangs in a file system or in a stderr that nobody reads must not keep the process.
    runtime.shutdown_timeout(EXIT_WAIT_MAX);
    log::flush();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err((error, status)) => {
            eprintln!("error: {error}");
            ExitCode::from(status)
        }
    }
}
