//! The whole of it: replicas that a server has two agents start, and whatever is killed, stopped or edited meanwhile.

#[path = "harness/fleet.rs"]
mod fleet;
mod harness;

use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use fleet::{Fleet, IMPATIENT, PATIENT, Program, asserts_whole, is_alive, models, name_of, other};

#[test]
fn three_replicas_spread_over_two_nodes_serve_and_their_snapshot_replays_to_the_same_decision() {
    let fleet = Fleet::with_replicas(PATIENT, 3);
    let mut spread = fleet.spread();
    spread.sort();
    assert_eq!(spread, [1, 2]);
    assert_eq!((fleet.starts().len(), fleet.engines().len()), (3, 3));

    // One slot each: three at once are on three replicas.
    let streams: Vec<_> = (0..3).map(|_| fleet.endless_stream()).collect();
    fleet.until("each replica streams", |fleet| {
        let page = fleet.admin_get("/v1/replicas");
        let mut rows = page["replicas"].as_array().unwrap().iter();
        rows.all(|row| row["inflight"] == 1)
    });
    drop(streams);
    let streams: Vec<_> = (0..3).map(|_| fleet.stream(3)).collect();
    streams.into_iter().for_each(asserts_whole);

    let nodes: Value = serde_json::from_str(&fleet.shown(&["nodes", "--format", "json"])).unwrap();
    let counts = nodes.as_array().unwrap().iter();
    let counts: Vec<usize> = counts
        .map(|node| node["replicas"].as_array().unwrap().len())
        .collect();
    assert_eq!(counts, fleet.spread());
    let replicas = fleet.shown(&["replicas"]);
    for id in ["fake/0", "fake/1", "fake/2"] {
        assert!(replicas.contains(id), "{replicas}");
    }
    let text = fleet.shown(&["explain", "fake"]);
    assert!(text.contains("3 of 3 replicas started, 3 ready"), "{text}");
    for replica in fleet.replicas() {
        let line = format!("replica  {} is ready on {}", replica.id, replica.node);
        assert!(text.contains(&line), "{line}: {text}");
    }
    fleet.asserts_replay("fake");
}

#[test]
fn a_server_that_is_killed_finds_every_replica_again_and_starts_none_twice() {
    let mut fleet = Fleet::with_replicas(PATIENT, 3);
    let before = fleet.engines();
    fleet.kill_server();
    assert_eq!(fleet.engines(), before, "they serve without the server");
    // As long as agents may take to come back.
    fleet.set_timing("heartbeat: 10s, lost_after: 10m, recovery: 20s");
    fleet.start_server();
    // It waits for a replica instead of failing.
    fleet.asserts_chat();
    assert!(fleet.is_recovering(), "{:?}", fleet.replicas());
    fleet.until("the recovery is over", |fleet| !fleet.is_recovering());
    fleet.ready(3);
    assert_eq!(fleet.starts(), before, "{}", fleet.story());
    assert_eq!(fleet.engines(), before);
}

#[test]
fn an_agent_that_is_killed_leaves_its_engine_serving_and_adopts_it_again() {
    let mut fleet = Fleet::with_replicas(PATIENT, 1);
    let replica = fleet.replicas().remove(0);
    let node = name_of(&replica.node);
    let before = fleet.engines();
    fleet.kill_agent(node);
    fleet.asserts_chat();
    fleet.until("the node is missed", |fleet| {
        fleet.node_state(node) == "unreachable"
    });
    fleet.asserts_chat();
    fleet.start_agent(node);
    fleet.until("the node is back", |fleet| {
        fleet.node_state(node) == "ready"
    });
    fleet.ready(1);
    fleet.asserts_chat();
    assert_eq!(fleet.replicas(), [replica]);
    assert_eq!((fleet.engines(), fleet.starts()), (before.clone(), before));
}

#[test]
fn an_engine_that_is_killed_fails_no_request_and_is_replaced_on_the_other_node() {
    let fleet = Fleet::with_replicas(PATIENT, 2);
    assert_eq!(fleet.spread(), [1, 1]);
    let doomed = fleet.replicas().remove(0);
    let engine = fleet.engine(&doomed);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                fleet.asserts_chat();
            }
        });
        kill(Pid::from_raw(engine.pid), Signal::SIGKILL).unwrap();
        let is_told = |fleet: &Fleet| fleet.shown(&["explain", "fake"]).contains("failed   ");
        fleet.until("the failure is told", is_told);
        fleet.until("another one is started", |fleet| fleet.starts().len() == 3);
        fleet.ready(2);
        over.store(true, Ordering::Relaxed);
        asking.join().unwrap();
    });
    let text = fleet.shown(&["explain", "fake"]);
    let failed = format!("failed   {} on {} ", doomed.id, doomed.node);
    assert!(text.contains(&failed), "{text}");
    assert!(text.contains("was killed by signal 9"), "{text}");
    let last_line = format!("| listening {}", doomed.address);
    assert!(text.contains(&last_line), "{text}");
    let other = other(&doomed.node);
    assert_eq!(fleet.starts()[2].node, other, "{text}");
    assert!(fleet.replicas().iter().all(|replica| replica.node == other));
}

#[test]
fn a_node_drains_with_its_replacement_first_and_its_stream_whole() {
    let fleet = Fleet::with_replicas(PATIENT, 1);
    let old = fleet.replicas().remove(0);
    let engine = fleet.engine(&old);
    let stream = fleet.stream(30);
    // Held still, so that the stream is open for as long as the test wants.
    kill(Pid::from_raw(engine.pid), Signal::SIGSTOP).unwrap();
    let drain = fleet.ctl_begin(&["drain", &old.node]);
    fleet.until("the replacement is ready", |fleet| {
        let replicas = fleet.replicas();
        let (old, new): (Vec<_>, Vec<_>) = replicas.iter().partition(|row| row.id == old.id);
        let is_replaced = new.iter().any(|replica| replica.state == "ready");
        assert!(is_replaced || old[0].state == "ready", "{replicas:#?}");
        is_replaced
    });
    fleet.until("the old one leaves the pool", |fleet| {
        let replicas = fleet.replicas();
        let old = replicas.iter().find(|replica| replica.id == old.id);
        old.expect("its stream is open").state == "draining"
    });
    fleet.asserts_chat();
    kill(Pid::from_raw(engine.pid), Signal::SIGCONT).unwrap();
    asserts_whole(stream);
    let drained = drain.wait_with_output().unwrap();
    assert!(drained.status.success(), "{drained:?}");
    let said = String::from_utf8(drained.stdout).unwrap();
    assert_eq!(said, format!("{} is empty\n", old.node));
    fleet.ready(1);
    assert_eq!(fleet.replicas()[0].node, other(&old.node));
    assert!(!is_alive(engine.pid));
    assert_eq!(fleet.node_state(&old.node), "draining");
    let said = fleet.shown(&["undrain", &old.node]);
    assert_eq!(said, format!("{} is put back into use\n", old.node));
    fleet.until("the node is in use", |fleet| {
        fleet.node_state(&old.node) == "ready"
    });
    assert_eq!(fleet.starts().len(), 2);
}

#[test]
fn a_model_that_leaves_the_catalog_is_stopped_once_that_is_meant() {
    let mut fleet = Fleet::start(PATIENT, Program::Fake);
    fleet.declare(&models(&[("fake", 2), ("other", 1)]));
    fleet.ready(3);
    // One of three: nobody is asked.
    fleet.declare(&models(&[("fake", 2)]));
    fleet.ready(2);
    fleet.until("its engine is gone", |fleet| fleet.engines().len() == 2);
    fleet.asserts_chat();

    fleet.declare("models: []");
    let held = fleet.ctl(&["reload"]);
    assert_eq!(held.status.code(), Some(1));
    let said = String::from_utf8(held.stderr).unwrap();
    let reason = "the change would stop 2 of 2 running replicas (fake: 2), so it is held";
    assert!(said.contains(reason), "{said}");
    fleet.asserts_chat();
    fleet.shown(&["reload", "--confirm"]);
    fleet.until("nothing runs", |fleet| {
        fleet.replicas().is_empty() && fleet.engines().is_empty()
    });
    assert_eq!(fleet.starts().len(), 3);
}

#[test]
fn a_node_that_was_frozen_is_replaced_and_its_surplus_goes_when_it_is_back() {
    let fleet = Fleet::with_replicas(IMPATIENT, 2);
    assert_eq!(fleet.spread(), [1, 1]);
    fleet.signal_agent("n1", Signal::SIGSTOP);
    fleet.until("the node is lost", |fleet| fleet.node_state("n1") == "lost");
    fleet.until("another one is ready", |fleet| {
        let replicas = fleet.replicas();
        let on_n2 = replicas.iter().filter(|replica| replica.node == "n2");
        on_n2.filter(|replica| replica.state == "ready").count() == 2
    });
    fleet.asserts_chat();
    fleet.signal_agent("n1", Signal::SIGCONT);
    fleet.until("the node is back", |fleet| {
        fleet.node_state("n1") == "ready"
    });
    fleet.ready(2);
    fleet.until("the surplus is gone", |fleet| fleet.engines().len() == 2);
    fleet.asserts_chat();
    assert_eq!(fleet.starts().len(), 3, "{:#?}", fleet.starts());
}

#[test]
fn an_edited_placement_decides_where_the_next_replica_goes_and_says_why() {
    let mut fleet = Fleet::start(PATIENT, Program::Fake);
    let keep_off = |node: &str| {
        format!(
            "local M = {{ api = 1 }}\nfunction M.filter(job, node)\n  if node.id == \"{node}\" then\n    \
             return false, \"kept\", \"{node} is kept for guests\"\n  end\n  return true\nend\nreturn M\n"
        )
    };
    // The catalog says it first, so that there is a model to ask about.
    fleet.declare(&models(&[("fake", 0)]));
    for (count, kept) in [(1, "n2"), (2, "n1")] {
        fleet.write("policies/placement.lua", &keep_off(kept));
        let reason = format!("{kept} is kept for guests");
        fleet.until("the policy decides, and says why", |fleet| {
            let explained = fleet.ctl(&["explain", "fake"]).stdout;
            String::from_utf8(explained).unwrap().contains(&reason)
        });
        fleet.declare(&models(&[("fake", count)]));
        fleet.ready(count);
        assert_eq!(fleet.starts()[count - 1].node, other(kept));
    }
    assert_eq!(fleet.spread(), [1, 1]);
}

#[test]
fn a_relative_source_is_loaded_where_a_node_has_a_models_dir_and_a_node_without_one_says_so() {
    let mut fleet = Fleet::start(PATIENT, Program::Fake);
    let config = std::fs::read_to_string(fleet.path("n2.yaml")).unwrap();
    fleet.write("n2.yaml", &format!("{config}models_dir: models\n"));
    fleet.kill_agent("n2");
    fleet.start_agent("n2");
    fleet.until("the node is back", |fleet| {
        fleet.node_state("n2") == "ready"
    });
    fleet.declare(&models(&[("fake", 1)]).replace("/m.gguf", "m.gguf"));
    // Of two equal nodes the first one is tried first.
    fleet.ready(1);
    assert_eq!(fleet.spread(), [0, 1]);
    let text = fleet.shown(&["explain", "fake"]);
    assert!(text.contains("failed   fake/0 on n1 "), "{text}");
    let reason = "source `m.gguf` is a relative path, and the node has no `models_dir`";
    assert!(text.contains(reason), "{text}");
}
