//! What was chosen, from what, and the reason for each refusal.

use std::collections::BTreeMap;

use llmgw_plugins::Score;
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::candidates::Candidate;
use super::need::Need;
use super::reason::Reason;
use crate::control::snapshot::{Replica, Shard, ShardState, Snapshot};

/// The answer to one job.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    pub model: String,
    /// Number of the replica.
    pub replica: u32,
    /// Profiles in the order in which they were tried; the last one is the chosen one where the job was placed.
    pub attempts: Vec<Attempt>,
}

/// One profile that was tried.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Attempt {
    pub need: Need,
    /// Nodes in the fleet.
    pub nodes: usize,
    /// Nodes that fit by themselves; a gang needs several of one fabric.
    pub fit: usize,
    /// Each node that can't, with all that speaks against it.
    pub refused: BTreeMap<String, Vec<Reason>>,
    /// Best first.
    pub candidates: Vec<Ranking>,
    pub scored_by: ScoredBy,
    /// There are more gangs than [`GANGS_MAX`](super::GANGS_MAX); not all were scored.
    pub bounded: bool,
}

/// A candidate and what it was given.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ranking {
    #[serde(flatten)]
    pub candidate: Candidate,
    /// None: the policy's score failed for it.
    pub score: Option<Score>,
    /// The replica failed on one of its nodes lately.
    pub avoided: bool,
}

/// Whose score decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoredBy {
    Policy,
    /// The policy's score failed for every candidate.
    Native,
}

impl Decision {
    /// It has a place.
    pub fn placed(&self) -> bool {
        self.chosen().is_some()
    }

    /// The place, and the profile that goes there.
    pub fn chosen(&self) -> Option<(&Attempt, &Ranking)> {
        let attempt = self.attempts.last()?;
        Some((attempt, attempt.candidates.first()?))
    }

    /// The chosen nodes, the leader first; empty where there is no place.
    pub fn nodes(&self) -> &[String] {
        self.chosen()
            .map_or(&[], |(_, ranking)| &ranking.candidate.nodes)
    }

    /// What a reader is shown first: the profile that was chosen, else the preferred one.
    pub fn shown(&self) -> Option<&Attempt> {
        match self.placed() {
            true => self.attempts.last(),
            false => self.attempts.first(),
        }
    }

    /// Why this node can't take it, under [`Decision::shown`]; empty where it could.
    pub fn refused(&self, node: &str) -> &[Reason] {
        self.shown()
            .and_then(|attempt| attempt.refused.get(node))
            .map_or(&[], Vec::as_slice)
    }

    /// The id of the replica.
    pub fn replica_id(&self) -> String {
        format!("{}/{}", self.model, self.replica)
    }

    /// Puts the replica there, as pending; false where it has no place.
    pub fn apply(&self, snapshot: &mut Snapshot) -> bool {
        let Some((Attempt { need, .. }, ranking)) = self.chosen() else {
            return false;
        };
        let id = self.replica_id();
        let mut shards = Vec::new();
        for (name, taken) in ranking.candidate.nodes.iter().zip(&ranking.candidate.taken) {
            let (cpus, memory_gib) = (need.cpus.unwrap_or(0), need.memory_gib.unwrap_or(0.0));
            if let Some(node) = snapshot.nodes.get_mut(name) {
                node.cpus_free = node.cpus_free.saturating_sub(cpus);
                node.memory_gib_free = (node.memory_gib_free - memory_gib).max(0.0);
                node.ports_free = node.ports_free.map(|free| free.saturating_sub(1));
                for gpu in &mut node.gpus {
                    if taken.iter().any(|taken| taken.uuid == gpu.uuid) {
                        gpu.used_by = Some(id.clone());
                    }
                }
            }
            shards.push(Shard {
                node: name.clone(),
                cpus,
                memory_gib,
                state: None,
            });
        }
        let replica = Replica {
            model: self.model.clone(),
            profile: need.profile.clone(),
            state: ShardState::Pending,
            shards,
        };
        snapshot.replicas.insert(id, replica);
        true
    }
}

/// A refused node as tests and tools read it: the first reason, and all of them.
#[derive(Serialize)]
struct Refusal<'a> {
    code: &'a str,
    text: &'a str,
    reasons: &'a [Reason],
}

/// What was chosen is on top, so that a reader needs no search: `placed model replica profile gpu_class nodes gpus score
/// parts refused`, then `candidates` and `attempts` in full.
impl Serialize for Decision {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let chosen = self.chosen();
        let candidate = chosen.map(|(_, ranking)| &ranking.candidate);
        let score = chosen.and_then(|(_, ranking)| ranking.score.as_ref());
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("placed", &self.placed())?;
        map.serialize_entry("model", &self.model)?;
        map.serialize_entry("replica", &self.replica)?;
        map.serialize_entry("profile", &chosen.map(|(attempt, _)| &attempt.need.profile))?;
        map.serialize_entry("gpu_class", &candidate.and_then(|c| c.gpu_class.as_ref()))?;
        map.serialize_entry("nodes", self.nodes())?;
        let gpus: BTreeMap<&String, Vec<u32>> = candidate
            .into_iter()
            .flat_map(|candidate| candidate.nodes.iter().zip(&candidate.taken))
            .map(|(node, taken)| (node, taken.iter().map(|taken| taken.index).collect()))
            .collect();
        map.serialize_entry("gpus", &gpus)?;
        map.serialize_entry("score", &score.map(|score| score.total))?;
        let parts: BTreeMap<&str, f64> = score
            .into_iter()
            .flat_map(|score| &score.parts)
            .map(|(name, part)| (name.as_str(), *part))
            .collect();
        map.serialize_entry("parts", &parts)?;
        let refused: BTreeMap<&str, Refusal<'_>> = self
            .shown()
            .into_iter()
            .flat_map(|attempt| &attempt.refused)
            .filter_map(|(node, reasons)| {
                let Reason { code, text, .. } = reasons.first()?;
                let refusal = Refusal {
                    code,
                    text,
                    reasons,
                };
                Some((node.as_str(), refusal))
            })
            .collect();
        map.serialize_entry("refused", &refused)?;
        let candidates = self.shown().map_or(&[][..], |attempt| &attempt.candidates);
        map.serialize_entry("candidates", candidates)?;
        map.serialize_entry("attempts", &self.attempts)?;
        map.end()
    }
}
