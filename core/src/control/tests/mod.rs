//! Tests of the pure control plane: small fleets built in place, and the shipped snapshots.

use std::path::PathBuf;

use super::placement::{Decision, JobSpec, NativePolicy, place};
use super::snapshot::{Gpu, ModelEntry, Node, Snapshot};

mod explaining;
pub(super) mod nodes;
mod placing;
mod policies;
mod properties;
mod shipped;
mod snapshots;

/// A fleet of the shipped ones.
fn fleet(name: &str) -> Snapshot {
    let file = fleets().join(format!("{name}.json"));
    Snapshot::read(&file).unwrap_or_else(|error| panic!("{error}"))
}

fn fleets() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../policies/fleets")
}

/// The shortest way to a small fleet.
#[derive(Default)]
struct Build(Snapshot);

impl Build {
    /// A node with so many GPUs in each NVLink domain; `0` is a GPU without NVLink.
    fn gpus(mut self, id: &str, class: &str, domains: &[u32]) -> Self {
        let mut gpus = Vec::new();
        for (number, size) in domains.iter().enumerate() {
            for _ in 0..(*size).max(1) {
                let index = gpus.len() as u32;
                gpus.push(Gpu {
                    uuid: format!("GPU-{id}-{index}"),
                    index,
                    class: class.to_owned(),
                    domain: (*size > 0).then_some(number as u32),
                    compute_capability: None,
                    healthy: true,
                    reason: None,
                    used_by: None,
                    memory_free_gib: None,
                });
            }
        }
        let node = Node {
            gpus,
            cpus: 64,
            cpus_free: 64,
            memory_gib: 512.0,
            memory_gib_free: 512.0,
            ..Node::default()
        };
        self.0.nodes.insert(id.to_owned(), node);
        self
    }

    fn cores(self, id: &str, cpus: u32) -> Self {
        let mut build = self.gpus(id, "", &[]);
        let node = build.0.nodes.get_mut(id).expect("it was just built");
        (node.cpus, node.cpus_free) = (cpus, cpus);
        build
    }

    /// A model `m`, whose profiles are JSON.
    fn model(mut self, profiles: serde_json::Value) -> Self {
        let entry = serde_json::json!({"replicas": 2, "profiles": profiles});
        let entry: ModelEntry = serde_json::from_value(entry).expect("the profiles have the shape");
        self.0.models.insert("m".to_owned(), entry);
        self
    }

    fn set(mut self, path: &str, value: impl Into<serde_json::Value>) -> Self {
        self.0
            .set(path, value.into())
            .unwrap_or_else(|error| panic!("{error}"));
        self
    }

    fn place(&self) -> Decision {
        placed(&self.0, "m")
    }
}

/// `per` GPUs of a class on each of `nodes` nodes, as one tensor-parallel group.
fn gpu_profile(class: &str, per: u32, nodes: u32) -> serde_json::Value {
    serde_json::json!({"name": class, "engine": "vllm", "gpu": [class], "gpus_per_node": per, "nodes": nodes,
        "tensor_parallel": per * nodes})
}

fn cpu_profile(cpus: u32) -> serde_json::Value {
    serde_json::json!({"name": "cpu", "engine": "llamacpp", "cpus": cpus, "memory_gib": 16})
}

fn placed(snapshot: &Snapshot, model: &str) -> Decision {
    let job = JobSpec::of(snapshot, model, None).expect("the fleet has the model");
    place(snapshot, &job, &mut NativePolicy)
}

/// The codes of all reasons of a node.
fn codes<'a>(decision: &'a Decision, node: &str) -> Vec<&'a str> {
    decision
        .refused(node)
        .iter()
        .map(|reason| &*reason.code)
        .collect()
}

/// Indexes of the GPUs on the chosen nodes.
fn indexes(decision: &Decision) -> Vec<Vec<u32>> {
    let (_, ranking) = decision.chosen().expect("it has a place");
    let taken = ranking.candidate.taken.iter();
    taken
        .map(|taken| taken.iter().map(|taken| taken.index).collect())
        .collect()
}
