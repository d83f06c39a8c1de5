//! Starts engines, keeps them, and takes over those that an earlier agent left running.
//!
//! ```text
//! start_shard  supervisor.rs  claim GPUs and ports; one task per shard (shard.rs)
//! admit        admission.rs   refuse a second spec, one too many, all while the agent stops
//! check        preflight.rs   executable, GPUs, ports
//! record       spec_store.rs  spec on disk before anything runs
//! start        process.rs     session, environment, control group; pid on disk before it executes anything
//! probe        probe.rs       ready = the engine says so and lists the served name
//! judge        machine.rs     every state and every deadline, as a pure function
//! end          ending.rs      SIGTERM, grace, SIGKILL to all that tree.rs finds; then the GPUs' memory
//! adopt        adopt.rs       what became of a shard while no agent ran
//! ```
//!
//! What is deliberately absent: restarts. A shard that fails is reported, and the server tries elsewhere.

mod admission;
pub mod adopt;
pub mod board;
pub mod cgroup;
mod ending;
pub mod gpu;
mod kernel;
pub mod launch;
pub mod logs;
pub mod machine;
pub mod preflight;
pub mod probe;
pub mod process;
mod shard;
pub mod spec_store;
mod takeover;
pub mod tree;

#[cfg(test)]
pub(crate) mod testing;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use llmgw_proto::shard::{LogLine, ShardSpec, ShardState, ShardStatus};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use admission::Refused;
use admission::{Admission, refused};
pub use board::StatusChanges;
use gpu::{GpuFacts, NoGpus};
pub use launch::EngineAllowance;
use preflight::Claims;
use shard::{Context, Handle, ShardTask, wall_ms};
use spec_store::{Asked, StoreError};
pub use takeover::{Adopted, Outcome};
use tree::{Environ, Environs, ProcessTable};

/// How long a shutdown that leaves the engines running waits for the shards' tasks.
const LEAVE_MAX: Duration = Duration::from_millis(1_500);

/// How a supervisor is set up. Make it with [`SupervisorOptions::new`].
#[derive(Clone)]
pub struct SupervisorOptions {
    pub state_dir: PathBuf,
    /// By engine: all that this node may execute.
    pub allow: BTreeMap<String, EngineAllowance>,
    /// `/proc`.
    pub proc_root: PathBuf,
    /// Where control groups may be made; see [`cgroup::delegated`]. `None`: sessions and the process table have to do.
    pub cgroup_root: Option<PathBuf>,
    pub gpus: Arc<dyn GpuFacts>,
    pub pace: Pace,
    /// For tests: called at each instant of a start at which a crash leaves something else behind.
    pub at: Option<fn(StartInstant)>,
}

/// How often things are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// An engine that is not ready yet.
    pub probe_loading: Duration,
    /// One that is.
    pub probe_ready: Duration,
    /// A busy engine may take long to answer.
    pub probe_timeout: Duration,
    pub read_output: Duration,
    /// The shard's processes, where it has no control group.
    pub remember: Duration,
}

/// The instants of a start between which an agent can die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartInstant {
    /// The spec is on disk; there is no process.
    SpecWritten,
    /// There is one, at its gate, and it is not on record.
    Forked,
    /// It is on record, and still at its gate.
    PidWritten,
    /// It executes the engine.
    Executed,
    /// And that is on record.
    Confirmed,
}

/// Everything that runs on this node.
pub struct Supervisor {
    context: Arc<Context>,
    shards: Mutex<BTreeMap<String, Handle>>,
    tasks: TaskTracker,
    closing: AtomicBool,
    /// Held until the shutdown, so that no second agent takes over its engines.
    lock: Mutex<Option<takeover::StateLock>>,
}

/// One look at the processes of this node.
#[derive(Clone, Debug, Default)]
pub struct Processes {
    /// The shards'.
    pub own: BTreeSet<u32>,
    /// All that may be seen, whoever's they are.
    pub living: BTreeSet<u32>,
}

/// Why a supervisor can't start.
#[derive(Debug)]
pub enum SupervisorError {
    Store(StoreError),
    /// Another agent uses the state directory.
    Locked {
        path: PathBuf,
    },
    /// What should be its lock is none.
    NotLockable {
        path: PathBuf,
        source: io::Error,
    },
    Io {
        what: &'static str,
        source: io::Error,
    },
}

impl fmt::Display for SupervisorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SupervisorError::Store(error) => error.fmt(f),
            SupervisorError::Locked { path } => {
                let path = path.display();
                write!(
                    f,
                    "another agent runs with this state directory: it holds `{path}`; stop that one, or give this one a `--state` of its own"
                )
            }
            SupervisorError::NotLockable { path, source } => write!(
                f,
                "the state directory can't be locked by `{}`: {source}; it is to be a plain file that this user may write",
                path.display()
            ),
            SupervisorError::Io { what, source } => write!(f, "{what}: {source}"),
        }
    }
}

impl std::error::Error for SupervisorError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            SupervisorError::Store(error) => Some(error),
            SupervisorError::Locked { .. } => None,
            SupervisorError::NotLockable { source, .. } | SupervisorError::Io { source, .. } => {
                Some(source)
            }
        }
    }
}

impl SupervisorOptions {
    pub fn new(state_dir: PathBuf, allow: BTreeMap<String, EngineAllowance>) -> SupervisorOptions {
        SupervisorOptions {
            state_dir,
            allow,
            proc_root: PathBuf::from("/proc"),
            cgroup_root: None,
            gpus: Arc::new(NoGpus),
            pace: Pace::default(),
            at: None,
        }
    }

    fn reached(&self, instant: StartInstant) {
        if let Some(at) = self.at {
            at(instant);
        }
    }
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            probe_loading: Duration::from_millis(500),
            probe_ready: Duration::from_secs(5),
            probe_timeout: Duration::from_secs(5),
            read_output: Duration::from_millis(200),
            remember: Duration::from_secs(30),
        }
    }
}

impl Supervisor {
    /// Reads what is on disk, takes over what still runs, kills what can't be identified, and says what was lost.
    ///
    /// # Errors
    /// Where the state directory can't be used, another agent uses it, or what runs can't be seen.
    pub async fn start(
        options: SupervisorOptions,
    ) -> Result<(Arc<Supervisor>, Vec<Adopted>), SupervisorError> {
        let started = tokio::task::spawn_blocking(|| takeover::take_over(options));
        let started = started.await.map_err(|error| SupervisorError::Io {
            what: "the take-over of running engines failed",
            source: io::Error::other(error),
        })??;
        let tasks = TaskTracker::new();
        let mut shards = BTreeMap::new();
        for shard in started.shards {
            let handle = Handle::new(shard.record.spec.clone(), shard.record.asked);
            shards.insert(handle.spec.shard.clone(), handle.clone());
            let context = started.context.clone();
            let task =
                ShardTask::taken_over(context, handle, shard.record, shard.remnant, shard.alive);
            tasks.spawn(task.run());
        }
        let supervisor = Supervisor {
            context: started.context,
            shards: Mutex::new(shards),
            tasks,
            closing: AtomicBool::new(false),
            lock: Mutex::new(Some(started.lock)),
        };
        Ok((Arc::new(supervisor), started.adopted))
    }

    /// Every shard with its latest status, for a registration: those that run, and those that are over and were neither
    /// stopped by name nor started again since.
    pub fn shards(&self) -> Vec<(ShardSpec, ShardStatus)> {
        let shards = self.handles();
        let with_status = shards.values().filter_map(|handle| {
            let status = self
                .context
                .board
                .get(&handle.spec.shard, &handle.spec_hash)?;
            Some(((*handle.spec).clone(), status))
        });
        with_status.collect()
    }

    /// Changes from now on. However slow the reader is, it gets the latest status of each shard, and nothing queues up.
    pub fn status(&self) -> StatusChanges {
        self.context.board.changes()
    }

    /// Cancelled once the task of a shard has panicked. Its engine runs, and only another supervisor can take it over.
    pub fn lost(&self) -> CancellationToken {
        self.context.lost.clone()
    }

    /// Starts a shard, or says why not. One that runs already with the same spec stays as it is; another spec is refused until that one
    /// was stopped.
    pub fn start_shard(&self, spec: ShardSpec) -> Option<Refused> {
        let handle = Handle::new(spec, Asked::Run);
        let mut shards = self.handles();
        match self.admit(&shards, &handle) {
            Admission::Refused(reason) => return Some(refused(&shards, &handle, &reason)),
            Admission::Runs => return None,
            Admission::Granted => {}
        }
        let claims = claims(&shards);
        forget_oldest(&mut shards, &self.context);
        shards.insert(handle.spec.shard.clone(), handle.clone());
        let task = ShardTask::new(self.context.clone(), handle, claims);
        self.tasks.spawn(task.run());
        None
    }

    /// Takes nothing new from now on. `false`: there is no such shard.
    pub fn drain_shard(&self, shard: &str) -> bool {
        self.ask(shard, Asked::Drain)
    }

    /// Stops a shard: SIGTERM, its grace period, SIGKILL; with `force` SIGKILL at once. `false`: there is no such shard.
    pub fn stop_shard(&self, shard: &str, force: bool) -> bool {
        let asked = match force {
            true => Asked::Kill,
            false => Asked::Stop,
        };
        self.ask(shard, asked)
    }

    /// The last lines of its output, also of one that is over.
    pub fn tail(&self, shard: &str, lines: usize) -> Vec<LogLine> {
        let handle = self.handles().get(shard).cloned();
        handle.map_or(Vec::new(), |handle| handle.tail().last(lines))
    }

    /// Lines from number `from` on, at most so many, and the number to go on with. `None`: there is no such shard.
    pub fn follow(&self, shard: &str, from: u64, lines: usize) -> Option<(Vec<LogLine>, u64)> {
        let handle = self.handles().get(shard).cloned()?;
        let read = handle.tail().from(from, lines);
        Some(read)
    }

    /// The processes of all shards right now: what the inventory must not take for a stranger's.
    pub fn processes(&self) -> io::Result<Processes> {
        let handles: Vec<Handle> = self.handles().values().cloned().collect();
        let proc = &self.context.options.proc_root;
        let table = ProcessTable::read(proc)?;
        // One for all: each is read once, however many shards ask.
        let environs = Environs::of(proc);
        let mut own = BTreeSet::new();
        for handle in handles.iter().filter(|handle| !handle.is_over()) {
            let (traces, is_grouped) = handle.traces()?;
            // What is in the group needs no other sign, and what could not be put there is in its leader's session.
            let members = match is_grouped {
                true => table.members(&traces, &|_| Environ::Other),
                false => table.members(&traces, &|pid| environs.read(pid)),
            };
            own.extend(members.iter().map(|member| member.id.pid));
        }
        environs.all_came()?;
        Ok(Processes {
            own,
            living: table.living(),
        })
    }

    /// Ends supervision: the engines are stopped first, or left running for the next agent to adopt. The latter takes less
    /// than two seconds.
    pub async fn shutdown(&self, stop_engines: bool) {
        self.closing.store(true, Ordering::Release);
        self.tasks.close();
        if stop_engines {
            for handle in self.handles().values() {
                raise(handle, Asked::Stop);
            }
            // Bounded by each shard's grace, and by what follows it.
            while !self.tasks.is_empty() && !self.all_over() {
                let look = tokio::time::sleep(Duration::from_millis(20));
                tokio::select! { () = self.tasks.wait() => {}, () = look => {} }
            }
        }
        self.context.cancel.cancel();
        if tokio::time::timeout(LEAVE_MAX, self.tasks.wait())
            .await
            .is_err()
        {
            // A start may hang in a write of its record. The next agent must not read it before: the process's end gives the lock back.
            tracing::warn!("some shards' tasks did not end in time");
            std::mem::forget(self.take_lock());
            return;
        }
        drop(self.take_lock());
    }

    fn take_lock(&self) -> Option<takeover::StateLock> {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        lock.take()
    }

    fn ask(&self, shard: &str, asked: Asked) -> bool {
        let mut shards = self.handles();
        let Some(handle) = shards.get(shard) else {
            return false;
        };
        raise(handle, asked);
        if handle.is_over() && asked >= Asked::Stop {
            // Its last status was for whoever asked for it, and who asked now waits for the end of this one.
            self.forget(handle);
            shards.remove(shard);
        }
        true
    }

    /// A shard that failed counts as stopped once somebody stops it.
    fn forget(&self, handle: &Handle) {
        let board = &self.context.board;
        let Some(last) = board.get(&handle.spec.shard, &handle.spec_hash) else {
            return;
        };
        if last.state != ShardState::Stopped {
            board.put(ShardStatus {
                state: ShardState::Stopped,
                log_tail: Vec::new(),
                since_ms: wall_ms(),
                ..last
            });
        }
    }

    fn all_over(&self) -> bool {
        // A shard whose processes don't die is over for a shutdown.
        let status = |handle: &Handle| {
            let board = &self.context.board;
            board.get(&handle.spec.shard, &handle.spec_hash)
        };
        let shards = self.handles();
        shards
            .values()
            .all(|handle| status(handle).is_none_or(|status| status.state.is_over()))
    }

    fn handles(&self) -> MutexGuard<'_, BTreeMap<String, Handle>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Supervisor {
    /// With the lock gone, another agent may take over: nobody must go on here.
    fn drop(&mut self) {
        self.context.cancel.cancel();
    }
}

/// What was asked of a shard only ever gets stronger.
fn raise(handle: &Handle, asked: Asked) {
    handle.asked.send_if_modified(|before| {
        let stronger = asked > *before;
        *before = asked.max(*before);
        stronger
    });
}

/// What the shards that are not over have.
fn claims(shards: &BTreeMap<String, Handle>) -> Claims {
    let mut claims = Claims::default();
    for handle in shards.values().filter(|handle| !handle.is_over()) {
        let spec = &handle.spec;
        for uuid in &spec.gpus {
            claims.gpus.insert(uuid.clone(), spec.shard.clone());
        }
        for port in &spec.ports {
            claims.ports.insert(*port, spec.shard.clone());
        }
    }
    claims
}

/// Shards that are over, and whose status the board has dropped.
fn forget_oldest(shards: &mut BTreeMap<String, Handle>, context: &Context) {
    let has_status = |handle: &Handle| {
        let board = &context.board;
        board.get(&handle.spec.shard, &handle.spec_hash).is_some()
    };
    shards.retain(|_, handle| !handle.is_over() || has_status(handle));
}
