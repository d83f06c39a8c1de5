//! The pools of all models, and how a new configuration becomes a new fleet without losing what still holds.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use foldhash::{HashMap, HashSet};
use llmgw_plugins::Policies;

use super::locality::{Locality, Placed};
use super::pool::{Pool, Shared};
use super::replica::{Readiness, Replica};
use super::{probe, scrape};
use crate::config::{Config, Endpoint, Model};
use crate::flow::slots::Slots;
use crate::flow::turns::LaneId;
use crate::telemetry::metrics::Metrics;

/// Replicas that the control plane started, by model.
pub type Started = BTreeMap<String, Vec<Placed>>;

/// The pools by the models' catalog names.
#[derive(Default)]
pub struct Fleet {
    pools: HashMap<Arc<str>, Arc<Pool>>,
    /// The slots of every engine that has requests, by the replicas' id: one that left and comes back, is made anew for another key
    /// or name, or serves several models, is the same engine with the same requests on it.
    slots: HashMap<Arc<str>, Weak<Slots>>,
    /// What the replicas were made with; another one makes them anew.
    connect_timeout: Duration,
}

impl Fleet {
    /// Builds the fleet of a configuration, with the replicas that are started for it. A replica whose endpoint and names are unchanged goes on as it is,
    /// with its connections, its counters and what it learned; one that left is retired, and requests on it end
    /// in their own time.
    pub fn build(
        config: &Config,
        started: &Started,
        before: &Fleet,
        metrics: &Metrics,
        policies: &Arc<Policies>,
    ) -> Fleet {
        let connect_timeout = config.limits.connect_timeout;
        let mut pools = HashMap::default();
        let mut slots = before.slots.clone();
        slots.retain(|_, slots| slots.strong_count() > 0);
        let limits = slot_limits(config, started);
        for model in &config.catalog.models {
            let old = before.pools.get(&model.name);
            let keep = (before.connect_timeout == connect_timeout)
                .then_some(old)
                .flatten()
                .filter(|old| old.model.metrics == model.metrics);
            let shared = old.map_or_else(
                || Shared::new(policies.current().bands_at_load()),
                |old| old.shared(),
            );
            let replicas: Vec<Arc<Replica>> = endpoints(model, started)
                .map(|(endpoint, placed)| {
                    let locality = placed
                        .cloned()
                        .unwrap_or_else(|| Locality::new(None, None, endpoint.labels.clone()));
                    let names = names(model, endpoint);
                    let id = Replica::id(endpoint);
                    let limit = limits.get(&id).copied().flatten();
                    let own = slots.get(&id).and_then(Weak::upgrade);
                    let own = own.unwrap_or_else(|| Slots::new(limit));
                    own.set_limit(limit);
                    slots.insert(id, Arc::downgrade(&own));
                    let kept = kept(keep.map(Arc::as_ref), endpoint, &names);
                    if let Some(replica) = &kept {
                        replica.set_locality(locality.clone());
                    }
                    kept.unwrap_or_else(|| {
                        let place = lock(&shared).join();
                        let replica = Replica::new(
                            endpoint.clone(),
                            locality,
                            names,
                            connect_timeout,
                            own,
                            place,
                            shared.queues.clone(),
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

    /// Gives the queues the replicas that are in force now, and wakes all who wait for one, so that they look.
    pub fn take_over(&self) {
        for pool in self.pools.values() {
            let lanes: Vec<LaneId> = pool.replicas.iter().map(|replica| replica.lane).collect();
            pool.tell_queue();
            pool.queues.retain(&lanes);
            pool.queues.changed.notify_waiters();
        }
    }

    /// Requests on an engine, also on one that has left.
    pub fn requests(&self, id: &str) -> u32 {
        let slots = self.slots.get(id).and_then(Weak::upgrade);
        slots.map_or(0, |slots| slots.inflight())
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

/// Those that are configured, then those that are started, of which it is known where they are. A model without profiles has only the former.
fn endpoints<'a>(
    model: &'a Model,
    started: &'a Started,
) -> impl Iterator<Item = (&'a Endpoint, Option<&'a Arc<Locality>>)> {
    let started = started
        .get(&*model.name)
        .filter(|_| !model.profiles.is_empty());
    let configured = model.endpoints.iter().map(|endpoint| (endpoint, None));
    let started = started.into_iter().flatten();
    let started = started.map(|placed| (&placed.endpoint, Some(&placed.locality)));
    let mut seen = HashSet::default();
    configured
        .chain(started)
        .filter(move |(endpoint, _)| seen.insert(Replica::id(endpoint)))
}

/// The slots of each engine, by the replicas' id: the fewest that one of its endpoints says.
fn slot_limits(config: &Config, started: &Started) -> HashMap<Arc<str>, Option<u32>> {
    let mut limits: HashMap<Arc<str>, Option<u32>> = HashMap::default();
    let models = config.catalog.models.iter();
    for (endpoint, _) in models.flat_map(|model| endpoints(model, started)) {
        let limit = limits.entry(Replica::id(endpoint)).or_default();
        *limit = match (*limit, endpoint.slots) {
            (Some(known), Some(slots)) => Some(known.min(slots)),
            (known, slots) => known.or(slots),
        };
    }
    limits
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
        .find(|replica| replica.endpoint.is_same_engine(endpoint) && replica.names == names)
        .cloned()
}
