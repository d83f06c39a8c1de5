//! What the process is told by signals: SIGTERM and SIGINT stop it, SIGHUP reloads.

use std::io;
use std::sync::Arc;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::reload::Reloads;

/// The signals that the server listens for.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub fn install() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Reloads on each SIGHUP; returns with the first signal to stop.
    pub async fn wait(&mut self, reloads: &Arc<Reloads>) {
        loop {
            tokio::select! {
                () = async { tokio::select! {
                    _ = self.terminate.recv() => {}
                    _ = self.interrupt.recv() => {}
                } } => return,
                _ = self.hangup.recv() => reloads.clone().in_background(),
            }
        }
    }

    /// The next signal to stop. SIGHUP is ignored by now.
    pub async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
