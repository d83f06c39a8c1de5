//! A restarted agent and what an earlier one left: taken over, killed, or left alone, and said.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use llmgw_agent::process_id::ProcessId;
use llmgw_agent::supervisor::{Outcome, Supervisor, SupervisorError, cgroup};
use llmgw_proto::shard::{Exit, ShardSpec, ShardState};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use serde_json::json;

use crate::harness::{
    Bystander, Directory, Node, PROC, engine, eventually, options, record, record_path, script,
    silent, state_dir,
};

const SHARD: &str = "m/0/0";

/// As an agent that started `id` for the shard's only command would have left it.
fn leave(directory: &Directory, spec: &ShardSpec, id: &ProcessId) {
    leave_all(directory, spec, &[(id, true)], None);
}

/// The same with a process for each command, and whether it was seen executing.
fn leave_all(
    directory: &Directory,
    spec: &ShardSpec,
    processes: &[(&ProcessId, bool)],
    cgroup: Option<&Path>,
) {
    let processes = processes
        .iter()
        .enumerate()
        .map(|(command, (id, confirmed))| {
            json!({
                "command": command,
                "pid": id.pid,
                "start_ticks": id.start_ticks,
                "boot_id": id.boot_id,
                "confirmed": confirmed,
                "done": false,
            })
        });
    let record = json!({
        "version": 1,
        "spec": spec,
        "asked": "run",
        "ready": true,
        "processes": processes.collect::<Vec<_>>(),
        "cgroup": cgroup,
    });
    let path = record_path(&directory.0, &spec.shard);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, record.to_string()).unwrap();
}

async fn node_over(directory: Directory) -> Node {
    let options = options(&directory.0);
    Node::on(directory, options).await
}

fn outcome(node: &Node) -> &Outcome {
    assert_eq!(node.adopted.len(), 1, "{:?}", node.adopted);
    &node.adopted[0].outcome
}

async fn failed(node: &mut Node) -> String {
    node.until(SHARD, |status| status.state == ShardState::Failed)
        .await
        .reason
}

#[tokio::test]
async fn an_engine_goes_on_under_the_next_agent_ready_at_once_and_can_be_stopped() {
    let mut node = Node::start().await;
    node.supervisor
        .start_shard(engine(SHARD, &["--grandchild"]));
    node.until_state(SHARD, ShardState::Ready).await;
    let pid = node.pid(SHARD);
    node.restart().await;
    assert_eq!(outcome(&node), &Outcome::Adopted { pids: vec![pid] });
    // What a registration right after the start would say.
    let (_, status) = node.supervisor.shards().remove(0);
    assert_eq!((status.state, status.adopted), (ShardState::Ready, true));
    let lines = node.supervisor.tail(SHARD, 9);
    assert!(
        lines.iter().any(|line| line.text.starts_with("listening ")),
        "{lines:?}"
    );
    assert!(
        lines
            .last()
            .unwrap()
            .text
            .starts_with("[llmgw-agent] adopted"),
        "{lines:?}"
    );
    node.supervisor.stop_shard(SHARD, false);
    node.until_state(SHARD, ShardState::Stopped).await;
    assert_eq!(node.processes(SHARD), [0_u32; 0]);
}

#[tokio::test]
async fn an_adopted_engine_that_loads_becomes_ready_and_one_that_ends_fails() {
    let mut node = Node::start().await;
    let spec = engine(SHARD, &["--load-ms", "600000"]);
    node.supervisor.start_shard(spec);
    node.until_state(SHARD, ShardState::Loading).await;
    node.restart().await;
    node.until_state(SHARD, ShardState::Loading).await;
    let pid = i32::try_from(node.pid(SHARD)).unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let failed = node
        .until(SHARD, |status| status.state == ShardState::Failed)
        .await;
    assert_eq!(
        failed.reason,
        "exited: `fake-engine` ended, how is not known"
    );
    assert_eq!(failed.exit, Some(Exit::Unknown));
}

#[tokio::test]
async fn a_stop_that_had_begun_goes_on() {
    let mut node = Node::start().await;
    let spec = ShardSpec {
        stop_grace_ms: 600_000,
        ..engine(SHARD, &["--ignore-sigterm"])
    };
    node.supervisor.start_shard(spec);
    node.until_state(SHARD, ShardState::Ready).await;
    node.supervisor.stop_shard(SHARD, false);
    node.until_state(SHARD, ShardState::Stopping).await;
    node.restart().await;
    assert_eq!(outcome(&node), &Outcome::Stopping);
    node.until_state(SHARD, ShardState::Stopping).await;
    node.supervisor.stop_shard(SHARD, true);
    node.until_state(SHARD, ShardState::Stopped).await;
}

#[tokio::test]
async fn a_process_that_merely_has_the_number_is_left_alone() {
    let (directory, bystander) = (Directory::new(), Bystander::start(&[]));
    let recycled = ProcessId {
        start_ticks: bystander.id().start_ticks - 1,
        ..bystander.id()
    };
    leave(&directory, &engine(SHARD, &[]), &recycled);
    let mut node = node_over(directory).await;
    let reason = failed(&mut node).await;
    let expected = format!(
        "ended_alone: `fake-engine` (process {}) ended while no agent ran, how is not known",
        recycled.pid
    );
    assert_eq!(reason, expected);
    assert_eq!(outcome(&node), &Outcome::Failed { reason });
    assert!(bystander.is_alive());
}

#[tokio::test]
async fn a_process_that_cannot_be_identified_is_killed() {
    let (directory, process) = (Directory::new(), Bystander::start(&[]));
    leave(&directory, &engine(SHARD, &[]), &process.id());
    let mut node = node_over(directory).await;
    let expected = format!(
        "unidentified: `fake-engine` (process {}) does not say that it is this shard's",
        process.0.id()
    );
    assert_eq!(failed(&mut node).await, expected);
    assert!(!process.is_alive());
}

#[tokio::test]
async fn a_zombie_is_dead() {
    let (directory, mut zombie) = (Directory::new(), Bystander::start(&[]));
    let id = zombie.id();
    zombie.0.kill().unwrap();
    eventually("the zombie", || {
        let stat = llmgw_agent::process_id::read_stat("/proc".as_ref(), id.pid).unwrap();
        stat.unwrap().state == 'Z'
    })
    .await;
    leave(&directory, &engine(SHARD, &[]), &id);
    let mut node = node_over(directory).await;
    assert!(failed(&mut node).await.starts_with("ended_alone: "));
}

#[tokio::test]
async fn after_a_reboot_everything_is_gone_whoever_has_the_numbers_now() {
    let directory = Directory::new();
    let bystander = Bystander::start(&[]);
    let before = ProcessId {
        boot_id: "an-earlier-boot".to_owned(),
        ..bystander.id()
    };
    leave(&directory, &engine(SHARD, &[]), &before);
    let mut node = node_over(directory).await;
    let reason = "rebooted: the node was started anew, so nothing of it runs any more";
    assert_eq!(failed(&mut node).await, reason);
    assert!(bystander.is_alive());
    assert_eq!(record(&node.options.state_dir, SHARD), None);
}

#[tokio::test]
async fn an_engine_without_a_record_is_killed_and_another_agents_is_not() {
    let directory = Directory::new();
    let state = state_dir(&directory.0);
    let stray = Bystander::start(&[("LLMGW_SHARD", "m/7/0"), ("LLMGW_STATE", &state)]);
    let theirs = Bystander::start(&[("LLMGW_SHARD", "m/7/0"), ("LLMGW_STATE", "/elsewhere")]);
    let node = node_over(directory).await;
    let pids = vec![stray.0.id()];
    assert_eq!(outcome(&node), &Outcome::Killed { pids });
    assert_eq!(node.adopted[0].shard, "m/7/0");
    assert!(!stray.is_alive() && theirs.is_alive());
}

/// What a control group looks like, of a shard of this state directory; the kernel does not stand behind it, so that writing
/// to it kills nobody.
fn control_group(root: &Path, state: &Path, shard: &str, pid: u32) -> PathBuf {
    let groups = cgroup::Groups::of(state).unwrap();
    let name = groups.name(&shard.replace('/', "%2f"));
    let group = root.join(format!("llmgw-{name}"));
    fs::create_dir_all(&group).unwrap();
    fs::write(group.join("cgroup.kill"), "").unwrap();
    fs::write(group.join("cgroup.procs"), format!("{pid}\n")).unwrap();
    group
}

#[tokio::test]
async fn what_is_in_a_control_group_without_a_record_is_killed_though_nothing_else_tells_whose_it_is()
 {
    let (directory, root, elsewhere) = (Directory::new(), Directory::new(), Directory::new());
    let state = state_dir(&directory.0);
    let mine = [("LLMGW_SHARD", SHARD), ("LLMGW_STATE", state.as_str())];
    let (stray, theirs, on_record) = (
        Bystander::start(&[]),
        Bystander::start(&[]),
        Bystander::start(&mine),
    );
    let group = control_group(&root.0, &directory.0, "m/7/0", stray.0.id());
    control_group(&root.0, &elsewhere.0, "m/7/0", theirs.0.id());
    control_group(&root.0, &directory.0, SHARD, on_record.0.id());
    leave(&directory, &engine(SHARD, &[]), &on_record.id());
    let mut options = options(&directory.0);
    options.cgroup_root = Some(root.0.clone());
    let node = Node::on(directory, options).await;
    let found: Vec<(&str, &Outcome)> = node
        .adopted
        .iter()
        .map(|found| (found.shard.as_str(), &found.outcome))
        .collect();
    let killed = Outcome::Killed {
        pids: vec![stray.0.id()],
    };
    let adopted = Outcome::Adopted {
        pids: vec![on_record.0.id()],
    };
    assert_eq!(found, [("m/7/0", &killed), (SHARD, &adopted)]);
    assert_eq!(fs::read_to_string(group.join("cgroup.kill")).unwrap(), "1");
    assert!(!stray.is_alive() && theirs.is_alive() && on_record.is_alive());
}

#[tokio::test]
async fn a_record_that_is_damaged_is_set_aside_its_engine_killed_and_the_others_adopted() {
    let mut node = Node::start().await;
    for shard in [SHARD, "m/1/0"] {
        node.supervisor.start_shard(engine(shard, &[]));
        node.until_state(shard, ShardState::Ready).await;
    }
    let (damaged, whole) = (node.pid(SHARD), node.pid("m/1/0"));
    node.supervisor.shutdown(false).await;
    let path = record_path(&node.options.state_dir, SHARD);
    let text = fs::read(&path).unwrap();
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    node.start_again().await;
    let outcomes: Vec<&Outcome> = node
        .adopted
        .iter()
        .map(|adopted| &adopted.outcome)
        .collect();
    assert!(
        matches!(outcomes[0], Outcome::SetAside { file, kept_as: Some(kept), .. }
            if *file == path && kept.exists()),
        "{outcomes:?}"
    );
    assert_eq!(
        outcomes[1],
        &Outcome::Killed {
            pids: vec![damaged]
        }
    );
    assert_eq!(outcomes[2], &Outcome::Adopted { pids: vec![whole] });
    node.until_state("m/1/0", ShardState::Ready).await;
}

#[tokio::test]
async fn two_agents_never_share_a_state_directory() {
    let node = Node::start().await;
    let second = Supervisor::start(node.options.clone()).await;
    let Err(SupervisorError::Locked { path }) = second else {
        panic!("it started");
    };
    assert_eq!(path, node.options.state_dir.join("lock"));
}

#[tokio::test]
async fn a_lock_that_is_a_pipe_or_leads_elsewhere_is_refused_by_name() {
    for (make, cause) in [
        (
            (|lock| mkfifo(lock, Mode::S_IRWXU).unwrap()) as fn(&Path),
            "No such device or address (os error 6)",
        ),
        (
            |lock| symlink(lock.with_file_name("elsewhere"), lock).unwrap(),
            "Too many levels of symbolic links (os error 40)",
        ),
    ] {
        let directory = Directory::new();
        let lock = directory.0.join("lock");
        make(&lock);
        let started = Supervisor::start(options(&directory.0)).await;
        let said = started.err().unwrap().to_string();
        let expected = format!(
            "the state directory can't be locked by `{}`: {cause}; it is to be a plain file that this user may write",
            lock.display()
        );
        assert_eq!(said, expected);
        assert!(!directory.0.join("elsewhere").exists());
    }
}

#[tokio::test]
async fn a_sidecar_that_runs_and_a_server_that_was_never_started_go_on_together() {
    let mut node = Node::start().await;
    let mut sidecar = script("exec sleep 600");
    sidecar.sidecar = true;
    let mut main = script("exec sleep 600");
    let port = crate::harness::free_port();
    main.wait_for = Some(llmgw_proto::shard::WaitFor {
        address: format!("127.0.0.1:{port}"),
        timeout_ms: 600_000,
    });
    node.supervisor
        .start_shard(silent(SHARD, vec![sidecar, main]));
    let waits = |status: &llmgw_proto::shard::ShardStatus| status.reason.contains("waits for");
    node.until(SHARD, waits).await;
    let pid = node.pid(SHARD);
    node.restart().await;
    assert_eq!(outcome(&node), &Outcome::Adopted { pids: vec![pid] });
    let _listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    node.until_state(SHARD, ShardState::Ready).await;
    assert_eq!(node.processes(SHARD).len(), 2);
}

#[tokio::test]
async fn a_child_that_was_let_through_its_gate_at_the_agents_last_instant_is_no_second_copy() {
    let directory = Directory::new();
    let state = state_dir(&directory.0);
    let ours = [("LLMGW_SHARD", SHARD), ("LLMGW_STATE", &state)];
    // The second one has the agent's environment as long as it has not executed the server.
    let (runs, executes) = (Bystander::start(&ours), Bystander::start(&[]));
    let mut sidecar = script("exec sleep 600");
    sidecar.sidecar = true;
    let spec = silent(SHARD, vec![sidecar, script("exec sleep 600")]);
    leave_all(
        &directory,
        &spec,
        &[(&runs.id(), true), (&executes.id(), false)],
        None,
    );
    let mut node = node_over(directory).await;
    assert!(runs.is_alive() && !executes.is_alive());
    let killed = Outcome::Interrupted {
        pids: vec![executes.0.id()],
    };
    let adopted = Outcome::Adopted {
        pids: vec![runs.0.id()],
    };
    let outcomes: Vec<&Outcome> = node
        .adopted
        .iter()
        .map(|adopted| &adopted.outcome)
        .collect();
    assert_eq!(outcomes, [&killed, &adopted]);
    let said = format!(
        "processes [{}] of shard `{SHARD}` were being started when the agent ended, and were killed",
        executes.0.id()
    );
    assert_eq!(node.adopted[0].to_string(), said);
    node.until_state(SHARD, ShardState::Ready).await;
    assert_eq!(node.processes(SHARD).len(), 2);
}

#[tokio::test]
async fn an_agent_that_cannot_see_what_runs_of_a_shard_does_not_start() {
    let directory = Directory::new();
    let group = directory.0.join("group");
    fs::create_dir_all(group.join("cgroup.procs")).unwrap();
    fs::write(group.join("cgroup.kill"), "").unwrap();
    leave_all(&directory, &engine(SHARD, &[]), &[], Some(&group));
    let started = Supervisor::start(options(&directory.0)).await;
    let said = started.err().unwrap().to_string();
    let expected = "what runs of a shard can't be seen: Is a directory (os error 21)";
    assert_eq!(said, expected);
}

#[tokio::test]
async fn a_start_does_not_begin_anew_beside_a_child_that_no_signal_ends() {
    let (directory, child) = (Directory::new(), Bystander::start(&[]));
    let id = child.id();
    // A process table in which it stays as it is.
    let proc = directory.0.join("proc");
    let (stat, boot_id) = (format!("{}/stat", id.pid), "sys/kernel/random/boot_id");
    for file in [stat.as_str(), boot_id] {
        fs::create_dir_all(proc.join(file).parent().unwrap()).unwrap();
        fs::write(
            proc.join(file),
            fs::read(Path::new(PROC).join(file)).unwrap(),
        )
        .unwrap();
    }
    leave_all(&directory, &engine(SHARD, &[]), &[(&id, false)], None);
    let mut options = options(&directory.0);
    options.proc_root.clone_from(&proc);
    let mut node = Node::on(directory, options).await;
    let reason = format!(
        "start_interrupted: process {} was being started when the agent ended, and SIGKILL did not end it",
        id.pid
    );
    let pids = vec![id.pid];
    let expected = [
        Outcome::Interrupted { pids },
        Outcome::Failed {
            reason: reason.clone(),
        },
    ];
    let outcomes = node.adopted.iter().map(|adopted| adopted.outcome.clone());
    assert_eq!(outcomes.collect::<Vec<_>>(), expected);
    fs::remove_dir_all(proc.join(stat).parent().unwrap()).unwrap();
    assert_eq!(failed(&mut node).await, reason);
}
