//! Nodes and what they report, built in place.

use std::sync::Arc;

use llmgw_proto::inventory::Inventory;
use llmgw_proto::session::{PortRange, SessionId};
use llmgw_proto::shard::{Readiness, ShardSpec, ShardState, ShardStatus};

use crate::control::observed::{Observed, ObservedNode, ObservedShard};
use crate::control::replicas::ShardKey;
use crate::control::snapshot::NodeState;

const INVENTORY: &str = include_str!("../../../../tests/recordings/inventory/two-gpus.json");
/// What a replica is made from, unless a test says otherwise.
pub(crate) const CURRENT: &str = "now";
pub(crate) const OUTDATED: &str = "before";

/// The shortest way to an [`Observed`]. Replicas are written as `m/0`, and their one shard is `m/0/0`.
pub(crate) struct Nodes(pub Observed);

impl Nodes {
    /// Connected nodes with two GPUs each.
    pub(crate) fn new(ids: &[&str]) -> Nodes {
        let mut nodes = Nodes(Observed::default());
        nodes.0.now_ms = 1_000_000;
        for (at, id) in ids.iter().enumerate() {
            nodes.0.nodes.insert((*id).to_owned(), node(id, at as u64));
        }
        nodes
    }

    pub(crate) fn edit(mut self, id: &str, change: impl FnOnce(&mut ObservedNode)) -> Nodes {
        let node = self.0.nodes.get_mut(id).expect("the test made it");
        change(Arc::make_mut(node));
        self
    }

    pub(crate) fn with(self, id: &str, replica: &str, state: ShardState) -> Nodes {
        self.with_spec(id, spec(replica), state)
    }

    pub(crate) fn outdated(self, id: &str, replica: &str, state: ShardState) -> Nodes {
        let mut spec = spec(replica);
        spec.definition = OUTDATED.to_owned();
        self.with_spec(id, spec, state)
    }

    pub(crate) fn with_spec(self, id: &str, spec: ShardSpec, state: ShardState) -> Nodes {
        self.edit(id, |node| {
            let status = status(&spec, state);
            let spec = Arc::new(spec);
            node.shards
                .insert(spec.shard.clone(), ObservedShard { spec, status });
        })
    }

    pub(crate) fn draining(self, id: &str) -> Nodes {
        self.edit(id, |node| {
            node.draining = true;
            node.state = NodeState::Draining;
        })
    }

    pub(crate) fn absent(self, id: &str, state: NodeState) -> Nodes {
        self.edit(id, |node| {
            node.session = None;
            node.state = state;
        })
    }

    pub(crate) fn later(mut self, ms: u64) -> Nodes {
        self.0.now_ms += ms;
        self
    }
}

pub(crate) fn node(id: &str, session: u64) -> Arc<ObservedNode> {
    let mut inventory: Inventory = serde_json::from_str(INVENTORY).expect("it is one");
    inventory.node = id.to_owned();
    for gpu in &mut inventory.gpus.devices {
        gpu.uuid = gpu.uuid.clone().map(|uuid| format!("{uuid}-{id}"));
    }
    let domains = inventory.gpus.nvlink_domains.clone();
    inventory.gpus.nvlink_domains = domains.map(|mut domains| {
        for uuid in domains.iter_mut().flat_map(|domain| &mut domain.gpus) {
            uuid.push_str(&format!("-{id}"));
        }
        domains
    });
    Arc::new(ObservedNode {
        state: NodeState::Ready,
        session: Some(SessionId(session)),
        absence: None,
        last_heard_ms: 0,
        heartbeat: std::time::Duration::from_secs(5),
        draining: false,
        certificate: None,
        agent_version: "0.1.0".to_owned(),
        run: "r".to_owned(),
        machine: String::new(),
        advertise: format!("10.0.0.{}", session + 1),
        is_local: false,
        ports: PortRange {
            first: 21_000,
            last: 21_009,
        },
        engines: ["llamacpp", "vllm", "sglang"].map(str::to_owned).to_vec(),
        models_dir: Some("/models".to_owned()),
        state_dir: String::new(),
        labels: inventory.labels.clone(),
        inventory: Ok(Arc::new(inventory)),
        shards: std::collections::BTreeMap::new(),
    })
}

pub(crate) fn spec(replica: &str) -> ShardSpec {
    let (model, _) = replica.rsplit_once('/').expect("`model/number`");
    ShardSpec {
        shard: format!("{replica}/0"),
        replica: replica.to_owned(),
        model: model.to_owned(),
        profile: "p".to_owned(),
        definition: CURRENT.to_owned(),
        rank: 0,
        engine: "llamacpp".to_owned(),
        commands: Vec::new(),
        gpus: Vec::new(),
        cpus: None,
        memory_bytes: None,
        ports: vec![21_000],
        host: "10.0.0.1".to_owned(),
        serves_http: true,
        readiness: Readiness {
            health: "/health".to_owned(),
            models: "/v1/models".to_owned(),
            served_name: model.to_owned(),
            start_deadline_ms: 1_000,
        },
        slots: None,
        stop_grace_ms: 1_000,
        api_key: None,
    }
}

pub(crate) fn status(spec: &ShardSpec, state: ShardState) -> ShardStatus {
    ShardStatus {
        shard: spec.shard.clone(),
        spec_hash: spec.hash(),
        state,
        reason: String::new(),
        exit: None,
        log_tail: Vec::new(),
        since_ms: 0,
        adopted: false,
    }
}

/// The shard of `m/0` on a node.
pub(crate) fn key(node: &str, replica: &str) -> ShardKey {
    ShardKey {
        node: node.to_owned(),
        shard: format!("{replica}/0"),
    }
}
