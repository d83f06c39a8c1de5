//! The connections of one engine that wait for the next request, and the one retry that a stale one gets.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::time::timeout;

use super::connection::{Connection, SendError, UpstreamBody};

/// llama.cpp, vLLM and SGLang close idle connections after 5 s; a connection older than this is not reused.
const IDLE_AGE_MAX: Duration = Duration::from_millis(4_000);
/// What is taken off the idle time that an engine announces in `Keep-Alive: timeout=`.
const IDLE_AGE_MARGIN: Duration = Duration::from_millis(1_000);
/// A reused connection that is still there after this has a request at work: that it fails then is a fault, not a stale connection.
const STALE_NOTICED_WITHIN: Duration = Duration::from_millis(1_000);
/// Idle connections kept for one engine. It bounds what is kept, not how many are open at once.
const IDLE_CONNECTIONS_MAX: usize = 256;

/// One engine's address and its idle connections.
pub struct Upstream {
    host: String,
    port: u16,
    connect_timeout: Duration,
    /// Newest last: the warmest connection is used first, the others age out.
    #[allow(clippy::vec_box)] // They come and go as boxes; the vector only keeps them.
    idle: Mutex<Vec<Box<Connection>>>,
    idle_age_max_ms: AtomicU64,
}

impl Upstream {
    pub fn new(host: &str, port: u16, connect_timeout: Duration) -> Arc<Upstream> {
        Arc::new(Upstream {
            host: host.to_string(),
            port,
            connect_timeout,
            idle: Mutex::new(Vec::new()),
            idle_age_max_ms: AtomicU64::new(IDLE_AGE_MAX.as_millis() as u64),
        })
    }

    /// Sends a request and waits for the response head. A reused connection that dies before a byte of
    /// the response is replaced once by a fresh one: the engine closed it as idle, nobody is at fault.
    /// `calls` counts both, since the engine may have read the request before it died.
    pub async fn send(
        self: &Arc<Self>,
        request: impl Fn() -> Request<Full<Bytes>>,
        calls: &mut u32,
    ) -> Result<Response<UpstreamBody>, SendError> {
        if let Some(mut connection) = self.take_idle().await {
            *calls += 1;
            if let Some(response) = send_or_stale(&mut connection, request()).await? {
                return Ok(self.attach(response, connection));
            }
        }
        self.send_fresh(request, calls).await
    }

    /// As `send`, on a connection made for it.
    pub async fn send_fresh(
        self: &Arc<Self>,
        request: impl Fn() -> Request<Full<Bytes>>,
        calls: &mut u32,
    ) -> Result<Response<UpstreamBody>, SendError> {
        let mut connection = self.connect().await?;
        *calls += 1;
        let response = connection.send(request()).await.map_err(SendError::Reset)?;
        Ok(self.attach(response, connection))
    }

    /// Closes what has been idle for too long: an idle connection holds a thread in llama.cpp.
    pub fn close_aged(&self) {
        let limit = self.idle_age_max();
        self.lock()
            .retain(|connection| connection.idle_since.elapsed() < limit);
    }

    pub(super) fn put_back(&self, mut connection: Box<Connection>) {
        connection.served += 1;
        connection.idle_since = Instant::now();
        let mut idle = self.lock();
        if idle.len() < IDLE_CONNECTIONS_MAX {
            idle.push(connection);
        }
    }

    async fn take_idle(&self) -> Option<Box<Connection>> {
        let limit = self.idle_age_max();
        loop {
            let mut connection = self.lock().pop()?;
            if connection.idle_since.elapsed() < limit && connection.is_usable().await {
                return Some(connection);
            }
        }
    }

    async fn connect(&self) -> Result<Box<Connection>, SendError> {
        let opening = Connection::open(&self.host, self.port);
        match tokio::time::timeout(self.connect_timeout, opening).await {
            Ok(opened) => opened.map_err(SendError::Connect),
            Err(_) => Err(SendError::ConnectTimeout(self.connect_timeout)),
        }
    }

    fn attach(
        self: &Arc<Self>,
        response: Response<Incoming>,
        connection: Box<Connection>,
    ) -> Response<UpstreamBody> {
        if connection.served == 0 {
            self.learn_idle_age(response.headers());
        }
        response.map(|body| UpstreamBody::new(body, connection, self.clone()))
    }

    /// An engine that announces a shorter keep-alive than the usual 5 s is believed.
    fn learn_idle_age(&self, headers: &HeaderMap) {
        if let Some(announced) = announced_keep_alive(headers) {
            let age = announced.saturating_sub(IDLE_AGE_MARGIN).min(IDLE_AGE_MAX);
            self.idle_age_max_ms
                .store(age.as_millis() as u64, Ordering::Relaxed);
        }
    }

    fn idle_age_max(&self) -> Duration {
        Duration::from_millis(self.idle_age_max_ms.load(Ordering::Relaxed))
    }

    #[allow(clippy::vec_box)]
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Box<Connection>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends a request on a reused connection. `None`: it was stale.
///
/// The connection is looked at before the clock is. A gateway that was held up for longer than the limit finds the end that waited for it
/// in the socket, however late it is.
async fn send_or_stale(
    connection: &mut Connection,
    request: Request<Full<Bytes>>,
) -> Result<Option<Response<Incoming>>, SendError> {
    let mut sending = pin!(connection.send(request));
    match timeout(STALE_NOTICED_WITHIN, &mut sending).await {
        Ok(sent) => Ok(sent.ok()),
        Err(_) => sending.await.map(Some).map_err(SendError::Reset),
    }
}

/// The seconds of `Keep-Alive: timeout=5, max=100`.
fn announced_keep_alive(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get("keep-alive")?.to_str().ok()?;
    let seconds = value
        .split(',')
        .find_map(|part| part.trim().strip_prefix("timeout="))?;
    seconds.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc::{Receiver, Sender, channel};

    use http_body_util::BodyExt;

    use super::*;

    /// An engine in a thread, and a connection to it that has served one request and waits for the next.
    struct Engine {
        upstream: Arc<Upstream>,
        /// It has read the second request, and keeps the connection open.
        has_it: Receiver<()>,
        /// Ends the connection.
        end: Sender<()>,
        /// The connection has ended.
        ended: Receiver<()>,
    }

    impl Engine {
        async fn start() -> Engine {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            let (has, has_it) = channel();
            let (end, is_to_end) = channel();
            let (is_over, ended) = channel();
            std::thread::spawn(move || {
                let (mut first, _) = listener.accept().unwrap();
                answer(&mut first);
                read(&mut first);
                has.send(()).unwrap();
                is_to_end.recv().unwrap();
                drop(first);
                is_over.send(()).unwrap();
                // Whoever asks again is answered.
                if let Ok((mut fresh, _)) = listener.accept() {
                    answer(&mut fresh);
                }
            });
            let upstream = Upstream::new("127.0.0.1", port, Duration::from_secs(60));
            let first = upstream.send(request, &mut 0).await.unwrap();
            first.into_body().collect().await.unwrap();
            Engine {
                upstream,
                has_it,
                end,
                ended,
            }
        }
    }

    fn request() -> Request<Full<Bytes>> {
        Request::get("/")
            .header("host", "engine")
            .body(Full::default())
            .unwrap()
    }

    /// What became of a request, and how many calls it took.
    async fn send(upstream: Arc<Upstream>) -> (Result<(), SendError>, u32) {
        let mut calls = 0;
        let sent = upstream.send(request, &mut calls).await;
        (sent.map(drop), calls)
    }

    fn read(stream: &mut TcpStream) {
        let mut seen = Vec::new();
        while !seen.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            seen.extend(byte);
        }
    }

    fn answer(stream: &mut TcpStream) {
        read(stream);
        let answer = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
        stream.write_all(answer.as_bytes()).unwrap();
    }

    #[tokio::test]
    async fn a_connection_whose_end_is_noticed_late_is_stale_all_the_same() {
        let engine = Engine::start().await;
        let mut sending = pin!(send(engine.upstream.clone()));
        assert!(polled_once(sending.as_mut()).await.is_none());
        // The whole process is held up from here on: nothing in this runtime runs.
        engine.has_it.recv().unwrap();
        engine.end.send(()).unwrap();
        engine.ended.recv().unwrap();
        std::thread::sleep(STALE_NOTICED_WITHIN * 3 / 2);
        let (sent, calls) = sending.await;
        assert!(sent.is_ok(), "{sent:?}");
        assert_eq!(calls, 2);
    }

    #[tokio::test]
    async fn a_connection_that_ends_while_its_request_is_at_work_is_a_fault() {
        let engine = Engine::start().await;
        let sending = tokio::spawn(send(engine.upstream.clone()));
        while engine.has_it.try_recv().is_err() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::sleep(STALE_NOTICED_WITHIN * 3 / 2).await;
        engine.end.send(()).unwrap();
        let (sent, calls) = sending.await.unwrap();
        assert!(matches!(sent, Err(SendError::Reset(_))), "{sent:?}");
        assert_eq!(calls, 1);
    }

    #[tokio::test]
    async fn a_connection_that_ends_between_the_look_at_it_and_the_request_is_stale() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let answering = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            answer(&mut stream);
            stream
        });
        let upstream = Upstream::new("127.0.0.1", port, Duration::from_secs(60));
        let first = upstream.send(request, &mut 0).await.unwrap();
        first.into_body().collect().await.unwrap();
        let mut connection = upstream.take_idle().await.unwrap();
        drop(answering.join().unwrap());
        // The runtime learns of the end; the connection isn't looked at again before the request.
        tokio::time::sleep(Duration::from_millis(10)).await;
        let sent = send_or_stale(&mut connection, request());
        let sent = timeout(STALE_NOTICED_WITHIN * 3, sent).await;
        let sent = sent.expect("the request waits for ever").unwrap();
        assert!(sent.is_none(), "{sent:?}");
    }

    /// Polls once.
    async fn polled_once<F: Future>(mut future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        std::future::poll_fn(|context| match future.as_mut().poll(context) {
            std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
            std::task::Poll::Pending => std::task::Poll::Ready(None),
        })
        .await
    }

    #[test]
    fn the_announced_keep_alive_is_read_from_its_header() {
        for (value, expected) in [
            ("timeout=5, max=100", Some(5)),
            ("max=100, timeout=2", Some(2)),
            ("max=100", None),
            ("timeout=soon", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert("keep-alive", value.parse().unwrap());
            assert_eq!(
                announced_keep_alive(&headers),
                expected.map(Duration::from_secs),
                "{value}"
            );
        }
    }
}
