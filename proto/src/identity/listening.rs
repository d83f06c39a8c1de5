//! The agents' port with TLS: its certificate, which is replaced while it listens, and the handshake, after which what a client showed is judged.
//!
//! The handshake asks for a client's certificate and checks that the client holds its key, no more: a client that is turned away within a handshake
//! learns nothing but an alert. What its certificate is worth is said afterwards ([`Shown`]), and it is for the caller to let nobody through who
//! is not known. Nothing is resumed: with resumption a certificate would be taken from memory, and nobody would ask for its key.

use std::fmt;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ServerConfig};
use rustls::{AlertDescription, DigitallySignedStruct, DistinguishedName, SignatureScheme};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::opening::{self, Opening};
use super::problem::{CertificateProblem, alerted};
use super::verdict::{
    CHAIN_MAX, CHAIN_MAX_BYTES, ClientJudge, NoJudge, Shown, authority_of, is_bounded, leads,
    moment, provider, with_authority,
};
use super::{Authorities, Certificate, Fingerprint, Identity};

/// Both sides speak HTTP/2 over it, and nothing else.
pub(super) const ALPN: &[u8] = b"h2";

/// The server's side of TLS. Shared by the connections and by whoever replaces what is in its files.
pub struct AgentsTls {
    /// What new handshakes are done with.
    current: RwLock<Arc<Current>>,
}

struct Current {
    /// Counts replacements, so that nothing is judged twice by the same authorities.
    generation: u64,
    config: Arc<ServerConfig>,
    /// What is sent.
    chain: Vec<CertificateDer<'static>>,
    certificate: Certificate,
    /// The authority whose certificate is sent along.
    authority: Option<Fingerprint>,
    /// None: no client is asked for a certificate.
    judge: Option<ClientJudge>,
}

/// A connection whose handshake is done.
pub struct Accepted {
    pub stream: TlsStream<TcpStream>,
    pub showing: Showing,
}

/// What a client showed, kept so that it can be judged again.
#[derive(Clone, Debug)]
pub struct Showing {
    pub shown: Shown,
    /// Empty where it was not looked at.
    chain: Arc<[CertificateDer<'static>]>,
    /// What is in those behind the leaf, as far as it can be read.
    issuers: Arc<[Certificate]>,
    /// When the handshake was done.
    at: UnixTime,
    generation: u64,
}

/// Why there is no connection.
#[derive(Debug)]
pub enum AcceptProblem {
    /// The client ended before it said anything.
    Nothing,
    /// It speaks something else. It was told so.
    NoTls(Opening),
    /// It refused our certificate, or ended the handshake for another reason.
    Alerted {
        alert: AlertDescription,
        own: Box<Certificate>,
        authority: Option<Fingerprint>,
        at: UnixTime,
    },
    Io(io::Error),
}

impl AgentsTls {
    /// # Errors
    /// The certificate's key, or an authority, is of a kind that TLS can't use.
    pub fn new(identity: Identity, authorities: Option<Authorities>) -> Result<AgentsTls, NoJudge> {
        let current = Current::new(identity, authorities)?;
        Ok(AgentsTls {
            current: RwLock::new(Arc::new(current)),
        })
    }

    /// From now on handshakes are done with these. Those that were done are for [`judge_again`](AgentsTls::judge_again).
    ///
    /// # Errors
    /// As [`new`](AgentsTls::new); what there was stays in force.
    pub fn replace(
        &self,
        identity: Identity,
        authorities: Option<Authorities>,
    ) -> Result<(), NoJudge> {
        let mut new = Current::new(identity, authorities)?;
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        new.generation = current.generation + 1;
        *current = Arc::new(new);
        Ok(())
    }

    /// The server's own certificate.
    pub fn certificate(&self) -> Certificate {
        self.current().certificate.clone()
    }

    /// Whether agents that trust this authority alone, by its fingerprint, take the server: what is shown to them brings it along, and a
    /// verifier would follow the certificate to it.
    pub fn leads_to(&self, authority: &Fingerprint) -> bool {
        let current = self.current();
        let Some(leaf) = current.chain.first() else {
            return false;
        };
        let sent = current
            .chain
            .iter()
            .find(|der| Fingerprint::of(der) == *authority);
        sent.is_some_and(|authority| {
            leads(leaf, &current.chain[1..], std::slice::from_ref(authority))
        })
    }

    /// Does the handshake. The caller limits how long it takes.
    ///
    /// # Errors
    /// There is none. What a certificate is worth is no matter of the handshake.
    pub async fn accept(&self, stream: TcpStream) -> Result<Accepted, AcceptProblem> {
        match opening::peek(&stream).await.map_err(AcceptProblem::Io)? {
            Opening::Tls => {}
            Opening::Nothing => return Err(AcceptProblem::Nothing),
            other => {
                opening::ask_for_tls(stream, other).await;
                return Err(AcceptProblem::NoTls(other));
            }
        }
        let current = self.current();
        let stream = TlsAcceptor::from(current.config.clone())
            .accept(stream)
            .await
            .map_err(|error| current.problem(error))?;
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let showing = current.look(chain);
        Ok(Accepted { stream, showing })
    }

    /// What a client showed, by the authorities of now: for a session that was let in before they were replaced. Time does not count, since
    /// nobody is cut off because their certificate ends; they will not be let in again.
    pub fn judge_again(&self, showing: &Showing) -> Shown {
        let current = self.current();
        // Without a chain there is nothing that could become better.
        if current.generation == showing.generation || showing.chain.is_empty() {
            return showing.shown.clone();
        }
        match (&current.judge, showing.shown.certificate()) {
            (Some(judge), Some(certificate)) => {
                judge.judge(&showing.chain, certificate.clone(), showing.at)
            }
            _ => Shown::Nothing,
        }
    }

    fn current(&self) -> Arc<Current> {
        self.current
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Current {
    fn new(identity: Identity, authorities: Option<Authorities>) -> Result<Current, NoJudge> {
        let chain = with_authority(&identity.chain, authorities.as_ref());
        let judge = authorities.map(ClientJudge::new).transpose()?;
        let provider = provider();
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| NoJudge(error.to_string()))?;
        let builder = match judge.is_some() {
            true => builder.with_client_cert_verifier(Arc::new(HoldsItsKey(provider))),
            false => builder.with_no_client_auth(),
        };
        let authority = authority_of(&chain);
        let mut config = builder
            .with_single_cert(chain.clone(), identity.key.clone_key())
            .map_err(|error| NoJudge(error.to_string()))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Current {
            generation: 0,
            config: Arc::new(config),
            chain,
            certificate: identity.certificate.clone(),
            authority,
            judge,
        })
    }

    fn look(&self, chain: &[CertificateDer<'static>]) -> Showing {
        let at = UnixTime::now();
        let is_bounded = is_bounded(chain);
        let shown = match (&self.judge, chain.first()) {
            (Some(judge), Some(leaf)) => match Certificate::from_der(leaf) {
                Ok(certificate) if is_bounded => judge.judge(chain, certificate, at),
                Ok(certificate) => Shown::Refused {
                    why: CertificateProblem::Invalid(format!(
                        "its file has more than {CHAIN_MAX} certificates or {CHAIN_MAX_BYTES} bytes, it needs its own and those between it and the authority"
                    )),
                    certificate,
                },
                Err(why) => Shown::Unreadable(why.to_string()),
            },
            _ => Shown::Nothing,
        };
        let is_looked_at = is_bounded && !matches!(shown, Shown::Unreadable(_));
        let chain = if is_looked_at { chain } else { &[] };
        let issuers = chain.iter().skip(1).map(|der| Certificate::from_der(der));
        Showing {
            shown,
            issuers: issuers.filter_map(Result::ok).collect(),
            chain: chain.into(),
            at,
            generation: self.generation,
        }
    }

    fn problem(&self, error: io::Error) -> AcceptProblem {
        match tls_error(&error) {
            Some(rustls::Error::AlertReceived(alert)) => AcceptProblem::Alerted {
                alert: *alert,
                own: Box::new(self.certificate.clone()),
                authority: self.authority,
                at: UnixTime::now(),
            },
            _ => AcceptProblem::Io(error),
        }
    }
}

impl Showing {
    /// All certificates that were shown and could be read, its own first.
    pub fn certificates(&self) -> impl Iterator<Item = &Certificate> {
        self.shown.certificate().into_iter().chain(&*self.issuers)
    }

    /// Of a connection without TLS.
    pub fn nothing() -> Showing {
        Showing {
            shown: Shown::Nothing,
            chain: Arc::from([]),
            issuers: Arc::from([]),
            at: UnixTime::now(),
            generation: 0,
        }
    }
}

/// rustls' own error, where it is one.
pub(super) fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Asks for a certificate, takes any, and checks that who shows it holds its key.
#[derive(Debug)]
struct HoldsItsKey(Arc<CryptoProvider>);

impl ClientCertVerifier for HoldsItsKey {
    // A client with no certificate is refused afterwards, with an explanation; so is one with a wrong one.
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    // No hint of what would do, or clients with something else show nothing at all.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

impl AcceptProblem {
    /// One word for it, to tell repeated lines from each other.
    pub fn kind(&self) -> &'static str {
        match self {
            AcceptProblem::Nothing => "nothing",
            AcceptProblem::NoTls(_) => "no_tls",
            AcceptProblem::Alerted { .. } => "alerted",
            AcceptProblem::Io(_) => "io",
        }
    }
}

impl fmt::Display for AcceptProblem {
    /// For the server's log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AcceptProblem::Nothing => f.write_str("it was closed before anything was said"),
            AcceptProblem::NoTls(opening) => write!(
                f,
                "it speaks {}, and this port wants TLS: an agent's `server` is `https://..`",
                opening.in_words()
            ),
            AcceptProblem::Alerted {
                alert,
                own,
                authority,
                at,
            } => f.write_str(&alerted(*alert, own, authority.as_ref(), moment(*at))),
            AcceptProblem::Io(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for AcceptProblem {}

#[cfg(test)]
mod tests;
