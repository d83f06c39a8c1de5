//! The connection under a session: gRPC over HTTP/2 on a socket that somebody else opened, with signs of life of its own.
//!
//! Each connection is served and dialled by hyper itself and carries one session, so that either side can cut one without asking anybody: a
//! shared server that waits for its streams would wait for ever on a node that vanished. TLS, if any, is under it: whoever hands the socket in did the handshake.

use std::convert::Infallible;
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, Request, Response, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper::rt::Executor;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::codegen::BoxFuture;
use tonic::codegen::tokio_stream::Stream;
use tonic::{Code, Status, async_trait};

use crate::convert::{Framed, Words, enrolment};
use crate::enrolment::{Enrolled, EnrolmentRefusal, EnrolmentRequest};
use crate::identity::opening::{self, FirstAnswer};
use crate::session::{AgentMessage, ServerMessage};
use crate::wire;
use crate::wire::error::WireError;
use crate::wire::fleet_client::FleetClient;
use crate::wire::fleet_server::{Fleet, FleetServer};
pub use crate::wire::shape::MESSAGE_MAX_BYTES;

/// Calls at once on a connection: a session, and a question for a certificate.
const CALLS_MAX: u32 = 2;
/// The path of a question for a certificate, and what is taken in of one: a token, a name and a signing request are less.
const ENROL_PATH: &str = "/llmgw.v1.Fleet/Enroll";
const ENROL_MESSAGE_MAX_BYTES: usize = 32 << 10;
const HEADERS_MAX_BYTES: u32 = 16 << 10;
/// What a peer may send that nobody has read yet, for the session and for the connection.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 512 << 10;
/// What may wait for a peer that does not read, beside the queue of messages.
const SEND_BUFFER_MAX_BYTES: usize = 64 << 10;

const NOT_AGENTS_PORT: &str =
    "that is not the agents' port of a llmgw server (`agents.listen`, 8443 if left out)";
const PERHAPS_NOT_AGENTS_PORT: &str =
    "is that the agents' port of a llmgw server (`agents.listen`, 8443 if left out)?";

/// How a dead connection is found out: an HTTP/2 ping each `interval`, answered within `timeout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    pub interval: Duration,
    pub timeout: Duration,
}

/// What a server does with a session, or with a node that has no certificate yet. One per connection.
pub trait Host: Send + Sync + 'static {
    /// How much of one message of a session is taken in, before it is looked at.
    fn message_max_bytes(&self) -> usize {
        MESSAGE_MAX_BYTES
    }

    /// An agent opened a session. What the receiver yields goes down to it; its end is the end of the session.
    ///
    /// # Errors
    /// Why there is no further session on this connection.
    fn session(
        &self,
        heard: Hearing<AgentMessage>,
    ) -> Result<mpsc::Receiver<Framed<ServerMessage>>, &'static str>;

    /// A node asks for a certificate, or sends what is no such question.
    fn enrol(
        &self,
        asked: Result<EnrolmentRequest, WireError>,
    ) -> impl Future<Output = Result<Enrolled, EnrolmentRefusal>> + Send;
}

/// What comes in, message by message.
pub struct Hearing<M: Spoken>(tonic::Streaming<<M as Words>::Wire>);

/// Messages that travel: [`AgentMessage`] and [`ServerMessage`].
#[allow(private_bounds)]
pub trait Spoken: Words {}

/// What came in.
#[derive(Debug)]
pub enum Heard<M> {
    Message(Framed<M>),
    /// A message of a newer peer, which is not for us.
    Skipped(WireError),
    /// No message at all. The session can't go on.
    Malformed(String),
    /// Nothing follows. Whether that was meant is for an earlier message to say: a connection that died looks the same.
    End,
    /// Nothing follows, since the connection broke.
    Broken(String),
}

/// A connection that an agent dialled. Dropped, it is closed.
#[derive(Debug)]
pub struct Dialled(Tasks);

/// The tasks of one connection. hyper hands the one that owns the socket to its executor: to cut the connection is to end that one.
#[derive(Debug, Clone, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<F> Executor<F> for Tasks
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, task: F) {
        let mut tasks = self.lock();
        // Those that ended are forgotten, so that a long session keeps none of them.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            task.await;
        });
    }
}

/// Why a connection could not be made or did not last.
#[derive(Debug)]
pub struct LinkError {
    text: String,
    /// What the other side said first was TLS, on a socket without it.
    pub met_tls: bool,
}

/// An answer of a server that speaks HTTP/2 and not gRPC, such as the one that clients use.
#[derive(Debug)]
struct NotGrpc(StatusCode);

/// Opens a session on a socket. What `outgoing` yields goes up; its end says that nothing more will be said.
///
/// # Errors
/// The other side does not speak HTTP/2, or is no server of ours.
pub async fn dial<S>(
    socket: S,
    keep_alive: KeepAlive,
    outgoing: mpsc::Receiver<Framed<AgentMessage>>,
) -> Result<(Hearing<ServerMessage>, Dialled), LinkError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut client, dialled, first) = client(socket, keep_alive).await?;
    let heard = client
        .session(Outgoing(outgoing))
        .await
        .map_err(|status| LinkError::met(&told(&status), &first))?;
    Ok((Hearing(heard.into_inner()), dialled))
}

/// Asks for a certificate on a socket, and closes it.
///
/// # Errors
/// The other side does not speak HTTP/2, or is no server of ours, or of a release before this one.
pub async fn enrol<S>(
    socket: S,
    keep_alive: KeepAlive,
    request: &EnrolmentRequest,
) -> Result<Result<Enrolled, EnrolmentRefusal>, LinkError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut client, _dialled, first) = client(socket, keep_alive).await?;
    let answer = client
        .enroll(enrolment::request_out(request))
        .await
        .map_err(|status| LinkError::met(&told(&status), &first))?;
    enrolment::answer_in(answer.into_inner()).map_err(|error| LinkError::of(error.to_string()))
}

async fn client<S>(
    socket: S,
    keep_alive: KeepAlive,
) -> Result<(FleetClient<Requests>, Dialled, FirstAnswer), LinkError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (socket, first) = opening::note(socket);
    let tasks = Tasks::default();
    let (requests, connection) = hyper::client::conn::http2::Builder::new(tasks.clone())
        .timer(TokioTimer::new())
        .keep_alive_interval(keep_alive.interval)
        .keep_alive_timeout(keep_alive.timeout)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BUFFER_MAX_BYTES)
        .max_header_list_size(HEADERS_MAX_BYTES)
        .handshake(TokioIo::new(socket))
        .await
        .map_err(|error| LinkError::met(&chain(&error), &first))?;
    // Its end is the end of what is heard.
    tasks.execute(async move {
        let _ = connection.await;
    });
    let client = FleetClient::with_origin(Requests(requests), Uri::from_static("http://fleet"))
        .max_decoding_message_size(MESSAGE_MAX_BYTES)
        .max_encoding_message_size(MESSAGE_MAX_BYTES);
    Ok((client, Dialled(tasks), first))
}

/// Serves a socket until its connection ends. Dropped, it cuts it.
///
/// # Errors
/// How the connection broke, or that its first bytes were no HTTP/2.
pub async fn serve<S, H>(socket: S, host: Arc<H>, keep_alive: KeepAlive) -> Result<(), LinkError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    H: Host,
{
    let methods = Methods::of(host);
    hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(keep_alive.interval)
        .keep_alive_timeout(keep_alive.timeout)
        .max_concurrent_streams(CALLS_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BUFFER_MAX_BYTES)
        .max_header_list_size(HEADERS_MAX_BYTES)
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(methods))
        .await
        .map_err(|error| LinkError::of(chain(&error)))
}

impl Spoken for AgentMessage {}

impl Spoken for ServerMessage {}

impl<M: Spoken> Hearing<M> {
    /// The next message, or the end. Nothing is lost if this is dropped before it returns.
    pub async fn next(&mut self) -> Heard<M> {
        match self.0.message().await {
            Ok(Some(message)) => match M::from_wire(message) {
                Ok(framed) => Heard::Message(framed),
                Err(error) if error.is_of_a_newer_peer() => Heard::Skipped(error),
                Err(error) => Heard::Malformed(error.to_string()),
            },
            Ok(None) => Heard::End,
            // What our own decoder says of bytes that are too many or make no sense.
            Err(status) if matches!(status.code(), Code::InvalidArgument | Code::OutOfRange) => {
                Heard::Malformed(status.message().to_owned())
            }
            Err(status) => Heard::Broken(told(&status)),
        }
    }
}

impl Drop for Dialled {
    fn drop(&mut self) {
        self.0.lock().abort_all();
    }
}

impl LinkError {
    fn of(text: String) -> LinkError {
        LinkError {
            text,
            met_tls: false,
        }
    }

    /// With what is meant by the answer, or the lack of one, at a port where nobody speaks gRPC. How a connection ends there is a matter of chance.
    fn met(text: &str, first: &FirstAnswer) -> LinkError {
        let is_cut = ["connection closed", "broken pipe", "connection reset"];
        let text = match () {
            () if first.is_text() => {
                format!("{NOT_AGENTS_PORT}: it speaks no HTTP/2 ({text})")
            }
            () if first.is_nothing() && is_cut.iter().any(|end| text.contains(end)) => {
                format!("{text}; {PERHAPS_NOT_AGENTS_PORT}")
            }
            () => text.to_owned(),
        };
        LinkError {
            text,
            met_tls: first.is_tls(),
        }
    }
}

/// Whether an answer is one of gRPC, also where it refuses.
fn is_grpc(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

type RequestError = Box<dyn Error + Send + Sync>;

/// hyper's sender, as gRPC's client wants it.
struct Requests(SendRequest<tonic::body::Body>);

impl tonic::codegen::Service<Request<tonic::body::Body>> for Requests {
    type Response = Response<Incoming>;
    type Error = RequestError;
    type Future = BoxFuture<Self::Response, RequestError>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), RequestError>> {
        self.0.poll_ready(context).map_err(RequestError::from)
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let answer = self.0.send_request(request);
        Box::pin(async move {
            let answer = answer.await?;
            match is_grpc(answer.headers()) {
                true => Ok(answer),
                false => Err(NotGrpc(answer.status()).into()),
            }
        })
    }
}

struct Served<H>(Arc<H>);

/// What can be called, each with the limit of its own messages: anybody may ask for a certificate, and only a session needs much.
struct Methods<H: Host> {
    session: FleetServer<Served<H>>,
    enrol: FleetServer<Served<H>>,
}

impl<H: Host> Methods<H> {
    fn of(host: Arc<H>) -> Methods<H> {
        let session_max_bytes = host.message_max_bytes();
        let served = Arc::new(Served(host));
        let taking = |max_bytes| {
            FleetServer::from_arc(served.clone())
                .max_decoding_message_size(max_bytes)
                .max_encoding_message_size(MESSAGE_MAX_BYTES)
        };
        Methods {
            session: taking(session_max_bytes),
            enrol: taking(ENROL_MESSAGE_MAX_BYTES.min(session_max_bytes)),
        }
    }
}

impl<H: Host> Clone for Methods<H> {
    fn clone(&self) -> Methods<H> {
        Methods {
            session: self.session.clone(),
            enrol: self.enrol.clone(),
        }
    }
}

impl<H: Host> tonic::codegen::Service<Request<Incoming>> for Methods<H> {
    type Response = Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        match request.uri().path() {
            ENROL_PATH => self.enrol.call(request),
            _ => self.session.call(request),
        }
    }
}

#[async_trait]
impl<H: Host> Fleet for Served<H> {
    type SessionStream = Accepted;

    async fn session(
        &self,
        request: tonic::Request<tonic::Streaming<wire::AgentMessage>>,
    ) -> Result<tonic::Response<Accepted>, Status> {
        let outgoing = self.0.session(Hearing(request.into_inner()));
        let outgoing = outgoing.map_err(Status::failed_precondition)?;
        Ok(tonic::Response::new(Accepted(Outgoing(outgoing))))
    }

    async fn enroll(
        &self,
        request: tonic::Request<wire::EnrollRequest>,
    ) -> Result<tonic::Response<wire::EnrollResponse>, Status> {
        let asked = enrolment::request_in(request.into_inner());
        let answer = self.0.enrol(asked).await;
        Ok(tonic::Response::new(enrolment::answer_out(answer)))
    }
}

/// A queue of messages, as a stream of what the wire takes.
struct Outgoing<M>(mpsc::Receiver<Framed<M>>);

impl<M: Words> Stream for Outgoing<M> {
    type Item = M::Wire;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<M::Wire>> {
        let next = self.0.poll_recv(context);
        next.map(|next| next.map(|framed| framed.message.to_wire(framed.session)))
    }
}

/// The same, for a side that could fail.
struct Accepted(Outgoing<ServerMessage>);

impl Stream for Accepted {
    type Item = Result<wire::ServerMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.0)
            .poll_next(context)
            .map(|next| next.map(Ok))
    }
}

/// What a status says, with what is behind it.
fn told(status: &Status) -> String {
    match status.source() {
        Some(source) => chain(source),
        None => format!("{}: {}", status.code().description(), status.message()),
    }
}

/// An error and all that caused it, each once.
fn chain(error: &dyn Error) -> String {
    let mut text = without_address(&error.to_string()).to_owned();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        let more = without_address(&more);
        if !text.contains(more) {
            text.push_str(": ");
            text.push_str(more);
        }
        source = error.source();
    }
    text
}

/// rustls ends some of its sentences with the address of its manual, which is no help to an operator.
fn without_address(text: &str) -> &str {
    text.split_once(": https://")
        .map_or(text, |(sentence, _)| sentence)
}

impl fmt::Display for LinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for LinkError {}

impl fmt::Display for NotGrpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{NOT_AGENTS_PORT}: it answered with status {} and speaks no gRPC",
            self.0.as_u16()
        )
    }
}

impl Error for NotGrpc {}

#[cfg(test)]
mod tests;
