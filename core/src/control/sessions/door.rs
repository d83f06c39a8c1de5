//! What an agent's connection goes through before a word is said: so far nothing, later TLS; and whether what it claims is true.

use std::io;
use std::net::SocketAddr;

use llmgw_proto::session::{Refusal, RefusalCode};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// The way in. The one place where a connection's identity comes from.
#[derive(Clone, Debug)]
pub enum Door {
    /// No TLS: for loopback, and where the operator said so.
    Plain,
}

/// Who is on the other side, as far as the connection itself tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub address: SocketAddr,
    /// The common name of its certificate.
    pub certificate: Option<String>,
}

/// A socket, whatever it is made of.
pub(super) trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Socket for S {}

impl Door {
    /// Does the handshake, if there is one. The caller limits how long it takes.
    ///
    /// # Errors
    /// The handshake failed.
    // It waits as soon as there is TLS.
    #[allow(clippy::unused_async)]
    pub(super) async fn admit(
        &self,
        stream: TcpStream,
        address: SocketAddr,
    ) -> io::Result<(Box<dyn Socket>, Peer)> {
        // A command leaves when it is written.
        stream.set_nodelay(true)?;
        match self {
            Door::Plain => {
                let peer = Peer {
                    address,
                    certificate: None,
                };
                Ok((Box::new(stream), peer))
            }
        }
    }
}

impl Peer {
    /// Whether it may speak for the node that it claims to be.
    ///
    /// # Errors
    /// What it showed and what it would have had to show.
    pub(super) fn may_be(&self, claimed: &str, require_identity: bool) -> Result<(), Refusal> {
        let message = match &self.certificate {
            Some(name) if name == claimed => return Ok(()),
            Some(name) => format!("the certificate is for `{name}`, not for `{claimed}`"),
            None if require_identity => {
                "no certificate was shown, and the server asks for one".to_owned()
            }
            None => return Ok(()),
        };
        Err(Refusal {
            code: RefusalCode::Identity,
            message,
            certificate: self.certificate.clone(),
            claimed: claimed.to_owned(),
        })
    }
}
