//! Where the output of a replica is: at its agent, or, once it failed, what was kept of it here.

use super::{Controller, OperatorError};
use crate::control::memory::Failure;

/// The output of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Its agent has it.
    At { node: String, shard: String },
    /// It failed and is gone there; this is what was kept.
    Kept(Failure),
}

impl Controller {
    /// Where the output of a replica's rank is to be had. Waits for a look that is under way.
    pub fn output_of(&self, replica: &str, rank: u32) -> Result<Output, OperatorError> {
        let (state, view) = self.locked();
        let mut known = Vec::new();
        let mut absent = None;
        for (id, node) in &view.observed.nodes {
            for shard in node.shards.values() {
                known.push(shard.spec.replica.as_str());
                if shard.spec.replica != replica || shard.spec.rank != rank {
                    continue;
                }
                if node.session.is_some() {
                    return Ok(Output::At {
                        node: id.clone(),
                        shard: shard.spec.shard.clone(),
                    });
                }
                if !shard.status.state.is_over() {
                    absent = Some((id, node.state));
                }
            }
        }
        if let Some((node, state)) = absent {
            return Err(OperatorError::Absent {
                replica: replica.to_owned(),
                node: node.clone(),
                state,
            });
        }
        let model = replica.rsplit_once('/').map_or(replica, |(model, _)| model);
        let failures = state.memory.failures(model);
        let mut kept = failures.into_iter().flat_map(|failures| &failures.kept);
        if let Some(failure) = kept.rfind(|failure| failure.replica == replica) {
            return Ok(Output::Kept(failure.clone()));
        }
        Err(OperatorError::unknown(
            "replica",
            replica,
            known.into_iter(),
        ))
    }
}
