//! The machine around the GPUs: processors and memory as far as this process may use them, kernel, drivers, and the way to the server.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::Reading;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    pub hostname: Reading<String>,
    pub kernel: Reading<String>,
    pub cpu: Cpu,
    pub memory: Memory,
    /// Versions of the drivers that matter here: `mlx5_core`, `efa`, ... The GPUs' driver stands with the GPUs.
    pub drivers: BTreeMap<String, Reading<String>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    pub model: Reading<String>,
    pub sockets: Reading<u32>,
    pub cores: Reading<u32>,
    /// Those that are online.
    pub threads: Reading<u32>,
    pub numa_nodes: Reading<u32>,
    /// What this process may use, in thousandths of a thread.
    pub available_millis: Reading<u64>,
    /// What keeps it below `threads`: `cgroup quota`, `cpu set`.
    pub limited_by: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub total_bytes: Reading<u64>,
    /// What could be had without swapping, within the limit.
    pub available_bytes: Reading<u64>,
    /// The most that this process's cgroup may have, where it has a limit.
    pub limit_bytes: Option<u64>,
    /// The cgroup that sets it.
    pub limited_by: Option<String>,
}

/// How packets get to the server, or, where none is configured, to anywhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// `None`: the default route is meant.
    pub server: Option<String>,
    pub interface: Reading<String>,
    /// This node's address as the server sees it, unless it is translated on the way.
    pub source: Reading<IpAddr>,
    /// How the interface was found: by the operator's `socket_interface`, by the source address, by the default route.
    pub decided_by: RouteDecision,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RouteDecision {
    /// `socket_interface` of agent.yaml.
    Operator,
    /// The interface that has the source address of a socket connected to the server.
    SourceAddress,
    DefaultRoute,
    #[serde(other)]
    Undecided,
}
