//! The hooks by name, and what each returns.

pub(crate) mod calls;
pub(crate) mod example;
pub(crate) mod launch;
pub(crate) mod placement;
pub(crate) mod returns;
pub mod views;
pub(crate) mod weights;

use std::sync::Arc;

use serde::Serialize;

/// A decision that may be written in Lua.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(
    missing_docs,
    reason = "the names are those of the hooks, which docs/reference lists"
)]
pub enum Hook {
    PlacementFilter,
    PlacementScore,
    Bands,
    Classify,
    Gate,
    Reject,
    Prices,
    Weight,
    Key,
    Weights,
    Rank,
    EngineMap,
    EngineValidate,
    EngineCommands,
    EngineClassifyError,
    EngineServesHttp,
}

impl Hook {
    /// All hooks, in the order of their counters.
    pub const ALL: [Hook; 16] = [
        Hook::PlacementFilter,
        Hook::PlacementScore,
        Hook::Bands,
        Hook::Classify,
        Hook::Gate,
        Hook::Reject,
        Hook::Prices,
        Hook::Weight,
        Hook::Key,
        Hook::Weights,
        Hook::Rank,
        Hook::EngineMap,
        Hook::EngineValidate,
        Hook::EngineCommands,
        Hook::EngineClassifyError,
        Hook::EngineServesHttp,
    ];

    /// As in documents and metrics: `routing.rank`.
    pub fn name(self) -> &'static str {
        match self {
            Hook::PlacementFilter => "placement.filter",
            Hook::PlacementScore => "placement.score",
            Hook::Bands => "admission.bands",
            Hook::Classify => "admission.classify",
            Hook::Gate => "admission.gate",
            Hook::Reject => "admission.reject",
            Hook::Prices => "fairness.prices",
            Hook::Weight => "fairness.weight",
            Hook::Key => "fairness.key",
            Hook::Weights => "routing.weights",
            Hook::Rank => "routing.rank",
            Hook::EngineMap => "engine.map",
            Hook::EngineValidate => "engine.validate",
            Hook::EngineCommands => "engine.commands",
            Hook::EngineClassifyError => "engine.classify_error",
            Hook::EngineServesHttp => "engine.serves_http",
        }
    }

    /// The function's name in its file.
    pub fn function(self) -> &'static str {
        self.name()
            .split_once('.')
            .map_or("", |(_, function)| function)
    }

    /// The file that defines it, e.g. `routing.lua`; `None` for the hooks of engines.
    pub(crate) fn file(self) -> Option<String> {
        let (noun, _) = self.name().split_once('.')?;
        (noun != "engine").then(|| format!("{noun}.lua"))
    }
}

impl Serialize for Hook {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Where a request waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Band {
    /// The band.
    pub name: Arc<str>,
    /// How long it may wait there, in ms; `None`: as long as the band says.
    pub ttl_ms: Option<u64>,
}

/// One band, as `admission.bands` describes it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BandSpec {
    /// Its name.
    pub name: Arc<str>,
    /// Higher goes first.
    pub priority: f64,
    /// Guaranteed share of service, 0..0.5.
    pub floor: f64,
    /// Requests that may wait, per model.
    pub max_queue: u64,
    /// How long one may wait, in ms.
    pub ttl_ms: u64,
    /// New requests are refused while the pool's saturation is above this, 0..1; `None`: never.
    pub shed: Option<f64>,
}

/// How much is sent to one replica; the rest waits in the gateway.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gate {
    /// Unfinished prompt work, in ms.
    pub hold_ms: f64,
    /// KV-cache use, 0..1.
    pub kv_max: f64,
    /// Requests; `None`: the replica's slots, 256 where unknown.
    pub inflight_max: Option<u32>,
}

/// What a token costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prices {
    /// One prompt token.
    pub input: f64,
    /// One prompt token that was in the cache.
    pub cached: f64,
    /// One generated token.
    pub output: f64,
}

/// How a request is turned away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// 429 or 503.
    pub status: u16,
    /// `Retry-After` before jitter, 1..60 s; `None`: worked out natively.
    pub wait_ms: Option<u64>,
}

/// A replica chosen by `routing.rank`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranked {
    /// Position in the candidates, from 0.
    pub index: usize,
    /// Why, for the access record; at most 64 bytes.
    pub reason: Option<String>,
}

/// What a failed upstream call means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// The request is wrong: pass the answer on, blame nobody.
    ClientFault,
    /// The replica is: try another one, and count it.
    RetryOther,
    /// Nobody could answer this: don't retry, and count it.
    Fatal,
    /// The replica is full, which is no fault.
    Busy,
}

impl ErrorClass {
    /// The native rule. Status 0 is a transport error.
    pub fn native(status: u16) -> ErrorClass {
        match status {
            429 => ErrorClass::Busy,
            501 | 400..=499 => ErrorClass::ClientFault,
            _ => ErrorClass::RetryOther,
        }
    }
}
