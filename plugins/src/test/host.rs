//! What the functions of `llmgw.test` share while a file runs: the set under test, and what the running case did so far.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use mlua::{Error, Function, Lua, Table, Value};
use serde_json::Value as Json;

use crate::error::{ErrorKind, did_you_mean};
use crate::hooks::Hook;
use crate::set::PolicySet;
use crate::test::choices::Choices;
use crate::test::fleet::{Answer, Fleet, Kernels};
use crate::test::plain::Plain;
use crate::test::report::TestFailure;
use crate::vm::sandbox::cut;
use crate::vm::{Injected, inject};

/// Decisions that a failing case shows.
const DECISIONS_SHOWN_MAX: usize = 3;
/// Lines of one decision.
const STORY_LINES_MAX: usize = 16;
/// Cases in a file.
pub(crate) const CASES_MAX: usize = 1000;
/// Frames that are searched for the test's own line.
const FRAMES_MAX: usize = 64;
/// Lines that an expression may go over.
const EXPRESSION_LINES_MAX: usize = 6;
/// What is shown of it.
const EXPRESSION_MAX_BYTES: usize = 300;
/// Maps in a kernel's answer whose keys are names of nodes and such: one that is not there is nil.
const FREE_MAPS: [&str; 5] = ["refused", "parts", "labels", "env", "gpus"];
/// A fleet's file.
const FLEET_MAX_BYTES: u64 = 64 << 20;

/// A `t.case` or `t.property` as the file declared it.
#[derive(Clone)]
pub(crate) struct Declared {
    pub(crate) name: String,
    pub(crate) line: Option<u32>,
    /// How many inputs a property tries; `None`: a plain case.
    pub(crate) inputs: Option<u64>,
    pub(crate) function: Function,
}

/// The test file that runs.
#[derive(Clone, Debug)]
pub(crate) struct TestFile {
    /// `engines/vllm_test.lua`.
    pub(crate) key: String,
    /// What messages call it.
    pub(crate) label: String,
    pub(crate) text: String,
}

/// Shared by all functions of one test VM.
pub(crate) struct Host {
    pub(crate) set: Arc<PolicySet>,
    pub(crate) kernels: Option<Arc<dyn Kernels>>,
    /// Where `fleets/` and `golden/` are.
    pub(crate) dir: Option<PathBuf>,
    pub(crate) file: TestFile,
    pub(crate) update_golden: bool,
    /// Cases may be declared: the file itself runs.
    pub(crate) declaring: Cell<bool>,
    pub(crate) declared: RefCell<Vec<Declared>>,
    pub(crate) case: RefCell<Case>,
    pub(crate) choices: RefCell<Choices>,
    /// Fleets that were read, by name: each use gets a copy.
    fleets: RefCell<HashMap<String, Box<dyn Fleet>>>,
    /// Codes that nodes were refused with, by any case.
    pub(crate) refusals: RefCell<BTreeSet<String>>,
    pub(crate) golden_written: RefCell<Vec<String>>,
    /// Metatables of tables with fixed names, by these names.
    shapes: RefCell<BTreeMap<Vec<String>, Table>>,
}

/// What one run of a case did.
#[derive(Default)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// Its first failed assertion. It fails the case, whatever `pcall` makes of it.
    pub(crate) failure: Option<TestFailure>,
    pub(crate) decisions: Vec<Vec<String>>,
    /// A property's draws, for people.
    pub(crate) draws: Vec<String>,
    /// Draws inside of draws are not shown.
    pub(crate) draw_depth: usize,
    pub(crate) goldens: u32,
    injected: Injected,
}

impl Host {
    pub(crate) fn new(
        set: Arc<PolicySet>,
        kernels: Option<Arc<dyn Kernels>>,
        dir: Option<PathBuf>,
        file: TestFile,
        update_golden: bool,
    ) -> Host {
        Host {
            set,
            kernels,
            dir,
            file,
            update_golden,
            declaring: Cell::new(true),
            declared: RefCell::default(),
            case: RefCell::default(),
            choices: RefCell::default(),
            fleets: RefCell::default(),
            refusals: RefCell::default(),
            golden_written: RefCell::default(),
            shapes: RefCell::default(),
        }
    }

    /// Before each case, and before each input of a property.
    pub(crate) fn begin(&self, name: &str, choices: Choices) {
        *self.case.borrow_mut() = Case {
            name: name.to_owned(),
            ..Case::default()
        };
        *self.choices.borrow_mut() = choices;
        self.set.last_good.forget();
        inject(self.set.id, Injected::default());
    }

    /// An error with the place in the test file where it happened.
    pub(crate) fn raise(&self, lua: &Lua, reason: &str) -> Error {
        match self.line(lua) {
            Some(line) => Error::RuntimeError(format!("{}:{line}: {reason}", self.file.label)),
            None => Error::RuntimeError(reason.to_owned()),
        }
    }

    /// The line of the test file that is being run.
    pub(crate) fn line(&self, lua: &Lua) -> Option<u32> {
        (0..FRAMES_MAX).find_map(|level| {
            lua.inspect_stack(level, |frame| {
                let own = frame.source().short_src.as_deref() == Some(&self.file.label);
                frame.current_line().filter(|_| own).map(|line| line as u32)
            })
            .flatten()
        })
    }

    /// Records a failed assertion, and gives the error that ends the case.
    pub(crate) fn fail(&self, lua: &Lua, failure: TestFailure) -> Error {
        let line = self.line(lua);
        let error = self.raise(lua, &failure.message);
        let mut case = self.case.borrow_mut();
        if case.failure.is_none() {
            case.failure = Some(TestFailure {
                file: self.file.label.clone(),
                line,
                expression: line.and_then(|line| self.expression(line)),
                ..failure
            });
        }
        error
    }

    /// The source at a line, up to where its brackets close.
    pub(crate) fn expression(&self, line: u32) -> Option<String> {
        let mut lines = self.file.text.lines().skip(line as usize - 1);
        let mut text = lines.next()?.trim().to_owned();
        for next in lines.take(EXPRESSION_LINES_MAX) {
            let count = |open: char, close: char| {
                text.matches(open).count() as i64 - text.matches(close).count() as i64
            };
            let closes_later = text.ends_with("function(g)") || text.ends_with("function()");
            if closes_later || (count('(', ')') <= 0 && count('{', '}') <= 0) {
                break;
            }
            text.push(' ');
            text.push_str(next.trim());
        }
        Some(cut(&text, EXPRESSION_MAX_BYTES))
    }

    /// Takes note of a decision.
    pub(crate) fn decided(&self, answer: &Answer) {
        let mut case = self.case.borrow_mut();
        if case.decisions.len() == DECISIONS_SHOWN_MAX {
            case.decisions.remove(0);
        }
        let mut story: Vec<String> = answer.story.iter().take(STORY_LINES_MAX).cloned().collect();
        if answer.story.len() > story.len() {
            story.push(format!("and {} more", answer.story.len() - story.len()));
        }
        case.decisions.push(story);
        let refused = answer.value.get("refused").and_then(Json::as_object);
        for refusal in refused.into_iter().flat_map(|refused| refused.values()) {
            let reasons = refusal.get("reasons").and_then(Json::as_array);
            for reason in reasons.into_iter().flatten().chain([refusal]) {
                if let Some(code) = reason.get("code").and_then(Json::as_str) {
                    self.refusals.borrow_mut().insert(code.to_owned());
                }
            }
        }
    }

    /// From here to the end of the case the hook fails like this. False: Lua doesn't answer it, so it can't fail.
    pub(crate) fn inject(&self, hook: &str, kind: &str) -> Result<bool, String> {
        let Some(found) = Hook::ALL.into_iter().find(|known| known.name() == hook) else {
            let hint = did_you_mean(hook, Hook::ALL.iter().map(|hook| hook.name()));
            return Err(format!("there is no hook '{hook}'{hint}"));
        };
        let Some(kind) = ErrorKind::ALL
            .into_iter()
            .find(|known| known.name() == kind)
        else {
            let hint = did_you_mean(kind, ErrorKind::ALL.iter().map(|kind| kind.name()));
            return Err(format!("there is no kind of error '{kind}'{hint}"));
        };
        let mut case = self.case.borrow_mut();
        case.injected = case.injected.with(found, kind);
        inject(self.set.id, case.injected);
        Ok(self.set.defines(found))
    }

    /// A copy of a fleet: the directory's, else the one that ships with llmgw.
    pub(crate) fn fleet(&self, name: &str) -> Result<Box<dyn Fleet>, String> {
        if let Some(fleet) = self.fleets.borrow().get(name) {
            return Ok(fleet.boxed_clone());
        }
        let Some(kernels) = &self.kernels else {
            return Err("fleets can't be tried here: there is no placement to drive".to_owned());
        };
        let file = self.fleet_file(name)?;
        let text = match file {
            Some(text) => text,
            None => kernels.fleet_text(name).ok_or_else(|| {
                let known = self.fleet_names(kernels.as_ref());
                let hint = did_you_mean(name, known.iter().map(String::as_str));
                let known = known.join(", ");
                format!("there is no fleet '{name}'{hint}; there are {known}")
            })?,
        };
        let fleet = kernels
            .open(&text)
            .map_err(|reason| format!("fleets/{name}.json: {reason}"))?;
        let copy = fleet.boxed_clone();
        self.fleets.borrow_mut().insert(name.to_owned(), fleet);
        Ok(copy)
    }

    fn fleet_file(&self, name: &str) -> Result<Option<String>, String> {
        let is_name = !name.is_empty()
            && name.len() <= 64
            && name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
        if !is_name {
            return Err(format!("'{name}' can't be the name of a fleet"));
        }
        let Some(dir) = &self.dir else {
            return Ok(None);
        };
        let path = dir.join("fleets").join(format!("{name}.json"));
        let unreadable = |e: std::io::Error| format!("{} can't be read: {e}", path.display());
        match std::fs::metadata(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(unreadable(e)),
            Ok(metadata) if !metadata.is_file() || metadata.len() > FLEET_MAX_BYTES => {
                Err(format!(
                    "{} is no file of at most {FLEET_MAX_BYTES} bytes",
                    path.display()
                ))
            }
            Ok(_) => std::fs::read_to_string(&path).map(Some).map_err(unreadable),
        }
    }

    fn fleet_names(&self, kernels: &dyn Kernels) -> Vec<String> {
        let mut names = kernels.fleet_names();
        let files = self.dir.as_ref().map(|dir| dir.join("fleets"));
        let entries = files.and_then(|files| std::fs::read_dir(files).ok());
        for entry in entries.into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Some(name) = name.strip_suffix(".json") {
                names.push(name.to_owned());
            }
        }
        names.sort();
        names.dedup();
        names
    }

    /// A kernel's answer as a table that refuses misspelt names.
    pub(crate) fn strict(self: &Rc<Host>, lua: &Lua, json: &Json) -> mlua::Result<Value> {
        self.strict_in(lua, json, false)
    }

    fn strict_in(self: &Rc<Host>, lua: &Lua, json: &Json, free: bool) -> mlua::Result<Value> {
        match json {
            Json::Object(fields) => {
                let table = lua.create_table()?;
                for (name, value) in fields {
                    let free = FREE_MAPS.contains(&name.as_str());
                    table.raw_set(name.as_str(), self.strict_in(lua, value, free)?)?;
                }
                if !free {
                    let names: Vec<String> = fields.keys().cloned().collect();
                    table.set_metatable(Some(self.shape(lua, names)?))?;
                }
                Ok(Value::Table(table))
            }
            Json::Array(items) => {
                let items = items.iter().map(|item| self.strict_in(lua, item, false));
                let list = lua.create_sequence_from(items.collect::<mlua::Result<Vec<_>>>()?)?;
                Ok(Value::Table(list))
            }
            leaf => Plain::of_json(leaf).lua(lua),
        }
    }

    fn shape(self: &Rc<Host>, lua: &Lua, names: Vec<String>) -> mlua::Result<Table> {
        if let Some(shape) = self.shapes.borrow().get(&names) {
            return Ok(shape.clone());
        }
        let shape = lua.create_table()?;
        let (host, known) = (Rc::clone(self), names.clone());
        let index = lua.create_function(move |lua, (_, name): (Table, Value)| {
            let name = match &name {
                Value::String(name) => name.to_string_lossy(),
                other => crate::vm::sandbox::type_name(other).to_owned(),
            };
            if known.contains(&name) {
                return Ok(Value::Nil);
            }
            let hint = did_you_mean(&name, known.iter().map(String::as_str));
            Err(host.raise(lua, &format!("no field '{name}'{hint}")))
        })?;
        shape.raw_set("__index", index)?;
        shape.raw_set("__metatable", false)?;
        self.shapes.borrow_mut().insert(names, shape.clone());
        Ok(shape)
    }
}
