//! A client's socket: the one departure that hyper does not notice, a cut that hyper can't make, and whether the client asks for anything.
//!
//! While a request is at work hyper reads on, and takes the end of the socket for a client that left. But when
//! bytes of a next request are in its buffer already (pipelining), it stops reading, and the end goes unseen:
//! then the socket itself is asked, four times a second.
//!
//! An answer that can't be finished ends with the connection, once all that was written before has left: hyper closes without that.
//!
//! Requests at work are counted for each connection: who has none, and had none for a while, is silent.

use std::future::{Future, poll_fn};
use std::os::fd::{AsRawFd, RawFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// How often a socket that nobody reads is asked whether its client is still there.
const ASK_INTERVAL: Duration = Duration::from_millis(250);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A client's stream that notes whether somebody waits for its bytes.
pub struct ClientIo<S> {
    inner: TokioIo<S>,
    wire: Arc<Wire>,
}

/// Shared by a connection's stream, its task and its answers.
pub struct Wire {
    fd: RawFd,
    /// The last read found nothing and waits: an end of the socket will be seen by it.
    is_read: AtomicBool,
    /// The next flush that has nothing left to write is the last.
    is_cut: AtomicBool,
    at_work: AtomicUsize,
    /// A request ended since the client's silence was last looked at.
    has_answered: AtomicBool,
}

/// A request of a connection, from its head until hyper has taken all of its answer.
pub struct AtWork(Arc<Wire>);

impl Wire {
    pub fn of(stream: &TcpStream) -> Arc<Wire> {
        Wire::over(stream.as_raw_fd())
    }

    /// Of a stream that is no socket.
    #[cfg(test)]
    pub fn of_a_test() -> Arc<Wire> {
        Wire::over(-1)
    }

    fn over(fd: RawFd) -> Arc<Wire> {
        Arc::new(Wire {
            fd,
            is_read: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            at_work: AtomicUsize::new(0),
            has_answered: AtomicBool::new(false),
        })
    }

    /// A request has come.
    pub fn begin(self: &Arc<Wire>) -> AtWork {
        self.at_work.fetch_add(1, Ordering::Relaxed);
        AtWork(self.clone())
    }

    /// Whether a request was at work since this was last asked.
    pub fn was_at_work(&self) -> bool {
        self.at_work.load(Ordering::Acquire) > 0 || self.has_answered.swap(false, Ordering::Relaxed)
    }

    /// Runs a connection to its end, or until its client turns out to have left. The caller keeps the
    /// connection, and with it the socket, alive meanwhile.
    pub async fn watch<F>(&self, connection: Pin<&mut F>) -> Result<(), BoxError>
    where
        F: Future<Output = Result<(), BoxError>>,
    {
        let mut connection = connection;
        loop {
            let ended = poll_fn(|context| match connection.as_mut().poll(context) {
                Poll::Ready(result) => Poll::Ready(Some(result)),
                Poll::Pending if self.is_read.load(Ordering::Relaxed) => Poll::Pending,
                Poll::Pending => Poll::Ready(None),
            });
            if let Some(result) = ended.await {
                return result;
            }
            // Nobody reads. Run on, but look up now and then.
            let mut pause = pin!(tokio::time::sleep(ASK_INTERVAL));
            let ended = poll_fn(|context| {
                if let Poll::Ready(result) = connection.as_mut().poll(context) {
                    return Poll::Ready(Some(result));
                }
                pause.as_mut().poll(context).map(|()| None)
            });
            if let Some(result) = ended.await {
                return result;
            }
            if !self.is_read.load(Ordering::Relaxed) && self.has_left() {
                return Err("the client left with a request at work".into());
            }
        }
    }

    /// Asks the kernel whether the other side closed, without touching what is still to be read.
    fn has_left(&self) -> bool {
        let mut asked = libc::pollfd {
            fd: self.fd,
            events: libc::POLLRDHUP,
            revents: 0,
        };
        // SAFETY: one valid pollfd, no wait. The descriptor is open: `watch` borrows the connection that owns it.
        let answered = unsafe { libc::poll(&raw mut asked, 1, 0) };
        answered > 0 && asked.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
    }
}

impl AtWork {
    /// Ends the connection when all that was written to it has left. To be said within a turn of the connection's own task: it flushes in each,
    /// but in this one perhaps has done so, hence the next.
    pub fn cut_when_flushed(&self, context: &Context<'_>) {
        self.0.is_cut.store(true, Ordering::Relaxed);
        context.waker().wake_by_ref();
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        // In this order: who no longer sees it at work has to see this.
        self.0.has_answered.store(true, Ordering::Relaxed);
        self.0.at_work.fetch_sub(1, Ordering::Release);
    }
}

impl<S> ClientIo<S> {
    pub fn new(stream: S, wire: Arc<Wire>) -> ClientIo<S> {
        ClientIo {
            inner: TokioIo::new(stream),
            wire,
        }
    }
}

impl<S: AsyncRead + Unpin> Read for ClientIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_read(context, buffer);
        self.wire
            .is_read
            .store(polled.is_pending(), Ordering::Relaxed);
        polled
    }
}

impl<S: AsyncWrite + Unpin> Write for ClientIo<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        std::task::ready!(Pin::new(&mut self.inner).poll_flush(context))?;
        if self.wire.is_cut.load(Ordering::Relaxed) {
            let why = "cut behind an answer that could not be finished";
            return Poll::Ready(Err(std::io::Error::other(why)));
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, bufs)
    }
}
