//! The policy ticks: on a thread of their own, so that no request ever waits for one.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::gateway::state::Gateway;

/// The step of all ticks.
const STEP: Duration = Duration::from_millis(50);
/// `routing.weights` is asked every 100 ms for each model, in steps.
const ROUTING_STEPS: u64 = 2;
/// `admission.bands` and `admission.gate` every 250 ms.
const ADMISSION_STEPS: u64 = 5;
/// `fairness.prices` and `fairness.weight` every second.
const FAIRNESS_STEPS: u64 = 20;

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
            // The first step takes all, so that nothing is served by built-in numbers for long.
            let mut step = 0;
            while stopped.recv_timeout(STEP) == Err(RecvTimeoutError::Timeout) {
                tick(&gateway, step);
                step += 1;
            }
        })
        .inspect_err(|error| tracing::error!("no policy ticks: {error}"))
        .ok();
    Ticks { stop, thread }
}

fn tick(gateway: &Gateway, step: u64) {
    let set = gateway.policies.current();
    let fleet = gateway.runtime.load().fleet.clone();
    for pool in fleet.pools() {
        if step.is_multiple_of(ADMISSION_STEPS) {
            pool.tick_admission(&set);
        }
        if step.is_multiple_of(FAIRNESS_STEPS) {
            pool.tick_fairness(&set);
        }
        if step.is_multiple_of(ROUTING_STEPS) {
            pool.tick_routing(&set);
        }
    }
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
