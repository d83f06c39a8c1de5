//! What is heard of nodes, in tables: who speaks for a node, who is silent, who is lost, and when nobody is.

use std::sync::Arc;
use std::time::Duration;

use llmgw_proto::inventory::Inventory;
use llmgw_proto::inventory::gpu::{HealthCode, HealthFlag};
use llmgw_proto::session::{
    Goodbye, GpuBeat, Heartbeat, PortRange, RefusalCode, Register, SessionId, ShardReport, Told,
};
use llmgw_proto::shard::{Readiness, ShardSpec, ShardState, ShardStatus};

use super::{Cause, Change, Ignored, NODE_SHARDS_MAX, NodeEvent, NodeTable, ObservedNode, Timing};
use crate::control::snapshot::NodeState;

const TIMING: Timing = Timing {
    heartbeat: Duration::from_secs(5),
    lost_after: Duration::from_secs(60),
    recovery: Duration::from_secs(15),
};
const INVENTORY: &str = include_str!("../../../../tests/recordings/inventory/two-gpus.json");

/// A table and a clock.
struct Heard {
    table: NodeTable,
    now_ms: u64,
}

impl Heard {
    fn new() -> Heard {
        Heard {
            table: NodeTable::new(TIMING, 1_000),
            now_ms: 1_000,
        }
    }

    fn apply(&mut self, event: NodeEvent) -> Vec<Change> {
        self.table.apply(event, self.now_ms)
    }

    /// Lets time pass as the server sees it: a tick a second. Nodes in `alive` send heartbeats.
    fn pass(&mut self, seconds: u64, alive: &[(&str, u64)]) -> Vec<Change> {
        let mut changes = Vec::new();
        for _ in 0..seconds {
            self.now_ms += 1_000;
            for (node, session) in alive {
                changes.extend(self.apply(heartbeat(node, *session)));
            }
            changes.extend(self.apply(NodeEvent::Tick));
        }
        changes
    }

    fn join(&mut self, node: &str, session: u64) -> Vec<Change> {
        self.apply(registered(register(node), session))
    }

    fn ended(&mut self, node: &str, session: u64) -> Vec<Change> {
        self.apply(NodeEvent::Ended {
            node: node.to_owned(),
            session: SessionId(session),
            why: "reset".to_owned(),
        })
    }

    fn node(&self, node: &str) -> &ObservedNode {
        &self.table.observed().nodes[node]
    }

    fn state(&self, node: &str) -> NodeState {
        self.node(node).state
    }
}

fn register(node: &str) -> Register {
    Register {
        node: node.to_owned(),
        agent_version: "0.1.0".to_owned(),
        run: format!("{node}-run"),
        machine: format!("{node}-boot"),
        advertise: "10.0.0.11".to_owned(),
        ports: PortRange {
            first: 21_000,
            last: 21_999,
        },
        engines: vec!["llamacpp".to_owned()],
        models_dir: Some("/models".to_owned()),
        state_dir: "/state".to_owned(),
        draining: false,
        inventory: Told::Unreadable("not told".to_owned()),
        shards: Vec::new(),
    }
}

fn registered(register: Register, session: u64) -> NodeEvent {
    NodeEvent::Registered {
        session: SessionId(session),
        register: Box::new(register),
        certificate: None,
        is_local: false,
    }
}

fn heartbeat(node: &str, session: u64) -> NodeEvent {
    beat(node, session, Heartbeat::default())
}

fn beat(node: &str, session: u64, heartbeat: Heartbeat) -> NodeEvent {
    NodeEvent::Heartbeat {
        node: node.to_owned(),
        session: SessionId(session),
        heartbeat: Box::new(heartbeat),
    }
}

fn spec(shard: &str) -> Arc<ShardSpec> {
    Arc::new(ShardSpec {
        shard: shard.to_owned(),
        replica: "m/0".to_owned(),
        model: "m".to_owned(),
        profile: "cpu".to_owned(),
        definition: "d1".to_owned(),
        rank: 0,
        engine: "llamacpp".to_owned(),
        commands: Vec::new(),
        gpus: Vec::new(),
        cpus: None,
        memory_bytes: None,
        ports: vec![21_000],
        host: "10.0.0.11".to_owned(),
        serves_http: true,
        readiness: Readiness {
            health: "/health".to_owned(),
            models: "/v1/models".to_owned(),
            served_name: "m".to_owned(),
            start_deadline_ms: 1_000,
        },
        slots: None,
        stop_grace_ms: 1_000,
        api_key: None,
    })
}

fn report(shard: &str, state: ShardState, with_spec: bool) -> ShardReport {
    let spec = spec(shard);
    ShardReport {
        status: ShardStatus {
            shard: shard.to_owned(),
            spec_hash: spec.hash(),
            state,
            reason: String::new(),
            exit: None,
            log_tail: Vec::new(),
            since_ms: 7,
            adopted: false,
        },
        spec: with_spec.then_some(spec),
    }
}

fn shard(node: &str, session: u64, report: ShardReport) -> NodeEvent {
    NodeEvent::Shard {
        node: node.to_owned(),
        session: SessionId(session),
        report: Box::new(report),
    }
}

/// The states that nodes went to.
fn states(changes: &[Change]) -> Vec<(&str, NodeState)> {
    changes
        .iter()
        .filter_map(|change| match change {
            Change::State { node, to, .. } => Some((node.as_str(), *to)),
            _ => None,
        })
        .collect()
}

fn refusals(changes: &[Change]) -> Vec<(u64, RefusalCode)> {
    changes
        .iter()
        .filter_map(|change| match change {
            Change::Refused { session, refusal } => Some((session.0, refusal.code)),
            _ => None,
        })
        .collect()
}

fn joins(changes: &[Change]) -> Vec<(u64, bool)> {
    changes
        .iter()
        .filter_map(|change| match change {
            Change::Joined {
                session, is_new, ..
            } => Some((session.0, *is_new)),
            _ => None,
        })
        .collect()
}

#[test]
fn a_registration_brings_all_that_the_node_is_and_runs() {
    let mut heard = Heard::new();
    let inventory: Arc<Inventory> = Arc::new(serde_json::from_str(INVENTORY).unwrap());
    let changes = heard.apply(registered(
        Register {
            inventory: Told::Inventory(inventory.clone()),
            shards: vec![
                report("m/0/0", ShardState::Ready, true),
                report("m/1/0", ShardState::Failed, true),
                report("m/2/0", ShardState::Stopped, true),
            ],
            ..register("n1")
        },
        1,
    ));
    assert_eq!(joins(&changes), [(1, true)]);
    assert_eq!(states(&changes), [("n1", NodeState::Ready)]);
    let node = heard.node("n1");
    assert_eq!(node.inventory, Ok(inventory));
    assert_eq!(node.labels["rack"], "r1");
    let shards: Vec<&str> = node.shards.keys().map(String::as_str).collect();
    assert_eq!(shards, ["m/0/0", "m/1/0"], "what stopped is not there");
}

#[test]
fn a_node_whose_inventory_cannot_be_read_still_says_what_it_runs() {
    let mut heard = Heard::new();
    heard.apply(registered(
        Register {
            shards: vec![report("m/0/0", ShardState::Ready, true)],
            ..register("n1")
        },
        1,
    ));
    assert_eq!(heard.node("n1").inventory, Err("not told".to_owned()));
    assert_eq!(heard.node("n1").shards.len(), 1);
}

#[test]
fn a_newer_session_supersedes_an_older_one_and_the_older_ones_words_change_nothing() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    let changes = heard.join("n1", 2);
    assert_eq!(refusals(&changes), [(1, RefusalCode::Superseded)]);
    assert_eq!(joins(&changes), [(2, false)]);
    assert_eq!(states(&changes), [], "it was ready and is");
    let revision = heard.table.observed().revision;
    let stale = [
        heartbeat("n1", 1),
        shard("n1", 1, report("m/0/0", ShardState::Ready, true)),
        NodeEvent::Goodbye {
            node: "n1".to_owned(),
            session: SessionId(1),
            goodbye: Goodbye {
                reason: "stopped".to_owned(),
                engines_stay: true,
            },
        },
    ];
    for event in stale {
        let changes = heard.apply(event);
        assert!(
            matches!(
                changes[..],
                [Change::Ignored {
                    why: Ignored::NotItsSession,
                    ..
                }]
            ),
            "{changes:?}"
        );
    }
    assert_eq!(heard.ended("n1", 1), [], "its end is the rule");
    assert_eq!(heard.node("n1").session, Some(SessionId(2)));
    assert_eq!(heard.state("n1"), NodeState::Ready);
    assert_eq!(heard.table.observed().revision, revision);
}

#[test]
fn a_session_that_is_older_never_takes_the_node_back_also_after_the_newer_one_ended() {
    let mut heard = Heard::new();
    heard.join("n1", 2);
    for _ in 0..2 {
        let changes = heard.join("n1", 1);
        assert_eq!(refusals(&changes), [(1, RefusalCode::Superseded)]);
        assert_eq!(joins(&changes), []);
        heard.ended("n1", 2);
    }
    assert_eq!(heard.state("n1"), NodeState::Unreachable);
}

#[test]
fn who_may_take_a_node_that_is_connected() {
    // Run, machine and state directory of the newer one, and whether it gets the node.
    let table = [
        ("n1-run", "n1-boot", "/state", true, "the same agent again"),
        ("other", "n1-boot", "/state", true, "one that was restarted"),
        ("other", "n1-boot", "", true, "an older one"),
        ("other", "n1-boot", "/other", false, "another agent"),
        ("other", "other", "/state", false, "another machine"),
        ("other", "", "/state", false, "one of no known machine"),
    ];
    for (run, machine, state_dir, gets_it, what) in table {
        let mut heard = Heard::new();
        heard.join("n1", 1);
        let newer = Register {
            run: run.to_owned(),
            machine: machine.to_owned(),
            state_dir: state_dir.to_owned(),
            ..register("n1")
        };
        let changes = heard.apply(registered(newer.clone(), 2));
        let refused = refusals(&changes);
        match gets_it {
            true => assert_eq!(refused, [(1, RefusalCode::Superseded)], "{what}"),
            false => assert_eq!(refused, [(2, RefusalCode::NodeTaken)], "{what}"),
        }
        assert_eq!(
            heard.node("n1").session,
            Some(SessionId(if gets_it { 2 } else { 1 })),
            "{what}"
        );
        // Once the one that has it is dead, anybody's words count again.
        heard.pass(15, &[]);
        let changes = heard.apply(registered(newer, 3));
        assert_eq!(joins(&changes), [(3, false)], "{what}");
    }
}

#[test]
fn an_older_agent_that_is_replaced_by_a_newer_release_gives_its_node_at_once() {
    let mut heard = Heard::new();
    let older = Register {
        state_dir: String::new(),
        ..register("n1")
    };
    heard.apply(registered(older, 1));
    let changes = heard.join("n1", 2);
    assert_eq!(refusals(&changes), [(1, RefusalCode::Superseded)]);
    assert_eq!(joins(&changes), [(2, false)]);
}

#[test]
fn a_second_agent_of_a_machine_is_told_who_speaks_for_its_node_and_what_to_do() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    let second = Register {
        state_dir: "/other".to_owned(),
        ..register("n1")
    };
    let said = heard.apply(registered(second, 2));
    let [Change::Refused { refusal, .. }] = said.as_slice() else {
        panic!("{said:?}");
    };
    assert_eq!(
        refusal.message,
        "another agent of this machine is connected as `n1` (last heard 0 ms ago), with the state directory `/state`: \
         stop that one, or give this one, with `/other`, another `node`"
    );
}

#[test]
fn a_node_is_dead_after_three_heartbeats_and_lost_after_lost_after() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    assert_eq!(states(&heard.pass(30, &[("n1", 1)])), [], "it lives");
    assert_eq!(states(&heard.pass(14, &[])), []);
    let changes = heard.pass(1, &[]);
    assert_eq!(states(&changes), [("n1", NodeState::Unreachable)]);
    assert!(changes.contains(&Change::Expired {
        node: "n1".to_owned(),
        session: SessionId(1)
    }));
    assert_eq!(
        heard.node("n1").absence.as_ref().unwrap().cause,
        Cause::Silent
    );
    assert_eq!(states(&heard.pass(59, &[])), []);
    assert_eq!(states(&heard.pass(1, &[])), [("n1", NodeState::Lost)]);
    let changes = heard.join("n1", 2);
    assert_eq!(joins(&changes), [(2, true)]);
    assert_eq!(states(&changes), [("n1", NodeState::Ready)]);
    assert_eq!(heard.node("n1").absence, None);
}

#[test]
fn whatever_a_node_says_is_a_sign_of_life() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    for turn in 0..10 {
        heard.pass(10, &[]);
        let state = match turn % 2 {
            0 => ShardState::Loading,
            _ => ShardState::Ready,
        };
        heard.apply(shard("n1", 1, report("m/0/0", state, true)));
    }
    assert_eq!(heard.state("n1"), NodeState::Ready);
}

#[test]
fn a_stream_that_ends_makes_a_node_unreachable_at_once_and_what_it_ran_stays_known() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    heard.apply(shard("n1", 1, report("m/0/0", ShardState::Ready, true)));
    let changes = heard.ended("n1", 1);
    assert_eq!(states(&changes), [("n1", NodeState::Unreachable)]);
    assert_eq!(heard.node("n1").session, None);
    assert_eq!(heard.node("n1").shards.len(), 1, "it goes on serving");
}

#[test]
fn a_goodbye_is_planned_but_a_node_that_stays_away_is_lost_all_the_same() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    let goodbye = Goodbye {
        reason: "SIGTERM".to_owned(),
        engines_stay: true,
    };
    let changes = heard.apply(NodeEvent::Goodbye {
        node: "n1".to_owned(),
        session: SessionId(1),
        goodbye: goodbye.clone(),
    });
    assert_eq!(states(&changes), [("n1", NodeState::Unreachable)]);
    assert_eq!(
        heard.node("n1").absence.as_ref().unwrap().cause,
        Cause::Goodbye(goodbye)
    );
    assert_eq!(heard.ended("n1", 1), [], "the end of its stream is no news");
    assert_eq!(states(&heard.pass(60, &[])), [("n1", NodeState::Lost)]);
}

#[test]
fn an_absent_node_keeps_what_it_was_last_refused_for_until_it_is_back() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    let refused = |session, why: &str| NodeEvent::Dismissed {
        node: "n1".to_owned(),
        session: SessionId(session),
        cause: Cause::Refused(why.to_owned()),
    };
    assert_eq!(heard.apply(refused(9, "no certificate")), []);
    assert!(heard.node("n1").absence.is_none(), "it is there");
    let changes = heard.apply(refused(1, "revoked"));
    assert_eq!(states(&changes), [("n1", NodeState::Unreachable)]);
    let absence = heard.node("n1").absence.clone().unwrap();
    assert_eq!(absence.cause.to_string(), "refused: revoked");
    assert_eq!(heard.apply(refused(2, "expired")), []);
    let absence = heard.node("n1").absence.clone().unwrap();
    assert_eq!(absence.refused.as_deref(), Some("expired"));
    heard.join("n1", 3);
    assert!(heard.node("n1").absence.is_none());
    let unknown = NodeEvent::Dismissed {
        node: "n7".to_owned(),
        session: SessionId(4),
        cause: Cause::Refused("revoked".to_owned()),
    };
    assert_eq!(heard.apply(unknown), []);
    assert!(!heard.table.observed().nodes.contains_key("n7"));
}

#[test]
fn draining_is_the_nodes_own_word_and_outlives_its_session() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    let draining = Heartbeat {
        draining: true,
        ..Heartbeat::default()
    };
    let changes = heard.apply(beat("n1", 1, draining));
    assert_eq!(states(&changes), [("n1", NodeState::Draining)]);
    heard.ended("n1", 1);
    assert!(heard.node("n1").draining);
    heard.apply(registered(
        Register {
            draining: true,
            ..register("n1")
        },
        2,
    ));
    assert_eq!(heard.state("n1"), NodeState::Draining);
    let changes = heard.apply(heartbeat("n1", 2));
    assert_eq!(states(&changes), [("n1", NodeState::Ready)]);
}

/// How many of `nodes` stay away, and whether any of them becomes lost.
fn stay_away(nodes: usize, away: usize, seconds_apart: u64) -> (Heard, Vec<Change>) {
    let mut heard = Heard::new();
    let names: Vec<String> = (0..nodes).map(|n| format!("n{n:02}")).collect();
    for (index, name) in names.iter().enumerate() {
        heard.join(name, index as u64 + 1);
    }
    let mut changes = Vec::new();
    let alive = |from: usize| -> Vec<(&str, u64)> {
        names
            .iter()
            .enumerate()
            .skip(from)
            .map(|(index, name)| (name.as_str(), index as u64 + 1))
            .collect()
    };
    for (gone, name) in names.iter().take(away).enumerate() {
        heard.ended(name, gone as u64 + 1);
        changes.extend(heard.pass(seconds_apart, &alive(gone + 1)));
    }
    changes.extend(heard.pass(300, &alive(away)));
    (heard, changes)
}

#[test]
fn the_brake_holds_where_more_than_half_and_at_least_three_vanish_within_lost_after() {
    // Nodes, how many vanish, seconds between two of them, how many become lost.
    let table = [
        (1, 1, 0, 1, "a single node"),
        (2, 2, 0, 2, "two are fewer than three"),
        (3, 2, 0, 2, "two of three are fewer than three"),
        (3, 3, 0, 0, "all of three"),
        (4, 3, 0, 0, "three of four"),
        (6, 3, 0, 3, "half is not more than half"),
        (5, 3, 0, 0, "three of five"),
        (5, 3, 20, 0, "three of five, not in the same instant"),
        (
            10,
            6,
            5,
            0,
            "the first is not lost before the last is silent",
        ),
        (10, 4, 0, 4, "four of ten"),
        (5, 3, 200, 3, "three of five, one after the other"),
    ];
    for (nodes, away, apart, lost, what) in table {
        let (heard, changes) = stay_away(nodes, away, apart);
        let is_held = changes
            .iter()
            .any(|change| matches!(change, Change::BrakeHeld(_)));
        assert_eq!(
            states(&changes)
                .iter()
                .filter(|(_, state)| *state == NodeState::Lost)
                .count(),
            lost,
            "{what}"
        );
        assert_eq!(is_held, lost == 0, "{what}");
        assert_eq!(heard.table.observed().brake.is_some(), lost == 0, "{what}");
        if let Some(brake) = heard.table.observed().brake {
            assert_eq!((brake.absent, brake.of), (away, nodes), "{what}");
        }
    }
}

#[test]
fn when_the_brake_is_released_those_still_away_have_their_whole_time_again() {
    let (mut heard, _) = stay_away(4, 4, 0);
    assert!(heard.table.observed().brake.is_some());
    heard.join("n00", 11);
    heard.pass(1, &[("n00", 11)]);
    assert!(
        heard.table.observed().brake.is_some(),
        "three of four are away"
    );
    heard.join("n01", 12);
    let alive = [("n00", 11), ("n01", 12)];
    let changes = heard.pass(1, &alive);
    assert!(changes.contains(&Change::BrakeReleased));
    assert_eq!(
        states(&heard.pass(59, &alive)),
        [],
        "they may be on their way"
    );
    let lost = heard.pass(1, &alive);
    assert_eq!(
        states(&lost),
        [("n02", NodeState::Lost), ("n03", NodeState::Lost)]
    );
}

#[test]
fn nodes_that_are_lost_for_long_are_not_counted_by_the_brake() {
    let mut heard = Heard::new();
    for (index, name) in ["a", "b", "c", "d", "e"].iter().enumerate() {
        heard.join(name, index as u64 + 1);
    }
    let alive = [("c", 3), ("d", 4), ("e", 5)];
    for (node, session) in [("a", 1), ("b", 2)] {
        heard.ended(node, session);
    }
    let lost = heard.pass(61, &alive);
    assert_eq!(states(&lost).len(), 2);
    heard.pass(60, &alive);
    // Three of the three that there are: without the rule they would be three of five all the same, so look at the count.
    for (node, session) in alive {
        heard.ended(node, session);
    }
    let changes = heard.pass(60, &[]);
    let brake = heard.table.observed().brake.unwrap();
    assert_eq!((brake.absent, brake.of), (3, 3));
    assert_eq!(states(&changes), []);
}

#[test]
fn nothing_may_be_concluded_until_the_recovery_is_over() {
    let mut heard = Heard::new();
    assert!(heard.table.observed().recovering);
    assert_eq!(heard.pass(14, &[]), []);
    assert!(heard.table.observed().recovering);
    assert_eq!(heard.pass(1, &[]), [Change::Recovered]);
    assert!(!heard.table.observed().recovering);
    assert_eq!(heard.pass(100, &[]), [], "once");
}

#[test]
fn the_recovery_counts_from_the_first_node_that_could_report() {
    for alone_s in [7, 60] {
        let mut heard = Heard::new();
        heard.pass(alone_s, &[]);
        heard.join("a", 1);
        assert!(heard.table.observed().recovering, "after {alone_s} s");
        heard.pass(7, &[("a", 1)]);
        heard.join("b", 2);
        let alive = [("a", 1), ("b", 2)];
        assert_eq!(heard.pass(7, &alive), []);
        assert_eq!(heard.pass(1, &alive), [Change::Recovered]);
        assert!(!heard.table.observed().recovering);
        heard.ended("a", 1);
        heard.ended("b", 2);
        heard.join("a", 3);
        assert!(!heard.table.observed().recovering, "only the first time");
    }
    let none = Timing {
        recovery: Duration::ZERO,
        ..TIMING
    };
    let mut table = NodeTable::new(none, 1_000);
    table.apply(registered(register("a"), 1), 1_000);
    assert!(!table.observed().recovering);
}

#[test]
fn a_clock_that_jumps_or_a_server_that_slept_silences_nobody() {
    for jump_ms in [3_600_000, 1_000_000_000_000] {
        let mut heard = Heard::new();
        heard.join("n1", 1);
        heard.join("n2", 2);
        heard.ended("n2", 2);
        heard.now_ms += jump_ms;
        assert_eq!(heard.apply(NodeEvent::Tick), []);
        assert_eq!(heard.state("n1"), NodeState::Ready);
        assert_eq!(heard.state("n2"), NodeState::Unreachable);
        // And back: time goes on from there.
        heard.now_ms = 500;
        assert_eq!(heard.apply(NodeEvent::Tick), []);
        let changes = heard.pass(10, &[]);
        assert_eq!(states(&changes), [("n1", NodeState::Unreachable)]);
    }
}

#[test]
fn a_status_needs_a_spec_once_and_replaces_the_one_before() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    let unknown = heard.apply(shard("n1", 1, report("m/0/0", ShardState::Ready, false)));
    assert!(
        matches!(
            unknown[..],
            [Change::Ignored {
                why: Ignored::UnknownShard,
                ..
            }]
        ),
        "{unknown:?}"
    );
    let steps = [
        (ShardState::Loading, true, true),
        (ShardState::Ready, false, true),
        (ShardState::Ready, false, false),
    ];
    for (state, with_spec, is_news) in steps {
        let changes = heard.apply(shard("n1", 1, report("m/0/0", state, with_spec)));
        assert_eq!(!changes.is_empty(), is_news, "{state:?}");
        assert_eq!(heard.node("n1").shards["m/0/0"].status.state, state);
    }
    heard.apply(shard("n1", 1, report("m/0/0", ShardState::Stopped, false)));
    assert!(heard.node("n1").shards.is_empty());
}

#[test]
fn a_second_spec_that_a_node_refused_does_not_hide_the_first_one_which_runs() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    heard.apply(shard("n1", 1, report("m/0/0", ShardState::Ready, true)));
    let mut refused = report("m/0/0", ShardState::Failed, true);
    refused.status.spec_hash = "other".to_owned();
    let changes = heard.apply(shard("n1", 1, refused.clone()));
    assert!(
        matches!(
            changes[..],
            [Change::Ignored {
                why: Ignored::OtherSpec,
                ..
            }]
        ),
        "{changes:?}"
    );
    let state = |heard: &Heard| heard.node("n1").shards["m/0/0"].status.state;
    assert_eq!(state(&heard), ShardState::Ready);
    // Once the first one is over, it is news.
    heard.apply(shard("n1", 1, report("m/0/0", ShardState::Failed, false)));
    let changes = heard.apply(shard("n1", 1, refused));
    assert!(
        matches!(changes[..], [Change::Shards { .. }]),
        "{changes:?}"
    );
}

#[test]
fn a_shard_that_a_node_refused_has_failed_there_until_it_is_stopped() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    let mut refused = report("m/0/0", ShardState::Failed, true);
    refused.status.reason = "agent_stops: the agent is being stopped".to_owned();
    let changes = heard.apply(shard("n1", 1, refused.clone()));
    assert!(
        matches!(changes[..], [Change::Shards { .. }]),
        "{changes:?}"
    );
    assert_eq!(
        heard.node("n1").shards["m/0/0"].status.reason,
        refused.status.reason
    );
    heard.apply(shard("n1", 1, report("m/0/0", ShardState::Stopped, false)));
    assert!(heard.node("n1").shards.is_empty());
}

#[test]
fn a_node_that_reports_too_many_shards_keeps_those_that_it_has() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    for number in 0..NODE_SHARDS_MAX {
        let one = report(&format!("m/{number}/0"), ShardState::Ready, true);
        heard.apply(shard("n1", 1, one));
    }
    let changes = heard.apply(shard("n1", 1, report("x/0/0", ShardState::Ready, true)));
    assert!(
        matches!(
            changes[..],
            [Change::Ignored {
                why: Ignored::TooManyShards,
                ..
            }]
        ),
        "{changes:?}"
    );
    let known = heard.apply(shard("n1", 1, report("m/0/0", ShardState::Failed, false)));
    assert_eq!(known.len(), 1);
    assert_eq!(heard.node("n1").shards.len(), NODE_SHARDS_MAX);
}

#[test]
fn a_gpus_health_is_news_and_its_use_alone_is_not() {
    let mut heard = Heard::new();
    let inventory: Arc<Inventory> = Arc::new(serde_json::from_str(INVENTORY).unwrap());
    heard.apply(registered(
        Register {
            inventory: Told::Inventory(inventory.clone()),
            ..register("n1")
        },
        1,
    ));
    let said = |used_mib, health: &[HealthFlag]| Heartbeat {
        gpus: vec![GpuBeat {
            uuid: "GPU-0b".to_owned(),
            used_mib,
            health: health.to_vec(),
        }],
        ..Heartbeat::default()
    };
    let before = heard.table.observed().revision;
    assert_eq!(heard.apply(beat("n1", 1, said(Some(70_000), &[]))), []);
    assert_eq!(heard.table.observed().revision, before);
    let ill = [HealthFlag {
        code: HealthCode::UncorrectedEcc,
        reason: "2 uncorrected errors".to_owned(),
    }];
    let changes = heard.apply(beat("n1", 1, said(None, &ill)));
    assert!(
        matches!(changes[..], [Change::Inventory { .. }]),
        "{changes:?}"
    );
    let now = heard.node("n1").inventory.as_ref().unwrap();
    assert_eq!(now.gpus.devices[1].health, ill);
    assert_eq!(now.gpus.devices[1].memory.used_mib.value(), None);
    assert_eq!(now.gpus.devices[0], inventory.gpus.devices[0]);
}

#[test]
fn a_node_that_is_lost_for_a_day_is_forgotten() {
    let mut heard = Heard::new();
    heard.join("n1", 1);
    heard.ended("n1", 1);
    let mut changes = Vec::new();
    for _ in 0..(24 * 60 * 60 + 70) / 5 {
        heard.now_ms += 5_000;
        changes.extend(heard.apply(NodeEvent::Tick));
    }
    assert!(changes.contains(&Change::Forgotten {
        node: "n1".to_owned()
    }));
    assert!(heard.table.observed().nodes.is_empty());
}

#[test]
fn a_full_table_makes_room_by_forgetting_who_is_lost_the_longest_and_else_refuses() {
    use crate::control::snapshot::NODES_MAX;
    let mut heard = Heard::new();
    for number in 0..NODES_MAX {
        heard.join(&format!("n{number}"), number as u64 + 1);
    }
    let changes = heard.join("one-more", 20_000);
    assert_eq!(refusals(&changes), [(20_000, RefusalCode::Full)]);
    heard.ended("n7", 8);
    let alive: Vec<(String, u64)> = (0..NODES_MAX)
        .filter(|number| *number != 7)
        .map(|number| (format!("n{number}"), number as u64 + 1))
        .collect();
    for _ in 0..7 {
        heard.now_ms += 5_000;
        for (node, session) in &alive {
            heard.apply(heartbeat(node, *session));
        }
        heard.apply(NodeEvent::Tick);
        heard.now_ms += 5_000;
        heard.apply(NodeEvent::Tick);
    }
    assert_eq!(heard.state("n7"), NodeState::Lost);
    let changes = heard.join("one-more", 20_001);
    assert!(changes.contains(&Change::Forgotten {
        node: "n7".to_owned()
    }));
    assert_eq!(joins(&changes), [(20_001, true)]);
}

#[test]
fn a_shorter_heartbeat_is_for_the_sessions_that_are_told_it() {
    let mut heard = Heard::new();
    heard.join("a", 1);
    heard.pass(4, &[]);
    heard.table.set_timing(Timing {
        heartbeat: Duration::from_secs(1),
        ..TIMING
    });
    heard.join("b", 2);
    heard.pass(2, &[]);
    let now = (heard.state("a"), heard.state("b"));
    assert_eq!(now, (NodeState::Ready, NodeState::Ready));
    heard.pass(1, &[]);
    let now = (heard.state("a"), heard.state("b"));
    assert_eq!(now, (NodeState::Ready, NodeState::Unreachable));
    heard.pass(8, &[]);
    assert_eq!(
        heard.state("a"),
        NodeState::Unreachable,
        "15 s after its last word"
    );
}
