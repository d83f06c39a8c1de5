//! A process of a test's own, what it says on stderr, and its end. Included by path: it needs nothing else of the harness.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use fake_engine::Patience;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// No test waits for longer; none waits for less than what it waits for.
pub const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A process, killed when dropped.
pub struct Process {
    child: Child,
    said: Receiver<String>,
    heard: Vec<String>,
}

impl Process {
    /// Starts it without a stdin, its stdout thrown away.
    pub fn start(command: &mut Command) -> Process {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (lines, said) = channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if lines.send(line).is_err() {
                    return;
                }
            }
        });
        Process {
            child,
            said,
            heard: Vec::new(),
        }
    }

    /// Waits for a line with all of this in it that was not returned before.
    pub fn says(&mut self, wanted: &[&str]) -> String {
        let is_it = |line: &String| wanted.iter().all(|wanted| line.contains(wanted));
        if let Some(at) = self.heard.iter().position(is_it) {
            return self.heard.remove(at);
        }
        let mut patience = Patience::new(PATIENCE);
        loop {
            match self.said.recv_timeout(LOOK_EVERY) {
                Ok(line) if is_it(&line) => return line,
                Ok(line) => self.heard.push(line),
                Err(RecvTimeoutError::Timeout) if !patience.is_over() => {}
                Err(_) => panic!("it never said {wanted:?}, but {:#?}", self.heard),
            }
        }
    }

    /// Whether a line with this in it has come by now, other than those that [`says`](Process::says) returned.
    pub fn has_said(&mut self, wanted: &str) -> bool {
        self.heard.extend(self.said.try_iter());
        self.heard.iter().any(|line| line.contains(wanted))
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Ends it for certain.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn ends(&mut self) -> ExitStatus {
        let mut patience = Patience::new(PATIENCE);
        while !patience.is_over() {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        panic!("it does not end: {:#?}", self.heard);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
