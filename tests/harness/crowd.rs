//! Many clients at once in one process: each sends one request, and says how it was answered.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Requests at once on one HTTP/2 connection; the gateway allows twice as many.
const STREAMS_MAX: usize = 512;
/// File descriptors that a test process needs beside those of its clients: engines within it, both ends of each connection.
const OTHER_FILES_MAX: u64 = 2_048;

/// How clients reach the gateway.
pub enum Door {
    /// A connection each.
    Http1(SocketAddr),
    /// As few connections as may be, by prior knowledge.
    Http2(Vec<http2::SendRequest<Full<Bytes>>>),
}

/// How a request ended, as its client saw it.
#[derive(Clone, Debug)]
pub struct Got {
    /// Which of the crowd's.
    pub number: usize,
    /// 0: the connection ended before a response.
    pub status: u16,
    pub headers: HeaderMap,
    /// `error.code` of the body, or of the last event of a stream; empty where there is none.
    pub code: String,
    pub body: String,
    /// The body came to the end that its framing and its dialect have.
    pub whole: bool,
}

/// A response whose body is not read yet. Dropped, the client leaves.
pub struct Begun {
    pub status: u16,
    pub headers: HeaderMap,
    body: Incoming,
    _connection: Option<Connection>,
}

/// A connection of its own; closed when dropped.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Raises the limit of file descriptors as far as it goes; whether so many clients can have a connection each.
pub fn fits_http1(clients: usize) -> bool {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    clients as u64 + OTHER_FILES_MAX <= hard
}

impl Door {
    /// Connections for so many clients over HTTP/2.
    pub async fn http2(addr: SocketAddr, clients: usize) -> Door {
        let mut connections = Vec::new();
        for _ in 0..clients.div_ceil(STREAMS_MAX) {
            let stream = TcpStream::connect(addr).await.unwrap();
            let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .unwrap();
            tokio::spawn(connection);
            connections.push(sender);
        }
        Door::Http2(connections)
    }

    /// Sends a request and waits for the response's head. `Err`: the connection ended before one.
    pub async fn begin(
        &self,
        number: usize,
        request: Request<Full<Bytes>>,
    ) -> Result<Begun, String> {
        let told = |error: hyper::Error| format!("{error:?}");
        match self {
            Door::Http1(addr) => {
                let stream = TcpStream::connect(addr)
                    .await
                    .map_err(|error| error.to_string())?;
                let (mut sender, connection) =
                    http1::handshake(TokioIo::new(stream)).await.map_err(told)?;
                let connection = Connection(tokio::spawn(async move {
                    let _ = connection.await;
                }));
                let response = sender.send_request(request).await.map_err(told)?;
                Ok(Begun::new(response, Some(connection)))
            }
            Door::Http2(connections) => {
                let mut sender = connections[number % connections.len()].clone();
                sender.ready().await.map_err(told)?;
                let response = sender.send_request(request).await.map_err(told)?;
                Ok(Begun::new(response, None))
            }
        }
    }

    /// Sends a request and reads the whole answer.
    pub async fn ask(&self, number: usize, request: Request<Full<Bytes>>) -> Got {
        match self.begin(number, request).await {
            Ok(begun) => begun.rest(number).await,
            Err(error) => Got {
                number,
                status: 0,
                headers: HeaderMap::new(),
                code: String::new(),
                body: error,
                whole: false,
            },
        }
    }
}

impl Begun {
    fn new(response: http::Response<Incoming>, connection: Option<Connection>) -> Begun {
        let (head, body) = response.into_parts();
        Begun {
            status: head.status.as_u16(),
            headers: head.headers,
            body,
            _connection: connection,
        }
    }

    /// The next piece of the body; `None` at its end, however it came.
    pub async fn piece(&mut self) -> Option<Bytes> {
        self.body.frame().await?.ok()?.into_data().ok()
    }

    /// Reads to the end.
    pub async fn rest(mut self, number: usize) -> Got {
        let mut body = Vec::new();
        let framed = loop {
            match self.body.frame().await {
                Some(Ok(frame)) => body.extend_from_slice(&frame.into_data().unwrap_or_default()),
                Some(Err(_)) => break false,
                None => break true,
            }
        };
        let body = String::from_utf8_lossy(&body).into_owned();
        let events = self
            .headers
            .get("content-type")
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        let last = match events {
            true => body
                .lines()
                .rev()
                .find_map(|line| line.strip_prefix("data: "))
                .unwrap_or(""),
            false => &body,
        };
        Got {
            number,
            status: self.status,
            code: code(last),
            whole: framed && (!events || last == "[DONE]"),
            headers: self.headers,
            body,
        }
    }
}

impl Got {
    /// Answered by an engine, to the end.
    pub fn is_ok(&self) -> bool {
        self.status == 200 && self.whole && self.code.is_empty()
    }
}

/// The `error.code` of a JSON text.
fn code(text: &str) -> String {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let code = &value["error"]["code"];
    code.as_str().unwrap_or_default().to_owned()
}

/// A chat of the model `fake` with directives for the engine, or none.
pub fn chat(stream: bool, fake: &str) -> Request<Full<Bytes>> {
    let mut request = Request::post("http://gateway/v1/chat/completions")
        .header("host", "gateway")
        .header("content-type", "application/json");
    if !fake.is_empty() {
        request = request.header("x-fake", fake);
    }
    request
        .body(Full::from(super::harness::chat(stream)))
        .unwrap()
}

/// Has so many clients ask at the same time; their answers in the order in which they come.
pub fn send(
    door: &Arc<Door>,
    clients: usize,
    ask: impl Fn(usize) -> Request<Full<Bytes>>,
) -> mpsc::UnboundedReceiver<Got> {
    let (tell, answers) = mpsc::unbounded_channel();
    for number in 0..clients {
        let (door, tell, request) = (door.clone(), tell.clone(), ask(number));
        tokio::spawn(async move {
            // A crowd that nobody listens to any more leaves.
            tokio::select! {
                got = door.ask(number, request) => drop(tell.send(got)),
                () = tell.closed() => {}
            }
        });
    }
    answers
}

/// The next so many answers.
pub async fn next(answers: &mut mpsc::UnboundedReceiver<Got>, count: usize) -> Vec<Got> {
    let mut got = Vec::with_capacity(count);
    while got.len() < count {
        let answer = answers.recv();
        let answer = tokio::time::timeout(super::harness::PATIENCE, answer).await;
        let answer = answer.unwrap_or_else(|_| panic!("{} of {count} were answered", got.len()));
        got.push(answer.expect("every client tells how it was answered"));
    }
    got
}
