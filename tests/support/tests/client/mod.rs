//! A client that shows the bytes: status, header lines and body as they came.

#![allow(dead_code)] // Each test binary uses its own part.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A test that waits longer has failed, in seconds.
const PATIENCE_S: u64 = 60;

/// A response, or what came of it.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// In the order and the case they came in.
    pub headers: Vec<(String, String)>,
    /// Without chunk framing.
    pub body: Vec<u8>,
    /// The chunks, if it was chunked.
    pub chunks: Vec<Vec<u8>>,
    /// Whether the message came to its proper end.
    pub whole: bool,
    /// Whether the connection was reset.
    pub reset: bool,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The `data:` lines of an event stream.
    pub fn data(&self) -> Vec<String> {
        self.text()
            .lines()
            .filter_map(|line| line.strip_prefix("data: ").map(str::to_owned))
            .collect()
    }
}

/// A connection to the engine.
pub struct Client {
    pub stream: TcpStream,
    buffer: Vec<u8>,
    ended: bool,
    reset: bool,
}

impl Client {
    pub fn new(addr: SocketAddr) -> Client {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(PATIENCE_S)))
            .unwrap();
        Client {
            stream,
            buffer: Vec::new(),
            ended: false,
            reset: false,
        }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Sends a POST with a JSON body and directives.
    pub fn post(&mut self, path: &str, body: &str, fake: &str) {
        let length = body.len();
        self.send(
            format!("POST {path} HTTP/1.1\r\nHost: fake\r\nx-fake: {fake}\r\nContent-Length: {length}\r\n\r\n{body}")
                .as_bytes(),
        );
    }

    /// Reads until the buffer has these bytes; what it has then.
    pub fn read_until(&mut self, wanted: &str) -> String {
        while !String::from_utf8_lossy(&self.buffer).contains(wanted) {
            assert!(
                self.fill(),
                "the engine ended first: {}",
                String::from_utf8_lossy(&self.buffer)
            );
        }
        String::from_utf8_lossy(&self.buffer).into_owned()
    }

    /// Whether nothing comes for so long.
    pub fn is_silent(&mut self, time: Duration) -> bool {
        self.stream.set_read_timeout(Some(time)).unwrap();
        let mut byte = [0];
        let silent = match self.stream.peek(&mut byte) {
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
            Ok(_) => false,
        };
        self.stream
            .set_read_timeout(Some(Duration::from_secs(PATIENCE_S)))
            .unwrap();
        silent
    }

    /// Reads one response. `None`: the connection ended before a byte of it.
    pub fn answer(&mut self) -> Option<Answer> {
        let head_end = loop {
            if let Some(at) = self
                .buffer
                .windows(4)
                .position(|window| window == b"\r\n\r\n")
            {
                break at + 4;
            }
            if !self.fill() {
                assert!(self.buffer.is_empty(), "half a head");
                return None;
            }
        };
        let head: Vec<u8> = self.buffer.drain(..head_end).collect();
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.lines();
        let status = lines
            .next()
            .unwrap()
            .split(' ')
            .nth(1)
            .unwrap()
            .parse()
            .unwrap();
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
            .collect();
        let mut answer = Answer {
            status,
            headers,
            body: Vec::new(),
            chunks: Vec::new(),
            whole: true,
            reset: false,
        };
        if answer.header("transfer-encoding") == Some("chunked") {
            answer.whole = self.chunked(&mut answer);
        } else {
            let length: usize = answer
                .header("content-length")
                .map_or(0, |text| text.parse().unwrap());
            while self.buffer.len() < length && self.fill() {}
            answer.whole = self.buffer.len() >= length;
            answer.body = self.buffer.drain(..length.min(self.buffer.len())).collect();
        }
        answer.reset = self.reset;
        Some(answer)
    }

    /// Whether the engine has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        self.buffer.is_empty() && !self.fill()
    }

    fn chunked(&mut self, answer: &mut Answer) -> bool {
        loop {
            let Some(line) = self.line() else {
                return false;
            };
            let length = usize::from_str_radix(&line, 16).unwrap();
            while self.buffer.len() < length + 2 && self.fill() {}
            if self.buffer.len() < length + 2 {
                return false;
            }
            let chunk: Vec<u8> = self.buffer.drain(..length).collect();
            self.buffer.drain(..2);
            if length == 0 {
                return true;
            }
            answer.body.extend_from_slice(&chunk);
            answer.chunks.push(chunk);
        }
    }

    fn line(&mut self) -> Option<String> {
        loop {
            if let Some(at) = self.buffer.windows(2).position(|window| window == b"\r\n") {
                let line: Vec<u8> = self.buffer.drain(..at + 2).collect();
                return Some(String::from_utf8(line).unwrap().trim_end().to_owned());
            }
            if !self.fill() {
                return None;
            }
        }
    }

    fn fill(&mut self) -> bool {
        let mut bytes = [0; 65536];
        match self.stream.read(&mut bytes) {
            Ok(0) => self.ended = true,
            Ok(count) => {
                self.buffer.extend_from_slice(&bytes[..count]);
                return true;
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => self.reset = true,
            // The test was stopped, and goes on.
            Err(error) if error.kind() == ErrorKind::Interrupted => return self.fill(),
            Err(error) => panic!("{error}"),
        }
        false
    }
}

/// One POST on a connection of its own.
pub fn post(addr: SocketAddr, path: &str, body: &str, fake: &str) -> Option<Answer> {
    let mut client = Client::new(addr);
    client.post(path, body, fake);
    client.answer()
}

/// One GET on a connection of its own.
pub fn get(addr: SocketAddr, path: &str) -> Option<Answer> {
    let mut client = Client::new(addr);
    client.send(format!("GET {path} HTTP/1.1\r\nHost: fake\r\n\r\n").as_bytes());
    client.answer()
}

/// A chat request.
pub fn chat(stream: bool) -> String {
    format!(
        r#"{{"model":"fake","stream":{stream},"messages":[{{"role":"user","content":"hello you"}}]}}"#
    )
}
