//! Accepts clients, over plain TCP or TLS, and serves HTTP/1.1 and HTTP/2 on the same port.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use http::{Request, Version};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioTimer;
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::client_io::{ClientIo, Wire};
use super::client_room::ClientRoom;
use super::outgoing::Outgoing;
use super::request;
use super::stalled::{CLIENT_STALLED_MAX, Streams};
use super::state::Gateway;
use crate::certificates::Port;
use crate::sparing::Sparing;

/// HTTP/1.1: a client that is silent between its requests is let go after this; before the first one, and in HTTP/2, `ClientRoom` says when.
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(75);
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// What one HTTP/1.1 connection buffers in either direction; also the limit of a request's head.
const CONNECTION_BUFFER_MAX_BYTES: usize = 64 * 1024;
/// Header fields of one request; more is answered with 431.
const HEADERS_MAX: usize = 128;
/// What an HTTP/2 client says first (RFC 9113, 3.4).
const H2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const H2_STREAMS_MAX: u32 = 1_024;
/// Requests of one connection that were taken back before they were read. More of them end it, with all that streams on it: with fewer
/// allowed, a busy machine would do that to many clients behind one connection of which some leave early.
const H2_UNREAD_RESETS_MAX: usize = 1_024;
const H2_STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const H2_CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;
const H2_SEND_BUFFER_MAX_BYTES: usize = 64 * 1024;
const H2_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// After an accept that failed (no file descriptors, mostly), before the next.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// One listening address for clients.
pub struct Listener {
    pub tcp: TcpListener,
    pub tls: Option<Arc<Port>>,
    pub room: Arc<ClientRoom>,
}

/// How the end of serving is told.
#[derive(Clone, Default)]
pub struct Stop {
    /// No connection is accepted any more, and new requests are refused.
    pub begins: CancellationToken,
    /// Nothing is at work: connections that are still open are closed.
    pub is_idle: CancellationToken,
}

/// What all connections of a listener share.
struct Serving {
    tls: Option<Arc<Port>>,
    room: Arc<ClientRoom>,
    builders: Builders,
    gateway: Arc<Gateway>,
    stop: Stop,
}

/// Serves until the stop begins; then no connection is accepted any more. Those that are open stay so while anything
/// is at work, so that a request on one of them is told that it must go elsewhere, instead of meeting a closed socket.
/// Returns the connections that are left, for the caller to wait for.
pub async fn serve(listener: Listener, gateway: Arc<Gateway>, stop: Stop) -> TaskTracker {
    let Listener { tcp, tls, room } = listener;
    let serving = Arc::new(Serving {
        tls,
        room,
        builders: Builders::new(),
        gateway,
        stop: stop.clone(),
    });
    let connections = TaskTracker::new();
    let mut not_accepted = Sparing::default();
    loop {
        let accepted = tokio::select! {
            accepted = tcp.accept() => accepted,
            () = stop.begins.cancelled() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                if let Some(unsaid) = not_accepted.note() {
                    tracing::warn!("a connection could not be accepted: {error}{unsaid}");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Only now, so that it is known whether anybody waits. Further ones stay in the kernel's queue meanwhile.
        let seat = tokio::select! {
            seat = serving.room.seat() => seat,
            () = stop.begins.cancelled() => break,
        };
        let serving = serving.clone();
        connections.spawn(async move {
            if let Err(error) = connection(stream, &serving).await {
                tracing::debug!("connection ended: {error}");
            }
            drop(seat);
        });
    }
    connections.close();
    connections
}

/// How connections are served, depending on what is known of their protocol.
struct Builders {
    /// Finds out by reading the first bytes and handing them on, which makes hyper double its read buffer: 8 KB for
    /// as long as the connection lives.
    either: auto::Builder<Streams>,
    http1: auto::Builder<Streams>,
}

impl Builders {
    fn new() -> Builders {
        Builders {
            either: connection_builder(),
            http1: connection_builder().http1_only(),
        }
    }

    /// Looks at a connection's first bytes without taking them. None: its client sent nothing.
    async fn choose(&self, stream: &TcpStream) -> io::Result<Option<&auto::Builder<Streams>>> {
        let mut first = [0; H2_PREFACE.len()];
        Ok(match stream.peek(&mut first).await? {
            0 => None,
            length if H2_PREFACE.starts_with(&first[..length]) => Some(&self.either),
            _ => Some(&self.http1),
        })
    }
}

pub(super) fn connection_builder() -> auto::Builder<Streams> {
    let mut builder = auto::Builder::new(Streams);
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ_TIMEOUT)
        // A client that closed its half is gone: that is how most of them leave.
        .half_close(false)
        .max_headers(HEADERS_MAX)
        .max_buf_size(CONNECTION_BUFFER_MAX_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Some(H2_KEEPALIVE_INTERVAL))
        .max_concurrent_streams(H2_STREAMS_MAX)
        .max_pending_accept_reset_streams(H2_UNREAD_RESETS_MAX)
        .initial_stream_window_size(H2_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(H2_CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(H2_SEND_BUFFER_MAX_BYTES);
    builder
}

async fn connection(
    stream: TcpStream,
    serving: &Serving,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    // An event leaves when it is written; Nagle would hold it back for the one before.
    stream.set_nodelay(true)?;
    socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(CLIENT_STALLED_MAX))?;
    let wire = Wire::of(&stream);
    let builders = &serving.builders;
    let mut patience = Box::pin(serving.room.patience(wire.clone()));
    match &serving.tls {
        None => {
            let builder = tokio::select! {
                chosen = builders.choose(&stream) => chosen?,
                () = &mut patience => None,
                () = serving.stop.begins.cancelled() => None,
            };
            let Some(builder) = builder else {
                return Ok(());
            };
            let io = ClientIo::new(stream, wire.clone());
            drive(io, wire, builder, serving, patience).await
        }
        Some(port) => {
            let stream = tokio::select! {
                shaken = port.accept(stream, TLS_HANDSHAKE_TIMEOUT) => shaken?,
                () = &mut patience => return Ok(()),
                () = serving.stop.begins.cancelled() => return Ok(()),
            };
            let io = ClientIo::new(stream, wire.clone());
            drive(io, wire, &builders.either, serving, patience).await
        }
    }
}

async fn drive<S>(
    io: ClientIo<S>,
    wire: Arc<Wire>,
    builder: &auto::Builder<Streams>,
    serving: &Serving,
    mut patience: Pin<Box<impl Future<Output = ()>>>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let Serving { gateway, stop, .. } = serving;
    let is_http2 = AtomicBool::new(false);
    let has_asked = AtomicBool::new(false);
    let service = service_fn(|request: Request<Incoming>| {
        has_asked.store(true, Ordering::Relaxed);
        let version_is_2 = request.version() == Version::HTTP_2;
        is_http2.store(version_is_2, Ordering::Relaxed);
        // hyper keeps room for this future as long as the connection lives, several KB that a stream, whose
        // request was handled long ago, needs no more. A box is freed with it.
        let handling = Box::pin(request::handle(gateway.clone(), request));
        let at_work = wire.begin();
        let unsent = gateway.telemetry.at_work.token();
        async move {
            let answer = handling.await;
            let outgoing = |body| Outgoing::new(body, at_work, unsent, version_is_2);
            Ok::<_, Infallible>(answer.map(outgoing))
        }
    });
    let connection = builder.serve_connection(io, service);
    tokio::pin!(connection);
    let ended = {
        let mut served = pin!(wire.watch(connection.as_mut()));
        let mut stopped = pin!(stop.begins.cancelled());
        let mut is_registered = false;
        poll_fn(|context| {
            if let Poll::Ready(ended) = served.as_mut().poll(context) {
                return Poll::Ready(Some(ended));
            }
            // hyper has a limit for a head of HTTP/1.1, and none for the first bytes, from which it tells the protocol, and for HTTP/2.
            let has_asked = has_asked.load(Ordering::Relaxed);
            let is_unlimited = !has_asked || is_http2.load(Ordering::Relaxed);
            if is_unlimited && patience.as_mut().poll(context).is_ready() {
                return Poll::Ready(match has_asked {
                    true => None,
                    false => Some(Err("no request came".into())),
                });
            }
            // A look at the token takes a lock that all connections share, so it is not taken with every event:
            // once, to be woken by it, and again when the gateway drains, which is what comes before the stop.
            if is_registered && !gateway.is_draining() {
                return Poll::Pending;
            }
            is_registered = true;
            stopped.as_mut().poll(context).map(|()| None)
        })
        .await
    };
    if let Some(ended) = ended {
        return ended;
    }
    // HTTP/2 has a message of its own for this, after which nothing more is asked.
    if !is_http2.load(Ordering::Relaxed) {
        tokio::select! {
            ended = wire.watch(connection.as_mut()) => return ended,
            () = stop.is_idle.cancelled() => {}
        }
    }
    connection.as_mut().graceful_shutdown();
    loop {
        let served = wire.watch(connection.as_mut());
        if let Ok(ended) = tokio::time::timeout(CLIENT_STALLED_MAX, served).await {
            return ended;
        }
        // All that is left of answers is what hyper holds, which is little.
        if !wire.was_at_work() {
            return Err("the client did not take what was left for it".into());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use bytes::Bytes;
    use fake_engine::authority::Authority;
    use http::StatusCode;
    use http_body_util::{BodyExt, Empty};
    use hyper::client::conn::http2::{Builder, SendRequest};
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use llmgw_plugins::{Policies, PolicyOptions};
    use tokio::io::duplex;
    use tokio::task::JoinHandle;
    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::certificates::{Files, Material, Shown, TlsListener, Use};
    use crate::config;
    use crate::telemetry::{Telemetry, log};

    /// No test waits longer.
    const LONG: Duration = Duration::from_secs(3_600);

    fn serving() -> Serving {
        let text = "models: [{name: m, endpoints: [{url: 'http://127.0.0.1:9'}]}]\n".to_owned();
        let config = config::parse(Path::new("llmgw.yaml"), text, &|_| None).expect("it is one");
        let policies = Policies::open(PolicyOptions::default()).expect("the built-in ones load");
        let telemetry = Telemetry::start(log::LogFormat::Text);
        Serving {
            tls: None,
            room: ClientRoom::new(8, &telemetry.metrics),
            builders: Builders::new(),
            gateway: Gateway::new(config, policies, telemetry),
            stop: Stop::default(),
        }
    }

    fn tls_port() -> Arc<Port> {
        let issued = Authority::new("test authority").server(&["127.0.0.1"]);
        let directory = std::env::temp_dir().join(format!("llmgw-port-{}", std::process::id()));
        let (cert, key) = (directory.join("server.pem"), directory.join("key.pem"));
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(&cert, issued.pem).unwrap();
        std::fs::write(&key, issued.key_pem).unwrap();
        std::fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
        let material = Material::read(&TlsListener {
            serves: Use::Listen,
            address: ([127, 0, 0, 1], 8443).into(),
            files: Files {
                cert,
                key,
                ca: None,
            },
        });
        std::fs::remove_dir_all(&directory).unwrap();
        Port::new("listen", Shown::new(&material.unwrap()), &[])
    }

    /// An HTTP/2 client with this room for each answer, and the end of its connection.
    async fn http2_client(room_bytes: u32) -> (SendRequest<Empty<Bytes>>, JoinHandle<()>) {
        http2_client_of(serving(), room_bytes).await
    }

    async fn http2_client_of(
        serving: Serving,
        room_bytes: u32,
    ) -> (SendRequest<Empty<Bytes>>, JoinHandle<()>) {
        let (client, server) = duplex(64 * 1024);
        tokio::spawn(async move {
            let wire = Wire::of_a_test();
            let io = ClientIo::new(server, wire.clone());
            let patience = Box::pin(serving.room.patience(wire.clone()));
            let _ = drive(io, wire, &serving.builders.either, &serving, patience).await;
        });
        let (sender, connection) = Builder::new(TokioExecutor::new())
            .initial_stream_window_size(room_bytes)
            .handshake(TokioIo::new(client))
            .await
            .unwrap();
        let ended = tokio::spawn(async move {
            let _ = connection.await;
        });
        (sender, ended)
    }

    fn request() -> Request<Empty<Bytes>> {
        let request = Request::get("http://gateway/nowhere");
        request.body(Empty::new()).unwrap()
    }

    /// What it takes until the connection ends, in whole seconds.
    async fn seconds_until(ended: JoinHandle<()>) -> u64 {
        let since = Instant::now();
        let ended = timeout(LONG, ended).await;
        ended.expect("it is still connected").unwrap();
        since.elapsed().as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn an_http2_client_that_asks_for_nothing_any_more_is_let_go() {
        let (mut sender, ended) = http2_client(64 * 1024).await;
        for _ in 0..3 {
            let answer = sender.send_request(request()).await.unwrap();
            assert_eq!(answer.status(), StatusCode::NOT_FOUND);
            answer.into_body().collect().await.unwrap();
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        // It was silent for 60 s already.
        let waited = seconds_until(ended).await;
        assert!((15..=25).contains(&waited), "{waited} s");
        drop(sender);
    }

    #[tokio::test(start_paused = true)]
    async fn an_http2_client_that_asks_for_nothing_any_more_is_let_go_sooner_where_there_is_little_room()
     {
        let serving = serving();
        let mut others = Vec::new();
        for _ in 0..7 {
            others.push(serving.room.seat().await);
        }
        let (mut sender, ended) = http2_client_of(serving, 64 * 1024).await;
        let answer = sender.send_request(request()).await.unwrap();
        answer.into_body().collect().await.unwrap();
        let waited = seconds_until(ended).await;
        assert!((10..=20).contains(&waited), "{waited} s");
        drop((sender, others));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_says_nothing_at_all_is_let_go() {
        for (tls, limit_s) in [(None, 75), (Some(tls_port()), 10)] {
            let serving = Serving { tls, ..serving() };
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).await;
            let (stream, _) = listener.accept().await.unwrap();
            let ended = tokio::spawn(async move {
                let _ = connection(stream, &serving).await;
            });
            assert_eq!(seconds_until(ended).await, limit_s);
            drop(client);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_http2_client_that_never_reads_its_answer_is_let_go_too() {
        let (mut sender, ended) = http2_client(1).await;
        let unread = sender.send_request(request()).await.unwrap();
        let waited = seconds_until(ended).await;
        let limit = 75 + CLIENT_STALLED_MAX.as_secs();
        assert!((limit..=limit + 10).contains(&waited), "{waited} s");
        drop((sender, unread));
    }
}
