//! An answer on its way through hyper. One that can't be finished is cut, so that no client takes it for a whole one, but not before all that
//! was handed out has left: the error event comes last, and a client that reads slowly must get it too.
//!
//! hyper answers an error of a body at once. In HTTP/1.1 it closes the connection with what it still holds, in HTTP/2 it resets the stream
//! and forgets what is queued. So the body gives its error when the event is not queued any more (HTTP/2), or never, and the connection's
//! own stream fails behind the last flush (HTTP/1.1).

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::oneshot;
use tokio::time::Sleep;

use super::body::{ClientBody, Unfinished};
use super::client_io::Wire;

/// An HTTP/2 client whose connection takes nothing holds a stream's last words for so long; in HTTP/1.1 the kernel ends the connection.
const LEAVING_MAX: Duration = Duration::from_secs(300);

/// A response body as a connection sends it.
pub struct Outgoing {
    state: State,
    wire: Arc<Wire>,
    is_http2: bool,
}

enum State {
    Answer(ClientBody),
    /// HTTP/2: the error event is still queued.
    Leaving {
        event: Option<Leaving>,
        patience: Pin<Box<Sleep>>,
        unfinished: Option<Unfinished>,
    },
    /// HTTP/1.1: the connection ends with the next flush.
    Cut,
}

/// Ready when certain bytes were sent, or thrown away.
#[derive(Debug)]
pub struct Leaving(oneshot::Receiver<Infallible>);

/// The same bytes, and how to wait until nobody holds them any more.
pub fn leaving(bytes: Bytes) -> (Bytes, Leaving) {
    let (end, left) = oneshot::channel();
    let owned = Owned { bytes, _end: end };
    (Bytes::from_owner(owned), Leaving(left))
}

struct Owned {
    bytes: Bytes,
    /// Its drop is the word.
    _end: oneshot::Sender<Infallible>,
}

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Outgoing {
    pub fn new(answer: ClientBody, wire: Arc<Wire>, is_http2: bool) -> Outgoing {
        Outgoing {
            state: State::Answer(answer),
            wire,
            is_http2,
        }
    }

    /// What comes after the last frame of an answer that failed. The answer, and what it holds of an engine, is let go.
    fn cut(&mut self, mut unfinished: Unfinished) {
        if !self.is_http2 {
            self.wire.cut_when_flushed();
            self.state = State::Cut;
            return;
        }
        self.state = State::Leaving {
            event: unfinished.take_behind(),
            patience: Box::pin(tokio::time::sleep(LEAVING_MAX)),
            unfinished: Some(unfinished),
        };
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Unfinished;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Unfinished>>> {
        let outgoing = self.get_mut();
        loop {
            match &mut outgoing.state {
                State::Answer(answer) => match ready!(Pin::new(answer).poll_frame(context)) {
                    Some(Err(unfinished)) => outgoing.cut(unfinished),
                    other => return Poll::Ready(other),
                },
                State::Leaving {
                    event,
                    patience,
                    unfinished,
                } => {
                    let has_left = match event {
                        Some(event) => Pin::new(&mut event.0).poll(context).is_ready(),
                        None => true,
                    };
                    if !has_left && patience.as_mut().poll(context).is_pending() {
                        return Poll::Pending;
                    }
                    return Poll::Ready(unfinished.take().map(Err));
                }
                State::Cut => return Poll::Pending,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.state {
            State::Answer(answer) => answer.is_end_stream(),
            State::Leaving { .. } | State::Cut => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            State::Answer(answer) => answer.size_hint(),
            State::Leaving { .. } | State::Cut => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use http::{Request, Response};
    use http_body_util::{BodyExt, Empty};
    use hyper::service::service_fn;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;
    use crate::gateway::client_io::ClientIo;
    use crate::gateway::dialect::Dialect;
    use crate::gateway::hold::{Attempts, Held};
    use crate::gateway::respond::Failure;

    /// So long the client reads nothing.
    const LATE: Duration = Duration::from_secs(200);
    /// Less than the comment and the error event take.
    const ROOM_BYTES: usize = 16;

    /// A stream that fails at once, after its comment: the shortest.
    fn failed() -> ClientBody {
        let attempts: Attempts = Box::pin(async {
            Err(Failure::UpstreamFailed {
                attempts: vec!["the engine is gone".to_owned()],
            })
        });
        let held = Held::new(attempts, Duration::from_secs(1), Dialect::Chat);
        ClientBody::Held(Box::new(held))
    }

    /// Serves that answer to whoever asks at the other end of the pipe.
    fn serve(pipe: DuplexStream, is_http2: bool) {
        let wire = Wire::of_a_test();
        let io = ClientIo::new(pipe, wire.clone());
        let service = service_fn(move |_| {
            let body = Outgoing::new(failed(), wire.clone(), is_http2);
            async move { Ok::<_, Infallible>(Response::new(body)) }
        });
        tokio::spawn(async move {
            if is_http2 {
                let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(io, service)
                    .await;
            } else {
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(io, service)
                    .await;
            }
        });
    }

    #[tokio::test(start_paused = true)]
    async fn over_http1_the_error_event_reaches_a_client_that_reads_late_and_then_the_connection_ends()
     {
        let (mut client, server) = duplex(ROOM_BYTES);
        serve(server, false);
        client
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        tokio::time::sleep(LATE).await;
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        assert!(text.contains("the engine is gone"), "{text}");
        assert!(!text.contains("\r\n0\r\n"), "it has no proper end: {text}");
    }

    #[tokio::test(start_paused = true)]
    async fn over_http2_the_error_event_reaches_a_client_that_reads_late_and_then_the_stream_is_reset()
     {
        let (client, server) = duplex(64 * 1024);
        serve(server, true);
        let (mut sender, connection) =
            hyper::client::conn::http2::Builder::new(TokioExecutor::new())
                .initial_stream_window_size(ROOM_BYTES as u32)
                .handshake(TokioIo::new(client))
                .await
                .unwrap();
        tokio::spawn(connection);
        let request = Request::get("http://x/")
            .body(Empty::<Bytes>::new())
            .unwrap();
        let mut answer = pin!(sender.send_request(request).await.unwrap().into_body());
        tokio::time::sleep(LATE).await;
        let mut text = String::new();
        let error = loop {
            match answer.frame().await.expect("it has no proper end") {
                Ok(frame) => text += std::str::from_utf8(frame.data_ref().unwrap()).unwrap(),
                Err(error) => break error,
            }
        };
        assert!(text.contains("the engine is gone"), "{text}: {error:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn over_http2_a_client_that_never_reads_is_waited_for_no_longer_than_the_limit() {
        let mut body = pin!(Outgoing::new(failed(), Wire::of_a_test(), true));
        let mut held = Vec::new();
        let started = tokio::time::Instant::now();
        let error = loop {
            match body.frame().await.unwrap() {
                Ok(frame) => held.push(frame),
                Err(error) => break error,
            }
        };
        assert_eq!(started.elapsed(), LEAVING_MAX, "{error}");
        assert_eq!(held.len(), 2, "a comment and the event");
    }
}
