//! The fleet as policies see it, at one moment, as data: the file `schema: llmgw.fleet/1` (`docs/reference/snapshot.md`).
//!
//! What follows from the rest (a node's free GPUs, its NVLink domains) is not stored: [`NodeFacts`] derives it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

mod change;
mod check;
mod facts;
mod generate;
mod path;
mod pool;
mod profile;
mod read;
mod set;

pub(crate) use check::capability_of;
pub use facts::NodeFacts;
pub(crate) use facts::{count, pairs as label_pairs};
#[cfg(test)]
pub(crate) use generate::Draws;
pub use generate::generate;
pub use pool::PoolReplica;
pub(crate) use profile::memory_gib;
pub use profile::{LaunchModeEntry, ProfileEntry};
pub use read::SnapshotError;
pub use set::SetError;

/// The format that this program reads and writes.
pub const SCHEMA: &str = "llmgw.fleet/1";
/// `used_by` of a GPU whose memory a process holds that llmgw did not start.
pub const FOREIGN: &str = "foreign";
/// `used_by` of a GPU that is taken by nobody in particular: a test that varied `gpus_free`.
pub const RESERVED: &str = "reserved";
/// Size of a file.
pub const SNAPSHOT_MAX_BYTES: u64 = 64 << 20;
/// Nodes in a fleet.
pub const NODES_MAX: usize = 10_000;
/// GPUs in a node.
pub const NODE_GPUS_MAX: usize = 128;

/// A whole fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// [`SCHEMA`].
    pub schema: String,
    /// The program that wrote it, and its version.
    pub generated_by: String,
    /// When, RFC 3339 in UTC: `2026-07-01T12:00:00Z`.
    pub taken_at: String,
    /// By name.
    #[serde(deserialize_with = "read::unique")]
    pub nodes: BTreeMap<String, Node>,
    /// By name, without aliases.
    #[serde(default, deserialize_with = "read::unique")]
    pub models: BTreeMap<String, ModelEntry>,
    /// Replicas that hold something on nodes, by id: `<model>/<number>`.
    #[serde(default, deserialize_with = "read::unique")]
    pub replicas: BTreeMap<String, Replica>,
    /// What routing chooses from, by model; only tests of routing need it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(deserialize_with = "read::unique")]
    pub pools: BTreeMap<String, Vec<PoolReplica>>,
}

/// A machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Default `ready`.
    #[serde(default)]
    pub state: NodeState,
    /// Why nothing goes there although it is ready, such as an inventory that can't be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Engines that its agent may start; absent: not known, so none is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engines: Option<Vec<String>>,
    /// What the operator says about it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Fabrics that a multi-node replica may use on it, the preferred one first. Ambiguous ones are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fabrics: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<Gpu>,
    /// InfiniBand and RoCE ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<Adapter>,
    /// Cores.
    pub cpus: u32,
    /// Cores that no replica has claimed.
    pub cpus_free: u32,
    pub memory_gib: f64,
    /// Memory that no replica has claimed.
    pub memory_gib_free: f64,
    /// Ports of its range that nothing has; absent: not known, so none is refused for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports_free: Option<u32>,
    /// Models whose weights are on its disks; absent: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached: Option<Vec<String>>,
}

impl Node {
    /// What the operator says of it under this name; `rack` and `zone` may stand for themselves.
    pub fn label(&self, name: &str) -> Option<&str> {
        let apart = match name {
            "rack" => self.rack.as_ref(),
            "zone" => self.zone.as_ref(),
            _ => None,
        };
        self.labels.get(name).or(apart).map(String::as_str)
    }
}

/// What the server knows of a node's connection and intentions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    #[default]
    Ready,
    /// It takes nothing new.
    Draining,
    /// Its stream broke.
    Unreachable,
    /// Unreachable for longer than `lost_after`.
    Lost,
}

/// One card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Unique in the fleet.
    pub uuid: String,
    /// The driver's number of it.
    pub index: u32,
    /// `h100-sxm-80g`: the model and the GiB that the driver reports.
    pub class: String,
    /// GPUs of one node with the same number reach each other over NVLink; absent: it reaches none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<u32>,
    /// `9.0`; absent: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<String>,
    /// Default true.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub healthy: bool,
    /// What is wrong with it, where it is not healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The replica that has it, [`FOREIGN`] or [`RESERVED`]; absent: nobody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_by: Option<String>,
    /// Absent: not known. For policies' authors; whether it is taken is in `used_by`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_free_gib: Option<f64>,
}

/// A port of an InfiniBand or RoCE adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adapter {
    /// `mlx5_0`.
    pub name: String,
    pub link: Link,
    /// Absent: down, where the kernel's number means nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_gbit: Option<f64>,
    /// One of the node's `fabrics`; absent: none, such as an adapter for storage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<String>,
}

/// What is on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Link {
    Infiniband,
    Roce,
}

/// A model with profiles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelEntry {
    /// What the engine loads; absent: the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Replicas wanted, default 1.
    #[serde(default = "one")]
    pub replicas: u32,
    /// In order of preference.
    #[serde(default)]
    pub profiles: Vec<ProfileEntry>,
}

/// A running copy of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replica {
    pub model: String,
    pub profile: String,
    pub state: ShardState,
    /// By rank.
    pub shards: Vec<Shard>,
}

/// The part of a replica on one node. Its GPUs are those whose `used_by` is the replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    pub node: String,
    /// Cores that it claimed, default 0.
    #[serde(default)]
    pub cpus: u32,
    /// Memory that it claimed, default 0.
    #[serde(default)]
    pub memory_gib: f64,
    /// Default: the replica's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<ShardState>,
}

/// How far a shard is, and with it its replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardState {
    Pending,
    Starting,
    Loading,
    Ready,
    Draining,
    Stopping,
    Stopped,
    Failed,
}

fn yes() -> bool {
    true
}

fn one() -> u32 {
    1
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_true(value: &bool) -> bool {
    *value
}

impl NodeState {
    pub fn as_str(self) -> &'static str {
        match self {
            NodeState::Ready => "ready",
            NodeState::Draining => "draining",
            NodeState::Unreachable => "unreachable",
            NodeState::Lost => "lost",
        }
    }
}

impl ShardState {
    /// It serves, or is meant to: others keep their distance from it, and it counts as one of the replicas wanted.
    pub fn stays(self) -> bool {
        matches!(
            self,
            ShardState::Pending | ShardState::Starting | ShardState::Loading | ShardState::Ready
        )
    }
}

impl Gpu {
    /// A replica may be put on it.
    pub fn free(&self) -> bool {
        self.healthy && self.used_by.is_none()
    }
}

impl Default for Snapshot {
    fn default() -> Self {
        Snapshot {
            schema: SCHEMA.to_owned(),
            generated_by: concat!("llmgw ", env!("CARGO_PKG_VERSION")).to_owned(),
            taken_at: "1970-01-01T00:00:00Z".to_owned(),
            nodes: BTreeMap::new(),
            models: BTreeMap::new(),
            replicas: BTreeMap::new(),
            pools: BTreeMap::new(),
        }
    }
}
