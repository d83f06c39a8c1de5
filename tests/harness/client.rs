//! One client's connection: requests as bytes, answers with the way in which they ended.

use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

use super::PATIENCE;

/// One connection to the server.
pub struct Client<S = TcpStream> {
    pub stream: S,
    /// What it says whom it asks.
    host: String,
    buffer: Vec<u8>,
    framing: Framing,
    /// How the connection ended, if it did.
    ended: Option<End>,
}

/// How long the body at hand is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Chunked,
    Length(usize),
    UntilClose,
    /// No body, or it is read.
    Done,
}

/// How a body ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// As its framing says: the terminating chunk, or all of its length.
    Complete,
    /// The connection was closed before that.
    Cut,
    /// The connection was reset before that.
    Reset,
}

/// A response's status and headers, names in lower case.
#[derive(Clone, Debug)]
pub struct Head {
    pub status: u16,
    pub headers: Vec<(String, String)>,
}

/// A whole response.
#[derive(Clone, Debug)]
pub struct Answer {
    pub head: Head,
    pub body: Vec<u8>,
    pub end: End,
}

// === impl Client ===

impl Client {
    pub fn new(addr: SocketAddr) -> Client {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut client = Client::over(stream);
        client.host = addr.to_string();
        client
    }

    /// Says that nothing more will be sent, and reads on.
    pub fn half_close(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }

    /// Ends the connection with a reset.
    pub fn reset(self) {
        // The standard library has no stable way to set a linger time.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .unwrap();
        let _entered = runtime.enter();
        self.stream.set_nonblocking(true).unwrap();
        let stream = tokio::net::TcpStream::from_std(self.stream).unwrap();
        stream.set_zero_linger().unwrap();
    }

    /// Whether nothing comes for so long.
    pub fn is_silent(&mut self, time: Duration) -> bool {
        if !self.buffer.is_empty() {
            return false;
        }
        self.stream.set_read_timeout(Some(time)).unwrap();
        let peeked = self.stream.peek(&mut [0]);
        self.stream.set_read_timeout(Some(PATIENCE)).unwrap();
        matches!(peeked, Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
    }
}

impl<S: Read + Write> Client<S> {
    pub fn over(stream: S) -> Client<S> {
        Client {
            stream,
            host: "gateway".to_owned(),
            buffer: Vec::new(),
            framing: Framing::Done,
            ended: None,
        }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.try_send(bytes).unwrap();
    }

    fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)?;
        self.stream.flush()
    }

    /// Sends a whole request; its length is added.
    pub fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        self.try_request(method, path, headers, body).unwrap();
    }

    /// The same to a server that may be gone.
    pub fn try_request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> std::io::Result<()> {
        let host = &self.host;
        let mut bytes = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\n");
        for (name, value) in headers {
            let _ = write!(bytes, "{name}: {value}\r\n");
        }
        if !body.is_empty() || method == "POST" {
            let _ = write!(bytes, "content-length: {}\r\n", body.len());
        }
        let bytes = [bytes.as_bytes(), b"\r\n", body].concat();
        self.try_send(&bytes)
    }

    /// Sends a POST of JSON; `fake` are directives for the engine, or nothing.
    pub fn post(&mut self, path: &str, body: &str, fake: &str) {
        let mut headers = vec![("content-type", "application/json")];
        if !fake.is_empty() {
            headers.push(("x-fake", fake));
        }
        self.request("POST", path, &headers, body.as_bytes());
    }

    /// Reads a response's head. `None`: the connection ended before one.
    pub fn try_head(&mut self) -> Option<Head> {
        let end = loop {
            match find(&self.buffer, b"\r\n\r\n") {
                Some(at) => break at + 4,
                None if self.fill() => {}
                None => return None,
            }
        };
        let text: Vec<u8> = self.buffer.drain(..end).collect();
        let text = String::from_utf8(text).unwrap();
        let mut lines = text.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap();
        let headers = lines.filter_map(|line| line.split_once(':'));
        let head = Head {
            status: status.parse().unwrap(),
            headers: headers
                .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
                .collect(),
        };
        let length = head.header("content-length");
        self.framing = match (head.header("transfer-encoding"), length) {
            (Some("chunked"), _) => Framing::Chunked,
            (_, Some(length)) => Framing::Length(length.parse().unwrap()),
            _ if head.status == 204 || head.status < 200 => Framing::Done,
            _ => Framing::UntilClose,
        };
        Some(head)
    }

    /// Reads a response's head.
    pub fn head(&mut self) -> Head {
        self.try_head()
            .expect("the connection ended before a response")
    }

    /// Reads the next piece of the body, a chunk if it is chunked. `Err`: the body ended, in this way.
    pub fn piece(&mut self) -> Result<Vec<u8>, End> {
        match self.framing {
            Framing::Done => Err(End::Complete),
            Framing::Chunked => self.chunk(),
            Framing::Length(0) => {
                self.framing = Framing::Done;
                Err(End::Complete)
            }
            Framing::Length(left) => {
                if self.buffer.is_empty() && !self.fill() {
                    return Err(self.ended.unwrap_or(End::Cut));
                }
                let piece: Vec<u8> = self.buffer.drain(..left.min(self.buffer.len())).collect();
                self.framing = Framing::Length(left - piece.len());
                Ok(piece)
            }
            Framing::UntilClose => {
                if self.buffer.is_empty() && !self.fill() {
                    return Err(self.ended.unwrap_or(End::Cut));
                }
                Ok(std::mem::take(&mut self.buffer))
            }
        }
    }

    /// Reads whole chunks until the body holds this text; the body so far.
    pub fn body_until(&mut self, wanted: &str) -> Vec<u8> {
        let mut body = Vec::new();
        while find(&body, wanted.as_bytes()).is_none() {
            match self.piece() {
                Ok(piece) => body.extend_from_slice(&piece),
                Err(end) => panic!(
                    "{end:?} before `{wanted}`: {}",
                    String::from_utf8_lossy(&body)
                ),
            }
        }
        body
    }

    /// Reads one response. `None`: the connection ended before one.
    pub fn try_answer(&mut self) -> Option<Answer> {
        let head = self.try_head()?;
        let (body, end) = self.rest_bytes();
        Some(Answer { head, body, end })
    }

    /// Reads what is left of the body at hand, and how it ended.
    pub fn rest(&mut self) -> (String, End) {
        let (body, end) = self.rest_bytes();
        (String::from_utf8_lossy(&body).into_owned(), end)
    }

    fn rest_bytes(&mut self) -> (Vec<u8>, End) {
        let mut body = Vec::new();
        loop {
            match self.piece() {
                Ok(piece) => body.extend_from_slice(&piece),
                Err(end) => return (body, end),
            }
        }
    }

    /// Reads one response.
    pub fn answer(&mut self) -> Answer {
        self.try_answer()
            .expect("the connection ended before a response")
    }

    /// Reads to the connection's end; how it came.
    pub fn closed(&mut self) -> End {
        while self.fill() {}
        self.ended.unwrap()
    }

    fn chunk(&mut self) -> Result<Vec<u8>, End> {
        let line_end = self.await_bytes(|buffer| find(buffer, b"\r\n"))?;
        let size = std::str::from_utf8(&self.buffer[..line_end]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        let (start, end) = (line_end + 2, line_end + 2 + size + 2);
        self.await_bytes(|buffer| (buffer.len() >= end).then_some(end))?;
        let chunk = self.buffer[start..start + size].to_vec();
        self.buffer.drain(..end);
        if size > 0 {
            return Ok(chunk);
        }
        self.framing = Framing::Done;
        Err(End::Complete)
    }

    fn await_bytes(&mut self, found: impl Fn(&[u8]) -> Option<usize>) -> Result<usize, End> {
        loop {
            match found(&self.buffer) {
                Some(at) => return Ok(at),
                None if self.fill() => {}
                None => return Err(self.ended.unwrap_or(End::Cut)),
            }
        }
    }

    fn fill(&mut self) -> bool {
        let mut bytes = [0; 64 * 1024];
        match self.stream.read(&mut bytes) {
            Ok(0) => self.ended = Some(End::Cut),
            Ok(count) => {
                self.buffer.extend_from_slice(&bytes[..count]);
                return true;
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                self.ended = Some(End::Reset);
            }
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => self.ended = Some(End::Cut),
            // The test was stopped, and goes on.
            Err(error) if error.kind() == ErrorKind::Interrupted => return self.fill(),
            Err(error) => panic!("nothing came from the gateway: {error}"),
        }
        false
    }
}

// === impl Head, Answer ===

impl Head {
    /// The first value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let name = name.to_ascii_lowercase();
        let mut headers = self.headers.iter();
        headers
            .find(|(n, _)| *n == name)
            .map(|(_, value)| value.as_str())
    }
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.head.status
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.header(name)
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{} {error}: {}", self.status(), self.text()))
    }

    /// The `data:` lines of an event stream.
    pub fn data(&self) -> Vec<String> {
        data(&self.text())
    }

    /// `error.code` of an error answer.
    pub fn code(&self) -> String {
        self.json()["error"]["code"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }
}

/// The `data:` lines of an event stream.
pub fn data(text: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("data:"));
    lines.map(|line| line.trim_start().to_owned()).collect()
}

/// A chat request of the model `fake`.
pub fn chat(stream: bool) -> String {
    format!(
        r#"{{"model":"fake","stream":{stream},"messages":[{{"role":"user","content":"hello you"}}]}}"#
    )
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}
