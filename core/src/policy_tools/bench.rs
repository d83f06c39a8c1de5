//! `llmgw policy bench [DIR]`: each hook's time, interrupts and memory a call, beside its budget.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use llmgw_plugins::{BenchReport, HookBudget, HookCost, bench_dir};

use super::{ToolFormat, complain, print};
use crate::ctl::table::table;

/// The arguments of `llmgw policy bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Default: the built-in policies.
    pub dir: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub format: ToolFormat,
}

/// Measures and prints: 0 done, 1 the directory doesn't load.
pub fn run(args: &BenchArgs) -> ExitCode {
    match bench_dir(args.dir.as_deref()) {
        Ok(report) => print(&report, args.format, text),
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

fn text(report: &BenchReport) -> String {
    let rows: Vec<[String; 7]> = report.hooks.iter().map(row).collect();
    let mut text = table(
        [
            "HOOK",
            "TIME",
            "STEPS",
            "BYTES",
            "BUDGET",
            "USED",
            "DEFINED IN",
        ],
        &rows,
    );
    if report.hooks.iter().any(|cost| !cost.called) {
        text.push_str(
            "\n* the built-in file: a native rule that equals it answers, in less time\n",
        );
    }
    if !report.native.is_empty() {
        let names: Vec<&str> = report.native.iter().map(|hook| hook.name()).collect();
        text.push_str(&format!(
            "\nnot defined, native rules answer: {}\n",
            names.join(" ")
        ));
    }
    text.push_str(&format!(
        "staging: {:.1} ms from the files to a checked set\n",
        report.staging_ms
    ));
    text
}

fn row(cost: &HookCost) -> [String; 7] {
    let budget = match cost.budget {
        HookBudget::Interrupts(max) => format!("{max} steps"),
        HookBudget::CallMs(max) => format!("{max} ms"),
        HookBudget::DecisionMs(max) => format!("{max} ms a decision"),
    };
    let mark = if cost.called { "" } else { " *" };
    [
        cost.hook.name().to_owned(),
        time(cost.ns),
        cost.interrupts.to_string(),
        cost.bytes.to_string(),
        budget,
        format!("{:.2}%", cost.budget.used(cost) * 100.0),
        format!("{}{mark}", cost.file),
    ]
}

/// Three digits and a unit.
fn time(ns: f64) -> String {
    match ns {
        ..1e3 => format!("{ns:.0} ns"),
        ..1e6 => format!("{:.2} us", ns / 1e3),
        _ => format!("{:.2} ms", ns / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use llmgw_plugins::Hook;

    use super::*;

    #[test]
    fn a_hook_stands_beside_its_budget() {
        let cost = |hook: Hook, called, ns, interrupts| HookCost {
            hook,
            file: "policies/x.lua".to_owned(),
            called,
            ns,
            interrupts,
            bytes: 0,
            budget: hook.budget(),
        };
        let report = BenchReport {
            staging_ms: 12.34,
            hooks: vec![
                cost(Hook::Rank, true, 2512.0, 200),
                cost(Hook::Weights, false, 50_000.0, 2),
            ],
            native: vec![Hook::Key],
        };
        assert_eq!(
            text(&report),
            "HOOK             TIME      STEPS  BYTES  BUDGET       USED   DEFINED IN\n\
             routing.rank     2.51 us   200    0      20000 steps  1.00%  policies/x.lua\n\
             routing.weights  50.00 us  2      0      5 ms         1.00%  policies/x.lua *\n\
             \n\
             * the built-in file: a native rule that equals it answers, in less time\n\
             \n\
             not defined, native rules answer: fairness.key\n\
             staging: 12.3 ms from the files to a checked set\n"
        );
    }
}
