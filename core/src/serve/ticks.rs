//! The policy ticks: on a thread of their own, so that no request ever waits for one.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::gateway::state::Gateway;

/// `routing.weights` is asked this often for each model.
const ROUTING_TICK: Duration = Duration::from_millis(100);

/// The running ticks.
pub struct Ticks {
    /// Dropped to stop.
    stop: SyncSender<()>,
    thread: Option<JoinHandle<()>>,
}

/// Starts the ticks.
pub fn start(gateway: Arc<Gateway>) -> Ticks {
    let (stop, stopped) = sync_channel(1);
    let thread = std::thread::Builder::new()
        .name("policy-ticks".to_string())
        .spawn(move || {
            while stopped.recv_timeout(ROUTING_TICK) == Err(RecvTimeoutError::Timeout) {
                let set = gateway.policies.current();
                let fleet = gateway.runtime.load().fleet.clone();
                for pool in fleet.pools() {
                    pool.tick(&set);
                }
            }
        })
        .inspect_err(|error| tracing::error!("no policy ticks: {error}"))
        .ok();
    Ticks { stop, thread }
}

impl Ticks {
    pub fn stop(self) {
        drop(self.stop);
        if let Some(thread) = self.thread {
            // A tick that panicked has said so on its own.
            let _ = thread.join();
        }
    }
}
