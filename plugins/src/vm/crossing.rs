//! One protected call into Luau that writes the inputs which changed, calls the hook, and reads what it returned.
//!
//! The only unsafe code on a hook's way. mlua alone enters a protected call, and allocates two closures for it, for every
//! field that is written, and makes a handle of every value that comes back: 30 fields change in a call of `routing.rank`,
//! and that took twice as long as everything else.
//!
//! What must stay true:
//! - [`enter`] is called by [`Crossing::enter`] only, with a frame that outlives the call. No script can get at it: it is in no
//!   table that a script sees, and there is no `debug` library.
//! - Luau raises errors by unwinding through `enter` (out of memory, or the hook's own), so nothing in it has a destructor, and
//!   it doesn't panic: it indexes nothing of Rust's.
//! - Positions in [`Crossing::held`] come from its `add_…` functions, which say what is there, and nothing is taken out again.
//!   They are of use in their own VM only, which keeps them.
//! - Changes that are left after a call could not be written. A row is then half written and unlocked: its VM is not used again.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};

use mlua::{Function, LightUserData, Lua, Table, Value, ffi};

use crate::vm::sandbox::cut;

/// An input table of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowAt(c_int);

/// The name of a field.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NameAt(c_int);

/// A hook's function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FunctionAt(c_int);

/// Where in a table.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Key {
    /// Under a name.
    Name(NameAt),
    /// In a list, from 1.
    At(c_int),
}

/// What is put there.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Written {
    Nil,
    Flag(bool),
    Number(f64),
    /// Another input table.
    Row(RowAt),
    /// A part of [`Changes::texts`]; made by [`Changes::push_text`] only.
    Text(TextAt),
}

/// A part of [`Changes::texts`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextAt {
    start: usize,
    bytes: usize,
}

/// A new value for one field of one table.
#[derive(Clone, Copy, Debug)]
struct Write {
    row: RowAt,
    key: Key,
    value: Written,
}

/// What changed since the last call. Kept, so that its buffers are.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    writes: Vec<Write>,
    texts: Vec<u8>,
}

impl Changes {
    pub(crate) fn push(&mut self, row: RowAt, key: Key, value: Written) {
        self.writes.push(Write { row, key, value });
    }

    pub(crate) fn push_text(&mut self, row: RowAt, key: Key, text: &str) {
        let (start, bytes) = (self.texts.len(), text.len());
        self.texts.extend_from_slice(text.as_bytes());
        self.push(row, key, Written::Text(TextAt { start, bytes }));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    fn clear(&mut self) {
        self.writes.clear();
        self.texts.clear();
    }
}

/// An argument of a hook.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg<'a> {
    /// An input table.
    Row(RowAt),
    Number(f64),
    Text(&'a str),
}

/// Arguments at most: those of `routing.rank`. The stack has room for so many.
pub(crate) const ARGS_MAX: usize = 3;
/// Results that anybody looks at: those of `placement.filter`. Further ones are dropped, missing ones are nil.
const ANSWERS: usize = 3;
/// Of a returned text so much is read, which is more than any hook may return.
const TEXT_MAX_BYTES: usize = 512;

/// One value that a hook returned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Answer<'t> {
    Nil,
    Flag(bool),
    Number(f64),
    Text {
        /// At most [`TEXT_MAX_BYTES`] of it.
        beginning: &'t [u8],
        /// All of it.
        bytes: usize,
    },
    /// Its type.
    Other(&'static str),
}

impl Answer<'_> {
    /// What Lua calls its type.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Answer::Nil => "nil",
            Answer::Flag(_) => "boolean",
            Answer::Number(_) => "number",
            Answer::Text { .. } => "string",
            Answer::Other(name) => name,
        }
    }

    /// A text, cut at `max_bytes`.
    pub(crate) fn text(&self, max_bytes: usize) -> Option<String> {
        match self {
            Answer::Text { beginning, .. } => {
                debug_assert!(max_bytes < TEXT_MAX_BYTES);
                Some(cut(&String::from_utf8_lossy(beginning), max_bytes))
            }
            _ => None,
        }
    }
}

/// What [`enter`] notes of a returned value.
#[derive(Clone, Copy, Default)]
enum Noted {
    #[default]
    Nil,
    Flag(bool),
    Number(f64),
    /// So long; its beginning is in [`Page::texts`].
    Text(usize),
    Other(&'static str),
}

/// What the last call returned. Kept, so that its texts are not allocated.
pub(crate) struct Page {
    noted: [Noted; ANSWERS],
    texts: Box<[[u8; TEXT_MAX_BYTES]; ANSWERS]>,
}

impl Default for Page {
    fn default() -> Page {
        Page {
            noted: [Noted::Nil; ANSWERS],
            texts: Box::new([[0; TEXT_MAX_BYTES]; ANSWERS]),
        }
    }
}

impl Page {
    pub(crate) fn read(&self) -> [Answer<'_>; ANSWERS] {
        let mut answers = [Answer::Nil; ANSWERS];
        for ((answer, noted), text) in answers.iter_mut().zip(&self.noted).zip(&*self.texts) {
            *answer = match *noted {
                Noted::Nil => Answer::Nil,
                Noted::Flag(flag) => Answer::Flag(flag),
                Noted::Number(number) => Answer::Number(number),
                Noted::Other(name) => Answer::Other(name),
                Noted::Text(bytes) => Answer::Text {
                    beginning: &text[..bytes.min(TEXT_MAX_BYTES)],
                    bytes,
                },
            };
        }
        answers
    }
}

/// The way into one VM.
pub(crate) struct Crossing {
    enter: Function,
    /// Everything that has a position: input tables, names, functions. One list, since each handle that a call needs costs.
    held: Table,
    held_len: Cell<c_int>,
}

/// What one call hands to [`enter`].
struct Frame<'a> {
    changes: &'a Changes,
    function: Option<FunctionAt>,
    args: &'a [Arg<'a>],
    /// Where results are noted; null: the first of them is returned as it is. Nobody else looks at it meanwhile.
    page: *mut Page,
    /// Every change is in its table, and every table is locked again.
    written: Cell<bool>,
}

impl Crossing {
    pub(crate) fn new(lua: &Lua) -> mlua::Result<Crossing> {
        Ok(Crossing {
            // SAFETY: `enter` keeps to the rules of the head of this file.
            enter: unsafe { lua.create_c_function(enter)? },
            held: lua.create_table()?,
            held_len: Cell::new(0),
        })
    }

    /// Takes names of fields in.
    pub(crate) fn add_names(&self, names: &[&str]) -> mlua::Result<Vec<NameAt>> {
        names
            .iter()
            .map(|name| self.add(*name).map(NameAt))
            .collect()
    }

    /// Takes an input table in.
    pub(crate) fn add_row(&self, table: &Table) -> mlua::Result<RowAt> {
        self.add(table).map(RowAt)
    }

    /// Takes a function in.
    pub(crate) fn add_function(&self, function: &Function) -> mlua::Result<FunctionAt> {
        self.add(function).map(FunctionAt)
    }

    fn add(&self, value: impl mlua::IntoLua) -> mlua::Result<c_int> {
        self.held.raw_push(value)?;
        self.held_len.set(self.held_len.get() + 1);
        Ok(self.held_len.get())
    }

    /// Writes what changed, calls a function, and notes what it returned.
    pub(crate) fn ask<const ARGS: usize>(
        &self,
        function: FunctionAt,
        changes: &mut Changes,
        args: &[Arg<'_>; ARGS],
        page: &mut Page,
    ) -> mlua::Result<()> {
        const { assert!(ARGS <= ARGS_MAX) };
        self.enter(Some(function), changes, args, page).map(drop)
    }

    /// The same for a function of whose results only the first counts, which may be of any type.
    pub(crate) fn call<const ARGS: usize>(
        &self,
        function: FunctionAt,
        changes: &mut Changes,
        args: &[Arg<'_>; ARGS],
    ) -> mlua::Result<Value> {
        const { assert!(ARGS <= ARGS_MAX) };
        self.enter(Some(function), changes, args, std::ptr::null_mut())
    }

    /// Writes what changed.
    pub(crate) fn write(&self, changes: &mut Changes) -> mlua::Result<()> {
        self.enter(None, changes, &[], std::ptr::null_mut())
            .map(drop)
    }

    fn enter(
        &self,
        function: Option<FunctionAt>,
        changes: &mut Changes,
        args: &[Arg<'_>],
        page: *mut Page,
    ) -> mlua::Result<Value> {
        let frame = Frame {
            changes,
            function,
            args,
            page,
            written: Cell::new(false),
        };
        let pointer = LightUserData((&raw const frame).cast_mut().cast::<c_void>());
        let result = self.enter.call((pointer, &self.held));
        if frame.written.get() {
            changes.clear();
        }
        result
    }
}

/// Positions on the stack of `enter`.
const FRAME: c_int = 1;
const HELD: c_int = 2;

/// Runs inside of Luau, in a protected call: `(frame, held)`.
unsafe extern "C-unwind" fn enter(state: *mut ffi::lua_State) -> c_int {
    // SAFETY: `Crossing::enter` is the only caller. Its frame lives until this returns or unwinds, and is only read, but for
    // its cell and its page. A C function has 20 places on its stack: 2 are taken, `write` needs 3 more, and the call one for
    // the function and ARGS_MAX, or ANSWERS for its results.
    unsafe {
        let frame = &*ffi::lua_tolightuserdata(state, FRAME).cast::<Frame<'_>>();
        write(state, frame.changes);
        frame.written.set(true);
        let Some(FunctionAt(function)) = frame.function else {
            return 0;
        };
        ffi::lua_rawgeti_(state, HELD, function);
        for arg in frame.args {
            match *arg {
                Arg::Row(RowAt(row)) => {
                    ffi::lua_rawgeti_(state, HELD, row);
                }
                Arg::Number(number) => ffi::lua_pushnumber(state, number),
                Arg::Text(text) => ffi::lua_pushlstring_(state, text.as_ptr().cast(), text.len()),
            }
        }
        let args = frame.args.len() as c_int;
        if frame.page.is_null() {
            ffi::lua_call(state, args, 1);
            return 1;
        }
        ffi::lua_call(state, args, ANSWERS as c_int);
        let page = &mut *frame.page;
        for (at, (noted, text)) in page.noted.iter_mut().zip(&mut *page.texts).enumerate() {
            *noted = note(state, HELD + 1 + at as c_int, text);
        }
        0
    }
}

/// Puts each change into its table, which is unlocked meanwhile.
///
/// # Safety
/// As `enter`. Positions are of this VM.
unsafe fn write(state: *mut ffi::lua_State, changes: &Changes) {
    let mut open = 0;
    // SAFETY: what is at a position is known from its type; parts of `texts` are those that `push_text` made.
    unsafe {
        for change in &changes.writes {
            let RowAt(row) = change.row;
            if row != open {
                close(state, open);
                ffi::lua_rawgeti_(state, HELD, row);
                ffi::lua_setreadonly(state, -1, 0);
                open = row;
            }
            if let Key::Name(NameAt(name)) = change.key {
                ffi::lua_rawgeti_(state, HELD, name);
            }
            match change.value {
                Written::Nil => ffi::lua_pushnil(state),
                Written::Flag(flag) => ffi::lua_pushboolean(state, flag.into()),
                Written::Number(number) => ffi::lua_pushnumber(state, number),
                Written::Row(RowAt(row)) => {
                    ffi::lua_rawgeti_(state, HELD, row);
                }
                Written::Text(TextAt { start, bytes }) => {
                    let text = changes.texts.as_ptr().add(start);
                    ffi::lua_pushlstring_(state, text.cast(), bytes);
                }
            }
            match change.key {
                Key::Name(_) => ffi::lua_rawset(state, -3),
                Key::At(at) => ffi::lua_rawseti_(state, -2, at),
            }
        }
        close(state, open);
    }
}

/// Locks the table on top of the stack, and takes it off.
///
/// # Safety
/// As `enter`. `open` is 0, or there is a table on top.
unsafe fn close(state: *mut ffi::lua_State, open: c_int) {
    if open != 0 {
        // SAFETY: the caller's promise.
        unsafe {
            ffi::lua_setreadonly(state, -1, 1);
            ffi::lua_pop(state, 1);
        }
    }
}

/// Reads one returned value, and a text's beginning into `text`.
///
/// # Safety
/// As `enter`. There is a value at `at`.
unsafe fn note(state: *mut ffi::lua_State, at: c_int, text: &mut [u8; TEXT_MAX_BYTES]) -> Noted {
    // SAFETY: the caller's promise. A string stays where it is while it is on the stack; names of types are constants.
    unsafe {
        match ffi::lua_type(state, at) {
            ffi::LUA_TNIL | ffi::LUA_TNONE => Noted::Nil,
            ffi::LUA_TBOOLEAN => Noted::Flag(ffi::lua_toboolean(state, at) != 0),
            ffi::LUA_TNUMBER => Noted::Number(ffi::lua_tonumber(state, at)),
            ffi::LUA_TSTRING => {
                let mut bytes = 0;
                let start = ffi::lua_tolstring(state, at, &mut bytes).cast::<u8>();
                let read = bytes.min(TEXT_MAX_BYTES);
                std::ptr::copy_nonoverlapping(start, text.as_mut_ptr(), read);
                Noted::Text(bytes)
            }
            other => {
                let name = CStr::from_ptr(ffi::lua_typename(state, other));
                Noted::Other(name.to_str().unwrap_or("value"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table with one field, and a function that returns what is in it.
    fn field(lua: &Lua) -> (Crossing, RowAt, NameAt, FunctionAt) {
        let crossing = Crossing::new(lua).unwrap();
        let table = lua.create_table().unwrap();
        table.set_readonly(true);
        let row = crossing.add_row(&table).unwrap();
        let names = crossing.add_names(&["x"]).unwrap();
        let function = lua.load("local t = ... return t.x").into_function();
        let function = crossing.add_function(&function.unwrap()).unwrap();
        (crossing, row, names[0], function)
    }

    #[test]
    fn changes_are_in_the_inputs_before_the_function_runs_and_are_then_done_with() {
        let lua = Lua::new();
        let (crossing, row, x, function) = field(&lua);
        let (mut changes, mut page) = (Changes::default(), Page::default());
        let mut seen = |changes: &mut Changes| {
            let args = [Arg::Row(row)];
            crossing.ask(function, changes, &args, &mut page).unwrap();
            format!("{:?}", page.read()[0])
        };
        assert_eq!(seen(&mut changes), "Nil");
        changes.push(row, Key::Name(x), Written::Number(2.0));
        assert_eq!(seen(&mut changes), "Number(2.0)");
        assert!(changes.is_empty());
        changes.push(row, Key::Name(x), Written::Flag(true));
        assert_eq!(seen(&mut changes), "Flag(true)");
        changes.push(row, Key::Name(x), Written::Row(row));
        assert_eq!(seen(&mut changes), "Other(\"table\")");
        changes.push_text(row, Key::Name(x), "");
        assert_eq!(seen(&mut changes), "Text { beginning: [], bytes: 0 }");
        changes.push(row, Key::Name(x), Written::Nil);
        assert_eq!(seen(&mut changes), "Nil");
    }

    #[test]
    fn inputs_are_locked_again_after_they_were_written() {
        let lua = Lua::new();
        let (crossing, row, x, _) = field(&lua);
        let write = lua.load("local t = ... t.x = 1").into_function().unwrap();
        let write = crossing.add_function(&write).unwrap();
        let mut changes = Changes::default();
        changes.push(row, Key::Name(x), Written::Number(2.0));
        let result = crossing.call(write, &mut changes, &[Arg::Row(row)]);
        let message = result.unwrap_err().to_string();
        assert!(
            message.contains("attempt to modify a readonly table"),
            "{message}"
        );
        assert!(changes.is_empty(), "the error is the function's own");
    }

    #[test]
    fn a_change_for_which_there_is_no_memory_is_left_as_such() {
        let lua = Lua::new();
        let (crossing, row, x, function) = field(&lua);
        let mut changes = Changes::default();
        changes.push_text(row, Key::Name(x), &"x".repeat(1 << 20));
        lua.set_memory_limit(lua.used_memory() + (1 << 16)).unwrap();
        let result = crossing.call(function, &mut changes, &[Arg::Row(row)]);
        assert!(
            matches!(result, Err(mlua::Error::MemoryError(_))),
            "{result:?}"
        );
        assert!(!changes.is_empty());
    }
}
