//! What a node is: its GPUs, adapters, processors and memory, as it registers them and `llmgw agent inventory` prints them.
//!
//! Every number says whether it is known. Nothing that could not be read turns into a zero.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub mod adapter;
pub mod fabric;
pub mod gpu;
pub mod host;
pub mod reading;

pub use adapter::Adapter;
pub use fabric::Fabric;
pub use gpu::Gpus;
pub use host::{Host, Route};
pub use reading::Reading;

/// Everything that a node says of itself when it registers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    pub node: String,
    pub agent_version: String,
    /// The operator's, from agent.yaml.
    pub labels: BTreeMap<String, String>,
    pub host: Host,
    pub gpus: Gpus,
    /// The ports of all RDMA devices, by name.
    pub adapters: Vec<Adapter>,
    pub fabrics: Vec<Fabric>,
    pub route: Route,
    /// What is wrong with the node as a whole, for people; what is wrong with a part stands with it.
    pub problems: Vec<String>,
}
