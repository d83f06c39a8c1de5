//! The agents' sessions: who is connected, what they say, and how commands get to them.
//!
//! One connection carries one session (`connection`), one task keeps the table of nodes (`keeper`), and whoever wants to know looks at
//! the published [`Observed`] or sends a command through [`Sessions`]. A slow, silent or hostile client costs its own connection, nobody else's time.

mod complaints;
mod connection;
mod door;
mod enrol;
mod keeper;
mod listener;
mod seats;
mod strangers;
mod tails;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use llmgw_proto::identity::Serial;
use llmgw_proto::link::KeepAlive;
use llmgw_proto::session::{ServerMessage, SessionId};
use llmgw_proto::shard::LogLine;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::door::Gate;
use self::keeper::Keeper;
use self::seats::Seats;
use self::tails::Tails;
use super::enrolment::Enrolment;
use super::observed::{Commands, NotSent, Observed, Timing};
use crate::config::Agents;

pub use self::door::{Door, Peer};
pub use self::strangers::network;
pub use self::tails::TailError;

/// Messages of all agents that wait for the table.
const INPUTS_MAX: usize = 4_096;
/// For the last words of each session to leave, when the server stops.
const STOP_MAX: Duration = Duration::from_millis(1_000);

/// How sessions are held.
#[derive(Clone, Debug)]
pub struct SessionsOptions {
    pub timing: Timing,
    /// The certificate's name must be the node's id.
    pub require_identity: bool,
    /// Certificates that are revoked.
    pub denied: BTreeSet<Serial>,
    pub keep_alive: KeepAlive,
    /// For a connection's handshake, and then for its registration.
    pub patience: Duration,
    /// Who turns tokens into certificates. None: nobody does.
    pub enrolment: Option<Arc<Enrolment>>,
}

/// All sessions of a server.
pub struct Sessions {
    seats: Arc<Seats>,
    gate: Arc<Gate>,
    tails: Arc<Tails>,
    observed: watch::Receiver<Arc<Observed>>,
    timing: watch::Sender<Timing>,
    /// No connection is accepted any more, and those that are open say goodbye.
    stop: CancellationToken,
    /// Whatever is still open is cut.
    cut: CancellationToken,
    connections: TaskTracker,
    keeper: TaskTracker,
}

impl From<&Agents> for Timing {
    fn from(agents: &Agents) -> Timing {
        Timing {
            heartbeat: agents.heartbeat,
            lost_after: agents.lost_after,
            recovery: agents.recovery,
        }
    }
}

impl SessionsOptions {
    /// What follows from the times that are configured.
    pub fn new(timing: Timing, require_identity: bool) -> SessionsOptions {
        const PATIENCE: Duration = Duration::from_secs(10);
        SessionsOptions {
            timing,
            require_identity,
            denied: BTreeSet::new(),
            // A connection that died is found out when three heartbeats are missed, and one whose other side was only held up lives on.
            keep_alive: KeepAlive {
                interval: timing.heartbeat,
                timeout: timing.heartbeat * 2,
            },
            patience: PATIENCE,
            enrolment: None,
        }
    }
}

impl Sessions {
    /// Serves agents on a listener until it is stopped.
    pub fn start(listener: TcpListener, door: Door, options: SessionsOptions) -> Arc<Sessions> {
        let (inputs, received) = mpsc::channel(INPUTS_MAX);
        let seats = Arc::new(Seats::new());
        let tails = Arc::new(Tails::default());
        let timing = watch::Sender::new(options.timing);
        let gate = Gate::new(door, options.require_identity, options.denied.clone());
        let gate = Arc::new(gate);
        let (keeper, observed) = Keeper::new(
            timing.subscribe(),
            seats.clone(),
            gate.clone(),
            tails.clone(),
        );
        let sessions = Arc::new(Sessions {
            seats: seats.clone(),
            gate: gate.clone(),
            tails: tails.clone(),
            observed,
            timing,
            stop: CancellationToken::new(),
            cut: CancellationToken::new(),
            connections: TaskTracker::new(),
            keeper: TaskTracker::new(),
        });
        sessions
            .keeper
            .spawn(keeper.run(received, sessions.cut.clone()));
        let shared = connection::Shared {
            options,
            gate,
            seats,
            tails,
            inputs,
            cut: sessions.cut.clone(),
        };
        sessions.connections.spawn(listener::accept(
            listener,
            Arc::new(shared),
            sessions.stop.clone(),
            sessions.connections.clone(),
        ));
        sessions
    }

    /// What is known of the nodes, from now on.
    pub fn observed(&self) -> watch::Receiver<Arc<Observed>> {
        self.observed.clone()
    }

    /// Whether agents come in without TLS.
    pub fn is_plain(&self) -> bool {
        self.gate.is_plain()
    }

    /// After a reload. Agents hear of a new heartbeat when they connect again.
    pub fn set_timing(&self, timing: Timing) {
        self.timing
            .send_if_modified(|before| std::mem::replace(before, timing) != timing);
    }

    /// After a reload: certificates with these serial numbers are worth nothing from now on. Whoever is connected with one is told and cut off.
    pub fn deny(&self, serials: BTreeSet<Serial>) {
        self.gate.deny(serials);
        self.seats.judge_all(&self.gate);
    }

    /// Changes whom the door trusts, by [`AgentsTls::replace`](llmgw_proto::identity::listening::AgentsTls::replace): whoever is connected with
    /// a certificate of an authority that is no longer trusted is told and cut off; how many were. May take milliseconds for each session.
    ///
    /// # Errors
    /// Those of the change.
    pub fn trust<E>(&self, change: impl FnOnce() -> Result<(), E>) -> Result<usize, E> {
        {
            let _turn = self.gate.hold();
            change()?;
        }
        Ok(self.seats.judge_all(&self.gate))
    }

    /// The last lines of a shard's output, from the node that it is on.
    ///
    /// # Errors
    /// The node is not connected, does not answer, or has no such shard.
    pub async fn tail(
        &self,
        node: &str,
        shard: &str,
        lines: u32,
    ) -> Result<Vec<LogLine>, TailError> {
        let session = self
            .observed
            .borrow()
            .nodes
            .get(node)
            .and_then(|node| node.session);
        let session = session.ok_or(TailError::NotSent(NotSent::SessionEnded))?;
        let (request, chunks) = self.tails.ask(session)?;
        let message = request.message(shard, lines);
        self.send(node, session, message)
            .map_err(TailError::NotSent)?;
        request.gather(chunks).await
    }

    /// Tells every agent that the server leaves, and closes. Takes [`STOP_MAX`] at most, whoever does not listen.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.connections.close();
        self.keeper.close();
        self.seats
            .dismiss_all(&ServerMessage::Leaving("the server stops".to_owned()));
        let _ = tokio::time::timeout(STOP_MAX, self.connections.wait()).await;
        self.cut.cancel();
        self.connections.wait().await;
        self.keeper.wait().await;
    }
}

impl Commands for Sessions {
    fn send(&self, node: &str, session: SessionId, message: ServerMessage) -> Result<(), NotSent> {
        self.seats.send(node, session, message)
    }
}

#[cfg(test)]
mod tests;
