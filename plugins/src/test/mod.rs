//! `llmgw policy test`: test files in Lua, run against the hooks, the kernels and recorded fleets; also what a reload has to pass.
//!
//! - [`run`] runs a directory's tests, or those that ship with llmgw. [`TestReport`] is what it found.
//! - [`Kernels`] and [`Fleet`] are what tests drive and this crate doesn't have.
//! - `types.lua` documents `llmgw.test` for people and editors.
//!
//! Inside: `runner` runs a file, `host` is what its functions share, `assertions`, `hooks`, `fleet` and `generator` are
//! these functions, `inputs` reads what they are given, `plain` compares and shows values, `choices` shrinks inputs.

mod assertions;
mod choices;
mod coverage;
mod fleet;
mod generator;
mod golden;
mod hooks;
mod host;
pub(crate) mod inputs;
mod plain;
mod report;
mod runner;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use fleet::{Answer, Fleet, Found as FoundInFleet, Kernels, Step};
pub use report::{CaseReport, Coverage, FileCoverage, FileReport, TestFailure, TestReport};
pub use runner::{CASE_MAX, TEST_FILE_MAX, TEST_VM_MAX_BYTES};

use crate::error::PolicyError;
use crate::set::bundle::{Bundle, SourceFile};
use crate::set::{PolicySet, Source};
use crate::test::host::{Host, TestFile};
use crate::test::runner::{Allowance, Run};

/// What a reload gives all tests of a set together.
pub const GATE_MAX: Duration = Duration::from_secs(5);
/// Stack of the thread that tests run on.
const STACK_BYTES: usize = 8 << 20;

/// What editors and people read about `llmgw.test`.
pub(crate) const TYPES: &str = include_str!("types.lua");

/// The tests that ship with llmgw: `(key, text)`. Each is run where its subject is not the shipped file, and with these.
pub(crate) const BUILT_IN_TESTS: [(&str, &str); 7] = [
    (
        "placement_test.lua",
        include_str!("../../../policies/placement_test.lua"),
    ),
    (
        "admission_test.lua",
        include_str!("../../../policies/admission_test.lua"),
    ),
    (
        "fairness_test.lua",
        include_str!("../../../policies/fairness_test.lua"),
    ),
    (
        "routing_test.lua",
        include_str!("../../../policies/routing_test.lua"),
    ),
    (
        "engines/vllm_test.lua",
        include_str!("../../engines/vllm_test.lua"),
    ),
    (
        "engines/sglang_test.lua",
        include_str!("../../engines/sglang_test.lua"),
    ),
    (
        "engines/llamacpp_test.lua",
        include_str!("../../engines/llamacpp_test.lua"),
    ),
];

/// What to test, and how.
#[derive(Clone, Debug, Default)]
pub struct TestOptions {
    /// The directory; `None`: the built-in policies.
    pub dir: Option<PathBuf>,
    /// Only cases whose `file: name` has this in it; `*` stands for anything.
    pub pattern: Option<String>,
    /// What properties draw their inputs from. The same seed gives the same inputs.
    pub seed: u64,
    /// Also say what was never reached.
    pub coverage: bool,
    /// Write golden values instead of comparing with them.
    pub update_golden: bool,
}

/// What files did beside passing or failing.
#[derive(Default)]
struct Found {
    refusals: BTreeSet<String>,
    golden_written: Vec<String>,
}

impl TestOptions {
    fn wants(&self, file: &str, name: &str) -> bool {
        let Some(pattern) = &self.pattern else {
            return true;
        };
        let text = format!("{file}: {name}");
        let mut rest = text.as_str();
        pattern.split('*').all(|part| match rest.find(part) {
            Some(at) => {
                rest = &rest[at + part.len()..];
                true
            }
            None => false,
        })
    }
}

impl Found {
    fn take(&mut self, host: &Host) {
        self.refusals.append(&mut host.refusals.borrow_mut());
        self.golden_written
            .append(&mut host.golden_written.borrow_mut());
    }
}

/// Runs the tests of a directory, together with the shipped ones of every file that the directory replaces and doesn't
/// test itself. The error is a directory that can't be read, or a set that doesn't load.
pub fn run(options: &TestOptions, kernels: Arc<dyn Kernels>) -> Result<TestReport, PolicyError> {
    let (mut bundle, source) = match &options.dir {
        Some(dir) => (Bundle::gather(dir)?, Source::Directory(dir.clone())),
        None => (Bundle::built_in(), Source::BuiltIn),
    };
    add_shipped(&mut bundle, options.dir.is_none());
    on_thread(bundle, source, options, Some(kernels), None)
}

/// Whether a set that loads may come into force: its own tests pass within [`GATE_MAX`]. What ships with llmgw was tested
/// when it was built, so a shipped test of a shipped file isn't run again.
pub(crate) fn gate(
    bundle: &Bundle,
    source: &Source,
    dir: &Path,
    kernels: Arc<dyn Kernels>,
) -> Result<(), PolicyError> {
    let mut bundle = bundle.clone();
    let subjects: BTreeMap<String, bool> = bundle
        .files
        .iter()
        .map(|(key, file)| (key.clone(), file.built_in))
        .collect();
    bundle.files.retain(|key, file| {
        let shipped_test = file.built_in && key.ends_with("_test.lua");
        !(shipped_test && subjects.get(&subject(key)) == Some(&true))
    });
    add_shipped(&mut bundle, false);
    if !bundle.files.keys().any(|key| key.ends_with("_test.lua")) {
        return Ok(());
    }
    let options = TestOptions {
        dir: Some(dir.to_path_buf()),
        ..TestOptions::default()
    };
    let report = on_thread(
        bundle,
        source.clone(),
        &options,
        Some(kernels),
        Some(GATE_MAX),
    )?;
    match report.first_failure() {
        None => Ok(()),
        Some((case, failure)) => Err(refusal(case, failure)),
    }
}

fn refusal(case: &CaseReport, failure: &TestFailure) -> PolicyError {
    let mut reason = format!("test `{}` failed: {}", case.name, failure.message);
    if let (Some(expected), Some(actual)) = (&failure.expected, &failure.actual) {
        reason.push_str(&format!(", expected {expected}, actual {actual}"));
    }
    PolicyError {
        file: failure.file.clone(),
        line: failure.line,
        reason,
        text: failure.expression.clone(),
    }
}

/// The file that a test is beside.
fn subject(test: &str) -> String {
    test.replace("_test.lua", ".lua")
}

/// Adds the shipped tests of files that are not the shipped ones, where the directory has none of its own; or all.
fn add_shipped(bundle: &mut Bundle, all: bool) {
    for (key, text) in BUILT_IN_TESTS {
        let changed = bundle
            .files
            .get(&subject(key))
            .is_some_and(|file| !file.built_in);
        if !bundle.files.contains_key(key) && (all || changed) {
            let file = SourceFile {
                text: text.to_owned(),
                label: format!("(built-in)/{key}"),
                built_in: false,
            };
            bundle.files.insert(key.to_owned(), file);
        }
    }
}

/// Runs them on a thread of their own, whose VMs go away with it.
fn on_thread(
    bundle: Bundle,
    source: Source,
    options: &TestOptions,
    kernels: Option<Arc<dyn Kernels>>,
    all_max: Option<Duration>,
) -> Result<TestReport, PolicyError> {
    std::thread::scope(|scope| {
        let run = || run_all(bundle, source, options, kernels, all_max);
        let thread = std::thread::Builder::new()
            .name("policy-test".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, run)
            .map_err(|e| PolicyError::in_file("(tests)", format!("no thread to run on: {e}")))?;
        thread
            .join()
            .unwrap_or_else(|_| Err(PolicyError::in_file("(tests)", "the runner panicked")))
    })
}

fn run_all(
    bundle: Bundle,
    source: Source,
    options: &TestOptions,
    kernels: Option<Arc<dyn Kernels>>,
    all_max: Option<Duration>,
) -> Result<TestReport, PolicyError> {
    let files: Vec<TestFile> = bundle
        .files
        .iter()
        .filter(|(key, _)| key.ends_with("_test.lua"))
        .map(|(key, file)| TestFile {
            key: key.clone(),
            label: file.label.clone(),
            text: file.text.clone(),
        })
        .collect();
    let set = PolicySet::load_for_tests(bundle, source, options.coverage)?;
    let mut run = Run {
        set: Arc::new(set),
        kernels,
        options,
        all: all_max.map(Allowance::new),
        found: Found::default(),
    };
    let mut report = TestReport {
        seed: options.seed,
        ..TestReport::default()
    };
    for file in &files {
        let found = run.file(file);
        let failed = found.cases.iter().filter(|case| case.failure.is_some());
        report.failed += failed.count();
        report.passed += found
            .cases
            .iter()
            .filter(|case| case.failure.is_none())
            .count();
        if !found.cases.is_empty() {
            report.files.push(found);
        }
    }
    if options.coverage {
        let kernels = run.kernels.as_deref();
        let coverage = coverage::measure(&run.set, kernels, &run.found.refusals);
        report.coverage = Some(coverage);
    }
    report.golden_written = run.found.golden_written;
    Ok(report)
}
