//! Where a replica goes: a snapshot and a job in, a [`Decision`] with all reasons out. No I/O, no clock, no chance.
//!
//! The kernel enumerates what is legal (class, health, NVLink, fabric, memory, state); a [`PlacementPolicy`] may refuse more
//! and orders what is left. A refusal is no error.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use llmgw_plugins::{CandidateView, JobView, NodeView, Score, Verdict};

use super::snapshot::{NodeFacts, Snapshot};
use crate::config::{Labels, Model, Profile};

mod candidates;
mod decision;
mod fit;
mod gangs;
mod need;
mod reason;

pub use candidates::Candidate;
pub use decision::{Attempt, Decision, Ranking, ScoredBy};
pub use fit::Taken;
pub use gangs::GANGS_MAX;
pub use need::Need;
pub use reason::{Amount, Reason, code};

use candidates::{Place, Surroundings};

/// One replica that needs a place.
#[derive(Clone, Debug, PartialEq)]
pub struct JobSpec {
    pub model: String,
    /// The model's labels.
    pub labels: Labels,
    /// Ways to run it, which are tried in this order; checked by the configuration's rules.
    pub profiles: Vec<Profile>,
    /// Number of this replica, from 0.
    pub replica: u32,
    /// Replicas wanted.
    pub replicas: u32,
    /// Nodes on which this replica failed lately: candidates with one of them are taken last.
    pub avoid: Vec<String>,
}

/// What an operator decides about placement; the calls for one decision.
pub trait PlacementPolicy {
    /// May this job run on this node? It is asked about every node, refused ones too. One that fails refuses, with
    /// [`code::POLICY_ERROR`].
    fn filter(&mut self, job: &JobView<'_>, node: &NodeView<'_>) -> Verdict;
    /// How good is this candidate, higher is better? None: it failed, the candidate goes last.
    fn score(&mut self, job: &JobView<'_>, candidate: &CandidateView<'_>) -> Option<Score>;
}

/// What `placement.lua` writes out: nothing more is refused, and the native score.
#[derive(Clone, Copy, Debug, Default)]
pub struct NativePolicy;

impl PlacementPolicy for NativePolicy {
    fn filter(&mut self, _: &JobView<'_>, _: &NodeView<'_>) -> Verdict {
        Verdict::Fit
    }

    fn score(&mut self, job: &JobView<'_>, candidate: &CandidateView<'_>) -> Option<Score> {
        Some(Score::native(job, candidate))
    }
}

impl PlacementPolicy for llmgw_plugins::Decision<'_> {
    fn filter(&mut self, job: &JobView<'_>, node: &NodeView<'_>) -> Verdict {
        llmgw_plugins::Decision::filter(self, job, node)
    }

    fn score(&mut self, job: &JobView<'_>, candidate: &CandidateView<'_>) -> Option<Score> {
        llmgw_plugins::Decision::score(self, job, candidate)
    }
}

/// Decides: the profiles in order, until one has a candidate. One that has only candidates where the model failed lately is taken where no
/// later profile has a better one.
pub fn place(snapshot: &Snapshot, job: &JobSpec, policy: &mut dyn PlacementPolicy) -> Decision {
    let nodes: Vec<NodeFacts<'_>> = snapshot
        .nodes
        .iter()
        .map(|(id, node)| NodeFacts::of(id, node))
        .collect();
    let surroundings = Surroundings::of(snapshot, &job.model);
    let mut attempts: Vec<Attempt> = Vec::new();
    let mut avoided = None;
    for profile in &job.profiles {
        let attempt = attempt(&nodes, &surroundings, job, profile, policy);
        let best = attempt.candidates.first().map(|best| best.avoided);
        attempts.push(attempt);
        match best {
            Some(false) => {
                avoided = None;
                break;
            }
            Some(true) => avoided = avoided.or(Some(attempts.len())),
            None => {}
        }
    }
    // The chosen one is the last one.
    if let Some(chosen) = avoided {
        attempts.truncate(chosen);
    }
    Decision {
        model: job.model.clone(),
        replica: job.replica,
        attempts,
    }
}

/// One profile: every filter on every node, then the candidates that are left, best first.
fn attempt(
    nodes: &[NodeFacts<'_>],
    surroundings: &Surroundings<'_>,
    job: &JobSpec,
    profile: &Profile,
    policy: &mut dyn PlacementPolicy,
) -> Attempt {
    let need = Need::of(profile);
    let mut refused: BTreeMap<String, Vec<Reason>> = BTreeMap::new();
    let mut places = Vec::new();
    for facts in nodes {
        let fit = fit::fit(&need, facts.node);
        let class = fit.class.and_then(|class| need.classes.get(class));
        let mut reasons = fit.reasons;
        let view = job.view(&need, class.map(String::as_str));
        if let Verdict::Unfit { code, text } = policy.filter(&view, &facts.view()) {
            reasons.push(Reason::of_policy(code, text));
        }
        if reasons.is_empty() {
            places.push(Place {
                facts,
                class: fit.class,
                gpus: fit.gpus,
            });
        } else {
            refused.insert(facts.id.to_owned(), reasons);
        }
    }
    let fit = places.len();
    let (chosen, bounded) = gangs::gangs(&need, &places, &mut refused);
    let candidates: Vec<Candidate> = chosen
        .iter()
        .map(|gang| Candidate::of(&need, gang, surroundings))
        .collect();
    let (candidates, scored_by) = rank(&need, job, candidates, policy);
    Attempt {
        nodes: nodes.len(),
        fit,
        refused,
        candidates,
        scored_by,
        bounded,
        need,
    }
}

/// Scores the candidates and puts the best one first.
fn rank(
    need: &Need,
    job: &JobSpec,
    candidates: Vec<Candidate>,
    policy: &mut dyn PlacementPolicy,
) -> (Vec<Ranking>, ScoredBy) {
    let mut ranked: Vec<Ranking> = candidates
        .into_iter()
        .map(|candidate| {
            let view = job.view(need, candidate.gpu_class.as_deref());
            Ranking {
                score: policy.score(&view, &candidate.view()),
                avoided: candidate.nodes.iter().any(|node| job.avoid.contains(node)),
                candidate,
            }
        })
        .collect();
    let mut scored_by = ScoredBy::Policy;
    if ranked.iter().all(|ranking| ranking.score.is_none()) {
        scored_by = ScoredBy::Native;
        for ranking in &mut ranked {
            let view = job.view(need, ranking.candidate.gpu_class.as_deref());
            ranking.score = Some(Score::native(&view, &ranking.candidate.view()));
        }
    }
    ranked.sort_by(|a, b| better(need, a, b));
    (ranked, scored_by)
}

/// Not where it failed lately, then the preferred class, then the score, and of equals the first by name.
fn better(need: &Need, a: &Ranking, b: &Ranking) -> Ordering {
    let class = |ranking: &Ranking| {
        let class = ranking.candidate.gpu_class.as_deref();
        need.classes
            .iter()
            .position(|name| Some(name.as_str()) == class)
    };
    let total = |ranking: &Ranking| ranking.score.as_ref().map(|score| score.total);
    a.avoided
        .cmp(&b.avoided)
        .then_with(|| class(a).cmp(&class(b)))
        .then_with(|| match (total(a), total(b)) {
            (Some(a), Some(b)) => b.total_cmp(&a),
            (a, b) => b.is_some().cmp(&a.is_some()),
        })
        .then_with(|| a.candidate.nodes.cmp(&b.candidate.nodes))
}

impl JobSpec {
    /// The next replica of a model in a snapshot; with `profile` no other is tried. None: there is no such model or
    /// profile.
    pub fn of(snapshot: &Snapshot, model: &str, profile: Option<&str>) -> Option<JobSpec> {
        let entry = snapshot.models.get(model)?;
        let profiles: Vec<Profile> = entry
            .profiles
            .iter()
            .filter(|candidate| profile.is_none_or(|name| name == candidate.name))
            .map(|entry| entry.profile())
            .collect();
        (!profiles.is_empty()).then(|| JobSpec {
            model: model.to_owned(),
            labels: super::snapshot::label_pairs(&entry.labels).into(),
            profiles,
            replica: snapshot.next_number(model),
            replicas: entry.replicas,
            avoid: Vec::new(),
        })
    }

    /// A replica of a model of the catalog.
    pub fn new(model: &Model, replica: u32) -> JobSpec {
        JobSpec {
            model: model.name.to_string(),
            labels: model.labels.clone(),
            profiles: model.profiles.clone(),
            replica,
            replicas: model.replicas,
            avoid: Vec::new(),
        }
    }

    /// What policies see of it, for a profile and the class that a node would run it on.
    fn view<'a>(&'a self, need: &'a Need, class: Option<&'a str>) -> JobView<'a> {
        JobView {
            kind: if need.gpus > 0 { "gpu" } else { "cpu" },
            model: &self.model,
            profile: &need.profile,
            engine: &need.engine,
            gpus: need.gpus * need.nodes,
            gpus_per_node: need.gpus,
            nodes: need.nodes,
            gpu_class: class.or(need.classes.first().map(String::as_str)),
            cpus: need.cpus,
            memory_gib: need.memory_gib,
            replica: self.replica,
            replicas: self.replicas,
            labels: &self.labels,
        }
    }
}
