//! The choices behind a property's input: drawn at random, recorded, and replayed smaller until the least one that still
//! fails is found.
//!
//! A generator is a function of a list of whole numbers, so whatever is built from it shrinks with the list.

use std::cmp::Reverse;

/// Draws of one input.
pub(crate) const DRAWS_MAX: usize = 10_000;
/// Inputs that are tried to make a failing one smaller.
pub(crate) const SHRINKS_MAX: usize = 2000;

/// Where draws come from.
#[derive(Debug, Default)]
pub(crate) struct Choices {
    random: u64,
    /// Given back first; what goes beyond is 0 where `replaying`, else random.
    replay: Vec<u64>,
    replaying: bool,
    /// What was drawn.
    pub(crate) drawn: Vec<u64>,
}

impl Choices {
    pub(crate) fn random(seed: u64) -> Choices {
        Choices {
            random: seed,
            ..Choices::default()
        }
    }

    pub(crate) fn replay(choices: Vec<u64>) -> Choices {
        Choices {
            replay: choices,
            replaying: true,
            ..Choices::default()
        }
    }

    /// A number of 0 to `max`; the ends come up more often than chance, since that is where mistakes live.
    /// `None`: the input takes too many.
    pub(crate) fn draw(&mut self, max: u64) -> Option<u64> {
        if self.drawn.len() == DRAWS_MAX {
            return None;
        }
        let number = match self.replay.get(self.drawn.len()) {
            Some(number) => (*number).min(max),
            None if self.replaying => 0,
            None => self.fresh(max),
        };
        self.drawn.push(number);
        Some(number)
    }

    fn fresh(&mut self, max: u64) -> u64 {
        const ENDS_ONE_IN: u64 = 8;
        let random = self.next();
        if max > 1 && random.is_multiple_of(ENDS_ONE_IN) {
            return if random & 8 == 0 { 0 } else { max };
        }
        match max.checked_add(1) {
            Some(count) => ((u128::from(self.next()) * u128::from(count)) >> 64) as u64,
            None => self.next(),
        }
    }

    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.random)
    }
}

/// Spreads a number over all 64 bits.
pub(crate) fn mix(number: u64) -> u64 {
    let mut z = number;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The least list that still fails: shorter is less, then smaller numbers from the left are. `fails` gives what was really
/// drawn from a list when it failed. Stops when `fails` says `Stop`.
pub(crate) fn shrink(first: Vec<u64>, mut fails: impl FnMut(Vec<u64>) -> Tried) -> Vec<u64> {
    let mut search = Search {
        best: first,
        tries: 0,
        stopped: false,
        fails: &mut fails,
    };
    loop {
        let before = search.best.clone();
        search.remove_blocks();
        search.lower_each();
        if search.stopped || search.best == before {
            return search.best;
        }
    }
}

/// What came of one list.
pub(crate) enum Tried {
    /// It fails; this is what it drew.
    Fails(Vec<u64>),
    Passes,
    /// There is no time for more.
    Stop,
}

struct Search<'a> {
    best: Vec<u64>,
    tries: usize,
    stopped: bool,
    fails: &'a mut dyn FnMut(Vec<u64>) -> Tried,
}

impl Search<'_> {
    fn attempt(&mut self, candidate: Vec<u64>) -> bool {
        if self.stopped || self.tries == SHRINKS_MAX {
            self.stopped = true;
            return false;
        }
        self.tries += 1;
        match (self.fails)(candidate) {
            Tried::Fails(drawn) if less(&drawn, &self.best) => {
                self.best = drawn;
                true
            }
            Tried::Fails(_) | Tried::Passes => false,
            Tried::Stop => {
                self.stopped = true;
                false
            }
        }
    }

    /// Leaves out runs of draws, long ones first, from the end. A number before the run may be its length.
    fn remove_blocks(&mut self) {
        for size in [16, 8, 4, 2, 1] {
            let mut start = self.best.len();
            while start > 0 && !self.stopped {
                start -= 1;
                if start + size > self.best.len() {
                    continue;
                }
                let mut without = self.best.clone();
                without.drain(start..start + size);
                if self.attempt(without.clone()) {
                    continue;
                }
                if start > 0 && without[start - 1] > 0 {
                    without[start - 1] -= 1;
                    self.attempt(without);
                }
            }
        }
    }

    /// Makes each number as small as it can be on its own.
    fn lower_each(&mut self) {
        let mut at = 0;
        while at < self.best.len() && !self.stopped {
            let mut low = 0;
            while low < self.best[at] && !self.stopped {
                let middle = low + (self.best[at] - low) / 2;
                let mut candidate = self.best.clone();
                candidate[at] = middle;
                if !self.attempt(candidate) {
                    low = middle + 1;
                }
                if at >= self.best.len() {
                    break;
                }
            }
            at += 1;
        }
    }
}

fn less(a: &[u64], b: &[u64]) -> bool {
    (Reverse(a.len()), Reverse(a)) > (Reverse(b.len()), Reverse(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list: its length, then its numbers.
    fn list(choices: &mut Choices) -> Vec<u64> {
        let length = choices.draw(20).expect("few draws");
        (0..length)
            .map(|_| choices.draw(1000).expect("few draws"))
            .collect()
    }

    fn least(fails: impl Fn(&[u64]) -> bool) -> Vec<u64> {
        let (choices, _) = (0..)
            .map(|seed| {
                let mut choices = Choices::random(seed);
                let input = list(&mut choices);
                (choices, input)
            })
            .find(|(_, input)| fails(input))
            .expect("some input fails");
        let drawn = shrink(choices.drawn, |candidate| {
            let mut choices = Choices::replay(candidate);
            let input = list(&mut choices);
            if fails(&input) {
                Tried::Fails(choices.drawn)
            } else {
                Tried::Passes
            }
        });
        list(&mut Choices::replay(drawn))
    }

    #[test]
    fn a_failing_input_shrinks_to_the_least_one() {
        assert_eq!(least(|list| list.iter().any(|n| *n >= 57)), [57]);
        assert_eq!(least(|list| list.len() >= 3), [0, 0, 0]);
        let sum = least(|list| list.iter().sum::<u64>() > 1500);
        assert_eq!(sum.len(), 2, "{sum:?}");
    }

    #[test]
    fn the_same_seed_draws_the_same_input() {
        assert_eq!(list(&mut Choices::random(7)), list(&mut Choices::random(7)));
    }

    #[test]
    fn shrinking_ends_also_when_everything_fails() {
        let tries = std::cell::Cell::new(0);
        let drawn = shrink(vec![5; 100], |candidate| {
            tries.set(tries.get() + 1);
            Tried::Fails(candidate)
        });
        assert!(drawn.is_empty());
        assert!(tries.get() <= SHRINKS_MAX);
    }
}
