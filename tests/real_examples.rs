//! The examples that start everything themselves, run as somebody would who has just cloned this.
//!
//! They take turns, since both have engines that need the machine. `tests/real/prepare` makes the engine ready; without that they
//! print `skipped: …` and pass, unless LLMGW_REQUIRE_REAL=1.

#[path = "harness/real.rs"]
mod real;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// An answer that takes longer fails.
const SILENT_MAX: Duration = Duration::from_secs(60);

/// An example's turn; `None` where there is no engine.
fn turn(example: &str) -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    real::prepared(example)?;
    // One that failed in its turn must not fail the others.
    Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A running example, told to end when dropped.
struct Example(Child);

impl Example {
    fn start(name: &str, arguments: &[&str]) -> Example {
        let example = Command::new(Path::new(ROOT).join("examples").join(name).join("run"))
            .args(arguments)
            .env("LLMGW_BIN", env!("CARGO_BIN_EXE_llmgw"))
            .current_dir(std::env::temp_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        Example(example.unwrap())
    }

    fn interrupt(&self) {
        let _ = kill(Pid::from_raw(self.0.id() as i32), Signal::SIGINT);
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        self.interrupt();
        let _ = self.0.wait();
    }
}

#[test]
fn the_quickstart_streams_an_answer_and_leaves_nothing_behind() {
    let Some(_turn) = turn("the quickstart") else {
        return;
    };
    let mut quickstart = Example::start("quickstart", &[]);
    let mut said = String::new();
    let mut lines = BufReader::new(quickstart.0.stdout.take().unwrap());
    while !said.contains("ctrl-C ends all of it") {
        let read = lines.read_line(&mut said).unwrap();
        assert!(read > 0, "it ended early: {said}");
    }
    for part in ["Paris", "first word after", "ctl logs smollm2/0"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let addresses: Vec<&str> = said
        .split("http://")
        .skip(1)
        .filter_map(|rest| {
            rest.split(|c: char| !(c.is_ascii_digit() || ".:".contains(c)))
                .next()
        })
        .collect();
    assert!(lists_the_model(addresses[0]), "{said}");
    assert_eq!(engines("quickstart").len(), 1);

    quickstart.interrupt();
    assert!(quickstart.0.wait().unwrap().success());
    for address in addresses {
        assert!(TcpStream::connect(address).is_err(), "{address}: {said}");
    }
    assert_eq!(engines("quickstart"), [0; 0]);
}

#[test]
fn two_nodes_serve_one_model_and_one_of_them_is_drained() {
    let Some(_turn) = turn("two nodes") else {
        return;
    };
    let mut example = Example::start("two-nodes", &["--once"]);
    let mut said = String::new();
    let mut stdout = example.0.stdout.take().unwrap();
    stdout.read_to_string(&mut said).unwrap();
    assert!(example.0.wait().unwrap().success(), "{said}");
    let (before, after) = said.split_once("draining n1").unwrap();
    for part in ["smollm2/0  ready  n1", "smollm2/1  ready  n2", "Paris"] {
        assert!(before.contains(part), "{part}: {said}");
    }
    for part in [
        "n1 is empty",
        "smollm2/1  ready  n2",
        "smollm2/2  ready  n2",
        "Paris",
        "n1 is put back into use",
    ] {
        assert!(after.contains(part), "{part}: {said}");
    }
    assert_eq!(engines("two-nodes"), [0; 0]);
}

fn lists_the_model(address: &str) -> bool {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SILENT_MAX)).unwrap();
    let request =
        format!("GET /v1/models HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.starts_with("HTTP/1.1 200 ") && answer.contains("\"smollm2\"")
}

/// The engines of an example: what was started with its state in the environment.
fn engines(example: &str) -> Vec<u32> {
    let state = format!("LLMGW_STATE={ROOT}/.llmgw/{example}/");
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        variables.any(|variable| variable.starts_with(state.as_bytes()))
    })
    .collect()
}
