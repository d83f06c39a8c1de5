//! A replica's whole life, over a fleet in memory: what agents are told, what they run, and what is in the pool meanwhile.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use llmgw_plugins::{Policies, PolicyOptions, PolicySet};
use llmgw_proto::shard::{API_KEY_PLACE, ShardState};
use tokio_util::sync::CancellationToken;

use self::fleet::{Fleet, LOST_AFTER_S, RECOVERY_S, lock, parse};
use super::{OperatorError, Output, State, View};
use crate::control::memory::Failure;
use crate::control::tests::nodes::Nodes;
use crate::routing::outlook::NONE_READY;

pub(crate) mod fleet;

/// For what comes at once.
const PATIENCE: Duration = Duration::from_secs(60);

const ONE: &str =
    "[{name: m, source: m.gguf, profiles: [{name: p, engine: llamacpp, cpus: 4, slots: 2}]}]";
const TWO: &str = "[{name: m, source: m.gguf, replicas: 2, profiles: [{name: p, engine: llamacpp, cpus: 4, slots: 2}]}]";
const CHANGED: &str =
    "[{name: m, source: m.gguf, profiles: [{name: p, engine: llamacpp, cpus: 4, slots: 3}]}]";
const FIRST: &str = "10.0.0.1:21000";
const SECOND: &str = "10.0.0.2:21000";

const ON_GPU: &str = "[{name: m, source: m, labels: {team: search}, profiles: [{name: p, engine: vllm, gpu: h100-sxm-80g, slots: 2}]}]";

/// One replica, ready on `a`.
fn one() -> Fleet {
    let mut fleet = Fleet::new(&["a", "b"], ONE);
    fleet.ready("m/0");
    fleet.log();
    fleet
}

#[tokio::test(flavor = "multi_thread")]
async fn the_thread_that_looks_is_gone_when_nobody_holds_it_any_more() {
    let fleet = Fleet::new(&["a"], ONE);
    let looking = fleet.controller.start(CancellationToken::new()).unwrap();
    assert_eq!(Arc::strong_count(&fleet.controller), 2);
    drop(looking);
    assert_eq!(Arc::strong_count(&fleet.controller), 1);
}

#[test]
fn the_gateway_is_told_where_a_replica_is_and_on_what() {
    let mut fleet = Fleet::new(&["a"], ON_GPU);
    fleet.ready("m/0");
    let served = lock(&fleet.rest.served);
    let locality = &served["m"][0].locality;
    assert_eq!(locality.node.as_deref(), Some("a"));
    assert_eq!(locality.gpu.as_deref(), Some("h100-sxm-80g"));
    assert_eq!(locality.rack.as_deref(), Some("r1"));
    let snapshot = fleet.controller.snapshot();
    assert_eq!(snapshot.models["m"].labels["team"], "search");
    let rack = locality.labels.iter().find(|(name, _)| name == "rack");
    assert_eq!(rack.map(|(_, value)| &**value), Some("r1"));
}

#[test]
fn a_catalog_entry_becomes_a_ready_endpoint() {
    let mut fleet = Fleet::new(&["a"], ONE);
    assert_eq!(fleet.running(), ["m/0 on a: loading"]);
    assert_eq!(fleet.log(), ["a: start m/0/0"]);
    assert!(fleet.pool().is_empty());
    assert_eq!(fleet.outlook().reason, "1 replica is starting");
    fleet.ready("m/0");
    assert_eq!(fleet.pool(), [FIRST]);
    let spec = fleet.spec("m/0");
    let served = lock(&fleet.rest.served).clone();
    let endpoint = &served["m"][0].endpoint;
    let key = endpoint.api_key.as_ref().map(|key| key.expose().to_owned());
    assert_eq!(
        key.as_deref(),
        spec.api_key.as_ref().map(|key| key.expose())
    );
    assert!(key.is_some_and(|key| key.len() == 64));
    assert_eq!(
        (endpoint.slots, endpoint.serves.as_deref()),
        (Some(2), Some("m"))
    );
    assert_eq!(spec.commands[0].env["LLAMA_API_KEY"], API_KEY_PLACE);
    fleet.pass(60);
    assert_eq!(
        fleet.log(),
        ["pool of 1"],
        "all is as declared, so nothing is said"
    );
}

#[test]
fn an_engine_that_is_said_to_be_on_the_servers_machine_gets_no_requests_and_is_replaced() {
    for host in ["127.0.0.1", "::1", "169.254.169.254", "admin.example"] {
        let mut fleet = one();
        fleet.is_said_to_be_at("m/0", host);
        assert!(fleet.pool().is_empty(), "{host}");
        let log = fleet.log();
        assert_eq!(log[..2], ["pool of 0", "a: Stop m/0/0"], "{host}");
        assert!(log[2].contains(": start m/"), "{host}: {log:?}");
    }
    let mut fleet = one();
    fleet.is_said_to_be_at("m/0", "10.0.0.9");
    assert_eq!(fleet.pool(), ["10.0.0.9:21000"], "it had another address");
}

#[test]
fn before_the_recovery_is_over_nothing_is_placed_and_requests_are_told_to_wait() {
    let mut fleet = one();
    fleet.restart_server();
    fleet.pass(1);
    assert!(fleet.outlook().recovering);
    fleet.pass(RECOVERY_S);
    assert!(!fleet.outlook().recovering);
    assert_eq!(fleet.outlook().reason, "no node has registered");
    assert!(fleet.log().is_empty());
}

#[test]
fn replicas_spread_and_get_ports_and_gpus_of_their_own() {
    let mut fleet = Fleet::new(&["a", "b"], TWO);
    assert_eq!(fleet.running(), ["m/0 on a: loading", "m/1 on b: loading"]);
    let packed = "[{name: m, replicas: 2, profiles: [{name: p, engine: vllm, gpu: h100-sxm-80g}]}]";
    fleet = Fleet::new(&["a"], packed);
    let (one, two) = (fleet.spec("m/0"), fleet.spec("m/1"));
    assert_eq!((&*one.ports, &*two.ports), (&[21_000][..], &[21_001][..]));
    assert_ne!(one.gpus, two.gpus);
    assert_eq!((one.gpus.len(), two.gpus.len()), (1, 1));
    assert_ne!(one.api_key, two.api_key);
}

#[test]
fn an_engine_that_fails_is_tried_elsewhere_after_a_while_and_says_why() {
    let mut fleet = one();
    let reason = "exited: it exited with status 1";
    fleet.becomes("m/0", ShardState::Stopping, reason);
    assert!(fleet.pool().is_empty());
    assert_eq!(fleet.running(), ["m/0 on a: stopping"]);
    fleet.becomes("m/0", ShardState::Failed, reason);
    assert_eq!(
        fleet.running(),
        Vec::<String>::new(),
        "its failure is cleared"
    );
    let outlook = fleet.outlook().reason;
    assert_eq!(
        outlook,
        "m/0 failed on a (exited: it exited with status 1) and is tried again in a while"
    );
    fleet.pass(4);
    assert_eq!(
        *lock(&fleet.rest.failed),
        [
            "m/0 on a, exited: failed: exited: it exited with status 1; its last line was `out of memory`; next attempt in 5 s"
        ],
        "once, however often it is looked at"
    );
    assert_eq!(fleet.running(), Vec::<String>::new());
    let waiting = fleet.controller.waiting();
    let [waiting] = &waiting[..] else {
        panic!("one waits: {waiting:?}");
    };
    assert_eq!((waiting.replicas, waiting.waits_ms), (1, 1_000));
    assert_eq!(
        (waiting.node.as_deref(), &*waiting.reason),
        (Some("a"), "exited: it exited with status 1")
    );
    let Ok(Output::Kept(failure)) = fleet.controller.output_of("m/0", 0) else {
        panic!("its last lines are kept");
    };
    assert_eq!(failure.lines[0].text, "out of memory");
    fleet.pass(1);
    assert_eq!(fleet.running(), ["m/0 on b: loading"]);
    assert_eq!(fleet.controller.waiting(), []);
    let (node, shard) = ("b".to_owned(), "m/0/0".to_owned());
    let output = fleet.controller.output_of("m/0", 0);
    assert_eq!(output.expect("it runs"), Output::At { node, shard });
    fleet.fail("m/0");
    fleet.pass(9);
    assert_eq!(
        fleet.running(),
        Vec::<String>::new(),
        "the second wait is 10 s"
    );
    fleet.pass(1);
    assert_eq!(fleet.running().len(), 1);
    let explained = fleet.controller.explain("m").expect("it has profiles");
    let text = explained.to_string();
    assert!(
        text.contains("failed   m/0 on b 10 s ago: exited"),
        "{text}"
    );
    assert!(text.contains("| out of memory"), "{text}");
    assert_eq!(explained.failures.len(), 2);
}

/// Its only replica failed so often that it waits for five minutes.
fn waiting() -> Fleet {
    let mut fleet = Fleet::new(&["a", "b"], ONE);
    for _ in 0..7 {
        let running = fleet.running();
        let replica = running[0].split(' ').next().expect("its name is first");
        fleet.fail(replica);
        let waits_ms = fleet.controller.explain("m").expect("it is there").waits_ms;
        if waits_ms < 300_000 {
            fleet.pass(waits_ms / 1_000);
        }
    }
    fleet.pass(1);
    assert_eq!(fleet.running(), Vec::<String>::new());
    fleet
}

#[test]
fn a_corrected_profile_does_not_wait_for_what_the_broken_one_did() {
    let mut fleet = waiting();
    let other = "{name: x, profiles: [{name: p, engine: llamacpp, cpus: 4}]}";
    fleet.configure(&ONE.replace("]}]", &format!("]}}, {other}]")));
    fleet.pass(1);
    assert_eq!(fleet.running().len(), 1, "another model changes nothing");
    assert!(!fleet.running()[0].starts_with("m/"));
    fleet.configure(CHANGED);
    fleet.pass(1);
    let explained = fleet.controller.explain("m").expect("it is there");
    assert_eq!(explained.waits_ms, 0);
    assert_eq!(explained.failures.len(), 7, "they stay visible");
    let running = fleet.running();
    assert!(
        running.iter().any(|shown| shown.starts_with("m/")),
        "{running:?}"
    );
    // The next failure is a first one.
    let replica = running.iter().find(|shown| shown.starts_with("m/"));
    let replica = replica.expect("it was just found").split(' ').next();
    fleet.fail(replica.expect("its name is first"));
    let explained = fleet.controller.explain("m").expect("it is there");
    assert_eq!(explained.waits_ms, 5_000);
}

#[test]
fn after_a_change_of_the_policies_nothing_waits() {
    let config = Arc::new(parse(ONE));
    let view = |set: Arc<PolicySet>| View {
        config: config.clone(),
        observed: Arc::new(Nodes::new(&["a"]).0),
        set,
    };
    let none = PolicyOptions {
        dir: None,
        state: None,
    };
    let policies = Policies::open(none).expect("the built-in ones load");
    let mut state = State::default();
    state.take_in(&view(policies.current()));
    let failure = Failure {
        replica: "m/0".to_owned(),
        profile: "p".to_owned(),
        node: None,
        at_ms: 1_000_000,
        reason: "the engine plugin `llamacpp` rendered no commands".to_owned(),
        lines: Vec::new(),
    };
    state.memory.failed("m", failure, 1_000_000);
    let held_back = |state: &State| {
        let failures = state.memory.failures("m").expect("it failed");
        failures.held_back(1_000_000)
    };
    state.take_in(&view(policies.current()));
    assert_eq!(held_back(&state), 1);
    // Those that every set falls back on are another generation.
    state.take_in(&view(PolicySet::built_in()));
    assert_eq!(held_back(&state), 0);
}

#[test]
fn a_port_that_somebody_has_is_left_alone_at_once() {
    let mut fleet = Fleet::new(&["a"], ONE);
    fleet.becomes(
        "m/0",
        ShardState::Failed,
        "port_taken: 21000 is used by pid 7",
    );
    assert_eq!(fleet.running(), ["m/1 on a: loading"]);
    assert_eq!(fleet.spec("m/1").ports, [21_001]);
}

#[test]
fn a_node_whose_ports_are_all_taken_is_no_place_and_nothing_has_failed() {
    let eleven = ONE.replace("source: m.gguf,", "source: m.gguf, replicas: 11,");
    let mut fleet = Fleet::new(&["a"], &eleven);
    assert_eq!(fleet.running().len(), 10, "its range has ten ports");
    let explained = fleet.controller.explain("m").expect("it has profiles");
    assert_eq!((explained.waits_ms, explained.failures.len()), (0, 0));
    let text = explained.to_string();
    assert!(text.contains("\nports "), "{text}");
    let snapshot = fleet.controller.snapshot();
    assert_eq!(snapshot.nodes["a"].ports_free, Some(0));
    fleet.join("b");
    fleet.look();
    assert_eq!(fleet.running().len(), 11);
}

#[test]
fn a_lost_node_is_replaced_and_has_nothing_too_much_when_it_comes_back() {
    let mut fleet = one();
    fleet.cut("a");
    fleet.pass(LOST_AFTER_S - 1);
    assert_eq!(fleet.pool(), [FIRST], "its engine may serve on");
    assert_eq!(fleet.running(), ["m/0 on a: ready"]);
    fleet.pass(1);
    assert_eq!(fleet.running(), ["m/0 on a: ready", "m/1 on b: loading"]);
    assert_eq!(fleet.pool(), [FIRST], "it is the only one");
    fleet.ready("m/1");
    assert_eq!(fleet.pool(), ["10.0.0.2:21000"], "it is replaced");
    fleet.join("a");
    fleet.pass(2);
    assert_eq!(
        fleet.running(),
        ["m/0 on a: ready"],
        "one of them is enough"
    );
    assert_eq!(fleet.pool(), [FIRST]);
}

#[test]
fn a_server_that_restarts_rebuilds_from_reports_and_starts_no_second_copy() {
    let mut fleet = one();
    fleet.restart_server();
    fleet.join("a");
    fleet.look();
    assert_eq!(
        fleet.pool(),
        [FIRST],
        "it serves also while others still report"
    );
    fleet.join("b");
    fleet.pass(RECOVERY_S + 5);
    assert_eq!(fleet.running(), ["m/0 on a: ready"]);
    assert_eq!(fleet.log(), ["pool of 1"]);
}

#[test]
fn an_agent_that_restarts_changes_nothing() {
    let mut fleet = one();
    fleet.leave("a");
    fleet.pass(5);
    fleet.join("a");
    fleet.pass(5);
    assert_eq!(fleet.log(), Vec::<String>::new());
    assert_eq!(fleet.pool(), [FIRST]);
}

#[test]
fn a_model_that_leaves_the_catalog_is_out_of_the_pool_first_and_ends_with_its_last_request() {
    let mut fleet = one();
    lock(&fleet.rest.requests).insert(FIRST.to_owned(), 2);
    fleet.configure("[]");
    fleet.look();
    assert_eq!(fleet.log(), ["pool of 0", "a: Drain m/0/0"]);
    fleet.pass(100);
    assert_eq!(fleet.running(), ["m/0 on a: draining"]);
    lock(&fleet.rest.requests).clear();
    fleet.pass(1);
    assert_eq!(fleet.running(), Vec::<String>::new());
    assert_eq!(
        fleet.log().last().map(String::as_str),
        Some("a: Stop m/0/0")
    );
}

#[test]
fn requests_that_do_not_end_are_cut_off_after_the_drain_timeout() {
    let mut fleet = one();
    lock(&fleet.rest.requests).insert(FIRST.to_owned(), 1);
    fleet.configure("[]");
    fleet.pass(180);
    assert_eq!(fleet.running(), ["m/0 on a: draining"]);
    fleet.pass(1);
    assert_eq!(fleet.running(), Vec::<String>::new());
}

#[test]
fn a_changed_profile_rolls_and_the_pool_is_never_empty() {
    let mut fleet = one();
    let before = fleet.spec("m/0").definition.clone();
    fleet.configure(CHANGED);
    fleet.pass(1);
    assert_eq!(fleet.running(), ["m/0 on a: ready", "m/1 on b: loading"]);
    assert_ne!(fleet.spec("m/1").definition, before);
    assert_eq!(fleet.pool(), [FIRST]);
    fleet.ready("m/1");
    assert_eq!(fleet.pool(), [SECOND]);
    fleet.pass(3);
    assert_eq!(fleet.running(), ["m/1 on b: ready"]);
}

#[test]
fn a_change_without_room_keeps_what_runs_and_says_so() {
    let gpus = |slots: u32| {
        let profile = format!(
            "{{name: p, engine: vllm, gpu: h100-sxm-80g, gpus_per_node: 2, tensor_parallel: 2, slots: {slots}}}"
        );
        format!("[{{name: m, profiles: [{profile}]}}]")
    };
    let mut fleet = Fleet::new(&["a"], &gpus(4));
    fleet.ready("m/0");
    fleet.configure(&gpus(8));
    fleet.pass(30);
    assert_eq!(fleet.running(), ["m/0 on a: ready"]);
    assert_eq!(fleet.pool(), [FIRST]);
    let explained = fleet.controller.explain("m").expect("it has profiles");
    assert!(explained.replicas[0].outdated);
    assert!(!explained.decision.as_ref().expect("it was asked").placed);
    let text = explained.to_string();
    assert!(text.contains("gpus_busy"), "{text}");
}

#[test]
fn a_drained_node_is_left_and_used_again_when_it_is_put_back() {
    let mut fleet = one();
    let said = fleet
        .controller
        .drain("a", None, false)
        .expect("there is one");
    assert_eq!(said, "a is taken out of use, 1 replica leaves it");
    fleet.pass(1);
    assert_eq!(fleet.running(), ["m/0 on a: ready", "m/1 on b: loading"]);
    let nodes = fleet.controller.nodes();
    assert_eq!(
        (nodes[0].state, &*nodes[0].reason),
        (
            "draining",
            "waits for 1 replica: m/0 stays until its replacement is ready"
        )
    );
    fleet.ready("m/1");
    lock(&fleet.rest.requests).insert(FIRST.to_owned(), 1);
    fleet.pass(3);
    assert_eq!(
        fleet.controller.nodes()[0].reason,
        "waits for 1 replica: m/0 finishes its requests"
    );
    lock(&fleet.rest.requests).clear();
    fleet.pass(3);
    assert_eq!(fleet.running(), ["m/1 on b: ready"]);
    assert_eq!(fleet.controller.nodes()[0].reason, "it is empty");
    fleet.controller.undrain("a").expect("there is one");
    fleet.configure(TWO);
    fleet.pass(1);
    assert_eq!(fleet.running(), ["m/0 on a: loading", "m/1 on b: ready"]);
}

#[test]
fn a_drain_whose_replacement_has_no_place_says_so_and_waits_for_its_timeout_only() {
    let mut fleet = Fleet::new(&["a"], ONE);
    fleet.ready("m/0");
    let limit = Duration::from_secs(20);
    fleet
        .controller
        .drain("a", Some(limit), false)
        .expect("there is one");
    fleet.pass(19);
    assert_eq!(fleet.running(), ["m/0 on a: ready"]);
    let reason = fleet.controller.nodes()[0].reason.clone();
    let wanted = "waits for a replacement of m/0: no node has a place for it: `node_state` on 1 node (a: draining); `llmgw ctl undrain NODE` puts one back into use";
    assert!(reason.starts_with(wanted), "{reason}");
    lock(&fleet.rest.requests).insert(FIRST.to_owned(), 1);
    fleet.pass(30);
    assert_eq!(fleet.running(), ["m/0 on a: draining"], "its request runs");
    assert!(fleet.pool().is_empty());
    lock(&fleet.rest.requests).clear();
    fleet.pass(1);
    assert_eq!(fleet.running(), Vec::<String>::new());
}

#[test]
fn a_start_that_got_lost_is_repeated_at_the_next_session_and_else_placed_again() {
    let mut fleet = Fleet::new(&["a"], "[]");
    fleet.deaf = true;
    fleet.configure(ONE);
    fleet.pass(1);
    assert_eq!(fleet.log(), ["a: start m/0/0"]);
    fleet.cut("a");
    fleet.deaf = false;
    fleet.join("a");
    fleet.pass(1);
    assert_eq!(fleet.log(), ["a: start m/0/0"]);
    assert_eq!(fleet.running(), ["m/0 on a: loading"]);

    let mut fleet = Fleet::new(&["a"], "[]");
    fleet.deaf = true;
    fleet.configure(ONE);
    fleet.pass(10);
    assert_eq!(fleet.log(), ["a: start m/0/0"]);
    fleet.deaf = false;
    fleet.pass(2);
    assert_eq!(fleet.log(), ["a: start m/0/0"]);
    assert_eq!(fleet.running(), ["m/0 on a: loading"]);
}

#[test]
fn what_has_no_place_is_placed_when_a_node_joins() {
    let mut fleet = Fleet::new(&["a"], "[]");
    fleet
        .controller
        .drain("a", None, false)
        .expect("there is one");
    fleet.configure(ONE);
    fleet.pass(1);
    let reason = fleet.outlook().reason;
    assert!(reason.contains("`node_state` on 1 node"), "{reason}");
    fleet.join("b");
    fleet.look();
    assert_eq!(fleet.running(), ["m/0 on b: loading"]);
}

#[test]
fn a_server_that_is_up_before_its_agents_reach_it_starts_no_second_copies() {
    let mut fleet = Fleet::new(&["a", "b"], TWO);
    fleet.ready("m/0");
    fleet.ready("m/1");
    fleet.restart_server();
    fleet.pass(2 * RECOVERY_S);
    assert_eq!(fleet.outlook().reason, "no node has registered");
    fleet.join("a");
    fleet.pass(RECOVERY_S - 1);
    fleet.join("b");
    fleet.pass(RECOVERY_S);
    assert_eq!(fleet.running(), ["m/0 on a: ready", "m/1 on b: ready"]);
    let told = fleet.log();
    assert!(told.iter().all(|line| line.starts_with("pool")), "{told:?}");
}

#[test]
fn a_model_that_left_and_came_back_between_two_looks_is_told_what_to_expect() {
    let mut fleet = Fleet::new(&["a"], ONE);
    assert_eq!(fleet.outlook().reason, "1 replica is starting");
    // Its pool is another one now.
    lock(&fleet.rest.outlooks).clear();
    fleet.configure("[]");
    fleet.configure(ONE);
    fleet.look();
    assert_eq!(fleet.outlook().reason, "1 replica is starting");
}

#[test]
fn where_nothing_is_missing_any_more_the_reason_why_there_was_no_place_is_gone() {
    let mut fleet = Fleet::new(&["a"], ONE);
    fleet.ready("m/0");
    let controller = fleet.controller.clone();
    controller.drain("a", None, false).expect("there is one");
    fleet.pass(1);
    assert!(fleet.outlook().reason.starts_with("no node has a place"));
    controller.undrain("a").expect("there is one");
    fleet.pass(1);
    assert_eq!(fleet.outlook().reason, NONE_READY);
}

#[test]
fn a_profile_that_can_not_be_started_is_named_to_requests_and_operators() {
    let gang = "[{name: m, profiles: [{name: p, engine: vllm, gpu: h100-sxm-80g, nodes: 2, tensor_parallel: 2}]}]";
    let fleet = Fleet::new(&["a"], gang);
    let reason = fleet.outlook().reason;
    assert!(
        reason.contains("replicas over several nodes come with multi-node"),
        "{reason}"
    );
    let explained = fleet.controller.explain("m").expect("it has profiles");
    assert_eq!(explained.problems.len(), 1);
    assert!(explained.decision.is_none());
}

#[test]
fn the_fleet_is_looked_at_while_an_operator_waits_for_an_explanation() {
    let fleet = one();
    let asked = fleet.controller.ask("m").expect("it has profiles");
    assert!(fleet.controller.state.try_lock().is_ok(), "nobody waits");
    let explained = asked.answer();
    assert_eq!(
        explained,
        fleet.controller.explain("m").expect("it is there")
    );
    assert!(explained.decision.is_some_and(|decision| decision.placed));
}

#[test]
fn a_dead_node_under_the_brake_is_given_up_by_a_forced_drain() {
    let mut fleet = Fleet::new(&["a", "b", "c", "d"], ONE);
    fleet.ready("m/0");
    for node in ["a", "b", "c"] {
        fleet.cut(node);
    }
    fleet.pass(2 * LOST_AFTER_S);
    assert_eq!(fleet.running(), ["m/0 on a: ready"]);
    assert_eq!(fleet.controller.nodes()[0].state, "unreachable", "braked");
    fleet
        .controller
        .drain("a", None, true)
        .expect("there is one");
    fleet.pass(1);
    assert_eq!(fleet.running(), ["m/0 on a: ready", "m/1 on d: loading"]);
    assert!(fleet.pool().is_empty());
    let given_up = &fleet.controller.nodes()[0];
    assert_eq!(given_up.leaving, given_up.replicas);
    fleet.ready("m/1");
    fleet.join("a");
    fleet.pass(2);
    assert_eq!(fleet.running(), ["m/1 on d: ready"]);
}

#[test]
fn a_stopped_replica_is_replaced() {
    let mut fleet = one();
    fleet.controller.stop("m/0", false).expect("there is one");
    fleet.pass(3);
    assert_eq!(fleet.running(), ["m/1 on b: loading"]);
    let unknown = fleet
        .controller
        .stop("m/7", false)
        .expect_err("there is none");
    assert!(matches!(
        unknown,
        OperatorError::Unknown {
            noun: "replica",
            ..
        }
    ));
}

#[test]
fn of_two_replicas_of_one_name_one_is_stopped_and_the_answer_says_which() {
    let mut fleet = one();
    fleet.cut("a");
    fleet.restart_server();
    fleet.join("b");
    fleet.pass(RECOVERY_S);
    // `a` comes late, and nothing that is surplus has been stopped yet.
    fleet.deaf = true;
    fleet.join("a");
    let said = fleet.controller.stop("m/0", false).expect("there are two");
    assert_eq!(said, "m/0 leaves b; another one of this name is on a");
    let leaving: Vec<(String, Vec<String>)> = fleet
        .controller
        .nodes()
        .into_iter()
        .map(|node| (node.id, node.leaving))
        .collect();
    let m = || vec!["m/0".to_owned()];
    assert_eq!(leaving, [("a".to_owned(), vec![]), ("b".to_owned(), m())]);
    // Who hurries it means the one that is leaving.
    let said = fleet.controller.stop("m/0", true).expect("there are two");
    assert_eq!(said, "m/0 leaves b; another one of this name is on a");
}

#[test]
fn a_change_that_would_stop_more_than_half_is_held() {
    let mut fleet = Fleet::new(&["a", "b"], TWO);
    fleet.look();
    let held = |models: &str| fleet.controller.held(&parse(models).catalog);
    assert_eq!(held(ONE), None, "half of them");
    assert_eq!(held(CHANGED), None);
    let gone = held("[]").expect("both would stop");
    assert_eq!((gone.stops["m"], gone.of), (2, 2));
    let text = gone.to_string();
    assert!(
        text.starts_with("would stop 2 of 2 running replicas (m: 2)"),
        "{text}"
    );
}

/// Both replicas run, and the server is started again with another catalog.
fn restarted_with(models: &str) -> Fleet {
    let mut fleet = Fleet::new(&["a", "b"], TWO);
    fleet.ready("m/0");
    fleet.ready("m/1");
    fleet.restart_server();
    fleet.configure(models);
    fleet
}

#[test]
fn a_start_whose_catalog_would_stop_more_than_half_stops_nothing_until_that_is_meant() {
    let mut fleet = restarted_with("[]");
    // Seen before anybody reported, so it does not show that little would stop.
    fleet.controller.configured(false);
    fleet.join("a");
    fleet.join("b");
    fleet.pass(RECOVERY_S + 60);
    assert_eq!(fleet.running(), ["m/0 on a: ready", "m/1 on b: ready"]);
    let said = fleet.controller.held_since_start().expect("it is held");
    assert_eq!(
        said,
        "the configuration that the server started with would stop 2 of 2 running replicas (m: 2), so it is held; \
         `llmgw ctl reload --confirm` puts it in force"
    );
    let reasons = fleet.controller.replicas();
    let is_said = |reason: &str| reason.contains("`llmgw ctl reload --confirm`");
    assert!(reasons.iter().all(|replica| is_said(&replica.reason)));

    fleet.controller.configured(true);
    fleet.pass(5);
    assert_eq!(fleet.running(), Vec::<String>::new());
    assert_eq!(fleet.controller.held_since_start(), None);
}

#[test]
fn a_node_is_drained_of_what_a_start_holds_because_an_operator_says_so() {
    let mut fleet = restarted_with("[]");
    fleet.join("a");
    fleet.join("b");
    fleet.pass(RECOVERY_S);
    assert!(fleet.controller.held_since_start().is_some());
    fleet
        .controller
        .drain("a", None, false)
        .expect("there is one");
    fleet.pass(3);
    assert_eq!(fleet.running(), ["m/1 on b: ready"]);
    assert_eq!(fleet.controller.nodes()[0].reason, "it is empty");
}

#[test]
fn nodes_that_come_after_the_recovery_are_judged_before_anything_on_them_stops() {
    let mut fleet = restarted_with("[]");
    fleet.pass(RECOVERY_S + 5);
    assert_eq!(fleet.controller.held_since_start(), None);
    fleet.join("a");
    fleet.pass(RECOVERY_S + 5);
    assert_eq!(fleet.running(), ["m/0 on a: ready", "m/1 on b: ready"]);
    let said = fleet.controller.held_since_start().expect("it is held");
    assert!(said.contains("would stop 1 of 1 running"), "{said}");
    fleet.join("b");
    fleet.pass(5);
    assert_eq!(fleet.running(), ["m/0 on a: ready", "m/1 on b: ready"]);
    let said = fleet.controller.held_since_start().expect("it is held");
    assert!(said.contains("would stop 2 of 2 running"), "{said}");
    fleet.controller.configured(true);
    fleet.pass(5);
    assert_eq!(fleet.running(), Vec::<String>::new());
}

#[test]
fn a_start_that_is_held_is_over_with_a_catalog_that_stops_little() {
    let mut fleet = restarted_with("[]");
    fleet.join("a");
    fleet.join("b");
    fleet.pass(RECOVERY_S);
    assert!(fleet.controller.held_since_start().is_some());
    fleet.configure(TWO);
    fleet.controller.configured(false);
    fleet.configure("[]");
    fleet.pass(5);
    assert_eq!(
        fleet.running(),
        Vec::<String>::new(),
        "a reload asks by itself"
    );
}

#[test]
fn a_reload_that_ends_a_hold_while_a_look_begins_stops_nothing() {
    let mut fleet = restarted_with("[]");
    fleet.join("a");
    fleet.join("b");
    fleet.pass(RECOVERY_S);
    assert!(fleet.controller.held_since_start().is_some());
    let (controller, rest) = (fleet.controller.clone(), fleet.rest.clone());
    let reload = move || {
        rest.configure(TWO);
        // It would get in here, were the lock free.
        if let Ok(mut state) = controller.state.try_lock() {
            state.hold.end(false);
        }
    };
    *lock(&fleet.rest.then) = Some(Box::new(reload));
    fleet.controller.look();
    *lock(&fleet.rest.then) = None;
    fleet.controller.configured(false);
    fleet.pass(5);
    assert_eq!(fleet.running(), ["m/0 on a: ready", "m/1 on b: ready"]);
    let told = fleet.log();
    assert!(told.iter().all(|line| line.starts_with("pool")), "{told:?}");
}

#[test]
fn whoever_looks_asks_or_orders_sees_the_fleet_under_the_lock() {
    let fleet = one();
    let (controller, seen) = (fleet.controller.clone(), Arc::new(AtomicU32::new(0)));
    let (counted, asked) = (seen.clone(), fleet.controller.clone());
    let then = move || {
        // Else what it sees would be older than what it finds remembered.
        assert!(asked.state.try_lock().is_err(), "nobody else gets in");
        counted.fetch_add(1, Ordering::Relaxed);
    };
    *lock(&fleet.rest.then) = Some(Box::new(then));
    let none = parse("[]").catalog;
    let uses: [&dyn Fn(); 11] = [
        &|| controller.look(),
        &|| drop(controller.drain("a", None, false)),
        &|| drop(controller.undrain("a")),
        &|| drop(controller.stop("m/0", false)),
        &|| drop(controller.held(&none)),
        &|| drop(controller.snapshot()),
        &|| drop(controller.nodes()),
        &|| drop(controller.replicas()),
        &|| drop(controller.explain("m")),
        &|| drop(controller.waiting()),
        &|| drop(controller.output_of("m/0", 0)),
    ];
    for (number, of) in uses.iter().enumerate() {
        of();
        assert_eq!(seen.load(Ordering::Relaxed) as usize, number + 1);
    }
    *lock(&fleet.rest.then) = None;
}

#[test]
fn what_a_start_holds_is_said_while_the_fleet_is_looked_at() {
    let mut fleet = restarted_with("[]");
    fleet.join("a");
    fleet.join("b");
    fleet.pass(RECOVERY_S);
    let controller = fleet.controller.clone();
    let look = fleet.controller.lock();
    let (said, heard) = mpsc::channel();
    std::thread::spawn(move || said.send(controller.held_since_start()));
    let held = heard.recv_timeout(PATIENCE).expect("it waits for no look");
    assert!(held.is_some_and(|held| held.contains("would stop 2 of 2")));
    drop(look);
}

#[test]
fn a_start_that_stops_half_does_so() {
    let mut fleet = restarted_with(ONE);
    fleet.join("a");
    fleet.join("b");
    fleet.pass(RECOVERY_S + 5);
    assert_eq!(fleet.running(), ["m/0 on a: ready"]);
    assert_eq!(fleet.controller.held_since_start(), None);
}
