//! From the server's wish to a ready engine, and every way not to get there.

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;

use llmgw_agent::supervisor::StartInstant;
use llmgw_agent::supervisor::launch::KEPT_VARIABLES;
use llmgw_proto::shard::{ApiKey, Exit, ShardSpec, ShardState, WaitFor};

use crate::harness::{
    Node, PATIENCE, command, engine, eventually, free_port, recorded_pids, script, silent,
};

const SHARD: &str = "m/0/0";

fn texts(node: &Node) -> Vec<String> {
    let lines = node.supervisor.tail(SHARD, 100);
    lines.into_iter().map(|line| line.text).collect()
}

/// What a process has open, by number.
fn descriptors(pid: u32) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let mut open: Vec<(String, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            Some((name, fs::read_link(entry.path()).ok()?))
        })
        .collect();
    open.sort();
    open
}

#[tokio::test]
async fn an_engine_is_loading_until_it_says_that_it_is_ready() {
    let mut node = Node::start().await;
    node.supervisor
        .start_shard(engine(SHARD, &["--load-ms", "3000"]));
    let loading = |status: &llmgw_proto::shard::ShardStatus| {
        status.state == ShardState::Loading && status.reason == "/health answers 503"
    };
    node.until(SHARD, loading).await;
    node.until_state(SHARD, ShardState::Ready).await;
    let registered = node.supervisor.shards();
    assert_eq!(registered.len(), 1);
    assert_eq!(registered[0].1.state, ShardState::Ready);
    assert_eq!(registered[0].1.spec_hash, registered[0].0.hash());
}

#[tokio::test]
async fn an_engine_has_its_own_session_a_cleaned_environment_and_nothing_of_the_agents() {
    let mut node = Node::start().await;
    // Somebody opened a file, and did not say that children must not get it.
    let secret = node.options.state_dir.join("open");
    let file = fs::File::create(&secret).unwrap();
    let inheritable = nix::unistd::dup(&file).unwrap();
    node.supervisor
        .start_shard(silent(SHARD, vec![script("exec sleep 600")]));
    node.until_state(SHARD, ShardState::Ready).await;
    drop(inheritable);
    let pid = node.pid(SHARD);
    let output = node.options.state_dir.join("shards/m%2f0%2f0/output.log");
    let expected = [
        ("0", PathBuf::from("/dev/null")),
        ("1", output.clone()),
        ("2", output),
    ];
    let expected = expected.map(|(number, path)| (number.to_owned(), path));
    eventually("exec", || {
        fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == "sleep\n"
    })
    .await;
    assert_eq!(descriptors(pid), expected);
    let stat = llmgw_agent::process_id::read_stat("/proc".as_ref(), pid)
        .unwrap()
        .unwrap();
    assert_eq!((stat.session, stat.group), (pid, pid));
    assert_eq!(
        fs::read_link(format!("/proc/{pid}/cwd")).unwrap(),
        PathBuf::from("/")
    );
    let environ = fs::read(format!("/proc/{pid}/environ")).unwrap();
    let environ = String::from_utf8_lossy(&environ).into_owned();
    let names: Vec<&str> = environ
        .split('\0')
        .filter_map(|entry| entry.split_once('=').map(|(name, _)| name))
        .collect();
    let own = ["CUDA_VISIBLE_DEVICES", "LLMGW_SHARD", "LLMGW_STATE"];
    let the_shells = ["OLDPWD", "PWD", "SHLVL", "_"];
    let may_have = |name: &str| {
        KEPT_VARIABLES.contains(&name) || own.contains(&name) || the_shells.contains(&name)
    };
    let leaked: Vec<&&str> = names.iter().filter(|name| !may_have(name)).collect();
    assert_eq!(leaked, Vec::<&&str>::new());
    assert!(own.iter().all(|name| names.contains(name)), "{names:?}");
}

#[tokio::test]
async fn an_unasked_exit_is_a_failure_with_its_last_lines_and_leaves_nothing() {
    for (code, reason) in [
        (3, "exited: `sh` exited with status 3"),
        (
            0,
            "exited: `sh` exited with status 0 without being asked to",
        ),
    ] {
        let mut node = Node::start().await;
        let text = format!("echo loading; echo 'no such model' >&2; exit {code}");
        node.supervisor
            .start_shard(silent(SHARD, vec![script(&text)]));
        let failed = node
            .until(SHARD, |status| status.state == ShardState::Failed)
            .await;
        assert_eq!(
            (failed.reason.as_str(), failed.exit),
            (reason, Some(Exit::Status(code)))
        );
        let lines: Vec<&str> = failed
            .log_tail
            .iter()
            .map(|line| line.text.as_str())
            .collect();
        assert_eq!(lines, ["loading", "no such model"]);
        assert_eq!(texts(&node), lines);
        assert!(!node.options.state_dir.join("shards/m%2f0%2f0").exists());
    }
}

#[tokio::test]
async fn an_engine_that_crashes_at_the_end_of_loading_fails() {
    let mut node = Node::start().await;
    let crash = ["--load-ms", "50", "--crash-at-load", "7"];
    node.supervisor.start_shard(engine(SHARD, &crash));
    let failed = node
        .until(SHARD, |status| status.state == ShardState::Failed)
        .await;
    assert_eq!(failed.exit, Some(Exit::Status(7)));
}

#[tokio::test]
async fn an_engine_that_is_not_ready_in_time_fails_and_is_gone() {
    let mut node = Node::start().await;
    let mut spec = engine(SHARD, &["--load-ms", "600000"]);
    spec.readiness.start_deadline_ms = 5_000;
    node.supervisor.start_shard(spec);
    let failed = node
        .until(SHARD, |status| status.state == ShardState::Failed)
        .await;
    let reason = "start_deadline: it was not ready within 5000 ms; at last: /health answers 503";
    assert_eq!(failed.reason, reason);
    assert_eq!(node.processes(SHARD), [0_u32; 0]);
}

#[tokio::test]
async fn an_engine_that_serves_another_name_is_never_ready() {
    let mut node = Node::start().await;
    let mut spec = engine(SHARD, &[]);
    spec.readiness.served_name = "llama".to_owned();
    node.supervisor.start_shard(spec);
    let reason = r#"/v1/models does not list `llama`, only ["m"]"#;
    let loading = node.until(SHARD, |status| status.reason == reason).await;
    assert_eq!(loading.state, ShardState::Loading);
}

#[tokio::test]
async fn a_node_refuses_what_it_cannot_run_and_says_why() {
    let mut node = Node::start().await;
    let engine_taken = engine("m/1/0", &[]);
    let port = engine_taken.ports[0];
    let _taken = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let unknown = silent("m/2/0", vec![command("ray", &[])]);
    for (spec, code) in [
        (engine_taken, "port_taken: "),
        (unknown, "executable_not_allowed: "),
    ] {
        let shard = spec.shard.clone();
        node.supervisor.start_shard(spec);
        let failed = node
            .until(&shard, |status| status.state == ShardState::Failed)
            .await;
        assert!(failed.reason.starts_with(code), "{}", failed.reason);
    }
}

#[tokio::test]
async fn the_same_spec_again_changes_nothing_and_another_one_is_refused() {
    let mut node = Node::start().await;
    let spec = engine(SHARD, &[]);
    node.supervisor.start_shard(spec.clone());
    node.until_state(SHARD, ShardState::Ready).await;
    let pid = node.pid(SHARD);
    assert_eq!(node.supervisor.start_shard(spec.clone()), None);
    let other = ShardSpec {
        slots: Some(9),
        ..spec.clone()
    };
    let refused = node.supervisor.start_shard(other.clone()).unwrap();
    assert_eq!(refused.status.state, ShardState::Failed);
    assert_eq!(refused.status.spec_hash, other.hash());
    assert!(
        refused.status.reason.starts_with("duplicate_shard: "),
        "{}",
        refused.status.reason
    );
    assert_eq!(refused.spec, None, "the spec of what runs is another one");
    assert_eq!(node.pid(SHARD), pid);
    let registered = node.supervisor.shards();
    assert_eq!(registered.len(), 1);
    assert_eq!(
        (registered[0].1.state, &registered[0].0),
        (ShardState::Ready, &spec)
    );
}

#[tokio::test]
async fn an_agent_that_stops_refuses_what_it_is_to_start_and_hands_back_its_spec() {
    let node = Node::start().await;
    node.supervisor.shutdown(true).await;
    let spec = silent(SHARD, vec![script("exec sleep 600")]);
    let refused = node.supervisor.start_shard(spec.clone()).unwrap();
    assert_eq!(refused.spec.as_deref(), Some(&spec));
    let said = (refused.status.state, refused.status.reason.as_str());
    let expected = "agent_stops: the agent is being stopped";
    assert_eq!(said, (ShardState::Failed, expected));
    assert!(node.supervisor.shards().is_empty());
}

#[tokio::test]
async fn two_shards_never_get_the_same_gpu_or_port() {
    let mut node = Node::start().await;
    let first = engine(SHARD, &["--load-ms", "600000"]);
    let mut second = engine("m/1/0", &[]);
    second.ports = first.ports.clone();
    node.supervisor.start_shard(first);
    node.supervisor.start_shard(second);
    let failed = node
        .until("m/1/0", |status| status.state == ShardState::Failed)
        .await;
    assert!(
        failed.reason.starts_with("port_claimed: "),
        "{}",
        failed.reason
    );
    // What is being started when a test ends would be left behind.
    node.until_state(SHARD, ShardState::Loading).await;
}

#[tokio::test]
async fn a_failed_shard_can_be_started_again() {
    let mut node = Node::start().await;
    let flag = node.options.state_dir.join("flag");
    let text = format!("test -e {} && exec sleep 600", flag.display());
    let spec = silent(SHARD, vec![script(&text)]);
    node.supervisor.start_shard(spec.clone());
    node.until(SHARD, |status| status.state == ShardState::Failed)
        .await;
    fs::write(&flag, "").unwrap();
    node.supervisor.start_shard(spec);
    node.until(SHARD, |status| status.state == ShardState::Ready)
        .await;
}

#[tokio::test]
async fn a_failed_shard_that_is_stopped_is_reported_stopped_and_no_longer_registered() {
    let mut node = Node::start().await;
    let spec = silent(SHARD, vec![script("exit 3")]);
    node.supervisor.start_shard(spec.clone());
    let failed = node
        .until(SHARD, |status| status.state == ShardState::Failed)
        .await;
    assert_eq!(node.supervisor.shards().len(), 1);
    assert!(node.supervisor.stop_shard(SHARD, false));
    let stopped = node
        .until(SHARD, |status| status.state == ShardState::Stopped)
        .await;
    assert_eq!(
        (stopped.spec_hash, stopped.reason, stopped.exit),
        (spec.hash(), failed.reason, failed.exit)
    );
    assert_eq!(node.supervisor.shards(), []);
    // The server is told that too: it waits for an end of each.
    assert!(!node.supervisor.stop_shard(SHARD, false));
}

#[tokio::test]
async fn commands_start_in_order_and_a_sidecars_death_is_the_shards() {
    let mut node = Node::start().await;
    let port = free_port();
    let listen = format!("127.0.0.1:{port}");
    let mut head = command("fake-engine", &["--listen", &listen]);
    head.sidecar = true;
    let step = script("echo step");
    let mut main = script("echo main; exec sleep 600");
    main.wait_for = Some(WaitFor {
        address: listen,
        timeout_ms: 20_000,
    });
    node.supervisor
        .start_shard(silent(SHARD, vec![step, head, main]));
    node.until_state(SHARD, ShardState::Ready).await;
    eventually("the main command's line", || {
        texts(&node).contains(&"main".to_owned())
    })
    .await;
    let lines = texts(&node);
    assert_eq!(
        (lines[0].as_str(), lines[2].as_str()),
        ("step", "main"),
        "{lines:?}"
    );
    let pids = recorded_pids(&node.options.state_dir, SHARD);
    let head = nix::unistd::Pid::from_raw(i32::try_from(pids[1]).unwrap());
    nix::sys::signal::kill(head, nix::sys::signal::Signal::SIGKILL).unwrap();
    let failed = node
        .until(SHARD, |status| status.state == ShardState::Failed)
        .await;
    assert_eq!(
        failed.reason,
        "exited: `fake-engine` was killed by signal 9"
    );
    assert_eq!(failed.exit, Some(Exit::Signal(9)));
    assert_eq!(node.processes(SHARD), [0_u32; 0]);
}

#[tokio::test]
async fn an_address_that_never_listens_fails_the_shard_and_ends_its_sidecars() {
    let mut node = Node::start().await;
    let mut sidecar = script("exec sleep 600");
    sidecar.sidecar = true;
    let mut main = script("exec sleep 600");
    let address = format!("127.0.0.1:{}", free_port());
    main.wait_for = Some(WaitFor {
        address: address.clone(),
        timeout_ms: 200,
    });
    node.supervisor
        .start_shard(silent(SHARD, vec![sidecar, main]));
    let failed = node
        .until(SHARD, |status| status.state == ShardState::Failed)
        .await;
    let reason =
        format!("wait_timeout: `sh` was not started: {address} did not listen within 200 ms");
    assert_eq!(failed.reason, reason);
    assert_eq!(node.processes(SHARD), [0_u32; 0]);
}

#[tokio::test]
async fn the_key_reaches_the_engine_by_file_or_argument_and_never_the_log() {
    let mut node = Node::start().await;
    let mut spec = engine(SHARD, &["--api-key", "${LLMGW_API_KEY}"]);
    spec.api_key = Some(ApiKey::new("sk-hidden".to_owned()));
    node.supervisor.start_shard(spec);
    // It lists its models only to whoever presents the key.
    node.until_state(SHARD, ShardState::Ready).await;
    let mut file = script(r#"stat -c %a "$KEY_FILE"; cat "$KEY_FILE"; echo; exec sleep 600"#);
    file.env
        .insert("KEY_FILE".to_owned(), "${LLMGW_API_KEY_FILE}".to_owned());
    let mut by_file = silent("m/1/0", vec![file]);
    by_file.api_key = Some(ApiKey::new("sk-hidden".to_owned()));
    node.supervisor.start_shard(by_file);
    node.until_state("m/1/0", ShardState::Ready).await;
    let lines = || -> Vec<String> {
        let lines = node.supervisor.tail("m/1/0", 9).into_iter();
        lines.map(|line| line.text).collect()
    };
    eventually("the key's line", || lines().len() == 2).await;
    assert_eq!(lines(), ["600", "******"]);
}

#[tokio::test]
async fn a_reader_of_the_output_goes_on_where_it_was() {
    let mut node = Node::start().await;
    let text = "echo one; echo two; exec sleep 600";
    node.supervisor
        .start_shard(silent(SHARD, vec![script(text)]));
    node.until_state(SHARD, ShardState::Ready).await;
    eventually("two lines", || texts(&node).len() == 2).await;
    let (lines, next) = node.supervisor.follow(SHARD, 1, 9).unwrap();
    assert_eq!((lines[0].text.as_str(), next), ("two", 2));
    assert_eq!(node.supervisor.follow("m/9/0", 0, 9), None);
}

#[tokio::test]
async fn the_agents_own_processes_are_known() {
    let mut node = Node::start().await;
    node.supervisor
        .start_shard(silent(SHARD, vec![script("sleep 600 & sleep 600")]));
    node.until_state(SHARD, ShardState::Ready).await;
    let processes = RefCell::default();
    eventually("three processes", || {
        let Ok(seen) = node.supervisor.processes() else {
            return false;
        };
        seen.own.len() == 3 && processes.replace(Some(seen)).is_none()
    })
    .await;
    let processes = processes.take().unwrap();
    let leader = node.pid(SHARD);
    assert!(processes.own.contains(&leader));
    assert!(processes.own.is_subset(&processes.living));
}

#[tokio::test]
async fn the_panic_of_a_shards_task_is_told_and_the_next_agent_goes_on_with_the_shard() {
    let mut node = Node::with(|options| {
        options.at = Some(|instant| assert_ne!(instant, StartInstant::Confirmed));
    })
    .await;
    node.supervisor.start_shard(engine(SHARD, &[]));
    let lost = node.supervisor.lost();
    tokio::time::timeout(PATIENCE, lost.cancelled())
        .await
        .expect("it is told");
    node.supervisor.shutdown(false).await;
    node.options.at = None;
    node.start_again().await;
    node.until_state(SHARD, ShardState::Ready).await;
    assert!(!node.supervisor.lost().is_cancelled());
}
