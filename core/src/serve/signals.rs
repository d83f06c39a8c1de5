//! What the process is told by signals: SIGTERM and SIGINT stop it, SIGHUP reloads, or stops `llmgw dev`.

use std::io;
use std::sync::Arc;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::reload::Reloads;

/// The signals that the server listens for.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    /// Who closes the terminal of `llmgw dev` is done with it.
    hangup_stops: bool,
}

/// SIGHUP, heard before the other signals.
pub struct Hangup(Signal);

impl Hangup {
    /// From now on SIGHUP does not end the process: one that comes while the server starts is a reload once it serves.
    pub fn hear() -> io::Result<Hangup> {
        Ok(Hangup(signal(SignalKind::hangup())?))
    }
}

impl Signals {
    pub fn install(Hangup(hangup): Hangup, hangup_stops: bool) -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup,
            hangup_stops,
        })
    }

    /// Reloads on each SIGHUP that does not stop; returns with the first signal to stop.
    pub async fn wait(&mut self, reloads: &Arc<Reloads>) {
        loop {
            tokio::select! {
                () = async { tokio::select! {
                    _ = self.terminate.recv() => {}
                    _ = self.interrupt.recv() => {}
                } } => return,
                _ = self.hangup.recv() => {
                    if self.hangup_stops {
                        return;
                    }
                    reloads.clone().in_background();
                }
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
