//! The fake as a process: what only a process can do.

mod client;

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

use client::{Client, chat, get, post};
use fake_engine::process::Process;
use nix::sys::signal::kill;
use nix::unistd::{Pid, getsid};

const CHAT: &str = "/v1/chat/completions";
const SOON: Duration = Duration::from_secs(60);

fn spawn(args: &[&str]) -> Process {
    Process::spawn(Path::new(env!("CARGO_BIN_EXE_fake-engine")), args).unwrap()
}

#[test]
fn it_is_beside_the_test_executable() {
    assert_eq!(
        fake_engine::process::beside_this_test().unwrap(),
        Path::new(env!("CARGO_BIN_EXE_fake-engine"))
    );
}

#[test]
fn it_is_asked_and_told_over_its_control_address_whatever_happens() {
    let engine = spawn(&[
        "--kind",
        "llamacpp",
        "--model",
        "a",
        "--behave",
        r#"{"hang":true}"#,
    ]);
    let mut client = Client::new(engine.addr());
    client.post(CHAT, &chat(true), "{}");
    engine.wait(SOON, |state| state.open == 1).unwrap();
    engine.behave(r#"{"hang":null,"accept":false}"#).unwrap();
    assert!(std::net::TcpStream::connect(engine.addr()).is_err());
    engine.behave(r#"{"accept":true}"#).unwrap();
    assert_eq!(get(engine.addr(), "/health").unwrap().status, 200);
    assert!(engine.behave(r#"{"nope":1}"#).is_err());
    drop(client);
    engine
        .wait(SOON, |state| state.open == 0 && state.cancelled == 1)
        .unwrap();
}

#[test]
fn it_exits_in_mid_stream_and_after_so_many_requests() {
    let mut engine = spawn(&["--kind", "vllm"]);
    let answer = post(
        engine.addr(),
        CHAT,
        &chat(true),
        r#"{"die_after":2,"how":"exit"}"#,
    )
    .unwrap();
    assert!(!answer.whole && answer.text().contains("t1"));
    assert_eq!(engine.exited(SOON).unwrap().unwrap().code(), Some(1));
    let mut engine = spawn(&["--kind", "vllm", "--behave", r#"{"exit_after":1}"#]);
    assert_eq!(
        post(engine.addr(), CHAT, &chat(false), "{}")
            .unwrap()
            .status,
        200
    );
    assert!(post(engine.addr(), CHAT, &chat(false), "{}").is_none());
    assert_eq!(engine.exited(SOON).unwrap().unwrap().code(), Some(1));
}

#[test]
fn it_takes_signals_or_not() {
    let mut engine = spawn(&[]);
    engine.terminate().unwrap();
    assert_eq!(engine.exited(SOON).unwrap().unwrap().code(), Some(0));
    let mut engine = spawn(&["--ignore-sigterm"]);
    engine.terminate().unwrap();
    assert_eq!(engine.exited(Duration::from_millis(300)).unwrap(), None);
    assert_eq!(get(engine.addr(), "/health").unwrap().status, 200);
    engine.freeze().unwrap();
    let mut client = Client::new(engine.addr());
    client.send(b"GET /health HTTP/1.1\r\n\r\n");
    assert!(client.is_silent(Duration::from_millis(200)));
    engine.thaw().unwrap();
    assert_eq!(client.answer().unwrap().status, 200);
    assert_eq!(engine.kill().unwrap().signal(), Some(9));
}

#[test]
fn it_crashes_at_the_end_of_loading_when_told_so() {
    let mut engine = spawn(&["--load-ms", "100", "--crash-at-load", "3"]);
    assert_eq!(engine.exited(SOON).unwrap().unwrap().code(), Some(3));
}

#[test]
fn it_leaves_a_grandchild_in_a_session_of_its_own() {
    let mut engine = spawn(&["--grandchild"]);
    let grandchild = Pid::from_raw(engine.grandchild().unwrap());
    engine.kill().unwrap();
    assert!(kill(grandchild, None).is_ok(), "it outlives its parent");
    assert_ne!(getsid(Some(grandchild)).unwrap(), getsid(None).unwrap());
}
