//! What operators ask and order: what there is, why something does not run, draining, stopping, and whether a change is meant.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use llmgw_proto::shard::{LogLine, ShardState};
use serde::Serialize;

use super::hold::Held;
use super::node::{NodeReport, node_report};
use super::{Controller, State, View, placing};
use crate::config::{Catalog, Model, UtcTime, suggestion};
use crate::control::explain::{Explanation, explain};
use crate::control::launch;
use crate::control::memory::{Memory, NodeOrder};
use crate::control::placement::{JobSpec, place};
use crate::control::reconcile::{Missing, Place, Why, order_of_leaving};
use crate::control::replicas::{Replica, numbers_taken};
use crate::control::snapshot::{NodeState, Snapshot};
use crate::control::world;

/// Why an order or a question came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperatorError {
    /// There is no such thing; `hint` says what was probably meant.
    Unknown {
        noun: &'static str,
        name: String,
        hint: String,
    },
    /// The model has no profiles, so nothing is started for it.
    NoProfiles { model: String },
    /// The replica's node is not connected, and nobody else has its output.
    Absent {
        replica: String,
        node: String,
        state: NodeState,
    },
}

/// A replica that the server started, for people and tools.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplicaReport {
    pub id: String,
    pub model: String,
    pub profile: String,
    pub engine: String,
    pub node: String,
    pub node_state: &'static str,
    pub state: &'static str,
    /// Why it is in this state, or why it leaves; empty: nothing to say.
    pub reason: String,
    pub address: Option<String>,
    pub gpus: Vec<String>,
    /// The catalog says something else by now.
    pub outdated: bool,
}

/// A failure, for people and tools.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FailureReport {
    pub replica: String,
    pub profile: String,
    pub node: Option<String>,
    pub ms_ago: u64,
    pub reason: String,
    pub lines: Vec<LogLine>,
}

/// Everything about one model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelExplanation {
    pub replicas: Vec<ReplicaReport>,
    /// The latest one first.
    pub failures: Vec<FailureReport>,
    /// Until the next attempt after a failure.
    pub waits_ms: u64,
    /// Profiles that can't be started at all, each with what is wrong.
    pub problems: BTreeMap<String, Vec<String>>,
    /// None where no profile can be started.
    pub decision: Option<Explanation>,
    pub recovering: bool,
}

/// Lines of a failure that the text shows.
const LINES_SHOWN_MAX: usize = 5;
/// Replicas of a node of which a drain says what they do.
const WAITED_SHOWN_MAX: usize = 4;

impl Controller {
    // Orders.

    /// Takes a node out of use: its replicas are replaced first, then leave. With a limit they leave then at the latest and finish their requests; with
    /// `force` they stop at once.
    pub fn drain(
        &self,
        node: &str,
        timeout: Option<Duration>,
        force: bool,
    ) -> Result<String, OperatorError> {
        let timeout_ms = timeout.map(|timeout| timeout.as_millis() as u64);
        self.order(node, true, timeout_ms, force)
    }

    /// Puts a node back into use.
    pub fn undrain(&self, node: &str) -> Result<String, OperatorError> {
        self.order(node, false, None, false)
    }

    fn order(
        &self,
        id: &str,
        draining: bool,
        timeout_ms: Option<u64>,
        force: bool,
    ) -> Result<String, OperatorError> {
        let (mut state, view) = self.locked();
        let Some(node) = view.observed.nodes.get(id) else {
            let known = view.observed.nodes.keys().map(String::as_str);
            return Err(OperatorError::unknown("node", id, known));
        };
        let order = NodeOrder {
            draining,
            since_ms: view.observed.now_ms,
            timeout_ms,
            force,
            told_ms: None,
            confirmed_by: None,
        };
        state.memory.order(id, order);
        let on_node = |replica: &Replica| replica.key.node == id;
        let replicas = Replica::all(&view.observed, &state.memory);
        let count = replicas.into_iter().filter(on_node).count();
        drop(state);
        self.wake();
        let later = match node.session {
            Some(_) => "",
            None => "; it is not connected, and hears of it when it is",
        };
        Ok(match draining {
            true if count == 1 => format!("{id} is taken out of use, 1 replica leaves it{later}"),
            true => format!("{id} is taken out of use, {count} replicas leave it{later}"),
            false => format!("{id} is put back into use{later}"),
        })
    }

    /// Stops a replica; one more is wanted then, and placed. Of copies that share the name, which a node that was away may bring, the one
    /// stops that would be surplus first.
    pub fn stop(&self, replica: &str, force: bool) -> Result<String, OperatorError> {
        let (mut state, view) = self.locked();
        let all = Replica::all(&view.observed, &state.memory);
        let is_meant = |known: &&Replica| known.spec.replica == replica;
        let mut meant: Vec<&Replica> = all.iter().filter(is_meant).collect();
        if meant.is_empty() {
            let known = all.iter().map(|known| known.spec.replica.as_str());
            return Err(OperatorError::unknown("replica", replica, known));
        }
        meant.sort_by_key(|known| {
            // By force the one that is leaving already is meant, else another one.
            let leaves = state.memory.leaving(&known.key).is_some();
            (leaves != force, order_of_leaving(known, &state.memory))
        });
        let (first, others) = (meant[0], &meant[1..]);
        let now_ms = view.observed.now_ms;
        state.memory.leave(&first.key, Why::Operator, force, now_ms);
        let text = match others.first() {
            None => format!("{replica} leaves"),
            Some(other) => format!(
                "{replica} leaves {}; another one of this name is on {}",
                first.key.node, other.key.node
            ),
        };
        drop(state);
        self.wake();
        Ok(text)
    }

    /// Another configuration is in force, which an operator said is meant, or which was seen to stop little.
    pub fn configured(&self, is_confirmed: bool) {
        let mut state = self.lock();
        state.hold.end(is_confirmed);
        self.publish_hold(&state);
        drop(state);
        self.wake();
    }

    // Questions.

    /// The change is so large that an operator has to confirm it.
    pub fn held(&self, after: &Catalog) -> Option<Held> {
        let (state, view) = self.locked();
        Held::of(&launch::desired(after), &view.observed, &state.memory)
    }

    /// What the catalog of the start would stop, and does not; `None`: nothing is held. Waits for no look: the metrics page asks, on the
    /// threads that relay streams.
    pub fn held_since_start(&self) -> Option<String> {
        self.held.load().as_deref().cloned()
    }

    /// The fleet as policies see it.
    pub fn snapshot(&self) -> Snapshot {
        let (state, view) = self.locked();
        fleet(&view, &state.memory)
    }

    pub fn nodes(&self) -> Vec<NodeReport> {
        let (state, view) = self.locked();
        let fleet = fleet(&view, &state.memory);
        let replicas = Replica::all(&view.observed, &state.memory);
        view.observed
            .nodes
            .iter()
            .map(|(id, seen)| {
                let requests = |address: &str| self.serving.requests(address);
                node_report(id, seen, &fleet, &replicas, &state, &view, &requests)
            })
            .collect()
    }

    pub fn replicas(&self) -> Vec<ReplicaReport> {
        let (state, view) = self.locked();
        Replica::all(&view.observed, &state.memory)
            .iter()
            .map(|replica| replica_report(replica, &state, &view))
            .collect()
    }

    /// Why a model does or does not run, and what would make it.
    pub fn explain(&self, name: &str) -> Result<ModelExplanation, OperatorError> {
        Ok(self.ask(name)?.answer())
    }

    /// What is known about a model now. What would make it run is tried later, since that takes seconds, in which the fleet is to be
    /// looked at.
    pub(super) fn ask(&self, name: &str) -> Result<Asked, OperatorError> {
        let (state, view) = self.locked();
        let catalog = &view.config.catalog;
        let Some(model) = catalog.models.iter().find(|model| *model.name == *name) else {
            let known = catalog.models.iter().map(|model| &*model.name);
            return Err(OperatorError::unknown("model", name, known));
        };
        if model.profiles.is_empty() {
            let model = name.to_owned();
            return Err(OperatorError::NoProfiles { model });
        }
        let mut replicas = Replica::all(&view.observed, &state.memory);
        replicas.extend(Replica::not_gone(&view.observed, &state.memory));
        let mine = replicas.iter().filter(|replica| replica.model() == name);
        let known = ModelExplanation {
            replicas: mine
                .map(|replica| replica_report(replica, &state, &view))
                .collect(),
            failures: failures(&state, &view, name),
            waits_ms: state.memory.failures(name).map_or(0, |failures| {
                failures.not_before_ms.saturating_sub(view.observed.now_ms)
            }),
            problems: BTreeMap::new(),
            decision: None,
            recovering: view.observed.recovering,
        };
        Ok(Asked {
            model: model.clone(),
            memory: state.memory.clone(),
            known,
            view,
        })
    }
}

/// A question about a model, with all that its answer depends on.
pub(super) struct Asked {
    view: View,
    model: Arc<Model>,
    memory: Memory,
    /// All but what policies have to be asked for.
    known: ModelExplanation,
}

impl Asked {
    pub(super) fn answer(mut self) -> ModelExplanation {
        self.known.decision = self.decision();
        let (set, model) = (&self.view.set, &self.model);
        let problems = model.profiles.iter().filter_map(|profile| {
            let problems = launch::problems(set, model, profile);
            (!problems.is_empty()).then(|| (profile.name.to_string(), problems))
        });
        self.known.problems = problems.collect();
        self.known
    }

    /// Where one more replica would go, and what would make room for it. None where no profile can be started.
    fn decision(&self) -> Option<Explanation> {
        let (view, memory) = (&self.view, &self.memory);
        let name = &*self.model.name;
        let taken = numbers_taken(&view.observed, memory, name);
        let wanted = Place {
            model: name.to_owned(),
            number: (0..).find(|number| !taken.contains(number)).unwrap_or(0),
            avoid: memory.avoid(name),
            why: Missing::TooFew,
        };
        let job = placing::job(view, &self.model, &wanted).ok()?;
        let fleet = fleet(view, memory);
        let set = &view.set;
        let mut decide = |fleet: &Snapshot, job: &JobSpec| place(fleet, job, &mut set.decision());
        let decision = decide(&fleet, &job);
        let generation = Some(set.generation());
        Some(explain(&fleet, &job, decision, generation, &mut decide))
    }
}

fn fleet(view: &View, memory: &Memory) -> Snapshot {
    let catalog = &view.config.catalog;
    world::snapshot(catalog, &view.observed, memory, UtcTime::now())
}

fn failures(state: &State, view: &View, model: &str) -> Vec<FailureReport> {
    let Some(failures) = state.memory.failures(model) else {
        return Vec::new();
    };
    let report = |failure: &crate::control::memory::Failure| FailureReport {
        replica: failure.replica.clone(),
        profile: failure.profile.clone(),
        node: failure.node.clone(),
        ms_ago: view.observed.now_ms.saturating_sub(failure.at_ms),
        reason: failure.reason.clone(),
        lines: failure.lines.clone(),
    };
    failures.kept.iter().rev().map(report).collect()
}

/// What a drain waits for: the replacements that have no place, or else the replicas that still leave. `requests` are those on an address.
pub(super) fn drain_reason(
    replicas: &[&Replica],
    state: &State,
    requests: &dyn Fn(&str) -> u32,
) -> String {
    let stuck = replicas
        .iter()
        .find_map(|replica| Some((replica, state.unplaced.get(replica.model())?)));
    match stuck {
        Some((replica, unplaced)) => format!(
            "waits for a replacement of {}: {} (`--timeout` and `--force` do not wait)",
            replica.spec.replica, unplaced.reason
        ),
        None => {
            let count = match replicas.len() {
                1 => "1 replica".to_owned(),
                count => format!("{count} replicas"),
            };
            let what = replicas.iter().take(WAITED_SHOWN_MAX);
            let what: Vec<String> = what
                .map(|replica| waited_for(replica, state, requests))
                .collect();
            format!("waits for {count}: {}", what.join(", "))
        }
    }
}

/// What one replica does until it is gone.
fn waited_for(replica: &Replica, state: &State, requests: &dyn Fn(&str) -> u32) -> String {
    let name = &replica.spec.replica;
    let leaves = state.memory.leaving(&replica.key).is_some();
    let address = replica.spec.address();
    match leaves {
        false => format!("{name} stays until its replacement is ready"),
        true if address.is_some_and(|address| requests(&address) > 0) => {
            format!("{name} finishes its requests")
        }
        true => format!("{name} stops"),
    }
}

fn replica_report(replica: &Replica, state: &State, view: &View) -> ReplicaReport {
    let spec = &replica.spec;
    let leaving = state.memory.leaving(&replica.key);
    let said = view
        .observed
        .nodes
        .get(&replica.key.node)
        .and_then(|node| node.shards.get(&replica.key.shard))
        .map(|shard| shard.status.reason.clone());
    let reason = match leaving {
        // What is left of it goes nowhere.
        _ if replica.state == ShardState::Failed => said.unwrap_or_default(),
        Some(leaving) => format!("leaves: {}", leaving.why),
        None if state.is_held(replica) => {
            "the catalog does not want it; held until `llmgw ctl reload --confirm`".to_owned()
        }
        None if replica.is_only_sent => "its agent has not confirmed it yet".to_owned(),
        None => said.unwrap_or_default(),
    };
    let wanted = state.desired.models.get(replica.model());
    let current = wanted.and_then(|wanted| wanted.definitions.get(&spec.profile));
    ReplicaReport {
        id: spec.replica.clone(),
        model: spec.model.clone(),
        profile: spec.profile.clone(),
        engine: spec.engine.clone(),
        node: replica.key.node.clone(),
        node_state: replica.node_state.as_str(),
        state: replica.state.as_str(),
        reason,
        address: spec.address(),
        gpus: spec.gpus.clone(),
        outdated: current != Some(&spec.definition),
    }
}

impl OperatorError {
    pub(super) fn unknown<'a>(
        noun: &'static str,
        name: &str,
        known: impl Iterator<Item = &'a str>,
    ) -> OperatorError {
        let known: Vec<&str> = known.collect();
        let hint = match known.is_empty() {
            true => "there is none".to_owned(),
            false => suggestion(name, &known),
        };
        OperatorError::Unknown {
            noun,
            name: name.to_owned(),
            hint,
        }
    }
}

impl fmt::Display for OperatorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OperatorError::Unknown { noun, name, hint } => {
                write!(f, "there is no {noun} `{name}`; {hint}")
            }
            OperatorError::NoProfiles { model } => write!(
                f,
                "`{model}` has no profiles: its endpoints are configured, and nothing is started for it"
            ),
            OperatorError::Absent {
                replica,
                node,
                state,
            } => write!(
                f,
                "{replica} is on {node}, which is {}: only its agent has the lines; ask again when `llmgw ctl nodes` shows it connected, \
                 or look into the agent's `state` directory on {node}",
                state.as_str()
            ),
        }
    }
}

impl std::error::Error for OperatorError {}

/// The placement's own text, with what is known beside it.
impl fmt::Display for ModelExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(decision) = &self.decision {
            write!(f, "{decision}")?;
        }
        if self.recovering {
            writeln!(
                f,
                "note     the server has only just started: nothing is placed yet"
            )?;
        }
        for (profile, problems) in &self.problems {
            writeln!(f, "wrong    profile {profile}: {}", problems.join("; "))?;
        }
        for replica in &self.replicas {
            let reason = match replica.reason.is_empty() {
                true => String::new(),
                false => format!(" ({})", replica.reason),
            };
            let (id, state, node) = (&replica.id, replica.state, &replica.node);
            writeln!(f, "replica  {id} is {state} on {node}{reason}")?;
        }
        for failure in &self.failures {
            let place = failure.node.as_ref();
            let place = place.map_or_else(String::new, |node| format!(" on {node}"));
            let (replica, seconds) = (&failure.replica, failure.ms_ago / 1_000);
            writeln!(
                f,
                "failed   {replica}{place} {seconds} s ago: {}",
                failure.reason
            )?;
            let from = failure.lines.len().saturating_sub(LINES_SHOWN_MAX);
            for line in &failure.lines[from..] {
                writeln!(f, "         | {}", line.text)?;
            }
        }
        match self.waits_ms {
            0 => Ok(()),
            ms => writeln!(
                f,
                "waits    {} s until the next attempt",
                ms.div_ceil(1_000)
            ),
        }
    }
}
