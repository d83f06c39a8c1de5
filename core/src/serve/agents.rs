//! The agents' listener: who is let in.

use std::sync::Arc;

use llmgw_proto::identity::Fingerprint;
use tokio::net::TcpListener;

use crate::config::{Agents, Config};
use crate::control::enrolment::{AuthorityFiles, Enrolment, not_shown};
use crate::control::observed::Timing;
use crate::control::sessions::{Door, Sessions, SessionsOptions};

/// Whether this server can sign for new nodes, where it is told to.
///
/// # Errors
/// What is wrong with the authority's key.
pub(super) fn check_authority(config: &Config) -> Result<(), String> {
    authority(config).map(|_| ())
}

/// What is probably not meant with the authority's key.
pub(super) fn remark(config: &Config, door: &Door) -> Option<String> {
    let authority = authority(config).ok()??;
    let said = || format!("`agents.tls.ca_key`: {}", not_shown(&authority));
    (!door.leads_to(&authority)).then(said)
}

fn authority(config: &Config) -> Result<Option<Fingerprint>, String> {
    let files = config.agents.as_ref().and_then(AuthorityFiles::of);
    files
        .map(|files| files.check())
        .transpose()
        .map_err(|problem| format!("`agents.tls.ca_key`: {problem}"))
}

/// Serves agents until the sessions are stopped.
pub(super) fn start(
    listener: TcpListener,
    config: &Config,
    door: Door,
    enrolment: &Arc<Enrolment>,
) -> Arc<Sessions> {
    let agents = config.agents.clone().unwrap_or_default();
    let mut options = SessionsOptions::new(Timing::from(&agents), agents.require_identity);
    options.denied = agents.deny_serials.iter().cloned().collect();
    options.enrolment = Some(enrolment.clone());
    say(&listener, &agents, &door);
    Sessions::start(listener, door, options)
}

fn say(listener: &TcpListener, agents: &Agents, door: &Door) {
    let address = listener.local_addr().unwrap_or(agents.address);
    match door {
        Door::Plain if !address.ip().is_loopback() => tracing::warn!(
            "agents connect to {address} without TLS: anybody on the way can be one, and read the engines' keys"
        ),
        Door::Tls(_) if !agents.require_identity => tracing::warn!(
            "agents connect to {address} without a certificate of their own: anybody who reaches it can be one"
        ),
        Door::Plain | Door::Tls(_) => {}
    }
}
