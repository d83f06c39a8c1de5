//! HTTP/1.1 by hand: a fake that has to break messages at any byte, and to report header order and case, cannot sit on a
//! library that tidies both away.

use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};

/// Largest request head that is read.
const HEAD_MAX_BYTES: usize = 256 * 1024;
/// Largest request body that is read.
const BODY_MAX_BYTES: usize = 1024 * 1024 * 1024;
/// What is read ahead of a pipelining client while it waits for an answer; past this its departure goes unnoticed.
const READ_AHEAD_MAX_BYTES: usize = 4 * 1024 * 1024;
/// Headers of one request.
const HEADERS_MAX: usize = 256;

/// The head of a request, as it came.
#[derive(Clone, Debug)]
pub struct Head {
    pub method: String,
    /// Path and query, as sent.
    pub target: String,
    /// In the order and the case they were sent in.
    pub headers: Vec<(String, String)>,
    /// HTTP/1.0, to whom no chunked body may be sent.
    pub http10: bool,
}

/// Why no request could be read.
#[derive(Debug)]
pub enum ReadError {
    /// The client closed, or broke the connection off.
    Gone,
    /// No byte of a next request within the idle time.
    Idle,
    /// Not HTTP.
    Malformed,
}

/// The client's side of a connection.
pub struct Reader<'a> {
    half: ReadHalf<'a>,
    buffer: BytesMut,
}

/// The engine's side of a connection, with nothing buffered: one call is one write.
pub struct Writer<'a> {
    half: WriteHalf<'a>,
}

/// The client is no longer there to be written to.
#[derive(Debug)]
pub struct Gone;

impl Head {
    /// The path without its query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    /// The first value of a header, by any case of its name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    /// Whether the client wants to send another request on this connection.
    pub fn keep_alive(&self) -> bool {
        let connection = self
            .header("connection")
            .unwrap_or_default()
            .to_ascii_lowercase();
        if self.http10 {
            connection.contains("keep-alive")
        } else {
            !connection.contains("close")
        }
    }

    fn is_chunked(&self) -> bool {
        self.header("transfer-encoding")
            .is_some_and(|value| value.to_ascii_lowercase().contains("chunked"))
    }

    fn content_length(&self) -> Result<usize, ReadError> {
        match self.header("content-length") {
            None => Ok(0),
            Some(text) => text.trim().parse().map_err(|_| ReadError::Malformed),
        }
    }
}

impl<'a> Reader<'a> {
    pub fn new(half: ReadHalf<'a>) -> Reader<'a> {
        Reader {
            half,
            buffer: BytesMut::new(),
        }
    }

    /// Reads the next head. `idle`: how long its first byte may take.
    pub async fn head(&mut self, idle: Option<Duration>) -> Result<Head, ReadError> {
        if self.buffer.is_empty() {
            let first = self.fill();
            match idle {
                None => first.await?,
                Some(limit) => tokio::time::timeout(limit, first)
                    .await
                    .map_err(|_| ReadError::Idle)??,
            }
        }
        loop {
            if let Some((head, length)) = parse_head(&self.buffer)? {
                self.buffer.advance(length);
                return Ok(head);
            }
            if self.buffer.len() > HEAD_MAX_BYTES {
                return Err(ReadError::Malformed);
            }
            self.fill().await?;
        }
    }

    /// Reads the body that `head` announces, and answers `Expect: 100-continue`.
    pub async fn body(&mut self, head: &Head, writer: &mut Writer<'_>) -> Result<Bytes, ReadError> {
        if head
            .header("expect")
            .is_some_and(|value| value.eq_ignore_ascii_case("100-continue"))
        {
            writer
                .write(b"HTTP/1.1 100 Continue\r\n\r\n")
                .await
                .map_err(|Gone| ReadError::Gone)?;
        }
        if head.is_chunked() {
            return self.chunked_body().await;
        }
        let length = head.content_length()?;
        if length > BODY_MAX_BYTES {
            return Err(ReadError::Malformed);
        }
        self.take(length).await
    }

    /// Returns when the client has closed its side or broken the connection off.
    pub async fn gone(&mut self) {
        while self.buffer.len() <= READ_AHEAD_MAX_BYTES {
            if self.fill().await.is_err() {
                return;
            }
        }
        std::future::pending::<()>().await;
    }

    /// Reads and drops what still comes, so that closing does not turn into a reset that eats the answer.
    pub async fn drain(&mut self, limit: Duration) {
        let _ = tokio::time::timeout(limit, async {
            while self.fill().await.is_ok() {
                self.buffer.clear();
            }
        })
        .await;
    }

    async fn chunked_body(&mut self) -> Result<Bytes, ReadError> {
        let mut body = BytesMut::new();
        loop {
            let line = self.line().await?;
            let digits = line.split(';').next().unwrap_or_default().trim();
            let length = usize::from_str_radix(digits, 16).map_err(|_| ReadError::Malformed)?;
            if length == 0 {
                while !self.line().await?.is_empty() {}
                return Ok(body.freeze());
            }
            if body.len() + length > BODY_MAX_BYTES {
                return Err(ReadError::Malformed);
            }
            let chunk = self.take(length).await?;
            body.extend_from_slice(&chunk);
            if !self.line().await?.is_empty() {
                return Err(ReadError::Malformed);
            }
        }
    }

    async fn line(&mut self) -> Result<String, ReadError> {
        loop {
            if let Some(at) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(at + 1);
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            if self.buffer.len() > HEAD_MAX_BYTES {
                return Err(ReadError::Malformed);
            }
            self.fill().await?;
        }
    }

    async fn take(&mut self, length: usize) -> Result<Bytes, ReadError> {
        self.buffer
            .reserve(length.saturating_sub(self.buffer.len()));
        while self.buffer.len() < length {
            self.fill().await?;
        }
        Ok(self.buffer.split_to(length).freeze())
    }

    async fn fill(&mut self) -> Result<(), ReadError> {
        self.buffer.reserve(4096);
        match self.half.read_buf(&mut self.buffer).await {
            Ok(0) | Err(_) => Err(ReadError::Gone),
            Ok(_) => Ok(()),
        }
    }
}

impl<'a> Writer<'a> {
    pub fn new(half: WriteHalf<'a>) -> Writer<'a> {
        Writer { half }
    }

    /// Writes all of `bytes`; waits while the client does not read.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), Gone> {
        self.half.write_all(bytes).await.map_err(|_| Gone)
    }
}

fn parse_head(buffer: &[u8]) -> Result<Option<(Head, usize)>, ReadError> {
    let mut fields = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut fields);
    let length = match parsed.parse(buffer) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(ReadError::Malformed),
    };
    let headers = parsed
        .headers
        .iter()
        .map(|field| {
            (
                field.name.to_owned(),
                String::from_utf8_lossy(field.value).into_owned(),
            )
        })
        .collect();
    let head = Head {
        method: parsed.method.unwrap_or_default().to_owned(),
        target: parsed.path.unwrap_or_default().to_owned(),
        headers,
        http10: parsed.version == Some(0),
    };
    Ok(Some((head, length)))
}
