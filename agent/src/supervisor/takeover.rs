//! The start of an agent: what is on disk meets what runs. Engines are taken over, strays killed, and everything that was
//! lost is said.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use tokio_util::sync::CancellationToken;

use super::adopt::{self, Verdict};
use super::board::Board;
use super::cgroup::{Groups, ShardCgroup};
use super::ending::{self, Scan};
use super::machine::{Reason, Remnant};
use super::process::Process;
use super::shard::Context;
use super::spec_store::{
    Asked, Record, RecordedProcess, SetAside, SpecStore, directory_name, shard_of,
};
use super::tree::{ProcessTable, Traces, look_until_all_came};
use super::{SupervisorError, SupervisorOptions};
use crate::process_id::ProcessId;

/// A child that stands at its gate when its agent dies holds a copy of the lock until it notices.
/// Tries are counted, so that a pause of the machine is no reason to give up: 2 s if there is none.
const LOCK_TRIES: u32 = 200;
const LOCK_LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long strays may take to die before the start goes on without them.
const STRAYS_WAIT_MAX: Duration = Duration::from_secs(5);

/// The state directory is this agent's alone.
pub struct StateLock(#[expect(dead_code, reason = "held, not used")] Flock<File>);

/// What became of one shard, or of a process that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// Empty where it could not be told.
    pub shard: String,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its processes run on under this agent.
    Adopted { pids: Vec<u32> },
    /// Nothing of it had run yet: it is started now.
    Resumed,
    /// Its stop, which had begun, goes on.
    Stopping,
    /// Something of it was lost; what is left of it is stopped, and it fails.
    Failed { reason: String },
    /// What was forked for a start that the agent's end interrupted. The start begins anew.
    Interrupted { pids: Vec<u32> },
    /// Processes that no record explains.
    Killed { pids: Vec<u32> },
    /// Its record could not be read; processes of it are among those killed.
    SetAside {
        file: PathBuf,
        cause: String,
        kept_as: Option<PathBuf>,
    },
}

/// A shard to go on with.
pub struct TakenOver {
    pub record: Record,
    pub remnant: Remnant,
    pub alive: Vec<(usize, Process)>,
}

pub struct Started {
    pub context: Arc<Context>,
    pub shards: Vec<TakenOver>,
    pub adopted: Vec<Adopted>,
    pub lock: StateLock,
}

impl fmt::Display for Adopted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Adopted { shard, outcome } = self;
        match outcome {
            Outcome::Adopted { pids } => write!(
                f,
                "shard `{shard}` is adopted with processes {pids:?}: how they end will not be known, and of its earlier output only the last lines are left"
            ),
            Outcome::Resumed => write!(f, "shard `{shard}` had not been started yet, and is now"),
            Outcome::Stopping => {
                write!(f, "shard `{shard}` was being stopped, and its stop goes on")
            }
            Outcome::Failed { reason } => write!(f, "shard `{shard}` is lost: {reason}"),
            Outcome::Interrupted { pids } => write!(
                f,
                "processes {pids:?} of shard `{shard}` were being started when the agent ended, and were killed"
            ),
            Outcome::Killed { pids } => write!(
                f,
                "processes {pids:?} of shard `{shard}` are on no record, and were killed"
            ),
            Outcome::SetAside {
                file,
                cause,
                kept_as,
            } => {
                write!(f, "`{}` can't be read ({cause}), ", file.display())?;
                match kept_as {
                    Some(path) => write!(f, "and was moved to `{}`", path.display()),
                    None => f.write_str("nor moved away"),
                }
            }
        }
    }
}

impl Adopted {
    /// Tells the operator: with a warning where something was lost.
    fn say(&self) {
        match self.outcome {
            Outcome::Adopted { .. }
            | Outcome::Resumed
            | Outcome::Stopping
            | Outcome::Interrupted { .. } => tracing::info!("{self}"),
            Outcome::Failed { .. } | Outcome::Killed { .. } | Outcome::SetAside { .. } => {
                tracing::warn!("{self}");
            }
        }
    }
}

/// Blocks; within a runtime, which will watch the processes.
pub fn take_over(options: SupervisorOptions) -> Result<Started, SupervisorError> {
    let store = SpecStore::open(&options.state_dir).map_err(SupervisorError::Store)?;
    let lock = lock(&options.state_dir.join("lock"))?;
    let failed = |what| move |source| SupervisorError::Io { what, source };
    let state_dir = options
        .state_dir
        .canonicalize()
        .map_err(failed("the state directory can't be found"))?;
    let groups = Groups::of(&state_dir).map_err(failed("the state directory can't be found"))?;
    let state_dir = state_dir.to_string_lossy().into_owned();
    let found = store
        .load()
        .map_err(failed("the shards on disk can't be read"))?;
    let context = Arc::new(Context {
        options,
        state_dir,
        groups,
        store,
        board: Board::default(),
        epoch: Instant::now(),
        cancel: CancellationToken::new(),
        lost: CancellationToken::new(),
    });
    let mut adopted = found.set_aside.into_iter().map(set_aside).collect();
    let proc = &context.options.proc_root;
    let table = ProcessTable::read(proc).map_err(failed("the process table can't be read"))?;
    kill_stray_groups(&context, &found.records, &mut adopted);
    kill_strays(&context, &table, &found.records, &mut adopted);
    let mut shards = Vec::new();
    for record in found.records {
        let taken_over = take_over_shard(&context, &table, record, &mut adopted);
        shards.push(taken_over.map_err(failed("what runs of a shard can't be seen"))?);
    }
    adopted.iter().for_each(Adopted::say);
    Ok(Started {
        context,
        shards,
        adopted,
        lock,
    })
}

/// # Errors
/// Where what runs can't be seen: an engine that is not watched, or is taken for ended, would be nobody's.
fn take_over_shard(
    context: &Context,
    table: &ProcessTable,
    mut record: Record,
    adopted: &mut Vec<Adopted>,
) -> io::Result<TakenOver> {
    let proc = &context.options.proc_root;
    let judge = |record: &Record, table: &ProcessTable| {
        look_until_all_came(proc, |environ| {
            adopt::judge(record, &context.state_dir, table, environ)
        })
    };
    let Verdict { mut remnant, alive } = judge(&record, table);
    let mut held = Vec::new();
    for (command, id) in alive {
        match Process::adopt(&id, proc)? {
            Some(process) => {
                confirm(&mut record, command);
                held.push((command, process));
            }
            // It ended since: judged again from what is there now.
            None => {
                let table = ProcessTable::read(proc)?;
                remnant = judge(&record, &table).remnant;
            }
        }
    }
    let next = match remnant {
        Remnant::Untouched => Some(0),
        Remnant::Runs { next, .. } => Some(next),
        Remnant::Broken(_) => None,
    };
    if let Some(next) = next
        && let Some(reason) = end_interrupted(context, &mut record, next, adopted)?
    {
        remnant = Remnant::Broken(reason);
    }
    if let Err(error) = context.store.save(&record) {
        tracing::error!(shard = record.spec.shard, %error, "what was taken over can't be put on record");
    }
    let pids = held.iter().map(|(_, process)| process.id.pid).collect();
    let outcome = match (&remnant, record.asked) {
        (_, Asked::Stop | Asked::Kill) => Outcome::Stopping,
        (Remnant::Broken(reason), _) => Outcome::Failed {
            reason: reason.to_string(),
        },
        (Remnant::Untouched, _) => Outcome::Resumed,
        (Remnant::Runs { .. }, _) => Outcome::Adopted { pids },
    };
    adopted.push(Adopted {
        shard: record.spec.shard.clone(),
        outcome,
    });
    Ok(TakenOver {
        record,
        remnant,
        alive: held,
    })
}

/// Ends what was forked for the commands from `next` on, which are started anew. Such a child may have been let through its gate at
/// the agent's last instant, and not have executed the engine yet: it would be a second one. Why the shard can't go on, where one
/// does not end.
fn end_interrupted(
    context: &Context,
    record: &mut Record,
    next: usize,
    adopted: &mut Vec<Adopted>,
) -> io::Result<Option<Reason>> {
    let proc = &context.options.proc_root;
    let interrupted = record
        .processes
        .iter()
        .filter(|process| process.command >= next);
    let ids: Vec<ProcessId> = interrupted.map(RecordedProcess::id).collect();
    let scan = match next {
        // None of it is to live, and what was never seen executing may have left something behind all the same.
        0 => scan(context, record),
        _ if ids.is_empty() => return Ok(None),
        // Of no shard, whose other processes are to live: the leaders, their sessions and what descends from them.
        _ => Scan {
            proc: proc.clone(),
            traces: traces(context, "", ids.clone()),
            held: Vec::new(),
            cgroup: None,
        },
    };
    let killed = ending::kill_now(scan, STRAYS_WAIT_MAX)?;
    if !killed.is_empty() {
        let pids = killed.into_iter().collect();
        adopted.push(Adopted {
            shard: record.spec.shard.clone(),
            outcome: Outcome::Interrupted { pids },
        });
    }
    for id in ids {
        if id.is_alive(proc)? {
            let text = format!(
                "process {} was being started when the agent ended, and SIGKILL did not end it",
                id.pid
            );
            return Ok(Some(Reason::new("start_interrupted", text)));
        }
    }
    record.processes.retain(|process| process.command < next);
    Ok(None)
}

/// It runs: an agent that died at its start did not come to write that down.
fn confirm(record: &mut Record, command: usize) {
    let mut processes = record.processes.iter_mut();
    if let Some(process) = processes.find(|process| process.command == command) {
        process.confirmed = true;
    }
}

/// Control groups of this state directory whose shard is on no record. They hold what no other trace leads to: with the
/// record the processes' numbers are lost, and an engine that sets its title overwrote its environment.
fn kill_stray_groups(context: &Context, records: &[Record], adopted: &mut Vec<Adopted>) {
    let Some(root) = &context.options.cgroup_root else {
        return;
    };
    for (name, group) in context.groups.below(root) {
        let is_known = |record: &Record| {
            record.cgroup.as_deref() == Some(group.directory())
                || directory_name(&record.spec.shard).as_ref() == Some(&name)
        };
        if records.iter().any(is_known) {
            continue;
        }
        let shard = shard_of(&name);
        let scan = Scan {
            proc: context.options.proc_root.clone(),
            traces: traces(context, &shard, Vec::new()),
            held: Vec::new(),
            cgroup: Some(group.clone()),
        };
        kill_stray(scan, &shard, adopted);
        group.remove();
    }
}

/// Engines of this state directory whose shard is on no record: their spec is lost, so nobody could tell whether they serve.
fn kill_strays(
    context: &Context,
    table: &ProcessTable,
    records: &[Record],
    adopted: &mut Vec<Adopted>,
) {
    let proc = &context.options.proc_root;
    let known: BTreeSet<&str> = records
        .iter()
        .map(|record| record.spec.shard.as_str())
        .collect();
    let engines = look_until_all_came(proc, |environ| table.engines(&context.state_dir, environ));
    let strays: BTreeSet<&str> = engines
        .iter()
        .map(|(shard, _)| shard.as_str())
        .filter(|shard| !known.contains(shard))
        .collect();
    for shard in strays {
        let of_it = engines.iter().filter(|(theirs, _)| theirs == shard);
        let leaders = of_it.map(|(_, id)| id.clone()).collect();
        let scan = Scan {
            proc: proc.clone(),
            traces: traces(context, shard, leaders),
            held: Vec::new(),
            cgroup: None,
        };
        kill_stray(scan, shard, adopted);
    }
}

/// Kills what is nobody's. The agent starts where it can't be seen too.
fn kill_stray(scan: Scan, shard: &str, adopted: &mut Vec<Adopted>) {
    match ending::kill_now(scan, STRAYS_WAIT_MAX) {
        Ok(killed) if killed.is_empty() => {}
        Ok(killed) => {
            let pids = killed.into_iter().collect();
            adopted.push(Adopted {
                shard: shard.to_owned(),
                outcome: Outcome::Killed { pids },
            });
        }
        Err(error) => tracing::error!(shard, %error, "what is left of the shard can't be seen"),
    }
}

fn scan(context: &Context, record: &Record) -> Scan {
    Scan {
        proc: context.options.proc_root.clone(),
        traces: traces(
            context,
            &record.spec.shard,
            record
                .processes
                .iter()
                .map(|process| process.id())
                .collect(),
        ),
        held: Vec::new(),
        cgroup: record.cgroup.as_deref().and_then(ShardCgroup::open),
    }
}

fn traces(context: &Context, shard: &str, leaders: Vec<ProcessId>) -> Traces {
    Traces {
        shard: shard.to_owned(),
        state_dir: context.state_dir.clone(),
        leaders,
        ..Traces::default()
    }
}

fn set_aside(file: SetAside) -> Adopted {
    Adopted {
        shard: String::new(),
        outcome: Outcome::SetAside {
            file: file.file,
            cause: file.cause,
            kept_as: file.kept_as,
        },
    }
}

fn lock(path: &Path) -> Result<StateLock, SupervisorError> {
    let failed = |source: io::Error| SupervisorError::NotLockable {
        path: path.to_owned(),
        source,
    };
    let open = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        // What else may lie there: a pipe, at which the start would wait for ever, or a link, which would have a file made elsewhere.
        .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
        .open(path);
    let mut file = open.map_err(failed)?;
    let mut tries = 0;
    loop {
        tries += 1;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(StateLock(lock)),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) if tries == LOCK_TRIES => {
                return Err(SupervisorError::Locked {
                    path: path.to_owned(),
                });
            }
            Err((back, nix::errno::Errno::EWOULDBLOCK)) => file = back,
            Err((_, error)) => return Err(failed(error.into())),
        }
        std::thread::sleep(LOCK_LOOK_EVERY);
    }
}
