//! Looks at all engines of a fleet again and again, and says what must never be: a GPU or a port that two of them hold, one that runs twice,
//! one that no agent has on record.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(30);
/// A record comes before its process and goes after it; so long a disk, or a machine that stalls, may take to show that.
const UNRECORDED_MAX: Duration = Duration::from_secs(30);

/// A process of an engine, as it tells itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Running {
    pub pid: u32,
    parent: u32,
    /// With the pid: which process this is.
    started: String,
    pub node: String,
    pub shard: String,
    pub gpus: BTreeSet<String>,
    /// None: it is no engine, but what one left behind.
    pub port: Option<u16>,
}

/// The looking thread. It ends with this.
pub struct Watch {
    faults: Arc<Mutex<Vec<String>>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Over the engines of the agents whose states are in this directory, each under its node's name.
    pub fn start(dir: &Path) -> Watch {
        let mut watch = Watch {
            faults: Arc::default(),
            over: Arc::default(),
            thread: None,
        };
        let (faults, over) = (watch.faults.clone(), watch.over.clone());
        let dir = dir.to_owned();
        watch.thread = Some(std::thread::spawn(move || {
            let mut unrecorded = BTreeMap::new();
            while !over.load(Ordering::Relaxed) {
                let found = look(&dir, &mut unrecorded);
                faults.lock().unwrap().extend(found);
                std::thread::sleep(LOOK_EVERY);
            }
        }));
        watch
    }

    /// What was wrong so far.
    pub fn faults(&self) -> Vec<String> {
        self.faults.lock().unwrap().clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One look. `unrecorded` are the engines without a record, each with when that was first seen.
fn look(dir: &Path, unrecorded: &mut BTreeMap<Running, Instant>) -> Vec<String> {
    let mut faults = Vec::new();
    let running = running(dir);
    for (at, one) in running.iter().enumerate() {
        for other in &running[at + 1..] {
            let clash = clash(one, other);
            // They were not looked at in the same instant: one may have ended before the other began.
            if let Some(clash) = clash.filter(|_| one.is_alive() && other.is_alive()) {
                faults.push(format!("{clash}: {one:?} and {other:?}"));
            }
        }
    }
    unrecorded.retain(|one, _| running.contains(one));
    for one in running {
        match has_record(dir, &one) {
            true => drop(unrecorded.remove(&one)),
            false => {
                let since = *unrecorded.entry(one.clone()).or_insert_with(Instant::now);
                if since.elapsed() > UNRECORDED_MAX && one.is_alive() {
                    faults.push(format!("no agent has it on record: {one:?}"));
                }
            }
        }
    }
    faults
}

/// What two engines of one node can't have both.
fn clash(one: &Running, other: &Running) -> Option<&'static str> {
    // A child looks like its engine until it executes something else.
    let is_child = one.parent == other.pid || other.parent == one.pid;
    let are_engines = one.port.is_some() && other.port.is_some();
    if one.node != other.node || is_child || !are_engines {
        return None;
    }
    if one.shard == other.shard {
        return Some("a shard runs twice");
    }
    if one.port == other.port {
        return Some("two engines have one port");
    }
    let shares = !one.gpus.is_disjoint(&other.gpus);
    shares.then_some("two engines hold one GPU")
}

/// The agent's record of a shard: it is `STATE/shards/NAME/shard.json`.
fn has_record(dir: &Path, running: &Running) -> bool {
    let name = running.shard.replace('/', "%2f");
    let shards = dir.join(&running.node).join("shards");
    shards.join(name).join("shard.json").exists()
}

/// All processes of engines that run now, whoever knows them.
pub fn running(dir: &Path) -> Vec<Running> {
    let states = dir.canonicalize().unwrap();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut running: Vec<Running> = pids.filter_map(|pid| Running::of(pid, &states)).collect();
    running.sort();
    running
}

impl Running {
    fn of(pid: u32, states: &Path) -> Option<Running> {
        let (parent, started) = birth(pid)?;
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let variable = |name: &str| {
            let mut variables = environment.split(|byte| *byte == 0);
            let value = variables.find_map(|variable| {
                let (found, value) = std::str::from_utf8(variable).ok()?.split_once('=')?;
                (found == name).then(|| value.to_owned())
            });
            value.filter(|value| !value.is_empty())
        };
        let state = PathBuf::from(variable("LLMGW_STATE")?);
        let node = state.strip_prefix(states).ok()?;
        let gpus = variable("CUDA_VISIBLE_DEVICES").unwrap_or_default();
        Some(Running {
            pid,
            parent,
            started,
            node: node.to_str()?.to_owned(),
            shard: variable("LLMGW_SHARD")?,
            gpus: gpus.split_terminator(',').map(str::to_owned).collect(),
            port: port(pid),
        })
    }

    pub fn is_alive(&self) -> bool {
        birth(self.pid).is_some_and(|(_, started)| started == self.started)
    }
}

/// The parent of a process that lives, and when it started, in the kernel's ticks.
fn birth(pid: u32) -> Option<(u32, String)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after_name) = stat.rsplit_once(") ")?;
    let mut fields = after_name.split(' ');
    let (state, parent) = (fields.next()?, fields.next()?.parse().ok()?);
    let started = fields.nth(17)?;
    (!matches!(state, "Z" | "X")).then(|| (parent, started.to_owned()))
}

/// The port that is on an engine's command line, before and after the script became what stands for the engine.
fn port(pid: u32) -> Option<u16> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = line
        .split(|byte| *byte == 0)
        .map(|word| String::from_utf8_lossy(word));
    words.find(|word| matches!(&**word, "--port" | "--listen"))?;
    let value = words.next()?;
    let (_, port) = value.rsplit_once(':').unwrap_or(("", &*value));
    port.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn it_sees_what_must_never_be() {
        let dir = std::env::temp_dir().join(format!("llmgw-watch-{}", std::process::id()));
        let path = dir.join("n1");
        std::fs::create_dir_all(&path).unwrap();
        let start = |shard: &str, port: &str, gpus: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", "read line", "--port", port]);
            command.env("LLMGW_STATE", &path).env("LLMGW_SHARD", shard);
            command.env("CUDA_VISIBLE_DEVICES", gpus);
            command.stdin(Stdio::piped()).spawn().unwrap()
        };
        let mut engines = [
            start("a/0/0", "1", "g1,g2"),
            start("b/0/0", "2", "g2"),
            start("c/0/0", "1", ""),
            start("c/0/0", "3", ""),
        ];
        let watch = Watch::start(&dir);
        let said = [
            "two engines hold one GPU",
            "two engines have one port",
            "a shard runs twice",
            "no agent has it on record",
        ];
        let deadline = Instant::now() + PATIENCE;
        while !said
            .iter()
            .all(|said| watch.faults().iter().any(|fault| fault.starts_with(said)))
        {
            assert!(Instant::now() < deadline, "{:#?}", watch.faults());
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(watch);
        for engine in &mut engines {
            engine.kill().unwrap();
            engine.wait().unwrap();
        }
        assert_eq!(running(&dir), []);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
