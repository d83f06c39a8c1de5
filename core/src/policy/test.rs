//! `llmgw policy test`: runs the tests of a directory of policies, and shows what they found.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, ValueEnum};
use llmgw_plugins::test::{self, CaseReport, Coverage, TestFailure, TestOptions, TestReport};

use super::junit;
use super::kernels::OwnKernels;

/// Arguments of `llmgw policy test`.
#[derive(Debug, Args)]
pub struct TestArgs {
    /// Default: the built-in policies, with the tests that ship with them.
    pub dir: Option<PathBuf>,
    /// Run only cases with this in `FILE: NAME`; `*` stands for anything.
    #[arg(long, value_name = "PATTERN")]
    pub run: Option<String>,
    /// How to show what was found.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
    /// Also show the lines of policies that no test ran, and the reasons for a refusal that none produced.
    #[arg(long)]
    pub coverage: bool,
    /// Write golden values (DIR/golden) instead of comparing with them.
    #[arg(long)]
    pub update_golden: bool,
    /// What properties draw their inputs from: the same number, the same inputs.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub seed: u64,
}

/// How results are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people, in the manner of TAP.
    Text,
    /// One JSON document.
    Json,
    /// JUnit's XML, which CI systems read.
    Junit,
}

/// Columns of what explains a failure.
const LABEL_WIDTH: usize = 9;

/// Runs the tests: 0 all pass, 1 some fail or the policies don't load, 2 the directory can't be used or nothing matches.
pub fn run(args: &TestArgs) -> ExitCode {
    if args.dir.as_ref().is_some_and(|dir| !dir.is_dir()) {
        let dir = args.dir.clone().unwrap_or_default();
        eprintln!("error: {} is no directory", dir.display());
        return ExitCode::from(2);
    }
    let options = TestOptions {
        dir: args.dir.clone(),
        pattern: args.run.clone(),
        seed: args.seed,
        coverage: args.coverage,
        update_golden: args.update_golden,
    };
    let start = Instant::now();
    let report = match test::run(&options, Arc::new(OwnKernels)) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("error: {error}");
            if let Some(text) = &error.text {
                eprintln!("    {text}");
            }
            return ExitCode::FAILURE;
        }
    };
    if report.files.is_empty() {
        match &args.run {
            Some(pattern) => eprintln!("error: no case matches `{pattern}`"),
            None => eprintln!("error: there are no tests: they are in files named `*_test.lua`"),
        }
        return ExitCode::from(2);
    }
    let shown = match args.format {
        Format::Text => text(&report, args, start.elapsed().as_secs_f64()),
        Format::Json => json(&report),
        Format::Junit => junit::document(&report),
    };
    print!("{shown}");
    match report.failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

fn json(report: &TestReport) -> String {
    // The report has string keys and finite numbers only.
    serde_json::to_string_pretty(report).unwrap_or_default() + "\n"
}

/// TAP, with comments for people. Writing into a String can't fail.
fn text(report: &TestReport, args: &TestArgs, took_s: f64) -> String {
    let mut out = String::from("TAP version 13\n");
    let mut number = 0;
    for file in &report.files {
        let _ = writeln!(out, "# {}", file.file);
        for case in &file.cases {
            number += 1;
            match &case.failure {
                None => {
                    let _ = writeln!(out, "ok {number} - {}{}", tap(&case.name), inputs(case));
                }
                Some(failure) => {
                    let _ = writeln!(out, "not ok {number} - {}", tap(&case.name));
                    explain(&mut out, case, failure, report.seed, args);
                }
            }
        }
    }
    let _ = writeln!(out, "1..{number}");
    for path in &report.golden_written {
        let _ = writeln!(out, "# written: {path}");
    }
    if let Some(coverage) = &report.coverage {
        out.push_str(&uncovered(coverage));
    }
    let (passed, failed) = (report.passed, report.failed);
    let _ = writeln!(out, "# {passed} passed, {failed} failed in {took_s:.2} s");
    out
}

fn inputs(case: &CaseReport) -> String {
    match case.runs {
        0 | 1 => String::new(),
        runs => format!(" ({runs} inputs)"),
    }
}

/// A `#` in a name would begin a directive.
fn tap(name: &str) -> String {
    name.replace('#', "\\#").replace('\n', " ")
}

/// What went wrong, in lines that TAP takes for comments.
fn explain(out: &mut String, case: &CaseReport, failure: &TestFailure, seed: u64, args: &TestArgs) {
    for (label, text) in lines(case, failure, seed, args) {
        let _ = writeln!(out, "#   {label:LABEL_WIDTH$} {text}");
    }
}

/// The same as labelled lines.
fn lines(
    case: &CaseReport,
    failure: &TestFailure,
    seed: u64,
    args: &TestArgs,
) -> Vec<(&'static str, String)> {
    let mut lines = vec![("at", place(failure))];
    lines.extend(failure.expression.clone().map(|text| ("code", text)));
    lines.push(("why", failure.message.clone()));
    lines.extend(failure.expected.clone().map(|text| ("expected", text)));
    lines.extend(failure.actual.clone().map(|text| ("actual", text)));
    lines.extend(failure.difference.clone().map(|text| ("differ", text)));
    for (label, list) in [("decision", &failure.decisions), ("input", &failure.input)] {
        let labels = std::iter::once(label).chain(std::iter::repeat(""));
        lines.extend(labels.zip(list.iter().cloned()));
    }
    if let Some(run) = failure.run {
        let dir = args.dir.as_ref().map_or_else(String::new, |dir| {
            format!(" {}", quoted(&dir.display().to_string()))
        });
        let name = quoted(&case.name);
        lines.push(("seed", format!("{seed}, input {run}")));
        lines.push((
            "rerun",
            format!("llmgw policy test{dir} --seed {seed} --run {name}"),
        ));
    }
    lines
}

/// `policies/placement_test.lua:7`.
pub(super) fn place(failure: &TestFailure) -> String {
    match failure.line {
        Some(line) => format!("{}:{line}", failure.file),
        None => failure.file.clone(),
    }
}

/// As a shell takes it for one word.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn uncovered(coverage: &Coverage) -> String {
    let mut out = String::from("# lines never run\n");
    for file in &coverage.files {
        let (all, never) = (file.lines, &file.never_run);
        let run = all - never.len();
        let _ = write!(out, "#   {}: {run} of {all} lines run", file.file);
        if !never.is_empty() {
            let _ = write!(out, ", not {}", ranges(never));
        }
        out.push('\n');
    }
    let never = &coverage.reasons_never_produced;
    let never = match never.as_slice() {
        [] => "none".to_owned(),
        codes => codes.join(" "),
    };
    let _ = writeln!(out, "# reasons never produced: {never}");
    out
}

/// `3-5 9`.
fn ranges(lines: &[u32]) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for line in lines {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *line => *last = *line,
            _ => ranges.push((*line, *line)),
        }
    }
    let shown = ranges.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    shown.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::ranges;

    #[test]
    fn lines_in_a_row_are_one_range() {
        assert_eq!(ranges(&[3, 4, 5, 9, 11, 12]), "3-5 9 11-12");
        assert_eq!(ranges(&[]), "");
    }
}
