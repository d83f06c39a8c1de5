//! The replicas that there are, derived from what agents reported and from starts that no report has confirmed yet.

use std::collections::BTreeSet;
use std::sync::Arc;

use llmgw_proto::session::SessionId;
use llmgw_proto::shard::{ShardSpec, ShardState};

use super::memory::Memory;
use super::observed::{Observed, ObservedNode};
use super::reach;
use super::snapshot::NodeState;

/// One shard on one node. The same shard id can be on two nodes: one that was lost comes back with what was placed again meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardKey {
    pub node: String,
    pub shard: String,
}

/// A replica, which in this version is one shard on one node.
#[derive(Clone, Debug)]
pub struct Replica {
    pub key: ShardKey,
    pub spec: Arc<ShardSpec>,
    pub state: ShardState,
    pub node_state: NodeState,
    /// Where commands go; none while its node is absent.
    pub session: Option<SessionId>,
    /// Its node is taken out of use, or is about to be.
    pub node_drains: bool,
    /// No report has confirmed it yet.
    pub is_only_sent: bool,
    /// It is said to be at an address that its node has no say over: nothing is sent there.
    pub is_elsewhere: bool,
}

impl Replica {
    /// All that are not over, in the order of nodes and shards.
    pub fn all(observed: &Observed, memory: &Memory) -> Vec<Replica> {
        let mut replicas = Vec::new();
        for (id, node) in &observed.nodes {
            let reported = node
                .shards
                .values()
                .filter(|shard| !shard.status.state.is_over())
                .map(|shard| Replica::on(id, node, memory, &shard.spec, shard.status.state));
            replicas.extend(reported);
            let sent = memory
                .starts_on(id)
                .filter(|start| !node.shards.contains_key(&start.spec.shard));
            replicas.extend(sent.map(|start| Replica {
                is_only_sent: true,
                ..Replica::on(id, node, memory, &start.spec, ShardState::Pending)
            }));
        }
        replicas
    }

    /// Those that failed and whose processes no signal ends: they run no more, and hold what they had.
    pub fn not_gone(observed: &Observed, memory: &Memory) -> Vec<Replica> {
        let mut replicas = Vec::new();
        for (id, node) in &observed.nodes {
            let left = node
                .shards
                .values()
                .filter(|shard| shard.status.is_not_gone())
                .map(|shard| Replica::on(id, node, memory, &shard.spec, shard.status.state));
            replicas.extend(left);
        }
        replicas
    }

    fn on(
        id: &str,
        node: &ObservedNode,
        memory: &Memory,
        spec: &Arc<ShardSpec>,
        state: ShardState,
    ) -> Replica {
        Replica {
            key: ShardKey {
                node: id.to_owned(),
                shard: spec.shard.clone(),
            },
            spec: spec.clone(),
            state,
            node_state: node.state,
            session: node.session,
            node_drains: memory.drains(id, node.draining),
            is_only_sent: false,
            is_elsewhere: !reach::may_serve_at(&spec.host, &node.advertise, node.is_local),
        }
    }

    pub fn model(&self) -> &str {
        &self.spec.model
    }

    /// Its engine serves, as far as is known.
    pub fn is_ready(&self) -> bool {
        self.state == ShardState::Ready
    }

    /// Its node is there to confirm it.
    pub fn is_heard(&self) -> bool {
        self.session.is_some()
    }

    /// The number in `<model>/<number>`; a replica that came from elsewhere may have none.
    pub fn number(&self) -> Option<u32> {
        number(&self.spec.replica)
    }

    /// It drains, and nothing brings it back. One that stops without anybody having said so is about to fail, and is not over before its
    /// failure is known: else another one would take its place at once, on the same node.
    pub fn drains(&self) -> bool {
        self.state == ShardState::Draining
    }
}

/// Numbers of a model that something still has: a replica, wherever it is and whatever became of it, or a start.
pub fn numbers_taken(observed: &Observed, memory: &Memory, model: &str) -> BTreeSet<u32> {
    let reported = observed
        .nodes
        .values()
        .flat_map(|node| node.shards.values())
        .map(|shard| &shard.spec);
    reported
        .chain(memory.starts().map(|start| &start.spec))
        .filter(|spec| spec.model == model)
        .filter_map(|spec| number(&spec.replica))
        .collect()
}

fn number(replica: &str) -> Option<u32> {
    replica.rsplit_once('/')?.1.parse().ok()
}

impl std::fmt::Display for ShardKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {}", self.shard, self.node)
    }
}
