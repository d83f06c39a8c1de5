//! What all requests share: the configuration in force with its fleet, the policies, the books.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use llmgw_plugins::Policies;

use super::auth::Tenants;
use crate::config::Config;
use crate::routing::fleet::Fleet;
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
    draining: AtomicBool,
}

impl Gateway {
    pub fn new(config: Config, policies: Arc<Policies>, telemetry: Arc<Telemetry>) -> Arc<Gateway> {
        let runtime = Runtime::new(config, None, &policies, &telemetry);
        runtime.fleet.take_over();
        Arc::new(Gateway {
            runtime: ArcSwap::from_pointee(runtime),
            policies,
            telemetry,
            retry_budget: RetryBudget::new(),
            draining: AtomicBool::new(false),
        })
    }

    /// Puts a checked configuration in force. Streams go on with what they began with.
    pub fn apply(&self, config: Config) {
        let before = self.runtime.load_full();
        let runtime = Runtime::new(config, Some(&before), &self.policies, &self.telemetry);
        let names: Vec<Arc<str>> = runtime
            .config
            .catalog
            .models
            .iter()
            .map(|model| model.name.clone())
            .collect();
        self.runtime.store(Arc::new(runtime));
        // Only now: they look at what is in force.
        self.runtime.load().fleet.take_over();
        self.telemetry
            .metrics
            .retain_models(|name| names.iter().any(|kept| **kept == *name));
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
        config: Config,
        before: Option<&Runtime>,
        policies: &Arc<Policies>,
        telemetry: &Telemetry,
    ) -> Runtime {
        let none = Fleet::default();
        let fleet_before = before.map_or(&none, |before| &before.fleet);
        let fleet = Fleet::build(&config, fleet_before, &telemetry.metrics, policies);
        Runtime {
            tenants: Tenants::new(&config, before.map(|before| &before.tenants)),
            fleet: Arc::new(fleet),
            config: Arc::new(config),
        }
    }
}
