//! The end of a shard: asked for, forced, resisted; and what it held is given back.

use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use llmgw_agent::process_id::{ProcessId, read_stat};
use llmgw_agent::supervisor::gpu::{GpuFact, GpuFacts};
use llmgw_agent::supervisor::process::signal as signal_exactly;
use llmgw_agent::supervisor::{
    StartInstant, Supervisor, SupervisorError, SupervisorOptions, cgroup,
};
use llmgw_proto::shard::{Exit, ShardSpec, ShardState};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Node, PATIENCE, PROC, engine, eventually, script, silent};

const SHARD: &str = "m/0/0";
const NOBODY: [u32; 0] = [];

fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
}

#[tokio::test]
async fn a_stop_asks_the_engine_and_is_over_when_it_is_gone() {
    let mut node = Node::start().await;
    node.supervisor.start_shard(engine(SHARD, &[]));
    node.until_state(SHARD, ShardState::Ready).await;
    let pid = node.pid(SHARD);
    assert!(node.supervisor.drain_shard(SHARD));
    node.until_state(SHARD, ShardState::Draining).await;
    assert!(node.supervisor.stop_shard(SHARD, false));
    let stopped = node.until_state(SHARD, ShardState::Stopped).await;
    assert_eq!((stopped.reason.as_str(), stopped.log_tail.len()), ("", 0));
    assert_eq!(node.processes(SHARD), NOBODY);
    assert!(!node.options.state_dir.join("shards/m%2f0%2f0").exists());
    let zombie = format!("/proc/{pid}");
    eventually("no zombie", || !std::path::Path::new(&zombie).exists()).await;
    assert!(!node.supervisor.stop_shard("m/9/0", false));
}

#[tokio::test]
async fn an_engine_that_ignores_the_request_is_killed_after_its_grace_with_all_that_it_left_elsewhere()
 {
    let mut node = Node::start().await;
    let spec = ShardSpec {
        stop_grace_ms: 300,
        ..engine(SHARD, &["--ignore-sigterm", "--grandchild"])
    };
    node.supervisor.start_shard(spec);
    node.until_state(SHARD, ShardState::Ready).await;
    assert_eq!(node.processes(SHARD).len(), 2);
    let asked = Instant::now();
    node.supervisor.stop_shard(SHARD, false);
    node.until_state(SHARD, ShardState::Stopped).await;
    assert!(asked.elapsed() >= Duration::from_millis(300));
    assert_eq!(node.processes(SHARD), NOBODY);
}

#[tokio::test]
async fn a_request_reaches_every_descendant_behind_a_shell() {
    let mut node = Node::start().await;
    let log = node.options.state_dir.join("log");
    let inner = format!(
        "trap 'echo $0 asked >> {0}; exit' TERM; echo $0 up >> {0}; while :; do sleep 0.01; done",
        log.display()
    );
    // The outer shell stays; one of the inner ones has left its session.
    let outer =
        "trap : TERM; sh -c \"$INNER\" one & setsid sh -c \"$INNER\" two & wait; wait; wait";
    let mut command = script(outer);
    command.env.insert("INNER".to_owned(), inner);
    node.supervisor.start_shard(silent(SHARD, vec![command]));
    node.until_state(SHARD, ShardState::Ready).await;
    let lines = |word: &str| -> Vec<String> {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let mut lines: Vec<String> = text
            .lines()
            .filter(|line| line.ends_with(word))
            .map(str::to_owned)
            .collect();
        lines.sort();
        lines
    };
    eventually("both shells", || lines("up").len() == 2).await;
    node.supervisor.stop_shard(SHARD, false);
    node.until_state(SHARD, ShardState::Stopped).await;
    assert_eq!(lines("asked"), ["one asked", "two asked"]);
}

#[tokio::test]
async fn what_the_engine_leaves_when_it_obeys_is_killed_though_nothing_else_leads_to_it() {
    let pace = |options: &mut SupervisorOptions| options.pace.remember = 20 * PATIENCE;
    let mut node = Node::with(pace).await;
    let child = node.options.state_dir.join("child");
    let left = format!(
        "trap '' TERM; echo $$ > {}; exec sleep 600",
        child.display()
    );
    let text = "trap exit TERM; setsid env -i sh -c \"$LEFT\" & while :; do sleep 0.01; done";
    let mut command = script(text);
    command.env.insert("LEFT".to_owned(), left);
    let spec = ShardSpec {
        stop_grace_ms: 300,
        ..silent(SHARD, vec![command])
    };
    node.supervisor.start_shard(spec);
    let left = || std::fs::read_to_string(&child).ok()?.trim().parse().ok();
    eventually("the child", || left().is_some()).await;
    let id = ProcessId::read(PROC.as_ref(), left().unwrap()).unwrap();
    let id = id.expect("it ignores what could end it");
    node.supervisor.stop_shard(SHARD, false);
    node.until_state(SHARD, ShardState::Stopped).await;
    assert!(!signal_exactly(&id, PROC.as_ref(), 9).unwrap());
}

#[tokio::test]
async fn a_forced_stop_and_a_frozen_engine_need_no_patience() {
    let mut node = Node::start().await;
    node.supervisor
        .start_shard(engine(SHARD, &["--ignore-sigterm"]));
    node.until_state(SHARD, ShardState::Ready).await;
    signal(node.pid(SHARD), Signal::SIGSTOP);
    node.supervisor.stop_shard(SHARD, true);
    let stopped = node.until_state(SHARD, ShardState::Stopped).await;
    assert_eq!(stopped.exit, Some(Exit::Signal(9)));
    // A frozen one that would obey gets to.
    node.supervisor.start_shard(engine("m/1/0", &[]));
    node.until_state("m/1/0", ShardState::Ready).await;
    signal(node.pid("m/1/0"), Signal::SIGSTOP);
    node.supervisor.stop_shard("m/1/0", false);
    let stopped = node.until_state("m/1/0", ShardState::Stopped).await;
    assert_eq!(stopped.exit, Some(Exit::Status(0)));
}

#[tokio::test]
async fn an_engine_whose_first_thread_has_ended_runs_until_it_is_stopped() {
    let mut node = Node::start().await;
    let spec = engine(SHARD, &["--end-first-thread"]);
    let address = ("127.0.0.1", spec.ports[0]);
    node.supervisor.start_shard(spec);
    node.until_state(SHARD, ShardState::Ready).await;
    let pid = node.pid(SHARD);
    eventually("the first thread's end", || {
        let stat = read_stat(PROC.as_ref(), pid).unwrap();
        stat.is_some_and(|stat| stat.state == 'Z')
    })
    .await;
    node.restart().await;
    node.until_state(SHARD, ShardState::Ready).await;
    node.supervisor.stop_shard(SHARD, false);
    node.until_state(SHARD, ShardState::Stopped).await;
    assert!(TcpStream::connect(address).is_err(), "it still listens");
}

#[tokio::test]
async fn an_engine_that_is_killed_fails_and_takes_its_orphans_along() {
    let mut node = Node::start().await;
    node.supervisor
        .start_shard(engine(SHARD, &["--grandchild"]));
    node.until_state(SHARD, ShardState::Ready).await;
    signal(node.pid(SHARD), Signal::SIGKILL);
    let failed = node
        .until(SHARD, |status| status.state == ShardState::Failed)
        .await;
    assert_eq!(
        failed.reason,
        "exited: `fake-engine` was killed by signal 9"
    );
    assert_eq!(node.processes(SHARD), NOBODY);
}

#[tokio::test]
async fn a_stop_works_while_the_engine_loads_and_while_an_address_is_waited_for() {
    let mut node = Node::start().await;
    node.supervisor
        .start_shard(engine(SHARD, &["--load-ms", "600000"]));
    node.until_state(SHARD, ShardState::Loading).await;
    node.supervisor.stop_shard(SHARD, false);
    node.until_state(SHARD, ShardState::Stopped).await;
    let mut waits = engine("m/1/0", &[]);
    waits.commands[0].wait_for = Some(llmgw_proto::shard::WaitFor {
        address: "127.0.0.1:1".to_owned(),
        timeout_ms: 600_000,
    });
    node.supervisor.start_shard(waits);
    node.until_state("m/1/0", ShardState::Starting).await;
    node.supervisor.stop_shard("m/1/0", false);
    node.until_state("m/1/0", ShardState::Stopped).await;
}

/// One GPU, whose memory is what the test says. Nobody looks at it but who asks for that.
struct OneGpu {
    used_mib: Mutex<Option<u64>>,
    looked: Mutex<Instant>,
}

impl GpuFacts for OneGpu {
    fn gpu(&self, uuid: &str) -> Option<GpuFact> {
        (uuid == "GPU-1").then(|| GpuFact {
            problems: Vec::new(),
            used_mib: *self.used_mib.lock().unwrap(),
            holders: vec![4711],
            read_at: *self.looked.lock().unwrap(),
        })
    }

    fn look_now(&self) {
        *self.looked.lock().unwrap() = Instant::now();
    }
}

#[tokio::test]
async fn a_shard_is_not_over_before_the_memory_of_its_gpus_has_fallen() {
    let gpu = Arc::new(OneGpu {
        used_mib: Mutex::new(Some(4)),
        looked: Mutex::new(Instant::now()),
    });
    let facts = gpu.clone();
    let mut node = Node::with(move |options| options.gpus = facts).await;
    let with_gpu = |shard| ShardSpec {
        gpus: vec!["GPU-1".to_owned()],
        ..engine(shard, &[])
    };
    node.supervisor.start_shard(with_gpu(SHARD));
    node.until_state(SHARD, ShardState::Ready).await;
    node.supervisor.start_shard(with_gpu("m/1/0"));
    let refused = node
        .until("m/1/0", |status| status.state == ShardState::Failed)
        .await;
    assert_eq!(refused.reason, "gpu_claimed: GPU GPU-1 is shard `m/0/0`'s");
    *gpu.used_mib.lock().unwrap() = Some(40_000);
    node.supervisor.stop_shard(SHARD, false);
    let dir = node.options.state_dir.clone();
    eventually("the engine's end", || {
        crate::harness::processes(&dir, SHARD).is_empty()
    })
    .await;
    // Its place is not given away yet.
    node.supervisor.start_shard(with_gpu("m/2/0"));
    let refused = node
        .until("m/2/0", |status| status.state == ShardState::Failed)
        .await;
    assert_eq!(refused.reason, "gpu_claimed: GPU GPU-1 is shard `m/0/0`'s");
    assert_eq!(
        node.supervisor
            .shards()
            .iter()
            .filter(|(spec, status)| {
                spec.shard == SHARD && status.state == ShardState::Stopping
            })
            .count(),
        1
    );
    *gpu.used_mib.lock().unwrap() = Some(4);
    node.until_state(SHARD, ShardState::Stopped).await;
}

#[tokio::test]
async fn a_shutdown_leaves_engines_running_without_waiting_for_them_or_stops_them() {
    let mut node = Node::start().await;
    for shard in [SHARD, "m/1/0"] {
        node.supervisor.start_shard(engine(shard, &[]));
        node.until_state(shard, ShardState::Ready).await;
    }
    node.supervisor
        .start_shard(engine("m/2/0", &["--load-ms", "600000"]));
    node.until_state("m/2/0", ShardState::Loading).await;
    let asked = Instant::now();
    node.supervisor.shutdown(false).await;
    assert!(asked.elapsed() < PATIENCE / 2);
    for shard in [SHARD, "m/1/0", "m/2/0"] {
        assert_eq!(node.processes(shard).len(), 1);
    }
    node.start_again().await;
    node.supervisor.shutdown(true).await;
    for shard in [SHARD, "m/1/0", "m/2/0"] {
        assert_eq!(node.processes(shard), NOBODY);
    }
}

/// Lets a start go on that hangs: the runtime waits for its thread, also where the test has failed.
struct LetGoOn(&'static AtomicBool);

impl Drop for LetGoOn {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Keeps a start between fork and exec until it may go on, having said that it is there.
fn hang_when_forked(instant: StartInstant, hangs: &AtomicBool, goes_on: &AtomicBool) {
    hangs.fetch_or(instant == StartInstant::Forked, Ordering::Relaxed);
    while instant == StartInstant::Forked && !goes_on.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[tokio::test]
async fn a_start_that_hangs_keeps_the_next_agent_out_until_the_process_ends() {
    static GOES_ON: AtomicBool = AtomicBool::new(false);
    static HANGS: AtomicBool = AtomicBool::new(false);
    let mut node = Node::with(|options| {
        options.at = Some(|instant| hang_when_forked(instant, &HANGS, &GOES_ON));
    })
    .await;
    let let_go_on = LetGoOn(&GOES_ON);
    node.supervisor.start_shard(engine(SHARD, &[]));
    node.until_state(SHARD, ShardState::Starting).await;
    eventually("the start hangs", || HANGS.load(Ordering::Relaxed)).await;
    node.supervisor.shutdown(false).await;
    let next = Supervisor::start(node.options.clone()).await;
    assert!(matches!(next, Err(SupervisorError::Locked { .. })));
    drop(let_go_on);
    // What is being started when a test ends would be left behind.
    eventually("it runs", || node.processes(SHARD).len() == 1).await;
}

#[tokio::test]
async fn a_stop_is_heard_while_the_start_of_another_shard_hangs() {
    static HANGS: AtomicBool = AtomicBool::new(false);
    static GOES_ON: AtomicBool = AtomicBool::new(false);
    let mut node = Node::with(|options| {
        options.at = Some(|instant| hang_when_forked(instant, &HANGS, &GOES_ON));
    })
    .await;
    let let_go_on = LetGoOn(&GOES_ON);
    node.supervisor.start_shard(engine(SHARD, &[]));
    eventually("the start hangs", || HANGS.load(Ordering::Relaxed)).await;
    node.supervisor.start_shard(engine("m/1/0", &[]));
    node.until_state("m/1/0", ShardState::Starting).await;
    node.supervisor.stop_shard("m/1/0", true);
    node.until_state("m/1/0", ShardState::Stopped).await;
    drop(let_go_on);
    node.until_state(SHARD, ShardState::Ready).await;
}

#[tokio::test]
async fn a_control_group_kills_what_left_session_parent_and_environment_behind() {
    let Some(root) = cgroup::delegated(PROC.as_ref()) else {
        let reason = "no control group of version 2 is delegated to this process";
        // Not `eprintln!`, which the test runner keeps to itself when a test passes.
        let mut stderr = std::io::stderr();
        let _ = writeln!(stderr, "skipped: the control group of a shard: {reason}");
        return;
    };
    let mut node = Node::with(|options| options.cgroup_root = Some(root.clone())).await;
    let text =
        "setsid env -i sh -c 'trap \"\" TERM; setsid sleep 600 & sleep 600' & exec sleep 600";
    let spec = ShardSpec {
        stop_grace_ms: 300,
        ..silent(SHARD, vec![script(text)])
    };
    node.supervisor.start_shard(spec);
    node.until_state(SHARD, ShardState::Ready).await;
    let groups = cgroup::Groups::of(&node.options.state_dir).unwrap();
    let name = groups.name("m%2f0%2f0");
    let group = root.join(format!("llmgw-{name}"));
    let inside = || {
        let procs = std::fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        procs.lines().count()
    };
    eventually("four processes", || inside() == 4).await;
    // Also those of which only the group tells whose they are.
    assert_eq!(node.supervisor.processes().unwrap().own.len(), 4);
    signal(node.pid(SHARD), Signal::SIGKILL);
    node.until(SHARD, |status| status.state == ShardState::Failed)
        .await;
    assert!(!group.exists(), "the group is empty, and gone");
}
