//! Why a node can't take a job: a stable code, a sentence, and the numbers.

use serde::{Serialize, Serializer};

/// Codes of the kernel, in the order in which a node's reasons are listed. A policy adds its own.
pub mod code {
    /// The node takes nothing new, or is out of reach.
    pub const NODE_STATE: &str = "node_state";
    /// The node's agent may not start the engine.
    pub const ENGINE: &str = "engine";
    /// The node lacks a label that the profile's `node_selector` asks for.
    pub const LABELS: &str = "labels";
    /// The node has no GPU at all; such nodes are counted apart.
    pub const NO_GPU: &str = "no_gpu";
    /// The node's GPUs are of another class.
    pub const GPU_CLASS: &str = "gpu_class";
    /// The node has fewer GPUs of the class than the job needs, used or not.
    pub const GPU_COUNT: &str = "gpu_count";
    /// The profile computes in fp8, the class can't.
    pub const FP8: &str = "fp8";
    /// Too many GPUs are not healthy.
    pub const UNHEALTHY: &str = "unhealthy";
    /// Processes that llmgw did not start hold memory of too many GPUs.
    pub const GPUS_HELD: &str = "gpus_held";
    /// Replicas have too many of the GPUs.
    pub const GPUS_BUSY: &str = "gpus_busy";
    /// Enough GPUs are free, but not in one NVLink domain.
    pub const DOMAIN_SPLIT: &str = "domain_split";
    /// Too few unclaimed cores.
    pub const CPUS: &str = "cpus";
    /// Too little unclaimed memory.
    pub const MEMORY: &str = "memory";
    /// No port of its range is free.
    pub const PORTS: &str = "ports";
    /// No fabric is known for the node, or too few nodes of its fabric fit.
    pub const FABRIC: &str = "fabric";
    /// The policy's filter failed.
    pub const POLICY_ERROR: &str = llmgw_plugins::POLICY_ERROR;
    /// All of the above.
    pub const ALL: [&str; 16] = [
        NODE_STATE,
        ENGINE,
        LABELS,
        NO_GPU,
        GPU_CLASS,
        GPU_COUNT,
        FP8,
        UNHEALTHY,
        GPUS_HELD,
        GPUS_BUSY,
        DOMAIN_SPLIT,
        CPUS,
        MEMORY,
        PORTS,
        FABRIC,
        POLICY_ERROR,
    ];
}

/// One reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reason {
    /// One of [`code`], or a policy's: `[a-z_]{1,32}`.
    pub code: String,
    /// A sentence for people: `6 of 8 GPUs are free, 8 are needed`.
    pub text: String,
    #[serde(flatten)]
    pub amount: Option<Amount>,
    /// The policy said so.
    pub policy: bool,
    /// The text in a table: `6 free of 8`.
    #[serde(skip)]
    pub short: String,
    /// What the node would need: `2 more GPUs`.
    #[serde(skip)]
    pub lacks: String,
}

/// What there is, and what would be enough.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Amount {
    #[serde(serialize_with = "number")]
    pub have: f64,
    #[serde(serialize_with = "number")]
    pub need: f64,
    /// `GPUs`, `cores`, `GiB`, `ports`, `nodes`.
    pub unit: &'static str,
}

impl Reason {
    pub(super) fn new(code: &str, text: String, short: String, lacks: String) -> Reason {
        Reason {
            code: code.to_owned(),
            text,
            amount: None,
            policy: false,
            short,
            lacks,
        }
    }

    pub(super) fn with(mut self, have: f64, need: f64, unit: &'static str) -> Reason {
        self.amount = Some(Amount { have, need, unit });
        self
    }

    pub(super) fn of_policy(code: String, text: String) -> Reason {
        // A reason is never empty, whatever the policy says.
        let text = match text.trim().is_empty() {
            true => code.replace('_', " "),
            false => text,
        };
        Reason {
            lacks: format!("the policy's consent ({text})"),
            short: text.clone(),
            amount: None,
            policy: true,
            code,
            text,
        }
    }

    /// How much is missing, in its own unit.
    pub(crate) fn deficit(&self) -> f64 {
        self.amount
            .map_or(f64::INFINITY, |amount| amount.need - amount.have)
    }
}

/// 8 rather than 8.0.
pub(crate) fn number<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    let whole = value.fract() == 0.0 && value.abs() < 1e15;
    match whole {
        true => serializer.serialize_i64(*value as i64),
        false => serializer.serialize_f64(*value),
    }
}

/// `1 GPU`, `2 GPUs`.
pub(crate) fn counted(number: usize, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}
