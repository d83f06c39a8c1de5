//! Which commands each session has: reconcile says the same at every look, an agent needs to hear it once.

use std::collections::BTreeMap;

use llmgw_proto::session::{SessionId, StopHow};

use crate::control::observed::Observed;
use crate::control::replicas::ShardKey;

/// A command that changed nothing that was reported is sent again after this time.
pub const COMMAND_REPEAT_MS: u64 = 15_000;

/// What a node or a shard was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    Stop(StopHow),
    Clear,
    Drain(bool),
}

#[derive(Clone, Debug, Default)]
pub struct Outbox {
    /// The last command to each shard; to a node itself with an empty shard.
    sent: BTreeMap<ShardKey, Sent>,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    session: SessionId,
    told: Told,
    at_ms: u64,
}

impl Outbox {
    pub fn has(&self, key: &ShardKey, session: SessionId, told: Told, now_ms: u64) -> bool {
        self.sent.get(key).is_some_and(|sent| {
            let is_same = sent.session == session && sent.told == told;
            is_same && now_ms.saturating_sub(sent.at_ms) < COMMAND_REPEAT_MS
        })
    }

    pub fn sent(&mut self, key: ShardKey, session: SessionId, told: Told, now_ms: u64) {
        let at_ms = now_ms;
        self.sent.insert(
            key,
            Sent {
                session,
                told,
                at_ms,
            },
        );
    }

    /// Forgets what was said to sessions that are no more, and about shards that are no more.
    pub fn retain(&mut self, observed: &Observed) {
        self.sent.retain(|key, sent| {
            let node = observed.nodes.get(&key.node);
            node.is_some_and(|node| {
                let is_there = key.shard.is_empty() || node.shards.contains_key(&key.shard);
                is_there && node.session == Some(sent.session)
            })
        });
    }
}
