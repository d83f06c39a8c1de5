//! Finds places for what is missing, and starts it there.

use std::collections::BTreeSet;
use std::sync::Arc;

use llmgw_proto::session::ServerMessage;

use super::{Controller, State, View};
use crate::config::{Model, UtcTime};
use crate::control::explain::ProfileAnswer;
use crate::control::launch::{self, Chosen, LaunchError};
use crate::control::memory::{Failure, Start};
use crate::control::observed::NotSent;
use crate::control::placement::{Decision, JobSpec, code, place};
use crate::control::reconcile::Place;
use crate::control::snapshot::Snapshot;
use crate::control::world;

/// Replicas that one look places; the others come with the next one. A look blocks who asks about the fleet.
const PLACEMENTS_MAX: usize = 16;
/// A model without a place is tried again after this time even if nothing seems to have changed.
const RETRY_MS: u64 = 5_000;

/// A model that has no place for a replica.
#[derive(Clone, Debug)]
pub struct Unplaced {
    /// What was asked; while it is the same, so is the answer.
    question: Question,
    at_ms: u64,
    /// For requests, one line.
    pub reason: String,
}

/// What an answer depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Question {
    revision: u64,
    generation: u64,
    replica: u32,
    avoid: Vec<String>,
    /// The configuration, by its address: another one is another question.
    config: usize,
}

/// Why nothing was started.
enum NoStart {
    /// The fleet has no place, or no profile can be started at all.
    NoPlace(String),
    /// There is a place, and no shard for it.
    Launch {
        profile: String,
        node: String,
        error: LaunchError,
    },
    /// The node's session ended meanwhile: the next look knows more.
    NotSent,
}

impl Controller {
    pub(super) fn place(&self, state: &mut State, view: &View, places: Vec<Place>) {
        // Where nothing is missing any more, nothing waits for a place.
        let missing: BTreeSet<&str> = places.iter().map(|place| &*place.model).collect();
        state
            .unplaced
            .retain(|model, _| missing.contains(model.as_str()));
        let due: Vec<Place> = places
            .into_iter()
            .filter(|place| !state.is_answered(view, place))
            .collect();
        if due.is_empty() {
            return;
        }
        let catalog = &view.config.catalog;
        let mut fleet = world::snapshot(catalog, &view.observed, &state.memory, UtcTime::now());
        if due.len() > PLACEMENTS_MAX {
            self.wake();
        }
        for place in due.into_iter().take(PLACEMENTS_MAX) {
            // One of the same model found none just now.
            if state.is_answered(view, &place) {
                continue;
            }
            let model = catalog
                .models
                .iter()
                .find(|model| *model.name == place.model);
            let Some(model) = model.cloned() else {
                continue;
            };
            let outcome = self.place_one(state, view, &mut fleet, &model, &place);
            state.placed(view, &place, outcome);
        }
    }

    fn place_one(
        &self,
        state: &mut State,
        view: &View,
        fleet: &mut Snapshot,
        model: &Model,
        wanted: &Place,
    ) -> Result<(), NoStart> {
        let job = job(view, model, wanted).map_err(NoStart::NoPlace)?;
        let decision = place(fleet, &job, &mut view.set.decision());
        let Some((attempt, ranking)) = decision.chosen() else {
            return Err(NoStart::NoPlace(no_place(&decision)));
        };
        let candidate = &ranking.candidate;
        let profile = &*attempt.need.profile;
        let found = model.profiles.iter().find(|known| *known.name == *profile);
        let node = candidate.nodes.first();
        let seen = node.and_then(|id| Some((id, view.observed.nodes.get(id)?)));
        let (Some(profile), Some((id, seen))) = (found, seen) else {
            return Err(NoStart::NotSent);
        };
        let Some(session) = seen.session else {
            return Err(NoStart::NotSent);
        };
        let taken = candidate.taken.iter().flatten();
        let gpus: Vec<String> = taken.map(|gpu| gpu.uuid.clone()).collect();
        let chosen = Chosen {
            model,
            profile,
            number: wanted.number,
            node: seen,
            gpus: &gpus,
        };
        let spec = launch::free_port(id, seen, &view.observed, &state.memory)
            .and_then(|port| launch::shard_spec(&view.set, &chosen, port, launch::random_key()?))
            .map_err(|error| match error {
                // Another agent on its address has what seemed free.
                LaunchError::NoPort { .. } => NoStart::NoPlace(format!("{id}: {error}")),
                error => NoStart::Launch {
                    profile: profile.name.to_string(),
                    node: id.clone(),
                    error,
                },
            })?;
        let spec = Arc::new(spec);
        let message = ServerMessage::start(spec.clone());
        self.commands
            .send(id, session, message)
            .map_err(|error| match error {
                NotSent::SessionEnded | NotSent::QueueFull => NoStart::NotSent,
                NotSent::TooLarge(error) => NoStart::Launch {
                    profile: spec.profile.clone(),
                    node: id.clone(),
                    error: LaunchError::TooLarge(error),
                },
            })?;
        tracing::info!(
            replica = %spec.replica, node = %id, profile = %spec.profile, port = spec.ports[0],
            "is started"
        );
        let sent_ms = view.observed.now_ms;
        let start = Start {
            spec,
            sent_ms,
            session,
        };
        state.memory.start(id, start);
        decision.apply(fleet);
        Ok(())
    }
}

impl State {
    /// The fleet was asked just this, and nothing has changed since.
    fn is_answered(&self, view: &View, place: &Place) -> bool {
        self.unplaced.get(&place.model).is_some_and(|unplaced| {
            let passed_ms = view.observed.now_ms.saturating_sub(unplaced.at_ms);
            unplaced.question.covers(&Question::of(view, place)) && passed_ms < RETRY_MS
        })
    }

    fn placed(&mut self, view: &View, place: &Place, outcome: Result<(), NoStart>) {
        let at_ms = view.observed.now_ms;
        match outcome {
            Ok(()) => {
                self.unplaced.remove(&place.model);
            }
            Err(NoStart::NotSent) => {}
            Err(NoStart::NoPlace(reason)) => {
                let unplaced = Unplaced {
                    question: Question::of(view, place),
                    at_ms,
                    reason,
                };
                let before = self.unplaced.insert(place.model.clone(), unplaced.clone());
                let is_news = before.is_none_or(|before| before.reason != unplaced.reason);
                if is_news && view.observed.nodes.is_empty() {
                    // As at every start: the first agent is about to come.
                    tracing::info!(model = %place.model, "waits for a node: {}", unplaced.reason);
                } else if is_news {
                    tracing::warn!(model = %place.model, "no place for a replica: {}", unplaced.reason);
                }
            }
            Err(NoStart::Launch {
                profile,
                node,
                error,
            }) => {
                let replica = format!("{}/{}", place.model, place.number);
                // A plugin renders for one node, which may lack what another one has.
                let is_nodes = matches!(error, LaunchError::Commands { .. });
                let failure = Failure {
                    replica,
                    profile,
                    node: is_nodes.then_some(node),
                    at_ms,
                    reason: error.to_string(),
                    lines: Vec::new(),
                };
                self.memory.failed(&place.model, failure, at_ms);
            }
        }
    }
}

impl Question {
    fn of(view: &View, place: &Place) -> Question {
        Question {
            revision: view.observed.revision,
            generation: view.set.generation(),
            replica: place.number,
            avoid: place.avoid.clone(),
            config: Arc::as_ptr(&view.config) as usize,
        }
    }

    /// A place for a further replica is not easier to find than for this one.
    fn covers(&self, other: &Question) -> bool {
        self.replica <= other.replica
            && *self
                == Question {
                    replica: self.replica,
                    ..other.clone()
                }
    }
}

/// The job, with the profiles that can be started at all; else what is wrong with each.
pub(super) fn job(view: &View, model: &Model, place: &Place) -> Result<JobSpec, String> {
    let (mut profiles, mut wrong) = (Vec::new(), Vec::new());
    for profile in &model.profiles {
        let problems = launch::problems(&view.set, model, profile);
        match problems.is_empty() {
            true => profiles.push(profile.clone()),
            false => wrong.push(format!(
                "profile `{}`: {}",
                profile.name,
                problems.join("; ")
            )),
        }
    }
    if profiles.is_empty() {
        wrong.sort();
        return Err(wrong.join("; "));
    }
    Ok(JobSpec {
        profiles,
        avoid: place.avoid.clone(),
        ..JobSpec::new(model, place.number)
    })
}

/// The first reason, which most nodes share.
fn no_place(decision: &Decision) -> String {
    let Some(attempt) = decision.shown() else {
        return "it has no profile".to_owned();
    };
    let answer = ProfileAnswer::of(attempt);
    if answer.fleet.nodes == 0 {
        return "no node has registered".to_owned();
    }
    match answer.why.first() {
        Some(first) => {
            let plural = if first.nodes == 1 { "" } else { "s" };
            let drains = first.code == code::NODE_STATE && first.detail.contains(": draining");
            let way_out = match drains {
                true => "; `llmgw ctl undrain NODE` puts one back into use",
                false => "",
            };
            format!(
                "no node has a place for it: `{}` on {} node{plural} ({}){way_out}",
                first.code, first.nodes, first.detail
            )
        }
        None => "no node has a place for it: none has a GPU".to_owned(),
    }
}
