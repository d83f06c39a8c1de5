//! A profile in a snapshot, and its two converters: inside the program there is [`config::Profile`](crate::config::Profile) only.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::one;
use crate::config::{LaunchMode, Profile};

/// One way to run a model. Its environment is left out, since it may hold credentials.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileEntry {
    pub name: String,
    pub engine: String,
    /// GPU classes that will do, the preferred one first; empty: it runs on CPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu: Vec<String>,
    /// Default 1 with `gpu`, else 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus_per_node: Option<u32>,
    /// Default 1.
    #[serde(default = "one")]
    pub nodes: u32,
    /// Default 1.
    #[serde(default = "one")]
    pub tensor_parallel: u32,
    /// Default 1.
    #[serde(default = "one")]
    pub pipeline_parallel: u32,
    /// Cores on each node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// Memory on each node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_gib: Option<f64>,
    /// Labels that each of its nodes must have, with these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    /// Default `native`.
    #[serde(default)]
    pub launch_mode: LaunchModeEntry,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
}

/// How the shards of a multi-node replica find each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchModeEntry {
    #[default]
    Native,
    Ray,
}

/// Bytes in a GiB.
const GIB: f64 = (1u64 << 30) as f64;

impl ProfileEntry {
    /// For the program.
    pub fn profile(&self) -> Profile {
        Profile {
            name: self.name.as_str().into(),
            engine: self.engine.clone(),
            gpu: self.gpu.clone(),
            gpus_per_node: self
                .gpus_per_node
                .unwrap_or(u32::from(!self.gpu.is_empty())),
            nodes: self.nodes,
            tensor_parallel: self.tensor_parallel,
            pipeline_parallel: self.pipeline_parallel,
            cpus: self.cpus,
            memory: self.memory_gib.map(|gib| (gib * GIB).round() as u64),
            node_selector: self.node_selector.clone(),
            quantization: self.quantization.clone(),
            slots: self.slots,
            launch_mode: match self.launch_mode {
                LaunchModeEntry::Native => LaunchMode::Native,
                LaunchModeEntry::Ray => LaunchMode::Ray,
            },
            args: self.args.clone(),
            env: BTreeMap::new(),
        }
    }
}

impl From<&Profile> for ProfileEntry {
    fn from(profile: &Profile) -> Self {
        ProfileEntry {
            name: profile.name.to_string(),
            engine: profile.engine.clone(),
            gpu: profile.gpu.clone(),
            gpus_per_node: Some(profile.gpus_per_node),
            nodes: profile.nodes,
            tensor_parallel: profile.tensor_parallel,
            pipeline_parallel: profile.pipeline_parallel,
            cpus: profile.cpus,
            memory_gib: memory_gib(profile),
            node_selector: profile.node_selector.clone(),
            quantization: profile.quantization.clone(),
            slots: profile.slots,
            launch_mode: match profile.launch_mode {
                LaunchMode::Native => LaunchModeEntry::Native,
                LaunchMode::Ray => LaunchModeEntry::Ray,
            },
            args: profile.args.clone(),
        }
    }
}

/// What a profile asks for on each node.
pub(crate) fn memory_gib(profile: &Profile) -> Option<f64> {
    profile.memory.map(|bytes| bytes as f64 / GIB)
}
