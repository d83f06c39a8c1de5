//! A tenant's account: its ledger, its weight, how many requests it has waiting and at work. It outlives reloads.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::{ArcSwapAny, Guard};

use super::ledger::{Ask, Balance, Held, Ledger, Limits, Refused};
use super::window::Window;
use crate::clock;
use crate::config::{Labels, Tenant};
use crate::quantiles::Quantiles;

/// How far back a tenant's usage goes.
const USAGE_WINDOW_MS: u64 = 60_000;

/// What one tenant has taken. Shared by its requests, the configuration in force, and the ticks.
pub struct TenantAccount {
    pub name: Arc<str>,
    ledger: Mutex<Ledger>,
    /// Bits of an `f64`: what the configuration says.
    configured_weight: AtomicU64,
    labels: ArcSwapAny<Labels>,
    /// Bits of an `f64`: what holds, which a policy may have changed.
    weight: AtomicU64,
    queued: AtomicU32,
    inflight: AtomicU32,
    lately: Mutex<Lately>,
    clock: fn() -> u64,
}

/// What its requests cost that ended in the last minute, and how long they waited.
struct Lately {
    cost: Window,
    /// Made with the first request: most tenants of many have none.
    waits: Option<Quantiles>,
}

/// What a tenant used in the last minute.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// In thousandths of a price.
    pub cost: u64,
    pub wait_p90_ms: Option<f64>,
}

/// What one open request holds of its tenant's limits.
///
/// Dropped before a request was sent it gives everything back: such a request costs nothing. Dropped afterwards, its
/// client left while an engine was at work on the prompt: it costs the prompt.
#[must_use = "dropped at once, it limits nothing"]
pub struct Reservation {
    account: Arc<TenantAccount>,
    /// Absent once it was given back.
    held: Option<Held>,
    input_tokens: u64,
    is_sent: bool,
}

impl TenantAccount {
    /// Of everybody, where no tenant is configured: it counts and limits nothing.
    pub fn open(name: &str) -> TenantAccount {
        TenantAccount::new(name.into(), Limits::default(), 1.0, clock::now_ms)
    }

    pub fn of(tenant: &Tenant) -> TenantAccount {
        let limits = Limits::of(tenant);
        let account = TenantAccount::new(tenant.name.clone(), limits, tenant.weight, clock::now_ms);
        account.labels.store(tenant.labels.clone());
        account
    }

    fn new(name: Arc<str>, limits: Limits, weight: f64, clock: fn() -> u64) -> TenantAccount {
        TenantAccount {
            name,
            ledger: Mutex::new(Ledger::new(limits)),
            configured_weight: AtomicU64::new(weight.to_bits()),
            weight: AtomicU64::new(weight.to_bits()),
            labels: ArcSwapAny::default(),
            queued: AtomicU32::new(0),
            inflight: AtomicU32::new(0),
            lately: Mutex::new(Lately {
                cost: Window::new(USAGE_WINDOW_MS),
                waits: None,
            }),
            clock,
        }
    }

    /// Takes over what a new configuration says. Counts go on; so does a policy's weight until its next tick, unless
    /// the configured one changed.
    pub fn configure(&self, tenant: &Tenant) {
        let bits = tenant.weight.to_bits();
        if self.configured_weight.swap(bits, Ordering::Relaxed) != bits {
            self.weight.store(bits, Ordering::Relaxed);
        }
        self.labels.store(tenant.labels.clone());
        let mut ledger = self.ledger();
        ledger.set_limits((self.clock)(), Limits::of(tenant));
    }

    /// Takes what a request needs, or says which limit it would break.
    pub fn admit(self: &Arc<Self>, ask: Ask) -> Result<Reservation, Refused> {
        let mut ledger = self.ledger();
        let held = ledger.admit((self.clock)(), ask)?;
        drop(ledger);
        self.queued.fetch_add(1, Ordering::Relaxed);
        Ok(Reservation {
            account: self.clone(),
            held: Some(held),
            input_tokens: ask.input_tokens,
            is_sent: false,
        })
    }

    /// What is left of the limits at this moment.
    pub fn balance(&self) -> Balance {
        let mut ledger = self.ledger();
        ledger.balance((self.clock)())
    }

    pub fn limits(&self) -> Limits {
        self.ledger().limits()
    }

    /// Its share against other tenants.
    pub fn weight(&self) -> f64 {
        f64::from_bits(self.weight.load(Ordering::Relaxed))
    }

    pub fn labels(&self) -> Guard<Labels> {
        self.labels.load()
    }

    pub fn configured_weight(&self) -> f64 {
        f64::from_bits(self.configured_weight.load(Ordering::Relaxed))
    }

    /// For the tick that asks the policy.
    pub fn set_weight(&self, weight: f64) {
        self.weight.store(weight.to_bits(), Ordering::Relaxed);
    }

    /// Requests that were not sent to an engine yet.
    pub fn queued(&self) -> u32 {
        self.queued.load(Ordering::Relaxed)
    }

    /// Requests that an engine has, or had when they are being tried on another one.
    pub fn inflight(&self) -> u32 {
        self.inflight.load(Ordering::Relaxed)
    }

    /// A request ended that waited for so long and cost so much.
    pub fn used(&self, cost: u64, waited: Duration) {
        let now = (self.clock)();
        let mut lately = self.lately();
        lately.cost.add(now, cost);
        let waits = lately.waits.get_or_insert_default();
        waits.record(waited.as_secs_f64() * 1e3, now);
    }

    pub fn usage(&self) -> Usage {
        let now = (self.clock)();
        let mut lately = self.lately();
        let waits = lately.waits.as_ref();
        let wait_p90_ms = waits
            .and_then(|waits| waits.p50_p90(now))
            .map(|(_, p90)| p90);
        Usage {
            cost: lately.cost.sum(now),
            wait_p90_ms,
        }
    }

    fn lately(&self) -> MutexGuard<'_, Lately> {
        self.lately.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The clock is to be read with this held: read before, two requests could tell the ledger a time that goes back.
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Limits {
    pub fn of(tenant: &Tenant) -> Limits {
        Limits {
            max_concurrency: tenant.max_concurrency,
            requests_per_minute: tenant.requests_per_minute,
            tokens_per_minute: tenant.tokens_per_minute,
        }
    }
}

impl Reservation {
    /// Whose it is.
    pub fn account(&self) -> &Arc<TenantAccount> {
        &self.account
    }

    /// The request goes to an engine: from here on it counts as one, whatever comes of it.
    pub fn sent(&mut self) {
        if !std::mem::replace(&mut self.is_sent, true) {
            self.account.queued.fetch_sub(1, Ordering::Relaxed);
            self.account.inflight.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The answer ended, whole or not: it costs what it used. Input that no engine counted is what was estimated.
    pub fn settle(mut self, input_tokens: Option<u64>, output_tokens: u64) {
        let input = input_tokens.unwrap_or(self.input_tokens);
        self.end(Some(input.saturating_add(output_tokens)));
    }

    /// The client got an error instead of an answer: that costs no tokens, and no request either if none was sent.
    pub fn refuse(mut self) {
        self.end(Some(0));
    }

    /// `used` counts only for a request that was sent.
    fn end(&mut self, used: Option<u64>) {
        let Some(held) = self.held.take() else {
            return;
        };
        let count = match self.is_sent {
            true => &self.account.inflight,
            false => &self.account.queued,
        };
        count.fetch_sub(1, Ordering::Relaxed);
        let mut ledger = self.account.ledger();
        ledger.end((self.account.clock)(), held, used.filter(|_| self.is_sent));
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.end(Some(self.input_tokens));
    }
}

impl fmt::Debug for TenantAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantAccount")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_what_ended_in_the_last_minute() {
        let account = account();
        assert_eq!(account.usage(), Usage::default());
        account.used(1_500, Duration::from_millis(20));
        account.used(500, Duration::ZERO);
        let expected = Usage {
            cost: 2_000,
            wait_p90_ms: Some(20.0),
        };
        assert_eq!(account.usage(), expected);
    }

    /// Ten requests and 1,000 tokens a minute, in a minute that does not end.
    fn account() -> Arc<TenantAccount> {
        let limits = Limits {
            max_concurrency: Some(3),
            requests_per_minute: Some(10),
            tokens_per_minute: Some(1_000),
        };
        Arc::new(TenantAccount::new("t".into(), limits, 1.0, || 0))
    }

    fn admit(account: &Arc<TenantAccount>) -> Reservation {
        let ask = Ask {
            input_tokens: 100,
            output_tokens: 200,
            is_text: true,
        };
        account.admit(ask).unwrap()
    }

    /// Requests and tokens left, requests waiting and at work.
    fn counts(account: &TenantAccount) -> (u64, u64, u32, u32) {
        let balance = account.balance();
        (
            balance.requests.unwrap().remaining,
            balance.tokens.unwrap().remaining,
            account.queued(),
            account.inflight(),
        )
    }

    #[test]
    fn a_request_costs_what_it_used_and_one_that_was_never_sent_costs_nothing() {
        type End = fn(Reservation);
        let sent = |mut reservation: Reservation| {
            reservation.sent();
            reservation.sent();
            reservation
        };
        let cases: [(&str, bool, End, (u64, u64)); 8] = [
            ("left while it waited", false, drop, (10, 1_000)),
            ("refused later", false, Reservation::refuse, (10, 1_000)),
            (
                "an answer without an engine",
                false,
                |held| held.settle(Some(5), 5),
                (10, 1_000),
            ),
            ("left while the engine was silent", true, drop, (9, 900)),
            (
                "no engine gave an answer",
                true,
                Reservation::refuse,
                (9, 1_000),
            ),
            (
                "answered, counted by the engine",
                true,
                |held| held.settle(Some(90), 40),
                (9, 870),
            ),
            (
                "answered, not counted",
                true,
                |held| held.settle(None, 40),
                (9, 860),
            ),
            (
                "more than was reserved",
                true,
                |held| held.settle(Some(100), 600),
                (9, 300),
            ),
        ];
        for (what, is_sent, end, (requests, tokens)) in cases {
            let account = account();
            let mut reservation = admit(&account);
            assert_eq!(counts(&account), (9, 700, 1, 0), "{what}");
            if is_sent {
                reservation = sent(reservation);
                assert_eq!(counts(&account), (9, 700, 0, 1), "{what}");
            }
            end(reservation);
            assert_eq!(counts(&account), (requests, tokens, 0, 0), "{what}");
        }
    }

    #[test]
    fn a_refusal_is_no_request_that_waits() {
        let account = account();
        let _held = [admit(&account), admit(&account), admit(&account)];
        assert!(account.admit(Ask::default()).is_err());
        assert_eq!(counts(&account), (7, 100, 3, 0));
    }

    #[test]
    fn a_policys_weight_outlives_a_reload_that_leaves_the_configured_one_as_it_was() {
        let account = account();
        let mut tenant = Tenant {
            name: "t".into(),
            weight: 1.0,
            labels: Labels::default(),
            bands: Vec::new(),
            keys: Vec::new(),
            models: Vec::new(),
            max_concurrency: Some(1),
            requests_per_minute: None,
            tokens_per_minute: None,
        };
        account.set_weight(4.0);
        account.configure(&tenant);
        assert_eq!(
            (account.weight(), account.limits()),
            (4.0, Limits::of(&tenant))
        );
        tenant.weight = 2.0;
        tenant.labels = Labels::new(vec![("tier".to_owned(), "gold".to_owned())]);
        account.configure(&tenant);
        assert_eq!(*account.labels(), tenant.labels);
        assert_eq!((account.weight(), account.configured_weight()), (2.0, 2.0));
    }

    #[test]
    fn the_cap_is_exact_whoever_comes_at_the_same_time() {
        let limits = Limits {
            max_concurrency: Some(3),
            ..Limits::default()
        };
        let account = Arc::new(TenantAccount::new("t".into(), limits, 1.0, || 0));
        let (open, passed) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..5_000 {
                        let Ok(mut held) = account.admit(Ask::default()) else {
                            continue;
                        };
                        assert!(open.fetch_add(1, Ordering::Relaxed) < 3);
                        passed.fetch_add(1, Ordering::Relaxed);
                        if round % 2 == 0 {
                            held.sent();
                        }
                        open.fetch_sub(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert!(passed.into_inner() >= 5_000);
        assert_eq!((account.queued(), account.inflight()), (0, 0));
        assert_eq!(account.ledger().open(), 0);
    }
}
