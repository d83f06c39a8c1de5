//! What all requests share: the configuration in force with its fleet, the policies, the books.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use llmgw_plugins::Policies;

use super::auth::Tenants;
use crate::config::Config;
use crate::routing::fleet::{Fleet, Started};
use crate::routing::retry_budget::RetryBudget;
use crate::telemetry::Telemetry;

/// A configuration and everything made from it. Replaced whole; a request keeps the one it began with.
pub struct Runtime {
    pub config: Arc<Config>,
    pub tenants: Tenants,
    pub fleet: Arc<Fleet>,
}

/// The gateway of one process.
pub struct Gateway {
    pub runtime: ArcSwap<Runtime>,
    pub policies: Arc<Policies>,
    pub telemetry: Arc<Telemetry>,
    pub retry_budget: RetryBudget,
    /// Bytes of the bodies of those that wait for their turn.
    pub queued_bytes: AtomicU64,
    /// What a runtime is made from beside the configuration. Held while one is made: of two at once each must see the other's.
    started: Mutex<Arc<Started>>,
    draining: AtomicBool,
}

impl Gateway {
    pub fn new(config: Config, policies: Arc<Policies>, telemetry: Arc<Telemetry>) -> Arc<Gateway> {
        let started = Arc::default();
        let runtime = Runtime::new(Arc::new(config), &started, None, &policies, &telemetry);
        runtime.fleet.take_over();
        Arc::new(Gateway {
            runtime: ArcSwap::from_pointee(runtime),
            policies,
            telemetry,
            retry_budget: RetryBudget::new(),
            queued_bytes: AtomicU64::new(0),
            started: Mutex::new(started),
            draining: AtomicBool::new(false),
        })
    }

    /// Puts a checked configuration in force. Streams go on with what they began with.
    pub fn apply(&self, config: Config) {
        let started = self.lock();
        let names: Vec<Arc<str>> = config
            .catalog
            .models
            .iter()
            .map(|model| model.name.clone())
            .collect();
        self.replace(Arc::new(config), &started);
        self.telemetry
            .metrics
            .retain_models(|name| names.iter().any(|kept| **kept == *name));
    }

    /// Puts the replicas in force that the control plane started; those that are configured stay.
    pub fn apply_started(&self, now: Arc<Started>) {
        let mut started = self.lock();
        *started = now;
        let config = self.runtime.load().config.clone();
        self.replace(config, &started);
    }

    fn replace(&self, config: Arc<Config>, started: &Started) {
        let before = self.runtime.load_full();
        let runtime = Runtime::new(
            config,
            started,
            Some(&before),
            &self.policies,
            &self.telemetry,
        );
        self.runtime.store(Arc::new(runtime));
        // Only now: they look at what is in force.
        self.runtime.load().fleet.take_over();
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Started>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on new requests are refused; those at work end in their own time.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}

impl Runtime {
    fn new(
        config: Arc<Config>,
        started: &Started,
        before: Option<&Runtime>,
        policies: &Arc<Policies>,
        telemetry: &Telemetry,
    ) -> Runtime {
        let none = Fleet::default();
        let fleet_before = before.map_or(&none, |before| &before.fleet);
        let fleet = Fleet::build(&config, started, fleet_before, &telemetry.metrics, policies);
        Runtime {
            tenants: Tenants::new(&config, before.map(|before| &before.tenants)),
            fleet: Arc::new(fleet),
            config,
        }
    }
}
