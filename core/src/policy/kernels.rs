//! What policy tests drive: this program's own placement and scorer over recorded fleets, and its queues over made-up ones.

use std::path::Path;

use llmgw_plugins::test::{Answer, Fleet, FoundInFleet, Kernels, Step};
use llmgw_plugins::{Hook, PolicySet, PoolView, RANK_CANDIDATES_MAX, ReplicaView, RequestView};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::config::suggestion;
use crate::control::placement::{Decision, JobSpec, code, place};
use crate::control::snapshot::{NodeState, PoolReplica, ShardState, Snapshot};
use crate::routing::score::{self, Ask, Candidate};

/// The fleets that ship with llmgw.
const FLEETS: [(&str, &str); 6] = [
    (
        "cpu-pair",
        include_str!("../../../policies/fleets/cpu-pair.json"),
    ),
    (
        "two-racks",
        include_str!("../../../policies/fleets/two-racks.json"),
    ),
    (
        "mixed-bad-gpu",
        include_str!("../../../policies/fleets/mixed-bad-gpu.json"),
    ),
    (
        "full-pool",
        include_str!("../../../policies/fleets/full-pool.json"),
    ),
    (
        "lost-node",
        include_str!("../../../policies/fleets/lost-node.json"),
    ),
    (
        "thousand",
        include_str!("../../../policies/fleets/thousand.json"),
    ),
];
/// Parts of a snapshot that are maps by name.
const MAPS: [&str; 4] = ["nodes", "models", "replicas", "pools"];
/// Candidates that a test sees of a decision, the best ones.
const CANDIDATES_SHOWN_MAX: usize = 16;
/// A replica that takes nothing new, in a test of routing.
const REPLICA_STATE: &str = "replica_state";
/// Its machine does not.
const NODE_STATE: &str = "node_state";

/// This program's kernels.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnKernels;

impl Kernels for OwnKernels {
    fn fleet_names(&self) -> Vec<String> {
        FLEETS.map(|(name, _)| name.to_owned()).to_vec()
    }

    fn fleet_text(&self, name: &str) -> Option<String> {
        let fleet = FLEETS.iter().find(|(known, _)| *known == name);
        fleet.map(|(_, text)| (*text).to_owned())
    }

    fn open(&self, text: &str) -> Result<Box<dyn Fleet>, String> {
        let snapshot = Snapshot::parse(Path::new(""), text);
        let snapshot = snapshot.map_err(|error| {
            let error = error.to_string();
            error.trim_start_matches([':', ' ']).to_owned()
        })?;
        Ok(Box::new(Recorded(snapshot)))
    }

    fn refusal_codes(&self) -> Vec<&'static str> {
        code::ALL.to_vec()
    }

    fn simulate(&self, set: &PolicySet, ask: &Value) -> Result<Answer, String> {
        super::simulate::answer(set, ask)
    }
}

/// A snapshot in a test's hands.
#[derive(Clone)]
struct Recorded(Snapshot);

impl Fleet for Recorded {
    fn boxed_clone(&self) -> Box<dyn Fleet> {
        Box::new(self.clone())
    }

    fn look(&self, path: &[Step]) -> Result<FoundInFleet, String> {
        let snapshot = &self.0;
        let is_there = match path {
            [] => true,
            [Step::Name(map)] => MAPS.contains(&map.as_str()),
            [Step::Name(map), Step::Name(name)] => match map.as_str() {
                "nodes" => snapshot.nodes.contains_key(name),
                "models" => snapshot.models.contains_key(name),
                "replicas" => snapshot.replicas.contains_key(name),
                _ => false,
            },
            _ => false,
        };
        if is_there {
            return Ok(FoundInFleet::Map);
        }
        Ok(match self.get(path)? {
            Value::Object(_) => FoundInFleet::Map,
            Value::Array(items) => FoundInFleet::List(items.len()),
            leaf => FoundInFleet::Leaf(leaf),
        })
    }

    fn names(&self, path: &[Step]) -> Result<Vec<String>, String> {
        let snapshot = &self.0;
        if path.is_empty() {
            return Ok(MAPS.map(str::to_owned).to_vec());
        }
        if let [Step::Name(map)] = path {
            return match map.as_str() {
                "nodes" => Ok(snapshot.nodes.keys().cloned().collect()),
                "models" => Ok(snapshot.models.keys().cloned().collect()),
                "replicas" => Ok(snapshot.replicas.keys().cloned().collect()),
                "pools" => Ok(snapshot.pools.keys().cloned().collect()),
                _ => Ok(Vec::new()),
            };
        }
        match self.get(path)? {
            Value::Object(fields) => Ok(fields.into_iter().map(|(name, _)| name).collect()),
            _ => Ok(Vec::new()),
        }
    }

    fn read(&self, path: &[Step]) -> Result<Value, String> {
        if path.len() > 1 {
            return self.get(path);
        }
        self.look(path)?;
        let below = self.names(path)?.into_iter().map(|name| {
            let mut path = path.to_vec();
            path.push(Step::Name(name.clone()));
            Ok((name, self.read(&path)?))
        });
        Ok(Value::Object(below.collect::<Result<Map<_, _>, String>>()?))
    }

    fn set(&mut self, path: &[Step], value: Value) -> Result<(), String> {
        let set = self.0.set(&shown(path), value);
        set.map_err(|error| error.to_string())
    }

    fn place(&self, set: &PolicySet, ask: &Value) -> Result<Answer, String> {
        let ask: PlaceAsk = read_ask("place", ask)?;
        let job = JobSpec::of(&self.0, &ask.model, ask.profile.as_deref())
            .ok_or_else(|| self.no_job(&ask))?;
        let decision = place(&self.0, &job, &mut set.decision());
        answer(&decision)
    }

    fn route(&self, set: &PolicySet, ask: &Value) -> Result<Answer, String> {
        let ask: RouteAsk = read_ask("route", ask)?;
        let pool = match &ask.replicas {
            Some(replicas) => replicas,
            None => self.0.pools.get(&ask.model).ok_or_else(|| {
                let known: Vec<&str> = self.0.pools.keys().map(String::as_str).collect();
                let (model, hint) = (&ask.model, suggestion(&ask.model, &known));
                format!("there is no pool of `{model}` ({hint}); give `replicas` in the call")
            })?,
        };
        Ok(route(&self.0, set, &ask, pool))
    }
}

impl Recorded {
    fn get(&self, path: &[Step]) -> Result<Value, String> {
        self.0.get(&shown(path)).map_err(|error| error.to_string())
    }

    fn no_job(&self, ask: &PlaceAsk) -> String {
        let Some(model) = self.0.models.get(&ask.model) else {
            let known: Vec<&str> = self.0.models.keys().map(String::as_str).collect();
            let hint = suggestion(&ask.model, &known);
            return format!("there is no model `{}` in the fleet ({hint})", ask.model);
        };
        let known: Vec<&str> = model.profiles.iter().map(|p| p.name.as_str()).collect();
        let profile = ask.profile.as_deref().unwrap_or_default();
        let hint = suggestion(profile, &known);
        format!("`{}` has no profile `{profile}` ({hint})", ask.model)
    }
}

/// `nodes["ml-07"].gpus[0]`; there positions count from 0.
fn shown(path: &[Step]) -> String {
    let mut text = String::new();
    for step in path {
        match step {
            Step::Name(name) if text.is_empty() => text.push_str(name),
            Step::Name(name) => text.push_str(&format!("[{}]", Value::from(name.as_str()))),
            Step::Position(at) => text.push_str(&format!("[{}]", at.saturating_sub(1))),
        }
    }
    text
}

/// What `fleet:place` is called with.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlaceAsk {
    model: String,
    profile: Option<String>,
}

/// What `fleet:route` is called with: the request, as far as it matters.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteAsk {
    model: String,
    #[serde(default = "some_tokens")]
    input_tokens: u64,
    #[serde(default = "some_tokens")]
    est_output_tokens: u64,
    max_tokens: Option<u64>,
    session: Option<String>,
    #[serde(default)]
    attempt: u32,
    /// Equal scores take turns by it.
    #[serde(default)]
    seed: u64,
    /// Instead of the fleet's own pool.
    replicas: Option<Vec<PoolReplica>>,
}

fn some_tokens() -> u64 {
    300
}

fn read_ask<T: for<'de> Deserialize<'de>>(what: &str, ask: &Value) -> Result<T, String> {
    T::deserialize(ask).map_err(|error| format!("fleet:{what}: {error}"))
}

/// A decision as a test gets it, and as a failing one shows it.
fn answer(decision: &Decision) -> Result<Answer, String> {
    let mut value = serde_json::to_value(decision).map_err(|error| error.to_string())?;
    if let Some(fields) = value.as_object_mut() {
        // Everything in it is in the other fields, but for the profiles that were tried and not shown.
        fields.remove("attempts");
        if let Some(Value::Array(candidates)) = fields.get_mut("candidates") {
            candidates.truncate(CANDIDATES_SHOWN_MAX);
        }
    }
    let id = decision.replica_id();
    let mut story = vec![match decision.chosen() {
        Some((attempt, ranking)) => {
            let score = ranking.score.as_ref();
            let score = score.map_or_else(
                || "no score".to_owned(),
                |score| format!("score {:.1}", score.total),
            );
            let (nodes, profile) = (ranking.candidate.nodes.join(" "), &attempt.need.profile);
            format!("{id} on {nodes} with profile {profile}, {score}")
        }
        None => format!("{id} has no place"),
    }];
    let refused = decision
        .shown()
        .into_iter()
        .flat_map(|shown| &shown.refused);
    for (node, reasons) in refused {
        let reasons: Vec<String> = reasons
            .iter()
            .map(|reason| format!("{} ({})", reason.code, reason.text))
            .collect();
        story.push(format!("{node}: {}", reasons.join(", ")));
    }
    Ok(Answer { value, story })
}

/// As a pool chooses: replicas that take requests, scored natively, then `routing.rank` where there is one.
fn route(snapshot: &Snapshot, set: &PolicySet, ask: &RouteAsk, pool: &[PoolReplica]) -> Answer {
    let mut refused = Map::new();
    let mut story = Vec::new();
    let mut open: Vec<&PoolReplica> = Vec::new();
    for replica in pool {
        match closed(snapshot, replica) {
            None => open.push(replica),
            Some((code, text)) => {
                story.push(format!("{}: {code} ({text})", replica.id));
                refused.insert(replica.id.clone(), json!({ "code": code, "text": text }));
            }
        }
    }
    let candidates: Vec<Candidate> = open.iter().map(|replica| replica.candidate()).collect();
    let view = PoolView {
        model: &ask.model,
        replicas: pool.len() as u64,
        ready: open.len() as u64,
        queued: pool.iter().map(|replica| u64::from(replica.queued)).sum(),
        ..PoolView::default()
    };
    let weights = set.routing_weights(&view);
    let asked = Ask {
        input_tokens: ask.input_tokens,
        est_output_tokens: ask.est_output_tokens,
    };
    let Some(choice) = score::choose(&asked, &candidates, &weights, ask.seed) else {
        story.insert(0, format!("{}: no replica takes requests", ask.model));
        let value = json!({ "replica": null, "node": null, "reason": "none_open", "score_ms": null, "refused": refused });
        return Answer { value, story };
    };
    let ranked = rank(set, ask, &open, choice.index);
    let (index, reason) = ranked.unwrap_or((choice.index, choice.reason.as_str().to_owned()));
    let (replica, score_ms) = (open[index], choice.score_ms);
    let first = format!(
        "{} to {}: {reason}, {score_ms:.1} ms",
        ask.model, replica.id
    );
    story.insert(0, first);
    let value = json!({
        "replica": replica.id,
        "node": replica.node,
        "reason": reason,
        "score_ms": score_ms,
        "refused": refused,
    });
    Answer { value, story }
}

/// Why a replica takes nothing new.
pub(crate) fn closed(snapshot: &Snapshot, replica: &PoolReplica) -> Option<(&'static str, String)> {
    let known = snapshot.replicas.get(&replica.id);
    if let Some(known) = known.filter(|known| known.state != ShardState::Ready) {
        let state = serde_json::to_value(known.state).unwrap_or_default();
        let state = state.as_str().unwrap_or_default();
        return Some((REPLICA_STATE, format!("the replica is {state}")));
    }
    let node = replica
        .node
        .as_ref()
        .and_then(|id| snapshot.nodes.get(id))?;
    if node.state == NodeState::Ready {
        return None;
    }
    Some((NODE_STATE, format!("the node is {}", node.state.as_str())))
}

/// The native choice comes first, then the others in their order.
fn rank(
    set: &PolicySet,
    ask: &RouteAsk,
    open: &[&PoolReplica],
    native: usize,
) -> Option<(usize, String)> {
    if !set.defines(Hook::Rank) {
        return None;
    }
    let others = (0..open.len()).filter(|index| *index != native);
    let shown: Vec<usize> = std::iter::once(native)
        .chain(others)
        .take(RANK_CANDIDATES_MAX)
        .collect();
    let labels: Vec<_> = shown.iter().map(|at| open[*at].label_pairs()).collect();
    let views: Vec<ReplicaView<'_>> = shown
        .iter()
        .zip(&labels)
        .map(|(at, labels)| open[*at].view(labels))
        .collect();
    let request = RequestView {
        model: &ask.model,
        path: "/v1/chat/completions",
        input_tokens: ask.input_tokens,
        est_output_tokens: ask.est_output_tokens,
        max_tokens: ask.max_tokens,
        session: ask.session.as_deref(),
        attempt: ask.attempt,
        n: 1,
        seed: ask.seed,
        ..RequestView::default()
    };
    let ranked = set.rank(&request, &views)?;
    let reason = ranked.reason.unwrap_or_else(|| "rank".to_owned());
    Some((*shown.get(ranked.index)?, reason))
}
