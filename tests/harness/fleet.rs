//! A fleet as processes: one `llmgw server`, two `llmgw agent`s beside it, and the engines that they start.
//!
//! Every engine writes a line when it starts, so that a test can say how many ever did.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::harness::{Client, End, chat};

/// No test waits for longer; none waits for less than what it waits for.
const PATIENCE: Duration = Duration::from_secs(90);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// An agent that has not stopped by then is killed.
const STOP_MAX: Duration = Duration::from_secs(5);
/// The nodes of each fleet.
pub const NODES: [&str; 2] = ["n1", "n2"];
/// Ports of a node, for its engines.
const NODE_PORTS: u32 = 10;
/// Below those that the system hands out by itself.
const PORTS_FIRST: u32 = 20_000;
const PORTS: u32 = 12_000;

/// Running processes, all ended when dropped; their directory goes with them.
pub struct Fleet {
    dir: PathBuf,
    server: Option<Child>,
    agents: BTreeMap<&'static str, Child>,
    /// Where clients, operators and agents connect. They stay the same when the server is started again.
    addresses: [SocketAddr; 3],
    timing: &'static str,
    /// What is in `llmgw.yaml` beside addresses and timing.
    declared: String,
}

/// One engine that was started at some time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    pub pid: i32,
    pub node: String,
    pub address: String,
}

/// A replica that the server has, as the admin address tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    pub id: String,
    pub node: String,
    pub state: String,
    pub address: String,
}

/// What stands for `llama-server` on both nodes: a program that takes its arguments.
pub enum Program {
    /// The fake engine, through a script that translates the arguments.
    Fake,
    /// Models lie beside it.
    Real(PathBuf),
}

/// Nodes that are lost only after a long time, and nothing to recover.
pub const PATIENT: &str = "heartbeat: 500ms, lost_after: 10m, recovery: 0s";

impl Fleet {
    /// A server that declares nothing yet, and both agents, connected.
    pub fn start(timing: &'static str, program: &Program) -> Fleet {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("llmgw-fleet-{}-{number}", std::process::id()));
        fs::create_dir_all(dir.join("policies")).unwrap();
        fs::write(dir.join("starts"), "").unwrap();
        let mut fleet = Fleet {
            dir,
            server: None,
            agents: BTreeMap::new(),
            addresses: [SocketAddr::from(([127, 0, 0, 1], 0)); 3],
            timing,
            declared: "models: []".to_owned(),
        };
        fleet.declare("models: []");
        fleet.start_server();
        for node in NODES {
            fleet.configure_agent(node, program);
            fleet.start_agent(node);
        }
        fleet.until("both nodes are ready", |fleet| {
            NODES.iter().all(|node| fleet.node_state(node) == "ready")
        });
        fleet
    }

    /// With this many replicas of the model `fake`, ready.
    pub fn with_replicas(timing: &'static str, count: usize) -> Fleet {
        let mut fleet = Fleet::start(timing, &Program::Fake);
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

    fn write_config(&self) {
        let state = self.dir.join("server");
        let text = format!(
            "state: {state:?}\nagents: {{{}}}\n{}\n",
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
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed) + std::process::id().wrapping_mul(31);
        let first = PORTS_FIRST + number % (PORTS / NODE_PORTS) * NODE_PORTS;
        let last = first + NODE_PORTS - 1;
        let executable = self.dir.join(format!("llama-server-{node}"));
        fs::write(&executable, script(program, node, &self.dir)).unwrap();
        fs::set_permissions(&executable, fs::Permissions::from_mode(0o755)).unwrap();
        let mut config = format!(
            "ports: {first}-{last}\nengines: {{llamacpp: {{commands: {{llama-server: {executable:?}}}}}}}\n"
        );
        if let Program::Real(path) = program {
            let _ = writeln!(config, "models_dir: {:?}", path.parent().unwrap());
        }
        fs::write(self.dir.join(format!("{node}.yaml")), config).unwrap();
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
        self.server = Some(command.stderr(self.log("server")).spawn().unwrap());
        let marks = ["clients on ", "admin on ", "for agents on "];
        for (at, mark) in marks.iter().enumerate() {
            self.until(mark, |fleet| fleet.said("server").contains(mark));
            self.addresses[at] = address_after(&self.said("server"), mark);
        }
    }

    pub fn start_agent(&mut self, node: &'static str) {
        let url = format!("http://{}", self.addresses[2]);
        let child = llmgw()
            .args(["agent", "--node", node, "--server", &url])
            .arg("--config")
            .arg(self.dir.join(format!("{node}.yaml")))
            .arg("--state")
            .arg(self.dir.join(node))
            .arg("--stop-engines")
            .stderr(self.log(node))
            .spawn()
            .unwrap();
        self.agents.insert(node, child);
    }

    pub fn kill_server(&mut self) {
        end(&mut self.server.take().unwrap());
    }

    pub fn kill_agent(&mut self, node: &str) {
        end(&mut self.agents.remove(node).unwrap());
    }

    pub fn signal_agent(&self, node: &str, signal: Signal) {
        kill(Pid::from_raw(self.agents[node].id() as i32), signal).unwrap();
    }

    /// A new file each time: what an earlier process said is no word of this one.
    fn log(&self, name: &str) -> File {
        let log = self.dir.join(format!("{name}.log"));
        let _ = fs::rename(&log, self.dir.join(format!("{name}.log.before")));
        File::create(log).unwrap()
    }

    fn said(&self, name: &str) -> String {
        fs::read_to_string(self.dir.join(format!("{name}.log"))).unwrap_or_default()
    }

    /// `llmgw ctl` with these words, running.
    pub fn ctl_begin(&self, words: &[&str]) -> Child {
        llmgw()
            .args(["ctl", "--admin", &format!("http://{}", self.addresses[1])])
            .args(words)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
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

    // What there is.

    pub fn admin_get(&self, path: &str) -> Value {
        let mut client = Client::new(self.addresses[1]);
        client.request("GET", path, &[], b"");
        client.answer().json()
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
        NODES.iter().map(on).collect()
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
        let deadline = Instant::now() + PATIENCE;
        while !holds(self) {
            assert!(
                Instant::now() < deadline,
                "in vain: {what}\n{}",
                self.story()
            );
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// What everybody did, for a test that fails.
    pub fn story(&self) -> String {
        let mut story = format!("engines {:#?}\n", self.starts());
        for name in ["server", "n1", "n2"] {
            let _ = write!(story, "\n{name}:\n{}", self.said(name));
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

    /// Where they connect.
    pub fn clients(&self) -> SocketAddr {
        self.addresses[0]
    }

    /// Sends a chat; the answer is still to be read.
    pub fn ask(&self, body: &str, fake: &str) -> Client {
        let mut client = Client::new(self.addresses[0]);
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
        let fake = format!(r#"{{"tokens":{tokens},"token_ms":50}}"#);
        let mut client = self.ask(&chat(true), &fake);
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

/// The program keeps the script's pid.
fn script(program: &Program, node: &str, dir: &Path) -> String {
    let starts = dir.join("starts");
    let run = match program {
        Program::Fake => {
            let fake = Path::new(env!("CARGO_BIN_EXE_llmgw")).with_file_name("fake-engine");
            format!(
                "exec {fake:?} --kind llamacpp --model \"$name\" --listen \"$host:$port\" --slots \"$slots\" --api-key \"$LLAMA_API_KEY\""
            )
        }
        Program::Real(path) => format!("exec {path:?} \"$@\""),
    };
    format!(
        "#!/bin/sh\nfor argument in \"$@\"; do\n  case \"$before\" in\n    --alias) name=$argument ;;\n    \
         --host) host=$argument ;;\n    --port) port=$argument ;;\n    --parallel) slots=$argument ;;\n  esac\n  \
         before=$argument\ndone\necho \"$$ {node} $host:$port\" >> {starts:?}\n{run}\n"
    )
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

/// The address of the URL that follows `mark`.
fn address_after(text: &str, mark: &str) -> SocketAddr {
    let (_, rest) = text.split_once(mark).unwrap();
    let (_, address) = rest.split_once("://").unwrap();
    let is_part = |c: char| c.is_ascii_digit() || c == '.' || c == ':';
    let end = address.find(|c| !is_part(c)).unwrap_or(address.len());
    address[..end].trim_end_matches(':').parse().unwrap()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
