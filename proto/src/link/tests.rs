//! Both ends of a connection over a socket in memory: what a peer of another version, and one that means harm, makes of it.

use std::sync::Mutex;

use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tonic::Code;

use super::*;
use crate::enrolment::EnrolmentRefusalCode;
use crate::identity::{EnrolmentToken, Fingerprint};
use crate::session::{Goodbye, SessionId};

const PATIENCE: Duration = Duration::from_secs(60);
const KEEP_ALIVE: KeepAlive = KeepAlive {
    interval: PATIENCE,
    timeout: PATIENCE,
};

type Up = Hearing<AgentMessage>;
type Down = mpsc::Sender<Framed<ServerMessage>>;

/// Takes the first session and refuses further ones.
struct One(Mutex<Option<mpsc::UnboundedSender<(Up, Down)>>>);

impl Host for One {
    fn session(&self, heard: Up) -> Result<mpsc::Receiver<Framed<ServerMessage>>, &'static str> {
        let taker = self.0.lock().unwrap().take();
        let taker = taker.ok_or("one session each")?;
        let (down, sent) = mpsc::channel(8);
        taker.send((heard, down)).map_err(|_| "nobody is here")?;
        Ok(sent)
    }

    /// Signs for `n1`, and tells others why not.
    async fn enrol(
        &self,
        asked: Result<EnrolmentRequest, WireError>,
    ) -> Result<Enrolled, EnrolmentRefusal> {
        let refused = |code, message: &str| EnrolmentRefusal {
            code,
            message: message.to_owned(),
        };
        match asked {
            Ok(request) if request.node == "n1" => Ok(Enrolled {
                certificate: request.signing_request,
                authority: request.token.expose(),
            }),
            Ok(_) => Err(refused(EnrolmentRefusalCode::UnknownToken, "no such token")),
            Err(error) => Err(refused(
                EnrolmentRefusalCode::Unreadable,
                &error.to_string(),
            )),
        }
    }
}

fn asks(node: &str) -> EnrolmentRequest {
    EnrolmentRequest {
        token: EnrolmentToken::new("n1", [1; 16], Fingerprint([2; 32])).unwrap(),
        node: node.to_owned(),
        signing_request: "request".to_owned(),
    }
}

/// A server's end, and the socket that leads to it.
fn server() -> (DuplexStream, mpsc::UnboundedReceiver<(Up, Down)>) {
    let (near, far) = tokio::io::duplex(64 << 10);
    let (taker, sessions) = mpsc::unbounded_channel();
    let host = Arc::new(One(Mutex::new(Some(taker))));
    tokio::spawn(serve(far, host, KEEP_ALIVE));
    (near, sessions)
}

/// A client that sends what the wire takes, whatever that is.
async fn raw(socket: DuplexStream) -> FleetClient<Requests> {
    let (requests, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(socket))
            .await
            .unwrap();
    tokio::spawn(connection);
    FleetClient::with_origin(Requests(requests), Uri::from_static("http://fleet"))
}

fn goodbye(reason: &str) -> AgentMessage {
    AgentMessage::Goodbye(Goodbye {
        reason: reason.to_owned(),
        engines_stay: true,
    })
}

/// What a server hears of these messages.
async fn heard(messages: Vec<wire::AgentMessage>) -> Vec<String> {
    let (socket, mut sessions) = server();
    let mut client = raw(socket).await;
    let stream = tonic::codegen::tokio_stream::iter(messages);
    let _answers = client.session(stream).await.unwrap();
    let (mut hearing, _down) = sessions.recv().await.unwrap();
    let mut said = Vec::new();
    loop {
        let next = tokio::time::timeout(PATIENCE, hearing.next())
            .await
            .unwrap();
        said.push(match next {
            Heard::Message(framed) => framed.message.name().to_owned(),
            Heard::Skipped(error) => format!("skipped: {error}"),
            Heard::Malformed(why) => format!("malformed: {why}"),
            Heard::End => return said,
            Heard::Broken(_) => {
                said.push("broken".to_owned());
                return said;
            }
        });
    }
}

#[tokio::test]
async fn words_go_both_ways_and_an_end_is_heard() {
    let (socket, mut sessions) = server();
    let (up, outgoing) = mpsc::channel(8);
    let (mut heard, _dialled) = dial(socket, KEEP_ALIVE, outgoing).await.unwrap();
    let (mut hearing, down) = sessions.recv().await.unwrap();
    let session = SessionId(3);
    let message = goodbye("tired");
    up.send(Framed {
        session,
        message: message.clone(),
    })
    .await
    .unwrap();
    let Heard::Message(arrived) = hearing.next().await else {
        panic!("nothing came up");
    };
    assert_eq!(arrived, Framed { session, message });
    let message = ServerMessage::Leaving("late".to_owned());
    down.send(Framed {
        session,
        message: message.clone(),
    })
    .await
    .unwrap();
    let Heard::Message(arrived) = heard.next().await else {
        panic!("nothing came down");
    };
    assert_eq!(arrived, Framed { session, message });
    drop(up);
    assert!(matches!(hearing.next().await, Heard::End));
    drop(down);
    assert!(matches!(heard.next().await, Heard::End));
}

#[tokio::test]
async fn a_kind_of_message_that_is_not_known_is_skipped_and_the_session_goes_on() {
    let unknown = wire::AgentMessage {
        session: 1,
        kind: None,
    };
    let known = goodbye("x").to_wire(SessionId(1));
    let said = heard(vec![unknown, known]).await;
    assert_eq!(
        said,
        [
            "skipped: the message is of a kind that this version does not know",
            "goodbye"
        ]
    );
}

#[tokio::test]
async fn a_list_that_is_too_long_ends_the_session_before_it_is_built() {
    let report = wire::ShardReport::default();
    let register = wire::Register {
        shards: vec![report; 100_000],
        ..wire::Register::default()
    };
    let message = wire::AgentMessage {
        session: 0,
        kind: Some(wire::agent_message::Kind::Register(register)),
    };
    let said = heard(vec![message]).await;
    assert_eq!(
        said[0],
        "malformed: `register.shards` has more than 512 elements"
    );
}

#[tokio::test]
async fn a_message_that_is_too_large_is_not_even_taken_in() {
    let message = goodbye(&"x".repeat(10)).to_wire(SessionId(0));
    let Some(wire::agent_message::Kind::Goodbye(mut goodbye)) = message.kind else {
        panic!("it is a goodbye");
    };
    goodbye.reason = "x".repeat(MESSAGE_MAX_BYTES + 1);
    let message = wire::AgentMessage {
        session: 0,
        kind: Some(wire::agent_message::Kind::Goodbye(goodbye)),
    };
    let said = heard(vec![message]).await;
    assert!(said[0].starts_with("malformed: "), "{said:?}");
}

#[tokio::test]
async fn a_connection_has_one_session() {
    let (socket, mut sessions) = server();
    let mut client = raw(socket).await;
    let (_first, outgoing) = mpsc::channel::<Framed<AgentMessage>>(1);
    let _answers = client.session(Outgoing(outgoing)).await.unwrap();
    let _session = sessions.recv().await.unwrap();
    let (_second, outgoing) = mpsc::channel::<Framed<AgentMessage>>(1);
    let refused = client.session(Outgoing(outgoing)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(refused.message(), "one session each");
}

#[tokio::test]
async fn a_question_for_a_certificate_is_answered_or_refused_with_its_code() {
    let (socket, _sessions) = server();
    let answer = enrol(socket, KEEP_ALIVE, &asks("n1")).await.unwrap();
    let enrolled = answer.unwrap();
    assert_eq!(enrolled.certificate, "request");
    assert_eq!(enrolled.authority, asks("n1").token.expose());
    let (socket, _sessions) = server();
    let answer = enrol(socket, KEEP_ALIVE, &asks("n2")).await.unwrap();
    let refusal = answer.unwrap_err();
    assert_eq!(refusal.to_string(), "unknown_token: no such token");
}

#[tokio::test]
async fn a_question_that_is_none_is_refused_and_one_that_is_too_long_is_not_taken_in() {
    let (socket, _sessions) = server();
    let mut client = raw(socket).await;
    let answer = client.enroll(wire::EnrollRequest::default()).await.unwrap();
    let refused = answer.into_inner().refused.unwrap();
    assert_eq!(refused.code(), wire::EnrollRefusalCode::Unreadable);
    assert_eq!(refused.message, "`enroll.token` is missing");
    let long = wire::EnrollRequest {
        token: "llmgw1.".repeat(1_000),
        ..wire::EnrollRequest::default()
    };
    let refused = client.enroll(long).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_eq!(refused.message(), "`token` is longer than 256 bytes");
    // Before it is looked at, and although a session's message may be far longer.
    let longer = wire::EnrollRequest {
        signing_request: "x".repeat(ENROL_MESSAGE_MAX_BYTES),
        ..wire::EnrollRequest::default()
    };
    let refused = client.enroll(longer).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange);
}

#[tokio::test]
async fn a_connection_that_is_dropped_ends_what_the_other_side_hears() {
    let (socket, mut sessions) = server();
    let (_up, outgoing) = mpsc::channel(8);
    let (_heard, dialled) = dial(socket, KEEP_ALIVE, outgoing).await.unwrap();
    let (mut hearing, _down) = sessions.recv().await.unwrap();
    drop(dialled);
    let end = tokio::time::timeout(PATIENCE, hearing.next()).await;
    assert!(matches!(end, Ok(Heard::End | Heard::Broken(_))), "{end:?}");
}

/// What is said of a socket at whose end nobody speaks gRPC.
async fn said_of(near: DuplexStream) -> String {
    let (_up, outgoing) = mpsc::channel(8);
    let error = dial(near, KEEP_ALIVE, outgoing).await.err().unwrap();
    error.to_string()
}

#[tokio::test]
async fn a_port_that_is_not_the_agents_is_named_however_its_connection_ends() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    for (answer, said) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "that is not the"),
        (b"SSH-2.0-OpenSSH\r\n", "that is not the"),
        (b"", "is that the"),
    ] {
        for reads in [false, true] {
            let (near, mut far) = tokio::io::duplex(4 << 10);
            tokio::spawn(async move {
                if reads {
                    let _ = far.read(&mut [0; 1_024]).await;
                }
                let _ = far.write_all(answer).await;
                let _ = far.shutdown().await;
            });
            let text = said_of(near).await;
            let said = format!("{said} agents' port of a llmgw server (`agents.listen`, 8443");
            assert!(text.contains(&said), "{reads} {text}");
        }
    }
}

#[tokio::test]
async fn a_server_of_clients_is_told_from_one_of_agents_by_its_answer() {
    let (near, far) = tokio::io::duplex(64 << 10);
    tokio::spawn(async move {
        let refuses = hyper::service::service_fn(|_: Request<Incoming>| async {
            let answer = Response::builder()
                .status(404)
                .header(CONTENT_TYPE, "application/json");
            answer.body(tonic::body::Body::empty())
        });
        let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(far), refuses)
            .await;
    });
    assert_eq!(
        said_of(near).await,
        "that is not the agents' port of a llmgw server (`agents.listen`, 8443 if left out): it answered with status 404 and speaks no gRPC"
    );
}

#[test]
fn an_error_is_told_with_its_causes_each_once_and_without_addresses() {
    use std::io::{Error, ErrorKind};
    let manual = "it was closed without close_notify: https://docs.rs/rustls/latest";
    let inner = Error::new(ErrorKind::UnexpectedEof, manual);
    let text = super::chain(&Error::other(inner));
    assert_eq!(text, "it was closed without close_notify");
}
