//! The agents' listener: with which certificate, and who is let in.

use std::sync::Arc;

use llmgw_proto::identity::listening::AgentsTls;
use llmgw_proto::identity::{Authorities, Identity};
use tokio::net::TcpListener;

use crate::config::{Agents, Config};
use crate::control::observed::Timing;
use crate::control::sessions::{Door, Sessions, SessionsOptions};

/// How agents come in: over TLS where it is set, with what is in its files.
///
/// # Errors
/// Which of the files can't be used, and what would be right.
pub(super) fn door(config: &Config) -> Result<Door, String> {
    let tls = config
        .agents
        .as_ref()
        .and_then(|agents| agents.tls.as_ref());
    let Some(tls) = tls else {
        return Ok(Door::Plain);
    };
    let wrong = |problem: &dyn std::fmt::Display| format!("`agents.tls`: {problem}");
    let identity = Identity::load(&tls.cert, &tls.key).map_err(|problem| wrong(&problem))?;
    let authorities = tls.ca.as_deref().map(Authorities::load).transpose();
    let authorities = authorities.map_err(|problem| wrong(&problem))?;
    let tls = AgentsTls::new(identity, authorities).map_err(|problem| wrong(&problem))?;
    Ok(Door::Tls(Arc::new(tls)))
}

/// Serves agents until the sessions are stopped.
pub(super) fn start(listener: TcpListener, config: &Config, door: Door) -> Arc<Sessions> {
    let agents = config.agents.clone().unwrap_or_default();
    let mut options = SessionsOptions::new(Timing::from(&agents), agents.require_identity);
    options.denied = agents.deny_serials.iter().cloned().collect();
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
