//! The connections of one engine that wait for the next request, and the one retry that a stale one gets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::Full;

use super::connection::{Connection, SendError, UpstreamBody};

/// llama.cpp, vLLM and SGLang close idle connections after 5 s; a connection older than this is not reused.
const IDLE_AGE_MAX: Duration = Duration::from_millis(4_000);
/// What is taken off the idle time that an engine announces in `Keep-Alive: timeout=`.
const IDLE_AGE_MARGIN: Duration = Duration::from_millis(1_000);
/// A reused connection that fails later than this had a request at work: that is a fault, not a stale connection.
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
            let sent = Instant::now();
            *calls += 1;
            match connection.send(request()).await {
                Ok(response) => return Ok(self.attach(response, connection)),
                Err(_) if sent.elapsed() < STALE_NOTICED_WITHIN => {}
                Err(error) => return Err(SendError::Reset(error)),
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
        response: Response<hyper::body::Incoming>,
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
    use super::*;

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
