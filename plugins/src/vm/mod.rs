//! One thread's VM for one policy set: its functions, found once, and its input rows, kept.

pub(crate) mod budget;
pub(crate) mod crossing;
mod rows;
pub(crate) mod sandbox;
pub(crate) mod stock;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use mlua::{Function, IntoLuaMulti, Table, Value};

use crate::error::{ErrorKind, Fault};
use crate::hooks::Hook;
use crate::hooks::views::{ReplicaView, RequestView, TenantView, View};
use crate::vm::budget::{LOAD_MAX, Limit};
use crate::vm::crossing::{Answer, Arg, Changes, FunctionAt, Page};
use crate::vm::rows::{ReplicaRows, Row, Shape};
use crate::vm::sandbox::{LineHits, Program, Sandbox, fault, freeze};
use crate::vm::stock::Serving;

thread_local! {
    /// A policy set under test, and the faults that its hooks raise instead of running.
    static INJECTED: Cell<(u64, Injected)> = const { Cell::new((0, Injected(0))) };
    /// VMs that this thread has built, and files that it ran in them: what a request must not pay for.
    #[cfg(test)]
    static BUILT: Cell<u64> = const { Cell::new(0) };
}

/// See [`BUILT`].
#[cfg(test)]
pub(crate) fn built() -> u64 {
    BUILT.get()
}

/// A file and how often its lines ran.
pub(crate) type FileLines = (String, Vec<LineHits>);

/// Faults by hook, four bits each: 0 is none, else the position of the kind in [`ErrorKind::ALL`] plus one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Injected(u64);

impl Injected {
    pub(crate) fn with(self, hook: Hook, kind: ErrorKind) -> Injected {
        let position = ErrorKind::ALL.iter().position(|known| *known == kind);
        let (bits, shift) = (position.map_or(0, |at| at as u64 + 1), hook as u64 * 4);
        Injected(self.0 & !(0xf << shift) | bits << shift)
    }

    fn fault(self, hook: Hook) -> Option<Fault> {
        let bits = (self.0 >> (hook as u64 * 4)) & 0xf;
        let kind = *ErrorKind::ALL.get((bits as usize).checked_sub(1)?)?;
        Some(Fault::new(
            kind,
            format!("a test injected a fault of kind {}", kind.name()),
        ))
    }
}

/// From now on this thread's hooks of one policy set raise these faults instead of running.
pub(crate) fn inject(set: u64, faults: Injected) {
    INJECTED.set((set, faults));
}

fn injected(set: u64) -> Injected {
    let (injected_into, faults) = INJECTED.get();
    if injected_into == set {
        faults
    } else {
        Injected(0)
    }
}

/// A VM and what is kept in it.
pub(crate) struct Vm {
    sandbox: Sandbox,
    /// What the files returned, by key.
    modules: HashMap<String, Table>,
    /// Functions of the policy files, by hook.
    functions: [Option<FunctionAt>; Hook::ALL.len()],
    /// Functions of engine plugins, by engine and hook.
    engine_functions: HashMap<(String, Hook), Function>,
    inputs: Inputs,
    /// What the next call has to write into the inputs.
    changes: Changes,
    /// What the last call returned.
    page: Page,
    /// Set while calls are measured, which costs time: what the last one took.
    measured: Option<Cost>,
    /// What a test put in the place of hooks.
    injected: Injected,
    /// Inputs could not be written, and hold nobody knows what.
    spoiled: bool,
}

/// What one call took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) interrupts: u64,
    /// Memory that it allocated, inputs left out.
    pub(crate) bytes: usize,
}

/// The tables that hooks get.
pub(crate) struct Inputs {
    pub(crate) request: Input,
    pub(crate) tenant: Input,
    pub(crate) usage: Input,
    pub(crate) pool: Input,
    pub(crate) job: Input,
    pub(crate) node: Input,
    pub(crate) candidate: Input,
    pub(crate) profile: Input,
    pub(crate) model: Input,
    pub(crate) shard: Input,
    replicas: ReplicaRows,
}

/// One input of a kind of which a call gets one. Made at its first use: most VMs see few kinds.
#[derive(Default)]
pub(crate) struct Input(Option<(Shape, Row)>);

/// Where inputs go: the VM, and what its next call has to write.
pub(crate) struct Into<'c> {
    pub(crate) sandbox: &'c Sandbox,
    changes: &'c mut Changes,
}

impl Input {
    /// The input as an argument of the next call, which brings it up to date.
    pub(crate) fn arg<V: View>(
        &mut self,
        into: &mut Into<'_>,
        view: &V,
    ) -> mlua::Result<Arg<'static>> {
        let row = self.refresh(into, view)?;
        Ok(Arg::Row(row.at()))
    }

    /// The input's table, up to date at once.
    pub(crate) fn table<V: View>(&mut self, into: &mut Into<'_>, view: &V) -> mlua::Result<Table> {
        let table = self.refresh(into, view)?.table();
        into.sandbox.crossing.write(into.changes)?;
        Ok(table)
    }

    fn refresh<V: View>(&mut self, into: &mut Into<'_>, view: &V) -> mlua::Result<&Row> {
        let (shape, row) = match &mut self.0 {
            Some(made) => made,
            none => {
                let shape = Shape::of::<V>(into.sandbox)?;
                let row = shape.row(into.sandbox)?;
                none.insert((shape, row))
            }
        };
        row.refresh(&into.sandbox.lua, shape, view, into.changes)?;
        Ok(row)
    }
}

impl Vm {
    pub(crate) fn new(program: Arc<Program>) -> Result<Vm, Fault> {
        #[cfg(test)]
        BUILT.set(BUILT.get() + 1);
        let sandbox = Sandbox::new(program)?;
        let inputs = Inputs::new(&sandbox).map_err(|e| fault(&e))?;
        Ok(Vm {
            sandbox,
            modules: HashMap::new(),
            functions: [const { None }; Hook::ALL.len()],
            engine_functions: HashMap::new(),
            inputs,
            changes: Changes::default(),
            page: Page::default(),
            measured: None,
            injected: Injected(0),
            spoiled: false,
        })
    }

    /// Does what is done once in a VM, for functions that requests' threads call.
    pub(crate) fn warm_up(&mut self, serving: &[Serving]) {
        for serving in serving {
            let found = match serving {
                Serving::Policy(hook) => self.find(*hook).map(drop),
                Serving::Engine(engine, hook) => self.find_engine(engine, *hook).map(drop),
            };
            if let Err(fault) = found {
                // It worked when the set was checked. The call that needs it tries again, and is where it counts.
                tracing::debug!("a hook is not ready: {fault}");
            }
        }
        let filled: mlua::Result<()> = self.fill(|inputs, into| {
            inputs.request.arg(into, &RequestView::default())?;
            inputs.tenant.arg(into, &TenantView::default())?;
            into.sandbox.crossing.write(into.changes)
        });
        self.spoiled = filled.is_err();
    }

    /// Nothing may be called in it any more.
    fn is_unusable(&self) -> bool {
        self.spoiled || self.sandbox.is_bloated()
    }

    /// The lines of every file that ran here, with how often each of them did; only where lines are counted.
    fn lines_run(&self) -> Vec<FileLines> {
        self.sandbox.lines_run()
    }

    /// From now on calls are measured. Nothing is freed meanwhile, so such a VM is for a few calls.
    pub(crate) fn measure(&mut self) {
        self.sandbox.lua.gc_stop();
        self.measured = Some(Cost::default());
    }

    /// What the last call took, if calls are measured.
    pub(crate) fn cost(&self) -> Cost {
        self.measured.unwrap_or_default()
    }

    /// The table that a file returned; runs it at its first use.
    pub(crate) fn module(&mut self, key: &str) -> Result<&Table, Fault> {
        if !self.modules.contains_key(key) {
            #[cfg(test)]
            BUILT.set(BUILT.get() + 1);
            let value = self.sandbox.run_module(key, Limit::Clock(LOAD_MAX))?;
            freeze(&value);
            let Value::Table(table) = value else {
                let message = format!(
                    "must return a table with `api = 1`, it returned a {}",
                    crate::vm::sandbox::type_name(&value)
                );
                return Err(Fault::new(ErrorKind::Error, message));
            };
            self.modules.insert(key.to_owned(), table);
        }
        self.modules
            .get(key)
            .ok_or_else(|| Fault::new(ErrorKind::Error, "the module is gone"))
    }

    /// Calls a hook of a policy file with whatever `args` makes of the inputs, and gives the first values that it returned.
    pub(crate) fn ask<'a, const ARGS: usize>(
        &mut self,
        hook: Hook,
        limit: Limit,
        seed: u64,
        args: impl FnOnce(&mut Inputs, &mut Into<'_>) -> mlua::Result<[Arg<'a>; ARGS]>,
    ) -> Result<[Answer<'_>; 3], Fault> {
        let (function, args) = self.prepare(hook, args)?;
        let before = self.measured.map(|_| self.sandbox.heap_bytes());
        let (crossing, changes, page) = (&self.sandbox.crossing, &mut self.changes, &mut self.page);
        let result = self
            .sandbox
            .under_budget(limit, seed, || crossing.ask(function, changes, &args, page));
        self.finish(before);
        result.map(|()| self.page.read())
    }

    /// The same for a hook that returns one value, a table perhaps.
    pub(crate) fn call<'a, const ARGS: usize>(
        &mut self,
        hook: Hook,
        limit: Limit,
        seed: u64,
        args: impl FnOnce(&mut Inputs, &mut Into<'_>) -> mlua::Result<[Arg<'a>; ARGS]>,
    ) -> Result<Value, Fault> {
        let (function, args) = self.prepare(hook, args)?;
        let before = self.measured.map(|_| self.sandbox.heap_bytes());
        let (crossing, changes) = (&self.sandbox.crossing, &mut self.changes);
        let result = self
            .sandbox
            .under_budget(limit, seed, || crossing.call(function, changes, &args));
        self.finish(before);
        result
    }

    /// Finds the function, and fills its inputs.
    fn prepare<'a, const ARGS: usize>(
        &mut self,
        hook: Hook,
        args: impl FnOnce(&mut Inputs, &mut Into<'_>) -> mlua::Result<[Arg<'a>; ARGS]>,
    ) -> Result<(FunctionAt, [Arg<'a>; ARGS]), Fault> {
        let function = self.find(hook)?;
        self.raise_injected(hook)?;
        let args = self.fill(args).map_err(|e| fault(&e))?;
        if self.measured.is_some() {
            // Written beforehand, since what that allocates is not the script's.
            let written = self.sandbox.crossing.write(&mut self.changes);
            written.map_err(|e| fault(&e))?;
        }
        Ok((function, args))
    }

    /// Notes whether the inputs are in order, and what the call took where calls are measured.
    fn finish(&mut self, before: Option<usize>) {
        self.spoiled = !self.changes.is_empty();
        if let (Some(cost), Some(before)) = (&mut self.measured, before) {
            cost.interrupts = self.sandbox.interrupts();
            cost.bytes = self.sandbox.heap_bytes().saturating_sub(before);
        }
    }

    /// Lets `args` fill the inputs. They are in order again when everything that it noted is written.
    fn fill<A, E>(
        &mut self,
        args: impl FnOnce(&mut Inputs, &mut Into<'_>) -> Result<A, E>,
    ) -> Result<A, E> {
        self.spoiled = true;
        args(
            &mut self.inputs,
            &mut Into {
                sandbox: &self.sandbox,
                changes: &mut self.changes,
            },
        )
    }

    fn raise_injected(&self, hook: Hook) -> Result<(), Fault> {
        match self.injected.fault(hook) {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// Looks a policy file's function up once.
    fn find(&mut self, hook: Hook) -> Result<FunctionAt, Fault> {
        if let Some(function) = self.functions[hook as usize] {
            return Ok(function);
        }
        let key = hook.file().unwrap_or_default();
        let function: Value = self
            .module(&key)?
            .raw_get(hook.function())
            .map_err(|e| fault(&e))?;
        let Value::Function(function) = function else {
            return Err(Fault::new(
                ErrorKind::Error,
                format!("{} is no function", hook.name()),
            ));
        };
        let function = self.sandbox.crossing.add_function(&function);
        let function = function.map_err(|e| fault(&e))?;
        self.functions[hook as usize] = Some(function);
        Ok(function)
    }

    /// The same for an engine plugin's function.
    fn find_engine(&mut self, engine: &str, hook: Hook) -> Result<Function, Fault> {
        let at = (engine.to_owned(), hook);
        if let Some(function) = self.engine_functions.get(&at) {
            return Ok(function.clone());
        }
        let module = self.module(&format!("engines/{engine}.lua"))?;
        let function: Function = module.raw_get(hook.function()).map_err(|e| fault(&e))?;
        self.engine_functions.insert(at, function.clone());
        Ok(function)
    }

    /// Calls a function of an engine plugin.
    pub(crate) fn call_engine<A: IntoLuaMulti>(
        &mut self,
        engine: &str,
        hook: Hook,
        limit: Limit,
        args: impl FnOnce(&mut Inputs, &mut Into<'_>) -> mlua::Result<A>,
    ) -> Result<Value, Fault> {
        self.raise_injected(hook)?;
        let function = self.find_engine(engine, hook)?;
        let args = self.fill(args).map_err(|e| fault(&e))?;
        // Converted beforehand, since what mlua allocates for that is not the script's.
        let args = args.into_lua_multi(&self.sandbox.lua);
        let args = args.map_err(|e| fault(&e))?;
        let before = self.measured.map(|_| self.sandbox.heap_bytes());
        let result = self.sandbox.call(&function, args, limit, 0);
        self.finish(before);
        result
    }
}

impl Inputs {
    fn new(sandbox: &Sandbox) -> mlua::Result<Inputs> {
        Ok(Inputs {
            request: Input::default(),
            tenant: Input::default(),
            usage: Input::default(),
            pool: Input::default(),
            job: Input::default(),
            node: Input::default(),
            candidate: Input::default(),
            profile: Input::default(),
            model: Input::default(),
            shard: Input::default(),
            replicas: ReplicaRows::new(sandbox)?,
        })
    }

    /// The list of candidates.
    pub(crate) fn replicas(
        &mut self,
        into: &mut Into<'_>,
        views: &[ReplicaView<'_>],
    ) -> mlua::Result<Arg<'static>> {
        self.replicas
            .refresh(into.sandbox, views, into.changes)
            .map(Arg::Row)
    }
}
