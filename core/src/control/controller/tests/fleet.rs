//! A fleet in memory: agents that do what they are told, a gateway that writes down what it is given, and the controller between them.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use llmgw_plugins::{Policies, PolicyOptions};
use llmgw_proto::session::{
    Goodbye, Heartbeat, Register, ServerMessage, SessionId, ShardReport, StopHow, Told,
};
use llmgw_proto::shard::{LogLine, ShardSpec, ShardState, ShardStatus};
use tokio::sync::watch;

use crate::config::{self, Config};
use crate::control::controller::{Controller, Serving};
use crate::control::memory::FailureNews;
use crate::control::observed::{Commands, NodeEvent, NodeTable, NotSent, Observed, Timing};
use crate::control::tests::nodes;
use crate::routing::fleet::Started;
use crate::routing::outlook::Outlook;

pub const RECOVERY_S: u64 = 15;
pub const LOST_AFTER_S: u64 = 60;
const TIMING: Timing = Timing {
    heartbeat: Duration::from_secs(5),
    lost_after: Duration::from_secs(LOST_AFTER_S),
    recovery: Duration::from_secs(RECOVERY_S),
};

/// What the controller reaches of the rest. Writes everything down, in order.
#[derive(Default)]
pub(crate) struct Rest {
    config: Mutex<Option<Arc<Config>>>,
    pub requests: Mutex<BTreeMap<String, u32>>,
    pub served: Mutex<Arc<Started>>,
    pub outlooks: Mutex<BTreeMap<String, Outlook>>,
    pub failed: Mutex<Vec<String>>,
    mail: Mutex<VecDeque<(String, SessionId, ServerMessage)>>,
    pub log: Mutex<Vec<String>>,
    /// Done whenever the controller has just been given the configuration.
    pub then: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Rest {
    pub fn configure(&self, models: &str) {
        *lock(&self.config) = Some(Arc::new(parse(models)));
    }
}

impl Serving for Rest {
    fn config(&self) -> Arc<Config> {
        let config = lock(&self.config).clone();
        if let Some(then) = lock(&self.then).as_mut() {
            then();
        }
        config.expect("the test sets one first")
    }

    fn requests(&self, address: &str) -> u32 {
        lock(&self.requests).get(address).copied().unwrap_or(0)
    }

    fn serve(&self, endpoints: Arc<Started>) {
        let count: usize = endpoints.values().map(Vec::len).sum();
        lock(&self.log).push(format!("pool of {count}"));
        *lock(&self.served) = endpoints;
    }

    fn expect(&self, outlooks: BTreeMap<String, Outlook>) {
        *lock(&self.outlooks) = outlooks;
    }

    fn failed(&self, news: &FailureNews) {
        let node = news.failure.node.as_deref().unwrap_or("none");
        let (replica, code) = (&news.failure.replica, news.code());
        lock(&self.failed).push(format!("{replica} on {node}, {code}: {news}"));
    }
}

impl Commands for Rest {
    fn send(&self, node: &str, session: SessionId, message: ServerMessage) -> Result<(), NotSent> {
        let text = match &message {
            ServerMessage::StartShard(start) => format!("{node}: start {}", start.spec.shard),
            ServerMessage::StopShard(stop) => format!("{node}: {:?} {}", stop.how, stop.shard),
            ServerMessage::DrainNode(drain) => format!("{node}: drain {}", drain.draining),
            other => format!("{node}: {}", other.name()),
        };
        lock(&self.log).push(text);
        lock(&self.mail).push_back((node.to_owned(), session, message));
        Ok(())
    }
}

/// An agent that needs no time: what it is told to start loads, what it is told to stop is gone.
#[derive(Default)]
struct Agent {
    session: Option<SessionId>,
    number: u64,
    draining: bool,
    shards: BTreeMap<String, (Arc<ShardSpec>, ShardStatus)>,
}

pub(crate) struct Fleet {
    pub rest: Arc<Rest>,
    pub controller: Arc<Controller>,
    table: NodeTable,
    publish: watch::Sender<Arc<Observed>>,
    policies: Arc<Policies>,
    agents: BTreeMap<String, Agent>,
    now_ms: u64,
    sessions: u64,
    /// Commands get lost on the way.
    pub deaf: bool,
}

impl Fleet {
    /// A server past its recovery, with these nodes and this catalog.
    pub fn new(nodes: &[&str], models: &str) -> Fleet {
        let none = PolicyOptions {
            dir: None,
            state: None,
        };
        let policies = Policies::open(none).expect("the built-in ones load");
        let rest = Arc::new(Rest::default());
        let table = NodeTable::new(TIMING, 0);
        let (publish, observed) = watch::channel(Arc::new(table.observed().clone()));
        let controller = Controller::new(observed, rest.clone(), policies.clone(), rest.clone());
        let mut fleet = Fleet {
            rest,
            controller,
            table,
            publish,
            policies,
            agents: BTreeMap::new(),
            now_ms: 0,
            sessions: 0,
            deaf: false,
        };
        fleet.configure(models);
        for node in nodes {
            fleet.join(node);
        }
        fleet.pass(RECOVERY_S);
        fleet
    }

    pub fn configure(&mut self, models: &str) {
        self.rest.configure(models);
    }

    /// The server is gone and back: it knows nothing, and no agent has connected yet.
    pub fn restart_server(&mut self) {
        self.table = NodeTable::new(TIMING, self.now_ms);
        let (publish, observed) = watch::channel(Arc::new(self.table.observed().clone()));
        self.publish = publish;
        let (commands, serving) = (self.rest.clone(), self.rest.clone());
        self.controller = Controller::new(observed, commands, self.policies.clone(), serving);
        self.rest.serve(Arc::default());
        lock(&self.rest.log).clear();
        for agent in self.agents.values_mut() {
            agent.session = None;
        }
    }

    /// Connects a node, or connects it again, with all that it runs.
    pub fn join(&mut self, node: &str) {
        self.sessions += 1;
        let session = SessionId(self.sessions);
        let number = self.agents.len() as u64;
        let agent = self.agents.entry(node.to_owned()).or_insert(Agent {
            number,
            ..Agent::default()
        });
        agent.session = Some(session);
        let known = nodes::node(node, agent.number);
        let register = Register {
            node: node.to_owned(),
            agent_version: "0.1.0".to_owned(),
            run: "r".to_owned(),
            machine: String::new(),
            advertise: known.advertise.clone(),
            ports: known.ports,
            engines: known.engines.clone(),
            models_dir: known.models_dir.clone(),
            state_dir: known.state_dir.clone(),
            draining: agent.draining,
            inventory: Told::Inventory(known.inventory.clone().expect("it is readable")),
            shards: agent
                .shards
                .values()
                .map(|(spec, status)| ShardReport {
                    spec: Some(spec.clone()),
                    status: status.clone(),
                })
                .collect(),
        };
        let register = Box::new(register);
        self.apply(NodeEvent::Registered {
            session,
            register,
            certificate: None,
            is_local: false,
        });
    }

    /// The node's stream breaks; its engines run on.
    pub fn cut(&mut self, node: &str) {
        let agent = self.agents.get_mut(node).expect("the test made it");
        let session = agent.session.take().expect("it is connected");
        let node = node.to_owned();
        let why = "reset".to_owned();
        self.apply(NodeEvent::Ended { node, session, why });
    }

    pub fn leave(&mut self, node: &str) {
        let agent = self.agents.get_mut(node).expect("the test made it");
        let session = agent.session.take().expect("it is connected");
        let goodbye = Goodbye {
            reason: "SIGTERM".to_owned(),
            engines_stay: true,
        };
        let node = node.to_owned();
        self.apply(NodeEvent::Goodbye {
            node,
            session,
            goodbye,
        });
    }

    /// Everything at rest: looks, and lets agents do what they were told, until nothing happens any more.
    pub fn look(&mut self) {
        loop {
            self.controller.look();
            let mail: Vec<_> = lock(&self.rest.mail).drain(..).collect();
            if mail.is_empty() {
                return;
            }
            for (node, session, message) in mail {
                if !self.deaf {
                    self.obey(&node, session, message);
                }
            }
        }
    }

    /// Lets seconds pass, with a look in each.
    pub fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now_ms += 1_000;
            let alive: Vec<(String, SessionId, bool)> = self
                .agents
                .iter()
                .filter_map(|(id, agent)| Some((id.clone(), agent.session?, agent.draining)))
                .collect();
            for (node, session, draining) in alive {
                let heartbeat = Box::new(Heartbeat {
                    draining,
                    ..Heartbeat::default()
                });
                self.apply(NodeEvent::Heartbeat {
                    node,
                    session,
                    heartbeat,
                });
            }
            self.apply(NodeEvent::Tick);
            self.look();
        }
    }

    fn apply(&mut self, event: NodeEvent) {
        self.table.apply(event, self.now_ms);
        let observed = Arc::new(self.table.observed().clone());
        let _ = self.publish.send(observed);
    }

    fn obey(&mut self, node: &str, session: SessionId, message: ServerMessage) {
        let agent = self.agents.get_mut(node).expect("the test made it");
        if agent.session != Some(session) {
            return;
        }
        match message {
            ServerMessage::StartShard(start) => {
                let shard = start.spec.shard.clone();
                if !agent.shards.contains_key(&shard) {
                    let status = nodes::status(&start.spec, ShardState::Loading);
                    agent.shards.insert(shard.clone(), (start.spec, status));
                }
                self.report(node, &shard);
            }
            ServerMessage::StopShard(stop) => {
                let Some((_, status)) = agent.shards.get_mut(&stop.shard) else {
                    return;
                };
                status.state = match stop.how {
                    StopHow::Drain => ShardState::Draining,
                    StopHow::Stop | StopHow::Kill => ShardState::Stopped,
                };
                self.report(node, &stop.shard);
            }
            ServerMessage::DrainNode(drain) => {
                agent.draining = drain.draining;
                let heartbeat = Box::new(Heartbeat {
                    draining: drain.draining,
                    ..Heartbeat::default()
                });
                let node = node.to_owned();
                self.apply(NodeEvent::Heartbeat {
                    node,
                    session,
                    heartbeat,
                });
            }
            _ => {}
        }
    }

    fn report(&mut self, node: &str, shard: &str) {
        let agent = self.agents.get_mut(node).expect("the test made it");
        let Some((spec, status)) = agent.shards.get(shard).cloned() else {
            return;
        };
        if status.state == ShardState::Stopped {
            agent.shards.remove(shard);
        }
        let Some(session) = agent.session else {
            return;
        };
        let (node, spec) = (node.to_owned(), Some(spec));
        let report = Box::new(ShardReport { spec, status });
        self.apply(NodeEvent::Shard {
            node,
            session,
            report,
        });
    }

    /// An engine changes its state, and its agent says so.
    pub fn becomes(&mut self, replica: &str, state: ShardState, reason: &str) {
        let shard = format!("{replica}/0");
        let found = self
            .agents
            .iter_mut()
            .find(|(_, agent)| agent.shards.contains_key(&shard));
        let (node, agent) = found.expect("some agent has it");
        let node = node.clone();
        let (_, status) = agent.shards.get_mut(&shard).expect("it was just found");
        status.state = state;
        status.reason = reason.to_owned();
        status.since_ms = self.now_ms;
        if state == ShardState::Failed {
            let at_ms = self.now_ms;
            let text = "out of memory".to_owned();
            status.log_tail = vec![LogLine { at_ms, text }];
        }
        self.report(&node, &shard);
        self.look();
    }

    /// An agent says that an engine of its is somewhere else.
    pub fn is_said_to_be_at(&mut self, replica: &str, host: &str) {
        let shard = format!("{replica}/0");
        let found = self
            .agents
            .iter_mut()
            .find(|(_, agent)| agent.shards.contains_key(&shard));
        let (node, agent) = found.expect("some agent has it");
        let node = node.clone();
        let (spec, _) = agent.shards.get_mut(&shard).expect("it was just found");
        Arc::make_mut(spec).host = host.to_owned();
        self.report(&node, &shard);
        self.look();
    }

    pub fn ready(&mut self, replica: &str) {
        self.becomes(replica, ShardState::Ready, "");
    }

    pub fn fail(&mut self, replica: &str) {
        self.becomes(
            replica,
            ShardState::Failed,
            "exited: it exited with status 1",
        );
    }

    /// What agents run: `m/0 on a: ready`.
    pub fn running(&self) -> Vec<String> {
        let mut all = Vec::new();
        for (id, agent) in &self.agents {
            for (spec, status) in agent.shards.values() {
                all.push(format!(
                    "{} on {id}: {}",
                    spec.replica,
                    status.state.as_str()
                ));
            }
        }
        all
    }

    pub fn spec(&self, replica: &str) -> Arc<ShardSpec> {
        let shards = self.agents.values().flat_map(|agent| agent.shards.values());
        let found = shards
            .map(|(spec, _)| spec)
            .find(|spec| spec.replica == replica);
        found.expect("some agent has it").clone()
    }

    /// Addresses in the pool of `m`.
    pub fn pool(&self) -> Vec<String> {
        let served = lock(&self.rest.served);
        let endpoints = served.get("m").into_iter().flatten();
        endpoints
            .map(|placed| placed.endpoint.url.authority().to_owned())
            .collect()
    }

    pub fn outlook(&self) -> Outlook {
        lock(&self.rest.outlooks)
            .get("m")
            .cloned()
            .unwrap_or_default()
    }

    /// What was served and sent since the last time this was asked.
    pub fn log(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.rest.log))
    }
}

pub fn parse(models: &str) -> Config {
    let parsed = config::parse(
        Path::new("llmgw.yaml"),
        format!("models: {models}\n"),
        &|_| None,
    );
    parsed.unwrap_or_else(|errors| panic!("{errors}"))
}
