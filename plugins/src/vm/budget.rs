//! What stops a runaway script: a count of interrupts for request hooks, a deadline for the others.
//!
//! Luau calls the interrupt at each loop's end, call and return, and inside of pattern matching. Once the budget
//! is used up every further interrupt raises again, so `pcall` can't get out of it; and a hook that
//! caught the last one and returned is found out by [`Budget::exceeded`].

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use mlua::{Error, Lua, VmState};

/// Interrupts that a request hook may use. Deterministic: a wall clock would misfire when the thread is preempted.
pub const REQUEST_INTERRUPTS_MAX: u64 = 20_000;
/// Wall clock of one tick hook.
pub const TICK_MAX: Duration = Duration::from_millis(5);
/// Wall clock of one placement decision, all its calls together.
pub const DECISION_MAX: Duration = Duration::from_millis(500);
/// Wall clock of `engine.validate` and `engine.commands`.
pub const ENGINE_MAX: Duration = Duration::from_millis(50);
/// Wall clock of running a file at load.
pub(crate) const LOAD_MAX: Duration = Duration::from_millis(200);
/// Between two interrupts at most one library call runs, whose cost is bounded by memory, some ms. A count alone would let
/// 20,000 of those run, so this much time is too much in any case, if the thread had the CPU for half of it.
const REQUEST_TIME_MAX: Duration = Duration::from_millis(20);
/// A clock read costs more than the interrupt itself.
const CLOCK_EVERY: u64 = 8;

/// What one call may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// [`REQUEST_INTERRUPTS_MAX`].
    Count,
    /// Until then.
    Clock(Duration),
}

/// The budget of the call that a VM is making. Shared with the VM's interrupt.
#[derive(Debug)]
pub(crate) struct Budget {
    used: Cell<u64>,
    /// Interrupts allowed; `u64::MAX` under a clock.
    count_max: Cell<u64>,
    /// When the time is up; of a request hook known from its first look at the clock on.
    deadline: Cell<Option<Instant>>,
    allowed: Cell<Duration>,
    /// CPU time of the thread at the start of a clocked call, and when a request hook's time was up for the first time.
    cpu_start: Cell<Option<Duration>>,
    exceeded: Cell<bool>,
}

impl Budget {
    /// Installs the interrupt into a VM.
    pub(crate) fn install(lua: &Lua) -> Rc<Budget> {
        let budget = Rc::new(Budget {
            used: Cell::new(0),
            count_max: Cell::new(REQUEST_INTERRUPTS_MAX),
            deadline: Cell::new(None),
            allowed: Cell::new(REQUEST_TIME_MAX),
            cpu_start: Cell::new(None),
            exceeded: Cell::new(false),
        });
        let shared = Rc::clone(&budget);
        lua.set_interrupt(move |lua| {
            if shared.step() {
                Ok(VmState::Continue)
            } else {
                Err(shared.overrun(lua))
            }
        });
        budget
    }

    /// Starts a call.
    pub(crate) fn start(&self, limit: Limit) {
        self.used.set(0);
        self.exceeded.set(false);
        match limit {
            Limit::Count => {
                self.count_max.set(REQUEST_INTERRUPTS_MAX);
                self.deadline.set(None);
                self.allowed.set(REQUEST_TIME_MAX);
                self.cpu_start.set(None);
            }
            Limit::Clock(allowed) => {
                self.count_max.set(u64::MAX);
                self.deadline.set(Some(Instant::now() + allowed));
                self.allowed.set(allowed);
                self.cpu_start.set(Some(thread_cpu_time()));
            }
        }
    }

    /// Ends a call: what the host itself runs in the VM until the next one is not held against the script.
    pub(crate) fn end(&self) {
        self.exceeded.set(false);
        self.count_max.set(u64::MAX);
        self.deadline.set(None);
        self.cpu_start.set(None);
    }

    /// Whether the call went over its budget, whatever it returned.
    pub(crate) fn exceeded(&self) -> bool {
        self.exceeded.get()
    }

    /// Interrupts of the call so far.
    pub(crate) fn used(&self) -> u64 {
        self.used.get()
    }

    /// One interrupt. False when the call must end.
    fn step(&self) -> bool {
        let used = self.used.get() + 1;
        self.used.set(used);
        if self.exceeded.get() {
            return false;
        }
        let over = used > self.count_max.get() || self.clock_is_over(used);
        self.exceeded.set(over);
        !over
    }

    /// A clock is read now and then only, and the thread's own when the time is up: a thread that was merely preempted did
    /// nothing wrong. A short request hook reads none at all.
    fn clock_is_over(&self, used: u64) -> bool {
        if !used.is_multiple_of(CLOCK_EVERY) {
            return false;
        }
        let now = Instant::now();
        let Some(deadline) = self.deadline.get() else {
            self.deadline.set(Some(now + self.allowed.get()));
            return false;
        };
        if now < deadline {
            return false;
        }
        let cpu = thread_cpu_time();
        let Some(start) = self.cpu_start.get() else {
            self.cpu_start.set(Some(cpu));
            self.deadline.set(Some(now + self.allowed.get()));
            return false;
        };
        cpu.saturating_sub(start) >= self.allowed.get() / 2
    }

    fn overrun(&self, lua: &Lua) -> Error {
        let place = lua
            .inspect_stack(0, |frame| {
                let source = frame.source().short_src.map(|s| s.into_owned());
                source
                    .zip(frame.current_line())
                    .map(|(source, line)| format!("{source}:{line}: "))
            })
            .flatten()
            .unwrap_or_default();
        Error::RuntimeError(format!("{place}{}", self.reason()))
    }

    /// What was exceeded.
    pub(crate) fn reason(&self) -> String {
        if self.used.get() > self.count_max.get() {
            format!("took more than {REQUEST_INTERRUPTS_MAX} steps")
        } else {
            format!("took longer than {} ms", self.allowed.get().as_millis())
        }
    }
}

/// CPU time that this thread has used.
pub(crate) fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a live timespec, and the clock exists on every Linux.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    if rc != 0 {
        return Duration::ZERO;
    }
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
