//! Hosts that can't reach each other: a node that is cut off without a word, a server that is, and what is left when they are back.
//!
//! Each process has a host of its own, see [`Net`]; all waits are for what is to happen, and have a limit.

#[path = "harness/fleet.rs"]
mod fleet;
mod harness;

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use fleet::net::{self, Net};
use fleet::{Engine, Fleet, IMPATIENT, NODES, Plan, Program, SERVER, WATCHFUL, is_alive, models};
use harness::{Client, chat};

const THREE: [&str; 3] = ["n1", "n2", "n3"];
/// For bytes to arrive where nothing is in their way, and for silence to be believed where something is.
const SILENCE: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(60);

/// A fleet with a host for each process, and this many replicas of the model `fake` with one slot each.
fn hosts(nodes: &'static [&'static str], timing: &'static str, replicas: usize) -> Fleet {
    let mut fleet = Fleet::of(Plan {
        nodes,
        net: Some(Net::new(SERVER + 1 + nodes.len())),
        has_tls: true,
        ..Plan::new(timing, Program::Fake)
    });
    fleet.declare(&models(&[("fake", replicas)]));
    fleet.ready(replicas);
    fleet
}

fn cut(fleet: &Fleet, host: usize) {
    fleet.net.as_ref().unwrap().cut(host);
}

fn heal(fleet: &Fleet, host: usize) {
    fleet.net.as_ref().unwrap().heal(host);
}

/// Both ends say that they lost each other.
fn until_noticed(fleet: &Fleet, node: &str) {
    fleet.until("the server misses the node", |fleet| {
        let unreachable = format!("node `{node}` is unreachable: ");
        fleet.said("server").contains(&unreachable)
    });
    fleet.until("the agent misses the server", |fleet| {
        fleet.said(node).contains("no session with ")
    });
}

/// Asks an engine from the node that it is on.
fn asserts_serving(fleet: &Fleet, engine: &Engine) {
    let environment = std::fs::read(format!("/proc/{}/environ", engine.pid)).unwrap();
    let mut variables = environment.split(|byte| *byte == 0);
    let key = variables.find_map(|variable| variable.strip_prefix(b"LLAMA_API_KEY="));
    let key = format!("Bearer {}", String::from_utf8_lossy(key.unwrap()));
    let address: SocketAddr = engine.address.parse().unwrap();
    let mut client = fleet.on_node(&engine.node, || Client::new(address));
    let headers = [
        ("content-type", "application/json"),
        ("authorization", &key),
    ];
    let body = chat(false);
    client.request("POST", "/v1/chat/completions", &headers, body.as_bytes());
    let answer = client.answer();
    assert_eq!(answer.status(), 200, "{}", answer.text());
}

/// Each ready replica has one engine, nothing else runs, and nothing else listens on a node.
fn asserts_tidy(fleet: &Fleet, nodes: &[&str]) {
    let replicas = fleet.replicas();
    fleet.until("only what is wanted runs", |fleet| {
        fleet.engines().len() == replicas.len()
    });
    let engines = fleet.engines();
    for replica in &replicas {
        let of_it = engines.iter().filter(|engine| {
            let is_its = engine.shard == format!("{}/0", replica.id);
            is_its && engine.node == replica.node && engine.address == replica.address
        });
        assert_eq!(of_it.count(), 1, "{replica:?}: {engines:#?}");
    }
    for node in nodes {
        let wanted = engines.iter().filter(|engine| engine.node == *node);
        let wanted: BTreeSet<u16> = wanted.map(port).collect();
        let listening = fleet.on_node(node, net::listening);
        assert_eq!(listening, wanted, "{node}: {engines:#?}");
    }
}

fn port(engine: &Engine) -> u16 {
    let address: SocketAddr = engine.address.parse().unwrap();
    address.port()
}

fn retries(fleet: &Fleet) -> f64 {
    let page = fleet.metrics();
    let mut lines = page.lines();
    let value = lines.find_map(|line| line.strip_prefix("llmgw_retries_total{model=\"fake\"} "));
    value.map_or(0.0, |value| value.parse().unwrap())
}

#[test]
fn hosts_reach_each_other_and_one_that_is_cut_off_is_told_nothing() {
    if !net::is_possible("hosts_reach_each_other_and_one_that_is_cut_off_is_told_nothing") {
        return;
    }
    let net = Net::new(2);
    let addresses: [IpAddr; 2] = [Net::address(1).into(), Net::address6(1).into()];
    for address in addresses {
        let listener = net.on(1, || TcpListener::bind((address, 8_000)).unwrap());
        let mut near = net.on(0, || TcpStream::connect((address, 8_000)).unwrap());
        let (mut far, _) = listener.accept().unwrap();
        let mut byte = [0];
        for stream in [&near, &far] {
            stream.set_read_timeout(Some(SILENCE)).unwrap();
        }
        net.cut(1);
        near.write_all(b"x").unwrap();
        far.write_all(b"y").unwrap();
        for stream in [&mut near, &mut far] {
            let read = stream.read(&mut byte).unwrap_err();
            assert_eq!(read.kind(), ErrorKind::WouldBlock, "{address}");
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        net.heal(1);
        near.read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"y");
        far.read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"x");
    }
}

#[test]
fn a_node_that_is_cut_off_is_missed_on_both_ends_replaced_and_nothing_runs_twice_when_it_is_back() {
    if !net::is_possible(
        "a_node_that_is_cut_off_is_missed_on_both_ends_replaced_and_nothing_runs_twice_when_it_is_back",
    ) {
        return;
    }
    let fleet = hosts(&NODES, IMPATIENT, 2);
    assert_eq!(fleet.spread(), [1, 1]);
    let engines = fleet.engines();
    let alone = engines.iter().find(|engine| engine.node == "n1").unwrap();

    cut(&fleet, fleet.host("n1"));
    until_noticed(&fleet, "n1");
    asserts_serving(&fleet, alone);
    fleet.until("the node is lost", |fleet| fleet.node_state("n1") == "lost");
    fleet.until("its replica is replaced", |fleet| {
        let replicas = fleet.replicas().into_iter();
        let ready = replicas.filter(|row| row.node == "n2" && row.state == "ready");
        ready.count() == 2
    });
    fleet.asserts_chat();
    asserts_serving(&fleet, alone);
    assert_eq!(fleet.starts().len(), 3, "{:#?}", fleet.starts());

    heal(&fleet, fleet.host("n1"));
    fleet.until("the node is back", |fleet| {
        fleet.node_state("n1") == "ready"
    });
    fleet.ready(2);
    asserts_tidy(&fleet, &NODES);
    fleet.asserts_chat();
    assert_eq!(fleet.starts().len(), 3, "{:#?}", fleet.starts());
}

#[test]
fn a_cut_that_is_over_before_the_node_is_lost_moves_nothing() {
    if !net::is_possible("a_cut_that_is_over_before_the_node_is_lost_moves_nothing") {
        return;
    }
    let fleet = hosts(&NODES, WATCHFUL, 2);
    let (replicas, engines) = (fleet.replicas(), fleet.engines());
    cut(&fleet, fleet.host("n1"));
    until_noticed(&fleet, "n1");
    assert_eq!(fleet.node_state("n1"), "unreachable");
    heal(&fleet, fleet.host("n1"));
    fleet.until("the node is back", |fleet| {
        fleet.node_state("n1") == "ready"
    });
    fleet.ready(2);
    assert_eq!(fleet.replicas(), replicas);
    assert_eq!(
        (fleet.starts(), fleet.engines()),
        (engines.clone(), engines)
    );
    asserts_tidy(&fleet, &NODES);
}

#[test]
fn a_server_that_is_cut_off_from_all_nodes_blames_itself_and_moves_nothing() {
    if !net::is_possible("a_server_that_is_cut_off_from_all_nodes_blames_itself_and_moves_nothing")
    {
        return;
    }
    let fleet = hosts(&THREE, IMPATIENT, 3);
    assert_eq!(fleet.spread(), [1, 1, 1]);
    let (replicas, engines) = (fleet.replicas(), fleet.engines());
    cut(&fleet, SERVER);
    // Said when the first of them would be lost.
    fleet.until("the brake holds", |fleet| {
        let reason = "3 of 3 nodes vanished at once: this is taken for the server's own trouble";
        fleet.said("server").contains(reason)
    });
    for node in THREE {
        until_noticed(&fleet, node);
        assert_eq!(fleet.node_state(node), "unreachable");
    }
    engines
        .iter()
        .for_each(|engine| asserts_serving(&fleet, engine));
    heal(&fleet, SERVER);
    fleet.until("all nodes are back", |fleet| {
        THREE.iter().all(|node| fleet.node_state(node) == "ready")
    });
    fleet.until("the brake is let go", |fleet| {
        fleet.said("server").contains("most nodes are back")
    });
    fleet.ready(3);
    fleet.asserts_chat();
    assert_eq!(fleet.replicas(), replicas);
    assert_eq!(
        (fleet.starts(), fleet.engines()),
        (engines.clone(), engines)
    );
    asserts_tidy(&fleet, &THREE);
}

#[test]
fn a_request_that_a_cut_off_replica_has_is_answered_by_another_one() {
    if !net::is_possible("a_request_that_a_cut_off_replica_has_is_answered_by_another_one") {
        return;
    }
    let fleet = hosts(&NODES, WATCHFUL, 2);
    assert_eq!(fleet.spread(), [1, 1]);
    // One slot each: two at once are on both, and leave a connection to each.
    let both = || {
        let mut clients = [0, 1].map(|_| fleet.ask(&chat(true), r#"{"tokens":3,"token_ms":50}"#));
        for client in &mut clients {
            client.stream.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        clients
    };
    for client in both() {
        fleet::asserts_whole(headed(client));
    }
    assert_eq!(retries(&fleet), 0.0);
    cut(&fleet, fleet.host("n1"));
    for client in both() {
        fleet::asserts_whole(headed(client));
    }
    assert_eq!(retries(&fleet), 1.0, "{}", fleet.story());
    assert!(is_alive(fleet.engines()[0].pid) && is_alive(fleet.engines()[1].pid));
}

fn headed(mut client: Client) -> Client {
    let head = client.head();
    assert_eq!(head.status, 200, "{head:?}");
    client
}
