//! `llmgw policy`: writes the built-in policies out, checks a directory before it ships, and tests it.
//!
//! - [`test`]: `llmgw policy test`. [`OwnKernels`] is what tests drive.

mod junit;
pub(crate) mod kernels;
mod simulate;
pub mod test;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
pub use kernels::OwnKernels;
use llmgw_plugins::CheckReport;
use test::TestArgs;

use crate::policy_tools::{self, BenchArgs, DiffArgs, ExplainArgs};

/// What `llmgw policy` can do.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Write the built-in policies into a directory, to edit. Nothing is overwritten.
    Init { dir: PathBuf },
    /// Load a directory as the server would, and say what is wrong.
    Check {
        /// Default: the built-in policies.
        dir: Option<PathBuf>,
    },
    /// What each hook takes, beside what it may take.
    Bench(BenchArgs),
    /// Run the policies' tests.
    Test(TestArgs),
    /// Why a model of a recorded fleet runs where it does, or doesn't.
    Explain(ExplainArgs),
    /// Which decisions change from one directory to another.
    Diff(DiffArgs),
}

/// Runs one command: 0 done, 1 the check failed, 2 the directory can't be used.
pub fn run(command: PolicyCommand) -> ExitCode {
    match command {
        PolicyCommand::Init { dir } => match llmgw_plugins::init_dir(&dir) {
            Ok(written) => {
                for path in written {
                    println!("{}", path.display());
                }
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::from(2)
            }
        },
        PolicyCommand::Bench(args) => policy_tools::bench::run(&args),
        PolicyCommand::Test(args) => test::run(&args),
        PolicyCommand::Explain(args) => policy_tools::explain::run(&args),
        PolicyCommand::Diff(args) => policy_tools::diff::run(&args),
        PolicyCommand::Check { dir } => match llmgw_plugins::check_dir(dir.as_deref()) {
            Ok(report) => {
                print_report(&report);
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::FAILURE
            }
        },
    }
}

fn print_report(report: &CheckReport) {
    for file in &report.files {
        println!("{file}: ok");
    }
    for warning in &report.warnings {
        eprintln!("warning: {warning}");
    }
    let hooks: Vec<&str> = report.hooks.iter().map(|hook| hook.name()).collect();
    println!("hooks answered by Lua: {}", none_if_empty(&hooks.join(" ")));
    println!("engines: {}", none_if_empty(&report.engines.join(" ")));
}

fn none_if_empty(list: &str) -> &str {
    if list.is_empty() { "none" } else { list }
}
