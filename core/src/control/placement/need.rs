//! What a profile asks for, in the kernel's terms.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::config::Profile;
use crate::control::snapshot::memory_gib;

/// What each node has to give.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Need {
    pub profile: String,
    pub engine: String,
    /// GPU classes that will do, the preferred one first; empty for CPU.
    pub classes: Vec<String>,
    pub nodes: u32,
    /// GPUs on each node, 0 for CPU.
    pub gpus: u32,
    /// GPUs that should reach each other over NVLink: the part of a tensor-parallel group on one node.
    pub group: u32,
    /// Cores on each node.
    pub cpus: Option<u32>,
    /// Memory on each node.
    pub memory_gib: Option<f64>,
    /// Labels that each node must have.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// It computes in fp8, which older cards can't.
    pub fp8: bool,
}

impl Need {
    pub fn of(profile: &Profile) -> Need {
        let gpus = match profile.gpu.is_empty() {
            true => 0,
            false => profile.gpus_per_node,
        };
        // A group that spans nodes, or does not divide what a node gives, takes all of the node's part.
        let tensor = profile.tensor_parallel.max(1);
        let group = match gpus {
            0 => 0,
            gpus if tensor <= gpus && gpus % tensor == 0 => tensor,
            gpus => gpus,
        };
        Need {
            profile: profile.name.to_string(),
            engine: profile.engine.clone(),
            classes: profile.gpu.clone(),
            nodes: profile.nodes.max(1),
            gpus,
            group,
            cpus: profile.cpus,
            memory_gib: memory_gib(profile),
            node_selector: profile.node_selector.clone(),
            fp8: profile
                .quantization
                .as_ref()
                .is_some_and(|kind| kind.to_ascii_lowercase().contains("fp8")),
        }
    }

    /// Groups on each node.
    pub fn groups(&self) -> u32 {
        self.gpus.checked_div(self.group).unwrap_or(0)
    }
}

/// `profile h100: 1 node x 8 h100-sxm-80g in one NVLink domain`.
impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.nodes == 1 { "" } else { "s" };
        write!(f, "profile {}: {} node{plural}", self.profile, self.nodes)?;
        if self.gpus > 0 {
            write!(f, " x {} {}", self.gpus, self.classes.join(" or "))?;
            match (self.group, self.groups()) {
                (0 | 1, _) => {}
                (_, 1) if self.nodes > 1 => f.write_str(", one NVLink domain each")?,
                (_, 1) => f.write_str(" in one NVLink domain")?,
                (group, _) => write!(f, ", each {group} in one NVLink domain")?,
            }
        }
        let mut rest = Vec::new();
        if let Some(cpus) = self.cpus {
            rest.push(format!("{cpus} cores"));
        }
        if let Some(gib) = self.memory_gib {
            rest.push(format!("{gib} GiB of memory"));
        }
        if !rest.is_empty() {
            write!(f, " with {}", rest.join(" and "))?;
        }
        if self.nodes > 1 {
            f.write_str(", all in one fabric")?;
        }
        if !self.node_selector.is_empty() {
            let each = self.node_selector.iter();
            let labels: Vec<String> = each
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            write!(f, ", labelled {}", labels.join(" and "))?;
        }
        Ok(())
    }
}
