//! The policy ticks: on a thread of their own, so that no request ever waits for one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use llmgw_plugins::{Hook, PolicySet, UsageView};

use crate::flow::cost::PRICE_SCALE;
use crate::gateway::auth::Tenants;
use crate::gateway::band;
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
            let mut generation = 0;
            while stopped.recv_timeout(STEP) == Err(RecvTimeoutError::Timeout) {
                // A new set's numbers hold at once, not only when their turn comes.
                let now = gateway.policies.current().generation();
                if std::mem::replace(&mut generation, now) != now {
                    step = 0;
                }
                // A tick that panics (it has said so) must not end all the others.
                let _ = catch_unwind(AssertUnwindSafe(|| tick(&gateway, step)));
                step += 1;
            }
        })
        .inspect_err(|error| tracing::error!("no policy ticks: {error}"))
        .ok();
    Ticks { stop, thread }
}

fn tick(gateway: &Gateway, step: u64) {
    let set = gateway.policies.current();
    let runtime = gateway.runtime.load_full();
    if step.is_multiple_of(FAIRNESS_STEPS) {
        weigh(&set, &runtime.tenants);
    }
    for pool in runtime.fleet.pools() {
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

/// Asks for the weight of each tenant that has requests or had some lately.
fn weigh(set: &PolicySet, tenants: &Tenants) {
    if !set.defines(Hook::Weight) {
        // A policy that had the hook may have left its own.
        tenants
            .accounts()
            .for_each(|account| account.set_weight(account.configured_weight()));
        return;
    }
    let known: Vec<_> = tenants
        .with_bands()
        .map(|(bands, account)| (bands, account, account.usage()))
        .collect();
    let total: u64 = known.iter().map(|(_, _, usage)| usage.cost).sum();
    for (allowed, account, used) in known {
        let labels = account.labels();
        let view = band::tenant_view(set.bands_at_load(), allowed, account, &labels);
        let (queued, inflight) = (view.queued, view.inflight);
        if used.cost + queued + inflight == 0 {
            continue;
        }
        let usage = UsageView {
            cost_1m: used.cost as f64 / PRICE_SCALE,
            share_1m: used.cost as f64 / total.max(1) as f64,
            queued,
            inflight,
            wait_p90_ms: used.wait_p90_ms,
        };
        account.set_weight(set.tenant_weight(&view, &usage));
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
