//! `llmgw server`: reads the configuration, opens the addresses, serves until it is told to stop.

mod agents;
mod files;
mod fleet;
pub mod reload;
pub mod report;
pub mod signals;
mod state_dir;
pub mod ticks;
mod tls;

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use llmgw_plugins::{Policies, PolicyOptions};
use llmgw_proto::identity::{FileProblem, Fingerprint, Moment};
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::fleet::Fleet;
use self::reload::Reloads;
use self::signals::{Hangup, Signals};
use self::tls::Tls;
use crate::admin::guard::Guard;
use crate::admin::{self, Admin};
use crate::certificates::Opened as OpenedTls;
use crate::config::{self, Config};
use crate::control::enrolment::Enrolment;
use crate::control::sessions::Door;
use crate::gateway::client_room::ClientRoom;
use crate::gateway::server::{self, Listener};
use crate::gateway::state::Gateway;
use crate::policy::OwnKernels;
use crate::telemetry::{Telemetry, log};

/// Connections that the kernel completes before they are accepted.
const LISTEN_BACKLOG: u32 = 4_096;
/// For connections to close once nothing is at work: half a request head or half an HTTP/2 frame holds one open.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(5);
/// For the last answers to leave once every request is done, and for operators' once the admin address is closed.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The command line of `llmgw server`.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    pub config: PathBuf,
    /// Wins over the configuration's `policies`.
    pub policies: Option<PathBuf>,
    pub listen: Option<SocketAddr>,
    pub admin: Option<SocketAddr>,
    pub agents: Option<SocketAddr>,
    /// Validate and exit.
    pub check: bool,
    /// `llmgw dev`: the one agent is in this process, and the terminal's end is this server's end.
    pub dev: bool,
}

/// What an agent in the server's process needs to know of it.
#[derive(Debug)]
pub struct Opened {
    /// Where agents connect; `None`: nowhere.
    pub agents: Option<SocketAddr>,
    pub state: PathBuf,
    /// What engines' plugins start, by engine.
    pub executables: BTreeMap<String, Vec<String>>,
}

/// Why a server did not start, and the exit status that says so.
#[derive(Debug)]
pub enum ServerError {
    /// What the operator wrote: exit status 2.
    Configuration(String),
    /// What the machine refused: exit status 1.
    Start(String),
}

impl ServerError {
    pub fn exit_status(&self) -> u8 {
        match self {
            ServerError::Configuration(_) => 2,
            ServerError::Start(_) => 1,
        }
    }
}

impl std::fmt::Display for ServerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ServerError::Configuration(text) | ServerError::Start(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for ServerError {}

/// Everything that can be wrong before an address is opened.
struct Checked {
    config: Config,
    policies: Arc<Policies>,
    tls: Tls,
}

impl Checked {
    fn opened(&self, agents: Option<SocketAddr>) -> Opened {
        let set = self.policies.current();
        let executables = |name: &str| Some((name.to_owned(), set.engine(name)?.commands.clone()));
        Opened {
            agents,
            state: self.config.state.clone(),
            executables: set
                .engine_names()
                .into_iter()
                .filter_map(executables)
                .collect(),
        }
    }
}

/// The opened addresses.
struct Bound {
    clients: TcpListener,
    admin: TcpListener,
    /// None: no agent may connect.
    agents: Option<TcpListener>,
    addresses: report::Addresses,
}

/// Runs a server to its end; `opened` is told when its addresses are open, before it serves.
pub async fn run(options: ServerOptions, opened: impl FnOnce(Opened)) -> Result<(), ServerError> {
    // Service managers may ask for a reload as soon as there is a process. SIGTERM and SIGINT keep their default until it serves.
    let reload_signal = match options.check || options.dev {
        true => None,
        false => Some(Hangup::hear().map_err(start_error("signals"))?),
    };
    let checked = check(&options)?;
    if options.check {
        println!("{}: ok", options.config.display());
        for said in remarks(&checked, options.dev).chain(ends(&checked)) {
            eprintln!("warning: {said}");
        }
        return Ok(());
    }
    let telemetry = start_telemetry(&checked.config);
    let files = files::raise_limit();
    let hangup = reload_signal.map_or_else(Hangup::hear, Ok);
    let mut signals = hangup
        .and_then(|hangup| Signals::install(hangup, options.dev))
        .map_err(start_error("signals"))?;
    let Bound {
        clients,
        admin: admin_listener,
        agents,
        addresses,
    } = bind_all(&checked.config)?;
    opened(checked.opened(addresses.agents));
    for said in remarks(&checked, options.dev) {
        tracing::warn!("{said}");
    }
    let Checked {
        config,
        policies,
        tls,
    } = checked;
    let (clients_tls, admin_tls) = (tls.clients.clone(), tls.admin.clone());
    let token = config.admin.token.clone();
    let enrolment = open_enrolment(&config, tls.door())?;
    let sessions = agents.map(|listener| agents::start(listener, &config, tls.door(), &enrolment));
    let gateway = Gateway::new(config, policies.clone(), telemetry.clone());
    let stop = Stop::default();
    let fleet = sessions.map(|sessions| Fleet::over(sessions, enrolment, &gateway));
    let looking = match &fleet {
        Some(fleet) => Some(
            fleet
                .start(&stop.background)
                .map_err(start_error("control"))?,
        ),
        None => None,
    };
    let certificates = tls.keep(fleet.as_ref().map(|fleet| &fleet.sessions));
    let reloads = Reloads::new(
        options,
        gateway.clone(),
        fleet.clone(),
        certificates.clone(),
    );
    let background = TaskTracker::new();
    background.spawn(certificates.clone().run(stop.background.clone()));
    background.spawn(reloads.clone().watch(stop.background.clone()));
    background.spawn(policies.clone().watch(stop.background.clone()));
    let ticks = ticks::start(gateway.clone());
    let admin = Arc::new(Admin {
        metrics: telemetry.metrics.clone(),
        policies,
        report: report::of(
            gateway.clone(),
            addresses.clone(),
            reloads.clone(),
            certificates.clone(),
        ),
        ready: report::readiness(gateway.clone()),
        reload: {
            let reloads = reloads.clone();
            Arc::new(move |confirmed| reloads.now(confirmed))
        },
        ends: Arc::new(move || certificates.ends()),
        guard: Guard::new(
            token.map(|token| token.expose().to_string()),
            admin_tls.is_some(),
        ),
        fleet: fleet.as_ref().map(Fleet::admin),
    });
    let admin_task = tokio::spawn(admin::serve(
        admin_listener,
        admin,
        admin_tls,
        stop.admin.clone(),
    ));
    if let Some(agents) = addresses.agents {
        tracing::info!(
            "waiting for agents on {}://{agents}",
            scheme(addresses.agents_tls)
        );
    }
    tracing::info!(
        "serving clients on {}://{}, admin on {}://{}",
        scheme(addresses.clients_tls),
        addresses.clients,
        scheme(addresses.admin_tls),
        addresses.admin
    );
    let clients_max = files::clients_max(files, addresses.agents.is_some());
    tracing::info!("at most {clients_max} clients at once, of {files} open files");
    let clients = Listener {
        tcp: clients,
        tls: clients_tls,
        room: ClientRoom::new(clients_max, &telemetry.metrics),
    };
    let serving = tokio::spawn(server::serve(
        clients,
        gateway.clone(),
        stop.clients.clone(),
    ));
    signals.wait(&reloads).await;
    let clean = drain(&gateway, &stop, serving, signals).await;
    stop.background.cancel();
    ticks.stop();
    // It commands no more before the agents are told to wait.
    if let Some(looking) = looking {
        let _ = tokio::task::spawn_blocking(move || drop(looking)).await;
    }
    if let Some(fleet) = fleet {
        fleet.sessions.stop().await;
    }
    stop.admin.cancel();
    if let Ok(connections) = admin_task.await {
        let _ = tokio::time::timeout(LAST_WORDS, connections.wait()).await;
    }
    tokio::task::spawn_blocking(move || telemetry.flush())
        .await
        .ok();
    tracing::info!(
        "stopped{}",
        if clean { "" } else { ", with requests cut off" }
    );
    Ok(())
}

/// What ends what: clients first, the admin address last.
#[derive(Default)]
struct Stop {
    clients: server::Stop,
    background: CancellationToken,
    admin: CancellationToken,
}

/// Lets requests finish within `drain_timeout`; a second signal cuts them off. True: all of them finished.
async fn drain(
    gateway: &Gateway,
    stop: &Stop,
    serving: tokio::task::JoinHandle<TaskTracker>,
    mut signals: Signals,
) -> bool {
    let limit = gateway.runtime.load().config.limits.drain_timeout;
    gateway.drain();
    stop.clients.begins.cancel();
    let Ok(connections) = serving.await else {
        return false;
    };
    tracing::info!(
        "stopping: {} requests at work, at most {limit:?}; a second signal cuts them off",
        gateway.telemetry.at_work.len()
    );
    let at_work = &gateway.telemetry.at_work;
    at_work.close();
    let finished = async {
        at_work.wait().await;
        stop.clients.is_idle.cancel();
        if tokio::time::timeout(CLOSE_WAIT_MAX, connections.wait())
            .await
            .is_err()
        {
            let open = connections.len();
            tracing::warn!(
                "{open} connections were cut off, {CLOSE_WAIT_MAX:?} after the last request"
            );
        }
    };
    let done = tokio::select! {
        () = finished => true,
        () = tokio::time::sleep(limit) => false,
        () = signals.stop() => false,
    };
    if !done {
        tracing::warn!("{} requests were cut off", at_work.len());
        let _ = tokio::time::timeout(LAST_WORDS, connections.wait()).await;
    }
    done
}

/// The tokens of an earlier run, and who signs.
fn open_enrolment(config: &Config, door: Door) -> Result<Arc<Enrolment>, ServerError> {
    let leads = Arc::new(move |authority: &Fingerprint| door.leads_to(authority));
    let start = |error: FileProblem| ServerError::Start(format!("`state`: {error}"));
    let enrolment = Enrolment::open(&config.state, leads).map_err(start)?;
    enrolment.configure(config.agents.as_ref()).map_err(start)?;
    Ok(Arc::new(enrolment))
}

fn read_config(options: &ServerOptions) -> Result<Config, ServerError> {
    let config = config::load(&options.config)
        .map_err(|errors| ServerError::Configuration(errors.to_string()))?;
    options.over(config).map_err(ServerError::Configuration)
}

impl ServerOptions {
    /// Puts the command line's addresses over those of the file.
    pub(crate) fn over(&self, mut config: Config) -> Result<Config, String> {
        if let Some(address) = self.listen {
            config.listen.address = address;
        }
        if let Some(address) = self.admin {
            config.admin.address = address;
            config
                .admin
                .check()
                .map_err(|error| format!("--admin {address}: {error}"))?;
        }
        if let Some(address) = self.agents {
            let agents = config.agents.get_or_insert_default();
            agents.address = address;
            agents
                .check()
                .map_err(|error| format!("--agents {address}: {error}"))?;
        }
        if self.dev {
            // The one agent brings all that runs with its registration, so there is nothing to wait for.
            config.agents = Some(config::Agents {
                address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
                recovery: Duration::ZERO,
                ..config::Agents::default()
            });
        }
        Ok(config)
    }
}

fn open_policies(options: &ServerOptions, config: &Config) -> Result<Arc<Policies>, ServerError> {
    let dir = options.policies.clone().or_else(|| config.policies.clone());
    // A check leaves nothing behind.
    let state = (!options.check).then(|| config.state.clone());
    let options = PolicyOptions { dir, state };
    Policies::open_tested(options, Arc::new(OwnKernels))
        .map_err(|error| ServerError::Configuration(error.to_string()))
}

/// What a configuration needs beside itself, at the start as at a reload.
fn check_usable(config: &Config, policies: &Policies) -> Result<(), ServerError> {
    check_engines(config, policies)?;
    agents::check_authority(config).map_err(ServerError::Configuration)
}

/// Refuses an engine that no plugin describes, before the first request finds out.
pub(crate) fn check_engines(config: &Config, policies: &Policies) -> Result<(), ServerError> {
    let set = policies.current();
    config::check_engines(config, &set.engine_names())
        .map_err(|errors| ServerError::Configuration(errors.to_string()))
}

fn start_telemetry(config: &Config) -> Arc<Telemetry> {
    let format = match config.log.format {
        config::LogFormat::Text => log::LogFormat::Text,
        config::LogFormat::Json => log::LogFormat::Json,
    };
    log::init(format, config.log.level.into());
    Telemetry::start(format)
}

/// What is probably not meant, and what this version does not do yet.
fn remarks(checked: &Checked, is_dev: bool) -> impl Iterator<Item = String> {
    let config = &checked.config;
    let recovery = config::recovery_warning(config).filter(|_| !is_dev);
    let tls = checked.tls.opened().flat_map(OpenedTls::remarks);
    config::warnings(config)
        .into_iter()
        .chain(config::not_yet_enforced(config))
        .chain(recovery)
        .chain(state_dir::remark(&config.state))
        .chain(tls)
        .chain(agents::remark(config, &checked.tls.door()))
}

/// Which certificates end soon, for who only asks; a server that runs says it by itself.
fn ends(checked: &Checked) -> impl Iterator<Item = String> {
    let now = Moment::now();
    let ends = checked.tls.opened().flat_map(OpenedTls::ends);
    ends.filter_map(move |ends| Some(ends.remark(now)?.1))
}

/// Reads and checks all that the operator wrote.
fn check(options: &ServerOptions) -> Result<Checked, ServerError> {
    let config = read_config(options)?;
    let policies = open_policies(options, &config)?;
    check_usable(&config, &policies)?;
    Ok(Checked {
        tls: Tls::open(&config).map_err(ServerError::Configuration)?,
        config,
        policies,
    })
}

fn bind_all(config: &Config) -> Result<Bound, ServerError> {
    let clients = bind(config.listen.address, "listen")?;
    let admin = bind(config.admin.address, "admin")?;
    let agents = config.agents.as_ref();
    let agents = agents
        .map(|agents| bind(agents.address, "agents.listen"))
        .transpose()?;
    let addresses = report::Addresses {
        clients: clients.local_addr().unwrap_or(config.listen.address),
        clients_tls: config.listen.tls.is_some(),
        admin: admin.local_addr().unwrap_or(config.admin.address),
        admin_tls: config.admin.tls.is_some(),
        agents_tls: config
            .agents
            .as_ref()
            .is_some_and(|agents| agents.tls.is_some()),
        agents: agents
            .as_ref()
            .and_then(|listener| listener.local_addr().ok()),
    };
    Ok(Bound {
        agents,
        clients,
        admin,
        addresses,
    })
}

fn bind(address: SocketAddr, what: &str) -> Result<TcpListener, ServerError> {
    let bound = || -> io::Result<TcpListener> {
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()?
        } else {
            TcpSocket::new_v6()?
        };
        // A restart must not wait for the last connections' TIME_WAIT.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(LISTEN_BACKLOG)
    };
    bound().map_err(|error| {
        ServerError::Start(format!(
            "`{what}` {address} can't be listened on: {error}; is another process there? (`ss -ltnp`)"
        ))
    })
}

fn start_error(what: &'static str) -> impl Fn(io::Error) -> ServerError {
    move |error| ServerError::Start(format!("{what}: {error}"))
}

fn scheme(tls: bool) -> &'static str {
    if tls { "https" } else { "http" }
}
