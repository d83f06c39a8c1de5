//! One connection to an engine, polled inside the request that uses it instead of in a task of its own.
//!
//! The connection's driver lives in the response body: one task a stream, no wake-up between tasks for
//! each chunk, and a client that leaves drops body, driver and socket in the same instant, which is what
//! makes an engine stop (`docs/performance.md`).

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::idle::Upstream;

/// What one connection buffers of an engine's answer before the client has taken it.
const READ_BUFFER_MAX_BYTES: usize = 64 * 1024;
/// A host that acknowledges nothing for so long is gone, and what it was sent goes elsewhere. How long an engine may think is another matter:
/// its kernel answers meanwhile. Only one that reads nothing, of a request larger than the kernels' buffers, is given up as well.
const UNREACHABLE_MAX: Duration = Duration::from_secs(20);
/// A connection on which nothing comes is tried this often: an answer may be due in minutes, or never.
const UNREACHABLE_LOOK: Duration = Duration::from_secs(5);

type Driver = http1::Connection<TokioIo<TcpStream>, Full<Bytes>>;

/// A connection to an engine. Whoever holds it polls it; dropping it closes the socket.
pub struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    /// `None`: the connection has ended. A request that was handed over when the connection had just ended is answered by hyper only when the
    /// driver is dropped.
    driver: Option<Driver>,
    /// Requests answered on it before this one: 0 for a fresh connection.
    pub(super) served: u32,
    pub(super) idle_since: Instant,
}

/// Why a request got no response head.
#[derive(Debug)]
pub enum SendError {
    /// No connection was made; nothing was sent.
    Connect(std::io::Error),
    /// No connection within the limit.
    ConnectTimeout(Duration),
    /// The connection ended or spoke no HTTP before a byte of the response came.
    Reset(hyper::Error),
}

/// Has the kernel end a connection to a host that vanished without a word: it lost its power, its network, or is cut off.
fn end_when_unreachable(stream: &TcpStream) -> std::io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    let looks = socket2::TcpKeepalive::new()
        .with_time(UNREACHABLE_LOOK)
        .with_interval(UNREACHABLE_LOOK);
    socket.set_tcp_keepalive(&looks)?;
    // What was sent and is not acknowledged, and looks that are not answered.
    socket.set_tcp_user_timeout(Some(UNREACHABLE_MAX))
}

impl std::fmt::Display for SendError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SendError::Connect(error) => write!(f, "connection failed: {error}"),
            SendError::ConnectTimeout(limit) => write!(f, "no connection within {limit:?}"),
            SendError::Reset(error) => write!(f, "connection ended before a response: {error}"),
        }
    }
}

impl Connection {
    /// Makes a fresh connection; the caller bounds the time.
    pub(super) async fn open(host: &str, port: u16) -> std::io::Result<Box<Connection>> {
        let stream = TcpStream::connect((host, port)).await?;
        // Each event leaves in one write; Nagle would hold the second one back.
        stream.set_nodelay(true)?;
        end_when_unreachable(&stream)?;
        let (sender, driver) = http1::Builder::new()
            .max_buf_size(READ_BUFFER_MAX_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(std::io::Error::other)?;
        // Some 2 KB that would otherwise be moved with every request.
        let mut connection = Box::new(Connection {
            sender,
            driver: Some(driver),
            served: 0,
            idle_since: Instant::now(),
        });
        connection.is_usable().await;
        Ok(connection)
    }

    /// Polls the driver once: an engine that closed the connection while it was idle is noticed here.
    pub(super) async fn is_usable(&mut self) -> bool {
        let driver = &mut self.driver;
        let ended = poll_fn(|context| Poll::Ready(poll_driver(driver, context).is_ready())).await;
        !ended && self.sender.is_ready()
    }

    /// Sends a request and waits for the response head.
    pub(super) async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, hyper::Error> {
        let mut response = pin!(self.sender.send_request(request));
        let driver = &mut self.driver;
        poll_fn(|context| {
            if let Poll::Ready(result) = response.as_mut().poll(context) {
                return Poll::Ready(result);
            }
            let _ = poll_driver(driver, context);
            response.as_mut().poll(context)
        })
        .await
    }

    fn poll_driver(&mut self, context: &mut Context<'_>) -> Poll<()> {
        poll_driver(&mut self.driver, context)
    }

    fn may_be_reused(&self) -> bool {
        self.sender.is_ready() && !self.sender.is_closed()
    }
}

/// Polls the driver. Ready: the connection has ended, whatever the reason, and every request on it has its answer.
fn poll_driver(driver: &mut Option<Driver>, context: &mut Context<'_>) -> Poll<()> {
    if let Some(running) = driver
        && Pin::new(running).poll(context).is_pending()
    {
        return Poll::Pending;
    }
    *driver = None;
    Poll::Ready(())
}

/// A response body that carries its connection and gives it back to the engine's idle set at the end.
///
/// Dropped earlier, it closes the connection: that is the only way to cancel over HTTP/1.1.
pub struct UpstreamBody {
    body: Incoming,
    /// Taken when the body ended or the connection did.
    held: Option<(Box<Connection>, Arc<Upstream>)>,
}

impl UpstreamBody {
    pub(super) fn new(
        body: Incoming,
        connection: Box<Connection>,
        upstream: Arc<Upstream>,
    ) -> Self {
        let mut held = UpstreamBody {
            body,
            held: Some((connection, upstream)),
        };
        if held.body.is_end_stream() {
            held.give_back();
        }
        held
    }

    fn give_back(&mut self) {
        if let Some((connection, upstream)) = self.held.take()
            && connection.may_be_reused()
        {
            upstream.put_back(connection);
        }
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        if let Some((connection, _)) = &mut this.held
            && connection.poll_driver(context).is_ready()
        {
            this.held = None;
        }
        let polled = Pin::new(&mut this.body).poll_frame(context);
        let ended = match &polled {
            Poll::Ready(None) => true,
            Poll::Ready(Some(Ok(_))) => this.body.is_end_stream(),
            _ => false,
        };
        if ended && let Some((connection, _)) = &mut this.held {
            // One more poll lets the driver return to its idle state, in which it takes the next request.
            if connection.poll_driver(context).is_ready() {
                this.held = None;
            }
            this.give_back();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_to_a_host_that_vanishes_is_ended_by_the_kernel() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await;
        let stream = stream.unwrap();
        end_when_unreachable(&stream).unwrap();
        let socket = socket2::SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), UNREACHABLE_LOOK);
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), UNREACHABLE_LOOK);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(UNREACHABLE_MAX));
    }
}
