//! Changes of a fleet that keep it whole: what a replica held is free again when it leaves.

use super::{Node, Replica, ShardState, Snapshot};

impl Snapshot {
    /// Takes a replica away; false where there is none.
    pub fn release(&mut self, replica: &str) -> bool {
        let Some(gone) = self.replicas.remove(replica) else {
            return false;
        };
        for shard in &gone.shards {
            let Some(node) = self.nodes.get_mut(&shard.node) else {
                continue;
            };
            node.cpus_free = node.cpus_free.saturating_add(shard.cpus).min(node.cpus);
            node.memory_gib_free = (node.memory_gib_free + shard.memory_gib).min(node.memory_gib);
            node.ports_free = node.ports_free.map(|free| free.saturating_add(1));
            for gpu in &mut node.gpus {
                gpu.used_by.take_if(|user| user == replica);
            }
        }
        true
    }

    /// Takes a node away, and with it the replicas that had a part there; false where there is none.
    pub fn remove_node(&mut self, id: &str) -> bool {
        for replica in self.replicas_on(id) {
            self.release(&replica);
        }
        self.nodes.remove(id).is_some()
    }

    /// Ids of the replicas that have a part on this node.
    pub fn replicas_on(&self, node: &str) -> Vec<String> {
        self.replicas
            .iter()
            .filter(|(_, replica)| replica.shards.iter().any(|shard| shard.node == node))
            .map(|(id, _)| id.clone())
            .collect()
    }

    /// Replicas of a model that are there to stay.
    pub fn running(&self, model: &str) -> usize {
        self.replicas
            .values()
            .filter(|replica| replica.model == model && replica.state.stays())
            .count()
    }

    /// Replicas of a model that are ready.
    pub fn ready(&self, model: &str) -> usize {
        let replicas = self.replicas.values();
        let is_ready = |replica: &&Replica| replica.state == ShardState::Ready;
        replicas
            .filter(|replica| replica.model == model)
            .filter(is_ready)
            .count()
    }

    /// The least number that no replica of this model has.
    pub fn next_number(&self, model: &str) -> u32 {
        (0..)
            .find(|number| !self.replicas.contains_key(&format!("{model}/{number}")))
            .unwrap_or(u32::MAX)
    }
}

impl Node {
    /// Makes exactly so many GPUs free: the last ones in order are taken, the first ones given back. The error says why
    /// that is impossible.
    pub(super) fn set_gpus_free(&mut self, wanted: usize) -> Result<(), String> {
        let healthy = self.gpus.iter().filter(|gpu| gpu.healthy).count();
        if wanted > healthy {
            return Err(format!(
                "the node has {} GPUs, of which {healthy} are healthy",
                self.gpus.len()
            ));
        }
        let mut free = self.gpus.iter().filter(|gpu| gpu.free()).count();
        for gpu in self.gpus.iter_mut().rev() {
            if free > wanted && gpu.free() {
                gpu.used_by = Some(super::RESERVED.to_owned());
                free -= 1;
            }
        }
        for gpu in &mut self.gpus {
            if free < wanted && gpu.healthy && gpu.used_by.is_some() {
                gpu.used_by = None;
                free += 1;
            }
        }
        Ok(())
    }
}
