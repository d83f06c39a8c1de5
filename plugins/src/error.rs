//! Why a policy directory, or one call of a hook, was refused.

use std::fmt;

use serde::Serialize;

/// What is wrong with a policy set, and where. Shown as `policies/routing.lua:14: reason`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PolicyError {
    /// The file, as an operator would type it; the directory where no single file is to blame.
    pub file: String,
    /// Line in `file`, from 1, where it is known.
    pub line: Option<u32>,
    /// One sentence, with a suggestion where there is one.
    pub reason: String,
    /// The line itself, trimmed, so that a log shows it without opening the file.
    pub text: Option<String>,
}

impl PolicyError {
    /// An error about a whole file.
    pub fn in_file(file: impl Into<String>, reason: impl Into<String>) -> PolicyError {
        PolicyError {
            file: file.into(),
            line: None,
            reason: reason.into(),
            text: None,
        }
    }
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{}: {}", self.file, line, self.reason),
            None => write!(f, "{}: {}", self.file, self.reason),
        }
    }
}

impl std::error::Error for PolicyError {}

/// Why one call of a hook gave no usable answer: the `kind` label of `llmgw_policy_errors_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrorKind {
    /// The Lua code raised an error, or returned a value of the wrong type.
    Error,
    /// It ran out of steps or time.
    Budget,
    /// It ran out of memory; its VM is replaced.
    Memory,
    /// It returned nil where a value is needed.
    Nil,
    /// It returned NaN.
    Nan,
    /// It returned a number outside of its range.
    Range,
    /// It returned a name that nobody knows.
    Unknown,
}

impl ErrorKind {
    /// All kinds, in the order of their counters.
    pub const ALL: [ErrorKind; 7] = [
        ErrorKind::Error,
        ErrorKind::Budget,
        ErrorKind::Memory,
        ErrorKind::Nil,
        ErrorKind::Nan,
        ErrorKind::Range,
        ErrorKind::Unknown,
    ];

    /// The metric label.
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::Error => "error",
            ErrorKind::Budget => "budget",
            ErrorKind::Memory => "memory",
            ErrorKind::Nil => "nil",
            ErrorKind::Nan => "nan",
            ErrorKind::Range => "range",
            ErrorKind::Unknown => "unknown",
        }
    }
}

/// One failed call: what kind, and the message, which starts with `file:line:` where Lua knew it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which counter it moves.
    pub kind: ErrorKind,
    /// For the log, `ctl policies` and `policy check`.
    pub message: String,
}

impl Fault {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Fault {
        Fault {
            kind,
            message: message.into(),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)
    }
}

/// The known name that `wrong` was probably meant to be: at most a third may differ, or it is its beginning.
pub(crate) fn suggest<'a>(
    wrong: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    known
        .into_iter()
        .filter_map(|name| {
            let starts = wrong.len() >= 4 && (name.starts_with(wrong) || wrong.starts_with(name));
            let distance = edit_distance(wrong, name);
            let allowed = (wrong.len().max(name.len()) / 3).max(1);
            if starts {
                Some((0, name))
            } else {
                (distance <= allowed).then_some((distance, name))
            }
        })
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// ` (did you mean 'queued'?)`, or nothing.
pub(crate) fn did_you_mean<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    match suggest(wrong, known) {
        Some(name) => format!(" (did you mean '{name}'?)"),
        None => String::new(),
    }
}

/// Optimal string alignment: insertions, deletions, substitutions and swaps of neighbours. Names longer than
/// `NAME_MAX_CHARS` are cut, since `wrong` may come from a script.
fn edit_distance(a: &str, b: &str) -> usize {
    const NAME_MAX_CHARS: usize = 64;
    let a: Vec<char> = a.chars().take(NAME_MAX_CHARS).collect();
    let b: Vec<char> = b.chars().take(NAME_MAX_CHARS).collect();
    let mut rows = vec![vec![0usize; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    for (j, cell) in rows[0].iter_mut().enumerate() {
        *cell = j;
    }
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let cost = usize::from(a[i - 1] != b[j - 1]);
            let mut best = (rows[i - 1][j] + 1)
                .min(rows[i][j - 1] + 1)
                .min(rows[i - 1][j - 1] + cost);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_name_is_matched_to_the_nearest_known_one() {
        let known = [
            "queued",
            "queued_cost",
            "slots",
            "affinity_penalty_ms",
            "affinity_min",
        ];
        for (wrong, right) in [
            ("quue", Some("queued")),
            ("qeued", Some("queued")),
            ("slot", Some("slots")),
            ("affinity_penalty", Some("affinity_penalty_ms")),
            ("temperature", None),
            ("x", None),
        ] {
            assert_eq!(suggest(wrong, known), right, "{wrong}");
        }
    }

    #[test]
    fn an_error_reads_as_file_line_and_reason() {
        let mut error = PolicyError::in_file("policies/routing.lua", "unknown knob 'x'");
        assert_eq!(error.to_string(), "policies/routing.lua: unknown knob 'x'");
        error.line = Some(14);
        assert_eq!(
            error.to_string(),
            "policies/routing.lua:14: unknown knob 'x'"
        );
    }
}
