//! Reads what a child process prints, up to a size and a deadline, and never waits for one that does not end.
//!
//! A child may leave a grandchild that keeps its pipes open, ignore SIGTERM, print without end, or hang in the
//! kernel where SIGKILL does not reach it. None of them holds the caller beyond its deadline.

use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

/// How often an exit is looked for while the pipes are silent.
const TICK: Duration = Duration::from_millis(10);
/// How long pipes that outlive the child are still read.
const DRAIN: Duration = Duration::from_millis(100);
const CHUNK_BYTES: usize = 16 * 1_024;

/// How the reading ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It has exited and is not reaped: until it is, nobody else gets its number, so that its group can be killed for certain.
    Exited,
    /// Still running at the deadline. Nobody has been killed.
    Deadline,
    /// It printed more than it may. Nobody has been killed.
    TooMuch,
}

/// What a child printed, and how that ended.
#[derive(Debug)]
pub struct Collected {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub end: End,
}

/// A pipe that is read as far as it goes.
struct Pipe {
    source: Option<std::fs::File>,
    bytes: Vec<u8>,
}

/// Reads both pipes until the child has exited and they are empty, `deadline`, or more than `max_bytes` in one of them.
pub fn collect(child: &mut Child, deadline: Instant, max_bytes: usize) -> io::Result<Collected> {
    let mut pipes = [
        Pipe::new(child.stdout.take().map(OwnedFd::from))?,
        Pipe::new(child.stderr.take().map(OwnedFd::from))?,
    ];
    let mut exited: Option<Instant> = None;
    let end = loop {
        if exited.is_none() {
            exited = has_exited(child)?.then(Instant::now);
        }
        // Read after the look for the exit, so that what came before it is not missed.
        wait(&pipes, exited.is_some())?;
        for pipe in &mut pipes {
            pipe.read(max_bytes)?;
        }
        let now = Instant::now();
        if pipes.iter().any(|pipe| pipe.bytes.len() > max_bytes) {
            break End::TooMuch;
        }
        if let Some(at) = exited {
            let all_closed = pipes.iter().all(|pipe| pipe.source.is_none());
            if all_closed || now >= at + DRAIN || now >= deadline {
                break End::Exited;
            }
        } else if now >= deadline {
            break End::Deadline;
        }
    };
    let [stdout, stderr] = pipes.map(|pipe| pipe.bytes);
    Ok(Collected {
        stdout,
        stderr,
        end,
    })
}

/// Whether it has exited, without reaping it.
fn has_exited(child: &Child) -> io::Result<bool> {
    let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
    let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    let status = waitid(Id::Pid(Pid::from_raw(pid)), look)?;
    Ok(status != WaitStatus::StillAlive)
}

/// Until a pipe has something, or one tick.
fn wait(pipes: &[Pipe], exited: bool) -> io::Result<()> {
    let mut polled: Vec<PollFd> = pipes
        .iter()
        .filter_map(|pipe| pipe.source.as_ref())
        .map(|source| PollFd::new(source.as_fd(), PollFlags::POLLIN))
        .collect();
    if exited && polled.is_empty() {
        return Ok(());
    }
    let tick = PollTimeout::try_from(TICK).unwrap_or(PollTimeout::ZERO);
    match poll(&mut polled, tick) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl Pipe {
    fn new(fd: Option<OwnedFd>) -> io::Result<Pipe> {
        if let Some(fd) = &fd {
            let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
            fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        Ok(Pipe {
            source: fd.map(std::fs::File::from),
            bytes: Vec::new(),
        })
    }

    /// Reads what is there, to one byte beyond the limit.
    fn read(&mut self, max_bytes: usize) -> io::Result<()> {
        let mut chunk = [0; CHUNK_BYTES];
        while let Some(source) = self.source.as_mut() {
            if self.bytes.len() > max_bytes {
                return Ok(());
            }
            match source.read(&mut chunk) {
                Ok(0) => self.source = None,
                Ok(count) => self.bytes.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// Far beyond what a test needs: where it is reached, the test has failed.
    const NEVER: Duration = Duration::from_secs(120);

    fn shell(script: &str) -> Child {
        Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    #[test]
    fn both_pipes_and_the_status_of_a_child_that_ends_are_whole() {
        let mut child = shell("head -c 300000 /dev/zero; echo sad >&2; exit 9");
        let collected = collect(&mut child, Instant::now() + NEVER, 1 << 20).unwrap();
        assert_eq!(collected.stdout.len(), 300_000);
        assert_eq!(collected.stderr, b"sad\n");
        assert_eq!(collected.end, End::Exited);
        assert_eq!(child.wait().unwrap().code(), Some(9));
    }

    #[test]
    fn a_grandchild_that_keeps_the_pipe_open_does_not_hold_the_reader() {
        let mut child = shell("sleep 300 & echo $!; exit 0");
        let collected = collect(&mut child, Instant::now() + NEVER, 1_024).unwrap();
        assert_eq!(collected.end, End::Exited);
        assert!(child.wait().unwrap().success());
        let grandchild = String::from_utf8(collected.stdout).unwrap();
        let grandchild = nix::unistd::Pid::from_raw(grandchild.trim().parse().unwrap());
        nix::sys::signal::kill(grandchild, nix::sys::signal::Signal::SIGKILL).unwrap();
    }

    #[test]
    fn a_child_that_never_ends_is_left_at_the_deadline() {
        let mut child = shell("echo first; exec sleep 300");
        let deadline = Instant::now() + Duration::from_millis(300);
        let collected = collect(&mut child, deadline, 1_024).unwrap();
        assert_eq!(collected.end, End::Deadline);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_child_that_prints_without_end_is_left_at_the_limit() {
        let mut child = shell("exec yes");
        let collected = collect(&mut child, Instant::now() + NEVER, 4_096).unwrap();
        assert_eq!(collected.end, End::TooMuch);
        assert!(collected.stdout.len() <= 4_096 + CHUNK_BYTES);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
