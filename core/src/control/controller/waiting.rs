//! Replicas that are wanted and not there: what they wait for.

use serde::Serialize;

use super::{Controller, State, View};
use crate::control::reconcile::Wanted;
use crate::control::replicas::Replica;
use crate::control::snapshot::NodeState;

/// Replicas of one model that wait for the same, for people and tools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WaitingReport {
    pub model: String,
    pub replicas: u32,
    /// Where the last one failed, and with which profile; none where no place is found.
    pub node: Option<String>,
    pub profile: Option<String>,
    pub reason: String,
    /// Until the next attempt; 0: as soon as there is a place.
    pub waits_ms: u64,
}

impl Controller {
    pub fn waiting(&self) -> Vec<WaitingReport> {
        let (state, view) = self.locked();
        let replicas = Replica::all(&view.observed, &state.memory);
        let models = state.desired.models.iter();
        models
            .flat_map(|(model, wanted)| of_model(model, wanted, &replicas, &state, &view))
            .collect()
    }
}

fn of_model(
    model: &str,
    wanted: &Wanted,
    replicas: &[Replica],
    state: &State,
    view: &View,
) -> Vec<WaitingReport> {
    let is_there = |replica: &&Replica| {
        replica.model() == model
            && replica.node_state != NodeState::Lost
            && state.memory.leaving(&replica.key).is_none()
    };
    let there = replicas.iter().filter(is_there).count() as u32;
    let missing = wanted.replicas.saturating_sub(there);
    let now_ms = view.observed.now_ms;
    let mut waiting = Vec::new();
    let failures = state.memory.failures(model);
    let held_back = failures.map_or(0, |failures| failures.held_back(now_ms).min(missing));
    if let Some(failures) = failures.filter(|_| held_back > 0)
        && let Some(last) = failures.kept.back()
    {
        waiting.push(WaitingReport {
            model: model.to_owned(),
            replicas: held_back,
            node: last.node.clone(),
            profile: Some(last.profile.clone()),
            reason: last.reason.clone(),
            waits_ms: failures.not_before_ms.saturating_sub(now_ms),
        });
    }
    let unplaced = state.unplaced.get(model);
    if let Some(unplaced) = unplaced.filter(|_| missing > held_back) {
        waiting.push(WaitingReport {
            model: model.to_owned(),
            replicas: missing - held_back,
            node: None,
            profile: None,
            reason: unplaced.reason.clone(),
            waits_ms: 0,
        });
    }
    waiting
}
