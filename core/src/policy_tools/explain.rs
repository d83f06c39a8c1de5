//! `llmgw policy explain --snapshot F --model M`: a decision about a recorded fleet, with all its reasons.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::{ToolFormat, complain, open, print};
use crate::config::suggestion;
use crate::control::explain::{Explanation, explain};
use crate::control::placement::{JobSpec, place};
use crate::control::snapshot::Snapshot;

/// The arguments of `llmgw policy explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A recorded fleet.
    #[arg(long, value_name = "FILE")]
    pub snapshot: PathBuf,
    /// One of its models.
    #[arg(long)]
    pub model: String,
    /// Try no other profile than this one.
    #[arg(long)]
    pub profile: Option<String>,
    /// Directory of policies. Default: the built-in ones.
    #[arg(long, value_name = "DIR")]
    pub policies: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub format: ToolFormat,
}

/// Explains: 0 done, whether there is a place or not; 1 the policies don't load; 2 the snapshot can't be used.
pub fn run(args: &ExplainArgs) -> ExitCode {
    let set = match open(args.policies.as_deref()) {
        Ok(set) => set,
        Err(error) => {
            complain(&error);
            return ExitCode::FAILURE;
        }
    };
    let snapshot = match Snapshot::read(&args.snapshot) {
        Ok(snapshot) => snapshot,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    let Some(job) = JobSpec::of(&snapshot, &args.model, args.profile.as_deref()) else {
        eprintln!("error: {}", unknown(&snapshot, args));
        return ExitCode::from(2);
    };
    let mut decide = |snapshot: &Snapshot, job: &JobSpec| place(snapshot, job, &mut set.decision());
    let decision = decide(&snapshot, &job);
    let explanation = explain(&snapshot, &job, decision, None, &mut decide);
    print(&explanation, args.format, Explanation::to_string)
}

/// There is no such model, or profile.
fn unknown(snapshot: &Snapshot, args: &ExplainArgs) -> String {
    let file = args.snapshot.display();
    let (wrong, noun, known): (&str, &str, Vec<&str>) = match snapshot.models.get(&args.model) {
        None => (
            &args.model,
            "model",
            snapshot.models.keys().map(String::as_str).collect(),
        ),
        Some(entry) => (
            args.profile.as_deref().unwrap_or_default(),
            "profile",
            entry
                .profiles
                .iter()
                .map(|profile| profile.name.as_str())
                .collect(),
        ),
    };
    let hint = match known.is_empty() {
        true => "it has none".to_owned(),
        false => suggestion(wrong, &known),
    };
    format!("{file} has no {noun} `{wrong}`: {hint}")
}
