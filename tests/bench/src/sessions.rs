//! `llmgw-bench sessions`: thousands of simulated agents' sessions against one server: how long until it knows all of them, what they cost it while
//! they only live, and how long after it was killed it knows all of them again.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use llmgw_proto::convert::Framed;
use llmgw_proto::inventory::Inventory;
use llmgw_proto::link::{self, Heard, KeepAlive};
use llmgw_proto::session::{
    AgentMessage, GpuBeat, Heartbeat, PortRange, Register, ServerMessage, SessionId, Told,
};
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

#[derive(Debug, clap::Args)]
pub struct Options {
    /// The server that is measured.
    #[arg(long, default_value = "target/release/llmgw", value_name = "FILE")]
    binary: PathBuf,
    /// Simulated agents.
    #[arg(long, default_value_t = 1_000)]
    agents: usize,
    /// How long the server is watched while nothing happens.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

/// What the agents share.
struct Crowd {
    address: SocketAddr,
    inventory: Arc<Inventory>,
    welcomed: AtomicUsize,
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
        inventory: Arc::new(serde_json::from_str(INVENTORY)?),
        welcomed: AtomicUsize::new(0),
    });
    let server = start_server(&options.binary, dir, address)?;
    let empty_bytes = server.measured().anonymous_bytes()?;
    for number in 0..options.agents {
        tokio::spawn(agent(crowd.clone(), format!("node-{number:05}")));
    }
    let begun = Instant::now();
    let cpu_ns = server.measured().cpu_ns()?;
    all_welcomed(&crowd, options.agents).await?;
    let storm = begun.elapsed();
    let storm_cpu_ns = server.measured().cpu_ns()? - cpu_ns;
    let (steady, cpu_ns) = (Instant::now(), server.measured().cpu_ns()?);
    tokio::time::sleep(Duration::from_secs(options.seconds)).await;
    let steady_ns = server.measured().cpu_ns()? - cpu_ns;
    let steady_share = steady_ns as f64 / steady.elapsed().as_nanos() as f64;
    let bytes = server.measured().anonymous_bytes()? - empty_bytes;
    server.kill()?;
    let begun = Instant::now();
    let _server = start_server(&options.binary, dir, address)?;
    all_welcomed(&crowd, options.agents).await?;
    let again = begun.elapsed();
    println!(
        "| agents | all known after | CPU of that | CPU while they live | memory each | all known again after a kill |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    println!(
        "| {} | {:.2} s | {:.2} s | {:.1} % | {:.1} KiB | {:.1} s |",
        options.agents,
        storm.as_secs_f64(),
        storm_cpu_ns as f64 / 1e9,
        steady_share * 100.0,
        bytes as f64 / 1024.0 / options.agents as f64,
        again.as_secs_f64()
    );
    Ok(())
}

fn start_server(binary: &Path, dir: &Path, address: SocketAddr) -> io::Result<Running> {
    let config = dir.join("llmgw.yaml");
    let state = dir.join("state");
    std::fs::write(
        &config,
        format!("models: []\nstate: {state:?}\nlog: {{level: error}}\n"),
    )?;
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
        .arg(&config)
        .stdin(Stdio::null());
    let server = Running::start(&mut command)?;
    children::wait_for(address)?;
    Ok(server)
}

async fn all_welcomed(crowd: &Crowd, agents: usize) -> io::Result<()> {
    let begun = Instant::now();
    while crowd.welcomed.load(Ordering::Relaxed) < agents {
        if begun.elapsed() > STORM_MAX {
            let welcomed = crowd.welcomed.load(Ordering::Relaxed);
            return Err(io::Error::other(format!(
                "only {welcomed} of {agents} agents were welcomed within {STORM_MAX:?}"
            )));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}

/// One agent, for ever: connects, registers, sends heartbeats, comes back with full jitter.
async fn agent(crowd: Arc<Crowd>, node: String) {
    let mut attempts = 0;
    loop {
        if session(&crowd, &node).await {
            attempts = 0;
        }
        let most_ms = (WAIT_BASE_MS << attempts.min(10)).min(WAIT_MAX_MS);
        attempts += 1;
        tokio::time::sleep(Duration::from_millis(most_ms).mul_f64(unit())).await;
    }
}

/// True: it was welcomed.
async fn session(crowd: &Crowd, node: &str) -> bool {
    const KEEP_ALIVE: KeepAlive = KeepAlive {
        interval: Duration::from_secs(5),
        timeout: Duration::from_secs(5),
    };
    let Ok(socket) = TcpStream::connect(crowd.address).await else {
        return false;
    };
    let (up, outgoing) = mpsc::channel(4);
    let first = Framed {
        session: SessionId(0),
        message: register(crowd, node),
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
    crowd.welcomed.fetch_add(1, Ordering::Relaxed);
    let period = Duration::from_millis(welcome.heartbeat_ms);
    let mut heartbeats = interval_at(Time::now() + period.mul_f64(unit()), period);
    loop {
        let is_over = tokio::select! {
            heard = heard.next() => !matches!(heard, Heard::Message(_) | Heard::Skipped(_)),
            _ = heartbeats.tick() => {
                let message = heartbeat(crowd);
                up.send(Framed { session, message }).await.is_err()
            }
        };
        if is_over {
            crowd.welcomed.fetch_sub(1, Ordering::Relaxed);
            return true;
        }
    }
}

fn register(crowd: &Crowd, node: &str) -> AgentMessage {
    AgentMessage::Register(Box::new(Register {
        node: node.to_owned(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        run: node.to_owned(),
        machine: node.to_owned(),
        advertise: "127.0.0.1".to_owned(),
        ports: PortRange {
            first: 21_000,
            last: 21_999,
        },
        engines: vec!["vllm".to_owned()],
        draining: false,
        inventory: Told::Inventory(crowd.inventory.clone()),
        shards: Vec::new(),
    }))
}

/// The use of the GPUs is another one each time.
fn heartbeat(crowd: &Crowd) -> AgentMessage {
    let gpus = crowd.inventory.gpus.devices.iter().filter_map(|gpu| {
        Some(GpuBeat {
            uuid: gpu.uuid.value()?.clone(),
            used_mib: Some((unit() * 80_000.0) as u64),
            health: Vec::new(),
        })
    });
    AgentMessage::Heartbeat(Box::new(Heartbeat {
        draining: false,
        gpus: gpus.collect(),
        inventory: None,
    }))
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
