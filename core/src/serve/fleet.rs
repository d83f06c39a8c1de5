//! The gateway as the control plane needs it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::config::Config;
use crate::control::controller::Serving;
use crate::gateway::state::Gateway;
use crate::routing::fleet::Started;
use crate::routing::outlook::Outlook;

impl Serving for Gateway {
    fn config(&self) -> Arc<Config> {
        self.runtime.load().config.clone()
    }

    fn requests(&self, address: &str) -> u32 {
        self.runtime.load().fleet.requests(address)
    }

    /// Replicas that are made here have tasks of their own, so this is called on a runtime's thread.
    fn serve(&self, endpoints: Arc<Started>) {
        self.apply_started(endpoints);
    }

    fn expect(&self, mut outlooks: BTreeMap<String, Outlook>) {
        for pool in self.runtime.load().fleet.pools() {
            let outlook = outlooks.remove(&*pool.model.name);
            pool.expect(outlook.unwrap_or_default());
        }
    }
}

#[cfg(test)]
mod tests;
