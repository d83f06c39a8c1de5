//! The agents' address: accepts, and hands each connection to a task of its own at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::connection::{self, Shared};
use super::strangers::{STRANGERS_MAX, Strangers};
use crate::control::snapshot::NODES_MAX;

/// Connections at once: every node's, and on top of them those that are no node's yet, which so take no node's place.
const CONNECTIONS_MAX: usize = NODES_MAX + STRANGERS_MAX;
/// After an accept that failed (no file descriptors, mostly), before the next.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

pub(super) async fn accept(
    listener: TcpListener,
    shared: Arc<Shared>,
    stop: CancellationToken,
    connections: TaskTracker,
) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let strangers = Arc::new(Strangers::default());
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("an agent's connection could not be accepted: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(seat) = room.clone().try_acquire_owned() else {
            if let Some(unsaid) = shared.gate.may_say(address, "full") {
                tracing::warn!(
                    "{address} was turned away: {CONNECTIONS_MAX} connections are open{unsaid}"
                );
            }
            continue;
        };
        let stranger = strangers.admit(address.ip());
        let shared = shared.clone();
        connections.spawn(async move {
            connection::run(stream, address, stranger, shared).await;
            drop(seat);
        });
    }
}
