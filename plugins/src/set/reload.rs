//! The policies in force: opened, reloaded whole or not at all, and kept when a new set is broken.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use serde::Serialize;
use tokio::sync::watch;

use crate::error::{ErrorKind, PolicyError};
use crate::hooks::Hook;
use crate::set::bundle::Bundle;
use crate::set::store;
use crate::set::trip::Ledger;
use crate::set::{PolicySet, Source};
use crate::test::{self, Kernels};

/// Generations that `rollback` can go back to.
const HISTORY_MAX: usize = 8;
/// A set that was refused is tried again after this, then after twice as long, and so on.
const REFUSED_PAUSE_FIRST: Duration = Duration::from_secs(10);
/// At most so many times twice as long: some three hours.
const REFUSED_DOUBLINGS_MAX: u32 = 10;

/// Where policies come from.
#[derive(Clone, Debug, Default)]
pub struct PolicyOptions {
    /// The directory; `None`: the embedded policies only.
    pub dir: Option<PathBuf>,
    /// Where the last good set is kept for the next start; `None`: nowhere.
    pub state: Option<PathBuf>,
}

/// What the tests of a set drive; `None`: sets come into force untested.
#[derive(Clone, Default)]
struct Gate(Option<Arc<dyn Kernels>>);

/// The policies in force, and the only place that changes them.
#[derive(Debug)]
pub struct Policies {
    options: PolicyOptions,
    gate: Gate,
    current: ArcSwap<PolicySet>,
    built_in: Arc<PolicySet>,
    ledger: Arc<Ledger>,
    /// Held while a set is loaded, so that reloads happen one after the other.
    loading: Mutex<()>,
    /// Held for moments only: what is in force can be asked for while a set is loaded.
    progress: Mutex<Progress>,
    /// Counts what a person would want to look at again: swaps, and new errors.
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Progress {
    last_error: Option<PolicyError>,
    /// Sets that were refused since the process started.
    reload_failures: u64,
    refused: Option<Refused>,
    generation: u64,
    history: VecDeque<Arc<PolicySet>>,
    /// Reloads are off.
    pinned: bool,
}

/// The bundle that was refused: it isn't tried again and again, unless a person asks. Yet some day it is, since a machine that was busy, or
/// held up, may have taken away the time that its files and its tests are given.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Refused {
    hash: [u8; 32],
    attempts: u32,
    again_at: Instant,
}

/// For `llmgw ctl policies`.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyStatus {
    /// In force.
    pub generation: u64,
    /// Where it came from.
    pub source: Source,
    /// When it was loaded, ms since the Unix epoch.
    pub loaded_at_ms: u64,
    /// Why the newest files are not in force; `None` when they are.
    pub last_error: Option<PolicyError>,
    /// Sets that were not taken since the process started, each mistake counted once.
    pub reload_failures: u64,
    /// Hooks that are switched off.
    pub trips: Vec<Hook>,
    /// Failed calls since the process started.
    pub errors: Vec<ErrorCount>,
    /// Generations that one can go back to, oldest first.
    pub history: Vec<u64>,
    /// A person chose this generation: changes of the directory are ignored.
    pub pinned: bool,
    /// Engines known.
    pub engines: Vec<String>,
}

/// One counter of `llmgw_policy_errors_total`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ErrorCount {
    /// The hook.
    pub hook: Hook,
    /// What went wrong.
    pub kind: ErrorKind,
    /// How often.
    pub count: u64,
}

impl Policies {
    /// Loads the policies on the way that a reload takes. A broken directory is an error, unless a last good set of an
    /// earlier run is there to start with; then the error is on show in [`Policies::status`].
    ///
    /// Tests of the directory are not run: see [`Policies::open_tested`].
    pub fn open(options: PolicyOptions) -> Result<Arc<Policies>, PolicyError> {
        Policies::open_gated(options, Gate(None))
    }

    /// The same, but a set comes into force, now and on reload, only when its own tests pass within
    /// [`GATE_MAX`](crate::test::GATE_MAX). The shipped tests of a file that the directory replaces are among them, unless
    /// the directory has its own version of that test.
    pub fn open_tested(
        options: PolicyOptions,
        kernels: Arc<dyn Kernels>,
    ) -> Result<Arc<Policies>, PolicyError> {
        Policies::open_gated(options, Gate(Some(kernels)))
    }

    fn open_gated(options: PolicyOptions, gate: Gate) -> Result<Arc<Policies>, PolicyError> {
        let ledger = Arc::new(Ledger::default());
        let built_in = Arc::new(PolicySet::load(
            Bundle::built_in(),
            0,
            Source::BuiltIn,
            Arc::clone(&ledger),
            None,
        )?);
        let (set, last_error) = first(&options, &gate, &ledger, &built_in)?;
        let set = Arc::new(set);
        set.stock.fill(serving_threads());
        let progress = Progress {
            last_error,
            generation: 1,
            history: VecDeque::from([Arc::clone(&set)]),
            ..Progress::default()
        };
        Ok(Arc::new(Policies {
            options,
            gate,
            current: ArcSwap::new(set),
            built_in,
            ledger,
            loading: Mutex::new(()),
            progress: Mutex::new(progress),
            changes: watch::Sender::new(0),
        }))
    }

    /// The set in force. Hold it for as long as a request or a decision takes, so that it sees one generation only.
    pub fn current(&self) -> Arc<PolicySet> {
        self.current.load_full()
    }

    /// Reads everything again. A set that differs, loads and passes its check is swapped in; else the one in force stays
    /// and the reason is recorded. One that was refused lately is refused again without being tried. Blocks for some ten ms: not for a serving
    /// thread.
    pub fn reload(&self) -> Result<Arc<PolicySet>, PolicyError> {
        self.reload_as(false)
    }

    /// The same because a person asked, so whatever is there is tried.
    pub fn reload_asked(&self) -> Result<Arc<PolicySet>, PolicyError> {
        self.reload_as(true)
    }

    fn reload_as(&self, is_asked: bool) -> Result<Arc<PolicySet>, PolicyError> {
        // A panic while loading left the set in force untouched.
        let _loading = self
            .loading
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let Some(dir) = self
            .options
            .dir
            .as_deref()
            .filter(|_| !self.progress().pinned)
        else {
            return Ok(self.current());
        };
        match Bundle::gather(dir) {
            Ok(bundle) => self.stage(dir, bundle, is_asked),
            Err(error) => Err(self.record(None, error)),
        }
    }

    fn stage(
        &self,
        dir: &Path,
        bundle: Bundle,
        is_asked: bool,
    ) -> Result<Arc<PolicySet>, PolicyError> {
        let (hash, current) = (bundle.hash, self.current());
        let from_directory = Source::Directory(dir.to_path_buf());
        if current.bundle.hash == hash && current.source == from_directory {
            self.nothing_wrong();
            return Ok(current);
        }
        let generation = {
            let progress = self.progress();
            let is_at_rest = |refused: &Refused| refused.is_at_rest(hash, Instant::now());
            if let Some(error) = &progress.last_error
                && !is_asked
                && progress.refused.as_ref().is_some_and(is_at_rest)
            {
                return Err(error.clone());
            }
            progress.generation + 1
        };
        let (ledger, built_in) = (Arc::clone(&self.ledger), Arc::clone(&self.built_in));
        let set = PolicySet::load(bundle, generation, from_directory, ledger, Some(built_in))
            .and_then(|set| self.gate.pass(set, dir))
            .map_err(|error| self.record(Some(hash), error))?;
        let set = Arc::new(set);
        set.stock.fill(serving_threads());
        if !self.swap(&set) {
            return Ok(self.current());
        }
        keep(self.options.state.as_deref(), &set);
        tracing::info!(generation, dir = %dir.display(), "policies reloaded");
        Ok(set)
    }

    /// Puts a new set in force, unless a person has pinned another one meanwhile.
    fn swap(&self, set: &Arc<PolicySet>) -> bool {
        let mut progress = self.progress();
        if progress.pinned {
            return false;
        }
        self.publish(set);
        progress.generation = set.generation;
        progress.last_error = None;
        progress.refused = None;
        progress.history.push_back(Arc::clone(set));
        if progress.history.len() > HISTORY_MAX {
            progress.history.pop_front();
        }
        self.changed();
        true
    }

    /// The directory is as the set in force, also after a mistake was taken back.
    fn nothing_wrong(&self) {
        let mut progress = self.progress();
        progress.refused = None;
        if progress.last_error.take().is_some() {
            self.changed();
        }
    }

    /// What is in force and what is wrong.
    pub fn status(&self) -> PolicyStatus {
        let set = self.current();
        let progress = self.progress();
        PolicyStatus {
            generation: set.generation,
            source: set.source.clone(),
            loaded_at_ms: set.loaded_at_ms,
            last_error: progress.last_error.clone(),
            reload_failures: progress.reload_failures,
            trips: set.tripped(),
            errors: self.error_counts(),
            history: progress.history.iter().map(|set| set.generation).collect(),
            pinned: progress.pinned,
            engines: set.engines.keys().cloned().collect(),
        }
    }

    /// Failed calls since the process started, over all generations.
    pub fn error_counts(&self) -> Vec<ErrorCount> {
        self.ledger
            .counts()
            .into_iter()
            .map(|(hook, kind, count)| ErrorCount { hook, kind, count })
            .collect()
    }

    /// Puts an earlier generation in force and ignores the directory until [`Policies::unpin`]. `None`: the one before the
    /// current one. The error says which generations there are.
    pub fn pin(&self, generation: Option<u64>) -> Result<Arc<PolicySet>, PolicyError> {
        let set = self.earlier(generation)?;
        // Before it is locked again, since it takes a while. What is reloaded meanwhile is not what was asked for.
        set.stock.fill(serving_threads());
        let mut progress = self.progress();
        progress.pinned = true;
        self.publish(&set);
        self.changed();
        tracing::info!(generation = set.generation, "policies pinned");
        Ok(set)
    }

    /// A generation of the history; `None`: the one before the current one.
    fn earlier(&self, generation: Option<u64>) -> Result<Arc<PolicySet>, PolicyError> {
        let progress = self.progress();
        let current = self.current();
        let wanted = match generation {
            Some(generation) => progress
                .history
                .iter()
                .find(|set| set.generation == generation),
            None => progress
                .history
                .iter()
                .rev()
                .find(|set| set.generation < current.generation),
        };
        wanted.cloned().ok_or_else(|| {
            let known: Vec<String> = progress
                .history
                .iter()
                .map(|set| set.generation.to_string())
                .collect();
            let reason = format!(
                "there is no such generation to go back to; there are {}",
                known.join(", ")
            );
            PolicyError::in_file("(policies)", reason)
        })
    }

    /// Puts a set in force, whose VMs are ready.
    fn publish(&self, set: &Arc<PolicySet>) {
        let previous = self.current.swap(Arc::clone(set));
        if !Arc::ptr_eq(&previous, set) {
            previous.stock.retire();
        }
    }

    /// Follows the directory again, from its present contents on.
    pub fn unpin(&self) -> Result<Arc<PolicySet>, PolicyError> {
        self.progress().pinned = false;
        self.reload_asked()
    }

    fn record(&self, hash: Option<[u8; 32]>, error: PolicyError) -> PolicyError {
        let mut progress = self.progress();
        if progress.last_error.as_ref() != Some(&error) {
            let text = error.text.as_deref().unwrap_or_default();
            tracing::error!(
                text,
                "policies not reloaded, the last good ones stay in force: {error}"
            );
            progress.last_error = Some(error.clone());
            progress.reload_failures += 1;
            self.changed();
        }
        let before = progress.refused.take();
        progress.refused = hash.map(|hash| Refused::again(before, hash, Instant::now()));
        error
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Sees a new number after each swap and each new error.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(crate) fn dir(&self) -> Option<&Path> {
        self.options.dir.as_deref()
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        // Plain data, written in one go.
        self.progress
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Refused {
    /// A bundle that is refused now, and what was refused before it.
    fn again(before: Option<Refused>, hash: [u8; 32], now: Instant) -> Refused {
        let attempts = before
            .filter(|before| before.hash == hash)
            .map_or(0, |before| before.attempts);
        let pause = REFUSED_PAUSE_FIRST * (1 << attempts.min(REFUSED_DOUBLINGS_MAX));
        Refused {
            hash,
            attempts: attempts.saturating_add(1),
            again_at: now + pause,
        }
    }

    /// Whether a bundle is this one, and not to be tried again yet.
    fn is_at_rest(&self, hash: [u8; 32], now: Instant) -> bool {
        self.hash == hash && now < self.again_at
    }
}

impl Gate {
    /// Gives the set back when its tests pass.
    fn pass(&self, set: PolicySet, dir: &Path) -> Result<PolicySet, PolicyError> {
        if let Some(kernels) = &self.0 {
            test::gate(&set.bundle, &set.source, dir, Arc::clone(kernels))?;
        }
        Ok(set)
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Gate").field(&self.0.is_some()).finish()
    }
}

/// Threads that serve requests: those of the runtime that this is called in, or as many as a runtime has by default.
pub(crate) fn serving_threads() -> usize {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => runtime.metrics().num_workers(),
        Err(_) => std::thread::available_parallelism().map_or(1, |threads| threads.get()),
    }
}

/// The first set: the directory's, else the last good one of an earlier run.
fn first(
    options: &PolicyOptions,
    gate: &Gate,
    ledger: &Arc<Ledger>,
    built_in: &Arc<PolicySet>,
) -> Result<(PolicySet, Option<PolicyError>), PolicyError> {
    let load = |bundle, source| {
        PolicySet::load(
            bundle,
            1,
            source,
            Arc::clone(ledger),
            Some(Arc::clone(built_in)),
        )
    };
    let Some(dir) = &options.dir else {
        return load(Bundle::built_in(), Source::BuiltIn).map(|set| (set, None));
    };
    let tested =
        |bundle| load(bundle, Source::Directory(dir.clone())).and_then(|set| gate.pass(set, dir));
    let error = match Bundle::gather(dir).and_then(tested) {
        Ok(set) => {
            keep(options.state.as_deref(), &set);
            return Ok((set, None));
        }
        Err(error) => error,
    };
    let last_good = options.state.as_deref().and_then(|state| {
        let bundle = store::load(state, dir)?;
        load(bundle, Source::LastGood(store::path(state))).ok()
    });
    match last_good {
        Some(set) => {
            let text = error.text.as_deref().unwrap_or_default();
            tracing::error!(
                text,
                "the policy directory is broken, the last good policies are in force: {error}"
            );
            Ok((set, Some(error)))
        }
        None => Err(error),
    }
}

/// Keeps a good set for the next start. Not being able to is no reason to refuse it.
fn keep(state: Option<&Path>, set: &PolicySet) {
    if let Some(state) = state
        && let Err(e) = store::save(state, &set.bundle)
    {
        tracing::warn!(path = %store::path(state).display(), "can't keep the last good policies for the next start: {e}");
    }
}

#[cfg(test)]
mod tests;
