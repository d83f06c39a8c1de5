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

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::oneshot;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::body::{ClientBody, Unfinished};
use super::client_io::AtWork;
use super::stalled;

/// What is smaller is worth no allocation to know when it was sent. hyper holds such pieces up to 64 KiB and one more: at a shutdown a client that is
/// behind by so little has no more time for it than connections have to close.
const LARGE_BYTES: usize = 16 * 1024;
/// HTTP/2: what hyper is given at once. It takes a piece of any size as soon as there is room for one byte of it, and asks for the next when the
/// client took nearly all of that: who takes less than this in `CLIENT_STALLED_MAX` has stalled. More would not fit into a frame on the wire.
const PIECE_MAX_BYTES: usize = 16 * 1024;

/// A response body as a connection sends it.
pub struct Outgoing {
    state: State,
    at_work: AtWork,
    /// Also held by large pieces that hyper has taken and not sent. Shared, since each token by itself counts as a request.
    unsent: Arc<TaskTrackerToken>,
    is_http2: bool,
    /// HTTP/2: of the answer's last frame, what is not handed out yet.
    rest: Bytes,
}

enum State {
    Answer(ClientBody),
    /// HTTP/2: the error event is still queued.
    Leaving {
        event: Option<Leaving>,
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
    let owned = Owned { bytes, _held: end };
    (Bytes::from_owner(owned), Leaving(left))
}

struct Owned<T> {
    bytes: Bytes,
    /// Its drop is the word that the bytes are gone.
    _held: T,
}

impl<T> AsRef<[u8]> for Owned<T> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Outgoing {
    /// `unsent` counts the request for as long as anything of the answer is here or unsent.
    pub fn new(
        answer: ClientBody,
        at_work: AtWork,
        unsent: TaskTrackerToken,
        is_http2: bool,
    ) -> Outgoing {
        Outgoing {
            state: State::Answer(answer),
            at_work,
            unsent: Arc::new(unsent),
            is_http2,
            rest: Bytes::new(),
        }
    }

    fn hand_out(&mut self, frame: Frame<Bytes>) -> Frame<Bytes> {
        let frame = frame.map_data(|bytes| self.held_until_sent(bytes));
        if !self.is_http2 {
            return frame;
        }
        match frame.into_data() {
            Ok(bytes) => {
                self.rest = bytes;
                self.next_piece()
            }
            Err(trailers) => trailers,
        }
    }

    fn next_piece(&mut self) -> Frame<Bytes> {
        stalled::waits_for_client();
        let length = self.rest.len().min(PIECE_MAX_BYTES);
        Frame::data(self.rest.split_to(length))
    }

    fn held_until_sent(&self, bytes: Bytes) -> Bytes {
        if bytes.len() < LARGE_BYTES {
            return bytes;
        }
        let _held = self.unsent.clone();
        Bytes::from_owner(Owned { bytes, _held })
    }

    /// What comes after the last frame of an answer that failed. The answer, and what it holds of an engine, is let go.
    fn cut(&mut self, mut unfinished: Unfinished, context: &Context<'_>) {
        if !self.is_http2 {
            self.at_work.cut_when_flushed(context);
            self.state = State::Cut;
            return;
        }
        stalled::waits_for_client();
        self.state = State::Leaving {
            event: unfinished.take_behind(),
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
                State::Answer(answer) => {
                    if outgoing.is_http2 {
                        stalled::waits_for_engine();
                        if !outgoing.rest.is_empty() {
                            return Poll::Ready(Some(Ok(outgoing.next_piece())));
                        }
                    }
                    match ready!(Pin::new(answer).poll_frame(context)) {
                        Some(Err(unfinished)) => outgoing.cut(unfinished, context),
                        Some(Ok(frame)) => {
                            return Poll::Ready(Some(Ok(outgoing.hand_out(frame))));
                        }
                        None => return Poll::Ready(None),
                    }
                }
                State::Leaving { event, unfinished } => {
                    if let Some(event) = event {
                        // It is gone, or nobody can send it any more.
                        let _gone = ready!(Pin::new(&mut event.0).poll(context));
                    }
                    return Poll::Ready(unfinished.take().map(Err));
                }
                State::Cut => return Poll::Pending,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.state {
            State::Answer(answer) => self.rest.is_empty() && answer.is_end_stream(),
            State::Leaving { .. } | State::Cut => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            State::Answer(answer) => {
                let rest = self.rest.len() as u64;
                let mut size = answer.size_hint();
                if let Some(upper) = size.upper() {
                    size.set_upper(upper + rest);
                }
                size.set_lower(size.lower() + rest);
                size
            }
            State::Leaving { .. } | State::Cut => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Mutex;
    use std::time::Duration;

    use http::{Request, Response};
    use http_body_util::{BodyExt, Empty};
    use hyper::body::Incoming;
    use hyper::service::service_fn;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::sync::oneshot::error::TryRecvError;
    use tokio::time::Instant;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::gateway::client_io::{ClientIo, Wire};
    use crate::gateway::dialect::Dialect;
    use crate::gateway::hold::{Attempts, Held};
    use crate::gateway::relay::KEEPALIVE_COMMENT;
    use crate::gateway::respond::Failure;
    use crate::gateway::server::connection_builder;
    use crate::gateway::stalled::CLIENT_STALLED_MAX;

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

    /// A stream that has a comment every second for ever, and the word that it was let go.
    fn endless() -> (ClientBody, oneshot::Receiver<Infallible>) {
        let (engine, let_go) = oneshot::channel();
        let attempts: Attempts = Box::pin(async move {
            let _engine = engine;
            std::future::pending().await
        });
        let held = Held::new(attempts, Duration::from_secs(1), Dialect::Chat);
        (ClientBody::Held(Box::new(held)), let_go)
    }

    /// Serves one answer to whoever asks at the other end of the pipe; empty when it was sent.
    fn serve(pipe: DuplexStream, is_http2: bool, answer: ClientBody) -> TaskTracker {
        serve_as(pipe, is_http2, answer, |body| body)
    }

    fn serve_as<B>(
        pipe: DuplexStream,
        is_http2: bool,
        answer: ClientBody,
        as_body: impl Fn(Outgoing) -> B + Send + 'static,
    ) -> TaskTracker
    where
        B: Body<Data = Bytes, Error = Unfinished> + Send + 'static,
    {
        let unsent = TaskTracker::new();
        unsent.close();
        let wire = Wire::of_a_test();
        let io = ClientIo::new(pipe, wire.clone());
        let once = Mutex::new(Some((answer, unsent.token())));
        let service = service_fn(move |_| {
            let (answer, token) = once.lock().unwrap().take().expect("one request");
            let body = as_body(Outgoing::new(answer, wire.begin(), token, is_http2));
            async move { Ok::<_, Infallible>(Response::new(body)) }
        });
        tokio::spawn(async move {
            let _ = connection_builder().serve_connection(io, service).await;
        });
        unsent
    }

    /// An answer at an HTTP/2 client that makes no more room than for so many bytes until it reads.
    async fn ask_over_http2(room_bytes: usize, answer: ClientBody) -> (Incoming, TaskTracker) {
        let (client, server) = duplex(64 * 1024);
        let unsent = serve(server, true, answer);
        let (mut sender, connection) =
            hyper::client::conn::http2::Builder::new(TokioExecutor::new())
                .initial_stream_window_size(room_bytes as u32)
                .handshake(TokioIo::new(client))
                .await
                .unwrap();
        tokio::spawn(connection);
        let request = Request::get("http://x/")
            .body(Empty::<Bytes>::new())
            .unwrap();
        let answer = sender.send_request(request).await.unwrap();
        (answer.into_body(), unsent)
    }

    /// Reads a stream that has no proper end: its text, and how it was reset.
    async fn read(mut answer: Incoming) -> (String, String) {
        let mut text = String::new();
        loop {
            match answer.frame().await.expect("it has no proper end") {
                Ok(frame) => text += std::str::from_utf8(frame.data_ref().unwrap()).unwrap(),
                Err(error) => return (text, format!("{error:?}")),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn over_http1_the_error_event_reaches_a_client_that_reads_late_and_then_the_connection_ends()
     {
        let (mut client, server) = duplex(ROOM_BYTES);
        serve(server, false, failed());
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

    /// A body that has nothing when it is asked behind the comment and the event, which hyper then flushes, and its cut at once afterwards.
    struct CutBehindFlush {
        body: Outgoing,
        asked: usize,
    }

    impl Body for CutBehindFlush {
        type Data = Bytes;
        type Error = Unfinished;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Unfinished>>> {
            self.asked += 1;
            match self.asked {
                3 => Poll::Pending,
                _ => Pin::new(&mut self.body).poll_frame(context),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn over_http1_a_connection_that_flushed_before_the_cut_ends() {
        let (mut client, server) = duplex(64 * 1024);
        serve_as(server, false, failed(), |body| CutBehindFlush {
            body,
            asked: 0,
        });
        client
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        let mut text = String::new();
        let ended = tokio::time::timeout(LATE, client.read_to_string(&mut text)).await;
        ended.expect("it is still connected").unwrap();
        assert!(text.contains("the engine is gone"), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn over_http2_the_error_event_reaches_a_client_that_reads_late_and_then_the_stream_is_reset()
     {
        let (answer, _) = ask_over_http2(ROOM_BYTES, failed()).await;
        tokio::time::sleep(LATE).await;
        let (text, error) = read(answer).await;
        assert!(text.contains("the engine is gone"), "{text}: {error}");
    }

    #[tokio::test(start_paused = true)]
    async fn over_http2_a_client_that_stops_reading_has_its_stream_reset_and_its_engine_let_go() {
        let (answer, let_go) = endless();
        let started = Instant::now();
        let (answer, _) = ask_over_http2(ROOM_BYTES, answer).await;
        let ended = tokio::time::timeout(CLIENT_STALLED_MAX * 2, let_go).await;
        assert!(ended.is_ok(), "the engine is still held");
        let waited = started.elapsed().as_secs();
        let limit = CLIENT_STALLED_MAX.as_secs();
        // The second comment is the one that finds no room.
        assert!((limit..=limit + 2).contains(&waited), "{waited} s");
        let (_, error) = read(answer).await;
        assert!(error.contains("CANCEL"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn over_http2_a_client_that_reads_now_and_then_keeps_its_stream() {
        let (answer, mut let_go) = endless();
        let (mut answer, _) = ask_over_http2(KEEPALIVE_COMMENT.len(), answer).await;
        for _ in 0..10 {
            tokio::time::sleep(LATE).await;
            assert!(answer.frame().await.unwrap().is_ok());
        }
        assert_eq!(let_go.try_recv(), Err(TryRecvError::Empty));
    }

    #[tokio::test(start_paused = true)]
    async fn over_http2_a_client_that_stops_reading_does_not_hold_the_end_of_a_failed_stream() {
        // The event finds no room, or it is sent but for its end.
        for room_bytes in [KEEPALIVE_COMMENT.len(), ROOM_BYTES] {
            let (answer, _) = ask_over_http2(room_bytes, failed()).await;
            tokio::time::sleep(CLIENT_STALLED_MAX * 2 + LATE).await;
            let (text, error) = read(answer).await;
            assert_eq!(text.len(), room_bytes, "{text}");
            assert!(error.contains("CANCEL"), "{error}");
        }
    }

    /// More than hyper and the pipe hold.
    const WHOLE_BYTES: usize = 1024 * 1024;

    fn large() -> ClientBody {
        ClientBody::full(vec![b'x'; WHOLE_BYTES].into())
    }

    #[tokio::test(start_paused = true)]
    async fn over_http1_a_large_answer_is_unsent_until_its_client_has_read_it() {
        let (mut client, server) = duplex(ROOM_BYTES);
        let unsent = serve(server, false, large());
        client
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        tokio::time::sleep(LATE).await;
        assert_eq!(unsent.len(), 1);
        let mut text = Vec::new();
        client.read_to_end(&mut text).await.unwrap();
        assert!(text.len() > WHOLE_BYTES);
        unsent.wait().await;
    }

    #[tokio::test(start_paused = true)]
    async fn over_http2_a_large_answer_is_unsent_until_its_client_has_read_it() {
        let (answer, unsent) = ask_over_http2(ROOM_BYTES, large()).await;
        tokio::time::sleep(LATE).await;
        assert_eq!(unsent.len(), 1);
        let read = answer.collect().await.unwrap().to_bytes();
        assert_eq!(read.len(), WHOLE_BYTES);
        unsent.wait().await;
    }

    #[tokio::test(start_paused = true)]
    async fn over_http2_a_client_that_stops_reading_a_whole_answer_has_its_stream_reset() {
        let (answer, unsent) = ask_over_http2(ROOM_BYTES, large()).await;
        tokio::time::sleep(CLIENT_STALLED_MAX + LATE).await;
        assert!(unsent.is_empty(), "it is still held");
        let (text, error) = read(answer).await;
        assert_eq!(text.len(), ROOM_BYTES);
        assert!(error.contains("CANCEL"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn over_http2_a_client_that_reads_a_whole_answer_slowly_gets_all_of_it() {
        let (mut answer, _) = ask_over_http2(2 * PIECE_MAX_BYTES, large()).await;
        let (mut read, mut next_pause) = (0, 0);
        while let Some(frame) = answer.frame().await {
            read += frame.unwrap().into_data().unwrap().len();
            if read > next_pause {
                tokio::time::sleep(LATE).await;
                next_pause += 2 * PIECE_MAX_BYTES;
            }
        }
        assert_eq!(read, WHOLE_BYTES);
    }

    #[tokio::test]
    async fn over_http2_what_is_left_of_a_frame_counts_until_it_is_handed_out() {
        let token = TaskTracker::new().token();
        let mut body = pin!(Outgoing::new(
            large(),
            Wire::of_a_test().begin(),
            token,
            true
        ));
        let mut left = WHOLE_BYTES;
        while left > 0 {
            assert_eq!(body.size_hint().exact(), Some(left as u64));
            assert!(!body.is_end_stream());
            let piece = body.frame().await.unwrap().unwrap();
            left -= piece.into_data().unwrap().len();
        }
        assert!(body.is_end_stream());
    }
}
