//! What the tests of routing, reloads and shutdown need beside the harness: many requests at once, records, commands.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, ScopedJoinHandle};
use std::time::Duration;

use fake_engine::{Kind, Options, Running};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::harness::{Answer, Client, End, Gateway};

/// A connection that takes longer is left hanging.
const FILL_MAX: Duration = Duration::from_millis(200);

/// Starts an engine of this kind that behaves like this from the beginning.
pub fn engine(kind: Kind, behave: &str) -> Running {
    fake_engine::start(Options::new(kind).behave(behave)).unwrap()
}

/// Runs the closure so many times at once, with the number of each; the results in order.
pub fn at_once<T: Send>(count: usize, run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<ScopedJoinHandle<'_, T>> = (0..count)
            .map(|number| scope.spawn(move || run(number)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Opens a stream and returns once its first event is there.
pub fn begin_stream(gateway: &Gateway, body: &str, fake: &str) -> Client {
    let mut client = gateway.client();
    client.post("/v1/chat/completions", body, fake);
    assert_eq!(client.head().status, 200);
    client.body_until("data:");
    client
}

/// Reads a stream that has begun to its end, which must be a proper one.
pub fn finish_stream(mut client: Client) {
    let mut text = Vec::new();
    let end = loop {
        match client.piece() {
            Ok(piece) => text.extend_from_slice(&piece),
            Err(end) => break end,
        }
    };
    let text = String::from_utf8(text).unwrap();
    assert_eq!(end, End::Complete, "{text}");
    assert!(text.contains("data: [DONE]"), "{text}");
}

/// A chat of this model.
pub fn chat_of(model: &str, stream: bool) -> String {
    format!(
        r#"{{"model":"{model}","stream":{stream},"messages":[{{"role":"user","content":"hello you"}}]}}"#
    )
}

/// What engines have been asked for so far, together.
pub fn calls(engines: &[Running]) -> u64 {
    engines.iter().map(|engine| engine.state().total).sum()
}

/// The one replica whose id is this engine's address.
pub fn replica(gateway: &Gateway, engine: SocketAddr) -> Value {
    let id = engine.to_string();
    let mut rows = gateway.replicas().into_iter();
    rows.find(|row| row["id"] == id.as_str())
        .unwrap_or_else(|| panic!("no replica `{id}`"))
}

pub fn assert_ok(answers: &[Answer]) {
    for answer in answers {
        assert_eq!(answer.status(), 200, "{}", answer.text());
        assert_eq!(answer.end, End::Complete);
    }
}

/// The access records so far, of a server that logs as JSON.
pub fn records(gateway: &Gateway) -> Vec<Value> {
    let log = gateway.log();
    let lines = log
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|_| panic!("{line}")));
    lines.filter(|line| line["target"] == "access").collect()
}

/// Waits until there are so many access records; all of them.
pub fn await_records(gateway: &Gateway, count: usize) -> Vec<Value> {
    gateway.until(&format!("{count} access records"), || {
        records(gateway).len() >= count
    });
    records(gateway)
}

/// The record of one request.
pub fn record_of<'a>(records: &'a [Value], id: &str) -> &'a Value {
    let mut found = records.iter().filter(|record| record["request_id"] == id);
    let record = found
        .next()
        .unwrap_or_else(|| panic!("no record of `{id}`"));
    assert!(found.next().is_none(), "two records of `{id}`");
    record
}

/// A finished `llmgw` command.
pub struct Ran {
    pub status: i32,
    pub stdout: String,
    pub stderr: String,
}

/// Runs `llmgw` with these arguments in this directory.
pub fn llmgw(directory: &Path, arguments: &[&str]) -> Ran {
    let output: Output = Command::new(env!("CARGO_BIN_EXE_llmgw"))
        .args(arguments)
        .current_dir(directory)
        .env_remove("LLMGW_ADMIN")
        .env_remove("LLMGW_ADMIN_TOKEN")
        .env_remove("LLMGW_ADMIN_CA")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Ran {
        status: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// `llmgw ctl` against a running gateway.
pub fn ctl(gateway: &Gateway, arguments: &[&str]) -> Ran {
    let admin = format!("http://{}", gateway.admin);
    let arguments = [&["ctl", "--admin", &admin], arguments].concat();
    llmgw(&gateway.dir, &arguments)
}

/// Sends a signal to the gateway.
pub fn signal(gateway: &Gateway, signal: Signal) {
    kill(Pid::from_raw(gateway.pid().cast_signed()), signal).unwrap();
}

/// An engine that answers its probes on the connections it has, and takes no new one when told so, as a host behind a
/// broken route: neither accepted nor refused.
pub struct Fading {
    pub addr: SocketAddr,
    vanished: Arc<AtomicBool>,
    /// Accepts until then, and hands back the listener, which stays open.
    accepting: Option<JoinHandle<TcpListener>>,
    /// The listener, when nobody accepts any more.
    deaf: Option<TcpListener>,
    /// They fill the queue of connections that wait to be accepted.
    waiting: Vec<TcpStream>,
}

impl Fading {
    pub fn start() -> Fading {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .unwrap();
        let listener = {
            let _entered = runtime.enter();
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            socket.bind(any).unwrap();
            socket.listen(0).unwrap().into_std().unwrap()
        };
        listener.set_nonblocking(false).unwrap();
        let addr = listener.local_addr().unwrap();
        let vanished = Arc::new(AtomicBool::new(false));
        let gone = vanished.clone();
        let accepting = std::thread::spawn(move || {
            loop {
                let (stream, _) = listener.accept().unwrap();
                if gone.load(Ordering::Relaxed) {
                    return listener;
                }
                std::thread::spawn(move || Fading::answer_probes(stream));
            }
        });
        Fading {
            addr,
            vanished,
            accepting: Some(accepting),
            deaf: None,
            waiting: Vec::new(),
        }
    }

    /// From now on nothing connects. Returns when that is so.
    pub fn vanish(&mut self) {
        self.vanished.store(true, Ordering::Relaxed);
        // The accepting thread wakes for a last one.
        drop(TcpStream::connect(self.addr).unwrap());
        self.deaf = self.accepting.take().map(|thread| thread.join().unwrap());
        // The kernel rounds the backlog up: filled until a connection is left hanging.
        while let Ok(stream) = TcpStream::connect_timeout(&self.addr, FILL_MAX) {
            self.waiting.push(stream);
        }
    }

    fn answer_probes(stream: TcpStream) {
        let body = r#"{"object":"list","data":[{"id":"fake","object":"model"}]}"#;
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut writer = stream.try_clone().unwrap();
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            // The empty line ends a request without a body.
            if line.is_empty() && writer.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    }
}

/// A thread that does something again and again until it is told to stop; then its results.
pub struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<Answer>>>,
}

impl Load {
    /// Chats without a pause on so many connections, each request on its own connection.
    pub fn start(addr: SocketAddr, threads: usize, body: String, fake: &'static str) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..threads).map(|_| {
            let (stop, body) = (stop.clone(), body.clone());
            std::thread::spawn(move || {
                let mut answers = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let mut client = Client::new(addr);
                    client.post("/v1/chat/completions", &body, fake);
                    answers.push(client.answer());
                }
                answers
            })
        });
        Load {
            threads: threads.collect(),
            stop,
        }
    }

    /// All the answers.
    pub fn stop(self) -> Vec<Answer> {
        self.stop.store(true, Ordering::Relaxed);
        let answers = self.threads.into_iter();
        answers.flat_map(|thread| thread.join().unwrap()).collect()
    }
}
