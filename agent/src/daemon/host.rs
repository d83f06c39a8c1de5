//! The supervisor, as the session sees it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use llmgw_proto::session::ShardReport;
use llmgw_proto::shard::{LogLine, ShardSpec, ShardStatus};

use crate::session::{ShardChanges, ShardHost};
use crate::supervisor::{StatusChanges, Supervisor};

pub(super) struct Shards(pub(super) Arc<Supervisor>);

impl ShardHost for Shards {
    fn shards(&self) -> Vec<(ShardSpec, ShardStatus)> {
        self.0.shards()
    }

    fn changes(&self) -> Box<dyn ShardChanges> {
        Box::new(Changes(self.0.status()))
    }

    fn start_shard(&self, spec: ShardSpec) -> Result<(), Box<ShardReport>> {
        match self.0.start_shard(spec) {
            Some(refused) => Err(Box::new(ShardReport {
                spec: refused.spec,
                status: refused.status,
            })),
            None => Ok(()),
        }
    }

    fn drain_shard(&self, shard: &str) -> bool {
        self.0.drain_shard(shard)
    }

    fn stop_shard(&self, shard: &str, force: bool) -> bool {
        self.0.stop_shard(shard, force)
    }

    fn tail(&self, shard: &str, lines: usize) -> Option<Vec<LogLine>> {
        // Reading no line tells whether the shard is here.
        self.0.follow(shard, u64::MAX, 0)?;
        Some(self.0.tail(shard, lines))
    }
}

struct Changes(StatusChanges);

impl ShardChanges for Changes {
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Vec<ShardStatus>> + Send + '_>> {
        Box::pin(self.0.next())
    }
}
