//! The engine behind everything that is measured: it answers as vLLM does in form, and does no work at all.
//!
//! The tests' fake engine thinks about what it was asked; here the proxies are measured, and whatever the engine
//! spends is taken from them on a machine with two cores.

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::prompt::{MODEL, Pace, STREAM_HEADER, Streamed};

const READ_BYTES: usize = 128 * 1024;
const HEADERS_MAX: usize = 64;
const METRICS: &str =
    "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n";

#[derive(clap::Args)]
pub struct Options {
    /// Addresses to listen on; each stands for one engine.
    #[arg(long, required = true)]
    listen: Vec<SocketAddr>,
}

/// Serves until the process is ended.
pub fn run(options: &Options) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut listeners = Vec::new();
        for address in &options.listen {
            listeners.push(TcpListener::bind(address).await?);
        }
        println!("ready");
        let serving: Vec<_> = listeners
            .into_iter()
            .map(|listener| tokio::spawn(accept(listener)))
            .collect();
        for task in serving {
            task.await??;
        }
        Ok(())
    })
}

async fn accept(listener: TcpListener) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(async move {
            // A connection that ends is how proxies and clients leave.
            let _ = Serving::new(stream).run().await;
        });
    }
}

/// One connection.
struct Serving {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// What a request asks for.
struct Asked {
    path: String,
    streamed: Option<Streamed>,
    /// Of the request, head and body.
    total_bytes: usize,
}

impl Serving {
    fn new(stream: TcpStream) -> Serving {
        Serving {
            stream,
            buffer: Vec::new(),
        }
    }

    async fn run(&mut self) -> io::Result<()> {
        while let Some(asked) = self.next().await? {
            match asked.streamed {
                Some(streamed) => self.stream_out(streamed).await?,
                None => {
                    let answer = answer(&asked.path);
                    self.stream.write_all(answer.as_bytes()).await?;
                }
            }
        }
        Ok(())
    }

    /// Reads one request to its end; none where the connection closed in between.
    async fn next(&mut self) -> io::Result<Option<Asked>> {
        let mut asked = None;
        loop {
            if asked.is_none() {
                asked = parse(&self.buffer)?;
            }
            if let Some(found) = &asked
                && self.buffer.len() >= found.total_bytes
            {
                self.buffer.drain(..found.total_bytes);
                return Ok(asked);
            }
            self.buffer.reserve(READ_BYTES);
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
    }

    async fn stream_out(&mut self, streamed: Streamed) -> io::Result<()> {
        // Open streams are counted by the thousand, and their engine must not be what fills the machine.
        self.buffer = Vec::new();
        self.stream
            .write_all(
                b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
                  x-accel-buffering: no\r\ntransfer-encoding: chunked\r\n\r\n",
            )
            .await?;
        for serial in 0..streamed.events {
            self.event(&content_event(serial)).await?;
            match streamed.pace {
                Pace::GapUs(0) => tokio::task::yield_now().await,
                Pace::GapUs(gap) => tokio::time::sleep(Duration::from_micros(gap)).await,
                Pace::Hold => {}
            }
        }
        if matches!(streamed.pace, Pace::Hold) {
            let mut byte = [0];
            self.stream.read_exact(&mut byte).await?;
        }
        self.event(&last_event()).await?;
        self.event("data: [DONE]\n\n").await?;
        self.stream.write_all(b"0\r\n\r\n").await
    }

    /// Each event leaves in a write of its own, as engines send them.
    async fn event(&mut self, event: &str) -> io::Result<()> {
        let mut chunk = String::with_capacity(event.len() + 16);
        let _ = write!(chunk, "{:x}\r\n{event}\r\n", event.len());
        self.stream.write_all(chunk.as_bytes()).await
    }
}

fn parse(bytes: &[u8]) -> io::Result<Option<Asked>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    let parsed = request.parse(bytes).map_err(io::Error::other)?;
    let httparse::Status::Complete(head_bytes) = parsed else {
        return Ok(None);
    };
    let mut body_bytes = 0;
    let mut streamed = None;
    for header in request.headers.iter() {
        let value = String::from_utf8_lossy(header.value);
        if header.name.eq_ignore_ascii_case("content-length") {
            body_bytes = value.trim().parse().map_err(io::Error::other)?;
        } else if header.name.eq_ignore_ascii_case(STREAM_HEADER) {
            streamed = read_streamed(&value);
        }
    }
    Ok(Some(Asked {
        path: request.path.unwrap_or("").to_string(),
        streamed,
        total_bytes: head_bytes + body_bytes,
    }))
}

fn read_streamed(value: &str) -> Option<Streamed> {
    let (events, pace) = value.split_once(';')?;
    Some(Streamed {
        events: events.parse().ok()?,
        pace: match pace {
            "hold" => Pace::Hold,
            gap => Pace::GapUs(gap.parse().ok()?),
        },
    })
}

fn answer(path: &str) -> String {
    let (kind, body) = match path {
        "/health" => ("text/plain", String::new()),
        "/metrics" => ("text/plain", METRICS.to_string()),
        "/v1/models" => (
            "application/json",
            format!(
                r#"{{"object":"list","data":[{{"id":"{MODEL}","object":"model","created":1795978221,"owned_by":"vllm"}}]}}"#
            ),
        ),
        _ => (
            "application/json",
            format!(
                r#"{{"id":"chatcmpl-8f14e45fceea167a","object":"chat.completion","created":1795978221,"model":"{MODEL}","choices":[{{"index":0,"message":{{"role":"assistant","content":"The pier held."}},"logprobs":null,"finish_reason":"stop"}}],"usage":{{"prompt_tokens":180,"total_tokens":184,"completion_tokens":4}}}}"#
            ),
        ),
    };
    format!(
        "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn content_event(serial: u32) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-8f14e45fceea167a\",\"object\":\"chat.completion.chunk\",\"created\":1795978221,\
         \"model\":\"{MODEL}\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" pier{serial}\"}},\"logprobs\":null,\
         \"finish_reason\":null}}]}}\n\n"
    )
}

fn last_event() -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-8f14e45fceea167a\",\"object\":\"chat.completion.chunk\",\"created\":1795978221,\
         \"model\":\"{MODEL}\",\"choices\":[{{\"index\":0,\"delta\":{{}},\"logprobs\":null,\"finish_reason\":\"stop\"}}]}}\n\n"
    )
}
