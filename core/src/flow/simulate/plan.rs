//! What is simulated: engines, and tenants that ask them for something.

use std::sync::Arc;

/// A simulation, whole.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// The same seed gives the same arrivals and the same choices.
    pub seed: u64,
    /// When it is cut off; absent: when the last request has ended. Clients that ask again and again need it.
    pub end_ms: Option<u64>,
    /// It is given up after so many events: a simulation has no other limit.
    pub events_max: u64,
    pub replicas: Vec<ReplicaPlan>,
    pub tenants: Vec<TenantPlan>,
    /// Requests of a trace, in the order of their time.
    pub recorded: Vec<Recorded>,
}

/// An engine.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaPlan {
    /// Requests at once.
    pub slots: u32,
    /// It reads one prompt at a time.
    pub ms_per_prefill_token: f64,
    /// A stream's next token, where it is alone.
    pub ms_per_decode_step: f64,
    /// What each other stream adds to that.
    pub ms_per_other_stream: f64,
    pub dies_ms: Option<u64>,
    pub returns_ms: Option<u64>,
}

impl Default for ReplicaPlan {
    fn default() -> ReplicaPlan {
        ReplicaPlan {
            slots: 4,
            ms_per_prefill_token: 0.5,
            ms_per_decode_step: 20.0,
            ms_per_other_stream: 0.0,
            dies_ms: None,
            returns_ms: None,
        }
    }
}

/// A tenant, and what its clients ask for.
#[derive(Debug, Clone)]
pub struct TenantPlan {
    pub name: Arc<str>,
    /// As configured; a policy may say something else.
    pub weight: f64,
    /// The band of a request that doesn't ask for one, and the highest that it may have.
    pub band: Arc<str>,
    pub best_band: Arc<str>,
    /// The band that its requests ask for.
    pub band_hint: Option<Arc<str>>,
    pub load: Load,
    pub input_tokens: Span,
    pub output_tokens: Span,
    pub stream: bool,
    /// Requests name one of so many sessions; 0: none.
    pub sessions: u32,
    /// A client leaves when its request has not ended by then.
    pub leaves_ms: Option<u64>,
}

impl TenantPlan {
    /// One client that asks for the same again and again.
    pub fn new(name: &str, band: &Arc<str>) -> TenantPlan {
        TenantPlan {
            name: Arc::from(name),
            weight: 1.0,
            band: band.clone(),
            best_band: band.clone(),
            band_hint: None,
            load: Load::Clients {
                count: 1,
                think_ms: 0,
            },
            input_tokens: Span::exactly(300),
            output_tokens: Span::exactly(150),
            stream: true,
            sessions: 0,
            leaves_ms: None,
        }
    }
}

/// When requests come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Load {
    /// Each client has one request at a time, and thinks before the next one.
    Clients { count: u32, think_ms: u64 },
    /// They come at random, whatever became of the earlier ones.
    Rate { per_s: f64 },
    /// Only those of a trace.
    Recorded,
}

/// Whole numbers from one to another, each equally likely.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub least: u64,
    pub greatest: u64,
}

impl Span {
    pub fn exactly(number: u64) -> Span {
        Span {
            least: number,
            greatest: number,
        }
    }
}

/// One request of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recorded {
    pub at_us: u64,
    /// Which of the plan's tenants.
    pub tenant: usize,
    pub input_tokens: u64,
    pub output_tokens: u64,
}
