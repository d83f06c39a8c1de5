//! What tests never reached: lines of policy files, counted by Luau itself, and reasons for a refusal.

use std::collections::{BTreeMap, BTreeSet};

use crate::set::PolicySet;
use crate::test::fleet::Kernels;
use crate::test::report::{Coverage, FileCoverage};
use crate::vm::stock::lines_run;

/// Reads this thread's counters. Loading a file runs its outermost lines, so these count as run.
pub(crate) fn measure(
    set: &PolicySet,
    kernels: Option<&dyn Kernels>,
    refusals: &BTreeSet<String>,
) -> Coverage {
    let is_policy = |key: &&String| !key.ends_with("_test.lua") && !key.starts_with("lib/");
    for key in set.bundle.files.keys().filter(is_policy) {
        // A file that doesn't load was refused before any test ran.
        let _ = set.run(|vm| vm.module(key).map(drop));
    }
    let mut lines: BTreeMap<String, BTreeMap<u32, u32>> = BTreeMap::new();
    for (key, hits) in lines_run(set.id) {
        let file = lines.entry(key).or_default();
        for line in hits {
            let most = file.entry(line.line).or_default();
            *most = line.hits.max(*most);
        }
    }
    let files = lines.into_iter().map(|(key, lines)| FileCoverage {
        file: label(set, &key),
        lines: lines.len(),
        never_run: lines
            .iter()
            .filter(|(_, hits)| **hits == 0)
            .map(|(line, _)| *line)
            .collect(),
    });
    Coverage {
        files: files.collect(),
        reasons_never_produced: never_produced(set, kernels, refusals),
    }
}

fn label(set: &PolicySet, key: &str) -> String {
    let file = set.bundle.files.get(key);
    file.map_or_else(|| key.to_owned(), |file| file.label.clone())
}

fn never_produced(
    set: &PolicySet,
    kernels: Option<&dyn Kernels>,
    refusals: &BTreeSet<String>,
) -> Vec<String> {
    let mut known: BTreeSet<String> = kernels
        .map(|kernels| kernels.refusal_codes())
        .unwrap_or_default()
        .into_iter()
        .map(str::to_owned)
        .collect();
    if let Some(file) = set.bundle.files.get("placement.lua") {
        known.extend(codes_in(&file.text));
    }
    known.difference(refusals).cloned().collect()
}

/// Codes that a filter returns as it stands: `return false, "reserved"`.
fn codes_in(text: &str) -> Vec<String> {
    let lines = text
        .lines()
        .map(|line| line.split("--").next().unwrap_or(line));
    lines
        .filter_map(|line| {
            let (_, after) = line.split_once("return false")?;
            let code = after.trim_start().strip_prefix(',')?.trim_start();
            let quote = code.chars().next().filter(|c| matches!(c, '"' | '\''))?;
            code[1..].split(quote).next().map(str::to_owned)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_of_a_filter_are_found_in_its_text() {
        let text = "  -- return false, \"example\"\n  return false, \"reserved\", \"kept\"\n  return false ,'full'\n  return false, code\n";
        assert_eq!(codes_in(text), ["reserved", "full"]);
    }
}
