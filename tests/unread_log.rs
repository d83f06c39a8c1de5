//! A log that nobody reads: lines are lost, requests are not.

mod harness;
#[path = "harness/net.rs"]
mod net;

use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fake_engine::{Kind, Options, start};
use harness::{Client, PATIENCE, chat};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Requests whose trace fills any pipe many times over (64 KiB on Linux).
const REQUESTS: usize = 300;

fn free_address() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, net::free_ports(1)))
}

#[test]
fn a_standard_error_that_nobody_reads_stops_no_request_and_no_shutdown() {
    let engine = start(Options::new(Kind::Vllm)).unwrap();
    let dir = std::env::temp_dir().join(format!("llmgw-unread-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (clients, admin) = (free_address(), free_address());
    let config = format!(
        "listen: {clients}\nadmin: {admin}\nlog: {{level: trace}}\nmodels:\n  - name: fake\n    endpoints: [{{url: \"{}\", engine: vllm}}]\n",
        engine.url()
    );
    let file = dir.join("llmgw.yaml");
    std::fs::write(&file, config).unwrap();
    // The pipe is held and never read.
    let mut server = Command::new(env!("CARGO_BIN_EXE_llmgw"))
        .args(["server", "--config"])
        .arg(&file)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while std::net::TcpStream::connect(clients).is_err() {
        assert!(began.elapsed() < PATIENCE, "it does not listen");
        std::thread::yield_now();
    }
    let mut client = Client::new(clients);
    for number in 0..REQUESTS {
        client.post("/v1/chat/completions", &chat(false), "");
        assert_eq!(client.answer().status(), 200, "request {number}");
    }
    kill(Pid::from_raw(server.id() as i32), Signal::SIGTERM).unwrap();
    let told = Instant::now();
    let status = loop {
        if let Some(status) = server.try_wait().unwrap() {
            break status;
        }
        if told.elapsed() > PATIENCE {
            server.kill().unwrap();
            panic!("SIGTERM did not end it");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(0));
    std::fs::remove_dir_all(&dir).unwrap();
}
