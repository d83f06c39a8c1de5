//! A replica's circuit breaker: it takes a replica that fails out of the choice, and lets one request at a time find out when it is back.
//!
//! ```text
//! closed ── connect failure, silence, 3 resets or 5xx in a row ──▶ open (1 s, doubled up to 30 s)
//! open ── time is up: one request is the trial ──▶ half open
//! open ── a health probe passed, unless it opened for silence ──▶ closed
//! half open ── trial succeeded ──▶ closed      ── trial failed ──▶ open, twice as long      ── abandoned ──▶ open, next trial at once
//! ```
//!
//! The caller classifies: a 4xx or a 429 is an answer, so a success here. Times are milliseconds of a clock that doesn't go back.

/// Resets and 5xx in a row that open it.
pub const BREAKER_FAULTS_MAX: u32 = 3;
/// How long it is open at first, in milliseconds.
pub const BREAKER_OPEN_MIN_MS: u64 = 1_000;
/// How long it is open at most, jitter not included, in milliseconds.
pub const BREAKER_OPEN_MAX_MS: u64 = 30_000;
/// Jitter lengthens each opening by less than this share of it, so that gateways don't try all at once.
const JITTER_SHARE: f64 = 0.1;

/// A failure of the replica, never of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// No connection could be made.
    Connect,
    /// The connection ended before the answer did.
    Reset,
    /// Nothing came back within `first_byte_timeout`.
    FirstByteTimeout,
    /// Nothing more came within `idle_timeout`.
    IdleTimeout,
    /// The engine answered 5xx.
    Status5xx,
}

impl Fault {
    /// The name that metrics and logs see.
    pub fn as_str(self) -> &'static str {
        match self {
            Fault::Connect => "connect",
            Fault::Reset => "reset",
            Fault::FirstByteTimeout => "first_byte_timeout",
            Fault::IdleTimeout => "idle_timeout",
            Fault::Status5xx => "status_5xx",
        }
    }

    /// Silence: what an engine shows that hangs while its health page still answers.
    pub fn is_silence(self) -> bool {
        matches!(self, Fault::FirstByteTimeout | Fault::IdleTimeout)
    }

    fn opens_at_once(self) -> bool {
        self == Fault::Connect || self.is_silence()
    }
}

/// Whether a request may go to the replica. It keeps this and gives it back with how it ended: [`Breaker::success`],
/// [`Breaker::fault`] or [`Breaker::abandon_trial`]. What comes back later than the breaker moved on is no news.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It may, as any other.
    Closed {
        /// Which of the breaker's closed times this is.
        epoch: u64,
    },
    /// It may, as the only one: what becomes of it decides.
    Trial {
        /// Which trial this is.
        epoch: u64,
    },
    /// It may not.
    Refused {
        /// Until a trial may be possible, in milliseconds.
        retry_in_ms: u64,
    },
}

/// The breaker's position, for display.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakerState {
    /// Requests pass.
    Closed,
    /// No request passes, or the next one is the trial.
    Open,
    /// A trial is under way.
    HalfOpen,
}

impl BreakerState {
    /// The name that metrics and ctl see.
    pub fn as_str(self) -> &'static str {
        match self {
            BreakerState::Closed => "closed",
            BreakerState::Open => "open",
            BreakerState::HalfOpen => "half_open",
        }
    }
}

/// One replica's breaker.
#[derive(Debug, Clone)]
pub struct Breaker {
    position: Position,
    /// Changes with each position and each trial; admissions of another epoch are late.
    epoch: u64,
    /// How long the next opening lasts.
    backoff_ms: u64,
    opened_at_ms: u64,
    /// It hangs, so a health probe proves nothing.
    silent: bool,
    /// A probe has closed it once since the last success. If requests fail nevertheless, only a trial closes it again.
    probe_spent: bool,
    last_fault: Option<Fault>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    Closed { faults: u32 },
    Open { until_ms: u64 },
    HalfOpen,
}

impl Default for Breaker {
    fn default() -> Self {
        Self {
            position: Position::Closed { faults: 0 },
            epoch: 0,
            backoff_ms: BREAKER_OPEN_MIN_MS,
            opened_at_ms: 0,
            silent: false,
            probe_spent: false,
            last_fault: None,
        }
    }
}

impl Breaker {
    /// Whether [`Breaker::admit`] would let a request pass; takes nothing. For listing the candidates.
    pub fn admits(&self, now_ms: u64) -> bool {
        match self.position {
            Position::Closed { .. } => true,
            Position::Open { until_ms } => now_ms >= until_ms,
            Position::HalfOpen => false,
        }
    }

    /// When it will let a request pass, as far as is known.
    pub fn retry_in_ms(&self, now_ms: u64) -> u64 {
        match self.position {
            Position::Closed { .. } => 0,
            Position::Open { until_ms } => until_ms.saturating_sub(now_ms),
            Position::HalfOpen => BREAKER_OPEN_MIN_MS,
        }
    }

    /// Lets a request pass, or not. A [`Admission::Trial`] must be given back, else no other request ever passes.
    pub fn admit(&mut self, now_ms: u64) -> Admission {
        match self.position {
            Position::Closed { .. } => Admission::Closed { epoch: self.epoch },
            Position::Open { until_ms } if now_ms < until_ms => Admission::Refused {
                retry_in_ms: until_ms - now_ms,
            },
            Position::Open { .. } => {
                self.enter(Position::HalfOpen);
                Admission::Trial { epoch: self.epoch }
            }
            Position::HalfOpen => Admission::Refused {
                retry_in_ms: BREAKER_OPEN_MIN_MS,
            },
        }
    }

    /// The replica answered: for a trial at its first byte, for other requests at the end, so that streams which all
    /// break off count as faults in a row. Returns what the request goes on with.
    pub fn success(&mut self, admission: Admission) -> Admission {
        match (self.position, admission) {
            (Position::Closed { .. }, Admission::Closed { epoch }) if epoch == self.epoch => {
                self.position = Position::Closed { faults: 0 };
            }
            (Position::HalfOpen, Admission::Trial { epoch }) if epoch == self.epoch => {
                self.enter(Position::Closed { faults: 0 });
            }
            _ => return admission,
        }
        self.backoff_ms = BREAKER_OPEN_MIN_MS;
        self.silent = false;
        self.probe_spent = false;
        Admission::Closed { epoch: self.epoch }
    }

    /// The replica failed. `random` is any number; it makes the jitter.
    pub fn fault(&mut self, admission: Admission, fault: Fault, now_ms: u64, random: u64) {
        match (self.position, admission) {
            (Position::Closed { faults }, Admission::Closed { epoch }) if epoch == self.epoch => {
                self.last_fault = Some(fault);
                let faults = faults + 1;
                if fault.opens_at_once() || faults >= BREAKER_FAULTS_MAX {
                    self.open(fault, now_ms, random);
                } else {
                    self.position = Position::Closed { faults };
                }
            }
            (Position::HalfOpen, Admission::Trial { epoch }) if epoch == self.epoch => {
                self.last_fault = Some(fault);
                self.open(fault, now_ms, random);
            }
            // A request from before it opened ran into silence: that outranks what it opened for.
            (Position::Open { .. } | Position::HalfOpen, Admission::Closed { .. })
                if fault.is_silence() =>
            {
                self.last_fault = Some(fault);
                self.silent = true;
            }
            _ => {}
        }
    }

    /// The trial ended without an answer or a fault (its client left): the next request is the trial. Does nothing for others.
    pub fn abandon_trial(&mut self, admission: Admission) {
        let is_the_trial = admission == Admission::Trial { epoch: self.epoch };
        if is_the_trial && self.position == Position::HalfOpen {
            self.enter(Position::Open {
                until_ms: self.opened_at_ms,
            });
        }
    }

    /// A health probe that began at `started_ms` passed. Closes it early, once until requests succeed, unless it hangs.
    pub fn probe_ok(&mut self, started_ms: u64) {
        let is_open = matches!(self.position, Position::Open { .. });
        if is_open && !self.silent && !self.probe_spent && started_ms >= self.opened_at_ms {
            self.probe_spent = true;
            // On probation: one more fault opens it again, for longer.
            self.enter(Position::Closed {
                faults: BREAKER_FAULTS_MAX - 1,
            });
        }
    }

    /// Its position.
    pub fn state(&self) -> BreakerState {
        match self.position {
            Position::Closed { .. } => BreakerState::Closed,
            Position::Open { .. } => BreakerState::Open,
            Position::HalfOpen => BreakerState::HalfOpen,
        }
    }

    /// The latest fault that counted.
    pub fn last_fault(&self) -> Option<Fault> {
        self.last_fault
    }

    fn open(&mut self, fault: Fault, now_ms: u64, random: u64) {
        let share = (random >> 11) as f64 / (1u64 << 53) as f64;
        let jitter_ms = (self.backoff_ms as f64 * JITTER_SHARE * share) as u64;
        self.enter(Position::Open {
            until_ms: now_ms + self.backoff_ms + jitter_ms,
        });
        self.opened_at_ms = now_ms;
        self.silent = fault.is_silence();
        self.backoff_ms = (self.backoff_ms * 2).min(BREAKER_OPEN_MAX_MS);
    }

    fn enter(&mut self, position: Position) {
        self.position = position;
        self.epoch += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::score::SplitMix;
    use super::{Admission, Breaker, BreakerState, Fault};

    const ALL: [Fault; 5] = [
        Fault::Connect,
        Fault::Reset,
        Fault::FirstByteTimeout,
        Fault::IdleTimeout,
        Fault::Status5xx,
    ];

    /// Admits and fails a request.
    fn fail(breaker: &mut Breaker, fault: Fault, now_ms: u64) {
        let admission = breaker.admit(now_ms);
        assert!(
            !matches!(admission, Admission::Refused { .. }),
            "refused at {now_ms}"
        );
        breaker.fault(admission, fault, now_ms, 0);
    }

    fn opened_for(fault: Fault) -> Breaker {
        let mut breaker = Breaker::default();
        while breaker.state() == BreakerState::Closed {
            fail(&mut breaker, fault, 0);
        }
        breaker
    }

    #[test]
    fn a_refused_connection_and_silence_open_at_once_and_resets_and_5xx_after_three_in_a_row() {
        let cases = [
            (Fault::Connect, 1),
            (Fault::FirstByteTimeout, 1),
            (Fault::IdleTimeout, 1),
            (Fault::Reset, 3),
            (Fault::Status5xx, 3),
        ];
        for (fault, needed) in cases {
            let mut breaker = Breaker::default();
            for count in 1..=needed {
                assert_eq!(breaker.state(), BreakerState::Closed, "{fault:?} {count}");
                fail(&mut breaker, fault, 0);
            }
            assert_eq!(breaker.state(), BreakerState::Open, "{fault:?}");
            assert_eq!(breaker.last_fault(), Some(fault));
            assert_eq!(breaker.admit(400), Admission::Refused { retry_in_ms: 600 });
            assert!(!breaker.admits(999) && breaker.admits(1_000));
        }
    }

    #[test]
    fn a_success_in_between_starts_the_count_anew() {
        let mut breaker = Breaker::default();
        for _ in 0..10 {
            fail(&mut breaker, Fault::Reset, 0);
            fail(&mut breaker, Fault::Status5xx, 0);
            let admission = breaker.admit(0);
            breaker.success(admission);
        }
        assert_eq!(breaker.state(), BreakerState::Closed);
    }

    #[test]
    fn each_failed_trial_doubles_the_time_up_to_thirty_seconds() {
        let mut breaker = opened_for(Fault::Connect);
        let mut now_ms = 0;
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            assert_eq!(
                breaker.admit(now_ms),
                Admission::Refused {
                    retry_in_ms: seconds * 1_000
                }
            );
            now_ms += seconds * 1_000;
            fail(&mut breaker, Fault::Connect, now_ms);
        }
        let trial = breaker.admit(now_ms + 30_000);
        assert_eq!(
            breaker.success(trial),
            breaker.admit(now_ms + 30_000),
            "the trial goes on as any other request"
        );
        fail(&mut breaker, Fault::Connect, now_ms + 30_000);
        assert!(
            breaker.admits(now_ms + 31_000),
            "a success resets the time to one second"
        );
    }

    #[test]
    fn jitter_only_lengthens_and_by_less_than_a_tenth() {
        for random in [0, 1, u64::MAX / 2, u64::MAX] {
            let mut breaker = Breaker::default();
            let admission = breaker.admit(0);
            breaker.fault(admission, Fault::Connect, 0, random);
            assert!(!breaker.admits(999) && breaker.admits(1_100), "{random}");
        }
    }

    #[test]
    fn one_trial_passes_and_when_it_is_abandoned_the_next_one() {
        let mut breaker = opened_for(Fault::IdleTimeout);
        let first = breaker.admit(1_000);
        assert!(matches!(first, Admission::Trial { .. }));
        assert_eq!(breaker.state(), BreakerState::HalfOpen);
        assert!(!breaker.admits(1_000_000));
        assert!(matches!(
            breaker.admit(1_000_000),
            Admission::Refused { .. }
        ));

        breaker.abandon_trial(first);
        let second = breaker.admit(1_001);
        assert!(matches!(second, Admission::Trial { .. }));
        breaker.abandon_trial(first);
        breaker.fault(first, Fault::Connect, 1_001, 0);
        breaker.success(first);
        assert_eq!(
            breaker.state(),
            BreakerState::HalfOpen,
            "only the second one counts now"
        );
        breaker.success(second);
        assert_eq!(breaker.state(), BreakerState::Closed);
    }

    #[test]
    fn a_passing_health_probe_closes_it_early_unless_it_hangs() {
        for fault in ALL {
            let mut breaker = opened_for(fault);
            breaker.probe_ok(10);
            assert_eq!(
                breaker.state() == BreakerState::Closed,
                !fault.is_silence(),
                "{fault:?}"
            );
        }
    }

    #[test]
    fn a_probe_from_before_it_opened_proves_nothing() {
        let mut breaker = Breaker::default();
        fail(&mut breaker, Fault::Connect, 500);
        breaker.probe_ok(499);
        assert_eq!(breaker.state(), BreakerState::Open);
        breaker.probe_ok(500);
        assert_eq!(breaker.state(), BreakerState::Closed);
    }

    #[test]
    fn when_requests_fail_although_probes_pass_only_a_trial_closes_it() {
        let mut breaker = opened_for(Fault::Status5xx);
        breaker.probe_ok(100);
        fail(&mut breaker, Fault::Status5xx, 100);
        assert_eq!(
            breaker.state(),
            BreakerState::Open,
            "one fault is enough after a probe closed it"
        );
        breaker.probe_ok(200);
        assert_eq!(
            breaker.admit(200),
            Admission::Refused { retry_in_ms: 1_900 }
        );
        let trial = breaker.admit(2_100);
        breaker.success(trial);
        assert_eq!(breaker.state(), BreakerState::Closed);
    }

    #[test]
    fn requests_from_before_it_moved_on_change_nothing_but_tell_of_silence() {
        let mut breaker = Breaker::default();
        let early = [breaker.admit(0), breaker.admit(0), breaker.admit(0)];
        fail(&mut breaker, Fault::Connect, 0);
        breaker.success(early[0]);
        breaker.fault(early[1], Fault::Reset, 10, 0);
        assert_eq!(
            (breaker.state(), breaker.last_fault()),
            (BreakerState::Open, Some(Fault::Connect))
        );
        assert!(breaker.admits(1_000), "the time isn't doubled");
        breaker.fault(early[1], Fault::FirstByteTimeout, 20, 0);
        breaker.probe_ok(30);
        assert_eq!(
            breaker.state(),
            BreakerState::Open,
            "silence outranks the probe"
        );
        let trial = breaker.admit(1_000);
        breaker.success(trial);
        breaker.fault(early[2], Fault::FirstByteTimeout, 1_001, 0);
        assert_eq!(
            breaker.state(),
            BreakerState::Closed,
            "the trial is the newer evidence"
        );
    }

    #[test]
    fn never_two_trials_and_never_stuck_whatever_happens() {
        for seed in 0..200 {
            let mut random = SplitMix(seed);
            let mut breaker = Breaker::default();
            let mut out: Vec<Admission> = Vec::new();
            let mut now_ms = 0;
            for _ in 0..500 {
                now_ms += random.below(2_000) as u64;
                match random.below(6) {
                    0 => breaker.probe_ok(now_ms),
                    1 | 2 => {
                        let admits = breaker.admits(now_ms);
                        let admission = breaker.admit(now_ms);
                        assert_eq!(admits, !matches!(admission, Admission::Refused { .. }));
                        out.push(admission);
                    }
                    ended if !out.is_empty() => {
                        let admission = out.swap_remove(random.below(out.len()));
                        match ended {
                            3 => drop(breaker.success(admission)),
                            4 => breaker.fault(
                                admission,
                                ALL[random.below(5)],
                                now_ms,
                                random.next(),
                            ),
                            _ => breaker.abandon_trial(admission),
                        }
                    }
                    _ => {}
                }
                let trials = out
                    .iter()
                    .filter(|admission| matches!(admission, Admission::Trial { .. }))
                    .count();
                assert_eq!(
                    trials,
                    usize::from(breaker.state() == BreakerState::HalfOpen),
                    "seed {seed}"
                );
            }
            out.into_iter()
                .for_each(|admission| breaker.abandon_trial(admission));
            assert!(breaker.admits(now_ms + 33_001), "seed {seed}");
        }
    }
}
