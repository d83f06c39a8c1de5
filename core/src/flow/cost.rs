//! What service costs: tokens times their prices, in thousandths of a price, so that sums are exact whole numbers.

/// Thousandths of a price in one.
pub const PRICE_SCALE: f64 = 1_000.0;
/// No token costs more than this; with it no sum of a lifetime overflows.
const PRICE_MAX: f64 = 1_000_000.0;

/// The prices of one model's tokens, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prices {
    pub input: u64,
    /// An input token that the replica had in its cache.
    pub cached: u64,
    pub output: u64,
}

impl Prices {
    pub fn of(prices: &llmgw_plugins::Prices) -> Prices {
        let scaled = |price: f64| (price.clamp(0.0, PRICE_MAX) * PRICE_SCALE).round() as u64;
        Prices {
            input: scaled(prices.input),
            cached: scaled(prices.cached),
            output: scaled(prices.output),
        }
    }

    /// The cost of a prompt, of which `cached` tokens need not be read.
    pub fn prompt(&self, input: u64, cached: u64) -> u64 {
        let cached = cached.min(input);
        let read = (input - cached).saturating_mul(self.input);
        read.saturating_add(cached.saturating_mul(self.cached))
    }

    pub fn output(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(self.output)
    }
}

impl Default for Prices {
    /// As `fairness.lua` ships: 1, 0.1 and 2.
    fn default() -> Prices {
        Prices {
            input: 1_000,
            cached: 100,
            output: 2_000,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_costs_its_tokens_and_the_cached_ones_less() {
        let prices = Prices::default();
        assert_eq!(prices.prompt(100, 0), 100_000);
        assert_eq!(prices.prompt(100, 90), 10_000 + 9_000);
        assert_eq!(prices.prompt(100, 200), 10_000);
        assert_eq!(prices.output(3), 6_000);
    }

    #[test]
    fn the_shipped_prices_are_the_default() {
        let shipped = llmgw_plugins::Prices {
            input: 1.0,
            cached: 0.1,
            output: 2.0,
        };
        assert_eq!(Prices::of(&shipped), Prices::default());
    }
}
