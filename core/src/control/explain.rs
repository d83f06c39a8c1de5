//! A decision for people (`ctl explain`, `policy explain`): why does a model not run, and what would make it.

use std::fmt;

use serde::Serialize;

use super::placement::{Decision, JobSpec};
use super::snapshot::Snapshot;

mod alternatives;
mod counts;
mod text;

pub use alternatives::{ALTERNATIVES_MAX, Alternative, Change, TRIALS_MAX};
pub use counts::{CodeCount, FleetCount, NEAREST_MAX, Nearest, ProfileAnswer};

/// The whole answer; as text through `Display`, as JSON through serde.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    pub model: String,
    /// Replicas wanted.
    pub wanted: u32,
    /// Replicas that run or are about to.
    pub running: usize,
    /// Those of them that are ready.
    pub ready: usize,
    /// There is a place for one more.
    pub placed: bool,
    /// Profiles that were tried, in order; where there is a place, the last one has it.
    pub profiles: Vec<ProfileAnswer>,
    /// Changes that the kernel tried and that make room; empty where there is a place already.
    pub fits_if: Vec<Alternative>,
    /// Changes that were tried.
    pub tried: usize,
    /// What triggers the next attempt.
    pub retry: String,
    /// The policies' generation, where a server has one.
    pub generation: Option<u64>,
    pub decision: Decision,
}

/// Explains a decision about a job; `decide` makes the same kind of decision about a varied fleet or job.
pub fn explain(
    snapshot: &Snapshot,
    job: &JobSpec,
    decision: Decision,
    generation: Option<u64>,
    decide: &mut dyn FnMut(&Snapshot, &JobSpec) -> Decision,
) -> Explanation {
    let profiles: Vec<ProfileAnswer> = decision.attempts.iter().map(ProfileAnswer::of).collect();
    let (fits_if, tried) = match decision.placed() {
        true => (Vec::new(), 0),
        false => alternatives::find(snapshot, job, &decision.attempts, &profiles, decide),
    };
    let trigger = "when a replica stops, a node joins, or the catalog or policy changes";
    Explanation {
        model: job.model.clone(),
        wanted: job.replicas,
        running: snapshot.running(&job.model),
        ready: snapshot.ready(&job.model),
        placed: decision.placed(),
        profiles,
        fits_if,
        tried,
        retry: match generation {
            Some(number) => format!("{trigger} (generation {number})"),
            None => trigger.to_owned(),
        },
        generation,
        decision,
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text::write(self, f)
    }
}
