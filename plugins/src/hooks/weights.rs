//! The knobs of the native scorer, which `routing.weights` turns.

use serde::Serialize;

/// Weights of the scorer. Costs are in milliseconds, so that fast and slow machines compare.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoutingWeights {
    /// Weight of prompt tokens that wait or must be read.
    pub prefill: f64,
    /// Weight of generation that already runs there.
    pub decode: f64,
    /// Milliseconds for a completely full KV cache.
    pub kv: f64,
    /// Milliseconds for each failure in the last minute.
    pub error: f64,
    /// Share of the prompt, 0..1, that must be known there before a prefix counts.
    pub affinity_min: f64,
    /// How much longer a request may wait to stay with its prefix, in ms.
    pub affinity_penalty_ms: f64,
    /// Score only this many random replicas; 0 scores all.
    pub choices: u32,
    /// Metrics older than this, in ms, are distrusted.
    pub stale_ms: f64,
    /// What distrust costs, in ms.
    pub stale_penalty_ms: f64,
}

impl Default for RoutingWeights {
    fn default() -> RoutingWeights {
        RoutingWeights {
            prefill: 1.0,
            decode: 0.0,
            kv: 500.0,
            error: 250.0,
            affinity_min: 0.3,
            affinity_penalty_ms: 5000.0,
            choices: 0,
            stale_ms: 2000.0,
            stale_penalty_ms: 1000.0,
        }
    }
}

/// One knob: its name, its range, and where it lives.
pub(crate) struct Knob {
    pub(crate) name: &'static str,
    /// Least and greatest value.
    pub(crate) range: (f64, f64),
    pub(crate) set: fn(&mut RoutingWeights, f64),
}

/// A day: longer than any request waits.
const KNOB_MAX_MS: f64 = 86_400_000.0;

/// All knobs. Ranges only keep out what can't be meant; they are wide on purpose.
pub(crate) const KNOBS: [Knob; 9] = [
    Knob {
        name: "prefill",
        range: (0.0, 1000.0),
        set: |w, v| w.prefill = v,
    },
    Knob {
        name: "decode",
        range: (0.0, 1000.0),
        set: |w, v| w.decode = v,
    },
    Knob {
        name: "kv",
        range: (0.0, KNOB_MAX_MS),
        set: |w, v| w.kv = v,
    },
    Knob {
        name: "error",
        range: (0.0, KNOB_MAX_MS),
        set: |w, v| w.error = v,
    },
    Knob {
        name: "affinity_min",
        range: (0.0, 1.0),
        set: |w, v| w.affinity_min = v,
    },
    Knob {
        name: "affinity_penalty_ms",
        range: (0.0, KNOB_MAX_MS),
        set: |w, v| w.affinity_penalty_ms = v,
    },
    Knob {
        name: "choices",
        range: (0.0, 1024.0),
        set: |w, v| w.choices = v as u32,
    },
    Knob {
        name: "stale_ms",
        range: (0.0, KNOB_MAX_MS),
        set: |w, v| w.stale_ms = v,
    },
    Knob {
        name: "stale_penalty_ms",
        range: (0.0, KNOB_MAX_MS),
        set: |w, v| w.stale_penalty_ms = v,
    },
];
