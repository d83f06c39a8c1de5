//! `llmgw policy diff DIR1 DIR2 --snapshot F…`: which decisions change from one directory to another, by reason.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::compare::Comparison;
use super::{ToolFormat, complain, open, print};
use crate::control::snapshot::Snapshot;

/// Changes that are printed for one reason; JSON has all.
const PRINTED_MAX: usize = 12;

/// The arguments of `llmgw policy diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// The directory as it was.
    #[arg(value_name = "DIR1")]
    pub before: PathBuf,
    /// The directory as it would be.
    #[arg(value_name = "DIR2")]
    pub after: PathBuf,
    /// Recorded fleets. Without one only what needs no fleet is compared.
    #[arg(long, num_args = 1.., value_name = "FILE")]
    pub snapshot: Vec<PathBuf>,
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub format: ToolFormat,
}

/// What changes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Difference {
    /// Decisions that were compared.
    pub decisions: usize,
    /// Of these, changed ones.
    pub changed: usize,
    /// In the order in which they were found.
    pub changes: Vec<Change>,
}

/// One decision, or one number, that is another one now.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// The file that the fleet is from, where there is one.
    pub snapshot: Option<String>,
    /// What is decided: `place raven`.
    pub decision: String,
    pub before: String,
    pub after: String,
    /// Which hook, and which of its reasons: `placement.filter refuses: reserved`.
    pub reason: String,
}

/// Compares: 0 done, whether something changes or not; 1 a directory doesn't load; 2 a snapshot can't be used.
pub fn run(args: &DiffArgs) -> ExitCode {
    let (before, after) = match (open(Some(&args.before)), open(Some(&args.after))) {
        (Ok(before), Ok(after)) => (before, after),
        (Err(error), _) | (_, Err(error)) => {
            complain(&error);
            return ExitCode::FAILURE;
        }
    };
    let mut comparison = Comparison::new(&before, &after);
    comparison.numbers();
    comparison.bands();
    for file in &args.snapshot {
        match Snapshot::read(file) {
            Ok(snapshot) => comparison.fleet(&file.display().to_string(), &snapshot),
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::from(2);
            }
        }
    }
    print(&comparison.found, args.format, text)
}

/// By reason, the reasons in the order in which they were found.
fn text(difference: &Difference) -> String {
    let mut order: Vec<&str> = Vec::new();
    let mut groups: BTreeMap<&str, Vec<&Change>> = BTreeMap::new();
    for change in &difference.changes {
        let group = groups.entry(&change.reason).or_default();
        if group.is_empty() {
            order.push(&change.reason);
        }
        group.push(change);
    }
    let mut text = String::new();
    for reason in order {
        text.push_str(&format!("{reason}\n"));
        let group = &groups[reason];
        for change in group.iter().take(PRINTED_MAX) {
            let Change {
                decision,
                before,
                after,
                ..
            } = change;
            let place = match &change.snapshot {
                Some(file) => format!("{file}: "),
                None => String::new(),
            };
            text.push_str(&format!("  {place}{decision}: {before} -> {after}\n"));
        }
        if group.len() > PRINTED_MAX {
            text.push_str(&format!("  and {} more\n", group.len() - PRINTED_MAX));
        }
        text.push('\n');
    }
    let Difference {
        decisions, changed, ..
    } = difference;
    text + &format!("{changed} of {decisions} decisions change\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_grouped_by_reason_and_a_long_group_is_cut() {
        let change = |snapshot: Option<&str>, decision: &str, reason: &str| Change {
            snapshot: snapshot.map(str::to_owned),
            decision: decision.to_owned(),
            before: "a".to_owned(),
            after: "b".to_owned(),
            reason: reason.to_owned(),
        };
        let mut difference = Difference {
            decisions: 40,
            changed: 14,
            changes: vec![change(Some("f.json"), "place raven", "filter")],
        };
        for _ in 0..PRINTED_MAX + 1 {
            difference.changes.push(change(None, "band", "classify"));
        }
        difference.changes.push(change(None, "nodes", "filter"));
        let text = text(&difference);
        assert!(
            text.starts_with("filter\n  f.json: place raven: a -> b\n  nodes: a -> b\n\nclassify\n  band: a -> b\n"),
            "{text}"
        );
        assert!(
            text.ends_with("  and 1 more\n\n14 of 40 decisions change\n"),
            "{text}"
        );
    }
}
