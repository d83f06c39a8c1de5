//! The agent's side of TLS: dials a server whose certificate has to come from an authority that is known and to name the host that was dialled.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ClientConfig, Resumption};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    AlertDescription, CertificateError, DigitallySignedStruct, Error, OtherError, SignatureScheme,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::listening::{ALPN, tls_error};
use super::problem::{CertificateProblem, of_server, shown};
use super::verdict::{NoJudge, ServerJudge, authority_of, is_bounded, provider, with_authority};
use super::{Authorities, Certificate, Fingerprint, Identity};

/// Whose word a server's certificate needs.
#[derive(Clone, Debug)]
pub enum Trust {
    Authorities(Authorities),
    /// The one authority with this fingerprint, which the server sends along: for the first contact of an agent that has no file yet.
    Pinned(Fingerprint),
}

/// Why there is no connection.
#[derive(Debug)]
pub enum ConnectProblem {
    /// No certificate can be for what was dialled.
    NoHost(String),
    /// What is in our own files can't be used.
    Own(NoJudge),
    /// The server's certificate is not taken.
    Certificate {
        certificate: Box<Certificate>,
        problem: CertificateProblem,
    },
    /// Its certificate is of another authority than the one that is pinned.
    OtherThanPinned(Box<OtherAuthority>),
    /// Its certificate can't be read, or its chain is too long.
    Unreadable(String),
    /// What answers speaks no TLS.
    NoTls,
    /// It ended in the middle of the handshake.
    HungUp,
    /// It ended the handshake, and says why in one word.
    Alerted(AlertDescription),
    Io(io::Error),
}

/// Whose certificate a server shows in place of one of the authority that is pinned.
#[derive(Debug)]
pub struct OtherAuthority {
    pub certificate: Certificate,
    /// Its authority's own, where the server sent that along.
    pub shown: Option<Fingerprint>,
    pub pinned: Fingerprint,
}

/// Does the handshake with a server for agents over an open socket. `identity` is shown to it. The caller limits how long that takes.
///
/// # Errors
/// Why the server is not to be talked to.
pub async fn connect<S>(
    stream: S,
    host: &str,
    trust: &Trust,
    identity: Option<&Identity>,
) -> Result<TlsStream<S>, ConnectProblem>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    connect_speaking(ALPN, stream, host, trust, identity).await
}

/// [`connect`] for another protocol, by its ALPN name.
///
/// # Errors
/// As [`connect`].
pub async fn connect_speaking<S>(
    protocol: &[u8],
    stream: S,
    host: &str,
    trust: &Trust,
    identity: Option<&Identity>,
) -> Result<TlsStream<S>, ConnectProblem>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let name =
        ServerName::try_from(host.to_owned()).map_err(|_| ConnectProblem::NoHost(shown(host)))?;
    let judging = Arc::new(Judging::new(trust).map_err(ConnectProblem::Own)?);
    let config = config(protocol, judging.clone(), trust, identity).map_err(ConnectProblem::Own)?;
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
        .map_err(|error| judging.take().unwrap_or_else(|| problem(error)))
}

fn config(
    protocol: &[u8],
    judging: Arc<Judging>,
    trust: &Trust,
    identity: Option<&Identity>,
) -> Result<ClientConfig, NoJudge> {
    let unusable = |error: Error| NoJudge(error.to_string());
    let builder = ClientConfig::builder_with_provider(judging.provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(unusable)?
        .dangerous()
        .with_custom_certificate_verifier(judging);
    let mut config = match identity {
        Some(identity) => {
            let authorities = match trust {
                Trust::Authorities(authorities) => Some(authorities),
                Trust::Pinned(_) => None,
            };
            let chain = with_authority(&identity.chain, authorities);
            builder
                .with_client_auth_cert(chain, identity.key.clone_key())
                .map_err(unusable)?
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![protocol.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}

fn problem(error: io::Error) -> ConnectProblem {
    match tls_error(&error) {
        Some(Error::AlertReceived(alert)) => ConnectProblem::Alerted(*alert),
        Some(Error::InvalidMessage(_)) => ConnectProblem::NoTls,
        _ => match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => ConnectProblem::HungUp,
            _ => ConnectProblem::Io(error),
        },
    }
}

/// Decides about the server of one handshake, and remembers what was wrong with it: rustls hands on no more than a word.
#[derive(Debug)]
struct Judging {
    provider: Arc<CryptoProvider>,
    trusted: Trusted,
    found: Mutex<Option<ConnectProblem>>,
}

enum Trusted {
    Judge(ServerJudge),
    Pinned(Fingerprint),
}

impl Judging {
    fn new(trust: &Trust) -> Result<Judging, NoJudge> {
        let trusted = match trust {
            Trust::Authorities(authorities) => Trusted::Judge(ServerJudge::new(authorities)?),
            Trust::Pinned(pin) => Trusted::Pinned(*pin),
        };
        Ok(Judging {
            provider: provider(),
            trusted,
            found: Mutex::new(None),
        })
    }

    fn judge(
        &self,
        chain: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), ConnectProblem> {
        let unreadable = |why: String| ConnectProblem::Unreadable(why);
        if !is_bounded(chain) {
            return Err(unreadable("its chain is too long".to_owned()));
        }
        let leaf = chain.first().map_or(&[][..], |leaf| leaf);
        let certificate = Certificate::from_der(leaf).map_err(|why| unreadable(why.to_string()))?;
        let judged = match &self.trusted {
            Trusted::Judge(judge) => judge.judge(chain, &certificate, host, now),
            Trusted::Pinned(pin) => match ServerJudge::pinned(chain, *pin) {
                Ok(Some(judge)) => judge.judge(chain, &certificate, host, now),
                Ok(None) => Err(CertificateProblem::UnknownAuthority {
                    shown: authority_of(chain),
                    known: vec![*pin],
                }),
                Err(why) => Err(CertificateProblem::Invalid(why.0)),
            },
        };
        judged.map_err(|problem| match (problem, &self.trusted) {
            (CertificateProblem::UnknownAuthority { shown, .. }, Trusted::Pinned(pinned)) => {
                ConnectProblem::OtherThanPinned(Box::new(OtherAuthority {
                    certificate,
                    shown,
                    pinned: *pinned,
                }))
            }
            (problem, _) => ConnectProblem::Certificate {
                certificate: Box::new(certificate),
                problem,
            },
        })
    }

    fn take(&self) -> Option<ConnectProblem> {
        self.found
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

impl ServerCertVerifier for Judging {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let chain: Vec<CertificateDer<'_>> = std::iter::once(leaf).chain(rest).cloned().collect();
        match self.judge(&chain, host, now) {
            Ok(()) => Ok(ServerCertVerified::assertion()),
            Err(problem) => {
                let error = problem.for_an_alert();
                *self.found.lock().unwrap_or_else(PoisonError::into_inner) = Some(problem);
                Err(error)
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

impl ConnectProblem {
    /// Trying again soon is of no use: somebody must change a certificate, a clock or an address first.
    pub fn needs_a_person(&self) -> bool {
        match self {
            ConnectProblem::NoHost(_)
            | ConnectProblem::Own(_)
            | ConnectProblem::Certificate { .. }
            | ConnectProblem::OtherThanPinned(_)
            | ConnectProblem::Unreadable(_) => true,
            ConnectProblem::Alerted(alert) => is_about_a_certificate(*alert),
            ConnectProblem::NoTls | ConnectProblem::HungUp | ConnectProblem::Io(_) => false,
        }
    }

    /// What the server is told: each of them an alert of its own, from which the server's log says what it can.
    fn for_an_alert(&self) -> Error {
        let why = match self {
            ConnectProblem::Certificate { problem, .. } => match problem {
                CertificateProblem::Expired { .. } => CertificateError::Expired,
                CertificateProblem::NotYet { .. } => CertificateError::NotValidYet,
                CertificateProblem::WrongUse => CertificateError::InvalidPurpose,
                CertificateProblem::UnknownAuthority { .. } => CertificateError::UnknownIssuer,
                CertificateProblem::Forged { .. } => CertificateError::BadSignature,
                CertificateProblem::WrongHost { .. } => CertificateError::NotValidForName,
                CertificateProblem::Invalid(_) => other(self),
            },
            ConnectProblem::OtherThanPinned(_) => CertificateError::UnknownIssuer,
            other_problem => other(other_problem),
        };
        Error::InvalidCertificate(why)
    }
}

fn other(problem: &ConnectProblem) -> CertificateError {
    let text: Box<dyn std::error::Error + Send + Sync> = problem.to_string().into();
    CertificateError::Other(OtherError(Arc::from(text)))
}

fn is_about_a_certificate(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::CertificateRequired
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError
    )
}

impl fmt::Debug for Trusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trusted::Judge(_) => f.write_str("Judge"),
            Trusted::Pinned(pin) => write!(f, "Pinned({pin})"),
        }
    }
}

impl fmt::Display for ConnectProblem {
    /// For the agent's log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectProblem::NoHost(host) => {
                write!(f, "`{host}` is no name and no address that a certificate could be for")
            }
            ConnectProblem::Own(why) => write!(f, "this agent's `tls` files can't be used: {why}"),
            ConnectProblem::Certificate {
                certificate,
                problem,
            } => f.write_str(&of_server(certificate, problem)),
            ConnectProblem::OtherThanPinned(other) => other.fmt(f),
            ConnectProblem::Unreadable(why) => {
                write!(f, "the server's certificate can't be read: {why}")
            }
            ConnectProblem::NoTls => f.write_str(
                "the server speaks no TLS there: write `http://` in `server`, or set `agents.tls` in the server's llmgw.yaml",
            ),
            ConnectProblem::HungUp => f.write_str(
                "the server hung up in the middle of the TLS handshake (does it listen for agents there?)",
            ),
            ConnectProblem::Alerted(alert) => {
                write!(f, "the server ended the TLS handshake: {alert:?}")
            }
            ConnectProblem::Io(error) => write!(f, "the TLS handshake: {error}"),
        }
    }
}

impl fmt::Display for OtherAuthority {
    /// A pin is part of a token: there is no file on this node to put right.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the token names the authority {}, and the server's certificate was issued by `{}`",
            self.pinned,
            shown(&self.certificate.issuer)
        )?;
        match &self.shown {
            Some(shown) => write!(f, " ({shown})")?,
            None => f.write_str(" (whose certificate was not sent)")?,
        }
        f.write_str(
            ": it is another server, or its certificate is of another authority than it enrols for; \
             make a new token with `llmgw ctl cert token` at this server, \
             or a new server.pem with `llmgw ctl cert server --ca DIR`, DIR being of the token's authority",
        )
    }
}

impl std::error::Error for ConnectProblem {}

#[cfg(test)]
mod tests;
