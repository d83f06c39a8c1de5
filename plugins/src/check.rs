//! `llmgw policy check`: what a reload would say, without one.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::bundle::Bundle;
use crate::error::PolicyError;
use crate::hooks::Hook;
use crate::set::{PolicySet, Source};
use crate::trip::Ledger;

/// What was found in a directory that loads.
#[derive(Clone, Debug, Serialize)]
pub struct CheckReport {
    /// Files looked at, embedded ones left out.
    pub files: Vec<String>,
    /// Hooks that Lua answers.
    pub hooks: Vec<Hook>,
    /// Engines known.
    pub engines: Vec<String>,
    /// What works, but should be looked at.
    pub warnings: Vec<PolicyError>,
}

/// Loads and checks a directory, or the embedded policies.
pub fn check_dir(dir: Option<&Path>) -> Result<CheckReport, PolicyError> {
    let (bundle, source) = match dir {
        Some(dir) => (Bundle::gather(dir)?, Source::Directory(dir.to_path_buf())),
        None => (Bundle::built_in(), Source::BuiltIn),
    };
    let set = PolicySet::load(bundle, 1, source, Arc::new(Ledger::default()), None)?;
    Ok(CheckReport {
        files: set
            .bundle
            .files
            .values()
            .filter(|file| !file.built_in)
            .map(|file| file.label.clone())
            .collect(),
        hooks: Hook::ALL
            .into_iter()
            .filter(|hook| set.defined[*hook as usize])
            .collect(),
        engines: set.engines.keys().cloned().collect(),
        warnings: Vec::new(),
    })
}
