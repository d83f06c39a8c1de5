//! What is remembered: how failures add up and when they are forgotten, refused ports, starts that are repeated.

use std::sync::Arc;

use llmgw_proto::session::SessionId;
use llmgw_proto::shard::ShardState::{Failed, Ready};

use super::{
    BACKOFF_MAX_MS, BACKOFF_RESET_AFTER_MS, FAILURES_KEPT_MAX, Memory, PORT_REFUSED_MS, Start,
};
use crate::control::observed::Observed;
use crate::control::tests::nodes::{Nodes, spec};

const NOW_MS: u64 = 1_000_000;

/// `m/0` failed on a node at that moment of the agent's clock, for that reason.
fn failed(node: &str, since_ms: u64, reason: &str) -> Observed {
    let nodes = Nodes::new(&["a", "b"])
        .with(node, "m/0", Failed)
        .later(since_ms);
    let nodes = nodes.edit(node, |node| {
        let shard = node.shards.get_mut("m/0/0").expect("it is there");
        shard.status.reason = reason.to_owned();
        shard.status.since_ms = since_ms;
    });
    nodes.0
}

fn wait_ms(memory: &Memory, now_ms: u64) -> u64 {
    let failures = memory.failures("m").expect("it failed");
    failures.not_before_ms.saturating_sub(now_ms)
}

#[test]
fn each_failure_in_a_row_doubles_the_wait_up_to_five_minutes() {
    let mut memory = Memory::default();
    let mut waits = Vec::new();
    for at in 1..=8 {
        memory.observe(&failed("a", at, "exited: it exited with status 1"));
        waits.push(wait_ms(&memory, NOW_MS + at) / 1_000);
        // The same report again is no second failure.
        memory.observe(&failed("a", at, "exited: it exited with status 1"));
    }
    assert_eq!(waits, [5, 10, 20, 40, 80, 160, 300, 300]);
    assert_eq!(wait_ms(&memory, NOW_MS + 8), BACKOFF_MAX_MS);
    memory.observe(&failed("b", 9, ""));
    let failures = memory.failures("m").expect("it failed");
    assert_eq!(failures.kept.len(), FAILURES_KEPT_MAX);
    let last = failures.kept.back().expect("there are some");
    assert_eq!(
        (last.node.as_deref(), &*last.reason),
        (Some("b"), "the agent gave no reason")
    );
    assert_eq!(memory.avoid("m"), ["a", "b"]);
}

#[test]
fn a_row_ends_after_a_minute_of_one_that_began_after_the_last_failure() {
    let mut memory = Memory::default();
    let healthy = |later| Nodes::new(&["a", "b"]).with("b", "m/1", Ready).later(later);
    memory.observe(&healthy(0).0);
    memory.observe(&failed("a", 1, "exited"));
    // The other replica was ready before, which says nothing about this failure.
    memory.observe(&healthy(2 * BACKOFF_RESET_AFTER_MS).0);
    assert_eq!(memory.failures("m").unwrap().row, 1);
    let again = |later| healthy(later).with("a", "m/0", Ready);
    let from = 2 * BACKOFF_RESET_AFTER_MS;
    memory.observe(&again(from).0);
    memory.observe(&again(from + BACKOFF_RESET_AFTER_MS - 1).0);
    assert_eq!(memory.failures("m").unwrap().row, 1);
    memory.observe(&again(from + BACKOFF_RESET_AFTER_MS).0);
    assert_eq!(memory.failures("m").unwrap().row, 0);
    assert!(memory.avoid("m").is_empty());
    assert_eq!(
        memory.failures("m").unwrap().kept.len(),
        1,
        "it stays visible"
    );
}

#[test]
fn a_taken_port_is_left_alone_and_only_many_of_them_make_the_model_wait() {
    let mut memory = Memory::default();
    for at in 1..=3 {
        memory.observe(&failed("a", at, "port_taken: 21000 is used by pid 7"));
        assert_eq!(wait_ms(&memory, NOW_MS), 0, "refusal {at}");
    }
    assert!(memory.is_port_refused("a", 21_000));
    assert!(!memory.is_port_refused("b", 21_000));
    memory.observe(&failed("a", 4, "port_taken: 21000 is used by pid 7"));
    assert!(wait_ms(&memory, NOW_MS + 4) > 0);
    memory.observe(&Nodes::new(&["a"]).later(4 + PORT_REFUSED_MS).0);
    assert!(!memory.is_port_refused("a", 21_000));
}

#[test]
fn a_start_is_repeated_to_the_nodes_next_session_only() {
    let mut memory = Memory::default();
    let start = Start {
        spec: Arc::new(spec("m/0")),
        sent_ms: NOW_MS,
        session: SessionId(0),
    };
    memory.start("a", start);
    let nodes = Nodes::new(&["a"]);
    assert!(memory.starts_to_repeat(&nodes.0).is_empty());
    let next = nodes.edit("a", |node| node.session = Some(SessionId(7)));
    let again = memory.starts_to_repeat(&next.0);
    assert_eq!(again.len(), 1);
    assert_eq!((&*again[0].0, again[0].1), ("a", SessionId(7)));
    assert!(memory.starts_to_repeat(&next.0).is_empty());
}
