//! A fleet as processes: one `llmgw server`, `llmgw agent`s beside it or on hosts of their own, and the engines that they start.
//!
//! Every engine writes a line when it starts, so that a test can say how many ever did.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

#[path = "net.rs"]
pub mod net;
#[path = "stand_in.rs"]
mod stand_in;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fake_engine::Patience;
use fake_engine::authority::{self, Authority};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use self::net::{Net, PORTS_IN_A_ROW_MAX, free_ports};
pub use self::stand_in::Program;
use super::harness::{Answer, Client, End, chat};

/// No test waits for longer; none waits for less than what it waits for.
const PATIENCE: Duration = Duration::from_secs(180);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// An agent that has not stopped by then is killed.
const STOP_MAX: Duration = Duration::from_secs(5);
/// The nodes of a fleet that needs no third one.
pub const NODES: [&str; 2] = ["n1", "n2"];
/// The server's host in a [`Net`]; the nodes' follow.
pub const SERVER: usize = 0;

/// Running processes, all ended when dropped; their directory goes with them.
pub struct Fleet {
    dir: PathBuf,
    server: Option<Child>,
    nodes: &'static [&'static str],
    agents: BTreeMap<&'static str, Child>,
    pub net: Option<Net>,
    /// Where clients, operators and agents connect. They stay the same when the server is started again.
    addresses: [SocketAddr; 3],
    timing: &'static str,
    /// Who issues everybody's certificates. None: they speak without TLS.
    pub authority: Option<Authority>,
    /// Serial numbers that are revoked.
    denied: Vec<String>,
    /// What is in `llmgw.yaml` beside addresses and timing.
    declared: String,
}

/// One engine that was started at some time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    pub pid: i32,
    pub node: String,
    pub address: String,
    pub shard: String,
}

/// A replica that the server has, as the admin address tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    pub id: String,
    pub node: String,
    pub state: String,
    pub address: String,
}

/// What a fleet is made of.
pub struct Plan {
    pub nodes: &'static [&'static str],
    pub timing: &'static str,
    pub program: Program,
    /// Gives the server and each node a host of its own; else they share this machine's loopback.
    pub net: Option<Net>,
    /// Each node has eight GPUs, as `nvidia-smi` says.
    pub has_gpus: bool,
    /// The server and each node have a certificate of their own.
    pub has_tls: bool,
}

impl Plan {
    /// Two nodes on this machine's loopback.
    pub fn new(timing: &'static str, program: Program) -> Plan {
        Plan {
            nodes: &NODES,
            timing,
            program,
            net: None,
            has_gpus: false,
            has_tls: false,
        }
    }
}

/// Nodes that are missed only where their connection ends, and lost only after a long time; and nothing to recover.
pub const PATIENT: &str = "heartbeat: 10s, lost_after: 10m, recovery: 0s";
/// Nodes that are missed where they are silent, yet not where the machine stalls for a moment.
pub const WATCHFUL: &str = "heartbeat: 3s, lost_after: 10m, recovery: 0s";
/// And that are lost soon after.
pub const IMPATIENT: &str = "heartbeat: 3s, lost_after: 12s, recovery: 0s";

impl Fleet {
    /// A server that declares nothing yet, and both agents, connected.
    pub fn start(timing: &'static str, program: Program) -> Fleet {
        Fleet::of(Plan::new(timing, program))
    }

    /// The same over TLS, each with a certificate of its own.
    pub fn over_tls(timing: &'static str, program: Program) -> Fleet {
        Fleet::of(Plan {
            has_tls: true,
            ..Plan::new(timing, program)
        })
    }

    /// A server that declares nothing yet, and all agents, connected.
    pub fn of(plan: Plan) -> Fleet {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("llmgw-fleet-{}-{number}", std::process::id()));
        fs::create_dir_all(dir.join("policies")).unwrap();
        fs::write(dir.join("starts"), "").unwrap();
        let first = free_ports(3);
        let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let agents = match plan.net {
            Some(_) => SocketAddr::from((Net::address(SERVER), first + 2)),
            None => local(first + 2),
        };
        let mut fleet = Fleet {
            dir,
            server: None,
            nodes: plan.nodes,
            agents: BTreeMap::new(),
            net: plan.net,
            addresses: [local(first), local(first + 1), agents],
            timing: plan.timing,
            authority: plan.has_tls.then(|| Authority::new("fleet")),
            denied: Vec::new(),
            declared: "models: []".to_owned(),
        };
        fleet.issue();
        fleet.declare("models: []");
        fleet.start_server();
        for node in plan.nodes {
            fleet.configure_agent(node, &plan.program);
            if plan.has_gpus {
                stand_in::gpus(&fleet.bin(node), fleet.host(node));
            }
            fleet.start_agent(node);
        }
        fleet.until("all nodes are ready", |fleet| {
            let mut nodes = fleet.nodes.iter();
            nodes.all(|node| fleet.node_state(node) == "ready")
        });
        fleet
    }

    /// With this many replicas of the model `fake`, ready.
    pub fn with_replicas(timing: &'static str, count: usize) -> Fleet {
        let mut fleet = Fleet::start(timing, Program::Fake);
        fleet.declare(&models(&[("fake", count)]));
        fleet.ready(count);
        fleet
    }

    /// Writes the configuration; the server notices by itself.
    pub fn declare(&mut self, yaml: &str) {
        self.declared = yaml.to_owned();
        self.write_config();
    }

    /// How long what may take, from the server's next start on.
    pub fn set_timing(&mut self, timing: &'static str) {
        self.timing = timing;
        self.write_config();
    }

    /// From now on these serial numbers are revoked; the server notices by itself.
    pub fn deny(&mut self, serials: &[&str]) {
        self.denied = serials.iter().map(|serial| (*serial).to_owned()).collect();
        self.write_config();
    }

    /// Writes everybody's certificates.
    fn issue(&self) {
        let Some(authority) = &self.authority else {
            return;
        };
        authority::write(&self.dir.join("ca.pem"), &authority.pem);
        let host = self.addresses[2].ip().to_string();
        authority.server(&[&host]).write(&self.dir, "server");
        for node in self.nodes {
            authority.agent(node).write(&self.dir, node);
        }
    }

    fn write_config(&self) {
        let state = self.dir.join("server");
        let tls = match &self.authority {
            Some(_) => format!(
                ", tls: {{cert: server.pem, key: server-key.pem, ca: ca.pem}}, deny_serials: {:?}",
                self.denied
            ),
            None if self.net.is_some() => ", allow_plaintext: true".to_owned(),
            None => String::new(),
        };
        let text = format!(
            "state: {state:?}\nagents: {{{}{tls}}}\n{}\n",
            self.timing, self.declared
        );
        self.write("llmgw.yaml", &text);
    }

    /// Replaces a file of the fleet's directory at once, so that nobody reads half of it.
    pub fn write(&self, name: &str, text: &str) {
        let path = self.dir.join(name);
        let new = self.dir.join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, path).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn configure_agent(&self, node: &str, program: &Program) {
        let first = free_ports(PORTS_IN_A_ROW_MAX);
        let last = first + PORTS_IN_A_ROW_MAX - 1;
        let tls = match &self.authority {
            Some(_) => format!("tls: {{ca: ca.pem, cert: {node}.pem, key: {node}-key.pem}}\n"),
            None if self.net.is_some() => "allow_plaintext: true\n".to_owned(),
            None => String::new(),
        };
        let engines = stand_in::engines(&self.dir, node, program);
        let mut config = format!("{tls}ports: {first}-{last}\nengines:\n{engines}");
        if let Program::Real(path) = program {
            let _ = writeln!(config, "models_dir: {:?}", path.parent().unwrap());
        }
        fs::write(self.dir.join(format!("{node}.yaml")), config).unwrap();
    }

    /// Programs of a node that come before those of this machine.
    fn bin(&self, node: &str) -> PathBuf {
        self.dir.join(format!("bin-{node}"))
    }

    // Processes.

    pub fn start_server(&mut self) {
        let path = self.dir.join("llmgw.yaml");
        let mut command = llmgw();
        command.arg("server").arg("--config").arg(path);
        let flags = ["--listen", "--admin", "--agents"];
        for (flag, address) in flags.iter().zip(self.addresses) {
            command.arg(flag).arg(address.to_string());
        }
        command.arg("--policies").arg(self.dir.join("policies"));
        command.stderr(self.log("server"));
        self.server = Some(self.on_server(|| command.spawn()).unwrap());
        for mark in ["clients on ", "admin on ", "for agents on "] {
            self.until(mark, |fleet| fleet.said("server").contains(mark));
        }
    }

    pub fn start_agent(&mut self, node: &'static str) {
        let url = self.agents_url();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = llmgw();
        command
            .args(["agent", "--node", node, "--server", &url])
            .arg("--config")
            .arg(self.dir.join(format!("{node}.yaml")))
            .arg("--state")
            .arg(self.dir.join(node))
            .arg("--stop-engines")
            .env("PATH", format!("{}:{path}", self.bin(node).display()))
            .stderr(self.log(node));
        let child = self.on_node(node, || command.spawn()).unwrap();
        self.agents.insert(node, child);
    }

    /// Where agents connect.
    pub fn agents_url(&self) -> String {
        let scheme = if self.authority.is_some() {
            "https"
        } else {
            "http"
        };
        format!("{scheme}://{}", self.addresses[2])
    }

    pub fn kill_server(&mut self) {
        end(&mut self.server.take().unwrap());
    }

    pub fn kill_agent(&mut self, node: &str) {
        end(&mut self.agents.remove(node).unwrap());
    }

    pub fn has_server(&self) -> bool {
        self.server.is_some()
    }

    pub fn has_agent(&self, node: &str) -> bool {
        self.agents.contains_key(node)
    }

    pub fn signal_agent(&self, node: &str, signal: Signal) {
        kill(Pid::from_raw(self.agents[node].id() as i32), signal).unwrap();
    }

    /// A new file each time: what an earlier process said is no word of this one.
    fn log(&self, name: &str) -> File {
        let log = self.dir.join(format!("{name}.log"));
        let before = |number: &usize| self.dir.join(format!("{name}.log.{number}"));
        let number = (1..).find(|number| !before(number).exists()).unwrap();
        let _ = fs::rename(&log, before(&number));
        File::create(log).unwrap()
    }

    pub fn said(&self, name: &str) -> String {
        fs::read_to_string(self.dir.join(format!("{name}.log"))).unwrap_or_default()
    }

    /// `llmgw ctl` with these words, running.
    pub fn ctl_begin(&self, words: &[&str]) -> Child {
        let mut command = llmgw();
        command
            .args(["ctl", "--admin", &format!("http://{}", self.addresses[1])])
            .args(words)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        self.on_server(|| command.spawn()).unwrap()
    }

    /// Its output, to the end.
    pub fn ctl(&self, words: &[&str]) -> Output {
        self.ctl_begin(words).wait_with_output().unwrap()
    }

    /// What it prints. It has to succeed.
    pub fn shown(&self, words: &[&str]) -> String {
        let output = self.ctl(words);
        assert!(output.status.success(), "ctl {words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    // Hosts.

    /// Does something on the host of the server, and of its clients.
    pub fn on_server<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        self.on(SERVER, what)
    }

    /// Does something on the host of a node.
    pub fn on_node<T: Send>(&self, node: &str, what: impl FnOnce() -> T + Send) -> T {
        self.on(self.host(node), what)
    }

    fn on<T: Send>(&self, host: usize, what: impl FnOnce() -> T + Send) -> T {
        match &self.net {
            Some(net) => net.on(host, what),
            None => what(),
        }
    }

    /// The number of a node's host.
    pub fn host(&self, node: &str) -> usize {
        let position = self.nodes.iter().position(|name| *name == node);
        SERVER + 1 + position.unwrap()
    }

    // What there is.

    pub fn admin_get(&self, path: &str) -> Value {
        self.admin("GET", path).json()
    }

    pub fn admin_post(&self, path: &str) -> Answer {
        self.admin("POST", path)
    }

    fn admin(&self, method: &str, path: &str) -> Answer {
        let mut client = self.on_server(|| Client::new(self.addresses[1]));
        client.request(method, path, &[], b"");
        client.answer()
    }

    /// The page of metrics.
    pub fn metrics(&self) -> String {
        self.admin("GET", "/metrics").text()
    }

    /// Empty: the server does not know it.
    pub fn node_state(&self, node: &str) -> String {
        let page = self.admin_get("/v1/nodes");
        let mut rows = page["nodes"].as_array().unwrap().iter();
        let row = rows.find(|row| row["id"] == node);
        row.map_or(String::new(), |row| text(&row["state"]))
    }

    pub fn replicas(&self) -> Vec<Replica> {
        let page = self.admin_get("/v1/started");
        let rows = page["replicas"].as_array().unwrap().iter();
        rows.map(|row| Replica {
            id: text(&row["id"]),
            node: text(&row["node"]),
            state: text(&row["state"]),
            address: text(&row["address"]),
        })
        .collect()
    }

    /// How many replicas each node has.
    pub fn spread(&self) -> Vec<usize> {
        let replicas = self.replicas();
        let on = |node: &&str| replicas.iter().filter(|row| row.node == **node).count();
        self.nodes.iter().map(on).collect()
    }

    /// Every engine that was ever started, in that order.
    pub fn starts(&self) -> Vec<Engine> {
        let starts = fs::read_to_string(self.dir.join("starts")).unwrap();
        let engine = |line: &str| {
            let mut words = line.split(' ').map(str::to_owned);
            Some(Engine {
                pid: words.next()?.parse().ok()?,
                node: words.next()?,
                address: words.next()?,
                shard: words.next()?,
            })
        };
        starts.lines().filter_map(engine).collect()
    }

    /// Those of them that run.
    pub fn engines(&self) -> Vec<Engine> {
        let mut engines = self.starts();
        engines.retain(|engine| is_alive(engine.pid));
        engines
    }

    pub fn engine(&self, replica: &Replica) -> Engine {
        let mut engines = self.engines().into_iter();
        let engine = engines.find(|engine| engine.address == replica.address);
        engine.unwrap_or_else(|| panic!("{replica:?} has no engine: {}", self.story()))
    }

    /// Waits until there are exactly so many replicas, all of them ready and in the pool.
    pub fn ready(&self, count: usize) {
        self.until(&format!("{count} replicas are ready"), |fleet| {
            let replicas = fleet.replicas();
            let pool = fleet.admin_get("/v1/replicas");
            let pool = pool["replicas"].as_array().unwrap().iter();
            replicas.len() == count
                && replicas.iter().all(|replica| replica.state == "ready")
                && pool.filter(|row| row["state"] == "ready").count() == count
        });
    }

    pub fn until(&self, what: &str, mut holds: impl FnMut(&Fleet) -> bool) {
        let mut patience = Patience::new(PATIENCE);
        while !holds(self) {
            assert!(!patience.is_over(), "in vain: {what}\n{}", self.story());
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// What everybody did, for a test that fails.
    pub fn story(&self) -> String {
        let mut story = format!("engines {:#?}\n", self.starts());
        for name in ["server"].iter().chain(self.nodes) {
            let earlier = (1..).map(|number| self.dir.join(format!("{name}.log.{number}")));
            let earlier = earlier.map_while(|log| fs::read_to_string(log).ok());
            for said in earlier.chain([self.said(name)]) {
                let _ = write!(story, "\n{name}:\n{said}");
            }
        }
        story
    }

    /// It waits for what agents have still to tell.
    pub fn is_recovering(&self) -> bool {
        self.admin_get("/v1/explain?model=fake")["explanation"]["recovering"] == true
    }

    /// What the server says of one more replica is what `policy explain` says over its snapshot.
    pub fn asserts_replay(&self, model: &str) {
        let file = self.path("snapshot.json");
        self.shown(&["snapshot", "-o", file.to_str().unwrap()]);
        let replayed = Command::new(env!("CARGO_BIN_EXE_llmgw"))
            .args(["policy", "explain", "--model", model, "--format", "json"])
            .arg("--snapshot")
            .arg(&file)
            .output()
            .unwrap();
        assert!(replayed.status.success(), "{replayed:?}");
        let replayed: Value = serde_json::from_slice(&replayed.stdout).unwrap();
        let live = self.shown(&["explain", model, "--format", "json"]);
        let live: Value = serde_json::from_str(&live).unwrap();
        let decision = &live["decision"]["decision"];
        assert!(decision.is_object(), "{live}");
        assert_eq!(decision, &replayed["decision"]);
    }

    // Clients.

    /// Where clients connect, on the server's host.
    pub fn clients(&self) -> SocketAddr {
        self.addresses[0]
    }

    /// Sends a chat; the answer is still to be read.
    pub fn ask(&self, body: &str, fake: &str) -> Client {
        let mut client = self.on_server(|| Client::new(self.addresses[0]));
        client.post("/v1/chat/completions", body, fake);
        client
    }

    /// One plain chat.
    pub fn asserts_chat(&self) {
        let answer = self.ask(&chat(false), "").answer();
        assert_eq!(answer.status(), 200, "{}\n{}", answer.text(), self.story());
    }

    /// Begins a stream of so many tokens, 50 ms apart, and reads its first event.
    pub fn stream(&self, tokens: u32) -> Client {
        self.stream_of(&format!(r#"{{"tokens":{tokens},"token_ms":50}}"#))
    }

    /// One that lasts until its client leaves.
    pub fn endless_stream(&self) -> Client {
        self.stream_of(r#"{"die_after":1,"how":"stall"}"#)
    }

    fn stream_of(&self, fake: &str) -> Client {
        let mut client = self.ask(&chat(true), fake);
        assert_eq!(client.head().status, 200);
        client.body_until("data:");
        client
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.server.iter_mut().for_each(end);
        for engine in self.engines() {
            let _ = kill(Pid::from_raw(engine.pid), Signal::SIGKILL);
        }
        // Agents that stop in order take their engines' control groups with them.
        for node in self.agents.keys() {
            self.signal_agent(node, Signal::SIGCONT);
            self.signal_agent(node, Signal::SIGTERM);
        }
        let deadline = Instant::now() + STOP_MAX;
        for agent in self.agents.values_mut() {
            while matches!(agent.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(LOOK_EVERY);
            }
            end(agent);
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Reads a stream to its end, which has to be the proper one.
pub fn asserts_whole(mut client: Client) {
    let (body, end) = client.rest();
    assert_eq!(end, End::Complete, "{body}");
    assert!(body.trim_end().ends_with("data: [DONE]"), "{body}");
}

/// A catalog of models with so many CPU replicas each.
pub fn models(models: &[(&str, usize)]) -> String {
    let mut yaml = "models:\n".to_owned();
    for (name, replicas) in models {
        let profile = "{name: cpu, engine: llamacpp, slots: 1}";
        let _ = writeln!(
            yaml,
            "  - {{name: {name}, source: /m.gguf, replicas: {replicas}, profiles: [{profile}]}}"
        );
    }
    yaml
}

fn llmgw() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llmgw"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Ends a process as a crash would.
fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// A node by its id.
pub fn name_of(node: &str) -> &'static str {
    NODES.into_iter().find(|name| *name == node).unwrap()
}

/// The other one of the two.
pub fn other(node: &str) -> &'static str {
    NODES.into_iter().find(|name| *name != node).unwrap()
}

/// A zombie is dead.
pub fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    !after_name.is_empty() && !after_name.starts_with(['Z', 'X'])
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
