//! One agent's connection and the session on it, from the handshake to the last words.

use std::fmt;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use llmgw_proto::convert::Framed;
use llmgw_proto::enrolment::{Enrolled, EnrolmentRefusal, EnrolmentRequest};
use llmgw_proto::link::{self, Heard, Hearing, Host};
use llmgw_proto::session::{
    AgentMessage, NODE_ID_MAX_BYTES, Refusal, RefusalCode, Register, ServerMessage, SessionId,
    is_node_id,
};
use llmgw_proto::wire::error::WireError;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::SessionsOptions;
use super::door::{Gate, NotThem, Peer};
use super::enrol;
use super::keeper::Input;
use super::seats::{OUTGOING_MAX, Seat, Seats};
use super::strangers::{Full, Stranger};
use super::tails::Tails;
use crate::control::observed::{Cause, NodeCertificate, NodeEvent};
use crate::control::reach;

/// For the last words of a session to be read. Who reads them hangs up, so this is for machines that are slow, and for who never does.
const LAST_WORDS_MAX: Duration = Duration::from_secs(5);
/// Of somebody who can't be let in, whatever they claim: enough for a registration, which says what they claim.
const STRANGERS_MESSAGE_MAX_BYTES: usize = 256 << 10;

/// What all connections need.
pub(super) struct Shared {
    pub(super) options: SessionsOptions,
    pub(super) gate: Arc<Gate>,
    pub(super) seats: Arc<Seats>,
    pub(super) tails: Arc<Tails>,
    pub(super) inputs: mpsc::Sender<Input>,
    /// The server has waited long enough.
    pub(super) cut: CancellationToken,
}

/// One connection, as the session on it sees it.
struct Connection {
    shared: Arc<Shared>,
    peer: Peer,
    has_session: AtomicBool,
    /// A session was accepted: the connection may last.
    accepted: CancellationToken,
    /// The session is over: so is the connection, after its last words.
    over: CancellationToken,
}

/// Runs a connection to its end.
pub(super) async fn run(
    stream: TcpStream,
    address: SocketAddr,
    stranger: Stranger,
    shared: Arc<Shared>,
) {
    let cut = shared.cut.clone();
    tokio::select! {
        () = serve(stream, address, stranger, shared) => {}
        () = cut.cancelled() => {}
    }
}

async fn serve(
    stream: TcpStream,
    address: SocketAddr,
    mut stranger: Stranger,
    shared: Arc<Shared>,
) {
    let patience = shared.options.patience;
    let gate = shared.gate.clone();
    let say = |kind: &'static str, what: fmt::Arguments<'_>| {
        if let Some(unsaid) = gate.may_say(address, kind) {
            tracing::info!("{address}: {what}{unsaid}");
        }
    };
    // An agent may be among them.
    let made_room = |full: Full, when: &str| {
        if let Some(unsaid) = gate.may_say(address, full.kind()) {
            tracing::warn!("{address}: {when}{full}{unsaid}");
        }
    };
    let admitted = tokio::select! {
        admitted = timeout(patience, gate.admit(stream, address)) => admitted,
        full = stranger.displaced() => return made_room(full, "no handshake: "),
    };
    let (socket, peer) = match admitted {
        Ok(Ok(admitted)) => admitted,
        Ok(Err(no)) => return say(no.kind, format_args!("no handshake: {no}")),
        Err(_) => return say("late", format_args!("no handshake within {patience:?}")),
    };
    let keep_alive = shared.options.keep_alive;
    let connection = Arc::new(Connection {
        shared,
        peer,
        has_session: AtomicBool::new(false),
        accepted: CancellationToken::new(),
        over: CancellationToken::new(),
    });
    // However this ends, the session's task hears all that came in before, and then the end.
    let mut serving = pin!(link::serve(socket, connection.clone(), keep_alive));
    let mut stranger = Some(stranger);
    let ended = tokio::select! {
        ended = &mut serving => Some(ended),
        () = connection.over.cancelled() => None,
        over = stay(&connection.accepted, patience, &mut stranger) => return match over {
            StayOver::Displaced(full) => made_room(full, ""),
            StayOver::Silent => say("silent", format_args!("no agent registered within {patience:?}")),
        },
    };
    match ended {
        Some(Ok(())) => {}
        Some(Err(error)) => say("broke", format_args!("the connection broke: {error}")),
        // Who was refused is a stranger to the end.
        None => tokio::select! {
            _ = timeout(LAST_WORDS_MAX, serving) => {}
            _ = stay(&connection.accepted, LAST_WORDS_MAX, &mut stranger) => {}
        },
    }
}

/// Why a connection may stay no longer.
enum StayOver {
    /// Newer ones need its place.
    Displaced(Full),
    /// It had its chance, and nobody registered on it.
    Silent,
}

/// Returns when and why a connection may stay no longer. Once somebody registered it is no stranger's.
async fn stay(
    accepted: &CancellationToken,
    patience: Duration,
    stranger: &mut Option<Stranger>,
) -> StayOver {
    if let Some(waiting) = stranger {
        tokio::select! {
            biased;
            () = accepted.cancelled() => {}
            full = waiting.displaced() => return StayOver::Displaced(full),
            () = sleep(patience) => return StayOver::Silent,
        }
    }
    *stranger = None;
    std::future::pending().await
}

impl Host for Connection {
    fn message_max_bytes(&self) -> usize {
        match self.shared.gate.may_be_any(&self.peer) {
            Ok(()) => link::MESSAGE_MAX_BYTES,
            Err(_) => STRANGERS_MESSAGE_MAX_BYTES,
        }
    }

    fn session(
        &self,
        heard: Hearing<AgentMessage>,
    ) -> Result<mpsc::Receiver<Framed<ServerMessage>>, &'static str> {
        if self.has_session.swap(true, Ordering::Relaxed) {
            return Err("this connection had its session: one each");
        }
        let (outgoing, sent) = mpsc::channel(OUTGOING_MAX);
        let session = Session {
            id: self.shared.seats.number(),
            shared: self.shared.clone(),
            peer: self.peer.clone(),
            outgoing,
            over: self.over.clone(),
            last: Arc::default(),
            accepted: self.accepted.clone(),
        };
        tokio::spawn(session.run(heard));
        Ok(sent)
    }

    async fn enrol(
        &self,
        asked: Result<EnrolmentRequest, WireError>,
    ) -> Result<Enrolled, EnrolmentRefusal> {
        let Shared { options, gate, .. } = &*self.shared;
        let address = self.peer.address;
        enrol::answer(options.enrolment.as_ref(), asked, address, gate).await
    }
}

/// The task of one session.
struct Session {
    id: SessionId,
    shared: Arc<Shared>,
    peer: Peer,
    outgoing: mpsc::Sender<Framed<ServerMessage>>,
    over: CancellationToken,
    /// What this server ended it with, if it did.
    last: Arc<OnceLock<ServerMessage>>,
    accepted: CancellationToken,
}

impl Session {
    async fn run(self, mut heard: Hearing<AgentMessage>) {
        // However it ends, the connection follows.
        let _over = self.over.clone().drop_guard();
        let first = tokio::select! {
            first = heard.next() => first,
            () = self.over.cancelled() => return,
        };
        let (register, certificate) = match self.registration(first) {
            Ok(registered) => registered,
            Err(not) => {
                self.is_refused(&not.refusal);
                return self.refuse(not);
            }
        };
        let node = register.node.clone();
        let registers = Input::Registers {
            session: self.id,
            event: NodeEvent::Registered {
                session: self.id,
                register,
                certificate,
                is_local: reach::is_here(self.peer.address.ip(), self.peer.own),
            },
            seat: Seat {
                node: node.clone(),
                peer: self.peer.clone(),
                outgoing: self.outgoing.clone(),
                over: self.over.clone(),
                last: self.last.clone(),
            },
        };
        if self.shared.inputs.send(registers).await.is_err() {
            return;
        }
        self.accepted.cancel();
        let why = self.listen(&node, &mut heard).await;
        let session = self.id;
        let event = match self.last.get() {
            None => NodeEvent::Ended { node, session, why },
            Some(last) => NodeEvent::Dismissed {
                node,
                session,
                cause: dismissal(last),
            },
        };
        let ended = Input::Ended {
            session: self.id,
            event,
        };
        let _ = self.shared.inputs.send(ended).await;
    }

    /// The first words, if they are what they have to be and come from whom they claim.
    fn registration(
        &self,
        first: Heard<AgentMessage>,
    ) -> Result<(Box<Register>, Option<NodeCertificate>), NotThem> {
        let gate = &self.shared.gate;
        match self.claim(first) {
            Ok(register) => {
                let certificate = gate.may_be(&self.peer, &register.node)?;
                gate.may_be_at(&self.peer, &register)?;
                Ok((register, certificate))
            }
            // What a stranger's words lack is not for a stranger to know.
            Err(malformed) => Err(gate.may_be_any(&self.peer).err().unwrap_or(malformed)),
        }
    }

    /// The first words, if they are a registration.
    fn claim(&self, first: Heard<AgentMessage>) -> Result<Box<Register>, NotThem> {
        let malformed = |message: String| self.malformed("", message);
        let register = match first {
            Heard::Message(Framed {
                message: AgentMessage::Register(register),
                ..
            }) => register,
            Heard::Message(other) => {
                let name = other.message.name();
                return Err(malformed(format!(
                    "it began with `{name}`, not with `register`"
                )));
            }
            Heard::Skipped(error) => return Err(malformed(error.to_string())),
            Heard::Malformed(why) | Heard::Broken(why) => return Err(malformed(why)),
            Heard::End => return Err(malformed("it ended before it registered".to_owned())),
        };
        if !is_node_id(&register.node) {
            let message = format!(
                "a node id is at most {NODE_ID_MAX_BYTES} letters, digits, `.`, `_` and `-`, {:?} is none",
                register.node
            );
            return Err(malformed(message));
        }
        Ok(register)
    }

    /// Hands on what the agent says, until it stops or is stopped. Why it did.
    async fn listen(&self, node: &str, heard: &mut Hearing<AgentMessage>) -> String {
        let mut has_skipped = false;
        loop {
            let next = tokio::select! {
                // Of a session that was ended nothing more is heard, whatever it has said already.
                biased;
                () = self.over.cancelled() => return "the server ended the session".to_owned(),
                next = heard.next() => next,
            };
            let framed = match next {
                Heard::Message(framed) => framed,
                Heard::Skipped(error) => {
                    if !std::mem::replace(&mut has_skipped, true) {
                        tracing::warn!(
                            "node `{node}` says what this server does not know: {error}"
                        );
                    }
                    continue;
                }
                Heard::Malformed(why) => {
                    let why = format!("what it said can't be read: {why}");
                    self.refuse(self.malformed(node, why.clone()));
                    return why;
                }
                Heard::End => return "the connection was closed".to_owned(),
                Heard::Broken(why) => return why,
            };
            // Words that were meant for a session before this one.
            if framed.session != self.id {
                tracing::debug!("node `{node}`: words for session {}", framed.session);
                continue;
            }
            let event = match self.event(node, framed.message) {
                Ok(Some(event)) => event,
                Ok(None) => continue,
                Err(why) => {
                    self.refuse(self.malformed(node, why.to_owned()));
                    return why.to_owned();
                }
            };
            if self.shared.inputs.send(Input::Said(event)).await.is_err() {
                return "the server stops".to_owned();
            }
        }
    }

    /// What the table is told of a message. None: it is not for the table.
    fn event(&self, node: &str, message: AgentMessage) -> Result<Option<NodeEvent>, &'static str> {
        let (node, session) = (node.to_owned(), self.id);
        Ok(Some(match message {
            AgentMessage::Register(_) => return Err("it registered twice"),
            AgentMessage::Heartbeat(heartbeat) => NodeEvent::Heartbeat {
                node,
                session,
                heartbeat,
            },
            AgentMessage::ShardStatus(report) => NodeEvent::Shard {
                node,
                session,
                report,
            },
            AgentMessage::LogChunk(chunk) => {
                self.shared.tails.deliver(session, chunk);
                return Ok(None);
            }
            AgentMessage::Goodbye(goodbye) => NodeEvent::Goodbye {
                node,
                session,
                goodbye,
            },
        }))
    }

    fn malformed(&self, claimed: &str, message: String) -> NotThem {
        NotThem {
            kind: "malformed",
            refusal: Refusal {
                code: RefusalCode::Malformed,
                message,
                certificate: self.peer.name(),
                claimed: claimed.to_owned(),
            },
        }
    }

    /// Has it kept for whoever looks for the node. Nobody waits for room: a stranger is not worth it, and comes again.
    fn is_refused(&self, refusal: &Refusal) {
        if refusal.claimed.is_empty() {
            return;
        }
        let event = NodeEvent::Dismissed {
            node: refusal.claimed.clone(),
            session: self.id,
            cause: Cause::Refused(refusal.message.clone()),
        };
        let _ = self.shared.inputs.try_send(Input::Said(event));
    }

    fn refuse(&self, not: NotThem) {
        let NotThem { kind, refusal } = not;
        if let Some(unsaid) = self.shared.gate.may_say(self.peer.address, kind) {
            tracing::warn!("{} was refused: {refusal}{unsaid}", self.peer);
        }
        // Who does not read gets no last words either.
        let _ = self.outgoing.try_send(Framed {
            session: self.id,
            message: ServerMessage::Refused(refusal),
        });
    }
}

/// Why a node is absent whose session ended with these words.
fn dismissal(last: &ServerMessage) -> Cause {
    match last {
        ServerMessage::Refused(refusal) => Cause::Refused(refusal.message.clone()),
        ServerMessage::Leaving(_) => Cause::ServerStops,
        other => Cause::StreamEnded(format!("the server ended it with `{}`", other.name())),
    }
}
