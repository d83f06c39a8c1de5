//! A policy set: all files of one generation, compiled, checked and immutable.

pub(crate) mod bundle;
pub(crate) mod load;
pub(crate) mod reload;
mod store;
pub(crate) mod trip;
mod watch;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use mlua::chunk::Compiler;
use serde::Serialize;

use crate::engine::EnginePlugin;
use crate::error::{Fault, PolicyError};
use crate::hooks::calls::LastGood;
use crate::hooks::{BandSpec, Hook};
use crate::set::bundle::Bundle;
use crate::set::trip::{Ledger, Trips};
use crate::vm::sandbox::{Module, Program};
use crate::vm::stock::{Serving, Stock};

/// Where a policy set came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", content = "path", rename_all = "snake_case")]
pub enum Source {
    /// The embedded files alone.
    BuiltIn,
    /// A directory, with the embedded files where it has none.
    Directory(PathBuf),
    /// The last good set of an earlier run, because the directory is broken.
    LastGood(PathBuf),
}

/// All policies and engine plugins of one generation.
///
/// Hooks run synchronously on the calling thread, in a VM that this thread keeps; a set is pinned by holding its `Arc`. Before
/// a set comes into force there is a VM for every thread that serves requests, so that none of them builds one.
#[derive(Debug)]
pub struct PolicySet {
    /// Unique in the process: tests open several sets with the same generation.
    pub(crate) id: u64,
    pub(crate) generation: u64,
    pub(crate) source: Source,
    pub(crate) loaded_at_ms: u64,
    pub(crate) bundle: Arc<Bundle>,
    pub(crate) program: Arc<Program>,
    /// VMs that no thread has yet.
    pub(crate) stock: Arc<Stock>,
    /// Hooks that Lua answers, see [`PolicySet::defines`].
    pub(crate) defined: [bool; Hook::ALL.len()],
    pub(crate) engines: BTreeMap<String, Arc<EnginePlugin>>,
    /// The bands that a request may be put into; their names change by a reload only.
    pub(crate) bands: Vec<BandSpec>,
    pub(crate) trips: Trips,
    pub(crate) ledger: Arc<Ledger>,
    /// What tick hooks returned last, when it was good.
    pub(crate) last_good: LastGood,
    /// The embedded set, whose own functions answer where nothing else does. `None` in itself.
    pub(crate) fallback: Option<Arc<PolicySet>>,
    /// Its failures are provoked, and not worth a line in the log.
    pub(crate) under_test: bool,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl PolicySet {
    /// The embedded policies alone.
    pub fn built_in() -> Arc<PolicySet> {
        let loaded = PolicySet::load(
            Bundle::built_in(),
            0,
            Source::BuiltIn,
            Arc::new(Ledger::default()),
            None,
        );
        match loaded {
            Ok(set) => Arc::new(set),
            Err(error) => {
                panic!("the built-in policies don't load, which the tests exclude: {error}")
            }
        }
    }

    /// Compiles and checks a bundle. Nothing is shared with other sets but `ledger` and `fallback`.
    pub(crate) fn load(
        bundle: Bundle,
        generation: u64,
        source: Source,
        ledger: Arc<Ledger>,
        fallback: Option<Arc<PolicySet>>,
    ) -> Result<PolicySet, PolicyError> {
        PolicySet::build(bundle, generation, source, ledger, fallback, false)
    }

    /// A set for tests. Lua answers in it also where its file is the embedded one, since that is what is tested; its
    /// failures are nobody's but the tests'.
    pub(crate) fn load_for_tests(
        mut bundle: Bundle,
        source: Source,
        coverage: bool,
    ) -> Result<PolicySet, PolicyError> {
        for file in bundle.files.values_mut() {
            file.built_in = false;
        }
        static FALLBACK: OnceLock<Arc<PolicySet>> = OnceLock::new();
        let built_in = Arc::clone(FALLBACK.get_or_init(PolicySet::built_in));
        let ledger = Arc::new(Ledger::default());
        let mut set = PolicySet::build(bundle, 1, source, ledger, Some(built_in), coverage)?;
        set.under_test = true;
        Ok(set)
    }

    fn build(
        bundle: Bundle,
        generation: u64,
        source: Source,
        ledger: Arc<Ledger>,
        fallback: Option<Arc<PolicySet>>,
        coverage: bool,
    ) -> Result<PolicySet, PolicyError> {
        let program = Arc::new(Program {
            generation,
            modules: compile(&bundle, coverage)?,
            coverage,
        });
        let checked = load::check(&bundle, &program)?;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(PolicySet {
            id,
            generation,
            source,
            loaded_at_ms: now.as_millis() as u64,
            bundle: Arc::new(bundle),
            stock: Stock::new(id, Arc::clone(&program), serving(&checked)),
            program,
            defined: checked.defined,
            engines: checked.engines,
            bands: checked.bands,
            trips: Trips::new(),
            ledger,
            last_good: LastGood::default(),
            fallback,
            under_test: false,
        })
    }

    /// The number of this set; each reload that changed something counts one up.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Where it came from.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The plugin of an engine. Built in are `vllm`, `sglang`, `llamacpp` and `openai`.
    pub fn engine(&self, name: &str) -> Option<&Arc<EnginePlugin>> {
        self.engines.get(name)
    }

    /// All engines, sorted.
    pub fn engine_names(&self) -> Vec<&str> {
        self.engines.keys().map(String::as_str).collect()
    }

    /// The bands of this generation, as `admission.bands` had them at load.
    pub fn bands_at_load(&self) -> &[BandSpec] {
        &self.bands
    }

    /// Whether Lua answers this hook. False when it is absent, when its file is the embedded one (then a native default
    /// that equals it answers), or when it has tripped. Costs two loads.
    pub fn defines(&self, hook: Hook) -> bool {
        self.defined[hook as usize] && !self.trips.is_tripped(hook)
    }

    /// Hooks that are switched off because they failed too often.
    pub fn tripped(&self) -> Vec<Hook> {
        self.trips.all()
    }

    /// Switches tripped hooks on again.
    pub fn untrip(&self) {
        self.trips.reset();
    }

    /// Counts a failed call, traces it when it is new, and switches the hook off when there are too many.
    pub(crate) fn note(&self, hook: Hook, fault: &Fault) {
        self.ledger.add(hook, fault.kind);
        if self.under_test {
            return;
        }
        let noted = self.trips.note(hook, fault, Instant::now());
        if noted.new_message {
            let (name, kind) = (hook.name(), fault.kind.name());
            tracing::warn!(
                hook = name,
                kind,
                generation = self.generation,
                "policy hook failed: {fault}"
            );
        }
        if noted.tripped_now {
            let name = hook.name();
            tracing::error!(
                hook = name,
                generation = self.generation,
                "policy hook is switched off until the next generation: it failed too often"
            );
        }
    }
}

/// What requests' threads may call: see [`Serving`].
fn serving(checked: &load::Checked) -> Vec<Serving> {
    let hooks = [Hook::Classify, Hook::Rank, Hook::Reject, Hook::Key];
    let defined = hooks
        .into_iter()
        .filter(|hook| checked.defined[*hook as usize]);
    let of_engines = checked.engines.iter().flat_map(|(name, plugin)| {
        let scrapes = plugin.maps.then_some(Hook::EngineMap);
        let fails = plugin
            .classifies_errors
            .then_some(Hook::EngineClassifyError);
        let hooks = scrapes.into_iter().chain(fails);
        hooks.map(move |hook| Serving::Engine(name.clone(), hook))
    });
    defined.map(Serving::Policy).chain(of_engines).collect()
}

/// Compiles all files, tests included: a syntax error in a test is an error of the set.
fn compile(bundle: &Bundle, coverage: bool) -> Result<BTreeMap<String, Module>, PolicyError> {
    // Level 1 keeps line numbers and names for messages; tests of a file never run on a request's path.
    let compiler = Compiler::new()
        .set_optimization_level(1)
        .set_debug_level(1)
        .set_coverage_level(u8::from(coverage) * 2);
    let mut modules = BTreeMap::new();
    for (key, file) in &bundle.files {
        let bytecode = compiler.compile(&file.text).map_err(|e| {
            let message = crate::vm::sandbox::fault(&e).message;
            load::located(bundle, &file.label, &compile_message(&file.label, &message))
        })?;
        modules.insert(
            key.clone(),
            Module {
                label: file.label.clone(),
                bytecode,
            },
        );
    }
    Ok(modules)
}

/// The compiler knows no file name: it says `:4: reason`, or `4: reason`.
fn compile_message(label: &str, message: &str) -> String {
    let message = message.trim_start_matches(':');
    let numbered = message.starts_with(|c: char| c.is_ascii_digit());
    if numbered {
        format!("{label}:{message}")
    } else {
        format!("{label}: {message}")
    }
}

/// Values by model or tenant, bounded.
pub(crate) type Memory<T> = Mutex<HashMap<String, T>>;
