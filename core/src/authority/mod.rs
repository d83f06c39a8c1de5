//! An authority of one's own, since public ones no longer issue certificates for clients: it is made once, its key stays on one machine, and it
//! issues certificates for servers and agents.

mod issue;
mod load;

use std::fmt;
use std::path::PathBuf;

use llmgw_proto::identity::certificate::{Certificate, Validity};
use llmgw_proto::identity::{FileProblem, Usages};
use rcgen::{Issuer, KeyPair};
use rustls::pki_types::CertificateDer;

pub use issue::{Holder, Made, MadeAuthority, make};
pub(crate) use load::pem_of;
pub use load::{CERTIFICATE_FILE, KEY_FILE};

/// How long an authority is in force.
pub const AUTHORITY_DAYS: i64 = 3_650;
/// How long what it issues is, unless the authority itself ends before.
pub const LEAF_DAYS: i64 = 365;
/// Certificates are in force from somewhat before they were made: clocks differ.
pub const SKEW_SECONDS: i64 = 5 * 60;
/// An authority is older than what it issues, whatever the clocks.
const AUTHORITY_SKEW_SECONDS: i64 = 60 * 60;

/// An authority that can issue: its certificate and its key. No `Debug`: it holds a secret.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    der: CertificateDer<'static>,
    pub certificate: Certificate,
    /// PEM, for whoever is to trust what it issues: this authority, and any other that is in its file.
    pub trusted: String,
}

/// Why there is no authority, or it does not issue.
#[derive(Debug)]
pub enum AuthorityProblem {
    File(FileProblem),
    /// The key is that of none of the certificates.
    NotItsKey {
        certificate: PathBuf,
        key: PathBuf,
    },
    NotInForce {
        file: PathBuf,
        certificate: Box<Certificate>,
        validity: Validity,
    },
    /// Its certificate forbids it.
    MayNotIssue {
        file: PathBuf,
    },
    /// A certificate that is to be renewed, and what is against it.
    NotRenewed {
        file: PathBuf,
        why: NotRenewed,
    },
    NoRandom,
    /// What the library that makes certificates says.
    Make(rcgen::Error),
    /// What was made would not be accepted: the authority's name is written, or its key is of a kind, that cannot be reproduced.
    NotVerified,
}

/// Why a certificate is not renewed.
#[derive(Debug)]
pub enum NotRenewed {
    /// Another authority issued it: the issuer's name, and the one that was to renew it.
    OtherIssuer {
        issuer: String,
        authority: String,
    },
    Authority,
    /// Not of the kinds that `ctl cert` makes.
    OtherKind(Usages),
    /// A name in it that `ctl cert` does not give.
    OtherName(String),
}

impl fmt::Display for AuthorityProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AuthorityProblem::File(problem) => problem.fmt(f),
            AuthorityProblem::NotItsKey { certificate, key } => write!(
                f,
                "{}: this key is that of no authority in {}; both must come from the same `llmgw ctl cert ca` run",
                key.display(),
                certificate.display()
            ),
            AuthorityProblem::NotInForce {
                file,
                certificate,
                validity,
            } => {
                let file = file.display();
                match validity {
                    Validity::NotYet => write!(
                        f,
                        "{file}: the authority is in force from {} on, which by this machine's clock is still to come; set the clock",
                        certificate.not_before
                    ),
                    _ => write!(
                        f,
                        "{file}: the authority ended on {}, which by this machine's clock is past; make a new one with `llmgw ctl cert ca --out DIR`",
                        certificate.not_after
                    ),
                }
            }
            AuthorityProblem::MayNotIssue { file } => write!(
                f,
                "{}: the certificate's key may not sign certificates (its key usage lacks keyCertSign); make an authority with `llmgw ctl cert ca --out DIR`",
                file.display()
            ),
            AuthorityProblem::NotRenewed { file, why } => {
                write!(f, "{}: {why}", file.display())
            }
            AuthorityProblem::NoRandom => {
                f.write_str("the system gave no random bytes, nothing was made")
            }
            AuthorityProblem::Make(error) => {
                write!(f, "the certificate could not be made: {error}")
            }
            AuthorityProblem::NotVerified => f.write_str(
                "what this authority issues does not verify against it, since its name or its kind of key is an unusual one; make an authority with `llmgw ctl cert ca --out DIR`",
            ),
        }
    }
}

impl fmt::Display for NotRenewed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotRenewed::OtherIssuer { issuer, authority } => write!(
                f,
                "it was issued by `{issuer}`, not by this authority, `{authority}`; give the right one with --ca, or make a new certificate with `llmgw ctl cert`"
            ),
            NotRenewed::Authority => f.write_str(
                "it is an authority's own certificate, which is not renewed: make a new authority with `llmgw ctl cert ca --out DIR`, and trust both while certificates are exchanged",
            ),
            NotRenewed::OtherKind(usages) => write!(
                f,
                "it is for {usages}, and `llmgw ctl cert` issues certificates for one of the two; make a new one with `llmgw ctl cert server` or `agent`"
            ),
            NotRenewed::OtherName(name) => write!(
                f,
                "it is for `{name}`, which `llmgw ctl cert` gives to nobody; make a new one with `llmgw ctl cert server` or `agent`"
            ),
        }
    }
}

impl std::error::Error for AuthorityProblem {}

impl From<FileProblem> for AuthorityProblem {
    fn from(problem: FileProblem) -> AuthorityProblem {
        AuthorityProblem::File(problem)
    }
}

impl From<rcgen::Error> for AuthorityProblem {
    fn from(error: rcgen::Error) -> AuthorityProblem {
        AuthorityProblem::Make(error)
    }
}

#[cfg(test)]
mod tests;
