//! A fleet under everything at once, by a seed: server, agents and engines are killed, agents frozen, hosts cut off, nodes drained, the catalog
//! edited. No engine ever has what another one has or runs unknown; afterwards what is declared runs, once, and nothing else does.
//!
//! `LLMGW_CHAOS_SECONDS=600` makes it longer, `LLMGW_CHAOS_SEED=1` repeats what was rolled (not how processes met).

#[path = "harness/dice.rs"]
mod dice;
#[path = "harness/fleet.rs"]
mod fleet;
mod harness;
#[path = "harness/watch.rs"]
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use dice::Dice;
use fleet::net::{self, Net};
use fleet::{Fleet, PATIENT, Plan, Program, SERVER};
use harness::{Answer, Client, chat};
use watch::{Watch, running};

const SECONDS: u64 = 15;
const NODES: [&str; 3] = ["n1", "n2", "n3"];
/// A node is lost within the run, and a server that was started again begins to place before all agents are back: both are to happen.
const TIMING: &str = "heartbeat: 300ms, lost_after: 2s, recovery: 1s";
/// Between two disturbances, in milliseconds; one of these by the seed.
const PAUSES_MAX_MS: [u64; 3] = [60, 300, 1_000];
const CLIENTS: u64 = 4;
/// Longer than a request may wait for a replica, for a host that was cut off, and for two more attempts.
const REQUEST_PATIENCE: Duration = Duration::from_secs(120);
/// What is declared in the end: two replicas of `big` fill a node's GPUs.
const DECLARED: [(&str, u64); 3] = [("fake", 3), ("other", 2), ("big", 3)];
const REPLICAS_MAX: u64 = 4;
/// What a replica is made from: engines that behave, take long to load, do not go when they are told to, and leave a process behind.
const KINDS: [&str; 4] = ["", "--load-ms 600", "--ignore-sigterm", "--grandchild"];
/// A model whose engines were killed more often since the server started is not placed again within this test's patience.
const BLOWS_MAX: u32 = 3;

/// How a request of a client that stays may end: status and code.
const ALLOWED: [(u16, &str, &str); 7] = [
    (200, "", "an engine answered"),
    (404, "model_not_found", "the catalog has no such model"),
    (429, "queue_full", "as many waited as its band allows"),
    (
        502,
        "upstream_failed",
        "every engine that was tried was gone",
    ),
    (503, "no_replica", "no engine was there"),
    (
        503,
        "queue_timeout",
        "it waited for as long as its band lets it",
    ),
    (
        504,
        "first_byte_timeout",
        "every engine that was tried was silent",
    ),
];

/// Requests, one after the other in each thread.
struct Clients {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<BTreeMap<&'static str, u64>>>,
}

/// The fleet, and what is done to it.
struct Chaos {
    fleet: Fleet,
    frozen: BTreeSet<&'static str>,
    cut: BTreeSet<usize>,
    /// Engines of each model that were killed since the server started.
    blows: BTreeMap<String, u32>,
    dice: Dice,
}

impl Chaos {
    fn start(seed: u64) -> Chaos {
        let fleet = Fleet::of(Plan {
            nodes: &NODES,
            net: Some(Net::new(SERVER + 1 + NODES.len())),
            has_gpus: true,
            has_tls: true,
            ..Plan::new(TIMING, Program::Fake)
        });
        Chaos {
            fleet,
            frozen: BTreeSet::new(),
            cut: BTreeSet::new(),
            blows: BTreeMap::new(),
            dice: Dice(seed),
        }
    }

    /// One disturbance, or the end of one; what it was.
    fn disturb(&mut self) -> String {
        let node = self.dice.one_of(&NODES);
        match self.dice.below(20) {
            0 => self.kill_server(),
            1 | 2 => self.start_server(),
            3 => self.kill_agent(node),
            4 | 5 => self.start_agent(),
            6 => self.freeze(node),
            7 => self.thaw(),
            8..=10 => self.kill_engine(),
            11 => self.cut(),
            12 => self.heal(),
            13 | 14 => self.edit(),
            15 => self.order("drain", node),
            16 | 17 => self.order("undrain", node),
            _ => self.stop(),
        }
    }

    fn kill_server(&mut self) -> String {
        if !self.fleet.has_server() {
            return "no server to kill".to_owned();
        }
        self.fleet.kill_server();
        "kill the server".to_owned()
    }

    fn start_server(&mut self) -> String {
        if self.fleet.has_server() {
            return "the server runs".to_owned();
        }
        self.fleet.start_server();
        self.blows.clear();
        "start the server".to_owned()
    }

    fn kill_agent(&mut self, node: &'static str) -> String {
        if !self.fleet.has_agent(node) {
            return format!("no agent of {node} to kill");
        }
        self.fleet.kill_agent(node);
        self.frozen.remove(node);
        format!("kill the agent of {node}")
    }

    fn start_agent(&mut self) -> String {
        let Some(node) = NODES.into_iter().find(|node| !self.fleet.has_agent(node)) else {
            return "all agents run".to_owned();
        };
        self.fleet.start_agent(node);
        format!("start the agent of {node}")
    }

    fn freeze(&mut self, node: &'static str) -> String {
        if !self.fleet.has_agent(node) || !self.frozen.insert(node) {
            return format!("no agent of {node} to freeze");
        }
        self.fleet.signal_agent(node, Signal::SIGSTOP);
        format!("freeze the agent of {node}")
    }

    fn thaw(&mut self) -> String {
        let Some(node) = self.frozen.pop_first() else {
            return "no agent is frozen".to_owned();
        };
        self.fleet.signal_agent(node, Signal::SIGCONT);
        format!("thaw the agent of {node}")
    }

    fn kill_engine(&mut self) -> String {
        let engines = running(&self.fleet.path(""));
        if engines.is_empty() {
            return "no engine to kill".to_owned();
        }
        let at = self.dice.below(engines.len() as u64) as usize;
        let (shard, pid) = (&engines[at].shard, engines[at].pid);
        let (model, _) = shard.split_once('/').unwrap();
        let blows = self.blows.entry(model.to_owned()).or_default();
        if *blows == BLOWS_MAX {
            return format!("spare {shard}");
        }
        *blows += 1;
        let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
        format!("kill {shard} on {}", engines[at].node)
    }

    /// Any host may be cut off, the server's too.
    fn cut(&mut self) -> String {
        let host = self.dice.below(NODES.len() as u64 + 1) as usize;
        if self.cut.insert(host) {
            self.net().cut(host);
        }
        format!("host {host} is cut off")
    }

    fn heal(&mut self) -> String {
        let Some(host) = self.cut.pop_first() else {
            return "nothing to heal".to_owned();
        };
        self.net().heal(host);
        format!("host {host} is back")
    }

    fn net(&self) -> &Net {
        self.fleet.net.as_ref().unwrap()
    }

    /// Declares a catalog in which a model may be missing, and what a replica is made from may change. Half of the times it is meant, however
    /// many replicas it stops.
    fn edit(&mut self) -> String {
        let mut models = Vec::new();
        for (name, _) in DECLARED {
            if self.dice.below(6) > 0 {
                let replicas = self.dice.below(REPLICAS_MAX + 1);
                models.push((name, replicas, self.dice.one_of(&KINDS)));
            }
        }
        self.fleet.declare(&catalog(&models));
        let is_meant = self.dice.below(2) == 0 && self.fleet.has_server();
        if is_meant {
            self.confirm();
        }
        format!("declare {models:?}, meant: {is_meant}")
    }

    fn confirm(&self) {
        let answer = self.fleet.admin_post("/v1/reload?confirm");
        assert_eq!(answer.status(), 200, "{}", answer.text());
    }

    fn order(&mut self, what: &str, node: &str) -> String {
        if !self.fleet.has_server() {
            return format!("nobody to {what} {node}");
        }
        let how = self.dice.one_of(&["", "&timeout_ms=1000", "&force"]);
        let path = format!("/v1/nodes/{what}?node={node}{how}");
        let answer = self.fleet.admin_post(&path);
        format!("{path}: {}", answer.status())
    }

    fn stop(&mut self) -> String {
        if !self.fleet.has_server() {
            return "nobody to stop a replica".to_owned();
        }
        let replicas = self.fleet.replicas();
        if replicas.is_empty() {
            return "no replica to stop".to_owned();
        }
        let at = self.dice.below(replicas.len() as u64) as usize;
        let how = self.dice.one_of(&["", "&force"]);
        let path = format!("/v1/replicas/stop?replica={}{how}", replicas[at].id);
        let answer = self.fleet.admin_post(&path);
        format!("{path}: {}", answer.status())
    }

    /// Undoes every disturbance, and declares what is to run in the end.
    fn restore(&mut self) {
        for _ in 0..=NODES.len() {
            self.heal();
            self.thaw();
            self.start_agent();
        }
        self.start_server();
        // What is silent for a moment from here on is no disturbance.
        self.fleet.set_timing(PATIENT);
        self.fleet.until("all nodes are connected", |fleet| {
            let is_there = |node: &&str| matches!(&*fleet.node_state(node), "ready" | "draining");
            NODES.iter().all(is_there)
        });
        for node in NODES {
            let answer = self
                .fleet
                .admin_post(&format!("/v1/nodes/undrain?node={node}"));
            assert_eq!(answer.status(), 200, "{}", answer.text());
        }
        self.declare_all();
        self.confirm();
    }

    fn declare_all(&mut self) {
        let declared = DECLARED.map(|(name, replicas)| (name, replicas, KINDS[0]));
        self.fleet.declare(&catalog(&declared));
    }
}

/// Models with so many replicas of a kind.
fn catalog(models: &[(&str, u64, &str)]) -> String {
    let mut yaml = match models {
        [] => "models: []".to_owned(),
        _ => "models:\n".to_owned(),
    };
    for (name, replicas, kind) in models {
        let engine = match *name {
            "big" => "engine: vllm, gpu: [h100-sxm-80g], gpus_per_node: 4, tensor_parallel: 4",
            _ => "engine: llamacpp",
        };
        let profile = format!("{{name: p, {engine}, slots: 2, env: {{FAKE_ENGINE: \"{kind}\"}}}}");
        let _ = writeln!(
            yaml,
            "  - {{name: {name}, source: /m.gguf, replicas: {replicas}, profiles: [{profile}]}}"
        );
    }
    yaml
}

impl Clients {
    fn start(fleet: &Fleet, seed: u64) -> Clients {
        let over = Arc::<AtomicBool>::default();
        let start = |number: u64| {
            let (over, address) = (over.clone(), fleet.clients());
            let dice = Dice(seed ^ (number + 1) << 32);
            // It stays on the host where it was started.
            fleet.on_server(move || std::thread::spawn(move || client(address, &over, dice)))
        };
        let threads = (0..CLIENTS).map(start).collect();
        Clients { over, threads }
    }

    /// How often requests ended in which way.
    fn stop(mut self) -> BTreeMap<&'static str, u64> {
        self.over.store(true, Ordering::Relaxed);
        let mut counts = BTreeMap::new();
        for (how, count) in self
            .threads
            .drain(..)
            .flat_map(|thread| thread.join().unwrap())
        {
            *counts.entry(how).or_default() += count;
        }
        counts
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

fn client(address: SocketAddr, over: &AtomicBool, mut dice: Dice) -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::new();
    while !over.load(Ordering::Relaxed) {
        let (model, _) = dice.one_of(&DECLARED);
        let how = ask(address, model).map_or("the server was gone", |answer| ended(model, &answer));
        *counts.entry(how).or_default() += 1;
        // Where all are refused at once, a look now and then is enough.
        std::thread::sleep(Duration::from_millis(dice.below(50)));
    }
    counts
}

/// Why a request may end like this.
fn ended(model: &str, answer: &Answer) -> &'static str {
    let code = match answer.status() {
        200 => String::new(),
        _ => answer.code(),
    };
    let mut allowed = ALLOWED.into_iter();
    let found = allowed.find(|(status, known, _)| (*status, *known) == (answer.status(), &*code));
    let (.., why) =
        found.unwrap_or_else(|| panic!("{model} ended in no allowed way: {}", answer.text()));
    why
}

/// One chat. `None`: the server was killed before its answer was whole.
fn ask(address: SocketAddr, model: &str) -> Option<Answer> {
    let stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(REQUEST_PATIENCE)).unwrap();
    let mut client = Client::over(stream);
    let body = chat(false).replace("\"fake\"", &format!("{model:?}"));
    let json = [("content-type", "application/json")];
    client
        .try_request("POST", "/v1/chat/completions", &json, body.as_bytes())
        .ok()?;
    let answer = client.try_answer()?;
    (answer.end == harness::End::Complete).then_some(answer)
}

/// What is declared runs, once, and nothing else does or listens.
fn asserts_restored(fleet: &Fleet) {
    let wanted: u64 = DECLARED.iter().map(|(_, replicas)| replicas).sum();
    fleet.until("no node drains", |fleet| {
        NODES.iter().all(|node| fleet.node_state(node) == "ready")
    });
    fleet.until("what is declared runs", |fleet| {
        let replicas = fleet.replicas();
        let of = |model: &str| {
            let prefix = format!("{model}/");
            let ready = replicas.iter().filter(|row| row.state == "ready");
            ready.filter(|row| row.id.starts_with(&prefix)).count() as u64
        };
        replicas.len() as u64 == wanted
            && DECLARED
                .iter()
                .all(|(model, replicas)| of(model) == *replicas)
    });
    fleet.until("nothing else runs", |fleet| {
        running(&fleet.path("")).len() as u64 == wanted
    });
    fleet.ready(wanted as usize);
    let engines = running(&fleet.path(""));
    assert!(
        engines.iter().all(|engine| engine.port.is_some()),
        "{engines:#?}"
    );
    let shards: BTreeSet<&str> = engines.iter().map(|engine| &*engine.shard).collect();
    assert_eq!(shards.len(), engines.len(), "{engines:#?}");
    for replica in fleet.replicas() {
        let shard = format!("{}/0", replica.id);
        let is_its =
            |engine: &&watch::Running| engine.shard == shard && engine.node == replica.node;
        assert_eq!(
            engines.iter().filter(is_its).count(),
            1,
            "{replica:?}: {engines:#?}"
        );
    }
    let starts = fleet.starts();
    for node in NODES {
        let of_node = starts.iter().filter(|engine| engine.node == node);
        let ever: BTreeSet<u16> = of_node
            .map(|engine| engine.address.parse::<SocketAddr>().unwrap().port())
            .collect();
        let of_node = engines.iter().filter(|engine| engine.node == node);
        let held: BTreeSet<u16> = of_node.filter_map(|engine| engine.port).collect();
        let listening = fleet.on_node(node, net::listening);
        let open: BTreeSet<u16> = listening.intersection(&ever).copied().collect();
        assert_eq!(open, held, "{node} leaks a port: {starts:#?}");
    }
}

/// No process panicked, ever.
fn asserts_no_panic(fleet: &Fleet) {
    for entry in std::fs::read_dir(fleet.path("")).unwrap().flatten() {
        let path = entry.path();
        if path.to_string_lossy().contains(".log") {
            let said = std::fs::read_to_string(&path).unwrap();
            assert!(!said.contains("panicked"), "{}: {said}", path.display());
        }
    }
}

#[test]
fn nothing_runs_twice_or_unknown_and_in_the_end_what_is_declared_whatever_happens_meanwhile() {
    let name =
        "nothing_runs_twice_or_unknown_and_in_the_end_what_is_declared_whatever_happens_meanwhile";
    if !net::is_possible(name) {
        return;
    }
    let (seed, time) = dice::seed_and_time(SECONDS);
    let mut chaos = Chaos::start(seed);
    chaos.declare_all();
    asserts_restored(&chaos.fleet);
    let watch = Watch::start(&chaos.fleet.path(""));
    let clients = Clients::start(&chaos.fleet, seed);
    let began = Instant::now();
    let pause_max_ms = chaos.dice.one_of(&PAUSES_MAX_MS);
    while began.elapsed() < time {
        let what = chaos.disturb();
        println!("{:6} ms {what}", began.elapsed().as_millis());
        let faults = watch.faults();
        assert!(faults.is_empty(), "{faults:#?}\n{}", chaos.fleet.story());
        std::thread::sleep(Duration::from_millis(chaos.dice.below(pause_max_ms)));
    }
    println!("{:6} ms restore", began.elapsed().as_millis());
    chaos.restore();
    asserts_restored(&chaos.fleet);
    println!("{:6} ms restored", began.elapsed().as_millis());
    let counts = clients.stop();
    let starts = chaos.fleet.starts().len();
    println!("{counts:#?}\n{starts} engines were started");
    assert!(counts.contains_key("an engine answered"), "{counts:?}");
    let address = chaos.fleet.clients();
    for (model, _) in DECLARED {
        let answer = chaos.fleet.on_server(|| ask(address, model)).unwrap();
        assert_eq!(answer.status(), 200, "{model}: {}", answer.text());
    }
    assert_eq!(watch.faults(), [""; 0]);
    asserts_no_panic(&chaos.fleet);
}
