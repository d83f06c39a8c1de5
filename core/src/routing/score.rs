//! Which replica a request goes to: the native scorer, a pure function of what the gateway knows at this moment.
//!
//! ```text
//! todo     = max(input_tokens - prefix_tokens, 1)
//! score_ms = prefill·(prefill_tokens + todo)·ms_per_prefill_token
//!          + decode·est_output_tokens·ms_per_decode_step·inflight/slots
//!          + kv·kv_use + error·errors_1m + stale_penalty_ms if metrics_age_ms > stale_ms
//! best = least score;  near = least score among those with the longest known prefix
//! near, if its prefix ≥ affinity_min·input_tokens and score(near) − score(best) ≤ affinity_penalty_ms; else best
//! ```

use llmgw_plugins::RoutingWeights;

/// Scores closer to the least one than this are equal: the estimates behind them are no better. Milliseconds.
pub const TIE_MS: f64 = 25.0;
/// As [`TIE_MS`], as a share of the least score; the larger of the two counts.
pub const TIE_SHARE: f64 = 0.10;
/// The in-flight limit of a replica that doesn't say how many slots it has.
pub const SLOTS_UNKNOWN: u32 = 256;
/// Scores that are kept between the passes over the candidates; most pools are smaller.
const SCORES_KEPT_MAX: usize = 32;
/// What a candidate scores whose numbers make no sense (NaN, infinite, a negative speed): it goes last. Milliseconds.
const SCORE_WORST_MS: f64 = 1e15;

/// What a request asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ask {
    /// Estimated length of the prompt, in tokens.
    pub input_tokens: u64,
    /// Estimated length of the answer, in tokens.
    pub est_output_tokens: u64,
}

/// What is known about one replica. Unknown is `None`, which counts neither as idle nor as full.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Requests that this gateway has sent to it and that haven't ended.
    pub inflight: u32,
    /// Requests that wait in the gateway for this replica.
    pub queued: u32,
    /// How many requests it works on at once; unknown counts as [`SLOTS_UNKNOWN`].
    pub slots: Option<u32>,
    /// Uncached input tokens of the requests that wait for their first byte, those queued in the gateway included.
    pub prefill_tokens: u64,
    /// Of these, those of requests that were sent.
    pub sent_tokens: u64,
    /// Learned from its own first-byte times, in milliseconds.
    pub ms_per_prefill_token: f64,
    /// Learned from its own streams, in milliseconds.
    pub ms_per_decode_step: f64,
    /// Requests that the engine says it works on.
    pub running: Option<f64>,
    /// Requests that the engine says it has queued.
    pub waiting: Option<f64>,
    /// Share of its KV cache in use, 0 to 1.
    pub kv: Option<f64>,
    /// Age of `running`, `waiting` and `kv`, in milliseconds. `None`: there are none, and what stands in them is ignored.
    pub metrics_age_ms: Option<f64>,
    /// Faults within the last minute.
    pub errors_1m: u32,
    /// It has just said that it is busy: as good as full.
    pub busy: bool,
    /// Tokens of this prompt that the approximate index believes to be in its cache.
    pub prefix_tokens: u64,
}

impl Default for Candidate {
    /// An idle replica of which nothing has been learned.
    fn default() -> Self {
        Self {
            inflight: 0,
            queued: 0,
            slots: None,
            prefill_tokens: 0,
            sent_tokens: 0,
            ms_per_prefill_token: super::learned::MS_PER_PREFILL_TOKEN_PRIOR,
            ms_per_decode_step: super::learned::MS_PER_DECODE_STEP_PRIOR,
            running: None,
            waiting: None,
            kv: None,
            metrics_age_ms: None,
            errors_1m: 0,
            busy: false,
            prefix_tokens: 0,
        }
    }
}

impl Candidate {
    /// Own requests on it and before it.
    fn load(&self) -> u64 {
        u64::from(self.inflight) + u64::from(self.queued)
    }

    /// The same, per slot or plain.
    fn load_by(&self, per_slot: bool) -> f64 {
        let slots = if per_slot {
            self.slots.unwrap_or(1).max(1)
        } else {
            1
        };
        self.load() as f64 / f64::from(slots)
    }

    fn is_full(&self) -> bool {
        self.busy || self.load() >= u64::from(self.slots.unwrap_or(SLOTS_UNKNOWN))
    }

    /// Whether the engine's own numbers may be believed.
    fn is_fresh(&self, weights: &RoutingWeights) -> bool {
        self.metrics_age_ms
            .is_some_and(|age| age <= weights.stale_ms)
    }

    /// KV use, where it is known and fresh.
    fn fresh_kv(&self, weights: &RoutingWeights) -> Option<f64> {
        let kv = self.kv.filter(|kv| kv.is_finite())?;
        self.is_fresh(weights).then_some(kv.clamp(0.0, 1.0))
    }

    /// Requests that the engine knows of, those of other gateways included; where that is known and fresh.
    fn fresh_engine_load(&self, weights: &RoutingWeights) -> Option<f64> {
        let load = self.running? + self.waiting?;
        (load.is_finite() && self.is_fresh(weights)).then_some(load)
    }
}

/// What was chosen, and why.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Index into the candidates.
    pub index: usize,
    /// Its score in milliseconds, lower is better.
    pub score_ms: f64,
    /// What decided.
    pub reason: Reason,
}

/// What decided a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// There was one candidate.
    OnlyOne,
    /// All others were at their slot limit.
    OnlyFree,
    /// It has the longest known prefix, and isn't too much slower than the best.
    Prefix,
    /// Its score was the least by more than a tie.
    LeastScore,
    /// Its score equalled others': the least loaded of them, then turns.
    Tie,
}

impl Reason {
    /// The name that logs and clients see.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::OnlyOne => "only_one",
            Reason::OnlyFree => "only_free",
            Reason::Prefix => "prefix",
            Reason::LeastScore => "least_score",
            Reason::Tie => "tie",
        }
    }
}

/// Chooses among candidates; `None` only where there are none.
///
/// Candidates at their slot limit, and those that just said that they are busy, are considered only when all are. Among equal scores ([`TIE_MS`], [`TIE_SHARE`])
/// the one with the fewest own requests per slot is taken (plain requests, where a slot count is unknown), then the
/// one whose engine reports the fewest, then one by `random`: prefill alone would send everything to a replica that
/// is busy with streams. The same arguments give the same choice. Allocates nothing.
pub fn choose(
    ask: &Ask,
    candidates: &[Candidate],
    weights: &RoutingWeights,
    random: u64,
) -> Option<Choice> {
    let field = Field::new(ask, candidates, weights, random)?;
    let (group, by_prefix) = field.best_or_near();
    let (picked, tied) = field.pick(group)?;
    let reason = match () {
        () if candidates.len() == 1 => Reason::OnlyOne,
        () if field.eligible == 1 => Reason::OnlyFree,
        () if by_prefix => Reason::Prefix,
        () if tied > 1 => Reason::Tie,
        () => Reason::LeastScore,
    };
    Some(Choice {
        index: picked.index,
        score_ms: picked.score_ms,
        reason,
    })
}

/// The candidates that are considered, and what their scores have in common.
struct Field<'a> {
    ask: &'a Ask,
    candidates: &'a [Candidate],
    weights: &'a RoutingWeights,
    random: u64,
    /// Those at their slot limit are left out.
    free_only: bool,
    /// How many that leaves.
    eligible: usize,
    /// How many of those are drawn and scored.
    drawn: usize,
    /// Stands in for a KV use that is unknown or stale: the mean of the known ones, so that not knowing is neither
    /// rewarded nor punished.
    kv_unknown: f64,
    /// The scores of the first candidates: as many as have room here. Those of others are computed each time.
    kept: [f64; SCORES_KEPT_MAX],
}

/// A candidate with its score.
#[derive(Clone, Copy)]
struct Scored<'a> {
    index: usize,
    candidate: &'a Candidate,
    score_ms: f64,
}

/// Those that have at least this prefix.
#[derive(Clone, Copy)]
struct Group {
    prefix_tokens: u64,
    /// The least score among them.
    least_ms: f64,
}

impl<'a> Field<'a> {
    fn new(
        ask: &'a Ask,
        candidates: &'a [Candidate],
        weights: &'a RoutingWeights,
        random: u64,
    ) -> Option<Self> {
        let (mut free, mut kv_sum, mut kv_known) = (0, 0.0, 0u32);
        for candidate in candidates {
            free += usize::from(!candidate.is_full());
            if let Some(kv) = candidate.fresh_kv(weights) {
                kv_sum += kv;
                kv_known += 1;
            }
        }
        let eligible = if free > 0 { free } else { candidates.len() };
        let choices = weights.choices as usize;
        let mut field = Field {
            ask,
            candidates,
            weights,
            random,
            free_only: free > 0,
            eligible,
            drawn: if choices == 0 {
                eligible
            } else {
                choices.min(eligible)
            },
            kv_unknown: kv_sum / f64::from(kv_known.max(1)),
            kept: [0.0; SCORES_KEPT_MAX],
        };
        for (index, candidate) in candidates.iter().enumerate().take(SCORES_KEPT_MAX) {
            field.kept[index] = field.score_ms(candidate);
        }
        (eligible > 0).then_some(field)
    }

    /// Those that are considered, scored; the same ones each time.
    fn scored(&self) -> impl Iterator<Item = Scored<'a>> {
        let random = SplitMix(self.random);
        let mut draw = Draw {
            random,
            left: self.eligible,
            wanted: self.drawn,
        };
        let all = self.candidates.iter().enumerate();
        all.filter(move |(_, candidate)| !(self.free_only && candidate.is_full()) && draw.take())
            .map(|(index, candidate)| {
                let kept = self.kept.get(index).copied();
                let score_ms = kept.unwrap_or_else(|| self.score_ms(candidate));
                Scored {
                    index,
                    candidate,
                    score_ms,
                }
            })
    }

    fn score_ms(&self, candidate: &Candidate) -> f64 {
        let (ask, weights) = (self.ask, self.weights);
        let todo = ask
            .input_tokens
            .saturating_sub(candidate.prefix_tokens)
            .max(1);
        let prefill_tokens = candidate.prefill_tokens.saturating_add(todo) as f64;
        let slots = f64::from(candidate.slots.unwrap_or(SLOTS_UNKNOWN).max(1));
        let decode_ms = ask.est_output_tokens as f64 * candidate.ms_per_decode_step;
        let is_stale = candidate
            .metrics_age_ms
            .is_some_and(|age| age > weights.stale_ms);
        let score_ms = weights.prefill * prefill_tokens * candidate.ms_per_prefill_token
            + weights.decode * decode_ms * f64::from(candidate.inflight) / slots
            + weights.kv * candidate.fresh_kv(weights).unwrap_or(self.kv_unknown)
            + weights.error * f64::from(candidate.errors_1m)
            + if is_stale {
                weights.stale_penalty_ms
            } else {
                0.0
            };
        // A negative speed would win for ever; so would a NaN in a careless comparison.
        if (0.0..SCORE_WORST_MS).contains(&score_ms) {
            score_ms
        } else {
            SCORE_WORST_MS
        }
    }

    /// All of them, or those with the longest known prefix where that is worth it; and whether it is.
    fn best_or_near(&self) -> (Group, bool) {
        let mut best = Group {
            prefix_tokens: 0,
            least_ms: SCORE_WORST_MS,
        };
        let mut near = best;
        for Scored {
            candidate,
            score_ms,
            ..
        } in self.scored()
        {
            best.least_ms = best.least_ms.min(score_ms);
            if candidate.prefix_tokens > near.prefix_tokens {
                near = Group {
                    prefix_tokens: candidate.prefix_tokens,
                    least_ms: score_ms,
                };
            } else if candidate.prefix_tokens == near.prefix_tokens {
                near.least_ms = near.least_ms.min(score_ms);
            }
        }
        let needed_tokens = self.weights.affinity_min * self.ask.input_tokens as f64;
        let is_worth_it = near.prefix_tokens > 0
            && near.prefix_tokens as f64 >= needed_tokens
            && near.least_ms < SCORE_WORST_MS
            && near.least_ms - best.least_ms <= self.weights.affinity_penalty_ms;
        if is_worth_it {
            (near, true)
        } else {
            (best, false)
        }
    }

    /// Breaks the ties within a group; also says how many were tied.
    fn pick(&self, group: Group) -> Option<(Scored<'a>, usize)> {
        let line_ms = group.least_ms + TIE_MS.max(group.least_ms * TIE_SHARE);
        let tied = || {
            self.scored().filter(move |scored| {
                scored.score_ms < line_ms && scored.candidate.prefix_tokens >= group.prefix_tokens
            })
        };
        let (mut count, mut per_slot) = (0, true);
        for scored in tied() {
            count += 1;
            per_slot &= scored.candidate.slots.is_some();
        }
        // Another stream of numbers than the one that drew the candidates.
        let mut random = SplitMix(!self.random);
        let mut least_load = f64::INFINITY;
        let (mut lightest, mut fewest) = (Turns::default(), Turns::default());
        // `None` once the engine's load of one of the lightest is unknown: then these numbers can't order them.
        let mut least_engine_load = Some(f64::INFINITY);
        for scored in tied() {
            let load = scored.candidate.load_by(per_slot);
            if load > least_load {
                continue;
            }
            if load < least_load {
                (least_load, least_engine_load) = (load, Some(f64::INFINITY));
                (lightest, fewest) = (Turns::default(), Turns::default());
            }
            lightest.offer(scored, &mut random);
            let engine_load = scored.candidate.fresh_engine_load(self.weights);
            if engine_load < least_engine_load {
                (least_engine_load, fewest) = (engine_load, Turns::default());
            }
            if engine_load == least_engine_load {
                fewest.offer(scored, &mut random);
            }
        }
        let turns = if least_engine_load.is_some() {
            fewest
        } else {
            lightest
        };
        Some((turns.taken?, count))
    }
}

/// One out of a sequence whose length isn't known, each equally likely.
#[derive(Default)]
struct Turns<'a> {
    offered: usize,
    taken: Option<Scored<'a>>,
}

impl<'a> Turns<'a> {
    fn offer(&mut self, scored: Scored<'a>, random: &mut SplitMix) {
        self.offered += 1;
        if self.offered == 1 || random.below(self.offered) == 0 {
            self.taken = Some(scored);
        }
    }
}

/// Draws a number of items out of a sequence whose length is known, each set of them equally likely, in one pass.
struct Draw {
    random: SplitMix,
    left: usize,
    wanted: usize,
}

impl Draw {
    fn take(&mut self) -> bool {
        if self.wanted == self.left {
            return true;
        }
        let taken = self.random.below(self.left) < self.wanted;
        self.left -= 1;
        self.wanted -= usize::from(taken);
        taken
    }
}

/// SplitMix64: a generator that is one number, for choices that must repeat for the same seed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SplitMix(pub u64);

impl SplitMix {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 where that is 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests;
