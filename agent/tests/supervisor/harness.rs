//! One node for a test: a supervisor, its state directory, and every process of it gone afterwards.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use llmgw_agent::process_id::ProcessId;
use llmgw_agent::supervisor::tree::{Environ, ProcessTable, Traces, look_until_all_came};
use llmgw_agent::supervisor::{
    Adopted, EngineAllowance, Pace, StatusChanges, Supervisor, SupervisorOptions,
};
use llmgw_proto::shard::{Readiness, ShardCommand, ShardSpec, ShardState, ShardStatus};
use tokio::net::TcpSocket;

/// How long anything that must happen may take.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at what tells nobody when it changes.
const LOOK_EVERY: Duration = Duration::from_millis(5);
pub const PROC: &str = "/proc";

/// A node whose agent can be ended and started again.
pub struct Node {
    pub options: SupervisorOptions,
    pub supervisor: Arc<Supervisor>,
    /// What the last start found.
    pub adopted: Vec<Adopted>,
    changes: StatusChanges,
    seen: BTreeMap<String, ShardStatus>,
    _directory: Directory,
}

/// A state directory, and with it all processes that belong to it.
pub struct Directory(pub PathBuf);

/// A process of the test's own that is nobody's engine.
pub struct Bystander(pub Child);

impl Node {
    pub async fn start() -> Node {
        Node::with(|_| {}).await
    }

    pub async fn with(change: impl FnOnce(&mut SupervisorOptions)) -> Node {
        let directory = Directory::new();
        let mut options = options(&directory.0);
        change(&mut options);
        Node::on(directory, options).await
    }

    /// A node over a state directory that something may be in already.
    pub async fn on(directory: Directory, options: SupervisorOptions) -> Node {
        let (supervisor, adopted) = Supervisor::start(options.clone()).await.unwrap();
        let changes = supervisor.status();
        let seen = latest(&supervisor);
        Node {
            options,
            supervisor,
            adopted,
            changes,
            seen,
            _directory: directory,
        }
    }

    /// Ends the agent, engines left running, and starts another one.
    pub async fn restart(&mut self) {
        self.supervisor.shutdown(false).await;
        self.start_again().await;
    }

    pub async fn start_again(&mut self) {
        let (supervisor, adopted) = Supervisor::start(self.options.clone()).await.unwrap();
        self.changes = supervisor.status();
        self.seen = latest(&supervisor);
        (self.supervisor, self.adopted) = (supervisor, adopted);
    }

    /// Waits until a shard's status is as wanted.
    pub async fn until(
        &mut self,
        shard: &str,
        wanted: impl Fn(&ShardStatus) -> bool,
    ) -> ShardStatus {
        let waits = async {
            loop {
                if let Some(status) = self.seen.get(shard).filter(|status| wanted(status)) {
                    return status.clone();
                }
                for status in self.changes.next().await {
                    self.seen.insert(status.shard.clone(), status);
                }
            }
        };
        match tokio::time::timeout(PATIENCE, waits).await {
            Ok(status) => status,
            Err(_) => panic!("shard {shard} stays {:?}", self.seen.get(shard)),
        }
    }

    pub async fn until_state(&mut self, shard: &str, state: ShardState) -> ShardStatus {
        self.until(shard, |status| {
            assert!(
                !status.state.is_over() || state.is_over(),
                "it ended: {status:?}"
            );
            status.state == state
        })
        .await
    }

    /// Every living process of a shard, by its environment and what descends from it.
    pub fn processes(&self, shard: &str) -> Vec<u32> {
        processes(&self.options.state_dir, shard)
    }

    /// The process of its only command.
    pub fn pid(&self, shard: &str) -> u32 {
        recorded_pids(&self.options.state_dir, shard)[0]
    }
}

impl Directory {
    pub fn new() -> Directory {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("llmgw-supervisor-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let state_dir = state_dir(&self.0);
        // No panic here: where a test has failed already, it would end all the others.
        if let Ok(table) = ProcessTable::read(Path::new(PROC)) {
            let engines = |environ: &dyn Fn(u32) -> Environ| table.engines(&state_dir, environ);
            for (_, id) in look_until_all_came(Path::new(PROC), engines) {
                let _ = llmgw_agent::supervisor::process::signal(&id, Path::new(PROC), 9);
            }
        }
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Bystander {
    pub fn start(env: &[(&str, &str)]) -> Bystander {
        let mut command = Command::new("/bin/sleep");
        command.arg("600").envs(env.iter().copied());
        Bystander(command.stdin(Stdio::null()).spawn().unwrap())
    }

    pub fn id(&self) -> ProcessId {
        ProcessId::read(Path::new(PROC), self.0.id())
            .unwrap()
            .unwrap()
    }

    pub fn is_alive(&self) -> bool {
        ProcessId::read(Path::new(PROC), self.0.id())
            .unwrap()
            .is_some()
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A supervisor that may start the fake engine and shell scripts, and looks often.
pub fn options(state_dir: &Path) -> SupervisorOptions {
    let fake = fake_engine::process::beside_this_test().unwrap();
    let what = "run `cargo build -p fake-engine` first, or all tests";
    assert!(fake.exists(), "{} is missing: {what}", fake.display());
    let allowance = EngineAllowance {
        executables: [
            ("fake-engine".to_owned(), fake),
            ("sh".to_owned(), PathBuf::from("/bin/sh")),
        ]
        .into(),
        env: BTreeMap::new(),
    };
    let mut options = SupervisorOptions::new(
        state_dir.to_owned(),
        [("fake".to_owned(), allowance)].into(),
    );
    options.pace = Pace {
        probe_loading: Duration::from_millis(20),
        probe_ready: Duration::from_millis(50),
        probe_timeout: Duration::from_secs(5),
        read_output: Duration::from_millis(20),
        remember: Duration::from_millis(50),
    };
    options
}

pub fn command(executable: &str, args: &[&str]) -> ShardCommand {
    ShardCommand {
        executable: executable.to_owned(),
        args: args.iter().map(|arg| (*arg).to_owned()).collect(),
        env: BTreeMap::new(),
        wait_for: None,
        sidecar: false,
    }
}

/// A shell script; its exit is the command's.
pub fn script(text: &str) -> ShardCommand {
    command("sh", &["-c", text])
}

/// A fake engine with these arguments on a port of its own.
pub fn engine(shard: &str, args: &[&str]) -> ShardSpec {
    let port = free_port();
    let listen = format!("127.0.0.1:{port}");
    let all = ["--kind", "llamacpp", "--model", "m", "--listen", &listen];
    let all: Vec<&str> = all.iter().chain(args).copied().collect();
    ShardSpec {
        ports: vec![port],
        ..spec(shard, vec![command("fake-engine", &all)])
    }
}

/// Commands that serve no HTTP.
pub fn silent(shard: &str, commands: Vec<ShardCommand>) -> ShardSpec {
    ShardSpec {
        serves_http: false,
        ..spec(shard, commands)
    }
}

pub fn spec(shard: &str, commands: Vec<ShardCommand>) -> ShardSpec {
    ShardSpec {
        shard: shard.to_owned(),
        replica: "m/0".to_owned(),
        model: "m".to_owned(),
        profile: "cpu".to_owned(),
        definition: "d1".into(),
        rank: 0,
        engine: "fake".to_owned(),
        commands,
        gpus: Vec::new(),
        cpus: None,
        memory_bytes: None,
        ports: Vec::new(),
        host: "127.0.0.1".to_owned(),
        serves_http: true,
        readiness: Readiness {
            health: "/health".to_owned(),
            models: "/v1/models".to_owned(),
            served_name: "m".to_owned(),
            start_deadline_ms: 60_000,
        },
        slots: None,
        stop_grace_ms: 60_000,
        api_key: None,
    }
}

/// A port below those that the system hands out by itself and above those that agents have without being told, free a moment ago.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..10_000 {
        let number = NEXT.fetch_add(1, Ordering::Relaxed) + std::process::id().wrapping_mul(61);
        let port = u16::try_from(23_000 + number % 9_000).unwrap();
        // Not to listen: a child that another test's supervisor forks meanwhile has a copy, and would keep the port for a while.
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        if socket.bind((Ipv4Addr::LOCALHOST, port).into()).is_ok() {
            return port;
        }
    }
    panic!("no port is free");
}

/// As engines have it in their environment.
pub fn state_dir(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.to_string_lossy().into_owned()
}

pub fn processes(directory: &Path, shard: &str) -> Vec<u32> {
    let table = ProcessTable::read(Path::new(PROC)).unwrap();
    let traces = Traces {
        shard: shard.to_owned(),
        state_dir: state_dir(directory),
        ..Traces::default()
    };
    let members = look_until_all_came(Path::new(PROC), |environ| table.members(&traces, environ));
    members.iter().map(|member| member.id.pid).collect()
}

/// The pids on record of a shard.
pub fn recorded_pids(directory: &Path, shard: &str) -> Vec<u32> {
    let Some(record) = record(directory, shard) else {
        return Vec::new();
    };
    let processes = record["processes"].as_array().unwrap().iter();
    let pids = processes.map(|process| process["pid"].as_u64().unwrap());
    pids.map(|pid| u32::try_from(pid).unwrap()).collect()
}

pub fn record_path(directory: &Path, shard: &str) -> PathBuf {
    let name = shard.replace('/', "%2f");
    directory.join("shards").join(name).join("shard.json")
}

pub fn record(directory: &Path, shard: &str) -> Option<serde_json::Value> {
    let text = std::fs::read(record_path(directory, shard)).ok()?;
    Some(serde_json::from_slice(&text).unwrap())
}

/// Looks until something is so.
pub async fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn latest(supervisor: &Supervisor) -> BTreeMap<String, ShardStatus> {
    let shards = supervisor.shards().into_iter();
    shards.map(|(spec, status)| (spec.shard, status)).collect()
}
