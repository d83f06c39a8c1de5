//! A replica as routing sees it, in a snapshot: the fields of `replica` in `routing.rank`.

use std::collections::BTreeMap;

use llmgw_plugins::ReplicaView;
use serde::{Deserialize, Serialize};

use super::facts::pairs;
use crate::routing::score::Candidate;

/// One replica, or one static endpoint. A number that is absent is unknown, but for counts, which are 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolReplica {
    pub id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms_per_prefill_token: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    #[serde(default)]
    pub inflight: u32,
    #[serde(default)]
    pub queued: u32,
    #[serde(default)]
    pub prefill_tokens: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<f64>,
    /// 0..1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics_age_ms: Option<f64>,
    #[serde(default)]
    pub prefix_tokens: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub est_ttft_ms: Option<f64>,
    #[serde(default)]
    pub errors_1m: f64,
}

impl PoolReplica {
    /// Labels for [`PoolReplica::view`], which borrows them.
    pub fn label_pairs(&self) -> Vec<(String, String)> {
        pairs(&self.labels)
    }

    /// What the native scorer sees.
    pub fn candidate(&self) -> Candidate {
        let unknown = Candidate::default();
        Candidate {
            inflight: self.inflight,
            queued: self.queued,
            slots: self.slots,
            prefill_tokens: self.prefill_tokens,
            ms_per_prefill_token: self
                .ms_per_prefill_token
                .unwrap_or(unknown.ms_per_prefill_token),
            running: self.running,
            waiting: self.waiting,
            kv: self.kv,
            metrics_age_ms: self.metrics_age_ms,
            errors_1m: self.errors_1m as u32,
            prefix_tokens: self.prefix_tokens,
            ..unknown
        }
    }

    pub fn view<'a>(&'a self, labels: &'a [(String, String)]) -> ReplicaView<'a> {
        ReplicaView {
            id: &self.id,
            node: self.node.as_deref(),
            rack: self.rack.as_deref(),
            zone: self.zone.as_deref(),
            gpu: self.gpu.as_deref(),
            labels,
            ms_per_prefill_token: self.ms_per_prefill_token,
            slots: self.slots,
            inflight: self.inflight,
            queued: self.queued,
            prefill_tokens: self.prefill_tokens,
            running: self.running,
            waiting: self.waiting,
            kv: self.kv,
            metrics_age_ms: self.metrics_age_ms,
            prefix_tokens: self.prefix_tokens,
            est_ttft_ms: self.est_ttft_ms,
            errors_1m: self.errors_1m,
        }
    }
}
