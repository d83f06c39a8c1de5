//! Tests whose limit has to be short, on a machine that may stand still for longer.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

const SLEEP: Duration = Duration::from_millis(20);

/// Runs a test, and once more if it fails while some processor ran nobody for longer than this. A fault of the gateway's fails it without such
/// a gap.
pub fn unless_held_up(gap_max: Duration, test: impl Fn()) {
    let gaps = Gaps::watch();
    let Err(failed) = catch_unwind(AssertUnwindSafe(&test)) else {
        return;
    };
    let gap = gaps.longest();
    if gap <= gap_max {
        resume_unwind(failed);
    }
    eprintln!("once more: a processor stood still for {gap:?}");
    test();
}

/// One thread on each processor that sleeps, and sees how late it wakes.
struct Gaps {
    longest_ms: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl Gaps {
    fn watch() -> Gaps {
        let gaps = Gaps {
            longest_ms: Arc::default(),
            over: Arc::default(),
        };
        let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let is_allowed = |processor: &usize| allowed.is_set(*processor).unwrap_or(false);
        for processor in (0..CpuSet::count()).filter(is_allowed) {
            let (longest_ms, over) = (gaps.longest_ms.clone(), gaps.over.clone());
            std::thread::spawn(move || {
                let mut own = CpuSet::new();
                own.set(processor).unwrap();
                sched_setaffinity(Pid::from_raw(0), &own).unwrap();
                while !over.load(Ordering::Relaxed) {
                    let slept = Instant::now();
                    std::thread::sleep(SLEEP);
                    let late = slept.elapsed().saturating_sub(SLEEP).as_millis();
                    longest_ms
                        .fetch_max(u64::try_from(late).unwrap_or(u64::MAX), Ordering::Relaxed);
                }
            });
        }
        gaps
    }

    fn longest(&self) -> Duration {
        // A gap that lasts until now is seen when its thread wakes.
        std::thread::sleep(5 * SLEEP);
        Duration::from_millis(self.longest_ms.load(Ordering::Relaxed))
    }
}

impl Drop for Gaps {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}
