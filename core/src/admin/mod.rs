//! The admin listener: `/metrics`, health, and JSON for `llmgw ctl`. Binds to loopback by default.

mod addresses;
pub mod fleet;
pub mod guard;
pub mod page;
pub mod policies;
pub mod routes;
pub mod status;

use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::addresses::{Addresses, CONNECTIONS_OF_ADDRESS_MAX};
use self::guard::Guard;
use self::status::StatusReport;
use crate::certificates::{Ends, Port};
use crate::serve::reload::Confirmed;
use crate::sparing::Sparing;
use crate::telemetry::metrics::Metrics;

/// On every answer, refusals included: what else listens at an address that is taken for this one does not say so.
pub const ADMIN_HEADER: HeaderName = HeaderName::from_static("x-llmgw-admin");
/// Connections served at once; further ones wait in the kernel's backlog.
pub const ADMIN_CONNECTIONS_MAX: usize = 256;
/// A connection that sends no request for this long is closed.
const HEADER_READ_TIMEOUT_MS: u64 = 10_000;
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// A client that takes nothing of its answer: after this long the kernel resets it.
const CLIENT_STALLED_MAX: Duration = Duration::from_secs(30);
/// A connection ends with the answer at hand once it is this old, whatever its client does: one that takes a byte now and then would keep its
/// place for ever.
const CONNECTION_LIFE: Duration = Duration::from_secs(120);
/// For that answer: longer than `ctl` waits for one.
const LAST_ANSWER_MAX: Duration = Duration::from_secs(60);
const CONNECTION_BUFFER_MAX_BYTES: usize = 64 << 10;
/// Pause after an accept that failed (mostly: out of file descriptors), so that the loop doesn't spin.
const ACCEPT_RETRY_MS: u64 = 50;

/// Says whether the gateway can take requests; the error is the reason for a person.
pub type Ready = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;
/// Describes the whole gateway as it is now.
pub type Report = Arc<dyn Fn() -> StatusReport + Send + Sync>;
/// The certificates whose end is a number on the metrics page, as of now.
pub type EndsNow = Arc<dyn Fn() -> Vec<Ends> + Send + Sync>;
/// Reloads configuration, policies and certificates; says what is in force now, or why nothing changed. May block.
pub type Reload = Arc<dyn Fn(Confirmed) -> Result<String, String> + Send + Sync>;

/// What the admin listener shows and does.
pub struct Admin {
    pub metrics: Arc<Metrics>,
    pub policies: Arc<llmgw_plugins::Policies>,
    pub report: Report,
    pub ready: Ready,
    pub reload: Reload,
    pub ends: EndsNow,
    /// Asked on every route but `/healthz` and `/readyz`.
    pub guard: Guard,
    /// None: this server starts no replicas.
    pub fleet: Option<fleet::FleetAdmin>,
}

/// Serves the listener until `stop`. To be stopped last, so that `/readyz` says no while requests drain. Returns the connections that are left,
/// which end with the answer at hand, for the caller to wait for.
pub async fn serve(
    listener: TcpListener,
    admin: Arc<Admin>,
    tls: Option<Arc<Port>>,
    stop: CancellationToken,
) -> TaskTracker {
    let permits = Arc::new(Semaphore::new(ADMIN_CONNECTIONS_MAX));
    let addresses = Arc::new(Addresses::default());
    let connections = TaskTracker::new();
    let (mut turned_away, mut not_accepted) = (Sparing::default(), Sparing::default());
    loop {
        let accepted = async {
            let permit = permits.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            accepted = accepted => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((stream, address)) => {
                let Some(held) = addresses.hold(address.ip()) else {
                    if let Some(unsaid) = turned_away.note() {
                        tracing::warn!(
                            "{address} was turned away from `admin`: it has {CONNECTIONS_OF_ADDRESS_MAX} connections there{unsaid}"
                        );
                    }
                    continue;
                };
                let (admin, tls, stop) = (admin.clone(), tls.clone(), stop.clone());
                connections.spawn(async move {
                    serve_stream(stream, admin, tls, stop).await;
                    drop((permit, held));
                });
            }
            Err(error) => {
                if let Some(unsaid) = not_accepted.note() {
                    tracing::warn!(
                        "the admin listener could not accept a connection: {error}{unsaid}"
                    );
                }
                tokio::time::sleep(Duration::from_millis(ACCEPT_RETRY_MS)).await;
            }
        }
    }
    connections.close();
    connections
}

async fn serve_stream(
    stream: TcpStream,
    admin: Arc<Admin>,
    tls: Option<Arc<Port>>,
    stop: CancellationToken,
) {
    if let Err(error) =
        socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(CLIENT_STALLED_MAX))
    {
        tracing::debug!(%error, "an admin connection took no limit");
        return;
    }
    let Some(tls) = tls else {
        return serve_connection(stream, admin, stop).await;
    };
    let shaken = tokio::select! {
        shaken = tls.accept(stream, TLS_HANDSHAKE_TIMEOUT) => shaken,
        () = stop.cancelled() => return,
    };
    match shaken {
        Ok(stream) => serve_connection(stream, admin, stop).await,
        Err(error) => tracing::debug!(%error, "TLS handshake failed on the admin listener"),
    }
}

async fn serve_connection<S>(stream: S, admin: Arc<Admin>, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| {
        let admin = admin.clone();
        async move { Ok::<_, std::convert::Infallible>(routes::answer(&admin, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_millis(HEADER_READ_TIMEOUT_MS))
        .max_buf_size(CONNECTION_BUFFER_MAX_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        result = &mut connection => Some(result),
        () = stop.cancelled() => None,
        () = tokio::time::sleep(CONNECTION_LIFE) => None,
    };
    let result = match ended {
        Some(result) => result,
        None => {
            connection.as_mut().graceful_shutdown();
            match tokio::time::timeout(LAST_ANSWER_MAX, connection).await {
                Ok(result) => result,
                Err(_) => return tracing::debug!("an admin client did not take its answer"),
            }
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "admin connection ended");
    }
}

#[cfg(test)]
pub(crate) mod tests;
