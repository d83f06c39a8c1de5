//! The control plane of a server: over its agents' sessions, and with its gateway.

use std::collections::BTreeMap;
use std::sync::Arc;

use llmgw_proto::identity::FileProblem;
use tokio_util::sync::CancellationToken;

use crate::admin::fleet::FleetAdmin;
use crate::config::{Agents, Config};
use crate::control::controller::{Controller, Looking, Serving};
use crate::control::enrolment::Enrolment;
use crate::control::memory::FailureNews;
use crate::control::observed::Timing;
use crate::control::sessions::Sessions;
use crate::gateway::state::Gateway;
use crate::routing::fleet::Started;
use crate::routing::outlook::Outlook;

/// The agents, and what runs on them.
#[derive(Clone)]
pub struct Fleet {
    pub sessions: Arc<Sessions>,
    pub controller: Arc<Controller>,
    pub enrolment: Arc<Enrolment>,
}

impl Fleet {
    pub fn over(
        sessions: Arc<Sessions>,
        enrolment: Arc<Enrolment>,
        gateway: &Arc<Gateway>,
    ) -> Fleet {
        let controller = Controller::new(
            sessions.observed(),
            sessions.clone(),
            gateway.policies.clone(),
            gateway.clone(),
        );
        Fleet {
            sessions,
            controller,
            enrolment,
        }
    }

    /// Looks at it until the server stops.
    pub fn start(&self, stop: &CancellationToken) -> std::io::Result<Looking> {
        self.controller.start(stop.child_token())
    }

    /// Whether this server may sign for nodes, where the configuration asks for it.
    ///
    /// # Errors
    /// Another server does so with the same state.
    pub fn may_sign(&self, agents: Option<&Agents>) -> Result<(), FileProblem> {
        self.enrolment.prepare(self.signs(agents))
    }

    /// Until the next start a port without TLS stays one, where no token would be safe.
    fn signs<'a>(&self, agents: Option<&'a Agents>) -> Option<&'a Agents> {
        agents.filter(|_| !self.sessions.is_plain())
    }

    /// Takes what a reload says of agents. Without a word of them nobody gets a certificate any more, and who was denied stays so: the port
    /// itself is there until the next start.
    pub fn configured(&self, agents: Option<&Agents>) {
        if let Some(agents) = agents {
            self.sessions.set_timing(Timing::from(agents));
            let denied = agents.deny_serials.iter().cloned();
            self.sessions.deny(denied.collect());
        }
        if let Err(why) = self.enrolment.configure(self.signs(agents)) {
            tracing::error!("no node is enrolled: {why}");
        }
    }

    /// As operators reach it.
    pub fn admin(&self) -> FleetAdmin {
        let sessions = self.sessions.clone();
        FleetAdmin {
            controller: self.controller.clone(),
            enrolment: Some(self.enrolment.clone()),
            tail: Arc::new(move |node, shard, lines| {
                let sessions = sessions.clone();
                Box::pin(async move {
                    let lines = sessions.tail(&node, &shard, lines).await;
                    lines.map_err(|error| error.to_string())
                })
            }),
        }
    }
}

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

    fn failed(&self, news: &FailureNews) {
        let model = self.telemetry.metrics.model(&news.model);
        let node = news.failure.node.as_deref().unwrap_or_default();
        model.replica_failed(node, news.code());
    }
}

#[cfg(test)]
mod tests;
