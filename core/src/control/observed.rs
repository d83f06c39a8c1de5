//! What the server has heard of its nodes: plain data, and the pure table that keeps it ([`NodeTable`]).
//!
//! The server stores none of this: whatever is here was registered or reported by an agent of this run. Whether anything may be concluded
//! from what is *not* here is said by [`Observed::recovering`] and by each node's state.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use llmgw_proto::identity::{Moment, Serial};
use llmgw_proto::inventory::Inventory;
use llmgw_proto::session::{
    Goodbye, Heartbeat, PortRange, Refusal, Register, ServerMessage, SessionId, ShardReport,
};
use llmgw_proto::shard::{ShardSpec, ShardStatus};
use llmgw_proto::wire::error::WireError;

use super::snapshot::NodeState;

mod absence;
mod table;

pub use table::NodeTable;

/// All nodes, as heard.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// By node id. Cheap to copy: nodes that did not change are shared with the copy before.
    pub nodes: BTreeMap<String, Arc<ObservedNode>>,
    /// The server started only just, or its first agent came only just: agents still hold the truth, so nothing is placed and nothing
    /// missing is mourned.
    pub recovering: bool,
    /// So many nodes vanished at once that the trouble is probably the server's own: none of them becomes lost.
    pub brake: Option<Brake>,
    /// The table's own clock when this was true; every `_ms` in here is on it. It stands still while the server itself does.
    pub now_ms: u64,
    /// Grows with each change of anything but `last_heard_ms` and the GPUs' use.
    pub revision: u64,
}

/// One node, as heard.
#[derive(Clone, Debug)]
pub struct ObservedNode {
    pub state: NodeState,
    /// The stream that speaks for it, and that commands go to. None: unreachable or lost.
    pub session: Option<SessionId>,
    /// Since when nothing is heard, and why. None: it is connected.
    pub absence: Option<Absence>,
    pub last_heard_ms: u64,
    /// The interval that its session was told to be heard in: another one is for the sessions to come.
    pub heartbeat: Duration,
    /// An operator takes it out of use. Kept by the agent; also true while it is unreachable.
    pub draining: bool,
    /// What its session showed. None: it is not connected by TLS, or was not asked.
    pub certificate: Option<NodeCertificate>,
    pub agent_version: String,
    /// The run of the agent and the boot of the machine that spoke last.
    pub run: String,
    pub machine: String,
    /// Where the gateway reaches its engines: an address without a port.
    pub advertise: String,
    /// Its agent is on the server's own machine.
    pub is_local: bool,
    pub ports: PortRange,
    /// Names of the engines that it may start.
    pub engines: Vec<String>,
    /// Where a source that is a relative path lies. None: nowhere.
    pub models_dir: Option<String>,
    /// Which of its machine's agents spoke last. Empty: it did not say.
    pub state_dir: String,
    pub labels: BTreeMap<String, String>,
    /// As registered, with the GPUs' health and use of the last heartbeat.
    pub inventory: Result<Arc<Inventory>, String>,
    /// What it runs and what failed, by shard id. A shard that stopped is not here any more.
    pub shards: BTreeMap<String, ObservedShard>,
}

/// The certificate that a node speaks with, or spoke with last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeCertificate {
    /// Its common name.
    pub name: String,
    pub serial: Serial,
    pub not_after: Moment,
}

/// A shard, as reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedShard {
    pub spec: Arc<ShardSpec>,
    pub status: ShardStatus,
}

/// Why a node has no session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absence {
    pub since_ms: u64,
    /// From when `lost_after` counts: later than `since_ms` where the brake held it.
    pub counts_from_ms: u64,
    /// Since when the node is lost, where it is.
    pub lost_since_ms: Option<u64>,
    pub cause: Cause,
    /// What somebody who came as this node since was last told: most likely its own agent.
    pub refused: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The stream ended without a goodbye.
    StreamEnded(String),
    /// This server ended the session, for this reason.
    Refused(String),
    /// This server stops.
    ServerStops,
    /// Nothing was heard for three heartbeats.
    Silent,
    /// The agent stopped on purpose. Its engines may run on, so this is no alarm; for longer than `lost_after` it is a lost node like any other.
    Goodbye(Goodbye),
}

/// Why none of the absent nodes becomes lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Brake {
    pub since_ms: u64,
    /// Nodes that are absent or became lost within the last `lost_after`.
    pub absent: usize,
    /// Nodes that there are, those lost for longer left out.
    pub of: usize,
}

/// How long silence is tolerated. May change with a reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    pub heartbeat: Duration,
    pub lost_after: Duration,
    pub recovery: Duration,
}

/// What the table is told.
#[derive(Clone, Debug)]
pub enum NodeEvent {
    /// A session's first words, its identity checked.
    Registered {
        session: SessionId,
        register: Box<Register>,
        certificate: Option<NodeCertificate>,
        /// It comes from the server's own machine.
        is_local: bool,
    },
    Heartbeat {
        node: String,
        session: SessionId,
        heartbeat: Box<Heartbeat>,
    },
    Shard {
        node: String,
        session: SessionId,
        report: Box<ShardReport>,
    },
    Goodbye {
        node: String,
        session: SessionId,
        goodbye: Goodbye,
    },
    /// The stream ended, or was cut.
    Ended {
        node: String,
        session: SessionId,
        why: String,
    },
    /// This server ended the session, or let nobody in as this node.
    Dismissed {
        node: String,
        session: SessionId,
        cause: Cause,
    },
    /// Time passed.
    Tick,
}

/// What became of an event: what the caller has to do or may want to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// This session speaks for the node from now on: welcome it.
    Joined {
        node: String,
        session: SessionId,
        /// It was not known, or lost.
        is_new: bool,
    },
    /// This session is not wanted: tell it why and cut it. Never the one that speaks for a node.
    Refused {
        session: SessionId,
        refusal: Refusal,
    },
    /// Nothing was heard from this session for too long: cut it.
    Expired {
        node: String,
        session: SessionId,
    },
    /// Words of a session that no longer speaks for the node, or that make no sense; they changed nothing.
    Ignored {
        node: String,
        session: SessionId,
        why: Ignored,
    },
    State {
        node: String,
        from: Option<NodeState>,
        to: NodeState,
        /// None where it connected.
        cause: Option<Cause>,
    },
    /// What is here about the node's shards is no longer what it was.
    Shards {
        node: String,
    },
    Inventory {
        node: String,
    },
    BrakeHeld(Brake),
    BrakeReleased,
    /// The recovery is over. A first node that registers later begins another one.
    Recovered,
    /// It was lost for so long that it is no longer kept.
    Forgotten {
        node: String,
    },
}

/// Why an event changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ignored {
    /// Another session speaks for the node, or none.
    NotItsSession,
    /// A status of a shard that was never described.
    UnknownShard,
    /// The node refused another spec of a shard that runs.
    OtherSpec,
    /// The node reports more shards than [`NODE_SHARDS_MAX`].
    TooManyShards,
}

/// Shards of one node.
pub const NODE_SHARDS_MAX: usize = llmgw_proto::session::SHARDS_MAX;

/// Sends commands to nodes. A command is for one session: to another one it does not go.
pub trait Commands: Send + Sync {
    /// Returns at once. `Ok` is no promise that the node got it: only its reports tell.
    ///
    /// # Errors
    /// There is no such session any more, or it does not take what waits for it and was cut.
    fn send(&self, node: &str, session: SessionId, message: ServerMessage) -> Result<(), NotSent>;
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotSent {
    /// Another session speaks for the node, or none.
    SessionEnded,
    /// The node does not read; its session is cut.
    QueueFull,
    /// It can't be sent to anybody: what is in it that is too long.
    TooLarge(WireError),
}

impl std::fmt::Display for NotSent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NotSent::SessionEnded => f.write_str("the session has ended"),
            NotSent::QueueFull => {
                f.write_str("the node does not read its commands, its session was cut")
            }
            NotSent::TooLarge(error) => write!(f, "no node would take it: {error}"),
        }
    }
}

impl std::error::Error for NotSent {}

impl Observed {
    /// Nodes that commands can be sent to, with their session.
    pub fn connected(&self) -> impl Iterator<Item = (&str, SessionId, &ObservedNode)> {
        self.nodes
            .iter()
            .filter_map(|(id, node)| Some((id.as_str(), node.session?, &**node)))
    }
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Cause::StreamEnded(why) => write!(f, "the stream ended without a goodbye: {why}"),
            Cause::Refused(why) => write!(f, "refused: {why}"),
            Cause::ServerStops => f.write_str("this server stops"),
            Cause::Silent => f.write_str("nothing was heard for three heartbeats"),
            Cause::Goodbye(goodbye) => {
                let stay = match goodbye.engines_stay {
                    true => "its engines run on",
                    false => "its engines were stopped",
                };
                write!(f, "the agent stopped ({}), {stay}", goodbye.reason)
            }
        }
    }
}

#[cfg(test)]
mod tests;
