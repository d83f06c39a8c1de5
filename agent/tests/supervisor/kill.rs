//! `kill -9` of the agent: at every named instant of a start, and at random ones. Whenever it happens, the next agent has
//! the engine, once, and can stop it.
//!
//! The agent to be killed is this test executable itself, as a process of its own: see [`agent_process`].

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use llmgw_agent::process_id::ProcessId;
use llmgw_agent::supervisor::tree::{Environ, look_until_all_came};
use llmgw_agent::supervisor::{Outcome, StartInstant, Supervisor};
use llmgw_proto::shard::{ShardSpec, ShardState, WaitFor};
use nix::sys::signal::{Signal, raise};

use crate::harness::{
    Directory, Node, PATIENCE, command, engine, eventually, options, processes, record,
    recorded_pids, script, silent,
};

const SHARD: &str = "m/0/0";
/// What makes [`agent_process`] an agent: the state directory, the specs, and the instant at which it kills itself.
const DIRECTORY: &str = "LLMGW_TEST_AGENT";
const SPECS: &str = "LLMGW_TEST_SPECS";
const INSTANT: &str = "LLMGW_TEST_INSTANT";
/// Seeds of the random kills, `LLMGW_KILL_SEEDS=500` for more.
const SEEDS: u64 = 20;
const SEEDS_VARIABLE: &str = "LLMGW_KILL_SEEDS";
/// Three starts with their six processes take some 30 ms, a loaded machine takes more.
const KILL_WITHIN_US: u64 = 60_000;

/// An agent that starts its shards at once and then waits to be killed; in an ordinary test run it does nothing.
#[test]
fn agent_process() {
    let Some(directory) = std::env::var_os(DIRECTORY) else {
        return;
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let mut options = options(Path::new(&directory));
        options.at = Some(die_at);
        let (supervisor, _) = Supervisor::start(options).await.unwrap();
        let specs = std::env::var(SPECS).unwrap();
        let specs: Vec<ShardSpec> = serde_json::from_str(&specs).unwrap();
        // Whoever kills at random begins to count here.
        println!("\nstarting");
        for spec in specs {
            supervisor.start_shard(spec);
        }
        tokio::time::sleep(2 * PATIENCE).await;
    });
}

/// Dies as with `kill -9` when the instant is reached for the last of the shard's commands that reach it: `executed:2` is the
/// second time.
fn die_at(instant: StartInstant) {
    static TIMES: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let wanted = std::env::var(INSTANT).unwrap_or_default();
    let Some((name, time)) = wanted.split_once(':') else {
        return;
    };
    if format!("{instant:?}") != name {
        return;
    }
    let times = TIMES.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
    if times.to_string() == time {
        if instant == StartInstant::PidWritten {
            assert_gated();
        }
        raise(Signal::SIGKILL).unwrap();
    }
}

/// What is on record last must still stand at its gate: with the agent's environment, not with an engine's.
fn assert_gated() {
    let directory = std::env::var_os(DIRECTORY).unwrap();
    let pids = recorded_pids(Path::new(&directory), SHARD);
    let environ = look_until_all_came(Path::new("/proc"), |environ| environ(*pids.last().unwrap()));
    if environ != Environ::Other {
        eprintln!("it executes already");
        std::process::exit(1);
    }
}

/// The agent as a process; killed and reaped when dropped.
struct Agent(Child);

impl Agent {
    fn start(directory: &Directory, specs: &[ShardSpec], instant: &str) -> Agent {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["kill::agent_process", "--exact", "--nocapture"])
            .env(DIRECTORY, &directory.0)
            .env(SPECS, serde_json::to_string(specs).unwrap())
            .env(INSTANT, instant)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        Agent(command.spawn().unwrap())
    }

    /// Waits until it is about to start the shard.
    fn starting(&mut self) {
        let stdout = self.0.stdout.take().unwrap();
        let mut lines = BufReader::new(stdout).lines();
        assert!(lines.any(|line| line.unwrap() == "starting"));
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A sidecar with a child in another session, and an engine that waits for it.
fn pair(shard: &str) -> ShardSpec {
    let port = crate::harness::free_port();
    let listen = format!("127.0.0.1:{port}");
    let mut sidecar = command("fake-engine", &["--grandchild", "--listen", &listen]);
    sidecar.sidecar = true;
    let mut spec = engine(shard, &["--load-ms", "10"]);
    spec.commands[0].wait_for = Some(WaitFor {
        address: listen,
        timeout_ms: 60_000,
    });
    spec.commands.insert(0, sidecar);
    spec
}

/// The processes on record that are confirmed and alive: an agent must not lose or replace them.
fn confirmed(directory: &Directory, shard: &str) -> Vec<ProcessId> {
    let Some(record) = record(&directory.0, shard) else {
        return Vec::new();
    };
    let processes = record["processes"].as_array().unwrap().iter();
    processes
        .filter(|process| process["confirmed"] == true)
        .map(|process| ProcessId {
            pid: u32::try_from(process["pid"].as_u64().unwrap()).unwrap(),
            start_ticks: process["start_ticks"].as_u64().unwrap(),
            boot_id: process["boot_id"].as_str().unwrap().to_owned(),
        })
        .collect()
}

/// Children of an agent that stand at their gates: they have its environment, and it names the state directory.
fn stand_at_gates(directory: &Path) -> usize {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let entry = format!("{DIRECTORY}={}", directory.display());
    let named = processes.filter(|process| {
        let environ = std::fs::read(process.path().join("environ")).unwrap_or_default();
        environ
            .split(|byte| *byte == 0)
            .any(|own| own == entry.as_bytes())
    });
    named.count()
}

/// After the kill: the next agent brings each shard to `ready` with its three processes there once, and stops it without
/// a rest.
async fn check(directory: Directory, specs: &[ShardSpec], case: &str) {
    let before: Vec<ProcessId> = specs
        .iter()
        .flat_map(|spec| confirmed(&directory, &spec.shard))
        .collect();
    let options = options(&directory.0);
    let mut node = Node::on(directory, options).await;
    let directory = node.options.state_dir.clone();
    let there = |shard: &str| processes(&directory, shard).len();
    let registered: Vec<String> = node
        .supervisor
        .shards()
        .into_iter()
        .map(|(spec, _)| spec.shard)
        .collect();
    for spec in specs
        .iter()
        .filter(|spec| !registered.contains(&spec.shard))
    {
        // It was not on record. The server sends it again at the next connect.
        assert_eq!(there(&spec.shard), 0, "{case}");
        node.supervisor.start_shard(spec.clone());
    }
    for spec in specs {
        node.until_state(&spec.shard, ShardState::Ready).await;
        eventually(case, || there(&spec.shard) == 3).await;
    }
    for id in &before {
        assert!(
            id.is_alive(Path::new("/proc")).unwrap(),
            "{case}: {id:?} is gone"
        );
    }
    eventually("every gate is left", || stand_at_gates(&directory) == 0).await;
    for spec in specs {
        node.supervisor.stop_shard(&spec.shard, true);
        node.until_state(&spec.shard, ShardState::Stopped).await;
        assert_eq!(there(&spec.shard), 0, "{case}");
    }
    node.supervisor.shutdown(false).await;
}

#[tokio::test]
async fn an_agent_that_dies_at_any_named_instant_of_a_start_loses_no_engine_and_leaks_none() {
    for instant in [
        "SpecWritten:1",
        "Forked:1",
        "PidWritten:1",
        "Executed:1",
        "Confirmed:1",
        "Forked:2",
        "PidWritten:2",
        "Executed:2",
        "Confirmed:2",
    ] {
        let (directory, specs) = (Directory::new(), [pair(SHARD)]);
        let mut agent = Agent::start(&directory, &specs, instant);
        agent.starting();
        let status = agent.0.wait().unwrap();
        assert_eq!(
            status.signal(),
            Some(9),
            "{instant} was not reached, or too late"
        );
        check(directory, &specs, instant).await;
    }
}

#[tokio::test]
async fn an_agent_that_is_killed_at_a_random_instant_of_three_starts_loses_no_engine_and_leaks_none()
 {
    let seeds = std::env::var(SEEDS_VARIABLE).map_or(SEEDS, |seeds| seeds.parse().unwrap());
    for seed in 0..seeds {
        let directory = Directory::new();
        let specs = [pair("m/0/0"), pair("m/1/0"), pair("m/2/0")];
        let mut agent = Agent::start(&directory, &specs, "");
        agent.starting();
        // The fault itself, not a wait for something.
        std::thread::sleep(Duration::from_micros(random(seed) % KILL_WITHIN_US));
        agent.kill();
        check(directory, &specs, &format!("seed {seed}")).await;
    }
}

#[tokio::test]
async fn an_agent_that_is_killed_again_and_again_never_has_two_copies() {
    let (directory, specs) = (Directory::new(), [pair(SHARD)]);
    for round in 0..6 {
        let mut agent = Agent::start(&directory, &specs, "");
        agent.starting();
        std::thread::sleep(Duration::from_micros(
            random(1_000 + round) % KILL_WITHIN_US,
        ));
        agent.kill();
    }
    check(directory, &specs, "six kills").await;
}

#[tokio::test]
async fn an_engine_writes_on_while_no_agent_runs_and_none_of_its_lines_is_lost() {
    let directory = Directory::new();
    let text = "n=0; while :; do n=$((n+1)); echo line $n; sleep 0.01; done";
    let specs = [silent(SHARD, vec![script(text)])];
    let mut agent = Agent::start(&directory, &specs, "");
    agent.starting();
    let output = directory.0.join("shards/m%2f0%2f0/output.log");
    let lines = || {
        std::fs::read_to_string(&output)
            .unwrap_or_default()
            .lines()
            .count()
    };
    eventually("the first lines", || lines() > 10).await;
    agent.kill();
    let at_death = lines();
    // A pipe would have ended it at its next line.
    eventually("lines without an agent", || lines() > at_death + 10).await;
    let options = options(&directory.0);
    let mut node = Node::on(directory, options).await;
    assert!(
        matches!(node.adopted[0].outcome, Outcome::Adopted { .. }),
        "{:?}",
        node.adopted
    );
    node.until_state(SHARD, ShardState::Ready).await;
    let texts = || -> Vec<String> {
        let lines = node.supervisor.tail(SHARD, usize::MAX).into_iter();
        let texts = lines.map(|line| line.text);
        texts.filter(|text| !text.starts_with('[')).collect()
    };
    eventually("lines under the next agent", || {
        texts().len() > at_death + 20
    })
    .await;
    for (at, text) in texts().iter().enumerate() {
        assert_eq!(text, &format!("line {}", at + 1));
    }
}

/// SplitMix64.
fn random(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
