//! `llmgw agent`: supervises the engines of this node and holds its session with the server, until a signal stops it.
//!
//! Exit status: 0 stopped as it was told; 1 it could not start, or could not go on; 2 usage or configuration.

mod drain;
mod host;
mod local;
mod node;
mod plaintext;
mod stop;
mod tasks;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use llmgw_proto::document::ConfigErrors;
use llmgw_proto::identity::Moment;
use llmgw_proto::link::KeepAlive;
use llmgw_proto::session::{NODE_ID_MAX_BYTES, PortRange, is_node_id};
use tokio_util::sync::CancellationToken;

use self::drain::DrainFile;
use self::host::Shards;
pub use self::local::{LocalAgent, run_local};
use self::node::Node;
use self::stop::{Signals, Stop};
use self::tasks::Tasks;
use crate::config::{self, AgentConfig, AgentTls};
use crate::enrolment::{Enrolling, Keeper, Manners, NotEnrolled, TokenArgument, in_state};
use crate::session::credentials::LOOK_EVERY;
use crate::session::dial::ServerUrl;
use crate::session::{Session, SessionOptions};
use crate::supervisor::{EngineAllowance, Supervisor, SupervisorError, SupervisorOptions, cgroup};

/// The arguments of `llmgw agent` itself.
#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// The server's address for agents, e.g. `https://ctl.example:8443`; wins over `server` in the file.
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    /// This node's id; wins over `node` in the file. Default: the host name.
    #[arg(long, value_name = "ID")]
    node: Option<String>,
    /// The agent's configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Where what must survive a restart is kept; wins over `state` in the file.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Where the gateway reaches engines; wins over `advertise` in the file. Default: the address that the stream uses.
    #[arg(long, value_name = "IP")]
    advertise: Option<IpAddr>,
    /// Stop the engines when the agent stops. Default: they run on, and the next agent takes them over.
    #[arg(long)]
    stop_engines: bool,
    /// A token for the first contact, as `llmgw ctl cert token` prints it, or `@FILE` that holds it: the node gets its certificate with it, once.
    /// Given as it is, `ps` shows it. Ignored where a certificate is there.
    #[arg(
        long,
        env = "LLMGW_ENROLL_TOKEN",
        hide_env_values = true,
        value_name = "TOKEN"
    )]
    enroll: Option<TokenArgument>,
}

/// What was decided by arguments and file together.
struct Setup {
    config: AgentConfig,
    server: ServerUrl,
    node: String,
    state: PathBuf,
    stop_engines: bool,
    /// What is to be done before the first session.
    enrolling: Option<Enrolling>,
}

/// Why an agent did not start, or not go on.
#[derive(Debug)]
pub enum DaemonError {
    Config(ConfigErrors),
    /// What is wrong with the arguments, and what would be right.
    Usage(String),
    Enrolment(NotEnrolled),
    Supervisor(SupervisorError),
    /// There is no state directory, and none can be made.
    State {
        path: PathBuf,
        source: std::io::Error,
    },
    Start(&'static str, std::io::Error),
    /// Something that runs as long as the agent does ended before it.
    Lost {
        task: &'static str,
        cause: String,
    },
}

const STATE_DEFAULT: &str = ".llmgw/agent";
const PORTS_DEFAULT: PortRange = PortRange {
    first: 21_000,
    last: 21_999,
};
/// A dead link is found out within 10 s, as on the server with its default heartbeat. The same with any other: how long this end may
/// take is no matter of how often the server wants to hear.
const KEEP_ALIVE: KeepAlive = KeepAlive {
    interval: Duration::from_secs(5),
    timeout: Duration::from_secs(5),
};
/// For each step of an attempt to connect.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the end of the process waits for threads that hang in a system call.
const EXIT_WAIT_MAX: Duration = Duration::from_millis(200);

/// Runs an agent to its end.
pub(crate) fn main(arguments: DaemonArgs) -> ExitCode {
    let ran = setup(arguments).and_then(|setup| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(|error| DaemonError::Start("threads", error))?;
        let ran = runtime.block_on(async {
            let signals = Signals::install(stop::ignores_hangup())
                .map_err(|error| DaemonError::Start("signals", error))?;
            run(setup, Stop::Signals(signals)).await
        });
        runtime.shutdown_timeout(EXIT_WAIT_MAX);
        ran
    });
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_status())
        }
    }
}

fn setup(arguments: DaemonArgs) -> Result<Setup, DaemonError> {
    let mut config = match &arguments.config {
        Some(path) => config::load(path).map_err(DaemonError::Config)?,
        None => AgentConfig::default(),
    };
    let server = arguments.server.or_else(|| config.server.clone());
    let server = server.ok_or_else(|| {
        let right = "give `--server URL`, or write `server: URL` into agent.yaml";
        DaemonError::Usage(format!("no server is named; {right}"))
    })?;
    let server: ServerUrl = server
        .parse()
        .map_err(|error| DaemonError::Usage(format!("--server: {error}")))?;
    let node = match arguments.node.or_else(|| config.node.clone()) {
        Some(node) => node,
        None => host_name().map_err(|error| DaemonError::Start("the host name", error))?,
    };
    if !is_node_id(&node) {
        let wrong = format!("`{node}` is not a node id");
        let right =
            format!("give `--node` at most {NODE_ID_MAX_BYTES} letters, digits, `.`, `_` and `-`");
        return Err(DaemonError::Usage(format!("{wrong}; {right}")));
    }
    let state = arguments.state.or_else(|| config.state.clone());
    let state = state.unwrap_or_else(|| PathBuf::from(STATE_DEFAULT));
    let given = arguments.enroll.filter(|given| !given.is_empty());
    // An enrolment says by itself that it needs TLS.
    if given.is_none() {
        plaintext::check(&server, config.tls.is_some(), config.allow_plaintext)
            .map_err(|why| DaemonError::Usage(why.to_string()))?;
    }
    let keeper = match &config.tls {
        Some(_) => Keeper::Operator,
        None => Keeper::Agent,
    };
    config.tls = tls_files(config.tls, &state, given.is_some());
    let enrolling = match (&given, &config.tls) {
        (Some(given), Some(files)) => {
            Enrolling::plan(given, &server, &node, (files, keeper), Moment::now())
                .map_err(|error| DaemonError::Usage(error.to_string()))?
        }
        _ => None,
    };
    if server.is_tls && enrolling.is_none() {
        check_tls(&server, &node, config.tls.as_ref())?;
    }
    if config.engines.is_empty() {
        tracing::warn!(
            "no engine can be started here: name those that may be, in `engines` of agent.yaml"
        );
    }
    config.server = Some(server.to_string());
    config.node = Some(node.clone());
    config.advertise = arguments.advertise.or(config.advertise);
    Ok(Setup {
        config,
        server,
        node,
        state,
        stop_engines: arguments.stop_engines,
        enrolling,
    })
}

/// Those of the file, else those of the first contact.
fn tls_files(configured: Option<AgentTls>, state: &Path, enrols: bool) -> Option<AgentTls> {
    configured.or_else(|| {
        let own = in_state(state);
        (enrols || own.cert.exists()).then_some(own)
    })
}

/// That the files can be used now. They are read again at every dial.
fn check_tls(server: &ServerUrl, node: &str, tls: Option<&AgentTls>) -> Result<(), DaemonError> {
    let Some(tls) = tls else {
        return Err(DaemonError::Usage(format!(
            "{server} is dialled with a certificate, and agent.yaml names none; write\n\n\
             tls: {{ca: ca.pem, cert: agent.pem, key: agent-key.pem}}\n\n\
             `llmgw ctl cert agent --ca DIR --node {node} --out DIR` makes the files, where the authority's key is; \
             or get them with `--enroll` and a token of `llmgw ctl cert token --node {node}`"
        )));
    };
    let loaded = tls.load();
    loaded.map_err(|problem| DaemonError::Usage(format!("`tls`: {problem}")))?;
    Ok(())
}

async fn run(setup: Setup, mut stop: Stop) -> Result<(), DaemonError> {
    if !setup.server.is_tls && setup.config.tls.is_some() {
        tracing::warn!(
            "`tls` is not used: {} is dialled without it, `https://` would",
            setup.server
        );
    }
    if !setup.server.is_tls && !setup.server.is_loopback() {
        tracing::warn!(
            "{} is reached without TLS: anybody on the way can read and change what is said, engines' keys included",
            setup.server
        );
    }
    let models_dir = models_dir(&setup.config)?;
    let state_dir = state_dir(&setup.state)?;
    let starting = async {
        let node = Node::start(&setup.config)
            .await
            .map_err(|error| DaemonError::Start("the look at the GPUs", error))?;
        let supervisor = supervise(&setup, &node).await?;
        Ok::<_, DaemonError>((node, supervisor))
    };
    tokio::pin!(starting);
    let mut is_asked = false;
    let (node, supervisor) = tokio::select! {
        started = &mut starting => started?,
        () = stop.asked() => {
            if !setup.stop_engines {
                return Ok(());
            }
            // An earlier agent's engines are stopped too, and are only known once it has started.
            is_asked = true;
            starting.await?
        }
    };
    // From now on: a shard that ends is over once its GPUs were seen free.
    let looks = tokio::spawn(node.clone().keep(supervisor.clone()));
    if !is_asked {
        let enrolled = enrolled(&setup, &supervisor, &mut stop).await;
        is_asked = enrolled.inspect_err(|_| looks.abort())?;
    }
    let session = Arc::new(session(
        &setup,
        models_dir,
        state_dir,
        node,
        supervisor.clone(),
    ));
    let leave = CancellationToken::new();
    let held = {
        let (session, leave) = (session.clone(), leave.clone());
        tokio::spawn(async move { session.run(leave).await })
    };
    let mut tasks = Tasks {
        session: held,
        looks,
        shard_lost: supervisor.lost(),
    };
    if !is_asked && let Err(lost) = tasks.until_asked(&mut stop).await {
        shut_down(&supervisor, setup.stop_engines, &mut stop).await;
        return Err(lost);
    }
    if setup.stop_engines {
        // The server hears of each of them, so the goodbye comes last. A second signal leaves them running.
        tracing::info!("stopping the engines{}", stop.hint());
        session.stops_engines();
        tokio::select! {
            () = supervisor.shutdown(true) => session.engines_were_stopped(),
            () = stop.asked() => {}
        }
    }
    leave.cancel();
    let _ = tokio::join!(&mut tasks.session, supervisor.shutdown(false));
    tracing::info!("stopped");
    Ok(())
}

/// Ends supervision. A signal meanwhile leaves the engines running that are not stopped yet: where nobody looks at the GPUs any more, each
/// shard on some waits long for it.
async fn shut_down(supervisor: &Supervisor, stop_engines: bool, stop: &mut Stop) {
    tokio::select! {
        () = supervisor.shutdown(stop_engines) => {}
        () = stop.asked() => supervisor.shutdown(false).await,
    }
}

/// Turns the token into a certificate, where there is one to turn. True: the agent was told to stop meanwhile.
async fn enrolled(
    setup: &Setup,
    supervisor: &Supervisor,
    stop: &mut Stop,
) -> Result<bool, DaemonError> {
    let Some(enrolling) = &setup.enrolling else {
        return Ok(false);
    };
    let manners = Manners {
        keep_alive: KEEP_ALIVE,
        patience: PATIENCE,
    };
    tokio::select! {
        enrolled = enrolling.run(manners) => match enrolled {
            Ok(()) => Ok(false),
            Err(why) => {
                supervisor.shutdown(setup.stop_engines).await;
                Err(DaemonError::Enrolment(why))
            }
        },
        () = stop.asked() => Ok(true),
    }
}

async fn supervise(setup: &Setup, node: &Arc<Node>) -> Result<Arc<Supervisor>, DaemonError> {
    let allow = setup.config.engines.iter().map(|(engine, entry)| {
        let commands = entry.commands.iter();
        let allowance = EngineAllowance {
            // A relative path is one of a relative `--config`; the supervisor starts absolute ones only.
            executables: commands
                .map(|(name, path)| Ok((name.clone(), std::path::absolute(path)?)))
                .collect::<std::io::Result<_>>()?,
            env: entry.env.clone(),
        };
        Ok((engine.clone(), allowance))
    });
    let allow: std::io::Result<_> = allow.collect();
    let allow: BTreeMap<_, EngineAllowance> =
        allow.map_err(|error| DaemonError::Start("the working directory", error))?;
    for (engine, allowance) in &allow {
        // As with `models_dir`, it may be there later.
        for (name, path, cause) in allowance.missing() {
            tracing::warn!(
                "engines.{engine}.commands.{name}: `{}` can't be executed now ({cause}), so nothing of it starts here",
                path.display()
            );
        }
    }
    let mut options = SupervisorOptions::new(setup.state.clone(), allow);
    options.cgroup_root = cgroup::delegated(&options.proc_root);
    options.gpus = node.clone();
    let started = Supervisor::start(options).await;
    let (supervisor, _) = started.map_err(DaemonError::Supervisor)?;
    Ok(supervisor)
}

fn session(
    setup: &Setup,
    models_dir: Option<String>,
    state_dir: String,
    node: Arc<Node>,
    supervisor: Arc<Supervisor>,
) -> Session {
    let options = SessionOptions {
        server: setup.server.clone(),
        tls: setup.config.tls.clone(),
        look_every: LOOK_EVERY,
        node: setup.node.clone(),
        advertise: setup.config.advertise,
        ports: setup.config.ports.unwrap_or(PORTS_DEFAULT),
        engines: setup.config.engines.keys().cloned().collect(),
        models_dir,
        state_dir,
        keep_alive: KEEP_ALIVE,
        patience: PATIENCE,
    };
    let drain = DrainFile::open(&setup.state);
    let shards = Arc::new(Shards(supervisor));
    Session::new(options, shards, node, Arc::new(drain))
}

/// Makes it where it is not there, and names it as every agent on it does: the server tells by it who is the same one.
fn state_dir(state: &Path) -> Result<String, DaemonError> {
    let made = std::fs::create_dir_all(state).and_then(|()| std::fs::canonicalize(state));
    let absolute = made.map_err(|source| DaemonError::State {
        path: state.to_owned(),
        source,
    })?;
    Ok(absolute.to_string_lossy().into_owned())
}

/// As the server is told it. That nothing is there is no reason not to start: it may be mounted later.
fn models_dir(config: &AgentConfig) -> Result<Option<String>, DaemonError> {
    let Some(named) = &config.models_dir else {
        return Ok(None);
    };
    let absolute = std::path::absolute(named)
        .map_err(|error| DaemonError::Start("the working directory", error))?;
    if !absolute.is_dir() {
        tracing::warn!("models_dir `{}` is no directory now", absolute.display());
    }
    match absolute.into_os_string().into_string() {
        Ok(text) => Ok(Some(text)),
        Err(path) => Err(DaemonError::Usage(format!(
            "models_dir `{}` is not UTF-8, and the server can't name it; choose another directory",
            path.display()
        ))),
    }
}

fn host_name() -> std::io::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    Ok(name.trim().to_owned())
}

impl DaemonError {
    pub fn exit_status(&self) -> u8 {
        match self {
            DaemonError::Config(_) | DaemonError::Usage(_) => 2,
            DaemonError::Enrolment(_)
            | DaemonError::Supervisor(_)
            | DaemonError::State { .. }
            | DaemonError::Start(..)
            | DaemonError::Lost { .. } => 1,
        }
    }
}

impl fmt::Display for DaemonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DaemonError::Config(errors) => errors.fmt(f),
            DaemonError::Usage(text) => f.write_str(text),
            DaemonError::Enrolment(why) => why.fmt(f),
            DaemonError::Supervisor(error) => error.fmt(f),
            DaemonError::State { path, source } => write!(
                f,
                "the state directory `{}` can't be made: {source}; name another one with `--state`",
                path.display()
            ),
            DaemonError::Start(what, error) => write!(f, "{what}: {error}"),
            DaemonError::Lost { task, cause } => write!(
                f,
                "{task} ended: {cause}; the agent can't go on without it, and is to be started again"
            ),
        }
    }
}

#[cfg(test)]
mod tests;
