//! What becomes of files that cannot be used: first time to be finished, then one line, then silence until they change.

/// A certificate and its key are rarely replaced at one instant.
pub(super) const SETTLE_MS: u64 = 3_000;

/// The standing of one listener's files against what is in force.
#[derive(Debug, Default)]
pub(super) struct Trial {
    wrong: Option<Wrong>,
}

#[derive(Debug)]
struct Wrong {
    problem: String,
    since_ms: u64,
    is_said: bool,
    /// This problem or one before it: whoever read of it is to read that all is well again.
    was_any_said: bool,
}

/// What is to be done about a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing is new.
    Nothing,
    /// It may be half of a change: look again soon.
    Wait,
    /// To be said, once.
    Say,
    /// It was said, and it is over.
    Healed,
}

impl Trial {
    /// The files can't be used at `now_ms`. What is asked about by a person is said without waiting.
    pub fn wrong(&mut self, problem: String, now_ms: u64, is_asked: bool) -> Verdict {
        let wrong = self.wrong.get_or_insert_with(|| Wrong {
            problem: problem.clone(),
            since_ms: now_ms,
            is_said: false,
            was_any_said: false,
        });
        if wrong.problem != problem {
            // One that was said is over; one that was not may still be the same change going on.
            if wrong.is_said {
                wrong.since_ms = now_ms;
            }
            wrong.problem = problem;
            wrong.is_said = false;
        }
        let is_due = is_asked || now_ms.saturating_sub(wrong.since_ms) >= SETTLE_MS;
        match (wrong.is_said, is_due) {
            (true, _) => Verdict::Nothing,
            (false, false) => Verdict::Wait,
            (false, true) => {
                wrong.is_said = true;
                wrong.was_any_said = true;
                Verdict::Say
            }
        }
    }

    /// The files can be used.
    pub fn right(&mut self) -> Verdict {
        match self.wrong.take() {
            Some(wrong) if wrong.was_any_said => Verdict::Healed,
            _ => Verdict::Nothing,
        }
    }

    /// What was said and still holds.
    pub fn problem(&self) -> Option<&str> {
        let wrong = self.wrong.as_ref().filter(|wrong| wrong.is_said)?;
        Some(&wrong.problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A look: when, what is wrong, and whether a person asked.
    type Look = (u64, Option<&'static str>, bool);

    #[test]
    fn half_a_change_is_not_said_unless_it_stays() {
        use Verdict::{Healed, Nothing, Say, Wait};
        let cases: [(&str, &[(Look, Verdict)]); 7] = [
            (
                "a key that follows its certificate soon is no error",
                &[
                    ((0, Some("half"), false), Wait),
                    ((SETTLE_MS - 1, Some("half"), false), Wait),
                    ((SETTLE_MS, None, false), Nothing),
                ],
            ),
            (
                "one that stays away is said once, and its return too",
                &[
                    ((0, Some("half"), false), Wait),
                    ((SETTLE_MS, Some("half"), false), Say),
                    ((9 * SETTLE_MS, Some("half"), false), Nothing),
                    ((10 * SETTLE_MS, None, false), Healed),
                    ((11 * SETTLE_MS, None, false), Nothing),
                ],
            ),
            (
                "a change that goes on does not put it off for ever",
                &[
                    ((0, Some("empty"), false), Wait),
                    ((SETTLE_MS - 1, Some("half"), false), Wait),
                    ((SETTLE_MS, Some("broken"), false), Say),
                ],
            ),
            (
                "another problem after one that was said has its own time",
                &[
                    ((0, Some("half"), true), Say),
                    ((1, Some("empty"), false), Wait),
                    ((SETTLE_MS + 1, Some("empty"), false), Say),
                ],
            ),
            (
                "a repair that passes through another problem is one of what was said",
                &[
                    ((0, Some("half"), true), Say),
                    ((1, Some("empty"), false), Wait),
                    ((2, None, false), Healed),
                ],
            ),
            (
                "a person who asks is told at once, and it is not said again",
                &[
                    ((0, Some("half"), true), Say),
                    ((SETTLE_MS, Some("half"), false), Nothing),
                ],
            ),
            (
                "the same problem after a good time is news",
                &[
                    ((0, Some("half"), true), Say),
                    ((1, None, false), Healed),
                    ((2, Some("half"), true), Say),
                ],
            ),
        ];
        for (name, looks) in cases {
            let mut trial = Trial::default();
            for ((now_ms, problem, is_asked), expected) in looks {
                let verdict = match problem {
                    Some(problem) => trial.wrong((*problem).to_owned(), *now_ms, *is_asked),
                    None => trial.right(),
                };
                assert_eq!(verdict, *expected, "{name}, at {now_ms} ms");
                let is_shown = trial.problem().is_some();
                assert_eq!(
                    is_shown,
                    verdict == Say || verdict == Nothing && problem.is_some()
                );
            }
        }
    }
}
