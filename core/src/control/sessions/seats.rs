//! Where commands are handed in: for each session that speaks for a node, its bounded queue and the way to end it.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use llmgw_proto::convert::{self, Framed};
use llmgw_proto::session::{Refusal, RefusalCode, ServerMessage, SessionId};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::door::{Gate, Peer};
use crate::control::observed::NotSent;

/// Commands that wait for one node. One that lets so many pile up does not read.
pub(super) const OUTGOING_MAX: usize = 256;

/// One session's end of its connection.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    pub(super) node: String,
    pub(super) peer: Peer,
    pub(super) outgoing: mpsc::Sender<Framed<ServerMessage>>,
    /// The session is over: its connection is closed once its last words have left.
    pub(super) over: CancellationToken,
    /// What this server ended it with. Set before `over`.
    pub(super) last: Arc<OnceLock<ServerMessage>>,
}

/// All seats. Shared by the keeper, which puts sessions in and takes them out, and by whoever sends commands.
#[derive(Debug)]
pub(super) struct Seats {
    taken: Mutex<Taken>,
    /// The upper half of every session's number: no number of another server, or of an earlier run of this one, is mistaken for one of ours.
    run: u32,
    given: AtomicU32,
}

#[derive(Debug, Default)]
struct Taken {
    seats: HashMap<SessionId, Seat>,
    /// The server stops: what whoever sits down from now on is ended with.
    closed: Option<ServerMessage>,
}

impl Seats {
    pub(super) fn new() -> Seats {
        let run = RandomState::new().hash_one(std::process::id());
        Seats {
            taken: Mutex::default(),
            run: (run >> 32) as u32,
            given: AtomicU32::new(0),
        }
    }

    /// A number that is greater than all before.
    pub(super) fn number(&self) -> SessionId {
        let count = self.given.fetch_add(1, Ordering::Relaxed) + 1;
        SessionId(u64::from(self.run) << 32 | u64::from(count))
    }

    pub(super) fn put(&self, session: SessionId, seat: Seat) {
        let mut taken = self.lock();
        let Some(last) = taken.closed.clone() else {
            taken.seats.insert(session, seat);
            return;
        };
        drop(taken);
        seat.end(session, last);
    }

    /// Whether it sits. One that was put and does not was ended meanwhile.
    pub(super) fn has(&self, session: SessionId) -> bool {
        self.lock().seats.contains_key(&session)
    }

    pub(super) fn remove(&self, session: SessionId) {
        self.lock().seats.remove(&session);
    }

    /// Ends a session with a last message.
    pub(super) fn dismiss(&self, session: SessionId, last: ServerMessage) {
        let seat = self.lock().seats.remove(&session);
        if let Some(seat) = seat {
            seat.end(session, last);
        }
    }

    /// Ends a session that may no longer speak for its node. True: it did end.
    pub(super) fn judge(&self, session: SessionId, gate: &Gate) -> bool {
        let seat = self.lock().seats.get(&session).cloned();
        let Some(seat) = seat else { return false };
        let Err(not) = gate.may_be(&seat.peer, &seat.node) else {
            return false;
        };
        tracing::warn!("{} is cut off: {}", seat.peer, not.refusal);
        self.dismiss(session, ServerMessage::Refused(not.refusal));
        true
    }

    /// The same for all of them; how many ended. One that sits down meanwhile is for whoever puts it there to judge afterwards.
    pub(super) fn judge_all(&self, gate: &Gate) -> usize {
        let sessions: Vec<SessionId> = self.lock().seats.keys().copied().collect();
        let ended = sessions
            .iter()
            .filter(|session| self.judge(**session, gate));
        ended.count()
    }

    /// Ends all sessions, and from now on every one as it sits down: a registration may still wait for the keeper.
    pub(super) fn dismiss_all(&self, last: &ServerMessage) {
        let mut taken = self.lock();
        taken.closed = Some(last.clone());
        let seats = std::mem::take(&mut taken.seats);
        drop(taken);
        for (session, seat) in seats {
            seat.end(session, last.clone());
        }
    }

    pub(super) fn send(
        &self,
        node: &str,
        session: SessionId,
        message: ServerMessage,
    ) -> Result<(), NotSent> {
        if let ServerMessage::StartShard(_) = &message {
            // The node would end the session over it, and get it again in the next.
            convert::check(&message).map_err(NotSent::TooLarge)?;
        }
        let mut taken = self.lock();
        let seat = taken.seats.get(&session).filter(|seat| seat.node == node);
        let seat = seat.ok_or(NotSent::SessionEnded)?;
        match seat.outgoing.try_send(Framed { session, message }) {
            Ok(()) => Ok(()),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(NotSent::SessionEnded),
            Err(mpsc::error::TrySendError::Full(_)) => {
                tracing::warn!(
                    "node `{node}` does not read: {OUTGOING_MAX} commands wait for it; its session is cut"
                );
                let seat = taken.seats.remove(&session);
                drop(taken);
                if let Some(seat) = seat {
                    seat.end(session, too_slow(node));
                }
                Err(NotSent::QueueFull)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    pub(super) fn end(&self, session: SessionId, last: ServerMessage) {
        let _ = self.last.set(last.clone());
        // Before the last words: who hangs up over them must not be taken for one that vanished.
        self.over.cancel();
        // They leave all the same, since the connection stays for a while. Who does not read gets none.
        let _ = self.outgoing.try_send(Framed {
            session,
            message: last,
        });
    }
}

pub(super) fn too_slow(node: &str) -> ServerMessage {
    ServerMessage::Refused(Refusal {
        code: RefusalCode::TooSlow,
        message: "nothing was heard or read for too long".to_owned(),
        certificate: None,
        claimed: node.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use llmgw_proto::identity::listening::Showing;

    use super::*;

    #[test]
    fn whoever_sits_down_after_all_were_dismissed_is_told_so_too() {
        let leaving = ServerMessage::Leaving("the server stops".to_owned());
        let (seats, session) = (Seats::new(), SessionId(1));
        let (outgoing, mut sent) = mpsc::channel(8);
        let address = "127.0.0.1:1".parse().expect("it is one");
        let seat = Seat {
            node: "n1".to_owned(),
            peer: Peer {
                address,
                own: address.ip(),
                showing: Arc::new(Showing::nothing()),
            },
            outgoing,
            over: CancellationToken::new(),
            last: Arc::default(),
        };
        seats.dismiss_all(&leaving);
        seats.put(session, seat.clone());
        assert!(seat.over.is_cancelled());
        assert_eq!(seat.last.get(), Some(&leaving));
        let told = sent.try_recv().expect("it was told");
        assert_eq!((told.session, told.message), (session, leaving));
        assert!(!seats.has(session), "the table hears nothing of it");
    }
}
