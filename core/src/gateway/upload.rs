//! A request's body as it comes. Where the answer is there before its end, what is still on its way is read and thrown away for a while: a
//! client that writes all of it before it reads would meet a closed socket, and never see why.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::EXPECT;
use http::request::Parts;
use http::{HeaderMap, Version};
use http_body::{Body, Frame};
use hyper::body::Incoming;

/// Of one body, so much is thrown away before the connection is closed after all.
const DISCARDED_MAX_BYTES: u64 = 256 << 20;
/// For so long.
const DISCARDING_MAX: Duration = Duration::from_secs(30);
/// And so long without a byte: the client waits for something else, or is gone.
const DISCARDING_SILENCE_MAX: Duration = Duration::from_secs(5);

/// A request's body, in the order of its frames.
pub struct Upload {
    /// None: it was read to its end, or can't be.
    body: Option<Incoming>,
    /// The client sends nothing before it is asked to (`expect: 100-continue`), and it was not.
    is_held_back: bool,
    version: Version,
}

impl Upload {
    pub fn new(body: Incoming, parts: &Parts) -> Upload {
        Upload {
            body: Some(body).filter(|body| !body.is_end_stream()),
            is_held_back: is_held_back(&parts.headers),
            version: parts.version,
        }
    }

    /// The next frame; the first call asks for the body where the client waits for that.
    pub fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.is_held_back = false;
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        let frame = std::task::ready!(Pin::new(body).poll_frame(context));
        if !matches!(frame, Some(Ok(_))) {
            self.body = None;
        }
        Poll::Ready(frame)
    }

    /// Nobody wants the rest. It ends by itself, beside the answer. An HTTP/2 client is told to stop instead, by its stream's reset.
    pub fn discard(self) {
        if let Some(body) = self.body
            && !self.is_held_back
            && self.version < Version::HTTP_2
        {
            tokio::spawn(discard(body));
        }
    }
}

fn is_held_back(headers: &HeaderMap) -> bool {
    headers
        .get(EXPECT)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// Reads until the end or a limit. A body that is dropped before its end closes its connection.
async fn discard<B>(mut body: B)
where
    B: Body<Data = Bytes> + Unpin,
{
    let reading = async {
        let mut left = DISCARDED_MAX_BYTES;
        loop {
            let next = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context));
            let Ok(Some(Ok(frame))) = tokio::time::timeout(DISCARDING_SILENCE_MAX, next).await
            else {
                return;
            };
            let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
            match left.checked_sub(bytes) {
                Some(rest) => left = rest,
                None => return,
            }
        }
    };
    let _ = tokio::time::timeout(DISCARDING_MAX, reading).await;
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::Future;

    use http::{Request, Response, StatusCode};
    use http_body_util::Full;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::{Instant, Sleep, sleep};

    use super::*;

    /// A server that refuses every request at once, and what its client holds.
    fn refusing() -> DuplexStream {
        let (client, server) = duplex(1_024);
        let service = service_fn(|request: Request<Incoming>| async {
            let (parts, body) = request.into_parts();
            Upload::new(body, &parts).discard();
            let mut answer = Response::new(Full::<Bytes>::from("no"));
            *answer.status_mut() = StatusCode::PAYLOAD_TOO_LARGE;
            Ok::<_, Infallible>(answer)
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(server), service);
        tokio::spawn(connection);
        client
    }

    /// A body that has no end.
    struct Endless {
        pause: Duration,
        next: Pin<Box<Sleep>>,
    }

    impl Body for Endless {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            std::task::ready!(self.next.as_mut().poll(context));
            self.next = Box::pin(sleep(self.pause));
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[0; 1 << 20])))))
        }
    }

    async fn read_until(client: &mut DuplexStream, end: &str) -> String {
        let mut text = String::new();
        while !text.ends_with(end) {
            let byte = client.read_u8().await.expect("it has not ended");
            text.push(char::from(byte));
        }
        text
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_writes_all_before_it_reads_sees_why_it_was_refused_and_asks_again() {
        let mut client = refusing();
        let body = vec![b'x'; 1 << 20];
        for head in [
            format!("content-length: {}\r\n\r\n", body.len()),
            format!("transfer-encoding: chunked\r\n\r\n{:x}\r\n", body.len()),
        ] {
            let head = format!("POST / HTTP/1.1\r\n{head}");
            client.write_all(head.as_bytes()).await.expect("it is read");
            client.write_all(&body).await.expect("it is read");
            if head.contains("chunked") {
                client
                    .write_all(b"\r\n0\r\n\r\n")
                    .await
                    .expect("it is read");
            }
            let text = read_until(&mut client, "\r\n\r\nno").await;
            assert!(text.starts_with("HTTP/1.1 413 "), "{text}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_holds_its_body_back_is_not_asked_for_it() {
        let mut client = refusing();
        let head = "POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 100\r\n\r\n";
        client.write_all(head.as_bytes()).await.expect("it is read");
        let mut text = String::new();
        client.read_to_string(&mut text).await.expect("it ends");
        assert!(text.starts_with("HTTP/1.1 413 "), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_goes_on_and_one_that_stops_are_given_up() {
        for (pause, limit) in [
            (Duration::from_secs(3_600), DISCARDING_SILENCE_MAX),
            (Duration::from_secs(1), DISCARDING_MAX),
            (Duration::from_millis(1), Duration::from_millis(257)),
        ] {
            let since = Instant::now();
            let next = Box::pin(sleep(pause));
            discard(Endless { pause, next }).await;
            let took = since.elapsed();
            assert!(
                (limit..limit + Duration::from_millis(10)).contains(&took),
                "{pause:?}: {took:?}"
            );
        }
    }
}
