//! What went wrong in hooks: counters for the metrics, one trace per distinct message, and the switch that turns a
//! failing hook off.

use std::collections::{HashSet, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::{ErrorKind, Fault};
use crate::hooks::Hook;

/// So many errors within the window trip a hook.
pub const TRIP_ERRORS: usize = 50;
/// So many budget overruns within the window trip it too.
pub const TRIP_OVERRUNS: usize = 5;
/// The window.
pub const TRIP_WINDOW: Duration = Duration::from_secs(10);
/// Distinct messages that are remembered; later ones are counted but not traced.
const MESSAGES_MAX: usize = 256;

/// Errors by hook and kind since the process started. One for all generations, so that counters only grow.
#[derive(Debug)]
pub struct Ledger {
    counts: Vec<AtomicU64>,
}

impl Default for Ledger {
    fn default() -> Ledger {
        let counts = (0..Hook::ALL.len() * ErrorKind::ALL.len())
            .map(|_| AtomicU64::new(0))
            .collect();
        Ledger { counts }
    }
}

impl Ledger {
    pub(crate) fn add(&self, hook: Hook, kind: ErrorKind) {
        self.counts[hook as usize * ErrorKind::ALL.len() + kind as usize]
            .fetch_add(1, Ordering::Relaxed);
    }

    /// Every counter that moved: `llmgw_policy_errors_total{hook,kind}`.
    pub fn counts(&self) -> Vec<(Hook, ErrorKind, u64)> {
        let mut moved = Vec::new();
        for hook in Hook::ALL {
            for kind in ErrorKind::ALL {
                let count = self.counts[hook as usize * ErrorKind::ALL.len() + kind as usize]
                    .load(Ordering::Relaxed);
                if count > 0 {
                    moved.push((hook, kind, count));
                }
            }
        }
        moved
    }
}

/// The switches of one generation.
#[derive(Debug)]
pub(crate) struct Trips {
    tripped: Vec<AtomicBool>,
    /// Touched only when a hook failed.
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    /// When which hook failed, oldest first; overruns are marked.
    failures: Vec<VecDeque<(Instant, bool)>>,
    messages: HashSet<String>,
}

/// What became of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Noted {
    /// Nobody saw this message before.
    pub(crate) new_message: bool,
    /// This failure switched the hook off.
    pub(crate) tripped_now: bool,
}

impl Trips {
    pub(crate) fn new() -> Trips {
        let failures = Hook::ALL.iter().map(|_| VecDeque::new()).collect();
        Trips {
            tripped: Hook::ALL.iter().map(|_| AtomicBool::new(false)).collect(),
            recent: Mutex::new(Recent {
                failures,
                messages: HashSet::new(),
            }),
        }
    }

    /// Whether the hook is switched off.
    pub(crate) fn is_tripped(&self, hook: Hook) -> bool {
        self.tripped[hook as usize].load(Ordering::Relaxed)
    }

    /// The hooks that are switched off.
    pub(crate) fn all(&self) -> Vec<Hook> {
        Hook::ALL
            .into_iter()
            .filter(|hook| self.is_tripped(*hook))
            .collect()
    }

    /// Switches all hooks on again, and forgets what led there.
    pub(crate) fn reset(&self) {
        let mut recent = self
            .recent
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        recent.failures.iter_mut().for_each(VecDeque::clear);
        self.tripped
            .iter()
            .for_each(|tripped| tripped.store(false, Ordering::Relaxed));
    }

    /// Notes a failure.
    pub(crate) fn note(&self, hook: Hook, fault: &Fault, now: Instant) -> Noted {
        // Plain data: a thread that panicked in here left nothing half done that matters.
        let mut recent = self
            .recent
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let new_message = recent.messages.len() < MESSAGES_MAX
            && recent.messages.insert(format!("{hook:?} {fault}"));
        // The hook ran, and what it returned was set right. What a client sends may lead there (the name of a band, a long session): it
        // must not switch the hook off for everybody.
        if matches!(fault.kind, ErrorKind::Range | ErrorKind::Unknown) {
            return Noted {
                new_message,
                tripped_now: false,
            };
        }
        let failures = &mut recent.failures[hook as usize];
        while failures
            .front()
            .is_some_and(|(at, _)| now.duration_since(*at) > TRIP_WINDOW)
        {
            failures.pop_front();
        }
        failures.push_back((now, fault.kind == ErrorKind::Budget));
        let overruns = failures.iter().filter(|(_, overrun)| *overrun).count();
        if failures.len() > TRIP_ERRORS {
            failures.pop_front();
        }
        let trips = failures.len() >= TRIP_ERRORS || overruns >= TRIP_OVERRUNS;
        let tripped_now = trips && !self.tripped[hook as usize].swap(true, Ordering::Relaxed);
        Noted {
            new_message,
            tripped_now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times_until_tripped(kind: ErrorKind, apart: Duration) -> Option<usize> {
        let trips = Trips::new();
        let start = Instant::now();
        let fault = Fault::new(kind, "m");
        (1..200).find(|n| {
            trips
                .note(Hook::Rank, &fault, start + apart * *n as u32)
                .tripped_now
        })
    }

    #[test]
    fn fifty_errors_or_five_overruns_in_ten_seconds_trip_a_hook() {
        assert_eq!(
            times_until_tripped(ErrorKind::Error, Duration::from_millis(100)),
            Some(50)
        );
        assert_eq!(
            times_until_tripped(ErrorKind::Budget, Duration::from_secs(2)),
            Some(5)
        );
        assert_eq!(
            times_until_tripped(ErrorKind::Budget, Duration::from_secs(3)),
            None
        );
        assert_eq!(
            times_until_tripped(ErrorKind::Nan, Duration::from_secs(1)),
            None
        );
    }

    #[test]
    fn what_a_client_can_lead_to_trips_nothing() {
        for kind in [ErrorKind::Range, ErrorKind::Unknown] {
            assert_eq!(times_until_tripped(kind, Duration::ZERO), None);
        }
    }

    #[test]
    fn one_hook_that_trips_leaves_the_others_on_and_a_reset_brings_it_back() {
        let trips = Trips::new();
        for _ in 0..TRIP_OVERRUNS {
            trips.note(
                Hook::Classify,
                &Fault::new(ErrorKind::Budget, "m"),
                Instant::now(),
            );
        }
        assert_eq!(trips.all(), vec![Hook::Classify]);
        trips.reset();
        assert_eq!(trips.all(), vec![]);
    }

    #[test]
    fn the_same_message_is_new_once() {
        let trips = Trips::new();
        let fault = Fault::new(ErrorKind::Error, "routing.lua:3: x");
        assert!(trips.note(Hook::Rank, &fault, Instant::now()).new_message);
        assert!(!trips.note(Hook::Rank, &fault, Instant::now()).new_message);
        assert!(
            trips
                .note(Hook::Classify, &fault, Instant::now())
                .new_message
        );
    }
}
