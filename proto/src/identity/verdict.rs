//! Whether a chain of certificates is good for what it was shown for: rustls' own verifiers decide, and facts are gathered for whoever has to explain it.

use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{CertificateError, Error, RootCertStore};

use super::certificate::is_issued_by;
use super::problem::CertificateProblem;
use super::{Authorities, Certificate, Fingerprint, Moment};

/// A leaf, those between, and the authority.
pub const CHAIN_MAX: usize = 8;
/// Of a whole chain, kept for as long as its session lasts.
pub const CHAIN_MAX_BYTES: usize = 32 << 10;

/// What a client showed of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown {
    /// No certificate, or none was asked for.
    Nothing,
    /// A certificate that one of our authorities issued, for a client, in force.
    Known(Certificate),
    Refused {
        why: CertificateProblem,
        certificate: Certificate,
    },
    /// Something that can't be read as one, and why.
    Unreadable(String),
}

/// Who decides about clients' certificates.
#[derive(Clone)]
pub struct ClientJudge {
    verifier: Arc<dyn ClientCertVerifier>,
    authorities: Authorities,
}

/// Who decides about a server's certificate.
#[derive(Clone)]
pub struct ServerJudge {
    verifier: Arc<WebPkiServerVerifier>,
    authorities: Vec<CertificateDer<'static>>,
    known: Vec<Fingerprint>,
}

/// Authorities that nothing can be verified with, in the verifier's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoJudge(pub String);

/// The one cryptography that is used, whatever else a process has installed.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

impl ClientJudge {
    /// # Errors
    /// None of the authorities can be one.
    pub fn new(authorities: Authorities) -> Result<ClientJudge, NoJudge> {
        let roots = roots(&authorities.der)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
            .build()
            .map_err(|error| NoJudge(error.to_string()))?;
        Ok(ClientJudge {
            verifier,
            authorities,
        })
    }

    /// What a client's chain is worth. `certificate` is what is in its leaf, which comes first.
    pub fn judge(
        &self,
        chain: &[CertificateDer<'_>],
        certificate: Certificate,
        now: UnixTime,
    ) -> Shown {
        let Some((leaf, rest)) = chain.split_first() else {
            return Shown::Nothing;
        };
        let verified = self.verifier.verify_client_cert(leaf, rest, now);
        // The verifier takes a certificate that says nothing of its use; one that says it is for something else is never taken.
        let verified = match verified {
            Ok(_) if certificate.is_authority || !certificate.usages.client_auth => {
                Err(Error::InvalidCertificate(CertificateError::InvalidPurpose))
            }
            verified => verified,
        };
        match verified {
            Ok(_) => Shown::Known(certificate),
            Err(error) => {
                let looked = Looked {
                    chain,
                    certificate: &certificate,
                    authorities: &self.authorities.der,
                    known: fingerprints(&self.authorities),
                    now: moment(now),
                };
                Shown::Refused {
                    why: looked.problem(&error),
                    certificate,
                }
            }
        }
    }
}

impl ServerJudge {
    /// # Errors
    /// None of the authorities can be one.
    pub fn new(authorities: &Authorities) -> Result<ServerJudge, NoJudge> {
        ServerJudge::over(authorities.der.clone(), fingerprints(authorities))
    }

    /// One that trusts the authority with this fingerprint, where the chain brings it along, and nobody where it does not.
    ///
    /// # Errors
    /// It is no authority.
    pub fn pinned(
        chain: &[CertificateDer<'_>],
        pin: Fingerprint,
    ) -> Result<Option<ServerJudge>, NoJudge> {
        let found = chain.iter().find(|der| Fingerprint::of(der) == pin);
        found
            .map(|der| ServerJudge::over(vec![der.clone().into_owned()], vec![pin]))
            .transpose()
    }

    fn over(
        authorities: Vec<CertificateDer<'static>>,
        known: Vec<Fingerprint>,
    ) -> Result<ServerJudge, NoJudge> {
        let roots = roots(&authorities)?;
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider())
            .build()
            .map_err(|error| NoJudge(error.to_string()))?;
        Ok(ServerJudge {
            verifier,
            authorities,
            known,
        })
    }

    /// Whether a server's chain is good for a host that was dialled.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn judge(
        &self,
        chain: &[CertificateDer<'_>],
        certificate: &Certificate,
        host: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), CertificateProblem> {
        let (leaf, rest) = chain
            .split_first()
            .ok_or_else(|| CertificateProblem::Invalid("there is none".to_owned()))?;
        let verified = self
            .verifier
            .verify_server_cert(leaf, rest, host, &[], now)
            .map_err(|error| match error {
                Error::InvalidCertificate(
                    CertificateError::NotValidForName
                    | CertificateError::NotValidForNameContext { .. },
                ) => CertificateProblem::WrongHost {
                    dialled: host.to_str().into_owned(),
                },
                error => Looked {
                    chain,
                    certificate,
                    authorities: &self.authorities,
                    known: self.known.clone(),
                    now: moment(now),
                }
                .problem(&error),
            });
        verified?;
        match certificate.is_authority || !certificate.usages.server_auth {
            true => Err(CertificateProblem::WrongUse),
            false => Ok(()),
        }
    }
}

/// What a verifier looked at when it said no.
struct Looked<'a> {
    chain: &'a [CertificateDer<'a>],
    certificate: &'a Certificate,
    authorities: &'a [CertificateDer<'static>],
    known: Vec<Fingerprint>,
    now: Moment,
}

impl Looked<'_> {
    /// The facts behind the verifier's error. Whatever it says, the answer is a problem: that a fact is not found makes nothing valid.
    fn problem(&self, error: &Error) -> CertificateProblem {
        // The verifier looks at dates and uses first. Of a certificate that nobody vouches for they are only what a stranger wrote.
        match self.is_of_ours() {
            true => self.fault(error),
            false => self.unknown(),
        }
    }

    /// Whether its issuers lead to one of our authorities, whatever else is wrong.
    fn is_of_ours(&self) -> bool {
        leads(&self.chain[0], &self.chain[1..], self.authorities)
    }

    fn fault(&self, error: &Error) -> CertificateProblem {
        use CertificateError as Why;
        let now = self.now;
        let Error::InvalidCertificate(why) = error else {
            return CertificateProblem::Invalid(error.to_string());
        };
        match why {
            Why::Expired | Why::ExpiredContext { .. } if self.certificate.not_after < now => {
                CertificateProblem::Expired { now }
            }
            Why::NotValidYet | Why::NotValidYetContext { .. }
                if self.certificate.not_before > now =>
            {
                CertificateProblem::NotYet { now }
            }
            Why::InvalidPurpose | Why::InvalidPurposeContext { .. } => CertificateProblem::WrongUse,
            Why::UnknownIssuer | Why::BadSignature => self.unknown(),
            _ => CertificateProblem::Invalid(error.to_string()),
        }
    }

    /// Who issued it, if none of our authorities did.
    fn unknown(&self) -> CertificateProblem {
        let (leaf, rest) = (&self.chain[0], &self.chain[1..]);
        let named = |der: &&CertificateDer<'_>| {
            Certificate::from_der(der)
                .is_ok_and(|other| other.is_authority && other.subject == self.certificate.issuer)
        };
        let sent = rest.iter().find(named);
        let issuer = rest.iter().find(|der| is_issued_by(leaf, der));
        let shown = issuer.or(sent).map(|der| Fingerprint::of(der));
        // It brings a known authority along, or names one: the signature alone is wrong.
        let is_known = shown.is_some_and(|shown| self.known.contains(&shown));
        let is_named = shown.is_none()
            && self.authorities.iter().any(|der| {
                Certificate::from_der(der).is_ok_and(|own| own.subject == self.certificate.issuer)
            });
        match is_known || is_named {
            true => CertificateProblem::Forged { authority: shown },
            false => CertificateProblem::UnknownAuthority {
                shown,
                known: self.known.clone(),
            },
        }
    }
}

/// The chain that is sent: with the authority at its end, so that a peer that does not know it can say which one it is.
pub fn with_authority(
    chain: &[CertificateDer<'static>],
    authorities: Option<&Authorities>,
) -> Vec<CertificateDer<'static>> {
    let mut sent = chain.to_vec();
    if let (Some(last), Some(authorities)) = (chain.last(), authorities) {
        // One that issued itself is an authority already.
        let is_last = is_issued_by(last, last);
        let issued = |der: &&CertificateDer<'static>| !is_last && is_issued_by(last, der);
        sent.extend(authorities.der.iter().find(issued).cloned());
    }
    sent
}

/// Whether a certificate's issuers, each the one that signed the one before it, end with one of these authorities.
pub(super) fn leads(
    leaf: &CertificateDer<'_>,
    rest: &[CertificateDer<'_>],
    authorities: &[CertificateDer<'_>],
) -> bool {
    let mut current = leaf;
    for _ in 0..CHAIN_MAX {
        if authorities.iter().any(|own| is_issued_by(current, own)) {
            return true;
        }
        let issued = |der: &&CertificateDer<'_>| *der != current && is_issued_by(current, der);
        match rest.iter().find(issued) {
            Some(issuer) => current = issuer,
            None => return false,
        }
    }
    false
}

/// The authority at the end of a chain, where it was sent along.
pub fn authority_of(chain: &[CertificateDer<'_>]) -> Option<Fingerprint> {
    let is_authority = |der: &&CertificateDer<'_>| {
        Certificate::from_der(der).is_ok_and(|certificate| certificate.is_authority)
    };
    let last = chain.get(1..)?.iter().rfind(is_authority);
    last.map(|der| Fingerprint::of(der))
}

pub fn fingerprints(authorities: &Authorities) -> Vec<Fingerprint> {
    let of = |certificate: &Certificate| certificate.fingerprint;
    authorities.certificates.iter().map(of).collect()
}

pub fn moment(time: UnixTime) -> Moment {
    Moment(i64::try_from(time.as_secs()).unwrap_or(i64::MAX))
}

/// Whether a chain is one that is looked at, and kept.
pub fn is_bounded(chain: &[CertificateDer<'_>]) -> bool {
    let bytes: usize = chain.iter().map(|der| der.len()).sum();
    chain.len() <= CHAIN_MAX && bytes <= CHAIN_MAX_BYTES
}

fn roots(authorities: &[CertificateDer<'static>]) -> Result<Arc<RootCertStore>, NoJudge> {
    let mut roots = RootCertStore::empty();
    for der in authorities {
        roots
            .add(der.clone())
            .map_err(|error| NoJudge(error.to_string()))?;
    }
    Ok(Arc::new(roots))
}

impl Shown {
    /// The certificate, whatever it is worth.
    pub fn certificate(&self) -> Option<&Certificate> {
        match self {
            Shown::Nothing | Shown::Unreadable(_) => None,
            Shown::Known(certificate) | Shown::Refused { certificate, .. } => Some(certificate),
        }
    }
}

impl fmt::Display for NoJudge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoJudge {}
