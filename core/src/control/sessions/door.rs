//! The way in: what an agent's connection goes through before a word is said, and whether what it claims then is true.
//!
//! Whoever is not known for certain is refused: the one way past [`Gate::may_be`] with a certificate is one of our authority, for a client, that is
//! not revoked, and whose common name is the node id that is claimed.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use llmgw_proto::identity::listening::{Accepted, AgentsTls, Showing};
use llmgw_proto::identity::opening::{self, Opening};
use llmgw_proto::identity::problem::{IdentityProblem, shown};
use llmgw_proto::identity::verdict::Shown;
use llmgw_proto::identity::{Certificate, Fingerprint, Serial};
use llmgw_proto::session::{Refusal, RefusalCode, Register};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::complaints::Complaints;
use crate::control::observed::NodeCertificate;
use crate::control::reach;
use crate::sparing::Unsaid;

/// Questions for a certificate that are worked on at once. Anybody can ask, and each takes a thread.
const ENROLLING_MAX: usize = 8;

/// How agents come in.
#[derive(Clone)]
pub enum Door {
    /// No TLS: for loopback, and where the operator said so.
    Plain,
    Tls(Arc<AgentsTls>),
}

impl Door {
    /// Whether an agent that has nothing but this authority's fingerprint takes the server for the right one.
    pub fn leads_to(&self, authority: &Fingerprint) -> bool {
        match self {
            Door::Plain => false,
            Door::Tls(tls) => tls.leads_to(authority),
        }
    }
}

/// The door, and who is let through. The one place where a connection's identity comes from.
pub(super) struct Gate {
    door: Door,
    /// Who shows no certificate is let through nowhere.
    require_identity: bool,
    /// Serial numbers of certificates that are worth nothing. Replaced by a reload.
    denied: RwLock<BTreeSet<Serial>>,
    turn: Mutex<()>,
    complaints: Mutex<Complaints>,
    enrolling: Arc<Semaphore>,
}

/// Who is on the other side, as far as the connection itself tells.
#[derive(Clone, Debug)]
pub struct Peer {
    pub address: SocketAddr,
    /// The address of this machine that it reached.
    pub(super) own: IpAddr,
    pub(super) showing: Arc<Showing>,
}

/// Why a connection gets no further than the door.
#[derive(Debug)]
pub(super) struct NoEntry {
    /// One word for it, to tell repeated lines from each other.
    pub(super) kind: &'static str,
    why: String,
}

/// Why somebody is not who they claim to be.
#[derive(Debug)]
pub(super) struct NotThem {
    pub(super) kind: &'static str,
    pub(super) refusal: Refusal,
}

/// A socket, whatever it is made of.
pub(super) trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Socket for S {}

impl Gate {
    pub(super) fn new(door: Door, require_identity: bool, denied: BTreeSet<Serial>) -> Gate {
        Gate {
            door,
            require_identity,
            denied: RwLock::new(denied),
            turn: Mutex::default(),
            complaints: Mutex::default(),
            enrolling: Arc::new(Semaphore::new(ENROLLING_MAX)),
        }
    }

    /// Does the handshake, if there is one. The caller limits how long it takes.
    pub(super) async fn admit(
        &self,
        stream: TcpStream,
        address: SocketAddr,
    ) -> Result<(Box<dyn Socket>, Peer), NoEntry> {
        // A command leaves when it is written.
        stream.set_nodelay(true)?;
        let own = stream.local_addr()?.ip();
        let peer = |showing| Peer {
            address,
            own,
            showing: Arc::new(showing),
        };
        match &self.door {
            Door::Plain => {
                match opening::peek(&stream).await? {
                    Opening::Tls => {
                        opening::deny_tls(stream).await;
                        return Err(NoEntry::tls());
                    }
                    Opening::Nothing => return Err(NoEntry::nothing()),
                    Opening::Http2 | Opening::Http1 | Opening::Other => {}
                }
                Ok((Box::new(stream), peer(Showing::nothing())))
            }
            Door::Tls(tls) => {
                let accepted = tls.accept(stream).await;
                let Accepted { stream, showing } = accepted.map_err(|problem| NoEntry {
                    kind: problem.kind(),
                    why: problem.to_string(),
                })?;
                Ok((Box::new(stream), peer(showing)))
            }
        }
    }

    /// Whether a peer may speak for the node that it claims to be, by the authorities and the list of revoked certificates of now; the
    /// certificate that says so.
    ///
    /// # Errors
    /// What it showed and what it would have had to show.
    pub(super) fn may_be(
        &self,
        peer: &Peer,
        claimed: &str,
    ) -> Result<Option<NodeCertificate>, NotThem> {
        self.judge(peer, Some(claimed))
    }

    /// Whether there is a node at all that it could speak for.
    ///
    /// # Errors
    /// As [`may_be`](Gate::may_be).
    pub(super) fn may_be_any(&self, peer: &Peer) -> Result<(), NotThem> {
        self.judge(peer, None).map(|_| ())
    }

    fn judge(
        &self,
        peer: &Peer,
        claimed: Option<&str>,
    ) -> Result<Option<NodeCertificate>, NotThem> {
        let is_claimed = |certificate: &Certificate| {
            let name = certificate.common_name.as_deref();
            claimed.is_none_or(|claimed| name == Some(claimed))
        };
        let shown = match &self.door {
            Door::Plain => Shown::Nothing,
            Door::Tls(tls) => tls.judge_again(&peer.showing),
        };
        // An authority between is as good a reason as its own.
        let revoked = match &shown {
            Shown::Known(_) => self.denied_of(&peer.showing),
            _ => None,
        };
        let problem = match (&shown, revoked) {
            (_, Some(revoked)) => IdentityProblem::Revoked(revoked),
            (Shown::Known(certificate), None) if is_claimed(certificate) => {
                return Ok(Some(NodeCertificate {
                    name: certificate.name().to_owned(),
                    serial: certificate.serial.clone(),
                    not_after: certificate.not_after,
                }));
            }
            (Shown::Known(certificate), None) => IdentityProblem::OtherName(certificate),
            (Shown::Refused { why, certificate }, None) => {
                IdentityProblem::Refused(certificate, why)
            }
            (Shown::Unreadable(why), None) => IdentityProblem::Unreadable(why),
            (Shown::Nothing, None) if self.require_identity => IdentityProblem::NothingShown,
            (Shown::Nothing, None) => return Ok(None),
        };
        Err(NotThem {
            kind: problem.kind(),
            refusal: Refusal {
                code: RefusalCode::Identity,
                message: problem.sentence(claimed.unwrap_or("ID")),
                certificate: peer.name(),
                claimed: claimed.unwrap_or_default().to_owned(),
            },
        })
    }

    pub(super) fn deny(&self, serials: BTreeSet<Serial>) {
        let _turn = self.hold();
        *self.denied.write().unwrap_or_else(PoisonError::into_inner) = serials;
    }

    /// While this is held nobody is denied: for whoever judges and then acts on it.
    pub(super) fn hold(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a peer that is a node may be reached at the address that it says.
    ///
    /// # Errors
    /// Whose address that is, and what would help.
    pub(super) fn may_be_at(&self, peer: &Peer, register: &Register) -> Result<(), NotThem> {
        let advertise = &register.advertise;
        let no = reach::may_advertise(advertise, peer.address.ip(), peer.own);
        no.map_err(|why| NotThem {
            kind: "address",
            refusal: Refusal {
                code: RefusalCode::Malformed,
                message: format!(
                    "`advertise` is {advertise}, which is {why}; set `advertise` in agent.yaml to an address at which this server reaches the node"
                ),
                certificate: peer.name(),
                claimed: register.node.clone(),
            },
        })
    }

    /// The first certificate of a chain that is denied.
    fn denied_of<'a>(&self, showing: &'a Showing) -> Option<&'a Certificate> {
        let denied = self.denied.read().unwrap_or_else(PoisonError::into_inner);
        showing
            .certificates()
            .find(|certificate| denied.contains(&certificate.serial))
    }

    /// Waits until one more question for a certificate may be worked on. `None` does not happen: nobody closes it.
    pub(super) async fn enrolling(&self) -> Option<OwnedSemaphorePermit> {
        self.enrolling.clone().acquire_owned().await.ok()
    }

    /// Whether anybody on the way can read what is said.
    pub(super) fn is_plain(&self) -> bool {
        matches!(self.door, Door::Plain)
    }

    /// Whether to write a line about trouble with a connection, and how many like it were not written.
    pub(super) fn may_say(&self, address: SocketAddr, kind: &'static str) -> Option<Unsaid> {
        self.complaints
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .note(address.ip(), kind, Instant::now())
    }
}

impl Peer {
    fn certificate(&self) -> Option<&Certificate> {
        self.showing.shown.certificate()
    }

    /// The name in its certificate, whatever that is worth.
    pub(super) fn name(&self) -> Option<String> {
        self.certificate()
            .map(|certificate| shown(certificate.name()))
    }
}

/// For the log: from where, with which certificate.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.certificate() {
            Some(certificate) => write!(
                f,
                "{} (certificate `{}`, serial {})",
                self.address,
                shown(certificate.name()),
                certificate.serial
            ),
            None => self.address.fmt(f),
        }
    }
}

impl NoEntry {
    fn tls() -> NoEntry {
        NoEntry {
            kind: "tls",
            why: "it speaks TLS, and `agents.tls` is not set: set it, or write `http://` in the agent's `server`"
                .to_owned(),
        }
    }

    fn nothing() -> NoEntry {
        NoEntry {
            kind: "nothing",
            why: "it was closed before anything was said".to_owned(),
        }
    }
}

impl From<std::io::Error> for NoEntry {
    fn from(error: std::io::Error) -> NoEntry {
        NoEntry {
            kind: "io",
            why: error.to_string(),
        }
    }
}

impl fmt::Display for NoEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Door::Plain => "Plain",
            Door::Tls(_) => "Tls",
        })
    }
}
