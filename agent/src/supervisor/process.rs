//! The only place that starts an engine's process: its own session, a cleaned environment, nothing inherited, and a gate
//! that keeps it from running before its pid is on disk.
//!
//! The gate is what makes `kill -9` of the agent harmless at any instant of a start. The forked child first tells its pid
//! and then waits for one byte. The agent writes pid, start time and boot down, syncs, and only then sends the byte. Where
//! the agent dies before, the child reads the end of the pipe and exits without having executed anything: an engine that
//! runs is always on record.
//!
//! Never PDEATHSIG: it fires when the thread that forked ends, and an engine is to outlive its agent anyway.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};

use llmgw_proto::shard::Exit;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::kernel;
use crate::process_id::ProcessId;

/// One start at a time: a child that waits at its gate holds copies of the agent's descriptors. If it held another
/// child's gate open, that child would not notice that the agent died.
static TURNS: Semaphore = Semaphore::const_new(1);

/// Engines start here: the agent's own directory is none of theirs.
const DIRECTORY: &str = "/";

/// All that starting a process needs.
pub struct Launch {
    pub executable: PathBuf,
    pub args: Vec<String>,
    /// The whole environment; nothing of the agent's is added.
    pub env: BTreeMap<String, String>,
    /// Takes standard output and standard error.
    pub output: File,
}

/// The right to start a process, until it executes.
pub struct Turn(#[expect(dead_code, reason = "held, not used")] SemaphorePermit<'static>);

/// A process of a shard that ran when it was last looked at: started by this agent, or adopted.
pub struct Process {
    pub id: ProcessId,
    pidfd: AsyncFd<OwnedFd>,
    /// `None` for an adopted one: another process is its parent, so nobody tells how it ends.
    child: Option<Mutex<Child>>,
}

/// Why a process did not start.
#[derive(Debug)]
pub struct StartError {
    pub executable: PathBuf,
    /// Which step failed.
    pub step: &'static str,
    pub source: io::Error,
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (executable, step) = (self.executable.display(), self.step);
        write!(f, "`{executable}` did not start: {step}: {}", self.source)
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

impl Turn {
    /// Waits for it: a start before this one may hang in its record or in its exec, so whoever waits must be able to give up.
    pub async fn next() -> Turn {
        match TURNS.acquire().await {
            Ok(permit) => Turn(permit),
            // Only a closed semaphore fails, and nobody closes this one.
            Err(_) => std::future::pending().await,
        }
    }
}

impl Process {
    /// Forks, lets `record` put the child on record, and only then lets it execute. Blocks; needs a tokio runtime around it.
    ///
    /// # Errors
    /// Where the fork, the record or the exec fails; then nothing runs.
    pub fn start(
        _turn: Turn,
        launch: Launch,
        proc: &Path,
        record: impl FnOnce(&ProcessId) -> io::Result<()>,
    ) -> Result<Process, StartError> {
        let executable = launch.executable.clone();
        let failed = |step: &'static str, source: io::Error| StartError {
            executable: executable.clone(),
            step,
            source,
        };
        let (hello, says_hello) = io::pipe().map_err(|error| failed("pipe", error))?;
        let (waits, gate) = io::pipe().map_err(|error| failed("pipe", error))?;
        let mut command = command(launch, &says_hello, &waits, &gate);
        let (met, spawned) = std::thread::scope(|scope| {
            let spawning = scope.spawn(move || {
                let spawned = command.spawn();
                // With the child gone before it spoke, these end the wait for its pid.
                drop((says_hello, waits));
                spawned
            });
            let met = meet(hello, gate, proc, record);
            let spawned = spawning
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("the forking thread panicked")));
            (met, spawned)
        });
        match (met, spawned) {
            (Ok((id, pidfd)), Ok(child)) => Ok(Process {
                id,
                pidfd,
                child: Some(Mutex::new(child)),
            }),
            (Ok(_), Err(error)) => Err(failed("exec", error)),
            (Err(unmet), spawned) => {
                // Turned away at its gate, it has ended; what it says of that is no cause.
                match spawned {
                    Ok(mut child) => drop(child.wait()),
                    Err(error) if unmet.step == NO_CHILD => return Err(failed("fork", error)),
                    Err(_) => {}
                }
                Err(failed(unmet.step, unmet.source))
            }
        }
    }

    /// Takes over a process that an earlier agent started. `None`: it is gone, or its number is another one's now.
    pub fn adopt(id: &ProcessId, proc: &Path) -> io::Result<Option<Process>> {
        let Some(pidfd) = hold(id, proc)? else {
            return Ok(None);
        };
        Ok(Some(Process {
            id: id.clone(),
            pidfd: watched(pidfd)?,
            child: None,
        }))
    }

    /// Waits until the process has ended.
    pub async fn ended(&self) -> io::Result<Exit> {
        loop {
            let _readable = self.pidfd.readable().await?;
            let Some(child) = &self.child else {
                return Ok(Exit::Unknown);
            };
            let status = child
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .try_wait()?;
            if let Some(status) = status {
                return Ok(exit_of(status));
            }
            // The pidfd became readable a moment before the status could be read.
            tokio::task::yield_now().await;
        }
    }

    /// The last word on whether it has ended: the process table may not show it (`hidepid`).
    pub fn has_ended(&self) -> io::Result<bool> {
        let mut pidfd = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        Ok(poll(&mut pidfd, PollTimeout::ZERO)? > 0)
    }

    /// Sends it a signal, if it has not ended.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        send(self.pidfd.as_fd(), signal).map(drop)
    }
}

/// Sends a signal to exactly this process; `false`: it was gone.
pub fn signal(id: &ProcessId, proc: &Path, signal: i32) -> io::Result<bool> {
    let Some(pidfd) = hold(id, proc)? else {
        return Ok(false);
    };
    send(pidfd.as_fd(), signal)
}

/// `false`: it was gone.
fn send(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<bool> {
    match kernel::pidfd_send_signal(pidfd, signal) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A descriptor for this very process. The order matters: first the pidfd, then the look at who that is. The other way
/// round the number could change hands in between.
fn hold(id: &ProcessId, proc: &Path) -> io::Result<Option<OwnedFd>> {
    let pidfd = match kernel::pidfd_open(id.pid) {
        Ok(pidfd) => pidfd,
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(id.is_alive(proc)?.then_some(pidfd))
}

fn watched(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open until it is dropped and always the same descriptor, and the `AsyncFd` owns it.
    let registered = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) };
    registered.map_err(io::Error::from)
}

/// Why the child was not let through.
struct Unmet {
    step: &'static str,
    source: io::Error,
}

/// The step at which there may be no child at all.
const NO_CHILD: &str = "meet";

/// The agent's side of the gate: learns who the child is, has it recorded, and opens. All that can fail is done before.
fn meet(
    mut hello: PipeReader,
    mut gate: PipeWriter,
    proc: &Path,
    record: impl FnOnce(&ProcessId) -> io::Result<()>,
) -> Result<(ProcessId, AsyncFd<OwnedFd>), Unmet> {
    let unmet = |step| move |source| Unmet { step, source };
    let mut pid = [0; 4];
    hello.read_exact(&mut pid).map_err(unmet(NO_CHILD))?;
    let pid = u32::from_ne_bytes(pid);
    // Our own child keeps its number until we reap it.
    let pidfd = kernel::pidfd_open(pid)
        .and_then(watched)
        .map_err(unmet("pidfd"))?;
    let id = ProcessId::read(proc, pid)
        .and_then(|id| id.ok_or(io::ErrorKind::NotFound.into()))
        .map_err(unmet("look"))?;
    record(&id).map_err(unmet("record"))?;
    gate.write_all(&[1]).map_err(unmet("gate"))?;
    Ok((id, pidfd))
}

fn command(
    launch: Launch,
    says_hello: &PipeWriter,
    waits: &PipeReader,
    gate: &PipeWriter,
) -> Command {
    let mut command = Command::new(&launch.executable);
    command
        .args(&launch.args)
        .env_clear()
        .envs(&launch.env)
        .current_dir(DIRECTORY)
        .stdin(Stdio::null());
    match launch.output.try_clone() {
        Ok(copy) => command.stdout(copy).stderr(launch.output),
        // Out of descriptors: the fork will say so.
        Err(_) => command.stdout(Stdio::null()).stderr(launch.output),
    };
    let (says_hello, waits, gate) = (says_hello.as_raw_fd(), waits.as_raw_fd(), gate.as_raw_fd());
    let before_exec = move || {
        kernel::close(gate);
        kernel::leave_session()?;
        kernel::restore_signals();
        kernel::close_others_at_exec();
        kernel::write(says_hello, &std::process::id().to_ne_bytes())?;
        match kernel::read_one(waits)? {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::ECANCELED)),
        }
    };
    // SAFETY: the closure makes only calls that are allowed between fork and exec, and allocates nothing.
    unsafe { command.pre_exec(before_exec) };
    command
}

fn exit_of(status: ExitStatus) -> Exit {
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Status(code),
        (None, Some(signal)) => Exit::Signal(signal),
        (None, None) => Exit::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const PROC: &str = "/proc";

    fn launch(executable: &str, args: &[&str]) -> Launch {
        Launch {
            executable: PathBuf::from(executable),
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            env: BTreeMap::new(),
            output: File::create("/dev/null").unwrap(),
        }
    }

    /// What became of a start, and of the child that was on record.
    async fn start(
        launch: Launch,
        recorded: io::Result<()>,
    ) -> (Result<Process, StartError>, bool) {
        let mut child = None;
        let turn = Turn::next().await;
        let started = Process::start(turn, launch, Path::new(PROC), |id| {
            child = Some(id.clone());
            recorded
        });
        let lives = child.unwrap().is_alive(Path::new(PROC)).unwrap();
        (started, lives)
    }

    #[tokio::test]
    async fn how_a_process_ends_is_known_to_the_agent_that_started_it() {
        for (script, expected) in [("exit 3", Exit::Status(3)), ("kill -9 $$", Exit::Signal(9))] {
            let (started, _) = start(launch("/bin/sh", &["-c", script]), Ok(())).await;
            assert_eq!(started.unwrap().ended().await.unwrap(), expected);
        }
    }

    #[tokio::test]
    async fn a_child_that_cannot_be_put_on_record_never_runs() {
        let full = Err(io::Error::from(io::ErrorKind::StorageFull));
        let (started, lives) = start(launch("/bin/sh", &["-c", "exit"]), full).await;
        let error = started.err().unwrap().to_string();
        assert_eq!(error, "`/bin/sh` did not start: record: no storage space");
        assert!(!lives);
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_executed_says_so_and_leaves_nothing() {
        let (started, lives) = start(launch("/nowhere/serve", &[]), Ok(())).await;
        let error = started.err().unwrap().to_string();
        let expected =
            "`/nowhere/serve` did not start: exec: No such file or directory (os error 2)";
        assert_eq!(error, expected);
        assert!(!lives);
    }

    #[tokio::test]
    async fn a_signal_reaches_only_the_very_process() {
        let (started, _) = start(launch("/bin/sleep", &["600"]), Ok(())).await;
        let process = started.unwrap();
        let recycled = ProcessId {
            start_ticks: process.id.start_ticks - 1,
            ..process.id.clone()
        };
        assert!(!signal(&recycled, Path::new(PROC), 9).unwrap());
        assert!(
            Process::adopt(&recycled, Path::new(PROC))
                .unwrap()
                .is_none()
        );
        let adopted = Process::adopt(&process.id, Path::new(PROC))
            .unwrap()
            .unwrap();
        assert!(signal(&process.id, Path::new(PROC), 9).unwrap());
        assert_eq!(adopted.ended().await.unwrap(), Exit::Unknown);
        assert_eq!(process.ended().await.unwrap(), Exit::Signal(9));
        assert!(!signal(&process.id, Path::new(PROC), 9).unwrap());
    }
}
