//! What this node is, looked at again and again, for the session, which reports it.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use llmgw_proto::inventory::{Gpus, Inventory};
use tokio::time::{MissedTickBehavior, interval};

use crate::config::AgentConfig;
use crate::inventory::gpu::{GpuSources, GpuWatch, PROBE_INTERVAL};
use crate::inventory::{self, Sources, network};
use crate::session::InventorySource;
use crate::supervisor::Supervisor;

/// How often the rest of the node is looked at, and the GPUs' last probe taken over.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

pub(super) struct Node {
    sources: Sources,
    /// Also asked by the supervisor.
    pub(super) gpus: Arc<GpuWatch>,
    inventory: Mutex<Arc<Inventory>>,
}

impl Node {
    /// Looks for the first time. Takes as long as the GPUs' driver does, up to its deadline.
    pub(super) async fn start(config: &AgentConfig) -> io::Result<Arc<Node>> {
        let sources = Sources {
            gpus: GpuSources::default(),
            sys: PathBuf::from("/sys"),
            proc: PathBuf::from("/proc"),
            dev: Some(PathBuf::from("/dev")),
            config: config.clone(),
        };
        let mut watch = GpuWatch::start(sources.gpus.clone(), PROBE_INTERVAL)?;
        let gpus = loop {
            if let Some(gpus) = watch.latest(&|_| false) {
                break gpus;
            }
            watch.changed().await;
        };
        let inventory = look(sources.clone(), gpus).await?;
        Ok(Arc::new(Node {
            sources,
            gpus: Arc::new(watch),
            inventory: Mutex::new(inventory),
        }))
    }

    /// Looks again and again, until it is dropped.
    pub(super) async fn keep(self: Arc<Node>, supervisor: Arc<Supervisor>) {
        let mut looks = interval(LOOK_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            looks.tick().await;
            let own = {
                let supervisor = supervisor.clone();
                tokio::task::spawn_blocking(move || supervisor.own_pids()).await
            };
            let own = match own {
                Ok(Ok(own)) => own,
                // Then each of them is taken for a stranger's, which only keeps new ones off.
                Ok(Err(error)) => {
                    tracing::warn!("the processes of the shards can't be told: {error}");
                    BTreeSet::new()
                }
                Err(_) => return,
            };
            let Some(gpus) = self.gpus.latest(&|pid| own.contains(&pid)) else {
                continue;
            };
            match look(self.sources.clone(), gpus).await {
                Ok(inventory) => *self.lock() = inventory,
                Err(error) => tracing::warn!("the node can't be looked at: {error}"),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Inventory>> {
        self.inventory
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Puts an inventory together. It reads files and may look up the server's name, so it has a thread to itself.
async fn look(sources: Sources, gpus: Gpus) -> io::Result<Arc<Inventory>> {
    let looking = tokio::task::spawn_blocking(move || {
        Arc::new(inventory::assemble(&sources, gpus, &network::addresses()))
    });
    looking.await.map_err(io::Error::other)
}

impl InventorySource for Node {
    fn latest(&self) -> Arc<Inventory> {
        self.lock().clone()
    }
}
