//! Processes that end with the benchmark, however it ends.

use std::io::{self, BufRead, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::load;
use crate::process::Measured;

const START_TIMEOUT: Duration = Duration::from_secs(20);
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A process of the benchmark; ended when dropped.
pub struct Running {
    child: Child,
}

impl Running {
    pub fn start(command: &mut Command) -> io::Result<Running> {
        die_with_parent(command);
        Ok(Running {
            child: command.spawn()?,
        })
    }

    pub fn measured(&self) -> Measured {
        Measured {
            pid: self.child.id(),
        }
    }

    /// Ends it as a crash would.
    pub fn kill(mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(|_| ())
    }

    /// Waits until the process says `ready` on its standard output.
    pub fn wait_ready(&mut self) -> io::Result<()> {
        let out = self.child.stdout.take();
        let out = out.ok_or_else(|| io::Error::other("its standard output is not piped"))?;
        let mut reader = BufReader::new(out);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        self.child.stdout = Some(reader.into_inner());
        match line.trim() {
            "ready" => Ok(()),
            other => Err(io::Error::other(format!(
                "a process said `{other}` instead of `ready`"
            ))),
        }
    }
}

impl Running {
    /// Ends a load that holds streams, and reads what it saw.
    pub fn end(mut self) -> io::Result<load::Outcome> {
        drop(self.child.stdin.take());
        let mut line = String::new();
        let out = self.child.stdout.take();
        let out = out.ok_or_else(|| io::Error::other("its standard output is not piped"))?;
        BufReader::new(out).read_line(&mut line)?;
        serde_json::from_str(&line).map_err(io::Error::other)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A load that holds streams ends with its standard input.
        drop(self.child.stdin.take());
        let pid = Pid::from_raw(self.child.id().cast_signed());
        let _ = kill(pid, Signal::SIGTERM);
        let started = Instant::now();
        while started.elapsed() < STOP_TIMEOUT {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(POLL_INTERVAL),
                Ok(Some(_)) | Err(_) => return,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn die_with_parent(command: &mut Command) {
    // SAFETY: prctl is async-signal-safe and touches nothing but the new process.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
}

/// A port that was free a moment ago.
pub fn free_address() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}

/// Waits until somebody accepts there.
pub fn wait_for(address: SocketAddr) -> io::Result<()> {
    let started = Instant::now();
    loop {
        match TcpStream::connect(address) {
            Ok(_) => return Ok(()),
            Err(error) if started.elapsed() > START_TIMEOUT => return Err(error),
            Err(_) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

/// This program again, as one of its parts.
pub fn part(name: &str) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(name);
    Ok(command)
}

/// Runs the load to its end.
pub fn run_load(arguments: &[String]) -> io::Result<load::Outcome> {
    let mut command = part("load")?;
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    die_with_parent(&mut command);
    let output = command.output()?;
    if !output.status.success() {
        return Err(io::Error::other(format!(
            "the load ended with {}",
            output.status
        )));
    }
    serde_json::from_slice(&output.stdout).map_err(io::Error::other)
}
