//! The gateway's retry budget: retries are a share of the requests, so that they can't multiply an outage.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// What each request adds, in thousandths of a retry.
pub const RETRY_DEPOSIT_THOUSANDTHS: i64 = 200;
/// What one retry takes, in thousandths.
const RETRY_PRICE_THOUSANDTHS: i64 = 1_000;
/// The most that is saved up, in retries: a day without trouble doesn't pay for a storm.
pub const RETRY_BALANCE_MAX_RETRIES: i64 = 500;
/// The reserve: retries that a gateway may do at once, however few requests it has had.
pub const RETRY_RESERVE_RETRIES: u64 = 10;
/// How long one retry of the reserve takes to come back, in milliseconds.
pub const RETRY_RESERVE_REFILL_MS: u64 = 1_000;

/// One budget for all models and tenants, shared by all threads. Never blocks.
#[derive(Debug, Default)]
pub struct RetryBudget {
    /// Saved by requests, in thousandths of a retry.
    balance: AtomicI64,
    /// When the reserve will be whole again, in the caller's milliseconds.
    reserve_whole_at_ms: AtomicU64,
}

impl RetryBudget {
    /// A budget with a whole reserve and nothing saved.
    pub fn new() -> RetryBudget {
        RetryBudget::default()
    }

    /// Counts a request (not its retries). While the balance is at its limit, that only reads.
    pub fn deposit(&self) {
        let limit = RETRY_BALANCE_MAX_RETRIES * RETRY_PRICE_THOUSANDTHS;
        let grown = |balance: i64| {
            (balance < limit).then(|| (balance + RETRY_DEPOSIT_THOUSANDTHS).min(limit))
        };
        // An error says that the balance is at its limit.
        let _ = self
            .balance
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown);
    }

    /// Pays for one retry, from the balance or else from the reserve; `false`: the request must fail instead.
    pub fn withdraw(&self, now_ms: u64) -> bool {
        let paid = |balance: i64| {
            (balance >= RETRY_PRICE_THOUSANDTHS).then(|| balance - RETRY_PRICE_THOUSANDTHS)
        };
        if self
            .balance
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, paid)
            .is_ok()
        {
            return true;
        }
        let taken = |whole_at_ms: u64| {
            let later_ms = whole_at_ms.max(now_ms) + RETRY_RESERVE_REFILL_MS;
            (later_ms - now_ms <= RETRY_RESERVE_RETRIES * RETRY_RESERVE_REFILL_MS)
                .then_some(later_ms)
        };
        self.reserve_whole_at_ms
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken)
            .is_ok()
    }

    /// Retries that could be done now.
    pub fn available(&self, now_ms: u64) -> u64 {
        let saved = self.balance.load(Ordering::Relaxed) / RETRY_PRICE_THOUSANDTHS;
        let missing_ms = self
            .reserve_whole_at_ms
            .load(Ordering::Relaxed)
            .saturating_sub(now_ms);
        saved.unsigned_abs()
            + RETRY_RESERVE_RETRIES.saturating_sub(missing_ms.div_ceil(RETRY_RESERVE_REFILL_MS))
    }
}

#[cfg(test)]
mod tests {
    use super::{RETRY_BALANCE_MAX_RETRIES, RETRY_RESERVE_RETRIES, RetryBudget};

    fn withdrawn(budget: &RetryBudget, tries: usize, now_ms: u64) -> usize {
        (0..tries).filter(|_| budget.withdraw(now_ms)).count()
    }

    #[test]
    fn five_requests_pay_for_one_retry() {
        let budget = RetryBudget::new();
        for _ in 0..1_000 {
            budget.deposit();
        }
        assert_eq!(budget.available(0), 210);
        assert_eq!(withdrawn(&budget, 1_000, 0), 210, "200 and the reserve");
        for _ in 0..4 {
            budget.deposit();
        }
        assert!(!budget.withdraw(0));
        budget.deposit();
        assert!(budget.withdraw(0));
        assert!(!budget.withdraw(0));
    }

    #[test]
    fn a_quiet_gateway_may_retry_and_its_reserve_comes_back() {
        let budget = RetryBudget::new();
        let cases = [
            (5_000, 10, 0),
            (5_999, 0, 0),
            (6_000, 1, 0),
            (9_500, 3, 0),
            (60_000, 10, 0),
            (3_600_000, 10, 0),
        ];
        for (now_ms, granted, left) in cases {
            assert_eq!(withdrawn(&budget, 100, now_ms), granted, "at {now_ms} ms");
            assert_eq!(budget.available(now_ms), left, "at {now_ms} ms");
        }
        assert_eq!(budget.available(7_200_000), RETRY_RESERVE_RETRIES);
    }

    #[test]
    fn savings_have_a_limit() {
        let budget = RetryBudget::new();
        for _ in 0..1_000_000 {
            budget.deposit();
        }
        let most = RETRY_BALANCE_MAX_RETRIES as usize + RETRY_RESERVE_RETRIES as usize;
        assert_eq!(withdrawn(&budget, 10_000, 0), most);
    }

    #[test]
    fn an_outage_with_two_retries_a_request_makes_a_fifth_more_calls_and_not_three_times_as_many() {
        let budget = RetryBudget::new();
        let mut retries = 0;
        for request in 0..10_000u64 {
            budget.deposit();
            retries += withdrawn(&budget, 2, request);
        }
        assert!((2_000..=2_000 + 20).contains(&retries), "{retries}");
    }

    #[test]
    fn threads_together_never_take_more_than_there_is() {
        let budget = RetryBudget::new();
        let taken: usize = std::thread::scope(|scope| {
            let one = || {
                (0..1_000).map(|_| budget.deposit()).count();
                withdrawn(&budget, 1_000, 0)
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(one)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        let left = withdrawn(&budget, 2_000, 0);
        // Of the 500 at most some couldn't be saved while the balance was at its limit, and the limit itself is 500.
        let most =
            RETRY_BALANCE_MAX_RETRIES as usize + 4 * 1_000 / 5 + RETRY_RESERVE_RETRIES as usize;
        assert!(
            taken + left <= most && taken + left >= RETRY_BALANCE_MAX_RETRIES as usize,
            "{taken} and {left}"
        );
    }
}
