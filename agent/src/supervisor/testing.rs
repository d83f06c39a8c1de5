//! What the tests beside the code have in common.

use std::collections::BTreeMap;

use llmgw_proto::shard::{Readiness, ShardCommand, ShardSpec};

/// A shard of one command `serve` of the engine `fake`, on no GPU.
pub fn spec(shard: &str) -> ShardSpec {
    ShardSpec {
        shard: shard.to_owned(),
        replica: "m/0".to_owned(),
        model: "m".to_owned(),
        profile: "cpu".to_owned(),
        definition: "d1".into(),
        rank: 0,
        engine: "fake".to_owned(),
        commands: vec![ShardCommand {
            executable: "serve".to_owned(),
            args: Vec::new(),
            env: BTreeMap::new(),
            wait_for: None,
            sidecar: false,
        }],
        gpus: Vec::new(),
        cpus: None,
        memory_bytes: None,
        ports: Vec::new(),
        host: "127.0.0.1".to_owned(),
        serves_http: true,
        readiness: Readiness {
            health: "/health".to_owned(),
            models: "/v1/models".to_owned(),
            served_name: "m".to_owned(),
            start_deadline_ms: 1_000,
        },
        slots: None,
        stop_grace_ms: 1_000,
        api_key: None,
    }
}
