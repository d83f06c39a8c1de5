//! `llmgw policy bench`: what each hook of a directory takes, beside what it may take.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mlua::Value;
use serde::Serialize;

use crate::engine::EnginePlugin;
use crate::error::{Fault, PolicyError};
use crate::hooks::Hook;
use crate::hooks::example;
use crate::set::bundle::Bundle;
use crate::set::trip::Ledger;
use crate::set::{PolicySet, Source};
use crate::vm::budget::{
    DECISION_MAX, ENGINE_MAX, REQUEST_INTERRUPTS_MAX, TICK_MAX, thread_cpu_time,
};
use crate::vm::{Cost, Vm};

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// Reading nothing, compiling and checking all files, as a reload does, in ms; the least of a few times.
    pub staging_ms: f64,
    /// In the order of the hooks; those of engines once for each engine.
    pub hooks: Vec<HookCost>,
    /// Hooks that no file defines: native rules answer.
    pub native: Vec<Hook>,
}

/// One hook, called on an example of the largest size that it gets.
#[derive(Clone, Debug, Serialize)]
pub struct HookCost {
    /// The hook.
    pub hook: Hook,
    /// The file that defines it.
    pub file: String,
    /// Lua answers. False where the file is the embedded one, for which a native rule that equals it answers.
    pub called: bool,
    /// CPU time of one call with its inputs and the reading of its result, in ns: the median of some batches.
    pub ns: f64,
    /// Interrupts of one call: loops, calls and returns.
    pub interrupts: u64,
    /// Memory that one call allocates, inputs left out.
    pub bytes: usize,
    /// What it may take.
    pub budget: HookBudget,
}

/// What stops a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HookBudget {
    /// A number of interrupts: hooks of the requests' path.
    Interrupts(u64),
    /// Wall clock, in ms.
    CallMs(u64),
    /// Wall clock in ms for all calls of one decision together.
    DecisionMs(u64),
}

impl HookBudget {
    /// The part of it that a call uses, 1 is all.
    pub fn used(self, cost: &HookCost) -> f64 {
        match self {
            HookBudget::Interrupts(max) => cost.interrupts as f64 / max as f64,
            HookBudget::CallMs(max) | HookBudget::DecisionMs(max) => cost.ns / (max as f64 * 1e6),
        }
    }
}

impl Hook {
    /// What a call may take.
    pub fn budget(self) -> HookBudget {
        let ms = |limit: Duration| limit.as_millis() as u64;
        match self {
            Hook::PlacementFilter | Hook::PlacementScore => {
                HookBudget::DecisionMs(ms(DECISION_MAX))
            }
            Hook::Bands | Hook::Gate | Hook::Prices | Hook::Weights => {
                HookBudget::CallMs(ms(TICK_MAX))
            }
            Hook::EngineValidate | Hook::EngineCommands | Hook::EngineServesHttp => {
                HookBudget::CallMs(ms(ENGINE_MAX))
            }
            Hook::Classify
            | Hook::Reject
            | Hook::Weight
            | Hook::Key
            | Hook::Rank
            | Hook::EngineMap
            | Hook::EngineClassifyError => HookBudget::Interrupts(REQUEST_INTERRUPTS_MAX),
        }
    }
}

/// Batches of which the median counts.
const BATCHES: usize = 9;
/// Length of a batch: long beside the clock's own cost, short enough that all hooks take seconds.
const BATCH_TIME: Duration = Duration::from_millis(4);
/// Calls that are measured for interrupts and memory; the first ones make what is made once.
const COST_CALLS: u64 = 8;
/// How often a set is staged.
const STAGINGS: usize = 5;

/// Measures a directory, or the embedded policies. Takes some seconds.
pub fn bench_dir(dir: Option<&Path>) -> Result<BenchReport, PolicyError> {
    let anywhere = |fault: Fault| PolicyError::in_file("(policies)", fault.message);
    let (set, staging_ms) = stage(dir)?;
    let mut hooks = Vec::new();
    let mut native = Vec::new();
    for hook in Hook::ALL {
        let found = match hook.file() {
            Some(key) => of_policies(&set, hook, &key).map_err(anywhere)?,
            None => of_engines(&set, hook).map_err(anywhere)?,
        };
        if found.is_empty() {
            native.push(hook);
        }
        hooks.extend(found);
    }
    Ok(BenchReport {
        staging_ms,
        hooks,
        native,
    })
}

/// The set, and the time from its texts to a checked set.
fn stage(dir: Option<&Path>) -> Result<(PolicySet, f64), PolicyError> {
    let mut least = Duration::MAX;
    let mut staged = None;
    for _ in 0..STAGINGS {
        let (bundle, source) = match dir {
            Some(dir) => (Bundle::gather(dir)?, Source::Directory(dir.to_path_buf())),
            None => (Bundle::built_in(), Source::BuiltIn),
        };
        let start = Instant::now();
        let set = PolicySet::load(bundle, 1, source, Arc::new(Ledger::default()), None)?;
        least = least.min(start.elapsed());
        staged = Some(set);
    }
    let nothing = || PolicyError::in_file("(policies)", "nothing was staged");
    Ok((staged.ok_or_else(nothing)?, least.as_secs_f64() * 1e3))
}

fn of_policies(set: &PolicySet, hook: Hook, key: &str) -> Result<Vec<HookCost>, Fault> {
    let mut vm = Vm::new(Arc::clone(&set.program))?;
    let function: Value = vm
        .module(key)?
        .raw_get(hook.function())
        .map_err(|e| crate::vm::sandbox::fault(&e))?;
    if !function.is_function() {
        return Ok(Vec::new());
    }
    let cost = measure(set, &mut |vm, round, session| {
        example::call(vm, hook, &set.bands, round, session)
            .map_or(Ok(()), |result| result.map(|_| ()))
    })?;
    Ok(vec![row(set, hook, key, set.defined[hook as usize], cost)])
}

fn of_engines(set: &PolicySet, hook: Hook) -> Result<Vec<HookCost>, Fault> {
    let defines = |plugin: &EnginePlugin| match hook {
        Hook::EngineMap => plugin.maps,
        Hook::EngineValidate => plugin.validates,
        Hook::EngineCommands => plugin.starts,
        Hook::EngineClassifyError => plugin.classifies_errors,
        Hook::EngineServesHttp => plugin.decides_http,
        _ => false,
    };
    let mut rows = Vec::new();
    for plugin in set.engines.values().filter(|plugin| defines(plugin)) {
        let cost = measure(set, &mut |vm, _, _| {
            example::call_engine(vm, plugin, hook).unwrap_or(Ok(()))
        })?;
        let key = format!("engines/{}.lua", plugin.name);
        rows.push(row(set, hook, &key, true, cost));
    }
    Ok(rows)
}

fn row(set: &PolicySet, hook: Hook, key: &str, called: bool, (ns, cost): (f64, Cost)) -> HookCost {
    let label = set.bundle.files.get(key).map(|file| file.label.clone());
    HookCost {
        hook,
        file: label.unwrap_or_else(|| key.to_owned()),
        called,
        ns,
        interrupts: cost.interrupts,
        bytes: cost.bytes,
        budget: hook.budget(),
    }
}

type Call<'c> = dyn FnMut(&mut Vm, u64, &str) -> Result<(), Fault> + 'c;

/// Time in one VM, interrupts and memory in another, which doesn't collect garbage.
fn measure(set: &PolicySet, call: &mut Call<'_>) -> Result<(f64, Cost), Fault> {
    let mut vm = Vm::new(Arc::clone(&set.program))?;
    vm.measure();
    let mut cost = Cost::default();
    let mut least = usize::MAX;
    for round in 0..COST_CALLS {
        call(&mut vm, round, &format!("session-{round}"))?;
        cost = vm.cost();
        // What grows now and then, such as a stack, is not the script's.
        least = least.min(cost.bytes);
    }
    cost.bytes = least;
    let mut vm = Vm::new(Arc::clone(&set.program))?;
    // The thread's own time: what others on the machine do is not the hook's.
    let mut batch = |calls: u64| -> Result<Duration, Fault> {
        let start = thread_cpu_time();
        for round in 0..calls {
            call(&mut vm, round, "session")?;
        }
        Ok(thread_cpu_time().saturating_sub(start))
    };
    let mut calls = 16;
    while batch(calls)? < BATCH_TIME && calls < 1 << 20 {
        calls *= 2;
    }
    let mut ns = [0.0; BATCHES];
    for ns in &mut ns {
        *ns = batch(calls)?.as_secs_f64() * 1e9 / calls as f64;
    }
    ns.sort_by(f64::total_cmp);
    Ok((ns[BATCHES / 2], cost))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hook_is_either_measured_or_said_to_be_native() {
        let report = bench_dir(None).unwrap();
        for hook in Hook::ALL {
            let measured = report.hooks.iter().any(|row| row.hook == hook);
            assert_ne!(measured, report.native.contains(&hook), "{}", hook.name());
        }
        let score = report
            .hooks
            .iter()
            .find(|row| row.hook == Hook::PlacementScore)
            .unwrap();
        assert!(score.ns > 0.0 && score.bytes > 0 && score.interrupts > 0);
        assert!(!score.called, "a native rule equals the embedded file");
        let commands = report
            .hooks
            .iter()
            .find(|row| row.hook == Hook::EngineCommands)
            .unwrap();
        assert!(commands.bytes > 0 && commands.interrupts > 0 && commands.called);
        assert!(commands.budget.used(commands) < 1.0);
    }
}
