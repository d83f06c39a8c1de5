//! Whether a shard may start, as far as that is known before anything is looked at, and what is told of one that may not.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use llmgw_proto::shard::{NOT_GONE, ShardSpec, ShardState, ShardStatus};

use super::Supervisor;
use super::machine::Reason;
use super::shard::{Handle, wall_ms};

/// Shards that a node runs at a time.
const SHARDS_MAX: usize = 256;

/// A shard that is not started. Nobody hears of it but who asked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// `None`: something that runs here has its name.
    pub spec: Option<Arc<ShardSpec>>,
    pub status: ShardStatus,
}

/// Whether a shard may start.
pub(super) enum Admission {
    Granted,
    /// It does already.
    Runs,
    Refused(Reason),
}

impl Supervisor {
    pub(super) fn admit(&self, shards: &BTreeMap<String, Handle>, handle: &Handle) -> Admission {
        let refused = |code, text: String| Admission::Refused(Reason::new(code, text));
        if self.closing.load(Ordering::Acquire) {
            return refused("agent_stops", "the agent is being stopped".to_owned());
        }
        let shard = &handle.spec.shard;
        let has_ended = |running: &Handle| {
            let status = self.context.board.get(shard, &running.spec_hash);
            status.is_some_and(|status| status.state.is_over())
        };
        match shards.get(shard) {
            Some(running) if !running.is_over() && has_ended(running) => {
                let text = "what is left of its last run does not end, and still holds its place";
                return refused(NOT_GONE, text.to_owned());
            }
            Some(running) if !running.is_over() && running.spec_hash == handle.spec_hash => {
                return Admission::Runs;
            }
            Some(running) if !running.is_over() => {
                let text =
                    format!("shard `{shard}` runs with another spec, and has to be stopped first");
                return refused("duplicate_shard", text);
            }
            _ => {}
        }
        let living = shards.values().filter(|handle| !handle.is_over()).count();
        if living >= SHARDS_MAX {
            let text = format!("the node runs {living} shards, which is its limit");
            return refused("too_many_shards", text);
        }
        Admission::Granted
    }
}

/// What is told of a shard that is not started. The spec of what has its name stays the one that is known.
pub(super) fn refused(
    shards: &BTreeMap<String, Handle>,
    handle: &Handle,
    reason: &Reason,
) -> Refused {
    let reason = reason.to_string();
    let shard = &handle.spec.shard;
    tracing::warn!(shard, reason, "a shard is refused");
    let has_its_name = shards.get(shard).is_some_and(|other| !other.is_over());
    Refused {
        spec: (!has_its_name).then(|| handle.spec.clone()),
        status: ShardStatus {
            shard: shard.clone(),
            spec_hash: handle.spec_hash.clone(),
            state: ShardState::Failed,
            reason,
            exit: None,
            log_tail: Vec::new(),
            since_ms: wall_ms(),
            adopted: false,
        },
    }
}
