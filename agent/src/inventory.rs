//! What this node is, read from its drivers, `/sys` and `/proc`.
//!
//! [`collect`] asks the GPUs' driver in a process of its own and reads files for the rest. It never fails: what cannot be
//! read is unknown in the answer, with the cause.

use std::path::PathBuf;

use llmgw_proto::inventory::{Gpus, Inventory, Reading};

use crate::config::AgentConfig;

pub mod fabrics;
pub mod gpu;
pub mod host;
pub mod infiniband;
pub mod network;
pub mod page;
pub mod pci;
mod sysfs;

use fabrics::MnnvlClique;
use gpu::GpuSources;
use network::InterfaceAddress;

/// Where the inventory comes from.
#[derive(Debug, Clone)]
pub struct Sources {
    pub gpus: GpuSources,
    /// The root of sysfs, `/sys`.
    pub sys: PathBuf,
    /// The root of procfs, `/proc`.
    pub proc: PathBuf,
    /// Where device nodes are, `/dev`; `None` where `sys` is not this machine's.
    pub dev: Option<PathBuf>,
    pub config: AgentConfig,
}

/// The whole inventory, as it is registered. Blocks for at most the GPUs' deadline, plus the lookup of the server's name.
pub fn collect(sources: &Sources) -> Inventory {
    let gpus = gpu::probe_once(&sources.gpus);
    assemble(sources, gpus, &network::addresses())
}

/// Puts together what was probed and what is read from files.
pub fn assemble(
    sources: &Sources,
    mut gpus: Gpus,
    addresses: &Result<Vec<InterfaceAddress>, String>,
) -> Inventory {
    let Sources {
        sys,
        proc,
        dev,
        config,
        ..
    } = sources;
    let mut problems = Vec::new();
    match pci::nvidia_gpus(sys) {
        Ok(on_pci) => {
            let missing = gpu::missing_from_driver(&on_pci, &gpus);
            gpus.devices.extend(missing);
        }
        Err(why) => problems.push(format!("GPUs on PCI cannot be counted: {why}")),
    }
    let route = network::route(
        proc,
        config.server.as_deref(),
        config.socket_interface.as_deref(),
        addresses,
    );
    if let (Some(server), Reading::Unknown(why)) = (&route.server, &route.source) {
        problems.push(format!("no way to the server {server}: {why}"));
    }
    let mut adapters = infiniband::adapters(sys, dev.as_deref()).unwrap_or_else(|why| {
        problems.push(format!("adapters cannot be listed: {why}"));
        Vec::new()
    });
    network::set_subnets(&mut adapters, addresses);
    let own_traffic: Vec<String> = [&route.interface, &network::default_interface(proc)]
        .into_iter()
        .filter_map(|interface| interface.value().cloned())
        .collect();
    infiniband::set_management_aside(&mut adapters, &own_traffic);
    let cliques: Vec<MnnvlClique> = gpus
        .cliques()
        .into_keys()
        .map(|clique| MnnvlClique {
            cluster_uuid: clique.cluster_uuid.clone(),
            clique: clique.id,
        })
        .collect();
    if cliques.len() > 1 {
        problems.push("the GPUs of this node are in different NVLink cliques".to_owned());
    }
    let (fabrics, wrong_labels) = fabrics::fabrics(&config.fabrics, &adapters, &cliques);
    problems.extend(wrong_labels);
    let host = host::host(sys, proc, infiniband::driver_versions(sys, &adapters));
    let unnamed = || "unnamed".to_owned();
    Inventory {
        node: config
            .node
            .clone()
            .unwrap_or_else(|| host.hostname.value().cloned().unwrap_or_else(unnamed)),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        labels: config.labels.clone(),
        host,
        gpus,
        adapters,
        fabrics,
        route,
        problems,
    }
}
