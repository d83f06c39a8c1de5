//! Sessions over real sockets: agents as they should be, as they may be, and as they must not hurt anybody.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use llmgw_proto::convert::Framed;
use llmgw_proto::link::{self, Dialled, Heard, Hearing, KeepAlive};
use llmgw_proto::session::{
    AgentMessage, DrainNode, Goodbye, Heartbeat, LogChunk, PortRange, RefusalCode, Register,
    ServerMessage, SessionId, ShardReport, Told,
};
use llmgw_proto::shard::{LogLine, Readiness, ShardCommand, ShardSpec, ShardState, ShardStatus};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::connection::{self, Shared};
use super::door::Gate;
use super::keeper::Input;
use super::seats::Seats;
use super::strangers::{STRANGERS_OF_ADDRESS_MAX, Strangers};
use super::{Door, Sessions, SessionsOptions, TailError};
use crate::control::observed::{Cause, Commands, NodeEvent, NotSent, Observed, Timing};
use crate::control::snapshot::NodeState;

mod identity;

/// No test waits for longer; none waits for less than the event that it waits for.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server with times that suit tests of what does not take time.
fn quiet() -> SessionsOptions {
    SessionsOptions::new(
        Timing {
            heartbeat: Duration::from_secs(60),
            lost_after: Duration::from_secs(600),
            recovery: Duration::ZERO,
        },
        false,
    )
}

/// A server that soon finds out who is silent, by heartbeats alone.
fn quick() -> SessionsOptions {
    let mut options = quiet();
    options.timing.heartbeat = Duration::from_millis(100);
    options.keep_alive = KeepAlive {
        interval: PATIENCE,
        timeout: PATIENCE,
    };
    options
}

struct Server {
    sessions: Arc<Sessions>,
    address: SocketAddr,
    observed: watch::Receiver<Arc<Observed>>,
}

impl Server {
    async fn start(options: SessionsOptions) -> Server {
        Server::behind(Door::Plain, options).await
    }

    async fn behind(door: Door, options: SessionsOptions) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let sessions = Sessions::start(listener, door, options);
        let observed = sessions.observed();
        Server {
            sessions,
            address,
            observed,
        }
    }

    /// Waits until what is known of the nodes is so.
    async fn until(&mut self, what: &str, is_so: impl Fn(&Observed) -> bool) -> Arc<Observed> {
        let waiting = self.observed.wait_for(|observed| is_so(observed));
        match tokio::time::timeout(PATIENCE, waiting).await {
            Ok(observed) => observed.unwrap().clone(),
            Err(_) => panic!("it never came to this: {what}"),
        }
    }

    async fn until_state(&mut self, node: &str, state: NodeState) -> Arc<Observed> {
        let what = format!("{node} is {}", state.as_str());
        let is_so = |observed: &Observed| {
            let found = observed.nodes.get(node);
            found.is_some_and(|found| found.state == state)
        };
        self.until(&what, is_so).await
    }

    async fn agent(&self, node: &str) -> Agent {
        let mut agent = Agent::dial(self.address, register(node)).await;
        let Framed { session, message } = agent.hear().await;
        assert!(matches!(message, ServerMessage::Welcome(_)), "{message:?}");
        agent.session = session;
        agent
    }
}

/// A fake agent.
struct Agent {
    session: SessionId,
    up: mpsc::Sender<Framed<AgentMessage>>,
    heard: Hearing<ServerMessage>,
    _dialled: Dialled,
}

impl Agent {
    async fn dial(address: SocketAddr, first: AgentMessage) -> Agent {
        let socket = TcpStream::connect(address).await.unwrap();
        Agent::over(socket, first).await
    }

    /// Over a socket that is connected.
    async fn over<S>(socket: S, first: AgentMessage) -> Agent
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let keep_alive = KeepAlive {
            interval: PATIENCE,
            timeout: PATIENCE,
        };
        let (up, outgoing) = mpsc::channel(64);
        let message = Framed {
            session: SessionId(0),
            message: first,
        };
        up.send(message).await.unwrap();
        let (heard, dialled) = link::dial(socket, keep_alive, outgoing).await.unwrap();
        Agent {
            session: SessionId(0),
            up,
            heard,
            _dialled: dialled,
        }
    }

    async fn say(&self, message: AgentMessage) {
        let session = self.session;
        self.up.send(Framed { session, message }).await.unwrap();
    }

    async fn hear(&mut self) -> Framed<ServerMessage> {
        match tokio::time::timeout(PATIENCE, self.heard.next()).await {
            Ok(Heard::Message(framed)) => framed,
            other => panic!("no message: {other:?}"),
        }
    }

    async fn refused(&mut self) -> RefusalCode {
        match self.hear().await.message {
            ServerMessage::Refused(refusal) => refusal.code,
            other => panic!("no refusal: {other:?}"),
        }
    }

    async fn hear_the_end(&mut self) {
        match tokio::time::timeout(PATIENCE, self.heard.next()).await {
            Ok(Heard::End | Heard::Broken(_)) => {}
            other => panic!("no end: {other:?}"),
        }
    }
}

fn register(node: &str) -> AgentMessage {
    AgentMessage::Register(Box::new(Register {
        node: node.to_owned(),
        agent_version: "0.1.0".to_owned(),
        run: "run".to_owned(),
        machine: String::new(),
        advertise: "127.0.0.1".to_owned(),
        ports: PortRange {
            first: 21_000,
            last: 21_999,
        },
        engines: Vec::new(),
        models_dir: None,
        state_dir: String::new(),
        draining: false,
        inventory: Told::Unreadable(String::new()),
        shards: Vec::new(),
    }))
}

fn spec(shard: &str, args: Vec<String>) -> Arc<ShardSpec> {
    Arc::new(ShardSpec {
        shard: shard.to_owned(),
        replica: "m/0".to_owned(),
        model: "m".to_owned(),
        profile: "cpu".to_owned(),
        definition: String::new(),
        rank: 0,
        engine: "llamacpp".to_owned(),
        commands: vec![ShardCommand {
            executable: "llama-server".to_owned(),
            args,
            env: std::collections::BTreeMap::new(),
            wait_for: None,
            sidecar: false,
        }],
        gpus: Vec::new(),
        cpus: None,
        memory_bytes: None,
        ports: Vec::new(),
        host: "127.0.0.1".to_owned(),
        serves_http: false,
        readiness: Readiness {
            health: String::new(),
            models: String::new(),
            served_name: String::new(),
            start_deadline_ms: 1,
        },
        slots: None,
        stop_grace_ms: 1,
        api_key: None,
    })
}

fn status(shard: &str, state: ShardState, since_ms: u64) -> AgentMessage {
    let spec = spec(shard, Vec::new());
    AgentMessage::ShardStatus(Box::new(ShardReport {
        status: ShardStatus {
            shard: shard.to_owned(),
            spec_hash: spec.hash(),
            state,
            reason: String::new(),
            exit: None,
            log_tail: Vec::new(),
            since_ms,
            adopted: false,
        },
        spec: Some(spec),
    }))
}

#[tokio::test]
async fn an_agent_registers_reports_and_leaves_with_a_goodbye() {
    let mut server = Server::start(quiet()).await;
    let agent = server.agent("n1").await;
    let observed = server.until_state("n1", NodeState::Ready).await;
    assert_eq!(observed.nodes["n1"].session, Some(agent.session));
    agent.say(status("m/0/0", ShardState::Ready, 1)).await;
    let draining = Heartbeat {
        draining: true,
        ..Heartbeat::default()
    };
    agent.say(AgentMessage::Heartbeat(Box::new(draining))).await;
    let observed = server.until_state("n1", NodeState::Draining).await;
    let shard = &observed.nodes["n1"].shards["m/0/0"];
    assert_eq!(shard.status.state, ShardState::Ready);
    let goodbye = Goodbye {
        reason: "told to stop".to_owned(),
        engines_stay: true,
    };
    agent.say(AgentMessage::Goodbye(goodbye.clone())).await;
    let Agent { up, mut heard, .. } = agent;
    drop(up);
    assert!(matches!(heard.next().await, Heard::End));
    let observed = server.until_state("n1", NodeState::Unreachable).await;
    let absence = observed.nodes["n1"].absence.as_ref().unwrap();
    assert_eq!(absence.cause, Cause::Goodbye(goodbye));
}

#[tokio::test]
async fn a_stream_that_ends_without_a_goodbye_is_a_node_that_was_lost() {
    let mut options = quiet();
    options.timing.lost_after = Duration::from_secs(1);
    let mut server = Server::start(options).await;
    drop(server.agent("n1").await);
    // A test that is held up for that long sees the end alone.
    let is_missed = |observed: &Observed| {
        let node = observed.nodes.get("n1");
        node.is_some_and(|node| matches!(node.state, NodeState::Unreachable | NodeState::Lost))
    };
    let observed = server.until("n1 is missed", is_missed).await;
    let absence = observed.nodes["n1"].absence.as_ref().unwrap();
    assert!(
        matches!(absence.cause, Cause::StreamEnded(_)),
        "{:?}",
        absence.cause
    );
    server.until_state("n1", NodeState::Lost).await;
}

#[tokio::test]
async fn a_newer_session_supersedes_the_older_one_which_is_told_and_closed() {
    let mut server = Server::start(quiet()).await;
    let mut older = server.agent("n1").await;
    let newer = server.agent("n1").await;
    assert_eq!(older.refused().await, RefusalCode::Superseded);
    older.hear_the_end().await;
    // Words of the dead session change nothing, if they arrive at all.
    let late = Framed {
        session: older.session,
        message: status("late/0/0", ShardState::Ready, 1),
    };
    let _ = older.up.send(late).await;
    newer.say(status("m/0/0", ShardState::Ready, 1)).await;
    let observed = server
        .until("the newer one's shard", |observed| {
            let node = observed.nodes.get("n1");
            node.is_some_and(|node| !node.shards.is_empty())
        })
        .await;
    assert_eq!(observed.nodes["n1"].session, Some(newer.session));
    let shards: Vec<&String> = observed.nodes["n1"].shards.keys().collect();
    assert_eq!(shards, ["m/0/0"]);
}

#[tokio::test]
async fn a_command_reaches_its_session_and_no_other() {
    let server = Server::start(quiet()).await;
    let older = server.agent("n1").await;
    let mut newer = server.agent("n1").await;
    let drain = || ServerMessage::DrainNode(DrainNode { draining: true });
    let sessions = &server.sessions;
    assert_eq!(
        sessions.send("n1", older.session, drain()),
        Err(NotSent::SessionEnded)
    );
    assert_eq!(
        sessions.send("n2", newer.session, drain()),
        Err(NotSent::SessionEnded)
    );
    assert_eq!(sessions.send("n1", newer.session, drain()), Ok(()));
    let heard = newer.hear().await;
    assert_eq!((heard.session, heard.message), (newer.session, drain()));
}

#[tokio::test]
async fn a_spec_that_no_node_would_take_is_refused_here_and_costs_no_session() {
    let mut server = Server::start(quiet()).await;
    let agent = server.agent("n1").await;
    let huge = ServerMessage::start(spec("m/0/0", vec!["x".repeat(40_000)]));
    let refused = server.sessions.send("n1", agent.session, huge);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "no node would take it: `start_shard.spec.commands[0].args` is longer than 32768 bytes"
    );
    server.until_state("n1", NodeState::Ready).await;
}

#[tokio::test]
async fn what_begins_wrongly_is_refused_with_the_reason() {
    let server = Server::start(quiet()).await;
    let heartbeat = AgentMessage::Heartbeat(Box::default());
    for (first, said) in [
        (heartbeat, "it began with `heartbeat`, not with `register`"),
        (register("a b"), "a node id is at most 64 letters"),
        (register("../etc"), "a node id is at most 64 letters"),
        (register(&"x".repeat(65)), "a node id is at most 64 letters"),
        (
            register(&"x".repeat(300)),
            "`register.node` is longer than 256 bytes",
        ),
    ] {
        let mut agent = Agent::dial(server.address, first).await;
        let ServerMessage::Refused(refusal) = agent.hear().await.message else {
            panic!("{said}");
        };
        assert_eq!(refusal.code, RefusalCode::Malformed);
        assert!(refusal.message.starts_with(said), "{}", refusal.message);
        agent.hear_the_end().await;
    }
    assert!(server.observed.borrow().nodes.is_empty());
}

#[tokio::test]
async fn an_agent_that_registers_twice_in_one_session_is_refused() {
    let mut server = Server::start(quiet()).await;
    let mut agent = server.agent("n1").await;
    agent.say(register("n2")).await;
    assert_eq!(agent.refused().await, RefusalCode::Malformed);
    let observed = server.until_state("n1", NodeState::Unreachable).await;
    assert!(!observed.nodes.contains_key("n2"));
}

#[tokio::test]
async fn who_shows_no_certificate_is_refused_where_one_is_asked_for() {
    let mut options = quiet();
    options.require_identity = true;
    let server = Server::start(options).await;
    let mut agent = Agent::dial(server.address, register("gpu-01")).await;
    let ServerMessage::Refused(refusal) = agent.hear().await.message else {
        panic!("it was not refused");
    };
    assert_eq!(
        refusal.to_string(),
        "no certificate was shown, and the server asks for one: set `tls: {ca: ca.pem, cert: agent.pem, key: agent-key.pem}` in agent.yaml; \
         `llmgw ctl cert agent --ca DIR --node gpu-01 --out DIR` makes them (identity; claimed node `gpu-01`, no certificate)"
    );
}

#[tokio::test]
async fn a_second_machine_with_a_nodes_id_is_refused_while_the_first_one_is_connected() {
    let mut server = Server::start(quiet()).await;
    let claim = |machine: &str| {
        let AgentMessage::Register(mut register) = register("n1") else {
            panic!("it is a registration");
        };
        register.machine = machine.to_owned();
        AgentMessage::Register(register)
    };
    let mut first = Agent::dial(server.address, claim("boot-1")).await;
    assert!(matches!(
        first.hear().await.message,
        ServerMessage::Welcome(_)
    ));
    let mut second = Agent::dial(server.address, claim("boot-2")).await;
    assert_eq!(second.refused().await, RefusalCode::NodeTaken);
    drop(first);
    server.until_state("n1", NodeState::Unreachable).await;
    let mut second = Agent::dial(server.address, claim("boot-2")).await;
    assert!(matches!(
        second.hear().await.message,
        ServerMessage::Welcome(_)
    ));
}

#[tokio::test]
async fn an_agent_that_is_silent_but_answers_pings_is_told_and_cut() {
    let mut server = Server::start(quick()).await;
    let mut agent = server.agent("n1").await;
    assert_eq!(agent.refused().await, RefusalCode::TooSlow);
    agent.hear_the_end().await;
    let observed = server.until_state("n1", NodeState::Unreachable).await;
    let absence = observed.nodes["n1"].absence.as_ref().unwrap();
    assert_eq!(absence.cause, Cause::Silent);
}

/// A way to a server that can be cut without either end hearing of it.
async fn relay(to: SocketAddr) -> (SocketAddr, CancellationToken) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let cut = CancellationToken::new();
    let is_cut = cut.clone();
    tokio::spawn(async move {
        let (client, _) = listener.accept().await.unwrap();
        let server = TcpStream::connect(to).await.unwrap();
        let (client_reads, client_writes) = client.into_split();
        let (server_reads, server_writes) = server.into_split();
        let mut pumps = JoinSet::new();
        pumps.spawn(pump(client_reads, server_writes, is_cut.clone()));
        pumps.spawn(pump(server_reads, client_writes, is_cut));
        pumps.join_all().await;
    });
    (address, cut)
}

async fn pump(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    is_cut: CancellationToken,
) {
    let mut buffer = [0; 4_096];
    loop {
        let read = tokio::select! {
            read = from.read(&mut buffer) => read,
            // Both sockets stay open, and nothing passes.
            () = is_cut.cancelled() => std::future::pending().await,
        };
        match read {
            Ok(length @ 1..) if to.write_all(&buffer[..length]).await.is_ok() => {}
            _ => return,
        }
    }
}

#[tokio::test]
async fn a_node_behind_a_link_that_went_dead_without_a_word_is_found_out_by_both_ends() {
    // Heartbeats are far apart, so that only the connection's own signs of life can tell.
    let mut options = quiet();
    options.keep_alive = KeepAlive {
        interval: Duration::from_secs(2),
        timeout: Duration::from_secs(2),
    };
    let keep_alive = options.keep_alive;
    let mut server = Server::start(options).await;
    let (address, cut) = relay(server.address).await;
    let socket = TcpStream::connect(address).await.unwrap();
    let (up, outgoing) = mpsc::channel(8);
    let first = Framed {
        session: SessionId(0),
        message: register("n1"),
    };
    up.send(first).await.unwrap();
    let (mut heard, _dialled) = link::dial(socket, keep_alive, outgoing).await.unwrap();
    assert!(matches!(heard.next().await, Heard::Message(_)));
    cut.cancel();
    server.until_state("n1", NodeState::Unreachable).await;
    let end = tokio::time::timeout(PATIENCE, heard.next()).await;
    assert!(matches!(end, Ok(Heard::Broken(_) | Heard::End)), "{end:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_does_not_read_is_cut_off_before_much_waits_for_it() {
    const COMMANDS_MAX: usize = 1_000;
    let mut server = Server::start(quiet()).await;
    let deaf = server.agent("deaf").await;
    let mut other = server.agent("other").await;
    let big = spec("m/0/0", vec!["x".repeat(16_000)]);
    let mut sent = 0;
    let ended = loop {
        let message = ServerMessage::start(big.clone());
        match server.sessions.send("deaf", deaf.session, message) {
            Ok(()) if sent < COMMANDS_MAX => sent += 1,
            Ok(()) => panic!("{sent} commands wait, and none is too many"),
            Err(why) => break why,
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(ended, NotSent::QueueFull);
    server.until_state("deaf", NodeState::Unreachable).await;
    let drain = ServerMessage::DrainNode(DrainNode { draining: true });
    let sent = server.sessions.send("other", other.session, drain.clone());
    assert_eq!(sent, Ok(()));
    assert_eq!(other.hear().await.message, drain);
}

#[tokio::test]
async fn thousands_of_small_words_are_all_taken_in_order() {
    let mut server = Server::start(quiet()).await;
    let agent = server.agent("n1").await;
    for turn in 0..20_000 {
        agent.say(status("m/0/0", ShardState::Loading, turn)).await;
    }
    agent.say(status("m/0/0", ShardState::Ready, 20_000)).await;
    let observed = server
        .until("the last word", |observed| {
            let node = observed.nodes.get("n1");
            let shard = node.and_then(|node| node.shards.get("m/0/0"));
            shard.is_some_and(|shard| shard.status.state == ShardState::Ready)
        })
        .await;
    let shard = &observed.nodes["n1"].shards["m/0/0"];
    assert_eq!(shard.status.since_ms, 20_000);
}

/// What a socket yields until it is closed.
async fn read_to_the_end(mut socket: TcpStream) -> Vec<u8> {
    let mut read = Vec::new();
    match tokio::time::timeout(PATIENCE, socket.read_to_end(&mut read)).await {
        Ok(Ok(_)) => read,
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionReset => read,
        other => panic!("it was not closed: {other:?}"),
    }
}

#[tokio::test]
async fn garbage_and_silence_cost_their_own_connection_and_nobody_elses() {
    let mut options = quiet();
    options.patience = Duration::from_secs(10);
    let mut server = Server::start(options).await;
    let connect = || TcpStream::connect(server.address);
    let silent = connect().await.unwrap();
    let mut half = connect().await.unwrap();
    half.write_all(b"PRI * HTTP/2.0\r\n").await.unwrap();
    let mut garbage = connect().await.unwrap();
    garbage.write_all(&[0xaa; 4_096]).await.unwrap();
    let mut browser = connect().await.unwrap();
    browser
        .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let mut tls = connect().await.unwrap();
    tls.write_all(&[22, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3])
        .await
        .unwrap();
    let agent = server.agent("n1").await;
    for socket in [silent, half, garbage, browser, tls] {
        read_to_the_end(socket).await;
    }
    let observed = server.until_state("n1", NodeState::Ready).await;
    assert_eq!(
        observed.nodes["n1"].session,
        Some(agent.session),
        "patience is for those who did not register"
    );
}

/// Serves whoever connects as somebody at that address. What is registered is for nobody but the test.
async fn seen_at(address: &str) -> (SocketAddr, mpsc::Receiver<Input>) {
    let peer = SocketAddr::new(address.parse().unwrap(), 4_321);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap();
    let (inputs, received) = mpsc::channel(8);
    let shared = Arc::new(Shared {
        options: quiet(),
        gate: Arc::new(Gate::new(Door::Plain, false, Default::default())),
        seats: Arc::new(Seats::new()),
        tails: Arc::default(),
        inputs,
        cut: CancellationToken::new(),
    });
    let strangers = Arc::new(Strangers::default());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let stranger = strangers.admit(peer.ip());
            tokio::spawn(connection::run(stream, peer, stranger, shared.clone()));
        }
    });
    (server, received)
}

fn register_at(advertise: &str) -> AgentMessage {
    let AgentMessage::Register(mut register) = register("n1") else {
        panic!("it is a registration");
    };
    register.advertise = advertise.to_owned();
    AgentMessage::Register(register)
}

#[tokio::test]
async fn an_agent_registers_although_others_at_its_address_only_sit_there() {
    let (server, mut inputs) = seen_at("10.0.0.2").await;
    let mut sitting = Vec::new();
    for _ in 0..STRANGERS_OF_ADDRESS_MAX {
        sitting.push(TcpStream::connect(server).await.unwrap());
    }
    let _agent = Agent::dial(server, register_at("10.0.0.2")).await;
    let heard = tokio::time::timeout(PATIENCE, inputs.recv()).await;
    assert!(matches!(heard, Ok(Some(Input::Registers { .. }))));
    // The one that sat there for longest had to go.
    read_to_the_end(sitting.remove(0)).await;
}

#[tokio::test]
async fn a_node_that_says_it_is_reached_where_the_server_is_does_not_register() {
    let (server, mut inputs) = seen_at("10.0.0.2").await;
    for (advertise, said) in [
        ("127.0.0.1", "an address of the server's own machine"),
        ("::ffff:127.0.0.1", "an address of the server's own machine"),
        ("169.254.169.254", "another machine on each link"),
        ("evil.example", "which is no IP address"),
    ] {
        let mut agent = Agent::dial(server, register_at(advertise)).await;
        let ServerMessage::Refused(refusal) = agent.hear().await.message else {
            panic!("{advertise} was not refused");
        };
        assert_eq!(refusal.code, RefusalCode::Malformed);
        assert!(refusal.message.contains(said), "{refusal}");
        // All that is heard of it is that it was refused.
        if !refusal.claimed.is_empty() {
            let Ok(Input::Said(NodeEvent::Dismissed { node, cause, .. })) = inputs.try_recv()
            else {
                panic!("{advertise}: something else was heard");
            };
            assert_eq!((&*node, cause), ("n1", Cause::Refused(refusal.message)));
        }
        assert!(inputs.try_recv().is_err(), "{advertise}");
    }
}

#[test]
fn a_connection_is_not_given_up_before_three_heartbeats_are_missed() {
    let options = quiet();
    let KeepAlive { interval, timeout } = options.keep_alive;
    assert_eq!(interval + timeout, options.timing.heartbeat * 3);
    assert!(timeout >= options.timing.heartbeat * 2);
}

#[tokio::test]
async fn output_is_asked_for_and_answered_and_no_other_nodes_answer_counts() {
    let server = Server::start(quiet()).await;
    let mut agent = server.agent("n1").await;
    let other = server.agent("n2").await;
    let line = |text: &str| LogLine {
        at_ms: 1,
        text: text.to_owned(),
    };
    let asking = {
        let sessions = server.sessions.clone();
        let mut observed = server.observed.clone();
        tokio::spawn(async move {
            let both = |observed: &Arc<Observed>| observed.nodes.len() == 2;
            observed.wait_for(both).await.unwrap();
            sessions.tail("n1", "m/0/0", 10).await
        })
    };
    let ServerMessage::TailLog(asked) = agent.hear().await.message else {
        panic!("no question");
    };
    assert_eq!((asked.shard.as_str(), asked.lines), ("m/0/0", 10));
    let chunk = |text: &str, is_last| {
        AgentMessage::LogChunk(LogChunk {
            request: asked.request,
            lines: vec![line(text)],
            is_last,
            problem: None,
        })
    };
    other.say(chunk("forged", true)).await;
    other.say(status("seen/0/0", ShardState::Ready, 1)).await;
    let mut observed = server.observed.clone();
    let seen = |observed: &Arc<Observed>| !observed.nodes["n2"].shards.is_empty();
    observed.wait_for(seen).await.unwrap();
    agent.say(chunk("one", false)).await;
    agent.say(chunk("two", true)).await;
    assert_eq!(asking.await.unwrap(), Ok(vec![line("one"), line("two")]));
    assert_eq!(
        server.sessions.tail("nobody", "m/0/0", 10).await,
        Err(TailError::NotSent(NotSent::SessionEnded))
    );
}

#[tokio::test]
async fn a_question_ends_with_the_session_that_was_asked() {
    let mut server = Server::start(quiet()).await;
    let mut agent = server.agent("n1").await;
    server.until_state("n1", NodeState::Ready).await;
    let sessions = server.sessions.clone();
    let asking = tokio::spawn(async move { sessions.tail("n1", "m/0/0", 10).await });
    agent.hear().await;
    drop(agent);
    let answer = tokio::time::timeout(PATIENCE, asking).await.unwrap();
    assert_eq!(answer.unwrap(), Err(TailError::NoAnswer));
}

#[tokio::test]
async fn a_server_that_stops_tells_its_agents_and_waits_for_none_that_does_not_listen() {
    let server = Server::start(quiet()).await;
    let mut agent = server.agent("n1").await;
    let _deaf = server.agent("deaf").await;
    let _silent = TcpStream::connect(server.address).await.unwrap();
    let sessions = server.sessions.clone();
    let stopping = tokio::spawn(async move { sessions.stop().await });
    let ServerMessage::Leaving(reason) = agent.hear().await.message else {
        panic!("it was not told");
    };
    assert_eq!(reason, "the server stops");
    agent.hear_the_end().await;
    tokio::time::timeout(PATIENCE, stopping)
        .await
        .unwrap()
        .unwrap();
    let refused = TcpStream::connect(server.address).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_that_come_and_go_in_any_order_leave_nothing_behind() {
    const AGENTS: usize = 60;
    const ROUNDS: usize = 4;
    let mut server = Server::start(quiet()).await;
    let mut agents = JoinSet::new();
    for number in 0..AGENTS {
        let address = server.address;
        agents.spawn(async move {
            let node = format!("n{}", number % 20);
            for _ in 0..ROUNDS {
                let mut agent = Agent::dial(address, register(&node)).await;
                // A newer session of the same node may have come first, and whoever does not read its last words in time is cut off.
                let first = tokio::time::timeout(PATIENCE, agent.heard.next()).await;
                let is_known = match &first {
                    Ok(Heard::Message(framed)) => matches!(
                        framed.message,
                        ServerMessage::Welcome(_) | ServerMessage::Refused(_)
                    ),
                    Ok(Heard::Broken(_)) => true,
                    _ => false,
                };
                assert!(is_known, "{first:?}");
            }
        });
    }
    agents.join_all().await;
    server
        .until("nobody is connected", |observed| {
            observed.nodes.len() == 20 && observed.connected().count() == 0
        })
        .await;
}
