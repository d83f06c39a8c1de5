//! Listens, and holds the conversation on each connection: request, answer, and what a client that leaves does to it.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::Engine;
use super::options::Kind;
use super::out::{End, Out};
use super::route::{is_work, route};
use super::state::Ticket;
use super::wire::{Gone, Head, ReadError, Reader, Writer};

/// Connections that wait to be accepted.
const BACKLOG: u32 = 4096;
/// How long an unread request body is read and dropped before the connection closes, in milliseconds.
const DRAIN_MS: u64 = 500;

/// Everything about one request that its handlers look at.
pub struct Exchange<'a> {
    pub engine: &'a Arc<Engine>,
    pub head: &'a Head,
    pub body: &'a Bytes,
    /// Absent for probes.
    pub ticket: Option<&'a Ticket<'a>>,
    pub leave: &'a Leave,
}

/// The main address, before and after it listens.
pub enum Door {
    /// Connections are refused.
    Bound(TcpSocket),
    Open(TcpListener),
}

/// When the engine stops for a client that left.
#[derive(Default)]
pub struct Leave(AtomicU8);

/// The rules for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LeaveRule {
    /// At once.
    Now = 0,
    /// When nobody had a result for a second (llama.cpp before its first byte).
    WhenQuiet = 1,
    /// Never (llama.cpp with `X-Conversation-Id`).
    Never = 2,
}

impl Leave {
    pub fn set(&self, rule: LeaveRule) {
        self.0.store(rule as u8, Ordering::Relaxed);
    }

    /// The first byte is out: from here on llama.cpp notices too, unless it never does.
    pub fn notice_now(&self) {
        if self.rule() == LeaveRule::WhenQuiet {
            self.set(LeaveRule::Now);
        }
    }

    fn rule(&self) -> LeaveRule {
        match self.0.load(Ordering::Relaxed) {
            0 => LeaveRule::Now,
            1 => LeaveRule::WhenQuiet,
            _ => LeaveRule::Never,
        }
    }
}

/// Binds without listening: until then connections are refused, and the port is known and kept.
pub fn bind(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if addr.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

/// Starts to listen.
pub fn open(socket: TcpSocket) -> io::Result<TcpListener> {
    socket.listen(BACKLOG)
}

/// Serves the main address: opens when the kind opens, closes and opens again as `accept` says.
pub async fn listen(engine: Arc<Engine>, mut door: Door) -> io::Result<()> {
    engine.may_listen().await;
    let mut accepting = engine.accepting.subscribe();
    let mut stopped = engine.stopped.subscribe();
    loop {
        let listener = match door {
            Door::Open(listener) => listener,
            Door::Bound(socket) => {
                if accepting.wait_for(|on| *on).await.is_err() {
                    return Ok(());
                }
                open(socket)?
            }
        };
        engine.listening.send_replace(true);
        loop {
            tokio::select! {
                biased;
                _ = accepting.wait_for(|on| !*on) => break,
                _ = stopped.wait_for(|stopped| *stopped) => return Ok(()),
                accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                    tokio::spawn(serve(stream, engine.clone(), false));
                },
            }
        }
        drop(listener);
        // Bound again at once, so that nobody else gets the port meanwhile.
        door = Door::Bound(bind(engine.addr)?);
        engine.listening.send_replace(false);
    }
}

/// Serves `/fake/...` alone.
pub async fn listen_control(engine: Arc<Engine>, listener: TcpListener) {
    loop {
        if let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, engine.clone(), true));
        }
    }
}

async fn serve(mut stream: TcpStream, engine: Arc<Engine>, control: bool) {
    // Without it Nagle holds events back.
    let _ = stream.set_nodelay(true);
    let _connected = (!control).then(|| engine.state.connected());
    let mut stopped = engine.stopped.subscribe();
    let end = {
        let (reader, writer) = stream.split();
        let mut talk = Conversation {
            engine: &engine,
            control,
            reader: Reader::new(reader),
            writer: Writer::new(writer),
        };
        tokio::select! {
            end = talk.run() => end,
            _ = stopped.wait_for(|stopped| *stopped) => End::Close,
        }
    };
    match end {
        // Closing with a zero linger time sends a reset.
        End::Reset => drop(socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO))),
        End::Keep | End::Close => drop(stream.shutdown().await),
    }
    drop(stream);
}

struct Conversation<'a> {
    engine: &'a Arc<Engine>,
    control: bool,
    reader: Reader<'a>,
    writer: Writer<'a>,
}

impl Conversation<'_> {
    async fn run(&mut self) -> End {
        let mut served = 0;
        loop {
            let head = match self.reader.head(Some(self.engine.idle())).await {
                Ok(head) => head,
                Err(ReadError::Malformed) => {
                    let _ = self
                        .writer
                        .write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
                        .await;
                    return End::Close;
                }
                Err(ReadError::Gone | ReadError::Idle) => return End::Close,
            };
            served += 1;
            let end = self.exchange(&head, served).await;
            if end != End::Keep {
                return end;
            }
        }
    }

    /// One request and its answer; `served` counts the requests of this connection.
    async fn exchange(&mut self, head: &Head, served: u64) -> End {
        let engine = self.engine;
        let ours = head.path().starts_with("/fake/");
        if self.control && !ours {
            return End::Close;
        }
        let defaults = engine.defaults.current();
        if served > 1 && defaults.close_on_reuse && !ours {
            return End::Close;
        }
        if !ours {
            engine.state.count_path(head);
        }
        let ticket = is_work(head).then(|| engine.state.open(head));
        let ignore_body = head
            .header("x-fake")
            .is_some_and(|json| json.contains("\"ignore_body\""))
            || defaults.ignore_body;
        let body = if ignore_body {
            Ok(Bytes::new())
        } else {
            self.reader.body(head, &mut self.writer).await
        };
        let Ok(body) = body else {
            engine.state.left();
            return End::Close;
        };
        if let Some(ticket) = &ticket {
            ticket.received(&body);
        }
        let max = engine.options.keepalive_max_requests();
        let keep = head.keep_alive() && !ignore_body && (max == 0 || served < max);
        let mut out = Out::new(
            &mut self.writer,
            engine.options.kind,
            head,
            keep,
            ticket.as_ref(),
        );
        if engine.options.kind == Kind::Llamacpp {
            out.keepalive_header(format!(
                "timeout={}, max={max}",
                engine.options.keepalive_ms / 1000
            ));
        }
        let leave = Leave::default();
        let exchange = Exchange {
            engine,
            head,
            body: &body,
            ticket: ticket.as_ref(),
            leave: &leave,
        };
        let end = answer(&exchange, &mut self.reader, &mut out).await;
        drop(ticket);
        if ignore_body {
            self.reader.drain(Duration::from_millis(DRAIN_MS)).await;
        }
        end
    }
}

/// Answers while watching for the client to leave. Dropping the answer is what stops the engine.
async fn answer(exchange: &Exchange<'_>, reader: &mut Reader<'_>, out: &mut Out<'_, '_>) -> End {
    let engine = exchange.engine;
    let result = {
        let mut answer = pin!(route(exchange, out));
        tokio::select! {
            biased;
            result = &mut answer => result,
            () = reader.gone() => {
                if exchange.ticket.is_some() {
                    engine.state.left();
                }
                match exchange.leave.rule() {
                    LeaveRule::Now => return cancelled(exchange),
                    LeaveRule::Never => answer.await,
                    LeaveRule::WhenQuiet => tokio::select! {
                        result = &mut answer => result,
                        () = engine.quiet() => return cancelled(exchange),
                    },
                }
            }
        }
    };
    match (result, exchange.ticket) {
        (Ok(end), Some(ticket)) => {
            ticket.completed();
            end
        }
        (Ok(end), None) => end,
        (Err(Gone), ticket) => {
            if ticket.is_some() {
                engine.state.left();
            }
            cancelled(exchange)
        }
    }
}

fn cancelled(exchange: &Exchange<'_>) -> End {
    if let Some(ticket) = exchange.ticket {
        ticket.cancelled();
    }
    End::Close
}
