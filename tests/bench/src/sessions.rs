//! `llmgw-bench sessions`: thousands of simulated agents' sessions against one server: how long until it knows all of them, what they cost it while
//! they only live, how many replicas it places in a second, and how long after it was killed it knows all of them again.
//!
//! The agents start nothing: what they are told to start is loading for ever, so that what is measured is the control plane and no engine.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use llmgw_proto::convert::Framed;
use llmgw_proto::inventory::{Inventory, Reading};
use llmgw_proto::link::{self, Heard, KeepAlive};
use llmgw_proto::session::{
    AgentMessage, GpuBeat, Heartbeat, PortRange, Register, ServerMessage, SessionId, ShardReport,
    Told,
};
use llmgw_proto::shard::{ShardSpec, ShardState, ShardStatus};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant as Time, interval_at};

use crate::children::{self, Running};

const INVENTORY: &str = include_str!("../../recordings/inventory/two-gpus.json");
/// As an agent waits (`agent/src/session/backoff.rs`).
const WAIT_BASE_MS: u64 = 250;
const WAIT_MAX_MS: u64 = 10_000;
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// For all of them to be known.
const STORM_MAX: Duration = Duration::from_secs(300);
/// The server's default, and a little.
const RECOVERY: Duration = Duration::from_secs(17);

#[derive(Debug, clap::Args)]
pub struct Options {
    /// The server that is measured.
    #[arg(long, default_value = "target/release/llmgw", value_name = "FILE")]
    binary: PathBuf,
    /// Simulated agents.
    #[arg(long, default_value_t = 1_000)]
    agents: usize,
    /// Replicas that it then places, of one GPU each; every node has two.
    #[arg(long, default_value_t = 200)]
    replicas: usize,
    /// How long the server is watched while nothing happens.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

/// What the agents share.
struct Crowd {
    address: SocketAddr,
    inventory: Inventory,
    welcomed: AtomicUsize,
    /// Shards that were ever started.
    started: AtomicUsize,
}

/// One simulated node.
struct Agent {
    crowd: Arc<Crowd>,
    node: String,
    /// With GPUs of its own.
    inventory: Arc<Inventory>,
    shards: Vec<ShardReport>,
}

pub fn run(options: &Options) -> io::Result<()> {
    raise_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let dir = std::env::temp_dir().join(format!("llmgw-sessions-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let measured = runtime.block_on(measure(options, &dir));
    std::fs::remove_dir_all(&dir)?;
    measured
}

async fn measure(options: &Options, dir: &Path) -> io::Result<()> {
    let address = children::free_address()?;
    let crowd = Arc::new(Crowd {
        address,
        inventory: serde_json::from_str(INVENTORY)?,
        welcomed: AtomicUsize::new(0),
        started: AtomicUsize::new(0),
    });
    let config = dir.join("llmgw.yaml");
    declare(&config, dir, 0)?;
    let server = start_server(&options.binary, &config, address)?;
    let empty_bytes = server.measured().anonymous_bytes()?;
    for number in 0..options.agents {
        tokio::spawn(Agent::new(&crowd, number).run());
    }
    let (begun, cpu_ns) = (Instant::now(), server.measured().cpu_ns()?);
    reached("welcomed", &crowd.welcomed, options.agents).await?;
    let storm = begun.elapsed();
    let storm_cpu_ns = server.measured().cpu_ns()? - cpu_ns;
    let (steady, cpu_ns) = (Instant::now(), server.measured().cpu_ns()?);
    tokio::time::sleep(Duration::from_secs(options.seconds)).await;
    let steady_ns = server.measured().cpu_ns()? - cpu_ns;
    let steady_share = steady_ns as f64 / steady.elapsed().as_nanos() as f64;
    let bytes = server.measured().anonymous_bytes()? - empty_bytes;

    declare(&config, dir, options.replicas)?;
    reached("started", &crowd.started, 1).await?;
    let (begun, cpu_ns) = (Instant::now(), server.measured().cpu_ns()?);
    reached("started", &crowd.started, options.replicas).await?;
    let (placing, placing_cpu_ns) = (begun.elapsed(), server.measured().cpu_ns()? - cpu_ns);
    let each = |total: f64| total / (options.replicas.saturating_sub(1).max(1)) as f64;

    server.kill()?;
    let begun = Instant::now();
    let _server = start_server(&options.binary, &config, address)?;
    reached("welcomed", &crowd.welcomed, options.agents).await?;
    let again = begun.elapsed();
    // Nothing is placed before the recovery is over; then nothing is missing.
    tokio::time::sleep(RECOVERY).await;
    let twice = crowd.started.load(Ordering::Relaxed) - options.replicas;
    println!(
        "| agents | all known after | CPU of that | CPU while they live | memory each | placed a second | CPU of a placement | all known again after a kill | started twice |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    println!(
        "| {} | {:.2} s | {:.2} s | {:.1} % | {:.1} KiB | {:.0} | {:.1} ms | {:.1} s | {twice} |",
        options.agents,
        storm.as_secs_f64(),
        storm_cpu_ns as f64 / 1e9,
        steady_share * 100.0,
        bytes as f64 / 1024.0 / options.agents as f64,
        1.0 / each(placing.as_secs_f64()),
        each(placing_cpu_ns as f64 / 1e6),
        again.as_secs_f64()
    );
    Ok(())
}

/// Writes the configuration; a running server notices by itself.
fn declare(config: &Path, dir: &Path, replicas: usize) -> io::Result<()> {
    let models = match replicas {
        0 => "models: []".to_owned(),
        _ => format!(
            "models:\n  - {{name: m, replicas: {replicas}, profiles: [{{name: p, engine: vllm, gpu: h100-sxm-80g, slots: 64}}]}}"
        ),
    };
    let state = dir.join("state");
    let text = format!("state: {state:?}\nlog: {{level: error}}\n{models}\n");
    let fresh = dir.join("fresh.yaml");
    std::fs::write(&fresh, text)?;
    std::fs::rename(fresh, config)
}

fn start_server(binary: &Path, config: &Path, address: SocketAddr) -> io::Result<Running> {
    let mut command = Command::new(binary);
    command
        .args([
            "server",
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
        ])
        .args(["--agents", &address.to_string(), "--config"])
        .arg(config)
        .stdin(Stdio::null());
    let server = Running::start(&mut command)?;
    children::wait_for(address)?;
    Ok(server)
}

async fn reached(what: &str, count: &AtomicUsize, wanted: usize) -> io::Result<()> {
    let begun = Instant::now();
    while count.load(Ordering::Relaxed) < wanted {
        if begun.elapsed() > STORM_MAX {
            let got = count.load(Ordering::Relaxed);
            return Err(io::Error::other(format!(
                "only {got} of {wanted} were {what} within {STORM_MAX:?}"
            )));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}

impl Agent {
    fn new(crowd: &Arc<Crowd>, number: usize) -> Agent {
        let mut inventory = crowd.inventory.clone();
        for gpu in &mut inventory.gpus.devices {
            let shared = gpu.uuid.value().cloned().unwrap_or_default();
            gpu.uuid = Reading::Known(format!("{shared}-{number:05}"));
        }
        Agent {
            crowd: crowd.clone(),
            node: format!("node-{number:05}"),
            inventory: Arc::new(inventory),
            shards: Vec::new(),
        }
    }

    /// For ever: connects, registers, sends heartbeats, comes back with full jitter.
    async fn run(mut self) {
        let mut attempts = 0;
        loop {
            if self.session().await {
                attempts = 0;
            }
            let most_ms = (WAIT_BASE_MS << attempts.min(10)).min(WAIT_MAX_MS);
            attempts += 1;
            tokio::time::sleep(Duration::from_millis(most_ms).mul_f64(unit())).await;
        }
    }

    /// True: it was welcomed.
    async fn session(&mut self) -> bool {
        const KEEP_ALIVE: KeepAlive = KeepAlive {
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(5),
        };
        let Ok(socket) = TcpStream::connect(self.crowd.address).await else {
            return false;
        };
        let (up, outgoing) = mpsc::channel(4);
        let first = Framed {
            session: SessionId(0),
            message: self.register(),
        };
        let _ = up.send(first).await;
        let Ok((mut heard, _dialled)) = link::dial(socket, KEEP_ALIVE, outgoing).await else {
            return false;
        };
        let Heard::Message(Framed {
            session,
            message: ServerMessage::Welcome(welcome),
        }) = heard.next().await
        else {
            return false;
        };
        self.crowd.welcomed.fetch_add(1, Ordering::Relaxed);
        let period = Duration::from_millis(welcome.heartbeat_ms);
        let mut heartbeats = interval_at(Time::now() + period.mul_f64(unit()), period);
        loop {
            let said = tokio::select! {
                heard = heard.next() => match heard {
                    Heard::Message(framed) => self.told(framed.message),
                    Heard::Skipped(_) => None,
                    Heard::Malformed(_) | Heard::End | Heard::Broken(_) => break,
                },
                _ = heartbeats.tick() => Some(self.heartbeat()),
            };
            if let Some(message) = said
                && up.send(Framed { session, message }).await.is_err()
            {
                break;
            }
        }
        self.crowd.welcomed.fetch_sub(1, Ordering::Relaxed);
        true
    }

    /// What it says to a command.
    fn told(&mut self, message: ServerMessage) -> Option<AgentMessage> {
        let ServerMessage::StartShard(start) = message else {
            return None;
        };
        let shard = loading(start.spec);
        self.shards.push(shard.clone());
        self.crowd.started.fetch_add(1, Ordering::Relaxed);
        Some(AgentMessage::ShardStatus(Box::new(shard)))
    }

    fn register(&self) -> AgentMessage {
        AgentMessage::Register(Box::new(Register {
            node: self.node.clone(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            run: self.node.clone(),
            machine: self.node.clone(),
            advertise: "127.0.0.1".to_owned(),
            ports: PortRange {
                first: 21_000,
                last: 31_999,
            },
            engines: vec!["vllm".to_owned()],
            models_dir: None,
            state_dir: String::new(),
            draining: false,
            inventory: Told::Inventory(self.inventory.clone()),
            shards: self.shards.clone(),
        }))
    }

    /// The use of the GPUs is another one each time.
    fn heartbeat(&self) -> AgentMessage {
        let gpus = self.inventory.gpus.devices.iter().filter_map(|gpu| {
            Some(GpuBeat {
                uuid: gpu.uuid.value()?.clone(),
                used_mib: Some((unit() * 500.0) as u64),
                health: Vec::new(),
            })
        });
        AgentMessage::Heartbeat(Box::new(Heartbeat {
            draining: false,
            gpus: gpus.collect(),
            inventory: None,
        }))
    }
}

fn loading(spec: Arc<ShardSpec>) -> ShardReport {
    let status = ShardStatus {
        shard: spec.shard.clone(),
        spec_hash: spec.hash(),
        state: ShardState::Loading,
        reason: String::new(),
        exit: None,
        log_tail: Vec::new(),
        since_ms: 0,
        adopted: false,
    };
    ShardReport {
        spec: Some(spec),
        status,
    }
}

fn unit() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    (RandomState::new().hash_one(0) >> 11) as f64 / (1_u64 << 53) as f64
}

fn raise_file_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}
