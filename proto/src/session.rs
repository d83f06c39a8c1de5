//! What an agent and a server say to each other over a session, in words of our own; `convert` has them as bytes.
//!
//! The agent dials out and registers everything: what the node is and what it runs. From then on it reports changes, and the server
//! commands. Whatever either of them says after the registration carries the session's number, so that words from a dead stream are known as such.

use std::fmt;
use std::sync::Arc;

use crate::inventory::Inventory;
use crate::inventory::gpu::HealthFlag;
use crate::shard::{LogLine, ShardSpec, ShardStatus};

/// Shards of one node. More are not registered, and no more are started.
pub const SHARDS_MAX: usize = 512;
/// A node's id is a name in certificates, whose common names are not longer, and in commands.
pub const NODE_ID_MAX_BYTES: usize = 64;

/// A session's number, given by the server. Of two of one server the later one is the greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// Whether a text may be the id of a node: letters, digits, `.`, `_` and `-`, at most [`NODE_ID_MAX_BYTES`].
pub fn is_node_id(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !text.is_empty() && text.len() <= NODE_ID_MAX_BYTES && text.chars().all(good)
}

/// What goes up.
#[derive(Clone, Debug, PartialEq)]
pub enum AgentMessage {
    /// First, at every connect.
    Register(Box<Register>),
    Heartbeat(Box<Heartbeat>),
    ShardStatus(Box<ShardReport>),
    LogChunk(LogChunk),
    /// The agent stops on purpose. A stream that ends without it is a node that was lost.
    Goodbye(Goodbye),
}

/// Everything that a node is and runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Register {
    /// The node id that it claims.
    pub node: String,
    pub agent_version: String,
    /// Differs for every run of an agent.
    pub run: String,
    /// Differs for every boot of a machine; empty: not known.
    pub machine: String,
    /// Where the gateway reaches its engines: an IP address without a port.
    pub advertise: String,
    /// What engines may listen on.
    pub ports: PortRange,
    /// Names of the engines that it may start.
    pub engines: Vec<String>,
    /// The directory that a source which is a relative path lies in, as an absolute path. None: it has none.
    pub models_dir: Option<String>,
    /// Where the agent keeps what survives a restart, as an absolute path: no two agents of a machine share one. Empty: not known.
    pub state_dir: String,
    /// An operator takes it out of use. The agent keeps that, the server does not.
    pub draining: bool,
    pub inventory: Told,
    pub shards: Vec<ShardReport>,
}

/// An inventory as far as the receiver could read it. One that it can't read must not keep it from hearing what runs.
#[derive(Clone, Debug, PartialEq)]
pub enum Told {
    Inventory(Arc<Inventory>),
    /// Why not.
    Unreadable(String),
}

/// Both ends belong to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    pub first: u16,
    pub last: u16,
}

/// That the node lives, and what changes all the time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Heartbeat {
    pub draining: bool,
    pub gpus: Vec<GpuBeat>,
    /// The whole inventory again, where more of it changed than numbers.
    pub inventory: Option<Told>,
}

/// Health and use of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuBeat {
    pub uuid: String,
    /// None: not known.
    pub used_mib: Option<u64>,
    /// Empty: nothing wrong is known.
    pub health: Vec<HealthFlag>,
}

/// How a shard is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardReport {
    /// With every registration, and with the first report of a shard in a session: nobody needs to remember it for the agent.
    pub spec: Option<Arc<ShardSpec>>,
    pub status: ShardStatus,
}

/// A part of an answer to [`TailLog`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogChunk {
    /// The number that was asked with.
    pub request: u64,
    pub lines: Vec<LogLine>,
    /// No further part follows.
    pub is_last: bool,
    /// Why there is nothing, where there should be something.
    pub problem: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Goodbye {
    /// Why it stops.
    pub reason: String,
    /// Its engines run on.
    pub engines_stay: bool,
}

/// What comes down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerMessage {
    /// The registration is accepted.
    Welcome(Welcome),
    StartShard(Box<StartShard>),
    StopShard(StopShard),
    DrainNode(DrainNode),
    TailLog(TailLog),
    /// The session is not wanted; nothing follows.
    Refused(Refusal),
    /// The server stops or restarts; nothing follows. Engines are not meant.
    Leaving(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The agent sends a heartbeat this often.
    pub heartbeat_ms: u64,
    pub server_version: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartShard {
    pub spec: Arc<ShardSpec>,
    /// As the server computed it. The agent that computes another one has not understood the whole spec, and refuses.
    pub spec_hash: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopShard {
    pub shard: String,
    pub how: StopHow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopHow {
    /// It goes on with what it has, and is reported as draining.
    Drain,
    /// SIGTERM, its grace period, SIGKILL.
    Stop,
    /// SIGKILL.
    Kill,
}

/// Takes a node out of use, or puts it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainNode {
    pub draining: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TailLog {
    /// Comes back with each [`LogChunk`].
    pub request: u64,
    pub shard: String,
    pub lines: u32,
}

/// Why a session is not wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: RefusalCode,
    /// One sentence, for the log of the agent's machine.
    pub message: String,
    /// The name in the agent's certificate, where it showed one.
    pub certificate: Option<String>,
    /// The node id that it claimed.
    pub claimed: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalCode {
    /// The certificate does not say what the agent claims.
    Identity,
    /// Another machine speaks for this node at this moment.
    NodeTaken,
    /// A newer session speaks for this node.
    Superseded,
    /// What it sent can't be understood.
    Malformed,
    /// Nothing was heard for too long, or nothing was read.
    TooSlow,
    /// There are as many nodes as the server can hold.
    Full,
    /// A word of a newer release.
    Other,
}

impl Register {
    /// The inventory, where it could be read.
    pub fn inventory(&self) -> Option<&Arc<Inventory>> {
        match &self.inventory {
            Told::Inventory(inventory) => Some(inventory),
            Told::Unreadable(_) => None,
        }
    }
}

impl AgentMessage {
    /// Its name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            AgentMessage::Register(_) => "register",
            AgentMessage::Heartbeat(_) => "heartbeat",
            AgentMessage::ShardStatus(_) => "shard_status",
            AgentMessage::LogChunk(_) => "log_chunk",
            AgentMessage::Goodbye(_) => "goodbye",
        }
    }
}

impl ServerMessage {
    /// Its name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            ServerMessage::Welcome(_) => "welcome",
            ServerMessage::StartShard(_) => "start_shard",
            ServerMessage::StopShard(_) => "stop_shard",
            ServerMessage::DrainNode(_) => "drain_node",
            ServerMessage::TailLog(_) => "tail_log",
            ServerMessage::Refused(_) => "refused",
            ServerMessage::Leaving(_) => "leaving",
        }
    }

    pub fn start(spec: Arc<ShardSpec>) -> ServerMessage {
        let spec_hash = spec.hash();
        ServerMessage::StartShard(Box::new(StartShard { spec, spec_hash }))
    }
}

impl PortRange {
    pub fn contains(&self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }
}

impl RefusalCode {
    /// Trying again soon is of no use: somebody must change something first. Otherwise the refusal is about this one stream.
    pub fn needs_a_person(self) -> bool {
        match self {
            RefusalCode::Identity
            | RefusalCode::NodeTaken
            | RefusalCode::Superseded
            | RefusalCode::Malformed
            | RefusalCode::Full
            | RefusalCode::Other => true,
            RefusalCode::TooSlow => false,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            RefusalCode::Identity => "identity",
            RefusalCode::NodeTaken => "node_taken",
            RefusalCode::Superseded => "superseded",
            RefusalCode::Malformed => "malformed",
            RefusalCode::TooSlow => "too_slow",
            RefusalCode::Full => "full",
            RefusalCode::Other => "other",
        }
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl fmt::Display for Refusal {
    /// What the operator of the agent's machine needs: what was shown and what was claimed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}; claimed node `{}`, ",
            self.message,
            self.code.as_str(),
            self.claimed
        )?;
        match &self.certificate {
            Some(name) => write!(f, "certificate `{name}`)"),
            None => f.write_str("no certificate)"),
        }
    }
}
