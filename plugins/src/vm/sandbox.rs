//! A closed Luau VM: the globals that policies may have and no others, bounded memory, one budget.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use mlua::chunk::ChunkMode;
use mlua::{Error, Function, Lua, LuaOptions, MultiValue, StdLib, Table, Value};

use crate::error::{ErrorKind, Fault, did_you_mean};
use crate::vm::budget::{Budget, Limit};
use crate::vm::crossing::Crossing;

/// Memory of one VM.
pub const VM_MAX_BYTES: usize = 16 * 1024 * 1024;
/// A VM that still holds this much after a call is replaced, since the next call could fail for no fault of its own.
const VM_KEEP_MAX_BYTES: usize = 12 * 1024 * 1024;
/// An error message is cut here.
const MESSAGE_MAX_BYTES: usize = 500;
/// `llmgw.log` writes at most this many lines a second, in the whole process.
const LOG_LINES_MAX_S: u64 = 10;

/// A file of a policy set, compiled.
#[derive(Debug)]
pub(crate) struct Module {
    /// What error messages call it: the label of its source file.
    pub(crate) label: String,
    /// Luau bytecode that this process compiled; no other is ever loaded.
    pub(crate) bytecode: Vec<u8>,
}

/// The compiled files of one policy set, shared by all VMs.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) generation: u64,
    /// By key, e.g. `lib/racks.lua`.
    pub(crate) modules: BTreeMap<String, Module>,
    /// The files were compiled to count which lines run.
    pub(crate) coverage: bool,
}

/// How often one line ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LineHits {
    /// From 1.
    pub(crate) line: u32,
    pub(crate) hits: u32,
}

/// A VM with one program.
pub(crate) struct Sandbox {
    pub(crate) lua: Lua,
    pub(crate) crossing: Crossing,
    budget: Rc<Budget>,
    context: Rc<Context>,
    /// Makes the metatable of an input from its noun and its fields.
    input_metatable: Function,
    heap_bytes: Function,
}

/// What the VM's own functions need to know about the call that runs.
struct Context {
    program: Arc<Program>,
    /// State of `llmgw.rand`.
    random: Cell<u64>,
    /// `llmgw.log` is allowed.
    log: Cell<bool>,
    /// What `require` has loaded, by key; `None` while it is being loaded.
    loaded: RefCell<HashMap<String, Option<Value>>>,
    /// The files that ran, by key; kept only where lines are counted.
    chunks: RefCell<Vec<(String, Function)>>,
}

impl Context {
    fn keep_chunk(&self, key: &str, chunk: &Function) {
        if self.program.coverage {
            self.chunks
                .borrow_mut()
                .push((key.to_owned(), chunk.clone()));
        }
    }
}

impl Sandbox {
    /// Builds and closes a VM.
    pub(crate) fn new(program: Arc<Program>) -> Result<Sandbox, Fault> {
        Sandbox::build(program).map_err(|e| fault(&e))
    }

    fn build(program: Arc<Program>) -> mlua::Result<Sandbox> {
        let libraries = StdLib::TABLE
            | StdLib::STRING
            | StdLib::MATH
            | StdLib::BIT
            | StdLib::BUFFER
            | StdLib::UTF8;
        let lua = Lua::new_with(libraries, LuaOptions::new())?;
        lua.set_memory_limit(VM_MAX_BYTES)?;
        let context = Rc::new(Context {
            program,
            random: Cell::new(0),
            log: Cell::new(false),
            loaded: RefCell::new(HashMap::new()),
            chunks: RefCell::default(),
        });
        let natives = natives(&lua, &context)?;
        let (input_metatable, heap_bytes): (Function, Function) = lua
            .load(include_str!("prelude.lua"))
            .set_name("=llmgw")
            .set_mode(ChunkMode::Text)
            .call(natives)?;
        let llmgw: Table = lua.globals().get("llmgw")?;
        llmgw.set_readonly(true);
        lua.sandbox(true)?;
        // Without this, sandboxed scripts could keep state in globals of their own.
        lua.globals().set_readonly(true);
        let budget = Budget::install(&lua);
        let crossing = Crossing::new(&lua)?;
        Ok(Sandbox {
            lua,
            crossing,
            budget,
            context,
            input_metatable,
            heap_bytes,
        })
    }

    /// Runs a file and gives what it returned.
    pub(crate) fn run_module(&self, key: &str, limit: Limit) -> Result<Value, Fault> {
        let Some(module) = self.context.program.modules.get(key) else {
            return Err(Fault::new(
                ErrorKind::Error,
                format!("there is no file {key}"),
            ));
        };
        let chunk = module_function(&self.lua, module).map_err(|e| fault(&e))?;
        self.context.keep_chunk(key, &chunk);
        self.call(&chunk, (), limit, 0)
    }

    /// The lines of every file that ran here, by file, with how often each of them did.
    pub(crate) fn lines_run(&self) -> Vec<(String, Vec<LineHits>)> {
        let chunks = self.context.chunks.borrow();
        let lines_of = |chunk: &Function| {
            let mut lines = Vec::new();
            // Luau reports each function of the file; -1 marks lines without code of that function.
            chunk.coverage(|info| {
                for (line, hits) in info.hits.iter().enumerate().filter(|(_, hits)| **hits >= 0) {
                    lines.push(LineHits {
                        line: line as u32,
                        hits: *hits as u32,
                    });
                }
            });
            lines
        };
        chunks
            .iter()
            .map(|(key, chunk)| (key.clone(), lines_of(chunk)))
            .collect()
    }

    /// Calls a function under a budget and gives its first value.
    pub(crate) fn call(
        &self,
        function: &Function,
        args: impl mlua::IntoLuaMulti,
        limit: Limit,
        seed: u64,
    ) -> Result<Value, Fault> {
        let mut values = self.call_multi(function, args, limit, seed)?;
        Ok(values.pop_front().unwrap_or(Value::Nil))
    }

    /// Calls a function under a budget and gives all its values.
    pub(crate) fn call_multi(
        &self,
        function: &Function,
        args: impl mlua::IntoLuaMulti,
        limit: Limit,
        seed: u64,
    ) -> Result<MultiValue, Fault> {
        self.under_budget(limit, seed, || function.call::<MultiValue>(args))
    }

    /// Gives the script inside of `call` a budget.
    pub(crate) fn under_budget<R>(
        &self,
        limit: Limit,
        seed: u64,
        call: impl FnOnce() -> mlua::Result<R>,
    ) -> Result<R, Fault> {
        self.context.random.set(seed);
        self.context.log.set(limit != Limit::Count);
        self.budget.start(limit);
        let result = call();
        let exceeded = self.budget.exceeded().then(|| self.budget.reason());
        self.budget.end();
        if let Some(reason) = exceeded {
            let message = match result {
                Err(e) => Some(fault(&e).message).filter(|m| m.ends_with(&reason)),
                Ok(_) => None,
            };
            return Err(Fault::new(ErrorKind::Budget, message.unwrap_or(reason)));
        }
        result.map_err(|e| fault(&e))
    }

    /// Interrupts that the last call used.
    pub(crate) fn interrupts(&self) -> u64 {
        self.budget.used()
    }

    /// Bytes of all live objects and of garbage that is not collected yet.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.heap_bytes
            .call::<f64>(())
            .map_or(0, |bytes| bytes as usize)
    }

    /// Too much garbage, or kept state, to trust the next call to this VM.
    pub(crate) fn is_bloated(&self) -> bool {
        self.lua.used_memory() > VM_KEEP_MAX_BYTES
    }

    /// The metatable for inputs of one kind.
    pub(crate) fn input_metatable(&self, noun: &str, fields: &[&str]) -> mlua::Result<Table> {
        self.input_metatable.call((noun, fields.to_vec()))
    }
}

/// What the prelude builds the globals from.
fn natives(lua: &Lua, context: &Rc<Context>) -> mlua::Result<Table> {
    let natives = lua.create_table()?;
    natives.set("globals", lua.globals())?;
    natives.set("generation", context.program.generation)?;
    let shared = Rc::clone(context);
    natives.set(
        "rand",
        lua.create_function(move |_, ()| Ok(next_random(&shared.random)))?,
    )?;
    let shared = Rc::clone(context);
    natives.set(
        "log",
        lua.create_function(move |_, text: mlua::LuaString| Ok(log(&shared, &text)))?,
    )?;
    let shared = Rc::clone(context);
    natives.set(
        "require",
        lua.create_function(move |lua, name: Value| require(lua, &shared, &name))?,
    )?;
    let no_field = lua.create_function(
        |_, (noun, name, fields): (String, Value, Option<Vec<String>>)| {
            Ok(no_field(
                &noun,
                &name,
                fields.as_deref().unwrap_or_default(),
            ))
        },
    )?;
    natives.set("no_field", no_field)?;
    Ok(natives)
}

/// `no field 'quue' (did you mean 'queued'?)`.
fn no_field(noun: &str, name: &Value, fields: &[String]) -> String {
    match name {
        Value::String(name) => {
            let name = cut(&name.to_string_lossy(), 64);
            let hint = did_you_mean(&name, fields.iter().map(String::as_str));
            format!("no field '{name}'{hint}")
        }
        other => format!("no field of type {} in {noun}", type_name(other)),
    }
}

/// splitmix64: a few ns, good enough to spread requests.
fn next_random(state: &Cell<u64>) -> f64 {
    let next = state.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
    state.set(next);
    let mut z = next;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 11) as f64 / (1u64 << 53) as f64
}

/// Writes a policy's line to the log, or says why not.
fn log(context: &Context, text: &mlua::LuaString) -> Option<&'static str> {
    static LINES: LogLines = LogLines::new();
    // One for all threads: they share the lines.
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    if !context.log.get() {
        return Some("llmgw.log is for tick and decision hooks; this one runs for every request");
    }
    if LINES.admit(START.elapsed().as_secs()) {
        tracing::info!(
            generation = context.program.generation,
            "policy says: {}",
            cut(&text.to_string_lossy(), MESSAGE_MAX_BYTES)
        );
    }
    None
}

/// The present second in the upper half, the lines of it in the lower.
struct LogLines(AtomicU64);

impl LogLines {
    const fn new() -> LogLines {
        LogLines(AtomicU64::new(0))
    }

    /// Whether one more line may be written in this second.
    fn admit(&self, second: u64) -> bool {
        let count = |window: u64| match window >> 32 == second {
            true => window & 0xffff_ffff,
            false => 0,
        };
        let before = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |window| {
                Some((second << 32) | (count(window) + 1))
            });
        before.is_ok_and(|window| count(window) < LOG_LINES_MAX_S)
    }
}

/// `require("lib/x")`: the value, or why not.
fn require(lua: &Lua, context: &Context, name: &Value) -> mlua::Result<(Value, Option<String>)> {
    let refused = |reason: String| Ok((Value::Nil, Some(reason)));
    let Value::String(name) = name else {
        return refused(format!("require takes a name, not a {}", type_name(name)));
    };
    let name = cut(&name.to_string_lossy(), 100);
    let key = format!("{}.lua", name.trim_end_matches(".lua"));
    let program = &context.program;
    let libraries = || {
        program
            .modules
            .keys()
            .filter(|key| key.starts_with("lib/"))
            .map(|key| key.trim_end_matches(".lua"))
    };
    let Some(module) = program
        .modules
        .get(&key)
        .filter(|_| key.starts_with("lib/"))
    else {
        let hint = did_you_mean(&name, libraries());
        return refused(format!(
            "no module '{name}' in the policy directory's lib/{hint}"
        ));
    };
    match context.loaded.borrow().get(&key) {
        Some(Some(value)) => return Ok((value.clone(), None)),
        Some(None) => return refused(format!("'{name}' requires itself")),
        None => {}
    }
    context.loaded.borrow_mut().insert(key.clone(), None);
    let result = module_function(lua, module).and_then(|chunk| {
        context.keep_chunk(&key, &chunk);
        chunk.call::<Value>(())
    });
    match result {
        Ok(value) => {
            freeze(&value);
            context.loaded.borrow_mut().insert(key, Some(value.clone()));
            Ok((value, None))
        }
        Err(e) => {
            context.loaded.borrow_mut().remove(&key);
            Err(e)
        }
    }
}

/// A returned module is constant: hooks are functions of their arguments.
pub(crate) fn freeze(value: &Value) {
    if let Value::Table(table) = value {
        table.set_readonly(true);
    }
}

fn module_function(lua: &Lua, module: &Module) -> mlua::Result<Function> {
    lua.load(&module.bytecode[..])
        .set_name(format!("@{}", module.label))
        .set_mode(ChunkMode::Binary)
        .into_function()
}

/// Translates what mlua says.
pub(crate) fn fault(error: &Error) -> Fault {
    let mut error = error;
    loop {
        match error {
            Error::CallbackError { cause, .. }
            | Error::WithContext { cause, .. }
            | Error::BadArgument { cause, .. } => {
                error = cause;
            }
            Error::MemoryError(_) => {
                let message = format!("needs more than {} MiB of memory", VM_MAX_BYTES >> 20);
                return Fault::new(ErrorKind::Memory, message);
            }
            Error::RuntimeError(message) | Error::SyntaxError { message, .. } => {
                // Luau's own message for a failed allocation, where it was raised again as a plain error.
                let kind = if message.ends_with("not enough memory") {
                    ErrorKind::Memory
                } else {
                    ErrorKind::Error
                };
                return Fault::new(kind, without_traceback(message));
            }
            other => return Fault::new(ErrorKind::Error, without_traceback(&other.to_string())),
        }
    }
}

fn without_traceback(message: &str) -> String {
    let message = message
        .split("\nstack traceback:")
        .next()
        .unwrap_or(message);
    cut(message.trim_end(), MESSAGE_MAX_BYTES)
}

/// What Lua calls the value's type: it has one type of numbers only.
pub(crate) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Integer(_) => "number",
        other => other.type_name(),
    }
}

/// At most `max` bytes of it, on a character's edge.
pub(crate) fn cut(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let mut end = max;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}

#[cfg(test)]
mod tests;
