//! `llmgw policy bench`, `explain` and `diff`: what policies cost, decide, and would decide otherwise.

pub mod bench;
mod compare;
pub mod diff;
pub mod explain;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use clap::ValueEnum;
use llmgw_plugins::{Policies, PolicyError, PolicyOptions, PolicySet};
use serde::Serialize;

pub use bench::BenchArgs;
pub use diff::DiffArgs;
pub use explain::ExplainArgs;

/// How a tool prints what it found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ToolFormat {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

/// The set that a server would make of a directory; without one the built-in policies.
fn open(dir: Option<&Path>) -> Result<Arc<PolicySet>, PolicyError> {
    let options = PolicyOptions {
        dir: dir.map(Path::to_path_buf),
        state: None,
    };
    Ok(Policies::open(options)?.current())
}

/// Prints what was found.
fn print<T: Serialize>(found: &T, format: ToolFormat, text: impl FnOnce(&T) -> String) -> ExitCode {
    match format {
        ToolFormat::Text => print!("{}", text(found)),
        ToolFormat::Json => match serde_json::to_string_pretty(found) {
            Ok(json) => println!("{json}"),
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::FAILURE;
            }
        },
    }
    ExitCode::SUCCESS
}

/// Says what is wrong with a directory, with the line itself.
fn complain(error: &PolicyError) {
    eprintln!("error: {error}");
    if let Some(line) = &error.text {
        eprintln!("  | {line}");
    }
}
