//! Where clients and operators shake hands: the certificate of the moment, HTTP in the versions that are served, and a word to who speaks no TLS.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use llmgw_proto::identity::opening::{self, Opening};
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::Material;
use super::kept::Shows;
use crate::clock;

/// Whoever dials without TLS is a mistake or a scanner: one line a minute is enough for both.
const PLAINTEXT_SAID_EVERY_MS: u64 = 60_000;

/// The certificate of a listener; the handshakes that begin after a change see the new one.
#[derive(Debug)]
pub struct Shown(ArcSwap<CertifiedKey>);

/// A listener's side of a handshake.
pub struct Port {
    /// As the configuration calls the listener.
    name: &'static str,
    acceptor: TlsAcceptor,
    /// When a client without TLS was last said; 0: never.
    said_ms: AtomicU64,
}

impl Shown {
    pub fn new(material: &Material) -> Arc<Shown> {
        Arc::new(Shown(ArcSwap::new(material.certified.clone())))
    }
}

impl Shows for Shown {
    fn show(&self, material: &Material) {
        self.0.store(material.certified.clone());
    }
}

impl ResolvesServerCert for Shown {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

impl Port {
    /// `protocols` are what is served, the one that is liked best first.
    pub fn new(name: &'static str, shown: Arc<Shown>, protocols: &[&[u8]]) -> Arc<Port> {
        let mut config = ServerConfig::builder()
            .with_no_client_auth()
            .with_cert_resolver(shown);
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        Arc::new(Port {
            name,
            acceptor: TlsAcceptor::from(Arc::new(config)),
            said_ms: AtomicU64::new(0),
        })
    }

    /// Shakes hands within a time. Who speaks no TLS is told so in its own protocol.
    pub async fn accept(
        &self,
        stream: TcpStream,
        within: Duration,
    ) -> io::Result<TlsStream<TcpStream>> {
        let shaking = async {
            match opening::peek(&stream).await? {
                Opening::Nothing => Err(io::ErrorKind::UnexpectedEof.into()),
                Opening::Tls => self.acceptor.accept(stream).await,
                other => {
                    self.say(other);
                    opening::ask_for_tls(stream, other).await;
                    Err(io::Error::other(other.in_words()))
                }
            }
        };
        tokio::time::timeout(within, shaking)
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    fn say(&self, opening: Opening) {
        let now = clock::now_ms().max(1);
        let said = self.said_ms.load(Ordering::Relaxed);
        if said != 0 && now.saturating_sub(said) < PLAINTEXT_SAID_EVERY_MS {
            return;
        }
        self.said_ms.store(now, Ordering::Relaxed);
        tracing::warn!(
            "a client spoke {} on `{}`, which wants TLS; it was told to write https:// (said once a minute)",
            opening.in_words(),
            self.name
        );
    }
}
