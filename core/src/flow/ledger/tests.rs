//! Tables of single rules, then random interleavings against a ledger that is kept millisecond by millisecond.

use super::*;

fn limits(concurrency: Option<u32>, requests: Option<u64>, tokens: Option<u64>) -> Limits {
    Limits {
        max_concurrency: concurrency,
        requests_per_minute: requests,
        tokens_per_minute: tokens,
    }
}

fn ask(input_tokens: u64, output_tokens: u64) -> Ask {
    Ask {
        input_tokens,
        output_tokens,
        is_text: true,
    }
}

fn remaining(ledger: &mut Ledger, now_ms: u64) -> (Option<u64>, Option<u64>) {
    let balance = ledger.balance(now_ms);
    let remaining = |left: Option<Left>| left.map(|left| left.remaining);
    (remaining(balance.requests), remaining(balance.tokens))
}

#[test]
fn each_limit_refuses_with_its_name_its_value_and_the_time_that_helps() {
    let cases = [
        // Limits, requests of 100 + 50 tokens that pass, and why the next one does not.
        (
            limits(Some(2), None, None),
            2,
            (Limit::MaxConcurrency, 2, 1, 0, Some(1_000)),
        ),
        (
            limits(None, Some(3), None),
            3,
            (Limit::RequestsPerMinute, 3, 1, 0, Some(20_000)),
        ),
        // 100 are left, 50 are missing, at 400 a minute.
        (
            limits(None, None, Some(400)),
            2,
            (Limit::TokensPerMinute, 400, 150, 100, Some(7_500)),
        ),
        // The one that lasts longest is named.
        (
            limits(Some(2), Some(2), Some(400)),
            2,
            (Limit::RequestsPerMinute, 2, 1, 0, Some(30_000)),
        ),
        (
            limits(Some(1), Some(600), Some(150)),
            1,
            (Limit::TokensPerMinute, 150, 150, 0, Some(60_000)),
        ),
    ];
    for (limits, pass, (limit, allowed, wanted, left, wait_ms)) in cases {
        let mut ledger = Ledger::new(limits);
        for _ in 0..pass {
            let _ = ledger.admit(0, ask(100, 50)).unwrap();
        }
        let expected = Refused {
            limit,
            allowed,
            wanted,
            left,
            wait_ms,
        };
        assert_eq!(ledger.admit(0, ask(100, 50)), Err(expected), "{limits:?}");
        if let (Some(wait_ms), true) = (wait_ms, limit != Limit::MaxConcurrency) {
            let mut ledger = ledger;
            ledger.open = 0;
            let early = ledger.admit(wait_ms - 1, ask(100, 50)).unwrap_err();
            assert_eq!(early.wait_ms, Some(1), "{limits:?}");
            assert!(ledger.admit(wait_ms, ask(100, 50)).is_ok(), "{limits:?}");
        }
    }
}

#[test]
fn without_limits_everything_passes_and_only_what_is_open_is_counted() {
    let mut ledger = Ledger::new(Limits::default());
    let held: Vec<Held> = (0..1_000)
        .map(|_| ledger.admit(0, ask(u64::MAX, u64::MAX)).unwrap())
        .collect();
    assert_eq!(
        (ledger.open(), ledger.balance(0)),
        (1_000, Balance::default())
    );
    for held in held {
        ledger.end(0, held, Some(u64::MAX));
    }
    assert_eq!((ledger.open(), ledger.tokens_spent), (0, 0));
}

#[test]
fn a_prompt_above_a_minutes_tokens_is_told_that_it_never_passes() {
    let mut ledger = Ledger::new(limits(None, None, Some(1_000)));
    let refused = ledger.admit(0, ask(1_001, 1)).unwrap_err();
    assert_eq!(refused.wait_ms, None);
    assert_eq!((refused.wanted, refused.allowed), (1_001, 1_000));
    // An answer that may be long is no reason, nor are bytes that are no text.
    let held = ledger.admit(0, ask(1_000, u64::MAX)).unwrap();
    assert_eq!(remaining(&mut ledger, 0), (None, Some(0)));
    ledger.end(0, held, Some(0));
    let image = Ask {
        is_text: false,
        ..ask(1_000_000, 0)
    };
    assert!(ledger.admit(0, image).is_ok());
}

#[test]
fn what_was_reserved_is_settled_by_what_was_used() {
    let cases = [
        // Used of 300 reserved out of 1,000; remaining requests and tokens.
        (None, 10, 1_000),
        (Some(0), 9, 1_000),
        (Some(120), 9, 880),
        (Some(300), 9, 700),
        (Some(900), 9, 100),
        (Some(2_500), 9, 0),
    ];
    for (used, requests, tokens) in cases {
        let mut ledger = Ledger::new(limits(None, Some(10), Some(1_000)));
        let held = ledger.admit(0, ask(100, 200)).unwrap();
        assert_eq!(remaining(&mut ledger, 0), (Some(9), Some(700)));
        ledger.end(0, held, used);
        let expected = (Some(requests), Some(tokens));
        assert_eq!(remaining(&mut ledger, 0), expected, "{used:?}");
        assert_eq!(ledger.open(), 0);
    }
}

#[test]
fn a_debt_is_worked_off_before_anything_passes_and_is_no_more_than_an_hour_s() {
    let mut ledger = Ledger::new(limits(None, None, Some(600)));
    let held = ledger.admit(0, ask(0, 1)).unwrap();
    ledger.end(0, held, Some(1_200));
    let refused = ledger.admit(0, ask(0, 1)).unwrap_err();
    assert_eq!((refused.left, refused.wait_ms), (0, Some(60_100)));
    assert_eq!(ledger.balance(0).tokens.unwrap().reset_ms, 120_000);
    let held = ledger.admit(60_100, ask(0, 1)).unwrap();
    ledger.end(60_100, held, Some(u64::MAX));
    let reset_ms = ledger.balance(60_100).tokens.unwrap().reset_ms;
    assert_eq!(reset_ms, 61 * 60_000);
}

#[test]
fn limits_change_and_what_was_spent_stays_spent() {
    let mut ledger = Ledger::new(limits(Some(4), Some(10), Some(1_000)));
    let first = ledger.admit(0, ask(400, 0)).unwrap();
    let second = ledger.admit(0, ask(200, 0)).unwrap();
    ledger.set_limits(0, limits(Some(2), Some(20), Some(2_000)));
    assert_eq!(remaining(&mut ledger, 0), (Some(18), Some(1_400)));
    let refused = ledger.admit(0, ask(1, 0)).unwrap_err();
    assert_eq!((refused.limit, refused.allowed), (Limit::MaxConcurrency, 2));
    ledger.end(0, first, Some(400));
    // Below what was spent already: it is waited for, at the new rate.
    ledger.set_limits(0, limits(Some(2), Some(20), Some(500)));
    let refused = ledger.admit(0, ask(0, 100)).unwrap_err();
    assert_eq!(refused.wait_ms, Some(24_000));
    // Without a limit nothing is kept; one that comes back begins afresh.
    ledger.set_limits(0, limits(None, None, None));
    ledger.set_limits(0, limits(None, Some(3), Some(500)));
    assert_eq!(remaining(&mut ledger, 0), (Some(3), Some(500)));
    ledger.end(0, second, Some(200));
    assert_eq!((ledger.open(), ledger.requests_spent), (0, 0));
}

#[test]
fn a_clock_that_jumps_costs_or_forgives_the_jump_and_no_more() {
    let mut ledger = Ledger::new(limits(None, Some(60), None));
    for _ in 0..60 {
        let held = ledger.admit(100_000, ask(0, 0)).unwrap();
        ledger.end(100_000, held, Some(0));
    }
    // Back by 90 s: nothing is forgiven, and from there on a request a second is.
    assert_eq!(
        ledger.admit(10_000, ask(0, 0)).unwrap_err().wait_ms,
        Some(1_000)
    );
    assert_eq!(remaining(&mut ledger, 11_000), (Some(1), None));
    // Far forward: full, and not more than full.
    assert_eq!(remaining(&mut ledger, u64::MAX), (Some(60), None));
    assert_eq!(remaining(&mut ledger, 0), (Some(60), None));
}

/// The same rules, kept without arithmetic that could be wrong: a step for each millisecond.
#[derive(Default)]
struct Plain {
    limits: Limits,
    now_ms: u64,
    open: u32,
    requests: u128,
    tokens: u128,
}

impl Plain {
    fn pass_to(&mut self, now_ms: u64) {
        for _ in self.now_ms..now_ms {
            self.requests = self
                .requests
                .saturating_sub(self.limits.requests_per_minute.unwrap_or(0).into());
            self.tokens = self
                .tokens
                .saturating_sub(self.limits.tokens_per_minute.unwrap_or(0).into());
            if self.requests == 0 && self.tokens == 0 {
                break;
            }
        }
        self.now_ms = now_ms;
        let no = |limit: Option<u64>| limit.is_none();
        if no(self.limits.requests_per_minute) {
            self.requests = 0;
        }
        if no(self.limits.tokens_per_minute) {
            self.tokens = 0;
        }
    }
}

#[test]
fn bursts_are_not_saved_up_in_requests_that_only_wait() {
    let limits = Limits {
        tokens_per_minute: Some(1_000),
        ..Limits::default()
    };
    let mut ledger = Ledger::new(limits);
    let waits = ledger.admit(0, ask(1_000, 0)).unwrap();
    let served = ledger.admit(60_000, ask(1_000, 0)).unwrap();
    ledger.end(60_000, served, Some(1_000));
    // It leaves without having been sent: the minute that has passed has given its tokens back already.
    ledger.end(60_000, waits, None);
    assert!(ledger.admit(60_000, ask(1_000, 0)).is_err());
    // A young one gives back what was not forgiven yet.
    let young = ledger.admit(120_000, ask(1_000, 0)).unwrap();
    ledger.end(135_000, young, None);
    assert_eq!(ledger.balance(135_000).tokens.unwrap().remaining, 1_000);
}

/// Numbers of one case, after Marsaglia's xorshift.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

fn random_limits(numbers: &mut Numbers) -> Limits {
    let some = |numbers: &mut Numbers| numbers.below(5) > 0;
    Limits {
        max_concurrency: some(numbers).then(|| 1 + numbers.below(6) as u32),
        requests_per_minute: some(numbers).then(|| 1 + numbers.below(40)),
        tokens_per_minute: some(numbers).then(|| 1 + numbers.below(3_000)),
    }
}

fn random_case(seed: u64) {
    let mut numbers = Numbers(seed * 0x9E37_79B9 + 1);
    let first = random_limits(&mut numbers);
    let mut ledger = Ledger::new(first);
    let mut plain = Plain {
        limits: first,
        ..Plain::default()
    };
    let mut held: Vec<(Held, u64)> = Vec::new();
    let mut now_ms = 0;
    for step in 0..100 {
        now_ms = match numbers.below(12) {
            0 => now_ms + numbers.below(5_000),
            1 => now_ms.saturating_sub(numbers.below(100_000)),
            _ => now_ms + numbers.below(200),
        };
        plain.pass_to(now_ms);
        match numbers.below(20) {
            0 => {
                let limits = random_limits(&mut numbers);
                ledger.set_limits(now_ms, limits);
                plain.limits = limits;
                plain.pass_to(now_ms);
            }
            1..=9 if !held.is_empty() => {
                let at = numbers.below(held.len() as u64) as usize;
                let (ended, tokens) = held.swap_remove(at);
                let used = [None, Some(0), Some(numbers.below(4_000))][numbers.below(3) as usize];
                ledger.end(now_ms, ended, used);
                plain.open -= 1;
                let unforgiven =
                    60_000 - u128::from((plain.now_ms.saturating_sub(ended.since_ms)).min(60_000));
                if used.is_none() && ended.is_counted {
                    plain.requests = plain.requests.saturating_sub(unforgiven);
                }
                if plain.limits.tokens_per_minute.is_some() {
                    let used = u128::from(used.unwrap_or(0));
                    let tokens = u128::from(tokens);
                    plain.tokens = match used.checked_sub(tokens) {
                        Some(more) => plain.tokens + more * 60_000,
                        None => plain.tokens.saturating_sub((tokens - used) * unforgiven),
                    };
                }
            }
            _ => {
                let wanted = ask(numbers.below(500), numbers.below(1_500));
                let before = (ledger.balance(now_ms), ledger.open());
                match ledger.admit(now_ms, wanted) {
                    Err(refused) => {
                        let after = (ledger.balance(now_ms), ledger.open());
                        assert_eq!(before, after, "seed {seed}: a refusal moved a counter");
                        assert!(refused.wait_ms.is_none_or(|ms| ms > 0), "seed {seed}");
                    }
                    Ok(taken) => {
                        plain.open += 1;
                        plain.requests += 60_000 * u128::from(taken.is_counted);
                        plain.tokens += 60_000 * u128::from(taken.tokens);
                        held.push((taken, taken.tokens));
                        let limits = plain.limits;
                        let full = |limit: u64| u128::from(limit) * 60_000;
                        assert!(
                            limits
                                .max_concurrency
                                .is_none_or(|limit| plain.open <= limit)
                        );
                        assert!(
                            limits
                                .requests_per_minute
                                .is_none_or(|limit| plain.requests <= full(limit))
                        );
                        assert!(
                            limits
                                .tokens_per_minute
                                .is_none_or(|limit| plain.tokens <= full(limit))
                        );
                    }
                }
            }
        }
        // The cap on debts is the one rule that this plain copy does not have.
        let debt_max = 61 * 60_000 * u128::from(plain.limits.tokens_per_minute.unwrap_or(0));
        if plain.tokens > debt_max {
            return;
        }
        let counts = (ledger.open(), ledger.requests_spent, ledger.tokens_spent);
        let expected = (plain.open, plain.requests, plain.tokens);
        assert_eq!(counts, expected, "seed {seed}, step {step}");
    }
    for (ended, _) in held {
        ledger.end(now_ms, ended, Some(7));
    }
    let _ = ledger.balance(u64::MAX);
    let counts = (ledger.open(), ledger.requests_spent, ledger.tokens_spent);
    assert_eq!(counts, (0, 0, 0), "seed {seed}");
}

#[test]
fn random_interleavings_stay_within_the_limits_refill_exactly_and_leave_nothing_behind() {
    (0..2_000).for_each(random_case);
}
