//! `llmgw agent` as a process: against a server in the test, which commands it by hand, and against `llmgw server`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fake_engine::Patience;
use llmgw_core::control::observed::{Commands, Observed, Timing};
use llmgw_core::control::sessions::{Door, Sessions, SessionsOptions};
use llmgw_core::control::snapshot::NodeState;
use llmgw_proto::session::{ServerMessage, StopHow, StopShard};
use llmgw_proto::shard::{Readiness, ShardCommand, ShardSpec, ShardState, ShardStatus};
use nix::sys::signal::Signal;
use tokio::sync::watch;

#[path = "harness/said.rs"]
mod said;

use said::{PATIENCE, Process};

/// Stopping an agent takes less, although a stream is open: some two seconds, and what a machine that stalls adds to them.
const STOP_MAX: Duration = Duration::from_secs(30);

/// A directory of the test's own, gone afterwards.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Directory {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-agents-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process of llmgw.
struct Llmgw;

impl Llmgw {
    fn start(arguments: &[&str]) -> Process {
        Process::start(Command::new(env!("CARGO_BIN_EXE_llmgw")).args(arguments))
    }

    fn agent(server: &str, directory: &Directory, node: &str) -> Process {
        let state = directory.0.join(node);
        let config = directory.write(
            "agent.yaml",
            &format!(
                "engines: {{fake: {{commands: {{fake-engine: {:?}}}}}}}\n",
                fake_engine()
            ),
        );
        let (state, config) = (state.to_str().unwrap(), config.to_str().unwrap());
        Llmgw::start(&[
            "agent", "--server", server, "--node", node, "--state", state, "--config", config,
        ])
    }
}

fn fake_engine() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_llmgw")).with_file_name("fake-engine")
}

/// A server in this process.
struct Server {
    sessions: Arc<Sessions>,
    observed: watch::Receiver<Arc<Observed>>,
    url: String,
}

impl Server {
    async fn start() -> Server {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let timing = Timing {
            heartbeat: Duration::from_secs(60),
            lost_after: Duration::from_secs(600),
            recovery: Duration::ZERO,
        };
        let options = SessionsOptions::new(timing, false);
        let sessions = Sessions::start(listener, Door::Plain, options);
        Server {
            observed: sessions.observed(),
            sessions,
            url,
        }
    }

    async fn until(&mut self, what: &str, is_so: impl Fn(&Observed) -> bool) -> Arc<Observed> {
        let waiting = self.observed.wait_for(|observed| is_so(observed));
        let waited = tokio::time::timeout(PATIENCE, waiting).await;
        if let Ok(observed) = waited {
            return observed.unwrap().clone();
        }
        drop(waited);
        let observed = self.observed.borrow();
        let shards = observed.nodes.values().map(|node| &node.shards);
        panic!(
            "it never came to this: {what}, but {:#?}",
            shards.collect::<Vec<_>>()
        );
    }

    async fn until_node(&mut self, state: NodeState) -> Arc<Observed> {
        let is_so = |observed: &Observed| {
            let node = observed.nodes.get("n1");
            node.is_some_and(|node| node.state == state)
        };
        self.until(state.as_str(), is_so).await
    }

    async fn until_shard(
        &mut self,
        what: &str,
        is_so: impl Fn(&ShardStatus) -> bool,
    ) -> ShardStatus {
        let shard = |observed: &Observed| {
            let shard = observed.nodes.get("n1")?.shards.get("m/0/0")?;
            Some(shard.status.clone())
        };
        let observed = self
            .until(what, |observed| {
                shard(observed).is_some_and(|status| is_so(&status))
            })
            .await;
        shard(&observed).unwrap()
    }

    /// Waits until a shard has written a line with this in it.
    async fn until_line(&self, shard: &str, wanted: &str) {
        let mut patience = Patience::new(PATIENCE);
        loop {
            let tail = self.sessions.tail("n1", shard, 100).await;
            if let Ok(lines) = &tail
                && lines.iter().any(|line| line.text.contains(wanted))
            {
                return;
            }
            assert!(!patience.is_over(), "no `{wanted}`: {tail:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn send(&self, message: ServerMessage) {
        let session = self.observed.borrow().nodes["n1"].session.unwrap();
        self.sessions.send("n1", session, message).unwrap();
    }
}

/// A port below those that the system hands out by itself and above those that agents have without being told, free a moment ago.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..10_000 {
        let number = NEXT.fetch_add(1, Ordering::Relaxed) + std::process::id().wrapping_mul(61);
        let port = u16::try_from(23_000 + number % 9_000).unwrap();
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port is free");
}

fn engine_spec() -> ShardSpec {
    let port = free_port();
    let args = ["--kind", "llamacpp", "--model", "m", "--listen"];
    let mut args: Vec<String> = args.map(str::to_owned).into();
    args.push(format!("127.0.0.1:{port}"));
    ShardSpec {
        shard: "m/0/0".to_owned(),
        replica: "m/0".to_owned(),
        model: "m".to_owned(),
        profile: "cpu".to_owned(),
        definition: "d1".to_owned(),
        rank: 0,
        engine: "fake".to_owned(),
        commands: vec![ShardCommand {
            executable: "fake-engine".to_owned(),
            args,
            env: BTreeMap::new(),
            wait_for: None,
            sidecar: false,
        }],
        gpus: Vec::new(),
        cpus: None,
        memory_bytes: None,
        ports: vec![port],
        host: "127.0.0.1".to_owned(),
        serves_http: true,
        readiness: Readiness {
            health: "/health".to_owned(),
            models: "/v1/models".to_owned(),
            served_name: "m".to_owned(),
            start_deadline_ms: 60_000,
        },
        slots: None,
        stop_grace_ms: 5_000,
        api_key: None,
    }
}

fn answers(spec: &ShardSpec) -> bool {
    let address: SocketAddr = spec.address().unwrap().parse().unwrap();
    std::net::TcpStream::connect(address).is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_is_started_survives_its_agent_and_is_stopped_by_the_next_one() {
    let directory = Directory::new();
    let mut server = Server::start().await;
    let mut agent = Llmgw::agent(&server.url, &directory, "n1");
    let observed = server.until_node(NodeState::Ready).await;
    let node = &observed.nodes["n1"];
    assert_eq!(node.engines, ["fake"]);
    assert_eq!(node.inventory.as_ref().unwrap().node, "n1");
    let spec = engine_spec();
    server.send(ServerMessage::start(Arc::new(spec.clone())));
    let is_ready = |status: &ShardStatus| status.state == ShardState::Ready;
    server.until_shard("the engine is ready", is_ready).await;
    server.until_line("m/0/0", "listening").await;

    agent.signal(Signal::SIGKILL);
    agent.ends();
    server.until_node(NodeState::Unreachable).await;
    assert!(answers(&spec), "it serves without its agent");
    let mut agent = Llmgw::agent(&server.url, &directory, "n1");
    server.until_node(NodeState::Ready).await;
    let is_adopted = |status: &ShardStatus| status.adopted && status.state == ShardState::Ready;
    let status = server.until_shard("it is adopted", is_adopted).await;
    assert_eq!(status.spec_hash, spec.hash());

    server.send(ServerMessage::StopShard(StopShard {
        shard: "m/0/0".to_owned(),
        how: StopHow::Stop,
    }));
    let is_gone = |observed: &Observed| observed.nodes["n1"].shards.is_empty();
    server.until("it is stopped", is_gone).await;
    assert!(!answers(&spec));
    agent.signal(Signal::SIGTERM);
    assert!(agent.ends().success());
    // Once, and as no warning: nothing was lost.
    agent.says(&[" INFO ", "shard `m/0/0` is adopted with processes ["]);
    assert!(!agent.has_said("adopted"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_is_told_to_stops_its_engines_and_says_so() {
    let directory = Directory::new();
    let mut server = Server::start().await;
    let config = directory.write(
        "agent.yaml",
        &format!(
            "engines: {{fake: {{commands: {{fake-engine: {:?}}}}}}}\n",
            fake_engine()
        ),
    );
    let state = directory.0.join("state");
    let mut agent = Llmgw::start(&[
        "agent",
        "--server",
        &server.url,
        "--node",
        "n1",
        "--config",
        config.to_str().unwrap(),
        "--state",
        state.to_str().unwrap(),
        "--stop-engines",
    ]);
    server.until_node(NodeState::Ready).await;
    let spec = engine_spec();
    server.send(ServerMessage::start(Arc::new(spec.clone())));
    let is_ready = |status: &ShardStatus| status.state == ShardState::Ready;
    server.until_shard("the engine is ready", is_ready).await;
    agent.signal(Signal::SIGTERM);
    assert!(agent.ends().success());
    assert!(!answers(&spec));
    let observed = server.until_node(NodeState::Unreachable).await;
    let absence = observed.nodes["n1"].absence.as_ref().unwrap();
    assert!(
        absence
            .cause
            .to_string()
            .ends_with("its engines were stopped"),
        "{}",
        absence.cause
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_stops_its_engines_drains_meanwhile_and_refuses_new_ones() {
    let directory = Directory::new();
    let mut server = Server::start().await;
    let config = directory.write("agent.yaml", "engines: {fake: {commands: {sh: /bin/sh}}}\n");
    let state = directory.0.join("state");
    let (config, state) = (config.to_str().unwrap(), state.to_str().unwrap());
    let mut agent = Llmgw::start(&[
        "agent",
        "--server",
        &server.url,
        "--node",
        "n1",
        "--config",
        config,
        "--state",
        state,
        "--stop-engines",
    ]);
    server.until_node(NodeState::Ready).await;
    // It ends when it is killed, and not before.
    let script = "trap '' TERM; echo up; sleep 600; sleep 600";
    let slow = ShardSpec {
        commands: vec![ShardCommand {
            executable: "sh".to_owned(),
            args: vec!["-c".to_owned(), script.to_owned()],
            env: BTreeMap::new(),
            wait_for: None,
            sidecar: false,
        }],
        ports: Vec::new(),
        serves_http: false,
        stop_grace_ms: 600_000,
        ..engine_spec()
    };
    let next = ShardSpec {
        shard: "m/1/0".to_owned(),
        replica: "m/1".to_owned(),
        ..slow.clone()
    };
    server.send(ServerMessage::start(Arc::new(slow)));
    let is_ready = |status: &ShardStatus| status.state == ShardState::Ready;
    server.until_shard("the engine runs", is_ready).await;
    // Its shell may not have come to the trap.
    server.until_line("m/0/0", "up").await;
    agent.signal(Signal::SIGTERM);
    server.until_node(NodeState::Draining).await;
    let is_stopping = |status: &ShardStatus| status.state == ShardState::Stopping;
    server.until_shard("it is being stopped", is_stopping).await;
    server.send(ServerMessage::start(Arc::new(next)));
    let is_refused = |observed: &Observed| {
        let next = observed.nodes["n1"].shards.get("m/1/0");
        next.is_some_and(|next| next.status.reason.starts_with("agent_stops: "))
    };
    let observed = server.until("the next one is refused", is_refused).await;
    assert_eq!(observed.nodes["n1"].state, NodeState::Draining);
    server.send(ServerMessage::StopShard(StopShard {
        shard: "m/0/0".to_owned(),
        how: StopHow::Kill,
    }));
    assert!(agent.ends().success());
    server.until_node(NodeState::Unreachable).await;
}

#[test]
fn a_server_that_was_killed_is_found_again_and_an_agent_that_leaves_says_goodbye_in_time() {
    let directory = Directory::new();
    let config = directory.write("llmgw.yaml", "models: []\n");
    let config = config.to_str().unwrap();
    let state = directory.0.join("server");
    directory.write("llmgw.yaml", &format!("models: []\nstate: {state:?}\n"));
    let start = |agents: &str| {
        let any = "127.0.0.1:0";
        Llmgw::start(&[
            "server", "--config", config, "--listen", any, "--admin", any, "--agents", agents,
        ])
    };
    let mut server = start("127.0.0.1:0");
    let line = server.says(&["waiting for agents on "]);
    let url = line
        .split_whitespace()
        .find(|word| word.starts_with("http://"));
    let url = url.unwrap().to_owned();
    let mut agent = Llmgw::agent(&url, &directory, "n1");
    server.says(&["node `n1` is connected"]);
    agent.says(&["as `n1`"]);
    server.signal(Signal::SIGKILL);
    server.ends();
    agent.says(&["next attempt in"]);
    let mut server = start(url.trim_start_matches("http://"));
    server.says(&["node `n1` is connected"]);
    agent.says(&["as `n1`"]);
    let asked = Instant::now();
    agent.signal(Signal::SIGTERM);
    assert!(agent.ends().success());
    // A promise of the command line, and so the one time that is measured.
    assert!(asked.elapsed() < STOP_MAX, "{:?}", asked.elapsed());
    server.says(&["its engines run on"]);
    let mut agent = Llmgw::agent(&url, &directory, "n1");
    server.says(&["node `n1` is connected"]);
    agent.says(&["as `n1`"]);
    server.signal(Signal::SIGTERM);
    assert!(server.ends().success());
    agent.says(&["leaves: the server stops"]);
}

#[test]
fn what_an_agent_cannot_start_with_is_said_with_what_would_be_right() {
    let directory = Directory::new();
    let broken = directory.write("broken.yaml", "ports: many\n");
    let files = "tls: {ca: ca.pem, cert: agent.pem, key: agent-key.pem}";
    let unused = format!("server: http://127.0.0.1:1\nallow_plaintext: true\n{files}\n");
    let unused = directory.write("unused.yaml", &unused);
    for (arguments, said) in [
        (&[][..], "no server is named"),
        (&["--server", "ctl.example:8443"], "is not a server"),
        (
            &["--server", "https://ctl.example"],
            "agent.yaml names none; write",
        ),
        (
            &["--server", "http://127.0.0.1:1", "--node", "a b"],
            "`a b` is not a node id",
        ),
        (
            &["--server", "http://192.0.2.1:8443", "--node", "a"],
            "write `server: https://192.0.2.1:8443` with `tls`, or `allow_plaintext: true` into agent.yaml",
        ),
        (
            &["--config", unused.to_str().unwrap()],
            "write `server: https://127.0.0.1:1`, or take `tls` out",
        ),
        (
            &["--config", broken.to_str().unwrap()],
            "`many` is not a range of ports",
        ),
    ] {
        let arguments: Vec<&str> = ["agent"].iter().chain(arguments).copied().collect();
        let mut agent = Llmgw::start(&arguments);
        agent.says(&[said]);
        assert_eq!(agent.ends().code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn an_agent_without_engines_says_so_and_one_without_a_state_directory_does_not_start() {
    let directory = Directory::new();
    let state = directory.write("state", "in the way");
    let state = state.to_str().unwrap();
    let mut agent = Llmgw::start(&["agent", "--server", "http://127.0.0.1:1", "--state", state]);
    agent.says(&[
        "no engine can be started here: name those that may be, in `engines` of agent.yaml",
    ]);
    agent.says(&[
        &format!("the state directory `{state}` can't be made"),
        "name another one with `--state`",
    ]);
    assert_eq!(agent.ends().code(), Some(1));
}
