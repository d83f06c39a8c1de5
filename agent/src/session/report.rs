//! What is told of this node: all of it when it registers, then what changed since.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use llmgw_proto::inventory::gpu::DriverState;
use llmgw_proto::inventory::{Inventory, Reading};
use llmgw_proto::session::{
    AgentMessage, GpuBeat, Heartbeat, Register, SHARDS_MAX, ShardReport, Told as ToldInventory,
};
use llmgw_proto::shard::{ShardState, ShardStatus};

use super::{Session, ShardHost};

/// What the server knows in this session.
pub(super) struct Told {
    /// By shard: the hash of the spec that it has.
    specs: BTreeMap<String, String>,
    /// Without the numbers that change all the time.
    inventory: Inventory,
}

impl Session {
    /// Everything, and what the server knows once it has it.
    pub(super) fn register(&self, advertise: IpAddr) -> (AgentMessage, Told) {
        let inventory = self.inventory.latest();
        let mut shards = self.shards.shards();
        // What runs comes first: what is beyond the limit is over for longest.
        shards.sort_by_key(|(_, status)| (status.state.is_over(), u64::MAX - status.since_ms));
        shards.truncate(SHARDS_MAX);
        let told = Told {
            specs: shards
                .iter()
                .map(|(spec, status)| (spec.shard.clone(), status.spec_hash.clone()))
                .collect(),
            inventory: without_numbers(&inventory),
        };
        let options = &self.options;
        let register = Register {
            node: options.node.clone(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            run: self.run.clone(),
            machine: self.machine.clone(),
            advertise: advertise.to_string(),
            ports: options.ports,
            engines: options.engines.clone(),
            models_dir: options.models_dir.clone(),
            state_dir: options.state_dir.clone(),
            draining: self.drains(),
            inventory: ToldInventory::Inventory(inventory),
            shards: shards
                .into_iter()
                .map(|(spec, status)| ShardReport {
                    spec: Some(Arc::new(spec)),
                    status,
                })
                .collect(),
        };
        (AgentMessage::Register(Box::new(register)), told)
    }
}

impl Told {
    /// That the node lives; with the whole inventory where more than numbers changed.
    pub(super) fn heartbeat(
        &mut self,
        inventory: &Arc<Inventory>,
        draining: bool,
    ) -> Box<Heartbeat> {
        let now = without_numbers(inventory);
        let is_other = now != self.inventory;
        if is_other {
            self.inventory = now;
        }
        let gpus = inventory.gpus.devices.iter().filter_map(|gpu| {
            Some(GpuBeat {
                uuid: gpu.uuid.value()?.clone(),
                used_mib: gpu.memory.used_mib.value().copied(),
                health: gpu.health.clone(),
            })
        });
        Box::new(Heartbeat {
            draining,
            gpus: gpus.collect(),
            inventory: is_other.then(|| ToldInventory::Inventory(inventory.clone())),
        })
    }

    /// A shard's status, with its spec where the server does not have that.
    pub(super) fn status(&mut self, status: ShardStatus, host: &dyn ShardHost) -> AgentMessage {
        let is_known = self.specs.get(&status.shard) == Some(&status.spec_hash);
        let spec = match is_known {
            true => None,
            false => host
                .shards()
                .into_iter()
                .map(|(spec, _)| spec)
                .find(|spec| spec.shard == status.shard && spec.hash() == status.spec_hash),
        };
        match status.state {
            // The server forgets it, so a later one of this name is new to it.
            ShardState::Stopped => drop(self.specs.remove(&status.shard)),
            _ if spec.is_some() => {
                let hash = status.spec_hash.clone();
                self.specs.insert(status.shard.clone(), hash);
            }
            _ => {}
        }
        let report = ShardReport {
            spec: spec.map(Arc::new),
            status,
        };
        AgentMessage::ShardStatus(Box::new(report))
    }
}

/// The inventory without what every heartbeat tells anyway, and without what changes with every look at it.
fn without_numbers(inventory: &Inventory) -> Inventory {
    let mut inventory = inventory.clone();
    let unread = || Reading::unknown("");
    // A driver that does not answer: that it is silent is news, for how long is not. Messages may count seconds.
    if inventory.gpus.driver != DriverState::Answering {
        inventory.gpus = inventory.gpus.aged(0);
    }
    for failure in &mut inventory.gpus.passed_over {
        failure.message.clear();
    }
    inventory.host.memory.available_bytes = unread();
    for gpu in &mut inventory.gpus.devices {
        gpu.health.clear();
        gpu.memory.used_mib = unread();
        gpu.processes = Reading::unknown("");
    }
    inventory
}
