//! The fake engine as a child process: to be killed, stopped, and asked over HTTP.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use crate::{Patience, StateView};

/// How long a control request may take, on a machine that stalls, in milliseconds.
const CONTROL_MAX_MS: u64 = 60_000;
/// How often the state is looked at while waiting, in milliseconds.
const LOOK_EVERY_MS: u64 = 5;

/// A running child, killed on Drop (its grandchild too).
pub struct Process {
    child: Child,
    addr: SocketAddr,
    control: SocketAddr,
    grandchild: Option<i32>,
}

/// `target/PROFILE/fake-engine`, beside the test executable that runs.
pub fn beside_this_test() -> io::Result<PathBuf> {
    let test = std::env::current_exe()?;
    // target/PROFILE/deps/TEST
    let profile = test
        .parent()
        .and_then(Path::parent)
        .ok_or(io::ErrorKind::NotFound)?;
    Ok(profile.join("fake-engine"))
}

impl Process {
    /// Starts `executable` with these arguments (`--control` is added); returns when the port is bound.
    pub fn spawn<S: AsRef<OsStr>>(
        executable: &Path,
        args: impl IntoIterator<Item = S>,
    ) -> io::Result<Process> {
        let mut child = Command::new(executable)
            .args(args)
            .args(["--control", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        match announcements(&mut child) {
            Ok((addr, control, grandchild)) => Ok(Process {
                child,
                addr,
                control,
                grandchild,
            }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://ADDR`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process that `--grandchild` left in a session of its own.
    pub fn grandchild(&self) -> Option<i32> {
        self.grandchild
    }

    /// `kill -9`, and waits for the end.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }

    /// SIGTERM, without waiting.
    pub fn terminate(&self) -> io::Result<()> {
        self.signal(Signal::SIGTERM)
    }

    /// SIGSTOP: frozen, connections open. Returns when the last of its threads has stopped: the signal only asks for it.
    pub fn freeze(&self) -> io::Result<()> {
        self.signal(Signal::SIGSTOP)?;
        // An end is left for `exited` to take.
        let stopped = WaitPidFlag::WSTOPPED | WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
        waitid(Id::Pid(pid(self.child.id())), stopped)?;
        Ok(())
    }

    /// SIGCONT.
    pub fn thaw(&self) -> io::Result<()> {
        self.signal(Signal::SIGCONT)
    }

    /// Waits for the end; `None`: it still runs.
    pub fn exited(&mut self, within: Duration) -> io::Result<Option<ExitStatus>> {
        let mut patience = Patience::new(within);
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            if patience.is_over() {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(LOOK_EVERY_MS));
        }
    }

    /// `GET /fake/state`
    pub fn state(&self) -> io::Result<StateView> {
        serde_json::from_slice(&self.control("GET", "/fake/state", "")?).map_err(io::Error::other)
    }

    /// `POST /fake/behave`; refused keys are an error.
    pub fn behave(&self, json: &str) -> io::Result<()> {
        self.control("POST", "/fake/behave", json).map(drop)
    }

    /// `POST /fake/reset`
    pub fn reset(&self) -> io::Result<()> {
        self.control("POST", "/fake/reset", "").map(drop)
    }

    /// Waits until the state is as wanted, or `within` is over; the last state either way (`Err`: never as wanted).
    pub fn wait(
        &self,
        within: Duration,
        wanted: impl Fn(&StateView) -> bool,
    ) -> Result<StateView, Box<StateView>> {
        let mut patience = Patience::new(within);
        loop {
            let state = self.state().unwrap_or_default();
            if wanted(&state) {
                return Ok(state);
            }
            if patience.is_over() {
                return Err(Box::new(state));
            }
            std::thread::sleep(Duration::from_millis(LOOK_EVERY_MS));
        }
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        kill(pid(self.child.id()), signal).map_err(io::Error::from)
    }

    fn control(&self, method: &str, path: &str, body: &str) -> io::Result<Vec<u8>> {
        let limit = Duration::from_millis(CONTROL_MAX_MS);
        let mut stream = TcpStream::connect_timeout(&self.control, limit)?;
        stream.set_read_timeout(Some(limit))?;
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: fake\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let split = answer
            .windows(4)
            .position(|window| window == b"\r\n\r\n")
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        let body = answer.split_off(split + 4);
        if answer.starts_with(b"HTTP/1.1 200") {
            return Ok(body);
        }
        Err(io::Error::other(
            String::from_utf8_lossy(&body).into_owned(),
        ))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(grandchild) = self.grandchild {
            let _ = kill(Pid::from_raw(grandchild), Signal::SIGKILL);
        }
    }
}

fn pid(id: u32) -> Pid {
    Pid::from_raw(i32::try_from(id).unwrap_or(i32::MAX))
}

/// Reads the first lines: `listening ADDR`, then `control ADDR`, with `grandchild PID` before both if there is one.
fn announcements(child: &mut Child) -> io::Result<(SocketAddr, SocketAddr, Option<i32>)> {
    let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let (mut addr, mut grandchild) = (None, None);
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        match line.split_once(' ') {
            Some(("grandchild", number)) => grandchild = number.parse().ok(),
            Some(("listening", text)) => addr = Some(text.parse().map_err(io::Error::other)?),
            Some(("control", text)) => {
                let control = text.parse().map_err(io::Error::other)?;
                return Ok((addr.ok_or(io::ErrorKind::InvalidData)?, control, grandchild));
            }
            _ => {}
        }
    }
    Err(io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "the fake engine ended before it listened",
    ))
}
