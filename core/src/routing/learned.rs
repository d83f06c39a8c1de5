//! What the gateway learns from the requests it has served: how fast a replica is, and how a model's text turns into tokens.

use std::ops::RangeInclusive;

/// Prefill time until a replica has shown its own, in milliseconds a token.
pub const MS_PER_PREFILL_TOKEN_PRIOR: f64 = 0.5;
/// Decode time until a replica has shown its own, in milliseconds a step.
pub const MS_PER_DECODE_STEP_PRIOR: f64 = 20.0;
/// Bytes a token until a model's usage has shown them.
pub const BYTES_PER_TOKEN_PRIOR: f64 = 4.0;
/// Length of an answer until one was seen, in tokens.
pub const OUTPUT_TOKENS_PRIOR: f64 = 256.0;

const MS_PER_PREFILL_TOKEN_RANGE: RangeInclusive<f64> = 0.001..=100.0;
const MS_PER_DECODE_STEP_RANGE: RangeInclusive<f64> = 0.1..=10_000.0;
const BYTES_PER_TOKEN_RANGE: RangeInclusive<f64> = 0.5..=16.0;
const OUTPUT_TOKENS_RANGE: RangeInclusive<f64> = 1.0..=1_000_000.0;

/// Shorter prefills say more about the network than about the replica, in tokens.
const PREFILL_MIN_TOKENS: u64 = 128;
/// As [`PREFILL_MIN_TOKENS`], for streams, in steps.
const DECODE_MIN_STEPS: u64 = 8;
/// Shorter prompts are mostly the chat template, which isn't in the request, in tokens.
const PROMPT_MIN_TOKENS: u64 = 64;
/// The weight of the newest sample, once there are enough.
const NEWEST_SHARE: f64 = 0.1;
/// A sample further from the estimate than this factor counts as if it were this far: one outlier moves little, a real change wins in a few steps.
const OUTLIER_FACTOR: f64 = 8.0;

/// A moving average that starts from a prior.
#[derive(Debug, Clone, Copy)]
struct Estimate {
    value: f64,
    samples: u32,
}

impl Estimate {
    const fn new(prior: f64) -> Self {
        Self {
            value: prior,
            samples: 0,
        }
    }

    /// The plain mean of the first samples, then an exponential one.
    fn learn(&mut self, sample: f64, range: RangeInclusive<f64>) {
        if !sample.is_finite() {
            return;
        }
        let sample = sample.clamp(self.value / OUTLIER_FACTOR, self.value * OUTLIER_FACTOR);
        self.samples = self.samples.saturating_add(1);
        let share = NEWEST_SHARE.max(1.0 / f64::from(self.samples));
        let value = self.value + share * (sample - self.value);
        self.value = value.clamp(*range.start(), *range.end());
    }
}

/// A replica's speed.
#[derive(Debug, Clone)]
pub struct Learned {
    prefill: Estimate,
    decode: Estimate,
}

impl Default for Learned {
    fn default() -> Self {
        let prefill = Estimate::new(MS_PER_PREFILL_TOKEN_PRIOR);
        Self {
            prefill,
            decode: Estimate::new(MS_PER_DECODE_STEP_PRIOR),
        }
    }
}

impl Learned {
    /// A request's first byte came `first_byte_ms` after it was sent. `prefill_tokens`: the uncached tokens that the
    /// replica had to work through until then: its own, and those of the requests that were sent before it and still waited for theirs.
    /// Waiting behind others would otherwise count as slowness, and be counted twice by the scorer.
    pub fn first_byte(&mut self, first_byte_ms: f64, prefill_tokens: u64) {
        if prefill_tokens >= PREFILL_MIN_TOKENS {
            self.prefill.learn(
                first_byte_ms / prefill_tokens as f64,
                MS_PER_PREFILL_TOKEN_RANGE,
            );
        }
    }

    /// A stream took `decode_ms` from its first chunk to its last one, `steps` chunks later.
    pub fn decoded(&mut self, decode_ms: f64, steps: u64) {
        if steps >= DECODE_MIN_STEPS {
            self.decode
                .learn(decode_ms / steps as f64, MS_PER_DECODE_STEP_RANGE);
        }
    }

    /// Milliseconds of prefill for one uncached input token, 0.001 to 100; [`MS_PER_PREFILL_TOKEN_PRIOR`] at first.
    pub fn ms_per_prefill_token(&self) -> f64 {
        self.prefill.value
    }

    /// Milliseconds between two tokens of one stream, 0.1 to 10,000; [`MS_PER_DECODE_STEP_PRIOR`] at first.
    pub fn ms_per_decode_step(&self) -> f64 {
        self.decode.value
    }
}

/// How a model's tokenizer cuts text.
#[derive(Debug, Clone)]
pub struct TokenRatio(Estimate);

impl Default for TokenRatio {
    fn default() -> Self {
        Self(Estimate::new(BYTES_PER_TOKEN_PRIOR))
    }
}

impl TokenRatio {
    /// An engine counted the tokens of a prompt of this many bytes. Not for prompts with images: their bytes aren't text.
    pub fn usage(&mut self, prompt_bytes: u64, prompt_tokens: u64) {
        if prompt_tokens >= PROMPT_MIN_TOKENS {
            self.0.learn(
                prompt_bytes as f64 / prompt_tokens as f64,
                BYTES_PER_TOKEN_RANGE,
            );
        }
    }

    /// Bytes a token, 0.5 to 16; [`BYTES_PER_TOKEN_PRIOR`] at first.
    pub fn bytes_per_token(&self) -> f64 {
        self.0.value
    }

    /// The estimated tokens of so many bytes, rounded up.
    pub fn tokens(&self, bytes: u64) -> u64 {
        (bytes as f64 / self.0.value).ceil() as u64
    }
}

/// How long answers are, for one model (and tenant).
#[derive(Debug, Clone)]
pub struct OutputLength(Estimate);

impl Default for OutputLength {
    fn default() -> Self {
        Self(Estimate::new(OUTPUT_TOKENS_PRIOR))
    }
}

impl OutputLength {
    /// An answer ended by itself after this many tokens.
    pub fn usage(&mut self, completion_tokens: u64) {
        if completion_tokens > 0 {
            self.0.learn(completion_tokens as f64, OUTPUT_TOKENS_RANGE);
        }
    }

    /// `est_output_tokens`: the moving average, at most what the request allows.
    pub fn estimate(&self, max_tokens: Option<u64>) -> u64 {
        (self.0.value.ceil() as u64).min(max_tokens.unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::{Learned, OutputLength, TokenRatio};

    fn close(actual: f64, expected: f64) {
        assert!(
            (actual - expected).abs() <= expected * 0.1,
            "{actual} instead of {expected}"
        );
    }

    #[test]
    fn a_replicas_prefill_speed_is_found_within_a_few_requests_fast_or_slow() {
        for truth in [0.01, 0.1, 0.5, 4.0, 40.0] {
            let mut learned = Learned::default();
            for tokens in [500, 2_000, 1_000, 4_000, 800, 700, 900, 3_000, 1_000, 600] {
                learned.first_byte(truth * tokens as f64, tokens);
            }
            let (low, high) = (truth * 0.75, truth * 2.0);
            assert!(
                (low..high).contains(&learned.ms_per_prefill_token()),
                "{truth}: {learned:?}"
            );
        }
    }

    #[test]
    fn tiny_prompts_outliers_and_nonsense_teach_little() {
        let mut learned = Learned::default();
        learned.first_byte(5_000.0, 5);
        learned.decoded(5_000.0, 2);
        learned.first_byte(f64::NAN, 1_000);
        learned.first_byte(f64::INFINITY, 1_000);
        assert_eq!(
            (learned.ms_per_prefill_token(), learned.ms_per_decode_step()),
            (0.5, 20.0),
            "the priors"
        );

        for _ in 0..20 {
            learned.first_byte(100.0, 1_000);
        }
        let before = learned.ms_per_prefill_token();
        learned.first_byte(600_000.0, 1_000);
        assert!(learned.ms_per_prefill_token() < before * 2.0);
        for _ in 0..60 {
            learned.first_byte(600_000.0, 1_000);
        }
        close(learned.ms_per_prefill_token(), 100.0);
        for _ in 0..1_000 {
            learned.first_byte(0.0, 1_000);
        }
        assert_eq!(
            learned.ms_per_prefill_token(),
            0.001,
            "clamped, so never a speed that nothing can match"
        );
    }

    #[test]
    fn waiting_behind_others_does_not_look_like_slowness() {
        let mut learned = Learned::default();
        for _ in 0..20 {
            for ahead in 0..5 {
                let prefill_tokens = (ahead + 1) * 1_000;
                learned.first_byte(0.2 * prefill_tokens as f64, prefill_tokens);
            }
        }
        close(learned.ms_per_prefill_token(), 0.2);
    }

    #[test]
    fn decode_steps_are_learned_from_streams() {
        let mut learned = Learned::default();
        for _ in 0..20 {
            learned.decoded(5_000.0, 100);
        }
        close(learned.ms_per_decode_step(), 50.0);
    }

    #[test]
    fn tokens_are_bytes_by_four_until_usage_teaches_better() {
        let mut ratio = TokenRatio::default();
        assert_eq!(
            (ratio.tokens(0), ratio.tokens(1), ratio.tokens(4_000)),
            (0, 1, 1_000)
        );
        ratio.usage(10, 40);
        assert_eq!(
            ratio.bytes_per_token(),
            4.0,
            "a short prompt is mostly its template"
        );
        for _ in 0..20 {
            ratio.usage(3_000, 1_500);
        }
        close(ratio.bytes_per_token(), 2.0);
        assert_eq!(ratio.tokens(u64::MAX).min(1), 1);
    }

    #[test]
    fn an_answer_is_expected_to_be_as_long_as_others_and_no_longer_than_allowed() {
        let mut length = OutputLength::default();
        assert_eq!(
            (length.estimate(None), length.estimate(Some(16))),
            (256, 16)
        );
        for _ in 0..50 {
            length.usage(1_000);
            length.usage(0);
        }
        close(length.estimate(None) as f64, 1_000.0);
        assert_eq!(length.estimate(Some(400)), 400);
    }
}
