//! `llmgw policy check`: what a reload would say, without one, and what works but should be looked at.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::engine::EnginePlugin;
use crate::error::{Fault, PolicyError};
use crate::hooks::Hook;
use crate::hooks::example;
use crate::set::bundle::Bundle;
use crate::set::load::at_word;
use crate::set::trip::Ledger;
use crate::set::{PolicySet, Source};
use crate::vm::Vm;

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

/// Hooks that run for every request.
const REQUEST_HOOKS: [Hook; 4] = [Hook::Classify, Hook::Rank, Hook::Reject, Hook::Key];
/// Calls before the measured one, so that what is made once is made.
const ROUNDS: u64 = 8;
/// Steps of a request hook that are worth a warning; a sensible one takes some ten.
const STEPS_MANY: u64 = 1000;

/// Loads and checks a directory, or the embedded policies.
pub fn check_dir(dir: Option<&Path>) -> Result<CheckReport, PolicyError> {
    let (bundle, source) = match dir {
        Some(dir) => (Bundle::gather(dir)?, Source::Directory(dir.to_path_buf())),
        None => (Bundle::built_in(), Source::BuiltIn),
    };
    let set = PolicySet::load(bundle, 1, source, Arc::new(Ledger::default()), None)?;
    let own = set.bundle.files.values().filter(|file| !file.built_in);
    Ok(CheckReport {
        files: own.map(|file| file.label.clone()).collect(),
        hooks: Hook::ALL
            .into_iter()
            .filter(|hook| set.defined[*hook as usize])
            .collect(),
        engines: set.engines.keys().cloned().collect(),
        warnings: warnings(&set)
            .map_err(|fault| PolicyError::in_file("(policies)", fault.message))?,
    })
}

fn warnings(set: &PolicySet) -> Result<Vec<PolicyError>, Fault> {
    let mut vm = Vm::new(Arc::clone(&set.program))?;
    vm.measure();
    let mut found = Vec::new();
    for hook in REQUEST_HOOKS
        .into_iter()
        .filter(|hook| set.defined[*hook as usize])
    {
        let mut least = None;
        for round in 0..ROUNDS {
            // It passed the same call at load.
            let _ = example::call(
                &mut vm,
                hook,
                &set.bands,
                round,
                &format!("session-{round}"),
            );
            // What grows now and then, such as a stack, is not the script's.
            least = least.min(Some(vm.cost().bytes)).or(Some(vm.cost().bytes));
        }
        let (name, cost, bytes) = (hook.function(), vm.cost(), least.unwrap_or(0));
        let key = hook.file().unwrap_or_default();
        if bytes > 0 {
            let reason = format!(
                "'{name}' runs for every request and allocates {bytes} bytes each time: make tables and texts outside of it"
            );
            found.push(at_word(&set.bundle, &key, name, reason));
        }
        if cost.interrupts > STEPS_MANY {
            let reason = format!(
                "'{name}' runs for every request and takes {} steps",
                cost.interrupts
            );
            found.push(at_word(&set.bundle, &key, name, reason));
        }
    }
    for plugin in set.engines.values() {
        found.extend(clashes(set, plugin)?);
    }
    Ok(found)
}

/// Arguments that a plugin's commands set and that its `validate` lets a profile set too.
fn clashes(set: &PolicySet, plugin: &EnginePlugin) -> Result<Vec<PolicyError>, Fault> {
    let key = format!("engines/{}.lua", plugin.name);
    let own = set
        .bundle
        .files
        .get(&key)
        .is_some_and(|file| !file.built_in);
    if !own || !plugin.starts {
        return Ok(Vec::new());
    }
    // Commands that worked at load may be more than a VM without garbage collection takes: so a new one.
    let mut vm = Vm::new(Arc::clone(&set.program))?;
    let mut found = Vec::new();
    for command in example::example_commands(&mut vm, plugin)? {
        for flag in command.args.iter().filter(|arg| arg.starts_with('-')) {
            let refused = plugin.validates
                && !example::complaints(&mut vm, plugin, std::slice::from_ref(flag))?.is_empty();
            if !refused {
                let reason =
                    format!("`commands` sets '{flag}', and `validate` lets a profile set it too");
                found.push(at_word(&set.bundle, &key, flag, reason));
            }
        }
    }
    Ok(found)
}
