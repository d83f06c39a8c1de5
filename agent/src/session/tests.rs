//! The agent's session over real sockets, against servers as they should be and as they may be.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use llmgw_proto::convert::Framed;
use llmgw_proto::enrolment::{Enrolled, EnrolmentRefusal, EnrolmentRequest};
use llmgw_proto::inventory::gpu::{
    Backend, DriverState, HealthCode, HealthFlag, SourceCause, SourceFailure,
};
use llmgw_proto::inventory::{Inventory, Reading};
use llmgw_proto::link::{self, Heard, Hearing, Host, KeepAlive};
use llmgw_proto::session::{
    AgentMessage, DrainNode, Heartbeat, PortRange, Refusal, RefusalCode, Register, ServerMessage,
    SessionId, ShardReport, StartShard, StopHow, StopShard, TailLog, Told as ToldInventory,
    Welcome,
};
use llmgw_proto::shard::{LogLine, Readiness, ShardSpec, ShardState, ShardStatus};
use llmgw_proto::wire::error::WireError;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{DrainFlag, Ended, InventorySource, Session, SessionOptions, ShardChanges, ShardHost};

mod tls;

/// No test waits for longer; none waits for less than the event that it waits for.
const PATIENCE: Duration = Duration::from_secs(60);
const INVENTORY: &str = include_str!("../../../tests/recordings/inventory/two-gpus.json");
const QUIET: KeepAlive = KeepAlive {
    interval: PATIENCE,
    timeout: PATIENCE,
};

/// A node: its shards, its inventory and whether it drains, as a test sets them.
struct Node {
    shards: Mutex<Vec<(ShardSpec, ShardStatus)>>,
    changes: watch::Sender<Vec<ShardStatus>>,
    /// What was asked of it.
    asked: mpsc::UnboundedSender<String>,
    inventory: Mutex<Arc<Inventory>>,
    draining: AtomicBool,
}

impl Node {
    fn new() -> (Arc<Node>, mpsc::UnboundedReceiver<String>) {
        let (asked, heard) = mpsc::unbounded_channel();
        let node = Node {
            shards: Mutex::new(Vec::new()),
            changes: watch::Sender::new(Vec::new()),
            asked,
            inventory: Mutex::new(Arc::new(serde_json::from_str(INVENTORY).unwrap())),
            draining: AtomicBool::new(false),
        };
        (Arc::new(node), heard)
    }

    fn runs(&self, shard: &str, state: ShardState) {
        let spec = spec(shard);
        let status = status(&spec, state);
        self.shards.lock().unwrap().push((spec, status));
    }

    fn has(&self, shard: &str) -> bool {
        let shards = self.shards.lock().unwrap();
        shards.iter().any(|(spec, _)| spec.shard == shard)
    }
}

impl ShardHost for Node {
    fn shards(&self) -> Vec<(ShardSpec, ShardStatus)> {
        self.shards.lock().unwrap().clone()
    }

    fn changes(&self) -> Box<dyn ShardChanges> {
        Box::new(Changes(self.changes.subscribe()))
    }

    /// Refuses those of the model `refused`.
    fn start_shard(&self, spec: ShardSpec) -> Result<(), Box<ShardReport>> {
        self.asked.send(format!("start {}", spec.shard)).unwrap();
        match spec.shard.starts_with("refused/") {
            true => Err(Box::new(ShardReport {
                status: status(&spec, ShardState::Failed),
                spec: Some(Arc::new(spec)),
            })),
            false => Ok(()),
        }
    }

    fn drain_shard(&self, shard: &str) -> bool {
        self.asked.send(format!("drain {shard}")).unwrap();
        self.has(shard)
    }

    fn stop_shard(&self, shard: &str, force: bool) -> bool {
        let how = if force { "kill" } else { "stop" };
        self.asked.send(format!("{how} {shard}")).unwrap();
        self.has(shard)
    }

    fn tail(&self, shard: &str, lines: usize) -> Option<Vec<LogLine>> {
        let line = |number: usize| LogLine {
            at_ms: number as u64,
            text: format!("line {number}"),
        };
        self.has(shard).then(|| (0..lines).map(line).collect())
    }
}

impl InventorySource for Node {
    fn latest(&self) -> Arc<Inventory> {
        self.inventory.lock().unwrap().clone()
    }
}

impl DrainFlag for Node {
    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    fn set(&self, draining: bool) -> std::io::Result<()> {
        self.draining.store(draining, Ordering::Relaxed);
        Ok(())
    }
}

struct Changes(watch::Receiver<Vec<ShardStatus>>);

impl ShardChanges for Changes {
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Vec<ShardStatus>> + Send + '_>> {
        Box::pin(async {
            match self.0.changed().await {
                Ok(()) => self.0.borrow_and_update().clone(),
                Err(_) => std::future::pending().await,
            }
        })
    }
}

/// A server whose sessions a test holds by hand.
struct Server {
    address: SocketAddr,
    sessions: mpsc::UnboundedReceiver<Held>,
}

/// One session, seen from the server.
struct Held {
    id: SessionId,
    heard: Hearing<AgentMessage>,
    down: mpsc::Sender<Framed<ServerMessage>>,
    connection: CancellationToken,
}

struct Accepting {
    sessions: mpsc::UnboundedSender<Held>,
    connection: CancellationToken,
}

impl Host for Accepting {
    async fn enrol(
        &self,
        _: Result<EnrolmentRequest, WireError>,
    ) -> Result<Enrolled, EnrolmentRefusal> {
        panic!("nobody asks for a certificate here")
    }

    fn session(
        &self,
        heard: Hearing<AgentMessage>,
    ) -> Result<mpsc::Receiver<Framed<ServerMessage>>, &'static str> {
        let (down, sent) = mpsc::channel(64);
        let held = Held {
            id: SessionId(0),
            heard,
            down,
            connection: self.connection.clone(),
        };
        self.sessions.send(held).map_err(|_| "the test is over")?;
        Ok(sent)
    }
}

impl Server {
    async fn start(keep_alive: KeepAlive) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sessions, held) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let connection = CancellationToken::new();
                let accepting = Accepting {
                    sessions: sessions.clone(),
                    connection: connection.clone(),
                };
                tokio::spawn(async move {
                    tokio::select! {
                        _ = link::serve(socket, Arc::new(accepting), keep_alive) => {}
                        () = connection.cancelled() => {}
                    }
                });
            }
        });
        Server {
            address,
            sessions: held,
        }
    }

    /// The next session and what it registered, without an answer.
    async fn registered(&mut self) -> (Held, Register) {
        let held = tokio::time::timeout(PATIENCE, self.sessions.recv()).await;
        let mut held = held.expect("nobody came").unwrap();
        let AgentMessage::Register(register) = held.hear().await else {
            panic!("it did not register");
        };
        (held, *register)
    }

    async fn welcomed(&mut self, heartbeat_ms: u64) -> (Held, Register) {
        let (mut held, register) = self.registered().await;
        held.id = SessionId(7);
        let welcome = ServerMessage::Welcome(Welcome {
            heartbeat_ms,
            server_version: "0.1.0".to_owned(),
        });
        held.say(welcome).await;
        (held, register)
    }
}

impl Held {
    async fn say(&self, message: ServerMessage) {
        let session = self.id;
        self.down.send(Framed { session, message }).await.unwrap();
    }

    async fn hear(&mut self) -> AgentMessage {
        match tokio::time::timeout(PATIENCE, self.heard.next()).await {
            Ok(Heard::Message(framed)) => {
                assert_eq!(framed.session, self.id);
                framed.message
            }
            other => panic!("no message: {other:?}"),
        }
    }

    async fn until<T>(&mut self, pick: impl Fn(AgentMessage) -> Option<T>) -> T {
        loop {
            if let Some(found) = pick(self.hear().await) {
                return found;
            }
        }
    }

    async fn report(&mut self) -> ShardReport {
        self.until(|message| match message {
            AgentMessage::ShardStatus(report) => Some(*report),
            _ => None,
        })
        .await
    }

    async fn heartbeat(&mut self) -> Heartbeat {
        self.until(|message| match message {
            AgentMessage::Heartbeat(heartbeat) => Some(*heartbeat),
            _ => None,
        })
        .await
    }
}

fn session(address: SocketAddr, node: &Arc<Node>, keep_alive: KeepAlive) -> Arc<Session> {
    let options = SessionOptions {
        server: format!("http://{address}").parse().unwrap(),
        tls: None,
        look_every: PATIENCE,
        node: "gpu-01".to_owned(),
        advertise: None,
        ports: PortRange {
            first: 21_000,
            last: 21_999,
        },
        engines: vec!["llamacpp".to_owned()],
        models_dir: Some("/models".to_owned()),
        state_dir: "/state".to_owned(),
        keep_alive,
        patience: PATIENCE,
    };
    let node = node.clone();
    Arc::new(Session::new(options, node.clone(), node.clone(), node))
}

struct Running {
    stop: CancellationToken,
    session: Arc<Session>,
    task: JoinHandle<()>,
}

impl Running {
    fn start(session: Arc<Session>) -> Running {
        let stop = CancellationToken::new();
        let task = {
            let (session, stop) = (session.clone(), stop.clone());
            tokio::spawn(async move { session.run(stop).await })
        };
        Running {
            stop,
            session,
            task,
        }
    }

    async fn ends(self) {
        tokio::time::timeout(PATIENCE, self.task)
            .await
            .unwrap()
            .unwrap();
    }
}

fn spec(shard: &str) -> ShardSpec {
    ShardSpec {
        shard: shard.to_owned(),
        replica: "m/0".to_owned(),
        model: "m".to_owned(),
        profile: "cpu".to_owned(),
        definition: String::new(),
        rank: 0,
        engine: "llamacpp".to_owned(),
        commands: Vec::new(),
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
    }
}

fn status(spec: &ShardSpec, state: ShardState) -> ShardStatus {
    ShardStatus {
        shard: spec.shard.clone(),
        spec_hash: spec.hash(),
        state,
        reason: String::new(),
        exit: None,
        log_tail: Vec::new(),
        since_ms: 1,
        adopted: false,
    }
}

#[tokio::test]
async fn every_connect_registers_the_whole_inventory_and_all_that_runs() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    let running = Running::start(session(server.address, &node, QUIET));
    let (first, register) = server.welcomed(60_000).await;
    assert_eq!(register.node, "gpu-01");
    assert_eq!(register.advertise, "127.0.0.1");
    assert_eq!(register.models_dir.as_deref(), Some("/models"));
    assert_eq!(register.state_dir, "/state");
    assert_eq!(register.inventory().unwrap(), &node.latest());
    assert!(register.shards.is_empty());
    node.runs("m/0/0", ShardState::Ready);
    node.set(true).unwrap();
    first.connection.cancel();
    let (_second, again) = server.welcomed(60_000).await;
    assert_eq!(again.run, register.run, "it is the same agent");
    assert!(again.draining);
    assert_eq!(again.inventory().unwrap(), &node.latest());
    let spec = again.shards[0].spec.as_ref().unwrap();
    assert_eq!((spec.shard.as_str(), again.shards.len()), ("m/0/0", 1));
    running.stop.cancel();
    running.ends().await;
}

#[tokio::test]
async fn commands_reach_the_supervisor_and_those_of_another_session_do_not() {
    let mut server = Server::start(QUIET).await;
    let (node, mut asked) = Node::new();
    node.runs("m/0/0", ShardState::Ready);
    let _running = Running::start(session(server.address, &node, QUIET));
    let (held, _) = server.welcomed(60_000).await;
    let stop = |how| {
        ServerMessage::StopShard(StopShard {
            shard: "m/0/0".to_owned(),
            how,
        })
    };
    let late = Framed {
        session: SessionId(6),
        message: stop(StopHow::Kill),
    };
    held.down.send(late).await.unwrap();
    held.say(ServerMessage::start(Arc::new(spec("m/1/0"))))
        .await;
    held.say(stop(StopHow::Drain)).await;
    held.say(stop(StopHow::Stop)).await;
    held.say(stop(StopHow::Kill)).await;
    for expected in ["start m/1/0", "drain m/0/0", "stop m/0/0", "kill m/0/0"] {
        let heard = tokio::time::timeout(PATIENCE, asked.recv()).await;
        assert_eq!(heard.unwrap().unwrap(), expected);
    }
}

#[tokio::test]
async fn a_spec_that_was_not_understood_whole_is_not_started() {
    let mut server = Server::start(QUIET).await;
    let (node, mut asked) = Node::new();
    let running = Running::start(session(server.address, &node, QUIET));
    let (mut held, _) = server.welcomed(60_000).await;
    let newer = ServerMessage::StartShard(Box::new(StartShard {
        spec: Arc::new(spec("m/0/0")),
        spec_hash: "of a spec with a field that this agent does not know".to_owned(),
    }));
    held.say(newer).await;
    let report = held.report().await;
    assert_eq!(report.status.state, ShardState::Failed);
    assert!(report.status.reason.starts_with("spec_not_understood: "));
    assert_eq!(report.spec.unwrap().shard, "m/0/0");
    running.stop.cancel();
    running.ends().await;
    assert!(asked.try_recv().is_err(), "nobody was asked to start it");
}

#[tokio::test]
async fn a_shard_that_is_refused_is_reported_with_its_spec() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    let _running = Running::start(session(server.address, &node, QUIET));
    let (mut held, _) = server.welcomed(60_000).await;
    held.say(ServerMessage::start(Arc::new(spec("refused/0/0"))))
        .await;
    let report = held.report().await;
    assert_eq!(report.status.state, ShardState::Failed);
    assert_eq!(report.spec.as_deref(), Some(&spec("refused/0/0")));
}

#[tokio::test]
async fn an_agent_that_stops_its_engines_tells_at_once_that_it_drains_and_keeps_that_nowhere() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    let running = Running::start(session(server.address, &node, QUIET));
    let (mut held, _) = server.welcomed(60_000).await;
    assert!(!held.heartbeat().await.draining);
    running.session.stops_engines();
    assert!(held.heartbeat().await.draining);
    held.connection.cancel();
    let (_held, register) = server.welcomed(60_000).await;
    assert!(register.draining);
    assert!(!node.is_draining());
}

#[tokio::test]
async fn a_stop_of_what_is_not_here_is_answered() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    let _running = Running::start(session(server.address, &node, QUIET));
    let (mut held, _) = server.welcomed(60_000).await;
    held.say(ServerMessage::StopShard(StopShard {
        shard: "m/9/0".to_owned(),
        how: StopHow::Stop,
    }))
    .await;
    let report = held.report().await;
    assert_eq!(report.status.shard, "m/9/0");
    assert_eq!(report.status.state, ShardState::Stopped);
}

#[tokio::test]
async fn a_change_carries_its_spec_until_the_server_has_that() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    node.runs("old/0/0", ShardState::Ready);
    let _running = Running::start(session(server.address, &node, QUIET));
    let (mut held, _) = server.welcomed(60_000).await;
    // The first heartbeat shows that the session listens to changes.
    held.heartbeat().await;
    node.runs("new/0/0", ShardState::Loading);
    let steps = [
        ("old/0/0", ShardState::Failed, false),
        ("new/0/0", ShardState::Loading, true),
        ("new/0/0", ShardState::Ready, false),
        ("new/0/0", ShardState::Stopped, false),
        ("new/0/0", ShardState::Loading, true),
    ];
    for (shard, state, with_spec) in steps {
        node.changes.send_replace(vec![status(&spec(shard), state)]);
        let report = held.report().await;
        assert_eq!(report.status.state, state);
        assert_eq!(report.spec.is_some(), with_spec, "{shard} {state:?}");
    }
}

#[tokio::test]
async fn heartbeats_tell_health_and_use_and_the_whole_inventory_only_when_it_changed() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    let _running = Running::start(session(server.address, &node, QUIET));
    let (mut held, _) = server.welcomed(20).await;
    let beat = held.heartbeat().await;
    assert_eq!(beat.gpus.len(), 2);
    assert_eq!(beat.gpus[0].used_mib, Some(0));
    assert!(beat.inventory.is_none() && beat.gpus[1].health.is_empty());
    let ill = HealthFlag {
        code: HealthCode::Lost,
        reason: "fell off the bus".to_owned(),
    };
    let change = |change: &dyn Fn(&mut Inventory)| {
        change(Arc::make_mut(&mut node.inventory.lock().unwrap()));
    };
    change(&|inventory| inventory.gpus.devices[1].health.push(ill.clone()));
    let beat = loop {
        let beat = held.heartbeat().await;
        assert!(beat.inventory.is_none(), "health is in every heartbeat");
        if !beat.gpus[1].health.is_empty() {
            break beat;
        }
    };
    assert_eq!(beat.gpus[1].health, std::slice::from_ref(&ill));
    change(&|inventory| drop(inventory.gpus.devices.remove(1)));
    let beat = loop {
        let beat = held.heartbeat().await;
        if beat.inventory.is_some() {
            break beat;
        }
    };
    assert_eq!(beat.gpus.len(), 1);
    let beat = held.heartbeat().await;
    assert!(beat.inventory.is_none(), "once");
}

#[tokio::test]
async fn that_a_driver_is_silent_is_told_once_and_not_at_each_look_for_how_long() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    let _running = Running::start(session(server.address, &node, QUIET));
    let (mut held, _) = server.welcomed(20).await;
    assert!(held.heartbeat().await.inventory.is_none());
    let known = node.latest();
    let after = |seconds: u64| {
        let mut inventory = Inventory::clone(&known);
        inventory.gpus = inventory.gpus.aged(seconds * 1_000);
        inventory.gpus.driver = DriverState::Unresponsive;
        inventory.gpus.passed_over = vec![SourceFailure {
            source: Backend::Nvml,
            cause: SourceCause::Unresponsive,
            message: format!("the last probe has not ended for {seconds} s"),
            help: None,
        }];
        *node.inventory.lock().unwrap() = Arc::new(inventory);
    };
    after(40);
    while held.heartbeat().await.inventory.is_none() {}
    after(45);
    // The first may have been made before.
    for _ in 0..3 {
        assert!(held.heartbeat().await.inventory.is_none());
    }
}

#[tokio::test]
async fn that_a_shard_is_over_is_told_after_its_gpus_as_they_are_by_then() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    node.runs("m/0/0", ShardState::Ready);
    let _running = Running::start(session(server.address, &node, QUIET));
    let (mut held, _) = server.welcomed(60_000).await;
    held.heartbeat().await;
    for (state, is_over, used_mib) in [
        (ShardState::Stopping, false, 9_000),
        (ShardState::Failed, true, 3),
        (ShardState::Stopped, true, 4),
    ] {
        Arc::make_mut(&mut node.inventory.lock().unwrap())
            .gpus
            .devices[0]
            .memory
            .used_mib = Reading::Known(used_mib);
        node.changes
            .send_replace(vec![status(&spec("m/0/0"), state)]);
        if is_over {
            let AgentMessage::Heartbeat(beat) = held.hear().await else {
                panic!("{state:?} came first");
            };
            assert_eq!(beat.gpus[0].used_mib, Some(used_mib));
        }
        let AgentMessage::ShardStatus(report) = held.hear().await else {
            panic!("{state:?} did not come");
        };
        assert_eq!(report.status.state, state);
    }
}

#[tokio::test]
async fn an_inventory_that_changed_is_told_also_where_a_newer_heartbeat_takes_the_place_of_its_own()
{
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    let _running = Running::start(session(server.address, &node, QUIET));
    let (mut held, _) = server.welcomed(60_000).await;
    held.heartbeat().await;
    Arc::make_mut(&mut node.inventory.lock().unwrap())
        .gpus
        .devices
        .remove(1);
    // Both are over, so each has a heartbeat before it, and they are taken in together.
    let over = ["m/0/0", "m/1/0"].map(|shard| status(&spec(shard), ShardState::Failed));
    node.changes.send_replace(over.to_vec());
    let beat = held.heartbeat().await;
    let told = beat.inventory.expect("it has changed");
    let ToldInventory::Inventory(told) = told else {
        panic!("it can't be read");
    };
    assert_eq!(told, node.latest());
    held.report().await;
    held.report().await;
}

#[tokio::test]
async fn draining_is_kept_by_the_node_and_told_at_once() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    let _running = Running::start(session(server.address, &node, QUIET));
    let (mut held, register) = server.welcomed(60_000).await;
    assert!(!register.draining && !held.heartbeat().await.draining);
    held.say(ServerMessage::DrainNode(DrainNode { draining: true }))
        .await;
    assert!(held.heartbeat().await.draining);
    assert!(node.is_draining());
}

#[tokio::test]
async fn output_is_sent_in_parts_and_its_absence_is_explained() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    node.runs("m/0/0", ShardState::Ready);
    let _running = Running::start(session(server.address, &node, QUIET));
    let (mut held, _) = server.welcomed(60_000).await;
    let chunk = |message| match message {
        AgentMessage::LogChunk(chunk) => Some(chunk),
        _ => None,
    };
    for (lines, parts) in [
        (0, vec![0]),
        (250, vec![100, 100, 50]),
        (9_999_999, vec![100; 20]),
    ] {
        held.say(ServerMessage::TailLog(TailLog {
            request: 5,
            shard: "m/0/0".to_owned(),
            lines,
        }))
        .await;
        let count = parts.len();
        for (number, part) in parts.into_iter().enumerate() {
            let chunk = held.until(chunk).await;
            assert_eq!((chunk.request, chunk.lines.len()), (5, part));
            assert_eq!(chunk.is_last, number + 1 == count);
        }
    }
    held.say(ServerMessage::TailLog(TailLog {
        request: 6,
        shard: "m/9/0".to_owned(),
        lines: 1,
    }))
    .await;
    let problem = held.until(chunk).await.problem.unwrap();
    assert_eq!(problem, "there is no shard `m/9/0` on this node");
}

#[tokio::test]
async fn a_refusal_ends_the_attempt_with_the_certificates_name_and_the_claim() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    let session = session(server.address, &node, QUIET);
    let refusal = Refusal {
        code: RefusalCode::Identity,
        message: "the certificate is for `gpu-02`, not for `gpu-01`".to_owned(),
        certificate: Some("gpu-02".to_owned()),
        claimed: "gpu-01".to_owned(),
    };
    let stop = CancellationToken::new();
    let mut welcomed_at = None;
    let attempt = session.attempt(&stop, &mut welcomed_at);
    let refusing = async {
        let (held, register) = server.registered().await;
        assert_eq!(register.node, "gpu-01");
        held.say(ServerMessage::Refused(refusal.clone())).await;
    };
    let (ended, ()) = tokio::join!(attempt, refusing);
    let Ended::Refused(told) = ended else {
        panic!("{ended:?}");
    };
    assert_eq!(told, refusal);
    assert!(told.code.needs_a_person() && welcomed_at.is_none());
}

#[tokio::test]
async fn an_agent_that_is_stopped_says_goodbye_and_whether_its_engines_run_on() {
    for engines_stay in [true, false] {
        let mut server = Server::start(QUIET).await;
        let (node, _asked) = Node::new();
        let running = Running::start(session(server.address, &node, QUIET));
        let (mut held, _) = server.welcomed(60_000).await;
        held.heartbeat().await;
        if !engines_stay {
            running.session.engines_were_stopped();
        }
        running.stop.cancel();
        let goodbye = held
            .until(|message| match message {
                AgentMessage::Goodbye(goodbye) => Some(goodbye),
                _ => None,
            })
            .await;
        assert_eq!(goodbye.engines_stay, engines_stay);
        assert!(matches!(held.heard.next().await, Heard::End));
        drop(held);
        running.ends().await;
    }
}

#[tokio::test]
async fn a_change_that_comes_with_the_word_to_stop_is_told_before_the_goodbye() {
    let mut server = Server::start(QUIET).await;
    // Which of the two the session sees first is drawn.
    for _ in 0..32 {
        let (node, _asked) = Node::new();
        let running = Running::start(session(server.address, &node, QUIET));
        let (mut held, _) = server.welcomed(60_000).await;
        held.heartbeat().await;
        let last = status(&spec("m/0/0"), ShardState::Stopped);
        node.changes.send_replace(vec![last]);
        running.stop.cancel();
        let first = held
            .until(|message| match message {
                AgentMessage::Heartbeat(_) => None,
                other => Some(other),
            })
            .await;
        let AgentMessage::ShardStatus(report) = first else {
            panic!("{first:?} came first");
        };
        assert_eq!(report.status.state, ShardState::Stopped);
        assert!(matches!(held.hear().await, AgentMessage::Goodbye(_)));
        drop(held);
        running.ends().await;
    }
}

#[tokio::test]
async fn an_agent_stops_although_the_server_says_nothing_reads_nothing_or_is_not_there() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    let (node, _asked) = Node::new();
    for address in [silent.local_addr().unwrap(), gone] {
        let running = Running::start(session(address, &node, QUIET));
        running.stop.cancel();
        running.ends().await;
    }
    // Welcomed, and then nothing is read any more.
    let mut server = Server::start(QUIET).await;
    let running = Running::start(session(server.address, &node, QUIET));
    let (_held, _) = server.welcomed(60_000).await;
    let mut connected = running.session.connected();
    connected.wait_for(|connected| *connected).await.unwrap();
    running.stop.cancel();
    running.ends().await;
}

/// A way to a server that can be cut without either end hearing of it.
async fn relay(to: SocketAddr) -> (SocketAddr, CancellationToken) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let cut = CancellationToken::new();
    let is_cut = cut.clone();
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let server = TcpStream::connect(to).await.unwrap();
            let (client_reads, client_writes) = client.into_split();
            let (server_reads, server_writes) = server.into_split();
            tokio::spawn(pump(client_reads, server_writes, is_cut.clone()));
            tokio::spawn(pump(server_reads, client_writes, is_cut.clone()));
        }
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
async fn a_link_that_went_dead_without_a_word_is_found_out_and_its_silence_is_said() {
    let keep_alive = KeepAlive {
        interval: Duration::from_secs(2),
        timeout: Duration::from_secs(2),
    };
    let mut server = Server::start(QUIET).await;
    let (address, cut) = relay(server.address).await;
    let (node, _asked) = Node::new();
    let session = session(address, &node, keep_alive);
    let (stop, mut welcomed_at) = (CancellationToken::new(), None);
    let attempt = session.attempt(&stop, &mut welcomed_at);
    let cutting = async {
        let (held, _) = server.welcomed(60_000).await;
        let mut connected = session.connected();
        connected.wait_for(|connected| *connected).await.unwrap();
        cut.cancel();
        held
    };
    let both = async { tokio::join!(attempt, cutting) };
    let (ended, _held) = tokio::time::timeout(PATIENCE, both).await.unwrap();
    let Ended::Broken(why) = ended else {
        panic!("{ended:?}");
    };
    let said = why.starts_with("nothing was heard from the server for ");
    assert!(said, "{why}");
}

#[tokio::test]
async fn a_server_that_reads_nothing_is_left_and_nothing_piles_up_for_it() {
    let mut server = Server::start(QUIET).await;
    let (node, _asked) = Node::new();
    let running = Running::start(session(server.address, &node, QUIET));
    let (_held, _) = server.welcomed(20).await;
    let mut connected = running.session.connected();
    connected.wait_for(|connected| *connected).await.unwrap();
    let flood = tokio::spawn(async move {
        let mut status = status(&spec("m/0/0"), ShardState::Loading);
        status.reason = "x".repeat(4_000);
        loop {
            status.since_ms += 1;
            node.changes.send_replace(vec![status.clone()]);
            tokio::task::yield_now().await;
        }
    });
    let left = connected.wait_for(|connected| !*connected);
    tokio::time::timeout(PATIENCE, left).await.unwrap().unwrap();
    flood.abort();
    running.stop.cancel();
    running.ends().await;
}
