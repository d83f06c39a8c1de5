//! The pools of all models, and how a new configuration becomes a new fleet without losing what still holds.

use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use foldhash::HashMap;
use llmgw_plugins::Policies;

use super::pool::{Pool, Shared};
use super::replica::{Readiness, Replica};
use super::{probe, scrape};
use crate::config::{Config, Endpoint, Model};
use crate::flow::permit::Slots;
use crate::telemetry::metrics::Metrics;

/// The pools by the models' catalog names.
#[derive(Default)]
pub struct Fleet {
    pools: HashMap<Arc<str>, Arc<Pool>>,
    /// The slots of every replica that has requests, by model and id: one that left and comes back, or is made anew
    /// for another key or name, is the same engine with the same requests on it.
    slots: HashMap<(Arc<str>, Arc<str>), Weak<Slots>>,
    /// What the replicas were made with; another one makes them anew.
    connect_timeout: Duration,
}

impl Fleet {
    /// Builds the fleet of a configuration. A replica whose endpoint and names are unchanged goes on as it is,
    /// with its connections, its counters and what it learned; one that left is retired, and requests on it end
    /// in their own time.
    pub fn build(
        config: &Config,
        before: &Fleet,
        metrics: &Metrics,
        policies: &Arc<Policies>,
    ) -> Fleet {
        let connect_timeout = config.limits.connect_timeout;
        let mut pools = HashMap::default();
        let mut slots = before.slots.clone();
        slots.retain(|_, slots| slots.strong_count() > 0);
        for model in &config.catalog.models {
            let old = before.pools.get(&model.name);
            let keep = (before.connect_timeout == connect_timeout)
                .then_some(old)
                .flatten()
                .filter(|old| old.model.metrics == model.metrics);
            let shared = old.map_or_else(Shared::default, |old| old.shared());
            let replicas = model
                .endpoints
                .iter()
                .map(|endpoint| {
                    let names = names(model, endpoint);
                    kept(keep.map(Arc::as_ref), endpoint, &names).unwrap_or_else(|| {
                        let place = lock(&shared).join();
                        let changed = shared.changed.clone();
                        let key = (model.name.clone(), Replica::id(endpoint));
                        let same = slots.get(&key).and_then(Weak::upgrade);
                        let same = same.filter(|slots| slots.limit() == endpoint.slots);
                        let own =
                            same.unwrap_or_else(|| Slots::new(endpoint.slots, changed.clone()));
                        slots.insert(key, Arc::downgrade(&own));
                        let replica = Replica::new(
                            endpoint.clone(),
                            names,
                            connect_timeout,
                            own,
                            place,
                            changed,
                        );
                        inherit(old.map(Arc::as_ref), &replica);
                        tokio::spawn(probe::run(replica.clone(), policies.clone()));
                        tokio::spawn(scrape::run(
                            replica.clone(),
                            model.metrics.clone(),
                            policies.clone(),
                        ));
                        replica
                    })
                })
                .collect();
            let pool = Pool::new(model.clone(), replicas, metrics.model(&model.name), shared);
            pools.insert(model.name.clone(), Arc::new(pool));
        }
        let fleet = Fleet {
            pools,
            slots,
            connect_timeout,
        };
        fleet.retire_missing(before);
        fleet
    }

    pub fn pool(&self, model: &str) -> Option<&Arc<Pool>> {
        self.pools.get(model)
    }

    pub fn pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        self.pools.values()
    }

    /// Wakes all who wait for a replica, so that they look at the fleet that is in force now.
    pub fn wake(&self) {
        for pool in self.pools.values() {
            pool.changed.notify_waiters();
        }
    }

    fn retire_missing(&self, before: &Fleet) {
        for (name, old) in &before.pools {
            let now = self.pools.get(name);
            for replica in &old.replicas {
                let stays = now.is_some_and(|pool| {
                    pool.replicas.iter().any(|kept| Arc::ptr_eq(kept, replica))
                });
                if !stays {
                    replica.retired.cancel();
                    lock(&old.shared()).forget(replica.prefix_slot);
                }
            }
        }
    }
}

fn lock(shared: &Shared) -> std::sync::MutexGuard<'_, super::prefix::PrefixIndex> {
    shared.prefix.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The names under which an engine may list a model: what the endpoint says, else the model's own names.
fn names(model: &Model, endpoint: &Endpoint) -> Vec<Arc<str>> {
    if let Some(serves) = &endpoint.serves {
        return vec![Arc::from(serves.as_str())];
    }
    let source = model.source.as_deref().map(Arc::from);
    [model.name.clone()]
        .into_iter()
        .chain(source)
        .chain(model.aliases.iter().cloned())
        .collect()
}

/// The same engine under a new key, name or time limit is as ready as it was, until its own probe says otherwise:
/// a busy one may take longer to answer than a request waits for the first probe.
fn inherit(before: Option<&Pool>, replica: &Replica) {
    let same = before.and_then(|pool| pool.replicas.iter().find(|old| old.id == replica.id));
    let Some(old) = same.filter(|old| old.engine == replica.engine) else {
        return;
    };
    let readiness = old.readiness();
    if matches!(&readiness, Readiness::Ready { served, .. } if replica.names.contains(served)) {
        replica.probed(readiness, 0);
    }
}

fn kept(before: Option<&Pool>, endpoint: &Endpoint, names: &[Arc<str>]) -> Option<Arc<Replica>> {
    before?
        .replicas
        .iter()
        .find(|replica| replica.endpoint == *endpoint && replica.names == names)
        .cloned()
}
