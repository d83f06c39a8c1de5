//! A tenant's own limits as counts: the requests it has open, and what it spent of a minute's requests and tokens.
//!
//! Pure: it is told the time. What was spent is forgiven continuously, a minute's limit in a minute, so that the
//! capacity of each bucket is its limit. Spending is what is stored, not what is left, so that a limit may change
//! at any time: what was spent stays spent.

/// What one request, or one token, weighs: forgiving `limit` of these each millisecond is exact for every limit.
const UNITS_EACH: u128 = 60_000;
/// What was spent is forgiven in this time.
const MINUTE_MS: u64 = 60_000;
/// Debt beyond this is forgiven at once: an engine that counts nonsense must not lock a tenant out for good.
const DEBT_MAX_MINUTES: u128 = 60;
/// How long a tenant that has all its requests open is told to wait: when one of them ends nobody knows.
const CONCURRENCY_WAIT_MS: u64 = 1_000;

/// What a tenant may have; `None` is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Requests that are open: those that wait and those at work alike.
    pub max_concurrency: Option<u32>,
    pub requests_per_minute: Option<u64>,
    /// Of prompts and answers together.
    pub tokens_per_minute: Option<u64>,
}

/// Which of the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    MaxConcurrency,
    RequestsPerMinute,
    TokensPerMinute,
}

/// What a request will probably take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ask {
    pub input_tokens: u64,
    pub output_tokens: u64,
    /// The input was estimated from text. The bytes of images and sound say little about tokens: such a request
    /// may cost less than a minute's limit, whatever its size.
    pub is_text: bool,
}

/// What was taken for a request that is open, for [`Ledger::end`] to give back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "what was taken has to be given back"]
pub struct Held {
    tokens: u64,
    /// It was counted against `requests_per_minute`.
    is_counted: bool,
    since_ms: u64,
}

/// Why a request may not pass now, as facts. Nothing was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// Of several, the one that lasts longest.
    pub limit: Limit,
    /// The limit's value.
    pub allowed: u64,
    /// What the request needs of it.
    pub wanted: u64,
    /// What there is of it.
    pub left: u64,
    /// When it helps to come back; `None`: never, the prompt alone is more than the limit.
    pub wait_ms: Option<u64>,
}

/// One bucket at one moment, as `x-ratelimit-*` show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left {
    pub limit: u64,
    /// Whole requests or tokens; 0 also in debt.
    pub remaining: u64,
    /// Until the bucket is full again.
    pub reset_ms: u64,
}

/// The buckets at one moment; `None` where there is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Balance {
    pub requests: Option<Left>,
    pub tokens: Option<Left>,
}

/// What a tenant has taken.
#[derive(Debug, Default)]
pub struct Ledger {
    limits: Limits,
    /// The time up to which spending was forgiven.
    seen_ms: u64,
    open: u32,
    /// In units.
    requests_spent: u128,
    /// In units. More than the limit is debt.
    tokens_spent: u128,
}

impl Limit {
    /// Its key in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Limit::MaxConcurrency => "max_concurrency",
            Limit::RequestsPerMinute => "requests_per_minute",
            Limit::TokensPerMinute => "tokens_per_minute",
        }
    }
}

impl Ledger {
    pub fn new(limits: Limits) -> Ledger {
        Ledger {
            limits,
            ..Ledger::default()
        }
    }

    /// Other limits from now on. What is open stays open, what was spent stays spent.
    pub fn set_limits(&mut self, now_ms: u64, limits: Limits) {
        self.forgive(now_ms);
        self.limits = limits;
        self.forgive(now_ms);
    }

    /// Takes what a request needs, or says which limit it would break. All of them are looked at before anything is taken.
    pub fn admit(&mut self, now_ms: u64, ask: Ask) -> Result<Held, Refused> {
        self.forgive(now_ms);
        let wanted = ask.input_tokens.saturating_add(ask.output_tokens);
        let tokens = wanted.min(self.limits.tokens_per_minute.unwrap_or(0));
        let refused = [
            self.too_many_open(),
            self.too_many_requests(),
            self.too_many_tokens(ask, tokens),
        ];
        // `None` as a wait is longer than any.
        let longest = refused
            .into_iter()
            .flatten()
            .max_by_key(|refused| refused.wait_ms.unwrap_or(u64::MAX));
        if let Some(refused) = longest {
            return Err(refused);
        }
        let is_counted = self.limits.requests_per_minute.is_some();
        self.open += 1;
        self.requests_spent += UNITS_EACH * u128::from(is_counted);
        self.tokens_spent += UNITS_EACH * u128::from(tokens);
        Ok(Held {
            tokens,
            is_counted,
            since_ms: self.seen_ms,
        })
    }

    /// A request ended. `used`: the tokens that it took, or `None` where no engine was asked: then it costs nothing at all.
    pub fn end(&mut self, now_ms: u64, held: Held, used: Option<u64>) {
        self.forgive(now_ms);
        self.open = self.open.saturating_sub(1);
        // What was reserved a while ago has been forgiven in part, and is not given back again: bursts would be saved up in
        // requests that only wait.
        let unforgiven_ms =
            u128::from(MINUTE_MS.saturating_sub(self.seen_ms.saturating_sub(held.since_ms)));
        let given_back = |units: u128| units * unforgiven_ms / u128::from(MINUTE_MS);
        if used.is_none() && held.is_counted {
            let back = given_back(UNITS_EACH);
            self.requests_spent = self.requests_spent.saturating_sub(back);
        }
        let Some(limit) = self.limits.tokens_per_minute else {
            return;
        };
        let used = UNITS_EACH * u128::from(used.unwrap_or(0));
        let reserved = UNITS_EACH * u128::from(held.tokens);
        let before = self.tokens_spent;
        let spent = match used.checked_sub(reserved) {
            Some(more) => before + more,
            None => before.saturating_sub(given_back(reserved - used)),
        };
        let debt_max = (1 + DEBT_MAX_MINUTES) * capacity(limit);
        // A limit that was lowered may have left more than that; nobody's end makes it less than what is held.
        self.tokens_spent = spent.min(debt_max.max(before));
    }

    /// Requests that are open.
    pub fn open(&self) -> u32 {
        self.open
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// What is left at this moment.
    pub fn balance(&mut self, now_ms: u64) -> Balance {
        self.forgive(now_ms);
        let left = |limit: Option<u64>, spent| limit.map(|limit| left(limit, spent));
        Balance {
            requests: left(self.limits.requests_per_minute, self.requests_spent),
            tokens: left(self.limits.tokens_per_minute, self.tokens_spent),
        }
    }

    fn too_many_open(&self) -> Option<Refused> {
        let allowed = self.limits.max_concurrency?;
        (self.open >= allowed).then_some(Refused {
            limit: Limit::MaxConcurrency,
            allowed: u64::from(allowed),
            wanted: 1,
            left: 0,
            wait_ms: Some(CONCURRENCY_WAIT_MS),
        })
    }

    fn too_many_requests(&self) -> Option<Refused> {
        let allowed = self.limits.requests_per_minute?;
        let wait_ms = wait_ms(allowed, self.requests_spent, 1)?;
        Some(Refused {
            limit: Limit::RequestsPerMinute,
            allowed,
            wanted: 1,
            left: left(allowed, self.requests_spent).remaining,
            wait_ms: Some(wait_ms),
        })
    }

    fn too_many_tokens(&self, ask: Ask, tokens: u64) -> Option<Refused> {
        let allowed = self.limits.tokens_per_minute?;
        let refused = |wanted, wait_ms| Refused {
            limit: Limit::TokensPerMinute,
            allowed,
            wanted,
            left: left(allowed, self.tokens_spent).remaining,
            wait_ms,
        };
        if ask.is_text && ask.input_tokens > allowed {
            return Some(refused(ask.input_tokens, None));
        }
        let wait_ms = wait_ms(allowed, self.tokens_spent, tokens)?;
        Some(refused(tokens, Some(wait_ms)))
    }

    /// Forgives what the time that passed is worth. Only steps forward count: a clock that was put back costs the
    /// step, no more, and one that was put far forward empties the ledger, no more.
    fn forgive(&mut self, now_ms: u64) {
        let passed_ms = now_ms.saturating_sub(self.seen_ms);
        self.seen_ms = now_ms;
        let forgiven = |limit: Option<u64>, spent: u128| match limit {
            Some(limit) => spent.saturating_sub(u128::from(limit) * u128::from(passed_ms)),
            // Without a limit nothing is kept, or one that is set later would begin with a debt.
            None => 0,
        };
        self.requests_spent = forgiven(self.limits.requests_per_minute, self.requests_spent);
        self.tokens_spent = forgiven(self.limits.tokens_per_minute, self.tokens_spent);
    }
}

fn capacity(limit: u64) -> u128 {
    UNITS_EACH * u128::from(limit)
}

fn left(limit: u64, spent: u128) -> Left {
    let remaining = capacity(limit).saturating_sub(spent) / UNITS_EACH;
    Left {
        limit,
        // At most the limit, which is 64 bits wide.
        remaining: remaining as u64,
        reset_ms: time_for(limit, spent),
    }
}

/// How long until so much can be spent; `None`: now.
fn wait_ms(limit: u64, spent: u128, amount: u64) -> Option<u64> {
    let over = (spent + UNITS_EACH * u128::from(amount)).saturating_sub(capacity(limit));
    (over > 0).then(|| time_for(limit, over))
}

/// How long it takes to forgive so many units.
fn time_for(limit: u64, units: u128) -> u64 {
    let ms = units.div_ceil(u128::from(limit.max(1)));
    ms.try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
