//! What is remembered: how failures add up and when they are forgotten, refused ports, starts that are repeated.

use std::sync::Arc;

use llmgw_proto::session::SessionId;
use llmgw_proto::shard::ShardState::{Failed, Ready};

use super::{
    AVOIDED_NODES_MAX, BACKOFF_MAX_MS, BACKOFF_RESET_AFTER_MS, FAILURES_KEPT_MAX, Failure, Memory,
    PORT_REFUSED_MS, Start,
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

fn told(memory: &mut Memory, now_ms: u64) -> Vec<String> {
    let news = memory.take_news(now_ms).into_iter();
    news.map(|news| format!("{}: {news}", news.code()))
        .collect()
}

#[test]
fn a_failure_is_told_once_with_when_the_next_attempt_is() {
    let mut memory = Memory::default();
    memory.observe(&Nodes::new(&["a", "b"]).with("a", "m/0", Ready).0);
    let failure = failed("a", 1, "exited: it exited with status 1");
    memory.observe(&failure);
    memory.observe(&failure);
    assert_eq!(
        told(&mut memory, NOW_MS + 1),
        ["exited: failed: exited: it exited with status 1; next attempt in 5 s"]
    );
    memory.observe(&failure);
    assert!(told(&mut memory, NOW_MS + 2).is_empty());
    memory.observe(&Nodes::new(&["a", "b"]).with("a", "m/0", Ready).0);
    memory.observe(&failed("a", 2, "rebooted: it ended with its machine"));
    assert_eq!(
        told(&mut memory, NOW_MS + 10_000),
        ["rebooted: failed: rebooted: it ended with its machine; the next attempt is made now"]
    );
}

#[test]
fn what_failed_before_the_server_saw_it_run_is_no_new_failure() {
    let mut memory = Memory::default();
    memory.observe(&failed("a", 1, "Gone.\nERROR it left no word"));
    let news = memory.take_news(NOW_MS + 1);
    let [news] = &news[..] else {
        panic!("it is one: {news:?}");
    };
    assert!(news.is_old);
    assert_eq!(news.code(), "other");
    let said = news.to_string();
    let line = "had failed before this server saw it run: Gone.?ERROR it left no word; ";
    assert!(said.starts_with(line), "{said}");
    assert_eq!(
        wait_ms(&memory, NOW_MS + 1),
        5_000,
        "it counts all the same"
    );
    // What was told to start there is the server's own, though it failed before anything else was heard of it.
    let mut memory = Memory::default();
    let start = Start {
        spec: Arc::new(spec("m/0")),
        sent_ms: NOW_MS,
        session: SessionId(1),
    };
    memory.start("a", start);
    memory.observe(&failed("a", 1, "executable_missing: `x` is not there"));
    assert!(!memory.take_news(NOW_MS)[0].is_old);
}

#[test]
fn each_attempt_in_a_row_that_fails_doubles_the_wait_up_to_five_minutes() {
    let mut memory = Memory::default();
    let mut waits = Vec::new();
    let mut at = 1;
    for _ in 1..=8 {
        memory.observe(&failed("a", at, "exited: it exited with status 1"));
        let wait = wait_ms(&memory, NOW_MS + at);
        // The same report again is no second failure.
        memory.observe(&failed("a", at, "exited: it exited with status 1"));
        assert_eq!(wait_ms(&memory, NOW_MS + at), wait);
        waits.push(wait / 1_000);
        at += wait;
    }
    assert_eq!(waits, [5, 10, 20, 40, 80, 160, 300, 300]);
    assert_eq!(BACKOFF_MAX_MS, 300_000);
    memory.observe(&failed("b", at, ""));
    let failures = memory.failures("m").expect("it failed");
    assert_eq!(failures.kept.len(), FAILURES_KEPT_MAX);
    let last = failures.kept.back().expect("there are some");
    assert_eq!(
        (last.node.as_deref(), &*last.reason),
        (Some("b"), "the agent gave no reason")
    );
    assert_eq!(memory.avoid("m"), ["a", "b"]);
}

/// So many replicas of `m` failed on `a` at once.
fn failed_at_once(number: u64, since_ms: u64, reason: &str) -> Observed {
    let nodes = (0..number).fold(Nodes::new(&["a", "b"]), |nodes, at| {
        nodes.with("a", &format!("m/{at}"), Failed)
    });
    let nodes = nodes.later(since_ms).edit("a", |node| {
        for shard in node.shards.values_mut() {
            shard.status.reason = reason.to_owned();
            shard.status.since_ms = since_ms;
        }
    });
    nodes.0
}

#[test]
fn what_one_event_takes_is_one_failure_of_a_row_and_all_of_it_waits() {
    let mut memory = Memory::default();
    memory.observe(&failed_at_once(8, 1, "exited: it was killed by signal 9"));
    assert_eq!(wait_ms(&memory, NOW_MS + 1), 5_000);
    let failures = memory.failures("m").expect("it failed");
    assert_eq!((failures.row, failures.held_back(NOW_MS + 1)), (1, 8));
    assert_eq!(memory.avoid("m"), ["a"]);
    // One that fails while the others wait makes nobody wait for longer.
    memory.observe(&failed("b", 2_000, "exited"));
    assert_eq!(wait_ms(&memory, NOW_MS + 2_000), 3_001);
    let failures = memory.failures("m").expect("it failed");
    assert_eq!(failures.held_back(NOW_MS + 2_000), 9);
    assert_eq!(failures.held_back(NOW_MS + 5_001), 0);
    assert_eq!(memory.avoid("m"), ["a", "b"]);
    memory.observe(&failed_at_once(8, 5_001, "exited"));
    assert_eq!(wait_ms(&memory, NOW_MS + 5_001), 10_000);
}

#[test]
fn a_reboot_says_nothing_about_the_model_and_stays_visible() {
    let mut memory = Memory::default();
    let reason = "rebooted: the node was started anew, so nothing of it runs any more";
    memory.observe(&failed_at_once(8, 1, reason));
    assert_eq!(wait_ms(&memory, NOW_MS), 0);
    assert!(memory.avoid("m").is_empty());
    assert_eq!(memory.failures("m").expect("it is kept").kept.len(), 8);
    let later = 60 * 60 * 1_000;
    memory.observe(&failed("a", later, "exited"));
    assert_eq!(wait_ms(&memory, NOW_MS + later), 5_000);
}

#[test]
fn of_many_nodes_where_a_model_failed_the_latest_are_avoided() {
    let mut memory = Memory::default();
    for at in 0..=AVOIDED_NODES_MAX {
        let failure = Failure {
            replica: "m/0".to_owned(),
            profile: "p".to_owned(),
            node: Some(format!("n{at}")),
            at_ms: NOW_MS,
            reason: "exited".to_owned(),
            lines: Vec::new(),
        };
        memory.failed("m", failure, NOW_MS);
    }
    let avoided = memory.avoid("m");
    assert_eq!(avoided.len(), AVOIDED_NODES_MAX);
    assert_eq!(avoided[0], "n1");
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
    assert_eq!(memory.refused_ports("a").collect::<Vec<_>>(), [21_000]);
    assert_eq!(memory.refused_ports("b").count(), 0);
    memory.observe(&failed("a", 4, "port_taken: 21000 is used by pid 7"));
    assert!(wait_ms(&memory, NOW_MS + 4) > 0);
    memory.observe(&Nodes::new(&["a"]).later(4 + PORT_REFUSED_MS).0);
    assert_eq!(memory.refused_ports("a").count(), 0);
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
