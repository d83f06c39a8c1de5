//! The clients: a closed loop, a fixed rate, streams, or streams that stay open, from one thread of one process.

use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

use crate::prompt::{self, Pace, Streamed};

const READ_BYTES: usize = 16 * 1024;
const HEADERS_MAX: usize = 64;
/// Streams that are opened at once while thousands are: more would overflow what a kernel queues of connections.
const OPENING_AT_ONCE: usize = 100;
/// Prompts that differ from their first words on: a router's memory of prefixes is at work as in real life.
const PROMPTS: u64 = 64;

#[derive(clap::Args, Clone)]
pub struct Options {
    #[arg(long)]
    address: SocketAddr,
    #[arg(long, value_enum)]
    mode: Mode,
    #[arg(long)]
    connections: usize,
    #[arg(long, default_value_t = 1_000)]
    seconds_milli: u64,
    #[arg(long)]
    body_bytes: usize,
    /// Requests a second, over all connections; for `rate`.
    #[arg(long, default_value_t = 500)]
    rate: u64,
    /// Events of each stream.
    #[arg(long, default_value_t = 64)]
    events: u32,
    /// Between two events; 0 is as fast as it goes.
    #[arg(long, default_value_t = 0)]
    gap_us: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
pub enum Mode {
    /// Each connection sends its next request when the last was answered.
    Closed,
    /// Requests leave by the clock.
    Rate,
    /// Each connection reads one stream after the other.
    Stream,
    /// Opens streams, says `ready`, and holds them until its standard input ends.
    Idle,
}

/// What came back.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Outcome {
    pub requests: u64,
    pub failed: u64,
    /// What went wrong first.
    pub first_failure: Option<String>,
    pub events: u64,
    pub seconds: f64,
    pub p50_us: f64,
    pub p99_us: f64,
}

/// Runs to its end and prints the outcome.
pub fn run(options: &Options) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let local = LocalSet::new();
    let outcome = local.block_on(&runtime, async {
        match options.mode {
            Mode::Idle => idle(options).await,
            _ => Ok(busy(options).await),
        }
    })?;
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}

async fn busy(options: &Options) -> Outcome {
    let requests = Rc::new(requests(options));
    let started = Instant::now();
    let mut clients = JoinSet::new();
    for number in 0..options.connections {
        let client = Client {
            options: options.clone(),
            requests: requests.clone(),
            number,
            started,
        };
        clients.spawn_local(client.run());
    }
    let mut all = Outcome::default();
    let mut latencies = Vec::new();
    while let Some(joined) = clients.join_next().await {
        let Ok((outcome, own)) = joined else { continue };
        all.requests += outcome.requests;
        all.failed += outcome.failed;
        all.events += outcome.events;
        all.first_failure = all.first_failure.or(outcome.first_failure);
        latencies.extend(own);
    }
    all.seconds = started.elapsed().as_secs_f64();
    latencies.sort_unstable();
    all.p50_us = quantile_us(&latencies, 0.50);
    all.p99_us = quantile_us(&latencies, 0.99);
    all
}

fn requests(options: &Options) -> Vec<Vec<u8>> {
    let streamed = match options.mode {
        Mode::Closed | Mode::Rate => None,
        Mode::Stream => Some(Streamed {
            events: options.events,
            pace: Pace::GapUs(options.gap_us),
        }),
        Mode::Idle => Some(Streamed {
            events: 1,
            pace: Pace::Hold,
        }),
    };
    (0..PROMPTS)
        .map(|serial| prompt::request(options.body_bytes, serial, streamed))
        .collect()
}

fn quantile_us(sorted: &[Duration], share: f64) -> f64 {
    let at = (sorted.len() as f64 * share) as usize;
    sorted
        .get(at.min(sorted.len().saturating_sub(1)))
        .map_or(0.0, |latency| latency.as_secs_f64() * 1e6)
}

/// One connection's user.
struct Client {
    options: Options,
    requests: Rc<Vec<Vec<u8>>>,
    number: usize,
    started: Instant,
}

impl Client {
    async fn run(self) -> (Outcome, Vec<Duration>) {
        let mut outcome = Outcome::default();
        let mut latencies = Vec::new();
        let end = self.started + Duration::from_millis(self.options.seconds_milli);
        let mut connection = None;
        let mut turn = 0u64;
        loop {
            if self.options.mode == Mode::Rate {
                tokio::time::sleep_until(self.due(turn)).await;
            }
            let sent = Instant::now();
            if sent >= end {
                return (outcome, latencies);
            }
            let pick = (self.number as u64 * 7 + turn) % PROMPTS;
            match self.exchange(&mut connection, pick as usize).await {
                Ok(events) => {
                    outcome.requests += 1;
                    outcome.events += events;
                    latencies.push(sent.elapsed());
                }
                Err(error) => {
                    connection = None;
                    outcome.failed += 1;
                    outcome.first_failure.get_or_insert(error.to_string());
                }
            }
            turn += 1;
        }
    }

    /// Connections take turns: this one's requests leave at even distances between those of the others.
    fn due(&self, turn: u64) -> Instant {
        let place = turn * self.options.connections as u64 + self.number as u64;
        self.started + Duration::from_micros(place * 1_000_000 / self.options.rate)
    }

    async fn exchange(&self, held: &mut Option<Connection>, pick: usize) -> io::Result<u64> {
        let connection = match held {
            Some(connection) => connection,
            None => held.insert(Connection::open(self.options.address).await?),
        };
        connection.exchange(&self.requests[pick]).await
    }
}

async fn idle(options: &Options) -> io::Result<Outcome> {
    let requests = Rc::new(requests(options));
    let mut open = Vec::new();
    while open.len() < options.connections {
        let batch = OPENING_AT_ONCE.min(options.connections - open.len());
        let mut opening = JoinSet::new();
        for number in 0..batch {
            let (requests, address) = (requests.clone(), options.address);
            opening.spawn_local(async move {
                let mut connection = Connection::open(address).await?;
                let request = &requests[number % requests.len()];
                connection.stream.write_all(request).await?;
                connection.first_event().await?;
                io::Result::Ok(connection)
            });
        }
        while let Some(opened) = opening.join_next().await {
            open.push(opened??);
        }
    }
    println!("ready");
    tokio::task::spawn_blocking(|| io::stdin().read(&mut [0])).await??;
    let closed = open.iter().filter(|connection| connection.is_closed());
    Ok(Outcome {
        requests: open.len() as u64,
        failed: closed.count() as u64,
        ..Outcome::default()
    })
}

/// One client connection.
struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// How an answer's body ends.
enum Framing {
    Length(usize),
    Chunked,
}

impl Connection {
    async fn open(address: SocketAddr) -> io::Result<Connection> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Connection {
            stream,
            buffer: Vec::new(),
        })
    }

    /// Sends a request, reads its answer to the end, and counts the events in it.
    async fn exchange(&mut self, request: &[u8]) -> io::Result<u64> {
        self.stream.write_all(request).await?;
        match self.head().await? {
            Framing::Length(bytes) => {
                while self.buffer.len() < bytes {
                    self.read().await?;
                }
                self.buffer.drain(..bytes);
                Ok(0)
            }
            Framing::Chunked => self.chunked().await,
        }
    }

    async fn first_event(&mut self) -> io::Result<()> {
        self.head().await?;
        while memchr::memmem::find(&self.buffer, b"\n\n").is_none() {
            self.read().await?;
        }
        self.buffer = Vec::new();
        Ok(())
    }

    /// The other side ended it, though the stream has more to come.
    fn is_closed(&self) -> bool {
        match self.stream.try_read(&mut [0]) {
            Ok(bytes) => bytes == 0,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        }
    }

    async fn head(&mut self) -> io::Result<Framing> {
        loop {
            if let Some((head_bytes, framing)) = parse_head(&self.buffer)? {
                self.buffer.drain(..head_bytes);
                return Ok(framing);
            }
            self.read().await?;
        }
    }

    async fn chunked(&mut self) -> io::Result<u64> {
        let mut events = 0;
        let mut last = 0;
        loop {
            match httparse::parse_chunk_size(&self.buffer) {
                Ok(httparse::Status::Complete((line, size))) => {
                    let end = line + size as usize + 2;
                    while self.buffer.len() < end {
                        self.read().await?;
                    }
                    for byte in &self.buffer[line..end - 2] {
                        events += u64::from(*byte == b'\n' && last == b'\n');
                        last = *byte;
                    }
                    self.buffer.drain(..end);
                    if size == 0 {
                        return Ok(events);
                    }
                }
                Ok(httparse::Status::Partial) => self.read().await?,
                Err(_) => return Err(io::Error::other("the answer's chunks are not chunks")),
            }
        }
    }

    async fn read(&mut self) -> io::Result<()> {
        self.buffer.reserve(READ_BYTES);
        match self.stream.read_buf(&mut self.buffer).await? {
            0 => Err(io::Error::other("the connection closed inside an answer")),
            _ => Ok(()),
        }
    }
}

fn parse_head(bytes: &[u8]) -> io::Result<Option<(usize, Framing)>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut headers);
    let parsed = response.parse(bytes).map_err(io::Error::other)?;
    let httparse::Status::Complete(head_bytes) = parsed else {
        return Ok(None);
    };
    if response.code != Some(200) {
        let text = format!("answered {}", response.code.unwrap_or(0));
        return Err(io::Error::other(text));
    }
    let mut framing = Framing::Chunked;
    for header in response.headers.iter() {
        if header.name.eq_ignore_ascii_case("content-length") {
            let text = String::from_utf8_lossy(header.value);
            framing = Framing::Length(text.trim().parse().map_err(io::Error::other)?);
        }
    }
    Ok(Some((head_bytes, framing)))
}
