//! What a run of tests found.

use std::time::Duration;

use serde::Serialize;

/// One run, in the order of files and cases.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TestReport {
    /// Cases that passed.
    pub passed: usize,
    /// Cases that failed, files that can't be run included.
    pub failed: usize,
    /// What properties drew their inputs from.
    pub seed: u64,
    /// The test files with at least one case that was run.
    pub files: Vec<FileReport>,
    /// What the tests never reached, if that was asked for.
    pub coverage: Option<Coverage>,
    /// Golden files that were written.
    pub golden_written: Vec<String>,
}

/// One test file.
#[derive(Clone, Debug, Serialize)]
pub struct FileReport {
    /// As an operator would type it, or `(built-in)/routing_test.lua`.
    pub file: String,
    /// Its cases, in the order of the file.
    pub cases: Vec<CaseReport>,
}

/// One case.
#[derive(Clone, Debug, Serialize)]
pub struct CaseReport {
    /// A sentence.
    pub name: String,
    /// Line of its `t.case` or `t.property`.
    pub line: Option<u32>,
    /// How long it took.
    #[serde(rename = "time_ms", serialize_with = "in_ms")]
    pub time: Duration,
    /// Inputs that a property tried; 1 for a case.
    pub runs: u64,
    /// `None`: it passed.
    pub failure: Option<TestFailure>,
}

/// Why a case failed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TestFailure {
    /// Where.
    pub file: String,
    /// Line in `file`.
    pub line: Option<u32>,
    /// The source of that line.
    pub expression: Option<String>,
    /// One sentence.
    pub message: String,
    /// What was expected, as Lua writes it.
    pub expected: Option<String>,
    /// What was found instead.
    pub actual: Option<String>,
    /// Where in a large value the two differ first.
    pub difference: Option<String>,
    /// The case's last decisions, with the reason for each refusal.
    pub decisions: Vec<String>,
    /// A property's least failing input, draw by draw.
    pub input: Vec<String>,
    /// Which of a property's inputs failed first, from 1.
    pub run: Option<u64>,
}

/// What tests never reached.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Coverage {
    /// By file.
    pub files: Vec<FileCoverage>,
    /// Codes that a filter can refuse a node with and that no decision of the tests had.
    pub reasons_never_produced: Vec<String>,
}

/// Lines of one policy file.
#[derive(Clone, Debug, Serialize)]
pub struct FileCoverage {
    /// As an operator would type it.
    pub file: String,
    /// Lines with code.
    pub lines: usize,
    /// Of these, lines that no test ran.
    pub never_run: Vec<u32>,
}

impl TestReport {
    /// The first failure, with the case that it is of.
    pub fn first_failure(&self) -> Option<(&CaseReport, &TestFailure)> {
        self.files
            .iter()
            .flat_map(|file| &file.cases)
            .find_map(|case| Some((case, case.failure.as_ref()?)))
    }
}

fn in_ms<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64((time.as_secs_f64() * 1e6).round() / 1e3)
}
