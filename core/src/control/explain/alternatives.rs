//! What would make room: changes of the fleet that the kernel itself tried, so that none is a guess.

use serde::Serialize;

use super::counts::ProfileAnswer;
use crate::control::placement::{Attempt, Decision, JobSpec, Need};
use crate::control::snapshot::{FOREIGN, Gpu, Node, NodeState, ShardState, Snapshot};

/// A change after which the job has a place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alternative {
    #[serde(flatten)]
    pub change: Change,
    /// `embed-small/2 leaves ml-07 (2 GPUs)`.
    pub text: String,
    /// Where it would run then.
    pub nodes: Vec<String>,
    /// Under which profile.
    pub profile: String,
}

/// One thing that happens.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum Change {
    /// Another of the model's profiles may be used.
    OtherProfile { name: String },
    /// Replicas stop, or are drained from the node.
    ReplicasLeave { replicas: Vec<String>, on: String },
    /// The node takes replicas again.
    NodeReady { node: String },
    /// The node's broken GPUs are repaired.
    GpusHealthy { node: String },
    /// Processes that llmgw did not start let go of the node's GPUs.
    GpusReleased { node: String },
    /// New and empty nodes, each with just what the profile asks for.
    NodesJoin { count: u32 },
}

/// Changes that are tried.
pub const TRIALS_MAX: usize = 24;
/// Changes that are shown.
pub const ALTERNATIVES_MAX: usize = 3;
/// Nodes, the closest ones, that are varied.
const NODES_MAX: usize = 6;

/// One round of trials.
struct Trials<'a> {
    snapshot: &'a Snapshot,
    job: &'a JobSpec,
    decide: &'a mut dyn FnMut(&Snapshot, &JobSpec) -> Decision,
    found: Vec<Alternative>,
    tried: usize,
}

/// The changes that help, and how many were tried.
pub(super) fn find(
    snapshot: &Snapshot,
    job: &JobSpec,
    attempts: &[Attempt],
    profiles: &[ProfileAnswer],
    decide: &mut dyn FnMut(&Snapshot, &JobSpec) -> Decision,
) -> (Vec<Alternative>, usize) {
    let mut trials = Trials {
        snapshot,
        job,
        decide,
        found: Vec::new(),
        tried: 0,
    };
    trials.other_profiles();
    let mut closest: Vec<&String> = Vec::new();
    for node in profiles
        .iter()
        .flat_map(|profile| profile.closest.iter().take(NODES_MAX))
    {
        if !closest.contains(&node) {
            closest.push(node);
        }
    }
    for node in &closest {
        trials.node(node);
    }
    // What takes more is looked at only where nothing small helps.
    for node in closest {
        if trials.found.is_empty() {
            trials.several_leave(node);
        }
    }
    for attempt in attempts {
        if trials.found.is_empty() {
            trials.nodes_join(&attempt.need);
        }
    }
    (trials.found, trials.tried)
}

impl Trials<'_> {
    fn full(&self) -> bool {
        self.tried >= TRIALS_MAX || self.found.len() >= ALTERNATIVES_MAX
    }

    /// Decides about the varied fleet and job, and keeps the change where it helps.
    fn attempt(
        &mut self,
        snapshot: &Snapshot,
        job: &JobSpec,
        change: Change,
        text: String,
    ) -> bool {
        self.tried += 1;
        let decision = (self.decide)(snapshot, job);
        let Some((attempt, ranking)) = decision.chosen() else {
            return false;
        };
        self.found.push(Alternative {
            change,
            text,
            nodes: ranking.candidate.nodes.clone(),
            profile: attempt.need.profile.clone(),
        });
        true
    }

    fn other_profiles(&mut self) {
        let Some(whole) = JobSpec::of(self.snapshot, &self.job.model, None) else {
            return;
        };
        for profile in &whole.profiles {
            let known = self.job.profiles.iter().any(|own| own.name == profile.name);
            if known || self.full() {
                continue;
            }
            let job = JobSpec {
                profiles: vec![profile.clone()],
                ..self.job.clone()
            };
            let name = profile.name.to_string();
            let text = format!("profile {name} may be used");
            let snapshot = self.snapshot;
            self.attempt(snapshot, &job, Change::OtherProfile { name }, text);
        }
    }

    fn node(&mut self, id: &str) {
        self.node_ready(id);
        self.gpus_healthy(id);
        self.gpus_released(id);
        self.replicas_leave(id);
    }

    fn node_ready(&mut self, id: &str) {
        let Some(state) = self.snapshot.nodes.get(id).map(|node| node.state) else {
            return;
        };
        if state == NodeState::Ready || self.full() {
            return;
        }
        let verb = match state {
            NodeState::Draining => "undrained",
            _ => "back",
        };
        let change = Change::NodeReady {
            node: id.to_owned(),
        };
        self.vary(change, format!("{id} is {verb}"), |snapshot| {
            if let Some(node) = snapshot.nodes.get_mut(id) {
                node.state = NodeState::Ready;
            }
        });
    }

    fn gpus_healthy(&mut self, id: &str) {
        let change = Change::GpusHealthy {
            node: id.to_owned(),
        };
        let sick = self.numbers(id, |gpu| !gpu.healthy);
        if sick.is_empty() || self.full() {
            return;
        }
        let text = format!("{id} has {} healthy again", listed(&sick));
        self.vary(change, text, |snapshot| {
            let gpus = snapshot.nodes.get_mut(id).map(|node| &mut node.gpus);
            gpus.into_iter()
                .flatten()
                .for_each(|gpu| gpu.healthy = true);
        });
    }

    fn gpus_released(&mut self, id: &str) {
        let change = Change::GpusReleased {
            node: id.to_owned(),
        };
        let held = self.numbers(id, |gpu| gpu.used_by.as_deref() == Some(FOREIGN));
        if held.is_empty() || self.full() {
            return;
        }
        let text = format!("{id} has {} released by another process", listed(&held));
        self.vary(change, text, |snapshot| {
            for gpu in snapshot
                .nodes
                .get_mut(id)
                .into_iter()
                .flat_map(|node| &mut node.gpus)
            {
                gpu.used_by.take_if(|user| user == FOREIGN);
            }
        });
    }

    /// Each replica by itself, the smallest one first.
    fn replicas_leave(&mut self, id: &str) {
        for (held, replica) in self.replicas(id) {
            if self.full() {
                return;
            }
            self.leave(id, &[replica], held);
        }
    }

    /// One replica after the other, the smallest ones first, until there is room.
    fn several_leave(&mut self, id: &str) {
        let replicas = self.replicas(id);
        for several in 2..=replicas.len() {
            if self.full() {
                return;
            }
            let held = replicas[..several].iter().map(|(held, _)| held).sum();
            let names: Vec<String> = replicas[..several]
                .iter()
                .map(|(_, replica)| replica.clone())
                .collect();
            if self.leave(id, &names, held) {
                return;
            }
        }
    }

    fn nodes_join(&mut self, need: &Need) {
        let mut varied = self.snapshot.clone();
        for number in 1..=need.nodes {
            let id = format!("new-{number}");
            let node = bare_node(&id, need);
            varied.nodes.insert(id, node);
        }
        let verb = if need.nodes == 1 { "joins" } else { "join" };
        let asked = need.to_string();
        let asked = asked.split_once(": ").map_or("", |(_, asked)| asked);
        let change = Change::NodesJoin { count: need.nodes };
        self.attempt(&varied, self.job, change, format!("{asked} {verb}"));
    }

    /// Other models' replicas on a node with the number of GPUs that each has there, the smallest first.
    fn replicas(&self, id: &str) -> Vec<(usize, String)> {
        let mut replicas: Vec<(usize, String)> = self
            .snapshot
            .replicas_on(id)
            .into_iter()
            .filter(|replica| {
                let known = &self.snapshot.replicas[replica];
                // What is left of one that failed can't be stopped.
                known.model != self.job.model && known.state != ShardState::Failed
            })
            .map(|replica| (self.held(id, &replica), replica))
            .collect();
        replicas.sort();
        replicas
    }

    fn leave(&mut self, id: &str, replicas: &[String], held: usize) -> bool {
        let verb = if replicas.len() == 1 {
            "leaves"
        } else {
            "leave"
        };
        let gives = match held {
            0 => String::new(),
            1 => " (1 GPU)".to_owned(),
            held => format!(" ({held} GPUs)"),
        };
        let text = format!("{} {verb} {id}{gives}", replicas.join(" and "));
        let change = Change::ReplicasLeave {
            replicas: replicas.to_vec(),
            on: id.to_owned(),
        };
        let mut varied = self.snapshot.clone();
        for replica in replicas {
            varied.release(replica);
        }
        self.attempt(&varied, self.job, change, text)
    }

    fn vary(&mut self, change: Change, text: String, with: impl Fn(&mut Snapshot)) {
        let mut varied = self.snapshot.clone();
        with(&mut varied);
        self.attempt(&varied, self.job, change, text);
    }

    fn held(&self, id: &str, replica: &str) -> usize {
        self.numbers(id, |gpu| gpu.used_by.as_deref() == Some(replica))
            .len()
    }

    fn numbers(&self, id: &str, which: impl Fn(&Gpu) -> bool) -> Vec<u32> {
        let node = self.snapshot.nodes.get(id);
        let gpus = node.into_iter().flat_map(|node| &node.gpus);
        gpus.filter(|gpu| which(gpu)).map(|gpu| gpu.index).collect()
    }
}

/// Just what the profile asks for.
fn bare_node(id: &str, need: &Need) -> Node {
    let gpu = |index: u32| Gpu {
        uuid: format!("{id}-{index}"),
        index,
        class: need.classes.first().cloned().unwrap_or_default(),
        domain: Some(0),
        compute_capability: None,
        healthy: true,
        reason: None,
        used_by: None,
        memory_free_gib: None,
    };
    let (cpus, memory_gib) = (need.cpus.unwrap_or(0), need.memory_gib.unwrap_or(0.0));
    Node {
        fabrics: vec!["new".to_owned()],
        gpus: (0..need.gpus).map(gpu).collect(),
        cpus,
        cpus_free: cpus,
        memory_gib,
        memory_gib_free: memory_gib,
        ..Node::default()
    }
}

/// `GPU 4`, `GPUs 4, 5`.
fn listed(numbers: &[u32]) -> String {
    let list: Vec<String> = numbers.iter().map(u32::to_string).collect();
    let plural = if numbers.len() == 1 { "" } else { "s" };
    format!("GPU{plural} {}", list.join(", "))
}
