//! What is checked before a policy set may answer anything: each file's table, each engine's data, and one call of
//! each hook on an example.

use std::collections::BTreeMap;
use std::sync::Arc;

use mlua::{Table, Value};

use crate::engine::EnginePlugin;
use crate::error::{Fault, PolicyError, did_you_mean};
use crate::hooks::example;
use crate::hooks::returns;
use crate::hooks::{BandSpec, Hook};
use crate::set::bundle::Bundle;
use crate::vm::Vm;
use crate::vm::sandbox::{Program, cut};

/// A line that an error shows is cut here.
const LINE_MAX_BYTES: usize = 200;
/// Engines at most.
const ENGINES_MAX: usize = 64;

/// What a set knows after its check.
pub(crate) struct Checked {
    pub(crate) defined: [bool; Hook::ALL.len()],
    pub(crate) engines: BTreeMap<String, Arc<EnginePlugin>>,
    pub(crate) bands: Vec<BandSpec>,
}

/// Runs every file in a VM of its own, and looks at what it returned.
pub(crate) fn check(bundle: &Bundle, program: &Arc<Program>) -> Result<Checked, PolicyError> {
    let anywhere = |fault: Fault| PolicyError::in_file("(policies)", fault.message);
    let mut vm = Vm::new(Arc::clone(program)).map_err(anywhere)?;
    let mut defined = [false; Hook::ALL.len()];
    let mut engines = BTreeMap::new();
    for (key, file) in &bundle.files {
        if key.ends_with("_test.lua") || key.starts_with("lib/") {
            continue;
        }
        let table = vm
            .module(key)
            .map_err(|fault| located(bundle, &file.label, &fault.message))?
            .clone();
        check_api(bundle, key, &table)?;
        if let Some(name) = key
            .strip_prefix("engines/")
            .and_then(|name| name.strip_suffix(".lua"))
        {
            let plugin = engine(bundle, key, name, &table)?;
            // Unlike policy files, built-in engine plugins are called too: no native rule knows an engine.
            defined[Hook::EngineMap as usize] |= plugin.maps;
            defined[Hook::EngineValidate as usize] |= plugin.validates;
            defined[Hook::EngineCommands as usize] |= plugin.starts;
            defined[Hook::EngineClassifyError as usize] |= plugin.classifies_errors;
            defined[Hook::EngineServesHttp as usize] |= plugin.decides_http;
            if !file.built_in {
                example::examine_engine(&mut vm, &plugin)
                    .map_err(|(hook, fault)| refused_hook(bundle, key, hook, &fault))?;
            }
            engines.insert(name.to_owned(), Arc::new(plugin));
        } else {
            for hook in functions(bundle, key, &table)? {
                defined[hook as usize] = !file.built_in;
            }
        }
    }
    if engines.len() > ENGINES_MAX {
        return Err(PolicyError::in_file(
            "engines",
            format!("more than {ENGINES_MAX} engines"),
        ));
    }
    let bands = example::examine(&mut vm, &defined).map_err(|(hook, fault)| {
        refused_hook(bundle, &hook.file().unwrap_or_default(), hook, &fault)
    })?;
    Ok(Checked {
        defined,
        engines,
        bands,
    })
}

/// Every file says which contract it was written for.
fn check_api(bundle: &Bundle, key: &str, table: &Table) -> Result<(), PolicyError> {
    let api: Value = table.raw_get("api").unwrap_or(Value::Nil);
    match returns::number(&api, "api") {
        Ok(1.0) => Ok(()),
        Ok(other) => Err(at_word(
            bundle,
            key,
            "api",
            format!("`api` is {other}, this llmgw knows 1"),
        )),
        Err(_) => Err(at_word(
            bundle,
            key,
            "api",
            "the returned table needs `api = 1`".to_owned(),
        )),
    }
}

/// The hooks that a policy file defines. Anything else in its table is a mistake.
fn functions(bundle: &Bundle, key: &str, table: &Table) -> Result<Vec<Hook>, PolicyError> {
    let known: Vec<Hook> = Hook::ALL
        .into_iter()
        .filter(|hook| hook.file().as_deref() == Some(key))
        .collect();
    let mut found = Vec::new();
    for pair in table.pairs::<Value, Value>() {
        let (name, value) = pair.map_err(|e| located(bundle, key, &e.to_string()))?;
        let Value::String(name) = &name else {
            let reason = format!(
                "a key of type {} makes no sense in the returned table",
                crate::vm::sandbox::type_name(&name)
            );
            return Err(at_word(bundle, key, "return", reason));
        };
        let name = cut(&name.to_string_lossy(), 64);
        if name == "api" {
            continue;
        }
        let Some(hook) = known.iter().find(|hook| hook.function() == name) else {
            let hint = did_you_mean(&name, known.iter().map(|hook| hook.function()));
            return Err(at_word(
                bundle,
                key,
                &name,
                format!("unknown hook '{name}'{hint}"),
            ));
        };
        if !value.is_function() {
            let reason = format!(
                "hook '{name}' is a {}, a function is needed",
                crate::vm::sandbox::type_name(&value)
            );
            return Err(at_word(bundle, key, &name, reason));
        }
        found.push(*hook);
    }
    Ok(found)
}

fn engine(
    bundle: &Bundle,
    key: &str,
    name: &str,
    table: &Table,
) -> Result<EnginePlugin, PolicyError> {
    EnginePlugin::read(name, table).map_err(|error| at_word(bundle, key, &error.key, error.reason))
}

/// A hook failed on the example. The message may name the line; an unknown name is looked up in the text.
fn refused_hook(bundle: &Bundle, key: &str, hook: Hook, fault: &Fault) -> PolicyError {
    let label = bundle
        .files
        .get(key)
        .map_or(key, |file| file.label.as_str());
    let error = located(bundle, label, &fault.message);
    if error.line.is_some() {
        return error;
    }
    // Messages put the name that they are about in quotes.
    let word = fault.message.split('\'').nth(1).unwrap_or(hook.function());
    let error = at_word(bundle, key, word, fault.message.clone());
    if error.line.is_some() {
        error
    } else {
        at_word(bundle, key, hook.function(), fault.message.clone())
    }
}

/// An error about a word in a file: the first line that has it, comments left out.
pub(crate) fn at_word(bundle: &Bundle, key: &str, word: &str, reason: String) -> PolicyError {
    let Some(file) = bundle.files.get(key) else {
        return PolicyError::in_file(key, reason);
    };
    let line = file
        .text
        .lines()
        .position(|line| has_word(line.split("--").next().unwrap_or(line), word));
    let mut error = PolicyError::in_file(&file.label, reason);
    if let Some(at) = line {
        error.line = Some(at as u32 + 1);
        error.text = line_text(&file.text, at);
    }
    error
}

fn has_word(line: &str, word: &str) -> bool {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    !word.is_empty()
        && line.match_indices(word).any(|(at, _)| {
            !is_part(line[..at].chars().next_back())
                && !is_part(line[at + word.len()..].chars().next())
        })
}

/// Takes `file:line: reason` apart, if the message begins with one of the bundle's files; else it is about `label`.
pub(crate) fn located(bundle: &Bundle, label: &str, message: &str) -> PolicyError {
    for file in bundle.files.values() {
        let Some(rest) = message.strip_prefix(&file.label) else {
            continue;
        };
        let Some(rest) = rest.strip_prefix(':') else {
            continue;
        };
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        if let (Ok(line), Some(reason)) = (
            rest[..digits].parse::<u32>(),
            rest[digits..].strip_prefix(':'),
        ) {
            let text = line_text(&file.text, (line as usize).saturating_sub(1));
            return PolicyError {
                file: file.label.clone(),
                line: Some(line),
                reason: reason.trim().to_owned(),
                text,
            };
        }
        return PolicyError::in_file(&file.label, rest.trim());
    }
    PolicyError::in_file(label, message)
}

fn line_text(text: &str, at: usize) -> Option<String> {
    text.lines()
        .nth(at)
        .map(|line| cut(line.trim(), LINE_MAX_BYTES))
}
